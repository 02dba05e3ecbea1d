"""A naive level buffer, written from the papers on Prioritized Level Replay and not from the code.

References:
    Jiang et al., Prioritized Level Replay, ICML 2021, https://arxiv.org/abs/2010.03934.
    Jiang et al., Replay-Guided Adversarial Environment Design, NeurIPS 2021,
    https://arxiv.org/abs/2110.02439, where the levels with the highest scores stay.
"""

from __future__ import annotations

import dataclasses

import numpy as np


@dataclasses.dataclass
class Level:
    """A level, its score, when it was last played (or added), and the order of arrival."""

    name: int
    score: float
    time: int
    arrival: int


class LevelBuffer:
    """Keeps the levels with the highest scores, and tells how likely each is to be played next.

    Args:
        capacity: most levels.
        temperature: beta of the papers.
        staleness: rho of the papers, the part of the draws that goes to stale levels.
        rule: ``"rank"`` or ``"proportional"``.
        count: what the clock counts: ``"batches"`` that are played, or ``"episodes"`` as in jaxued,
            which counts each level that is played or offered, one after the other.
    """

    def __init__(self, capacity, *, temperature, staleness, rule="rank", count="batches"):
        self.capacity, self.temperature, self.staleness = capacity, temperature, staleness
        self.rule, self.count = rule, count
        self.levels: dict[int, Level] = {}
        self.clock = self.arrivals = 0

    def insert(self, names, scores):
        """Offer a batch of levels: better scores of known ones count, and the lowest leave.

        A level that was known before the batch is not added again, even if another one of the batch
        took its place.
        """
        known = set(self.levels)
        rows = sorted(
            zip(names, scores, strict=True), key=lambda row: (row[0] not in known, -row[1])
        )
        for name, score in rows:
            self.clock += self.count == "episodes"
            if name in self.levels:
                self.levels[name].score = max(self.levels[name].score, score)
            elif name not in known:
                self.levels[name] = Level(name, score, self.clock, self.arrivals)
                self.arrivals += 1
                if len(self.levels) > self.capacity:
                    lowest = min(self.levels.values(), key=lambda x: (x.score, x.arrival))
                    del self.levels[lowest.name]

    def play(self, names):
        """Count a batch of levels that were drawn to be played."""
        if self.count == "batches":
            self.clock += 1
        for name in names:
            self.clock += self.count == "episodes"
            self.levels[name].time = self.clock

    def score(self, names, scores):
        """Set the scores of levels that were played; of equal rows the last counts."""
        for name, score in zip(names, scores, strict=True):
            self.levels[name].score = score

    def law(self, order) -> dict[int, float]:
        """The probability of each level; equal scores are ranked in the given order of names."""
        levels = sorted(self.levels.values(), key=lambda level: order.index(level.name))
        ranked = sorted(levels, key=lambda level: -level.score)
        weight = {
            level.name: (1 / (1 + rank) if self.rule == "rank" else level.score)
            ** (1 / self.temperature)
            for rank, level in enumerate(ranked)
        }
        stale = {level.name: float(self.clock - level.time) for level in levels}
        if not any(stale.values()):
            stale = dict.fromkeys(stale, 1.0)
        shares = [{k: v / sum(x.values()) for k, v in x.items()} for x in (weight, stale)]
        return {
            name: (1 - self.staleness) * shares[0][name] + self.staleness * shares[1][name]
            for name in weight
        }


def distance(one: dict[int, float], other: dict[int, float]) -> float:
    """The total variation between two laws: by how much any set of levels may differ."""
    names = one.keys() | other.keys()
    return 0.5 * float(np.sum([abs(one.get(n, 0.0) - other.get(n, 0.0)) for n in names]))

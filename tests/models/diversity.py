"""A naive NumPy model of a buffer that refuses what is too close to what it holds.

Like ``items.py``: written from the contract, one row and one pair at a time, in float64,
sharing no line with the library.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np


def distance(one: np.ndarray, other: np.ndarray, p: float) -> float:
    """The p-norm of the difference; the number of coordinates that differ if ``p`` is 0."""
    size = np.abs(np.asarray(one, np.float64).ravel() - np.asarray(other, np.float64).ravel())
    if p == 0:
        return float(np.count_nonzero(size))
    return float(size.max() if math.isinf(p) else (size**p).sum() ** (1 / p))


@dataclasses.dataclass
class Item:
    """A stored item: its point, its score, and its number in the order of arrival."""

    point: np.ndarray
    score: float
    number: int


class Diverse:
    """A buffer of at most ``capacity`` items, no two of the arriving ones too close.

    Args:
        capacity: Most items.
        cutoff: What a distance must exceed.
        p: Norm.
        within_batch: ``"suppress"`` or ``"greedy"``.
        active: ``"always"`` or ``"full"``.
        evictor: ``"lowest"`` score or ``"oldest"``.
    """

    def __init__(
        self,
        capacity: int,
        cutoff: float,
        p: float,
        *,
        within_batch: str = "suppress",
        active: str = "always",
        evictor: str = "lowest",
    ):
        self.capacity, self.cutoff, self.p = capacity, cutoff, p
        self.within_batch, self.active, self.evictor = within_batch, active, evictor
        self.items: list[Item] = []
        self.arrived = 0
        self.refused = {"low_score": 0, "within_batch": 0, "near_buffer": 0}
        self.rejected = 0

    @property
    def numbers(self) -> list[int]:
        """Returns the stored items by their numbers among all rows offered so far."""
        return sorted(item.number for item in self.items)

    def add(self, points: Sequence[np.ndarray], scores: Sequence[float], mask=None) -> None:
        mask = np.ones(len(points), bool) if mask is None else mask
        rows = []
        for point, score, take in zip(points, scores, mask, strict=True):
            number = self.arrived
            self.arrived += 1
            if not take:
                continue
            if math.isnan(score) or np.isnan(point).any():
                self.rejected += 1
                continue
            rows.append(Item(np.asarray(point), float(score), number))
        if self.active == "always" or len(self.items) == self.capacity:
            rows = self._filter(rows)
        # In the order in which they came.
        self.items += sorted(rows, key=lambda item: item.number)
        if self.evictor == "lowest":
            self.items.sort(key=lambda item: (item.score, item.number))
        self.items = self.items[-self.capacity :]

    def _near(self, item: Item, others: list[Item]) -> bool:
        return any(not distance(item.point, other.point, self.p) > self.cutoff for other in others)

    def _filter(self, rows: list[Item]) -> list[Item]:
        if self.evictor == "lowest" and len(self.items) == self.capacity:
            least = min(item.score for item in self.items)
            high = [item for item in rows if item.score >= least]
            self.refused["low_score"] += len(rows) - len(high)
            rows = high
        ranked = sorted(rows, key=lambda item: (-item.score, item.number))
        entering: list[Item] = []
        for place, item in enumerate(ranked):
            if self.within_batch == "suppress":
                crowded = self._near(item, ranked[:place])
                near = not crowded and self._near(item, self.items)
            else:
                near = self._near(item, self.items)
                crowded = not near and self._near(item, entering)
            self.refused["within_batch"] += crowded
            self.refused["near_buffer"] += near
            if not crowded and not near:
                entering.append(item)
        return entering

"""Naive NumPy models of the buffers and views of steps, written from the contract.

As in ``reference.py``: one step at a time, nothing clever, no line shared with the library.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.models.items import is_priority, mass, proportional


class Step:
    """One stored step; a window is known by its first one."""

    def __init__(self, env: int, place: int, data: Any):
        self.env = env
        self.place = place
        self.data = data
        self.priority: float | None = None
        self.removed = False


class TrajectoryBuffer:
    """Lists of steps, of which the oldest go; windows are found by looking everywhere.

    Args:
        num_envs: number of lists.
        length: most steps in each.
        sequence_length: steps in a window.
        period: a window starts where the step's place in its ring is a multiple of it.
        alpha: priority exponent, or ``None`` for uniform sampling.
        initial_priority: smallest default priority of a window.
        epsilon: added to a priority before the exponent.
        uniform_mix: share of draws made uniformly.
    """

    def __init__(
        self,
        num_envs: int,
        length: int,
        sequence_length: int,
        period: int = 1,
        *,
        alpha: float | None = None,
        initial_priority: float = 1.0,
        epsilon: float = 0.0,
        uniform_mix: float = 0.0,
    ):
        self.length = length
        self.sequence_length = sequence_length
        self.period = period
        self.alpha = alpha
        self.initial_priority = initial_priority
        self.epsilon = epsilon
        self.uniform_mix = uniform_mix
        self.rings: list[list[Step]] = [[] for _ in range(num_envs)]
        self.places = [itertools.cycle(range(length)) for _ in range(num_envs)]
        self.adds = 0
        self.rejected = 0

    @property
    def size(self) -> int:
        return sum(len(ring) for ring in self.rings)

    @property
    def windows(self) -> list[list[Step]]:
        """All legal windows, in the order of their slots."""
        found = [
            ring[i : i + self.sequence_length]
            for ring in self.rings
            for i in range(len(ring) - self.sequence_length + 1)
            if ring[i].place % self.period == 0 and not ring[i].removed
        ]
        return sorted(found, key=lambda window: self.slot(window[0]))

    def slot(self, start: Step) -> int:
        return start.env * (self.length // self.period) + start.place // self.period

    def add(self, rows: Sequence[Sequence[Any]], priority=None, mask=None) -> None:
        """Append ``rows[env][t]``; a row's priority is that of the window it completes."""
        default = max([self.initial_priority, *(w[0].priority for w in self.windows)])
        for env, row in enumerate(rows):
            for t, data in enumerate(row):
                if mask is not None and not mask[env][t]:
                    continue
                value = default
                if priority is not None and is_priority(priority[env][t]):
                    value = float(priority[env][t])
                elif priority is not None:
                    self.rejected += 1
                ring = self.rings[env]
                ring.append(Step(env, next(self.places[env]), data))
                del ring[: -self.length]
                self.adds += 1
                self.complete(ring, value)

    def complete(self, ring: list[Step], value: float) -> None:
        """Set the priority of the window that the newest step completes."""
        if len(ring) >= self.sequence_length:
            ring[-self.sequence_length].priority = value

    def is_live(self, start: Step | None) -> bool:
        """Returns whether the window that starts with this very step is still whole."""
        return start is not None and any(window[0] is start for window in self.windows)

    def update_priority(self, starts: Sequence[Step | None], priority, mask=None) -> None:
        """Set priorities row by row: stale rows are dropped, bad ones of live windows counted."""
        mask = np.ones(len(starts), bool) if mask is None else mask
        for start, value, take in zip(starts, priority, mask, strict=True):
            if not take or start is None or not self.is_live(start):
                continue
            if is_priority(value):
                start.priority = float(value)
            else:
                self.rejected += 1

    def remove(self, starts: Sequence[Step | None], mask) -> int:
        """Remove live windows row by row, whose steps stay; returns how many left."""
        before = len(self.windows)
        for start, take in zip(starts, mask, strict=True):
            if take and start is not None and self.is_live(start):
                start.removed = True
        return before - len(self.windows)

    def numbers_of(self, start: Step) -> list[Any]:
        """Returns the data of the steps of a live window."""
        [window] = [window for window in self.windows if window[0] is start]
        return [step.data for step in window]

    def clear(self) -> None:
        """Forget all steps and begin again at the first place."""
        self.rings = [[] for _ in self.rings]
        self.places = [itertools.cycle(range(self.length)) for _ in self.rings]

    def probabilities(self) -> list[float]:
        """Probability that one draw (or the first draw) is each of ``windows``."""
        if self.alpha is None:
            return proportional(np.ones(len(self.windows))).tolist()
        masses = [mass(w[0].priority, self.alpha, self.epsilon) for w in self.windows]
        return proportional(masses, self.uniform_mix).tolist()


def n_step(reward, terminated, truncated, start: int, n: int, discount: float):
    """Reward sum, what the bootstrapped value counts, and where it lies, for one start."""
    total = 0.0
    for t in range(start, start + n):
        total += discount ** (t - start) * float(reward[t])
        if terminated[t]:
            return total, 0.0, t + 1
        if truncated[t]:
            break
    return total, discount ** (t + 1 - start), t + 1

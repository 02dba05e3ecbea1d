"""Naive NumPy models of what jaxbuf promises, written from the contract and not from the code.

Everything here is O(capacity) or worse, computed in float64, one item at a time, and shares no line
with the library. A disagreement with one of these models is a bug in one of the two.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

SMALLEST_MASS = float(np.finfo(np.float32).tiny)
LARGEST_MASS = 2.0**96


class SegmentTree:
    """A flat array that answers what a segment tree answers.

    Args:
        capacity: number of leaves.
        ops: ``"sum"``, ``"min"``, ``"max"``, ``"min_positive"``: the reductions to keep.
    """

    def __init__(self, capacity: int, ops: Sequence[str] = ("sum",)):
        unset = {"min": np.inf, "max": -np.inf}.get(ops[0], 0.0) if len(ops) == 1 else 0.0
        self.values = np.full(capacity, unset, np.float64)

    def set(self, index, value) -> None:
        """Write leaves one row after the other, so the last of several duplicates stays."""
        for i, v in zip(index, value, strict=True):
            if 0 <= i < len(self.values):
                self.values[i] = v

    def reduce(self, op: str, start: int = 0, stop: int | None = None) -> float:
        """The operation over ``[start, stop)``; the neutral element when that is empty."""
        part = self.values[max(start, 0) : stop]
        if op == "sum":
            return float(part.sum())
        if op == "min_positive":
            return float(min(part[part > 0], default=0.0))
        if op == "min":
            return float(min(part, default=np.inf))
        return float(max(part, default=-np.inf))

    def nnz(self) -> int:
        """Number of leaves that are not zero."""
        return int(np.count_nonzero(self.values))

    def query(self, prefix: float) -> int:
        """The smallest ``i`` with ``prefix < p_0 + ... + p_i``."""
        running = 0.0
        for i, value in enumerate(self.values):
            running += value
            if prefix < running:
                return i
        raise ValueError(f"prefix {prefix} is not below the total {running}")


class Queue:
    """A list that hands out its first items, and refuses items that do not fit.

    Args:
        capacity: most items that wait.
    """

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.waiting: list[Any] = []
        self.adds = self.rejected = self.taken = 0

    def add(self, rows: Sequence[Any], mask: Sequence[bool]) -> list[bool]:
        """Append rows in order; which of them were taken."""
        accepted = []
        for row, offered in zip(rows, mask, strict=True):
            fits = offered and len(self.waiting) < self.capacity
            if fits:
                self.waiting.append(row)
            self.adds += fits
            self.rejected += offered and not fits
            accepted.append(fits)
        return accepted

    def take(self, count: int) -> list[Any]:
        """The oldest items, which no longer wait."""
        taken, self.waiting = self.waiting[:count], self.waiting[count:]
        self.taken += len(taken)
        return taken

    def clear(self) -> None:
        """Forget what waits; counts go on."""
        self.waiting = []


def is_priority(value: float) -> bool:
    """Returns whether a buffer accepts a priority: it must be finite and at least 0."""
    return bool(np.isfinite(value) and value >= 0)


def mass(priority: float, alpha: float, epsilon: float) -> float:
    """``(priority + epsilon) ** alpha`` with ``0 ** 0 = 0``, clipped as the contract says."""
    base = float(priority) + float(epsilon)
    if base == 0.0:
        return 0.0
    with np.errstate(over="ignore", under="ignore"):
        return float(np.clip(np.float64(base) ** alpha, SMALLEST_MASS, LARGEST_MASS))


def proportional(masses, uniform_mix: float = 0.0) -> np.ndarray:
    """Probability of each live item from its mass; uniform when every mass is zero.

    Args:
        masses: ``[n]``, one for each live item.
        uniform_mix: share of draws made uniformly over the live items.

    Returns:
        ``[n]`` float64, summing to one (or empty).
    """
    masses = np.asarray(masses, np.float64)
    if not len(masses):
        return masses
    uniform = np.full(len(masses), 1.0 / len(masses))
    if masses.sum() == 0.0:
        return uniform
    return (1.0 - uniform_mix) * masses / masses.sum() + uniform_mix * uniform


def importance_weights(
    drawn: Sequence[float],
    everyone: Sequence[float],
    beta: float,
    normalize: str | None,
) -> np.ndarray:
    """Importance weights of drawn items in float64.

    Args:
        drawn: ``[B]`` probability of each drawn item.
        everyone: ``[n]`` probability of each live item now.
        beta: exponent.
        normalize: ``"batch"``, ``"buffer"``, ``"mean"`` or ``None``.

    Returns:
        ``[B]`` weights.
    """
    drawn = np.asarray(drawn, np.float64)
    everyone = np.asarray(everyone, np.float64)
    if normalize == "mean":
        return (drawn * np.count_nonzero(everyone)) ** -beta
    weights = (drawn * len(everyone)) ** -beta
    if normalize == "batch":
        return weights / weights.max()
    if normalize == "buffer":
        return weights / ((everyone[everyone > 0] * len(everyone)) ** -beta).max()
    return weights


def successive_law(masses: Sequence[float], draws: int) -> dict[tuple[int, ...], float]:
    """Exact law of ordered draws without replacement, each proportional to what is left."""
    masses = np.asarray(masses, np.float64)
    law = {}
    for order in itertools.permutations(range(len(masses)), draws):
        probability, left = 1.0, masses.sum()
        for i in order:
            if masses[i] == 0.0:
                probability = 0.0
                break
            probability *= masses[i] / left
            left -= masses[i]
        law[order] = float(probability)
    return law


def effective_sample_size(masses: Sequence[float]) -> float:
    """Kish's effective sample size ``(sum m) ** 2 / sum m ** 2``."""
    masses = np.asarray(masses, np.float64)
    return float(masses.sum() ** 2 / (masses**2).sum())


class Item:
    """One stored item. Its identity is its generation: a handle is live while it is in its slot."""

    def __init__(self, index: int, data: Any, priority: float):
        self.index = index
        self.data = data
        self.priority = priority


class ItemBuffer:
    """A ring of slots that evicts the oldest, with priorities when ``alpha`` is given.

    Args:
        capacity: number of slots.
        alpha: priority exponent, or ``None`` for uniform sampling.
        initial_priority: smallest default priority of a new item.
        epsilon: added to a priority before the exponent.
        uniform_mix: share of draws made uniformly over live slots.
        stratified: accepted and ignored: it leaves every probability as it is.
        replacement: whether one batch may hold an item twice.
    """

    def __init__(
        self,
        capacity: int,
        *,
        alpha: float | None = None,
        initial_priority: float = 1.0,
        epsilon: float = 0.0,
        uniform_mix: float = 0.0,
        stratified: bool = True,
        replacement: bool = True,
    ):
        del stratified
        self.capacity = capacity
        self.alpha = alpha
        self.initial_priority = initial_priority
        self.epsilon = epsilon
        self.uniform_mix = uniform_mix
        self.replacement = replacement
        self.slots: list[Item | None] = [None] * capacity
        self.position = 0
        self.adds = 0
        self.rejected = 0

    @property
    def live(self) -> list[Item]:
        """Live items in slot order."""
        return [item for item in self.slots if item is not None]

    @property
    def size(self) -> int:
        return len(self.live)

    def add(self, rows: Sequence[Any], priority=None, mask=None) -> list[Item | None]:
        """Add rows in order; one refused or masked out is ``None`` in the result."""
        mask = np.ones(len(rows), bool) if mask is None else mask
        default = max([self.initial_priority, *(item.priority for item in self.live)])
        entered: list[Item | None] = []
        for row, data in enumerate(rows):
            value = default if priority is None else float(priority[row])
            if not mask[row]:
                entered.append(None)
                continue
            if not is_priority(value):
                self.rejected += 1
                entered.append(None)
                continue
            index = self.position % self.capacity
            item = Item(index, data, value)
            self.slots[index] = item
            self.position += 1
            self.adds += 1
            entered.append(item)
        return entered

    def is_live(self, item: Item | None) -> bool:
        """Returns whether this very item is still stored."""
        return item is not None and self.slots[item.index] is item

    def update_priority(self, items: Sequence[Item | None], priority, mask=None) -> None:
        """Set priorities row by row: stale rows are dropped, bad ones of live items counted."""
        mask = np.ones(len(items), bool) if mask is None else mask
        for item, value, take in zip(items, priority, mask, strict=True):
            if not take or item is None or not self.is_live(item):
                continue
            if is_priority(value):
                item.priority = float(value)
            else:
                self.rejected += 1

    def remove(self, items: Sequence[Item | None], mask) -> int:
        """Empty the slots of live items row by row; returns how many left."""
        before = self.size
        for item, take in zip(items, mask, strict=True):
            if take and item is not None and self.is_live(item):
                self.slots[item.index] = None
        return before - self.size

    def numbers_of(self, item: Item) -> list[Any]:
        """Returns the data that a change of a field of this item reaches."""
        return [item.data]

    def clear(self) -> None:
        """Forget every item; handles to them stay stale."""
        self.slots = [None] * self.capacity

    def masses(self) -> np.ndarray:
        """``[size]`` masses of the live items in slot order."""
        if self.alpha is None:
            return np.ones(self.size)
        return np.array([mass(item.priority, self.alpha, self.epsilon) for item in self.live])

    def probabilities(self) -> dict[Item, float]:
        """Exact probability that one draw (or the first draw) is each live item."""
        share = proportional(self.masses(), 0.0 if self.alpha is None else self.uniform_mix)
        return dict(zip(self.live, share.tolist(), strict=True))

    def drawable(self) -> int:
        """Number of items with a positive probability."""
        return sum(probability > 0 for probability in self.probabilities().values())

    def valid_rows(self, batch_size: int) -> int:
        """Number of valid rows in a sample of this size."""
        if self.replacement:
            return batch_size if self.size else 0
        return min(batch_size, self.drawable())

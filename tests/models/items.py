"""Naive NumPy models of what jaxbuf promises, written from the contract and not from the code.

Everything here is O(capacity) or worse, computed in float64, one item at a time, and shares no line
with the library. A disagreement with one of these models is a bug in one of the two.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

SMALLEST_MASS = float(np.finfo(np.float32).tiny)
LARGEST_MASS = 2.0**96


class SegmentTree:
    """A flat array that answers what a segment tree answers."""

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
    """A list that hands out its first items, and refuses items that do not fit."""

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
    """Probability of each live item from its mass; uniform when every mass is zero."""
    masses = np.asarray(masses, np.float64)
    if not len(masses):
        return masses
    uniform = np.full(len(masses), 1.0 / len(masses))
    if masses.sum() == 0.0:
        return uniform
    return (1.0 - uniform_mix) * masses / masses.sum() + uniform_mix * uniform


def law_of(sampler, priorities: Sequence[float]) -> tuple[np.ndarray, list[float]]:
    """The law of one draw, and the masses of which it is made, by the options of a sampler."""
    if not sampler.uses_priority:
        return proportional([1.0] * len(priorities)), [1.0] * len(priorities)
    masses = [mass(priority, sampler.alpha, sampler.epsilon) for priority in priorities]
    return proportional(masses, sampler.uniform_mix), masses


def importance_weights(
    drawn: Sequence[float], everyone: Sequence[float], beta: float, normalize: str | None
) -> np.ndarray:
    """Importance weights of items with the probabilities ``drawn``, of all those there are now."""
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
    """One stored item; a handle to it is good for as long as it is live."""

    def __init__(self, number: int, data: Any, priority: float, score: float, made: tuple):
        self.number = number
        self.data = data
        self.priority = priority
        self.score = score
        self.version, self.session = made
        self.index = self.uses = 0
        self.live = False


class ItemBuffer:
    """A list of items, of which the oldest leave, or the ``lowest`` scores, and then the older.

    Without ``alpha`` all are drawn alike; the options are those of the library, ``limits`` those of
    ``Freshness``, and the ``filter`` is a ``Near``.
    """

    def __init__(
        self,
        capacity: int,
        *,
        alpha: float | None = None,
        initial_priority: float = 1.0,
        epsilon: float = 0.0,
        uniform_mix: float = 0.0,
        lowest: bool = False,
        limits: tuple | None = None,
        filter: Any = None,  # noqa: A002
    ):
        self.capacity = capacity
        self.alpha = alpha
        self.initial_priority = initial_priority
        self.epsilon = epsilon
        self.uniform_mix = uniform_mix
        self.lowest = lowest
        self.limits = Limits(*(limits or (None, None, ">=")))
        self.filter = filter
        # Of each slot that was written, what came last; that may be gone.
        self.places: list[Item] = []
        self.offered = self.position = self.adds = self.rejected = 0
        self.refused_stale = self.retired_used = self.retired_stale = self.removed = 0

    @property
    def live(self) -> list[Item]:
        """Live items in slot order."""
        return sorted((item for item in self.places if item.live), key=lambda item: item.index)

    @property
    def size(self) -> int:
        return len(self.live)

    def add(
        self, rows: Sequence[Any], priority=None, mask=None, score=None, version=None, session=None
    ) -> list[Item | None]:
        """Add rows in order; one refused or masked out is ``None`` in the result."""
        default = max([self.initial_priority, *(item.priority for item in self.live)])
        entered: list[Item | None] = []
        for row, data in enumerate(rows):
            item = Item(
                self.offered,
                data,
                default if priority is None else float(priority[row]),
                0.0 if score is None else float(score[row]),
                (
                    self.limits.version if version is None else int(version[row]),
                    self.limits.session if session is None else int(session[row]),
                ),
            )
            self.offered += 1
            item.live = mask is None or bool(mask[row])
            # What refuses a row first counts it.
            if item.live and (math.isnan(item.score) or not is_priority(item.priority)):
                self.rejected += 1
                item.live = False
            if item.live and self.limits.refuses(item):
                self.refused_stale += 1
                item.live = False
            if item.live and self.filter and np.isnan(data["point"]).any():
                self.rejected += 1
                item.live = False
            entered.append(item if item.live else None)
        if self.filter is not None:
            chosen = self.filter.choose([item for item in entered if item], self)
            entered = [item if item in chosen else None for item in entered]
        self.place([item for item in entered if item])
        return entered

    def place(self, items: list[Item]) -> None:
        """Let items in; others leave for them."""
        for item in items:
            item.index = 0 if self.lowest else self.position % self.capacity
            self.position += 1
        self.adds += len(items)
        every = self.places + items
        if self.lowest:
            every.sort(key=lambda item: (item.live, item.score, item.number))
        for item in every[: -self.capacity]:
            item.live = False
        self.places = every[-self.capacity :]

    def is_live(self, item: Item | None) -> bool:
        """Returns whether this very item is still stored."""
        return item is not None and item.live

    def named(self, items, mask, *values):
        """The live items of rows that the mask takes, each with its values."""
        mask = np.ones(len(items), bool) if mask is None else mask
        rows = zip(items, *values, strict=True)
        return [row for row, take in zip(rows, mask, strict=True) if take and self.is_live(row[0])]

    def update_priority(self, items: Sequence[Item | None], priority, mask=None) -> None:
        """Set priorities row by row: stale rows are dropped, bad ones of live items counted."""
        for item, value in self.named(items, mask, priority):
            if is_priority(value):
                item.priority = float(value)
            else:
                self.rejected += 1

    def update_score(self, items: Sequence[Item | None], score, mask=None) -> None:
        for item, value in self.named(items, mask, score):
            if math.isnan(value):
                self.rejected += 1
            else:
                item.score = float(value)

    def remove(self, items: Sequence[Item | None], mask=None) -> int:
        """Empty the slots of live items; returns how many left."""
        gone = self.take_out({row[0] for row in self.named(items, mask)})
        self.removed += gone
        return gone

    def take_out(self, items) -> int:
        """The slots stay empty until their turn comes, or under ``lowest`` are filled first."""
        for item in items:
            item.live = False
        return len(items)

    def mark_used(self, items: Sequence[Item | None], mask=None) -> None:
        """All uses of a batch count before anything retires."""
        for (item,) in self.named(items, mask):
            item.uses += 1
        self.retired_used += self.take_out([x for x in self.live if self.limits.is_used_up(x)])

    def set_version(self, version: int, session: int) -> None:
        self.limits.version, self.limits.session = version, session
        self.retired_stale += self.take_out([x for x in self.live if self.limits.refuses(x)])

    def numbers_of(self, item: Item) -> list[Any]:
        """Returns the numbers of what a change of a field of this item reaches."""
        return [item.data["number"]]

    def clear(self) -> None:
        """Forget every item; handles to them stay stale."""
        self.take_out(self.places)
        self.places, self.position = [], 0

    def masses(self) -> np.ndarray:
        """``[size]`` masses of the live items in slot order."""
        if self.alpha is None:
            return np.ones(self.size)
        return np.array([mass(item.priority, self.alpha, self.epsilon) for item in self.live])

    def probabilities(self) -> dict[Item, float]:
        """Exact probability that one draw (or the first draw) is each live item."""
        share = proportional(self.masses(), 0.0 if self.alpha is None else self.uniform_mix)
        return dict(zip(self.live, share.tolist(), strict=True))


class Limits:
    """Limits on the uses and the staleness of items, or of steps."""

    def __init__(self, max_use: int | None, max_staleness: int | None, comparison: str):
        self.max_use, self.max_staleness, self.comparison = max_use, max_staleness, comparison
        self.version = self.session = 0

    def refuses(self, item) -> bool:
        """Returns whether something is of another session than the learner's, or too stale."""
        if item.session != self.session:
            return True
        behind = self.version - item.version
        most = math.inf if self.max_staleness is None else self.max_staleness
        return behind >= most if self.comparison == ">=" else behind > most

    def is_used_up(self, item) -> bool:
        return self.max_use is not None and item.uses >= self.max_use


def distance(one: np.ndarray, other: np.ndarray, p: float) -> float:
    """The p-norm of the difference; the number of coordinates that differ if ``p`` is 0."""
    size = np.abs(np.asarray(one, np.float64).ravel() - np.asarray(other, np.float64).ravel())
    if p == 0:
        return float(np.count_nonzero(size))
    return float(size.max() if math.isinf(p) else (size**p).sum() ** (1 / p))


class Near:
    """Refuses rows that are too close to what is held, or to each other, as ``Diversity`` does."""

    def __init__(
        self,
        cutoff: float,
        p: float,
        within_batch: str = "suppress",
        active: str = "always",
        keep: str = "first",
    ):
        self.cutoff, self.p, self.keep, self.replaced = cutoff, p, keep, 0
        self.within_batch, self.active = within_batch, active
        self.refused = {"low_score": 0, "within_batch": 0, "near_buffer": 0}

    def choose(self, rows: list[Item], buffer: ItemBuffer) -> list[Item]:
        held = buffer.live
        full = len(held) == buffer.capacity
        if self.active == "full" and not full:
            return rows
        if buffer.lowest and full:
            high = [item for item in rows if item.score >= min(item.score for item in held)]
            self.refused["low_score"] += len(rows) - len(high)
            rows = high
        ranked = sorted(rows, key=lambda item: (-item.score, item.number))
        entering: list[Item] = []
        for place, item in enumerate(ranked):
            above = held
            if self.keep == "best":
                above = [other for other in held if other.score >= item.score]
            if self.within_batch == "suppress":
                crowded = self.near(item, ranked[:place])
                near = not crowded and self.near(item, above)
            else:
                near = self.near(item, above)
                crowded = not near and self.near(item, entering)
            self.refused["within_batch"] += crowded
            self.refused["near_buffer"] += near
            if not crowded and not near:
                entering.append(item)
        if self.keep == "best":
            self.replaced += buffer.take_out([x for x in held if self.near(x, entering)])
        return entering

    def near(self, item: Item, others: list[Item]) -> bool:
        points = item.data["point"], [other.data["point"] for other in others]
        return any(not distance(points[0], other, self.p) > self.cutoff for other in points[1])

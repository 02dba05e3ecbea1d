"""Naive models of buffers whose contents are changed after they were stored.

Like ``items.py``: written from the contract, one item at a time, sharing no line with the
library.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any


class Item:
    """A stored item, or step: known by its identity for as long as it is there."""

    def __init__(self, number: int, data: dict[str, Any], score: float = 0.0):
        self.number, self.data, self.score = number, dict(data), score
        self.removed = False


class Items:
    """Items of which the oldest, or those with the lowest scores, make room.

    Args:
        capacity: The number of slots.
        lowest: Whether items with the lowest scores make room, and removed ones before them.
    """

    def __init__(self, capacity: int, lowest: bool = False):
        self.capacity, self.lowest = capacity, lowest
        self.slots: list[Item] = []
        self.arrivals = self.rejected = self.removed = 0

    @property
    def live(self) -> list[Item]:
        return [item for item in self.slots if not item.removed]

    def holds(self, item: Item | None) -> bool:
        return item is not None and item in self.live

    def insert(self, rows: Sequence[dict[str, Any]], score, mask) -> list[Item | None]:
        """Returns the item of each row; None for a row that was not stored, or not for long."""
        new: list[Item | None] = []
        for data, value, take in zip(rows, score, mask, strict=True):
            if take and math.isnan(value):
                self.rejected += 1
            if not take or math.isnan(value):
                new.append(None)
                continue
            new.append(Item(self.arrivals, data, float(value)))
            self.arrivals += 1
        self.slots += [item for item in new if item is not None]
        if self.lowest:
            self.slots.sort(key=lambda item: (not item.removed, item.score, item.number))
        self.slots = self.slots[-self.capacity :]
        return [item if item in self.slots else None for item in new]

    def set_field(self, items, name: str, values, mask) -> None:
        for item, value, take in zip(items, values, mask, strict=True):
            if take and self.holds(item):
                item.data[name] = value

    def update_score(self, items, scores, mask) -> None:
        for item, score, take in zip(items, scores, mask, strict=True):
            if not take or not self.holds(item):
                continue
            if math.isnan(score):
                self.rejected += 1
            else:
                item.score = float(score)

    def remove(self, items, mask) -> None:
        for item, take in zip(items, mask, strict=True):
            if take and self.holds(item):
                item.removed = True
                self.removed += 1


class Windows:
    """Rings of steps; a window is known by its first step.

    Args:
        num_envs: The number of rings.
        length: The number of steps of a ring.
        sequence_length: The number of steps of a window.
        period: A window starts at places that are multiples of it.
    """

    def __init__(self, num_envs: int, length: int, sequence_length: int, period: int = 1):
        self.length, self.sequence_length, self.period = length, sequence_length, period
        self.rings: list[list[Item]] = [[] for _ in range(num_envs)]
        self.count = [0] * num_envs
        self.removed = 0

    def add(self, rows: Sequence[Sequence[dict[str, Any]]]) -> None:
        for env, row in enumerate(rows):
            for data in row:
                self.rings[env].append(Item(self.count[env], data))
                self.count[env] += 1
            del self.rings[env][: -self.length]

    def window(self, first: Item) -> list[Item]:
        """Returns the steps of a window; fewer if it is not complete, or no longer."""
        [ring] = [ring for ring in self.rings if first in ring] or [[]]
        at = ring.index(first) if first in ring else 0
        return ring[at : at + self.sequence_length]

    @property
    def live(self) -> list[Item]:
        """The first steps of the windows that can be drawn."""
        starts = [
            step
            for ring in self.rings
            for step in ring
            if step.number % self.length % self.period == 0
        ]
        return [
            step
            for step in starts
            if len(self.window(step)) == self.sequence_length and not step.removed
        ]

    def holds(self, first: Item | None) -> bool:
        return first is not None and first in self.live

    def set_field(self, firsts, name: str, values, mask) -> None:
        """``values`` and ``mask`` have a value for each step of each window."""
        for first, row, takes in zip(firsts, values, mask, strict=True):
            if not self.holds(first):
                continue
            for step, value, take in zip(self.window(first), row, takes, strict=True):
                if take:
                    step.data[name] = value

    def remove(self, firsts, mask) -> None:
        for first, take in zip(firsts, mask, strict=True):
            if take and self.holds(first):
                first.removed = True
                self.removed += 1

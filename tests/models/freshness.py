"""A naive NumPy model of a buffer whose items retire by use and by staleness.

Like ``items.py``: written from the contract, one item at a time, sharing no line with the
library.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass
class Item:
    """A stored item, its slot, and its uses."""

    number: int
    slot: int
    version: int
    uses: int = 0
    gone: bool = False


class Fresh:
    """A ring of slots; retired items keep their slot until its turn comes.

    Args:
        capacity: Slots.
        max_use: Uses after which an item retires, or None.
        max_staleness: Limit of staleness, or None.
        comparison: ``">="`` or ``">"``.
    """

    def __init__(
        self, capacity: int, max_use: int | None, max_staleness: int | None, comparison: str
    ):
        self.capacity, self.max_use = capacity, max_use
        self.max_staleness, self.comparison = max_staleness, comparison
        self.slots: list[Item | None] = [None] * capacity
        self.position = self.version = self.session = self.offered = 0
        self.refused_stale = self.retired_used = self.retired_stale = 0

    def is_stale(self, version: int) -> bool:
        if self.max_staleness is None:
            return False
        behind = self.version - version
        return behind > self.max_staleness or (
            behind == self.max_staleness and self.comparison == ">="
        )

    @property
    def live(self) -> list[Item]:
        """Live items in the order of their slots."""
        return [item for item in self.slots if item is not None and not item.gone]

    def add(self, versions: Sequence[int], sessions: Sequence[int], mask: Sequence[bool]) -> None:
        for version, session, take in zip(versions, sessions, mask, strict=True):
            number, self.offered = self.offered, self.offered + 1
            if not take:
                continue
            if session != self.session or self.is_stale(version):
                self.refused_stale += 1
                continue
            slot = self.position % self.capacity
            self.slots[slot] = Item(number, slot, int(version))
            self.position += 1

    def holds(self, number: int) -> Item | None:
        return next((item for item in self.live if item.number == number), None)

    def mark_used(self, numbers: Sequence[int]) -> None:
        """All uses of a batch count before anything retires."""
        items = [item for item in map(self.holds, numbers) if item is not None]
        for item in items:
            item.uses += 1
        for item in items:
            if self.max_use is not None and item.uses >= self.max_use and not item.gone:
                item.gone = True
                self.retired_used += 1

    def set_version(self, version: int, session: int | None = None) -> None:
        other = session is not None and session != self.session
        self.session = self.session if session is None else session
        self.version = version
        for item in self.live:
            if other or self.is_stale(item.version):
                item.gone = True
                self.retired_stale += 1


class FreshWindows:
    """Rings of steps whose windows retire, each as stale as its first step.

    Args:
        num_envs: Rings.
        length: Steps that a ring holds.
        sequence_length: Steps in a window.
        limits: ``max_use``, ``max_staleness`` and ``comparison``, as for ``Fresh``.
    """

    def __init__(self, num_envs: int, length: int, sequence_length: int, *limits):
        self.rings: list[list[Item]] = [[] for _ in range(num_envs)]
        self.length, self.sequence_length = length, sequence_length
        self.rule = Fresh(0, *limits)
        self.session = 0
        self.refused_stale = self.retired_used = self.retired_stale = 0

    def add(self, numbers, versions, sessions, mask) -> None:
        for ring, *rows in zip(self.rings, numbers, versions, sessions, mask, strict=True):
            for number, version, session, take in zip(*rows, strict=True):
                if not take:
                    continue
                # Where an item of the other model has its slot, a step has its session; one of
                # another than the learner's is none that ever comes.
                known = int(session) if session == self.session else -1
                ring.append(Item(int(number), known, int(version)))
                if len(ring) >= self.sequence_length:
                    first = ring[-self.sequence_length]
                    first.gone = self.is_old(first)
                    self.refused_stale += first.gone
            del ring[: -self.length]

    def is_old(self, first: Item) -> bool:
        return first.slot != self.session or self.rule.is_stale(first.version)

    @property
    def live(self) -> dict[int, Item]:
        """The first steps of windows that can be drawn, by number."""
        windows = [ring[: max(len(ring) - self.sequence_length + 1, 0)] for ring in self.rings]
        return {first.number: first for ring in windows for first in ring if not first.gone}

    def mark_used(self, numbers: Sequence[int]) -> None:
        live = self.live
        for number in numbers:
            live[number].uses += 1
        for first in live.values():
            if self.rule.max_use is not None and first.uses >= self.rule.max_use:
                first.gone = True
                self.retired_used += 1

    def set_version(self, version: int, session: int) -> None:
        self.rule.version, self.session = version, session
        for first in self.live.values():
            if self.is_old(first):
                first.gone = True
                self.retired_stale += 1

"""A naive NumPy model of a buffer whose items retire by use and by staleness.

Like ``tests/reference.py``: written from the contract, one item at a time, sharing no line with the
library.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass
class Item:
    """What is held, where, and what became of it."""

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

    def add(self, versions: Sequence[int], mask: Sequence[bool]) -> None:
        for version, take in zip(versions, mask, strict=True):
            number, self.offered = self.offered, self.offered + 1
            if not take:
                continue
            if self.is_stale(version):
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

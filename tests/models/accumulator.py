"""Naive NumPy models of what assembles rows into items, written from the contract.

As in ``reference.py``: one row at a time, nothing clever, no line shared with the library.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class Accumulator:
    """A list of rows for each owner, and a list of complete items that wait."""

    def __init__(self, owners: int, length: int, per_add: int, waiting: int):
        self.length = length
        self.per_add = per_add
        self.room = waiting
        self.open: list[list[Any]] = [[] for _ in range(owners)]
        self.line: list[list[Any]] = []
        self.complete = self.cut = self.refused = self.dropped = 0

    def push(self, owner: int, row: Any, ends: bool = False, begins: bool = False) -> None:
        """One row of one owner."""
        if begins and self.open[owner]:
            self.open[owner] = []
            self.dropped += 1
        self.open[owner].append(row)
        full = len(self.open[owner]) == self.length
        if not ends and not full:
            return
        self.complete += 1
        self.cut += full and not ends
        if len(self.line) < self.room:
            self.line.append(self.open[owner])
        else:
            self.refused += 1
        self.open[owner] = []

    def add(self, rows: Sequence[Sequence[Any]], ends, mask=None) -> list[list[Any]]:
        """Append ``rows[owner][t]``, time by time, and hand out what waits longest."""
        for t in range(len(rows[0])):
            for owner in range(len(rows)):
                if mask is None or mask[owner][t]:
                    self.push(owner, rows[owner][t], bool(ends[owner][t]))
        return self.take()

    def take(self) -> list[list[Any]]:
        """Returns the items that have waited longest."""
        items, self.line = self.line[: self.per_add], self.line[self.per_add :]
        return items

    def drop(self, owners) -> None:
        """Forget the open items of some owners."""
        for owner, gone in enumerate(owners):
            if gone and self.open[owner]:
                self.open[owner] = []
                self.dropped += 1


class ChunkAccumulator(Accumulator):
    """The same for fragments that come with the numbers of their workers, versions and sessions."""

    def __init__(
        self,
        workers: int,
        length: int,
        per_add: int,
        waiting: int,
        max_staleness: int | None = None,
    ):
        super().__init__(workers, length, per_add, waiting)
        self.last = [(0, 0)] * workers
        self.max_staleness = max_staleness
        self.version = self.session = self.rejected = self.stale = 0

    def is_stale(self, version: int, session: int) -> bool:
        if self.max_staleness is None:
            return False
        return session != self.session or self.version - version > self.max_staleness

    def set_version(self, version: int, session: int) -> None:
        self.version, self.session = version, session
        for owner, rows in enumerate(self.open):
            old = [i for i, row in enumerate(rows) if self.is_stale(*row[1:])]
            if old:
                self.open[owner] = rows[old[-1] + 1 :]
                self.stale += old[-1] + 1

    def add_fragments(
        self, fragments, worker, number, version, session, mask=None
    ) -> list[list[Any]]:
        """Append fragments one by one; an item is a list of (fragment, version, session)."""
        for row, owner in enumerate(worker):
            if mask is not None and not mask[row]:
                continue
            if not 0 <= owner < len(self.open):
                self.rejected += 1
                continue
            if self.is_stale(version[row], session[row]):
                self.stale += 1
                continue
            last_number, last_session = self.last[owner]
            follows = number[row] == last_number + 1 and session[row] == last_session
            self.push(owner, (fragments[row], version[row], session[row]), begins=not follows)
            self.last[owner] = number[row], session[row]
        return self.take()

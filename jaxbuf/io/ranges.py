"""Sets of row numbers, most of which are consecutive."""

import dataclasses
from collections.abc import Iterable
from typing import Self

import numpy as np
from jaxtyping import Bool, Int


@dataclasses.dataclass(frozen=True)
class Ranges:
    """A set of row numbers as sorted runs that neither overlap nor touch.

    Attributes:
        bounds: First number of each run and the number after its last, ``[K, 2]``.

    Example:
        >>> rows = Ranges.of([3, 4, 9]) | Ranges.of([5])
        >>> rows.tolist(), len(rows), rows.without(np.arange(6)).tolist()
        ([[3, 6], [9, 10]], 4, [0, 1, 2, 6, 7, 8])
    """

    bounds: Int[np.ndarray, "K 2"]

    @classmethod
    def runs(cls, runs: Iterable[Iterable[int]]) -> Self:
        """Returns the set of runs in any order, which may overlap."""
        bounds = np.asarray([*runs], np.int64).reshape(-1, 2)
        bounds = bounds[np.argsort(bounds[:, 0], kind="stable")]
        reach = np.maximum.accumulate(bounds[:, 1])
        begins = np.ones(len(bounds), bool)
        begins[1:] = bounds[1:, 0] > reach[:-1]
        ends = np.roll(begins, -1)
        return cls(np.stack([bounds[begins, 0], reach[ends]], axis=1))

    @classmethod
    def of(cls, rows: Iterable[int]) -> Self:
        """Returns the set of single row numbers in any order."""
        rows = np.unique(np.asarray(rows if isinstance(rows, np.ndarray) else [*rows], np.int64))
        begins = np.ones(len(rows), bool)
        begins[1:] = np.diff(rows) > 1
        return cls(np.stack([rows[begins], rows[np.roll(begins, -1)] + 1], axis=1))

    def __len__(self) -> int:
        return int(np.sum(self.bounds[:, 1] - self.bounds[:, 0]))

    def __or__(self, other: Self) -> Self:
        return type(self).runs([*self.tolist(), *other.tolist()])

    def tolist(self) -> list[list[int]]:
        """Returns the runs as Python integers."""
        return self.bounds.tolist()

    def contains(self, rows: Int[np.ndarray, " B"]) -> Bool[np.ndarray, " B"]:
        """Returns which rows are in the set."""
        run = np.searchsorted(self.bounds[:, 0], rows, side="right") - 1
        return (run >= 0) & (rows < np.append(self.bounds[:, 1], 0)[run])

    def covers(self, begin: int, end: int) -> bool:
        """Returns whether all rows from ``begin`` to ``end - 1`` are in the set."""
        run = int(np.searchsorted(self.bounds[:, 0], begin, side="right")) - 1
        return run >= 0 and bool(end <= self.bounds[run, 1])

    def without(self, rank: Int[np.ndarray, " B"]) -> Int[np.ndarray, " B"]:
        """Returns the nonnegative integers that are not in the set, by their ranks."""
        size = self.bounds[:, 1] - self.bounds[:, 0]
        before = np.concatenate([[0], np.cumsum(size)])
        # The number of other rows below each run.
        others = self.bounds[:, 0] - before[:-1]
        return rank + before[np.searchsorted(others, rank, side="right")]

"""Sets of row numbers, most of which are consecutive."""

import base64
import dataclasses
import functools
from collections.abc import Iterable
from typing import Any, Self

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
    def runs(cls, bounds: Int[np.ndarray, "K 2"]) -> Self:
        """Returns the set of runs in any order, which may overlap."""
        bounds = bounds[np.argsort(bounds[:, 0], kind="stable")]
        reach = np.maximum.accumulate(bounds[:, 1])
        begins = np.ones(len(bounds), bool)
        begins[1:] = bounds[1:, 0] > reach[:-1]
        ends = np.roll(begins, -1)
        return cls(np.stack([bounds[begins, 0], reach[ends]], axis=1))

    @classmethod
    def parse(cls, runs: Any, most: int) -> Self:
        """Returns the set of runs as ``encode`` or ``tolist`` returns them.

        Args:
            runs: The runs.
            most: The number of rows that there are.

        Raises:
            ValueError: If they are not runs of these rows.
        """
        if isinstance(runs, str):
            data = base64.b64decode(runs, validate=True)
            bounds = np.frombuffer(data, "<i8").astype(np.int64).reshape(-1, 2)
        else:
            bounds = np.asarray(runs) if runs else np.zeros((0, 2), np.int64)
            if not isinstance(runs, list) or bounds.dtype != np.int64 or bounds.shape[1:] != (2,):
                raise ValueError("there are other things than runs of rows")
        begin, end = bounds.T
        if not np.all((begin >= 0) & (begin < end) & (end <= most)):
            raise ValueError(f"there are runs beyond the {most} rows")
        return cls.runs(bounds)

    @classmethod
    def of(cls, rows: Iterable[int]) -> Self:
        """Returns the set of single row numbers in any order."""
        rows = np.unique(np.asarray(rows if isinstance(rows, np.ndarray) else [*rows], np.int64))
        begins = np.ones(len(rows), bool)
        begins[1:] = np.diff(rows) > 1
        return cls(np.stack([rows[begins], rows[np.roll(begins, -1)] + 1], axis=1))

    def __len__(self) -> int:
        return int(self._before[-1])

    def __or__(self, other: Self) -> Self:
        return type(self).runs(np.concatenate([self.bounds, other.bounds]))

    def encode(self) -> str:
        """Returns the runs as text, which is written and read much faster than many numbers."""
        return base64.b64encode(self.bounds.astype("<i8").tobytes()).decode()

    def tolist(self) -> list[list[int]]:
        """Returns the runs as Python integers."""
        return self.bounds.tolist()

    def contains(self, rows: Int[np.ndarray, " B"]) -> Bool[np.ndarray, " B"]:
        """Returns a mask of the rows that are in the set."""
        return self.covers(rows, rows + 1)

    def covers(
        self, begin: Int[np.ndarray, " B"] | int, end: Int[np.ndarray, " B"] | int
    ) -> Bool[np.ndarray, " B"]:
        """Returns whether all rows from ``begin`` to ``end - 1``, at least one, are in the set."""
        if not len(self.bounds):
            return np.zeros(np.shape(begin), bool)
        run = np.searchsorted(self._begins, begin, side="right") - 1
        return (run >= 0) & (end <= self.bounds[run, 1])

    def without(self, rank: Int[np.ndarray, " B"]) -> Int[np.ndarray, " B"]:
        """Returns the nonnegative integers that are not in the set, by their ranks."""
        return rank + self._before[np.searchsorted(self._others, rank, side="right")]

    # Computed once, as a set may have very many runs.
    @functools.cached_property
    def _begins(self) -> Int[np.ndarray, " K"]:
        return np.ascontiguousarray(self.bounds[:, 0])

    @functools.cached_property
    def _before(self) -> Int[np.ndarray, " K+1"]:
        """The number of rows in the runs before each run, and in all of them."""
        return np.concatenate([[0], np.cumsum(self.bounds[:, 1] - self.bounds[:, 0])])

    @functools.cached_property
    def _others(self) -> Int[np.ndarray, " K"]:
        """The number of other rows before each run."""
        return self._begins - self._before[:-1]

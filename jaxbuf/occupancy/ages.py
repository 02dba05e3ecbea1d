"""Ranges of items by age, and even draws from a range."""

import dataclasses
from typing import Protocol, Self

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxbuf.core import native, storage
from jaxbuf.core.division import quotient, remainder
from jaxbuf.core.random import scale_word
from jaxbuf.core.types import Count, Index, Integers, Mask, Word, Words

# Up to this many rings, comparing with all of them beats a binary search.
_FEW_RINGS = 128

Bound = int | Count | None


class Ages(Protocol):
    """The items of each ring whose age is in a range.

    They are ranked ring by ring, and within a ring from the earliest to the newest.
    """

    @property
    def count(self) -> Int[Array, " E"]:
        """Returns the number of items in each ring."""
        ...

    @property
    def most(self) -> int:
        """Returns the most items that there can be in each ring."""
        ...

    @property
    def total(self) -> Count:
        """Returns the number of items."""
        ...

    def at(self, rank: Integers) -> Index:
        """Returns the slots of items by rank; arbitrary for a rank of at least ``total``."""
        ...

    def in_ring(self, ring: Index, rank: Integers) -> Index:
        """Returns the slots of items by their ring, and their rank in it; arbitrary past it."""
        ...

    def rank(self, index: Index) -> Integers:
        """Returns the number of earlier items in the range and ring of these, in its slots."""
        ...

    def contains(self, index: Index) -> Mask:
        """Returns a mask of the slots whose items are in the range."""
        ...


def clip(bound: int | Count, size: Int[Array, " E"]) -> Int[Array, " E"]:
    """Returns a bound of a slice as a number of items, counted from the earliest."""
    limit = jnp.asarray(bound, jnp.int32)
    return jnp.clip(jnp.where(limit < 0, size + limit, limit), 0, size)


def ring_of(count: Int[Array, " E"], rank: Integers) -> tuple[Array, Array]:
    """Returns the ring of each rank, and the number of items before each ring, ``[E]``."""
    until = jnp.cumsum(count, dtype=jnp.int32)
    # XLA:CPU stores the results of both methods, rather than recomputing them for each element of
    # the rows that it selects.
    method = "compare_all" if until.shape[0] <= _FEW_RINGS else "scan"
    env = jnp.searchsorted(until, rank, side="right", method=method).astype(jnp.int32)
    return env, until - count


@dataclasses.dataclass(frozen=True)
class AgeRange:
    """``Ages`` of items that are consecutive in their ring.

    Attributes:
        first: The index in its ring of the earliest item in the range, ``[E]``.
        count: Number of items in the range in each ring, ``[E]``.
        length: Number of slots of a ring.
    """

    first: Int[Array, " E"]
    count: Int[Array, " E"]
    length: int

    @classmethod
    def of(
        cls, first: Int[Array, " E"], size: Int[Array, " E"], length: int, start: Bound, stop: Bound
    ) -> Self:
        """Returns the items ``start`` to ``stop - 1`` of each ring, as a slice of a list would.

        Args:
            first: The index in each ring of the earliest item.
            size: Number of items in each ring.
            length: Number of slots of a ring.
            start: The first item; negative to count from the newest.
            stop: The item past the end, counted likewise.
        """
        low = clip(0 if start is None else start, size)
        high = size if stop is None else clip(stop, size)
        return cls(remainder(first + low, length), jnp.maximum(high - low, 0), length)

    @property
    def most(self) -> int:
        """Returns the most items that there can be in each ring."""
        return self.length

    @property
    def total(self) -> Count:
        """Returns the number of items."""
        return jnp.sum(self.count, dtype=jnp.int32)

    def at(self, rank: Integers) -> Index:
        """Returns the slots of items by rank; arbitrary for a rank of at least ``total``."""
        return _items_at(rank, self.first, self.count, length=self.length)

    def in_ring(self, ring: Index, rank: Integers) -> Index:
        """Returns the slots of items by their ring, and their rank in it; arbitrary past it."""
        first = storage.select(ring, self.first)
        return ring * self.length + remainder(first + rank, self.length)

    def rank(self, index: Index) -> Integers:
        """Returns the number of items in the range before these; its size for later slots."""
        first, count = storage.select(quotient(index, self.length), (self.first, self.count))
        offset = remainder(index, self.length)
        return jnp.minimum(remainder(offset - first, self.length), count)

    def contains(self, index: Index) -> Mask:
        """Returns whether the items at these slots are in the range."""
        count = storage.select(quotient(index, self.length), self.count)
        inside = (index >= 0) & (index < self.count.shape[0] * self.length)
        return inside & (self.rank(index) < count)


@native.kernel("items_at")
def _items_at(
    rank: Integers, first: Int[Array, " E"], count: Int[Array, " E"], *, length: int
) -> Index:
    env, before = ring_of(count, rank)
    first, before = storage.select(env, (first, before))
    return env * length + remainder(first + rank - before, length)


def grid(ages: Ages, count: int) -> tuple[Int[Array, "E n"], Bool[Array, "E n"]]:
    """Returns the slots of the first ``count`` items of each ring, and a mask of those in range."""
    offset = jnp.arange(count, dtype=jnp.int32)[None]
    before = jnp.cumsum(ages.count, dtype=jnp.int32) - ages.count
    rank = before[:, None] + offset
    return ages.at(rank.reshape(-1)).reshape(rank.shape), offset < ages.count[:, None]


def in_part(words: Words, part: Index, parts: Int[Array, "..."], total: Int[Array, "..."]) -> Index:
    """Returns a rank in one of ``parts`` parts of ``[0, total)``; earlier parts may be one larger.

    Args:
        words: A random word for each row.
        part: The part of each row.
        parts: Number of parts; no part may be empty.
        total: Number of ranks.
    """
    width, more = quotient(total, parts), remainder(total, parts)
    begin = part * width + jnp.minimum(part, more)
    size = width + (part < more).astype(jnp.int32)
    return begin + scale_word(words, size)


def spread(words: Words, turn: Word, total: Count, count: Count | None = None) -> Index:
    """Returns ranks in ``[0, total)`` for ``B`` rows, as evenly as possible.

    Each rank is assigned to ``B / total`` rows on average, and always to that number rounded up or
    down: to at most one row if there are at least as many ranks as rows.

    Args:
        words: A random word for each row.
        turn: One more random word, shared by all rows.
        total: Number of ranks.
        count: The number of rows, if only the first ones count; the others are arbitrary.
    """
    rows: int | Array = words.shape[0] if count is None else jnp.maximum(count, 1)
    row = jnp.arange(words.shape[0], dtype=jnp.int32)
    ranks = jnp.maximum(total, 1)
    # Each row draws from its own stratum of the ranks.
    stratified = in_part(words, row, jnp.int32(rows), ranks)
    rank = jnp.where(ranks >= rows, stratified, remainder(row, ranks))
    # A random shift decides which strata are one larger.
    uneven = jnp.where(ranks >= rows, remainder(ranks, rows), remainder(jnp.int32(rows), ranks)) > 0
    shift = scale_word(turn, ranks)
    return remainder(rank + jnp.where(uneven, shift, 0), ranks)

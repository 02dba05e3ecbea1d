"""Items by age: ranges of them in order of time, and even draws from a range."""

import dataclasses
from typing import Any, Protocol, Self

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, UInt

from jaxbuf.core.random import scale_word

# Up to this many rings, comparing with all of them beats a binary search.
_FEW_RINGS = 128

Bound = int | Int[Array, ""] | None


class Ages(Protocol):
    """Those items of every ring whose age lies in a range.

    Their ranks go ring by ring, and in each ring from the earliest to the newest.
    """

    @property
    def count(self) -> Int[Array, " E"]:
        """How many there are in each ring."""
        ...

    @property
    def most(self) -> int:
        """How many there can be in each ring."""
        ...

    @property
    def total(self) -> Int[Array, ""]:
        """How many items there are."""
        ...

    def at(self, rank: Int[Array, " B"]) -> Int[Array, " B"]:
        """The slots of the items with these ranks; arbitrary for ranks from ``total`` on."""
        ...

    def contains(self, index: Int[Array, " B"]) -> Bool[Array, " B"]:
        """Whether the items at these slots are among them."""
        ...


def clip(bound: int | Int[Array, ""], size: Int[Array, " E"]) -> Int[Array, " E"]:
    """A bound of a slice as a number of items from the earliest on."""
    given = jnp.asarray(bound, jnp.int32)
    return jnp.clip(jnp.where(given < 0, size + given, given), 0, size)


def ring_of(count: Int[Array, " E"], rank: Int[Array, " B"]) -> tuple[Array, Array]:
    """The ring in which each rank lies, if they go ring by ring, and what has come before, [E]."""
    until = jnp.cumsum(count, dtype=jnp.int32)
    # Both end in a result that XLA:CPU stores, rather than computes anew for every element of the
    # rows that it selects.
    method = "compare_all" if until.shape[0] <= _FEW_RINGS else "scan"
    env = jnp.searchsorted(until, rank, side="right", method=method).astype(jnp.int32)
    return env, until - count


@dataclasses.dataclass(frozen=True)
class AgeRange:
    """``Ages`` where the items of a ring follow each other, without holes.

    Attributes:
        first: The place in its ring of the earliest of them, ``[E]``.
        count: How many there are in each ring, ``[E]``.
        length: Slots of a ring.
    """

    first: Int[Array, " E"]
    count: Int[Array, " E"]
    length: int

    @classmethod
    def of(
        cls,
        first: Int[Array, " E"],
        size: Int[Array, " E"],
        length: int,
        start: Bound,
        stop: Bound,
    ) -> Self:
        """The items ``start`` to ``stop - 1`` of each ring, counted like a slice of a list.

        Args:
            first: The place of the earliest item in each ring.
            size: How many items follow from there.
            length: Slots of a ring.
            start: The first item.
            stop: The end.
        """
        low = clip(0 if start is None else start, size)
        high = size if stop is None else clip(stop, size)
        return cls((first + low) % length, jnp.maximum(high - low, 0), length)

    @property
    def most(self) -> int:
        """How many there can be in each ring."""
        return self.length

    @property
    def total(self) -> Int[Array, ""]:
        """How many items there are."""
        return jnp.sum(self.count, dtype=jnp.int32)

    def at(self, rank: Int[Array, " B"]) -> Int[Array, " B"]:
        """The slots of the items with these ranks; arbitrary for ranks from ``total`` on."""
        env, before = ring_of(self.count, rank)
        ring = jnp.stack([self.first, before], axis=-1).at[env].get(mode="clip")
        return env * self.length + (ring[:, 0] + rank - ring[:, 1]) % self.length

    def contains(self, index: Int[Array, " B"]) -> Bool[Array, " B"]:
        """Whether the items at these slots are among them."""
        ring = (
            jnp.stack([self.first, self.count], axis=-1).at[index // self.length].get(mode="clip")
        )
        inside = (index >= 0) & (index < self.count.shape[0] * self.length)
        return inside & ((index % self.length - ring[:, 0]) % self.length < ring[:, 1])


def grid(ages: Ages, count: int) -> tuple[Int[Array, "E n"], Bool[Array, "E n"]]:
    """The slots of the first ``count`` items of each ring, and which rows hold one."""
    offset = jnp.arange(count, dtype=jnp.int32)[None]
    before = jnp.cumsum(ages.count, dtype=jnp.int32) - ages.count
    rank = before[:, None] + offset
    return ages.at(rank.reshape(-1)).reshape(rank.shape), offset < ages.count[:, None]


def in_part(
    words: UInt[Array, " B"],
    part: Int[Array, " B"],
    parts: Int[Array, "..."],
    total: Int[Array, "..."],
) -> Int[Array, " B"]:
    """A rank in the given one of ``parts`` parts of ``[0, total)``; the first may be one larger.

    Args:
        words: A random word for each row.
        part: Which part each row is from.
        parts: How many there are, of which none is empty.
        total: How many ranks there are.
    """
    width, more = total // parts, total % parts
    begin = part * width + jnp.minimum(part, more)
    size = width + (part < more).astype(jnp.int32)
    return begin + scale_word(words, size.astype(jnp.uint32)).astype(jnp.int32)


def spread(words: UInt[Array, " B"], turn: UInt[Array, ""], total: Int[Array, ""]) -> Any:
    """Ranks in ``[0, total)`` for ``B`` rows, as evenly as can be.

    Rank ``r`` is given to ``B / total`` of the rows on average, and always to that number rounded
    up or down: to one row at most while there are as many ranks as rows.

    Args:
        words: A random word for each row.
        turn: One more, for all.
        total: How many ranks there are.
    """
    rows = words.shape[0]
    row = jnp.arange(rows, dtype=jnp.int32)
    some = jnp.maximum(total, 1)
    # Each row has a part of the ranks of its own.
    own = in_part(words, row, jnp.int32(rows), some)
    rank = jnp.where(some >= rows, own, row % some)
    # Which ranks are in the larger parts, or are given once more, is left to chance.
    uneven = jnp.where(some >= rows, some % rows, rows % some) > 0
    shift = scale_word(turn, some.astype(jnp.uint32)).astype(jnp.int32)
    return (rank + jnp.where(uneven, shift, 0)) % some

"""A set of small integers, one bit for each, that counts and finds its members by rank.

Above the words of 32 bits are levels of counts, each over 32 numbers of the level below. Integer
counts are exact, so a change of one member only adds to or subtracts from the counts above it.

References:
    Jacobson, Space-efficient static trees and graphs, FOCS 1989 (rank and select).
"""

import functools
import itertools
from collections.abc import Iterator
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Int, UInt

from jaxbuf.core import native, storage
from jaxbuf.core.problems import Checked, first_wrong
from jaxbuf.core.sorting import last_of_each
from jaxbuf.core.types import Count, Index, Integers, Mask, Words
from jaxbuf.core.versions import vary_with

_SHIFT = 5
_WIDTH = 1 << _SHIFT


class Bitset(Checked, struct.PyTreeNode):
    """A set of some of the integers below ``capacity``: its *members*.

    Attributes:
        nodes: The words, and then the counts level by level, each padded to whole blocks; ``[P]``.
        size: Number of members, in an array of its own: a read of it does not prevent that the
            nodes are updated in place.
        capacity: One more than the largest possible member.

    Example:
        >>> import jax.numpy as jnp
        >>> primes = Bitset.create(100).set(jnp.array([2, 3, 5, 67, 71]), jnp.ones(5, bool))
        >>> int(primes.size), primes.get(jnp.array([4, 5, 67])).tolist()
        (5, [False, True, True])
        >>> primes.at(jnp.array([0, 3])).tolist(), primes.before(jnp.array([5, 100])).tolist()
        ([2, 67], [2, 5])
    """

    nodes: UInt[Array, " P"]
    size: Count
    capacity: int = struct.field(pytree_node=False)

    @classmethod
    def create(cls, capacity: int) -> Self:
        """Returns an empty set of numbers below ``capacity``."""
        starts = _starts(capacity)
        return cls(jnp.zeros((starts[-1],), jnp.uint32), jnp.int32(0), capacity)

    @classmethod
    def of(cls, mask: Bool[Array, " N"]) -> Self:
        """Returns the set of the numbers at which ``mask`` is True."""
        capacity = mask.shape[0]
        starts = _starts(capacity)
        bits = jnp.pad(mask, (0, starts[1] * _WIDTH - capacity)).reshape(-1, _WIDTH)
        value = _bit(jnp.arange(_WIDTH, dtype=jnp.int32))[None]
        words = jnp.sum(jnp.where(bits, value, jnp.uint32(0)), axis=1, dtype=jnp.uint32)
        levels, counts = [words], lax.population_count(words)
        for start, end in itertools.pairwise(starts[1:]):
            counts = jnp.sum(counts.reshape(-1, _WIDTH), axis=1, dtype=jnp.uint32)
            counts = jnp.pad(counts, (0, end - start - counts.shape[0]))
            levels.append(counts)
        size = jnp.sum(counts, dtype=jnp.uint32).astype(jnp.int32)
        return cls(jnp.concatenate(levels), size, capacity)

    def get(self, index: Int[Array, "..."]) -> Bool[Array, "..."]:
        """Returns a mask of the numbers that are members; False for numbers out of range."""
        return _get(self.nodes, index, self.capacity)

    def set(self, index: Index, member: Mask) -> Self:
        """Adds numbers to the set or removes them.

        Args:
            index: Numbers; those out of range are ignored, and the last of equal ones counts.
            member: True to add the number, False to remove it.
        """
        nodes = _mark(self.nodes, index, member, self.capacity)
        # Counted in the new nodes: to read the old ones as well, XLA would have to copy them.
        top = _starts(self.capacity)[-2]
        size = jnp.sum(nodes[top:], dtype=jnp.uint32).astype(jnp.int32)
        return self.replace(nodes=nodes, size=size)

    def before(self, index: Index) -> Integers:
        """Returns the number of members below ``index``."""
        starts, lane = _starts(self.capacity), jnp.arange(_WIDTH, dtype=jnp.int32)
        first = jnp.asarray(starts[:-1], jnp.int32)

        def climb(level: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            # The members in the nodes of a block that come before the node of the index.
            node, count = carry
            block = node >> _SHIFT
            at = first[level] + (block << _SHIFT)[:, None] + lane[None]
            inside = lane[None] < (node & (_WIDTH - 1))[:, None]
            counts = _counts(storage.select(at, self.nodes), level)
            return block, count + jnp.sum(jnp.where(inside, counts, 0), axis=1, dtype=jnp.int32)

        index = jnp.clip(index, 0, self.capacity)
        word = storage.select(index >> _SHIFT, self.nodes)
        below = _bit(index) - jnp.uint32(1)
        count = lax.population_count(word & below).astype(jnp.int32)
        start = vary_with((index >> _SHIFT, count), self.nodes, index)
        return lax.fori_loop(0, len(starts) - 1, climb, start)[1]

    def at(self, rank: Integers) -> Index:
        """Returns members by rank, counted from 0; arbitrary for a rank of at least ``size``."""
        starts, lane = _starts(self.capacity), jnp.arange(_WIDTH, dtype=jnp.int32)[:, None]
        first = jnp.asarray(starts[:-1], jnp.int32)
        top = len(starts) - 2

        def descend(step: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            node, rank = carry
            level = top - step
            children = storage.select(first[level] + (node << _SHIFT) + lane, self.nodes)
            counts = lax.split(_counts(children, level), [1] * _WIDTH)
            child, passed = jnp.zeros_like(node), jnp.zeros_like(rank)
            for until in itertools.accumulate(counts[:-1]):
                past = rank >= until
                child += past.astype(jnp.int32)
                passed = lax.select(past, until, passed)
            return (node << _SHIFT) + child, rank - passed

        # One row, beside which the children of each node are a column.
        start = vary_with((jnp.zeros_like(rank)[None], rank[None]), self.nodes, rank)
        node, rank = (row[0] for row in lax.fori_loop(0, top + 1, descend, start))
        word = storage.select(node, self.nodes)
        return jnp.minimum((node << _SHIFT) + _nth_bit(word, rank), self.capacity - 1)

    def clear(self) -> Self:
        """Returns an empty set, which shares no array with the original."""
        return type(self).create(self.capacity)

    def check_valid(self, name: str) -> Iterator[str]:
        is_member, before, at = map(np.asarray, _query(self))
        expected = int(np.sum(is_member))
        size = np.asarray(self.size)
        yield from first_wrong(
            f"{name}.size", size, size != expected, f"{expected}, the number of members"
        )
        counts = np.concatenate([[0], np.cumsum(is_member)])
        yield from first_wrong(f"{name}.before", before, before != counts, counts)
        slots = np.flatnonzero(is_member)
        yield from first_wrong(f"{name}.at", at[:expected], at[:expected] != slots, slots)


def _get(nodes: UInt[Array, " P"], index: Int[Array, "..."], capacity: int) -> Bool[Array, "..."]:
    in_range = (index >= 0) & (index < capacity)
    at = (jnp.where(in_range, index, 0) >> _SHIFT).reshape(-1)
    # XLA would read a single word as a slice, which it repeats at each use (see ``core.order``).
    at_least_two = jnp.repeat(at, 2) if index.size == 1 else at
    word = storage.select(at_least_two, nodes)[: at.size].reshape(index.shape)
    return in_range & ((word & _bit(index)) != 0)


@functools.partial(jax.jit, static_argnames="capacity")
def _mark(nodes: UInt[Array, " P"], index: Index, member: Mask, capacity: int) -> UInt[Array, " P"]:
    """Returns the nodes after these numbers were added or removed."""
    natively = functools.partial(native.mark, starts=_starts(capacity)[:-1], capacity=capacity)
    plainly = functools.partial(_mark_plainly, capacity)
    return native.either(natively, plainly, nodes, index, member)


def _mark_plainly(
    capacity: int, nodes: UInt[Array, " P"], index: Index, member: Mask
) -> UInt[Array, " P"]:
    in_range = last_of_each(index) & (index >= 0) & (index < capacity)
    changes = in_range & (member != _get(nodes, index, capacity))
    index = jnp.where(changes, index, capacity)
    # A member that leaves adds minus one, since unsigned numbers wrap.
    one = jnp.where(changes, jnp.where(member, jnp.uint32(1), jnp.uint32(2**32 - 1)), 0)
    # Adding or subtracting a bit leaves the other bits of its word unchanged.
    starts = _starts(capacity)[:-1]
    nodes_changed = [start + (index >> (_SHIFT * (i + 1))) for i, start in enumerate(starts)]
    amounts = [_bit(index) * one, *[one] * (len(starts) - 1)]
    return nodes.at[jnp.concatenate(nodes_changed)].add(jnp.concatenate(amounts))


def _starts(capacity: int) -> tuple[int, ...]:
    """Returns the starts of the words and of each level of counts, and the end of the nodes.

    There is always a bit for ``capacity`` itself, which is never set, and a level of counts.
    """
    starts, count = [0], capacity // _WIDTH + 1
    while len(starts) < 3 or count > 1:
        count = -(-count // _WIDTH)
        starts.append(starts[-1] + count * _WIDTH)
    return tuple(starts)


def _bit(index: Int[Array, "..."]) -> UInt[Array, "..."]:
    return jnp.uint32(1) << (index & (_WIDTH - 1)).astype(jnp.uint32)


def _counts(nodes: UInt[Array, "..."], level: Count) -> Int[Array, "..."]:
    """Returns the number of members under each node of a level; nodes of level 0 are words."""
    return jnp.where(level == 0, lax.population_count(nodes), nodes).astype(jnp.int32)


def _nth_bit(word: Words, rank: Integers) -> Index:
    """Returns the position of the ``rank``-th bit that is set."""
    position = jnp.zeros_like(rank)
    for half in (16, 8, 4, 2, 1):
        low = lax.population_count(word & jnp.uint32((1 << half) - 1)).astype(jnp.int32)
        high = rank >= low
        rank = jnp.where(high, rank - low, rank)
        word = jnp.where(high, word >> jnp.uint32(half), word)
        position += jnp.where(high, half, 0)
    return position


@jax.jit
def _query(members: Bitset) -> tuple[Array, Array, Array]:
    index = jnp.arange(members.capacity + 1, dtype=jnp.int32)
    return members.get(index[:-1]), members.before(index), members.at(index[:-1])

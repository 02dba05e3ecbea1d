"""A set of small whole numbers, one bit for each, that counts and finds its members by rank.

Above the words of 32 bits lie levels of counts, each over 32 numbers of the level below: counts of
whole numbers are exact, so that a change of one member adds to those on its path.

References:
    Jacobson, Space-efficient static trees and graphs, FOCS 1989 (rank and select).
"""

import functools
from typing import Self

import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Int, UInt

from jaxbuf.core import in_place, rowwise, storage

_SHIFT = 5
_WIDTH = 1 << _SHIFT


class Bitset(struct.PyTreeNode):
    """Some of the numbers below ``capacity``: its *members*.

    Attributes:
        nodes: The words, and then the counts level by level, each padded to whole blocks; ``[P]``.
        size: Members. Apart from the nodes: reading it never stands in the way of updating them.
        capacity: One more than the largest number.

    Example:
        >>> import jax.numpy as jnp
        >>> primes = Bitset.create(100).set(jnp.array([2, 3, 5, 67, 71]), jnp.ones(5, bool))
        >>> int(primes.size), primes.get(jnp.array([4, 5, 67])).tolist()
        (5, [False, True, True])
        >>> primes.at(jnp.array([0, 3])).tolist(), primes.before(jnp.array([5, 100])).tolist()
        ([2, 67], [2, 5])
    """

    nodes: UInt[Array, " P"]
    size: Int[Array, ""]
    capacity: int = struct.field(pytree_node=False)

    @classmethod
    def create(cls, capacity: int) -> Self:
        """Nothing, of ``capacity`` numbers."""
        starts = _starts(capacity)
        return cls(jnp.zeros((starts[-1],), jnp.uint32), jnp.int32(0), capacity)

    def get(self, index: Int[Array, "..."]) -> Bool[Array, "..."]:
        """Whether these are members; False for what is out of range."""
        if index.size == 0:
            return jnp.zeros(index.shape, bool)
        found = rowwise.each(_get, index.reshape(-1), self.nodes, (self.capacity,))
        return found.reshape(index.shape)

    def set(self, index: Int[Array, " B"], member: Bool[Array, " B"]) -> Self:
        """Say of numbers whether they are members.

        Args:
            index: Which; those out of range are ignored, and the last of equal ones counts.
            member: What they are from now on.
        """
        if index.shape[0] == 0:
            return self
        loop, plain = (functools.partial(f, self.capacity) for f in (_set_loop, _set))
        nodes, size = rowwise.on_cpu(loop, plain, self.nodes, self.size, index, member)
        return self.replace(nodes=nodes, size=size)

    def before(self, index: Int[Array, " B"]) -> Int[Array, " B"]:
        """How many members are below ``index``."""
        starts, lane = _starts(self.capacity), jnp.arange(_WIDTH, dtype=jnp.int32)
        first = jnp.asarray(starts[:-1], jnp.int32)

        def climb(level: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            # The members in those numbers of a block that come before the one that holds the index.
            node, count = carry
            block = node >> _SHIFT
            at = first[level] + (block << _SHIFT)[:, None] + lane[None]
            inside = lane[None] < (node & (_WIDTH - 1))[:, None]
            counts = _counts(storage.select(at, self.nodes), level)
            return block, count + jnp.sum(jnp.where(inside, counts, 0), axis=1, dtype=jnp.int32)

        index = jnp.clip(index, 0, self.capacity)
        word = rowwise.each(_word, index, self.nodes, most=index.shape[0])
        below = _bit(index) - jnp.uint32(1)
        count = lax.population_count(word & below).astype(jnp.int32)
        return lax.fori_loop(0, len(starts) - 1, climb, (index >> _SHIFT, count))[1]

    def at(self, rank: Int[Array, " B"]) -> Int[Array, " B"]:
        """The members of these ranks, from 0 on; arbitrary for ranks that there are not."""
        starts, lane = _starts(self.capacity), jnp.arange(_WIDTH, dtype=jnp.int32)
        first = jnp.asarray(starts[:-1], jnp.int32)
        top = len(starts) - 2

        def descend(step: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            node, rank, _ = carry
            level = top - step
            at = first[level] + (node << _SHIFT)[None] + lane[:, None]
            children = storage.select(at, self.nodes)
            child, passed, until = jnp.zeros_like(node), jnp.zeros_like(rank), jnp.zeros_like(rank)
            value = children[0]
            for i in range(_WIDTH - 1):
                until += _counts(children[i], level)
                past = rank >= until
                child += past.astype(jnp.int32)
                passed = jnp.where(past, until, passed)
                value = jnp.where(past, children[i + 1], value)
            return (node << _SHIFT) + child, rank - passed, value

        start = (jnp.zeros_like(rank), rank, jnp.zeros(rank.shape, jnp.uint32))
        node, rank, word = lax.fori_loop(0, top + 1, descend, start)
        return jnp.minimum((node << _SHIFT) + _nth_bit(word, rank), self.capacity - 1)

    def clear(self) -> Self:
        """Nothing; shares no array with the original."""
        return type(self).create(self.capacity)


def _starts(capacity: int) -> tuple[int, ...]:
    """Where the words begin, then each level of counts, and last where the nodes end.

    There is always a bit for ``capacity`` itself, which is never set, and a level of counts.
    """
    starts, count = [0], capacity // _WIDTH + 1
    while len(starts) < 3 or count > 1:
        count = -(-count // _WIDTH)
        starts.append(starts[-1] + count * _WIDTH)
    return tuple(starts)


def _bit(index: Int[Array, " B"]) -> UInt[Array, " B"]:
    return jnp.uint32(1) << (index & (_WIDTH - 1)).astype(jnp.uint32)


def _word(index: Int[Array, " B"], nodes: UInt[Array, " P"]) -> UInt[Array, " B"]:
    return storage.select(index >> _SHIFT, nodes)


def _get(index: Int[Array, " B"], nodes: UInt[Array, " P"], capacity: int) -> Bool[Array, " B"]:
    there = (index >= 0) & (index < capacity)
    return there & ((_word(jnp.where(there, index, 0), nodes) & _bit(index)) != 0)


def _counts(nodes: UInt[Array, "..."], level: Int[Array, ""]) -> Int[Array, "..."]:
    """How many members nodes of this level stand for; those of level 0 are words."""
    return jnp.where(level == 0, lax.population_count(nodes), nodes).astype(jnp.int32)


def _nth_bit(word: UInt[Array, " B"], rank: Int[Array, " B"]) -> Int[Array, " B"]:
    """The place of the bit that is set as the ``rank``-th."""
    place = jnp.zeros_like(rank)
    for half in (16, 8, 4, 2, 1):
        low = lax.population_count(word & jnp.uint32((1 << half) - 1)).astype(jnp.int32)
        high = rank >= low
        rank = jnp.where(high, rank - low, rank)
        word = jnp.where(high, word >> jnp.uint32(half), word)
        place += jnp.where(high, half, 0)
    return place


def _set(
    capacity: int,
    nodes: UInt[Array, " P"],
    size: Int[Array, ""],
    index: Int[Array, " B"],
    member: Bool[Array, " B"],
) -> tuple[UInt[Array, " P"], Int[Array, ""]]:
    starts = _starts(capacity)
    # Equal ones next to each other, in their order: the last of them changes the bit.
    index, member = lax.sort((index, member), num_keys=1, is_stable=True)
    last = jnp.concatenate([index[1:] != index[:-1], jnp.ones((1,), bool)])
    old = _get(index, nodes, capacity)
    changes = last & (index >= 0) & (index < capacity) & (member != old)
    one = jnp.where(member, jnp.uint32(1), jnp.uint32(2**32 - 1))
    index = jnp.where(changes, index, capacity)
    one = jnp.where(changes, one, jnp.uint32(0))
    # Of a bit that is added or taken away no other one takes notice; unsigned numbers wrap.
    nodes = nodes.at[index >> _SHIFT].add(_bit(index) * one)
    for level, start in enumerate(starts[1:-1], start=2):
        nodes = nodes.at[start + (index >> (level * _SHIFT))].add(one)
    return nodes, size + jnp.sum(one, dtype=jnp.uint32).astype(jnp.int32)


def _set_loop(
    capacity: int,
    nodes: UInt[Array, " P"],
    size: Int[Array, ""],
    index: Int[Array, " B"],
    member: Bool[Array, " B"],
) -> tuple[UInt[Array, " P"], Int[Array, ""]]:
    starts, rows = _starts(capacity), max(index.shape[0], 2)
    levels = len(starts) - 2

    def change(i: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        nodes, changed, count = carry
        at, there, row = in_place.step_of(i, index, capacity)
        bit, place = _bit(at), at >> _SHIFT
        word = lax.dynamic_slice(nodes, (place,), (1,))[0]
        old = (word & bit) != 0
        new = jnp.where(there, member[row], old)
        note = (place << 1) + new.astype(jnp.int32)
        changed, more, written = in_place.append(changed, note, count, new != old)
        word = jnp.where(new, word | bit, word & ~bit)
        place = in_place.later(place, written, more)
        return lax.dynamic_update_slice(nodes, word[None], (place,)), changed, more

    start = (nodes, jnp.zeros((rows,), jnp.int32), jnp.int32(0))
    nodes, changed, count = lax.fori_loop(0, rows, change, start)
    first = jnp.asarray(starts[1:-1], jnp.int32)

    def climb(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        nodes, size = carry
        note, level = changed[i // levels], (i % levels).astype(jnp.int32)
        place = first[level] + (note >> ((level + 1) * _SHIFT + 1))
        one = 2 * (note & 1) - 1
        number = lax.dynamic_slice(nodes, (place,), (1,)) + one.astype(jnp.uint32)
        nodes = lax.dynamic_update_slice(nodes, number, (place,))
        return nodes, size + jnp.where(level == 0, one, 0)

    return lax.fori_loop(0, count * levels, climb, (nodes, size))

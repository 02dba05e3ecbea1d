"""Slots that keep the items with the highest scores.

Each node of a tree over the slots holds the lowest of its items: the one with the smallest score,
and among equal scores the oldest. The lowest ``B`` items are found level by level, since they are
under the ``B`` lowest nodes of each level. New rows, best first, replace the lowest items, lowest
first, for as long as they rank above them. An add costs one path of the tree for each row, whatever
the capacity, and no slot is given to two rows.
"""

import functools
import itertools
from collections.abc import Iterator
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt

from jaxbuf.core import native, sorting
from jaxbuf.core.problems import Checked, differing, first_wrong
from jaxbuf.core.random import scale_word
from jaxbuf.core.types import Count, Floats, Index, Mask, Word, Words
from jaxbuf.occupancy.protocol import ItemOccupancy

_SHIFT = 4
# Children of a node.
_FANOUT = 1 << _SHIFT
# Ranks above every score. Free slots hold it, so that they are never the lowest.
_FREE = np.uint32(0xFFFFFFFF)
# The rank of -inf, the smallest score.
_LEAST = np.uint32(2**23 - 1)
# Ranks below every score, -inf included.
_DEMOTED = np.uint32(1)


class Ranking(ItemOccupancy, Checked, struct.PyTreeNode):
    """Keeps the ``capacity`` items with the highest scores, and among equal scores the newest.

    An item's generation is its number in the order of arrival. Numbers wrap at 2**32; ties are
    exact between items that arrived within 2**31 of each other.

    Attributes:
        nodes: The lowest item in each node, as the rank of its score and its generation, ``[P, 2]``
            uint32: the leaves, then each level above them, padded to whole blocks of siblings.
        arrivals: The number of the next item, ``[]`` uint32.
        held: The number of live items, ``[]`` uint32.
        capacity: Number of slots.
    """

    nodes: UInt[Array, "P 2"]
    arrivals: Word
    held: Word
    capacity: int = struct.field(pytree_node=False)

    @classmethod
    def create(cls, capacity: int) -> Self:
        """Returns a ranking of ``capacity`` free slots."""
        # The numbers start at 1, so that no generation that a caller sets to zero is ever live.
        return cls(
            nodes=_empty(capacity),
            arrivals=jnp.uint32(1),
            held=jnp.uint32(0),
            capacity=capacity,
        )

    @property
    def size(self) -> Count:
        """The number of live items."""
        return self.held.astype(jnp.int32)

    @property
    def score(self) -> Float[Array, " N"]:
        """The score in each slot, ``[capacity]``; −inf for a slot without a score."""
        return _from_rank(jnp.where(self.scored, self._ranks, _LEAST))

    @property
    def scored(self) -> Bool[Array, " N"]:
        """A mask of the slots that hold a score, ``[capacity]``; demoted items have no score."""
        ranks = self._ranks
        return (ranks >= _LEAST) & (ranks != _FREE)

    def place(self, rows: int, mask: Mask | None, score: Floats | None) -> tuple[Self, Index]:
        """Chooses free slots first, then those of the lowest items for rows that rank higher.

        Raises:
            ValueError: If there is no ``score``.
        """
        if score is None:
            raise ValueError("Lowest ranks items by their score; pass score=[B] to add")
        added = jnp.ones((rows,), bool) if mask is None else mask
        arrival = self.arrivals + jnp.cumsum(added, dtype=jnp.uint32) - jnp.uint32(1)
        count = jnp.sum(added, dtype=jnp.uint32)
        rank = jnp.where(added, to_rank(score), jnp.uint32(0))
        nodes, slot = _place(self.nodes, self.arrivals, self.held, rank, arrival, self.capacity)
        held = jnp.minimum(self.held + count, jnp.uint32(self.capacity))
        return self.replace(nodes=nodes, arrivals=self.arrivals + count, held=held), slot

    def refuses(self, score: Floats) -> Mask:
        root = self.nodes[_starts(self.capacity)[-2], 0]
        return (self.size == self.capacity) & (to_rank(score) < root)

    def live(self, index: Int[Array, "..."]) -> Bool[Array, "..."]:
        """Returns whether there is an item at ``index``."""
        # Slots are filled in order and never become free.
        return (index >= 0) & (index < self.size)

    def generation(self, index: Int[Array, "..."]) -> UInt[Array, "..."]:
        """Returns the number of the item at ``index``."""
        return self.nodes.at[jnp.clip(index, 0, self.capacity - 1), 1].get()

    def draw(self, words: Words) -> Index:
        """Returns a uniformly drawn live slot for each random word; arbitrary if none is live."""
        return scale_word(words, self.held)

    def demote(self, index: Index) -> Self:
        """Makes the items at ``index`` rank below all others, so that they are replaced first."""
        slot = jnp.where(self.live(index), index, self.capacity)
        item = jnp.stack([jnp.full(slot.shape, _DEMOTED), self.generation(index)], axis=-1)
        zero = _zero(self.arrivals)
        return self.replace(nodes=_write(self.nodes, slot, item, zero, self.capacity))

    def rescore(self, index: Index, score: Floats) -> Self:
        """Sets the scores of the items at ``index``, no slot twice; their numbers stay."""
        slot = jnp.where(self.live(index), index, self.capacity)
        item = jnp.stack([to_rank(score), self.generation(index)], axis=-1)
        zero = _zero(self.arrivals)
        return self.replace(nodes=_write(self.nodes, slot, item, zero, self.capacity))

    def in_order(self) -> tuple[Int[Array, " N"], Bool[Array, " N"]]:
        slot = jnp.arange(self.capacity, dtype=jnp.int32)
        # Numbers wrap; relative to the next one they are in order.
        order = sorting.order(self.generation(slot) - self.arrivals)
        return order, self.live(order)

    def item_ages(self) -> UInt[Array, " N"]:
        """Returns the number of items that arrived after the one in each slot, removed or not."""
        number = self.generation(jnp.arange(self.capacity, dtype=jnp.int32))
        return self.arrivals - jnp.uint32(1) - number

    def item_scores(self) -> Float[Array, " N"] | None:
        return self.score

    def continuing(self, old: Any) -> Self:
        return self.replace(arrivals=old.arrivals)

    def recomputed(self) -> Self:
        """Returns the ranking with all nodes above the leaves recomputed from their children."""
        slot, item = jnp.arange(self.capacity, dtype=jnp.int32), self.nodes[: self.capacity]
        zero = _zero(self.arrivals)
        return self.replace(nodes=_write(self.nodes, slot, item, zero, self.capacity))

    def clear(self) -> Self:
        """Returns an empty ranking. Numbers go on, so that slots sampled before stay stale."""
        return self.replace(
            nodes=_empty(self.capacity),
            arrivals=self.arrivals.copy(),
            held=jnp.zeros_like(self.held),
        )

    def check_valid(self, name: str) -> Iterator[str]:
        capacity, size = self.capacity, int(self.size)
        if not 0 <= size <= capacity:
            yield f"{name}.size is {size}; expected at most the capacity, {capacity}"
            return
        slot = np.arange(capacity)
        recomputed, *columns = _recomputed(self)
        score, scored, number = map(np.asarray, columns)
        yield from first_wrong(f"{name}.score", score, np.isnan(score), "a number")
        expected = f"False: there are only {size} items"
        yield from first_wrong(f"{name}.scored", scored, scored & (slot >= size), expected)
        number = number[:size]
        _, first, inverse = np.unique(number, return_index=True, return_inverse=True)
        repeated = first[inverse] != slot[:size]
        yield from first_wrong(
            f"{name}.generation", number, repeated, "a number that no other slot has"
        )
        yield from differing(name, self, recomputed, "the lowest of its children")

    def check_items(self, name: str, live: Bool[Array, " N"]) -> Iterator[str]:
        scored = np.asarray(_recomputed(self)[2])
        wrong = np.asarray(live) & ~scored
        yield from first_wrong(f"{name}.scored", scored, wrong, "True, the slot holds an item")

    def metrics(self) -> dict[str, Array]:
        """Returns the smallest, largest and mean score of the live items; 0 without items."""
        return score_metrics(self.score, self.scored, jnp.sum(self.scored, dtype=jnp.int32))

    @property
    def _ranks(self) -> UInt[Array, " N"]:
        return self.nodes[..., : self.capacity, 0]


def score_metrics(
    score: Float[Array, " N"], live: Bool[Array, " N"], size: Count
) -> dict[str, Array]:
    """Returns ``score_min``, ``score_max`` and ``score_mean`` of the live slots; 0 without any."""
    has_items, count = size > 0, jnp.maximum(size, 1).astype(jnp.float32)
    zero = jnp.float32(0)
    least = jnp.min(jnp.where(live, score, jnp.inf))
    largest = jnp.max(jnp.where(live, score, -jnp.inf))
    # The mean leaves out infinite scores, since the sum of both infinities is NaN.
    mean = jnp.sum(jnp.where(live & jnp.isfinite(score), score, zero) / count)
    low, high = least == -jnp.inf, largest == jnp.inf
    mean = jnp.where(low | high, jnp.where(low, least, largest), mean)
    return {
        "score_min": jnp.where(has_items, least, zero),
        "score_max": jnp.where(has_items, largest, zero),
        "score_mean": jnp.where(has_items & ~(low & high), mean, zero),
    }


def to_rank(score: jax.Array) -> jax.Array:
    """Returns scores as unsigned numbers in the same order; -inf becomes the least, 2**23 - 1.

    Both zeros become 2**31. The result is never ``_FREE``.
    """
    bits = lax.bitcast_convert_type(score, jnp.uint32)
    # By its bits, since a comparison of numbers may take the smallest ones for zeros.
    bits = jnp.where(bits == jnp.uint32(1 << 31), jnp.uint32(0), bits)
    negative = bits >> jnp.uint32(31) == 1
    return jnp.where(negative, ~bits, bits | jnp.uint32(1 << 31))


def _from_rank(rank: jax.Array) -> jax.Array:
    positive = rank >> jnp.uint32(31) == 1
    return lax.bitcast_convert_type(
        jnp.where(positive, rank ^ jnp.uint32(1 << 31), ~rank), jnp.float32
    )


@functools.cache
def _starts(capacity: int) -> tuple[int, ...]:
    """Returns the start of each level, from the leaves to the root, and the end of the nodes."""
    count, starts = capacity, [0]
    while True:
        starts.append(starts[-1] + -(-count // _FANOUT) * _FANOUT)
        if count == 1 and len(starts) > 2:
            return tuple(starts)
        count = -(-count // _FANOUT)


def _empty(capacity: int) -> UInt[Array, "P 2"]:
    return jnp.tile(jnp.asarray([[_FREE, 0]], jnp.uint32), (_starts(capacity)[-1], 1))


def _least(blocks: UInt[Array, "B K 2"], zero: Word) -> UInt[Array, "B 2"]:
    """Returns the lowest item of each block: the smallest rank, and the oldest among equals."""
    rank, age = blocks[..., 0], blocks[..., 1] - zero
    least = jnp.min(rank, axis=1)
    age = jnp.min(jnp.where(rank == least[:, None], age, _FREE), axis=1)
    return jnp.stack([least, age + zero], axis=-1)


def _zero(arrivals: Word) -> Word:
    """Returns the oldest possible number; relative to it all numbers rise, even if they wrap."""
    return arrivals ^ jnp.uint32(1 << 31)


@functools.partial(jax.jit, static_argnames="capacity")
def _place(
    nodes: UInt[Array, "P 2"],
    arrivals: Word,
    held: Word,
    rank: Words,
    arrival: Words,
    capacity: int,
) -> tuple[UInt[Array, "P 2"], Index]:
    """Returns the nodes with these rows added, and their slots; rows of rank 0 are refused."""
    natively = functools.partial(native.place, capacity=capacity)
    plainly = functools.partial(_place_plainly, capacity)
    return native.either(natively, plainly, nodes, arrivals, held, rank, arrival)


def _place_plainly(
    capacity: int,
    nodes: UInt[Array, "P 2"],
    arrivals: Word,
    held: Word,
    rank: Words,
    arrival: Words,
) -> tuple[UInt[Array, "P 2"], Index]:
    # Best first, and among equals the newest. Refused rows have rank 0 and come last.
    row = jnp.arange(rank.shape[0], dtype=jnp.int32)
    falling, order = lax.sort((~rank[::-1], row[::-1]), num_keys=1)
    rank, arrival = ~falling, arrival[order]
    zero = _zero(arrivals)
    lowest, lowest_rank, lowest_age = _lowest(nodes, rank.shape[0], zero, capacity)
    next_slot = held.astype(jnp.int32) + row
    victim = jnp.clip(next_slot - capacity, 0, lowest.shape[0] - 1)
    older = lowest_age[victim] < arrival - zero
    outranks = (lowest_rank[victim] < rank) | ((lowest_rank[victim] == rank) & older)
    evicts = outranks & (next_slot - capacity < lowest.shape[0])
    slot = jnp.where(next_slot < capacity, next_slot, lowest[victim])
    slot = jnp.where((rank > 0) & ((next_slot < capacity) | evicts), slot, capacity)
    nodes = _write(nodes, slot, jnp.stack([rank, arrival], axis=-1), zero, capacity)
    return nodes, jnp.zeros_like(slot).at[order].set(slot, unique_indices=True)


def _lowest(
    nodes: UInt[Array, "P 2"], count: int, zero: Word, capacity: int
) -> tuple[Int[Array, " K"], UInt[Array, " K"], UInt[Array, " K"]]:
    """Returns the slots, ranks and ages of the lowest ``count`` items, lowest first.

    There are fewer if the tree has fewer leaves. Free slots have the highest rank.
    """
    starts = _starts(capacity)
    # Begin with all nodes of a level that has few, and go on with the children of the lowest.
    widths = [stop - start for start, stop in itertools.pairwise(starts)]
    level = next(i for i, width in enumerate(widths) if width <= _FANOUT * count)
    node = jnp.arange(widths[level], dtype=jnp.int32)
    exists = jnp.ones(node.shape, bool)
    while True:
        items = nodes.at[starts[level] + node].get(mode="clip")
        rank = jnp.where(exists, items[:, 0], _FREE)
        rank, age, node = lax.sort((rank, items[:, 1] - zero, node), num_keys=2)
        rank, age, node = rank[:count], age[:count], node[:count]
        if level == 0:
            return node, rank, age
        level -= 1
        # Nodes that pad a level have no children.
        exists = jnp.repeat(rank != _FREE, _FANOUT)
        lane = jnp.arange(_FANOUT, dtype=jnp.int32)[None]
        node = (node[:, None] * _FANOUT + lane).reshape(-1)


def _write(
    nodes: UInt[Array, "P 2"], slot: Index, item: UInt[Array, "B 2"], zero: Word, capacity: int
) -> UInt[Array, "P 2"]:
    """Returns the nodes with items written to these slots; slots past the end are dropped."""
    starts, rows = _starts(capacity), slot.shape[0]
    at = jnp.where(slot < capacity, slot, starts[-1])
    nodes = nodes.at[at].set(item, mode="drop")
    # In lower levels, recompute the parents of changed nodes; a dropped row stands for the last
    # leaf.
    node, level = jnp.minimum(slot, capacity - 1), 0
    lane = jnp.arange(_FANOUT, dtype=jnp.int32)[None]
    while starts[level + 2] - starts[level + 1] > max(rows, _FANOUT):
        node = node >> _SHIFT
        blocks = nodes[starts[level] + node[:, None] * _FANOUT + lane]
        level += 1
        nodes = nodes.at[starts[level] + node].set(_least(blocks, zero))
    # In higher levels, which have no more nodes than rows, recompute all of them.
    parts, values = [], nodes[starts[level] : starts[level + 1]]
    for start, stop in itertools.pairwise(starts[level + 1 :]):
        values = _least(values.reshape(-1, _FANOUT, 2), zero)
        parts += [values, _empty(capacity)[: stop - start - values.shape[0]]]
        values = jnp.concatenate(parts[-2:])
    return nodes.at[starts[level + 1] :].set(jnp.concatenate(parts))


@jax.jit
def _recomputed(
    ranking: Ranking,
) -> tuple[Ranking, Float[Array, " N"], Bool[Array, " N"], UInt[Array, " N"]]:
    """Returns the ranking with all nodes recomputed, and each slot's score, mask and generation."""
    slot = jnp.arange(ranking.capacity, dtype=jnp.int32)
    return ranking.recomputed(), ranking.score, ranking.scored, ranking.generation(slot)

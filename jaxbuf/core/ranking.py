"""Slots that keep the items with the highest scores.

A tree over the slots knows in each node the lowest of its items: the one with the smallest score,
of equal ones the oldest. New rows are sorted, best first; each takes the place of the lowest item
if it ranks above it, and the first that does not ends it. So an add costs a path of the tree for
each row, whatever the capacity holds, and no slot is given to two rows.

As in ``tree_kernels`` there are two forms, which agree bit for bit: on a CPU one loop over the
rows; elsewhere one kernel per level for all rows, which finds the lowest ``B`` items with a beam.
"""

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jax.custom_batching import custom_vmap
from jaxtyping import Array, Bool, Float, Int, UInt

from jaxbuf.core import in_place, rowwise
from jaxbuf.core.slots import Slots, same_item, scale_word

# Scores and sequence numbers of one block of siblings fill one cache line.
_FANOUT = 8
_SHIFT = _FANOUT.bit_length() - 1
# Ranks above every score: what a free slot holds, so that it is never the lowest.
_FREE = np.uint32(0xFFFFFFFF)
# Off a CPU, levels of up to so many nodes are recomputed as a whole.
_WHOLE_LEVEL = 4096
# The rank of -inf, the least of all scores.
_LEAST = np.uint32(2**23 - 1)
# Ranks below every score, -inf included.
_DEMOTED = np.uint32(1)


class Ranking(struct.PyTreeNode):
    """The ``capacity`` items with the highest scores; of equal ones, the newest.

    An item's generation is its number in the order of arrival. Numbers wrap at 2**32; ties are
    exact between items that arrived within 2**31 of each other.

    Attributes:
        nodes: Scores and generations, ``[P]`` uint32: the leaves, then each level above them, in
            blocks of siblings.
        counters: Number of the next item, and size, ``[2]`` uint32.
        capacity: Number of slots.
    """

    nodes: UInt[Array, " P"]
    counters: UInt[Array, " 2"]
    capacity: int = struct.field(pytree_node=False)

    @classmethod
    def create(cls, capacity: int) -> Self:
        """``capacity`` free slots."""
        # The numbers start at 1, so that no generation a caller makes up as zero is ever live.
        return cls(
            nodes=_empty(capacity), counters=jnp.asarray([1, 0], jnp.uint32), capacity=capacity
        )

    @property
    def size(self) -> Int[Array, ""]:
        """Live items."""
        return self.counters[..., 1].astype(jnp.int32)

    @property
    def score(self) -> Float[Array, " N"]:
        """The score in each slot, ``[capacity]``; −inf where there is none."""
        return _from_rank(jnp.where(self.scored, self._ranks, _LEAST))

    @property
    def scored(self) -> Bool[Array, " N"]:
        """Which slots hold an item that has a score, ``[capacity]``: a demoted one has none."""
        ranks = self._ranks
        return (ranks >= _LEAST) & (ranks != _FREE)

    def place(
        self, rows: int, mask: Bool[Array, " B"] | None, score: Float[Array, " B"] | None
    ) -> tuple[Self, Int[Array, " B"]]:
        """Free slots first, then those of the lowest items, each for a row that ranks higher.

        Raises:
            ValueError: If there is no ``score``.
        """
        if score is None:
            raise ValueError("Lowest ranks items by their score; pass score=[B] to add")
        taken = jnp.ones((rows,), bool) if mask is None else mask
        arrival = self.counters[0] + jnp.cumsum(taken, dtype=jnp.uint32) - jnp.uint32(1)
        count = jnp.sum(taken, dtype=jnp.uint32)
        rank = jnp.where(taken, to_rank(score), jnp.uint32(0))
        # Best first; of equal ones the newest. Rows that are not taken have rank 0 and come last.
        falling, from_last = rowwise.sort(~rank[::-1], 2**32)
        order = rows - 1 - from_last
        rank, arrival = ~falling, arrival[order]
        if rows == 1:
            # XLA unrolls a loop of one step, and then copies the tree.
            rank, arrival = jnp.pad(rank, (0, 1)), jnp.pad(arrival, (0, 1))
        nodes, slot = _placer(self.capacity)(
            self.nodes[None], rank[None], arrival[None], self.counters[1][None]
        )
        size = jnp.minimum(self.counters[1] + count, jnp.uint32(self.capacity))
        placed = self.replace(nodes=nodes[0], counters=jnp.stack([self.counters[0] + count, size]))
        index = jnp.zeros((rows,), jnp.int32).at[order].set(slot[0, :rows], unique_indices=True)
        return placed, index

    def refuses(self, score: Float[Array, " B"]) -> Bool[Array, " B"]:
        """Which rows rank below everything here, with no slot free: they cannot stay."""
        root = self.nodes[_starts(self.capacity)[-1]]
        return (self.size == self.capacity) & (to_rank(score) < root)

    def live(self, index: Int[Array, " B"]) -> Bool[Array, " B"]:
        """Whether there is an item at ``index``."""
        # Slots are filled in order and never become free.
        return (index >= 0) & (index < self.size)

    def holds(self, slots: Slots) -> Bool[Array, " B"]:
        """Whether the items that these names mean are still there."""
        return rowwise.each(same_item, slots, self)

    def generation(self, index: Int[Array, " B"]) -> UInt[Array, " B"]:
        """The number of the item at ``index``."""
        at = _position(jnp.clip(index, 0, self.capacity - 1)) + _FANOUT
        return self.nodes.at[at].get(mode="promise_in_bounds")

    def draw(self, words: UInt[Array, " B"]) -> Int[Array, " B"]:
        """A live slot for each random word, all equally likely; arbitrary if there is none."""
        return scale_word(words, self.counters[1]).astype(jnp.int32)

    def demote(self, index: Int[Array, " B"]) -> Self:
        """The items at ``index`` rank below all others from now on, and go first."""
        slot = jnp.where(self.live(index), index, self.capacity)
        at = jnp.where(slot < self.capacity, _position(slot), _length(self.capacity))
        nodes = self.nodes.at[at].set(_DEMOTED, mode="drop")[None]
        ascend = functools.partial(_ascend, self.capacity)
        nodes = lax.platform_dependent(
            nodes, slot[None], cpu=ascend, default=functools.partial(ascend, whole=_WHOLE_LEVEL)
        )
        return self.replace(nodes=nodes[0])

    def recomputed(self) -> Self:
        """The same, with every node above the leaves computed anew from its children."""
        slot = jnp.arange(self.capacity, dtype=jnp.int32)
        return self.replace(nodes=_ascend(self.capacity, self.nodes[None], slot[None])[0])

    def clear(self) -> Self:
        """No items. The numbers go on, so that slots sampled before stay stale."""
        counters = jnp.stack([self.counters[0], jnp.uint32(0)])
        return self.replace(nodes=_empty(self.capacity), counters=counters)

    def metrics(self) -> dict[str, Array]:
        """Least, largest and mean score of the live items; 0 if there are none."""
        return score_metrics(self.score, self.scored)

    @property
    def _ranks(self) -> UInt[Array, " N"]:
        blocks = self.nodes[: _starts(self.capacity)[1]].reshape(-1, 2, _FANOUT)
        return blocks[:, 0].reshape(-1)[: self.capacity]


def score_metrics(score: Float[Array, " N"], live: Bool[Array, " N"]) -> dict[str, Array]:
    """``score_min``, ``score_max`` and ``score_mean`` of the live slots; 0 if there are none."""
    some = jnp.any(live)
    count = jnp.maximum(jnp.sum(live, dtype=jnp.int32), 1).astype(jnp.float32)
    nothing = jnp.float32(0)
    least = jnp.min(jnp.where(live, score, jnp.inf))
    largest = jnp.max(jnp.where(live, score, -jnp.inf))
    # A sum of both infinities is no number; neither says anything about a mean.
    mean = jnp.sum(jnp.where(live & jnp.isfinite(score), score, nothing) / count)
    low, high = least == -jnp.inf, largest == jnp.inf
    mean = jnp.where(low | high, jnp.where(low, least, largest), mean)
    return {
        "score_min": jnp.where(some, least, nothing),
        "score_max": jnp.where(some, largest, nothing),
        "score_mean": jnp.where(some & ~(low & high), mean, nothing),
    }


def to_rank(score: jax.Array) -> jax.Array:
    """Scores as unsigned numbers in the same order, from 2**23 - 1 for -inf; never ``_FREE``."""
    bits = lax.bitcast_convert_type(jnp.where(score == 0, 0.0, score), jnp.uint32)
    negative = bits >> jnp.uint32(31) == 1
    return jnp.where(negative, ~bits, bits | jnp.uint32(1 << 31))


def _from_rank(rank: jax.Array) -> jax.Array:
    positive = rank >> jnp.uint32(31) == 1
    return lax.bitcast_convert_type(
        jnp.where(positive, rank ^ jnp.uint32(1 << 31), ~rank), jnp.float32
    )


@functools.cache
def _starts(capacity: int) -> tuple[int, ...]:
    """Where each level starts in the flat array, from the leaves to the root."""
    # One spare leaf, at ``capacity``, takes what is not stored.
    count, starts = capacity + 1, [0]
    while count > 1:
        count = math.ceil(count / _FANOUT)
        starts.append(starts[-1] + count * 2 * _FANOUT)
    return tuple(starts)


def _blocks(capacity: int) -> list[int]:
    """How many blocks each level has, but for the root: one for each node of the next level."""
    return [(end - start) // (2 * _FANOUT) for start, end in itertools.pairwise(_starts(capacity))]


def _length(capacity: int) -> int:
    return _starts(capacity)[-1] + 2 * _FANOUT


def _empty(capacity: int) -> jax.Array:
    block = np.repeat(np.asarray([_FREE, 0], np.uint32), _FANOUT)
    return jnp.tile(jnp.asarray(block), _length(capacity) // (2 * _FANOUT))


def _position(node: jax.Array) -> jax.Array:
    """Where a node's score lies within its level; its generation lies ``_FANOUT`` further."""
    block = lax.shift_right_logical(node, jnp.asarray(_SHIFT, node.dtype)) << (_SHIFT + 1)
    return block | (node & (_FANOUT - 1))


def _below(a: tuple[jax.Array, jax.Array], b: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Whether item ``a`` ranks below ``b``: a smaller score or, of equal ones, an older item."""
    older = lax.bitcast_convert_type(a[1] - b[1], jnp.int32) < 0
    return (a[0] < b[0]) | ((a[0] == b[0]) & older)


def _lowest(rank: list[jax.Array], arrival: list[jax.Array]) -> tuple[jax.Array, jax.Array]:
    """The lowest of several items, each ``(rank, arrival)``."""
    items = list(zip(rank, arrival, strict=True))
    while len(items) > 1:
        half = len(items) // 2
        pairs = zip(items[:half], items[half:], strict=True)
        items = [_pick(_below(a, b), a, b) for a, b in pairs]
    return items[0]


def _pick(
    which: jax.Array, a: tuple[jax.Array, jax.Array], b: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    return lax.select(which, a[0], b[0]), lax.select(which, a[1], b[1])


@functools.cache
def _placer(capacity: int) -> Callable[..., Any]:
    """A function of trees ``[S, P]``, sorted rows ``[S, B]`` and sizes ``[S]``.

    It returns the trees, and the slot of each row: the capacity if it does not stay.
    """

    @custom_vmap
    def call(nodes: jax.Array, rank: jax.Array, arrival: jax.Array, size: jax.Array) -> Any:
        return lax.platform_dependent(
            nodes,
            rank,
            arrival,
            size,
            cpu=functools.partial(_place_loop, capacity),
            default=functools.partial(_place_vector, capacity),
        )

    @call.def_vmap
    def _(axis_size: int, batched: list[bool], *args: jax.Array) -> Any:
        # More buffers are more trees in one array: a batched update of a slice costs a full pass.
        merged = [
            (arg if is_batched else jnp.broadcast_to(arg, (axis_size, *arg.shape))).reshape(
                -1, *arg.shape[1 + is_batched :]
            )
            for arg, is_batched in zip(args, batched, strict=True)
        ]
        out = call(*merged)
        split = tuple(o.reshape(axis_size, -1, *o.shape[1:]) for o in out)
        return split, (True, True)

    return call


def _place_loop(
    capacity: int, nodes: jax.Array, rank: jax.Array, arrival: jax.Array, size: jax.Array
) -> tuple[jax.Array, jax.Array]:
    trees, rows = rank.shape
    starts = _starts(capacity)
    level_start = jnp.asarray(starts, jnp.int32)
    depth, length = len(starts) - 1, _length(capacity)
    rank, arrival = rank.reshape(-1), arrival.reshape(-1)
    size = size.astype(jnp.int32)
    nothing = (jnp.uint32(_FREE), jnp.uint32(0))

    def block(flat: jax.Array, at: jax.Array) -> list[jax.Array]:
        values = lax.dynamic_slice(flat, (at,), (2 * _FANOUT,))
        return [values[i] for i in range(2 * _FANOUT)]

    def write(flat: jax.Array, at: jax.Array, item: tuple[jax.Array, jax.Array]) -> jax.Array:
        flat = lax.dynamic_update_slice(flat, item[0][None], (at,))
        return lax.dynamic_update_slice(flat, item[1][None], (at + _FANOUT,))

    # A row takes a step for each level on its way down to the lowest item, and one for each on its
    # way up from there. All steps are alike, in one loop, for XLA:CPU makes one native function of
    # it only if a step is short. What a node knows of its children is written on the way down too,
    # where it is known already; and the spare leaf, where no other is to be written.
    def step(carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        row, turn, node, flat, slots = carry
        tree = row // rows if trees > 1 else jnp.int32(0)
        base = tree * length
        down, bottom = turn < depth, turn == depth - 1
        level = jnp.where(down, depth - 1 - turn, turn - depth)
        above = jnp.where(down, node, lax.shift_right_logical(node, jnp.int32(_SHIFT)))
        values = block(flat, base + level_start[level] + above * (2 * _FANOUT))
        lowest = _lowest(values[:_FANOUT], values[_FANOUT:])
        child = jnp.int32(0)
        for k in range(1, _FANOUT):
            same = (values[k] == lowest[0]) & (values[_FANOUT + k] == lowest[1])
            child = child + k * same.astype(jnp.int32)
        found = above * _FANOUT + child

        free = size[tree] + (row - tree * rows)
        filling = free < capacity
        new = (rank[row], arrival[row])
        enters = bottom & (new[0] > 0) & (filling | _below(lowest, new))
        slot = jnp.where(enters, jnp.where(filling, free, found), capacity)
        before = lax.dynamic_slice(slots, (row,), (1,))[0]
        slots = lax.dynamic_update_slice(slots, jnp.where(bottom, slot, before)[None], (row,))

        at = base + level_start[level + 1] + _position(above)
        flat = write(flat, in_place.later(at, child, slot), lowest)
        flat = write(flat, base + _position(slot), _pick(enters, new, nothing))

        # They are sorted: after the first that does not stay, none does.
        ends = bottom & ~enters
        done = ends | (turn == 2 * depth - 1)
        row = jnp.where(ends, (tree + 1) * rows, row + done.astype(jnp.int32))
        node = jnp.where(bottom, slot, jnp.where(down, found, above))
        return row, jnp.where(done, 0, turn + 1), jnp.where(done, 0, node), flat, slots

    zero = rowwise.after(rank)
    slots = jnp.broadcast_to(zero + capacity, (trees * rows,))
    carry = (zero, zero, zero, nodes.reshape(-1), slots)
    *_, flat, slots = lax.while_loop(lambda carry: carry[0] < trees * rows, step, carry)
    return flat.reshape(nodes.shape), slots.reshape(trees, rows)


def _place_vector(
    capacity: int, nodes: jax.Array, rank: jax.Array, arrival: jax.Array, size: jax.Array
) -> tuple[jax.Array, jax.Array]:
    trees, rows = rank.shape
    starts = _starts(capacity)
    lane = jnp.arange(_FANOUT, dtype=jnp.int32)[None, None]
    oldest_possible = arrival[:, :1] ^ jnp.uint32(1 << 31)

    # The lowest items of all lie under the nodes that are lowest themselves. Down to where a level
    # has more than two blocks for each row these are all of them.
    blocks = _blocks(capacity)
    first = next(level for level, count in enumerate(blocks) if count <= 2 * rows)
    beam = jnp.broadcast_to(jnp.arange(blocks[first], dtype=jnp.int32), (trees, blocks[first]))
    low = (jnp.zeros(beam.shape, jnp.uint32), jnp.zeros(beam.shape, jnp.uint32))
    for start in reversed(starts[: first + 1]):
        child = (beam[:, :, None] * _FANOUT + lane).reshape(trees, -1)
        at = start + _position(child)
        # The children of a node that does not exist are nodes of another level.
        exists = jnp.repeat(low[0] != _FREE, _FANOUT, axis=1)
        found = jnp.where(exists, jnp.take_along_axis(nodes, at, axis=1), _FREE)
        age = jnp.take_along_axis(nodes, at + _FANOUT, axis=1) - oldest_possible
        rank_low, age_low, beam = lax.sort((found, age, child), num_keys=2)
        width = min(rows, beam.shape[1])
        low = (rank_low[:, :width], age_low[:, :width])
        beam = beam[:, :width]

    number = jnp.arange(rows, dtype=jnp.int32)[None]
    free = size.astype(jnp.int32)[:, None] + number
    which = free - capacity
    inside = jnp.clip(which, 0, beam.shape[1] - 1)
    victim = jnp.take_along_axis(beam, inside, axis=1)
    lowest = (
        jnp.take_along_axis(low[0], inside, axis=1),
        jnp.take_along_axis(low[1], inside, axis=1),
    )
    weaker = _below(lowest, (rank, arrival - oldest_possible))
    enters = (rank > 0) & ((which < 0) | (weaker & (which < beam.shape[1])))
    slot = jnp.where(enters, jnp.where(which < 0, free, victim), capacity)

    at = jnp.where(enters, _position(slot), _length(capacity))
    nodes = _put(nodes, at, (rank, arrival))
    return _ascend(capacity, nodes, slot, _WHOLE_LEVEL // trees), slot


def _put(nodes: jax.Array, at: jax.Array, item: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Write items ``[S, B]`` at positions in trees ``[S, P]``, unless these are past the end."""
    tree = jnp.arange(nodes.shape[0], dtype=jnp.int32)[:, None]
    both = jnp.concatenate([at, at + _FANOUT], axis=1)
    return nodes.at[tree, both].set(jnp.concatenate(item, axis=1), mode="drop")


def _ascend(capacity: int, nodes: jax.Array, slot: jax.Array, whole: int = 0) -> jax.Array:
    """The trees ``[S, P]`` after the leaves at ``slot [S, B]`` have changed.

    Levels of up to ``whole`` nodes, or as many as there are rows, are recomputed as a whole.
    """
    trees, rows = slot.shape
    starts = _starts(capacity)
    levels = _blocks(capacity)
    apart = next(level for level, count in enumerate(levels) if count <= max(rows, whole))
    tree = jnp.arange(trees, dtype=jnp.int32)[:, None, None]
    lane = jnp.arange(2 * _FANOUT, dtype=jnp.int32)[None, None]
    node = slot
    for below, start in itertools.islice(itertools.pairwise(starts), apart):
        node = lax.shift_right_logical(node, jnp.asarray(_SHIFT, node.dtype))
        block = (node * (2 * _FANOUT))[:, :, None] + lane
        nodes = _put(nodes, start + _position(node), _lowest_of(nodes[tree, below + block]))
    blocks = nodes[:, starts[apart] : starts[apart + 1]].reshape(trees, -1, 2 * _FANOUT)
    parts = []
    for count in [*levels[apart + 1 :], 1]:
        pad = ((0, 0), (0, count * _FANOUT - blocks.shape[1]))
        rank, arrival = _lowest_of(blocks)
        rank = jnp.pad(rank, pad, constant_values=_FREE).reshape(trees, count, _FANOUT)
        arrival = jnp.pad(arrival, pad).reshape(trees, count, _FANOUT)
        blocks = jnp.concatenate([rank, arrival], axis=2)
        if count > 1:
            # One kernel for both; what is smaller becomes part of what comes next.
            blocks = lax.optimization_barrier(blocks)
        parts.append(blocks.reshape(trees, -1))
    return lax.dynamic_update_slice(nodes, jnp.concatenate(parts, axis=1), (0, starts[apart + 1]))


def _lowest_of(blocks: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The lowest item of each block ``[S, B, 2 * _FANOUT]``."""
    children = [blocks[:, :, k] for k in range(2 * _FANOUT)]
    return _lowest(children[:_FANOUT], children[_FANOUT:])

"""Sums and extremes over slots, kept up to date as slots change.

A node has ``FANOUT`` children and is always computed from them, never changed by a difference:
nothing drifts, and a bad value is gone once it is overwritten.

All nodes lie in one array of bits, the leaves first and then level by level. A *block* is the 16
children of one node. Of leaves it is 16 numbers; further up it has 16 numbers for each operation
and 16 counts, so that one gather reads all that a node is computed from, and one scatter writes it.

References:
    Schaul et al., Prioritized Experience Replay, ICLR 2016 (appendix B.2.1: the sum tree).
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Literal, Self, cast, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jaxtyping import Array, Float, Int

from jaxbuf.core import native

FANOUT = 16
_SHIFT = FANOUT.bit_length() - 1
# The largest float32 below x is x * _BELOW, for every normal x.
_BELOW = 1.0 - 2.0**-24
_INFINITY = 0x7F800000

Op = Literal["sum", "min", "max", "min_positive"]
OPS: tuple[Op, ...] = get_args(Op)
_NEUTRAL: dict[Op, float] = {"sum": 0.0, "min": math.inf, "max": -math.inf, "min_positive": 0.0}


@dataclasses.dataclass(frozen=True)
class Level:
    """Where the nodes of a level lie.

    Attributes:
        count: How many nodes the level has.
        start: Where it begins in the array.
        width: Length of one of its blocks.
    """

    count: int
    start: int
    width: int

    @property
    def stop(self) -> int:
        """Where it ends in the array; its last block may be padded."""
        return self.start + -(-self.count // FANOUT) * self.width


class SegmentTree(struct.PyTreeNode):
    """An array of ``capacity`` numbers with reductions over all of them and over ranges.

    Attributes:
        nodes: The bits of the leaves and of the nodes above them, ``[P]`` int32.
        roots: The bits of the reduction over all leaves, one for each operation, and last how many
            leaves are positive; ``[len(ops) + 1]`` int32.
        capacity: Number of leaves.
        ops: The reductions it keeps.

    Example:
        >>> import jax.numpy as jnp
        >>> tree = SegmentTree.create(4, ops=("sum", "max"))
        >>> tree = tree.set(jnp.arange(4), jnp.array([3.0, 1.0, 2.0, 5.0]))
        >>> float(tree.root("sum")), float(tree.reduce(1, 3)), float(tree.root("max"))
        (11.0, 3.0, 5.0)
        >>> leaf, value = tree.find(jnp.array([0.0, 2.9, 3.0, 3.9, 4.0, 6.0, 10.9]))
        >>> leaf.tolist(), value.tolist()
        ([0, 0, 1, 1, 2, 3, 3], [3.0, 3.0, 1.0, 1.0, 2.0, 5.0, 5.0])
    """

    nodes: Int[Array, " P"]
    roots: Int[Array, " K"]
    capacity: int = struct.field(pytree_node=False)
    ops: tuple[Op, ...] = struct.field(pytree_node=False)

    @classmethod
    def create(cls, capacity: int, ops: Sequence[str] = ("sum",)) -> Self:
        """Returns a tree in which no leaf is set yet.

        Args:
            capacity: Number of leaves, at least 1.
            ops: Which of ``"sum"``, ``"min"``, ``"max"`` and ``"min_positive"`` (the least of the
                leaves above zero, 0 if there is none). A leaf that was never set counts as the
                neutral element, which for ``"max"`` next to sums is 0: their leaves are masses and
                not negative.

        Raises:
            ValueError: If ``capacity`` is below 1, or if ``ops`` names no operation, one twice, an
                unknown one, or ``"min"`` next to others (whose unset leaves are not infinite).
        """
        if capacity < 1:
            raise ValueError(f"capacity is {capacity}; a tree needs at least one leaf")
        if not ops or len(set(ops)) < len(ops) or not set(ops) <= set(OPS):
            raise ValueError(f"ops is {tuple(ops)}; choose from {OPS}, each once")
        if "min" in ops and len(ops) > 1:
            raise ValueError(f"ops is {tuple(ops)}; give 'min' a tree of its own")
        known = cast("tuple[Op, ...]", tuple(ops))
        leaves, *above = levels(capacity, len(known))
        empty = _empty(known)
        blocks = (above[-1].stop - leaves.stop) // (FANOUT * len(empty)) if above else 0
        block = jnp.repeat(jnp.asarray(empty), FANOUT)
        return cls(
            nodes=jnp.concatenate(
                [jnp.full((leaves.stop,), empty[0], jnp.int32), jnp.tile(block, blocks)]
            ),
            roots=jnp.asarray(empty),
            capacity=capacity,
            ops=known,
        )

    @property
    def leaves(self) -> Float[Array, " N"]:
        """The numbers themselves, ``[capacity]``."""
        return _floats(self.nodes[..., : self.capacity])

    def root(self, op: str = "sum") -> Float[Array, ""]:
        """The reduction over all leaves."""
        return _floats(self.roots[..., self._row(op)])

    @property
    def nnz(self) -> Int[Array, ""]:
        """How many leaves are positive and finite."""
        return self.roots[..., len(self.ops)]

    def set(self, index: Int[Array, " B"], value: Float[Array, " B"]) -> Self:
        """Set leaves.

        Args:
            index: Which, ``[B]``; rows outside ``[0, capacity)`` are dropped, and of several rows
                for one leaf the last wins.
            value: To what, ``[B]``; never NaN.
        """
        if index.shape[0] == 0:
            return self
        nodes, roots = _set(self.nodes, index, value, self.ops, self.capacity)
        return self.replace(nodes=nodes, roots=roots)

    def set_all(self, value: Float[Array, " N"]) -> Self:
        """Set every leaf, ``[capacity]``; costs a pass over the tree."""
        leaves, *above = levels(self.capacity, len(self.ops))
        empty = _empty(self.ops)
        bits = jnp.pad(_bits(value), (0, leaves.stop - self.capacity), constant_values=empty[0])
        parts, roots = _above(self.ops, bits.reshape(-1, 1, FANOUT), len(above))
        return self.replace(nodes=jnp.concatenate([bits, *parts]), roots=roots)

    def find(
        self, prefix: Float[Array, " B"], refine: Float[Array, " B"] | None = None
    ) -> tuple[Int[Array, " B"], Float[Array, " B"]]:
        """The leaf in which each prefix lies: the smallest ``i`` with ``prefix < v_0 + ... + v_i``.

        The rule is exact up to the rounding of the sums. While the total is positive no leaf
        without mass is ever returned, for any prefix in ``[0, total)``; and always some leaf that
        is there, whatever the tree and the prefixes hold.

        Args:
            prefix: Points in ``[0, total)``, ``[B]``.
            refine: What to add to each residual half way down, ``[B]``, where the nodes are so much
                lighter than the total that bits lost at the top can be filled in; see ``samplers``.

        Returns:
            The leaves ``[B]`` and their values ``[B]``.
        """
        self._row("sum")
        return _find(self.nodes, prefix, refine, self.ops, self.capacity)

    def read(self, index: Int[Array, " B"]) -> tuple[Int[Array, " B"], Float[Array, " B"]]:
        """Read leaves.

        Args:
            index: Which, ``[B]``; one outside ``[0, capacity)`` reads as the nearest leaf.

        Returns:
            The same ``index``, and the values ``[B]``. Whoever sets these leaves next should do so
            by the index that is returned: it is there only when the values have been read, so that
            XLA need not copy the tree to read them later.
        """
        if index.shape[0] == 0:
            return index, jnp.zeros((0,), jnp.float32)
        return _read(self.nodes, index, self.capacity)

    def reduce(
        self, start: int | Int[Array, ""], stop: int | Int[Array, ""], op: str = "sum"
    ) -> Float[Array, ""]:
        """The reduction over leaves ``start`` to ``stop - 1``; the neutral element if none.

        Touches two blocks of nodes per level. ``start`` and ``stop`` are clipped to the leaves.
        """
        row, name = self._row(op), cast("Op", op)
        neutral = _bits(jnp.full((FANOUT,), _NEUTRAL[name], jnp.float32))
        low = jnp.clip(jnp.asarray(start, jnp.int32), 0, self.capacity)
        high = jnp.clip(jnp.asarray(stop, jnp.int32), low, self.capacity)
        lane = jnp.arange(FANOUT, dtype=jnp.int32)
        parts = [neutral]
        for number, level in enumerate(levels(self.capacity, len(self.ops))):
            first = level.start + (row * FANOUT if number else 0)
            # Whole blocks are left to the level above; the ragged ends are taken here.
            above_low, above_high = -(-low // FANOUT), high // FANOUT
            inner_low, inner_high = above_low * FANOUT, above_high * FANOUT
            for block, begin, end in (
                (low // FANOUT, low, jnp.minimum(inner_low, high)),
                (above_high, jnp.maximum(inner_high, inner_low), high),
            ):
                node = block * FANOUT + lane
                inside = (node >= begin) & (node < end)
                values = self.nodes.at[first + block * level.width + lane].get(mode="clip")
                parts.append(jnp.where(inside, values, neutral))
            low, high = above_low, jnp.maximum(above_high, above_low)
        whole = (jnp.arange(FANOUT) >= low) & (jnp.arange(FANOUT) < high)
        parts.append(jnp.where(whole, self.roots[row], neutral))
        if name == "sum":
            return jnp.sum(_floats(jnp.stack(parts)))
        return _floats(combine(name, jnp.concatenate(parts)))

    def replace_root(self, op: str, value: Float[Array, ""]) -> Self:
        """The same leaves with another reduction over all of them, until some leaf is set."""
        return self.replace(roots=self.roots.at[..., self._row(op)].set(_bits(value)))

    def clear(self) -> Self:
        """Returns the tree as it was created; shares no array with the original."""
        return type(self).create(self.capacity, self.ops)

    def _row(self, op: str) -> int:
        """The place of an operation among those that the tree keeps."""
        if op not in self.ops:
            raise ValueError(f"this tree keeps {self.ops}; create it with {op!r} among its ops")
        return self.ops.index(op)


@functools.cache
def levels(capacity: int, ops: int) -> tuple[Level, ...]:
    """The levels of a tree with so many operations, from the leaves to the children of the root."""
    found = [Level(capacity, 0, FANOUT)]
    while found[-1].count > FANOUT:
        count = -(-found[-1].count // FANOUT)
        found.append(Level(count, found[-1].stop, FANOUT * (ops + 1)))
    return tuple(found)


def combine(op: Op, children: Int[Array, "... K"]) -> Int[Array, "..."]:
    """The bits of a node, from those of its children.

    Sums are added in the order in which a descent subtracts them. As integers, with the lower bits
    of negative ones flipped, floats keep their order, and extremes need no order of their own.
    """
    if op == "sum":
        return _bits(_sum4(_sum4(_floats(children).reshape(*children.shape[:-1], 4, 4))))
    if op == "min_positive":
        least = jnp.min(jnp.where(children > 0, children, _INFINITY), axis=-1)
        return jnp.where(least < _INFINITY, least, 0)
    pick = jnp.max if op == "max" else jnp.min
    return _ordered(pick(_ordered(children), axis=-1))


def _ordered(bits: Int[Array, "..."]) -> Int[Array, "..."]:
    return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def _sum4(terms: Float[Array, "... 4"]) -> Float[Array, "..."]:
    return ((terms[..., 0] + terms[..., 1]) + terms[..., 2]) + terms[..., 3]


def _bits(numbers: Float[Array, "..."]) -> Int[Array, "..."]:
    return lax.bitcast_convert_type(numbers, jnp.int32)


def _floats(bits: Int[Array, "..."]) -> Float[Array, "..."]:
    return lax.bitcast_convert_type(bits, jnp.float32)


def _empty(ops: tuple[Op, ...]) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """The bits of a node without leaves, one for each operation, and its count."""
    neutral = {_NEUTRAL[op] for op in ops}
    value = np.float32(0.0 if 0.0 in neutral else neutral.pop())
    return np.asarray([*[value.view(np.int32)] * len(ops), 0], np.int32)


def _nodes(ops: tuple[Op, ...], blocks: Int[Array, "B R K"]) -> Int[Array, "B R"]:
    """Nodes from their children: blocks of leaves have one row, others one for each operation."""
    if blocks.shape[1] == 1:
        leaves = blocks[:, 0]
        positive = (leaves > 0) & (leaves < _INFINITY)
        rows, counts = [leaves] * len(ops), positive.astype(jnp.int32)
    else:
        *rows, counts = (blocks[:, k] for k in range(len(ops) + 1))
    values = [combine(op, row) for op, row in zip(ops, rows, strict=True)]
    return jnp.stack([*values, jnp.sum(counts, axis=-1, dtype=jnp.int32)], axis=-1)


def _above(
    ops: tuple[Op, ...], blocks: Int[Array, "B R K"], count: int
) -> tuple[list[Int[Array, " L"]], Int[Array, " K"]]:
    """The next ``count`` levels above some blocks, as they lie in the array; and the roots."""
    parts: list[Array] = []
    empty = _empty(ops)
    for _ in range(count):
        values = _nodes(ops, blocks)
        missing = -values.shape[0] % FANOUT
        padding = jnp.broadcast_to(jnp.asarray(empty), (missing, len(empty)))
        values = jnp.concatenate([values, padding]).reshape(-1, FANOUT, len(empty))
        blocks = jnp.swapaxes(values, 1, 2)
        parts.append(blocks.reshape(-1))
    return parts, _nodes(ops, blocks)[0]


def _read_blocks(nodes: Int[Array, " P"], start: Int[Array, " B"], width: int) -> Int[Array, "B W"]:
    return jax.vmap(lambda at: lax.dynamic_slice(nodes, (at,), (width,)))(start)


@functools.partial(jax.jit, static_argnames=("ops", "capacity"))
def _set(
    nodes: Int[Array, " P"],
    index: Int[Array, " B"],
    value: Float[Array, " B"],
    ops: tuple[Op, ...],
    capacity: int,
) -> tuple[Int[Array, " P"], Int[Array, " K"]]:
    natively = functools.partial(
        native.set_leaves, ops=[OPS.index(op) for op in ops], capacity=capacity
    )
    plainly = functools.partial(_set_plainly, ops, capacity)
    return native.either(natively, plainly, nodes, index, _bits(value))


def _set_plainly(
    ops: tuple[Op, ...],
    capacity: int,
    nodes: Int[Array, " P"],
    index: Int[Array, " B"],
    bits: Int[Array, " B"],
) -> tuple[Int[Array, " P"], Int[Array, " K"]]:
    below, *above = levels(capacity, len(ops))
    rows, nowhere = index.shape[0], nodes.shape[0]
    legal = (index >= 0) & (index < capacity)
    leaf = jnp.where(legal, index, nowhere)
    if rows > 1:
        # The leaves are the scratch in which the last of several rows for one leaf is found.
        number = jnp.arange(1, rows + 1, dtype=jnp.int32)
        nodes = nodes.at[leaf].set(0, mode="drop").at[leaf].max(number, mode="drop")
        last = nodes.at[leaf].get(mode="fill", fill_value=0) == number
        leaf = jnp.where(last, leaf, nowhere)
    nodes = nodes.at[leaf].set(bits, mode="drop")
    # Recompute the parents of what has changed, until a level has few nodes, or no more than there
    # are rows: from there on all are recomputed, which takes no gathers. A dropped row stands for
    # the first leaf.
    node = jnp.where(legal, index, 0)
    place = FANOUT * jnp.arange(len(ops) + 1, dtype=jnp.int32)
    while above and above[0].count > max(rows, FANOUT**2):
        level = above.pop(0)
        node = node >> _SHIFT
        blocks = _read_blocks(nodes, below.start + node * below.width, below.width)
        values = _nodes(ops, blocks.reshape(rows, -1, FANOUT))
        goal = level.start + (node >> _SHIFT) * level.width + (node & (FANOUT - 1))
        nodes = nodes.at[goal[:, None] + place[None]].set(values, mode="promise_in_bounds")
        below = level
    blocks = nodes[below.start : below.stop].reshape(-1, below.width // FANOUT, FANOUT)
    parts, roots = _above(ops, blocks, len(above))
    if parts:
        nodes = lax.dynamic_update_slice(nodes, jnp.concatenate(parts), (below.stop,))
    return nodes, roots


@functools.partial(jax.jit, static_argnames=("ops", "capacity"))
def _find(
    nodes: Int[Array, " P"],
    prefix: Float[Array, " B"],
    refine: Float[Array, " B"] | None,
    ops: tuple[Op, ...],
    capacity: int,
) -> tuple[Int[Array, " B"], Float[Array, " B"]]:
    natively = functools.partial(
        native.find,
        refined=refine is not None,
        row=ops.index("sum"),
        ops=len(ops),
        capacity=capacity,
    )
    plainly = functools.partial(_find_plainly, ops, capacity, refine is not None)
    return native.either(natively, plainly, nodes, prefix, prefix if refine is None else refine)


def _find_plainly(
    ops: tuple[Op, ...],
    capacity: int,
    refined: bool,
    nodes: Int[Array, " P"],
    prefix: Float[Array, " B"],
    refine: Float[Array, " B"],
) -> tuple[Int[Array, " B"], Float[Array, " B"]]:
    down = levels(capacity, len(ops))[::-1]
    depth, row = len(down), FANOUT * ops.index("sum")
    middle = (depth + 1) // 2 if refined else depth
    starts = jnp.asarray([level.start + row for level in down[:-1]] + [0], jnp.int32)
    widths = jnp.asarray([level.width for level in down], jnp.int32)
    lasts = jnp.asarray([level.count - 1 for level in down], jnp.int32)

    def step(
        i: int | Int[Array, ""],
        children: Float[Array, "B K"],
        node: Int[Array, " B"],
        residual: Float[Array, " B"],
    ) -> tuple[Int[Array, " B"], Float[Array, " B"]]:
        child, rest, mass = _choose(children, residual)
        # Without mass, or if a sum is not that of its children, a descent would leave the tree.
        node = jnp.minimum(node * FANOUT + child, lasts[i])
        return node, jnp.where(i == depth - 1, mass, rest)

    def descend(
        i: Int[Array, ""], carry: tuple[Int[Array, " B"], Float[Array, " B"]]
    ) -> tuple[Int[Array, " B"], Float[Array, " B"]]:
        node, residual = carry
        children = _floats(_read_blocks(nodes, starts[i] + node * widths[i], FANOUT))
        if refined:
            finer = _refine(children, residual, refine)
            residual = jnp.where(i == middle, finer, residual)
        return step(i, children, node, residual)

    # All rows begin at the root. What a step learns of the tree, the mass of the leaf included, it
    # hands to the next: so nothing is left to be read of it once the loop has ended.
    first = starts[0] if depth > 1 else 0
    top = _floats(lax.dynamic_slice(nodes, (first,), (FANOUT,)))
    root = jnp.zeros_like(prefix, jnp.int32)
    begin = step(0, jnp.broadcast_to(top, (*prefix.shape, FANOUT)), root, prefix)
    return lax.fori_loop(1, depth, descend, begin)


def _refine(
    children: Float[Array, "B K"], residual: Float[Array, " B"], refine: Float[Array, " B"]
) -> Float[Array, " B"]:
    """Spread the residual evenly over the node again: what leaves at the end enters at the start.

    The residuals in a node lie on a grid as fine as the float at the top could make it. Points
    drawn within a grid cell fill the node but for a fraction of a cell at its start, and reach
    past its end by as much.
    """
    mass = _sum4(_sum4(children.reshape(-1, 4, 4)))
    residual = residual + refine
    return jnp.where(residual >= mass, jnp.maximum(residual - mass, 0.0), residual)


def _choose(
    masses: Float[Array, "B K"], residual: Float[Array, " B"]
) -> tuple[Int[Array, " B"], Float[Array, " B"], Float[Array, " B"]]:
    """The child that holds each residual: the smallest ``i`` with ``r < m_0 + ... + m_i``.

    Every comparison is with the very sums that make up the node's own value, so that rounding never
    leads to a child without mass.

    Returns:
        The child, the residual within it, and its mass.
    """
    groups = [masses[:, i : i + 4] for i in range(0, FANOUT, 4)]
    sums = [_sum4(group) for group in groups]
    second = sums[0] + sums[1]
    bounds = [sums[0], second, second + sums[2]]
    # A rounded residual may equal the node's whole mass; the last float below keeps it inside.
    residual = jnp.minimum(residual, (bounds[2] + sums[3]) * jnp.float32(_BELOW))
    group, base = _past(bounds, residual)
    inside = [lax.select_n(group, *(group_[:, i] for group_ in groups)) for i in range(4)]
    pair = inside[0] + inside[1]
    child, before = _past([base + inside[0], base + pair, base + (pair + inside[2])], residual)
    # Of masses that are zero, a bound may lie below the base by a rounding.
    rest = residual - jnp.maximum(before, base)
    return 4 * group + child, rest, lax.select_n(child, *inside)


def _past(
    bounds: list[Float[Array, " B"]], r: Float[Array, " B"]
) -> tuple[Int[Array, " B"], Float[Array, " B"]]:
    """How many of three rising bounds ``r`` has reached, and the last of them (0 if none)."""
    past = [r >= bound for bound in bounds]
    count = past[0].astype(jnp.int32) + past[1].astype(jnp.int32) + past[2].astype(jnp.int32)
    return count, lax.select_n(count, jnp.zeros_like(r), *bounds)


@functools.partial(jax.jit, static_argnames="capacity")
def _read(
    nodes: Int[Array, " P"], index: Int[Array, " B"], capacity: int
) -> tuple[Int[Array, " B"], Float[Array, " B"]]:
    natively = functools.partial(native.read, capacity=capacity)
    plainly = functools.partial(_read_plainly, capacity)
    index, bits = native.either(natively, plainly, nodes, index)
    return index, _floats(bits)


def _read_plainly(
    capacity: int, nodes: Int[Array, " P"], index: Int[Array, " B"]
) -> tuple[Int[Array, " B"], Int[Array, " B"]]:
    rows = index.shape[0]

    def half(index: Int[Array, " H"]) -> tuple[Int[Array, " H"], Int[Array, " H"]]:
        return index, nodes[jnp.clip(index, 0, capacity - 1)]

    # A loop ends before anything that needs its results begins.
    halves = jnp.pad(index, (0, rows % 2)).reshape(2, -1)
    index, bits = lax.map(half, halves)
    return index.reshape(-1)[:rows], bits.reshape(-1)[:rows]

"""Sums and extremes over slots, kept up to date as slots change.

A node has ``FANOUT`` children and is always recomputed from them, never updated by a difference.
Rounding errors therefore do not accumulate, and a bad value is gone once it is overwritten.

All nodes lie in one array of bits: the leaves first, then one level after the other. A *block*
holds the 16 children of one node. A block of leaves has 16 numbers; a block of a higher level has
16 numbers for each operation and 16 counts, so that one gather reads everything a node is computed
from and one scatter writes it.

References:
    Schaul et al., Prioritized Experience Replay, ICLR 2016 (appendix B.2.1: the sum tree).
"""

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Literal, Self, TypeAlias, cast, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jaxtyping import Array, Float, Int

from jaxbuf.core import native
from jaxbuf.core.order import in_halves
from jaxbuf.core.problems import Checked, differing, first_wrong
from jaxbuf.core.types import Function

FANOUT = 16
_SHIFT = FANOUT.bit_length() - 1
# x * _BELOW is the largest float32 below x, for every normal x.
_BELOW = 1.0 - 2.0**-24
_INFINITY = 0x7F800000

Op = Literal["sum", "min", "max", "min_positive"]
OPS: tuple[Op, ...] = get_args(Op)
# Numbers along the last axis, or apart, each in an array of its own. To find an extreme or a count,
# a CPU takes less time for the former, and other backends take fewer kernels for the latter.
Row: TypeAlias = Array | list[Array]
_NEUTRAL: dict[Op, float] = {"sum": 0.0, "min": math.inf, "max": -math.inf, "min_positive": 0.0}


@dataclasses.dataclass(frozen=True)
class Level:
    """The position of a level's nodes in the array.

    Attributes:
        count: Number of nodes in the level.
        start: Index of its first number in the array.
        width: Length of one of its blocks.
    """

    count: int
    start: int
    width: int

    @property
    def stop(self) -> int:
        """The index past its end in the array; its last block may be padded."""
        return self.start + -(-self.count // FANOUT) * self.width


class SegmentTree(Checked, struct.PyTreeNode):
    """An array of ``capacity`` numbers with reductions over all of them and over ranges.

    Attributes:
        nodes: The bits of the leaves and of the nodes above them, ``[P]`` int32.
        roots: The bits of the reduction over all leaves, one for each operation, and the number
            of positive leaves; ``[len(ops) + 1]`` int32.
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
            ops: Operations out of ``"sum"``, ``"min"``, ``"max"`` and ``"min_positive"`` (the
                smallest positive leaf, or 0 if no leaf is positive). A leaf that was never set
                counts as the neutral element. That of ``"max"`` is 0 if the tree keeps sums too:
                its leaves are then masses, which are not negative.

        Raises:
            ValueError: If ``capacity`` is below 1, if ``ops`` is empty or has an unknown or a
                repeated operation, or if it combines ``"min"``, which takes unset leaves to be
                infinite, with others.
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
        block = np.repeat(empty, FANOUT)
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
        """The numbers in the leaves, ``[capacity]``."""
        return _floats(self.nodes[..., : self.capacity])

    def root(self, op: str = "sum") -> Float[Array, ""]:
        """Returns the reduction over all leaves."""
        return _floats(self.roots[..., self._row(op)])

    @property
    def nnz(self) -> Int[Array, ""]:
        """Returns the number of leaves that are positive and finite."""
        return self.roots[..., len(self.ops)]

    def set(
        self, index: Int[Array, " B"], value: Float[Array, " B"], *, unique: bool = False
    ) -> Self:
        """Returns the tree with some leaves set.

        Args:
            index: Leaves, ``[B]``. Rows outside ``[0, capacity)`` are dropped; of several rows for
                one leaf the last one counts.
            value: Their new values, ``[B]``; must not be NaN.
            unique: Whether no two rows are for one leaf, so that the last one need not be found.
                If two are, either of them may count. Static.
        """
        if index.shape[0] == 0:
            return self
        return _set(self, index, value, unique)

    def set_all(self, value: Float[Array, " N"]) -> Self:
        """Returns the tree with every leaf set, ``[capacity]``; costs a pass over the tree."""
        missing, none = -self.capacity % FANOUT, _empty(self.ops)[0]
        bits = jnp.pad(_bits(value), (0, missing), constant_values=none)
        parts, roots = _above(self.ops, bits.reshape(-1, 1, FANOUT))
        return self.replace(nodes=jnp.concatenate([bits, *parts]), roots=roots)

    def find(
        self, prefix: Float[Array, " B"], refine: Float[Array, " B"] | None = None
    ) -> tuple[Int[Array, " B"], Float[Array, " B"]]:
        """Returns the leaf of each prefix: the smallest ``i`` with ``prefix < v_0 + ... + v_i``.

        The rule is exact up to the rounding of the sums. If the total is positive, no prefix finds
        a leaf without mass: at the total and beyond it is the last one with mass. The leaf is in
        range whatever the tree and the prefixes hold.

        Args:
            prefix: Points in ``[0, total)``, ``[B]``. Rounding may make them the total.
            refine: Amounts to add to the residuals half way down, ``[B]``. There nodes are so much
                lighter than the total that bits lost at the top can be filled in; see ``mass``.

        Returns:
            The leaves ``[B]`` and their values ``[B]``.
        """
        self._row("sum")
        return _find(self, prefix, refine)

    def read(self, index: Int[Array, " B"]) -> tuple[Int[Array, " B"], Float[Array, " B"]]:
        """Reads leaves.

        Args:
            index: Leaves, ``[B]``; an index outside ``[0, capacity)`` reads the nearest leaf.

        Returns:
            The same ``index``, and the values ``[B]``. To set these leaves afterwards, use the
            returned index: it depends on the values having been read, so that XLA need not copy
            the tree to read them later.
        """
        if index.shape[0] == 0:
            return index, jnp.zeros((0,), jnp.float32)
        return _read(self, index)

    def reduce(
        self, start: int | Int[Array, ""], stop: int | Int[Array, ""], op: str = "sum"
    ) -> Float[Array, ""]:
        """Returns the reduction over leaves ``start`` to ``stop - 1``.

        The reduction over no leaves is the neutral element. ``start`` and ``stop`` are clipped to
        the leaves. Touches two blocks of nodes per level.
        """
        row, name = self._row(op), cast("Op", op)
        neutral = _bits(jnp.full((FANOUT,), _NEUTRAL[name], jnp.float32))
        low = jnp.clip(jnp.asarray(start, jnp.int32), 0, self.capacity)
        high = jnp.clip(jnp.asarray(stop, jnp.int32), low, self.capacity)
        lane = jnp.arange(FANOUT, dtype=jnp.int32)
        parts = [neutral]
        for number, level in enumerate(levels(self.capacity, len(self.ops))):
            first = level.start + (row * FANOUT if number else 0)
            # The level above covers whole blocks; only the partial ones at the ends are read here.
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
        """Returns the tree with another value at the root, which lasts until a leaf is set."""
        return self.replace(roots=self.roots.at[..., self._row(op)].set(_bits(value)))

    def clear(self) -> Self:
        """Returns the tree as it was created; shares no array with the original."""
        return type(self).create(self.capacity, self.ops)

    def check_valid(self, name: str) -> Iterator[str]:
        """Yields leaves that are no numbers, and reductions that are not those of the leaves."""
        leaves = np.asarray(self.nodes)[: self.capacity].view(np.float32)
        wrong, legal = np.isnan(leaves), "a number"
        if {"sum", "min_positive"} & set(self.ops):
            wrong, legal = ~((leaves >= 0) & (leaves < np.inf)), "a finite number of at least 0"
        found = list(first_wrong(f"{name}.leaves", leaves, wrong, legal))
        if found:
            yield from found
            return
        again, said = _set_again(self), "which is what the leaves say"
        ours, theirs = (np.asarray(tree.roots) for tree in (self, again))
        reductions = zip(self.ops, ours[:-1].view("f4"), theirs[:-1].view("f4"), strict=True)
        roots = [(f"root({op!r})", have, want) for op, have, want in reductions]
        for label, have, want in [*roots, ("nnz", ours[-1], theirs[-1])]:
            yield from first_wrong(f"{name}.{label}", have, have != want, f"{want}, {said}")
        for line in differing(name, self, again, said):
            yield f"{line}: {_where(self, again)}"

    def _row(self, op: str) -> int:
        """Returns the position of an operation among the operations of the tree."""
        if op not in self.ops:
            raise ValueError(f"this tree keeps {self.ops}; create it with {op!r} among its ops")
        return self.ops.index(op)


@functools.cache
def levels(capacity: int, ops: int) -> tuple[Level, ...]:
    """Returns the levels of a tree with ``ops`` operations, leaves first and without the root."""
    found = [Level(capacity, 0, FANOUT)]
    while found[-1].count > FANOUT:
        count = -(-found[-1].count // FANOUT)
        found.append(Level(count, found[-1].stop, FANOUT * (ops + 1)))
    return tuple(found)


def combine(op: Op, children: Row) -> Int[Array, "..."]:
    """Returns the bits of a node, computed from those of its children.

    Sums are added in the order in which a descent subtracts them. Extremes are compared as
    integers: with the lower bits of negative ones flipped, the bits of floats have their order.
    """
    if op == "sum":
        return _bits(_sum16([_floats(child) for child in _apart(children)]))
    if op == "min_positive":
        positive = jax.tree.map(lambda child: jnp.where(child > 0, child, _INFINITY), children)
        least = _fold(lax.min, positive)
        return jnp.where(least < _INFINITY, least, 0)
    pick = lax.max if op == "max" else lax.min
    return _ordered(_fold(pick, jax.tree.map(_ordered, children)))


def _ordered(bits: Int[Array, "..."]) -> Int[Array, "..."]:
    return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def _fold(function: Function, row: Row) -> Int[Array, "..."]:
    """Returns the sum or an extreme of the numbers of a row."""
    if isinstance(row, list):
        return functools.reduce(function, row)
    whole = {lax.add: lax.reduce_sum, lax.max: lax.reduce_max, lax.min: lax.reduce_min}
    return whole[function](row, [row.ndim - 1])


def _sum16(terms: list[Array]) -> Float[Array, "..."]:
    return _sum4([_sum4(group) for group in _groups(terms)])


def _sum4(terms: list[Array]) -> Float[Array, "..."]:
    one, two, three, four = terms
    return ((one + two) + three) + four


def _groups(terms: list[Array]) -> list[list[Array]]:
    """Returns the four groups of four numbers of a row."""
    return [terms[first : first + 4] for first in range(0, FANOUT, 4)]


def _apart(row: Row) -> list[Array]:
    """Returns the numbers of a row as arrays of their own."""
    if isinstance(row, list):
        return row
    last = row.ndim - 1
    return [lax.squeeze(one, [last]) for one in lax.split(row, [1] * row.shape[last], axis=last)]


def _bits(numbers: Float[Array, "..."]) -> Int[Array, "..."]:
    return lax.bitcast_convert_type(numbers, jnp.int32)


def _floats(bits: Int[Array, "..."]) -> Float[Array, "..."]:
    return lax.bitcast_convert_type(bits, jnp.float32)


def _empty(ops: tuple[Op, ...]) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """Returns the bits of a node without leaves, one for each operation, and its count."""
    neutral = {_NEUTRAL[op] for op in ops}
    value = np.float32(0.0 if 0.0 in neutral else neutral.pop())
    return np.asarray([*[value.view(np.int32)] * len(ops), 0], np.int32)


def _counted(leaf: Int[Array, "..."]) -> Int[Array, "..."]:
    """Returns 1 for a leaf that is positive and finite, else 0."""
    return ((leaf > 0) & (leaf < _INFINITY)).astype(jnp.int32)


def _nodes(ops: tuple[Op, ...], blocks: Int[Array, "B R K"], apart: bool) -> list[Int[Array, " B"]]:
    """Returns the nodes for each operation, and their counts.

    Blocks of leaves have one row, other blocks one for each operation and one of counts.
    """
    rows: list[Row] = [blocks[:, k] for k in range(blocks.shape[1])]
    if apart:
        rows = [_apart(row) for row in rows]
    if len(rows) == 1:
        rows = [*rows * len(ops), jax.tree.map(_counted, rows[0])]
    *rows, counts = rows
    values = [combine(op, row) for op, row in zip(ops, rows, strict=True)]
    return [*values, _fold(lax.add, counts)]


def _above(
    ops: tuple[Op, ...], blocks: Int[Array, "B R K"], apart: bool = False
) -> tuple[list[Int[Array, " L"]], Int[Array, " O"]]:
    """Returns the levels above all blocks of one, in the array's layout, and the roots."""
    parts: list[Array] = []
    while blocks.shape[0] > 1:
        missing = -blocks.shape[0] % FANOUT
        padded = [
            jnp.pad(values, (0, missing), constant_values=none).reshape(-1, FANOUT)
            for values, none in zip(_nodes(ops, blocks, apart), _empty(ops), strict=True)
        ]
        blocks = jnp.concatenate(padded, axis=1).reshape(-1, len(padded), FANOUT)
        if apart:
            # Else XLA takes each operation through all levels by itself, in kernels of its own.
            blocks = lax.optimization_barrier(blocks)
        parts.append(blocks.reshape(-1))
    return parts, jnp.concatenate(_nodes(ops, blocks, apart))


def _read_blocks(nodes: Int[Array, " P"], start: Int[Array, " B"], width: int) -> Int[Array, "B W"]:
    return jax.vmap(lambda at: lax.dynamic_slice(nodes, (at,), (width,)))(start)


@functools.partial(jax.jit, static_argnames="unique")
def _set(
    tree: SegmentTree, index: Int[Array, " B"], value: Float[Array, " B"], unique: bool = False
) -> SegmentTree:
    ops = [OPS.index(op) for op in tree.ops]
    natively = functools.partial(native.set_leaves, ops=ops, capacity=tree.capacity)
    plainly = functools.partial(_set_plainly, tree.ops, tree.capacity, unique)
    elsewhere = functools.partial(plainly, apart=True)
    arrays = tree.nodes, index, _bits(value)
    nodes, roots = native.either(natively, plainly, *arrays, elsewhere=elsewhere)
    return tree.replace(nodes=nodes, roots=roots)


def _set_plainly(
    ops: tuple[Op, ...],
    capacity: int,
    unique: bool,
    nodes: Int[Array, " P"],
    index: Int[Array, " B"],
    bits: Int[Array, " B"],
    apart: bool = False,
) -> tuple[Int[Array, " P"], Int[Array, " K"]]:
    below, *above = levels(capacity, len(ops))
    rows, nowhere = index.shape[0], nodes.shape[0]
    legal = (index >= 0) & (index < capacity)
    leaf = jnp.where(legal, index, nowhere)
    if rows > 1 and not unique:
        # The leaves serve as scratch space to find the last of several rows for one leaf.
        number = jnp.arange(1, rows + 1, dtype=jnp.int32)
        nodes = nodes.at[leaf].set(0, mode="drop").at[leaf].max(number, mode="drop")
        last = nodes.at[leaf].get(mode="fill", fill_value=0) == number
        leaf = jnp.where(last, leaf, nowhere)
    nodes = nodes.at[leaf].set(bits, mode="drop")
    # Recompute the parents of changed nodes, until a level has few nodes or no more than there are
    # rows. All nodes above are recomputed, which takes no gathers and fewer kernels. A dropped row
    # recomputes the parents of the first leaf.
    node = jnp.where(legal, index, 0)
    place = FANOUT * jnp.arange(len(ops) + 1, dtype=jnp.int32)
    dense = FANOUT**4 if apart else FANOUT**2
    while above and above[0].count > max(rows, dense):
        level = above.pop(0)
        node = node >> _SHIFT
        blocks = _read_blocks(nodes, below.start + node * below.width, below.width)
        values = jnp.stack(_nodes(ops, blocks.reshape(rows, -1, FANOUT), apart), axis=-1)
        goal = level.start + (node >> _SHIFT) * level.width + (node & (FANOUT - 1))
        nodes = nodes.at[goal[:, None] + place[None]].set(values, mode="promise_in_bounds")
        below = level
    blocks = nodes[below.start : below.stop].reshape(-1, below.width // FANOUT, FANOUT)
    parts, roots = _above(ops, blocks, apart)
    if parts:
        nodes = lax.dynamic_update_slice(nodes, jnp.concatenate(parts), (below.stop,))
    return nodes, roots


@jax.jit
def _find(
    tree: SegmentTree, prefix: Float[Array, " B"], refine: Float[Array, " B"] | None
) -> tuple[Int[Array, " B"], Float[Array, " B"]]:
    row, ops = tree.ops.index("sum"), len(tree.ops)
    natively, plainly = (
        functools.partial(form, row=row, ops=ops, capacity=tree.capacity)
        for form in (native.find, _find_plainly)
    )
    # A loop takes more kernels elsewhere; on a CPU it keeps XLA from computing levels repeatedly.
    elsewhere = functools.partial(plainly, apart=True)
    return native.either(natively, plainly, tree.nodes, prefix, refine, elsewhere=elsewhere)


def _find_plainly(
    nodes: Int[Array, " P"],
    prefix: Float[Array, " B"],
    refine: Float[Array, " B"] | None,
    *,
    row: int,
    ops: int,
    capacity: int,
    apart: bool = False,
) -> tuple[Int[Array, " B"], Float[Array, " B"]]:
    down = levels(capacity, ops)[::-1]
    depth = len(down)
    starts = jnp.asarray([level.start + row * FANOUT for level in down[:-1]] + [0], jnp.int32)
    widths = jnp.asarray([level.width for level in down], jnp.int32)
    lasts = jnp.asarray([level.count - 1 for level in down], jnp.int32)

    def step(
        i: int | Int[Array, ""],
        children: list[Array],
        node: Int[Array, " B"],
        residual: Float[Array, " B"],
    ) -> tuple[Int[Array, " B"], Float[Array, " B"]]:
        child, rest, mass = _choose(children, residual)
        # A descent would leave the tree if it has no mass, or if a sum disagrees with its children.
        node = jnp.minimum(node * FANOUT + child, lasts[i])
        return node, jnp.where(i == depth - 1, mass, rest)

    def children_at(start: Int[Array, " B"]) -> list[Array]:
        if not apart:
            return _apart(_floats(_read_blocks(nodes, start, FANOUT)))
        lanes = [start + lane for lane in range(FANOUT)]
        return [_floats(nodes.at[lane].get(mode="promise_in_bounds")) for lane in lanes]

    def descend(
        i: Int[Array, ""], carry: tuple[Int[Array, " B"], Float[Array, " B"]]
    ) -> tuple[Int[Array, " B"], Float[Array, " B"]]:
        node, residual = carry
        children = children_at(starts[i] + node * widths[i])
        if refine is not None:
            finer = _refine(children, residual, refine)
            residual = jnp.where(i == (depth + 1) // 2, finer, residual)
        return step(i, children, node, residual)

    # All rows begin at the root. Each step hands what it has read, including the mass of the leaf,
    # to the next step, so that the tree need not be read again after the loop.
    top = _apart(_floats(lax.dynamic_slice(nodes, (starts[0],), (FANOUT,))))
    root = jnp.zeros_like(prefix, jnp.int32)
    # What is past the end of the tree stays past the end of every node.
    prefix = jnp.where(prefix >= _sum16(top), jnp.inf, prefix)
    begin = step(0, [jnp.broadcast_to(mass, prefix.shape) for mass in top], root, prefix)
    return lax.fori_loop(1, depth, descend, begin, unroll=apart)


def _refine(
    children: list[Array], residual: Float[Array, " B"], refine: Float[Array, " B"]
) -> Float[Array, " B"]:
    """Adds to the residual within a node; a sum past the node's end wraps around to its start.

    The residuals in a node lie on a grid whose cells are as small as the float at the top allows.
    Points drawn within the cells leave out a fraction of a cell at the node's start and reach past
    its end by the same amount.
    """
    mass = _sum16(children)
    residual = residual + refine
    return jnp.where(residual >= mass, jnp.maximum(residual - mass, 0.0), residual)


def _choose(
    masses: list[Array], residual: Float[Array, " B"]
) -> tuple[Int[Array, " B"], Float[Array, " B"], Float[Array, " B"]]:
    """Returns the child that holds each residual: the smallest ``i`` with ``r < m_0 + ... + m_i``.

    An infinite residual leads to the last child with mass, and stays infinite. Residuals are
    compared with the same sums that the node's value is computed from, so that rounding never leads
    to a child without mass.

    Returns:
        The child, the residual within it, and its mass.
    """
    groups = _groups(masses)
    sums = [_sum4(group) for group in groups]
    second = sums[0] + sums[1]
    bounds = [sums[0], second, second + sums[2]]
    # A rounded residual may equal the node's mass; it is limited to the largest float below it.
    limit = (bounds[2] + sums[3]) * jnp.float32(_BELOW)
    residual = jnp.where(residual < jnp.inf, jnp.minimum(residual, limit), residual)
    group, base = _past(sums, bounds, residual)
    inside = [lax.select_n(group, *of) for of in zip(*groups, strict=True)]
    pair = inside[0] + inside[1]
    bounds = [base + inside[0], base + pair, base + (pair + inside[2])]
    child, before = _past(inside, bounds, residual)
    # If masses are zero, a bound may be smaller than the base by a rounding error.
    rest = residual - jnp.maximum(before, base)
    return 4 * group + child, rest, lax.select_n(child, *inside)


def _past(
    masses: list[Float[Array, " B"]], bounds: list[Float[Array, " B"]], r: Float[Array, " B"]
) -> tuple[Int[Array, " B"], Float[Array, " B"]]:
    """Returns how many of three rising bounds ``r`` has reached, and the last of them, or 0.

    The bounds lie between four masses. One that has no mass behind it is never reached.
    """
    third = masses[3] > 0
    second = (masses[2] > 0) | third
    first = (masses[1] > 0) | second
    left = zip(bounds, [first, second, third], strict=True)
    count = _fold(lax.add, [((r >= bound) & more).astype(jnp.int32) for bound, more in left])
    return count, lax.select_n(count, jnp.zeros_like(r), *bounds)


@jax.jit
def _read(
    tree: SegmentTree, index: Int[Array, " B"]
) -> tuple[Int[Array, " B"], Float[Array, " B"]]:
    def bits_at(index: Array, nodes: Array) -> tuple[Array, Array]:
        return index, nodes[jnp.clip(index, 0, tree.capacity - 1)]

    natively = functools.partial(native.read, capacity=tree.capacity)
    plainly = functools.partial(in_halves, bits_at)
    index, bits = native.either(natively, plainly, index, tree.nodes)
    return index, _floats(bits)


def _where(tree: SegmentTree, again: SegmentTree) -> str:
    """Returns the slots over which a reduction is not that of the leaves."""
    width = FANOUT
    while width < FANOUT * tree.capacity:
        for op in tree.ops:
            ours, theirs = (_reduce(one, width, op) for one in (tree, again))
            wrong = np.flatnonzero(np.asarray(ours != theirs))
            if wrong.size:
                first = int(wrong[0]) * width
                return f"the {op} of slots {first} to {min(first + width, tree.capacity) - 1}"
        width *= FANOUT
    return f"a node above slot {tree.capacity - 1}, the last one"


@jax.jit
def _set_again(tree: SegmentTree) -> SegmentTree:
    """Returns a tree of the same leaves, with every node computed again."""
    return tree.set_all(tree.leaves)


@functools.partial(jax.jit, static_argnames=("width", "op"))
def _reduce(tree: SegmentTree, width: int, op: str) -> Float[Array, " B"]:
    """Returns the reductions over each ``width`` consecutive slots."""
    first = jnp.arange(0, tree.capacity, width, dtype=jnp.int32)
    return jax.vmap(lambda start: tree.reduce(start, start + width, op))(first)

"""Sums and extremes over slots, kept up to date as slots change.

A node has ``width`` children and is always recomputed from them, never updated by a difference.
Rounding errors therefore do not accumulate, and a bad value is gone once it is overwritten. A
*block* holds the children of one node. Leaves are stored as bits, and nodes in one of two layouts:

* For a CPU blocks have 16 numbers, and all nodes lie in one array, as the kernels in C++ expect it:
  the leaves first, then one level after the other. A block of a higher level has 16 numbers for
  each operation and 16 counts, so that one gather reads everything a node is computed from. All
  of them are bits.
* For accelerators blocks have 128 numbers, as many as a register of a TPU has in a row. Each level
  has an array ``[blocks, 128]`` for each operation and one of counts, of the numbers that are
  reduced again for the level above.

References:
    Schaul et al., Prioritized Experience Replay, ICLR 2016 (appendix B.2.1: the sum tree).
"""

import contextlib
import dataclasses
import functools
import itertools
import math
import os
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple, Self, TypeAlias, TypeVar, cast, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jaxtyping import Array, Float, Int, Num, PyTree

from jaxbuf.core import native
from jaxbuf.core.numbers import TINY
from jaxbuf.core.order import in_halves
from jaxbuf.core.problems import Checked, differing, first_wrong
from jaxbuf.core.types import Count, Floats, Function, Index, Number

# The widths of blocks on a CPU and on accelerators.
NARROW, WIDE = 16, 128
# x * _BELOW is the largest float32 below x, for every normal x.
_BELOW = 1.0 - 2.0**-24
_INFINITY = 0x7F800000
# Options of reads and writes whose indices are never out of range.
_INSIDE: Any = {"mode": "promise_in_bounds", "wrap_negative_indices": False}
# The sums of a wide block may be rounded in any order.
_ROUNDING = 1e-5

Tree = TypeVar("Tree")
Op = Literal["sum", "min", "max", "min_positive"]
OPS: tuple[Op, ...] = get_args(Op)
_NEUTRAL: dict[Op, float] = {"sum": 0.0, "min": math.inf, "max": -math.inf, "min_positive": 0.0}

# Blocks of a level, an array ``[blocks, width]`` for each operation and one of counts. Blocks of
# leaves have a single row.
Rows: TypeAlias = Sequence[Num[Array, "B W"]]
# A level as it is stored: an array ``[P]``, or its rows.
Stored: TypeAlias = Any
# All levels: one array, or an array for each of their rows.
Nodes: TypeAlias = Int[Array, " P"] | tuple[tuple[Num[Array, "B W"], ...], ...]

# Part of the key of jit's cache. 0 is the width for the platform on which arrays are created.
_forced: Any = jax.make_user_context(int(os.environ.get("JAXBUF_TREE_WIDTH", "0")))


def using_width(width: int) -> contextlib.AbstractContextManager[None]:
    """Sets the width of trees that are created in this ``with`` block, ``NARROW`` or ``WIDE``.

    A program that is compiled for an accelerator on a machine without one needs this.
    """
    return _forced(width)


def width_for(platform: str) -> int:
    """Returns the width of trees that are created for a platform, such as ``cpu``."""
    return _forced.value or (NARROW if platform == "cpu" else WIDE)


def _default_width() -> int:
    device = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    device = jax.default_backend() if device is None else device
    return width_for(device if isinstance(device, str) else device.platform)


@dataclasses.dataclass(frozen=True)
class Level:
    """A level of a tree.

    Attributes:
        number: Its number; that of the leaves is 0.
        count: Number of its nodes.
        blocks: Number of its blocks; the last one may be padded.
        rows: Number of rows that each block has.
        start: Index of its first number, if all nodes lie in one array.
        stride: Length of one of its blocks there.
    """

    number: int
    count: int
    blocks: int
    rows: int
    start: int
    stride: int

    @property
    def stop(self) -> int:
        """The index past its end in the array."""
        return self.start + self.blocks * self.stride


class SegmentTree(Checked, struct.PyTreeNode):
    """An array of ``capacity`` numbers with reductions over all of them and over ranges.

    Attributes:
        nodes: The leaves and the nodes above them: bits ``[P]``, int32, in a narrow tree, and
            arrays ``[blocks, width]`` for each operation of each level in a wide one.
        roots: The bits of the reduction over all leaves, one for each operation, and the number
            of positive leaves; ``[len(ops) + 1]`` int32.
        capacity: Number of leaves.
        ops: The reductions it keeps.
        width: Number of children of a node. It decides how fast the tree is on which platform, and
            in which order sums are added.

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

    nodes: Nodes
    roots: Int[Array, " K"]
    capacity: int = struct.field(pytree_node=False)
    ops: tuple[Op, ...] = struct.field(pytree_node=False)
    # Where the arrays lie is no configuration of a buffer.
    width: int = dataclasses.field(
        default=NARROW, metadata={"pytree_node": False, "configuration": False}
    )

    @classmethod
    def create(cls, capacity: int, ops: Sequence[str] = ("sum",), width: int | None = None) -> Self:
        """Returns a tree in which no leaf is set yet.

        Args:
            capacity: Number of leaves, at least 1.
            ops: Operations out of ``"sum"``, ``"min"``, ``"max"`` and ``"min_positive"`` (the
                smallest positive leaf, or 0 if no leaf is positive). A leaf that was never set
                counts as the neutral element. That of ``"max"`` is 0 if the tree keeps sums too:
                its leaves are then masses, which are not negative.
            width: Number of children of a node, 16 or 128; by default what is faster on the
                platform on which arrays are created.

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
        names = cast("tuple[Op, ...]", tuple(ops))
        width = _default_width() if width is None else width
        nodes, roots = _empty_nodes(capacity, names, width)
        return cls(nodes=nodes, roots=roots, capacity=capacity, ops=names, width=width)

    @property
    def leaves(self) -> Float[Array, " N"]:
        """The numbers in the leaves, ``[capacity]``."""
        bits = self.nodes
        if isinstance(bits, tuple):
            bits = lax.collapse(bits[0][0], bits[0][0].ndim - 2)
        return _floats(bits[..., : self.capacity])

    def root(self, op: str = "sum") -> Number:
        """Returns the reduction over all leaves."""
        return _floats(self.roots[..., self._row(op)])

    @property
    def nnz(self) -> Count:
        """Returns the number of leaves that are positive and finite."""
        return self.roots[..., len(self.ops)]

    def set(self, index: Index, value: Floats, *, unique: bool = False) -> Self:
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
        missing, none = -self.capacity % self.width, _empty(self.ops)[0]
        bits = jnp.pad(_bits(value), (0, missing), constant_values=none)
        leaves = (bits.reshape(-1, self.width),)
        above, roots = _above(self.ops, leaves)
        return self.replace(nodes=_joined([_stored(leaves), *above]), roots=roots)

    def find(self, prefix: Floats, refine: Floats | None = None) -> tuple[Index, Floats]:
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

    def read(self, index: Index) -> tuple[Index, Floats]:
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

    def reduce(self, start: int | Count, stop: int | Count, op: str = "sum") -> Number:
        """Returns the reduction over leaves ``start`` to ``stop - 1``.

        The reduction over no leaves is the neutral element. ``start`` and ``stop`` are clipped to
        the leaves. Touches two blocks of nodes per level.
        """
        row, name, width = self._row(op), cast("Op", op), self.width
        neutral = _bits(jnp.full((width,), _NEUTRAL[name], jnp.float32))  # [W]
        low = jnp.clip(jnp.asarray(start, jnp.int32), 0, self.capacity)  # []
        high = jnp.clip(jnp.asarray(stop, jnp.int32), low, self.capacity)  # []
        lane = jnp.arange(width, dtype=jnp.int32)  # [W]
        parts = [neutral]
        for level in levels(self.capacity, len(self.ops), width):
            # The level above covers whole blocks; only the partial ones at the ends are read here.
            above_low, above_high = -(-low // width), high // width  # []
            inner_low, inner_high = above_low * width, above_high * width  # []
            for block, begin, end in (
                (low // width, low, jnp.minimum(inner_low, high)),
                (above_high, jnp.maximum(inner_high, inner_low), high),
            ):
                node = block * width + lane  # [W]
                inside = (node >= begin) & (node < end)  # [W]
                exists = jnp.minimum(block, level.blocks - 1)[None]  # [1]
                values = _row_of(self.nodes, level, exists, row if level.number else 0)[0]  # [W]
                if width != NARROW and level.number:
                    values = _REDUCTIONS[name].bits(values)  # [W]
                parts.append(jnp.where(inside, values, neutral))
            # The ends of a range within one block, which is done, would cross.
            low, high = above_low, jnp.maximum(above_high, above_low)  # []
        whole = (lane >= low) & (lane < high)  # [W]
        parts.append(jnp.where(whole, self.roots[row], neutral))
        if name == "sum":
            return jnp.sum(_floats(jnp.stack(parts)))
        return _floats(combine(name, jnp.concatenate(parts)))

    def replace_root(self, op: str, value: Number) -> Self:
        """Returns the tree with another value at the root, which lasts until a leaf is set."""
        return self.replace(roots=self.roots.at[..., self._row(op)].set(_bits(value)))

    def clear(self) -> Self:
        """Returns the tree as it was created; shares no array with the original."""
        return type(self).create(self.capacity, self.ops, self.width)

    def with_width(self, width: int) -> Self:
        """Returns a tree with the same leaves whose nodes have another number of children."""
        if width == self.width:
            return self
        if not isinstance(self.roots, jax.ShapeDtypeStruct):
            return _with_width(self, width)
        shapes = jax.eval_shape(lambda tree: _with_width(tree, width), self)
        sharded = functools.partial(jax.ShapeDtypeStruct, sharding=self.roots.sharding)
        return jax.tree.map(lambda leaf: sharded(leaf.shape, leaf.dtype), shapes)

    def check_valid(self, name: str) -> Iterator[str]:
        leaves = np.asarray(self.leaves)
        wrong, legal = np.isnan(leaves), "a number"
        if {"sum", "min_positive"} & set(self.ops):
            wrong, legal = ~((leaves >= 0) & (leaves < np.inf)), "a finite number of at least 0"
        problems = list(first_wrong(f"{name}.leaves", leaves, wrong, legal))
        if problems:
            yield from problems
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


def with_width(tree: Tree, width: int) -> Tree:
    """Returns a pytree whose segment trees have this width."""
    return jax.tree.map(lambda x: x.with_width(width) if _is(x) else x, tree, is_leaf=_is)


def with_widths_of(like: PyTree, tree: Tree) -> Tree:
    """Returns a pytree whose segment trees are as wide as those of another one."""
    return jax.tree.map(
        lambda wanted, x: x.with_width(wanted.width) if _is(x) else x, like, tree, is_leaf=_is
    )


def widths_of(tree: PyTree) -> set[int]:
    """Returns the widths of the segment trees in a pytree."""
    return {node.width for node in jax.tree.leaves(tree, is_leaf=_is) if _is(node)}


def width_of(tree: PyTree) -> int:
    """Returns the width of the segment trees in a pytree, or what ``using_width`` says."""
    return next(iter(widths_of(tree)), _forced.value)


def _is(node: object) -> bool:
    return isinstance(node, SegmentTree)


@functools.cache
def levels(capacity: int, ops: int, width: int = NARROW) -> tuple[Level, ...]:
    """Returns the levels of a tree with ``ops`` operations, leaves first and without the root."""
    levels: list[Level] = []
    count = capacity
    while not levels or levels[-1].blocks > 1:
        rows, start = (ops + 1, levels[-1].stop) if levels else (1, 0)
        levels.append(Level(len(levels), count, -(-count // width), rows, start, rows * width))
        count = levels[-1].blocks
    return tuple(levels)


def combine(op: Op, children: Int[Array, "... W"]) -> Int[Array, "..."]:
    """Returns the bits of a node, computed from those of its children."""
    if op == "sum" and children.shape[-1] == NARROW:
        return _bits(_sums(jnp.moveaxis(_floats(children), -1, 0))[-1])
    reduction = _REDUCTIONS[op]
    return reduction.bits(_reduced((op,), (reduction.read(children),))[0])


def _reduced(ops: Sequence[str], rows: Sequence[Num[Array, "*B W"]]) -> list[Num[Array, "*B"]]:
    """Returns the nodes above blocks of numbers for each operation, of all in one reduction."""
    reductions = [_REDUCTIONS[op] for op in ops]

    def combined(ours: Sequence[Array], theirs: Sequence[Array]) -> tuple[Array, ...]:
        each = zip(reductions, ours, theirs, strict=True)
        return tuple(reduction.combine(a, b) for reduction, a, b in each)

    neutral = tuple(each.neutral for each in reductions)
    return list(lax.reduce(tuple(rows), neutral, combined, [rows[0].ndim - 1]))


def _sums(masses: Float[Array, "W ..."]) -> Float[Array, "W ..."]:
    """Returns the sums of the first 1, 2, ... masses of blocks.

    Narrow blocks are added as the kernels do: each four of them one by one, and so the fours.
    """
    if masses.shape[0] != NARROW:
        return lax.cumsum(masses, axis=0)
    fours = [list(itertools.accumulate(masses[k : k + 4], lax.add)) for k in range(0, NARROW, 4)]
    ends = itertools.accumulate((four[-1] for four in fours), lax.add)
    begins = [jnp.zeros_like(masses[0]), *ends]
    return jnp.stack(
        [begin + one for begin, four in zip(begins, fours, strict=False) for one in four]
    )


def _bits(numbers: Float[Array, "..."]) -> Int[Array, "..."]:
    return lax.bitcast_convert_type(numbers, jnp.int32)


def _floats(bits: Int[Array, "..."]) -> Float[Array, "..."]:
    return lax.bitcast_convert_type(bits, jnp.float32)


def _ordered(bits: Int[Array, "..."]) -> Int[Array, "..."]:
    return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


class _Reduction(NamedTuple):
    """A reduction: its functions read leaves, combine the numbers read, and return bits again."""

    read: Function
    neutral: Any
    combine: Function
    bits: Function


# Extremes are compared as integers: with the lower bits of negative ones flipped, the bits of
# floats have their order.
_REDUCTIONS = {
    "sum": _Reduction(_floats, np.float32(0.0), lax.add, _bits),
    "max": _Reduction(_ordered, np.int32(-(2**31)), lax.max, _ordered),
    "min": _Reduction(_ordered, np.int32(2**31 - 1), lax.min, _ordered),
    "min_positive": _Reduction(
        lambda bits: jnp.where(bits > 0, bits, _INFINITY),
        np.int32(_INFINITY),
        lax.min,
        lambda least: jnp.where(least < _INFINITY, least, 0),
    ),
    "count": _Reduction(
        lambda bits: ((bits > 0) & (bits < _INFINITY)).astype(jnp.int32),
        np.int32(0),
        lax.add,
        lambda count: count,
    ),
}


def _empty(ops: tuple[Op, ...]) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """Returns the bits of a node without leaves, one for each operation, and its count."""
    neutral = {_NEUTRAL[op] for op in ops}
    value = np.float32(0.0 if 0.0 in neutral else neutral.pop())
    return np.asarray([*[value.view(np.int32)] * len(ops), 0], np.int32)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _empty_nodes(capacity: int, ops: tuple[Op, ...], width: int) -> tuple[Nodes, Int[Array, " K"]]:
    empty = _empty(ops)
    stored = [
        _stored(
            [jnp.full((level.blocks, width), none) for none in _empty_row(ops, level.rows, width)]
        )
        for level in levels(capacity, len(ops), width)
    ]
    return _joined(stored), jnp.asarray(empty)


def _empty_row(ops: tuple[Op, ...], count: int, width: int) -> list[Any]:
    """Returns what a level stores of a node without leaves."""
    empty = _empty(ops)
    if width == NARROW or count == 1:
        return list(empty[:count])
    return [_REDUCTIONS[op].read(jnp.int32(empty[0])) for op in (*ops, "count")]


def _values(ops: tuple[Op, ...], rows: Rows) -> list[Num[Array, " B"]]:
    """Returns the nodes above blocks, an array for each operation, and their counts."""
    names, of_leaves = (*ops, "count"), len(rows) == 1
    if of_leaves:
        rows = [rows[0]] * len(names)
    if rows[0].shape[1] == NARROW:
        counts = _REDUCTIONS["count"].read(rows[-1]) if of_leaves else rows[-1]
        values = [combine(op, row) for op, row in zip(ops, rows[:-1], strict=True)]
        return [*values, lax.reduce_sum(counts, [1])]
    if of_leaves:
        rows = [_REDUCTIONS[name].read(row) for name, row in zip(names, rows, strict=True)]
    return _reduced(names, rows)


def _above(ops: tuple[Op, ...], rows: Rows) -> tuple[list[Stored], Int[Array, " K"]]:
    """Returns the levels above all blocks of one, and the roots."""
    above: list[Stored] = []
    while rows[0].shape[0] > 1:
        blocks, width = rows[0].shape
        padding, none = (0, -blocks % width), _empty_row(ops, len(ops) + 1, width)
        values = [
            jnp.pad(value, padding, constant_values=empty).reshape(-1, width)
            for value, empty in zip(_values(ops, rows), none, strict=True)
        ]
        above.append(_stored(values))
        rows = _rows_of(above[-1], len(values))
    roots = _values(ops, rows)
    if rows[0].shape[1] != NARROW:
        roots = [
            _REDUCTIONS[op].bits(root) for op, root in zip((*ops, "count"), roots, strict=True)
        ]
    return above, jnp.concatenate(roots)


def _stored(rows: Rows) -> Stored:
    """Returns a level as it is stored."""
    return tuple(rows) if rows[0].shape[1] != NARROW else jnp.concatenate(rows, axis=1).reshape(-1)


def _joined(stored: Sequence[Stored]) -> Any:
    """Returns all levels as they are stored."""
    return tuple(stored) if isinstance(stored[0], tuple) else jnp.concatenate(stored)


def _rows_of(stored: Stored, count: int) -> Rows:
    """Returns the rows of a level that is stored, or of some of its blocks."""
    if isinstance(stored, tuple):
        return stored
    blocks = stored.reshape(-1, count, NARROW)
    return tuple(blocks[:, k] for k in range(count))


def _rows(nodes: Nodes, level: Level, block: Index | None = None) -> Rows:
    """Returns some blocks of a level, or all."""
    if isinstance(nodes, tuple):
        rows = nodes[level.number]
        return rows if block is None else tuple(row.at[block].get(**_INSIDE) for row in rows)
    if block is None:
        return _rows_of(nodes[level.start : level.stop], level.rows)
    start, size = level.start + block * level.stride, level.stride
    blocks = jax.vmap(lambda at: lax.dynamic_slice(nodes, (at,), (size,)))(start)
    return _rows_of(blocks, level.rows)


def _row_of(nodes: Nodes, level: Level, block: Index, row: int) -> Num[Array, "B W"]:
    """Returns one row of some blocks of a level."""
    if isinstance(nodes, tuple):
        return nodes[level.number][row].at[block].get(**_INSIDE)
    start = level.start + block * level.stride + row * NARROW
    return jax.vmap(lambda at: lax.dynamic_slice(nodes, (at,), (NARROW,)))(start)


def _write(nodes: Nodes, level: Level, node: Index, values: Sequence[Num[Array, " B"]]) -> Nodes:
    """Returns the nodes with others at some places of a level."""
    if isinstance(nodes, tuple):
        at, rows = _place(nodes, node), zip(nodes[level.number], values, strict=True)
        changed = tuple(row.at[at].set(value, **_INSIDE) for row, value in rows)
        return (*nodes[: level.number], changed, *nodes[level.number + 1 :])
    block, lane = _split(node, NARROW)
    goal = level.start + block * level.stride + lane
    row = NARROW * jnp.arange(level.rows, dtype=jnp.int32)
    whole = jnp.stack(values, axis=-1)
    return nodes.at[goal[:, None] + row[None]].set(whole, **_INSIDE)


def _write_above(nodes: Nodes, level: Level, stored: Sequence[Stored]) -> Nodes:
    """Returns the nodes with all levels above one replaced."""
    if isinstance(nodes, tuple):
        return (*nodes[: level.number + 1], *stored)
    return lax.dynamic_update_slice(nodes, _joined(stored), (level.stop,)) if stored else nodes


def _place(nodes: Nodes, node: Index) -> tuple[Index, ...]:
    """Returns the index of a leaf, or of any node of a wide tree, in the array of its level."""
    return _split(node, WIDE) if isinstance(nodes, tuple) else (node,)


def _split(node: Index, width: int) -> tuple[Index, Index]:
    """Returns the block of each node, and its lane in the block."""
    return node >> (width.bit_length() - 1), node & (width - 1)


def _either(tree: SegmentTree, natively: Function, plainly: Function, *arrays: Any) -> Any:
    """Chooses between a kernel and its definition; there are kernels for narrow trees only."""
    return native.either(natively if tree.width == NARROW else plainly, plainly, *arrays)


@functools.partial(jax.jit, static_argnames="unique")
def _set(tree: SegmentTree, index: Index, value: Floats, unique: bool = False) -> SegmentTree:
    ops = [OPS.index(op) for op in tree.ops]
    natively = functools.partial(native.set_leaves, ops=ops, capacity=tree.capacity)
    plainly = functools.partial(_set_plainly, tree.ops, tree.capacity, tree.width, unique)
    nodes, roots = _either(tree, natively, plainly, tree.nodes, index, value)
    return tree.replace(nodes=nodes, roots=roots)


def _set_plainly(
    ops: tuple[Op, ...],
    capacity: int,
    width: int,
    unique: bool,
    nodes: Nodes,
    index: Index,
    value: Floats,
) -> tuple[Nodes, Int[Array, " K"]]:
    below, *above = levels(capacity, len(ops), width)
    rows = index.shape[0]
    leaves = nodes[0][0] if isinstance(nodes, tuple) else nodes  # [P], or [blocks, W] if wide
    legal = (index >= 0) & (index < capacity)  # [B]
    at = _place(nodes, jnp.where(legal, index, leaves.size))  # [B], past the end if illegal
    if rows > 1 and not unique:
        # The leaves serve as scratch space to find the last of several rows for one leaf, with
        # numbers above the bits of infinity, or with leaves of 0 if there are too few of these.
        if rows > 2**31 - 1 - _INFINITY:
            leaves = leaves.at[at].set(0, mode="drop")
        number = jnp.arange(2**31 - rows, 2**31, dtype=jnp.int32)  # [B]
        leaves = leaves.at[at].max(number, mode="drop")
        last = leaves.at[at].get(mode="fill", fill_value=0) == number  # [B]
        at = _place(nodes, jnp.where(last, index, leaves.size))  # [B], past the end if not last
    leaves = leaves.at[at].set(_bits(value), mode="drop")
    nodes = ((leaves,), *nodes[1:]) if isinstance(nodes, tuple) else leaves
    # Recompute the parents of changed nodes, until a level has few nodes or no more than there are
    # rows. All nodes above are recomputed, which takes no gathers and fewer kernels: in a wide tree
    # those of up to 2**20 leaves. A dropped row recomputes the parents of the first leaf.
    node = jnp.where(legal, index, 0)  # [B]
    few = max(rows, width * width // 2)
    while above and above[0].count > few:
        node, _ = _split(node, width)  # [B]
        values = _values(ops, _rows(nodes, below, node))  # [B]
        below = above.pop(0)
        nodes = _write(nodes, below, node, values)
    stored, roots = _above(ops, _rows(nodes, below))
    return _write_above(nodes, below, stored), roots


@jax.jit
def _find(tree: SegmentTree, prefix: Floats, refine: Floats | None) -> tuple[Index, Floats]:
    row, ops = tree.ops.index("sum"), len(tree.ops)
    plainly = functools.partial(_find_plainly, row, levels(tree.capacity, ops, tree.width))

    def natively(nodes: Any, prefix: Any, refine: Any, _: Any) -> Any:
        return native.find(nodes, prefix, refine, row=row, ops=ops, capacity=tree.capacity)

    return _either(tree, natively, plainly, tree.nodes, prefix, refine, tree.root("sum"))


def _find_plainly(
    row: int,
    up: tuple[Level, ...],
    nodes: Nodes,
    prefix: Floats,
    refine: Floats | None,
    total: Number,
) -> tuple[Index, Floats]:
    node, mass = jnp.zeros_like(prefix, jnp.int32), prefix  # [B]
    # What is past the end of the tree stays past the end of every node.
    residual = jnp.where(prefix >= total, jnp.inf, prefix)  # [B]
    for level in reversed(up):
        masses = _floats(_row_of(nodes, level, node, row if level.number else 0)).T  # [W, B]
        sums = _sums(masses)  # [W, B]
        if refine is not None and level.number == (len(up) - 2) // 2:
            residual = _refine(sums[-1], residual, refine)  # [B]
        child, residual, mass = _choose(masses, sums, residual)  # [B]
        # A descent would leave the tree if it has no mass, or if a sum disagrees with its children.
        node = jnp.minimum(node * len(masses) + child, level.count - 1)  # [B]
    return node, mass


def _refine(mass: Floats, residual: Floats, refine: Floats) -> Floats:
    """Adds to the residual within a node; a sum past the node's end wraps around to its start.

    The residuals in a node lie on a grid whose cells are as small as the float at the top allows.
    Points drawn within the cells leave out a fraction of a cell at the node's start and reach past
    its end by the same amount.
    """
    residual = residual + refine
    return jnp.where(residual >= mass, jnp.maximum(residual - mass, 0.0), residual)


def _choose(
    masses: Float[Array, "W B"], sums: Float[Array, "W B"], residual: Floats
) -> tuple[Index, Floats, Floats]:
    """Returns the child that holds each residual: the smallest ``i`` with ``r < m_0 + ... + m_i``.

    Only children with mass are considered, so that rounding never leads to another one, in whatever
    order the sums are added. A residual past all of them, such as an infinite one, which stays
    infinite, leads to the last one with mass.

    Returns:
        The child, the residual within it, and its mass.
    """
    # A rounded residual may equal the node's mass; it is limited to the largest float below it.
    limit = sums[-1] * jnp.float32(_BELOW)  # [B]
    residual = jnp.where(residual < jnp.inf, jnp.minimum(residual, limit), residual)  # [B]
    if len(masses) == NARROW:
        return _in_turn(masses, sums, residual)
    lane, positive = jnp.arange(len(masses), dtype=jnp.int32)[:, None], masses > 0  # [W, 1], [W, B]
    first = jnp.min(jnp.where(positive & (residual[None] < sums), lane, len(masses)), axis=0)  # [B]
    last = jnp.max(jnp.where(positive, lane, 0), axis=0)  # [B]
    child = jnp.minimum(first, last)  # [B]
    before = jnp.max(jnp.where(positive & (lane < child[None]), sums, 0.0), axis=0)  # [B]
    mass = jnp.max(jnp.where(lane == child[None], masses, 0.0), axis=0)  # [B]
    return child, residual - before, mass


def _in_turn(
    masses: Float[Array, "W B"], sums: Float[Array, "W B"], residual: Floats
) -> tuple[Index, Floats, Floats]:
    """Returns what ``_choose`` does, in one pass over the lanes: on a CPU a third of the time."""
    child = jnp.zeros_like(residual, jnp.int32)  # [B]
    before = end = mass = jnp.zeros_like(residual)  # [B]
    searching = jnp.ones_like(residual, bool)  # [B]
    for lane in range(len(masses)):
        reached = searching & (masses[lane] > 0)  # [B]
        child = jnp.where(reached, lane, child)  # [B]
        before, end = jnp.where(reached, end, before), jnp.where(reached, sums[lane], end)  # [B]
        mass = jnp.where(reached, masses[lane], mass)  # [B]
        searching = searching & ~(reached & (residual < sums[lane]))  # [B]
    return child, residual - before, mass


@jax.jit
def _read(tree: SegmentTree, index: Index) -> tuple[Index, Floats]:
    def bits_at(index: Array, leaves: Array) -> tuple[Array, Array]:
        return index, leaves[_place(tree.nodes, jnp.clip(index, 0, tree.capacity - 1))]

    leaves = tree.nodes[0][0] if isinstance(tree.nodes, tuple) else tree.nodes
    plainly = functools.partial(in_halves, bits_at)
    natively = functools.partial(native.read, capacity=tree.capacity)
    index, bits = _either(tree, natively, plainly, index, leaves)
    return index, _floats(bits)


def _where(tree: SegmentTree, again: SegmentTree) -> str:
    """Returns the slots over which a reduction is not that of the leaves."""
    for level in levels(tree.capacity, len(tree.ops), tree.width)[1:]:
        size = tree.width**level.number
        rows = (_rows(one.nodes, level) for one in (tree, again))
        for op, ours, theirs in zip(tree.ops, *rows, strict=False):
            wrong = np.flatnonzero(np.asarray(ours != theirs)) * size
            if wrong.size and wrong[0] < tree.capacity:
                return f"the {op} of slots {wrong[0]} to {min(wrong[0] + size, tree.capacity) - 1}"
    return f"a node above slot {tree.capacity - 1}, the last one"


@jax.jit
def _set_again(tree: SegmentTree) -> SegmentTree:
    """Returns a tree of the same leaves, with every node computed again.

    Sums of wide blocks that are the same up to rounding stay as they are.
    """
    again = tree.set_all(tree.leaves)

    def rounded(ours: Int[Array, "..."], theirs: Int[Array, "..."]) -> Int[Array, "..."]:
        have, want = _floats(ours), _floats(theirs)
        # The bits of counts are those of smaller floats.
        return jnp.where((want >= TINY) & (abs(have - want) <= _ROUNDING * want), ours, theirs)

    return again if tree.width == NARROW else jax.tree.map(rounded, tree, again)


@functools.partial(jax.jit, static_argnums=1)
def _with_width(tree: SegmentTree, width: int) -> SegmentTree:
    def convert(tree: SegmentTree) -> SegmentTree:
        return SegmentTree.create(tree.capacity, tree.ops, width).set_all(tree.leaves)

    # Trees may be stacked along leading axes.
    for _ in range(tree.roots.ndim - 1):
        convert = jax.vmap(convert)
    return convert(tree)

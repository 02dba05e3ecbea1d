"""The forms of every tree operation, and the one place that chooses between them.

On a CPU the cost of a small kernel is its launch, so the *loop* form walks the rows one by one in
a ``fori_loop`` whose body XLA compiles into a single native function: no launch per step, no
``[B, K]`` temporaries, duplicates in order. Everywhere else the *vector* form does one level per
kernel for all rows together. Both do the same arithmetic in the same order, so they agree bit for
bit; the vector form is the reference. So do the kernels of ``native``, which a CPU takes if asked.

Every function here takes flat trees with a leading axis ``S`` of independent trees, ``[S, P]``,
and per-tree rows ``[S, B]``. ``vmap`` over a buffer only makes ``S`` longer (see ``batched``): a
batched ``dynamic_update_slice`` would otherwise cost a pass over the whole tree.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap

from jaxbuf.core import in_place, native, rowwise

FANOUT = 16
_SHIFT = FANOUT.bit_length() - 1
# The largest float32 below x is x * _BELOW, for every normal x.
_BELOW = 1.0 - 2.0**-24
# XLA:CPU shares a gather between two threads if what it is from takes more than 512 KB. Up to this
# many queries they wait for each other longer than one takes for all of it.
_SHARED_TREE = 2**17
_UNSHARED_QUERIES = 256
# Up to this many our own kernel wins over XLA's, which compute with several queries at a time; and
# in a program that is nothing but one operation, where two threads have little else to do.
_NATIVE_QUERIES = 4096
_NATIVE_QUERIES_ALONE = 1024
# Levels of this many nodes are too large for the innermost caches of a CPU.
_FAR = 2**15
# Of up to this many rows all pairs are compared in one kernel, where several would find the last of
# those for one leaf otherwise; and levels of up to this many nodes are recomputed as a whole.
_COMPARED_ROWS = 1024
_WHOLE_LEVEL = 4096
# Up to this many leaves a loop reads as fast as one gather.
_LOOP_READS = 512

Op = Literal["sum", "min", "max", "min_positive"]
OPS: tuple[Op, ...] = ("sum", "min", "max", "min_positive")
NEUTRAL: dict[Op, float] = {
    "sum": 0.0,
    "min": math.inf,
    "max": -math.inf,
    "min_positive": 0.0,
}


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where the nodes of a tree lie in its flat array: leaves first, then each operation's levels.

    Level 0 is the leaves, shared by all operations; level ``depth`` is the root. Every level is
    padded to whole blocks of ``FANOUT``, so a node's children are one aligned block, and one line
    of memory. There is at least one spare leaf, at ``capacity``, which no path to the root reads as
    its own.
    """

    capacity: int
    ops: tuple[Op, ...]

    @functools.cached_property
    def counts(self) -> tuple[int, ...]:
        """Nodes in use on each level, from the leaves to the root."""
        counts = [self.capacity]
        while counts[-1] > 1 or len(counts) == 1:
            counts.append(-(-counts[-1] // FANOUT))
        return tuple(counts)

    @functools.cached_property
    def sizes(self) -> tuple[int, ...]:
        """Nodes stored on each level, padding included."""
        leaves, *upper = self.counts
        return tuple(-(-count // FANOUT) * FANOUT for count in (leaves + 1, *upper))

    @property
    def depth(self) -> int:
        """Levels above the leaves."""
        return len(self.counts) - 1

    @property
    def size(self) -> int:
        """Length of the flat array."""
        return self.sizes[0] + len(self.ops) * self.upper

    @property
    def fill(self) -> float:
        """Value of a leaf that was never set: the neutral one, which is 0 if there are sums."""
        fills = {NEUTRAL[op] for op in self.ops}
        return 0.0 if 0.0 in fills else fills.pop()

    @property
    def upper(self) -> int:
        """Nodes above the leaves, for each operation."""
        return sum(self.sizes[1:])

    def offset(self, op: Op, level: int) -> int:
        """Position of the first node of ``level`` of ``op``."""
        if level == 0:
            return 0
        return self.sizes[0] + self.ops.index(op) * self.upper + sum(self.sizes[1:level])


def combine(op: Op, children: list[jax.Array]) -> jax.Array:
    """The value of a node from its ``FANOUT`` children, in the order that a descent relies on."""
    if op == "sum":
        return _sum4([_sum4(children[i : i + 4]) for i in range(0, FANOUT, 4)])
    if op == "min_positive":
        # As unsigned numbers, one less than their bits, positive floats keep their order and zero
        # comes last.
        bits = [lax.bitcast_convert_type(c, jnp.uint32) - jnp.uint32(1) for c in children]
        least = _pairwise(lambda a, b: lax.select(a < b, a, b), bits)
        return lax.bitcast_convert_type(least + jnp.uint32(1), jnp.float32)
    # A plain comparison is one instruction, where jnp.maximum also minds NaN: none is ever stored.
    if op == "max":
        return _pairwise(lambda a, b: lax.select(a > b, a, b), children)
    return _pairwise(lambda a, b: lax.select(a < b, a, b), children)


def _pairwise(
    pick: Callable[[jax.Array, jax.Array], jax.Array], terms: list[jax.Array]
) -> jax.Array:
    while len(terms) > 1:
        half = len(terms) // 2
        terms = [pick(a, b) for a, b in zip(terms[:half], terms[half:], strict=True)]
    return terms[0]


def _sum4(terms: list[jax.Array]) -> jax.Array:
    return ((terms[0] + terms[1]) + terms[2]) + terms[3]


def _past(bounds: list[jax.Array], r: jax.Array) -> tuple[jax.Array, jax.Array]:
    """How many of three rising bounds ``r`` has reached, and the last of them (0 if none)."""
    past = [r >= bound for bound in bounds]
    count = past[0].astype(jnp.int32) + past[1].astype(jnp.int32) + past[2].astype(jnp.int32)
    return count, lax.select_n(count, jnp.zeros_like(r), *bounds)


def choose(masses: list[jax.Array], r: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The child that holds ``r``: smallest ``i`` with ``r < m_0 + ... + m_i``; and the residual.

    Every comparison is with the very sums that make up the node's own value, so that rounding never
    leads to a child without mass.
    """
    groups = [_sum4(masses[i : i + 4]) for i in range(0, FANOUT, 4)]
    first, second = groups[0], groups[0] + groups[1]
    third = second + groups[2]
    # A rounded residual may equal the node's whole mass; the last float below keeps it inside.
    r = jnp.minimum(r, (third + groups[3]) * jnp.float32(_BELOW))
    group, base = _past([first, second, third], r)
    inside = [
        lax.select_n(group, masses[i], masses[4 + i], masses[8 + i], masses[12 + i])
        for i in range(3)
    ]
    pair = inside[0] + inside[1]
    bounds = [base + inside[0], base + pair, base + (pair + inside[2])]
    child, before = _past(bounds, r)
    return 4 * group + child, r - jnp.maximum(before, base)


def build(layout: Layout, leaves: jax.Array) -> jax.Array:
    """The flat tree ``[P]`` over ``leaves [capacity]``. O(capacity)."""
    leaves = jnp.pad(leaves, (0, layout.sizes[0] - layout.capacity), constant_values=layout.fill)
    parts = [leaves]
    for op in layout.ops:
        level = leaves
        for height in range(1, layout.depth + 1):
            below = level[: layout.counts[height] * FANOUT]
            level = combine(op, list(below.reshape(-1, FANOUT).T))
            pad = layout.sizes[height] - layout.counts[height]
            level = jnp.pad(level, (0, pad), constant_values=layout.fill)
            parts.append(level)
    return jnp.concatenate(parts)


def set_leaves(
    layout: Layout,
    nodes: jax.Array,
    index: jax.Array,
    value: jax.Array,
    *,
    contiguous: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Set leaves and recompute everything above them.

    Args:
        layout: Where the nodes lie.
        nodes: Flat tree ``[P]``.
        index: Leaves to set ``[B]``; rows outside ``[0, capacity)`` are dropped, and of several
            rows for one leaf the last wins.
        value: Their values ``[B]``.
        contiguous: A promise that the legal rows come first and that their leaves are consecutive
            modulo the capacity, so that one parent in ``FANOUT`` rows has to be visited.

    Returns:
        The tree ``[P]``, its roots ``[len(ops)]``, and by how much the number of positive leaves
        grew, ``[]``.
    """
    if index.shape[0] == 1:
        index, value = in_place.of_two(index, value, layout.capacity)
    most = rowwise.SHORT_RUN if contiguous else rowwise.most_rows()
    return _set_leaves(layout, nodes, index, value, contiguous, index.shape[0] <= most)


@functools.partial(jax.jit, static_argnames=("layout", "contiguous", "short"))
def _set_leaves(
    layout: Layout,
    nodes: jax.Array,
    index: jax.Array,
    value: jax.Array,
    contiguous: bool,
    short: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    setter = _setter(layout, contiguous, short)
    nodes, roots, gained = setter(nodes[None], index[None], value[None])
    return nodes[0], roots[0], gained[0]


@functools.partial(jax.jit, static_argnames="layout")
def find(
    layout: Layout, nodes: jax.Array, prefix: jax.Array, refine: jax.Array | None = None
) -> jax.Array:
    """The leaf that holds each prefix: the smallest ``i`` with ``prefix < v_0 + ... + v_i``.

    Args:
        layout: Where the nodes lie; ``"sum"`` is among its operations.
        nodes: Flat tree ``[P]``.
        prefix: Queries ``[B]`` in ``[0, total)``.
        refine: What to add to each residual ``[B]`` half way down, where the nodes are so much
            lighter than the total that the bits lost at the top can be filled in again.

    Returns:
        Leaves ``[B]``, never one without mass unless the total is zero; always some of those there
        are, whatever the tree and the queries hold.
    """
    refined = refine is not None
    queries = _at_least_two(prefix), _at_least_two(refine if refined else prefix)
    found = _finder(layout, refined)(nodes[None], *(query[None] for query in queries))
    return found[0, : prefix.shape[0]]


@functools.partial(jax.jit, static_argnames="layout")
def read(layout: Layout, nodes: jax.Array, index: jax.Array) -> jax.Array:
    """The leaves at ``index [B]``; one outside ``[0, capacity)`` reads as the nearest leaf.

    A kernel of its own, because XLA copies the tree if a read of it may still be pending, fused
    into something that is computed later, when the tree is written next.
    """
    return _reader(layout)(nodes[None], _at_least_two(index)[None])[0, : index.shape[0]]


def _at_least_two(rows: jax.Array) -> jax.Array:
    """XLA unrolls a loop of one step, and then copies the tree: so there are none."""
    return jnp.repeat(rows, 2) if rows.shape[0] == 1 else rows


@functools.cache
def _setter(layout: Layout, contiguous: bool, short: bool) -> Callable[..., Any]:
    @custom_vmap
    def call(nodes: jax.Array, index: jax.Array, value: jax.Array) -> Any:
        loop = functools.partial(_set_loop, layout, contiguous, short)
        return lax.platform_dependent(
            nodes,
            index,
            value,
            cpu=functools.partial(_set_native, layout) if native.in_use() else loop,
            default=functools.partial(_set_vector, layout, contiguous=contiguous),
        )

    @call.def_vmap
    def _(axis_size: int, batched: list[bool], *args: jax.Array) -> Any:
        merged = [
            _merge(axis_size, arg, is_batched)
            for arg, is_batched in zip(args, batched, strict=True)
        ]
        outputs = tuple(_split(axis_size, output) for output in call(*merged))
        return outputs, (True, True, True)

    return call


@functools.cache
def _finder(layout: Layout, refined: bool) -> Callable[..., Any]:
    @custom_vmap
    def call(nodes: jax.Array, prefix: jax.Array, refine: jax.Array) -> Any:
        on_cpu = _find_loop if prefix.size <= rowwise.most_rows() else _find_levels
        most_native = _NATIVE_QUERIES_ALONE if rowwise.is_alone() else _NATIVE_QUERIES
        on_cpu = _find_native if native.in_use() and prefix.size <= most_native else on_cpu
        return lax.platform_dependent(
            nodes,
            prefix,
            refine,
            cpu=functools.partial(on_cpu, layout, refined),
            default=functools.partial(_find_vector, layout, refined),
        )

    _read_only(call)
    return call


@functools.cache
def _reader(layout: Layout) -> Callable[..., Any]:
    @custom_vmap
    def call(nodes: jax.Array, index: jax.Array) -> Any:
        on_cpu = _read_loop if index.size <= _LOOP_READS else _read_at_once
        return lax.platform_dependent(
            nodes,
            index,
            cpu=functools.partial(_read_native if native.in_use() else on_cpu, layout),
            default=functools.partial(_read_vector, layout),
        )

    _read_only(call)
    return call


def _read_only(call: Any) -> None:
    """Batch a function of trees ``[S, P]`` and queries ``[S, B]`` that returns ``[S, B]``."""

    @call.def_vmap
    def _(axis_size: int, batched: list[bool], *args: jax.Array) -> Any:
        nodes, *queries = args
        if batched[0]:
            merged = [
                _merge(axis_size, arg, is_batched)
                for arg, is_batched in zip(args, batched, strict=True)
            ]
            return _split(axis_size, call(*merged)), True
        # One tree, many sets of queries: they become more rows, and the tree is not repeated.
        queries = [
            q if is_batched else jnp.broadcast_to(q, (axis_size, *q.shape))
            for q, is_batched in zip(queries, batched[1:], strict=True)
        ]
        _, trees, rows = queries[0].shape
        flat = [jnp.moveaxis(q, 0, 1).reshape(trees, axis_size * rows) for q in queries]
        found = call(nodes, *flat).reshape(trees, axis_size, rows)
        return jnp.moveaxis(found, 1, 0), True


def _merge(axis_size: int, array: jax.Array, is_batched: bool) -> jax.Array:
    if not is_batched:
        array = jnp.broadcast_to(array, (axis_size, *array.shape))
    return array.reshape(axis_size * array.shape[1], *array.shape[2:])


def _split(axis_size: int, array: jax.Array) -> jax.Array:
    return array.reshape(axis_size, -1, *array.shape[1:])


def _base(layout: Layout, trees: int, rows: int, i: jax.Array) -> jax.Array:
    """Where the tree begins that row ``i`` of all trees is for."""
    return i // rows * layout.size if trees > 1 else jnp.int32(0)


def _block(nodes: jax.Array, start: jax.Array) -> list[jax.Array]:
    block = lax.dynamic_slice(nodes, (in_place.place(start),), (FANOUT,))
    return [block[i] for i in range(FANOUT)]


def _blocks(nodes: jax.Array, start: jax.Array, *, shared: bool = True) -> list[jax.Array]:
    """Children of many nodes: for ``start [R]`` a list of ``FANOUT`` arrays ``[R]``.

    With ``shared`` XLA:CPU may share the work between threads.
    """
    blocks = jax.vmap(lambda s: lax.dynamic_slice(nodes, (s,), (FANOUT,)))(start)
    if not shared:
        blocks = rowwise.gathered(blocks, start)
    return [blocks[:, i] for i in range(FANOUT)]


def _set_loop(
    layout: Layout,
    contiguous: bool,
    short: bool,
    nodes: jax.Array,
    index: jax.Array,
    value: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    trees, rows = index.shape
    flat, index, value = nodes.reshape(-1), index.reshape(-1), value.reshape(-1)
    zero = jnp.int32(0)

    def write(
        i: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        flat, gained, last = carry
        tree = i // rows if trees > 1 else zero
        leaf = in_place.get(index, i)
        legal = (leaf >= 0) & (leaf < layout.capacity)
        # Refused rows write the neutral value onto the spare leaf.
        target = tree * layout.size + jnp.where(legal, leaf, layout.capacity)
        new = jnp.where(legal, in_place.get(value, i), jnp.float32(layout.fill))
        old = in_place.get(flat, target)
        gain = (
            in_place.get(gained, tree) + (new > 0).astype(jnp.int32) - (old > 0).astype(jnp.int32)
        )
        gained = in_place.put(gained, tree, gain)
        last = in_place.put(last, tree, jnp.where(legal, leaf, in_place.get(last, tree)))
        # Or XLA copies the whole tree.
        at = in_place.later(target, in_place.get(gained, tree))
        return in_place.put(flat, at, new), gained, last

    far = [level for level in range(layout.depth) if layout.counts[level] >= _FAR]

    def lines(i: jax.Array) -> list[jax.Array]:
        leaf = jnp.clip(in_place.get(index, i), 0, layout.capacity - 1)
        base = _base(layout, trees, rows, i)
        return [
            in_place.get(
                flat,
                base + layout.offset(op, level) + lax.shift_right_logical(leaf, _SHIFT * level),
            )
            for level in far
            for op in layout.ops[: 1 if level == 0 else None]
            if level < 2 or op not in _seldom(layout, contiguous, trees, rows)
        ]

    needed = [index, value]
    if not contiguous and trees * rows > _LOOP_READS:
        # The loop waits for one leaf from memory after the other, a gather for many at a time.
        needed.append(_read_at_once(layout, nodes, index.reshape(trees, rows)))
    zero = rowwise.after(*needed)
    steps = rowwise.Steps(zero)
    if far and not contiguous and trees * rows <= _LOOP_READS:
        steps, zero = rowwise.touched(steps, trees * rows, lines)
    start = jnp.broadcast_to(zero, (trees + 1,))
    steps, (flat, gained, last) = rowwise.repeat(steps, trees * rows, write, (flat, start, start))
    gained = gained[:trees]
    index = index.reshape(trees, rows)
    steps, flat = _refresh_loop(layout, contiguous, short, steps, flat, index, last)
    nodes = flat.reshape(nodes.shape)
    return nodes, _read_loop(layout, nodes, _roots(layout, trees), steps), gained


def _roots(layout: Layout, trees: int) -> jax.Array:
    """Where each tree has its roots, ``[S, len(ops)]``."""
    offsets = [layout.offset(op, layout.depth) for op in layout.ops]
    return jnp.broadcast_to(jnp.asarray(offsets, jnp.int32), (trees, len(offsets)))


def _refresh_loop(
    layout: Layout,
    contiguous: bool,
    short: bool,
    before: rowwise.Steps,
    flat: jax.Array,
    index: jax.Array,
    last: jax.Array,
) -> tuple[rowwise.Steps, jax.Array]:
    """Recompute what lies above the leaves ``index``, level by level and node by node."""
    trees, rows = index.shape
    index = index.reshape(-1)
    plans = [_plan(layout, contiguous, rows, level) for level in range(layout.depth)]
    seldom = _seldom(layout, contiguous, trees, rows)
    always: tuple[Op, ...] = tuple(op for op in layout.ops if op not in seldom)

    def traced(plan: tuple[int, ...]) -> tuple[jax.Array, ...]:
        return tuple(jnp.int32(number) for number in plan)

    def locate(plan: Any, i: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The node that a step recomputes, and where its tree begins."""
        steps, dense, stride, shift, _, _ = plan
        tree = i // steps if trees > 1 else jnp.int32(0)
        step = i - tree * steps
        leaf = in_place.get(index, tree * rows + jnp.minimum(step * stride, rows - 1))
        leaf = jnp.where((leaf >= 0) & (leaf < layout.capacity), leaf, 0)
        if contiguous:
            # One row in so many starts a new parent; the last row and both ends of the ring may
            # lie under others.
            leaf = jnp.where(step == steps - 3, last[tree], leaf)
            leaf = jnp.where(step == steps - 2, 0, leaf)
            leaf = jnp.where(step == steps - 1, layout.capacity - 1, leaf)
        node = jnp.where(dense > 0, step, lax.shift_right_logical(leaf, shift))
        return node, tree * layout.size

    def recompute(flat: jax.Array, plan: Any, i: jax.Array) -> jax.Array:
        node, base = locate(plan, i)
        *_, source, goal = plan
        for op in always:
            up = layout.ops.index(op) * layout.upper
            children = _block(flat, base + source + up + node * FANOUT)
            flat = in_place.put(flat, base + goal + up + node, combine(op, children))
        return flat

    def parents(i: jax.Array, carry: Any) -> Any:
        """Recompute one parent of leaves, which all operations share."""
        flat, lists = carry
        node, base = locate(traced(plans[0]), jnp.minimum(i, steps - 1))
        children = _block(flat, base + node * FANOUT)
        for op in always:
            flat = in_place.put(flat, base + layout.offset(op, 1) + node, combine(op, children))
        for op in seldom:
            first, value = layout.offset(op, 1), combine(op, children)
            flat, listed = _change(flat, first, value, lists[op], node)
            lists = {**lists, op: listed}
        return flat, lists

    def whole_level(before: rowwise.Steps, flat: jax.Array, level: int) -> Any:
        steps, plan = trees * plans[level][0], traced(plans[level])

        def step(i: jax.Array, flat: jax.Array) -> jax.Array:
            return recompute(flat, plan, jnp.minimum(i, steps - 1))

        return rowwise.repeat(before, max(steps, 2), step, flat)

    steps = trees * plans[0][0]
    zero = rowwise.after(before.done)
    lists = {op: (jnp.broadcast_to(zero, (max(steps, 2),)), zero) for op in seldom}
    before, (flat, lists) = rowwise.repeat(before, max(steps, 2), parents, (flat, lists))
    for op in seldom:
        flat = _refresh_changed(layout, op, flat, *lists[op])
    if not always:
        return before, flat
    # The levels further up, of few nodes, share one loop: that keeps the program short enough, see
    # ``rowwise``, to be run without handing it to a thread. With several trees its steps would be
    # too long for XLA to make one native function of them.
    apart = min(layout.depth, 2 if short and trees == 1 else layout.depth)
    for level in range(1, apart):
        before, flat = whole_level(before, flat, level)
    if apart == layout.depth:
        return before, flat
    table = jnp.asarray(np.asarray(plans[apart:], np.int32))

    def advance(_: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]) -> Any:
        flat, level, i = carry
        row = lax.dynamic_slice(table, (level, jnp.int32(0)), (1, table.shape[1]))[0]
        plan = tuple(row[k] for k in range(table.shape[1]))
        flat = recompute(flat, plan, i)
        done = i + 1 == trees * plan[0]
        return flat, jnp.where(done, level + 1, level), jnp.where(done, 0, i + 1)

    total = max(trees * sum(plan[0] for plan in plans[apart:]), 2)
    zero = rowwise.after(before.done)
    before, (flat, _, _) = rowwise.repeat(before, total, advance, (flat, zero, zero))
    return before, flat


def _seldom(layout: Layout, contiguous: bool, trees: int, rows: int) -> tuple[Op, ...]:
    """The operations whose nodes are recomputed only where one below them has changed.

    A sum changes with each of its leaves, an extreme seldom: of 256 random leaves some 30 change
    that of their 16 leaves, and two that of 256.
    """
    # Above consecutive leaves there are few nodes.
    if contiguous or trees > 1 or layout.depth < 2 or layout.counts[2] <= rows:
        return ()
    return tuple(op for op in layout.ops if op != "sum")


def _refresh_changed(
    layout: Layout, op: Op, flat: jax.Array, changed: jax.Array, count: jax.Array
) -> jax.Array:
    """Recompute what lies above those nodes of the lowest level that have changed.

    The nodes that change in turn replace them in the list, until none does.
    """
    starts = [layout.offset(op, level) for level in range(layout.depth + 1)]
    table = jnp.asarray(starts, jnp.int32)

    def step(carry: Any) -> Any:
        flat, changed, below, level, i, count, kept = carry
        # What was listed of this level is done: those that have changed come next.
        done = i == count
        level, i = jnp.where(done, level + 1, level), jnp.where(done, 0, i)
        count, kept = jnp.where(done, kept, count), jnp.where(done, 0, kept)
        node = lax.shift_right_logical(below, _SHIFT)
        value = combine(op, _block(flat, in_place.get(table, level) + node * FANOUT))
        first = in_place.get(table, level + 1)
        flat, (changed, kept) = _change(flat, first, value, (changed, kept), node)
        # Read where it is not yet to be written: or XLA copies the list.
        below = in_place.get(changed, jnp.where(i + 1 == count, 0, i + 1))
        return flat, changed, below, level, i + 1, count, kept

    def left(carry: Any) -> jax.Array:
        *_, level, i, count, kept = carry
        return (i < count) | ((kept > 0) & (level + 1 < layout.depth))

    zero = rowwise.after(count)
    begin = (flat, changed, changed[0], zero, zero, zero, count)
    return lax.while_loop(left, step, begin)[0]


def _change(
    flat: jax.Array,
    first: jax.Array | int,
    value: jax.Array,
    listed: tuple[jax.Array, jax.Array],
    node: jax.Array,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Write the value of a node of the level that begins at ``first``.

    If that is a change the node goes on the list, which is one of so many.
    """
    old = in_place.get(flat, first + node)
    one = lax.bitcast_convert_type(old, jnp.int32) != lax.bitcast_convert_type(value, jnp.int32)
    changed, count, node = in_place.append(listed[0], node, listed[1], one)
    return in_place.put(flat, in_place.later(first + node, count), value), (changed, count)


def _plan(layout: Layout, contiguous: bool, rows: int, level: int) -> tuple[int, ...]:
    """How ``level + 1`` is recomputed from ``level``.

    Returns:
        Steps; whether these are the nodes of the whole level, one by one; else the row that a step
        starts from, per step, and the shift that leads from its leaf to the node; and where the
        children and the nodes of the first operation begin.
    """
    stride = FANOUT ** (level + 1) if contiguous else 1
    steps = -(-rows // stride) + 3 if contiguous else rows
    count = layout.counts[level + 1]
    # Rebuilding the whole level may take fewer steps than visiting the parents.
    dense = count <= steps
    return (
        count if dense else steps,
        int(dense),
        min(stride, rows),
        _SHIFT * (level + 1),
        layout.offset(layout.ops[0], level),
        layout.offset(layout.ops[0], level + 1),
    )


def _set_vector(
    layout: Layout,
    nodes: jax.Array,
    index: jax.Array,
    value: jax.Array,
    *,
    contiguous: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    trees, rows = index.shape
    flat = nodes.reshape(-1)
    legal = (index >= 0) & (index < layout.capacity)
    base = jnp.arange(trees, dtype=jnp.int32)[:, None] * layout.size
    nowhere = jnp.int32(flat.shape[0])
    target = jnp.where(legal, base + index, nowhere)
    old = flat.at[target].get(mode="fill", fill_value=0)
    # Or XLA reads the old leaves again, later, and copies the tree to still have them.
    old, flat = lax.optimization_barrier((old, flat))
    if contiguous and rows <= layout.capacity:
        wins = legal
    elif rows <= _COMPARED_ROWS:
        shape = (trees, rows, rows)
        row, later = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (1, 2))
        again = (index[:, :, None] == index[:, None, :]) & (row < later)
        wins = legal & ~jnp.any(again, axis=2)
    else:
        # The leaves themselves are the scratch in which the last of several rows for one leaf is
        # found: without sorting, and the same on every backend.
        number = jnp.broadcast_to(jnp.arange(rows, dtype=jnp.float32), (trees, rows))
        flat = flat.at[target].set(-1.0, mode="drop").at[target].max(number, mode="drop")
        wins = legal & (flat.at[target].get(mode="fill", fill_value=-1) == number)
    change = (value > 0).astype(jnp.int32) - (old > 0).astype(jnp.int32)
    gained = jnp.sum(jnp.where(wins, change, 0), axis=1, dtype=jnp.int32)
    flat = flat.at[jnp.where(wins, target, nowhere)].set(value, mode="drop")
    # Further up, where a level has few nodes, all of them are recomputed, without looking them up.
    most = max(rows, _WHOLE_LEVEL // trees)
    whole = next(level for level in range(layout.depth) if layout.counts[level + 1] <= most)
    parent = jnp.where(legal, index, 0)
    for level in range(whole):
        parent = lax.shift_right_logical(parent, jnp.asarray(_SHIFT, parent.dtype))
        # One gather and one scatter for all operations.
        children = [base + layout.offset(op, level) + parent * FANOUT for op in layout.ops]
        goals = [base + layout.offset(op, level + 1) + parent for op in layout.ops]
        blocks = _blocks(flat, jnp.concatenate(children, axis=1).reshape(-1))
        blocks = [child.reshape(trees, -1, rows) for child in blocks]
        values = [combine(op, [c[:, k] for c in blocks]) for k, op in enumerate(layout.ops)]
        goal = jnp.concatenate(goals, axis=1).reshape(-1)
        flat = flat.at[goal].set(jnp.concatenate(values, axis=1).reshape(-1), mode="drop")
    nodes, roots = _set_above(layout, flat.reshape(nodes.shape), whole)
    return nodes, roots, gained


def _set_above(layout: Layout, nodes: jax.Array, level: int) -> tuple[jax.Array, jax.Array]:
    """Recompute all that lies above a level; returns the trees and their roots ``[S, ops]``."""
    trees, ops = nodes.shape[0], layout.ops
    begins = [layout.offset(op, level) for op in ops]
    width = layout.counts[level + 1] * FANOUT
    below = [nodes[:, begin : begin + width] for begin in begins]
    levels: list[jax.Array] = []
    for height in range(level + 1, layout.depth + 1):
        blocks = [level_below.reshape(trees, -1, FANOUT) for level_below in below]
        values = [
            combine(op, [block[:, :, k] for k in range(FANOUT)])
            for op, block in zip(ops, blocks, strict=True)
        ]
        pad = layout.sizes[height] - layout.counts[height]
        values = jnp.pad(
            jnp.stack(values, axis=1), ((0, 0), (0, 0), (0, pad)), constant_values=layout.fill
        )
        if layout.counts[height] > FANOUT:
            # One kernel for all operations; what is smaller becomes part of what comes next.
            values = lax.optimization_barrier(values)
        levels.append(values)
        below = [values[:, k] for k in range(len(ops))]
    values = jnp.concatenate(levels, axis=2)
    tree, op, node = (lax.broadcasted_iota(jnp.int32, values.shape, axis) for axis in range(3))
    goal = tree * layout.size + op * layout.upper + (node + layout.offset(ops[0], level + 1))
    flat = nodes.reshape(-1).at[goal].set(values, unique_indices=True, mode="promise_in_bounds")
    return flat.reshape(nodes.shape), levels[-1][:, :, 0]


def _set_native(
    layout: Layout, nodes: jax.Array, index: jax.Array, value: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    levels = range(layout.depth + 1)
    return native.set_leaves(
        nodes,
        index,
        value,
        ops=[OPS.index(op) for op in layout.ops],
        starts=[layout.offset(op, level) for op in layout.ops for level in levels],
        counts=layout.counts,
    )


def _refine_level(layout: Layout, refined: bool) -> int:
    """How many levels to descend before the residual is refined."""
    return (layout.depth + 1) // 2 if refined else 0


def _starts(layout: Layout) -> np.ndarray[Any, np.dtype[np.int32]]:
    """First node of each level of the sums, from just below the root to the leaves."""
    levels = range(layout.depth - 1, -1, -1)
    return np.asarray([layout.offset("sum", level) for level in levels], np.int32)


def _lasts(layout: Layout) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Last node of each level, counted within it, from just below the root to the leaves.

    Where there is no mass, or a sum is not that of its children, a descent would go past it.
    """
    return np.asarray(layout.counts[-2::-1], np.int32) - 1


def _refine(mass: jax.Array, residual: jax.Array, refine: jax.Array) -> jax.Array:
    """Spread the residual evenly over the node again: what leaves at the end enters at the start.

    The residuals in a node lie on a grid as fine as the float at the top could make it. Points
    drawn within a grid cell fill the node but for a fraction of a cell at its start, and reach
    past its end by as much.
    """
    residual = residual + refine
    return jnp.where(residual >= mass, jnp.maximum(residual - mass, 0.0), residual)


def _find_loop(
    layout: Layout, refined: bool, nodes: jax.Array, prefix: jax.Array, refine: jax.Array
) -> jax.Array:
    trees, rows = prefix.shape
    flat, prefix, refine = nodes.reshape(-1), prefix.reshape(-1), refine.reshape(-1)
    middle = _refine_level(layout, refined)
    lasts = _lasts(layout).tolist()

    def first_child(first: int, node: jax.Array, i: jax.Array) -> jax.Array:
        base = _base(layout, trees, rows, i)
        return base + first + node * FANOUT

    # Node and residual are one array, for XLA would compute a child twice to write two.
    def descend(
        level: int, first: int, above: jax.Array, i: jax.Array, out: jax.Array
    ) -> jax.Array:
        node, residual = jnp.int32(0), in_place.get(prefix, i)
        if level > 0:
            row = lax.dynamic_slice(above, (in_place.place(i), jnp.uint32(0)), (1, 2))[0]
            node, residual = row[0], lax.bitcast_convert_type(row[1], jnp.float32)
        children = _block(flat, first_child(first, node, i))
        if level == middle and refined:
            residual = _refine(combine("sum", children), residual, in_place.get(refine, i))
        child, residual = choose(children, residual)
        node = jnp.minimum(node * FANOUT + child, lasts[level])
        row = [node, lax.bitcast_convert_type(residual, jnp.int32)]
        begin = (in_place.place(i), jnp.uint32(0))
        return lax.dynamic_update_slice(out, jnp.stack(row[: out.shape[1]])[None], begin)

    def touch(first: int, above: jax.Array, i: jax.Array) -> list[jax.Array]:
        node = lax.dynamic_slice(above, (in_place.place(i), jnp.uint32(0)), (1, 1))[0, 0]
        return [in_place.get(flat, first_child(first, node, i))]

    zero = rowwise.after(prefix)
    steps, found = rowwise.Steps(zero), prefix
    # A loop for each level: the rows do not wait for each other, so that a CPU works ahead.
    for level, first in enumerate(_starts(layout).tolist()):
        if level > 0 and layout.counts[layout.depth - 1 - level] >= _FAR:
            step = functools.partial(touch, first, found)
            steps, zero = rowwise.touched(steps, trees * rows, step)
        # Where the leaves are found no residual is left.
        out = jnp.broadcast_to(zero, (trees * rows, 1 if level == layout.depth - 1 else 2))
        step = functools.partial(descend, level, first, found)
        steps, found = rowwise.repeat(steps, trees * rows, step, out)
    return found.reshape(trees, rows)


def _find_levels(
    layout: Layout,
    refined: bool,
    nodes: jax.Array,
    prefix: jax.Array,
    refine: jax.Array,
    *,
    unroll: bool = False,
) -> jax.Array:
    trees, rows = prefix.shape
    flat, residual, refine = nodes.reshape(-1), prefix.reshape(-1), refine.reshape(-1)
    base = jnp.repeat(jnp.arange(trees, dtype=jnp.int32) * layout.size, rows)
    top, starts = int(_starts(layout)[0]), jnp.asarray(_starts(layout))
    lasts = jnp.asarray(_lasts(layout))
    middle = _refine_level(layout, refined)
    shared = unroll or flat.size <= _SHARED_TREE or residual.size > _UNSHARED_QUERIES

    def descend(level: jax.Array | int, carry: Any) -> Any:
        node, residual = unpack(carry)
        start = base + starts[level] + node * FANOUT
        child, residual = choose(_blocks(flat, start, shared=shared), residual)
        return pack(jnp.minimum(node * FANOUT + child, lasts[level]), residual)

    def descend_to(first: int, last: int, carry: Any) -> Any:
        if not unroll:
            return lax.fori_loop(first, last, descend, carry)
        for level in range(first, last):
            carry = descend(level, carry)
        return carry

    # XLA:CPU makes a kernel for each of two results, and everything that leads to both is computed
    # twice. Of one complex number both parts are computed together.
    pack, unpack = (_as_pair, _of_pair) if unroll else (_as_complex, _of_complex)
    # The children of the root are the same for all rows of a tree, and need not be gathered.
    child, residual = choose([jnp.repeat(nodes[:, top + i], rows) for i in range(FANOUT)], residual)
    carry = pack(jnp.minimum(child, lasts[0]), residual)
    if middle:
        node, residual = unpack(descend_to(1, middle, carry))
        mass = flat[base + layout.offset("sum", layout.depth - middle) + node]
        carry = pack(node, _refine(mass, residual, refine))
    return unpack(descend_to(max(middle, 1), layout.depth, carry))[0].reshape(trees, rows)


def _as_pair(node: jax.Array, residual: jax.Array) -> tuple[jax.Array, jax.Array]:
    return node, residual


def _of_pair(pair: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    return pair


def _as_complex(node: jax.Array, residual: jax.Array) -> jax.Array:
    return lax.complex(residual, lax.bitcast_convert_type(node, jnp.float32))


def _of_complex(both: jax.Array) -> tuple[jax.Array, jax.Array]:
    return lax.bitcast_convert_type(lax.imag(both), jnp.int32), lax.real(both)


_find_vector = functools.partial(_find_levels, unroll=True)


def _find_native(
    layout: Layout, refined: bool, nodes: jax.Array, prefix: jax.Array, refine: jax.Array
) -> jax.Array:
    middle = _refine_level(layout, refined)
    levels = {"starts": _starts(layout).tolist(), "counts": layout.counts[-2::-1]}
    return native.find(nodes, prefix, refine, middle=middle, **levels)


def _read_loop(
    layout: Layout, nodes: jax.Array, index: jax.Array, before: rowwise.Steps | None = None
) -> jax.Array:
    """The leaves at ``index``; after the steps ``before``, which made them, any nodes."""
    trees, rows = index.shape
    flat, index = nodes.reshape(-1), index.reshape(-1)
    last = (layout.capacity if before is None else layout.size) - 1

    def one(i: jax.Array, values: jax.Array) -> jax.Array:
        base = _base(layout, trees, rows, i)
        at = base + jnp.clip(in_place.get(index, i), 0, last)
        return in_place.put(values, i, in_place.get(flat, at))

    before = rowwise.Steps(rowwise.after(index)) if before is None else before
    values = jnp.broadcast_to(rowwise.after(before.done).astype(jnp.float32), (trees * rows,))
    return rowwise.repeat(before, max(trees * rows, 2), one, values)[1].reshape(trees, rows)


def _read_at_once(layout: Layout, nodes: jax.Array, index: jax.Array) -> jax.Array:
    found = _read_vector(layout, nodes, index).reshape(-1)
    return rowwise.gathered(found, index).reshape(index.shape)


def _read_vector(layout: Layout, nodes: jax.Array, index: jax.Array) -> jax.Array:
    found = jnp.take_along_axis(nodes, jnp.clip(index, 0, layout.capacity - 1), axis=1)
    # Or XLA reads them again for everything that they go into, and copies the tree to be able to.
    return lax.optimization_barrier(found)


def _read_native(layout: Layout, nodes: jax.Array, index: jax.Array) -> jax.Array:
    return native.get_leaves(nodes, index, capacity=layout.capacity)

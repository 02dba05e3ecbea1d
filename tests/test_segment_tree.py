"""The segment tree against a flat NumPy array, in both of its forms."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxbuf.core import tree_kernels
from jaxbuf.core.segment_tree import SegmentTree
from jaxbuf.core.tree_kernels import Layout

CAPACITIES = (1, 5, 16, 17, 300, 5000)
OPS = (("sum",), ("min",), ("max",), ("sum", "max", "min_positive"), ("max", "sum"))


def twin_of(ops, leaves):
    """The value of each operation over all leaves, by NumPy."""
    positive = leaves[leaves > 0]
    values = {
        "sum": leaves.sum(),
        "min": leaves.min(),
        "max": leaves.max(),
        "min_positive": positive.min() if positive.size else 0.0,
    }
    return [values[op] for op in ops]


@pytest.mark.parametrize("ops", OPS)
@pytest.mark.parametrize("capacity", CAPACITIES)
def test_random_updates_agree_with_a_flat_array(capacity, ops):
    rng = np.random.default_rng(capacity)
    tree = SegmentTree.create(capacity, ops)
    leaves = np.full(capacity, tree.layout.fill, np.float32)
    for rows in (1, 2, 7, 40, 1000) * 2:
        index = rng.integers(-1, capacity + 2, rows)
        value = rng.integers(0, 5, rows).astype(np.float32)
        for where, what in zip(index, value, strict=True):
            if 0 <= where < capacity:
                leaves[where] = what
        tree = tree.set(jnp.asarray(index, jnp.int32), jnp.asarray(value))
        np.testing.assert_array_equal(tree.leaves, leaves)
        np.testing.assert_array_equal(
            tree.nodes, tree_kernels.build(tree.layout, jnp.asarray(leaves))
        )
        assert [float(tree.root(op)) for op in ops] == twin_of(ops, leaves)
        assert int(tree.nnz) == np.sum(leaves > 0)


@pytest.mark.parametrize("ops", OPS)
def test_extremes_that_come_and_go(ops):
    # Few rows for so many leaves: what lies above a node is looked at only if the node changes.
    capacity, rows, rng = 70_000, 15, np.random.default_rng(0)
    tree = SegmentTree.create(capacity, ops)
    leaves = np.full(capacity, tree.layout.fill, np.float32)
    for step in range(40):
        # Some are close to each other, some are far away, and some are written twice.
        index = rng.integers(0, capacity, rows) if step % 2 else rng.integers(0, 300, rows)
        value = np.float32(rng.choice([0.0, 0.5, 1.0, step, 100.0 - step], rows))
        for where, what in zip(index, value, strict=True):
            leaves[where] = what
        tree = tree.set(jnp.asarray(index, jnp.int32), jnp.asarray(value))
        np.testing.assert_array_equal(
            tree.nodes, tree_kernels.build(tree.layout, jnp.asarray(leaves))
        )
        assert [float(tree.root(op)) for op in ops] == twin_of(ops, leaves)
        if step % 10 == 9:
            gone = np.flatnonzero(leaves != tree.layout.fill).astype(np.int32)
            leaves[gone] = tree.layout.fill
            for start in range(0, gone.size, rows):
                some = np.resize(gone[start : start + rows], rows)
                tree = tree.set(jnp.asarray(some), jnp.full((rows,), tree.layout.fill))
            assert [float(tree.root(op)) for op in ops] == twin_of(ops, leaves)


@pytest.mark.parametrize("capacity", CAPACITIES)
def test_the_loop_and_the_vector_form_agree_bit_for_bit(capacity):
    rng = np.random.default_rng(capacity)
    layout = Layout(capacity, ("sum", "max", "min_positive"))
    nodes = tree_kernels.build(layout, jnp.asarray(rng.random(capacity), jnp.float32))[None]
    for rows in (2, 33):
        index = jnp.asarray(rng.integers(-1, capacity + 2, (1, rows)), jnp.int32)
        value = jnp.asarray(rng.random((1, rows)) - 0.2, jnp.float32)
        value = jnp.maximum(value, 0.0)
        vector = tree_kernels._set_vector(layout, nodes, index, value)
        for short in (False, True):
            loop = tree_kernels._set_loop(layout, False, short, nodes, index, value)
            for one, other in zip(loop, vector, strict=True):
                np.testing.assert_array_equal(one, other)
        nodes, total = vector[0], vector[1][0, 0]
        prefix = jnp.asarray(rng.random((1, rows)), jnp.float32) * total
        refine = prefix * jnp.float32(2.0**-20)
        for refined in (False, True):
            forms = [
                form(layout, refined, nodes, prefix, refine)
                for form in (
                    tree_kernels._find_loop,
                    tree_kernels._find_levels,
                    tree_kernels._find_vector,
                )
            ]
            np.testing.assert_array_equal(forms[0], forms[1])
            np.testing.assert_array_equal(forms[0], forms[2])
        for read in (tree_kernels._read_loop, tree_kernels._read_at_once):
            np.testing.assert_array_equal(
                read(layout, nodes, index), tree_kernels._read_vector(layout, nodes, index)
            )


@pytest.mark.parametrize("contiguous", [False, True])
@pytest.mark.parametrize("whole", [1, 16, 4096])
@pytest.mark.parametrize("compared", [1, 1024])
def test_the_vector_form_in_all_its_ways(monkeypatch, compared, whole, contiguous):
    # How the last of several rows is found, and from which level on all nodes are recomputed.
    monkeypatch.setattr(tree_kernels, "_COMPARED_ROWS", compared)
    monkeypatch.setattr(tree_kernels, "_WHOLE_LEVEL", whole)
    rng, trees = np.random.default_rng(0), 3
    for capacity in (5, 16, 300, 5000):
        layout = Layout(capacity, ("sum", "max", "min_positive"))
        leaves = rng.random((trees, capacity), np.float32)
        build = jax.vmap(functools.partial(tree_kernels.build, layout))
        nodes = build(jnp.asarray(leaves))
        for rows in (2, 5, 40):
            index = rng.integers(-1, capacity + 2, (trees, rows))
            if contiguous:
                first = rng.integers(0, capacity, (trees, 1))
                count = rng.integers(0, min(rows, capacity) + 1, (trees, 1))
                row = np.arange(rows)
                index = np.where(row < count, (first + row) % capacity, capacity)
            value = np.maximum(rng.random((trees, rows), np.float32) - np.float32(0.4), 0)
            gained = -np.sum(leaves > 0, axis=1)
            for tree, where, what in zip(leaves, index, value, strict=True):
                for i, number in zip(where, what, strict=True):
                    if 0 <= i < capacity:
                        tree[i] = number
            args = nodes, jnp.asarray(index, jnp.int32), jnp.asarray(value)
            nodes, roots, grew = tree_kernels._set_vector(layout, *args, contiguous=contiguous)
            np.testing.assert_array_equal(nodes, build(jnp.asarray(leaves)))
            at = [layout.offset(op, layout.depth) for op in layout.ops]
            np.testing.assert_array_equal(roots, np.asarray(nodes)[:, at])
            np.testing.assert_array_equal(grew, gained + np.sum(leaves > 0, axis=1))


@pytest.mark.parametrize("rows", [2, 512, 513])
def test_updates_of_a_tree_larger_than_a_cache(rows):
    capacity, rng = 600_000, np.random.default_rng(rows)
    leaves = rng.random(capacity).astype(np.float32)
    tree = SegmentTree.create(capacity, ("sum", "max", "min_positive"))
    tree = tree.replace(nodes=tree_kernels.build(tree.layout, jnp.asarray(leaves)))
    for _ in range(3):
        index = rng.integers(-9, capacity + 9, rows)
        value = rng.random(rows).astype(np.float32)
        for where, what in zip(index, value, strict=True):
            if 0 <= where < capacity:
                leaves[where] = what
        tree = tree.set(jnp.asarray(index, jnp.int32), jnp.asarray(value))
        np.testing.assert_array_equal(
            tree.nodes, tree_kernels.build(tree.layout, jnp.asarray(leaves))
        )


@pytest.mark.parametrize("ops", OPS)
@pytest.mark.parametrize("capacity", CAPACITIES)
def test_children_of_a_node_lie_in_one_line_of_memory(capacity, ops):
    layout = Layout(capacity, ops)
    starts = [layout.offset(op, level) for op in ops for level in range(layout.depth)]
    line = 64 // np.dtype(np.float32).itemsize
    assert all(start % line == 0 for start in (*starts, layout.size))


@pytest.mark.parametrize("capacity", CAPACITIES)
def test_contiguous_updates_wrap(capacity):
    rng = np.random.default_rng(capacity)
    tree = SegmentTree.create(capacity, ("sum", "max"))
    leaves = np.zeros(capacity, np.float32)
    for rows in (1, 3, 16, 40):
        for _ in range(4):
            count, start = rng.integers(0, min(rows, capacity) + 1), rng.integers(capacity)
            row = np.arange(rows)
            index = np.where(row < count, (start + row) % capacity, capacity)
            value = rng.integers(0, 9, rows).astype(np.float32)
            leaves[index[:count]] = value[:count]
            tree = tree.set(jnp.asarray(index, jnp.int32), jnp.asarray(value), contiguous=True)
            np.testing.assert_array_equal(
                tree.nodes, tree_kernels.build(tree.layout, jnp.asarray(leaves))
            )


def test_published_sum_trees():
    tree = SegmentTree.create(4).set(jnp.arange(4), jnp.array([3.0, 1.0, 2.0, 5.0]))
    found = tree.query(jnp.array([0.0, 2.9, 3.0, 3.9, 4.0, 6.0, 10.9]))
    assert found.tolist() == [0, 0, 1, 1, 2, 3, 3]
    masses = jnp.array([0.0, 0.1, 0.5, 0.0, 0.0, 0.2, 0.8, 0.0])
    tree = SegmentTree.create(8).set(jnp.arange(8), masses)
    below = np.nextafter(np.float32(tree.root()), np.float32(0))
    found = tree.query(jnp.array([0.0, 0.09, 0.1, 0.59, 0.6, 0.799, 0.8, below], jnp.float32))
    assert found.tolist() == [1, 1, 2, 2, 5, 5, 6, 6]


@pytest.mark.parametrize("capacity", [7, 100, 5000])
def test_no_leaf_without_mass_is_found(capacity):
    rng = np.random.default_rng(1)
    leaves = rng.random(capacity).astype(np.float32) * (rng.random(capacity) < 0.1)
    leaves[capacity // 2] = 0.1
    tree = SegmentTree.create(capacity).set(jnp.arange(capacity), jnp.asarray(leaves))
    total = np.float32(tree.root())
    ends = np.cumsum(leaves, dtype=np.float64)
    near = np.concatenate([np.nextafter(ends, side) for side in (0.0, np.inf)] + [ends])
    points = np.concatenate([[0.0, np.nextafter(total, np.float32(0))], near]).astype(np.float32)
    found = np.asarray(tree.query(jnp.asarray(points[points < total])))
    assert (leaves[found] > 0).all()


@pytest.mark.parametrize("op", ["sum", "min", "max", "min_positive"])
@pytest.mark.parametrize("capacity", [1, 16, 17, 300])
def test_ranges(capacity, op):
    rng = np.random.default_rng(2)
    leaves = rng.integers(0, 9, capacity).astype(np.float32)
    tree = SegmentTree.create(capacity, (op,)).set(jnp.arange(capacity), jnp.asarray(leaves))
    twin = reference_reduce(op)
    reduce = jax.jit(functools.partial(tree.reduce, op=op))
    bounds = [(0, capacity), (0, 0), (capacity, capacity + 3), (-2, 1)]
    bounds += [tuple(sorted(rng.integers(0, capacity + 1, 2))) for _ in range(40)]
    for start, stop in bounds:
        part = leaves[max(start, 0) : stop]
        assert float(reduce(start, stop)) == twin(part), (start, stop)


def reference_reduce(op):
    def reduce(part):
        if op == "min_positive":
            part = part[part > 0]
        if not part.size:
            return {"sum": 0.0, "min": np.inf, "max": -np.inf, "min_positive": 0.0}[op]
        return float({"sum": np.sum, "max": np.max}.get(op, np.min)(part))

    return reduce


def test_vmap_over_trees_and_over_queries():
    rng = np.random.default_rng(3)
    leaves = jnp.asarray(rng.random((3, 50)), jnp.float32)
    index = jnp.broadcast_to(jnp.arange(50), (3, 50))
    empty = SegmentTree.create(50, ("sum", "max"))
    trees = jax.vmap(lambda i, v: empty.set(i, v))(index, leaves)
    single = [empty.set(jnp.arange(50), row) for row in leaves]
    np.testing.assert_array_equal(trees.nodes, [tree.nodes for tree in single])
    np.testing.assert_array_equal(trees.root("max"), [tree.root("max") for tree in single])
    points = jnp.asarray(rng.random((3, 20)), jnp.float32) * 10
    expected = [tree.query(row) for tree, row in zip(single, points, strict=True)]
    np.testing.assert_array_equal(jax.vmap(SegmentTree.query)(trees, points), expected)
    expected = [single[0].query(row) for row in points]
    np.testing.assert_array_equal(jax.vmap(single[0].query)(points), expected)
    many = jnp.asarray(rng.integers(-1, 52, (3, 400)), jnp.int32)
    np.testing.assert_array_equal(
        jax.vmap(SegmentTree.get)(trees, many),
        [tree.get(row) for tree, row in zip(single, many, strict=True)],
    )
    values = jnp.asarray(rng.random((3, 400)), jnp.float32)
    expected = [t.set(*row).nodes for t, *row in zip(single, many, values, strict=True)]
    np.testing.assert_array_equal(jax.vmap(SegmentTree.set)(trees, many, values).nodes, expected)
    nested = jax.vmap(jax.vmap(SegmentTree.query, in_axes=(None, 0)))(trees, points[:, None])
    np.testing.assert_array_equal(
        nested[:, 0], [t.query(row) for t, row in zip(single, points, strict=True)]
    )


def test_every_slot_of_a_large_tree_is_reached():
    # With 2**25 equal masses a float32 prefix has only half as many values as there are slots.
    capacity, rows = 2**25, 2**14
    tree = SegmentTree.create(capacity)
    tree = tree.replace(
        nodes=tree_kernels.build(tree.layout, jnp.ones((capacity,), jnp.float32)),
        summary=tree.summary.at[0].set(np.float32(capacity).view(np.uint32)),
    )
    rng = np.random.default_rng(4)
    cell = capacity / 2**24
    grid = rng.integers(0, 2**24, rows)
    fine = rng.integers(0, 16, rows) / 16
    found = tree.query(jnp.asarray(grid * cell, jnp.float32), jnp.asarray(fine * cell, jnp.float32))
    parity = np.bincount(np.asarray(found) % 2, minlength=2)
    assert abs(parity[0] - parity[1]) < 5 * np.sqrt(rows)
    np.testing.assert_array_equal(found, np.floor((grid + fine) * cell))


def test_what_cannot_be_built():
    with pytest.raises(ValueError, match="capacity is 0"):
        SegmentTree.create(0)
    with pytest.raises(ValueError, match="ops is"):
        SegmentTree.create(4, ("sum", "sum"))
    with pytest.raises(ValueError, match="ops is"):
        SegmentTree.create(4, ("product",))
    with pytest.raises(ValueError, match="a tree of its own"):
        SegmentTree.create(4, ("min", "sum"))
    with pytest.raises(ValueError, match="create it with 'max'"):
        SegmentTree.create(4).root("max")

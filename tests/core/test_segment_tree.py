"""The segment tree against a flat NumPy array, with the kernels in C++ and without."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxbuf.core import native
from jaxbuf.core.segment_tree import NARROW, WIDE, SegmentTree, levels, using_width
from tests.operations import quick

CAPACITIES = (1, 5, 16, 17, 300, 5000)
OPS = (("sum",), ("min",), ("max",), ("sum", "max", "min_positive"), ("max", "sum"))
UNSET = {"min": np.inf, "max": -np.inf}

# Narrow trees without the kernels in C++ and with them, and wide ones, which have none.
FORMS = ("pure", "native", "wide")
narrow = pytest.mark.parametrize("_form", ["pure"], indirect=True)


def without_kernel(function, **options):
    """Returns a compiled function that has no kernel, and so one program for both forms."""
    compiled = jax.jit(function, **options)

    @functools.wraps(function)
    def call(*args):
        with native.using_native(False):
            return compiled(*args)

    return call


assign = jax.jit(SegmentTree.set)
find = jax.jit(SegmentTree.find)
read = jax.jit(SegmentTree.read)
assign_all = without_kernel(SegmentTree.set_all)
create = without_kernel(SegmentTree.create, static_argnums=(0, 1))


@without_kernel
def observe(tree):
    """The leaves of a tree, the value at its root for each operation, and its positive leaves."""
    return tree.leaves, [tree.root(op) for op in tree.ops], tree.nnz


@pytest.fixture(params=FORMS, autouse=True)
def _form(request):
    natively = request.param == "native"
    if natively and not native.native_available():
        pytest.skip("the kernels were not built")
    width = WIDE if request.param == "wide" else NARROW
    with native.using_native(natively), using_width(width):
        yield


def unset(capacity, ops):
    """The leaves of a tree in which none is set yet."""
    return np.full(capacity, UNSET.get(ops[0], 0.0) if len(ops) == 1 else 0.0, np.float32)


def check(tree, leaves):
    """A tree is what a pass over its leaves makes of them, and its roots are NumPy's."""
    found, roots, nnz = observe(tree)
    np.testing.assert_array_equal(found, leaves)
    whole = assign_all(create(tree.capacity, tree.ops), jnp.asarray(leaves))
    jax.tree.map(np.testing.assert_array_equal, tree, whole)
    assert [float(root) for root in roots] == twin_of(tree.ops, leaves)
    assert int(nnz) == np.sum((leaves > 0) & np.isfinite(leaves))


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


def tree_of(leaves, ops=("sum",)):
    """A tree whose leaves are set one by one."""
    index = jnp.arange(len(leaves), dtype=jnp.int32)
    return assign(create(len(leaves), ops), index, jnp.asarray(leaves))


def put(leaves, index, value):
    """Sets leaves of the flat array, where they are inside of it."""
    for where, what in zip(index, value, strict=True):
        if 0 <= where < len(leaves):
            leaves[where] = what


@pytest.mark.parametrize("ops", quick([(ops,) for ops in OPS[1:4:2]], [(OPS[3],)]))
def test_extremes_that_come_and_go(ops):
    # Few rows for so many leaves: what lies above a node may be looked at only if the node changes.
    capacity, rows, rng = 70_000, 15, np.random.default_rng(0)
    tree, leaves = create(capacity, ops), unset(capacity, ops)
    nothing = leaves[0]
    for step in range(40):
        # Some are close to each other, some are far away, and some are written twice.
        index = rng.integers(0, capacity, rows) if step % 2 else rng.integers(0, 300, rows)
        value = np.float32(rng.choice([0.0, 0.5, 1.0, step, 100.0 - step], rows))
        for where, what in zip(index, value, strict=True):
            leaves[where] = what
        tree = assign(tree, jnp.asarray(index, jnp.int32), jnp.asarray(value))
        check(tree, leaves)
        if step % 10 == 9:
            gone = np.flatnonzero(leaves != nothing).astype(np.int32)
            leaves[gone] = nothing
            for start in range(0, gone.size, rows):
                some = np.resize(gone[start : start + rows], rows)
                tree = assign(tree, jnp.asarray(some), jnp.full((rows,), nothing))
            check(tree, leaves)


def test_zeros_of_either_sign_are_in_order():
    tree = SegmentTree.create(40, ("max",)).set(jnp.arange(3), jnp.array([-1.0, 0.0, -0.0]))
    assert not np.signbit(tree.root("max"))
    tree = tree.set(jnp.array([1]), jnp.array([-2.0]))
    assert (float(tree.root("max")), np.signbit(tree.root("max"))) == (0.0, True)


@pytest.mark.parametrize("rows", quick([2, 513], {513}))
def test_updates_of_a_tree_larger_than_a_cache(rows):
    capacity, rng = 600_000, np.random.default_rng(rows)
    # Sums of small integers are exact in whatever order.
    leaves = rng.integers(0, 9, capacity).astype(np.float32)
    tree = SegmentTree.create(capacity, ("sum", "max", "min_positive"))
    tree = assign_all(tree, jnp.asarray(leaves))
    for _ in range(3):
        index = rng.integers(-9, capacity + 9, rows)
        value = rng.integers(0, 9, rows).astype(np.float32)
        put(leaves, index, value)
        tree = assign(tree, jnp.asarray(index, jnp.int32), jnp.asarray(value))
        check(tree, leaves)


@narrow
@pytest.mark.parametrize("ops", OPS)
@pytest.mark.parametrize("capacity", CAPACITIES)
def test_children_of_a_node_lie_in_one_line_of_memory(capacity, ops):
    line = 64 // np.dtype(np.int32).itemsize
    assert line == NARROW
    for level in levels(capacity, len(ops)):
        assert level.start % line == level.stride % line == 0
    assert create(capacity, ops).nodes.size == level.stop


def test_published_sum_trees():
    tree = tree_of(np.array([3.0, 1.0, 2.0, 5.0], np.float32))
    found, _ = find(tree, jnp.array([0.0, 2.9, 3.0, 3.9, 4.0, 6.0, 10.9]))
    assert found.tolist() == [0, 0, 1, 1, 2, 3, 3]
    masses = np.array([0.0, 0.1, 0.5, 0.0, 0.0, 0.2, 0.8, 0.0], np.float32)
    tree = tree_of(masses)
    below = np.nextafter(np.float32(tree.root()), np.float32(0))
    points = jnp.array([0.0, 0.09, 0.1, 0.59, 0.6, 0.799, 0.8, below], jnp.float32)
    found, mass = find(tree, points)
    assert found.tolist() == [1, 1, 2, 2, 5, 5, 6, 6]
    np.testing.assert_array_equal(mass, masses[found])


def masses_of(rng, capacity, kind):
    """Leaves of which many have no mass, and some of the others hardly any."""
    leaves = (rng.random(capacity) * (rng.random(capacity) < 0.3)).astype(np.float32)
    if kind == "the end is empty":
        leaves[max(capacity // 3, 1) :] = 0
    elif kind == "the last one is lost in the sums":
        leaves[:] = np.where(leaves > 0, 1000 * leaves, 0)
        leaves[capacity * 3 // 4] = 1e-9
        leaves[capacity * 3 // 4 + 1 :] = 0
    elif kind == "as small as masses get":
        leaves = np.where(leaves > 0, np.finfo(np.float32).tiny, np.float32(0))
    if not leaves.any():
        leaves[0] = 1 if kind != "as small as masses get" else np.finfo(np.float32).tiny
    return leaves


KINDS = (
    "some are zero",
    "the end is empty",
    "the last one is lost in the sums",
    "as small as masses get",
)


@pytest.mark.parametrize(
    ("capacity", "kind"),
    quick(
        [(capacity, kind) for capacity in (1, 17, 5000) for kind in KINDS],
        [(17, KINDS[1]), (17, KINDS[3]), (5000, KINDS[0]), (5000, KINDS[2])],
    ),
)
def test_only_leaves_with_mass_are_found_and_beyond_the_total_the_last_one(capacity, kind):
    rng = np.random.default_rng(capacity)
    empty = create(capacity, ("sum", "max"))
    for _ in range(4):
        leaves = masses_of(rng, capacity, kind)
        tree = assign_all(empty, jnp.asarray(leaves))
        total, last = np.float32(tree.root()), np.flatnonzero(leaves)[-1]
        points = [total, np.nextafter(total, np.float32(np.inf)), 2 * total, 3e38, np.inf]
        # Just below it, any leaf with mass will do.
        points = np.asarray([*points, np.nextafter(total, np.float32(0))], np.float32)
        for refine in (None, np.zeros(6, np.float32), np.full(6, total * 2**-24, np.float32)):
            found, mass = find(tree, points, refine)
            assert found[:5].tolist() == [last] * 5
            assert mass[:5].tolist() == [leaves[last]] * 5
            assert mass[5] > 0
        # Of points beside the ends of leaves as well.
        ends = np.cumsum(leaves, dtype=np.float64)
        near = np.concatenate([np.nextafter(ends, side) for side in (0.0, np.inf)] + [ends, [0.0]])
        found, mass = find(tree, np.where(near < total, near, 0).astype(np.float32))
        assert (mass > 0).all()
        np.testing.assert_array_equal(mass, leaves[found])


@pytest.mark.parametrize("_form", quick(["pure", "native"], {"native"}), indirect=True)
def test_vmap_over_trees_and_over_queries():
    rng = np.random.default_rng(3)
    leaves = jnp.asarray(rng.random((3, 50)), jnp.float32)
    index = jnp.broadcast_to(jnp.arange(50), (3, 50))
    empty = create(50, ("sum", "max"))
    trees = jax.jit(jax.vmap(SegmentTree.set, (None, 0, 0)))(empty, index, leaves)
    single = [assign(empty, index[0], row) for row in leaves]
    same(trees, stack(single))
    np.testing.assert_array_equal(trees.root("max"), [tree.root("max") for tree in single])
    points = jnp.asarray(rng.random((3, 20)), jnp.float32) * 10
    expected = stack(find(tree, row) for tree, row in zip(single, points, strict=True))
    same(jax.jit(jax.vmap(SegmentTree.find))(trees, points), expected)
    expected = stack(find(single[0], row) for row in points)
    same(jax.jit(jax.vmap(SegmentTree.find, (None, 0)))(single[0], points), expected)
    many = jnp.asarray(rng.integers(-1, 52, (3, 400)), jnp.int32)
    expected = stack(read(tree, row) for tree, row in zip(single, many, strict=True))
    same(jax.jit(jax.vmap(SegmentTree.read))(trees, many), expected)
    values = jnp.asarray(rng.random((3, 400)), jnp.float32)
    expected = stack(assign(t, *row) for t, *row in zip(single, many, values, strict=True))
    same(jax.jit(jax.vmap(SegmentTree.set))(trees, many, values), expected)
    expected = stack(assign(t, many[0], row) for t, row in zip(single, values, strict=True))
    same(jax.jit(jax.vmap(SegmentTree.set, (0, None, 0)))(trees, many[0], values), expected)
    # Every tree with every row of points, whichever axis comes first.
    expected = stack(stack(find(tree, row) for row in points) for tree in single)
    by_point = jax.vmap(SegmentTree.find, in_axes=(None, 0))
    same(jax.jit(jax.vmap(by_point, in_axes=(0, None)))(trees, points), expected)
    by_tree = jax.vmap(SegmentTree.find, in_axes=(0, None))
    swapped = jax.jit(jax.vmap(by_tree, in_axes=(None, 0)))(trees, points)
    same(jax.tree.map(lambda leaf: jnp.swapaxes(leaf, 0, 1), swapped), expected)


def stack(trees):
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def same(one, other):
    jax.tree.map(np.testing.assert_array_equal, one, other)


@pytest.mark.parametrize("_form", quick(FORMS, {"native"}), indirect=True)
def test_every_slot_of_a_large_tree_is_reached():
    # With 2**25 equal masses a float32 prefix has only half as many values as there are slots.
    capacity, rows = 2**25, 2**14
    tree = SegmentTree.create(capacity)
    tree = assign_all(tree, jnp.ones((capacity,), jnp.float32))
    rng = np.random.default_rng(4)
    cell = capacity / 2**24
    grid = rng.integers(0, 2**24, rows)
    fine = rng.integers(0, 16, rows) / 16
    points = jnp.asarray(grid * cell, jnp.float32), jnp.asarray(fine * cell, jnp.float32)
    found, _ = tree.find(*points)
    parity = np.bincount(np.asarray(found) % 2, minlength=2)
    assert abs(parity[0] - parity[1]) < 5 * np.sqrt(rows)
    np.testing.assert_array_equal(found, np.floor((grid + fine) * cell))


@pytest.mark.parametrize("ops", quick([(ops,) for ops in OPS[1:4:2]], [(OPS[3],)]))
def test_leaves_that_are_known_to_differ_are_set_by_one_write(ops):
    rng, tree = np.random.default_rng(5), create(5000, ops)
    leaves = unset(5000, ops)
    index = rng.permutation(5000)[:400]
    value = rng.integers(0, 5, 400).astype(np.float32)
    leaves[index] = value
    # Rows out of range are dropped, however many there are.
    index = np.concatenate([index, [-1, 5000, 5000, -1]]).astype(np.int32)
    value = np.concatenate([value, np.ones(4, np.float32)])
    write = jax.jit(functools.partial(SegmentTree.set, unique=True))
    check(write(tree, index, value), leaves)
    check(tree.set(jnp.asarray(index), jnp.asarray(value)), leaves)

    # The search for the last of several rows takes one more, and two if the rows are so many that
    # not all of them have a number above the bits of infinity.
    def count_writes(rows, unique):
        row = [jax.ShapeDtypeStruct((rows,), dtype) for dtype in (jnp.int32, jnp.float32)]
        with native.using_native(False):
            program = jax.jit(functools.partial(SegmentTree.set, unique=unique)).lower(tree, *row)
        return program.as_text().count('"stablehlo.scatter"')

    for rows, more in ((404, 1), (2**23 - 1, 1), (2**23, 2)):
        assert count_writes(rows, False) == count_writes(rows, True) + more


@narrow
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

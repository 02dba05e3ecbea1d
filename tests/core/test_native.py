"""The kernels in C++: the same results as without them, on a CPU, and never outside the arrays."""

import functools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbuf
from jaxbuf.buffers.draws import or_zero
from jaxbuf.buffers.sample import _ratios
from jaxbuf.core import native, storage
from jaxbuf.core.native import called_from_python, using_native
from jaxbuf.core.random import scale_word
from jaxbuf.core.segment_tree import SegmentTree
from jaxbuf.core.slots import Slots
from jaxbuf.core.sorting import keep_last
from jaxbuf.occupancy.ages import AgeRange
from jaxbuf.occupancy.ranking import Ranking
from jaxbuf.occupancy.ring import Ring
from jaxbuf.occupancy.rings import Rings
from jaxbuf.strategies import prioritized
from jaxbuf.strategies.mass import over, points
from tests import operations

ITEM = {"obs": jnp.zeros(4), "reward": jnp.float32(0)}
PRIORITIZED = jaxbuf.Prioritized()

pytestmark = pytest.mark.skipif(
    not native.native_available(), reason="the kernels were not built: no C++ compiler"
)


def same(one, other):
    jax.tree.map(np.testing.assert_array_equal, one, other)


def both(function, *args):
    """Returns the output of a function, which must be the same with and without kernels."""
    with using_native(False):
        plain = jax.jit(function)(*args)
    with using_native(True), called_from_python(True):
        natively = jax.jit(function)
        assert "jaxbuf_" in natively.lower(*args).as_text()
        same(natively(*args), plain)
    return plain


@functools.partial(jax.jit, static_argnums=1)
def tree_of(leaves, ops):
    """A tree with these leaves; without jit it would be a program for each step of each size."""
    return SegmentTree.create(len(leaves), ops).set_all(leaves)


ALL_OPS = ("sum", "max", "min_positive")


@pytest.mark.parametrize(
    ("capacity", "ops"),
    operations.quick(
        [(1, ALL_OPS), (16, ALL_OPS), (70_000, ALL_OPS), (257, ("min",))],
        [(70_000, ALL_OPS), (257, ("min",))],
    ),
)
def test_trees_agree_bit_for_bit(capacity, ops):
    rng = np.random.default_rng(capacity)
    tree = tree_of((rng.random(capacity) * (rng.random(capacity) < 0.7)).astype("f4"), ops)
    before = jax.tree.map(np.asarray, tree)
    # 1,500 rows are enough to be shared between threads.
    for rows in (1500,) if capacity == 70_000 else (33 if capacity == 16 else 1, 1500):
        index = rng.integers(-1, capacity + 2, rows).astype(np.int32)
        value = np.maximum((rng.random(rows) - 0.2).astype(np.float32), 0)
        value = np.where(value > 0.7, np.finfo(np.float32).tiny, value)
        changed = both(SegmentTree.set, tree, index, value)
        both(SegmentTree.read, changed, index)
        if "sum" in ops:
            total = np.float32(changed.root())
            prefix = rng.random(rows).astype(np.float32) * total
            # Some lie at the total and beyond.
            prefix = np.where(prefix > 0.9 * total, prefix / np.float32(0.9), prefix)
            prefix[0] = total
            both(SegmentTree.find, changed, prefix)
            # Some refine a point past the end of its node.
            refine = np.ldexp(prefix, -rng.integers(4, 21, rows))
            both(SegmentTree.find, changed, prefix, refine)
    same(tree, before)


def hostile_trees(capacity, rng):
    """Trees that no sequence of calls makes, but an empty buffer or a damaged file may."""
    tree = tree_of(rng.random(capacity).astype(np.float32), ("sum", "max", "min_positive"))
    built = np.asarray(tree.nodes).view(np.float32)
    size, leaf = built.size, np.arange(built.size)
    special = np.asarray([0.0, 1.0, -1.0, 1e-38, 3e38, np.inf, -np.inf, np.nan], np.float32)
    hostile = {
        "zeros": np.zeros(size, np.float32),
        "sums of zeros": np.where(leaf < capacity, np.float32(0), built),
        "zeros under sums": np.where(leaf < capacity, built, np.float32(0)),
        "random": rng.random(size).astype(np.float32),
        "sparse": (rng.random(size) * (rng.random(size) < 0.05)).astype(np.float32),
        "negative": -built,
        "special": rng.choice(special, size),
    }
    return {name: tree.replace(nodes=jnp.asarray(x.view(np.int32))) for name, x in hostile.items()}


@pytest.mark.parametrize("capacity", operations.quick([1, 15, 17, 257, 70_001], {1, 257}))
def test_every_search_ends_in_the_tree_whatever_it_holds(capacity):
    rng, rows = np.random.default_rng(capacity), 66
    total = np.float32(capacity)
    special = [0.0, -0.0, total, 2 * total, -1.0, 1e-45, 1e-38, 3e38, np.inf, -np.inf, np.nan]
    prefix = np.concatenate([special, total * rng.random(rows - len(special))]).astype(np.float32)
    refine = rng.permutation(prefix)
    for refined in (False, True):
        args = (prefix, refine) if refined else (prefix,)
        with using_native(False):
            plain = jax.jit(SegmentTree.find)
            wanted = {k: plain(tree, *args)[0] for k, tree in hostile_trees(capacity, rng).items()}
        with using_native(True):
            compiled = jax.jit(SegmentTree.find)
            for name, tree in hostile_trees(capacity, np.random.default_rng(capacity)).items():
                found, _ = compiled(tree, *args)
                assert ((found >= 0) & (found < capacity)).all(), name
                assert ((wanted[name] >= 0) & (wanted[name] < capacity)).all(), name


RANKED = [-np.inf, -2.5, -0.0, 0.0, 1e-30, 3.0, np.inf]


@pytest.mark.parametrize(
    ("capacity", "rows"),
    operations.quick([(1, 1), (17, 40), (600, 37), (5000, 90)], {(17, 40), (5000, 90)}),
)
def test_rows_are_placed_where_the_definition_puts_them(capacity, rows):
    rng = np.random.default_rng(capacity)
    # The numbers of arrival wrap on the way.
    ranking = Ranking.create(capacity)
    ranking = ranking.replace(arrivals=jnp.uint32(2**32 - 100))

    def place(ranking, score, mask):
        return ranking.place(rows, mask, score)

    with using_native(False):
        plainly = jax.jit(place)
    with using_native(True):
        natively = jax.jit(place)
    for turn in range(30):
        # Few different scores, so that there are ties, and in every third turn others.
        score = rng.choice(RANKED, rows) if turn % 3 else rng.normal(size=rows) + turn / 10
        args = ranking, jnp.asarray(score, jnp.float32), jnp.asarray(rng.random(rows) < 0.8)
        with using_native(True):
            assert turn or "jaxbuf_place" in natively.lower(*args).as_text()
            got = natively(*args)
        with using_native(False):
            wanted = plainly(*args)
        same(got, wanted)
        ranking = wanted[0]
    assert ranking.size == min(capacity, int(ranking.arrivals + np.uint32(100)))
    many = jax.tree.map(lambda leaf: jnp.stack([leaf] * 3), ranking)
    scores = jnp.asarray(rng.choice(RANKED, (3, rows)), jnp.float32)
    both(jax.vmap(lambda ranking, score: ranking.place(rows, None, score)), many, scores)


@pytest.mark.parametrize(
    ("capacity", "rows"), [(1, 300), (15, 1), (17, 300), (257, 1), (70_001, 300)]
)
def test_rows_are_placed_in_the_tree_whatever_it_holds(capacity, rows):
    rng = np.random.default_rng(capacity)
    ranking = Ranking.create(capacity)
    score = jnp.asarray(rng.choice(RANKED, rows), jnp.float32)
    with using_native(True):
        compiled = jax.jit(lambda ranking, score: ranking.place(rows, None, score))
        for size in (0, 5, capacity, 2**31 - 1, 2**32 - 1):
            for limit in (2, 2**32):
                nodes = rng.integers(0, limit, ranking.nodes.shape, dtype=np.uint32)
                hostile = ranking.replace(
                    nodes=jnp.asarray(nodes), arrivals=jnp.uint32(7), held=jnp.uint32(size)
                )
                slot = compiled(hostile, score)[1]
                assert ((slot >= 0) & (slot <= capacity)).all()


@pytest.mark.parametrize(
    ("numbers", "rows"), [(1, 3), (7, 2), (7, 256), (300, 256), (300, 5000), (2**32, 5000)]
)
def test_the_last_of_equal_rows_is_the_same(numbers, rows):
    rng = np.random.default_rng(rows)
    lanes = rng.integers(0, numbers, (3, rows)).astype(np.uint32).astype(np.int32)
    # Many numbers that begin their search at the same place in the kernel's table.
    place = np.arange(2**22, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(64 - 15)
    lanes[1] = rng.choice(np.flatnonzero(place == 3), rows)
    # Some rows are past the end already.
    past_end = int(lanes[0, 0])
    later = {int(number): row for row, number in enumerate(lanes[0])}
    expected = [later[int(n)] == row for row, n in enumerate(lanes[0])]
    keep = functools.partial(keep_last, past_end=past_end)
    found = both(keep, jnp.asarray(lanes[0]))
    assert found.tolist() == np.where(expected, lanes[0], past_end).tolist()
    both(jax.vmap(keep), jnp.asarray(lanes))


RING = Ring(jnp.uint32(4), jnp.uint32(7), jnp.uint32(9), capacity=9)
STEPS = Rings(*[jnp.asarray([n], jnp.uint32) for n in (3, 1, 3)], 9, sequence_length=1, period=1)
WINDOWS = Rings(
    jnp.asarray([4, 0, 9], jnp.uint32),
    jnp.asarray([7, 1, 2**32 - 1], jnp.uint32),
    jnp.asarray([12, 0, 10], jnp.uint32),
    length=12,
    sequence_length=2,
    period=3,
    ignored=1,
)
SPECIAL = [0.0, -0.0, 1e-45, -1e-45, 1e-38, 2.0**-126, 0.3, 1.0, 3e38, np.inf, -np.inf, np.nan, -2]


def numbers(rng, rows):
    """Priorities, among them all kinds that are not legal."""
    return np.resize(rng.permutation([*SPECIAL, *rng.random(20)]), rows).astype(np.float32)


def words(rng, rows):
    return rng.integers(0, 2**32, rows, dtype=np.uint32)


def names(rng, rows, slots):
    index = np.resize(rng.permutation([-(2**31), -1, *range(slots + 2), 2**31 - 1]), rows)
    generation = np.uint32(rng.choice([0, 1, 2, 6, 7, 2**32 - 1, 2**32 - 2], rows))
    return Slots(index.astype(np.int32), generation)


def flags(rng, rows):
    return rng.random((2, rows)) < 0.7


def counters_of(rng, rings):
    held = rng.integers(0, 13, rings, dtype=np.uint32)
    cursor = rng.integers(0, 12, rings, dtype=np.uint32)
    return {"cursor": np.where(held < 12, held % 12, cursor), "held": held, "lap": held}


def stored_like(rows):
    shapes = {"b": (), "f": (), "i": (3,), "u": (2, 5), "c": (2,)}
    dtypes = {"b": "?", "f": "f4", "i": "i2", "u": "u1", "c": "c8"}
    return {
        name: (np.arange(rows * np.prod(shape, dtype=int)) % 7).astype(dtypes[name])
        .reshape(rows, *shape)
        for name, shape in shapes.items()
    }  # fmt: skip


def share_of(mass, total, uniform):
    return prioritized._clip_probability(over(mass, total), mass, total, uniform)


# The function, and its arguments for a number of rows.
ROWS = {
    "is_priority": lambda rng, n: (PRIORITIZED.accepts, numbers(rng, n)),
    "mass": lambda rng, n: (jaxbuf.Prioritized().mass, numbers(rng, n)),
    "mass of 1": lambda rng, n: (jaxbuf.Prioritized(alpha=1, epsilon=0.1).mass, numbers(rng, n)),
    "share": lambda rng, n: (share_of, np.abs(numbers(rng, n)), *np.float32([3e4, 0.1])),
    "no share": lambda rng, n: (share_of, np.zeros(n, "f4"), *np.float32([0, 0.1])),
    "or zero": lambda rng, n: (or_zero, numbers(rng, n), flags(rng, n)[0]),
    "scaled probabilities": lambda rng, n: (
        functools.partial(_ratios, relative=False), numbers(rng, n), flags(rng, n)[0],
        np.float32(1000),
    ),
    "relative probabilities": lambda rng, n: (
        functools.partial(_ratios, relative=True), rng.random(n, np.float32), flags(rng, n)[0],
        np.float32(1),
    ),
    "strata": lambda rng, n: (
        lambda word, total: points(word, None, total, stratified=True),
        words(rng, n),
        np.float32(3e-36),
    ),
    "points": lambda rng, n: (
        functools.partial(points, stratified=False), words(rng, n), words(rng, n), np.float32(1e30)
    ),
    "scaled": lambda rng, n: (scale_word, words(rng, n), np.uint32(2**31 - 1)),
    "each scaled": lambda rng, n: (scale_word, words(rng, n), words(rng, n) >> np.uint32(1)),
    "rows of a ring": lambda rng, n: (Ring.rows_to_change, RING, names(rng, n, 9), *flags(rng, n)),
    "slots of a ring": lambda rng, n: (
        functools.partial(Ring.slots_of, past_end=9), RING, names(rng, n, 9).index,
        rng.random(n) < 0.8,
    ),
    "rows of windows": lambda rng, n: (
        Rings.rows_to_change, WINDOWS, names(rng, n, 12), *flags(rng, n)
    ),
    "slots of windows": lambda rng, n: (
        functools.partial(Rings.slots_of, past_end=36), WINDOWS, names(rng, n, 12).index,
        rng.random(n) < 0.8,
    ),
    "append-ring": lambda rng, n: (lambda ring: ring.place(n, None, None), RING),
    "append-windows": lambda rng, n: (lambda rings: rings.place(n, None), WINDOWS),
    "append-steps": lambda rng, n: (lambda rings: rings.place(n, None), STEPS),
    "span": lambda rng, n: (Rings.span, WINDOWS.replace(**counters_of(rng, n))),
    "put": lambda rng, n: (
        lambda index, stored, rows: storage.write(stored, rows, index),
        rng.permutation(np.arange(-2, n - 2, dtype=np.int32)),
        stored_like(n - 3),
        jax.tree.map(lambda leaf: leaf + leaf.dtype.type(1), stored_like(n)),
    ),
    "items at": lambda rng, n: (
        lambda rank, first, count: AgeRange(first, count, 6).at(rank),
        np.resize(np.arange(-1, 13, dtype=np.int32), n),
        np.int32([5, 0, 2]),
        np.int32([6, 0, 5]),
    ),
}  # fmt: skip


# These differ from others in an option, or are of a ring where those are of rings.
REPEATED = {
    "mass of 1", "no share", "relative probabilities", "points", "scaled", "rows of a ring",
    "slots of a ring", "append-ring", "append-steps",
}  # fmt: skip


@pytest.mark.parametrize("name", operations.quick(ROWS, ROWS.keys() - REPEATED))
def test_rows_are_computed_bit_for_bit(name):
    rng = np.random.default_rng(1)
    for rows in (4, 70):
        function, *args = ROWS[name](rng, rows)
        args = jax.tree.map(jnp.asarray, args)
        found = both(function, *args)
    # Two lanes, of which only the first argument has its own, and then only the last one.
    for axis in (0, -1):
        lanes = [None] * len(args)
        lanes[axis] = 0
        stacked = [*args]
        stacked[axis] = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), args[axis])
        together = both(jax.vmap(function, lanes), *stacked)
        same(together, jax.tree.map(lambda leaf: np.stack([leaf, leaf]), found))
    if name == "each scaled":
        word, below = map(np.uint64, args)
        np.testing.assert_array_equal(found, word * below >> np.uint64(32))


def items():
    return jaxbuf.ItemBuffer.create(ITEM, 2**14, sampler=PRIORITIZED)


def windows(num_envs=4, **options):
    return jaxbuf.TrajectoryBuffer.create(
        ITEM, num_envs, 2**14 // num_envs, sequence_length=8, **options
    )


@pytest.mark.parametrize(
    ("make", "leading", "operation"),
    [
        (items, (1024,), lambda b, batch, *_: b.add(batch.data)),
        (items, (256,), lambda b, batch, *_: b.update_priority(batch.slots, batch.probability)),
        (items, (256,), lambda b, batch, key, beta: jaxbuf.importance_weights(b, batch, beta)),
        (items, (256,), lambda b, _, key, beta: b.sample(key, 256, beta=beta)),
        (items, (256,), lambda b, _, key, beta: b.sample(key, 256, beta=beta, normalize="buffer")),
        (lambda: windows(sampler=PRIORITIZED), (4, 256), lambda b, batch, *_: b.add(batch.data)),
        (lambda: windows(sampler=PRIORITIZED), (64,), lambda b, _, key, beta: b.sample(key, 64)),
        (lambda: windows(64), (256,), lambda b, _, key, beta: b.sample(key, 256)),
    ],
)
def test_small_calls_count_fewer_operations_than_xla_hands_to_another_thread(
    make, leading, operation
):
    # XLA:CPU runs a program in the thread that calls it if it counts fewer than 1,000.
    rows = jax.tree.map(lambda leaf: jnp.zeros((*leading, *leaf.shape)), ITEM)
    slots = Slots(jnp.zeros(leading, jnp.int32), jnp.zeros(leading, jnp.uint32))
    batch = jaxbuf.Sample(rows, slots, jnp.ones(leading), jnp.ones(leading, bool))
    with using_native(True), called_from_python(True):
        program = jax.jit(operation).lower(make(), batch, jax.random.key(0), 0.4).compile()
    assert program.cost_analysis().get("flops", 0) < 1000


@pytest.mark.parametrize("rows", [0, 1])
def test_searches_for_no_prefix_find_nothing(rows):
    tree, prefix = SegmentTree.create(20), jnp.zeros((rows,))
    index, value = both(SegmentTree.find, tree, prefix, prefix)
    assert index.shape == value.shape == (rows,)


def test_rows_and_runs_are_the_same():
    rng = np.random.default_rng(0)
    data = {
        "real": jnp.asarray(rng.random((6, 50, 3)), jnp.float32),
        "byte": jnp.arange(300, dtype=jnp.uint8).reshape(6, 50),
        "flag": jnp.asarray(rng.random((6, 50, 700)) < 0.5),
        "none": jnp.zeros((6, 50, 0)),
    }
    folded = jax.tree.map(lambda leaf: jax.lax.collapse(leaf, 0, 2), data)
    for rows in (1, 40):
        index = jnp.asarray(rng.integers(0, 310, rows), jnp.int32)
        start = jnp.minimum(index, 299)
        for length in (1, 5, 50):
            both(
                lambda data, start, length=length: storage.read_runs(data, start, length, 50),
                folded,
                start,
            )
        both(storage.read, folded, index)
        both(jax.vmap(storage.read, (0, None)), data, index % 50)
        both(jax.vmap(storage.read, (None, 0)), folded, index[:, None])


@pytest.mark.parametrize("natively", [False, True])
def test_gradients(natively):
    data, at = np.arange(2400, dtype=np.float32).reshape(12, 200), jnp.array([0, 11, 9])
    index = jnp.array([3, 9, 0, 1], jnp.int32)
    with using_native(natively), called_from_python(True):

        def slope(function, x):
            return jax.jit(jax.grad(lambda x: jnp.sum(function(x))))(x)

        found = [
            slope(lambda x: storage.read(x, at) ** 2, data),
            slope(lambda x: storage.read_runs(x, at, 3, 6) ** 2, data),
            slope(lambda rows: storage.write(jnp.zeros(5), rows, index), jnp.ones(4)),
            slope(jaxbuf.Prioritized(alpha=1.0).mass, jnp.array([0.3, 2.0, 0.0, 5.0])),
        ]
    read, runs = np.bincount([0, 11, 9]), np.bincount([0, 1, 2, 11, 6, 7, 9, 10, 11])
    expected = [2 * data * read[:, None], 2 * data * runs[:, None], [1, 0, 1, 1], [1, 1, 0, 1]]
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_program_compiled_with_the_kernels_is_not_used_without():
    traces = []

    @jax.jit
    def draw(buffer):
        traces.append(None)
        return buffer.sample(jax.random.key(0), 4).slots

    buffer = items()
    for enabled in (False, True, False, True):
        with using_native(enabled):
            draw(buffer)
    assert len(traces) == 2


def test_the_environment_turns_them_off():
    program = (
        "import jax, jax.numpy as jnp, jaxbuf; from jaxbuf.core.segment_tree import SegmentTree;"
        "assert jaxbuf.native_available();"
        "tree, leaf = SegmentTree.create(40), jnp.arange(4);"
        "print(jax.jit(tree.read).lower(leaf).as_text())"
    )
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAXBUF_NATIVE": "0"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert "stablehlo" in done.stdout
    assert "jaxbuf_read" not in done.stdout


LIBRARY_ELSEWHERE = """
import warnings
import jaxbuf.core.native as native
native.__path__[:] = [{folder!r}]
import jax, jax.numpy as jnp, jaxbuf
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    buffer = jaxbuf.ItemBuffer.create(jnp.float32(0), 100, sampler=jaxbuf.Prioritized())
    buffer = jaxbuf.add(buffer, jnp.arange(10.0))
    batch = jaxbuf.sample(buffer, jax.random.key(0), 4)
    buffer = jaxbuf.update_priority(buffer, batch.slots, jnp.ones(4))
    assert bool(batch.valid.all()) and not jaxbuf.native_available()
found = [str(each.message) for each in caught if "without its kernels" in str(each.message)]
assert len(found) == 1 and {expected!r} in found[0], found
"""


# A library of kernels for another version of XLA's interface.
NEWER = 'extern "C" int jaxbuf_ffi_version() { return 999; }\n' + "\n".join(
    f'extern "C" void* jaxbuf_{name}(void*) {{ return nullptr; }}' for name in native.KERNELS
)


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        pytest.param(NEWER, "were built for version 0.999", id="newer"),
        pytest.param("", "cannot be loaded", id="without kernels", marks=pytest.mark.slow),
    ],
)
def test_a_library_that_does_not_fit_is_left_out_and_jax_works(tmp_path, code, expected):
    source, library = tmp_path / "kernels.cc", tmp_path / "libjaxbuf.so"
    source.write_text(code)
    compiler = os.environ.get("CXX", "c++")
    subprocess.run([compiler, "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    program = LIBRARY_ELSEWHERE.format(folder=str(tmp_path), expected=expected)
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)

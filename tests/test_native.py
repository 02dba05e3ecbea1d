"""The kernels in C++: the same results as without them, on a CPU, and nothing if not asked for."""

import functools
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbuf
from jaxbuf.core import native, rowwise, storage, tree_kernels
from jaxbuf.core.tree_kernels import Layout
from tests.test_compiled import copies

EXAMPLE = {"obs": jnp.zeros(7), "reward": jnp.float32(0)}
PRIORITIZED = jaxbuf.Prioritized()


@pytest.fixture(autouse=True, scope="module")
def _built(tmp_path_factory):
    """Compiles them for this module alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        try:
            native._compiler()
        except RuntimeError as reason:
            pytest.skip(str(reason))
        jaxbuf.enable_native()
        jaxbuf.enable_native(False)
        yield


def same(one, other):
    jax.tree.map(np.testing.assert_array_equal, one, other)


@pytest.mark.parametrize("capacity", [1, 16, 257, 70_000])
@pytest.mark.parametrize("ops", [("sum", "max", "min_positive"), ("min",)])
def test_trees_agree_bit_for_bit_with_the_vector_form(capacity, ops):
    rng = np.random.default_rng(capacity)
    layout, trees = Layout(capacity, ops), 2
    leaves = jnp.asarray(rng.random((trees, capacity)) * (rng.random((trees, capacity)) < 0.7))
    nodes = jax.vmap(functools.partial(tree_kernels.build, layout))(leaves.astype(jnp.float32))
    forms = [
        (jax.jit(functools.partial(getattr(tree_kernels, f"_{name}_{form}"), *static)))
        for name, static in (
            ("set", (layout,)),
            ("read", (layout,)),
            ("find", (layout, False)),
            ("find", (layout, True)),
        )
        for form in ("vector", "native")
    ]
    # 1,500 rows of two trees are enough to be shared between threads.
    for rows in (1, 33, 1500):
        index = jnp.asarray(rng.integers(-1, capacity + 2, (trees, rows)), jnp.int32)
        value = jnp.maximum(jnp.asarray(rng.random((trees, rows)) - 0.2, jnp.float32), 0.0)
        value = jnp.where(value > 0.7, jnp.finfo(jnp.float32).tiny, value)
        before = np.asarray(nodes)
        result = forms[0](nodes, index, value)
        same(forms[1](nodes, index, value), result)
        np.testing.assert_array_equal(nodes, before)
        nodes, roots, _ = result
        same(forms[3](nodes, index), forms[2](nodes, index))
        if "sum" in ops:
            prefix = jnp.asarray(rng.random((trees, rows)), jnp.float32) * roots[:, :1]
            refine = prefix * jnp.float32(2.0**-20)
            same(forms[5](nodes, prefix, refine), forms[4](nodes, prefix, refine))
            same(forms[7](nodes, prefix, refine), forms[6](nodes, prefix, refine))


def hostile_trees(layout, rng):
    """Trees that no sequence of calls makes, but an empty buffer or a damaged file may."""
    leaves = jnp.asarray(rng.random((1, layout.capacity)), jnp.float32)
    built = np.asarray(jax.vmap(functools.partial(tree_kernels.build, layout))(leaves))
    size = (1, layout.size)
    special = np.asarray([0.0, 1.0, -1.0, 1e-38, 3e38, np.inf, -np.inf, np.nan], np.float32)
    return {
        "zeros": np.zeros(size, np.float32),
        "sums of zeros": np.where(np.arange(layout.size) < layout.capacity, 0, built),
        "zeros under sums": np.where(np.arange(layout.size) < layout.capacity, built, 0),
        "random": rng.random(size).astype(np.float32),
        "sparse": (rng.random(size) * (rng.random(size) < 0.05)).astype(np.float32),
        "negative": -built,
        "special": rng.choice(special, size),
    }


@pytest.mark.parametrize("capacity", [1, 15, 17, 255, 257, 4097, 70_001])
def test_every_search_ends_in_the_tree_whatever_it_holds(capacity):
    rng = np.random.default_rng(capacity)
    layout, rows = Layout(capacity, ("sum", "max", "min_positive")), 66
    total = np.float32(capacity)
    special = [0.0, -0.0, total, 2 * total, -1.0, 1e-45, 1e-38, 3e38, np.inf, -np.inf, np.nan]
    prefix = np.concatenate([special, total * rng.random(rows - len(special))]).astype(np.float32)
    refine = rng.permutation(prefix)
    for refined in (False, True):
        vector, compiled = (
            jax.jit(functools.partial(form, layout, refined))
            for form in (tree_kernels._find_vector, tree_kernels._find_native)
        )
        for name, nodes in hostile_trees(layout, rng).items():
            wanted = vector(nodes, prefix[None], refine[None])
            found = compiled(nodes, prefix[None], refine[None])
            assert ((wanted >= 0) & (wanted < capacity)).all(), name
            np.testing.assert_array_equal(found, wanted, name)


@pytest.mark.parametrize("rows", [0, 1])
def test_searches_for_no_prefix_find_nothing(rows):
    layout = Layout(20, ("sum",))
    nodes, prefix = jnp.zeros((1, layout.size)), jnp.zeros((1, rows))
    with native.using_native():
        assert jax.jit(functools.partial(tree_kernels._find_native, layout, True))(
            nodes, prefix, prefix
        ).shape == (1, rows)


EMPTY = {
    "prioritized": lambda n: jaxbuf.ItemBuffer.create(
        jnp.int32(0), n, sampler=jaxbuf.Prioritized()
    ),
    "softmax": lambda n: jaxbuf.ItemBuffer.create(jnp.int32(0), n, sampler=jaxbuf.Softmax()),
    "windows": lambda n: jaxbuf.TrajectoryBuffer.create(
        jnp.int32(0), 1, n, sequence_length=2, sampler=jaxbuf.Prioritized()
    ),
}


@pytest.mark.parametrize("capacity", [3, 4099, 1_200_007])
@pytest.mark.parametrize("name", list(EMPTY))
def test_an_empty_buffer_gives_no_rows(name, capacity):
    with native.using_native():
        batch = jaxbuf.sample(EMPTY[name](capacity), jax.random.key(0), 40)
    assert not batch.valid.any()
    assert (batch.slots.index == capacity).all()


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
        ring, start = index // 50, index % 50
        for length in (1, 5, 50):
            read = functools.partial(storage.read_runs, data, ring, start, length)
            without = read()
            with native.using_native(), rowwise.alone():
                assert "jaxbuf_take" in jax.jit(read).lower().as_text()
                same(read(), without)
        without = storage.read(folded, index)
        with native.using_native(), rowwise.alone():
            same(jax.jit(storage.read)(folded, index), without)
            lanes = jax.vmap(storage.read, (0, None))(data, start)
        same(lanes, jax.vmap(storage.read, (0, None))(data, start))


@pytest.mark.parametrize("runs", [False, True])
def test_gradients_are_the_same(runs):
    data = {"x": jnp.arange(2400.0).reshape(2, 6, 200), "n": jnp.arange(12).reshape(2, 6)}
    ring, start = jnp.array([0, 1, 1]), jnp.array([0, 5, 3])

    def loss(x):
        leaves = data | {"x": x}
        if runs:
            rows = storage.read_runs(leaves, ring, start, 3)
        else:
            rows = storage.read(jax.tree.map(lambda leaf: leaf[0], leaves), start)
        return jnp.sum(rows["x"] ** 2)

    wanted = jax.grad(loss)(data["x"])
    with native.using_native(), rowwise.alone():
        assert "jaxbuf_take" in jax.jit(loss).lower(data["x"]).as_text()
        same(jax.jit(jax.grad(loss))(data["x"]), wanted)


BUFFERS = {
    "items": lambda: jaxbuf.ItemBuffer.create(EXAMPLE, 500, sampler=PRIORITIZED),
    "items without replacement": lambda: jaxbuf.ItemBuffer.create(
        EXAMPLE, 500, sampler=jaxbuf.Prioritized(replacement=False)
    ),
    "softmax": lambda: jaxbuf.ItemBuffer.create(
        EXAMPLE, 500, sampler=jaxbuf.Softmax(), evictor=jaxbuf.Lowest()
    ),
}


@pytest.mark.parametrize("name", list(BUFFERS))
def test_a_buffer_does_the_same(name):
    rng = np.random.default_rng(1)
    buffers = [BUFFERS[name](), BUFFERS[name]()]
    for step in range(12):
        rows = (3, 64, 300)[step % 3]
        items = {
            "obs": jnp.asarray(rng.random((rows, 7)), jnp.float32),
            "reward": jnp.asarray(rng.random(rows), jnp.float32),
        }
        scores = {"score": items["reward"]} if name == "softmax" else {}
        samples = []
        for which, enabled in enumerate((False, True)):
            with native.using_native(enabled):
                buffers[which] = jaxbuf.add(buffers[which], items, **scores)
                sample = jaxbuf.sample(buffers[which], jax.random.key(step), 40)
                if not scores:
                    priority = sample.data["reward"] + 0.1
                    buffers[which] = jaxbuf.update_priority(buffers[which], sample.slots, priority)
                samples.append(sample)
        # The probabilities of a softmax are exponentials, which XLA may fuse one way or another.
        same((samples[0].data, samples[0].slots), (samples[1].data, samples[1].slots))
        np.testing.assert_allclose(samples[0].probability, samples[1].probability, rtol=1e-6)
        same(buffers[0], buffers[1])


def test_windows_do_the_same():
    buffers = [
        jaxbuf.TrajectoryBuffer.create(EXAMPLE, 4, 64, sequence_length=5, sampler=PRIORITIZED)
        for _ in range(2)
    ]
    for step in range(6):
        steps = {"obs": jnp.full((4, 30, 7), step, jnp.float32), "reward": jnp.ones((4, 30))}
        for which, enabled in enumerate((False, True)):
            with native.using_native(enabled):
                buffers[which] = jaxbuf.add(buffers[which], steps)
                sample = jaxbuf.sample(buffers[which], jax.random.key(step), 16)
                buffers[which] = jaxbuf.update_priority(
                    buffers[which], sample.slots, sample.data["obs"][:, 0, 0]
                )
        same(buffers[0], buffers[1])


@pytest.mark.parametrize("seeds", [None, 3])
def test_a_scan_does_the_same_and_copies_nothing(seeds):
    buffer = jaxbuf.ItemBuffer.create(EXAMPLE, 2**14, sampler=PRIORITIZED)
    keys = jax.random.split(jax.random.key(0), 5)

    def step(buffer, key):
        buffer = buffer.add({"obs": jnp.ones((64, 7)), "reward": jnp.ones(64)})
        sample = buffer.sample(key, 256)
        priority = (sample.slots.index % 7).astype(jnp.float32)
        return buffer.update_priority(sample.slots, priority), sample.slots.index

    if seeds:
        buffer = jax.tree.map(lambda leaf: jnp.stack([leaf] * seeds), buffer)
        keys = jax.random.split(jax.random.key(0), (5, seeds))
        step = jax.vmap(step)

    def program(buffer, keys):
        return jax.lax.scan(step, buffer, keys)

    without = jax.jit(program)(buffer, keys)
    with native.using_native():
        text = jax.jit(program).lower(buffer, keys).as_text()
        assert "jaxbuf_set_leaves" in text
        assert "jaxbuf_find" in text
        assert not copies(program, buffer, keys)
        same(jax.jit(program)(buffer, keys), without)


def test_what_was_compiled_before_is_compiled_anew():
    traces = []

    @jax.jit
    def total(buffer):
        traces.append(None)
        return buffer.sample(jax.random.key(0), 4).slots

    buffer = BUFFERS["items"]()
    for enabled in (False, True, False, True):
        jaxbuf.enable_native(enabled)
        total(buffer)
        assert native.in_use() == enabled
    jaxbuf.enable_native(False)
    assert len(traces) == 2


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_other_backends_go_on_as_they_do(platform):
    buffer = BUFFERS["items"]()
    with native.using_native(), rowwise.alone():
        traced = jax.jit(lambda b: b.sample(jax.random.key(0), 4)).trace(buffer)
        text = traced.lower(lowering_platforms=(platform,)).as_text()
    assert "jaxbuf_" not in text


def failing(tmp_path, **environment):
    """What a new process says that cannot compile the kernels."""
    done = subprocess.run(
        [sys.executable, "-c", "import jaxbuf; jaxbuf.enable_native()"],
        env={"JAX_PLATFORMS": "cpu", "XDG_CACHE_HOME": str(tmp_path), **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    return done.stderr.splitlines()


def test_without_a_compiler_it_says_what_to_do(tmp_path):
    told = failing(tmp_path, PATH=str(tmp_path))
    assert told[-1] == (
        "RuntimeError: there is no C++ compiler for jaxbuf's kernels; go on without them, or "
        "install one (on Debian and Ubuntu: apt install g++) or name it in CXX"
    )


def test_a_compiler_that_fails_is_named(tmp_path):
    broken = tmp_path / "bin" / "broken"
    broken.parent.mkdir()
    broken.symlink_to("/bin/false")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CXX", str(broken))
        patch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        with pytest.raises(RuntimeError, match="broken could not compile jaxbuf's kernels"):
            native._build()
    assert not list((tmp_path / "cache").rglob("*.so"))

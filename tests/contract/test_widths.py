"""Wide segment trees, as accelerators have them, beside narrow ones: the same draws, on a CPU."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbuf
from jaxbuf import testing
from jaxbuf.core import segment_tree
from jaxbuf.core.segment_tree import NARROW, WIDE, SegmentTree, using_width
from tests import operations

ITEM = {"id": jnp.int32(0), "x": jnp.zeros(2)}
# More than two blocks of 128, so that wide trees have two levels as well.
SLOTS, ROWS, BATCH = 300, 340, 64


def items(**options):
    return lambda slots: jaxbuf.ItemBuffer.create(ITEM, slots, **options)


def windows(**options):
    return lambda slots: jaxbuf.TrajectoryBuffer.create(
        ITEM, 2, slots // 2, sequence_length=2, **options
    )


def sharded(slots):
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    make = items(sampler=jaxbuf.Prioritized(1.0))
    return jaxbuf.Sharded.create(lambda: make(slots // 2), mesh, "data", shards=2)


DISTINCT = jaxbuf.Prioritized(1.0, uniform_mix=0.25, replacement=False)
BUFFERS = {
    "distinct": items(sampler=DISTINCT),
    "softmax": items(sampler=jaxbuf.Softmax(), evictor=jaxbuf.Lowest()),
    "ranked": items(sampler=jaxbuf.RankBased()),
    "stale": items(sampler=jaxbuf.Staleness(replacement=False)),
    "windows": windows(sampler=jaxbuf.Prioritized(1.0)),
    "sharded": sharded,
}
# Buffers that are saved, and the size with which they are loaded.
SAVED = (("softmax", 2 * SLOTS), ("sharded", SLOTS))


@jax.jit
def fill(buffer):
    """Adds rows, twice to some slots, with priorities or scores whose sums are exact."""
    leading = (2, ROWS // 2) if isinstance(buffer, jaxbuf.TrajectoryBuffer) else (ROWS,)
    number = jnp.arange(ROWS, dtype=jnp.int32).reshape(leading)
    rows = {"id": number, "x": jnp.ones((*leading, 2))}
    weight = ((number * 7) % 5).astype(jnp.float32)
    return buffer.add(rows, score=weight) if "scores" in buffer.abilities else buffer.add(rows)


@jax.jit
def step(buffer, key):
    """Draws, changes what was drawn, and draws again."""
    first = buffer.sample(key, BATCH)
    row = jnp.arange(BATCH, dtype=jnp.int32)
    new = ((row * 3) % 4).astype(jnp.float32)
    if "scores" in buffer.abilities:
        buffer = buffer.update_score(first.slots, new)
    elif "priorities" in buffer.abilities:
        buffer = buffer.update_priority(first.slots, new)
    second = buffer.sample(jax.random.fold_in(key, 1), BATCH)
    weights = jaxbuf.importance_weights(buffer, second, 0.5, normalize="buffer")
    return buffer, (first, second, weights)


def run(buffer):
    return step(buffer, jax.random.key(3))


def trees(buffer):
    """The segment trees in a buffer."""
    nodes = jax.tree.leaves(buffer, is_leaf=lambda node: isinstance(node, SegmentTree))
    return [node for node in nodes if isinstance(node, SegmentTree)]


def assert_close(one, other, rtol=1e-6):
    """Integers are equal, and floats to an ulp or two: sums are added in another order."""
    chex.assert_trees_all_close(one, other, rtol=rtol, atol=0)


@pytest.mark.parametrize("name", operations.quick(BUFFERS, {"windows"}))
def test_wide_trees_draw_what_narrow_ones_do(name):
    ends = {}
    for width in (NARROW, WIDE):
        with using_width(width):
            buffer, seen = run(fill(BUFFERS[name](SLOTS)))
            assert {tree.width for tree in trees(buffer)} <= {width}
            ends[width] = [tree.leaves for tree in trees(buffer)], seen
            if width == WIDE:
                testing.assert_valid(buffer)
    # The masses of a softmax are not exact, and a CPU adds the 128 of a wide block one by one.
    assert_close(ends[WIDE], ends[NARROW], rtol=3e-6 if name == "softmax" else 1e-6)


@pytest.mark.parametrize(
    ("widths", "name", "size"),
    operations.quick(
        [(widths, *saved) for widths in ((NARROW, WIDE), (WIDE, NARROW)) for saved in SAVED],
        [(widths, *SAVED[0]) for widths in ((NARROW, WIDE), (WIDE, NARROW))],
    ),
)
def test_a_checkpoint_is_loaded_on_another_platform(tmp_path, name, widths, size):
    with using_width(widths[0]):
        buffer = fill(BUFFERS[name](SLOTS))
        jaxbuf.save(tmp_path, buffer)
    with using_width(widths[1]):
        like = BUFFERS[name](size)
        loaded = jaxbuf.load(tmp_path, like, resize=size > SLOTS)
    assert jax.tree.structure(loaded) == jax.tree.structure(like)
    assert {tree.width for tree in trees(loaded)} == {widths[1]}
    testing.assert_valid(loaded)
    assert int(loaded.size) == int(buffer.size)
    if size == SLOTS:
        assert_close(run(loaded)[1], run(buffer)[1])


def test_the_width_follows_the_platform(monkeypatch):
    with using_width(0):
        assert SegmentTree.create(3).width == NARROW
        assert SegmentTree.create(3, width=WIDE).clear().width == WIDE
        monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
        assert jax.eval_shape(lambda: SegmentTree.create(3)).width == WIDE
        with jax.default_device(jax.devices("cpu")[0]):
            assert SegmentTree.create(4).width == NARROW
        # A program creates trees for the device that it runs on, here that of the buffer.
        buffer = jaxbuf.ItemBuffer.create(ITEM, 8, sampler=jaxbuf.Staleness()).add(
            {"id": np.arange(8, dtype=np.int32), "x": np.ones((8, 2), np.float32)}
        )
        made = []
        create = segment_tree._empty_nodes
        monkeypatch.setattr(
            segment_tree, "_empty_nodes", lambda *given: made.append(given[2]) or create(*given)
        )
        jaxbuf.sample(buffer, jax.random.key(0), 2)
        assert made == [NARROW]

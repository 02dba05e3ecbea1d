"""Leaves without elements: an item may have them, and no state of a buffer has one."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

import jaxbuf
import jaxbuf.interop.flashbax as fbx
from tests import operations

KEY = jax.random.key(0)
STEP = {"reward": jnp.float32(0), "terminated": jnp.bool_(False)}
ITEM = {**STEP, "empty": jnp.zeros((0, 3)), "deep": jnp.zeros((2, 0), jnp.int8)}


def rows(*shape):
    return jax.tree.map(lambda leaf: jnp.zeros((*shape, *leaf.shape), leaf.dtype), ITEM)


def test_no_state_has_an_empty_leaf():
    for name in operations.BUFFERS:
        assert all(leaf.size for leaf in jax.tree.leaves(operations.empty(name))), name


def test_orbax_saves_rings_with_episodes(tmp_path):
    ocp = pytest.importorskip("orbax.checkpoint")
    rings = jaxbuf.TrajectoryBuffer.create(STEP, 2, 8, episodes=jaxbuf.Episodes())
    checkpointer = ocp.StandardCheckpointer()
    checkpointer.save(tmp_path / "saved", rings)
    checkpointer.wait_until_finished()


def test_steps_with_empty_leaves_are_stored_and_accumulated():
    buffer = jaxbuf.TrajectoryBuffer.create(ITEM, 2, 8, sequence_length=3).add(rows(2, 6))
    assert buffer.sample(KEY, 4).data["empty"].shape == (4, 3, 0, 3)
    accumulator = jaxbuf.EpisodeAccumulator.create(ITEM, 2, max_length=4)
    steps = {**rows(2), "terminated": jnp.ones(2, bool)}
    _, episodes, done = accumulator.add(steps)
    assert done.all()
    assert episodes.steps["deep"].shape[1:] == (4, 2, 0)


def test_an_empty_leaf_of_an_item_is_not_forgotten(tmp_path):
    jaxbuf.save(tmp_path, {"returns": jnp.zeros((2, 0)), "x": jnp.ones(1)})
    with pytest.raises(ValueError, match=r"like\['returns'\] is missing"):
        jaxbuf.load(tmp_path, {"x": jnp.ones(1)})


def test_items_with_empty_leaves_are_sharded_without_exchange():
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    make = lambda: jaxbuf.ItemBuffer.create(ITEM, 8)  # noqa: E731
    buffer = jaxbuf.Sharded.create(make, mesh, "d", shards=2, exchange=False)
    batch = jaxbuf.sample(jaxbuf.add(buffer, rows(8)), KEY, 4)
    assert (batch.data["empty"].shape, batch.data["deep"].shape) == ((4, 0, 3), (4, 2, 0))


def test_steps_with_empty_leaves_are_stacked():
    window = rows(4, 3)
    assert jaxbuf.stack_frames(window, 2, field="empty").frames.shape == (4, 3, 0, 3, 2)
    assert jaxbuf.stack_frames(window, 2, field="deep", axis=0).frames.shape == (4, 3, 2, 2, 0)


def test_the_flashbax_layer_takes_empty_leaves():
    buffer = fbx.make_item_buffer(8, 1, 2, add_sequences=True, add_batches=True)
    state = buffer.add(buffer.init(ITEM), rows(2, 2))
    assert buffer.sample(state, KEY).experience["empty"].shape == (2, 0, 3)


_DEVICES = """
import jax, jax.numpy as jnp, numpy as np, jaxbuf
from jaxbuf import testing

explicit = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,))
auto = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
small = {}
for dtype in ("int4", "int2", "uint2", "float4_e2m1fn", "float8_e4m3fn", "bool"):
    least = -2 if dtype.startswith("int") else 0
    small[dtype] = jnp.array([least, 0, 1, least, 0, 1, 1, least], jnp.float32).astype(dtype)
rows = {
    "small": small,
    "key": jax.random.split(jax.random.key(0), 8),
    "empty": jnp.zeros((8, 0, 3)),
    "at": jnp.arange(8),
}
item = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), rows)
make = lambda: jaxbuf.ItemBuffer.create(item, 8, sampler=jaxbuf.Prioritized())


for mesh in (auto, explicit):
    buffer = jaxbuf.add(jaxbuf.Sharded.create(make, mesh, "d", shards=4), rows)
    batch = jaxbuf.sample(buffer, jax.random.key(0), 16)
    at = np.asarray(batch.data["at"])
    for dtype, drawn in batch.data["small"].items():
        drawn = np.asarray(drawn)
        assert (drawn == np.asarray(small[dtype])[at]).all(), (dtype, drawn)
    keys = (jax.random.key_data(x) for x in (batch.data["key"], rows["key"]))
    assert (np.asarray(next(keys)) == np.asarray(next(keys))[at]).all()
    testing.assert_valid(buffer)
    testing.assert_holds(buffer, rows)
    wrong = {"key": rows["key"][::-1]}, {"small": small | {"int4": jnp.roll(small["int4"], 1)}}
    for changed in wrong:
        try:
            testing.assert_holds(buffer, rows | changed)
        except AssertionError as error:
            assert "missing" in str(error)
        else:
            raise SystemExit("a wrong item was not noticed")
    if mesh is explicit:
        with jax.set_mesh(mesh):
            testing.assert_valid(buffer)
            testing.assert_holds(buffer, rows)
"""


@pytest.mark.slow
def test_small_numbers_keys_and_empty_leaves_on_two_devices():
    code = f"import jax; jax.config.update('jax_num_cpu_devices', 2)\n{_DEVICES}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]

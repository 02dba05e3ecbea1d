"""Programs that enable 64-bit types: buffers hold them, and their own books stay as they are."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbuf
from tests.operations import quick

STEP = {"obs": np.zeros(3), "reward": np.float64(0), "terminated": np.bool_(False)}


@pytest.fixture(autouse=True)
def enabled():
    with jax.enable_x64(True):
        yield


def rows(*leading):
    def ramp(leaf):
        shape = (*leading, *leaf.shape)
        return np.arange(np.prod(shape)).reshape(shape).astype(leaf.dtype)

    return jax.tree.map(ramp, STEP)


def check(batch):
    assert batch.data["obs"].dtype == jnp.float64
    assert batch.slots.index.dtype == jnp.int32
    assert batch.probability.dtype == jnp.float32
    assert batch.valid.all()


@pytest.mark.parametrize(
    "sampler",
    [jaxbuf.Prioritized(replacement=False, uniform_mix=0.1), jaxbuf.Recent(ratio=0.5, steps=4)],
)
def test_items(sampler):
    buffer = jaxbuf.ItemBuffer.create(STEP, 20, sampler=sampler)
    buffer = jaxbuf.add(buffer, rows(32))
    batch = jaxbuf.sample(buffer, jax.random.key(0), 8)
    check(batch)
    assert jaxbuf.importance_weights(buffer, batch, 0.4).dtype == jnp.float32
    if sampler.uses_priority:
        buffer = jaxbuf.update_priority(buffer, batch.slots, np.arange(8.0))
    assert buffer.size == 20


def test_windows_and_episodes():
    options = {"sequence_length": 4, "sampler": jaxbuf.Prioritized()}
    options["episodes"] = jaxbuf.Episodes(record_return=True, boundary="mask")
    steps = rows(2, 25) | {"terminated": np.arange(50).reshape(2, 25) % 7 == 6}
    buffer = jaxbuf.add(jaxbuf.TrajectoryBuffer.create(STEP, 2, 20, **options), steps)
    batch = jaxbuf.sample(buffer, jax.random.key(0), 8)
    check(batch)
    targets = jaxbuf.n_step(batch.data, 2, 0.9)
    assert targets.reward.dtype == jnp.float64
    chex.assert_shape(jaxbuf.stack_frames(batch.data, 3).frames, (8, 4, 3, 3))
    buffer = jaxbuf.update_priority(buffer, batch.slots, np.ones(8))
    assert buffer.episode(jnp.int32(0), jnp.int32(6)).value == 6


def test_groups_and_accumulators():
    item = {"group": np.int64(0), "value": np.float64(0)}
    buffer = jaxbuf.ItemBuffer.create(item, 10)
    buffer = jaxbuf.add(buffer, {"group": np.arange(6) % 2, "value": np.arange(6.0)})
    groups = jaxbuf.sample_groups(buffer, jax.random.key(0), 2, num_groups=2, size=3)
    assert groups.valid.all()
    accumulator = jaxbuf.EpisodeAccumulator.create(STEP, 2, max_length=5)
    steps = rows(2) | {"terminated": np.array([True, False])}
    accumulator, episodes, done = accumulator.add(steps)
    assert done.tolist() == [True, False]
    assert episodes.steps["obs"].dtype == jnp.float64


@pytest.mark.parametrize("strategy", quick(["future", "final", "random"], {"future"}))
def test_hindsight(strategy):
    episodes, t = np.arange(24.0).reshape(4, 6), np.full(4, 2, np.int32)
    batch = {"achieved": episodes[:, 2], "goal": np.zeros(4), "reward": np.zeros(4)}
    options = {"goal": "goal", "achieved": "achieved", "strategy": strategy, "fraction": 1.0}
    options["reward_fn"] = lambda achieved, goal: -jnp.abs(achieved - goal)
    key = jax.random.key(0)
    batch, relabeled = jaxbuf.hindsight(key, batch, episodes, t, 3 * t, **options)
    assert batch["goal"].dtype == batch["reward"].dtype == jnp.float64
    assert relabeled.all()


@pytest.mark.parametrize(
    ("within_batch", "options"),
    [
        ("suppress", {"evictor": jaxbuf.Lowest(), "sampler": jaxbuf.Softmax()}),
        pytest.param("greedy", {"freshness": jaxbuf.Freshness(max_use=2)}, marks=pytest.mark.slow),
    ],
)
def test_scores_and_diversity(within_batch, options):
    diversity = jaxbuf.Diversity(1.0, field="obs", within_batch=within_batch)
    buffer = jaxbuf.ItemBuffer.create(STEP, 8, diversity=diversity, **options)
    for _ in range(2):
        buffer = buffer.add(rows(8), score=np.arange(8.0))
    check(jaxbuf.sample(buffer, jax.random.key(0), 4))
    assert sorted(buffer.data["reward"].tolist()) == list(range(8))


@pytest.mark.parametrize(
    ("dtype", "asarray"),
    quick(
        [(np.int8, np.asarray), (np.int64, np.asarray), (np.uint64, jnp.asarray)],
        [(np.int8, np.asarray), (np.int64, np.asarray)],
    ),
)
def test_integers_of_any_width(dtype, asarray):
    freshness = jaxbuf.Freshness(max_staleness=4)
    ids = asarray(np.arange(4, dtype=dtype))
    buffer = jaxbuf.ItemBuffer.create({"group": np.int64(0)}, 8, freshness=freshness)
    buffer = buffer.add({"group": np.arange(4)}, version=ids)
    buffer = jaxbuf.add(buffer, {"group": np.arange(4)}, version=ids)
    buffer = buffer.set_version(ids[3], session=ids[0])
    assert buffer.staleness(buffer.latest(4).slots).tolist() == [3, 2, 1, 0]
    assert buffer.can_sample(ids[3])
    groups = jaxbuf.sample_groups(buffer, jax.random.key(0), ids[:2], num_groups=4, size=3)
    assert groups.valid.sum(axis=1).tolist() == [2, 2]
    accumulator = jaxbuf.ChunkAccumulator.create(np.float64(0), 4, 1)
    accumulator, chunks, done = accumulator.add(np.arange(4.0), ids, ids, version=ids)
    assert chunks.version[done].tolist() == [0, 1, 2, 3]
    windows = jaxbuf.TrajectoryBuffer.create(np.float64(0), 4, 8, freshness=freshness)
    windows = windows.add(np.arange(4.0), version=ids).clear(ids[:1])
    assert windows.can_sample(ids[3])
    assert not windows.can_sample(jnp.int64(4))
    # Numbers of JAX that do not fit are seen here alone.
    for call, name in (
        (lambda large: buffer.add({"group": np.arange(4)}, version=large), r"version\[0\]"),
        (lambda large: buffer.set_version(large[0]), "version"),
        (lambda large: accumulator.add(np.arange(4.0), ids, large), r"number\[0\]"),
    ):
        with pytest.raises(ValueError, match=f"{name} is 1099511627776; expected an integer from"):
            call(jnp.arange(4) + 2**40)


@pytest.mark.parametrize("dtype", ["float32", "int32", "bool"])
@pytest.mark.parametrize("array", [np.zeros, jnp.zeros])
def test_numbers_of_fewer_bits_are_refused(dtype, array):
    buffer, items = jaxbuf.ItemBuffer.create(np.float64(0), 4), array(3, dtype)
    for add in (jaxbuf.add, jax.jit(lambda buffer, _: buffer.add(items))):
        with pytest.raises(ValueError, match=f"items has dtype {dtype}; expected float64"):
            add(buffer, items)


def test_changes_of_64_bit_fields():
    item = {"a": np.float64(0), "n": np.int64(0)}
    options = {"sampler": jaxbuf.Softmax(), "evictor": jaxbuf.Lowest()}
    buffer = jaxbuf.ItemBuffer.create(item, 5, parts=(jaxbuf.Removable(),), **options)
    rows = {"a": np.arange(4.0), "n": np.arange(4)}
    buffer, slots = jaxbuf.insert(buffer, rows, score=np.arange(4.0))
    buffer = jaxbuf.set_field(buffer, "n", slots, 2**40 + np.arange(4))
    buffer = jaxbuf.map_field(buffer, "a", lambda items: items["a"] / 3, batch_size=2)
    buffer = jaxbuf.update_score(buffer, slots, np.array([3.0, np.nan, 1.0, 0.0]))
    buffer = jaxbuf.remove(buffer, slots, mask=np.arange(4) == 0)
    assert int(buffer.metrics()["rejected"]) == 1
    jaxbuf.testing.assert_valid(buffer)
    assert (slots.index.dtype, slots.generation.dtype) == (jnp.int32, jnp.uint32)
    # Slots of 64 bits are the same.
    slots = jax.tree.map(lambda leaf: leaf.astype(jnp.int64), slots)
    batch = buffer.get(slots)
    assert batch.valid.tolist() == [False, True, True, True]
    assert (batch.data["n"][1:] - 2**40).tolist() == [1, 2, 3]
    assert batch.data["a"][1:].tolist() == [1 / 3, 2 / 3, 1.0]
    score = jnp.array([9.0, 8.0, 7.0, 6.0])
    buffer = jax.jit(lambda buffer: buffer.update_score(slots, score))(buffer)
    assert (buffer.highest(3).data["n"] - 2**40).tolist() == [1, 2, 3]

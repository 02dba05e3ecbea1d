"""Code that takes any buffer, and meets one inside of a wrapper."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbuf
from jaxbuf import testing
from tests.operations import quick
from tests.wrappers.test_operations import a_sharded, members

KEY = jax.random.key(0)
STEP = {"obs": jnp.zeros(3), "reward": jnp.float32(0), "terminated": jnp.bool_(False)}
ENVS = 4


def rows(*shape):
    number = jnp.arange(np.prod(shape), dtype=jnp.float32).reshape(shape)
    return {
        "obs": jnp.stack([number] * 3, axis=-1),
        "reward": number,
        "terminated": number % 3 == 2,
    }


def items(capacity=16):
    return jaxbuf.ItemBuffer.create(STEP, capacity)


def rings(envs=ENVS):
    return jaxbuf.TrajectoryBuffer.create(STEP, envs, 8, sequence_length=2)


ITEMS = {
    "plain": items,
    "hosted": lambda: jaxbuf.Hosted.create(items),
    "sharded": lambda: a_sharded(lambda: items(8)),
}
RINGS = {
    "plain": rings,
    "hosted": lambda: jaxbuf.Hosted.create(rings),
    "sharded": lambda: a_sharded(lambda: rings(ENVS // 2)),
}


def flat(steps):
    return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), steps)


@pytest.mark.parametrize(
    ("kind", "rows_at_a_time"),
    quick(
        [("plain", ENVS), ("hosted", 3), ("sharded", 3), ("sharded", 4096)],
        [("plain", ENVS), ("sharded", 3)],
    ),
)
def test_a_store_is_loaded_into_rings(tmp_path, kind, rows_at_a_time):
    steps = rows(6, ENVS)
    example = jax.tree.map(lambda leaf: leaf[0], steps)
    with jaxbuf.Store(tmp_path, example) as store:
        store.append(steps)
        buffer = store.load_into(RINGS[kind](), rows_at_a_time=rows_at_a_time)
        testing.assert_holds(buffer, flat(steps))
        batch = jaxbuf.sample(buffer, KEY, 8)
        # A window holds two steps of one environment, which are one row of the store apart.
        assert (batch.data["reward"][:, 1] - batch.data["reward"][:, 0]).tolist() == [ENVS] * 8
        before = store.read(slice(None))
        assert list(store.append_buffer(buffer)) == list(range(6, 12))
        again = store.read(np.arange(6, 12))
        jax.tree.map(np.testing.assert_array_equal, before, again)


@pytest.mark.parametrize("kind", ITEMS)
def test_a_store_is_loaded_into_items(tmp_path, kind):
    with jaxbuf.Store(tmp_path, STEP) as store:
        store.append(rows(7))
        buffer = store.load_into(ITEMS[kind](), rows_at_a_time=5)
        testing.assert_holds(buffer, rows(7))
        added = store.append_buffer(buffer)
        assert sorted(store.read(added)["reward"].tolist()) == list(range(7))


def test_a_mixture_has_no_order(tmp_path):
    mixture = jaxbuf.Mixture.create([items(), items()], [1, 1])
    with jaxbuf.Store(tmp_path, STEP) as store:
        store.append(rows(3))
        with pytest.raises(ValueError, match="is a Mixture; load into one of its parts"):
            store.load_into(mixture)
        with pytest.raises(ValueError, match="is a Mixture, whose items have no order"):
            store.append_buffer(mixture)
        with pytest.raises(ValueError, match="expected a buffer"):
            store.append_buffer(rows(3))
    with pytest.raises(ValueError, match="keeps no items of its own"):
        jaxbuf.from_minari([Episode(0, 3)], mixture)


class Episode:
    def __init__(self, first, count):
        number = np.arange(first, first + count + 1, dtype=np.float32)
        self.observations = np.stack([number] * 3, axis=-1)
        self.actions = np.zeros(count, np.int32)
        self.rewards = number[:-1].astype(np.float64)
        self.terminations = np.arange(count) == count - 1
        self.truncations = np.zeros(count, bool)


@pytest.mark.parametrize(
    "make", [*ITEMS.values(), *RINGS.values()], ids=[*ITEMS, *(f"{x} rings" for x in RINGS)]
)
def test_minari_meets_wrappers(make):
    buffer = jaxbuf.from_minari([Episode(0, 3), Episode(10, 4)], make(), rows_at_a_time=5)
    held = jnp.array([0.0, 1.0, 2.0, 10.0, 11.0, 12.0, 13.0])
    ends = jnp.isin(held, jnp.array([2.0, 13.0]))
    wanted = {"obs": jnp.stack([held] * 3, axis=-1), "reward": held, "terminated": ends}
    testing.assert_holds(buffer, wanted)
    testing.assert_valid(buffer)


def test_wrappers_that_cannot_be_parts_say_so():
    hosted = jaxbuf.Hosted.create(items)
    with pytest.raises(ValueError, match=r"buffers\[1\] is a Hosted.*Hosted.create\(lambda"):
        jaxbuf.Mixture.create([items(), hosted], [1, 1])
    with pytest.raises(ValueError, match=r"buffers\[0\] is a Sharded.*join the batches"):
        jaxbuf.Mixture.create([a_sharded(items), items()], [1, 1])
    with pytest.raises(ValueError, match=r"make returns a Sharded.*on one CPU device"):
        jaxbuf.Hosted.create(lambda: a_sharded(items))


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_assertions_look_into_shards(kind):
    buffer = jaxbuf.add(a_sharded(items, getattr(jax.sharding.AxisType, kind)), rows(6))
    testing.assert_valid(buffer)
    testing.assert_holds(buffer, rows(6))
    with pytest.raises(AssertionError, match="not expected"):
        testing.assert_holds(buffer, rows(5))


def with_episodes(envs):
    return jaxbuf.TrajectoryBuffer.create(
        STEP | {"truncated": jnp.bool_(False)}, envs, 8, sequence_length=2, episodes=EPISODES
    )


EPISODES = jaxbuf.Episodes()
OPEN = {**rows(ENVS, 4), "truncated": jnp.zeros((ENVS, 4), bool)}
# The newest step of each environment is open; the first two of one have ended.
OPEN["terminated"] = jnp.zeros((ENVS, 4), bool).at[1, 1].set(True)


def mixed():
    """The environments 0 and 1, a part without episodes, and the environments 2 and 3."""
    halves = [with_episodes(ENVS // 2) for _ in range(2)]
    step = STEP | {"truncated": jnp.bool_(False)}
    item = jax.tree.map(lambda leaf: jnp.stack([leaf] * 2), step)
    return jaxbuf.Mixture.create([halves[0], jaxbuf.ItemBuffer.create(item, 4), halves[1]], [1] * 3)


@functools.cache
def filled(kind):
    """A buffer with four open episodes."""
    if kind == "sharded":
        return a_sharded(lambda: with_episodes(ENVS // 2)).add(OPEN)
    buffer = mixed()
    for part, half in ((0, slice(0, 2)), (2, slice(2, 4))):
        buffer = buffer.add(jax.tree.map(lambda leaf, half=half: leaf[half], OPEN), part=part)
    return buffer


def state(buffer):
    """The flags that are set and the sizes, by environment."""
    parts = [part for part in members(buffer) if part.num_envs]
    truncated = np.concatenate([np.asarray(part.data["truncated"]) for part in parts])
    truncated = truncated.reshape(-1, parts[0].length)
    held = np.concatenate([np.asarray(part.rings.held) for part in parts])
    return np.argwhere(truncated).tolist(), held.tolist()


ENVS_GIVEN = [
    (None, [0, 1, 2, 3]),
    (jnp.array([2, 1, 9, -1]), [1, 2]),
    (np.array([False, False, False, True]), [3]),
]


@pytest.mark.parametrize("kind", ["sharded", "mixture"])
@pytest.mark.parametrize(("envs", "which"), ENVS_GIVEN)
def test_episodes_end_and_environments_are_cleared_wherever_they_are(kind, envs, which):
    buffer = filled(kind)
    ended = jaxbuf.end_episodes(buffer, envs, donate=False)
    assert state(ended) == ([[env, 3] for env in which], [4] * ENVS)
    dropped, cleared = jax.jit(lambda b: (b.drop_newest_episode(envs), b.clear(envs)))(buffer)
    left = [4 if env not in which else 2 if env == 1 else 0 for env in range(ENVS)]
    assert state(dropped) == ([], left)
    assert state(cleared)[1] == [0 if env in which else 4 for env in range(ENVS)]


@pytest.mark.parametrize("method", ["end_episodes", "drop_newest_episode"])
def test_wrappers_without_episodes_say_so(method):
    for buffer in (a_sharded(lambda: rings(2)), jaxbuf.Mixture.create([rings()], [1])):
        with pytest.raises(ValueError, match=f"{method} was called, but .*Episodes"):
            getattr(buffer, method)()
    with pytest.raises(ValueError, match=f"{method} was called, but .*TrajectoryBuffer"):
        getattr(a_sharded(lambda: items(8)), method)()
    for buffer in (mixed(), a_sharded(lambda: with_episodes(2))):
        with pytest.raises(
            ValueError, match=r"envs has shape \(3,\); expected \(4,\), which is \(num_envs,\)"
        ):
            getattr(buffer, method)(jnp.ones(3, bool))


def test_a_hosted_buffer_is_changed_and_read_by_functions():
    hosted, plain = jaxbuf.Hosted.create(rings), rings()
    hosted, plain = jaxbuf.add(hosted, rows(ENVS, 4)), jaxbuf.add(plain, rows(ENVS, 4))
    hosted, steps = hosted.apply(lambda buffer, n: jaxbuf.dequeue(buffer, n), 2)
    plain, expected = jaxbuf.dequeue(plain, 2)
    chex.assert_trees_all_equal((hosted.buffer, steps), (plain, expected))
    slots = jaxbuf.sample(hosted, KEY, 4).slots
    found = hosted.read(lambda buffer, slots: buffer.locate(slots), slots)
    chex.assert_trees_all_equal(found, plain.locate(slots))

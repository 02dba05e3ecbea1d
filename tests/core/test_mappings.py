"""Trees of equal names in mappings of other kinds and orders meet by name, not by position."""

import collections
import tempfile
import types

import flax.core
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

import jaxbuf
import jaxbuf.testing
from jaxbuf.core import trees
from jaxbuf.io.store import Store

ORDERED = collections.OrderedDict
EXAMPLE = {"obs": {"a": jnp.float32(0), "z": jnp.float32(0)}, "reward": jnp.float32(0)}
KINDS = {
    "ordered": lambda d: ORDERED(reversed(d.items())),
    "default": lambda d: collections.defaultdict(list, d),
    "frozen": flax.core.freeze,
    "dict": dict,
}


def rows(make, count=3):
    """Rows whose number says which field they belong to."""
    t = np.arange(count, dtype=np.float32)
    return make({"obs": make({"a": 10 + t, "z": 20 + t}), "reward": 30 + t})


def check(data):
    for value, first in ((data["obs"]["a"], 10), (data["obs"]["z"], 20), (data["reward"], 30)):
        np.testing.assert_array_equal(np.ravel(value), first + np.arange(3))


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize(("turned", "how"), [(False, "function"), (False, "jit"), (True, "method")])
def test_items_are_stored_by_name(make, turned, how):
    example, items = EXAMPLE, rows(make)
    if turned:
        example, items = make({**EXAMPLE, "obs": make(EXAMPLE["obs"])}), rows(dict)
    add = {
        "method": lambda buffer, x: buffer.add(x),
        "function": jaxbuf.add,
        "jit": jax.jit(lambda buffer, x: buffer.add(x)),
    }[how]
    buffer = add(jaxbuf.ItemBuffer.create(example, 3), items)
    check(buffer.data)
    assert jax.tree.structure(buffer.data) == jax.tree.structure(example)
    check(add(jaxbuf.Queue.create(example, 3), items).data)
    steps = jax.tree.map(lambda x: x[None], items)
    rings = add(jaxbuf.TrajectoryBuffer.create(example, 1, 3), steps)
    check(rings.data)
    jaxbuf.testing.assert_holds(buffer, rows(make))
    accumulator = jaxbuf.EpisodeAccumulator.create(
        {**EXAMPLE, "terminated": jnp.bool_(False)}, 1, 3
    )
    last = make({**steps, "terminated": np.arange(3)[None] == 2})
    check(accumulator.add(last)[1].steps)


def test_leading_axes_and_python_numbers_are_those_of_the_same_leaf():
    """The first leaf of an ordered dict has more axes than the first one of the example."""
    example = {"a": jnp.int8(0), "z": jnp.zeros((4, 2), jnp.int32)}
    rings = jaxbuf.TrajectoryBuffer.create(example, 2, 3)
    rings = jaxbuf.add(rings, ORDERED(z=jnp.full((2, 4, 2), 1000), a=jnp.full(2, 5)))
    assert (int(rings.size), int(rings.data["z"].max())) == (2, 1000)


def test_other_names_are_named():
    buffer = jaxbuf.ItemBuffer.create(EXAMPLE, 3)
    other = ORDERED(obs=ORDERED(z=jnp.ones(1), b=jnp.ones(1)), reward=jnp.ones(1))
    with pytest.raises(ValueError, match=r"\['obs'\]\['a'\] is missing; .*\['b'\] is not in"):
        buffer.add(other)


class Step(struct.PyTreeNode):
    obs: jax.Array
    reward: jax.Array


class Turned(struct.PyTreeNode):
    reward: jax.Array
    obs: jax.Array


def test_fields_of_another_name_are_refused(tmp_path):
    """Although jax, since a version after 0.8.0, finds the two structures equal."""
    number = jnp.float32(0)
    buffer = jaxbuf.ItemBuffer.create(Step(number, number), 4)
    turned = Turned(obs=jnp.ones(2), reward=jnp.zeros(2))
    for add in (buffer.add, jax.jit(lambda items: buffer.add(items))):
        with pytest.raises(ValueError, match=r"CustomNode\(Turned.*; the example is .*Step"):
            add(turned)
    other = jaxbuf.ItemBuffer.create(Turned(number, number), 4)
    with pytest.raises(ValueError, match=r"samples of buffers\[1\] have another structure"):
        jaxbuf.Mixture.create([buffer, other], [1, 1])
    with (
        Store(tmp_path / "s", Step(number, number)) as store,
        pytest.raises(ValueError, match=r"items is .*Turned.*; the example is .*Step"),
    ):
        store.append(turned)


def test_a_store_keeps_names(tmp_path):
    with Store(tmp_path / "s", EXAMPLE) as store:
        store.append(rows(KINDS["ordered"]))
        check(store.read(slice(None)))
    example = KINDS["ordered"]({**EXAMPLE, "obs": KINDS["ordered"](EXAMPLE["obs"])})
    with Store(tmp_path / "s", example) as store:
        check(store.read(slice(None)))
        assert list(store.read([0])["obs"]) == ["z", "a"]


def test_a_checkpoint_keeps_names():
    numbers = np.arange(3, dtype=np.float32)
    saved = ORDERED(z=20 + numbers, a=10 + numbers)
    with tempfile.TemporaryDirectory() as folder:
        jaxbuf.save(folder, saved)
        loaded = jaxbuf.load(folder, like={"a": numbers, "z": numbers})
    assert (loaded["a"][0], loaded["z"][0]) == (10, 20)


@pytest.mark.parametrize("turned", [False, True])
def test_hindsight_takes_goals_by_name(turned):
    def goals(first, swap):
        a, z = first + jnp.arange(2.0), first + 10 + jnp.arange(2.0)
        return ORDERED(z=z, a=a) if swap else {"a": a, "z": z}

    batch = {
        "achieved_goal": goals(0, turned),
        "goal": goals(50, not turned),
        "reward": jnp.zeros(2),
    }
    achieved = jax.tree.map(lambda x: x[:, None], goals(100, turned))
    batch, relabeled = jaxbuf.hindsight(
        jax.random.key(0), batch, achieved, jnp.zeros(2, jnp.int32), strategy="final", fraction=1.0,
        reward_fn=lambda achieved, goal: goal["a"],
    )  # fmt: skip
    assert relabeled.all()
    assert batch["goal"]["a"].tolist() == batch["reward"].tolist() == [100, 101]
    assert batch["goal"]["z"].tolist() == [110, 111]


def test_minari_observations_are_read_by_name():
    t = np.arange(4, dtype=np.float32)
    episode = types.SimpleNamespace(
        observations=ORDERED(z=20 + t, a=10 + t),
        actions=np.zeros(3, np.int32),
        rewards=30 + t[:3],
        terminations=t[:3] == 2,
        truncations=np.zeros(3, bool),
    )
    buffer = jaxbuf.from_minari([episode], jaxbuf.ItemBuffer.create(EXAMPLE, 3))
    check(buffer.data)


def test_only_mappings_are_matched():
    assert trees.match({"a": 1}, {"b": 2}) == {"b": 2}
    assert trees.match((1, 2), [3, 4]) == [3, 4]
    assert trees.match([{"a": 1, "z": 2}], [ORDERED(z=4, a=3)]) == [{"a": 3, "z": 4}]

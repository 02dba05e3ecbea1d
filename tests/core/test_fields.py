"""Fields are named as JAX's key paths name them, whatever containers and keys lead to them."""

import collections
import dataclasses
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx, struct
from flax.core import FrozenDict

import jaxbuf
from jaxbuf.core import fields


class Named(NamedTuple):
    obs: Any
    count: Any = None


class Node(struct.PyTreeNode):
    obs: Any
    limit: Any = None
    name: str = struct.field(pytree_node=False, default="x")


@chex.dataclass
class Chex:
    a: Any
    b: Any


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass
class Keyless:
    a: Any
    b: Any

    def tree_flatten(self):
        return (self.a, self.b), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


def numbers(*counts):
    return [jnp.full(2, i) for i in range(*counts)]


X, Y, Z = numbers(3)
TREES = {
    "dict": {"a": {"b": X, "c": None}, "d": {}, "e": Y},
    "flat": {"a.b": X, "a.c": Y, "b": {"c.d": Z}},
    "both": {"a.b": X, "a": {"b": Y, "c": Z}},
    "crossed": {"a.b": {"c": X}, "a": {"b.c": Y}},
    "empty": {"a": {"b": None}, "a.b": X, "": Y},
    "numbers": {0: X, 1: {2: Y}},
    "ordered": collections.OrderedDict(z=X, a={"k": Y}),
    "default": collections.defaultdict(list, z=X, a=[Y, None, (Z,)]),
    "frozen": FrozenDict({"a": {"b": X}, "c": Y}),
    "tuple": (X, [Y, (Z,)], None),
    "named": Named(obs={"x": X}, count=None),
    "named count": Named(obs=X, count=Y),
    "flax": Node(obs=Named(X, {"a.b": Y}), limit=Z),
    "chex": Chex(a=X, b={"b": Y}),
    "keyless": Keyless(a=X, b=Keyless(Y, Z)),
    "nnx": nnx.State({"layer": {"kernel": nnx.Param(X)}, "bias": nnx.Param(Y)}),
    "array": X,
}


def all_fields(tree):
    """The key paths by name of all that have leaves, from the paths of the leaves alone."""
    found = collections.defaultdict(set)
    for path, _ in jax.tree_util.tree_leaves_with_path(tree):
        for stop in range(1, len(path) + 1):
            name = jax.tree_util.keystr(path[:stop], simple=True, separator=".")
            found[name].add(jax.tree_util.keystr(path[:stop]))
    return found


def within(tree, path):
    """The leaves at, or below, a key path."""
    return [
        leaf
        for at, leaf in jax.tree_util.tree_leaves_with_path(tree)
        if any(jax.tree_util.keystr(at[:stop]) == path for stop in range(len(at) + 1))
    ]


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
def test_every_name_means_the_one_field_that_has_it(tree):
    known = all_fields(tree)
    for name, paths in known.items():
        if len(paths) > 1:
            with pytest.raises(ValueError, match=r"could be .* or .*; rename"):
                fields.find(tree, name)
            continue
        [path] = paths
        found = fields.find(tree, name)
        assert [*map(id, jax.tree.leaves(found))] == [*map(id, within(tree, path))]
        changed = fields.replace(tree, name, jax.tree.map(lambda x: x + 10, found))
        assert jax.tree.structure(changed) == jax.tree.structure(tree)
        inside = set(map(id, within(tree, path)))
        expected = jax.tree.map(lambda x: x + 10 if id(x) in inside else x, tree)  # noqa: B023
        chex.assert_trees_all_equal(changed, expected)
    for name in ("count", "index", "replace", "T", "items", "a.T", "c", "", "nothing", "a.b.c.d"):
        if name not in known:
            assert fields.find(tree, name) is None
            with pytest.raises(ValueError, match=r"no such field; (there are|an array)"):
                fields.need(tree, name, "path", "it has")


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
def test_fields_overlap_if_they_share_a_leaf(tree):
    single = [name for name, paths in all_fields(tree).items() if len(paths) == 1]
    leaves = {name: set(map(id, jax.tree.leaves(fields.find(tree, name)))) for name in single}
    for a in single:
        assert fields.overlap(tree, None, a)
        assert fields.overlap(tree, a, None)
        for b in single:
            assert fields.overlap(tree, a, b) == bool(leaves[a] & leaves[b])


STEPS, LAST = 6, np.arange(6) % 3 == 2
# Where the reward, the end, the cut and the observation of a step are, and the container of them.
LAYOUTS = {
    "flat": (dict, ("next.reward", "next.terminated", "next.truncated", "obs.state")),
    "integers": (lambda d: dict(enumerate(d.values())), ("0", "1", "2", "3")),
    "flat within": (
        lambda d: {"step": FrozenDict(d), "id": jnp.zeros_like(d["r.x"], jnp.int32)},
        ("step.r.x", "step.e.terminated", "step.e.truncated", "step.obs"),
    ),
}


@pytest.mark.parametrize(
    ("make", "names"),
    [
        pytest.param(*layout, id=name, marks=[pytest.mark.slow] * (name != "flat"))
        for name, layout in LAYOUTS.items()
    ],
)
def test_operations_take_the_names(make, names):
    """Steps in any container, of which all operations find what a plain dict would give them."""
    reward, terminated, truncated, obs = names
    keys = [name.removeprefix("step.") for name in names]
    t = jnp.arange(STEPS, dtype=jnp.float32)
    cuts = jnp.zeros((1, STEPS), bool).at[0, 4].set(True)
    steps = make(dict(zip(keys, (t[None] + 1, LAST[None], cuts, t[None] * 10), strict=True)))
    # Without "truncated" beside "terminated" in their names, the cuts must be named.
    given = {"truncated": truncated} if truncated.isdigit() else {}
    example = jax.tree.map(lambda x: jnp.asarray(x)[0, 0], steps)
    episodes = jaxbuf.Episodes(terminated=terminated, reward=reward, record_return=True, **given)
    rings = jaxbuf.TrajectoryBuffer.create(
        example, 1, STEPS, sequence_length=STEPS, episodes=episodes
    ).add(steps)
    at = jnp.zeros(STEPS, jnp.int32), jnp.arange(STEPS)
    assert rings.episode(*at).is_last.tolist() == [False, False, True, False, True, True]
    np.testing.assert_array_equal(rings.get_field(obs, *at), t * 10)
    batch = rings.sample(jax.random.key(0), 1)
    ends = {"terminated": terminated, **given}
    target = jaxbuf.n_step(batch.data, 2, 1.0, reward=reward, **ends)
    assert target.reward.tolist() == [[3, 5, 3, 9]]
    assert jaxbuf.stack_frames(batch.data, 2, obs, **ends).frames[0, :, 0].tolist() == [
        *(0, 0, 10, 30, 30, 50),
    ]
    goals, _ = jaxbuf.hindsight(
        jax.random.key(0),
        batch.data,
        t[None] + 7,
        jnp.array([0]),
        jnp.array([6]),
        strategy="final",
        fraction=1.0,
        achieved=reward,
        goal=obs,
        reward=reward,
        reward_fn=lambda achieved, goal: goal - achieved,
    )
    assert fields.find(goals, obs).tolist() == [[12.0] * 6]
    assert fields.find(goals, reward).tolist() == [[11, 10, 9, 8, 7, 6]]
    accumulator = jaxbuf.EpisodeAccumulator.create(example, 1, 8, per_add=3, waiting=3, **ends)
    assert accumulator.add(steps)[1].length.tolist() == [3, 2, 1]
    changed = rings.set_field(obs, batch.slots, -t[None])
    np.testing.assert_array_equal(changed.get_field(obs, *at), -t)
    mapped = jaxbuf.map_field(changed, obs, lambda x: fields.find(x, obs) * 2)
    np.testing.assert_array_equal(mapped.get_field(obs, *at), -2 * t)
    for name in (terminated, truncated, reward):
        with pytest.raises(ValueError, match="but episodes"):
            mapped.set_field(name, batch.slots, fields.find(batch.data, name))
    ended = mapped.end_episodes()
    np.testing.assert_array_equal(fields.find(ended.data, truncated), np.ravel(cuts))
    items = jaxbuf.ItemBuffer.create(
        example, 8, diversity=jaxbuf.Diversity(cutoff=5.0, field=(obs,))
    )
    row = jax.tree.map(lambda x: jnp.asarray(x)[0], steps)
    items = items.add(row, score=t)
    slots = items.latest(6).slots
    # All are near now, also to the filter, which refuses one more.
    items = items.set_field(obs, slots, jnp.zeros(6))
    again = fields.replace(jax.tree.map(lambda x: x[:1], row), obs, jnp.ones(1))
    assert items.add(again, score=t[:1]).size == 6


def test_a_name_for_two_fields_is_refused():
    item = {"a.b": jnp.float32(0), "a": {"b": jnp.float32(0), "c": jnp.float32(0)}}
    buffer = jaxbuf.ItemBuffer.create(item, 4)
    buffer = buffer.add(jax.tree.map(lambda x: jnp.ones(2), item))
    slots = buffer.latest(2).slots
    for use in (
        lambda: buffer.set_field("a.b", slots, jnp.zeros(2)),
        lambda: jaxbuf.set_field(buffer, "a.b", slots, jnp.zeros(2), donate=False),
        lambda: jaxbuf.map_field(buffer, "a.b", lambda x: x["a.b"]),
        lambda: jaxbuf.diverse_reward_prioritized(item, 4, cutoff=0.1, field="a.b"),
        lambda: jaxbuf.n_step(jax.tree.map(lambda x: jnp.ones((1, 2)), item), 1, 1.0, reward="a.b"),
    ):
        with pytest.raises(ValueError, match=r"'a.b' could be \['a'\]\['b'\] or \['a.b'\]; rename"):
            use()
    changed = buffer.set_field("a", slots, {"b": jnp.zeros(2), "c": jnp.zeros(2)})
    assert changed.data["a.b"].tolist() == [1, 1, 0, 0] != changed.data["a"]["b"].tolist()

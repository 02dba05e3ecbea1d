"""Operations on no rows at all change nothing, and return nothing."""

import chex
import jax
import jax.numpy as jnp
import pytest

import jaxbuf
from tests import operations

KEY = jax.random.key(0)
EXAMPLE = {"obs": jnp.zeros(2), "action": jnp.int32(0)}
# Operations whose rows are as many as those of items, steps or slots that they are given.
BY_ROWS = (
    "add", "add_to_some", "insert", "update_priority", "update_score", "set_field", "remove",
    "mark_used", "staleness", "importance_weights", "get",
)  # fmt: skip
NAMES = operations.ONE_OF_EACH | {"blend", "recent", "queue", "mixture"}
CASES = [case for case in operations.CASES if case[0] in NAMES and case[1] in BY_ROWS]


def items(count):
    return {"obs": jnp.ones((count, 2)), "action": jnp.ones(count, jnp.int32)}


def none(sample):
    return jax.tree.map(lambda leaf: leaf[:0], sample)


@pytest.mark.parametrize(("name", "what"), operations.pairs(CASES))
def test_of_a_buffer(name, what, monkeypatch):
    buffer, sample = operations.concrete(name)
    monkeypatch.setattr(operations, "ROWS", 0)
    monkeypatch.setattr(operations, "BATCH", 0)
    out = operations.OPERATIONS[what][1](buffer, none(sample), jnp.float32(1), KEY)
    for one in jax.tree.leaves(out, is_leaf=lambda node: isinstance(node, type(buffer))):
        if isinstance(one, type(buffer)):
            chex.assert_trees_all_equal(one, buffer)
        else:
            assert one.shape[0] == 0


def sharded(make, exchange=True):
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    return jaxbuf.Sharded.create(make, mesh, "data", shards=2, exchange=exchange)


@pytest.mark.parametrize("exchange", operations.quick([True, False], {True}))
def test_of_a_sharded_buffer(exchange):
    parts = {"freshness": jaxbuf.Freshness(max_use=2), "parts": (jaxbuf.Removable(),)}
    make = lambda: jaxbuf.ItemBuffer.create(  # noqa: E731
        EXAMPLE, 8, sampler=jaxbuf.Prioritized(), **parts
    )
    buffer = sharded(make, exchange).add(items(6))
    slots = none(buffer.sample(KEY, 4).slots)
    for changed in (
        buffer.update_priority(slots, jnp.zeros(0)),
        buffer.set_field("action", slots, jnp.zeros(0, jnp.int32)),
        buffer.mark_used(slots),
        buffer.remove(slots),
    ):
        chex.assert_trees_all_equal(changed, buffer)
    found = buffer.use_count(slots), buffer.holds(slots), buffer.get(slots)
    chex.assert_tree_shape_prefix(found, (0,))


def test_no_shard_keeps_the_largest_priority_of_another():
    buffer = sharded(lambda: jaxbuf.ItemBuffer.create(EXAMPLE, 8, sampler=jaxbuf.Prioritized()))
    buffer = buffer.add(items(4), priority=jnp.array([9.0, 1.0, 1.0, 1.0]))
    after, slots = buffer.insert(items(0))
    chex.assert_trees_all_equal((after, buffer.add(items(0))), (buffer, buffer))
    chex.assert_shape(slots.index, (0,))
    with pytest.raises(ValueError, match=r"^items\['action'\] has dtype float32"):
        buffer.add({**items(0), "action": jnp.zeros(0)})
    rings = sharded(
        lambda: jaxbuf.TrajectoryBuffer.create(jnp.float32(0), 1, 8, sampler=jaxbuf.Prioritized())
    )
    rings = rings.add(jnp.ones((2, 4)), priority=jnp.array([[9.0] * 4, [1.0] * 4]))
    chex.assert_trees_all_equal(rings.add(jnp.ones((2, 0))), rings)


def test_a_mask_is_checked_without_rows():
    options = {"sampler": jaxbuf.Prioritized(), "freshness": jaxbuf.Freshness(max_use=1)}
    buffer = jaxbuf.ItemBuffer.create(EXAMPLE, 8, evictor=jaxbuf.Lowest(), **options)
    slots = none(buffer.sample(KEY, 4).slots)
    for method, *given in (
        ("update_priority", slots, jnp.zeros(0)),
        ("update_score", slots, jnp.zeros(0)),
        ("set_field", "action", slots, jnp.zeros(0, jnp.int32)),
        ("mark_used", slots),
        ("remove", slots),
    ):
        message = r"^mask has shape \(2,\); expected \(0,\), which is that"
        with pytest.raises(ValueError, match=message):
            getattr(buffer, method)(*given, mask=jnp.ones(2, bool))


@pytest.mark.parametrize("strategy", ["future", "final", "episode", "random"])
def test_of_hindsight(strategy):
    nothing = jnp.zeros(0, jnp.int32)
    batch = {"achieved": jnp.zeros(0), "goal": jnp.zeros(0), "reward": jnp.zeros(0)}
    batch, relabeled = jaxbuf.hindsight(
        KEY,
        batch,
        jnp.zeros((0, 6)),
        nothing,
        nothing,
        goal="goal",
        achieved="achieved",
        strategy=strategy,
        reward_fn=lambda achieved, goal: -jnp.abs(achieved - goal),
    )
    chex.assert_shape([relabeled, batch["reward"]], (0,))

"""Operations on no rows at all change nothing, and return nothing."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbuf

KEY = jax.random.key(0)
EXAMPLE = {"obs": jnp.zeros(2), "action": jnp.int32(0)}


def items(count):
    return {"obs": jnp.ones((count, 2)), "action": jnp.ones(count, jnp.int32)}


def create(**options):
    freshness = jaxbuf.Freshness(max_use=1)
    buffer = jaxbuf.ItemBuffer.create(EXAMPLE, 8, freshness=freshness, **options)
    return buffer.add(items(6))


def none(sample):
    return jax.tree.map(lambda leaf: leaf[:0], sample)


SAMPLERS = [
    jaxbuf.Uniform(),
    jaxbuf.Prioritized(replacement=False),
    jaxbuf.Blend((jaxbuf.Recent(0.5, 3, jaxbuf.Prioritized()), jaxbuf.Uniform()), (0.5, 0.5)),
]


@pytest.mark.parametrize("sampler", SAMPLERS, ids=str)
def test_of_a_sample(sampler):
    buffer = create(sampler=sampler)
    sample = none(buffer.sample(KEY, 4))
    slots = sample.slots
    chex.assert_trees_all_equal(buffer.mark_used(slots), buffer)
    chex.assert_shape([buffer.use_count(slots), buffer.staleness(slots)], (0,))
    chex.assert_shape(jaxbuf.importance_weights(buffer, sample, 0.4), (0,))
    if sampler.uses_priority:
        chex.assert_trees_all_equal(buffer.update_priority(slots, jnp.zeros(0)), buffer)
        again = jaxbuf.update_priority(buffer, slots, np.zeros(0), donate=False)
        chex.assert_trees_all_equal(again, buffer)


@pytest.mark.parametrize("sampler", SAMPLERS, ids=str)
def test_of_windows(sampler):
    freshness = jaxbuf.Freshness(max_use=1)
    buffer = jaxbuf.TrajectoryBuffer.create(
        jnp.float32(0), 2, 8, sequence_length=2, sampler=sampler, freshness=freshness
    ).add(jnp.ones((2, 5)))
    slots = none(buffer.sample(KEY, 4).slots)
    chex.assert_trees_all_equal(buffer.mark_used(slots), buffer)
    chex.assert_trees_all_equal(buffer.add(jnp.ones((2, 0))), buffer)
    chex.assert_shape(buffer.locate(slots), (0,))
    if sampler.uses_priority:
        chex.assert_trees_all_equal(buffer.update_priority(slots, jnp.zeros(0)), buffer)


def test_of_added_items():
    buffer = create()
    chex.assert_trees_all_equal(buffer.add(items(0)), buffer)
    chex.assert_trees_all_equal(buffer.add(items(0), mask=np.zeros(0, bool)), buffer)
    chex.assert_trees_all_equal(jaxbuf.add(buffer, items(0), donate=False), buffer)


def sharded(make, exchange=True):
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    return jaxbuf.Sharded.create(make, mesh, "data", shards=2, exchange=exchange)


@pytest.mark.parametrize("exchange", [True, False])
def test_of_a_sharded_buffer(exchange):
    def make():
        return jaxbuf.ItemBuffer.create(
            EXAMPLE,
            8,
            sampler=jaxbuf.Prioritized(),
            freshness=jaxbuf.Freshness(max_use=2),
            parts=(jaxbuf.Removable(),),
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
    chex.assert_shape(buffer.use_count(slots), (0,))
    chex.assert_shape(buffer.holds(slots), (0,))
    chex.assert_tree_shape_prefix(buffer.get(slots), (0,))
    assert buffer.get(slots).data["obs"].shape == (0, 2)


def test_no_shard_keeps_the_largest_priority_of_another():
    buffer = sharded(lambda: jaxbuf.ItemBuffer.create(EXAMPLE, 8, sampler=jaxbuf.Prioritized()))
    buffer = buffer.add(items(4), priority=jnp.array([9.0, 1.0, 1.0, 1.0]))
    chex.assert_trees_all_equal(buffer.add(items(0)), buffer)
    after, slots = buffer.insert(items(0))
    chex.assert_trees_all_equal(after, buffer)
    chex.assert_shape(slots.index, (0,))
    with pytest.raises(ValueError, match=r"^items\['action'\] has dtype float32"):
        buffer.add({**items(0), "action": jnp.zeros(0)})


def test_no_shard_of_rings_keeps_the_largest_priority_of_another():
    buffer = sharded(
        lambda: jaxbuf.TrajectoryBuffer.create(jnp.float32(0), 1, 8, sampler=jaxbuf.Prioritized())
    )
    buffer = buffer.add(jnp.ones((2, 4)), priority=jnp.array([[9.0] * 4, [1.0] * 4]))
    chex.assert_trees_all_equal(buffer.add(jnp.ones((2, 0))), buffer)


@pytest.mark.parametrize("method", ["update_priority", "update_score", "mark_used", "remove"])
def test_a_mask_is_checked_without_rows(method):
    sampler = jaxbuf.RankBased(by="score") if method == "update_score" else jaxbuf.Prioritized()
    buffer = jaxbuf.ItemBuffer.create(
        EXAMPLE, 8, sampler=sampler, freshness=jaxbuf.Freshness(max_use=1)
    )
    slots = none(buffer.sample(KEY, 4).slots)
    values = {"update_priority": (jnp.zeros(0),), "update_score": (jnp.zeros(0),)}.get(method, ())
    with pytest.raises(ValueError, match=r"^mask has shape \(2,\); expected \(0,\), which is that"):
        getattr(buffer, method)(slots, *values, mask=jnp.ones(2, bool))


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

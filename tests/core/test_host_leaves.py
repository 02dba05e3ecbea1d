"""Buffers of NumPy arrays, such as ``jax.device_get`` returns, work as those of jax arrays."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbuf

KEY = jax.random.key(0)
STEP = {"obs": jnp.zeros(2), "reward": jnp.float32(0), "terminated": jnp.bool_(False)}


def rows(*leading):
    count = np.prod(leading, dtype=int)
    return {
        "obs": jnp.arange(2.0 * count).reshape(*leading, 2),
        "reward": jnp.arange(1.0 * count).reshape(leading),
        "terminated": jnp.arange(count).reshape(leading) % 3 == 2,
    }


def items(**options):
    return jaxbuf.ItemBuffer.create(STEP, 6, **options)


def trajectories(**options):
    return jaxbuf.TrajectoryBuffer.create(STEP, 2, 6, sequence_length=2, **options)


def scored(buffer, count):
    return buffer.add(rows(count), score=jnp.arange(1.0 * count))


ITEMS = {
    "add": lambda b: b.add(rows(3)),
    "jaxbuf.add": lambda b: jaxbuf.add(b, rows(3), donate=False),
    "sample": lambda b: b.sample(KEY, 4),
    "sample_range": lambda b: b.sample_range(KEY, 3, -3),
    "latest": lambda b: b.latest(3),
    "can_sample": lambda b: b.can_sample(3),
    "metrics": lambda b: b.metrics(),
    "clear": lambda b: b.clear(),
}
PRIORITIES = {
    "update_priority": lambda b: b.update_priority(b.sample(KEY, 4).slots, jnp.arange(4.0)),
    "importance_weights": lambda b: jaxbuf.importance_weights(b, b.sample(KEY, 4), 0.4),
}
FRESHNESS = {
    "clear": lambda b: b.clear(),
    "metrics": lambda b: b.metrics(),
    "mark_used": lambda b: b.mark_used(b.sample(KEY, 4).slots),
    "set_version": lambda b: b.set_version(3),
    "use_count": lambda b: b.use_count(b.sample(KEY, 4).slots),
    "staleness": lambda b: b.staleness(b.sample(KEY, 4).slots),
}
SCORES = {
    "add": lambda b: scored(b, 3),
    "sample": lambda b: b.sample(KEY, 4),
    "metrics": lambda b: b.metrics(),
}
STEPS = {
    **ITEMS,
    "add": lambda b: b.add(rows(2, 3)),
    "jaxbuf.add": lambda b: jaxbuf.add(b, rows(2, 3), donate=False),
    "clear of some": lambda b: b.clear(jnp.array([True, False])),
    "dequeue": lambda b: b.dequeue(2),
    "gather_all": lambda b: b.gather_all(),
    "get_field": lambda b: b.get_field("reward", jnp.arange(2), jnp.arange(2)),
    "locate": lambda b: b.locate(b.sample(KEY, 4).slots),
}
EPISODES = {
    "add": lambda b: b.add(rows(2, 3)),
    "clear of some": lambda b: b.clear(jnp.array([True, False])),
    "episode": lambda b: b.episode(b.sample(KEY, 4).slots),
    "episode_mask": lambda b: b.episode_mask(b.sample(KEY, 4).slots),
}
QUEUE = {
    "add": lambda q: q.add(rows(3)),
    "take": lambda q: q.take(2),
    "accepts": lambda q: q.accepts(3),
    "clear": lambda q: q.clear(),
}
GATHERED = {
    "add": lambda a: a.add(rows(2, 3)),
    "take": lambda a: a.take(),
    "drop": lambda a: a.drop(jnp.array([True, False])),
    "clear": lambda a: a.clear(),
}
FRESH = jaxbuf.Freshness(max_use=2, max_staleness=2)
AVOID = jaxbuf.Episodes(boundary="avoid")
CASES = {
    "prioritized": (
        lambda: items(sampler=jaxbuf.Prioritized()).add(rows(4)),
        {**ITEMS, **PRIORITIES},
    ),
    "fresh": (lambda: items(freshness=FRESH).add(rows(4)), FRESHNESS),
    "lowest": (lambda: scored(items(evictor=jaxbuf.Lowest()), 4), SCORES),
    "softmax": (lambda: scored(items(sampler=jaxbuf.Softmax()), 4), SCORES),
    "diverse": (lambda: scored(items(diversity=jaxbuf.Diversity(0.5)), 4), SCORES),
    "windows": (
        lambda: trajectories(sampler=jaxbuf.Prioritized()).add(rows(2, 4)),
        {**STEPS, **PRIORITIES},
    ),
    "fresh windows": (lambda: trajectories(freshness=FRESH).add(rows(2, 4)), FRESHNESS),
    "episodes": (lambda: trajectories(episodes=AVOID).add(rows(2, 4)), EPISODES),
    "queue": (lambda: jaxbuf.Queue.create(STEP, 6).add(rows(4)), QUEUE),
    "accumulated episodes": (
        lambda: jaxbuf.EpisodeAccumulator.create(STEP, 2, 4).add(rows(2, 2))[0],
        GATHERED,
    ),
    "chunks": (
        lambda: jaxbuf.ChunkAccumulator.create(STEP, 2, 2),
        {"add": lambda a: a.add(rows(3), jnp.zeros(3, jnp.int32), jnp.arange(3))},
    ),
    "mixture": (
        lambda: jaxbuf.Mixture.create([items().add(rows(4)), items().add(rows(4))], [0.5, 0.5]),
        {
            "add": lambda m: m.add(rows(3), part=1),
            "sample": lambda m: m.sample(KEY, 4),
            "metrics": lambda m: m.metrics(),
        },
    ),
}


@pytest.mark.parametrize("name", list(CASES))
def test_as_those_of_jax_arrays(name):
    create, operations = CASES[name]
    buffer = create()
    host = jax.device_get(buffer)
    assert all(isinstance(leaf, np.ndarray | np.generic) for leaf in jax.tree.leaves(host))
    for operate in operations.values():
        chex.assert_trees_all_equal(operate(host), operate(buffer))


# What a buffer tells of itself without a program.
PROPERTIES = {
    "prioritized": ("size", "live"),
    "fresh": ("size", "live"),
    "windows": ("size", "num_windows", "end_position", "earliest_position"),
    "fresh windows": ("size", "num_windows"),
    "queue": ("size",),
    "mixture": ("size", "occupancy"),
}


@pytest.mark.parametrize("name", PROPERTIES)
def test_properties_of_host_copies_and_of_buffers_without_numbers(name):
    buffer = CASES[name][0]()
    host, shapes = jax.device_get(buffer), jax.eval_shape(lambda: buffer)
    gone = jax.tree.map(jnp.copy, buffer)
    for leaf in jax.tree.leaves(gone):
        leaf.delete()
    for found in PROPERTIES[name]:
        chex.assert_trees_all_equal(getattr(host, found), getattr(buffer, found))
        with pytest.raises(ValueError, match=r"was donated|shapes in place of arrays"):
            getattr(gone, found)
        with pytest.raises(ValueError, match="shapes in place of arrays"):
            getattr(shapes, found)
    for other, match in ((gone, "was donated"), (shapes, "shapes in place of arrays")):
        for look in (lambda b: b.metrics(), lambda b: b.can_sample(1)):
            with pytest.raises(ValueError, match=match):
                look(other)


@pytest.mark.parametrize("name", ["fresh", "fresh windows", "queue"])
def test_statistics_of_host_copies(name):
    buffer = CASES[name][0]()
    host = jax.device_get(buffer)
    chex.assert_trees_all_equal(
        jaxbuf.Statistics.create(host).metrics(host),
        jaxbuf.Statistics.create(buffer).metrics(buffer),
    )

"""Buffers of NumPy arrays, such as ``jax.device_get`` returns, work as those of jax arrays."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbuf
from tests import operations

KEY = jax.random.key(0)
STEP = {"obs": jnp.zeros(2), "terminated": jnp.bool_(False)}
STEPS = {"obs": jnp.ones((2, 3, 2)), "terminated": jnp.arange(6).reshape(2, 3) == 2}
ACCUMULATORS = {
    "episodes": (
        lambda: jaxbuf.EpisodeAccumulator.create(STEP, 2, 4),
        {
            "add": lambda a: a.add(STEPS),
            "take": lambda a: a.take(),
            "drop": lambda a: a.drop(jnp.array([True, False])),
            "clear": lambda a: a.clear(),
        },
    ),
    "chunks": (
        lambda: jaxbuf.ChunkAccumulator.create(jnp.float32(0), 2, 2),
        {"add": lambda a: a.add(jnp.ones(3), jnp.zeros(3, jnp.int32), jnp.arange(3))},
    ),
}


# What is asked of buffers of each kind; others are built of the same.
ALL = {"add", "sample", "metrics"}
ASKED = {
    "fresh-prioritized": ALL
    | {"sample_range", "update_priority", "mark_used", "set_version", "staleness"},
    "lowest": ALL,
    "diverse": {"add"},
    "windows-avoid": ALL - {"metrics"} | {"read", "dequeue", "look_up", "clear_some"},
    "queue": {"add", "take", "clear"},
    "mixture": {"add", "sample"},
}


@pytest.mark.parametrize("name", operations.quick(ASKED, {"fresh-prioritized", "queue", "mixture"}))
def test_as_those_of_jax_arrays(name):
    buffer, sample = operations.concrete(name)
    host = jax.device_get(buffer)
    assert all(isinstance(leaf, np.ndarray | np.generic) for leaf in jax.tree.leaves(host))
    for what in ASKED[name]:
        operate = operations.OPERATIONS[what][1]
        given = (sample, jnp.float32(1), KEY)
        chex.assert_trees_all_equal(operate(host, *given), operate(buffer, *given))


@pytest.mark.parametrize("name", ACCUMULATORS)
def test_accumulators_too(name):
    create, operate = ACCUMULATORS[name]
    accumulator = operate["add"](create())[0]
    host = jax.device_get(accumulator)
    for operation in operate.values():
        chex.assert_trees_all_equal(operation(host), operation(accumulator))


# What a buffer tells of itself without a program.
PROPERTIES = {
    "prioritized": ("size", "live"),
    "fresh-prioritized": ("size", "live"),
    "windows": ("size", "num_windows", "end_position", "earliest_position"),
    "windows-fresh": ("size", "num_windows"),
    "queue": ("size",),
    "mixture": ("size", "occupancy"),
}


@pytest.mark.parametrize("name", PROPERTIES)
def test_properties_of_host_copies_and_of_buffers_without_numbers(name):
    buffer = operations.concrete(name)[0]
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
    if name != "mixture":
        of_host, of_device = (jaxbuf.Statistics.create(b).metrics(b) for b in (host, buffer))
        chex.assert_trees_all_equal(of_host, of_device)

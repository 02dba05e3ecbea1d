"""Every function of jaxbuf that changes a buffer does so in place, compiled once."""

import functools
import inspect

import chex
import jax
import jax.numpy as jnp
import pytest

import jaxbuf
from jaxbuf.buffers import doors
from jaxbuf.testing import assert_no_copy
from tests import traces

CAPACITY, NUM_ENVS, BATCH = 4096, 8, 16
STEP = {
    "obs": jnp.zeros(16),
    "reward": jnp.float32(0),
    "terminated": jnp.bool_(False),
    "truncated": jnp.bool_(False),
}
REMOVABLE = (jaxbuf.Removable(),)
# Leaves of fewer bytes are counters and statistics.
LARGE = CAPACITY


def rows(*shape):
    return jax.tree.map(lambda leaf: jnp.ones((*shape, *leaf.shape), leaf.dtype), STEP)


@functools.cache
def items():
    return jaxbuf.ItemBuffer.create(
        STEP,
        CAPACITY,
        sampler=jaxbuf.Prioritized(),
        freshness=jaxbuf.Freshness(max_use=4, max_staleness=8),
        parts=REMOVABLE,
    ).add(rows(64), version=jnp.zeros(64, jnp.int32))


@functools.cache
def epochs():
    return jaxbuf.ItemBuffer.create(STEP, CAPACITY, sampler=jaxbuf.Shuffled()).add(rows(64))


@functools.cache
def annealed():
    sampler = jaxbuf.Prioritized(uniform_mix=jaxbuf.Varying(1.0))
    return jaxbuf.ItemBuffer.create(STEP, CAPACITY, sampler=sampler).add(rows(64))


@functools.cache
def scored():
    buffer = jaxbuf.ItemBuffer.create(
        STEP, CAPACITY, sampler=jaxbuf.Softmax(), evictor=jaxbuf.Lowest()
    )
    return buffer.add(rows(64), score=jnp.arange(64.0))


@functools.cache
def rings():
    buffer = jaxbuf.TrajectoryBuffer.create(
        STEP,
        NUM_ENVS,
        CAPACITY // NUM_ENVS,
        sequence_length=4,
        sampler=jaxbuf.Prioritized(),
        episodes=jaxbuf.Episodes(boundary="avoid"),
        parts=REMOVABLE,
    )
    return buffer.add(rows(NUM_ENVS, 64))


@functools.cache
def queue():
    return jaxbuf.Queue.create(STEP, CAPACITY).add(rows(64))


@functools.cache
def slots(buffer):
    return buffer().sample(jax.random.key(0), BATCH).slots


# For each function: the buffer that it is called with, and its other arguments.
CHANGES = {
    "add": [
        (items, lambda: (rows(BATCH),), {"version": jnp.ones(BATCH, jnp.int32)}),
        (rings, lambda: (rows(NUM_ENVS, 4),), {}),
        (scored, lambda: (rows(BATCH),), {"score": jnp.arange(float(BATCH))}),
        (queue, lambda: (rows(BATCH),), {}),
    ],
    "insert": [(items, lambda: (rows(BATCH),), {})],
    "next_batch": [(epochs, lambda: (jax.random.key(0), BATCH), {})],
    "update_priority": [
        (buffer, lambda b=buffer: (slots(b), jnp.ones(BATCH)), {}) for buffer in (items, rings)
    ],
    "mark_used": [(items, lambda: (slots(items),), {})],
    "set_version": [(items, lambda: (3,), {})],
    "clear": [(buffer, tuple, {}) for buffer in (items, rings, scored, queue)],
    "take": [(queue, lambda: (BATCH,), {})],
    "dequeue": [(rings, lambda: (2,), {})],
    "set_field": [
        (items, lambda: ("reward", slots(items), jnp.ones(BATCH)), {}),
        (rings, lambda: ("obs", slots(rings), jnp.ones((BATCH, 4, 16))), {}),
    ],
    "map_field": [
        (items, lambda: ("reward", halved), {}),
        (rings, lambda: ("reward", halved), {}),
    ],
    "update_score": [(scored, lambda: (slots(scored), jnp.arange(float(BATCH))), {})],
    "remove": [(buffer, lambda b=buffer: (slots(b),), {}) for buffer in (items, rings)],
    "set_hyperparameters": [(annealed, tuple, {"uniform_mix": 0.5})],
    "with_sampler": [
        (buffer, lambda: (jaxbuf.Prioritized(alpha=0.5),), {}) for buffer in (items, rings)
    ],
    "end_episodes": [(rings, tuple, {})],
    "drop_newest_episode": [(rings, tuple, {})],
}
CASES = [(name, *case) for name, cases in CHANGES.items() for case in cases]
every_change = pytest.mark.parametrize(
    ("name", "make", "others", "options"),
    CASES,
    ids=[f"{name}-{make.__name__}" for name, make, *_ in CASES],
)


def halved(items):
    return items["reward"] / 2


def large(buffer):
    return [leaf for leaf in jax.tree.leaves(buffer) if leaf.nbytes >= LARGE]


def changed(result):
    return result[0] if isinstance(result, tuple) and not hasattr(result, "add") else result


def test_every_function_that_donates_has_a_case():
    functions = inspect.getmembers(doors, inspect.isfunction)
    donating = {
        name
        for name, function in functions
        if hasattr(jaxbuf, name) and "donate" in inspect.signature(function).parameters
    }
    assert donating == {*CHANGES}


@every_change
def test_a_donated_buffer_is_updated_where_it_is(name, make, others, options):
    """Each large array of the result lies where an array of the buffer passed in lay."""
    function, args = getattr(jaxbuf, name), others()
    buffer = jax.tree.map(jnp.copy, make())
    for _ in range(3):
        old, places = buffer, {leaf.unsafe_buffer_pointer() for leaf in large(buffer)}
        assert places
        buffer = changed(function(buffer, *args, **options))
        assert {leaf.unsafe_buffer_pointer() for leaf in large(buffer)} == places
        with pytest.raises(ValueError, match="was donated"):
            function(old, *args, **options)


@pytest.mark.parametrize(
    ("name", "make", "others", "options"),
    # XLA fills a cleared buffer with copies of one array of zeros.
    [case for case in CASES if case[0] != "clear"],
)
def test_a_donated_buffer_is_not_copied(name, make, others, options):
    args = others()

    def step(buffer):
        return getattr(buffer, name)(*args, **options)

    # It looks at all slots, and so may copy some numbers for each of them.
    smallest = 8 * LARGE if name == "with_sampler" else LARGE
    assert_no_copy(step, make(), smallest=smallest)


@every_change
def test_a_function_is_compiled_once(name, make, others, options):
    function, args = getattr(jaxbuf, name), others()
    buffer = changed(function(make(), *args, donate=False, **options))
    before = jax.device_get(buffer)
    with traces.counted_traces() as traced:
        again = [changed(function(make(), *args, donate=False, **options)) for _ in range(2)]
    # A function of the caller may compute something else at each call.
    assert bool(traced) == (name == "map_field")
    for buffer in again:
        chex.assert_trees_all_equal(jax.device_get(buffer), before)

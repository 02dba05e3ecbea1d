"""Every function of jaxbuf that changes a buffer does so in place, compiled once."""

import functools
import inspect

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbuf
from jaxbuf.buffers import doors
from jaxbuf.core import advice
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


def of_items(score=None, **options):
    return jaxbuf.ItemBuffer.create(STEP, CAPACITY, **options).add(rows(64), score=score)


@functools.cache
def items():
    freshness = jaxbuf.Freshness(max_use=4, max_staleness=8)
    return of_items(sampler=jaxbuf.Prioritized(), freshness=freshness, parts=REMOVABLE)


@functools.cache
def epochs():
    return of_items(sampler=jaxbuf.Shuffled())


@functools.cache
def annealed():
    return of_items(sampler=jaxbuf.Prioritized(uniform_mix=jaxbuf.Varying(1.0)))


@functools.cache
def scored():
    return of_items(jnp.arange(64.0), sampler=jaxbuf.Softmax(), evictor=jaxbuf.Lowest())


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
        (
            items,
            lambda: (rows(BATCH),),
            {"version": jnp.ones(BATCH, jnp.int32), "mask": jnp.ones(BATCH, bool)},
        ),
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
    "map_field": [(buffer, lambda: ("reward", halved), {}) for buffer in (items, rings)],
    "update_score": [(scored, lambda: (slots(scored), jnp.arange(float(BATCH))), {})],
    "remove": [(buffer, lambda b=buffer: (slots(b),), {}) for buffer in (items, rings)],
    "set_hyperparameters": [(annealed, tuple, {"uniform_mix": 0.5})],
    "with_sampler": [
        (buffer, lambda: (jaxbuf.Prioritized(alpha=0.5),), {}) for buffer in (items, rings)
    ],
    "end_episodes": [(rings, tuple, {})],
    "drop_newest_episode": [(rings, tuple, {})],
}
CASES = [
    pytest.param(
        name,
        *case,
        id=f"{name}-{case[0].__name__}",
        # Each function has one buffer that is quick, and an add all of them.
        marks=pytest.mark.slow if number and name != "add" else (),
    )
    for name, cases in CHANGES.items()
    for number, case in enumerate(cases)
]
every_change = pytest.mark.parametrize(("name", "make", "others", "options"), CASES)


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
def test_a_donated_buffer_is_updated_where_it_is_and_another_stays(name, make, others, options):
    """Each large array of the result lies where an array of the buffer passed in lay."""
    function, args = getattr(jaxbuf, name), others()
    # A function of the caller may compute something else at each call.
    again = name == "map_field"
    expected = changed(function(make(), *args, donate=False, **options))
    buffer = jax.tree.map(jnp.copy, make())
    for turn in range(3):
        old, places = buffer, {leaf.unsafe_buffer_pointer() for leaf in large(buffer)}
        assert places
        with traces.counted_traces() as traced:
            buffer = changed(function(buffer, *args, **options))
        # The first may change the configuration.
        assert turn < 2 or bool(traced) == again
        assert {leaf.unsafe_buffer_pointer() for leaf in large(buffer)} == places
        with pytest.raises(ValueError, match="was donated"):
            function(old, *args, **options)
        if not turn:
            # Not the buffer itself: in jax 0.11.2 what was fetched is not updated in place after.
            chex.assert_trees_all_equal(jax.tree.map(jnp.copy, buffer), expected)
    with traces.counted_traces() as traced:
        kept = changed(function(make(), *args, donate=False, **options))
    assert bool(traced) == again
    chex.assert_trees_all_equal(kept, expected)
    given = jax.tree.leaves((make(), args, options))
    assert not any(leaf.is_deleted() for leaf in given if isinstance(leaf, jax.Array))


@pytest.mark.parametrize(
    ("name", "make", "others", "options"),
    # XLA fills a cleared buffer with copies of one array of zeros.
    [case for case in CASES if case.values[0] != "clear"],
)
def test_a_donated_buffer_is_not_copied(name, make, others, options):
    args = others()

    def step(buffer):
        return getattr(buffer, name)(*args, **options)

    # It looks at all slots, and so may copy some numbers for each of them.
    smallest = 8 * LARGE if name == "with_sampler" else LARGE
    assert_no_copy(step, make(), smallest=smallest)


PLAIN_ITEM = {"obs": jnp.zeros(3), "reward": jnp.float32(0)}


def create(sampler):
    return jaxbuf.ItemBuffer.create(PLAIN_ITEM, 20, sampler=sampler)


def full(value):
    return {"obs": jnp.full((8, 3), value), "reward": jnp.full(8, value)}


def test_a_call_from_python_is_one_program_and_keeps_its_buffer():
    """Whatever its numbers are, and also for a second buffer built alike."""

    def run(number):
        buffer, rows = create(jaxbuf.Prioritized()), full(number)
        added = buffer.add(rows)
        sample = added.sample(jax.random.key(int(number)), 3)
        added.update_priority(sample.slots, sample.probability)
        added.metrics()
        sample = jaxbuf.sample(added, jax.random.key(int(number)), 3)
        jaxbuf.importance_weights(added, sample, jnp.float32(number))
        # Nothing is donated that a call does not change.
        assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((buffer, added, sample)))
        assert buffer.size == 0

    run(1.0)
    with traces.counted_traces() as traced:
        run(2.0)
    assert not traced


def test_uses_versions_and_lookups_are_compiled_once():
    freshness = jaxbuf.Freshness(max_use=2, max_staleness=1)
    episodes = jaxbuf.Episodes(boundary="mask")
    buffer = jaxbuf.TrajectoryBuffer.create(STEP, 2, 8, episodes=episodes, freshness=freshness)
    buffer = buffer.add(rows(2, 5))
    batch = buffer.sample(jax.random.key(0), 3)

    def run(number):
        buffer.set_version(jnp.int32(number))
        buffer.episode(jnp.zeros(3, jnp.int32), jnp.arange(3) + number)
        buffer.steps_around(batch.slots, range(number, number + 3))
        for name in ("mark_used", "use_count", "staleness", "episode", "episode_mask"):
            getattr(buffer, name)(batch.slots)

    run(1)
    with traces.counted_traces() as traced:
        run(2)
    assert not traced


@pytest.mark.parametrize(
    ("name", "wrong", "options", "match"),
    [
        ("add", (jnp.arange(2.0),), {"donate": 1}, "donate is 1; expected True or False"),
        ("add", (jnp.arange(2.0), 1), {}, "positional argument"),
        ("add", (jnp.arange(2.0),), {"items": jnp.arange(2.0)}, "multiple values"),
        ("add", (jnp.arange(2.0),), {"env_ids": np.arange(2)}, "env_ids was given"),
        ("sample", (jax.random.key(0), True), {}, "batch_size is True"),
        ("sample", (jax.random.key(0), 2), {"donate": True}, "donate was given"),
        ("sample", (jax.random.key(0), 2), {"beta": np.nan}, "beta is nan"),
        ("update_priority", ([[1.0], [1.0, 2.0]],), {}, "priority is a list"),
    ],
)
def test_calls_that_are_right_let_none_through_that_is_not(name, wrong, options, match):
    """The classes of arguments say how a call enters its program, and of most not the values."""
    buffer = jaxbuf.ItemBuffer.create(jnp.float32(0), 8, sampler=jaxbuf.Prioritized())
    for donate in (True, False):
        buffer = jaxbuf.add(buffer, jnp.arange(2.0), donate=donate)
    for weights in ({}, {"beta": 0.4}):
        slots = jaxbuf.sample(buffer, jax.random.key(0), 2, **weights).slots
    for priority in (np.ones(2), jnp.ones(2)):
        buffer = jaxbuf.update_priority(buffer, slots, priority)
    args = (slots, *wrong) if name == "update_priority" else wrong
    with pytest.raises((TypeError, ValueError), match=match):
        getattr(jaxbuf, name)(buffer, *args, **options)
    assert buffer.size == 4


def test_options_that_are_none_are_ignored():
    buffer = jaxbuf.ItemBuffer.create(jnp.float32(0), 8, sampler=jaxbuf.Prioritized())
    buffer, key = jaxbuf.add(buffer, jnp.arange(4.0), mask=None, donate=True), jax.random.key(0)
    ranges = {"start": None, "stop": None, "by_priority": None, "replacement": None}
    double = functools.partial(jaxbuf.map_field, buffer, None, lambda x: 2 * x, donate=False)
    for given, left_out in (
        (jaxbuf.sample_range(buffer, key, 3, **ranges), jaxbuf.sample_range(buffer, key, 3)),
        (jaxbuf.sample(buffer, key, 3, beta=None, within=None), jaxbuf.sample(buffer, key, 3)),
        (double(batch_size=None), double()),
        (jaxbuf.set_hyperparameters(buffer, alpha=None, donate=False), buffer),
    ):
        chex.assert_trees_all_equal(given, left_out)


def test_what_changes_nothing_may_be_told_not_to_donate():
    buffer = jaxbuf.ItemBuffer.create(jnp.float32(0), 8).add(jnp.arange(4.0))
    parts = [jax.tree.map(jnp.copy, buffer) for _ in range(2)]
    for each in (buffer, jaxbuf.Mixture.create(parts, [1, 1])):
        assert jaxbuf.sample(each, jax.random.key(0), 2, donate=False).valid.all()
        with pytest.raises(ValueError, match="donate was given"):
            jaxbuf.sample(each, jax.random.key(0), 2, donate=True)
        assert each.size > 0


def test_the_functions_work_inside_a_users_transformations():
    def steps(buffer, key, by):
        buffer = by.add(buffer, full(3.0), mask=jnp.ones(8, bool))
        sample = by.sample(buffer, key, 8)
        return by.update_priority(buffer, sample.slots, jnp.full(8, 2.0)), sample

    functions = functools.partial(steps, by=jaxbuf)
    buffer, key = create(jaxbuf.Prioritized(alpha=0.6)), jax.random.key(3)
    expected = jax.jit(functools.partial(steps, by=jaxbuf.ItemBuffer))(buffer, key)
    chex.assert_trees_all_equal(jax.jit(functions)(buffer, key), expected)
    # Also of a buffer that the function closes over.
    chex.assert_trees_all_equal(jax.jit(functools.partial(functions, buffer))(key), expected)
    lanes = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), (buffer, key))
    _, both = jax.jit(jax.vmap(functions))(*lanes)
    np.testing.assert_allclose(both.data["reward"][1], expected[1].data["reward"], rtol=2e-6)
    _, scanned = jax.lax.scan(functions, buffer, key[None])
    np.testing.assert_array_equal(scanned.slots.index[0], expected[1].slots.index)


def test_buffers_built_alike_share_a_trace_and_others_do_not():
    chex.clear_trace_counter()

    @jax.jit
    @chex.assert_max_traces(n=1)
    def size(buffer):
        return buffer.size

    size(create(jaxbuf.Prioritized(alpha=0.5)))
    size(create(jaxbuf.Prioritized(alpha=np.float32(0.5))))
    size(create(jaxbuf.Prioritized(alpha=np.float64(0.5))).add(full(1.0)))
    with pytest.raises(AssertionError, match="traced > 1 times"):
        size(create(jaxbuf.Prioritized(alpha=0.9)))


@pytest.mark.filterwarnings("error")
def test_many_lengths_warn_once_and_say_what_to_do(monkeypatch):
    # The count begins here, whatever other tests had.
    monkeypatch.setattr(advice, "_shapes", {})
    buffer = jaxbuf.ItemBuffer.create(jnp.float32(0), 1213)

    def add(buffer, lengths):
        for length in lengths:
            buffer = jaxbuf.add(buffer, jnp.zeros(length))
        return buffer

    buffer = add(buffer, [*range(1, 10), *range(1, 10)])
    with pytest.raises(UserWarning, match="for 10 different shapes"):
        jaxbuf.add(buffer, jnp.zeros(10))
    # The buffer is still there.
    buffer = add(buffer, range(10, 14))
    assert int(buffer.size) == 2 * 45 + sum(range(10, 14))
    for length in range(1, 17):
        buffer = jaxbuf.add(buffer, jnp.zeros(16), mask=np.arange(16) < length)
    # Buffers of other sizes and options count apart.
    for length in range(1, 12):
        sampler = jaxbuf.Prioritized(alpha=1 / length)
        add(jaxbuf.ItemBuffer.create(jnp.float32(0), 2000 + length % 2, sampler=sampler), [length])
    rings = jaxbuf.TrajectoryBuffer.create(jnp.float32(0), 1, 1213)
    for length in range(1, 10):
        rings = jaxbuf.add(rings, jnp.zeros((1, length)))
    with pytest.warns(UserWarning, match=r"pad rows to a few sizes, .* with mask=") as told:
        jaxbuf.add(rings, jnp.zeros((1, 10)))
    assert [warning.filename for warning in told] == [__file__]

"""The jitted functions: one trace, storage updated in place, and what donation consumes."""

import functools
import re
import warnings

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbuf
from tests.traces import counted_traces

CAPACITY = 4096
WIDTH = 17
BATCH = 8

SAMPLERS = {
    "uniform": jaxbuf.Uniform(),
    "prioritized": jaxbuf.Prioritized(alpha=0.6),
    "mix-without-replacement": jaxbuf.Prioritized(uniform_mix=0.1, replacement=False),
}
every_sampler = pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS)


def create(sampler, capacity=CAPACITY):
    example = {"obs": jnp.zeros(WIDTH, jnp.float32), "reward": jnp.float32(0)}
    return jaxbuf.ItemBuffer.create(example, capacity, sampler=sampler)


def items(value, batch=BATCH):
    return {
        "obs": jnp.full((batch, WIDTH), value, jnp.float32),
        "reward": jnp.full((batch,), value, jnp.float32),
    }


def storage(buffer):
    """The one leaf of shape ``[CAPACITY, WIDTH]``."""
    (leaf,) = [leaf for leaf in jax.tree.leaves(buffer) if leaf.shape == (buffer.capacity, WIDTH)]
    return leaf


def test_a_method_called_from_python_is_one_program_and_keeps_its_buffer():
    buffer = create(jaxbuf.Prioritized(), 20)
    key, slots = jax.random.key(0), buffer.sample(jax.random.key(0), 3).slots
    priority = jnp.ones(3)

    def run():
        added = buffer.add(items(1.0))
        added.sample(key, 3)
        added.update_priority(slots, priority)
        added.metrics()
        return added

    first = run()
    with counted_traces() as traces:
        second = run()
    assert not traces
    chex.assert_trees_all_equal(first, second)
    assert buffer.size == 0


def test_uses_versions_and_lookups_are_compiled_once():
    step = {"terminated": jnp.bool_(False)}
    buffer = jaxbuf.TrajectoryBuffer.create(
        step,
        2,
        8,
        sequence_length=2,
        episodes=jaxbuf.Episodes(boundary="mask"),
        freshness=jaxbuf.Freshness(max_use=2, max_staleness=1),
    )
    buffer = buffer.add({"terminated": jnp.arange(10).reshape(2, 5) == 2})
    slots = buffer.sample(jax.random.key(0), 3).slots
    env_ids, positions, versions = jnp.zeros(3, jnp.int32), jnp.arange(3), jnp.arange(3)

    def run(version):
        return (
            buffer.mark_used(slots),
            buffer.set_version(version),
            buffer.use_count(slots),
            buffer.staleness(slots),
            buffer.episode(slots),
            buffer.episode(env_ids, positions),
            buffer.episode_mask(slots),
        )

    first, second = versions[1], versions[2]
    run(first)
    with counted_traces() as traces:
        run(second)
    assert not traces


@every_sampler
def test_repeated_calls_never_trace_again(sampler):
    """Also for a second buffer built alike, after wrapping, and with another key or beta."""
    prioritized = isinstance(sampler, jaxbuf.Prioritized)
    arguments = [items(float(value)) for value in range(6)]
    priority = [jnp.full(BATCH, 1.0 + value, jnp.float32) for value in range(6)]
    keys = [jax.random.key(value) for value in range(6)]

    def run(buffer, value):
        buffer = jaxbuf.add(buffer, arguments[value])
        if prioritized:
            buffer = jaxbuf.add(buffer, arguments[value], priority=priority[value])
        sample = jaxbuf.sample(buffer, keys[value], BATCH)
        if prioritized:
            buffer = jaxbuf.update_priority(buffer, sample.slots, priority[value])
        return buffer

    first, second = create(sampler, 20), create(sampler, 20)
    with counted_traces() as traces:
        first = run(first, 0)
    assert traces, "the counter sees no trace at all"
    with counted_traces() as traces:
        for value in range(1, 6):
            first = run(first, value)
        for value in range(6):
            second = run(second, value)
    assert traces == []


@every_sampler
def test_a_users_step_is_traced_once(sampler):
    chex.clear_trace_counter()

    @functools.partial(jax.jit, donate_argnums=0)
    @chex.assert_max_traces(n=1)
    def step(buffer, rows, key, beta):
        buffer = buffer.add(rows)
        sample = buffer.sample(key, BATCH)
        weights = jaxbuf.importance_weights(buffer, sample, beta)
        if isinstance(sampler, jaxbuf.Prioritized):
            buffer = buffer.update_priority(sample.slots, weights + 1.0)
        return buffer

    for _ in range(2):
        buffer = create(sampler, 20)
        for value in range(5):
            buffer = step(
                buffer, items(float(value)), jax.random.key(value), jnp.float32(value / 5)
            )


def test_buffers_built_alike_share_a_trace_and_others_do_not():
    chex.clear_trace_counter()

    @jax.jit
    @chex.assert_max_traces(n=1)
    def size(buffer):
        return buffer.size

    size(create(jaxbuf.Prioritized(alpha=0.5), 20))
    size(create(jaxbuf.Prioritized(alpha=np.float32(0.5)), 20))
    size(create(jaxbuf.Prioritized(alpha=np.float64(0.5)), 20).add(items(1.0)))
    with pytest.raises(AssertionError, match="traced > 1 times"):
        size(create(jaxbuf.Prioritized(alpha=0.9), 20))


def test_sampling_consumes_nothing():
    buffer = jaxbuf.add(create(jaxbuf.Prioritized()), items(1.0))
    sample = jaxbuf.sample(buffer, jax.random.key(0), BATCH)
    jaxbuf.importance_weights(buffer, sample, 0.5)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(buffer))


@every_sampler
def test_without_donation_the_old_buffer_stays_as_it_was(sampler):
    buffer = jaxbuf.add(create(sampler), items(1.0))
    before = jax.device_get(buffer)
    new = jaxbuf.add(buffer, items(2.0), donate=False)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(buffer))
    assert storage(new).unsafe_buffer_pointer() != storage(buffer).unsafe_buffer_pointer()
    chex.assert_trees_all_equal(buffer, before)
    assert (buffer.size, new.size) == (BATCH, 2 * BATCH)


def test_an_update_without_donation_leaves_the_old_priorities():
    buffer = jaxbuf.add(create(jaxbuf.Prioritized(alpha=1.0)), items(1.0))
    sample = jaxbuf.sample(buffer, jax.random.key(0), BATCH)
    new = jaxbuf.update_priority(
        buffer, sample.slots, jnp.full(BATCH, 5.0, jnp.float32), donate=False
    )
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(buffer))
    assert (buffer.metrics()["priority_max"], new.metrics()["priority_max"]) == (1.0, 5.0)


def test_donating_and_not_donating_give_the_same_bits():
    kept = gone = jaxbuf.add(create(jaxbuf.Prioritized(), 20), items(1.0), donate=False)
    gone = jax.tree.map(jnp.copy, kept)
    slots = jaxbuf.sample(kept, jax.random.key(0), BATCH).slots
    priority = jnp.arange(1, BATCH + 1, dtype=jnp.float32)
    for value in range(4):
        kept = jaxbuf.add(kept, items(float(value)), donate=False)
        gone = jaxbuf.add(gone, items(float(value)))
        kept = jaxbuf.update_priority(kept, slots, priority, donate=False)
        gone = jaxbuf.update_priority(gone, slots, priority)
        slots = jaxbuf.sample(kept, jax.random.key(value), BATCH).slots
    chex.assert_trees_all_equal(kept, gone)


def test_arguments_other_than_the_buffer_are_not_consumed():
    buffer, rows = create(jaxbuf.Prioritized(), BATCH), items(1.0)
    priority, mask = jnp.ones(BATCH, jnp.float32), jnp.ones(BATCH, bool)
    buffer = jaxbuf.add(buffer, rows, priority=priority, mask=mask)
    slots = jaxbuf.sample(buffer, jax.random.key(0), BATCH).slots
    jaxbuf.update_priority(buffer, slots, priority, mask=mask)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((rows, priority, mask, slots)))


def full_copies(program):
    """Instructions of a compiled program that copy a whole storage leaf."""
    return re.findall(rf"= f32\[{CAPACITY},{WIDTH}\]\S* copy(?:-start)?\(.*", program.as_text())


def assert_in_place(program):
    stored = CAPACITY * WIDTH * 4
    assert full_copies(program) == []
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes >= stored
    assert memory.temp_size_in_bytes < stored


def test_the_check_for_copies_finds_a_copy():
    kept = jax.jit(lambda leaf: (leaf.at[0].set(1.0), leaf.at[1].set(2.0)), donate_argnums=0)
    program = kept.lower(jnp.zeros((CAPACITY, WIDTH), jnp.float32)).compile()
    assert full_copies(program)


@every_sampler
@pytest.mark.parametrize("masked", [False, True])
def test_the_compiled_add_copies_no_storage(sampler, masked):
    add = jax.jit(lambda buffer, rows, mask: buffer.add(rows, mask=mask), donate_argnums=0)
    mask = jnp.ones(BATCH, bool) if masked else None
    assert_in_place(add.lower(create(sampler), items(1.0), mask).compile())


def cycle(buffer, key, *, sampler, add_first):
    """One step of a training loop."""
    rows = items(1.0)
    if add_first:
        buffer = buffer.add(rows)
    sample = buffer.sample(key, BATCH)
    if isinstance(sampler, jaxbuf.Prioritized):
        buffer = buffer.update_priority(sample.slots, sample.data["reward"] + 0.5)
    if not add_first:
        buffer = buffer.add(rows)
    return buffer, sample.data["obs"].sum()


def scanned(sampler, add_first):
    body = functools.partial(cycle, sampler=sampler, add_first=add_first)
    return jax.jit(lambda buffer, keys: jax.lax.scan(body, buffer, keys), donate_argnums=0)


@every_sampler
@pytest.mark.parametrize("add_first", [True, False])
def test_both_orders_of_a_scan_give_what_a_python_loop_gives(sampler, add_first):
    keys = jax.random.split(jax.random.key(1), 6)
    expected, sums = create(sampler, 20), []
    one = jax.jit(functools.partial(cycle, sampler=sampler, add_first=add_first))
    for key in keys:
        expected, total = one(expected, key)
        sums.append(total)
    buffer, actual = scanned(sampler, add_first)(create(sampler, 20), keys)
    np.testing.assert_allclose(actual, np.array(sums), rtol=1e-6)
    probe = jax.random.key(9)
    np.testing.assert_array_equal(
        jaxbuf.sample(buffer, probe, BATCH).slots.index,
        jaxbuf.sample(expected, probe, BATCH).slots.index,
    )


@pytest.mark.parametrize("sampler", [jaxbuf.Uniform(), SAMPLERS["prioritized"]])
def test_the_functions_work_inside_a_users_transformations(sampler):
    prioritized = isinstance(sampler, jaxbuf.Prioritized)

    def functions(buffer, key):
        buffer = jaxbuf.add(buffer, items(3.0), mask=jnp.ones(BATCH, bool))
        sample = jaxbuf.sample(buffer, key, BATCH)
        if prioritized:
            buffer = jaxbuf.update_priority(buffer, sample.slots, jnp.full(BATCH, 2.0, jnp.float32))
        return buffer, sample

    def methods(buffer, key):
        buffer = buffer.add(items(3.0), mask=jnp.ones(BATCH, bool))
        sample = buffer.sample(key, BATCH)
        if prioritized:
            buffer = buffer.update_priority(sample.slots, jnp.full(BATCH, 2.0, jnp.float32))
        return buffer, sample

    buffer, key = create(sampler, 20), jax.random.key(3)
    expected = jax.jit(methods)(buffer, key)
    chex.assert_trees_all_equal(jax.jit(functions)(buffer, key), expected)
    lanes = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), (buffer, key))
    both = jax.jit(jax.vmap(functions))(*lanes)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a[1], b, rtol=2e-6), both[1].data, expected[1].data
    )
    _, scanned_sample = jax.lax.scan(functions, buffer, key[None])
    np.testing.assert_array_equal(scanned_sample.slots.index[0], expected[1].slots.index)


def test_batch_size_by_name():
    buffer = jaxbuf.add(create(jaxbuf.Uniform(), 20), items(1.0))
    by_name = jaxbuf.sample(buffer, jax.random.key(0), batch_size=4)
    by_place = jaxbuf.sample(buffer, jax.random.key(0), 4)
    chex.assert_trees_all_equal(by_name, by_place)


def test_a_traced_function_may_close_over_a_buffer():
    buffer = jaxbuf.add(create(jaxbuf.Uniform()), items(3.0))
    key = jax.random.key(0)
    drawn = jax.jit(lambda shift: jaxbuf.sample(buffer, key, 4).data["reward"] + shift)(1.0)
    np.testing.assert_array_equal(drawn, jaxbuf.sample(buffer, key, 4).data["reward"] + 1.0)


def test_many_lengths_warn_once_and_say_what_to_do():
    # No other test has a buffer of this configuration, so the count begins here.
    def make():
        return jaxbuf.ItemBuffer.create({"length": jnp.float32(0)}, 1213)

    def add(buffer, lengths):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for length in lengths:
                buffer = jaxbuf.add(buffer, {"length": jnp.zeros(length)})
        return buffer, caught

    buffer, caught = add(make(), [*range(1, 10), *range(1, 10)])
    assert not caught
    # Under a filter that turns warnings into errors, the buffer is still there.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="for 10 different shapes"):
            jaxbuf.add(buffer, {"length": jnp.zeros(10)})
    buffer, caught = add(buffer, range(10, 14))
    assert not caught
    assert int(buffer.size) == 2 * 45 + sum(range(10, 14))

    padded = {"length": jnp.zeros(16)}
    for length in range(1, 17):
        buffer = jaxbuf.add(buffer, padded, mask=np.arange(16) < length)
    rings = jaxbuf.TrajectoryBuffer.create({"length": jnp.float32(0)}, 1, 1213)
    for length in range(1, 10):
        rings = jaxbuf.add(rings, {"length": jnp.zeros((1, length))})
    with pytest.warns(UserWarning, match=r"pad rows to a few sizes, .* with mask=") as told:
        rings = jaxbuf.add(rings, {"length": jnp.zeros((1, 10))})
    assert [warning.filename for warning in told] == [__file__]

"""The sampler `Staleness`: what was not drawn for long is drawn first."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbuf
from jaxbuf import testing
from tests.models.staleness import stale_law
from tests.traces import large_outside_of_branches

KEY = jax.random.key(0)


def filled(times, now, capacity=None, **options):
    """A buffer whose items were last drawn, or added, in these batches of ``now`` in all."""
    sampler = jaxbuf.Staleness(**options)
    buffer = jaxbuf.ItemBuffer.create(jnp.int32(0), capacity or len(times), sampler=sampler)
    buffer = buffer.add(jnp.arange(len(times), dtype=jnp.int32))
    last = buffer.sampler_state.last.at[: len(times)].set(jnp.asarray(times, jnp.uint32))
    state = buffer.sampler_state.replace(last=last, batches=jnp.uint32(now))
    return buffer.replace(sampler_state=state)


def law_of(buffer):
    """The probability of every slot."""
    slot = jnp.arange(buffer.occupancy.capacity, dtype=jnp.int32)
    known = buffer.sampler.probability(buffer.sampler_state, slot, buffer.occupancy)
    return np.where(buffer.occupancy.live(slot), known, 0.0)


TIMES = (3, 0, 7, 7, 5, 1, 7)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0, 2.0])
def test_probabilities_are_powers_of_the_time_since_the_last_draw(alpha):
    buffer = filled(TIMES, 7, 9, alpha=alpha)
    testing.assert_valid(buffer)
    ages = np.array([4, 7, 0, 0, 2, 6, 0])
    masses = np.where(ages > 0, ages.astype(float) ** alpha, 0)
    expected = masses / masses.sum()
    np.testing.assert_allclose(law_of(buffer), [*expected, 0, 0], rtol=1e-5)
    np.testing.assert_allclose(stale_law(TIMES, 7, alpha), expected, rtol=1e-12)
    batch = buffer.sample(KEY, 32)
    np.testing.assert_allclose(batch.probability, expected[batch.data], rtol=1e-5)
    np.testing.assert_allclose(buffer.get(batch.slots).probability, batch.probability, rtol=1e-6)
    support = buffer.support()
    assert support.count == 4
    np.testing.assert_allclose(
        support.least_probability, masses[masses > 0].min() / masses.sum(), rtol=2e-7
    )


@pytest.mark.parametrize("stratified", [True, False])
def test_draws_have_the_law(stratified):
    buffer = filled(TIMES, 7, 9, stratified=stratified)
    law = [*stale_law(TIMES, 7), 0, 0]
    for batch_size in (1, 13):
        testing.assert_distribution(
            buffer, KEY, law, draws=20_000 // batch_size, batch_size=batch_size
        )


def test_all_items_are_equally_likely_if_the_last_batch_had_all():
    for now in (0, 4):
        buffer = filled([now] * 5, now, 6)
        np.testing.assert_allclose(law_of(buffer), [1 / 5] * 5 + [0], rtol=1e-6)
        testing.assert_distribution(buffer, KEY, [1 / 5] * 5 + [0], draws=2000, batch_size=5)
        assert buffer.support().count == 5


def test_next_batch_counts_and_sample_does_not():
    buffer = filled([0] * 8, 0)
    same = buffer.sample(KEY, 3)
    after, batch = buffer.next_batch(KEY, 3)
    np.testing.assert_array_equal(same.data, batch.data)
    metrics = after.metrics()
    assert metrics["batches_since_drawn_max"] == 1
    rest = 8 - len(set(batch.data.tolist()))
    assert metrics["batches_since_drawn_mean"] == pytest.approx(rest / 8)
    assert buffer.metrics()["batches_since_drawn_max"] == 0
    expected = np.where(np.isin(np.arange(8), batch.data), 0, 1 / rest)
    np.testing.assert_allclose(law_of(after), expected, rtol=1e-6)


def test_no_item_waits_for_ever():
    buffer = filled([0] * 50, 0, replacement=False)
    seen = []
    for seed in range(30):
        buffer, batch = jaxbuf.next_batch(buffer, jax.random.key(seed), 5)
        seen.append(batch.data)
    # Every item comes about three times in 30 batches of 5; uniform draws would miss two of 50.
    assert np.bincount(np.concatenate(seen), minlength=50).min() >= 1


def test_the_count_of_batches_wraps():
    near = 2**32 - 2
    buffer = filled([near - 5, near, near - 1], near)
    for seed in range(4):
        buffer, batch = buffer.next_batch(jax.random.key(seed), 1)
    assert buffer.sampler_state.batches == 2
    ages = np.array([9, 4, 5])
    for slot in range(3):
        age = (2 - int(buffer.sampler_state.last[slot])) % 2**32
        assert age <= ages[slot]
    assert buffer.metrics()["batches_since_drawn_max"] <= 9
    assert law_of(buffer)[batch.data[0]] == 0
    testing.assert_valid(buffer)


def test_extreme_exponents():
    buffer = filled([0, 1, 2, 999_999], 1_000_000, alpha=1e300)
    assert buffer.support().count == 4
    assert (buffer.sample(KEY, 16).data == 0).all()
    testing.assert_valid(buffer)


def test_windows_wait():
    buffer = jaxbuf.TrajectoryBuffer.create(
        jnp.int32(0), 2, 6, sequence_length=2, sampler=jaxbuf.Staleness(replacement=False)
    )
    buffer = buffer.add(jnp.arange(8).reshape(2, 4))
    testing.assert_valid(buffer)
    buffer, batch = buffer.next_batch(KEY, 4)
    _, other = buffer.next_batch(KEY, 2)
    both = np.concatenate([batch.data, other.data])
    assert sorted(map(tuple, both.tolist())) == [(0, 1), (1, 2), (2, 3), (4, 5), (5, 6), (6, 7)]
    testing.assert_valid(buffer.add(jnp.arange(16).reshape(2, 8)))


def test_bad_configuration():
    with pytest.raises(ValueError, match="has no priorities"):
        filled(TIMES, 7).add(jnp.array([1]), priority=jnp.ones(1))
    assert jaxbuf.Staleness(np.float32(0.5)) == jaxbuf.Staleness(0.5)


def test_draws_under_vmap_compute_the_masses_of_a_shared_buffer_once():
    slots = 1 << 16
    sampler = jaxbuf.Staleness(replacement=False)
    create = functools.partial(jaxbuf.ItemBuffer.create, jnp.int32(0), slots, sampler=sampler)
    buffer = jax.eval_shape(create)

    def passes(draw, keys):
        text = jax.jit(draw).lower(buffer, keys).compile().as_text()
        found = [(x.opcode, x.type) for x in large_outside_of_branches(text, slots)]
        # Ages are integers, of which an older XLA makes one more pass.
        return [(opcode, kind) for opcode, kind in found if kind.startswith("f32")]

    def draw(buffer, key):
        return buffer.sample(key, 8).slots

    one = passes(draw, jax.random.key(0))
    assert passes(jax.vmap(draw, (None, 0)), jax.random.split(jax.random.key(0), 3)) == one

"""The sampler `Staleness`: what counts as a draw; `test_every_sampler.py` has its law."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbuf
from jaxbuf import testing
from tests.strategies.test_every_sampler import KEY, law_of, waiting
from tests.traces import large_outside_of_branches


def test_next_batch_counts_and_sample_does_not():
    buffer = waiting(jaxbuf.Staleness(), [0] * 8, 0, 8)
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


def test_the_count_of_batches_wraps():
    near = 2**32 - 2
    buffer = waiting(jaxbuf.Staleness(), [near - 5, near, near - 1], near)
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
    buffer = waiting(jaxbuf.Staleness(1e300), [0, 1, 2, 999_999], 1_000_000)
    assert buffer.support().count == 4
    assert (buffer.sample(KEY, 16).data == 0).all()
    testing.assert_valid(buffer)


@pytest.mark.slow
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

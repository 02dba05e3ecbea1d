"""The sampler `Softmax`: exact probabilities, extreme scores, draws without replacement."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbuf
from tests.operations import quick
from tests.strategies.test_every_sampler import KEY, assert_counts, filled

INF = float("inf")


def fill(scores, capacity=None, **options):
    return filled(jaxbuf.Softmax(**options), scores, capacity or len(scores))


def softmax(scores, temperature=1.0):
    scaled = np.asarray(scores, np.float64) / temperature
    mass = np.exp(scaled - scaled.max())
    return mass / mass.sum()


@pytest.mark.parametrize("temperature", [1.0, 0.25, 10.0])
@pytest.mark.parametrize("shift", [0.0, -5000.0, 1e6])
def test_draws_with_replacement_have_exactly_the_softmax(temperature, shift):
    scores = np.arange(5.0) + shift
    sample = jaxbuf.sample(fill(scores, 8, temperature=temperature), KEY, 20_000)
    expected = softmax(scores, temperature)
    assert sample.valid.all()
    np.testing.assert_allclose(sample.probability, expected[sample.data], rtol=1e-5)
    assert_counts(np.bincount(sample.data, minlength=5), expected * 20_000)


@pytest.mark.parametrize("replacement", quick([True, False], {False}))
def test_infinite_scores(replacement):
    buffer = fill([3, INF, -INF, INF, 1], replacement=replacement)
    sample = jaxbuf.sample(buffer, KEY, 64)
    drawn = sample.data[sample.valid].tolist()
    assert replacement or set(drawn[:2]) == {1, 3}
    assert set(drawn) == ({1, 3} if replacement else {0, 1, 3, 4})
    assert buffer.support().count == len(set(drawn))
    np.testing.assert_array_equal(sample.probability[:2], 0.5)
    nothing = jaxbuf.sample(fill([-INF, -INF], replacement=replacement), KEY, 4)
    assert not nothing.valid.any()
    np.testing.assert_array_equal(nothing.probability, 0)


@pytest.mark.parametrize("temperature", [3e37, 3e38, jaxbuf.Varying(3e38)])
def test_the_highest_temperatures_draw_all_alike(temperature):
    sampler = jaxbuf.Softmax(temperature=temperature)
    buffer = jaxbuf.ItemBuffer.create(jnp.int32(0), 8, sampler=sampler)
    buffer, slots = buffer.insert(jnp.arange(3), score=jnp.array([0.0, 5.0, -INF]))
    np.testing.assert_allclose(buffer.get(slots).probability, [0.5, 0.5, 0])
    assert buffer.sample(KEY, 4).valid.all()
    jaxbuf.testing.assert_valid(buffer)


@pytest.mark.parametrize("replacement", quick([True, False], {False}))
def test_an_item_that_is_never_drawn_has_probability_0_in_every_mixture(replacement):
    softmax = jaxbuf.Softmax(replacement=replacement)
    # A mass that vanishes is drawn only without replacement.
    drawn = 2 if replacement else 3
    for sampler in (softmax, jaxbuf.Blend((softmax,), (1,)), jaxbuf.Recent(0.0, 1, softmax)):
        buffer = jaxbuf.ItemBuffer.create(jnp.int32(0), 8, sampler=sampler)
        scores = jnp.array([0.0, 0.0, -INF, -300.0])
        buffer, slots = buffer.insert(jnp.arange(4), score=scores)
        probability = buffer.get(slots).probability
        assert (probability > 0).tolist() == [True, True, False, not replacement]
        assert buffer.support().count == drawn
        assert buffer.can_sample(drawn)
        assert not buffer.can_sample(drawn + 1)
        if replacement:
            batch = buffer.sample(KEY, 4)
            weights = jaxbuf.importance_weights(buffer, batch, 1.0, normalize="buffer")
            np.testing.assert_allclose(weights, 1.0)


def test_the_fallback():
    with pytest.raises(ValueError, match="fallback"):
        jaxbuf.Softmax(fallback=True)
    buffer = fill([1, 2, 3], 9, replacement=False, fallback=True)
    assert sorted(jaxbuf.sample(buffer, KEY, 3).data.tolist()) == [0, 1, 2]
    sample = jaxbuf.sample(buffer, KEY, 12)
    assert sample.valid.all()
    assert set(sample.data.tolist()) <= {0, 1, 2}


def test_the_highest_may_rise_and_fall_by_any_amount():
    buffer = fill([0.0], 2)
    for low, high in ((1e5, 1e5 + 1), (-3e38, 3e38), (-9e4, -9e4 - 2), (INF, 1), (-INF, -7)):
        buffer = jaxbuf.add(
            buffer, jnp.array([0, 1], jnp.int32), score=jnp.array([low, high], jnp.float32)
        )
        sample = jaxbuf.sample(buffer, KEY, 32)
        assert sample.valid.all()
        scores = np.float64([np.float32(low), np.float32(high)])
        with np.errstate(invalid="ignore"):
            expected = np.float64([1, 0]) if low == INF else softmax(scores)
        np.testing.assert_allclose(sample.probability, expected[sample.data], rtol=1e-5)


def test_many_slots_without_replacement_are_all_reached():
    sample = jaxbuf.sample(fill(np.zeros(1000), replacement=False), KEY, 1000)
    assert sorted(sample.data.tolist()) == [*range(1000)]
    best = fill(np.where(np.arange(1000) % 250 == 7, 500.0, 0.0), replacement=False)
    sample = jaxbuf.sample(best, jax.random.key(1), 4)
    assert sorted(sample.data.tolist()) == [7, 257, 507, 757]

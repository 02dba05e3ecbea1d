"""The sampler `Softmax`: exact probabilities, extreme scores, draws without replacement."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import jaxbuf

INF = float("inf")


def fill(scores, capacity=None, **options):
    scores = jnp.asarray(scores, jnp.float32)
    buffer = jaxbuf.ItemBuffer.create(
        jnp.int32(0), capacity or len(scores), sampler=jaxbuf.Softmax(**options)
    )
    return jaxbuf.add(buffer, jnp.arange(len(scores), dtype=jnp.int32), score=scores)


def softmax(scores, temperature=1.0):
    scaled = np.asarray(scores, np.float64) / temperature
    mass = np.exp(scaled - scaled.max())
    return mass / mass.sum()


@pytest.mark.parametrize("temperature", [1.0, 0.25, 10.0])
@pytest.mark.parametrize("shift", [0.0, -5000.0, 1e6])
def test_draws_with_replacement_have_exactly_the_softmax(temperature, shift):
    scores = np.arange(5.0) + shift
    sample = jaxbuf.sample(fill(scores, 8, temperature=temperature), jax.random.key(0), 20_000)
    expected = softmax(scores, temperature)
    assert sample.valid.all()
    np.testing.assert_allclose(sample.probability, expected[sample.data], rtol=1e-5)
    counts = np.bincount(sample.data, minlength=5)
    likely = expected * 20_000 > 5
    assert counts[~likely].sum() <= 30
    observed = np.append(counts[likely], counts[~likely].sum() + 1e-9)
    model = np.append(expected[likely], expected[~likely].sum()) * 20_000
    model[-1] += 1e-9
    assert stats.chisquare(observed, model * observed.sum() / model.sum()).pvalue > 1e-3


def test_published_probabilities():
    sample = jaxbuf.sample(fill(range(5), replacement=False), jax.random.key(0), 5)
    order = np.argsort(sample.data)
    np.testing.assert_allclose(
        np.asarray(sample.probability)[order], [0.0117, 0.0317, 0.0861, 0.2341, 0.6364], atol=5e-5
    )


def test_without_replacement_from_scores_far_apart():
    buffer = fill([0, -200, -200, -200], replacement=False)
    keys = jax.random.split(jax.random.key(1), 3000)
    sample = jax.jit(jax.vmap(lambda key: buffer.sample(key, 2)))(keys)
    assert sample.valid.all()
    assert (sample.probability > 0).all()
    assert (sample.data[:, 0] == 0).all()
    counts = np.bincount(sample.data[:, 1], minlength=4)
    assert counts[0] == 0
    assert stats.chisquare(counts[1:]).pvalue > 1e-3


@pytest.mark.parametrize("replacement", [True, False])
def test_infinite_scores(replacement):
    buffer = fill([3, INF, -INF, INF, 1], replacement=replacement)
    sample = jaxbuf.sample(buffer, jax.random.key(0), 64)
    drawn = sample.data[sample.valid].tolist()
    if replacement:
        assert set(drawn) == {1, 3}
        np.testing.assert_array_equal(sample.probability, 0.5)
    else:
        assert sorted(drawn) == [0, 1, 3, 4]
        assert set(drawn[:2]) == {1, 3}
        assert buffer.support().count == 4
    nothing = jaxbuf.sample(fill([-INF, -INF], replacement=replacement), jax.random.key(0), 4)
    assert not nothing.valid.any()
    np.testing.assert_array_equal(nothing.probability, 0)


@pytest.mark.parametrize("temperature", [3e37, 3e38, jaxbuf.Varying(3e38)])
def test_the_highest_temperatures_draw_all_alike(temperature):
    sampler = jaxbuf.Softmax(temperature=temperature)
    buffer = jaxbuf.ItemBuffer.create(jnp.int32(0), 8, sampler=sampler)
    buffer, slots = buffer.insert(jnp.arange(3), score=jnp.array([0.0, 5.0, -INF]))
    np.testing.assert_allclose(buffer.get(slots).probability, [0.5, 0.5, 0])
    assert buffer.sample(jax.random.key(0), 4).valid.all()
    jaxbuf.testing.assert_valid(buffer)


@pytest.mark.parametrize("replacement", [True, False])
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
            batch = buffer.sample(jax.random.key(0), 4)
            weights = jaxbuf.importance_weights(buffer, batch, 1.0, normalize="buffer")
            np.testing.assert_allclose(weights, 1.0)


def test_missing_rows_and_the_fallback():
    sample = jaxbuf.sample(fill([1, 2, 3], 9, replacement=False), jax.random.key(0), 12)
    assert sample.valid.tolist() == [True] * 3 + [False] * 9
    assert (sample.slots.index[3:] == 9).all()
    buffer = fill([1, 2, 3], 9, replacement=False, fallback=True)
    assert sorted(jaxbuf.sample(buffer, jax.random.key(0), 3).data.tolist()) == [0, 1, 2]
    sample = jaxbuf.sample(buffer, jax.random.key(0), 12)
    assert sample.valid.all()
    assert set(sample.data.tolist()) <= {0, 1, 2}


def test_the_highest_may_rise_and_fall_by_any_amount():
    buffer = fill([0.0], 2)
    for low, high in ((1e5, 1e5 + 1), (-3e38, 3e38), (-9e4, -9e4 - 2), (INF, 1), (-INF, -7)):
        buffer = jaxbuf.add(
            buffer, jnp.array([0, 1], jnp.int32), score=jnp.array([low, high], jnp.float32)
        )
        sample = jaxbuf.sample(buffer, jax.random.key(0), 32)
        assert sample.valid.all()
        scores = np.float64([np.float32(low), np.float32(high)])
        with np.errstate(invalid="ignore"):
            expected = np.float64([1, 0]) if low == INF else softmax(scores)
        np.testing.assert_allclose(sample.probability, expected[sample.data], rtol=1e-5)


def test_many_slots_without_replacement_are_all_reached():
    buffer = fill(np.zeros(1000), replacement=False)
    sample = jaxbuf.sample(buffer, jax.random.key(0), 5)
    assert len(set(sample.data.tolist())) == 5
    assert sorted(jaxbuf.sample(buffer, jax.random.key(0), 1000).data.tolist()) == [*range(1000)]
    best = fill(np.where(np.arange(1000) % 250 == 7, 500.0, 0.0), replacement=False)
    sample = jaxbuf.sample(best, jax.random.key(1), 4)
    assert sorted(sample.data.tolist()) == [7, 257, 507, 757]


def test_metrics_and_clear():
    buffer = fill([1.0, 3.0], 4)
    metrics = buffer.metrics()
    assert (metrics["score_min"], metrics["score_max"], metrics["score_mean"]) == (1, 3, 2)
    share = softmax([1, 3])
    assert metrics["effective_sample_size"] == pytest.approx(1 / (share**2).sum(), rel=1e-5)
    cleared = buffer.clear()
    assert not jaxbuf.sample(cleared, jax.random.key(0), 2).valid.any()
    assert cleared.metrics()["effective_sample_size"] == 0


def test_bad_configuration():
    with pytest.raises(ValueError, match="fallback"):
        jaxbuf.Softmax(fallback=True)
    assert jaxbuf.Softmax(temperature=np.float32(0.5)) == jaxbuf.Softmax(temperature=0.5)


def test_a_missing_score_and_nan():
    buffer = fill([1.0, 2.0], 4)
    with pytest.raises(ValueError, match="pass score"):
        buffer.add(jnp.array([1], jnp.int32))
    nan = jnp.array([np.nan, 5.0], jnp.float32)
    buffer = jaxbuf.add(buffer, jnp.array([8, 9], jnp.int32), score=nan)
    assert buffer.metrics()["rejected"] == 1
    assert buffer.size == 3

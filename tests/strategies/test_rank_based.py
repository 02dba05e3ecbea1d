"""The sampler `RankBased`: ranks, ties, outliers, seldom sorts, scores, and draws from the law."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbuf
from jaxbuf import testing
from tests.models import items as reference
from tests.models.ranks import by_rank

INF = float("inf")
KEY = jax.random.key(0)
PRIORITIES = (0.5, 0.0, 3.0, 1.0, 8.0, 1.0, 2.0)


def filled(values, capacity=None, by="priority", **options):
    """A buffer that holds the row numbers of the values as its items."""
    values = jnp.asarray(values, jnp.float32)
    buffer = jaxbuf.ItemBuffer.create(
        jnp.int32(0), capacity or len(values), sampler=jaxbuf.RankBased(by=by, **options)
    )
    return buffer.add(jnp.arange(len(values), dtype=jnp.int32), **{by: values})


def law_of(buffer):
    """The probability of every slot."""
    slot = jnp.arange(buffer.capacity, dtype=jnp.int32)
    known = buffer.sampler.probability(buffer.sampler_state, slot, buffer.occupancy)
    return np.where(buffer.occupancy.live(slot), known, 0.0)


def shares(masses):
    return np.asarray(masses) / np.sum(masses)


@pytest.mark.parametrize(
    ("alpha", "by"),
    [(0.0, "priority"), (0.5, "score"), (0.7, "priority"), (1.0, "score"), (3.0, "priority")],
)
def test_probabilities_are_powers_of_the_ranks(alpha, by):
    ranks = np.array([6, 7, 2, 4, 1, 5, 3])
    buffer = filled(PRIORITIES, 9, by, alpha=alpha)
    testing.assert_valid(buffer)
    expected = shares(1.0 / ranks**alpha)
    np.testing.assert_allclose(law_of(buffer), [*expected, 0, 0], rtol=1e-5)
    np.testing.assert_allclose(shares(by_rank(PRIORITIES, alpha)), expected, rtol=1e-12)
    batch = buffer.sample(KEY, 64)
    np.testing.assert_allclose(batch.probability, expected[batch.data], rtol=1e-5)
    support = buffer.support()
    assert support.count == 7
    np.testing.assert_allclose(support.least_probability, expected.min(), rtol=1e-5)


@pytest.mark.parametrize("replacement", [True, False])
def test_an_outlier_is_drawn_no_more_often_than_any_first_rank(replacement):
    values = np.ones(64)
    values[40] = 500.0
    buffer = filled(values, alpha=0.7, replacement=replacement)
    first = 1.0 / np.sum(np.arange(1, 65.0) ** -0.7)
    np.testing.assert_allclose(law_of(buffer)[40], first, rtol=1e-5)
    law = shares(by_rank(values, 0.7))
    testing.assert_distribution(buffer, KEY, law, draws=20_000, batch_size=1, significance=1e-4)
    proportional = jaxbuf.ItemBuffer.create(
        jnp.int32(0), 64, sampler=jaxbuf.Prioritized(alpha=1.0)
    ).add(jnp.arange(64), priority=jnp.asarray(values, jnp.float32))
    assert law_of(proportional)[40] > 0.88 > 5 * first


@pytest.mark.parametrize(("by", "stratified"), [("priority", True), ("score", False)])
def test_draws_have_the_law(by, stratified):
    buffer = filled(PRIORITIES, 9, by, stratified=stratified)
    law = np.pad(shares(by_rank(PRIORITIES, 0.7)), (0, 2))
    for batch_size in (1, 13):
        testing.assert_distribution(
            buffer, KEY, law, draws=20_000 // batch_size, batch_size=batch_size, significance=1e-4
        )


def test_only_strata_draw_every_item_as_often_as_any_other():
    for stratified in (True, False):
        buffer = filled(np.arange(64.0), alpha=0.0, stratified=stratified)
        drawn = {*buffer.sample(KEY, 64).slots.index.tolist()}
        assert (len(drawn) == 64) == stratified


def test_without_replacement_every_item_comes_once_whatever_its_rank():
    buffer = filled(np.arange(200.0), 256, alpha=3.0, replacement=False)
    batch = buffer.sample(KEY, 210)
    assert sorted(batch.data[batch.valid].tolist()) == [*range(200)]
    assert batch.valid.tolist() == [True] * 200 + [False] * 10
    assert (batch.probability[:200] > 0).all()


def test_ranks_far_down_are_never_lost():
    buffer = filled(np.arange(1000.0), alpha=200.0)
    assert (buffer.sample(KEY, 64).data == 999).all()
    assert buffer.support().count == 1000
    testing.assert_valid(buffer)
    testing.assert_valid(filled(np.arange(40.0), alpha=1e300))


@pytest.mark.parametrize("capacity", [1, 2, 2**10, 2**10 + 1, 2**17 + 3])
def test_ranks_are_exact_for_every_capacity(capacity):
    rng = np.random.default_rng(capacity)
    magnitudes = np.exp(rng.normal(0, 20, capacity)) * rng.choice([-1, 1], capacity)
    values = np.where(rng.random(capacity) < 0.5, magnitudes, rng.integers(-3, 3, capacity))
    values = values.astype(np.float32)
    buffer = filled(values, by="score", alpha=1.0)
    rank = np.empty(capacity)
    rank[np.argsort(-values, kind="stable")] = np.arange(1, capacity + 1)
    assert (np.rint(1 / np.asarray(buffer.sampler_state.masses.leaves)) == rank).all()


def test_infinite_scores_have_ranks():
    buffer = filled([-INF, 3.0, INF, -3e38, INF, -5.0], 8, "score", alpha=1.0)
    ranks = np.array([6, 3, 1, 5, 2, 4])
    np.testing.assert_allclose(law_of(buffer), [*shares(1 / ranks), 0, 0], rtol=1e-6)
    testing.assert_valid(buffer)


def test_windows_have_ranks():
    buffer = jaxbuf.TrajectoryBuffer.create(
        jnp.int32(0), 2, 6, sequence_length=2, sampler=jaxbuf.RankBased(alpha=1.0)
    )
    priority = jnp.array([[9.0, 1.0, 2.0, 3.0], [9.0, 6.0, 5.0, 4.0]])
    buffer = buffer.add(jnp.arange(8).reshape(2, 4), priority=priority)
    testing.assert_valid(buffer)
    expected = shares([1 / 6, 1 / 5, 1 / 4, 1, 1 / 2, 1 / 3])
    np.testing.assert_allclose(law_of(buffer)[law_of(buffer) > 0], expected, rtol=1e-6)
    buffer = buffer.add(jnp.arange(16).reshape(2, 8))
    testing.assert_valid(buffer)
    assert buffer.sample(KEY, 4).valid.all()


@pytest.mark.parametrize("by", ["priority", "score"])
def test_metrics(by):
    metrics = filled([4.0, 1.0, 1.0], 5, by, alpha=1.0).metrics()
    assert metrics[f"{by}_min"] == 1
    assert metrics[f"{by}_max"] == 4
    assert metrics[f"{by}_mean"] == 2
    expected = reference.effective_sample_size([1, 1 / 2, 1 / 3])
    assert metrics["effective_sample_size"] == pytest.approx(expected, rel=1e-5)


BROKEN = {
    "mass of an empty slot": ("masses", 4, 0.1, "expected 0, empty slot"),
    "no mass of an item": ("masses", 1, 0.0, "expected above 0, the slot holds an item"),
    "another rank": ("masses", 1, 0.9, "expected 0.6155722, the mass of its rank"),
    "value of an empty slot": ("values", 4, 1.0, "expected -inf, empty slot"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_state_that_was_changed_by_hand_is_reported(name):
    field, slot, value, message = BROKEN[name]
    buffer = filled([1.0, 2.0, 3.0], 5)
    state = buffer.sampler_state
    tree = getattr(state, field).set(jnp.array([slot]), jnp.array([value], jnp.float32))
    broken = buffer.replace(sampler_state=state.replace(**{field: tree}))
    with pytest.raises(AssertionError, match=message):
        testing.assert_valid(broken)


def test_numbers_of_numpy_are_as_good():
    assert jaxbuf.RankBased(np.float32(0.5), sort_every=np.int64(2)) == jaxbuf.RankBased(
        0.5, sort_every=2
    )


def test_values_of_the_other_kind_are_refused():
    with pytest.raises(ValueError, match="pass score="):
        filled([1.0, 2.0], 4, "score").add(jnp.array([1]))
    with pytest.raises(ValueError, match="by the scores that add takes"):
        filled([1.0, 2.0], 4, "score").add(jnp.array([1]), score=jnp.ones(1), priority=jnp.ones(1))
    with pytest.raises(ValueError, match="score"):
        filled([1.0, 2.0], 4).add(jnp.array([1]), score=jnp.ones(1))
    with pytest.raises(ValueError, match="needs scores, which steps do not have"):
        jaxbuf.TrajectoryBuffer.create(jnp.int32(0), 2, 4, sampler=jaxbuf.RankBased(by="score"))

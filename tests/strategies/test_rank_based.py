"""The sampler `RankBased`: outliers, far ranks, its state; `test_every_sampler.py` has its law."""

import jax.numpy as jnp
import numpy as np
import pytest

import jaxbuf
from jaxbuf import testing
from tests.models.ranks import by_rank
from tests.strategies.test_every_sampler import KEY, filled, law_of, shares


def ranked(values, capacity=None, by="priority", **options):
    return filled(jaxbuf.RankBased(by=by, **options), values, capacity or len(values))


@pytest.mark.slow
@pytest.mark.parametrize("replacement", [True, False])
def test_an_outlier_is_drawn_no_more_often_than_any_first_rank(replacement):
    values = np.where(np.arange(64) == 40, 500.0, 1.0)
    buffer = ranked(values, alpha=0.7, replacement=replacement)
    first = 1.0 / np.sum(np.arange(1, 65.0) ** -0.7)
    np.testing.assert_allclose(law_of(buffer)[40], first, rtol=1e-5)
    law = shares(by_rank(values, 0.7))
    testing.assert_distribution(buffer, KEY, law, draws=20_000, batch_size=1, significance=1e-4)


def test_only_strata_draw_every_item_as_often_as_any_other():
    for stratified in (True, False):
        buffer = ranked(np.arange(64.0), alpha=0.0, stratified=stratified)
        drawn = {*buffer.sample(KEY, 64).slots.index.tolist()}
        assert (len(drawn) == 64) == stratified


def test_ranks_far_down_are_never_lost():
    buffer = ranked(np.arange(1000.0), alpha=200.0)
    assert (buffer.sample(KEY, 64).data == 999).all()
    assert buffer.support().count == 1000
    testing.assert_valid(buffer)
    testing.assert_valid(ranked(np.arange(40.0), alpha=1e300))


@pytest.mark.parametrize("capacity", [1, 2, 2**10, 2**10 + 1, 2**17 + 3])
def test_ranks_are_exact_for_every_capacity(capacity):
    rng = np.random.default_rng(capacity)
    magnitudes = np.exp(rng.normal(0, 20, capacity)) * rng.choice([-1, 1], capacity)
    values = np.where(rng.random(capacity) < 0.5, magnitudes, rng.integers(-3, 3, capacity))
    values = values.astype(np.float32)
    buffer = ranked(values, by="score", alpha=1.0)
    rank = np.empty(capacity)
    rank[np.argsort(-values, kind="stable")] = np.arange(1, capacity + 1)
    assert (np.rint(1 / np.asarray(buffer.sampler_state.masses.leaves)) == rank).all()


BROKEN = {
    "mass of an empty slot": ("masses", 4, 0.1, "expected 0, empty slot"),
    "no mass of an item": ("masses", 1, 0.0, "expected above 0, the slot holds an item"),
    "another rank": ("masses", 1, 0.9, "expected 0.6155722, the mass of its rank"),
    "value of an empty slot": ("values", 4, 1.0, "expected -inf, empty slot"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_state_that_was_changed_by_hand_is_reported(name):
    field, slot, value, message = BROKEN[name]
    buffer = ranked([1.0, 2.0, 3.0], 5)
    state = buffer.sampler_state
    tree = getattr(state, field).set(jnp.array([slot]), jnp.array([value], jnp.float32))
    broken = buffer.replace(sampler_state=state.replace(**{field: tree}))
    with pytest.raises(AssertionError, match=message):
        testing.assert_valid(broken)


def test_values_of_the_other_kind_are_refused():
    with pytest.raises(ValueError, match="by the scores that add takes"):
        ranked([1.0, 2.0], 4, "score").add(jnp.array([1]), score=jnp.ones(1), priority=jnp.ones(1))
    with pytest.raises(ValueError, match="score"):
        ranked([1.0, 2.0], 4).add(jnp.array([1]), score=jnp.ones(1))

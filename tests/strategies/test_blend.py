"""The sampler `Blend`: its law, numbers of rows, samplers that cannot draw, and what it refuses."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbuf
from jaxbuf import testing
from tests.models.blend import blended
from tests.operations import quick
from tests.strategies.test_every_sampler import (
    HALVES,
    KEY,
    NEWEST,
    PRIORITIES,
    PROPORTIONAL,
    SEVENTH,
    UNIFORM,
    filled,
    law_of,
    shares,
)

INF = float("inf")


@pytest.mark.parametrize("batch_size", quick([1, 2, 7, 10, 256], {7}))
def test_each_sampler_draws_its_share_rounded_up_or_down(batch_size):
    first, second = jaxbuf.Recent(1.0, 1), jaxbuf.RankBased(alpha=300.0)
    buffer = filled(jaxbuf.Blend((first, second, UNIFORM), (0.55, 0.45, 0)))
    keys = jax.random.split(KEY, 2000)
    drawn = np.asarray(jax.jit(jax.vmap(lambda key: buffer.sample(key, batch_size)))(keys).data)
    rows = np.sum(drawn == 6, axis=1)
    assert (rows + np.sum(drawn == 4, axis=1) == batch_size).all()
    assert set(rows.tolist()) <= {int(0.55 * batch_size), int(0.55 * batch_size) + 1}
    # Rounded so that the mean is exact; its standard error is at most 1/2 / sqrt(2000).
    assert abs(rows.mean() - 0.55 * batch_size) < 0.05
    # And no row is more often of one sampler than another row.
    of_row = np.mean(drawn == 6, axis=0)
    assert np.abs(of_row - 0.55).max() < 5 * np.sqrt(0.25 / 2000)


def test_the_probability_of_recent_rows_is_that_of_the_batch():
    # In a batch of 3, Recent draws round(1.2) = 1 of the newest: a third, and not 0.4.
    sampler = jaxbuf.Blend((jaxbuf.Recent(0.4, 1), PROPORTIONAL), (0.5, 0.5))
    buffer = filled(sampler)
    newest = np.eye(7)[6]
    recent = newest / 3 + SEVENTH * 2 / 3
    law = blended([recent, shares(PRIORITIES)], (0.5, 0.5))
    batch = buffer.sample(KEY, 3)
    np.testing.assert_allclose(batch.probability, law[batch.data], rtol=1e-5)
    testing.assert_distribution(buffer, KEY, [*law, 0, 0], draws=8000, batch_size=3)
    nested = filled(jaxbuf.Blend((sampler, UNIFORM), (0.5, 0.5))).sample(KEY, 3)
    np.testing.assert_allclose(nested.probability, (law / 2 + SEVENTH / 2)[nested.data], rtol=1e-5)


def test_a_sampler_that_can_draw_nothing_leaves_its_rows_to_the_others():
    by_score = jaxbuf.Blend((jaxbuf.Softmax(), UNIFORM, jaxbuf.Softmax(2.0)), (0.6, 0.3, 0.1))
    buffer = filled(by_score, [-INF] * 5, 6)
    batch = buffer.sample(KEY, 16)
    assert batch.valid.all()
    np.testing.assert_allclose(batch.probability, 1 / 5, rtol=1e-6)
    np.testing.assert_allclose(buffer.get(batch.slots).probability, 1 / 5, rtol=1e-6)
    testing.assert_distribution(buffer, KEY, [1 / 5] * 5 + [0], draws=2000, batch_size=5)
    testing.assert_valid(buffer)
    # One item with a finite score, and both of the others draw nothing but it.
    slots = buffer.latest(5).slots
    buffer = buffer.update_score(slots, jnp.array([-INF, -INF, 1.0, -INF, -INF]))
    expected = [0.06, 0.06, 0.76, 0.06, 0.06, 0]
    np.testing.assert_allclose(law_of(buffer), expected, rtol=1e-5)


def test_if_only_samplers_without_weight_can_draw_nothing_is_drawn():
    buffer = filled(jaxbuf.Blend((jaxbuf.Softmax(), UNIFORM), (1, 0)), [-INF] * 3, 4)
    batch = buffer.sample(KEY, 4)
    assert not batch.valid.any()
    assert not buffer.can_sample()
    np.testing.assert_array_equal(batch.probability, 0)


def test_rows_beyond_the_items_of_a_draw_without_replacement_are_invalid():
    distinct = jaxbuf.Blend((jaxbuf.Uniform(replacement=False), UNIFORM), (0.5, 0.5))
    batch = filled(distinct).sample(KEY, 20)
    assert 10 < batch.valid.sum() < 20
    np.testing.assert_allclose(batch.probability, np.where(batch.valid, 1 / 7, 0), rtol=1e-6)


def test_scores_reach_all_samplers_that_use_them():
    sampler = jaxbuf.Blend((jaxbuf.RankBased(1.0, by="score"), jaxbuf.Softmax()), (0.5, 0.5))
    buffer = jaxbuf.ItemBuffer.create(jnp.int32(0), 3, sampler=sampler, evictor=jaxbuf.Lowest())
    buffer, slots = buffer.insert(jnp.arange(4), score=jnp.array([1.0, 3.0, 2.0, 0.0]))
    buffer = buffer.update_score(slots, jnp.array([5.0, 3.0, 2.0, 9.0]))
    expected = blended([shares([1, 1 / 2, 1 / 3]), shares(np.exp([5.0, 3.0, 2.0]))], (1, 1))
    held = {int(uid): p for uid, p in zip(buffer.data, law_of(buffer), strict=True)}
    assert held == pytest.approx(dict(enumerate(expected)), rel=1e-5)


@dataclasses.dataclass(frozen=True)
class Counts(jaxbuf.strategies.KnownSampler):
    """Draws uniformly, and counts how often each item was drawn."""

    def init(self, capacity):
        return jnp.zeros(capacity, jnp.int32)

    def on_draw(self, state, index):
        return state.at[index].add(1, mode="drop")

    def draw(self, state, key, batch_size, occupancy):
        return UNIFORM.draw((), key, batch_size, occupancy)

    def probability(self, state, index, occupancy):
        return UNIFORM.probability((), index, occupancy)


@pytest.mark.parametrize("nested", quick([False, True], {True}))
def test_next_batch_tells_all_samplers_what_was_drawn(nested):
    sampler = jaxbuf.Blend((Counts(), PROPORTIONAL, Counts()), (0.2, 0.8, 0.0))
    if nested:
        sampler = jaxbuf.Recent(0.5, 1, sampler)
    buffer, expected = filled(sampler), np.zeros(9)
    for seed in range(3):
        same = buffer.sample(jax.random.key(seed), 5)
        buffer, batch = buffer.next_batch(jax.random.key(seed), 5)
        np.testing.assert_array_equal(batch.data, same.data)
        expected += np.bincount(batch.slots.index, minlength=9)
    np.testing.assert_array_equal(buffer.sampler_state[0], expected)
    np.testing.assert_array_equal(buffer.sampler_state[2], expected)
    # Rows that are not valid are nobody's draw.
    empty, batch = buffer.clear().next_batch(KEY, 5)
    assert not batch.valid.any()
    np.testing.assert_array_equal(empty.sampler_state[0], 0)


def test_metrics_are_those_of_all_samplers():
    metrics = filled(jaxbuf.Blend((HALVES, jaxbuf.RankBased()), (1, 1)), [4.0, 1.0, 1.0]).metrics()
    assert metrics["priority_max"] == 4
    assert metrics["priority_min"] == 1
    assert metrics["changes_since_sort"] == 0


def test_a_state_that_was_changed_by_hand_is_reported():
    buffer = filled(jaxbuf.Blend((UNIFORM, HALVES), (1, 1)))
    masses = buffer.sampler_state[1][0].set(jnp.array([8]), jnp.array([2.0]))
    state = (buffer.sampler_state[0], (masses, buffer.sampler_state[1][1]))
    with pytest.raises(AssertionError, match=r"sampler_state\[1\]\[0\].leaves\[8\] is 2.0"):
        testing.assert_valid(buffer.replace(sampler_state=state))


@dataclasses.dataclass(frozen=True)
class OwnNext(Counts):
    """Draws its next batch by itself."""

    def next(self, state, key, batch_size, occupancy):
        draw = self.draw(state, key, batch_size, occupancy)
        return state.at[draw.index].add(1), draw


REFUSED = {
    "no samplers": (lambda: jaxbuf.Blend((), ()), "there are 0 samplers and 0 weights"),
    "numbers": (lambda: jaxbuf.Blend((UNIFORM,), (1, 2)), "1 samplers and 2 weights"),
    "not a list": (lambda: jaxbuf.Blend(UNIFORM, (1,)), "samplers is Uniform.*expected a list"),
    "weights": (lambda: jaxbuf.Blend((UNIFORM,), 1), "weights is 1; expected a list of numbers"),
    "negative": (lambda: jaxbuf.Blend((UNIFORM, UNIFORM), (1, -1)), r"weights\[1\] is -1"),
    "nan": (lambda: jaxbuf.Blend((UNIFORM,), (float("nan"),)), r"weights\[0\] is nan"),
    "zero": (lambda: jaxbuf.Blend((UNIFORM,), (0,)), "weights is .*not all 0"),
    "class": (lambda: jaxbuf.Blend((jaxbuf.Uniform,), (1,)), "is the class Uniform"),
    "evictor": (lambda: jaxbuf.Blend((jaxbuf.Oldest(),), (1,)), r"samplers\[0\] is Oldest\(\)"),
    "shuffled": (
        lambda: jaxbuf.Blend((UNIFORM, jaxbuf.Shuffled()), (1, 1)),
        r"samplers\[1\] is Shuffled\(.*passes would lose the items.*Mixture",
    ),
    "own next": (lambda: jaxbuf.Blend((OwnNext(),), (1,)), "method on_draw in place of next"),
    "both": (
        lambda: jaxbuf.Blend((PROPORTIONAL, jaxbuf.Softmax()), (1, 1)),
        "Prioritized.* draws by priority, and Softmax.* draws by score",
    ),
    "no ages": (
        lambda: filled(jaxbuf.Blend((UNIFORM, NEWEST), (1, 1)), evictor=jaxbuf.Lowest()),
        "Ranking does not keep their order",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    make, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        make()

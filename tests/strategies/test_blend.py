"""The sampler `Blend`: its law, numbers of rows, samplers that cannot draw, and what it refuses."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbuf
from jaxbuf import testing
from tests.models import items as reference
from tests.models.blend import blended
from tests.models.ranks import by_rank

INF = float("inf")
KEY = jax.random.key(0)
PRIORITIES = (0.5, 0.0, 3.0, 1.0, 8.0, 1.0, 2.0)
PROPORTIONAL, UNIFORM = jaxbuf.Prioritized(alpha=1.0), jaxbuf.Uniform()
HALVES = jaxbuf.Blend((PROPORTIONAL, UNIFORM), (0.5, 0.5))
NEWEST = jaxbuf.Recent(1.0, 2)


def filled(sampler, values=PRIORITIES, capacity=9, **options):
    """A buffer that holds the row numbers of the values as its items."""
    values = jnp.asarray(values, jnp.float32)
    buffer = jaxbuf.ItemBuffer.create(jnp.int32(0), capacity, sampler=sampler, **options)
    by = "score" if sampler.uses_score else "priority"
    given = {by: values} if sampler.uses_priority or sampler.uses_score else {}
    return buffer.add(jnp.arange(len(values), dtype=jnp.int32), **given)


@jax.jit
def law_of(buffer):
    """The probability of every slot."""
    slot = jnp.arange(buffer.occupancy.capacity, dtype=jnp.int32)
    known = buffer.sampler.probability(buffer.sampler_state, slot, buffer.occupancy)
    return jnp.where(buffer.occupancy.live(slot), known, 0.0)


def shares(masses):
    return np.asarray(masses) / np.sum(masses)


def by_ranks(values=PRIORITIES):
    return shares(by_rank(values, 0.7))


SEVENTH = np.full(7, 1 / 7)
LAST_TWO = np.array([0, 0, 0, 0, 0, 1 / 2, 1 / 2])
OF_ITEMS = {
    "one": (jaxbuf.Blend((PROPORTIONAL,), (2,)), (shares(PRIORITIES),)),
    "one without weight": (
        jaxbuf.Blend((UNIFORM, PROPORTIONAL, NEWEST), (0, 1, 2)),
        (SEVENTH, shares(PRIORITIES), LAST_TWO),
    ),
    "ranks, sorted out": (
        jaxbuf.Blend((jaxbuf.RankBased(), NEWEST, UNIFORM), (0.3, 0.45, 0.25)),
        (by_ranks(), LAST_TWO, SEVENTH),
    ),
    "in a blend": (
        jaxbuf.Blend((HALVES, jaxbuf.RankBased(stratified=False)), (0.2, 0.8)),
        (shares(PRIORITIES) / 2 + SEVENTH / 2, by_ranks()),
    ),
    "not independent": (
        jaxbuf.Blend((jaxbuf.Prioritized(1.0, stratified=False), jaxbuf.Balanced()), (0.6, 0.4)),
        (shares(PRIORITIES), SEVENTH),
    ),
}


@pytest.mark.parametrize("name", OF_ITEMS)
def test_the_law_is_that_of_the_mixture(name):
    sampler, laws = OF_ITEMS[name]
    buffer = filled(sampler)
    testing.assert_valid(buffer)
    law = blended(laws, sampler.weights)
    np.testing.assert_allclose(law_of(buffer), [*law, 0, 0], rtol=1e-5, atol=1e-9)
    batch = buffer.sample(KEY, 64)
    np.testing.assert_allclose(batch.probability, law[batch.data], rtol=1e-5)
    np.testing.assert_allclose(buffer.get(batch.slots).probability, batch.probability, rtol=1e-6)
    support = buffer.support()
    assert support.count == np.sum(law > 0)
    np.testing.assert_allclose(support.least_probability, law[law > 0].min(), rtol=1e-5)
    size = buffer.metrics()["effective_sample_size"]
    np.testing.assert_allclose(size, reference.effective_sample_size(law), rtol=1e-5)
    testing.assert_distribution(buffer, KEY, [*law, 0, 0], draws=1500, batch_size=13)


def test_uniform_mix_is_a_blend():
    mixed = filled(jaxbuf.Prioritized(alpha=0.6, uniform_mix=0.3))
    blend = filled(jaxbuf.Blend((jaxbuf.Prioritized(alpha=0.6), UNIFORM), (0.7, 0.3)))
    np.testing.assert_allclose(law_of(mixed), law_of(blend), rtol=1e-6)


@pytest.mark.parametrize("batch_size", [1, 2, 7, 10, 256])
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


def test_half_of_a_batch_is_exactly_half():
    buffer = filled(jaxbuf.Blend((jaxbuf.Recent(1.0, 1), jaxbuf.RankBased(300.0)), (1, 1)))
    for seed in range(20):
        data = buffer.sample(jax.random.key(seed), 32).data
        assert np.bincount(data, minlength=7).tolist() == [0, 0, 0, 0, 16, 0, 16]


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
    testing.assert_valid(buffer)
    buffer = buffer.update_score(slots, jnp.array([5.0, 3.0, 2.0, 9.0]))
    testing.assert_valid(buffer)
    expected = blended([shares([1, 1 / 2, 1 / 3]), shares(np.exp([5.0, 3.0, 2.0]))], (1, 1))
    held = {int(uid): p for uid, p in zip(buffer.data, law_of(buffer), strict=True)}
    assert held == pytest.approx(dict(enumerate(expected)), rel=1e-5)
    with pytest.raises(ValueError, match="pass score="):
        buffer.add(jnp.array([1]))


def test_windows_are_drawn_by_priority_and_in_equal_numbers():
    sampler = jaxbuf.Blend((PROPORTIONAL, jaxbuf.Balanced()), (0.5, 0.5))
    buffer = jaxbuf.TrajectoryBuffer.create(jnp.int32(0), 2, 6, sequence_length=2, sampler=sampler)
    mask = jnp.array([[True] * 4, [True] * 2 + [False] * 2])
    priority = jnp.array([[9.0, 1.0, 2.0, 3.0], [9.0, 6.0, 9.0, 9.0]])
    buffer = buffer.add(jnp.arange(8).reshape(2, 4), priority=priority, mask=mask)
    testing.assert_valid(buffer)
    law = blended([shares([1, 2, 3, 6]), [1 / 6, 1 / 6, 1 / 6, 1 / 2]], (1, 1))
    expected = np.zeros(12)
    expected[[0, 1, 2, 6]] = law
    np.testing.assert_allclose(law_of(buffer), expected, rtol=1e-5)
    # The rows of Balanced are sorted by environment.
    testing.assert_distribution(buffer, KEY, expected, draws=3000, batch_size=7)
    buffer = buffer.update_priority(buffer.sample(KEY, 4).slots, jnp.ones(4))
    testing.assert_valid(buffer.add(jnp.arange(16).reshape(2, 8)))


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


@pytest.mark.parametrize("nested", [False, True])
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


class Deaf(Counts):
    """Has priorities, and is not told of items that leave."""

    uses_priority = True


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
    "deaf": (
        lambda: filled(jaxbuf.Blend((UNIFORM, Deaf()), (1, 1)), parts=(jaxbuf.Removable(),)),
        "Deaf.* cannot be told that an item retires",
    ),
    "steps have no scores": (
        lambda: jaxbuf.TrajectoryBuffer.create(
            jnp.int32(0), 2, 4, sampler=jaxbuf.Blend((jaxbuf.Softmax(), UNIFORM), (1, 1))
        ),
        "needs scores, which steps do not have",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    make, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        make()


def test_equal_configurations_are_equal():
    one = jaxbuf.Blend([PROPORTIONAL, UNIFORM], np.float32([1, 3]))
    assert one == jaxbuf.Blend((PROPORTIONAL, UNIFORM), (0.25, 0.75))
    assert hash(one) == hash(dataclasses.replace(one))
    thirds = jaxbuf.Blend((UNIFORM, UNIFORM, UNIFORM), (1, 1, 1))
    assert dataclasses.replace(thirds) == thirds


def test_parts_of_a_mixture_draw_each_in_their_own_way():
    samplers = {
        "shuffled": jaxbuf.Shuffled(),
        "recent": jaxbuf.Recent(1.0, 2),
        "balanced": jaxbuf.Balanced(),
        "stale": jaxbuf.Staleness(replacement=False),
        "blend": jaxbuf.Blend((jaxbuf.Balanced(), jaxbuf.Recent(1.0, 1)), (0.5, 0.5)),
    }
    windows = [
        jaxbuf.TrajectoryBuffer.create(jnp.int32(0), 2, 6, sampler=sampler).add(
            100 * number + jnp.arange(8).reshape(2, 4)
        )
        for number, sampler in enumerate(samplers.values())
    ]
    mixture = jaxbuf.Mixture.create(windows, [1] * 5)
    drawn = {name: [] for name in samplers}
    for seed in range(2):
        mixture, batch = jaxbuf.next_batch(mixture, jax.random.key(seed), 20)
        assert batch.valid.all()
        part = mixture.part_of(batch.slots)
        for number, name in enumerate(samplers):
            rows = np.ravel(batch.data)[np.asarray(part) == number]
            drawn[name] += [rows.astype(int) - 100 * number]
    assert sorted(np.concatenate(drawn["shuffled"])) == [*range(8)]
    assert sorted(np.concatenate(drawn["stale"])) == [*range(8)]
    assert set(np.concatenate(drawn["recent"]).tolist()) == {2, 3, 6, 7}
    for rows in drawn["balanced"]:
        assert np.sum(rows < 4) == 2
    for rows in drawn["blend"]:
        assert np.isin(rows, [3, 7]).sum() >= 2
    testing.assert_valid(mixture)

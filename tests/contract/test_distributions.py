"""Draws follow their stated probabilities: chi-square at fixed keys, significance 1e-4 each.

A correct sampler fails one of these tests for one key in ten thousand; the keys are fixed, so a
test that passes keeps passing until the draws change. Some numbers are those of other libraries.
"""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

import jaxbuf
from jaxbuf import testing
from tests.models import items as reference
from tests.models.items import law_of
from tests.operations import numbered, quick

SIGNIFICANCE = 1e-4
DRAWS = 20_000
PRIORITIES = (0.5, 0.0, 3.0, 1.0, 8.0, 0.25, 2.0)


@functools.partial(jax.jit, static_argnums=(1, 2))
def many(buffer, batch_size, repeats, seed):
    """Independent samples, leaves ``[repeats, batch_size]``."""
    keys = jax.random.split(jax.random.key(seed), repeats)
    return jax.vmap(lambda key: buffer.sample(key, batch_size))(keys)


def samples(buffer, batch_size, repeats, seed=0):
    return jax.tree.map(np.asarray, many(buffer, batch_size, repeats, seed))


def assert_law(outcomes, probability):
    """Chi-square of integer outcomes; those of probability zero must not occur."""
    probability = np.asarray(probability, np.float64)
    counts = np.bincount(np.ravel(outcomes), minlength=len(probability))
    assert len(counts) == len(probability)
    possible = probability > 0
    assert not counts[~possible].any()
    expected = probability[possible] / probability.sum() * counts.sum()
    assert expected.min() > 5, "too few draws for a chi-square test"
    if possible.sum() > 1:
        assert scipy.stats.chisquare(counts[possible], expected).pvalue > SIGNIFICANCE


def assert_draws(buffer, law, batch_size=1, rows=DRAWS, seed=0):
    """Slots are drawn with these probabilities, and those beyond them never."""
    testing.assert_distribution(
        buffer,
        jax.random.key(seed),
        np.pad(law, (0, buffer.capacity - len(law))),
        draws=rows // batch_size,
        batch_size=batch_size,
        significance=SIGNIFICANCE,
    )


LAWS = {
    "default": {},
    "proportional": {"alpha": 1.0},
    "squared": {"alpha": 2.0},
    "alpha-zero": {"alpha": 0.0},
    "epsilon": {"alpha": 0.8, "epsilon": 0.05},
    "alpha-zero-epsilon": {"alpha": 0.0, "epsilon": 0.1},
    "mix": {"alpha": 1.0, "uniform_mix": 0.2},
    "all-mix": {"alpha": 1.0, "uniform_mix": 1.0},
}


SINGLE_DRAWS = [
    *((name, {}) for name in LAWS),
    *((name, {"stratified": False}) for name in ("default", "alpha-zero", "mix")),
    *((name, {"replacement": False}) for name in ("default", "alpha-zero-epsilon", "mix")),
]


def check_single_draws(sampler, priorities, law, rtol):
    buffer = numbered(sampler, priorities, capacity=9)
    drawn = samples(buffer, 1, DRAWS)
    assert drawn.valid.all()
    assert_law(drawn.data, law)
    np.testing.assert_allclose(drawn.probability, np.asarray(law)[drawn.data], rtol=rtol)
    chex.assert_tree_all_finite(buffer.metrics())


# Each option once.
QUICK_DRAWS = [
    *((name, {}) for name in ("squared", "epsilon", "mix")),
    ("default", {"stratified": False}),
    ("mix", {"replacement": False}),
]


@pytest.mark.parametrize(("name", "how"), quick(SINGLE_DRAWS, QUICK_DRAWS))
def test_a_single_draw_has_the_exact_law(name, how):
    sampler = jaxbuf.Prioritized(**LAWS[name], **how)
    check_single_draws(sampler, PRIORITIES, law_of(sampler, PRIORITIES)[0], rtol=1e-5)


TINY, LARGEST = 1e-30, float(np.finfo(np.float32).max)
EDGES = [
    # All zero: uniform over the live items.
    *(
        (name, how, [0.0] * 5, [0.2] * 5)
        for name, how in SINGLE_DRAWS
        if name in ("default", "mix")
    ),
    # An exponent of zero still skips them, and the mix reaches them.
    ("alpha-zero", {}, (0.0, 5.0, 0.0, 0.1), (0, 0.5, 0, 0.5)),
    ("mix", {}, (0.0, 1.0), (0.1, 0.9)),
    # Sums so small that a share of them is no normal float any more.
    *(
        ("proportional", {}, (least, 0.0, 2 * least, least), (0.25, 0, 0.5, 0.25))
        for least in (1e-20, TINY, 3e-38)
    ),
    # The square underflows; the mass is clipped to the smallest normal number instead.
    ("squared", {}, (0.0, TINY, TINY), (0, 0.5, 0.5)),
    *(
        (name, {}, (LARGEST, LARGEST, 1.0, LARGEST, LARGEST), (0.25, 0.25, 0, 0.25, 0.25))
        for name in ("proportional", "squared")
    ),
]


@pytest.mark.parametrize(("name", "how", "priorities", "law"), EDGES)
def test_zero_tiny_and_huge_priorities_have_their_shares(name, how, priorities, law):
    check_single_draws(jaxbuf.Prioritized(**LAWS[name], **how), priorities, law, rtol=1e-6)


@pytest.mark.parametrize(("stratified", "uniform_mix"), [(True, 0.0), (True, 0.3), (False, 0.3)])
def test_batches_follow_the_law_in_total(stratified, uniform_mix):
    # Stratified counts vary less than multinomial ones, so that chi-square is conservative there.
    sampler = jaxbuf.Prioritized(alpha=1.0, stratified=stratified, uniform_mix=uniform_mix)
    assert_draws(numbered(sampler, PRIORITIES), law_of(sampler, PRIORITIES)[0], 13, seed=1)


@pytest.mark.parametrize(
    ("sampler", "priorities"),
    [
        (jaxbuf.Prioritized(alpha=1.0, stratified=False), (1.0, 2.0, 3.0)),
        (jaxbuf.Uniform(), [1.0] * 4),
    ],
)
def test_rows_of_a_batch_without_strata_are_independent(sampler, priorities):
    drawn = samples(numbered(sampler, priorities), 3, DRAWS, seed=3).data
    law = np.array(priorities) / sum(priorities)
    for a, b in ((0, 1), (0, 2), (1, 2)):
        assert_law(drawn[:, a] * len(law) + drawn[:, b], np.outer(law, law).ravel())


@pytest.mark.parametrize("batch_size", [2, 7, 32])
def test_stratified_draws_take_one_from_each_stratum(batch_size):
    sampler = jaxbuf.Prioritized(alpha=1.0)
    law, _ = law_of(sampler, PRIORITIES)
    drawn = samples(numbered(sampler, PRIORITIES), batch_size, 500, seed=4)
    # An item of share p covers a run of p * B strata and is cut by at most two more.
    counts = np.stack([(drawn.data == item).sum(1) for item in range(len(law))], 1)
    expected = np.broadcast_to(law * batch_size, counts.shape)
    assert (np.abs(counts - expected) < 2).all()
    # Sorted by slot, row i lies in stratum i: its item must overlap [i / B, (i + 1) / B).
    edges = np.concatenate([[0.0], np.cumsum(law)])
    order = np.sort(drawn.data, 1)
    stratum = np.arange(batch_size)
    assert (edges[order + 1] > stratum / batch_size - 1e-6).all()
    assert (edges[order] < (stratum + 1) / batch_size + 1e-6).all()


@pytest.mark.parametrize(
    ("priorities", "counts"),
    [
        # Eleven strata of width one: dqn_zoo's query table as exact counts.
        ([3.0, 1.0, 2.0, 5.0], [3, 1, 2, 5]),
        # Sixteen strata of width .1: ALF's.
        ([0.0, 0.1, 0.5, 0.0, 0.0, 0.2, 0.8, 0.0], [0, 1, 5, 0, 0, 2, 8, 0]),
    ],
)
def test_sum_trees_of_dqn_zoo_and_alf_by_strata(priorities, counts):
    drawn = samples(numbered(jaxbuf.Prioritized(alpha=1.0), priorities), sum(counts), 20).data
    for batch in drawn:
        assert np.bincount(batch, minlength=len(counts)).tolist() == counts


def test_flashbax_outlier_of_3e7_set_back():
    """Sums kept by deltas lose the small priorities for good once a large one has passed."""
    buffer = numbered(jaxbuf.Prioritized(alpha=1.0), [0.1] * 8)
    slots = buffer.latest(8).slots
    for value in (3e7, 0.1):
        priority = jnp.full(8, 0.1).at[3].set(value)
        buffer = jaxbuf.update_priority(buffer, slots, priority)
        assert buffer.get(slots).probability[3] == pytest.approx(1.0 if value > 1 else 0.125)
    np.testing.assert_allclose(buffer.get(slots).probability, 0.125, rtol=1e-6)
    # With 8 equal strata, each item is drawn exactly once: no draw lands on a wrong item.
    for batch in samples(buffer, 8, 20).data:
        assert sorted(batch.tolist()) == list(range(8))


@pytest.mark.parametrize("replacement", [True, False])
def test_uniform_is_uniform_over_the_live_items(replacement):
    buffer = numbered(jaxbuf.Uniform(replacement=replacement), [1.0] * 7, capacity=20)
    drawn = samples(buffer, 3, DRAWS // 3, seed=6)
    assert_law(drawn.data, np.full(7, 1 / 7))
    np.testing.assert_allclose(drawn.probability, 1 / 7, rtol=1e-6)


def ordered(data, n):
    """Ordered draws as one integer in base ``n``."""
    return np.asarray(data) @ (n ** np.arange(data.shape[1])[::-1])


def law_of_orders(masses, draws):
    law = np.zeros(len(masses) ** draws)
    for order, probability in reference.successive_law(masses, draws).items():
        law[ordered(np.array([order]), len(masses))[0]] += probability
    return law


@pytest.mark.parametrize(
    ("sampler", "priorities", "draws"),
    quick(
        [
            (jaxbuf.Prioritized(alpha=1.0, replacement=False), (1.0, 0.0, 3.0, 6.0), 2),
            (jaxbuf.Prioritized(alpha=1.0, replacement=False), (9.0, 1.0, 1.0, 2.0), 3),
            (jaxbuf.Prioritized(alpha=0.5, epsilon=0.1, replacement=False), (1.0, 0.0, 4.0), 2),
            (jaxbuf.Uniform(replacement=False), [1.0] * 5, 3),
        ],
        [(jaxbuf.Uniform(replacement=False), [1.0] * 5, 3)],
    ),
)
def test_without_replacement_is_successive_drawing(sampler, priorities, draws):
    drawn = samples(numbered(sampler, priorities, capacity=6), draws, 2 * DRAWS, seed=11)
    assert drawn.valid.all()
    first, masses = law_of(sampler, priorities)
    assert_law(ordered(drawn.data, len(masses)), law_of_orders(masses, draws))
    np.testing.assert_allclose(drawn.probability, first[drawn.data], rtol=1e-5)


def test_without_replacement_the_whole_buffer_is_a_permutation():
    buffer = numbered(jaxbuf.Uniform(replacement=False), [1.0] * 40)
    drawn = samples(buffer, 40, 300, seed=14)
    assert drawn.valid.all()
    np.testing.assert_array_equal(np.sort(drawn.data, 1), np.broadcast_to(np.arange(40), (300, 40)))
    # The first row alone, and where item 0 lands, are uniform.
    assert_law(drawn.data[:, 0], np.full(40, 1 / 40))
    assert_law((drawn.data == 0).argmax(1), np.full(40, 1 / 40))


@pytest.mark.slow
def test_without_replacement_extreme_shares_are_still_all_found():
    priorities = [1e-6, 1.0, 1e6, 0.0, 1e-3, 1e3]
    sampler = jaxbuf.Prioritized(alpha=1.0, replacement=False)
    drawn = samples(numbered(sampler, priorities), 6, 200, seed=15)
    np.testing.assert_array_equal(drawn.valid.sum(1), 5)
    for data, valid in zip(drawn.data, drawn.valid, strict=True):
        assert sorted(data[valid].tolist()) == [0, 1, 2, 4, 5]
    # By far the most likely order is by priority, valid rows in the order of the draw.
    inorder = (drawn.data[:, :5] == np.array([2, 5, 1, 4, 0])).all(1)
    assert inorder.mean() > 0.95


def test_the_mix_without_replacement_stays_one_after_the_largest_mass_was_drawn():
    """Nearly all that is left is the uniform half, which draws the other two items alike."""
    sampler = jaxbuf.Prioritized(alpha=1.0, uniform_mix=0.5, replacement=False)
    drawn = samples(numbered(sampler, (1e6, 3.0, 1.0)), 2, DRAWS, seed=22)
    assert_law(drawn.data[drawn.data[:, 0] == 0, 1], [0.0, 0.5, 0.5])


@pytest.mark.parametrize("stratified", [True, False])
def test_a_zero_priority_is_never_drawn(stratified):
    """Zeros at the start, at the end and everywhere between, with batches that hit the edges."""
    capacity, rng = 37, np.random.default_rng(17)
    priorities = rng.uniform(0.1, 1.0, capacity) * (rng.random(capacity) < 0.4)
    priorities[[0, 1, capacity - 2, capacity - 1]] = 0.0
    sampler = jaxbuf.Prioritized(alpha=1.0, stratified=stratified)
    drawn = samples(numbered(sampler, priorities), 4096, 40, seed=17)
    assert (priorities[drawn.data] > 0).all()
    assert (drawn.probability > 0).all()
    assert drawn.valid.all()


def test_every_slot_of_a_larger_buffer_is_reached():
    size = 3000
    sampler = jaxbuf.Prioritized(alpha=1.0, stratified=False)
    priorities = 1.0 + np.arange(size) % 3
    law = priorities / priorities.sum()
    assert_draws(numbered(sampler, priorities, 3500), law, 10_000, 200_000, seed=24)


def test_lanes_of_a_vmapped_buffer_draw_each_from_its_own():
    sampler = jaxbuf.Prioritized(alpha=1.0)
    laws = np.array([[1.0, 2.0, 3.0, 0.0], [5.0, 0.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0]])
    buffers = jax.tree.map(
        lambda *leaves: jnp.stack(leaves), *[numbered(sampler, law) for law in laws]
    )
    keys = jax.random.split(jax.random.key(25), (3, DRAWS // 4))
    draw = jax.vmap(lambda buffer, key: buffer.sample(key, 4))
    drawn = jax.jit(jax.vmap(draw, in_axes=(None, 1)))(buffers, keys)
    for lane, law in enumerate(laws):
        assert_law(np.asarray(drawn.data[:, lane]), law if law.any() else np.full(4, 0.25))

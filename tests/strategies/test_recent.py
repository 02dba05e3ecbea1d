"""Draws by age: a recent part of every batch, ranges of ages, the newest items in order."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import jaxbuf
from jaxbuf import testing
from jaxbuf.core.random import random_words
from jaxbuf.occupancy.ages import spread
from tests.models import sampling as reference
from tests.operations import quick

ITEM = jax.ShapeDtypeStruct((), jnp.int32)
PROPORTIONAL = jaxbuf.Prioritized(alpha=1.0)
KEY = jax.random.key(0)


@functools.partial(jax.jit, static_argnums=(0, 1))
def ranks(rows, draws, total):
    def one(key):
        words = random_words(key, (rows + 1,))
        return spread(words[1:], words[0], total)

    return jax.vmap(one)(jax.random.split(KEY, draws))


@pytest.mark.parametrize("rows", [1, 4, 7])
def test_spread_gives_every_rank_as_evenly_as_can_be(rows):
    for total in (1, 2, 3, 4, 7, 8, 20):
        drawn = np.asarray(ranks(rows, 2000, jnp.int32(total)))
        counts = np.stack([(drawn == rank).sum(1) for rank in range(total)], axis=1)
        assert counts.sum() == drawn.size
        assert counts.min() >= rows // total
        assert counts.max() <= -(-rows // total)
        if rows % total:
            # Draws of different batches are independent; within one they only are more even.
            assert stats.chisquare(counts.sum(0)).pvalue > 1e-3
    assert np.asarray(ranks(rows, 2, jnp.int32(2**30))).min() >= 0


def test_the_recent_half_as_in_alf():
    """ALF's example: the recent positions of four environments, each once, the earliest first."""
    sampler = jaxbuf.Recent(ratio=0.5, steps=4)
    buffer = jaxbuf.TrajectoryBuffer.create(ITEM, 4, 100, sampler=sampler)
    buffer = jaxbuf.add(buffer, jnp.tile(jnp.arange(32, dtype=jnp.int32), (4, 1)))
    sample = jaxbuf.sample(buffer, KEY, 32)
    env, position = buffer.locate(sample.slots)
    assert position[:16].tolist() == [28] * 4 + [29] * 4 + [30] * 4 + [31] * 4
    assert env[:16].tolist() == [0, 1, 2, 3] * 4
    assert sample.valid.all()
    np.testing.assert_array_equal(sample.data[:, 0], position)


@pytest.mark.parametrize(
    ("kind", "base"),
    quick(
        [("items", jaxbuf.Uniform()), ("items", PROPORTIONAL), ("windows", PROPORTIONAL)],
        [("items", jaxbuf.Uniform()), ("windows", PROPORTIONAL)],
    ),
)
def test_probabilities_are_those_of_the_mixture(kind, base):
    """After wrapping, with rings of different fill."""
    sampler = jaxbuf.Recent(ratio=0.4, steps=3, base=base)
    priority = np.array([1.0, 0.0, 4.0, 2.0, 3.0, 1.0, 0.0, 5.0, 1.0, 3.0, 2.0, 1.0], np.float32)
    given = {"priority": priority} if base.uses_priority else {}
    steps = jnp.arange(12, dtype=jnp.int32)
    if kind == "items":
        buffer = jaxbuf.ItemBuffer.create(ITEM, 7, sampler=sampler).add(steps, **given)
        rings = [list(range(5, 12))]
    else:
        buffer = jaxbuf.TrajectoryBuffer.create(ITEM, 2, 5, sampler=sampler)
        given = {name: rows.reshape(2, 6) for name, rows in given.items()}
        mask = np.array([[True] * 6, [True] * 2 + [False] * 4])
        buffer = buffer.add(steps.reshape(2, 6), mask=mask, **given)
        rings = [[1, 2, 3, 4, 5], [6, 7]]
    mass = {i: priority[i] if base.uses_priority else 1.0 for ring in rings for i in ring}
    known = {i: float(m / sum(mass.values())) for i, m in mass.items()}
    expected = reference.recent_probabilities(rings, known, 0.4, 3)
    # Slots that are empty hold a 0.
    law = np.array([expected.get(item, 0.0) for item in np.ravel(buffer.data).tolist()])
    testing.assert_distribution(buffer, KEY, law, draws=800, batch_size=10, significance=1e-3)
    batch = buffer.sample(KEY, 10)
    np.testing.assert_allclose(batch.probability, law[batch.slots.index], rtol=1e-5)
    share = law[law > 0]
    support = buffer.support()
    assert support.count == len(share)
    assert float(support.least_probability) == pytest.approx(share.min(), rel=1e-5)
    ess = buffer.metrics()["effective_sample_size"]
    assert float(ess) == pytest.approx(1 / (share**2).sum(), rel=1e-5)


def test_a_share_that_is_no_whole_number_of_rows_is_rounded():
    for ratio, recent in ((0.124, 0), (0.125, 1), (1.0, 4)):
        buffer = jaxbuf.ItemBuffer.create(ITEM, 100, sampler=jaxbuf.Recent(ratio, 1))
        buffer = buffer.add(jnp.arange(100, dtype=jnp.int32))
        sample = buffer.sample(KEY, 4)
        assert (sample.data == 99).sum() == recent
        told = sample.probability[sample.data == 99]
        np.testing.assert_allclose(told, recent / 4 + (1 - recent / 4) / 100, rtol=1e-6)


@pytest.mark.slow
def test_the_recent_half_skips_what_has_retired():
    sampler = jaxbuf.Recent(ratio=0.5, steps=4)
    freshness = jaxbuf.Freshness(max_use=1)
    buffer = jaxbuf.ItemBuffer.create(ITEM, 16, sampler=sampler, freshness=freshness)
    buffer = buffer.add(jnp.arange(21, dtype=jnp.int32))
    used = buffer.latest(6)
    buffer = buffer.mark_used(used.slots, mask=jnp.array([1, 0, 1, 1, 0, 1], bool))
    recent, others = [13, 14, 16, 19], [5, 6, 7, 8, 9, 10, 11, 12]
    sample = buffer.sample(KEY, 8)
    assert sample.data[:4].tolist() == recent
    law = np.where(np.isin(buffer.data, recent + others), 0.5 / 12, 0.0)
    law += np.where(np.isin(buffer.data, recent), 0.5 / 4, 0.0)
    np.testing.assert_allclose(sample.probability, law[sample.slots.index], rtol=1e-6)
    testing.assert_distribution(buffer, KEY, law, draws=1000, batch_size=8, significance=1e-3)


def test_ranges_of_windows():
    buffer = jaxbuf.TrajectoryBuffer.create(ITEM, 3, 5, sequence_length=2, num_earliest_ignored=1)
    mask = np.array([[True] * 7, [True] * 3 + [False] * 4, [False] * 7])
    buffer = buffer.add(jnp.arange(21, dtype=jnp.int32).reshape(3, 7), mask=mask)
    every = buffer.sample_range(KEY, 6)
    assert every.data[every.valid].tolist() == [[3, 4], [4, 5], [5, 6], [8, 9]]
    early = buffer.sample_range(KEY, 2, 0, 1)
    assert early.data.tolist() == [[3, 4], [8, 9]]
    late = buffer.latest(2)
    assert late.valid.tolist() == [True, True, True, False, False, False]
    assert late.data[late.valid].tolist() == [[4, 5], [5, 6], [8, 9]]


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4))
def batches_of_newest(buffer, rows, draws, by_priority, replacement):
    """``draws`` batches of the four newest items or windows, ``[draws, rows]``."""
    given = {"by_priority": by_priority, "replacement": replacement}
    keys = jax.random.split(jax.random.key(5), draws)
    return jax.vmap(lambda key: buffer.sample_range(key, rows, -4, **given))(keys)


def newest_with_priorities(kind):
    """Items 17 to 20 with priorities 0, 1, 3 and 12, and older ones that are much heavier."""
    priority = jnp.concatenate([jnp.full(17, 50.0), jnp.array([0.0, 1.0, 3.0, 12.0])])
    items = jnp.arange(21, dtype=jnp.int32)
    if kind == "windows":
        buffer = jaxbuf.TrajectoryBuffer.create(ITEM, 1, 16, sampler=PROPORTIONAL)
        return buffer.add(items[None], priority=priority[None])
    freshness = jaxbuf.Freshness(max_use=1) if kind == "fresh" else None
    buffer = jaxbuf.ItemBuffer.create(ITEM, 16, sampler=PROPORTIONAL, freshness=freshness)
    buffer = buffer.add(items, priority=priority)
    if kind == "fresh":
        # Item 21 is the newest and the heaviest, but has been used.
        buffer = buffer.add(jnp.array([21]), priority=jnp.array([99.0]))
        buffer = buffer.mark_used(buffer.latest(1).slots)
    return buffer


@pytest.mark.parametrize("kind", quick(["items", "windows", "fresh"], {"fresh"}))
def test_ranges_by_priority_as_in_di_engine(kind):
    """Its ``sample(B, sample_range=slice(-4, None))``: 0, 1/16, 3/16 and 12/16."""
    buffer = newest_with_priorities(kind)
    due = np.array([0, 1, 3, 12]) / 16
    for replacement in (True, False):
        sample = batches_of_newest(buffer, 1, 3000, True, replacement)
        assert sample.valid.all()
        counts = np.bincount(np.asarray(sample.data).reshape(-1), minlength=21)
        assert counts[:18].sum() == 0
        assert stats.chisquare(counts[18:], 3000 * due[1:]).pvalue > 1e-3
        np.testing.assert_allclose(sample.probability, due[sample.data.reshape(3000, 1) - 17])
    exact = batches_of_newest(buffer, 16, 9, True, True)
    # One from each of 16 equal parts of the mass, in order of age.
    assert exact.data.reshape(9, 16).tolist() == [[18] + [19] * 3 + [20] * 12] * 9


def test_ranges_by_priority_without_replacement_draw_one_after_the_other():
    buffer = newest_with_priorities("items")
    pairs = np.asarray(batches_of_newest(buffer, 2, 4000, True, False).data) - 17
    p = np.array([0, 1, 3, 12]) / 16
    due = {
        (i, j): p[i] * p[j] / (1 - p[i]) + p[j] * p[i] / (1 - p[j])
        for i, j in [(1, 2), (1, 3), (2, 3)]
    }
    counts = [int(np.sum(np.all(pairs == pair, axis=1))) for pair in due]
    assert sum(counts) == 4000
    assert stats.chisquare(counts, 4000 * np.array(list(due.values()))).pvalue > 1e-3
    few = buffer.sample_range(KEY, 6, -4, by_priority=True)
    assert few.data[:3].tolist() == [18, 19, 20]
    assert few.valid.tolist() == [True] * 3 + [False] * 3
    assert few.slots.index[3:].tolist() == [16] * 3


def test_ranges_without_priority_above_zero_are_uniform():
    buffer = newest_with_priorities("items")
    none = buffer.update_priority(buffer.latest(4).slots, jnp.zeros(4))
    sample = batches_of_newest(none, 1, 2000, True, True)
    counts = np.bincount(np.asarray(sample.data)[:, 0], minlength=21)[17:]
    assert counts.sum() == 2000
    assert stats.chisquare(counts).pvalue > 1e-3
    np.testing.assert_allclose(sample.probability, 0.25)


def test_ranges_with_replacement_draw_independently():
    buffer = jaxbuf.ItemBuffer.create(ITEM, 16).add(jnp.arange(21, dtype=jnp.int32))
    sample = batches_of_newest(buffer, 2, 4000, False, True)
    np.testing.assert_allclose(sample.probability, 0.25)
    counts = np.zeros((4, 4))
    np.add.at(counts, tuple(np.asarray(sample.data).T - 17), 1)
    # In order of age, so that a pair of two has come from two.
    due = np.triu(2 * np.ones((4, 4)), 1) + np.eye(4)
    assert counts[due == 0].sum() == 0
    assert stats.chisquare(counts[due > 0], due[due > 0] * 4000 / 16).pvalue > 1e-3
    many = buffer.sample_range(KEY, 9, -2, replacement=True)
    assert many.valid.all()
    assert set(many.data.tolist()) == {19, 20}
    empty = jaxbuf.ItemBuffer.create(ITEM, 16, sampler=PROPORTIONAL)
    for by_priority in (False, True):
        nothing = empty.sample_range(KEY, 3, by_priority=by_priority, replacement=True)
        assert not nothing.valid.any()
        np.testing.assert_array_equal(nothing.probability, 0.0)


def test_ranges_by_priority_of_windows_of_several_rings():
    sampler = jaxbuf.Recent(ratio=0.5, steps=2, base=PROPORTIONAL)
    buffer = jaxbuf.TrajectoryBuffer.create(ITEM, 2, 6, sequence_length=2, sampler=sampler)
    steps = jnp.arange(16, dtype=jnp.int32).reshape(2, 8)
    buffer = buffer.add(steps, priority=steps.astype(jnp.float32), mask=steps < 15)
    # The masses of the earliest windows, outside of the range, are 3 and 10.
    first = np.array([3, 4, 5, 6, 10, 11, 12, 13])
    ends = first + 1.0
    due = 0.5 * ends / (13 + ends.sum()) + 0.5 * np.isin(first, [5, 6, 12, 13]) / 4
    due /= due.sum()
    draw = lambda key: buffer.sample_range(key, 1, 1, by_priority=True, replacement=True)  # noqa: E731
    drawn = jax.jit(jax.vmap(draw))(jax.random.split(jax.random.key(1), 4000))
    number = np.searchsorted(first, drawn.data[:, 0, 0])
    np.testing.assert_array_equal(first[number], drawn.data[:, 0, 0])
    np.testing.assert_allclose(drawn.probability[:, 0], due[number], rtol=1e-5)
    assert stats.chisquare(np.bincount(number), 4000 * due).pvalue > 1e-3


def items(**options):
    return jaxbuf.ItemBuffer.create(ITEM, 4, **options)


LOWEST = {"evictor": jaxbuf.Lowest()}
RECENT = {"sampler": jaxbuf.Recent(0.5, 3)}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: jaxbuf.Recent(0.5, 3, jaxbuf.Prioritized), "choose jaxbuf.Uniform(...)"),
        (
            lambda: items(**RECENT, **LOWEST),
            "uses the age of items, but this buffer's Ranking does not keep their order",
        ),
        (
            lambda: items(**RECENT, **LOWEST, freshness=jaxbuf.Freshness(max_use=2)),
            "uses the age of items, but this buffer's Subset does not keep their order",
        ),
        (lambda: items(sampler=jaxbuf.Balanced(), **LOWEST), "uses the age of items"),
        (lambda: items(**LOWEST).latest(2), "latest uses the age of items"),
        (lambda: items(**LOWEST).sample_range(KEY, 2), "sample_range uses the age"),
        (
            lambda: items().sample_range(KEY, 2, by_priority=True),
            "by_priority is True, but Uniform(replacement=True) has no priorities",
        ),
        (lambda: items().latest(5), "n is 5, but there is room for 4"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        call()

"""Draws by mass, compared with sums in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.scipy.stats import norm

from jaxbuf.core.segment_tree import SegmentTree
from jaxbuf.strategies.mass import (
    draw_by_mass,
    draw_distinct,
    effective_size,
    ends,
    over,
    points_of_shards,
    remove_masses,
    set_masses,
)

MASS = np.array([0, 3, 1, 0, 0, 4, 8, 0], np.float32)


def tree_of(mass):
    mass = jnp.asarray(mass)
    return SegmentTree.create(mass.shape[0]).set_all(mass)


def test_what_comes_and_goes_changes_at_once():
    before = tree_of(MASS)
    added, removed = jnp.array([0, 6, 99]), jnp.array([1, 3, 1, 99])
    after = set_masses(before, added, jnp.array([5.0, 2.0, 7.0]), removed)
    want = MASS.copy()
    want[[0, 6]], want[[1, 3]] = [5, 2], 0
    np.testing.assert_array_equal(after.leaves, want)
    assert (float(after.root("sum")), int(after.nnz)) == (want.sum(), (want > 0).sum())
    np.testing.assert_array_equal(
        remove_masses(before, removed).leaves, np.where(MASS == 3, 0, MASS)
    )
    # Then no slot can be there twice, except past the end.
    nothing, added = jnp.zeros((0,), jnp.int32), jnp.array([0, 99, 6, 99])
    after = set_masses(before, added, jnp.array([5.0, 7.0, 2.0, 8.0]), nothing)
    want = MASS.copy()
    want[[0, 6]] = [5, 2]
    np.testing.assert_array_equal(after.leaves, want)


def test_stratified_rows_are_as_many_as_their_mass():
    # Each unit of mass is one of the equal parts.
    drawn = draw_by_mass(jax.random.key(0), 16, tree_of(MASS), stratified=True)
    np.testing.assert_array_equal(drawn, np.repeat(np.arange(8), MASS.astype(int)))


def test_items_are_drawn_in_proportion_to_their_mass():
    rows = 40_000
    drawn = draw_by_mass(jax.random.key(1), rows, tree_of(MASS))
    count, share = np.bincount(drawn, minlength=8), MASS / MASS.sum()
    error = (count - rows * share) / np.sqrt(np.maximum(rows * share * (1 - share), 1))
    assert np.abs(error).max() < -norm.ppf(1e-5)
    assert (count[MASS == 0] == 0).all()


@pytest.mark.parametrize("rows", [1, 3, 4, 9])
def test_different_items_are_drawn_until_no_mass_is_left(rows):
    count, tree = jnp.int32(min(rows, 4)), tree_of(MASS)
    draw = jax.jit(lambda key: draw_distinct(key, rows, count, tree))
    for case in range(20):
        index, valid = draw(jax.random.key(case))
        assert valid.tolist() == [row < count for row in range(rows)]
        drawn = np.asarray(index)[valid].tolist()
        assert len(set(drawn)) == len(drawn)
        assert (MASS[drawn] > 0).all()


def test_draws_without_replacement_are_by_mass_one_after_the_other():
    keys = jax.random.split(jax.random.key(2), 20_000)
    tree = tree_of(MASS)
    pairs, _ = jax.jit(jax.vmap(lambda key: draw_distinct(key, 2, jnp.int32(2), tree)))(keys)
    total = MASS.sum()
    rest = MASS[None] / (total - MASS[:, None]) * (1 - np.eye(8))
    want = (MASS / total)[:, None] * rest * len(keys)
    got = np.zeros((8, 8))
    np.add.at(got, tuple(np.asarray(pairs).T), 1)
    assert (got[want == 0] == 0).all()
    error = (got - want) / np.sqrt(np.maximum(want, 1))
    assert np.abs(error).max() < -norm.ppf(1e-5 / 64)


@pytest.mark.parametrize("stratified", [False, True])
def test_points_in_the_mass_of_shards_are_those_in_the_whole(stratified):
    total = np.array([0, 16, 0, 4, 12, 0], np.float32)
    word = jax.random.bits(jax.random.key(3), (64,), jnp.uint32)
    shard, point, _ = points_of_shards(ends(jnp.asarray(total)), word, None, stratified=stratified)
    whole = ends(jnp.asarray(total.sum()[None]))
    zeros, inside, _ = points_of_shards(whole, word, None, stratified=stratified)
    assert not zeros.any()
    want = np.searchsorted(np.cumsum(total), inside, side="right")
    np.testing.assert_array_equal(shard, want)
    np.testing.assert_array_equal(point, inside - (np.cumsum(total) - total)[want])
    assert (point < total[want]).all()


def test_a_share_of_no_mass_is_none():
    assert over(jnp.array([0.0, 6.0]), jnp.float32(12)).tolist() == [0, 0.5]
    assert over(jnp.zeros(2), jnp.float32(0)).tolist() == [0, 0]


def test_the_effective_size_is_that_of_equally_likely_items():
    assert float(effective_size(jnp.array([0.25, 0, 0.25, 0.25, 0.25]))) == 4
    assert float(effective_size(jnp.array([0.75, 0.25]))) == pytest.approx(1 / (9 / 16 + 1 / 16))
    assert float(effective_size(jnp.zeros(3))) == 0

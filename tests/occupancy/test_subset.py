"""`Subset`: slots excluded wherever they lie, against a Python set."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jaxbuf.core.random import random_words
from jaxbuf.occupancy.bitset import Bitset
from jaxbuf.occupancy.ring import Ring
from jaxbuf.occupancy.rings import Rings
from jaxbuf.occupancy.subset import Subset

CAPACITY = 40


@jax.jit
def exclude(subset, index):
    return subset.exclude(index)


@jax.jit
def place(subset, mask):
    return subset.place(mask.shape[0], mask, None)


def test_members_before_a_slot():
    random, capacity = np.random.default_rng(4), 600
    subset = Subset.create(Ring.create(capacity), capacity)
    subset, _ = place(subset, jnp.ones(capacity, bool))
    gone = random.permutation(capacity)[:250]
    subset = exclude(subset, jnp.asarray(gone, jnp.int32))
    members = np.ones(capacity, int)
    members[gone] = 0
    index = jnp.arange(capacity + 1, dtype=jnp.int32)
    until = np.concatenate([[0], members.cumsum()])
    np.testing.assert_array_equal(jax.jit(Subset.before)(subset, index), until)


def test_every_member_is_the_rank_th_one():
    subset = Subset.create(Ring.create(CAPACITY), CAPACITY)
    subset, _ = place(subset, jnp.ones(CAPACITY, bool))
    gone = jnp.array([0, 3, 4, 17, 39])
    subset = exclude(subset, gone)
    left = sorted(set(range(CAPACITY)) - set(gone.tolist()))
    # The first and the last word that scale to each rank.
    first = np.array([-(-k * 2**32 // 35) for k in range(35)], np.uint32)
    last = np.array([-(-(k + 1) * 2**32 // 35) - 1 for k in range(35)], np.uint32)
    np.testing.assert_array_equal(subset.draw(jnp.asarray(first)), left)
    np.testing.assert_array_equal(subset.draw(jnp.asarray(last)), left)


@pytest.mark.parametrize("gaps", [False, True])
def test_a_rank_in_a_ring_is_one_among_all(gaps):
    random = np.random.default_rng(5)
    rings = Rings.create(num_envs=4, length=9, sequence_length=2, period=1)
    for _ in range(3):
        rings = rings.place(5, jnp.asarray(random.random((4, 5)) < np.arange(4)[:, None] / 3))[0]
    occupancy = rings
    if gaps:
        members = jnp.asarray(random.random(rings.num_slots) < 0.6)
        occupancy = Subset(rings, Bitset.of(members & rings.live(jnp.arange(rings.num_slots))))
    for bounds in [(None, None), (1, -1)]:
        ages = occupancy.age_range(*bounds)
        count = np.asarray(ages.count)
        assert count.min() == 0 < count.max()
        ring = np.repeat(np.arange(4), count)
        rank = np.concatenate([np.arange(n) for n in count])
        found = ages.in_ring(jnp.asarray(ring, jnp.int32), jnp.asarray(rank, jnp.int32))
        np.testing.assert_array_equal(found, ages.at(jnp.arange(count.sum(), dtype=jnp.int32)))


@pytest.mark.parametrize("seeds", [1, 3])
def test_draws_are_uniform_also_under_vmap(seeds):
    """Chi-square at the 0.1 % level, each seed with other members."""
    subset = Subset.create(Ring.create(CAPACITY), CAPACITY)
    subset, _ = place(subset, jnp.ones(CAPACITY, bool))
    gone = np.arange(seeds)[:, None] + np.array([[1, 5, 6, 20]])
    subsets = jax.jit(jax.vmap(lambda index: subset.exclude(index)))(jnp.asarray(gone, jnp.int32))
    words = random_words(jax.random.key(3), (seeds, 20_000))
    drawn = jax.jit(jax.vmap(lambda subset, words: subset.draw(words)))(subsets, words)
    np.testing.assert_array_equal(subsets.size, [CAPACITY - 4] * seeds)
    for seed in range(seeds):
        counts = np.bincount(np.asarray(drawn[seed]), minlength=CAPACITY)
        assert counts[gone[seed]].sum() == 0
        left = np.delete(counts, gone[seed])
        assert stats.chisquare(left).pvalue > 1e-3


def test_past_2_to_the_24_members():
    capacity = 2**25 + 3
    subset = Subset.create(Ring.create(capacity), capacity)
    subset = jax.jit(lambda s: s.place(capacity, None, None)[0], donate_argnums=0)(subset)
    assert subset.size == capacity
    gone = [5, 2**24 - 1, 2**24, 2**24 + 1, capacity - 1]
    subset = jax.jit(lambda s: s.exclude(jnp.array(gone)), donate_argnums=0)(subset)
    assert subset.size == capacity - 5
    # One word for each of some ranks: at both ends, and where a float32 stops counting.
    ranks = [0, 4, 5, *range(2**24 - 500, 2**24 + 500), *range(2**25 - 500, capacity - 5)]
    words = np.array([-(-rank * 2**32 // (capacity - 5)) for rank in ranks], np.uint32)
    slots = np.delete(np.arange(capacity), gone)
    np.testing.assert_array_equal(jax.jit(lambda s, w: s.draw(w))(subset, words), slots[ranks])

"""`Subset`: slots excluded wherever they lie, against a Python set."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxbuf.occupancy.bitset import Bitset
from jaxbuf.occupancy.ring import Ring
from jaxbuf.occupancy.rings import Rings
from jaxbuf.occupancy.subset import Subset
from tests.operations import quick

CAPACITY = 40


def full_but_for(gone, capacity=CAPACITY):
    def fill(gone):
        subset, _ = Subset.create(Ring.create(capacity), capacity).place(capacity, None, None)
        return subset.exclude(gone)

    return jax.jit(fill)(jnp.asarray(gone, jnp.int32))


def test_every_member_is_the_rank_th_one():
    gone = [0, 3, 4, 17, 39]
    subset = full_but_for(gone)
    left = sorted(set(range(CAPACITY)) - set(gone))
    # The first and the last word that scale to each rank.
    first = np.array([-(-k * 2**32 // 35) for k in range(35)], np.uint32)
    last = np.array([-(-(k + 1) * 2**32 // 35) - 1 for k in range(35)], np.uint32)
    np.testing.assert_array_equal(subset.draw(jnp.asarray(first)), left)
    np.testing.assert_array_equal(subset.draw(jnp.asarray(last)), left)


@pytest.mark.parametrize("gaps", quick([False, True], {True}))
def test_a_rank_in_a_ring_is_one_among_all(gaps):
    random = np.random.default_rng(5)
    rings = Rings.create(num_envs=4, length=9, sequence_length=2, period=1)
    place = jax.jit(lambda rings, mask: rings.place(5, mask)[0])
    for _ in range(3):
        rings = place(rings, random.random((4, 5)) < np.arange(4)[:, None] / 3)
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


def test_past_2_to_the_24_members():
    capacity, gone = 2**25 + 3, [5, 2**24 - 1, 2**24, 2**24 + 1, 2**25 + 2]
    subset = full_but_for(gone, capacity)
    assert subset.size == capacity - 5
    # One word for each of some ranks: at both ends, and where a float32 stops counting.
    ranks = [0, 4, 5, *range(2**24 - 500, 2**24 + 500), *range(2**25 - 500, capacity - 5)]
    words = np.array([-(-rank * 2**32 // (capacity - 5)) for rank in ranks], np.uint32)
    slots = np.delete(np.arange(capacity), gone)
    np.testing.assert_array_equal(jax.jit(lambda s, w: s.draw(w))(subset, words), slots[ranks])

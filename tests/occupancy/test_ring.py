"""The slots of a ring, and the steps of several rings, that hold something."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from jaxbuf.occupancy.ring import QueueRing, Ring
from jaxbuf.occupancy.rings import Rings


def numbers(*values):
    return jnp.asarray(values, jnp.uint32)


@pytest.mark.parametrize("capacity", [1, 2, 3, 8])
def test_the_newest_places_are_live_in_every_state(capacity):
    index = jnp.arange(-capacity - 1, 2 * capacity + 2, dtype=jnp.int32)
    states = list(itertools.product(range(capacity), range(capacity + 1)))
    for cursor, held in states:
        newest = [(cursor - 1 - age) % capacity for age in range(held)]
        # Other rings are without holes in front: they are full, or began at the first slot.
        kinds = [Ring, QueueRing] if held in (cursor, capacity) else [QueueRing]
        for kind in kinds:
            ring = kind(jnp.uint32(cursor), jnp.uint32(3), jnp.uint32(held), capacity)
            assert ring.live(index).tolist() == np.isin(index, newest).tolist()
            assert [int(ring.item_ages()[slot]) for slot in newest] == [*range(held)]
    rings = Rings(
        *map(numbers, *[(cursor, 3, held) for cursor, held in states]),
        length=capacity,
        sequence_length=1,
        period=1,
    )
    newest = [
        ring * capacity + (cursor - 1 - age) % capacity
        for ring, (cursor, held) in enumerate(states)
        for age in range(held)
    ]
    row = jnp.arange(-capacity - 1, (len(states) + 1) * capacity + 2, dtype=jnp.int32)
    assert rings.holds_step(row).tolist() == np.isin(row, newest).tolist()


def test_a_place_may_be_a_number_of_python():
    for kind in (Ring, QueueRing):
        ring = kind(jnp.uint32(2), jnp.uint32(1), jnp.uint32(2), 3)
        assert [index for index in (-1, 0, 1, 2, 3) if ring.live(index)] == [0, 1]


def test_the_largest_ring_knows_its_items():
    capacity, ends = 2**30, [-(2**31), -1, 2**30, 2**31 - 1]
    ring = QueueRing(jnp.uint32(5), jnp.uint32(3), jnp.uint32(capacity - 2), capacity)
    index = jnp.asarray([0, 4, 5, 6, 7, capacity - 1, *ends], jnp.int32)
    assert ring.live(index).tolist() == [True, True, False, False, True, True, *[False] * 4]
    ring = Ring(jnp.uint32(0), jnp.uint32(3), jnp.uint32(capacity), capacity)
    assert ring.live(index).tolist() == [*[True] * 6, *[False] * 2, False, False]

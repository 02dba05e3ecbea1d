"""Answers of buffers and occupancies that do not depend on their kind."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbuf
from jaxbuf.occupancy.ranking import Ranking
from jaxbuf.occupancy.ring import Ring
from jaxbuf.occupancy.rings import Rings
from jaxbuf.occupancy.subset import Subset
from tests.strategies.test_plug_in import HalfRing, Halves

REMOVABLE = {"parts": (jaxbuf.Removable(),)}
ITEMS = {
    "ring": {},
    "ranking": {"evictor": jaxbuf.Lowest()},
    "subset of a ring": REMOVABLE,
    "subset of a ranking": {"evictor": jaxbuf.Lowest(), **REMOVABLE},
}


@jax.jit
def in_order(occupancy):
    order, live = occupancy.in_order()
    return order, live, occupancy.live(order)


def live_in_order(occupancy):
    order, live, again = in_order(occupancy)
    np.testing.assert_array_equal(live, again)
    return np.asarray(order)[np.asarray(live)]


split = jax.jit(lambda rings: rings.ring_and_start(jnp.arange(rings.num_slots, dtype=jnp.int32)))


@pytest.mark.parametrize("name", ITEMS)
def test_items_from_the_oldest_to_the_newest(name):
    random, options = np.random.default_rng(0), ITEMS[name]
    buffer = jaxbuf.ItemBuffer.create(jnp.int32(0), 7, **options)
    scored, wide = "ranking" in name, 0
    for _ in range(12):
        rows = int(random.integers(1, 6))
        score = {"score": random.normal(size=rows).astype(np.float32)} if scored else {}
        buffer = jaxbuf.add(buffer, np.arange(wide, wide + rows, dtype=np.int32), **score)
        wide += rows
        if buffer.extras:
            buffer = buffer.remove(buffer.sample(jax.random.key(wide), 1).slots)
        # Items are numbers that rise as they arrive.
        found = np.asarray(buffer.data)[live_in_order(buffer.occupancy)].tolist()
        assert found == sorted(found)
        assert len(found) == buffer.size


@pytest.mark.parametrize(("period", "ignored"), [(1, 0), (3, 0), (1, 2), (3, 1)])
def test_windows_from_the_oldest_to_the_newest(period, ignored):
    random = np.random.default_rng(1)
    buffer = jaxbuf.TrajectoryBuffer.create(
        jnp.int32(0), 3, 12, sequence_length=3, period=period, num_earliest_ignored=ignored
    )
    removes = jaxbuf.TrajectoryBuffer.create(
        jnp.int32(0), 3, 12, sequence_length=3, period=period, **REMOVABLE
    )
    wide = 0
    for _ in range(10):
        rows = np.arange(wide, wide + 15, dtype=np.int32).reshape(3, 5)
        mask = random.random((3, 5)) < 0.7
        buffer = jaxbuf.add(buffer, rows, mask=mask)
        removes = jaxbuf.add(removes, rows, mask=mask)
        removes = removes.remove(removes.sample(jax.random.key(wide), 1).slots)
        wide += 15
        for one in (buffer, removes):
            slots = live_in_order(one.occupancy)
            env, start = (np.asarray(x)[slots] for x in split(one.rings))
            first = np.asarray(one.data)[env * one.length + start]
            # Ring by ring, and the steps of a ring are numbers that rise.
            np.testing.assert_array_equal(np.lexsort((first, env)), np.arange(first.size))
            assert first.size == one.num_windows


def test_an_occupancy_of_ones_own():
    """It knows the order if it says so, and continues no other one unless it can."""
    half = Halves().init(12)
    assert half.in_order() is None
    assert half.item_ages() is None
    assert half.item_scores() is None
    assert half.num_slots == 12
    with pytest.raises(ValueError, match=r"HalfRing does not define continuing\(old\)"):
        half.continuing(half)

    class Ordered(HalfRing):
        keeps_order = True

        def age_range(self, start, stop):
            return self.ring.age_range(start, stop)

    ordered = Ordered(ring=half.ring, capacity=12)
    for rows in (4, 5):
        ordered, _ = ordered.place(rows, None, None)
    order, live = ordered.in_order()
    assert order[live].tolist() == [3, 4, 5, 0, 1, 2]
    assert ordered.item_ages()[:6].tolist() == [2, 1, 0, 5, 4, 3]


@pytest.mark.parametrize(
    "occupancy",
    [Ring.create(6), Ranking.create(6), Rings.create(2, 6, 2, 2), Subset.create(Ring.create(6), 6)],
    ids=lambda occupancy: type(occupancy).__name__,
)
def test_slots_and_places(occupancy):
    assert occupancy.num_slots == 6
    places = occupancy.places
    assert isinstance(places, Ring | Ranking | Rings)
    other = places.clear()
    changed = occupancy.with_places(other)
    assert type(changed) is type(occupancy)
    assert changed.places is other
    assert jax.tree.structure(changed) == jax.tree.structure(occupancy)


CREATED = {
    "items": lambda: jaxbuf.ItemBuffer.create(
        {"x": jnp.zeros(3), "y": jnp.int32(0)},
        5,
        sampler=jaxbuf.Prioritized(0.7),
        diversity=jaxbuf.Diversity(0.1, field="x"),
        freshness=jaxbuf.Freshness(max_use=2),
        **REMOVABLE,
    ),
    "rings": lambda: jaxbuf.TrajectoryBuffer.create(
        {"x": jnp.zeros(3), "terminated": jnp.bool_(False)},
        2,
        8,
        sequence_length=2,
        period=2,
        num_earliest_ignored=1,
        episodes=jaxbuf.Episodes(boundary="avoid"),
    ),
    "queue": lambda: jaxbuf.Queue.create({"x": jnp.zeros((2, 3))}, 4),
}


@pytest.mark.parametrize("name", CREATED)
def test_a_buffer_knows_how_it_was_created(name):
    buffer = CREATED[name]()
    shapes = [leaf.shape for leaf in jax.tree.leaves(buffer.example)]
    assert shapes == [leaf.shape[1:] for leaf in jax.tree.leaves(buffer.data)]
    again = type(buffer).create(buffer.example, **buffer.sizes, **buffer.options())
    chex.assert_trees_all_equal(again, buffer)
    chex.assert_trees_all_equal(buffer.anew(), buffer)
    stacked = jax.jit(jax.vmap(lambda _: CREATED[name]()))(jnp.arange(3))
    assert stacked.example == buffer.example
    assert stacked.sizes == buffer.sizes
    larger = buffer.anew(**{name: 2 * size for name, size in buffer.sizes.items()})
    assert larger.sizes == {name: 2 * size for name, size in buffer.sizes.items()}
    assert larger.capacity == (4 if name == "rings" else 2) * buffer.capacity

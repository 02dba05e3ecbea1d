"""Answers of buffers and occupancies that do not depend on their kind."""

import chex
import jax
import jax.numpy as jnp
import pytest

import jaxbuf
from tests.strategies.test_plug_in import HalfRing, Halves


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


CREATED = {
    "items": lambda: jaxbuf.ItemBuffer.create(
        {"x": jnp.zeros(3), "y": jnp.int32(0)},
        5,
        sampler=jaxbuf.Prioritized(0.7),
        diversity=jaxbuf.Diversity(0.1, field="x"),
        freshness=jaxbuf.Freshness(max_use=2),
        parts=(jaxbuf.Removable(),),
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

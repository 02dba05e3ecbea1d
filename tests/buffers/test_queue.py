"""`Queue`: in order, once, and nothing lost without being counted."""

import jax.numpy as jnp

import jaxbuf


def test_past_2_to_the_32_items():
    queue = jaxbuf.Queue.create(jnp.int32(0), 4)
    ring = queue.occupancy.replace(cursor=jnp.uint32(2), lap=jnp.uint32(2**32 - 1))
    queue = queue.replace(occupancy=ring, counters=jnp.full((3,), 2**32 - 2, jnp.uint32))
    for t in range(4):
        queue = jaxbuf.add(queue, jnp.array([2 * t, 2 * t + 1]))
        queue, sample = jaxbuf.take(queue, 2)
        assert sample.data[sample.valid].tolist() == [2 * t, 2 * t + 1]
    assert (queue.metrics()["adds"], queue.metrics()["taken"]) == (6, 6)

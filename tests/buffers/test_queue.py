"""`Queue`: in order, once, and nothing lost without being counted."""

import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbuf


def create(capacity, example=None):
    return jaxbuf.Queue.create(jnp.int32(0) if example is None else example, capacity)


def integers(*values):
    return jnp.array(values, jnp.int32)


take = jax.jit(lambda queue, batch_size: queue.take(batch_size), static_argnums=1)


def taken(queue, batch_size):
    queue, sample = take(queue, batch_size)
    return queue, np.asarray(sample.data)[np.asarray(sample.valid)].tolist()


def test_trajectories_of_any_structure():
    example = {"obs": jnp.zeros((4, 2)), "action": jnp.zeros(4, jnp.int8)}
    queue = create(2, example)
    items = {"obs": jnp.ones((1, 4, 2)), "action": jnp.full((1, 4), 3, jnp.int8)}
    queue, sample = take(jaxbuf.add(queue, items), 1)
    chex.assert_trees_all_equal(sample.data, items)
    assert sample.data["action"].dtype == jnp.int8


def test_past_2_to_the_32_items():
    queue = create(4)
    ring = queue.occupancy.replace(cursor=jnp.uint32(2), lap=jnp.uint32(2**32 - 1))
    queue = queue.replace(
        occupancy=ring,
        counters=jnp.full((3,), 2**32 - 2, jnp.uint32),
    )
    for t in range(4):
        queue = jaxbuf.add(queue, integers(2 * t, 2 * t + 1))
        queue, items = taken(queue, 2)
        assert items == [2 * t, 2 * t + 1]
    assert (queue.metrics()["adds"], queue.metrics()["taken"]) == (6, 6)


BAD = [
    (lambda: create(2, {}), "example has no leaves"),
    (lambda: create(2).add(jnp.zeros((3, 1), jnp.int32)), "items has shape (3, 1); expected (B,)"),
    (lambda: create(2).add(jnp.zeros(3)), "items has dtype float32; expected int32"),
    (lambda: create(2).add(integers(1, 2), mask=jnp.ones(3, bool)), "mask has shape (3,)"),
    (lambda: create(2).add(integers(1), mask=jnp.ones(1)), "mask has dtype float32"),
]


@pytest.mark.parametrize(("call", "message"), BAD)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        call()

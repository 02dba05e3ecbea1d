"""What XLA makes of a step: nothing as large as a buffer may be copied in it."""

import jax
import jax.numpy as jnp
import pytest

import jaxbuf
from jaxbuf.io.hlo import Program

CAPACITY = 2**14
EXAMPLE = {"obs": jnp.zeros(7), "reward": jnp.float32(0)}
PRIORITIZED = jaxbuf.Prioritized()


def items(rows):
    return jax.tree.map(lambda leaf: jnp.ones((rows, *leaf.shape), leaf.dtype), EXAMPLE)


def copies(function, *args):
    """The copies of arrays with at least one number per slot in the compiled ``function``."""
    compiled = jax.jit(function, donate_argnums=0).lower(*args).compile()
    found = Program(compiled.as_text()).copies(4 * CAPACITY)
    return [copy.shape for copy in found if max(copy.shape) >= CAPACITY]


def cycle(rows, batch_size, normalize):
    def step(buffer, key):
        buffer = buffer.add(items(rows))
        batch = buffer.sample(key, batch_size)
        weights = jaxbuf.importance_weights(buffer, batch, 0.4, normalize)
        td_error = batch.data["reward"] - batch.data["obs"].mean(-1)
        return buffer.update_priority(batch.slots, jnp.abs(td_error)), jnp.sum(weights * td_error)

    return step


@pytest.mark.parametrize("normalize", ["batch", "buffer"])
@pytest.mark.parametrize(("rows", "batch_size"), [(1, 1), (1, 32), (64, 256), (2048, 4096)])
def test_a_scanned_cycle_copies_nothing(rows, batch_size, normalize):
    buffer = jaxbuf.ItemBuffer.create(EXAMPLE, CAPACITY, sampler=PRIORITIZED)
    keys = jax.random.split(jax.random.key(0), 3)
    step = cycle(rows, batch_size, normalize)
    assert not copies(lambda buffer, keys: jax.lax.scan(step, buffer, keys), buffer, keys)


def test_a_cycle_over_seeds_copies_nothing():
    empty = jaxbuf.ItemBuffer.create(EXAMPLE, CAPACITY, sampler=PRIORITIZED)
    buffers = jax.tree.map(lambda leaf: jnp.stack([leaf] * 3), empty)
    keys = jax.random.split(jax.random.key(0), (5, 3))
    step = jax.vmap(cycle(4, 32, "batch"))
    assert not copies(lambda buffers, keys: jax.lax.scan(step, buffers, keys), buffers, keys)


def test_updates_that_ignore_the_probabilities_copy_nothing():
    buffer = jaxbuf.ItemBuffer.create(EXAMPLE, CAPACITY, sampler=PRIORITIZED)

    def step(buffer, key):
        batch = buffer.sample(key, 256)
        return buffer.update_priority(batch.slots, jnp.ones(256)), batch.probability

    keys = jax.random.split(jax.random.key(0), 3)
    assert not copies(lambda buffer, keys: jax.lax.scan(step, buffer, keys), buffer, keys)


def operations(function, *args):
    """What XLA takes for the number of operations of the compiled ``function``."""
    return jax.jit(function).lower(*args).compile().cost_analysis()["flops"]


def test_small_programs_are_short_enough_to_run_at_once():
    # Beyond 1,000 operations XLA:CPU hands a program to a thread, and waits for it.
    buffer = jaxbuf.ItemBuffer.create(EXAMPLE, 2**20, sampler=PRIORITIZED)
    key, slots = jax.random.key(0), buffer.sample(jax.random.key(0), 64).slots
    assert operations(lambda buffer: buffer.add(items(64)), buffer) < 1000
    assert operations(lambda buffer, key: buffer.sample(key, 128), buffer, key) < 1000
    update = operations(
        lambda buffer, slots: buffer.update_priority(slots, jnp.ones(64)), buffer, slots
    )
    assert update < 1000


def test_the_check_sees_a_copy():
    buffer = jaxbuf.ItemBuffer.create(EXAMPLE, CAPACITY, sampler=PRIORITIZED)

    def both(buffer, key):
        batch = buffer.sample(key, 256)
        return buffer.add(items(64)), batch.data

    keys = jax.random.split(jax.random.key(0), 3)
    assert copies(lambda buffer, keys: jax.lax.scan(both, buffer, keys), buffer, keys)

"""Numbers that other libraries publish or test, and cases in which one of them is known to fail."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbuf

PROPORTIONAL = jaxbuf.Prioritized(alpha=1.0)
REVEAL = jaxbuf.Prioritized(alpha=1.0, replacement=False)


def filled(sampler, priorities, capacity=None):
    buffer = jaxbuf.ItemBuffer.create(jnp.int32(0), capacity or len(priorities), sampler=sampler)
    items = jnp.arange(len(priorities), dtype=jnp.int32)
    return jaxbuf.add(buffer, items, priority=jnp.asarray(priorities, jnp.float32))


def draw(buffer, batch_size, seed=0):
    return jaxbuf.sample(buffer, jax.random.key(seed), batch_size)


def all_slots(buffer):
    """Handles of all items in slot order, of a buffer that samples without replacement."""
    slots = draw(buffer, buffer.capacity).slots
    order = np.argsort(np.asarray(slots.index))
    return jax.tree.map(lambda leaf: leaf[order], slots)


def shares(buffer):
    """``[capacity]`` probability by slot, of a buffer that samples without replacement."""
    sample = draw(buffer, buffer.capacity)
    valid = np.asarray(sample.valid)
    out = np.zeros(buffer.capacity)
    out[np.asarray(sample.slots.index)[valid]] = np.asarray(sample.probability)[valid]
    return out


@pytest.mark.parametrize(
    ("priorities", "counts"),
    [
        # Eleven strata of width one: dqn_zoo's query table as exact counts.
        ([3.0, 1.0, 2.0, 5.0], [3, 1, 2, 5]),
        # Sixteen strata of width .1: ALF's.
        ([0.0, 0.1, 0.5, 0.0, 0.0, 0.2, 0.8, 0.0], [0, 1, 5, 0, 0, 2, 8, 0]),
    ],
)
def test_sum_trees_of_dqn_zoo_and_alf_by_strata(priorities, counts):
    buffer = filled(PROPORTIONAL, priorities)
    for seed in range(20):
        drawn = np.asarray(draw(buffer, sum(counts), seed).data)
        assert np.bincount(drawn, minlength=len(counts)).tolist() == counts


@pytest.mark.parametrize("normalize", ["batch", "buffer"])
def test_di_engine_weights(normalize):
    sampler = jaxbuf.Prioritized(alpha=0.6, replacement=False)
    buffer = filled(sampler, [1.0, 2.0, 4.0, 8.0])
    sample = draw(buffer, 4)
    weights = jaxbuf.importance_weights(buffer, sample, beta=0.4, normalize=normalize)
    by_item = np.asarray(weights)[np.argsort(np.asarray(sample.data))]
    np.testing.assert_allclose(by_item, [1.0, 0.846745, 0.716978, 0.607097], atol=5e-7)


def test_flashbax_outlier_of_3e7_set_back():
    """Sums kept by deltas lose the small priorities for good once a large one has passed."""
    buffer = filled(REVEAL, [0.1] * 8)
    slots = all_slots(buffer)
    outlier = jnp.array([0.1, 0.1, 0.1, 3e7, 0.1, 0.1, 0.1, 0.1], jnp.float32)
    buffer = jaxbuf.update_priority(buffer, slots, outlier)
    assert shares(buffer)[3] == pytest.approx(1.0)
    buffer = jaxbuf.update_priority(buffer, slots, jnp.full(8, 0.1, jnp.float32))
    np.testing.assert_allclose(shares(buffer), 0.125, rtol=1e-6)
    # With 8 equal strata, each item is drawn exactly once: no draw lands on a wrong item.
    stratified = filled(PROPORTIONAL, [0.1] * 8)
    slots = draw(stratified, 8).slots
    for value in (3e7, 0.1):
        one = jax.tree.map(lambda leaf: leaf[3:4], slots)
        stratified = jaxbuf.update_priority(stratified, one, jnp.array([value], jnp.float32))
    for seed in range(20):
        assert sorted(np.asarray(draw(stratified, 8, seed).data).tolist()) == list(range(8))


def test_flashbax_a_thousand_update_rounds_in_float32():
    """No drift: after 1,000 rounds over eight magnitudes the shares are those of float64."""
    capacity, rounds, batch = 50, 1_000, 16
    rng = np.random.default_rng(0)
    index = rng.integers(0, capacity, (rounds, batch))
    priority = (10.0 ** rng.uniform(-4, 4, (rounds, batch))).astype(np.float32)
    buffer = filled(REVEAL, np.ones(capacity))
    slots = all_slots(buffer)

    @functools.partial(jax.jit, donate_argnums=0)
    def run(buffer, slots, index, priority):
        def body(buffer, row):
            chosen = jax.tree.map(lambda leaf: leaf[row[0]], slots)
            return buffer.update_priority(chosen, row[1]), None

        return jax.lax.scan(body, buffer, (index, priority))[0]

    buffer = run(buffer, slots, jnp.asarray(index, jnp.int32), jnp.asarray(priority))
    twin = np.ones(capacity)
    for i, p in zip(index.ravel(), priority.ravel(), strict=True):
        twin[i] = p
    np.testing.assert_allclose(shares(buffer), twin / twin.sum(), rtol=2e-6)
    assert buffer.metrics()["priority_max"] == np.float32(twin.max())
    assert buffer.metrics()["priority_min"] == np.float32(twin.min())
    # Back to one everywhere: sums are exact again, to the last bit.
    buffer = jaxbuf.update_priority(buffer, slots, jnp.ones(capacity, jnp.float32))
    np.testing.assert_array_equal(np.float32(shares(buffer)), np.float32(1 / 50))

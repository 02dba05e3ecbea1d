"""Numbers that other libraries publish or test, and cases in which one of them is known to fail."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbuf
from tests.models import items as reference

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


DQN_ZOO_QUERIES = [(0.0, 0), (2.9, 0), (3.0, 1), (3.9, 1), (4.0, 2), (6.0, 3), (10.9, 3)]
ALF_QUERIES = [(0, 1), (0.09, 1), (0.1, 2), (0.59, 2), (0.6, 5), (0.799, 5), (0.8, 6)]


@pytest.mark.parametrize(
    ("priorities", "queries"),
    [
        ([3.0, 1.0, 2.0, 5.0], DQN_ZOO_QUERIES),
        ([0.0, 0.1, 0.5, 0.0, 0.0, 0.2, 0.8, 0.0], [*ALF_QUERIES, (1.5999999, 6)]),
    ],
)
def test_the_reference_tree_answers_the_published_queries(priorities, queries):
    tree = reference.SegmentTree(len(priorities))
    tree.set(range(len(priorities)), priorities)
    for prefix, slot in queries:
        assert tree.query(prefix) == slot


def test_dqn_zoo_sum_tree_by_strata():
    """Eleven strata of width one over ``[3, 1, 2, 5]``: dqn_zoo's query table as exact counts."""
    buffer = filled(PROPORTIONAL, [3.0, 1.0, 2.0, 5.0])
    for seed in range(20):
        drawn = np.sort(np.asarray(draw(buffer, 11, seed).data))
        np.testing.assert_array_equal(drawn, [0, 0, 0, 1, 2, 2, 3, 3, 3, 3, 3])


def test_alf_sum_tree_by_strata():
    """Sixteen strata of width .1 over ALF's ``[0, .1, .5, 0, 0, .2, .8, 0]``."""
    buffer = filled(PROPORTIONAL, [0.0, 0.1, 0.5, 0.0, 0.0, 0.2, 0.8, 0.0])
    for seed in range(20):
        drawn = np.sort(np.asarray(draw(buffer, 16, seed).data))
        np.testing.assert_array_equal(drawn, [1] + [2] * 5 + [5] * 2 + [6] * 8)


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


@pytest.mark.parametrize("bad", [np.nan, np.inf, -1.0])
def test_flashbax_nan_priority(bad):
    """A NaN priority stays in running sums for good; here the row is refused and counted."""
    buffer = filled(REVEAL, [1.0, 2.0, 3.0, 4.0])
    slots = all_slots(buffer)
    buffer = jaxbuf.update_priority(buffer, slots, jnp.array([1.0, bad, 3.0, 4.0], jnp.float32))
    np.testing.assert_allclose(shares(buffer), [0.1, 0.2, 0.3, 0.4], rtol=1e-6)
    assert buffer.metrics()["rejected"] == 1
    buffer = jaxbuf.add(buffer, jnp.array([9], jnp.int32), priority=jnp.array([bad], jnp.float32))
    assert buffer.metrics()["rejected"] == 2
    buffer = jaxbuf.update_priority(buffer, slots, jnp.full(4, 5.0, jnp.float32))
    np.testing.assert_allclose(shares(buffer), 0.25, rtol=1e-6)


def test_flashbax_stale_update():
    """An update for an item that was overwritten does not touch the item that took its slot."""
    buffer = filled(REVEAL, [1.0, 1.0, 1.0, 1.0])
    sampled = all_slots(buffer)
    buffer = jaxbuf.add(
        buffer, jnp.array([4, 5], jnp.int32), priority=jnp.array([2.0, 3.0], jnp.float32)
    )
    buffer = jaxbuf.update_priority(
        buffer, sampled, jnp.array([100.0, 100.0, 4.0, 1.0], jnp.float32)
    )
    np.testing.assert_allclose(shares(buffer), [0.2, 0.3, 0.4, 0.1], rtol=1e-6)
    assert buffer.metrics()["rejected"] == 0


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

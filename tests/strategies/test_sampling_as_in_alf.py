"""ALF's worked examples of prioritized sampling.

What ALF calls sampling without replacement is one draw from each of ``B`` equal parts of the total
mass: ``stratified=True`` here, and the counts follow exactly from the priorities.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbuf


def counts_and_weights(buffer, key):
    """``{(env, position): (rows of 1,000, weight)}``."""
    sample = jaxbuf.sample(buffer, jax.random.key(key), 1000)
    env, position = buffer.locate(sample.slots)
    # ALF's weight is the priority over the mean of the nonzero ones: p * nnz / sum(p).
    weights = jaxbuf.importance_weights(buffer, sample, -1.0, "mean")
    names, first, count = np.unique(
        np.stack([env, position], axis=1), axis=0, return_index=True, return_counts=True
    )
    return {
        tuple(name): (int(rows), float(weight))
        for name, rows, weight in zip(names.tolist(), count, weights[first], strict=True)
    }


def test_priorities_give_exact_counts_and_weights():
    sampler = jaxbuf.Prioritized(alpha=1.0)
    buffer = jaxbuf.TrajectoryBuffer.create(jnp.float32(0), 8, 4, sampler=sampler)
    one = jnp.arange(8) == 1
    for _ in range(2):
        buffer = jaxbuf.add(buffer, jnp.full(8, 0.25), mask=one)
    assert counts_and_weights(buffer, 0) == {(1, 0): (500, 1.0), (1, 1): (500, 1.0)}

    slots = buffer.latest(2).slots
    names = jaxbuf.Slots(index=slots.index[2:4], generation=slots.generation[2:4])
    buffer = jaxbuf.update_priority(buffer, names, jnp.array([0.5, 1.5]))
    seen = counts_and_weights(buffer, 1)
    assert {name: row[0] for name, row in seen.items()} == {(1, 0): 250, (1, 1): 750}

    two = (jnp.arange(8) == 0) | (jnp.arange(8) == 2)
    buffer = jaxbuf.add(buffer, jnp.full(8, 0.5), mask=two)
    seen = counts_and_weights(buffer, 2)
    assert [row[0] for row in seen.values()] == [300, 100, 300, 300]
    assert list(seen) == [(0, 0), (1, 0), (1, 1), (2, 0)]
    assert [row[1] for row in seen.values()] == pytest.approx([1.2, 0.4, 1.2, 1.2])

    slots = buffer.latest(1).slots
    names = jaxbuf.Slots(index=slots.index[1:3], generation=slots.generation[1:3])
    buffer = jaxbuf.update_priority(buffer, names, jnp.ones(2))
    seen = counts_and_weights(buffer, 3)
    assert [row[0] for row in seen.values()] == [375, 125, 250, 250]
    assert [row[1] for row in seen.values()] == pytest.approx([1.5, 0.5, 1.0, 1.0])

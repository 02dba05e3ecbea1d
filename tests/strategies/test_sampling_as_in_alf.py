"""ALF's worked examples of prioritized sampling.

What ALF calls sampling without replacement is one draw from each of ``B`` equal parts of the total
mass: ``stratified=True`` here, and the counts follow exactly from the priorities.
"""

import jax
import jax.numpy as jnp
import numpy as np

import jaxbuf


def test_priorities_give_exact_counts_and_weights():
    sampler = jaxbuf.Prioritized(alpha=1.0)
    buffer = jaxbuf.TrajectoryBuffer.create(jnp.float32(0), 8, 4, sampler=sampler)
    for envs in ([1], [1], [0, 2]):
        buffer = jaxbuf.add(buffer, jnp.zeros(8), mask=jnp.isin(jnp.arange(8), jnp.array(envs)))
    for changes, rows in (
        ({(1, 0): 0.5, (1, 1): 1.5, (0, 0): 1.5, (2, 0): 1.5}, [300, 100, 300, 300]),
        ({(1, 1): 1.0, (2, 0): 1.0}, [375, 125, 250, 250]),
    ):
        slots = buffer.slots_at(*jnp.array([*changes]).T)
        buffer = jaxbuf.update_priority(buffer, slots, jnp.array([*changes.values()]))
        sample = jaxbuf.sample(buffer, jax.random.key(0), 1000)
        # ALF's weight is the priority over the mean of the nonzero ones: p * nnz / sum(p).
        weights = jaxbuf.importance_weights(buffer, sample, -1.0, "mean")
        places = np.stack(buffer.locate(sample.slots), axis=1)
        names, first, count = np.unique(places, axis=0, return_index=True, return_counts=True)
        assert names.tolist() == [[0, 0], [1, 0], [1, 1], [2, 0]]
        assert count.tolist() == rows
        np.testing.assert_allclose(weights[first], np.array(rows) / 250, rtol=1e-6)

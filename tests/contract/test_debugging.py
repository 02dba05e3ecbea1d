"""JAX's debugging options find nothing wrong in any operation of any strategy."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbuf
from tests import operations

# The operations that every strategy takes part in; others take long without jit.
STRATEGIC = {"add_plainly", "update_priority", "importance_weights", "metrics"}
PLAIN = {"prioritized", "fresh-prioritized", "windows-prioritized", "windows-episodes", "queue"}


def number():
    return jnp.float32(1)


@pytest.mark.parametrize(
    "name", operations.quick(["prioritized", "windows-prioritized"], {"windows-prioritized"})
)
def test_nothing_is_sent_when_it_runs(name):
    buffer, sample = operations.concrete(name)
    key, beta, priority = jax.random.key(0), number(), jnp.ones(operations.BATCH)
    with jax.transfer_guard("disallow"):
        jaxbuf.importance_weights(buffer, sample, beta)
        buffer = jaxbuf.update_priority(buffer, sample.slots, priority)
        jaxbuf.sample(buffer, key, operations.BATCH)


@pytest.mark.parametrize(
    "name", operations.quick(operations.DIFFERENT, {"windows-prioritized", "queue"})
)
def test_filling_and_sampling_is_the_same_without_jit(name):
    key = jax.random.key(0)
    with jax.disable_jit(), jax.debug_nans(True):
        buffer = operations.BUFFERS[name]()
        sample = operations.draw(buffer, key)
        buffer.metrics()
        if operations.is_sampled(buffer):
            operations.importance_weights(buffer, sample, number(), key)
        if operations.is_single(buffer) and name in PLAIN:
            operations.statistics(buffer, sample, number(), key)
        buffer = operations.add(buffer, None, number(), key)
        sample = operations.draw(buffer, key)
    chex.assert_trees_all_close((buffer, sample), operations.concrete(name), rtol=1e-6)


OTHERS = [
    (name, what)
    for name, what in operations.CASES
    if what not in ("add", "sample") and (what in STRATEGIC or name in PLAIN)
]


@pytest.mark.parametrize(
    ("name", "what"),
    operations.quick(OTHERS, [("prioritized", what) for what in STRATEGIC]),
)
def test_every_operation_works_without_jit_and_computes_no_nan(name, what):
    _, function = operations.OPERATIONS[what]
    args = (*operations.concrete(name), number(), jax.random.key(0))
    with jax.disable_jit(), jax.debug_nans(True):
        function(*args)


@pytest.mark.parametrize(
    "name", operations.quick(["lowest", "fresh-lowest-softmax"], {"fresh-lowest-softmax"})
)
def test_a_plot_computes_no_nan(name):
    pytest.importorskip("matplotlib").use("agg")
    buffer, _ = operations.concrete(name)
    with jax.debug_nans(True):
        jaxbuf.plot(buffer)


# One length for all, so that primitives without jit are compiled once.
INFINITE = [[jnp.inf] * 2, [-jnp.inf] * 2, [jnp.inf, -jnp.inf], [3.0, -jnp.inf]]


@pytest.mark.slow
@pytest.mark.parametrize("scores", INFINITE)
@pytest.mark.parametrize("name", ["softmax-distinct", "lowest-softmax"])
def test_infinite_scores_make_no_nan(name, scores):
    key, rows = jax.random.key(0), operations.rows(number(), len(scores))
    with jax.disable_jit(), jax.debug_nans(True):
        buffer = operations.BUFFERS[name]()
        for _ in range(2):
            buffer = buffer.add(rows, score=jnp.asarray(scores))
            operations.metrics(buffer, None, None, None)
            operations.draw(buffer, key)


@pytest.mark.parametrize("alpha", [0.5, 0.6])
@pytest.mark.parametrize("priority", [[-1.0, 2.0], [jnp.inf, -jnp.inf]])
def test_illegal_priorities_make_no_nan(alpha, priority):
    illegal = jnp.asarray(priority)
    sampler = jaxbuf.Prioritized(alpha=alpha)
    with jax.disable_jit(), jax.debug_nans(True):
        buffer = jaxbuf.ItemBuffer.create(jnp.int32(0), 4, sampler=sampler)
        buffer = buffer.add(jnp.arange(2))
        buffer = buffer.update_priority(buffer.latest(2).slots, illegal)
        rings = jaxbuf.TrajectoryBuffer.create(jnp.int32(0), 2, 4, sampler=sampler)
        rings = rings.add(jnp.arange(2), priority=illegal)
    refused = sum(not (0 <= p < np.inf) for p in priority)
    for which in (buffer, rings):
        assert int(which.metrics()["rejected"]) == refused

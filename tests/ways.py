"""One run of a buffer from Python, in a compiled scan, without jit, and under vmap."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxbuf import testing


def assert_ways_agree(run, empty):
    """Checks that a run gives the same sample in all ways, and leaves valid buffers.

    Args:
        run: A function of an empty buffer and a loop, which is called like ``jax.lax.scan``. It
            returns the buffer and a sample.
        empty: The empty buffer.
    """
    buffer, expected = run(empty, in_python)
    testing.assert_valid(buffer)
    scan = functools.partial(run, loop=jax.lax.scan)
    many = jax.tree.map(lambda leaf: jnp.stack([leaf] * 2), empty)
    lanes, batches = jax.jit(jax.vmap(scan))(many)
    testing.assert_valid(lanes)
    with jax.disable_jit():
        plainly = run(empty, in_python)[1]
    others = [jax.jit(scan)(empty)[1], jax.tree.map(lambda leaf: leaf[1], batches), plainly]
    for other in others:
        np.testing.assert_array_equal(expected.data, other.data)
        np.testing.assert_allclose(expected.probability, other.probability, rtol=1e-6)


def in_python(function, carry, inputs):
    """A scan as a loop of Python."""
    outputs = []
    for i in range(len(jax.tree.leaves(inputs)[0])):
        carry, output = function(carry, jax.tree.map(lambda leaf: leaf[i], inputs))  # noqa: B023
        outputs.append(output)
    return carry, jax.tree.map(lambda *leaves: jnp.stack(leaves), *outputs)

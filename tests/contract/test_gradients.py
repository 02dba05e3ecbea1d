"""Inside `jax.grad` items carry gradients; priorities, scores, versions and counters carry none.

Every operation of every strategy, its arguments and the buffer itself depending on a parameter.
"""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Literal

import jaxbuf
from jaxbuf.core import storage
from tests import operations

# Their results are items, or are made of items, as a whole.
ITEMS_ONLY = {"read", "views"}


def is_float(leaf):
    return jnp.issubdtype(leaf.dtype, jnp.floating)


def is_there(total):
    return total is not None


def depending(function, buffer, sample, parameter, key):
    """Returns the output of an operation whose arguments and contents scale with a factor."""

    def scaled(tree):
        return jax.tree.map(lambda leaf: leaf * parameter if is_float(leaf) else leaf, tree)

    if isinstance(buffer, jaxbuf.Mixture):
        parts = [part.replace(data=scaled(part.data)) for part in buffer.parts]
        buffer = buffer.replace(parts=tuple(parts))
    else:
        names = {"data", "sampler_state"} & vars(buffer).keys()
        buffer = buffer.replace(**{name: scaled(getattr(buffer, name)) for name in names})
    sample = sample.replace(data=scaled(sample.data), probability=scaled(sample.probability))
    return function(buffer, sample, parameter, key)


def items_and_books(what, result):
    """The sums of all numbers in items, and of all others; None where there are none."""
    sums = [None, None]
    for path, leaf in jax.tree_util.tree_leaves_with_path(result):
        if is_float(leaf):
            in_data = any(getattr(key, "name", "") == "data" for key in path)
            which = 0 if in_data or what in ITEMS_ONLY else 1
            # Infinite values, such as the score of a free slot, cannot be scaled.
            known = jnp.sum(jnp.where(jnp.isfinite(leaf), leaf, 0))
            sums[which] = known if sums[which] is None else sums[which] + known
    return sums


@pytest.mark.parametrize(("name", "what"), operations.pairs(operations.CASES))
def test_only_items_carry_gradients(name, what):
    _, function = operations.OPERATIONS[what]
    args = (jnp.float32(1), *operations.abstract(name), jax.random.key(0))

    # Jitted, it is traced once for all of what follows.
    @jax.jit
    def sums(parameter, buffer, sample, key):
        return items_and_books(what, depending(function, buffer, sample, parameter, key))

    def forward(parameter, *rest):
        return jax.jvp(lambda x: sums(x, *rest), (parameter,), (parameter,))[1]

    def backward(*args):
        return jax.grad(lambda *args: sum(filter(is_there, sums(*args)), jnp.float32(0)))(*args)

    items, books = jax.eval_shape(sums, *args)
    # Whether each slope is known to be zero before anything is computed.
    constant = [
        isinstance(slope, Literal) and slope.val == 0
        for way in (forward, backward)
        for slope in jax.make_jaxpr(way)(*args).jaxpr.outvars
    ]
    depends = items is not None and what != "clear"
    expected = [not depends] * is_there(items) + [True] * is_there(books)
    assert constant == [*expected, not depends]


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("prioritized", "sample"),
        ("prioritized", "add"),
        pytest.param("windows-prioritized", "sample", marks=pytest.mark.slow),
        ("queue", "take"),
    ],
)
def test_gradients_of_items_are_right_in_every_way_to_compute_them(name, what):
    _, function = operations.OPERATIONS[what]
    buffer, sample = operations.concrete(name)
    key = jax.random.key(0)

    def of_items(parameter):
        result = depending(function, buffer, sample, parameter, key)
        return items_and_books(what, result)[0]

    # All of them are proportional to the parameter.
    at, slope = jnp.float32(1), jax.grad(of_items)
    wanted, forward = jax.jit(lambda x: jax.jvp(of_items, (x,), (x,)))(at)
    found = [forward, jax.jit(slope)(at), jax.jit(jax.vmap(slope))(at[None])[0]]
    if name == "windows-prioritized":
        found.append(slope(at))
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


@pytest.mark.parametrize(
    "name", operations.quick(["prioritized", "windows-prioritized", "mixture"], {"mixture"})
)
def test_a_loss_may_return_updated_priorities(name):
    buffer, batch = operations.concrete(name)

    def loss(weight, buffer, batch):
        error = weight * jnp.sum(batch.data["reward"].reshape(operations.BATCH, -1), axis=1)
        weights = jaxbuf.importance_weights(buffer, batch, weight)
        updated = jaxbuf.update_priority(buffer, batch.slots, jnp.abs(error))
        return jnp.sum(weights * error), updated

    at = jnp.float32(0.5)
    slope, updated = jax.grad(loss, has_aux=True)(at, buffer, batch)
    jitted = jax.jit(jax.grad(loss, has_aux=True))(at, buffer, batch)
    chex.assert_trees_all_close(jitted, (slope, updated), rtol=1e-6)
    # The weights count as constants.
    weights = jaxbuf.importance_weights(buffer, batch, at)
    rewards = jnp.sum(batch.data["reward"].reshape(operations.BATCH, -1), axis=1)
    np.testing.assert_allclose(slope, jnp.sum(weights * rewards), rtol=1e-5)


def test_a_whole_buffer_may_be_differentiated():
    buffer, _ = operations.concrete("prioritized")

    def loss(buffer):
        batch = buffer.sample(jax.random.key(0), 4, beta=0.5)
        return jnp.sum(batch.weights * batch.probability * batch.data["reward"])

    slope = jax.grad(loss, allow_int=True)(buffer)
    assert slope.data["reward"].any()
    assert not any(leaf.any() for leaf in jax.tree.leaves(slope.sampler_state))


def test_keys_are_read_beside_what_is_differentiated():
    data = {"key": jax.random.split(jax.random.key(0), 3), "x": jnp.arange(3.0)}

    def loss(x):
        rows = storage.read(data | {"x": x}, jnp.array([2, 2, 0]))
        return jnp.sum(rows["x"]), rows["key"]

    slope, _ = jax.grad(loss, has_aux=True)(data["x"])
    assert slope.tolist() == [1, 0, 2]

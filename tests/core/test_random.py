"""The words that indices and points are drawn with."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P, lax

from jaxbuf.core import native
from jaxbuf.core.random import random_words
from jaxbuf.testing import hlo
from tests.operations import quick

SHAPES = [(), (3, 0, 5), (7,), (2, 256), (1025,)]
KEYS = {
    "typed": lambda: jax.random.key(2**31 + 5),
    "raw": lambda: jax.random.PRNGKey(11),
    "rbg": lambda: jax.random.key(3, impl="rbg"),
    "unsafe_rbg": lambda: jax.random.key(3, impl="unsafe_rbg"),
}


# Keys of the usual generator alone have kernels, and are counted in two ways.
@pytest.mark.parametrize(
    ("kind", "partitionable", "kernels"),
    quick(
        [*itertools.product(("typed", "raw"), *[(True, False)] * 2)]
        + [(kind, True, True) for kind in ("rbg", "unsafe_rbg")],
        [("typed", True, True), ("raw", False, False), ("rbg", True, True)],
    ),
)
def test_random_words_are_those_of_jax(kind, partitionable, kernels):
    with native.using_native(kernels), jax.threefry_partitionable(partitionable):
        keys = jax.random.split(KEYS[kind](), 3)
        for shape in SHAPES:
            jitted = jax.jit(lambda key, shape=shape: random_words(key, shape))
            draws = [(jitted, key) for key in keys]
            # One key is enough without jit, where each step is compiled by itself.
            for draw, key in [*draws, (lambda key, shape=shape: random_words(key, shape), keys[0])]:
                found = draw(key)
                assert (found.shape, found.dtype) == (shape, jnp.uint32)
                np.testing.assert_array_equal(found, jax.random.bits(key, shape, jnp.uint32))


def test_a_raw_key_is_one_of_the_generator_that_is_the_default():
    before = jax.config.jax_default_prng_impl
    try:
        jax.config.update("jax_default_prng_impl", "rbg")
        key = jax.random.PRNGKey(0)
        wanted = jax.random.bits(key, (9,), jnp.uint32)
        np.testing.assert_array_equal(random_words(key, (9,)), wanted)
    finally:
        jax.config.update("jax_default_prng_impl", before)


OF_KINDS = [("typed", False), *((kind, True) for kind in KEYS)]


@pytest.mark.parametrize(("kind", "kernels"), quick(OF_KINDS, {("typed", False), ("rbg", True)}))
def test_random_words_within_transformations_are_those_of_jax(kind, kernels):
    keys = jax.random.split(KEYS[kind](), 4)
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def each(draw):
        return lambda keys: lax.map(lambda key: draw(key, (2, 15)), keys)

    def every(draw):
        return lambda keys: jax.vmap(lambda key: draw(key, (2, 15)))(keys)

    def sharded(draw, spec):
        # With its checks: the words vary over the mesh where the key does.
        def body(keys):
            return draw(keys[0], (2, 15))[None]

        return jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec)

    forms = [each, every, lambda draw: jax.vmap(every(draw))]
    forms += [functools.partial(sharded, spec=spec) for spec in (P(), P("data"))]
    bits = functools.partial(jax.random.bits, dtype=jnp.uint32)
    for number, form in enumerate(forms):
        given = jnp.stack([keys, keys[::-1]]) if number == 2 else keys
        with native.using_native(kernels):
            found, wanted = (jax.jit(form(draw))(given) for draw in (random_words, bits))
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.skipif(not native.native_available(), reason="the kernels were not built")
def test_words_of_the_usual_generator_are_made_by_one_kernel():
    # On a CPU XLA makes 17 kernels of each step of a loop, and hands them to other threads.
    with native.using_native(True):
        lowered = jax.jit(random_words, static_argnums=1).lower(jax.random.key(0), (2, 256))
    computations, entry = hlo.parse(lowered.compile().as_text())
    found = [instruction.opcode for instruction in computations[entry]]
    assert found.count("custom-call") == 1
    assert not {"while", "fusion"} & {*found}


def test_more_words_than_a_counter_of_32_bits_tells_apart_are_those_of_jax():
    program = jax.make_jaxpr(lambda key: random_words(key, (2**20, 2**13)))(jax.random.key(0))
    assert "random_bits" in str(program)

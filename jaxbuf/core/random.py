"""Checks of PRNG keys, random words, and bounded random integers made from them."""

import functools
import math
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Integer, UInt

from jaxbuf.core import native, trees
from jaxbuf.core.leaves import is_key
from jaxbuf.core.order import in_halves
from jaxbuf.core.types import Key, Words


def check_key(key: object) -> Key:
    """Returns ``key``, a single PRNG key, as a JAX array.

    Raises:
        ValueError: If it is not a key from ``jax.random.key`` or ``jax.random.PRNGKey``.
    """
    key, kind = trees.native(key), type(key).__name__
    if isinstance(key, jax.Array | np.ndarray):
        typed = is_key(key.dtype)
        if key.ndim == 0 if typed else key.dtype == np.uint32 and key.ndim == 1:
            return key if isinstance(key, jax.Array) else jnp.asarray(trees.owned(key))
        kind = f"{key.dtype} of shape {key.shape}"
    raise ValueError(
        f"key is of type {kind}; expected one key, such as jax.random.key(0) or one of the keys "
        "that jax.random.split returns"
    )


def random_words(key: Array, shape: tuple[int, ...]) -> UInt[Array, "..."]:
    """Returns uniform 32-bit words, which are ``jax.random.bits(key, shape, jnp.uint32)``.

    On a CPU, JAX makes a loop of many small kernels of its usual generator: most of the time is
    spent on launching them and on waking other threads. Here it is one kernel.
    """
    size, config = math.prod(shape), cast("Any", jax.config)
    usual = jax.random.key_impl(key) == "threefry2x32" and config.jax_threefry_partitionable
    # Only JAX's own function tells the search for keys that are used twice that it uses one.
    if not usual or size > 2**32 or config.jax_debug_key_reuse:
        return jax.random.bits(key, shape, jnp.uint32)
    arrays = jnp.arange(size, dtype=jnp.uint32), jax.random.key_data(key)

    def natively(_: Words, key: UInt[Array, " 2"]) -> Words:
        return native.random_words(key, count=size)

    # Else XLA would compute the words again in each kernel that uses them.
    plainly = functools.partial(in_halves, _threefry)
    return native.either(natively, plainly, *arrays, elsewhere=_threefry).reshape(shape)


@jax.jit
def _threefry(count: Words, key: UInt[Array, " 2"]) -> Words:
    """Returns both halves of Threefry-2x32 of ``(0, count)``, combined by exclusive or."""
    keys = [key[0], key[1], key[0] ^ key[1] ^ jnp.uint32(0x1BD11BDA)]
    one, two = keys[0], count + keys[1]
    for step in range(1, 6):
        for left in (13, 15, 26, 6) if step % 2 else (17, 29, 16, 24):
            one = one + two
            two = one ^ (two << left | two >> (32 - left))
        one = one + keys[step % 3]
        two = two + (keys[(step + 1) % 3] + step)
    return one ^ two


def scale_word(word: UInt[Array, "..."], below: Integer[Array, "..."]) -> Int[Array, "..."]:
    """Scales a random 32-bit word to an integer in ``[0, below)``: the high half of the product.

    Unlike a scaled float, the result takes every integer, each with the same probability up to a
    relative error of ``below / 2**32``.
    """
    below = below.astype(jnp.uint32)
    return _scaled(word, jnp.broadcast_to(below, word.shape) if below.ndim else below)


@native.kernel("scale_word")
def _scaled(word: UInt[Array, "..."], below: UInt[Array, "..."]) -> Int[Array, "..."]:
    half = jnp.uint32(16)
    low = jnp.uint32(0xFFFF)
    below = jnp.broadcast_to(below, word.shape)
    word_high, word_low = word >> half, word & low
    below_high, below_low = below >> half, below & low
    middle = word_high * below_low + ((word_low * below_low) >> half)
    carry = (middle & low) + word_low * below_high
    return (word_high * below_high + (middle >> half) + (carry >> half)).astype(jnp.int32)

"""Checks of PRNG keys, random words, and bounded random integers made from them."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray, UInt

from jaxbuf.core import trees


def check_key(key: object) -> PRNGKeyArray:
    """Returns ``key``, a single PRNG key, as a JAX array.

    Raises:
        ValueError: If it is not a key from ``jax.random.key`` or ``jax.random.PRNGKey``.
    """
    kind = type(key).__name__
    if isinstance(key, jax.Array | np.ndarray):
        typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
        if key.ndim == 0 if typed else key.dtype == np.uint32 and key.ndim == 1:
            return key if isinstance(key, jax.Array) else jnp.asarray(trees.owned(key))
        kind = f"{key.dtype} of shape {key.shape}"
    raise ValueError(
        f"key is of type {kind}; expected one key, such as jax.random.key(0) or one of the keys "
        "that jax.random.split returns"
    )


def random_words(key: Array, shape: tuple[int, ...]) -> UInt[Array, "..."]:
    """Returns uniform 32-bit words."""
    return jax.random.bits(key, shape, jnp.uint32)


def scale_word(word: UInt[Array, "..."], below: UInt[Array, "..."]) -> UInt[Array, "..."]:
    """Scales a random 32-bit word to an integer in ``[0, below)``: the high half of the product.

    Unlike a scaled float, the result takes every integer, each with the same probability up to a
    relative error of ``below / 2**32``.
    """
    half = jnp.uint32(16)
    low = jnp.uint32(0xFFFF)
    below = jnp.broadcast_to(below, word.shape)
    word_high, word_low = word >> half, word & low
    below_high, below_low = below >> half, below & low
    middle = word_high * below_low + ((word_low * below_low) >> half)
    carry = (middle & low) + word_low * below_high
    return word_high * below_high + (middle >> half) + (carry >> half)

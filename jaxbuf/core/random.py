"""Random words, and bounded random integers made from them."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, UInt


def random_words(key: Array, shape: tuple[int, ...]) -> UInt[Array, "..."]:
    """Returns uniform 32-bit words."""
    return jax.random.bits(key, shape, jnp.uint32)


def scale_word(word: UInt[Array, " B"], below: UInt[Array, ""]) -> UInt[Array, " B"]:
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

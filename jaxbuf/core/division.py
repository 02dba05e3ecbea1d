"""Division of places and counts: one operation, where ``//`` and ``%`` of any numbers take ten.

Those round down, while a processor rounds towards zero. Without a sign it is the same.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Integer


def quotient(
    number: Integer[Array, "..."], divisor: int | Integer[Array, "..."]
) -> Integer[Array, "..."]:
    """Returns ``number // divisor`` for numbers of at least 0, in their dtype.

    Args:
        number: Integers of 32 bits.
        divisor: At least 1; one number, or as many as ``number`` has.
    """
    divided = lax.div(number.astype(jnp.uint32), jnp.asarray(divisor, jnp.uint32))
    return divided.astype(number.dtype)


def remainder(
    number: Integer[Array, "..."], divisor: int | Integer[Array, "..."]
) -> Integer[Array, "..."]:
    """Returns ``number % divisor`` for numbers of at least ``-divisor``, in their dtype.

    Args:
        number: Integers of 32 bits.
        divisor: At least 1; one number, or as many as ``number`` has.

    Example:
        >>> remainder(jnp.arange(-3, 5), 3).tolist()
        [0, 1, 2, 0, 1, 2, 0, 1]
    """
    size, unsigned = jnp.asarray(divisor, jnp.uint32), number.astype(jnp.uint32)
    if jnp.issubdtype(number.dtype, jnp.signedinteger):
        unsigned += size
    return lax.rem(unsigned, size).astype(number.dtype)

"""Rows that name the same place, of which the last one counts."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from jaxbuf.core import native


def last_of_each(index: Int[Array, " B"]) -> Bool[Array, " B"]:
    """Returns a mask of the rows that no later row repeats.

    A scatter of rows that repeat a place may write any of them, except on a CPU.

    Example:
        >>> import jax.numpy as jnp
        >>> last_of_each(jnp.array([3, 5, 3, 7])).tolist()
        [False, True, True, True]
    """
    if index.shape[0] < 2:
        return jnp.ones(index.shape, bool)
    return native.either(native.last_of_each, last_of_each_plainly, index)


def last_of_each_plainly(index: Int[Array, " B"]) -> Bool[Array, " B"]:
    """Returns the same without a kernel, for computations that have one of their own."""
    # Equal numbers have the same place in the sorted index. On a CPU, sorting the index alone is
    # several times faster than sorting the rows by it.
    row = jnp.arange(index.shape[0], dtype=jnp.int32)
    place = jnp.searchsorted(lax.sort(index), index, method="scan_unrolled")
    return jnp.zeros_like(row).at[place].max(row)[place] == row

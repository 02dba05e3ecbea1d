"""Rows that name the same place, of which the last one counts."""

import functools

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from jaxbuf.core import native


def keep_last(index: Int[Array, "..."], nowhere: int) -> Int[Array, "..."]:
    """Returns the same places, with ``nowhere`` for all rows but the last one of each place.

    A scatter of rows that repeat a place may write any of them, except on a CPU.

    Example:
        >>> import jax.numpy as jnp
        >>> keep_last(jnp.array([3, 5, 3, 7]), nowhere=10).tolist()
        [10, 5, 3, 7]
    """
    flat = index.reshape(-1)
    if flat.shape[0] < 2:
        return index
    natively = functools.partial(native.keep_last, nowhere=nowhere)
    kept = native.either(natively, lambda flat: jnp.where(last_of_each(flat), flat, nowhere), flat)
    return kept.reshape(index.shape)


def last_of_each(index: Int[Array, " B"]) -> Bool[Array, " B"]:
    """Returns a mask of the rows that no later row repeats."""
    # Equal numbers have the same place in the sorted index. On a CPU, sorting the index alone is
    # several times faster than sorting the rows by it.
    row = jnp.arange(index.shape[0], dtype=jnp.int32)
    place = jnp.searchsorted(lax.sort(index), index, method="scan_unrolled")
    return jnp.zeros_like(row).at[place].max(row)[place] == row

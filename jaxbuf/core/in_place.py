"""For loops that change an array as they go, and list what they change.

XLA:CPU copies an array, in every step of a loop, unless every read of it leads to its next write.
What a step learns from a read and keeps elsewhere has to be kept before that write, visibly so.
"""

import functools

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int, Shaped

# No slot, and no number of slots, is larger.
_MOST = 2**30


def step_of(
    i: Int[Array, ""], index: Int[Array, " B"], below: int
) -> tuple[Int[Array, ""], Bool[Array, ""], Int[Array, ""]]:
    """What a step of a loop over ``max(B, 2)`` rows is about.

    XLA unrolls a loop of one step, and then copies what it changes: so there are none.

    Args:
        i: The step.
        index: Of each row.
        below: The end of what is in range.

    Returns:
        The index clipped to the range, whether it is in range and there is such a row, and the row.
    """
    row = jnp.minimum(i, index.shape[0] - 1).astype(jnp.int32)
    at = index[row]
    there = (i < index.shape[0]) & (at >= 0) & (at < below)
    return jnp.clip(at, 0, below - 1), there, row


def of_two(
    index: Int[Array, " 1"], row: Shaped[Array, "1 ..."], nowhere: int
) -> tuple[Int[Array, " 2"], Shaped[Array, "2 ..."]]:
    """A single row to write, as the first of two; the second is dropped, for it goes ``nowhere``.

    XLA does not write a single row by a loop, and then copies, or writes again, what it changes.
    """
    return jnp.pad(index, (0, 1), constant_values=nowhere), jnp.repeat(row, 2, axis=0)


def append(
    values: Int[Array, " N"], value: Int[Array, ""], count: Int[Array, ""], one: Bool[Array, ""]
) -> tuple[Int[Array, " N"], Int[Array, ""], Int[Array, ""]]:
    """A list of ``count`` values with one more, if it is to have it.

    Returns:
        The list; how many values there are; and the one that was written, as it is read there.
    """
    values = lax.dynamic_update_slice(values, value[None], (count,))
    written = lax.dynamic_slice(values, (count,), (1,))[0]
    return values, count + one.astype(jnp.int32), written


def later(at: Int[Array, "..."], *numbers: Int[Array, ""]) -> Int[Array, "..."]:
    """``at``, but known only when these numbers are, none of which is above 2**30."""
    return at + jnp.maximum(functools.reduce(jnp.maximum, numbers) - _MOST, 0)

"""For loops that change an array as they go, and list what they change.

XLA:CPU copies an array, in every step of a loop, unless every read of it leads to its next write.
What a step learns from a read and keeps elsewhere has to be kept before that write, visibly so.
"""

import functools

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int, Shaped, UInt


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
    at = get(index, row)
    there = (i < index.shape[0]) & (at >= 0) & (at < below)
    return jnp.clip(at, 0, below - 1), there, row


def of_two(
    index: Int[Array, " 1"], row: Shaped[Array, "1 ..."], nowhere: int
) -> tuple[Int[Array, " 2"], Shaped[Array, "2 ..."]]:
    """A single row to write, as the first of two; the second is dropped, for it goes ``nowhere``.

    XLA does not write a single row by a loop, and then copies, or writes again, what it changes.
    """
    return jnp.pad(index, (0, 1), constant_values=nowhere), jnp.repeat(row, 2, axis=0)


def get(array: Shaped[Array, " N"], at: Int[Array, ""]) -> Shaped[Array, ""]:
    """The number at a place, which is not negative."""
    return lax.dynamic_slice(array, (place(at),), (1,))[0]


def put(
    array: Shaped[Array, " N"], at: Int[Array, ""], value: Shaped[Array, ""]
) -> Shaped[Array, " N"]:
    """The array with another number at a place, which is not negative."""
    return lax.dynamic_update_slice(array, value[None], (place(at),))


def place(at: Int[Array, ""]) -> UInt[Array, ""]:
    """Where to begin to read or write; nothing is spent on the case that it is negative."""
    return jnp.asarray(at, jnp.uint32)


def append(
    values: Int[Array, " N"], value: Int[Array, ""], count: Int[Array, ""], one: Bool[Array, ""]
) -> tuple[Int[Array, " N"], Int[Array, ""], Int[Array, ""]]:
    """A list of ``count`` values with one more, if it is to have it.

    Returns:
        The list; how many values there are; and the one that was written, as it is read there.
    """
    values = put(values, count, value)
    return values, count + one.astype(jnp.int32), get(values, count)


def later(at: Int[Array, "..."], *numbers: Int[Array, ""]) -> Int[Array, "..."]:
    """``at``, but known to XLA only when these numbers are.

    What is added is zero, as LLVM sees, so that the program does not wait.
    """
    some = functools.reduce(jnp.bitwise_or, [number.astype(jnp.uint32) for number in numbers])
    zero = lax.shift_right_logical(jnp.minimum(some, jnp.uint32(2**30)), jnp.uint32(31))
    return at + zero.astype(at.dtype)

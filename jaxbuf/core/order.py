"""The order of reads and writes, which XLA takes from what depends on what."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool

from jaxbuf.core.types import Arrays, Function


def after(value: Array, *reads: Array) -> Array:
    """Returns the same value, which XLA cannot compute before it has the numbers that were read.

    XLA updates an array in place only if all reads of the old array come before. It knows of their
    order only what depends on what: a read on which no later write depends may come after it, and
    then XLA copies the whole array, in a loop in each step. So pass what was read to ``after``
    together with a small operand of the write, such as its index. The same holds for the body of a
    loop that rarely runs: what does not depend on the carry is computed ahead of the loop.

    Nothing else works on all backends: ``lax.optimization_barrier`` is gone before XLA decides what
    to copy. A number here depends on the reads through a condition that always holds, which XLA
    cannot know. It costs three operations on the smaller of the arrays, fused with their neighbors.

    A read that XLA repeats for another consumer is another read. It repeats the read of a single
    number, and may repeat others that are cheap. There, two numbers are read in place of one
    (``Bitset``), or the read is in a loop (``in_halves``) or before a sort (``Diversity``).

    A test with ``jaxbuf.testing.assert_no_copy`` goes with every use.

    Args:
        value: Any array.
        reads: Arrays of numbers or bools, of its shape, or of any other shape, of which then all
            numbers are waited for.

    Example:
        >>> import jax.numpy as jnp
        >>> numbers, index = jnp.arange(4.0), jnp.array([2, 0])
        >>> read = numbers[index]
        >>> numbers.at[after(index, read)].set(-1.0).tolist(), read.tolist()
        ([-1.0, 1.0, -1.0, 3.0], [2.0, 0.0])
    """
    for read in reads:
        true = _true_of(read)
        true = true if true.shape == value.shape else jnp.all(true)
        value = jnp.where(true, value, jnp.zeros_like(value))
    return value


def in_halves(function: Function, rows: Array, *others: Array) -> Arrays:
    """Returns ``function(rows, *others)`` for rows ``[B]``, one half of them after the other.

    Such a loop has ended before anything that needs its results begins, and XLA does not compute
    them again for each of their consumers.

    Example:
        >>> import jax.numpy as jnp
        >>> in_halves(jnp.multiply, jnp.arange(5), jnp.int32(2)).tolist()
        [0, 2, 4, 6, 8]
    """
    count = rows.shape[0]
    halves = jnp.pad(rows, (0, count % 2)).reshape(2, -1)
    out = lax.map(lambda half: function(half, *others), halves)
    return jax.tree.map(lambda leaf: leaf.reshape(-1)[:count], out)


def _true_of(read: Array) -> Bool[Array, "..."]:
    """Returns True for each number, whatever its bits are, in a way that XLA does not see."""
    if read.dtype == jnp.bool_:
        read = read.astype(jnp.uint8)
    bits = lax.bitcast_convert_type(read, jnp.dtype(f"uint{8 * read.dtype.itemsize}"))
    return (bits | bits.dtype.type(1)) != 0

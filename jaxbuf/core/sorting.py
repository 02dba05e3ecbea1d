"""Sorts of many numbers in little time, and rows that repeat the index of others."""

import functools
from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, Shaped, UInt

from jaxbuf.core import native
from jaxbuf.core.division import quotient, remainder
from jaxbuf.core.types import Count, Flag, Index, Mask, Word
from jaxbuf.core.versions import vary_with

_CHUNK = 128
# From so many numbers on, and no more than so many for each to return, passes over them take less
# time than sorts.
_MANY, _EACH = 2**14, 2**10


def order(number: UInt[Array, " N"]) -> Int[Array, " N"]:
    """Returns the indices that sort the numbers, of equal ones the first one first.

    XLA sorts single numbers several times faster than pairs on a CPU. Therefore they are sorted
    there by a part of their bits at a time, from the lowest to the highest, and the positions in
    the previous order fill the lower bits. Elsewhere numbers and positions are sorted at once.

    Example:
        >>> order(jnp.array([7, 2**32 - 1, 0, 7], jnp.uint32)).tolist()
        [2, 0, 3, 1]
    """
    return native.either(_order_by_parts, _order_by_parts, number, elsewhere=order_of_pairs)


def _order_by_parts(number: UInt[Array, " N"]) -> Int[Array, " N"]:
    bits = max((number.shape[0] - 1).bit_length(), 1)
    position = jnp.arange(number.shape[0], dtype=jnp.uint32)
    index = position.astype(jnp.int32)
    for shift in range(0, 32, 32 - bits):
        digits = number[index] >> jnp.uint32(shift) << jnp.uint32(bits)
        before = lax.sort(digits | position) & jnp.uint32(2**bits - 1)
        index = index[before.astype(jnp.int32)]
    return index


def order_of_pairs(number: UInt[Array, " N"]) -> Int[Array, " N"]:
    """Returns the same as ``order``, from a single sort of the numbers with their positions."""
    position = jnp.arange(number.shape[0], dtype=jnp.int32)
    return lax.sort((number, position), num_keys=1, is_stable=True)[1]


def largest(value: Shaped[Array, " N"], count: int) -> tuple[Shaped[Array, " B"], Index]:
    """Returns the ``count`` largest of many numbers, the largest first, and their indices.

    They lie in the chunks with the largest maxima, so only these chunks are sorted. The numbers are
    floats of at least −inf, or integers of at least 0.

    Example:
        >>> value, index = largest(jnp.arange(1000.0) % 400, 3)
        >>> value.tolist(), sorted(index.tolist())
        ([399.0, 399.0, 398.0], [398, 399, 799])
    """
    chunks = -(-value.shape[0] // _CHUNK)
    if chunks <= count:
        top, index = lax.top_k(value, count)
        return top, index
    padding = (0, chunks * _CHUNK - value.shape[0])
    least = -jnp.inf if jnp.issubdtype(value.dtype, jnp.floating) else 0
    grid = jnp.pad(value, padding, constant_values=least).reshape(chunks, _CHUNK)
    _, best = lax.top_k(jnp.max(grid, axis=1), count)
    top, at = lax.top_k(grid[best].reshape(-1), count)
    return top, best[quotient(at, _CHUNK)] * _CHUNK + remainder(at, _CHUNK)


def largest_words(value: UInt[Array, " N"], count: int) -> tuple[UInt[Array, " B"], Index]:
    """Returns the same as ``largest`` of uint32, in less time on a CPU if many are returned.

    Then passes over the numbers find the least one to return, and only those to return are sorted.
    Of equal numbers any may be returned, in any order.

    Example:
        >>> largest_words(jnp.array([7, 2**32 - 1, 0, 7], jnp.uint32), 2)[0].tolist()
        [4294967295, 7]
    """
    sorting = functools.partial(largest, count=count)
    if value.shape[0] < _MANY or value.shape[0] > _EACH * count:
        return sorting(value)
    passes = functools.partial(_largest_by_passes, count)
    return native.either(passes, passes, value, elsewhere=sorting)


def _largest_by_passes(count: int, value: UInt[Array, " N"]) -> tuple[UInt[Array, " B"], Index]:
    size = value.shape[0]
    position = jnp.arange(size, dtype=jnp.uint32)
    # It varies over a mesh as the numbers do.
    zero = vary_with(jnp.uint32(0), value)  # []

    def enough(number: Word) -> Flag:
        return jnp.sum(value >= number, dtype=jnp.int32) >= count

    least = _largest_with(enough, zero, 32)  # []
    above, equal = value > least, value == least  # [N]
    room = count - jnp.sum(above, dtype=jnp.int32)  # []

    def fits(end: Word) -> Flag:
        return jnp.sum(equal & (position < end), dtype=jnp.int32) <= room

    end = _largest_with(fits, zero, size.bit_length())  # []
    chosen = above | (equal & (position < end))  # [N]
    row = jnp.where(chosen, jnp.cumsum(chosen, dtype=jnp.int32) - 1, count)  # [N]
    index = jnp.zeros((count,), jnp.int32).at[row].set(position.astype(jnp.int32), mode="drop")
    fall, index = lax.sort((~value[index], index), num_keys=2)  # [B]
    return ~fall, index


def _largest_with(holds: Callable[[Word], Flag], zero: Word, bits: int) -> Word:
    """Returns the largest number of so many bits for which it holds, as for all smaller ones."""

    def step(k: Count, number: Word) -> Word:
        raised = number | jnp.uint32(1) << (bits - 1 - k).astype(jnp.uint32)
        return jnp.where(holds(raised), raised, number)

    return lax.fori_loop(jnp.int32(0), jnp.int32(bits), step, zero)


def keep_last(index: Int[Array, "..."], past_end: int) -> Int[Array, "..."]:
    """Returns the index with ``past_end`` for all rows but the last one of each number.

    A scatter of rows that repeat an index may write any of them, except on a CPU.

    Example:
        >>> import jax.numpy as jnp
        >>> keep_last(jnp.array([3, 5, 3, 7]), past_end=10).tolist()
        [10, 5, 3, 7]
    """
    flat = index.reshape(-1)
    if flat.shape[0] < 2:
        return index
    natively = functools.partial(native.keep_last, past_end=past_end)
    kept = native.either(natively, lambda flat: jnp.where(last_of_each(flat), flat, past_end), flat)
    return kept.reshape(index.shape)


def last_of_each(index: Index) -> Mask:
    """Returns a mask of the rows that no later row repeats."""
    # Equal numbers have the same position in the sorted index. On a CPU, sorting the index alone is
    # several times faster than sorting the rows by it.
    row = jnp.arange(index.shape[0], dtype=jnp.int32)
    position = jnp.searchsorted(lax.sort(index), index, method="scan_unrolled")
    return jnp.zeros_like(row).at[position].max(row)[position] == row

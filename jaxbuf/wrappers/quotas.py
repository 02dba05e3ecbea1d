"""The ratios of a mixture, and the numbers of rows that the parts get by them."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, UInt

from jaxbuf.core import checks
from jaxbuf.core.hyperparameters import converted
from jaxbuf.core.random import scale_word
from jaxbuf.core.types import Count, Flag
from jaxbuf.strategies.mass import is_priority

_EXPECTED = "finite numbers of at least 0, not all 0"
_MOST = float(np.finfo(np.float32).max)
# Half of the least float32 above 0; smaller numbers become 0.
_LEAST = 2.0**-150


def check_static(ratios: object, parts: int) -> tuple[float, ...]:
    """Returns ratios that are part of the program, scaled to sum to 1.

    Raises:
        ValueError: If they are not one finite number of at least 0 for each part, not all 0.
    """
    _check_no_dict(ratios)
    weights = checks.check_weights("ratios", ratios)
    _check_count(len(weights), parts)
    if sum(weights) <= 0:
        raise ValueError(f"ratios is {weights}; expected {_EXPECTED}")
    return tuple(w / sum(weights) for w in weights)


def check_varying(ratios: object, parts: int) -> Float[Array, " P"]:
    """Returns ratios that vary as an array, whose values may be traced.

    Raises:
        ValueError: If they are not one number for each part, or are known and not legal.
    """
    _check_no_dict(ratios)
    array = converted("ratios", ratios, _EXPECTED, _known_legal)
    if array.ndim != 1:
        raise ValueError(f"ratios is {ratios}; expected a list of numbers")
    _check_count(array.shape[0], parts)
    return array


def are_legal(ratios: Float[Array, " P"]) -> Flag:
    """Returns whether ratios are finite and not negative, and not all 0."""
    return jnp.all(is_priority(ratios)) & jnp.any(is_positive(ratios))


def is_positive(ratios: Float[Array, " P"]) -> Array:
    """Returns a mask of the legal ratios that are above 0, ``[P]``."""
    # Compares bits, since XLA may take the smallest (subnormal) numbers for zeros.
    return lax.bitcast_convert_type(ratios, jnp.uint32) << jnp.uint32(1) > 0


def shares(ratios: Float[Array, " P"]) -> Float[Array, " P"]:
    """Returns ratios scaled to sum to 1."""
    mantissa, distance = _decoded(ratios)
    # Powers of 2, of any number of which the largest is 1, so that no sum overflows.
    power = jnp.maximum(127 - distance, 0).astype(jnp.uint32) << jnp.uint32(23)
    scaled = mantissa.astype(jnp.float32) * lax.bitcast_convert_type(power, jnp.float32)
    return scaled / jnp.sum(scaled)


def in_units(ratios: Sequence[float]) -> list[int]:
    """Returns ratios that sum to 1 in units of 2**-31, so that products with them are exact."""
    bounds = [round(sum(ratios[:i]) * 2**31) for i in range(len(ratios) + 1)]
    return [end - start for start, end in itertools.pairwise(bounds)]


@jax.jit
def in_units_of(ratios: Float[Array, " P"]) -> UInt[Array, " P"]:
    """Returns what ``in_units`` does for ratios that vary, with any sum.

    Its integers of 64 bits, in two halves, are exact on every device, where floating-point numbers
    would round: the same ratios give the same numbers of rows, whether they vary or not.
    """
    mantissa, distance = _decoded(ratios)
    # In units of 2**-32 of the last bit of the largest ratio; fewer if more than 127 of them would
    # not fit.
    shift = (distance + max(ratios.shape[0].bit_length() - 7, 0)).astype(jnp.uint32)
    past = jnp.uint32(32)
    # A shift by 32 bits or more, as by a negative number, gives 0.
    high, low = mantissa >> shift, mantissa << (past - shift) | mantissa >> (shift - past)
    # Running sums of the 16 bits of each half, and their carries.
    half, ones = jnp.uint32(16), jnp.uint32(0xFFFF)
    first = jnp.cumsum(low & ones, dtype=jnp.uint32)
    second = jnp.cumsum(low >> half, dtype=jnp.uint32) + (first >> half)
    high = jnp.cumsum(high, dtype=jnp.uint32) + (second >> half)
    low = second << half | first & ones
    total_high, total_low = high[-1], low[-1]

    def less_total(high: Array, low: Array) -> tuple[Array, Array, Array]:
        """Subtracts the total where it fits, and returns whether it does."""
        fits = (high > total_high) | (high == total_high) & (low >= total_low)
        borrow = (low < total_low).astype(jnp.uint32)
        smaller = high - total_high - borrow, low - total_low
        high, low = (jnp.where(fits, a, b) for a, b in zip(smaller, (high, low), strict=True))
        return high, low, fits.astype(jnp.uint32)

    # Long division by the total: a digit before the point, and 32 after it.
    one = jnp.uint32(1)
    high, low, whole = less_total(high, low)
    digits = jnp.zeros_like(whole)
    for _ in range(32):
        high, low = high << one | low >> jnp.uint32(31), low << one
        high, low, digit = less_total(high, low)
        digits = digits << one | digit
    bounds = (whole << jnp.uint32(31)) + (digits >> one) + (digits & one)
    return jnp.diff(bounds, prepend=jnp.uint32(0))


def divided(rows: int | Count, units: Sequence[int] | UInt[Array, " P"]) -> Any:
    """Divides rows among the parts of a mixture.

    Each part gets its share rounded down, and the remaining rows go to the parts with the largest
    remainders; among equal remainders, to the first parts.

    Args:
        rows: The number of rows; may be traced.
        units: The ratios in units of 2**-31.

    Returns:
        The number of rows of each part: integers, or an array ``[P]`` int32 if something is traced.
    """
    # The high and the low half of twice the product are rows, and a remainder in units of 2**-32.
    if isinstance(rows, int) and not isinstance(units, jax.Array):
        product = np.uint64(2 * rows) * np.asarray(units, np.uint64)
        whole, rest = product >> 32, product & np.uint64(2**32 - 1)
        counts = _largest_remainders(rows, whole.astype(np.int64), rest)
        return tuple(int(count) for count in counts)
    rows, units = jnp.int32(rows), jnp.asarray(units, jnp.uint32)
    doubled = jnp.broadcast_to(2 * jnp.maximum(rows, 0).astype(jnp.uint32), units.shape)
    return _largest_remainders(rows, scale_word(doubled, units), doubled * units)


def _largest_remainders(rows: Any, whole: Any, rest: Any) -> Any:
    """Rounds shares to integers, giving one row more to the parts with the largest remainders.

    Args:
        rows: The total number of rows.
        whole: The share of each part rounded down, ``[P]``; a NumPy or JAX array.
        rest: The remainders, unsigned in units of 2**-32, ``[P]``.

    Returns:
        The number of rows of each part, ``[P]``.
    """
    # Ratios are rounded, so remainders that should be equal may differ in their last bits.
    rest = ((rest >> 1) + 2**14) >> 15
    # Whether part j comes before part i, and gets an extra row before it, [i, j].
    earlier = np.tri(len(rest), k=-1, dtype=bool)
    ahead = (rest[None] > rest[:, None]) | ((rest[None] == rest[:, None]) & earlier)
    return whole + (ahead.sum(axis=1) < rows - whole.sum()).astype(whole.dtype)


def _decoded(ratios: Float[Array, " P"]) -> tuple[UInt[Array, " P"], Int[Array, " P"]]:
    """Returns the mantissas of ratios, and how far their exponents are below the largest one."""
    bits = lax.bitcast_convert_type(ratios, jnp.uint32) & jnp.uint32(0x7FFFFFFF)
    exponent = (bits >> jnp.uint32(23)).astype(jnp.int32)
    implicit = (exponent > 0).astype(jnp.uint32) << jnp.uint32(23)
    mantissa = bits & jnp.uint32(0x7FFFFF) | implicit
    exponent = jnp.maximum(exponent, 1)
    return mantissa, jnp.max(jnp.where(mantissa > 0, exponent, 1)) - exponent


def _known_legal(wide: Any) -> bool:
    inside = (wide >= 0) & (wide <= _MOST)
    return bool(inside.all() and (wide > _LEAST).any())


def _check_count(ratios: int, parts: int) -> None:
    if not parts or parts != ratios:
        raise ValueError(
            f"there are {parts} buffers and {ratios} ratios; expected one ratio for each of one "
            "buffer or more"
        )


def _check_no_dict(ratios: object) -> None:
    if isinstance(ratios, Mapping):
        raise ValueError(
            f"ratios is a {type(ratios).__name__}; expected a list of numbers, in the order of the "
            "buffers"
        )

"""Checks of sizes in rows and bytes, and their format for people."""

import contextlib
import math
from collections.abc import Generator, Sequence

import jax
import jax.core
import numpy as np

from jaxbuf.core.types import Dtype

# Slots are numbered by int32, and trees over them have up to twice as many nodes.
MOST_ROWS = 2**30
# Counts of rows on disk, steps or bytes need not fit a JAX array.
MOST_ON_HOST = 2**63 - 1
# XLA counts the bytes of an array in a signed 64-bit integer, and aborts where it overflows.
_MOST_BYTES = MOST_ON_HOST


def format_bytes(number: int) -> str:
    """Returns a number of bytes in the largest binary unit in which it is at least 1.

    Example:
        >>> [format_bytes(n) for n in (12, 2_000, 3 * 2**20, 5 * 2**40)]
        ['12 B', '2.0 KiB', '3.0 MiB', '5120.0 GiB']
    """
    size, unit = float(number), "B"
    for larger in ("KiB", "MiB", "GiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{number} B" if unit == "B" else f"{size:.1f} {unit}"


def check_count(name: str, value: object, least: int = 1, most: int = MOST_ROWS) -> int:
    """Returns a size or another static count as a Python integer.

    Args:
        name: Its name in errors.
        value: A Python or NumPy integer.
        least: The smallest legal value.
        most: The largest legal value.

    Raises:
        ValueError: If it is not an integer in ``[least, most]``, or is not known until a program
            runs.

    Example:
        >>> check_count("capacity", 0)
        Traceback (most recent call last):
        ValueError: capacity is 0; expected an integer of at least 1
    """
    if isinstance(value, jax.core.Tracer):
        raise ValueError(
            f"{name} is traced ({value.aval}); expected an integer that is known when the program "
            "is traced, such as a static argument of jax.jit"
        )
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise ValueError(f"{name} is {value!r}; expected an integer of at least {least}")
    if value < least:
        raise ValueError(f"{name} is {value}; expected an integer of at least {least}")
    if value > most:
        limit = "2**30" if most == MOST_ROWS else str(most)
        raise ValueError(f"{name} is {value}; expected an integer of at most {limit}")
    return int(value)


def check_bytes(name: str, shape: Sequence[int], dtype: Dtype) -> int:
    """Returns the size in bytes of an array that is to be allocated.

    Raises:
        ValueError: If no array can be that large, on any machine.

    Example:
        >>> check_bytes("x", (4, 5), np.dtype("float32"))
        80
        >>> check_bytes("x", (2**40, 2**30), np.dtype("int8"))
        Traceback (most recent call last):
        ValueError: x as int8[1099511627776, 1073741824] takes 1180591620717411303424 bytes; \
expected less than 2**63
    """
    # An axis of length 0 does not keep the product of the others from overflowing.
    size = math.prod(max(axis, 1) for axis in shape) * dtype.itemsize
    if size > _MOST_BYTES:
        raise ValueError(
            f"{name} as {dtype}{list(shape)} takes {size} bytes; expected less than 2**63"
        )
    return math.prod(shape) * dtype.itemsize


@contextlib.contextmanager
def allocating(what: str) -> Generator[None]:
    """Returns a context manager, or decorator, that names what could not be allocated.

    Raises:
        ValueError: In place of XLA's out-of-memory error, which has only a number of bytes.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise ValueError(f"{what} could not be allocated: {error}") from error

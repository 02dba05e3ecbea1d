"""Sizes: how many rows and bytes are asked for, and how people read them."""

import contextlib
import math
from collections.abc import Generator, Sequence
from typing import Any

import jax
import jax.core
import numpy as np

# Slots are numbered by int32, and trees over them have up to twice as many nodes.
MOST_ROWS = 2**30
# What counts rows on disk, steps or bytes need not fit an array of JAX.
MOST_ON_HOST = 2**63 - 1
# XLA counts the bytes of an array in a signed 64-bit integer, and aborts where it overflows.
_MOST_BYTES = MOST_ON_HOST


def format_bytes(number: int) -> str:
    """A number of bytes in the largest binary unit that leaves it at 1 or more.

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


def check_count(name: str, value: Any, least: int = 1, most: int = MOST_ROWS) -> int:
    """A size or another static count as a Python integer.

    Args:
        name: What to call it in an error.
        value: A Python or NumPy integer.
        least: The least that is legal.
        most: The most that is legal.

    Raises:
        ValueError: If it is not an integer from ``least`` to ``most``, or is only known when a
            program runs.

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


def check_bytes(name: str, shape: Sequence[int], dtype: Any) -> int:
    """The bytes of an array that is to be made.

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
    """Say what was to be allocated where there is too little memory; a decorator, too.

    Raises:
        ValueError: In place of the error of XLA, which knows only a number of bytes.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise ValueError(f"{what} could not be allocated: {error}") from error

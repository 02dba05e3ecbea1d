"""Checks of sizes in rows and bytes, and their format for people."""

import contextlib
import math
import re
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.core
import numpy as np

from jaxbuf.core.checks import name_of
from jaxbuf.core.types import Dtype

# Slots are numbered by int32, and trees over them have up to twice as many nodes.
MOST_ROWS = 2**30
# Counts of rows on disk, steps or bytes need not fit a JAX array. XLA counts the bytes of one in a
# signed 64-bit integer, and aborts where that overflows.
MOST_ON_HOST = 2**63 - 1
# To ask how much memory is left takes as long as to clear so many bytes, or less.
_WORTH_A_LOOK = 2**27
_MEMORY = Path("/proc/meminfo")
# The limits of a container, in both versions of control groups.
_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


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
        raise ValueError(f"{name} is {name_of(value)}; expected an integer of at least {least}")
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
    if size > MOST_ON_HOST:
        raise ValueError(
            f"{name} as {dtype}{list(shape)} takes {size} bytes; expected less than 2**63"
        )
    return math.prod(shape) * dtype.itemsize


def check_memory(
    label: str, needed: int, name: str, count: int, devices: Sequence[Any] = ()
) -> None:
    """Checks that there is memory for arrays that are to be allocated.

    Args:
        label: The largest of them, as the beginning of the error.
        needed: The bytes of all of them on a device.
        name: The name of the size that they are proportional to, such as ``"capacity"``.
        count: This size.
        devices: The devices of this process; by default the default one.

    Raises:
        ValueError: If there is less; the message has the size that would fit.
    """
    if needed < _WORTH_A_LOOK:
        return
    device = devices[0] if devices else _default_device()
    name_of_device, left = str(device), math.inf
    if device.platform == "cpu":
        # All of them share one memory.
        name_of_device, left = "this machine", _host_memory_left()
        needed *= max(len(devices), 1)
    elif stats := device.memory_stats():
        left = stats.get("bytes_limit", math.inf) - stats.get("bytes_in_use", 0)
    if needed > left:
        fits = int(left / needed * count)
        most = f"{name}={fits} would fit" if fits else f"not even {name}=1 would fit"
        raise ValueError(
            f"{label} could not be allocated: {format_bytes(needed)} are needed in all, and "
            f"{name_of_device} has {format_bytes(int(left))} left; {most}"
        )


def _default_device() -> Any:
    chosen: Any = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    return chosen if isinstance(chosen, jax.Device) else jax.local_devices(backend=chosen)[0]


def _host_memory_left() -> float:
    """Returns the bytes that Linux can still give this process; inf on another system."""
    limits = [math.inf]
    with contextlib.suppress(OSError):
        lines = re.findall(r"^(?:MemAvailable|SwapFree): +(\d+) kB$", _MEMORY.read_text(), re.M)
        limits += [1024.0 * sum(map(int, lines))] if lines else []
    for limit in _LIMITS:
        with contextlib.suppress(OSError, ValueError):
            limits.append(int(limit.read_text()))
    return min(limits)


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

"""Warnings of calls from Python that work, but slowly, or not on all rows."""

import collections
import warnings
from typing import Any

import jax
import numpy as np
from jax.typing import ArrayLike

from jaxbuf.core.shapes import caller_level

_COPIES, _COPIED_BYTES = 100, 2**20
_LOOKS, _LOOKED_ROWS = 10, 2**16
# The number of calls of each method of each class that copied much.
_copies: collections.Counter[tuple[type, str]] = collections.Counter()
# The number of calls whose priorities are still looked at.
_looks_left = _LOOKS


def note_copy(buffer: object, method: str, nbytes: int) -> None:
    """Notes that a method copied so much of a buffer, and warns once, at the hundredth time.

    Methods of buffers inside of another one, which it calls, are not noted.
    """
    if nbytes <= _COPIED_BYTES:
        return
    kind = type(buffer)
    _copies[kind, method] += 1
    if _copies[kind, method] == _COPIES:
        warnings.warn(
            f"{kind.__name__}.{method} was called {_COPIES} times from Python, and copied "
            f"{nbytes / 2**20:.0f} MiB of the buffer this time; jaxbuf.{method}(buffer, ...) "
            "works in place, and so does the method inside of a jitted step that donates the "
            "buffer",
            stacklevel=caller_level(),
        )


def looks_left() -> int:
    """Returns the number of calls whose priorities ``note_priorities`` would look at."""
    return _looks_left


def note_priorities(priority: ArrayLike, mask: ArrayLike | None) -> None:
    """Looks at the priorities of the first few calls, and warns once if one is negative.

    It waits until they are computed. Those on devices of other processes are not looked at.
    """
    global _looks_left
    arrays: list[Any] = [priority] if mask is None else [priority, mask]
    if not _looks_left or np.size(priority) > _LOOKED_ROWS:
        return
    if any(isinstance(x, jax.Array) and not x.is_fully_addressable for x in arrays):
        return
    _looks_left -= 1
    negative = np.asarray(priority) < 0
    if np.any(negative if mask is None else negative & np.asarray(mask)):
        _looks_left = 0
        warnings.warn(
            "update_priority got negative priorities, whose rows are refused, and counted in "
            'metrics()["rejected"]; of signed TD errors pass jnp.abs(td_error)',
            stacklevel=caller_level(),
        )

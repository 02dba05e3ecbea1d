"""Warnings of calls from Python that work, but slowly, or not on all rows."""

import collections
import inspect
import warnings
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

_COPIES, _COPIED_BYTES = 100, 2**20
_LOOKS, _LOOKED_ROWS = 10, 2**16
_SHAPES = 10
# The number of calls of each method of each class that copied much.
_copies: collections.Counter[tuple[type, str]] = collections.Counter()
# The number of calls whose priorities are still looked at.
_looks_left = _LOOKS
# The hashes of the shapes of each configuration, by its own hash, so that nothing of the caller is
# kept alive; None after the warning.
_shapes: dict[int, set[int] | None] = {}


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


def note_shapes(buffer: PyTree, items: PyTree, call: str) -> None:
    """Notes the shapes for which a program is traced, and warns once, at the tenth.

    Args:
        buffer: The buffer; those with one configuration share their programs.
        items: The rows that it gets.
        call: The name of the function, for the warning.
    """
    # The hash of a structure alone leaves out the options in it.
    sizes = tuple(np.shape(leaf) for leaf in jax.tree.leaves(buffer))
    configuration = hash((call, str(jax.tree.structure(buffer)), sizes))
    shapes = _shapes.setdefault(configuration, set())
    if shapes is None:
        return
    shapes.add(hash(tuple(np.shape(leaf) for leaf in jax.tree.leaves(items))))
    if len(shapes) < _SHAPES:
        return
    _shapes[configuration] = None
    warnings.warn(
        f"{call} was compiled for {_SHAPES} different shapes of rows, each of which takes time and "
        "memory; pad rows to a few sizes, such as powers of two, and mark the real ones with mask=",
        stacklevel=caller_level(),
    )


def looks_left() -> int:
    """Returns the number of calls whose priorities ``note_priorities`` would look at."""
    return _looks_left


def note_priorities(priority: Any, mask: Any) -> None:
    """Looks at the priorities of the first few calls, and warns once if one is negative.

    It waits until they are computed. Those on devices of other processes are not looked at, nor
    what the call has an error for.
    """
    global _looks_left
    if any(isinstance(x, jax.Array) and not x.is_fully_addressable for x in (priority, mask)):
        return
    try:
        if not _looks_left or np.size(priority) > _LOOKED_ROWS:
            return
        negative = np.asarray(priority) < 0
        if mask is not None:
            negative = negative & np.asarray(mask)
    except (TypeError, ValueError):
        return
    _looks_left -= 1
    if np.any(negative):
        _looks_left = 0
        warnings.warn(
            "update_priority got negative priorities, whose rows are refused, and counted in "
            'metrics()["rejected"]; of signed TD errors pass jnp.abs(td_error)',
            stacklevel=caller_level(),
        )


def caller_level() -> int:
    """Returns the level on the stack of the caller outside of JAX and of this library."""
    frame, level = inspect.currentframe(), 0
    while frame and frame.f_globals.get("__name__", "").split(".")[0] in ("jax", "jaxbuf"):
        frame, level = frame.f_back, level + 1
    return level

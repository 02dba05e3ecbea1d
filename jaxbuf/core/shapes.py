"""A warning where a program is compiled again and again, for one shape after the other."""

import inspect
import warnings

import jax
import numpy as np
from jaxtyping import PyTree

_MOST = 10
# The hashes of the shapes of each configuration, by its own hash, so that nothing of the caller is
# kept alive; None after the warning.
_seen: dict[int, set[int] | None] = {}


def note(buffer: PyTree, items: PyTree, call: str) -> None:
    """Notes the shapes for which a program is traced, and warns once, at the tenth.

    Args:
        buffer: The buffer; those with one configuration share their programs.
        items: The rows that it gets.
        call: The name of the function, for the warning.
    """
    # The hash of a structure alone leaves out the options in it.
    sizes = tuple(np.shape(leaf) for leaf in jax.tree.leaves(buffer))
    configuration = hash((call, str(jax.tree.structure(buffer)), sizes))
    shapes = _seen.setdefault(configuration, set())
    if shapes is None:
        return
    shapes.add(hash(tuple(np.shape(leaf) for leaf in jax.tree.leaves(items))))
    if len(shapes) < _MOST:
        return
    _seen[configuration] = None
    warnings.warn(
        f"{call} was compiled for {_MOST} different shapes of rows, each of which takes time and "
        "memory; pad rows to a few sizes, such as powers of two, and mark the real ones with mask=",
        stacklevel=caller_level(),
    )


def caller_level() -> int:
    """Returns the level on the stack of the caller outside of JAX and of this library."""
    frame, level = inspect.currentframe(), 0
    while frame and frame.f_globals.get("__name__", "").split(".")[0] in ("jax", "jaxbuf"):
        frame, level = frame.f_back, level + 1
    return level

"""The ``repr`` of buffers, batches and similar classes: their parts, in a few lines.

A pytree prints all its arrays. A class that derives from ``Described`` prints their shapes and
sizes, and its configuration. Nothing is computed.
"""

import dataclasses
import html
import inspect
import math
import textwrap
from collections.abc import Iterator
from typing import Any

import jax
import jax.core
import numpy as np
from flax import struct

from jaxbuf.core import guesses
from jaxbuf.core.donation import is_donated
from jaxbuf.core.sizes import format_bytes

_MOST_LEAVES = 16
_LONGEST = 200
_LONGEST_NAME, _WIDTH = 40, 100
_ARRAYS = jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct


def text(self: object) -> str:
    """Returns one line for the whole, and one for each array and each part of the configuration.

    Tracers, abstract values and donated buffers are also described, and marked as such.

    Example:
        >>> import jax.numpy as jnp, jaxbuf
        >>> item = {"obs": jnp.zeros(4), "reward": jnp.float32(0)}
        >>> print(jaxbuf.Queue.create(item, capacity=50_000))
        Queue: 976.6 KiB
          data['obs']     781.2 KiB  float32[50000, 4]
          data['reward']  195.3 KiB  float32[50000]
          occupancy            12 B  QueueRing(capacity=50000)
          counters             12 B  uint32[3]
    """
    return "\n".join([f"{type(self).__name__}: {_size(self)}{_state(self)}", *_lines(self)])


def rich(self: object) -> str:
    """Returns the same description as HTML, for a notebook."""
    title, _, rows = html.escape(repr(self)).partition("\n")
    return f"<div><strong>{title}</strong><pre>{rows}</pre></div>"


class Described(struct.PyTreeNode):
    """A pytree whose ``repr`` describes it in a few lines."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**({"repr": False} | options))
        if "__init__" in vars(cls) and hasattr(cls, "create"):
            cls.__init__ = guesses.answered(cls.__init__)

    __repr__ = text
    _repr_html_ = rich


def _lines(thing: Any, width: int = _WIDTH) -> Iterator[str]:
    rows = [row for field in dataclasses.fields(thing) for row in _rows(thing, field)]
    rows = [(_cut(name, _LONGEST_NAME), kind, node) for name, kind, node in rows]
    names = max((len(name) for name, _, _ in rows), default=0)
    sizes = ["" if node is None else _size(node) for _, _, node in rows]
    widest = max(map(len, sizes), default=0)
    for (name, kind, node), size in zip(rows, sizes, strict=True):
        start = f"  {name:<{names}}  {size:>{widest}}  "
        yield from textwrap.wrap(
            kind,
            width,
            initial_indent=start,
            subsequent_indent=" " * len(start),
            break_on_hyphens=False,
        )
        if type(node).__repr__ is text:
            yield from (f"  {line}" for line in _lines(node, width - 2))


def _rows(thing: Any, field: dataclasses.Field[Any]) -> list[tuple[str, str, object]]:
    """Returns for each part of a field its name, its kind, and the value that has its size."""
    value = getattr(thing, field.name)
    if not field.metadata.get("pytree_node", True):
        # Private configuration is not shown.
        hidden = value is None or value == () or type(value).__name__.startswith("_")
        return [] if hidden else [(field.name, _kind(value), None)]
    parts = jax.tree_util.tree_leaves_with_path(value, is_leaf=dataclasses.is_dataclass)
    rows: list[tuple[str, str, object]]
    rows = [(field.name + jax.tree_util.keystr(path), _kind(node), node) for path, node in parts]
    if len(rows) > _MOST_LEAVES:
        more = f"and {len(rows) - _MOST_LEAVES + 1} more leaves"
        rows = [*rows[: _MOST_LEAVES - 1], ("...", more, None)]
    return rows


def _kind(node: object) -> str:
    """Returns an array's dtype and shape, a function's name, or a dataclass without its arrays."""
    if isinstance(node, _ARRAYS):
        return f"{node.dtype}[{', '.join(map(str, node.shape))}]" if node.shape else str(node.dtype)
    if type(node).__repr__ is text:
        return type(node).__name__
    if dataclasses.is_dataclass(node) and not jax.tree_util.all_leaves([node]):
        inner = [
            f"{field.name}={_kind(value)}"
            for field in dataclasses.fields(node)
            for value in [getattr(node, field.name)]
            if not field.metadata.get("pytree_node", True) or dataclasses.is_dataclass(value)
        ]
        return f"{type(node).__name__}({', '.join(inner)})" if inner else type(node).__name__
    function: Any = inspect.unwrap(node) if callable(node) else None
    named = inspect.isroutine(function) or isinstance(function, type)
    whole = function.__name__ if named else repr(node)
    return _cut(whole, _LONGEST)


def _cut(words: str, longest: int) -> str:
    """Returns the beginning and the end of a text that is too long."""
    half = (longest - 3) // 2
    return words if len(words) <= longest else f"{words[:half]}...{words[-half:]}"


def _size(node: object) -> str:
    arrays = [leaf for leaf in jax.tree.leaves(node) if isinstance(leaf, _ARRAYS)]
    return format_bytes(sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in arrays))


def _state(thing: object) -> str:
    """Returns a remark if the arrays have no readable contents, and says why."""
    leaves = jax.tree.leaves(thing)
    if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        return " (traced)"
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
        return " (without contents)"
    return " (gone: it was donated)" if is_donated(leaves) else ""

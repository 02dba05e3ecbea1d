"""What a buffer shows of itself when it is printed, or is the result of a notebook cell."""

import dataclasses
import html
import math
from typing import Any

import jax
import jax.core
import numpy as np

from jaxbuf.core.donation import is_gone
from jaxbuf.core.sizes import format_bytes

# More leaves than these are counted only.
_MOST_LEAVES = 16
_STRATEGIES = ("sampler", "evictor", "episodes", "diversity", "freshness")


@dataclasses.dataclass(frozen=True)
class Summary:
    """A buffer in words.

    Attributes:
        title: Kind, size, capacity and memory.
        rows: Names and values, in order.
        parts: Those of the buffers it consists of.
    """

    title: str
    rows: tuple[tuple[str, str], ...]
    parts: tuple["Summary", ...] = ()

    def lines(self) -> list[str]:
        """As plain text."""
        width = max((len(name) for name, _ in self.rows), default=0)
        rows = [f"  {name:<{width}}  {value}".rstrip() for name, value in self.rows]
        inner = [f"  {line}" for part in self.parts for line in part.lines()]
        return [self.title, *rows, *inner]

    def html(self) -> str:
        """As a small table."""
        cell = '<td style="text-align:left">'
        rows = "".join(
            f"<tr>{cell}{html.escape(name)}</td>{cell}<code>{html.escape(value)}</code></td></tr>"
            for name, value in self.rows
        )
        table = f"<table>{rows}</table>" if rows else ""
        parts = "".join(f"<li>{part.html()}</li>" for part in self.parts)
        inner = f"<ul>{parts}</ul>" if parts else ""
        return f"<div><strong>{html.escape(self.title)}</strong>{table}{inner}</div>"


def text(self: Any) -> str:
    """What ``print(buffer)`` shows: kind, size, memory, strategies, leaves.

    It works on tracers, abstract values and buffers that were donated as well, and then leaves the
    size out.

    Example:
        >>> import jax.numpy as jnp, jaxbuf
        >>> item = {"obs": jnp.zeros(4), "reward": jnp.float32(0)}
        >>> print(jaxbuf.ItemBuffer.create(item, capacity=50_000))
        ItemBuffer: 0 of 50,000 items, 976.6 KiB
          sampler         Uniform(replacement=True)
          evictor         Oldest()
          data['obs']     float32[4]  781.2 KiB
          data['reward']  float32     195.3 KiB
    """
    return "\n".join(summary(self).lines())


def rich(self: Any) -> str:
    """What a notebook shows: the same as a table."""
    return summary(self).html()


def summary(buffer: Any) -> Summary:
    """What there is to say about a buffer, whatever its leaves are."""
    try:
        return _summary(buffer)
    except Exception:
        # Printing must not be what fails: transformations fill buffers with all sorts of things.
        found = jax.tree_util.tree_leaves_with_path(buffer)
        rows = [(jax.tree_util.keystr(path).lstrip("."), _short(leaf)) for path, leaf in found]
        return Summary(f"{type(buffer).__name__} of other things than arrays", _cut(rows))


def _summary(buffer: Any) -> Summary:
    leaves = jax.tree.leaves(buffer)
    size = format_bytes(sum(_nbytes(leaf) for leaf in leaves))
    name = type(buffer).__name__
    if hasattr(buffer, "parts"):
        shares = zip(buffer.parts, buffer.ratios, strict=True)
        parts = [(_summary(part), share) for part, share in shares]
        titled = [
            dataclasses.replace(part, title=f"{share:.0%} {part.title}") for part, share in parts
        ]
        return Summary(f"{name}: {_held(buffer, leaves)}, {size}", (), tuple(titled))
    batch = _batch(buffer)
    title = f"{name}: {_held(buffer, leaves)}, {size}"
    if batch:
        title = f"{' × '.join(str(axis) for axis in batch)} × {title} in all"
    rows = [("shape", _rings(buffer))] if hasattr(buffer, "num_envs") else []
    index = getattr(buffer, "episode_index", None)
    for strategy in _STRATEGIES:
        value = getattr(index if strategy == "episodes" else buffer, strategy, None)
        if value is not None:
            rows.append((strategy, repr(value)))
    leading = len(batch) + (2 if hasattr(buffer, "num_envs") else 1)
    data = jax.tree_util.tree_leaves_with_path(buffer.data)
    kinds = [_kind(leaf, leading) for _, leaf in data]
    width = max(len(kind) for kind in kinds)
    rows += _cut(
        [
            (f"data{jax.tree_util.keystr(path)}", f"{kind:<{width}}  {format_bytes(_nbytes(leaf))}")
            for (path, leaf), kind in zip(data, kinds, strict=True)
        ]
    )
    return Summary(title, tuple(rows))


def _held(buffer: Any, leaves: list[Any]) -> str:
    """How much is in it, as far as that can be told without waiting for a program to be run."""
    unit = "steps" if hasattr(buffer, "num_envs") else "items"
    most = f"{buffer.capacity:,} {unit}{' each' if _batch(buffer) else ''}"
    if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        return f"up to {most} (traced)"
    if not all(isinstance(leaf, jax.Array | np.ndarray) for leaf in leaves):
        return f"up to {most} (without contents)"
    arrays = [leaf for leaf in leaves if isinstance(leaf, jax.Array)]
    if is_gone(arrays):
        return f"up to {most} (gone: it was donated)"
    if not all(leaf.is_fully_addressable for leaf in arrays):
        return f"up to {most} (on several hosts)"
    size = np.asarray(buffer.size)
    least, largest = int(size.min()), int(size.max())
    held = f"{least:,}" if least == largest else f"{least:,} to {largest:,}"
    return f"{held} of {most}"


def _batch(buffer: Any) -> tuple[int, ...]:
    """The axes that ``vmap`` has put in front of those of one buffer."""
    if hasattr(buffer, "parts"):
        return _batch(buffer.parts[0])
    return tuple(buffer.counters.shape[:-1])


def _rings(buffer: Any) -> str:
    text = f"{buffer.num_envs:,} environments × {buffer.length:,} steps, "
    text += f"windows of {buffer.sequence_length:,}"
    return text + (f" every {buffer.period:,}" if buffer.period > 1 else "")


def _kind(leaf: Any, leading: int) -> str:
    """Dtype and shape of what is stored in one slot."""
    inner = ", ".join(str(axis) for axis in leaf.shape[leading:])
    return f"{leaf.dtype}[{inner}]" if inner else str(leaf.dtype)


def _nbytes(leaf: Any) -> int:
    return math.prod(leaf.shape) * leaf.dtype.itemsize


def _short(leaf: Any) -> str:
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
        return _kind(leaf, 0)
    whole = repr(leaf)
    return whole if len(whole) <= 60 else whole[:57] + "..."


def _cut(rows: list[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    """The rows, the last ones only counted if there are many."""
    if len(rows) <= _MOST_LEAVES:
        return tuple(rows)
    left = len(rows) - _MOST_LEAVES + 1
    return (*rows[: _MOST_LEAVES - 1], ("...", f"and {left} more leaves"))

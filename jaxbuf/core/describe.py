"""What buffers, batches and their like show of themselves when they are printed.

A pytree prints as the arrays in it, all of them. What sets ``__repr__ = describe.text`` and
``_repr_html_ = describe.rich`` shows in a few lines instead, on the terminal and as the result of a
notebook cell, what it is, how it was configured, how much is in it and what it takes.
"""

import dataclasses
import html
import inspect
import math
from typing import Any

import jax
import jax.core
import numpy as np

from jaxbuf.core.donation import is_gone
from jaxbuf.core.sizes import format_bytes

# More leaves than these are counted only.
_MOST_LEAVES = 16
_LONGEST = 200
# What tells how large something is that is no buffer, and where it keeps what it was given.
_SIZES = ("num_envs", "num_workers", "max_length", "fragments_per_chunk")
_CONTENTS = ("data", "items")
_STRATEGIES = ("sampler", "evictor", "episodes", "diversity", "freshness")


@dataclasses.dataclass(frozen=True)
class Summary:
    """A buffer, or a batch or the like, in words.

    Attributes:
        title: Kind, contents and memory.
        rows: Names and values, in order.
        parts: Those of what it consists of.
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
    """What ``print(buffer)`` shows: kind, size, memory, strategies, leaves; of a batch its leaves.

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
        >>> print(jaxbuf.RateLimiter.create(samples_per_insert=2.0, min_size=10))
        RateLimiter: 12 B
          numerator    2
          denominator  1
          min_size     10
          range        (-inf, inf)
          metrics      inserts 0, samples 0, error 0
    """
    return "\n".join(summary(self).lines())


def rich(self: Any) -> str:
    """What a notebook shows: the same as a table."""
    return summary(self).html()


def summary(buffer: Any) -> Summary:
    """What there is to say about a buffer or the like, whatever its leaves are."""
    try:
        return _summary(buffer) if hasattr(buffer, "capacity") else _fields(buffer)
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


def _fields(thing: Any) -> Summary:
    """What is no buffer: how it is configured, what it counts, and the arrays it is made of.

    What has ``metrics`` keeps its books in arrays that say nothing by themselves.
    """
    leaves = jax.tree.leaves(thing)
    state = _state(leaves)
    size = format_bytes(sum(_nbytes(leaf) for leaf in leaves)) + (f" ({state})" if state else "")
    valid = getattr(thing, "valid", None)
    if valid is not None and not state:
        size = f"{int(np.sum(valid)):,} of {valid.size:,} valid, {size}"
    keeps_books = _counts(thing)
    counts = dict(thing.metrics()) if keeps_books and not state else {}
    rows = [(name, str(getattr(thing, name))) for name in _SIZES if hasattr(thing, name)]
    found: list[tuple[str, Any]] = []
    parts: list[Summary] = []
    for field in dataclasses.fields(thing):
        value = getattr(thing, field.name)
        if type(value).__repr__ is text:
            part = summary(value)
            parts.append(dataclasses.replace(part, title=f"{field.name}: {part.title}"))
            if counts and _counts(value):
                counts = {k: v for k, v in counts.items() if k not in value.metrics()}
        elif not field.metadata.get("pytree_node", True):
            # What is named with an underscore is for those who read the source.
            if value is not None and not type(value).__name__.startswith("_"):
                name = getattr(value, "__name__", None)
                rows.append((field.name, name or _cut_text(repr(value))))
        elif not keeps_books or field.name in _CONTENTS:
            inner = jax.tree_util.tree_leaves_with_path(value)
            found += [(f"{field.name}{jax.tree_util.keystr(path)}", leaf) for path, leaf in inner]
    if counts:
        rows.append(("metrics", ", ".join(f"{k} {_number(v)}" for k, v in counts.items())))
    width = max((len(_kind(leaf, 0)) for _, leaf in found), default=0)
    rows += _cut([(name, _contents(leaf, width, bool(state))) for name, leaf in found])
    return Summary(f"{type(thing).__name__}: {size}", tuple(rows), tuple(parts))


def _contents(leaf: Any, width: int, unknown: bool) -> str:
    """A single number itself, if it is known; of others what they are, and their memory."""
    if leaf.shape == () and not unknown and leaf.dtype in (np.bool_, np.int32, np.float32):
        return _number(leaf)
    return f"{_kind(leaf, 0):<{width}}  {format_bytes(_nbytes(leaf))}"


def _counts(thing: Any) -> bool:
    """Whether it tells what it counts, and needs nothing else for that."""
    return hasattr(thing, "metrics") and not inspect.signature(thing.metrics).parameters


def _number(value: Any) -> str:
    array = np.asarray(value)
    if array.ndim:
        return np.array2string(array, threshold=8, precision=4, separator=", ")
    number = array.item()
    return f"{number:,}" if isinstance(number, int) else f"{number:.4g}"


def _state(leaves: list[Any]) -> str | None:
    """Why nothing can be said of the contents without waiting for a program to be run, if so."""
    if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        return "traced"
    if not all(isinstance(leaf, jax.Array | np.ndarray) for leaf in leaves):
        return "without contents"
    if is_gone(leaves):
        return "gone: it was donated"
    if not all(leaf.is_fully_addressable for leaf in leaves if isinstance(leaf, jax.Array)):
        return "on several hosts"
    return None


def _held(buffer: Any, leaves: list[Any]) -> str:
    """How much is in it, as far as that can be told without waiting for a program to be run."""
    unit = "steps" if hasattr(buffer, "num_envs") else "items"
    most = f"{buffer.capacity:,} {unit}{' each' if _batch(buffer) else ''}"
    state = _state(leaves)
    if state:
        return f"up to {most} ({state})"
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
    return _cut_text(repr(leaf), 60)


def _cut_text(whole: str, most: int = _LONGEST) -> str:
    return whole if len(whole) <= most else whole[: most - 3] + "..."


def _cut(rows: list[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    """The rows, the last ones only counted if there are many."""
    if len(rows) <= _MOST_LEAVES:
        return tuple(rows)
    left = len(rows) - _MOST_LEAVES + 1
    return (*rows[: _MOST_LEAVES - 1], ("...", f"and {left} more leaves"))

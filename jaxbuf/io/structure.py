"""Descriptions of pytrees without their numbers: the configuration and the types of leaves."""

import dataclasses
import enum
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr
from jaxtyping import PyTree

# A path in a pytree, as ``jax.tree_util`` has it.
KeyPath: TypeAlias = tuple[Any, ...]
# Static fields of the dataclasses in a pytree, by their path.
Configuration: TypeAlias = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class LeafType:
    """The type of a leaf.

    Attributes:
        shape: Its shape.
        dtype: Name of its dtype, such as ``float32`` or ``key<fry>``.
        scalar: Whether it is a Python number, which may become an array of its kind or vice versa.
    """

    shape: tuple[int, ...]
    dtype: str
    scalar: bool

    @classmethod
    def of(cls, leaf: Any, name: str) -> "LeafType":
        """Describes an array, a Python number or a ``jax.ShapeDtypeStruct``.

        Raises:
            ValueError: If it is something else.
        """
        if isinstance(leaf, bool | int | float | complex):
            return cls((), np.asarray(leaf).dtype.name, True)
        if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
            raise ValueError(f"{name} is a {type(leaf).__name__}; expected an array")
        return cls(tuple(leaf.shape), str(leaf.dtype), False)

    def fits(self, other: "LeafType") -> bool:
        """Returns whether a leaf of one type can be loaded for the other."""
        if self.shape != other.shape:
            return False
        if (self.scalar or other.scalar) and not is_key(self.dtype) and not is_key(other.dtype):
            return jnp.dtype(self.dtype).kind == jnp.dtype(other.dtype).kind
        return _native(self.dtype) == _native(other.dtype)


def _native(dtype: str) -> str:
    """Returns the name of a dtype without its byte order."""
    return np.dtype(dtype).newbyteorder("=").name if dtype.startswith(">") else dtype


def is_key(dtype: Any) -> bool:
    """Returns whether a dtype, or the name of one, is that of PRNG keys."""
    return str(dtype).startswith("key<")


def leaf_types(tree: PyTree, name: str) -> dict[str, LeafType]:
    """Returns the type of each leaf by the leaf's name in errors, in order.

    Raises:
        ValueError: If a leaf is not an array.
    """
    return {
        keystr(path): LeafType.of(leaf, name + keystr(path))
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def rows_by_name(like: PyTree[jax.ShapeDtypeStruct]) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the leaves of a batch of rows of a store, ``[B, *shape]``, by their key paths.

    Raises:
        ValueError: If a leaf is a PRNG key.
    """
    likes = dict(zip(leaf_types(like, ""), jax.tree.leaves(like), strict=True))
    for name, leaf in likes.items():
        if is_key(leaf.dtype):
            raise ValueError(f"example{name} is a PRNG key; store its jax.random.key_data")
    return likes


def describe_rows(likes: dict[str, jax.ShapeDtypeStruct]) -> dict[str, dict[str, Any]]:
    """Returns the shape and the dtype of each leaf of a row, as a store keeps them."""
    return {x: {"shape": [*y.shape[1:]], "dtype": str(y.dtype)} for x, y in likes.items()}


def check_rows(stored: Any, likes: dict[str, jax.ShapeDtypeStruct], where: str) -> None:
    """Checks that rows are as a store has described them with ``describe_rows``.

    Raises:
        ValueError: If they differ.
    """
    example = describe_rows(likes)
    if not isinstance(stored, dict) or not all(isinstance(x, dict) for x in stored.values()):
        raise ValueError(f"{where} does not say what its rows are")
    problems = [f"example{name} is not in the store" for name in example if name not in stored]
    problems += [f"example{name} is missing" for name in stored if name not in example]
    for name in example if not problems else ():
        problems += [
            f"example{name} has {attribute} {example[name][attribute]}, but the store has "
            f"{stored[name].get(attribute)}"
            for attribute in ("shape", "dtype")
            if example[name][attribute] != stored[name].get(attribute)
        ]
    if problems:
        raise ValueError(f"{where} holds something else: {'; '.join(problems)}")


def configuration(tree: PyTree) -> Configuration:
    """Returns all static fields in the dataclasses of a pytree, by their path.

    Functions are left out, since they are code rather than configuration. So are devices and
    shardings, and fields whose metadata says that they are no ``configuration``.

    Example:
        >>> import jax.numpy as jnp, jaxbuf
        >>> configuration([jaxbuf.Queue.create(jnp.float32(0), capacity=7)])
        {'[0]': 'Queue', '[0].occupancy': 'QueueRing', '[0].occupancy.capacity': 7}
    """
    return dict(_nodes(tree, ""))


def part_of(saved: Configuration, leaves: Iterable[str], like: PyTree) -> Configuration:
    """Returns the saved configuration of that part of a pytree which ``like`` has.

    A dataclass of somebody else may be of another class than the saved one if it has fewer leaves.

    Args:
        saved: The result of ``configuration`` for the saved pytree.
        leaves: The names of its leaves.
        like: A pytree like a part of it.
    """
    left = set(leaves) - {keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(like)}
    kept: Configuration = {}
    for path, node, static in _walk(like, ""):
        inside = tuple(f"{path}.{field}{end}" for field in static for end in (".", "["))
        exact = {f"{path}.{field}" for field in static}
        kept |= {k: v for k, v in saved.items() if k in exact or k.startswith(inside)}
        ours = type(node).__module__.startswith("jaxbuf.")
        if not ours and any(name.startswith((f"{path}.", f"{path}[")) for name in left):
            kept |= {path: type(node).__qualname__} if dataclasses.is_dataclass(node) else {}
        elif path in saved:
            kept[path] = saved[path]
    return kept


def _nodes(tree: PyTree, path: str) -> Iterator[tuple[str, Any]]:
    for place, node, static in _walk(tree, path):
        if dataclasses.is_dataclass(node):
            yield place, type(node).__qualname__
        for field in static:
            yield from _values(getattr(node, field), f"{place}.{field}")


def _walk(node: PyTree, path: str) -> Iterator[tuple[str, Any, list[str]]]:
    """Yields each inner node of a pytree, with its path and the names of its static fields."""
    children = jax.tree_util.tree_leaves_with_path(node, is_leaf=lambda child: child is not node)
    if any(not key for key, _ in children):
        return
    static: list[str] = []
    if dataclasses.is_dataclass(node):
        dynamic = {keystr(key) for key, _ in children}
        for field in dataclasses.fields(node):
            # A field without leaves is also a child, although it does not appear in a path.
            compared = field.metadata.get("configuration", True)
            is_static = field.metadata.get("static", False)
            is_dynamic = field.metadata.get("pytree_node", not is_static)
            if compared and f".{field.name}" not in dynamic and not is_dynamic:
                static.append(field.name)
    yield path, node, static
    for key, child in children:
        yield from _walk(child, path + keystr(key))


def _values(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield path, type(value).__qualname__
        for field in dataclasses.fields(value):
            yield from _values(getattr(value, field.name), f"{path}.{field.name}")
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _values(inner, f"{path}[{key!r}]")
    elif isinstance(value, tuple | list):
        plain = [list(_values(inner, "")) for inner in value]
        if all(len(inner) == 1 and inner[0][0] == "" for inner in plain):
            yield path, [inner[0][1] for inner in plain]
        else:
            for i, inner in enumerate(value):
                yield from _values(inner, f"{path}[{i}]")
    elif isinstance(value, type | np.dtype):
        yield path, getattr(value, "__name__", None) or str(value)
    elif isinstance(value, enum.Enum):
        yield path, value.name
    elif isinstance(value, np.generic):
        yield from _values(value.item(), path)
    elif isinstance(value, float) and not math.isfinite(value):
        yield path, repr(value)
    elif value is None or isinstance(value, bool | int | float | str):
        yield path, value
    elif isinstance(value, jax.Device | jax.sharding.Sharding):
        # The placement of arrays does not change their meaning.
        return
    elif not callable(value):
        yield path, type(value).__qualname__

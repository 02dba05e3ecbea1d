"""Checks of a buffer that is passed in: whether it was donated, and whether it is a single one."""

from typing import Any

import jax
import jax.core
import numpy as np

from jaxbuf.core import trees
from jaxbuf.core.leaves import as_numbers


def is_donated(tree: object, name: str = "tree") -> bool:
    """Returns whether an array of the tree was donated, so that it can no longer be read.

    Raises:
        ValueError: If the tree, which the error calls ``name``, is not a pytree.
    """
    leaves, _ = trees.flatten(tree, name)
    return any(leaf.is_deleted() for leaf in leaves if trees.is_concrete(type(leaf)))


def check_not_donated(tree: object, name: str) -> None:
    """Checks that a tree is a pytree and was not donated.

    Raises:
        ValueError: If it was donated (the message says how to keep it) or is not a pytree.
    """
    if is_donated(tree, name):
        raise ValueError(
            f"{name} was donated: an earlier call updated it in place, so this one is gone. Go on "
            "with what that call returned, as in buffer = jaxbuf.add(buffer, items), or pass it "
            "donate=False to keep both"
        )


def check_apart(buffer: object, arguments: dict[str, Any]) -> None:
    """Checks that no array of a buffer that is donated appears in it twice, or in an argument.

    Raises:
        ValueError: If one does; the message names both leaves.
    """
    names: dict[int, str] = {}
    for root, tree in {"buffer": buffer, **arguments}.items():
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            name = root + jax.tree_util.keystr(path)
            # An array may appear in several places of the other arguments, which nothing updates.
            for memory in _memory(leaf):
                if memory in names and (root == "buffer" or names[memory].startswith("buffer")):
                    raise ValueError(
                        f"{name} shares its memory with {names[memory]}, which this call updates "
                        f"in place; pass a copy of it, jnp.copy(...), or donate=False"
                    )
                names.setdefault(memory, name)


def _memory(leaf: object) -> set[int]:
    """Returns the addresses of the memory of an array; none if it has no elements."""
    if not isinstance(leaf, jax.Array) or leaf.size == 0 or leaf.is_deleted():
        return set()
    return {shard.data.unsafe_buffer_pointer() for shard in as_numbers(leaf).addressable_shards}


def one_leaf(tree: Any) -> Any:
    """Returns the leaf of a buffer that is looked at in place of all others; None without one."""
    # Not by ``getattr``: a wrapper has no counters, and would look for a helpful error first.
    fields: Any = getattr(tree, "__dict__", ())
    return fields["counters"] if "counters" in fields else next(iter(jax.tree.leaves(tree)), None)


def check_readable(buffer: Any) -> None:
    """Checks that a buffer has numbers to read, after a look at one of its leaves.

    Raises:
        ValueError: If it was donated, or has shapes in place of arrays.
    """
    one = one_leaf(buffer)
    if isinstance(one, jax.ShapeDtypeStruct):
        raise ValueError(
            "buffer has shapes in place of arrays, as jax.eval_shape returns it; create it outside "
            "of jax.eval_shape, or work on it inside"
        )
    check_not_donated(one, "buffer")


def check_single(buffer: Any) -> Any:
    """Returns a buffer with its leaves as JAX arrays, after a look at one of them.

    Raises:
        ValueError: If it was donated, has shapes in place of arrays, or is a batch of buffers, as
            ``vmap`` returns them.
    """
    one = one_leaf(buffer)
    if trees.is_concrete(type(one)):
        if one.is_deleted():
            check_readable(buffer)
        if len(one.shape) == 1:
            return buffer  # As in almost every call from Python.
    elif isinstance(one, np.ndarray | np.generic):
        buffer = trees.on_device(buffer)
    elif not isinstance(one, jax.core.Tracer):
        check_readable(buffer)
    if getattr(one, "ndim", 0) > 1 and "counters" in getattr(buffer, "__dict__", ()):
        count = " × ".join(str(axis) for axis in buffer.counters.shape[:-1])
        raise ValueError(
            f"buffer is {count} buffers side by side; work on each of them with jax.vmap, or take "
            "one: jax.tree.map(lambda leaf: leaf[0], buffer)"
        )
    return buffer

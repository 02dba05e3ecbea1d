"""Pytrees as users pass them."""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

Tree = TypeVar("Tree")


def leaves(tree: object, name: str) -> list[Any]:
    """Returns the leaves of a pytree.

    Raises:
        ValueError: If JAX cannot flatten it because it cannot sort the keys of a dictionary.

    Example:
        >>> leaves({1: 2.0, "obs": 3.0}, "items")
        Traceback (most recent call last):
        ValueError: items is not a pytree: its dictionaries need keys that can be sorted, such as \
all strings or all integers (Comparator raised exception while sorting pytree dictionary keys.)
    """
    try:
        return jax.tree.leaves(tree)
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{name} is not a pytree: its dictionaries need keys that can be sorted, such as all "
            f"strings or all integers ({error})"
        ) from error


def owned(tree: Tree) -> Tree:
    """Returns the tree with copies of its NumPy arrays, which their owner may write again.

    JAX may read a NumPy array after the call that it was passed to has returned, and on a CPU a jax
    array may be the memory of a NumPy array. So each array that a caller passes is copied once,
    before anything of JAX sees it: here, or where its dtype is converted.
    """
    # Few classes are looked at instead of many leaves, because each call from Python comes here.
    if not any(issubclass(kind, np.ndarray) for kind in set(map(type, jax.tree.leaves(tree)))):
        return tree
    return jax.tree.map(lambda leaf: leaf.copy() if isinstance(leaf, np.ndarray) else leaf, tree)


def on_device(tree: Tree) -> Tree:
    """Returns the tree with its NumPy arrays, as ``jax.device_get`` returns them, as jax arrays."""
    if not any(isinstance(leaf, np.ndarray | np.generic) for leaf in jax.tree.leaves(tree)):
        return tree
    return jax.tree.map(jnp.asarray, owned(tree))

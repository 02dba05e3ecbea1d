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


def on_device(tree: Tree) -> Tree:
    """Returns the tree with its NumPy arrays, as ``jax.device_get`` returns them, as jax arrays."""
    if not any(isinstance(leaf, np.ndarray | np.generic) for leaf in jax.tree.leaves(tree)):
        return tree
    return jax.tree.map(jnp.asarray, tree)

"""Pytrees as users hand them in."""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

Tree = TypeVar("Tree")


def leaves(tree: Any, name: str) -> list[Any]:
    """The leaves of a pytree.

    Raises:
        ValueError: If JAX cannot flatten it, since it cannot sort the keys of a dictionary.

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
    """The tree with a jax array for each NumPy array, such as ``jax.device_get`` leaves behind."""
    if not any(isinstance(leaf, np.ndarray | np.generic) for leaf in jax.tree.leaves(tree)):
        return tree
    return jax.tree.map(jnp.asarray, tree)

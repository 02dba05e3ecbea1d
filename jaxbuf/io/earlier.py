"""Checkpoints of version 0.3.0 in the form of today.

Up to version 0.3.0 ``Freshness`` kept one lower bound on the versions of all slots.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.tree_util import keystr
from jaxtyping import Array

from jaxbuf.core.types import Arrays
from jaxbuf.io.structure import Configuration, KeyPath, LeafType

Tree = TypeVar("Tree")
_ACCUMULATORS = ("ChunkAccumulator", "EpisodeAccumulator")

# What 0.3.0 did not have, with what it did: a class, its field and the value.
_NEW_FIELDS: tuple[tuple[str, str, Any], ...] = (
    ("Balanced", "by", "environment"),
    ("Diversity", "keep", "first"),
    ("Mixture", "names", []),
)


def completed(saved: Configuration, current: Configuration) -> Configuration:
    """Returns a saved configuration with the fields that a class did not have at that time.

    Args:
        saved: The result of ``structure.configuration`` for the saved pytree.
        current: The result for the pytree that it is loaded into.
    """
    # It says what ``add`` returns, and nothing about what is stored, and its default has changed.
    names = (f"{path}.per_add" for path, name in saved.items() if name in _ACCUMULATORS)
    new = {
        f"{path}.{field}": default
        for path, name in saved.items()
        for kind, field, default in _NEW_FIELDS
        if name == kind and f"{path}.{field}" in current
    }
    return {**new, **saved, **{name: current[name] for name in names if name in current}}


def as_saved(like: Tree, saved: dict[str, LeafType], configuration: Configuration) -> Tree:
    """Returns ``like`` with the shapes that were saved, where they differ today."""

    def convert(path: KeyPath, leaf: Any) -> Any:
        before = saved.get(keystr(path))
        if before is None or not _change(keystr(path), before, leaf, configuration):
            return leaf
        committed = getattr(leaf, "committed", True)
        sharding = getattr(leaf, "sharding", None) if committed else None
        return jax.ShapeDtypeStruct(before.shape, leaf.dtype, sharding=sharding)

    return jax.tree_util.tree_map_with_path(convert, like)


def renewed(tree: Tree, like: Arrays, saved: Configuration) -> Tree:
    """Returns a loaded pytree with the shapes of ``like``, whose buffers have the same sizes.

    Args:
        tree: The loaded pytree, in the form in which it was saved.
        like: A pytree like it in the form of today.
        saved: The configuration as it was saved.
    """

    def reshape(path: KeyPath, leaf: Any, target: Any) -> Any:
        change = _change(keystr(path), leaf, target, saved)
        return change(leaf) if change else leaf

    return jax.tree_util.tree_map_with_path(reshape, tree, like)


def _change(
    name: str, saved: Any, current: Any, configuration: Configuration
) -> Callable[[Array], Array] | None:
    """Returns a function that gives a saved leaf the shape of today; None if it has that shape."""
    node, _, field = name.rpartition(".")
    if field != "oldest" or configuration.get(node) != "FreshnessState":
        return None
    # One lower bound was kept for all slots, which holds for each block of them.
    now = current.shape
    shared = len(saved.shape) == len(now) - 1
    return (lambda leaf: jnp.broadcast_to(leaf[..., None], now)) if shared else None

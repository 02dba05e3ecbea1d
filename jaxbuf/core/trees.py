"""Pytrees as users pass them."""

import functools
from collections.abc import Mapping
from typing import Any, TypeVar

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, PyTree

Tree = TypeVar("Tree")


def flatten(tree: object, name: str) -> tuple[list[Any], Any]:
    """Returns the leaves of a pytree, and its structure.

    Raises:
        ValueError: If JAX cannot flatten it because it cannot sort the keys of a dictionary.

    Example:
        >>> flatten({1: 2.0, "obs": 3.0}, "items")
        Traceback (most recent call last):
        ValueError: items is not a pytree: its dictionaries need keys that can be sorted, such as \
all strings or all integers (Comparator raised exception while sorting pytree dictionary keys.)
    """
    try:
        return jax.tree.flatten(tree)
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{name} is not a pytree: its dictionaries need keys that can be sorted, such as all "
            f"strings or all integers ({error})"
        ) from error


def updated(node: Tree, **fields: Any) -> Tree:
    """Returns a dataclass with other fields, without a check: not of a class's own ``replace``."""
    # In a fifth of the time of ``dataclasses.replace``.
    new = object.__new__(type(node))
    vars(new).update(vars(node), **fields)
    return new


def native(leaf: Any) -> Any:
    """Returns a leaf; a NumPy array in the byte order of this machine, which JAX needs."""
    if isinstance(leaf, np.ndarray) and not leaf.dtype.isnative:
        return leaf.astype(leaf.dtype.newbyteorder("="))
    return leaf


@functools.lru_cache(maxsize=1024)
def is_concrete(kind: type) -> bool:
    """Returns whether a class is one of JAX's arrays that are not traced."""
    return issubclass(kind, jax.Array) and not issubclass(kind, jax.core.Tracer)


def _has_numpy(tree: object) -> bool:
    # By cached facts of their classes, because each call from Python comes here.
    return any(map(_is_numpy, map(type, jax.tree.leaves(tree))))


@functools.lru_cache(maxsize=1024)
def _is_numpy(kind: type) -> bool:
    return issubclass(kind, np.ndarray | np.generic)


def owned(tree: Tree) -> Tree:
    """Returns the tree with copies of its NumPy arrays, which their owner may write again.

    JAX may read a NumPy array after the call that it was passed to has returned, and on a CPU a jax
    array may be the memory of a NumPy array. So each array that a caller passes is copied once,
    before anything of JAX sees it: here, or where its dtype is converted.
    """
    leaves, treedef = jax.tree.flatten(tree)
    copied = False
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, np.ndarray):
            leaves[i], copied = leaf.copy() if leaf.dtype.isnative else native(leaf), True
    return jax.tree.unflatten(treedef, leaves) if copied else tree


def on_device(tree: Tree) -> Tree:
    """Returns the tree with its NumPy arrays, as ``jax.device_get`` returns them, as jax arrays."""
    if not _has_numpy(tree):
        return tree
    return jax.tree.map(jnp.asarray, owned(tree))


def strongly_typed(tree: Tree) -> Tree:
    """Returns the tree with strong types in place of the weak ones that Python numbers trace as.

    A scan or a checkpoint turns weak types into strong ones: another trace for the same program.
    """
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype=leaf.dtype), tree)


def plain(tree: object) -> Any:
    """Returns the tree with dicts, which JAX sorts by key, in place of all other mappings.

    Example:
        >>> import collections
        >>> plain((collections.OrderedDict(b=1, a=2), 3))
        ({'b': 1, 'a': 2}, 3)
    """

    def is_mapping(node: object) -> bool:
        return isinstance(node, Mapping)

    def convert(node: Any) -> Any:
        return {key: plain(x) for key, x in node.items()} if is_mapping(node) else node

    return jax.tree.map(convert, tree, is_leaf=is_mapping)


def alike(tree: PyTree, other: PyTree) -> bool:
    """Returns whether two pytrees have one structure, and leaves of the same names.

    JAX finds two dataclasses equal that have as many fields and the same static ones, whatever the
    fields are called. Seen in jax 0.10.2 to 0.12.0.1, not in 0.8.0.

    Example:
        >>> import dataclasses, jax, jax.numpy as jnp
        >>> @jax.tree_util.register_dataclass
        ... @dataclasses.dataclass
        ... class Step:
        ...     obs: jax.Array
        ...     reward: jax.Array
        >>> @jax.tree_util.register_dataclass
        ... @dataclasses.dataclass
        ... class Turned:
        ...     reward: jax.Array
        ...     obs: jax.Array
        >>> alike(Step(0, 1), Turned(0, 1)), alike(Step(0, 1), Step(2, 3))
        (False, True)
    """
    if jax.tree.structure(tree) != jax.tree.structure(other):
        return False
    ours, theirs = (
        [path for path, _ in jax.tree_util.tree_leaves_with_path(one)] for one in (tree, other)
    )
    return ours == theirs


def match(like: object, tree: Tree) -> Tree:
    """Returns a tree in the structure of another one, where only their mappings differ.

    JAX flattens an ``OrderedDict`` in its own order, but a dict sorted by key, so leaves of the two
    must not be paired by position.

    Args:
        like: The tree that has the structure.
        tree: The tree with the leaves.

    Returns:
        The leaves of ``tree`` in the structure of ``like``, paired by key. If the two differ in
        anything but the kinds and orders of mappings, ``tree`` as it is.

    Example:
        >>> import collections
        >>> match({"a": 0, "b": 0}, collections.OrderedDict(b=1, a=2))
        {'a': 2, 'b': 1}
    """
    if alike(tree, like):
        return tree
    want = jax.tree.structure(like)
    names, values = plain(jax.tree.unflatten(want, range(want.num_leaves))), plain(tree)
    if not alike(names, values):
        return tree
    by_name = dict(zip(jax.tree.leaves(names), jax.tree.leaves(values), strict=True))
    return jax.tree.unflatten(want, [by_name[i] for i in range(want.num_leaves)])


def choose(mask: Bool[Array, "..."], new: Tree, old: Tree) -> Tree:
    """Returns the rows ``[B, ...]`` of ``new`` where the mask is True, and of ``old`` elsewhere.

    Where one of them has None, which is no answer, the result has none either.

    Example:
        >>> choose(jnp.array([True, False]), {"a": jnp.ones(2)}, {"a": jnp.zeros(2)})["a"].tolist()
        [1.0, 0.0]
    """

    def leaf(new: Array | None, old: Array | None) -> Array | None:
        if new is None or old is None:
            return None
        return jnp.where(mask.reshape(mask.shape + (1,) * (new.ndim - mask.ndim)), new, old)

    return jax.tree.map(leaf, new, old, is_leaf=lambda x: x is None)


def in_place_of(old: Tree, new: Tree) -> Tree:
    """Returns ``new``, in the memory of ``old`` where that is donated, and never sharing it.

    Both have the same shapes. A program that does not read a donated array does not get its memory,
    so each array is chosen between the two.
    """
    return jax.tree.map(lambda a, b: jnp.where(True, a, b), new, jax.lax.stop_gradient(old))

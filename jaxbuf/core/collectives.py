"""Whole pytrees on the devices of a mesh: sent between them, and marked as equal on them."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from jaxbuf.core import leaves
from jaxbuf.core.types import Arrays
from jaxbuf.core.versions import AnyTree, varying_axes


def all_gather(tree: Arrays, axis: str) -> Arrays:
    """Returns leaves ``[n, ...]`` of all ``D`` devices, concatenated to ``[D * n, ...]``."""
    return _moved(tree, _from_all, axis)


def all_to_all(tree: Arrays, axis: str) -> Arrays:
    """Sends block ``d`` of leaves ``[D * n, ...]`` to device ``d``; returns one block from each."""
    return _moved(tree, _to_all, axis)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def _moved(tree: Arrays, move: Callable[[Array, str], Array], axis: str) -> Arrays:
    """Applies ``move`` to the bits of leaves ``[n, ...]``: one collective for each item size."""
    flat, treedef = jax.tree.flatten(tree)
    bits = [leaves.bits(leaf) for leaf in flat]
    out: dict[int, Array] = {}
    for size in sorted({part.dtype.itemsize for part in bits}):
        which = [i for i, part in enumerate(bits) if part.dtype.itemsize == size]
        joined = move(jnp.concatenate([bits[i] for i in which], axis=1), axis)
        ends = np.cumsum([bits[i].shape[1] for i in which])[:-1]
        out |= zip(which, jnp.split(joined, ends, axis=1), strict=True)
    return jax.tree.unflatten(treedef, [leaves.from_bits(out[i], x) for i, x in enumerate(flat)])


@_moved.defjvp
def _(
    move: Callable[[Array, str], Array], axis: str, primals: tuple[Arrays], tangents: tuple[Arrays]
) -> tuple[Arrays, Arrays]:
    out = _moved(*primals, move, axis)

    def of(leaf: Array, tangent: Array) -> Array | np.ndarray:
        if jnp.issubdtype(leaf.dtype, jnp.inexact):
            return move(tangent, axis)
        return np.zeros(leaf.shape, jax.dtypes.float0)

    return out, jax.tree.map(of, out, *tangents)


def _to_all(leaf: Array, axis: str) -> Array:
    # XLA refuses to send no rows.
    return leaf if leaf.shape[0] == 0 else lax.all_to_all(leaf, axis, 0, 0, tiled=True)


def _from_all(leaf: Array, axis: str) -> Array:
    return leaf if leaf.shape[0] == 0 else lax.all_gather(leaf, axis, tiled=True)


def mark_replicated(tree: AnyTree, axis: str) -> AnyTree:
    """Returns the same numbers, marked as those of all devices, on which they must be equal.

    Otherwise they cannot leave a ``jax.shard_map`` with its default checks as they are.
    """

    def mark(leaf: Array) -> Array:
        if axis not in varying_axes(leaf):
            return leaf
        leaf = lax.stop_gradient(leaf)
        if leaf.dtype == jnp.bool_:
            return lax.pmax(leaf.astype(jnp.int32), axis) > 0
        return lax.pmax(leaf, axis)

    return jax.tree.map(mark, tree)

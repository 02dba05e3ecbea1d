"""Whole pytrees on the devices of a mesh: sent between them, and marked as varying over them."""

import functools
import math
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, PyTree

from jaxbuf.core.versions import vary, varying_axes

AnyTree = TypeVar("AnyTree", bound=PyTree[Array])


def all_gather(tree: PyTree[Array], axis: str) -> PyTree[Array]:
    """Returns leaves ``[n, ...]`` of all ``D`` devices, concatenated to ``[D * n, ...]``."""
    return _moved(tree, _from_all, axis)


def all_to_all(tree: PyTree[Array], axis: str) -> PyTree[Array]:
    """Sends block ``d`` of leaves ``[D * n, ...]`` to device ``d``; returns one block from each."""
    return _moved(tree, _to_all, axis)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def _moved(tree: PyTree[Array], move: Callable[[Array, str], Array], axis: str) -> PyTree[Array]:
    """Applies ``move`` to the bits of leaves ``[n, ...]``: one collective for each item size."""
    leaves, treedef = jax.tree.flatten(tree)
    bits = [_bits(leaf) for leaf in leaves]
    out: dict[int, Array] = {}
    for size in sorted({part.dtype.itemsize for part in bits}):
        which = [i for i, part in enumerate(bits) if part.dtype.itemsize == size]
        joined = move(jnp.concatenate([bits[i] for i in which], axis=1), axis)
        ends = np.cumsum([bits[i].shape[1] for i in which])[:-1]
        out |= zip(which, jnp.split(joined, ends, axis=1), strict=True)
    return jax.tree.unflatten(treedef, [_from_bits(out[i], x) for i, x in enumerate(leaves)])


@_moved.defjvp
def _(
    move: Callable[[Array, str], Array],
    axis: str,
    primals: tuple[PyTree[Array]],
    tangents: tuple[PyTree[Array]],
) -> tuple[PyTree[Array], PyTree[Array]]:
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


def _bits(leaf: Array) -> Array:
    """Returns rows as unsigned integers of 1, 2 or 4 bytes, ``[n, k]``."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    elif leaf.dtype.kind == "c":
        leaf = jnp.stack([leaf.real, leaf.imag], axis=-1)
    size = leaf.dtype.itemsize
    if size == 1:
        plain = lax.bitcast_convert_type(leaf.astype(_byte(leaf.dtype)), jnp.uint8)
        return plain.reshape(leaf.shape[0], math.prod(leaf.shape[1:]))
    words = lax.bitcast_convert_type(leaf, jnp.dtype(f"uint{8 * min(size, 4)}"))
    return words.reshape(leaf.shape[0], math.prod(words.shape[1:]))


def _from_bits(bits: Array, like: Array) -> Array:
    """Returns the inverse of ``_bits``, for any number of rows."""
    if jnp.issubdtype(like.dtype, jax.dtypes.prng_key):
        data = _from_bits(bits, jax.random.key_data(like))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(like))
    shape = (bits.shape[0], *like.shape[1:])
    if like.dtype.kind == "c":
        both = _from_bits(bits, jnp.stack([like.real, like.imag], axis=-1))
        return lax.complex(both[..., 0], both[..., 1])
    if like.dtype.itemsize == 1:
        plain = lax.bitcast_convert_type(bits.reshape(shape), _byte(like.dtype))
        return plain.astype(like.dtype)
    shape += (2,) if like.dtype.itemsize == 8 else ()
    return lax.bitcast_convert_type(bits.reshape(shape), like.dtype)


def _byte(dtype: np.dtype) -> np.dtype:
    """Returns the dtype of 8 bits that holds all numbers of one of at most 8 bits."""
    if dtype == jnp.bool_ or jnp.issubdtype(dtype, jnp.unsignedinteger):
        return jnp.dtype(jnp.uint8)
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.dtype(jnp.int8)
    return jnp.dtype(jnp.float8_e4m3fn) if jnp.finfo(dtype).bits < 8 else dtype


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


def vary_with(tree: AnyTree, *others: PyTree[Array]) -> AnyTree:
    """Returns the same arrays, marked as varying over all mesh axes that ``others`` vary over.

    A loop inside ``jax.shard_map`` needs a carry that varies from the first step if it varies
    later. A constant that the carry begins with does not vary by itself.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> def total(values):
        ...     zero = vary_with(jnp.float32(0), values)
        ...     return jax.lax.fori_loop(0, 3, lambda i, sum_: sum_ + values[i], zero)
        >>> auto, spec = (jax.sharding.AxisType.Auto,), jax.P("devices")
        >>> mesh = jax.make_mesh((1,), ("devices",), axis_types=auto)
        >>> mapped = jax.shard_map(
        ...     lambda values: total(values)[None], mesh=mesh, in_specs=spec, out_specs=spec
        ... )
        >>> mapped(jnp.arange(6.0)).tolist()
        [3.0]
    """
    axes = frozenset[str]().union(*(varying_axes(leaf) for leaf in jax.tree.leaves(others)))

    def cast(leaf: Array) -> Array:
        missing = tuple(sorted(axes - varying_axes(leaf)))
        return vary(leaf, missing) if missing else leaf

    return jax.tree.map(cast, tree)

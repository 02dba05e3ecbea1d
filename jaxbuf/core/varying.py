"""Arrays that vary over the devices of a mesh, as ``jax.shard_map`` tells them from others."""

import functools
from typing import TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

AnyTree = TypeVar("AnyTree", bound=PyTree[Array])


def vary_with(tree: AnyTree, *others: PyTree[Array]) -> AnyTree:
    """The same arrays, which vary over all axes of the mesh that ``others`` vary over.

    A loop inside ``jax.shard_map`` must carry what varies from its first step on. A constant that
    the carry begins with does not by itself.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> def total(values):
        ...     zero = vary_with(jnp.float32(0), values)
        ...     return jax.lax.fori_loop(0, 3, lambda i, sum_: sum_ + values[i], zero)
        >>> mesh, spec = jax.sharding.AbstractMesh((2,), ("devices",)), jax.P("devices")
        >>> mapped = jax.shard_map(
        ...     lambda values: total(values)[None], mesh=mesh, in_specs=spec, out_specs=spec
        ... )
        >>> jax.eval_shape(mapped, jnp.arange(6.0)).shape
        (2,)
    """
    if not jax.sharding.get_abstract_mesh().manual_axes:
        return tree
    # None of no elements is true; whether one is varies as the elements do.
    none = [jnp.any(leaf.reshape(-1)[:0].astype(bool)) for leaf in jax.tree.leaves(others)]
    nothing = functools.reduce(jnp.logical_or, none)
    return jax.tree.map(lambda leaf: jnp.where(nothing, jnp.zeros_like(leaf), leaf), tree)

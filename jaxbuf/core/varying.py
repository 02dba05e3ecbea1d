"""Arrays that vary over the devices of a mesh, in the types that ``jax.shard_map`` tracks."""

from typing import TypeVar

import jax
from jax import lax
from jaxtyping import Array, PyTree

AnyTree = TypeVar("AnyTree", bound=PyTree[Array])


def vary_with(tree: AnyTree, *others: PyTree[Array]) -> AnyTree:
    """Returns the same arrays, marked as varying over all mesh axes that ``others`` vary over.

    A loop inside ``jax.shard_map`` needs a carry that varies from the first step if it varies
    later. A constant that the carry begins with does not vary by itself.

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
    axes = frozenset[str]().union(*(_axes(leaf) for leaf in jax.tree.leaves(others)))

    def cast(leaf: Array) -> Array:
        missing = tuple(sorted(axes - _axes(leaf)))
        return lax.pcast(leaf, missing, to="varying") if missing else leaf

    return jax.tree.map(cast, tree)


def _axes(leaf: object) -> frozenset[str]:
    return jax.typeof(leaf).manual_axis_type.varying

"""Arrays that vary over the devices of a mesh, in the types that ``jax.shard_map`` tracks."""

from typing import TypeVar

import jax
from jaxtyping import Array, PyTree

from jaxbuf.core.versions import vary, varying_axes

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

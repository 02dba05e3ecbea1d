"""The differences between the versions of JAX that are supported, in one place."""

import functools
import re
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.core
import jax.extend.core
import jax.ffi
from jax import lax
from jaxtyping import Array, PyTree

from jaxbuf.core.types import Arrays

AnyTree = TypeVar("AnyTree", bound=Arrays)

# Until jax 0.9 the function was in jax.core.
_TRACING = jax.extend.core if hasattr(jax.extend.core, "get_opaque_trace_state") else jax.core
# Until jax 0.9 an array's type had only the axes that it varies over, and not their kind.
_TYPED = hasattr(jax.typeof(jax.ShapeDtypeStruct((), "float32")), "manual_axis_type")
_RESHARD: Any = getattr(jax, "reshard", None) or jax.sharding.reshard


@functools.cache
def takes_option(name: str, value: str | int) -> bool:
    """Returns whether programs for the CPU can be compiled with an option of XLA."""
    try:
        with jax.default_device(jax.devices("cpu")[0]):
            jax.jit(lambda: 0, compiler_options={name: value}).lower().compile()
    except jax.errors.JaxRuntimeError:
        return False
    return True


def ffi_version() -> int:
    """Returns the version of the interface that XLA has for kernels, as ``major << 16 | minor``."""
    header = (Path(jax.ffi.include_dir()) / "xla/ffi/api/c_api.h").read_text()
    major, minor = (
        int(re.findall(rf"#define XLA_FFI_API_{part} (\d+)", header)[0])
        for part in ("MAJOR", "MINOR")
    )
    return major << 16 | minor


# Returns an opaque value for what this thread is tracing; only comparisons make sense.
trace_state = functools.partial(_TRACING.get_opaque_trace_state, convention="jaxbuf")


def varying_axes(tree: Arrays) -> frozenset[str]:
    """Returns the mesh axes that arrays vary over; none outside of ``jax.shard_map``."""
    if not jax.sharding.get_abstract_mesh().manual_axes:
        return frozenset()
    avals: list[Any] = [jax.typeof(leaf) for leaf in jax.tree.leaves(tree)]
    axes = [aval.manual_axis_type.varying if _TYPED else aval.vma for aval in avals]
    return frozenset[str]().union(*axes)


def vary_with(tree: AnyTree, *others: Arrays) -> AnyTree:
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
    axes = varying_axes(others)

    def mark(leaf: Array) -> Array:
        more = tuple(sorted(axes - varying_axes(leaf)))
        if not more:
            return leaf
        if hasattr(lax, "pcast"):
            return lax.pcast(leaf, more, to="varying")
        before: Any = lax
        return before.pvary(leaf, more)

    return jax.tree.map(mark, tree) if axes else tree


def shapes_like(tree: PyTree[Any], like: Array) -> PyTree[jax.ShapeDtypeStruct]:
    """Returns the shapes of results that vary over the same axes as ``like``."""
    if not varying_axes(like):
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)
    aval: Any = jax.typeof(like)
    kind = {"manual_axis_type": aval.manual_axis_type} if _TYPED else {"vma": aval.vma}

    def shape(leaf: Any) -> jax.ShapeDtypeStruct:
        sharding = jax.NamedSharding(aval.sharding.mesh, jax.P(*[None] * len(leaf.shape)))
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding, **kind)

    return jax.tree.map(shape, tree)


def reshard(tree: Arrays, sharding: jax.sharding.Sharding) -> Arrays:
    """Returns the arrays laid out as ``sharding`` says."""
    return _RESHARD(tree, sharding)

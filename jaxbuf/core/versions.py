"""The differences between the versions of JAX that are supported, in one place."""

import functools
import re
from pathlib import Path
from typing import Any

import jax
import jax.core
import jax.extend.core
import jax.ffi
from jax import lax
from jaxtyping import Array

from jaxbuf.core.types import Arrays

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


def in_shard_map() -> bool:
    """Returns whether what is traced runs inside of ``jax.shard_map``, where arrays may vary."""
    return bool(jax.sharding.get_abstract_mesh().manual_axes)


def varying_axes(leaf: object) -> frozenset[str]:
    """Returns the mesh axes that an array varies over inside of ``jax.shard_map``."""
    aval: Any = jax.typeof(leaf)
    return aval.manual_axis_type.varying if _TYPED else aval.vma


def vary(leaf: Array, axes: tuple[str, ...]) -> Array:
    """Returns an array marked as varying over more axes."""
    if hasattr(lax, "pcast"):
        return lax.pcast(leaf, axes, to="varying")
    before: Any = lax
    return before.pvary(leaf, axes)


def shape_like(leaf: jax.ShapeDtypeStruct | Array, like: Array) -> jax.ShapeDtypeStruct:
    """Returns the shape of a result that varies over the same axes as ``like``."""
    if not in_shard_map() or not varying_axes(like):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    aval: Any = jax.typeof(like)
    kind = {"manual_axis_type": aval.manual_axis_type} if _TYPED else {"vma": aval.vma}
    sharding = jax.NamedSharding(aval.sharding.mesh, jax.P(*[None] * len(leaf.shape)))
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding, **kind)


def reshard(tree: Arrays, sharding: jax.sharding.Sharding) -> Arrays:
    """Returns the arrays laid out as ``sharding`` says."""
    return _RESHARD(tree, sharding)

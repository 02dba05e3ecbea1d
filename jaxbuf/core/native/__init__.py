"""Kernels in C++ for the CPU, behind one door: ``either``.

XLA:CPU makes many small kernels of a tree or a gather, and launching them takes longer than their
work. ``kernels.cc`` does each in one call. It is compiled when the package is installed; where that
was not possible, and on every other backend, the definition in JAX runs, with the same results bit
for bit. ``JAXBUF_NATIVE=0`` turns the kernels off.
"""

import contextlib
import ctypes
import functools
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.ffi
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt

from jaxbuf.core.varying import vary_with


@functools.cache
def native_available() -> bool:
    """Whether the C++ kernels were built when jaxbuf was installed, and load here.

    They are then used on the CPU, unless the environment says ``JAXBUF_NATIVE=0``.

    Example:
        >>> import jaxbuf
        >>> jaxbuf.native_available() in (True, False)
        True
    """
    # An editable install has the library in another folder than the source.
    built = (Path(folder) / "libjaxbuf.so" for folder in __path__)
    path = next(filter(Path.exists, built), None)
    if path is None:
        return False
    library = ctypes.CDLL(str(path))
    for name in ("set_leaves", "find", "read", "place", "mark", "take"):
        symbol = getattr(library, f"jaxbuf_{name}")
        jax.ffi.register_ffi_target(f"jaxbuf_{name}", jax.ffi.pycapsule(symbol), platform="cpu")
    return True


# Part of what jit looks a program up by: what was compiled without the kernels is not used with.
_in_use: Any = jax.make_user_context(os.environ.get("JAXBUF_NATIVE", "1") != "0")


def using_native(enabled: bool) -> contextlib.AbstractContextManager[None]:
    """Whether the kernels are used by what is traced in this ``with`` block, if they are there."""
    return _in_use(enabled)


def either(natively: Callable[..., Any], plainly: Callable[..., Any], *arrays: Array) -> Any:
    """``natively(*arrays)`` on a CPU with the kernels, and ``plainly(*arrays)`` everywhere else."""
    arrays = vary_with(arrays, arrays)
    if not (_in_use.value and native_available()):
        return plainly(*arrays)
    return lax.platform_dependent(*arrays, cpu=natively, default=plainly)


def _call(name: str, out: Any, like: Array, batched: str, **options: Any) -> Callable[..., Any]:
    """A kernel as a function of arrays, whose results vary over a mesh as ``like`` does."""
    known = jax.typeof(like)

    def shape_of(leaf: Any) -> jax.ShapeDtypeStruct:
        if not known.manual_axis_type.varying:
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        sharding = jax.NamedSharding(known.sharding.mesh, jax.P(*[None] * len(leaf.shape)))
        return jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=sharding, manual_axis_type=known.manual_axis_type
        )

    shapes = jax.tree.map(shape_of, out)
    return jax.ffi.ffi_call(f"jaxbuf_{name}", shapes, vmap_method=batched, **options)


def set_leaves(
    nodes: Int[Array, " P"],
    index: Int[Array, " B"],
    bits: Int[Array, " B"],
    *,
    ops: Sequence[int],
    capacity: int,
) -> tuple[Int[Array, " P"], Int[Array, " K"]]:
    """Set leaves of a ``SegmentTree``; the operations as their places among ``OPS``.

    Returns:
        The nodes, in place where XLA allows it, and the roots.
    """
    out = (nodes, jax.ShapeDtypeStruct((len(ops) + 1,), jnp.int32))
    call = _call("set_leaves", out, nodes, "broadcast_all", input_output_aliases={0: 0})
    return call(nodes, index, bits, ops=np.asarray(ops, np.int64), capacity=np.int64(capacity))


def find(
    nodes: Int[Array, " P"],
    prefix: Float[Array, " B"],
    refine: Float[Array, " B"],
    *,
    refined: bool,
    row: int,
    ops: int,
    capacity: int,
) -> tuple[Int[Array, " B"], Float[Array, " B"]]:
    """Find prefixes in a ``SegmentTree`` of so many operations, the sum being the ``row``-th."""
    out = (jax.ShapeDtypeStruct(prefix.shape, jnp.int32), prefix)
    call = _call("find", out, nodes, "expand_dims")
    numbers = {"row": row, "ops": ops, "capacity": capacity}
    return call(nodes, prefix, refine, refined=refined, **jax.tree.map(np.int64, numbers))


def read(
    nodes: Int[Array, " P"], index: Int[Array, " B"], *, capacity: int
) -> tuple[Int[Array, " B"], Int[Array, " B"]]:
    """Read leaves of a ``SegmentTree``; returns the index and the bits that are there."""
    call = _call("read", (index, index), nodes, "expand_dims")
    return call(nodes, index, capacity=np.int64(capacity))


def place(
    nodes: UInt[Array, "P 2"],
    counters: UInt[Array, " 2"],
    rank: UInt[Array, " B"],
    arrival: UInt[Array, " B"],
    *,
    capacity: int,
) -> tuple[UInt[Array, "P 2"], Int[Array, " B"]]:
    """Put rows into the nodes of a ``Ranking``; those of rank 0 are not taken.

    Returns:
        The nodes, in place where XLA allows it, and the slot of each row.
    """
    out = (nodes, jax.ShapeDtypeStruct(rank.shape, jnp.int32))
    call = _call("place", out, nodes, "broadcast_all", input_output_aliases={0: 0})
    return call(nodes, counters, rank, arrival, capacity=np.int64(capacity))


def mark(
    nodes: UInt[Array, " P"],
    index: Int[Array, " B"],
    member: Bool[Array, " B"],
    *,
    starts: Sequence[int],
    capacity: int,
) -> UInt[Array, " P"]:
    """Say of numbers whether they are members of a ``Bitset``, whose levels have these starts.

    Returns:
        The nodes, in place where XLA allows it.
    """
    call = _call("mark", nodes, nodes, "broadcast_all", input_output_aliases={0: 0})
    options = {"starts": np.asarray(starts, np.int64), "capacity": np.int64(capacity)}
    return call(nodes, index, member, **options)


def take(
    leaves: Sequence[Array], start: Int[Array, " B"], length: int | None = None
) -> Sequence[Array]:
    """Slots, or runs of slots modulo the length of the ring they lie in.

    Args:
        leaves: ``[N, *shape]``, or for runs ``[E, L, *shape]``, which are rings of ``L`` slots; of
            NumPy's own dtypes.
        start: Which slots, ``[B]``, counted over all rings; clipped to those that there are.
        length: Slots of a run; None for single ones.

    Returns:
        Leaves ``[B, *shape]``, or ``[B, length, *shape]``.
    """
    axes, run = (1, ()) if length is None else (2, (length,))
    items = [leaf.shape[axes:] for leaf in leaves]
    out = [
        jax.ShapeDtypeStruct((*start.shape, *run, *item), leaf.dtype)
        for leaf, item in zip(leaves, items, strict=True)
    ]
    widths = [
        math.prod(item) * leaf.dtype.itemsize for leaf, item in zip(leaves, items, strict=True)
    ]
    return _call("take", out, start, "expand_dims")(
        start,
        *leaves,
        rings=np.int64(math.prod(leaves[0].shape[: axes - 1])),
        slots=np.int64(leaves[0].shape[axes - 1]),
        length=np.int64(1 if length is None else length),
        widths=np.asarray(widths, np.int64),
    )

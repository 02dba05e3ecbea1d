"""C++ kernels for the CPU, which are used through ``either``, or the decorator ``kernel``.

XLA:CPU compiles a tree or a gather to many small kernels that take longer to launch than to run.
``kernels.cc`` does each operation in one call. It is compiled when the package is installed. If
that was not possible, and on every other backend, the definition in JAX runs, with bitwise equal
results. ``JAXBUF_NATIVE=0`` turns the kernels off.
"""

import contextlib
import ctypes
import functools
import importlib.metadata
import math
import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import jax
import jax.ffi
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int, PyTree, UInt

from jaxbuf.core.types import Arrays, Floats, Function, Index, Mask, Word, Words
from jaxbuf.core.versions import ffi_version, shapes_like, vary_with

Defined = TypeVar("Defined", bound=Function)

KERNELS = (
    "set_leaves",
    "find",
    "read",
    "place",
    "mark",
    "keep_last",
    "ring_rows_to_change",
    "ring_slots_of",
    "rings_rows_to_change",
    "rings_slots_of",
    "ring_append",
    "rings_append",
    "rings_span",
    "items_at",
    "mass_base",
    "mass_within",
    "mass_share",
    "or_zero",
    "drawn",
    "points",
    "random_words",
    "scale_word",
    "take",
    "put",
)


# The numbers of rows for which calls from Python take less time with kernels of rows: fewer count
# few operations, and the writes of more count too many.
_FEW, _MANY = 4, 4096


@functools.cache
def native_available() -> bool:
    """Returns whether the C++ kernels were built when jaxbuf was installed, and fit this jaxlib.

    If so they are used on the CPU, unless the environment has ``JAXBUF_NATIVE=0``. Kernels that
    were built for a newer jaxlib than the one at hand are left out, with a warning: JAX would not
    start with them.

    Example:
        >>> import jaxbuf
        >>> jaxbuf.native_available() in (True, False)
        True
    """
    path = _built()
    if path is None:
        return False
    library, reason = _load(path)
    if library is None:
        warnings.warn(
            f"jaxbuf runs without its kernels for the CPU, and more slowly: {path} {reason}. To "
            "build them for this environment: pip install --force-reinstall --no-deps "
            "--no-cache-dir jaxbuf, or from a clone: pip install --force-reinstall --no-deps .",
            RuntimeWarning,
            stacklevel=2,
        )
    return library is not None


def register() -> None:
    """Registers the kernels with JAX, so that a program compiled elsewhere finds them."""
    path = _built()
    library = None if path is None else _load(path)[0]
    if library is None:
        return
    for name in KERNELS:
        target = jax.ffi.pycapsule(library[f"jaxbuf_{name}"])
        jax.ffi.register_ffi_target(f"jaxbuf_{name}", target, platform="cpu")


def _built() -> Path | None:
    # In an editable install the library and the source are in different folders.
    built = (Path(folder) / "libjaxbuf.so" for folder in __path__)
    return next(filter(Path.exists, built), None)


def _load(path: Path) -> tuple[ctypes.CDLL | None, str]:
    """Returns the library of the kernels, or None and the reason why it does not fit."""
    try:
        library = ctypes.CDLL(str(path))
        built, installed = library.jaxbuf_ffi_version(), ffi_version()
        # A library of an older version of the package may lack some.
        for name in KERNELS:
            _ = library[f"jaxbuf_{name}"]
    except (OSError, AttributeError) as error:
        reason = f"cannot be loaded ({error})"
    else:
        # XLA takes handlers of its own version of the interface and of older ones.
        if built >> 16 == installed >> 16 and built <= installed:
            return library, ""
        reason = (
            f"were built for version {built >> 16}.{built & 0xFFFF} of XLA's interface, but jaxlib "
            f"{importlib.metadata.version('jaxlib')} has {installed >> 16}.{installed & 0xFFFF}"
        )
    return None, reason


# Part of the key of jit's cache: a program compiled without the kernels is not reused with them.
_in_use: Any = jax.make_user_context(os.environ.get("JAXBUF_NATIVE", "1") != "0")


def using_native(enabled: bool) -> contextlib.AbstractContextManager[None]:
    """Sets whether programs traced in this ``with`` block use the kernels, if available."""
    return _in_use(enabled)


def either(
    natively: Function, plainly: Function, *arrays: Arrays, elsewhere: Function | None = None
) -> Arrays:
    """Returns ``natively(*arrays)`` on a CPU with the kernels, and else ``plainly(*arrays)``.

    Other backends compute ``elsewhere(*arrays)`` instead, if another form is faster there.
    """
    arrays = vary_with(arrays, arrays)
    on_cpu = natively if _in_use.value and native_available() else plainly
    elsewhere = elsewhere or plainly
    # What is called from Python there runs on a CPU.
    if on_cpu is elsewhere or _called.value:
        return on_cpu(*arrays)
    return lax.platform_dependent(*arrays, cpu=on_cpu, default=elsewhere)


# Whether what is traced is a program of its own, which is called from Python.
_called: Any = jax.make_user_context(False)


def called_from_python(enabled: bool) -> contextlib.AbstractContextManager[None]:
    """Sets whether programs traced in this ``with`` block run for one call each, on a CPU.

    XLA:CPU runs a program in the thread that calls it if it counts fewer than 1,000 operations, and
    a kernel counts as none. Else it wakes another thread, which takes longer than small calls do.
    In the program of a training loop that does not matter, and a kernel takes longer to launch than
    a few operations on rows, which XLA puts into one.
    """
    return _called(enabled)


def kernel(name: str, *fields: str, in_place: int = 0) -> Callable[[Defined], Defined]:
    """Returns a decorator for what a kernel does in a program that is called from Python.

    The function decorated is the definition. It takes pytrees of arrays, and integers by name. Its
    first result has the shape ``[B]``; for another one, few rows, or many, it runs itself. Its
    derivatives are its own.

    Args:
        name: The name of the kernel.
        *fields: Names of integers of the first argument, which the kernel takes as ``sizes``. The
            integers that the function takes come after them, in the order of the call.
        in_place: How many of the first arrays are the last results, updated in place.
    """

    def decorate(function: Defined) -> Defined:
        @functools.wraps(function)
        def call(*args: Arrays, **numbers: int) -> Any:
            plainly = functools.partial(function, **numbers)
            if not _called.value:
                return plainly(*args)
            out, treedef = jax.tree.flatten(jax.eval_shape(plainly, *args))
            if out[0].ndim != 1 or not takes_rows(out[0].size):
                return plainly(*args)
            integers = [*(getattr(args[0], field) for field in fields), *numbers.values()]
            sizes: dict[str, Any] = {"sizes": integers} if integers else {}
            aliases = {array: len(out) - in_place + array for array in range(in_place)}

            def natively(*args: Arrays) -> Any:
                results = _call(name, out, *jax.tree.leaves(args), aliases=aliases, **sizes)
                return jax.tree.unflatten(treedef, results)

            return _instead(natively, plainly, *args)

        return cast("Any", call)

    return decorate


def takes_rows(count: int) -> bool:
    """Returns whether what is traced computes so many rows with kernels of rows."""
    return _called.value and _FEW <= count <= _MANY and _in_use.value and native_available()


def _instead(natively: Function, plainly: Function, *args: Arrays) -> Any:
    """Returns ``natively(*args)``, with the derivatives of ``plainly``."""
    chosen = jax.custom_jvp(natively)
    chosen.defjvp(functools.partial(jax.jvp, plainly))
    return chosen(*vary_with(args, args))


def _call(
    name: str,
    out: PyTree[Any],
    *arrays: Array,
    aliases: dict[int, int] | None = None,
    **numbers: Any,
) -> Arrays:
    """Calls a kernel; its results vary over a mesh as the first of its arrays does.

    Where XLA allows it, arrays become the results that ``aliases`` names, updated in place.
    """
    call = jax.ffi.ffi_call(
        f"jaxbuf_{name}",
        shapes_like(out, arrays[0]),
        vmap_method="broadcast_all" if aliases else "expand_dims",
        input_output_aliases=aliases,
    )
    return call(*arrays, **{key: np.int64(number) for key, number in numbers.items()})


def set_leaves(
    nodes: Int[Array, " P"], index: Index, value: Floats, *, ops: Sequence[int], capacity: int
) -> tuple[Int[Array, " P"], Int[Array, " K"]]:
    """Returns the nodes and roots of a ``SegmentTree``; ``ops`` are positions in ``OPS``."""
    out = (nodes, jax.ShapeDtypeStruct((len(ops) + 1,), jnp.int32))
    arrays = nodes, index, value
    return _call("set_leaves", out, *arrays, aliases={0: 0}, ops=ops, capacity=capacity)


def find(
    nodes: Int[Array, " P"],
    prefix: Floats,
    refine: Floats | None,
    *,
    row: int,
    ops: int,
    capacity: int,
) -> tuple[Index, Floats]:
    """Finds prefixes in a ``SegmentTree`` with ``ops`` operations, of which ``row`` is the sum."""
    out = (jax.ShapeDtypeStruct(prefix.shape, jnp.int32), prefix)
    arrays, refined = (nodes, prefix, prefix if refine is None else refine), refine is not None
    return _call("find", out, *arrays, refined=refined, row=row, ops=ops, capacity=capacity)


def read(index: Index, nodes: Int[Array, " P"], *, capacity: int) -> tuple[Index, Index]:
    """Reads leaves of a ``SegmentTree``; returns the index and the bits of the leaves."""
    return _call("read", (index, index), nodes, index, capacity=capacity)


def place(
    nodes: UInt[Array, "P 2"],
    arrivals: Word,
    held: Word,
    rank: Words,
    arrival: Words,
    *,
    capacity: int,
) -> tuple[UInt[Array, "P 2"], Index]:
    """Returns the nodes of a ``Ranking`` and the slot of each row; those of rank 0 are refused."""
    out = (nodes, jax.ShapeDtypeStruct(rank.shape, jnp.int32))
    arrays = nodes, arrivals, held, rank, arrival
    return _call("place", out, *arrays, aliases={0: 0}, capacity=capacity)


def mark(
    nodes: UInt[Array, " P"], index: Index, member: Mask, *, starts: Sequence[int], capacity: int
) -> UInt[Array, " P"]:
    """Returns the nodes of a ``Bitset``, whose levels begin at ``starts``, with other members."""
    arrays = nodes, index, member
    return _call("mark", nodes, *arrays, aliases={0: 0}, starts=starts, capacity=capacity)


def keep_last(index: Index, *, past_end: int) -> Index:
    """Returns the index with ``past_end`` in place of numbers that a later row repeats."""
    return _call("keep_last", index, index, past_end=past_end)


def random_words(key: UInt[Array, " 2"], *, count: int) -> UInt[Array, " {count}"]:
    """Returns Threefry-2x32 of the first ``count`` integers, both halves combined."""
    return _call("random_words", jax.ShapeDtypeStruct((count,), jnp.uint32), key)


def take(
    leaves: Sequence[Array], start: Index, run: tuple[int, int] | None = None
) -> Sequence[Array]:
    """Reads slots, or runs of slots modulo the length of the ring that they are in.

    Args:
        leaves: Arrays ``[N, *shape]``; their dtypes must be NumPy's own.
        start: Slots, ``[B]``; clipped to the range.
        run: Number of slots in a run, and in each of the rings that follow one another; None for
            single slots.

    Returns:
        Leaves ``[B, *shape]``, or ``[B, length, *shape]`` for runs of ``length`` slots.
    """
    count = leaves[0].shape[0]
    length, slots = run or (1, count)
    items = [jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype) for leaf in leaves]
    rows = start.shape if run is None else (*start.shape, length)
    out = [jax.ShapeDtypeStruct((*rows, *item.shape), item.dtype) for item in items]
    return _call(
        "take",
        out,
        start,
        *leaves,
        rings=count // slots,
        slots=slots,
        length=length,
        widths=[item.size * item.dtype.itemsize for item in items],
    )


def put(plainly: Function, index: Index, storage: Arrays, rows: Arrays) -> Arrays:
    """Returns ``plainly(index, storage, rows)``: the storage with row ``b`` at ``index[b]``.

    An index past the end drops the row. No two others are the same. For what ``takes_rows`` only.
    """

    def natively(index: Index, storage: Arrays, rows: Arrays) -> Arrays:
        leaves, treedef = jax.tree.flatten(storage)
        written = _call(
            "put",
            leaves,
            index,
            *leaves,
            *jax.tree.leaves(rows),
            aliases={1 + k: k for k in range(len(leaves))},
            slots=leaves[0].shape[0],
            widths=[math.prod(leaf.shape[1:]) * leaf.dtype.itemsize for leaf in leaves],
        )
        return jax.tree.unflatten(treedef, written)

    return _instead(natively, plainly, index, storage, rows)

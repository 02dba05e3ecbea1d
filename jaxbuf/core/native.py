"""Kernels in C++ for the CPU, for those who ask for them.

XLA:CPU makes many small kernels of a tree or a gather, and launching them takes longer than their
work. ``native.cc`` does each in one call. It is compiled when it is first asked for, with the C++
compiler of the machine, and kept; nothing here is needed, and results are the same bit for bit.
Other backends go on as they do without.
"""

import contextlib
import ctypes
import functools
import hashlib
import importlib.metadata
import math
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.ffi
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxbuf.core import checks

_SOURCE = Path(__file__).with_suffix(".cc")
_TARGETS = ("set_leaves", "find", "get_leaves", "take")
_FLAGS = ("-O3", "-std=c++17", "-shared", "-fPIC", "-ffp-contract=off", "-DNDEBUG")

# Part of what jit looks a program up by: one that was compiled without is not used with.
_in_use: Any = jax.make_user_context(False)


def enable_native(enabled: bool = True) -> None:
    """Use kernels in C++ on the CPU from now on, in every thread.

    The first time on a machine this takes some seconds and a C++ compiler: ``$CXX``, else ``c++``,
    ``g++`` or ``clang++``. What it makes is kept in ``$XDG_CACHE_HOME/jaxbuf`` (``~/.cache``).
    Programs that are compiled later use it, and those compiled before are compiled anew when they
    are called next.

    Args:
        enabled: False goes back to XLA's own kernels.

    Raises:
        RuntimeError: If there is no compiler, or it fails; the message says with what.

    Example:
        >>> import jaxbuf
        >>> jaxbuf.enable_native()  # doctest: +SKIP
    """
    if checks.check_flag("enabled", enabled):
        _register()
    _in_use.set_global(enabled)


def using_native(enabled: bool = True) -> contextlib.AbstractContextManager[None]:
    """The same as ``enable_native`` in a ``with`` block, in this thread."""
    if enabled:
        _register()
    return _in_use(enabled)


def in_use() -> bool:
    """Whether what is traced now is to use the kernels, if it is for a CPU."""
    return bool(_in_use.value)


def set_leaves(
    nodes: Float[Array, "S P"],
    index: Int[Array, "S B"],
    value: Float[Array, "S B"],
    *,
    ops: Sequence[int],
    starts: Sequence[int],
    counts: Sequence[int],
) -> tuple[Float[Array, "S P"], Float[Array, "S K"], Int[Array, " S"]]:
    """See ``tree_kernels.set_leaves``; the operations as their places among ``tree_kernels.OPS``.

    Args:
        nodes: The trees.
        index: Which leaves to set.
        value: To what.
        ops: The operations, ``K`` of them.
        starts: Where each level begins, leaves first, for one operation after the other.
        counts: Nodes on each level, leaves first.
    """
    trees = index.shape[0]
    # XLA copies what is to be updated in place if it has another shape in the buffer, where a
    # single tree has one axis.
    held = nodes.reshape(-1) if trees == 1 else nodes
    out = (
        jax.ShapeDtypeStruct(held.shape, nodes.dtype),
        jax.ShapeDtypeStruct((trees, len(ops)), nodes.dtype),
        jax.ShapeDtypeStruct((trees,), jnp.int32),
    )
    call = jax.ffi.ffi_call("jaxbuf_set_leaves", out, input_output_aliases={0: 0})
    held, roots, gained = call(
        held,
        index,
        value,
        ops=_numbers(ops),
        starts=_numbers(starts),
        counts=_numbers(counts),
    )
    return held.reshape(nodes.shape), roots, gained


def find(
    nodes: Float[Array, "S P"],
    prefix: Float[Array, "S B"],
    refine: Float[Array, "S B"],
    *,
    middle: int,
    starts: Sequence[int],
    counts: Sequence[int],
) -> Int[Array, "S B"]:
    """See ``tree_kernels.find``.

    Args:
        nodes: The trees.
        prefix: The queries.
        refine: What to add to each residual.
        middle: Before which level, from the top; 0 for nowhere.
        starts: Where the sums of each level begin, from below the root to the leaves.
        counts: Nodes on each of these levels.
    """
    call = jax.ffi.ffi_call("jaxbuf_find", jax.ShapeDtypeStruct(prefix.shape, jnp.int32))
    levels = {"starts": _numbers(starts), "counts": _numbers(counts)}
    return call(nodes.reshape(-1), prefix, refine, middle=np.int64(middle), **levels)


def get_leaves(
    nodes: Float[Array, "S P"], index: Int[Array, "S B"], *, capacity: int
) -> Float[Array, "S B"]:
    """See ``tree_kernels.read``."""
    call = jax.ffi.ffi_call("jaxbuf_get_leaves", jax.ShapeDtypeStruct(index.shape, nodes.dtype))
    return call(nodes.reshape(-1), index, capacity=np.int64(capacity))


def take(
    leaves: Sequence[Array], start: Int[Array, " B"], *, axes: int = 1, length: int | None = None
) -> Sequence[Array]:
    """Slots, or runs of slots modulo the length of the ring they lie in.

    Args:
        leaves: ``[N, *shape]``, or ``[E, L, *shape]``: rings of ``L`` slots. Of NumPy's own dtypes.
        start: Which slots, ``[B]``, counted over all rings; clipped to those that there are.
        axes: How many axes count slots.
        length: Slots of a run; None for single ones.

    Returns:
        Leaves ``[B, *shape]``, or ``[B, length, *shape]``.
    """
    rows = (start.shape[0],) if length is None else (start.shape[0], length)
    out = [jax.ShapeDtypeStruct((*rows, *leaf.shape[axes:]), leaf.dtype) for leaf in leaves]
    widths = [math.prod(leaf.shape[axes:]) * leaf.dtype.itemsize for leaf in leaves]
    call = jax.ffi.ffi_call("jaxbuf_take", out)
    slots = leaves[0].shape[axes - 1]
    return call(
        start,
        *leaves,
        slots=np.int64(slots),
        length=np.int64(1 if length is None else length),
        widths=_numbers(widths),
    )


def _numbers(numbers: Sequence[int]) -> Any:
    return np.asarray(numbers, np.int64)


@functools.cache
def _register() -> None:
    """Load the kernels, compiled now if need be, and tell XLA of them."""
    library = ctypes.CDLL(str(_build()))
    for name in _TARGETS:
        symbol = getattr(library, f"jaxbuf_{name}")
        jax.ffi.register_ffi_target(f"jaxbuf_{name}", jax.ffi.pycapsule(symbol), platform="cpu")


def _build() -> Path:
    """The compiled kernels: a file whose name tells what it was made of."""
    compiler = _compiler()
    machine = [platform.system(), platform.machine(), importlib.metadata.version("jaxlib")]
    made_of = [_SOURCE.read_text(), *machine, compiler, *_FLAGS]
    digest = hashlib.sha256("\n".join(made_of).encode()).hexdigest()[:16]
    library = _cache() / f"native-{digest}.so"
    if library.exists():
        return library
    library.parent.mkdir(parents=True, exist_ok=True)
    # Several processes may do this at once: each makes a file of its own, and the last one stays.
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        made = Path(folder) / library.name
        command = [compiler, *_FLAGS, "-isystem", jax.ffi.include_dir(), str(_SOURCE)]
        done = subprocess.run([*command, "-o", str(made)], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(
                f"{compiler} could not compile jaxbuf's kernels; go on without them, or name "
                f"another compiler in CXX. It said:\n{done.stderr[-2000:]}"
            )
        made.replace(library)
    return library


def _compiler() -> str:
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        if name and (path := shutil.which(name)):
            return path
    raise RuntimeError(
        "there is no C++ compiler for jaxbuf's kernels; go on without them, or install one (on "
        "Debian and Ubuntu: apt install g++) or name it in CXX"
    )


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxbuf"

"""Calls from Python: each function is jitted once, as a program of its own."""

import functools
from typing import Any

import jax
import jax.core
from jaxtyping import PyTree

from jaxbuf.core import trees
from jaxbuf.core.donation import check_there
from jaxbuf.core.types import Function
from jaxbuf.core.versions import takes_option, trace_state


class OwnPrograms:
    """A buffer whose methods are compiled programs, which cannot be called inside another one."""


def call(
    function: Function, *args: PyTree, static: tuple[int, ...] = (), donate: bool = False
) -> Any:
    """Returns ``function(*args)``: jitted, or as it is inside a transformation of the caller.

    A method of a buffer checks its arguments in Python and leaves the rest to this, so that a call
    from Python is one program and not one for each operation on an array.

    Args:
        function: The function. Pass the same object each time: each object is compiled once.
        args: Its arguments. The first one is the buffer, which errors name.
        static: The positions of the static arguments.
        donate: Whether the buffer may be overwritten.

    Raises:
        ValueError: If the buffer was donated before.
    """
    if isinstance(args[0], OwnPrograms):
        return function(*args)
    args = trees.owned(args)
    if is_outside():
        return _run(function, static, donate, args)
    # Inside a transformation of the caller, the caller's program is the one that is compiled.
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(args)):
        return function(*args)
    # Constants that a traced function closes over are not tracers and are computed at once.
    with jax.ensure_compile_time_eval():
        return _run(function, static, donate, args)


def compiler_options(*arrays: PyTree) -> dict[str, str] | None:
    """Returns options of ``jax.jit`` with which programs that work on buffers run fast.

    These programs are many tiny kernels in a row: handing each to a thread pool, as XLA:CPU does by
    default, costs more than the kernels do. ``jaxbuf.add``, ``jaxbuf.sample`` and
    ``jaxbuf.update_priority`` are compiled like this; for your own steps pass it to the outermost
    ``jax.jit``, the only one that takes options.

    Args:
        arrays: Arguments of the program, such as a buffer. They determine its device: the one
            that they are committed to, or else the one that they are on. Without arguments it is
            that of the default backend.

    Returns:
        The value to pass as ``compiler_options``; None if the program does not run on a CPU, or
            this version of XLA has no such option.

    Example:
        >>> import jax, jax.numpy as jnp, jaxbuf
        >>> take = jax.jit(
        ...     jaxbuf.Queue.take,
        ...     static_argnums=1,
        ...     donate_argnums=0,
        ...     compiler_options=jaxbuf.compiler_options(),
        ... )
        >>> queue = jaxbuf.Queue.create(jnp.int32(0), 8).add(jnp.arange(5))
        >>> queue, batch = take(queue, 3)
        >>> batch.data.tolist(), int(queue.size)
        ([0, 1, 2], 2)
    """
    return _options(platform_of(arrays))


def platform_of(arrays: PyTree) -> str:
    """Returns the platform of the device that runs a program called with these arrays."""
    leaves = [leaf for leaf in jax.tree.leaves(arrays) if isinstance(leaf, jax.Array)]
    found = next((leaf for leaf in leaves if leaf.committed), leaves[0] if leaves else None)
    return jax.default_backend() if found is None else next(iter(found.devices())).platform


def is_outside() -> bool:
    """Returns True if nothing is being traced; cheaper than a look at each array of a buffer."""
    return trace_state() == _OUTSIDE


def _options(platform: str) -> dict[str, str] | None:
    fast = ("xla_cpu_scheduler_type", "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED")
    return dict([fast]) if platform == "cpu" and takes_option(*fast) else None


def _run(
    function: Function, static: tuple[int, ...], donate: bool, args: tuple[PyTree, ...]
) -> Any:
    # XLA's error for a donated argument names neither the argument nor a remedy, and devices that
    # work together may wait for each other forever.
    check_there(args[0], "buffer")
    try:
        return _compiled(function, static, donate, platform_of(args))(*args)
    except (TypeError, OverflowError):
        # jax.jit names an argument that is not an array by its path here; the function knows its
        # name.
        jax.eval_shape(lambda: function(*args))
        raise


@functools.cache
def _compiled(function: Function, static: tuple[int, ...], donate: bool, platform: str) -> Function:
    """Returns the one jitted form of a function for a platform."""
    return jax.jit(
        function,
        static_argnums=static,
        donate_argnums=0 if donate else None,
        compiler_options=_options(platform),
    )


with jax.ensure_compile_time_eval():
    _OUTSIDE = trace_state()

"""The buffers' methods as functions, jitted once for everybody.

A loop that jits ``buffer.add`` anew each time would trace it each time. These do not, and they
donate: the buffer's memory is updated in place, and the buffer passed in cannot be used again.
"""

import functools
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import jax
import jax.core
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree

from jaxbuf.buffers.common import check_batch_size
from jaxbuf.buffers.sample import Sample
from jaxbuf.core import rowwise
from jaxbuf.core.donation import check_there
from jaxbuf.core.slots import Slots


class _Buffer(Protocol):
    """What these functions call: any of the buffers, or one of your own."""

    @property
    def add(self) -> Callable[..., Any]: ...


class _SampledBuffer(_Buffer, Protocol):
    """A buffer to sample from."""

    def sample(self, key: PRNGKeyArray, batch_size: int) -> Sample: ...

    @property
    def update_priority(self) -> Callable[..., Any]: ...


AnyBuffer = TypeVar("AnyBuffer", bound=_Buffer)
AnySampledBuffer = TypeVar("AnySampledBuffer", bound=_SampledBuffer)


def add(
    buffer: AnyBuffer,
    items: PyTree[Array],
    *,
    priority: Float[Array, "..."] | None = None,
    score: Float[Array, " B"] | None = None,
    version: Int[Array, "..."] | None = None,
    mask: Bool[Array, "..."] | None = None,
    donate: bool = True,
) -> AnyBuffer:
    """``buffer.add``, jitted.

    Args:
        buffer: Any buffer. It is consumed: go on with the result.
        items: What to add.
        priority: See the buffer's own ``add``.
        score: See the buffer's own ``add``.
        version: See the buffer's own ``add``.
        mask: See the buffer's own ``add``.
        donate: False keeps ``buffer`` usable, at the price of a copy of all it holds.
    """
    given = {"priority": priority, "score": score, "version": version, "mask": mask}
    options = {name: value for name, value in given.items() if value is not None}
    return _call(_add_method, donate, buffer, items, options)


def sample(buffer: _SampledBuffer, key: PRNGKeyArray, batch_size: int) -> Sample:
    """``buffer.sample``, jitted; ``batch_size`` is static."""
    return _call(_sample_method, False, buffer, key, check_batch_size(batch_size))


def update_priority(
    buffer: AnySampledBuffer,
    slots: Slots,
    priority: Float[Array, " B"],
    *,
    mask: Bool[Array, " B"] | None = None,
    donate: bool = True,
) -> AnySampledBuffer:
    """``buffer.update_priority``, jitted.

    Args:
        buffer: Any buffer with priorities. It is consumed: go on with the result.
        slots: ``sample.slots``, ``[B]``.
        priority: The new priorities, ``[B]``.
        mask: Which rows to take, ``[B]``.
        donate: False keeps ``buffer`` usable, at the price of a copy of all it holds.
    """
    return _call(_update_method, donate, buffer, slots, priority, mask)


def _add_method(buffer: Any, items: Any, options: dict[str, Any]) -> Any:
    return buffer.add(items, **options)


def _sample_method(buffer: Any, key: Any, batch_size: int) -> Any:
    return buffer.sample(key, batch_size)


def _update_method(buffer: Any, slots: Any, priority: Any, mask: Any) -> Any:
    return buffer.update_priority(slots, priority, mask=mask)


def _call(method: Callable[..., Any], donate: bool, *args: Any) -> Any:
    # Inside somebody else's transformation theirs is the program that is compiled.
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(args)):
        return method(*args)
    # Constants that a traced function closes over are no tracers; they are worked on at once.
    try:
        with jax.ensure_compile_time_eval():
            return _compiled(method, donate)(*args)
    except (ValueError, RuntimeError):
        # What XLA says of a donated argument names neither it nor the way out.
        check_there(args[0], "buffer")
        raise


@functools.cache
def _compiled(method: Callable[..., Any], donate: bool) -> Callable[..., Any]:
    """The one jitted form of a method, made when the backend is known."""

    def program(*args: Any) -> Any:
        with rowwise.alone():
            return method(*args)

    return jax.jit(
        functools.wraps(method)(program),
        static_argnums=2 if method is _sample_method else None,
        donate_argnums=0 if donate else None,
        compiler_options=compiler_options(),
    )


def compiler_options() -> dict[str, str] | None:
    """How to compile what buffers do, on the backend that there is.

    These programs are many tiny kernels in a row: handing each to a thread pool, as XLA:CPU does by
    default, costs more than the kernels do.
    """
    if jax.default_backend() != "cpu":
        return None
    return {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}

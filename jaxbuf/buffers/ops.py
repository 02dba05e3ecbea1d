"""The buffers' methods as functions, jitted once for everybody.

A loop that jits ``buffer.add`` anew each time would trace it each time. These do not, and they
donate: the buffer's memory is updated in place, and the buffer passed in cannot be used again.
"""

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree

from jaxbuf.buffers.common import check_batch_size
from jaxbuf.buffers.sample import Sample
from jaxbuf.core.calls import call
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
    return call(_add_method, buffer, items, options, donate=donate)


def sample(buffer: _SampledBuffer, key: PRNGKeyArray, batch_size: int) -> Sample:
    """``buffer.sample``, jitted; ``batch_size`` is static."""
    return call(_sample_method, buffer, key, check_batch_size(batch_size), static=(2,))


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
    return call(_update_method, buffer, slots, priority, mask, donate=donate)


def _add_method(buffer: Any, items: Any, options: dict[str, Any]) -> Any:
    return buffer.add(items, **options)


def _sample_method(buffer: Any, key: Any, batch_size: int) -> Any:
    return buffer.sample(key, batch_size)


def _update_method(buffer: Any, slots: Any, priority: Any, mask: Any) -> Any:
    return buffer.update_priority(slots, priority, mask=mask)

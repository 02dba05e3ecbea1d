"""The methods of the buffers as jitted functions.

A loop that calls ``jax.jit(buffer.add)`` in each step would trace it in each step. These functions
are traced once. They also donate the buffer: its memory is updated in place, and the buffer passed
in cannot be used again.
"""

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from jaxbuf.buffers.accumulator import ChunkAccumulator, EpisodeAccumulator
from jaxbuf.buffers.body import Body
from jaxbuf.buffers.common import check_batch_size, check_key
from jaxbuf.buffers.mixture import Mixture
from jaxbuf.buffers.options import check_options, split_options
from jaxbuf.buffers.queue import Queue
from jaxbuf.buffers.sample import Sample
from jaxbuf.buffers.trajectory import TrajectoryBuffer
from jaxbuf.core import checks, numbers, shapes
from jaxbuf.core.calls import OwnPrograms, call
from jaxbuf.core.slots import Slots
from jaxbuf.core.types import Function, Static


class _Buffer(Protocol):
    """A buffer with ``add``: one of this library, or your own."""

    @property
    def add(self) -> Function: ...


class _SampledBuffer(_Buffer, Protocol):
    """A buffer with ``sample`` and ``update_priority``."""

    @property
    def sample(self) -> Callable[..., Sample]: ...

    @property
    def update_priority(self) -> Function: ...


class _IteratedBuffer(Protocol):
    """A buffer with ``next_batch``."""

    @property
    def next_batch(self) -> Function: ...


_KEPT = {
    "priority": np.dtype("float32"),
    "score": np.dtype("float32"),
    "version": np.dtype("int32"),
    "session": np.dtype("int32"),
}
# The classes whose ``data`` holds the items as they are added.
_STORES = Body | Queue | EpisodeAccumulator | ChunkAccumulator
AnyBuffer = TypeVar("AnyBuffer", bound=_Buffer)
AnyIteratedBuffer = TypeVar("AnyIteratedBuffer", bound=_IteratedBuffer)
AnySampledBuffer = TypeVar("AnySampledBuffer", bound=_SampledBuffer)


def add(
    buffer: AnyBuffer, items: PyTree[Array], *, donate: bool = True, **options: object
) -> AnyBuffer:
    """Adds items to a buffer: ``buffer.add(items, **options)``, jitted.

    It compiles once for all buffers with the same configuration, and again for other shapes; at the
    tenth it warns, once. The buffer is donated: its memory is updated in place, and the buffer
    passed in cannot be used any more.

    Inside your own ``jax.jit``, ``jax.lax.scan`` or ``jax.vmap`` this calls the plain method, and
    ``donate`` has no effect: donate the buffer to your own program instead, with
    ``jax.jit(step, donate_argnums=0)``. A scan updates its carry in place by itself.

    Args:
        buffer: Any buffer. It is consumed: use the result instead.
        items: The items, leaves ``[B, ...]``; for a ``TrajectoryBuffer`` steps, leaves
            ``[num_envs, ...]`` or ``[num_envs, T, ...]``.
        donate: False keeps ``buffer`` usable, at the cost of a copy of its whole contents.
        **options: Options of the buffer's own ``add``: ``priority``, ``score``, ``version``,
            ``session`` or ``mask`` for an ``ItemBuffer``, ``part`` for a ``Mixture``. Python
            integers, booleans and strings are static, arrays are traced. Options that are None are
            ignored.

    Returns:
        The buffer with the items.

    Raises:
        ValueError: If ``buffer`` is not a buffer or was donated before, if it does not take one of
            the options, or as raised by its own ``add``.

    Example:
        >>> import jax.numpy as jnp, jaxbuf
        >>> buffer = jaxbuf.ItemBuffer.create(jnp.float32(0), 100, sampler=jaxbuf.Prioritized())
        >>> buffer = jaxbuf.add(buffer, jnp.arange(3.0), priority=jnp.array([1.0, 2.0, 4.0]))
        >>> larger = jaxbuf.add(buffer, jnp.arange(5.0), donate=False)
        >>> int(buffer.size), int(larger.size)
        (3, 8)
    """
    given = {name: value for name, value in options.items() if value is not None}
    check_options(buffer, "add", given)
    if isinstance(buffer, OwnPrograms):
        return buffer.add(items, donate=donate, **given)
    donate = checks.check_flag("donate", donate)
    if "env_ids" in given:
        given["env_ids"] = _known_envs(buffer, given)
    traced, static = split_options(given)
    traced = _converted(traced)
    stored = buffer.data if isinstance(buffer, _STORES) else ()
    items = numbers.narrow(items, "items", stored)
    return call(_add_method, buffer, items, traced, static, static=(3,), donate=donate)


def sample(buffer: _SampledBuffer, key: PRNGKeyArray, batch_size: int, **options: object) -> Sample:
    """Draws a batch from a buffer: ``buffer.sample(key, batch_size, **options)``, jitted.

    It compiles once for each batch size and for all buffers with the same configuration. The buffer
    is not donated and does not change. Inside your own ``jax.jit`` this calls the plain method. Add
    before you sample there: a program that samples first has to keep the old storage, and copies
    it. With the sampler ``Shuffled``, only ``jaxbuf.next_batch`` continues the pass.

    Args:
        buffer: Any buffer except a ``Queue``, which has ``take`` instead.
        key: A PRNG key.
        batch_size: The number of rows ``B``; static.
        **options: Options of the buffer's own ``sample``, such as the ``sequence_length`` of a
            ``TrajectoryBuffer``. Python integers, booleans and strings are static, arrays are
            traced. Options that are None are ignored.

    Returns:
        A ``Sample`` of ``B`` rows: ``data``, ``slots``, ``probability`` and ``valid``.

    Raises:
        ValueError: If ``buffer`` is not a buffer, cannot be sampled from or was donated before, if
            it does not take one of the options, or as raised by its own ``sample``.

    Example:
        >>> import jax, jax.numpy as jnp, jaxbuf
        >>> buffer = jaxbuf.ItemBuffer.create({"obs": jnp.zeros(3)}, 100)
        >>> buffer = jaxbuf.add(buffer, {"obs": jnp.ones((10, 3))})
        >>> batch = jaxbuf.sample(buffer, jax.random.key(0), 4)
        >>> batch.data["obs"].shape, batch.valid.tolist()
        ((4, 3), [True, True, True, True])
    """
    given = {name: value for name, value in options.items() if value is not None}
    check_options(buffer, "sample", given)
    if isinstance(buffer, OwnPrograms):
        return buffer.sample(key, batch_size, **given)
    key = check_key(key)
    rows = check_batch_size(batch_size)
    traced, static = split_options(given)
    return call(_sample_method, buffer, key, rows, traced, static, static=(2, 4))


def next_batch(
    buffer: AnyIteratedBuffer, key: PRNGKeyArray, batch_size: int, *, donate: bool = True
) -> tuple[AnyIteratedBuffer, Sample]:
    """Draws the next batch of a pass: ``buffer.next_batch(key, batch_size)``, jitted.

    With the sampler ``Shuffled``, a pass draws every item exactly once, and ``metrics()`` has the
    numbers of ``passes`` finished and of items ``left``. Other samplers have no passes: this then
    draws as ``jaxbuf.sample`` does, so that an item may come twice.

    The buffer records the progress of the pass, so it is returned as well. It is donated, as in
    ``jaxbuf.add``; inside your own ``jax.jit`` this calls the plain method, and ``donate`` has no
    effect.

    Args:
        buffer: An ``ItemBuffer``, a ``TrajectoryBuffer``, a ``Mixture``, or a ``Hosted`` one. It
            is consumed: use the result instead.
        key: A PRNG key.
        batch_size: The number of rows ``B``; static.
        donate: False keeps ``buffer`` usable, at the cost of a copy of its whole contents.

    Returns:
        The new buffer, and a ``Sample`` of ``B`` rows.

    Raises:
        ValueError: If ``buffer`` is not such a buffer or was donated before, or as raised by its
            own ``next_batch``.

    Example:
        >>> import jax, jax.numpy as jnp, jaxbuf
        >>> buffer = jaxbuf.ItemBuffer.create(jnp.int32(0), 8, sampler=jaxbuf.Shuffled())
        >>> buffer = jaxbuf.add(buffer, jnp.arange(8))
        >>> found = []
        >>> for key in jax.random.split(jax.random.key(0), 4):
        ...     buffer, batch = jaxbuf.next_batch(buffer, key, 2)
        ...     found += batch.data.tolist()
        >>> sorted(found), int(buffer.metrics()["passes"])
        ([0, 1, 2, 3, 4, 5, 6, 7], 1)
    """
    check_options(buffer, "next_batch", {})
    donate = checks.check_flag("donate", donate)
    if isinstance(buffer, OwnPrograms):
        return buffer.next_batch(key, batch_size, donate=donate)
    key = check_key(key)
    rows = check_batch_size(batch_size)
    return call(_next_method, buffer, key, rows, static=(2,), donate=donate)


def update_priority(
    buffer: AnySampledBuffer,
    slots: Slots,
    priority: Float[Array, " B"],
    *,
    donate: bool = True,
    **options: object,
) -> AnySampledBuffer:
    """Sets priorities of sampled items: ``buffer.update_priority(slots, priority, ...)``, jitted.

    Rows whose item has been overwritten since it was sampled are dropped. The buffer is donated, as
    in ``jaxbuf.add``; inside your own ``jax.jit`` this calls the plain method, and ``donate`` has
    no effect.

    Args:
        buffer: Any buffer with priorities. It is consumed: use the result instead.
        slots: The slots of the items, ``sample.slots``, ``[B]``.
        priority: The new priorities, ``[B]``.
        donate: False keeps ``buffer`` usable, at the cost of a copy of its whole contents.
        **options: Options of the buffer's own ``update_priority``, such as ``mask``, a mask of the
            rows to use, ``[B]``. Options that are None are ignored.

    Returns:
        The buffer with the new priorities.

    Raises:
        ValueError: If ``buffer`` is not a buffer, has no priorities or was donated before, if it
            does not take one of the options, or as raised by its own ``update_priority``.

    Example:
        >>> import jax, jax.numpy as jnp, jaxbuf
        >>> buffer = jaxbuf.ItemBuffer.create(jnp.float32(0), 100, sampler=jaxbuf.Prioritized())
        >>> buffer = jaxbuf.add(buffer, jnp.arange(10.0))
        >>> batch = jaxbuf.sample(buffer, jax.random.key(0), 4)
        >>> buffer = jaxbuf.update_priority(buffer, batch.slots, jnp.full(4, 7.0))
        >>> round(float(buffer.metrics()["priority_max"]), 3)
        7.0
    """
    given = {name: value for name, value in options.items() if value is not None}
    check_options(buffer, "update_priority", given)
    if isinstance(buffer, OwnPrograms):
        return buffer.update_priority(slots, priority, donate=donate, **given)
    donate = checks.check_flag("donate", donate)
    priority = _converted({"priority": priority})["priority"]
    traced, static = split_options(given)
    return call(_update_method, buffer, slots, priority, traced, static, static=(4,), donate=donate)


def _known_envs(buffer: object, given: dict[str, object]) -> object:
    """Returns ``env_ids`` after a check of their numbers, which a program would not know."""
    part = given.get("part")
    if isinstance(buffer, Mixture) and isinstance(part, int | np.integer):
        buffer = buffer.parts[part] if 0 <= part < len(buffer.parts) else buffer
    rings = isinstance(buffer, TrajectoryBuffer)
    return buffer.check_env_ids(given["env_ids"]) if rings else given["env_ids"]


def _converted(given: dict[str, object]) -> dict[str, Any]:
    """Converts arguments to the dtypes of the buffer, before ``jax.jit`` truncates to 32 bits."""
    return {
        name: numbers.convert(value, name, _KEPT[name], infinite=name == "priority")
        if name in _KEPT
        else numbers.narrow(value, name, ())
        for name, value in given.items()
    }


def _add_method(
    buffer: _Buffer, items: PyTree[Array], traced: dict[str, object], static: Static
) -> Any:
    # This runs when the program is traced, so it costs nothing once that is compiled.
    shapes.note(buffer, items, "jaxbuf.add")
    return buffer.add(items, **traced, **dict(static))


def _sample_method(
    buffer: _SampledBuffer, key: object, batch_size: int, traced: dict[str, object], static: Static
) -> Sample:
    return buffer.sample(key, batch_size, **traced, **dict(static))


def _next_method(buffer: _IteratedBuffer, key: object, batch_size: int) -> Any:
    return buffer.next_batch(key, batch_size)


def _update_method(
    buffer: _SampledBuffer,
    slots: object,
    priority: object,
    traced: dict[str, object],
    static: Static,
) -> Any:
    return buffer.update_priority(slots, priority, **traced, **dict(static))

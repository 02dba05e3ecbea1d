"""The methods of the buffers as jitted functions.

A loop that calls ``jax.jit(buffer.add)`` in each step would trace it in each step. These functions
are traced once. They also donate the buffer: its memory is updated in place, and the buffer passed
in cannot be used again.
"""

import operator
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
from jaxbuf.core import checks, fields, numbers
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
AnyBody = TypeVar("AnyBody")
AnyBuffer = TypeVar("AnyBuffer", bound=_Buffer)
AnyIteratedBuffer = TypeVar("AnyIteratedBuffer", bound=_IteratedBuffer)
AnySampledBuffer = TypeVar("AnySampledBuffer", bound=_SampledBuffer)


def add(
    buffer: AnyBuffer, items: PyTree[Array], *, donate: bool = True, **options: object
) -> AnyBuffer:
    """Adds items to a buffer: ``buffer.add(items, **options)``, jitted.

    It compiles once for all buffers with the same configuration, and again for other shapes. The
    buffer is donated: its memory is updated in place, and the buffer passed in cannot be used any
    more.

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
    it.

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

    With the sampler ``Shuffled``, a pass draws every item exactly once. The buffer records the
    progress of the pass, so it is returned as well. It is donated, as in ``jaxbuf.add``; inside
    your own ``jax.jit`` this calls the plain method, and ``donate`` has no effect.

    Args:
        buffer: An ``ItemBuffer``, a ``TrajectoryBuffer``, a ``Mixture`` of them, or a ``Hosted``
            one. It is consumed: use the result instead.
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


def set_field(
    buffer: AnyBody,
    path: str | None,
    slots: Slots,
    value: PyTree[Array],
    *,
    donate: bool = True,
    **options: object,
) -> AnyBody:
    """Changes one field of sampled items: ``buffer.set_field(path, slots, value, ...)``, jitted.

    The buffer is donated, as in ``jaxbuf.add``; inside your own ``jax.jit`` this calls the plain
    method, and ``donate`` has no effect.

    Args:
        buffer: Any buffer that is sampled. It is consumed: use the result instead.
        path: The name of the field; static.
        slots: The slots of the items, ``sample.slots``, ``[B]``.
        value: The new values, leaves ``[B, *shape]``, or ``[B, sequence_length, *shape]``.
        donate: False keeps ``buffer`` usable, at the cost of a copy of its whole contents.
        **options: Options of the buffer's own ``set_field``, such as ``mask``.

    Returns:
        The buffer with the new values.

    Raises:
        ValueError: If ``buffer`` is not such a buffer or was donated before, or as raised by its
            own ``set_field``.

    Example:
        >>> import jax, jax.numpy as jnp, jaxbuf
        >>> buffer = jaxbuf.ItemBuffer.create({"value": jnp.float32(0)}, 100)
        >>> buffer = jaxbuf.add(buffer, {"value": jnp.arange(10.0)})
        >>> batch = jaxbuf.sample(buffer, jax.random.key(0), 64)
        >>> buffer = jaxbuf.set_field(buffer, "value", batch.slots, jnp.ones(64))
        >>> float(buffer.data["value"][:10].max())
        1.0
    """
    given = {"slots": slots, "value": value}
    return _change(buffer, "set_field", {"path": path}, given, options, donate)


def map_field(
    buffer: AnyBody, path: str | None, fn: Function, *, donate: bool = True, **options: object
) -> AnyBody:
    """Computes a field of all items anew: ``buffer.map_field(path, fn, batch_size=...)``, jitted.

    It compiles once for each function object ``fn``, and arrays that the function uses are
    constants of the program. To use new parameters each time, call the method inside your own
    ``jax.jit``, which takes them as an argument.

    Args:
        buffer: Any buffer that is sampled. It is consumed: use the result instead.
        path: The name of the field; static.
        fn: A function of items ``[B, ...]``, which returns their new values; static.
        donate: False keeps ``buffer`` usable, at the cost of a copy of its whole contents.
        **options: Options of the buffer's own ``map_field``, such as ``batch_size``.

    Returns:
        The buffer with the new values.

    Raises:
        ValueError: If ``buffer`` is not such a buffer or was donated before, or as raised by its
            own ``map_field``.

    Example:
        >>> import jax.numpy as jnp, jaxbuf
        >>> buffer = jaxbuf.ItemBuffer.create({"reward": jnp.float32(0)}, 4)
        >>> buffer = jaxbuf.add(buffer, {"reward": jnp.arange(3.0)})
        >>> buffer = jaxbuf.map_field(buffer, "reward", lambda items: 2 * items["reward"])
        >>> buffer.data["reward"].tolist()
        [0.0, 2.0, 4.0, 0.0]
    """
    return _change(buffer, "map_field", {"path": path, "fn": fn}, {}, options, donate)


def update_score(
    buffer: AnyBody,
    slots: Slots,
    score: Float[Array, " B"],
    *,
    donate: bool = True,
    **options: object,
) -> AnyBody:
    """Sets scores of sampled items: ``buffer.update_score(slots, score, ...)``, jitted.

    The buffer is donated, as in ``jaxbuf.update_priority``.

    Args:
        buffer: Any buffer with scores. It is consumed: use the result instead.
        slots: The slots of the items, ``sample.slots``, ``[B]``.
        score: The new scores, ``[B]``.
        donate: False keeps ``buffer`` usable, at the cost of a copy of its whole contents.
        **options: Options of the buffer's own ``update_score``, such as ``mask``.

    Returns:
        The buffer with the new scores.

    Raises:
        ValueError: If ``buffer`` is not such a buffer or was donated before, or as raised by its
            own ``update_score``.
    """
    return _change(buffer, "update_score", {}, {"slots": slots, "score": score}, options, donate)


def remove(buffer: AnyBody, slots: Slots, *, donate: bool = True, **options: object) -> AnyBody:
    """Removes sampled items: ``buffer.remove(slots, ...)``, jitted.

    The buffer is donated, as in ``jaxbuf.update_priority``.

    Args:
        buffer: Any buffer with ``Removable``. It is consumed: use the result instead.
        slots: The slots of the items, ``sample.slots``, ``[B]``.
        donate: False keeps ``buffer`` usable, at the cost of a copy of its whole contents.
        **options: Options of the buffer's own ``remove``, such as ``mask``.

    Returns:
        The buffer without these items.

    Raises:
        ValueError: If ``buffer`` is not such a buffer or was donated before, or as raised by its
            own ``remove``.
    """
    return _change(buffer, "remove", {}, {"slots": slots}, options, donate)


def insert(
    buffer: AnyBody, items: PyTree[Array], *, donate: bool = True, **options: object
) -> tuple[AnyBody, Slots]:
    """Adds items, and returns their slots: ``buffer.insert(items, **options)``, jitted.

    Args:
        buffer: A buffer of items. It is consumed: use the result instead.
        items: The items, leaves ``[B, ...]``.
        donate: False keeps ``buffer`` usable, at the cost of a copy of its whole contents.
        **options: Options of the buffer's own ``insert``, which are those of its ``add``.

    Returns:
        The buffer with the items, and their slots, ``[B]``; see ``ItemBuffer.insert``.

    Raises:
        ValueError: If ``buffer`` is not such a buffer or was donated before, or as raised by its
            own ``insert``.

    Example:
        >>> import jax.numpy as jnp, jaxbuf
        >>> buffer = jaxbuf.ItemBuffer.create(jnp.float32(0), 100)
        >>> buffer, slots = jaxbuf.insert(buffer, jnp.arange(3.0))
        >>> slots.index.tolist()
        [0, 1, 2]
    """
    return _change(buffer, "insert", {}, {"items": items}, options, donate)


def _change(
    buffer: Any,
    method: str,
    fixed: dict[str, object],
    given: dict[str, Any],
    options: dict[str, object],
    donate: bool,
) -> Any:
    """Calls a method of a buffer with static (``fixed``) and traced (``given``) arguments."""
    options = {name: value for name, value in options.items() if value is not None}
    check_options(buffer, method, options)
    if isinstance(buffer, OwnPrograms):
        # The method is one that was looked for above.
        return getattr(buffer, method)(**fixed, **given, **options, donate=donate)
    donate = checks.check_flag("donate", donate)
    traced, static = split_options(options)
    stored = buffer.data if isinstance(buffer, _STORES) else ()
    if "items" in given:
        given["items"] = numbers.narrow(given["items"], "items", stored)
    elif "value" in given:
        path = fixed["path"]
        like = fields.find(stored, path) if isinstance(path, str) else stored
        given["value"] = numbers.narrow(given["value"], "value", like)
    if "score" in given:
        traced["score"] = given["score"]
    traced = given | _converted(traced)
    static = (*static, *fixed.items())
    return call(_method, buffer, method, traced, static, static=(1, 3), donate=donate)


def _method(buffer: object, method: str, traced: dict[str, object], static: Static) -> Any:
    return operator.methodcaller(method, **traced, **dict(static))(buffer)


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

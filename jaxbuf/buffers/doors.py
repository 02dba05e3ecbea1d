"""The operations of the buffers as functions, which are compiled once and update in place.

Each of these functions calls a method of the buffer. A function that changes the buffer *donates*
it: its memory is updated in place, and the buffer that was passed in cannot be used any more.
``donate=False`` keeps it, at the cost of a copy of what changes.

Inside your own ``jax.jit``, ``jax.lax.scan`` or ``jax.vmap`` they call the plain method, and
``donate`` has no effect: donate the buffer to your own program instead, with
``jax.jit(step, donate_argnums=0)``. A scan updates its carry in place by itself.
"""

import functools
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree

from jaxbuf.buffers.options import check_options
from jaxbuf.buffers.sample import Sample
from jaxbuf.buffers.trajectory import Steps
from jaxbuf.core import checks
from jaxbuf.core.program import Operation, OwnPrograms
from jaxbuf.core.slots import Slots
from jaxbuf.core.types import Function


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


AnyBuffer = TypeVar("AnyBuffer", bound=_Buffer)
AnyIteratedBuffer = TypeVar("AnyIteratedBuffer", bound=_IteratedBuffer)
AnySampledBuffer = TypeVar("AnySampledBuffer", bound=_SampledBuffer)


def call(
    method: str, buffer: object, /, *args: object, donate: object = ..., **options: object
) -> Any:
    """Calls a method of a buffer as one compiled program.

    Args:
        method: The name of the method.
        buffer: The buffer.
        args: The positional arguments of the method.
        donate: Whether the buffer may be overwritten; not given for a method that does not change
            it.
        **options: Options of the method. Options that are None are ignored.

    Raises:
        ValueError: If ``buffer`` is not a buffer with this method or was donated before, or if the
            method does not take one of the options.
    """
    given = {name: value for name, value in options.items() if value is not None}
    function = check_options(buffer, method, given)
    changes = donate is not ...
    if isinstance(buffer, OwnPrograms):
        return function(buffer, *args, **given, **({"donate": donate} if changes else {}))
    donates = changes and checks.check_flag("donate", donate)
    return _operation(function)((buffer, *args), given, donate=donates)


@functools.lru_cache(maxsize=1024)
def _operation(method: Function) -> Operation:
    """Returns the operation of a method, which may be that of somebody else's buffer."""
    return getattr(method, "operation", None) or Operation(method)


def add(
    buffer: AnyBuffer, items: PyTree[Array], *, donate: bool = True, **options: object
) -> AnyBuffer:
    """Adds items to a buffer: ``buffer.add(items, **options)``, compiled, in place.

    It compiles once for all buffers with the same configuration, and again for other shapes; at the
    tenth it warns, once. The buffer is donated: its memory is updated in place, and the buffer
    passed in cannot be used any more.

    Inside your own ``jax.jit``, ``jax.lax.scan`` or ``jax.vmap`` this calls the plain method, and
    ``donate`` has no effect: donate the buffer to your own program instead, with
    ``jax.jit(step, donate_argnums=0)``. A scan updates its carry in place by itself.

    Args:
        buffer: Any buffer. It is consumed: use the result instead.
        items: The items, leaves ``[B, ...]``; for a ``TrajectoryBuffer`` steps, leaves
            ``[num_envs, ...]`` or ``[num_envs, T, ...]``. They have the example's dtypes. Python's
            numbers are cast to them, and NumPy's numbers of 64 bits to 32 if they fit.
        donate: False keeps ``buffer`` usable, at the cost of a copy of its whole contents.
        **options: Options of the buffer's own ``add``: ``priority``, ``score``, ``version``,
            ``session`` or ``mask`` for an ``ItemBuffer``, ``env_ids`` for a ``TrajectoryBuffer``,
            ``part`` for a ``Mixture``. Options that are None are ignored. If you wrote the buffer
            class yourself, Python integers, booleans, strings and functions are static, arrays are
            traced, and a call with a function compiles anew.

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
    return call("add", buffer, items, donate=donate, **options)


def sample(buffer: _SampledBuffer, key: PRNGKeyArray, batch_size: int, **options: object) -> Sample:
    """Draws a batch from a buffer: ``buffer.sample(key, batch_size, **options)``, compiled.

    It compiles once for each batch size and for all buffers with the same configuration. The buffer
    is not donated and does not change. Inside your own ``jax.jit`` this calls the plain method. Add
    before you sample there: a program that samples first has to keep the old storage, and copies
    it. The samplers ``Shuffled`` and ``Staleness`` record only what ``jaxbuf.next_batch`` draws.

    Args:
        buffer: Any buffer except a ``Queue``, which has ``take`` instead.
        key: A PRNG key.
        batch_size: The number of rows ``B``; static.
        **options: Options of the buffer's own ``sample``, such as the ``sequence_length`` of a
            ``TrajectoryBuffer``. Options that are None are ignored.

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
    return call("sample", buffer, key, batch_size, **options)


def next_batch(
    buffer: AnyIteratedBuffer, key: PRNGKeyArray, batch_size: int, *, donate: bool = True
) -> tuple[AnyIteratedBuffer, Sample]:
    """Draws the next batch of a pass: ``buffer.next_batch(key, batch_size)``, compiled, in place.

    With the sampler ``Shuffled``, a pass draws every item exactly once, and ``metrics()`` has the
    numbers of ``passes`` finished and of items ``left``. With ``Staleness``, it draws the items
    that were not drawn for long. Other samplers draw as in ``jaxbuf.sample``. The buffer records
    what was drawn, so it is returned as well.

    Args:
        buffer: An ``ItemBuffer``, a ``TrajectoryBuffer``, a ``Mixture``, or a ``Hosted`` one. It
            is consumed: use the result instead.
        key: A PRNG key.
        batch_size: The number of rows ``B``; static.
        donate: As for ``jaxbuf.add``.

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
    return call("next_batch", buffer, key, batch_size, donate=donate)


def update_priority(
    buffer: AnySampledBuffer,
    slots: Slots,
    priority: Float[Array, " B"],
    *,
    donate: bool = True,
    **options: object,
) -> AnySampledBuffer:
    """Sets priorities of sampled items: ``buffer.update_priority(slots, priority, ...)``, in place.

    Rows whose item has been overwritten since it was sampled are dropped.

    Args:
        buffer: Any buffer with priorities. It is consumed: use the result instead.
        slots: The slots of the items, ``sample.slots``, ``[B]``.
        priority: The new priorities, ``[B]``.
        donate: False keeps ``buffer`` usable, at the cost of a copy of its priorities. The two
            buffers then share their storage, so that donating one of them consumes both.
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
    return call("update_priority", buffer, slots, priority, donate=donate, **options)


def mark_used(
    buffer: AnyBuffer, slots: Slots, *, donate: bool = True, **options: object
) -> AnyBuffer:
    """Counts a use of sampled items: ``buffer.mark_used(slots, **options)``, compiled, in place.

    Args:
        buffer: A buffer with ``Freshness``. It is consumed: use the result instead.
        slots: The slots of the items, ``sample.slots``, ``[B]``.
        donate: As for ``jaxbuf.update_priority``.
        **options: ``mask``, a mask of the rows to use, ``[B]``.

    Returns:
        The buffer with the new counts, without the items that have retired.

    Raises:
        ValueError: As raised by the buffer's own ``mark_used``, or if it was donated before.
    """
    return call("mark_used", buffer, slots, donate=donate, **options)


def set_version(
    buffer: AnyBuffer,
    version: int | Int[Array, ""],
    session: int | Int[Array, ""] | None = None,
    *,
    donate: bool = True,
) -> AnyBuffer:
    """Sets the learner's version: ``buffer.set_version(version, session)``, compiled, in place.

    Args:
        buffer: A buffer with ``Freshness``. It is consumed: use the result instead.
        version: The learner's version, an integer that fits int32.
        session: The number of the learner's run; None keeps the present one.
        donate: As for ``jaxbuf.update_priority``.

    Returns:
        The buffer without the items that have become too stale.

    Raises:
        ValueError: As raised by the buffer's own ``set_version``, or if it was donated before.
    """
    return call("set_version", buffer, version, session=session, donate=donate)


def clear(buffer: AnyBuffer, *, donate: bool = True, **options: object) -> AnyBuffer:
    """Removes all items: ``buffer.clear(**options)``, compiled, in place.

    Args:
        buffer: Any buffer. It is consumed: use the result instead.
        donate: As for ``jaxbuf.add``.
        **options: ``envs`` for a ``TrajectoryBuffer``, the environments to clear.

    Returns:
        The buffer without its items.

    Raises:
        ValueError: As raised by the buffer's own ``clear``, or if it was donated before.
    """
    return call("clear", buffer, donate=donate, **options)


def take(queue: AnyBuffer, batch_size: int, *, donate: bool = True) -> tuple[AnyBuffer, Sample]:
    """Takes the oldest items out of a queue: ``queue.take(batch_size)``, compiled, in place.

    Args:
        queue: A ``Queue``. It is consumed: use the result instead.
        batch_size: The number of rows ``B``; static.
        donate: As for ``jaxbuf.add``.

    Returns:
        The queue without these items, and a ``Sample`` of them.

    Raises:
        ValueError: As raised by the queue's own ``take``, or if it was donated before.

    Example:
        >>> import jax.numpy as jnp, jaxbuf
        >>> queue = jaxbuf.add(jaxbuf.Queue.create(jnp.int32(0), 8), jnp.arange(5))
        >>> queue, batch = jaxbuf.take(queue, 3)
        >>> batch.data.tolist(), int(queue.size)
        ([0, 1, 2], 2)
    """
    return call("take", queue, batch_size, donate=donate)


def dequeue(
    buffer: AnyBuffer, n: int, *, mask: Bool[Array, " E"] | None = None, donate: bool = True
) -> tuple[AnyBuffer, Steps]:
    """Removes the earliest steps of every ring: ``buffer.dequeue(n, mask=mask)``, in place.

    Args:
        buffer: A ``TrajectoryBuffer``. It is consumed: use the result instead.
        n: The largest number of steps to remove from each environment; static.
        mask: A mask of the environments, ``[num_envs]``; None for all.
        donate: As for ``jaxbuf.add``.

    Returns:
        The buffer without these steps, and ``Steps`` with leaves ``[num_envs, n, ...]``.

    Raises:
        ValueError: As raised by the buffer's own ``dequeue``, or if it was donated before.
    """
    return call("dequeue", buffer, n, mask=mask, donate=donate)


def latest(buffer: _Buffer, n: int) -> Sample:
    """Returns the ``n`` newest items, or windows of every ring: ``buffer.latest(n)``, compiled.

    Args:
        buffer: An ``ItemBuffer`` or a ``TrajectoryBuffer``, which may be ``Hosted``.
        n: The number of items, or of windows of each ring; static.

    Returns:
        A ``Sample`` of ``n`` rows, or of ``num_envs * n``, from the oldest to the newest.

    Raises:
        ValueError: As raised by the buffer's own ``latest``, or if it was donated before.
    """
    return call("latest", buffer, n)


def sample_range(
    buffer: _Buffer,
    key: PRNGKeyArray,
    batch_size: int,
    start: int | Int[Array, ""] | None = None,
    stop: int | Int[Array, ""] | None = None,
    **options: object,
) -> Sample:
    """Draws a batch from a range of ages: ``buffer.sample_range(key, batch_size, ...)``, compiled.

    Args:
        buffer: An ``ItemBuffer`` or a ``TrajectoryBuffer``.
        key: A PRNG key.
        batch_size: The number of rows ``B``; static.
        start: The start of the range of ages, as in a slice of a list from the oldest to the
            newest.
        stop: The end of the range.
        **options: ``by_priority`` and ``replacement`` of the buffer's own ``sample_range``.

    Returns:
        A ``Sample`` of ``B`` rows.

    Raises:
        ValueError: As raised by the buffer's own ``sample_range``, or if it was donated before.
    """
    return call("sample_range", buffer, key, batch_size, start=start, stop=stop, **options)


def insert(
    buffer: AnyBuffer, items: PyTree[Array], *, donate: bool = True, **options: object
) -> tuple[AnyBuffer, Slots]:
    """Adds items, and returns their slots: ``buffer.insert(items, **options)``, compiled, in place.

    Args:
        buffer: A buffer of items. It is consumed: use the result instead.
        items: The items, leaves ``[B, ...]``.
        donate: As for ``jaxbuf.add``.
        **options: Options of the buffer's own ``insert``, which are those of its ``add``.

    Returns:
        The buffer with the items, and their slots, ``[B]``; see ``ItemBuffer.insert``.

    Raises:
        ValueError: As raised by the buffer's own ``insert``, or if it was donated before.

    Example:
        >>> import jax.numpy as jnp, jaxbuf
        >>> buffer = jaxbuf.ItemBuffer.create(jnp.float32(0), 100)
        >>> buffer, slots = jaxbuf.insert(buffer, jnp.arange(3.0))
        >>> slots.index.tolist()
        [0, 1, 2]
    """
    return call("insert", buffer, items, donate=donate, **options)


def set_field(
    buffer: AnyBuffer,
    path: str | None,
    slots: Slots,
    value: PyTree[Array],
    *,
    donate: bool = True,
    **options: object,
) -> AnyBuffer:
    """Changes a field of sampled items: ``buffer.set_field(path, slots, value, ...)``, in place.

    Args:
        buffer: Any buffer that is sampled. It is consumed: use the result instead.
        path: The name of the field; static. None writes whole items.
        slots: The slots of the items, ``sample.slots``, ``[B]``.
        value: The new values, leaves ``[B, *shape]``, or ``[B, sequence_length, *shape]``.
        donate: As for ``jaxbuf.add``.
        **options: ``mask``, a mask of the rows to write.

    Returns:
        The buffer with the new values.

    Raises:
        ValueError: As raised by the buffer's own ``set_field``, or if it was donated before.

    Example:
        >>> import jax, jax.numpy as jnp, jaxbuf
        >>> buffer = jaxbuf.ItemBuffer.create({"value": jnp.float32(0)}, 100)
        >>> buffer = jaxbuf.add(buffer, {"value": jnp.arange(10.0)})
        >>> batch = jaxbuf.sample(buffer, jax.random.key(0), 64)
        >>> buffer = jaxbuf.set_field(buffer, "value", batch.slots, jnp.ones(64))
        >>> float(buffer.data["value"][:10].max())
        1.0
    """
    return call("set_field", buffer, path, slots, value, donate=donate, **options)


def map_field(
    buffer: AnyBuffer, path: str | None, fn: Function, *, donate: bool = True, **options: object
) -> AnyBuffer:
    """Computes a field of all items anew: ``buffer.map_field(path, fn, ...)``, compiled, in place.

    Each call from Python traces ``fn`` and compiles anew, because ``fn`` may compute something else
    by now: it may be a method of an agent, or read the parameters of a module. To compile once for
    all calls, call this in your own ``jax.jit``, with the parameters as an argument.

    Args:
        buffer: Any buffer that is sampled. It is consumed: use the result instead.
        path: The name of the field; static. None means whole items.
        fn: A function of items ``[B, ...]``, which returns their new values; traced at each call.
        donate: As for ``jaxbuf.add``.
        **options: ``batch_size``, the number of items for each call of ``fn``.

    Returns:
        The buffer with the new values.

    Raises:
        ValueError: As raised by the buffer's own ``map_field``, or if it was donated before.

    Example:
        >>> import jax.numpy as jnp, jaxbuf
        >>> buffer = jaxbuf.ItemBuffer.create({"reward": jnp.float32(0)}, 4)
        >>> buffer = jaxbuf.add(buffer, {"reward": jnp.arange(3.0)})
        >>> buffer = jaxbuf.map_field(buffer, "reward", lambda items: 2 * items["reward"])
        >>> buffer.data["reward"].tolist()
        [0.0, 2.0, 4.0, 0.0]
    """
    return call("map_field", buffer, path, fn, donate=donate, **options)


def update_score(
    buffer: AnyBuffer,
    slots: Slots,
    score: Float[Array, " B"],
    *,
    donate: bool = True,
    **options: object,
) -> AnyBuffer:
    """Sets scores of sampled items: ``buffer.update_score(slots, score, ...)``, in place.

    Args:
        buffer: Any buffer with scores. It is consumed: use the result instead.
        slots: The slots of the items, ``sample.slots``, ``[B]``.
        score: The new scores, ``[B]``.
        donate: As for ``jaxbuf.update_priority``.
        **options: ``mask``, a mask of the rows to use, ``[B]``.

    Returns:
        The buffer with the new scores.

    Raises:
        ValueError: As raised by the buffer's own ``update_score``, or if it was donated before.
    """
    return call("update_score", buffer, slots, score, donate=donate, **options)


def remove(buffer: AnyBuffer, slots: Slots, *, donate: bool = True, **options: object) -> AnyBuffer:
    """Removes sampled items: ``buffer.remove(slots, ...)``, compiled, in place.

    Args:
        buffer: A buffer with ``Removable``. It is consumed: use the result instead.
        slots: The slots of the items, ``sample.slots``, ``[B]``.
        donate: As for ``jaxbuf.update_priority``.
        **options: ``mask``, a mask of the rows to remove, ``[B]``.

    Returns:
        The buffer without these items.

    Raises:
        ValueError: As raised by the buffer's own ``remove``, or if it was donated before.
    """
    return call("remove", buffer, slots, donate=donate, **options)


def end_episodes(
    buffer: AnyBuffer,
    envs: Int[Array, " K"] | Bool[Array, " E"] | None = None,
    *,
    donate: bool = True,
) -> AnyBuffer:
    """Ends open episodes by truncation: ``buffer.end_episodes(envs)``, compiled, in place.

    Args:
        buffer: A ``TrajectoryBuffer`` with ``Episodes``. It is consumed: use the result instead.
        envs: The environments, as a mask ``[num_envs]`` or as numbers ``[K]``; None for all.
        donate: As for ``jaxbuf.add``.

    Returns:
        The buffer, in which the next steps begin other episodes.

    Raises:
        ValueError: As raised by the buffer's own ``end_episodes``, or if it was donated before.
    """
    return call("end_episodes", buffer, envs=envs, donate=donate)


def drop_newest_episode(
    buffer: AnyBuffer,
    envs: Int[Array, " K"] | Bool[Array, " E"] | None = None,
    *,
    donate: bool = True,
) -> AnyBuffer:
    """Removes the newest episodes: ``buffer.drop_newest_episode(envs)``, compiled, in place.

    Args:
        buffer: A ``TrajectoryBuffer`` with ``Episodes``. It is consumed: use the result instead.
        envs: The environments, as a mask ``[num_envs]`` or as numbers ``[K]``; None for all.
        donate: As for ``jaxbuf.add``.

    Returns:
        The buffer without the steps of these episodes.

    Raises:
        ValueError: As raised by the buffer's own ``drop_newest_episode``, or if it was donated
            before.
    """
    return call("drop_newest_episode", buffer, envs=envs, donate=donate)

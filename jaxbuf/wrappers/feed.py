"""Threads that move rows from a queue, which other processes fill, into a holder."""

import bisect
import math
import queue
import threading
from collections.abc import Callable, Sequence
from multiprocessing import connection
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from jaxbuf.buffers.buffer import as_buffer, owns_items
from jaxbuf.wrappers.holder import Holder, Stopped

# Seconds after which a thread that waits for something else looks if the holder has stopped.
_RECHECK = 0.1
# The numbers of rows to which messages that are added together are padded: each is a program.
_SIZES = (16, 128, 1024)
# Above this many bytes rows are not added together, since copies would cost more than calls.
_MOST_BYTES = 2**24


class _Source(Protocol):
    def get(self, *, timeout: float) -> dict[str, Any]: ...


class _Process(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def sentinel(self) -> int: ...
    @property
    def exitcode(self) -> int | None: ...
    def join(self, timeout: float) -> None: ...


def feed(holder: Holder[Any], rows: _Source, processes: Sequence[_Process] = ()) -> None:
    """Adds to a holder what arrives in a queue, in a thread of its own, until the holder stops.

    Each message in the queue is a dict of arguments of ``holder.add``: ``{"items": ...}``, and
    ``"priority"``, ``"mask"`` and others if you like. While the holder lets nothing in, the thread
    takes nothing out, so that a queue with a ``maxsize`` fills up and its producers wait.

    Messages that wait are added together, in order, as one batch of up to 1,024 rows that the
    holder lets in at that moment. It is padded with rows that are masked out to one of three
    lengths, each of which compiles one program. So actors may send each row as soon as they have
    it. Steps of a ``TrajectoryBuffer``, rows of a ``Sharded``, and rows that a ``Diversity``
    compares within a batch are added as they come, and so are messages that differ in more than
    their number of rows, and arrays that are not in the memory of the host.

    If a process ends, or a message cannot be added, the holder stops with that as the cause, so
    that a learner which waits for rows gets a ``Stopped`` and does not wait forever.

    Args:
        holder: The holder of the buffer to add to. It ends the thread: leave its ``with`` block, or
            call ``stop``.
        rows: A ``multiprocessing.Queue``, a ``queue.Queue``, or another object whose
            ``get(timeout=seconds)`` returns the next message or raises ``queue.Empty``.
        processes: Processes of ``multiprocessing`` that have to run as long as the holder; none of
            them may end first, with whatever exit code.

    Example:
        >>> import jax, jax.numpy as jnp, jaxbuf, queue
        >>> buffer = jaxbuf.ItemBuffer.create(jnp.float32(0), 8, sampler=jaxbuf.Prioritized())
        >>> rows = queue.Queue(maxsize=2)
        >>> with jaxbuf.Holder(buffer) as holder:
        ...     jaxbuf.feed(holder, rows)
        ...     rows.put({"items": jnp.arange(4.0), "priority": jnp.ones(4)})
        ...     batch = holder.sample(jax.random.key(0), 4, timeout=60.0)
        >>> batch.valid.tolist()
        [True, True, True, True]
    """
    adder = _Adder(holder, rows)
    _start(holder, adder.add)
    if processes:
        # Apart, since the other thread waits forever for the rest of a message of which a process
        # that was killed has sent only a part.
        _start(holder, lambda: _watch(holder, processes))


def _start(holder: Holder[Any], run: Callable[[], None]) -> None:
    def guarded() -> None:
        try:
            while not holder.stopped:
                run()
        except Stopped:
            pass
        except BaseException as error:
            holder.stop(error)

    threading.Thread(target=guarded, daemon=True).start()


class _Form(NamedTuple):
    """The type of a message; messages of one form can be added together.

    Attributes:
        structure: The structure of the message.
        leaves: For each array the shape and the dtype of its rows, and the other arguments.
    """

    structure: Any
    leaves: tuple[Any, ...]

    @property
    def row_bytes(self) -> int:
        """The bytes of a row."""
        rows = [leaf for leaf in self.leaves if isinstance(leaf, tuple)]
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in rows)


class _Adder:
    """Adds the messages of a queue to a holder.

    Args:
        holder: The holder.
        rows: The queue.
    """

    def __init__(self, holder: Holder[Any], rows: _Source) -> None:
        self._holder, self._rows = holder, rows
        # At most one message that was taken out, and has to be added next.
        self._taken: list[Any] = []
        # The forms of messages that were added alone; others may be malformed.
        self._known: set[_Form] = set()

    def add(self) -> None:
        """Adds the next message, and others of its form that wait right behind it."""
        try:
            message = self._taken.pop() if self._taken else self._rows.get(timeout=_RECHECK)
        except queue.Empty:
            return
        form, count = _form(message)
        if form is None or form not in self._known:
            self._holder.add(**message)
            if form is not None and self._holder.read(_takes_any_rows):
                self._known.add(form)
            return
        messages, total, size = self._waiting(form, count, message)
        if len(messages) > 1:
            try:
                self._holder.add(**_joined(messages, total, size) | {"timeout": 0.0})
                return
            except TimeoutError:
                # Others have added meanwhile. Many rows might wait for a room that single rows fill
                # until somebody can take them.
                pass
        for each in messages:
            self._holder.add(**each)

    def _waiting(self, form: _Form, count: int, message: Any) -> tuple[list[Any], int, int]:
        """Returns a message and those of its form behind it that are let in now.

        Returns:
            The messages, the number of their rows, and the number to which they are padded.
        """
        messages, total = [message], count
        sizes = [size for size in _SIZES if size * form.row_bytes <= _MOST_BYTES]
        most = self._most(total, sizes[-1]) if sizes else 0
        while total < most:
            try:
                following = self._rows.get(timeout=0.0)
            except queue.Empty:
                break
            other, count = _form(following)
            if other != form or total + count > most:
                self._taken.append(following)
                break
            messages.append(following)
            total += count
        return messages, total, next((size for size in sizes if size >= total), total)

    def _most(self, least: int, most: int) -> int:
        """Returns how many rows are let in now, if more than ``least``, and at most ``most``."""
        size, room = self._holder.read(lambda buffer: (int(buffer.size), _room(buffer, most)))
        limiter, most = self._holder.limiter, min(most, room)
        if most <= least or limiter is None or limiter.can_insert(size, most):
            return most
        # The first number that is not allowed, less one.
        return bisect.bisect(
            range(1, most), False, key=lambda rows: not limiter.can_insert(size, rows)
        )


def _takes_any_rows(state: object) -> bool:
    """Returns whether it makes no difference if rows are added together or apart."""
    inner = as_buffer(state).inside()[0]
    return as_buffer(state).num_blocks == 1 and all(
        owns_items(part) and not part.num_envs and getattr(part, "diversity", None) is None
        for part in as_buffer(inner).members or (inner,)
    )


def _room(buffer: Any, most: int) -> int:
    return buffer.capacity - int(buffer.size) if as_buffer(buffer).is_queue else most


def _form(message: Any) -> tuple[_Form | None, int]:
    """Returns the form of a message, None if it must be added alone; and its number of rows."""
    if not isinstance(message, dict):
        return None, 0
    leaves, structure = jax.tree.flatten(message)
    counts: set[int] = set()
    form: list[Any] = []
    for leaf in leaves:
        if type(leaf) in (bool, int, float):
            form.append(leaf)
        elif _is_on_host(leaf) and leaf.ndim:
            counts.add(leaf.shape[0])
            form.append((leaf.shape[1:], leaf.dtype))
        else:
            return None, 0
    if len(counts) != 1:
        return None, 0
    return _Form(structure, tuple(form)), counts.pop()


def _is_on_host(leaf: Any) -> bool:
    """Returns whether an array is in the memory of the host, and NumPy knows its dtype."""
    if isinstance(leaf, np.ndarray):
        return True
    if not isinstance(leaf, jax.Array) or not isinstance(leaf.dtype, np.dtype):
        return False
    devices = leaf.devices()
    is_cpu = len(devices) == 1 and next(iter(devices)).platform == "cpu"
    return is_cpu and not getattr(leaf, "weak_type", False)


def _joined(messages: list[Any], total: int, size: int) -> Any:
    """Returns one message with ``size`` rows: those of all, ``total``, and masked ones."""

    def join(*leaves: Any) -> Any:
        if not _is_on_host(leaves[0]):
            return leaves[0]
        out = np.zeros((size, *leaves[0].shape[1:]), leaves[0].dtype)
        np.concatenate(leaves, out=out[:total])
        return out

    joined = jax.tree.map(join, *messages)
    if joined.get("mask") is None:
        joined["mask"] = np.arange(size) < total
    return joined


def _watch(holder: Holder[Any], processes: Sequence[_Process]) -> None:
    """Raises RuntimeError if a process has ended."""
    ended = connection.wait([process.sentinel for process in processes], _RECHECK)
    for process in processes:
        if process.sentinel in ended and not holder.stopped:
            # The process has closed its sentinel, and is about to end.
            process.join(1.0)
            raise RuntimeError(f"{process.name} ended with exit code {process.exitcode}")

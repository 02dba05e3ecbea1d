"""Threads that move rows from a queue, which other processes fill, into a holder."""

import queue
import threading
from collections.abc import Callable, Sequence
from multiprocessing import connection
from typing import Any, Protocol

from jaxbuf.wrappers.holder import Holder, Stopped

# Seconds after which a thread that waits for something else looks if the holder has stopped.
_RECHECK = 0.1


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
    _start(holder, lambda: _add(holder, rows))
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


def _add(holder: Holder[Any], rows: _Source) -> None:
    try:
        message = rows.get(timeout=_RECHECK)
    except queue.Empty:
        return
    holder.add(**message)


def _watch(holder: Holder[Any], processes: Sequence[_Process]) -> None:
    """Raises RuntimeError if a process has ended."""
    ended = connection.wait([process.sentinel for process in processes], _RECHECK)
    for process in processes:
        if process.sentinel in ended and not holder.stopped:
            # The process has closed its sentinel, and is about to end.
            process.join(1.0)
            raise RuntimeError(f"{process.name} ended with exit code {process.exitcode}")

"""A buffer for several threads, which change it in turn and wait until they can go on."""

import functools
import math
import threading
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import jax
import numpy as np
from jaxtyping import Array, Bool, PRNGKeyArray, PyTree

from jaxbuf.buffers import common, doors
from jaxbuf.buffers.hosted import Hosted
from jaxbuf.buffers.mixture import Mixture
from jaxbuf.buffers.options import check_options
from jaxbuf.buffers.sample import Sample
from jaxbuf.buffers.sharded import Sharded
from jaxbuf.buffers.trajectory import TrajectoryBuffer
from jaxbuf.core import checks
from jaxbuf.strategies.recent import Recent

State = TypeVar("State")
Result = TypeVar("Result")


class Stopped(Exception):
    """Raised by calls of a holder that was stopped before or during the call."""


class Holder(Generic[State]):
    """Holds a buffer, or any other immutable state, for threads that produce and consume.

    One thread at a time changes the state. Other threads wait for their turn, or until the state
    meets a condition. Each change wakes waiting threads. The state itself is never handed out,
    since it is donated to the functions that change it: use ``read`` to look at it.

    Args:
        state: The state to hold. It is consumed: do not use it again.
        recheck: Seconds after which conditions are checked again without a change, for conditions
            that depend on a clock, such as that of a ``ThroughputLimiter``. By default only a
            change wakes waiting threads.

    Raises:
        ValueError: If ``recheck`` is not a positive number.

    Example:
        >>> import jax, jax.numpy as jnp, jaxbuf, threading
        >>> holder = jaxbuf.Holder(jaxbuf.ItemBuffer.create(jnp.float32(0), capacity=8))
        >>> actor = threading.Thread(target=lambda: [holder.add(jnp.ones(2)) for _ in range(3)])
        >>> actor.start()
        >>> batch = holder.sample(jax.random.key(0), 4, timeout=60.0)  # waits for four items
        >>> actor.join()
        >>> batch.data.shape, int(holder.read(lambda buffer: buffer.size))
        ((4,), 6)
    """

    def __init__(self, state: State, *, recheck: float | None = None) -> None:
        if recheck is not None:
            recheck = checks.check_number(
                "recheck", recheck, "None or seconds, more than 0", lambda x: 0 < x < math.inf
            )
        self._state = state
        self._recheck = recheck
        self._turn = threading.Condition()
        self._stopped = False

    @property
    def stopped(self) -> bool:
        """True once ``stop`` was called."""
        return self._stopped

    def apply(
        self,
        function: Callable[[State], tuple[State, Result]],
        *,
        when: Callable[[State], Any] | None = None,
        timeout: float | None = None,
    ) -> Result:
        """Changes the state: ``state, result = function(state)``.

        Args:
            function: Returns the new state and a result. If it raises, the state is unchanged;
                once it has donated the old state, it must not raise.
            when: A condition on the state that must be true first. It is checked after every
                change, and every ``recheck`` seconds.
            timeout: The most seconds to wait for the condition; by default there is no limit.

        Returns:
            The result.

        Raises:
            TimeoutError: If the condition was not met in time.
            Stopped: If the holder was stopped, before or meanwhile.
        """
        with self._turn:
            self._wait(when, timeout)
            self._state, result = function(self._state)
            self._turn.notify_all()
            return result

    def read(
        self,
        function: Callable[[State], Result],
        *,
        when: Callable[[State], Any] | None = None,
        timeout: float | None = None,
    ) -> Result:
        """Returns ``function(state)`` without a change of the state; also works after ``stop``.

        The result must not be the state or a part of it, since the next change consumes that:
        return a copy instead.

        Args:
            function: A function of the state.
            when: As for ``apply``.
            timeout: As for ``apply``.

        Raises:
            TimeoutError: If the condition was not met in time.
            Stopped: If there is a condition and the holder was stopped, before or meanwhile.
        """
        with self._turn:
            if when is not None:
                self._wait(when, timeout)
            return function(self._state)

    def add(
        self,
        items: PyTree[Array],
        *,
        mask: Bool[Array, "..."] | None = None,
        timeout: float | None = None,
        **options: Any,
    ) -> None:
        """Calls ``jaxbuf.add`` on the buffer; waits until all rows fit if it is a ``Queue``.

        Args:
            items: The items to add.
            mask: The rows to take; rows that are masked out must fit as well.
            timeout: As for ``apply``.
            **options: Options of the buffer's own ``add``: ``priority``, ``score``, ``version``,
                ``session``, the ``env_ids`` of a ``TrajectoryBuffer``, or the ``part`` of a
                ``Mixture``.

        Raises:
            ValueError: If there are more rows than a ``Queue`` can hold.
            TimeoutError: If the rows did not fit in time.
            Stopped: If the holder was stopped, before or meanwhile.
        """
        when = None
        if hasattr(self._state, "can_add"):
            # Items without rows fit, so that ``doors.add`` raises at once if they are malformed.
            rows = max((len(leaf) for leaf in jax.tree.leaves(items) if np.ndim(leaf)), default=0)
            _check_room(self._state, f"items asks for {rows} rows at a time", rows)
            when = functools.partial(_asked, "can_add", rows)

        def change(state: Any) -> tuple[Any, None]:
            return doors.add(state, items, mask=mask, **options), None

        self.apply(change, when=when, timeout=timeout)

    def sample(
        self,
        key: PRNGKeyArray,
        batch_size: int,
        *,
        least: int | None = None,
        timeout: float | None = None,
    ) -> Sample:
        """Calls ``jaxbuf.sample`` on the buffer as soon as it holds enough.

        Args:
            key: A PRNG key.
            batch_size: Number of rows ``B``.
            least: The number for ``can_sample`` to wait for; by default ``batch_size``.
            timeout: As for ``apply``.

        Raises:
            ValueError: If the buffer can never hold that many items or, for a
                ``TrajectoryBuffer``, windows.
            TimeoutError: If there was not enough in time.
            Stopped: If the holder was stopped, before or meanwhile.
        """
        check_options(self._state, "sample", {})
        enough = common.check_batch_size(batch_size)
        asks = f"batch_size asks for {enough} rows at a time"
        if least is not None:
            enough = common.check_count("least", least)
            asks = f"least asks for {enough} rows at a time"
        _check_room(self._state, asks, enough)

        def draw(state: Any) -> Sample:
            return doors.sample(state, key, batch_size)

        return self.read(
            draw, when=functools.partial(_asked, "can_sample", enough), timeout=timeout
        )

    def take(self, batch_size: int, *, timeout: float | None = None) -> Sample:
        """Takes the oldest items from the ``Queue`` as soon as it holds enough.

        Args:
            batch_size: Number of rows ``B``.
            timeout: As for ``apply``.

        Raises:
            ValueError: If the queue can never hold that many items.
            TimeoutError: If there was not enough in time.
            Stopped: If the holder was stopped, before or meanwhile.
        """
        check_options(self._state, "take", {})
        rows = common.check_batch_size(batch_size)
        _check_room(self._state, f"batch_size asks for {rows} rows at a time", rows)

        def change(state: Any) -> tuple[Any, Sample]:
            return doors.take(state, rows)

        return self.apply(
            change, when=functools.partial(_asked, "can_sample", rows), timeout=timeout
        )

    def stop(self) -> None:
        """Makes waiting calls and all later changes raise ``Stopped``; ``read`` still works."""
        with self._turn:
            self._stopped = True
            self._turn.notify_all()

    def _wait(self, when: Callable[[State], Any] | None, timeout: float | None) -> None:
        """Waits for a condition; the caller has the lock before and after."""
        deadline = None
        if timeout is not None:
            timeout = checks.check_number(
                "timeout", timeout, "seconds, or None", lambda x: not math.isnan(x)
            )
            deadline = time.monotonic() + timeout
        while not self._stopped:
            if when is None or bool(when(self._state)):
                return
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                raise TimeoutError(f"the state did not get there within {timeout} s")
            pauses = [pause for pause in (left, self._recheck) if pause is not None]
            self._turn.wait(min(pauses, default=None))
        raise Stopped("the holder was stopped")


def _check_room(state: Any, asks: str, rows: int) -> None:
    """Checks that the state can ever hold so many rows.

    It only reads the configuration, so that no thread has to wait for its turn to get the error.

    Raises:
        ValueError: If the state can never hold that many rows.
    """
    if isinstance(state, Hosted):
        _check_room(state.buffer, asks, rows)
        return
    if isinstance(state, Mixture):
        for i, count in enumerate(state.counts(rows)):
            if state.ratios[i] > 0:
                more = f"{asks}, of which parts[{i}] gives {count}"
                _check_room(state.parts[i], more, max(count, 1))
        return
    ring = state.shards if isinstance(state, Sharded) else state
    if isinstance(ring, TrajectoryBuffer):
        shards = state.num_shards if isinstance(state, Sharded) else 1
        room, kind = shards * ring.max_windows, "room is for {} windows"
    else:
        room, kind = getattr(state, "capacity", rows), "capacity is {}"
        sampler = getattr(state, "sampler", None)
        if isinstance(sampler, Recent) and sampler.ratio == 1.0 and sampler.steps < room:
            room, kind = sampler.steps, "sampler draws from the newest {}"
    if rows > room:
        raise ValueError(f"{asks}, but the {kind.format(room)}; this would wait for ever")


def _asked(method: str, rows: int, state: Any) -> Array:
    """Returns whether the state's method ``method`` allows ``rows`` rows."""
    return doors.call(method, state, rows)

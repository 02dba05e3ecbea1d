"""One buffer for several threads: they change it in turn, and wait for what they need."""

import functools
import math
import threading
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import jax
import numpy as np
from jaxtyping import Array, Bool, PRNGKeyArray, PyTree

from jaxbuf.buffers import common, ops
from jaxbuf.buffers.hosted import Hosted
from jaxbuf.buffers.mixture import Mixture
from jaxbuf.buffers.options import check_options
from jaxbuf.buffers.sample import Sample
from jaxbuf.buffers.trajectory import TrajectoryBuffer
from jaxbuf.core import checks
from jaxbuf.core.calls import call
from jaxbuf.strategies.recent import Recent

State = TypeVar("State")
Result = TypeVar("Result")


class Stopped(Exception):
    """A holder was stopped while, or before, something was asked of it."""


class Holder(Generic[State]):
    """Holds a buffer, or any other immutable state, for threads that produce and consume.

    Whoever changes the state has it alone; everybody else waits for their turn, or until a
    condition on it is met. Each change wakes those who wait. The state itself never leaves: it is
    donated to what changes it, so look at it with ``read``.

    Args:
        state: What to hold. It is consumed: do not use it again.
        recheck: Seconds after which conditions are asked again though nothing has changed: for
            those that look at a clock, such as one of a ``ThroughputLimiter``. By default only a
            change wakes those who wait.

    Raises:
        ValueError: If ``recheck`` is no positive number.

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
        """Whether ``stop`` was called."""
        return self._stopped

    def apply(
        self,
        function: Callable[[State], tuple[State, Result]],
        *,
        when: Callable[[State], Any] | None = None,
        timeout: float | None = None,
    ) -> Result:
        """Change the state: ``state, result = function(state)``.

        Args:
            function: Gives the new state and a result. If it raises, the state stays as it was; if
                it donates the old one, it must not raise after that.
            when: What must be true of the state first; asked after every change, and every
                ``recheck`` seconds.
            timeout: Seconds to wait at most for that; by default there is no limit.

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
        """What ``function`` says of the state, which does not change; also after ``stop``.

        The result must not be the state, or a part of it: the next change consumes that. Copy it.

        Args:
            function: What to ask.
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
        """``jaxbuf.add`` to the buffer that is held; to a ``Queue`` as soon as all rows fit.

        Args:
            items: What to add.
            mask: Which rows to take; those masked out must fit as well.
            timeout: As for ``apply``.
            **options: Those of the buffer's own ``add``: ``priority``, ``score``, ``version``,
                ``session``, the ``env_ids`` of a ``TrajectoryBuffer``, or the ``part`` of a
                ``Mixture``.

        Raises:
            ValueError: If there are more rows than a ``Queue`` can hold.
            TimeoutError: If they did not fit in time.
            Stopped: If the holder was stopped, before or meanwhile.
        """
        when = None
        if hasattr(self._state, "can_add"):
            # Items without rows fit, so ``ops.add`` says at once what is wrong with them.
            rows = max((len(leaf) for leaf in jax.tree.leaves(items) if np.ndim(leaf)), default=0)
            _check_room(self._state, f"items asks for {rows} rows at a time", rows)
            when = functools.partial(_asked, "can_add", rows)

        def change(state: Any) -> tuple[Any, None]:
            return ops.add(state, items, mask=mask, **options), None

        self.apply(change, when=when, timeout=timeout)

    def sample(
        self,
        key: PRNGKeyArray,
        batch_size: int,
        *,
        least: int | None = None,
        timeout: float | None = None,
    ) -> Sample:
        """``jaxbuf.sample`` from the buffer that is held, as soon as there is enough in it.

        Args:
            key: A PRNG key.
            batch_size: Rows ``B``.
            least: How much there must be, for ``can_sample``; by default ``batch_size``.
            timeout: As for ``apply``.

        Raises:
            ValueError: If the buffer can never hold that much: items or, for a
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
            return ops.sample(state, key, batch_size)

        return self.read(
            draw, when=functools.partial(_asked, "can_sample", enough), timeout=timeout
        )

    def take(self, batch_size: int, *, timeout: float | None = None) -> Sample:
        """The oldest items of the ``Queue`` that is held, as soon as there are enough.

        Args:
            batch_size: Rows ``B``.
            timeout: As for ``apply``.

        Raises:
            ValueError: If the queue can never hold that much.
            TimeoutError: If there was not enough in time.
            Stopped: If the holder was stopped, before or meanwhile.
        """
        check_options(self._state, "take", {})
        rows = common.check_batch_size(batch_size)
        _check_room(self._state, f"batch_size asks for {rows} rows at a time", rows)

        def change(state: Any) -> tuple[Any, Sample]:
            return call(_take, state, rows, static=(1,), donate=True)

        return self.apply(
            change, when=functools.partial(_asked, "can_sample", rows), timeout=timeout
        )

    def stop(self) -> None:
        """Refuse whatever waits and all further changes with ``Stopped``; ``read`` still works."""
        with self._turn:
            self._stopped = True
            self._turn.notify_all()

    def _wait(self, when: Callable[[State], Any] | None, timeout: float | None) -> None:
        """Wait for a condition; the turn is ours before and after."""
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
    """Refuse to wait for what cannot come.

    Only the configuration is looked at, so that nobody has to wait for their turn to be told.

    Raises:
        ValueError: If the state can never hold so much.
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
    if isinstance(state, TrajectoryBuffer):
        room, kind = state.max_windows, "room is for {} windows"
    else:
        room, kind = getattr(state, "capacity", rows), "capacity is {}"
        sampler = getattr(state, "sampler", None)
        if isinstance(sampler, Recent) and sampler.ratio == 1.0 and sampler.steps < room:
            room, kind = sampler.steps, "sampler draws from the newest {}"
    if rows > room:
        raise ValueError(f"{asks}, but the {kind.format(room)}; this would wait for ever")


def _asked(method: str, rows: int, state: Any) -> Array:
    """Whether the state says yes to so many rows."""
    return call(_ask, state, method, rows, static=(1,))


def _ask(state: Any, method: str, rows: Any) -> Array:
    return getattr(state, method)(rows)


def _take(queue: Any, rows: int) -> Any:
    return queue.take(rows)

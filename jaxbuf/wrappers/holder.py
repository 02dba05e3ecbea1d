"""A buffer that several threads change in turn, and on which they wait for one another."""

import contextlib
import dataclasses
import functools
import math
import threading
import time
import warnings
from collections.abc import Callable, Generator
from typing import Any, Generic, Protocol, Self, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool

from jaxbuf.buffers import doors
from jaxbuf.buffers.arguments import check_batch_size
from jaxbuf.buffers.buffer import as_buffer, check_options, owns_items
from jaxbuf.buffers.operation import given
from jaxbuf.buffers.sample import Normalize, Sample, check_weighing
from jaxbuf.core import checks, trees
from jaxbuf.core.program import program
from jaxbuf.core.signals import DeferredSignals
from jaxbuf.core.sizes import check_count
from jaxbuf.core.slots import Slots
from jaxbuf.core.types import Arrays, Floats, Key, Number

State = TypeVar("State")
Result = TypeVar("Result")

# Seconds after which a limiter that depends on a clock is asked again.
_RECHECK = 0.1
_METHODS = ("can_insert", "can_sample", "inserted", "sampled")
# More rows, and more seconds, than there will ever be.
_MANY_ROWS = 2**31 - 1
_MANY_SECONDS = 1e9


class Limiter(Protocol):
    """Says when rows may be inserted and sampled, and counts them: any immutable object.

    A limiter that depends on a clock also has ``after(seconds)``, which returns it some time later.
    One that can tell also has ``most(method)``, the largest count that ``"can_insert"`` or
    ``"can_sample"`` ever allows.
    """

    def can_insert(self, size: int, count: int) -> object:
        """Returns whether ``count`` items may be inserted into a buffer of ``size``."""
        ...

    def can_sample(self, size: int, count: int) -> object:
        """Returns whether ``count`` items may be sampled from a buffer of ``size``."""
        ...

    def inserted(self, count: int) -> "Limiter":
        """Returns the limiter after an insert of ``count`` items."""
        ...

    def sampled(self, count: int) -> "Limiter":
        """Returns the limiter after a sample of ``count`` items."""
        ...


class Stopped(Exception):
    """Raised by calls of a holder that was stopped before or during the call.

    If an error stopped it, that is the ``__cause__``.
    """


class Holder(Generic[State]):
    """Holds a buffer, or any other immutable state, for threads that produce and consume.

    One thread at a time changes the state. Other threads wait for their turn, or until the state
    meets a condition. Each change wakes waiting threads. The state itself is never handed out,
    since it is donated to the functions that change it: use ``read`` to look at it.

    With a ``limiter``, ``add`` also waits until the limiter allows to insert so many rows, and
    ``sample`` and ``take`` until it allows to sample them. They count the rows afterwards. For
    rings, the inserted rows are steps. ``apply`` and ``read`` do not ask the limiter.

    The limiter holds an ``add`` back only while a sample could go on. As long as a ``sample``
    that was asked for is refused, for lack of items or by the limiter, rows are let in. They are
    counted, so samples make up for them later. So the two never wait for each other,
    however many rows they ask for. The error of a ``RateLimiter`` is never below its range, and
    once there are enough items, it returns into the range, or, if that is narrower than ``n *
    samples_per_insert + m``, into one that is so wide, for ``n`` rows inserted and ``m`` sampled at
    a time. Give the limiter a ``min_size`` of at least ``m`` to draw no more from the first rows.

    In a ``with`` statement, the holder stops at the end of the block. If the block raises an error,
    waiting threads raise ``Stopped`` with that error as the cause, instead of waiting forever.

    Ctrl-C, or any other signal whose handler raises, leaves the state as it was before or after a
    call, so that it can be saved: ``holder.read(lambda buffer: jaxbuf.save(path, buffer))``, or
    with its limiter, ``{"buffer": buffer, "limiter": holder.limiter}``. In the main thread the
    signal is handled when the call returns or has to wait. It interrupts waiting within a tenth of
    a second, and also the function that is passed to ``read``, but neither that of ``apply`` nor a
    compilation.

    Args:
        state: The state to hold. It is consumed: do not use it again.
        limiter: A ``RateLimiter``, a ``ThroughputLimiter``, or an object with their methods; None
            for no limit.
        recheck: Seconds after which conditions are checked again without a change, for conditions
            that depend on a clock. By default only a change wakes waiting threads; with a
            ``ThroughputLimiter`` the default is 0.1 seconds.

    Raises:
        ValueError: If ``recheck`` is not a positive number, ``limiter`` is not a limiter, or there
            is one and ``state`` is not a buffer.

    Example:
        >>> import jax, jax.numpy as jnp, jaxbuf, threading
        >>> holder = jaxbuf.Holder(jaxbuf.ItemBuffer.create(jnp.float32(0), capacity=8))
        >>> actor = threading.Thread(target=lambda: [holder.add(jnp.ones(2)) for _ in range(3)])
        >>> actor.start()
        >>> batch = holder.sample(jax.random.key(0), 4, timeout=60.0)  # waits for four items
        >>> actor.join()
        >>> batch.data.shape, int(holder.read(lambda buffer: buffer.size))
        ((4,), 6)

        A learner that draws each item twice on average, and an actor that waits for it:

        >>> buffer = jaxbuf.ItemBuffer.create(jnp.float32(0), capacity=8)
        >>> limiter = jaxbuf.RateLimiter.create(samples_per_insert=2.0, tolerance=8.0)
        >>> def act(holder):
        ...     try:
        ...         while True:
        ...             holder.add(jnp.ones(2))
        ...     except jaxbuf.Stopped:
        ...         pass
        >>> with jaxbuf.Holder(buffer, limiter=limiter) as holder:
        ...     actor = threading.Thread(target=act, args=(holder,))
        ...     actor.start()
        ...     for key in jax.random.split(jax.random.key(0), 10):
        ...         batch = holder.sample(key, 4, timeout=60.0)
        >>> actor.join()
        >>> bool(abs(holder.limiter.metrics()["error"] - 2.0) <= 8.0)
        True

    References:
        Cassirer et al., Reverb: A Framework for Experience Replay, 2021: the rate limiters of its
        tables.
    """

    def __init__(
        self, state: State, *, limiter: Limiter | None = None, recheck: float | None = None
    ) -> None:
        if recheck is not None:
            recheck = checks.check_number(
                "recheck", recheck, "None or seconds, more than 0", lambda x: 0 < x < math.inf
            )
        if limiter is not None:
            _check_limiter(limiter, state)
            if recheck is None and getattr(limiter, "after", None):
                recheck = _RECHECK
        self._state: Any = state
        self._limiter = limiter
        self._limiter_time = time.monotonic()
        self._recheck = recheck
        self._changed = threading.Condition()
        self._changes = 0  # the number of times that waiting threads were woken
        self._stopped = False
        self._cause: BaseException | None = None
        # The requests that were refused, and not granted since.
        self._refused: set[_Request] = set()
        # The smallest requests to insert, and to sample, so far.
        self._smallest: dict[bool, _Request] = {}
        # The seconds that requests to insert, and to sample, have waited.
        self._waited = {True: 0.0, False: 0.0}
        self._has_applied = False
        # The call that has the state, in the thread whose turn it is; None while that waits.
        self._under_way: str | None = None

    def __getstate__(self) -> object:
        # For `pickle` and `copy`, which would otherwise name a lock, or copy all but the arrays.
        raise TypeError(
            "a Holder can be neither pickled nor copied: its state belongs to the threads of this "
            "process; in another one send its arguments of add through a queue (jaxbuf.feed), and "
            "to keep the state: holder.read(lambda buffer: jaxbuf.save(path, buffer))"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.stop(error)

    @property
    def stopped(self) -> bool:
        """True once ``stop`` was called."""
        return self._stopped

    @property
    def limiter(self) -> Any:
        """The limiter with the counts of all rows so far; None without one."""
        with self._turn():
            return self._limiter_now()

    def metrics(self) -> dict[str, Any]:
        """Returns scalars to monitor: how long each side has waited for the other, and the limiter.

        Returns:
            ``seconds_to_add``, for which calls of ``add`` have waited until their rows fit and the
            limiter allowed them, and ``seconds_to_sample`` of ``sample`` and ``take``, summed over
            all threads since the beginning; and the metrics of the limiter, if it has any. If the
            first number grows, actors are ahead of the learner; if the second, they are behind.

        Example:
            >>> import jax, jax.numpy as jnp, jaxbuf
            >>> holder = jaxbuf.Holder(jaxbuf.ItemBuffer.create(jnp.float32(0), capacity=8))
            >>> holder.add(jnp.ones(4))
            >>> batch = holder.sample(jax.random.key(0), 4)
            >>> [round(seconds) for seconds in holder.metrics().values()]
            [0, 0]
        """
        metrics = getattr(self.limiter, "metrics", None)
        waited = {"seconds_to_add": self._waited[True], "seconds_to_sample": self._waited[False]}
        return waited if metrics is None else {**waited, **metrics()}

    def apply(
        self,
        function: Callable[[State], tuple[State, Result]],
        *,
        when: Callable[[State], object] | None = None,
        timeout: float | None = None,
    ) -> Result:
        """Changes the state: ``state, result = function(state)``.

        Args:
            function: Returns the new state and a result. It is called from Python each time, not
                traced. If it raises, the state is unchanged; once it has donated the old state, it
                must not raise. It must not call this holder, but use the state that it is given.
                Ctrl-C waits until it returns, so do there only what needs the state.
            when: A condition on the state that must be true first. It is called from Python after
                every change, and every ``recheck`` seconds.
            timeout: The most seconds to wait for the condition; by default there is no limit.

        Returns:
            The result.

        Raises:
            ValueError: If the function, or the condition, calls this holder.
            TimeoutError: If the condition was not met in time.
            Stopped: If the holder was stopped, before or meanwhile.
        """
        self._has_applied = True
        return self._apply("apply", function, when, timeout)

    def read(
        self,
        function: Callable[[State], Result],
        *,
        when: Callable[[State], object] | None = None,
        timeout: float | None = None,
    ) -> Result:
        """Returns ``function(state)`` without a change of the state; also works after ``stop``.

        The result must not be the state or a part of it, since the next change consumes that:
        return a copy instead.

        Args:
            function: A function of the state, called from Python. Of this holder it may only call
                ``read`` without a condition.
            when: As for ``apply``.
            timeout: As for ``apply``.

        Raises:
            ValueError: If the function, or the condition, calls this holder.
            TimeoutError: If the condition was not met in time.
            Stopped: If there is a condition and the holder was stopped, before or meanwhile.
        """
        # Where one function reads, and a signal handler in it, another one may.
        with self._turn("read", within="read" if when is None else None) as signals:
            if when is not None:
                self._wait(signals, when, timeout)
            with signals.passing():
                return function(self._state)

    def add(
        self,
        items: Arrays,
        *,
        mask: Bool[Array, "..."] | None = None,
        timeout: float | None = None,
        **options: Any,
    ) -> None:
        """Calls ``jaxbuf.add`` on the buffer; waits until all rows fit if it is a ``Queue``.

        Args:
            items: The items to add.
            mask: The rows to take; only these must fit.
            timeout: As for ``apply``.
            **options: Options of the buffer's own ``add``: ``priority``, ``score``, ``version``,
                ``session``, the ``env_ids`` of a ``TrajectoryBuffer``, or the ``part`` of a
                ``Mixture``.

        Raises:
            ValueError: If there are more rows than a ``Queue`` can hold, or than the limiter can
                ever allow; or if neither an ``add`` nor a ``take`` of the sizes so far can go on.
            TimeoutError: If the rows did not fit in time.
            Stopped: If the holder was stopped, before or meanwhile.
        """
        request = self._insert_request(items, mask, options.get("part"))
        with self._turn("add") as signals:
            self._wait_for(signals, request, timeout)
            self._state = doors.add(self._state, items, mask=mask, **options)
            self._count(request)
            self._wake()

    def sample(
        self,
        key: Key,
        batch_size: int,
        *,
        least: int | None = None,
        timeout: float | None = None,
        **options: Any,
    ) -> Sample:
        """Calls ``jaxbuf.sample`` on the buffer as soon as it holds enough.

        With ``beta`` it computes importance weights, ``batch.weights``, in the same turn: between
        two calls another thread may change the buffer. For the next batch of a pass use
        ``apply(lambda buffer: jaxbuf.next_batch(buffer, key, batch_size))``.

        Args:
            key: A PRNG key.
            batch_size: Number of rows ``B``.
            least: The number for ``can_sample`` to wait for; by default ``batch_size``.
            timeout: As for ``apply``.
            **options: Options of the buffer's own ``sample``: ``beta``, ``normalize`` and
                ``within``, or the ``sequence_length`` of a ``TrajectoryBuffer``.

        Returns:
            A ``Sample`` of ``B`` rows.

        Raises:
            ValueError: If the buffer can never hold that many items or, for a
                ``TrajectoryBuffer``, windows, or as many as the limiter wants for it; if the
                limiter can never allow that many rows; or if the buffer does not take one of the
                options.
            TimeoutError: If there was not enough in time.
            Stopped: If the holder was stopped, before or meanwhile.

        Example:
            >>> import jax, jax.numpy as jnp, jaxbuf
            >>> buffer = jaxbuf.ItemBuffer.create(
            ...     jnp.float32(0), capacity=8, sampler=jaxbuf.Prioritized()
            ... )
            >>> holder = jaxbuf.Holder(buffer)
            >>> holder.add(jnp.arange(4.0), priority=jnp.array([1.0, 1.0, 2.0, 4.0]))
            >>> batch = holder.sample(jax.random.key(0), 4, beta=0.4)
            >>> batch.data.shape, batch.weights.shape, float(batch.weights.max())
            ((4,), (4,), 1.0)
        """
        options = given(options, ("normalize",))
        check_options(self._state, "sample", options)
        # Before it waits.
        check_weighing(*map(options.get, ("beta", "normalize", "within"), (None, ..., None)))
        rows = needs = check_batch_size(batch_size)
        asks_for_rows = asks = f"batch_size asks for {rows} rows at a time"
        if least is not None:
            needs = check_count("least", least)
            asks = f"least asks for {needs} rows at a time"
        length = options.get("sequence_length")
        if length is not None:
            length = check_count("sequence_length", length)
        buffer = as_buffer(self._state)
        buffer.check_room(asks, needs, length)
        _check_rate(self._limiter, asks_for_rows, "can_sample", rows)
        inner, _ = buffer.inside()
        if not (owns_items(inner) and inner.num_envs):
            length = None
        request = _Request(asks, False, rows, needs, length)
        with self._turn("sample") as signals:
            self._wait_for(signals, request, timeout)
            batch = doors.sample(self._state, key, batch_size, **options)
            if self._limiter is not None:
                self._count(request)
                self._wake()
            return batch

    def sample_with_weights(
        self,
        key: Key,
        batch_size: int,
        beta: float | Number,
        normalize: Normalize | None = "batch",
        *,
        least: int | None = None,
        timeout: float | None = None,
        **options: Any,
    ) -> tuple[Sample, Floats]:
        """Deprecated: ``sample(key, batch_size, beta=beta)`` returns them as ``batch.weights``.

        Args:
            key: As for ``sample``.
            batch_size: As for ``sample``.
            beta: As for ``jaxbuf.importance_weights``.
            normalize: As for ``jaxbuf.importance_weights``.
            least: As for ``sample``.
            timeout: As for ``sample``.
            **options: As for ``sample``.

        Returns:
            The ``Sample``, and its weights, ``[B]``.

        Raises:
            ValueError: As for ``sample`` and ``jaxbuf.importance_weights``.
            TimeoutError: If there was not enough in time.
            Stopped: If the holder was stopped, before or meanwhile.
        """
        warnings.warn(
            "sample_with_weights goes in version 0.5; use holder.sample(key, batch_size, "
            "beta=beta), which returns the weights as batch.weights",
            DeprecationWarning,
            stacklevel=2,
        )
        options |= {"beta": beta, "normalize": normalize}
        batch = self.sample(key, batch_size, least=least, timeout=timeout, **options)
        return batch.replace(weights=None), batch.weights

    def update_priority(
        self, slots: Slots, priority: Floats, *, timeout: float | None = None, **options: Any
    ) -> None:
        """Calls ``jaxbuf.update_priority`` on the buffer.

        Args:
            slots: The slots of the items, ``sample.slots``, ``[B]``.
            priority: The new priorities, ``[B]``.
            timeout: As for ``apply``.
            **options: Options of the buffer's own ``update_priority``, such as ``mask``.

        Raises:
            ValueError: If the buffer has no priorities or does not take one of the options.
            Stopped: If the holder was stopped.
        """

        def change(state: Any) -> tuple[Any, None]:
            return doors.update_priority(state, slots, priority, **options), None

        self._apply("update_priority", change, None, timeout)

    def take(self, batch_size: int, *, timeout: float | None = None) -> Sample:
        """Takes the oldest items from the ``Queue`` as soon as it holds enough.

        Args:
            batch_size: Number of rows ``B``.
            timeout: As for ``apply``.

        Returns:
            A ``Sample`` of the items, the oldest first.

        Raises:
            ValueError: If the queue can never hold that many items, or the limiter can never allow
                them; or if neither an ``add`` nor a ``take`` of the sizes so far can go on.
            TimeoutError: If there was not enough in time.
            Stopped: If the holder was stopped, before or meanwhile.
        """
        check_options(self._state, "take", {})
        rows = check_batch_size(batch_size)
        request = _Request(f"batch_size asks for {rows} rows at a time", False, rows, rows)
        as_buffer(self._state).check_room(request.asks, rows)
        _check_rate(self._limiter, request.asks, "can_sample", rows)
        with self._turn("take") as signals:
            self._wait_for(signals, request, timeout)
            self._state, batch = doors.take(self._state, rows)
            self._count(request)
            self._wake()
            return batch

    def stop(self, cause: BaseException | None = None) -> None:
        """Makes waiting calls and all later changes raise ``Stopped``; ``read`` still works.

        Args:
            cause: The error because of which it stops, if any, which ``Stopped`` then names. Call
                this in an actor that cannot go on, so that the learner does not wait for it.
        """
        if not self._stopped:
            # At once, in case that an interrupt comes while this waits for its turn.
            self._cause, self._stopped = cause, True
        with self._turn():
            pass

    @contextlib.contextmanager
    def _turn(
        self, call: str | None = None, *, within: str | None = None
    ) -> Generator[DeferredSignals]:
        """The turn of one thread, in which no signal comes between two steps.

        Args:
            call: The name of the call, if it uses the state.
            within: The name of a call that this one may come within, in the same thread.

        Raises:
            ValueError: If it comes within another call, which has the state.
        """
        with DeferredSignals() as signals:
            while not self._changed.acquire(timeout=signals.pause):
                signals.deliver()
            outer = self._under_way
            try:
                if call is not None:
                    if outer not in (None, within):
                        raise ValueError(
                            f"holder.{call} was called within holder.{outer}, which has the state; "
                            "the function there is given the state itself: use the functions of "
                            f"jaxbuf on that, or call holder.{call} after it"
                        )
                    self._under_way = call
                yield signals
            finally:
                self._under_way = outer
                if self._stopped:
                    self._wake()
                self._changed.release()

    def _apply(
        self,
        call: str,
        function: Callable[[State], tuple[State, Result]],
        when: Callable[[State], object] | None,
        timeout: float | None,
    ) -> Result:
        with self._turn(call) as signals:
            self._wait(signals, when, timeout)
            self._state, result = function(self._state)
            self._wake()
            return result

    def _insert_request(self, items: Any, mask: Any, part: Any) -> "_Request":
        """Returns the request of an ``add``."""
        needs = rows = 0
        if as_buffer(self._state).is_queue:
            # Items without rows fit, so that ``doors.add`` raises at once if they are malformed.
            needs = max((len(leaf) for leaf in jax.tree.leaves(items) if np.ndim(leaf)), default=0)
            if mask is not None:
                needs = min(needs, _count_taken(mask))
            as_buffer(self._state).check_room(f"items asks for {needs} rows at a time", needs)
        if self._limiter is not None:
            rows = _count_rows(self._state, items, mask, part)
            _check_rate(self._limiter, f"items asks for {rows} rows at a time", "can_insert", rows)
        return _Request(f"items asks for {needs or rows} rows at a time", True, rows, needs)

    def _limiter_now(self) -> Any:
        """Returns the limiter at the present time; the caller has the lock."""
        if after := getattr(self._limiter, "after", None):
            now = time.monotonic()
            self._limiter, self._limiter_time = after(now - self._limiter_time), now
        return self._limiter

    def _count(self, request: "_Request") -> None:
        """Counts the rows of a request in the limiter; the caller has the lock."""
        if self._limiter is not None:
            limiter = self._limiter_now()
            counted = limiter.inserted if request.inserts else limiter.sampled
            self._limiter = counted(request.rows)

    def _wait_for(
        self, signals: DeferredSignals, request: "_Request", timeout: float | None
    ) -> None:
        """Waits until a request is granted; the caller has the lock before and after."""
        smallest = self._smallest.setdefault(request.inserts, request)
        if 0 < request.needs < smallest.needs:
            self._smallest[request.inserts] = request
        grants = functools.partial(self._grants, request)
        began = time.monotonic()
        try:
            self._wait(signals, grants, timeout, lambda: self._explain(request))
        finally:
            self._waited[request.inserts] += time.monotonic() - began

    def _grants(self, request: "_Request", state: object) -> bool:
        """Returns whether a request can go on now, and remembers it if not.

        Raises:
            ValueError: If it never can.
        """
        if self._can_go_on(request, state):
            self._refused.discard(request)
            return True
        if request not in self._refused:
            self._refused.add(request)
            self._check_capacity(request, state)
            # Inserts that the limiter held back may go on, so that this sample can.
            self._wake()
        self._check_stuck(request, state)
        return False

    def _can_go_on(self, request: "_Request", state: object) -> bool:
        """Returns whether a request fits the state, and the limiter does not hold it back."""
        if not request.fits(state):
            return False
        if self._limiter is None or request.rows == 0 or self._limiter_allows(request, state):
            return True
        # The limiter holds inserts back until samples catch up, so not while samples are refused.
        return request.inserts and self._is_sample_refused(state)

    def _is_sample_refused(self, state: object) -> bool:
        """Returns whether a sample was refused that could still not go on."""
        samples = {request for request in self._refused if not request.inserts}
        refused = {request for request in samples if not self._can_go_on(request, state)}
        self._refused -= samples - refused
        return bool(refused)

    def _limiter_allows(self, request: "_Request", state: object) -> bool:
        limiter = self._limiter_now()
        allows = limiter.can_insert if request.inserts else limiter.can_sample
        # As a Python number, since the state may be on other devices than the limiter.
        return bool(allows(int(_size(state)), request.rows))

    def _check_capacity(self, request: "_Request", state: object) -> None:
        """Checks that the limiter would allow to sample after any number of inserts.

        Raises:
            ValueError: If it never does, however full the buffer is.
        """
        capacity = getattr(state, "capacity", math.inf)
        if self._limiter is None or request.inserts or not math.isfinite(capacity):
            return
        limiter, after = self._limiter, getattr(self._limiter, "after", None)
        latest = limiter if after is None else after(_MANY_SECONDS)
        if not bool(latest.inserted(_MANY_ROWS).can_sample(int(capacity), request.rows)):
            raise ValueError(
                f"{request.asks}, but limiter never allows that in a buffer for {capacity} rows; "
                "this would wait for ever: make the capacity larger, or what limiter wants in the "
                f"buffer smaller: {limiter}"
            )

    def _check_stuck(self, request: "_Request", state: Any) -> None:
        """Checks that a ``Queue`` is not stuck: too full for an insert, and too empty for a take.

        Raises:
            ValueError: If both were refused, and none of the sizes that were asked for so far fits.
        """
        smallest = self._smallest.values()
        if not as_buffer(state).is_queue or self._has_applied or len(smallest) < 2:
            return
        if all(other.inserts == request.inserts for other in self._refused):
            return
        # A limiter that depends on a clock may allow a take later.
        final = self._limiter is not None and getattr(self._limiter, "after", None) is None
        for other in smallest:
            refused = not other.inserts and final and not self._limiter_allows(other, state)
            if other.fits(state) and not refused:
                return
        insert, take = (self._smallest[inserts] for inserts in (True, False))
        advice = (
            "let the limiter sample each row once, or leave it out"
            if take.fits(state)
            else f"make the capacity at least {insert.needs + take.needs}, or add or take fewer "
            "rows at a time"
        )
        # Waiting threads wake up to raise this error as well.
        self._wake()
        raise ValueError(
            f"the queue holds {int(_size(state))} items of at most {state.capacity}, so that "
            f"neither an add of {insert.needs} rows nor a take of {take.needs} can go on; this "
            f"would wait for ever: {advice}{self._limits()}"
        )

    def _explain(self, request: "_Request") -> str:
        """Returns the reason why a request is not granted."""
        if not request.fits(self._state):
            return f"{request.asks}, but {request.describe(self._state)}"
        return f"{request.asks}, which the limiter does not allow now{self._limits()}"

    def _limits(self) -> str:
        """Returns the numbers of the limiter, as the end of a message."""
        metrics = getattr(self._limiter, "metrics", None)
        if metrics is None:
            return ""
        numbers = [f"{name} {float(value):g}" for name, value in metrics().items()]
        return f"; the limiter is at {', '.join(numbers)}"

    def _wait(
        self,
        signals: DeferredSignals,
        when: Callable[[State], object] | None,
        timeout: float | None,
        explain: Callable[[], str] = lambda: "the condition is not met",
    ) -> None:
        """Waits for a condition; the caller has the lock before and after."""
        deadline = math.inf
        if timeout is not None:
            timeout = checks.check_number(
                "timeout", timeout, "seconds, or None", lambda x: not math.isnan(x)
            )
            deadline = time.monotonic() + timeout
        recheck = math.inf if self._recheck is None else self._recheck
        while not self._stopped:
            if when is None or bool(when(self._state)):
                return
            now = time.monotonic()
            if now >= deadline:
                raise TimeoutError(f"the state did not get there within {timeout} s: {explain()}")
            self._pause(signals, min(deadline, now + recheck))
        if self._cause is None:
            raise Stopped("the holder was stopped")
        kind = type(self._cause).__name__
        raise Stopped(f"the holder was stopped by {kind}: {self._cause}") from self._cause

    def _wake(self) -> None:
        """Wakes the threads that wait for a change; the caller has the lock."""
        self._changes += 1
        self._changed.notify_all()

    def _pause(self, signals: DeferredSignals, end: float) -> None:
        """Waits for a change until a time, without the lock."""
        changes, call = self._changes, self._under_way
        # Meanwhile others may have their turn, and so may the handlers of signals.
        self._under_way = None
        try:
            while (left := end - time.monotonic()) > 0:
                if signals.deliver():
                    return
                self._changed.wait(min(left, signals.pause))
                # A change that began before the pause was over, and ended after it, has woken
                # nobody.
                if self._changes != changes:
                    return
        finally:
            self._under_way = call


@dataclasses.dataclass(frozen=True)
class _Request:
    """A request to insert, or to sample.

    Attributes:
        asks: The request in words, such as "batch_size asks for 8 rows at a time".
        inserts: Whether it inserts.
        rows: The number of rows that the limiter is asked about.
        needs: The number of rows that the buffer must have room for, or of items or windows that it
            must hold; 0 if any state will do.
        length: The length of windows, if it is not that of the buffer.
    """

    asks: str
    inserts: bool
    rows: int
    needs: int
    length: int | None = None

    def fits(self, state: Any) -> bool:
        """Returns whether the buffer has enough room, or items."""
        if self.needs == 0:
            return True
        if self.length is not None:
            return bool(_count_windows(state, self.length) >= self.needs)
        can_go_on = type(state).can_add if self.inserts else type(state).can_sample
        return bool(doors.call(can_go_on, state, self.needs))

    def describe(self, state: Any) -> str:
        """Returns the present contents of the buffer, for an error."""
        if self.length is not None:
            windows = int(_count_windows(state, self.length))
            return f"the buffer holds {windows} windows of {self.length} steps"
        size, capacity = getattr(state, "size", "some"), getattr(state, "capacity", "some")
        contents = f"the buffer holds {size} of at most {capacity} rows"
        support = getattr(state, "support", None)
        if self.inserts or support is None:
            return contents
        unit = "windows" if as_buffer(state).num_envs else "items"
        return f"{contents}, and {int(support().count)} {unit} can be drawn"


def _check_limiter(limiter: object, state: object) -> None:
    """Checks that this is a limiter, and that the state has a size to ask it about.

    Raises:
        ValueError: If it does not.
    """
    if not all(hasattr(limiter, name) for name in _METHODS) or isinstance(limiter, type):
        raise ValueError(
            f"limiter is {checks.name_of(limiter)}; expected None, a jaxbuf.RateLimiter, a "
            f"jaxbuf.ThroughputLimiter or an object with {', '.join(_METHODS)}"
        )
    check_options(state, "add", {}, "state")
    if not hasattr(type(state), "size"):
        raise ValueError(
            f"state is {checks.kind_of(state)}, which has no size for limiter to judge; pass a "
            "buffer, or leave limiter out"
        )


def _check_rate(limiter: object, asks: str, method: str, rows: int) -> None:
    """Checks that a limiter can ever allow so many rows at a time, if it has ``most``.

    Raises:
        ValueError: If it never does.
    """
    most = getattr(limiter, "most", None)
    if most is not None and rows > most(method):
        raise ValueError(
            f"{asks}, but limiter never allows more than {most(method)}; this would wait for ever: "
            "give it a larger tolerance"
        )


def _count_taken(mask: Any) -> int:
    """Returns the number of rows that a mask takes; 0 if ``add`` will raise."""
    is_mask = getattr(mask, "dtype", None) == np.bool_
    return int(np.count_nonzero(np.asarray(mask))) if is_mask else 0


def _count_rows(state: Any, items: Any, mask: Any, part: Any) -> int:
    """Returns the number of rows, or steps, that an ``add`` inserts; 0 if it will raise."""
    if mask is not None:
        return _count_taken(mask)
    members = as_buffer(as_buffer(state).inside()[0]).members
    if isinstance(part, int) and 0 <= part < len(members):
        return _count_rows(members[part], items, mask, None)
    try:
        item = as_buffer(state).example
    except ValueError:
        item = None
    leaves = jax.tree.leaves(trees.match(item, items))
    for leaf, like in zip(leaves, jax.tree.leaves(item), strict=False):
        return math.prod(np.shape(leaf)[: np.ndim(leaf) - len(like.shape)])
    return 0


@program(static=("sequence_length",))
def _count_windows(state: Any, sequence_length: Any) -> Array:
    rings: Any = as_buffer(state).inside()[0].rings
    return jnp.sum(rings.replace(sequence_length=sequence_length).size)


@program()
def _size(state: Any) -> Array:
    return state.size

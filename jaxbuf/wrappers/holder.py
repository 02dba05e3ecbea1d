"""A buffer for several threads, which change it in turn and wait until they can go on."""

import functools
import math
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Generic, Protocol, Self, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, PRNGKeyArray, PyTree

from jaxbuf.buffers import common, doors
from jaxbuf.buffers.buffer import as_buffer
from jaxbuf.buffers.created import is_created
from jaxbuf.buffers.options import check_options
from jaxbuf.buffers.sample import Sample
from jaxbuf.core import checks, trees
from jaxbuf.core.program import program
from jaxbuf.core.slots import Slots

State = TypeVar("State")
Result = TypeVar("Result")

# Seconds after which a limiter that depends on a clock is asked again.
_RECHECK = 0.1
_METHODS = ("can_insert", "can_sample", "inserted", "sampled")


class Limiter(Protocol):
    """Says when rows may be inserted and sampled, and counts them: any immutable object.

    A limiter that depends on a clock also has ``after(seconds)``, which returns it some time later.
    One that can tell also has ``most(method)``, the largest count that ``"can_insert"`` or
    ``"can_sample"`` ever allows.
    """

    def can_insert(self, size: int, count: int) -> Any:
        """Returns whether ``count`` items may be inserted into a buffer of ``size``."""
        ...

    def can_sample(self, size: int, count: int) -> Any:
        """Returns whether ``count`` items may be sampled from a buffer of ``size``."""
        ...

    def inserted(self, count: int) -> Any:
        """Returns the limiter after an insert of ``count`` items."""
        ...

    def sampled(self, count: int) -> Any:
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

    In a ``with`` statement, the holder stops at the end of the block. If the block raises an error,
    waiting threads raise ``Stopped`` with that error as the cause, instead of waiting forever.

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
            if recheck is None and _optional(limiter, "after"):
                recheck = _RECHECK
        self._state = state
        self._limiter: Any = limiter
        self._asked = time.monotonic()
        self._recheck = recheck
        self._turn = threading.Condition()
        self._stopped = False
        self._cause: BaseException | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop(error)

    @property
    def stopped(self) -> bool:
        """True once ``stop`` was called."""
        return self._stopped

    @property
    def limiter(self) -> Any:
        """The limiter with the counts of all rows so far; None without one."""
        with self._turn:
            return self._limiter_now()

    def apply(
        self,
        function: Callable[[State], tuple[State, Result]],
        *,
        when: Callable[[State], Any] | None = None,
        timeout: float | None = None,
    ) -> Result:
        """Changes the state: ``state, result = function(state)``.

        Args:
            function: Returns the new state and a result. It is called from Python each time, not
                traced. If it raises, the state is unchanged; once it has donated the old state, it
                must not raise.
            when: A condition on the state that must be true first. It is called from Python after
                every change, and every ``recheck`` seconds.
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
            function: A function of the state, called from Python.
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
            ValueError: If there are more rows than a ``Queue`` can hold, or than the limiter can
                ever allow.
            TimeoutError: If the rows did not fit in time.
            Stopped: If the holder was stopped, before or meanwhile.
        """
        when = None
        if as_buffer(self._state).is_queue:
            # Items without rows fit, so that ``doors.add`` raises at once if they are malformed.
            most = max((len(leaf) for leaf in jax.tree.leaves(items) if np.ndim(leaf)), default=0)
            as_buffer(self._state).check_room(f"items asks for {most} rows at a time", most)
            when = functools.partial(_asked, "can_add", most)

        rows = 0
        if self._limiter is not None:
            rows = _count_rows(self._state, items, mask, options.get("part"))
            _check_rate(self._limiter, f"items asks for {rows} rows at a time", "can_insert", rows)

        with self._turn:
            self._wait(self._allowed("can_insert", rows, when), timeout)
            self._state = doors.add(cast("Any", self._state), items, mask=mask, **options)
            self._count("inserted", rows)
            self._turn.notify_all()

    def sample(
        self,
        key: PRNGKeyArray,
        batch_size: int,
        *,
        least: int | None = None,
        timeout: float | None = None,
        **options: Any,
    ) -> Sample:
        """Calls ``jaxbuf.sample`` on the buffer as soon as it holds enough.

        Args:
            key: A PRNG key.
            batch_size: Number of rows ``B``.
            least: The number for ``can_sample`` to wait for; by default ``batch_size``.
            timeout: As for ``apply``.
            **options: Options of the buffer's own ``sample``, such as the ``sequence_length`` of a
                ``TrajectoryBuffer``.

        Returns:
            A ``Sample`` of ``B`` rows.

        Raises:
            ValueError: If the buffer can never hold that many items or, for a
                ``TrajectoryBuffer``, windows; if the limiter can never allow that many rows; or if
                the buffer does not take one of the options.
            TimeoutError: If there was not enough in time.
            Stopped: If the holder was stopped, before or meanwhile.
        """
        given = {name: value for name, value in options.items() if value is not None}
        check_options(self._state, "sample", given)
        rows = enough = common.check_batch_size(batch_size)
        asks = f"batch_size asks for {enough} rows at a time"
        if least is not None:
            enough = common.check_count("least", least)
            asks = f"least asks for {enough} rows at a time"
        length = given.get("sequence_length")
        if length is not None:
            length = common.check_count("sequence_length", length)
        state = as_buffer(self._state)
        state.check_room(asks, enough, length)
        _check_rate(self._limiter, f"batch_size asks for {rows} rows at a time", "can_sample", rows)
        when = functools.partial(_asked, "can_sample", enough)
        one, _ = state.inside()
        if length is not None and is_created(one) and one.num_envs:
            when = functools.partial(_has_windows, length, enough)
        with self._turn:
            self._wait(self._allowed("can_sample", rows, when), timeout)
            batch = doors.sample(cast("Any", self._state), key, batch_size, **given)
            if self._limiter is not None:
                self._count("sampled", rows)
                self._turn.notify_all()
            return batch

    def update_priority(
        self,
        slots: Slots,
        priority: Float[Array, " B"],
        *,
        timeout: float | None = None,
        **options: Any,
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

        self.apply(change, timeout=timeout)

    def take(self, batch_size: int, *, timeout: float | None = None) -> Sample:
        """Takes the oldest items from the ``Queue`` as soon as it holds enough.

        Args:
            batch_size: Number of rows ``B``.
            timeout: As for ``apply``.

        Returns:
            A ``Sample`` of the items, the oldest first.

        Raises:
            ValueError: If the queue can never hold that many items, or the limiter can never allow
                them.
            TimeoutError: If there was not enough in time.
            Stopped: If the holder was stopped, before or meanwhile.
        """
        check_options(self._state, "take", {})
        rows = common.check_batch_size(batch_size)
        as_buffer(self._state).check_room(f"batch_size asks for {rows} rows at a time", rows)
        when = functools.partial(_asked, "can_sample", rows)
        with self._turn:
            self._wait(self._allowed("can_sample", rows, when), timeout)
            taken: tuple[Any, Sample] = doors.take(cast("Any", self._state), rows)
            self._state, batch = taken
            self._count("sampled", rows)
            self._turn.notify_all()
            return batch

    def stop(self, cause: BaseException | None = None) -> None:
        """Makes waiting calls and all later changes raise ``Stopped``; ``read`` still works.

        Args:
            cause: The error because of which it stops, if any, which ``Stopped`` then names. Call
                this in an actor that cannot go on, so that the learner does not wait for it.
        """
        with self._turn:
            if not self._stopped:
                self._stopped, self._cause = True, cause
            self._turn.notify_all()

    def _allowed(
        self, question: str, rows: int, when: Callable[[Any], Any] | None
    ) -> Callable[[Any], Any] | None:
        """Returns a condition: ``when``, and the limiter's answer."""
        if self._limiter is None:
            return when

        def allowed(state: Any) -> bool:
            if when is not None and not bool(when(state)):
                return False
            # As a Python number, since the state may be on other devices than the limiter.
            size = int(_size(state))
            return bool(getattr(self._limiter_now(), question)(size, rows))

        return allowed

    def _limiter_now(self) -> Any:
        """Returns the limiter at the present time; the caller has the lock."""
        if after := _optional(self._limiter, "after"):
            now = time.monotonic()
            self._limiter, self._asked = after(now - self._asked), now
        return self._limiter

    def _count(self, event: str, rows: int) -> None:
        """Tells the limiter of an event; the caller has the lock."""
        if self._limiter is not None:
            self._limiter = getattr(self._limiter_now(), event)(rows)

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
        if self._cause is None:
            raise Stopped("the holder was stopped")
        kind = type(self._cause).__name__
        raise Stopped(f"the holder was stopped by {kind}: {self._cause}") from self._cause


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


def _optional(limiter: object, method: str) -> Callable[..., Any] | None:
    """Returns a method that a limiter need not have, or None."""
    return getattr(limiter, method, None)


def _check_rate(limiter: object, asks: str, method: str, rows: int) -> None:
    """Checks that a limiter can ever allow so many rows at a time, as far as it is known.

    Raises:
        ValueError: If it never does.
    """
    most = _optional(limiter, "most")
    if most is not None and rows > most(method):
        raise ValueError(
            f"{asks}, but limiter never allows more than {most(method)}; this would wait for ever: "
            "give it a larger tolerance"
        )


def _count_rows(state: Any, items: Any, mask: Any, part: Any) -> int:
    """Returns the number of rows, or steps, that an ``add`` inserts; 0 if it will raise."""
    if mask is not None:
        return int(np.sum(np.asarray(mask, bool)))
    members = as_buffer(as_buffer(state).inside()[0]).members
    if isinstance(part, int) and 0 <= part < len(members):
        return _count_rows(members[part], items, mask, None)
    try:
        item = as_buffer(state).example
    except ValueError:
        item = None
    for leaf, like in zip(
        jax.tree.leaves(trees.match(item, items)), jax.tree.leaves(item), strict=False
    ):
        return math.prod(np.shape(leaf)[: np.ndim(leaf) - len(like.shape)])
    return 0


def _has_windows(sequence_length: int, rows: int, state: Any) -> Array:
    """Returns whether rings hold so many windows of a length, all shards together."""
    return _count_windows(state, sequence_length) >= rows


@program(static=("sequence_length",))
def _count_windows(state: Any, sequence_length: Any) -> Array:
    rings: Any = as_buffer(state).inside()[0].rings
    return jnp.sum(rings.replace(sequence_length=sequence_length).size)


@program()
def _size(state: Any) -> Array:
    return state.size


def _asked(method: str, rows: int, state: Any) -> Array:
    """Returns whether the state's method ``method`` allows ``rows`` rows."""
    return doors.call(method, state, rows)

"""A worker's end of the free-running exchange: it sends items at its own pace."""

import collections
import functools
import weakref
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Self, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, PyTree

from jaxbuf.buffers.operation import DTYPES, INFINITE
from jaxbuf.core import checks, numbers, trees
from jaxbuf.core.donation import check_not_donated
from jaxbuf.core.leaves import to_host
from jaxbuf.core.signals import DeferredSignals
from jaxbuf.core.sizes import check_count
from jaxbuf.core.slots import Slots
from jaxbuf.core.types import Arrays, Count, Floats, Mask
from jaxbuf.mpi import wire, worker_state
from jaxbuf.mpi.baseline import BaselineFilter, check_filter
from jaxbuf.mpi.batch import Batch, Reply, uses_score
from jaxbuf.mpi.layout import Communicators
from jaxbuf.mpi.manager import Manager, outline
from jaxbuf.mpi.serve import UPDATES, schemas
from jaxbuf.mpi.wire import ExchangeError, Kind, Message
from jaxbuf.mpi.worker_state import WorkerState

Mode = Literal["sync", "deferred", "pipelined"]


class Answer(NamedTuple):
    """The manager's answer to a batch.

    Attributes:
        scores: The scores of the batch, NumPy arrays.
        baseline: The lowest score that is worth sending; −inf before it is known.
        sequence: The number of the batch among the batches of this worker, counted from 1.
        slots: The slots of the rows of the batch in the manager's buffer, NumPy arrays ``[B]``, for
            a worker that asks for them; None for others. The rows are those of all adds of the
            message, in order; a row that was not sent or not stored has index ``capacity``.
    """

    scores: dict[str, np.ndarray]
    baseline: float
    sequence: int
    slots: Slots | None = None


class Drained(NamedTuple):
    """The answers that were left when a worker was drained.

    Attributes:
        answers: Answers that were not returned before, in order.
        missing: The numbers of batches without an answer. The manager may have stored them or not.
        reason: The reason why something is missing; empty if nothing is.
    """

    answers: tuple[Answer, ...]
    missing: tuple[int, ...]
    reason: str


class Worker:
    """A worker's connection to the manager of its group.

    After every ``every`` adds it sends the rows that were added since the last message, or only the
    rows that the filter lets pass. The ``mode`` determines when answers are returned:

    * ``"sync"``: an add that sends waits for its answer and returns it.
    * ``"deferred"``: it waits until its batch has left, and returns the answer to the batch before;
      the first one returns None.
    * ``"pipelined"``: it waits only while ``in_flight`` batches are unanswered, and returns the
      oldest answer that has come and was not returned before.

    Each answer is returned once, in order. At the end of a ``with`` block the worker sends what is
    left, collects the answers and leaves; it waits until all workers of the group leave. A worker
    that left early, for example after an error, may begin anew once all have left. Messages that it
    sends earlier are refused.

    Args:
        communicators: The communicators of this rank.
        manager: Makes the manager, given the number of its workers. Only the shapes and the
            configuration of the result are used.
        rows: The largest number of rows of a message, at least ``every`` times the rows of an add,
            and the same as on the manager.
        every: The number of adds from one message to the next.
        mode: ``"sync"``, ``"deferred"`` or ``"pipelined"``; see above.
        filter: Chooses the items to send; None sends all of them.
        scoring_only: If True, items are padded trajectories ``[B, T, ...]`` with a ``mask``
            ``[B, T]``, and their last states are sent; the buffer's example is a single state.
        in_flight: The largest number of unanswered batches in ``"pipelined"`` mode.
        slots: If True, answers have the slots of the rows, by which ``update_score`` and
            ``update_priority`` change the manager's items. An answer has 8 more bytes for each row
            of the largest message.
        timeout: The longest time to wait for the manager, in seconds; None waits forever.
        state: A state to continue from, such as one from a checkpoint.

    Raises:
        ValueError: If this rank is not a worker, or an argument is out of its range.

    Example:
        See ``serve``, whose example shows both ends.
    """

    def __init__(
        self,
        communicators: Communicators,
        manager: Callable[[int], Manager],
        *,
        rows: int,
        every: int = 1,
        mode: Mode = "sync",
        filter: BaselineFilter | None = None,  # noqa: A002
        scoring_only: bool = False,
        in_flight: int = 2,
        slots: bool = False,
        timeout: float | None = 600.0,
        state: WorkerState | None = None,
    ) -> None:
        group = communicators.group
        if group is None or communicators.agents is None:
            raise ValueError("this rank is not a worker; only the workers of a group have one")
        checks.check_choice("mode", mode, get_args(Mode))
        check_filter(filter)
        self._rows = check_count("rows", rows)
        self._every = check_count("every", every)
        in_flight = check_count("in_flight", in_flight)
        self._in_flight = in_flight if mode == "pipelined" else 1
        self._mode: Mode = mode
        timeout = checks.check_seconds("timeout", timeout)
        scoring_only = checks.check_flag("scoring_only", scoring_only)
        self._slots = checks.check_flag("slots", slots)

        self._outline = shapes = outline(manager, group.Get_size() - 1)
        self._state = worker_state.initial_state(shapes.buffer.data, self._rows, filter, state)
        self._step = functools.partial(
            worker_state.step, scoring_only=scoring_only, needs_score=uses_score(shapes.buffer)
        )
        # Then rows are sent at once, without a copy in the state.
        self._sends_all = self._every == 1 and filter is None and not scoring_only
        # The shapes and dtypes of batches that were checked.
        self._checked: set[Any] = set()
        # The same numbers as in `state.place`; reading that would wait for the device.
        self._kept, self._adds = (int(x) for x in self._state.place)

        # The numbers of unanswered batches, in rising order, and the rows of each of them.
        self._waiting: dict[int, int] = {}
        self._answers: collections.deque[Answer] = collections.deque()
        # The number of each message that was refused, and the reason.
        self._refused: list[tuple[int, str]] = []
        # The reason why the manager cannot go on.
        self._failure = ""
        self._baseline = np.float32(self._state.baseline)
        self._counts = dict.fromkeys(("answered", "refused", "given_up", "late"), 0)
        self._batches, self._requests = int(self._state.metrics()["batches"]), 0
        self._metadata: dict[int, dict[str, Any]] = {}
        # The number of workers that the manager waits for; None until it has sent it.
        self._active: int | None = None
        self._channel = channel = wire.Channel(group, timeout)
        channel.add_schemas(schemas(shapes, self._rows))
        # Tells the manager if the worker is garbage-collected, or the process ends, before `exit`.
        reason = "its worker or its process ended without leaving"
        self._at_end = weakref.finalize(self, _leave_early, channel, reason)

    @property
    def state(self) -> WorkerState:
        """The rows that are not sent yet, and counters, for a checkpoint.

        The next add donates it, so save or copy it before. Batches on their way are not part of it:
        call ``drain`` before you save.
        """
        state = self._state.replace(baseline=self._baseline)
        return jax.tree.map(jnp.asarray, state)

    def add(
        self,
        items: Arrays,
        *,
        score: Floats | None = None,
        mask: Mask | Bool[Array, "B T"] | None = None,
    ) -> Answer | None:
        """Adds a batch; every ``every``-th call sends what was added since the last message.

        Args:
            items: Leaves ``[B, ...]``, like the example of the manager's buffer.
            score: The score of each item, such as its log reward, ``[B]``.
            mask: Which rows are part of the batch, ``[B]``; with ``scoring_only``, which steps are
                part of the trajectories, ``[B, T]``.

        Returns:
            An answer, according to the mode. None if no answer is due, for example because the
            filter lets no row pass.

        Raises:
            ValueError: If a structure, shape or dtype differs from the example, a required score is
                missing, or the rows do not fit into one message.
            TimeoutError: If the manager did not answer in time. Unanswered batches are given up: an
                answer that comes later is dropped. The items of this call were added.
            ExchangeError: If the manager refused a batch, or has failed.
        """
        self._check_open()
        if self._state.filter is not None and score is None:
            raise ValueError("the filter needs the score of items; pass score=[B]")
        items = numbers.narrow(items, "items", lambda: self._state.items)
        items = trees.match(self._state.items, items)
        score = numbers.convert(score, "score", DTYPES["score"])
        # Messages leave, and programs run, after this call has returned. The others are copies.
        mask = trees.owned(mask)
        rows = self._check_room(items)
        sends = self._adds + 1 >= self._every
        timed_out = None
        if sends:
            try:
                self._wait_or_raise(lambda: len(self._waiting) < self._in_flight)
            except TimeoutError as error:
                timed_out = error
        if self._sends_all and not self._kept:
            self._send_all(items, score, mask, rows)
        else:
            # The step donates the state: no signal may come before the new one is stored.
            with DeferredSignals():
                self._state, chosen = self._step(
                    self._state, self._baseline, items, score, mask, sends=sends
                )
                self._adds += 1
                self._kept += rows
                if sends:
                    self._send_chosen(*chosen)
        if not sends:
            self._poll()
            return None
        if timed_out is not None:
            raise timed_out
        if self._mode == "sync":
            self._wait_or_raise(lambda: not self._waiting)
        elif self._mode == "deferred":
            self._wait_or_raise(lambda: not self._channel.sending)
        else:
            self._poll()
        self._raise_failure()
        if self._refused:
            text = "; ".join(text for _, text in self._refused)
            self._refused.clear()
            raise ExchangeError(text)
        return self._answers.popleft() if self._answers else None

    def update_score(self, slots: Slots | None, score: Floats, *, mask: Mask | None = None) -> None:
        """Sets the scores of items of the manager's buffer. It does not wait for an answer.

        The manager takes batches and new scores in the order in which this worker sends them. It
        drops rows whose item has left since, exactly as the buffer's own ``update_score`` does, and
        counts them as ``stale`` in its traffic.

        Args:
            slots: The slots of the items, from answers to this worker, ``[B]``. They name nothing,
                or other items, if the manager has gone on from an earlier checkpoint since.
            score: Their new scores, ``[B]``. A NaN is refused, and counted by the buffer.
            mask: Which rows to use, ``[B]``.

        Raises:
            ValueError: If no part of the manager's buffer uses scores, a shape differs, or this
                worker does not ask for slots.
            TimeoutError: If the manager did not take the message in time.
            ExchangeError: If the manager has failed.
        """
        self._update(Kind.SCORES, "score", slots, score, mask)

    def update_priority(
        self, slots: Slots | None, priority: Floats, *, mask: Mask | None = None
    ) -> None:
        """Sets the priorities of items of the manager's buffer, as ``update_score`` sets scores.

        Raises:
            ValueError: If the sampler of the manager's buffer has no priorities, or a shape
                differs.
            TimeoutError: If the manager did not take the message in time.
            ExchangeError: If the manager has failed.
        """
        self._update(Kind.PRIORITIES, "priority", slots, priority, mask)

    def request_metadata(self) -> dict[str, Any]:
        """Returns the manager's current ``metrics()``: NumPy scalars by name.

        Raises:
            TimeoutError: If no answer came in time.
            ExchangeError: If the manager has failed.
        """
        self._check_open()
        self._requests += 1
        self._metadata.clear()
        self._send(Kind.METADATA_REQUEST, number=self._requests)
        self._wait_or_raise(lambda: self._requests in self._metadata, "a request for metadata")
        return self._metadata.pop(self._requests)

    def drain(self, timeout: float | None = None) -> Drained:
        """Sends what is left, and collects all answers. It raises no error of the exchange.

        Args:
            timeout: The longest time to wait, in seconds; that of the worker by default.
        """
        timeout = self._channel.timeout if timeout is None else timeout
        self._poll()
        if self._kept and not self._failure and not self._has_left:
            with DeferredSignals():
                self._state, chosen = worker_state.flush(self._state, self._baseline)
                self._send_chosen(*chosen)
        self._wait(lambda: not self._waiting and not self._channel.sending, timeout)
        reasons = [self._failure]
        if self._kept and not self._has_left:
            reasons.append(f"the rows of {self._adds} adds were not sent")
        if self._waiting and not self._failure:
            reasons.append(self._silence(f"{len(self._waiting)} batches", timeout))
        reasons += [text for _, text in self._refused]
        refused = (number for number, _ in self._refused if 0 < number <= self._batches)
        missing = tuple(sorted([*self._waiting, *refused]))
        answers = tuple(self._answers)
        self._answers.clear()
        self._refused.clear()
        self._give_up()
        return Drained(answers, missing, "; ".join(filter(None, reasons)))

    def exit(self, timeout: float | None = None) -> Drained:
        """Drains, and leaves the manager. Returns when all workers leave and the manager has saved.

        Args:
            timeout: The longest time to wait for answers, and then for any sign of the manager, in
                seconds; that of the worker by default.

        Returns:
            The result of ``drain``. Its reason also says if the manager did not say goodbye.
        """
        if self._has_left:
            return Drained((), (), "")
        timeout = self._channel.timeout if timeout is None else timeout
        drained = self.drain(timeout)
        self._at_end.detach()
        self._send(Kind.LEAVE)
        self._channel.abandon()
        reason, self._active = "", None
        while self._active != 0 and not reason:
            self._active = None
            if not self._wait(lambda: self._active is not None, timeout):
                reason = self._failure or self._silence("the exit", timeout)
        if reason in drained.reason:
            return drained
        return drained._replace(reason="; ".join(filter(None, [drained.reason, reason])))

    def metrics(self) -> dict[str, Any]:
        """Returns metrics as Python numbers.

        Returns:
            The metrics of ``WorkerState.metrics``; the numbers of batches that were ``answered``,
            ``refused`` and ``given_up``, and of answers that came too ``late``; and the last
            ``baseline``. With a filter also ``kept_by_filter``, the number of rows that scored at
            least the baseline.
        """
        out: dict[str, Any] = {k: int(v) for k, v in self._state.metrics().items()}
        if self._state.filter is not None:
            out["kept_by_filter"] = int(self._state.filter.metrics()["kept"])
        return {**out, **self._counts, "baseline": float(self._baseline)}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            # After an error the worker waits for nobody.
            if self._at_end.detach():
                _leave_early(self._channel, f"{type(error).__name__}: {error}")
            return
        drained = self.exit()
        if drained.reason:
            raise ExchangeError(drained.reason)

    def _update(
        self, kind: Kind, name: str, slots: Slots | None, value: Floats, mask: Mask | None
    ) -> None:
        """Sends new values in as many messages as they need."""
        self._check_open()
        if slots is None:
            raise ValueError(
                "slots is None; expected those of an answer, which has them if the worker asks for "
                "them: Worker(..., slots=True)"
            )
        value = numbers.convert(value, name, DTYPES[name], infinite=name in INFINITE)
        leaves, structure = jax.tree.flatten((slots, value, mask))
        shapes = (kind, structure, *((np.shape(x), getattr(x, "dtype", type(x))) for x in leaves))
        if shapes not in self._checked:
            update = UPDATES[kind]
            jax.eval_shape(lambda manager: update(manager, slots, value, mask=mask), self._outline)
            self._checked.add(shapes)
        index, generation = (np.asarray(x) for x in (slots.index, slots.generation))
        present = (index >= 0) & (index < self._outline.buffer.capacity)
        if mask is not None:
            present &= np.asarray(mask)
        # Picking rows copies them, so that the caller may change its own.
        rows = [
            x[present].astype(dtype)
            for x, dtype in ((index, "i4"), (generation, "u4"), (np.asarray(value), "f4"))
        ]
        for start in range(0, len(rows[0]), self._rows):
            part = [x[start : start + self._rows] for x in rows]
            self._send(kind, part, number=wire.NO_BATCH, rows=len(part[0]))
            self._wait_or_raise(lambda: len(self._channel.sending) <= self._in_flight, "an update")

    def _check_open(self) -> None:
        if self._has_left:
            raise ExchangeError("this worker has left its manager; create another one")
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self._failure:
            raise ExchangeError(self._failure)

    @property
    def _has_left(self) -> bool:
        return not self._at_end.alive

    def _check_room(self, items: Arrays) -> int:
        """Returns the number of rows, if a message has room for them."""
        # Leaves without rows are refused when the step is traced.
        rows = max(
            (np.shape(leaf)[0] for leaf in jax.tree.leaves(items) if np.ndim(leaf)), default=0
        )
        room = self._rows - self._kept
        if rows > room:
            raise ValueError(
                f"items have {rows} rows, but a message has room for {room} more of "
                f"rows={self._rows}; make rows larger, or every smaller"
            )
        return rows

    def _send_all(self, items: Arrays, score: Any, mask: Any, rows: int) -> None:
        """Sends a batch as ``step`` would, but without a program to run and to wait for."""
        leaves, structure = jax.tree.flatten((items, score, mask))
        check_not_donated(leaves, "items")
        shapes = (structure, *map(jax.typeof, leaves))
        state = self._state
        if shapes not in self._checked:
            step = functools.partial(self._step, sends=True)
            jax.eval_shape(step, state, self._baseline, items, score, mask)
            self._checked.add(shapes)
        mask = np.ones((rows,), bool) if mask is None else np.asarray(mask)
        count = np.count_nonzero(mask)
        counts = np.array([1, count, count > 0, count, 0], np.uint32)
        self._state = state.replace(counters=np.asarray(state.counters) + counts)
        nan = np.full((rows,), np.nan, np.float32)
        if count:
            score = nan if score is None else _cast_like(state.score, score)
            self._send_batch(Batch(jax.tree.map(_cast_like, state.items, items), score), mask)

    def _send_chosen(self, mask: Bool[Array, " R"], count: Count) -> None:
        """Begins to send rows that were kept, unless none of them is chosen."""
        kept, self._adds, self._kept = self._kept, 0, 0
        if count:
            # The next add donates the state, so its rows are copied.
            batch = Batch(self._state.items, self._state.score)
            batch = jax.tree.map(lambda x: to_host(x)[:kept].copy(), batch)
            self._send_batch(batch, np.asarray(mask)[:kept])

    def _send_batch(self, batch: Batch, mask: np.ndarray) -> None:
        self._batches += 1
        self._waiting[self._batches] = len(mask)
        kind = Kind.INSERT if self._slots else Kind.BATCH
        self._send(kind, (batch, mask), number=self._batches, rows=len(mask))

    def _send(self, kind: Kind, tree: PyTree = (), number: int = 0, rows: int = 0) -> None:
        """Begins to send a message; its arrays must not change any more."""
        self._channel.send(kind, self._channel.manager, tree, number=number, rows=rows)

    def _poll(self) -> None:
        """Handles all messages that have arrived, without waiting."""
        while (message := self._channel.receive()) is not None:
            self._handle(message)
        if self._channel.sending:
            self._channel.collect()

    def _wait(self, until: Callable[[], bool], timeout: float | None) -> bool:
        """Waits until a condition holds; returns False if time is up or the manager has failed."""
        wait = wire.Wait(timeout)
        self._poll()
        while not until():
            if self._failure or not wait.pause(sending=bool(self._channel.sending)):
                return False
            self._poll()
        return True

    def _wait_or_raise(self, until: Callable[[], bool], what: str = "") -> None:
        """Waits as ``_wait`` does.

        Args:
            until: The condition.
            what: What the manager has to answer; if empty, batches, which are given up when the
                time is over.

        Raises:
            TimeoutError: If the time is over.
            ExchangeError: If the manager has failed.
        """
        timeout = self._channel.timeout
        if not self._wait(until, timeout):
            self._raise_failure()
            batches = f"batch {', '.join(map(str, self._waiting))}"
            if not what:
                self._give_up()
            raise TimeoutError(self._silence(what or batches, timeout))

    def _silence(self, what: str, timeout: float | None) -> str:
        return f"{self._channel.manager_name} has not answered {what} within {timeout:g} s"

    def _give_up(self) -> None:
        """Stops waiting for answers; later ones are dropped."""
        self._counts["given_up"] += len(self._waiting)
        self._waiting.clear()

    def _handle(self, message: Message) -> None:
        kind, number, tree = message.header.kind, message.header.number, message.tree
        name, failure = self._channel.manager_name, ""
        if message.fault:
            failure = f"{name} sent a message that cannot be read: {message.fault}"
        elif kind in (Kind.REPLY, Kind.PLACED):
            self._handle_reply(number, tree)
        elif kind == Kind.METADATA:
            self._metadata[number] = jax.tree.map(np.copy, tree)
        elif kind == Kind.LEAVE:
            self._active = number
        elif kind == Kind.REFUSAL:
            # Batches keep their order, so a message without a number was the oldest one.
            if number == 0 and self._waiting:
                number = next(iter(self._waiting))
            self._waiting.pop(number, None)
            self._counts["refused"] += 1
            self._refused.append((number, wire.read_note(tree)))
        elif kind == Kind.ABORT:
            failure = wire.read_note(tree)
        else:
            failure = f"{name} sent a message that only workers send"
        # The first failure is the cause of later ones.
        self._failure = self._failure or failure

    def _handle_reply(self, number: int, reply: Reply) -> None:
        self._baseline = np.float32(reply.baseline)
        if number not in self._waiting:
            self._counts["late"] += 1
            return
        rows = self._waiting.pop(number)
        self._counts["answered"] += 1
        scores = jax.tree.map(np.copy, reply.scores)
        slots = jax.tree.map(lambda x: x[:rows].copy(), reply.slots)
        self._answers.append(Answer(scores, float(self._baseline), number, slots))


def _leave_early(channel: wire.Channel, reason: str) -> None:
    """Sends the manager the reason why a worker leaves early, unless MPI has been finalized."""
    from mpi4py import MPI

    if not MPI.Is_finalized():
        channel.send(Kind.ABORT, channel.manager, wire.note(reason))
        channel.abandon()


def _cast_like(like: Array, leaf: object) -> Array:
    """Returns an array with the dtype of another one."""
    return jnp.asarray(leaf, like.dtype)

"""A worker's end of the free-running exchange: it sends what it finds, at its own pace."""

import collections
import functools
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any, Literal, NamedTuple, Self, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, PyTree

from jaxbuf.buffers import common
from jaxbuf.core import checks, numbers, storage
from jaxbuf.core.donation import check_there
from jaxbuf.mpi import wire
from jaxbuf.mpi.baseline import BaselineFilter, check_filter
from jaxbuf.mpi.layout import Communicators
from jaxbuf.mpi.manager import Manager, check_rows
from jaxbuf.mpi.scores import uses_score
from jaxbuf.mpi.serve import forms
from jaxbuf.mpi.wire import Arrival, ExchangeError, Form, Kind, Message, Sending
from jaxbuf.mpi.worker_state import WorkerState
from jaxbuf.views.terminal import terminal_states

Mode = Literal["sync", "deferred", "pipelined"]

_INCOMING = (Kind.REPLY, Kind.METADATA, Kind.GOODBYE, Kind.REFUSAL, Kind.FAILURE, Kind.HOLD)


class Answer(NamedTuple):
    """What the manager says of a batch.

    Attributes:
        scores: The scores of the batch, NumPy arrays.
        baseline: From which score on an item is worth sending; −inf if there is none.
        sequence: The number of the batch among those of this worker, from 1.
    """

    scores: dict[str, np.ndarray[Any, Any]]
    baseline: float
    sequence: int


class Drained(NamedTuple):
    """What came when nothing more was sent.

    Attributes:
        answers: Those that had not been returned yet, in order.
        missing: The numbers of batches that were not answered: it is not known whether the manager
            has them.
        reason: Why something is missing; empty if nothing is.
    """

    answers: tuple[Answer, ...]
    missing: tuple[int, ...]
    reason: str


class Worker:
    """One worker's handle on the manager of its group: what it keeps, and what is under way.

    Every ``every`` adds it sends what it was given since, or those rows of it that the filter lets
    pass. The ``mode`` says when answers come:

    * ``"sync"``: an add that sends waits for the answer, and returns it.
    * ``"deferred"``: it waits until its batch has left, and returns the answer to the batch before;
      the first returns None.
    * ``"pipelined"``: it waits for nothing unless ``in_flight`` batches are not answered yet, and
      returns the oldest answer that has come and was not returned before.

    Each answer is returned once, in order. Leaving a ``with`` block sends the rest, collects the
    answers and leaves the manager; all workers leave together, once the last one does.
    Who has left, after an error for example, may begin anew once all have; what it sends before
    that is refused.

    Args:
        communicators: Those of this rank.
        manager: Makes the manager, given the number of its workers; only the shapes of what it
            makes are looked at.
        rows: The most rows of a message, at least ``every`` times those of an add; the same number
            as on the manager.
        every: After how many adds there is a contact.
        mode: When answers come.
        filter: Which items to send; None sends all of them.
        scoring_only: Offer trajectories, send their last states: items are padded trajectories
            ``[B, T, ...]`` with a ``mask`` of ``[B, T]``, and the example a single state.
        in_flight: How many batches may be under way in ``"pipelined"`` mode.
        timeout: Seconds to wait for the manager at most; None waits forever.
        state: What to go on with, such as a state from a checkpoint; by default nothing.

    Raises:
        ValueError: If this rank is no worker, or an argument is out of its range.

    Example:
        The one of ``serve`` has both sides.
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
        timeout: float | None = 600.0,
        state: WorkerState | None = None,
    ) -> None:
        group = communicators.group
        if group is None or communicators.agents is None:
            raise ValueError("this rank is no worker; only the workers of a group have one")
        checks.check_choice("mode", mode, get_args(Mode))
        check_filter(filter)
        self._rows = common.check_count("rows", rows)
        self._every = common.check_count("every", every)
        in_flight = common.check_count("in_flight", in_flight)
        self._in_flight = in_flight if mode == "pipelined" else 1
        timeout = checks.check_seconds("timeout", timeout)
        self._mode: Mode = mode
        made = jax.eval_shape(lambda: manager(group.Get_size() - 1))
        if not isinstance(made, Manager):
            raise ValueError(
                f"manager makes a {type(made).__name__}; expected a function that takes a number "
                "of workers and returns a jaxbuf.mpi.Manager"
            )
        self._forms = forms(made, self._rows)
        self._memory = wire.aligned(max(self._forms[kind].size for kind in _INCOMING))
        self._incoming = {kind.tag: Message(self._forms[kind], self._memory) for kind in _INCOMING}
        example = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), made.buffer.data
        )
        empty = WorkerState.create(example, self._rows, filter)
        self._state = empty if state is None else _like(state, empty)
        # From here on nothing is refused: who comes to the group twice is in its second session.
        self._channel = wire.Channel(group, timeout)
        self._step = functools.partial(
            _step,
            needs_score=uses_score(made.buffer),
            every=self._every,
            scoring_only=checks.check_flag("scoring_only", scoring_only),
        )
        # What batches that were sent as a whole add to the counters of the state; and what such
        # batches have looked like.
        self._whole = np.zeros((5,), np.uint32)
        self._checked: set[Any] = set()
        # What the pure state knows, too, but does not tell without waiting for it.
        self._kept, self._adds = (int(x) for x in self._state.place)
        self._baseline = np.float32(self._state.baseline)
        self._number = int(self._state.metrics()["batches"])
        self._questions = 0
        self._waiting: collections.deque[int] = collections.deque()
        self._answers: collections.deque[Answer] = collections.deque()
        self._refused: list[tuple[int, str]] = []
        self._sends: list[Sending] = []
        self._spare: list[Message] = []
        self._metadata: dict[int, dict[str, Any]] = {}
        self._failure = ""
        self._has_left = self._released = self._held = False
        self._counts = dict.fromkeys(("answered", "refused", "given_up", "late"), 0)
        # Whoever forgets to leave does so when the worker, or the process, ends.
        text = "its worker or its process ended without leaving"
        leave = functools.partial(_leave, self._channel, self._forms[Kind.EXIT])
        self._at_end = weakref.finalize(self, leave, text, wire.FAILED)

    @property
    def state(self) -> WorkerState:
        """What is kept, and counts. The next add consumes it; save or copy it before that.

        What is under way is no part of it: ``drain`` before you save.
        """
        counters = self._state.counters + self._whole
        return self._state.replace(baseline=jnp.float32(self._baseline), counters=counters)

    def add(
        self,
        items: PyTree[Array],
        *,
        score: Float[Array, " B"] | None = None,
        mask: Bool[Array, " B"] | Bool[Array, "B T"] | None = None,
    ) -> Answer | None:
        """Offer a batch; every ``every``-th time, send what was offered since the last contact.

        Args:
            items: Leaves ``[B, ...]``, like the example of the manager's buffer.
            score: Of each item, such as its log reward, ``[B]``.
            mask: Which rows there are, ``[B]``; with ``scoring_only``, which steps, ``[B, T]``.

        Returns:
            An answer, as the mode says; None if there is none now, which includes that the filter
            lets nothing pass.

        Raises:
            ValueError: If a structure, shape or dtype differs from the example, a score that is
                needed is missing, or a message cannot hold the batches of a contact.
            TimeoutError: If the manager did not answer in time. What it did not answer is given up,
                and an answer that comes later is dropped. The items of this call are taken.
            ExchangeError: If the manager refused a batch, or has failed.
        """
        self._check_open()
        if self._state.filter is not None and score is None:
            raise ValueError("the filter goes by the score of items; pass score=[B]")
        items = numbers.narrow(items, "items", self._state.items)
        score = numbers.convert(score, "score", np.dtype("float32"))
        # What has no rows is refused when the step is traced.
        rows = max((np.shape(leaf)[:1] for leaf in jax.tree.leaves(items)), default=())
        rows = rows[0] if rows else 0
        if rows > self._rows - self._kept:
            raise ValueError(
                f"items have {rows} rows, but a message has room for {self._rows - self._kept} "
                f"more of rows={self._rows}; make rows larger, or every smaller"
            )
        contacts = self._adds + 1 >= self._every
        problem = self._make_room() if contacts else None
        # What is sent at once needs not be kept before.
        keeps = self._every > 1 or self._kept > 0
        if not keeps and mask is None and self._state.filter is None:
            chosen = self._choose_all(items, score, rows)
        else:
            self._state, chosen = self._step(
                self._state, self._baseline, items, score, mask, keeps=keeps, contacts=contacts
            )
        self._adds += 1
        self._kept += rows if keeps else 0
        if not contacts:
            self._poll()
            return None
        if not keeps and chosen.items is None:
            chosen = chosen._replace(items=jax.tree.map(_immutable, self._state.items, items))
        self._send(chosen)
        if problem is not None:
            raise problem
        if self._mode == "sync":
            self._wait(lambda: not self._waiting)
        elif self._mode == "deferred":
            self._wait(lambda: not self._sends)
        self._raise()
        return self._answers.popleft() if self._answers else None

    def request_metadata(self) -> dict[str, Any]:
        """What the manager's ``metrics()`` are now: NumPy scalars by name.

        Raises:
            TimeoutError: If no answer came in time.
            ExchangeError: If the manager has failed.
        """
        self._check_open()
        self._questions = number = self._questions + 1
        self._metadata.clear()
        self._begin(self._forms[Kind.METADATA_REQUEST].new(), (), number)
        wait = wire.Wait(self._channel.timeout)
        while number not in self._metadata:
            self._poll()
            self._raise_failure()
            if number not in self._metadata and not wait.pause():
                raise TimeoutError(self._silence("a request for metadata"))
        return self._metadata.pop(number)

    def drain(self, timeout: float | None = None) -> Drained:
        """Send what is left, and collect all answers; this ends in time, whatever happens.

        Args:
            timeout: Seconds to wait at most; by default those of the worker.
        """
        wait = wire.Wait(self._channel.timeout if timeout is None else timeout)
        self._poll()
        if self._kept and not self._failure and not self._has_left:
            self._state, chosen = _flush(self._state, self._baseline)
            self._send(chosen)
        in_time = True
        while in_time and (self._waiting or self._sends) and not self._failure:
            in_time = wait.pause(sending=bool(self._sends))
            self._poll()
        reasons = [self._failure] if self._failure else []
        if self._kept and not self._has_left:
            reasons.append(f"the rows of {self._adds} adds were not sent")
        if not in_time and self._waiting:
            reasons.append(self._silence(f"{len(self._waiting)} batches", wait))
        reasons += [text for _, text in self._refused]
        missing = sorted([*self._waiting, *(number for number, _ in self._refused)])
        self._refused.clear()
        self._give_up()
        answers = tuple(self._answers)
        self._answers.clear()
        return Drained(answers, tuple(missing), "; ".join(reasons))

    def exit(self, timeout: float | None = None) -> Drained:
        """Drain, and leave the manager; returns when all workers have, and it has saved its work.

        Args:
            timeout: Seconds to wait at most for answers, and then for any sign of the manager; by
                default those of the worker.

        Returns:
            What ``drain`` returns; the reason also tells if the manager did not say goodbye.
        """
        if self._has_left:
            return Drained((), (), "")
        drained = self.drain(timeout)
        self._go(wire.WAITS, "")
        wait = wire.Wait(self._channel.timeout if timeout is None else timeout)
        while not self._released and not self._failure:
            self._poll()
            if self._held:
                self._held = False
                wait.restart()
            if not self._released and not self._failure and not wait.pause():
                reason = self._silence("the exit", wait)
                return drained._replace(reason="; ".join(filter(None, [drained.reason, reason])))
        if self._failure and self._failure not in drained.reason:
            return drained._replace(reason=self._failure)
        return drained

    def metrics(self) -> dict[str, Any]:
        """Numbers worth watching, as Python's own.

        Returns:
            Those of ``WorkerState.metrics``; those of batches that were ``answered``, ``refused``
            and ``given_up``, and of answers that came too ``late``; and the last ``baseline``. With
            a filter also ``kept_by_filter``: rows that scored at least the baseline.
        """
        out: dict[str, Any] = {k: int(v) for k, v in self.state.metrics().items()}
        if self._state.filter is not None:
            out["kept_by_filter"] = int(self._state.filter.metrics()["kept"])
        return {**out, **self._counts, "baseline": float(self._baseline)}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            # Others wait for nothing, and neither does this rank.
            if not self._has_left:
                self._go(wire.FAILED, f"{type(error).__name__}: {error}")
            return
        drained = self.exit()
        if drained.reason:
            raise ExchangeError(drained.reason)

    def _check_open(self) -> None:
        if self._has_left:
            raise ExchangeError("this worker has left its manager; create another one")
        self._raise_failure()

    def _choose_all(self, items: PyTree[Array], score: Any, rows: int) -> "_Chosen":
        """Choose a whole batch, as ``_step`` would, without a program to run or to wait for."""
        leaves, structure = jax.tree.flatten((items, score))
        check_there(leaves, "items")
        given = (structure, *map(jax.typeof, leaves))
        if given not in self._checked:
            jax.eval_shape(
                functools.partial(self._step, keeps=False, contacts=True),
                *(self._state, self._baseline, items, score, None),
            )
            self._checked.add(given)
        # A new array, for the one before may still be read by a program that has begun.
        self._whole = self._whole + np.array([1, rows, rows > 0, rows, 0], np.uint32)
        every = np.ones((rows,), np.bool_)
        if score is None:
            return _Chosen(every, rows, score=np.full((rows,), np.nan, np.float32))
        return _Chosen(every, rows, score=_immutable(self._state.score, score))

    def _make_room(self) -> Exception | None:
        """Wait until another batch may be under way; what went wrong meanwhile is told later."""
        self._poll()
        try:
            self._wait(lambda: len(self._waiting) < self._in_flight)
        except TimeoutError as error:
            return error
        return None

    def _send(self, chosen: "_Chosen") -> None:
        """Begin to send what a contact has chosen, unless it is nothing."""
        self._adds = self._kept = 0
        rows = int(chosen.count)
        if rows == 0:
            return
        message = self._spare.pop() if self._spare else self._forms[Kind.BATCH].new()
        # The next add consumes what is kept, so that this is copied.
        lends = chosen.items is not None
        tree = {
            "items": chosen.items if lends else self._state.items,
            "score": chosen.score if lends else self._state.score,
            "mask": chosen.mask,
        }
        self._number += 1
        self._waiting.append(self._number)
        self._begin(message, tree, self._number, rows, lends)

    def _begin(
        self, message: Message, tree: Any, number: int, rows: int = 0, lends: bool = False
    ) -> None:
        to = self._channel.manager
        self._sends.append(
            self._channel.send(message, to, tree, sequence=number, rows=rows, lends=lends)
        )

    def _wait(self, until: Callable[[], bool]) -> None:
        """Wait until something is so, or the manager has failed.

        Raises:
            TimeoutError: If it is not so in time; then nothing is waited for any more.
        """
        wait = wire.Wait(self._channel.timeout)
        self._poll()
        while not until():
            self._raise_failure()
            if not wait.pause(sending=bool(self._sends)):
                text = self._silence(f"batch {', '.join(map(str, self._waiting))}")
                self._give_up()
                raise TimeoutError(text)
            self._poll()

    def _poll(self) -> None:
        """Take what has come, without waiting."""
        while arrival := self._channel.receive(self._channel.manager, None, self._memory):
            self._take(arrival)
        if self._sends:
            under_way = self._sends
            self._sends = []
            for sending in under_way:
                if not sending.done():
                    self._sends.append(sending)
                elif sending.message.kind == Kind.BATCH:
                    sending.message.give_back()
                    self._spare.append(sending.message)

    def _take(self, arrival: Arrival) -> None:
        message = self._incoming.get(arrival.tag)
        if message is None or not arrival.fits:
            self._fail(
                f"{self._manager_name} sent {arrival.size} bytes under tag {arrival.tag}, which "
                "this worker does not expect: rows and the manager must be the same on both sides"
            )
            return
        header, kind = message.header, Kind(arrival.tag - wire.FIRST_TAG)
        if self._channel.is_old(header):
            return
        session, form = self._channel.session, self._forms[kind]
        fault = form.fault(header, arrival.size, arrival.source, session, self._rows)
        if fault is not None:
            self._fail(f"{self._manager_name} sent a message that cannot be read: {fault}")
        elif kind == Kind.REPLY:
            self._baseline = np.float32(message.tree["baseline"])
            if header.sequence not in self._waiting:
                self._counts["late"] += 1
                return
            self._waiting.remove(header.sequence)
            self._counts["answered"] += 1
            scores = jax.tree.map(np.copy, message.tree["scores"])
            self._answers.append(Answer(scores, float(self._baseline), header.sequence))
        elif kind == Kind.METADATA:
            self._metadata[header.sequence] = jax.tree.map(np.copy, message.tree)
        elif kind == Kind.GOODBYE:
            self._released = True
        elif kind == Kind.HOLD:
            self._held = True
        elif kind == Kind.REFUSAL:
            # Of a message without a number, the oldest is what was refused: they keep their order.
            number = header.sequence
            if number in self._waiting:
                self._waiting.remove(number)
            elif self._waiting:
                number = self._waiting.popleft()
            self._counts["refused"] += 1
            self._refused.append((number, wire.read_note(message.leaves[0])))
        else:
            self._fail(wire.read_note(message.leaves[0]))

    def _fail(self, text: str) -> None:
        # What came first is the cause of what comes later.
        self._failure = self._failure or text

    def _raise(self) -> None:
        self._raise_failure()
        if self._refused:
            text = "; ".join(text for _, text in self._refused)
            self._refused.clear()
            raise ExchangeError(text)

    def _raise_failure(self) -> None:
        if self._failure:
            raise ExchangeError(self._failure)

    def _give_up(self) -> None:
        self._counts["given_up"] += len(self._waiting)
        self._waiting.clear()

    def _go(self, flags: int, text: str) -> None:
        self._has_left = True
        self._at_end.detach()
        _leave(self._channel, self._forms[Kind.EXIT], text, flags)
        wire.abandon(self._sends)

    @property
    def _manager_name(self) -> str:
        return f"{self._channel.names[self._channel.manager]}, the manager,"

    def _silence(self, what: str, wait: wire.Wait | None = None) -> str:
        seconds = self._channel.timeout if wait is None else wait.timeout
        return f"{self._manager_name} has not answered {what} within {seconds:g} s"


class _Chosen(NamedTuple):
    """What to send: which rows, how many, and of what; None if of what was kept, or is at hand."""

    mask: Any
    count: Any
    items: Any = None
    score: Any = None


@functools.partial(
    jax.jit,
    static_argnames=("needs_score", "every", "scoring_only", "keeps", "contacts"),
    donate_argnames="state",
)
def _step(
    state: WorkerState,
    baseline: Any,
    items: Any,
    score: Any,
    mask: Any,
    *,
    needs_score: bool,
    every: int,
    scoring_only: bool,
    keeps: bool,
    contacts: bool,
) -> tuple[WorkerState, Any]:
    """Take a batch, and choose what to send of all that was kept if this is a contact."""
    if scoring_only:
        if mask is None:
            raise ValueError("with scoring_only pass mask=[B, T], which steps there are")
        items, mask = terminal_states(items, mask=mask)
    items, (rows,) = storage.check(state.items, items, "items", ("B",))
    room = state.mask.shape[0]
    if rows * every > room:
        raise ValueError(
            f"items have {rows} rows; with every={every} a message holds {rows * every}, but rows "
            f"is {room}: make it {rows * every} here and on the manager"
        )
    there, score = check_rows(needs_score, rows, score, mask)
    state = state.replace(baseline=baseline)
    if not keeps:
        state, sent, count = state.offer(there).choose(score, there)
        return state, _Chosen(sent, count, items if scoring_only else None, score)
    state = state.add(items, score, there)
    return _contact(state) if contacts else (state, None)


@functools.partial(jax.jit, donate_argnums=0)
def _flush(state: WorkerState, baseline: Any) -> tuple[WorkerState, _Chosen]:
    return _contact(state.replace(baseline=baseline))


def _contact(state: WorkerState) -> tuple[WorkerState, _Chosen]:
    state, sent, count = state.contact()
    return state, _Chosen(sent, count)


def _immutable(like: Array, leaf: Any) -> Array:
    """An array that nobody can change, of the dtype of another one."""
    if isinstance(leaf, jax.Array) and leaf.dtype == like.dtype:
        return leaf
    return jnp.array(leaf, like.dtype)


def _like(state: WorkerState, empty: WorkerState) -> WorkerState:
    """A copy of ``state``, so that the caller keeps its own."""
    want, got = (jax.tree.structure(x) for x in (empty, state))
    shapes = [[(x.shape, x.dtype) for x in jax.tree.leaves(tree)] for tree in (empty, state)]
    if want != got or shapes[0] != shapes[1]:
        raise ValueError(
            "state is of a worker with another example, another number of rows or another filter; "
            "create this one with the same"
        )
    return jax.tree.map(jnp.copy, state)


def _leave(channel: wire.Channel, form: Form, text: str, flags: int) -> None:
    """Tell the manager that this worker sends nothing more."""
    from mpi4py import MPI

    if MPI.Is_finalized():
        return
    note = {"note": wire.note(text)}
    wire.abandon([channel.send(form.new(), channel.manager, note, flags=flags)])

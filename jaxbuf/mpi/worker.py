"""A worker's end of the free-running exchange: it sends items at its own pace."""

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
from jaxbuf.core import checks, numbers, trees
from jaxbuf.core.donation import check_there
from jaxbuf.core.slots import Slots
from jaxbuf.mpi import wire
from jaxbuf.mpi.baseline import BaselineFilter, check_filter
from jaxbuf.mpi.batch import Batch, check_batch, uses_score
from jaxbuf.mpi.layout import Communicators
from jaxbuf.mpi.mailbox import Answer, Mailbox
from jaxbuf.mpi.manager import Manager, outline
from jaxbuf.mpi.serve import UPDATES, schemas
from jaxbuf.mpi.wire import ExchangeError, Kind
from jaxbuf.mpi.worker_state import WorkerState
from jaxbuf.views.terminal import terminal_states

Mode = Literal["sync", "deferred", "pipelined"]


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
        self._rows = common.check_count("rows", rows)
        self._every = common.check_count("every", every)
        in_flight = common.check_count("in_flight", in_flight)
        self._in_flight = in_flight if mode == "pipelined" else 1
        self._mode: Mode = mode
        timeout = checks.check_seconds("timeout", timeout)
        scoring_only = checks.check_flag("scoring_only", scoring_only)
        self._slots = checks.check_flag("slots", slots)

        self._outline = shapes = outline(manager, group.Get_size() - 1)
        self._state = _first_state(shapes.buffer.data, self._rows, filter, state)
        self._step = functools.partial(
            _step, scoring_only=scoring_only, needs_score=uses_score(shapes.buffer)
        )
        self._filters = filter is not None or scoring_only
        # The shapes and dtypes of batches that were checked.
        self._checked: set[Any] = set()
        # The same numbers as in `state.place`; reading that would wait for the device.
        self._kept, self._adds = (int(x) for x in self._state.place)

        channel = wire.Channel(group, timeout)
        channel.add_schemas(schemas(shapes, self._rows))
        batches = int(self._state.metrics()["batches"])
        self._mail = Mailbox(channel, batches, np.float32(self._state.baseline))
        # Leaves even if the worker is garbage-collected or the process ends before `exit`.
        reason = "its worker or its process ended without leaving"
        self._at_end = weakref.finalize(self, self._mail.abort, reason)

    @property
    def state(self) -> WorkerState:
        """The rows that are not sent yet, and counters, for a checkpoint.

        The next add donates it, so save or copy it before. Batches on their way are not part of it:
        call ``drain`` before you save.
        """
        state = self._state.replace(baseline=self._mail.baseline)
        return jax.tree.map(jnp.asarray, state)

    def add(
        self,
        items: PyTree[Array],
        *,
        score: Float[Array, " B"] | None = None,
        mask: Bool[Array, " B"] | Bool[Array, "B T"] | None = None,
    ) -> Answer | None:
        """Add a batch; every ``every``-th call sends what was added since the last message.

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
        items = numbers.narrow(items, "items", self._state.items)
        items = trees.match(self._state.items, items)
        score = numbers.convert(score, "score", np.dtype("float32"))
        # Messages leave, and programs run, after this call has returned.
        items, score, mask = trees.owned((items, score, mask))
        rows = self._check_room(items)
        sends = self._adds + 1 >= self._every
        problem = self._make_room() if sends else None
        # Rows that are sent at once are not copied into the state before.
        keeps = self._every > 1 or self._kept > 0
        if keeps or self._filters or mask is not None:
            self._state, chosen = self._step(
                self._state, self._mail.baseline, items, score, mask, keeps=keeps, sends=sends
            )
        else:
            chosen = self._choose_all(items, score, rows)
        self._adds += 1
        self._kept += rows if keeps else 0
        if sends:
            self._send(chosen, items)
            if problem is not None:
                raise problem
            self._wait_as_the_mode_says()
            self._mail.raise_refused()
            return self._mail.answers.popleft() if self._mail.answers else None
        self._mail.poll()
        return None

    def update_score(
        self, slots: Slots, score: Float[Array, " B"], *, mask: Bool[Array, " B"] | None = None
    ) -> None:
        """Set the scores of items of the manager's buffer. It does not wait for an answer.

        The manager takes batches and new scores in the order in which this worker sends them. It
        drops rows whose item has left since, exactly as the buffer's own ``update_score`` does, and
        counts them as ``stale`` in its traffic.

        Args:
            slots: The slots of the items, from answers to this worker, ``[B]``. They name nothing,
                or other items, if the manager has gone on from an earlier checkpoint since.
            score: Their new scores, ``[B]``. A NaN is refused, and counted by the buffer.
            mask: Which rows to use, ``[B]``.

        Raises:
            ValueError: If no part of the manager's buffer uses scores, or a shape differs.
            TimeoutError: If the manager did not take the message in time.
            ExchangeError: If the manager has failed.
        """
        self._update(Kind.SCORES, "score", slots, score, mask)

    def update_priority(
        self, slots: Slots, priority: Float[Array, " B"], *, mask: Bool[Array, " B"] | None = None
    ) -> None:
        """Set the priorities of items of the manager's buffer, as ``update_score`` sets scores.

        Raises:
            ValueError: If the sampler of the manager's buffer has no priorities, or a shape
                differs.
            TimeoutError: If the manager did not take the message in time.
            ExchangeError: If the manager has failed.
        """
        self._update(Kind.PRIORITIES, "priority", slots, priority, mask)

    def request_metadata(self) -> dict[str, Any]:
        """Return the manager's current ``metrics()``: NumPy scalars by name.

        Raises:
            TimeoutError: If no answer came in time.
            ExchangeError: If the manager has failed.
        """
        self._check_open()
        return self._mail.request_metadata()

    def drain(self, timeout: float | None = None) -> Drained:
        """Send what is left, and collect all answers. It raises no error of the exchange.

        Args:
            timeout: The longest time to wait, in seconds; that of the worker by default.
        """
        mail = self._mail
        mail.poll()
        if self._kept and not mail.failure and not mail.has_left:
            self._state, chosen = _flush(self._state, mail.baseline)
            self._send(chosen)
        silence = mail.wait_for_answers(mail.channel.timeout if timeout is None else timeout)
        unsent = self._kept and not mail.has_left
        reasons = [mail.failure, f"the rows of {self._adds} adds were not sent" if unsent else ""]
        reasons += [silence, *(text for _, text in mail.refused)]
        answers, missing = mail.take_all()
        return Drained(answers, missing, "; ".join(filter(None, reasons)))

    def exit(self, timeout: float | None = None) -> Drained:
        """Drain, and leave the manager. Returns when all workers leave and the manager has saved.

        Args:
            timeout: The longest time to wait for answers, and then for any sign of the manager, in
                seconds; that of the worker by default.

        Returns:
            The result of ``drain``. Its reason also says if the manager did not say goodbye.
        """
        if self._mail.has_left:
            return Drained((), (), "")
        timeout = self._mail.channel.timeout if timeout is None else timeout
        drained = self.drain(timeout)
        self._mail.leave()
        reason = self._mail.wait_for_goodbye(timeout)
        if reason in drained.reason:
            return drained
        return drained._replace(reason="; ".join(filter(None, [drained.reason, reason])))

    def metrics(self) -> dict[str, Any]:
        """Return metrics as Python numbers.

        Returns:
            The metrics of ``WorkerState.metrics``; the numbers of batches that were ``answered``,
            ``refused`` and ``given_up``, and of answers that came too ``late``; and the last
            ``baseline``. With a filter also ``kept_by_filter``, the number of rows that scored at
            least the baseline.
        """
        out: dict[str, Any] = {k: int(v) for k, v in self._state.metrics().items()}
        if self._state.filter is not None:
            out["kept_by_filter"] = int(self._state.filter.metrics()["kept"])
        return {**out, **self._mail.counts, "baseline": float(self._mail.baseline)}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            # After an error the worker waits for nobody.
            self._mail.abort(f"{type(error).__name__}: {error}")
            return
        drained = self.exit()
        if drained.reason:
            raise ExchangeError(drained.reason)

    def _update(self, kind: Kind, name: str, slots: Slots, value: Any, mask: Any) -> None:
        """Send new values in as many messages as they need."""
        self._check_open()
        value = numbers.convert(value, name, np.dtype("float32"), infinite=name == "priority")
        leaves, structure = jax.tree.flatten((slots, value, mask))
        given = (kind, structure, *((np.shape(x), getattr(x, "dtype", type(x))) for x in leaves))
        if given not in self._checked:
            update = functools.partial(UPDATES[kind], slots=slots, mask=mask, **{name: value})
            jax.eval_shape(update, self._outline)
            self._checked.add(given)
        index, generation = (np.asarray(x) for x in (slots.index, slots.generation))
        taken = (index >= 0) & (index < self._outline.buffer.capacity)
        if mask is not None:
            taken &= np.asarray(mask)
        # Picking rows copies them, so that the caller may change its own.
        rows = [
            x[taken].astype(dtype)
            for x, dtype in ((index, "i4"), (generation, "u4"), (np.asarray(value), "f4"))
        ]
        for start in range(0, len(rows[0]), self._rows):
            part = [x[start : start + self._rows] for x in rows]
            self._mail.send_update(kind, part, len(part[0]), most=self._in_flight)

    def _check_open(self) -> None:
        if self._mail.has_left:
            raise ExchangeError("this worker has left its manager; create another one")
        self._mail.raise_failure()

    def _check_room(self, items: PyTree[Array]) -> int:
        """Return the number of rows, if a message has room for them."""
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

    def _choose_all(self, items: PyTree[Array], score: Any, rows: int) -> "_Chosen":
        """Choose all rows, as ``_step`` would, but without a program to run and to wait for."""
        leaves, structure = jax.tree.flatten((items, score))
        check_there(leaves, "items")
        given = (structure, *map(jax.typeof, leaves))
        state = self._state
        if given not in self._checked:
            step = functools.partial(self._step, keeps=False, sends=True)
            jax.eval_shape(step, state, self._mail.baseline, items, score, None)
            self._checked.add(given)
        counts = np.array([1, rows, rows > 0, rows, 0], np.uint32)
        self._state = state.replace(counters=np.asarray(state.counters) + counts)
        nan = np.full((rows,), np.nan, np.float32)
        score = nan if score is None else _alike(state.score, score)
        return _Chosen(np.ones((rows,), bool), rows, Batch(None, score))

    def _make_room(self) -> Exception | None:
        """Wait until another batch may be sent; returns an error that is raised after that."""
        try:
            self._mail.wait(lambda: len(self._mail.waiting) < self._in_flight)
        except TimeoutError as error:
            return error
        return None

    def _send(self, chosen: "_Chosen", items: PyTree[Array] = None) -> None:
        """Begin to send the chosen rows, unless there are none."""
        kept, self._adds, self._kept = self._kept, 0, 0
        if not chosen.count:
            return
        mask, batch = np.asarray(chosen.mask), chosen.batch
        if batch is None:
            # The next add donates the state, so its rows are copied.
            batch = jax.tree.map(
                lambda x: np.asarray(x)[:kept].copy(), Batch(self._state.items, self._state.score)
            )
            mask = mask[:kept]
        elif batch.items is None:
            batch = batch._replace(items=jax.tree.map(_alike, self._state.items, items))
        self._mail.send_batch((batch, mask), len(mask), slots=self._slots)

    def _wait_as_the_mode_says(self) -> None:
        if self._mode == "sync":
            self._mail.wait(lambda: not self._mail.waiting)
        elif self._mode == "deferred":
            self._mail.wait(lambda: not self._mail.channel.sending)
        else:
            self._mail.poll()


class _Chosen(NamedTuple):
    """Rows to send.

    Attributes:
        mask: Which rows are sent, ``[B]``.
        count: Their number, ``[]``.
        batch: The rows. None stands for the rows in the state, and items that are None stand for
            the rows that were added, which the program does not copy.
    """

    mask: Any
    count: Any
    batch: Any = None


@functools.partial(
    jax.jit,
    static_argnames=("scoring_only", "needs_score", "keeps", "sends"),
    donate_argnames="state",
)
def _step(
    state: WorkerState,
    baseline: Any,
    items: Any,
    score: Any,
    mask: Any,
    *,
    scoring_only: bool,
    needs_score: bool,
    keeps: bool,
    sends: bool,
) -> tuple[WorkerState, _Chosen | None]:
    """Add a batch, and choose rows to send if it is time to send."""
    if scoring_only:
        if mask is None:
            raise ValueError("with scoring_only pass mask=[B, T], which steps are valid")
        items, mask = terminal_states(items, mask=mask)
    batch, mask = check_batch(state.items, items, score, mask, needs_score=needs_score)
    state = state.replace(baseline=baseline)
    if not keeps:
        state, sent, count = state.offer(mask).choose(batch.score, mask)
        return state, _Chosen(sent, count, batch if scoring_only else batch._replace(items=None))
    state = state.add(batch.items, batch.score, mask)
    if not sends:
        return state, None
    state, sent, count = state.contact()
    return state, _Chosen(sent, count)


@functools.partial(jax.jit, donate_argnums=0)
def _flush(state: WorkerState, baseline: Any) -> tuple[WorkerState, _Chosen]:
    state, sent, count = state.replace(baseline=baseline).contact()
    return state, _Chosen(sent, count)


def _alike(like: Array, leaf: Any) -> Array:
    """Return an array with the dtype of another one."""
    return jnp.asarray(leaf, like.dtype)


def _first_state(
    data: PyTree[Array], rows: int, chosen: BaselineFilter | None, state: WorkerState | None
) -> WorkerState:
    """Return an empty state, or a copy of a given one, so that the caller keeps its own."""
    example = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), data)
    empty = WorkerState.create(example, rows, chosen)
    if state is None:
        return empty
    want, got = (jax.tree.structure(x) for x in (empty, state))
    shapes = [[(x.shape, x.dtype) for x in jax.tree.leaves(tree)] for tree in (empty, state)]
    if want != got or shapes[0] != shapes[1]:
        raise ValueError(
            "state belongs to a worker with another example, rows or filter; create this worker "
            "with the same ones"
        )
    return jax.tree.map(jnp.copy, state)

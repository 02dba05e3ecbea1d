"""The manager's end of the free-running exchange: it answers its workers until all have left."""

import contextlib
import enum
import functools
import os
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from jaxbuf.core import checks
from jaxbuf.core.donation import is_donated
from jaxbuf.core.leaves import from_host
from jaxbuf.core.program import compiler_options
from jaxbuf.core.signals import DeferredSignals
from jaxbuf.core.sizes import check_count
from jaxbuf.core.slots import Slots
from jaxbuf.core.types import Count, Dtype, Function, Mask
from jaxbuf.io import checkpoint
from jaxbuf.mpi import wire
from jaxbuf.mpi.batch import Batch, Reply
from jaxbuf.mpi.layout import Communicators
from jaxbuf.mpi.manager import Manager
from jaxbuf.mpi.traffic import Traffic
from jaxbuf.mpi.wire import Kind, Message, Schema

# The interval at which the manager sends a message to workers that wait for the others to leave.
_WAITING_SECONDS = 1.0


class Served(NamedTuple):
    """The result of serving a group until all workers have left.

    Attributes:
        manager: The manager after all batches.
        traffic: Counts and times of its messages.
        faults: Descriptions of errors, in order of time; each names a rank.
    """

    manager: Manager
    traffic: Traffic
    faults: tuple[str, ...]


def serve(
    communicators: Communicators,
    manager: Manager,
    *,
    rows: int,
    timeout: float | None = 600.0,
    save_to: str | os.PathLike[str] | None = None,
    save_every: float | None = None,
    report: Callable[[str], None] | None = print,
) -> Served:
    """Answers the workers of a group until all of them have left. The manager's rank calls this.

    Each batch is stored and scored in one program, which updates the buffer in place, and answered
    before the next one. The batches of one worker are taken in the order in which it sent them. A
    message that cannot be read is refused, and its sender is told. A worker that has sent nothing
    for longer than the timeout counts as lost until it sends something again; the manager does not
    wait for lost workers. While this runs, the manager receives all messages that are sent to it
    through the group's communicator.

    If the manager fails, for example in a score function, all workers are told, the manager is
    saved as it was before that batch, and the error is raised.

    A launcher that sees a rank killed usually ends all others at once, so they cannot save
    anything: ``save_every`` limits what is lost. To give the others time to name the rank, save
    and end, hide its end from the launcher: ``mpiexec -n 4 sh -c 'python program.py || sleep 60'``.

    Args:
        communicators: The communicators of this rank.
        manager: A manager with as many workers as the group has. It is donated, unless its score
            function calls back into Python.
        rows: The largest number of rows of a batch, the same as the ``rows`` of the workers.
        timeout: Seconds of silence after which a worker counts as lost, and the longest time that
            the last answers may take to arrive; None waits forever.
        save_to: A folder to which the manager is saved, with ``jaxbuf.save``, at the end, when a
            worker is lost, and when something fails. ``jaxbuf.load`` loads it. Managers of several
            groups need a folder each.
        save_every: The interval, in seconds, at which the manager is saved as well.
        report: Called with each fault as soon as it is known, and at the end with a table of the
            traffic. None reports nothing.

    Returns:
        The manager, the traffic and all faults.

    Raises:
        ValueError: If this rank is not the manager of a group, the manager has another number of
            workers, an argument is out of its range, or ``save_to`` is a file.

    Example:
        Under ``mpiexec -n 2 python program.py``, a manager and a worker run this one program:

        >>> import jax.numpy as jnp, jaxbuf
        >>> from jaxbuf.mpi import Layout, Manager, Worker, make_communicators, serve
        >>> def manager(num_workers):
        ...     buffer = jaxbuf.reward_prioritized(jnp.zeros(8, jnp.int32), 10_000)
        ...     return Manager.create(buffer, num_workers)
        >>> def program():
        ...     communicators = make_communicators(Layout(2))
        ...     if communicators.managers is not None:
        ...         return serve(communicators, manager(1), rows=256).manager.buffer
        ...     with Worker(communicators, manager, rows=256) as worker:
        ...         return worker.add(jnp.zeros((256, 8), jnp.int32), score=jnp.zeros(256)).scores
    """
    group = communicators.group
    if group is None or communicators.managers is None:
        raise ValueError("this rank is not a manager; only the manager of a group serves it")
    checks.check_kind("manager", manager, Manager, "a jaxbuf.mpi.Manager")
    workers = group.Get_size() - 1
    if manager.counters.shape[0] != workers:
        raise ValueError(
            f"manager has {manager.counters.shape[0]} workers, but the group has {workers}; "
            f"create it with num_workers={workers}"
        )
    rows = check_count("rows", rows)
    timeout = checks.check_seconds("timeout", timeout)
    save_every = checks.check_seconds("save_every", save_every)
    if save_every is not None and save_to is None:
        raise ValueError(f"save_every is {save_every}, but save_to is None; give it a folder")
    if save_to is not None:
        checkpoint.check_folder("save_to", save_to)
    channel = wire.Channel(group, timeout)
    return _Server(channel, manager, rows, save_to, save_every, report).run()


# The kinds of messages that change stored items, and the methods that do it.
UPDATES = {Kind.SCORES: Manager.update_score, Kind.PRIORITIES: Manager.update_priority}


def schemas(manager: Manager, rows: int) -> dict[Kind, Schema]:
    """Returns the schemas of the messages that depend on the manager.

    Args:
        manager: The manager, or one with the same shapes and configuration.
        rows: The largest number of rows of a batch.
    """

    def batched(dtype: Dtype, *shape: int) -> Any:
        return jax.ShapeDtypeStruct((rows, *shape), dtype)

    items = jax.tree.map(lambda x: batched(x.dtype, *x.shape[1:]), manager.buffer.data)
    batch, mask = Batch(items, batched(jnp.float32)), batched(jnp.bool_)
    batch_schema = Schema((batch, mask), rows)
    _, reply = jax.eval_shape(_insert, manager, batch, mask, jnp.int32(0))
    by_kind = {
        Kind.BATCH: batch_schema,
        Kind.REPLY: Schema(reply.replace(slots=None)),
        Kind.INSERT: batch_schema,
        Kind.PLACED: Schema(reply),
        Kind.METADATA: Schema(jax.eval_shape(Manager.metrics, manager)),
    }
    values = Slots(batched(jnp.int32), batched(jnp.uint32)), batched(jnp.float32)
    for kind, update in UPDATES.items():
        # A kind that the buffer has no use for gets no schema, so that such a message is refused.
        with contextlib.suppress(ValueError):
            jax.eval_shape(update, manager, *values)
            by_kind[kind] = Schema(values, rows)
    return by_kind


@functools.cache
def _compiled(function: Function, donates: bool) -> Any:
    """Returns the jitted function, compiled with options that depend on the backend."""
    options = compiler_options()
    return jax.jit(function, donate_argnums=0 if donates else None, compiler_options=options)


def _take(manager: Manager, batch: Batch, mask: Mask, sender: Count) -> tuple[Manager, Reply]:
    """Stores and scores a batch; returns the new manager and the reply."""
    manager, reply = _insert(manager, batch, mask, sender)
    return manager, reply.replace(slots=None)


def _insert(manager: Manager, batch: Batch, mask: Mask, sender: Count) -> tuple[Manager, Reply]:
    """Stores and scores a batch as ``_take`` does; the reply has the slots of the rows."""
    items = from_host(manager.buffer.data, batch.items)
    manager, scores, slots = manager.insert(items, score=batch.score, mask=mask, sender=sender)
    # Workers send no empty batches. A constant needs no kernel of its own in this program.
    return manager, Reply(scores, manager.baseline_value(), jnp.bool_(True), slots)


def _update(
    update: Callable[..., Manager],
    manager: Manager,
    slots: Slots,
    value: Float[Array, " R"],
    rows: Count,
) -> tuple[Manager, Count]:
    """Sets values of the first ``rows`` slots; returns the manager, and how many were stale."""
    mask = jnp.arange(len(value), dtype=jnp.int32) < rows
    stale = jnp.sum(mask & ~manager.buffer.holds(slots), dtype=jnp.int32)
    return update(manager, slots, value, mask=mask), stale


_updates = {kind: functools.partial(_update, update) for kind, update in UPDATES.items()}


class _Status(enum.Enum):
    """The state of a worker, as its manager knows it."""

    ACTIVE = enum.auto()
    # It has sent nothing for too long.
    LOST = enum.auto()
    # It has left, and waits for a goodbye.
    WAITING = enum.auto()
    # It has left after an error.
    FAILED = enum.auto()


class _Server:
    def __init__(
        self,
        channel: wire.Channel,
        manager: Manager,
        rows: int,
        save_to: str | os.PathLike[str] | None,
        save_every: float | None,
        report: Callable[[str], None] | None,
    ) -> None:
        self._channel, self._manager, self._rows = channel, manager, rows
        self._save_to, self._save_every, self._report = save_to, save_every, report
        self._name = channel.names[channel.rank]
        self._traffic = Traffic(channel.names[: channel.manager])
        self._faults: list[str] = []
        self._status = [_Status.ACTIVE] * channel.manager
        self._heard_at = [time.monotonic()] * channel.manager
        self._saved_at = self._reassured_at = time.monotonic()

    def run(self) -> Served:
        try:
            self._prepare()
            self._heard_at = [time.monotonic()] * self._channel.manager
            self._serve()
            self._save()
        except BaseException as error:
            self._fail(error)
            raise
        for worker in self._workers(_Status.WAITING):
            self._send(worker, Kind.LEAVE)
        for worker in self._workers(_Status.LOST):
            text = f"{self._name}, the manager, counted this rank as lost and has left"
            self._send(worker, Kind.ABORT, wire.note(text))
        self._finish_sending()
        if self._report is not None:
            self._report(f"{self._name}, manager:\n{self._traffic.table()}")
        return Served(self._manager, self._traffic, tuple(self._faults))

    def _prepare(self) -> None:
        """Traces all programs, so that a score function that cannot be traced fails at once."""
        self._channel.add_schemas(schemas(self._manager, self._rows))
        self._senders = [np.int32(worker) for worker in range(self._channel.manager)]
        batch = self._channel.schemas[Kind.BATCH]
        tree = jax.tree.unflatten(batch.treedef, batch.leaves)
        self._donates = True
        self._take = _compiled(_take, donates=True)
        traced = self._take.trace(self._manager, *tree, self._senders[0])
        # A call back into Python can fail halfway; then the donated manager could not be saved.
        if "callback" in str(traced.jaxpr):
            self._donates = False
            self._take = _compiled(_take, donates=False)
        self._metrics = _compiled(Manager.metrics, donates=False)

    def _serve(self) -> None:
        wait = wire.Wait()
        while self._workers(_Status.ACTIVE):
            began = time.perf_counter()
            message = self._channel.receive()
            if message is not None:
                self._handle(message, time.perf_counter() - began)
                wait.restart()
            else:
                self._find_lost_workers()
                wait.pause()
            self._save_and_reassure()

    def _save_and_reassure(self) -> None:
        """Saves the manager, and sends a message to workers that wait, each if it is time."""
        now = time.monotonic()
        if self._save_every is not None and now - self._saved_at > self._save_every:
            self._save()
        active = len(self._workers(_Status.ACTIVE))
        if active and now - self._reassured_at > _WAITING_SECONDS:
            self._reassured_at = now
            for worker in self._workers(_Status.WAITING):
                self._send(worker, Kind.LEAVE, number=active)

    def _find_lost_workers(self) -> None:
        """Counts workers that have been silent for too long as lost."""
        if self._channel.timeout is None:
            return
        now = time.monotonic()
        for worker in self._workers(_Status.ACTIVE):
            silent = now - self._heard_at[worker]
            if silent > self._channel.timeout:
                self._status[worker] = _Status.LOST
                batches = self._traffic.metrics()[f"{self._traffic.names[worker]}/batches"]
                self._note(
                    worker,
                    f"is lost: it has sent nothing for {silent:.1f} s, after {batches} batches, "
                    "and has not left",
                )
                self._save()

    def _handle(self, message: Message, seconds: float) -> None:
        worker, kind = message.source, message.header.kind
        if worker == self._channel.rank:
            return
        if self._status[worker] is _Status.LOST:
            self._status[worker] = _Status.ACTIVE
            self._note(worker, "is back")
        self._traffic.count(worker, bytes=message.size, receive=seconds)
        fault = message.fault or self._fault(worker, kind)
        if fault:
            self._refuse(message, fault)
        elif kind in (Kind.BATCH, Kind.INSERT):
            self._answer(message, slots=kind == Kind.INSERT)
        elif kind in UPDATES:
            self._update(message)
        elif kind == Kind.METADATA_REQUEST:
            self._traffic.count(worker, requests=1)
            metrics = self._metrics(self._manager)
            self._send(worker, Kind.METADATA, metrics, message.header.number)
        elif self._status[worker] is _Status.ACTIVE:
            self._status[worker] = _Status.WAITING if kind == Kind.LEAVE else _Status.FAILED
            if kind == Kind.ABORT:
                self._note(worker, f"left early: {wire.read_note(message.tree)}")
        self._heard_at[worker] = time.monotonic()

    def _fault(self, worker: int, kind: int) -> str:
        """Returns the reason to refuse a message that can be read; empty to accept it."""
        changes = (Kind.BATCH, Kind.INSERT, *UPDATES)
        if kind not in (*changes, Kind.METADATA_REQUEST, Kind.LEAVE, Kind.ABORT):
            return f"its kind is {kind}, which only a manager sends"
        if kind in changes and self._status[worker] is not _Status.ACTIVE:
            return "its sender had left"
        return ""

    def _refuse(self, message: Message, fault: str) -> None:
        self._note(message.source, f"sent a message that was refused: {fault}")
        text = f"{self._name}, the manager, refused a message: {fault}"
        # A worker that began its next run too early receives on the tag of that run.
        tag, number = max(message.tag, self._channel.tag), max(message.header.number, 0)
        self._send(message.source, Kind.REFUSAL, wire.note(text), number, tag)

    def _answer(self, message: Message, slots: bool = False) -> None:
        worker, number = message.source, message.header.number
        batch, mask = message.tree
        began = time.perf_counter()
        take = self._program(_insert) if slots else self._take
        reply = self._change(take, batch, mask, self._senders[worker])
        handled = time.perf_counter()
        self._send(worker, Kind.PLACED if slots else Kind.REPLY, reply, number)
        self._traffic.count(
            worker,
            requests=1,
            batches=1,
            rows=int(np.count_nonzero(mask)),
            handle=handled - began,
            send=time.perf_counter() - handled,
        )

    def _update(self, message: Message) -> None:
        rows, kind = message.header.rows, Kind(message.header.kind)
        began = time.perf_counter()
        stale = self._change(self._program(_updates[kind]), *message.tree, np.int32(rows))
        handle = time.perf_counter() - began
        self._traffic.count(message.source, updates=rows, stale=int(stale), handle=handle)

    def _change(self, program: Function, *args: object) -> Any:
        """Replaces the manager by the first result of a program; returns the second one."""
        # The program donates the manager: no signal may come before its result replaces it.
        with DeferredSignals() if self._donates else contextlib.nullcontext():
            manager, result = program(self._manager, *args)
            # Raises errors of the program before the manager is replaced, and frees the arguments.
            jax.block_until_ready(result)
            self._manager = manager
        return result

    def _program(self, function: Function) -> Any:
        return _compiled(function, self._donates)

    def _send(
        self, worker: int, kind: Kind, tree: PyTree = (), number: int = 0, tag: int | None = None
    ) -> None:
        self._channel.collect()
        size = self._channel.send(kind, worker, tree, number=number, tag=tag)
        self._traffic.count(worker, answered=size)

    def _finish_sending(self) -> None:
        """Waits until all messages have left, except those to lost workers."""
        wait = wire.Wait(self._channel.timeout)
        self._channel.collect()
        lost = self._workers(_Status.LOST)
        while {x.to for x in self._channel.sending}.difference(lost) and wait.pause():
            self._channel.collect()
        for sending in self._channel.sending:
            if sending.to not in lost:
                self._note(sending.to, f"did not take a message of kind {sending.kind.name}")
        self._channel.abandon()

    def _save(self) -> None:
        if self._save_to is not None:
            checkpoint.save(self._save_to, self._manager)
            self._saved_at = time.monotonic()

    def _fail(self, error: BaseException) -> None:
        """Sends the workers the text of an error, and saves the manager."""
        text = f"{self._name}, the manager, failed: {type(error).__name__}: {error}"
        if self._report is not None:
            self._report(text)
        for worker in self._workers(_Status.ACTIVE, _Status.WAITING, _Status.LOST):
            self._send(worker, Kind.ABORT, wire.note(text))
        if self._save_to is not None and is_donated(self._manager):
            error.add_note("the manager could not be saved: the program that failed used it up")
        elif self._save_to is not None:
            try:
                self._save()
                error.add_note(f"the manager was saved to {self._save_to}")
            except Exception as second:
                error.add_note(f"the manager could not be saved: {second}")
        error.add_note(f"in {self._name}, the manager of {self._channel.manager} workers")
        self._finish_sending()

    def _workers(self, *statuses: _Status) -> list[int]:
        return [worker for worker, status in enumerate(self._status) if status in statuses]

    def _note(self, worker: int, text: str) -> None:
        fault = f"{self._channel.names[worker]} {text}"
        self._faults.append(fault)
        if self._report is not None:
            self._report(fault)

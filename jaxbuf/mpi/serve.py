"""The manager's end of the free-running exchange: it answers whoever comes, until all have left."""

import functools
import os
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jaxbuf.buffers import common
from jaxbuf.core import checks
from jaxbuf.core.calls import compiler_options
from jaxbuf.core.donation import is_gone
from jaxbuf.io import checkpoint
from jaxbuf.mpi import wire
from jaxbuf.mpi.layout import Communicators
from jaxbuf.mpi.manager import Manager
from jaxbuf.mpi.traffic import Traffic
from jaxbuf.mpi.wire import Arrival, Form, Header, Kind, Message, Sending

# So often those who wait for the others to leave hear that the manager is there.
_HOLD_SECONDS = 1.0


class Served(NamedTuple):
    """What is left when all workers have left.

    Attributes:
        manager: The manager, with all that it was sent.
        traffic: What went through it, and how long that took.
        faults: What went wrong, in the order in which it did; each names a rank.
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
    """Answer the workers of a group until all of them have left; the manager's rank calls this.

    Each batch is stored and scored in one program, which updates the buffer in place, and answered
    before the next is looked at; batches come in any order of workers, but of one worker in the
    order in which it sent them. A message that cannot be read is refused, and its sender told. A
    worker that says nothing for longer than the timeout counts as lost, until it is heard of again,
    and is not waited for. While this runs, messages to the manager through the group's
    communicator are its own.

    If something fails here, a score function for example, all workers are told, the manager is
    saved as it was before that batch, and the error goes on.

    A launcher that sees a rank killed ends all others at once, so that nobody can save anything:
    ``save_every`` limits what is lost. To give the others time to name the rank, save and end,
    keep it from seeing that: ``mpiexec -n 4 sh -c 'python program.py || sleep 60'``.

    Args:
        communicators: Those of this rank.
        manager: With as many workers as the group has. It is consumed, unless its score function
            calls back into Python.
        rows: The most rows of a batch: what workers have as ``rows``.
        timeout: Seconds of silence after which a worker counts as lost, and which the last answers
            may take to arrive; None waits forever.
        save_to: A folder that the manager is saved to, with ``jaxbuf.save``: at the end, when a
            worker is lost, and when something fails. ``jaxbuf.load`` gives a manager to go on with.
            Managers of several groups need a folder each.
        save_every: Save it also after so many seconds, again and again.
        report: Called with what goes wrong as soon as it does, and in the end with a table of the
            traffic. None stays silent.

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
        raise ValueError("this rank is no manager; only the manager of a group serves it")
    checks.check_kind("manager", manager, Manager, "a jaxbuf.mpi.Manager")
    workers = group.Get_size() - 1
    if manager.counters.shape[0] != workers:
        raise ValueError(
            f"manager has {manager.counters.shape[0]} workers, but the group has {workers}; "
            f"create it with num_workers={workers}"
        )
    rows = common.check_count("rows", rows)
    timeout = checks.check_seconds("timeout", timeout)
    save_every = checks.check_seconds("save_every", save_every)
    if save_every is not None and save_to is None:
        raise ValueError(f"save_every is {save_every}, but save_to is None; give it a folder")
    if save_to is not None:
        checkpoint.check_folder("save_to", save_to)
    channel = wire.Channel(group, timeout)
    return _Server(channel, manager, rows, save_to, save_every, report).run()


def forms(manager: Manager, rows: int) -> dict[Kind, Form]:
    """How the messages of a manager and its workers look.

    Args:
        manager: Any that is like it; its numbers do not matter.
        rows: The most rows of a batch.
    """

    def zeros(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype)

    batch = {
        "items": jax.tree.map(zeros, manager.buffer.data),
        "score": jax.ShapeDtypeStruct((rows,), jnp.float32),
        "mask": jax.ShapeDtypeStruct((rows,), jnp.bool_),
    }
    _, reply = jax.eval_shape(_take, manager, batch, jnp.int32(0))
    out = {
        Kind.BATCH: Form(Kind.BATCH, batch),
        Kind.REPLY: Form(Kind.REPLY, reply),
        Kind.METADATA_REQUEST: Form(Kind.METADATA_REQUEST, ()),
        Kind.METADATA: Form(Kind.METADATA, jax.eval_shape(Manager.metrics, manager)),
    }
    out[Kind.HOLD] = Form(Kind.HOLD, ())
    notes = (Kind.EXIT, Kind.GOODBYE, Kind.REFUSAL, Kind.FAILURE)
    return out | {kind: wire.note_form(kind) for kind in notes}


@functools.cache
def _compiled(function: Callable[..., Any], donates: bool) -> Any:
    """The one jitted form of a function, made when the backend is known."""
    return jax.jit(
        function,
        donate_argnums=0 if donates else None,
        compiler_options=compiler_options(),
    )


def _take(
    manager: Manager, batch: dict[str, Any], sender: Int[Array, ""]
) -> tuple[Manager, dict[str, Any]]:
    """Store and score a batch: the manager that goes on, and what to answer."""
    manager, scores = manager.receive(
        batch["items"], score=batch["score"], mask=batch["mask"], sender=sender
    )
    return manager, {"scores": scores, "baseline": manager.baseline_value()}


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
        self._forms: dict[Kind, Form] = {}
        self._sends: list[tuple[Sending, int]] = []
        self._spare: dict[Kind, list[Message]] = {kind: [] for kind in Kind}
        self._left: set[int] = set()
        self._waiting: set[int] = set()
        self._lost: set[int] = set()
        self._heard = [time.monotonic()] * channel.manager
        self._saved = self._held = time.monotonic()

    def run(self) -> Served:
        try:
            self._prepare()
            self._heard = [time.monotonic()] * self._channel.manager
            self._serve()
            self._save()
        except BaseException as error:
            self._fail(error)
            raise
        for worker in self._waiting:
            self._send(worker, Kind.GOODBYE, {"note": wire.note("")})
        for worker in self._lost:
            text = f"{self._name}, the manager, took this rank for lost and has left"
            self._send(worker, Kind.FAILURE, {"note": wire.note(text)})
        self._finish_sends()
        if self._report is not None:
            self._report(f"{self._name}, manager:\n{self._traffic.table()}")
        return Served(self._manager, self._traffic, tuple(self._faults))

    def _prepare(self) -> None:
        """Trace all programs, so that a score function that raises does so before any batch."""
        self._forms = forms(self._manager, self._rows)
        incoming = (Kind.BATCH, Kind.METADATA_REQUEST, Kind.EXIT)
        self._memory = wire.aligned(max(self._forms[kind].size for kind in incoming))
        self._incoming = {kind.tag: Message(self._forms[kind], self._memory) for kind in incoming}
        self._senders = [np.int32(worker) for worker in range(self._channel.manager)]
        batch = self._incoming[Kind.BATCH.tag].tree
        self._take = _compiled(_take, donates=True)
        traced = self._take.trace(self._manager, batch, self._senders[0])
        # Whatever calls back into Python can fail halfway, and then nothing would be left to save.
        if "callback" in str(traced.jaxpr):
            self._take = _compiled(_take, donates=False)
        self._metrics = _compiled(Manager.metrics, donates=False)

    def _serve(self) -> None:
        wait = wire.Wait()
        while len(self._left | self._lost) < self._channel.manager:
            began = time.perf_counter()
            arrival = self._channel.receive(None, None, self._memory)
            if arrival is not None:
                self._handle(arrival, time.perf_counter() - began)
                wait.restart()
            else:
                self._look_for_silence()
                wait.pause()
            self._look_at_the_clock()

    def _look_at_the_clock(self) -> None:
        """Do what is to be done now and then."""
        now = time.monotonic()
        if self._save_every is not None and now - self._saved > self._save_every:
            self._save()
        if self._waiting and now - self._held > _HOLD_SECONDS:
            self._held = now
            for worker in self._waiting:
                self._send(worker, Kind.HOLD, ())

    def _look_for_silence(self) -> None:
        """Find out who is lost, while nothing comes."""
        if self._channel.timeout is None:
            return
        now = time.monotonic()
        for worker, heard in enumerate(self._heard):
            silent = now - heard
            if silent > self._channel.timeout and worker not in self._left | self._lost:
                self._lost.add(worker)
                batches = self._traffic.metrics()[f"{self._traffic.names[worker]}/batches"]
                self._note(
                    worker,
                    f"is lost: it has said nothing for {silent:.1f} s, after {batches} batches, "
                    "and has not left",
                )
                self._save()

    def _handle(self, arrival: Arrival, seconds: float) -> None:
        worker = arrival.source
        if worker == self._channel.rank or wire.FIRST_PART <= arrival.tag <= wire.LAST_PART:
            # A large array of a message that was refused.
            return
        message = self._incoming.get(arrival.tag)
        readable = message is not None and arrival.fits and arrival.size >= wire.HEADER_BYTES
        header = message.header if message is not None and readable else None
        if header is not None and self._channel.is_old(header):
            return
        if worker in self._lost:
            self._lost.remove(worker)
            self._note(worker, "is back")
        began = time.perf_counter()
        fault, size = self._fault(arrival, message), arrival.size
        if fault is None and message is not None and message.parts:
            fault = self._channel.receive_parts(worker, message)
            size += sum(part.size for part in message.parts)
        seconds += time.perf_counter() - began
        self._traffic.count(worker, bytes=size, receive=seconds)
        if fault is None and message is not None and message.kind == Kind.BATCH:
            marked = int(np.count_nonzero(message.tree["mask"]))
            if marked != message.header.rows:
                fault = f"it counts {message.header.rows} rows, but marks {marked}"
        if fault is not None or message is None:
            self._note(worker, f"sent a message that was refused: {fault}")
            text = f"{self._name}, the manager, refused a message: {fault}"
            sequence, session = 0, self._channel.session
            if header is not None:
                sequence = max(header.sequence, 0)
                # Who has begun anew too early would take an answer of this session for an old one.
                if header.magic == wire.MAGIC:
                    session = max(header.session, session)
            self._send(worker, Kind.REFUSAL, {"note": wire.note(text)}, sequence, session)
        elif arrival.tag == Kind.BATCH.tag:
            self._answer(worker, message)
        elif arrival.tag == Kind.METADATA_REQUEST.tag:
            self._traffic.count(worker, requests=1)
            metrics = self._metrics(self._manager)
            self._send(worker, Kind.METADATA, metrics, message.header.sequence)
        elif worker not in self._left:
            self._left.add(worker)
            if message.header.flags & wire.WAITS:
                self._waiting.add(worker)
            if message.header.flags & wire.FAILED:
                self._note(worker, f"left early: {wire.read_note(message.leaves[0])}")
        self._heard[worker] = time.monotonic()

    def _fault(self, arrival: Arrival, message: Message | None) -> str | None:
        """Why a message cannot be taken; None if it can."""
        if message is None:
            return f"its tag is {arrival.tag}, which none of ours has"
        if not arrival.fits or arrival.size < wire.HEADER_BYTES:
            return f"it has {arrival.size} bytes; expected at most {self._memory.size}"
        header: Header = message.header
        kind = Kind(arrival.tag - wire.FIRST_TAG)
        session = self._channel.session
        form = self._forms[kind]
        fault = form.fault(header, arrival.size, arrival.source, session, self._rows)
        if fault is None and kind == Kind.BATCH and arrival.source in self._left:
            return "its sender had left"
        return fault

    def _answer(self, worker: int, message: Message) -> None:
        header = message.header
        began = time.perf_counter()
        manager, reply = self._take(self._manager, message.tree, self._senders[worker])
        # So that an error comes up before the manager goes on, and the memory is free again.
        jax.block_until_ready(reply)
        self._manager = manager
        handled = time.perf_counter()
        outgoing = self._outgoing(Kind.REPLY)
        self._begin(worker, outgoing, reply, header.sequence, header.rows)
        self._traffic.count(
            worker,
            requests=1,
            batches=1,
            rows=header.rows,
            handle=handled - began,
            send=time.perf_counter() - handled,
            answered=outgoing.memory.size,
        )

    def _send(
        self, worker: int, kind: Kind, tree: Any, sequence: int = 0, session: int | None = None
    ) -> None:
        message = self._outgoing(kind)
        self._begin(worker, message, tree, sequence, session=session)
        self._traffic.count(worker, answered=message.memory.size)

    def _outgoing(self, kind: Kind) -> Message:
        """A message that is not under way."""
        if self._sends:
            self._collect_sends()
        spare = self._spare[kind]
        return spare.pop() if spare else (self._forms.get(kind) or wire.note_form(kind)).new()

    def _begin(
        self,
        worker: int,
        message: Message,
        tree: Any,
        sequence: int = 0,
        rows: int = 0,
        session: int | None = None,
    ) -> None:
        sending = self._channel.send(
            message, worker, tree, sequence=sequence, rows=rows, session=session
        )
        self._sends.append((sending, worker))

    def _collect_sends(self) -> None:
        under_way = self._sends
        self._sends = []
        for sending, worker in under_way:
            if sending.done():
                self._spare[sending.message.kind].append(sending.message)
            else:
                self._sends.append((sending, worker))

    def _finish_sends(self) -> None:
        """Wait for what is under way, but not to who is lost; the memory of the rest is kept."""
        wait = wire.Wait(self._channel.timeout)
        self._collect_sends()
        while not {worker for _, worker in self._sends} <= self._lost and wait.pause():
            self._collect_sends()
        for sending, worker in self._sends:
            if worker not in self._lost:
                self._note(worker, f"did not take a {sending.message.kind.name.lower()}")
        wire.abandon(self._sends)

    def _save(self) -> None:
        if self._save_to is not None:
            checkpoint.save(self._save_to, self._manager)
            self._saved = time.monotonic()

    def _fail(self, error: BaseException) -> None:
        """Tell the workers, and save what there is."""
        text = f"{self._name}, the manager, failed: {type(error).__name__}: {error}"
        if self._report is not None:
            self._report(text)
        for worker in set(range(self._channel.manager)) - (self._left - self._waiting):
            self._send(worker, Kind.FAILURE, {"note": wire.note(text)})
        if self._save_to is not None and not is_gone(self._manager):
            try:
                self._save()
                error.add_note(f"the manager was saved to {self._save_to}")
            except Exception as second:
                error.add_note(f"the manager could not be saved: {second}")
        error.add_note(f"in {self._name}, the manager of {self._channel.manager} workers")
        self._finish_sends()

    def _note(self, worker: int, text: str) -> None:
        fault = f"{self._channel.names[worker]} {text}"
        self._faults.append(fault)
        if self._report is not None:
            self._report(fault)

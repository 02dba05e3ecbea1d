"""A worker's messages to and from its manager: unanswered batches, answers and faults."""

import collections
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxbuf.core.slots import Slots
from jaxbuf.mpi import wire
from jaxbuf.mpi.wire import ExchangeError, Kind, Message


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


class Mailbox:
    """The batches of a worker that are unanswered, and the answers that it has not returned yet.

    Args:
        channel: The worker's channel to its manager.
        batches: The number of batches that the worker has sent before.
        baseline: The last baseline that the worker has heard of.

    Attributes:
        channel: The channel to the manager.
        waiting: The rows of each batch that is unanswered by its number, in rising order.
        answers: Answers that were not returned yet, in order.
        refused: The number of each batch that was refused, and the reason.
        baseline: The last baseline that the worker has heard of.
        failure: The reason why the manager cannot go on; empty while it can.
        counts: Batches ``answered``, ``refused`` and ``given_up``, and answers that came ``late``.
    """

    def __init__(self, channel: wire.Channel, batches: int, baseline: np.float32) -> None:
        self.channel = channel
        self.waiting: dict[int, int] = {}
        self.answers: collections.deque[Answer] = collections.deque()
        self.refused: list[tuple[int, str]] = []
        self.baseline = baseline
        self.failure = ""
        self.counts = dict.fromkeys(("answered", "refused", "given_up", "late"), 0)
        self.has_left = False
        self._batches, self._requests = batches, 0
        self._metadata: dict[int, dict[str, Any]] = {}
        # True once the manager has said goodbye, and once it has said that it is still there.
        self._released = self._held = False

    def send_batch(self, tree: Any, rows: int, *, slots: bool) -> None:
        """Begin to send a batch; its arrays must not change any more."""
        self._batches += 1
        self.waiting[self._batches] = rows
        kind = Kind.INSERT if slots else Kind.BATCH
        self._send(kind, tree, number=self._batches, rows=rows)

    def send_update(self, kind: Kind, tree: Any, rows: int, most: int) -> None:
        """Begin to send new values, and wait while more than ``most`` messages are on their way."""
        self._send(kind, tree, number=wire.NO_BATCH, rows=rows)
        self._wait(lambda: len(self.channel.sending) <= most, "an update")

    def request_metadata(self) -> dict[str, Any]:
        """Ask for the manager's metrics, and wait for them.

        Raises:
            TimeoutError: If they did not come in time.
            ExchangeError: If the manager has failed.
        """
        self._requests += 1
        self._metadata.clear()
        self._send(Kind.METADATA_REQUEST, number=self._requests)
        self._wait(lambda: self._requests in self._metadata, "a request for metadata")
        return self._metadata.pop(self._requests)

    def leave(self) -> None:
        """Tell the manager that this worker has sent everything, and waits for a goodbye."""
        self._leave(Kind.LEAVE)

    def abort(self, reason: str) -> None:
        """Tell the manager that this worker leaves early, unless it cannot be told any more."""
        from mpi4py import MPI

        if not self.has_left and not MPI.Is_finalized():
            self._leave(Kind.ABORT, wire.note(reason))

    def poll(self) -> None:
        """Take all messages that have come, without waiting."""
        while (message := self.channel.receive()) is not None:
            self._take(message)
        if self.channel.sending:
            self.channel.collect()

    def wait(self, until: Callable[[], bool]) -> None:
        """Wait until a condition on unanswered batches holds.

        Raises:
            TimeoutError: If it does not in time; then all batches are given up.
            ExchangeError: If the manager has failed.
        """
        try:
            self._wait(until, "batch {}")
        except TimeoutError:
            self.give_up()
            raise

    def wait_for_answers(self, timeout: float | None) -> str:
        """Wait until everything is sent and answered, or the manager has failed.

        Returns:
            A description of what is unanswered when the time is over; empty if all is answered.
        """
        wait = wire.Wait(timeout)
        while (self.waiting or self.channel.sending) and not self.failure:
            if not wait.pause(sending=bool(self.channel.sending)):
                break
            self.poll()
        if not self.waiting or self.failure:
            return ""
        return self._silence(f"{len(self.waiting)} batches", timeout)

    def wait_for_goodbye(self, timeout: float | None) -> str:
        """Wait until the manager leaves as well; each message from it restarts the time limit.

        Returns:
            The reason why it did not say goodbye; empty if it did.
        """
        wait = wire.Wait(timeout)
        while not self._released and not self.failure:
            self.poll()
            if self._held:
                self._held = False
                wait.restart()
            if not self._released and not self.failure and not wait.pause():
                return self._silence("the exit", timeout)
        return self.failure

    def give_up(self) -> None:
        """Stop waiting for answers; later ones are dropped."""
        self.counts["given_up"] += len(self.waiting)
        self.waiting.clear()

    def take_all(self) -> tuple[tuple[Answer, ...], tuple[int, ...]]:
        """Return all answers, and the numbers of batches without one, which are given up."""
        answers = tuple(self.answers)
        refused = (number for number, _ in self.refused if 0 < number <= self._batches)
        missing = sorted([*self.waiting, *refused])
        self.answers.clear()
        self.refused.clear()
        self.give_up()
        return answers, tuple(missing)

    def raise_failure(self) -> None:
        """Raise an error if the manager has failed."""
        if self.failure:
            raise ExchangeError(self.failure)

    def raise_refused(self) -> None:
        """Raise an error if batches were refused, or the manager has failed."""
        self.raise_failure()
        if self.refused:
            text = "; ".join(text for _, text in self.refused)
            self.refused.clear()
            raise ExchangeError(text)

    def _send(self, kind: Kind, tree: Any = (), number: int = 0, rows: int = 0) -> None:
        self.channel.send(kind, self.channel.manager, tree, number=number, rows=rows)

    def _leave(self, kind: Kind, tree: Any = ()) -> None:
        self.has_left = True
        self._send(kind, tree)
        self.channel.abandon()

    def _wait(self, until: Callable[[], bool], what: str) -> None:
        wait = wire.Wait(self.channel.timeout)
        self.poll()
        while not until():
            self.raise_failure()
            if not wait.pause(sending=bool(self.channel.sending)):
                what = what.format(", ".join(map(str, self.waiting)))
                raise TimeoutError(self._silence(what, self.channel.timeout))
            self.poll()

    def _silence(self, what: str, timeout: float | None) -> str:
        return f"{self.channel.manager_name} has not answered {what} within {timeout:g} s"

    def _take(self, message: Message) -> None:
        kind, number = message.header.kind, message.header.number
        if message.fault:
            self._fail(
                f"{self.channel.manager_name} sent a message that cannot be read: {message.fault}"
            )
        elif kind in (Kind.REPLY, Kind.PLACED):
            self._take_reply(message)
        elif kind == Kind.METADATA:
            self._metadata[number] = jax.tree.map(np.copy, message.tree)
        elif kind == Kind.LEAVE:
            self._released, self._held = number == 0, True
        elif kind == Kind.REFUSAL:
            # Batches keep their order, so a message without a number was the oldest one.
            if number == 0 and self.waiting:
                number = next(iter(self.waiting))
            self.waiting.pop(number, None)
            self.counts["refused"] += 1
            self.refused.append((number, wire.read_note(message.tree)))
        elif kind == Kind.ABORT:
            self._fail(wire.read_note(message.tree))
        else:
            self._fail(f"{self.channel.manager_name} sent a message that only workers send")

    def _take_reply(self, message: Message) -> None:
        number = message.header.number
        self.baseline = np.float32(message.tree.baseline)
        if number not in self.waiting:
            self.counts["late"] += 1
            return
        rows = self.waiting.pop(number)
        self.counts["answered"] += 1
        scores = jax.tree.map(np.copy, message.tree.scores)
        slots = jax.tree.map(lambda x: x[:rows].copy(), message.tree.slots)
        self.answers.append(Answer(scores, float(self.baseline), number, slots))

    def _fail(self, text: str) -> None:
        # The first failure is the cause of later ones.
        self.failure = self.failure or text

"""Messages between a manager and its workers: a header and arrays of known shapes.

Both sides know the shapes, so a message is as long as it always is and nothing is pickled. Each
kind has a tag of its own. Who receives a message checks its header before looking at anything else.
Header and small arrays travel in one piece; each large array of a batch follows on its own, from
the memory that it lies in, so that it is not copied before.
"""

import enum
import os
import time
import zlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import jax
import numpy as np
from jaxtyping import PyTree

if TYPE_CHECKING:
    from mpi4py import MPI

# The last byte is the version of this format.
MAGIC = 0x6A786266_01
# Flags of an exit: it follows an error; whoever sent it waits for a goodbye.
FAILED = 1
WAITS = 2
# Tags are of the whole group, which may have other messages.
FIRST_TAG = 7100
# The tags of large arrays follow from here on, and arrays from so many bytes on are large.
FIRST_PART, LAST_PART = FIRST_TAG + 100, FIRST_TAG + 1099
_PART_BYTES = 2**18
# The length of a header; arrays begin at multiples of it.
HEADER_BYTES = 64
_NOTE_BYTES = 512
# For so long whoever waits only gives way; after that it sleeps, and longer the longer it waits.
# While a message of its own is under way it goes on for longer: MPI may need it for that.
_EAGER_SECONDS = 1e-2
_EAGER_SECONDS_SENDING = 0.5
_LONGEST_SLEEP = 1e-3
_ABANDONED: list[Any] = []
# What a communicator keeps its count of sessions under.
_sessions: int | None = None


class Kind(enum.IntEnum):
    """What a message is."""

    BATCH = 1
    REPLY = 2
    METADATA_REQUEST = 3
    METADATA = 4
    EXIT = 5
    # The manager has left, too: it has stored all that it was sent.
    GOODBYE = 6
    # The manager could not read a message, or cannot go on; the note says why.
    REFUSAL = 7
    FAILURE = 8
    # The manager has nothing to say yet, but is there.
    HOLD = 9

    @property
    def tag(self) -> int:
        """The tag under which it travels."""
        return FIRST_TAG + self


class ExchangeError(RuntimeError):
    """The other end of an exchange refused a message, failed, or left something unanswered."""


class Header(NamedTuple):
    """What each message begins with, eight numbers of eight bytes.

    Attributes:
        magic: Tells that this is a message, and of which version.
        session: How often the group has been served, this time included: what is left over from
            before is not looked at.
        kind: A ``Kind``.
        sender: The rank in the group that it comes from.
        sequence: The number of the batch or request that it is, or answers; 0 if of none.
        rows: How many rows are there.
        flags: Of an exit: ``FAILED``, ``WAITS``.
        form: A checksum of the shapes and dtypes that follow.
    """

    magic: int
    session: int
    kind: int
    sender: int
    sequence: int
    rows: int
    flags: int
    form: int


class Message:
    """A header and arrays, all but the large ones in one piece of memory, of which they are views.

    Attributes:
        memory: That piece, ``[size]`` uint8.
        leaves: The arrays.
        parts: The large ones, each as bytes.
    """

    def __init__(self, form: "Form", memory: np.ndarray[Any, Any]) -> None:
        self.memory = memory[: form.size]
        self._form = form
        self._header = self.memory[:HEADER_BYTES].view(np.int64)
        self._own: list[np.ndarray[Any, Any]] = []
        self.leaves: list[np.ndarray[Any, Any]] = []
        for start, leaf in zip(form.starts, form.leaves, strict=True):
            size = leaf.size * leaf.dtype.itemsize
            if start is None:
                self._own.append(aligned(size))
            data = self._own[-1] if start is None else self.memory[start : start + size]
            self.leaves.append(data.view(leaf.dtype).reshape(leaf.shape))
        self.parts = list(self._own)

    @property
    def kind(self) -> Kind:
        """What it is."""
        return self._form.kind

    @property
    def header(self) -> Header:
        """The header, as it lies there."""
        return Header(*self._header.tolist())

    @property
    def tree(self) -> Any:
        """The arrays as the pytree that they are."""
        return jax.tree.unflatten(self._form.treedef, self.leaves)

    def write(
        self,
        tree: PyTree,
        *,
        sender: int,
        session: int,
        sequence: int = 0,
        rows: int = 0,
        flags: int = 0,
        lends: bool = False,
    ) -> None:
        """Write a whole message; where ``tree`` has fewer rows than it, the others are zero.

        If it ``lends`` its arrays, which then never change, the large ones are not copied.
        """
        kind, checksum = self._form.kind, self._form.checksum
        self._header[:] = MAGIC, session, kind, sender, sequence, rows, flags, checksum
        parts: list[np.ndarray[Any, Any]] = []
        leaves = zip(self.leaves, self._form.starts, jax.tree.leaves(tree), strict=True)
        for view, start, leaf in leaves:
            array = np.asarray(leaf)
            if start is None:
                whole = array.shape == view.shape and array.flags.c_contiguous
                if lends and whole:
                    parts.append(array.reshape(-1).view(np.uint8))
                    continue
                parts.append(self._own[len(parts)])
            if array.shape != view.shape:
                view[len(array) :] = 0
                view = view[: len(array)]
            np.copyto(view, array)
        self.parts = parts

    def give_back(self) -> None:
        """Forget the arrays that were lent."""
        self.parts = list(self._own)


class Form:
    """How messages of one kind look: the same on both sides, whatever the arrays hold.

    Args:
        kind: What they are.
        tree: A pytree of arrays or ``jax.ShapeDtypeStruct``.

    Attributes:
        kind: What they are.
        leaves: Shapes and dtypes.
        treedef: Their structure.
        starts: Where each array begins, in bytes; None for large ones, which follow on their own.
        size: Bytes of the piece that all but these are in.
        checksum: Of structure, shapes and dtypes.
    """

    def __init__(self, kind: Kind, tree: PyTree) -> None:
        leaves, self.treedef = jax.tree.flatten(tree)
        self.kind = kind
        self.leaves = [jax.ShapeDtypeStruct(x.shape, np.dtype(x.dtype)) for x in leaves]
        self.starts: list[int | None] = []
        self.size = HEADER_BYTES
        for leaf in self.leaves:
            length = leaf.size * leaf.dtype.itemsize
            apart = kind == Kind.BATCH and length >= _PART_BYTES
            self.starts.append(None if apart else self.size)
            self.size += 0 if apart else -(-length // HEADER_BYTES) * HEADER_BYTES
        names = [jax.tree_util.keystr(key) for key, _ in jax.tree_util.tree_leaves_with_path(tree)]
        described = [(leaf.shape, leaf.dtype.name) for leaf in self.leaves]
        self.checksum = zlib.crc32(repr((names, described)).encode())

    def new(self) -> Message:
        """A message in memory of its own."""
        return Message(self, aligned(self.size))

    def fault(self, header: Header, size: int, sender: int, session: int, rows: int) -> str | None:
        """What is wrong with a message that came as one of this kind; None if nothing is.

        Args:
            header: Its header.
            size: Its length in bytes.
            sender: The rank that it came from.
            session: The session of who received it.
            rows: The most rows that it can hold.
        """
        if header.magic != MAGIC:
            other = header.magic >> 8 == MAGIC >> 8
            return (
                f"its magic number is {header.magic:#x}; expected {MAGIC:#x}"
                f"{', as this version of jaxbuf has it' if other else ''}"
            )
        if header.kind != self.kind:
            return f"its kind is {header.kind}; expected {int(self.kind)}, which its tag stands for"
        if header.sender != sender:
            return f"it says that it is from rank {header.sender} of the group, which it is not"
        if header.session != session:
            return (
                f"its session is {header.session}; expected {session}: who leaves may begin anew "
                "once all have left"
            )
        if header.sequence < 0:
            return f"its number is {header.sequence}; expected 0 or more"
        if not 0 <= header.rows <= rows:
            return f"it counts {header.rows} rows; expected from 0 to {rows}"
        if header.form != self.checksum or size != self.size:
            return (
                f"its arrays have other shapes or dtypes ({size} bytes; expected {self.size}): "
                "rows and the example must be the same on both sides"
            )
        return None


class Channel:
    """The ends of a group's messages: its communicator, and what its ranks are called elsewhere.

    Args:
        group: The communicator of a manager, the last rank, and its workers.
        timeout: Seconds after which whoever waits gives up; None never.
    """

    def __init__(self, group: "MPI.Intracomm", timeout: float | None) -> None:
        from mpi4py import MPI

        self.comm = group
        self.rank = group.Get_rank()
        self.manager = group.Get_size() - 1
        self.timeout = timeout
        self.session = _next_session(group)
        ranks = list(range(group.Get_size()))
        ours, world = group.Get_group(), MPI.COMM_WORLD.Get_group()
        # A rank is known by its number in the whole run, if it has one.
        known = ours.Translate_ranks(ranks, world)
        self.names = [f"rank {r if k == MPI.UNDEFINED else k}" for r, k in enumerate(known)]

    def send(
        self,
        message: Message,
        to: int,
        tree: PyTree,
        *,
        sequence: int = 0,
        rows: int = 0,
        flags: int = 0,
        lends: bool = False,
        session: int | None = None,
    ) -> "Sending":
        """Write a message and begin to send it; its memory must stay as it is until that is done.

        Args:
            message: Where to write.
            to: The rank in the group that it goes to.
            tree: Its arrays.
            sequence: The number of the batch or request that it is, or answers.
            rows: How many rows are there.
            flags: Of an exit.
            lends: Whether large arrays are sent from where they lie.
            session: Of whom it is for; by default that of the sender, too.
        """
        from mpi4py import MPI

        message.write(
            tree,
            sender=self.rank,
            session=self.session if session is None else session,
            sequence=sequence,
            rows=rows,
            flags=flags,
            lends=lends,
        )
        pieces = [(message.memory, message.kind.tag)]
        pieces += [(part, FIRST_PART + k) for k, part in enumerate(message.parts)]
        return Sending(
            [self.comm.Isend([data, MPI.BYTE], dest=to, tag=tag) for data, tag in pieces], message
        )

    def receive_parts(self, source: int, message: Message) -> str | None:
        """Receive the large arrays that follow a message; what is wrong with them, or None."""
        from mpi4py import MPI

        wait = Wait(self.timeout)
        for k, part in enumerate(message.parts):
            status = MPI.Status()
            while (matched := self.comm.Improbe(source, FIRST_PART + k, status)) is None:
                if not wait.pause(sending=True):
                    return f"its large arrays did not follow within {self.timeout} s"
            size = status.Get_count(MPI.BYTE)
            fits = size == part.size
            matched.Recv([part if fits else np.empty(size, np.uint8), MPI.BYTE])
            if not fits:
                return f"a large array of it has {size} bytes; expected {part.size}"
        return None

    def is_old(self, header: Header) -> bool:
        """Whether a message is left over from an earlier session."""
        return header.magic == MAGIC and 0 < header.session < self.session

    def receive(
        self, source: int | None, tag: int | None, memory: np.ndarray[Any, Any]
    ) -> "Arrival | None":
        """Receive into ``memory`` what has come, if something has.

        Args:
            source: The rank from which; None any.
            tag: The tag under which; None any.
            memory: Room for it. Of a longer message only the size is told.
        """
        from mpi4py import MPI

        status = MPI.Status()
        matched = self.comm.Improbe(
            MPI.ANY_SOURCE if source is None else source,
            MPI.ANY_TAG if tag is None else tag,
            status,
        )
        if matched is None:
            return None
        size = status.Get_count(MPI.BYTE)
        fits = 0 <= size <= memory.size
        matched.Recv([memory if fits else np.empty(max(size, 0), np.uint8), MPI.BYTE])
        return Arrival(status.Get_source(), status.Get_tag(), size, fits)


class Sending:
    """A message under way.

    Attributes:
        message: What is sent.
    """

    def __init__(self, requests: "list[MPI.Request]", message: Message) -> None:
        self._requests = requests
        self.message = message

    def done(self) -> bool:
        """Whether its memory may change again."""
        self._requests = [request for request in self._requests if not request.Test()]
        return not self._requests


class Arrival(NamedTuple):
    """What is known of a message from outside.

    Attributes:
        source: The rank that it came from.
        tag: The tag under which it came.
        size: Its length in bytes.
        fits: Whether it was received.
    """

    source: int
    tag: int
    size: int
    fits: bool


class Wait:
    """Waits, a little longer each time, until a time limit.

    Args:
        timeout: Seconds from now; None has no limit.
    """

    def __init__(self, timeout: float | None = None) -> None:
        self.timeout = timeout
        self._began = self._idle_since = time.monotonic()

    def pause(self, sending: bool = False) -> bool:
        """Wait a little, less while ``sending``; False, and at once, if the time is over."""
        now = time.monotonic()
        waited = now - self._began
        if self.timeout is not None and waited >= self.timeout:
            return False
        if sending and waited < _EAGER_SECONDS_SENDING:
            self._idle_since = now
        idle = now - self._idle_since
        if idle < _EAGER_SECONDS:
            os.sched_yield()
        else:
            time.sleep(min(idle / 10, _LONGEST_SLEEP))
        return True

    def restart(self) -> Self:
        """Begin anew, with the same limit."""
        self._began = self._idle_since = time.monotonic()
        return self


def aligned(size: int) -> np.ndarray[Any, Any]:
    """Memory ``[size]`` uint8 that begins where arrays of any dtype may."""
    memory = np.zeros((size + HEADER_BYTES,), np.uint8)
    start = -memory.ctypes.data % HEADER_BYTES
    return memory[start : start + size]


def abandon(requests: Iterable[Any]) -> None:
    """Keep what is still under way, and its memory, for as long as the process runs."""
    _ABANDONED.extend(requests)


def note(text: str) -> np.ndarray[Any, Any]:
    """A text as an array of fixed size, without its middle if it is longer."""
    raw = text.encode()
    if len(raw) > _NOTE_BYTES:
        # Errors say what they are at the beginning, or at the end of many lines.
        half = _NOTE_BYTES // 2 - 2
        raw = raw[:half] + b" .. " + raw[-half:]
    data = np.zeros((_NOTE_BYTES,), np.uint8)
    data[: len(raw)] = np.frombuffer(raw, np.uint8)
    return data


def read_note(data: np.ndarray[Any, Any]) -> str:
    """The text that ``note`` made an array of."""
    return bytes(data).rstrip(b"\0").decode(errors="replace")


def note_form(kind: Kind) -> Form:
    """How messages look that hold nothing but a text."""
    return Form(kind, {"note": jax.ShapeDtypeStruct((_NOTE_BYTES,), np.uint8)})


def _next_session(group: "MPI.Intracomm") -> int:
    """The number of this session: how often this rank has come to the group's communicator."""
    from mpi4py import MPI

    global _sessions
    if _sessions is None:
        _sessions = MPI.Comm.Create_keyval()
    session = (group.Get_attr(_sessions) or 0) + 1
    group.Set_attr(_sessions, session)
    return session

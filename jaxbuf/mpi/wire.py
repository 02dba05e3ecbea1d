"""Messages between a manager and its workers.

A message is a header, which is a record of a fixed NumPy dtype, followed by the arrays of a pytree
whose shapes both ends know; nothing is pickled. Header and small arrays are sent in one piece, in
which each array has a fixed place, so the receiver need not copy it. Large arrays follow, each sent
from its own memory and without the rows that it does not use.

flax's msgpack packs any pytree, but copies arrays at both ends: between two ranks on one machine,
64 small transitions (4 kB) take 80 µs in place of 45, and 64 stacks of frames (1.8 MB) take 9 ms in
place of 0.6. The pickles of mpi4py would copy as often, and run what they hold.

Each run of the exchange has two tags of its own, one for first pieces and one for large arrays.
Messages that an earlier run left behind are therefore recognized and dropped. A communicator for
each run would do the same, but creating one is a collective call, in which a rank that crashed
cannot take part.
"""

import enum
import math
import os
import time
import zlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import jax
import numpy as np
from jaxtyping import PyTree

from jaxbuf.core.leaves import on_host, to_host

if TYPE_CHECKING:
    from mpi4py import MPI

# The last byte is the version of this format.
MAGIC = 0x6A786266_04
HEADER = np.dtype([(name, np.int64) for name in ("magic", "kind", "number", "rows", "checksum")])
# The application may send messages of its own through the communicator, usually with small tags.
FIRST_TAG = 7100
# The number of a message from a worker that is not a batch, above those of batches.
NO_BATCH = 2**62
# Arrays of at least this many bytes are sent on their own.
_LARGE = 2**18
_NOTE_BYTES = 512
# XLA reads arrays that begin at a multiple of this without copying them.
_ALIGNMENT = 64
# A waiting rank first only yields the processor, for longer while a message of its own is on its
# way, because MPI may need calls from it to deliver that. Then it sleeps, longer and longer.
_EAGER_SECONDS = 1e-2
_EAGER_SECONDS_SENDING = 0.5
_LONGEST_SLEEP = 1e-3
_ABANDONED: list[Any] = []
# The key of the attribute of communicators that counts their runs.
_runs_key: int | None = None


class Kind(enum.IntEnum):
    """The kinds of messages."""

    BATCH = 1
    REPLY = 2
    METADATA_REQUEST = 3
    METADATA = 4
    # A worker leaves. The manager answers with the number of workers that it waits for: a message
    # with 0 is the last one, after which it leaves too.
    LEAVE = 5
    # This end leaves early, or cannot go on; the note says why.
    ABORT = 6
    # The manager could not use a message; the note says why.
    REFUSAL = 7
    # A batch whose answer has the slots of its rows, and that answer.
    INSERT = 8
    PLACED = 9
    # New values for items of the manager's buffer, by their slots; they are not answered.
    SCORES = 10
    PRIORITIES = 11


class ExchangeError(RuntimeError):
    """The other end of an exchange refused a message, failed, or did not answer."""


class Header(NamedTuple):
    """The beginning of each message: five integers of eight bytes, as ``HEADER`` lays them out.

    Attributes:
        magic: Identifies a message of this format and version.
        kind: A ``Kind``.
        number: The number of the batch or request that the message is or answers. In an answer to
            a worker that leaves, the number of workers that the manager waits for; 0 for others.
        rows: The number of rows in the arrays of a batch or of new values; 0 for other kinds.
        checksum: The checksum of the schema of the arrays.
    """

    magic: int
    kind: int
    number: int = 0
    rows: int = 0
    checksum: int = 0


def _size(leaf: Any) -> int:
    """Returns the bytes of an array of this shape and dtype."""
    return math.prod(leaf.shape) * leaf.dtype.itemsize


class Schema:
    """The shapes and dtypes of the arrays in one kind of message, the same at both ends.

    Args:
        tree: A pytree of arrays or ``jax.ShapeDtypeStruct``.
        rows: If given, all arrays have a leading axis of this length, and a message may have fewer
            rows.

    Attributes:
        leaves: Shapes and dtypes on a host; see ``jaxbuf.core.leaves``.
        starts: The byte of the first piece at which each array begins; None for large arrays.
        size: The bytes of the first piece, header included.
        treedef: The structure of the arrays.
        names: Their paths in it.
        rows: The largest number of rows; None if arrays have no leading axis of rows.
        checksum: A checksum of structure, shapes and dtypes.
    """

    def __init__(self, tree: PyTree, rows: int | None = None) -> None:
        flat, self.treedef = jax.tree.flatten(tree)
        self.leaves = [on_host(x) for x in flat]
        self.rows = rows
        self.starts: list[int | None] = []
        self.size = HEADER.itemsize
        for size in map(_size, self.leaves):
            start = -(-self.size // _ALIGNMENT) * _ALIGNMENT
            self.starts.append(None if size >= _LARGE else start)
            self.size = self.size if size >= _LARGE else start + size
        names = [jax.tree_util.keystr(key) for key, _ in jax.tree_util.tree_leaves_with_path(tree)]
        self.names = names
        described = [(tuple(x.shape), x.dtype.name) for x in flat]
        self.checksum = zlib.crc32(repr((names, described)).encode())

    def fault(self, arrays: list[np.ndarray]) -> str:
        """Returns the reason why the numbers of a message cannot be used; empty if they can.

        A program adds up the bytes of flags, so a byte that is neither 0 nor 1 counts as many.
        """
        for name, leaf, array in zip(self.names, self.leaves, arrays, strict=True):
            if leaf.dtype == np.bool_ and array.size:
                byte = int(array.view(np.uint8).max())
                if byte > 1:
                    return f"its array {name} has the byte {byte} as a flag; expected 0 or 1"
        return ""

    def arrays(self, first: np.ndarray) -> list[np.ndarray]:
        """Returns the small arrays as views of a first piece, and memory for the large ones."""
        return [
            _zeros(leaf.shape, leaf.dtype)
            if start is None
            else first[start : start + _size(leaf)].view(leaf.dtype).reshape(leaf.shape)
            for start, leaf in zip(self.starts, self.leaves, strict=True)
        ]


_NOTE = Schema(jax.ShapeDtypeStruct((_NOTE_BYTES,), np.uint8))
_NOTHING = Schema(())
# The schemas of other kinds depend on the manager, and some managers do not use all kinds.
_SCHEMAS = {
    Kind.METADATA_REQUEST: _NOTHING,
    Kind.LEAVE: _NOTHING,
    Kind.ABORT: _NOTE,
    Kind.REFUSAL: _NOTE,
}


class Message(NamedTuple):
    """A message that was received.

    Attributes:
        source: The rank in the group that sent it.
        tag: The tag of its header.
        size: Bytes received, arrays included.
        header: Its header; zeros if it could not be read.
        tree: Its arrays, valid until the next message is received; None if there is a fault.
        fault: The reason why it cannot be used; empty if it can.
    """

    source: int
    tag: int
    size: int
    header: Header
    tree: Any = None
    fault: str = ""


class Sending(NamedTuple):
    """A message on its way. The requests keep the memory of its arrays alive.

    Attributes:
        to: The rank that it goes to.
        kind: Its kind.
        requests: One for the first piece and one for each large array.
        memory: The memory of its first piece.
    """

    to: int
    kind: Kind
    requests: "list[MPI.Request]"
    memory: "_Memory"

    def done(self) -> bool:
        """Returns whether MPI no longer needs the memory."""
        return all(request.Test() for request in self.requests)


class _Memory:
    """Memory for the first piece of any message; it is used again once a message is done.

    Args:
        size: Its bytes.
    """

    def __init__(self, size: int) -> None:
        self.first = _zeros((size,), np.dtype(np.uint8))
        self._arrays: dict[Kind, tuple[list[np.ndarray], Any]] = {}

    def arrays(self, kind: Kind, schema: Schema) -> tuple[list[np.ndarray], Any]:
        """Returns the arrays of a message of this kind, as a list and as a pytree."""
        if kind not in self._arrays:
            arrays = schema.arrays(self.first)
            self._arrays[kind] = arrays, jax.tree.unflatten(schema.treedef, arrays)
        return self._arrays[kind]


class _Partial(NamedTuple):
    """A message whose first piece was received, but not all of its large arrays.

    Attributes:
        message: The message without its missing arrays.
        memory: Its memory.
        missing: The memory of each large array that was not received yet, as bytes.
    """

    message: Message
    memory: _Memory
    missing: list[np.ndarray]


class Channel:
    """One end of the messages of a group, for one run of the exchange.

    Args:
        group: The communicator of the workers and their manager, which has the last rank.
        timeout: Seconds after which a wait ends; None waits forever.

    Attributes:
        names: The name of each rank of the group in messages to users.
        schemas: The schema of each kind of message.
        sending: Messages on their way, in the order in which they were sent.
        tag: The tag of this run's first pieces. Large arrays have the next one.
    """

    def __init__(self, group: "MPI.Intracomm", timeout: float | None) -> None:
        from mpi4py import MPI

        self.comm = group
        self.rank = group.Get_rank()
        self.manager = group.Get_size() - 1
        self.timeout = timeout
        self.tag = FIRST_TAG + 2 * _count_run(group)
        self.schemas: dict[Kind, Schema] = dict(_SCHEMAS)
        self.sending: list[Sending] = []
        ranks = list(range(group.Get_size()))
        # Name ranks by their number in the whole program, if they have one.
        in_world = group.Get_group().Translate_ranks(ranks, MPI.COMM_WORLD.Get_group())
        self.names = [f"rank {r if w == MPI.UNDEFINED else w}" for r, w in enumerate(in_world)]
        self._mpi, self._status = MPI, MPI.Status()
        self._source = MPI.ANY_SOURCE if self.rank == self.manager else self.manager
        self._partial: dict[int, _Partial] = {}
        # Memory that is free, and that of the message that was returned last.
        self._free: list[_Memory] = []
        self._returned: _Memory | None = None

    @property
    def manager_name(self) -> str:
        """The name of the manager, for texts."""
        return f"{self.names[self.manager]}, the manager,"

    def add_schemas(self, schemas: Mapping[Kind, Schema]) -> None:
        """Sets the schemas that depend on what is exchanged, before the first message."""
        self.schemas |= schemas
        self._free.clear()

    def send(
        self,
        kind: Kind,
        to: int,
        tree: PyTree = (),
        *,
        number: int = 0,
        rows: int = 0,
        tag: int | None = None,
    ) -> int:
        """Begins to send a message.

        Args:
            kind: Its kind.
            to: The rank in the group that it goes to.
            tree: Its arrays, as the schema of the kind has them. They must not change until the
                message is no longer in ``sending``.
            number: The number of the batch or request that it is or answers.
            rows: The number of rows of a batch.
            tag: The tag of its first piece; that of this run by default.

        Returns:
            The bytes of the message.
        """
        tag = self.tag if tag is None else tag
        schema, memory = self.schemas[kind], self._take_memory()
        memory.first[: HEADER.itemsize].view(HEADER)[0] = MAGIC, kind, number, rows, schema.checksum
        parts = [memory.first[: schema.size]]
        views, _ = memory.arrays(kind, schema)
        for view, start, leaf in zip(views, schema.starts, jax.tree.leaves(tree), strict=True):
            array = to_host(leaf)
            if start is None:
                parts.append(_bytes(array))
            elif array.shape == view.shape:
                view[...] = array
            else:
                view[:rows], view[rows:] = array, 0
        requests = [
            self.comm.Isend([part, self._mpi.BYTE], dest=to, tag=tag + (k > 0))
            for k, part in enumerate(parts)
        ]
        self.sending.append(Sending(to, kind, requests, memory))
        return sum(part.size for part in parts)

    def collect(self) -> None:
        """Forgets messages that have been sent."""
        done = [sending.done() for sending in self.sending]
        self._free += [x.memory for x, sent in zip(self.sending, done, strict=True) if sent]
        self.sending = [x for x, sent in zip(self.sending, done, strict=True) if not sent]

    def abandon(self) -> None:
        """Keeps messages that are on their way, and their memory, until the process ends."""
        _ABANDONED.extend(self.sending)
        self.sending = []

    def receive(self) -> Message | None:
        """Returns the next message that is complete or faulty; None if no more have arrived."""
        self._free_returned()
        mpi, status = self._mpi, self._status
        while matched := self.comm.Improbe(self._source, mpi.ANY_TAG, status):
            source, tag, size = status.Get_source(), status.Get_tag(), status.Get_count(mpi.BYTE)
            if tag == self.tag + 1:
                message = self._receive_large(matched, source, size)
            else:
                message = self._receive_first(matched, source, tag, size)
            if message is not None:
                return message
            self._free_returned()
        return None

    def _receive_first(
        self, matched: "MPI.Message", source: int, tag: int, size: int
    ) -> Message | None:
        memory = self._take_memory()
        data = memory.first[:size] if size <= memory.first.size else np.empty(size, np.uint8)
        matched.Recv([data, self._mpi.BYTE])
        self._returned = memory
        if tag >= FIRST_TAG and (tag < self.tag or tag % 2):
            # From an earlier run, or a large array of a message that was refused.
            return None
        header = Header(0, 0)
        if size >= HEADER.itemsize:
            header = Header(*data[: HEADER.itemsize].view(HEADER)[0].tolist())
        fault = self._fault(header, tag, size)
        if fault:
            header = header if header.magic == MAGIC else Header(0, 0)
            return Message(source, tag, size, header, fault=fault)
        kind = Kind(header.kind)
        schema = self.schemas[kind]
        arrays, tree = memory.arrays(kind, schema)
        missing: list[np.ndarray] = []
        for array, start in zip(arrays, schema.starts, strict=True):
            if start is None:
                used = array if schema.rows is None else array[: header.rows]
                array[len(used) :] = 0
                missing.append(_bytes(used))
        return self._complete(_Partial(Message(source, tag, size, header, tree), memory, missing))

    def _receive_large(self, matched: "MPI.Message", source: int, size: int) -> Message | None:
        partial = self._partial.pop(source, None)
        expected = partial.missing[0] if partial else None
        fits = expected is not None and expected.size == size
        matched.Recv([expected if fits else np.empty(size, np.uint8), self._mpi.BYTE])
        if partial is None or expected is None:
            # Its message was refused.
            return None
        message = partial.message._replace(size=partial.message.size + size)
        if not fits:
            fault = f"an array of it has {size} bytes; expected {expected.size}"
            return message._replace(tree=None, fault=fault)
        return self._complete(_Partial(message, partial.memory, partial.missing[1:]))

    def _complete(self, partial: _Partial) -> Message | None:
        """Returns the message if it is complete, and otherwise waits for its next large array."""
        if partial.missing:
            # If an earlier message is still incomplete, an error of its sender cut it short.
            self._partial[partial.message.source] = partial
            self._returned = None
            return None
        self._returned = partial.memory
        message, kind = partial.message, Kind(partial.message.header.kind)
        arrays, _ = partial.memory.arrays(kind, self.schemas[kind])
        fault = self.schemas[kind].fault(arrays)
        return message._replace(tree=None, fault=fault) if fault else message

    def _free_returned(self) -> None:
        """Frees the memory of the message that was returned last."""
        if self._returned is not None:
            self._free.append(self._returned)
            self._returned = None

    def _take_memory(self) -> _Memory:
        if self._free:
            return self._free.pop()
        return _Memory(max(schema.size for schema in self.schemas.values()))

    def _fault(self, header: Header, tag: int, size: int) -> str:
        """Returns the reason why a header cannot be used; empty if it can."""
        if tag != self.tag:
            return (
                f"its tag is {tag}; expected {self.tag}: a worker that has left may begin anew "
                "once all have left"
            )
        if size < HEADER.itemsize:
            return f"it has {size} bytes; expected at least {HEADER.itemsize}"
        if header.magic != MAGIC:
            other = header.magic >> 8 == MAGIC >> 8
            hint = ": both ends need the same version of jaxbuf" if other else ""
            return f"its magic number is {header.magic:#x}; expected {MAGIC:#x}{hint}"
        if header.kind not in [*Kind]:
            return f"its kind is {header.kind}; expected 1 to {len(Kind)}"
        if header.kind not in self.schemas:
            name = Kind(header.kind).name
            return f"its kind is {header.kind}, {name}, which the buffer has no use for"
        schema = self.schemas[Kind(header.kind)]
        if header.number < 0:
            return f"its number is {header.number}; expected at least 0"
        if not 0 <= header.rows <= (schema.rows or 0):
            return f"it has {header.rows} rows; expected 0 to {schema.rows or 0}"
        if header.checksum != schema.checksum:
            return (
                "its arrays have other shapes or dtypes: rows and the example must be the same at "
                "both ends"
            )
        if size != schema.size:
            return f"it has {size} bytes; expected {schema.size}"
        return ""


class Wait:
    """Waits in steps that become longer, up to a time limit.

    Args:
        timeout: Seconds from now; None sets no limit.
    """

    def __init__(self, timeout: float | None = None) -> None:
        self.timeout = timeout
        self._began = self._idle_since = time.monotonic()

    def pause(self, sending: bool = False) -> bool:
        """Waits for one step, a short one while ``sending``.

        Returns:
            False, without waiting, if the time is over.
        """
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
        """Begins again, with the same limit."""
        self._began = self._idle_since = time.monotonic()
        return self


def note(text: str) -> np.ndarray:
    """Returns a text as an array of fixed size, without its middle if it is too long."""
    raw = text.encode()
    if len(raw) > _NOTE_BYTES:
        # The type of an error is at the beginning of its text; the cause is often at the end.
        half = _NOTE_BYTES // 2 - 2
        raw = raw[:half] + b" .. " + raw[-half:]
    data = np.zeros((_NOTE_BYTES,), np.uint8)
    data[: len(raw)] = np.frombuffer(raw, np.uint8)
    return data


def read_note(data: np.ndarray) -> str:
    """Returns the text that ``note`` turned into an array."""
    return bytes(data).rstrip(b"\0").decode(errors="replace")


def _bytes(array: np.ndarray) -> np.ndarray:
    """Returns the memory of an array, ``[size]`` uint8; a copy if it is not contiguous."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _zeros(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    size = math.prod(shape) * dtype.itemsize
    memory = np.zeros((size + _ALIGNMENT,), np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)


def _count_run(group: "MPI.Intracomm") -> int:
    """Counts a run of this rank with a communicator; returns its number, from 1."""
    from mpi4py import MPI

    global _runs_key
    if _runs_key is None:
        _runs_key = MPI.Comm.Create_keyval()
    run = (group.Get_attr(_runs_key) or 0) + 1
    group.Set_attr(_runs_key, run)
    return run

"""Messages as they are read from their bytes, without ranks that send them."""

import collections
import importlib.util
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("mpi4py")
# Only its place is looked at, since it cannot be imported without a library of MPI.
if importlib.util.find_spec("mpi4jax") is None:
    pytest.skip("mpi4jax is not installed", allow_module_level=True)

import jaxbuf
from jaxbuf.mpi import serve, wire
from jaxbuf.mpi.manager import Manager
from jaxbuf.mpi.serve import schemas

ROWS = 4


def schema(width=1):
    items = {"done": np.zeros((ROWS, width), bool), "obs": np.zeros(ROWS, np.float32)}
    return wire.Schema((items, np.zeros(ROWS, bool)), ROWS)


def received(schema, tree):
    """A message with these arrays, whose last piece has just come."""
    memory = wire._Memory(schema.size)
    arrays, views = memory.arrays(wire.Kind.BATCH, schema)
    for view, leaf in zip(arrays, jax.tree.leaves(tree), strict=True):
        view.view(np.uint8)[...] = leaf.view(np.uint8)
    header = wire.Header(wire.MAGIC, wire.Kind.BATCH, rows=ROWS, checksum=schema.checksum)
    message = wire.Message(0, wire.FIRST_TAG, schema.size, header, views)
    channel = object.__new__(wire.Channel)
    channel.schemas = {wire.Kind.BATCH: schema}
    return channel._complete(wire._Partial(message, memory, []))


def batch(width=1, **bytes_):
    items = {"done": np.zeros((ROWS, width), np.uint8), "obs": np.full(ROWS, 7, np.float32)}
    mask = np.array([1, 0, 1, 1], np.uint8)
    if "done" in bytes_:
        items["done"][1, width - 1] = bytes_["done"]
    if "mask" in bytes_:
        mask[1] = bytes_["mask"]
    return items, mask


def test_flags_of_zeros_and_ones_are_taken():
    message = received(schema(), batch(done=1))
    assert not message.fault
    (items, mask) = message.tree
    assert items["done"][:, 0].tolist() == [False, True, False, False]
    assert mask.tolist() == [True, False, True, True]
    assert items["obs"].tolist() == [7] * ROWS


@pytest.mark.parametrize("byte", [2, 128, 255])
@pytest.mark.parametrize(("field", "name"), [("mask", "[1]"), ("done", "[0]['done']")])
def test_a_flag_that_is_neither_0_nor_1_is_refused(field, name, byte):
    """Programs add up the bytes of flags, so that a count could become negative."""
    message = received(schema(), batch(**{field: byte}))
    assert message.tree is None
    assert message.fault == f"its array {name} has the byte {byte} as a flag; expected 0 or 1"


def test_a_large_array_of_flags_is_looked_at_too():
    width = wire._LARGE
    assert schema(width).starts[0] is None
    message = received(schema(width), batch(width, done=3))
    assert message.fault == "its array [0]['done'] has the byte 3 as a flag; expected 0 or 1"


class Peers:
    """A communicator whose other ranks have sent all of their messages already.

    Attributes:
        came: Messages that the manager receives: the sender, the tag and the bytes.
        sent: First pieces that the manager sends: the receiver, the kind and the number.
    """

    def __init__(self, size):
        self.size, self.came, self.sent = size, collections.deque(), []

    def Get_rank(self):
        return self.size - 1

    def Get_size(self):
        return self.size

    def Get_group(self):
        return types.SimpleNamespace(Translate_ranks=lambda ranks, world: ranks)

    def Get_attr(self, key):
        return None

    def Set_attr(self, key, value):
        pass

    def Improbe(self, source, tag, status):
        if not self.came:
            return None
        status.came = self.came.popleft()

        def receive(into):
            memory, _ = into
            assert memory.size == len(status.came[2])
            memory[...] = np.frombuffer(status.came[2], np.uint8)

        return types.SimpleNamespace(Recv=receive)

    def Isend(self, piece, dest, tag):
        data = np.asarray(piece[0])
        if tag % 2 == 0:
            header = wire.Header(*data[: wire.HEADER.itemsize].view(wire.HEADER)[0].tolist())
            self.sent.append((dest, wire.Kind(header.kind), header.number))
        return types.SimpleNamespace(Test=lambda: True)


class Status:
    def Get_source(self):
        return self.came[0]

    def Get_tag(self):
        return self.came[1]

    def Get_count(self, kind):
        return len(self.came[2])


@pytest.fixture
def peers(monkeypatch):
    import mpi4py

    comm = Peers(3)
    mpi = types.SimpleNamespace(
        COMM_WORLD=comm,
        UNDEFINED=-1,
        ANY_SOURCE=-1,
        ANY_TAG=-1,
        BYTE=None,
        Status=Status,
        Comm=types.SimpleNamespace(Create_keyval=lambda: 0),
    )
    monkeypatch.setattr(wire, "_runs_key", None)
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", mpi)
    monkeypatch.setattr(mpi4py, "MPI", mpi, raising=False)
    return comm


TAG = wire.FIRST_TAG + 2


def piece(kind, number=0, rows=0, schema=None, magic=wire.MAGIC, checksum=None, more=b""):
    """The bytes of a first piece, with zeros in its arrays."""
    schema = wire.Schema(()) if schema is None else schema
    data = np.zeros(schema.size, np.uint8)
    checksum = schema.checksum if checksum is None else checksum
    data[: wire.HEADER.itemsize].view(wire.HEADER)[0] = magic, kind, number, rows, checksum
    return data.tobytes() + more


MANAGED = {
    "uniform": {},
    "scores": {"evictor": jaxbuf.Lowest()},
    "priorities": {"sampler": jaxbuf.Prioritized()},
}


def manager(name):
    item = {"obs": jnp.zeros(2), "done": jnp.bool_(False)}
    return Manager.create(jaxbuf.ItemBuffer.create(item, 4, **MANAGED[name]), 2)


def served(peers, name):
    """Serves until both workers have left."""
    peers.came += [(worker, TAG, piece(wire.Kind.LEAVE)) for worker in (0, 1)]
    communicators = types.SimpleNamespace(group=peers, managers=peers)
    return serve(communicators, manager(name), rows=ROWS, report=None)


def test_new_values_that_a_buffer_has_no_use_for_are_refused(peers):
    """With or without arrays; a header alone once ended the manager."""
    values = schemas(manager("scores"), ROWS)[wire.Kind.SCORES]
    kinds = wire.Kind.SCORES, wire.Kind.PRIORITIES
    for kind in kinds:
        peers.came += [(0, TAG, piece(kind, 5)), (0, TAG, piece(kind, 6, 2, values))]
    faults = served(peers, "uniform").faults
    for kind, fault in zip(np.repeat(kinds, 2), faults, strict=True):
        assert f"its kind is {kind}, {wire.Kind(kind).name}, which the buffer" in fault
    refused = [number for to, kind, number in peers.sent if kind == wire.Kind.REFUSAL]
    assert refused == [5, 6, 5, 6]


def test_each_fault_of_a_message_is_told(peers, monkeypatch):
    """Also of large arrays, which come as messages of their own; and of no other message."""
    monkeypatch.setattr(wire, "_LARGE", 16)
    known, kind = schemas(manager("scores"), ROWS), wire.Kind.BATCH
    schema = known[kind]
    legal = {"number": 77, "rows": ROWS, "checksum": schema.checksum}
    whole, metadata = piece(kind, 77, ROWS, schema), known[wire.Kind.METADATA]
    update, checksum = wire.Kind.SCORES, known[wire.Kind.SCORES].checksum
    expected = f"expected {wire.MAGIC:#x}"
    faults = {
        "its tag is 7099; expected 7102": (7099, bytes(40)),
        "it has 8 bytes; expected at least 40": (TAG, bytes(8)),
        f"its magic number is 0x0; {expected}": (TAG, piece(kind, **legal, magic=0)),
        f"{expected}: both ends need the same version": (
            TAG, piece(kind, **legal, magic=wire.MAGIC + 1)
        ),
        "its kind is 4, which only a manager sends": (
            TAG, piece(wire.Kind.METADATA, schema=metadata)
        ),
        f"its kind is 77; expected 1 to {len(wire.Kind)}": (TAG, piece(77, **legal)),
        "its number is -1; expected at least 0": (TAG, piece(kind, **legal | {"number": -1})),
        "it has 99 rows; expected 0 to 4": (TAG, piece(kind, **legal | {"rows": 99})),
        "its arrays have other shapes or dtypes: rows and the example must be the same": (
            TAG, piece(kind, **legal | {"checksum": schema.checksum + 1})
        ),
        f"it has 40 bytes; expected {schema.size}": (TAG, piece(kind, **legal)),
        "it has 5 rows; expected 0 to 4": (TAG, piece(update, 5, 5, checksum=checksum)),
        "its arrays have other shapes or dtypes": (TAG, piece(update, 5, 1, checksum=checksum + 1)),
        # The first large array is too short, and the second one is dropped.
        "an array of it has 8 bytes; expected 32": (TAG, whole),
    }  # fmt: skip
    peers.came += [(0, *message) for message in faults.values()]
    peers.came += [(0, TAG + 1, bytes(8)), (0, TAG + 1, bytes(16))]
    # One that was cut short does not disturb the next one.
    peers.came += [(0, TAG, whole)] * 2 + [(0, TAG + 1, bytes(32)), (0, TAG + 1, bytes(16))]
    for fault, reason in zip(served(peers, "scores").faults, faults, strict=True):
        assert fault.startswith("rank 0 sent a message that was refused: ")
        assert reason in fault
    assert [to for to, kind, _ in peers.sent if kind == wire.Kind.REPLY] == [0]


@pytest.mark.parametrize("name", MANAGED)
def test_no_message_ends_a_manager(peers, name):
    """Legal messages of which one field, the size, or all bytes are wrong."""
    rng = np.random.default_rng(0)
    known = schemas(manager(name), ROWS)
    odd = (-(2**63), -1, 0, 1, 3, ROWS, ROWS + 1, 2**31, 2**62, 2**63 - 1)
    for _ in range(150):
        kind = int(rng.integers(1, len(wire.Kind) + 1))
        if kind in (wire.Kind.LEAVE, wire.Kind.ABORT):
            continue  # They are legal, and the worker is not heard after them.
        schema = known.get(wire.Kind(kind))
        given = {"kind": kind, "schema": schema, "rows": ROWS if schema and schema.rows else 0}
        field = rng.choice(
            ["kind", "number", "rows", "checksum", "magic", "more", "schema", "bytes"]
        )
        if field in ("kind", "number", "rows", "checksum", "magic"):
            given[field] = int(rng.choice(odd))
        elif field == "more":
            given["more"] = bytes(int(rng.integers(1, 70)))
        elif field == "schema":
            given["schema"] = None
        data = piece(**given)
        if field == "bytes":
            start, size = wire.HEADER.itemsize, len(data)
            noise = rng.bytes(size - start)
            data = (data[:start] + noise)[
                : int(rng.integers(0, size + 1)) if rng.random() < 0.5 else size
            ]
        source, tag = int(rng.integers(0, 2)), int(rng.choice([TAG] * 6 + [0, TAG + 1, TAG + 2]))
        peers.came.append((source, tag, data))
    faults = served(peers, name).faults
    assert len(faults) > 30
    assert not any("Error" in fault for fault in faults)

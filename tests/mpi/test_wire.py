"""Messages as they are read from their bytes, without ranks that send them."""

import importlib.util

import jax
import numpy as np
import pytest

pytest.importorskip("mpi4py")
# Only its place is looked at, since it cannot be imported without a library of MPI.
if importlib.util.find_spec("mpi4jax") is None:
    pytest.skip("mpi4jax is not installed", allow_module_level=True)

from jaxbuf.mpi import wire

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
    return channel._go_on(wire._Partial(message, memory, []))


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

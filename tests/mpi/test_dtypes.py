"""An exchange carries each dtype that an item may have, bit for bit.

Run as a program, this file is the program of a worker and its manager.
"""

import json
import zlib

import jax
import numpy as np
import pytest

from tests.models.leaves import every_kind
from tests.programs.mpi_launch import run_ranks

pytest.importorskip("mpi4jax")

import jaxbuf
from jaxbuf.core.leaves import to_host
from jaxbuf.mpi import Layout, LockStep, Manager, Worker, make_communicators, serve

_ROWS = 4


def _manager(workers):
    item = jax.eval_shape(lambda: jax.tree.map(lambda x: x[0], every_kind(1)))
    return Manager.create(jaxbuf.ItemBuffer.create(item, 2 * _ROWS), workers)


def _checksums(items):
    return {name: zlib.crc32(to_host(leaf).tobytes()) for name, leaf in items.items()}


@pytest.mark.mpi
@pytest.mark.slow
def test_the_manager_holds_the_bits_that_were_sent():
    printed = run_ranks(2, __file__, env={"JAX_ENABLE_X64": "1"})
    sent, held = (json.loads(rank.stdout) for rank in printed)
    assert len(sent["rows"]) > 25
    assert [*held] == ["in lock step", "at once", "kept"]
    for way, rows in held.items():
        assert rows.keys() == sent["rows"].keys()
        assert [name for name in rows if rows[name] != sent["rows"][name]] == [], way


def _program():
    communicators = make_communicators(Layout(2))
    batches = [every_kind(_ROWS, seed) for seed in (0, 1)]
    exchange = jax.jit(LockStep.exchange)
    end = LockStep.create(communicators, _manager)
    for items in batches:
        end, _ = exchange(end, items)
    # Not by JAX: XLA ends the process that joins arrays of integers of 2 bits.
    rows = jax.tree.map(lambda *x: np.concatenate([to_host(leaf) for leaf in x]), *batches)
    out = {"rows": _checksums(rows)}
    if end.is_manager:
        out = {"in lock step": _checksums(end.manager.buffer.data)}
    for name, every in (("at once", 1), ("kept", 2)):
        if end.is_manager:
            served = serve(communicators, _manager(1), rows=2 * _ROWS, report=None)
            out[name] = _checksums(served.manager.buffer.data)
        else:
            with Worker(communicators, _manager, rows=2 * _ROWS, every=every) as worker:
                for items in batches:
                    worker.add(items)
    print(json.dumps(out))


if __name__ == "__main__":
    _program()

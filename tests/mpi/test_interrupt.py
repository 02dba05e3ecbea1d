"""A signal while a rank stores a batch leaves a manager, or a worker's state, to be saved."""

import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbuf
from tests.interrupts import interrupt_everywhere

try:
    from jaxbuf.mpi import Manager, Worker
except (ImportError, RuntimeError):
    pytest.skip("needs MPI", allow_module_level=True)


def check():
    """In a process of its own, since only the main thread hears of signals."""
    # A shell that starts the tests in the background has it ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    serve = sys.modules["jaxbuf.mpi.serve"]
    manager = Manager.create(jaxbuf.reward_prioritized(jnp.float32(0), 4), 1)
    channel = SimpleNamespace(names=["worker", "manager"], rank=1, manager=1)
    server = serve._Server(channel, manager, 2, None, None, None)
    server._donates, server._senders = True, [np.int32(0)]
    server._take = jax.jit(serve._take, donate_argnums=0)
    wait = jax.block_until_ready

    def interrupted(value):
        signal.raise_signal(signal.SIGINT)
        return wait(value)

    batch = serve.Batch(jnp.arange(2.0), jnp.arange(2.0))
    message = SimpleNamespace(
        source=0, header=SimpleNamespace(number=0), tree=(batch, jnp.ones(2, bool))
    )
    with (
        mock.patch.object(jax, "block_until_ready", interrupted),
        pytest.raises(KeyboardInterrupt),
    ):
        server._answer(message)
    assert int(server._manager.buffer.size) == 2


def check_worker():
    """A worker that keeps its rows for a later message, and is never asked to send one."""
    channel = mock.MagicMock(sending=[])
    channel.receive.return_value = None
    group = SimpleNamespace(Get_size=lambda: 2)
    communicators = SimpleNamespace(group=group, agents=object())

    def manager(workers):
        return Manager.create(jaxbuf.reward_prioritized(jnp.float32(0), 4), workers)

    with mock.patch.object(sys.modules["jaxbuf.mpi.wire"], "Channel", return_value=channel):
        worker = Worker(communicators, manager, rows=4000, every=10**6, timeout=None)
    rows = np.ones(1, np.float32)

    def readable():
        assert np.isfinite(worker.state.items).all()
        assert int(worker.state.place[0]) == worker._kept

    interrupt_everywhere(lambda: worker.add(rows, score=rows), readable)
    assert worker._kept > 50
    worker._at_end.detach()


@pytest.mark.parametrize("case", ["check", "check_worker"])
def test_a_signal_leaves_a_manager_and_the_rows_of_a_worker(case):
    program = f"from tests.mpi.test_interrupt import {case}; {case}()"
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", program], cwd=root, check=True, timeout=120)

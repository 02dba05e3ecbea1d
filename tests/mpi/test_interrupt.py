"""A signal while the manager stores a batch leaves a manager that can be saved."""

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

try:
    from jaxbuf.mpi import Manager
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


def test_a_signal_while_a_reply_is_waited_for_leaves_a_manager():
    program = "from tests.mpi.test_interrupt import check; check()"
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", program], cwd=root, check=True, timeout=120)

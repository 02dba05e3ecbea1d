"""torchgfn's manager and worker in two processes: `python -m benchmarks.peers.torchgfn_mpi`.

The first process is the worker, answers the benchmark and starts the second, which is the manager.
They talk through torch.distributed with gloo, the one backend that torchgfn's manager takes.
"""

import contextlib
import importlib.metadata
import os
import socket
import subprocess
import sys

import numpy as np
import torch
import torch.distributed as dist
from gfn.containers import StatesContainer
from gfn.containers.replay_buffer import ReplayBuffer
from gfn.containers.replay_buffer_manager import ReplayBufferManager

from benchmarks.arrivals import EXCHANGE_CAPACITY as CAPACITY
from benchmarks.arrivals import EXCHANGE_ROWS, exchange_batches
from benchmarks.arrivals import EXCHANGE_WIDTH as WIDTH
from benchmarks.harness import repeat_calls
from benchmarks.peers.serving import serve
from benchmarks.peers.torchgfn_worker import Points


class Manager(ReplayBufferManager):
    """The manager, which tells what it keeps."""

    def _compute_metadata(self) -> dict:
        scores = self.replay_buffer.training_container.log_rewards
        return {"kept": [float(len(scores)), float(scores.min())]}


class Worker:
    """A buffer whose adds go to the manager as well."""

    def __init__(self, env: Points):
        self._env = env
        self._buffer = ReplayBuffer(
            env,
            capacity=CAPACITY,
            prioritized_capacity=True,
            remote_manager_rank=1,
            remote_buffer_freq=1,
        )
        self._batches = [self._container(*batch) for batch in exchange_batches()]
        self._turn = 0

    def _container(self, states: np.ndarray, scores: np.ndarray) -> StatesContainer:
        return StatesContainer(
            self._env,
            self._env.states_from_tensor(torch.from_numpy(states)),
            is_terminating=torch.ones(len(states), dtype=torch.bool),
            log_rewards=torch.from_numpy(scores),
        )

    def fill(self) -> None:
        """Fills both buffers."""
        for _ in range(-(-CAPACITY // EXCHANGE_ROWS)):
            self._add()

    def kept(self) -> list[float]:
        """The number of log rewards that the manager keeps, and their least."""
        return ReplayBufferManager.get_metadata(1)["kept"]

    def time_add(self, calls: int) -> float:
        """Seconds for so many adds to the worker's own buffer and to the manager's, with scores."""
        return repeat_calls(self._add, calls)

    def _add(self) -> None:
        self._buffer.add(self._batches[self._turn % len(self._batches)])
        self._turn += 1

    def versions(self) -> str:
        """Returns the versions of the measured libraries."""
        names = ("torchgfn", "torch", "numpy")
        found = [f"{name} {importlib.metadata.version(name)}" for name in names]
        return ", ".join([*found, f"{torch.get_num_threads()} threads"])


def main() -> None:
    """Runs the manager if asked to, else the worker, which starts the manager."""
    rank = int(os.environ.get("RANK", "0"))
    with contextlib.ExitStack() as stack:
        if rank == 0:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                os.environ["MASTER_PORT"] = str(free.getsockname()[1])
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": "2", "RANK": "0"}
            command = [sys.executable, "-m", "benchmarks.peers.torchgfn_mpi"]
            env = {**os.environ, "RANK": "1"}
            manager = subprocess.Popen(command, env=env, stdout=sys.stderr)
            stack.callback(manager.kill)
        # Two processes share what cores there are.
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        env = Points(WIDTH)
        if rank == 1:
            Manager(env, rank=1, num_training_ranks=1, capacity=CAPACITY).run()
            return
        serve(Worker(env))
        ReplayBufferManager.send_termination_signal(1)
        manager.wait(10)


if __name__ == "__main__":
    main()

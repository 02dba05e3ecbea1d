"""jaxbuf's manager and worker on two MPI ranks.

Rank 0 is the worker and answers the benchmark; rank 1 is the manager.
"""

import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

import jaxbuf
from benchmarks.arrivals import EXCHANGE_CAPACITY as CAPACITY
from benchmarks.arrivals import EXCHANGE_ROWS as ROWS
from benchmarks.arrivals import EXCHANGE_WIDTH as WIDTH
from benchmarks.arrivals import exchange_batches
from benchmarks.harness import repeat_calls
from benchmarks.peers.serving import serve as answer
from jaxbuf.mpi import Layout, LockStep, Manager, Worker, make_communicators, serve

LARGE_ROWS, LARGE_WIDTH = 2**14, 512
CALLS = 1
SCAN_LENGTH = 100
TRAINING_STEPS = 20
ROUNDS, SCORE_ROUNDS = 100_000, 60_000
"""The rounds of `think` in a training step, about 15 ms, and in the scoring of a batch.

A round takes longer in the manager's program.
"""


def think(rounds: jax.Array, start: jax.Array) -> jax.Array:
    """Computes something on one core."""

    def step(_: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sin(x) + jnp.float32(0.1)

    return jax.lax.fori_loop(0, rounds, step, start)


def wait_for_calls(world: MPI.Comm) -> int:
    """Returns the next number from rank 0. Unlike MPI, it keeps no core busy while it waits."""
    while not world.Iprobe(source=0, tag=CALLS):
        time.sleep(1e-3)
    return world.recv(source=0, tag=CALLS)


def busy_score(rounds: int) -> Callable[..., dict[str, jax.Array]]:
    """Returns a slow score function."""

    def score(buffer: Any, batch: Any, mask: jax.Array, sender: jax.Array) -> dict[str, jax.Array]:
        del buffer, mask, sender
        return {"score": jnp.sum(think(jnp.int32(rounds), batch.score[:64]))}

    return score


class Exchange:
    """A worker and the operations to time.

    Args:
        mode: The mode of the worker.
        rounds: The rounds of `think` with which the manager scores a batch.
        large: Whether batches are large and not stored.
    """

    def __init__(self, mode: str, rounds: int, large: bool):
        self._links = make_communicators(Layout(2))
        rows, width = (LARGE_ROWS, LARGE_WIDTH) if large else (ROWS, WIDTH)
        self._rows = rows
        example = jnp.zeros(width, jnp.float32 if large else jnp.int32)

        def manager(num_workers: int) -> Manager:
            scores = {"scores": busy_score(rounds)} if rounds else {}
            if large:
                buffer = jaxbuf.ItemBuffer.create(example, 1)
                return Manager.create(buffer, num_workers, store=False, **scores)
            buffer = jaxbuf.reward_prioritized(example, CAPACITY)
            return Manager.create(buffer, num_workers, **scores)

        if MPI.COMM_WORLD.rank == 1:
            serve(self._links, manager(1), rows=rows, report=None)
            sys.exit()
        self._local = jaxbuf.reward_prioritized(jnp.zeros(WIDTH, jnp.int32), CAPACITY)
        self._worker = Worker(self._links, manager, rows=rows, mode=mode)
        self._batches = [
            jax.device_put((states.astype(np.int32), scores))
            for states, scores in exchange_batches()
        ]
        self._turn = 0
        self._train = jax.jit(think)

    def fill(self) -> None:
        """Fills both buffers."""
        for _ in range(-(-CAPACITY // ROWS)):
            self._add()
        self._worker.drain()

    def kept(self) -> list[float]:
        """Returns the number of log rewards that the manager keeps, and the smallest of them."""
        metrics = self._worker.request_metadata()
        return [float(metrics["size"]), float(metrics["score_min"])]

    def time_add(self, calls: int) -> float:
        """Returns the seconds of adds with scores to the buffers of the worker and the manager."""
        return repeat_calls(self._add, calls, self._finish)

    def _add(self) -> None:
        states, scores = self._batches[self._turn % len(self._batches)]
        self._turn += 1
        self._local = jaxbuf.add(self._local, states, score=scores)
        self._worker.add(states, score=scores)

    def _finish(self) -> None:
        drained = self._worker.drain()
        if drained.missing:
            raise RuntimeError(drained.reason)

    def time_large(self, calls: int) -> float:
        """Returns the seconds of large messages and their answers."""
        items = jnp.ones((self._rows, LARGE_WIDTH))
        items.block_until_ready()
        return repeat_calls(lambda: self._worker.add(items), calls, self._finish)

    def time_steps(self, calls: int, exchange: bool) -> float:
        """Returns the seconds of runs of TRAINING_STEPS, with a batch for the manager or without.

        A run ends when all batches are answered, so the last one cannot be hidden.
        """
        states, scores = self._batches[0]
        rounds, start = jnp.int32(ROUNDS), scores[:64]

        def step() -> None:
            self._train(rounds, start).block_until_ready()
            if exchange:
                self._worker.add(states, score=scores)

        def run() -> None:
            for _ in range(TRAINING_STEPS):
                step()
            self._finish()

        return repeat_calls(run, calls)

    def versions(self) -> str:
        """Returns the version of MPI."""
        return MPI.Get_library_version().split("\n")[0].strip()

    def close(self) -> None:
        """Leaves the manager."""
        self._worker.exit()


class Locked:
    """The lock-step exchange in a scan, which all ranks run as often as rank 0 says."""

    def __init__(self) -> None:
        self._world = MPI.COMM_WORLD
        links = make_communicators(Layout(2))

        def manager(num_workers: int) -> Manager:
            buffer = jaxbuf.reward_prioritized(jnp.zeros(WIDTH, jnp.int32), CAPACITY)
            return Manager.create(buffer, num_workers)

        def run(end: Any, local: Any, states: jax.Array, scores: jax.Array) -> Any:
            def body(carry: Any, row: Any) -> Any:
                end, local = carry
                local = local.add(row[0], score=row[1])
                end, _ = end.exchange(row[0], score=row[1])
                return (end, local), None

            return jax.lax.scan(body, (end, local), (states, scores))[0]

        states, scores = zip(*exchange_batches(SCAN_LENGTH), strict=True)
        given = [np.stack(states).astype(np.int32), np.stack(scores)]
        self._rows = jax.device_put(given)
        self._end = LockStep.create(links, manager)
        self._local = jaxbuf.reward_prioritized(jnp.zeros(WIDTH, jnp.int32), CAPACITY)
        self._run = jax.jit(run, donate_argnums=(0, 1))
        if self._world.rank == 1:
            while calls := wait_for_calls(self._world):
                for _ in range(calls):
                    self._step()
            sys.exit()

    def _step(self) -> None:
        self._end, self._local = jax.block_until_ready(
            self._run(self._end, self._local, *self._rows)
        )

    def fill(self) -> None:
        """Fills both buffers."""
        self.time_add(1)

    def time_add(self, calls: int) -> float:
        """Returns the seconds of scans of SCAN_LENGTH exchanges."""
        self._world.send(calls, dest=1, tag=CALLS)
        return repeat_calls(self._step, calls)

    def close(self) -> None:
        """Ends the manager."""
        self._world.send(0, dest=1, tag=CALLS)


class Plain:
    """mpi4py alone: it sends the memory of a large array, and receives one byte."""

    def __init__(self) -> None:
        self._world = MPI.COMM_WORLD
        self._byte = np.zeros(1, np.uint8)
        if self._world.rank == 0:
            self._data = np.asarray(jnp.ones((LARGE_ROWS, LARGE_WIDTH)))
            return
        data = np.empty((LARGE_ROWS, LARGE_WIDTH), np.float32)
        while calls := wait_for_calls(self._world):
            for _ in range(calls):
                self._world.Recv(data, source=0, tag=0)
                self._world.Send(self._byte, dest=0)
        sys.exit()

    def _send(self) -> None:
        self._world.Send(self._data, dest=1, tag=0)
        self._world.Recv(self._byte, source=1)

    def time_large(self, calls: int) -> float:
        """Returns the seconds of messages and their answers."""
        self._world.send(calls, dest=1, tag=CALLS)
        return repeat_calls(self._send, calls)

    def close(self) -> None:
        """Ends the other rank."""
        self._world.send(0, dest=1, tag=CALLS)


def main(kind: str) -> None:
    """Serves one of the contestants in this module."""
    if kind == "locked":
        peer: Any = Locked()
    elif kind == "plain":
        peer = Plain()
    else:
        mode, work, size = kind.split("-")
        peer = Exchange(mode, SCORE_ROUNDS if work == "busy" else 0, size == "large")
    answer(peer)
    peer.close()


if __name__ == "__main__":
    main(sys.argv[1])

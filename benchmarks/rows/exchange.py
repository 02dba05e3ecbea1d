"""Manager and worker: another process stores, scores and answers batches.

* `exchange`: 256 states of 8 integers with their log rewards, added to the worker's own buffer of
  10,000 and to the manager's, which answers with a score. **jaxbuf** does it on two MPI ranks,
  through `Worker.add(mode="sync")` and `serve`; **lock-step** is its `LockStep.exchange` in a
  `lax.scan` of 100; **torchgfn** uses `ReplayBuffer(remote_manager_rank=1)` and
  `ReplayBufferManager`, through torch.distributed. All keep the highest log rewards. After the same
  batches the managers must keep the same number of them, with the same smallest one.
* `exchange-large`: a message of 32 MiB, scored but not stored, and its answer, compared with a
  `Send` of the same bytes and a `Recv` of one byte in mpi4py.
* `exchange-overlap`: a training step of about 15 ms, and a manager that needs as long to score what
  each step sends. The step runs alone, waits for the exchange (`"sync"`), and overlaps with it
  (`"pipelined"`), in runs of 20 steps that end when everything is answered. Each rank has one core.
"""

import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.arrivals import EXCHANGE_CAPACITY as CAPACITY
from benchmarks.arrivals import EXCHANGE_ROWS, exchange_batches
from benchmarks.harness import (
    Contestant,
    Operation,
    Options,
    Row,
    Unavailable,
    UnequalWork,
    import_library,
)
from benchmarks.peer_process import PeerError, PeerProcess, environment

ADD, LARGE, STEP = "add with score", "large message", "training step"
SCAN_LENGTH, TRAINING_STEPS = 100, 20


def least_kept() -> float:
    """Computes the smallest log reward that a full manager keeps, in NumPy."""
    scores = [scores for _, scores in exchange_batches()]
    sent = [scores[turn % len(scores)] for turn in range(-(-CAPACITY // EXCHANGE_ROWS))]
    return float(np.sort(np.concatenate(sent))[-CAPACITY])


def rows(options: Options) -> list[Row]:
    """Returns the rows that need two processes."""
    found = [
        Row(
            "exchange",
            "256 states of 8 integers with log rewards to a manager that keeps 10,000, and back",
            [ADD],
            {
                "jaxbuf": lambda: AddContestant(_ranks("sync-idle-small")),
                "lock-step": lambda: AddContestant(_ranks("locked"), SCAN_LENGTH, tells=False),
                "torchgfn": lambda: AddContestant(_torchgfn()),
            },
        ),
        Row(
            "exchange-large",
            "A message of 32 MiB and its answer",
            [LARGE],
            {
                "jaxbuf": lambda: TimedContestant(
                    _ranks("sync-idle-large"), {LARGE: ("time_large", {})}
                ),
                "mpi4py": lambda: TimedContestant(_ranks("plain"), {LARGE: ("time_large", {})}),
            },
        ),
        Row(
            "exchange-overlap",
            "A training step whose batch a manager scores for as long as the step takes",
            [STEP],
            {
                "alone": lambda: _steps("sync", exchange=False),
                "sync": lambda: _steps("sync", exchange=True),
                "pipelined": lambda: _steps("pipelined", exchange=True),
            },
            reference="alone",
        ),
    ]
    return [row for row in found if any(options.wants(row.name, name) for name in row.operations)]


def _ranks(kind: str) -> PeerProcess:
    """Starts two MPI ranks, each on one core."""
    for library in ("mpi4py", "mpi4jax"):
        import_library(library)
    beside = shutil.which("mpiexec", path=str(Path(sys.executable).parent))
    mpiexec = os.environ.get("MPIEXEC") or beside or shutil.which("mpiexec")
    if mpiexec is None:
        raise Unavailable("there is no mpiexec; `make demo-mpi` installs one")
    flags = os.environ.get("XLA_FLAGS", "")
    one_core = ["env", f"XLA_FLAGS={flags} --xla_cpu_multi_thread_eigen=false"]
    launcher = [mpiexec, "-n", "2", *one_core]
    return PeerProcess(sys.executable, "benchmarks.peers.jaxbuf_mpi", kind, launcher=launcher)


def _torchgfn() -> PeerProcess:
    return PeerProcess(environment("torch"), "benchmarks.peers.torchgfn_mpi")


def _steps(mode: str, exchange: bool) -> "TimedContestant":
    process = _ranks(f"{mode}-busy-small")
    return TimedContestant(
        process, {STEP: ("time_steps", {"exchange": exchange})}, per_call=TRAINING_STEPS
    )


class TimedContestant(Contestant):
    """Processes that time themselves."""

    def __init__(
        self,
        process: PeerProcess,
        calls: Mapping[str, tuple[str, Mapping[str, Any]]],
        per_call: int = 1,
    ):
        """Wraps a started process.

        Args:
            process: The process that answers.
            calls: The name and the arguments of the request for each operation.
            per_call: The number of operations in a timed call.
        """
        self._process, self._calls, self._per_call = process, calls, per_call

    def verify(self) -> None:
        """Runs each operation twice. A missing answer is an error."""
        for name, arguments in self._calls.values():
            self._process.call(name, calls=2, **arguments)

    def operations(self) -> Mapping[str, Operation]:
        """Returns the given operations."""

        def operation(name: str, arguments: Mapping[str, Any]) -> Operation:
            return Operation(
                lambda calls: self._process.call(name, calls=calls, **arguments), self._per_call
            )

        return {what: operation(*asked) for what, asked in self._calls.items()}


class AddContestant:
    """A worker that adds to its own buffer and to the buffer of a manager."""

    def __init__(self, process: PeerProcess, per_call: int = 1, tells: bool = True):
        """Wraps a started worker.

        Args:
            process: The worker.
            per_call: The number of exchanges in a timed call.
            tells: Whether it can report what the manager keeps.
        """
        self._process, self._per_call, self._tells = process, per_call, tells

    def verify(self) -> None:
        """Checks the contents of the full manager.

        Raises:
            UnequalWork: If it keeps another number of rows, or other rows.
        """
        try:
            self._process.call("fill")
        except PeerError as error:
            raise Unavailable(f"does not run here ({str(error).splitlines()[-1]})") from error
        if not self._tells:
            return
        size, least = self._process.call("kept")
        if size != CAPACITY or abs(least - least_kept()) > 1e-6:
            raise UnequalWork(f"the manager keeps {size:.0f} rows, the smallest {least:.4f}")

    def operations(self) -> Mapping[str, Operation]:
        """Returns the exchange."""
        run = lambda calls: self._process.call("time_add", calls=calls)  # noqa: E731
        return {ADD: Operation(run, self._per_call)}

    def facts(self) -> Mapping[str, str]:
        """Returns the versions of the libraries."""
        return {"versions": self._process.call("versions")} if self._tells else {}

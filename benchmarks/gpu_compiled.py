"""The programs that XLA compiles for a GPU, without one: ``make benchmark-gpu-compiled``.

Compiled for an NVIDIA H200, as the file `h200.txtpb` describes it, by the compiler that a GPU
machine has. Nothing runs, so there are no times; but what a program does is fixed, and is counted:

* **kernels**, and copies, that one call launches one after the other; a sort counts as one. With
  batches of some hundred rows their launches are what an operation costs, whatever they compute. In
  a cycle those of one iteration of its scan.
* **waits**: loops and branches that the host has to ask the device about, which takes longer than
  a kernel.
* **beside**: bytes that the program needs beside its arguments, what it returns included.
* **copied**: bytes of copies of arrays with at least a byte per slot, of which an update or add
  should make none.
* **lines**: of the program that XLA makes of it.
* **seconds**: of the CPU that traces and compiles the program, all threads together.

Of a loop of unknown length one step is counted, and of a conditional every branch.

jaxbuf and flashbax are compiled alike, flashbax for the GPU path that it has. The jobs are those of
[`benchmarks.gpu`][], with those of other buffers at the same size.
"""

import argparse
import dataclasses
import functools
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

import jaxbuf
from benchmarks import hlo, report
from benchmarks.__main__ import pattern
from benchmarks.compiling import (
    ABOUT,
    LIBRARIES,
    OPTIONS,
    Job,
    bind_scored,
    chosen,
    compiled,
    for_device,
    lines,
)
from benchmarks.gpu import GATHER, LARGEST_POWER, REPLAY
from benchmarks.harness import Unavailable
from benchmarks.jax_loops import scan_cycle
from benchmarks.programs import memory_beyond
from benchmarks.rows import freshness, gflownet, per, windows
from benchmarks.rows.growth import SMALL
from benchmarks.transitions import Transitions
from jaxbuf.core.segment_tree import WIDE, using_width

DEVICE = Path(__file__).with_name("h200.txtpb")
SCAN_LENGTH = 100
STATES = Transitions(
    {
        "state": jax.ShapeDtypeStruct((64,), np.dtype(np.float32)),
        "reward": jax.ShapeDtypeStruct((), np.dtype(np.float32)),
    }
)
"""States of a GFlowNet."""

COUNTS = ("kernels", "waits", "beside", "copied", "lines", "seconds")


@dataclasses.dataclass(frozen=True)
class Counts:
    """Counts of the work of one call of a program; see the module's docstring."""

    kernels: int
    waits: int
    beside: int
    copied: int
    lines: int
    seconds: float


def jobs() -> list[Job]:
    """All of them."""
    replay = {
        "jaxbuf": lambda job: per.bind_jaxbuf(job, OPTIONS),
        "flashbax": for_device(per.bind_flashbax, "gpu"),
    }
    steps = {
        "jaxbuf": lambda job: windows.bind_jaxbuf(job, OPTIONS),
        "flashbax": for_device(windows.bind_flashbax, "gpu"),
    }
    first = next(iter(REPLAY.values()))
    scored = dataclasses.replace(first, transitions=STATES, capacity=2**17, add_size=256)
    rewards = {
        "highest rewards": jaxbuf.reward_prioritized,
        "highest rewards, softmax": gflownet.preset(None),
        "diverse rewards": gflownet.preset(gflownet.CUTOFF),
    }
    growth = [dataclasses.replace(SMALL, capacity=2**power) for power in (16, LARGEST_POWER)]
    return [
        *(Job("prioritized", workload, replay) for workload in REPLAY.values()),
        *(Job("prioritized, CartPole", workload, replay) for workload in growth),
        Job("prioritized, 8 seeds", dataclasses.replace(first, capacity=2**17), replay, seeds=8),
        Job("prioritized, Atari", GATHER, replay),
        Job("windows, prioritized", windows.WORKLOAD, steps),
        Job("windows", dataclasses.replace(windows.WORKLOAD, prioritized=False), steps),
        Job(
            "prioritized, with freshness",
            first,
            {"jaxbuf": lambda job: freshness.bind_freshness(job, OPTIONS, freshness.NEVER)},
        ),
        *(
            Job(name, scored, {"jaxbuf": functools.partial(bind_scored, create=create)})
            for name, create in rewards.items()
        ),
    ]


@functools.cache
def device() -> Any:
    """The device to compile for.

    Raises:
        Unavailable: If there is no compiler for it.
    """
    # There is no driver whose version could be looked at.
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    try:
        topology = topologies.get_topology_desc(
            "1x1x1", platform="cuda", topology="1x1x1", target_config=DEVICE.read_text()
        )
    except Exception as error:
        raise Unavailable(
            f"jax has no compiler for NVIDIA GPUs here ({error}); "
            "`make benchmark-gpu-compiled` installs one"
        ) from error
    return topology.devices[0]


def counted(job: Job, library: str, operation: str) -> Counts | None:
    """Counts the work of an operation of a library; None if the library lacks it."""
    where = SingleDeviceSharding(device())
    with using_width(WIDE):
        made = compiled(job, library, operation, lambda spec: where, scan_cycle, SCAN_LENGTH)
    if made is None:
        return None
    program, seconds = made
    text = program.as_text() or ""
    calls = SCAN_LENGTH if operation == "cycle" else 1
    kernels, waits, copied = (each // calls for each in hlo.work(text, job.workload.capacity))
    beside, rows = memory_beyond(program), len(text.splitlines())
    return Counts(kernels, waits, beside, copied, rows, round(seconds, 1))


def _cells(job: Job, library: str, operation: str) -> list[str] | None:
    counts = counted(job, library, operation)
    return None if counts is None else [f"{number:,}" for number in dataclasses.astuple(counts)]


def main(arguments: Sequence[str]) -> int:
    """Compiles and prints the table; returns what the program exits with."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_compiled",
        description="What XLA makes of jaxbuf and flashbax for an NVIDIA GPU.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--only",
        type=pattern,
        default="",
        metavar="PATTERN",
        help="regular expression searched in BUFFER/OPERATION",
    )
    only = parser.parse_args(arguments).only
    header = [*ABOUT, *(f"{library} {what}" for library in LIBRARIES for what in COUNTS)]
    try:
        print(f"\n{report.aligned(header, list(lines(chosen(jobs(), only), _cells)))}")
    except Unavailable as reason:
        print(f"{parser.prog}: {reason}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

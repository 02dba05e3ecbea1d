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

Of a loop of unknown length one step is counted, and of a conditional every branch.

jaxbuf and flashbax are compiled alike, flashbax for the GPU path that it has. The jobs are those of
[`benchmarks.gpu`][], with those of other buffers at the same size.
"""

import argparse
import dataclasses
import functools
import itertools
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

import jaxbuf
from benchmarks import hlo, report
from benchmarks.__main__ import pattern
from benchmarks.gpu import GATHER, LARGEST_POWER, REPLAY
from benchmarks.harness import Options, Unavailable
from benchmarks.jax_loops import Binding, scan_cycle
from benchmarks.programs import memory_beyond
from benchmarks.rows import freshness, gflownet, per, windows
from benchmarks.rows.growth import SMALL
from benchmarks.running import progress_bar
from benchmarks.workload import Workload

DEVICE = Path(__file__).with_name("h200.txtpb")
SCAN_LENGTH = 100
OPERATIONS = ("add", "sample", "update", "cycle")
OPTIONS = Options()

LIBRARIES = ("jaxbuf", "flashbax")
COUNTS = ("kernels", "waits", "beside", "copied")

Bind = Callable[[Workload], Binding]


@dataclasses.dataclass(frozen=True)
class Job:
    """A program to compile.

    Attributes:
        name: Of the buffer.
        workload: The job.
        binds: Makes each library's binding.
        seeds: How many buffers there are, by `vmap`.
    """

    name: str
    workload: Workload
    binds: Mapping[str, Bind]
    seeds: int = 1


@dataclasses.dataclass(frozen=True)
class Counts:
    """Counts of the work of one call of a program; see the module's docstring."""

    kernels: int
    waits: int
    beside: int
    copied: int


def _bind_scored(workload: Workload, *, create: Callable[[Any, int], Any]) -> Binding:
    """Buffers of the highest scores."""
    example = {
        "state": jax.ShapeDtypeStruct((64,), jnp.float32),
        "reward": jax.ShapeDtypeStruct((), jnp.float32),
    }
    return Binding(
        create=lambda: create(example, workload.capacity),
        add=lambda buffer, items: buffer.add(items, score=items["reward"]),
        sample=lambda buffer, key: buffer.sample(key, workload.sample_size),
        call_add=jaxbuf.add,
        call_sample=jaxbuf.sample,
        data=lambda sample: sample.data,
        arguments=lambda items: (
            {
                name: jnp.zeros((workload.add_size, *leaf.shape), leaf.dtype)
                for name, leaf in example.items()
            },
        ),
    )


def _for_gpu(bind: Callable[..., Binding]) -> Bind:
    """Flashbax takes its path for a GPU only if it finds one."""

    def bind_gpu(workload: Workload) -> Binding:
        with mock.patch.object(jax, "devices"):
            return bind(workload, OPTIONS, "gpu")

    return bind_gpu


def jobs() -> list[Job]:
    """All of them."""
    replay = {
        "jaxbuf": lambda job: per.bind_jaxbuf(job, OPTIONS),
        "flashbax": _for_gpu(per.bind_flashbax),
    }
    steps = {
        "jaxbuf": lambda job: windows.bind_jaxbuf(job, OPTIONS),
        "flashbax": _for_gpu(windows.bind_flashbax),
    }
    first = next(iter(REPLAY.values()))
    scored = dataclasses.replace(first, capacity=2**17, add_size=256)
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
            Job(name, scored, {"jaxbuf": functools.partial(_bind_scored, create=create)})
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


def count(program: Any, capacity: int, calls: int = 1) -> Counts:
    """Counts the work of one call in a program of several."""
    work = hlo.work(program.as_text(), capacity)
    return Counts(
        work.kernels // calls, work.waits // calls, memory_beyond(program), work.copied // calls
    )


def counted(job: Job, library: str, operation: str) -> Counts | None:
    """Counts the work of an operation of a library; None if the library lacks it."""
    if library not in job.binds:
        return None
    workload, binding = job.workload, job.binds[library](job.workload)
    if operation == "update" and binding.update is None:
        return None
    state, key = _shapes(binding.create), _shapes(lambda: jax.random.key(0))
    new = workload.transitions.items(np.arange(workload.add_size))
    items = _shapes(lambda: binding.arguments(new)[0])
    slots = _shapes(lambda state, key: binding.slots(binding.sample(state, key)), state, key)
    priority = _shapes(lambda: jnp.zeros(workload.sample_size))
    keys = _shapes(lambda: jax.random.split(jax.random.key(0), SCAN_LENGTH))
    priorities = _shapes(lambda: jnp.zeros((SCAN_LENGTH, workload.sample_size)))
    function, *arguments = {
        "add": (binding.add, state, items),
        "sample": (binding.sample, state, key),
        "update": (binding.update, state, slots, priority),
        "cycle": (scan_cycle(binding), state, items, keys, priorities),
    }[operation]
    if job.seeds > 1:
        function = jax.vmap(function)
        arguments = jax.tree.map(
            lambda leaf: leaf.update(shape=(job.seeds, *leaf.shape)), arguments
        )
    donated = None if operation == "sample" else 0
    program = jax.jit(function, donate_argnums=donated).lower(*arguments).compile()
    return count(program, workload.capacity, SCAN_LENGTH if operation == "cycle" else 1)


def _shapes(function: Callable[..., Any], *arguments: Any) -> Any:
    """The arrays that a function returns, as what they are on the device."""
    where = SingleDeviceSharding(device())
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where),
        jax.eval_shape(function, *arguments),
    )


def table(chosen: Sequence[tuple[Job, str]]) -> str:
    """A table of the work of these operations, a line for each.

    Raises:
        Unavailable: If there is no compiler for the device.
    """
    header = ["buffer", "operation", "slots", "batch"]
    header += [f"{library} {what}" for library in LIBRARIES for what in COUNTS]
    lines: list[list[str]] = []
    with progress_bar(len(chosen), "operation") as bar:
        for job, operation in chosen:
            bar.set_description(f"{job.name}: {operation}", refresh=False)
            workload = job.workload
            found = [counted(job, library, operation) for library in LIBRARIES]
            if any(found):
                batch = workload.add_size if operation == "add" else workload.sample_size
                cells = map(_cells, found)
                about = [job.name, operation, f"{workload.capacity:,}", f"{batch:,}"]
                lines.append([*about, *itertools.chain.from_iterable(cells)])
            bar.update()
    return report.aligned(header, lines)


def _cells(counts: Counts | None) -> list[str]:
    if counts is None:
        return ["–"] * len(COUNTS)
    return [f"{number:,}" for number in dataclasses.astuple(counts)]


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
    options = Options(only=parser.parse_args(arguments).only)
    chosen = [
        (job, operation)
        for job, operation in itertools.product(jobs(), OPERATIONS)
        if options.wants(job.name, operation)
    ]
    try:
        if not chosen:
            raise Unavailable(f"nothing matches --only {options.only}")
        print(f"\n{table(chosen)}")
    except Unavailable as reason:
        print(f"{parser.prog}: {reason}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The rows for one GPU, in one command: ``python -m benchmarks.gpu``, or ``make benchmark-gpu``.

It first checks on the device that jaxbuf does what a NumPy model does, then measures. The results
go to `benchmark-gpu.json`, the file to send back. The options are those of ``python -m
benchmarks``. Where there is no GPU everything is small and says nothing about speed.

* `gpu-per-C-B`: the operations of `per-mujoco` on 2^C slots with batches of B, jaxbuf and flashbax;
  flashbax is told that its device is a GPU, and so takes the path it has for that.
* `gpu-growth-jaxbuf`, `gpu-growth-flashbax`: the operations of the growth rows, on 2^16 to 2^24
  slots, and on 2^27 if the device has the memory.
* `gpu-add-one`: the same for jaxbuf, one item added at a time.
* `gpu-atari-4096`: 4,096 Atari items of 2^16 gathered by a sample; its floor is what a copy at the
  measured bandwidth takes.
"""

import dataclasses
import operator
import sys
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

from benchmarks import equality
from benchmarks.__main__ import Program, main, parse
from benchmarks.harness import Options, Row, UnequalWork
from benchmarks.jax_loops import JaxSubject
from benchmarks.rows import per, windows
from benchmarks.rows.growth import SMALL, growth_row
from benchmarks.transitions import ATARI, CARTPOLE, MUJOCO
from benchmarks.workload import Workload

POWERS, LARGEST_POWER = (16, 18, 20, 22, 24), 27
QUICK_POWERS = (10, 12)
ROOM = 40 * 2**30
"""Bytes of device memory that it takes to try the largest number of slots."""

REPLAY = {
    f"gpu-per-{power}-{batch}": Workload(MUJOCO, 2**power, min(batch // 4, 4096), batch, length)
    for power in (20, 24)
    for batch, length in ((256, 200), (16_384, 50))
}
GATHER = Workload(ATARI, 2**16, 16, 4096, 16)


def rows(options: Options) -> list[Row]:
    """The rows for a GPU."""
    one = dataclasses.replace(SMALL, add_size=1)
    capacities = [2**power for power in _powers(options)]
    replay = {**REPLAY, "gpu-atari-4096": GATHER}
    return [
        *(
            per.replay_row(
                name,
                "Atari" if workload is GATHER else "MuJoCo",
                _small(workload) if options.quick else workload,
            )
            for name, workload in replay.items()
        ),
        growth_row("gpu-growth-jaxbuf", "jaxbuf", SMALL, capacities),
        growth_row("gpu-growth-flashbax", "flashbax", SMALL, capacities),
        growth_row("gpu-add-one", "jaxbuf", one, capacities),
    ]


def _powers(options: Options) -> Sequence[int]:
    if options.quick:
        return QUICK_POWERS
    memory = (jax.devices()[0].memory_stats() or {}).get("bytes_limit", 0)
    return (*POWERS, LARGEST_POWER) if memory >= ROOM else POWERS


def _small(workload: Workload) -> Workload:
    batch = min(workload.sample_size, 128)
    return dataclasses.replace(
        workload,
        capacity=1024,
        add_size=min(workload.add_size, batch),
        sample_size=batch,
        scan_length=4,
    )


def check(batches: Sequence[int]) -> None:
    """Compares jaxbuf on this device with the NumPy model of the other rows.

    What is drawn, its data and probabilities, and how often; adds that evict; updates in which a
    slot comes several times with different priorities, of which the last has to win; and windows.

    Args:
        batches: Sizes of the samples, as what is done may depend on them.

    Raises:
        UnequalWork: If anything differs.
    """
    for batch in batches:
        workload = Workload(CARTPOLE, max(512, 2 * batch), 64, batch, 1).small()
        equality.check_draws(JaxSubject(per.bind_jaxbuf(workload), workload))
        subject = JaxSubject(per.bind_jaxbuf(workload), workload)
        equality.check_calls(subject, rounds=4, add=True)
        check_duplicates(subject)
    steps = dataclasses.replace(windows.WORKLOAD, capacity=64 * 64).small()
    equality.check_draws(JaxSubject(windows.bind_jaxbuf(steps), steps))


def check_duplicates(subject: JaxSubject) -> None:
    """Updates slots that come several times in a batch.

    Raises:
        UnequalWork: If not the last of them wins.
    """
    rng = np.random.default_rng(0)
    for turn in range(4):
        drawn = subject.sample(turn)
        serials = subject.model.check(drawn)
        # Drawn from the first half, rows of the second half get their slots.
        half = np.arange(len(serials)) % (len(serials) // 2)
        slots = jax.tree.map(operator.itemgetter(half), drawn.slots)
        priority = rng.uniform(0.05, 1.0, len(serials)).astype(np.float32)
        subject.update(slots, priority)
        subject.model.update(serials[half], priority)
        subject.model.check(subject.sample(100 + turn))


GPU = Program(
    "benchmarks.gpu",
    "jaxbuf and flashbax on one GPU.",
    rows,
    Path("benchmark-gpu.json"),
)


def run(arguments: Sequence[str]) -> int:
    """Checks, then measures; returns what the program exits with."""
    parse(arguments, GPU)
    small = jax.default_backend() != "gpu"
    if small:
        print("there is no GPU here: everything is small, and says nothing about speed")
        arguments = [*arguments, "--quick"]
    try:
        check((64, 256) if small else (64, 256, 16_384))
    except UnequalWork as difference:
        print(f"jaxbuf does not do on this device what it should: {difference}", file=sys.stderr)
        return 1
    print("jaxbuf does on this device what the NumPy model does")
    return main(arguments, GPU)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))

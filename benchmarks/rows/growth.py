"""The time of every operation against the number of slots, for jaxbuf and for flashbax.

Prioritized replay of small transitions (41 bytes, CartPole's), full, add 64, sample and update 256,
as in `per`. The numbers in the names are slots. Each library is compared with itself at the least
of them: a ratio of 2 means twice the time. What grows without a tree is the time to fetch 256
rows from memory: a small buffer lies in a cache, a large one does not.
"""

import dataclasses
from collections.abc import Callable, Sequence

from benchmarks.harness import Contestant, Options, Row
from benchmarks.jax_loops import ReplayContestant
from benchmarks.rows.per import bind_flashbax, bind_jaxbuf
from benchmarks.transitions import CARTPOLE
from benchmarks.workload import Workload

OPERATIONS = ("python cycle", "scan add", "scan sample", "scan update", "scan cycle")
BINDS = {"jaxbuf": bind_jaxbuf, "flashbax": bind_flashbax}
POWERS = (14, 17, 20, 23)
SMALL = Workload(CARTPOLE, 2**14, 64, 256, 200)


def rows(options: Options) -> list[Row]:
    """A row for each library; `--capacity` is the least number of slots."""
    powers = POWERS[:2] if options.quick else POWERS
    scale = (options.capacity or 2 ** powers[0]) / 2 ** powers[0]
    capacities = [int(2**power * scale) for power in powers]
    return [
        growth_row(name, library, SMALL, capacities)
        for name, library in (("growth-jaxbuf", "jaxbuf"), ("growth-flashbax", "flashbax"))
        if any(options.wants(name, operation) for operation in OPERATIONS)
    ]


def growth_row(name: str, library: str, workload: Workload, capacities: Sequence[int]) -> Row:
    """One library with more and more slots.

    Args:
        name: Of the row.
        library: "jaxbuf" or "flashbax".
        workload: What it is asked to do.
        capacities: The numbers of slots, the least of them first.
    """
    smallest = 2 * workload.sample_size
    if capacities[0] < smallest:
        raise ValueError(
            f"capacity {capacities[0]} is too small for {name}; use {smallest} or more"
        )
    bind = BINDS[library]

    def contestant(capacity: int) -> Callable[[], Contestant]:
        job = dataclasses.replace(workload, capacity=capacity)
        return lambda: ReplayContestant(bind, job)

    builders = {f"{library}-{capacity}": contestant(capacity) for capacity in capacities}
    title = (
        f"CartPole transitions of {workload.transitions.num_bytes} bytes, full; "
        f"add {workload.add_size}, sample and update {workload.sample_size}; "
        f"{library} with more and more slots"
    )
    return Row(name, title, OPERATIONS, builders, reference=next(iter(builders)), alike=False)

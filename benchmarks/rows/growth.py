"""How the time of every operation grows with the number of slots, for jaxbuf and for flashbax.

Prioritized replay of small transitions (41 bytes, CartPole's), full, add 64, sample and update 256,
as in `per`. The numbers in the names are slots. Each library is compared with itself at the least
of them: a ratio of 2 means twice the time. What grows without a tree is the time to fetch 256
rows from memory: a small buffer lies in a cache, a large one does not.
"""

from collections.abc import Callable

from benchmarks.harness import Contestant, Options, Row
from benchmarks.jax_loops import Binding, ReplayContestant
from benchmarks.rows.per import bind_flashbax, bind_jaxbuf
from benchmarks.transitions import CARTPOLE
from benchmarks.workload import Workload

OPERATIONS = ("python cycle", "scan add", "scan sample", "scan update", "scan cycle")
BINDS = {"growth-jaxbuf": bind_jaxbuf, "growth-flashbax": bind_flashbax}
POWERS = (14, 17, 20, 23)


def rows(options: Options) -> list[Row]:
    """A row for each library; `--capacity` is the least number of slots."""
    powers = POWERS[:2] if options.quick else POWERS
    scale = (options.capacity or 2 ** powers[0]) / 2 ** powers[0]
    return [
        _row(name, bind, [int(2**power * scale) for power in powers], options)
        for name, bind in BINDS.items()
        if any(options.wants(name, operation) for operation in OPERATIONS)
    ]


def _row(
    name: str,
    bind: Callable[[Workload, Options], Binding],
    capacities: list[int],
    options: Options,
) -> Row:
    def contestant(capacity: int) -> Callable[[], Contestant]:
        workload = Workload(CARTPOLE, capacity, 64, 256, 200)
        return lambda: ReplayContestant(lambda job: bind(job, options), workload, options)

    if capacities[0] < 512:
        raise ValueError(f"capacity {capacities[0]} is too small for {name}; use at least 512")
    library = name.split("-")[1]
    builders = {f"{library}-{capacity}": contestant(capacity) for capacity in capacities}
    title = (
        f"CartPole transitions of {CARTPOLE.num_bytes} bytes, full; add 64, sample and update 256; "
        f"{library} with more and more slots"
    )
    return Row(name, title, OPERATIONS, builders, reference=next(iter(builders)))

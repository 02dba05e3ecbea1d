"""Counts for a ``Sharded`` on up to 4,096 devices: ``python -m benchmarks.scale``.

The buffers are of ``ItemBuffer`` shards with ``Prioritized``, one on each device. The programs are
compiled for 8 to 64 devices of a CPU and not run, and the formulas below are checked against the
bytes of their collectives. ``D`` is the number of devices, ``B`` the rows of a batch, and ``R`` the
bytes of a row. To each device come

* for an ``add`` without priorities: ``20 D``, the sums of all shards; with priorities nothing;
* for an ``update_priority``: ``12 B``, the slots and priorities of all rows;
* for a ``sample``: ``28 D``, the sums and keys of all shards, and the rows with their slots and
  probabilities: ``B (R + 12)`` if ``B R`` is at most 2**20, and otherwise ``D w (R + 12)`` in each
  round, where ``w`` is the width of a round, the number of rows for which each pair of devices has
  room;
* for a ``sample`` without exchange: ``8 D``, the keys.

The number of rounds depends on the draw, and is simulated: stratified draws from *even* shards,
whose total masses differ by 0.4 %, and from *skewed* ones, whose masses differ by a quarter.
"""

import functools
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

import jaxbuf
from benchmarks.devices import collectives, markdown
from jaxbuf.wrappers.sharded.exchange import at_once, width_of_round

COMPILED = (8, 16, 32, 64)
DEVICES = (8, 64, 512, 4096)
BATCHES = (2**12, 2**16, 2**20)
ROW_BYTES = (100, 10_000, 100_000)
SPREADS = {"even": 0.004, "skewed": 0.25}
"""The standard deviation of the logarithm of the total masses of shards."""


class Case(NamedTuple):
    """A program to count.

    Attributes:
        operation: ``add``, ``sample``, ``sample without exchange`` or ``update_priority``.
        devices: The number of devices, and of shards.
        rows: The rows of a batch.
        nbytes: The size of a row, a multiple of 4.
    """

    operation: str
    devices: int
    rows: int
    nbytes: int


def received(case: Case, rounds: int = 1) -> int:
    """The bytes that come to each device, its own ones included, by the formulas."""
    fixed = {
        "add": 20 * case.devices,
        "update_priority": 12 * case.rows,
        "sample without exchange": 8 * case.devices,
    }
    if case.operation in fixed:
        return fixed[case.operation]
    sent = case.rows
    if not at_once(case.rows, case.nbytes):
        sent = rounds * case.devices * width_of_round(case.rows, case.devices, case.nbytes)
    return 28 * case.devices + sent * (case.nbytes + 12)


def compiled(case: Case) -> tuple[Counter[str], int, float]:
    """The collectives of a compiled program, the bytes that they return, and its operations."""
    axis_types = (jax.sharding.AxisType.Auto,)
    devices = jax.devices()[: case.devices]
    mesh = jax.make_mesh((case.devices,), ("data",), axis_types=axis_types, devices=devices)
    spread = jax.NamedSharding(mesh, jax.P("data"))
    item = jax.ShapeDtypeStruct((case.nbytes // 4,), np.float32)

    def create() -> jaxbuf.Sharded:
        return jaxbuf.Sharded.create(
            lambda: jaxbuf.ItemBuffer.create(item, 256, sampler=jaxbuf.Prioritized()),
            mesh,
            "data",
            exchange=case.operation != "sample without exchange",
        )

    def like(leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=spread)

    def rows(dtype: Any, *shape: int) -> Any:
        return jax.ShapeDtypeStruct((case.rows, *shape), dtype, sharding=spread)

    function: Callable[..., Any]
    if case.operation == "add":
        function, given = jaxbuf.Sharded.add, (rows(np.float32, *item.shape),)
    elif case.operation == "update_priority":
        slots = jaxbuf.Slots(rows(np.int32), rows(np.uint32))
        function, given = jaxbuf.Sharded.update_priority, (slots, rows(np.float32))
    else:
        function = functools.partial(jaxbuf.Sharded.sample, batch_size=case.rows)
        given = (jax.eval_shape(lambda: jax.random.key(0)),)
    buffer = jax.tree.map(like, jax.eval_shape(create))
    program = jax.jit(function).lower(buffer, *given).compile()
    cost: Any = program.cost_analysis()
    return *collectives(program.as_text() or ""), cost["flops"]


def moved(shard: np.ndarray, devices: int) -> tuple[float, int]:
    """The share of rows that change their device, and the most that move between two of them.

    Rows beyond a device's part fill the gaps of others in turn, so that both are intervals of one
    line, and what overlaps moves.
    """
    mine = len(shard) // devices
    has = np.bincount(shard, minlength=devices)
    given, taken = np.cumsum(np.maximum(has - mine, 0)), np.cumsum(np.maximum(mine - has, 0))
    cuts = np.unique(np.concatenate([[0], given, taken]))
    return given[-1] / len(shard), int(np.max(np.diff(cuts), initial=0))


def draw(random: np.random.Generator, mass: np.ndarray, rows: int) -> np.ndarray:
    """The shard of each row of a stratified draw."""
    point = (np.arange(rows) + random.random(rows)) / rows
    end = np.cumsum(mass)
    return np.minimum(np.searchsorted(end, point * end[-1], side="right"), len(mass) - 1)


def simulated(devices: int, rows: int, spread: float, repeats: int = 9) -> tuple[float, float]:
    """The medians of what `moved` returns."""
    random = np.random.default_rng(0)
    found = [
        moved(draw(random, np.exp(spread * random.normal(size=devices)), rows), devices)
        for _ in range(repeats)
    ]
    share, most = np.median(np.asarray(found), axis=0)
    return float(share), float(most)


def checks(counts: Sequence[int]) -> list[list[str]]:
    """A row for each program: what was compiled beside the formula."""
    table = list[list[str]]()
    for devices in counts:
        for case in (
            Case("add", devices, 4096, 100),
            Case("update_priority", devices, 4096, 100),
            Case("sample", devices, 4096, 100),
            Case("sample", devices, 4096, 10_000),
            Case("sample without exchange", devices, 4096, 100),
        ):
            found, nbytes, work = compiled(case)
            names = ", ".join(f"{count} {name}" for name, count in sorted(found.items()))
            cells = [case.operation, str(devices), f"{case.rows:,}", f"{case.nbytes:,}", names]
            cells += [f"{nbytes:,}", f"{received(case):,}", f"{work / case.rows:,.0f}"]
            table.append(cells)
            print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return table


def predicted() -> list[list[str]]:
    """A row for each size: what a sample and an update bring to a device."""
    table = list[list[str]]()
    for devices in DEVICES:
        for rows in BATCHES:
            seen = {name: simulated(devices, rows, spread) for name, spread in SPREADS.items()}
            for nbytes in ROW_BYTES:
                case = Case("sample", devices, rows, nbytes)
                cells = [f"{devices:,}", f"2^{rows.bit_length() - 1}", f"{nbytes:,}"]
                cells.append(amount(rows // devices * nbytes))
                width = width_of_round(rows, devices, nbytes)
                for share, most in seen.values():
                    rounds = 1 if at_once(rows, nbytes) else int(-(-most // width))
                    cells += [f"{share:.1%}", str(rounds), amount(received(case, rounds))]
                cells.append(amount(received(case._replace(operation="update_priority"))))
                table.append(cells)
    return table


def amount(nbytes: float) -> str:
    """Bytes, in a unit that fits."""
    units = ["B", "kB", "MB", "GB"]
    while nbytes >= 999.5 and len(units) > 1:
        nbytes /= 1000
        units.pop(0)
    return f"{nbytes:.3g} {units[0]}"


def main() -> None:
    """Prints two tables."""
    print("Compiled programs beside the formulas: bytes that come to a device, operations a row\n")
    header = ["program", "devices", "rows", "bytes a row", "collectives", "compiled", "formula"]
    print(markdown([*header, "operations"], checks(COMPILED)))
    print("\nWhat a batch brings to each device, by the formulas and simulated draws\n")
    header = ["devices", "rows", "bytes a row", "own part of the batch"]
    for name in SPREADS:
        header += [f"{name}: rows that move", "rounds", "received"]
    print(markdown([*header, "update"], predicted()))


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", COMPILED[-1])
    main()

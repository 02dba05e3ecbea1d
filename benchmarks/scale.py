"""Counts for a ``Sharded`` on many devices: ``python -m benchmarks.scale``.

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

The number of rounds depends on the draw; one round is counted.
"""

import functools
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

import jaxbuf
from benchmarks.devices import collectives
from benchmarks.report import aligned
from jaxbuf.wrappers.sharded.exchange import at_once, width_of_round

COMPILED = (8, 16, 32, 64)


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


def received(case: Case) -> int:
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
        sent = case.devices * width_of_round(case.rows, case.devices, case.nbytes)
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


def main() -> None:
    """Prints what was compiled beside the formulas."""
    table = list[list[str]]()
    for devices in COMPILED:
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
    print("\nBytes that come to a device, and operations a row\n")
    header = ["program", "devices", "rows", "bytes a row", "collectives", "compiled", "formula"]
    print(aligned([*header, "operations"], table))


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", COMPILED[-1])
    main()

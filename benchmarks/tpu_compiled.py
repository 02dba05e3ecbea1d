"""The programs that XLA compiles for a TPU, without one: ``make benchmark-tpu-compiled``.

Compiled for chips of a TPU v5e by the compiler that a TPU machine has. Nothing runs, so there are
no times. The compiler writes down the cycles that it expects of each operation, by which it decides
what to do. They are estimates: they tell which operation takes longest, and which program does by a
factor, but nothing about a few percent. A cycle of a v5e takes about 0.7 ns.

* **cycles**, of one call, or of one step of a scan of 64. A loop of unknown length counts as one
  step, and of a conditional the branch that takes longest.
* **ops**: how many operations these are. Each takes about 1,800 cycles at least.
* **beside**: bytes that the program needs beside its arguments and what it returns.
* **seconds**: of the CPU that traces and compiles the program, all threads together.
* **collectives**: in the program of one chip.

jaxbuf and flashbax are compiled alike, flashbax for the path that it has for TPUs. Buffers hold
steps of 97 bytes unless the name says otherwise; 64 are added and 256 drawn. "cycle" adds, samples,
reads all of the batch, as a learner does, and updates what it drew, in a scan. The others are
programs of their own, as from Python, that take the buffer, and return it in its own memory if they
change it. For the buffers "write-back" an update is `set_field`, or `map_field` of all items.

``--check`` compiles every operation of every buffer of the contract suite instead.
"""

import argparse
import contextlib
import dataclasses
import functools
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, SingleDeviceSharding

import jaxbuf
from benchmarks import devices, hlo, report
from benchmarks.__main__ import pattern
from benchmarks.compiling import (
    ABOUT,
    LIBRARIES,
    OPERATIONS,
    OPTIONS,
    WHOLE,
    Bind,
    Job,
    Place,
    bind_scored,
    chosen,
    compiled,
    for_device,
    lines,
    placed,
)
from benchmarks.harness import Options, Unavailable
from benchmarks.jax_loops import Binding
from benchmarks.rows import freshness, per, windows
from benchmarks.running import progress_bar
from benchmarks.transitions import ATARI, MUJOCO_STEP
from benchmarks.workload import Workload

TOPOLOGY = "v5e:2x2"
SCAN_LENGTH = 64
SLOTS = (2**18, 2**20)
ATARI_SLOTS = 2**16
SEEDS, CHIPS = 16, 4
COUNTS = ("cycles", "ops", "beside", "seconds", "collectives")
# flashbax has no buffer over several chips.
HEADER = (*ABOUT, *(f"{library} {what}" for library in LIBRARIES for what in COUNTS))[:-1]
HEADING = "### Programs for a TPU"
COMMAND = 'make benchmark-tpu-compiled ARGS="--write benchmarks/RESULTS.md"'


@functools.cache
def chips() -> Sequence[Any]:
    """The chips to compile for.

    Raises:
        Unavailable: If there is no compiler for them.
    """
    # Otherwise it would ask a server of Google's cloud which chips there are, and take them all.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    try:
        return topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGY).devices
    except Exception as error:
        raise Unavailable(
            f"jax has no compiler for TPUs here ({error}); "
            "`make benchmark-tpu-compiled` installs one"
        ) from error


def mesh(count: int) -> Mesh:
    """So many chips in a row."""
    return Mesh(np.array(chips()[:count]), ("data",), axis_types=(AxisType.Auto,))


def place(count: int) -> Place:
    """Tells where arrays lie if there are so many chips."""
    if count > 1:
        return functools.partial(NamedSharding, mesh(count))
    alone = SingleDeviceSharding(chips()[0])
    return lambda spec: alone


def bind_items(workload: Workload, *, sampler: Any) -> Binding:
    """The `ItemBuffer` of jaxbuf with any sampler of priorities."""
    return dataclasses.replace(
        per.bind_jaxbuf(workload, OPTIONS),
        create=lambda: jaxbuf.ItemBuffer.create(
            workload.transitions.example, workload.capacity, sampler=sampler
        ),
    )


def bind_uniform(workload: Workload) -> Binding:
    """The same without priorities."""
    return dataclasses.replace(bind_items(workload, sampler=jaxbuf.Uniform()), update=None)


def bind_flashbax_uniform(workload: Workload) -> Binding:
    """The item buffer of flashbax."""
    import flashbax

    buffer = flashbax.make_item_buffer(
        max_length=workload.capacity,
        min_length=1,
        sample_batch_size=workload.sample_size,
        add_batches=True,
    )
    example = workload.transitions.example
    return Binding(
        create=lambda: buffer.init(
            {name: jnp.zeros(leaf.shape, leaf.dtype) for name, leaf in example.items()}
        ),
        add=buffer.add,
        sample=buffer.sample,
        call_add=buffer.add,
        call_sample=buffer.sample,
        data=lambda sample: sample.experience,
    )


def bind_within_episodes(workload: Workload) -> Binding:
    """Windows that do not go past the end of an episode."""
    return dataclasses.replace(
        windows.bind_jaxbuf(workload, OPTIONS),
        create=lambda: jaxbuf.TrajectoryBuffer.create(
            workload.transitions.example,
            workload.num_envs,
            workload.length,
            sequence_length=workload.sequence_length,
            episodes=jaxbuf.Episodes(boundary="avoid"),
        ),
    )


def bind_set_field(workload: Workload) -> Binding:
    """New rewards for the items that were drawn."""
    return dataclasses.replace(
        bind_uniform(workload),
        update=lambda buffer, slots, reward: buffer.set_field("reward", slots, reward),
    )


def bind_map_field(workload: Workload) -> Binding:
    """New rewards for all items."""

    def update(buffer: Any, slots: Any, reward: jax.Array) -> Any:
        del slots
        return buffer.map_field("reward", lambda items: items["reward"] * 0.5 + reward[0])

    return dataclasses.replace(bind_uniform(workload), update=update)


def bind_sharded(workload: Workload) -> Binding:
    """One buffer over several chips."""
    binding = per.bind_jaxbuf(workload, OPTIONS)
    shard = per.bind_jaxbuf(
        dataclasses.replace(workload, capacity=workload.capacity // CHIPS), OPTIONS
    )
    return dataclasses.replace(
        binding, create=lambda: jaxbuf.Sharded.create(shard.create, mesh(CHIPS), "data")
    )


def jobs(slots: int) -> list[Job]:
    """All buffers with so many slots.

    The slots of `seeds` and `Sharded` are those of all seeds and shards together, and there are no
    more than `ATARI_SLOTS` Atari items: they would not fit.
    """
    items = Workload(MUJOCO_STEP, slots, 64, 256, SCAN_LENGTH)
    steps = dataclasses.replace(items, num_envs=64, sequence_length=8)
    uniform = dataclasses.replace(steps, prioritized=False)
    atari = dataclasses.replace(items, transitions=ATARI, capacity=min(slots, ATARI_SLOTS))
    seeds = dataclasses.replace(items, capacity=slots // SEEDS)
    shards = dataclasses.replace(items, add_size=256, sample_size=1024)
    prioritized: dict[str, Bind] = {
        "jaxbuf": lambda job: per.bind_jaxbuf(job, OPTIONS),
        "flashbax": for_device(per.bind_flashbax, "tpu"),
    }
    trajectories: dict[str, Bind] = {
        "jaxbuf": lambda job: windows.bind_jaxbuf(job, OPTIONS),
        "flashbax": for_device(windows.bind_flashbax, "tpu"),
    }

    def ours(bind: Callable[..., Binding], **options: Any) -> dict[str, Bind]:
        return {"jaxbuf": functools.partial(bind, **options)}

    distinct, ranked = jaxbuf.Prioritized(alpha=0.6, replacement=False), jaxbuf.RankBased()
    highest = functools.partial(
        jaxbuf.ItemBuffer.create, sampler=jaxbuf.Softmax(), evictor=jaxbuf.Lowest()
    )
    return [
        Job("uniform", items, {"jaxbuf": bind_uniform, "flashbax": bind_flashbax_uniform}),
        Job("prioritized", items, prioritized),
        Job("prioritized, without replacement", items, ours(bind_items, sampler=distinct)),
        Job("rank-based", items, ours(bind_items, sampler=ranked)),
        Job("highest scores, softmax", items, ours(bind_scored, create=highest)),
        Job(
            "prioritized, with freshness",
            items,
            ours(freshness.bind_freshness, options=OPTIONS, max_staleness=freshness.NEVER),
        ),
        Job("windows", uniform, trajectories),
        Job("windows, prioritized", steps, trajectories),
        Job("windows within episodes", uniform, ours(bind_within_episodes)),
        Job(f"prioritized, {SEEDS} seeds", seeds, prioritized, seeds=SEEDS),
        Job("write-back, set_field", items, ours(bind_set_field)),
        Job("write-back, map_field", items, ours(bind_map_field)),
        Job("prioritized, Atari", atari, prioritized),
        Job(f"Sharded, {CHIPS} chips", shards, ours(bind_sharded), devices=CHIPS),
    ]


def scan_cycle(binding: Binding) -> Callable[..., Any]:
    """Adds the same items, samples, reads the whole batch and updates it, once with each key."""

    def program(state: Any, items: Any, keys: jax.Array, priorities: jax.Array) -> Any:
        del priorities

        def body(carry: tuple[Any, jax.Array], key: jax.Array) -> Any:
            state, total = binding.add(carry[0], items), carry[1]
            drawn = binding.sample(state, key)
            leaves = jax.tree.leaves(binding.data(drawn))
            sums = [leaf.reshape(len(leaf), -1).astype(jnp.float32).sum(1) for leaf in leaves]
            priority = jax.nn.sigmoid(sum(sums)) + jnp.float32(0.1)
            if binding.update is not None:
                state = binding.update(state, binding.slots(drawn), priority)
            return (state, total + priority.sum()), None

        return jax.lax.scan(body, (state, jnp.float32(0.0)), keys)[0]

    return program


def on_a_tpu() -> contextlib.AbstractContextManager[Any]:
    """Has buffers created, and programs traced, as where a TPU is the default device."""
    return mock.patch.object(jax, "default_backend", return_value="tpu")


def counted(job: Job, library: str, operation: str, most: int = 0) -> list[str] | None:
    """Compiles an operation of a library.

    Args:
        job: What the buffer is to do.
        library: Whose buffer it is.
        operation: One of `compiling.OPERATIONS`.
        most: How many of the operations that take longest to print.

    Returns:
        The cells of the table; None if the library lacks the operation.
    """
    try:
        with on_a_tpu():
            made = compiled(job, library, operation, place(job.devices), scan_cycle, SCAN_LENGTH)
    except jax.errors.JaxRuntimeError as error:
        print(f"{library}: {job.name}: {operation}: {error}", file=sys.stderr)
        return ["fails"] * len(COUNTS)
    if made is None:
        return None
    program, seconds = made
    text = program.as_text() or ""
    if most:
        print(f"{library}: {job.name}: {operation}")
        for cycles, name, origin in hlo.dearest(text, most):
            print(f"{cycles:12,}  {name[:80]:80}  {origin[-80:]}")
    calls = SCAN_LENGTH if operation == "cycle" else 1
    cycles, operations = (number // calls for number in hlo.estimate(text))
    memory: Any = program.memory_analysis()
    beside = memory.temp_size_in_bytes
    found, _ = devices.collectives(text)
    named = ", ".join(f"{number} {name}" for name, number in sorted(found.items()))
    return [f"{cycles:,}", f"{operations:,}", f"{beside:,}", f"{seconds:.1f}", named or "none"]


def check(only: str) -> int:
    """Compiles the operations of the contract suite; returns how many of them do not compile.

    Raises:
        Unavailable: If none of them is wanted, or there is no compiler.
    """
    from tests import operations as contract

    options, failed = Options(only=only), 0
    cases = [case for case in contract.CASES if options.wants(*case)]
    if not cases:
        raise Unavailable(f"nothing matches --only {only}")
    where = place(1)(WHOLE)

    def compile_(name: str, operation: str) -> None:
        key = jax.eval_shape(lambda: jax.random.key(0))
        arguments = (*contract.abstract(name), jax.ShapeDtypeStruct((), jnp.float32), key)
        _, function = contract.OPERATIONS[operation]
        jax.jit(function).lower(*placed(arguments, where)).compile()

    with progress_bar(len(cases), "operation") as bar, on_a_tpu():
        for name, operation in cases:
            bar.set_description(f"{name}: {operation}", refresh=False)
            try:
                compile_(name, operation)
            except jax.errors.JaxRuntimeError as error:
                bar.write(f"{name}: {operation}: {error}", file=sys.stdout)
                failed += 1
            bar.update()
    print(f"{len(cases) - failed} of {len(cases)} operations compile for a TPU")
    return failed


def compare(given: argparse.Namespace) -> None:
    """Compiles what is asked for, and prints and writes each line of the table as it is known.

    Raises:
        Unavailable: If none of it is wanted, or there is no compiler.
    """
    found = [job for slots in given.slots for job in jobs(slots)]
    # Atari items are as many however many slots there are.
    unique = {tuple(job.about("cycle")): job for job in found}.values()
    programs = chosen([*unique], given.only)
    known = known_lines(given.write) if given.write else {}
    count = functools.partial(counted, most=given.dearest)
    for line in lines(programs, count):
        print(f"\n{' | '.join(line[: len(HEADER)])}", flush=True)
        known[tuple(line[: len(ABOUT)])] = line[: len(HEADER)]
        if given.write:
            text = f"{provenance()}\n\n{table(known.values())}"
            report.write_section(given.write, HEADING, text)
    print(f"\n{table(known.values())}")


def table(rows: Iterable[Sequence[str]]) -> str:
    """A table of some lines, in the order of the jobs."""
    names = [job.name for job in jobs(SLOTS[0])]

    def place_of(row: Sequence[str]) -> tuple[int, int, int]:
        name, operation, slots, _ = row[: len(ABOUT)]
        return names.index(name), int(slots.replace(",", "")), OPERATIONS.index(operation)

    return report.aligned(HEADER, sorted(rows, key=place_of))


def provenance() -> str:
    """Tells what the table was made with."""
    found = {**report.versions(), "jaxbuf": jaxbuf.__version__}
    names = ("Python", "jaxbuf", "jax", "jaxlib", "libtpu", "flashbax")
    named = ", ".join(f"{name} {found[name]}" for name in names if name in found)
    return f"`{COMMAND}` ({TOPOLOGY}; {named})."


def known_lines(path: Path) -> dict[tuple[str, ...], list[str]]:
    """The lines of an earlier table that was made with the same, by what they are about."""
    text = report.section(path.read_text(), HEADING) if path.exists() else ""
    if provenance() not in text:
        return {}
    rows = [line for line in text.splitlines() if line.startswith("|")][2:]
    found = [[cell.strip() for cell in row.split("|")[1:-1]] for row in rows]
    return {tuple(cells[: len(ABOUT)]): cells for cells in found}


def main(arguments: Sequence[str]) -> int:
    """Compiles and prints the table; returns what the program exits with."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tpu_compiled",
        description="What XLA expects of jaxbuf and flashbax on a TPU.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--only",
        type=pattern,
        default="",
        metavar="PATTERN",
        help="regular expression searched in BUFFER/OPERATION",
    )
    parser.add_argument(
        "--slots", type=int, nargs="+", default=SLOTS, metavar="N", help="slots of the buffers"
    )
    parser.add_argument(
        "--write",
        type=Path,
        metavar="FILE",
        help="write the table into this file of markdown, whose other lines stay",
    )
    parser.add_argument(
        "--dearest",
        type=int,
        default=0,
        metavar="N",
        help="print the N operations of each program that take longest",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="compile all operations of the contract suite, and count nothing",
    )
    given = parser.parse_args(arguments)
    try:
        if given.check:
            return int(check(given.only) > 0)
        compare(given)
    except Unavailable as reason:
        print(f"{parser.prog}: {reason}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    # Where libtpu is, jax would look for a TPU.
    jax.config.update("jax_platforms", "cpu")
    sys.exit(main(sys.argv[1:]))

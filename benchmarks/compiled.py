"""Programs for an accelerator, counted without one: ``python -m benchmarks.compiled gpu|tpu``.

For an NVIDIA H200, as the file `h200.txtpb` describes it (``make benchmark-gpu-compiled``), or for
chips of a TPU v5e (``make benchmark-tpu-compiled``), by the compilers that such a machine has.
Nothing runs, so there are no times; but what a program does is fixed, and is counted: in one call,
or in one step of the scan of a cycle.

* **kernels**: kernels and copies that a GPU launches one after the other; a sort counts as one.
  With batches of some hundred rows their launches are what an operation costs.
* **waits**: loops and branches that the host has to ask a GPU about, which takes longer than a
  kernel. Of a loop of unknown length one step is counted, and of a conditional every branch.
* **copied**: bytes of copies of arrays with at least a byte per slot.
* **cycles**: that XLA expects a TPU to take: they tell which program takes longer by a factor, but
  nothing about a few percent. A cycle of a v5e takes about 0.7 ns. A loop of unknown length counts
  as one step, and of a conditional the branch that takes longest.
* **ops**: how many operations these are. Each takes about 1,800 cycles at least.
* **beside**: bytes that the program needs beside its arguments; on a GPU what it returns counts.
* **lines** of the program, **collectives** of one chip, and **seconds** of the CPU to compile.

jaxbuf and flashbax are compiled alike, flashbax for the path that it has for the device. "cycle"
adds, samples and updates what it drew, and on a TPU reads all of the batch. The others are programs
of their own, as from Python, that return the buffer in its own memory if they change it. For the
buffers "write-back" an update is `set_field`, or `map_field` of all items.
"""

import contextlib
import csv
import dataclasses
import functools
import itertools
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, SingleDeviceSharding

import jaxbuf
from benchmarks import devices, hlo, jax_loops, report
from benchmarks.gpu import GATHER, LARGEST_POWER, REPLAY
from benchmarks.harness import Options, Unavailable
from benchmarks.jax_loops import Binding
from benchmarks.rows import freshness, gflownet, per, windows
from benchmarks.rows.growth import SMALL
from benchmarks.running import progress_bar
from benchmarks.transitions import ATARI, MUJOCO_STEP, Transitions
from benchmarks.workload import Workload
from jaxbuf.core.segment_tree import WIDE, using_width

OPERATIONS = ("add", "sample", "update", "cycle")
LIBRARIES = ("jaxbuf", "flashbax")
ABOUT = ("buffer", "operation", "slots", "batch")
COUNTS = {
    "gpu": ("kernels", "waits", "beside", "copied", "lines", "seconds"),
    "tpu": ("cycles", "ops", "beside", "seconds", "collectives"),
}
SCAN_LENGTH = {"gpu": 100, "tpu": 64}
MADE_FOR = {"gpu": "H200", "tpu": "v5e:2x2"}
SLOTS, SEEDS, CHIPS = (2**18, 2**20), 16, 4
WHOLE = jax.P()
Device = Literal["gpu", "tpu"]
Bind = Callable[[Workload], Binding]


@dataclasses.dataclass(frozen=True)
class Job:
    """A buffer, and what it is to do.

    Attributes:
        name: Of the buffer.
        workload: The job.
        binds: Makes each library's binding.
        seeds: How many buffers there are, by `vmap`.
        devices: How many devices the buffer lies on.
    """

    name: str
    workload: Workload
    binds: Mapping[str, Bind]
    seeds: int = 1
    devices: int = 1

    def about(self, operation: str) -> tuple[str, ...]:
        """The cells of a table that say what this is, under the heads of `ABOUT`."""
        batch = self.workload.add_size if operation == "add" else self.workload.sample_size
        return self.name, operation, str(self.workload.capacity), str(batch)


def for_device(bind: Callable[..., Binding], device: str) -> Bind:
    """The binding of flashbax that takes its path for a device, as it does only if it finds one."""

    def bind_device(workload: Workload) -> Binding:
        with mock.patch.object(jax, "devices"):
            return bind(workload, device)

    return bind_device


def ours(create: Callable[[Workload], Any], bind: Bind = per.bind_jaxbuf, **more: Any) -> Any:
    """Binds another buffer of jaxbuf, and other functions."""
    return {
        "jaxbuf": lambda job: dataclasses.replace(bind(job), create=lambda: create(job), **more)
    }


def items_with(**strategies: Any) -> Callable[[Workload], Any]:
    """Makes an `ItemBuffer` for a job."""
    return lambda job: jaxbuf.ItemBuffer.create(job.transitions.example, job.capacity, **strategies)


def scored(create: Callable[[Workload], Any]) -> Any:
    """Binds buffers of the highest scores, which are the rewards of the items."""
    add = lambda buffer, items: buffer.add(items, score=items["reward"])  # noqa: E731
    return ours(create, add=add, update=None, probability=None)


def preset(make: Callable[[Any, int], Any]) -> Any:
    """Binds one that is made for an example and a capacity."""
    return scored(lambda job: make(job.transitions.example, job.capacity))


def bind_flashbax_uniform(workload: Workload) -> Binding:
    """The item buffer of flashbax."""
    import flashbax

    slots, batch = workload.capacity, workload.sample_size
    buffer = flashbax.make_item_buffer(slots, 1, batch, add_batches=True)
    leaves = workload.transitions.example.items()
    example = {name: jnp.zeros(leaf.shape, leaf.dtype) for name, leaf in leaves}
    calls = {"create": lambda: buffer.init(example), "add": buffer.add, "sample": buffer.sample}
    return dataclasses.replace(per.bind_flashbax(workload, "cpu"), **calls, update=None)


def jobs(device: Device) -> list[Job]:
    """All of them."""
    replay = {"jaxbuf": per.bind_jaxbuf, "flashbax": for_device(per.bind_flashbax, device)}
    steps = {"jaxbuf": windows.bind_jaxbuf, "flashbax": for_device(windows.bind_flashbax, device)}
    fresh = {"jaxbuf": lambda job: freshness.bind_freshness(job, freshness.NEVER)}
    if device == "tpu":
        found = [job for slots in SLOTS for job in _tpu_jobs(slots, replay, steps, fresh)]
        # Atari items are as many however many slots there are.
        return [*{job.about("cycle"): job for job in found}.values()]
    first = next(iter(REPLAY.values()))
    states = Transitions({"state": _float(64), "reward": _float()})
    scores = dataclasses.replace(first, transitions=states, capacity=2**17, add_size=256)
    growth = [dataclasses.replace(SMALL, capacity=2**power) for power in (16, LARGEST_POWER)]
    return [
        *(Job("prioritized", workload, replay) for workload in REPLAY.values()),
        *(Job("prioritized, CartPole", workload, replay) for workload in growth),
        Job("prioritized, 8 seeds", dataclasses.replace(first, capacity=2**17), replay, seeds=8),
        Job("prioritized, Atari", GATHER, replay),
        Job("windows, prioritized", windows.WORKLOAD, steps),
        Job("windows", dataclasses.replace(windows.WORKLOAD, prioritized=False), steps),
        Job("prioritized, with freshness", first, fresh),
        Job("highest rewards", scores, preset(jaxbuf.reward_prioritized)),
        Job("highest rewards, softmax", scores, preset(gflownet.preset(None))),
        Job("diverse rewards", scores, preset(gflownet.preset(gflownet.CUTOFF))),
    ]


def _float(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, np.dtype(np.float32))


def _tpu_jobs(slots: int, replay: Any, trajectories: Any, fresh: Any) -> list[Job]:
    """Those with so many slots, of all seeds and shards together.

    There are no more than 2^16 Atari items: they would not fit.
    """
    items = Workload(MUJOCO_STEP, slots, 64, 256, 1)
    steps = dataclasses.replace(items, num_envs=64, sequence_length=8)
    plain = dataclasses.replace(steps, prioritized=False)
    atari = dataclasses.replace(items, transitions=ATARI, capacity=min(slots, 2**16))
    seeds = dataclasses.replace(items, capacity=slots // SEEDS)
    shards = dataclasses.replace(items, add_size=256, sample_size=1024)
    uniform = items_with(sampler=jaxbuf.Uniform())

    def sharded(job: Workload) -> Any:
        shard = per.bind_jaxbuf(dataclasses.replace(job, capacity=job.capacity // CHIPS))
        return jaxbuf.Sharded.create(shard.create, mesh("tpu", CHIPS), "data")

    def within_episodes(job: Workload) -> Any:
        shape = job.transitions.example, job.num_envs, job.length
        episodes = jaxbuf.Episodes(boundary="avoid")
        options = {"sequence_length": job.sequence_length, "episodes": episodes}
        return jaxbuf.TrajectoryBuffer.create(*shape, **options)

    def map_field(buffer: Any, slots: Any, reward: jax.Array) -> Any:
        del slots
        return buffer.map_field("reward", lambda items: items["reward"] * 0.5 + reward[0])

    def set_field(buffer: Any, slots: Any, reward: jax.Array) -> Any:
        return buffer.set_field("reward", slots, reward)

    highest = items_with(sampler=jaxbuf.Softmax(), evictor=jaxbuf.Lowest())
    distinct = items_with(sampler=jaxbuf.Prioritized(alpha=0.6, replacement=False))
    ranked = items_with(sampler=jaxbuf.RankBased())
    episodes = ours(within_episodes, windows.bind_jaxbuf)
    return [
        Job("uniform", items, {**ours(uniform, update=None), "flashbax": bind_flashbax_uniform}),
        Job("prioritized", items, replay),
        Job("prioritized, without replacement", items, ours(distinct)),
        Job("rank-based", items, ours(ranked)),
        Job("highest scores, softmax", items, scored(highest)),
        Job("prioritized, with freshness", items, fresh),
        Job("windows", plain, trajectories),
        Job("windows, prioritized", steps, trajectories),
        Job("windows within episodes", plain, episodes),
        Job(f"prioritized, {SEEDS} seeds", seeds, replay, seeds=SEEDS),
        Job("write-back, set_field", items, ours(uniform, update=set_field)),
        Job("write-back, map_field", items, ours(uniform, update=map_field)),
        Job("prioritized, Atari", atari, replay),
        Job(f"Sharded, {CHIPS} chips", shards, ours(sharded), devices=CHIPS),
    ]


@functools.cache
def chips(device: Device) -> Sequence[Any]:
    """The devices to compile for.

    Raises:
        Unavailable: If there is no compiler for them.
    """
    # There is no driver whose version could be looked at. And without the others, the compiler for
    # TPUs would ask a server of Google's cloud which chips there are, and take them all.
    for name, value in {
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_ACCELERATOR_TYPE": "v5litepod-4",
        "TPU_WORKER_HOSTNAMES": "localhost",
    }.items():
        os.environ.setdefault(name, value)
    config = Path(__file__).with_name("h200.txtpb").read_text()
    one = {"platform": "cuda", "topology": "1x1x1", "target_config": config}
    try:
        if device == "tpu":
            return topologies.get_topology_desc(MADE_FOR["tpu"], platform="tpu").devices
        return topologies.get_topology_desc("1x1x1", **one).devices
    except Exception as error:
        raise Unavailable(
            f"jax has no compiler for a {device.upper()} here ({error}); "
            f"`make benchmark-{device}-compiled` installs one"
        ) from error


def mesh(device: Device, count: int) -> Mesh:
    """So many devices in a row."""
    return Mesh(np.array(chips(device)[:count]), ("data",), axis_types=(AxisType.Auto,))


def as_on(device: Device) -> contextlib.AbstractContextManager[Any]:
    """Has buffers created, and programs traced, as where this is the default device."""
    if device == "gpu":
        return using_width(WIDE)
    return mock.patch.object(jax, "default_backend", return_value="tpu")


def placed(tree: Any, where: jax.sharding.Sharding) -> Any:
    """The shapes of arrays that lie there."""
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where), tree
    )


def compiled(device: Device, job: Job, library: str, operation: str) -> tuple[Any, float] | None:
    """Traces and compiles an operation of a library anew, as it is when it is called from Python.

    Returns:
        The program, and the seconds of the CPU that it took; None if the library lacks the
        operation.
    """
    jax.clear_caches()
    began = time.process_time()
    if library not in job.binds:
        return None
    workload, binding = job.workload, job.binds[library](job.workload)
    if operation == "update" and binding.update is None:
        return None

    def shapes(function: Callable[..., Any], *arguments: Any, spec: jax.P = WHOLE) -> Any:
        where = SingleDeviceSharding(chips(device)[0])
        if job.devices > 1:
            where = NamedSharding(mesh(device, job.devices), spec)
        return placed(jax.eval_shape(function, *arguments), where)

    rows, row = jax.P("data"), jax.P(None, "data")
    state, key = shapes(binding.create, spec=rows), shapes(lambda: jax.random.key(0))
    new = workload.transitions.items(np.arange(workload.add_size))
    items = shapes(lambda: binding.arguments(new), spec=rows)
    size, length = workload.sample_size, SCAN_LENGTH[device]
    made: dict[str, Callable[[], tuple[Any, ...]]] = {
        "add": lambda: (binding.add, state, items),
        "sample": lambda: (binding.sample, state, key),
        "update": lambda: (
            binding.update,
            state,
            shapes(lambda *of: binding.slots(binding.sample(*of)), state, key, spec=rows),
            shapes(lambda: jnp.zeros(size), spec=rows),
        ),
        "cycle": lambda: (
            jax_loops.scan_cycle(binding) if device == "gpu" else reading_cycle(binding),
            state,
            items,
            shapes(lambda: jax.random.split(jax.random.key(0), length)),
            shapes(lambda: jnp.zeros((length, size)), spec=row),
        ),
    }
    function, *arguments = made[operation]()
    if job.seeds > 1:
        function = jax.vmap(function)
        arguments = jax.tree.map(
            lambda leaf: leaf.update(shape=(job.seeds, *leaf.shape)), arguments
        )
    jitted = jax.jit(function, donate_argnums=None if operation == "sample" else 0)
    return jitted.lower(*arguments).compile(), time.process_time() - began


def reading_cycle(binding: Binding) -> Callable[..., Any]:
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


def counted(device: Device, job: Job, library: str, operation: str) -> dict[str, str]:
    """The counts of an operation of a library by their names; none if the library lacks it."""
    with as_on(device):
        try:
            made = compiled(device, job, library, operation)
        except jax.errors.JaxRuntimeError as error:
            print(f"{library}: {job.name}: {operation}: {error}", file=sys.stderr)
            return dict.fromkeys(COUNTS[device], "fails")
    if made is None:
        return {}
    program, seconds = made
    text, calls = program.as_text() or "", SCAN_LENGTH[device] if operation == "cycle" else 1
    counts: dict[str, Any] = {"lines": len(text.splitlines()), "seconds": round(seconds, 1)}
    memory = program.memory_analysis()
    counts["beside"] = memory.temp_size_in_bytes
    if device == "gpu":
        work = hlo.work(text, job.workload.capacity)
        counts |= {name: number // calls for name, number in work._asdict().items()}
        counts["beside"] += memory.output_size_in_bytes - memory.alias_size_in_bytes
    else:
        cycles, ops = hlo.estimate(text)
        sent = devices.collectives(text)[0]
        counts |= {"cycles": cycles // calls, "ops": ops // calls}
        named = [f"{number} {name}" for name, number in sorted(sent.items())]
        counts["collectives"] = ", ".join(named) or "none"
    return {name: str(counts[name]) for name in COUNTS[device]}


def check(only: str) -> int:
    """Compiles the operations of the contract suite for a TPU; returns how many of them fail.

    Raises:
        Unavailable: If none of them is wanted, or there is no compiler.
    """
    from tests import operations as contract

    options, failed = Options(only=only), 0
    cases = [case for case in contract.CASES if options.wants(*case)]
    if not cases:
        raise Unavailable(f"nothing matches --only {only}")
    where = SingleDeviceSharding(chips("tpu")[0])
    with progress_bar(len(cases), "operation") as bar, as_on("tpu"):
        for name, operation in cases:
            bar.set_description(f"{name}: {operation}", refresh=False)
            key = jax.eval_shape(lambda: jax.random.key(0))
            given = (*contract.abstract(name), jax.ShapeDtypeStruct((), jnp.float32), key)
            _, function = contract.OPERATIONS[operation]
            try:
                jax.jit(function).lower(*placed(given, where)).compile()
            except jax.errors.JaxRuntimeError as error:
                bar.write(f"{name}: {operation}: {error}", file=sys.stdout)
                failed += 1
            bar.update()
    print(f"{len(cases) - failed} of {len(cases)} operations compile for a TPU")
    return failed


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Counts what programs of jaxbuf and flashbax do on an accelerator.

    Attributes:
        device: For an NVIDIA GPU, or for a TPU.
        only: Compile what this regular expression is found in, as BUFFER/SLOTS/OPERATION.
        write: Write the table into this file, such as `benchmarks/results/compiled-tpu.csv`.
        check: Compile all operations of the contract suite for a TPU, and count nothing.
    """

    device: tyro.conf.Positional[Device]
    only: str = ""
    write: Path | None = None
    check: bool = False


def compare(given: Arguments) -> None:
    """Compiles what is asked for, prints the table, and writes it.

    Raises:
        Unavailable: If none of it is wanted, or there is no compiler.
    """
    options, device = Options(only=given.only), given.device
    wanted = [
        (job, operation)
        for job, operation in itertools.product(jobs(device), OPERATIONS)
        if options.wants(f"{job.name}/{job.workload.capacity}", operation)
    ]
    if not wanted:
        raise Unavailable(f"nothing matches --only {given.only}")
    made = ", ".join(f"{name} {version}" for name, version in report.versions().items())
    heads = [*ABOUT, *(f"{library} {count}" for library in LIBRARIES for count in COUNTS[device])]
    lines = list[list[str]]()
    with progress_bar(len(wanted), "operation") as bar:
        for job, operation in wanted:
            bar.set_description(f"{job.name}: {operation}", refresh=False)
            both = [counted(device, job, name, operation) for name in LIBRARIES]
            if any(both):
                cells = [one.get(count, "") for one in both for count in COUNTS[device]]
                lines.append([*job.about(operation), *cells])
            bar.update()
    print(f"\n{report.aligned(heads, lines)}")
    if given.write:
        with given.write.open("w", newline="") as file:
            file.write(f"# {MADE_FOR[device]}; {made}\n")
            csv.writer(file, lineterminator="\n").writerows([heads, *lines])


def main(arguments: Sequence[str]) -> int:
    """Compiles and prints the table; returns what the program exits with."""
    given = tyro.cli(Arguments, prog="python -m benchmarks.compiled", args=arguments)
    try:
        if given.check:
            return int(check(given.only) > 0)
        compare(given)
    except Unavailable as reason:
        print(f"python -m benchmarks.compiled: {reason}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    # Where libtpu is, jax would look for a TPU.
    jax.config.update("jax_platforms", "cpu")
    sys.exit(main(sys.argv[1:]))

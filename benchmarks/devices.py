"""One buffer over several devices, and one on the host: ``python -m benchmarks.devices``.

On a CPU, ``--devices`` says how many are made; accelerators are taken as they are. The first table
has, for ``Sharded`` with eight shards on 1, 2, 4 and 8 devices and for one ``ItemBuffer`` of the
same total size, what one jitted step does: add, sample, importance weights and update.

* **shards**: in *even* ones priorities have the same distribution; in *skewed* ones those of the
  first shard are ten times as large.
* **collectives**: in the compiled program of a device. One in a loop counts once.
* **bytes**: what all of them together return to a device.
* **µs**: the median of several blocks of calls, from Python.

The second table has the steps of a learner with a ``Hosted`` buffer: the next batch drawn before
the priorities of the last one are known, or after. Forced devices share the cores of one CPU, so
their times say nothing about accelerators.

What more devices would send is in [`benchmarks.scale`][].
"""

import argparse
import math
import re
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxbuf
from benchmarks.report import aligned
from jaxbuf.testing import hlo

SHARDS = 8
OBS = 17
"""Numbers in an observation, as in MuJoCo's HalfCheetah."""
COLLECTIVES = ("all-gather", "all-to-all", "all-reduce", "collective-permute", "reduce-scatter")
_ARRAY = re.compile(r"([a-z]+)(\d*)\[([\d,]*)\]")


def item() -> dict[str, Any]:
    """The shapes of a transition, and the priority that it gets when it was drawn."""
    obs, number = jax.ShapeDtypeStruct((OBS,), np.float32), jax.ShapeDtypeStruct((), np.float32)
    return {"obs": obs, "next_obs": obs, "reward": number, "priority": number}


def rows(count: int, seed: int, *, skewed: bool = False) -> dict[str, Any]:
    """So many transitions; if ``skewed``, those for the first shard have large priorities."""
    random = np.random.default_rng(seed)
    priority = random.lognormal(size=count).astype(np.float32)
    priority[: count // SHARDS] *= 10.0 if skewed else 1.0
    return {"priority": priority} | {
        name: random.normal(size=(count, *leaf.shape)).astype(np.float32)
        for name, leaf in item().items()
        if name != "priority"
    }


def step(buffer: Any, items: Any, key: Any, batch_size: int) -> Any:
    """Add, sample, weigh and update."""
    buffer = buffer.add(items)
    batch = buffer.sample(key, batch_size)
    weights = jaxbuf.importance_weights(buffer, batch, 0.4)
    buffer = buffer.update_priority(batch.slots, batch.data["priority"])
    return buffer, weights * batch.data["reward"]


def collectives(text: str) -> tuple[Counter[str], int]:
    """The collectives of a compiled program by name, and the bytes of all that they return."""
    found, nbytes = Counter[str](), 0
    for instructions in hlo.parse(text)[0].values():
        for instruction in instructions:
            name = instruction.opcode.removesuffix("-start")
            if name in COLLECTIVES:
                found[name] += 1
                for _, bits, shape in _ARRAY.findall(instruction.type):
                    count = math.prod(int(axis) for axis in shape.split(",") if axis)
                    nbytes += count * int(bits or 8) // 8
    return found, nbytes


def median_seconds(call: Callable[[int], Any], blocks: int, calls: int) -> float:
    """Seconds per call, each of a number that goes on; the first block compiles."""
    took, last = list[float](), None
    for block in range(blocks + 1):
        began = time.perf_counter()
        for number in range(calls):
            last = call(block * calls + number)
        jax.block_until_ready(last)
        took.append((time.perf_counter() - began) / calls)
    return statistics.median(took[1:])


def measure(create: Callable[[], Any], skewed: bool, options: argparse.Namespace) -> list[str]:
    """Fills a buffer, and returns the cells of its row from the collectives on."""
    filling = rows(options.capacity, 0, skewed=skewed)
    buffer = jaxbuf.add(create(), filling, priority=filling["priority"])
    items = rows(options.batch // 4, 1, skewed=skewed)
    if isinstance(buffer, jaxbuf.Sharded):
        where = jax.NamedSharding(buffer.mesh, jax.P(buffer.axis))
        items = jax.device_put(items, where)
    program = jax.jit(
        step,
        static_argnums=3,
        donate_argnums=0,
        compiler_options=jaxbuf.compiler_options(buffer),
    )
    compiled = program.lower(buffer, items, jax.random.key(0), options.batch).compile()
    found, nbytes = collectives(compiled.as_text() or "")

    def call(number: int) -> Any:
        nonlocal buffer
        buffer, out = compiled(buffer, items, jax.random.key(number))
        return out

    seconds = median_seconds(call, options.blocks, options.calls)
    named = ", ".join(f"{count} {name}" for name, count in sorted(found.items()))
    return [named or "none", f"{nbytes:,}", f"{seconds * 1e6:,.0f}"]


def sharded(options: argparse.Namespace) -> list[list[str]]:
    """The rows of the first table."""

    def make(capacity: int) -> Callable[[], Any]:
        return lambda: jaxbuf.ItemBuffer.create(item(), capacity, sampler=jaxbuf.Prioritized())

    table = [["one ItemBuffer", "1", "", "", *measure(make(options.capacity), False, options)]]
    counts = [count for count in (1, 2, 4, 8) if count <= jax.device_count()]
    for count in counts:
        auto = (jax.sharding.AxisType.Auto,)
        devices = jax.devices()[:count]
        mesh = jax.make_mesh((count,), ("data",), axis_types=auto, devices=devices)
        for exchange in (True, False):
            for skewed in (False, True):

                def create(mesh: Any = mesh, exchange: bool = exchange) -> Any:
                    return jaxbuf.Sharded.create(
                        make(options.capacity // SHARDS),
                        mesh,
                        "data",
                        shards=SHARDS,
                        exchange=exchange,
                    )

                cells = measure(create, skewed, options)
                kind = "skewed" if skewed else "even"
                on = "on" if exchange else "off"
                table.append(["Sharded", str(count), on, kind, *cells])
                print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return table


def hosted(options: argparse.Namespace) -> list[list[str]]:
    """The rows of the second table."""
    device = jax.devices()[0]
    width = options.width

    @jax.jit
    def learn(params: Any, data: Any) -> Any:
        hidden = jnp.tanh(data["obs"] @ params["in"])
        for _ in range(4):
            hidden = jnp.tanh(hidden @ params["hidden"])
        return params, jnp.abs(hidden.mean(axis=1) - data["reward"])

    random = np.random.default_rng(0)
    params = {"in": random.normal(size=(OBS, width)), "hidden": random.normal(size=(width, width))}
    params = jax.device_put(jax.tree.map(np.float32, params), device)

    def run(ahead: bool) -> float:
        buffer = jaxbuf.Hosted.create(
            lambda: jaxbuf.ItemBuffer.create(
                item(), options.capacity, sampler=jaxbuf.Prioritized()
            ),
            to=device,
        )
        buffer = jaxbuf.add(buffer, rows(options.capacity, 0))
        items, key = rows(options.batch // 4, 1), jax.device_put(jax.random.key(0), buffer.device)
        batch = jaxbuf.sample(buffer, key, options.batch)

        def call(number: int) -> Any:
            nonlocal buffer, batch
            _, error = learn(params, batch.data)
            buffer = jaxbuf.add(buffer, items)
            before = batch
            if ahead:
                batch = jaxbuf.sample(buffer, jax.random.fold_in(key, number), options.batch)
            buffer = jaxbuf.update_priority(buffer, before.slots, error)
            if not ahead:
                batch = jaxbuf.sample(buffer, jax.random.fold_in(key, number), options.batch)
            return batch.data

        return median_seconds(call, options.blocks, options.calls)

    return [
        ["one after the other", f"{run(False) * 1e6:,.0f}"],
        ["the next batch ahead", f"{run(True) * 1e6:,.0f}"],
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, and prints two tables."""
    parser = argparse.ArgumentParser("python -m benchmarks.devices", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--devices", type=int, default=8, help="how many to make of a CPU")
    parser.add_argument("--capacity", type=int, default=2**20, help="items in all")
    parser.add_argument(
        "--batch", type=int, default=1024, help="rows of a batch; adds are a quarter"
    )
    parser.add_argument("--width", type=int, default=1024, help="hidden units of the learner")
    parser.add_argument("--blocks", type=int, default=7, help="blocks of calls that are timed")
    parser.add_argument("--calls", type=int, default=20, help="calls in a block")
    parser.add_argument("--quick", action="store_true", help="small, to see that it works")
    options = parser.parse_args(argv)
    if options.quick:
        quick = {"capacity": 2**12, "batch": 64, "width": 64, "blocks": 1, "calls": 2}
        vars(options).update(quick)
    if options.capacity % SHARDS or options.batch % (4 * SHARDS):
        parser.error(f"--capacity has to be a multiple of {SHARDS}, and --batch of {4 * SHARDS}")
    jax.config.update("jax_num_cpu_devices", options.devices)
    print(f"{jax.device_count()} × {jax.devices()[0].device_kind}, jax {jax.__version__}")
    print(f"{options.capacity:,} items in all, batches of {options.batch}\n")
    header = ["buffer", "devices", "exchange", "shards", "collectives", "bytes", "µs"]
    print(aligned(header, sharded(options)))
    print(f"\n{aligned(['Hosted', 'µs a step'], hosted(options))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

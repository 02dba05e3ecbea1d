"""Windows of consecutive steps: add, sample, update and the cycle, uniform and prioritized.

64 environments of 16,384 steps each, full; one step of every environment is added at a time, and
256 windows of 8 steps are drawn. What is compared, and why it is equal work:

* **jaxbuf**: `TrajectoryBuffer` with `Uniform()` or `Prioritized(alpha=0.6)`, stratified. From
  Python through `jaxbuf.add`, `jaxbuf.sample` and `jaxbuf.update_priority`, which are jitted and
  donate; inside a scan through the methods.
* **pure**: the same without kernels in C++, as with `JAXBUF_NATIVE=0`.
* **flashbax**: `make_trajectory_buffer` and `make_prioritised_trajectory_buffer` with period 1,
  the latter told its device; its functions are jitted, and the ones that change the state donate
  it.

Both store the same bytes and return windows of the same bytes, each contiguous and none across the
place of the next write; with priorities both return the probabilities too. (jaxbuf returns them
without priorities as well, and for every window a slot that is known to be stale once the window
is gone.) New windows get priority 1, the largest ever set here.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from benchmarks.harness import PURE, Contestant, Options, Row, import_library
from benchmarks.jax_loops import Binding, ReplayContestant
from benchmarks.pure import PureContestant
from benchmarks.transitions import MUJOCO_STEP, Items
from benchmarks.workload import Workload

UNIFORM = (
    "python add",
    "python sample",
    "python cycle",
    "scan add",
    "scan sample",
    "scan cycle",
)
PRIORITIZED = (
    "python add",
    "python sample",
    "python update",
    "python cycle",
    "scan add",
    "scan sample",
    "scan update",
    "scan cycle",
)

WORKLOAD = Workload(
    transitions=MUJOCO_STEP,
    capacity=64 * 16_384,
    add_size=64,
    sample_size=256,
    scan_length=200,
    num_envs=64,
    sequence_length=8,
)
QUICK_LENGTH = 1024


def rows(options: Options) -> list[Row]:
    """The rows of windows."""
    if not any(
        options.wants(name, operation)
        for name in ("windows-uniform", "windows-prioritized")
        for operation in PRIORITIZED
    ):
        return []
    prioritized = _sized(options)
    uniform = dataclasses.replace(prioritized, prioritized=False)
    size = (
        f"{prioritized.num_envs} environments × {prioritized.length:,} steps of "
        f"{prioritized.transitions.num_bytes} bytes, full; add {prioritized.add_size}"
    )
    sampled = f"{prioritized.sample_size} windows of {prioritized.sequence_length}"

    def replay(workload: Workload) -> dict[str, Callable[[], Contestant]]:
        def contestant(bind: Callable[[Workload], Binding]) -> Callable[[], Contestant]:
            return lambda: ReplayContestant(bind, workload)

        return {
            "jaxbuf": contestant(bind_jaxbuf),
            PURE: lambda: PureContestant(contestant(bind_jaxbuf)),
            "flashbax": contestant(bind_flashbax),
        }

    return [
        Row("windows-uniform", f"{size}, sample {sampled}", UNIFORM, replay(uniform)),
        Row(
            "windows-prioritized",
            f"{size}, sample and update {sampled}",
            PRIORITIZED,
            replay(prioritized),
        ),
    ]


def _sized(options: Options) -> Workload:
    capacity = WORKLOAD.num_envs * QUICK_LENGTH if options.quick else WORKLOAD.capacity
    capacity = options.capacity or capacity
    smallest = 4 * WORKLOAD.num_envs * WORKLOAD.sequence_length
    if capacity < smallest or capacity % WORKLOAD.num_envs:
        raise ValueError(
            f"capacity {capacity} does not suit the windows; use a multiple of "
            f"{WORKLOAD.num_envs} from {smallest} on"
        )
    return dataclasses.replace(WORKLOAD, capacity=capacity)


def steps(items: Items, num_envs: int) -> Items:
    """Items in the order of their serial numbers, leaves [B, ...], as leaves [E, T, ...]."""
    return {
        name: np.ascontiguousarray(
            leaf.reshape(-1, num_envs, *leaf.shape[1:]).swapaxes(0, 1),
        )
        for name, leaf in items.items()
    }


def bind_jaxbuf(workload: Workload) -> Binding:
    """The `TrajectoryBuffer` of jaxbuf."""
    jaxbuf = import_library("jaxbuf")
    size = workload.sample_size
    sampler = jaxbuf.Prioritized(alpha=workload.alpha) if workload.prioritized else jaxbuf.Uniform()
    binding = Binding(
        create=lambda: jaxbuf.TrajectoryBuffer.create(
            workload.transitions.example,
            workload.num_envs,
            workload.length,
            sequence_length=workload.sequence_length,
            sampler=sampler,
        ),
        add=lambda buffer, items: buffer.add(items),
        sample=lambda buffer, key: buffer.sample(key, size),
        call_add=jaxbuf.add,
        call_sample=lambda buffer, key: jaxbuf.sample(buffer, key, size),
        data=lambda sample: sample.data,
        slots=lambda sample: sample.slots,
        probability=lambda sample: sample.probability,
        arguments=lambda items: steps(items, workload.num_envs),
    )
    if not workload.prioritized:
        return binding
    return dataclasses.replace(
        binding,
        update=lambda buffer, slots, priority: buffer.update_priority(slots, priority),
        call_update=jaxbuf.update_priority,
    )


@functools.cache
def bind_flashbax(workload: Workload, device: str | None = None) -> Binding:
    """The trajectory buffers of flashbax; see the module's docstring."""
    flashbax = import_library("flashbax")
    common = {
        "add_batch_size": workload.num_envs,
        "sample_batch_size": workload.sample_size,
        "sample_sequence_length": workload.sequence_length,
        "period": 1,
        "min_length_time_axis": workload.sequence_length,
        "max_length_time_axis": workload.length,
    }
    if workload.prioritized:
        buffer = flashbax.make_prioritised_trajectory_buffer(
            **common, priority_exponent=workload.alpha, device=device or jax.default_backend()
        )
    else:
        buffer = flashbax.make_trajectory_buffer(**common)
    in_place = functools.partial(jax.jit, donate_argnums=0)

    def create() -> Any:
        example = {
            name: jax.numpy.zeros(leaf.shape, leaf.dtype)
            for name, leaf in workload.transitions.example.items()
        }
        return buffer.init(example)

    binding = Binding(
        create=create,
        add=buffer.add,
        sample=buffer.sample,
        call_add=in_place(buffer.add),
        call_sample=jax.jit(buffer.sample),
        data=lambda sample: sample.experience,
        arguments=lambda items: steps(items, workload.num_envs),
    )
    if not workload.prioritized:
        return binding
    return dataclasses.replace(
        binding,
        update=buffer.set_priorities,
        call_update=in_place(buffer.set_priorities),
        slots=lambda sample: sample.indices,
        probability=lambda sample: sample.probabilities,
    )

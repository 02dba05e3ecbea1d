"""Prioritized experience replay: add, sample, update and the cycle of the three.

What is compared, and why it is equal work:

* **jaxbuf**: `ItemBuffer` with `Prioritized(alpha=0.6)`, stratified. From Python through
  `jaxbuf.add`, `jaxbuf.sample` and `jaxbuf.update_priority`, which are jitted and donate; inside a
  scan through the methods.
* **pure**: the same without kernels in C++, as with `JAXBUF_NATIVE=0`.
* **flashbax**: `make_prioritised_item_buffer(add_batches=True)`, its own name for a prioritized
  trajectory buffer with one row, sequence length 1 and period 1 that stores whole transitions.
  It stores and gathers the same bytes as jaxbuf, and flashbax's README recommends this form where
  speed matters more than memory. (`make_prioritised_flat_buffer` stores half as much and gathers
  pairs of steps; its README calls it slower, and it can return pairs that straddle two episodes.
  A trajectory buffer with one row per added item is slower too: its add takes twice as long,
  because the rows lie far apart.) It is told its device, so that it uses the path it recommends
  there; its functions are jitted, and the ones that change the state donate it.
* **cpprb**: `PrioritizedReplayBuffer` in C++, from Python only, with NumPy arrays. Its `sample`
  always computes importance weights, so it competes in the operations that do; its weights are
  relative to the largest of the buffer, those of the others to the largest of the batch.
* **torchrl**: `ReplayBuffer` with `PrioritizedSampler`, whose trees are in C++, from Python only,
  in a process of its own (see [`benchmarks.peers.torchrl_worker`][]) that takes its turns between
  those of the others. Like cpprb's its `sample` always computes weights, relative to the largest of
  the buffer. It alone draws independent points rather than one in each stratum: that is less work.

All others sample in strata. All give new items priority 1 (the largest ever set here), use alpha
0.6 and beta 0.4, and return the data and the probabilities (or weights).
"""

import dataclasses
import functools
import itertools
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks import equality
from benchmarks.harness import (
    PURE,
    REFERENCE,
    Contestant,
    Operation,
    Options,
    Row,
    Unavailable,
    import_library,
    repeat_calls,
)
from benchmarks.jax_loops import NUM_ARGUMENTS, Binding, ReplayContestant
from benchmarks.peer_process import PeerError, PeerProcess, environment
from benchmarks.pure import PureContestant
from benchmarks.transitions import ATARI, MUJOCO, Items
from benchmarks.workload import Workload

OPERATIONS = (
    "python add",
    "python sample",
    "python sample+weights",
    "python update",
    "python cycle",
    "python cycle+weights",
    "scan add",
    "scan sample",
    "scan update",
    "scan cycle",
)


WORKLOADS = {
    "per-mujoco": ("MuJoCo", Workload(MUJOCO, 2**20, 64, 256, 200), 2**16),
    "per-mujoco-2048": ("MuJoCo", Workload(MUJOCO, 2**20, 512, 2048, 64), 2**16),
    "per-mujoco-large": ("MuJoCo", Workload(MUJOCO, 2**20, 4096, 16_384, 16), 2**17),
    "per-atari-32": ("Atari", Workload(ATARI, 2**16, 16, 32, 200), 2**12),
}
"""What the transitions are of, the job, and the slots of a quick run."""


def rows(options: Options) -> list[Row]:
    """The prioritized rows."""
    return [
        _row(name, title, _sized(name, options))
        for name, (title, _, _) in WORKLOADS.items()
        if any(options.wants(name, operation) for operation in OPERATIONS)
    ]


def _sized(name: str, options: Options) -> Workload:
    """The job of a row, with as many slots as are asked for."""
    _, workload, quick_capacity = WORKLOADS[name]
    capacity = options.capacity or (quick_capacity if options.quick else workload.capacity)
    smallest = 2 * max(workload.add_size, workload.sample_size)
    if capacity < smallest:
        raise ValueError(f"capacity {capacity} is too small for {name}; use at least {smallest}")
    return dataclasses.replace(workload, capacity=capacity)


def _row(name: str, kind: str, workload: Workload) -> Row:
    row = replay_row(name, kind, workload)
    builders = {
        REFERENCE: row.builders[REFERENCE],
        PURE: lambda: PureContestant(row.builders[REFERENCE]),
        **row.builders,
        "cpprb": lambda: CpprbContestant(workload),
        "torchrl": lambda: TorchrlContestant(workload),
    }
    return dataclasses.replace(row, builders=builders)


def replay_row(name: str, kind: str, workload: Workload) -> Row:
    """A row of the libraries that are in JAX.

    Args:
        name: Of the row.
        kind: What the transitions are of.
        workload: The job.
    """

    def contestant(bind: Callable[[Workload], Binding]) -> Callable[[], Contestant]:
        return lambda: ReplayContestant(bind, workload)

    title = (
        f"{kind} transitions of {workload.transitions.num_bytes:,} bytes, "
        f"{workload.capacity:,} slots, full; add {workload.add_size:,}, "
        f"sample and update {workload.sample_size:,}"
    )
    builders = {"jaxbuf": contestant(bind_jaxbuf), "flashbax": contestant(bind_flashbax)}
    return Row(name, title, OPERATIONS, builders)


def bind_jaxbuf(workload: Workload) -> Binding:
    """The `ItemBuffer` of jaxbuf, with prioritized sampling."""
    jaxbuf = import_library("jaxbuf")
    size, beta = workload.sample_size, workload.beta

    def weighted(buffer: Any, key: jax.Array) -> tuple[Any, jax.Array]:
        batch = jaxbuf.sample(buffer, key, size, beta=beta)
        return batch, batch.weights

    return Binding(
        create=lambda: jaxbuf.ItemBuffer.create(
            workload.transitions.example,
            workload.capacity,
            sampler=jaxbuf.Prioritized(alpha=workload.alpha),
        ),
        add=lambda buffer, items: buffer.add(items),
        sample=lambda buffer, key: buffer.sample(key, size),
        update=lambda buffer, slots, priority: buffer.update_priority(slots, priority),
        call_add=jaxbuf.add,
        call_sample=lambda buffer, key: jaxbuf.sample(buffer, key, size),
        call_update=jaxbuf.update_priority,
        call_weighted=weighted,
        data=lambda sample: sample.data,
        slots=lambda sample: sample.slots,
        probability=lambda sample: sample.probability,
    )


@functools.cache
def bind_flashbax(workload: Workload, device: str | None = None) -> Binding:
    """The prioritized item buffer of flashbax; see the module's docstring."""
    flashbax = import_library("flashbax")
    buffer = flashbax.make_prioritised_item_buffer(
        max_length=workload.capacity,
        min_length=1,
        sample_batch_size=workload.sample_size,
        add_batches=True,
        priority_exponent=workload.alpha,
        device=device or jax.default_backend(),
    )

    @jax.jit
    def weights(probabilities: jax.Array, beta: jax.Array) -> jax.Array:
        unscaled = probabilities**-beta
        return unscaled / unscaled.max()

    call_sample = jax.jit(buffer.sample)

    def weighted(state: Any, key: jax.Array) -> tuple[Any, jax.Array]:
        batch = call_sample(state, key)
        return batch, weights(batch.probabilities, workload.beta)

    def create() -> Any:
        example = {
            name: jax.numpy.zeros(leaf.shape, leaf.dtype)
            for name, leaf in workload.transitions.example.items()
        }
        return buffer.init(example)

    return Binding(
        create=create,
        add=buffer.add,
        sample=buffer.sample,
        update=buffer.set_priorities,
        call_add=jax.jit(buffer.add, donate_argnums=0),
        call_sample=call_sample,
        call_update=jax.jit(buffer.set_priorities, donate_argnums=0),
        call_weighted=weighted,
        data=lambda sample: sample.experience,
        slots=lambda sample: sample.indices,
        probability=lambda sample: sample.probabilities,
    )


class CpprbSubject:
    """A filled cpprb buffer behind the interface of the checks."""

    def __init__(self, workload: Workload):
        """Creates the buffer, and fills it with transitions 0, 1, ..."""
        cpprb = import_library("cpprb")
        self._workload = workload
        fields = {
            name: {"shape": leaf.shape or 1, "dtype": leaf.dtype.type}
            for name, leaf in workload.transitions.example.items()
        }
        self.buffer = cpprb.PrioritizedReplayBuffer(
            workload.capacity, fields, alpha=workload.alpha, eps=0.0
        )
        self.model = equality.model_of(workload)
        equality.fill(self)

    def add(self, items: Items) -> None:
        """See `equality.Subject`."""
        self.buffer.add(**items)

    def sample(self, seed: int) -> equality.CheckedSample:
        """See `equality.Subject`; cpprb keeps its own random numbers."""
        del seed
        sample = self.buffer.sample(self._workload.sample_size, beta=self._workload.beta)
        leaves = self._workload.transitions.example
        data = {name: sample[name].reshape(-1, *leaf.shape) for name, leaf in leaves.items()}
        return equality.CheckedSample(data, sample["indexes"], weights=sample["weights"])

    def update(self, slots: Any, priority: np.ndarray) -> None:
        """See `equality.Subject`."""
        self.buffer.update_priorities(slots, priority)


class CpprbContestant(Contestant):
    """cpprb on a prioritized replay job, from Python."""

    def __init__(self, workload: Workload):
        """Fills a buffer to capacity."""
        self._workload = workload
        self._subject = CpprbSubject(workload)
        self._items = workload.transitions.items(np.arange(workload.add_size))
        self._priorities = list(
            np.random.default_rng(3)
            .uniform(0.05, 1.0, (NUM_ARGUMENTS, workload.sample_size))
            .astype(np.float32)
        )
        self._slots: list[np.ndarray] = []

    def verify(self) -> None:
        """Checks every call against the NumPy model."""
        equality.check_draws(CpprbSubject(self._workload.small()))
        equality.check_calls(self._subject, rounds=4, add=True)

    def operations(self) -> Mapping[str, Operation]:
        """The operations in which cpprb does what the others do."""
        buffer, items = self._subject.buffer, self._items
        size, beta = self._workload.sample_size, self._workload.beta
        priorities = itertools.cycle(self._priorities)

        def update(calls: int) -> float:
            arguments = itertools.cycle(list(zip(self._slots, self._priorities, strict=True)))
            return repeat_calls(lambda: buffer.update_priorities(*next(arguments)), calls)

        def cycle() -> None:
            buffer.add(**items)
            sample = buffer.sample(size, beta=beta)
            buffer.update_priorities(sample["indexes"], next(priorities))

        return {
            "python add": Operation(lambda calls: repeat_calls(lambda: buffer.add(**items), calls)),
            "python sample+weights": Operation(
                lambda calls: repeat_calls(lambda: buffer.sample(size, beta=beta), calls)
            ),
            "python update": Operation(update, prepare=self._draw_slots),
            "python cycle+weights": Operation(lambda calls: repeat_calls(cycle, calls)),
        }

    def _draw_slots(self) -> None:
        self._slots = [
            self._subject.buffer.sample(self._workload.sample_size)["indexes"]
            for _ in range(NUM_ARGUMENTS)
        ]


class TorchrlSubject:
    """A filled buffer of torchrl, in its own process, behind the interface of the checks."""

    def __init__(self, process: PeerProcess, workload: Workload):
        """Creates the buffer, and fills it with transitions 0, 1, ..."""
        self._call, self._workload = process.call, workload
        self._call(
            "build",
            capacity=workload.capacity,
            sample_size=workload.sample_size,
            alpha=workload.alpha,
            beta=workload.beta,
        )
        self.model = equality.model_of(workload)
        equality.fill(self)

    def add(self, items: Items) -> None:
        """See `equality.Subject`."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "items.npz"
            np.savez(path, **items)
            self._call("add", path=str(path))

    def sample(self, seed: int) -> equality.CheckedSample:
        """See `equality.Subject`; torchrl keeps its own random numbers."""
        del seed
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "sample.npz"
            self._call("sample", path=str(path))
            with np.load(path) as found:
                data = {name: found[f"data.{name}"] for name in self._workload.transitions.leaves}
                return equality.CheckedSample(data, found["slots"], weights=found["weights"])

    def update(self, slots: Any, priority: np.ndarray) -> None:
        """See `equality.Subject`."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "priorities.npz"
            np.savez(path, slots=slots, priority=priority)
            self._call("update", path=str(path))


class TorchrlContestant:
    """torchrl on a prioritized replay job, from Python."""

    def __init__(self, workload: Workload):
        """Fills a buffer to capacity."""
        self._workload = workload
        self._process = PeerProcess(environment("torch"), "benchmarks.peers.torchrl_worker")
        try:
            self._process.call("versions")
            self._process.call("build", capacity=2, sample_size=1, alpha=0.6, beta=0.4)
        except PeerError as error:
            raise Unavailable(f"does not run here ({str(error).splitlines()[-1]})") from error

    def verify(self) -> None:
        """Checks every call against the NumPy model."""
        equality.check_draws(TorchrlSubject(self._process, self._workload.small()))
        subject = TorchrlSubject(self._process, self._workload)
        equality.check_calls(subject, rounds=4, add=True)
        # The last items are the ones that the timed adds repeat.
        subject.add(self._workload.transitions.items(np.arange(self._workload.add_size)))

    def operations(self) -> Mapping[str, Operation]:
        """The operations in which torchrl does what the others do."""
        call = self._process.call
        return {
            "python add": Operation(lambda calls: call("time_add", calls=calls)),
            "python sample+weights": Operation(lambda calls: call("time_sample", calls=calls)),
            "python update": Operation(
                lambda calls: call("time_update", calls=calls),
                prepare=lambda: call("draw_slots"),
            ),
            "python cycle+weights": Operation(lambda calls: call("time_cycle", calls=calls)),
        }

    def facts(self) -> Mapping[str, str]:
        """Versions, which are not those of this environment."""
        return {"versions": self._process.call("versions")}

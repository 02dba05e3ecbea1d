"""What is aimed at, as data, and what of it a run has reached.

A target names a row, one or several operations and a bound. It is met if the bound holds in every
run, not only in the median of all.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np

from benchmarks.harness import REFERENCE, Limit, RowResult


class Measure(Protocol):
    """What of the result of a row is bounded."""

    @property
    def text(self) -> str:
        """What it is, in a few words."""
        ...

    def of(self, result: RowResult) -> np.ndarray | None:
        """Its value in each run [runs]; None where it was not measured."""
        ...


@dataclasses.dataclass(frozen=True)
class Ratio:
    """Time of a peer over that of the reference.

    Attributes:
        operation: The operation.
        peer: The peer.
    """

    operation: str
    peer: str

    @property
    def text(self) -> str:
        """See `Measure`."""
        return f"{self.operation}: {self.peer} / {REFERENCE}"

    def of(self, result: RowResult) -> np.ndarray | None:
        """See `Measure`."""
        timing = result.timings.get(self.operation)
        if timing is None or not timing.compared or self.peer not in timing.microseconds:
            return None
        return timing.ratios(self.peer)


@dataclasses.dataclass(frozen=True)
class Growth:
    """Time of some operations together with many slots, over that with few.

    Attributes:
        operations: The operations.
        few: Power of two of the smaller number of slots.
        many: Power of two of the larger number of slots.
    """

    operations: tuple[str, ...]
    few: int
    many: int

    @property
    def text(self) -> str:
        """See `Measure`."""
        return f"{' + '.join(self.operations)}: 2^{self.many} / 2^{self.few} slots"

    def of(self, result: RowResult) -> np.ndarray | None:
        """See `Measure`."""
        times: list[np.ndarray] = []
        for power in (self.many, self.few):
            library = f"{REFERENCE}-{2**power}"
            timings = [result.timings.get(operation) for operation in self.operations]
            found = [t.medians(library) for t in timings if t and library in t.microseconds]
            if len(found) < len(self.operations):
                return None
            times.append(np.sum(found, axis=0))
        return times[0] / times[1]


@dataclasses.dataclass(frozen=True)
class Microseconds:
    """Time of an operation."""

    operation: str

    @property
    def text(self) -> str:
        """See `Measure`."""
        return f"{self.operation}, µs"

    def of(self, result: RowResult) -> np.ndarray | None:
        """See `Measure`."""
        timing = result.timings.get(self.operation)
        return timing.medians(REFERENCE) if timing and timing.compared else None


@dataclasses.dataclass(frozen=True)
class OfFloor:
    """The floor under an operation over its time: 1 is the machine's limit."""

    operation: str

    @property
    def text(self) -> str:
        """See `Measure`."""
        return f"{self.operation}: share of the copy bandwidth"

    def of(self, result: RowResult) -> np.ndarray | None:
        """See `Measure`."""
        times = Microseconds(self.operation).of(result)
        floor = _limit(result, self.operation).floor
        return None if times is None or not floor else floor / times


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes that an operation needs beyond the state, over those of a batch.

    Attributes:
        operation: The operation.
        batch: Bytes of the batch.
    """

    operation: str
    batch: int

    @property
    def text(self) -> str:
        """See `Measure`."""
        return f"{self.operation}: memory beyond the state / batch"

    def of(self, result: RowResult) -> np.ndarray | None:
        """See `Measure`."""
        memory = _limit(result, self.operation).memory
        return None if memory is None else np.array([memory / self.batch])


@dataclasses.dataclass(frozen=True)
class Fact:
    """A number told besides."""

    name: str

    @property
    def text(self) -> str:
        """See `Measure`."""
        return self.name

    def of(self, result: RowResult) -> np.ndarray | None:
        """See `Measure`."""
        value = result.facts.get(REFERENCE, {}).get(self.name)
        return None if value is None else np.array([float(value)])


def _limit(result: RowResult, operation: str) -> Limit:
    return result.limits.get(operation, {}).get(REFERENCE, Limit())


@dataclasses.dataclass(frozen=True)
class Target:
    """A bound on what is measured in a row.

    Attributes:
        row: Name of the row.
        measure: What is bounded.
        at_least: Lower bound, or None.
        at_most: Upper bound, or None.
    """

    row: str
    measure: Measure
    at_least: float | None = None
    at_most: float | None = None

    @property
    def wanted(self) -> str:
        """The bound in words."""
        if self.at_most is not None:
            return f"at most {self.at_most:g}"
        return f"at least {self.at_least:.3g}"

    def met(self, values: np.ndarray) -> bool:
        """Whether the bound holds for all values."""
        if self.at_most is not None:
            return bool(np.all(values <= self.at_most))
        return bool(np.all(values >= self.at_least))


ATARI = ("per-atari-32", "per-atari-256")
LARGE = ("per-mujoco-2048", "per-mujoco-large")
ROWS = ("per-mujoco", *LARGE, *ATARI)
MUJOCO_BYTES, ATARI_BYTES = 165, 28_233
BATCHES = {
    "per-mujoco": 64 * MUJOCO_BYTES,
    "per-mujoco-2048": 512 * MUJOCO_BYTES,
    "per-mujoco-large": 4096 * MUJOCO_BYTES,
    "per-atari-32": 16 * ATARI_BYTES,
    "per-atari-256": 16 * ATARI_BYTES,
}


def _cpu() -> Iterator[Target]:
    for row in ROWS:
        cycle = 3.0 if row in LARGE else 2.0
        yield Target(row, Ratio("scan cycle", "flashbax"), at_least=cycle)
        for operation in ("scan add", "scan sample", "scan update"):
            yield Target(row, Ratio(operation, "flashbax"), at_least=1.5)
        yield Target(row, Ratio("python cycle", "flashbax"), at_least=3.0)
        for operation in ("python add", "python sample", "python update"):
            yield Target(row, Ratio(operation, "flashbax"), at_least=1.0)
        for operation in ("python sample+weights", "python cycle+weights"):
            for peer in ("cpprb", "torchrl"):
                yield Target(row, Ratio(operation, peer), at_least=1.0)
        yield Target(row, Fact("state beyond the data, bytes per item"), at_most=5.0)
        yield Target(row, Memory("python add", BATCHES[row]), at_most=1.0)
    yield Target("per-mujoco", Ratio("python update", "cpprb"), at_least=1 / 3)
    yield Target("per-mujoco-large", Ratio("python update", "cpprb"), at_least=1.0)
    yield Target("growth-jaxbuf", Growth(("scan sample", "scan update"), 14, 23), at_most=2.0)
    for row in ("gflownet-10000", "gflownet-100000"):
        for operation in ("python add", "python sample"):
            yield Target(row, Ratio(operation, "torchgfn"), at_least=20.0)
    for row in ("gflownet-diverse-1000", "gflownet-diverse-10000"):
        yield Target(row, Ratio("python add", "torchgfn"), at_least=5.0)
    yield Target("exchange", Ratio("add with score", "torchgfn"), at_least=10.0)
    yield Target("agent", Ratio("scan iteration", "flashbax"), at_least=1.3)


def _gpu() -> Iterator[Target]:
    yield Target("gpu-per-20-256", Ratio("scan cycle", "flashbax"), at_least=10.0)
    yield Target("gpu-per-20-256", Microseconds("scan cycle"), at_most=40.0)
    yield Target("gpu-per-20-16384", Ratio("scan cycle", "flashbax"), at_least=10.0)
    yield Target("gpu-growth-jaxbuf", Growth(("scan cycle",), 16, 24), at_most=1.5)
    yield Target("gpu-atari-4096", OfFloor("scan sample"), at_least=0.5)
    yield Target("gpu-add-one", Growth(("scan add",), 16, 24), at_most=1.1)


CPU_TARGETS = tuple(_cpu())
GPU_TARGETS = tuple(_gpu())


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What became of a target.

    Attributes:
        target: The target.
        values: What was measured, in each run; None where nothing was.
    """

    target: Target
    values: np.ndarray | None

    @property
    def met(self) -> bool:
        """Whether it was measured, and the bound held."""
        return self.values is not None and self.target.met(self.values)

    @property
    def cells(self) -> list[str]:
        """Row, what is measured, the least and the largest value, the bound, and the verdict."""
        start = [self.target.row, self.target.measure.text]
        if self.values is None:
            return [*start, "–", self.target.wanted, "not measured here"]
        low, high = (f"{value:.2f}" for value in (self.values.min(), self.values.max()))
        found = low if low == high else f"{low}–{high}"
        return [*start, found, self.target.wanted, "met" if self.met else "**missed**"]


def verdicts(results: Sequence[RowResult]) -> list[Verdict]:
    """The targets of the rows that were run, and those of the GPU in any case.

    Args:
        results: One for each row, of all runs.
    """
    found: Mapping[str, RowResult] = {result.row.name: result for result in results}
    return [
        Verdict(target, target.measure.of(found[target.row]) if target.row in found else None)
        for target in (*CPU_TARGETS, *GPU_TARGETS)
        if target.row in found or target in GPU_TARGETS
    ]

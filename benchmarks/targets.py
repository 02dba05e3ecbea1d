"""The targets as data, and which of them a run meets.

A target names a row, one or several operations and a bound. It is met if the bound holds in every
run, not only in the median of all.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from benchmarks.harness import PURE, REFERENCE, Limit, RowResult


@dataclasses.dataclass(frozen=True)
class Measure:
    """The number in the result of a row that a target bounds.

    Attributes:
        text: What it is, in a few words.
        of: Its value in each run [runs] for a library, `REFERENCE` or `PURE`; None where it was
            not measured.
        operations: The operations that have to be measured for it.
        peer: The library that has to take part, besides the reference.
    """

    text: str
    of: Callable[[RowResult, str], np.ndarray | None]
    operations: tuple[str, ...] = ()
    peer: str | None = None


def ratio(operation: str, peer: str) -> Measure:
    """Time of a peer over that of the reference."""

    def of(result: RowResult, library: str) -> np.ndarray | None:
        timing = result.timings.get(operation)
        if timing is None or not {peer, library} <= timing.microseconds.keys():
            return None
        return timing.ratios(peer, library)

    return Measure(f"{operation}: {peer} / {REFERENCE}", of, (operation,), peer)


def growth(operations: tuple[str, ...], few: int, many: int) -> Measure:
    """Time of some operations together with 2^many slots, over that with 2^few."""

    def total(result: RowResult, library: str, power: int) -> np.ndarray | None:
        times = [_medians(result, name, f"{library}-{2**power}") for name in operations]
        return None if any(time is None for time in times) else np.sum(times, axis=0)

    def of(result: RowResult, library: str) -> np.ndarray | None:
        small, large = total(result, library, few), total(result, library, many)
        return None if small is None or large is None else large / small

    text = f"{' + '.join(operations)}: 2^{many} / 2^{few} slots"
    return Measure(text, of, operations)


def microseconds(operation: str) -> Measure:
    """Time of an operation."""

    def of(result: RowResult, library: str) -> np.ndarray | None:
        return _medians(result, operation, library)

    return Measure(f"{operation}, µs", of, (operation,))


def of_floor(operation: str) -> Measure:
    """The floor under an operation over its time: 1 is the machine's limit."""

    def of(result: RowResult, library: str) -> np.ndarray | None:
        times = _medians(result, operation, library)
        floor = _limit(result, operation, library).floor
        return None if times is None or not floor else floor / times

    return Measure(f"{operation}: share of the copy bandwidth", of, (operation,))


def memory(operation: str, batch: int) -> Measure:
    """Bytes that an operation needs beyond the state, over those of a batch."""

    def of(result: RowResult, library: str) -> np.ndarray | None:
        needed = _limit(result, operation, library).memory
        return None if needed is None else np.array([needed / batch])

    return Measure(f"{operation}: memory beyond the state / batch", of, (operation,))


def fact(name: str) -> Measure:
    """A number told besides."""

    def of(result: RowResult, library: str) -> np.ndarray | None:
        value = result.facts.get(library, {}).get(name)
        return None if value is None else np.array([float(value)])

    return Measure(name, of)


def _medians(result: RowResult, operation: str, library: str) -> np.ndarray | None:
    timing = result.timings.get(operation)
    if timing is None or library not in timing.microseconds:
        return None
    return timing.medians(library)


def _limit(result: RowResult, operation: str, library: str) -> Limit:
    return result.limits.get(operation, {}).get(library, Limit())


@dataclasses.dataclass(frozen=True)
class Target:
    """A bound on what is measured in a row.

    Attributes:
        row: Name of the row.
        measure: What is bounded.
        at_least: Lower bound, or None.
        at_most: Upper bound, or None.
        pure: The bound, lower or upper, without kernels in C++; None for the same.
    """

    row: str
    measure: Measure
    at_least: float | None = None
    at_most: float | None = None
    pure: float | None = None

    @property
    def wanted(self) -> str:
        """The bound in words."""
        word, bound = ("most", self.at_most) if self.at_least is None else ("least", self.at_least)
        without = "" if self.pure is None else f", pure {self.pure:.3g}"
        return f"at {word} {bound:.3g}{without}"

    def met(self, values: np.ndarray, *, pure: bool = False) -> bool:
        """Returns whether the bound holds for all values."""
        bound = self.pure if pure and self.pure is not None else self.at_least or self.at_most
        assert bound is not None
        held = values <= bound if self.at_least is None else values >= bound
        return bool(np.all(held))


ATARI = ("per-atari-32", "per-atari-256")
MUJOCO_BYTES, ATARI_BYTES = 165, 28_233
BATCHES = {
    "per-mujoco": 64 * MUJOCO_BYTES,
    "per-mujoco-2048": 512 * MUJOCO_BYTES,
    "per-mujoco-large": 4096 * MUJOCO_BYTES,
    "per-atari-32": 16 * ATARI_BYTES,
    "per-atari-256": 16 * ATARI_BYTES,
}


CYCLES = {
    "per-mujoco": (2.5, 1.0),
    "per-mujoco-2048": (2.3, 1.0),
    "per-mujoco-large": (2.5, 1.0),
    "per-atari-32": (1.2, 1.0),
    "per-atari-256": (1.2, 1.0),
}
"""For each row: the bounds on a scanned cycle, flashbax / jaxbuf, with kernels and without."""
PEERS = {
    "gflownet-10000": {"python add": 2.2, "python sample": 1.1},
    "gflownet-100000": {"python add": 21.7, "python sample": 6.8},
    "gflownet-diverse-1000": {"python add": 2.1},
    "gflownet-diverse-10000": {"python add": 5.1},
}
"""Half of what torchgfn / jaxbuf was before the kernels were on by default."""


def _cpu() -> Iterator[Target]:
    for row, (cycle, pure) in CYCLES.items():
        yield Target(row, ratio("scan cycle", "flashbax"), at_least=cycle, pure=pure)
        if row not in ATARI:
            yield Target(row, ratio("scan update", "flashbax"), at_least=4.0, pure=1.0)
            single = 1.0 if row == "per-mujoco-large" else 1.5
            for operation in ("scan add", "scan sample"):
                yield Target(row, ratio(operation, "flashbax"), at_least=single, pure=0.9)
        for operation in ("python cycle", "python add", "python sample", "python update"):
            yield Target(row, ratio(operation, "flashbax"), at_least=1.0, pure=0.8)
        for operation in ("python sample+weights", "python cycle+weights"):
            for peer in ("cpprb", "torchrl"):
                yield Target(row, ratio(operation, peer), at_least=1.0, pure=0.8)
        yield Target(row, fact("state beyond the data, bytes per item"), at_most=6.0)
        yield Target(row, memory("python add", BATCHES[row]), at_most=1.0)
    for row in ("windows-uniform", "windows-prioritized"):
        yield Target(row, ratio("scan cycle", "flashbax"), at_least=1.8, pure=1.3)
    yield Target("freshness", ratio("scan cycle", "freshness"), at_most=1.2)
    yield Target("growth-jaxbuf", growth(("scan sample", "scan update"), 14, 23), at_most=2.0)
    for row, operations in PEERS.items():
        for operation, bound in operations.items():
            yield Target(row, ratio(operation, "torchgfn"), at_least=bound)
    yield Target("exchange", ratio("add with score", "torchgfn"), at_least=8.0)
    yield Target("agent", ratio("scan iteration", "flashbax"), at_least=1.15, pure=1.0)


def _gpu() -> Iterator[Target]:
    yield Target("gpu-per-20-256", ratio("scan cycle", "flashbax"), at_least=10.0)
    yield Target("gpu-per-20-256", microseconds("scan cycle"), at_most=40.0)
    yield Target("gpu-per-20-16384", ratio("scan cycle", "flashbax"), at_least=10.0)
    yield Target("gpu-growth-jaxbuf", growth(("scan cycle",), 16, 24), at_most=1.5)
    yield Target("gpu-atari-4096", of_floor("scan sample"), at_least=0.5)
    yield Target("gpu-add-one", growth(("scan add",), 16, 24), at_most=1.1)


CPU_TARGETS = tuple(_cpu())
GPU_TARGETS = tuple(_gpu())


@dataclasses.dataclass(frozen=True)
class Verdict:
    """A target and its values in a run.

    Attributes:
        target: The target.
        values: What was measured, in each run; None where nothing was.
        pure: The same without kernels in C++.
    """

    target: Target
    values: np.ndarray | None
    pure: np.ndarray | None = None

    @property
    def met(self) -> bool:
        """Returns whether the target was measured and the bound holds."""
        return self.values is not None and self.target.met(self.values)

    @property
    def met_purely(self) -> bool:
        """The same without kernels; with them where this was not measured."""
        return self.met if self.pure is None else self.target.met(self.pure, pure=True)

    @property
    def cells(self) -> list[str]:
        """Row, what is measured, the bound, and values and verdict, with kernels and without."""
        start = [self.target.row, self.target.measure.text, self.target.wanted]
        if self.values is None:
            return [*start, "–", "not measured here", "–", ""]
        found = [_range(self.values), _word(self.met)]
        if self.pure is None:
            return [*start, *found, "–", ""]
        return [*start, *found, _range(self.pure), _word(self.met_purely)]


def _range(values: np.ndarray) -> str:
    low, high = (f"{value:.2f}" for value in (values.min(), values.max()))
    return low if low == high else f"{low}–{high}"


def _word(met: bool) -> str:
    return "met" if met else "**missed**"


def verdicts(results: Sequence[RowResult]) -> list[Verdict]:
    """The targets of the rows that were run, and those of the GPU in any case.

    Args:
        results: One for each row, of all runs.
    """
    found: Mapping[str, RowResult] = {result.row.name: result for result in results}

    def verdict(target: Target) -> Verdict:
        if target.row not in found:
            return Verdict(target, None)
        of, result = target.measure.of, found[target.row]
        return Verdict(target, of(result, REFERENCE), of(result, PURE))

    return [
        verdict(target)
        for target in (*CPU_TARGETS, *GPU_TARGETS)
        if target.row in found or target in GPU_TARGETS
    ]

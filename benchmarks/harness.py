"""Rows of the benchmark, and the interleaved measurement of a row."""

import collections
import dataclasses
import gc
import importlib
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

REFERENCE = "jaxbuf"
"""The library to which the others are compared, unless a row names another contestant."""
PURE = "pure"
"""The same library without its kernels in C++."""


class Unavailable(Exception):
    """A library cannot take part here; the message says why and what would help."""


class UnequalWork(Exception):
    """A library did less than, or other than, the work of its row."""


def import_library(name: str) -> Any:
    """A library, or `Unavailable` with the reason."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise Unavailable(f"cannot be imported ({error}); install {name}") from error


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of the command line.

    Attributes:
        only: Run the operations in whose `ROW/OPERATION` this regular expression is found.
        repeats: Interleaved turns per operation.
        runs: Do all of it so many times, from filling the buffers on.
        libraries: Run these libraries only, separated by commas.
        capacity: Slots of every row; without it each row's own.
        quick: Small buffers, few repeats: a trial, not a result.
    """

    only: str = ""
    repeats: int | None = None
    runs: int = 1
    libraries: str = ""
    capacity: int | None = None
    quick: bool = False

    def __post_init__(self):
        """Checks the numbers and the pattern."""
        for name in ("repeats", "runs", "capacity"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"--{name} must be at least 1")
        try:
            re.compile(self.only)
        except re.error as error:
            message = f"--only {self.only!r} is not a regular expression: {error}"
            raise ValueError(message) from None

    @property
    def turns(self) -> int:
        """Number of blocks in which each library is timed per operation."""
        return self.repeats or (5 if self.quick else 25)

    @property
    def block_seconds(self) -> float:
        """Aimed length of one timed block."""
        return 0.005 if self.quick else 0.03

    def wants(self, row: str, operation: str) -> bool:
        """Returns whether `--only` selects this operation of this row."""
        return re.search(self.only, f"{row}/{operation}", re.IGNORECASE) is not None


@dataclasses.dataclass(frozen=True)
class Operation:
    """One timed operation of one library.

    Attributes:
        run: `run(n)` makes n calls, waits for their results, and returns the seconds they took.
        per_call: Operations done by one call (the length of a scan; 1 from Python).
        prepare: Called once right before the turns begin, to make fresh arguments.
        floor: Tells the least seconds that one operation can take on this machine (see
            [`benchmarks.limits`][]); None where that is not known.
    """

    run: Callable[[int], float]
    per_call: int = 1
    prepare: Callable[[], object] = lambda: None
    floor: Callable[[], float] | None = None


class Contestant(Protocol):
    """One library, filled with the row's data and ready to be timed."""

    def verify(self) -> None:
        """Raises `UnequalWork` unless the library does the work of the row."""
        ...

    def operations(self) -> Mapping[str, Operation]:
        """The operations this library offers, by the row's names for them."""
        ...

    def facts(self) -> Mapping[str, str]:
        """Returns other facts to report, such as bytes per item; called after the turns."""
        return {}


@dataclasses.dataclass(frozen=True)
class Row:
    """One workload and the libraries that compete on it.

    Attributes:
        name: Short and unique; `--only` searches it.
        title: One line of prose for the table.
        operations: The names of the operations, in the order in which they are timed.
        builders: Makes each library's contestant; may raise `Unavailable`.
        reference: The contestant to whose times those of the others are compared.
        alike: Whether the floors of the contestants are those of the reference, if JAX runs them:
            they are told only once then.
    """

    name: str
    title: str
    operations: Sequence[str]
    builders: Mapping[str, Callable[[], Contestant]]
    reference: str = REFERENCE
    alike: bool = True


@dataclasses.dataclass(frozen=True)
class Timing:
    """The times of one operation.

    Attributes:
        microseconds: Per library, microseconds per operation in each turn [R], or, of several
            runs, [runs · R].
        reference: The library to whose times those of the others are compared.
        runs: Number of runs.
    """

    microseconds: Mapping[str, np.ndarray]
    reference: str = REFERENCE
    runs: int = 1

    @property
    def compared(self) -> bool:
        """Returns whether the reference was timed."""
        return self.reference in self.microseconds

    def median(self, library: str) -> float:
        """Median time of one operation in microseconds."""
        return float(np.median(self.microseconds[library]))

    def ratio(self, peer: str) -> tuple[float, float, float]:
        """Lower bound, median and upper bound of peer time over reference time.

        The bounds are the quartiles of one run, or the least and the largest median of several.
        """
        ratios = self.microseconds[peer] / self.microseconds[self.reference]
        low, middle, high = np.quantile(ratios, (0.25, 0.5, 0.75))
        if self.runs > 1:
            medians = np.median(ratios.reshape(self.runs, -1), axis=1)
            low, high = medians.min(), medians.max()
        return float(low), float(middle), float(high)


@dataclasses.dataclass
class RowResult:
    """All that was learned on one row; floors are in microseconds."""

    row: Row
    timings: dict[str, Timing] = dataclasses.field(default_factory=dict[str, Timing])
    floors: dict[str, dict[str, float]] = dataclasses.field(
        default_factory=dict[str, dict[str, float]]
    )
    facts: dict[str, dict[str, str]] = dataclasses.field(default_factory=dict[str, dict[str, str]])
    skipped: dict[str, str] = dataclasses.field(default_factory=dict[str, str])
    unequal: dict[str, str] = dataclasses.field(default_factory=dict[str, str])


def repeat_calls(
    call: Callable[[], object], calls: int, finish: Callable[[], object] = lambda: None
) -> float:
    """Seconds that `calls` calls take, and `finish` after the last; no garbage collection."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        start = time.perf_counter()
        for _ in range(calls):
            call()
        finish()
        return time.perf_counter() - start
    finally:
        if collecting:
            gc.enable()


def _calls_per_block(operation: Operation, options: Options) -> int:
    """Returns the number of calls in one block, not counting the first call, which compiles."""
    operation.run(1)
    seconds = min(operation.run(1), operation.run(2) / 2)
    return int(np.clip(options.block_seconds / max(seconds, 1e-9), 1, 2000))


def time_operation(
    operations: Mapping[str, Operation], options: Options, reference: str = REFERENCE
) -> Iterator[Timing | None]:
    """Times one operation of several libraries in turns.

    Args:
        operations: The operation as each library does it.
        options: How long and how often.
        reference: The library to compare the others with.

    Yields:
        None after every turn, and in the end the timing.
    """
    calls: dict[str, int] = {}
    for library, operation in operations.items():
        operation.prepare()
        calls[library] = _calls_per_block(operation, options)
    gc.collect()
    seconds: dict[str, list[float]] = {library: [] for library in operations}
    order = collections.deque(operations)
    for _ in range(options.turns):
        for library in order:
            operation = operations[library]
            done = calls[library] * operation.per_call
            seconds[library].append(operation.run(calls[library]) / done)
        # A library that followed itself would find its data in the caches.
        order.rotate(-1)
        yield None
    microseconds = {library: np.array(times) * 1e6 for library, times in seconds.items()}
    yield Timing(microseconds, reference)


def run_row(row: Row, options: Options, progress: Callable[[str, int], None]) -> RowResult:
    """Builds, verifies and times the libraries of a row.

    Args:
        row: The row.
        options: How.
        progress: Called with what is going on and the number of turns just done.

    Returns:
        The result, with the libraries that could not take part and the reasons.
    """
    result = RowResult(row)
    contestants: dict[str, Contestant] = {}
    for library, builder in row.builders.items():
        if options.libraries and library not in options.libraries.split(","):
            continue
        progress(f"{row.name}: {library}: filling and checking", 0)
        try:
            contestant = builder()
            contestant.verify()
        except Unavailable as reason:
            result.skipped[library] = str(reason)
        except UnequalWork as reason:
            result.unequal[library] = str(reason)
        else:
            contestants[library] = contestant
    offered = {library: contestant.operations() for library, contestant in contestants.items()}
    for name in row.operations:
        if not options.wants(row.name, name):
            continue
        progress(f"{row.name}: {name}", 0)
        competing = {library: known[name] for library, known in offered.items() if name in known}
        for timing in time_operation(competing, options, row.reference):
            if timing is None:
                progress(f"{row.name}: {name}", 1)
            elif timing.microseconds:
                result.timings[name] = timing
        progress(f"{row.name}: {name}: floors", 0)
        result.floors[name] = {
            library: 1e6 * known.floor()
            for library, known in competing.items()
            if known.floor and (library == row.reference or not row.alike)
        }
    for library, contestant in contestants.items():
        result.facts[library] = dict(contestant.facts())
    return result


def merged(results: Sequence[RowResult]) -> RowResult:
    """One result of several runs of a row: what is said of it besides is that of the last."""
    last = results[-1]
    if len(results) == 1:
        return last
    timings: dict[str, Timing] = {}
    for name, timing in last.timings.items():
        found = [result.timings[name].microseconds for result in results if name in result.timings]
        libraries = [
            library for library in timing.microseconds if all(library in times for times in found)
        ]
        microseconds = {
            library: np.concatenate([times[library] for times in found]) for library in libraries
        }
        timings[name] = Timing(microseconds, timing.reference, len(found))
    unequal = {library: why for result in results for library, why in result.unequal.items()}
    return dataclasses.replace(last, timings=timings, unequal=unequal)

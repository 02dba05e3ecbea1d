"""Calls from Python with other work in between, as in a loop with an environment.

Between two calls a loop steps an environment and a network. Then the caches hold other things, and
a thread of XLA's that waits for work has gone to sleep: a call takes longer than one in a row of
calls. So each call is timed by itself here, after 50 µs of Python.

The contestants are those of the prioritized rows (see [`benchmarks.rows.per`][]), except torchrl,
and a ring of NumPy arrays as people write it themselves. That one draws uniformly, which is less
work than the others do, and has no priorities to update.

The last row adds transitions that come one at a time: each by a call of its own, or 64 at a time
out of NumPy arrays.
"""

import dataclasses
import time
from collections.abc import Callable, Mapping

import jax
import numpy as np

import jaxbuf
from benchmarks.harness import Contestant, Operation, Options, Row, UnequalWork, repeat_calls
from benchmarks.rows.per import CpprbContestant, replay_row
from benchmarks.transitions import CARTPOLE
from benchmarks.workload import Workload

OPERATIONS = ("python add", "python sample", "python sample+weights", "python update")
SECONDS_BETWEEN = 50e-6
SIZES = {f"loop-{size}": size for size in (1, 32, 256)}
ONE_BY_ONE = "loop-one-by-one"
TOGETHER = 64


def rows(options: Options) -> list[Row]:
    """The rows: one for each number of transitions in a call, and one of single transitions."""
    capacity = options.capacity or 2**14
    found = [
        _row(name, Workload(CARTPOLE, capacity, size, size, 1), options)
        for name, size in SIZES.items()
        if any(options.wants(name, operation) for operation in OPERATIONS)
    ]
    if options.wants(ONE_BY_ONE, "python add"):
        title = f"CartPole transitions one by one, each after 50 µs of Python, {capacity:,} slots"
        builders = {
            "jaxbuf": lambda: SinglesContestant(capacity, 1),
            f"{TOGETHER} at a time": lambda: SinglesContestant(capacity, TOGETHER),
        }
        found.append(Row(ONE_BY_ONE, title, ("python add",), builders))
    return found


def _row(name: str, workload: Workload, options: Options) -> Row:
    row = replay_row(name, "CartPole", workload, options)
    builders = {
        **row.builders,
        "cpprb": lambda: CpprbContestant(workload),
        "numpy": lambda: RingContestant(workload),
    }
    title = f"{row.title}; each call after {SECONDS_BETWEEN * 1e6:.0f} µs of Python"
    spaced = {library: _spaced(build) for library, build in builders.items()}
    return dataclasses.replace(row, title=title, operations=OPERATIONS, builders=spaced)


def _spaced(build: Callable[[], Contestant]) -> Callable[[], Contestant]:
    return lambda: SpacedContestant(build())


class SpacedContestant:
    """Another contestant, whose calls are timed one by one, with work between them."""

    def __init__(self, contestant: Contestant):
        """Takes the other contestant."""
        self._contestant = contestant

    def verify(self) -> None:
        """See `Contestant`."""
        self._contestant.verify()

    def operations(self) -> Mapping[str, Operation]:
        """Returns what the other does when it is called from Python."""
        return {
            name: Operation(_between(one.run), prepare=one.prepare)
            for name, one in self._contestant.operations().items()
            if name in OPERATIONS
        }

    def facts(self) -> Mapping[str, str]:
        """Those of the other."""
        return self._contestant.facts()


def _between(run: Callable[[int], float]) -> Callable[[int], float]:
    def spaced(calls: int) -> float:
        seconds = 0.0
        for _ in range(calls):
            _work()
            seconds += run(1)
        return seconds

    return spaced


def _work() -> None:
    """Does what a loop does between two calls: makes small objects, and looks names up."""
    end = time.perf_counter() + SECONDS_BETWEEN
    while time.perf_counter() < end:
        {str(number): [number] for number in range(8)}.get("7")


class RingContestant:
    """NumPy arrays that are written in a circle, and drawn from uniformly."""

    def __init__(self, workload: Workload):
        """Fills the arrays with transitions 0, 1, ..."""
        self._workload = workload
        self._arrays = workload.transitions.items(np.arange(workload.capacity))
        self._items = workload.transitions.items(np.arange(workload.add_size))
        self._next, self._random = 0, np.random.default_rng(0)

    def verify(self) -> None:
        """Checks that a sample has whole transitions.

        Raises:
            UnequalWork: If it does not.
        """
        batch = self._sample()
        whole = self._workload.transitions.items(batch["reward"].astype(np.int64))
        if any(not np.array_equal(batch[name], leaf) for name, leaf in whole.items()):
            raise UnequalWork("a sampled transition has leaves of several")

    def operations(self) -> Mapping[str, Operation]:
        """Returns adding and sampling, which need no priorities."""
        return {
            "python add": Operation(lambda calls: repeat_calls(self._add, calls)),
            "python sample": Operation(lambda calls: repeat_calls(self._sample, calls)),
        }

    def facts(self) -> Mapping[str, str]:
        """Returns none: it holds the data only."""
        return {}

    def _add(self) -> None:
        slots = (self._next + np.arange(self._workload.add_size)) % self._workload.capacity
        for name, leaf in self._arrays.items():
            leaf[slots] = self._items[name]
        self._next = (self._next + self._workload.add_size) % self._workload.capacity

    def _sample(self) -> Mapping[str, np.ndarray]:
        slots = self._random.integers(self._workload.capacity, size=self._workload.sample_size)
        return {name: leaf[slots] for name, leaf in self._arrays.items()}


class SinglesContestant:
    """Adds transitions that come one by one, a number of them together."""

    def __init__(self, capacity: int, together: int):
        """Creates a buffer, and the arrays that transitions are collected in."""
        self._together, self._count = together, 0
        self._buffer = jaxbuf.ItemBuffer.create(CARTPOLE.example, capacity)
        self._rows = CARTPOLE.items(np.zeros(together, np.int64))
        self._items = CARTPOLE.items(np.arange(TOGETHER))

    def verify(self) -> None:
        """Checks that the buffer has all transitions in order.

        Raises:
            UnequalWork: If it has not.
        """
        for _ in range(TOGETHER):
            self._add()
        reward = np.asarray(self._buffer.data["reward"])[:TOGETHER]
        if not np.array_equal(reward, np.arange(TOGETHER)):
            raise UnequalWork("a transition is missing, or in another place")

    def operations(self) -> Mapping[str, Operation]:
        """Returns adding transitions, of which a call adds as many as go together."""
        spaced = _between(lambda calls: repeat_calls(self._add, calls))
        return {"python add": Operation(lambda calls: spaced(TOGETHER * calls), per_call=TOGETHER)}

    def facts(self) -> Mapping[str, str]:
        """Returns none."""
        return {}

    def _add(self) -> None:
        number = self._count % TOGETHER
        for name, leaf in self._rows.items():
            leaf[number % self._together] = self._items[name][number]
        self._count += 1
        if self._count % self._together == 0:
            self._buffer = jax.block_until_ready(jaxbuf.add(self._buffer, self._rows))

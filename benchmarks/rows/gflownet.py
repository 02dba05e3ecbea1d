"""Buffers of the highest log rewards: add and sample, with and without a diversity filter.

States of 64 floats with their log rewards; the buffer is full and keeps the rows with the highest
log reward. 256 rows are added at a time, of which about half rank high enough to enter, whatever
the capacity, and a quarter has come before (see [`benchmarks.arrivals`][]). What is compared, and
why it is equal work:

* **jaxbuf**: `jaxbuf.reward_prioritized(temperature=1.0)`, or `jaxbuf.diverse_reward_prioritized`
  with cutoff 0.1 and p = 1 on the state, through `jaxbuf.add` and `jaxbuf.sample`; inside a scan
  through the methods.
* **torchgfn**: `ReplayBuffer(prioritized_capacity=True, prioritized_sampling=True)`, or
  `NormBasedDiversePrioritizedReplayBuffer`, in a process of its own (it needs another NumPy) that
  takes its turns between those of jaxbuf. It adds `StatesContainer`s, made before the clock starts.

Both are given the same batches and must hold the same rows after each; both draw 256 different rows
by the softmax of their log rewards, and return states and log rewards.

"refused" is an add of rows that are all below those held, which need not be compared with them.

"""

import dataclasses
import itertools
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import limits
from benchmarks.arrivals import NUM_BATCHES, Arrivals, BestModel, Source
from benchmarks.harness import (
    Operation,
    Options,
    Row,
    UnequalWork,
    import_library,
    repeat_calls,
)
from benchmarks.jax_loops import NUM_ARGUMENTS
from benchmarks.peer_process import PeerProcess, environment
from benchmarks.programs import compiled, repeat_in_place, scan_sample, scanned

CUTOFF = 0.1
SAMPLE_SIZE = 256
SCAN_LENGTH = 2 * NUM_BATCHES
CHECKED_CAPACITY = 1000
"""Capacity at which the rows held are compared; NumPy needs long for all distances."""

SAMPLE = ("python add", "python sample", "scan add", "scan sample")
ADD = ("python add", "python add, refused", "scan add")


def rows(options: Options) -> list[Row]:
    """The rows of scored states."""
    found = [
        *(_peer_row(capacity, None) for capacity in _sizes(options, 10_000, 100_000)),
        *(_peer_row(capacity, CUTOFF) for capacity in _sizes(options, 1000, 10_000)),
    ]
    wanted = [row for row in found if any(options.wants(row.name, name) for name in row.operations)]
    if wanted and options.capacity is not None and options.capacity < 2 * SAMPLE_SIZE:
        raise ValueError(
            f"capacity {options.capacity} is too small for {wanted[0].name}; use at least "
            f"{2 * SAMPLE_SIZE}"
        )
    return wanted


def _sizes(options: Options, *sizes: int) -> tuple[int, ...]:
    if options.capacity is not None:
        sizes = (options.capacity,)
    return sizes[:1] if options.quick else sizes


def _peer_row(capacity: int, cutoff: float | None) -> Row:
    arrivals = Arrivals(capacity)
    diverse = cutoff is not None
    title = (
        f"States of {arrivals.width} floats with log rewards, full; the highest stay; "
        f"add {arrivals.batch}; {capacity:,} slots"
    )
    if diverse:
        title += f"; rows within {cutoff} (p = 1) of better ones are refused"
    else:
        title += f"; sample {SAMPLE_SIZE}"
    return Row(
        f"gflownet-{'diverse-' * diverse}{capacity}",
        title,
        ADD if diverse else SAMPLE,
        {
            "jaxbuf": lambda: JaxbufContestant(arrivals, preset(cutoff), cutoff),
            "torchgfn": lambda: TorchgfnContestant(arrivals, cutoff),
        },
    )


def preset(cutoff: float | None) -> Callable[[Any, int], Any]:
    """Makes jaxbuf's buffer for an example and a capacity."""

    def create(example: Any, capacity: int) -> Any:
        jaxbuf = import_library("jaxbuf")
        if cutoff is None:
            return jaxbuf.reward_prioritized(example, capacity, temperature=1.0)
        return jaxbuf.diverse_reward_prioritized(
            example, capacity, cutoff=cutoff, p=1.0, field="state"
        )

    return create


class Subject(Protocol):
    """A buffer of the best rows under test, full of the initial ones."""

    def add(self, count: int) -> None:
        """Adds the next batches."""
        ...

    def contents(self) -> tuple[np.ndarray, np.ndarray]:
        """The states [N, D] and the log rewards [N] held."""
        ...

    def sample(self) -> tuple[np.ndarray, np.ndarray]:
        """Draws states [SAMPLE_SIZE, D] with their log rewards."""
        ...


def check_rows(subject: Subject, arrivals: Arrivals, cutoff: float | None, turns: int) -> None:
    """Compares the rows held with those of the NumPy model, after the fill and after every add.

    Raises:
        UnequalWork: If anything differs.
    """
    model, source = BestModel(arrivals, cutoff), Source(arrivals)
    for turn in range(turns + 1):
        if turn:
            subject.add(1)
            model.add(*source.next())
        found = _in_order(*subject.contents())
        for held, expected in zip(found, _in_order(model.states, model.scores), strict=True):
            if not np.array_equal(held, expected):
                raise UnequalWork(f"the rows held after {turn} adds are not those to keep")


def _in_order(states: np.ndarray, scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    order = np.lexsort((states[:, 0], scores))
    return states[order], scores[order]


def check_samples(subject: Subject, draws: int = 64) -> None:
    """Compares samples with draws by the softmax without replacement, made by NumPy.

    Raises:
        UnequalWork: If rows repeat, are not in the buffer, or are not drawn by their log rewards.
    """
    states, scores = subject.contents()
    held = {state.tobytes(): score for state, score in zip(states, scores, strict=True)}
    rng = np.random.default_rng(2)
    found, expected = np.zeros(draws), np.zeros(draws)
    for draw in range(draws):
        drawn, drawn_scores = subject.sample()
        keys = [state.tobytes() for state in drawn]
        if len(set(keys)) != SAMPLE_SIZE:
            raise UnequalWork("a sample has a row twice")
        if [held.get(key) for key in keys] != list(drawn_scores):
            raise UnequalWork("sampled a row that is not in the buffer")
        found[draw] = drawn_scores.mean()
        race = scores + rng.gumbel(size=len(scores))
        expected[draw] = scores[np.argpartition(-race, SAMPLE_SIZE)[:SAMPLE_SIZE]].mean()
    deviation = np.sqrt((found.var() + expected.var()) / draws)
    if abs(found.mean() - expected.mean()) > 5.0 * deviation:
        raise UnequalWork(
            f"sampled log rewards have mean {found.mean():.3f}, not {expected.mean():.3f}"
        )


class JaxbufSubject:
    """A buffer of jaxbuf behind the interface of the checks.

    Attributes:
        state: The buffer.
        source: The batches to come.
    """

    def __init__(self, arrivals: Arrivals, create: Callable[[Any, int], Any]):
        """Fills a buffer with the initial rows.

        Args:
            arrivals: The rows.
            create: Makes the buffer for an example and a capacity.
        """
        self._jaxbuf = import_library("jaxbuf")
        example = {
            "state": jax.ShapeDtypeStruct((arrivals.width,), np.float32),
            "log_reward": jax.ShapeDtypeStruct((), np.float32),
        }
        self.state = create(example, arrivals.capacity)
        self.source = Source(arrivals)
        self.put(self.state, arguments(*arrivals.initial()))

    def put(self, buffer: Any, items: Any) -> Any:
        """Adds rows to a buffer from Python."""
        self.state = self._jaxbuf.add(buffer, items, score=items["log_reward"])
        return self.state

    def add(self, count: int) -> None:
        """See `Subject`."""
        for _ in range(count):
            self.put(self.state, arguments(*self.source.next()))

    def contents(self) -> tuple[np.ndarray, np.ndarray]:
        """See `Subject`."""
        data = self.state.data
        return np.asarray(data["state"]), np.asarray(data["log_reward"])

    def draw(self, key: jax.Array) -> Any:
        """A sample from Python."""
        return self._jaxbuf.sample(self.state, key, SAMPLE_SIZE)

    def sample(self) -> tuple[np.ndarray, np.ndarray]:
        """See `Subject`."""
        self._draws = getattr(self, "_draws", 0) + 1
        drawn = self.draw(jax.random.key(self._draws))
        if not np.all(drawn.valid):
            raise UnequalWork("a sample has rows that are not valid")
        return np.asarray(drawn.data["state"]), np.asarray(drawn.data["log_reward"])


def arguments(states: np.ndarray, scores: np.ndarray) -> Any:
    """Returns the rows that jaxbuf adds, on the device."""
    return jax.block_until_ready(jax.device_put({"state": states, "log_reward": scores}))


class JaxbufContestant:
    """jaxbuf on scored states."""

    def __init__(
        self,
        arrivals: Arrivals,
        create: Callable[[Any, int], Any],
        cutoff: float | None = None,
    ):
        """Fills a buffer to capacity.

        Args:
            arrivals: The rows.
            create: Makes the buffer for an example and a capacity.
            cutoff: Distance up to which rows are too close; None for no such filter.
        """
        self._arrivals, self._create, self._cutoff = arrivals, create, cutoff
        self._subject = JaxbufSubject(arrivals, create)
        self._keys = list(jax.random.split(jax.random.key(0), NUM_ARGUMENTS))
        self._scanned_keys = jax.random.split(jax.random.key(1), SCAN_LENGTH)
        self._pool = jax.device_put(arrivals.pool())
        state = self._subject.state
        self._scan_add = compiled(self._add_program(), state, *self._next_scan())
        self._scan_sample = compiled(
            scan_sample(lambda buffer, key: buffer.sample(key, SAMPLE_SIZE)),
            state,
            self._scanned_keys,
        )

    def _next_scan(self) -> tuple[Any, jax.Array]:
        """The arguments of a scanned add that goes on after the last batch."""
        source = self._subject.source
        turn, source.turn = source.turn, source.turn + SCAN_LENGTH
        return self._pool, jax.block_until_ready(jnp.int32(turn))

    def _add_program(self) -> Callable[..., Any]:
        moves, drift = self._arrivals.moves, self._arrivals.drift

        def program(buffer: Any, pool: Any, turn: jax.Array) -> Any:
            def body(buffer: Any, step: jax.Array) -> tuple[Any, None]:
                number = turn + step
                states, scores = jax.tree.map(lambda leaf: leaf[number % NUM_BATCHES], pool)
                passes = (number // NUM_BATCHES).astype(np.float32)
                states += moves * passes
                scores += number.astype(np.float32) * drift
                items = {"state": states, "log_reward": scores}
                return buffer.add(items, score=scores), None

            return jax.lax.scan(body, buffer, jnp.arange(SCAN_LENGTH, dtype=jnp.int32))

        return program

    def verify(self) -> None:
        """Checks the rows held and drawn against NumPy, and the scanned adds against the others."""
        small = dataclasses.replace(
            self._arrivals, capacity=min(self._arrivals.capacity, CHECKED_CAPACITY)
        )
        check_rows(JaxbufSubject(small, self._create), small, self._cutoff, 2 * NUM_BATCHES)
        subject = self._subject
        if self._cutoff is None:
            check_samples(subject)
        again = JaxbufSubject(self._arrivals, self._create)
        again.source.turn = subject.source.turn
        again.add(SCAN_LENGTH)
        subject.state, _ = self._scan_add(subject.state, *self._next_scan())
        found, expected = (np.sort(of.contents()[1]) for of in (subject, again))
        # A compiler may round the moving mean once less.
        if not np.allclose(found, expected, rtol=1e-5, atol=1e-5):
            raise UnequalWork("the scan holds other rows than the calls from Python")

    def operations(self) -> Mapping[str, Operation]:
        """Adds and samples."""
        subject, keys = self._subject, itertools.cycle(self._keys)

        def adds(rows: Callable[[], tuple[np.ndarray, np.ndarray]]) -> Operation:
            def run(calls: int) -> float:
                batches = iter([arguments(*rows()) for _ in range(calls)])
                return repeat_in_place(
                    subject, lambda buffer: subject.put(buffer, next(batches)), calls
                )

            return Operation(run)

        def draw() -> None:
            subject.draw(next(keys)).probability.block_until_ready()

        floors = self._floors()
        operations = {
            "python add": adds(subject.source.next),
            "python add, refused": adds(subject.source.worst),
            "python sample": Operation(lambda calls: repeat_calls(draw, calls)),
            "scan add": Operation(scanned(subject, self._scan_add, self._next_scan), SCAN_LENGTH),
            "scan sample": Operation(
                scanned(subject, self._scan_sample, lambda: (self._scanned_keys,)), SCAN_LENGTH
            ),
        }
        return {
            name: dataclasses.replace(operation, floor=floors[name])
            for name, operation in operations.items()
        }

    def _floors(self) -> dict[str, Callable[[], float]]:
        """Half of the rows added take the place of others, which lie anywhere; the rest is read."""
        arrivals, state = self._arrivals, self._subject.state
        row, held = 4 * arrivals.width, len(jax.tree.leaves(state))
        within = arrivals.capacity * (row + 4)
        add = limits.Traffic(arrivals.batch * (row + 4))
        add += limits.gathered(arrivals.batch // 2, [row, 4], within)
        sample = limits.gathered(SAMPLE_SIZE, [row, 4], within)
        drawn = jax.eval_shape(lambda: state.sample(self._keys[0], SAMPLE_SIZE))
        made = len(jax.tree.leaves(drawn))
        return {
            "scan add": add.seconds,
            "scan sample": sample.seconds,
            "python add": lambda: add.seconds() + limits.dispatch_seconds(held, 3, 0),
            "python add, refused": lambda: limits.dispatch_seconds(held, 3, 0),
            "python sample": lambda: sample.seconds() + limits.dispatch_seconds(0, held + 1, made),
        }

    def facts(self) -> Mapping[str, str]:
        """Bytes of state beyond the data."""
        state = self._subject.state
        total, data = (
            sum(leaf.nbytes for leaf in jax.tree.leaves(tree)) for tree in (state, state.data)
        )
        beyond = (total - data) / self._arrivals.capacity
        return {"state beyond the data, bytes per item": f"{beyond:.2f}"}


class TorchgfnContestant:
    """torchgfn on scored states, in its own process."""

    def __init__(self, arrivals: Arrivals, cutoff: float | None):
        """Fills a buffer to capacity.

        Args:
            arrivals: The rows.
            cutoff: Distance up to which rows are too close; None for no such filter.
        """
        self._arrivals, self._cutoff = arrivals, cutoff
        self._process = PeerProcess(environment("torch"), "benchmarks.peers.torchgfn_worker")
        self._build(arrivals)

    def _build(self, arrivals: Arrivals) -> None:
        self._process.call("build", cutoff=self._cutoff, **dataclasses.asdict(arrivals))

    def verify(self) -> None:
        """Checks the rows held and drawn against NumPy."""
        small = dataclasses.replace(
            self._arrivals, capacity=min(self._arrivals.capacity, CHECKED_CAPACITY)
        )
        self._build(small)
        check_rows(TorchgfnSubject(self._process), small, self._cutoff, 2 * NUM_BATCHES)
        self._build(self._arrivals)
        if self._cutoff is None:
            check_samples(TorchgfnSubject(self._process))

    def operations(self) -> Mapping[str, Operation]:
        """Returns the operations of torchgfn, called from Python."""
        call = self._process.call
        return {
            "python add": Operation(lambda calls: call("time_add", calls=calls)),
            "python add, refused": Operation(
                lambda calls: call("time_add", calls=calls, worst=True)
            ),
            "python sample": Operation(
                lambda calls: call("time_sample", size=SAMPLE_SIZE, calls=calls)
            ),
        }

    def facts(self) -> Mapping[str, str]:
        """Versions, which are not those of this environment."""
        return {"versions": self._process.call("versions")}


class TorchgfnSubject:
    """torchgfn's process behind the interface of the checks."""

    def __init__(self, process: PeerProcess):
        """Around a process with a buffer."""
        self._process = process

    def add(self, count: int) -> None:
        """See `Subject`."""
        self._process.call("add", count=count)

    def contents(self) -> tuple[np.ndarray, np.ndarray]:
        """See `Subject`."""
        return self._read("contents")

    def sample(self) -> tuple[np.ndarray, np.ndarray]:
        """See `Subject`."""
        return self._read("sample", size=SAMPLE_SIZE)

    def _read(self, what: str, **given: Any) -> tuple[np.ndarray, np.ndarray]:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "rows.npz"
            self._process.call(what, path=str(path), **given)
            with np.load(path) as rows:
                return rows["states"], rows["scores"]

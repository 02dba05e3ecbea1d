"""GFlowNets on several ranks: ``mpiexec -n 4 python -m jaxbuf.examples.gflownet_mpi``.

All ranks but the last are workers, each with its own policy and buffer. The last rank is the
manager. After every few updates a worker sends it terminal states, and is told how many modes are
new.
"""

import contextlib
import dataclasses
import functools
import importlib
import io
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast, get_args

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray
from matplotlib.figure import Figure
from numpy.typing import NDArray
from tqdm import tqdm

import jaxbuf
from jaxbuf.examples import _run
from jaxbuf.examples._gflownet import NEVER, Agent, Buffer, Options, TrainState
from jaxbuf.examples._hypergrid import HyperGrid

if TYPE_CHECKING:
    from mpi4py import MPI

    from jaxbuf.mpi import Batch, Communicators, Manager

DESCRIPTION = """Train GFlowNets on a hypergrid, on several ranks that share what they find.

All ranks but the last train, each its own GFlowNet. The last one is the manager of the buffer that
they fill, and tells them how many modes of the grid are new. Compares
  alone      one rank trains on as many trajectories as all workers, and shares nothing
  sync       a worker waits for the answer to what it sends
  deferred   it waits until its batch is sent, and reads the answer before it sends again
  pipelined  it does not wait

Start it on 2 ranks or more, and see the modes that were found against time:
  mpiexec -n 4 python -m jaxbuf.examples.gflownet_mpi

Takes a minute or two for four ranks on two CPU cores. Some things to try:
  --run sync pipelined --every 1       only some runs, with a message after each update
  --dims 4 --steps 500                 a smaller grid

Ends with a table, and a table of the manager's messages.
Writes, in runs/gflownet_mpi or where --out says:
  modes.png  modes found over time, of every run"""
EXAMPLE = "gflownet_mpi"
PROGRAM = f"python -m jaxbuf.examples.{EXAMPLE}"
Mode = Literal["alone", "sync", "deferred", "pipelined"]
# Environment variables in which launchers say which rank this is.
RANKS = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")


@dataclasses.dataclass(frozen=True)
class Config(Options):
    """Options of the training, and of the exchange between workers and their manager."""

    dims: int = 6  # dimensions of the grid
    steps: int = 3_000  # updates of each worker
    buffer: Buffer = "diverse"  # of each worker
    run: tuple[Mode, ...] = get_args(Mode)  # runs to compare
    every: int = 10  # updates between two messages
    shared: int = 1000  # terminal states in the manager's buffer
    borrow: int = 16  # of these in each answer, for the worker to replay
    out: Path = Path("runs", EXAMPLE)  # the folder to write to

    def __post_init__(self) -> None:
        super().__post_init__()
        _run.check(self, 1, "every", "shared")
        _run.check(self, 0, "borrow")

    @property
    def always_fresh(self) -> bool:
        """True if no trajectories are replayed."""
        return self.buffer == "none"

    @property
    def messages(self) -> int:
        """The number of messages of each worker."""
        return -(-self.steps // self.every)

    @property
    def borrowed(self) -> int:
        """The number of terminal states in an answer; 0 for workers that replay nothing."""
        return 0 if self.buffer == "none" else self.borrow

    @property
    def rows(self) -> int:
        """The number of terminal states in a message."""
        return self.every * Agent(self, self.buffer).fresh


@dataclasses.dataclass(frozen=True)
class Discoveries:
    """A score for managers: the number of modes that a batch adds to the ones found so far.

    It comes with a sample of the buffer, so that workers learn from what others have found.

    Args:
        grid: The grid that has the modes.
        count: The number of states in the sample.
    """

    grid: HyperGrid
    count: int

    def init(self, num_workers: int) -> tuple[Float[Array, " M"], PRNGKeyArray]:
        """Returns the seconds until each mode was first reached, inf at first, and a key."""
        del num_workers
        return jnp.full((self.grid.num_modes,), jnp.inf, jnp.float32), jax.random.key(0)

    def update(
        self,
        state: tuple[Float[Array, " M"], PRNGKeyArray],
        buffer: jaxbuf.ItemBuffer,
        batch: "Batch",
        mask: Bool[Array, " B"],
        sender: Int[Array, ""],
    ) -> tuple[tuple[Float[Array, " M"], PRNGKeyArray], dict[str, Array]]:
        """Returns the state after a batch; and ``new_modes``, ``modes`` so far, and ``states``."""
        del sender
        found, key = state
        key, sample_key = jax.random.split(key)
        items = cast("dict[str, Array]", batch.items)
        mode = jnp.where(mask, self.grid.mode(items["state"]), self.grid.num_modes)
        after = found.at[mode].min(items["seconds"], mode="drop")
        before, modes = (jnp.sum(jnp.isfinite(x), dtype=jnp.int32) for x in (found, after))
        scores = {"new_modes": modes - before, "modes": modes}
        if self.count:
            sample = buffer.sample(sample_key, self.count)
            scores |= {"states": sample.data["state"], "valid": sample.valid}
        return (after, key), scores


class Outcome(NamedTuple):
    """The result of one run.

    Attributes:
        found: Seconds until each mode was first reached, or inf, ``[M]``.
        trajectories: Number of fresh trajectories of all workers.
        seconds: Duration of the run.
        exchanging: The share of this time in which workers communicated with the manager or
            waited for it; NaN without one.
        traffic: A table of the messages that the manager handled; empty without one.
        faults: Descriptions of the faults on the way.
    """

    found: NDArray[Any]
    trajectories: int
    seconds: float
    exchanging: float
    traffic: str
    faults: tuple[str, ...]


def main(argv: Sequence[str] | None = None) -> int:
    """Run this example from the command line and return its exit status. All ranks call this."""
    # Only one rank prints what is wrong with the arguments.
    quiet = any(os.environ.get(name, "0") != "0" for name in RANKS)
    out, err = (io.StringIO(), io.StringIO()) if quiet else (sys.stdout, sys.stderr)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        config = tyro.cli(Config, args=argv, prog=PROGRAM, description=DESCRIPTION)
    try:
        importlib.import_module("jaxbuf.mpi")
    except ImportError as error:
        _run.fail(f"{error}; in a clone, `make demo-mpi` installs all that it needs")
    # This import starts MPI.
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    if world.Get_size() < 2:
        _run.fail(f"one rank alone has no manager; start several with `mpiexec -n 4 {PROGRAM}`")
    try:
        if not world.bcast(_begin(config) if world.Get_rank() == 0 else None):
            return 2
        outcomes = _train(config, world)
        if world.Get_rank() == 0:
            _tell(outcomes, config)
    except KeyboardInterrupt:
        print("\ninterrupted; nothing was kept", file=sys.stderr, flush=True)
        world.Abort(130)
    except Exception:
        # The others would wait for this rank forever.
        traceback.print_exc()
        sys.stderr.flush()
        world.Abort(1)
    return 0


def _begin(config: Config) -> bool:
    """Prepares the folder, or prints what is wrong with it."""
    try:
        _run.begin(config.out, EXAMPLE, {})
    except SystemExit:
        return False
    return True


def make_manager(config: Config, num_workers: int) -> "Manager":
    """Returns a manager of the distinct terminal states of highest reward."""
    from jaxbuf.mpi import Manager

    item = {"state": jnp.zeros(config.dims, jnp.int32), "seconds": jnp.float32(0)}
    buffer = jaxbuf.diverse_reward_prioritized(item, config.shared, field="state")
    return Manager.create(buffer, num_workers, scores=Discoveries(config.grid, config.borrowed))


def _train(config: Config, world: "MPI.Intracomm") -> dict[str, Outcome]:
    """Trains one run after the other; returns the outcomes on the first rank."""
    from jaxbuf.mpi import Layout, make_communicators

    workers, rank = world.Get_size() - 1, world.Get_rank()
    communicators = make_communicators(Layout(world.Get_size()), world)
    # Alone, the first rank trains as much as all workers together.
    messages = {run: config.messages * (workers if run == "alone" else 1) for run in config.run}
    outcomes: dict[str, Outcome] = {}
    with contextlib.ExitStack() as stack:
        progress = None
        if rank == 0:
            total = sum(messages.values()) * config.every
            progress = stack.enter_context(
                tqdm(desc="compiling", total=total, unit=" updates", dynamic_ncols=True)
            )
        learner = None
        if communicators.training is not None:
            learner = _Learner(config, rank)
            # The first exchange includes compilation, so it is not reported.
            _meet(world)
            learner.exchange(communicators, "sync", 1, None)
        else:
            _meet(world)
            _manage(config, communicators)
        for run in config.run:
            _meet(world)
            if learner is None:
                told = {} if run == "alone" else _manage(config, communicators)
            elif run == "alone":
                told = {} if rank else learner.alone(messages[run], progress)
            else:
                told = learner.exchange(communicators, run, messages[run], progress)
            _meet(world)
            of_ranks: list[dict[str, Any]] | None = world.gather(told)
            if of_ranks is not None:
                outcomes[run] = _outcome(of_ranks)
    return outcomes


def _meet(world: "MPI.Intracomm") -> None:
    """Waits for all ranks without keeping a core busy that one of them could use."""
    here = world.Ibarrier()
    while not here.Test():
        time.sleep(1e-3)


def _manage(config: Config, communicators: "Communicators") -> dict[str, Any]:
    """Serves the workers of one run; returns a report of it."""
    from jaxbuf.mpi import serve

    assert communicators.group is not None
    manager = make_manager(config, communicators.group.Get_size() - 1)
    served = serve(communicators, manager, rows=config.rows, report=None)
    return {
        "found": np.asarray(served.manager.score_state[0]),
        "traffic": served.traffic.table(),
        "faults": served.faults,
    }


class _Learner:
    """The training of a worker, compiled once for all runs.

    Args:
        config: All settings.
        rank: The rank of this worker, which has its own seed.
    """

    def __init__(self, config: Config, rank: int) -> None:
        self._config = config
        self._agent = Agent(config, config.buffer)
        self._key = jax.random.key(config.seed + rank)
        self._init = jax.jit(self._agent.init)
        train = jax.jit(self._updates, donate_argnums=0, compiler_options=jaxbuf.compiler_options())
        # The states to borrow before the first answer.
        self._nothing = {
            "states": np.zeros((config.borrowed, config.dims), np.int32),
            "valid": np.zeros(config.borrowed, np.bool_),
        }
        self._train = train.lower(self._init(self._key), self._nothing).compile()

    def alone(self, messages: int, progress: Any) -> dict[str, Any]:
        """Trains without a manager; returns a report of it."""
        found = np.full(self._config.grid.num_modes, np.inf)

        def note(state: TrainState, items: dict[str, Any], log_reward: Array) -> dict[str, Any]:
            del log_reward
            known = np.asarray(state.found) < NEVER
            found[known & np.isinf(found)] = items["seconds"][0]
            return {"modes": known.sum()}

        return {**self._loop("alone", messages, note, progress), "found": found}

    def exchange(
        self,
        communicators: "Communicators",
        mode: str,
        messages: int,
        progress: Any,
    ) -> dict[str, Any]:
        """Trains as a worker; returns a report of it."""
        from jaxbuf.mpi import Worker

        config = self._config
        make = functools.partial(make_manager, config)
        with Worker(communicators, make, rows=config.rows, mode=cast("Any", mode)) as worker:

            def send(state: TrainState, items: dict[str, Any], log_reward: Array) -> dict[str, Any]:
                del state
                answer = worker.add(items, score=log_reward)
                return {} if answer is None else answer.scores

            return self._loop(mode, messages, send, progress)

    def _loop(
        self,
        name: str,
        messages: int,
        share: Callable[[TrainState, dict[str, Any], Array], dict[str, Any]],
        progress: Any,
    ) -> dict[str, Any]:
        """Trains from the beginning, and shares terminal states after every few updates."""
        state, exchanging, modes = self._init(self._key), 0.0, 0
        borrowed = self._nothing
        began = time.perf_counter()
        for _ in range(messages):
            state, last, log_reward = self._train(state, borrowed)
            last.block_until_ready()
            trained = time.perf_counter()
            seconds = np.full(self._config.rows, trained - began, np.float32)
            scores = share(state, {"state": last, "seconds": seconds}, log_reward)
            exchanging += time.perf_counter() - trained
            borrowed = {key: scores.get(key, self._nothing[key]) for key in self._nothing}
            if progress is not None:
                progress.update(self._config.every)
                if scores.get("modes", modes) != modes:
                    modes = scores["modes"]
                    progress.set_description(
                        f"{name}, {modes} of {self._config.grid.num_modes} modes"
                    )
        return {
            "seconds": time.perf_counter() - began,
            "exchanging": exchanging,
            "trajectories": int(state.fresh),
        }

    def _updates(
        self, state: TrainState, borrowed: dict[str, Array]
    ) -> tuple[TrainState, Int[Array, "R D"], Float[Array, " R"]]:
        """Updates a few times; also returns fresh terminal states and their log rewards."""
        if state.buffer is not None and self._config.borrowed:
            states = borrowed["states"]
            score = None if self._config.buffer == "fifo" else self._config.grid.log_reward(states)
            buffer = state.buffer.add(states, score=score, mask=borrowed["valid"])
            state = state.replace(buffer=buffer)

        def update(state: TrainState, _: None) -> tuple[TrainState, Int[Array, "F D"]]:
            return self._agent.update(state)

        state, last = jax.lax.scan(update, state, length=self._config.every)
        last = last.reshape(-1, self._config.dims)
        return state, last, self._config.grid.log_reward(last)


def _outcome(of_ranks: list[dict[str, Any]]) -> Outcome:
    """Returns the result of a run from the reports of its ranks."""
    workers = [told for told in of_ranks if "trajectories" in told]
    seconds = [told["seconds"] for told in workers]
    manager = of_ranks[-1]
    exchanging = sum(told["exchanging"] for told in workers) / sum(seconds) if manager else np.nan
    return Outcome(
        found=(manager or workers[0])["found"],
        trajectories=sum(told["trajectories"] for told in workers),
        seconds=max(seconds),
        exchanging=exchanging,
        traffic=manager.get("traffic", ""),
        faults=manager.get("faults", ()),
    )


def _tell(outcomes: dict[str, Outcome], config: Config) -> None:
    """Prints the tables, and draws the figure."""
    grid = config.grid
    header = [
        "run",
        f"modes of {grid.num_modes}",
        "time to all modes",
        "trajectories",
        "trajectories/s",
        "exchanging",
        "time",
    ]
    rows = [
        [
            run,
            str(np.isfinite(outcome.found).sum()),
            _seconds(outcome.found.max()),
            f"{outcome.trajectories:,}",
            f"{outcome.trajectories / outcome.seconds:,.0f}",
            "" if np.isnan(outcome.exchanging) else f"{outcome.exchanging:.1%}",
            _seconds(outcome.seconds),
        ]
        for run, outcome in outcomes.items()
    ]
    print(_run.table(header, rows))
    for run, outcome in outcomes.items():
        if outcome.traffic:
            print(f"\nmanager, {run}\n{outcome.traffic}")
        for fault in outcome.faults:
            print(fault)
    picture = config.out / "modes.png"
    _plot(picture, outcomes, config)
    print(f"\nmodes  {picture}")


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if np.isfinite(value) else "never"


def _plot(path: Path, outcomes: dict[str, Outcome], config: Config) -> None:
    """Draws the modes that were found in each run over time."""
    figure = Figure(figsize=(7.0, 4.2), layout="constrained")
    axes: Any = figure.add_subplot()
    for run, outcome in outcomes.items():
        rising = np.sort(outcome.found[np.isfinite(outcome.found)])
        axes.step(
            [0.0, *rising, outcome.seconds],
            [0, *range(1, len(rising) + 1), len(rising)],
            where="post",
            label=run,
        )
    axes.set(
        title=f"hypergrid, {config.dims} × {config.height}",
        xlabel="seconds",
        ylabel=f"modes found, of {config.grid.num_modes}",
    )
    axes.grid(alpha=0.3)
    axes.legend(loc="best")
    axes.margins(x=0.01)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    sys.exit(main())

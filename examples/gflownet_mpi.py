"""Train GFlowNets on a hypergrid, on several ranks that share what they find.

All ranks but the last train, each its own GFlowNet. The last one is the manager of the buffer that
they fill, and tells them how many modes of the grid are new. Compares
  alone      one rank trains on as many trajectories as all workers, and shares nothing
  sync       a worker waits for the answer to what it sends
  deferred   it waits until its batch is sent, and reads the answer before it sends again
  pipelined  it does not wait

Start it on 2 ranks or more, and see the modes that were found against time:
  mpiexec -n 4 python examples/gflownet_mpi.py

Takes a minute or two for four ranks on two CPU cores. Some things to try:
  --run sync pipelined --every 1       only some runs, with a message after each update
  --dims 4 --steps 500                 a smaller grid

Ends with a table, and a table of the manager's messages.
Writes, in runs/gflownet_mpi or where --out says:
  modes.png  modes found over time, of every run
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
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jaxtyping import Array, Float, PyTree

import common
import jaxbuf
from gflownet import NEVER, Agent, Buffer, HyperGrid, Options, TrainState

Mode = Literal["alone", "sync", "deferred", "pipelined"]
# Environment variables in which launchers of MPI say which rank this is.
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
    out: Path = Path("runs/gflownet_mpi")  # the folder to write to

    def __post_init__(self) -> None:
        super().__post_init__()
        common.check(self, 1, "every", "shared")
        common.check(self, 0, "borrow")

    @property
    def always_fresh(self) -> bool:
        """True if no trajectories are replayed."""
        return self.buffer == "none"

    @property
    def borrowed(self) -> int:
        """The number of terminal states in an answer; 0 for workers that replay nothing."""
        return 0 if self.always_fresh else self.borrow

    @property
    def rows(self) -> int:
        """The number of terminal states in a message."""
        return self.every * Agent(self, self.buffer).fresh


@dataclasses.dataclass(frozen=True)
class Discoveries:
    """A score for managers: the number of modes that a batch adds to the ones found so far.

    It comes with a sample of the buffer, so that workers learn from what others have found.
    """

    grid: HyperGrid  # the grid that has the modes
    count: int  # states in the sample

    def init(self, num_workers: int) -> PyTree:
        """Returns the seconds until each mode was first reached, inf at first, and a key."""
        return jnp.full((self.grid.num_modes,), jnp.inf, jnp.float32), jax.random.key(0)

    def update(
        self, state: PyTree, buffer: jaxbuf.ItemBuffer, batch: PyTree, mask: Array, sender: Any
    ) -> tuple[PyTree, dict[str, Array]]:
        """Returns the state after a batch; and ``new_modes``, ``modes`` so far, and ``states``."""
        found, key = state
        key, sample_key = jax.random.split(key)
        mode = jnp.where(mask, self.grid.mode(batch.items["state"]), self.grid.num_modes)
        new_found = found.at[mode].min(batch.items["seconds"], mode="drop")
        old_modes, modes = (jnp.sum(jnp.isfinite(x), dtype=jnp.int32) for x in (found, new_found))
        scores = {"new_modes": modes - old_modes, "modes": modes}
        if self.count:
            sample = buffer.sample(sample_key, self.count)
            scores |= {"states": sample.data["state"], "valid": sample.valid}
        return (new_found, key), scores


def make_manager(config: Config, num_workers: int) -> Any:
    """Returns a manager of the terminal states of highest reward, new ones once it is full."""
    from jaxbuf.mpi import Manager  # here, so that --help needs no MPI

    item = {"state": jnp.zeros(config.dims, jnp.int32), "seconds": jnp.float32(0)}
    buffer = jaxbuf.diverse_reward_prioritized(item, config.shared, field="state")
    return Manager.create(buffer, num_workers, scores=Discoveries(config.grid, config.borrowed))


def manage(config: Config, communicators: Any, num_workers: int) -> dict[str, Any]:
    """Serves the workers of one run; returns a report of it."""
    from jaxbuf.mpi import serve

    manager = make_manager(config, num_workers)
    served = serve(communicators, manager, rows=config.rows, report=None)
    found = np.asarray(served.manager.score_state[0])
    return {"found": found, "traffic": served.traffic.table(), "faults": served.faults}


class Learner:
    """The training of a worker, compiled once for all runs."""

    def __init__(self, config: Config, communicators: Any, rank: int) -> None:
        self.config, self.communicators = config, communicators
        self.agent = Agent(config, config.buffer)
        self.key = jax.random.key(config.seed + rank)
        self.init = jax.jit(self.agent.init)
        # The states to borrow before the first answer.
        states = np.zeros((config.borrowed, config.dims), np.int32)
        self.no_states = {"states": states, "valid": np.zeros(config.borrowed, np.bool_)}
        train = jax.jit(self.updates, donate_argnums=0, compiler_options=jaxbuf.compiler_options())
        self.train = train.lower(self.init(self.key), self.no_states).compile()

    def updates(self, state: TrainState, borrowed: PyTree) -> tuple[TrainState, Array, Array]:
        """Updates a few times; also returns fresh terminal states and their log rewards."""
        if self.config.borrowed:
            buffer = self.agent.add(state.buffer, borrowed["states"], borrowed["valid"])
            state = state.replace(buffer=buffer)
        state, last = jax.lax.scan(self.agent.update, state, length=self.config.every)
        last = last.reshape(-1, self.config.dims)
        return state, last, self.config.grid.log_reward(last)

    def run(self, mode: Mode, messages: int, progress: common.Progress | None) -> dict[str, Any]:
        """Trains from the beginning, sharing states after every few updates; returns a report."""
        from jaxbuf.mpi import Worker

        config, rows, num_modes = self.config, self.config.rows, self.config.grid.num_modes
        state, borrowed, exchanging, modes = self.init(self.key), self.no_states, 0.0, 0
        found, make = np.full(num_modes, np.inf), functools.partial(make_manager, config)
        worker = None if mode == "alone" else Worker(self.communicators, make, rows=rows, mode=mode)
        with worker or contextlib.nullcontext():
            began = time.perf_counter()
            for _ in range(messages):
                state, last, log_reward = self.train(state, borrowed)
                last.block_until_ready()
                trained = time.perf_counter()
                if worker is None:
                    reached = np.asarray(state.found) < NEVER
                    found[reached & np.isinf(found)] = trained - began
                    scores: dict[str, Any] = {"modes": reached.sum()}
                else:
                    seconds = np.full(rows, trained - began, np.float32)
                    answer = worker.add({"state": last, "seconds": seconds}, score=log_reward)
                    scores = {} if answer is None else answer.scores
                exchanging += time.perf_counter() - trained
                borrowed = {name: scores.get(name, self.no_states[name]) for name in self.no_states}
                modes = scores.get("modes", modes)
                if progress is not None:
                    progress.advance(config.every, f"{mode}, {modes} of {num_modes} modes")
            seconds = time.perf_counter() - began
        report = {"seconds": seconds, "exchanging": exchanging, "found": found}
        return report | {"trajectories": int(state.fresh)}


def wait_for_all(world: Any) -> None:
    """Waits for all ranks without keeping a core busy that one of them could use."""
    barrier = world.Ibarrier()
    while not barrier.Test():
        time.sleep(1e-3)


def train(config: Config, world: Any) -> None:
    """Trains one run after the other, and prints the results on the first rank."""
    from jaxbuf.mpi import Layout, make_communicators

    workers, rank = world.Get_size() - 1, world.Get_rank()
    communicators = make_communicators(Layout(world.Get_size()), world)
    # Alone, the first rank trains as much as all workers together.
    count = -(-config.steps // config.every)
    messages = {run: count * (workers if run == "alone" else 1) for run in config.run}
    if rank == 0:
        print("compiling", file=sys.stderr, flush=True)
    learner = Learner(config, communicators, rank) if rank < workers else None

    def train_once(run: Mode, messages: int, progress: common.Progress | None) -> dict[str, Any]:
        wait_for_all(world)
        if run == "alone" and rank > 0:
            return {}
        if learner is None:
            return manage(config, communicators, workers)
        return learner.run(run, messages, progress)

    # It includes compilation, so it is not reported.
    train_once("sync", 1, None)
    reports, total = {}, sum(messages.values()) * config.every
    shown = common.Progress(total, "updates") if rank == 0 else contextlib.nullcontext()
    with shown as progress:
        for run in config.run:
            report = train_once(run, messages[run], progress)
            wait_for_all(world)
            reports[run] = world.gather(report)
    if rank == 0:
        print_report(config, reports)


def print_report(config: Config, reports: dict[str, list[dict[str, Any]]]) -> None:
    """Prints the tables, and draws the figure, from the reports of all ranks of each run."""
    num_modes, rows = config.grid.num_modes, list[list[str]]()
    found, ends = dict[str, Float[np.ndarray, " M"]](), dict[str, float]()
    for run, (*others, manager) in reports.items():
        workers = [report for report in others if report]
        names = ("seconds", "exchanging", "trajectories")
        seconds, exchanging, count = (sum(report[name] for report in workers) for name in names)
        found[run] = (manager or workers[0])["found"]
        last = found[run].max()
        ends[run] = end = max(report["seconds"] for report in workers)
        share = f"{exchanging / seconds:.1%}" if manager else ""
        modes = [f"{np.isfinite(found[run]).sum()}", "never" if np.isinf(last) else f"{last:.2f} s"]
        rows.append([run, *modes, f"{count:,}", f"{count / end:,.0f}", share, f"{end:.2f} s"])
    header = ["run", f"modes of {num_modes}", "time to all modes", "trajectories"]
    print(common.table([*header, "trajectories/s", "exchanging", "time"], rows))
    for run, (*_, manager) in reports.items():
        if manager:
            print(f"\nmanager, {run}", manager["traffic"], *manager["faults"], sep="\n")
    times = np.linspace(0.0, max(ends.values()), 1001)
    curves = {run: np.sum(x <= times[:, None], axis=1) for run, x in found.items()}
    curves = {run: np.where(times <= ends[run], y, np.nan)[:, None] for run, y in curves.items()}
    title, ylabel = f"hypergrid, {config.dims} × {config.height}", f"modes found, of {num_modes}"
    path = config.out / "modes.png"
    common.plot(path, times, curves, title, "seconds", ylabel)
    print(f"\nmodes  {path}")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs this example from the command line and returns its exit status. All ranks call this.

    If one rank fails, all end. Only one rank prints what is wrong with the command line.
    """
    program = "python examples/gflownet_mpi.py"
    quiet = any(os.environ.get(name, "0") != "0" for name in RANKS)
    out, err = (io.StringIO(), io.StringIO()) if quiet else (sys.stdout, sys.stderr)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        config = tyro.cli(Config, args=argv, prog=program, description=__doc__)
    try:
        importlib.import_module("jaxbuf.mpi")
    except ImportError as error:
        common.fail(f"{error}; in a clone, `make demo-mpi` installs all that it needs")
    # This import starts MPI.
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    if world.Get_size() < 2:
        common.fail(f"one rank alone has no manager; start several with `mpiexec -n 4 {program}`")
    try:
        ready = False
        if world.Get_rank() == 0:
            with contextlib.suppress(SystemExit):
                common.make_folder(config.out, "gflownet_mpi", {})
                ready = True
        if not world.bcast(ready):
            return 2
        train(config, world)
    except KeyboardInterrupt:
        print("\ninterrupted; nothing was kept", file=sys.stderr, flush=True)
        world.Abort(130)
    except Exception:
        # The others would wait for this rank forever.
        traceback.print_exc()
        sys.stderr.flush()
        world.Abort(1)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Helpers of all examples: command line, folder of a run, training in chunks, table and plot."""

import contextlib
import csv
import dataclasses
import functools
import importlib
import io
import json
import math
import os
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, NamedTuple, NoReturn, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree
from matplotlib.colors import TABLEAU_COLORS
from matplotlib.figure import Figure
from numpy.typing import NDArray
from tqdm import tqdm

import jaxbuf
from jaxbuf.interop import gymnax_reset

Config = TypeVar("Config")
State = TypeVar("State")

# The end of each description: files that every run writes.
FILES = """  tensorboard/        the same for TensorBoard, with --tensorboard
  checkpoint/         the whole training state, ten times in a run
  run.json            the options"""

# Environment variables in which launchers of MPI say which rank this is.
RANKS = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")


@dataclasses.dataclass(frozen=True)
class Run(Generic[Config]):
    """One run of an example, as the command line describes it.

    Attributes:
        config: Options of the training.
        out: The folder to write to.
        resume: Whether to go on from the checkpoint in --out, with its options.
        tensorboard: Whether to log for TensorBoard as well.
    """

    config: tyro.conf.OmitArgPrefixes[Config]
    out: Path
    resume: bool = False
    tensorboard: bool = False

    def __post_init__(self) -> None:
        _ = self.began

    @functools.cached_property
    def began(self) -> float:
        """When the run began, in seconds; no field, since those are options."""
        return time.perf_counter()

    def train(
        self,
        state: State,
        chunk: Callable[[State], tuple[State, dict[str, Any], str]],
        *,
        done: int,
        until: int,
        size: int,
        unit: str = "steps",
        rows: int = 1,
    ) -> tuple[State, list[float]]:
        """Trains chunk by chunk; shows and logs the progress, and saves checkpoints.

        Args:
            state: The state to begin with.
            chunk: Takes a state; returns the next state, metrics to log, and a text to show.
            done: Number of steps done before.
            until: Number of steps at which to end.
            size: Number of steps in a chunk.
            unit: The name of a step.
            rows: The number of steps that one step of each seed counts as.

        Returns:
            The state at the end, and the duration of each chunk in seconds.
        """
        chunks = max(0, math.ceil((until - done) / size))
        seconds: list[float] = []
        writers: list[jaxbuf.Writer] = [jaxbuf.CsvWriter(self.out / "log.csv")]
        if self.tensorboard or (self.out / "tensorboard").is_dir():
            writers.append(jaxbuf.TensorBoardWriter(self.out / "tensorboard"))
        total, resume_at = (done + chunks * size) * rows, done if self.resume else None
        shows: Any = {"unit": f" {unit}", "unit_scale": True, "dynamic_ncols": True}
        with (
            jaxbuf.Monitor(writers, resume_at=resume_at) as monitor,
            tqdm(total=total, initial=done * rows, **shows) as bar,
        ):
            for i in range(chunks):
                began = time.perf_counter()
                state, metrics, shown = chunk(state)
                done += size
                monitor.write(done, metrics)
                seconds.append(time.perf_counter() - began)
                bar.set_postfix_str(shown, refresh=False)
                bar.update(size * rows)
                if (i + 1) % max(chunks // 10, 1) == 0 or i + 1 == chunks:
                    # In this order, since steps after a checkpoint are logged again.
                    monitor.flush()
                    jaxbuf.save(self.out / "checkpoint", state)
        return state, seconds

    @property
    def keys(self) -> Any:
        """A key for each seed of the options, ``[seeds]``."""
        config: Any = self.config
        return jnp.stack([jax.random.key(config.seed + i) for i in range(config.seeds)])

    def begin(self, init: Callable[..., State], *args: Any) -> State:
        """Returns ``init(*args)``, or the state in the checkpoint if the run is resumed."""
        return self.load(jax.eval_shape(init, *args)) if self.resume else init(*args)

    def load(self, like: State) -> State:
        """Returns the training state in the checkpoint; ``like`` has its structure and shapes."""
        try:
            return jaxbuf.load(self.out / "checkpoint", like)
        except FileNotFoundError:
            fail(f"there is no checkpoint in {self.out}; start without --resume")

    def logged(self, name: str) -> NDArray[np.float64]:
        """Returns all values logged under a name: numbers ``[P]``, or arrays ``[P, S]``."""
        with (self.out / "log.csv").open() as file:
            header, *rows = csv.reader(file)
        table = np.asarray(rows, np.float64)
        if name in header:
            return table[:, header.index(name)]
        return table[:, [i for i, column in enumerate(header) if column.startswith(f"{name}/")]]

    def report(self, name: str, greedy: NDArray[Any], seconds: Sequence[float], size: int) -> None:
        """Draws the learning curve, and prints a table with a row for each seed.

        Both take the returns while training from the log, where they are called ``return``.

        Args:
            name: The name of the agent.
            greedy: The returns of greedy episodes in the end, ``[seeds, episodes]``.
            seconds: The duration of each chunk.
            size: The number of steps of each seed in a chunk.
        """
        config: Any = self.config
        steps, seeds = self.logged("step"), len(greedy)
        returns = self.logged("return").reshape(len(steps), seeds)
        plot(
            self.out / "learning_curve.png",
            steps,
            {"": returns},
            title=f"{name} with {config.sampler} replay on {config.env}",
            xlabel="environment steps" + (" per seed" if seeds > 1 else ""),
            ylabel="return while training",
        )
        last = np.ma.masked_invalid(returns[-math.ceil(len(returns) / 10) :])
        columns = np.stack([greedy.mean(axis=1), last.mean(axis=0).filled(np.nan)], axis=1)
        step = int(steps[-1])
        rows = [
            [f"{config.seed + i}", *(f"{number:.1f}" for number in columns[i]), f"{step:,}", "", ""]
            for i in range(seeds)
        ]
        # The first chunk is mostly compilation.
        measured = seconds[1:] or seconds
        speed = f"{len(measured) * size * seeds / sum(measured):,.0f}" if measured else "-"
        means = [f"{number:.1f}" for number in columns.mean(axis=0)]
        total = [f"{step * seeds:,}", speed, f"{time.perf_counter() - self.began:.1f} s"]
        header = ["seed", "greedy return", "return in training", "steps", "steps/s", "time"]
        print(table(header, [*rows, ["all", *means, *total]]))
        print(f"learning curve, log and checkpoint are in {self.out}")


@dataclasses.dataclass(frozen=True)
class _Where:
    """The options on which the defaults of the others depend."""

    out: Path
    resume: bool = False


def main(
    example: str,
    train: Callable[[Run[Config]], None],
    default: Config,
    description: str,
    argv: Sequence[str] | None = None,
    *,
    may_grow: str = "steps",
) -> int:
    """Runs an example from the command line.

    Args:
        example: The name of its module, and of its folder in ``runs/``.
        train: The function that trains and reports.
        default: A dataclass of options with their defaults.
        description: For ``--help``.
        argv: The words after the program's name; None takes those of this process.
        may_grow: The option that may be larger than before when a run is resumed.

    Returns:
        The exit status: 0, or 130 after an interruption.

    Raises:
        SystemExit: With status 2 and a message on stderr, when an argument is wrong.
    """
    where, _ = tyro.cli(
        _Where,
        default=_Where(Path("runs", example)),
        args=argv,
        add_help=False,
        return_unknown_args=True,
    )
    saved = _saved_options(where.out, example) if where.resume else {}
    if where.resume and not saved:
        fail(f"there is no run in {where.out}; start without --resume")
    kind: Any = type(default)
    suited: Any = dataclasses.replace(cast("Any", default), **saved)
    run: Run[Any] = tyro.cli(
        Run[kind],
        default=Run(suited, where.out),
        args=argv,
        prog=f"python -m jaxbuf.examples.{example}",
        description=description,
    )
    options = dataclasses.asdict(run.config)
    for name, before in saved.items():
        if options[name] != before and not (name == may_grow and options[name] > before):
            fail(
                f"the run in {run.out} has --{name.replace('_', '-')} {before}, not "
                f"{options[name]}; only --{may_grow} may grow. Choose another --out"
            )
    begin(run.out, example, options, resume=run.resume)
    try:
        train(run)
    except KeyboardInterrupt:
        print("\ninterrupted; go on from the last checkpoint with --resume", file=sys.stderr)
        return 130
    return 0


def main_on_ranks(
    example: str,
    train: Callable[[Config, Any], None],
    default: Config,
    description: str,
    argv: Sequence[str] | None = None,
) -> int:
    """Runs an example on several MPI ranks, each of which calls this.

    Takes the arguments of ``main``, except that ``train`` takes the options, one of which is
    ``out``, and the communicator of all ranks. If one rank fails, all end. Only one rank prints
    what is wrong with the command line.
    """
    program = f"python -m jaxbuf.examples.{example}"
    quiet = any(os.environ.get(name, "0") != "0" for name in RANKS)
    out, err = (io.StringIO(), io.StringIO()) if quiet else (sys.stdout, sys.stderr)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        config: Any = tyro.cli(type(default), args=argv, prog=program, description=description)
    try:
        importlib.import_module("jaxbuf.mpi")
    except ImportError as error:
        fail(f"{error}; in a clone, `make demo-mpi` installs all that it needs")
    # This import starts MPI.
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    if world.Get_size() < 2:
        fail(f"one rank alone has no manager; start several with `mpiexec -n 4 {program}`")
    try:
        ready = False
        if world.Get_rank() == 0:
            with contextlib.suppress(SystemExit):
                begin(config.out, example, {})
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


def meet(world: Any) -> None:
    """Waits for all ranks without keeping a core busy that one of them could use."""
    here = world.Ibarrier()
    while not here.Test():
        time.sleep(1e-3)


def begin(out: Path, example: str, options: dict[str, Any], *, resume: bool = False) -> None:
    """Creates the folder of a run; unless it is resumed, deletes an earlier run of this example.

    Raises:
        SystemExit: If the folder cannot be written, or holds something else.
    """
    _saved_options(out, example)
    try:
        if not resume:
            for name in ("checkpoint", "tensorboard"):
                shutil.rmtree(out / name, ignore_errors=True)
            (out / "log.csv").unlink(missing_ok=True)
        out.mkdir(parents=True, exist_ok=True)
        beside = out / "run.json.new"
        beside.write_text(json.dumps({"example": example, "options": options}))
        beside.replace(out / "run.json")
    except OSError as error:
        fail(f"cannot write to {out} ({error.strerror}); choose another --out")


def _saved_options(out: Path, example: str) -> dict[str, Any]:
    """Returns the options of the run in a folder; an empty dict if there is no run."""
    if out.exists() and not out.is_dir():
        fail(f"{out} is a file; choose another --out")
    if not out.exists() or not any(out.iterdir()):
        return {}
    try:
        saved = json.loads((out / "run.json").read_text())
        ours = saved["example"] == example
    except (OSError, ValueError, KeyError, TypeError):
        saved, ours = {}, False
    if not ours:
        fail(f"{out} holds other files than those of {example}; choose another --out")
    # JSON has no tuples.
    return {k: tuple(v) if isinstance(v, list) else v for k, v in saved["options"].items()}


def fail(message: str) -> NoReturn:
    """Prints what is wrong with the command line, and exits."""
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)


def check(config: Any, low: float, *names: str, high: float = float("inf")) -> None:
    """Checks that options are between ``low`` and ``high``; raises ``ValueError`` if not.

    Example:
        >>> from types import SimpleNamespace
        >>> check(SimpleNamespace(batch_size=0), 1, "batch_size")
        Traceback (most recent call last):
        ValueError: --batch-size is 0; expected at least 1
    """
    for name in names:
        if not low <= (value := getattr(config, name)) <= high:
            most = "" if high == float("inf") else f" and at most {high}"
            raise ValueError(
                f"--{name.replace('_', '-')} is {value}; expected at least {low}{most}"
            )


# Cached, so that an agent that runs again in the same process is not compiled again.
@functools.cache
def programs(agent: Any, length: int) -> tuple[Any, Any, Any]:
    """Returns jitted functions that begin, train and evaluate a run, for all seeds at once.

    Args:
        agent: An agent like that of ``dqn``.
        length: The number of iterations, the last argument of its ``train``.
    """
    chunk = jax.vmap(lambda state: agent.train(state, length))
    return (
        jax.jit(jax.vmap(agent.init)),
        # Donated, so that the buffers are updated in place.
        jax.jit(chunk, donate_argnums=0, compiler_options=jaxbuf.compiler_options()),
        jax.jit(jax.vmap(lambda state, key: greedy_returns(agent, state.params, key))),
    )


def train_seeds(run: Run[Any], agent: Any, length: int, name: str) -> None:
    """Trains an agent on environments of gymnax with all seeds at once, and reports.

    Args:
        run: The run. Its options have ``seeds``, ``seed``, ``num_envs`` and ``steps``.
        agent: An agent like that of ``dqn``.
        length: The number of iterations in a chunk.
        name: The name of the agent in the title of the picture.
    """
    config = run.config
    init, chunk, evaluate = programs(agent, length)
    keys = run.keys
    states = run.begin(init, keys)

    def next_chunk(states: Any) -> tuple[Any, dict[str, Any], str]:
        states, log, metrics = chunk(states)
        episodes = np.asarray(log.episodes)
        returns = np.where(episodes, log.total_return / np.maximum(episodes, 1), np.nan)
        return states, {"return": returns, **metrics}, shown(returns)

    done, size = int(states.step[0]), length * config.num_envs
    count: Any = {"done": done, "until": config.steps, "size": size, "rows": config.seeds}
    states, seconds = run.train(states, next_chunk, **count)
    run.report(name, np.asarray(evaluate(states, keys)), seconds, size)


def report_success(run: Run[Any], agents: Sequence[str], title: str) -> None:
    """Draws the success rates of several agents from the log, and prints those at the end."""
    config = run.config
    episodes, success = run.logged("step"), {name: run.logged(name) for name in agents}
    plot(
        run.out / "success.png",
        episodes,
        success,
        title=title,
        xlabel="episodes per seed",
        ylabel="success rate of greedy episodes",
    )
    final = np.stack([rates[-1] for rates in success.values()])
    rows = [
        [str(config.seed + i), *(f"{rate:.0%}" for rate in final[:, i]), "", ""]
        for i in range(config.seeds)
    ]
    means = [f"{rate:.0%}" for rate in final.mean(axis=1)]
    total = [f"{episodes[-1]:,.0f}", f"{time.perf_counter() - run.began:.1f} s"]
    print(table(["seed", *agents, "episodes", "time"], [*rows, ["all", *means, *total]]))
    print(f"success rates, log and checkpoint are in {run.out}")


@functools.cache
def make_env(name: str) -> tuple[Any, Any]:
    """Returns an environment of gymnax and its parameters."""
    # They hold arrays, which must not belong to the first trace that uses them. No array may be
    # made before the processes of dqn_sharded have found each other.
    with jax.ensure_compile_time_eval():
        import gymnax

        return gymnax.make(name)


def one_of(batch: PyTree) -> PyTree:
    """Returns the shapes and dtypes of one row of a batch, of which to create a buffer."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), batch)


class Episodes(NamedTuple):
    """The number of episodes that ended, and the sum of their returns."""

    episodes: Int[Array, ""]
    total_return: Float[Array, ""]


def count_episodes(
    episode_return: Float[Array, " E"], steps: Mapping[str, Array]
) -> tuple[Float[Array, " E"], Episodes]:
    """Returns the sums of rewards since each episode began, and the episodes that have ended."""
    ended = steps["terminated"] | steps["truncated"]
    total = episode_return + steps["reward"]
    count = jnp.sum(ended, dtype=jnp.int32)
    log = Episodes(count, jnp.sum(jnp.where(ended, total, 0.0)))
    return jnp.where(ended, 0.0, total), log


def greedy_returns(agent: Any, params: Any, key: PRNGKeyArray) -> Float[Array, " episodes"]:
    """Returns the returns of ``eval_episodes`` greedy episodes of an agent like that of ``dqn``."""

    def iteration(carry: Any, key: PRNGKeyArray) -> tuple[Any, None]:
        envs, returns, running = carry
        envs, steps = agent.step(key, envs, agent.act(params, envs.obs, 0.0, key))
        returns += jnp.where(running, steps["reward"], 0.0)
        return (envs, returns, running & ~(steps["terminated"] | steps["truncated"])), None

    env, env_params = make_env(agent.config.env)
    reset_key, step_key = jax.random.split(key)
    count = agent.config.eval_episodes
    envs = gymnax_reset(env, env_params, reset_key, count)
    keys = jax.random.split(step_key, env_params.max_steps_in_episode)
    start = (envs, jnp.zeros(count), jnp.ones(count, jnp.bool_))
    return jax.lax.scan(iteration, start, keys)[0][1]


class Returns:
    """The returns of the episodes of E environments, which are played step by step."""

    def __init__(self, num_envs: int) -> None:
        self._sums = np.zeros(num_envs)
        self._finished: list[float] = []

    def add(self, reward: NDArray[Any], ended: NDArray[np.bool_]) -> None:
        """Takes the rewards of a step, and which episodes ended with it, ``[E]``."""
        self._sums += reward
        self._finished += self._sums[ended].tolist()
        self._sums[ended] = 0.0

    def mean(self) -> float:
        """Returns the mean of episodes that ended since it was last called; NaN if none did."""
        finished, self._finished = self._finished, []
        return float(np.mean(finished)) if finished else math.nan


def shown(returns: Any) -> str:
    """Returns the mean of returns that are not NaN as a text; it is empty if all are."""
    known = np.asarray(returns)[~np.isnan(returns)]
    return f"return {known.mean():.1f}" if known.size else ""


def play(envs: Any, act: Callable[[Any], Any], seed: int) -> NDArray[np.float64]:
    """Returns the return of one episode of each of Gymnasium's vector environments, ``[E]``."""
    obs, _ = envs.reset(seed=seed)
    returns, running = np.zeros(envs.num_envs), np.ones(envs.num_envs, bool)
    while running.any():
        obs, reward, terminated, truncated, _ = envs.step(np.array(act(obs)))
        returns += np.where(running, reward, 0.0)
        running &= ~(terminated | truncated)
    envs.close()
    return returns


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a table in plain text with its columns aligned to the right.

    Example:
        >>> print(table(["seed", "return"], [["0", "500.0"], ["mean", "500.0"]]))
        seed  return
        ----  ------
           0   500.0
        mean   500.0
    """
    lines = [list(header), *(list(row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in lines
    )


def plot(
    path: Path,
    x: NDArray[Any],
    groups: Mapping[str, NDArray[Any]],
    *,
    title: str,
    xlabel: str,
    ylabel: str,
) -> None:
    """Draws a curve of every seed, and the mean of each group of seeds, as the PNG ``path``.

    ``x`` are the positions of the points, ``[P]``, and ``groups`` by name the values of each
    group's seeds, ``[P, seeds]``; NaN for missing ones.
    """
    figure = Figure(figsize=(7.0, 4.2), layout="constrained")
    axes: Any = figure.add_subplot()
    for (name, values), color in zip(groups.items(), TABLEAU_COLORS, strict=False):
        for seed in values.T:
            axes.plot(x[~np.isnan(seed)], seed[~np.isnan(seed)], color=color, alpha=0.35, lw=0.9)
        mean = np.ma.masked_invalid(values).mean(axis=1)
        known = ~np.ma.getmaskarray(mean)
        mean_of = f", mean of {values.shape[1]}" if values.shape[1] > 1 else ""
        label = f"{name}{mean_of}".lstrip(", ")
        axes.plot(x[known], mean[known], color=color, lw=2.0, label=label)
    axes.set(title=title, xlabel=xlabel, ylabel=ylabel)
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="best")
    axes.margins(x=0.01)
    figure.savefig(path, dpi=150)


def plot_marginals(
    path: Path, distributions: Mapping[str, NDArray[Any]], shape: tuple[int, int]
) -> None:
    """Draws the joint distributions of the first two coordinates side by side, in one scale.

    ``distributions`` are by name the probabilities of all points of a grid, ``[N]``, and ``shape``
    the lengths of the first two coordinates; the second is 1 if there is no such coordinate.
    """
    panels = {
        name: distribution.reshape(*shape, -1).sum(axis=-1).T
        for name, distribution in distributions.items()
    }
    figure = Figure(figsize=(2.2 * len(panels) + 1.0, 2.8), layout="constrained")
    axes: Any = figure.subplots(1, len(panels), sharey=True)
    most = max(panel.max() for panel in panels.values())
    image: Any = None
    for axis, (name, panel) in zip(axes, panels.items(), strict=True):
        image = axis.imshow(panel, origin="lower", vmin=0.0, vmax=most)
        axis.set(title=name, xlabel="first coordinate")
    if shape[1] > 1:
        axes[0].set_ylabel("second coordinate")
    figure.colorbar(image, ax=axes, label="probability")
    figure.savefig(path, dpi=150)

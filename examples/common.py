"""Shared by the examples: the command line and folder of a run, its progress, table and plot."""

import csv
import dataclasses
import functools
import io
import json
import math
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, NoReturn, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jaxtyping import Array, Float, Key, PyTree, Shaped
from matplotlib.colors import TABLEAU_COLORS
from matplotlib.figure import Figure
from tqdm import tqdm

import jaxbuf

Config = TypeVar("Config")
State = TypeVar("State")
# The end of each description: files that every run writes.
FILES = """  tensorboard/        the same for TensorBoard, with --tensorboard
  checkpoint/         the whole training state, ten times in a run
  run.json            the options"""


class Progress(tqdm):  # type: ignore[type-arg]
    """A bar in a terminal, and elsewhere a line for each tenth of the way."""

    def __init__(self, total: int, unit: str, done: int = 0) -> None:
        self.lines, self.tenths = not sys.stderr.isatty(), 0
        options: Any = {"dynamic_ncols": True, "unit_scale": True, "initial": done}
        if self.lines:  # tqdm draws nothing then, and counts
            options |= {"file": io.StringIO(), "mininterval": math.inf}
        super().__init__(total=total, unit=f" {unit}", **options)

    def advance(self, steps: int, text: str) -> None:
        """Counts steps, and shows a text; if it is empty, the one before."""
        if text:
            self.set_postfix_str(text, refresh=False)
        self.update(steps)
        before, self.tenths = (
            self.tenths,
            10 * (self.n - self.initial) // (self.total - self.initial),
        )
        if self.lines and self.tenths > before:
            print(self, file=sys.stderr, flush=True)


@dataclasses.dataclass(frozen=True)
class Run(Generic[Config]):
    """One run of an example, as the command line describes it."""

    config: tyro.conf.OmitArgPrefixes[Config]  # options of the training
    out: Path  # the folder to write to
    resume: bool = False  # go on from the checkpoint in --out, with its options
    tensorboard: bool = False  # log for TensorBoard as well
    began: tyro.conf.Suppress[float] = dataclasses.field(default_factory=time.perf_counter)

    @property
    def keys(self) -> Key[Array, " S"]:
        """A key for each seed of the options, ``[seeds]``."""
        config: Any = self.config
        return jnp.stack([jax.random.key(config.seed + i) for i in range(config.seeds)])

    def begin(self, init: Callable[..., State], *args: PyTree) -> State:
        """Returns ``init(*args)``, or the state in the checkpoint if the run is resumed."""
        if not self.resume:
            return init(*args)
        try:
            return jaxbuf.load(self.out / "checkpoint", jax.eval_shape(init, *args))
        except FileNotFoundError:
            fail(f"there is no checkpoint in {self.out}; start without --resume")

    def train(
        self,
        state: State,
        chunk: Callable[[State], tuple[State, dict[str, PyTree], str]],
        *,
        done: int,
        until: int,
        size: int,
        unit: str = "steps",
        rows: int = 1,
    ) -> tuple[State, list[float]]:
        """Trains chunk by chunk; shows and logs the progress, and saves ten checkpoints.

        Args:
            state: The state to begin with.
            chunk: Takes a state; returns the next one, metrics to log, and a text to show.
            done: Number of steps done before.
            until: Number of steps at which to end.
            size: Number of steps in a chunk.
            unit: The name of a step.
            rows: The number of steps that are shown as done for each of these: one for each seed.

        Returns:
            The state at the end, and the duration of each chunk in seconds.
        """
        chunks, seconds = max(0, math.ceil((until - done) / size)), list[float]()
        writers: list[jaxbuf.Writer] = [jaxbuf.CsvWriter(self.out / "log.csv")]
        if self.tensorboard or (self.out / "tensorboard").is_dir():
            writers.append(jaxbuf.TensorBoardWriter(self.out / "tensorboard"))
        with (
            jaxbuf.Monitor(writers, resume_at=done if self.resume else None) as monitor,
            Progress((done + chunks * size) * rows, unit, done * rows) as progress,
        ):
            for i in range(1, chunks + 1):
                began = time.perf_counter()
                state, metrics, text = chunk(state)
                done += size
                monitor.write(done, metrics)
                seconds.append(time.perf_counter() - began)
                progress.advance(size * rows, text)
                if i % max(chunks // 10, 1) == 0 or i == chunks:
                    # In this order, since steps after a checkpoint are logged again.
                    monitor.flush()
                    jaxbuf.save(self.out / "checkpoint", state)
        return state, seconds

    def logged(self, name: str) -> Float[np.ndarray, "P ..."]:
        """Returns all values logged under a name: numbers ``[P]``, or arrays ``[P, S]``."""
        with (self.out / "log.csv").open() as file:
            header, *rows = csv.reader(file)
        table = np.asarray(rows, np.float64)
        if name in header:
            return table[:, header.index(name)]
        return table[:, [i for i, column in enumerate(header) if column.startswith(f"{name}/")]]

    def report(self, picture: str, columns: Mapping[str, Sequence[str]]) -> None:
        """Prints a table of columns, ``[seeds + 1]``; the last row is for all seeds together."""
        config: Any = self.config
        *seeds, _ = range(config.seed, config.seed + len(next(iter(columns.values()))))
        times = [""] * len(seeds) + [f"{time.perf_counter() - self.began:.1f} s"]
        rows = zip([*map(str, seeds), "all"], *columns.values(), times, strict=True)
        print(table(["seed", *columns, "time"], [*rows]))
        print(f"{picture}, log and checkpoint are in {self.out}")

    def report_returns(
        self,
        name: str,
        greedy: Float[np.ndarray, "S E"],
        seconds: Sequence[float],
        size: int,
        first: int = 1,
    ) -> None:
        """Draws the learning curve, and prints the returns of each seed.

        Both take the returns while training from the log, where they are called ``return``.

        Args:
            name: The name of the agent.
            greedy: The returns of greedy episodes in the end, ``[seeds, episodes]``.
            seconds: The duration of each chunk.
            size: The number of steps of each seed in a chunk.
            first: The number of chunks in which programs are compiled.
        """
        config: Any = self.config
        steps, seeds = self.logged("step"), len(greedy)
        returns = self.logged("return").reshape(len(steps), seeds)
        title = f"{name} with {config.sampler} replay on {config.env}"
        xlabel, ylabel = "environment steps per seed", "return while training"
        curve = {"": returns}
        plot(self.out / "learning_curve.png", steps, curve, title, xlabel, ylabel)
        late, measured = sum(seconds[first:]), len(seconds[first:]) * size * seeds
        columns = {
            "greedy return": cells(greedy.mean(axis=1), "{:.1f}"),
            "return in training": cells(last_tenth(returns), "{:.1f}"),
            "steps": totals(steps[-1], seeds),
            "steps/s": [""] * seeds + [f"{measured / late:,.0f}" if measured else "-"],
        }
        self.report("learning curve", columns)
        if measured:
            others = time.perf_counter() - self.began - sum(seconds)
            print(
                f"time: {sum(seconds[:first]):.1f} s for the first {first * size * seeds:,} steps, "
                f"in which programs are compiled, {late:.1f} s for the others, whose steps/s these "
                f"are, and {others:.1f} s before and after, for greedy episodes and setting up"
            )


# Cached, so that an agent that runs again in the same process is not compiled again.
@functools.cache
def _programs(agent: Any, length: int) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Returns jitted functions that begin and continue a run, for all seeds of all variants."""
    init = jax.vmap(jax.vmap(agent.init, in_axes=(0, None)), in_axes=(None, 0))
    chunk = jax.vmap(jax.vmap(lambda state: agent.train(state, length)))
    # Donated, so that the buffers are updated in place.
    options = jaxbuf.compiler_options()
    return jax.jit(init), jax.jit(chunk, donate_argnums=0, compiler_options=options)


def compare(
    run: Run[Any], agent: Any, variants: Mapping[str, float], metric: str, size: int, title: str
) -> None:
    """Trains variants of an agent with the same seeds, in one program, and compares them.

    Logs the metrics about fifty times. Ends with a picture of one of them, and with a table of its
    mean over the last tenth of the run.

    Args:
        run: A run whose options have ``seed``, ``seeds`` and ``steps``, those of each seed.
        agent: Hashable. ``init(key, variant)`` returns a state that has ``step``, and
            ``train(state, length)`` the next state after so many iterations, and metrics.
        variants: The number that ``agent.init`` gets, by the name of the variant.
        metric: The name of the metric to compare.
        size: Number of steps in an iteration.
        title: The title of the picture.
    """
    seeds, steps = run.config.seeds, run.config.steps
    length = math.ceil(steps / size / 50)
    init, chunk = _programs(agent, length)
    state = run.begin(init, run.keys, jnp.asarray([*variants.values()], jnp.float32))

    def next_chunk(state: PyTree) -> tuple[PyTree, dict[str, PyTree], str]:
        state, metrics = chunk(state)
        means = np.mean(metrics[metric], axis=1)
        text = ", ".join(f"{mean:.2f} {v}" for v, mean in zip(variants, means, strict=True))
        logged = {k: dict(zip(variants, v, strict=True)) for k, v in metrics.items()}
        return state, logged, f"{metric} {text}"

    counts: Any = {"size": length * size, "rows": len(variants) * seeds}
    run.train(state, next_chunk, done=int(state.step[0, 0]), until=steps, **counts)
    step, curves = run.logged("step"), {name: run.logged(f"{metric}/{name}") for name in variants}
    plot(run.out / f"{metric}.png", step, curves, title, "steps per seed", metric)
    columns = {name: cells(last_tenth(curve), "{:.2f}") for name, curve in curves.items()}
    run.report(f"{metric}.png", columns | {"steps of each": totals(step[-1], seeds)})


@dataclasses.dataclass(frozen=True)
class _Folder:
    """The options on which the defaults of the others depend."""

    out: Path
    resume: bool = False


def main(
    example: str,
    train: Callable[[Run[Config]], None],
    default: Config,
    description: str | None,
    argv: Sequence[str] | None = None,
    *,
    may_grow: str = "steps",
) -> int:
    """Runs an example from the command line.

    Args:
        example: The name of its file, and of its folder in ``runs/``.
        train: The function that trains and reports.
        default: A dataclass of options with their defaults.
        description: For ``--help``; it ends with files that the example writes.
        argv: The words after the program's name; None takes those of this process.
        may_grow: The option that may be larger than before when a run is resumed.

    Returns:
        The exit status: 0, or 130 after an interruption.

    Raises:
        SystemExit: With status 2 and a message on stderr, when an argument is wrong.
    """
    words: Any = {"args": argv, "prog": f"python examples/{example}.py"}
    start = _Folder(Path("runs", example))
    options: Any = {"add_help": False, "return_unknown_args": True}
    folder, _ = tyro.cli(_Folder, default=start, **words, **options)
    saved = saved_options(folder.out, example) if folder.resume else {}
    if folder.resume and not saved:
        fail(f"there is no run in {folder.out}; start without --resume")
    kind: Any = type(default)
    suited: Any = dataclasses.replace(cast("Any", default), **saved)
    run: Run[Any] = tyro.cli(
        Run[kind], default=Run(suited, folder.out), description=f"{description}{FILES}", **words
    )
    given = dataclasses.asdict(run.config)
    for name, value in saved.items():
        if given[name] != value and not (name == may_grow and given[name] > value):
            fail(
                f"the run in {run.out} has --{name.replace('_', '-')} {value}, not "
                f"{given[name]}; only --{may_grow} may grow. Choose another --out"
            )
    make_folder(run.out, example, given, resume=run.resume)
    print("compiling", file=sys.stderr, flush=True)
    try:
        train(run)
    except KeyboardInterrupt:
        print("\ninterrupted; go on from the last checkpoint with --resume", file=sys.stderr)
        return 130
    return 0


def make_folder(out: Path, example: str, options: dict[str, Any], *, resume: bool = False) -> None:
    """Creates the folder of a run; unless it is resumed, deletes an earlier run of this example.

    Raises:
        SystemExit: If the folder cannot be written, or holds something else.
    """
    saved_options(out, example)
    try:
        if not resume:
            for name in ("checkpoint", "tensorboard"):
                shutil.rmtree(out / name, ignore_errors=True)
            (out / "log.csv").unlink(missing_ok=True)
        out.mkdir(parents=True, exist_ok=True)
        new = out / "run.json.new"
        new.write_text(json.dumps({"example": example, "options": options}))
        new.replace(out / "run.json")
    except OSError as error:
        fail(f"cannot write to {out} ({error.strerror}); choose another --out")


def saved_options(out: Path, example: str) -> dict[str, Any]:
    """Returns the options of the run in a folder; an empty dict if there is no run."""
    if out.exists() and not out.is_dir():
        fail(f"{out} is a file; choose another --out")
    if not out.exists() or not any(out.iterdir()):
        return {}
    try:
        saved = json.loads((out / "run.json").read_text())
        if saved["example"] != example:
            raise ValueError(saved["example"])
    except (OSError, ValueError, KeyError, TypeError):
        fail(f"{out} holds other files than those of {example}; choose another --out")
    # JSON has no tuples.
    return {k: tuple(v) if isinstance(v, list) else v for k, v in saved["options"].items()}


def fail(message: str) -> NoReturn:
    """Prints what is wrong with the command line, and exits."""
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)


def check(config: Any, low: float, *names: str, high: float = math.inf) -> None:
    """Checks that options are between ``low`` and ``high``; raises ``ValueError`` if not."""
    for name in names:
        if not low <= (value := getattr(config, name)) <= high:
            most = "" if high == math.inf else f" and at most {high}"
            option = f"--{name.replace('_', '-')}"
            raise ValueError(f"{option} is {value}; expected at least {low}{most}")


def one_of(batch: PyTree) -> PyTree:
    """Returns the shapes and dtypes of one row of a batch, as the example for a buffer."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), batch)


def mean_return(returns: PyTree) -> str:
    """Returns a text with the mean of the returns that are not NaN; empty if all are."""
    finished = np.asarray(returns)[~np.isnan(returns)]
    return f"return {finished.mean():.1f}" if finished.size else ""


def cells(values: Float[np.ndarray, " S"], form: str) -> list[str]:
    """Returns the numbers of all seeds, ``[seeds]``, and their mean, as texts of this form."""
    return [form.format(value) for value in (*values, values.mean())]


def totals(count: float, seeds: int) -> list[str]:
    """Returns the count of each of ``seeds`` seeds, and that of all of them, as texts."""
    return [f"{count:,.0f}"] * seeds + [f"{count * seeds:,.0f}"]


def last_tenth(curves: Float[np.ndarray, "P S"]) -> Float[np.ndarray, " S"]:
    """Returns the mean over the last tenth of curves ``[P, seeds]``, without their NaN."""
    last = np.ma.masked_invalid(curves[-math.ceil(len(curves) / 10) :])
    return last.mean(axis=0).filled(np.nan)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a table in plain text with its columns aligned to the right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = (header, ["-" * width for width in widths], *rows)
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in lines
    )


def plot(
    path: Path,
    x: Shaped[np.ndarray, " P"],
    groups: Mapping[str, Float[np.ndarray, "P S"]],
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
        mean = np.ma.masked_invalid(values).mean(axis=1).filled(np.nan)
        suffix = f", mean of {values.shape[1]}" if values.shape[1] > 1 else ""
        label, valid = f"{name}{suffix}".lstrip(", "), ~np.isnan(mean)
        axes.plot(x[valid], mean[valid], color=color, lw=2.0, label=label)
    axes.set(title=title, xlabel=xlabel, ylabel=ylabel)
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="best")
    axes.margins(x=0.01)
    figure.savefig(path, dpi=150)

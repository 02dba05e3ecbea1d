"""Helpers of all examples: command line, folder of a run, training in chunks, table and plot."""

import csv
import dataclasses
import functools
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
        chunk: Callable[[State], tuple[State, dict[str, PyTree], str]],
        *,
        done: int,
        until: int,
        size: int,
        unit: str = "steps",
        rows: int = 1,
    ) -> tuple[State, list[float]]:
        """Trains chunk by chunk; shows and logs the progress, and saves checkpoints.

        Where stderr is no terminal, the progress is a line at each checkpoint.

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
        shows: Any = {"unit": f" {unit}", "unit_scale": True, "total": total}
        shows["initial"] = done * rows
        live, start, shown = sys.stderr.isatty(), time.perf_counter(), ""
        with (
            jaxbuf.Monitor(writers, resume_at=resume_at) as monitor,
            tqdm(dynamic_ncols=True, disable=not live, **shows) as bar,
        ):
            for i in range(chunks):
                began = time.perf_counter()
                state, metrics, text = chunk(state)
                # It is empty if no episode has ended in this chunk.
                shown = text or shown
                done += size
                monitor.write(done, metrics)
                seconds.append(time.perf_counter() - began)
                bar.set_postfix_str(shown, refresh=False)
                bar.update(size * rows)
                if (i + 1) % max(chunks // 10, 1) == 0 or i + 1 == chunks:
                    # In this order, since steps after a checkpoint are logged again.
                    monitor.flush()
                    jaxbuf.save(self.out / "checkpoint", state)
                    if not live:
                        shows |= {"elapsed": time.perf_counter() - start, "postfix": shown}
                        line = tqdm.format_meter(n=done * rows, **shows)
                        print(line, file=sys.stderr, flush=True)
        return state, seconds

    @property
    def keys(self) -> Key[Array, " S"]:
        """A key for each seed of the options, ``[seeds]``."""
        config: Any = self.config
        return jnp.stack([jax.random.key(config.seed + i) for i in range(config.seeds)])

    def begin(self, init: Callable[..., State], *args: PyTree) -> State:
        """Returns ``init(*args)``, or the state in the checkpoint if the run is resumed."""
        return self.load(jax.eval_shape(init, *args)) if self.resume else init(*args)

    def load(self, like: State) -> State:
        """Returns the training state in the checkpoint; ``like`` has its structure and shapes."""
        try:
            return jaxbuf.load(self.out / "checkpoint", like)
        except FileNotFoundError:
            fail(f"there is no checkpoint in {self.out}; start without --resume")

    def logged(self, name: str) -> Float[np.ndarray, "P ..."]:
        """Returns all values logged under a name: numbers ``[P]``, or arrays ``[P, S]``."""
        with (self.out / "log.csv").open() as file:
            header, *rows = csv.reader(file)
        table = np.asarray(rows, np.float64)
        if name in header:
            return table[:, header.index(name)]
        return table[:, [i for i, column in enumerate(header) if column.startswith(f"{name}/")]]

    def report(self, picture: str, columns: Mapping[str, Sequence[str]]) -> None:
        """Prints a table with a row for each seed, and one for all of them.

        Args:
            picture: The name of the picture in the last line.
            columns: The cells of each column, ``[seeds + 1]``; see ``cells``.
        """
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
        plot(
            self.out / "learning_curve.png",
            steps,
            {"": returns},
            title=f"{name} with {config.sampler} replay on {config.env}",
            xlabel="environment steps" + (" per seed" if seeds > 1 else ""),
            ylabel="return while training",
        )
        measured, step = seconds[first:], int(steps[-1])
        speed = f"{len(measured) * size * seeds / sum(measured):,.0f}" if measured else "-"
        self.report(
            "learning curve",
            {
                "greedy return": cells(greedy.mean(axis=1), "{:.1f}"),
                "return in training": cells(late(returns), "{:.1f}"),
                "steps": totals(step, seeds),
                "steps/s": [""] * seeds + [speed],
            },
        )
        if measured:
            others = time.perf_counter() - self.began - sum(seconds)
            print(
                f"time: {sum(seconds[:first]):.1f} s for the first {first * size * seeds:,} steps, "
                f"in which programs are compiled, {sum(measured):.1f} s for the others, whose "
                f"steps/s these are, and {others:.1f} s before and after, for greedy episodes and "
                "setting up"
            )


@dataclasses.dataclass(frozen=True)
class _Folder:
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
    folder, _ = tyro.cli(
        _Folder,
        default=_Folder(Path("runs", example)),
        args=argv,
        add_help=False,
        return_unknown_args=True,
    )
    saved = _saved_options(folder.out, example) if folder.resume else {}
    if folder.resume and not saved:
        fail(f"there is no run in {folder.out}; start without --resume")
    kind: Any = type(default)
    suited: Any = dataclasses.replace(cast("Any", default), **saved)
    run: Run[Any] = tyro.cli(
        Run[kind],
        default=Run(suited, folder.out),
        args=argv,
        prog=f"python -m jaxbuf.examples.{example}",
        description=description,
    )
    options = dataclasses.asdict(run.config)
    for name, value in saved.items():
        if options[name] != value and not (name == may_grow and options[name] > value):
            fail(
                f"the run in {run.out} has --{name.replace('_', '-')} {value}, not "
                f"{options[name]}; only --{may_grow} may grow. Choose another --out"
            )
    begin(run.out, example, options, resume=run.resume)
    try:
        train(run)
    except KeyboardInterrupt:
        print("\ninterrupted; go on from the last checkpoint with --resume", file=sys.stderr)
        return 130
    return 0


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
        new = out / "run.json.new"
        new.write_text(json.dumps({"example": example, "options": options}))
        new.replace(out / "run.json")
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
        is_run = saved["example"] == example
    except (OSError, ValueError, KeyError, TypeError):
        saved, is_run = {}, False
    if not is_run:
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


def one_of(batch: PyTree) -> PyTree:
    """Returns the shapes and dtypes of one row of a batch, as the example for a buffer."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), batch)


def shown(returns: PyTree) -> str:
    """Returns a text with the mean of the returns that are not NaN; empty if all are."""
    finished = np.asarray(returns)[~np.isnan(returns)]
    return f"return {finished.mean():.1f}" if finished.size else ""


def cells(values: Float[np.ndarray, " S"], form: str) -> list[str]:
    """Returns the numbers of all seeds, ``[seeds]``, and their mean, as texts of this form."""
    return [form.format(value) for value in (*values, values.mean())]


def totals(count: float, seeds: int) -> list[str]:
    """Returns the count of each of ``seeds`` seeds, and that of all of them, as texts."""
    return [f"{count:,.0f}"] * seeds + [f"{count * seeds:,.0f}"]


def late(curves: Float[np.ndarray, "P S"]) -> Float[np.ndarray, " S"]:
    """Returns the mean over the last tenth of curves ``[P, seeds]``, without their NaN."""
    last = np.ma.masked_invalid(curves[-math.ceil(len(curves) / 10) :])
    return last.mean(axis=0).filled(np.nan)


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
    x: Shaped[np.ndarray, " P"],
    groups: Mapping[str, Float[np.ndarray, "P S"]],
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
        valid = ~np.ma.getmaskarray(mean)
        suffix = f", mean of {values.shape[1]}" if values.shape[1] > 1 else ""
        label = f"{name}{suffix}".lstrip(", ")
        axes.plot(x[valid], mean[valid], color=color, lw=2.0, label=label)
    axes.set(title=title, xlabel=xlabel, ylabel=ylabel)
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="best")
    axes.margins(x=0.01)
    figure.savefig(path, dpi=150)

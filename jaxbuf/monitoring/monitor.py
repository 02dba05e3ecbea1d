"""Writes metrics of a run to a CSV, TensorBoard, Weights & Biases or the terminal."""

import csv
import importlib
import io
import math
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, Self, TextIO

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap
from jaxtyping import Array, Int, PyTree

from jaxbuf.core import checks, numbers, sizes, trees
from jaxbuf.core.leaves import is_key
from jaxbuf.core.types import Arrays, Count, Integers
from jaxbuf.monitoring.plot import distributions

_BINS = 64  # of a histogram


class Writer(Protocol):
    """The destination of a ``Monitor``: any object with these methods."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes the metrics of one step, by name; steps only grow."""
        ...

    def rewind(self, step: int) -> None:
        """Drops what an earlier run wrote after ``step``, since the run resumes from there."""
        ...

    def flush(self) -> None:
        """Makes sure that everything written so far outlives this process."""
        ...

    def close(self) -> None:
        """Flushes, and closes files."""
        ...


class Monitor:
    """Writes metrics to all its writers at regular intervals of steps or seconds.

    ``write`` is for Python loops, ``callback`` for traced code. Metrics that arrive between two
    writes are dropped. Metrics are any pytree of numbers: names are joined with ``/``, and the
    elements of an array, such as one number for each seed, are numbered: ``loss/0``, ``loss/1``.

    Args:
        writers: The writers.
        every_steps: Write the first step, and then the first one at or after each multiple of this.
        every_seconds: Write the first step, and then the first one after this many seconds. If
            neither interval is given, every step is written.
        resume_at: The step of the checkpoint from which an interrupted run resumes. The log
            continues, without entries that were written after that step.
        clock: A function that returns the time in seconds.

    Raises:
        ValueError: If a period is not positive, or both are given.

    Example:
        >>> import jax, jax.numpy as jnp, jaxbuf
        >>> monitor = jaxbuf.Monitor([jaxbuf.TerminalWriter()], every_steps=2)
        >>> @jax.jit
        ... def train(loss):
        ...     def step(loss, i):
        ...         loss = loss * 0.5
        ...         monitor.callback(i, {"loss": loss})
        ...         return loss, None
        ...     return jax.lax.scan(step, loss, jnp.arange(5))[0]
        >>> with monitor:
        ...     final = jax.vmap(train)(jnp.array([1.0, 3.0]))
        -----------------------
        | step     |        0 |
        | loss     |          |
        |  0       |      0.5 |
        |  1       |      1.5 |
        -----------------------
        ...
        |  1       |  0.09375 |
        -----------------------
    """

    def __init__(
        self,
        writers: Sequence[Writer],
        *,
        every_steps: int | None = None,
        every_seconds: float | None = None,
        resume_at: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if every_steps is not None and every_seconds is not None:
            raise ValueError(
                f"every_steps is {every_steps} and every_seconds is {every_seconds}; choose one"
            )
        if every_steps is not None:
            every_steps = sizes.check_count("every_steps", every_steps, most=sizes.MOST_ON_HOST)
        if every_seconds is not None:
            every_seconds = checks.check_number(
                "every_seconds", every_seconds, "a number above 0", lambda x: 0 < x < math.inf
            )
        if resume_at is not None and not isinstance(resume_at, int | np.integer):
            raise ValueError(
                f"resume_at is {checks.name_of(resume_at)}; expected None or the number of a step"
            )
        if not isinstance(writers, Sequence) or not all(
            hasattr(writer, "write") and not isinstance(writer, type) for writer in writers
        ):
            raise ValueError(
                f"writers is {checks.name_of(writers)}; expected a list of writers, such as "
                "[jaxbuf.TerminalWriter()]"
            )
        self._writers = tuple(writers)
        self._every_steps = every_steps
        self._every_seconds = every_seconds
        self._clock = clock
        self._last_step = resume_at
        self._last_time: float | None = None
        # JAX calls callbacks from its own threads.
        self._lock = threading.Lock()
        if resume_at is not None:
            for writer in self._writers:
                writer.rewind(int(resume_at))

    def write(self, step: int | Int[Array | np.ndarray, ""], metrics: PyTree) -> bool:
        """Writes the metrics of a step if it is time.

        Args:
            step: An integer that only grows. It may be an array if all its elements are equal.
            metrics: Numbers and arrays of numbers, by name.

        Returns:
            Whether they were written.

        Raises:
            ValueError: If ``step`` holds different numbers, or two metrics have one name.
        """
        is_number = isinstance(step, int | np.integer | np.ndarray | jax.Array)
        if not is_number or not jnp.issubdtype(getattr(step, "dtype", np.int64), jnp.integer):
            raise ValueError(f"step is {checks.name_of(step)}; expected an integer")
        steps = np.asarray(step).reshape(-1)
        if steps.size == 0 or (steps != steps[0]).any():
            raise ValueError(f"step is {steps.tolist()}; expected one number, the same in all rows")
        with self._lock:
            now = int(steps[0])
            if not self._due(now):
                return False
            row = _flatten(metrics)
            for writer in self._writers:
                writer.write(now, row)
            return True

    def histograms(self, step: int, buffer: Any) -> None:
        """Writes histograms of ages, priorities, scores, use counts and staleness.

        They are of the items that can be drawn now, as ``plot`` shows them, and go to the writers
        that have a method ``histogram``: TensorBoard and W&B. They are written at once. Where
        ``write`` decides when, call it first: ``if monitor.write(step, ...): ...``.

        Args:
            step: As for ``write``.
            buffer: As for ``plot``; not traced. Names of parts are as in the metrics of a mixture.

        Raises:
            ValueError: As ``plot``.

        Example:
            >>> import jax.numpy as jnp, jaxbuf, tempfile
            >>> buffer = jaxbuf.ItemBuffer.create(jnp.float32(0), 9, sampler=jaxbuf.Prioritized())
            >>> with jaxbuf.Monitor([jaxbuf.TensorBoardWriter(tempfile.mkdtemp())]) as monitor:
            ...     monitor.histograms(0, buffer.add(jnp.arange(5.0)))
        """
        found = distributions(buffer)
        with self._lock:
            for writer in self._writers:
                write: Any = getattr(writer, "histogram", None)
                for name, values in found.items() if write else ():
                    write(int(step), name, values)

    def callback(self, step: int | Count, metrics: Arrays, *, ordered: bool = True) -> None:
        """Calls ``write`` from inside ``jit``, ``scan`` and ``vmap``.

        Under ``vmap`` all rows arrive together, as arrays. Delivery is asynchronous: call ``flush``
        before you read what was written. Every call hands its numbers to Python, even if they are
        then dropped, so in a tight loop call it only once in many steps.

        Args:
            step: As for ``write``.
            metrics: As for ``write``.
            ordered: Whether calls arrive in the order in which they are made. JAX offers that on
                one device only; with several, pass False.
        """
        arrays: PyTree = jax.tree.map(jnp.asarray, trees.owned((step, metrics)))
        rows = _all_rows(*jax.lax.stop_gradient(arrays))
        jax.debug.callback(self._receive, *rows, ordered=ordered)

    def flush(self) -> None:
        """Waits for pending callbacks, and flushes all writers."""
        jax.effects_barrier()
        with self._lock:
            for writer in self._writers:
                writer.flush()

    def close(self) -> None:
        """Flushes, and closes the writers."""
        self.flush()
        for writer in self._writers:
            writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _due(self, step: int) -> bool:
        last, self._last_step = self._last_step, step
        if self._every_seconds is not None:
            now = self._clock()
            due = self._last_time is None or now - self._last_time >= self._every_seconds
            if due:
                self._last_time = now
            return due
        if self._every_steps is None or last is None:
            return True
        return step // self._every_steps > last // self._every_steps

    def _receive(self, step: Int[np.ndarray, ""], metrics: PyTree[np.ndarray]) -> None:
        self.write(step, metrics)


class CsvWriter:
    """Writes a CSV file with one row for each step, whose number is in the first column.

    Each row is appended in one piece, so that a killed process leaves complete rows and at most one
    broken row, which is dropped when the file is opened again. If a new column appears, the file is
    rewritten and then replaced. An existing file is continued.

    Args:
        path: The file.

    Raises:
        ValueError: If the file exists but is not such a table; and from ``write`` if a metric is
            called ``step`` like the first column.

    Example:
        >>> import pathlib, tempfile
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "log.csv"
        >>> writer = CsvWriter(path)
        >>> writer.write(1, {"loss": 0.5})
        >>> writer.write(2, {"loss": 0.25, "return": 9.0})
        >>> writer.close()
        >>> path.read_text().split()
        ['step,loss,return', '1,0.5,', '2,0.25,9.0']
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = checks.check_path("path", path)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._columns, rows, complete = _read_table(self._path)
        self._file = self._open()
        if not complete:
            self._replace(rows)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Appends a row; cells of missing metrics are empty."""
        if "step" in metrics:
            raise ValueError(
                "metrics has a number called 'step', as the first column is; choose another name"
            )
        new = [name for name in metrics if name not in self._columns]
        if new:
            rows = _read_table(self._path)[1]
            self._columns += new
            self._replace(rows)
        cells = [step, *(metrics.get(name, "") for name in self._columns[1:])]
        self._file.write(_line(cells))

    def rewind(self, step: int) -> None:
        """Drops the rows of later steps."""
        rows = _read_table(self._path)[1]
        kept = [row for row in rows if int(row[0]) <= step]
        if len(kept) < len(rows):
            self._replace(kept)

    def flush(self) -> None:
        """Flushes all rows to disk."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Flushes all rows to disk, and closes the file."""
        if not self._file.closed:
            self.flush()
            self._file.close()

    def _open(self) -> io.FileIO:
        # Unbuffered, so that each row is one system call: a killed process wrote all of it or none.
        return open(self._path, "ab", buffering=0)

    def _replace(self, rows: list[list[str]]) -> None:
        """Replaces the file by one with all columns."""
        width = len(self._columns)
        lines = [self._columns, *(row + [""] * (width - len(row)) for row in rows)]
        new = self._path.with_name(self._path.name + ".new")
        with open(new, "wb") as file:
            file.writelines(map(_line, lines))
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, self._path)
        self._file.close()
        self._file = self._open()


class TerminalWriter:
    """Prints a table for each step, in which numbers are grouped by what stands before a ``/``.

    Args:
        file: The file to print to; None looks up ``sys.stdout`` at each step.
    """

    def __init__(self, file: TextIO | None = None) -> None:
        self._file = file

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Prints a table."""
        lines, group = [("step", str(step))], ""
        for name, value in metrics.items():
            first, slash, rest = name.partition("/")
            if slash and first != group:
                lines.append((first, ""))
            group = first if slash else ""
            lines.append((f" {rest}" if slash else name, f"{value:.6g}"))
        # Seldom wider, so that the tables of a run have one shape.
        left, right = (max(8, *map(len, column)) for column in zip(*lines, strict=True))
        rule = "-" * (left + right + 7)
        table = [f"| {name:<{left}} | {value:>{right}} |" for name, value in lines]
        print(rule, *table, rule, sep="\n", file=self._file or sys.stdout)

    def rewind(self, step: int) -> None:
        """Does nothing, since printed lines stay."""

    def flush(self) -> None:
        """Flushes the lines to the file."""
        (self._file or sys.stdout).flush()

    def close(self) -> None:
        """Flushes the lines to the file."""
        self.flush()


class _Curves(Protocol):
    """A ``SummaryWriter``, as far as it is used here."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int, /) -> object: ...

    def add_histogram(self, tag: str, values: np.ndarray, global_step: int, /) -> object: ...

    def flush(self) -> object: ...


class TensorBoardWriter:
    """Writes scalars for TensorBoard with tensorboardX (extra ``logging``).

    Args:
        folder: The folder for event files. TensorBoard reads the files of an interrupted and a
            resumed run in the same folder as one run. It may also be a ``SummaryWriter`` of yours,
            which stays open. That writes from a thread, so a killed process loses the last points.
            If its run resumes, create it with ``purge_step=step + 1``: ``rewind`` leaves it alone.

    Raises:
        ImportError: If ``folder`` is a folder and tensorboardX is not installed.
        ValueError: If ``folder`` is neither; and from ``write`` if two names differ only in
            characters that TensorBoard replaces.

    Example:
        >>> import jaxbuf, tempfile, tensorboardX
        >>> mine = tensorboardX.SummaryWriter(tempfile.mkdtemp())
        >>> with jaxbuf.Monitor([jaxbuf.TensorBoardWriter(mine)]) as monitor:
        ...     written = monitor.write(1, {"loss": 0.5})
        >>> mine.add_scalar("mine", 1.0, 2)
        >>> mine.close()
    """

    def __init__(self, folder: str | os.PathLike[str] | _Curves) -> None:
        is_curves = hasattr(folder, "add_scalar") and not isinstance(folder, type)
        self._file = None if is_curves else _EventFile(checks.check_path("folder", folder))
        self._curves: Any = self._file or folder

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Adds a point to each curve."""
        names: dict[str, str] = {}
        for name in metrics:
            # As tensorboardX replaces characters.
            tag = re.sub(r"[^-/\w.]", "_", name).lstrip("/")
            if tag in names:
                raise ValueError(
                    f"TensorBoard takes both {names[tag]!r} and {name!r} for {tag!r}; choose "
                    "another name"
                )
            names[tag] = name
        for name, value in metrics.items():
            self._curves.add_scalar(name, value, step)
        if self._file is not None:
            self._file.flush()

    def histogram(self, step: int, name: str, values: np.ndarray) -> None:
        """Adds a histogram of some numbers ``[N]``, which must be finite."""
        self._curves.add_histogram(name, values, step)

    def rewind(self, step: int) -> None:
        """Makes TensorBoard hide the points of later steps, unless the writer is yours."""
        if self._file is not None:
            self._file.restart(step + 1)

    def flush(self) -> None:
        """Flushes all points to disk, or calls ``flush`` of your writer."""
        self._curves.flush()

    def close(self) -> None:
        """Flushes all points to disk, and closes the file unless the writer is yours."""
        if self._file is not None:
            self._file.close()


class _EventFile:
    """A file of events in a folder, written at once.

    A ``SummaryWriter`` would write from a thread, whose queue is lost with the process.
    """

    def __init__(self, folder: Path) -> None:
        try:
            from tensorboardX import summary
            from tensorboardX.event_file_writer import EventsWriter
            from tensorboardX.proto import event_pb2
        except ImportError as error:
            raise ImportError(
                "TensorBoardWriter needs tensorboardX; install it with "
                "`pip install 'jaxbuf[logging]'`"
            ) from error
        protocol: Any = event_pb2
        self._summary: Any = summary
        self._event: Any = protocol.Event
        self._restart: Any = protocol.SessionLog(status=protocol.SessionLog.START)
        folder.mkdir(parents=True, exist_ok=True)
        # Names of event files have a resolution of one second, and files of one name would be
        # overwritten.
        self._file: Any = EventsWriter(
            os.path.join(folder, "events"), f".{time.time_ns()}.{os.getpid()}"
        )

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self._add(step, summary=self._summary.scalar(name, value))

    def add_histogram(self, name: str, values: np.ndarray, step: int) -> None:
        self._add(step, summary=self._summary.histogram(name, values, _BINS))

    def restart(self, step: int) -> None:
        """Makes TensorBoard hide the points from this step on."""
        self._add(step, session_log=self._restart)
        self.flush()

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _add(self, step: int, **content: Any) -> None:
        self._file.write_event(self._event(wall_time=time.time(), step=step, **content))


class WandbWriter:
    """Logs to a run of Weights & Biases (``pip install wandb``).

    Args:
        run: A run of yours, which goes on when this writer is closed. By default ``wandb.init``
            begins one, which is finished with this writer. If it returns a run that was already
            active, as it does in scripts, that run goes on, too. Weights & Biases drops what is
            logged for a smaller step than the last one of the run, so log to your own run with
            the steps of the ``Monitor``.
        settings: Arguments of ``wandb.init``, such as ``project``, ``name``, or ``mode="offline"``,
            which needs neither network nor account. To resume an interrupted run, pass its ``id``
            and ``resume="allow"``.

    Raises:
        ImportError: If there is no ``run`` and wandb is not installed.
        ValueError: If ``run`` is not a run, or there are ``settings`` for it.
    """

    def __init__(self, *, run: Any = None, **settings: Any) -> None:
        if run is None:
            self._run, self._begun = _init_run(settings)
            return
        if settings:
            raise ValueError(
                f"run was given, and {', '.join(settings)}, which wandb.init takes; leave one out"
            )
        if not hasattr(run, "log") or isinstance(run, type):
            raise ValueError(
                f"run is {checks.name_of(run)}; expected None or a run, as wandb.init returns it"
            )
        self._run, self._begun = run, False

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Logs the metrics."""
        self._run.log(dict(metrics), step=step)

    def histogram(self, step: int, name: str, values: np.ndarray) -> None:
        """Logs a histogram of some numbers ``[N]``, which must be finite."""
        wandb: Any = importlib.import_module("wandb")
        histogram = wandb.Histogram(np_histogram=np.histogram(values, _BINS))
        self._run.log({name: histogram}, step=step)

    def rewind(self, step: int) -> None:
        """Does nothing, since the service keeps its data."""

    def flush(self) -> None:
        """Does nothing, since a separate process already has the metrics."""

    def close(self) -> None:
        """Finishes the run if this writer began it."""
        if self._begun:
            self._begun = False
            self._run.finish()


def _init_run(settings: dict[str, Any]) -> tuple[Any, bool]:
    """Returns the run that ``wandb.init`` returns, and whether it began with that call."""
    try:
        import wandb  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ImportError(
            "WandbWriter needs Weights & Biases; install it with `pip install wandb`"
        ) from error
    module: Any = wandb
    # A run that was created beside others is not wandb.run, and may be returned as well.
    setup = getattr(module, "setup", lambda: None)()
    active = getattr(module, "run", None), getattr(setup, "most_recent_active_run", None)
    run = module.init(**settings)
    return run, not any(run is other for other in active)


@custom_vmap
def _all_rows(step: Count, metrics: Arrays) -> tuple[Count, Arrays]:
    """Returns its arguments, under ``vmap`` with all rows and as if they were not mapped.

    Of what is not mapped a callback is called once; of what is mapped an ordered one is an error,
    and another is called for each row.
    """
    return step, metrics


@_all_rows.def_vmap
def _all_rows_of_batch(
    size: int, mapped: PyTree[bool], step: Integers, metrics: Arrays
) -> tuple[Arrays, PyTree[bool]]:
    rows = _all_rows(step, metrics)
    return rows, jax.tree.map(lambda _: False, rows)


def _flatten(metrics: PyTree) -> dict[str, float]:
    flat: dict[str, float] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(metrics)[0]:
        prefix = jax.tree_util.keystr(path, simple=True, separator="/")
        dtype = numbers.type_of(leaf, f"metrics[{prefix!r}]").dtype
        if is_key(dtype) or np.asarray(leaf).dtype.kind not in "biufV":
            raise ValueError(f"metrics[{prefix!r}] is {checks.kind_of(leaf)}; expected numbers")
        values = np.asarray(leaf)
        for index in np.ndindex(values.shape):
            name = "/".join(part for part in (prefix, *map(str, index)) if part)
            if name in flat:
                raise ValueError(f"metrics has two numbers called {name!r}; expected one")
            flat[name] = float(values[index])
    return flat


def _line(cells: Sequence[Any]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue().encode()


def _read_table(path: Path) -> tuple[list[str], list[list[str]], bool]:
    """Returns the columns, the complete rows, and whether the file consists of these only."""
    content = path.read_bytes() if path.exists() else b""
    end = content.rfind(b"\n") + 1
    lines = list(csv.reader(io.StringIO(content[:end].decode(errors="replace"))))
    if not lines and not content:
        return ["step"], [], False
    columns, *rows = lines or [[]]
    if columns[:1] != ["step"] or not all(row and row[0].lstrip("-").isdigit() for row in rows):
        raise ValueError(
            f"{path} is no log of steps; move it away, or choose another path for the CsvWriter"
        )
    return columns, rows, end == len(content)

"""Tables, intervals and figures that all experiments share."""

import csv
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from common import Run  # of the examples

RESULTS = Path(__file__).parent.parent / "docs" / "results"
# Okabe and Ito's colors, which people with any kind of color blindness can tell apart.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "x")


def train(main: Callable[[Sequence[str]], int], words: Sequence[Any], folder: Path) -> Any:
    """Trains an example, or goes on from its checkpoint, and returns the finished run.

    Args:
        main: The function ``main`` of an example.
        words: Its options on the command line.
        folder: The folder of the run.

    Raises:
        SystemExit: If training was interrupted; the same command goes on later.
    """
    resume = ("--resume",) if (folder / "checkpoint").exists() else ()
    if status := main([*map(str, words), "--out", str(folder), *resume]):
        raise SystemExit(status)
    return Run(None, folder)


def write(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    """Writes rows with the same keys to a CSV, and returns its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return path


def read(path: Path) -> list[dict[str, str]]:
    """Returns the rows of a CSV."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def group(rows: Sequence[Mapping[str, Any]], x: str, y: str) -> dict[float, NDArray[Any]]:
    """Returns the values of column ``y`` for each value of column ``x``, which is increasing."""
    found: dict[float, list[float]] = {}
    for row in rows:
        found.setdefault(float(row[x]), []).append(float(row[y]))
    return {key: np.asarray(found[key]) for key in sorted(found)}


def interval(
    values: NDArray[Any], statistic: Callable[..., Any] = np.mean, draws: int = 2_000
) -> tuple[float, float]:
    """Returns the 95 % percentile bootstrap interval of a statistic of independent values.

    Args:
        values: One value for each seed, ``[S]``.
        statistic: A function with an argument ``axis``, such as ``np.mean`` or ``np.median``.
        draws: The number of bootstrap samples.

    Example:
        >>> interval(np.asarray([3.0, 3.0, 3.0]))
        (3.0, 3.0)
    """
    rng = np.random.default_rng(0)
    samples = rng.choice(values, (draws, len(values)))
    low, high = np.quantile(statistic(samples, axis=1), (0.025, 0.975))
    return float(low), float(high)


def spread(values: NDArray[Any], form: str = ".2f", statistic: Callable[..., Any] = np.mean) -> str:
    """Returns a statistic of independent values with its interval, for a table.

    Example:
        >>> spread(np.asarray([1.0, 1.0, 1.0]))
        '1.00 (1.00 to 1.00)'
    """
    low, high = interval(values, statistic)
    return f"{statistic(values, axis=0):{form}} ({low:{form}} to {high:{form}})"


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a table in markdown, with the first column aligned to the left."""
    rule = ["---", *("---:" for _ in header[1:])]
    return "\n".join(f"| {' | '.join(line)} |" for line in (header, rule, *rows))


def curves(
    rows: Sequence[Mapping[str, Any]], agents: Sequence[str], y: str
) -> dict[str, NDArray[Any]]:
    """Returns, by agent, the values of column ``y`` at each step of each seed, ``[P, S]``."""
    return {
        agent: np.stack(
            [*group([row for row in rows if row["agent"] == agent], "step", y).values()]
        )
        for agent in agents
    }


def stages(
    values: Mapping[str, NDArray[Any]], parts: Mapping[str, slice], form: str = ".2f"
) -> list[list[str]]:
    """Returns the means of two agents in parts of their runs, and the difference seed by seed.

    Args:
        values: By agent, the values at each step of each seed, ``[P, S]``.
        parts: By name, which of the steps are meant.
        form: How to write a number.

    Returns:
        A row of a table for each agent, and one for the second agent minus the first; intervals
        are over the seeds.
    """
    first, second = values.values()
    return [
        [name, *(spread(curve[part].mean(axis=0), form) for part in parts.values())]
        for name, curve in (*values.items(), ("difference", second - first))
    ]


def figure(columns: int) -> tuple[Figure, NDArray[Any]]:
    """Returns a figure with panels side by side, at the size at which a page shows it."""
    canvas = Figure(figsize=(4.0 * columns if columns > 1 else 6.4, 3.8), layout="constrained")
    panels: Any = canvas.subplots(1, columns, squeeze=False)[0]
    for panel in panels:
        panel.grid(alpha=0.3)
    return canvas, panels


def draw_mean(
    panel: Any,
    curve: Mapping[float, NDArray[Any]],
    label: str,
    number: int,
    statistic: Callable[..., Any] = np.mean,
) -> None:
    """Draws a statistic of each group of values as a line, and its interval as a band."""
    x, color = list(curve), COLORS[number]
    middle = [statistic(values, axis=0) for values in curve.values()]
    low, high = zip(*(interval(values, statistic) for values in curve.values()), strict=True)
    panel.plot(x, middle, marker=MARKERS[number], markersize=4, color=color, label=label)
    panel.fill_between(x, low, high, color=color, alpha=0.2, linewidth=0)


def save(canvas: Figure, path: Path) -> None:
    """Writes the figure as an SVG beside the table at ``path``; it depends on the numbers only."""
    with matplotlib.rc_context({"svg.hashsalt": path.stem, "svg.fonttype": "none"}):
        canvas.savefig(path.with_suffix(".svg"), metadata={"Date": None})

"""What a run shows: a progress bar while it goes, then a table and a learning curve."""

import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from matplotlib.colors import TABLEAU_COLORS
from matplotlib.figure import Figure
from numpy.typing import NDArray
from tqdm import tqdm


class Progress:
    """A bar of environment steps with steps per second and the latest return.

    Args:
        total: Environment steps in all.
        initial: Those done before, when a run is resumed.
        unit: What else to count.
    """

    def __init__(self, total: int, initial: int = 0, unit: str = " steps") -> None:
        self._bar: Any = tqdm(
            total=total,
            initial=initial,
            unit=unit,
            unit_scale=True,
            file=sys.stderr,
            dynamic_ncols=True,
        )

    def __enter__(self) -> "Progress":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bar.close()

    def phase(self, name: str) -> None:
        """Say what is going on."""
        self._bar.set_description(name)

    def expect(self, total: int) -> None:
        """Change how many steps there will be in all."""
        self._bar.total = total

    def advance(self, steps: int, mean_return: float) -> None:
        """Count ``steps`` more; the return is shown unless it is NaN."""
        if not np.isnan(mean_return):
            self._bar.set_postfix_str(f"return {mean_return:.1f}", refresh=False)
        self._bar.update(steps)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in plain text, its columns aligned to the right.

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


def plot_learning_curve(path: Path, steps: NDArray[Any], returns: NDArray[Any], title: str) -> None:
    """Draw the return of each seed and their mean over the environment steps.

    Args:
        path: The PNG to write.
        steps: Environment steps per seed, ``[P]``.
        returns: Mean return of the episodes that ended there, ``[P, seeds]``; NaN where none did.
        title: Stands above the axes.
    """
    plot_groups(
        path,
        steps,
        {"": returns},
        title=title,
        xlabel="environment steps per seed",
        ylabel="return while training",
    )


def plot_groups(
    path: Path,
    x: NDArray[Any],
    groups: dict[str, NDArray[Any]],
    *,
    title: str,
    xlabel: str,
    ylabel: str,
) -> None:
    """Draw curves of several seeds and their mean, for one group of seeds or to compare some.

    Args:
        path: The PNG to write.
        x: Where the points lie, ``[P]``.
        groups: By what to call them, the values of each group's seeds, ``[P, seeds]``; NaN where
            there is none.
        title: Stands above the axes.
        xlabel: Stands below them.
        ylabel: Stands left of them.
    """
    figure = Figure(figsize=(7.0, 4.2), layout="constrained")
    axes: Any = figure.add_subplot()
    for (name, values), color in zip(groups.items(), TABLEAU_COLORS, strict=False):
        for seed in range(values.shape[1]):
            known = ~np.isnan(values[:, seed])
            axes.plot(
                x[known],
                values[known, seed],
                color=color,
                alpha=0.35,
                linewidth=0.9,
                label=f"{name}, one seed".lstrip(", ") if seed == 0 else None,
            )
        known = ~np.isnan(values).all(axis=1)
        if values.shape[1] > 1 and known.any():
            mean = np.nanmean(values[known], axis=1)
            label = f"{name}, mean of {values.shape[1]}".lstrip(", ")
            axes.plot(x[known], mean, color=color, linewidth=2.0, label=label)
    axes.set(title=title, xlabel=xlabel, ylabel=ylabel)
    axes.grid(alpha=0.3)
    axes.legend(loc="best")
    axes.margins(x=0.01)
    figure.savefig(path, dpi=150)

"""The time of each operation against the number of slots, as a picture."""

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.harness import RowResult, import_library

COLUMNS = 3
COLORS = {"jaxbuf": "#c1440e", "flashbax": "#2f5d8a"}


def growth_rows(results: Sequence[RowResult]) -> dict[str, RowResult]:
    """The rows that show how the time grows, by the library they are about."""
    found = {re.search(r"growth-(jaxbuf|flashbax)$", result.row.name): result for result in results}
    return {match[1]: result for match, result in found.items() if match and result.timings}


def growth(results: Sequence[RowResult], path: Path) -> bool:
    """Draws every operation of the growth rows, in the format that the suffix names.

    Lines are medians, bands go from quartile to quartile, and dots are the floors.

    Args:
        results: The rows of a benchmark.
        path: Where the picture goes.

    Returns:
        Whether there was anything to draw.

    Raises:
        Unavailable: If there is no matplotlib.
    """
    rows = growth_rows(results)
    if not rows:
        return False
    matplotlib = import_library("matplotlib")
    figures = import_library("matplotlib.figure")
    operations = list(dict.fromkeys(name for result in rows.values() for name in result.timings))
    lines = -(-(len(operations) + 1) // COLUMNS)
    figure = figures.Figure(figsize=(3.2 * COLUMNS, 2.5 * lines), layout="constrained")
    panels = figure.subplots(lines, COLUMNS, squeeze=False).ravel()
    for panel, operation in zip(panels, operations, strict=False):
        for library, result in rows.items():
            _draw(panel, result, operation, library)
        panel.set(xscale="log", yscale="log", title=operation)
        panel.set_xscale("log", base=2)
        panel.grid(alpha=0.3)
    for panel in panels[len(operations) :]:
        panel.set_axis_off()
    figure.supxlabel("slots", fontsize="medium")
    figure.supylabel("µs", fontsize="medium")
    handles, labels = panels[0].get_legend_handles_labels()
    panels[-1].legend(handles, labels, loc="center", frameon=False)
    # The same numbers give the same file.
    with matplotlib.rc_context({"svg.hashsalt": "growth", "svg.fonttype": "none"}):
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    return True


def _draw(panel, result: RowResult, operation: str, library: str) -> None:
    timing = result.timings.get(operation)
    if timing is None:
        return
    names = list(timing.microseconds)
    slots = [int(name.rsplit("-", 1)[1]) for name in names]
    low, middle, high = np.transpose(
        [np.quantile(timing.microseconds[name], (0.25, 0.5, 0.75)) for name in names]
    )
    color = COLORS[library]
    panel.plot(slots, middle, marker="o", markersize=3, color=color, label=library)
    panel.fill_between(slots, low, high, color=color, alpha=0.2, linewidth=0)
    limits = result.limits.get(operation, {})
    floors = [limits[name].floor for name in names if name in limits]
    if library == "jaxbuf" and all(floors):
        panel.plot(slots, floors, ":", color="#777777", label="floor")

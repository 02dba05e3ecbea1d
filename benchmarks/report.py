"""The results of a run: as a table, as JSON, and beside an earlier one.

A file of results has the command line, the machine, and for every row its operations. Of each
operation it has, by the name of the library, `us`, the median time in microseconds, `ratio`, that
time over the one of the row's `reference` (a quartile, the median, a quartile of the turns; of
several runs the least median, the median, the largest), and `floor`, the least microseconds that
this machine needs.
"""

import importlib.metadata
import json
import os
import platform
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

import jaxbuf
from benchmarks.harness import RowResult

DISTRIBUTIONS = (
    "jax",
    "jaxlib",
    "jax-cuda12-plugin",
    "jax-cuda13-plugin",
    "libtpu",
    "numpy",
    "flashbax",
    "cpprb",
)
MOVED = 1.2
"""A ratio that changes by a smaller factor is no news."""


def machine() -> dict[str, str]:
    """Returns the machine, its load, and the versions that matter to times."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "CPU": names[0] if names else platform.processor() or platform.machine(),
        "cores": str(os.cpu_count()),
        "load average before": f"{os.getloadavg()[0]:.1f}",
        "device": f"{jax.default_backend()} ({jax.devices()[0].device_kind})",
        **versions(),
    }


def versions() -> dict[str, str]:
    """Returns the versions of Python and of the libraries that are there."""
    found = {"Python": platform.python_version(), "jaxbuf": jaxbuf.__version__}
    for name in DISTRIBUTIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def as_dict(result: RowResult) -> dict[str, Any]:
    """Returns what was found in a row, as a file of results has it."""
    row, operations = result.row, dict[str, Any]()
    for name, timing in result.timings.items():
        libraries, floors = list(timing.microseconds), result.floors.get(name, {})
        peers = [peer for peer in libraries if timing.compared and peer != timing.reference]
        found = {
            "us": {library: _short(timing.median(library)) for library in libraries},
            "ratio": {peer: [*map(_short, timing.ratio(peer))] for peer in peers},
            "floor": {library: _short(floor) for library, floor in floors.items()},
        }
        operations[name] = {what: values for what, values in found.items() if values}
    facts: dict[str, dict[str, str]] = {}
    for library, known in result.facts.items():
        for name, value in known.items():
            facts.setdefault(name, {})[library] = value
    more = {"facts": facts, "skipped": result.skipped, "unequal": result.unequal}
    return {
        "title": row.title,
        "reference": row.reference,
        "operations": operations,
        **{name: value for name, value in more.items() if value},
    }


def _short(number: float) -> float:
    short = float(f"{number:.4g}")
    return int(short) if short == int(short) else short


def as_json(command: str, facts: Mapping[str, str], rows: Mapping[str, Any]) -> str:
    """The text of a file of results, in which an operation and a fact are one line each."""
    document = {"command": command, "machine": facts, "rows": rows}
    text = json.dumps(document, indent=1, separators=(",", ":"), ensure_ascii=False)
    text = re.sub(r"\n {4}(?=[}\]])", "", re.sub(r"\n {5,}", "", text))
    return f"{text}\n"


def aligned(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A markdown table that is also aligned as plain text."""
    widths = [max(map(len, column)) for column in zip(header, *lines, strict=True)]
    marks = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]

    def line(cells: Sequence[str]) -> str:
        padded = [cells[0].ljust(widths[0])]
        padded += [cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True)]
        return f"| {' | '.join(padded)} |"

    return "\n".join([line(header), line(marks), *map(line, lines)])


def columns(row: Mapping[str, Any], *, short: bool = False) -> dict[str, dict[str, str]]:
    """The cells of a row of the benchmark, operation by operation, under the heads of columns.

    Args:
        row: As a file of results has it.
        short: Whether to leave out the times of others than the reference, and their floors.
    """
    found, reference = row["operations"].values(), row["reference"]
    libraries = list(dict.fromkeys(name for one in found for name in one["us"]))
    libraries.sort(key=lambda name: name != reference)
    floors = list(dict.fromkeys(name for one in found for name in one.get("floor", ())))
    table: dict[str, dict[str, str]] = {}
    for operation, one in row["operations"].items():
        cells = table[operation] = {}
        for library in libraries:
            if library == reference or not short:
                cells[f"{library}, µs"] = _microseconds(one["us"].get(library))
            if library != reference:
                ratio, time = one.get("ratio", {}).get(library), one["us"].get(library)
                alone = f"{_microseconds(time)} µs" if short and time is not None else "–"
                cells[f"{library} / {reference}"] = spread(ratio) if ratio else alone
        for library in [reference][: len(floors)] if short else floors:
            head = "floor, µs" if short else f"{library}: floor, µs"
            cells[head] = _microseconds(one.get("floor", {}).get(library))
    return table


def _microseconds(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def spread(ratio: Sequence[float]) -> str:
    """A ratio with its bounds."""
    low, middle, high = ratio
    return f"{middle:.2f} ({low:.2f}–{high:.2f})"


def section(name: str, row: Mapping[str, Any]) -> str:
    """One row of the benchmark as a section of markdown."""
    parts = [f"### {name}\n\n{row['title']}."]
    if table := columns(row):
        header = ["operation", *next(iter(table.values()))]
        parts.append(aligned(header, [[name, *cells.values()] for name, cells in table.items()]))
    if facts := row.get("facts"):
        libraries = list(dict.fromkeys(name for known in facts.values() for name in known))
        lines = [
            [name, *(known.get(library, "–") for library in libraries)]
            for name, known in facts.items()
        ]
        parts.append(aligned(["besides", *libraries], lines))
    for library, reason in row.get("skipped", {}).items():
        parts.append(f"{library} is left out: {reason}.")
    for library, reason in row.get("unequal", {}).items():
        parts.append(f"{library} FAILED the check of equal work: {reason}.")
    return "\n\n".join(parts)


def moved(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[tuple[str, str, str, bool], str]:
    """The ratios whose quartiles are apart, and that changed by more than a fifth.

    Args:
        old: The rows of an earlier file of results.
        new: The rows of this run. What only one of them has is not compared.

    Returns:
        A line for each ratio, by its row, operation and library, and whether it fell.
    """
    found: dict[tuple[str, str, str, bool], str] = {}
    for row in new.keys() & old.keys():
        for operation, one in new[row]["operations"].items():
            before = old[row]["operations"].get(operation, {}).get("ratio", {})
            for peer, now in one.get("ratio", {}).items():
                was = before.get(peer, now)
                fell = now[1] < was[1]
                (low, _, _), (_, _, high) = (was, now) if fell else (now, was)
                less, more = sorted((was[1], now[1]))
                if high < low and more > MOVED * less:
                    found[row, operation, peer, fell] = (
                        f"{row}: {operation}: {peer} / {new[row]['reference']} was "
                        f"{spread(was)} and is {spread(now)}"
                    )
    return found

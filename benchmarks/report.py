"""Tables of the results, for the terminal, as markdown and as JSON."""

import dataclasses
import importlib.metadata
import json
import os
import platform
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from benchmarks.harness import PURE, REFERENCE, Limit, Options, RowResult, Timing
from benchmarks.targets import verdicts

NOTES = "## What bounds these numbers"
"""The heading of the notes, which a new report keeps."""

DISTRIBUTIONS = (
    "jaxbuf",
    "jax",
    "jaxlib",
    "jax-cuda12-plugin",
    "jax-cuda13-plugin",
    "libtpu",
    "numpy",
    "flashbax",
    "cpprb",
)


def machine() -> dict[str, str]:
    """Returns the machine, its load, and the versions that matter to times."""
    facts = {
        "CPU": _cpu_model(),
        "cores": str(os.cpu_count()),
        "load average before": f"{os.getloadavg()[0]:.1f}",
        "device": f"{jax.default_backend()} ({jax.devices()[0].device_kind})",
    }
    return facts | versions()


def versions() -> dict[str, str]:
    """Returns the versions of Python and of the libraries that are there."""
    found = {"Python": platform.python_version()}
    for name in DISTRIBUTIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown"
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _microseconds(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _timing_cells(timing: Timing, libraries: Sequence[str]) -> list[str]:
    cells: list[str] = []
    for library in libraries:
        timed = library in timing.microseconds
        cells.append(_microseconds(timing.median(library)) if timed else "–")
        if library == timing.reference:
            continue
        if timed and timing.compared:
            low, middle, high = timing.ratio(library)
            cells.append(f"**{middle:.2f}** ({low:.2f}–{high:.2f})")
        else:
            cells.append("–")
    return cells


def aligned(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A markdown table that is also aligned as plain text."""
    widths = [max(map(len, column)) for column in zip(header, *lines, strict=True)]
    marks = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]

    def line(cells: Sequence[str]) -> str:
        padded = [cells[0].ljust(widths[0])]
        padded += [cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True)]
        return f"| {' | '.join(padded)} |"

    return "\n".join([line(header), line(marks), *map(line, lines)])


def _limits_table(result: RowResult, libraries: Sequence[str]) -> str | None:
    """Returns a table of the floor under each operation, the distance from it, and its memory."""
    header, columns = ["limits"], list[list[str]]()
    for library in libraries:
        known = {name: found.get(library, Limit()) for name, found in result.limits.items()}
        told = library == result.row.reference or not result.row.alike
        if told and any(limit.floor is not None for limit in known.values()):
            header.append(f"{library}: floor, µs")
            columns.append([_floor_cell(result, name, library) for name in result.timings])
        if any(limit.memory is not None for limit in known.values()):
            header.append(f"{library}: memory, KiB")
            columns.append([_memory_cell(known.get(name, Limit())) for name in result.timings])
    if not columns:
        return None
    return aligned(header, list(zip(result.timings, *columns, strict=True)))


def _floor_cell(result: RowResult, name: str, library: str) -> str:
    floor = result.limits[name].get(library, Limit()).floor
    if not floor or library not in result.timings[name].microseconds:
        return "–"
    return f"{_microseconds(floor)} (×{result.timings[name].median(library) / floor:.1f})"


def _memory_cell(limit: Limit) -> str:
    return "–" if limit.memory is None else f"{limit.memory / 1024:,.1f}"


def row_markdown(result: RowResult) -> str:
    """One row of the benchmark as a section of markdown."""
    measured = {name for timing in result.timings.values() for name in timing.microseconds}
    libraries = [name for name in result.row.builders if name in measured]
    parts = [f"### {result.row.name}\n\n{result.row.title}."]
    if result.timings:
        header = ["operation"]
        for library in libraries:
            header.append(f"{library}, µs")
            if library != result.row.reference:
                header.append(f"{library} / {result.row.reference}")
        lines = [
            [operation, *_timing_cells(timing, libraries)]
            for operation, timing in result.timings.items()
        ]
        parts.append(aligned(header, lines))
        if table := _limits_table(result, libraries):
            parts.append(table)
    names = list(dict.fromkeys(name for facts in result.facts.values() for name in facts))
    if names:
        lines = [
            [name, *(result.facts[library].get(name, "–") for library in libraries)]
            for name in names
        ]
        parts.append(aligned(["besides", *libraries], lines))
    for library, reason in result.skipped.items():
        parts.append(f"{library} is left out: {reason}.")
    for library, reason in result.unequal.items():
        parts.append(f"{library} FAILED the check of equal work: {reason}.")
    return "\n\n".join(parts)


def targets_markdown(results: Sequence[RowResult], options: Options) -> str:
    """Returns the targets, and which of them are met, as a section of markdown."""
    if options.quick or options.capacity:
        return "## Targets\n\nTargets are for full buffers: a trial says nothing about them."
    found = verdicts(results)
    met = sum(verdict.met for verdict in found)
    purely = sum(verdict.met_purely for verdict in found)
    measured = sum(verdict.values is not None for verdict in found)
    header = ["row", "what", "wanted", REFERENCE, "", PURE, ""]
    table = aligned(header, [verdict.cells for verdict in found])
    return (
        f"## Targets\n\n{met} of {measured} measured targets are met, and {purely} without kernels "
        f"in C++ ({PURE}). A target is met if every run meets it.\n\n{table}"
    )


def _notes(path: Path) -> str:
    """Returns the notes below the tables of an earlier report."""
    if not path.exists():
        return ""
    _, heading, text = path.read_text().partition(f"\n{NOTES}")
    return f"\n{heading.lstrip()}{text}" if heading else ""


def markdown(
    results: Sequence[RowResult],
    options: Options,
    command: str,
    facts: Mapping[str, str],
    picture: str | None = None,
) -> str:
    """Returns the whole report, which says how to read and repeat it.

    Args:
        results: The rows.
        options: The options of the run.
        command: The command line that repeats it.
        facts: The output of `machine` before the run.
        picture: A picture to show, relative to the report, or None.
    """
    lines = "\n".join(f"| {name} | {value} |" for name, value in facts.items())
    scheduler = (
        "" if options.scheduler == "default" else f" XLA:CPU scheduler: {options.scheduler}."
    )
    sections = "\n\n".join(row_markdown(result) for result in results)
    turns, bounds = f"{options.turns} interleaved turns", "the quartiles"
    if options.runs > 1:
        turns = f"{options.runs} runs of {turns}"
        bounds = "the smallest and the largest median of a run"
    shown = f"## Growth\n\n![Time of each operation against slots]({picture})\n\n"
    return f"""# Benchmark results

Times are microseconds per operation, medians over {turns}. A ratio is the time of
a library divided by the time of {REFERENCE}, or of another reference where the column says so:
above 1, {REFERENCE} is faster. It is the median of the ratios within a turn; in parentheses are
{bounds}.
"python" is a call from Python, timed until its result is there. "scan" is one iteration inside a
compiled `lax.scan`.{scheduler} The docstrings in `benchmarks/rows` say what exactly is compared.

A floor is the least time that an operation can take on this machine, by the data that it has to
move and, from Python, by empty calls (`benchmarks/limits.py`). In parentheses is the time of the
library divided by its floor. Memory is the memory of the compiled program beyond the state,
including its outputs.

Repeat with `{command}`.

| machine | |
| --- | --- |
{lines}

{targets_markdown(results, options)}

{shown if picture else ""}## Rows

{sections}
"""


def write(path: Path, text: str) -> None:
    """Writes a report, and keeps the notes below the tables of the previous one."""
    path.write_text(text + _notes(path))


def section(text: str, heading: str) -> str:
    """Returns what is below a heading, up to the next one; nothing if there is no such heading."""
    _, _, below = text.partition(f"\n{heading}\n")
    return re.split("^#", below, maxsplit=1, flags=re.MULTILINE)[0]


def write_section(path: Path, heading: str, text: str) -> None:
    """Replaces what is below a heading of a file, which comes last if it is not there yet."""
    whole = path.read_text() if path.exists() else ""
    if f"\n{heading}\n" not in whole:
        whole = f"{whole.rstrip()}\n\n{heading}\n"
    before, _, below = whole.partition(f"\n{heading}\n")
    rest = below.removeprefix(section(whole, heading))
    path.write_text(f"{before}\n{heading}\n\n{text}\n" + (f"\n{rest}" if rest else ""))


def as_json(
    results: Sequence[RowResult], options: Options, command: str, facts: Mapping[str, str]
) -> str:
    """Everything measured, every turn included; the arguments are those of `markdown`."""
    document = {
        "command": command,
        "machine": dict(facts),
        "options": {**dataclasses.asdict(options), "libraries": sorted(options.libraries or ())},
        "rows": {result.row.name: _row_json(result) for result in results},
        "targets": [verdict.cells for verdict in verdicts(results)],
    }
    return json.dumps(document, indent=1)


def _row_json(result: RowResult) -> dict[str, Any]:
    return {
        "title": result.row.title,
        "operations": {name: _timing_json(timing) for name, timing in result.timings.items()},
        "limits": {
            name: {library: dataclasses.asdict(limit) for library, limit in found.items()}
            for name, found in result.limits.items()
        },
        "facts": result.facts,
        "skipped": result.skipped,
        "unequal": result.unequal,
    }


def _timing_json(timing: Timing) -> Mapping[str, Any]:
    peers = [name for name in timing.microseconds if name != timing.reference]
    return {
        "microseconds": {name: list(times) for name, times in timing.microseconds.items()},
        "fastest": {name: float(times.min()) for name, times in timing.microseconds.items()},
        "median": {name: timing.median(name) for name in timing.microseconds},
        "ratio": {peer: timing.ratio(peer) for peer in peers} if timing.compared else {},
        "runs": timing.runs,
    }

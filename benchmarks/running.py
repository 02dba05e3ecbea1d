"""Runs rows, and writes what is known after each."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks import limits, report
from benchmarks.harness import Options, Row, RowResult, merged, run_row


def progress_bar(total: int, unit: str) -> tqdm:
    """A bar on stderr, which a file gets a line of only now and then."""
    interval = 0.5 if sys.stderr.isatty() else 10.0
    return tqdm(total=total, unit=unit, dynamic_ncols=True, mininterval=interval)


def measure(
    rows: Sequence[Row], options: Options, command: str = "", path: Path | None = None
) -> dict[str, Any]:
    """Runs rows, as often as asked for, and prints each.

    Args:
        rows: The rows.
        options: What to run of them, and how often.
        command: The command line.
        path: The file that gets what is known after each row, or None.

    Returns:
        What was found in all runs, as it is in the file, by the names of the rows.
    """
    turns = options.turns * sum(
        options.wants(row.name, operation) for row in rows for operation in row.operations
    )
    runs: dict[str, list[RowResult]] = {row.name: [] for row in rows}
    found: dict[str, Any] = {}
    facts = report.machine()
    with progress_bar(turns * options.runs, "turn") as bar:

        def progress(what: str, done: int) -> None:
            bar.set_description(what, refresh=done == 0)
            bar.update(done)

        for _ in range(options.runs):
            limits.forget()
            for row in rows:
                runs[row.name].append(run_row(row, options, progress))
                found[row.name] = report.as_dict(merged(runs[row.name]))
                text = report.section(row.name, found[row.name])
                bar.write(f"\n{text}\n", file=sys.stdout)
                if path:
                    machine = {**facts, **limits.facts()}
                    path.write_text(report.as_json(command, machine, found))
    return found

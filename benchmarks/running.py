"""Runs rows, and writes what is known after each."""

import dataclasses
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tqdm import tqdm

from benchmarks import limits, plot, report
from benchmarks.harness import Options, Row, RowResult, Unavailable, merged, run_row


@dataclasses.dataclass(frozen=True)
class Outputs:
    """The files of the results, and the command that repeats them.

    Attributes:
        json: File for every measured time, or None.
        markdown: File for the tables, or None.
        plot: File for the picture of the growth rows, or None.
        command: The command line without the names of these files.
    """

    json: Path | None
    markdown: Path | None
    plot: Path | None
    command: str

    def write(
        self, results: Sequence[RowResult], options: Options, facts: Mapping[str, str]
    ) -> None:
        """Writes what was measured so far to those files that were asked for."""
        picture = self._draw(results)
        if not (self.json or self.markdown):
            return
        facts = {**facts, **limits.facts()}
        if self.json:
            self.json.write_text(report.as_json(results, options, self.command, facts))
        if self.markdown:
            text = report.markdown(results, options, self.command, facts, picture)
            report.write(self.markdown, text)

    def _draw(self, results: Sequence[RowResult]) -> str | None:
        """Draws what grows; returns where that is, seen from the tables."""
        if self.plot is None:
            return None
        try:
            drawn = plot.growth(results, self.plot)
        except Unavailable as reason:
            print(f"there is no picture: {reason}", file=sys.stderr)
            return None
        return os.path.relpath(self.plot, self.markdown.parent) if drawn and self.markdown else None


def progress_bar(total: int, unit: str) -> tqdm:
    """A bar on stderr, which a file gets a line of only now and then."""
    interval = 0.5 if sys.stderr.isatty() else 10.0
    return tqdm(total=total, unit=unit, dynamic_ncols=True, mininterval=interval)


def measure(rows: Sequence[Row], options: Options, outputs: Outputs) -> list[RowResult]:
    """Runs rows, as often as asked for, and writes what is known after each.

    Returns:
        A result for every row, of all runs.
    """
    turns = options.turns * sum(
        options.wants(row.name, operation) for row in rows for operation in row.operations
    )
    runs: dict[str, list[RowResult]] = {row.name: [] for row in rows}
    results: list[RowResult] = []
    facts = report.machine()
    with progress_bar(turns * options.runs, "turn") as bar:

        def progress(what: str, done: int) -> None:
            bar.set_description(what, refresh=done == 0)
            bar.update(done)

        for _ in range(options.runs):
            limits.forget()
            for row in rows:
                runs[row.name].append(run_row(row, options, progress))
                results = [merged(found) for found in runs.values() if found]
                bar.write(f"\n{report.row_markdown(merged(runs[row.name]))}\n", file=sys.stdout)
                outputs.write(results, options, facts)
    return results

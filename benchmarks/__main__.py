"""Command line of the benchmark: ``python -m benchmarks``."""

import argparse
import dataclasses
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tqdm import tqdm

from benchmarks import limits, plot, report
from benchmarks.harness import Options, Row, RowResult, Unavailable, merged, run_row
from benchmarks.rows import all_rows


@dataclasses.dataclass(frozen=True)
class Outputs:
    """Where the results go, and the command that repeats them.

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


def parse(arguments: Sequence[str]) -> tuple[Options, Outputs]:
    """Reads the command line.

    Args:
        arguments: Without the name of the program.

    Returns:
        What to run, and where the results go.
    """
    files = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    files.add_argument("--json", type=Path, metavar="FILE", help="write every measured time")
    files.add_argument("--write", type=Path, metavar="PATH", help="write the tables as markdown")
    files.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help="draw the growth rows, by default as growth.svg beside the tables",
    )
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="jaxbuf and its peers, side by side.",
        parents=[files],
        allow_abbrev=False,
    )
    parser.add_argument(
        "--only", default="", metavar="PATTERN", help="regular expression searched in ROW/OPERATION"
    )
    parser.add_argument(
        "--quick", action="store_true", help="small buffers, few repeats: a trial, not a result"
    )
    parser.add_argument("--capacity", type=int, metavar="N", help="slots of every row")
    parser.add_argument("--repeats", type=int, metavar="R", help="interleaved turns per operation")
    parser.add_argument(
        "--runs", type=int, default=1, metavar="N", help="do all of it so many times in a row"
    )
    parser.add_argument(
        "--libraries", metavar="A,B", help="run these libraries only, separated by commas"
    )
    parser.add_argument(
        "--scheduler",
        choices=("default", "memory"),
        default="default",
        help="XLA:CPU scheduler of what the benchmark compiles, the same for every library",
    )
    parser.add_argument(
        "--wait",
        choices=("call", "block"),
        default="call",
        help="from Python, wait for each result, or only for the last of a block",
    )
    given = parser.parse_args(arguments)
    try:
        re.compile(given.only)
    except re.error as error:
        parser.error(f"--only {given.only!r} is not a regular expression: {error}")
    for name in ("capacity", "repeats", "runs"):
        if getattr(given, name) is not None and getattr(given, name) < 1:
            parser.error(f"--{name} must be at least 1")
    options = Options(
        quick=given.quick,
        capacity=given.capacity,
        scheduler=given.scheduler,
        wait=given.wait,
        only=given.only,
        libraries=frozenset(given.libraries.split(",")) if given.libraries else None,
        repeats=given.repeats,
        runs=given.runs,
    )
    _, rest = files.parse_known_args(arguments)
    command = shlex.join(["python", "-m", "benchmarks", *rest])
    picture = given.plot or (given.write and given.write.with_name("growth.svg"))
    return options, Outputs(given.json, given.write, picture, command)


def main(arguments: Sequence[str]) -> int:
    """Runs the benchmark; returns 1 if a library failed the check of equal work, else 0."""
    options, outputs = parse(arguments)
    try:
        rows = [
            row
            for row in all_rows(options)
            if any(options.wants(row.name, operation) for operation in row.operations)
        ]
    except ValueError as error:
        print(f"python -m benchmarks: {error}", file=sys.stderr)
        return 2
    if not rows:
        print(f"python -m benchmarks: nothing matches --only {options.only}", file=sys.stderr)
        return 2
    known = {library for row in rows for library in row.builders}
    if unknown := (options.libraries or frozenset()) - known:
        print(
            f"python -m benchmarks: no library {', '.join(sorted(unknown))} in these rows; "
            f"choose among {', '.join(sorted(known))}",
            file=sys.stderr,
        )
        return 2
    results = measure(rows, options, outputs)
    print(f"\n{report.targets_markdown(results)}")
    return int(any(result.unequal for result in results))


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
    interval = 0.5 if sys.stderr.isatty() else 10.0
    with tqdm(
        total=turns * options.runs, unit="turn", dynamic_ncols=True, mininterval=interval
    ) as bar:

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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

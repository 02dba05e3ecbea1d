"""Command line of the benchmark: ``python -m benchmarks``."""

import dataclasses
import json
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import tyro

from benchmarks import report
from benchmarks.harness import Options, Row
from benchmarks.rows import all_rows
from benchmarks.running import measure


@dataclasses.dataclass(frozen=True)
class Program:
    """A benchmark with a command line.

    Attributes:
        module: What `python -m` starts.
        about: What it does, in a line.
        rows: Makes its rows.
        json: Where the results go unless told otherwise.
    """

    module: str
    about: str
    rows: Callable[[Options], Sequence[Row]]
    json: Path


BENCHMARKS = Program(
    "benchmarks", "jaxbuf and its peers, side by side.", all_rows, Path("benchmark-cpu.json")
)


@dataclasses.dataclass(frozen=True)
class Arguments(Options):
    """The command line.

    Attributes:
        json: Write the results into this file, in place of one in this folder.
        against: Print what differs from this earlier file in two runs, and exit with 1 if anything
            does: ratios whose quartiles are apart, and that changed by more than a fifth. The
            results are then written only if `--json` says where.
    """

    json: Path | None = None
    against: Path | None = None


def parse(arguments: Sequence[str], program: Program = BENCHMARKS) -> Arguments:
    """Reads the command line, without the name of the program."""
    prog = f"python -m {program.module}"
    return tyro.cli(Arguments, prog=prog, description=program.about, args=arguments)


def main(arguments: Sequence[str], program: Program = BENCHMARKS) -> int:
    """Runs a benchmark; returns 1 if a library did unequal work, or a ratio moved, else 0."""
    given = parse(arguments, program)
    try:
        rows = _chosen(program.rows(given), given)
        old = json.loads(given.against.read_text())["rows"] if given.against else {}
    except (ValueError, OSError) as error:
        print(f"python -m {program.module}: {error}", file=sys.stderr)
        return 2
    command = shlex.join(["python", "-m", program.module, *arguments])
    path = given.json or (None if given.against else program.json)
    found = measure(rows, given, command, path)
    if moved := report.moved(old, found):
        print("some ratios moved: once more, to see whether they do so again")
        names = "|".join(re.escape(f"{row}/{operation}") for row, operation, *_ in moved)
        again = dataclasses.replace(given, only=f"^({names})$")
        later = report.moved(old, measure(_chosen(rows, again), again))
        moved = {key: line for key, line in sorted(later.items()) if key in moved}
        print(*moved.values(), sep="\n")
    return int(bool(moved) or any("unequal" in row for row in found.values()))


def _chosen(rows: Sequence[Row], options: Options) -> list[Row]:
    """The rows that the command line asks for.

    Raises:
        ValueError: If there are none, or not with these libraries.
    """
    chosen = [row for row in rows if any(options.wants(row.name, name) for name in row.operations)]
    if not chosen:
        raise ValueError(f"nothing matches --only {options.only}")
    known = {library for row in chosen for library in row.builders}
    if unknown := set(filter(None, options.libraries.split(","))) - known:
        raise ValueError(
            f"no library {', '.join(sorted(unknown))} in these rows; "
            f"choose among {', '.join(sorted(known))}"
        )
    return chosen


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

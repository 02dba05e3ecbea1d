"""Command line of the benchmark: ``python -m benchmarks``."""

import argparse
import dataclasses
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks import report
from benchmarks.harness import Options, Row
from benchmarks.rows import all_rows
from benchmarks.running import Outputs, measure


@dataclasses.dataclass(frozen=True)
class Program:
    """A benchmark with a command line.

    Attributes:
        module: What `python -m` starts.
        about: What it does, in a line.
        rows: Makes its rows.
        json: Where every measured time goes unless told otherwise; None for nowhere.
        markdown: Where the tables go unless told otherwise; None for nowhere.
    """

    module: str
    about: str
    rows: Callable[[Options], Sequence[Row]]
    json: Path | None = None
    markdown: Path | None = None


BENCHMARKS = Program("benchmarks", "jaxbuf and its peers, side by side.", all_rows)


def pattern(text: str) -> str:
    """Parses a value of `--only`, which must be a regular expression."""
    try:
        re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a regular expression: {error}") from None
    return text


def parse(arguments: Sequence[str], program: Program = BENCHMARKS) -> tuple[Options, Outputs]:
    """Reads the command line.

    Args:
        arguments: Without the name of the program.
        program: Whose they are.

    Returns:
        What to run, and where the results go.
    """
    files = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    files.add_argument(
        "--json", type=Path, metavar="FILE", default=program.json, help="write every measured time"
    )
    files.add_argument(
        "--write",
        type=Path,
        metavar="PATH",
        default=program.markdown,
        help="write the tables as markdown",
    )
    files.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help="draw the growth rows, by default as growth.svg beside the tables",
    )
    parser = argparse.ArgumentParser(
        prog=f"python -m {program.module}",
        description=program.about,
        parents=[files],
        allow_abbrev=False,
    )
    parser.add_argument(
        "--only",
        type=pattern,
        default="",
        metavar="PATTERN",
        help="regular expression searched in ROW/OPERATION",
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
    command = shlex.join(["python", "-m", program.module, *rest])
    picture = given.plot or (given.write and given.write.with_name("growth.svg"))
    return options, Outputs(given.json, given.write, picture, command)


def main(arguments: Sequence[str], program: Program = BENCHMARKS) -> int:
    """Runs a benchmark; returns 1 if a library failed the check of equal work, else 0."""
    options, outputs = parse(arguments, program)
    try:
        rows = _chosen(program.rows(options), options)
    except ValueError as error:
        print(f"python -m {program.module}: {error}", file=sys.stderr)
        return 2
    results = measure(rows, options, outputs)
    print(f"\n{report.targets_markdown(results, options)}")
    return int(any(result.unequal for result in results))


def _chosen(rows: Sequence[Row], options: Options) -> list[Row]:
    """The rows that the command line asks for.

    Raises:
        ValueError: If there are none, or not with these libraries.
    """
    chosen = [row for row in rows if any(options.wants(row.name, name) for name in row.operations)]
    if not chosen:
        raise ValueError(f"nothing matches --only {options.only}")
    known = {library for row in chosen for library in row.builders}
    if unknown := (options.libraries or frozenset()) - known:
        raise ValueError(
            f"no library {', '.join(sorted(unknown))} in these rows; "
            f"choose among {', '.join(sorted(known))}"
        )
    return chosen


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

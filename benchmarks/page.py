"""Makes `RESULTS.md` of the files in `benchmarks/results`: ``python -m benchmarks.page``.

``python -m benchmarks --json benchmarks/results/cpu.json`` makes one of them anew. What is below
the heading "What bounds these numbers" is written by hand, and stays.
"""

import csv
import json
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import report

FOLDER = Path(__file__).with_name("results")
PAGE = Path(__file__).with_name("RESULTS.md")
NOTES = "\n## What bounds these numbers\n"
PEERS = ("flashbax", "cpprb", "torchrl", "torchgfn", "numpy", "mpi4py")
"""Those that a reader might use instead; the other columns are jaxbuf in another way."""

INTRODUCTION = """
`python -m benchmarks.page` makes this page of the files in `benchmarks/results`, except for the
text at the end. Times are microseconds, medians over interleaved turns. A ratio is the time of a
library over that of the one in the first column of times: above 1, the latter is faster. It is the
median of the ratios within a turn; in parentheses are the quartiles. "python" is a call from
Python, timed until its result is there. "scan" is one iteration inside a compiled `lax.scan`.
"pure" is jaxbuf without kernels in C++. A floor is the least time that the machine needs to move
the data and, from Python, for empty calls (`benchmarks/limits.py`). Each library first has to show
that it does the same work. The docstrings in `benchmarks/rows` say what exactly is compared;
`python -m benchmarks --against FILE` names the ratios that are not those of an earlier file, such
as `benchmarks/results/cpu.json`. The files have more: the other times, the other operations,
and versions."""
COUNTED = """
What the compilers make of a cycle (add, sample, update) in a scan, without running it: kernels for
a GPU, and the cycles that XLA expects of a TPU. `benchmarks/compiled.py` explains them."""


def page(notes: str) -> str:
    """The whole page.

    Args:
        notes: What is written by hand, with its heading.
    """
    cpu, gpu = (json.loads((FOLDER / f"{name}.json").read_text()) for name in ("cpu", "gpu"))
    parts = [
        "# Benchmark results",
        _wrapped(INTRODUCTION),
        "## On a CPU",
        _provenance(cpu),
        *_tables(cpu["rows"]),
        "## Where jaxbuf takes longer",
        "The ratios below 1 of the tables above.",
        _losses(cpu["rows"]),
        "## On a GPU",
        _provenance(gpu),
        "The cycles; the file has the other operations.",
        *_tables(gpu["rows"], only="cycle"),
        "## Counted for a GPU and a TPU",
        _wrapped(COUNTED),
        *_counts("compiled-gpu.csv", ("kernels", "waits")),
        *_counts("compiled-tpu.csv", ("cycles", "ops")),
    ]
    return "\n\n".join(parts) + f"\n{notes}"


def _provenance(document: Mapping[str, Any]) -> str:
    facts = [f"{name} {value}" for name, value in document["machine"].items()]
    facts += dict.fromkeys(
        " ".join(version.split())
        for row in document["rows"].values()
        for version in row.get("facts", {}).get("versions", {}).values()
    )
    return _wrapped(f"Repeat with `{document['command']}`. Measured with: {'; '.join(facts)}.")


def _wrapped(text: str) -> str:
    return textwrap.fill(text.strip(), 120, break_long_words=False, break_on_hyphens=False)


def _tables(rows: Mapping[str, Any], only: str = "") -> Iterable[str]:
    """A table of all rows with the same columns, below what they are about.

    Args:
        rows: Those of a file.
        only: What the names of the operations have in them.
    """
    groups: dict[tuple[str, ...], list[str]] = {}
    tables = {name: report.columns(row, short=True) for name, row in rows.items()}
    for name, table in tables.items():
        groups.setdefault(tuple(next(iter(table.values()), ())), []).append(name)
    for heads, names in groups.items():
        yield "\n".join(_about(name, rows[name]) for name in names)
        yield _table(
            ["row", "operation", *heads],
            [
                [f"`{name}`" * (place == 0), operation, *tables[name][operation].values()]
                for name in names
                for place, operation in enumerate(one for one in tables[name] if only in one)
            ],
        )


def _about(name: str, row: Mapping[str, Any]) -> str:
    missing = {**row.get("skipped", {}), **row.get("unequal", {})}
    without = [f" {library} is left out: {reason}." for library, reason in missing.items()]
    return f"* `{name}`: {row['title']}.{''.join(without)}"


def _losses(rows: Mapping[str, Any]) -> str:
    lines: dict[tuple[str, str], list[str]] = {}
    for name, row in rows.items():
        for operation, one in row["operations"].items():
            for peer, ratio in one.get("ratio", {}).items():
                if peer in PEERS and row["reference"] == "jaxbuf" and ratio[1] < 1:
                    lines.setdefault((name, peer), []).append(f"{operation} {ratio[1]:.2f}")
    return _table(
        ["row", "library", "its time over that of jaxbuf"],
        [[*key, "; ".join(found)] for key, found in lines.items()],
    )


def _counts(name: str, what: Sequence[str]) -> Iterable[str]:
    """The cycles of a file of counts, below what it was made with."""
    made, *lines = (FOLDER / name).read_text().splitlines()
    heads = [
        "buffer",
        "slots",
        "batch",
        *(f"{library} {count}" for library in ("jaxbuf", "flashbax") for count in what),
    ]
    yield f"`results/{name}`: {made.removeprefix('# ')}."
    yield _table(
        heads,
        [
            [f"{int(row[head]):,}" if row[head].isdigit() else row[head] or "–" for head in heads]
            for row in csv.DictReader(lines)
            if row["operation"] == "cycle"
        ],
    )


def _table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    marks = ["---" if index < 2 else "---:" for index in range(len(header))]
    return "\n".join(f"| {' | '.join(line)} |" for line in (header, marks, *lines))


if __name__ == "__main__":
    _, heading, below = PAGE.read_text().partition(NOTES)
    PAGE.write_text(page(heading + below))

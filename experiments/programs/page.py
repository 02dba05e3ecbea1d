"""Draws what programs of others learned, and prints the tables of their page."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from experiments import common
from experiments.programs.harness import FIFTHS

BUFFERS = ("own", "jaxbuf", "jaxbuf in the update")


def runs(table: Sequence[dict[str, str]], program: str, buffer: str) -> list[dict[str, str]]:
    """Returns the runs of a program with one kind of buffer, one for each seed."""
    return [row for row in table if (row["program"], row["buffer"]) == (program, buffer)]


def returns(rows: Sequence[dict[str, str]], fifth: int) -> np.ndarray[Any, Any]:
    """Returns the mean return of each run in one fifth of training."""
    return np.asarray([float(row[f"return_{fifth}"]) for row in rows])


def draw(path: Path) -> None:
    """Draws the return in each fifth of training, for each program and each kind of buffer."""
    table = common.read(path)
    programs = list(dict.fromkeys(row["program"] for row in table))
    columns = 3
    canvas = Figure(figsize=(12.0, 3.4 * -(-len(programs) // columns)), layout="constrained")
    panels: Any = canvas.subplots(-(-len(programs) // columns), columns, squeeze=False)
    for panel in panels.flat[len(programs) :]:
        panel.remove()
    for program, panel in zip(programs, panels.flat, strict=False):
        for number, buffer in enumerate(BUFFERS):
            if rows := runs(table, program, buffer):
                curve = {100 * i / FIFTHS: returns(rows, i) for i in range(1, FIFTHS + 1)}
                common.draw_mean(panel, curve, buffer, number)
        panel.set(title=program, xlabel="% of training", ylabel="return")
        panel.grid(alpha=0.3)
        panel.legend(loc="best")
    common.save(canvas, path)


def table(path: Path) -> str:
    """Returns what came of each pair of runs, as a table in markdown."""
    found = common.read(path)
    lines = list[list[str]]()
    for program in dict.fromkeys(row["program"] for row in found):
        own = {row["seed"]: row for row in runs(found, program, "own")}
        for buffer in BUFFERS[1:]:
            for row in runs(found, program, buffer):
                other = own[row["seed"]]
                theirs, ours = (float(each["cpu_seconds"]) for each in (other, row))
                lines.append(
                    [
                        program if buffer == "jaxbuf" else f"{program}, buffer in the update",
                        f"{int(row['steps']):,}",
                        row["seed"],
                        f"{theirs:.0f}",
                        f"{ours:.0f}",
                        f"{ours / theirs:.2f}",
                        last(other),
                        last(row),
                    ]
                )
    return common.markdown(
        [
            "program",
            "steps",
            "seed",
            "CPU s, own",
            "CPU s, jaxbuf",
            "ratio",
            "return, own",
            "return, jaxbuf",
        ],
        lines,
    )


def last(row: dict[str, str]) -> str:
    """Returns the return of a run at its end, with a note if its loss was NaN by then."""
    note = " (loss NaN)" if row["loss"] == "nan" else ""
    return f"{float(row[f'return_{FIFTHS}']):.1f}{note}"


def versions(path: Path) -> str:
    """Returns where each program is from and how it was run, as a table in markdown."""
    found = {row["program"]: row for row in common.read(path)}
    return common.markdown(
        ["program", "repository", "commit", "command"],
        [
            [
                name,
                row["repository"].removeprefix("https://github.com/"),
                f"`{row['commit'][:7]}`",
                f"`python {row['command']}`",
            ]
            for name, row in found.items()
        ],
    )


def calls(path: Path) -> str:
    """Returns what CleanRL's DQN pays for its buffer, in microseconds, as a table in markdown."""
    return common.markdown(
        ["buffer", "add a step", "sample 128", "ten steps, a sample and an update"],
        [
            [row["way"], row["add"] or "–", row["sample"] or "–", row["cycle"]]
            for row in common.read(path)
        ],
    )


if __name__ == "__main__":
    draw(common.RESULTS / "programs.csv")
    print(table(common.RESULTS / "programs.csv"), end="\n\n")
    print(versions(common.RESULTS / "programs.csv"), end="\n\n")
    print(calls(common.RESULTS / "programs_calls.csv"))

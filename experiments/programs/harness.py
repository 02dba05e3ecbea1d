"""Runs a program of others twice: as it is, and with the few lines that bring jaxbuf changed.

Only the standard library is used here, because this runs in the environment of the program.
"""

import argparse
import csv
import dataclasses
import importlib.metadata
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results"
FIFTHS = 5

# What a file of the clone says, and what it says afterwards.
Changes = Mapping[str, Sequence[tuple[str, str]]]


@dataclasses.dataclass(frozen=True)
class Point:
    """The return at a step of training, and the loss where the program prints one."""

    step: int
    value: float
    loss: float | None = None


@dataclasses.dataclass(frozen=True)
class Program:
    """A program of others.

    Attributes:
        name: What the page calls it.
        repository: What to clone.
        commit: The version that the changes fit.
        packages: What to install beside jaxbuf.
        command: Its words on the command line, without the seed, in the folder of the clone.
        seed: The word that sets the seed; ``{}`` becomes the number.
        steps: How many steps of the environment it takes.
        changes: The changes that each kind of buffer needs; none for ``"own"``.
        points: Reads what the program printed.
        repairs: Changes that both need to run with today's packages, or to print their returns.
        source: The folder of the clone that is imported from.
        environment: Further environment variables.
    """

    name: str
    repository: str
    commit: str
    packages: Sequence[str]
    command: str
    seed: str
    steps: int
    changes: Mapping[str, Changes]
    points: Callable[[str], list[Point]]
    repairs: Changes = dataclasses.field(default_factory=dict)
    source: str = "."
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)


def change(folder: Path, changes: Changes) -> None:
    """Changes files of a copy of the clone.

    Raises:
        SystemExit: If a file does not say exactly once what is to be changed.
    """
    for name, pairs in changes.items():
        text = (folder / name).read_text()
        for old, new in pairs:
            if text.count(old) != 1:
                raise SystemExit(
                    f"{name} says {text.count(old)} times, not once: {old!r}. Is the clone at the "
                    "commit that the script names?"
                )
            text = text.replace(old, new)
        (folder / name).write_text(text)


def run(program: Program, clone: Path, buffer: str, seed: int) -> dict[str, object]:
    """Runs a program once, in a copy of its clone, and returns a row of the table."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "clone"
        shutil.copytree(clone, folder, ignore=shutil.ignore_patterns(".git", "__pycache__"))
        change(folder, program.repairs)
        change(folder, program.changes[buffer])
        path = os.pathsep.join([str(folder / program.source), str(ROOT)])
        environment = {
            **os.environ,
            "PYTHONPATH": path,
            "JAX_PLATFORMS": "cpu",
            "MPLBACKEND": "Agg",
            **program.environment,
        }
        words = [*program.command.split(), *program.seed.format(seed).split()]
        before = os.times()
        found = subprocess.run(
            [sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True
        )
        after = os.times()
    if found.returncode:
        raise SystemExit(f"{program.name} ended with {found.returncode}:\n{found.stderr[-4000:]}")
    # Seconds on the clock say little where other programs run at the same time.
    seconds = (after.children_user + after.children_system) - (
        before.children_user + before.children_system
    )
    return row(program, buffer, seed, seconds, program.points(found.stdout + found.stderr))


def row(
    program: Program, buffer: str, seed: int, seconds: float, points: Sequence[Point]
) -> dict[str, object]:
    """Returns a row of the table: mean returns of each fifth of training, and the last loss.

    Raises:
        SystemExit: If the program printed no return in some fifth.
    """
    returns = dict[str, str]()
    for fifth in range(FIFTHS):
        low, high = (program.steps * (fifth + i) // FIFTHS for i in range(2))
        inside = [point.value for point in points if low < point.step <= high]
        if not inside:
            raise SystemExit(f"{program.name} printed no return from step {low} to {high}")
        returns[f"return_{fifth + 1}"] = f"{statistics.fmean(inside):.2f}"
    losses = [point.loss for point in points if point.loss is not None]
    names = ("jax", *program.packages)
    versions = {name: importlib.metadata.version(name.split("==")[0]) for name in names}
    return {
        "program": program.name,
        "repository": program.repository,
        "commit": program.commit,
        "versions": " ".join(f"{name.split('==')[0]}=={versions[name]}" for name in names),
        "command": program.command,
        "steps": program.steps,
        "buffer": buffer,
        "seed": seed,
        "cpu_seconds": f"{seconds:.1f}",
        **returns,
        "loss": "" if not losses else f"{losses[-1]:.3f}",
    }


def write(path: Path, found: Mapping[str, object]) -> None:
    """Writes a row to the table, in place of one of the same program, buffer and seed."""
    rows, same = [found], ("program", "buffer", "seed")
    if path.exists():
        with path.open(newline="") as file:
            old = list[Mapping[str, object]](csv.DictReader(file))
        rows = [row for row in old if any(row[key] != str(found[key]) for key in same)] + rows
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(found), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def main(program: Program, description: str | None) -> None:
    """Runs a program with each buffer in turn, for each seed, and writes the table."""
    parser = argparse.ArgumentParser(
        description=description,
        epilog=f"Clone {program.repository} at {program.commit}, or unzip its wheel if that is a "
        f"version, and install {' '.join(program.packages)} beside jaxbuf.",
    )
    parser.add_argument("clone", type=Path, help="the folder of the clone")
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[0], help="a run of each buffer each"
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="where programs.csv is")
    options = parser.parse_args()
    for seed in options.seeds:
        for buffer in program.changes:
            found = run(program, options.clone, buffer, seed)
            print(
                {key: found[key] for key in found if key not in ("versions", "command")}, flush=True
            )
            write(options.out / "programs.csv", found)

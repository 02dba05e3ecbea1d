"""Runs of examples within the process of a test, and what they print."""

import contextlib
import csv
import io
import itertools
import json
from pathlib import Path
from typing import NamedTuple

import pytest
from tqdm import tqdm


class Finished(NamedTuple):
    """A run that ended well: its folder, and what it wrote to stdout and stderr."""

    folder: Path
    out: str
    err: str


def finish(main, argv, folder):
    """Run an example from start to end; ``argv`` sends its files to ``folder``."""
    printed, shown = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(shown):
        assert main(argv) == 0
    return Finished(folder, printed.getvalue(), shown.getvalue())


def interrupt(main, argv, chunks, monkeypatch, capsys):
    """Run an example, and interrupt it after so many chunks, as Ctrl-C does."""
    update, so_far = tqdm.update, itertools.count(1)

    def interrupted(bar, n=1):
        update(bar, n)
        if next(so_far) == chunks:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(tqdm, "update", interrupted)
        assert main(argv) == 130
    assert "go on from the last checkpoint with --resume" in capsys.readouterr().err


def logged(folder):
    """The rows of a run's log, each a dict of numbers."""
    with (folder / "log.csv").open() as file:
        return [{k: float(v) for k, v in row.items()} for row in csv.DictReader(file)]


def check_files(run, said, pictures, example, **options):
    """A run has left its pictures and its record, and has said where they are."""
    for picture in pictures:
        assert (run.folder / f"{picture}.png").read_bytes().startswith(b"\x89PNG")
    assert f"{said}, log and checkpoint are in {run.folder}" in run.out
    record = json.loads((run.folder / "run.json").read_text())
    assert record["example"] == example
    assert options.items() <= record["options"].items()


def error_of(example, argv, capsys):
    """Returns the message of a run with a wrong ``argv``, on one line."""
    with pytest.raises(SystemExit) as stopped:
        example.main(argv)
    printed = capsys.readouterr()
    assert stopped.value.code == 2
    assert printed.out == ""
    assert "error" in printed.err or "Unrecognized" in printed.err or "invalid" in printed.err
    # tyro draws a box, whose lines are as long as the terminal is wide.
    return " ".join(printed.err.replace("│", " ").split())


def help_of(example, capsys):
    """Returns what an example prints for ``--help``."""
    with pytest.raises(SystemExit) as stopped:
        example.main(["--help"])
    assert stopped.value.code == 0
    return capsys.readouterr().out

"""Runs of examples within the process of a test, and what they print."""

import contextlib
import io
from pathlib import Path
from typing import NamedTuple

import pytest


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


def error_of(example, argv, capsys):
    """The one line that says what is wrong with ``argv``."""
    with pytest.raises(SystemExit) as stopped:
        example.main(argv)
    printed = capsys.readouterr()
    assert stopped.value.code == 2
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert printed.err.startswith(f"python -m {example.__name__}: error: ")
    return printed.err

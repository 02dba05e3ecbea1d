"""Runs of examples within the process of a test, and what they print."""

import contextlib
import io
from pathlib import Path
from typing import NamedTuple

import pytest

from jaxbuf.examples import _report


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


def interrupt(monkeypatch, advances):
    """Interrupt runs when their progress has advanced so often, as Ctrl-C does."""

    class Interrupted(_report.Progress):
        so_far = 0

        def advance(self, steps, mean_return):
            super().advance(steps, mean_return)
            self.so_far += 1
            if self.so_far == advances:
                raise KeyboardInterrupt

    monkeypatch.setattr(_report, "Progress", Interrupted)


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

"""A peer in an environment of its own, in turns with the libraries of this one.

Some peers need other versions of what this environment has. Such a peer runs in a process of its
own that waits, idle, until it is asked: one line of JSON in, one line out. It measures itself for
the length of one turn, so its turns lie between those of the other libraries.

A request is `{"call": name, "arguments": {...}}`, an answer `{"result": ...}` or
`{"error": traceback}`. What is too long for a line goes through a file.
"""

import json
import subprocess
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from benchmarks.harness import Unavailable

ROOT = Path(__file__).resolve().parent.parent
"""The folder from which the benchmark is run, and beside which environments lie."""


Launcher = Sequence[str]
"""The beginning of a command line, before the interpreter."""


class PeerError(Exception):
    """The process of a peer has failed; the message has its traceback."""


def environment(name: str) -> Path:
    """The Python of the environment `.venv-NAME`, or `Unavailable`."""
    folder = ROOT / f".venv-{name}"
    for python in (folder / "bin" / "python", folder / "Scripts" / "python.exe"):
        if python.exists():
            return python
    raise Unavailable(f"there is no {folder.name}; `make benchmark-{name}` sets it up")


class PeerProcess:
    """A started peer, to be asked by name for what its program offers."""

    def __init__(self, python: Path | str, module: str, *arguments: str, launcher: Launcher = ()):
        """Starts it.

        Args:
            python: The interpreter of its environment.
            module: Its program: a module that calls `benchmarks.peers.serving.serve`.
            *arguments: Of that program.
            launcher: What starts it, if it is more than one process: the first answers.
        """
        self._module = module
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed by _stop)
        self._process = subprocess.Popen(
            [*launcher, str(python), "-m", module, *arguments],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        self._stop = weakref.finalize(self, _stop, self._process, self._errors)

    def call(self, name: str, **arguments: Any) -> Any:
        """Asks for one thing and waits for the answer.

        Args:
            name: A public method of what the peer serves.
            **arguments: What JSON can hold.

        Returns:
            Its result.

        Raises:
            PeerError: If the peer fails, or has ended.
        """
        requests, answers = self._process.stdin, self._process.stdout
        assert requests is not None
        assert answers is not None
        try:
            requests.write(json.dumps({"call": name, "arguments": arguments}) + "\n")
            requests.flush()
            line = answers.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            self._process.wait()
            self._errors.seek(0)
            raise PeerError(
                f"{self._module} ended with status {self._process.returncode}: "
                f"{self._errors.read()[-2000:]}"
            )
        answer = json.loads(line)
        if "error" in answer:
            raise PeerError(f"{self._module} could not {name}: {answer['error']}")
        return answer["result"]

    def close(self) -> None:
        """Ends it; without this it ends when it is no longer referred to."""
        self._stop()


def _stop(process: subprocess.Popen[str], errors: IO[str]) -> None:
    """Lets the process see the end of its input, and waits for it."""
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    errors.close()

"""Starts a program on several MPI ranks, and never leaves a process behind.

Run as a script, this file is what each rank starts with: it sends the rank's output to files of its
own, so that ranks do not interleave under any launcher, and then runs the program, or several
programs one after the other for `run_in_turn`.
"""

import atexit
import contextlib
import functools
import itertools
import json
import os
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

_GRACE_SECONDS = 5.0
# Stands for programs that are given one after the other.
_IN_TURN = "-"


class RankOutput(NamedTuple):
    """The output of one rank."""

    stdout: str
    stderr: str


class RanksFailedError(RuntimeError):
    """A rank failed, or the ranks did not end in time; `ranks` has their output up to then."""

    def __init__(self, reason: str, ranks: list[RankOutput], launcher: str):
        self.ranks = ranks
        parts = [reason]
        for rank, output in enumerate(ranks):
            parts += [f"--- rank {rank}, stdout", output.stdout, f"--- rank {rank}, stderr"]
            parts += [output.stderr]
        super().__init__("\n".join([*parts, "--- mpiexec", launcher]))


def find_mpiexec() -> str | None:
    """Returns the launcher: `MPIEXEC`, or the one beside this Python, or the first on `PATH`."""
    named = os.environ.get("MPIEXEC")
    beside = shutil.which("mpiexec", path=str(Path(sys.executable).parent))
    return named or beside or shutil.which("mpiexec")


def run_ranks(
    n: int,
    program: str | os.PathLike[str],
    *args: object,
    timeout: float = 120.0,
    env: Mapping[str, str] | None = None,
    linger: str | os.PathLike[str] | None = None,
) -> list[RankOutput]:
    """Runs a script, or a module, on `n` ranks, on the CPU, with warnings as errors.

    An exception on one rank aborts all of them. Until the file `linger` exists, the launcher does
    not see that a rank was killed, and does not end the others.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        launcher = _launch(n, folder, program, *args, env=env, linger=linger)
        reason = "interrupted"
        try:
            status = launcher.wait(timeout)
            reason = f"mpiexec ended with status {status}" if status else None
        except subprocess.TimeoutExpired:
            reason = f"the ranks had not ended after {timeout:g} s"
        finally:
            if reason is not None:
                _end(launcher, Path(folder))
        return _outputs(n, program, Path(folder), Path(folder), reason)


def run_in_turn(
    n: int, program: str | os.PathLike[str], *args: object, timeout: float = 120.0
) -> list[RankOutput]:
    """Runs a program as `run_ranks` does, on ranks that stay to run further programs.

    They keep their imports and compiled programs. After one has failed, the next has new ranks.
    """
    standing = _standing(n)
    outputs, reason = standing.run(program, args, timeout)
    if reason is not None:
        _standing.cache_clear()
        standing.end()
    return _outputs(n, program, outputs, standing.folder, reason)


class _Standing:
    """Ranks that wait for programs, which are files in a folder."""

    def __init__(self, n: int):
        self._n = n
        self._numbers = itertools.count()
        self._kept = tempfile.TemporaryDirectory(prefix="ranks-")
        self.folder = Path(self._kept.name)
        self._launcher = _launch(n, self._kept.name, _IN_TURN, os.getpid())
        atexit.register(self.end)

    def run(
        self, program: str | os.PathLike[str], args: tuple[object, ...], timeout: float
    ) -> tuple[Path, str | None]:
        """Returns the folder of the outputs, and what went wrong."""
        outputs = self.folder / str(next(self._numbers))
        outputs.mkdir()
        (outputs / "new").write_text(json.dumps([str(part) for part in (program, *args)]))
        (outputs / "new").rename(outputs / "program")
        deadline = time.monotonic() + timeout
        while not all((outputs / f"{rank}.done").exists() for rank in range(self._n)):
            if self._launcher.poll() is not None:
                return outputs, f"mpiexec ended with status {self._launcher.returncode}"
            if time.monotonic() > deadline:
                return outputs, f"the ranks had not ended after {timeout:g} s"
            time.sleep(0.01)
        return outputs, None

    def end(self) -> None:
        _end(self._launcher, self.folder)


@functools.cache
def _standing(n: int) -> _Standing:
    return _Standing(n)


def _launch(
    n: int,
    folder: str,
    program: str | os.PathLike[str],
    *args: object,
    env: Mapping[str, str] | None = None,
    linger: str | os.PathLike[str] | None = None,
) -> subprocess.Popen[bytes]:
    mpiexec = find_mpiexec()
    if mpiexec is None:
        raise FileNotFoundError("no mpiexec beside this Python, on PATH or in MPIEXEC")
    # mpi4py's runner aborts all ranks when one of them ends with an exception.
    as_rank = [sys.executable, "-m", "mpi4py", __file__, folder]
    if linger is not None:
        linger = shlex.quote(str(linger))
        script = f'"$0" "$@" || until [ -e {linger} ]; do sleep 0.2; done'
        as_rank = ["sh", "-c", script, *as_rank]
    with Path(folder, "launcher").open("w") as log:
        return subprocess.Popen(
            [str(part) for part in (mpiexec, "-n", n, *as_rank, program, *args)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=_environment(env or {}),
            start_new_session=True,
        )


def _outputs(
    n: int, program: str | os.PathLike[str], outputs: Path, folder: Path, reason: str | None
) -> list[RankOutput]:
    ranks = [
        RankOutput(_read(outputs / f"{rank}.out"), _read(outputs / f"{rank}.err"))
        for rank in range(n)
    ]
    if reason is not None:
        reason = f"{program} on {n} ranks: {reason}"
        raise RanksFailedError(reason, ranks, _read(folder / "launcher"))
    return ranks


def _environment(extra: Mapping[str, str]) -> dict[str, str]:
    # The root of this repository, for programs in it, whether or not the package is installed.
    paths = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "JAX_PLATFORMS": "cpu",
        "JAX_NUMPY_DTYPE_PROMOTION": "strict",
        "JAX_NUMPY_RANK_PROMOTION": "raise",
        "PYTHONWARNINGS": "error,ignore:Error reading persistent compilation cache entry",
        # Open MPI starts neither as root nor more ranks than cores unless told to; MPICH does both.
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        **extra,
    }


def _end(launcher: subprocess.Popen[bytes], outputs: Path) -> None:
    if launcher.poll() is None:
        launcher.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            launcher.wait(_GRACE_SECONDS)
    # Launchers put every rank in a process group of its own, out of reach of the launcher's.
    groups = {launcher.pid, *(int(_read(path)) for path in outputs.glob("*.group"))}
    deadline = time.monotonic() + _GRACE_SECONDS
    while groups and time.monotonic() < deadline:
        groups = {group for group in groups if _kill(group)}
        launcher.poll()
        time.sleep(0.05)


def _kill(group: int) -> bool:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def _read(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def _run_as_rank(folder: str, program: str, *args: str) -> None:
    from mpi4py import MPI

    rank = MPI.COMM_WORLD.Get_rank()
    Path(folder, f"{rank}.group").write_text(str(os.getpgid(0)))
    if program != _IN_TURN:
        _send_output(folder, rank)
        _run(program, args)
        return
    (parent,) = map(int, args)
    for number in itertools.count():
        outputs = Path(folder, str(number))
        while not (outputs / "program").exists():
            os.kill(parent, 0)
            time.sleep(0.05)
        program, *args = json.loads((outputs / "program").read_text())
        _send_output(outputs, rank)
        try:
            _run(program, args)
        except SystemExit as ended:
            if ended.code:
                raise
        (outputs / f"{rank}.done").touch()


def _send_output(folder: str | Path, rank: int) -> None:
    for stream, ending in ((sys.stdout, "out"), (sys.stderr, "err")):
        stream.flush()
        with Path(folder, f"{rank}.{ending}").open("wb") as file:
            os.dup2(file.fileno(), stream.fileno())


def _run(program: str, args: Sequence[str]) -> None:
    sys.argv = [program, *args]
    if program.endswith(".py"):
        sys.path[0] = str(Path(program).resolve().parent)
        runpy.run_path(program, run_name="__main__")
    else:
        sys.path[0] = os.getcwd()
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()


if __name__ == "__main__":
    _run_as_rank(*sys.argv[1:])

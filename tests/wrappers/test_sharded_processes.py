"""`jaxbuf.Sharded` over two processes with two devices each, one of which is killed."""

import time
from typing import NamedTuple

import numpy as np
import pytest

from tests.programs.processes import free_port, run_processes, start
from tests.programs.sharded_processes import ROUNDS

pytestmark = pytest.mark.slow
PROGRAM = ("-m", "tests.programs.sharded_processes")
KILLED = 3


class Pair(NamedTuple):
    """The end of two processes, one of which was killed, and the folder in which they went on."""

    folder: object
    codes: list
    seconds: float
    message: str


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    port = free_port()
    words = (*PROGRAM, "rounds", folder)
    with (folder / "stderr").open("w+") as stderr:
        first, second = (
            start(*words, KILLED, port, rank, devices=2, stderr=stderr) for rank in range(2)
        )
        try:
            second.communicate(timeout=60)
            killed = time.monotonic()
            first.communicate(timeout=60)
        finally:
            first.kill()
            second.kill()
        seconds = time.monotonic() - killed
        stderr.seek(0)
        message = stderr.read()
    before = sorted(path.name for path in folder.glob("round-*"))
    assert before == [f"round-{number}.npz" for number in range(KILLED)]
    port = free_port()
    again = [(*words, ROUNDS, port, rank) for rank in range(2)]
    for out in run_processes(*again, devices=2):
        assert "round 3" in out
        assert "round 2" not in out
    return Pair(folder, [first.returncode, second.returncode], seconds, message)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """One process with four devices, without an interruption."""
    folder = tmp_path_factory.mktemp("alone")
    run_processes((*PROGRAM, "rounds", folder), devices=4)
    return folder


def drawn(folder, name):
    return dict(np.load(folder / f"{name}.npz"))


@pytest.mark.parametrize("number", range(ROUNDS))
def test_two_processes_do_what_one_does(pair, alone, number):
    got, want = drawn(pair.folder, f"round-{number}"), drawn(alone, f"round-{number}")
    np.testing.assert_equal(got, want)
    assert got["[0].valid"].all()
    assert len(np.unique(got["[0].data['at']"])) > 20
    np.testing.assert_array_equal(got["[0].data['obs']"][:, 1], got["[0].data['at']"])


def test_the_other_process_ends_with_a_message_in_time(pair):
    assert pair.codes[1] == -9
    assert pair.codes[0] not in (0, -9)
    # The heartbeat that jax.distributed was promised, and some time for a busy machine.
    assert pair.seconds < 10 + 20
    assert "Gloo" in pair.message or "another task died" in pair.message


def test_one_process_loads_what_two_saved(pair, alone, tmp_path):
    run_processes((*PROGRAM, "next", tmp_path, pair.folder, alone), devices=4)
    pairs, four, one = (
        drawn(tmp_path, name)
        for name in (f"{pair.folder.name}-4", f"{alone.name}-4", f"{alone.name}-1")
    )
    np.testing.assert_equal(pairs, four)
    for name, want in four.items():
        if name in ("[0].probability", "[1]"):
            np.testing.assert_allclose(one[name], want, rtol=3e-7)
        else:
            np.testing.assert_array_equal(one[name], want)

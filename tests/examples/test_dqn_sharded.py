"""DQN over devices: the same learning curve on one, on eight, and under two processes."""

import numpy as np
import pytest

import dqn_sharded
from tests.programs.processes import free_port, run_processes, start
from tests.programs.run_example import logged

CHUNKS = 5
OPTIONS = {
    "steps": 2_000,
    "warmup": 400,
    "capacity": 1_000,
    "hidden": 32,
    "chunks": CHUNKS,
}


def words(out, **more):
    given = [(f"--{name.replace('_', '-')}", value) for name, value in (OPTIONS | more).items()]
    return (dqn_sharded.__file__, *sum(given, ()), "--out", out)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The log of a run on one device."""
    out = tmp_path_factory.mktemp("alone")
    [printed] = run_processes(words(out, devices=1), devices=None)
    assert printed.count("return") == CHUNKS
    return logged(out)


def test_it_says_how_training_goes(alone):
    assert [row["step"] for row in alone] == [720, 1040, 1360, 1680, 2000]
    for row in alone:
        # One reward for each step, until the pole falls.
        assert 8 < row["return"] < 60
        assert row["loss"] > 0
        assert row["buffer/size"] == min(row["step"], 1000)
        assert row["buffer/priority_max"] > row["buffer/priority_mean"] > 0


def test_eight_devices_and_then_two_processes_learn_the_same(alone, tmp_path):
    eight = start(*words(tmp_path, devices=8), devices=None, alone=True)
    try:
        for _ in range(3):
            assert "return" in eight.stdout.readline()
    finally:
        eight.kill()
        eight.communicate()
    assert eight.returncode == -9, "the run ended by itself"
    compare(logged(tmp_path), alone[: len(logged(tmp_path))])
    port = free_port()
    printed = run_processes(
        *(
            (
                *words(tmp_path, devices=4, num_processes=2, process_id=rank),
                "--coordinator",
                f"localhost:{port}",
                "--resume",
            )
            for rank in range(2)
        ),
        devices=None,
    )
    went_on = printed[0].count("return")
    assert 2 <= went_on < CHUNKS
    assert "return" not in printed[1]
    compare(logged(tmp_path), alone)


def compare(rows, expected):
    assert len(rows) == len(expected) >= 2
    for row, want in zip(rows, expected, strict=True):
        assert row.keys() == want.keys()
        for name in row:
            np.testing.assert_allclose(row[name], want[name], rtol=1e-5, err_msg=name)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shards": 3}, "--num-envs must be a multiple of --shards"),
        ({"batch_size": 12}, "--batch-size must be a multiple of --shards"),
        ({"steps": 5}, "--steps is 5; expected at least 2001"),
    ],
)
def test_wrong_options_get_advice(options, message):
    with pytest.raises(ValueError, match=message):
        dqn_sharded.Config(**options)

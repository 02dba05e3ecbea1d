"""The GFlowNet example on several ranks: it starts, finds all modes in every mode, and reports."""

import importlib
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.programs.mpi_launch import RanksFailedError, run_ranks
from tests.programs.run_example import error_of, help_of

pytest.importorskip("mpi4jax")

import gflownet_mpi
from gflownet import HyperGrid
from jaxbuf.mpi import Manager

# The buffer that compiles fastest.
QUICK = [
    *("--dims", "2", "--buffer", "fifo", "--steps", "300", "--every", "15", "--batch-size", "8"),
    *("--capacity", "40", "--shared", "30", "--borrow", "4", "--hidden", "16"),
    *("--background", "0.1", "--lr", "0.01"),
]
# Optax mixes dtypes and ranks.
LENIENT = {"JAX_NUMPY_DTYPE_PROMOTION": "standard", "JAX_NUMPY_RANK_PROMOTION": "allow"}


@pytest.mark.mpi
def test_all_ranks_find_all_modes(tmp_path):
    out = tmp_path / "run"
    first, *others = run_ranks(3, gflownet_mpi.__file__, *QUICK, "--out", out, env=LENIENT)

    header, _, *rows = first.stdout.splitlines()[:6]
    assert " ".join(header.split()) == (
        "run modes of 4 time to all modes trajectories trajectories/s exchanging time"
    )
    rows = [row.split() for row in rows]
    assert [row[0] for row in rows] == ["alone", "sync", "deferred", "pipelined"]
    for row in rows:
        assert row[1] == "4"
        assert "never" not in row
        assert "2,400" in row
    for mode in ("sync", "deferred", "pipelined"):
        table = first.stdout.split(f"manager, {mode}\n")[1].split("\n\n")[0].splitlines()
        assert [line.split()[:3] for line in table[1:3]] == [
            ["rank", "0", "20"],
            ["rank", "1", "20"],
        ]
        assert "2,400" in table[3]
        # A line more would be a fault.
        assert len(table) == 4
    assert (out / "modes.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((out / "run.json").read_text())["example"] == "gflownet_mpi"
    before, *lines = first.stderr.splitlines()
    assert (before, len(lines)) == ("compiling", 10)
    assert lines[-1].startswith("100%")
    assert "pipelined, 4 of 4 modes" in lines[-1]
    assert [(output.stdout, output.stderr) for output in others] == [("", "")] * 2


@pytest.mark.mpi
def test_a_folder_of_somebody_else_is_refused_once(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(RanksFailedError) as failure:
        run_ranks(2, gflownet_mpi.__file__, "--out", tmp_path)

    said = "".join(output.stderr for output in failure.value.ranks)
    assert said.count("choose another --out") == 1


def test_a_score_tells_which_modes_are_new():
    grid = HyperGrid(2, 8)
    config = gflownet_mpi.Config(dims=2, shared=8, borrow=3)
    manager = gflownet_mpi.make_manager(config, 2)
    receive = jax.jit(Manager.receive)
    batches = (
        ([[1, 1], [1, 6], [3, 3]], 0.5, [1, 1, 1]),
        ([[1, 1], [6, 6], [6, 1]], 0.25, [1, 1, 0]),
    )
    found = np.full(4, np.inf)
    for states, seconds, mask in batches:
        states, mask = np.array(states, np.int32), np.array(mask, bool)
        before = np.isfinite(found).sum()
        for state in states[mask]:
            if (mode := int(grid.mode(jnp.asarray(state)))) < 4:
                found[mode] = min(found[mode], seconds)
        held = np.asarray(manager.buffer.data["state"])[: int(manager.buffer.size)]
        manager, scores = receive(
            manager,
            {"state": states, "seconds": np.full(3, seconds, np.float32)},
            score=grid.log_reward(states),
            mask=mask,
        )
        assert int(scores["modes"]) == np.isfinite(found).sum()
        assert int(scores["new_modes"]) == np.isfinite(found).sum() - before
        assert scores["valid"].tolist() == [len(held) > 0] * 3
        for state in np.asarray(scores["states"])[scores["valid"]]:
            assert state.tolist() in held.tolist()
    np.testing.assert_array_equal(manager.score_state[0], found)
    assert np.isfinite(found).sum() == 3


def test_a_worker_that_replays_nothing_borrows_nothing():
    config = gflownet_mpi.Config(dims=2, buffer="none", every=5)
    assert config.borrowed == 0
    assert config.rows == 5 * config.batch_size
    manager = gflownet_mpi.make_manager(config, 1)
    items = {"state": jnp.zeros((2, 2), jnp.int32), "seconds": jnp.zeros(2)}
    _, scores = jax.eval_shape(Manager.receive, manager, items, score=jnp.zeros(2))
    assert sorted(scores) == ["modes", "new_modes"]


def test_help_needs_no_mpi(capsys, monkeypatch):
    monkeypatch.setattr(importlib, "import_module", _missing)
    printed = help_of(gflownet_mpi, capsys)
    assert "Train GFlowNets on a hypergrid, on several ranks" in printed
    assert "in runs/gflownet_mpi or where --out" in printed
    assert "(default: alone sync deferred" in printed


def test_without_mpi_it_says_what_to_install(capsys, monkeypatch):
    monkeypatch.setattr(importlib, "import_module", _missing)
    assert "`make demo-mpi` installs all that it needs" in error_of(gflownet_mpi, [], capsys)


def _missing(name):
    raise ImportError(f"{name} needs mpi4jax")


def test_one_rank_says_how_to_start_more(capsys):
    advice = "start several with `mpiexec -n 4 python examples/gflownet_mpi.py`"
    assert advice in error_of(gflownet_mpi, [], capsys)


def test_other_ranks_leave_it_to_the_first_to_say_what_is_wrong(capsys, monkeypatch):
    monkeypatch.setenv("PMI_RANK", "1")
    with pytest.raises(SystemExit) as stopped:
        gflownet_mpi.main(["--every", "0"])
    assert stopped.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == printed.err == ""

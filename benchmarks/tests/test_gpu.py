"""The benchmark for a GPU, on whatever there is, and what it does with very large rings."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from benchmarks import equality, gpu, limits, page
from benchmarks.harness import Contestant, Operation, Options, Row, UnequalWork
from benchmarks.jax_loops import JaxSubject
from benchmarks.rows import per
from benchmarks.transitions import CARTPOLE, MAX_SERIAL
from benchmarks.workload import Workload

SMALL = Workload(CARTPOLE, capacity=64, add_size=4, sample_size=16, scan_length=2)


@pytest.fixture
def subject():
    """A filled buffer of jaxbuf."""
    return JaxSubject(per.bind_jaxbuf(SMALL), SMALL)


def test_the_last_of_several_updates_of_a_slot_has_to_win(subject, monkeypatch):
    gpu.check_duplicates(subject)
    backwards = lambda leaf: leaf[::-1]  # noqa: E731

    def first_wins(slots, priority):
        slots = jax.tree.map(backwards, slots)
        subject.state = subject.binding.call_update(subject.state, slots, priority[::-1].copy())

    monkeypatch.setattr(subject, "update", first_wins)
    with pytest.raises(UnequalWork, match="probability is off"):
        gpu.check_duplicates(subject)


class Timed(Contestant):
    """Does nothing, in no time."""

    def verify(self):
        pass

    def operations(self):
        return {"scan add": Operation(lambda calls: 1e-3 * calls)}


def test_the_program_checks_and_then_writes_what_it_measured(tmp_path, monkeypatch, capsys):
    row = Row("gpu-add-one", "Toys", ["scan add"], {"jaxbuf": Timed})
    checked = []
    monkeypatch.setattr(gpu, "check", checked.append)
    monkeypatch.setattr(gpu, "GPU", dataclasses.replace(gpu.GPU, rows=lambda options: [row]))
    monkeypatch.setattr(limits, "COPIED", 2**16)
    monkeypatch.setattr(limits, "LARGEST", 2**16)
    monkeypatch.chdir(tmp_path)
    assert gpu.run(["--repeats", "1"]) == 0
    assert len(checked) == 1
    found = json.loads((tmp_path / "benchmark-gpu.json").read_text())
    assert found["rows"]["gpu-add-one"]["operations"]["scan add"]["us"] == {"jaxbuf": 1000}
    assert found["command"].startswith("python -m benchmarks.gpu --repeats 1")
    assert "### gpu-add-one" in capsys.readouterr().out
    limits.forget()

    def differs(batches):
        raise UnequalWork("it differs")

    monkeypatch.setattr(gpu, "check", differs)
    assert gpu.run([]) == 1
    assert "it differs" in capsys.readouterr().err


def test_a_trial_has_the_same_rows():
    rows = [row.name for row in gpu.rows(Options())]
    assert [row.name for row in gpu.rows(Options(quick=True))] == rows
    assert set(json.loads((page.FOLDER / "gpu.json").read_text())["rows"]) <= set(rows)


def test_huge_rings_hold_the_same_items_over_and_over(monkeypatch):
    assert dataclasses.replace(SMALL, capacity=MAX_SERIAL // 2).distinct
    monkeypatch.setattr(Workload, "distinct", property(lambda self: self.capacity < 1024))
    monkeypatch.setattr(equality, "FILL_BYTES", 256 * CARTPOLE.num_bytes)
    huge = dataclasses.replace(SMALL, capacity=1024)
    subject = JaxSubject(per.bind_jaxbuf(huge), huge)
    assert int(subject.state.size) == 1024
    assert np.asarray(subject.state.data["reward"]).max() < 256
    equality.check_calls(subject, rounds=2, add=True)

    model = equality.model_of(huge)
    items = model.new_items(16)
    items["obs"] = items["obs"] + np.float32(1.0)
    with pytest.raises(UnequalWork, match="obs read back differs"):
        model.check(equality.CheckedSample(items, slots=None))


def test_samples_that_are_checked_often_stay_small():
    small = gpu.GATHER.small()
    assert small.sample_size < 300
    assert small.capacity < 2 * small.sample_size
    assert SMALL.small().sample_size == SMALL.sample_size

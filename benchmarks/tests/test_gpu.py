"""The benchmark for a GPU, on whatever there is, and what it does with very large rings."""

import dataclasses
import functools
import json
import re
from pathlib import Path

import jax
import numpy as np
import pytest

import jaxbuf
from benchmarks import compiling, equality, gpu, gpu_compiled, limits
from benchmarks.harness import Operation, Options, Row, Unavailable, UnequalWork
from benchmarks.jax_loops import JaxSubject
from benchmarks.rows import per
from benchmarks.targets import GPU_TARGETS
from benchmarks.transitions import CARTPOLE, MAX_SERIAL
from benchmarks.workload import Workload

RESULTS = (Path(gpu.__file__).with_name("RESULTS.md")).read_text()
SMALL = Workload(CARTPOLE, capacity=64, add_size=4, sample_size=16, scan_length=2)


@pytest.fixture
def subject():
    """A filled buffer of jaxbuf."""
    return JaxSubject(per.bind_jaxbuf(SMALL, Options()), SMALL)


def test_the_last_of_several_updates_of_a_slot_has_to_win(subject, monkeypatch):
    gpu.check_duplicates(subject)
    backwards = lambda leaf: leaf[::-1]  # noqa: E731

    def first_wins(slots, priority):
        slots = jax.tree.map(backwards, slots)
        subject.state = subject.binding.call_update(subject.state, slots, priority[::-1].copy())

    monkeypatch.setattr(subject, "update", first_wins)
    with pytest.raises(UnequalWork, match="probability is off"):
        gpu.check_duplicates(subject)


class Timed:
    """Does nothing, in no time."""

    def verify(self):
        pass

    def operations(self):
        return {"scan add": Operation(lambda calls: 1e-3 * calls)}

    def facts(self):
        return {}


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
    assert found["rows"]["gpu-add-one"]["operations"]["scan add"]["median"] == {"jaxbuf": 1e3}
    assert found["command"].startswith("python -m benchmarks.gpu --repeats 1")
    assert "### gpu-add-one" in (tmp_path / "benchmark-gpu.md").read_text()
    limits.forget()

    def differs(batches):
        raise UnequalWork("it differs")

    monkeypatch.setattr(gpu, "check", differs)
    assert gpu.run([]) == 1
    assert "it differs" in capsys.readouterr().err


def test_targets_of_the_gpu_name_its_rows():
    options = Options()
    rows = {row.name: row for row in gpu.rows(options)}
    assert {target.row for target in GPU_TARGETS} <= set(rows)
    assert {f"jaxbuf-{2**power}" for power in (16, 24)} <= set(rows["gpu-add-one"].builders)
    assert [row.name for row in gpu.rows(Options(quick=True))] == list(rows)


def test_huge_rings_hold_the_same_items_over_and_over(monkeypatch):
    assert dataclasses.replace(SMALL, capacity=MAX_SERIAL // 2).distinct
    monkeypatch.setattr(Workload, "distinct", property(lambda self: self.capacity < 1024))
    monkeypatch.setattr(equality, "FILL_BYTES", 256 * CARTPOLE.num_bytes)
    huge = dataclasses.replace(SMALL, capacity=1024)
    subject = JaxSubject(per.bind_jaxbuf(huge, Options()), huge)
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


def test_what_is_compiled_for_a_gpu_is_counted(monkeypatch, capsys):
    small = dataclasses.replace(SMALL, capacity=512)
    scored = functools.partial(compiling.bind_scored, create=jaxbuf.reward_prioritized)
    first = dataclasses.replace(gpu_compiled.jobs()[0], workload=small)
    jobs = [first, gpu_compiled.Job("scored", small, {"jaxbuf": scored})]
    monkeypatch.setattr(gpu_compiled, "jobs", lambda: jobs)
    monkeypatch.setattr(gpu_compiled, "device", lambda: jax.devices()[0])
    # flashbax relies on what jax does by default.
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        assert gpu_compiled.main(["--only", "/(add|cycle|update)$"]) == 0
    header, _, *rows = capsys.readouterr().out.strip().splitlines()
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    names = [cell.strip() for cell in header.strip("|").split("|")]
    assert names[:5] == ["buffer", "operation", "slots", "batch", "jaxbuf kernels"]
    assert [row[:4] for row in cells] == [
        ["prioritized", "add", "512", "4"],
        ["prioritized", "update", "512", "16"],
        ["prioritized", "cycle", "512", "16"],
        ["scored", "add", "512", "4"],
        ["scored", "cycle", "512", "16"],
    ]
    found = [dict(zip(names, row, strict=True)) for row in cells]
    assert all(int(row["jaxbuf kernels"]) > 0 for row in found)
    assert [row["jaxbuf copied"] for row in found[:3]] == ["0"] * 3
    assert [row["flashbax kernels"] == "–" for row in found] == [False] * 3 + [True] * 2


def test_without_a_compiler_for_gpus_it_says_how_to_get_one(monkeypatch, capsys):
    def nothing(*args, **kwargs):
        raise RuntimeError("no plugin")

    monkeypatch.setattr(gpu_compiled.topologies, "get_topology_desc", nothing)
    gpu_compiled.device.cache_clear()
    assert gpu_compiled.main([]) == 2
    assert "make benchmark-gpu-compiled" in capsys.readouterr().err
    assert gpu_compiled.main(["--only", "nothing like this"]) == 2
    assert "nothing matches" in capsys.readouterr().err
    gpu_compiled.device.cache_clear()


SECTION = RESULTS.split("\n### For a GPU, without one\n")[1].split("\n## ")[0]
COUNTED = {
    tuple(cells[:4]): int(cells[4])
    for cells in ([cell.strip() for cell in row.split("|")[1:-1]] for row in SECTION.splitlines())
    if len(cells) > 4 and cells[4].isdigit()
}


def kernels(operation, slots, batch, buffer="prioritized"):
    return COUNTED[buffer, operation, f"{slots:,}", f"{batch:,}"]


def test_counts_for_a_gpu_are_those_of_this_version_and_few():
    assert re.search(rf"(of|after) version {re.escape(jaxbuf.__version__)}\b", SECTION)
    prose = " ".join(SECTION.split("\n|")[0].split())
    # Four kernels for a step of a descent, and six for each update of a level of many nodes.
    for slots, most_of_cycle, most_of_sample in ((2**20, 40, 18), (2**24, 56, 24)):
        cycle, sample = kernels("cycle", slots, 256), kernels("sample", slots, 256)
        assert cycle <= most_of_cycle
        assert sample <= most_of_sample
        named = f"2^{slots.bit_length() - 1} slots"
        assert f"{named} takes {sample} kernels, and a cycle {cycle}" in prose
    assert f"2^27 slots {kernels('cycle', 2**27, 256, 'prioritized, CartPole')}" in prose


def test_counts_for_a_gpu_are_those_of_its_compiler():
    try:
        gpu_compiled.device()
    except Unavailable as reason:
        pytest.skip(str(reason))
    if f"jax {jax.__version__}," not in SECTION:
        pytest.skip(f"the results are those of another version of jax than {jax.__version__}")
    job = next(job for job in gpu_compiled.jobs() if job.name == "prioritized")
    slots, batch = job.workload.capacity, job.workload.sample_size
    for operation in ("sample", "cycle"):
        found = gpu_compiled.counted(job, "jaxbuf", operation)
        assert found.kernels == kernels(operation, slots, batch)
        assert (found.waits, found.copied) == (0, 0)

"""Counts of what programs for accelerators do, of texts by hand and with the compiler of a CPU."""

import csv
import dataclasses

import jax
import pytest

import jaxbuf
from benchmarks import compiled, hlo, page
from benchmarks.harness import Unavailable
from benchmarks.transitions import CARTPOLE
from benchmarks.workload import Workload

PROGRAM = """
HloModule jit_program, is_scheduled=true

%fused (param: f32[8]) -> f32[8] {
  %param = f32[8]{0:T(128)} parameter(0)
  ROOT %negate = f32[8]{0:T(128)} negate(%param), backend_config={"estimated_cycles":"999"}
}

%body (arg: (s32[], f32[8])) -> (s32[], f32[8]) {
  ROOT %step = (s32[], f32[8]) fusion(%arg), calls=%fused, config={"estimated_cycles":"10"}
}

%condition (arg.1: (s32[], f32[8])) -> pred[] {
  %arg.1 = (s32[]{:T(128)}, f32[8]{0:T(128)}) parameter(0)
  %count = s32[]{:T(128)} get-tuple-element(%arg.1), index=INDEX
  %last = s32[]{:T(128)} constant(7)
  ROOT %less = pred[]{:T(512)} compare(%count, %last), direction=DIRECTION
}

%small (arg.2: f32[8]) -> f32[8] {
  ROOT %copy.1 = f32[8]{0:T(128)} copy(%arg.2), backend_config={"estimated_cycles":"3"}
}

%large (arg.3: f32[8]) -> f32[8] {
  %copy.2 = f32[8]{0:T(128)} copy(%arg.3), backend_config={"estimated_cycles":"100"}
  ROOT %called = f32[8]{0:T(128)} call(%copy.2), to_apply=%small
}

ENTRY %main (input: f32[8]) -> f32[8] {
  %input = f32[8]{0:T(128)} parameter(0)
  %first = s32[]{:T(128)} constant(2)
  %known = s32[]{:T(128)S(6)} copy(%first), backend_config={"flag_configs":[]}
  %read = s32[] fusion(%input), metadata={op_name="jit(f)/read"}, b={"estimated_cycles":"1000"}
  %begin = (s32[], f32[8]{0:T(8)}, /*index=2*/s32[]) tuple(%known, %input, /*index=2*/%read)
  %loop = (s32[], f32[8]{0:T(128)}) while(%begin), condition=%condition, body=%body
  ROOT %chosen = f32[8] conditional(%read, %input), branch_computations={%small, %large}
}
"""


def program(index=0, direction="LT"):
    return PROGRAM.replace("INDEX", str(index)).replace("DIRECTION", direction)


@pytest.mark.parametrize(
    ("text", "times"),
    [
        (program(), 7 - 2),
        (program().replace("constant(7)", "constant(1)"), 0),
        # The number of steps depends on what is read.
        (program(index=2), 1),
        (program().replace("tuple(%known", "custom-call(%known"), 1),
        (program().replace(" body=%body", ' body=%body, x={"known_trip_count":{"n":"4"}}'), 4),
        (program(direction="NE"), 1),
    ],
)
def test_cycles_of_loops_branches_and_calls_add_up(text, times):
    expected = hlo.Estimate(10 * times + 1000 + 100 + 3, times + 1 + 2)
    assert hlo.estimate(text) == expected


def test_a_comparison_in_a_fusion_bounds_a_loop():
    less = """
%compares (param.1: s32[], param.2: s32[]) -> pred[] {
  ROOT %less = pred[]{:T(512)} compare(%param.1, %param.2), direction=LT
}

%condition"""
    text = program().replace("\n%condition", less, 1)
    text = text.replace("compare(%count, %last)", "fusion(%count, %last), calls=%compares")
    assert hlo.estimate(text) == hlo.estimate(program())


@pytest.fixture
def _on_a_cpu(monkeypatch):
    """Small buffers, compiled for the device that there is."""

    def small(device):
        found = {job.name: job for job in jobs(device)}
        for slots in (512, 1024):
            work = Workload(CARTPOLE, slots, add_size=4, sample_size=16, scan_length=1)
            for name in ("uniform", "prioritized", "Sharded, 1 chips"):
                if name in found:
                    yield dataclasses.replace(found[name], workload=work)

    jobs = compiled.jobs
    monkeypatch.setattr(compiled, "chips", lambda device: jax.devices())
    monkeypatch.setattr(compiled, "CHIPS", 1)
    monkeypatch.setattr(compiled, "jobs", small)
    # Other tests have use for what is there.
    monkeypatch.setattr(jax, "clear_caches", lambda: None)
    # flashbax relies on what jax does by default.
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


def counts(path):
    made, *lines = path.read_text().splitlines()
    return made, [*csv.DictReader(lines)]


@pytest.mark.usefixtures("_on_a_cpu")
def test_what_is_compiled_is_written(tmp_path, capsys):
    path = tmp_path / "counts.csv"
    given = ["--only", "(uniform|Sharded).*/add|uniform/512/cycle"]
    assert compiled.main(["tpu", *given, "--write", str(path)]) == 0
    made, found = counts(path)
    assert f", jax {jax.__version__}, " in made
    assert [(row["buffer"], row["operation"], row["slots"], row["batch"]) for row in found] == [
        ("uniform", "add", "512", "4"),
        ("uniform", "cycle", "512", "16"),
        ("Sharded, 1 chips", "add", "512", "4"),
        ("uniform", "add", "1024", "4"),
        ("Sharded, 1 chips", "add", "1024", "4"),
    ]
    assert [row["jaxbuf collectives"] for row in found[1:3]] == ["none", "1 all-gather"]
    assert [row["flashbax cycles"] for row in found[1:3]] == ["0", ""]
    assert compiled.main(["gpu", "--only", "^prioritized/512/", "--write", str(path)]) == 0
    _, found = counts(path)
    assert [row["operation"] for row in found] == ["add", "sample", "update", "cycle"]
    assert all(int(row["jaxbuf kernels"]) > 0 < int(row["flashbax kernels"]) for row in found)
    assert [row["jaxbuf copied"] for row in found] == ["0"] * 4
    assert "| prioritized |" in capsys.readouterr().out


@pytest.mark.usefixtures("_on_a_cpu")
def test_operations_that_do_not_compile_for_a_tpu_are_counted(monkeypatch, capsys):
    assert compiled.main(["tpu", "--check", "--only", "^uniform/(sample|get)$"]) == 0
    assert "2 of 2 operations compile" in capsys.readouterr().out

    def refuse(*arguments, **options):
        raise jax.errors.JaxRuntimeError("there is no room")

    monkeypatch.setattr(jax.stages.Lowered, "compile", refuse)
    assert compiled.main(["tpu", "--check", "--only", "^uniform/get$"]) == 1
    assert "uniform: get: there is no room" in capsys.readouterr().out
    assert compiled.main(["tpu", "--only", "uniform/512/add"]) == 0
    assert "fails" in capsys.readouterr().out


@pytest.mark.parametrize("device", ["gpu", "tpu"])
def test_without_a_compiler_it_says_how_to_get_one(monkeypatch, capsys, device):
    def nothing(*args, **kwargs):
        raise RuntimeError("no library")

    monkeypatch.setattr(compiled.topologies, "get_topology_desc", nothing)
    compiled.chips.cache_clear()
    for check in ([], ["--check"][: device == "tpu"]):
        assert compiled.main([device, *check]) == 2
        assert f"make benchmark-{device}-compiled" in capsys.readouterr().err
        assert compiled.main([device, *check, "--only", "nothing like this"]) == 2
        assert "nothing matches" in capsys.readouterr().err
    compiled.chips.cache_clear()


@pytest.mark.parametrize("device", ["gpu", "tpu"])
def test_counts_are_those_of_the_jobs_and_of_their_compiler(device):
    made, rows = counts(page.FOLDER / f"compiled-{device}.csv")
    found = {tuple(row[name] for name in compiled.ABOUT): row for row in rows}
    jobs = compiled.jobs(device)
    assert {job.about("cycle") for job in jobs} <= set(found)
    try:
        compiled.chips(device)
    except Unavailable as reason:
        pytest.skip(str(reason))
    if f" jax {jax.__version__}," not in made:
        pytest.skip(f"the counts are those of another version of jax than {jax.__version__}")
    job = next(job for job in jobs if job.name == "prioritized")
    counted = compiled.counted(device, job, "jaxbuf", "cycle")
    for name in compiled.COUNTS[device][:2]:
        assert counted[name] == found[job.about("cycle")][f"jaxbuf {name}"]


def test_counts_for_a_gpu_are_those_of_this_version_and_few():
    made, rows = counts(page.FOLDER / "compiled-gpu.csv")
    assert f"jaxbuf {jaxbuf.__version__}," in made
    found = {
        tuple(row[name] for name in compiled.ABOUT): int(row["jaxbuf kernels"]) for row in rows
    }
    # Four kernels for a step of a descent, and six for each update of a level of many nodes.
    for slots, most_of_cycle, most_of_sample in ((2**20, 40, 18), (2**24, 56, 24)):
        assert found["prioritized", "cycle", str(slots), "256"] <= most_of_cycle
        assert found["prioritized", "sample", str(slots), "256"] <= most_of_sample

"""The count of what programs for a TPU do, on texts by hand and with the compiler of a CPU."""

import dataclasses
from pathlib import Path

import jax
import pytest

from benchmarks import compiling, hlo, report, tpu_compiled
from benchmarks.harness import Unavailable
from benchmarks.transitions import CARTPOLE
from benchmarks.workload import Workload

RESULTS = Path(report.__file__).with_name("RESULTS.md")
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


def test_the_dearest_operations_come_first():
    [first, second] = hlo.dearest(program(), 2)
    assert first == (1000, "read = s32[]", "jit(f)/read")
    assert second[0] == 999


@pytest.fixture
def _on_a_cpu(monkeypatch):
    """Small buffers, compiled for the device that there is."""

    def small(slots):
        work = Workload(CARTPOLE, slots, add_size=4, sample_size=16, scan_length=2)
        return [dataclasses.replace(job, workload=work) for job in jobs(slots) if job.name in names]

    jobs, names = tpu_compiled.jobs, ("uniform", "Sharded, 1 chips")
    monkeypatch.setattr(tpu_compiled, "chips", jax.devices)
    monkeypatch.setattr(tpu_compiled, "CHIPS", 1)
    monkeypatch.setattr(tpu_compiled, "SLOTS", (64, 128))
    monkeypatch.setattr(tpu_compiled, "jobs", small)
    # Other tests have use for what is there.
    monkeypatch.setattr(jax, "clear_caches", lambda: None)
    # flashbax relies on what jax does by default.
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


def cells_of(path):
    table = report.section(path.read_text(), tpu_compiled.HEADING).strip().splitlines()
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in table if row[:1] == "|"]
    return [dict(zip(rows[0], row, strict=True)) for row in rows[2:]]


@pytest.mark.usefixtures("_on_a_cpu")
def test_what_is_compiled_for_a_tpu_is_written_line_by_line(tmp_path, capsys):
    path = tmp_path / "RESULTS.md"
    heading = tpu_compiled.HEADING
    path.write_text(f"# Results\n\nBefore.\n\n{heading}\n\nOld.\n\n## After\n\nIt.\n")

    def run(*arguments):
        assert tpu_compiled.main([*arguments, "--write", str(path)]) == 0

    run("--only", "/add", "--slots", "128", "64")
    found = cells_of(path)
    assert [(row["buffer"], row["slots"]) for row in found] == [
        (name, slots) for name in ("uniform", "Sharded, 1 chips") for slots in ("64", "128")
    ]
    assert {row["jaxbuf collectives"] for row in found} == {"none", "1 all-gather"}
    assert [row["flashbax cycles"] for row in found] == ["0", "0", "–", "–"]

    run("--only", "uniform/cycle", "--slots", "64", "--dearest", "1")
    both = cells_of(path)
    assert [both[0], *both[2:]] == found
    assert both[1]["operation"] == "cycle"
    text = path.read_text()
    assert text.startswith("# Results\n\nBefore.\n\n###")
    assert "Old." not in text
    assert text.endswith(" |\n\n## After\n\nIt.\n")
    assert f"jax {jax.__version__}," in text

    path.write_text(text.replace(f"jax {jax.__version__},", "jax 0.0.0,"))
    run("--only", "uniform/add", "--slots", "64")
    assert [row["slots"] for row in cells_of(path)] == ["64"]
    capsys.readouterr()


@pytest.mark.usefixtures("_on_a_cpu")
def test_operations_that_do_not_compile_for_a_tpu_are_counted(monkeypatch, capsys):
    assert tpu_compiled.main(["--check", "--only", "^uniform/(sample|get)$"]) == 0
    assert "2 of 2 operations compile" in capsys.readouterr().out

    def refuse(*arguments, **options):
        raise jax.errors.JaxRuntimeError("there is no room")

    monkeypatch.setattr(jax.stages.Lowered, "compile", refuse)
    assert tpu_compiled.main(["--check", "--only", "^uniform/get$"]) == 1
    assert "uniform: get: there is no room" in capsys.readouterr().out
    assert tpu_compiled.main(["--only", "uniform/add", "--slots", "64"]) == 0
    assert "fails" in capsys.readouterr().out


def test_without_a_compiler_for_tpus_it_says_how_to_get_one(monkeypatch, capsys):
    def nothing(*args, **kwargs):
        raise RuntimeError("no library")

    monkeypatch.setattr(tpu_compiled.topologies, "get_topology_desc", nothing)
    tpu_compiled.chips.cache_clear()
    for arguments in ([], ["--check"]):
        assert tpu_compiled.main(arguments) == 2
        assert "make benchmark-tpu-compiled" in capsys.readouterr().err
        assert tpu_compiled.main([*arguments, "--only", "nothing like this"]) == 2
        assert "nothing matches" in capsys.readouterr().err
    tpu_compiled.chips.cache_clear()


def test_cycles_for_a_tpu_are_those_of_its_compiler():
    try:
        tpu_compiled.chips()
    except Unavailable as reason:
        pytest.skip(str(reason))
    [job, *_] = tpu_compiled.jobs(2**20)
    [row] = [
        row
        for row in cells_of(RESULTS)
        if [row[name] for name in compiling.ABOUT] == job.about("cycle")
    ]
    if f"jax {jax.__version__}," not in RESULTS.read_text():
        pytest.skip(f"the results are those of another version of jax than {jax.__version__}")
    assert tpu_compiled.counted(job, "jaxbuf", "cycle")[:2] == [
        row["jaxbuf cycles"],
        row["jaxbuf ops"],
    ]

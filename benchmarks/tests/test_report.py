"""The report of the benchmark: targets, the picture, and what is kept of an earlier report."""

import dataclasses

import numpy as np
import pytest

from benchmarks import plot, report, targets
from benchmarks.__main__ import main, parse
from benchmarks.harness import Limit, Options, Row, RowResult, Timing
from benchmarks.rows import all_rows


def result(name, **times):
    """A row with the medians of one operation, `scan cycle`, in each of two runs."""
    row = Row(name, "Toys", ("scan cycle",), {library: lambda: None for library in times})
    microseconds = {library: np.array(found, float) for library, found in times.items()}
    reference = "jaxbuf" if "jaxbuf" in times else next(iter(times))
    return RowResult(
        row,
        {"scan cycle": Timing(microseconds, reference, runs=2)},
        {"scan cycle": {library: Limit(floor=0.5, memory=330) for library in times}},
        {**{library: {} for library in times}, "jaxbuf": {"bytes": "4.80"}},
    )


@pytest.mark.parametrize(
    ("measure", "expected"),
    [
        (targets.ratio("scan cycle", "flashbax"), [3.0, 1.0]),
        (targets.ratio("scan cycle", "cpprb"), None),
        (targets.ratio("scan add", "flashbax"), None),
        (targets.microseconds("scan cycle"), [1.0, 2.0]),
        (targets.of_floor("scan cycle"), [0.5, 0.25]),
        (targets.memory("scan cycle", batch=165), [2.0]),
        (targets.fact("bytes"), [4.8]),
        (targets.fact("nothing"), None),
    ],
)
def test_measures(measure, expected):
    found = measure.of(result("toys", jaxbuf=[1.0, 2.0], flashbax=[3.0, 2.0]), "jaxbuf")
    assert found is None if expected is None else list(found) == expected
    assert measure.text


def test_floors_are_told_once_where_they_are_alike():
    row = result("toys", jaxbuf=[1.0, 2.0], flashbax=[3.0, 2.0])
    once = report.row_markdown(row)
    assert "0.5 (×3.0)" in once
    assert "flashbax: floor" not in once
    assert "flashbax: memory, KiB" in once
    row.row = dataclasses.replace(row.row, alike=False)
    assert "flashbax: floor, µs" in report.row_markdown(row)


def test_growth_compares_the_numbers_of_slots_it_names():
    row = result("toys", **{"jaxbuf-4": [1.0, 1.0], "jaxbuf-8": [9.0, 9.0], "jaxbuf-16": [2, 3]})
    assert list(targets.growth(("scan cycle",), 2, 4).of(row, "jaxbuf")) == [2.0, 3.0]
    assert targets.growth(("scan cycle",), 2, 5).of(row, "jaxbuf") is None
    assert targets.growth(("scan cycle", "scan add"), 2, 4).of(row, "jaxbuf") is None


def test_a_target_is_met_only_if_it_is_in_every_run():
    found = {"per-mujoco": [[1.0, 1.0], [2.0, 2.5]], "agent": [[1.0, 1.0], [1.5, 1.2]]}
    results = [result(name, jaxbuf=ours, flashbax=theirs) for name, (ours, theirs) in found.items()]
    results[1].timings["scan cycle"].microseconds["pure"] = np.array([1.0, 0.8])
    results[1].timings["scan iteration"] = results[1].timings.pop("scan cycle")
    cells = {
        (row, what): rest
        for row, what, *rest in (verdict.cells for verdict in targets.verdicts(results))
    }
    assert cells["per-mujoco", "scan cycle: flashbax / jaxbuf"] == [
        "at least 2.5, pure 1",
        "2.00–2.50",
        "**missed**",
        "–",
        "",
    ]
    assert cells["agent", "scan iteration: flashbax / jaxbuf"] == [
        "at least 1.15, pure 1",
        "1.20–1.50",
        "met",
        "1.50",
        "met",
    ]
    assert cells["gpu-per-20-256", "scan cycle, µs"] == [
        "at most 40",
        "–",
        "not measured here",
        "–",
        "",
    ]
    assert not any(row == "exchange" for row, _ in cells)
    assert "1 of 2 measured targets are met, and 1 without" in report.targets_markdown(
        results, Options()
    )
    assert "a trial" in report.targets_markdown(results, Options(quick=True))


def test_targets_name_rows_and_operations_that_there_are():
    rows = {row.name: row for row in all_rows(Options())}
    for target in targets.CPU_TARGETS:
        row = rows[target.row]
        assert set(target.measure.operations) <= set(row.operations), target
        assert (target.measure.peer or row.reference) in row.builders, target


def test_what_was_written_below_the_tables_is_kept(tmp_path):
    path = tmp_path / "RESULTS.md"
    report.write(path, "# Old\n")
    path.write_text(f"{path.read_text()}\n{report.NOTES}\n\n* **Why.** Because.\n")
    report.write(path, "# New\n")
    report.write(path, "# Newer\n")
    assert path.read_text() == f"# Newer\n\n{report.NOTES}\n\n* **Why.** Because.\n"


def test_growth_is_drawn_for_each_library(tmp_path):
    path = tmp_path / "growth.svg"
    assert not plot.growth([result("per-mujoco", jaxbuf=[1.0, 2.0])], path)
    rows = [
        result(f"growth-{library}", **{f"{library}-4": [1.0, 2.0], f"{library}-8": [3.0, 3.0]})
        for library in ("jaxbuf", "flashbax")
    ]
    assert plot.growth(rows, path)
    assert "scan cycle" in path.read_text()
    first = path.read_bytes()
    plot.growth(rows, path)
    assert path.read_bytes() == first


def test_the_command_line_names_the_picture_and_the_runs(tmp_path):
    given = ["--write", str(tmp_path / "R.md"), "--runs", "3", "--only", "agent"]
    options, outputs = parse(given)
    assert outputs.plot == tmp_path / "growth.svg"
    assert options.runs == 3
    assert outputs.command == "python -m benchmarks --runs 3 --only agent"
    assert parse([])[1].plot is None
    assert "medians over 3 runs of" in report.markdown([], options, outputs.command, {})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--only", "nothing"], "nothing matches --only nothing"),
        (["--only", "overhead", "--libraries", "none"], "no library none in these rows; choose"),
    ],
)
def test_the_command_line_refuses_what_there_is_not(given, message, capsys):
    assert main(given) == 2
    assert message in capsys.readouterr().err

"""The report of the benchmark: its files, its page, and what differs from an earlier file."""

import json
import sys

import numpy as np
import pytest

from benchmarks import __main__ as program
from benchmarks import limits, page, report
from benchmarks.harness import Contestant, Operation, Options, Row, RowResult, Timing, UnequalWork
from benchmarks.rows import all_rows


def result(name="toys", runs=1, **times):
    """A row with the times of one operation."""
    reference = "jaxbuf" if "jaxbuf" in times else next(iter(times))
    row = Row(name, "Toys", ("scan cycle",), dict.fromkeys(times), reference)
    found = {library: np.array(turns, float) for library, turns in times.items()}
    timings = {"scan cycle": Timing(found, reference, runs)}
    return RowResult(row, timings, {"scan cycle": {"jaxbuf": 0.5}}, {"jaxbuf": {"bytes": "4.80"}})


def test_a_row_has_medians_quartiles_and_floors():
    row = result(flashbax=[3, 2, 6], jaxbuf=[1, 2, 2])
    [found] = report.as_dict(row)["operations"].values()
    assert found["us"] == {"flashbax": 3, "jaxbuf": 2}
    assert found["ratio"] == {"flashbax": [2, 3, 3]}
    assert found["floor"] == {"jaxbuf": 0.5}
    header, _, line = report.section("toys", report.as_dict(row)).splitlines()[4:7]
    cells = [[cell.strip() for cell in text.split("|")[2:-1]] for text in (header, line)]
    assert dict(zip(*cells, strict=True)) == {
        "jaxbuf, µs": "2",
        "flashbax, µs": "3",
        "flashbax / jaxbuf": "3.00 (2.00–3.00)",
        "jaxbuf: floor, µs": "0.5",
    }


def test_a_file_has_a_line_for_each_operation():
    rows = {"toys": report.as_dict(result(jaxbuf=[1.23456], flashbax=[3.0]))}
    text = report.as_json("python", {"cores": "2"}, rows)
    assert json.loads(text) == {"command": "python", "machine": {"cores": "2"}, "rows": rows}
    assert sum('"us":{"jaxbuf":1.235,"flashbax":3}' in line for line in text.splitlines()) == 1


OLD = [0.98, 1.0, 1.02]


@pytest.mark.parametrize(
    ("new", "line"),
    [
        ([0.7, 0.8, 0.9], "was 1.00 (0.98–1.02) and is 0.80 (0.70–0.90)"),
        ([1.21, 1.25, 1.3], "was 1.00 (0.98–1.02) and is 1.25 (1.21–1.30)"),
        ([1.1, 1.19, 1.3], None),
        ([1.0, 1.25, 1.3], None),
        ([0.7, 0.8, 0.99], None),
    ],
)
def test_what_moved(new, line):
    def rows(ratio):
        operation = {"us": {"a": 1, "jaxbuf": 1}, "ratio": {"a": ratio}}
        return {"toys": {"reference": "jaxbuf", "operations": {"scan add": operation}}}

    found = report.moved(rows(OLD), rows(new))
    fell = new[1] < OLD[1]
    wanted = {("toys", "scan add", "a", fell): f"toys: scan add: a / jaxbuf {line}"} if line else {}
    assert found == wanted
    assert not report.moved({}, rows(new))


class Toy(Contestant):
    """Takes as long as it is told."""

    seconds = 1.0

    def verify(self):
        pass

    def operations(self):
        return {name: Operation(lambda calls: self.seconds * calls) for name in ("add", "sample")}


class Slow(Toy):
    """Is slower, or not, one run after the other."""

    def __init__(self, runs):
        self.seconds = runs.pop(0)


@pytest.mark.parametrize("runs", [[1.0], [2.0, 2.0], [2.0, 1.0], [2.0, 0.5]])
def test_against_a_file_a_row_is_named_if_it_differs_twice(tmp_path, monkeypatch, capsys, runs):
    named = runs == [2.0, 2.0]
    path, made = tmp_path / "old.json", [1.0, *runs]
    builders = {"jaxbuf": lambda: Slow(made), "peer": Toy}
    row = Row("toys", "Toys", ("add", "sample"), builders)
    toys = program.Program("toys", "Toys.", lambda options: [row], tmp_path / "toys.json")
    for name in ("COPIED", "LARGEST"):
        monkeypatch.setattr(limits, name, 2**16)
    assert program.main(["--json", str(path), "--repeats", "2", "--only", "add"], toys) == 0
    assert "| add " in capsys.readouterr().out
    assert program.main(["--against", str(path), "--repeats", "2"], toys) == named
    assert not made
    assert ("toys: add: peer / jaxbuf was 1.00" in capsys.readouterr().out) == named
    assert not (tmp_path / "toys.json").exists()
    limits.forget()


def test_unequal_work_fails(tmp_path, capsys):
    class Less(Toy):
        def verify(self):
            raise UnequalWork("it does nothing")

    row = Row("toys", "Toys", ("add",), {"jaxbuf": Toy, "less": Less})
    toys = program.Program("toys", "Toys.", lambda options: [row], tmp_path / "toys.json")
    assert program.main(["--repeats", "1", "--against", str(page.FOLDER / "gpu.json")], toys) == 1
    assert "less FAILED the check of equal work: it does nothing." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--only", "nothing"], "nothing matches --only nothing"),
        (["--only", "loop-32", "--libraries", "none"], "no library none in these rows; choose"),
        (["--only", "loop-32", "--against", "none.json"], "No such file"),
        (["--only", "("], "is not a regular expression"),
        (["--runs", "0"], "--runs must be at least 1"),
    ],
)
def test_the_command_line_refuses_what_there_is_not(given, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        sys.exit(program.main(given))
    assert message in " ".join(capsys.readouterr().err.split())


def test_the_page_is_made_of_the_files():
    text = page.PAGE.read_text()
    _, heading, below = text.partition(page.NOTES)
    assert text == page.page(heading + below)
    assert len(text.encode()) <= 30_000


def test_the_files_have_the_rows_and_operations_that_there_are():
    found = json.loads((page.FOLDER / "cpu.json").read_text())["rows"]
    rows = {row.name: row for row in all_rows(Options())}
    assert set(found) == set(rows)
    for name, row in rows.items():
        assert list(found[name]["operations"]) == list(row.operations)
        assert found[name]["reference"] == row.reference
        libraries = {library for one in found[name]["operations"].values() for library in one["us"]}
        assert libraries == set(row.builders)

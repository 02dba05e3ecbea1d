"""The README agrees with what it refers to: the benchmark's results, the citation and the links."""

import json
import re
import tomllib
from pathlib import Path

import pytest

import jaxbuf

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PAGE = (ROOT / "benchmarks" / "RESULTS.md").read_text()
RESULTS = {
    name: json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())
    for name in ("cpu", "gpu")
}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

MEASURED = {
    "a whole DQN agent on CartPole, one training iteration": ("agent", "scan iteration"),
    "256 of 2^20 MuJoCo transitions, in a `lax.scan` (without weights)": (
        "per-mujoco",
        "scan cycle",
    ),
    "the same on a GPU (H100, jax 0.11.2)": ("gpu-per-20-256", "scan cycle"),
    "256 of 2^20 MuJoCo transitions, from Python": ("per-mujoco", "python cycle+weights"),
    "32 Atari transitions, from Python": ("per-atari-32", "python cycle+weights"),
    "add 256 states to the 100,000 of highest reward": ("gflownet-100000", "python add"),
    "sample 256 different states of 100,000 by the softmax of rewards": (
        "gflownet-100000",
        "python sample",
    ),
}


def cells(line):
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def tables(text):
    """The tables of a markdown text, each a dictionary of its columns for every row's name."""
    blocks = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
    for block in blocks:
        header, _, *rows = (cells(line) for line in block.splitlines())
        yield {row[0]: dict(zip(header, row, strict=True)) for row in rows}


def speed_tables():
    section = README.split("\n## How fast\n")[1].split("\n## ")[0]
    return list(tables(section))


def measured(row, operation, library):
    """The median ratio in the results, of a library to jaxbuf."""
    rows = RESULTS["gpu" if row.startswith("gpu-") else "cpu"]["rows"]
    return rows[row]["operations"][operation]["ratio"][library][1]


def test_every_row_has_its_measurement():
    assert {name for table in speed_tables() for name in table} == set(MEASURED)


@pytest.mark.parametrize("name", MEASURED)
def test_speeds_are_those_of_the_results(name):
    columns = next(table[name] for table in speed_tables() if name in table)
    told = {library: value for library, value in list(columns.items())[1:] if value != "–"}
    assert told
    for library, value in told.items():
        digits = len(value.partition(".")[2])
        assert abs(float(value) - measured(*MEASURED[name], library)) <= 0.5001 * 10**-digits


def test_what_a_ring_of_numpy_arrays_costs_is_that_of_the_results():
    prose = " ".join(README.split())
    (told,) = re.findall(r"and (\d+) to (\d+) times as long as a ring of NumPy", prose)
    (step,) = re.findall(r"with such a ring takes ([\d.]+) of the time", prose)
    ratios = [
        1 / measured(row, f"python {call}", "numpy")
        for row in ("loop-1", "loop-32")
        for call in ("add", "sample")
    ]
    assert [*map(int, told)] == [int(min(ratios)), int(max(ratios))]
    assert abs(float(step) - measured("loop-dqn", "python step", "numpy")) <= 0.005


def test_what_devices_send_is_that_of_the_results():
    section = PAGE.split("\n## Over several devices\n")[1].split("\n## ")[0]
    (row,) = re.findall(r"^\| Sharded \| 8 \| yes \| ([^|]+) \| ([\d,]+) \|", section, re.MULTILINE)
    count = sum(int(number) for number in re.findall(r"\d+", row[0]))
    size = round(int(row[1].replace(",", "")) / 1000)
    names = {3: "three", 4: "four", 5: "five", 6: "six"}
    guide = " ".join((ROOT / "docs" / "guides" / "devices.md").read_text().split())
    assert f"has {names[count]} collectives, which together return {size} KB" in guide


def test_the_command_is_that_of_the_results():
    assert f"`{RESULTS['cpu']['command']}`" in README
    assert f"version {RESULTS['cpu']['machine']['jaxbuf']} " in README


def test_all_marks_of_the_comparison_are_known():
    guide = (ROOT / "docs" / "guides" / "moving.md").read_text()
    (table,) = tables(guide.split("\n## How they compare\n")[1].split("\n## ")[0])
    assert len(table) > 10
    for row, columns in table.items():
        marks = list(columns.values())[1:]
        assert len(marks) == 5, row
        assert marks[0] == "✓", row
        assert set(marks) <= {"✓", "–", "option"}, row


def test_all_examples_are_listed():
    line = README.split("\n* Examples: ")[1].split("\n* ")[0]
    names = re.findall(r"[`\[](?:python examples/)?(\w+)(?:\.py --help)?[`\]]", line)
    files = (ROOT / "examples").glob("*.py")
    assert sorted(names) == sorted(path.stem for path in files if path.stem != "common")


def test_the_citation_is_of_this_version():
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {jaxbuf.__version__}\n" in citation
    assert f"\nlicense: {PROJECT['license']}\n" in citation


def test_the_changelog_begins_with_this_version():
    versions = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert jaxbuf.__version__ == next(version for version in versions if version != "Unreleased")

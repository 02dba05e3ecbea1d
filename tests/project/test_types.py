"""Pyright finds wrong calls, and no others: ``tests/typing/calls.py`` says which ones are wrong."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("pyright")

ROOT = Path(__file__).parents[2]
CALLS = ROOT / "tests" / "typing" / "calls.py"


def test_pyright_finds_the_wrong_calls_and_no_others():
    pyright = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable]
    done = subprocess.run(
        [*pyright, "--outputjson", CALLS], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    report = json.loads(done.stdout)
    found = {error["range"]["start"]["line"] for error in report["generalDiagnostics"]}
    lines = CALLS.read_text().splitlines()
    wrong = {i for i, line in enumerate(lines) if line.endswith("# wrong")}
    assert len(wrong) > 30
    assert [lines[i] for i in sorted(found ^ wrong)] == []

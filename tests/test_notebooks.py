"""Every notebook runs from a clean kernel, and what is kept of it is what its script says."""

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

jupytext = pytest.importorskip("jupytext")
pytest.importorskip("nbclient")
notebooks = importlib.import_module("notebooks")

ROOT = Path(__file__).parent.parent
SECONDS = 90
# A picture of 80 dots per inch takes about 30 kB.
MOST_BYTES = 400_000
NEEDS_MPI = {"manager_worker"}
QUICKLY = {"JAX_DISABLE_MOST_OPTIMIZATIONS", "XLA_FLAGS"}


def outputs(notebook):
    return [output for cell in notebook.cells for output in cell.get("outputs", ())]


def test_each_script_has_its_notebook():
    assert {path.stem for path in notebooks.FOLDER.glob("*.ipynb")} == set(notebooks.NAMES)


@pytest.mark.parametrize("name", notebooks.NAMES)
def test_what_is_kept_was_run_from_the_script(name):
    script, executed = notebooks.read_script(name), notebooks.read_executed(name)
    cells = [[(cell.cell_type, cell.source) for cell in half.cells] for half in (script, executed)]
    assert cells[0] == cells[1], f"run `make notebooks ARGS={name}`"
    counts = [cell.execution_count for cell in executed.cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1))
    for output in outputs(executed):
        assert output.output_type != "error"
        assert output.get("name") != "stderr", output


@pytest.mark.parametrize("name", notebooks.NAMES)
def test_what_is_kept_is_small_and_names_no_machine(name):
    path = notebooks.FOLDER / f"{name}.ipynb"
    assert path.stat().st_size <= MOST_BYTES
    pictures = "image/png"
    shown = [
        {kind: value for kind, value in output.get("data", output).items() if kind != pictures}
        for output in outputs(notebooks.read_executed(name))
    ]
    places = re.compile(rf"{re.escape(str(ROOT))}|site-packages|/(home|Users|root|tmp|var)/")
    assert not places.search(str(shown))


@pytest.mark.parametrize("name", notebooks.NAMES)
def test_the_first_code_cell_installs_where_there_is_nothing(name):
    cells = [cell for cell in notebooks.read_script(name).cells if cell.cell_type == "code"]
    assert re.match(
        r"try:\n    import jaxbuf\n"
        r"except ImportError:  # as on Colab\n"
        r"""    %pip install -q "jaxbuf\[[a-z,]+\]"\n""",
        cells[0].source,
    )


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.mpi] * (name in NEEDS_MPI)) for name in notebooks.NAMES],
)
def test_it_runs_from_a_clean_kernel(name):
    command = [sys.executable, "-m", "notebooks", "--check", "--seconds", str(SECONDS), name]
    # They train, so what is compiled quickly would take longer in the end.
    env = {key: value for key, value in os.environ.items() if key not in QUICKLY}
    ran = subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=2 * SECONDS
    )
    assert ran.returncode == 0, ran.stderr


def test_a_name_that_is_no_notebook_is_refused():
    command = [sys.executable, "-m", "notebooks", "quick"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 2
    assert "there is no notebook quick; choose from" in ran.stderr

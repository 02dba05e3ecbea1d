"""Every notebook runs from a clean kernel, and what is kept of it is what its script says."""

import importlib
import importlib.metadata
import os
import re
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest

jupytext = pytest.importorskip("jupytext")
pytest.importorskip("nbclient")
notebooks = importlib.import_module("notebooks")
main = importlib.import_module("notebooks.__main__").main

ROOT = Path(__file__).parents[2]
SECONDS = 90
# A picture of 80 dots per inch takes about 30 kB.
MOST_BYTES = 400_000
NEEDS_MPI = {"manager_worker"}
QUICKLY = {"JAX_DISABLE_MOST_OPTIMIZATIONS", "XLA_FLAGS"}
# They train for so long that what is compiled quickly takes longer, every time but the first.
TRAINS = {"prioritized_replay", "gflownet", "hindsight"}


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


def first_code(name):
    """The first cell that holds code."""
    cells = notebooks.read_script(name).cells
    return next(cell.source for cell in cells if cell.cell_type == "code")


@pytest.mark.parametrize("name", notebooks.NAMES)
def test_the_first_code_cell_installs_where_there_is_nothing(name):
    cell = first_code(name)
    assert re.match(
        r"try:\n    import jaxbuf\n"
        r"except ImportError:  # as on Colab\n"
        r"""    %pip install -q "jaxbuf\[[a-z,]+\]"\n""",
        cell,
    )
    extras = {extra for found in re.findall(r"jaxbuf\[(.+?)\]", cell) for extra in found.split(",")}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert extras <= set(project["optional-dependencies"])


def build_wheel(folder):
    """A wheel of the package in Python, put together by hand, so that nothing is compiled."""
    metadata = importlib.metadata.distribution("jaxbuf")
    info = f"jaxbuf-{metadata.version}.dist-info"
    files = {
        f"{info}/METADATA": metadata.read_text("METADATA"),
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    for path in (ROOT / "jaxbuf").rglob("*.py"):
        files[str(path.relative_to(ROOT))] = path.read_text()
    record = "".join(f"{name},,\n" for name in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(folder / f"jaxbuf-{metadata.version}-py3-none-any.whl", "w") as wheel:
        for name, text in {**files, f"{info}/RECORD": record}.items():
            wheel.writestr(name, text)


# Without site, the link of an editable installation is not followed, so there is no jaxbuf.
WITHOUT_JAXBUF = """
import importlib.util, sys
sys.path[1:1] = [{target!r}, *{packages!r}]
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
for found in (False, True):
    assert (importlib.util.find_spec("jaxbuf") is not None) == found
    shell.run_cell({cell!r}).raise_error()
import jaxbuf
print(jaxbuf.__file__)
"""


def test_the_first_code_cell_installs_the_package_in_fact(tmp_path):
    packages = sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
    if any((Path(folder) / "jaxbuf").exists() for folder in packages):
        pytest.skip("jaxbuf is installed here, and not as a link to this folder")
    wheels, target = tmp_path / "wheels", tmp_path / "target"
    wheels.mkdir()
    target.mkdir()
    build_wheel(wheels)
    cell = first_code("quickstart").split("\n\n")[0]
    program = WITHOUT_JAXBUF.format(target=str(target), packages=packages, cell=cell)
    env = {
        **{key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
        "IPYTHONDIR": str(tmp_path / "ipython"),
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(wheels),
        "PIP_NO_DEPS": "1",
        "PIP_TARGET": str(target),
    }
    ran = subprocess.run(
        [sys.executable, "-S", "-c", program],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "does not provide the extra" not in ran.stdout + ran.stderr
    assert ran.stdout.splitlines()[-1] == str(target / "jaxbuf" / "__init__.py")
    assert len(list(target.glob("jaxbuf-*.dist-info"))) == 1


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.mpi] * (name in NEEDS_MPI)) for name in notebooks.NAMES],
)
def test_it_runs_from_a_clean_kernel(name, monkeypatch, capsys):
    if name in TRAINS:
        for variable in QUICKLY:
            monkeypatch.delenv(variable, raising=False)
    assert main(["--check", "--seconds", str(SECONDS), name]) == 0
    told = re.fullmatch(rf"{name} +(\d+\.\d) s\n", capsys.readouterr().out)
    assert told
    assert float(told[1]) <= 2 * SECONDS


def test_a_name_that_is_no_notebook_is_refused():
    command = [sys.executable, "-m", "notebooks", "quick"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 2
    assert "there is no notebook quick; choose from" in ran.stderr

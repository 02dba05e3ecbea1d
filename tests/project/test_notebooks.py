"""Every notebook runs from a clean kernel, and what is kept of it is what its script says."""

import importlib
import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
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
    line = r"""\n    %pip install -q "(?:\.\.|jaxbuf)\[([a-z,]+)\](?: @ git\+https://\S+)?"\n"""
    extras = re.search(line, cell)[1].split(",")
    said = cell.index("\n# Where this notebook stands alone")
    assert said < cell.index("%pip") < cell.index("assert importlib") < cell.rindex("import ")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(extras) <= set(project["optional-dependencies"])


def test_pip_is_told_where_the_project_is():
    with_address = {"urls": {"Repository": "https://example.org/jaxbuf", "Changelog": "..."}}
    source, advice = notebooks.source_of(with_address, "[examples]")
    assert source == "jaxbuf[examples] @ git+https://example.org/jaxbuf"
    assert "https://example.org/jaxbuf" in advice
    source, advice = notebooks.source_of({}, "[examples]")
    assert source == "..[examples]"
    assert "clone the repository" in advice


# Builds a wheel of the package in Python, so that nothing is compiled and no build tool is needed.
BACKEND = """
import zipfile
from pathlib import Path

def build_wheel(folder, config_settings=None, metadata_directory=None):
    name = "jaxbuf-{version}-py3-none-any.whl"
    files = {{
        "jaxbuf-{version}.dist-info/METADATA": {metadata!r},
        "jaxbuf-{version}.dist-info/WHEEL":
            "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n",
    }}
    root = Path({root!r})
    for path in (root / "jaxbuf").rglob("*.py"):
        files[str(path.relative_to(root))] = path.read_text()
    files["jaxbuf-{version}.dist-info/RECORD"] = "".join(f"{{file}},,\\n" for file in files)
    with zipfile.ZipFile(Path(folder) / name, "w") as wheel:
        for file, text in files.items():
            wheel.writestr(file, text)
    return name
"""


def make_clone(folder):
    """A folder that pip installs the package from, with one of notebooks in it."""
    metadata = importlib.metadata.distribution("jaxbuf")
    (folder / "notebooks").mkdir(parents=True)
    (folder / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    )
    text = metadata.read_text("METADATA")
    backend = BACKEND.format(version=metadata.version, metadata=text, root=str(ROOT))
    (folder / "backend.py").write_text(backend)
    return folder / "notebooks"


# Without site, only the folders that are named here hold packages.
WITHOUT_JAXBUF = """
import importlib.util, sys
sys.path[1:1] = [{target!r}, {packages!r}]
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
for found in (False, True):
    assert (importlib.util.find_spec("jaxbuf") is not None) == found
    shell.run_cell({cell!r}).raise_error()
import jaxbuf
print(jaxbuf.__file__)
"""


def run_first_cell(tmp_path, folder, target):
    """Runs what installs the package in a fresh Python, in some folder."""
    (packages := tmp_path / "packages").mkdir()
    for place in map(Path, sys.path):
        for found in place.iterdir() if place.name == "site-packages" else ():
            if not found.name.startswith("jaxbuf") and not (packages / found.name).exists():
                (packages / found.name).symlink_to(found)
    cell = first_code("quickstart").partition("import functools")[0]
    # The clone stands in for the repository, whose address is not within reach of a test.
    cell = re.sub(r'"jaxbuf(\[[a-z,]+\]) @ [^"]*"', r'"..\1"', cell)
    env = {
        **{key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
        "IPYTHONDIR": str(tmp_path / "ipython"),
        "PIP_NO_INDEX": "1",
        "PIP_NO_DEPS": "1",
        "PIP_TARGET": str(target),
    }
    program = WITHOUT_JAXBUF.format(target=str(target), packages=str(packages), cell=cell)
    return subprocess.run(
        [sys.executable, "-S", "-c", program],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )


def test_the_first_code_cell_installs_the_package_in_fact(tmp_path):
    (target := tmp_path / "target").mkdir()
    ran = run_first_cell(tmp_path, make_clone(tmp_path / "clone"), target)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "does not provide the extra" not in ran.stdout + ran.stderr
    assert ran.stdout.splitlines()[-1] == str(target / "jaxbuf" / "__init__.py")
    assert len(list(target.glob("jaxbuf-*.dist-info"))) == 1


def test_the_first_code_cell_says_what_to_do_where_it_cannot(tmp_path):
    (empty := tmp_path / "some" / "folder").mkdir(parents=True)
    ran = run_first_cell(tmp_path, empty, tmp_path / "target")
    assert ran.returncode == 1
    assert "jaxbuf was not installed, for the reason above: clone the" in ran.stdout


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

"""Notebooks as pairs: ``NAME.py`` is written by hand, ``NAME.ipynb`` is the same after a run.

``python -m notebooks`` runs them again; see ``make notebooks``.
"""

import asyncio
import os
import re
import tempfile
import tomllib
from pathlib import Path
from typing import Any

import jupytext
import nbformat
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbformat import NotebookNode

FOLDER = Path(__file__).parent
NAMES = sorted(path.stem for path in FOLDER.glob("*.py") if not path.stem.startswith("_"))
FORMAT = "py:percent"
METADATA = {
    "jupytext": {"formats": f"ipynb,{FORMAT}"},
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


# The line of a script that stands for ``INSTALL`` in the first cell of its notebook.
INSTALLS = re.compile(r"^# install jaxbuf(\[[a-z,]+\])$", re.MULTILINE)
INSTALL = """import importlib.util

# Where this notebook stands alone, as on Colab: {advice}.
if not importlib.util.find_spec("jaxbuf"):
    # %pip install -q "{source}"
assert importlib.util.find_spec("jaxbuf"), (
    "jaxbuf was not installed, for the reason above: {advice}"
)
"""


def source_of(project: dict[str, Any], extras: str) -> tuple[str, str]:
    """Returns what notebooks tell pip to install, and advice for readers where that fails.

    That is the repository, if the project's metadata has its address, and else the clone in which
    the notebook lies.
    """
    if address := project.get("urls", {}).get("Repository"):
        return f"jaxbuf{extras} @ git+{address}", f"pip takes it from {address}"
    return f"..{extras}", "clone the repository, and start the notebook in its folder notebooks"


def read_script(name: str) -> NotebookNode:
    """The cells of ``NAME.py``, not run."""
    project = tomllib.loads((FOLDER.parent / "pyproject.toml").read_text())["project"]

    def install(found: re.Match[str]) -> str:
        source, advice = source_of(project, found[1])
        return INSTALL.format(source=source, advice=advice)

    script = INSTALLS.sub(install, (FOLDER / f"{name}.py").read_text(), count=1)
    return jupytext.reads(script, fmt=FORMAT)


def read_executed(name: str) -> NotebookNode:
    """The cells of ``NAME.ipynb`` with their outputs."""
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def execute(name: str, seconds: int) -> NotebookNode:
    """Runs ``NAME.py`` cell by cell in a kernel of its own, in an empty folder.

    Raises:
        nbclient.exceptions.CellExecutionError: If a cell raises.
        nbclient.exceptions.CellTimeoutError: If one takes longer than ``seconds``.
    """
    notebook = read_script(name)
    notebook.metadata = METADATA
    for i, cell in enumerate(notebook.cells):
        cell.id = f"{name}-{i}"
        cell.metadata = {}
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    with tempfile.TemporaryDirectory() as folder:
        kernel = AsyncKernelManager(
            # Only the kernel of this Python, whatever kernels a user has installed.
            kernel_spec_manager=KernelSpecManager(kernel_dirs=[]),
            # Sockets in the folder: two that start at once would compete for a port.
            transport="ipc",
            connection_file=str(Path(folder) / "kernel.json"),
        )
        (Path(folder) / "empty").mkdir()
        # Beside it, as in a clone.
        (Path(folder) / "examples").symlink_to(FOLDER.parent / "examples")
        client = NotebookClient(
            notebook,
            km=kernel,
            timeout=seconds,
            record_timing=False,
            coalesce_streams=True,
            resources={"metadata": {"path": str(Path(folder) / "empty")}},
        )
        # So that the kernel ends with the notebook.
        client.owns_km = True
        asyncio.run(client.async_execute())
    nbformat.validate(notebook)
    return notebook

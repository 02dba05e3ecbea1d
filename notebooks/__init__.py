"""Notebooks as pairs: ``NAME.py`` is written by hand, ``NAME.ipynb`` is the same after a run.

``python -m notebooks`` runs them again; see ``make notebooks``.
"""

import asyncio
import os
import tempfile
from pathlib import Path

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


def read_script(name: str) -> NotebookNode:
    """The cells of ``NAME.py``, not run."""
    return jupytext.reads((FOLDER / f"{name}.py").read_text(), fmt=FORMAT)


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

"""Modules import along one direction: a room knows those below it, never those above."""

import ast
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "jaxbuf"
# From the ground up. Rooms of one floor may know each other in the order in which they stand.
ROOMS = (
    "core",
    "occupancy",
    "strategies",
    "pacing",
    "buffers",
    "accumulators",
    "wrappers",
    "views",
    "io",
    "monitoring",
    "interop",
    "testing",
    "mpi",
)


def imported(path: Path) -> set[str]:
    """The modules of the package that a file imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {name for name in found if name.startswith("jaxbuf.")}


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_nothing_from_above(room):
    floor = ROOMS.index(room)
    paths = [*(PACKAGE / room).rglob("*.py")]
    assert paths
    for path in paths:
        above = {name for name in imported(path) if name.split(".")[1] in ROOMS[floor + 1 :]}
        assert not above, f"{path.relative_to(PACKAGE)} imports {above}"


def test_every_module_has_a_room():
    inside = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    assert inside == {*ROOMS}


def test_mpi_is_imported_in_its_own_room_alone():
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text()
        if path.relative_to(PACKAGE).parts[0] != "mpi":
            assert not re.search("^ *(import|from) mpi4", text, re.MULTILINE), path


def test_no_files_import_each_other():
    """Imports under ``TYPE_CHECKING`` count: a reader follows them too."""
    files = {
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path
        for path in PACKAGE.rglob("*.py")
        if path.name != "__init__.py"
    }
    below = {
        # `from jaxbuf.a import b` names a file, or something in one.
        name: {x if x in files else x.rpartition(".")[0] for x in imported(path)} & files.keys()
        for name, path in files.items()
    }
    while lowest := [name for name, needs in below.items() if not needs]:
        for name in lowest:
            del below[name]
        below = {name: needs - {*lowest} for name, needs in below.items()}
    assert not below, f"these import each other, or one that does: {below}"


# Above the buffers, code asks a buffer or a strategy instead of its class. What is left:
ASKED = {
    ("io/resizing.py", "Sharded"): "shards are dealt anew where a pytree has them",
    ("monitoring/memory.py", "'add'"): "a user's own buffers count in a report of memory",
    ("monitoring/memory.py", "'replace'"): "likewise",
    ("monitoring/monitor.py", "'add_scalar'"): "a check of a user's writer",
    ("monitoring/monitor.py", "'log'"): "a check of a user's run",
    ("monitoring/monitor.py", "'write'"): "a check of a user's writer",
    ("mpi/manager.py", "'uses_buffer'"): "a check of a user's baseline",
    ("mpi/manager.py", "Manager"): "a check of what a user's function makes",
    ("mpi/scores.py", "StatefulScore"): "score functions come with a state or without",
    ("wrappers/holder.py", "'size'"): "a check of a user's state",
    ("wrappers/holder.py", "name"): "a check of a user's limiter",
    ("wrappers/mixture.py", "Varying"): "ratios are numbers or vary",
    ("wrappers/mixture.py", "Slots"): "slots and steps are both a way to name an episode",
    ("wrappers/sharded/operations.py", "SampledBuffer"): "a check of what a user's function makes",
}
# Attributes of arrays and functions, and files about things of another library.
FOREIGN = {"'dtype'", "'lower'", "'shape'", "'trace'"}
OF_OTHERS = {"io/minari_dataset.py"}


def own_classes():
    trees = [ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")]
    return {x.name for tree in trees for x in ast.walk(tree) if isinstance(x, ast.ClassDef)}


def test_code_above_the_buffers_asks_no_classes():
    own, found = own_classes(), set()
    for room in ("wrappers", "views", "io", "monitoring", "testing", "mpi"):
        for path in (PACKAGE / room).rglob("*.py"):
            file = path.relative_to(PACKAGE).as_posix()
            for node in ast.walk(ast.parse(path.read_text())):
                name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
                asked = ast.unparse(node.args[-1]) if name in ("isinstance", "hasattr") else ""
                ours = name == "isinstance" and own & {*re.findall(r"\w+", asked)}
                if ours or (name == "hasattr" and asked not in FOREIGN and file not in OF_OTHERS):
                    found.add((file, asked))
    assert found == ASKED.keys()

"""The project's prose is plain English: forms that read as translated do not come back.

Each form has a plainer one beside it. Only what plain English never needs is listed, so that nobody
has to write around the list.
"""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NOT_YET = (
    "benchmarks",
    "jaxbuf/buffers",
    "jaxbuf/core",
    "jaxbuf/examples",
    "jaxbuf/interop",
    "jaxbuf/io",
    "jaxbuf/monitoring",
    "jaxbuf/mpi",
    "jaxbuf/occupancy",
    "jaxbuf/strategies",
    "jaxbuf/testing",
    "jaxbuf/views",
    "notebooks",
    "tests",
)
"""Folders and files that are still to be rewritten; take out what is done."""

INSTEAD = {
    r"whole numbers?": "integer",
    r"from \d+ on": "at least N",
    r"th(at|ose) which|those that": "the noun itself: 'rows that', 'items that'",
    r"go(es)? by": "uses, depends on, is ordered by",
    r"nothing for": "a verb: 'is ignored', 'does not affect'",
    r"there is none|is none of (these|those)": "if there is no such item, with its name",
    r"whoever": "a worker that, a caller that",
}
FORMS = re.compile("|".join(rf"\b(?:{form})\b" for form in INSTEAD))
QUESTIONS = ("What", "Which", "Whether", "How", "Where", "Whose", "Who")
"""Docstrings begin with a verb ("Returns ...") or name the thing ("The rows that ...")."""

HERE = Path(__file__).resolve()
FILES = sorted(
    path
    for pattern in (
        "*.md",
        "docs/**/*.md",
        "benchmarks/**/*.md",
        *(f"{folder}/**/*.py" for folder in ("benchmarks", "docs", "jaxbuf", "notebooks", "tests")),
    )
    for path in ROOT.glob(pattern)
    if path.resolve() != HERE
    and not any(path.is_relative_to(ROOT / part) for part in NOT_YET)
    and ".ipynb_checkpoints" not in path.parts
)


def docstrings(text):
    """Yields the docstrings of a module, and of its classes and functions."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, kinds) and (found := ast.get_docstring(node)):
            yield found


def findings(path):
    """Lists what is wrong in one file, each with its plainer form."""
    text = path.read_text()
    flat = re.sub(r"\s+(?:# )?", " ", text)
    found = [
        f"{match[0]}: {flat[max(0, match.start() - 40) : match.end() + 40]}"
        for match in FORMS.finditer(flat)
    ]
    if path.suffix == ".py":
        first = (doc.split(maxsplit=1)[0] for doc in docstrings(text))
        found += [f"a docstring begins with {word}" for word in first if word in QUESTIONS]
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_prose_is_plain(path):
    assert not findings(path)


def test_the_forms_are_found(tmp_path):
    path = tmp_path / "module.py"
    path.write_text('"""What it takes.\n\nA whole\n# number.\n"""\n')
    assert len(findings(path)) == 2


def test_what_is_not_done_yet_is_there():
    assert all((ROOT / part).exists() for part in NOT_YET)

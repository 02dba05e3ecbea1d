"""The project's prose is plain English: forms that read as translated do not come back.

Each form has a plainer one beside it. Only what plain English never needs is listed, so that nobody
has to write around the list.
"""

import ast
import io
import re
import tokenize
from pathlib import Path

ROOT = Path(__file__).parents[2]

INSTEAD = {
    r"whole numbers?": "integer",
    r"from \d+ on": "at least N",
    r"th(at|ose) which|those that": "the noun itself: 'rows that', 'items that'",
    r"go(es)? by": "uses, depends on, is ordered by",
    r"nothing is for": "a verb: 'is ignored', 'does not affect'",
    r"there is none": "if there is no such item, with its name",
    r"whoever": "a worker that, a caller that",
}
FORMS = re.compile("|".join(rf"\b(?:{form})\b" for form in INSTEAD), re.IGNORECASE)
QUESTIONS = ("What", "Which", "Whether", "How", "Where", "Whose", "Who")
"""Docstrings begin with a verb ("Returns ...") or name the thing ("The rows that ...")."""

HERE = Path(__file__).resolve()
FILES = sorted(
    path
    for pattern in (
        "*.md",
        "docs/**/*.md",
        "benchmarks/**/*.md",
        *(
            f"{folder}/**/*.py"
            for folder in (
                *("benchmarks", "docs", "examples", "experiments"),
                *("jaxbuf", "notebooks", "tests"),
            )
        ),
    )
    for path in ROOT.glob(pattern)
    if path.resolve() != HERE and ".ipynb_checkpoints" not in path.parts
)


def prose(path):
    """Returns the docstrings of a file of Python, and all its prose on one line.

    That is all of a text in markdown, and in Python docstrings and comments. Within the package it
    is other strings as well, such as errors. Tests quote those.
    """
    text = path.read_text()
    if path.suffix != ".py":
        return [], " ".join(text.split())
    tree = ast.parse(text)
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = [ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds)]
    docs = [doc for doc in found if doc]
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    comments = [token.string.lstrip("#: ") for token in tokens if token.type == tokenize.COMMENT]
    strings = [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    said = strings if path.is_relative_to(ROOT / "jaxbuf") else docs
    return docs, " ".join(" ".join([*said, *comments]).split())


def findings(path):
    """Returns what is wrong in one file."""
    docs, text = prose(path)
    found = [
        f"{match[0]}: {text[max(0, match.start() - 40) : match.end() + 40]}"
        for match in FORMS.finditer(text)
    ]
    first = (doc.split(maxsplit=1)[0] for doc in docs)
    return found + [f"a docstring begins with {word}" for word in first if word in QUESTIONS]


def test_prose_is_plain():
    assert not {str(path): found for path in FILES if (found := findings(path))}


def test_the_forms_are_found(tmp_path):
    path = tmp_path / "module.py"
    path.write_text(
        '"""What it takes.\n\nA whole\nnumber.\n"""\n# Counted from\n# 0 on. There is none.\n'
    )
    assert len(findings(path)) == 4

"""Checks that the tests find the mutants of mutants.md: small changes that make the library wrong.

Each is made in a copy of the package, where the test that stands beside it must fail:

    python -m tests.mutants [--only REGEX]

What REGEX selects is looked for in the file, both texts and the test of a mutant.
"""

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

# Also sets what JAX is told in tests, for the processes that are started here.
import conftest
from jaxbuf.core import native

ROOT = Path(conftest.__file__).parent
PAGE = Path(__file__).with_suffix(".md")
LEFT_OUT = shutil.ignore_patterns(".git", ".venv", ".cache", "__pycache__", "site")
# An editable installation finds the package where it was installed from, before the copy.
SITE = """import sys
sys.meta_path[:] = [x for x in sys.meta_path if type(x).__name__ != "ScikitBuildRedirectingFinder"]
"""
# In the copy a test may compile all it likes, since one that runs alone may do so without a mutant,
# and no history is made shorter, since nobody reads it.
SETTINGS = {
    "count > most": "False",
    "derandomize=True": "derandomize=True, phases=[hypothesis.Phase.generate]",
}
# A mutant may wait for what never comes, which a person would notice too.
SECONDS = 600
# By what pytest returns: nothing has failed, or something has.
ENDS = {0: "LIVES", 1: "found"}


class Mutant(NamedTuple):
    """A text in a file of the package, what takes its place, and what pytest is to run then."""

    file: str
    old: str
    new: str
    test: str


def read(page: str) -> list[Mutant]:
    """Returns the mutants of a page: paragraphs of its blocks of code of the kind ``diff``."""
    blocks = re.findall(r"^```diff\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    return [mutant(part) for block in blocks for part in block.strip().split("\n\n")]


def mutant(paragraph: str) -> Mutant:
    head, *lines = paragraph.split("\n")
    file, test = head.split(": ", 1)
    old, new = ("\n".join(x[2:] for x in lines if x[0] == sign) for sign in "-+")
    return Mutant(file, old, new, test)


def check(mutants: list[Mutant]) -> None:
    """Checks that each text is there exactly once, and each test at all."""
    for one in mutants:
        count = (ROOT / "jaxbuf" / one.file).read_text().count(one.old)
        if count != 1:
            sys.exit(f"{one.file} has this text {count} times, not once:\n{one.old}")
        tests, *_, name = re.split("::| ", one.test.split("[")[0])
        if not re.search(rf"(def|class) {name}\b|{name} = ", (ROOT / tests).read_text()):
            sys.exit(f"there is no {name} in {tests}, which is to find a mutant of {one.file}")


def replaced(file: Path, old: str, new: str) -> str:
    text = file.read_text()
    if text.count(old) != 1:
        sys.exit(f"{file.name} has this text {text.count(old)} times, not once:\n{old}")
    return text.replace(old, new)


def run(one: Mutant, copy: Path) -> str:
    """Returns how the test ends in the copy of the package with this mutation."""
    file = copy / "jaxbuf" / one.file
    original = file.read_text()
    file.write_text(original.replace(one.old, one.new))
    command = [sys.executable, "-m", "pytest", "-qx", "-p", "no:cacheprovider"]
    command += shlex.split(one.test)
    options = {"cwd": copy, "env": {**os.environ, "PYTHONPATH": str(copy), "MPI": "0"}}
    try:
        done = subprocess.run(command, stdout=subprocess.DEVNULL, timeout=SECONDS, **options)
    except subprocess.TimeoutExpired:
        return "found"
    finally:
        file.write_text(original)
    return ENDS.get(done.returncode, "NO TEST RAN")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", metavar="REGEX", help="run these mutants only")
    only = parser.parse_args().only
    mutants = [one for one in read(PAGE.read_text()) if re.search(only, "\n".join(one))]
    check(mutants)
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        shutil.copytree(ROOT, copy, symlinks=True, ignore=LEFT_OUT)
        (copy / "sitecustomize.py").write_text(SITE)
        settings = copy / "tests" / "conftest.py"
        for old, new in SETTINGS.items():
            settings.write_text(replaced(settings, old, new))
        for kernels in native.__path__:
            for file in Path(kernels).glob("libjaxbuf.so"):
                shutil.copy(file, copy / "jaxbuf" / "core" / "native")
        ends = []
        for number, one in enumerate(mutants, start=1):
            began = time.monotonic()
            ends.append(run(one, copy))
            seconds = round(time.monotonic() - began)
            print(f"{number:3} {ends[-1]:5} {seconds:3} s  {one.file}  {one.test}", flush=True)
    found = ends.count("found")
    print(f"{found} of {len(ends)} mutants were found")
    sys.exit(found < len(ends))


if __name__ == "__main__":
    main()

"""Run notebooks again and keep what they show: ``python -m notebooks --help``."""

import argparse
import sys
import time
from collections.abc import Sequence

import nbformat

from notebooks import FOLDER, NAMES, execute


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the notebooks that are named and returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m notebooks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}; or all")
    parser.add_argument("--check", action="store_true", help="run, but write nothing")
    parser.add_argument("--seconds", type=int, default=90, help="most that one cell may take")
    given = parser.parse_args(argv)
    for name in given.names:
        if name not in NAMES:
            parser.error(f"there is no notebook {name}; choose from {', '.join(NAMES)}")
    for name in given.names or NAMES:
        print(f"{name:<20}", end="", flush=True)
        begin = time.perf_counter()
        notebook = execute(name, given.seconds)
        if not given.check:
            nbformat.write(notebook, FOLDER / f"{name}.ipynb")
        print(f"{time.perf_counter() - begin:6.1f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

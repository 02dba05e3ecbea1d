"""The rows: every module here with a function `rows(options)` adds some."""

import importlib
import pkgutil

from benchmarks.harness import Options, Row


def all_rows(options: Options) -> list[Row]:
    """The rows of all modules in this package, in the order of the modules' names."""
    found: list[Row] = []
    for module in sorted(info.name for info in pkgutil.iter_modules(__path__)):
        found += importlib.import_module(f"{__name__}.{module}").rows(options)
    return found

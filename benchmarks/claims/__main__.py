"""Prints all claims, or those about the libraries named, and exits with 1 if one is false."""

import importlib
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from benchmarks.claims import CLAIMS

# Modules of this package. Libraries with torch want an older NumPy than jax.
WITH_TORCH = ["torchrl", "torchgfn", "stable_baselines3", "di_engine"]
LIBRARIES = ["flashbax", "cpprb", *WITH_TORCH]
TORCH_PYTHON = Path(".venv-claims-torch/bin/python")


def check(name: str) -> bool:
    """Prints the rows of one library, and returns whether one is false."""
    try:
        importlib.import_module(f"benchmarks.claims.of_{name}")
    except Exception as error:
        print(f"| {name} | all | left out | {error!r} |")
    false = False
    for text, expected, run in CLAIMS:
        try:
            seen = run()
            true = "yes" if seen == expected else "**no**"
        except ImportError as error:
            seen, true = error, "left out"
        except Exception as error:
            seen, true = error, "**no**"
        false |= true == "**no**"
        print(f"| {name} {version(name)} | {text} | {true} | {repr(seen)[:80]} |", flush=True)
    return false


def main(names: list[str]) -> bool:
    """Prints the table, each library from its own process, and returns whether a claim is false."""
    if names[0] == "--only":
        return check(names[1])
    print("| library | claim | true | seen |\n| --- | --- | --- | --- |", flush=True)
    false = []
    for name in names:
        python = TORCH_PYTHON if name in WITH_TORCH and TORCH_PYTHON.exists() else sys.executable
        command = [str(python), "-W", "ignore", "-m", "benchmarks.claims", "--only", name]
        false += [name] * bool(subprocess.run(command, check=False).returncode)
    print(f"\nfalse claims about: {', '.join(false) or 'none'}")
    return bool(false)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or LIBRARIES))

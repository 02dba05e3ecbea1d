"""What pytest leaves out here, and what JAX is told before any test imports it."""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# mpi cannot be imported without MPI.
collect_ignore_glob: list[str] = []
if importlib.util.find_spec("mpi4jax") is None:
    collect_ignore_glob += ["jaxbuf/mpi/*", "tests/programs/mpi_inside.py"]
# jax.export cannot serialize without it.
if importlib.util.find_spec("flatbuffers") is None:
    collect_ignore_glob.append("docs/guides/processes.md")

# Programs are compiled once: for the next run, and for the processes that tests start.
CACHE = Path(__file__).parent / ".cache" / "jax"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(CACHE))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

# Tests run most programs once, so they are compiled in a third of the time and not made fast, and
# each is one file of machine code: many small ones take longer, and three times the memory maps.
# Since version 0.12 jaxlib has no other emitters, and programs take three times as long to compile.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
FLAGS = [
    "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters",
    "--xla_cpu_parallel_codegen_split_count=1",
]


def _is_known(flag: str) -> bool:
    """Returns whether this version of XLA has a flag; it ends a process that gives another one."""
    start = [sys.executable, "-c", "import jax; jax.devices()"]
    given = os.environ | {"XLA_FLAGS": flag, "JAX_PLATFORMS": "cpu"}
    return subprocess.run(start, env=given, capture_output=True).returncode == 0


if "XLA_FLAGS" not in os.environ:
    os.environ["XLA_FLAGS"] = " ".join(filter(_is_known, FLAGS))

# JAX looks up the files of all frames of each error, to leave out its own; tests raise thousands.
os.environ.setdefault("JAX_TRACEBACK_FILTERING", "off")

# For the processes of pytest-xdist: otherwise what one thread frees is of no use to the next.
os.environ.setdefault("MALLOC_ARENA_MAX", "1")


GUIDES_WITH_OTHERS = ("annealing.md", "environments.md", "networks.md")


@pytest.fixture(autouse=True, scope="module")
def _default_promotion(request: pytest.FixtureRequest) -> Iterator[None]:
    """Restores JAX's default promotion for guides with gymnax or optax, which need it."""
    if request.path.name not in GUIDES_WITH_OTHERS:
        yield
        return
    import jax

    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield

"""Settings of every test: the CPU unless told otherwise, and no silent promotion."""

import atexit
import ctypes
import gc
import importlib.util
import os
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import hypothesis
import jax
import psutil
import pytest

from conftest import CACHE
from tests.programs.mpi_launch import find_mpiexec

# A shell starts what runs in its background with Ctrl-C ignored, and a process inherits that.
signal.signal(signal.SIGINT, signal.default_int_handler)
# For pyright: half of its calls are wrong.
collect_ignore = ["typing/calls.py"]

# In the environment as well, for the programs that tests start.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
jax.config.update("jax_platforms", os.environ["JAX_PLATFORMS"])
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# The first example of a property compiles, so its time says nothing.
hypothesis.settings.register_profile("jaxbuf", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("jaxbuf")

# A process forgets its programs above so many bytes (all processes may take half of the memory) or
# mappings of memory. Linux ends a process that has 65,530 mappings; a program takes six or more,
# and the largest file of tests adds up to 38,000, so that a process looks at this as it goes along.
PROCESSES = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
MOST_MEMORY = psutil.virtual_memory().total // (2 * PROCESSES)
MOST_MAPPINGS = 52_000
# What `make test` leaves to `make test-all`, beside each test with `pytest.mark.slow`; and what it
# does of that all the same.
SLOW = (
    "benchmarks/",
    "tests/examples/",
    "tests/project/test_experiments.py",
    "tests/project/test_notebooks.py",
    "tests/project/test_site.py",
    "tests/project/test_types.py",
)
SMOKES = (
    "tests/examples/test_dqn.py::test_it_learns",
    "tests/examples/test_dqn.py::test_a_run_leaves_its_files",
    "tests/project/test_notebooks.py::test_it_runs_from_a_clean_kernel[quickstart]",
)
# The files that take longest, which come first, so that no process waits for another at the end.
LONG = ("tests/contract/", "tests/examples/", "tests/project/test_notebooks.py")
PROGRAMS_BETWEEN_LOOKS = 500
# Programs that a test may compile; `pytest.mark.compiles(N)` allows more.
MOST_PROGRAMS = 60
# The tests that set handlers of signals, which only the main thread may.
HANDLERS = ("tests/core/test_signals.py", "jaxbuf/core/signals.py", "docs/guides/testing.md")
# Bytes of programs that all runs keep on disk.
MOST_CACHED = 2**30


class ThreadPerFile:
    """Runs the tests of each file in a thread of their own.

    MLIR keeps a list for each thread of all programs that were lowered in it and are still there,
    and goes through it for each new one: after 2,000 of them, a small one takes twice as long.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> bool | None:
        if item.path.as_posix().endswith(HANDLERS):
            return None
        run = item.config.pluginmanager.get_plugin("runner").pytest_runtest_protocol
        done = self._thread.submit(run, item, nextitem).result()
        if nextitem is None or nextitem.path != item.path:
            self._thread.shutdown()
            self._thread = ThreadPoolExecutor(1)
        return done


def pytest_sessionstart(session: pytest.Session) -> None:
    if hasattr(session.config, "workerinput"):
        # Only here, because Ctrl-C does not end another thread than the first.
        session.config.pluginmanager.register(ThreadPerFile())
        return
    if not CACHE.exists():
        return
    # Most entries are of code that has changed since.
    if sum(path.stat().st_size for path in CACHE.iterdir()) > MOST_CACHED:
        for path in CACHE.iterdir():
            path.unlink(missing_ok=True)


class Programs:
    """Counts the programs that each test compiles, since that is what tests wait for.

    Those of a single operation of JAX do not count: which of them are new depends on the tests
    that ran before.
    """

    def __init__(self) -> None:
        self._count = self._since_looked = 0
        jax.monitoring.register_event_duration_secs_listener(self._note)

    def _note(self, event: str, seconds: float, **details: Any) -> None:
        del seconds
        if event == "/jax/core/compile/backend_compile_duration":
            self._since_looked += 1
            name = str(details.get("fun_name")).removeprefix("jit(").strip("_)")
            self._count += not any(hasattr(one, name) for one in (jax.lax, jax.numpy, jax.random))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Any:
        before = self._count
        result = yield
        marker = item.get_closest_marker("compiles")
        most = MOST_PROGRAMS if marker is None else marker.args[0]
        count = self._count - before
        if self._since_looked > PROGRAMS_BETWEEN_LOOKS:
            self._since_looked = 0
            _forget_if_full()
        if count > most and item.path.suffix == ".py":
            pytest.fail(f"it compiles {count} programs, more than {most}; see CONTRIBUTING.md")
        return result


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Programs())


@pytest.fixture(autouse=True, scope="module")
def _forget_programs():
    """Compiled programs of all modules together may take gigabytes in each process."""
    yield
    _forget_if_full()


def _forget_if_full() -> None:
    if _is_full():
        gc.unfreeze()
        jax.clear_caches()
        gc.collect()
        # glibc keeps what is freed, so that the memory would stay above the limit until the end
        # and the programs would be forgotten after each module.
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
    # Benchmarks collect garbage before they measure; without this they would look at all programs.
    gc.freeze()


def _is_full() -> bool:
    if psutil.Process().memory_info().rss > MOST_MEMORY:
        return True
    mappings = Path("/proc/self/maps")
    return mappings.exists() and len(mappings.read_bytes().splitlines()) > MOST_MAPPINGS


def pytest_collection_finish(session: pytest.Session) -> None:
    """Tracing creates so much that garbage collection would take a twentieth of all time."""
    gc.collect()
    gc.freeze()
    gc.disable()


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workerinput"):
        # A process of pytest-xdist would first free its programs one by one, for ten seconds.
        atexit.register(os._exit, 0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Files are handed out in this order.
    items.sort(key=lambda item: not item.nodeid.startswith(LONG))
    for item in items:
        if item.nodeid.startswith(SLOW) and not item.nodeid.startswith(SMOKES):
            item.add_marker("slow")
    reason = _why_no_mpi()
    if reason is not None:
        for item in items:
            if item.get_closest_marker("mpi"):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Hands out tests by file, since those of one file share fixtures and programs."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            # Waiting ranks keep their core busy, so one test with MPI runs at a time.
            path = nodeid.split("::")[0]
            return "mpi" if re.search("tests/mpi/|_mpi|manager_worker", nodeid) else path

    return ByFile(config, log)


def _why_no_mpi() -> str | None:
    if os.environ.get("MPI") == "0":
        return "MPI=0 asks for a run without MPI"
    if importlib.util.find_spec("mpi4jax") is None:
        return "mpi4jax is not installed; `make test` builds it"
    if find_mpiexec() is None:
        return "there is no mpiexec beside this Python, on PATH or in MPIEXEC"
    return None

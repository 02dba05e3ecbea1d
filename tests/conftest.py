"""What every test runs under: the CPU unless told otherwise, and no silent promotion."""

import importlib.util
import os

import hypothesis
import jax
import pytest

from tests.mpi_launch import find_mpiexec

# In the environment as well, for the programs that tests start.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
jax.config.update("jax_platforms", os.environ["JAX_PLATFORMS"])
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# The first example of a property compiles, so its time says nothing.
hypothesis.settings.register_profile("jaxbuf", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("jaxbuf")


@pytest.fixture(autouse=True, scope="module")
def _forget_programs():
    """Compiled programs of all modules together would take gigabytes in each process."""
    yield
    jax.clear_caches()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = _why_no_mpi()
    for item in items:
        if item.get_closest_marker("mpi"):
            # Waiting ranks keep their core busy, so one such test runs at a time.
            item.add_marker(pytest.mark.xdist_group("mpi"))
            if reason is not None:
                item.add_marker(pytest.mark.skip(reason=reason))


def _why_no_mpi() -> str | None:
    if os.environ.get("MPI") == "0":
        return "MPI=0 asks for a run without MPI"
    if importlib.util.find_spec("mpi4jax") is None:
        return "mpi4jax is not installed; `make test` builds it"
    if find_mpiexec() is None:
        return "there is no mpiexec beside this Python, on PATH or in MPIEXEC"
    return None

"""MPI itself works: ranks start, communicate inside jit, and always end.

Run as a program, this file is the program of the ranks.
"""

import json
import os
import sys
import time

import pytest

from tests.programs.mpi_launch import RanksFailedError, run_in_turn, run_ranks

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("n", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_allreduce_under_jit(n):
    ranks = run_in_turn(n, __file__, "allreduce")

    assert [json.loads(rank.stdout)["rank"] for rank in ranks] == list(range(n))
    total = n * (n + 1) / 2
    for rank in ranks:
        assert json.loads(rank.stdout)["sum"] == [0.0, total, 2 * total, 3 * total]
        assert rank.stderr == ""


@pytest.mark.slow
def test_a_failing_rank_ends_the_others():
    start = time.monotonic()
    with pytest.raises(RanksFailedError, match="rank 1 gives up") as failure:
        run_ranks(2, __file__, "fail", timeout=100.0)

    assert time.monotonic() - start < 90.0
    assert _still_running(failure.value) == []


@pytest.mark.slow
def test_a_deadlock_is_ended():
    with pytest.raises(RanksFailedError, match="had not ended after 6 s") as failure:
        run_ranks(2, __file__, "deadlock", timeout=6.0)

    assert _still_running(failure.value) == []


def _still_running(failure: RanksFailedError) -> list[int]:
    pids = [json.loads(rank.stdout)["pid"] for rank in failure.ranks]
    assert len(set(pids)) == 2
    return [pid for pid in pids if _is_running(pid)]


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _allreduce() -> None:
    import jax
    import jax.numpy as jnp
    import mpi4jax
    from mpi4py import MPI

    rank = MPI.COMM_WORLD.Get_rank()
    summed = jax.jit(lambda x: mpi4jax.allreduce(x, op=MPI.SUM))(
        jnp.arange(4, dtype=jnp.float32) * jnp.float32(rank + 1)
    )
    print(json.dumps({"rank": rank, "sum": summed.tolist()}))


def _wait_for_a_message_that_never_comes(failing_rank: int | None) -> None:
    print(json.dumps({"pid": os.getpid()}), flush=True)

    import jax
    import jax.numpy as jnp
    import mpi4jax
    from mpi4py import MPI

    rank = MPI.COMM_WORLD.Get_rank()
    MPI.COMM_WORLD.Barrier()
    if rank == failing_rank:
        raise ValueError(f"rank {rank} gives up")
    jax.block_until_ready(jax.jit(lambda x: mpi4jax.recv(x, source=1 - rank))(jnp.zeros(4)))


if __name__ == "__main__":
    programs = {
        "allreduce": _allreduce,
        "fail": lambda: _wait_for_a_message_that_never_comes(failing_rank=1),
        "deadlock": lambda: _wait_for_a_message_that_never_comes(failing_rank=None),
    }
    programs[sys.argv[1]]()

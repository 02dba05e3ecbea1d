"""Faults of a manager and its workers: no rank waits forever, and all faults are reported.

Run as a program, this file is the program of the ranks, which prints what each of them saw.
"""

import contextlib
import json
import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.programs.mpi_launch import RanksFailedError, run_ranks

pytest.importorskip("mpi4jax")

import jaxbuf
from jaxbuf.mpi import (
    ExchangeError,
    Layout,
    Manager,
    Worker,
    make_communicators,
    serve,
    wire,
)
from tests.programs.mpi_inside import run

_ROWS = 4
# Long enough for a step on a busy machine, once all programs are compiled.
_SECONDS = 6.0
# Scores for which the score functions of these tests fail, or take long.
_BAD, _SLOW = -50.0, -70.0


def _manager(workers):
    return Manager.create(jaxbuf.reward_prioritized(jnp.zeros(2, jnp.int32), 1000), workers)


def _raise_if_bad(score):
    if (score == _SLOW).any():
        time.sleep(_SECONDS / 2)
    if (score == _BAD).any():
        raise ValueError("this score is bad")
    return np.float32(1)


def _picky(buffer, batch, mask, sender):
    shape = jax.ShapeDtypeStruct((), jnp.float32)
    return {"score": jax.pure_callback(_raise_if_bad, shape, batch.score)}


def _end_if_bad(score):
    if (score == _BAD).any():
        os.kill(os.getpid(), signal.SIGKILL)
    return np.float32(1)


def _ends_itself(buffer, batch, mask, sender):
    shape = jax.ShapeDtypeStruct((), jnp.float32)
    return {"score": jax.pure_callback(_end_if_bad, shape, batch.score)}


def _calls_back(workers):
    buffer = jaxbuf.reward_prioritized(jnp.zeros(2, jnp.int32), 1000)
    return Manager.create(buffer, workers, scores=_picky)


def _batch(low):
    score = jnp.arange(_ROWS, dtype=jnp.float32) + jnp.float32(low)
    return jnp.zeros((_ROWS, 2), jnp.int32), score


def _add(worker, low):
    items, score = _batch(low)
    return worker.add(items, score=score)


def _run_killing(ranks, case, folder):
    """Returns the output of each rank where one is killed, whether or not the launcher sees it."""
    try:
        return run_ranks(ranks, __file__, case, folder, linger=folder / f"{case} is over")
    except RanksFailedError as failure:
        return failure.ranks


def _told(rank):
    assert rank.stdout, rank.stderr
    return json.loads(rank.stdout)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="module")
def runs(folder):
    """Futures of what ranks print, and of the seconds it took to kill some of them.

    Ranks that miss others mostly sleep, so both sets of ranks run at the same time.
    """
    with ThreadPoolExecutor() as pool:
        return {
            "alive": pool.submit(run_ranks, 3, __file__, "alive", folder),
            "killed": pool.submit(_kill_a_worker_and_then_a_manager, folder),
        }


def _kill_a_worker_and_then_a_manager(folder):
    began = time.monotonic()
    printed = _run_killing(3, "worker", folder), _run_killing(2, "manager", folder)
    return *printed, time.monotonic() - began


@pytest.mark.mpi
@pytest.mark.slow
def test_faults_that_leave_everybody_alive(runs, folder):
    printed = runs["alive"].result()
    manager, first, second = (_told(printed[rank]) for rank in (2, 0, 1))

    anew = (
        "its tag is 7104; expected 7102: a worker that has left may begin anew once all have left"
    )
    assert manager["early"]["faults"] == [
        "rank 1 left early: ValueError: enough",
        f"rank 1 sent a message that was refused: {anew}",
    ]
    assert anew in second["too early"]
    assert manager["early"]["batches"] == 3

    lost, back = manager["silent"]["faults"]
    assert lost.startswith("rank 1 is lost: it has sent nothing for ")
    assert lost.endswith("after 1 batches, and has not left")
    assert back == "rank 1 is back"
    assert second["came back"]
    assert first["waited with patience"]


def test_a_worker_that_ends_without_leaving_is_named():
    def work(communicators):
        _add(Worker(communicators, _manager, rows=_ROWS, timeout=60), 0)

    served, _ = run(_manager(1), work, rows=_ROWS)
    reason = "rank 0 left early: its worker or its process ended without leaving"
    assert served.faults == (reason,)


@pytest.mark.slow
def test_late_answers_are_counted_and_an_error_of_the_manager_reaches_its_workers(tmp_path):
    told = []

    def work(communicators):
        with Worker(communicators, _calls_back, rows=_ROWS, mode="pipelined", timeout=60) as end:
            # Its answer comes after it was given up.
            _add(end, _SLOW)
            drained = end.drain(0.5)
            assert drained.missing == (1,)
            assert "has not answered 1 batches within 0.5 s" in drained.reason
            end.request_metadata()
            assert [_add(end, 0), *end.drain().answers][-1].sequence == 2
            assert end.metrics()["late"] == 1
            for k in range(1000):
                _add(end, _BAD if k == 3 else k)
                time.sleep(0.01)

    def work_and_tell(communicators):
        try:
            work(communicators)
        except ExchangeError as error:
            told.append(str(error))

    with pytest.raises(Exception, match="this score is bad") as failure:
        run(_calls_back(1), work_and_tell, rows=_ROWS, save_to=tmp_path)
    assert any("was saved to" in note for note in failure.value.__notes__)
    assert "rank 1, the manager, failed: " in told[0]
    assert "this score is bad" in told[0]
    saved = jaxbuf.load(tmp_path, like=_calls_back(1))
    assert int(saved.buffer.size) == int(saved.counters[0, 1]) > 0


@pytest.mark.mpi
@pytest.mark.slow
def test_a_killed_worker_is_named_and_the_others_go_on(runs):
    printed, resumed, seconds = runs["killed"].result()
    manager, first = (_told(printed[rank]) for rank in (2, 0))
    assert len(manager["faults"]) == 1
    assert manager["faults"][0].startswith("rank 1 is lost: it has sent nothing for ")
    assert first == {"answered": 10}
    assert manager["batches"] == 10 + 3
    # The next run continues from the checkpoint; then its manager is killed.
    worker = _told(resumed[0])
    assert worker["batches"] == 10 + 3 + 1
    unanswered = f"rank 1, the manager, has not answered batch 2, 3 within {_SECONDS:g} s"
    assert unanswered in worker["error"]
    assert worker["missing"] == [4]
    assert worker["reason"].startswith("rank 1, the manager, has not answered 1 batches within 1 s")
    assert seconds < 120


@pytest.mark.mpi
@pytest.mark.slow
def test_a_run_that_the_launcher_ends_resumes_from_the_last_save(tmp_path):
    with pytest.raises(RanksFailedError, match="mpiexec ended with status"):
        run_ranks(2, __file__, "all", tmp_path, timeout=60)
    saved = jaxbuf.load(tmp_path / "all", like=_manager(1))
    assert int(saved.counters[0, 0]) > 0


def _program(case, folder):
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    communicators = make_communicators(Layout(world.Get_size()))
    out = _CASES[case](communicators, world.Get_rank(), folder)
    print(json.dumps(out), flush=True)
    if case != "alive":
        # A rank that ends would end the others, so all wait except the one that was killed.
        Path(folder, f"{case}-{world.Get_rank()}").touch()
        while len(list(Path(folder).glob(f"{case}-*"))) < world.Get_size() - 1:
            time.sleep(0.05)
        Path(folder, f"{case} is over").touch()
        os._exit(0)


def _serve(communicators, make=_manager, timeout=60.0, **choices):
    manager = make(communicators.group.Get_size() - 1)
    served = serve(
        communicators, manager, rows=_ROWS, timeout=timeout, report=lambda _: None, **choices
    )
    metrics = served.manager.metrics()
    return {"faults": served.faults, "batches": int(metrics["batches"])}


def _run_alive(communicators, rank, folder):
    # Items and scores of these small batches are sent like large arrays.
    wire._LARGE = 16
    out = {}
    if communicators.managers is not None:
        out["early"] = _serve(communicators)
        out["silent"] = _serve(communicators, timeout=_SECONDS / 2)
        return out

    if rank == 0:
        with Worker(communicators, _manager, rows=_ROWS, timeout=60) as end:
            _wait_for(folder, "early")
            assert _add(end, 0)
            assert _add(end, 1)
            # While this rank stays, the manager stays, and refuses what the other one sends.
            _wait_for(folder, "told")
        Path(folder, "all have left").touch()
    else:
        with contextlib.suppress(ValueError), Worker(communicators, _manager, rows=_ROWS) as end:
            _add(end, 0)
            raise ValueError("enough")
        Path(folder, "early").touch()
    with Worker(communicators, _manager, rows=_ROWS, timeout=60) as end:
        if rank == 1:
            try:
                _add(end, 0)
            except ExchangeError as error:
                out["too early"] = str(error)
            Path(folder, "told").touch()
            _wait_for(folder, "all have left")
        _add(end, 0)
        if rank == 1:
            time.sleep(_SECONDS)
            out["came back"] = _add(end, 1) is not None
            Path(folder, "back").touch()
            for k in range(12):
                time.sleep(_SECONDS / 12)
                _add(end, k)
        else:
            _wait_for(folder, "back", meanwhile=lambda: _add(end, 0))
            # It waits longer than its timeout, because the manager keeps saying that it is there.
            out["waited with patience"] = end.exit(timeout=_SECONDS / 2).reason == ""

    return out


def _wait_for(folder, name, meanwhile=lambda: None):
    """Wait until another rank has reached a place, without a message to the manager."""
    while not Path(folder, name).exists():
        meanwhile()
        time.sleep(0.1)


def _compile(communicators, manager):
    """Has a run of one batch, after which no step takes long."""
    with Worker(communicators, manager, rows=_ROWS, timeout=60) as worker:
        _add(worker, 0)


def _run_worker(communicators, rank, folder):
    if communicators.managers is not None:
        _serve(communicators)
        return _serve(communicators, timeout=_SECONDS, save_to=f"{folder}/lost")
    _compile(communicators, _manager)
    worker = Worker(communicators, _manager, rows=_ROWS, timeout=30)
    with worker:
        for k in range(3 if rank == 1 else 10):
            assert _add(worker, k) is not None
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
    return {"answered": worker.metrics()["answered"]}


def _run_manager(communicators, rank, folder):
    def manager(workers):
        return Manager.create(
            jaxbuf.reward_prioritized(jnp.zeros(2, jnp.int32), 1000), workers, scores=_ends_itself
        )

    if communicators.managers is not None:
        saved = jaxbuf.load(f"{folder}/lost", like=_manager(2))
        assert int(saved.buffer.size) == 13 * _ROWS
        # This run has one worker less.
        counters = saved.counters.sum(0, keepdims=True, dtype=jnp.uint32)
        _serve(communicators, manager)
        _serve(communicators, lambda _: saved.replace(counters=counters, scores=_ends_itself))
    _compile(communicators, manager)
    out = {}
    worker = Worker(communicators, manager, rows=_ROWS, mode="pipelined", timeout=_SECONDS)
    _add(worker, 0)
    out["batches"] = int(worker.request_metadata()["batches"])
    _add(worker, _BAD)
    _add(worker, 0)
    try:
        _add(worker, 0)
    except TimeoutError as error:
        out["error"] = str(error)
    drained = worker.drain(1.0)
    return {**out, "missing": drained.missing, "reason": drained.reason}


def _run_all(communicators, rank, folder):
    if communicators.managers is not None:
        return _serve(communicators, save_to=f"{folder}/all", save_every=0.2)
    worker = Worker(communicators, _manager, rows=_ROWS, timeout=30)
    saved = 0
    while not saved:
        _add(worker, 0)
        time.sleep(0.01)
        with contextlib.suppress(FileNotFoundError):
            saved = int(jaxbuf.load(f"{folder}/all", like=_manager(1)).counters[0, 0])
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("it goes on after it was killed")


_CASES = {
    "alive": _run_alive,
    "worker": _run_worker,
    "manager": _run_manager,
    "all": _run_all,
}


if __name__ == "__main__":
    _program(sys.argv[1], sys.argv[2])

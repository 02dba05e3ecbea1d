"""Many batches from three workers to one manager: no row is lost or repeated, and no memory leaks.

Run as a program, this file is the program of the ranks. ``JAXBUF_BATCHES`` is the number of batches
of all workers together.
"""

import json
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.programs.mpi_launch import run_ranks

pytest.importorskip("mpi4jax")

import jaxbuf
from jaxbuf.mpi import Layout, Manager, Worker, make_communicators, serve

_WORKERS, _ROWS, _CAPACITY, _DIFFERENT = 3, 128, 1000, 50
_BATCHES = int(os.environ.get("JAXBUF_BATCHES", "3000")) // _WORKERS
# The batches of each worker, before memory is first measured and after that.
_RUNS = (_BATCHES // 5, _BATCHES - _BATCHES // 5)
# In the shortest run the messages after the first measurement have 15 MB.
_MOST_GROWTH = 4 * 2**20


def _inputs(worker):
    """Returns items, scores and masks ``[_DIFFERENT, _ROWS, ...]`` that a worker sends in turn."""
    random = np.random.default_rng(worker)
    items = random.integers(0, 100, (_DIFFERENT, _ROWS, 8)).astype(np.int32)
    score = random.normal(size=(_DIFFERENT, _ROWS)).astype(np.float32)
    return items, score, random.random((_DIFFERENT, _ROWS)) < 0.99


def _sent(worker):
    """Returns the scores of all rows that a worker sends."""
    _, score, mask = _inputs(worker)
    times, rest = divmod(_BATCHES, _DIFFERENT)
    scores = [score[k][mask[k]] for k in range(_DIFFERENT)]
    return np.concatenate(scores * times + scores[:rest])


@pytest.mark.mpi
@pytest.mark.slow
def test_many_batches_lose_neither_rows_nor_memory():
    ranks = run_ranks(_WORKERS + 1, __file__, timeout=120 + _BATCHES / 20)
    *workers, manager = (json.loads(rank.stdout) for rank in ranks)

    sent = [_sent(worker) for worker in range(_WORKERS)]
    assert manager["counters"] == [[_BATCHES, len(rows)] for rows in sent]
    assert manager["faults"] == []
    expected = np.sort(np.concatenate(sent))[-_CAPACITY:]
    np.testing.assert_array_equal(np.sort(np.float32(manager["score"])), expected)
    assert [worker["answered"] for worker in workers] == [_BATCHES] * _WORKERS
    growth = [rank["memory"][1] - rank["memory"][0] for rank in (*workers, manager)]
    print(f"{_WORKERS * _BATCHES} batches, {sum(map(len, sent))} rows, growth in bytes {growth}")
    assert max(growth) < _MOST_GROWTH


def _memory():
    """Returns the resident memory of this process, in bytes."""
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def _sum(buffer, batch, mask, sender):
    del buffer
    return {"sum": jnp.sum(jnp.where(mask, batch.score, 0.0)), "sender": sender}


def _manager(workers):
    buffer = jaxbuf.reward_prioritized(jnp.zeros(8, jnp.int32), _CAPACITY)
    return Manager.create(buffer, workers, scores=_sum)


def _run_manager(communicators):
    manager, faults, memory = _manager(_WORKERS), [], []
    for _ in _RUNS:
        served = serve(communicators, manager, rows=_ROWS, report=None)
        manager = served.manager
        faults += served.faults
        memory.append(_memory())
    return {
        "counters": manager.counters.tolist(),
        "faults": faults,
        "score": np.asarray(manager.buffer.occupancy.score).tolist(),
        "memory": memory,
    }


def _run_worker(communicators, worker):
    items, score, mask = _inputs(worker)
    batches = [jax.device_put((items[k], score[k], mask[k])) for k in range(_DIFFERENT)]
    sums = np.where(mask, score, 0).sum(1)
    sent, answered, memory = 0, 0, []

    def check(answer, before):
        """Answers come in order, once each, and are those of their batches."""
        nonlocal answered
        answered += 1
        assert before + answer.sequence == answered
        assert answer.scores["sender"] == worker
        expected = sums[(answered - 1) % _DIFFERENT]
        np.testing.assert_allclose(answer.scores["sum"], expected, rtol=1e-3, atol=1e-3)

    for count in _RUNS:
        before = sent
        with Worker(communicators, _manager, rows=_ROWS, mode="pipelined", timeout=60) as end:
            for _ in range(count):
                rows, rewards, present = batches[sent % _DIFFERENT]
                sent += 1
                answer = end.add(rows, score=rewards, mask=present)
                if answer is not None:
                    check(answer, before)
            for answer in end.drain().answers:
                check(answer, before)
        memory.append(_memory())
    return {"answered": answered, "memory": memory}


if __name__ == "__main__":
    _communicators = make_communicators(Layout(_WORKERS + 1))
    if _communicators.managers is not None:
        print(json.dumps(_run_manager(_communicators)))
    else:
        print(json.dumps(_run_worker(_communicators, _communicators.agents.Get_rank())))

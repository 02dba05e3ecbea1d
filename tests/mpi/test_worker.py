"""The free-running exchange: real ranks agree with a manager and a worker in one process.

Run as a program, this file is the program of the ranks, which prints what each of them saw.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.programs.mpi_launch import run_in_turn

pytest.importorskip("mpi4jax")

import jaxbuf
from jaxbuf.mpi import (
    EMA,
    BaselineFilter,
    Communicators,
    Layout,
    Manager,
    Min,
    Traffic,
    Worker,
    WorkerState,
    make_communicators,
    serve,
    wire,
)
from tests.programs.mpi_inside import run

_ADDS, _ROWS, _EVERY, _CAPACITY = 7, 4, 3, 16
# Floats of a large item: MPI sends messages of this size in another way than short ones.
_WIDTH = 40_000
_MODES = ("sync", "deferred", "pipelined")
_ITEM = {"state": jnp.zeros(3, jnp.int32), "half": jnp.bfloat16(0)}


def _scores(buffer, batch, mask, sender):
    total = jnp.sum(jnp.where(mask, batch.score, 0.0))
    held = buffer.size.astype(jnp.float32)
    return {"held": held, "pair": jnp.stack([total, sender.astype(jnp.float32)])}


def _prioritized(workers):
    buffer = jaxbuf.reward_prioritized(_ITEM, _CAPACITY)
    return Manager.create(buffer, workers, baseline=Min(0.5), scores=_scores)


def _diverse(workers):
    buffer = jaxbuf.diverse_reward_prioritized(
        jnp.zeros(2, jnp.int32), 8, cutoff=2.0, p=float("inf")
    )
    return Manager.create(buffer, workers)


def _only_scores(workers):
    buffer = jaxbuf.reward_prioritized(jnp.zeros(2, jnp.int32), 8)
    return Manager.create(buffer, workers, scores=_scores, store=False)


def _large(workers):
    return Manager.create(jaxbuf.ItemBuffer.create(jnp.zeros(_WIDTH), 6), workers)


def _numbers(baseline):
    buffer = jaxbuf.reward_prioritized(jnp.float32(0), 4)
    return lambda workers: Manager.create(buffer, workers, baseline=baseline)


def _inputs(worker):
    """Returns the items, scores and mask of each add of a worker."""
    random = np.random.default_rng(worker)
    states = random.integers(0, 100, (_ADDS, _ROWS, 3)).astype(np.int32)
    score = random.permutation(_ADDS * _ROWS).reshape(_ADDS, _ROWS).astype(np.float32)
    # Scores of different workers differ.
    score = score + np.float32(0.25 * worker)
    mask = random.random((_ADDS, _ROWS)) < 0.8
    items = {"state": jnp.asarray(states), "half": jnp.asarray(score, jnp.bfloat16)}
    return items, jnp.asarray(score), jnp.asarray(mask)


def _reference(worker):
    """Returns a manager and its answers to one worker, computed in one process."""
    items, score, mask = _inputs(worker)
    manager, answers = _prioritized(1), []
    receive = jax.jit(Manager.receive)
    for start in range(0, _ADDS, _EVERY):
        part = slice(start, start + _EVERY)
        rows = [
            jax.tree.map(lambda x: x[part].reshape(-1, *x.shape[2:]), tree)  # noqa: B023
            for tree in (items, score, mask)
        ]
        missing = _EVERY * _ROWS - rows[1].shape[0]
        rows = [
            jax.tree.map(lambda x: jnp.pad(x, [(0, missing)] + [(0, 0)] * (x.ndim - 1)), tree)  # noqa: B023
            for tree in rows
        ]
        manager, scores = receive(manager, rows[0], score=rows[1], mask=rows[2])
        answers.append([scores["held"], *scores["pair"], manager.baseline_value()])
    return manager, np.asarray(answers)


def _kept(manager):
    order = np.argsort(np.asarray(manager.buffer.occupancy.score))
    return np.asarray(manager.buffer.data["state"])[order].tolist()


def _held(buffer):
    live = np.asarray(buffer.occupancy.live(jnp.arange(buffer.capacity)))
    return sorted(np.asarray(buffer.data)[live].tolist())


@pytest.mark.mpi
@pytest.mark.parametrize("ranks", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (3, 4))])
def test_all_modes_lose_nothing_and_agree(ranks):
    printed = run_in_turn(ranks, __file__)
    assert all(rank.stderr == "" for rank in printed)
    facts = [json.loads(rank.stdout) for rank in printed]
    layout = _layout(ranks)

    for group in layout.groups:
        manager = facts[group.manager]
        offered = [_inputs(rank) for rank in group.workers]
        score = np.concatenate([np.asarray(s)[np.asarray(m)] for _, s, m in offered])
        states = np.concatenate(
            [np.asarray(items["state"])[np.asarray(m)] for items, _, m in offered]
        )
        best = states[np.argsort(score)[-_CAPACITY:]].tolist()
        for mode in _MODES:
            assert manager[mode]["kept"] == best
            assert manager[mode]["rows"] == len(score)
            assert manager[mode]["batches"] == 3 * len(group.workers)
            assert manager[mode]["faults"] == []
            for rank in group.workers:
                _check_answers(facts[rank][mode], mode, rank, len(group.workers) == 1)
    if ranks == 2:
        assert facts[0]["large"]["answered"] == 4
        # Adds, rows offered, batches sent, rows sent and batches skipped, after each add.
        counters = [[1, 2, 1, 2, 0], [2, 4, 2, 4, 0], [3, 5, 3, 5, 0], [4, 6, 4, 6, 0]]
        assert facts[0]["large"]["counters"] == counters
        assert sorted(facts[1]["large"]) == [1, 1, 2, 2, 3, 4]


def _check_answers(seen, mode, rank, alone):
    manager, answers = _reference(rank)
    returned = [False, False, mode == "sync", False, False, mode != "pipelined", False]
    if mode != "pipelined":
        assert seen["returned"] == returned
    assert seen["numbers"] == sorted(seen["numbers"])
    assert len(seen["numbers"]) == 3
    counts = {name: seen["metrics"][name] for name in ("adds", "offered", "batches", "sent")}
    rows = int(np.asarray(_inputs(rank)[2]).sum())
    assert counts == {"adds": _ADDS, "offered": rows, "batches": 3, "sent": rows}
    assert seen["metrics"]["answered"] == 3
    if alone:
        np.testing.assert_allclose(seen["answers"], answers, rtol=1e-6)
        assert seen["metadata"] == {"size": int(manager.buffer.size), "batches": 3}


def test_a_filter_leaves_rows_out_and_skips_batches():
    make = _numbers(EMA(1.0))

    def work(communicators):
        chosen = BaselineFilter.create(refresh_after=2)
        with Worker(communicators, make, rows=5, filter=chosen, timeout=60) as end:
            answered = []
            for low in (10.0, 0.0, 0.0):
                score = jnp.arange(5, dtype=jnp.float32) + low
                answered.append(end.add(score, score=score) is not None)
            # The batch that was sent whole made the baseline 0, so only the first row is left out.
            score = jnp.array([-1.0, 0.0, 1.0, 2.0])
            answered.append(end.add(score, score=score) is not None)
            return answered, end.metrics()

    served, (answered, metrics) = run(make(1), work, rows=5)
    # The first batch is sent, the second is skipped, the third is sent whole, the last in part.
    assert answered == [True, False, True, True]
    expected = {"offered": 19, "sent": 13, "skipped": 1, "kept_by_filter": 8}
    assert {name: metrics[name] for name in expected} == expected
    counts = served.manager.metrics()
    assert (int(counts["rows"]), int(counts["batches"])) == (13, 3)


def test_answers_bring_the_baseline_and_refusals_change_nothing():
    make = _numbers(EMA(0.1))
    batches = [jnp.array([i, i + 0.5], jnp.float32) for i in range(8)]

    def work(communicators):
        with Worker(communicators, make, rows=2, timeout=60) as end:
            for items, score, message in (
                (
                    jnp.zeros(3),
                    jnp.zeros(3),
                    "items have 3 rows, but a message has room for 2",
                ),
                (jnp.zeros(2), None, "uses the score of items"),
                (jnp.zeros(2, jnp.int32), jnp.zeros(2), r"has dtype int32; expected float32"),
                (jnp.float32(0), jnp.zeros(2), r"items has shape \(\); expected \(B,\)"),
            ):
                with pytest.raises(ValueError, match=message):
                    end.add(items, score=score)
            return [end.add(batch, score=batch).baseline for batch in batches]

    _, found = run(make(1), work, rows=2)
    expected = [0, 0.1, 0.29, 0.561, 0.9049, 1.31441, 1.782969, 2.3046721]
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize("make", [_diverse, _only_scores])
def test_of_trajectories_the_terminal_states_are_sent(make):
    random = np.random.default_rng(3)
    states = jnp.asarray(random.integers(0, 6, (_ROWS, 5, 2)), jnp.int32)
    mask = jnp.arange(5)[None] < jnp.array([3, 5, 0, 1])[:, None]
    score = jnp.array([3.0, 2.0, 9.0, 1.0])

    def work(communicators):
        with Worker(communicators, make, rows=_ROWS, scoring_only=True, timeout=60) as end:
            return end.add(states, score=score, mask=mask).scores

    served, scores = run(make(1), work, rows=_ROWS)
    assert int(served.manager.metrics()["batches"]) == 1
    if make is _only_scores:
        assert [float(scores["held"]), *scores["pair"].tolist()] == [0.0, 6.0, 0.0]
        assert int(served.manager.buffer.size) == 0
    else:
        last, there = jaxbuf.terminal_states(states, mask=mask)
        expected = make(1).buffer.add(last, score=score, mask=there)
        assert _held(served.manager.buffer) == _held(expected)
    assert "rank 0" in served.traffic.table()
    assert "MB/s" in served.traffic.table()


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"mode": "async"}, "mode is 'async'; choose from"),
        ({"filter": 10}, "filter is 10; expected None or jaxbuf.mpi.BaselineFilter.create"),
        ({"rows": 0}, "rows is 0; expected an integer of at least 1"),
        ({"every": 1.5}, "every is 1.5; expected an integer of at least 1"),
        ({"in_flight": 0}, "in_flight is 0; expected an integer of at least 1"),
        ({"timeout": 0}, "timeout is 0; expected seconds, more than 0, or None"),
    ],
)
def test_a_worker_refuses_bad_arguments(choice, message):
    communicators = Communicators(object(), None, None, object())
    with pytest.raises(ValueError, match=message):
        Worker(communicators, _prioritized, **{"rows": 4, **choice})


class _Group:
    def Get_size(self):
        return 3


def test_a_worker_refuses_other_managers_and_states():
    communicators = Communicators(_Group(), None, None, object())
    with pytest.raises(ValueError, match="expected a function that takes a number"):
        Worker(communicators, lambda workers: workers, rows=4)
    other = WorkerState.create(_ITEM, 5)
    with pytest.raises(ValueError, match="state belongs to a worker with another example"):
        Worker(communicators, _prioritized, rows=4, state=other)


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"manager": 3}, "manager is 3; expected a jaxbuf.mpi.Manager"),
        ({"manager": 1}, "manager has 1 workers, but the group has 2; create it with"),
        ({"rows": 0}, "rows is 0; expected an integer of at least 1"),
        ({"timeout": -1}, "timeout is -1; expected seconds, more than 0, or None"),
        ({"save_every": 1.0}, "save_every is 1.0, but save_to is None; give it a folder"),
        ({"save_to": __file__}, "save_to is .*, which is a file; choose a folder"),
    ],
)
def test_serving_refuses_bad_arguments(choice, message):
    communicators = Communicators(_Group(), None, object(), None)
    workers = choice.pop("manager", 2)
    manager = workers if workers == 3 else _prioritized(workers)
    with pytest.raises(ValueError, match=message):
        serve(communicators, manager, **{"rows": 4, **choice})


def test_only_managers_serve_and_only_workers_are_served():
    with pytest.raises(ValueError, match="this rank is not a worker"):
        Worker(Communicators(None, None, None, None), _prioritized, rows=4)
    with pytest.raises(ValueError, match="this rank is not a manager"):
        serve(Communicators(object(), None, None, object()), _prioritized(1), rows=4)


def test_a_state_continues_where_it_was_saved(tmp_path):
    chosen = BaselineFilter.create(refresh_after=2)
    state = WorkerState.create(jnp.zeros(2), 6, chosen)
    add, contact = jax.jit(WorkerState.add), jax.jit(WorkerState.contact)
    ones, mask = jnp.ones((3, 2)), jnp.array([True, False, True])
    state = add(state, ones, jnp.arange(3.0), mask)
    jaxbuf.save(tmp_path, state)
    like = WorkerState.create(jnp.zeros(2), 6, chosen)
    loaded = add(jaxbuf.load(tmp_path, like=like), 2 * ones, jnp.arange(3.0), ~mask)
    assert loaded.items[:, 0].tolist() == [1, 1, 1, 2, 2, 2]
    assert {k: int(v) for k, v in loaded.metrics().items()} == {
        "adds": 2, "offered": 3, "batches": 0, "sent": 0, "skipped": 0, "kept": 3,
    }  # fmt: skip
    # No row reaches this baseline, so nothing is sent, and the rows are dropped.
    state, sent, count = contact(loaded.replace(baseline=jnp.float32(5)))
    assert not sent.any()
    assert int(count) == 0
    assert int(state.metrics()["skipped"]) == 1
    assert int(state.metrics()["kept"]) == 0
    _, sent, count = contact(loaded)
    assert sent.tolist() == [True, False, True, False, True, False]
    assert int(count) == 3


def test_traffic_counts_and_prints():
    traffic = Traffic(["rank 4", "rank 5"])
    traffic.count(0, requests=2, batches=1, rows=3, bytes=4000, answered=1000, receive=0.002)
    traffic.count(1, requests=1, bytes=10, handle=0.5, send=0.25)
    metrics = traffic.metrics()
    assert metrics["rank 4/bandwidth"] == 2e6
    assert metrics["rank 5/bandwidth"] == 0
    assert metrics["bytes"] == 5010
    assert metrics["handle_seconds"] == 0.5
    lines = traffic.table().splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["rank", "rank", "all"]
    assert lines[1].split()[2:] == ["2", "1", "3", "5,000", "2.0", "0.0", "0.0", "2.0"]


@pytest.mark.parametrize("text", ["", "short", "ä" * 300, "first" + "x" * 1000 + "last"])
def test_a_note_keeps_both_ends_of_a_text(text):
    read = wire.read_note(wire.note(text))
    assert read == text or (read[:4], read[-3:]) == (text[:4], text[-3:])


def _layout(ranks):
    return Layout(ranks, num_managers=2 if ranks == 4 else 1)


def _run_mode(mode, communicators, worker):
    items, score, mask = _inputs(worker)
    out = {"returned": []}
    answers = []
    with Worker(
        communicators, _prioritized, rows=_EVERY * _ROWS, every=_EVERY, mode=mode, timeout=60
    ) as end:
        for k in range(_ADDS):
            rows = jax.tree.map(lambda x: x[k], items)  # noqa: B023
            answer = end.add(rows, score=score[k], mask=mask[k])
            out["returned"].append(answer is not None)
            answers += [] if answer is None else [answer]
        # Metadata can be requested while a batch is on its way.
        end.request_metadata()
        drained = end.drain()
        assert drained.missing == ()
        answers += drained.answers
        metadata = end.request_metadata()
        out["metadata"] = {name: int(metadata[name]) for name in ("size", "batches")}
        out["metrics"] = end.metrics()
        del out["metrics"]["baseline"]
    out["numbers"] = [answer.sequence for answer in answers]
    out["answers"] = [
        [float(a.scores["held"]), *a.scores["pair"].tolist(), a.baseline] for a in answers
    ]
    return out


def _run_large(communicators):
    with Worker(communicators, _large, rows=2, mode="pipelined", timeout=60) as end:
        counters = []
        items = np.full((2, _WIDTH), 1, np.float32)
        end.add(items)
        # The batch was sent as it was before this change.
        items[:] = 9
        counters.append(end.state.counters.tolist())
        for rows, value in ((2, 2.0), (1, 3.0)):
            end.add(jnp.full((rows, _WIDTH), value))
            counters.append(end.state.counters.tolist())
        end.add(jnp.full((2, _WIDTH), 4.0), mask=jnp.array([False, True]))
        counters.append(end.state.counters.tolist())
        assert len(end.drain().answers) <= 4
        return {"answered": end.metrics()["answered"], "counters": counters}


def _program():
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    rank, size = world.Get_rank(), world.Get_size()
    layout = _layout(size)
    communicators = make_communicators(layout)
    workers = communicators.group.Get_size() - 1
    out = {}

    def run_manager(make, rows):
        return serve(communicators, make(workers), rows=rows, timeout=60, report=None)

    is_manager = communicators.managers is not None
    for mode in _MODES:
        if is_manager:
            served = run_manager(_prioritized, _EVERY * _ROWS)
            counts = served.manager.metrics()
            out[mode] = {
                "kept": _kept(served.manager),
                "rows": int(counts["rows"]),
                "batches": int(counts["batches"]),
                "faults": served.faults,
            }
        else:
            out[mode] = _run_mode(mode, communicators, rank)
    if size == 2 and is_manager:
        items = run_manager(_large, 2).manager.buffer.latest(6).data
        assert (items == items[:, :1]).all()
        out["large"] = items[:, 0].tolist()
    elif size == 2:
        out["large"] = _run_large(communicators)
    print(json.dumps(out))


if __name__ == "__main__":
    _program()

"""The benchmark: peers in processes of their own, and the checks that its rows do equal work."""

import dataclasses
import itertools
import os
import sys
import textwrap

import chex
import numpy as np
import pytest

from benchmarks import equality, peer_process
from benchmarks.arrivals import Arrivals, BestModel, Source
from benchmarks.harness import (
    Operation,
    Options,
    Row,
    Unavailable,
    UnequalWork,
    run_row,
    time_operation,
)
from benchmarks.peer_process import PeerError, PeerProcess
from benchmarks.report import row_markdown
from benchmarks.rows import gflownet, parts, windows, write_back
from benchmarks.transitions import Transitions
from benchmarks.workload import Workload

STEP = Transitions({name: windows.MUJOCO_STEP.leaves[name] for name in ("reward", "action")})
WINDOWS = Workload(
    STEP, capacity=64, add_size=4, sample_size=8, scan_length=3, num_envs=4, sequence_length=3
)
TOY = """
import sys
from benchmarks.harness import repeat_calls
from benchmarks.peers.serving import serve

class Toy:
    def __init__(self):
        self.calls = 0
    def time(self, calls):
        print("no answer")
        self.calls += calls
        return repeat_calls(lambda: None, calls)
    def count(self):
        return self.calls
    def fail(self, why):
        raise RuntimeError(why)
    def end(self):
        sys.exit("the end")

serve(Toy())
"""


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """A peer that counts the calls it is asked to time."""
    (tmp_path / "toy_peer.py").write_text(textwrap.dedent(TOY))
    paths = (str(tmp_path), os.environ.get("PYTHONPATH", ""))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    peer = PeerProcess(sys.executable, "toy_peer")
    yield peer
    peer.close()


def test_peer_process_answers_and_survives_its_own_errors(toy):
    assert toy.call("time", calls=3) >= 0
    with pytest.raises(PeerError, match=r"could not fail: (?s:.)*RuntimeError: because"):
        toy.call("fail", why="because")
    with pytest.raises(PeerError, match="_private is not public"):
        toy.call("_private")
    assert toy.call("count") == 3
    with pytest.raises(PeerError, match=r"toy_peer ended with status 1(?s:.)*the end"):
        toy.call("end")


def test_peer_process_takes_turns_in_a_row(toy):
    asked = []

    class Here:
        def verify(self):
            pass

        def operations(self):
            return {"wait": Operation(lambda calls: asked.append(toy.call("count")) or 1e-3)}

        def facts(self):
            return {}

    class There(Here):
        def operations(self):
            return {"wait": Operation(lambda calls: toy.call("time", calls=calls))}

    def missing():
        peer_process.environment("nowhere")

    row = Row("toys", "Toys", ("wait",), {"here": Here, "there": There, "gone": missing}, "here")
    result = run_row(row, Options(quick=True, repeats=4), lambda what, done: None)
    chex.assert_shape(result.timings["wait"].microseconds["there"], (4,))
    # Two libraries take turns in alternating order: a b, b a, a b, b a.
    turns = asked[-4:]
    assert turns[0] < turns[1] == turns[2] < turns[3]
    assert "gone is left out: there is no .venv-nowhere" in row_markdown(result)
    assert "there / here" in row_markdown(result)


def test_no_library_comes_right_after_itself():
    order = []
    operations = {
        name: Operation(lambda calls, name=name: order.append(name) or 1e-3) for name in "abc"
    }
    for _ in time_operation(operations, Options(quick=True, repeats=6)):
        pass
    turns = order[-18:]
    assert all(one != after for one, after in itertools.pairwise(turns))
    assert all(set(turns[i : i + 3]) == set("abc") for i in range(0, 18, 3))


def test_an_environment_that_is_missing_is_unavailable():
    with pytest.raises(Unavailable, match="make benchmark-nowhere"):
        peer_process.environment("nowhere")


@pytest.mark.parametrize("prioritized", [False, True])
def test_windows_do_equal_work(prioritized):
    workload = dataclasses.replace(WINDOWS, prioritized=prioritized)
    binding = windows.bind_jaxbuf(workload, Options())
    subject = windows.JaxSubject(binding, workload)
    equality.check_calls(subject, rounds=6, add=True)


def test_windows_added_by_halves_are_those_added_at_once():
    contestant = windows.AddContestant(WINDOWS, Options(), parts=2)
    contestant.verify()
    assert all(operation.run(2) > 0 for operation in contestant.operations().values())


def test_windows_that_break_are_found():
    model = equality.RingModel(WINDOWS)
    items = model.new_items(WINDOWS.capacity)
    model.new_items(WINDOWS.add_size)
    first = np.arange(8) % 4 + 8

    def sample(serials):
        data = {name: leaf[serials] for name, leaf in items.items()}
        return equality.CheckedSample(data, slots=None)

    step = np.arange(3) * 4
    assert list(model.check(sample(first[:, None] + step))) == list(first)
    for serials, why in (
        (first[:, None] + np.arange(3), "not contiguous"),
        (first[:, None] - 8 + step, "overwritten"),
        (np.full((8, 1), 60), "windows of 1 steps"),
    ):
        with pytest.raises(UnequalWork, match=why):
            model.check(sample(serials))


def test_half_of_the_arrivals_enter_at_any_capacity():
    for capacity in (1024, 16_384):
        arrivals = Arrivals(capacity, batch=256, width=1)
        model, source = BestModel(arrivals), Source(arrivals)
        entered = []
        for _ in range(32):
            states, scores = source.next()
            entered.append(np.mean(scores > model.scores.min()))
            model.add(states, scores)
        assert 0.4 < np.mean(entered) < 0.6


def test_the_worst_arrivals_are_refused_and_the_next_batch_stays():
    arrivals = Arrivals(600, batch=32, width=8)
    model, source, other = BestModel(arrivals), Source(arrivals), Source(arrivals)
    before = np.sort(model.scores)
    model.add(*source.worst())
    np.testing.assert_array_equal(np.sort(model.scores), before)
    for ours, theirs in zip(source.next(), other.next(), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("cutoff", [None, gflownet.CUTOFF])
def test_scored_rows_do_equal_work(cutoff):
    arrivals = Arrivals(600, batch=32, width=8)
    subject = gflownet.JaxbufSubject(arrivals, gflownet.preset(cutoff))
    if cutoff is None:
        gflownet.check_samples(subject, draws=16)
    gflownet.check_rows(subject, arrivals, cutoff, turns=20)
    subject.add(1)
    with pytest.raises(UnequalWork, match="after 0 adds"):
        gflownet.check_rows(subject, arrivals, cutoff, turns=0)


def test_points_that_are_found_elsewhere_are_noticed():
    workload = Workload(STEP, capacity=512, add_size=4, sample_size=64, scan_length=3)
    contestant = parts.JaxbufParts(workload, Options())
    contestant.verify()
    operations = contestant.operations()
    assert tuple(operations) == parts.OPERATIONS
    assert all(operation.run(2) > 0 for operation in operations.values())
    contestant.found = lambda points: points.astype(int)
    with pytest.raises(UnequalWork, match="does not lie"):
        contestant.verify()


@pytest.mark.parametrize(
    "kind", [write_back.JaxbufChanges, write_back.HandChanges, write_back.SameChanges]
)
def test_changes_do_equal_work(kind):
    contestant = kind(2**12, Options(quick=True))
    contestant.verify()
    operations = contestant.operations()
    left_out = {"scan add", "scan add+remove"} if kind is write_back.SameChanges else set()
    assert set(operations) == set(write_back.OPERATIONS) - left_out
    assert all(operation.run(2) > 0 for operation in operations.values())


def test_changes_that_are_not_made_are_found():
    class Forgets(write_back.HandChanges):
        def changes(self):
            changes = super().changes()
            forgotten = dataclasses.replace(
                changes["update_score"], step=lambda scores, _: scores + 0.0
            )
            return {**changes, "update_score": forgotten}

    with pytest.raises(UnequalWork, match="update_score leaves something else than it should"):
        Forgets(2**12, Options(quick=True)).verify()


@pytest.mark.parametrize(
    ("owner", "name", "instead", "found"),
    [
        (write_back.Ring, "kept", lambda ring, index, lap: (ring, index), "set_field reward"),
        (
            write_back,
            "with_leaves",
            lambda levels, at, value, reduce: [levels[0].at[at].set(value), *levels[1:]],
            "update_score",
        ),
    ],
    ids=["stale rows", "sums"],
)
def test_changes_with_other_results_are_found(monkeypatch, owner, name, instead, found):
    monkeypatch.setattr(owner, name, instead)
    with pytest.raises(UnequalWork, match=f"{found} leaves something else than it should"):
        write_back.SameChanges(2**12, Options(quick=True)).verify()

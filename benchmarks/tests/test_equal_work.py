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
    Contestant,
    Operation,
    Options,
    Row,
    UnequalWork,
    run_row,
    time_operation,
)
from benchmarks.jax_loops import JaxSubject
from benchmarks.peer_process import PeerError, PeerProcess
from benchmarks.report import as_dict, section
from benchmarks.rows import gflownet, windows
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

    class Here(Contestant):
        def verify(self):
            pass

        def operations(self):
            return {"wait": Operation(lambda calls: asked.append(toy.call("count")) or 1e-3)}

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
    text = section("toys", as_dict(result))
    assert "gone is left out: there is no .venv-nowhere" in text
    assert "there / here" in text


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


@pytest.mark.parametrize("prioritized", [False, True])
def test_windows_do_equal_work(prioritized):
    workload = dataclasses.replace(WINDOWS, prioritized=prioritized)
    subject = JaxSubject(windows.bind_jaxbuf(workload), workload)
    equality.check_calls(subject, rounds=6, add=True)


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

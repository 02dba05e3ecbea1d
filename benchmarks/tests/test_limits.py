"""The floors of the benchmark, and how several runs become one."""

import dataclasses

import jax.numpy as jnp
import pytest

from benchmarks import limits
from benchmarks.harness import Contestant, Operation, Options, Row, merged, run_row
from benchmarks.jax_loops import ReplayContestant
from benchmarks.programs import compiled
from benchmarks.rows import per
from benchmarks.transitions import CARTPOLE
from benchmarks.workload import Workload

WORKLOAD = Workload(CARTPOLE, capacity=256, add_size=4, sample_size=8, scan_length=2)


@pytest.fixture(autouse=True)
def small_measurements(monkeypatch):
    """Measures little, as only the sums are tested."""
    monkeypatch.setattr(limits, "COPIED", 2**16)
    monkeypatch.setattr(limits, "LARGEST", 2**16)
    monkeypatch.setattr(limits, "BLOCKS", 1)
    limits.forget()
    yield
    limits.forget()


def test_traffic_counts_what_the_arrays_say():
    moved = WORKLOAD.traffic()
    item = 4 * 4 + 4 + 4 + 1 + 4 * 4
    assert moved["add"] == limits.Traffic(4 * (2 * item + 4))
    # No leaf of this item is longer than a line: a jump for each of them, and for the priority.
    assert moved["sample"] == limits.Traffic(8 * (item + 4), 8 * 6, 256 * (item + 4))
    assert moved["update"] == limits.Traffic(8 * 4, 8, 256 * (item + 4))
    assert moved["cycle"] == moved["add"] + moved["sample"] + moved["update"]


def test_long_rows_are_streamed_after_their_first_line():
    assert limits.gathered(2, [200, 8], 1000) == limits.Traffic(2 * (136 + 208), 4, 1000)


def test_an_empty_call_donates_and_makes_what_it_should():
    state = (jnp.zeros(3), jnp.ones(2))
    kept, made = limits.empty(4)(state, (jnp.zeros(1),))
    assert all(leaf.is_deleted() for leaf in state)
    assert [leaf.shape for leaf in kept] == [(3,), (2,)]
    assert len(made) == 4
    assert limits.dispatch_seconds(2, 1, 4) > 0


def test_a_program_is_compiled_once():
    def program(slots):
        return compiled(lambda state: state + jnp.float32(1.0), jnp.zeros(slots))

    assert program(8) is program(8)
    assert program(8) is not program(9)


def test_rows_report_floors():
    contestant = ReplayContestant(per.bind_jaxbuf, WORKLOAD)
    contestant.verify = lambda: None
    names = ("python add", "python sample+weights", "python update", "scan cycle")
    builders = dict.fromkeys(("jaxbuf", "other"), lambda: contestant)
    row = Row("small", "Small", names, builders)
    for alike, libraries in ((True, ["jaxbuf"]), (False, ["jaxbuf", "other"])):
        row = dataclasses.replace(row, alike=alike)
        result = run_row(row, Options(quick=True, repeats=1), lambda what, done: None)
        assert [list(result.floors[name]) for name in names] == [libraries] * 4
        assert all(floor > 0 for found in result.floors.values() for floor in found.values())


def test_a_batch_and_its_weights_are_one_call():
    contestant = ReplayContestant(per.bind_jaxbuf, WORKLOAD)
    arrays = contestant._arrays(weights=False)
    donated, given, made = arrays["sample"]
    assert (donated, made) == (0, 9)  # The five leaves, two of the slots, probability and valid.
    assert contestant._arrays(weights=True)["sample"] == (0, given + 1, made + 1)
    assert arrays["add"] == (given - 1, 5, 0)
    assert arrays["update"] == (given - 1, 3, 0)


def test_runs_are_merged_with_their_medians():
    class Timed(Contestant):
        def __init__(self, seconds):
            self.seconds = seconds

        def verify(self):
            pass

        def operations(self):
            return {"wait": Operation(lambda calls: calls * self.seconds())}

    speed = {"peer": 2.0}
    row = Row(
        "toys",
        "Toys",
        ("wait",),
        {"jaxbuf": lambda: Timed(lambda: 1.0), "peer": lambda: Timed(lambda: speed["peer"])},
    )
    options, results = Options(quick=True, repeats=3), []
    for speed["peer"] in (2.0, 4.0, 3.0):
        results.append(run_row(row, options, lambda what, done: None))
    timing = merged(results).timings["wait"]
    assert timing.ratio("peer") == (2.0, 3.0, 4.0)
    assert timing.median("peer") == 3e6
    assert merged(results[:1]) is results[0]

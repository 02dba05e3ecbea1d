"""Scores and priorities that a worker learns later reach the items of its manager."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("mpi4jax")

import jaxbuf
from jaxbuf.mpi import (
    BaselineFilter,
    Communicators,
    ExchangeError,
    Manager,
    Min,
    Reply,
    Worker,
    wire,
)
from jaxbuf.mpi.wire import Kind
from tests.programs.mpi_inside import lines, run

_ROWS, _CAPACITY = 4, 10
_MODES = ("sync", "deferred", "pipelined")


def _lowest(workers=1, capacity=_CAPACITY, **options):
    return Manager.create(jaxbuf.reward_prioritized(jnp.int32(0), capacity), workers, **options)


def _prioritized(workers=1):
    buffer = jaxbuf.ItemBuffer.create(jnp.int32(0), _CAPACITY, sampler=jaxbuf.Prioritized())
    return Manager.create(buffer, workers)


class Twin:
    """The items of a manager by their numbers: those with the highest scores, in plain Python."""

    def __init__(self, capacity):
        self.capacity, self.score, self.stored = capacity, {}, set()
        self.updates = self.stale = 0

    def add(self, items, score):
        self.score.update(zip(items, score, strict=True))
        while len(self.score) > self.capacity:
            del self.score[min(self.score, key=self.score.get)]
        self.stored |= self.score.keys()

    def update(self, items, score):
        for item, new in zip(items, score, strict=True):
            if item not in self.stored:
                continue
            self.updates += 1
            if item not in self.score:
                self.stale += 1
            elif not np.isnan(new):
                self.score[item] = new


def _scores(buffer):
    """Returns the score of each item by its number."""
    live = np.asarray(buffer.live)
    scores = np.asarray(buffer.occupancy.score)[live].tolist()
    return dict(zip(np.asarray(buffer.data)[live].tolist(), scores, strict=True))


def _new_scores(items, step):
    """Returns scores that no other item has, and no batch."""
    random = np.random.default_rng((7, step))
    score = 100 * (step + 1) + random.permutation(len(items)) - 150 * random.integers(0, 2)
    return np.float32(score) + np.float32(0.5)


@pytest.mark.parametrize(
    ("mode", "large"), [*((mode, False) for mode in _MODES), ("pipelined", True)]
)
def test_a_score_that_is_learned_later_reaches_the_item(mode, large, monkeypatch):
    if large:
        monkeypatch.setattr(wire, "_LARGE", 16)
    items = np.arange(8 * _ROWS, dtype=np.int32).reshape(8, _ROWS)
    score = np.random.default_rng(0).permutation(np.float32(items.ravel())).reshape(items.shape)
    twin, answered = Twin(_CAPACITY), []

    def work(communicators):
        with Worker(communicators, _lowest, rows=_ROWS, mode=mode, slots=True, timeout=30) as end:
            for step in range(len(items)):
                answer = end.add(items[step], score=score[step])
                answered.extend([] if answer is None else [answer])
                twin.add(items[step].tolist(), score[step].tolist())
                for old in answered[-3::2]:
                    named = items[old.sequence - 1]
                    new = _new_scores(named, step + 10 * old.sequence)
                    new[step % _ROWS] = np.nan if step == 3 else new[step % _ROWS]
                    end.update_score(old.slots, new)
                    twin.update(named.tolist(), new.tolist())
            answers = end.drain().answers
            end.update_score(answers[-1].slots if answers else answer.slots, np.arange(4.0))
            twin.update(items[-1].tolist(), np.arange(4.0).tolist())

    served, _ = run(_lowest(), work, rows=_ROWS)
    assert served.faults == ()
    assert _scores(served.manager.buffer) == twin.score
    counts = served.traffic.metrics()
    assert (counts["updates"], counts["stale"]) == (twin.updates, twin.stale)
    assert 0 < twin.stale < twin.updates
    assert counts["rank 0/stale"] == twin.stale
    jaxbuf.testing.assert_valid(served.manager.buffer)


def _one_answer(communicators, make=_lowest, rows=_ROWS, **options):
    with Worker(communicators, make, rows=rows, timeout=30, **options) as end:
        return end.add(np.arange(rows, dtype=np.int32), score=np.arange(rows, dtype=np.float32))


def test_only_a_worker_that_asks_pays_for_slots():
    served, answer = run(_lowest(), _one_answer, rows=_ROWS)
    assert answer.slots is None
    item = jax.ShapeDtypeStruct((_ROWS,), np.int32)
    flag, number = (jax.ShapeDtypeStruct((), dtype) for dtype in (np.bool_, np.float32))
    rows = [jax.ShapeDtypeStruct((_ROWS,), dtype) for dtype in (np.float32, np.bool_)]
    batch = wire.Schema(((item, rows[0]), rows[1]), _ROWS)
    reply = wire.Schema(Reply({"score": number}, number, flag))
    leaves = 2 * wire.HEADER.itemsize
    without = served.traffic.metrics()["bytes"]
    assert without == batch.size + reply.size + leaves

    served, answer = run(_lowest(), lambda ends: _one_answer(ends, slots=True), rows=_ROWS)
    assert served.traffic.metrics()["bytes"] > without
    assert served.manager.buffer.holds(answer.slots).all()
    got = served.manager.buffer.get(answer.slots).data
    assert got.tolist() == list(range(_ROWS))


def test_slots_have_a_row_for_each_row_of_the_message():
    """Rows that were masked out, filtered or evicted at once lie in no slot."""

    def work(communicators):
        chosen = BaselineFilter.create()
        with Worker(
            communicators, _lowest, rows=20, every=2, filter=chosen, slots=True, timeout=30
        ) as end:
            first = np.arange(3, dtype=np.int32)
            assert end.add(first, score=np.float32(first), mask=np.array([1, 0, 1], bool)) is None
            one = end.add(first[:2] + 3, score=np.array([3, 4], np.float32))
            # The baseline is 0 now, so that the first row is left out; 10 of the others fit.
            end.add(np.arange(10, 13, dtype=np.int32), score=np.array([-1, 20, 21], np.float32))
            more = np.arange(20, 32, dtype=np.int32)
            return one.slots, end.add(more, score=np.float32(more) + 100).slots

    served, (one, two) = run(_lowest(), work, rows=20)
    assert [slots.index.shape for slots in (one, two)] == [(5,), (15,)]
    assert (one.index == _CAPACITY).tolist() == [False, True, False, False, False]
    assert (two.index == _CAPACITY).tolist() == [True] * 5 + [False] * 10
    assert not served.manager.buffer.holds(jax.tree.map(jnp.asarray, one)).any()
    held = served.manager.buffer.get(jax.tree.map(jnp.asarray, two))
    assert held.data[5:].tolist() == list(range(22, 32))


def test_rows_of_an_update_may_be_masked_repeated_and_many():
    items = np.arange(8, dtype=np.int32)

    def work(communicators):
        with Worker(communicators, _lowest, rows=8, slots=True, timeout=30) as end:
            slots = end.add(items, score=np.float32(items)).slots
            twice = jax.tree.map(lambda x: np.concatenate([x, x, x]), slots)
            score = np.arange(24, dtype=np.float32) + 100
            mask = np.arange(24) % 8 < np.repeat([8, 4, 2], 8)
            end.update_score(twice, jnp.asarray(score), mask=jnp.asarray(mask))
            # Neither empty nor invalid rows are sent.
            end.update_score(jax.tree.map(lambda x: x[:0], slots), np.zeros(0))
            nowhere = jaxbuf.Slots(np.full_like(slots.index, _CAPACITY), slots.generation)
            end.update_score(nowhere, np.zeros(8))

    served, _ = run(_lowest(), work, rows=8)
    expected = [116, 117, 110, 111, 104, 105, 106, 107]
    assert _scores(served.manager.buffer) == dict(enumerate(expected))
    assert served.traffic.metrics()["updates"] == 8 + 4 + 2
    assert served.traffic.metrics()["stale"] == 0


def test_priorities_are_updated_alike():
    def work(communicators):
        with Worker(communicators, _prioritized, rows=_ROWS, slots=True, timeout=30) as end:
            slots = end.add(np.arange(_ROWS, dtype=np.int32)).slots
            end.update_priority(slots, np.array([0.0, 5.0, np.nan, 0.0]))
            with pytest.raises(ValueError, match="update_score was called, but no part"):
                end.update_score(slots, np.zeros(_ROWS))

    served, _ = run(_prioritized(), work, rows=_ROWS)
    buffer = served.manager.buffer
    assert set(buffer.sample(jax.random.key(0), 64).data.tolist()) == {1, 2}
    assert int(buffer.metrics()["rejected"]) == 1


def test_a_worker_refuses_bad_updates():
    def work(communicators):
        with Worker(communicators, _lowest, rows=_ROWS, slots=True, timeout=30) as end:
            answer = end.add(np.arange(4, dtype=np.int32), score=np.zeros(4, np.float32))
            slots = answer.slots
            for args, message in [
                ((answer, np.zeros(4)), "slots is .*Answer.*; expected the slots of a sample"),
                ((None, np.zeros(4)), r"slots is None; .* Worker\(\.\.\., slots=True\)"),
                ((slots, np.zeros(3)), r"score has shape \(3,\); expected \(4,\)"),
                ((slots, np.full(4, 1e300)), r"score\[0\] is 1e\+300"),
                ((slots, np.zeros(4, complex)), "score has dtype complex"),
            ]:
                with pytest.raises(ValueError, match=message):
                    end.update_score(*args)
            with pytest.raises(ValueError, match=r"mask has shape \(2,\); expected \(4,\)"):
                end.update_score(slots, np.zeros(4), mask=np.ones(2, bool))
            with pytest.raises(ValueError, match="update_priority was called, but"):
                end.update_priority(slots, np.zeros(4))
        with pytest.raises(ExchangeError, match="has left its manager"):
            end.update_score(slots, np.zeros(4))

    served, _ = run(_lowest(), work, rows=_ROWS)
    assert served.traffic.metrics()["updates"] == 0
    with pytest.raises(ValueError, match="slots is 1; expected True or False"):
        Worker(Communicators(lines(2)[0], None, None, object()), _lowest, rows=4, slots=1)


def test_a_refused_message_counts_against_no_batch():
    def work(communicators):
        with Worker(communicators, _lowest, rows=_ROWS, slots=True, timeout=30) as end:
            nothing = np.zeros(wire.HEADER.itemsize, np.uint8)
            for _ in range(3):
                communicators.group.Isend([nothing], dest=1, tag=wire.FIRST_TAG + 2)
            # The answer comes after all refusals.
            end.request_metadata()
            with pytest.raises(ExchangeError, match="refused a message"):
                end.add(np.arange(4, dtype=np.int32), score=np.ones(4, np.float32))
            assert end.add(np.arange(4, dtype=np.int32), score=np.ones(4, np.float32))
            return end.drain().missing, end.metrics()

    served, (missing, metrics) = run(_lowest(), work, rows=_ROWS)
    assert len(served.faults) == metrics["refused"] == 3
    assert missing == ()
    assert metrics["answered"] == metrics["batches"] == 2


def test_a_worker_that_left_changes_nothing():
    first, second, theirs = lines(3)

    def work(communicators):
        with Worker(communicators, make, rows=_ROWS, timeout=30):
            other = Communicators(second, None, None, object())
            end = Worker(other, make, rows=_ROWS, slots=True, timeout=30)
            slots = end.add(np.arange(4, dtype=np.int32), score=np.ones(4, np.float32)).slots
            channel = end._channel
            channel.send(Kind.LEAVE, channel.manager)
            tree = slots, np.zeros(4, np.float32)
            channel.send(Kind.SCORES, channel.manager, tree, number=wire.NO_BATCH, rows=4)
            reason = ""
            while not reason:
                reason = end.drain().reason
            return reason

    def make(workers):
        return _lowest(2)

    served, reason = run(make(2), work, rows=_ROWS, group=[first, theirs])
    assert "its sender had left" in reason
    assert len(served.faults) == 1
    assert set(_scores(served.manager.buffer).values()) == {1.0}


def test_a_manager_that_only_scores_has_no_slots():
    def work(communicators):
        answer = _one_answer(communicators, make, slots=True)
        return answer.slots

    def make(workers):
        return _lowest(workers, store=False)

    _, slots = run(make(1), work, rows=_ROWS)
    assert slots.index.tolist() == [_CAPACITY] * _ROWS


def test_a_manager_that_calls_back_takes_updates(tmp_path):
    def make(workers):
        def scores(buffer, batch, mask, sender):
            shape = jax.ShapeDtypeStruct((), jnp.float32)
            return {"score": jax.pure_callback(lambda x: np.float32(x.sum()), shape, batch.score)}

        return _lowest(workers, scores=scores)

    def work(communicators):
        with Worker(communicators, make, rows=_ROWS, slots=True, timeout=30) as end:
            answer = end.add(np.arange(4, dtype=np.int32), score=np.ones(4, np.float32))
            end.update_score(answer.slots, np.arange(4.0))

    served, _ = run(make(1), work, rows=_ROWS)
    assert _scores(served.manager.buffer) == {k: float(k) for k in range(4)}


def test_slots_name_the_same_items_after_a_checkpoint(tmp_path):
    def first(communicators):
        return _one_answer(communicators, slots=True).slots

    def second(communicators):
        with Worker(communicators, _lowest, rows=_ROWS, timeout=30) as end:
            end.update_score(slots, np.arange(4.0) + 50)

    group = lines(2)
    _, slots = run(_lowest(), first, rows=_ROWS, group=group, save_to=tmp_path)
    manager = jaxbuf.load(tmp_path, like=_lowest())
    served, _ = run(manager, second, rows=_ROWS, group=group)
    assert _scores(served.manager.buffer) == {k: 50.0 + k for k in range(4)}


def test_the_baseline_follows_new_scores():
    manager = _lowest(capacity=3, baseline=Min())
    items, score = jnp.arange(3, dtype=jnp.int32), jnp.array([1.0, 2.0, 3.0])
    manager, _, slots = jax.jit(Manager.insert)(manager, items, score=score)
    assert float(manager.baseline_value()) == 1.0
    mask = jnp.array([True, False, True])
    update = jax.jit(Manager.update_score)
    for one in (update, Manager.update_score):
        after = one(manager, slots, jnp.array([7.0, 9.0, 8.0]), mask=mask)
        assert float(after.baseline_value()) == 2.0
        assert _scores(after.buffer) == {0: 7.0, 1: 2.0, 2: 8.0}
    received, _ = manager.receive(items + 3, score=score + 10)
    assert not received.buffer.holds(slots).any()
    stale = received.update_score(slots, jnp.zeros(3))
    assert _scores(stale.buffer) == {3: 11.0, 4: 12.0, 5: 13.0}

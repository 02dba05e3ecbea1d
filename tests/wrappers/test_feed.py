"""`feed`: from a queue into a holder, until one of them ends, and how long each side has waited."""

import itertools
import multiprocessing
import queue
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbuf


def make(capacity=8, **options):
    buffer = jaxbuf.ItemBuffer.create(jnp.float32(0), capacity, sampler=jaxbuf.Prioritized())
    return jaxbuf.Holder(buffer, **options)


def threads_end(before):
    soon(lambda: threading.active_count() <= before)


def test_a_queue_fills_up_while_the_limiter_lets_nothing_in():
    rows = queue.Queue(maxsize=1)
    limiter = jaxbuf.RateLimiter.create(1.0, 2, tolerance=(-2.0, 4.0))
    with make(limiter=limiter) as holder:
        jaxbuf.feed(holder, rows)
        for _ in range(4):
            rows.put({"items": jnp.ones(2)}, timeout=60.0)
        with pytest.raises(queue.Full):
            rows.put({"items": jnp.ones(2)}, timeout=0.3)
        assert int(holder.read(lambda buffer: buffer.size)) == 4
        waited = holder.metrics()
        for key in jax.random.split(jax.random.key(0), 3):
            holder.sample(key, 2, timeout=60.0)
        rows.put({"items": jnp.ones(2)}, timeout=60.0)
    # It is counted once the call goes on.
    assert waited["seconds_to_add"] < 0.3 <= holder.metrics()["seconds_to_add"] < 60
    assert holder.metrics()["samples"] == 6


def feed_all(holder, messages, until=None):
    """Feeds messages that all wait already; returns the rows of each add, and what is left."""
    rows, lengths, add = queue.Queue(), [], holder.add
    for message in messages:
        rows.put(message)

    def counted(items, **options):
        lengths.append(len(jax.tree.leaves(items)[0]))
        add(items, **options)

    holder.add = counted
    total = sum(len(jax.tree.leaves(message["items"])[0]) for message in messages)
    jaxbuf.feed(holder, rows)
    holder.read(counts, when=lambda buffer: counts(buffer) == (until or total), timeout=60.0)
    return lengths, rows


def soon(condition):
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def counts(buffer):
    return int(buffer.metrics()["adds"])


def one(number, **options):
    """A message of one row, or of several."""
    return {"items": np.atleast_1d(np.float32(number)), **options}


def test_all_that_waits_is_added_at_once_and_in_order():
    priority = np.arange(1, 301, dtype=np.float32)
    with make(400) as holder:
        messages = [one(i, priority=priority[i : i + 1]) for i in range(300)]
        lengths, _ = feed_all(holder, messages)
        batch = holder.read(lambda buffer: buffer.get(buffer.latest(301).slots))
    # The first one alone, and the others padded.
    assert lengths == [1, 1024]
    assert batch.data[batch.valid].tolist() == [*range(300)]
    expected = priority**0.6 / np.sum(priority**0.6)
    np.testing.assert_allclose(batch.probability[batch.valid], expected, rtol=1e-5)


def test_messages_that_differ_are_added_in_turn():
    few = np.array([1, 2, 3], np.float32)
    messages = [one(0), one(1), one(2), one(few), one(few, mask=few < 3), one(3), one(4, mask=None)]
    messages += [{"items": jnp.array([5.0])}, one(6), one(7)]
    with make(64) as holder:
        lengths, _ = feed_all(holder, messages, until=13)
        data = holder.read(lambda buffer: buffer.data[:14].tolist())
    assert data == [0, 1, 2, 1, 2, 3, 1, 2, 3, 4, 5, 6, 7, 0]
    assert lengths == [1, 16, 3, 1, 1, 16]


def test_a_queue_takes_what_it_has_room_for():
    with jaxbuf.Holder(jaxbuf.Queue.create(jnp.float32(0), 40)) as holder:
        lengths, rows = feed_all(holder, [one(i) for i in range(100)], until=40)
        # The last one waits.
        soon(lambda: (lengths, rows.qsize()) == ([1, 128, 1], 59))
        taken = [holder.take(n, timeout=60.0).data.tolist() for n in (5, 35, 20, 40)]
    assert [*itertools.chain(*taken)] == [*range(100)]


def test_rows_whose_room_others_have_taken_go_in_one_by_one():
    with jaxbuf.Holder(jaxbuf.Queue.create(jnp.float32(0), 40)) as holder:
        add, others = holder.add, [jnp.full(35, -1.0)]

        def late(items, **options):
            if len(items) > 1 and others:
                add(others.pop())
            add(items, **options)

        holder.add, rows = late, queue.Queue()
        for number in range(30):
            rows.put(one(number))
        jaxbuf.feed(holder, rows)
        assert holder.take(38, timeout=60.0).data.tolist() == [0, *[-1] * 35, 1, 2]
        assert holder.take(27, timeout=60.0).data.tolist() == [*range(3, 30)]


def test_a_limiter_lets_in_as_many_rows_as_one_by_one():
    limiter, most = jaxbuf.RateLimiter.create(2.0, 4, tolerance=(-8.0, 37.0)), 0
    while limiter.inserted(most).can_insert(most, 1):
        most += 1
    with make(64, limiter=limiter) as holder:
        lengths, rows = feed_all(holder, [one(i) for i in range(50)], until=most)
        assert int(holder.read(lambda buffer: buffer.size)) == most < 40
        soon(lambda: (lengths, rows.qsize()) == ([1, 128, 1], 50 - most - 1))


def test_what_must_come_apart_does():
    rings = jaxbuf.TrajectoryBuffer.create(jnp.float32(0), 1, 64)
    diverse = jaxbuf.diverse_reward_prioritized(jnp.float32(0), 64, cutoff=0.5)
    for buffer, options in ((rings, {}), (diverse, {"score": np.ones(1, np.float32)})):
        with jaxbuf.Holder(buffer) as holder:
            assert feed_all(holder, [one(i, **options) for i in range(20)])[0] == [1] * 20


def test_a_sample_that_waits_is_counted():
    with make() as holder:
        assert holder.metrics() == {"seconds_to_add": 0, "seconds_to_sample": 0}
        with pytest.raises(TimeoutError):
            holder.sample(jax.random.key(0), 4, timeout=0.2)
        holder.add(jnp.ones(4))
        holder.sample(jax.random.key(0), 4, timeout=0.2)
    assert 0.2 <= holder.metrics()["seconds_to_sample"] < 2
    assert holder.metrics()["seconds_to_add"] < 0.1


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        ({"items": jnp.ones((2, 3))}, ValueError),
        ({"items": jnp.ones(2), "reward": 1}, ValueError),
        ({"rows": jnp.ones(2)}, TypeError),
        (jnp.ones(2), TypeError),
        (None, TypeError),
    ],
)
def test_a_message_that_cannot_be_added_stops_the_holder_after_those_before_it(message, kind):
    before, holder, rows = threading.active_count(), make(32), queue.Queue()
    for each in [*(one(i) for i in range(20)), message, one(20)]:
        rows.put(each)
    jaxbuf.feed(holder, rows)
    with pytest.raises(jaxbuf.Stopped) as stopped:
        holder.sample(jax.random.key(0), 21, timeout=60.0)
    assert isinstance(stopped.value.__cause__, kind)
    assert int(holder.read(lambda buffer: buffer.size)) == 20
    threads_end(before)


class Process:
    """A process of multiprocessing, as far as it is looked at."""

    def __init__(self, name):
        self.name, self.exitcode = name, None
        self.sentinel, self.end = multiprocessing.Pipe(duplex=False)

    def join(self, timeout):
        self.exitcode = 3


def test_a_process_that_ends_stops_the_holder():
    before, processes = threading.active_count(), [Process("first"), Process("second")]
    holder = make()
    jaxbuf.feed(holder, queue.Queue(), processes)
    with pytest.raises(TimeoutError):
        holder.sample(jax.random.key(0), 4, timeout=0.3)
    processes[1].end.close()
    with pytest.raises(jaxbuf.Stopped, match="second ended with exit code 3"):
        holder.sample(jax.random.key(0), 4, timeout=60.0)
    threads_end(before)


def test_processes_that_end_after_the_holder_are_no_error():
    before, process = threading.active_count(), Process("actor")
    with make() as holder:
        jaxbuf.feed(holder, queue.Queue(), [process])
    process.end.close()
    threads_end(before)
    with pytest.raises(jaxbuf.Stopped, match=r"^the holder was stopped$"):
        holder.sample(jax.random.key(0), 4)

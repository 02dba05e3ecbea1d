"""`feed`: from a queue into a holder, until one of them ends, and how long each side has waited."""

import multiprocessing
import queue
import threading
import time

import jax
import jax.numpy as jnp
import pytest

import jaxbuf


def make(capacity=8, **options):
    buffer = jaxbuf.ItemBuffer.create(jnp.float32(0), capacity, sampler=jaxbuf.Prioritized())
    return jaxbuf.Holder(buffer, **options)


def threads_end(before):
    end = time.monotonic() + 30
    while threading.active_count() > before:
        assert time.monotonic() < end
        time.sleep(0.02)


def test_messages_are_arguments_of_add():
    before, rows = threading.active_count(), queue.Queue()
    mask, priority = jnp.array([True, False, True]), jnp.array([1.0, 9.0, 3.0])
    with make() as holder:
        jaxbuf.feed(holder, rows)
        rows.put({"items": jnp.arange(3.0), "priority": priority, "mask": mask})
        rows.put({"items": jnp.arange(3.0, 6.0)})
        batch = holder.read(
            lambda buffer: buffer.get(buffer.latest(8).slots),
            when=lambda buffer: buffer.size == 5,
            timeout=60.0,
        )
    assert batch.data[batch.valid].tolist() == [0.0, 2.0, 3.0, 4.0, 5.0]
    first, second = batch.probability[batch.valid][:2]
    assert float(second / first) == pytest.approx(3**0.6)
    threads_end(before)


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
    ],
)
def test_a_message_that_cannot_be_added_stops_the_holder(message, kind):
    before, rows = threading.active_count(), queue.Queue()
    holder = make()
    jaxbuf.feed(holder, rows)
    rows.put(message)
    with pytest.raises(jaxbuf.Stopped) as stopped:
        holder.sample(jax.random.key(0), 4, timeout=60.0)
    assert isinstance(stopped.value.__cause__, kind)
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

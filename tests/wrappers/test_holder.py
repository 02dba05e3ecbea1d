"""`Holder`: threads that wait for each other, and nothing lost between them."""

import concurrent.futures
import contextlib
import copy
import fractions
import itertools
import math
import pickle
import re
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbuf
from jaxbuf import Holder, Stopped
from tests.operations import quick
from tests.wrappers.test_operations import a_sharded

# Long enough for a busy machine; nothing that passes waits for it.
LIMIT = 60.0
# Long enough for a thread that could go on to do so.
MOMENT = 0.2
KEY = jax.random.key(0)


@pytest.fixture
def threads():
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        yield pool


def item_buffer(capacity, **options):
    return jaxbuf.ItemBuffer.create(jnp.int32(0), capacity, **options)


def queue(capacity):
    return Holder(jaxbuf.Queue.create(jnp.int32(0), capacity))


def items(capacity):
    return Holder(item_buffer(capacity, sampler=jaxbuf.Uniform(False)))


def integers(*values):
    return jnp.array(values, jnp.int32)


def still_waits(future):
    with pytest.raises(concurrent.futures.TimeoutError):
        future.result(timeout=MOMENT)
    return True


def test_producers_and_consumers_lose_nothing(threads):
    holder = queue(4)

    def produce(start):
        for first in range(start, start + 40, 2):
            holder.add(integers(first, first + 1), timeout=LIMIT)

    def consume(batch_size):
        found = []
        for _ in range(40 // batch_size):
            batch = holder.take(batch_size, timeout=LIMIT)
            assert batch.valid.all()
            found += batch.data.tolist()
        return found

    producers = [threads.submit(produce, 100 * number) for number in range(3)]
    consumers = [threads.submit(consume, batch_size) for batch_size in (1, 2, 4)]
    for producer in producers:
        producer.result(timeout=LIMIT)
    found = [consumer.result(timeout=LIMIT) for consumer in consumers]
    assert sorted(itertools.chain(*found)) == [100 * n + i for n in range(3) for i in range(40)]
    # Each consumer sees the items of each producer in their order.
    for values in found:
        for number in range(3):
            own = [value for value in values if value // 100 == number]
            assert own == sorted(own)
    assert holder.read(lambda queue: int(queue.metrics()["rejected"])) == 0


def test_sampling_waits_until_there_is_enough(threads):
    holder = items(8)
    waiter = threads.submit(holder.sample, KEY, 3, timeout=LIMIT)
    holder.add(integers(1, 2))
    assert still_waits(waiter)
    holder.add(integers(3, 4), mask=jnp.array([False, True]))
    assert sorted(waiter.result(timeout=LIMIT).data.tolist()) == [1, 2, 4]
    batch = holder.sample(KEY, 8, least=3)
    assert batch.valid.sum() == 3


def test_adding_to_a_full_queue_waits_for_room(threads):
    with queue(3) as holder:
        holder.add(integers(1, 2))
        # Once its time is over it would look again, whether it was woken up or not.
        waiter = threads.submit(holder.add, integers(3, 4))
        assert still_waits(waiter)
        assert holder.take(1).data.tolist() == [1]
        waiter.result(timeout=LIMIT)
        assert holder.take(3).data.tolist() == [2, 3, 4]


def test_a_holder_obeys_its_limiter(threads):
    """Reverb: ratio 1.5, range −1 to 3; the third insert waits for a second sample."""
    limiter = jaxbuf.RateLimiter.create(1.5, 2, (-1.0, 3.0))
    holder = Holder(item_buffer(8), limiter=limiter)
    with pytest.raises(ValueError, match="items has dtype float32"):
        holder.add(jnp.zeros(1), timeout=0)
    waiter = threads.submit(holder.sample, KEY, 1, timeout=LIMIT)
    holder.add(integers(0))
    # There is an item, but the limiter waits for two.
    assert still_waits(waiter)
    holder.add(integers(1))
    waiter.result(timeout=LIMIT)
    third = threads.submit(holder.add, integers(2), timeout=LIMIT)
    assert still_waits(third)
    holder.sample(KEY, 1, timeout=LIMIT)
    third.result(timeout=LIMIT)
    metrics = {name: float(value) for name, value in holder.limiter.metrics().items()}
    assert metrics == {"inserts": 3, "samples": 2, "error": 2.5}
    # Rows that are masked out are not inserted.
    holder.add(integers(3, 4, 5), mask=np.array([False, False, False]), timeout=0)
    assert float(holder.limiter.metrics()["inserts"]) == 3
    # What does not come about does not count.
    with pytest.raises(TimeoutError):
        holder.add(integers(6), timeout=0)
    assert float(holder.limiter.metrics()["inserts"]) == 3
    assert holder.read(lambda buffer: int(buffer.size)) == 3


def test_a_queue_and_rings_with_a_limiter():
    holder = Holder(jaxbuf.Queue.create(jnp.int32(0), 4), limiter=jaxbuf.RateLimiter.create(1.0))
    holder.add(integers(1, 2, 3), timeout=0)
    assert holder.take(2, timeout=0).data.tolist() == [1, 2]
    metrics = holder.limiter.metrics()
    assert (int(metrics["inserts"]), int(metrics["samples"])) == (3, 2)
    # The items of rings are steps.
    holder = Holder(rings(), limiter=jaxbuf.RateLimiter.create(1.0, 6))
    holder.add(jnp.zeros((2, 2), jnp.int32), timeout=0)
    with pytest.raises(TimeoutError):
        holder.sample(KEY, 1, timeout=0)
    holder.add(jnp.zeros((1, 2), jnp.int32), env_ids=[1], timeout=0)
    assert holder.sample(KEY, 3, timeout=0).valid.all()
    assert int(holder.limiter.metrics()["inserts"]) == 6


def test_time_makes_room_for_a_throughput_limiter():
    limiter = jaxbuf.ThroughputLimiter.create(samples_per_insert=(0.5, math.inf), window=0.05)
    holder = Holder(item_buffer(8), limiter=limiter.inserted(10).sampled(2))
    # Nobody samples: the counts decay until the samples are forgotten.
    holder.add(integers(1), timeout=LIMIT)
    assert holder.read(lambda buffer: int(buffer.size)) == 1
    assert float(holder.limiter.metrics()["samples"]) < 1e-4


def test_options_of_sample_and_new_priorities():
    prioritized = rings(6, sampler=jaxbuf.Prioritized())
    holder = Holder(prioritized)
    holder.add(jnp.arange(6, dtype=jnp.int32).reshape(2, 3))
    batch = holder.sample(KEY, 2, sequence_length=3, timeout=0)
    assert batch.data.tolist() in ([[0, 1, 2], [3, 4, 5]], [[3, 4, 5], [0, 1, 2]])
    # There are four windows of two steps, and two of three.
    assert holder.sample(KEY, 4, timeout=0).valid.all()
    with pytest.raises(TimeoutError):
        holder.sample(KEY, 4, sequence_length=3, timeout=0)
    with pytest.raises(ValueError, match="but the room is for 8 windows"):
        holder.sample(KEY, 9, sequence_length=3)
    with pytest.raises(ValueError, match="length was given, but a TrajectoryBuffer has no use"):
        holder.sample(KEY, 4, length=3)
    slots = holder.sample(KEY, 8, least=1).slots
    holder.update_priority(slots, jnp.zeros(8), mask=jnp.arange(8) > 0)
    holder.update_priority(slots, np.full(8, 7.0, np.float32))
    assert holder.read(lambda buffer: round(float(buffer.metrics()["priority_max"]), 3)) == 7
    holder.stop()
    with pytest.raises(Stopped):
        holder.update_priority(slots, jnp.zeros(8))


def test_a_learner_that_raises_ends_the_actors(threads):
    def fails():
        with Holder(queue_of(1)) as holder:
            actors.extend(threads.submit(fill, holder) for _ in range(2))
            readers.append(threads.submit(holder.read, lambda _: 0, when=lambda _: False))
            holder.take(1, timeout=LIMIT)
            raise RuntimeError("no more memory")

    def fill(holder):
        while True:
            holder.add(integers(1))

    def queue_of(capacity):
        return jaxbuf.Queue.create(jnp.int32(0), capacity)

    actors, readers = [], []
    with pytest.raises(RuntimeError, match="no more memory"):
        fails()
    for waiting in (*actors, *readers):
        with pytest.raises(Stopped, match="stopped by RuntimeError: no more memory") as caught:
            waiting.result(timeout=LIMIT)
        assert isinstance(caught.value.__cause__, RuntimeError)


def test_a_holder_ends_with_its_block_and_wakes_everybody(threads):
    with queue(1) as holder:
        waiters = [threads.submit(holder.take, 1) for _ in range(3)]
        assert all(still_waits(waiter) for waiter in waiters)
        assert not holder.stopped
    assert holder.stopped
    holder.stop(RuntimeError("too late"))
    calls = (lambda: holder.add(integers(1)), lambda: holder.take(1))
    for call in (*(waiter.result for waiter in waiters), *calls):
        with pytest.raises(Stopped, match=r"the holder was stopped$"):
            call()
    assert holder.read(lambda queue: int(queue.size)) == 0


def test_an_error_leaves_the_state_as_it_was():
    holder = items(4)
    holder.add(integers(1))

    def fails(buffer):
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        holder.apply(fails)
    with pytest.raises(ValueError, match=re.escape("items has dtype float32")):
        holder.add(jnp.zeros(1))
    holder.add(integers(2))
    assert holder.read(lambda buffer: int(buffer.size)) == 2


SLOT = jaxbuf.Slots(np.zeros(1, np.int32), np.zeros(1, np.uint32))
CALLS = {
    "add": lambda holder: holder.add(integers(9)),
    "sample": lambda holder: holder.sample(KEY, 1),
    "update_priority": lambda holder: holder.update_priority(SLOT, np.ones(1, "f4")),
    "take": lambda holder: holder.take(1),
    "apply": lambda holder: holder.apply(lambda state: (state, None)),
    "read": lambda holder: holder.read(lambda state: int(state.size)),
    "read when": lambda holder: holder.read(lambda state: int(state.size), when=lambda _: True),
}


@pytest.mark.parametrize(
    ("outer", "inner"),
    [
        (outer, inner)
        for outer in ("apply", "read", "when")
        for inner in CALLS
        if (outer, inner) != ("read", "read")
    ],
)
def test_no_call_comes_within_another_one(outer, inner):
    holder = queue(4) if inner == "take" else items(4)
    holder.add(integers(1, 2))

    def within(state):
        CALLS[inner](holder)
        return state, True

    call = {
        "apply": lambda: holder.apply(within),
        "read": lambda: holder.read(within),
        "when": lambda: holder.apply(lambda state: (state, None), when=within),
    }[outer]
    name = inner.removesuffix(" when")
    message = f"holder.{name} was called within holder.{outer.replace('when', 'apply')}, which"
    with pytest.raises(ValueError, match=re.escape(message)):
        call()
    # In a thread of its own, which could not if the lock were not given back.
    with concurrent.futures.ThreadPoolExecutor() as thread:
        thread.submit(holder.add, integers(3)).result(timeout=LIMIT)
    assert holder.read(lambda state: np.asarray(state.data).tolist()) == [1, 2, 3, 0]


def test_what_does_not_use_the_state_may_come_within_a_call():
    holder = limited(1.0)
    holder.add(integers(1))

    def function(state):
        inserts = float(holder.metrics()["inserts"])
        holder.stop()
        return state, inserts

    assert holder.apply(function) == 1
    assert holder.read(lambda outer: holder.read(lambda inner: inner is outer))
    assert holder.stopped


@pytest.mark.parametrize("copies", [pickle.dumps, copy.copy, copy.deepcopy])
def test_a_holder_is_neither_pickled_nor_copied(copies):
    with pytest.raises(TypeError, match="a Holder can be neither pickled nor copied: its state"):
        copies(items(2))


def test_time_alone_meets_a_condition():
    limiter = jaxbuf.ThroughputLimiter.create(samples_per_insert=(0.5, math.inf), window=0.05)
    holder = Holder(limiter.inserted(10).sampled(2), recheck=0.02)
    start = time.monotonic()

    def insert(limiter):
        return limiter.inserted(), None

    # Once the counts have decayed, and nobody changes them meanwhile.
    holder.apply(
        insert,
        when=lambda limiter: limiter.after(time.monotonic() - start).can_insert(1),
        timeout=LIMIT,
    )
    assert time.monotonic() - start < LIMIT / 2
    assert holder.read(lambda limiter: float(limiter.counts[0])) == 11


def rings(length=4, sequence_length=2, **options):
    options = {"sequence_length": sequence_length, **options}
    return jaxbuf.TrajectoryBuffer.create(jnp.int32(0), 2, length, **options)


def test_only_recent_items_may_be_too_few():
    recent = item_buffer(4, sampler=jaxbuf.Recent(ratio=0.5, steps=2))
    assert Holder(recent.add(integers(1, 2, 3))).sample(KEY, 3, timeout=0).valid.all()


def mixture(*shares):
    first = jaxbuf.ItemBuffer.create(jnp.zeros(2, jnp.int32), 8)
    return Holder(jaxbuf.Mixture.create([first, rings()], shares))


def test_a_mixture_is_added_to_by_part_and_sampled_from(threads):
    holder = mixture(1, 1)
    waiter = threads.submit(holder.sample, KEY, 4, timeout=LIMIT)
    holder.add(jnp.ones((3, 2), jnp.int32), part=0)
    assert still_waits(waiter)
    holder.add(jnp.zeros((2, 2), jnp.int32), part=1)
    assert waiter.result(timeout=LIMIT).data.tolist() == [[1, 1], [1, 1], [0, 0], [0, 0]]
    with pytest.raises(ValueError, match="part is None; expected the number of one of"):
        holder.add(jnp.ones((3, 2), jnp.int32))


@pytest.mark.parametrize(
    ("sequence_length", "period", "ignored"),
    [(1, 1, 3), (2, 1, 0), (2, 3, 3), (3, 2, 1), (3, 3, 0)],
)
def test_the_most_windows_that_a_buffer_can_hold(sequence_length, period, ignored):
    """Added step by step a ring comes to hold that many, and never more."""
    buffer = rings(6, sequence_length, period=period, num_earliest_ignored=ignored)

    def add(buffer, step):
        buffer = buffer.add(jnp.full((2,), step, jnp.int32))
        return buffer, buffer.metrics()["windows"]

    _, windows = jax.lax.scan(add, buffer, jnp.arange(20, dtype=jnp.int32))
    assert windows.max() == buffer.max_windows
    holder = Holder(buffer)
    with pytest.raises(TimeoutError):
        holder.sample(KEY, buffer.max_windows, timeout=0)
    with pytest.raises(ValueError, match="but the room is for"):
        holder.sample(KEY, buffer.max_windows + 1)


class Model:
    """The rules of a limiter in a holder, and a buffer of which only the number of items counts.

    An insert is held back for the sake of samples, so not while one that was asked for cannot go
    on. Beside that the rules are those of Reverb.
    """

    def __init__(self, ratio, low, high, min_size, capacity):
        self.ratio, self.low, self.high = (fractions.Fraction(str(x)) for x in (ratio, low, high))
        self.min_size, self.capacity = min_size, capacity
        self.size, self.error, self.refused = 0, fractions.Fraction(0), set()

    def can_sample(self, rows):
        enough = self.size >= max(rows, self.min_size)
        return enough and self.error - rows >= self.low

    def add(self, rows):
        few = self.size + rows <= self.min_size
        if not few and self.error + rows * self.ratio > self.high:
            self.refused = {size for size in self.refused if not self.can_sample(size)}
            if not self.refused:
                return False
        self.size = min(self.size + rows, self.capacity)
        self.error += rows * self.ratio
        return True

    def sample(self, rows):
        if not self.can_sample(rows):
            self.refused.add(rows)
            return False
        self.refused.discard(rows)
        self.error -= rows
        return True


def goes(call, *arguments, **options):
    try:
        call(*arguments, timeout=0, **options)
    except TimeoutError:
        return False
    return True


# The tolerance is the rule of ``RateLimiter.create``, less, and much less.
@pytest.mark.parametrize(
    ("ratio", "least", "share"), [(0.5, 1, 1.0), (1.0, 20, 0.4), (8.0, 1, 1.0), (8.0, 20, 0.7)]
)
def test_adds_and_samples_never_wait_for_each_other(ratio, least, share):
    inserts, samples = (1, 3, 4), (2, 8)
    tolerance = share * (max(inserts) * ratio + max(samples))
    limiter = jaxbuf.RateLimiter.create(ratio, least, tolerance)
    holder = Holder(item_buffer(24), limiter=limiter)
    model = Model(ratio, *limiter.range, least, 24)
    random = np.random.default_rng(1)
    rows = {n: np.zeros(n, np.int32) for n in inserts}
    widest, within = max(limiter.range[1], limiter.range[0] + 8 + 4 * ratio), False
    for n, m in zip(random.choice(inserts, 80), random.choice(samples, 80), strict=True):
        added = goes(holder.add, rows[n])
        sampled = goes(holder.sample, KEY, int(m))
        assert (added, sampled) == (model.add(int(n)), model.sample(int(m)))
        # Whatever the sizes and the tolerance: if a sample is refused, the next insert is not.
        assert sampled or goes(holder.add, rows[n])
        assert sampled or model.add(int(n))
        assert model.error >= min(model.low, 0)
        # Once there were enough items for all, the error returns, and stays.
        within |= model.size >= max(least, 8) and model.error <= widest
        assert not within or model.error <= widest
    assert within
    metrics = {name: float(value) for name, value in holder.limiter.metrics().items()}
    assert metrics["error"] == float(model.error)
    assert metrics["error"] == metrics["inserts"] * ratio - metrics["samples"]


USED_UP = {"freshness": jaxbuf.Freshness(max_use=1), "sampler": jaxbuf.Uniform(False)}
# Of each: a buffer, the rows that are added, the batch size, and options of a sample.
SHORT = {
    "items": (lambda: item_buffer(64), 1, 32, {}),
    "windows": (lambda: rings(32, 4), (2, 1), 16, {}),
    "longer windows": (lambda: rings(32, 2), (2, 1), 16, {"sequence_length": 6}),
    "used up": (lambda: item_buffer(64, **USED_UP), 1, 16, {}),
    "sharded": (lambda: a_sharded(lambda: item_buffer(32)), 2, 32, {}),
    "hosted": (lambda: jaxbuf.Hosted.create(lambda: item_buffer(64)), 1, 32, {}),
    "mixture": (
        lambda: jaxbuf.Mixture.create([item_buffer(64), item_buffer(64)], [1, 1]),
        1,
        16,
        {},
    ),
    "fewer than the batch": (lambda: item_buffer(64), 1, 32, {"least": 12}),
}
LIMITERS = {
    "rate": lambda n, m: jaxbuf.RateLimiter.create(8.0, tolerance=8.0 * n + m),
    "narrow": lambda n, m: jaxbuf.RateLimiter.create(1.0, tolerance=4.0 + m / 2),
    "throughput": lambda n, m: jaxbuf.ThroughputLimiter.create(samples_per_insert=(1.0, 2.0)),
}


@pytest.mark.parametrize(
    ("name", "limit"),
    quick(
        [
            *((name, "rate") for name in SHORT),
            *itertools.product(["items", "longer windows", "mixture"], ["narrow", "throughput"]),
        ],
        [
            *((name, "rate") for name in ("windows", "used up", "sharded", "mixture")),
            *(("items", limit) for limit in ("narrow", "throughput")),
            ("fewer than the batch", "rate"),
        ],
    ),
)
def test_every_buffer_goes_on_until_it_has_enough(name, limit):
    create, shape, batch_size, sampling = SHORT[name]
    rows = np.zeros(shape, np.int32)
    holder = Holder(create(), limiter=LIMITERS[limit](rows.size, batch_size))
    sampled = refused = 0
    for number in range(400):
        # One part in turn, and the other one only rarely.
        part = {"part": int(number % 7 == 0)} if name == "mixture" else {}
        added = goes(holder.add, rows, **part)
        key = jax.random.key(number)
        drawn = goes(holder.sample, key, batch_size, **sampling)
        # A limiter with a clock may refuse a little later what it allowed.
        refused = 0 if added or drawn else refused + 1
        assert refused < 2
        sampled += drawn
        if sampled == 3:
            break
    assert sampled == 3


@pytest.mark.parametrize("name", ["items", "windows"])
@pytest.mark.parametrize("limit", LIMITERS.values(), ids=LIMITERS)
def test_an_actor_that_is_held_back_goes_on_for_a_learner_that_comes(name, limit, threads):
    create, shape, batch_size, _ = SHORT[name]
    rows = np.zeros(shape, np.int32)
    holder = Holder(create(), limiter=limit(rows.size, batch_size))

    def act():
        with contextlib.suppress(Stopped):
            while True:
                holder.add(rows)

    # Without a clock, only the learner can wake the actor up.
    with holder:
        actor = threads.submit(act)
        time.sleep(MOMENT)
        for number in range(3):
            assert holder.sample(jax.random.key(number), batch_size, timeout=LIMIT).valid.all()
    actor.result(LIMIT)


@pytest.mark.parametrize("inserted", range(1, 6))
def test_a_queue_that_is_stuck_says_so_and_no_other(inserted):
    """Both sides wait if the size is above ``5 - inserted`` and below ``taken``."""
    for taken in range(1, 6):
        holder, size = queue(5), 0
        rows = np.zeros(inserted, np.int32)
        for _ in range(12):
            if size + inserted <= 5:
                assert goes(holder.add, rows)
                size += inserted
            if size >= taken:
                assert goes(holder.take, taken)
                size -= taken
            elif size + inserted > 5:
                assert not goes(holder.take, taken)
                message = f"queue holds {size} items of at most 5, so that neither an add of"
                with pytest.raises(ValueError, match=f"{message} {inserted} rows nor a take of"):
                    holder.add(rows)
                # One that is small enough helps.
                assert goes(holder.take, 1)
                size -= 1
                break
        assert holder.read(lambda queue: int(queue.size)) == size


def test_threads_that_are_stuck_all_hear_of_it(threads):
    holder = queue(10)
    holder.add(np.zeros(6, np.int32))
    adds = threads.submit(holder.add, np.zeros(6, np.int32))
    assert still_waits(adds)
    takes = threads.submit(holder.take, 8)
    message = "an add of 6 rows nor a take of 8 can go on.*make the capacity at least 14"
    for stuck in (takes, adds):
        with pytest.raises(ValueError, match=message):
            stuck.result(LIMIT)


def test_a_queue_whose_limiter_holds_takes_back_says_so():
    """Each row of a queue is sampled once, so half a sample for each insert fills it."""
    limiter = jaxbuf.RateLimiter.create(0.5, tolerance=3.0)
    holder = Holder(jaxbuf.Queue.create(jnp.int32(0), 4), limiter=limiter)
    message = "take of 1 can go on; this would wait for ever: let the limiter.* is at error -2"

    def run():
        for _ in range(20):
            goes(holder.add, integers(1))
            goes(holder.take, 1)
            goes(holder.add, integers(1))

    with pytest.raises(ValueError, match=message):
        run()


# The state, the call, and the end of its message.
LATE = [
    (
        lambda: items(8),
        lambda holder: holder.sample(KEY, 3, timeout=0),
        "batch_size asks for 3 rows at a time, but the buffer holds 2 of at most 8 rows, and 2",
    ),
    (
        lambda: Holder(rings(8, 2)),
        lambda holder: holder.sample(KEY, 3, sequence_length=1, timeout=0),
        "batch_size asks for 3 rows at a time, but the buffer holds 2 windows of 1 steps",
    ),
    (
        lambda: queue(3),
        lambda holder: holder.add(integers(1, 2), timeout=0),
        "items asks for 2 rows at a time, but the buffer holds 2 of at most 3 rows",
    ),
    (
        lambda: Holder(item_buffer(8), limiter=jaxbuf.RateLimiter.create(1, 1, 1)),
        lambda holder: holder.add(integers(1, 2), timeout=0),
        "items asks for 2 rows at a time, which the limiter does not allow now; the limiter is at "
        "error 2, inserts 2, samples 0",
    ),
    (
        lambda: items(8),
        lambda holder: holder.apply(lambda buffer: (buffer, None), when=lambda _: False, timeout=0),
        "the condition is not met",
    ),
]


@pytest.mark.parametrize(("create", "call", "message"), LATE)
def test_a_timeout_says_what_it_waited_for_and_what_was_there(create, call, message):
    holder = create()
    holder.add(integers(0, 1))  # Two rows, or a step of each of two environments.
    with pytest.raises(TimeoutError, match=re.escape(f"within 0.0 s: {message}")):
        call(holder)


@pytest.mark.parametrize("timeout", [math.inf, 1e10, threading.TIMEOUT_MAX])
def test_any_timeout_can_be_waited_for(threads, timeout):
    holder = Holder(jaxbuf.Queue.create(jnp.int32(0), 4), recheck=1e12)
    waiter = threads.submit(holder.take, 1, timeout=timeout)
    assert still_waits(waiter)
    holder.add(integers(3), timeout=timeout)
    assert waiter.result(LIMIT).data.tolist() == [3]
    with pytest.raises(TimeoutError):
        holder.take(1, timeout=-math.inf)


def test_weights_are_of_the_state_that_was_sampled(threads):
    """Of a uniform draw each is 1, for the number of items at that time alone."""
    holder = Holder(item_buffer(4096))
    holder.add(integers(0, 1, 2, 3))

    def act():
        while not holder.stopped:
            holder.add(integers(0, 1))
            time.sleep(0.001)

    actor = threads.submit(act)
    for number in range(20):
        key = jax.random.key(number)
        batch = holder.sample(key, 4, beta=1.0, normalize=None, timeout=LIMIT)
        assert batch.data.shape == (4,)
        np.testing.assert_allclose(batch.weights, 1.0, rtol=1e-5)
    holder.stop()
    with contextlib.suppress(Stopped):
        actor.result(LIMIT)


@pytest.mark.parametrize("deprecated", [False, True])
def test_weights_with_a_limiter_and_options(deprecated):
    def create():
        return rings(8, 2, sampler=jaxbuf.Prioritized())

    holder = Holder(create(), limiter=jaxbuf.RateLimiter.create(1.0, 2))
    rows, priority = jnp.arange(8, dtype=jnp.int32).reshape(2, 4), jnp.arange(1.0, 9.0)
    holder.add(rows, priority=priority.reshape(2, 4))
    weighing, options = (0.4, None), {"sequence_length": 3}
    if deprecated:
        with pytest.warns(DeprecationWarning, match="goes in version 0.5; use holder.sample"):
            batch, weights = holder.sample_with_weights(KEY, 4, *weighing, timeout=0, **options)
        assert batch.weights is None
    else:
        batch = holder.sample(KEY, 4, beta=0.4, normalize=None, timeout=0, **options)
        weights = batch.weights
    buffer = jaxbuf.add(create(), rows, priority=priority.reshape(2, 4))
    expected = jaxbuf.sample(buffer, KEY, 4, **options)
    np.testing.assert_array_equal(batch.data, expected.data)
    expected = jaxbuf.importance_weights(buffer, expected, *weighing)
    np.testing.assert_allclose(weights, expected, rtol=1e-6)
    assert int(holder.limiter.metrics()["samples"]) == 4


LIMITER = jaxbuf.RateLimiter.create(1.0)


def limited(*arguments):
    limiter = jaxbuf.RateLimiter.create(*arguments)
    return Holder(item_buffer(512), limiter=limiter)


BAD = [
    (
        lambda: Holder(items(2), limiter=3),
        "limiter is 3; expected None, a jaxbuf.RateLimiter, a jaxbuf.ThroughputLimiter or",
    ),
    (lambda: Holder((1, 2), limiter=LIMITER), "state is a tuple; expected a buffer"),
    (
        lambda: limited(1.0, 10, 5.0).sample(KEY, 11),
        "batch_size asks for 11 rows at a time, but limiter never allows more than 10; this would",
    ),
    (
        lambda: limited(2.0, 1, 5.0).add(jnp.arange(6, dtype=jnp.int32)),
        "items asks for 6 rows at a time, but limiter never allows more than 5; this would wait",
    ),
    (lambda: queue(2).add(integers(1, 2, 3)), "items asks for 3 rows at a time, but the capacity"),
    (lambda: queue(2).take(3), "batch_size asks for 3 rows at a time, but the capacity is 2"),
    (lambda: items(2).sample(KEY, 3), "batch_size asks for 3 rows at a time, but the"),
    (lambda: items(2).sample(KEY, 2, least=3), "least asks for 3 rows at a time"),
    (
        lambda: Holder(rings()).sample(KEY, 7),
        "batch_size asks for 7 rows at a time, but the room is for 6 windows; this would wait for",
    ),
    (
        lambda: mixture(1, 1).sample(KEY, 14),
        "batch_size asks for 14 rows at a time, of which parts[1] gives 7, but the room is for 6",
    ),
    (
        lambda: mixture(9, 1).sample(KEY, 10),
        "batch_size asks for 10 rows at a time, of which parts[0] gives 9, but the capacity is 8",
    ),
    (lambda: queue(2).sample(KEY, 1), "buffer is a Queue, which has no method sample"),
    (lambda: items(2).take(1), "buffer is an ItemBuffer, which has no method take; it has"),
    (lambda: items(2).sample(KEY, 1, normalize="mean"), "normalize was given without beta"),
    (lambda: Holder(a_sharded(rings)).sample(KEY, 14), "but the room is for 12 windows"),
    (lambda: Holder(jaxbuf.Hosted.create(rings)).sample(KEY, 7), "but the room is for 6 windows"),
    *(
        (
            lambda limiter=limiter: Holder(item_buffer(8), limiter=limiter).sample(KEY, 4),
            "asks for 4 rows at a time, but limiter never allows that in a buffer for 8",
        )
        for limiter in (
            jaxbuf.RateLimiter.create(1.0, 10),
            jaxbuf.ThroughputLimiter.create(min_batches=3.0),
            jaxbuf.ThroughputLimiter.create(samples_per_insert=(0.0, 0.0)),
        )
    ),
]


@pytest.mark.parametrize(("call", "message"), BAD)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        call()


def test_a_mixture_of_rings_on_the_host_is_asked_for_windows_of_another_length():
    def make():
        rings = [jaxbuf.TrajectoryBuffer.create(jnp.int32(0), 1, 8) for _ in range(2)]
        return jaxbuf.Mixture.create([ring.add(jnp.arange(6)[None]) for ring in rings], [1, 1])

    holder = jaxbuf.Holder(jaxbuf.Hosted.create(make))
    batch = holder.sample(KEY, 4, sequence_length=3, timeout=5)
    assert batch.data.shape == (4, 3)
    assert batch.valid.all()


def test_a_change_that_takes_longer_than_a_pause_wakes_the_main_thread():
    """It looks for signals ten times a second, and is not asleep when such a change ends."""
    holder = jaxbuf.Holder(0)

    def change(state):
        time.sleep(0.3)
        return state + 1, None

    def act():
        time.sleep(0.15)
        holder.apply(change)

    actor = threading.Thread(target=act)
    actor.start()
    began = time.monotonic()
    holder.read(lambda _: None, when=lambda state: state == 1, timeout=10.0)
    assert time.monotonic() - began < 5
    actor.join()

"""Signals that come while a state is consumed: at every step of a call, nothing is lost."""

import concurrent.futures
import signal
import threading
from collections import deque

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbuf
from jaxbuf.core import advice, signals
from jaxbuf.core.signals import DeferredSignals
from jaxbuf.wrappers import holder as holders
from tests.interrupts import interrupt_everywhere

LIMIT = 60.0
KEY = jax.random.key(0)
ROWS = np.ones(2, np.float32)


@pytest.fixture(autouse=True)
def _handlers(monkeypatch):
    """Ctrl-C raises, also where a shell that runs the tests in the background has it ignored."""
    assert threading.current_thread() is threading.main_thread()
    # The first calls take more steps, since they look for negative priorities.
    monkeypatch.setattr(advice, "_looks_left", 0)
    before = {number: signal.getsignal(number) for number in signals._NUMBERS}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def items():
    return jaxbuf.ItemBuffer.create(jnp.float32(0), 8, sampler=jaxbuf.Prioritized())


def held(state, limiter=None):
    holder = jaxbuf.Holder(state, limiter=limiter)
    holder.add(ROWS)
    return holder


def change(buffer):
    slots = jaxbuf.sample(buffer, KEY, 2).slots
    return jaxbuf.update_priority(buffer, slots, ROWS), None


def limited():
    return held(items(), jaxbuf.RateLimiter.create(1.0))


def full_queue():
    queue = jaxbuf.Queue.create(jnp.float32(0), 4000)
    return held(jaxbuf.add(queue, np.ones(3990, np.float32)))


CALLS = {
    "add": (lambda: held(items()), lambda holder: holder.add(ROWS)),
    "add with a limiter": (limited, lambda holder: holder.add(ROWS)),
    "sample": (limited, lambda holder: holder.sample(KEY, 2)),
    "apply": (lambda: held(items()), lambda holder: holder.apply(change)),
    "take": (full_queue, lambda holder: holder.take(1)),
    "hosted": (lambda: held(jaxbuf.Hosted.create(items)), lambda holder: holder.add(ROWS)),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_holder_keeps_its_state_wherever_a_call_is_interrupted(name):
    create, call = CALLS[name]
    holder = create()

    def read():
        sizes.append(holder.read(lambda buffer: int(buffer.size)))

    def check():
        # Another thread can have its turn, and finds a state that can be read.
        thread = threading.Thread(target=read, daemon=True)
        thread.start()
        thread.join(LIMIT)
        assert sizes
        assert sizes.pop() >= 1

    sizes = []
    finely = (signals.__file__, holders.__file__) if name == "add" else ()
    assert interrupt_everywhere(lambda: call(holder), check, finely) > 100


def interrupt_soon(delay=0.05):
    """Sends Ctrl-C while the main thread waits."""
    main = threading.main_thread().ident
    timer = threading.Timer(delay, lambda: signal.pthread_kill(main, signal.SIGINT))
    timer.start()
    return timer


def test_waiting_and_reading_can_be_interrupted():
    holder = held(items(), jaxbuf.RateLimiter.create(1.0, 4))
    started = threading.Event()
    for call in (
        lambda: holder.sample(KEY, 4),
        lambda: holder.read(lambda _: started.wait(LIMIT)),
        lambda: holder.read(lambda _: 0, when=lambda _: False),
    ):
        timer = interrupt_soon()
        with pytest.raises(KeyboardInterrupt):
            call()
        timer.join()
    # A turn that another thread has for long.
    thread = threading.Thread(target=holder.read, args=(lambda _: started.wait(LIMIT),))
    thread.start()
    timer = interrupt_soon()
    with pytest.raises(KeyboardInterrupt):
        deque(iter(lambda: holder.add(ROWS), 0))
    started.set()
    thread.join()
    timer.join()
    assert holder.read(lambda buffer: int(buffer.size)) >= 2
    # Actors stop, also if the learner is interrupted once more meanwhile.
    with pytest.raises(KeyboardInterrupt), holder:
        raise KeyboardInterrupt
    assert holder.stopped


def test_a_loop_that_a_signal_ends_has_a_buffer_to_save():
    """The program of the guide on resuming, interrupted in the middle of a step."""
    random = np.random.default_rng(0)
    buffer = items()
    for delay in random.uniform(0.0, 0.02, 25):
        stop = []
        signal.signal(signal.SIGINT, lambda *_, stop=stop: stop.append(True))
        timer = interrupt_soon(delay)
        while not stop:
            buffer = jaxbuf.add(buffer, ROWS)
            buffer = jaxbuf.update_priority(buffer, jaxbuf.sample(buffer, KEY, 2).slots, ROWS)
        timer.join()
        assert int(buffer.size) > 0


def test_signals_are_handled_after_the_block_once_each_and_in_order():
    heard = []
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda number, _: heard.append(number))
    before = [signal.getsignal(number) for number in signals._NUMBERS]

    def block():
        with DeferredSignals(), DeferredSignals():
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
                signal.raise_signal(number)
            assert heard == []

    with pytest.raises(KeyboardInterrupt):
        block()
    # An error of one handler does not lose the signals after it.
    assert heard == [signal.SIGTERM, signal.SIGUSR1]
    assert [signal.getsignal(number) for number in signals._NUMBERS] == before


def test_a_handler_finds_a_state_that_it_can_save_and_may_set_another_handler():
    holder, sizes = held(items()), []

    def save(*_):
        sizes.append(holder.read(lambda buffer: int(buffer.size)))
        signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def add(buffer):
        buffer = jaxbuf.add(buffer, ROWS)
        signal.raise_signal(signal.SIGTERM)
        return buffer, None

    signal.signal(signal.SIGTERM, save)
    holder.apply(add)
    assert sizes == [4]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN


def test_an_error_of_the_block_is_the_context_of_the_interrupt():
    def block():
        with DeferredSignals():
            signal.raise_signal(signal.SIGINT)
            raise ValueError("no")

    with pytest.raises(KeyboardInterrupt) as caught:
        block()
    assert isinstance(caught.value.__context__, ValueError)


def test_other_threads_and_other_interpreters_hear_of_no_signals(monkeypatch):
    def block():
        with DeferredSignals() as deferred:
            return signal.getsignal(signal.SIGINT), deferred.pause

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        found = pool.submit(block).result(LIMIT)
    assert found == (signal.default_int_handler, threading.TIMEOUT_MAX)

    def refuse(*_):
        raise ValueError("signal only works in main thread of the main interpreter")

    monkeypatch.setattr(signals, "_set_handler", refuse)
    assert block()[0] is signal.default_int_handler


def test_a_handler_may_use_the_holder_while_a_call_of_it_waits():
    holder, sizes = jaxbuf.Holder(items()), []

    def handle(number, frame):
        sizes.append(holder.read(lambda buffer: int(buffer.size)))
        holder.add(ROWS)

    before = signal.signal(signal.SIGUSR1, handle)
    timer = threading.Timer(0.2, signal.raise_signal, [signal.SIGUSR1])
    timer.start()
    try:
        holder.sample(KEY, 1, timeout=LIMIT)
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, before)
    assert sizes == [0]

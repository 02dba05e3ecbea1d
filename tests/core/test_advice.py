"""Warnings of calls from Python: methods that copy much, and negative priorities."""

import collections
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbuf
from jaxbuf.core import advice

LARGE, SMALL = 2**18 + 1, 2**10
ROWS = jnp.zeros(2)


@pytest.fixture(autouse=True)
def anew(monkeypatch):
    monkeypatch.setattr(advice, "_copies", collections.Counter())
    monkeypatch.setattr(advice, "_looks_left", 10)


def create(capacity=LARGE, **options):
    return jaxbuf.ItemBuffer.create(jnp.float32(0), capacity, **options)


def warned(call, times):
    """The warnings of the calls, and the number of the call that warned."""
    found = []
    for i in range(1, times + 1):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call()
        found += [(i, str(warning.message)) for warning in caught]
        assert all(w.category is UserWarning and w.filename == __file__ for w in caught)
    return found


def mixture():
    return jaxbuf.Mixture.create([create(2**18), create(2**18)], [1, 1])


def sharded():
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    return jaxbuf.Sharded.create(lambda: create(2**18), mesh, "d", shards=2)


COPIES = {
    "ItemBuffer.add": (create, lambda buffer: buffer.add(ROWS)),
    "ItemBuffer.insert": (create, lambda buffer: buffer.insert(ROWS)),
    "TrajectoryBuffer.add": (
        lambda: jaxbuf.TrajectoryBuffer.create(jnp.float32(0), 2, LARGE),
        lambda buffer: buffer.add(ROWS),
    ),
    "Queue.add": (
        lambda: jaxbuf.Queue.create(jnp.float32(0), LARGE),
        lambda buffer: buffer.add(ROWS),
    ),
    "Mixture.add": (mixture, lambda buffer: buffer.add(ROWS, part=0)),
    "Sharded.clear": (sharded, lambda buffer: buffer.clear()),
}


@pytest.mark.parametrize("name", COPIES)
def test_the_hundredth_call_that_copies_much_warns_once(name):
    make, change = COPIES[name]
    buffer = make()
    [(i, message)] = warned(lambda: change(buffer), 102)
    assert i == 100
    assert message.startswith(f"{name} was called 100 times from Python")
    assert f"jaxbuf.{name.partition('.')[2]}(buffer, ...) works in place" in message
    assert set(advice._copies) == {(type(buffer), name.partition(".")[2])}


def test_each_method_of_each_class_is_counted_by_itself_and_other_calls_are_not():
    class Mine(jaxbuf.ItemBuffer):
        pass

    large, small = create(), create(SMALL)
    mine = Mine.create(jnp.float32(0), LARGE)
    prioritized = create(LARGE, sampler=jaxbuf.Prioritized())
    slots = prioritized.add(ROWS).latest(2).slots
    hosted = jaxbuf.Hosted.create(create)
    in_a_step = jax.jit(lambda buffer: buffer.add(ROWS))
    advice._copies.clear()

    def others():
        jaxbuf.add(large, ROWS, donate=False)
        in_a_step(large)
        small.add(ROWS)
        large.sample(jax.random.key(0), 2)
        large.next_batch(jax.random.key(0), 2)
        large.set_field(None, jaxbuf.Slots(jnp.array([0]), jnp.array([9], jnp.uint32)), ROWS[:1])
        mine.add(ROWS)

    assert warned(others, 99) == []
    hosted = hosted.add(ROWS)
    assert advice._copies == {(jaxbuf.ItemBuffer, "set_field"): 99, (Mine, "add"): 99}
    assert warned(lambda: large.add(ROWS), 99) == []
    assert len(warned(lambda: large.add(ROWS), 1)) == 1
    assert len(warned(others, 1)) == 2
    # Only the priorities are copied, and there is no second copy of the items.
    prioritized.update_priority(slots, ROWS)
    assert advice._copies[jaxbuf.ItemBuffer, "update_priority"] == 1
    create(2**16, sampler=jaxbuf.Prioritized()).update_priority(slots, ROWS)
    assert advice._copies[jaxbuf.ItemBuffer, "update_priority"] == 1


def setter(capacity=SMALL):
    buffer = create(capacity, sampler=jaxbuf.Prioritized()).add(ROWS)
    slots = buffer.latest(2).slots
    return lambda priority, **options: jaxbuf.update_priority(
        buffer, slots, priority, donate=False, **options
    )


@pytest.mark.parametrize("kind", [jnp.asarray, np.asarray])
def test_the_first_signed_priorities_warn_once(kind):
    update = setter()
    signed = kind([0.5, -0.5])
    mask = np.array([True, False])
    assert warned(lambda: update(signed, mask=mask), 1) == []
    [(_, message)] = warned(lambda: update(signed), 3)
    assert "jnp.abs(td_error)" in message


def test_later_calls_large_ones_and_those_inside_a_program_are_not_looked_at():
    update, signed = setter(), -jnp.ones(2)
    assert warned(lambda: jax.jit(update)(signed), 3) == []
    many = create(2**17, sampler=jaxbuf.Prioritized()).add(jnp.zeros(2**16 + 1))
    slots = many.latest(2**16 + 1).slots
    negative = -jnp.ones(2**16 + 1)
    call = lambda: jaxbuf.update_priority(many, slots, negative, donate=False)  # noqa: E731
    assert warned(call, 2) == []
    assert warned(lambda: update(-signed), 9) == []
    assert len(warned(lambda: update(signed), 1)) == 1
    advice._looks_left = 1
    assert warned(lambda: update(-signed), 1) == []
    assert warned(lambda: update(signed), 3) == []

"""`steps_around` where histories do not lead; `tests/contract/test_machines.py` has its model."""

import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbuf

KEY = jax.random.key(0)
STEP = {"t": jnp.float32(0), "terminated": jnp.bool_(False)}


def rings(length=8, **options):
    return jaxbuf.TrajectoryBuffer.create(STEP, 1, length, **options)


def steps(*t, ends=()):
    t = np.array([t])
    return {"t": t.astype(np.float32), "terminated": np.isin(t, ends)}


def filled(**options):
    """Episodes of the steps 2 to 4, of which 2 is overwritten, 5 to 8 and 9 to 10."""
    options = {"episodes": jaxbuf.Episodes()} | options
    return rings(**options).add(steps(*range(11), ends=(1, 4, 8)))


def around(buffer, t, offsets, path="t"):
    found = buffer.steps_around(buffer.slots_at(jnp.zeros(len(t), jnp.int32), t), offsets, path)
    return found.data.tolist(), found.inside.tolist()


def test_what_is_not_there_is_the_nearest_step_of_the_episode():
    data, inside = around(filled(), jnp.array([3, 6, 10]), (-3, 2, 0, 0, -1))
    assert data == [[3, 4, 3, 3, 3], [5, 8, 6, 6, 5], [9, 10, 10, 10, 9]]
    assert inside == [
        [False, False, True, True, False],
        [False, True, True, True, True],
        [False, False, True, True, True],
    ]
    # Without episodes there are the ends of the ring alone.
    assert around(filled(episodes=None), jnp.array([4]), range(-3, 8)) == (
        [[3, 3, 3, 4, 5, 6, 7, 8, 9, 10, 10]],
        [[False, False, *[True] * 8, False]],
    )


@pytest.mark.parametrize("past", [2**31, 2**32])
@pytest.mark.parametrize("episodes", [None, jaxbuf.Episodes()])
def test_positions_wrap(past, episodes):
    buffer = rings(8, sequence_length=2, episodes=episodes)
    lap = jnp.array([past // 8], jnp.uint32)
    buffer = buffer.replace(occupancy=buffer.occupancy.replace(lap=lap))
    buffer = buffer.add(steps(*range(11), ends=(1,)))
    position = np.uint32(past - 8 + 8 & 0xFFFFFFFF)
    slots = buffer.slots_at(jnp.array([0]), jnp.array([position], jnp.uint32))
    found = buffer.steps_around(slots, [-9, -5, -1, 0, 1, 2, 3, 2**30 - 1], "t")
    assert buffer.end_position.tolist() == [(past + 3) % 2**32]
    assert found.data.tolist() == [[3, 3, 7, 8, 9, 10, 10, 10]]
    assert found.inside.tolist() == [[False, True, True, True, True, True, False, False]]


def test_offsets_are_static_or_arrays_of_any_integers():
    buffer, t = filled(), jnp.array([6])
    expected = around(buffer, t, range(2))
    for offsets in ([0, 1], np.arange(2, dtype=np.uint8), jnp.arange(2)):
        assert around(buffer, t, offsets) == expected
    slots = buffer.slots_at(jnp.array([0, 0]), jnp.array([6, 9]))
    read = jax.jit(lambda offsets: buffer.steps_around(slots, offsets).inside)
    for dtype, far in (("int8", 127), ("uint8", 255), ("uint32", 2**32 - 1), ("int32", -(2**31))):
        assert read(jnp.array([0, 1, far], dtype)).tolist() == [[True, True, False]] * 2
    chex.assert_shape(buffer.steps_around(slots, []).data["t"], (2, 0))
    every = jax.vmap(lambda k: buffer.steps_around(slots, k[None], "t").data[:, 0])(jnp.arange(3))
    assert every.tolist() == [[6, 9], [7, 10], [8, 10]]


@pytest.mark.parametrize(
    ("offsets", "path", "message"),
    [
        (0, None, "offsets has shape (); expected (K,), such as range(-3, 1)"),
        ([[0]], None, "offsets has shape (1, 1); expected (K,)"),
        ([0.0], None, "offsets has dtype float64; expected integers"),
        ([True], None, "offsets has dtype bool; expected integers"),
        ([0, 2**30], None, "offsets has 1073741824; expected integers below 2**30 either way"),
        (np.array([-(2**40)]), None, "offsets has -1099511627776; expected integers below 2**30"),
        ([0], "u", "path is 'u', but steps have no such field; there are t, terminated"),
    ],
)
def test_bad_input(offsets, path, message):
    buffer = filled()
    slots = buffer.slots_at(jnp.array([0]), jnp.array([6]))
    for call in (lambda f: f(), lambda f: jax.jit(f)()):
        with pytest.raises(ValueError, match=re.escape(message)):
            call(lambda: buffer.steps_around(slots, offsets, path))


def test_stale_rows_have_zeros_and_shorter_windows_are_there():
    buffer = filled(sequence_length=4, episodes=None, parts=(jaxbuf.Removable(),))
    slots = buffer.slots_at(jnp.array([0, 0]), jnp.array([4, 5]))
    removed = buffer.remove(slots, mask=jnp.array([True, False]))
    found = removed.steps_around(slots, range(2), "t")
    assert found.data.tolist() == [[0, 0], [5, 6]]
    assert found.inside.tolist() == [[False] * 2, [True] * 2]
    assert not buffer.clear().steps_around(slots, range(2)).inside.any()
    # The newest steps begin no window of four, but one that was asked for.
    buffer = filled(sequence_length=4)
    batch = buffer.sample(KEY, 32, sequence_length=1)
    found = buffer.steps_around(batch.slots, (0,), "t")
    assert found.inside.all()
    np.testing.assert_array_equal(found.data, batch.data["t"])
    assert found.data.max() == 10


def test_all_kinds_of_leaves_and_gradients():
    step = {"key": KEY, "x": jnp.float32(0), "n": jnp.int8(0)}
    buffer = jaxbuf.TrajectoryBuffer.create(step, 1, 4, sequence_length=2)
    keys = jax.random.split(KEY, 3)
    rows = {"key": keys[None], "x": jnp.full((1, 3), jnp.nan), "n": jnp.ones((1, 3), jnp.int8)}
    buffer = buffer.add(rows)
    stale = jaxbuf.Slots(jnp.array([4]), jnp.array([1], jnp.uint32))
    found = buffer.steps_around(stale, range(2))
    assert found.data["x"].tolist() == found.data["n"].tolist() == [[0, 0]]
    read = buffer.steps_around(buffer.slots_at(jnp.array([0]), jnp.array([1])), (1, -1), "key").data
    assert (read[0] == keys[jnp.array([2, 0])]).all()

    def total(x):
        held = buffer.replace(data={**buffer.data, "x": x})
        slots = held.slots_at(jnp.array([0]), jnp.array([1]))
        return jnp.sum(held.steps_around(slots, (0, 1, 5), "x").data)

    assert jax.grad(total)(jnp.zeros(4)).tolist() == [0, 1, 2, 0]


def test_of_a_mixture_rows_of_items_have_zeros():
    item = {"t": jnp.zeros(1), "terminated": jnp.zeros(1, bool)}
    rows = {"t": jnp.full((3, 1), jnp.nan), "terminated": jnp.zeros((3, 1), bool)}
    items = jaxbuf.ItemBuffer.create(item, 4).add(rows)
    mixture = jaxbuf.Mixture.create([items, filled()], [1, 1])
    batch = mixture.sample(KEY, 24)
    found = mixture.steps_around(batch.slots, range(-1, 2), "t")
    assert not found.inside[:12].any()
    assert not found.data[:12].any()
    np.testing.assert_array_equal(found.data[12:, 1], batch.data["t"][12:, 0])
    with pytest.raises(ValueError, match="steps_around was called, but no part has environments"):
        jaxbuf.Mixture.create([items], [1]).steps_around(batch.slots, (0,))

"""Reading steps, taking them out, and leaving the earliest ones alone."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbuf

STEP = {"obs": {"t": jax.ShapeDtypeStruct((), jnp.int32), "pair": (jnp.zeros(2), jnp.zeros(()))}}


def create(num_envs, length, sequence_length=1, sampler=jaxbuf.Uniform(), **options):
    return jaxbuf.TrajectoryBuffer.create(
        STEP, num_envs, length, sequence_length=sequence_length, sampler=sampler, **options
    )


def steps(t):
    t = jnp.asarray(t, jnp.int32)
    real = t.astype(jnp.float32)
    return {"obs": {"t": t, "pair": (jnp.stack([real, -real], axis=-1), real)}}


def every_env(num_envs, *t):
    """The same steps for all environments."""
    return steps(np.tile(np.array(t), (num_envs, 1)))


def rows(read):
    """The valid steps of each ring, as a list of lists."""
    t, valid = np.asarray(read.data["obs"]["t"]), np.asarray(read.valid)
    return [row[legal].tolist() for row, legal in zip(t, valid, strict=True)]


def test_gather_all_leaves_the_earliest_out():
    """ALF's example: the position of a step never changes."""
    buffer = create(4, 9, num_earliest_ignored=2)
    for first, last, kept in ((1, 8, 3), (9, 14, 8)):
        buffer = jaxbuf.add(buffer, every_env(4, *range(first, last + 1)))
        read = buffer.gather_all()
        assert rows(read) == [[*range(kept, last + 1)]] * 4
        assert read.position[:, 0].tolist() == [kept - 1] * 4
    assert rows(buffer.gather_all(ignore_earliest=False)) == [[*range(6, 15)]] * 4


def test_clear_of_some_environments_leaves_out_numbers_below_zero():
    buffer = jaxbuf.add(create(3, 4), steps(np.arange(9).reshape(3, 3)))
    cleared = jax.jit(lambda buffer, envs: buffer.clear(envs))(buffer, jnp.array([2, 2, -1]))
    assert rows(cleared.gather_all()) == [[0, 1, 2], [3, 4, 5], []]


def test_fields_by_environment_and_position():
    buffer = jaxbuf.add(create(2, 4), steps(np.arange(12).reshape(2, 6)))
    env, position = jnp.array([[0], [1], [7], [-1]]), jnp.array([[1, 2, 5, 6]])
    assert buffer.get_field("obs.t", env, position).tolist() == [
        [0, 2, 5, 0],
        [0, 8, 11, 0],
        [0, 0, 0, 0],
        [0, 0, 0, 0],
    ]
    pair = buffer.get_field("obs.pair", jnp.int32(1), jnp.uint32(4))
    assert [leaf.tolist() for leaf in pair] == [[10.0, -10.0], 10.0]
    empty = create(3, 8, 2, period=2)
    env, _ = empty.locate(empty.sample(jax.random.key(0), 2).slots)
    assert env.tolist() == [3, 3]


def test_positions_past_2_to_the_32():
    buffer = create(1, 6)
    rings = buffer.occupancy.replace(
        cursor=jnp.array([3], jnp.uint32), lap=jnp.array([2**32 // 6 + 1], jnp.uint32)
    )
    buffer = buffer.replace(occupancy=rings)
    first = int(buffer.end_position[0])
    assert first > 2**32 - 6
    buffer = jaxbuf.add(buffer, every_env(1, *range(1, 7)))
    at = buffer.gather_all().position
    assert at[0].tolist() == [(first + i) % 2**32 for i in range(6)]
    assert buffer.get_field("obs.t", jnp.zeros_like(at, jnp.int32), at)[0].tolist() == [
        1, 2, 3, 4, 5, 6,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda b: b.get_field("obs.t.shape", 0, 0), "path is 'obs.t.shape'"),
        (lambda b: b.dequeue(5), "n is 5, but a ring has length 4"),
        (lambda b: b.dequeue(1, mask=jnp.ones(3, bool)), "mask has shape (3,); expected (2,)"),
        (lambda b: b.clear(jnp.ones(3, bool)), "envs has shape (3,); expected (2,)"),
        (lambda b: create(2, 4, 3, num_earliest_ignored=2), "num_earliest_ignored is 2 and"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        call(create(2, 4))

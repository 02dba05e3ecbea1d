"""Checks of names that a caller gives: slots of a draw or sample, environments by number."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbuf
from jaxbuf.strategies import Draw, Sampler

KEY = jax.random.key(0)
STEP = {"t": jnp.int32(0), "terminated": jnp.bool_(False)}


def draw(*index):
    return Draw(jnp.array(index), jnp.full(len(index), 0.5), jnp.ones(len(index), bool))


@dataclasses.dataclass(frozen=True)
class All(Sampler):
    """Draws slots -1, 0, 1, ..., whether or not they hold something."""

    def draw(self, state, key, batch_size, occupancy):
        index = jnp.arange(batch_size, dtype=jnp.int32) - 1
        return Draw(index, jnp.ones(batch_size), jnp.ones(batch_size, bool))


def items(**options):
    return jaxbuf.ItemBuffer.create(jnp.int32(0), 4, **options).add(jnp.array([5, 6]))


def rings(**options):
    buffer = jaxbuf.TrajectoryBuffer.create(STEP, 2, 6, sequence_length=3, **options)
    t = jnp.arange(4)[None] + jnp.array([[0], [10]])
    return buffer.add({"t": t, "terminated": jnp.zeros((2, 4), bool)})


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit])
def test_only_items_are_gathered(transform):
    buffer = items()
    gather = transform(lambda b: b.gather(draw(0, 3, -1, 1, 9)))
    batch = gather(buffer)
    assert batch.valid.tolist() == [True, False, False, True, False]
    assert batch.slots.index.tolist() == [0, 4, 4, 1, 4]
    assert batch.probability.tolist() == [0.5, 0.0, 0.0, 0.5, 0.0]
    assert batch.data[jnp.array([0, 3])].tolist() == [5, 6]
    retired = jaxbuf.ItemBuffer.create(jnp.int32(0), 4, freshness=jaxbuf.Freshness(max_use=1))
    retired = retired.add(jnp.array([5, 6])).mark_used(retired.add(jnp.array([5])).latest(1).slots)
    assert retired.gather(draw(0, 1)).valid.tolist() == [False, True]
    ranked = jaxbuf.ItemBuffer.create(jnp.int32(0), 4, evictor=jaxbuf.Lowest())
    ranked = ranked.add(jnp.array([5, 6]), score=jnp.ones(2))
    assert ranked.gather(draw(0, 2, -1)).valid.tolist() == [True, False, False]


def test_only_complete_windows_are_gathered():
    buffer = rings()
    batch = buffer.gather(draw(0, 1, 2, 3, -1, 6, 7, 8, 12))
    assert batch.valid.tolist() == [True, True, False, False, False, True, True, False, False]
    assert batch.data["t"][5].tolist() == [10, 11, 12]
    avoid = jaxbuf.Episodes(boundary="avoid")
    buffer = jaxbuf.TrajectoryBuffer.create(STEP, 1, 6, sequence_length=2, episodes=avoid)
    ends = jnp.array([[False, True, False]])
    buffer = buffer.add({"t": jnp.arange(3)[None], "terminated": ends})
    # A step that terminates starts a short window; the one after it has no window yet.
    assert buffer.gather(draw(0, 1, 2)).valid.tolist() == [True, True, False]


def test_samplers_of_users_give_no_rows_that_are_not_there():
    buffer = items(sampler=All())
    for batch in (buffer.sample(KEY, 5), buffer.next_batch(KEY, 5)[1]):
        assert batch.valid.tolist() == [False, True, True, False, False]
    assert rings(sampler=All()).sample(KEY, 4).valid.tolist() == [False, True, True, False]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ((jnp.zeros(2), jnp.ones(2), jnp.ones(2, bool)), "draw.index has dtype float32"),
        ((jnp.zeros(2, jnp.int32), jnp.ones(3), jnp.ones(2, bool)), "draw.probability has shape"),
        ((jnp.zeros(2, jnp.int32), jnp.ones(2), jnp.ones(2)), "draw.valid has dtype float32"),
        ((jnp.zeros((2, 1), jnp.int32), jnp.ones(2), jnp.ones(2, bool)), "draw.index has shape"),
    ],
)
def test_malformed_draws_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        items().gather(Draw(*wrong))
    with pytest.raises(ValueError, match="expected a jaxbuf"):
        items().gather(wrong)


def test_windows_that_are_gone_are_nowhere():
    buffer = rings()
    slots = buffer.latest(2).slots
    assert buffer.locate(slots)[0].tolist() == [0, 0, 1, 1]
    more = {"t": jnp.zeros((2, 3), jnp.int32), "terminated": jnp.zeros((2, 3), bool)}
    # Of environment 0 the first step of the first window is overwritten.
    after = buffer.add(more, mask=jnp.array([True, False]))
    env, position = jax.jit(lambda b, s: b.locate(s))(after, slots)
    assert env.tolist() == [2, 0, 1, 1]
    assert position[1:].tolist() == [1, 0, 1]
    assert buffer.clear().locate(slots)[0].tolist() == [2, 2, 2, 2]
    assert buffer.clear(jnp.array([1])).locate(slots)[0].tolist() == [0, 0, 2, 2]
    left, _ = buffer.dequeue(1)
    assert left.locate(slots)[0].tolist() == [2, 0, 2, 1]
    negative = slots.replace(index=slots.index - 20)
    assert buffer.locate(negative)[0].tolist() == [2, 2, 2, 2]
    mixture = jaxbuf.Mixture.create([rings(), after], [1, 1])
    shifted = slots.replace(index=slots.index + 12)
    assert mixture.locate(shifted)[0].tolist() == [4, 2, 3, 3]
    assert mixture.part_of(negative).tolist() == [2, 2, 2, 2]


def test_shorter_windows_than_the_buffers_are_located():
    buffer = rings()
    batch = buffer.sample(KEY, 64, sequence_length=1)
    env, position = buffer.locate(batch.slots)
    assert (10 * env + position.astype(jnp.int32)).tolist() == batch.data["t"][:, 0].tolist()


DOORS = {
    "add": lambda ids, rows: rings().add(rows, env_ids=ids),
    "jaxbuf.add": lambda ids, rows: jaxbuf.add(rings(), rows, env_ids=ids),
    "kept": lambda ids, rows: jaxbuf.add(rings(), rows, env_ids=ids, donate=False),
    "mixture": lambda ids, rows: jaxbuf.add(
        jaxbuf.Mixture.create([rings(), rings()], [1, 1]), rows, part=1, env_ids=ids
    ),
    "hosted": lambda ids, rows: jaxbuf.add(jaxbuf.Hosted.create(rings), rows, env_ids=ids),
    "holder": lambda ids, rows: jaxbuf.Holder(rings()).add(rows, env_ids=ids),
    "constant": lambda ids, rows: jax.jit(lambda r: jaxbuf.add(rings(), r, env_ids=ids))(rows),
}


@pytest.mark.parametrize("kind", [np.array, jnp.array, list])
@pytest.mark.parametrize("door", DOORS)
def test_environments_by_number_are_checked_before_the_program(door, kind):
    rows, add = {"t": jnp.ones(2, jnp.int32), "terminated": jnp.zeros(2, bool)}, DOORS[door]
    for ids, message in (
        ([0, 7], "env_ids has 7; expected numbers from 0 to num_envs - 1, which is 1"),
        ([1, 1], "env_ids has 1 twice; expected different numbers"),
        ([-1, 1], "env_ids has -1; expected"),
    ):
        with pytest.raises(ValueError, match=message):
            add(kind(ids), rows)
    add(kind([1, 0]), rows)

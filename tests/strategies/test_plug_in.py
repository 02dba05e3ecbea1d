"""A sampler and an evictor defined here work in a buffer that knows neither."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

import jaxbuf
from jaxbuf.strategies import (
    Draw,
    Evictor,
    ItemOccupancy,
    KnownSampler,
    Ring,
    Sampler,
    ShardableSampler,
    Support,
    Targets,
)


@dataclasses.dataclass(frozen=True)
class LeastUpdated(Sampler):
    """Draws the live items whose priority has been updated least often, lowest slot first."""

    uses_priority = True

    def init(self, capacity):
        return jnp.zeros(capacity, jnp.int32)

    def accepts(self, value):
        return value < 100

    def on_change(self, state, added, value, removed):
        return state.at[added].set(0, mode="drop")

    def set_priority(self, state, index, value):
        return state.at[index].add(1, mode="drop")

    def draw(self, state, key, batch_size, occupancy):
        live = occupancy.live(jnp.arange(len(state)))
        order = jnp.where(live, state, jnp.iinfo(jnp.int32).max)
        index = jnp.argsort(order, stable=True)[:batch_size].astype(jnp.int32)
        valid = jnp.arange(batch_size) < occupancy.size
        return Draw(index, jnp.ones(batch_size), valid)

    def metrics(self, state, occupancy):
        return {"updates": jnp.sum(state)}


@dataclasses.dataclass(frozen=True)
class Halves(Evictor):
    """A ring that uses only the first half of the slots."""

    def init(self, capacity):
        return HalfRing(ring=Ring.create(capacity // 2), capacity=capacity)


class HalfRing(ItemOccupancy, struct.PyTreeNode):
    ring: Ring
    capacity: int = struct.field(pytree_node=False)

    @property
    def size(self):
        return self.ring.size

    def place(self, rows, mask, score):
        ring, index = self.ring.place(rows, mask, score)
        index = jnp.where(index < self.ring.capacity, index, self.capacity)
        return self.replace(ring=ring), index

    def live(self, index):
        return self.ring.live(index)

    def generation(self, index):
        return self.ring.generation(index)

    def draw(self, words):
        return self.ring.draw(words)

    def clear(self):
        return self.replace(ring=self.ring.clear())


@pytest.fixture
def buffer():
    empty = jaxbuf.ItemBuffer.create(jnp.int32(0), 6, sampler=LeastUpdated())
    return jaxbuf.add(empty, jnp.arange(4, dtype=jnp.int32))


def test_a_foreign_sampler_decides_what_is_drawn(buffer):
    key = jax.random.key(0)
    batch = jaxbuf.sample(buffer, key, 2)
    assert batch.data.tolist() == [0, 1]
    buffer = jaxbuf.update_priority(buffer, batch.slots, jnp.array([1.0, 1000.0]))
    assert jaxbuf.sample(buffer, key, 4).data.tolist() == [1, 2, 3, 0]
    metrics = buffer.metrics()
    assert (int(metrics["updates"]), int(metrics["rejected"])) == (1, 1)
    assert jaxbuf.sample(buffer, key, 6).valid.tolist() == [True] * 4 + [False] * 2


def test_a_foreign_evictor_decides_what_stays():
    buffer = jaxbuf.ItemBuffer.create(
        jnp.int32(0), 6, sampler=jaxbuf.Prioritized(replacement=False), evictor=Halves()
    )
    buffer = jaxbuf.add(buffer, jnp.arange(4, dtype=jnp.int32))
    batch = jaxbuf.sample(buffer, jax.random.key(0), 6)
    assert int(buffer.size) == 3
    assert sorted(np.asarray(batch.data)[np.asarray(batch.valid)].tolist()) == [1, 2, 3]


@dataclasses.dataclass(frozen=True)
class Diary(Sampler):
    """Keeps what happened to each slot last: 1 for an item that came, 2 for one that left."""

    def init(self, capacity):
        return jnp.zeros(capacity, jnp.int32)

    def on_change(self, state, added, value, removed):
        state = state.at[added].set(1, mode="drop")
        return state.at[removed].set(2, mode="drop")

    def draw(self, state, key, batch_size, occupancy):
        return jaxbuf.Uniform().draw((), key, batch_size, occupancy)


def is_right(buffer):
    """Returns whether the diary knows each slot that holds an item."""
    slot = jnp.arange(buffer.occupancy.capacity, dtype=jnp.int32)
    return bool(((buffer.sampler_state == 1) == buffer.occupancy.live(slot)).all())


def test_a_sampler_hears_of_items_that_come_and_go():
    parts = (jaxbuf.Removable(),)
    buffer = jaxbuf.ItemBuffer.create(jnp.int32(0), 4, sampler=Diary(), parts=parts)
    buffer = buffer.add(jnp.arange(3), mask=jnp.array([True, False, True]))
    assert buffer.sampler_state.tolist() == [1, 1, 0, 0]
    assert is_right(buffer)
    buffer = buffer.remove(buffer.latest(1).slots)
    assert buffer.sampler_state.tolist() == [1, 2, 0, 0]
    assert is_right(buffer)
    # The ring comes around: items that take the places of others are only added.
    buffer = buffer.add(jnp.arange(6))
    assert buffer.sampler_state.tolist() == [1, 1, 1, 1]


def test_a_sampler_hears_of_windows_that_come_and_go():
    buffer = jaxbuf.TrajectoryBuffer.create(
        jnp.int32(0), num_envs=2, length=4, sequence_length=2, sampler=Diary()
    )
    masks = jnp.ones((2, 3), bool), jnp.array([[True, True, False], [True, False, False]])
    for mask in masks:
        buffer = buffer.add(jnp.arange(6).reshape(2, 3), mask=mask)
        assert is_right(buffer)
    # The first ring has come around, and its window across the write position is gone.
    assert (buffer.sampler_state == 1).tolist() == [False, True, True, True] + [True] * 3 + [False]
    buffer = buffer.clear(jnp.array([1]))
    assert is_right(buffer)
    assert buffer.sampler_state.tolist()[4:] == [2, 2, 2, 2]


def test_a_foreign_sampler_draws_windows():
    buffer = jaxbuf.TrajectoryBuffer.create(
        jnp.int32(0), num_envs=1, length=4, sequence_length=2, sampler=LeastUpdated()
    )
    buffer = buffer.add(jnp.arange(4)[None])
    batch = buffer.sample(jax.random.key(0), 2)
    assert batch.data.tolist() == [[0, 1], [1, 2]]
    buffer = buffer.update_priority(batch.slots, jnp.ones(2))
    assert buffer.sample(jax.random.key(0), 2).data.tolist() == [[2, 3], [0, 1]]


@dataclasses.dataclass(frozen=True)
class Deaf(LeastUpdated, KnownSampler):
    """Has priorities, and is not told of items that leave."""

    on_change = Sampler.on_change

    def probability(self, state, index, occupancy):
        return jnp.ones(index.shape)


@pytest.mark.parametrize(
    "sampler",
    [
        Deaf(),
        jaxbuf.Recent(0.5, 2, Deaf()),
        jaxbuf.Blend((jaxbuf.Uniform(), Deaf()), (1, 1)),
    ],
)
def test_a_sampler_with_priorities_must_be_told_of_items_that_leave(sampler):
    with pytest.raises(ValueError, match="that a window is gone; give it a method on_change"):
        jaxbuf.TrajectoryBuffer.create(jnp.int32(0), 2, 4, sampler=sampler)
    for leaves in (
        {"parts": (jaxbuf.Removable(),)},
        {"freshness": jaxbuf.Freshness(max_use=1)},
        {"diversity": jaxbuf.Diversity(1.0, keep="best")},
    ):
        with pytest.raises(ValueError, match=r"Deaf.* cannot be told that an item retires; give"):
            jaxbuf.ItemBuffer.create(jnp.int32(0), 4, sampler=sampler, **leaves)
    # Items stay where they are until others take their place.
    jaxbuf.ItemBuffer.create(jnp.int32(0), 4, sampler=sampler)


@dataclasses.dataclass(frozen=True)
class ByRank(ShardableSampler):
    """Draws all items of a ring with equal odds, by their rank in one shard after the other."""

    def summarize(self, state, occupancy):
        return occupancy.size

    def targets(self, summaries, key, batch_size, capacity):
        end = jnp.cumsum(summaries)
        rank = jax.random.randint(key, (batch_size,), 0, jnp.maximum(end[-1], 1))
        shard = jnp.searchsorted(end, rank, side="right").astype(jnp.int32)
        return Targets(shard, rank - (end - summaries)[shard])

    def draw_at(self, state, occupancy, point, summaries):
        some = jnp.broadcast_to(jnp.sum(summaries) > 0, point.shape)
        return Draw(point, self.probability_among(state, point, summaries), some)

    def probability_among(self, state, index, summaries):
        return jnp.broadcast_to(self.support_among(summaries).least_probability, index.shape)

    def support_among(self, summaries):
        size = jnp.sum(summaries)
        return Support(size, 1.0 / jnp.maximum(size, 1).astype(jnp.float32))


def test_a_foreign_sampler_draws_from_shards_as_from_one_buffer():
    mesh, key = jax.make_mesh((1,), ("data",)), jax.random.key(0)

    def make():
        return jaxbuf.ItemBuffer.create(jnp.int32(0), 5, sampler=ByRank())

    many = jaxbuf.Sharded.create(make, mesh, "data", shards=3)
    assert not many.sample(key, 9).valid.any()
    # The last shard gets a single item.
    mask = jnp.array([True] * 7 + [False] * 2)
    many = many.add(jnp.arange(9), mask=mask)
    batch = many.sample(key, 63)
    rank = np.asarray(batch.data)
    # Rows are in the order of the devices that get them.
    np.testing.assert_array_equal(np.sort(rank), np.sort(jax.random.randint(key, (63,), 0, 7)))
    np.testing.assert_array_equal(batch.slots.index, rank // 3 * 5 + rank % 3)
    assert batch.valid.all()
    assert (batch.probability == np.float32(1 / 7)).all()
    assert (many.get(batch.slots).probability == batch.probability).all()
    assert int(many.support().count) == 7
    assert many.can_sample(7)
    assert not many.can_sample(8)

    # In a single buffer it draws, knows the odds of all items, and is the base of others.
    alone = make().add(jnp.arange(4))
    batch = alone.sample(key, 64)
    np.testing.assert_array_equal(batch.data, jax.random.randint(key, (64,), 0, 4))
    assert (alone.get(batch.slots).probability == 0.25).all()
    mixed = jaxbuf.Recent(0.5, 2, ByRank()).draw((), key, 8, alone.occupancy)
    np.testing.assert_allclose(mixed.probability, np.where(mixed.index < 2, 0.125, 0.375))

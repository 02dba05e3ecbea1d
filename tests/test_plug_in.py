"""A sampler and an evictor defined here work in a buffer that knows neither."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

import jaxbuf
from jaxbuf.occupancy.ring import Ring
from jaxbuf.strategies import Draw, Evictor, ItemOccupancy, KnownSampler, Sampler


class Counts(struct.PyTreeNode):
    """The number of updates of each slot, and the last value written."""

    seen: jax.Array
    last: jax.Array


@dataclasses.dataclass(frozen=True)
class LeastUpdated(Sampler):
    """Draws the live items whose priority has been updated least often, lowest slot first."""

    uses_priority = True

    def init(self, capacity):
        return Counts(seen=jnp.zeros(capacity, jnp.int32), last=jnp.zeros(capacity))

    def accepts(self, value):
        return value < 100

    def on_add(self, state, index, value):
        del value
        return state.replace(seen=state.seen.at[index].set(0, mode="drop"))

    def set_priority(self, state, index, value):
        seen = state.seen.at[index].add(1, mode="drop")
        return Counts(seen=seen, last=state.last.at[index].set(value, mode="drop"))

    def draw(self, state, key, batch_size, occupancy):
        del key
        slot = jnp.arange(state.seen.shape[0])
        order = jnp.where(occupancy.live(slot), state.seen, jnp.iinfo(jnp.int32).max)
        index = jnp.argsort(order, stable=True)[:batch_size].astype(jnp.int32)
        valid = jnp.arange(batch_size) < occupancy.size
        return Draw(index, jnp.ones(batch_size), valid)

    def metrics(self, state, occupancy):
        del occupancy
        return {"updates": jnp.sum(state.seen)}


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


def test_a_foreign_sampler_in_scan_and_vmap(buffer):
    def step(buffer, _):
        batch = buffer.sample(jax.random.key(0), 1)
        return buffer.update_priority(batch.slots, jnp.ones(1)), batch.data[0]

    _, drawn = jax.lax.scan(step, buffer, length=6)
    assert drawn.tolist() == [0, 1, 2, 3, 0, 1]
    many = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), buffer)
    _, drawn = jax.vmap(lambda buffer: jax.lax.scan(step, buffer, length=6))(many)
    assert drawn.tolist() == [[0, 1, 2, 3, 0, 1]] * 2


def test_a_foreign_evictor_decides_what_stays():
    buffer = jaxbuf.ItemBuffer.create(
        jnp.int32(0), 6, sampler=jaxbuf.Prioritized(replacement=False), evictor=Halves()
    )
    buffer = jaxbuf.add(buffer, jnp.arange(4, dtype=jnp.int32))
    batch = jaxbuf.sample(buffer, jax.random.key(0), 6)
    assert int(buffer.size) == 3
    assert sorted(np.asarray(batch.data)[np.asarray(batch.valid)].tolist()) == [1, 2, 3]


def test_a_foreign_sampler_of_windows_must_be_told_of_them():
    class Known(LeastUpdated, KnownSampler):
        def probability(self, state, index, occupancy):
            return jnp.ones(index.shape)

    for sampler in (LeastUpdated(), jaxbuf.Recent(0.5, 2, Known())):
        with pytest.raises(ValueError, match="that a window is gone; give it a method remove"):
            jaxbuf.TrajectoryBuffer.create(jnp.int32(0), 2, 4, sampler=sampler)
        # Items stay where they are until others take their place.
        jaxbuf.ItemBuffer.create(jnp.int32(0), 4, sampler=sampler)

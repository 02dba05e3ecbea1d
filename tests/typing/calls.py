"""Calls for pyright: each line that ends with ``# wrong`` is an error, and no other one is."""

# pyright: basic

from typing import Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array

import jaxbuf
from jaxbuf import Sample

key = jax.random.key(0)
items = jaxbuf.ItemBuffer.create(jnp.float32(0), 8)
rings = jaxbuf.TrajectoryBuffer.create(jnp.float32(0), 2, 8)
queue = jaxbuf.Queue.create(jnp.float32(0), 8)
mixture = jaxbuf.Mixture.create([items, rings], [1, 1])
hosted = jaxbuf.Hosted.create(lambda: items)
sharded = jaxbuf.Sharded.create(lambda: items, jax.make_mesh((1,), ("data",)), "data")
x = jnp.zeros(4)
batch = jaxbuf.sample(items, key, 4)
slots = batch.slots


class Mine(struct.PyTreeNode):
    data: Array

    def add(self, items: Array, *, weight: float = 1.0, mask: Array | None = None) -> Self:
        return self

    def sample(self, key: Array, batch_size: int, *, hot: bool = False) -> Sample:
        raise NotImplementedError

    def update_priority(
        self, slots: jaxbuf.Slots, priority: Array, *, mask: Array | None = None
    ) -> Self:
        return self

    def insert(self, items: Array, *, weight: float = 1.0) -> tuple[Self, jaxbuf.Slots]:
        raise NotImplementedError

    def next_batch(self, key: Array, batch_size: int) -> tuple[Self, Sample]:
        raise NotImplementedError


mine = Mine(x)

# Functions, and the types of what they return.
added: jaxbuf.ItemBuffer = jaxbuf.add(items, x, priority=x, score=x, mask=x > 0, donate=False)
jaxbuf.add(rings, x, env_ids=jnp.arange(2))
jaxbuf.add(mixture, x, part=0, priority=x)
jaxbuf.add(hosted, x, priority=x, donate=False)
jaxbuf.add(sharded, x, priority=x)
jaxbuf.add(queue, x)
jaxbuf.add(items, {"a": np.zeros(4)}, priority=np.zeros(4))
jaxbuf.sample(rings, key, 4, sequence_length=3)
jaxbuf.sample(mixture, key, 4)
jaxbuf.next_batch(items, key, 4, donate=False)
weights: Array = jaxbuf.sample(mixture, key, 4, beta=0.4, within="part", normalize=None).weights * x
jaxbuf.next_batch(hosted, key, 4, beta=jnp.float32(0.4), donate=False)
rings.sample(key, 4, sequence_length=3, beta=0.4, normalize="mean")
jaxbuf.insert(items, x, priority=x, donate=False)
jaxbuf.update_priority(items, slots, x, mask=x > 0, donate=False)
jaxbuf.update_priority(items, slots, np.zeros(4))
changed: jaxbuf.Mixture = jaxbuf.set_field(mixture, "a", slots, x, mask=x > 0)
jaxbuf.map_field(sharded, "a", jnp.cos, batch_size=4)
jaxbuf.clear(rings, jnp.arange(2))
jaxbuf.add(items, x, piority=x)  # wrong
jaxbuf.add(items, x, piority=x, donate=False)  # wrong
jaxbuf.add(rings, x, env_id=x)  # wrong
jaxbuf.add(queue, x, maks=x)  # wrong
jaxbuf.add(mixture, x, part=0, piority=x)  # wrong
jaxbuf.add(sharded, x, piority=x)  # wrong
jaxbuf.add(hosted, x, piority=x)  # wrong
jaxbuf.add(3, x)  # wrong
jaxbuf.sample(items, key, 4, sequence_lenght=3)  # wrong
jaxbuf.sample(rings, key, 4, sequence_lenght=3)  # wrong
jaxbuf.sample(mixture, key, 4, sequence_lenght=3)  # wrong
jaxbuf.sample(hosted, key, 4, sequence_lenght=3)  # wrong
jaxbuf.next_batch(items, key, 4, donat=False)  # wrong
jaxbuf.sample(items, key, 4, beta=0.4, normalize="max")  # wrong
items.sample(key, 4, 0.4)  # wrong
jaxbuf.insert(items, x, piority=x)  # wrong
jaxbuf.insert(sharded, x, piority=x)  # wrong
jaxbuf.update_priority(items, slots, x, maks=x)  # wrong
jaxbuf.set_field(items, "a", slots, x, maks=x)  # wrong
jaxbuf.map_field(items, "a", jnp.cos, batchsize=x)  # wrong
jaxbuf.update_score(items, slots, x, maks=x)  # wrong
jaxbuf.remove(items, slots, maks=x)  # wrong
jaxbuf.mark_used(items, slots, maks=x)  # wrong
jaxbuf.clear(rings, env=x)  # wrong
jaxbuf.sample_range(items, key, 4, by_priorty=True)  # wrong

# A buffer of one's own.
jaxbuf.add(mine, x)
jaxbuf.add(mine, x, donate=False)
own: Mine = jaxbuf.add(mine, x, weight=2.0)
jaxbuf.sample(mine, key, 4)
jaxbuf.sample(mine, key, 4, hot=True)
jaxbuf.insert(mine, x, weight=2.0)
jaxbuf.next_batch(mine, key, 4)
jaxbuf.update_priority(mine, slots, x, mask=x > 0)
jaxbuf.add(mine, x, wieght=2.0)  # wrong
jaxbuf.add(mine, x, weight="a")  # wrong
jaxbuf.sample(mine, key, 4, hott=True)  # wrong

# Methods, declared for all buffers.
for buffer in (items, rings):
    buffer.set_field("a", slots, x, mask=x > 0)
    buffer.set_field("a", slots, x, maks=x > 0)  # wrong
moved: jaxbuf.Sharded = sharded.update_priority(slots, np.zeros(4))
kept: jaxbuf.Mixture = mixture.remove(slots, mask=x > 0)
hosted.mark_used(slots, mask=x > 0)
items.add(x, priority=x)
rings.add(x, env_ids=jnp.arange(2))
mixture.add(x, part=0, priority=x)
items.add(x, env_ids=jnp.arange(2))  # wrong
items.add(x, piority=x)  # wrong
mixture.add(x, part=0, piority=x)  # wrong
sharded.insert(x, piority=x)  # wrong
hosted.sample(key, 4, sequence_lenght=3)  # wrong
hosted.mark_used(slots, maks=x > 0)  # wrong
mixture.map_field("a", jnp.cos, batchsize=4)  # wrong
sharded.set_version(version="1")  # wrong

# Numbers that vary, and other samplers.
jaxbuf.Blend((jaxbuf.Prioritized(alpha=jaxbuf.Varying(0.6)),), jaxbuf.Varying((1.0,)))
items.set_hyperparameters(alpha=0.5).set_hyperparameters({"samplers[0].alpha": x})
same: jaxbuf.ItemBuffer = jaxbuf.set_hyperparameters(items, alpha=x, donate=False)
jaxbuf.set_hyperparameters(mixture, part=0, alpha=0.5)
jaxbuf.with_sampler(mixture, jaxbuf.Uniform(), part=1)
jaxbuf.set_hyperparameters(items, alpha="a")  # wrong
jaxbuf.with_sampler(items, 3)  # wrong
jaxbuf.with_sampler(items, jaxbuf.Uniform(), prt=1)  # wrong

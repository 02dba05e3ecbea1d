"""The draw of a batch from all shards of a ``Sharded``."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, PRNGKeyArray, PyTree

from jaxbuf.buffers.body import Body
from jaxbuf.buffers.sample import Sample
from jaxbuf.core.collectives import all_gather
from jaxbuf.core.slots import Slots
from jaxbuf.wrappers.sharded.exchange import exchange, places
from jaxbuf.wrappers.sharded.operations import numbered, own_slots, sampler_of, summaries
from jaxbuf.wrappers.sharded.per_device import Shards, here_of, numbers_of, run


def sample(buffer: Shards, key: PRNGKeyArray, rows: int) -> Sample:
    """Draws a batch of so many rows, with the key of the first shard for all devices."""
    typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    nbytes = _row_bytes(buffer)

    def body(shards: Any, _: Any, words: Array) -> Sample:
        shards = shards.replace(sampler_state=lax.stop_gradient(shards.sampler_state))
        known = summaries(shards) if buffer.exchange else ()
        words = jnp.broadcast_to(words, (here_of(shards), *words.shape))
        known, words = all_gather((known, words), buffer.axis)
        first = words[0]
        if typed:
            first = jax.random.wrap_key_data(first, impl=jax.random.key_impl(key))
        if buffer.exchange:
            return _exact(buffer, shards, known, first, rows, nbytes)
        return _equal_parts(buffer, shards, first, rows)

    return run(buffer, body, same=jax.random.key_data(key) if typed else key)


def _exact(
    buffer: Shards,
    shards: Body,
    known: PyTree[Array],
    key: PRNGKeyArray,
    rows: int,
    nbytes: int,
) -> Sample:
    """Returns this device's rows of a batch that is drawn as from a single buffer."""
    sampler, count = sampler_of(shards), buffer.num_shards
    drawn = sampler.targets(known, key, rows, count * shards.occupancy.capacity)
    source = places(drawn.shard, count)
    home, point = jax.tree.map(lambda leaf: leaf[source], (drawn.shard, drawn.point))

    def fetch(shard: Body, number: Array, position: Int[Array, " n"]) -> PyTree[Array]:
        wanted = jax.tree.map(lambda leaf: leaf.at[position].get(mode="clip"), point)
        draw = sampler.draw_at(shard.sampler_state, shard.occupancy, wanted, known)
        own = home.at[position].get(mode="fill", fill_value=count) == number
        draw = dataclasses.replace(draw, valid=draw.valid & own)
        batch = _numbered(buffer, shard.gather(draw), number)
        return batch.data, batch.slots, batch.probability

    data, slots, probability = exchange(fetch, shards, home, count, nbytes, buffer.axis)
    return Sample(data, slots, probability, slots.index < buffer.capacity)


def _equal_parts(buffer: Shards, shards: Body, key: PRNGKeyArray, rows: int) -> Sample:
    """Returns the same number of rows from each shard on this device."""
    count = buffer.num_shards

    def part(shard: Any, number: Array) -> Sample:
        batch = shard.sample(jax.random.fold_in(key, number), rows // count)
        batch = batch.replace(probability=batch.probability / count)
        return _numbered(buffer, batch, number)

    batch = jax.vmap(part)(shards, numbers_of(shards, buffer.axis))
    return jax.tree.map(lambda leaf: lax.collapse(leaf, 0, 2), batch)


def get(buffer: Shards, slots: Slots) -> Sample:
    """Returns the items with these slots, each on the device of its row."""
    nbytes, count = _row_bytes(buffer), buffer.num_shards

    def body(shards: Any, rows: Slots, _: Any) -> Sample:
        shards = shards.replace(sampler_state=lax.stop_gradient(shards.sampler_state))
        slots = all_gather(rows, buffer.axis)
        known = all_gather(summaries(shards), buffer.axis) if buffer.exchange else ()
        sampler = sampler_of(shards)
        capacity = buffer.shards.capacity
        # Slots out of range are asked from any shard, which does not hold them.
        home = jnp.clip(slots.index // capacity, 0, count - 1)

        def fetch(shard: Body, number: Array, position: Int[Array, " n"]) -> PyTree[Array]:
            wanted = jax.tree.map(lambda leaf: leaf.at[position].get(mode="clip"), slots)
            batch = shard.get(own_slots(wanted, number, capacity))
            probability = batch.probability / count
            if buffer.exchange:
                among = sampler.probability_among(shard.sampler_state, batch.slots.index, known)
                probability = jnp.where(batch.valid, among, 0.0)
            return batch.data, numbered(buffer, batch.slots, number), probability

        data, named, probability = exchange(fetch, shards, home, count, nbytes, buffer.axis)
        return Sample(data, named, probability, named.index < buffer.capacity)

    return run(buffer, body, slots)


def _numbered(buffer: Shards, batch: Sample, number: Int[Array, ""]) -> Sample:
    """Returns the sample of one shard with slots that are numbered through all shards."""
    return batch.replace(slots=numbered(buffer, batch.slots, number))


def _row_bytes(buffer: Shards) -> int:
    """Returns the size of the data of a row."""
    shards: Any = buffer.shards
    one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), shards)
    row = jax.eval_shape(lambda shard: shard.sample(jax.random.key(0), 1).data, one)
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(row))

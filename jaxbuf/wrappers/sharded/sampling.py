"""Samples from all shards of a ``Sharded``: batches that are drawn, and items by their slots."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from jaxbuf.buffers.sample import Sample, StepsAround
from jaxbuf.buffers.sampled import SampledBuffer
from jaxbuf.core import fields, trees
from jaxbuf.core.collectives import all_gather
from jaxbuf.core.leaves import as_numbers, from_numbers
from jaxbuf.core.slots import Slots
from jaxbuf.core.types import Arrays, Key
from jaxbuf.wrappers.sharded.exchange import exchange, local_order
from jaxbuf.wrappers.sharded.operations import global_slots, sampler_of, shard_slots, summarize
from jaxbuf.wrappers.sharded.per_device import (
    ShardedFields,
    map_shards,
    num_local,
    run_on_devices,
    shard_ids,
)


def sample(buffer: ShardedFields, key: Key, batch_size: int) -> Sample:
    """Draws a batch from all shards, with the key of the first shard on all devices."""
    nbytes = _row_bytes(buffer)

    def body(shards: SampledBuffer, _: object, words: Array) -> Sample:
        shards = trees.updated(shards, sampler_state=lax.stop_gradient(shards.sampler_state))
        summaries = summarize(shards) if buffer.exchange else ()  # [L]
        # In a caller's ``shard_map`` each device may have another key: all use that of shard 0.
        words = jnp.broadcast_to(words, (num_local(shards), *words.shape))
        summaries, words = all_gather((summaries, words), buffer.axis)  # [S]
        first_key = from_numbers(key, words[0])
        if buffer.exchange:
            return _sample_as_one_buffer(buffer, shards, summaries, first_key, batch_size, nbytes)
        return _sample_equal_parts(buffer, shards, first_key, batch_size)

    return run_on_devices(buffer, body, replicated=as_numbers(key))


def _sample_as_one_buffer(
    buffer: ShardedFields,
    shards: SampledBuffer,
    summaries: Arrays,
    key: Key,
    batch_size: int,
    nbytes: int,
) -> Sample:
    """Returns this device's rows of a batch that is drawn as from a single buffer."""
    sampler, count = sampler_of(shards), buffer.num_shards
    targets = sampler.targets(summaries, key, batch_size, count * shards.occupancy.capacity)
    order = local_order(targets.shard, count)  # [B]
    shard_of_row, points = jax.tree.map(lambda leaf: leaf[order], (targets.shard, targets.point))

    def fetch(shard: SampledBuffer, shard_id: Array, row: Int[Array, " n"]) -> Arrays:
        # Rows past the end of the batch get any point, and ``inside`` drops them.
        point = jax.tree.map(lambda leaf: leaf.at[row].get(mode="clip"), points)
        drawn = sampler.draw_at(shard.sampler_state, shard.occupancy, point, summaries)
        inside = shard_of_row.at[row].get(mode="fill", fill_value=count) == shard_id  # [n]
        drawn = dataclasses.replace(drawn, valid=drawn.valid & inside)
        batch = shard.gather(drawn)
        return batch.data, global_slots(buffer, batch.slots, shard_id), batch.probability

    data, slots, probability = exchange(fetch, shards, shard_of_row, count, nbytes, buffer.axis)
    return Sample(data, slots, probability, slots.index < buffer.capacity)


def _sample_equal_parts(
    buffer: ShardedFields, shards: SampledBuffer, key: Key, batch_size: int
) -> Sample:
    """Returns the same number of rows from each shard on this device."""
    count = buffer.num_shards

    def draw(shard: Any, shard_id: Array) -> Sample:
        batch = shard.sample(jax.random.fold_in(key, shard_id), batch_size // count)
        return batch.replace(
            slots=global_slots(buffer, batch.slots, shard_id),
            probability=batch.probability / count,
        )

    batch = map_shards(draw)(shards, shard_ids(shards, buffer.axis))  # [L, B / S]
    return jax.tree.map(lambda leaf: lax.collapse(leaf, 0, 2), batch)


def get(buffer: ShardedFields, slots: Slots) -> Sample:
    """Returns the items with these slots, each on the device of its row."""
    nbytes, count = _row_bytes(buffer), buffer.num_shards

    def body(shards: SampledBuffer, local_slots: Slots, _: object) -> Sample:
        shards = trees.updated(shards, sampler_state=lax.stop_gradient(shards.sampler_state))
        summaries = all_gather(summarize(shards), buffer.axis) if buffer.exchange else ()  # [S]
        sampler = sampler_of(shards)

        def read(shard: SampledBuffer, shard_id: Array, picked: Slots) -> Arrays:
            batch = shard.get(picked)  # [n, ...]
            if buffer.exchange:
                state, index = shard.sampler_state, batch.slots.index
                probability = sampler.probability_among(state, index, summaries)  # [n]
                probability = jnp.where(batch.valid, probability, 0.0)  # [n]
            else:
                probability = batch.probability / count  # [n]
            return batch.data, global_slots(buffer, batch.slots, shard_id), probability

        data, present, probability = _look_up(buffer, shards, local_slots, nbytes, read)
        return Sample(data, present, probability, present.index < buffer.capacity)

    return run_on_devices(buffer, body, slots)


def steps_around(
    buffer: ShardedFields, slots: Slots, offsets: Int[Array, " K"], path: str | None
) -> StepsAround:
    """Returns the steps around windows with these slots, each on the device of its row."""
    step = fields.stored(buffer.shards.example, path, "steps have")
    nbytes = offsets.size * _bytes_of(step)

    def body(shards: SampledBuffer, local_slots: Slots, offsets: Array) -> StepsAround:
        def read(shard: SampledBuffer, _: Array, picked: Slots) -> StepsAround:
            return shard.steps_around(picked, offsets, path)

        return _look_up(buffer, shards, local_slots, nbytes, read)

    return run_on_devices(buffer, body, slots, offsets)


def _look_up(
    buffer: ShardedFields,
    shards: SampledBuffer,
    local_slots: Slots,
    nbytes: int,
    read: Callable[[SampledBuffer, Array, Slots], Any],
) -> Any:
    """Returns what is read of the rows with these slots, each on the device of its row.

    Args:
        buffer: The buffer.
        shards: The shards on this device.
        local_slots: The slots of the rows of this device, of the whole buffer.
        nbytes: The number of bytes that are read of a row.
        read: Takes a shard, its number and slots of it, and returns leaves with a row for each.
    """
    count, capacity = buffer.num_shards, buffer.shards.capacity
    all_slots = all_gather(local_slots, buffer.axis)  # [B]
    # Slots out of range are looked up in any shard, which does not hold them.
    shard_of_row = jnp.clip(all_slots.index // capacity, 0, count - 1)  # [B]

    def fetch(shard: SampledBuffer, shard_id: Array, row: Int[Array, " n"]) -> Any:
        # Rows past the end get any slot, and ``exchange`` leaves them out.
        picked = jax.tree.map(lambda leaf: leaf.at[row].get(mode="clip"), all_slots)  # [n]
        return read(shard, shard_id, shard_slots(picked, shard_id, capacity))

    return exchange(fetch, shards, shard_of_row, count, nbytes, buffer.axis)


def _row_bytes(buffer: ShardedFields) -> int:
    """Returns the number of bytes of the data of a row."""
    return math.prod(buffer.shards.step_axes) * _bytes_of(buffer.shards.example)


def _bytes_of(tree: Arrays) -> int:
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))

"""The rows of a batch on their way from the shards that hold them to where they belong."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int, PyTree

from jaxbuf.core import collectives

# A batch of no more bytes is exchanged at once, as if every row came from every device.
_AT_ONCE = 2**20


def exchange(
    fetch: Callable[..., PyTree[Array]],
    shards: PyTree[Array],
    shard: Int[Array, " B"],
    count: int,
    nbytes: int,
    axis: str,
) -> PyTree[Array]:
    """The rows of a batch that belong on this device, from whichever shards hold them.

    Args:
        fetch: Of ``(shard, number, position)`` the rows ``[n, ...]`` that a shard of this device
            has at these positions of the batch ``[n]``; anything for those of others.
        shards: The shards of this device, leaves ``[L, ...]``.
        shard: The shard of each row, the same on every device.
        count: How many shards there are, ``S``.
        nbytes: Size of a row.
        axis: The axis of the mesh.

    Returns:
        Leaves ``[B / D, ...]``.
    """
    rows = shard.shape[0]
    numbers = numbers_of(shards, axis)
    local, each = numbers.shape[0], rows // count
    devices, here, mine = count // local, lax.axis_index(axis), local * each

    def send(position: Int[Array, " n"]) -> PyTree[Array]:
        """An equal number of rows to each device, and those that it gets."""
        found = jax.vmap(functools.partial(fetch, position=position))(shards, numbers)
        own = jnp.clip(shard.at[position].get(mode="clip") - numbers[0], 0, local - 1)
        row = jnp.arange(position.shape[0], dtype=jnp.int32)
        found = jax.tree.map(lambda leaf: leaf[own, row] if local > 1 else leaf[0], found)
        return collectives.all_to_all(found, axis) if devices > 1 else found

    position = jnp.arange(rows, dtype=jnp.int32).reshape(devices, mine)
    origin = shard.reshape(devices, mine) // local
    row = jnp.arange(mine, dtype=jnp.int32)
    if nbytes * rows <= _AT_ONCE:
        got = send(jnp.where(origin == here, position, rows).reshape(-1))
        got = jax.tree.map(lambda leaf: leaf.reshape(devices, mine, *leaf.shape[1:]), got)
        return jax.tree.map(lambda leaf: leaf[origin[here], row], got)

    # Most rows lie where they belong. The others go in rounds of a few from each device to each.
    home = position[here].reshape(local, each)
    kept = jax.vmap(fetch)(shards, numbers, home)
    kept = jax.tree.map(lambda leaf: leaf.reshape(mine, *leaf.shape[2:]), kept)
    moves = shard.reshape(devices, mine) != position // each
    width = min(max(-(-mine // count), math.ceil(2 * mine**0.5)), mine)
    device = jnp.arange(devices, dtype=jnp.int32)[:, None]
    pair = jnp.where(moves, device * devices + origin, devices**2).reshape(-1)
    most = jnp.max(jnp.zeros((devices**2,), jnp.int32).at[pair].add(1, mode="drop"))
    to_them = moves & (origin == here)
    to_me = moves[here][None] & (origin[here][None] == device)

    def listed(which: Bool[Array, "D b"], turn: Array, values: Any, none: int) -> Int[Array, "D w"]:
        """The rows that each device gives or gets in this round."""
        rank = jnp.cumsum(which, axis=1, dtype=jnp.int32) - 1
        place = jnp.where(which & (rank // width == turn), rank % width, width)
        empty = jnp.full((devices, width), none, jnp.int32)
        return empty.at[jnp.broadcast_to(device, place.shape), place].set(values, mode="drop")

    def step(turn: Array, batch: PyTree[Array]) -> PyTree[Array]:
        got = send(listed(to_them, turn, position, rows).reshape(-1))
        place = listed(to_me, turn, jnp.broadcast_to(row, to_me.shape), mine).reshape(-1)
        return jax.tree.map(lambda have, new: have.at[place].set(new, mode="drop"), batch, got)

    return lax.fori_loop(0, -(-most // width), step, kept)


def places(shard: Int[Array, " B"], count: int) -> Int[Array, " B"]:
    """Which row comes to each place of the batch, if as many as can be stay with their shard.

    The first ``B / S`` rows of each shard lie in its own block. The others fill the gaps in the
    blocks of shards that have fewer.
    """
    if count == 1:
        return jnp.arange(shard.shape[0], dtype=jnp.int32)
    each = shard.shape[0] // count
    number = jnp.arange(count, dtype=jnp.int32)
    has = jnp.sum(shard[None] == number[:, None], axis=1, dtype=jnp.int32)
    first = jnp.cumsum(has) - has
    block, rank = jnp.divmod(jnp.arange(shard.shape[0], dtype=jnp.int32), each)
    gap = rank >= has[block]
    nth = jnp.cumsum(gap, dtype=jnp.int32) - 1
    more = jnp.maximum(has - each, 0)
    until = jnp.cumsum(more, dtype=jnp.int32)
    giver = jnp.minimum(jnp.sum(until[None] <= nth[:, None], axis=1, dtype=jnp.int32), count - 1)
    spare = first[giver] + each + nth - (until - more)[giver]
    return jnp.argsort(shard, stable=True)[jnp.where(gap, spare, first[block] + rank)]


def numbers_of(shards: PyTree[Array], axis: str) -> Int[Array, " L"]:
    """Which shards are on this device."""
    local = jax.tree.leaves(shards)[0].shape[0]
    return lax.axis_index(axis) * local + jnp.arange(local, dtype=jnp.int32)

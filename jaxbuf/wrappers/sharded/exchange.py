"""The exchange of the rows of a batch between devices, from the shards that hold them."""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int, PyTree

from jaxbuf.core import collectives
from jaxbuf.wrappers.sharded.per_device import numbers_of

# A batch of at most this many bytes is exchanged in a single step, with room for every row from
# every device.
_AT_ONCE = 2**20
# Up to this number of shards times rows, a shard and a row fit into one word.
_PACKED = 2**32


def exchange(
    fetch: Callable[..., PyTree[Array]],
    shards: PyTree[Array],
    shard: Int[Array, " B"],
    count: int,
    nbytes: int,
    axis: str,
) -> PyTree[Array]:
    """Returns the rows of a batch that belong on this device, from the shards that hold them.

    Args:
        fetch: A function of ``(shard, number, position)`` that returns the rows ``[n, ...]`` of the
            batch at positions ``[n]`` which a shard of this device holds; rows of other shards are
            arbitrary.
        shards: The shards of this device, leaves ``[L, ...]``.
        shard: The shard of each row, ``[B]``, the same on every device.
        count: The number of shards, ``S``.
        nbytes: The size of a row in bytes.
        axis: The axis of the mesh.

    Returns:
        The rows of this device, leaves ``[B / D, ...]``.
    """
    rows = shard.shape[0]
    numbers = numbers_of(shards, axis)
    local, each = numbers.shape[0], rows // count
    devices, here, mine = count // local, lax.axis_index(axis), local * each

    def send(position: Int[Array, " n"]) -> PyTree[Array]:
        """Sends the same number of rows to each device, and returns the received rows."""
        found = jax.vmap(functools.partial(fetch, position=position))(shards, numbers)
        own = jnp.clip(shard.at[position].get(mode="clip") - numbers[0], 0, local - 1)
        row = jnp.arange(position.shape[0], dtype=jnp.int32)
        found = jax.tree.map(lambda leaf: leaf[own, row] if local > 1 else leaf[0], found)
        return collectives.all_to_all(found, axis) if devices > 1 else found

    position = jnp.arange(rows, dtype=jnp.int32).reshape(devices, mine)
    origin = shard.reshape(devices, mine) // local
    row = jnp.arange(mine, dtype=jnp.int32)
    if at_once(rows, nbytes):
        got = send(jnp.where(origin == here, position, rows).reshape(-1))
        got = jax.tree.map(lambda leaf: leaf.reshape(devices, mine, *leaf.shape[1:]), got)
        return jax.tree.map(lambda leaf: leaf[origin[here], row], got)

    # Most rows are already on the device where they belong. The others are sent in rounds of a few
    # rows between each pair of devices.
    home = position[here].reshape(local, each)
    kept = jax.vmap(fetch)(shards, numbers, home)
    kept = jax.tree.map(lambda leaf: leaf.reshape(mine, *leaf.shape[2:]), kept)
    moves = shard.reshape(devices, mine) != position // each
    width = width_of_round(rows, devices, nbytes)
    device = jnp.arange(devices, dtype=jnp.int32)[:, None]
    pair = jnp.where(moves, device * devices + origin, devices**2).reshape(-1)
    most = jnp.max(jnp.zeros((devices**2,), jnp.int32).at[pair].add(1, mode="drop"))
    to_them = moves & (origin == here)
    to_me = moves[here][None] & (origin[here][None] == device)

    def listed(
        which: Bool[Array, "D b"], turn: Array, values: object, none: int
    ) -> Int[Array, "D w"]:
        """Returns the rows that each device sends or receives in this round."""
        rank = jnp.cumsum(which, axis=1, dtype=jnp.int32) - 1
        place = jnp.where(which & (rank // width == turn), rank % width, width)
        empty = jnp.full((devices, width), none, jnp.int32)
        return empty.at[jnp.broadcast_to(device, place.shape), place].set(values, mode="drop")

    def step(turn: Array, batch: PyTree[Array]) -> PyTree[Array]:
        got = send(listed(to_them, turn, position, rows).reshape(-1))
        place = listed(to_me, turn, jnp.broadcast_to(row, to_me.shape), mine).reshape(-1)
        return jax.tree.map(lambda have, new: have.at[place].set(new, mode="drop"), batch, got)

    return lax.fori_loop(0, -(-most // width), step, kept)


def at_once(rows: int, nbytes: int) -> bool:
    """Returns whether a batch of rows of this size is exchanged in a single step."""
    return nbytes * rows <= _AT_ONCE


def width_of_round(rows: int, devices: int, nbytes: int) -> int:
    """Returns the number of rows that each pair of devices may exchange in a round.

    They are as many as independent draws need, unless a round then brings more than a megabyte, and
    more rows than a device keeps of the whole batch.
    """
    mine = rows // devices
    few = min(math.ceil(2 * mine**0.5), _AT_ONCE // (devices * nbytes))
    return min(max(-(-mine // devices), few), mine)


def places(shard: Int[Array, " B"], count: int) -> Int[Array, " B"]:
    """Returns the row for each place of the batch, so that most rows stay with their shard.

    The first ``B / S`` rows of each shard are placed in its own block. The other rows fill the gaps
    in the blocks of shards with fewer rows.
    """
    if count == 1:
        return jnp.arange(shard.shape[0], dtype=jnp.int32)
    each = shard.shape[0] // count
    order, end = _by_shard(shard, count)
    has = jnp.diff(end, prepend=0)
    first = end - has
    block, rank = jnp.divmod(jnp.arange(shard.shape[0], dtype=jnp.int32), each)
    gap = rank >= has[block]
    nth = jnp.cumsum(gap, dtype=jnp.int32) - 1
    more = jnp.maximum(has - each, 0)
    until = jnp.cumsum(more, dtype=jnp.int32)
    giver = jnp.searchsorted(until, nth, side="right", method="scan_unrolled").astype(jnp.int32)
    giver = jnp.minimum(giver, count - 1)
    spare = first[giver] + each + nth - (until - more)[giver]
    return order[jnp.where(gap, spare, first[block] + rank)]


def _by_shard(shard: Int[Array, " B"], count: int) -> tuple[Int[Array, " B"], Int[Array, " S"]]:
    """Returns the rows in the order of their shards, and where those of each shard end."""
    rows = shard.shape[0]
    if count * rows <= _PACKED:
        # Words are sorted several times as fast as pairs, and have the same order.
        packed = shard.astype(jnp.uint32) * jnp.uint32(rows) + jnp.arange(rows, dtype=jnp.uint32)
        ordered = lax.sort(packed, is_stable=False)
        order = (ordered % jnp.uint32(rows)).astype(jnp.int32)
        last = jnp.arange(1, count + 1, dtype=jnp.uint32) * jnp.uint32(rows) - jnp.uint32(1)
    else:
        order = jnp.argsort(shard, stable=True)
        ordered, last = shard[order], jnp.arange(count, dtype=jnp.int32)
    end = jnp.searchsorted(ordered, last, side="right", method="scan_unrolled")
    return order, end.astype(jnp.int32)

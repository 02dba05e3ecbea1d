"""The exchange of the rows of a batch between devices, from the shards that hold them.

Shapes are in terms of ``B`` rows of a batch, ``S`` shards, ``D`` devices and ``L = S / D`` shards
on each device. Device ``d`` receives rows ``d * B / D`` to ``(d + 1) * B / D`` of the batch, and
the block of shard ``s`` is rows ``s * B / S`` to ``(s + 1) * B / S``.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from jaxbuf.core import collectives
from jaxbuf.core.types import Arrays, Index
from jaxbuf.wrappers.sharded.per_device import map_shards, shard_ids

# A batch of at most this many bytes is exchanged in a single step, with room for every row from
# every device.
_SINGLE_STEP_BYTES = 2**20
# Up to this number of shards times rows, a shard and a row fit into one word.
_MOST_PACKED = 2**32


def exchange(
    fetch: Callable[..., Arrays],
    shards: Arrays,
    shard_of_row: Index,
    count: int,
    nbytes: int,
    axis: str,
) -> Arrays:
    """Returns the rows of a batch that belong on this device, from the shards that hold them.

    Args:
        fetch: A function ``(shard, shard_id, row)`` that returns rows ``[n]`` of the batch, leaves
            ``[n, ...]``, from a shard of this device; rows of other shards are arbitrary.
        shards: The shards of this device, leaves ``[L, ...]``.
        shard_of_row: The shard that holds each row, ``[B]``, the same on every device.
        count: The number of shards, ``S``.
        nbytes: The size of a row in bytes.
        axis: The axis of the mesh.

    Returns:
        The rows of this device, leaves ``[B / D, ...]``.
    """
    ids, this_device = shard_ids(shards, axis), lax.axis_index(axis)  # [L], []
    batch_size, local = shard_of_row.shape[0], ids.shape[0]
    devices, per_shard = count // local, batch_size // count
    per_device = local * per_shard

    def send(row: Int[Array, " n"]) -> Arrays:
        """Sends block ``d`` of these rows to device ``d``; returns one from each, ``[n, ...]``."""
        rows = map_shards(fetch, in_axes=(0, 0, None))(shards, ids, row)  # [L, n, ...]
        shard = shard_of_row.at[row].get(mode="clip")  # [n]
        local_shard = jnp.clip(shard - ids[0], 0, local - 1)  # [n]
        index = jnp.arange(row.shape[0], dtype=jnp.int32)  # [n]
        rows = jax.tree.map(lambda leaf: leaf[local_shard, index] if local > 1 else leaf[0], rows)
        return collectives.all_to_all(rows, axis) if devices > 1 else rows

    row = jnp.arange(batch_size, dtype=jnp.int32).reshape(devices, per_device)  # [D, B / D]
    sender = shard_of_row.reshape(devices, per_device) // local  # [D, B / D]
    column = jnp.arange(per_device, dtype=jnp.int32)  # [B / D]
    if at_once(batch_size, nbytes):
        # Rows past the end fill the places of rows that other devices send.
        received = send(jnp.where(sender == this_device, row, batch_size).reshape(-1))  # [B, ...]
        received = jax.tree.map(
            lambda leaf: leaf.reshape(devices, per_device, *leaf.shape[1:]), received
        )  # [D, B / D, ...]
        return jax.tree.map(lambda leaf: leaf[sender[this_device], column], received)

    # Most rows are already on the device where they belong. The others are sent in rounds of a few
    # rows between each pair of devices.
    blocks = row[this_device].reshape(local, per_shard)  # [L, B / S]
    batch = map_shards(fetch)(shards, ids, blocks)  # [L, B / S, ...]
    batch = jax.tree.map(lambda leaf: leaf.reshape(per_device, *leaf.shape[2:]), batch)
    misplaced = shard_of_row.reshape(devices, per_device) != row // per_shard  # [D, B / D]
    device = jnp.arange(devices, dtype=jnp.int32)[:, None]  # [D, 1]
    pair = jnp.where(misplaced, device * devices + sender, devices**2).reshape(-1)  # [B]
    num_rows_of_pair = jnp.zeros((devices**2,), jnp.int32).at[pair].add(1, mode="drop")  # [D²]
    width = width_of_round(batch_size, devices, nbytes)
    sends = misplaced & (sender == this_device)  # [D, B / D], to device d
    receives = misplaced[this_device][None] & (sender[this_device][None] == device)  # from device d
    column = jnp.broadcast_to(column, receives.shape)  # [D, B / D]

    def exchange_round(i: Array, batch: Arrays) -> Arrays:
        sent = _rows_of_round(sends, i, width, row, batch_size)  # [D, w]
        received = send(sent.reshape(-1))  # [D * w, ...]
        target = _rows_of_round(receives, i, width, column, per_device).reshape(-1)  # [D * w]
        return jax.tree.map(
            lambda leaf, new: leaf.at[target].set(new, mode="drop"), batch, received
        )

    return lax.fori_loop(0, -(-jnp.max(num_rows_of_pair) // width), exchange_round, batch)


def _rows_of_round(
    mask: Bool[Array, "D b"], i: Array, width: int, row: Int[Array, "D b"], past_end: int
) -> Int[Array, "D w"]:
    """Returns the rows of round ``i`` with each device, from a mask of the rows of all rounds.

    A round with fewer than ``width`` rows is filled up with ``past_end``.
    """
    # Row ``k`` of the mask is in round ``k // width``. Rows of other rounds are written to the
    # column ``width``, and so dropped.
    rank = jnp.cumsum(mask, axis=1, dtype=jnp.int32) - 1  # [D, b]
    column = jnp.where(mask & (rank // width == i), rank % width, width)  # [D, b]
    device = jnp.arange(mask.shape[0], dtype=jnp.int32)[:, None]  # [D, 1]
    rows = jnp.full((mask.shape[0], width), past_end, jnp.int32)  # [D, w]
    return rows.at[jnp.broadcast_to(device, column.shape), column].set(row, mode="drop")


def at_once(batch_size: int, nbytes: int) -> bool:
    """Returns whether a batch of rows of this size is exchanged in a single step."""
    return nbytes * batch_size <= _SINGLE_STEP_BYTES


def width_of_round(batch_size: int, devices: int, nbytes: int) -> int:
    """Returns the number of rows that each pair of devices may exchange in a round.

    It is at least ``B / D²``, so that a round brings a device as many rows as it keeps, and up to
    ``2 * sqrt(B / D)``, which independent draws seldom exceed, if a round brings at most 1 MiB.
    """
    per_device = batch_size // devices
    expected = min(math.ceil(2 * per_device**0.5), _SINGLE_STEP_BYTES // (devices * nbytes))
    return min(max(-(-per_device // devices), expected), per_device)


def local_order(shard_of_row: Index, count: int) -> Index:
    """Returns an order of the rows of a batch in which most of them are in their shard's block.

    The first ``B / S`` rows of each shard are placed in its own block. The other rows fill the gaps
    in the blocks of shards with fewer rows.
    """
    batch_size = shard_of_row.shape[0]
    if count == 1:
        return jnp.arange(batch_size, dtype=jnp.int32)
    per_shard = batch_size // count
    by_shard, end = _by_shard(shard_of_row, count)  # [B], [S]
    num_rows = jnp.diff(end, prepend=0)  # [S]
    start = end - num_rows  # [S]
    block, rank = jnp.divmod(jnp.arange(batch_size, dtype=jnp.int32), per_shard)  # [B]
    gap = rank >= num_rows[block]  # [B]
    gap_rank = jnp.cumsum(gap, dtype=jnp.int32) - 1  # [B]
    surplus = jnp.maximum(num_rows - per_shard, 0)  # [S]
    surplus_end = jnp.cumsum(surplus, dtype=jnp.int32)  # [S]
    # Shard ``s`` has ``surplus[s]`` rows too many. The gap of rank ``g`` gets surplus row ``g``.
    giver = jnp.searchsorted(surplus_end, gap_rank, side="right", method="scan_unrolled")  # [B]
    giver = jnp.minimum(giver.astype(jnp.int32), count - 1)  # [B]
    surplus_row = start[giver] + per_shard + gap_rank - (surplus_end - surplus)[giver]  # [B]
    return by_shard[jnp.where(gap, surplus_row, start[block] + rank)]


def _by_shard(shard_of_row: Index, count: int) -> tuple[Index, Int[Array, " S"]]:
    """Returns the rows in the order of their shards, and the end of the rows of each shard."""
    rows = shard_of_row.shape[0]
    if count * rows <= _MOST_PACKED:
        # Words are sorted several times as fast as pairs, and have the same order.
        row = jnp.arange(rows, dtype=jnp.uint32)  # [B]
        packed = shard_of_row.astype(jnp.uint32) * jnp.uint32(rows) + row  # [B]
        ordered = lax.sort(packed, is_stable=False)  # [B]
        by_shard = (ordered % jnp.uint32(rows)).astype(jnp.int32)  # [B]
        last = jnp.arange(1, count + 1, dtype=jnp.uint32) * jnp.uint32(rows) - jnp.uint32(1)  # [S]
    else:
        by_shard = jnp.argsort(shard_of_row, stable=True)  # [B]
        ordered, last = shard_of_row[by_shard], jnp.arange(count, dtype=jnp.int32)  # [B], [S]
    end = jnp.searchsorted(ordered, last, side="right", method="scan_unrolled")  # [S]
    return by_shard, end.astype(jnp.int32)

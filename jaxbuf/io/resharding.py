"""Copies of a ``Sharded`` with another number of shards, which keep as many items as fit."""

import functools
from typing import Any, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxbuf.buffers.item import ItemBuffer
from jaxbuf.buffers.sharded import Sharded
from jaxbuf.core.segment_tree import SegmentTree
from jaxbuf.occupancy.ring import Ring
from jaxbuf.strategies.softmax import Softmax, SoftmaxState


def abstract(like: Sharded, count: int, name: str) -> Sharded:
    """Returns the shapes of ``like`` with another number of shards, ``count``.

    Raises:
        ValueError: If items cannot be moved between its shards; ``name`` names it.
    """
    shards = like.shards
    if not isinstance(shards, ItemBuffer) or shards.extras:
        raise ValueError(
            f"{name} has {like.num_shards} shards, but the checkpoint's {count} shards of a "
            f"{type(shards).__name__} with {list(shards.extras)} cannot be moved into them, as "
            f"those of an ItemBuffer without parts can; create it with shards={count}"
        )
    stacked = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((count, *leaf.shape[1:]), leaf.dtype), cast("Any", shards)
    )
    return like.replace(shards=stacked, num_shards=count)


@functools.partial(jax.jit, static_argnums=(1, 2))
def deal(old: ItemBuffer, count: int, size: int) -> ItemBuffer:
    """Deals the items of all shards to others in turn, from the oldest to the newest.

    The oldest item is the one that most items of its own shard follow. Each new shard keeps the
    newest items that fit. Slots of before become stale. Counters keep their sums.

    Args:
        old: The shards, leaves ``[S, ...]``.
        count: The number of new shards.
        size: The capacity of each of them.

    Returns:
        The new shards, leaves ``[count, ...]``.
    """
    rings = cast("Ring", old.occupancy)
    row, live = _by_age(rings)
    turn = jnp.cumsum(live, dtype=jnp.int32) - 1
    example = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape[2:], leaf.dtype), cast("Any", old.data)
    )
    new = ItemBuffer.create(example, size, **old.options())
    # The laps begin after all generations that the old shards gave to slots.
    empty = Ring.create(size).replace(lap=jnp.max(rings.clear().lap))

    def rows_of(full: Array) -> Array:
        """Returns what is kept for each slot, in the order of age."""
        return full.reshape(-1, *full.shape[2:])[row]

    def one(number: Array) -> ItemBuffer:
        mine = live & (turn % count == number)
        occupancy, index = empty.place(row.shape[0], mine, None)

        def move(blank: Any, full: Any) -> Any:
            if isinstance(blank, SegmentTree):
                return blank.set(index, rows_of(jax.vmap(lambda tree: tree.leaves)(full)))
            return blank.at[index].set(rows_of(full), mode="drop", unique_indices=True)

        def is_tree(node: Any) -> bool:
            return isinstance(node, SegmentTree)

        if isinstance(old.sampler, Softmax):
            # The masses of each old shard are relative to a reference of its own.
            known: SoftmaxState = old.sampler_state
            scores = rows_of(jax.vmap(lambda tree: tree.leaves)(known.scores))
            state = old.sampler.on_add(new.sampler_state, index, scores)
        else:
            state = jax.tree.map(move, new.sampler_state, old.sampler_state, is_leaf=is_tree)
        total = jnp.sum(old.counters, axis=0, dtype=jnp.uint32)
        return new.replace(
            data=jax.tree.map(move, new.data, old.data),
            occupancy=occupancy,
            sampler_state=state,
            counters=jnp.where(number == 0, total, jnp.uint32(0)),
        )

    return jax.vmap(one)(jnp.arange(count, dtype=jnp.int32))


def _by_age(rings: Ring) -> tuple[Int[Array, " M"], Bool[Array, " M"]]:
    """Returns all slots of stacked rings from the oldest on, and a mask of the live ones."""

    def of(ring: Ring) -> tuple[Array, Array]:
        slot = jnp.arange(ring.capacity, dtype=jnp.int32)
        order = (ring.position + slot) % jnp.int32(ring.capacity)
        return order, ring.live(order)

    order, live = jax.vmap(of)(rings)
    first = jnp.arange(order.shape[0], dtype=jnp.int32)[:, None] * rings.capacity
    return (first + order).T.reshape(-1), live.T.reshape(-1)

"""Copies of a ``Sharded`` with another number of shards, which keep as many items as fit."""

import functools
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxbuf.buffers.created import is_created
from jaxbuf.buffers.item import ItemBuffer
from jaxbuf.io.order import in_order
from jaxbuf.occupancy.ring import Ring
from jaxbuf.strategies.moves import Moves
from jaxbuf.wrappers.sharded.sharded import Sharded

Tree = TypeVar("Tree")


def as_saved(like: Tree, configuration: dict[str, Any]) -> Tree:
    """Returns ``like`` with as many shards in each ``Sharded`` in it as the saved one had.

    Args:
        like: A pytree with buffers.
        configuration: The result of ``structure.configuration`` for the saved pytree.

    Raises:
        ValueError: If items cannot be moved between its shards.
    """

    def rebuild(path: tuple[Any, ...], node: Any) -> Any:
        if not _is_sharded(node):
            return node
        name = jax.tree_util.keystr(path)
        count = configuration.get(f"{name}.num_shards")
        if not isinstance(count, int) or count == node.num_shards:
            return node
        return _abstract(node, count, f"like{name}")

    return jax.tree_util.tree_map_with_path(rebuild, like, is_leaf=_is_sharded)


def fit(tree: Tree, like: Tree) -> Tree:
    """Returns ``tree`` with as many shards in each ``Sharded`` in it as that of ``like`` has."""

    def convert(node: Any, wanted: Any) -> Any:
        if not _is_sharded(node) or node.num_shards == wanted.num_shards:
            return node
        size = wanted.shards.capacity
        return wanted.replace(shards=_deal(node.shards, wanted.num_shards, size))

    return jax.tree.map(convert, tree, like, is_leaf=lambda x: _is_sharded(x) or is_created(x))


def _is_sharded(node: object) -> bool:
    return isinstance(node, Sharded)


def _abstract(like: Sharded, count: int, name: str) -> Sharded:
    """Returns the shapes of ``like`` with another number of shards, ``count``.

    Raises:
        ValueError: If items cannot be moved between its shards; ``name`` names it.
    """
    shards = like.shards
    if shards.num_envs or shards.extras:
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
def _deal(old: ItemBuffer, count: int, size: int) -> ItemBuffer:
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
    order, live = jax.vmap(in_order)(rings)
    by_age = live.T.reshape(-1)
    turn = jnp.cumsum(by_age, dtype=jnp.int32) - 1
    new = old.anew(capacity=size)
    # The laps begin after all generations that the old shards gave to slots.
    empty = Ring.create(size).replace(lap=jnp.max(rings.clear().lap))

    def one(number: Array) -> ItemBuffer:
        occupancy, index = empty.place(by_age.size, by_age & (turn % count == number), None)
        target = index.reshape(order.T.shape).T

        def move(kept: Any, shard: Any) -> tuple[Any, None]:
            source, target, data, state = shard
            moves = Moves(source, target, target, (order.shape[1], size))
            return (moves(kept[0], data), new.sampler.move(kept[1], state, moves)), None

        shards = (order, target, old.data, old.sampler_state)
        (data, state), _ = jax.lax.scan(move, (new.data, new.sampler_state), shards)
        total = jnp.sum(old.counters, axis=0, dtype=jnp.uint32)
        return new.replace(
            data=data,
            occupancy=occupancy,
            sampler_state=state,
            counters=jnp.where(number == 0, total, jnp.uint32(0)),
        )

    return jax.vmap(one)(jnp.arange(count, dtype=jnp.int32))

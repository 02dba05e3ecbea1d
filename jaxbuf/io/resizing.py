"""Copies of buffers with another size or number of shards, which keep as many items as fit."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr
from jaxtyping import Array, Int, PyTree

from jaxbuf.buffers.buffer import owns_items
from jaxbuf.buffers.item import ItemBuffer
from jaxbuf.buffers.queue import COUNTS
from jaxbuf.buffers.trajectory import TrajectoryBuffer
from jaxbuf.core import counters
from jaxbuf.io.blocks import Rows
from jaxbuf.io.order import in_order
from jaxbuf.io.structure import Configuration, KeyPath, LeafType
from jaxbuf.occupancy.ring import Ring
from jaxbuf.strategies.moves import Moves
from jaxbuf.wrappers.sharded.sharded import Sharded

Tree = TypeVar("Tree")


def as_saved(like: PyTree, configuration: Configuration, saved: dict[str, LeafType]) -> PyTree:
    """Returns ``like`` with the saved size of each buffer; their leaves are ``ShapeDtypeStruct``.

    Args:
        like: A pytree with buffers.
        configuration: The result of ``structure.configuration`` for the saved pytree.
        saved: The types of its leaves, by name.
    """

    def rebuild(path: KeyPath, node: Any) -> Any:
        if not owns_items(node):
            return node
        inner = "" if node.occupancy.places is node.occupancy else ".inner"
        prefix = f"{keystr(path)}.occupancy{inner}"
        sizes: Configuration = {name: configuration.get(f"{prefix}.{name}") for name in node.sizes}
        cursor = saved.get(f"{prefix}.cursor")
        if "num_envs" in sizes and cursor and cursor.shape:
            sizes["num_envs"] = cursor.shape[-1]
        if not all(isinstance(size, int) for size in sizes.values()) or sizes == node.sizes:
            return node
        try:
            return _abstract(node, sizes)
        except (TypeError, ValueError):
            # A buffer like this cannot have that size, so something else differs too.
            return node

    like = _with_shards(like, configuration)
    return jax.tree_util.tree_map_with_path(rebuild, like, is_leaf=owns_items)


def moving(tree: PyTree, like: PyTree) -> set[str]:
    """Returns the names of the leaves whose rows move when ``tree`` gets the sizes of ``like``."""
    names: set[str] = set()

    def note(path: KeyPath, node: Any, target: Any) -> Any:
        del target
        data = node.shards.data if _is_sharded(node) else node.data
        leaves = jax.tree_util.tree_leaves_with_path(data)
        names.update(_name_of_items(path, node) + keystr(key) for key, _ in leaves)
        return node

    _map_resized(note, tree, like)
    return names


def fit(tree: Tree, like: Tree, move: Callable[[str, Any, Any, Rows], Array]) -> Tree:
    """Returns ``tree`` with the size of each buffer in ``like``.

    Args:
        tree: A pytree with buffers.
        like: A pytree like it, whose buffers have other sizes.
        move: Returns the rows of a leaf at their new places, given the leaf's name, the leaf, one
            with the new shape, and where each row goes to.

    Raises:
        ValueError: If the state of a strategy cannot be moved to other slots.
    """

    def convert(path: KeyPath, node: Any, target: Any) -> Any:
        if _is_sharded(node):
            old, new = node.shards, target.shards
            resized, *rows = _deal(_without_items(old), target.num_shards, new.capacity)
        else:
            old, new = node, target
            try:
                resized, slots = _resize_stack(_without_items(old), tuple(new.sizes.items()))
                same = jax.tree.structure(resized) == jax.tree.structure(new)
            except (TypeError, ValueError) as error:
                raise ValueError(f"{_cannot(path, node, target)}: {error}") from error
            shapes = _shapes(dataclasses.replace(resized, data=new.data))
            if not same or shapes != _shapes(new):
                raise ValueError(_cannot(path, node, target))
            # Buffers that are stacked keep their own rows.
            *stack, _ = np.indices(slots.shape, sparse=True)
            rows = [*(np.broadcast_to(place, slots.shape) for place in stack), slots]
        name, targets = _name_of_items(path, node), [np.asarray(row) for row in rows]
        data = jax.tree_util.tree_map_with_path(
            lambda key, leaf, like: move(name + keystr(key), leaf, like, targets),
            old.data,
            new.data,
        )
        resized = dataclasses.replace(resized, data=data)
        return dataclasses.replace(target, shards=resized) if _is_sharded(node) else resized

    return _map_resized(convert, tree, like)


def _map_resized(convert: Callable[[KeyPath, Any, Any], Any], tree: Tree, like: PyTree) -> Tree:
    """Returns the tree with ``convert(path, node, target)`` for buffers whose sizes differ."""

    def visit(path: KeyPath, node: Any, target: Any) -> Any:
        if _is_sharded(node) and node.num_shards == target.num_shards:
            inner = (*path, jax.tree_util.GetAttrKey("shards"))
            return dataclasses.replace(node, shards=visit(inner, node.shards, target.shards))
        same = not _is_sharded(node) and (not owns_items(node) or node.sizes == target.sizes)
        return node if same else convert(path, node, target)

    return jax.tree_util.tree_map_with_path(
        visit, tree, like, is_leaf=lambda node: _is_sharded(node) or owns_items(node)
    )


def _name_of_items(path: KeyPath, node: Any) -> str:
    return f"{keystr(path)}{'.shards' if _is_sharded(node) else ''}.data"


def _without_items(buffer: Any) -> Any:
    """Returns a buffer whose storage has no rows."""
    stack = buffer.counters.ndim - 1

    def empty(leaf: Any) -> Array:
        return jnp.zeros((*leaf.shape[:stack], 0, *leaf.shape[stack + 1 :]), leaf.dtype)

    return dataclasses.replace(buffer, data=jax.tree.map(empty, buffer.data))


def _moved(count: int, source: Array, target: Array) -> Int[Array, " N"]:
    """Returns where each of ``count`` rows goes to; past the end if it does not stay."""
    nowhere = jnp.full((count,), jnp.iinfo(jnp.int32).max, jnp.int32)
    return nowhere.at[source].set(target)


@functools.partial(jax.jit, static_argnums=1)
def _resize_stack(
    stack: Any, sizes: tuple[tuple[str, int], ...]
) -> tuple[Any, Int[Array, "... N"]]:
    """Resizes one buffer, or many that are stacked along leading axes; see ``_resize``."""
    resize = functools.partial(_resize, sizes=dict(sizes))
    for _ in range(stack.counters.ndim - 1):
        resize = jax.vmap(resize)
    return resize(stack)


def _resize(old: Any, sizes: dict[str, int]) -> tuple[Any, Int[Array, " N"]]:
    """Returns a buffer of another size for the items that fit, and where their rows go to.

    Its storage has no rows. Earlier slots become stale.
    """
    new = dataclasses.replace(old.anew(**sizes), data=old.data)
    if old.num_envs:
        return _resize_rings(old, new)
    order, live = in_order(old.occupancy)
    counts = old.counters
    if old.is_queue:
        # As if it had never been larger: the newest items were refused.
        kept = live & (jnp.cumsum(live, dtype=jnp.int32) <= new.capacity)  # [N]
        refused = jnp.sum(live & ~kept, dtype=jnp.uint32)  # []
        live, counts = kept, counts + counters.tally(COUNTS, {"rejected": refused})
    inner = old.occupancy.places
    score = inner.stays_by()
    # Generations continue those of the old buffer, so that its slots become stale.
    empty = new.occupancy.with_places(new.occupancy.places.continuing(inner))
    occupancy, index = empty.place(order.shape[0], live, None if score is None else score[order])

    moves = Moves(order, index, index, (old.capacity, new.capacity))
    moved = new.move(old, moves).replace(occupancy=occupancy, counters=counts)
    return moved, _moved(old.capacity, *moves.rows)


def _resize_rings(
    old: TrajectoryBuffer, new: TrajectoryBuffer
) -> tuple[TrajectoryBuffer, Int[Array, " N"]]:
    """Moves the newest steps of each ring so that windows still start at the same steps.

    Environment ``i`` is environment ``i`` afterwards. If there are fewer, the last ones are left
    out. If there are more, the last ones are empty.
    """
    before, num_envs = old.rings, min(old.num_envs, new.num_envs)
    cursor, num_steps = (x.astype(jnp.int32)[:, None] for x in (before.cursor, before.held))
    rank = jnp.arange(before.length, dtype=jnp.int32)[None]  # [1, T]
    oldest = (cursor - num_steps) % jnp.int32(before.length)  # [E, 1]
    order = (oldest + rank) % jnp.int32(before.length)  # [E, T]
    start = (oldest % jnp.int32(before.period)).astype(jnp.uint32)[:, 0]  # [E]
    # A slot may belong to another ring now, so all rings begin with a later lap than any old one.
    laps = jnp.broadcast_to(jnp.max(before.clear().lap), (new.num_envs,))
    empty = new.rings.replace(cursor=new.rings.cursor.at[:num_envs].set(start[:num_envs]), lap=laps)
    mask = jnp.zeros((new.num_envs, before.length), bool)
    mask = mask.at[:num_envs].set((rank < num_steps)[:num_envs])
    rings, target, _, _ = empty.place(before.length, mask)
    order, target = order[:num_envs], target[:num_envs]  # [E, T], of the rings that stay

    # A window moves with its first step, and none starts where a step is not kept or too early.
    env = jnp.arange(num_envs, dtype=jnp.int32)[:, None]  # [E, 1]
    window = (before.windows_per_ring * env + order // jnp.int32(before.period)).reshape(
        -1
    )  # [E * T]
    index = (target // jnp.int32(before.period)).reshape(-1)  # [E * T]
    kept = (order % jnp.int32(before.period) == 0) & (target < new.capacity)  # [E, T]
    kept = kept.reshape(-1)  # [E * T]
    begun = jnp.where(kept, index, new.capacity)  # [E * T]
    if old.episodes is not None and old.episodes.pads:
        # A short window may reach past the newest step, and stays if its first step does.
        before, rings = (x.replace(sequence_length=1) for x in (before, rings))
    index = jnp.where(kept & before.live(window) & rings.live(index), index, new.capacity)
    rings = rings.replace(sequence_length=new.sequence_length)

    occupancy = new.occupancy.with_places(rings).moving(old.occupancy, window, index)
    slots = (before.num_envs * before.windows_per_ring, new.num_envs * rings.windows_per_ring)
    lengths = (before.length, rings.length)
    envs = (before.num_envs, new.num_envs)
    moves = Moves(window, index, begun, slots, (order, target), lengths, envs)
    moved = new.move(old, moves).replace(occupancy=occupancy, counters=old.counters)
    every = jnp.arange(occupancy.num_slots, dtype=jnp.int32)
    moved = moved.with_episodes(every, every[:0])
    return moved, _moved(old.capacity, *moves.rows)


def _abstract(buffer: Any, sizes: dict[str, int]) -> Any:
    """Returns the shapes of a buffer with the same options but another size."""
    stack = buffer.counters.shape[:-1]
    single = jax.eval_shape(lambda: buffer.anew(**sizes))
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((*stack, *leaf.shape), leaf.dtype), single
    )


def _shapes(tree: PyTree) -> list[tuple[tuple[int, ...], np.dtype[Any]]]:
    return [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(tree)]


def _cannot(path: KeyPath, saved: Any, target: Any) -> str:
    other = " and ".join(
        f"{name} {size} (the checkpoint has {saved.sizes[name]})"
        for name, size in target.sizes.items()
        if size != saved.sizes[name]
    )
    return (
        f"like{keystr(path)} has {other}, and what its strategies keep cannot be "
        "moved; load it with the size that was saved"
    )


def _with_shards(like: Tree, configuration: Configuration) -> Tree:
    """Returns ``like`` with the saved number of shards in each ``Sharded``.

    Raises:
        ValueError: If items cannot be moved between its shards.
    """

    def rebuild(path: KeyPath, node: Any) -> Any:
        if not _is_sharded(node):
            return node
        name = keystr(path)
        count = configuration.get(f"{name}.num_shards")
        if not isinstance(count, int) or count == node.num_shards:
            return node
        return _abstract_shards(node, count, f"like{name}")

    return jax.tree_util.tree_map_with_path(rebuild, like, is_leaf=_is_sharded)


def _is_sharded(node: object) -> bool:
    return isinstance(node, Sharded)


def _abstract_shards(like: Sharded, count: int, name: str) -> Sharded:
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
def _deal(
    old: ItemBuffer, count: int, size: int
) -> tuple[ItemBuffer, Int[Array, "S N"], Int[Array, "S N"]]:
    """Deals the items of all shards to others in turn, from the oldest to the newest.

    The oldest item is the one that most items of its own shard follow. Each new shard keeps the
    newest items that fit. Earlier slots become stale. Counters keep their sums.

    Args:
        old: The shards, leaves ``[S, ...]``, whose storage has no rows.
        count: The number of new shards.
        size: The capacity of each of them.

    Returns:
        The new shards, leaves ``[count, ...]``, whose storage has no rows; and for each row of the
        old ones its new shard, and its slot there, past the end if the item does not stay.
    """
    rings = cast("Ring", old.occupancy)
    order, live = jax.vmap(in_order)(rings)  # [S, N]
    by_age = live.T.reshape(-1)  # [N * S]
    turn = jnp.cumsum(by_age, dtype=jnp.int32) - 1  # [N * S]
    values = jax.tree.map(lambda value: value[0], old.hyperparameters)
    new = dataclasses.replace(
        old.anew(capacity=size),
        data=jax.tree.map(lambda leaf: leaf[0], old.data),
        hyperparameters=values,
    )
    # The laps begin after all generations that the old shards gave to slots.
    empty = Ring.create(size).replace(lap=jnp.max(rings.clear().lap))

    def new_shard(slots: Array, number: Array) -> tuple[Array, ItemBuffer]:
        occupancy, index = empty.place(by_age.size, by_age & (turn % count == number), None)
        target = index.reshape(order.T.shape).T  # [S, N]

        def move(kept: Any, shard: Any) -> tuple[Any, None]:
            source, target, state = shard
            moves = Moves(source, target, target, (order.shape[1], size))
            return new.bound_sampler.move(kept, state, moves), None

        state, _ = jax.lax.scan(move, new.sampler_state, (order, target, old.sampler_state))
        total = jnp.sum(old.counters, axis=0, dtype=jnp.uint32)
        counts = jnp.where(number == 0, total, jnp.uint32(0))
        shard = new.replace(occupancy=occupancy, sampler_state=state, counters=counts)
        # An item is kept by one new shard at most, and is past the end in the others.
        return jnp.minimum(slots, target), shard

    nowhere = jnp.full(order.shape, jnp.iinfo(jnp.int32).max, jnp.int32)  # [S, N]
    slots, shards = jax.lax.scan(new_shard, nowhere, jnp.arange(count, dtype=jnp.int32))
    chosen = (turn % count).reshape(order.T.shape).T  # [S, N]
    moved = jax.vmap(functools.partial(_moved, order.shape[1]))
    return shards, moved(order, chosen), moved(order, slots)

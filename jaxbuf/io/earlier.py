"""Conversion of checkpoints of earlier versions to the buffers of today.

Version 0.2.0 kept the compared parts of items as float32 where all their bits are compared now, an
array without elements for returns that are not recorded, no windows that are cut short by the
end of their episode, and counters for the staleness of removed items. Its rings had an axis of
environments and one of time, which are one axis now. Up to version 0.3.0 ``Freshness`` kept one
lower bound on the versions of all slots.
"""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr
from jaxtyping import Array, PyTree

from jaxbuf.buffers.base import owns_items
from jaxbuf.buffers.item import ItemBuffer
from jaxbuf.buffers.trajectory import TrajectoryBuffer
from jaxbuf.io.structure import Configuration, KeyPath, LeafType
from jaxbuf.occupancy.ring import QueueRing, Ring
from jaxbuf.occupancy.rings import Rings
from jaxbuf.occupancy.subset import Subset
from jaxbuf.strategies.diversity import DiversityState
from jaxbuf.strategies.episodes import Episodes
from jaxbuf.strategies.points import Points

Tree = TypeVar("Tree")
Buffer = TypeVar("Buffer", ItemBuffer, TrajectoryBuffer)
_ACCUMULATORS = ("ChunkAccumulator", "EpisodeAccumulator")
_POINTS = ".points.blocks"
# By class: the number of its counters in 0.2.0, and the indices of the kept ones.
_KEPT_COUNTERS = {"FreshnessState": (6, (0, 1, 4, 5)), "Statistics": (6, (0, 1, 2, 3, 4))}


def was_empty(name: str, leaf: LeafType, configuration: Configuration) -> bool:
    """Returns whether a leaf without elements was saved, which no state has now."""
    index, field, _ = name.rpartition(".returns")
    return bool(field) and 0 in leaf.shape and configuration.get(index) == "EpisodeIndex"


def completed(saved: Configuration, current: Configuration) -> Configuration:
    """Returns a saved configuration with the fields that a class did not have at that time.

    Args:
        saved: The result of ``structure.configuration`` for the saved pytree.
        current: The result for the pytree that it is loaded into.
    """
    added: Configuration = {}
    for path, name in saved.items():
        if name == Ring.__qualname__ and current.get(path) == QueueRing.__qualname__:
            # Queues had the ring of other buffers.
            added[path] = current[path]
        if name in _ACCUMULATORS and (key := f"{path}.per_add") in current:
            # It says what ``add`` returns, and nothing about what is stored. Before 0.4.0 the
            # default was a number.
            added[key] = current[key]
        if name == Episodes.__qualname__ and f"{path}.short_windows" not in saved:
            # Any short windows are fine: ``renewed`` makes them from the windows of that time.
            for field, value in (("period", 1), ("short_windows", None)):
                key = f"{path}.{field}"
                if key in current:
                    added[key] = current[key] if value is None else value
    return {**saved, **added}


def as_saved(like: Tree, saved: dict[str, LeafType], configuration: Configuration) -> Tree:
    """Returns ``like`` with the shapes and dtypes that were saved, where they differ today."""

    def convert(path: KeyPath, leaf: Any) -> Any:
        name = keystr(path)
        before = saved.get(name)
        if before is None:
            return leaf
        if _change(name, before, leaf, configuration):
            committed = getattr(leaf, "committed", True)
            sharding = getattr(leaf, "sharding", None) if committed else None
            return jax.ShapeDtypeStruct(before.shape, leaf.dtype, sharding=sharding)
        if name.endswith(_POINTS) and before.dtype == "float32" and leaf.dtype == np.uint32:
            return jax.ShapeDtypeStruct(before.shape, np.float32)
        return leaf

    return jax.tree_util.tree_map_with_path(convert, like)


def renews(tree: PyTree, like: PyTree, saved: Configuration) -> bool:
    """Returns whether a pytree is not yet in the form of today; see ``renewed``."""

    def is_old(path: KeyPath, leaf: Any, target: Any) -> bool:
        return _change(keystr(path), leaf, target, saved) is not None

    def lacks(path: KeyPath, node: Any, target: Any) -> bool:
        return _renewal(path, node, target, saved) is not None

    old = jax.tree_util.tree_map_with_path(is_old, tree, like)
    lacking = jax.tree_util.tree_map_with_path(lacks, tree, like, is_leaf=owns_items)
    return any(jax.tree.leaves((old, lacking)))


def renewed(tree: Tree, like: PyTree, saved: Configuration) -> Tree:
    """Returns a loaded pytree in the form of ``like``, whose buffers have the same sizes.

    Args:
        tree: The loaded pytree, in the form in which it was saved.
        like: A pytree like it in the form of today.
        saved: The configuration as it was saved.
    """

    def reshape(path: KeyPath, leaf: Any, target: Any) -> Any:
        change = _change(keystr(path), leaf, target, saved)
        return change(leaf) if change else leaf

    def renew(path: KeyPath, node: Any, target: Any) -> Any:
        renewal = _renewal(path, node, target, saved)
        return _each(renewal, node) if renewal else node

    tree = jax.tree_util.tree_map_with_path(reshape, tree, like)
    return jax.tree_util.tree_map_with_path(renew, tree, like, is_leaf=owns_items)


def _renewal(
    path: KeyPath, node: Any, target: Any, saved: Configuration
) -> Callable[[Any], Any] | None:
    """Returns a function that gives a buffer what it keeps today; None if it has that."""
    if not owns_items(node):
        return None
    if not node.num_envs and _dtypes(node.extra_states) != _dtypes(target.extra_states):
        return _with_points
    if _may_gain_windows(node):
        kinds = [type(part) for part in node.extras]
        if f"{keystr(path)}.extras[{kinds.index(Episodes)}].short_windows" not in saved:
            return _with_short_windows
    return None


def _change(
    name: str, saved: Any, current: Any, configuration: Configuration
) -> Callable[[Array], Array] | None:
    """Returns a function that gives a saved leaf the shape of today; None if it has that shape."""
    before, now = (getattr(leaf, "shape", ()) for leaf in (saved, current))
    node, _, field = name.rpartition(".")
    for kind, (count, kept) in _KEPT_COUNTERS.items():
        if field == "counters" and configuration.get(node) == kind:
            if (before[-1:], now[-1:]) == ((count,), (len(kept),)):
                return lambda leaf: jnp.take(leaf, np.asarray(kept), axis=-1)
            return None
    if field == "oldest" and configuration.get(node) == "FreshnessState":
        # One lower bound was kept for all slots, which holds for each block of them.
        shared = len(before) == len(now) - 1
        return (lambda leaf: jnp.broadcast_to(leaf[..., None], now)) if shared else None
    if len(before) != len(now) + 1:
        return None
    # Axes of environments and of time, which are one now.
    rings = (path for path, kind in configuration.items() if kind == Rings.__qualname__)
    lengths = {
        configuration[f"{path}.length"]
        for path in rings
        if name.startswith(f"{path.removesuffix('.inner').removesuffix('.occupancy')}.")
    }
    joined = any(
        before[axis + 1] in lengths
        and (*before[:axis], before[axis] * before[axis + 1], *before[axis + 2 :]) == now
        for axis in range(len(now))
    )
    return (lambda leaf: leaf.reshape(now)) if joined else None


def _each(function: Callable[[Buffer], Buffer], buffer: Buffer) -> Buffer:
    """Changes one buffer, or many that are stacked along leading axes."""
    for _ in range(buffer.counters.ndim - 1):
        function = jax.vmap(function)
    return jax.jit(function)(buffer)


def _with_points(buffer: ItemBuffer) -> ItemBuffer:
    """Returns the buffer with the compared parts of the items that it holds."""
    assert buffer.diversity is not None
    points = Points.of(buffer.diversity.points(buffer.data))
    states = (
        DiversityState(points) if state is buffer.diversity_state else state
        for state in buffer.extra_states
    )
    return buffer.replace(extra_states=tuple(states))


def _may_gain_windows(buffer: TrajectoryBuffer) -> bool:
    """Returns whether short windows can be added: no part of a user's own may refuse them."""
    built_in = all(
        part in (buffer.episodes, buffer.freshness) for part in buffer.extras if part.removes
    )
    return built_in and buffer.episodes is not None and buffer.episodes.pads


def _with_short_windows(buffer: TrajectoryBuffer) -> TrajectoryBuffer:
    """Returns the buffer with the windows that are cut short by the end of their episode."""
    rings, occupancy = buffer.rings, cast("Subset", buffer.occupancy)
    num_steps, index = rings.held.astype(jnp.int32), buffer.episode_index
    assert index is not None
    windows = index.completed(rings, buffer.data, num_steps, rings.length)
    slots = jnp.where(windows.short, windows.slots, rings.num_slots).reshape(-1)
    if buffer.freshness is not None:
        state = buffer.freshness_state
        versions, _ = buffer.freshness.read(state, slots)
        stale = versions < buffer.freshness.floor(state.version)
        slots = jnp.where(stale, rings.num_slots, slots)
    removed = jnp.zeros((0,), jnp.int32)
    return buffer.replace(
        occupancy=occupancy.include(slots),
        sampler_state=buffer.bound_sampler.on_change(buffer.sampler_state, slots, None, removed),
    )


def _dtypes(tree: PyTree) -> list[np.dtype[Any]]:
    return [leaf.dtype for leaf in jax.tree.leaves(tree)]

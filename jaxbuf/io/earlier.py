"""Checkpoints of earlier versions: how what they hold becomes what a buffer has now.

Version 0.2.0 kept the compared parts of items as float32 where all their bits are compared now, an
array without elements for returns that are not recorded, no windows that are cut short by the
end of their episode, and counts from which the staleness of the items that had left was known. Its
rings had an axis of environments and one of time, which are one now.
"""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from jaxbuf.buffers.created import is_created
from jaxbuf.buffers.item import ItemBuffer
from jaxbuf.buffers.trajectory import TrajectoryBuffer
from jaxbuf.io.structure import Leaf
from jaxbuf.occupancy.ring import QueueRing, Ring
from jaxbuf.occupancy.rings import Rings
from jaxbuf.occupancy.subset import Subset
from jaxbuf.strategies.diversity import DiversityState
from jaxbuf.strategies.episodes import Episodes
from jaxbuf.strategies.points import Points

Tree = TypeVar("Tree")
Buffer = TypeVar("Buffer", ItemBuffer, TrajectoryBuffer)
_POINTS = ".points.blocks"
# The number of counters that a class had, and which of them are left.
_LEFT = {"FreshnessState": (6, (0, 1, 4, 5)), "Statistics": (6, (0, 1, 2, 3, 4))}


def was_empty(name: str, leaf: Leaf, configuration: dict[str, Any]) -> bool:
    """Returns whether a leaf without elements was saved, which no state has now."""
    index, field, _ = name.rpartition(".returns")
    return bool(field) and 0 in leaf.shape and configuration.get(index) == "EpisodeIndex"


def completed(saved: dict[str, Any], wanted: dict[str, Any]) -> dict[str, Any]:
    """Returns a saved configuration with the fields that a class did not have at that time.

    Args:
        saved: The result of ``structure.configuration`` for what was saved.
        wanted: That of what it is loaded for.
    """
    more: dict[str, Any] = {}
    for path, name in saved.items():
        if name == Ring.__qualname__ and wanted.get(path) == QueueRing.__qualname__:
            # Queues had the ring of other buffers.
            more[path] = wanted[path]
        if name == Episodes.__qualname__ and f"{path}.short_windows" not in saved:
            # Whatever the windows are to be, ``renewed`` makes them out of those of that time.
            for field, value in (("period", 1), ("short_windows", None)):
                at = f"{path}.{field}"
                if at in wanted:
                    more[at] = wanted[at] if value is None else value
    return {**saved, **more}


def as_saved(like: Tree, saved: dict[str, Leaf], configuration: dict[str, Any]) -> Tree:
    """Returns ``like`` with the shapes and dtypes that were saved, where they differ today."""

    def was(path: Any, leaf: Any) -> Any:
        name = jax.tree_util.keystr(path)
        had = saved.get(name)
        if had is None:
            return leaf
        if _change(name, had, leaf, configuration):
            committed = getattr(leaf, "committed", True)
            sharding = getattr(leaf, "sharding", None) if committed else None
            return jax.ShapeDtypeStruct(had.shape, leaf.dtype, sharding=sharding)
        if name.endswith(_POINTS) and had.dtype == "float32" and leaf.dtype == np.uint32:
            return jax.ShapeDtypeStruct(had.shape, np.float32)
        return leaf

    return jax.tree_util.tree_map_with_path(was, like)


def renewed(tree: Tree, like: PyTree, saved: dict[str, Any]) -> Tree:
    """Returns what was loaded in the form of ``like``, whose buffers have the same sizes.

    Args:
        tree: What was loaded, in the form in which it was saved.
        like: A pytree like it in the form of today.
        saved: The configuration as it was saved.
    """

    def reshaped(path: tuple[Any, ...], leaf: Any, wanted: Any) -> Any:
        change = _change(jax.tree_util.keystr(path), leaf, wanted, saved)
        return change(leaf) if change else leaf

    def renew(path: tuple[Any, ...], node: Any, wanted: Any) -> Any:
        if not is_created(node):
            return node
        if not node.num_envs and _dtypes(node.extra_states) != _dtypes(wanted.extra_states):
            return _each(_with_points, node)
        if _may_gain(node):
            name = jax.tree_util.keystr(path)
            kinds = [type(part) for part in node.extras]
            if f"{name}.extras[{kinds.index(Episodes)}].short_windows" not in saved:
                return _each(_with_short_windows, node)
        return node

    tree = jax.tree_util.tree_map_with_path(reshaped, tree, like)
    return jax.tree_util.tree_map_with_path(renew, tree, like, is_leaf=is_created)


def _change(
    name: str, had: Any, wanted: Any, configuration: dict[str, Any]
) -> Callable[[Array], Array] | None:
    """Returns a function that gives a saved leaf the shape of today; None if it has that shape."""
    before, now = (getattr(leaf, "shape", ()) for leaf in (had, wanted))
    node, _, field = name.rpartition(".")
    for kind, (count, left) in _LEFT.items():
        if field == "counters" and configuration.get(node) == kind:
            if (before[-1:], now[-1:]) == ((count,), (len(left),)):
                return lambda leaf: jnp.take(leaf, np.asarray(left), axis=-1)
            return None
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


def _may_gain(buffer: TrajectoryBuffer) -> bool:
    """Returns whether there can be short windows, which no part of a user's own may refuse."""
    ours = (buffer.episodes, buffer.freshness)
    known = all(part in ours for part in buffer.extras if part.removes)
    return known and buffer.episodes is not None and buffer.episodes.pads


def _with_short_windows(buffer: TrajectoryBuffer) -> TrajectoryBuffer:
    """Returns the buffer with the windows that are cut short by the end of their episode."""
    rings, occupancy = buffer.rings, cast("Subset", buffer.occupancy)
    held, index = rings.held.astype(jnp.int32), buffer.episode_index
    assert index is not None
    found = index.completed(rings, buffer.data, held, rings.length)
    slots = jnp.where(found.short, found.slots, rings.num_slots).reshape(-1)
    if buffer.freshness is not None:
        state = buffer.freshness_state
        versions, _ = buffer.freshness.read(state, slots)
        stale = versions < buffer.freshness.floor(state.version)
        slots = jnp.where(stale, rings.num_slots, slots)
    nothing = jnp.zeros((0,), jnp.int32)
    return buffer.replace(
        occupancy=occupancy.include(slots),
        sampler_state=buffer.bound_sampler.on_change(buffer.sampler_state, slots, None, nothing),
    )


def _dtypes(tree: PyTree) -> list[np.dtype[Any]]:
    return [leaf.dtype for leaf in jax.tree.leaves(tree)]

"""An assertion that the fields of a buffer are consistent."""

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PyTree, Shaped, UInt

from jaxbuf.buffers.buffer import owns_items
from jaxbuf.core import fields, trees
from jaxbuf.core.hyperparameters import are_legal, bind
from jaxbuf.core.problems import checked, first_wrong
from jaxbuf.core.types import Arrays, Count, Number
from jaxbuf.occupancy.protocol import Occupancy
from jaxbuf.occupancy.rings import Rings
from jaxbuf.strategies.episodes import EpisodeIndex
from jaxbuf.strategies.protocols import Sampler
from jaxbuf.testing import structures


def assert_valid(buffer: Any) -> None:
    """Checks that the fields of a buffer are consistent.

    Every operation of a buffer leaves it valid, so this finds mistakes outside of it: a leaf that
    was replaced by hand, a checkpoint of another program, a sampler or an evictor of your own that
    misses an update. It checks that

    * shapes and dtypes are those of a new buffer of the same configuration;
    * positions and sizes are within the capacity;
    * the sums, maxima and counts of trees are those of their leaves, which are numbers;
    * slots without an item have no mass, and a sampler's probabilities sum to 1;
    * the masses of ``RankBased`` are those of the ranks, unless it will only sort later;
    * a pass of ``Shuffled`` has each item once, and no item that has left;
    * the evictor and the sampler have the same scores;
    * no live item has been used too often or is too stale for the limits on freshness;
    * the points of a diversity filter and the index of episodes agree with the data.

    Args:
        buffer: A buffer, or any pytree with buffers in it, such as a training state. The buffers of
            a batch, as ``vmap`` makes it, are checked one by one, as ``buffer[0]`` and so on.

    Raises:
        AssertionError: If a check fails. Each line begins with the wrong value as an expression,
            such as ``buffer.sampler_state.leaves[3]`` for slot 3.
        ValueError: If there is no buffer, or it is traced or was donated.

    Example:
        >>> import jax.numpy as jnp, jaxbuf, jaxbuf.testing
        >>> sampler = jaxbuf.Prioritized(alpha=1.0)
        >>> buffer = jaxbuf.ItemBuffer.create(jnp.float32(0), 4, sampler=sampler)
        >>> buffer = jaxbuf.add(buffer, jnp.ones(2))
        >>> jaxbuf.testing.assert_valid(buffer)
        >>> masses = buffer.sampler_state.set(jnp.array([3]), jnp.array([2.0]))
        >>> jaxbuf.testing.assert_valid(buffer.replace(sampler_state=masses))
        Traceback (most recent call last):
        AssertionError: buffer is not valid:
          buffer.sampler_state.leaves[3] is 2.0; expected 0, empty slot
          buffer.support().count is 3; expected at most the size, 2
          buffer.sampler.probability(...) sums to 0.5 over all items; expected 1
    """
    structures.check_concrete(buffer, "buffer")
    nodes = jax.tree_util.tree_leaves_with_path(buffer, is_leaf=owns_items)
    buffers = [(path, node) for path, node in nodes if owns_items(node)]
    if not buffers:
        raise ValueError(f"buffer is a {type(buffer).__name__}, in which there is no buffer")
    problems: list[str] = []
    for path, stack in buffers:
        name = "buffer" + jax.tree_util.keystr(path)
        axes = stack.counters.shape[:-1]
        # Shards cannot be told apart where they are, if their mesh has explicit axes.
        arrays = structures.fetched(stack) if axes else stack
        for index in np.ndindex(axes):
            single = jax.tree.map(lambda leaf, i=index: leaf[i], arrays) if axes else stack
            single = trees.on_device(single)
            problems += _problems(name + "".join(f"[{i}]" for i in index), single)
    structures.report("buffer is not valid:", problems)


def _problems(name: str, buffer: Any) -> list[str]:
    """Returns the problems of one buffer. Later checks rely on the results of earlier ones."""
    for group in (
        (_check_shapes,),
        (_check_structures,),
        (_check_members, _check_sampler, _check_parts, _check_episodes),
    ):
        problems = list(itertools.chain.from_iterable(check(name, buffer) for check in group))
        if problems:
            return problems
    return []


def _check_shapes(name: str, buffer: Any) -> Iterator[str]:
    """Checks that leaves have the shapes and dtypes of a new buffer."""
    expected = jax.tree_util.tree_flatten_with_path(jax.eval_shape(lambda: buffer.anew()))
    actual = jax.tree_util.tree_flatten_with_path(buffer)
    if actual[1] != expected[1]:
        yield f"{name} is not built as its configuration says: its leaves are other ones"
        return
    for (path, leaf), (_, like) in zip(actual[0], expected[0], strict=True):
        if leaf.shape != like.shape or leaf.dtype != like.dtype:
            yield (
                f"{name}{jax.tree_util.keystr(path)} is {leaf.dtype}{list(leaf.shape)}; expected "
                f"{like.dtype}{list(like.shape)}"
            )


def _check_structures(name: str, buffer: Any) -> Iterator[str]:
    """Checks each of the parts of the buffer."""
    yield from checked(buffer, name)
    occupancy = buffer.occupancy.places
    if occupancy.next_place is not None and not buffer.is_queue:
        # A queue has empty slots in front, but here the first items are in the first slots.
        position, size = int(occupancy.next_place), int(occupancy.size)
        if size < occupancy.capacity and position != size:
            inner = "" if occupancy is buffer.occupancy else ".inner"
            yield (
                f"{name}.occupancy{inner}.position is {position}; expected {size}, the size, until "
                "the ring is full"
            )


def _live(buffer: Any) -> Bool[Array, " N"]:
    """Returns whether each slot is live."""
    return _live_slots(type(buffer.occupancy), buffer.occupancy, _slots(buffer))


# JAX may take the program of another class for this one's; see ``trees.alike``.
@functools.partial(jax.jit, static_argnums=0)
def _live_slots(
    kind: type[Occupancy], occupancy: Occupancy, slot: Int[Array, " N"]
) -> Bool[Array, " N"]:
    del kind
    return occupancy.live(slot)


def _slots(buffer: Any) -> Int[Array, " N"]:
    """Returns the indices of all slots, of items or windows."""
    return jnp.arange(buffer.occupancy.num_slots, dtype=jnp.int32)


def _check_members(name: str, buffer: Any) -> Iterator[str]:
    """Checks that live slots hold items, and that what the occupancy records of them is right."""
    occupancy = buffer.occupancy
    live = _live(buffer)
    if buffer.episodes is not None and buffer.episodes.pads:
        # Of a short window, only the first step must be in its ring.
        occupancy = occupancy.with_places(occupancy.places.replace(sequence_length=1))
    yield from occupancy.check_items(f"{name}.occupancy", live)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _distribution(
    sampler: Sampler,
    kind: type[Occupancy],
    values: PyTree,
    state: PyTree,
    occupancy: Occupancy,
    slot: Int[Array, " N"],
) -> tuple[Count, Number, Float[Array, " N"] | None]:
    """Returns the count and least probability of a sampler's support, and all probabilities."""
    del kind
    sampler = bind(sampler, values)
    support = sampler.support(state, occupancy)
    return support.count, support.least_probability, sampler.probability(state, slot, occupancy)


def _check_sampler(name: str, buffer: Any) -> Iterator[str]:
    """Checks that a sampler draws live items only, with probabilities that sum to 1."""
    if buffer.is_queue:
        return
    live = np.asarray(_live(buffer))
    size = int(live.sum())
    yield from first_wrong(
        f"{name}.occupancy.size",
        buffer.occupancy.size,
        buffer.occupancy.size != size,
        f"{size}, as many as are live",
    )
    if not are_legal(buffer.sampler, buffer.hyperparameters):
        yield f"{name}.hyperparameters is {buffer.hyperparameters}; expected legal numbers"
        return
    state = buffer.sampler_state
    yield from buffer.bound_sampler.check_valid(
        state, f"{name}.sampler_state", live, buffer.occupancy
    )
    values, occupancy = buffer.hyperparameters, buffer.occupancy
    count, least, probability = _distribution(
        buffer.sampler, type(occupancy), values, state, occupancy, _slots(buffer)
    )
    if not 0 <= count <= size:
        yield f"{name}.support().count is {count}; expected at most the size, {size}"
    if not 0 <= least <= 1:
        yield f"{name}.support().least_probability is {least}; expected a probability"
    if probability is not None and count > 0:
        probability = np.asarray(probability)
        label = f"{name}.sampler.probability(...)"
        wrong = live & ~((probability >= 0) & (probability <= 1.0001))
        yield from first_wrong(label, probability, wrong, "a probability")
        total = float(np.sum(probability, where=live, dtype=np.float64))
        if not abs(total - 1) < 1e-3:
            yield f"{label} sums to {total:.6g} over all items; expected 1"


def _check_parts(name: str, buffer: Any) -> Iterator[str]:
    """Checks the states of the parts."""
    live = np.asarray(_live(buffer))
    for part, state in zip(buffer.extras, buffer.extra_states, strict=True):
        yield from part.check_valid(state, name, live, buffer.data)


@jax.jit
def _recompute_index(buffer: Any) -> dict[str, Any]:
    """Returns the index of each step, the index computed again from the steps, and windows."""
    steps = buffer.gather_all(ignore_earliest=False)
    empty = Rings.create(buffer.num_envs, buffer.length, 1, 1)
    new_rings, target, _, _ = empty.place(buffer.length, steps.valid)
    index, rings = buffer.episode_index, buffer.rings
    rank = jnp.broadcast_to(jnp.arange(buffer.length, dtype=jnp.int32), target.shape)  # [E, T]
    env = jnp.broadcast_to(jnp.arange(buffer.num_envs, dtype=jnp.int32)[:, None], target.shape)

    def look_up(
        index: EpisodeIndex, rings: Rings, position: UInt[Array, "E T"], data: Arrays
    ) -> dict[str, Shaped[Array, "E T"]]:
        position = position.reshape(-1)
        episode = index.episode(rings, env.reshape(-1), position, data)
        # The new index has no steps before the earliest one in its ring.
        most = rank.reshape(-1).astype(jnp.uint32)
        columns = {
            "begin": jnp.minimum(position - episode.begin, most),
            "last_terminated": jnp.minimum(position - episode.last_terminated, most),
            "is_last": episode.is_last,
        }
        if episode.value is not None:
            columns["value"] = episode.value
        return {key: value.reshape(rank.shape) for key, value in columns.items()}

    kept = look_up(index, rings, steps.position, buffer.data)
    episodes, data = index.episodes, steps.data
    names = (episodes.terminated, episodes.truncated)
    if episodes.last is None and fields.truncation(data, *names) is None:
        # ``end_episodes`` finds no flag to set in such steps, so only the index knows these ends.
        data = {"steps": data, "last": episodes.flags(data)[0] | kept["is_last"]}
        paths = {name: f"steps.{getattr(episodes, name)}" for name in ("terminated", "reward")}
        episodes = dataclasses.replace(episodes, last="last", **paths)
    rows = jax.tree.map(lambda leaf: lax.collapse(leaf, 0, 2), data)  # [E * T, ...]
    new_index = episodes.init_windows(rows, empty).extend(data, empty, target, steps.valid)
    slot = jnp.arange(rings.num_slots, dtype=jnp.int32)
    windows = rings.rows_of(slot)  # [N, L]
    length = jnp.sum(index.in_episode(rings, slot), axis=1, dtype=jnp.int32)
    start = rings.first_step_of(slot, rings.generation(slot))
    newest = start[1] + (length - 1).astype(jnp.uint32)
    terminated, _ = index.episodes.flags(buffer.data)
    final = jnp.take_along_axis(windows, length[:, None] - 1, axis=1)[:, 0]
    ended = index.episode(rings, start[0], newest, buffer.data).is_last
    if index.episodes.short_windows == "terminated":
        ended &= terminated[final]
    may_cross = index.episodes.boundary != "avoid"
    complete = (length == buffer.sequence_length) | (ended & index.episodes.pads) | may_cross
    num_steps = rings.held.astype(jnp.int32) - rings.ignored
    live = rings.age(slot) < num_steps[start[0]]
    if not index.episodes.pads:
        live &= rings.live(slot)
    aligned = index.steps_before(windows[:, 0]) % index.episodes.period == 0
    return {
        "valid": steps.valid,
        "kept": kept,
        "recomputed": look_up(new_index, new_rings, rank.astype(jnp.uint32), rows),
        "windows": complete & live & aligned,
    }


def _check_episodes(name: str, buffer: Any) -> Iterator[str]:
    """Checks the index of episodes against the flags and rewards of the steps."""
    if buffer.episodes is None:
        return
    result: dict[str, Any] = jax.device_get(_recompute_index(buffer))
    valid = result["valid"]
    for key, kept in result["kept"].items():
        new = result["recomputed"][key]
        size = np.abs(new, where=valid & np.isfinite(new), out=np.zeros(new.shape)).max()
        wrong = valid & ~np.isclose(kept, new, rtol=1e-4, atol=1e-5 * size if size > 1 else 1e-5)
        for line in first_wrong(f"{name}.episode(...).{key}", kept, wrong, new):
            yield f"{line} as the data say, [environment, step from the earliest]"
    if buffer.episode_index.episodes.removes:
        member = np.asarray(buffer.occupancy.members.get(_slots(buffer)))
        wrong = member & ~result["windows"]
        if not buffer.lets_remove:
            wrong = member != result["windows"]
        expected = "True exactly for windows that are complete and of one episode"
        yield from first_wrong(f"{name}.occupancy.members", member, wrong, expected)

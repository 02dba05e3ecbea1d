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

from jaxbuf.buffers.created import is_created
from jaxbuf.core import fields, trees
from jaxbuf.core.hyperparameters import are_legal, bind
from jaxbuf.core.problems import checked, first_wrong
from jaxbuf.occupancy.rings import Rings
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
          buffer.sampler_state.leaves[3] is 2.0; expected 0, the slot is empty
          buffer.support().count is 3; expected at most the size, 2
          buffer.sampler.probability(...) sums to 0.5 over all items; expected 1
    """
    structures.check_concrete(buffer, "buffer")
    found = jax.tree_util.tree_leaves_with_path(buffer, is_leaf=is_created)
    buffers = [(path, one) for path, one in found if is_created(one)]
    if not buffers:
        raise ValueError(f"buffer is a {type(buffer).__name__}, in which there is no buffer")
    problems: list[str] = []
    for path, one in buffers:
        name = "buffer" + jax.tree_util.keystr(path)
        axes = one.counters.shape[:-1]
        # Shards cannot be told apart where they are, if their mesh has explicit axes.
        whole = structures.fetched(one) if axes else one
        for index in np.ndindex(axes):
            part = jax.tree.map(lambda leaf, at=index: leaf[at], whole) if axes else one
            part = trees.on_device(part)
            problems += _problems(name + "".join(f"[{i}]" for i in index), part)
    structures.report("buffer is not valid:", problems)


def _problems(name: str, buffer: Any) -> list[str]:
    """Returns the problems of one buffer. Later checks rely on the results of earlier ones."""
    for checks in ((_shapes,), (_structures,), (_members, _law, _parts, _episodes)):
        problems = list(itertools.chain.from_iterable(check(name, buffer) for check in checks))
        if problems:
            return problems
    return []


def _shapes(name: str, buffer: Any) -> Iterator[str]:
    """Checks that leaves have the shapes and dtypes of a new buffer."""
    expected = jax.tree_util.tree_flatten_with_path(jax.eval_shape(lambda: buffer.anew()))
    given = jax.tree_util.tree_flatten_with_path(buffer)
    if given[1] != expected[1]:
        yield f"{name} is not built as its configuration says: its leaves are other ones"
        return
    for (path, leaf), (_, like) in zip(given[0], expected[0], strict=True):
        if leaf.shape != like.shape or leaf.dtype != like.dtype:
            yield (
                f"{name}{jax.tree_util.keystr(path)} is {leaf.dtype}{list(leaf.shape)}; expected "
                f"{like.dtype}{list(like.shape)}"
            )


def _structures(name: str, buffer: Any) -> Iterator[str]:
    """Checks each of the parts that the buffer is made of."""
    yield from checked(buffer, name)
    places = buffer.occupancy.places
    if places.next_place is not None and not buffer.is_queue:
        # A queue has holes in front, but here the first items are the first slots.
        position, size = int(places.next_place), int(places.size)
        if size < places.capacity and position != size:
            inner = "" if places is buffer.occupancy else ".inner"
            yield (
                f"{name}.occupancy{inner}.position is {position}; expected {size}, the size, until "
                "the ring is full"
            )


@jax.jit
def _live(occupancy: Any, slot: Any) -> Any:
    return occupancy.live(slot)


def _slots(buffer: Any) -> Any:
    """Returns the indices of all slots, of items or windows."""
    return jnp.arange(buffer.occupancy.num_slots, dtype=jnp.int32)


def _members(name: str, buffer: Any) -> Iterator[str]:
    """Checks that what can be drawn are items, of which the occupancy knows what it should."""
    occupancy = buffer.occupancy
    live = _live(occupancy, _slots(buffer))
    if buffer.episodes is not None and buffer.episodes.pads:
        # Only the first step of a short window must be held.
        occupancy = occupancy.with_places(occupancy.places.replace(sequence_length=1))
    yield from occupancy.check_items(f"{name}.occupancy", live)


@functools.partial(jax.jit, static_argnums=0)
def _ask(sampler: Any, values: Any, state: Any, occupancy: Any, slot: Any) -> tuple[Any, Any, Any]:
    sampler = bind(sampler, values)
    support = sampler.support(state, occupancy)
    return support.count, support.least_probability, sampler.probability(state, slot, occupancy)


def _law(name: str, buffer: Any) -> Iterator[str]:
    """Checks that a sampler draws live items only, with probabilities that sum to 1."""
    if buffer.is_queue:
        return
    slot = _slots(buffer)
    live = np.asarray(_live(buffer.occupancy, slot))
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
    values = buffer.hyperparameters
    count, least, probability = _ask(buffer.sampler, values, state, buffer.occupancy, slot)
    if not 0 <= count <= size:
        yield f"{name}.support().count is {count}; expected at most the size, {size}"
    if not 0 <= least <= 1:
        yield f"{name}.support().least_probability is {least}; expected a probability"
    if probability is not None and count > 0:
        share = np.asarray(probability)
        law = f"{name}.sampler.probability(...)"
        wrong = live & ~((share >= 0) & (share <= 1.0001))
        yield from first_wrong(law, share, wrong, "a probability")
        total = float(np.sum(share, where=live, dtype=np.float64))
        if not abs(total - 1) < 1e-3:
            yield f"{law} sums to {total:.6g} over all items; expected 1"


def _parts(name: str, buffer: Any) -> Iterator[str]:
    """Checks what the parts keep."""
    live = np.asarray(_live(buffer.occupancy, _slots(buffer)))
    for part, state in zip(buffer.extras, buffer.extra_states, strict=True):
        yield from part.check_valid(state, name, live, buffer.data)


@jax.jit
def _look_up(buffer: Any) -> dict[str, Any]:
    """Returns the index of each step, the index computed again from the steps, and windows."""
    steps = buffer.gather_all(ignore_earliest=False)
    begin = Rings.create(buffer.num_envs, buffer.length, 1, 1)
    rings, target, _, _ = begin.place(buffer.length, steps.valid)
    index = buffer.episode_index
    rank = jnp.broadcast_to(jnp.arange(buffer.length, dtype=jnp.int32), target.shape)
    env = jnp.broadcast_to(jnp.arange(buffer.num_envs, dtype=jnp.int32)[:, None], target.shape)

    def ask(index: Any, rings: Rings, position: Any, data: Any) -> dict[str, Any]:
        at = position.reshape(-1)
        episode = index.episode(rings, env.reshape(-1), at, data)
        # Before the earliest step held the new index knows nothing.
        most = rank.reshape(-1).astype(jnp.uint32)
        found = {
            "begin": jnp.minimum(at - episode.begin, most),
            "last_terminated": jnp.minimum(at - episode.last_terminated, most),
            "is_last": episode.is_last,
        }
        if episode.value is not None:
            found["value"] = episode.value
        return {key: value.reshape(rank.shape) for key, value in found.items()}

    ours = ask(index, buffer.rings, steps.position, buffer.data)
    episodes, data = index.episodes, steps.data
    names = (episodes.terminated, episodes.truncated)
    if episodes.last is None and fields.truncation(data, *names) is None:
        # ``end_episodes`` finds no flag to set in such steps, so only the index knows these ends.
        data = {"steps": data, "last": episodes.flags(data)[0] | ours["is_last"]}
        paths = {name: f"steps.{getattr(episodes, name)}" for name in ("terminated", "reward")}
        episodes = dataclasses.replace(episodes, last="last", **paths)
    rows = jax.tree.map(lambda leaf: lax.collapse(leaf, 0, 2), data)
    anew = episodes.init_windows(rows, begin).extend(data, begin, target, steps.valid)
    slot = jnp.arange(buffer.rings.num_slots, dtype=jnp.int32)
    windows = buffer.rings.window(slot)
    together = jnp.sum(index.in_episode(buffer.rings, slot), axis=1, dtype=jnp.int32)
    begin = buffer.rings.starts_at(slot, buffer.rings.generation(slot))
    newest = begin[1] + (together - 1).astype(jnp.uint32)
    terminated, _ = index.episodes.flags(buffer.data)
    final = jnp.take_along_axis(windows, together[:, None] - 1, axis=1)[:, 0]
    ended = index.episode(buffer.rings, begin[0], newest, buffer.data).is_last
    if index.episodes.short_windows == "terminated":
        ended &= terminated[final]
    across = index.episodes.boundary != "avoid"
    whole = (together == buffer.sequence_length) | (ended & index.episodes.pads) | across
    held = buffer.rings.held.astype(jnp.int32) - buffer.rings.ignored
    there = buffer.rings.age(slot) < held[begin[0]]
    if not index.episodes.pads:
        there &= buffer.rings.live(slot)
    aligned = index.steps_before(windows[:, 0]) % index.episodes.period == 0
    return {
        "valid": steps.valid,
        "ours": ours,
        "anew": ask(anew, rings, rank.astype(jnp.uint32), rows),
        "windows": whole & there & aligned,
    }


def _episodes(name: str, buffer: Any) -> Iterator[str]:
    """Checks the index of episodes against the flags and rewards of the steps."""
    if buffer.episodes is None:
        return
    seen: dict[str, Any] = jax.device_get(_look_up(buffer))
    valid = seen["valid"]
    for key, ours in seen["ours"].items():
        anew = seen["anew"][key]
        size = np.abs(anew, where=valid & np.isfinite(anew), out=np.zeros(anew.shape)).max()
        wrong = valid & ~np.isclose(ours, anew, rtol=1e-4, atol=1e-5 * size if size > 1 else 1e-5)
        for line in first_wrong(f"{name}.episode(...).{key}", ours, wrong, anew):
            yield f"{line} as the data say, [environment, step from the earliest]"
    if buffer.episode_index.episodes.removes:
        member = np.asarray(buffer.occupancy.members.get(_slots(buffer)))
        wrong = member & ~seen["windows"]
        if not buffer.lets_remove:
            wrong = member != seen["windows"]
        label = f"{name}.occupancy.members"
        what = "True exactly for windows that are complete and of one episode"
        yield from first_wrong(label, member, wrong, what)

"""An assertion that the fields of a buffer are consistent."""

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxbuf.buffers.created import Created
from jaxbuf.buffers.item import ItemBuffer
from jaxbuf.buffers.queue import Queue
from jaxbuf.core import trees
from jaxbuf.core.problems import Checked, first_wrong
from jaxbuf.occupancy.ring import Ring
from jaxbuf.occupancy.rings import Rings
from jaxbuf.strategies.blend import Blend
from jaxbuf.strategies.part import Rows
from jaxbuf.strategies.prioritized import Prioritized
from jaxbuf.strategies.rank_based import RankBased, RankState
from jaxbuf.strategies.recent import Recent
from jaxbuf.strategies.shuffled import Shuffled
from jaxbuf.strategies.softmax import Softmax, SoftmaxState
from jaxbuf.testing import structures


def assert_valid(buffer: Any) -> None:
    """Check that the fields of a buffer are consistent.

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
          buffer.sampler_state.leaves[3] is 2.0; expected 0, for there is no item
          buffer.support().count is 3; expected at most the size, 2
          buffer.sampler.probability(...) sums to 0.5 over all items; expected 1
    """
    structures.check_concrete(buffer, "buffer")
    found = jax.tree_util.tree_leaves_with_path(buffer, is_leaf=lambda x: isinstance(x, Created))
    buffers = [(path, one) for path, one in found if isinstance(one, Created)]
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
    for checks in ((_shapes,), (_structures,), (_members, _law, _freshness, _contents)):
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
    found = jax.tree_util.tree_leaves_with_path(buffer, is_leaf=lambda x: isinstance(x, Checked))
    for path, part in found:
        if isinstance(part, Checked):
            yield from part.check_valid(name + jax.tree_util.keystr(path))
    places = buffer.occupancy.places
    if isinstance(buffer, ItemBuffer) and isinstance(places, Ring):
        # A queue has holes in front, but here the first items are the first slots.
        position, size = int(places.position), int(places.size)
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
    if getattr(buffer, "episodes", None) is not None and buffer.episodes.pads:
        # Only the first step of a short window must be held.
        occupancy = occupancy.with_places(occupancy.places.replace(sequence_length=1))
    yield from occupancy.check_items(f"{name}.occupancy", live)


@functools.partial(jax.jit, static_argnums=0)
def _ask(sampler: Any, state: Any, occupancy: Any, slot: Any) -> tuple[Any, Any, Any]:
    support = sampler.support(state, occupancy)
    known = hasattr(sampler, "probability")
    probability = sampler.probability(state, slot, occupancy) if known else None
    return support.count, support.least_probability, probability


def _law(name: str, buffer: Any) -> Iterator[str]:
    """Checks that a sampler draws live items only, with probabilities that sum to 1."""
    if isinstance(buffer, Queue):
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
    state = buffer.sampler_state
    yield from _kept(f"{name}.sampler_state", buffer.sampler, state, live, buffer.occupancy)
    count, least, probability = _ask(buffer.sampler, state, buffer.occupancy, slot)
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


def _kept(name: str, sampler: Any, state: Any, live: Any, occupancy: Any) -> Iterator[str]:
    """Checks that what a sampler keeps is about the items, and about nothing else."""
    while isinstance(sampler, Recent):
        sampler = sampler.base
    if isinstance(sampler, Blend):
        for i, (part, kept) in enumerate(zip(sampler.samplers, state, strict=True)):
            yield from _kept(f"{name}[{i}]", part, kept, live, occupancy)
    if isinstance(sampler, Prioritized):
        mass = np.asarray(state.leaves)
        wrong = ~live & (mass != 0)
        yield from first_wrong(f"{name}.leaves", mass, wrong, "0, for there is no item")
    if isinstance(sampler, Shuffled):
        slot = jnp.arange(len(live), dtype=jnp.int32)
        left, given = (np.asarray(mask) for mask in state.look(slot))
        label, what = f"{name}.marks", "one mark of each item, and none of others"
        marks = left.astype(np.int32) + given.astype(np.int32)
        yield from first_wrong(label, marks, marks != live, what)
    if isinstance(sampler, Softmax):
        yield from _softmax(name, sampler, state, live, occupancy)
    if isinstance(sampler, RankBased):
        yield from _ranks(name, sampler, state, live, occupancy)


def _softmax(
    name: str, sampler: Softmax, state: SoftmaxState, live: Any, occupancy: Any
) -> Iterator[str]:
    """Checks that only items have scores, and that masses are those of the scores."""
    score, mass = np.asarray(state.scores.leaves), np.asarray(state.masses.leaves)
    gone = ~live & (score > -np.inf)
    yield from first_wrong(f"{name}.scores.leaves", score, gone, "-inf, for there is no item")
    evicted_by = occupancy.places.item_scores()
    if evicted_by is not None:
        wrong = live & (score != np.asarray(evicted_by))
        yield from first_wrong(f"{name}.scores.leaves", score, wrong, evicted_by)
    reference = np.asarray(state.reference)
    largest = score.max()
    if np.isinf(largest) or np.isinf(reference):
        yield from first_wrong(f"{name}.reference", reference, reference != largest, str(largest))
        expected = ((score == largest) & (largest > 0)).astype(np.float32)
    else:
        with np.errstate(over="ignore"):
            expected = np.exp((score - reference) / np.float32(sampler.temperature))
    # The smallest masses count as zero.
    wrong = ~np.isclose(mass, expected, rtol=1e-3, atol=1e-37)
    yield from first_wrong(f"{name}.masses.leaves", mass, wrong, expected)


def _ranks(
    name: str, sampler: RankBased, state: RankState, live: Any, occupancy: Any
) -> Iterator[str]:
    """Checks that only items have values, and that masses are those of the ranks once sorted."""
    value, mass = np.asarray(state.values.leaves), np.asarray(state.masses.leaves)
    gone = ~live & (value > -np.inf)
    yield from first_wrong(f"{name}.values.leaves", value, gone, "-inf, for there is no item")
    evicted_by = occupancy.places.item_scores() if sampler.uses_score else None
    if evicted_by is not None:
        wrong = live & (value != np.asarray(evicted_by))
        yield from first_wrong(f"{name}.values.leaves", value, wrong, evicted_by)
    changes = np.asarray(state.changes)
    wrong = (changes < 0) | (changes >= sampler.sort_every)
    legal = f"at least 0 and less than sort_every, {sampler.sort_every}"
    yield from first_wrong(f"{name}.changes", changes, wrong, legal)
    label = f"{name}.masses.leaves"
    yield from first_wrong(label, mass, ~live & (mass != 0), "0, for there is no item")
    yield from first_wrong(label, mass, live & ~(mass > 0), "above 0, for there is an item")
    if changes == 0:
        order = np.argsort(-value[live], kind="stable")
        expected = np.zeros(mass.shape, np.float32)
        rank = jnp.arange(1, len(order) + 1, dtype=jnp.int32)
        expected[np.flatnonzero(live)[order]] = np.asarray(sampler.mass(rank))
        wrong = live & ~np.isclose(mass, expected, rtol=1e-5, atol=0)
        what = [f"{number:.7g}, the mass of its rank" for number in expected]
        yield from first_wrong(label, mass, wrong, np.asarray(what, object))


def _freshness(name: str, buffer: Any) -> Iterator[str]:
    """Checks that no live item should have retired."""
    freshness = getattr(buffer, "freshness", None)
    if freshness is None:
        return
    state, slot = buffer.freshness_state, _slots(buffer)
    live = np.asarray(_live(buffer.occupancy, slot))
    uses, version = np.asarray(state.uses), np.asarray(state.versions)
    yield from first_wrong(f"{name}.freshness_state.uses", uses, uses < 0, "a number of at least 0")
    if freshness.max_use is not None:
        limit = f"less than max_use, {freshness.max_use}: the item should have retired"
        wrong = live & (uses >= freshness.max_use)
        yield from first_wrong(f"{name}.freshness_state.uses", uses, wrong, limit)
    floor = int(freshness.floor(state.version))
    limit = f"at least {floor}: the item is too stale for a learner at {state.version}"
    wrong = live & (version < floor)
    yield from first_wrong(f"{name}.freshness_state.versions", version, wrong, limit)


def _contents(name: str, buffer: Any) -> Iterator[str]:
    """Checks the records about the data against the data."""
    if getattr(buffer, "diversity", None) is not None:
        yield from _diversity(name, buffer)
    if getattr(buffer, "episode_index", None) is not None:
        yield from _episodes(name, buffer)


@jax.jit
def _noted_again(buffer: Any, wanted: Any) -> Any:
    """Returns the state of the diversity filter after the wanted items were added again."""
    slot = jnp.arange(buffer.capacity, dtype=jnp.int32)
    at = jnp.where(wanted, slot, buffer.capacity)
    return buffer.diversity.on_add(buffer.diversity_state, at, Rows(buffer.data, slot.shape))


def _diversity(name: str, buffer: Any) -> Iterator[str]:
    """Checks that the points of the filter are those of the items."""

    def differs(wanted: Any) -> bool:
        pairs = zip(
            jax.tree.leaves(buffer.diversity_state),
            jax.tree.leaves(_noted_again(buffer, wanted)),
            strict=True,
        )
        # A function of an item may round differently when it is compiled again.
        wide = ((np.asarray(a, np.float64), np.asarray(b, np.float64)) for a, b in pairs)
        return not all(np.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in wide)

    some = np.flatnonzero(buffer.live)
    if not differs(np.isin(np.arange(buffer.capacity), some)):
        return
    while len(some) > 1:
        half = some[: len(some) // 2]
        inside = differs(np.isin(np.arange(buffer.capacity), half))
        some = half if inside else some[len(some) // 2 :]
    yield (
        f"{name}.diversity_state.points has other numbers for slot {some[0]} than the data: "
        f"{buffer.diversity.points(buffer.data)[some[0]]}"
    )


@jax.jit
def _look_up(buffer: Any) -> dict[str, Any]:
    """Returns the index of each step, the index computed again from the steps, and windows."""
    steps = buffer.gather_all(ignore_earliest=False)
    begin = Rings.create(buffer.num_envs, buffer.length, 1, 1)
    rings, target, _, _ = begin.place(buffer.length, steps.valid)
    index = buffer.episode_index
    new = index.episodes.init(buffer.data, buffer.rings.num_slots)
    anew = new.extend(steps.data, begin, target, steps.valid)
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

    slot = jnp.arange(buffer.rings.num_slots, dtype=jnp.int32)
    rows = buffer.rings.window(slot)
    together = jnp.sum(index.together(buffer.rings, slot), axis=1, dtype=jnp.int32)
    begin = buffer.rings.starts_at(slot, buffer.rings.generation(slot))
    newest = begin[1] + (together - 1).astype(jnp.uint32)
    terminated, _ = index.episodes.flags(buffer.data)
    final = jnp.take_along_axis(rows, together[:, None] - 1, axis=1)[:, 0]
    ended = index.episode(buffer.rings, begin[0], newest, buffer.data).is_last
    if index.episodes.short_windows == "terminated":
        ended &= terminated.reshape(-1)[final]
    across = index.episodes.boundary != "avoid"
    whole = (together == buffer.sequence_length) | (ended & index.episodes.pads) | across
    held = buffer.rings.held.astype(jnp.int32) - buffer.rings.ignored
    there = buffer.rings.age(slot) < held[begin[0]]
    if not index.episodes.pads:
        there &= buffer.rings.live(slot)
    aligned = index.steps_before(rows[:, 0]) % index.episodes.period == 0
    return {
        "valid": steps.valid,
        "ours": ask(index, buffer.rings, steps.position, buffer.data),
        "anew": ask(anew, rings, rank.astype(jnp.uint32), steps.data),
        "windows": whole & there & aligned,
    }


def _episodes(name: str, buffer: Any) -> Iterator[str]:
    """Checks the index of episodes against the flags and rewards of the steps."""
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

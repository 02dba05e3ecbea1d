"""Checks and operations that all buffers share."""

import math
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree

from jaxbuf.buffers.base import Base
from jaxbuf.core import checks, numbers, storage, trees
from jaxbuf.core.hyperparameters import check_declared
from jaxbuf.core.random import check_key, random_words, scale_word
from jaxbuf.core.segment_tree import SegmentTree
from jaxbuf.core.sizes import check_count
from jaxbuf.core.slots import Slots
from jaxbuf.core.types import Numbers, State
from jaxbuf.occupancy.ages import Ages, Bound, grid, spread
from jaxbuf.occupancy.protocol import Occupancy
from jaxbuf.strategies.diversity import Diversity
from jaxbuf.strategies.episodes import Episodes
from jaxbuf.strategies.evictors import Oldest
from jaxbuf.strategies.freshness import Freshness
from jaxbuf.strategies.mass import draw_by_mass, draw_distinct, over
from jaxbuf.strategies.part import Part
from jaxbuf.strategies.protocols import Draw, Evictor, KnownSampler, Sampler
from jaxbuf.strategies.uniform import Uniform

AnyBuffer = TypeVar("AnyBuffer", bound=Base)


def check_batch_size(batch_size: int) -> int:
    """Returns ``batch_size`` as a Python integer.

    Raises:
        ValueError: If it is not a static integer from 1 to 2**31 - 1.
    """
    return check_count("batch_size", batch_size, most=2**31 - 1)


def check_wanted(batch_size: object) -> Int[Array, ""]:
    """Returns the number of rows requested as an array; it may be traced.

    Raises:
        ValueError: If it is not a single integer, or has a known value that does not fit int32.
    """
    return storage.check_rows(batch_size, "batch_size", (), np.int32, "one integer")


def check_slots(slots: object, name: str = "slots") -> Slots:
    """Returns ``slots``, the slots of a sample, as JAX arrays ``[B]`` of int32 and uint32.

    Raises:
        ValueError: If they have no index and generation of integers of the same shape, ``[B]``.
    """
    arrays = jax.Array | np.ndarray
    if not isinstance(slots, Slots) or not all(
        isinstance(field, arrays) for field in (slots.index, slots.generation)
    ):
        kind = "only an array" if isinstance(slots, arrays) else checks.name_of(slots)
        raise ValueError(f"{name} is {kind}; expected the slots of a sample: batch.slots")
    index, generation = slots.index, slots.generation
    whole = all(jnp.issubdtype(field.dtype, jnp.integer) for field in (index, generation))
    if not whole or index.shape != generation.shape:
        raise ValueError(
            f"{name} has an index {index.dtype}{list(index.shape)} and a generation "
            f"{generation.dtype}{list(generation.shape)}; expected integers of the same shape, as "
            "in a sample"
        )
    if index.ndim != 1:
        raise ValueError(f"{name} has shape {index.shape}; expected (B,)")
    slots = trees.on_device(slots)
    return Slots(slots.index.astype(jnp.int32), slots.generation.astype(jnp.uint32))


def check_sampler(sampler: object) -> None:
    """Checks that ``sampler`` is a sampler.

    Raises:
        ValueError: If it is not a ``Sampler``, or has a method by a name of an older version.
    """
    if not isinstance(sampler, Sampler):
        raise ValueError(
            f"sampler is {checks.name_of(sampler)}; expected a sampler such as {Uniform()}, or one "
            "of your own that derives from jaxbuf.strategies.Sampler"
        )
    for told in sampler.told:
        _check_names(told)


def _check_names(told: Sampler) -> None:
    for owner, new, olds in (
        ("Sampler", "on_change", ("on_add", "remove", "on_slide")),
        ("ShardableSampler", "with_global_default", ("lend",)),
    ):
        # A class that defines the new method, or is derived from, may keep the old one beside it.
        for kind in type(told).__mro__:
            if new in vars(kind):
                break
            for old in olds:
                if old in vars(kind):
                    raise ValueError(
                        f"{told} has a method {old}, which is not called any more; define {new} "
                        f"instead (see jaxbuf.strategies.{owner}.{new})"
                    )


def check_removes(sampler: Sampler, what: str) -> None:
    """Checks that a sampler with priorities can remove items.

    Raises:
        ValueError: If it does not define ``on_change``.
    """
    for told in sampler.told:
        if told.uses_priority and type(told).on_change is Sampler.on_change:
            raise ValueError(
                f"{told} cannot be told that {what}; give it a method on_change (see "
                "jaxbuf.strategies.Sampler)"
            )


def check_evictor(evictor: object) -> None:
    """Checks that ``evictor`` is an evictor.

    Raises:
        ValueError: If it is not an ``Evictor``.
    """
    check_declared(evictor)
    if not isinstance(evictor, Evictor):
        raise ValueError(
            f"evictor is {checks.name_of(evictor)}; expected an evictor such as {Oldest()}, or one "
            "of your own that derives from jaxbuf.strategies.Evictor"
        )


def check_parts(
    parts: object, *, freshness: object = None, episodes: object = None, diversity: object = None
) -> tuple[Part, ...]:
    """Returns all parts of a buffer, in the order in which ``add`` asks them.

    Raises:
        ValueError: If ``parts`` is not a sequence of parts, if there are two of one of the three
            classes, or if another argument is neither None nor of its class.
    """
    if not isinstance(parts, tuple | list):
        raise ValueError(f"parts is {checks.name_of(parts)}; expected a tuple of parts")
    found: list[Any] = []
    for name, value, kind, example in (
        ("episodes", episodes, Episodes, "jaxbuf.Episodes(...)"),
        ("freshness", freshness, Freshness, "jaxbuf.Freshness(max_use, ...)"),
        ("diversity", diversity, Diversity, "jaxbuf.Diversity(cutoff, ...)"),
    ):
        if value is not None and not isinstance(value, kind):
            raise ValueError(f"{name} is {checks.name_of(value)}; expected None or {example}")
        found += [] if value is None else [value]
    for i, part in enumerate(cast("list[Any]", parts)):
        if not isinstance(part, Part):
            raise ValueError(
                f"parts[{i}] is {checks.name_of(part)}; expected a part, which derives from "
                "jaxbuf.strategies.Part"
            )
        check_declared(part)
        _check_reasons(part)
        found.append(part)
    for kind in (Episodes, Freshness, Diversity):
        if sum(isinstance(part, kind) for part in found) > 1:
            raise ValueError(f"there are two parts {kind.__name__}; pass one of them")
    return tuple(found)


def _check_reasons(part: Part) -> None:
    reasons: Any = part.reasons
    if not isinstance(reasons, tuple | list) or not all(isinstance(x, str) for x in reasons):
        raise ValueError(
            f"reasons of {part} is {checks.name_of(reasons)}; expected a tuple of names, such as "
            '("refused_full",)'
        )
    if "adds" in reasons:
        raise ValueError(
            f"reasons of {part} has 'adds', which counts the rows that were added; choose another "
            "name"
        )


def hear(owner: Sampler | Part, event: str, state: State, *told: Any) -> State:
    """Returns the state of a sampler or a part after an event, the name of one of its methods."""
    return check_state(owner, event, state, getattr(owner, event)(state, *told))


def ask(owner: Sampler | Part, method: str, state: State, *told: Any) -> dict[str, Array]:
    """Returns the answer of a sampler or a part, arrays by name.

    Raises:
        ValueError: If it is not a dict.
    """
    answer = getattr(owner, method)(state, *told)
    if not isinstance(answer, dict):
        raise ValueError(
            f"{method} of {owner} returned {checks.kind_of(answer)}; expected a dict of arrays"
        )
    return cast("dict[str, Array]", answer)


def check_state(owner: Sampler | Part, event: str, before: State, after: State) -> State:
    """Returns the new state of a sampler or a part.

    Raises:
        ValueError: If it is not like the state before.
    """
    want, got = (jax.tree.structure(state) for state in (before, after))
    if want != got:
        given = "None" if after is None else f"{got}"
        raise ValueError(f"{event} of {owner} returned {given}; expected a new state, {want}")
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        was, now = numbers.abstract(old, "the state"), numbers.abstract(new, "the state")
        if (was.shape, was.dtype) != (now.shape, now.dtype):
            raise ValueError(
                f"{event} of {owner} returned an array {now.dtype}{list(now.shape)}; expected "
                f"{was.dtype}{list(was.shape)}, as in the state before"
            )
    return after


def change(
    buffer: AnyBuffer,
    occupancy: Occupancy,
    *,
    added: Int[Array, "..."] | None = None,
    value: Float[Array, "..."] | None = None,
    removed: Int[Array, "..."] | None = None,
) -> AnyBuffer:
    """Returns the buffer after items, or windows, came and went, of which its strategies hear.

    Args:
        buffer: The buffer; of new items, the parts have heard already.
        occupancy: Its occupancy after the change.
        added: The slots of new ones, of any shape; past the end for none. None: nothing came.
        value: Their priorities or scores, of the same shape; None if the sampler is given none.
        removed: The slots that hold nothing any more, of any shape; past the end for none. None:
            nothing left, except for items that new ones have replaced.
    """
    nothing = jnp.zeros((0,), jnp.int32)
    come, gone = (nothing if slots is None else slots.reshape(-1) for slots in (added, removed))
    value = None if value is None else value.reshape(-1)
    state, states = jax.lax.stop_gradient((buffer.sampler_state, buffer.extra_states))
    if removed is not None:
        pairs = zip(buffer.extras, states, strict=True)
        states = tuple(hear(part, "on_remove", before, gone) for part, before in pairs)
    return buffer.replace(
        occupancy=occupancy,
        sampler_state=hear(buffer.bound_sampler, "on_change", state, come, value, gone),
        extra_states=states,
    )


def check_version_used(extras: tuple[Part, ...], version: object, session: object) -> None:
    """Checks that versions and sessions are given only if a part uses them.

    Raises:
        ValueError: If one of them was given and no part uses it.
    """
    if any(part.uses_version for part in extras):
        return
    for name, value in (("version", version), ("session", session)):
        if value is not None:
            raise ValueError(
                f"{name} was given, but nothing uses it; leave it out or create the buffer "
                "with freshness=jaxbuf.Freshness(...)"
            )


def needs_priority(sampler: Sampler, what: str) -> None:
    """Checks that the sampler uses priorities.

    Raises:
        ValueError: If it does not.
    """
    if not sampler.uses_priority:
        if sampler.uses_score:
            raise ValueError(
                f"{what}, but {sampler} draws by the scores that add takes, and has no priorities; "
                "add the items with score=, or create the buffer with "
                "sampler=jaxbuf.Prioritized(...)"
            )
        raise ValueError(
            f"{what}, but {sampler} has no priorities; create the buffer with "
            "sampler=jaxbuf.Prioritized(...)"
        )


def check_priority(priority: object, shape: tuple[int, ...], axes: str) -> Float[Array, "..."]:
    """Returns the priorities of rows as float32; one that is too large becomes infinite.

    The row of an infinite priority is refused later, like others with an illegal priority.

    Raises:
        ValueError: If the shape differs, or they are not numbers.
    """
    return storage.check_rows(priority, "priority", shape, np.float32, axes, infinite=True)


def needs_order(occupancy: Occupancy, what: str) -> None:
    """Checks that the occupancy keeps the order of insertion, which ages are derived from.

    Raises:
        ValueError: If it does not.
    """
    if not occupancy.keeps_order:
        raise ValueError(
            f"{what} uses the age of items, but this buffer's {type(occupancy).__name__} does "
            "not keep their order; create it with evictor=jaxbuf.Oldest()"
        )


def check_range(
    buffer: Base,
    key: PRNGKeyArray,
    batch_size: int,
    start: Bound,
    stop: Bound,
    flags: dict[str, bool],
) -> tuple[int, list[Int[Array, ""] | None]]:
    """Checks the arguments of ``sample_range``, and returns the number of rows and the bounds.

    Raises:
        ValueError: If the occupancy does not keep the order of insertion, ``batch_size`` is not an
            integer of at least 1, a flag is neither True nor False, a bound is not an integer, or
            ``by_priority`` is True and the sampler has no priorities or is not a ``KnownSampler``.
    """
    needs_order(buffer.occupancy, "sample_range")
    rows = check_batch_size(batch_size)
    check_key(key)
    for name, flag in flags.items():
        checks.check_flag(name, flag)
    if flags["by_priority"]:
        needs_priority(buffer.sampler, "by_priority is True")
        if not isinstance(buffer.sampler, KnownSampler):
            raise ValueError(
                f"by_priority is True, but {buffer.sampler} cannot tell the probability of items "
                "it did not draw; derive it from jaxbuf.strategies.KnownSampler"
            )
    bounds = [
        None if bound is None else storage.check_rows(bound, name, (), np.int32, "one integer")
        for name, bound in (("start", start), ("stop", stop))
    ]
    return rows, bounds


def pick(
    buffer: Base,
    key: PRNGKeyArray,
    rows: int,
    bounds: list[Int[Array, ""] | None],
    *,
    by_priority: bool,
    replacement: bool,
) -> Draw:
    """Draws rows from a range of ages, in order of age; see ``sample_range`` of the buffers."""
    ages = buffer.occupancy.age_range(*bounds)
    if by_priority:
        return _pick_by_priority(buffer, key, rows, ages, replacement=replacement)
    row = jnp.arange(rows, dtype=jnp.int32)
    if replacement:
        word = random_words(key, (rows,))
        rank = jnp.sort(scale_word(word, ages.total.astype(jnp.uint32)).astype(jnp.int32))
        valid = jnp.broadcast_to(ages.total > 0, (rows,))
    else:
        words = random_words(key, (rows + 1,))
        enough = ages.total >= rows
        rank = jnp.where(enough, jnp.sort(spread(words[1:], words[0], ages.total)), row)
        valid = row < ages.total
    share = 1.0 / jnp.maximum(ages.total, 1).astype(jnp.float32)
    return Draw(ages.at(rank), jnp.broadcast_to(share, (rows,)), valid)


def _pick_by_priority(
    buffer: Base, key: PRNGKeyArray, batch_size: int, ages: Ages, *, replacement: bool
) -> Draw:
    """Draws rows from a range of ages with probabilities proportional to the sampler's."""
    sampler = buffer.bound_sampler
    assert isinstance(sampler, KnownSampler)
    capacity = ages.most * ages.count.shape[0]
    rank = jnp.arange(capacity, dtype=jnp.int32)
    inside = rank < ages.total
    state = jax.lax.stop_gradient(buffer.sampler_state)
    mass = sampler.probability(state, ages.at(rank), buffer.occupancy)
    mass = jnp.where(inside, mass, 0.0)
    mass = jnp.where(jnp.any(mass > 0), mass, inside.astype(jnp.float32))
    tree = SegmentTree.create(capacity).set_all(mass)

    if replacement:
        drawn = draw_by_mass(key, batch_size, tree, stratified=True)
        valid = jnp.broadcast_to(ages.total > 0, (batch_size,))
    else:
        drawn, valid = draw_distinct(key, batch_size, jnp.minimum(batch_size, tree.nnz), tree)
        drawn = jnp.sort(jnp.where(valid, drawn, capacity))
    return Draw(ages.at(drawn), over(tree.read(drawn)[1], tree.root("sum")), valid)


def newest(occupancy: Occupancy, n: int) -> Draw:
    """Draws the ``n`` newest items of each ring, ordered by ring and then by age.

    Raises:
        ValueError: If ``n`` is more than a ring can hold.
    """
    ages = occupancy.age_range(-n, None)
    if n > ages.most:
        raise ValueError(f"n is {n}, but there is room for {ages.most}")
    index, valid = grid(ages, n)
    share = 1.0 / jnp.maximum(ages.total, 1).astype(jnp.float32)
    return Draw(index.reshape(-1), jnp.broadcast_to(share, (index.size,)), valid.reshape(-1))


def check_draw(draw: object) -> tuple[Int[Array, " B"], Float[Array, " B"], Bool[Array, " B"]]:
    """Returns the slots, the probabilities and the mask of a draw.

    Raises:
        ValueError: If it is not a draw, or a shape or dtype differs.
    """
    if not isinstance(draw, Draw):
        raise ValueError(
            f"draw is {checks.name_of(draw)}; expected a jaxbuf.strategies.Draw, which a sampler's "
            "draw returns"
        )
    shape = (math.prod(numbers.given(draw.index, "draw.index").shape),)
    return (
        storage.check_rows(draw.index, "draw.index", shape, np.int32, "(B,)"),
        storage.check_rows(draw.probability, "draw.probability", shape, np.float32, "(B,)"),
        storage.check_rows(draw.valid, "draw.valid", shape, np.bool_, "(B,)"),
    )


def check_steps(
    data: PyTree[Array],
    steps: PyTree[Array],
    num_envs: int,
    name: str = "num_envs",
    skip: int = 1,
) -> tuple[PyTree[Array], tuple[int, ...]]:
    """Returns steps as arrays ``[num_envs, T, *shape]``, and the leading axes they came with.

    Args:
        data: The storage for the steps, leaves ``[..., *shape]`` with ``skip`` leading axes.
        steps: One step or ``T`` steps of each environment.
        num_envs: The number of environments.
        name: What has that number, for errors.
        skip: The number of leading axes of the storage's leaves.

    Raises:
        ValueError: If a structure, shape or dtype differs.
    """
    steps = trees.match(data, steps)
    ndim, given = jax.tree.leaves(data)[0].ndim - skip, jax.tree.leaves(steps)
    one = bool(given) and np.ndim(given[0]) == ndim + 1
    axes = (num_envs,) if one else (num_envs, "T")
    shape = np.shape(given[0]) if given else ()
    hint = ""
    if shape and shape[0] != num_envs and len(shape) - len(axes) == ndim:
        hint = f"; the first axis is that of the {num_envs} environments, {name}"
        if not one and shape[1] == num_envs:
            hint += ", and time comes second: jnp.swapaxes(x, 0, 1)"
    steps, batch = storage.check(data, steps, "steps", axes, skip, hint)
    if one:
        steps = jax.tree.map(lambda leaf: leaf[:, None], steps)
    return steps, batch


def check_step_mask(mask: Numbers, batch: tuple[int, ...]) -> Bool[Array, "E T"]:
    """Returns a mask of steps, given one value or ``T`` values for each environment.

    Args:
        mask: The mask, ``[num_envs]`` or ``[num_envs, T]``.
        batch: The leading axes of the steps, ``(num_envs,)`` or ``(num_envs, T)``.

    Raises:
        ValueError: If it has another shape, or is not a mask.
    """
    num_envs, *steps = batch
    one = np.ndim(mask) == 1
    shape = (num_envs,) if one else batch
    axes = "(num_envs, T)" if steps and not one else "(num_envs,)"
    if steps and one:
        axes += f"; or one for each step, {batch}, which is (num_envs, T)"
    taken = storage.check_rows(mask, "mask", shape, np.bool_, axes)
    return jnp.broadcast_to(taken.reshape(num_envs, -1), (num_envs, *(steps or (1,))))


def check_mask(
    mask: object, shape: tuple[int, ...], steps: tuple[int, ...] = ()
) -> Bool[Array, "..."]:
    """Returns the mask of the rows of slots of this shape; None takes all.

    Args:
        mask: The mask, of the shape of the slots, ``[B]``; or of their steps, ``[B, *steps]``.
        shape: The shape of the slots.
        steps: The axis of the steps of windows, ``(sequence_length,)``; empty if a mask cannot
            choose among them.

    Raises:
        ValueError: If it is not a mask, or has another shape.
    """
    if mask is None:
        return jnp.ones(shape, bool)
    if steps and np.ndim(mask) == 2:  # pyright: ignore[reportArgumentType]
        axes = "(B, sequence_length)"
        return storage.check_rows(mask, "mask", (*shape, *steps), np.bool_, axes)
    axes = "that of slots; or one for each step, (B, sequence_length)" if steps else "that of slots"
    return storage.check_rows(mask, "mask", shape, np.bool_, axes)


def check_update(
    sampler: Sampler, slots: Slots, priority: object, mask: object
) -> tuple[Slots, Float[Array, " B"], Bool[Array, " B"]]:
    """Checks the arguments of ``update_priority``, and returns them as arrays.

    Raises:
        ValueError: If the sampler has no priorities, or a shape differs.
    """
    needs_priority(sampler, "update_priority was called")
    slots = check_slots(slots)
    shape = slots.index.shape
    value = check_priority(priority, shape, "that of slots")
    return slots, value, check_mask(mask, shape)

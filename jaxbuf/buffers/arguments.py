"""Checks of the arguments of operations, and of the strategies that buffers are created with."""

from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, UInt

from jaxbuf.buffers.operation import DTYPES, INFINITE
from jaxbuf.core import checks, numbers, storage, trees
from jaxbuf.core.hyperparameters import check_declared
from jaxbuf.core.sizes import check_count
from jaxbuf.core.slots import Slots
from jaxbuf.core.types import Arrays, Count, Index, Numbers, Words
from jaxbuf.occupancy.protocol import Occupancy
from jaxbuf.strategies.diversity import Diversity
from jaxbuf.strategies.episodes import Episodes
from jaxbuf.strategies.evictors import Oldest
from jaxbuf.strategies.freshness import Freshness
from jaxbuf.strategies.part import Part
from jaxbuf.strategies.protocols import Evictor, Sampler
from jaxbuf.strategies.uniform import Uniform

# Names steps or windows: sampled slots, what ``locate`` returned, or environments.
Where = Slots | tuple[Int[Array, "..."], UInt[Array, "..."]] | Int[Array, "..."]


def check_batch_size(batch_size: int) -> int:
    """Returns ``batch_size`` as a Python integer.

    Raises:
        ValueError: If it is not a static integer from 1 to 2**31 - 1.
    """
    return check_count("batch_size", batch_size, most=2**31 - 1)


def check_num_rows(batch_size: object) -> Count:
    """Returns the number of rows requested as an array; it may be traced.

    Raises:
        ValueError: If it is not a single integer, or does not fit int32 and is not traced.
    """
    return storage.check_rows(batch_size, "batch_size", (), np.int32, "one integer")


def check_slots(slots: object, name: str = "slots") -> Slots:
    """Returns ``slots``, the slots of a sample, as JAX arrays ``[B]`` of int32 and uint32.

    Raises:
        ValueError: If they have no index and generation of integers of the same shape, ``[B]``.
    """
    arrays = jax.Array | np.ndarray
    if not isinstance(slots, Slots) or not (
        isinstance(slots.index, arrays) and isinstance(slots.generation, arrays)
    ):
        kind = "only an array" if isinstance(slots, arrays) else checks.name_of(slots)
        if isinstance(slots, Slots):
            kind = f"{slots}, whose fields are not both arrays"
        raise ValueError(f"{name} is {kind}; expected the slots of a sample: batch.slots")
    index, generation = slots.index, slots.generation
    integers = jnp.issubdtype(index.dtype, jnp.integer) and jnp.issubdtype(
        generation.dtype, jnp.integer
    )
    if not integers or index.shape != generation.shape:
        raise ValueError(
            f"{name} has an index {index.dtype}{list(index.shape)} and a generation "
            f"{generation.dtype}{list(generation.shape)}; expected integers of the same shape, as "
            "in a sample"
        )
    if index.ndim != 1:
        raise ValueError(f"{name} has shape {index.shape}; expected (B,)")
    slots = trees.on_device(slots)
    return Slots(slots.index.astype(jnp.int32), slots.generation.astype(jnp.uint32))


def check_mask(
    mask: object,
    shape: tuple[int, ...],
    axes: str = "that of slots",
    *,
    steps: tuple[int, ...] = (),
) -> Bool[Array, "..."]:
    """Returns the mask of rows as an array; None takes all.

    Args:
        mask: The mask, ``[B]``; or one of the steps of each row, ``[B, *steps]``.
        shape: The shape of the rows.
        axes: A description of this shape, for errors.
        steps: The axis of the steps of windows, ``(sequence_length,)``; empty if a mask cannot
            choose among them.

    Raises:
        ValueError: If it is not a mask, or has another shape.
    """
    if mask is None:
        return jnp.ones(shape, bool)
    if steps and np.ndim(mask) == 2:  # pyright: ignore[reportArgumentType]
        shape, axes = (*shape, *steps), "(B, sequence_length)"
    elif steps:
        axes += "; or one for each step, (B, sequence_length)"
    return check_numbers(mask, "mask", shape, axes)


def check_numbers(value: object, name: str, shape: tuple[int, ...], axes: str) -> Array:
    """Returns an argument of an operation as an array of the dtype that its name says.

    A priority that is too large becomes infinite, and its row is refused later.

    Raises:
        ValueError: As raised by ``storage.check_rows``.
    """
    return storage.check_rows(value, name, shape, DTYPES[name], axes, infinite=name in INFINITE)


def check_steps(
    data: Arrays, steps: Arrays, num_envs: int, name: str = "num_envs", skip: int = 1
) -> tuple[Arrays, tuple[int, ...]]:
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
    ndim, leaves = jax.tree.leaves(data)[0].ndim - skip, jax.tree.leaves(steps)
    one = bool(leaves) and np.ndim(leaves[0]) == ndim + 1
    axes = (num_envs,) if one else (num_envs, "T")
    shape = np.shape(leaves[0]) if leaves else ()
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
    axes = "(num_envs, T)" if len(batch) > 1 else "(num_envs,)"
    if len(batch) > 1 and np.ndim(mask) == 1:
        axes = f"(num_envs,); or one for each step, {batch}, which is (num_envs, T)"
    return per_step(mask, "mask", batch, axes)


def per_step(value: Numbers, name: str, batch: tuple[int, ...], axes: str) -> Array:
    """Returns one number for each step, ``[E, T]``, given one for each step or environment.

    Raises:
        ValueError: If it has neither of these shapes, or another dtype.
    """
    array = check_numbers(value, name, batch[:1] if np.ndim(value) == 1 else batch, axes)
    array = array[:, None] if array.ndim == 1 else array
    return jnp.broadcast_to(array, (batch[0], *(batch[1:] or (1,))))


def mask_of(envs: object, num_envs: int) -> Bool[Array, " E"]:
    """Returns the argument ``envs`` of a method, a mask or numbers, as a mask; None means all.

    Raises:
        ValueError: If it is neither a mask ``[num_envs]`` nor numbers ``[K]``.
    """
    if envs is None:
        return jnp.ones((num_envs,), bool)
    shape_dtype = numbers.abstract(envs, "envs")
    if shape_dtype.dtype == jnp.bool_:
        return storage.check_rows(envs, "envs", (num_envs,), np.bool_, "(num_envs,)")
    if len(shape_dtype.shape) != 1:
        raise ValueError(
            f"envs has shape {shape_dtype.shape}; expected (K,), or a mask (num_envs,)"
        )
    ids = numbers.integers(envs, "envs")
    # JAX would count a negative index from the end.
    ids = jnp.where(ids >= 0, ids, num_envs)
    return jnp.zeros((num_envs,), bool).at[ids].set(True, mode="drop")


def check_offsets(offsets: object) -> Any:
    """Returns offsets of steps as integers ``[K]`` of 32 bits: a NumPy array, or a traced one.

    Raises:
        ValueError: If they are not integers ``[K]``, or one that is not traced is 2**30 or more
            steps away.
    """
    values = numbers.ids(np.asarray(offsets) if isinstance(offsets, range) else offsets, "offsets")
    if values.ndim != 1:
        raise ValueError(f"offsets has shape {values.shape}; expected (K,), such as range(-3, 1)")
    far, info = 2**30, jnp.iinfo(values.dtype if values.size else np.int32)
    if isinstance(values, np.ndarray):
        wrong = values[(values >= far) | (values <= -far)]
        if wrong.size:
            raise ValueError(f"offsets has {wrong[0]}; expected integers below 2**30 either way")
        return values.astype(np.int32)
    # No ring has steps that are farther away, so these stay outside.
    return jnp.clip(values, max(info.min, -far), min(info.max, far)).astype(jnp.int32)


def check_where(where: Where, positions: object) -> Slots | tuple[Any, Any]:
    """Returns the slots of windows, or the environments and positions of steps, of a lookup.

    Args:
        where: Slots, a tuple of environments and positions, or environments.
        positions: The positions of steps in these environments.

    Raises:
        ValueError: If positions are given with slots, or missing without them.
    """
    if isinstance(where, Slots):
        if positions is not None:
            raise ValueError("positions were given with slots, which have their own")
        return check_slots(where, "where")
    if positions is None and isinstance(where, tuple) and len(where) == 2:
        return where
    if positions is None:
        raise ValueError("positions is None; give env_ids and positions, or slots")
    return where, positions


def broadcast_steps(
    env_ids: object, positions: object, name: str = "env_ids"
) -> tuple[Index, Words, tuple[int, ...]]:
    """Returns environments and positions of steps as flat arrays, and their broadcast shape.

    Args:
        env_ids: The environments of the steps.
        positions: The positions of the steps.
        name: The name of ``env_ids`` in an error.

    Raises:
        ValueError: If an argument does not hold integers, or the two do not broadcast.
    """
    env = numbers.integers(env_ids, name)
    position = numbers.array(positions, "positions", np.integer)
    try:
        shape = jnp.broadcast_shapes(env.shape, position.shape)
    except ValueError as error:
        raise ValueError(
            f"{name} has shape {env.shape} and positions {position.shape}; expected shapes that "
            "broadcast"
        ) from error
    env = jnp.broadcast_to(env, shape).reshape(-1)
    position = jnp.broadcast_to(position, shape).reshape(-1).astype(jnp.uint32)
    return env, position, shape


def check_sampler(sampler: object) -> None:
    """Checks that ``sampler`` is a sampler.

    Raises:
        ValueError: If it is not a ``Sampler``.
    """
    own = "one of your own that derives from jaxbuf.strategies.Sampler"
    expected = f"a sampler such as {Uniform()}, or {own}"
    checks.check_kind("sampler", sampler, Sampler, expected)


def check_removes(sampler: Sampler, what: str) -> None:
    """Checks that a sampler with priorities can remove items.

    Raises:
        ValueError: If it does not define ``on_change``.
    """
    for leaf in sampler.leaf_samplers:
        if leaf.uses_priority and type(leaf).on_change is Sampler.on_change:
            raise ValueError(
                f"{leaf} cannot be told that {what}; give it a method on_change (see "
                "jaxbuf.strategies.Sampler)"
            )


def check_evictor(evictor: object) -> None:
    """Checks that ``evictor`` is an evictor.

    Raises:
        ValueError: If it is not an ``Evictor``.
    """
    check_declared(evictor)
    own = "one of your own that derives from jaxbuf.strategies.Evictor"
    checks.check_kind("evictor", evictor, Evictor, f"an evictor such as {Oldest()}, or {own}")


def check_parts(
    parts: object, *, freshness: object = None, episodes: object = None, diversity: object = None
) -> tuple[Part, ...]:
    """Returns all parts of a buffer, in the order in which ``add`` calls them.

    Raises:
        ValueError: If ``parts`` is not a sequence of parts, if there are two of one of the three
            classes, or if another argument is neither None nor of its class.
    """
    if not isinstance(parts, tuple | list):
        raise ValueError(f"parts is {checks.name_of(parts)}; expected a tuple of parts")
    chosen: list[Any] = []
    for name, value, kind, example in (
        ("episodes", episodes, Episodes, "jaxbuf.Episodes(...)"),
        ("freshness", freshness, Freshness, "jaxbuf.Freshness(max_use, ...)"),
        ("diversity", diversity, Diversity, "jaxbuf.Diversity(cutoff, ...)"),
    ):
        if value is not None:
            chosen.append(checks.check_kind(name, value, kind, f"None or {example}"))
    expected = "a part, which derives from jaxbuf.strategies.Part"
    for i, value in enumerate(cast("list[Any]", parts)):
        part = checks.check_kind(f"parts[{i}]", value, Part, expected)
        check_declared(part)
        _check_reasons(part)
        _check_hooks(part)
        chosen.append(part)
    for kind in (Episodes, Freshness, Diversity):
        if sum(isinstance(part, kind) for part in chosen) > 1:
            raise ValueError(f"there are two parts {kind.__name__}; pass one of them")
    return tuple(chosen)


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


# What buffers of version 0.3 called of every part, and what takes its place.
_FORMER_HOOKS = {
    "on_steps": "on_add",
    "refuse_windows": "refuse, which gets their slots as rows.completed",
    "init_windows": "init",
    "on_map": "on_write",
    "check_write": "on_write, which may raise an error",
    "on_clear_envs": "on_remove",
    **dict.fromkeys(
        ("on_use", "on_version", "uses_version", "retires", "on_clear"),
        "a class that derives from jaxbuf.Freshness",
    ),
}


def _check_hooks(part: Part) -> None:
    ours = next(kind for kind in type(part).__mro__ if kind.__module__.startswith("jaxbuf."))
    for name, other in _FORMER_HOOKS.items():
        if hasattr(part, name) and not hasattr(ours, name):
            raise ValueError(f"{part} has {name}, which no buffer calls any more; write {other}")


def check_version(version: object, session: object) -> tuple[Count, Count | None]:
    """Returns the learner's version and session as arrays.

    Raises:
        ValueError: If one of them is not an integer that fits int32.
    """
    version = check_numbers(version, "version", (), "a number")
    if session is None:
        return version, None
    return version, check_numbers(session, "session", (), "a number")


def check_version_used(freshness: Freshness | None, version: object, session: object) -> None:
    """Checks that versions and sessions are given only if the buffer limits staleness.

    Raises:
        ValueError: If one of them was given and nothing uses it.
    """
    if freshness is not None:
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

"""Changes of stored items: their fields, their scores, and which of them stay."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PyTree

from jaxbuf.buffers import common, retire
from jaxbuf.buffers.base import Base
from jaxbuf.core import checks, fields, storage, trees
from jaxbuf.core.collectives import vary_with
from jaxbuf.core.slots import Slots
from jaxbuf.core.sorting import keep_last
from jaxbuf.core.types import Function, State
from jaxbuf.occupancy.protocol import Occupancy
from jaxbuf.strategies.part import Part, Rows
from jaxbuf.strategies.protocols import Sampler

AnyBuffer = TypeVar("AnyBuffer", bound=Base)
# Returns what ``Part.on_write`` is told of rows of the storage: the slots, and the rows.
Told = Callable[[Int[Array, "..."], PyTree[Array]], tuple[Int[Array, "..."], Rows]]


def check_writable(
    parts: tuple[Part, ...], data: PyTree[Array], path: str | None, where: str, *, every: bool
) -> PyTree[Array]:
    """Returns the field of the storage that is to change.

    Raises:
        ValueError: If there is no such field, or a part does not allow that it changes.
    """
    field = fields.stored(data, path, where)
    for part in parts:
        part.check_write(path, data, every=every)
    return field


def follow(buffer: Base, states: tuple[State, ...], *told: Any) -> tuple[State, ...]:
    """Returns the states of the parts after ``on_write``, called with what they are told."""
    pairs = zip(buffer.extras, states, strict=True)
    return tuple(common.hear(part, "on_write", state, *told) for part, state in pairs)


def listens(parts: tuple[Part, ...]) -> bool:
    """Returns whether a part follows changes of fields, for which changed items are read."""
    return any(type(part).on_write is not Part.on_write for part in parts)


def map_field(
    buffer: Base,
    data: PyTree[Array],
    path: str | None,
    fn: Function,
    rows: int,
    some: Int[Array, ""],
    holds: Callable[[Int[Array, " B"]], Bool[Array, " B"]],
    told: Told,
) -> tuple[PyTree[Array], tuple[State, ...]]:
    """Changes a field of everything that is stored, ``rows`` items or steps at a time.

    Args:
        buffer: The buffer, of which only the parts are used.
        data: Its storage, leaves ``[N, ...]``.
        path: The field; None for whole items.
        fn: Returns the new values of items ``[B, ...]``.
        rows: The number of items for ``fn``.
        some: A row of the storage that holds an item, or a step, if any does.
        holds: Returns whether there is an item, or a step, in rows of the storage.
        told: What parts are told of rows of the storage.

    Returns:
        The storage, and the states of the parts.
    """
    field = fields.stored(data, path, "")
    size = jax.tree.leaves(data)[0].shape[0]
    heard = listens(buffer.extras)
    states: tuple[State, ...] = lax.stop_gradient(buffer.extra_states) if heard else ()
    # Where nothing is stored, ``fn`` gets this item once more, and never one of zeros: its result
    # is dropped, but a NaN in its gradient would not be.
    spare = jax.tree.map(lambda leaf: lax.dynamic_slice_in_dim(leaf, some, 1), data)

    # The number of rounds is static, since loops with another one have no gradients. A branch in
    # each of them would take longer than many a ``fn``, and so would a search for a spare item.
    def step(i: Array, carry: tuple[PyTree[Array], Any]) -> tuple[PyTree[Array], Any]:
        field, states = carry
        # The last round begins earlier, and leaves out the rows that were changed already.
        fresh = jnp.asarray(i, jnp.int32) * rows
        first = jnp.minimum(fresh, size - rows) if size % rows else fresh
        row = first + jnp.arange(rows, dtype=jnp.int32)
        there = holds(row) & (row >= fresh) if size % rows else holds(row)

        def part(leaf: Array) -> Array:
            return lax.dynamic_slice_in_dim(leaf, first, rows)

        old = jax.tree.map(part, fields.replace(data, path, field))
        new, _ = storage.check(field, fn(trees.choose(there, old, spare)), "fn(items)", (rows,))
        new = trees.choose(there, new, fields.stored(old, path, ""))
        field = jax.tree.map(
            lambda leaf, rows: lax.dynamic_update_slice_in_dim(leaf, rows, first, 0), field, new
        )
        if heard:
            items = jax.tree.map(part, lax.stop_gradient(fields.replace(data, path, field)))
            states = follow(buffer, states, *told(jnp.where(there, row, size), items), path)
        return field, states

    begin = vary_with((field, states), data, buffer.occupancy)
    field, states = lax.cond(
        holds(some[None])[0],
        lambda: lax.fori_loop(0, -(-size // rows), step, begin),
        lambda: begin,
    )
    return fields.replace(data, path, field), states if heard else buffer.extra_states


def update_score(
    buffer: AnyBuffer, slots: Slots, score: Float[Array, " B"], mask: Bool[Array, " B"]
) -> tuple[AnyBuffer, Bool[Array, " B"]]:
    """Sets scores; returns the buffer, and a mask of the rows refused for a NaN."""
    taken = buffer.occupancy.holds(slots) & mask
    illegal = jnp.isnan(score)
    index = jnp.where(taken & ~illegal, slots.index, buffer.capacity)
    score = jnp.where(illegal, 0.0, score)
    states = lax.stop_gradient((buffer.sampler_state, buffer.extra_states))
    told = states[0]
    # Samplers find the last of several rows for an item themselves, as in ``update_priority``.
    if buffer.sampler.uses_score:
        told = common.hear(buffer.bound_sampler, "set_priority", told, index, score)
    index = keep_last(index, buffer.capacity)
    changed = buffer.replace(
        occupancy=buffer.occupancy.rescore(index, score),
        sampler_state=told,
        extra_states=tuple(
            common.hear(part, "on_score", state, index, score)
            for part, state in zip(buffer.extras, states[1], strict=True)
        ),
    )
    return changed, taken & illegal


def check_scores(sampler: Sampler, occupancy: Occupancy, users: list[object]) -> None:
    """Checks that scores can be changed.

    Args:
        sampler: The sampler.
        occupancy: The occupancy of the items.
        users: The strategies that use scores.

    Raises:
        ValueError: If no part uses scores, or one of them cannot change them.
    """
    if not users:
        other = ", or set priorities with update_priority" if sampler.uses_priority else ""
        raise ValueError(
            "update_score was called, but no part of this buffer uses scores; create an "
            f"ItemBuffer with evictor=jaxbuf.Lowest() or sampler=jaxbuf.Softmax(){other}"
        )
    for told in sampler.told:
        if told.uses_score and _is_default(told, Sampler, "set_priority"):
            raise ValueError(
                f"{told} cannot change scores; give it a method set_priority (see "
                "jaxbuf.strategies.Sampler)"
            )
    places = occupancy.places
    evicts = any(not isinstance(user, Part | Sampler) for user in users)
    if evicts and _is_default(places, Occupancy, "rescore"):
        raise ValueError(
            f"{type(places).__name__} cannot change scores; give it a method rescore (see "
            "jaxbuf.strategies.ItemOccupancy)"
        )


def _is_default(owner: object, base: type, method: str) -> bool:
    # The method is one that the base class has.
    return getattr(type(owner), method) is getattr(base, method)


def remove(buffer: AnyBuffer, slots: Slots, mask: Bool[Array, " B"]) -> tuple[AnyBuffer, Array]:
    """Takes items, or windows, out; returns the buffer and their number.

    Raises:
        ValueError: If no part of the buffer can remove items.
    """
    if not buffer.lets_remove:
        raise ValueError(
            "remove was called, but nothing removes items here; create the buffer with "
            "parts=(jaxbuf.Removable(),)"
        )
    taken = buffer.occupancy.holds(slots) & mask
    return retire.take_out(buffer, jnp.where(taken, slots.index, buffer.capacity))


def probability(buffer: Base, index: Int[Array, " B"]) -> Float[Array, " B"]:
    """Returns the probability that a draw gives each of these live items; 0 if it is not known."""
    state = lax.stop_gradient(buffer.sampler_state)
    known = buffer.bound_sampler.probability(state, index, buffer.occupancy)
    return jnp.zeros(index.shape, jnp.float32) if known is None else known


def check_function(fn: object) -> Function:
    """Returns ``fn``, which must be a function.

    Raises:
        ValueError: If it cannot be called.
    """
    if not callable(fn):
        raise ValueError(f"fn is {checks.name_of(fn)}; expected a function of items [B, ...]")
    return fn

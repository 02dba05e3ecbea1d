"""Writes into fields of stored items, and checks before fields or scores change."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from jaxbuf.buffers import events
from jaxbuf.buffers.base import SampledBase
from jaxbuf.core import fields, storage, trees
from jaxbuf.core.types import Arrays, Function, State
from jaxbuf.core.versions import vary_with
from jaxbuf.occupancy.protocol import Occupancy
from jaxbuf.strategies.part import Part
from jaxbuf.strategies.protocols import Sampler


def check_writable(buffer: SampledBase, path: str | None, *, every: bool) -> Arrays:
    """Returns the field of the storage that is to change.

    Args:
        buffer: The buffer.
        path: The field; None for whole items.
        every: Whether the field of all items changes, as in ``map_field``.

    Raises:
        ValueError: If there is no such field, or ``Episodes`` does not allow that it changes.
    """
    field = fields.stored(buffer.data, path, f"{buffer.unit} have")
    if buffer.episodes is not None:
        buffer.episodes.check_write(path, buffer.data, every=every)
    return field


def notify_of_write(
    buffer: SampledBase,
    states: tuple[State, ...],
    row: Int[Array, "..."],
    items: Arrays,
    path: str | None,
) -> tuple[State, ...]:
    """Returns the states of the parts after their ``on_write``.

    Args:
        buffer: The buffer, of which only the parts and the places of rows are used.
        states: The states of the parts.
        row: The rows of the storage that were written; past the end for none.
        items: What they hold now, leaves ``[*row.shape, ...]``.
        path: The field that was written; None for whole items.
    """
    index, rows = buffer.for_parts(row, lax.stop_gradient(items))
    extras = zip(buffer.extras, states, strict=True)
    return tuple(events.notify(part.on_write, state, index, rows, path) for part, state in extras)


def follows_writes(extras: tuple[Part, ...]) -> bool:
    """Returns whether a part follows changes of fields, for which changed items are read."""
    return any(type(part).on_write is not Part.on_write for part in extras)


def map_field(
    buffer: SampledBase, path: str | None, fn: Function, batch_size: int
) -> tuple[Arrays, tuple[State, ...]]:
    """Changes a field of everything that is stored, ``batch_size`` items or steps at a time.

    Args:
        buffer: The buffer, with ``N`` rows of storage.
        path: The field; None for whole items.
        fn: Returns the new values of items ``[B, ...]``.
        batch_size: The number of items for ``fn``, ``B``; at most ``N``.

    Returns:
        The storage, and the states of the parts.
    """
    data, any_row = buffer.data, buffer.any_row()
    field, size = fields.stored(data, path, ""), buffer.capacity
    notified = follows_writes(buffer.extras)
    states: tuple[State, ...] = lax.stop_gradient(buffer.extra_states) if notified else ()
    # In place of empty slots, ``fn`` gets some stored item. Its result is dropped; of an item of
    # zeros, a NaN in the gradient would not be.
    spare = jax.tree.map(lambda leaf: lax.dynamic_slice_in_dim(leaf, any_row, 1), data)  # [1, ...]

    # The number of rounds is static, so that the loop has gradients. A branch in each round, or a
    # search for a spare item, may take longer than ``fn``.
    def step(i: Array, carry: tuple[Arrays, Any]) -> tuple[Arrays, Any]:
        field, states = carry
        # The last round begins earlier, and leaves out the rows that were changed already.
        begin = jnp.asarray(i, jnp.int32) * batch_size  # []
        start = jnp.minimum(begin, size - batch_size) if size % batch_size else begin  # []
        row = start + jnp.arange(batch_size, dtype=jnp.int32)  # [B]
        mask = buffer.holds_row(row)  # [B]
        mask = mask & (row >= begin) if size % batch_size else mask  # [B]

        def batch_of(leaf: Array) -> Array:
            return lax.dynamic_slice_in_dim(leaf, start, batch_size)

        old = jax.tree.map(batch_of, fields.replace(data, path, field))  # [B, ...]
        result = fn(trees.choose(mask, old, spare))
        new, _ = storage.check(field, result, "fn(items)", (batch_size,), computed=True)  # [B, ...]
        new = trees.choose(mask, new, fields.stored(old, path, ""))  # [B, ...]
        field = jax.tree.map(
            lambda leaf, rows: lax.dynamic_update_slice_in_dim(leaf, rows, start, 0), field, new
        )  # [N, ...]
        if notified:
            items = jax.tree.map(batch_of, fields.replace(data, path, field))  # [B, ...]
            states = notify_of_write(buffer, states, jnp.where(mask, row, size), items, path)
        return field, states

    carry = vary_with((field, states), data, buffer.occupancy)
    field, states = lax.cond(
        buffer.holds_row(any_row[None])[0],
        lambda: lax.fori_loop(0, -(-size // batch_size), step, carry),
        lambda: carry,
    )
    return fields.replace(data, path, field), states if notified else buffer.extra_states


def check_scores(buffer: SampledBase) -> None:
    """Checks that the scores of a buffer can be changed.

    Raises:
        ValueError: If no strategy uses scores, or one of them cannot change them.
    """
    if not buffer.score_users:
        other = ", or set priorities with update_priority" if buffer.sampler.uses_priority else ""
        raise ValueError(
            "update_score was called, but no part of this buffer uses scores; create an "
            f"ItemBuffer with evictor=jaxbuf.Lowest() or sampler=jaxbuf.Softmax(){other}"
        )
    for leaf in buffer.sampler.leaf_samplers:
        if leaf.uses_score and type(leaf).set_priority is Sampler.set_priority:
            raise ValueError(
                f"{leaf} cannot change scores; give it a method set_priority (see "
                "jaxbuf.strategies.Sampler)"
            )
    kind = type(buffer.occupancy.places)
    evicts = any(not isinstance(user, Part | Sampler) for user in buffer.score_users)
    if evicts and kind.rescore is Occupancy.rescore:
        raise ValueError(
            f"{kind.__name__} cannot change scores; give it a method rescore (see "
            "jaxbuf.strategies.ItemOccupancy)"
        )

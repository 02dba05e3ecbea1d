"""Retirement of items, which may be anywhere in a buffer: parts ask for it."""

import dataclasses
from typing import TypeVar

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from jaxbuf.buffers import events
from jaxbuf.buffers.arguments import check_slots
from jaxbuf.buffers.base import SampledBase
from jaxbuf.core import storage
from jaxbuf.core.collectives import vary_with
from jaxbuf.core.slots import Slots
from jaxbuf.core.types import Count, Flag, Function, Index, Integers, Mask, Word
from jaxbuf.occupancy.bitset import Bitset
from jaxbuf.occupancy.protocol import ItemOccupancy
from jaxbuf.occupancy.subset import Subset

# The number of stale items that retire at a time; each of them costs an update of every tree.
_ROWS = 256

AnyBuffer = TypeVar("AnyBuffer", bound=SampledBase)


def on_use(buffer: AnyBuffer, slots: Slots, mask: Mask) -> AnyBuffer:
    """Notifies all parts of uses of items, and retires the items that one of them returns."""
    for i, part in enumerate(buffer.extras):
        if part.counts_uses:
            before = lax.stop_gradient(buffer.extra_states[i])
            state, retired = part.on_use(before, slots.index, mask)
            state = events.check_state(part.on_use, before, state)
            buffer = buffer.with_state(i, state)
            if retired is not None:
                index = jnp.where(retired, slots.index, buffer.occupancy.capacity)
                buffer = _retire(buffer, i, index, "use")
    return buffer


def on_version(buffer: AnyBuffer, version: Count, session: Count | None) -> AnyBuffer:
    """Notifies all parts of a version, and retires the items that one of them returns."""
    size = buffer.occupancy.size
    # The loops do not carry the data of the items.
    without_data = lax.stop_gradient(dataclasses.replace(buffer, data=()))
    for i, part in enumerate(buffer.extras):
        if part.uses_version:
            state = without_data.extra_states[i]
            state = events.notify(part.on_version, state, version, session, size)
            without_data = _retire_stale(without_data.with_state(i, state), i)
    return dataclasses.replace(without_data, data=buffer.data)


def remove_all(buffer: AnyBuffer, mask: Bool[Array, " N"]) -> tuple[AnyBuffer, Word]:
    """Removes the items in these slots; returns the number of them as well."""
    slots = jnp.arange(mask.shape[0], dtype=jnp.int32)
    without_data = lax.stop_gradient(dataclasses.replace(buffer, data=()))
    after = _in_rounds(without_data, slots, mask, lambda buffer, index: remove(buffer, index)[0])
    count = (buffer.occupancy.size - after.occupancy.size).astype(jnp.uint32)
    return dataclasses.replace(after, data=buffer.data), count


def lacking(method: str) -> ValueError:
    """Returns the error of a method for which a part has to count uses, or to know versions."""
    return ValueError(
        f"{method} was called, but nothing limits uses or staleness here; create the buffer with "
        "freshness=jaxbuf.Freshness(...)"
    )


def known(buffer: SampledBase, name: str, slots: Slots) -> Integers:
    """Returns a number that a part keeps for each item, by its name; 0 for stale slots.

    Raises:
        ValueError: If no part keeps it.
    """
    slots = check_slots(slots)
    live = buffer.occupancy.holds(slots)
    for part, state in zip(buffer.extras, buffer.extra_states, strict=True):
        numbers = part.known(state, slots.index)
        if name in numbers:
            return jnp.where(live, numbers[name], jnp.zeros_like(numbers[name]))
    raise lacking(name)


def _retire_stale(buffer: AnyBuffer, i: int) -> AnyBuffer:
    """Retires the items that part ``i`` returns, and asks it as long as there can be any."""
    part = buffer.extras[i]
    if part.may_retire(buffer.extra_states[i]) is None:
        return buffer

    def may_retire(buffer: AnyBuffer) -> Flag:
        return part.may_retire(buffer.extra_states[i])  # pyright: ignore[reportReturnType]

    def retire(buffer: AnyBuffer) -> AnyBuffer:
        found = part.retires(buffer.extra_states[i])
        if not isinstance(found, tuple):
            found = jnp.arange(found.shape[0], dtype=jnp.int32), found
        slots, stale = found
        assert isinstance(buffer.occupancy, Subset)
        buffer = _retire_all(buffer, i, slots, stale & buffer.occupancy.members.get(slots))
        return buffer.with_state(i, events.notify(part.looked, buffer.extra_states[i]))

    # XLA updates what a loop carries in place.
    return lax.while_loop(may_retire, retire, vary_with(buffer, buffer))


def _retire_all(
    buffer: AnyBuffer, i: int, slots: Int[Array, " C"], stale: Bool[Array, " C"]
) -> AnyBuffer:
    """Retires the ``stale`` ones among the items in these slots."""
    return _in_rounds(
        buffer, slots, stale, lambda buffer, index: _retire(buffer, i, index, "version")
    )


def _in_rounds(
    buffer: AnyBuffer, slots: Int[Array, " C"], mask: Bool[Array, " C"], change: Function
) -> AnyBuffer:
    """Returns the buffer after ``change(buffer, index)`` of the slots, a fixed number at a time."""
    chosen = Bitset.of(mask)

    def is_left(carry: tuple[Array, AnyBuffer]) -> Flag:
        return carry[0] < chosen.size

    def change_some(carry: tuple[Array, AnyBuffer]) -> tuple[Array, AnyBuffer]:
        count, buffer = carry
        rank = count + jnp.arange(_ROWS, dtype=jnp.int32)
        index = storage.select(chosen.at(rank), slots)
        index = jnp.where(rank < chosen.size, index, buffer.occupancy.capacity)
        return count + _ROWS, change(buffer, index)

    carry = vary_with((jnp.int32(0), buffer), chosen.size)
    return lax.while_loop(is_left, change_some, carry)[1]


def _retire(buffer: AnyBuffer, i: int, index: Index, event: str) -> AnyBuffer:
    """Removes the items in these slots, and notifies part ``i``, which has asked for it."""
    buffer, count = remove(buffer, index)
    part, before = buffer.extras[i], buffer.extra_states[i]
    after = part.on_retire(before, index, count, event=event)
    return buffer.with_state(i, events.check_state(part.on_retire, before, after))


def remove(buffer: AnyBuffer, index: Index) -> tuple[AnyBuffer, Word]:
    """Removes the items in these slots, and notifies the sampler and all parts.

    A slot may occur several times, or hold no item; slots past the end are ignored.

    Returns:
        The buffer, and the number of items that were removed.
    """
    before = buffer.occupancy
    assert isinstance(before, Subset)
    occupancy = before.exclude(index)
    if isinstance(occupancy.inner, ItemOccupancy):
        occupancy = occupancy.replace(inner=occupancy.inner.demote(index))
    buffer = events.apply_change(buffer, occupancy, removed=index)
    return buffer, (before.size - occupancy.size).astype(jnp.uint32)

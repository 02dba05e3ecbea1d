"""Retirement of items, which may be anywhere in a buffer: ``Freshness`` asks for it."""

import dataclasses
from typing import TypeVar

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from jaxbuf.buffers import events
from jaxbuf.buffers.arguments import check_slots
from jaxbuf.buffers.base import SampledBase
from jaxbuf.core import storage
from jaxbuf.core.slots import Slots
from jaxbuf.core.types import Count, Flag, Function, Index, Integers, Mask, Word
from jaxbuf.core.versions import vary_with
from jaxbuf.occupancy.bitset import Bitset
from jaxbuf.occupancy.protocol import ItemOccupancy
from jaxbuf.occupancy.subset import Subset
from jaxbuf.strategies.freshness import Freshness

# The number of stale items that retire at a time; each of them costs an update of every tree.
_ROWS = 256

AnyBuffer = TypeVar("AnyBuffer", bound=SampledBase)


def on_use(buffer: AnyBuffer, slots: Slots, mask: Mask) -> AnyBuffer:
    """Counts uses of items, and retires the items that ``Freshness`` returns."""
    limits, before = buffer.freshness, lax.stop_gradient(buffer.freshness_state)
    state, retired = limits.on_use(before, slots.index, mask)
    buffer = buffer.with_state(Freshness, events.check_state(limits.on_use, before, state))
    if retired is None:
        return buffer
    return _retire(buffer, jnp.where(retired, slots.index, buffer.occupancy.capacity), "use")


def on_version(buffer: AnyBuffer, version: Count, session: Count | None) -> AnyBuffer:
    """Sets the learner's version, and retires the items that are too stale for it."""
    # The loops do not carry the data of the items.
    without_data = lax.stop_gradient(dataclasses.replace(buffer, data=()))
    limits, state = buffer.freshness, without_data.freshness_state
    state = events.notify(limits.on_version, state, version, session)
    without_data = _retire_stale(without_data.with_state(Freshness, state))
    return dataclasses.replace(without_data, data=buffer.data)


def remove_all(buffer: AnyBuffer, mask: Bool[Array, " N"]) -> tuple[AnyBuffer, Word]:
    """Removes the items in these slots; returns the number of them as well."""
    slots = jnp.arange(mask.shape[0], dtype=jnp.int32)
    without_data = lax.stop_gradient(dataclasses.replace(buffer, data=()))
    after = _in_rounds(without_data, slots, mask, lambda buffer, index: remove(buffer, index)[0])
    count = (buffer.occupancy.size - after.occupancy.size).astype(jnp.uint32)
    return dataclasses.replace(after, data=buffer.data), count


def lacking(method: str) -> ValueError:
    """Returns the error of a method for which ``Freshness`` has to count uses, or know versions."""
    return ValueError(
        f"{method} was called, but nothing limits uses or staleness here; create the buffer with "
        "freshness=jaxbuf.Freshness(...)"
    )


def uses_and_staleness(buffer: SampledBase, slots: Slots, method: str) -> tuple[Integers, Integers]:
    """Returns the uses of each item, and its staleness in versions; 0 for stale slots.

    Raises:
        ValueError: If the buffer has no ``Freshness``; the message names the ``method``.
    """
    slots = check_slots(slots)
    if buffer.freshness is None:
        raise lacking(method)
    live, state = buffer.occupancy.holds(slots), buffer.freshness_state
    version, uses = buffer.freshness.read(state, slots.index)
    return jnp.where(live, uses, 0), jnp.where(live, state.version - version, 0)


def _retire_stale(buffer: AnyBuffer) -> AnyBuffer:
    """Retires the items that ``Freshness`` returns, and asks it as long as there can be any."""
    limits = buffer.freshness

    def may_retire(buffer: AnyBuffer) -> Flag:
        return limits.may_retire(buffer.freshness_state)

    def retire_some(buffer: AnyBuffer) -> AnyBuffer:
        slots, stale = limits.retires(buffer.freshness_state)
        assert isinstance(buffer.occupancy, Subset)
        stale &= buffer.occupancy.members.get(slots)
        buffer = _in_rounds(
            buffer, slots, stale, lambda buffer, index: _retire(buffer, index, "version")
        )
        return buffer.with_state(
            Freshness, events.notify(limits.with_bounds, buffer.freshness_state)
        )

    # XLA updates what a loop carries in place.
    return lax.while_loop(may_retire, retire_some, vary_with(buffer, buffer))


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


def _retire(buffer: AnyBuffer, index: Index, event: str) -> AnyBuffer:
    """Removes the items in these slots, and notifies ``Freshness``, which has asked for it."""
    buffer, count = remove(buffer, index)
    limits, before = buffer.freshness, buffer.freshness_state
    after = limits.on_retire(before, index, count, event=event)
    return buffer.with_state(Freshness, events.check_state(limits.on_retire, before, after))


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

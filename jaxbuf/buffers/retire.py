"""Retirement of items, which may be anywhere in a buffer: parts ask for it."""

import dataclasses
from typing import TypeVar

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int, UInt

from jaxbuf.buffers import common
from jaxbuf.buffers.base import Base
from jaxbuf.core import storage
from jaxbuf.core.collectives import vary_with
from jaxbuf.core.slots import Slots
from jaxbuf.occupancy.bitset import Bitset
from jaxbuf.occupancy.protocol import ItemOccupancy
from jaxbuf.occupancy.subset import Subset

# The number of items found in one look at all slots that retire at a time; each of them costs an
# update of every tree.
_ROWS = 256
# The end of errors of methods that need a part which hears of uses and versions.
MISSING = (
    "nothing limits uses or staleness here; create the buffer with freshness=jaxbuf.Freshness(...)"
)

AnyBuffer = TypeVar("AnyBuffer", bound=Base)


def on_use(buffer: AnyBuffer, slots: Slots, taken: Bool[Array, " B"]) -> AnyBuffer:
    """Tells all parts of uses of items, and retires the items that one of them returns."""
    for i, part in enumerate(buffer.extras):
        if part.counts_uses:
            before = lax.stop_gradient(buffer.extra_states[i])
            state, gone = part.on_use(before, slots.index, taken)
            state = common.check_state(part, "on_use", before, state)
            buffer = buffer.with_state(i, state)
            if gone is not None:
                nowhere = buffer.occupancy.capacity
                buffer = _retire(buffer, i, jnp.where(gone, slots.index, nowhere), "use")
    return buffer


def on_version(
    buffer: AnyBuffer, version: Int[Array, ""], session: Int[Array, ""] | None
) -> AnyBuffer:
    """Tells all parts of the learner's version, and retires the items that one of them returns."""
    size = buffer.occupancy.size
    # The loops do not carry the data of the items.
    bare = lax.stop_gradient(dataclasses.replace(buffer, data=()))
    for i, part in enumerate(bare.extras):
        if part.uses_version:
            state = common.hear(part, "on_version", bare.extra_states[i], version, session, size)
            bare = _look(bare.with_state(i, state), i)
    return dataclasses.replace(bare, data=buffer.data)


def check_version(version: object, session: object) -> tuple[Int[Array, ""], Int[Array, ""] | None]:
    """Returns the learner's version and session as arrays.

    Raises:
        ValueError: If one of them is not an integer that fits int32.
    """
    now = storage.check_rows(version, "version", (), np.int32, "a number")
    if session is None:
        return now, None
    return now, storage.check_rows(session, "session", (), np.int32, "a number")


def known(buffer: Base, name: str, slots: Slots) -> Int[Array, " B"]:
    """Returns what a part knows of items by this name; 0 if an item has left.

    Raises:
        ValueError: If no part knows it.
    """
    slots = common.check_slots(slots)
    here = buffer.occupancy.holds(slots)
    for part, state in zip(buffer.extras, buffer.extra_states, strict=True):
        values = part.known(state, slots.index)
        if name in values:
            return jnp.where(here, values[name], jnp.zeros_like(values[name]))
    raise ValueError(f"{name} was called, but {MISSING}")


def _look(buffer: AnyBuffer, i: int) -> AnyBuffer:
    """Retires the items that part ``i`` returns, and asks it only if there can be any."""
    part = buffer.extras[i]
    if part.may_retire(buffer.extra_states[i]) is None:
        return buffer

    def some(buffer: AnyBuffer) -> Bool[Array, ""]:
        return part.may_retire(buffer.extra_states[i])  # pyright: ignore[reportReturnType]

    def look(buffer: AnyBuffer) -> AnyBuffer:
        found = _members(buffer).where(part.retires(buffer.extra_states[i]))
        buffer = _retire_all(buffer, i, found)
        return buffer.with_state(i, common.hear(part, "looked", buffer.extra_states[i]))

    # This loop has at most one round. XLA updates what it carries in place.
    return lax.while_loop(some, look, vary_with(buffer, buffer))


def _retire_all(buffer: AnyBuffer, i: int, found: Bitset) -> AnyBuffer:
    """Retires the items that part ``i`` has ``found``, a fixed number at a time."""

    def some_left(carry: tuple[Array, AnyBuffer]) -> Bool[Array, ""]:
        return carry[0] < found.size

    def retire_some(carry: tuple[Array, AnyBuffer]) -> tuple[Array, AnyBuffer]:
        first, buffer = carry
        rank = first + jnp.arange(_ROWS, dtype=jnp.int32)
        gone = jnp.where(rank < found.size, found.at(rank), found.capacity)
        return first + _ROWS, _retire(buffer, i, gone, "version")

    begin = vary_with((jnp.int32(0), buffer), found.size)
    return lax.while_loop(some_left, retire_some, begin)[1]


def _retire(buffer: AnyBuffer, i: int, gone: Int[Array, " B"], event: str) -> AnyBuffer:
    """Retires the items in slots ``gone``, and tells part ``i``, which has asked for it."""
    buffer, count = take_out(buffer, gone)
    part, before = buffer.extras[i], buffer.extra_states[i]
    after = part.on_retire(before, gone, count, event=event)
    return buffer.with_state(i, common.check_state(part, "on_retire", before, after))


def take_out(buffer: AnyBuffer, gone: Int[Array, " B"]) -> tuple[AnyBuffer, UInt[Array, ""]]:
    """Takes the items in slots ``gone`` out of a buffer, and tells the sampler and all parts.

    A slot may occur several times, or hold no item; slots past the end are ignored.

    Returns:
        The buffer, and the number of items that left.
    """
    before = buffer.occupancy
    assert isinstance(before, Subset)
    occupancy = before.exclude(gone)
    if isinstance(occupancy.inner, ItemOccupancy):
        occupancy = occupancy.replace(inner=occupancy.inner.demote(gone))
    left = common.change(buffer, occupancy, removed=gone)
    return left, (before.size - occupancy.size).astype(jnp.uint32)


def _members(buffer: Base) -> Bitset:
    assert isinstance(buffer.occupancy, Subset)
    return buffer.occupancy.members

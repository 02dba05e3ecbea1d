"""Retirement of items, which may be anywhere in a buffer."""

from typing import TYPE_CHECKING, TypeVar

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int, UInt

from jaxbuf.buffers import common
from jaxbuf.core import storage
from jaxbuf.core.slots import Slots
from jaxbuf.core.varying import vary_with
from jaxbuf.occupancy.bitset import Bitset
from jaxbuf.occupancy.protocol import ItemOccupancy
from jaxbuf.occupancy.subset import Subset
from jaxbuf.strategies.freshness import Freshness

if TYPE_CHECKING:
    from jaxbuf.buffers.body import Body

# The number of stale items that retire at a time; each of them costs an update of every tree.
_ROWS = 256

AnyBuffer = TypeVar("AnyBuffer", bound="Body")


def mark_used(buffer: AnyBuffer, freshness: Freshness, slots: Slots, mask: object) -> AnyBuffer:
    """Implements ``mark_used`` of the buffers."""
    slots = common.check_slots(slots)
    if slots.index.size == 0:
        return buffer
    if mask is not None:
        mask = storage.check_rows(mask, "mask", slots.index.shape, np.bool_, "that of slots")
    taken = buffer.occupancy.holds(slots)
    if mask is not None:
        taken &= mask
    state, enough = freshness.used(buffer.freshness_state, slots.index, taken)
    buffer = buffer.with_state(Freshness, state)
    if freshness.max_use is None:
        return buffer
    gone = jnp.where(enough, slots.index, buffer.occupancy.capacity)
    return _retire(buffer, gone, "retired_used")


def set_version(
    buffer: AnyBuffer, freshness: Freshness, version: object, session: object
) -> AnyBuffer:
    """Implements ``set_version`` of the buffers."""
    now, run = check_version(version, session)
    before, size = buffer.freshness_state, buffer.occupancy.size
    state = freshness.at_version(freshness.noted(before, size, before.version), now, run)

    # The loop does not carry the data of the items.
    bare = lax.stop_gradient(buffer.with_state(Freshness, state).replace(data=()))
    bare = _retire_stale(bare, freshness)
    if run is not None:
        left_at = jnp.where(run == before.session, now, before.version)
        state = freshness.noted(bare.freshness_state, bare.occupancy.size, left_at)
        bare = bare.with_state(Freshness, state)
    return bare.replace(data=buffer.data)


def check_version(version: object, session: object) -> tuple[Int[Array, ""], Int[Array, ""] | None]:
    """Returns the learner's version and session as arrays.

    Raises:
        ValueError: If one of them is not an integer that fits int32.
    """
    now = storage.check_rows(version, "version", (), np.int32, "a number")
    if session is None:
        return now, None
    return now, storage.check_rows(session, "session", (), np.int32, "a number")


def uses_and_staleness(buffer: "Body", slots: Slots) -> tuple[Int[Array, " B"], Int[Array, " B"]]:
    """Returns the uses and the staleness of items; 0 if an item has left."""
    slots = common.check_slots(slots)
    assert buffer.freshness is not None
    state = buffer.freshness_state
    version, uses = buffer.freshness.look(state, slots.index)
    here = buffer.occupancy.holds(slots)
    return jnp.where(here, uses, 0), jnp.where(here, state.version - version, 0)


def _retire_stale(buffer: AnyBuffer, freshness: Freshness) -> AnyBuffer:
    """Retires the stale items, and looks for them only if there can be any."""

    def look(buffer: AnyBuffer) -> AnyBuffer:
        state = buffer.freshness_state
        stale = state.versions < freshness.floor(state.version)
        buffer = _retire_all(buffer, freshness, _members(buffer).where(stale))
        return buffer.with_state(Freshness, freshness.looked(buffer.freshness_state))

    # This loop has at most one round. XLA updates what it carries in place.
    return lax.while_loop(
        lambda buffer: freshness.some_stale(buffer.freshness_state),
        look,
        vary_with(buffer, buffer),
    )


def _retire_all(buffer: AnyBuffer, freshness: Freshness, found: Bitset) -> AnyBuffer:
    """Retires the items that were ``found``, a fixed number at a time."""

    def some_left(carry: tuple[Array, AnyBuffer]) -> Bool[Array, ""]:
        return carry[0] < found.size

    def retire_some(carry: tuple[Array, AnyBuffer]) -> tuple[Array, AnyBuffer]:
        first, buffer = carry
        rank = first + jnp.arange(_ROWS, dtype=jnp.int32)
        gone = jnp.where(rank < found.size, found.at(rank), found.capacity)
        buffer = _retire(buffer, gone, "retired_stale")
        # These versions are not needed any more. Writing them shows XLA that all versions have been
        # read before they change.
        state = freshness.retired(buffer.freshness_state, gone)
        return first + _ROWS, buffer.with_state(Freshness, state)

    begin = vary_with((jnp.int32(0), buffer), found.size)
    return lax.while_loop(some_left, retire_some, begin)[1]


def _retire(buffer: AnyBuffer, gone: Int[Array, " B"], counter: str) -> AnyBuffer:
    """Retires the items in slots ``gone``, and adds their number to a counter of ``Freshness``."""
    buffer, count = take_out(buffer, gone)
    return buffer.with_state(Freshness, buffer.freshness_state.more(**{counter: count}))


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
    states = lax.stop_gradient((buffer.sampler_state, buffer.extra_states))
    nothing = jnp.zeros((0,), jnp.int32)
    left = buffer.replace(
        occupancy=occupancy,
        sampler_state=common.hear(buffer.sampler, "on_change", states[0], nothing, None, gone),
        extra_states=tuple(
            common.hear(part, "on_remove", state, gone)
            for part, state in zip(buffer.extras, states[1], strict=True)
        ),
    )
    return left, (before.size - occupancy.size).astype(jnp.uint32)


def _members(buffer: "Body") -> Bitset:
    assert isinstance(buffer.occupancy, Subset)
    return buffer.occupancy.members

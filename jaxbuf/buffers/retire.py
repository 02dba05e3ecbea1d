"""Retirement of items, which may be anywhere in a buffer."""

from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int

from jaxbuf.buffers import common
from jaxbuf.core import storage, trees
from jaxbuf.core.slots import Slots
from jaxbuf.core.varying import vary_with
from jaxbuf.occupancy.bitset import Bitset
from jaxbuf.occupancy.protocol import ItemOccupancy
from jaxbuf.occupancy.subset import Subset
from jaxbuf.strategies.freshness import Freshness, FreshnessState
from jaxbuf.strategies.protocols import Sampler

if TYPE_CHECKING:
    from jaxbuf.buffers.body import Body

# The number of stale items that retire at a time; each of them costs an update of every tree.
_ROWS = 256

# The state of the sampler, the live items, and the state of ``Freshness``.
_Parts: TypeAlias = tuple[Any, Subset, FreshnessState]
AnyBuffer = TypeVar("AnyBuffer", bound="Body")


def mark_used(buffer: AnyBuffer, freshness: Freshness, slots: Slots, mask: Any) -> AnyBuffer:
    """Implements ``mark_used`` of the buffers."""
    common.check_slots(slots)
    if slots.index.size == 0:
        return buffer
    taken = buffer.occupancy.holds(slots)
    if mask is not None:
        taken &= storage.check_rows(mask, "mask", slots.index.shape, np.bool_, "that of slots")
    sampler_state, occupancy, state = _parts(buffer)
    state, enough = freshness.used(state, slots.index, taken)
    parts = (sampler_state, occupancy, state)
    if freshness.max_use is None:
        return buffer.with_state(Freshness, state)
    gone = jnp.where(enough, slots.index, occupancy.capacity)
    return _with(buffer, _retire(buffer.sampler, parts, gone, "retired_used"), gone)


def set_version(buffer: AnyBuffer, freshness: Freshness, version: Any, session: Any) -> AnyBuffer:
    """Implements ``set_version`` of the buffers."""
    before = buffer.freshness_state
    now = storage.check_rows(version, "version", (), np.int32, "a number")
    run: Any = None
    if session is not None:
        run = storage.check_rows(session, "session", (), np.int32, "a number")
    sampler_state, occupancy, state = _parts(buffer)
    state = freshness.noted(state, occupancy.size, before.version)
    state = freshness.at_version(state, now, run)
    stale = occupancy.members.mask & (state.versions < freshness.floor(now))

    # The loop carries only these parts, and not the data of the items.
    parts = _retire_all(buffer.sampler, freshness, (sampler_state, occupancy, state), stale)
    if run is not None:
        sampler_state, occupancy, state = parts
        left_at = jnp.where(run == before.session, now, before.version)
        parts = sampler_state, occupancy, freshness.noted(state, occupancy.size, left_at)
    slot = jnp.arange(stale.shape[0], dtype=jnp.int32)
    return _with(buffer, parts, jnp.where(stale, slot, stale.shape[0]))


def uses_and_staleness(buffer: "Body", slots: Slots) -> tuple[Int[Array, " B"], Int[Array, " B"]]:
    """Returns the uses and the staleness of items; 0 if an item has left."""
    buffer = trees.on_device(buffer)
    assert buffer.freshness is not None
    common.check_slots(slots)
    state = buffer.freshness_state
    version, uses = buffer.freshness.look(state, slots.index)
    here = buffer.occupancy.holds(slots)
    return jnp.where(here, uses, 0), jnp.where(here, state.version - version, 0)


def _parts(buffer: "Body") -> _Parts:
    assert isinstance(buffer.occupancy, Subset)
    return lax.stop_gradient(buffer.sampler_state), buffer.occupancy, buffer.freshness_state


def _with(buffer: AnyBuffer, parts: _Parts, gone: Int[Array, " R"]) -> AnyBuffer:
    """Returns the buffer with these parts, and tells its other parts which slots are gone."""
    sampler_state, occupancy, state = parts
    states = [
        state if isinstance(part, Freshness) else part.on_remove(kept, gone)
        for part, kept in zip(buffer.extras, buffer.extra_states, strict=True)
    ]
    return buffer.replace(
        sampler_state=sampler_state, occupancy=occupancy, extra_states=tuple(states)
    )


def _retire_all(
    sampler: Sampler, freshness: Freshness, parts: _Parts, stale: Bool[Array, " N"]
) -> _Parts:
    """Retires the items that are ``stale``, a fixed number at a time."""
    found = Bitset.of(stale)

    def some_left(carry: tuple[Array, _Parts]) -> Bool[Array, ""]:
        return carry[0] < found.size

    def retire_some(carry: tuple[Array, _Parts]) -> tuple[Array, _Parts]:
        first, parts = carry
        rank = first + jnp.arange(_ROWS, dtype=jnp.int32)
        gone = jnp.where(rank < found.size, found.at(rank), parts[1].capacity)
        sampler_state, members, state = _retire(sampler, parts, gone, "retired_stale")
        # These versions are not needed any more. Writing them shows XLA that all versions have been
        # read before they change.
        return first + _ROWS, (sampler_state, members, freshness.retired(state, gone))

    begin = vary_with((jnp.int32(0), parts), found.size)
    return lax.while_loop(some_left, retire_some, begin)[1]


def _retire(sampler: Sampler, parts: _Parts, gone: Int[Array, " B"], counter: str) -> _Parts:
    """Retires the items in slots ``gone``, and adds their number to a counter.

    A slot may occur several times, or hold no item; slots past the end are ignored.
    """
    sampler_state, before, state = parts
    occupancy = before.exclude(gone)
    if isinstance(occupancy.inner, ItemOccupancy):
        occupancy = occupancy.replace(inner=occupancy.inner.demote(gone))
    retired = (before.size - occupancy.size).astype(jnp.uint32)
    return sampler.remove(sampler_state, gone), occupancy, state.more(**{counter: retired})

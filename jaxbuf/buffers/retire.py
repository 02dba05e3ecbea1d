"""Taking items out of the middle of a buffer."""

from typing import TYPE_CHECKING, Any, Self, TypeAlias

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

# How many stale items retire at a time, each of which costs a path of every tree.
_ROWS = 256

# The sampler's state, which items there are, and what is known of their uses and versions.
_Parts: TypeAlias = tuple[Any, Subset, FreshnessState]


class Retiring:
    """A buffer whose items, or windows, may retire before they are overwritten.

    Attributes:
        occupancy: Which slots are live; a ``Subset`` with ``Freshness``.
        sampler_state: What the sampler keeps.
        sampler: How items are drawn.
        freshness_state: What is known of uses and versions; nothing without limits on them.
        freshness: When items retire; None never.
    """

    occupancy: Any
    sampler_state: Any
    sampler: Any
    freshness_state: Any
    freshness: Freshness | None

    if TYPE_CHECKING:
        # The buffers are flax dataclasses; these are theirs.
        replace: Any

        @property
        def capacity(self) -> int:
            """Most items, or steps, held at a time."""
            ...

    def mark_used(self, slots: Slots, *, mask: Bool[Array, " B"] | None = None) -> Self:
        """Count a use of each sampled item, or window; those used ``max_use`` times retire.

        Args:
            slots: Which items: ``sample.slots``, ``[B]``. One that is there twice was used twice.
                Rows whose item has been overwritten or has retired since are dropped.
            mask: Which rows to take, ``[B]``.

        Raises:
            ValueError: When traced, if the buffer has no ``Freshness``, or a shape differs.
        """
        freshness = self._needs_freshness("mark_used")
        self = common.check_single(self)
        common.check_slots(slots)
        if slots.index.size == 0:
            return self
        taken = self.occupancy.holds(slots)
        if mask is not None:
            taken &= storage.check_rows(mask, "mask", slots.index.shape, np.bool_, "that of slots")
        state, enough = freshness.used(self.freshness_state, slots.index, taken)
        parts = (lax.stop_gradient(self.sampler_state), self.occupancy, state)
        if freshness.max_use is not None:
            gone = jnp.where(enough, slots.index, self.occupancy.capacity)
            parts = self._retire(parts, gone, 1)
        return self._with(parts)

    def set_version(
        self, version: int | Int[Array, ""], session: int | Int[Array, ""] | None = None
    ) -> Self:
        """The learner is at this version now: what has become too stale retires.

        Args:
            version: Its version, an integer that fits int32; usually one more than before.
            session: Which run of the learner this is, if that matters: when it is another one than
                before, versions start over, and everything that is here retires.

        Raises:
            ValueError: When traced, if the buffer has no ``Freshness``, or one of the two is not
                an integer that fits int32.
        """
        freshness = self._needs_freshness("set_version")
        self = common.check_single(self)
        before = self.freshness_state
        now = storage.check_rows(version, "version", (), np.int32, "a number")
        run = before.session
        if session is not None:
            run = storage.check_rows(session, "session", (), np.int32, "a number")
        state = self._noted(before, self.occupancy, before.version)
        state = freshness.at_version(state, now, run)
        floor, left_at = freshness.floor(now), None
        if session is not None:
            same = run == before.session
            floor = jnp.where(same, floor, 2**31 - 1)
            left_at = jnp.where(same, now, before.version)
            unborn = self._incomplete(~same)
            if unborn is not None:
                state = freshness.abandoned(state, unborn)

        # The items themselves stay out of the loop.
        parts = (lax.stop_gradient(self.sampler_state), self.occupancy, state)
        parts = self._retire_stale(parts, floor)
        if left_at is not None:
            parts = (*parts[:2], self._noted(parts[2], parts[1], left_at))
        return self._with(parts)

    def use_count(self, slots: Slots) -> Int[Array, " B"]:
        """How often each sampled item was used so far, ``[B]``; 0 where it is not here any more.

        Raises:
            ValueError: If the buffer has no ``Freshness``.
        """
        self._needs_freshness("use_count")
        return uses_and_staleness(self, slots)[0]

    def staleness(self, slots: Slots) -> Int[Array, " B"]:
        """How many versions each sampled item is behind, ``[B]``; 0 where it is not here any more.

        Raises:
            ValueError: If the buffer has no ``Freshness``.
        """
        self._needs_freshness("staleness")
        return uses_and_staleness(self, slots)[1]

    def _refuse_versions(self, version: Any, session: Any) -> None:
        """Refuse versions and sessions where none are kept."""
        for name, value in (("version", version), ("session", session)):
            if value is not None:
                raise ValueError(
                    f"{name} was given, but nothing uses it; leave it out or create the buffer "
                    "with freshness=jaxbuf.Freshness(...)"
                )

    def _needs_freshness(self, what: str) -> Freshness:
        if self.freshness is None:
            raise ValueError(
                f"{what} was called, but nothing limits uses or staleness here; create the buffer "
                "with freshness=jaxbuf.Freshness(...)"
            )
        return self.freshness

    def _incomplete(self, wanted: Bool[Array, ""]) -> Int[Array, " B"] | None:
        """Slots whose item is not complete yet, if they are ``wanted``; None where none can be."""
        del wanted
        return None

    def _noted(
        self, state: FreshnessState, occupancy: Subset, version: Int[Array, ""]
    ) -> FreshnessState:
        """The state when all that came or left by now did so at this version of the learner's."""
        del occupancy, version
        return state

    def _with(self, parts: _Parts) -> Self:
        sampler_state, occupancy, state = parts
        return self.replace(sampler_state=sampler_state, occupancy=occupancy, freshness_state=state)

    def _retire_stale(self, parts: _Parts, floor: Int[Array, ""]) -> _Parts:
        """What is kept without the items of versions below ``floor``: one pass finds them."""
        freshness, (_, occupancy, state) = self._needs_freshness("set_version"), parts
        stale = Bitset.of(occupancy.members.mask & (state.versions < floor))

        def some_left(carry: tuple[Array, _Parts]) -> Bool[Array, ""]:
            return carry[0] < stale.size

        def retire_some(carry: tuple[Array, _Parts]) -> tuple[Array, _Parts]:
            first, parts = carry
            rank = first + jnp.arange(_ROWS, dtype=jnp.int32)
            gone = jnp.where(rank < stale.size, stale.at(rank), occupancy.capacity)
            sampler_state, members, state = self._retire(parts, gone, 2)
            # Nobody asks for these versions again, but XLA sees that all have been looked up before
            # others are written.
            return first + _ROWS, (sampler_state, members, freshness.retired(state, gone))

        begin = vary_with((jnp.int32(0), parts), stale.size)
        return lax.while_loop(some_left, retire_some, begin)[1]

    def _retire(self, parts: _Parts, gone: Int[Array, " B"], counter: int) -> _Parts:
        """What is kept without the items of slots ``gone``, and how many they were, counted.

        A slot may be there twice, or hold no item; one past the end is none.
        """
        state, before, freshness_state = parts
        occupancy = before.exclude(gone)
        if isinstance(occupancy.inner, ItemOccupancy):
            occupancy = occupancy.replace(inner=occupancy.inner.demote(gone))
        retired = (before.size - occupancy.size).astype(jnp.uint32)
        counters = freshness_state.counters.at[counter].add(retired)
        freshness_state = freshness_state.replace(counters=counters)
        return self.sampler.remove(state, gone), occupancy, freshness_state


def uses_and_staleness(buffer: Retiring, slots: Slots) -> tuple[Int[Array, " B"], Int[Array, " B"]]:
    """How often the items were used and how stale they are, in one look; 0 if not here any more."""
    buffer = trees.on_device(buffer)
    assert buffer.freshness is not None
    common.check_slots(slots)
    state = buffer.freshness_state
    version, uses = buffer.freshness.look(state, slots.index)
    here = buffer.occupancy.holds(slots)
    return jnp.where(here, uses, 0), jnp.where(here, state.version - version, 0)

"""Taking items out of the middle of a buffer."""

from typing import TYPE_CHECKING, Any, Self, TypeAlias

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int

from jaxbuf.buffers import common
from jaxbuf.core import in_place, storage, trees
from jaxbuf.core.slots import Slots
from jaxbuf.core.subset import Subset
from jaxbuf.strategies.freshness import Freshness, FreshnessState
from jaxbuf.strategies.samplers import Sampler

# How many items retire at a time: each costs a path of every tree. Of rows that were used usually
# few do, of a block of old items many.
_FEW, _MANY = 16, 64

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
        if freshness.max_use is None:
            return self._with(parts)

        def some_enough(carry: tuple[tuple[Array, Array], _Parts]) -> Bool[Array, ""]:
            return jnp.minimum(*carry[0]) > 0

        def retire_used(carry: tuple[tuple[Array, Array], _Parts]) -> Any:
            # Else XLA looks all uses up once more before it knows whether there are any.
            index = in_place.later(slots.index, carry[0][1])
            gone, count = freshness.used_enough(carry[1][2], index, taken)
            parts = self._retire(carry[1], gone, count, 1, _FEW)
            return (jnp.int32(0), jnp.int32(0)), parts

        # Runs once or not at all.
        return self._with(lax.while_loop(some_enough, retire_used, (enough, parts))[1])

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

        def retire_block(parts: _Parts) -> _Parts:
            sampler_state, occupancy, state = parts
            state, stale, count = freshness.stale_block(state, floor, occupancy.members.get)
            return self._retire((sampler_state, occupancy, state), stale, count, 2, _MANY)

        def some_left(parts: _Parts) -> Bool[Array, ""]:
            return parts[2].oldest < floor

        # The items themselves stay out of the loop.
        parts = (lax.stop_gradient(self.sampler_state), self.occupancy, state)
        parts = lax.while_loop(some_left, retire_block, parts)
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

    def _retire(
        self,
        parts: _Parts,
        gone: Int[Array, " B"],
        count: Int[Array, ""],
        counter: int,
        at_once: int,
    ) -> _Parts:
        """What is kept without the first ``count`` items of ``gone``, and those counted."""
        sampler_state, before, freshness_state = parts
        sampler_state, occupancy = retire(self.sampler, sampler_state, before, gone, count, at_once)
        retired = (before.size - occupancy.size).astype(jnp.uint32)
        counters = freshness_state.counters.at[counter].add(retired)
        return sampler_state, occupancy, freshness_state.replace(counters=counters)


def can_retire(sampler: Any) -> bool:
    """Whether a sampler can be told that an item is gone."""
    return hasattr(sampler, "slid") or not sampler.uses_priority


def uses_and_staleness(buffer: Retiring, slots: Slots) -> tuple[Int[Array, " B"], Int[Array, " B"]]:
    """How often the items were used and how stale they are, in one look; 0 if not here any more."""
    buffer = trees.on_device(buffer)
    assert buffer.freshness is not None
    common.check_slots(slots)
    state = buffer.freshness_state
    version, uses = buffer.freshness.look(state, slots.index)
    here = buffer.occupancy.holds(slots)
    return jnp.where(here, uses, 0), jnp.where(here, state.version - version, 0)


def retire(
    sampler: Sampler,
    state: Any,
    occupancy: Subset,
    gone: Int[Array, " B"],
    count: Int[Array, ""],
    at_once: int,
) -> tuple[Any, Subset]:
    """The sampler's state and the occupancy without the first ``count`` items of ``gone``.

    The cost grows with the number of those, not with ``B``. A slot may be there twice; after them
    come numbers of no slot.
    """
    size = -(-gone.shape[0] // at_once) * at_once
    slots = jnp.pad(gone, (0, size - gone.shape[0]), constant_values=2**31 - 1)

    def step(carry: tuple[Array, Any, Subset]) -> tuple[Array, Any, Subset]:
        first, state, occupancy = carry
        some = lax.dynamic_slice(slots, (first,), (at_once,))
        occupancy = occupancy.exclude(some)
        if hasattr(occupancy.inner, "demote"):
            occupancy = occupancy.replace(inner=occupancy.inner.demote(some))
        return first + at_once, forget(sampler, state, some), occupancy

    _, state, occupancy = lax.while_loop(
        lambda carry: carry[0] < count, step, (jnp.int32(0), state, occupancy)
    )
    return state, occupancy


def forget(sampler: Any, state: Any, index: Int[Array, " B"]) -> Any:
    """The sampler's state without the items at ``index``."""
    if hasattr(sampler, "slid"):
        # Slots whose item is gone are to a sampler what windows are that a write position broke.
        nothing = jnp.zeros((0,), jnp.int32)
        return sampler.slid(state, nothing, None, index)
    if sampler.uses_score:
        lowest = jnp.full(index.shape, -jnp.inf, jnp.float32)
        return sampler.added(state, index, lowest, contiguous=False)
    return state

"""How often an item may be used, and how old the policy that made it may be.

References:
    DI-engine, advanced buffer (``max_use``, ``max_staleness``), https://github.com/opendilab/DI-engine
    MineStudio, fragment buffer (``max_reuse``, ``max_staleness``, model versions and sessions),
    https://github.com/CraftJarvis/MineStudio
"""

import dataclasses
from typing import Any, Literal, Self, get_args

import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Int, PyTree, UInt

from jaxbuf.core import checks, counters, sizes, storage
from jaxbuf.occupancy.protocol import ItemOccupancy, Occupancy
from jaxbuf.strategies.part import Part, Rows, StepRows

Comparison = Literal[">=", ">"]

_NEVER = np.int32(2**31 - 1)
# Too stale for a learner of any version.
_TOO_OLD = np.int32(-(2**31))
# Items retired by use and by staleness; of single items, the learner's versions when they left
# minus their own when they came, summed over all, and how many were here when that was noted last;
# and the learner's version and session.
_COUNTERS = ("retired_used", "retired_stale", "behind", "noted", "version", "session")


class FreshnessState(struct.PyTreeNode):
    """What ``Freshness`` keeps.

    Attributes:
        versions: The version of the item in each slot, ``[N]``; the largest number where one was
            too stale and retired.
        uses: How often the item in each slot was used, ``[N]``.
        counters: Retired items and the learner's version, by name in ``count``; ``[6]`` uint32,
            they wrap.
    """

    versions: Int[Array, " N"]
    uses: Int[Array, " N"]
    counters: UInt[Array, " 6"]

    @property
    def version(self) -> Int[Array, ""]:
        """The learner's version."""
        return self.count("version").astype(jnp.int32)

    @property
    def session(self) -> Int[Array, ""]:
        """The learner's session."""
        return self.count("session").astype(jnp.int32)

    def count(self, name: str) -> UInt[Array, ""]:
        """The counter of this name."""
        return counters.column(_COUNTERS, self.counters, name)

    def more(self, **counts: Array) -> Self:
        """The state with more in some counters."""
        return self.replace(counters=self.counters + counters.tally(_COUNTERS, counts))


@dataclasses.dataclass(frozen=True)
class Freshness(Part):
    """Items retire when they have been used enough, or when their version is too old.

    The staleness of an item is the learner's version, set by ``buffer.set_version``, minus its own,
    given to ``add``. Items that are too stale retire when the learner moves on, wherever they lie;
    one that is too stale already is refused when it comes, evicts nothing and is counted. A policy
    may be ahead of the learner, so that staleness is negative.

    Versions of two sessions cannot be compared. When the learner begins another session, all items
    retire, and where ``add`` is given the ``session`` of each item, late ones of other sessions are
    refused as too stale, whatever their versions. Without it, every item counts as of the learner's
    session.
    Uses are counted by ``buffer.mark_used``. Retired items are never sampled and do not count in
    ``size``; with ``Oldest`` their slot is written again when its turn comes, with ``Lowest`` they
    are the first to go.

    Attributes:
        max_use: How often an item may be used; None for any number.
        max_staleness: How stale an item may become; None for any.
        comparison: An item is too stale at ``staleness >= max_staleness``, or only at
            ``staleness > max_staleness``.

    Raises:
        ValueError: If a limit is neither None nor an integer in its range, or ``comparison`` is
            unknown.

    Example:
        >>> import jax, jax.numpy as jnp, jaxbuf
        >>> freshness = jaxbuf.Freshness(max_use=2, max_staleness=10)
        >>> buffer = jaxbuf.ItemBuffer.create(jnp.float32(0), 8, freshness=freshness)
        >>> buffer = buffer.add(jnp.arange(3.0), version=jnp.array([0, 0, 5]))
        >>> [int(buffer.set_version(version).size) for version in (9, 10, 14, 15)]
        [3, 1, 1, 0]
        >>> batch = buffer.sample(jax.random.key(0), 32)
        >>> int(buffer.mark_used(batch.slots).size)
        0
        >>> buffer = buffer.set_version(0, session=1)
        >>> late = buffer.add(jnp.array([3.0]), version=jnp.array([16]), session=jnp.array([0]))
        >>> int(late.size)
        0
    """

    max_use: int | None = None
    max_staleness: int | None = None
    comparison: Comparison = ">="

    reasons = ("refused_stale",)
    uses_version = True
    removes = True
    of_windows = True

    def __post_init__(self) -> None:
        checks.check_choice("comparison", self.comparison, get_args(Comparison))
        least = {"max_use": 1, "max_staleness": 1 if self.comparison == ">=" else 0}
        for name, low in least.items():
            value = getattr(self, name)
            if value is None:
                continue
            # NumPy scalars compare unequal to the same Python number, and would retrace.
            object.__setattr__(self, name, sizes.check_count(name, value, low, 2**31 - 1))

    def init(self, data: PyTree[Any], slots: int) -> FreshnessState:
        """Nothing was used, and the learner is at version 0 of session 0."""
        del data
        return FreshnessState(
            versions=jnp.zeros((slots,), jnp.int32),
            uses=jnp.zeros((slots,), jnp.int32),
            counters=jnp.zeros((len(_COUNTERS),), jnp.uint32),
        )

    def at_version(
        self, state: FreshnessState, version: Int[Array, ""], session: Int[Array, ""] | None
    ) -> FreshnessState:
        """The learner is at this version; with another session all that is here is too stale."""
        change = {"version": (version - state.version).astype(jnp.uint32)}
        if session is not None:
            # Also what is not complete yet, such as a window of which only the first step is here.
            other = session != state.session
            state = state.replace(versions=jnp.where(other, _TOO_OLD, state.versions))
            change["session"] = (session - state.session).astype(jnp.uint32)
        return state.more(**change)

    def floor(self, version: Int[Array, ""]) -> Int[Array, ""]:
        """The oldest version that is not too stale for a learner at ``version``."""
        if self.max_staleness is None:
            return jnp.int32(-_NEVER)
        inclusive = self.comparison == ">="
        return version - jnp.int32(self.max_staleness - int(inclusive))

    def refuse(
        self, state: FreshnessState, rows: Rows, occupancy: ItemOccupancy
    ) -> dict[str, Bool[Array, " B"]]:
        """Those that are too stale already, or of another session."""
        del occupancy
        if rows.session is None and (rows.version is None or self.max_staleness is None):
            return {}
        return {"refused_stale": self._versions(state, rows) < self.floor(state.version)}

    def on_add(self, state: FreshnessState, index: Int[Array, " B"], rows: Rows) -> FreshnessState:
        """New items were never used. How stale they came counts, whether or not they stay."""
        version = self._versions(state, rows)
        behind = jnp.where(rows.taken, state.version - version, 0).astype(jnp.uint32)
        state = state.more(behind=jnp.sum(behind, dtype=jnp.uint32))
        return _placed(state, index, version)

    def on_steps(
        self, state: FreshnessState, index: Int[Array, "E T"], rows: StepRows
    ) -> FreshnessState:
        """A window has the version of its first step."""
        return _placed(state, index, self._versions(state, rows))

    def refuse_windows(
        self, state: FreshnessState, index: Int[Array, "E T"], rows: StepRows
    ) -> dict[str, Bool[Array, "E T"]]:
        """Those that are too stale before they are complete."""
        del rows
        return {"refused_stale": self.look(state, index)[0] < self.floor(state.version)}

    def noted(
        self, state: FreshnessState, size: Int[Array, ""], version: Int[Array, ""]
    ) -> FreshnessState:
        """Since it was noted last all came and left at this version of the learner's.

        What came and left in between cancels out, so it is enough to know how many are here now.
        """
        more = size.astype(jnp.uint32) - state.count("noted")
        return state.more(behind=jnp.uint32(0) - version.astype(jnp.uint32) * more, noted=more)

    def staleness_of_gone(
        self, state: FreshnessState, size: Int[Array, ""], here: Bool[Array, " N"]
    ) -> UInt[Array, ""]:
        """The sum of the staleness that all who left had when they left; it wraps.

        Args:
            state: The state.
            size: How many are here.
            here: Which slots hold an item.
        """
        versions = state.versions.astype(jnp.uint32)
        present = jnp.sum(jnp.where(here, versions, jnp.uint32(0)), dtype=jnp.uint32)
        return self.noted(state, size, state.version).count("behind") + present

    def look(
        self, state: FreshnessState, index: Int[Array, "..."]
    ) -> tuple[Int[Array, "..."], Int[Array, "..."]]:
        """The versions and the uses of the items at ``index``."""
        return storage.select(index, (state.versions, state.uses))

    def used(
        self, state: FreshnessState, index: Int[Array, " B"], taken: Bool[Array, " B"]
    ) -> tuple[FreshnessState, Bool[Array, " B"]]:
        """The items at ``index`` were used, those that are ``taken``.

        Returns:
            The state, and which of these items have been used enough.
        """
        # In the order of slots, and of what is known of their uses: whoever else looks them up, as
        # ``Statistics`` does, has done so before they are changed, and XLA need not copy them.
        at = jnp.where(taken, index, state.uses.shape[0])
        at, _ = lax.sort((at, storage.select(index, state.uses)), num_keys=2)
        uses = state.uses.at[at].add(1, mode="drop", indices_are_sorted=True)
        state = state.replace(uses=uses)
        if self.max_use is None:
            return state, jnp.zeros(taken.shape, bool)
        return state, taken & (storage.select(index, uses) >= self.max_use)

    def retired(self, state: FreshnessState, index: Int[Array, " B"]) -> FreshnessState:
        """The items at ``index`` were too stale and are gone."""
        return state.replace(versions=state.versions.at[index].set(_NEVER, mode="drop"))

    def on_clear(self, state: FreshnessState, empty: FreshnessState) -> FreshnessState:
        """Counters and the learner's version go on."""
        return empty.replace(counters=state.counters.copy())

    def metrics(self, state: FreshnessState, occupancy: Occupancy) -> dict[str, Array]:
        """Counts, and uses and staleness of the live items; 0 if there are none."""
        live = occupancy.live(jnp.arange(state.uses.shape[-1], dtype=jnp.int32))
        count = jnp.maximum(jnp.sum(live, dtype=jnp.int32), 1).astype(jnp.float32)
        uses = jnp.where(live, state.uses, 0)
        staleness = state.version - state.versions
        largest = jnp.max(jnp.where(live, staleness, -_NEVER))
        staleness = jnp.where(live, staleness, 0)
        return {
            "version": state.version,
            "retired_used": state.count("retired_used"),
            "retired_stale": state.count("retired_stale"),
            "use_max": jnp.max(uses),
            "use_mean": jnp.sum(uses.astype(jnp.float32) / count),
            "staleness_max": jnp.where(jnp.any(live), largest, 0),
            "staleness_mean": jnp.sum(staleness.astype(jnp.float32) / count),
        }

    def _versions(self, state: FreshnessState, rows: Rows) -> Int[Array, "..."]:
        """The version of each row: the learner's by default, none at all in another session."""
        version = rows.version
        if version is None:
            version = jnp.broadcast_to(state.version, rows.shape)
        if rows.session is None:
            return version
        return jnp.where(rows.session == state.session, version, _TOO_OLD)


def _placed(
    state: FreshnessState, index: Int[Array, "..."], version: Int[Array, "..."]
) -> FreshnessState:
    """Items, or the first steps of windows, of these versions are at ``index``."""
    return state.replace(
        versions=state.versions.at[index].set(version, mode="drop"),
        uses=state.uses.at[index].set(0, mode="drop"),
    )

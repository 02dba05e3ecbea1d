"""How often an item may be used, and how old the policy that made it may be.

References:
    DI-engine, advanced buffer (``max_use``, ``max_staleness``), https://github.com/opendilab/DI-engine
    MineStudio, fragment buffer (``max_reuse``, ``max_staleness``, model versions and sessions),
    https://github.com/CraftJarvis/MineStudio
"""

import dataclasses
import math
from typing import Any, Literal, get_args

import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Int, UInt

from jaxbuf.core import rowwise

Comparison = Literal[">=", ">"]

# Slots in a block, of which only the oldest version is looked at as long as that is fresh.
_BLOCK = 128
_NEVER = np.int32(2**31 - 1)


class FreshnessState(struct.PyTreeNode):
    """What ``Freshness`` keeps.

    Attributes:
        uses: How often the item in each slot was used, ``[C * L]``.
        versions: The version of the item in each slot, ``[C * L]``; the largest number where one
            retired for it.
        oldest: No version in a block of ``L`` slots is below this, ``[C]``.
        learner: The learner's version and session, ``[2]`` int32.
        counters: Rows refused as too stale, items retired by use and by staleness, and, where items
            are counted when they leave, the sums of the versions of all that came and of the
            learner's when they left, and how many the latter is of; ``[6]`` uint32, they wrap.
    """

    uses: Int[Array, " P"]
    versions: Int[Array, " P"]
    oldest: Int[Array, " C"]
    learner: Int[Array, " 2"]
    counters: UInt[Array, " 6"]

    @property
    def version(self) -> Int[Array, ""]:
        """The learner's version."""
        return self.learner[..., 0]


@dataclasses.dataclass(frozen=True)
class Freshness:
    """Items retire when they have been used enough, or when their version is too old.

    The staleness of an item is the learner's version, set by ``buffer.set_version``, minus its own,
    given to ``add``. Items that are too stale retire when the learner moves on, wherever they lie;
    one that is too stale already is refused when it comes, evicts nothing and is counted.
    Uses are counted by ``buffer.mark_used``. Retired items are never sampled and do not count in
    ``size``; with ``Oldest`` their slot is written again when its turn comes, with ``Lowest`` they
    are the first to go.

    Attributes:
        max_use: How often an item may be used; None for any number.
        max_staleness: How stale an item may become; None for any.
        comparison: An item is too stale at ``staleness >= max_staleness``, or only at
            ``staleness > max_staleness``.

    Raises:
        ValueError: If a limit is no whole number in its range, or ``comparison`` is unknown.

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
    """

    max_use: int | None = None
    max_staleness: int | None = None
    comparison: Comparison = ">="

    def __post_init__(self) -> None:
        if self.comparison not in get_args(Comparison):
            raise ValueError(
                f"comparison is {self.comparison!r}; choose from {get_args(Comparison)}"
            )
        least = {"max_use": 1, "max_staleness": 1 if self.comparison == ">=" else 0}
        for name, low in least.items():
            value = getattr(self, name)
            if value is None:
                continue
            whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
            if not whole or not low <= value < 2**31:
                raise ValueError(
                    f"{name} is {value!r}; expected None or a whole number from {low} to 2**31 - 1"
                )
            # NumPy scalars compare unequal to the same Python number, and would retrace.
            object.__setattr__(self, name, int(value))

    def init(self, capacity: int) -> FreshnessState:
        """Nothing was used, and the learner is at version 0 of session 0."""
        block = min(capacity, _BLOCK)
        blocks = math.ceil(capacity / block)
        return FreshnessState(
            uses=jnp.zeros((blocks * block,), jnp.int32),
            versions=jnp.zeros((blocks * block,), jnp.int32),
            oldest=jnp.full((blocks,), _NEVER, jnp.int32),
            learner=jnp.zeros((2,), jnp.int32),
            counters=jnp.zeros((6,), jnp.uint32),
        )

    def floor(self, state: FreshnessState) -> Int[Array, ""]:
        """The oldest version that is not too stale."""
        if self.max_staleness is None:
            return jnp.int32(-_NEVER)
        inclusive = self.comparison == ">="
        return state.version - jnp.int32(self.max_staleness - int(inclusive))

    def added(
        self, state: FreshnessState, index: Int[Array, " B"], version: Int[Array, " B"]
    ) -> FreshnessState:
        """New items, not too stale, have been written to ``index``."""
        return self._watch(self.begun(state, index, version), index, version)

    def came(
        self,
        state: FreshnessState,
        version: Int[Array, " B"],
        taken: Bool[Array, " B"] | None,
        refused: UInt[Array, ""],
    ) -> FreshnessState:
        """Items of these versions were taken, whether or not they stayed, others refused."""
        versions = version.astype(jnp.uint32)
        kept = versions if taken is None else jnp.where(taken, versions, jnp.uint32(0))
        return self._count(state, {0: refused, 3: rowwise.total(kept)})

    def left(
        self, state: FreshnessState, total: UInt[Array, ""], version: Int[Array, ""]
    ) -> FreshnessState:
        """``total`` items have left in all, those that were not counted yet at this version."""
        more = total - state.counters[5]
        return self._count(state, {4: version.astype(jnp.uint32) * more, 5: more})

    def staleness_of_gone(
        self, state: FreshnessState, total: UInt[Array, ""], here: Bool[Array, " N"]
    ) -> UInt[Array, ""]:
        """The sum of the staleness that all who left had when they left; it wraps.

        Args:
            state: The state.
            total: How many have left in all.
            here: Which slots hold an item.
        """
        counters = self.left(state, total, state.version).counters
        versions = state.versions[: here.shape[0]].astype(jnp.uint32)
        present = jnp.sum(jnp.where(here, versions, jnp.uint32(0)), dtype=jnp.uint32)
        return counters[4] - (counters[3] - present)

    def begun(
        self, state: FreshnessState, index: Int[Array, " B"], version: Int[Array, " B"]
    ) -> FreshnessState:
        """The first steps of windows have been written, whose slots are ``index``."""
        return state.replace(
            uses=state.uses.at[index].set(0, mode="drop"),
            versions=state.versions.at[index].set(version, mode="drop"),
        )

    def completed(
        self, state: FreshnessState, index: Int[Array, " B"]
    ) -> tuple[FreshnessState, Bool[Array, " B"]]:
        """The windows at ``index`` are complete; says which of them are too stale already.

        Those are counted as refused, and must be refused.
        """
        version = state.versions.at[index].get(mode="fill", fill_value=_NEVER)
        stale = version < self.floor(state)
        refused = jnp.sum(stale, dtype=jnp.uint32)
        state = self._watch(state, jnp.where(stale, state.uses.shape[0], index), version)
        return self._count(state, {0: refused}), stale

    def _count(self, state: FreshnessState, counts: dict[int, Array]) -> FreshnessState:
        nothing: Array = jnp.uint32(0)
        more = jnp.stack([counts.get(i, nothing) for i in range(state.counters.shape[-1])])
        return state.replace(counters=state.counters + more)

    def _watch(
        self, state: FreshnessState, index: Int[Array, " B"], version: Int[Array, " B"]
    ) -> FreshnessState:
        blocks = state.oldest.shape[0]
        block = jnp.where(index < state.uses.shape[0], index // self._block(state), blocks)
        # What was overwritten may have been the oldest; the next look into the block finds out.
        return state.replace(oldest=state.oldest.at[block].min(version, mode="drop"))

    def abandoned(self, state: FreshnessState, index: Int[Array, " B"]) -> FreshnessState:
        """The windows at ``index`` are of another session and too stale once they are complete."""
        return state.replace(versions=state.versions.at[index].set(-_NEVER - 1, mode="drop"))

    def used(
        self, state: FreshnessState, index: Int[Array, " B"]
    ) -> tuple[FreshnessState, Bool[Array, " B"]]:
        """The items at ``index`` were used; says which of them have been used enough."""
        state = state.replace(uses=state.uses.at[index].add(1, mode="drop"))
        if self.max_use is None:
            return state, jnp.zeros(index.shape, bool)
        uses = state.uses.at[index].get(mode="fill", fill_value=0)
        return state, uses >= self.max_use

    def stale_block(
        self, state: FreshnessState, floor: Int[Array, ""], live: Any
    ) -> tuple[FreshnessState, Int[Array, " L"], Bool[Array, " L"]]:
        """One block that may hold live items below ``floor``, and which of its slots do.

        Args:
            state: The state so far; what comes back takes these items as retired.
            floor: The oldest version that stays.
            live: Which of given slots hold an item.
        """
        width = self._block(state)
        block = jnp.argmin(state.oldest).astype(jnp.int32)
        slot = block * width + jnp.arange(width, dtype=jnp.int32)
        # Out of a loop, with which nothing that follows is fused.
        version = lax.dynamic_slice(state.versions, (block * width,), (width,))
        version = rowwise.each(_same, version, most=width)
        here = live(slot)
        stale = here & (version < floor)
        left = jnp.min(jnp.where(here & ~stale, version, _NEVER))
        oldest = lax.dynamic_update_slice(state.oldest, left[None], (block,))
        # Written as well as read: an array that a loop only reads, and that changes after it, is
        # copied.
        version = jnp.where(stale, _NEVER, version)
        versions = lax.dynamic_update_slice(state.versions, version, (block * width,))
        return state.replace(oldest=oldest, versions=versions), slot, stale

    def cleared(self, state: FreshnessState) -> FreshnessState:
        """All items are gone. Shares no array with ``state``."""
        return FreshnessState(
            uses=jnp.zeros_like(state.uses),
            versions=jnp.zeros_like(state.versions),
            oldest=jnp.full_like(state.oldest, _NEVER),
            learner=state.learner.copy(),
            counters=state.counters.copy(),
        )

    def metrics(self, state: FreshnessState, live: Bool[Array, " N"]) -> dict[str, Array]:
        """Counts, and uses and staleness of the live items; 0 if there are none."""
        count = jnp.maximum(jnp.sum(live, dtype=jnp.int32), 1).astype(jnp.float32)
        uses = jnp.where(live, state.uses[: live.shape[0]], 0)
        staleness = state.version - state.versions[: live.shape[0]]
        largest = jnp.max(jnp.where(live, staleness, -_NEVER))
        staleness = jnp.where(live, staleness, 0)
        return {
            "version": state.version,
            "refused_stale": state.counters[..., 0],
            "retired_used": state.counters[..., 1],
            "retired_stale": state.counters[..., 2],
            "use_max": jnp.max(uses),
            "use_mean": jnp.sum(uses.astype(jnp.float32) / count),
            "staleness_max": jnp.where(jnp.any(live), largest, 0),
            "staleness_mean": jnp.sum(staleness.astype(jnp.float32) / count),
        }

    def _block(self, state: FreshnessState) -> int:
        return state.uses.shape[0] // state.oldest.shape[0]


def _same(version: Int[Array, " L"], _: Any) -> Int[Array, " L"]:
    return version

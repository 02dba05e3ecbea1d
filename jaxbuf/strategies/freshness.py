"""How often an item may be used, and how old the policy that made it may be.

References:
    DI-engine, advanced buffer (``max_use``, ``max_staleness``), https://github.com/opendilab/DI-engine
    MineStudio, fragment buffer (``max_reuse``, ``max_staleness``, model versions and sessions),
    https://github.com/CraftJarvis/MineStudio
"""

import dataclasses
import functools
import math
from typing import Any, Literal, get_args

import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Int, UInt

from jaxbuf.core import checks, in_place, rowwise, sizes, storage

Comparison = Literal[">=", ">"]

# Slots in a block, and blocks in a group: as long as the oldest version of each group is fresh,
# nothing else is looked at.
_BLOCK = 128
_NEVER = np.int32(2**31 - 1)
# Too stale for a learner of any version.
TOO_OLD = np.int32(-(2**31))
# Up to this many rows a loop looks at them on a CPU, in any program. It makes two kernels more that
# could run once a batch is drawn: more than eight, so that XLA's second thread takes these and goes
# on to the update while the first still gathers rows.
_LOOP_LOOKS = 256


class FreshnessState(struct.PyTreeNode):
    """What ``Freshness`` keeps.

    Attributes:
        items: The version of the item in each slot, the largest number where one retired for it,
            and how often it was used, ``[P, 2]``. Side by side, so that they are in the same line
            of a cache.
        blocks: No version in a block of ``L`` slots is below this, ``[G * L]``.
        groups: None in a group of ``L`` blocks is below this, ``[G]``.
        counters: Rows refused as too stale, items retired by use and by staleness; of single items,
            the learner's versions when they left minus their own when they came, both summed over
            all, and how many were here when that was noted last; and the learner's version and
            session; ``[7]`` uint32, they wrap.
    """

    items: Int[Array, "P 2"]
    blocks: Int[Array, " C"]
    groups: Int[Array, " G"]
    counters: UInt[Array, " 7"]

    @property
    def versions(self) -> Int[Array, " P"]:
        """The version of the item in each slot."""
        return self.items[..., 0]

    @property
    def uses(self) -> Int[Array, " P"]:
        """How often the item in each slot was used."""
        return self.items[..., 1]

    @property
    def oldest(self) -> Int[Array, ""]:
        """No version of an item is below this."""
        # In one kernel: of more than 32 numbers XLA:CPU makes two.
        groups = self.groups
        while groups.shape[-1] > 32:
            groups = jnp.pad(
                groups,
                [(0, 0)] * (groups.ndim - 1) + [(0, groups.shape[-1] % 2)],
                constant_values=_NEVER,
            )
            half = groups.shape[-1] // 2
            groups = jnp.minimum(groups[..., :half], groups[..., half:])
        return jnp.min(groups, axis=-1)

    @property
    def version(self) -> Int[Array, ""]:
        """The learner's version."""
        return self.counters[..., 5].astype(jnp.int32)

    @property
    def session(self) -> Int[Array, ""]:
        """The learner's session."""
        return self.counters[..., 6].astype(jnp.int32)


@dataclasses.dataclass(frozen=True)
class Freshness:
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

    def __post_init__(self) -> None:
        checks.check_choice("comparison", self.comparison, get_args(Comparison))
        least = {"max_use": 1, "max_staleness": 1 if self.comparison == ">=" else 0}
        for name, low in least.items():
            value = getattr(self, name)
            if value is None:
                continue
            # NumPy scalars compare unequal to the same Python number, and would retrace.
            object.__setattr__(self, name, sizes.check_count(name, value, low, 2**31 - 1))

    def init(self, capacity: int) -> FreshnessState:
        """Nothing was used, and the learner is at version 0 of session 0."""
        block = min(capacity, _BLOCK)
        blocks = math.ceil(capacity / block)
        groups = math.ceil(blocks / block)
        return FreshnessState(
            items=jnp.zeros((blocks * block, 2), jnp.int32),
            blocks=jnp.full((groups * block,), _NEVER, jnp.int32),
            groups=jnp.full((groups,), _NEVER, jnp.int32),
            counters=jnp.zeros((7,), jnp.uint32),
        )

    def at_version(
        self, state: FreshnessState, version: Int[Array, ""], session: Int[Array, ""]
    ) -> FreshnessState:
        """The learner is at this version of this session."""
        learner = jnp.stack([version, session]).astype(jnp.uint32)
        return state.replace(counters=jnp.concatenate([state.counters[:5], learner]))

    def floor(self, version: Int[Array, ""]) -> Int[Array, ""]:
        """The oldest version that is not too stale for a learner at ``version``."""
        if self.max_staleness is None:
            return jnp.int32(-_NEVER)
        inclusive = self.comparison == ">="
        return version - jnp.int32(self.max_staleness - int(inclusive))

    def added(
        self, state: FreshnessState, index: Int[Array, " B"], version: Int[Array, "..."]
    ) -> FreshnessState:
        """New items, not too stale, have been written to ``index``; of one version, or ``[B]``."""
        if index.shape[0] == 0:
            return state
        kept = state.items, state.blocks, state.groups
        items, blocks, groups = rowwise.on_cpu(_add_loop, _add, kept, index, version)
        return state.replace(items=items, blocks=blocks, groups=groups)

    def came(
        self,
        state: FreshnessState,
        version: Int[Array, " B"],
        taken: Bool[Array, " B"] | None,
        refused: UInt[Array, ""],
    ) -> FreshnessState:
        """Items of other versions than the learner's were taken, whether or not they stayed.

        Args:
            state: The state.
            version: Of each.
            taken: Which were taken; None for all.
            refused: How many were too stale.
        """
        behind = (state.version - version).astype(jnp.uint32)
        kept = behind if taken is None else jnp.where(taken, behind, jnp.uint32(0))
        return self._count(state, {0: refused, 3: rowwise.reduce(lax.add, kept, 0)})

    def noted(
        self, state: FreshnessState, size: Int[Array, ""], version: Int[Array, ""]
    ) -> FreshnessState:
        """Since it was noted last all came and left at this version of the learner's.

        What came and left in between cancels out, so it is enough to know how many are here now.
        """
        fewer = state.counters[4] - size.astype(jnp.uint32)
        return self._count(state, {3: version.astype(jnp.uint32) * fewer, 4: jnp.uint32(0) - fewer})

    def staleness_of_gone(
        self, state: FreshnessState, size: Int[Array, ""], here: Bool[Array, " N"]
    ) -> UInt[Array, ""]:
        """The sum of the staleness that all who left had when they left; it wraps.

        Args:
            state: The state.
            size: How many are here.
            here: Which slots hold an item.
        """
        versions = state.versions[: here.shape[0]].astype(jnp.uint32)
        present = jnp.sum(jnp.where(here, versions, jnp.uint32(0)), dtype=jnp.uint32)
        return self.noted(state, size, state.version).counters[3] + present

    def begun(
        self, state: FreshnessState, index: Int[Array, "..."], version: Int[Array, "..."]
    ) -> FreshnessState:
        """The first steps of windows have been written, whose slots are ``index``."""
        rows = index.reshape(-1), version.reshape(-1)
        return state.replace(items=rowwise.on_cpu(_write_loop, _write, state.items, *rows))

    def completed(
        self, state: FreshnessState, index: Int[Array, "..."]
    ) -> tuple[FreshnessState, Bool[Array, "..."]]:
        """The windows at ``index`` are complete; says which of them are too stale already.

        Those are counted as refused, and must be refused.
        """
        slots = state.items.shape[0]
        flat = index.reshape(-1)
        version = jnp.where(flat < slots, self.look(state, flat)[0], _NEVER)
        stale = version < self.floor(state.version)
        refused = jnp.sum(stale, dtype=jnp.uint32)
        kept = state.blocks, state.groups
        rows = jnp.where(stale, slots, flat), version
        loop, plain = (functools.partial(f, slots) for f in (_watch_loop, _watch))
        blocks, groups = rowwise.on_cpu(loop, plain, kept, *rows)
        state = state.replace(blocks=blocks, groups=groups)
        return self._count(state, {0: refused}), stale.reshape(index.shape)

    def look(
        self, state: FreshnessState, index: Int[Array, " B"]
    ) -> tuple[Int[Array, " B"], Int[Array, " B"]]:
        """The versions and the uses of the items at ``index``."""
        if index.shape[0] <= _LOOP_LOOKS:
            found = rowwise.each(storage.select, index, state.items, most=_LOOP_LOOKS)
        else:
            found = rowwise.on_cpu(_rows_at_once, storage.select, index, state.items)
        return found[:, 0], found[:, 1]

    def _count(self, state: FreshnessState, counts: dict[int, Array]) -> FreshnessState:
        nothing: Array = jnp.uint32(0)
        more = jnp.stack([counts.get(i, nothing) for i in range(state.counters.shape[-1])])
        return state.replace(counters=state.counters + more)

    def abandoned(self, state: FreshnessState, index: Int[Array, " B"]) -> FreshnessState:
        """The windows at ``index`` are of another session and too stale once they are complete."""
        return state.replace(items=state.items.at[index, 0].set(TOO_OLD, mode="drop"))

    def used(
        self, state: FreshnessState, index: Int[Array, " B"], taken: Bool[Array, " B"]
    ) -> tuple[FreshnessState, tuple[Int[Array, ""], Int[Array, ""]]]:
        """The items at ``index`` were used, those that are ``taken``.

        Returns:
            The state; how often the most used one was; and how many rows have been used enough.
        """
        # One number after the other, which XLA:CPU scatters in two thirds of the time of rows.
        at = jnp.where(taken, 2 * index + 1, -1)
        numbers = state.items.reshape(-1).at[at].add(1, mode="drop", wrap_negative_indices=False)
        items = numbers.reshape(state.items.shape)
        state = state.replace(items=items)
        if self.max_use is None or index.shape[0] == 0:
            return state, (jnp.int32(0), jnp.int32(0))
        uses = jnp.where(taken, storage.select(index, items)[:, 1], 0)
        enough = (uses >= self.max_use).astype(jnp.int32)
        # Of one reduction XLA:CPU makes several kernels, and shares the first between two threads.
        start = (np.int32(0), np.int32(0))
        return state, lax.reduce((uses, enough), start, _most_and_count, (0,))

    def used_enough(
        self, state: FreshnessState, index: Int[Array, " B"], taken: Bool[Array, " B"]
    ) -> tuple[Int[Array, " B"], Int[Array, ""]]:
        """Those of the items that have been used enough, in front, and how many rows they are."""
        enough = taken & (storage.select(index, state.items)[:, 1] >= (self.max_use or _NEVER))
        return rowwise.pack(index, enough, state.items.shape[0], size=index.shape[0])

    def stale_block(
        self, state: FreshnessState, floor: Int[Array, ""], live: Any
    ) -> tuple[FreshnessState, Int[Array, " L"], Int[Array, ""]]:
        """One block that may hold live items below ``floor``, and which of its slots do.

        Args:
            state: The state so far; what comes back takes these items as retired.
            floor: The oldest version that stays.
            live: Which of given slots hold an item.

        Returns:
            The state; the slots of these items, in front; and how many they are.
        """
        width = state.blocks.shape[0] // state.groups.shape[0]
        group = jnp.argmin(state.groups).astype(jnp.int32)
        members = lax.dynamic_slice(state.blocks, (group * width,), (width,))
        member = jnp.argmin(members).astype(jnp.int32)
        first = (group * width + member) * width
        here = live(first + jnp.arange(width, dtype=jnp.int32))
        items, gone, count, left = rowwise.on_cpu(
            _expire_loop, _expire, state.items, first, here, floor
        )
        members = lax.dynamic_update_slice(members, left[None], (member,))
        blocks = lax.dynamic_update_slice(state.blocks, members, (group * width,))
        groups = lax.dynamic_update_slice(state.groups, jnp.min(members)[None], (group,))
        return state.replace(items=items, blocks=blocks, groups=groups), gone, count

    def cleared(self, state: FreshnessState) -> FreshnessState:
        """All items are gone. Shares no array with ``state``."""
        return FreshnessState(
            items=jnp.zeros_like(state.items),
            blocks=jnp.full_like(state.blocks, _NEVER),
            groups=jnp.full_like(state.groups, _NEVER),
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


def _most_and_count(one: Any, other: Any) -> Any:
    return lax.max(one[0], other[0]), lax.add(one[1], other[1])


def _rows_at_once(index: Int[Array, " B"], items: Int[Array, "P 2"]) -> Int[Array, "B 2"]:
    # In a loop fewer of them are on their way from memory.
    return rowwise.gathered(storage.select(index, items), index)


def _write(
    items: Int[Array, "P 2"], index: Int[Array, " B"], version: Int[Array, "..."]
) -> Int[Array, "P 2"]:
    version = jnp.broadcast_to(version, index.shape)
    row = jnp.stack([version, jnp.zeros_like(version)], axis=-1)
    return items.at[index].set(row, mode="drop")


def _write_loop(
    items: Int[Array, "P 2"], index: Int[Array, " B"], version: Int[Array, " B"]
) -> Int[Array, "P 2"]:
    def step(i: Array, items: Array) -> Array:
        at, there, row = in_place.step_of(i, index, items.shape[0])
        return _write_one(items, at, there, version[row])

    return lax.fori_loop(0, max(index.shape[0], 2), step, items)


def _write_one(
    items: Int[Array, "P 2"], at: Int[Array, ""], there: Bool[Array, ""], version: Int[Array, ""]
) -> Int[Array, "P 2"]:
    place = (at, jnp.int32(0))
    old = lax.dynamic_slice(items, place, (1, 2))
    new = [jnp.where(there, version, old[0, 0]), jnp.where(there, 0, old[0, 1])]
    return lax.dynamic_update_slice(items, jnp.stack(new)[None], place)


def _watch(
    slots: int,
    kept: tuple[Int[Array, " C"], Int[Array, " G"]],
    index: Int[Array, " B"],
    version: Int[Array, "..."],
) -> tuple[Int[Array, " C"], Int[Array, " G"]]:
    """What is known of the oldest versions once there are others."""
    # What was overwritten may have been the oldest; the next look into the block finds out.
    blocks, groups = kept
    width = blocks.shape[0] // groups.shape[0]
    block = jnp.where(index < slots, index // width, blocks.shape[0])
    version = jnp.broadcast_to(version, index.shape)
    return (
        blocks.at[block].min(version, mode="drop"),
        groups.at[block // width].min(version, mode="drop"),
    )


def _watch_loop(
    slots: int,
    kept: tuple[Int[Array, " C"], Int[Array, " G"]],
    index: Int[Array, " B"],
    version: Int[Array, " B"],
) -> tuple[Int[Array, " C"], Int[Array, " G"]]:
    def step(i: Array, kept: tuple[Array, Array]) -> tuple[Array, Array]:
        at, there, row = in_place.step_of(i, index, slots)
        return _watch_one(kept, at, there, version[row])

    return lax.fori_loop(0, max(index.shape[0], 2), step, kept)


def _watch_one(
    kept: tuple[Int[Array, " C"], Int[Array, " G"]],
    at: Int[Array, ""],
    there: Bool[Array, ""],
    version: Int[Array, ""],
) -> tuple[Int[Array, " C"], Int[Array, " G"]]:
    blocks, groups = kept
    width = blocks.shape[0] // groups.shape[0]
    new, block = jnp.where(there, version, _NEVER), at // width
    return _lower(blocks, block, new), _lower(groups, block // width, new)


def _add(
    kept: tuple[Int[Array, "P 2"], Int[Array, " C"], Int[Array, " G"]],
    index: Int[Array, " B"],
    version: Int[Array, "..."],
) -> tuple[Int[Array, "P 2"], Int[Array, " C"], Int[Array, " G"]]:
    items, blocks, groups = kept
    oldest = _watch(items.shape[0], (blocks, groups), index, version)
    return _write(items, index, version), *oldest


def _add_loop(
    kept: tuple[Int[Array, "P 2"], Int[Array, " C"], Int[Array, " G"]],
    index: Int[Array, " B"],
    version: Int[Array, "..."],
) -> tuple[Int[Array, "P 2"], Int[Array, " C"], Int[Array, " G"]]:
    def step(i: Array, kept: Any) -> Any:
        items, blocks, groups = kept
        at, there, row = in_place.step_of(i, index, items.shape[0])
        new = version if version.ndim == 0 else version[row]
        oldest = _watch_one((blocks, groups), at, there, new)
        return _write_one(items, at, there, new), *oldest

    return lax.fori_loop(0, max(index.shape[0], 2), step, kept)


def _lower(values: Int[Array, " N"], at: Int[Array, ""], to: Int[Array, ""]) -> Int[Array, " N"]:
    old = lax.dynamic_slice(values, (at,), (1,))
    return lax.dynamic_update_slice(values, jnp.minimum(old, to), (at,))


def _expire(
    items: Int[Array, "P 2"], first: Int[Array, ""], here: Bool[Array, " L"], floor: Int[Array, ""]
) -> tuple[Int[Array, "P 2"], Int[Array, " L"], Int[Array, ""], Int[Array, ""]]:
    """Items of the slots from ``first`` on leave if their version is below ``floor``.

    Returns:
        The items; the slots of those that left, in front; how many they are; and the oldest version
        of those that stay.
    """
    width = here.shape[0]
    slot = first + jnp.arange(width, dtype=jnp.int32)
    version = lax.dynamic_slice(items, (first, jnp.int32(0)), (width, 1))[:, 0]
    stale = here & (version < floor)
    left = jnp.min(jnp.where(here & ~stale, version, _NEVER))
    version = jnp.where(stale, _NEVER, version)
    items = lax.dynamic_update_slice(items, version[:, None], (first, jnp.int32(0)))
    return items, *rowwise.pack(slot, stale, items.shape[0], size=max(width, 2)), left


def _expire_loop(
    items: Int[Array, "P 2"], first: Int[Array, ""], here: Bool[Array, " L"], floor: Int[Array, ""]
) -> tuple[Int[Array, "P 2"], Int[Array, " L"], Int[Array, ""], Int[Array, ""]]:
    width, slots = here.shape[0], items.shape[0]

    def step(i: Array, carry: tuple[Array, Array, Array, Array]) -> Any:
        items, gone, count, left = carry
        row = jnp.minimum(i, width - 1).astype(jnp.int32)
        version = lax.dynamic_slice(items, (first + row, jnp.int32(0)), (1, 1))
        stale = here[row] & (version[0, 0] < floor)
        slot = jnp.where(stale, first + row, slots)
        gone, more, written = in_place.append(gone, slot, count, stale)
        stays = here[row] & ~stale
        left = jnp.where(stays, jnp.minimum(left, version[0, 0]), left)
        at = in_place.later(first + row, written, more + jnp.minimum(left, 0))
        items = lax.dynamic_update_slice(
            items, jnp.where(stale, _NEVER, version), (at, jnp.int32(0))
        )
        return items, gone, more, left

    rows = max(width, 2)
    start = (items, jnp.full((rows,), slots, jnp.int32), jnp.int32(0), jnp.int32(_NEVER))
    return lax.fori_loop(0, rows, step, start)

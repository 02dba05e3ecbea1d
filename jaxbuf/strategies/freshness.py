"""Limits on the uses of an item and on the age of the policy that generated it.

References:
    DI-engine, advanced buffer (``max_use``, ``max_staleness``), https://github.com/opendilab/DI-engine
    MineStudio, fragment buffer (``max_reuse``, ``max_staleness``, model versions and sessions),
    https://github.com/CraftJarvis/MineStudio
"""

import dataclasses
from collections.abc import Iterator
from typing import Literal, Self, get_args

import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Int, UInt
from numpy.typing import NDArray

from jaxbuf.core import checks, counters, sizes, storage
from jaxbuf.core.division import quotient
from jaxbuf.core.problems import first_wrong
from jaxbuf.core.types import Arrays, Count, Flag, Index, Mask, Word
from jaxbuf.core.versions import vary_with
from jaxbuf.occupancy.bitset import Bitset
from jaxbuf.occupancy.protocol import Occupancy
from jaxbuf.strategies.moves import Moves
from jaxbuf.strategies.part import Part, Rows, StepRows

Comparison = Literal[">=", ">"]

_NEVER = np.int32(2**31 - 1)
# Too stale for a learner of any version.
_TOO_OLD = np.int32(-(2**31))
# The number of slots that share a lower bound on their versions, and the number of such blocks in
# which stale items are looked for at a time.
_BLOCK, _BLOCKS = 256, 16
# "retired_used" and "retired_stale" count retired items; "version" and "session" are the learner's.
_COUNTERS = ("retired_used", "retired_stale", "version", "session")


class FreshnessState(struct.PyTreeNode):
    """The state of ``Freshness``.

    Attributes:
        versions: The version of the item in each slot, ``[N]``; the least int32 where an item was
            too stale and retired.
        uses: The number of uses of the item in each slot, ``[N]``.
        oldest: For every 256 slots a lower bound on the versions of the items that may still
            become too stale, ``[M]``. While it is fresh enough, none of them needs to be checked.
        counters: Counts of retired items, and the learner's version and session, ``[4]`` uint32,
            which wrap. ``count`` reads one by name.
    """

    versions: Int[Array, " N"]
    uses: Int[Array, " N"]
    oldest: Int[Array, " M"]
    counters: UInt[Array, " 4"]

    @property
    def version(self) -> Count:
        """The learner's version."""
        return self.count("version").astype(jnp.int32)

    @property
    def session(self) -> Count:
        """The learner's session."""
        return self.count("session").astype(jnp.int32)

    def count(self, name: str) -> Word:
        """Returns the counter of this name."""
        return self.counters[..., _COUNTERS.index(name)]

    def more(self, **counts: Array) -> Self:
        """Returns the state with the counts added to the counters of these names."""
        return self.replace(counters=self.counters + counters.tally(_COUNTERS, counts))


@dataclasses.dataclass(frozen=True)
class Freshness(Part):
    """Retires items that have been used often enough or whose version is too old.

    The staleness of an item is the learner's version, set by ``buffer.set_version``, minus the
    item's version, passed to ``add``. When the learner's version increases, all items that have
    become too stale retire, wherever they are stored, at a cost that follows their number and not
    that of all items. A new item that is too stale already is
    refused and counted, and evicts nothing. Staleness is negative if a policy is ahead of the
    learner.

    Versions of different sessions cannot be compared. When the learner begins another session, all
    items retire. If ``add`` is given the ``session`` of each item, late items of other sessions are
    refused as too stale, whatever their versions. Otherwise every item counts as one of the
    learner's session.

    Uses are counted by ``buffer.mark_used``. Retired items are never sampled and do not count in
    ``size``. With ``Oldest``, their slots are overwritten in the usual order; with ``Lowest``,
    retired items are overwritten first.

    Attributes:
        max_use: The number of uses after which an item retires; None for no limit.
        max_staleness: The largest staleness, see ``comparison``; None for no limit.
        comparison: Whether an item is too stale at ``staleness >= max_staleness`` (``">="``), or
            only at ``staleness > max_staleness`` (``">"``).

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
    removes = True
    of_windows = True
    of_shards = True

    def __post_init__(self) -> None:
        checks.check_choice("comparison", self.comparison, get_args(Comparison))
        strict = self.comparison == ">="
        for name, least in (("max_use", 1), ("max_staleness", int(strict))):
            if getattr(self, name) is not None:
                checks.settle(self, sizes.check_count, name, least=least, most=2**31 - 1)

    def init(self, data: Arrays, slots: int) -> FreshnessState:
        del data
        return FreshnessState(
            versions=jnp.zeros((slots,), jnp.int32),
            uses=jnp.zeros((slots,), jnp.int32),
            oldest=jnp.full((-(-slots // _BLOCK),), _NEVER),
            counters=jnp.zeros((len(_COUNTERS),), jnp.uint32),
        )

    def on_version(
        self, state: FreshnessState, version: Count, session: Count | None
    ) -> FreshnessState:
        """Sets the learner's version; if the session changes, all present items are too stale.

        Args:
            state: The state.
            version: The learner's version, int32.
            session: The number of the learner's run, int32; None if it was not given.
        """
        change = {"version": (version - state.version).astype(jnp.uint32)}
        # When the learner goes back, incomplete windows that were too stale can be fresh again.
        recheck = self.floor(version) < self.floor(state.version)
        if session is not None:
            # This includes incomplete windows, of which only the first step may be stored.
            is_other = session != state.session
            # A loop of at most one round, since most calls change no version.
            _, versions = lax.while_loop(
                lambda carry: carry[0],
                lambda carry: (jnp.zeros_like(carry[0]), jnp.full_like(carry[1], _TOO_OLD)),
                vary_with((is_other, state.versions), is_other, state.versions),
            )
            state = state.replace(versions=versions)
            recheck |= is_other
            change["session"] = (session - state.session).astype(jnp.uint32)
        state = state.replace(oldest=jnp.where(recheck, _TOO_OLD, state.oldest))
        return state.more(**change)

    def floor(self, version: Count) -> Count:
        """Returns the oldest version that is not too stale for a learner at ``version``."""
        if self.max_staleness is None:
            return jnp.int32(-_NEVER)
        behind = self.max_staleness - int(self.comparison == ">=")
        # Not below the least version of an item, where the difference would wrap.
        return jnp.maximum(version, jnp.int32(behind - _NEVER)) - jnp.int32(behind)

    def refuse(
        self, state: FreshnessState, rows: Rows, occupancy: Occupancy
    ) -> dict[str, Bool[Array, "..."]]:
        del occupancy
        if isinstance(rows, StepRows):
            assert rows.completed is not None
            version, _ = self.read(state, rows.completed)
            return {"refused_stale": version < self.floor(state.version)}
        if rows.session is None and (rows.version is None or self.max_staleness is None):
            return {}
        return {"refused_stale": self._versions(state, rows) < self.floor(state.version)}

    def on_add(self, state: FreshnessState, index: Int[Array, "..."], rows: Rows) -> FreshnessState:
        version = self._versions(state, rows)
        added = jnp.where(index < state.versions.shape[0], version, _NEVER)
        return state.replace(
            oldest=state.oldest.at[quotient(index, _BLOCK)].min(added, mode="drop"),
            versions=state.versions.at[index].set(version, mode="drop"),
            uses=state.uses.at[index].set(0, mode="drop"),
        )

    def read(
        self, state: FreshnessState, index: Int[Array, "..."]
    ) -> tuple[Int[Array, "..."], Int[Array, "..."]]:
        """Returns the versions and the uses of the items at ``index``."""
        return storage.select(index, (state.versions, state.uses))

    def on_remove(self, state: FreshnessState, index: Index) -> FreshnessState:
        """Forgets the uses of windows: one can be completed again, by other steps than before."""
        return state.replace(uses=state.uses.at[index].set(0, mode="drop"))

    def on_use(
        self, state: FreshnessState, index: Index, taken: Mask
    ) -> tuple[FreshnessState, Mask | None]:
        """Counts uses of items, and chooses the items that retire.

        Args:
            state: The state.
            index: The slots of the items, ``[B]``; an item that occurs twice was used twice.
            taken: A mask of the rows that count, ``[B]``.

        Returns:
            The new state, and a mask of the items that retire, ``[B]``; None for no item.
        """
        # Counts stop at the largest int32. The update therefore comes after a read of the uses, and
        # after other readers such as ``Statistics`` (see ``core.order``).
        counted = taken & (storage.select(index, state.uses) < _NEVER)
        uses = state.uses.at[jnp.where(counted, index, state.uses.shape[0])].add(1, mode="drop")
        state = state.replace(uses=uses)
        if self.max_use is None:
            return state, None
        return state, taken & (storage.select(index, uses) >= self.max_use)

    def may_retire(self, state: FreshnessState) -> Flag:
        """Returns whether ``retires`` may find items that are too stale."""
        return jnp.min(state.oldest) < self.floor(state.version)

    def retires(self, state: FreshnessState) -> tuple[Int[Array, " C"], Bool[Array, " C"]]:
        """Returns some slots to check, no slot twice, and a mask of these whose items retire.

        Slots that hold no item, or are past the end, are ignored.
        """
        index = self._suspects(state).reshape(-1)
        stale = storage.select(index, state.versions) < self.floor(state.version)
        return index, stale & (index < state.versions.shape[0])

    def with_bounds(self, state: FreshnessState) -> FreshnessState:
        """Updates the lower bounds after the items that ``retires`` returned have retired."""
        index = self._suspects(state)
        versions = storage.select(index, state.versions)
        gone = (versions < self.floor(state.version)) | (index >= state.versions.shape[0])
        oldest = jnp.min(jnp.where(gone, _NEVER, versions), axis=1)
        block = quotient(index[:, 0], _BLOCK)
        return state.replace(oldest=state.oldest.at[block].set(oldest, mode="drop"))

    def _suspects(self, state: FreshnessState) -> Int[Array, "K S"]:
        """Returns the slots of the first blocks that may have stale items; past the end for none.

        ``with_bounds`` gets the same ones as ``retires``: retirement changes no lower bound.
        """
        blocks = Bitset.of(state.oldest < self.floor(state.version))
        rank = jnp.arange(min(blocks.capacity, _BLOCKS), dtype=jnp.int32)
        block = jnp.where(rank < blocks.size, blocks.at(rank), blocks.capacity)
        return block[:, None] * _BLOCK + jnp.arange(_BLOCK, dtype=jnp.int32)[None]

    def on_retire(
        self, state: FreshnessState, index: Index, count: Word, *, event: str
    ) -> FreshnessState:
        """Counts items that have retired, after ``on_remove`` was called with them.

        Args:
            state: The state.
            index: Their slots, ``[B]``; past the end for other rows.
            count: The number of items that retired.
            event: Why: ``"use"`` or ``"version"``.
        """
        if event == "use":
            return state.more(retired_used=count)
        # A window that is completed again stays too stale. The write also makes XLA read all
        # versions before they change.
        versions = state.versions.at[index].set(_TOO_OLD, mode="drop")
        return state.replace(versions=versions).more(retired_stale=count)

    def clear(self, state: FreshnessState, empty: FreshnessState) -> FreshnessState:
        """Returns the ``empty`` state with the counts, and the learner's version, of another."""
        return empty.replace(counters=state.counters)

    def move(self, empty: FreshnessState, state: FreshnessState, moves: Moves) -> FreshnessState:
        moved = (state.versions[moves.source], state.uses[moves.source])
        return state.replace(
            oldest=jnp.full_like(empty.oldest, jnp.min(state.oldest)),
            versions=empty.versions.at[moves.begun].set(moved[0], mode="drop"),
            uses=empty.uses.at[moves.begun].set(moved[1], mode="drop"),
        )

    def metrics(self, state: FreshnessState, occupancy: Occupancy) -> dict[str, Array]:
        """Returns counts, and the uses and staleness of the live items, 0 if there are none."""
        live = occupancy.live(jnp.arange(state.uses.shape[-1], dtype=jnp.int32))
        size = occupancy.size
        count = jnp.maximum(size, 1).astype(jnp.float32)
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
            "staleness_max": jnp.where(size > 0, largest, 0),
            "staleness_mean": jnp.sum(staleness.astype(jnp.float32) / count),
        }

    def check_valid(
        self, state: FreshnessState, name: str, live: NDArray[np.bool_], data: Arrays
    ) -> Iterator[str]:
        del data
        uses, version = np.asarray(state.uses), np.asarray(state.versions)
        label = f"{name}.freshness_state.uses"
        yield from first_wrong(label, uses, uses < 0, "a number of at least 0")
        if self.max_use is not None:
            limit = f"less than max_use, {self.max_use}: the item should have retired"
            yield from first_wrong(label, uses, live & (uses >= self.max_use), limit)
        floor = int(self.floor(state.version))
        limit = f"at least {floor}: the item is too stale for a learner at {state.version}"
        label = f"{name}.freshness_state.versions"
        yield from first_wrong(label, version, live & (version < floor), limit)
        oldest = np.repeat(np.asarray(state.oldest), _BLOCK)[: version.size]
        yield from first_wrong(label, version, live & (version < oldest), oldest)

    def _versions(self, state: FreshnessState, rows: Rows) -> Int[Array, "..."]:
        """Returns the version of each row: by default the learner's; too old in other sessions."""
        version = rows.version
        if version is None:
            version = jnp.broadcast_to(state.version, rows.shape)
        # The least number marks items that are too old whatever the learner's version.
        version = jnp.maximum(version, jnp.int32(-_NEVER))
        if rows.session is None:
            return version
        return jnp.where(rows.session == state.session, version, _TOO_OLD)

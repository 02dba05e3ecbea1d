"""A sampler that draws items by the rank of their priorities, or of their scores.

References:
    Schaul et al., Prioritized Experience Replay, ICLR 2016, https://arxiv.org/abs/1511.05952.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Float, Int
from numpy.typing import NDArray

from jaxbuf.core import checks, sizes, sorting
from jaxbuf.core.hyperparameters import at_most
from jaxbuf.core.numbers import TINY
from jaxbuf.core.problems import first_wrong
from jaxbuf.core.segment_tree import SegmentTree
from jaxbuf.core.types import Count, Floats, Index
from jaxbuf.core.versions import vary_with
from jaxbuf.occupancy.protocol import Occupancy
from jaxbuf.occupancy.ranking import score_metrics, to_rank
from jaxbuf.strategies.mass import ByMass, effective_size, is_priority, over, set_masses
from jaxbuf.strategies.moves import Moves
from jaxbuf.strategies.protocols import Support


class RankState(struct.PyTreeNode):
    """The state of ``RankBased``.

    Attributes:
        values: The priorities (or scores) and their maximum; −inf for empty slots.
        masses: The masses ``rank ** -alpha`` and their sums; 0 for empty slots.
        changes: The number of changes since the last sort, ``[]`` int32.
    """

    values: SegmentTree
    masses: SegmentTree
    changes: Count


@dataclasses.dataclass(frozen=True)
class RankBased(ByMass):
    """Draws items with a probability proportional to ``(1 / rank) ** alpha``.

    The item with the largest priority (or score) has rank 1, the next one rank 2, and so on; of
    equal items, the one in the lower slot comes first. Only the order counts, so an outlier is
    drawn no more often than any other item of rank 1, where ``Prioritized`` might draw nothing
    else. Every item has a rank and can be drawn, also with a priority of 0 or a score of −inf.

    An item that is added without a priority gets the largest one in the buffer, and at least 1.

    Ranks are those of the last sort, and a sum tree holds their masses, so that a draw costs
    ``O(log capacity)`` as with ``Prioritized``. A sort costs ``O(capacity * log(capacity))``: on
    one core of a CPU 0.2 ms for 2**12 slots, 1 ms for 2**14, and 120 ms for 2**20. It follows
    every ``sort_every``-th change, where a change is one call that adds, updates or removes some
    items. With ``sort_every=1`` ranks are always exact, which suits buffers of some thousand items.
    For large buffers choose a number in the thousands, or ``Prioritized``, which never sorts. Until
    the next sort, new items have the mass of rank 1, whatever their values, and other items keep
    theirs. The ``probability`` in a sample is exact in either case: it is the one with which items
    are drawn.

    Attributes:
        alpha: The exponent of ranks; 0 is uniform over the items. Masses are at least 2**-126. If
            it varies (see ``jaxbuf.Varying``), a new value sorts the items, and applies to all.
        by: What is ranked: ``"priority"``, as given to ``add`` and ``update_priority``, or
            ``"score"``, as given to ``add`` and ``update_score``.
        sort_every: The number of changes from one sort to the next.
        stratified: Whether to draw one row from each of ``batch_size`` equal parts of the total
            mass, which reduces the variance and leaves the expected number of rows of each item
            unchanged. Ignored without replacement.
        replacement: Whether a batch may hold an item twice. If False, each row is drawn from the
            remaining items, ``probability`` is the probability of the first draw, and rows beyond
            the number of items are invalid.

    Raises:
        ValueError: If a number is out of range, or ``by`` is neither of the two.

    References:
        Schaul et al., Prioritized Experience Replay, ICLR 2016, section 3.3. There a binary heap
        stands in for the order of 10**6 items, and is sorted once in 10**6 steps.

    Example:
        >>> import jax, jax.numpy as jnp, jaxbuf
        >>> sampler = jaxbuf.RankBased(alpha=1.0)
        >>> buffer = jaxbuf.ItemBuffer.create(jnp.int32(0), 100, sampler=sampler)
        >>> buffer = buffer.add(jnp.arange(3), priority=jnp.array([0.1, 500.0, 0.2]))
        >>> batch = buffer.sample(jax.random.key(0), 11)
        >>> jnp.bincount(batch.data).tolist()
        [2, 6, 3]
        >>> [round(float(p), 3) for p in batch.probability[jnp.array([0, 2, 8])]]
        [0.182, 0.545, 0.273]
    """

    alpha: float = 0.7
    by: str = "priority"
    sort_every: int = 1
    stratified: bool = True
    replacement: bool = True

    varies: ClassVar[dict[str, tuple[float, float]]] = {"alpha": (0.0, math.inf)}

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.settle(self, checks.check_nonnegative, "alpha")
        checks.check_choice("by", self.by, ("priority", "score"))
        checks.settle(self, sizes.check_count, "sort_every", most=2**31 - 1)
        checks.settle(self, checks.check_flag, "stratified", "replacement")
        object.__setattr__(self, "uses_priority", self.by == "priority")
        object.__setattr__(self, "uses_score", self.by == "score")

    def init(self, capacity: int) -> RankState:
        """Returns the state without items."""
        return RankState(
            values=SegmentTree.create(capacity, ops=("max",)),
            masses=SegmentTree.create(capacity, ops=("sum", "min_positive")),
            changes=jnp.int32(0),
        )

    def accepts(self, value: Float[Array, "..."]) -> Bool[Array, "..."]:
        if self.by == "score":
            return ~jnp.isnan(value)
        return is_priority(value)

    def on_change(
        self, state: RankState, added: Index, value: Floats | None, removed: Int[Array, " R"]
    ) -> RankState:
        """Sets the values of new items, which get the mass of rank 1, and forgets removed ones.

        Raises:
            ValueError: If items are ranked by score and new ones have none.
        """
        removed_value = jnp.full(removed.shape, -jnp.inf, jnp.float32)
        index = jnp.concatenate([added, removed])
        value = jnp.concatenate([self._new_values(state, added, value), removed_value])
        mass_of_first = jnp.ones(added.shape, jnp.float32)
        masses = set_masses(state.masses, added, mass_of_first, removed)
        return self._changed(state.replace(masses=masses), index, value)

    def with_default_of(self, state: RankState, before: RankState) -> RankState:
        largest = before.values.root("max")
        return state.replace(values=state.values.replace_root("max", largest))

    def set_priority(self, state: RankState, index: Index, value: Floats) -> RankState:
        """Sets the priorities (or scores) of existing items."""
        return self._changed(state, index, value)

    def on_hyperparameters(self, state: RankState) -> RankState:
        masses = self._sorted(state.values, state.masses)
        return RankState(state.values, masses, jnp.zeros_like(state.changes))

    def move(self, empty: RankState, state: RankState, moves: Moves) -> RankState:
        old, new = (state.values, state.masses), (empty.values, empty.masses)
        values, masses = moves(new, old)
        return RankState(values, self._sorted(values, masses), jnp.int32(0))

    def by_slot(self, state: RankState) -> dict[str, Float[Array, " N"]]:
        return {self.by: state.values.leaves}

    def masses(self, state: RankState, occupancy: Occupancy) -> SegmentTree:
        del occupancy
        return state.masses

    def probability(self, state: RankState, index: Index, occupancy: Occupancy) -> Floats:
        """Returns the probability that a single draw gives each of these live items."""
        del occupancy
        return over(state.masses.read(index)[1], state.masses.root("sum"))

    def support(self, state: RankState, occupancy: Occupancy) -> Support:
        """Returns the support: all items."""
        del occupancy
        masses = state.masses
        return Support(masses.nnz, over(masses.root("min_positive"), masses.root("sum")))

    def metrics(self, state: RankState, occupancy: Occupancy) -> dict[str, Array]:
        """Returns statistics of the priorities (or scores), an effective size, and the changes.

        ``effective_sample_size`` is the number of equally likely items with the same diversity, the
        inverse of the sum of squared probabilities. ``changes_since_sort`` is always less than
        ``sort_every``.
        """
        live = occupancy.live(jnp.arange(state.values.capacity, dtype=jnp.int32))
        share = over(state.masses.leaves, state.masses.root("sum"))
        metrics = score_metrics(state.values.leaves, live, occupancy.size)
        return {
            **{name.replace("score", self.by): number for name, number in metrics.items()},
            "effective_sample_size": effective_size(share),
            "changes_since_sort": state.changes,
        }

    def check_valid(
        self, state: RankState, name: str, live: NDArray[np.bool_], occupancy: Occupancy
    ) -> Iterator[str]:
        value, mass = np.asarray(state.values.leaves), np.asarray(state.masses.leaves)
        in_empty = ~live & (value > -np.inf)
        yield from first_wrong(f"{name}.values.leaves", value, in_empty, "-inf, empty slot")
        evicted_by = occupancy.places.item_scores() if self.uses_score else None
        if evicted_by is not None:
            wrong = live & (value != np.asarray(evicted_by))
            yield from first_wrong(f"{name}.values.leaves", value, wrong, evicted_by)
        changes = np.asarray(state.changes)
        wrong = (changes < 0) | (changes >= self.sort_every)
        legal = f"at least 0 and less than sort_every, {self.sort_every}"
        yield from first_wrong(f"{name}.changes", changes, wrong, legal)
        label = f"{name}.masses.leaves"
        yield from first_wrong(label, mass, ~live & (mass != 0), "0, empty slot")
        yield from first_wrong(label, mass, live & ~(mass > 0), "above 0, the slot holds an item")
        if changes == 0:
            order = np.argsort(-value[live], kind="stable")
            expected = np.zeros(mass.shape, np.float32)
            rank = jnp.arange(1, len(order) + 1, dtype=jnp.int32)
            expected[np.flatnonzero(live)[order]] = np.asarray(self.mass(rank))
            wrong = live & ~np.isclose(mass, expected, rtol=1e-5, atol=0)
            what = [f"{number:.7g}, the mass of its rank" for number in expected]
            yield from first_wrong(label, mass, wrong, np.asarray(what, object))

    def mass(self, rank: Int[Array, " N"]) -> Float[Array, " N"]:
        """Returns ``rank ** -alpha``, clipped to at least 2**-126."""
        # A larger exponent gives the same masses, but does not fit a float32.
        exponent = jnp.float32(-at_most(self.alpha, 1e30))
        mass = jnp.power(rank.astype(jnp.float32), exponent)
        return jnp.maximum(mass, jnp.float32(TINY))

    def _new_values(self, state: RankState, added: Index, value: Floats | None) -> Floats:
        """Returns the values of new items; the default where no legal priority is given."""
        if self.by == "score":
            if value is None and added.shape[0] > 0:
                raise ValueError("RankBased draws by score; pass score=[B] to add")
            return jnp.zeros((0,), jnp.float32) if value is None else value
        largest = jnp.maximum(state.values.root("max"), jnp.float32(1.0))
        default = jnp.broadcast_to(largest, added.shape)
        return default if value is None else jnp.where(self.accepts(value), value, default)

    def _changed(self, state: RankState, index: Index, value: Floats) -> RankState:
        """Sets values, and sorts if it is time."""
        values = state.values.set(index, value)
        any_changed = jnp.any((index >= 0) & (index < values.capacity))
        changes = state.changes + any_changed.astype(jnp.int32)

        def is_due(carry: tuple[SegmentTree, Array]) -> Array:
            return carry[1] >= self.sort_every

        def sort(carry: tuple[SegmentTree, Array]) -> tuple[SegmentTree, Array]:
            # The sort needs the masses of the carry, which tell the items, so XLA cannot move it
            # ahead of the loop (see ``core.order``).
            masses, changes = carry
            return self._sorted(values, masses), changes - changes

        # A loop of at most one step. Unlike a cond under vmap, it runs only if a buffer needs it.
        begin = vary_with((state.masses, changes), (state.masses, values, changes))
        masses, changes = lax.while_loop(is_due, sort, begin)
        return RankState(values, masses, changes)

    def _sorted(self, values: SegmentTree, masses: SegmentTree) -> SegmentTree:
        """Returns the masses after a sort of the items, which are the slots that have some now."""
        slot = jnp.arange(values.capacity, dtype=jnp.int32)
        # Larger values come first, and empty slots last: a value never has the largest number.
        sort_key = jnp.where(masses.leaves > 0, ~to_rank(values.leaves), jnp.uint32(2**32 - 1))
        mass = jnp.where(slot < masses.nnz, self.mass(slot + 1), 0.0)
        unsorted = jnp.zeros(slot.shape, jnp.float32)
        return masses.set_all(unsorted.at[sorting.order(sort_key)].set(mass, unique_indices=True))

"""A sampler that draws items in proportion to their priorities.

References:
    Schaul et al., Prioritized Experience Replay, ICLR 2016, https://arxiv.org/abs/1511.05952.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int
from numpy.typing import NDArray

from jaxbuf.core import checks, guesses, native
from jaxbuf.core.hyperparameters import changed, is_fixed
from jaxbuf.core.numbers import TINY
from jaxbuf.core.problems import first_wrong
from jaxbuf.core.random import random_words
from jaxbuf.core.segment_tree import SegmentTree
from jaxbuf.core.types import Count, Floats, Function, Index, Key, Mask, Number, Words
from jaxbuf.occupancy.protocol import Occupancy
from jaxbuf.strategies.mass import (
    draw_distinct,
    draw_shards,
    ends,
    interval_of,
    is_priority,
    least_positive,
    over,
    points,
    set_masses,
)
from jaxbuf.strategies.protocols import (
    Draw,
    ShardableSampler,
    Support,
    Targets,
    uniform_probability,
)

# Masses are from ``TINY`` to this bound, so that a sum of 2**27 of them cannot overflow.
_LARGEST_MASS = 2.0**96
_FLOAT32_MAX = float(jnp.finfo(jnp.float32).max)
# Above this many slots a second random word refines every draw.
_ONE_WORD = 2**20


class MassSummary(NamedTuple):
    """The summary of one shard, or of each of several, for ``Prioritized``.

    Attributes:
        total: The sum of the masses, float32.
        least: The smallest positive mass; 0 if no mass is positive.
        largest: The largest mass.
        nnz: The number of positive masses, int32.
        size: The number of items, int32.
    """

    total: Float[Array, " S"]
    least: Float[Array, " S"]
    largest: Float[Array, " S"]
    nnz: Int[Array, " S"]
    size: Int[Array, " S"]


@dataclasses.dataclass(frozen=True)
class Prioritized(ShardableSampler):
    """Draws items with a probability proportional to their mass ``(p + epsilon) ** alpha``.

    This is proportional prioritization, with ``p`` the priority. An item with zero mass is never
    drawn (``0 ** 0`` is 0 here), unless all masses are zero; then all live items are equally
    likely. Positive priorities are at least ``2**-126``, and positive masses are clipped to
    ``[2**-126, 2**96]``.

    Attributes:
        alpha: The exponent of priorities; 0 is uniform over the items with positive mass. If it
            varies (see ``jaxbuf.Varying``), a new value applies to priorities that are set from
            then on, and so does one of ``epsilon``; what is stored keeps its mass. ``metrics`` and
            ``with_sampler`` compute priorities back from masses with the present ``alpha``, so that
            they are exact only if it never changed: a priority of 100 that was set under 1 reads as
            1e20 under 0.1. A new item gets the largest mass that there is.
        initial_priority: The smallest priority of an item that is added without one. It gets the
            largest priority in the buffer if that is larger. One outlier is therefore the default
            of all new items until every item with its priority has been updated, or has left,
            which may never happen. For a default that does not depend on the buffer, pass
            ``priority`` to ``add``.
        epsilon: A constant added to every priority; it may vary.
        uniform_mix: The fraction of draws that are uniform over the live items instead. The
            probabilities are those of ``Blend((Prioritized(), Uniform()), (1 - uniform_mix,
            uniform_mix))``. Unlike a blend, it also draws from the shards of a ``Sharded``, and
            without replacement. It may vary.
        stratified: Whether to draw one row from each of ``batch_size`` equal parts of the total
            mass, which reduces the variance and leaves the expected number of rows of each item
            unchanged. Ignored without replacement.
        replacement: Whether a batch may hold an item twice. If False, each row is drawn from the
            remaining items, and ``probability`` is the probability of the first draw (at least
            2**-126).

    Raises:
        ValueError: If a number is out of range, or a flag is neither True nor False.

    Example:
        >>> import jax.numpy as jnp, jaxbuf
        >>> sampler = jaxbuf.Prioritized(alpha=1.0)
        >>> buffer = jaxbuf.ItemBuffer.create(jnp.int32(0), 8, sampler=sampler)
        >>> buffer, slots = buffer.insert(jnp.arange(3), priority=jnp.array([1.0, 0.0, 3.0]))
        >>> buffer.get(slots).probability.tolist()
        [0.25, 0.0, 0.75]

    References:
        Schaul et al., Prioritized Experience Replay, ICLR 2016, section 3.3.
    """

    alpha: float = 0.6
    initial_priority: float = 1.0
    epsilon: float = 0.0
    uniform_mix: float = 0.0
    stratified: bool = True
    replacement: bool = True

    uses_priority = True
    varies: ClassVar[dict[str, tuple[float, float]]] = {
        "alpha": (0.0, math.inf),
        "epsilon": (0.0, math.inf),
        "uniform_mix": (0.0, 1.0),
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.settle(self, checks.check_nonnegative, "alpha", "initial_priority", "epsilon")
        checks.settle(self, checks.check_fraction, "uniform_mix")
        checks.settle(self, checks.check_flag, "stratified", "replacement")

    def init(self, capacity: int) -> SegmentTree:
        return SegmentTree.create(capacity, ops=("sum", "max", "min_positive"))

    def mass(self, priority: Float[Array, "..."]) -> Float[Array, "..."]:
        """Returns ``(priority + epsilon) ** alpha``, clipped; 0 where the base is 0."""
        base, _ = _base(priority, jnp.float32(self.epsilon))
        if is_fixed(self.alpha, 1.0):
            mass = base
        elif is_fixed(self.alpha, 0.5):
            mass = jnp.sqrt(base)
        else:
            mass = jnp.power(base, jnp.float32(self.alpha))
        return _within(mass, base)

    def accepts(self, value: Float[Array, "..."]) -> Bool[Array, "..."]:
        # XLA computes it once for both this and the mass.
        return _base(value, jnp.float32(self.epsilon))[1]

    def on_change(
        self, state: SegmentTree, added: Index, value: Floats | None, removed: Int[Array, " R"]
    ) -> SegmentTree:
        initial = self.mass(jnp.float32(self.initial_priority))
        mass = jnp.broadcast_to(jnp.maximum(initial, state.root("max")), added.shape)
        if value is not None:
            # A new item without a legal priority keeps this default.
            mass = jnp.where(self.accepts(value), self.mass(value), mass)
        return set_masses(state, added, mass, removed)

    def set_priority(self, state: SegmentTree, index: Index, value: Floats) -> SegmentTree:
        """Sets the masses of existing items."""
        return state.set(index, self.mass(value))

    def by_slot(self, state: SegmentTree) -> dict[str, Float[Array, " N"]]:
        return {"priority": self.priority(state.leaves)}

    def compared(self, state: SegmentTree) -> dict[str, Float[Array, " N"]]:
        return {"priority": state.leaves}

    @property
    def shardable(self) -> bool:
        """True with replacement; without it, each draw depends on all others."""
        return self.replacement

    def summarize(self, state: SegmentTree, occupancy: Occupancy) -> MassSummary:
        return MassSummary(
            total=state.root("sum"),
            least=state.root("min_positive"),
            largest=state.root("max"),
            nnz=state.nnz,
            size=occupancy.size,
        )

    def targets(self, summaries: MassSummary, key: Key, batch_size: int, capacity: int) -> Targets:
        return self._targets(summaries, key, batch_size, capacity, jnp.float32(self.uniform_mix))

    def draw_at(
        self, state: SegmentTree, occupancy: Occupancy, point: "_Point", summaries: MassSummary
    ) -> Draw:
        index, mass = self._find(state, occupancy, point)
        valid = jnp.broadcast_to(jnp.sum(summaries.size, axis=0) > 0, index.shape)
        return Draw(index, self._probability(summaries, mass), valid)

    def with_default_of(self, state: SegmentTree, before: SegmentTree) -> SegmentTree:
        return state.replace_root("max", before.root("max"))

    def with_global_default(self, state: SegmentTree, summaries: MassSummary) -> SegmentTree:
        return state.replace_root("max", jnp.max(summaries.largest))

    def draw(self, state: SegmentTree, key: Key, batch_size: int, occupancy: Occupancy) -> Draw:
        """Draws ``batch_size`` of the live items."""
        if self.replacement:
            return super().draw(state, key, batch_size, occupancy)
        summaries = self.summaries(state, occupancy)

        def propose(
            key: Key,
            rows: int,
            scratch: SegmentTree,
            occupancy: Occupancy,
            total: Number,
            uniform_mix: Number,
        ) -> Int[Array, " P"]:
            varies = isinstance(self.uniform_mix, jax.Array)
            sampler = changed(self, uniform_mix=uniform_mix) if varies else self
            # An item is drawn with ``(1 - mix) * mass / total + mix / size``. Of the first term,
            # ``left`` remains once items are drawn. Uniform draws go on over all items, and are
            # discarded if they hit drawn ones, so that the second term remains ``mix``.
            mix = jnp.where(total > 0, uniform_mix, jnp.float32(1.0))
            left = over((1 - mix) * scratch.root("sum"), total)
            uniform_share = jnp.where(mix > 0, mix / (left + mix), 0.0)
            rest = sampler.summaries(scratch, occupancy)
            targets = sampler._targets(rest, key, rows, scratch.capacity, uniform_share)
            return sampler._find(scratch, occupancy, targets.point)[0]

        count = jnp.minimum(batch_size, self.support_among(summaries).count)
        context = (occupancy, state.root("sum"), jnp.float32(self.uniform_mix))
        index, valid = draw_distinct(key, batch_size, count, state, propose, *context)
        index, mass = state.read(index)
        return Draw(index, self._probability(summaries, mass), valid)

    def draw_some(
        self, state: SegmentTree, key: Key, batch_size: int, count: Count, occupancy: Occupancy
    ) -> Draw:
        if self.sequential:
            return self.draw(state, key, batch_size, occupancy)
        summaries, mix = self.summaries(state, occupancy), jnp.float32(self.uniform_mix)
        targets = self._targets(summaries, key, batch_size, occupancy.capacity, mix, count)
        return self.draw_at(state, occupancy, targets.point, summaries)

    def probability_among(self, state: SegmentTree, index: Index, summaries: MassSummary) -> Floats:
        return self._probability(summaries, state.read(index)[1])

    def support_among(self, summaries: MassSummary) -> Support:
        size, nnz = (jnp.sum(n, axis=0, dtype=jnp.int32) for n in (summaries.size, summaries.nnz))
        least = least_positive(summaries.least)
        mixes = self.uniform_mix > 0
        count = jnp.where(mixes | (nnz == 0), size, nnz)
        least = jnp.where(mixes & (nnz < size), 0.0, least)
        return Support(count, self._probability(summaries, least))

    def metrics(self, state: SegmentTree, occupancy: Occupancy) -> dict[str, Array]:
        """Returns statistics of the priorities, computed from masses, and an effective size.

        ``effective_sample_size`` is the number of equally likely items with the same diversity, the
        inverse of the sum of squared probabilities.
        """
        size, mass, largest = occupancy.size, state.leaves, state.root("max")
        count = jnp.maximum(size, 1).astype(jnp.float32)
        # Empty slots have no mass. An item without mass has the least priority, which is 0.
        least = jnp.where(state.nnz < size, 0.0, state.root("min_positive"))
        scaled = over(mass, largest)
        squares = over(jnp.sum(scaled * scaled), jnp.sum(scaled) ** 2)
        mix = self.uniform_mix
        # The sum of ``((1 - mix) * mass / total + mix / count) ** 2``.
        squares = (1 - mix) ** 2 * squares + mix * (2 - mix) / count
        effective_size = jnp.where(largest > 0, over(1.0, squares), size.astype(jnp.float32))
        return {
            "priority_min": self.priority(least),
            "priority_max": self.priority(largest),
            "priority_mean": jnp.sum(self.priority(mass, _quick_power) / count),
            "effective_sample_size": effective_size,
        }

    def check_valid(
        self, state: SegmentTree, name: str, live: NDArray[np.bool_], occupancy: Occupancy
    ) -> Iterator[str]:
        del occupancy
        mass = np.asarray(state.leaves)
        wrong = ~live & (mass != 0)
        yield from first_wrong(f"{name}.leaves", mass, wrong, "0, empty slot")

    def priority(
        self, mass: Float[Array, "..."], power: Function = jnp.power
    ) -> Float[Array, "..."]:
        """Returns the priority with this mass; 1 if alpha is 0, where masses do not tell."""
        if is_fixed(self.alpha, 0.0):
            return jnp.where(mass > 0, 1.0, 0.0)
        if isinstance(self.alpha, jax.Array):
            is_positive = self.alpha > 0
            base = power(mass, 1.0 / jnp.where(is_positive, self.alpha, 1.0))
            # The mass may be of another alpha, and its priority under this one exceed a float32.
            base = jnp.where(is_positive, jnp.clip(base, TINY, _FLOAT32_MAX), 1.0)
        else:
            base = mass if self.alpha == 1.0 else power(mass, jnp.float32(1.0 / self.alpha))
        return jnp.where(mass > 0, jnp.maximum(base - jnp.float32(self.epsilon), 0.0), 0.0)

    @property
    def sequential(self) -> bool:
        """True unless each row is drawn from a stratum of its own."""
        return not (self.stratified and self.replacement)

    @property
    def _mixes(self) -> bool:
        """True if some draws may be uniform."""
        return not is_fixed(self.uniform_mix, 0.0)

    def _probability(
        self, summaries: MassSummary, mass: Float[Array, "..."]
    ) -> Float[Array, "..."]:
        """Returns the probability that a draw gives an item of this mass."""
        total = ends(summaries.total)[-1]
        uniform = uniform_probability(jnp.sum(summaries.size, axis=0, dtype=jnp.int32))
        # Not divided in the kernel: XLA may multiply by the inverse, which rounds in another way.
        probability = _clip_probability(over(mass, total), mass, total, uniform)
        if not self._mixes:
            return probability
        probability = (1.0 - self.uniform_mix) * probability + self.uniform_mix * uniform
        return jnp.where(total > 0, probability, uniform)

    def _targets(
        self,
        summaries: MassSummary,
        key: Key,
        batch_size: int,
        capacity: int,
        mix: Number,
        count: Count | None = None,
    ) -> Targets:
        """Returns targets with replacement, a fraction ``mix`` of which is uniform."""
        refined = capacity > _ONE_WORD
        # A word for the point, one to refine it, one for the item of a uniform draw, and one for
        # the coin that decides whether the draw is uniform.
        words = random_words(key, (1 + refined + 2 * self._mixes, batch_size))
        word, low = words[0], words[1] if refined else None
        end = ends(summaries.total)
        stratified = not self.sequential
        point, refine = points(word, low, end[-1], stratified=stratified, count=count)
        shard, point = interval_of(end, point)
        # If the total mass is zero, every draw is uniform.
        by_mass = jnp.broadcast_to(end[-1] > 0, (batch_size,))
        if self._mixes:
            coin = (words[-1] >> jnp.uint32(8)).astype(jnp.float32) * jnp.float32(2.0**-24)
            by_mass = by_mass & (coin >= mix)
            # A varying mix of 0 draws the same items as one that is fixed at 0.
            word = jnp.where(self.uniform_mix > 0, words[-2], word)
        shard = jnp.where(by_mass, shard, draw_shards(summaries.size, key, batch_size))
        return Targets(shard, _Point(point, refine, word, by_mass))

    def _find(
        self, state: SegmentTree, occupancy: Occupancy, point: "_Point"
    ) -> tuple[Index, Floats]:
        """Returns the slots at these points, and their masses."""
        index, mass = state.find(point.prefix, point.refine)
        index = occupancy.draw_where(~point.by_mass, point.word, index)
        return state.read(index) if self._mixes else (index, mass)


Prioritized.__init__ = guesses.answered(Prioritized.__init__)


@native.kernel("mass_base")
def _base(
    priority: Float[Array, "..."], epsilon: Number
) -> tuple[Float[Array, "..."], Bool[Array, "..."]]:
    """Returns ``max(priority, TINY) + epsilon``, or ``epsilon`` for a priority of 0.

    Negative priorities count as 0. Also returns a mask of the legal ones.
    """
    # Compares bits, since XLA may take the smallest (subnormal) numbers for zeros. Negative
    # ones are refused elsewhere, and must not make a NaN here: ``jax_debug_nans`` would raise.
    positive = lax.bitcast_convert_type(priority, jnp.int32) > 0
    least = jnp.maximum(priority, jnp.float32(TINY))
    base = jnp.where(positive, least, jnp.zeros_like(priority)) + epsilon
    return base, is_priority(priority)


@native.kernel("mass_within")
def _within(mass: Float[Array, "..."], base: Float[Array, "..."]) -> Float[Array, "..."]:
    """Returns the mass within the bounds of masses, 0 where the base is 0."""
    mass = jnp.clip(mass, jnp.float32(TINY), jnp.float32(_LARGEST_MASS))
    return jnp.where(base > 0, mass, jnp.zeros_like(mass))


@native.kernel("mass_share")
def _clip_probability(
    probability: Float[Array, "..."], mass: Float[Array, "..."], total: Number, uniform: Number
) -> Float[Array, "..."]:
    """Returns a probability, at least ``TINY`` if there is mass; ``uniform`` without a total."""
    least = jnp.where(mass > 0, jnp.float32(TINY), jnp.zeros_like(mass))
    return jnp.where(total > 0, jnp.maximum(probability, least), uniform)


def _quick_power(base: Float[Array, "..."], exponent: Array) -> Float[Array, "..."]:
    """Returns ``base ** exponent`` to about six digits, in an eighth of the time on a CPU."""
    return jnp.exp2(jnp.log2(base) * exponent)


class _Point(NamedTuple):
    """The points of a draw.

    Attributes:
        prefix: A point in the mass of the shard.
        refine: An offset that refines it; see ``SegmentTree.find``.
        word: A random word for a uniform draw.
        by_mass: Whether the row is drawn by mass, else uniformly.
    """

    prefix: Floats
    refine: Floats
    word: Words
    by_mass: Mask

"""A sampler that draws from the softmax of scores."""

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Float, Int
from numpy.typing import NDArray

from jaxbuf.core import checks, sorting
from jaxbuf.core.hyperparameters import at_most
from jaxbuf.core.numbers import TINY
from jaxbuf.core.order import after
from jaxbuf.core.problems import first_wrong
from jaxbuf.core.random import random_words
from jaxbuf.core.segment_tree import SegmentTree
from jaxbuf.core.seldom import if_needed
from jaxbuf.core.types import Count, Floats, Index, Key, Mask, Number
from jaxbuf.core.versions import vary_with
from jaxbuf.occupancy.protocol import Occupancy
from jaxbuf.occupancy.ranking import score_metrics
from jaxbuf.strategies.mass import (
    draw_distinct,
    effective_size,
    ends,
    interval_of,
    least_positive,
    over,
    points,
)
from jaxbuf.strategies.moves import Moves
from jaxbuf.strategies.protocols import Draw, ShardableSampler, Support, Targets

# The largest distance, in units of the temperature, of the largest score from the reference of the
# masses; beyond it masses are recomputed. Given the range of float32, masses down to exp(-67) times
# the largest one can then be distinguished from zero.
_DRIFT = 20.0


class SoftmaxState(struct.PyTreeNode):
    """The state of ``Softmax``.

    Attributes:
        scores: The scores and their maximum; −inf for empty slots.
        masses: The masses ``exp((score - reference) / temperature)`` and their sums.
        reference: A value near the largest score, or that score itself if it is infinite; ``[]``.
    """

    scores: SegmentTree
    masses: SegmentTree
    reference: Number


class _Summary(NamedTuple):
    """The summary of a shard for ``Softmax``: its masses, and the reference score."""

    total: Float[Array, " S"]
    least: Float[Array, " S"]
    nnz: Int[Array, " S"]
    reference: Float[Array, " S"]


@dataclasses.dataclass(frozen=True)
class Softmax(ShardableSampler):
    """Draws items with a probability proportional to ``exp(score / temperature)``.

    Masses are computed relative to a reference near the largest score, so scores of any range are
    numerically stable. An item with a score of −inf is never drawn; items with +inf share all the
    probability evenly.

    A sum tree holds the masses, so that a draw with replacement costs ``O(log capacity)``, and an
    add updates only the paths of the new items; a log-sum-exp over all slots would cost a pass over
    the buffer for each batch. All masses are recomputed only if the largest score has moved far.
    Without replacement, items are drawn by mass and then removed. Items with less than e**-67 times
    the largest mass count as massless. They are drawn only if there are too few others for a batch;
    then the items with the largest scores after adding Gumbel noise are drawn, which costs a pass.

    Attributes:
        temperature: A number above 0; a lower temperature prefers the highest scores more strongly.
            If it varies (see ``jaxbuf.Varying``), a new value applies to all items at once, at the
            cost of a pass over all slots.
        replacement: Whether a batch may hold an item twice. If False, ``probability`` is the
            probability of the first draw (at least 2**-126), and rows beyond the number of items
            are invalid.
        fallback: Without replacement, whether to draw the whole batch with replacement if it has
            more rows than there are items.

    Raises:
        ValueError: If ``temperature`` is not finite or not above 0, or if ``fallback`` is set
            although ``replacement`` is True.

    References:
        Kool et al., Stochastic Beams and Where to Find Them, ICML 2019 (Gumbel top-k).

    Example:
        >>> import jax, jax.numpy as jnp, jaxbuf
        >>> sampler = jaxbuf.Softmax(replacement=False)
        >>> buffer = jaxbuf.ItemBuffer.create(jnp.float32(0), 5, sampler=sampler)
        >>> buffer = buffer.add(jnp.arange(5.0), score=jnp.arange(5.0))
        >>> batch = buffer.sample(jax.random.key(0), 5)
        >>> [round(float(p), 4) for p in batch.probability[jnp.argsort(batch.data)]]
        [0.0117, 0.0317, 0.0861, 0.2341, 0.6364]
    """

    temperature: float = 1.0
    replacement: bool = True
    fallback: bool = False

    uses_score = True
    varies: ClassVar[dict[str, tuple[float, float]]] = {"temperature": (TINY, math.inf)}

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.settle(self, _check_temperature, "temperature")
        checks.settle(self, checks.check_flag, "replacement", "fallback")
        if self.fallback and self.replacement:
            raise ValueError("fallback requires replacement=False; set both, or leave it out")

    def init(self, capacity: int) -> SoftmaxState:
        return SoftmaxState(
            scores=SegmentTree.create(capacity, ops=("max",)),
            masses=SegmentTree.create(capacity, ops=("sum", "min_positive")),
            reference=jnp.float32(-jnp.inf),
        )

    def accepts(self, value: Float[Array, "..."]) -> Bool[Array, "..."]:
        return ~jnp.isnan(value)

    def on_change(
        self, state: SoftmaxState, added: Index, value: Floats | None, removed: Int[Array, " R"]
    ) -> SoftmaxState:
        """Sets the scores of new items, and −inf in the place of removed ones.

        Raises:
            ValueError: If there are new items without scores.
        """
        if value is None:
            if added.shape[0] > 0:
                raise ValueError("Softmax draws by score; pass score=[B] to add")
            value = jnp.zeros((0,), jnp.float32)
        removed_score = jnp.full(removed.shape, -jnp.inf, jnp.float32)
        index, value = jnp.concatenate([added, removed]), jnp.concatenate([value, removed_score])
        return self.set_priority(state, index, value)

    def set_priority(self, state: SoftmaxState, index: Index, value: Floats) -> SoftmaxState:
        """Sets scores, and computes all masses anew if the largest one has moved far."""
        scores = state.scores.set(index, value)
        masses = state.masses.set(index, self._mass(value, state.reference))
        largest = scores.root("max")
        # At most some number, since an infinite drift could not be subtracted from infinities.
        drift = jnp.float32(_DRIFT * at_most(self.temperature, 2.0**120))

        def outdated(carry: tuple[SegmentTree, Array]) -> Array:
            # The difference of equal infinities would be NaN.
            return (largest > carry[1] + drift) | (largest < carry[1] - drift)

        def rebuild(carry: tuple[SegmentTree, Array]) -> tuple[SegmentTree, Array]:
            masses, reference = carry
            # Dependent on the carry, so that XLA does not compute this ahead of the loop.
            nodes = jax.tree.map(lambda bits: after(bits, reference), scores.nodes)
            leaves = scores.replace(nodes=nodes).leaves
            return masses.set_all(self._mass(leaves, largest)), largest

        # A loop of at most one step. Unlike a cond under vmap, it runs only if a buffer needs it.
        begin = vary_with((masses, state.reference), (scores, masses))
        masses, reference = lax.while_loop(outdated, rebuild, begin)
        return SoftmaxState(scores, masses, reference)

    def on_hyperparameters(self, state: SoftmaxState) -> SoftmaxState:
        largest = state.scores.root("max")
        masses = state.masses.set_all(self._mass(state.scores.leaves, largest))
        return SoftmaxState(state.scores, masses, largest)

    def move(self, empty: SoftmaxState, state: SoftmaxState, moves: Moves) -> SoftmaxState:
        """Sets the scores again, so that masses are relative to the largest one that stays."""
        return self.set_priority(empty, moves.target, state.scores.leaves[moves.source])

    def by_slot(self, state: SoftmaxState) -> dict[str, Float[Array, " N"]]:
        return {"score": state.scores.leaves}

    @property
    def shardable(self) -> bool:
        """True with replacement; without it, each draw depends on all others."""
        return self.replacement

    def summarize(self, state: SoftmaxState, occupancy: Occupancy) -> _Summary:
        del occupancy
        masses = state.masses
        return _Summary(
            masses.root("sum"), masses.root("min_positive"), masses.nnz, state.reference
        )

    def targets(self, summaries: _Summary, key: Key, batch_size: int, capacity: int) -> Targets:
        del capacity
        scale = self._scale(summaries.reference, summaries)
        word, low = random_words(key, (2, batch_size))
        end = ends(summaries.total * scale)
        point, refine = points(word, low, end[-1], stratified=False)
        shard, point = interval_of(end, point)
        row_scale = scale[shard]
        row_scale = jnp.where(row_scale > 0, row_scale, 1.0)
        return Targets(shard, (point / row_scale, refine / row_scale))

    def draw_at(
        self,
        state: SoftmaxState,
        occupancy: Occupancy,
        point: tuple[Floats, Floats],
        summaries: _Summary,
    ) -> Draw:
        del occupancy
        index, mass = state.masses.find(*point)
        valid = jnp.broadcast_to(self._total(summaries) > 0, index.shape)
        return Draw(index, self._probability(summaries, mass, state.reference), valid)

    def support_among(self, summaries: _Summary) -> Support:
        """Returns the support: the items whose score is above −inf."""
        total = self._total(summaries)
        scale = self._scale(summaries.reference, summaries)
        least = least_positive(summaries.least * scale)
        least = jnp.maximum(over(least, total), TINY)
        # Next to the largest score of all shards, the masses of a whole shard may vanish.
        has_mass = summaries.total * scale > 0
        count = jnp.sum(jnp.where(has_mass, summaries.nnz, 0), axis=0, dtype=jnp.int32)
        return Support(count, jnp.where(total > 0, least, 0.0))

    def draw(self, state: SoftmaxState, key: Key, batch_size: int, occupancy: Occupancy) -> Draw:
        """Draws ``batch_size`` of the items whose score is above −inf."""
        return self.draw_some(state, key, batch_size, None, occupancy)

    def draw_some(
        self,
        state: SoftmaxState,
        key: Key,
        batch_size: int,
        count: Count | None,
        occupancy: Occupancy,
    ) -> Draw:
        if self.replacement:
            return super().draw(state, key, batch_size, occupancy)
        if not self.fallback:
            index, valid = self._without_replacement(state, key, batch_size)
        else:
            key, repeat_key = jax.random.split(key)
            index, valid = self._without_replacement(state, key, batch_size)
            repeated = super().draw(state, repeat_key, batch_size, occupancy)
            row = jnp.arange(batch_size, dtype=jnp.int32)
            enough = jnp.all(valid if count is None else valid | (row >= count))
            index = jnp.where(enough, index, repeated.index)
            valid = jnp.where(enough, valid, repeated.valid)
        index, mass = state.masses.read(index)
        summaries = self.summaries(state, occupancy)
        return Draw(index, self._probability(summaries, mass, state.reference), valid)

    def probability_among(self, state: SoftmaxState, index: Index, summaries: _Summary) -> Floats:
        index, mass = state.masses.read(index)
        if self.replacement:
            scale = self._scale(state.reference, summaries)
            drawn = (mass > 0) & (state.masses.root("sum") * scale > 0)
        else:
            # Noise draws items whose masses vanish as well.
            drawn = state.scores.read(index)[1] > -jnp.inf
        return jnp.where(drawn, self._probability(summaries, mass, state.reference), 0.0)

    def support(self, state: SoftmaxState, occupancy: Occupancy) -> Support:
        """Returns the support: the items whose score is above −inf."""
        support = super().support(state, occupancy)
        if self.replacement:
            return support
        count = jnp.sum(state.scores.leaves > -jnp.inf, dtype=jnp.int32)
        light = (count > state.masses.nnz) & (support.count > 0)
        return Support(count, jnp.where(light, TINY, support.least_probability))

    def metrics(self, state: SoftmaxState, occupancy: Occupancy) -> dict[str, Array]:
        """Returns statistics of the scores of live items, and an effective size.

        ``effective_sample_size`` is the number of equally likely items with the same diversity, the
        inverse of the sum of squared probabilities.
        """
        live = occupancy.live(jnp.arange(state.scores.capacity, dtype=jnp.int32))
        probability = over(state.masses.leaves, state.masses.root("sum"))
        return {
            **score_metrics(state.scores.leaves, live, occupancy.size),
            "effective_sample_size": effective_size(probability),
        }

    def check_valid(
        self, state: SoftmaxState, name: str, live: NDArray[np.bool_], occupancy: Occupancy
    ) -> Iterator[str]:
        score, mass = np.asarray(state.scores.leaves), np.asarray(state.masses.leaves)
        in_empty = ~live & (score > -np.inf)
        yield from first_wrong(f"{name}.scores.leaves", score, in_empty, "-inf, empty slot")
        evicted_by = occupancy.places.item_scores()
        if evicted_by is not None:
            wrong = live & (score != np.asarray(evicted_by))
            yield from first_wrong(f"{name}.scores.leaves", score, wrong, evicted_by)
        reference = np.asarray(state.reference)
        largest = score.max()
        if np.isinf(largest) or np.isinf(reference):
            yield from first_wrong(
                f"{name}.reference", reference, reference != largest, str(largest)
            )
            expected = ((score == largest) & (largest > 0)).astype(np.float32)
        else:
            with np.errstate(over="ignore"):
                expected = np.exp((score - reference) / np.float32(self.temperature))
        # The smallest masses count as zero.
        wrong = ~np.isclose(mass, expected, rtol=1e-3, atol=1e-37)
        yield from first_wrong(f"{name}.masses.leaves", mass, wrong, expected)

    def _mass(self, score: Floats, reference: Number) -> Floats:
        """Returns ``exp((score - reference) / temperature)``.

        If the reference is infinite, the mass is 1 for scores of +inf, if that is the reference,
        and 0 for all others.
        """
        finite = jnp.isfinite(reference)
        exponent = (score - jnp.where(finite, reference, 0.0)) / jnp.float32(self.temperature)
        mass = jnp.exp(jnp.minimum(exponent, 2 * _DRIFT))
        mass = jnp.where(mass >= TINY, mass, 0.0)
        equal = (score == reference) & (reference > 0)
        return jnp.where(finite, mass, equal.astype(jnp.float32))

    def _scale(self, reference: Float[Array, "..."], summaries: _Summary) -> Float[Array, "..."]:
        """Returns the factor that converts masses to the largest reference of all shards."""
        largest = jnp.max(summaries.reference, axis=0)
        # The difference of equal infinities is NaN.
        same = reference == largest
        distance = jnp.where(same, 0.0, reference) - jnp.where(same, 0.0, largest)
        return jnp.exp(distance / jnp.float32(self.temperature))

    def _total(self, summaries: _Summary) -> Number:
        return ends(summaries.total * self._scale(summaries.reference, summaries))[-1]

    def _probability(self, summaries: _Summary, mass: Floats, reference: Number) -> Floats:
        """Returns the probability of masses that are relative to a reference."""
        total = self._total(summaries)
        share = over(self._scale(reference, summaries), total)
        return jnp.maximum(mass * share, jnp.float32(TINY))

    def _without_replacement(
        self, state: SoftmaxState, key: Key, batch_size: int
    ) -> tuple[Index, Mask]:
        enough = state.masses.nnz >= batch_size
        # With too few items the loop of a draw by mass would not find a batch.
        count = jnp.where(enough, batch_size, 0)
        by_mass = draw_distinct(key, batch_size, count, state.masses)
        by_noise = functools.partial(_draw_by_noise, batch_size=batch_size)
        temperature = jnp.float32(self.temperature)
        # One of the two draws counts, so that both may have the key.
        again = jax.random.clone(key)
        return if_needed(~enough, by_noise, by_mass, again, state.scores, temperature)


def _draw_by_noise(
    key: Key, scores: SegmentTree, temperature: Number, *, batch_size: int
) -> tuple[Index, Mask]:
    """Draws the items with the largest scores after adding Gumbel noise, out of all slots."""
    score = scores.leaves
    finite = jnp.isfinite(score)
    largest = jnp.max(jnp.where(finite, score, -jnp.inf))
    logit = (score - jnp.where(jnp.isfinite(largest), largest, 0.0)) / temperature
    key, infinite_key = jax.random.split(key)
    noisy = jnp.maximum(logit, -1e37) + jax.random.gumbel(key, score.shape, jnp.float32)
    # Scores of +inf come first, in random order among themselves.
    infinite = jnp.float32(2.0**126) * (
        1.0 + jax.random.uniform(infinite_key, score.shape, jnp.float32)
    )
    rank = jnp.where(finite, noisy, jnp.where(score > 0, infinite, -jnp.inf))
    value, index = sorting.largest(rank, min(batch_size, score.shape[0]))
    padding = (0, batch_size - index.shape[0])
    return jnp.pad(index, padding), jnp.pad(value > -jnp.inf, padding)


def _check_temperature(name: str, value: object) -> float:
    """Returns a temperature as a Python float.

    Raises:
        ValueError: If it is not a finite number above 0.
    """
    expected = "a finite number above 0"
    return checks.check_number(name, value, expected, lambda x: TINY <= x < math.inf)

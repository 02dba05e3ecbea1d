"""How items are drawn.

References:
    Schaul et al., Prioritized Experience Replay, ICLR 2016, https://arxiv.org/abs/1511.05952.
"""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, UInt

from jaxbuf.core import checks
from jaxbuf.core.random import random_words
from jaxbuf.core.segment_tree import SegmentTree
from jaxbuf.occupancy.protocol import Occupancy
from jaxbuf.strategies.distinct import distinct
from jaxbuf.strategies.protocols import Draw, KnownSampler, Support, share

# Masses lie in between, so that finite priorities cannot overflow a sum of 2**27 of them.
_LEAST_MASS = float(jnp.finfo(jnp.float32).tiny)
_LARGEST_MASS = 2.0**96
# Above this many slots a second random word refines every draw.
_ONE_WORD = 2**20


@dataclasses.dataclass(frozen=True)
class Uniform(KnownSampler):
    """Every live item with the same probability.

    Attributes:
        replacement: Whether a batch may hold an item twice. Without, rows beyond the number of
            items are invalid.
    """

    replacement: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "replacement", checks.check_flag("replacement", self.replacement))

    def draw(self, state: Any, key: PRNGKeyArray, batch_size: int, occupancy: Occupancy) -> Draw:
        """Draw ``batch_size`` of the live items."""
        del state
        size = occupancy.size
        probability = jnp.broadcast_to(share(size), (batch_size,))
        if self.replacement:
            index = occupancy.draw(random_words(key, (batch_size,)))
            return Draw(index, probability, jnp.broadcast_to(size > 0, (batch_size,)))
        index, valid = distinct(
            key,
            batch_size,
            jnp.minimum(batch_size, size),
            (),
            lambda key, rows, _: occupancy.draw(random_words(key, (rows,))),
            None,
            occupancy.capacity,
        )
        return Draw(index, probability, valid)

    def probability(
        self, state: Any, index: Int[Array, " B"], occupancy: Occupancy
    ) -> Float[Array, " B"]:
        """The probability with which a single draw gives each of these live items."""
        del state
        return jnp.broadcast_to(share(occupancy.size), index.shape)

    def support(self, state: Any, occupancy: Occupancy) -> Support:
        """All live items."""
        del state
        return Support(occupancy.size, share(occupancy.size))

    def metrics(self, state: Any, occupancy: Occupancy) -> dict[str, Array]:
        """``effective_sample_size``: all of them."""
        del state
        return {"effective_sample_size": occupancy.size.astype(jnp.float32)}


@dataclasses.dataclass(frozen=True)
class Prioritized(KnownSampler):
    """Proportional prioritization: probability proportional to the mass ``(p + epsilon) ** alpha``.

    A zero mass is never drawn (``0 ** 0`` is 0 here), unless all masses are zero: then all live
    items are equally likely. Masses are clipped to ``[2**-126, 2**96]``.

    Attributes:
        alpha: How much priorities matter; 0 is uniform over the items with positive mass.
        initial_priority: The least priority of an item that is added without one. It gets the
            largest in the buffer if that is larger.
        epsilon: Added to every priority.
        uniform_mix: Fraction of draws that are uniform over the live items instead.
        stratified: One draw from each of ``batch_size`` equal parts of the total mass, for less
            variance; the probability of each item in a batch is the same on average. Ignored
            without replacement.
        replacement: Whether a batch may hold an item twice. Without, items are drawn one after the
            other from those that are left; ``probability`` is that of the first draw.

    Raises:
        ValueError: If a number is out of its range.

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

    def __post_init__(self) -> None:
        for name in ("alpha", "initial_priority", "epsilon"):
            number = checks.check_number(
                name,
                getattr(self, name),
                "a finite number of at least 0",
                lambda x: 0 <= x < math.inf,
            )
            object.__setattr__(self, name, number)
        mix = checks.check_fraction("uniform_mix", self.uniform_mix)
        object.__setattr__(self, "uniform_mix", mix)
        for name in ("stratified", "replacement"):
            object.__setattr__(self, name, checks.check_flag(name, getattr(self, name)))

    def init(self, capacity: int) -> SegmentTree:
        """A tree of masses, all zero."""
        return SegmentTree.create(capacity, ops=("sum", "max", "min_positive"))

    def mass(self, priority: Float[Array, " B"]) -> Float[Array, " B"]:
        """``(priority + epsilon) ** alpha``, clipped; 0 where the base is 0."""
        base = priority + jnp.float32(self.epsilon)
        if self.alpha == 1.0:
            mass = base
        elif self.alpha == 0.5:
            mass = jnp.sqrt(base)
        else:
            mass = jnp.power(base, jnp.float32(self.alpha))
        mass = jnp.clip(mass, jnp.float32(_LEAST_MASS), jnp.float32(_LARGEST_MASS))
        return jnp.where(base > 0, mass, jnp.zeros_like(mass))

    def accepts(self, value: Float[Array, " B"]) -> Bool[Array, " B"]:
        """Finite and not negative."""
        return jnp.isfinite(value) & (value >= 0)

    def on_add(
        self, state: SegmentTree, index: Int[Array, " B"], value: Float[Array, " B"] | None
    ) -> SegmentTree:
        """Set the masses of new items."""
        return state.set(index, self._new_masses(state, index, value))

    def set_priority(
        self, state: SegmentTree, index: Int[Array, " B"], value: Float[Array, " B"]
    ) -> SegmentTree:
        """Set the masses of items that are there."""
        return state.set(index, self.mass(value))

    def remove(self, state: SegmentTree, index: Int[Array, " B"]) -> SegmentTree:
        """Take the masses of items away."""
        return without(state, index)

    def on_slide(
        self,
        state: SegmentTree,
        added: Int[Array, " B"],
        value: Float[Array, " B"] | None,
        removed: Int[Array, " R"],
    ) -> SegmentTree:
        """Set the masses of new windows, and take those of others away, all at once."""
        mass = self._new_masses(state, added, value)
        gone = jnp.zeros(removed.shape, jnp.float32)
        return state.set(jnp.concatenate([added, removed]), jnp.concatenate([mass, gone]))

    def draw(
        self, state: SegmentTree, key: PRNGKeyArray, batch_size: int, occupancy: Occupancy
    ) -> Draw:
        """Draw ``batch_size`` of the live items."""
        size = occupancy.size
        if self.replacement:
            mix = jnp.float32(self.uniform_mix)
            index, mass = self._propose(state, key, batch_size, occupancy, mix)
            valid = jnp.broadcast_to(size > 0, (batch_size,))
        else:
            total = state.root("sum")

            def propose(key: PRNGKeyArray, rows: int, scratch: SegmentTree) -> Int[Array, " P"]:
                # Uniform draws keep hitting what is taken already and are discarded; to leave the
                # odds between the others as they are, only the shrunken rest competes with them.
                mix = jnp.where(total > 0, jnp.float32(self.uniform_mix), jnp.float32(1.0))
                left = (1 - mix) * scratch.root("sum") / jnp.where(total > 0, total, 1.0)
                share = jnp.where(mix > 0, mix / (left + mix), 0.0)
                return self._propose(scratch, key, rows, occupancy, share)[0]

            count = jnp.minimum(batch_size, self.support(state, occupancy).count)
            index, valid = distinct(key, batch_size, count, state, propose, without, state.capacity)
            index, mass = state.read(index)
        return Draw(index, self._probability(state, mass, occupancy), valid)

    def probability(
        self, state: SegmentTree, index: Int[Array, " B"], occupancy: Occupancy
    ) -> Float[Array, " B"]:
        """The probability with which a single draw gives each of these live items."""
        return self._probability(state, state.read(index)[1], occupancy)

    def support(self, state: SegmentTree, occupancy: Occupancy) -> Support:
        """The items with mass; all live items if there are none, or if draws are mixed."""
        size, nnz = occupancy.size, state.nnz
        if self.uniform_mix > 0:
            count = size
            least = jnp.where(nnz < size, 0.0, state.root("min_positive"))
        else:
            count = jnp.where(nnz > 0, nnz, size)
            least = state.root("min_positive")
        return Support(count, self._probability(state, least, occupancy))

    def metrics(self, state: SegmentTree, occupancy: Occupancy) -> dict[str, Array]:
        """Priorities as the masses tell them, and how many equally likely items are as diverse."""
        slot = jnp.arange(state.capacity, dtype=jnp.int32)
        live = occupancy.live(slot)
        size = occupancy.size
        mass = state.leaves
        priority = self.priority(mass)
        count = jnp.maximum(size, 1).astype(jnp.float32)
        some = size > 0
        largest = jnp.max(mass)
        scaled = mass / jnp.where(largest > 0, largest, 1.0)
        squares = jnp.sum(scaled * scaled)
        spread = jnp.sum(scaled) ** 2 / jnp.where(squares > 0, squares, 1.0)
        if self.uniform_mix > 0:
            probability = jnp.where(live, self._probability(state, mass, occupancy), 0.0)
            squares = jnp.sum(probability * probability)
            spread = 1.0 / jnp.where(squares > 0, squares, 1.0)
        least = jnp.min(jnp.where(live, priority, jnp.inf))
        return {
            "priority_min": jnp.where(some, least, 0.0),
            "priority_max": jnp.max(jnp.where(live, priority, 0.0)),
            "priority_mean": jnp.sum(jnp.where(live, priority, 0.0) / count),
            "effective_sample_size": jnp.where(
                largest > 0, spread, jnp.where(some, size.astype(jnp.float32), 0.0)
            ),
        }

    def priority(self, mass: Float[Array, " N"]) -> Float[Array, " N"]:
        """The priority that has this mass; with alpha = 0, where all have the same, 1."""
        if self.alpha == 0.0:
            return jnp.where(mass > 0, 1.0, 0.0)
        base = jnp.power(mass, jnp.float32(1.0 / self.alpha))
        return jnp.where(mass > 0, jnp.maximum(base - jnp.float32(self.epsilon), 0.0), 0.0)

    def _new_masses(
        self, state: SegmentTree, index: Int[Array, " B"], value: Float[Array, " B"] | None
    ) -> Float[Array, " B"]:
        """The masses of new items; the default where no legal priority is given."""
        first = self.mass(jnp.float32(self.initial_priority))
        default = jnp.broadcast_to(jnp.maximum(first, state.root("max")), index.shape)
        if value is None:
            return default
        return jnp.where(self.accepts(value), self.mass(value), default)

    def _probability(
        self, state: SegmentTree, mass: Float[Array, "..."], occupancy: Occupancy
    ) -> Float[Array, "..."]:
        """The probability with which a draw gives an item of this mass."""
        total, uniform = state.root("sum"), share(occupancy.size)
        part = mass / jnp.where(total > 0, total, 1.0)
        if self.uniform_mix > 0:
            part = (1.0 - self.uniform_mix) * part + self.uniform_mix * uniform
        return jnp.where(total > 0, part, uniform)

    def _propose(
        self,
        state: SegmentTree,
        key: PRNGKeyArray,
        batch_size: int,
        occupancy: Occupancy,
        mix: Float[Array, ""],
    ) -> tuple[Int[Array, " B"], Float[Array, " B"]]:
        """Slots with replacement, a fraction ``mix`` of them uniform, and their masses."""
        words = 1 if state.capacity <= _ONE_WORD else 2
        words += 2 if self.uniform_mix > 0 else 0
        random = random_words(key, (words, batch_size))
        stratified = self.stratified and self.replacement
        low = random[1] if state.capacity > _ONE_WORD else None
        total = state.root("sum")
        index, mass = state.find(*points(random[0], low, total, stratified=stratified))
        if self.uniform_mix == 0:
            # With no mass at all every draw is a uniform one.
            return jnp.where(total > 0, index, occupancy.draw(random[0])), mass
        coin = (random[-1] >> jnp.uint32(8)).astype(jnp.float32) * jnp.float32(2.0**-24)
        by_mass = (total > 0) & (coin >= mix)
        return state.read(jnp.where(by_mass, index, occupancy.draw(random[-2])))


def without(masses: SegmentTree, index: Int[Array, " B"]) -> SegmentTree:
    """The same with no mass at ``index``."""
    return masses.set(index, jnp.zeros(index.shape, jnp.float32))


def points(
    word: UInt[Array, " B"],
    low: UInt[Array, " B"] | None,
    total: Float[Array, ""],
    *,
    stratified: bool,
) -> tuple[Float[Array, " B"], Float[Array, " B"]]:
    """Points in ``[0, total)``, and how far each may be moved within the grid it lies on.

    The numerator of a point, the number of its stratum followed by random bits, fills the 24 bits
    that a float32 holds exactly. What is left of the word (or another, ``low``) becomes the second
    result, which ``SegmentTree.find`` adds half way down: so more slots can be told apart than a
    float32 has values.
    """
    strata = word.shape[0] if stratified else 1
    bits = max(24 - (strata - 1).bit_length(), 1)
    high = word >> jnp.uint32(32 - bits)
    if strata > 1:
        high = high | (jnp.arange(strata, dtype=jnp.uint32) << jnp.uint32(bits))
    # The bound keeps points below the total. It also keeps XLA from scaling the total by the size
    # of a cell first, which underflows where all masses are tiny.
    cell, below = jnp.float32(1.0 / (strata * 2**bits)), jnp.float32(1.0 - 2.0**-24)
    if low is None:
        low = word << jnp.uint32(bits)
    fraction = (low >> jnp.uint32(8)).astype(jnp.float32) * jnp.float32(2.0**-24)
    return (
        jnp.minimum(high.astype(jnp.float32) * cell, below) * total,
        jnp.minimum(fraction * cell, below) * total,
    )

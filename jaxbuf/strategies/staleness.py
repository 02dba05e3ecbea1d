"""A sampler that prefers the items that were not drawn for long."""

import dataclasses
import math
from typing import ClassVar

import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array, Float, Int, UInt

from jaxbuf.core import checks
from jaxbuf.core.hyperparameters import at_most
from jaxbuf.core.numbers import TINY
from jaxbuf.core.segment_tree import SegmentTree
from jaxbuf.core.types import Floats, Index, Word
from jaxbuf.occupancy.protocol import Occupancy
from jaxbuf.strategies.mass import ByMass, effective_size, over
from jaxbuf.strategies.moves import Moves
from jaxbuf.strategies.protocols import Support, support_of


class Visits(struct.PyTreeNode):
    """When items were last drawn, counted in batches.

    Attributes:
        last: The number of the last batch that had the item in each slot, or of the last one before
            it was added, ``[N]`` uint32.
        batches: The number of batches so far, ``[]`` uint32; it wraps.
    """

    last: UInt[Array, " N"]
    batches: Word

    @property
    def age(self) -> Float[Array, " N"]:
        """The number of batches since the last one that had the item in each slot."""
        return (self.batches - self.last).astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class Staleness(ByMass):
    """Draws items with a probability proportional to the time since they were last drawn.

    Time is the number of batches that ``next_batch`` drew: an item of the last batch has staleness
    0 and is not in the next batch, unless the staleness of all items is 0; then all are equally
    likely. An item that was never drawn counts from when it was added. ``sample`` draws with the
    same probabilities, but it returns no buffer, so its draws are not recorded.

    In a ``Blend``, it takes account of everything that the blend draws. Even with a small weight,
    every item is drawn again some day, which keeps scores up to date that change when their items
    are drawn.

    A draw costs a pass over all slots: 0.1 ms for 2**12 of them and 2 ms for 2**20, on one core of
    a CPU.

    Attributes:
        alpha: The exponent of the staleness; 1 is proportional to it. It may vary (see
            ``jaxbuf.Varying``).
        stratified: Whether to draw one row from each of ``batch_size`` equal parts of the total,
            which reduces the variance and leaves the expected number of rows of each item
            unchanged. Ignored without replacement.
        replacement: Whether a batch may hold an item twice. If False, each row is drawn from the
            remaining items, ``probability`` is the probability of the first draw, and rows beyond
            the number of items that can be drawn are invalid.

    Raises:
        ValueError: If ``alpha`` is not a finite number of at least 0, or a flag is neither True nor
            False.

    References:
        Jiang et al., Prioritized Level Replay, ICML 2021, https://arxiv.org/abs/2010.03934,
        equation 3.

    Example:
        >>> import jax, jax.numpy as jnp, jaxbuf
        >>> sampler = jaxbuf.Staleness(replacement=False)
        >>> buffer = jaxbuf.ItemBuffer.create(jnp.int32(0), 100, sampler=sampler)
        >>> buffer = jaxbuf.add(buffer, jnp.arange(6))
        >>> drawn = []
        >>> for key in jax.random.split(jax.random.key(0), 2):
        ...     buffer, batch = jaxbuf.next_batch(buffer, key, 3)
        ...     drawn += batch.data.tolist()
        >>> sorted(drawn)
        [0, 1, 2, 3, 4, 5]
    """

    alpha: float = 1.0
    stratified: bool = True
    replacement: bool = True

    varies: ClassVar[dict[str, tuple[float, float]]] = {"alpha": (0.0, math.inf)}

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.settle(self, checks.check_nonnegative, "alpha")
        checks.settle(self, checks.check_flag, "stratified", "replacement")

    def init(self, capacity: int) -> Visits:
        return Visits(last=jnp.zeros((capacity,), jnp.uint32), batches=jnp.uint32(0))

    def on_change(
        self, state: Visits, added: Index, value: Floats | None, removed: Int[Array, " R"]
    ) -> Visits:
        """Counts new items from now; removed items are not live, and never drawn."""
        del value, removed
        return state.replace(last=state.last.at[added].set(state.batches, mode="drop"))

    def on_draw(self, state: Visits, index: Index) -> Visits:
        """Counts a batch, and records it for its items."""
        batches = state.batches + jnp.uint32(1)
        return Visits(last=state.last.at[index].set(batches, mode="drop"), batches=batches)

    def move(self, empty: Visits, state: Visits, moves: Moves) -> Visits:
        """Moves the items; the number of batches stays."""
        return Visits(last=moves(empty.last, state.last), batches=state.batches)

    def masses(self, state: Visits, occupancy: Occupancy) -> SegmentTree:
        # Otherwise XLA computes powers, and joins the levels, once for each of their consumers.
        mass = lax.optimization_barrier(self._masses(state, occupancy))
        return lax.optimization_barrier(SegmentTree.create(mass.shape[0]).set_all(mass))

    def probability(self, state: Visits, index: Index, occupancy: Occupancy) -> Floats:
        """Returns the probability that a single draw gives each of these live items."""
        return self._probabilities(state, occupancy).at[index].get(mode="clip")

    def support(self, state: Visits, occupancy: Occupancy) -> Support:
        """Returns the items that the last batch did not have; all items if it had all of them."""
        return support_of(self._probabilities(state, occupancy))

    def metrics(self, state: Visits, occupancy: Occupancy) -> dict[str, Array]:
        """Returns the largest and mean number of batches since items were drawn."""
        live = occupancy.live(jnp.arange(state.last.shape[0], dtype=jnp.int32))
        count = jnp.maximum(occupancy.size, 1).astype(jnp.float32)
        age = jnp.where(live, state.age, 0.0)
        return {
            "batches_since_drawn_max": jnp.max(age),
            "batches_since_drawn_mean": jnp.sum(age / count),
            "effective_sample_size": effective_size(self._probabilities(state, occupancy)),
        }

    def _probabilities(self, state: Visits, occupancy: Occupancy) -> Float[Array, " N"]:
        mass = self._masses(state, occupancy)
        return over(mass, jnp.sum(mass))

    def _masses(self, state: Visits, occupancy: Occupancy) -> Float[Array, " N"]:
        """Returns the mass of each slot; that of the stalest item is 1."""
        live = occupancy.live(jnp.arange(state.last.shape[0], dtype=jnp.int32))
        age = jnp.where(live, state.age, 0.0)
        largest = jnp.max(age)
        # A larger exponent gives the same masses, but does not fit a float32.
        mass = jnp.power(over(age, largest), jnp.float32(at_most(self.alpha, 1e30)))
        mass = jnp.where(age > 0, jnp.maximum(mass, jnp.float32(TINY)), 0.0)
        return jnp.where(largest > 0, mass, live.astype(jnp.float32))

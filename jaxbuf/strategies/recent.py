"""Drawing a part of every batch from the newest items."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from jaxbuf.core import checks, sizes
from jaxbuf.core.random import random_words
from jaxbuf.occupancy.ages import Ages, spread
from jaxbuf.occupancy.protocol import Occupancy
from jaxbuf.strategies.protocols import Draw, KnownSampler, Support
from jaxbuf.strategies.samplers import Uniform


@dataclasses.dataclass(frozen=True)
class Recent(KnownSampler):
    """A fixed part of every batch from the newest items, the rest from another sampler.

    Of ``B`` rows the first ``R = round(ratio * B)`` are spread evenly over the ``steps`` newest
    items, of a ``TrajectoryBuffer`` over the ``steps`` newest windows of every ring, one ring after
    the other: each of them at most once while there are as many as rows, and otherwise as often as
    any other, give or take one. The other ``B - R`` rows come from ``base``, which may draw recent
    items as well.

    So an item has the probability ``R / B / recent + (1 - R / B) * p`` if it is among the
    ``recent`` newest and ``(1 - R / B) * p`` if not, where ``p`` is its probability under ``base``:
    what a sample tells for all of its rows, whichever half they are from, so that importance
    weights correct for both. What is said of the buffer as a whole (``support``, ``metrics`` and
    ``importance_weights(..., normalize="buffer")``) takes ``ratio`` for ``R / B`` and costs a pass
    over all slots.

    Attributes:
        ratio: Fraction of a batch that is recent, from 0 to 1; a half row counts as one.
        steps: How many items, or windows of each ring, are recent.
        base: Draws the others: ``Uniform``, ``Prioritized``, or one of your own that derives from
            ``jaxbuf.strategies.KnownSampler`` as they do.

    Raises:
        ValueError: If ``ratio`` is no fraction, ``steps`` not an integer of at least 1, or ``base``
            cannot tell probabilities.

    References:
        ALF, https://github.com/HorizonRobotics/alf: ``recent_data_ratio`` and
        ``recent_data_steps`` of its replay buffer. It samples as always, without a recent part,
        while a buffer is nearly empty; here the part is always there.

    Example:
        >>> import jax, jax.numpy as jnp, jaxbuf
        >>> sampler = jaxbuf.Recent(ratio=0.5, steps=4)
        >>> buffer = jaxbuf.ItemBuffer.create(jnp.int32(0), 100, sampler=sampler)
        >>> buffer = buffer.add(jnp.arange(50))
        >>> buffer.sample(jax.random.key(0), 8).data[:4].tolist()
        [46, 47, 48, 49]
    """

    ratio: float
    steps: int
    base: KnownSampler = dataclasses.field(default_factory=Uniform)

    uses_age = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "ratio", checks.check_fraction("ratio", self.ratio))
        steps = sizes.check_count("steps", self.steps, most=2**31 - 1)
        object.__setattr__(self, "steps", steps)
        if not isinstance(self.base, KnownSampler):
            raise ValueError(
                f"base is {checks.name_of(self.base)}, which cannot tell the probability of items "
                "it did not draw; choose jaxbuf.Uniform(...) or jaxbuf.Prioritized(...)"
            )
        object.__setattr__(self, "uses_priority", self.base.uses_priority)
        object.__setattr__(self, "uses_score", self.base.uses_score)

    def init(self, capacity: int) -> Any:
        """The state of the base."""
        return self.base.init(capacity)

    def accepts(self, value: Float[Array, " B"]) -> Bool[Array, " B"]:
        """What the base accepts."""
        return self.base.accepts(value)

    def on_add(self, state: Any, index: Int[Array, " B"], value: Float[Array, " B"] | None) -> Any:
        """For the base to note."""
        return self.base.on_add(state, index, value)

    def set_priority(self, state: Any, index: Int[Array, " B"], value: Float[Array, " B"]) -> Any:
        """For the base to note."""
        return self.base.set_priority(state, index, value)

    def remove(self, state: Any, index: Int[Array, " B"]) -> Any:
        """For the base to note."""
        return self.base.remove(state, index)

    def on_slide(
        self,
        state: Any,
        added: Int[Array, " B"],
        value: Float[Array, " B"] | None,
        removed: Int[Array, " R"],
    ) -> Any:
        """For the base to note."""
        return self.base.on_slide(state, added, value, removed)

    def draw(self, state: Any, key: PRNGKeyArray, batch_size: int, occupancy: Occupancy) -> Draw:
        """Draw ``batch_size`` items, the recent ones first."""
        rows = math.floor(self.ratio * batch_size + 0.5)
        if rows == 0:
            return self.base.draw(state, key, batch_size, occupancy)
        ours, theirs = jax.random.split(key)
        recent = self._recent(occupancy)
        words = random_words(ours, (rows + 1,))
        rank = spread(words[1:], words[0], recent.total)
        index = recent.at(rank[_alternate(rows, recent.count.shape[0])])
        valid = jnp.broadcast_to(recent.total > 0, (rows,))
        known = self.base.probability(state, index, occupancy)
        if rows < batch_size:
            draw = self.base.draw(state, theirs, batch_size - rows, occupancy)
            index = jnp.concatenate([index, draw.index])
            known = jnp.concatenate([known, draw.probability])
            valid = jnp.concatenate([valid, draw.valid])
        probability = _mixed(rows / batch_size, recent, index, known)
        # Never false; but as in ``Prioritized.draw`` whoever uses only the index must wait for what
        # was read of the state.
        return Draw(jnp.where(probability >= 0, index, -1), probability, valid)

    def probability(
        self, state: Any, index: Int[Array, " B"], occupancy: Occupancy
    ) -> Float[Array, " B"]:
        """The probability with which a single draw gives each of these live items."""
        known = self.base.probability(state, index, occupancy)
        return _mixed(self.ratio, self._recent(occupancy), index, known)

    def support(self, state: Any, occupancy: Occupancy) -> Support:
        """The recent items, and what the base can draw."""
        probability = self._everywhere(state, occupancy)
        some = probability > 0
        count = jnp.sum(some, dtype=jnp.int32)
        least = jnp.min(jnp.where(some, probability, jnp.inf))
        return Support(count, jnp.where(count > 0, least, 0.0))

    def metrics(self, state: Any, occupancy: Occupancy) -> dict[str, Array]:
        """Those of the base, but for the ``effective_sample_size``, which is that of both."""
        squares = jnp.sum(self._everywhere(state, occupancy) ** 2)
        spread_over = jnp.where(squares > 0, 1.0 / jnp.where(squares > 0, squares, 1.0), 0.0)
        return {
            **self.base.metrics(state, occupancy),
            "effective_sample_size": spread_over,
        }

    def _recent(self, occupancy: Any) -> Ages:
        return occupancy.age_range(-self.steps, None)

    def _everywhere(self, state: Any, occupancy: Any) -> Float[Array, " N"]:
        """The probability of every slot."""
        slot = jnp.arange(occupancy.capacity, dtype=jnp.int32)
        probability = self.probability(state, slot, occupancy)
        return jnp.where(occupancy.live(slot), probability, 0.0)


def _mixed(
    ratio: float, recent: Ages, index: Int[Array, " B"], known: Float[Array, " B"]
) -> Float[Array, " B"]:
    """Probabilities when ``ratio`` of the rows are recent and the others have those known."""
    share = jnp.float32(ratio) / jnp.maximum(recent.total, 1).astype(jnp.float32)
    return jnp.where(recent.contains(index), share, 0.0) + jnp.float32(1.0 - ratio) * known


def _alternate(rows: int, rings: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    """An order of rows that goes through the rings in turns, if rows go ring by ring."""
    each = rows // rings
    turns = np.arange(each * rings, dtype=np.int32).reshape(rings, each).T.reshape(-1)
    return np.concatenate([turns, np.arange(each * rings, rows, dtype=np.int32)])

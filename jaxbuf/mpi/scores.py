"""Score functions, which measure what a batch is worth to the shared buffer.

A score function is any pure function of the manager's buffer before the batch is stored, the batch,
the mask of its rows ``[B]``, and the number of the worker ``[]``. It returns a dict of arrays.

References:
    Lahlou et al., torchgfn: A PyTorch GFlowNet library, 2023, https://arxiv.org/abs/2305.14594
    (the scoring functions of its replay buffer manager).
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Shaped

from jaxbuf.buffers.item import ItemBuffer
from jaxbuf.core import checks
from jaxbuf.core.types import Arrays, Count, Mask
from jaxbuf.mpi.batch import Batch, uses_score
from jaxbuf.strategies.diversity import Diversity, Field
from jaxbuf.strategies.points import Ball, ComputedPoints, Points, PointSet

# Larger distances are clipped to this.
_FAR = 2.0**40


ScoreFunction = Callable[[ItemBuffer, Batch, Mask, Count], dict[str, Array]]


@runtime_checkable
class StatefulScore(Protocol):
    """A score function with a state, which the manager keeps for it."""

    def init(self, num_workers: int) -> Arrays:
        """Returns the first state, a pytree of arrays."""
        ...

    def update(
        self, state: Arrays, buffer: ItemBuffer, batch: Batch, mask: Mask, sender: Count
    ) -> tuple[Arrays, dict[str, Array]]:
        """Returns the state after a batch, and the scores of the batch."""
        ...


@dataclasses.dataclass(frozen=True)
class _Stateless:
    """A plain score function in the form of one with a state, which is empty."""

    function: ScoreFunction

    def init(self, num_workers: int) -> tuple[()]:
        """Returns the empty state."""
        del num_workers
        return ()

    def update(
        self, state: tuple[()], buffer: ItemBuffer, batch: Batch, mask: Mask, sender: Count
    ) -> tuple[tuple[()], dict[str, Array]]:
        """Returns the empty state, and the scores of a batch."""
        return state, self.function(buffer, batch, mask, sender)


def with_state(scores: "ScoreFunction | StatefulScore") -> StatefulScore:
    """Returns a score function in the form of one with a state.

    Raises:
        ValueError: If it is neither a function nor a ``StatefulScore``.
    """
    if not isinstance(scores, type):
        if isinstance(scores, StatefulScore):
            return scores
        if callable(scores):
            return _Stateless(scores)
    raise ValueError(
        f"scores is {checks.name_of(scores)}; expected a function that scores a batch, or a "
        "StatefulScore"
    )


def default_score(buffer: ItemBuffer, batch: Batch, mask: Mask, sender: Count) -> dict[str, Array]:
    """Returns the score +inf for every batch, the default of ``Manager``."""
    del buffer, batch, mask, sender
    return {"score": jnp.float32(jnp.inf)}


DEFAULT: ScoreFunction = default_score


@dataclasses.dataclass(frozen=True)
class Retained:
    """``retained``: the number of rows that the buffer keeps once the batch is stored.

    It applies the buffer's own evictor, diversity filter and limits. It costs a pass over the slots
    and, with ``Lowest``, a copy of their scores.

    Example:
        >>> import jax.numpy as jnp, jaxbuf
        >>> from jaxbuf.mpi import Manager, Retained
        >>> buffer = jaxbuf.reward_prioritized(jnp.float32(0), 3)
        >>> manager = Manager.create(buffer, 1, scores=Retained())
        >>> for log_reward in (jnp.array([1.0, 2.0]), jnp.array([0.0, 5.0, 3.0])):
        ...     manager, scores = manager.receive(log_reward, score=log_reward)
        ...     print(float(scores["retained"]))
        2.0
        2.0
    """

    def __call__(
        self, buffer: ItemBuffer, batch: Batch, mask: Mask, sender: Count
    ) -> dict[str, Array]:
        """Returns the number of rows kept, as a float."""
        del sender
        # Only the occupancy is used, so XLA drops the rest of this add.
        score = batch.score if uses_score(buffer) else None
        after = buffer.add(batch.items, score=score, mask=mask).occupancy
        before = buffer.occupancy
        slot = jnp.arange(buffer.capacity, dtype=jnp.int32)
        stayed = before.live(slot) & (before.generation(slot) == after.generation(slot))
        return {"retained": jnp.sum(after.live(slot) & ~stayed, dtype=jnp.float32)}


@dataclasses.dataclass(frozen=True)
class Novelty:
    """``novelty``: the mean distance of rows to the nearest item in the buffer before the batch.

    It is 0 while the buffer is empty. A coordinate that is NaN counts as 0. All rows are compared
    with all items, block by block. This is faster if the buffer has a ``Diversity`` with the same
    ``field`` and a cutoff above 0, which keeps the coordinates of all items.

    Attributes:
        field: The part of an item to compare; see ``Diversity``. None compares whole items.
        p: The norm of the distance: 1, 2 or infinity.

    Raises:
        ValueError: If ``p`` is another number.
    """

    field: Field | tuple[Field, ...] | None = None
    p: float = 2.0

    def __post_init__(self) -> None:
        checks.settle_number(self, "p", "a norm: 1, 2 or inf", lambda x: x in (1.0, 2.0, math.inf))
        Diversity(field=self.field)

    def __call__(
        self, buffer: ItemBuffer, batch: Batch, mask: Mask, sender: Count
    ) -> dict[str, Array]:
        """Returns the mean distance; 0 for a batch without rows."""
        del sender
        part, ball = Diversity(_FAR, self.p, self.field), Ball(_FAR, self.p)
        points = Points.of(part.points(batch.items))
        others = _others(buffer, part)
        sums = others.nearest(points, ball, lambda _, slot: buffer.occupancy.live(slot))
        distance = jnp.sqrt(sums) if self.p == 2 else sums
        counts = mask & jnp.isfinite(distance)
        total = jnp.sum(jnp.where(counts, distance, jnp.float32(0)))
        rows = jnp.maximum(jnp.sum(mask, dtype=jnp.int32), 1)
        return {"novelty": total / rows.astype(jnp.float32)}


@dataclasses.dataclass(frozen=True)
class RewardSum:
    """``reward_sum``: the sum of ``exp(score)``, the total reward if scores are log rewards.

    Rows without a score do not count.
    """

    def __call__(
        self, buffer: ItemBuffer, batch: Batch, mask: Mask, sender: Count
    ) -> dict[str, Array]:
        """Returns the sum."""
        del buffer, sender
        score = jnp.where(mask & ~jnp.isnan(batch.score), batch.score, jnp.float32(-jnp.inf))
        return {"reward_sum": jnp.sum(jnp.exp(score))}


@dataclasses.dataclass(frozen=True)
class NewModes:
    """``new_modes``: the number of different modes in the batch that are not in the buffer yet.

    A mode is a row with a score of at least ``threshold``. It is new if neither an item in the
    buffer before the batch nor an earlier mode of the batch is within ``cutoff``. A mode that the
    buffer has evicted counts as new again.

    Attributes:
        threshold: The smallest score of a mode.
        field: The part of an item to compare; see ``Diversity``. None compares whole items.
        cutoff: The largest distance at which two rows are the same mode.
        p: The norm of the distance.

    Raises:
        ValueError: If ``cutoff`` or ``p`` is out of the range that ``Diversity`` allows.
    """

    threshold: float
    field: Field | tuple[Field, ...] | None = None
    cutoff: float = 0.0
    p: float = 1.0

    def __post_init__(self) -> None:
        checks.settle_number(self, "threshold", "a score", lambda x: not math.isnan(x))
        part = Diversity(self.cutoff, self.p, self.field)
        for name in ("cutoff", "p"):
            object.__setattr__(self, name, getattr(part, name))
        if self.cutoff < 0:
            raise ValueError(f"cutoff is {self.cutoff}; expected at least 0")

    def __call__(
        self, buffer: ItemBuffer, batch: Batch, mask: Mask, sender: Count
    ) -> dict[str, Array]:
        """Returns the number of new modes, as a float."""
        del sender
        is_mode = mask & (batch.score >= jnp.float32(self.threshold))
        part = Diversity(self.cutoff, self.p, self.field)
        points, ball = Points.of(part.points(batch.items)), part.ball(batch.items)
        rows = points.capacity
        every = jnp.int32(rows)
        others = _others(buffer, part)
        in_buffer = others.near(points, every, ball, lambda _, slot: buffer.occupancy.live(slot))
        repeated = points.near(
            points,
            every,
            ball,
            lambda row, other: (other < row) & is_mode[jnp.minimum(other, rows - 1)],
        )
        return {"new_modes": jnp.sum(is_mode & ~in_buffer & ~repeated, dtype=jnp.float32)}


@dataclasses.dataclass(frozen=True)
class WeightedSum:
    """``score``: a weighted sum of other scores, averaged for each worker; returns these as well.

    The exponential moving average starts at the first batch of a worker, and is 0 before. A batch
    without rows, or with a sum that is not finite, does not change it.

    Attributes:
        parts: The score functions.
        weights: A dict from the names of scores to their weights, stored as sorted pairs. Scores
            that are not in it do not count.
        alpha: The weight of the newest batch, above 0 and at most 1.

    Raises:
        ValueError: If there are no weights, or ``alpha`` is out of its range; when traced, if no
            part returns a score that has a weight.

    Example:
        >>> import jax.numpy as jnp, jaxbuf
        >>> from jaxbuf.mpi import Manager, Retained, RewardSum, WeightedSum
        >>> scores = WeightedSum((Retained(), RewardSum()), {"retained": 1.0, "reward_sum": 0.5})
        >>> manager = Manager.create(jaxbuf.reward_prioritized(jnp.float32(0), 3), 1, scores=scores)
        >>> log_reward = jnp.zeros(2)
        >>> manager, scores = manager.receive(log_reward, score=log_reward)
        >>> sorted((name, float(score)) for name, score in scores.items())
        [('retained', 2.0), ('reward_sum', 2.0), ('score', 3.0)]
    """

    parts: tuple[ScoreFunction, ...]
    weights: Mapping[str, float] | tuple[tuple[str, float], ...]
    alpha: float = 0.1

    def __post_init__(self) -> None:
        if not isinstance(self.parts, list | tuple) or not all(map(callable, self.parts)):
            raise ValueError(
                f"parts is {checks.name_of(self.parts)}; expected a list of score functions"
            )
        object.__setattr__(self, "parts", tuple(self.parts))
        object.__setattr__(self, "weights", _check_weights(self.weights))
        checks.settle(self, checks.check_step_size, "alpha")

    def init(self, num_workers: int) -> Float[Array, " W"]:
        """Returns −inf for each worker, which stands for no average."""
        return jnp.full((num_workers,), -jnp.inf, jnp.float32)

    def update(
        self, state: Float[Array, " W"], buffer: ItemBuffer, batch: Batch, mask: Mask, sender: Count
    ) -> tuple[Float[Array, " W"], dict[str, Array]]:
        """Returns the averages after a batch, and its scores."""
        scores: dict[str, Array] = {}
        for part in self.parts:
            scores |= part(buffer, batch, mask, sender)
        total = jnp.float32(0)
        for name, weight in dict(self.weights).items():
            if name not in scores:
                raise ValueError(
                    f"weights has {name!r}, which no part returns; they return {sorted(scores)}"
                )
            total = total + jnp.float32(weight) * scores[name].astype(jnp.float32)
        previous = state[sender]
        alpha = jnp.float32(self.alpha)
        mixed = alpha * total + (jnp.float32(1) - alpha) * previous
        counts = jnp.any(mask) & jnp.isfinite(total)
        average = jnp.where(counts, jnp.where(previous == -jnp.inf, total, mixed), previous)
        scores["score"] = jnp.where(average == -jnp.inf, jnp.float32(0), average)
        return state.at[sender].set(average), scores


def _check_weights(weights: Any) -> tuple[tuple[str, float], ...]:
    """Returns the weights by name as sorted pairs."""
    pairs = weights.items() if isinstance(weights, Mapping) else weights
    if not isinstance(weights, Mapping) and not (
        isinstance(weights, tuple)
        and all(isinstance(pair, tuple) and len(pair) == 2 for pair in weights)
    ):
        raise ValueError(
            f"weights is {checks.name_of(weights)}; expected a dict of weights by name"
        )
    checked = {
        str(name): checks.check_number(
            f"weights[{name!r}]", weight, "a finite number", math.isfinite
        )
        for name, weight in pairs
    }
    if not checked:
        raise ValueError("weights is empty; expected a weight for each score that counts")
    return tuple(sorted(checked.items()))


def _others(buffer: ItemBuffer, part: Diversity) -> PointSet:
    """Returns the coordinates of the buffer's items, stored ones if the buffer keeps them."""
    stored = buffer.diversity
    if (
        stored is not None
        and stored.field == part.field
        and stored.ball(buffer.data).words == part.ball(buffer.data).words
    ):
        return buffer.diversity_state.points

    def rows(start: Array, number: int) -> Shaped[Array, "B D"]:
        items = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, start, number), buffer.data)
        return part.points(items)

    return ComputedPoints(buffer.capacity, rows)

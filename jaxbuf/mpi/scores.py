"""What a batch is worth to the shared buffer: score functions, pure and frozen.

A score function is any pure function of the manager's buffer before the batch is stored, the batch,
which of its rows are there, and the number of the worker; it returns a dict of arrays.

References:
    Lahlou et al., torchgfn: A PyTorch GFlowNet library, 2023, https://arxiv.org/abs/2305.14594
    (the scoring functions of its replay buffer manager).
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, cast, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PyTree

from jaxbuf.buffers.item import ItemBuffer
from jaxbuf.core import checks
from jaxbuf.strategies.diversity import Diversity, Key
from jaxbuf.strategies.points import Ball, Computed, Others, Points, finite

# Distances beyond this count as this.
_FAR = 2.0**40


class Batch(NamedTuple):
    """What a worker sends.

    Attributes:
        items: Leaves ``[B, ...]``.
        score: Of each item, such as its log reward, ``[B]``; NaN where there is none.
    """

    items: PyTree[Array]
    score: Float[Array, " B"]


ScoreFunction = Callable[[ItemBuffer, Batch, Bool[Array, " B"], Int[Array, ""]], dict[str, Array]]


@runtime_checkable
class StatefulScore(Protocol):
    """A score function that remembers something, in a state that the manager keeps for it."""

    def init(self, num_workers: int) -> Any:
        """What it remembers at first: a pytree of arrays."""
        ...

    def update(
        self,
        state: Any,
        buffer: ItemBuffer,
        batch: Batch,
        mask: Bool[Array, " B"],
        sender: Int[Array, ""],
    ) -> tuple[Any, dict[str, Array]]:
        """What it remembers after a batch, and the scores of that."""
        ...


def default_score(
    buffer: ItemBuffer, batch: Batch, mask: Bool[Array, " B"], sender: Int[Array, ""]
) -> dict[str, Array]:
    """The score of every batch if there is no other score function: +inf."""
    del buffer, batch, mask, sender
    return {"score": jnp.float32(jnp.inf)}


DEFAULT: ScoreFunction = default_score


@dataclasses.dataclass(frozen=True)
class Retained:
    """``retained``: how many rows the buffer keeps once the batch is stored.

    It goes by the buffer's own rules (evictor, diversity, limits), and costs a pass over its slots
    and, under ``Lowest``, a copy of their scores.

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
        self, buffer: ItemBuffer, batch: Batch, mask: Bool[Array, " B"], sender: Int[Array, ""]
    ) -> dict[str, Array]:
        """The number of rows kept, as a float."""
        del sender
        # Of this add only what the occupancy needs is computed: the rest is not used.
        score = batch.score if uses_score(buffer) else None
        after = buffer.add(batch.items, score=score, mask=mask).occupancy
        before = buffer.occupancy
        slot = jnp.arange(buffer.capacity, dtype=jnp.int32)
        stayed = before.live(slot) & (before.generation(slot) == after.generation(slot))
        return {"retained": jnp.sum(after.live(slot) & ~stayed, dtype=jnp.float32)}


@dataclasses.dataclass(frozen=True)
class Novelty:
    """``novelty``: the mean distance of rows to the nearest item in the buffer before the batch.

    It is 0 while the buffer is empty; a coordinate that is NaN counts as 0. All rows are compared
    with all items, block by block; what is compared is at hand if the buffer has a ``Diversity``
    with the same ``key``.

    Attributes:
        key: What is compared; see ``Diversity``. None compares all of an item.
        p: Norm of the distance: 1, 2 or infinity.

    Raises:
        ValueError: If ``p`` is another number.
    """

    key: Key | tuple[Key, ...] | None = None
    p: float = 2.0

    def __post_init__(self) -> None:
        p = checks.check_number(
            "p", self.p, "a norm: 1, 2 or inf", lambda x: x in (1.0, 2.0, math.inf)
        )
        object.__setattr__(self, "p", p)
        Diversity(key=self.key)

    def __call__(
        self, buffer: ItemBuffer, batch: Batch, mask: Bool[Array, " B"], sender: Int[Array, ""]
    ) -> dict[str, Array]:
        """The mean distance; 0 for a batch without rows."""
        del sender
        part = Diversity(key=self.key)
        points = Points.of(finite(part.points(batch.items)))
        others, ball = _others(buffer, part), Ball(_FAR, self.p)
        sums = others.nearest(points, ball, lambda _, slot: buffer.occupancy.live(slot))
        distance = jnp.sqrt(sums) if self.p == 2 else sums
        counts = mask & jnp.isfinite(distance)
        total = jnp.sum(jnp.where(counts, distance, jnp.float32(0)))
        rows = jnp.maximum(jnp.sum(mask, dtype=jnp.int32), 1)
        return {"novelty": total / rows.astype(jnp.float32)}


@dataclasses.dataclass(frozen=True)
class RewardSum:
    """``reward_sum``: the sum of ``exp(score)`` over the rows: of rewards, if scores are their log.

    Rows without a score do not count.
    """

    def __call__(
        self, buffer: ItemBuffer, batch: Batch, mask: Bool[Array, " B"], sender: Int[Array, ""]
    ) -> dict[str, Array]:
        """The sum."""
        del buffer, sender
        score = jnp.where(mask & ~jnp.isnan(batch.score), batch.score, jnp.float32(-jnp.inf))
        return {"reward_sum": jnp.sum(jnp.exp(score))}


@dataclasses.dataclass(frozen=True)
class NewModes:
    """``new_modes``: how many different modes of the batch are not in the buffer yet.

    A mode is a row with a score of at least ``threshold``. It is new if no item of the buffer, as
    it was before the batch, and no earlier mode of the batch is within ``cutoff``. A mode that the
    buffer has lost again counts once more.

    Attributes:
        threshold: The least score of a mode.
        key: What tells modes apart; see ``Diversity``. None compares all of an item.
        cutoff: The largest distance at which two rows are the same mode.
        p: Norm of the distance.

    Raises:
        ValueError: If ``cutoff`` or ``p`` is out of the range that ``Diversity`` allows.
    """

    threshold: float
    key: Key | tuple[Key, ...] | None = None
    cutoff: float = 0.0
    p: float = 1.0

    def __post_init__(self) -> None:
        threshold = checks.check_number(
            "threshold", self.threshold, "a score", lambda x: not math.isnan(x)
        )
        object.__setattr__(self, "threshold", threshold)
        part = Diversity(self.cutoff, self.p, self.key)
        for name in ("cutoff", "p"):
            object.__setattr__(self, name, getattr(part, name))
        if self.cutoff < 0:
            raise ValueError(f"cutoff is {self.cutoff}; expected 0 or more")

    def __call__(
        self, buffer: ItemBuffer, batch: Batch, mask: Bool[Array, " B"], sender: Int[Array, ""]
    ) -> dict[str, Array]:
        """The number of new modes, as a float."""
        del sender
        is_mode = mask & (batch.score >= jnp.float32(self.threshold))
        part, ball = Diversity(key=self.key), Ball(self.cutoff, self.p)
        points = Points.of(finite(part.points(batch.items)))
        rows = points.capacity
        every = jnp.int32(rows)
        others = _others(buffer, part)
        known = others.near(points, every, ball, lambda _, slot: buffer.occupancy.live(slot))
        twice = points.near(
            points,
            every,
            ball,
            lambda row, other: (other < row) & is_mode[jnp.minimum(other, rows - 1)],
        )
        return {"new_modes": jnp.sum(is_mode & ~known & ~twice, dtype=jnp.float32)}


@dataclasses.dataclass(frozen=True)
class WeightedSum:
    """``score``: a weighted sum of other scores, averaged for each worker; and these scores.

    The average is exponential over the batches of a worker, and starts at the first. A batch
    without rows, or whose sum is not finite, leaves it as it is; before the first it is 0.

    Attributes:
        parts: The score functions.
        weights: The weight of each score that counts, by name: a dict, kept as pairs.
        alpha: The weight of the newest batch, above 0 and at most 1.

    Raises:
        ValueError: If there are no weights, or ``alpha`` is out of its range; when traced, if no
            part gives a score that has a weight.

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
        if not isinstance(self.parts, list | tuple) or not all(
            callable(part) or isinstance(part, StatefulScore) for part in self.parts
        ):
            raise ValueError(
                f"parts is {checks.name_of(self.parts)}; expected a list of score functions"
            )
        object.__setattr__(self, "parts", tuple(self.parts))
        object.__setattr__(self, "weights", _check_weights(self.weights))
        alpha = checks.check_number(
            "alpha", self.alpha, "a number above 0 and at most 1", lambda x: 0 < x <= 1
        )
        object.__setattr__(self, "alpha", alpha)

    def init(self, num_workers: int) -> Float[Array, " W"]:
        """No averages: −inf."""
        return jnp.full((num_workers,), -jnp.inf, jnp.float32)

    def update(
        self,
        state: Float[Array, " W"],
        buffer: ItemBuffer,
        batch: Batch,
        mask: Bool[Array, " B"],
        sender: Int[Array, ""],
    ) -> tuple[Float[Array, " W"], dict[str, Array]]:
        """The averages after a batch, and its scores."""
        scores: dict[str, Array] = {}
        for part in self.parts:
            scores |= part(buffer, batch, mask, sender)
        total = jnp.float32(0)
        for name, weight in cast("tuple[tuple[str, float], ...]", self.weights):
            if name not in scores:
                raise ValueError(
                    f"weights has {name!r}, which no part gives; they give {sorted(scores)}"
                )
            total = total + jnp.float32(weight) * scores[name].astype(jnp.float32)
        before = state[sender]
        alpha = jnp.float32(self.alpha)
        mixed = alpha * total + (jnp.float32(1) - alpha) * before
        counts = jnp.any(mask) & jnp.isfinite(total)
        after = jnp.where(counts, jnp.where(before == -jnp.inf, total, mixed), before)
        scores["score"] = jnp.where(after == -jnp.inf, jnp.float32(0), after)
        return state.at[sender].set(after), scores


def _check_weights(weights: Any) -> tuple[tuple[str, float], ...]:
    """Weights by name as sorted pairs."""
    pairs = weights.items() if isinstance(weights, Mapping) else weights
    if not isinstance(weights, Mapping) and not (
        isinstance(weights, tuple)
        and all(isinstance(pair, tuple) and len(pair) == 2 for pair in weights)
    ):
        raise ValueError(
            f"weights is {checks.name_of(weights)}; expected a dict of weights by name"
        )
    found = {
        str(name): checks.check_number(
            f"weights[{name!r}]", weight, "a finite number", math.isfinite
        )
        for name, weight in pairs
    }
    if not found:
        raise ValueError("weights is empty; expected a weight for each score that counts")
    return tuple(sorted(found.items()))


def uses_score(buffer: ItemBuffer) -> bool:
    """Whether something in the buffer goes by the scores of items."""
    parts = (buffer.sampler, buffer.evictor, buffer.diversity)
    return any(part is not None and part.uses_score for part in parts)


def _others(buffer: ItemBuffer, part: Diversity) -> Others:
    """What is compared of the buffer's items."""
    if buffer.diversity is not None and buffer.diversity.key == part.key:
        return buffer.diversity_state.points

    def rows(start: Array, number: int) -> Float[Array, "B D"]:
        items = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, start, number), buffer.data)
        return finite(part.points(items))

    return Computed(buffer.capacity, rows)

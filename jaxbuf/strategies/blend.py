"""A sampler that draws each row by one of several samplers of the same buffer."""

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int
from numpy.typing import NDArray

from jaxbuf.core import checks
from jaxbuf.core.hyperparameters import Varying, changed, ndim
from jaxbuf.core.order import after
from jaxbuf.core.random import random_words
from jaxbuf.core.types import Count, Floats, Function, Index, Key, State, Word, Words
from jaxbuf.occupancy.protocol import Occupancy
from jaxbuf.strategies.mass import effective_size, ends, interval_of, over
from jaxbuf.strategies.moves import Moves
from jaxbuf.strategies.protocols import (
    Draw,
    KnownSampler,
    Sampler,
    Support,
    everywhere,
    support_of,
)
from jaxbuf.strategies.shuffled import Shuffled

_GOLDEN = (5**0.5 - 1) / 2


@dataclasses.dataclass(frozen=True)
class Blend(KnownSampler):
    """Draws each row of a batch by one of several samplers of the same buffer.

    An item has the probability ``sum(weight * p)``, where ``p`` is its probability under each of
    the samplers. A sample reports this probability for every row, whichever sampler drew it, so
    that importance weights correct for all of them.

    Of ``B`` rows each sampler draws ``weight * B``, rounded up or down at random so that the
    expected number is exact. Which rows these are does not depend on what is drawn. Every sampler
    draws a whole batch, so a draw costs as much as those of all samplers together.

    A sampler that cannot draw any item, as when no item is new enough for it, leaves its rows to
    the others: the weights of those are scaled to sum to 1. Samplers draw independently of each
    other. A batch may therefore hold an item twice, even if each of them draws without replacement.

    All samplers see all changes. Samplers with priorities get the same priorities, and samplers
    that draw by score get the same scores. ``next_batch`` tells all of them which items were drawn.

    Values for the buffer as a whole (``can_sample``, ``metrics`` and
    ``importance_weights(..., normalize="buffer")``) cost a pass over all slots.

    Attributes:
        samplers: The samplers, which derive from ``jaxbuf.strategies.KnownSampler``: all but
            ``Shuffled``, whose passes need to know the number of their rows.
        weights: The expected fraction of rows that each of them draws; scaled to sum to 1. They may
            vary, as a whole (see ``jaxbuf.Varying``).

    Raises:
        ValueError: If there are no samplers, one of them cannot tell the probability of items that
            it did not draw, some of them draw by priority and others by score, or weights are not
            one finite number of at least 0 for each sampler, with a sum above 0.

    References:
        Jiang et al., Prioritized Level Replay, ICML 2021, https://arxiv.org/abs/2010.03934,
        equation 1, blends scores with staleness.

    Example:
        >>> import jax, jax.numpy as jnp, jaxbuf
        >>> by_priority = jaxbuf.Prioritized(alpha=1.0)
        >>> sampler = jaxbuf.Blend((by_priority, jaxbuf.Uniform()), (0.75, 0.25))
        >>> buffer = jaxbuf.ItemBuffer.create(jnp.int32(0), 100, sampler=sampler)
        >>> buffer, slots = buffer.insert(jnp.arange(2), priority=jnp.array([0.0, 1.0]))
        >>> buffer.get(slots).probability.tolist()
        [0.125, 0.875]
        >>> int(jnp.sum(buffer.sample(jax.random.key(0), 8).data == 1)) >= 6
        True
    """

    samplers: tuple[KnownSampler, ...]
    weights: tuple[float, ...]

    varies: ClassVar[dict[str, tuple[float, float]]] = {"weights": (0.0, math.inf)}

    def __post_init__(self) -> None:
        super().__post_init__()
        samplers = checks.check_sequence("samplers", self.samplers, "samplers")
        for i, sampler in enumerate(samplers):
            _check_part(f"samplers[{i}]", sampler)
        checks.settle(self, checks.check_weights, "weights")
        weights, count = self.weights, _count(self.weights)
        if not samplers or len(samplers) != count:
            raise ValueError(
                f"there are {len(samplers)} samplers and {count} weights; expected one weight for "
                "each of one sampler or more"
            )
        if not isinstance(weights, Varying):
            if sum(weights) <= 0:
                raise ValueError(
                    f"weights is {weights}; expected finite numbers of at least 0, not all 0"
                )
            total = math.fsum(weights)
            if not math.isclose(total, 1.0, rel_tol=1e-9):
                weights = tuple(weight / total for weight in weights)
        by_priority, by_score = (
            [sampler for sampler in samplers if getattr(sampler, flag)]
            for flag in ("uses_priority", "uses_score")
        )
        if by_priority and by_score:
            raise ValueError(
                f"samplers has {by_priority[0]}, which draws by priority, and {by_score[0]}, which "
                "draws by score, but the sampler of a buffer gets one of the two; choose samplers "
                "that use the same"
            )
        object.__setattr__(self, "samplers", samplers)
        object.__setattr__(self, "weights", weights)
        object.__setattr__(self, "uses_priority", bool(by_priority))
        object.__setattr__(self, "uses_score", bool(by_score))
        object.__setattr__(self, "uses_age", any(sampler.uses_age for sampler in samplers))

    @property
    def leaf_samplers(self) -> tuple[Sampler, ...]:
        return tuple(leaf for sampler in self.samplers for leaf in sampler.leaf_samplers)

    def init(self, capacity: int) -> tuple[State, ...]:
        return tuple(sampler.init(capacity) for sampler in self.samplers)

    def accepts(self, value: Float[Array, "..."]) -> Bool[Array, "..."]:
        legal = jnp.ones(value.shape, bool)
        for sampler in self.samplers:
            if _uses_value(sampler):
                legal &= sampler.accepts(value)
        return legal

    def on_change(
        self,
        state: tuple[State, ...],
        added: Index,
        value: Floats | None,
        removed: Int[Array, " R"],
    ) -> tuple[State, ...]:
        return tuple(
            sampler.on_change(inner, added, value if _uses_value(sampler) else None, removed)
            for sampler, inner in self._pairs(state)
        )

    def with_default_of(
        self, state: tuple[State, ...], before: tuple[State, ...]
    ) -> tuple[State, ...]:
        return tuple(
            sampler.with_default_of(inner, earlier)
            for (sampler, inner), earlier in zip(self._pairs(state), before, strict=True)
        )

    def set_priority(
        self, state: tuple[State, ...], index: Index, value: Floats
    ) -> tuple[State, ...]:
        """Sets the priorities (or scores) for all samplers that use them."""
        return tuple(
            sampler.set_priority(inner, index, value) if _uses_value(sampler) else inner
            for sampler, inner in self._pairs(state)
        )

    def on_draw(self, state: tuple[State, ...], index: Index) -> tuple[State, ...]:
        """Updates all samplers after any of them drew these items."""
        return tuple(sampler.on_draw(inner, index) for sampler, inner in self._pairs(state))

    def map_state(self, state: tuple[State, ...], fn: Function) -> tuple[State, ...]:
        return tuple(sampler.map_state(inner, fn) for sampler, inner in self._pairs(state))

    def move(
        self, empty: tuple[State, ...], state: tuple[State, ...], moves: Moves
    ) -> tuple[State, ...]:
        return tuple(
            sampler.move(blank, inner, moves)
            for (sampler, inner), blank in zip(self._pairs(state), empty, strict=True)
        )

    def in_batch(self, batch_size: int | Count, most: int | None = None) -> "Blend":
        samplers = tuple(
            sampler.in_batch(batch_size) if most is None else sampler.in_batch(batch_size, most)
            for sampler in self.samplers
        )
        return changed(self, samplers=samplers)

    def draw(
        self, state: tuple[State, ...], key: Key, batch_size: int, occupancy: Occupancy
    ) -> Draw:
        """Draws ``batch_size`` items, each by one of the samplers."""
        return self.draw_some(state, key, batch_size, None, occupancy)

    def draw_some(
        self,
        state: tuple[State, ...],
        key: Key,
        batch_size: int,
        count: Count | None,
        occupancy: Occupancy,
    ) -> Draw:
        own_key, *keys = jax.random.split(key, len(self.samplers) + 1)
        row = jnp.arange(batch_size, dtype=jnp.int32)
        draws: list[Draw] = []
        for (sampler, inner), key in zip(self._pairs(state), keys, strict=True):
            if count is None:
                draws.append(sampler.draw(inner, key, batch_size, occupancy))
            else:
                drawn = sampler.draw_some(inner, key, batch_size, count, occupancy)
                draws.append(dataclasses.replace(drawn, valid=drawn.valid & (row < count)))
        # A sampler that can draw any item draws at least one row. Its support would tell as well,
        # but might cost a pass over all slots.
        weights = self._scaled_weights(jnp.stack([jnp.any(drawn.valid) for drawn in draws]))  # [K]
        if count is None:
            angles = jnp.asarray(_scattered_angles(batch_size))
        else:
            angles = _some_angles(batch_size, count)
        chosen = _assign_rows(weights, random_words(own_key, ()), angles)  # [B]
        index = jnp.stack([drawn.index for drawn in draws])[chosen, row]
        valid = jnp.stack([drawn.valid for drawn in draws])[chosen, row]
        whole = self.in_batch(batch_size) if count is None else self.in_batch(count, batch_size)
        probability = whole._blended(weights, state, index, occupancy)
        return Draw(after(index, probability), probability, valid)

    def probability(self, state: tuple[State, ...], index: Index, occupancy: Occupancy) -> Floats:
        """Returns the probability that a single draw gives each of these live items."""
        counts = [sampler.support(inner, occupancy).count for sampler, inner in self._pairs(state)]
        return self._blended(self._scaled_weights(jnp.stack(counts) > 0), state, index, occupancy)

    def support(self, state: tuple[State, ...], occupancy: Occupancy) -> Support:
        return support_of(everywhere(self, state, occupancy))

    def metrics(self, state: tuple[State, ...], occupancy: Occupancy) -> dict[str, Array]:
        """Returns the metrics of all samplers, with the ``effective_sample_size`` of the blend.

        Where several have a metric of the same name, it is that of the first.
        """
        metrics: dict[str, Array] = {}
        for sampler, inner in self._pairs(state):
            metrics = {**sampler.metrics(inner, occupancy), **metrics}
        size = effective_size(everywhere(self, state, occupancy))
        return {**metrics, "effective_sample_size": size}

    def by_slot(self, state: tuple[State, ...]) -> dict[str, Float[Array, " N"]]:
        """Returns the numbers of all samplers; of the first one where several have the same."""
        numbers: dict[str, Array] = {}
        for sampler, inner in self._pairs(state):
            numbers = {**sampler.by_slot(inner), **numbers}
        return numbers

    def check_valid(
        self, state: tuple[State, ...], name: str, live: NDArray[np.bool_], occupancy: Occupancy
    ) -> Iterator[str]:
        for i, (sampler, inner) in enumerate(self._pairs(state)):
            yield from sampler.check_valid(inner, f"{name}[{i}]", live, occupancy)

    @property
    def sequential(self) -> bool:
        return all(sampler.sequential for sampler in self.samplers)

    def _pairs(self, state: tuple[State, ...]) -> list[tuple[KnownSampler, State]]:
        return list(zip(self.samplers, state, strict=True))

    def _scaled_weights(self, able: Bool[Array, " K"]) -> Float[Array, " K"]:
        """Returns the weights of the samplers that can draw any item, and 0 for the others."""
        weights = jnp.where(able, jnp.asarray(self.weights, jnp.float32), 0.0)
        return over(weights, jnp.sum(weights))

    def _blended(
        self,
        weights: Float[Array, " K"],
        state: tuple[State, ...],
        index: Index,
        occupancy: Occupancy,
    ) -> Floats:
        """Returns the sum of the probabilities under all samplers, with these weights."""
        total = jnp.zeros(index.shape, jnp.float32)
        for i, (sampler, inner) in enumerate(self._pairs(state)):
            total += weights[i] * sampler.probability(inner, index, occupancy)
        return total


def _count(weights: tuple[float, ...] | Varying) -> int:
    """Returns the number of weights, which may vary."""
    if not isinstance(weights, Varying):
        return len(weights)
    if weights.value is None:
        return math.prod(weights.shape)
    return len(weights.value) if ndim(weights.value) == 1 else 0


def _check_part(name: str, sampler: object) -> None:
    """Checks that a sampler can be blended with others.

    Raises:
        ValueError: If it cannot.
    """
    if isinstance(sampler, Shuffled):
        raise ValueError(
            f"{name} is {sampler}, whose passes would lose the items that are left to other "
            "samplers; give it a buffer of its own, as a part of a jaxbuf.Mixture, or choose "
            "jaxbuf.Uniform(replacement=False)"
        )
    if not isinstance(sampler, KnownSampler):
        raise ValueError(
            f"{name} is {checks.name_of(sampler)}, which cannot tell the probability of items it "
            "did not draw; choose a sampler such as jaxbuf.Uniform(...), or derive your own from "
            "jaxbuf.strategies.KnownSampler"
        )
    if type(sampler).next is not Sampler.next:
        raise ValueError(
            f"{name} is {sampler}, whose next does not know which of its rows are used; give it a "
            "method on_draw in place of next (see jaxbuf.strategies.Sampler)"
        )


def _uses_value(sampler: Sampler) -> bool:
    """Returns whether a sampler uses the priorities, or scores, of a buffer."""
    return sampler.uses_priority or sampler.uses_score


def _assign_rows(weights: Float[Array, " K"], word: Word, angles: Words) -> Index:
    """Returns the sampler of each row. Each gets its share of the rows, rounded up or down.

    Points at equal distances on a circle, turned by a random angle, belong to the sampler in whose
    part of the circle they lie. The point of any single row is uniform, whichever row it is, so
    that the sampler does not depend on the position of the row in a batch that is sorted or
    stratified.
    """
    angle = word + angles
    point = (angle >> jnp.uint32(8)).astype(jnp.float32) * jnp.float32(2.0**-24)
    end = ends(weights)
    return interval_of(end, point * end[-1])[0]


def _scattered_angles(rows: int) -> NDArray[np.uint32]:
    """Returns equal distances on a circle of 2**32, with those of neighboring rows far apart."""
    turn = np.arange(rows, dtype=np.uint64) * np.uint64(_step(rows)) % np.uint64(rows)
    return ((turn << np.uint64(32)) // np.uint64(rows)).astype(np.uint32)


def _some_angles(rows: int, count: Count) -> Words:
    """Returns what ``_scattered_angles`` does for the first ``count`` of ``rows`` rows."""
    turn, rest = (jnp.asarray(each)[count] for each in _turns(rows))
    row = jnp.arange(rows, dtype=jnp.uint32)
    return row * turn + (row.astype(jnp.float32) * rest).astype(jnp.uint32)


@functools.lru_cache
def _turns(rows: int) -> tuple[NDArray[np.uint32], NDArray[np.float32]]:
    """Returns the angles from row to row for each count up to ``rows``, and their fractions."""
    counts = [max(count, 1) for count in range(rows + 1)]
    turns = [divmod(_step(count) << 32, count) for count in counts]
    rest = [left / count for (_, left), count in zip(turns, counts, strict=True)]
    return np.array([turn % 2**32 for turn, _ in turns], np.uint32), np.array(rest, np.float32)


def _step(rows: int) -> int:
    """Returns how many points on a circle of so many the next row is away."""
    step = max(round(_GOLDEN * rows), 1)
    while math.gcd(step, rows) > 1:
        step += 1
    return step

"""A sampler that draws a part of every batch from the newest items."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int
from numpy.typing import NDArray

from jaxbuf.core import checks, sizes
from jaxbuf.core.hyperparameters import changed, is_fixed
from jaxbuf.core.order import after
from jaxbuf.core.random import random_words
from jaxbuf.core.types import Count, Floats, Function, Index, Key, Number, State
from jaxbuf.occupancy.ages import Ages, spread
from jaxbuf.occupancy.protocol import Occupancy
from jaxbuf.strategies.mass import effective_size
from jaxbuf.strategies.moves import Moves
from jaxbuf.strategies.protocols import (
    Draw,
    KnownSampler,
    Sampler,
    Support,
    everywhere,
    support_of,
)
from jaxbuf.strategies.uniform import Uniform


@dataclasses.dataclass(frozen=True)
class Recent(KnownSampler):
    """Draws a fixed part of every batch from the newest items, and the rest by another sampler.

    The first ``R = round(ratio * B)`` of ``B`` rows are spread evenly over the ``steps`` newest
    items, or over the ``steps`` newest windows of every ring of a ``TrajectoryBuffer``. They are
    drawn without repeats if there are enough recent items; otherwise each is repeated equally often
    (±1). The other ``B - R`` rows are drawn by ``base``, which may also draw recent items.

    An item therefore has the probability ``R / B / recent + (1 - R / B) * p`` if it is among the
    ``recent`` newest and ``(1 - R / B) * p`` if not, where ``p`` is its probability under ``base``.
    A sample reports this probability for all rows, from either part, so that importance weights
    correct for both. Values for the buffer as a whole (``support``, ``metrics`` and
    ``importance_weights(..., normalize="buffer")``) use ``ratio`` in place of ``R / B``, and cost a
    pass over all slots.

    Attributes:
        ratio: The fraction of a batch that is recent, from 0 to 1; half a row is rounded up. It may
            vary (see ``jaxbuf.Varying``); a draw then costs a whole batch of each kind.
        steps: The number of items, or of windows of each ring, that count as recent.
        base: The sampler of the other rows: any sampler but ``Shuffled``. Your own has to derive
            from ``jaxbuf.strategies.KnownSampler``.

    Raises:
        ValueError: If ``ratio`` is not in [0, 1], ``steps`` is not an integer of at least 1, or
            ``base`` is not a ``KnownSampler``.

    References:
        ALF, https://github.com/HorizonRobotics/alf: ``recent_data_ratio`` and
        ``recent_data_steps`` of its replay buffer. While its buffer is nearly empty, ALF samples
        without a recent part; here there always is one.

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
    varies: ClassVar[dict[str, tuple[float, float]]] = {"ratio": (0.0, 1.0)}

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.settle(self, checks.check_fraction, "ratio")
        checks.settle(self, sizes.check_count, "steps", most=2**31 - 1)
        if not isinstance(self.base, KnownSampler):
            raise ValueError(
                f"base is {checks.name_of(self.base)}, which cannot tell the probability of items "
                "it did not draw; choose jaxbuf.Uniform(...) or jaxbuf.Prioritized(...)"
            )
        object.__setattr__(self, "uses_priority", self.base.uses_priority)
        object.__setattr__(self, "uses_score", self.base.uses_score)

    @property
    def leaf_samplers(self) -> tuple[Sampler, ...]:
        return self.base.leaf_samplers

    def init(self, capacity: int) -> State:
        return self.base.init(capacity)

    def accepts(self, value: Float[Array, "..."]) -> Bool[Array, "..."]:
        return self.base.accepts(value)

    def set_priority(self, state: State, index: Index, value: Floats) -> State:
        """Updates the base, which alone keeps state."""
        return self.base.set_priority(state, index, value)

    def on_change(
        self, state: State, added: Index, value: Floats | None, removed: Int[Array, " R"]
    ) -> State:
        return self.base.on_change(state, added, value, removed)

    def with_default_of(self, state: State, before: State) -> State:
        return self.base.with_default_of(state, before)

    def on_draw(self, state: State, index: Index) -> State:
        """Updates the base, which alone keeps state."""
        return self.base.on_draw(state, index)

    def map_state(self, state: State, fn: Function) -> State:
        return self.base.map_state(state, fn)

    def move(self, empty: State, state: State, moves: Moves) -> State:
        return self.base.move(empty, state, moves)

    def reach(self, capacity: int) -> int:
        return min(self.steps, capacity) if is_fixed(self.ratio, 1.0) else self.base.reach(capacity)

    def by_slot(self, state: State) -> dict[str, Float[Array, " N"]]:
        return self.base.by_slot(state)

    def in_batch(self, batch_size: int | Count, most: int | None = None) -> "Recent":
        rows = self._recent_rows(batch_size, most)
        if isinstance(rows, int) and isinstance(batch_size, int):
            base = self.base.in_batch(max(batch_size - rows, 1))
            return changed(self, ratio=rows / batch_size, base=base)
        share = jnp.float32(rows) / jnp.float32(jnp.maximum(batch_size, 1))
        most = batch_size if isinstance(batch_size, int) else most
        return changed(self, ratio=share, base=self.base.in_batch(batch_size - rows, most))

    def draw(self, state: State, key: Key, batch_size: int, occupancy: Occupancy) -> Draw:
        """Draws ``batch_size`` items, the recent ones first."""
        if isinstance(self.ratio, jax.Array):
            return self.draw_some(state, key, batch_size, jnp.int32(batch_size), occupancy)
        rows = self._recent_rows(batch_size)
        if rows == 0:
            return self.base.draw(state, key, batch_size, occupancy)
        recent_key, base_key = jax.random.split(key)
        recent = self._recent(occupancy)
        words = random_words(recent_key, (rows + 1,))
        rank = spread(words[1:], words[0], recent.total)
        index = recent.at(rank[_alternate(rows, recent.count.shape[0])])
        valid = jnp.broadcast_to(recent.total > 0, (rows,))
        base = self.base.in_batch(max(batch_size - rows, 1))
        base_probability = base.probability(state, index, occupancy)
        if rows < batch_size:
            drawn = self.base.draw(state, base_key, batch_size - rows, occupancy)
            index = jnp.concatenate([index, drawn.index])
            base_probability = jnp.concatenate([base_probability, drawn.probability])
            valid = jnp.concatenate([valid, drawn.valid])
        probability = _mixed(rows / batch_size, recent, index, base_probability)
        return Draw(after(index, probability), probability, valid)

    def draw_some(
        self, state: State, key: Key, batch_size: int, count: Count, occupancy: Occupancy
    ) -> Draw:
        rows = self._recent_rows(count, batch_size)
        recent_key, base_key = jax.random.split(key)
        words = random_words(recent_key, (batch_size + 1,))
        recent = self._recent(occupancy)
        newest = recent.at(spread(words[1:], words[0], recent.total, rows))
        batch = self.base.draw_some(state, base_key, batch_size, count - rows, occupancy)
        rank = jnp.arange(batch_size, dtype=jnp.int32) - rows
        is_recent, source = rank < 0, jnp.maximum(rank, 0)
        index = jnp.where(is_recent, newest, batch.index[source])
        valid = jnp.where(is_recent, recent.total > 0, batch.valid[source])
        whole = self.in_batch(count, batch_size)
        probability = whole.probability(state, index, occupancy)
        return Draw(after(index, probability), probability, valid)

    def probability(self, state: State, index: Index, occupancy: Occupancy) -> Floats:
        """Returns the probability that a single draw gives each of these live items."""
        base_probability = self.base.probability(state, index, occupancy)
        return _mixed(self.ratio, self._recent(occupancy), index, base_probability)

    def support(self, state: State, occupancy: Occupancy) -> Support:
        """Returns the support: the recent items and all that the base can draw."""
        return support_of(everywhere(self, state, occupancy))

    def metrics(self, state: State, occupancy: Occupancy) -> dict[str, Array]:
        """Returns the metrics of the base, with the ``effective_sample_size`` of the mixture."""
        size = effective_size(everywhere(self, state, occupancy))
        return {**self.base.metrics(state, occupancy), "effective_sample_size": size}

    def check_valid(
        self, state: State, name: str, live: NDArray[np.bool_], occupancy: Occupancy
    ) -> Iterator[str]:
        yield from self.base.check_valid(state, name, live, occupancy)

    @property
    def sequential(self) -> bool:
        """False: the recent items come first."""
        return False

    def _recent_rows(self, batch_size: int | Count, most: int | None = None) -> Any:
        """Returns the number of recent rows of a batch, an integer or a traced one.

        Args:
            batch_size: The number of rows.
            most: The largest number of rows, if that is traced.
        """
        if isinstance(self.ratio, jax.Array):
            rows = self.ratio * jnp.asarray(batch_size).astype(jnp.float32) + 0.5
            return jnp.floor(rows).astype(jnp.int32)
        if most is None or isinstance(batch_size, int):
            return math.floor(self.ratio * batch_size + 0.5)
        # Not computed in float32, which rounds halves in another way.
        table = [math.floor(self.ratio * rows + 0.5) for rows in range(most + 1)]
        return jnp.asarray(np.array(table, np.int32))[batch_size]

    def _recent(self, occupancy: Occupancy) -> Ages:
        return occupancy.age_range(-self.steps, None)


def _mixed(ratio: float | Number, recent: Ages, index: Index, base: Floats) -> Floats:
    """Returns probabilities if a fraction ``ratio`` of rows is recent, given those of the base."""
    share = jnp.float32(ratio) / jnp.maximum(recent.total, 1).astype(jnp.float32)
    return jnp.where(recent.contains(index), share, 0.0) + jnp.float32(1.0 - ratio) * base


def _alternate(rows: int, rings: int) -> NDArray[np.int32]:
    """Returns an order in which rows that are sorted by ring alternate between the rings."""
    each = rows // rings
    turns = np.arange(each * rings, dtype=np.int32).reshape(rings, each).T.reshape(-1)
    return np.concatenate([turns, np.arange(each * rings, rows, dtype=np.int32)])

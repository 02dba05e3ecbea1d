"""A sampler that draws every item with the same probability."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxbuf.core import checks
from jaxbuf.core.random import random_words
from jaxbuf.core.types import Count, Floats, Index, Key, State, Words
from jaxbuf.occupancy.protocol import Occupancy
from jaxbuf.strategies.distinct import distinct
from jaxbuf.strategies.mass import draw_shards
from jaxbuf.strategies.protocols import (
    Draw,
    ShardableSampler,
    Support,
    Targets,
    uniform_probability,
)


@dataclasses.dataclass(frozen=True)
class Uniform(ShardableSampler):
    """Draws every live item with the same probability.

    Attributes:
        replacement: Whether a batch may hold an item twice. If False, rows beyond the number of
            items are invalid.

    Raises:
        ValueError: If ``replacement`` is neither True nor False.

    Example:
        >>> import jax, jax.numpy as jnp, jaxbuf
        >>> sampler = jaxbuf.Uniform(replacement=False)
        >>> buffer = jaxbuf.ItemBuffer.create(jnp.int32(0), 8, sampler=sampler)
        >>> batch = buffer.add(jnp.arange(3)).sample(jax.random.key(0), 4)
        >>> sorted(batch.data[:3].tolist()), batch.valid.tolist()
        ([0, 1, 2], [True, True, True, False])
    """

    replacement: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.settle(self, checks.check_flag, "replacement")

    @property
    def shardable(self) -> bool:
        """True with replacement; without it, each draw depends on all others."""
        return self.replacement

    def summarize(self, state: State, occupancy: Occupancy) -> Count:
        del state
        return occupancy.size

    def targets(
        self, summaries: Int[Array, " S"], key: Key, batch_size: int, capacity: int
    ) -> Targets:
        del capacity
        return Targets(draw_shards(summaries, key, batch_size), random_words(key, (batch_size,)))

    def draw_at(
        self, state: State, occupancy: Occupancy, point: Words, summaries: Int[Array, " S"]
    ) -> Draw:
        index = occupancy.draw(point)
        valid = jnp.broadcast_to(self.support_among(summaries).count > 0, index.shape)
        return Draw(index, self.probability_among(state, index, summaries), valid)

    def support_among(self, summaries: Int[Array, " S"]) -> Support:
        size = jnp.sum(summaries, axis=0, dtype=jnp.int32)
        return Support(size, uniform_probability(size))

    def draw(self, state: State, key: Key, batch_size: int, occupancy: Occupancy) -> Draw:
        """Draws ``batch_size`` of the live items."""
        if self.replacement:
            return super().draw(state, key, batch_size, occupancy)
        size = occupancy.size
        probability = jnp.broadcast_to(uniform_probability(size), (batch_size,))
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

    def probability_among(self, state: State, index: Index, summaries: Int[Array, " S"]) -> Floats:
        del state
        return jnp.broadcast_to(self.support_among(summaries).least_probability, index.shape)

    def metrics(self, state: State, occupancy: Occupancy) -> dict[str, Array]:
        """Returns ``effective_sample_size``, which is the number of items."""
        del state
        return {"effective_sample_size": occupancy.size.astype(jnp.float32)}

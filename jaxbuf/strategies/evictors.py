"""Evictors, which choose the items that make room for new ones."""

import dataclasses

from jaxbuf.occupancy.lots import Lots
from jaxbuf.occupancy.ranking import Ranking
from jaxbuf.occupancy.ring import Ring
from jaxbuf.strategies.protocols import Evictor


@dataclasses.dataclass(frozen=True)
class Oldest(Evictor):
    """First in, first out: evicts the oldest item.

    Example:
        >>> import jax.numpy as jnp, jaxbuf
        >>> buffer = jaxbuf.ItemBuffer.create(jnp.int32(0), 3, evictor=jaxbuf.Oldest())
        >>> buffer.add(jnp.arange(5)).latest(3).data.tolist()
        [2, 3, 4]
    """

    def init(self, capacity: int) -> Ring:
        return Ring.create(capacity)


@dataclasses.dataclass(frozen=True)
class Lowest(Evictor):
    """Evicts the item with the lowest score, so that the buffer keeps the highest scores seen.

    If scores are equal, the older item is evicted. A new item that ranks below every item of a full
    buffer is refused. Scores of −inf rank lowest, and scores of +inf rank highest.

    Example:
        >>> import jax.numpy as jnp, jaxbuf
        >>> buffer = jaxbuf.ItemBuffer.create(jnp.float32(0), 3, evictor=jaxbuf.Lowest())
        >>> for scores in (jnp.array([10.0, 20.0, 30.0]), jnp.array([5.0, 25.0])):
        ...     buffer = buffer.add(scores, score=scores)
        >>> sorted(buffer.data.tolist())
        [20.0, 25.0, 30.0]
    """

    uses_score = True

    def init(self, capacity: int) -> Ranking:
        return Ranking.create(capacity)


@dataclasses.dataclass(frozen=True)
class Reservoir(Evictor):
    """Evicts at random, so that every item ever added is held with the same probability.

    It draws random numbers, the lots, and pays no heed to scores. ``jaxbuf.reservoir`` creates such
    a buffer.
    """

    @property
    def of_shards(self) -> bool:
        """False: lots of different shards cannot be compared."""
        return False

    def init(self, capacity: int) -> Lots:
        return Lots.create(capacity)

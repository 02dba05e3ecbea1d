"""What makes room for new items."""

import dataclasses

from jaxbuf.occupancy.ranking import Ranking
from jaxbuf.occupancy.ring import Ring
from jaxbuf.strategies.protocols import Evictor


@dataclasses.dataclass(frozen=True)
class Oldest(Evictor):
    """First in, first out: the oldest item goes."""

    def init(self, capacity: int) -> Ring:
        """An empty ring."""
        return Ring.create(capacity)


@dataclasses.dataclass(frozen=True)
class Lowest(Evictor):
    """The item with the lowest score goes: the buffer keeps the highest it has seen.

    Of equal scores the newer item stays. A new item that ranks below all of a full buffer does not
    enter. Scores of −inf go first, those of +inf stay.

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
        """A ranking of no items."""
        return Ranking.create(capacity)

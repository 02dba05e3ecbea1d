"""What makes room for new items."""

import dataclasses
from typing import Any, Protocol

from jaxbuf.core.ranking import Ranking
from jaxbuf.core.slots import Occupancy, Ring


class Evictor(Protocol):
    """Chooses which item goes when a new one comes.

    An evictor is a frozen, hashable dataclass; what changes is in the occupancy it creates.
    """

    @property
    def uses_score(self) -> bool:
        """Whether ``add`` needs a ``score``."""
        ...

    def init(self, capacity: int) -> Occupancy:
        """The occupancy of an empty buffer."""
        ...


@dataclasses.dataclass(frozen=True)
class Oldest:
    """First in, first out: the oldest item goes."""

    uses_score = False

    def init(self, capacity: int) -> Any:
        """An empty ring."""
        return Ring.create(capacity)


@dataclasses.dataclass(frozen=True)
class Lowest:
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

    def init(self, capacity: int) -> Any:
        """A ranking of no items."""
        return Ranking.create(capacity)

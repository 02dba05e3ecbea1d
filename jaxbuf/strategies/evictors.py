"""What makes room for new items."""

import dataclasses
from typing import Any, Protocol

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

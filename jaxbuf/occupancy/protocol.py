"""The protocol of everything that knows which slots are live."""

from typing import Protocol, Self

from jaxtyping import Array, Bool, Float, Int, UInt

from jaxbuf.core.slots import Slots


class Occupancy(Protocol):
    """What an evictor keeps: which slots are live, and where new items go. An immutable pytree."""

    @property
    def capacity(self) -> int:
        """Number of slots."""
        ...

    @property
    def size(self) -> Int[Array, ""]:
        """Live items."""
        ...

    def place(
        self, rows: int, mask: Bool[Array, " B"] | None, score: Float[Array, " B"] | None
    ) -> tuple[Self, Int[Array, " B"]]:
        """Choose slots for ``rows`` new items.

        Returns:
            The new occupancy, and a slot for each row ``[B]``: the capacity for rows that are
            masked out or do not stay. No slot is given twice.
        """
        ...

    def refuses(self, score: Float[Array, " B"]) -> Bool[Array, " B"]:
        """Which rows could not stay even if they came alone, because of their score."""
        ...

    def live(self, index: Int[Array, " B"]) -> Bool[Array, " B"]:
        """Whether there is an item at ``index``."""
        ...

    def holds(self, slots: Slots) -> Bool[Array, " B"]:
        """Whether the items that these names mean are still there."""
        ...

    def generation(self, index: Int[Array, " B"]) -> UInt[Array, " B"]:
        """The generation of what is at ``index``."""
        ...

    def draw(self, words: UInt[Array, " B"]) -> Int[Array, " B"]:
        """A live slot for each random word, all equally likely; arbitrary if there is none."""
        ...

    def clear(self) -> Self:
        """No items; what was there stays stale. Shares no array with the original."""
        ...

    def metrics(self) -> dict[str, Array]:
        """Numbers worth watching, scalars."""
        ...

"""The abstract classes of occupancies, which know which slots are live."""

import abc
from collections.abc import Iterator
from typing import Any, Self

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt

from jaxbuf.core.slots import Slots
from jaxbuf.core.types import Count, Floats, Index, Mask, Word, Words
from jaxbuf.occupancy.ages import Ages, Bound


class Occupancy(abc.ABC):
    """The live slots of a buffer, which is all that a sampler sees of it. An immutable pytree.

    Attributes:
        capacity: Number of slots.
    """

    capacity: int

    @property
    def num_slots(self) -> int:
        """The number of slots, of items or of windows."""
        return self.capacity

    @property
    @abc.abstractmethod
    def size(self) -> Count:
        """The number of live items."""

    @abc.abstractmethod
    def live(self, index: Int[Array, "..."]) -> Bool[Array, "..."]:
        """Returns whether there is an item at ``index``."""

    @abc.abstractmethod
    def generation(self, index: Int[Array, "..."]) -> UInt[Array, "..."]:
        """Returns the generation of the item at ``index``."""

    @abc.abstractmethod
    def draw(self, words: Words) -> Index:
        """Returns a uniformly drawn live slot for each random word; arbitrary if none is live."""

    def draw_where(self, wanted: Mask, words: Words, index: Index) -> Index:
        """Returns a draw for each row that is ``wanted``, and ``index`` for the others."""
        return jnp.where(wanted, self.draw(words), index)

    @abc.abstractmethod
    def clear(self) -> Self:
        """Returns an occupancy without items, which shares no array with the original.

        ``Slots`` of earlier items stay stale.
        """

    def holds(self, slots: Slots) -> Mask:
        """Returns whether the items that these ``Slots`` name are still there."""
        return self.live(slots.index) & (self.generation(slots.index) == slots.generation)

    def rows_to_change(self, slots: Slots, wanted: Mask, legal: Mask) -> tuple[Index, Word]:
        """Returns the slots of rows to change, and the number of rows with an illegal change.

        Args:
            slots: The ``Slots`` of items.
            wanted: The rows to change, if their item is still there.
            legal: The rows whose change is legal.

        Returns:
            The slots, past the end for rows that do not change, ``[B]``, and the number of the rows
            to change that are not legal.
        """
        wanted = wanted & self.holds(slots)
        index = jnp.where(wanted & legal, slots.index, self.num_slots)
        return index, jnp.sum(wanted & ~legal, dtype=jnp.uint32)

    def slots_of(self, index: Index, valid: Mask, *, past_end: int) -> tuple[Slots, Mask]:
        """Returns the ``Slots`` of items, and which of the ``valid`` rows hold a live one.

        Other rows have the index ``past_end``.
        """
        valid = valid & self.live(index)
        index = jnp.where(valid, index, past_end)
        return Slots(index=index, generation=self.generation(index)), valid

    def metrics(self) -> dict[str, Array]:
        """Returns scalars to monitor; none by default."""
        return {}

    @property
    def keeps_order(self) -> bool:
        """True if the order in which items were added is known, so that ``age_range`` works."""
        return False

    def age_range(self, start: Bound, stop: Bound) -> Ages:
        """Returns the items ``start`` to ``stop - 1`` of each ring, as a slice of a list would.

        Only available if ``keeps_order`` is True.
        """
        raise NotImplementedError(f"{type(self).__name__} does not keep the order of its items")

    def in_order(self) -> tuple[Int[Array, " N"], Bool[Array, " N"]] | None:
        """Returns the slots from the oldest item to the newest, ring by ring, and which are live.

        Rows that are not live may be anywhere and hold any slot. None if the order is not known, as
        by default if ``keeps_order`` is False.
        """
        if not self.keeps_order:
            return None
        ages, rank = self.age_range(None, None), jnp.arange(self.num_slots, dtype=jnp.int32)
        return ages.at(rank), rank < ages.total

    def item_ages(self) -> UInt[Array, " N"] | None:
        """Returns the number of items added since the one in each slot, arbitrary in empty slots.

        None if the order is not known. By default, removed items are not counted.
        """
        ordered = self.in_order()
        if ordered is None:
            return None
        order, live = ordered
        newer = jnp.cumsum(live[::-1], dtype=jnp.uint32)[::-1] - jnp.uint32(1)
        ages = jnp.zeros((self.num_slots,), jnp.uint32)
        return ages.at[jnp.where(live, order, self.num_slots)].set(newer, mode="drop")

    def item_scores(self) -> Float[Array, " N"] | None:
        """Returns the score in each slot, not finite in empty ones; None if it keeps no scores."""
        return None

    def stays_by(self) -> Float[Array, " N"] | None:
        """Returns the scores that decide which items ``load`` keeps in a smaller buffer.

        By default these are ``item_scores``. ``place`` gets them for the items that move.
        """
        return self.item_scores()

    @property
    def next_place(self) -> Count | None:
        """The slot that is written next; None if items do not go around in a single ring."""
        return None

    def check_items(self, name: str, live: Bool[Array, " N"]) -> Iterator[str]:
        """Yields a line for each problem with the items in its slots, for ``assert_valid``.

        Args:
            name: The occupancy as an expression, with which lines begin.
            live: The slots that can be drawn, of this occupancy or of a subset of it.
        """
        del name, live
        yield from ()

    def rescore(self, index: Index, score: Floats) -> Self:
        """Sets the scores of the items at ``index``, no slot twice; past the end is ignored.

        The order of arrival, which decides between equal scores, must not change. An occupancy
        without scores ignores them.
        """
        del index, score
        return self

    @property
    def places(self) -> "Occupancy":
        """The occupancy that chooses the slots of items: the inner one of a subset, or this one."""
        return self

    def with_places(self, places: "Occupancy") -> "Occupancy":
        """Returns this occupancy with other ``places``."""
        return places

    def moving(self, old: "Occupancy", source: Index, target: Index) -> "Occupancy":
        """Returns this occupancy with the entries of another one for the items that move.

        Args:
            old: The other occupancy, of the same class.
            source: Its slots, ``[B]``.
            target: Their slots here, ``[B]``; past the end if an item does not stay.
        """
        del old, source, target
        return self


class ItemOccupancy(Occupancy):
    """An occupancy that also chooses the slots of new items; an evictor creates it.

    Example:
        >>> import dataclasses, jax.numpy as jnp, jaxbuf
        >>> from flax import struct
        >>> class Frozen(jaxbuf.strategies.ItemOccupancy, struct.PyTreeNode):
        ...     '''Keeps the first items for ever: takes no more once it is full.'''
        ...
        ...     count: jnp.ndarray
        ...     cleared: jnp.ndarray
        ...     capacity: int = struct.field(pytree_node=False)
        ...
        ...     @property
        ...     def size(self):
        ...         return self.count
        ...
        ...     def place(self, rows, mask, score):
        ...         taken = jnp.ones(rows, bool) if mask is None else mask
        ...         index = jnp.where(taken, self.count + jnp.cumsum(taken) - 1, self.capacity)
        ...         count = jnp.minimum(self.count + jnp.sum(taken), self.capacity)
        ...         return self.replace(count=count), jnp.minimum(index, self.capacity)
        ...
        ...     def live(self, index):
        ...         return (index >= 0) & (index < self.count)
        ...
        ...     def generation(self, index):
        ...         return jnp.full(index.shape, self.cleared)
        ...
        ...     def draw(self, words):
        ...         return (words % jnp.maximum(self.count, 1).astype(jnp.uint32)).astype(jnp.int32)
        ...
        ...     def clear(self):
        ...         count = jnp.zeros_like(self.count)
        ...         return self.replace(count=count, cleared=self.cleared + jnp.uint32(1))
        >>> @dataclasses.dataclass(frozen=True)
        ... class First(jaxbuf.strategies.Evictor):
        ...     def init(self, capacity):
        ...         return Frozen(jnp.int32(0), jnp.uint32(0), capacity)
        >>> buffer = jaxbuf.ItemBuffer.create(jnp.int32(0), 3, evictor=First())
        >>> buffer.add(jnp.arange(2)).add(jnp.arange(2, 6)).data.tolist()
        [0, 1, 2]
    """

    @abc.abstractmethod
    def place(self, rows: int, mask: Mask | None, score: Floats | None) -> tuple[Self, Index]:
        """Chooses slots for ``rows`` new items.

        Returns:
            The new occupancy, and a slot for each row ``[B]``, which is the capacity for a row that
            is masked out, or not kept beside the others of its batch. No slot occurs twice.
        """

    def refuses(self, score: Floats) -> Mask:
        """Returns a mask of the rows that would be refused for their score even if added alone."""
        return jnp.zeros(score.shape, bool)

    def continuing(self, old: Any) -> Self:
        """Returns this empty occupancy with generations that no item of ``old`` has.

        ``jaxbuf.load(..., resize=True)`` needs it.

        Raises:
            ValueError: If it cannot tell, which is the default.
        """
        raise ValueError(f"{type(old).__name__} does not define continuing(old)")

    def demote(self, index: Index) -> Self:
        """Marks the items at ``index`` as retired: they should be overwritten first.

        By default they are not, and a full buffer may evict items while slots of retired ones stay
        unused.
        """
        del index
        return self

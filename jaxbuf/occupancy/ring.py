"""One ring: first in, first out."""

from collections.abc import Iterator
from typing import Any, Self

import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Int, UInt

from jaxbuf.core import native
from jaxbuf.core.division import quotient, remainder
from jaxbuf.core.problems import Checked, first_wrong
from jaxbuf.core.random import scale_word
from jaxbuf.core.slots import Slots
from jaxbuf.core.types import Count, Floats, Index, Mask, Word, Words
from jaxbuf.occupancy.ages import AgeRange, Bound
from jaxbuf.occupancy.protocol import ItemOccupancy


class Ring(ItemOccupancy, Checked, struct.PyTreeNode):
    """First in, first out: the next item replaces the oldest.

    Until it is full, its items are in the first slots, and afterwards in all of them. A slot's
    generation is the lap in which it was written. It follows from the write position and the number
    of laps, so that nothing is stored per slot. All counters wrap safely.

    Attributes:
        cursor: The slot that is written next, ``[]`` uint32.
        lap: The number of the present lap, ``[]`` uint32.
        held: The number of live items, ``[]`` uint32.
        capacity: Number of slots.
    """

    cursor: Word
    lap: Word
    held: Word
    capacity: int = struct.field(pytree_node=False)

    @classmethod
    def create(cls, capacity: int) -> Self:
        """Returns an empty ring of ``capacity`` slots."""
        # The laps start at 1, so that no generation that a caller sets to zero is ever live.
        return cls(cursor=jnp.uint32(0), lap=jnp.uint32(1), held=jnp.uint32(0), capacity=capacity)

    @property
    def position(self) -> Count:
        """The slot that is written next."""
        return self.cursor.astype(jnp.int32)

    @property
    def next_place(self) -> Count:
        return self.position

    @property
    def size(self) -> Count:
        """The number of live items."""
        return self.held.astype(jnp.int32)

    def place(self, rows: int, mask: Mask | None, score: Floats | None) -> tuple[Self, Index]:
        """Chooses consecutive slots; if there are more rows than slots, the last ones are kept."""
        del score
        if mask is None:
            index, ring = self._append(rows=rows)
        else:
            rank, count = jnp.cumsum(mask, dtype=jnp.uint32), jnp.sum(mask, dtype=jnp.uint32)
            index, ring = self._placed(rank - jnp.uint32(1), count)
            index = jnp.where(mask, index, self.capacity)
        return ring, index

    @native.kernel("ring_append", "capacity", in_place=3)
    def _append(self, *, rows: int) -> tuple[Index, Self]:
        return self._placed(jnp.arange(rows, dtype=jnp.uint32), jnp.uint32(rows))

    def _placed(self, rank: Words, count: Word) -> tuple[Index, Self]:
        """Returns the slots of ``count`` items by rank, and the ring that has them."""
        capacity = jnp.uint32(self.capacity)
        slot = remainder(self.cursor + rank, capacity).astype(jnp.int32)
        stays = rank + capacity >= count
        end = self.cursor + count
        ring = self.replace(
            cursor=remainder(end, capacity),
            lap=self.lap + quotient(end, capacity),
            held=jnp.minimum(self.held + count, capacity),
        )
        return jnp.where(stays, slot, self.capacity), ring

    def live(self, index: Int[Array, "..."]) -> Bool[Array, "..."]:
        """Returns whether there is an item at ``index``."""
        # Without a sign, a negative number is past the end as well.
        return jnp.asarray(index).astype(jnp.uint32) < self.held

    def generation(self, index: Int[Array, "..."]) -> UInt[Array, "..."]:
        """Returns the lap in which ``index`` was written."""
        return jnp.where(index < self.position, self.lap, self.lap - jnp.uint32(1))

    @native.kernel("ring_rows_to_change", "capacity")
    def rows_to_change(self, slots: Slots, wanted: Mask, legal: Mask) -> tuple[Index, Word]:
        """Returns the slots of rows to change, and a count of illegal ones; see ``Occupancy``."""
        return super().rows_to_change(slots, wanted, legal)

    @native.kernel("ring_slots_of", "capacity")
    def slots_of(self, index: Index, valid: Mask, *, past_end: int) -> tuple[Slots, Mask]:
        return super().slots_of(index, valid, past_end=past_end)

    def draw(self, words: Words) -> Index:
        """Returns a uniformly drawn live slot for each random word; arbitrary if none is live."""
        return scale_word(words, self.held)

    def span(self) -> tuple[Int[Array, " 1"], Int[Array, " 1"]]:
        """Returns the slot of the earliest item, and the number of items."""
        return remainder(self.position - self.size, self.capacity)[None], self.size[None]

    @property
    def keeps_order(self) -> bool:
        """True: items are in the order of their slots, from the oldest on."""
        return True

    def age_range(self, start: Bound, stop: Bound) -> AgeRange:
        return AgeRange.of(*self.span(), self.capacity, start, stop)

    def check_valid(self, name: str) -> Iterator[str]:
        position, size = np.asarray(self.cursor), np.asarray(self.held)
        yield from first_wrong(
            f"{name}.position", position, position >= self.capacity, f"less than {self.capacity}"
        )
        yield from first_wrong(
            f"{name}.size", size, size > self.capacity, f"at most the capacity, {self.capacity}"
        )

    def in_order(self) -> tuple[Int[Array, " N"], Bool[Array, " N"]]:
        slot = jnp.arange(self.capacity, dtype=jnp.int32)
        order = remainder(self.position + slot, self.capacity)
        return order, self.live(order)

    def item_ages(self) -> UInt[Array, " N"]:
        slot = jnp.arange(self.capacity, dtype=jnp.int32)
        return remainder(self.position - 1 - slot, self.capacity).astype(jnp.uint32)

    def continuing(self, old: Any) -> Self:
        return self.replace(lap=old.clear().lap)

    def clear(self) -> Self:
        """Returns an empty ring, two laps ahead so that no earlier generation is used again."""
        return self.replace(
            cursor=jnp.zeros_like(self.cursor),
            lap=self.lap + jnp.uint32(2),
            held=jnp.zeros_like(self.held),
        )


class QueueRing(Ring):
    """A ring whose oldest items are dequeued, so that any of its slots may be empty."""

    # The kernels of a ring take the first ``held`` slots to be the live ones.
    rows_to_change = ItemOccupancy.rows_to_change
    slots_of = ItemOccupancy.slots_of

    def live(self, index: Int[Array, "..."]) -> Bool[Array, "..."]:
        """Returns whether there is an item at ``index``."""
        behind = remainder(self.position - 1 - index, self.capacity)
        return (index >= 0) & (index < self.capacity) & (behind < self.size)

    def take(self, count: Word) -> Self:
        """Returns the ring without its ``count`` oldest items."""
        return self.replace(held=self.held - count)

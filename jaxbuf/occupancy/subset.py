"""A subset of the live slots, from which any slot may be removed."""

import dataclasses
from collections.abc import Iterator
from typing import Any, Self

import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Int, UInt

from jaxbuf.core.division import quotient, remainder
from jaxbuf.core.order import after
from jaxbuf.core.problems import first_wrong
from jaxbuf.core.random import scale_word
from jaxbuf.core.slots import Slots
from jaxbuf.core.types import Count, Floats, Index, Integers, Mask, Words
from jaxbuf.core.versions import vary_with
from jaxbuf.occupancy.ages import Bound, clip, ring_of
from jaxbuf.occupancy.bitset import Bitset
from jaxbuf.occupancy.protocol import ItemOccupancy, Occupancy


class Subset(ItemOccupancy, struct.PyTreeNode):
    """Some of the live slots of another occupancy: its *members*.

    To a sampler it is an occupancy like any other (see ``Occupancy``): ``size`` counts members,
    ``draw`` returns each member with the same probability, and ``live`` is False for other slots.
    Names of slots are those of the inner occupancy, so an update of an excluded slot is dropped
    like that of an overwritten one. A change of a slot costs one path of a tree; no operation
    passes over all slots.

    The owner of a subset has two duties. A slot that the inner occupancy gives up must be excluded
    in the same step. ``place`` does so for a ring of items, which fills a slot again at once; for
    slots that can be empty in between, such as those of windows, ``replace(inner=...)`` must come
    with an ``exclude``. And a sampler that draws by its own masses must give excluded slots no mass
    (``Sampler.on_change``).

    Attributes:
        inner: The occupancy that knows the slots and generations of items.
        members: The slots of the members.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxbuf.occupancy.ring import Ring
        >>> subset = Subset.create(Ring.create(4), 4)
        >>> subset, index = subset.place(3, None, None)
        >>> subset = subset.exclude(jnp.array([1]))
        >>> int(subset.size), subset.live(jnp.arange(4)).tolist()
        (2, [True, False, True, False])
        >>> subset.draw(jnp.array([0, 2**31 - 1, 2**31, 2**32 - 1], jnp.uint32)).tolist()
        [0, 0, 2, 2]
    """

    inner: Any  # An ItemOccupancy, or Rings.
    members: Bitset

    @classmethod
    def create(cls, inner: Any, slots: int) -> Self:
        """Returns a subset without members of an empty occupancy.

        Args:
            inner: An occupancy, or ``Rings``.
            slots: Number of its slots.
        """
        return cls(inner=inner, members=Bitset.create(slots))

    @property
    def size(self) -> Count:
        return self.members.size

    def mark(self, index: Index, member: Mask) -> Self:
        """Adds slots to the members or removes them.

        Args:
            index: Slots; those out of range are ignored, and the last of equal ones counts.
            member: True to add the slot, which must be live in the inner occupancy; False to
                remove it.
        """
        return self.replace(members=self.members.set(index, member))

    def include(self, index: Index) -> Self:
        """Returns the subset with the slots at ``index`` added."""
        return self.mark(index, jnp.ones(index.shape, bool))

    def exclude(self, index: Index) -> Self:
        """Returns the subset with the slots at ``index`` removed."""
        return self.mark(index, jnp.zeros(index.shape, bool))

    def place(self, rows: int, mask: Mask | None, score: Floats | None) -> tuple[Self, Index]:
        inner, index = self.inner.place(rows, mask, score)
        return self.replace(inner=inner).include(index), index

    def refuses(self, score: Floats) -> Mask:
        return self.inner.refuses(score)

    def rescore(self, index: Index, score: Floats) -> Self:
        return self.replace(inner=self.inner.rescore(index, score))

    def live(self, index: Int[Array, "..."]) -> Bool[Array, "..."]:
        return self.members.get(index)

    def holds(self, slots: Slots) -> Mask:
        same = self.inner.generation(slots.index) == slots.generation
        return same & self.members.get(slots.index)

    def generation(self, index: Int[Array, "..."]) -> UInt[Array, "..."]:
        """Returns the generation of the item at ``index``, member or not."""
        return self.inner.generation(index)

    def draw(self, words: Words) -> Index:
        """Returns a uniformly drawn member for each random word; arbitrary without members.

        A word that scales to the integer ``k`` draws the ``k``-th member.
        """
        rank = scale_word(words, self.size)
        return self.at(rank)

    def draw_where(self, wanted: Mask, words: Words, index: Index) -> Index:
        """Returns draws for the ``wanted`` rows; searches for no member if there are none."""
        draw = super().draw_where

        def search(carry: tuple[Array, Array]) -> tuple[Array, Array]:
            any_wanted, index = carry
            # Dependent on the carry, so that XLA does not search ahead of the loop.
            return ~any_wanted, draw(wanted, after(words, index), index)

        # A loop of at most one step. Unlike a cond under vmap, it runs only if a buffer needs it.
        begin = vary_with((jnp.any(wanted), index), (wanted, words, index, self))
        return lax.while_loop(lambda carry: carry[0], search, begin)[1]

    @property
    def num_slots(self) -> int:
        return self.members.capacity

    @property
    def capacity(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The old name of ``num_slots``."""
        return self.num_slots

    @property
    def places(self) -> Occupancy:
        return self.inner

    def with_places(self, places: Occupancy) -> Self:
        return self.replace(inner=places)

    def moving(self, old: Any, source: Index, target: Index) -> Self:
        return self.replace(members=self.members.set(target, old.members.get(source)))

    def in_order(self) -> tuple[Int[Array, " N"], Bool[Array, " N"]] | None:
        ordered = self.inner.in_order()
        return None if ordered is None else (ordered[0], self.live(ordered[0]))

    @property
    def keeps_order(self) -> bool:
        return self.inner.keeps_order

    def age_range(self, start: Bound, stop: Bound) -> "MemberAges":
        """Returns the members ``start`` to ``stop - 1`` of each ring of the inner occupancy.

        They are counted by age, as in a slice of a list.
        """
        first, _ = self.inner.span()
        rings, slots = first.shape[0], self.members.capacity
        bounds = np.arange(rings + 1, dtype=np.int32) * (slots // rings)
        edge, oldest = jnp.split(
            self.before(jnp.concatenate([jnp.asarray(bounds), bounds[:-1] + first])), [rings + 1]
        )
        size = jnp.diff(edge)
        low = clip(0 if start is None else start, size)
        high = size if stop is None else clip(stop, size)
        rank = oldest - edge[:-1] + low
        return MemberAges(
            subset=self,
            edge=edge[:-1],
            size=size,
            first=remainder(rank, jnp.maximum(size, 1)),
            count=jnp.maximum(high - low, 0),
        )

    def before(self, index: Index) -> Integers:
        """Returns the number of members with a smaller slot than ``index``."""
        return self.members.before(index)

    def at(self, rank: Integers) -> Index:
        """Returns members by their rank in the order of slots."""
        return self.members.at(rank)

    def check_items(self, name: str, live: Bool[Array, " N"]) -> Iterator[str]:
        slot = jnp.arange(self.num_slots, dtype=jnp.int32)
        wrong = np.asarray(live & ~self.inner.live(slot))
        yield from first_wrong(f"{name}.members", live, wrong, "False, empty slot")
        yield from self.inner.check_items(f"{name}.inner", live)

    def clear(self) -> Self:
        """Returns a subset without members of the cleared inner occupancy.

        It shares no array with the original.
        """
        return self.replace(inner=self.inner.clear(), members=self.members.clear())

    def metrics(self) -> dict[str, Array]:
        """Returns the metrics of the inner occupancy."""
        return self.inner.metrics()


@dataclasses.dataclass(frozen=True)
class MemberAges:
    """The members of each ring whose age is in a range: ``Ages`` of items with gaps in between.

    Attributes:
        subset: The subset.
        edge: Number of members in the rings before each ring, ``[E]``.
        size: Number of members in each ring, ``[E]``.
        first: Number of these before the earliest in the range, in the order of slots, ``[E]``.
        count: Number of members in the range, ``[E]``.
    """

    subset: Subset
    edge: Int[Array, " E"]
    size: Int[Array, " E"]
    first: Int[Array, " E"]
    count: Int[Array, " E"]

    @property
    def most(self) -> int:
        """Returns the most items that there can be in each ring."""
        return self.subset.num_slots // self.count.shape[0]

    @property
    def total(self) -> Count:
        """Returns the number of items."""
        return jnp.sum(self.count, dtype=jnp.int32)

    def at(self, rank: Integers) -> Index:
        """Returns the slots of items by rank; arbitrary for a rank of at least ``total``."""
        env, before = ring_of(self.count, rank)
        return self._at(env, rank, self.first - before)

    def in_ring(self, ring: Index, rank: Integers) -> Index:
        """Returns the slots of items by their ring, and their rank in it; arbitrary past it."""
        return self._at(ring, rank, self.first)

    def rank(self, index: Index) -> Integers:
        """Returns the number of members from the first in the range to these, around the ring."""
        ring = jnp.stack([self.first + self.edge, self.count, jnp.maximum(self.size, 1)], axis=-1)
        env = quotient(index, self.most)
        first, _, size = (column[:, 0] for column in jnp.split(_rows(ring, env), 3, axis=1))
        return remainder(self.subset.before(index) - first, size)

    def contains(self, index: Index) -> Mask:
        """Returns whether the items at these slots are in the range."""
        count = self.count.at[quotient(index, self.most)].get(mode="clip")
        return self.subset.live(index) & (self.rank(index) < count)

    def _at(self, env: Index, rank: Integers, shift: Int[Array, " E"]) -> Index:
        """Returns the slots of items by their ring, and their rank plus the shift of the ring."""
        ring = jnp.stack([shift, self.edge, jnp.maximum(self.size, 1)], axis=-1)
        shift, edge, size = (column[:, 0] for column in jnp.split(_rows(ring, env), 3, axis=1))
        return self.subset.at(edge + remainder(rank + shift, size))


def _rows(table: Int[Array, "E 3"], ring: Index) -> Int[Array, "B 3"]:
    return table.at[ring].get(mode="clip")

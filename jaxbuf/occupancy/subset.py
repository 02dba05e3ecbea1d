"""A set of slots out of which any may be taken, wherever they lie."""

import dataclasses
from typing import Any, Self

import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int, UInt

from jaxbuf.core.random import scale_word
from jaxbuf.core.slots import Slots
from jaxbuf.occupancy.ages import Bound, clip, ring_of
from jaxbuf.occupancy.bitset import Bitset
from jaxbuf.occupancy.protocol import ItemOccupancy


class Subset(ItemOccupancy, struct.PyTreeNode):
    """Some of the live slots of another occupancy: its *members*.

    To a sampler it is an occupancy like any other (see ``Occupancy``): ``size`` counts
    members, ``draw`` gives each of them with the same probability, ``live`` is False for the rest.
    Names of slots stay those of the inner occupancy, so an update of a slot that has been excluded
    is dropped like that of one that has been overwritten. Counting is a path of a tree for each
    slot that changes; nothing ever goes over all slots.

    Whoever owns it keeps two things true. A slot that the inner occupancy gives up is excluded in
    the same step: a ring of items overwrites a slot at once, so ``place`` sees to it; where slots
    can be empty in between, as those of windows, ``replace(inner=...)`` comes with an ``exclude``.
    And a sampler with masses of its own has to be told as well, for it draws by them: give excluded
    slots no mass (``Sampler.remove``).

    Attributes:
        inner: The occupancy that knows where items lie, and their generations.
        members: Their slots.

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

    inner: Any
    members: Bitset

    @classmethod
    def create(cls, inner: Any, slots: int) -> Self:
        """Nothing of an occupancy that is empty.

        Args:
            inner: An occupancy, or ``Rings``.
            slots: How many slots it has.
        """
        return cls(inner=inner, members=Bitset.create(slots))

    @property
    def size(self) -> Int[Array, ""]:
        """Members."""
        return self.members.size

    def mark(self, index: Int[Array, " B"], member: Bool[Array, " B"]) -> Self:
        """Say of slots whether they are members.

        Args:
            index: Which slots; those out of range are ignored, and the last of equal ones counts.
            member: What they are from now on. Only live slots of the inner occupancy may be
                members.
        """
        return self.replace(members=self.members.set(index, member))

    def include(self, index: Int[Array, " B"]) -> Self:
        """The same, with the slots at ``index``."""
        return self.mark(index, jnp.ones(index.shape, bool))

    def exclude(self, index: Int[Array, " B"]) -> Self:
        """The same, without the slots at ``index``."""
        return self.mark(index, jnp.zeros(index.shape, bool))

    def place(
        self, rows: int, mask: Bool[Array, " B"] | None, score: Float[Array, " B"] | None
    ) -> tuple[Self, Int[Array, " B"]]:
        """Slots of the inner occupancy for new items, which become members."""
        inner, index = self.inner.place(rows, mask, score)
        return self.replace(inner=inner).include(index), index

    def refuses(self, score: Float[Array, " B"]) -> Bool[Array, " B"]:
        """Which rows the inner occupancy would not keep."""
        return self.inner.refuses(score)

    def live(self, index: Int[Array, " B"]) -> Bool[Array, " B"]:
        """Whether there is a member at ``index``."""
        return self.members.get(index)

    def holds(self, slots: Slots) -> Bool[Array, " B"]:
        """Whether the items that these names mean are still there, as members."""
        return self.inner.holds(slots) & self.members.get(slots.index)

    def generation(self, index: Int[Array, " B"]) -> UInt[Array, " B"]:
        """The generation of what is at ``index``, member or not."""
        return self.inner.generation(index)

    def draw(self, words: UInt[Array, " B"]) -> Int[Array, " B"]:
        """A member for each random word, all equally likely; arbitrary if there is none.

        It is the ``k``-th member for the number ``k`` that the word scales to.
        """
        rank = scale_word(words, self.size.astype(jnp.uint32))
        return self.at(rank.astype(jnp.int32))

    @property
    def capacity(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Number of slots."""
        return self.members.capacity

    @property
    def keeps_order(self) -> bool:
        """Whether the inner occupancy does."""
        return self.inner.keeps_order

    def age_range(self, start: Bound, stop: Bound) -> "MemberAges":
        """The members ``start`` to ``stop - 1`` of each ring of the inner occupancy, by age.

        Counted like a slice of a list of them.
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
            first=rank % jnp.maximum(size, 1),
            count=jnp.maximum(high - low, 0),
        )

    def before(self, index: Int[Array, " B"]) -> Int[Array, " B"]:
        """How many members have a smaller slot than ``index``."""
        return self.members.before(index)

    def at(self, rank: Int[Array, " B"]) -> Int[Array, " B"]:
        """The members of these ranks in the order of their slots."""
        return self.members.at(rank)

    def clear(self) -> Self:
        """Nothing of the cleared inner occupancy. Shares no array with the original."""
        return self.replace(inner=self.inner.clear(), members=self.members.clear())

    def metrics(self) -> dict[str, Array]:
        """Those of the inner occupancy."""
        return self.inner.metrics()


@dataclasses.dataclass(frozen=True)
class MemberAges:
    """Members of every ring whose age lies in a range: ``Ages`` where there are holes.

    Attributes:
        subset: Whose members.
        edge: How many members lie in the rings before, ``[E]``.
        size: How many lie in each ring, ``[E]``.
        first: How many of those lie before the earliest in the range, in the order of slots.
        count: How many are in the range, ``[E]``.
    """

    subset: Subset
    edge: Int[Array, " E"]
    size: Int[Array, " E"]
    first: Int[Array, " E"]
    count: Int[Array, " E"]

    @property
    def most(self) -> int:
        """How many there can be in each ring."""
        return self.subset.capacity // self.count.shape[0]

    @property
    def total(self) -> Int[Array, ""]:
        """How many items there are."""
        return jnp.sum(self.count, dtype=jnp.int32)

    def at(self, rank: Int[Array, " B"]) -> Int[Array, " B"]:
        """The slots of the items with these ranks; arbitrary for ranks from ``total`` on."""
        env, before = ring_of(self.count, rank)
        ring = jnp.stack([self.first - before, self.edge, jnp.maximum(self.size, 1)], axis=-1)
        shift, edge, size = (column[:, 0] for column in jnp.split(_rows(ring, env), 3, axis=1))
        return self.subset.at(edge + (rank + shift) % size)

    def contains(self, index: Int[Array, " B"]) -> Bool[Array, " B"]:
        """Whether the items at these slots are among them."""
        ring = jnp.stack([self.first + self.edge, self.count, jnp.maximum(self.size, 1)], axis=-1)
        first, count, size = (
            column[:, 0] for column in jnp.split(_rows(ring, index // self.most), 3, axis=1)
        )
        return self.subset.live(index) & ((self.subset.before(index) - first) % size < count)


def _rows(table: Int[Array, "E 3"], ring: Int[Array, " B"]) -> Int[Array, "B 3"]:
    return table.at[ring].get(mode="clip")

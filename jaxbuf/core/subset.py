"""A set of slots out of which any may be taken, wherever they lie."""

from typing import Any, Self

import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt

from jaxbuf.core import rowwise
from jaxbuf.core.segment_tree import SegmentTree
from jaxbuf.core.slots import Ring, Slots, scale_word
from jaxbuf.core.tree_kernels import FANOUT, choose

# The level of the tree whose nodes stand for 2**24 slots: as far as a float32 counts.
_EXACT_LEVEL = 24 // (FANOUT.bit_length() - 1)


class Subset(struct.PyTreeNode):
    """Some of the live slots of another occupancy: its *members*.

    To a sampler it is an occupancy like any other (see ``core.slots.Occupancy``): ``size`` counts
    members, ``draw`` gives each of them with the same probability, ``live`` is False for the rest.
    Names of slots stay those of the inner occupancy, so an update of a slot that has been excluded
    is dropped like that of one that has been overwritten. Counting is a path of a tree for each
    slot that changes; nothing ever goes over all slots.

    Whoever owns it keeps two things true. A slot that the inner occupancy gives up is excluded in
    the same step: a ring of items overwrites a slot at once, so ``place`` sees to it; where slots
    can be empty in between, as those of windows, ``replace(inner=...)`` comes with an ``exclude``.
    And a sampler with masses of its own has to be told as well, for it draws by them: give excluded
    slots no mass (``Sampler.updated`` with a priority of zero, or ``slid`` with ``broken``).

    Attributes:
        inner: The occupancy that knows where items lie, and their generations.
        members: A one for each member, a zero for each other slot.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxbuf.core.slots import Ring
        >>> subset = Subset.create(Ring.create(4), 4)
        >>> subset, index = subset.place(3, None, None)
        >>> subset = subset.exclude(jnp.array([1]))
        >>> int(subset.size), subset.live(jnp.arange(4)).tolist()
        (2, [True, False, True, False])
        >>> subset.draw(jnp.array([0, 2**31 - 1, 2**31, 2**32 - 1], jnp.uint32)).tolist()
        [0, 0, 2, 2]
    """

    inner: Any
    members: SegmentTree

    @classmethod
    def create(cls, inner: Any, slots: int) -> Self:
        """Nothing of an occupancy that is empty.

        Args:
            inner: An occupancy, or ``Rings``.
            slots: How many slots it has.
        """
        return cls(inner=inner, members=SegmentTree.create(slots))

    @property
    def size(self) -> Int[Array, ""]:
        """Members."""
        return self.members.nnz

    def mark(self, index: Int[Array, " B"], member: Bool[Array, " B"]) -> Self:
        """Say of slots whether they are members.

        Args:
            index: Which slots; those out of range are ignored, and the last of equal ones counts.
            member: What they are from now on. Only live slots of the inner occupancy may be
                members.
        """
        return self.replace(members=self.members.set(index, member.astype(jnp.float32)))

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
        placed = self.replace(inner=inner)
        if not isinstance(self.inner, Ring) or rows > self.inner.capacity:
            return placed.include(index), index
        # The slots that a ring gives follow each other, which spares most of their paths.
        count = jnp.int32(rows) if mask is None else jnp.sum(mask, dtype=jnp.int32)
        row = jnp.arange(rows, dtype=jnp.int32)
        written = rowwise.each(_next, row, (self.inner.position, count), (self.inner.capacity,))
        ones = jnp.ones((rows,), jnp.float32)
        return placed.replace(members=self.members.set(written, ones, contiguous=True)), index

    def refuses(self, score: Float[Array, " B"]) -> Bool[Array, " B"]:
        """Which rows the inner occupancy would not keep."""
        return self.inner.refuses(score)

    def live(self, index: Int[Array, " B"]) -> Bool[Array, " B"]:
        """Whether there is a member at ``index``."""
        return self.inner.live(index) & (self.members.get(index) > 0)

    def holds(self, slots: Slots) -> Bool[Array, " B"]:
        """Whether the items that these names mean are still there, as members."""
        return self.inner.holds(slots) & (self.members.get(slots.index) > 0)

    def generation(self, index: Int[Array, " B"]) -> UInt[Array, " B"]:
        """The generation of what is at ``index``, member or not."""
        return self.inner.generation(index)

    def draw(self, words: UInt[Array, " B"]) -> Int[Array, " B"]:
        """A member for each random word, all equally likely; arbitrary if there is none.

        It is the ``k``-th member for the number ``k`` that the word scales to.
        """
        if not isinstance(self.inner, Ring):
            return self._member(words)
        # Without holes these are the members, without a look at the tree.
        whole = self.size == self.inner.size
        found = self.inner.draw(words)

        def look(carry: tuple[Array, Array]) -> tuple[Array, Array]:
            return jnp.ones_like(carry[0]), self._member(words)

        # Runs once or not at all; a conditional would do both under ``vmap``.
        return lax.while_loop(lambda carry: ~carry[0], look, (whole, found))[1]

    def clear(self) -> Self:
        """Nothing of the cleared inner occupancy. Shares no array with the original."""
        return self.replace(inner=self.inner.clear(), members=self.members.clear())

    def metrics(self) -> dict[str, Array]:
        """Those of the inner occupancy."""
        return self.inner.metrics()

    def _member(self, words: UInt[Array, " B"]) -> Int[Array, " B"]:
        """The members in the order of their slots to which these words scale."""
        rank = scale_word(words, self.size.astype(jnp.uint32))
        if self.members.layout.depth <= _EXACT_LEVEL:
            return self.members.query(rank.astype(jnp.float32))
        return self._find(rank.astype(jnp.int32))

    def _find(self, rank: Int[Array, " B"]) -> Int[Array, " B"]:
        """The member of this rank, in a tree too large for a float32 to tell all ranks apart."""
        layout = self.members.layout
        top = layout.offset("sum", _EXACT_LEVEL)
        counts = self.members.nodes[top : top + layout.counts[_EXACT_LEVEL]].astype(jnp.int32)
        until = jnp.cumsum(counts, dtype=jnp.int32)
        node = jnp.searchsorted(until, rank, side="right", method="compare_all").astype(jnp.int32)
        before = (until - counts).at[node].get(mode="clip")
        levels = range(_EXACT_LEVEL - 1, -1, -1)
        starts = jnp.asarray([layout.offset("sum", level) for level in levels], jnp.int32)
        lane = jnp.arange(FANOUT, dtype=jnp.int32)[:, None]

        def descend(level: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            node, residual = carry
            at = starts[level] + node[None] * FANOUT + lane
            child, residual = choose(list(self.members.nodes.at[at].get(mode="clip")), residual)
            return node * FANOUT + child, residual

        carry = (node, (rank - before).astype(jnp.float32))
        return lax.fori_loop(0, _EXACT_LEVEL, descend, carry)[0]


def _next(
    row: Int[Array, " B"], ring: tuple[Int[Array, ""], Int[Array, ""]], capacity: int
) -> Int[Array, " B"]:
    """The slot of a row, of which the first ``count`` are written from ``position`` on."""
    position, count = ring
    return jnp.where(row < count, (position + row) % capacity, capacity)

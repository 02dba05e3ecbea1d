"""Draws by mass: each item has a mass, and is drawn with a probability proportional to it.

A ``SegmentTree`` holds the masses and their sums. A draw is a random point in the total mass. It
selects the shard, and the item of this shard, in whose interval it lies.
"""

import abc
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxbuf.core import native
from jaxbuf.core.random import random_words, scale_word
from jaxbuf.core.segment_tree import SegmentTree
from jaxbuf.core.types import Arrays, Count, Floats, Index, Key, Mask, Number, State, Words
from jaxbuf.occupancy.protocol import Occupancy
from jaxbuf.strategies.distinct import distinct
from jaxbuf.strategies.protocols import Draw, KnownSampler


class ByMass(KnownSampler):
    """A sampler that keeps, or computes, a mass for each slot.

    Attributes:
        stratified: Whether to draw one row from each of ``batch_size`` equal parts of the total
            mass; ignored without replacement.
        replacement: Whether a batch may hold an item twice.
    """

    stratified: bool
    replacement: bool

    @abc.abstractmethod
    def masses(self, state: State, occupancy: Occupancy) -> SegmentTree:
        """Returns the mass of each slot and their sums; 0 for slots that are not drawn."""

    def draw(self, state: State, key: Key, batch_size: int, occupancy: Occupancy) -> Draw:
        """Draws ``batch_size`` of the live items."""
        return self.draw_some(state, key, batch_size, None, occupancy)

    def draw_some(
        self, state: State, key: Key, batch_size: int, count: Count | None, occupancy: Occupancy
    ) -> Draw:
        masses = self.masses(state, occupancy)
        total = masses.root("sum")
        if self.replacement:
            index, mass = _draw(key, batch_size, masses, stratified=self.stratified, count=count)
            valid = jnp.broadcast_to(total > 0, index.shape)
        else:
            most = jnp.minimum(batch_size, masses.nnz)
            index, valid = draw_distinct(key, batch_size, most, masses)
            index, mass = masses.read(index)
        return Draw(index, over(mass, total), valid)

    @property
    def sequential(self) -> bool:
        """True unless each row is drawn from a stratum of its own."""
        return not (self.stratified and self.replacement)


def set_masses(
    masses: SegmentTree, added: Index, mass: Floats, removed: Int[Array, " R"]
) -> SegmentTree:
    """Returns the tree with the masses of new items, and zero for removed ones, at once.

    No slot is among the added ones twice, as ``Sampler.on_change`` says.
    """
    if removed.shape[0] == 0:
        return masses.set(added, mass, unique=True)
    zeros = jnp.zeros(removed.shape, jnp.float32)
    return masses.set(jnp.concatenate([added, removed]), jnp.concatenate([mass, zeros]))


def remove_masses(masses: SegmentTree, index: Index) -> SegmentTree:
    """Returns the tree with zero mass at ``index``."""
    return masses.set(index, jnp.zeros(index.shape, jnp.float32))


def draw_by_mass(
    key: Key,
    rows: int,
    masses: SegmentTree,
    *,
    stratified: bool = False,
) -> Index:
    """Draws items with replacement, in proportion to their masses; some mass must be positive.

    Args:
        key: A PRNG key.
        rows: The number of items ``B``; static.
        masses: A tree with sums.
        stratified: Whether to draw one item from each of ``B`` equal parts of the total; static.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> tree = SegmentTree.create(3).set(jnp.arange(3), jnp.array([2.0, 0.0, 6.0]))
        >>> draw_by_mass(jax.random.key(0), 8, tree, stratified=True).tolist()
        [0, 0, 2, 2, 2, 2, 2, 2]
    """
    return _draw(key, rows, masses, stratified=stratified)[0]


def _draw(
    key: Key, rows: int, masses: SegmentTree, *, stratified: bool, count: Count | None = None
) -> tuple[Index, Floats]:
    """Returns items as ``draw_by_mass`` does, and their masses; ``count`` is as for ``points``."""
    word, low = random_words(key, (2, rows))
    return masses.find(*points(word, low, masses.root("sum"), stratified=stratified, count=count))


def draw_distinct(
    key: Key,
    rows: int,
    count: Count,
    masses: SegmentTree,
    propose: Callable[..., Int[Array, " P"]] = draw_by_mass,
    *context: Arrays,
) -> tuple[Index, Mask]:
    """Draws different items, each in proportion to the masses of the items that are left.

    Args:
        key: A PRNG key.
        rows: The number of rows ``B``; static.
        count: The number of items to draw, at most ``B``, and at most the number of items that
            ``propose`` can draw.
        masses: A tree with sums.
        propose: Takes a key, a number of rows, a tree and the context, and draws items with
            replacement from the tree, in which items drawn before may have no mass any more.
        *context: What else ``propose`` needs; it must not use other arrays.

    Returns:
        The items in the order in which they were drawn, ``[B]``, and a mask of the rows that hold
        one, which are the first ``count``.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> tree = SegmentTree.create(3).set(jnp.arange(3), jnp.array([2.0, 0.0, 6.0]))
        >>> index, valid = draw_distinct(jax.random.key(0), 3, tree.nnz, tree)
        >>> sorted(index[valid].tolist()), valid.tolist()
        ([0, 2], [True, True, False])
    """
    return distinct(key, rows, count, masses, propose, remove_masses, masses.capacity, *context)


def points(
    word: Words, low: Words | None, total: Number, *, stratified: bool, count: Count | None = None
) -> tuple[Floats, Floats]:
    """Returns random points in ``[0, total)``, and an offset to refine each of them.

    Points lie on a grid: the numerator of a point, its stratum followed by random bits, has the 24
    bits that a float32 holds exactly. The remaining bits of the word (or those of ``low``) become
    the offset within a grid cell, which ``SegmentTree.find`` adds halfway down the tree. Draws can
    therefore distinguish more slots than a float32 has values.

    Args:
        word: A random word for each row.
        low: Further words, or None.
        total: The total mass.
        stratified: Whether there is one point in each of ``B`` equal parts; static.
        count: The number of equal parts, if only so many rows count; may be traced.
    """
    if stratified and count is not None:
        return _some_points(word, low, total, count)
    strata = word.shape[0] if stratified else 1
    bits = max(24 - (strata - 1).bit_length(), 1)
    if low is None:
        return _points(word, word, total, bits=bits, strata=strata, shift=bits)
    return _points(word, low, total, bits=bits, strata=strata, shift=0)


@native.kernel("points")
def _points(
    word: Words, low: Words, total: Number, *, bits: int, strata: int, shift: int
) -> tuple[Floats, Floats]:
    """Returns points made of the highest ``bits``; offsets of ``low`` without its top ``shift``."""
    high = word >> jnp.uint32(32 - bits)
    if strata > 1:
        high = high | (jnp.arange(strata, dtype=jnp.uint32) << jnp.uint32(bits))
    return _on_grid(high, low << jnp.uint32(shift), jnp.float32(1.0 / (strata * 2**bits)), total)


def _some_points(
    word: Words, low: Words | None, total: Number, count: Count
) -> tuple[Floats, Floats]:
    """Returns what ``_points`` does for as many strata as rows count."""
    strata = jnp.maximum(count, 1).astype(jnp.uint32)
    # 24 less the bits of a stratum.
    bits = jnp.maximum(lax.clz(strata - jnp.uint32(1)).astype(jnp.int32) - 8, 1).astype(jnp.uint32)
    stratum = jnp.arange(word.shape[0], dtype=jnp.uint32)
    high = word >> (jnp.uint32(32) - bits) | stratum << bits
    cell = 1.0 / (strata << bits).astype(jnp.float32)
    return _on_grid(high, word << bits if low is None else low, cell, total)


def _on_grid(high: Words, low: Words, cell: Number, total: Number) -> tuple[Floats, Floats]:
    """Returns points in cells of a grid, and offsets in them."""
    below = jnp.float32(1.0 - 2.0**-24)
    fraction = (low >> jnp.uint32(8)).astype(jnp.float32) * jnp.float32(2.0**-24)
    # The minimum keeps points below the total. It also keeps XLA from scaling the total by the size
    # of a cell first, which would underflow if all masses are tiny.
    return (
        jnp.minimum(high.astype(jnp.float32) * cell, below) * total,
        jnp.minimum(fraction * cell, below) * total,
    )


def ends(total: Float[Array, " S"]) -> Float[Array, " S"]:
    """Returns the end of each shard's interval in the total mass; the last one is the total.

    Sums of floating-point numbers may decrease where a backend adds them in another order; their
    running maximum leaves the interval of a shard without mass empty.
    """
    if total.shape[0] == 1:
        return total
    return lax.cummax(jnp.where(total > 0, jnp.cumsum(total, axis=0), 0.0), axis=0)


def interval_of(
    end: Float[Array, " S"] | Int[Array, " S"], point: Floats | Index
) -> tuple[Index, Floats | Index]:
    """Returns the interval, such as that of a shard, of each point, and the offset in it.

    A point at the total or beyond, as a result of rounding, lies in the last interval that is not
    empty.
    """
    if end.shape[0] == 1:
        return jnp.zeros(point.shape, jnp.int32), point
    index = jnp.searchsorted(end, point, side="right", method="scan_unrolled").astype(jnp.int32)
    last = jnp.sum(end < end[-1], dtype=jnp.int32)
    index = jnp.minimum(index, last)
    begin = jnp.concatenate([jnp.zeros_like(end[:1]), end[:-1]])
    return index, point - begin[index]


def draw_shards(size: Int[Array, " S"], key: Key, batch_size: int) -> Index:
    """Draws a shard for each row, with probabilities proportional to their sizes."""
    if size.shape[0] == 1:
        return jnp.zeros((batch_size,), jnp.int32)
    end = jnp.cumsum(size, dtype=jnp.int32)
    # The words of the key itself choose the item.
    word = random_words(jax.random.fold_in(key, 1), (batch_size,))
    return interval_of(end, scale_word(word, end[-1]))[0]


def is_priority(value: Float[Array, "..."]) -> Bool[Array, "..."]:
    """Returns a mask of the numbers that are finite and not negative."""
    # Compares bits, since XLA may take the smallest (subnormal) numbers for zeros.
    bits = lax.bitcast_convert_type(value, jnp.uint32)
    infinite, minus_zero = jnp.uint32(0x7F800000), jnp.uint32(1 << 31)
    return (bits < infinite) | (bits == minus_zero)


def least_positive(value: Float[Array, " S"]) -> Number:
    """Returns the smallest positive value; 0 if no value is positive."""
    least = jnp.min(jnp.where(value > 0, value, jnp.inf), axis=0)
    return jnp.where(least < jnp.inf, least, 0.0)


def over(mass: Float[Array, "..."] | float, total: Number) -> Float[Array, "..."]:
    """Returns ``mass / total``; the mass itself if there is no total."""
    return mass / jnp.where(total > 0, total, 1.0)


def effective_size(probability: Float[Array, " N"]) -> Number:
    """Returns the number of equally likely items with the same diversity; 0 if there are no items.

    It is the inverse of the sum of squared probabilities.
    """
    squares = jnp.sum(probability * probability)
    return jnp.where(squares > 0, over(1.0, squares), 0.0)

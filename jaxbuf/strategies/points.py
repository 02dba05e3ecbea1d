"""Points in slots, and a search for the points that lie near them.

The search only compares distances with a threshold, so most distances are never computed in full:
a sum of nonnegative terms never decreases, even in floating point, so once all sums of a point
exceed the threshold, its remaining coordinates do not matter. Terms are computed from differences,
never as ``|x|² - 2xy + |y|²``, so that the distance between equal points is exactly 0.
"""

import abc
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import NamedTuple, Self

import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Shaped

from jaxbuf.core.division import quotient, remainder
from jaxbuf.core.types import Count, Dtype, Floats, Index, Mask
from jaxbuf.core.versions import vary_with

# The pairs of a tile, _ROWS * _COLUMNS, fit a core's cache; coordinates come in groups of _STRIDE.
_ROWS = 128
_COLUMNS = 512
_STRIDE = 8
_LARGEST = float(np.finfo(np.float32).max)
# The most numbers that an int32 tells apart.
_MOST = 2**31


@dataclasses.dataclass(frozen=True)
class Ball:
    """The points within ``radius`` in ``p``-norm, including the boundary.

    The sums are compared, not their roots. If ``p`` is 0, 1, 2 or infinity, the result is the same
    as for the distance rounded to float32. For any other ``p`` the sum of powers may be off by a
    few units in the last place, which is a relative error of the radius of about
    ``1e-6 * (1 + 4 / p)``.

    Attributes:
        radius: 0, or from 2**-40 to 2**40.
        p: From 0 to infinity. Infinity means the largest difference of a coordinate, and 0 the
            number of coordinates that differ.
        words: 0 if coordinates are float32 numbers. Else each is this number of consecutive uint32
            words, of which it only matters whether they are equal.
    """

    radius: float
    p: float
    words: int = 0

    @property
    def limit(self) -> float:
        """The largest accumulated sum within the ball."""
        radius = np.float32(self.radius)
        if self._p in (0, 1) or math.isinf(self._p):
            return float(radius)
        return _largest_square(radius) if self._p == 2 else 1.0 + (self._p + 4.0) * 2.0**-22

    def accumulate(self, total: Array, tile: Array, block: Array) -> Array:
        """Returns the sums ``[R, L]`` with the differences in more coordinates added.

        Args:
            total: The sums so far, ``[R, L]``.
            tile: One coordinate of the points of a tile, ``[R]``; for words ``[words, R]``.
            block: The same of a block, ``[L]``; for words ``[words, L]``.
        """
        if self.words:
            size = jnp.any(tile[:, :, None] != block[:, None], axis=0).astype(jnp.float32)
        else:
            size = jnp.abs(tile[:, None] - block[None])
        if math.isinf(self._p):
            return jnp.maximum(total, size)
        if self._p == 0:
            return total + (size > 0).astype(jnp.float32)
        if self._p == 1:
            return total + size
        if self._p == 2:
            return total + size * size
        # Powers of numbers near 1 stay within the range of float32.
        return total + jnp.power(size * jnp.float32(1.0 / self.radius), jnp.float32(self._p))

    @property
    def _p(self) -> float:
        # All norms are zero at the same points, and a maximum does not underflow.
        return math.inf if self.radius == 0 else self.p


# A function that reads a group of coordinates of a block.
ReadGroup = Callable[[Count], Shaped[Array, "S L"]]
# A function from row numbers ``[R, 1]`` and slots ``[1, L]`` to a mask of the pairs to compare.
PairMask = Callable[[Int[Array, "R 1"], Int[Array, "1 L"]], Bool[Array, "..."]]


class PointSet(abc.ABC):
    """Points in slots that are compared with other points, one block at a time.

    Working memory is bounded by the size of a tile, whatever the number of points and slots.

    Attributes:
        capacity: The number of slots.
    """

    capacity: int

    @abc.abstractmethod
    def open(self, block: Count) -> tuple[Count, ReadGroup]:
        """Returns a block's first slot and its points; slots past the capacity are padding."""

    def near(self, points: "Points", count: Count, ball: Ball, usable: PairMask) -> Mask:
        """Returns a mask of the points that have one of these within the ball around them.

        Args:
            points: ``B`` points with the same number of coordinates.
            count: Only the first ``count`` points are compared; the result is False for the others.
            ball: The norm and radius.
            usable: Returns a mask of the pairs to compare, ``[R, L]`` or ``[1, L]``.
        """
        return self.nearest(points, ball, usable, count) <= jnp.float32(ball.limit)

    def nearest(
        self, points: "Points", ball: Ball, usable: PairMask, count: Count | None = None
    ) -> Floats:
        """Returns the sum that ``ball`` accumulates for each point and its nearest neighbor here.

        Args:
            points: ``B`` points with the same number of coordinates.
            ball: The norm and radius. Sums are exact up to its limit; larger ones are only known to
                exceed it.
            usable: As for ``near``; the sum is infinite if a point has no usable slot.
            count: Only the first ``count`` points are compared, and the sum is infinite for the
                others. None compares all points.
        """
        total, height, columns = points.capacity, points.height, _columns(self.capacity)
        blocks = math.ceil(self.capacity / columns)
        lane = jnp.arange(columns, dtype=jnp.int32)[None]  # [1, L]
        row = jnp.arange(height, dtype=jnp.int32)[:, None]  # [R, 1]
        number = jnp.int32(total) if count is None else count  # []

        def read_pair(k: Array) -> tuple[Array, Array, ReadGroup, Array]:
            """Returns a tile's first row and points, a block's points, and the pairs to compare."""
            # A loop with static bounds has a 64-bit index if x64 mode is on.
            k = jnp.asarray(k, jnp.int32)  # []
            tile_index, block = quotient(k, blocks), remainder(k, blocks)  # []
            slot, read_group = self.open(block)
            slot = slot + lane  # [1, L]
            compared = usable(tile_index * height + row, slot) & (slot < self.capacity)
            return tile_index * height, points.tile(tile_index), read_group, compared

        # One step compares one tile of points with one block of slots.
        def step(k: Array, least: Float[Array, " P"]) -> Float[Array, " P"]:
            start, tile, read_group, compared = read_pair(k)
            before = lax.dynamic_slice(least, (start,), (height,))  # [R]
            nearest = jnp.minimum(before, pairwise(tile, read_group, compared, ball).least)  # [R]
            return lax.dynamic_update_slice(least, nearest, (start,))

        # The first pair tells over which devices of a mesh the result varies.
        _, tile, read_group, compared = read_pair(jnp.int32(0))
        begin = jnp.full((points.num_tiles * height,), jnp.inf, jnp.float32)  # [P]
        begin = vary_with(begin, tile, read_group(jnp.int32(0)), compared, number)  # [P]
        least = lax.fori_loop(0, -(-number // height) * blocks, step, begin)[:total]  # [B]
        return jnp.where(jnp.arange(total, dtype=jnp.int32) < number, least, jnp.inf)


class Points(PointSet, struct.PyTreeNode):
    """A point of ``width`` coordinates, float32 or uint32, in each of ``capacity`` slots.

    Attributes:
        blocks: The coordinates, ``[C, G, 8, L]``: ``C`` blocks of ``L`` slots and ``G`` groups of 8
            coordinates. Each coordinate of a block is contiguous.
        capacity: The number of slots.
    """

    blocks: Shaped[Array, "C G S L"]
    capacity: int = struct.field(pytree_node=False)

    @classmethod
    def create(cls, capacity: int, width: int, dtype: Dtype = jnp.float32) -> Self:
        """Creates points that are all at the origin."""
        columns = _columns(capacity)
        shape = (math.ceil(capacity / columns), math.ceil(width / _STRIDE), _STRIDE, columns)
        return cls(blocks=jnp.zeros(shape, dtype), capacity=capacity)

    @classmethod
    def of(cls, points: Shaped[Array, "B D"]) -> Self:
        """Creates points from rows of coordinates."""
        empty = cls.create(points.shape[0], points.shape[1], points.dtype)
        blocks, groups, stride, columns = empty.blocks.shape
        padding = (blocks * columns - points.shape[0], groups * stride - points.shape[1])
        padded = jnp.pad(points, ((0, padding[0]), (0, padding[1])))
        split = padded.reshape(blocks, columns, groups, stride)
        return empty.replace(blocks=jnp.transpose(split, (0, 2, 3, 1)))

    def set(self, index: Index, points: Shaped[Array, "B D"]) -> Self:
        """Writes points to slots, which must differ; rows past the end are dropped."""
        blocks, groups, stride, columns = self.blocks.shape
        width = groups * stride
        rows = jnp.pad(points, ((0, 0), (0, width - points.shape[1])))  # [B, P]
        # The last block has padding, so slots past the end get a block that does not exist.
        block = jnp.where(index < self.capacity, quotient(index, columns), blocks)  # [B]
        column = remainder(index, columns)[:, None]  # [B, 1]
        line = block[:, None] * width + jnp.arange(width, dtype=jnp.int32)[None]  # [B, P]
        # Each number has its index: XLA may transpose an array of which it writes whole slices. It
        # is a single one if that is no larger than an int32.
        small = (blocks + 1) * width * columns <= _MOST
        shape, at = ((-1,), line * columns + column) if small else ((-1, columns), (line, column))
        changed = self.blocks.reshape(shape).at[at].set(rows, mode="drop", unique_indices=True)
        return self.replace(blocks=changed.reshape(self.blocks.shape))

    def get(self, index: Index) -> Shaped[Array, "B P"]:
        """Returns the points in these slots, padded to whole groups of coordinates."""
        rows = jnp.transpose(self.blocks, (0, 3, 1, 2))
        return rows.reshape(-1, math.prod(rows.shape[2:]))[index]

    @property
    def height(self) -> int:
        """The number of points in a tile."""
        return min(self.blocks.shape[-1], _ROWS)

    @property
    def num_tiles(self) -> int:
        """The number of tiles."""
        return math.ceil(self.capacity / self.height)

    def tile(self, k: Count) -> Shaped[Array, "G S R"]:
        """Returns the points of one tile, for ``pairwise``."""
        _, groups, stride, columns = self.blocks.shape
        first = k * self.height
        begin = (quotient(first, columns), jnp.int32(0), jnp.int32(0), remainder(first, columns))
        return lax.dynamic_slice(self.blocks, begin, (1, groups, stride, self.height))[0]

    def open(self, block: Count) -> tuple[Count, ReadGroup]:
        _, _, stride, columns = self.blocks.shape

        def read_group(group: Array) -> Array:
            begin = (block, group, jnp.int32(0), jnp.int32(0))
            return lax.dynamic_slice(self.blocks, begin, (1, 1, stride, columns))[0, 0]

        return block * columns, read_group


@dataclasses.dataclass(frozen=True)
class ComputedPoints(PointSet):
    """Points that are computed from the contents of the slots, one block at a time.

    Attributes:
        capacity: The number of slots.
        rows: A function of a first slot and a number of slots that returns the points of these
            slots, ``[number, D]``.
    """

    capacity: int
    rows: Callable[[Count, int], Shaped[Array, "B D"]]

    def open(self, block: Count) -> tuple[Count, ReadGroup]:
        number = min(_columns(self.capacity), self.capacity)
        # The last block overlaps the one before it.
        first = jnp.minimum(block * number, self.capacity - number)
        block_points = Points.of(self.rows(first, number)).blocks[0]
        return first, functools.partial(lax.dynamic_index_in_dim, block_points, keepdims=False)


class Sums(NamedTuple):
    """The sums accumulated so far for the pairs of a tile and a block.

    Attributes:
        groups: The number of groups of coordinates that they include.
        sums: The sum of each pair.
        least: The smallest sum of each row.
    """

    groups: Count
    sums: Float[Array, "R L"]
    least: Float[Array, " R"]


def pairwise(
    tile: Shaped[Array, "G S R"], read_group: ReadGroup, mask: Bool[Array, "..."], ball: Ball
) -> Sums:
    """Returns the sums that ``ball`` accumulates for each pair; infinite for pairs that are masked.

    It stops once no pair can be in the ball. The sums are then incomplete, but exceed the limit.

    Args:
        tile: The points of a tile.
        read_group: Reads a group of coordinates of a block.
        mask: The pairs to compare, ``[R, L]`` or ``[1, L]``.
        ball: The norm and limit.
    """
    groups, _, height = tile.shape
    limit = jnp.float32(ball.limit)  # []

    def operands(group: Array) -> tuple[Array, Array]:
        group = jnp.minimum(group, groups - 1)  # []
        return lax.dynamic_index_in_dim(tile, group, keepdims=False), read_group(group)

    def unfinished(carry: tuple[Sums, Array, Array]) -> Array:
        done, *_ = carry
        return (done.groups < groups) & jnp.any(done.least <= limit)

    # The carry holds the next coordinates, so that they are sliced once per step. Otherwise XLA
    # fuses the slice into the arithmetic and repeats it for every pair.
    def add_group(carry: tuple[Sums, Array, Array]) -> tuple[Sums, Array, Array]:
        (done, sums, _), rows, columns = carry
        for k in range(0, _STRIDE, max(ball.words, 1)):
            coordinate = slice(k, k + ball.words) if ball.words else k
            sums = ball.accumulate(sums, rows[coordinate], columns[coordinate])  # [R, L]
        return Sums(done + 1, sums, jnp.min(sums, axis=1)), *operands(done + 1)

    sums = jnp.where(mask, jnp.float32(0), jnp.float32(jnp.inf))  # [R, L] or [1, L]
    sums = jnp.broadcast_to(sums, (height, mask.shape[-1]))  # [R, L]
    begin = Sums(jnp.int32(0), sums, jnp.zeros((height,), jnp.float32))
    group = operands(begin.groups)  # [S, R], [S, L]
    return lax.while_loop(unfinished, add_group, vary_with((begin, *group), mask, group))[0]


def _columns(capacity: int) -> int:
    """Returns the number of slots in a block, a multiple of the tile height."""
    height = min(capacity, _ROWS)
    return min(math.ceil(capacity / height) * height, _COLUMNS)


def finite(points: Float[Array, "..."]) -> Float[Array, "..."]:
    """Replaces infinities by the largest finite numbers, and NaN by 0.

    Equal infinities are then at distance 0. A NaN would spoil the results of other rows in its
    tile.
    """
    return jnp.nan_to_num(points, nan=0.0, posinf=_LARGEST, neginf=-_LARGEST)


def _largest_square(root: np.float32) -> float:
    """Returns the largest float32 whose rounded square root is at most ``root``."""
    up, down = np.float32(np.inf), np.float32(0)
    square = np.float32(root * root)
    while np.sqrt(square) > root:
        square = np.nextafter(square, down)
    while np.sqrt(np.nextafter(square, up)) <= root:
        square = np.nextafter(square, up)
    return float(square)

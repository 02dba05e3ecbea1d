"""Points in slots, and which of other points lie near one of them.

Only a threshold is asked for, so most distances are never computed in full: a sum of terms that are
not negative only grows, also in floating point, and once it is past the threshold for a whole tile
of pairs, the remaining coordinates of that tile cannot matter. Terms are sums of differences, never
``|x|² - 2xy + |y|²``: the distance between equal points is exactly 0.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple, Self

import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxbuf.core import rowwise

# A tile is as many pairs as fit a core's cache, with coordinates taken several at a time.
_ROWS = 128
_COLUMNS = 512
_STRIDE = 8
# So few rows of a tile that are not done yet go on by themselves.
_FEW = 16
_LARGEST = float(np.finfo(np.float32).max)


@dataclasses.dataclass(frozen=True)
class Ball:
    """The points within ``radius`` in ``p``-norm; the boundary belongs to it.

    Sums are compared, not their roots. For ``p`` of 1, 2 and infinity the comparison is that of the
    distance rounded to float32; for another ``p`` the boundary is met to within two units in the
    last place.

    Attributes:
        radius: 0, or from 2**-40 to 2**40.
        p: From 1 on; infinity is the largest difference of a coordinate.
    """

    radius: float
    p: float

    @property
    def limit(self) -> float:
        """The largest accumulated sum within the ball."""
        radius = np.float32(self.radius)
        if self._p == 1 or math.isinf(self._p):
            return float(radius)
        return _largest_square(radius) if self._p == 2 else 1.0 + (self._p + 4.0) * 2.0**-22

    def accumulate(self, total: Array, difference: Array) -> Array:
        """``total`` with one more coordinate."""
        size = jnp.abs(difference)
        if math.isinf(self._p):
            return jnp.maximum(total, size)
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


class Points(struct.PyTreeNode):
    """A point of ``width`` float32 coordinates in each of ``capacity`` slots.

    Attributes:
        blocks: ``[C, G, 8, L]``: slots in blocks of ``L``, coordinates in groups of 8, each
            coordinate of a block contiguous.
        capacity: Number of slots.
    """

    blocks: Float[Array, "C G S L"]
    capacity: int = struct.field(pytree_node=False)

    @classmethod
    def create(cls, capacity: int, width: int) -> Self:
        """All points at the origin."""
        columns = min(capacity, _COLUMNS)
        shape = (math.ceil(capacity / columns), math.ceil(width / _STRIDE), _STRIDE, columns)
        return cls(blocks=jnp.zeros(shape, jnp.float32), capacity=capacity)

    @classmethod
    def of(cls, points: Float[Array, "B D"]) -> Self:
        """Points given as rows."""
        empty = cls.create(*points.shape)
        blocks, groups, stride, columns = empty.blocks.shape
        rest = (blocks * columns - points.shape[0], groups * stride - points.shape[1])
        padded = jnp.pad(points, ((0, rest[0]), (0, rest[1])))
        split = padded.reshape(blocks, columns, groups, stride)
        return empty.replace(blocks=jnp.transpose(split, (0, 2, 3, 1)))

    def set(self, index: Int[Array, " B"], points: Float[Array, "B D"]) -> Self:
        """Put points into different slots; rows past the end are dropped."""
        blocks, groups, stride, columns = self.blocks.shape
        rows = jnp.pad(points, ((0, 0), (0, groups * stride - points.shape[1])))
        block = jnp.where(index < self.capacity, index // columns, blocks)
        changed = self.blocks.at[block, :, :, index % columns].set(
            rows.reshape(-1, groups, stride), mode="drop", unique_indices=True
        )
        return self.replace(blocks=changed)

    def near(
        self,
        points: Float[Array, "B D"],
        count: Int[Array, ""],
        ball: Ball,
        usable: Callable[[Int[Array, "R 1"], Int[Array, "1 L"]], Bool[Array, "..."]],
    ) -> Bool[Array, " B"]:
        """Which points have one of these within the ball around them.

        Memory is bounded by a tile, whatever ``B`` and the capacity are.

        Args:
            points: ``[B, D]``.
            count: How many of them to look at, the first ones; the others are near nothing.
            ball: What is near.
            usable: Which slots count for which rows, given row numbers ``[R, 1]`` and slots
                ``[1, L]``; ``[R, L]`` or ``[1, L]``.
        """
        blocks, _, stride, columns = self.blocks.shape
        total = points.shape[0]
        tiles = tile_rows(points)
        height = tiles.shape[-1]
        slot = jnp.arange(columns, dtype=jnp.int32)[None]
        row = jnp.arange(height, dtype=jnp.int32)[:, None]

        def tile(k: Array, found: Bool[Array, " P"]) -> Bool[Array, " P"]:
            first, block = k // blocks, k % blocks
            at = block * columns + slot
            counts = usable(first * height + row, at) & (at < self.capacity)

            def theirs(group: Array) -> Array:
                begin = (block, group, jnp.int32(0), jnp.int32(0))
                return lax.dynamic_slice(self.blocks, begin, (1, 1, stride, columns))[0, 0]

            ours = lax.dynamic_index_in_dim(tiles, first, keepdims=False)
            close = _rows_near(ours, theirs, counts, ball)
            before = lax.dynamic_slice(found, (first * height,), (height,))
            return lax.dynamic_update_slice(found, before | close, (first * height,))

        steps = -(-count // height) * blocks
        found = jnp.zeros((tiles.shape[0] * height,), bool)
        found = lax.fori_loop(0, steps, tile, found)[:total]
        return found & (jnp.arange(total, dtype=jnp.int32) < count)


def tile_rows(points: Float[Array, "B D"]) -> Float[Array, "T G S R"]:
    """Points given as rows, in the tiles that ``pairwise`` takes."""
    rows, width = points.shape
    height = min(rows, _ROWS)
    tiles, groups = math.ceil(rows / height), math.ceil(width / _STRIDE)
    rest = (tiles * height - rows, groups * _STRIDE - width)
    padded = jnp.pad(points, ((0, rest[0]), (0, rest[1])))
    return jnp.transpose(padded.reshape(tiles, height, groups, _STRIDE), (0, 2, 3, 1))


class Sums(NamedTuple):
    """What is accumulated of a tile.

    Attributes:
        groups: How many groups of coordinates.
        sums: Of each pair.
        least: Of each row.
    """

    groups: Int[Array, ""]
    sums: Float[Array, "R L"]
    least: Float[Array, " R"]


def pairwise(
    ours: Float[Array, "G S R"],
    theirs: Callable[[Int[Array, ""]], Float[Array, "S L"]],
    counts: Bool[Array, "..."],
    ball: Ball,
    *,
    enough: int = 0,
) -> Sums:
    """What ``ball`` accumulates for each pair; infinite where it does not count.

    It stops as soon as no pair can be in the ball any more: then sums are too small, but past the
    limit.

    Args:
        ours: One tile of ``tile_rows``.
        theirs: The coordinates of the others, one group at a time.
        counts: Which pairs matter, ``[R, L]`` or ``[1, L]``.
        ball: Norm and limit.
        enough: Stop already when no more than so many rows, less than ``R``, can be near anything.
    """
    height = ours.shape[-1]
    sums = jnp.where(counts, jnp.float32(0), jnp.float32(jnp.inf))
    sums = jnp.broadcast_to(sums, (height, counts.shape[-1]))
    begin = Sums(jnp.int32(0), sums, jnp.zeros((height,), jnp.float32))
    return _accumulate(ours, theirs, begin, ball, enough)


def _accumulate(
    ours: Float[Array, "G S R"],
    theirs: Callable[[Int[Array, ""]], Float[Array, "S L"]],
    begin: Sums,
    ball: Ball,
    enough: int = 0,
) -> Sums:
    groups = ours.shape[0]
    limit = jnp.float32(ball.limit)

    def operands(group: Array) -> tuple[Array, Array]:
        inside = jnp.minimum(group, groups - 1)
        return lax.dynamic_index_in_dim(ours, inside, keepdims=False), theirs(inside)

    # Coordinates go through the carry, so that they are sliced once, and not, fused into the
    # arithmetic, for every pair.
    def unfinished(carry: tuple[Sums, Array, Array]) -> Array:
        done, *_ = carry
        return (done.groups < groups) & (jnp.sum(done.least <= limit, dtype=jnp.int32) > enough)

    def step(carry: tuple[Sums, Array, Array]) -> tuple[Sums, Array, Array]:
        (group, sums, _), one, other = carry
        for k in range(_STRIDE):
            sums = ball.accumulate(sums, one[k][:, None] - other[k][None])
        return Sums(group + 1, sums, jnp.min(sums, axis=1)), *operands(group + 1)

    return lax.while_loop(unfinished, step, (begin, *operands(begin.groups)))[0]


def _rows_near(
    ours: Float[Array, "G S R"],
    theirs: Callable[[Int[Array, ""]], Float[Array, "S L"]],
    counts: Bool[Array, "..."],
    ball: Ball,
) -> Bool[Array, " R"]:
    """Which rows of a tile have something near them, of what counts.

    Those few that have are not reason enough to go on with all the others.
    """
    groups, _, height = ours.shape
    limit = jnp.float32(ball.limit)
    if height <= _FEW:
        return pairwise(ours, theirs, counts, ball).least <= limit
    whole = pairwise(ours, theirs, counts, ball, enough=_FEW)
    can = whole.least <= limit

    def few() -> Bool[Array, " R"]:
        row, number = rowwise.pack(jnp.arange(height, dtype=jnp.int32), can, 0, size=height)
        row = row[:_FEW]
        there = jnp.arange(_FEW, dtype=jnp.int32) < number
        least = jnp.where(there, whole.least[row], jnp.inf)
        sums = jnp.where(there[:, None], whole.sums[row], jnp.inf)
        end = _accumulate(ours[:, :, row], theirs, Sums(whole.groups, sums, least), ball)
        at = jnp.where(there, row, height)
        return jnp.zeros((height,), bool).at[at].set(end.least <= limit, mode="drop")

    return lax.cond((whole.groups < groups) & jnp.any(can), few, lambda: can)


def finite(points: Float[Array, "B D"]) -> Float[Array, "B D"]:
    """Points that can be compared: infinities become the largest numbers, and NaN becomes 0.

    Equal infinities are then at distance 0; a NaN would hide what is near others in its tile.
    """
    return jnp.nan_to_num(points, nan=0.0, posinf=_LARGEST, neginf=-_LARGEST)


def _largest_square(root: np.float32) -> float:
    """The largest float32 whose square root, rounded, is not above ``root``."""
    up, down = np.float32(np.inf), np.float32(0)
    square = np.float32(root * root)
    while np.sqrt(square) > root:
        square = np.nextafter(square, down)
    while np.sqrt(np.nextafter(square, up)) <= root:
        square = np.nextafter(square, up)
    return float(square)

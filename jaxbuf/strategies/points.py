"""Points in slots, and which of other points lie near one of them.

Only a threshold is asked for, so most distances are never computed in full: a sum of terms that are
not negative only grows, also in floating point, and once all sums of a point are past the
threshold, its remaining coordinates cannot matter. Terms are sums of differences, never
``|x|² - 2xy + |y|²``: the distance between equal points is exactly 0.
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
from jaxtyping import Array, Bool, Float, Int

from jaxbuf.core.varying import vary_with

# A tile is as many pairs as fit a core's cache, with coordinates taken several at a time.
_ROWS = 128
_COLUMNS = 512
_STRIDE = 8
_LARGEST = float(np.finfo(np.float32).max)


@dataclasses.dataclass(frozen=True)
class Ball:
    """The points within ``radius`` in ``p``-norm; the boundary belongs to it.

    Sums are compared, not their roots. For ``p`` of 0, 1, 2 and infinity the comparison is that of
    the distance rounded to float32. For another ``p`` the sum of powers may be off by a few units
    in the last place, so that the radius is met to within about ``1e-6 * (1 + 4 / p)`` of itself.

    Attributes:
        radius: 0, or from 2**-40 to 2**40.
        p: From 0 to infinity, which is the largest difference of a coordinate; 0 is the number of
            coordinates that differ.
    """

    radius: float
    p: float

    @property
    def limit(self) -> float:
        """The largest accumulated sum within the ball."""
        radius = np.float32(self.radius)
        if self._p in (0, 1) or math.isinf(self._p):
            return float(radius)
        return _largest_square(radius) if self._p == 2 else 1.0 + (self._p + 4.0) * 2.0**-22

    def accumulate(self, total: Array, difference: Array) -> Array:
        """``total`` with one more coordinate."""
        size = jnp.abs(difference)
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


# A group of coordinates of a block.
Theirs = Callable[[Int[Array, ""]], Float[Array, "S L"]]
# Which slots count for which rows, given row numbers ``[R, 1]`` and slots ``[1, L]``.
Usable = Callable[[Int[Array, "R 1"], Int[Array, "1 L"]], Bool[Array, "..."]]


class Others(abc.ABC):
    """What points are compared with: points in slots, a block of which is looked at at a time.

    Memory is bounded by a tile, whatever the number of points and of slots.

    Attributes:
        capacity: Number of slots.
    """

    capacity: int

    @abc.abstractmethod
    def open(self, block: Int[Array, ""]) -> tuple[Int[Array, ""], Theirs]:
        """The first slot of a block, and its points; slots from the capacity on have none."""

    def near(
        self, points: "Points", count: Int[Array, ""], ball: Ball, usable: Usable
    ) -> Bool[Array, " B"]:
        """Which points have one of these within the ball around them.

        Args:
            points: ``B`` points of as many coordinates.
            count: How many of them to look at, the first ones; the others are near nothing.
            ball: What is near.
            usable: Which slots count for which rows, ``[R, L]`` or ``[1, L]``.
        """
        return self.nearest(points, ball, usable, count) <= jnp.float32(ball.limit)

    def nearest(
        self, points: "Points", ball: Ball, usable: Usable, count: Int[Array, ""] | None = None
    ) -> Float[Array, " B"]:
        """What ``ball`` accumulates for each point and the nearest of these.

        Args:
            points: ``B`` points of as many coordinates.
            ball: Beyond it sums are only known to be past its limit.
            usable: As for ``near``; infinite where no slot counts.
            count: How many to look at, the first ones; infinite for the others. None for all.
        """
        total, height, columns = points.capacity, points.height, _columns(self.capacity)
        blocks = math.ceil(self.capacity / columns)
        lane = jnp.arange(columns, dtype=jnp.int32)[None]
        row = jnp.arange(height, dtype=jnp.int32)[:, None]
        number = jnp.int32(total) if count is None else count

        def open_(k: Array) -> tuple[Array, Array, Theirs, Array]:
            """The first row of a tile, its points, those of a block, and which pairs count."""
            # A loop with known bounds counts in 64 bits where these are on.
            k = jnp.asarray(k, jnp.int32)
            tile, block = k // blocks, k % blocks
            slot, theirs = self.open(block)
            slot = slot + lane
            counts = usable(tile * height + row, slot) & (slot < self.capacity)
            return tile * height, points.tile(tile), theirs, counts

        # All tiles of points, and for each all blocks.
        def step(k: Array, least: Float[Array, " P"]) -> Float[Array, " P"]:
            start, ours, theirs, counts = open_(k)
            before = lax.dynamic_slice(least, (start,), (height,))
            found = jnp.minimum(before, pairwise(ours, theirs, counts, ball).least)
            return lax.dynamic_update_slice(least, found, (start,))

        _, ours, theirs, counts = open_(jnp.int32(0))
        begin = jnp.full((points.num_tiles * height,), jnp.inf, jnp.float32)
        begin = vary_with(begin, ours, theirs(jnp.int32(0)), counts, number)
        least = lax.fori_loop(0, -(-number // height) * blocks, step, begin)[:total]
        return jnp.where(jnp.arange(total, dtype=jnp.int32) < number, least, jnp.inf)


class Points(Others, struct.PyTreeNode):
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
        columns = _columns(capacity)
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

    @property
    def height(self) -> int:
        """Number of points in a tile."""
        return min(self.blocks.shape[-1], _ROWS)

    @property
    def num_tiles(self) -> int:
        """In how many tiles they are."""
        return math.ceil(self.capacity / self.height)

    def tile(self, k: Int[Array, ""]) -> Float[Array, "G S R"]:
        """The points of one tile, for ``pairwise``."""
        _, groups, stride, columns = self.blocks.shape
        first = k * self.height
        begin = (first // columns, jnp.int32(0), jnp.int32(0), first % columns)
        return lax.dynamic_slice(self.blocks, begin, (1, groups, stride, self.height))[0]

    def open(self, block: Int[Array, ""]) -> tuple[Int[Array, ""], Theirs]:
        """The first slot of a block, and its points, of which what is asked for is read."""
        _, _, stride, columns = self.blocks.shape

        def theirs(group: Array) -> Array:
            begin = (block, group, jnp.int32(0), jnp.int32(0))
            return lax.dynamic_slice(self.blocks, begin, (1, 1, stride, columns))[0, 0]

        return block * columns, theirs


@dataclasses.dataclass(frozen=True)
class Computed(Others):
    """Points that are computed, a block at a time, from what lies in the slots.

    Attributes:
        capacity: Number of slots.
        rows: The points of so many slots from a first one on, ``[number, D]``.
    """

    capacity: int
    rows: Callable[[Int[Array, ""], int], Float[Array, "B D"]]

    def open(self, block: Int[Array, ""]) -> tuple[Int[Array, ""], Theirs]:
        """The first slot of a block, and its points."""
        number = min(_columns(self.capacity), self.capacity)
        # The last block reaches back into the one before it.
        first = jnp.minimum(block * number, self.capacity - number)
        theirs = Points.of(self.rows(first, number)).blocks[0]
        return first, functools.partial(lax.dynamic_index_in_dim, theirs, keepdims=False)


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
    theirs: Theirs,
    counts: Bool[Array, "..."],
    ball: Ball,
) -> Sums:
    """What ``ball`` accumulates for each pair; infinite where it does not count.

    It stops as soon as no pair can be in the ball any more: then sums are too small, but past the
    limit.

    Args:
        ours: One tile.
        theirs: The others.
        counts: Which pairs matter, ``[R, L]`` or ``[1, L]``.
        ball: Norm and limit.
    """
    groups, _, height = ours.shape
    limit = jnp.float32(ball.limit)

    def operands(group: Array) -> tuple[Array, Array]:
        group = jnp.minimum(group, groups - 1)
        return lax.dynamic_index_in_dim(ours, group, keepdims=False), theirs(group)

    def unfinished(carry: tuple[Sums, Array, Array]) -> Array:
        done, *_ = carry
        return (done.groups < groups) & jnp.any(done.least <= limit)

    # Coordinates go through the carry, so that they are sliced once, and not, fused into the
    # arithmetic, for every pair.
    def go_on(carry: tuple[Sums, Array, Array]) -> tuple[Sums, Array, Array]:
        (done, sums, _), one, other = carry
        for k in range(_STRIDE):
            sums = ball.accumulate(sums, one[k][:, None] - other[k][None])
        return Sums(done + 1, sums, jnp.min(sums, axis=1)), *operands(done + 1)

    sums = jnp.where(counts, jnp.float32(0), jnp.float32(jnp.inf))
    sums = jnp.broadcast_to(sums, (height, counts.shape[-1]))
    begin = Sums(jnp.int32(0), sums, jnp.zeros((height,), jnp.float32))
    first = operands(begin.groups)
    return lax.while_loop(unfinished, go_on, vary_with((begin, *first), counts, first))[0]


def _columns(capacity: int) -> int:
    """How many of so many slots are in a block: a whole number of tiles."""
    height = min(capacity, _ROWS)
    return min(math.ceil(capacity / height) * height, _COLUMNS)


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

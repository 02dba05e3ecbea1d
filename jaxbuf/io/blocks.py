"""Arrays that are filled in place, block by block, so that memory never holds them twice."""

import contextlib
import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int, Shaped, UInt

from jaxbuf.core.program import no_mesh

# A part of an array: slices with a start and a stop, one for each axis.
Index: TypeAlias = tuple[slice, ...]
# A part of an array, and its numbers.
Block: TypeAlias = tuple[Index, Shaped[np.ndarray, "..."]]
# Where rows go to: their indices along each of the leading axes, past the end to leave a row out.
Rows: TypeAlias = Sequence[Int[np.ndarray, "..."]]

_PAST_END = 2**31 - 1


def consecutive(shape: Sequence[int], most: int) -> Iterator[Index]:
    """Yields blocks of an array in the order of its elements.

    Args:
        shape: The shape of the array, at least one axis.
        most: The most elements of a block.

    Example:
        >>> [[(s.start, s.stop) for s in index] for index in consecutive((2, 3), 2)]
        [[(0, 1), (0, 2)], [(0, 1), (2, 3)], [(1, 2), (0, 2)], [(1, 2), (2, 3)]]
    """
    if 0 in shape:
        return
    axis = 0
    while axis < len(shape) - 1 and math.prod(shape[axis + 1 :]) > most:
        axis += 1
    inner = tuple(slice(0, size) for size in shape[axis + 1 :])
    step = max(most // math.prod(shape[axis + 1 :]), 1)
    for position in itertools.product(*map(range, shape[:axis])):
        outer = tuple(slice(i, i + 1) for i in position)
        for begin in range(0, shape[axis], step):
            yield (*outer, slice(begin, min(begin + step, shape[axis])), *inner)


def shape_of(index: Index) -> tuple[int, ...]:
    """Returns the shape of a part."""
    return tuple(part.stop - part.start for part in index)


def size_of(index: Index) -> int:
    """Returns the number of elements of a part."""
    return math.prod(shape_of(index))


def common(one: Index, other: Index) -> Index | None:
    """Returns the part that two parts of an array share; None if they share nothing."""
    shared = tuple(
        slice(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(one, other, strict=True)
    )
    return shared if all(s.start < s.stop for s in shared) else None


def moved(index: Index, by: Index) -> Index:
    """Returns the place of a part of a part in the whole array."""
    return tuple(slice(a.start + b.start, a.stop + b.start) for a, b in zip(index, by, strict=True))


def within(index: Index, outer: Index) -> Index:
    """Returns the position of a part in a larger part of the same array."""
    return tuple(
        slice(a.start - b.start, a.stop - b.start) for a, b in zip(index, outer, strict=True)
    )


def parts_of(shape: Sequence[int], sharding: jax.sharding.Sharding | None) -> list[Index]:
    """Returns the parts of an array that devices of this process hold."""
    indices = [()] if sharding is None else _by_device(shape, sharding).values()
    return [_complete(shape, index) for index in indices]


def fill(
    shape: tuple[int, ...],
    dtype: Any,
    sharding: jax.sharding.Sharding | None,
    blocks: Iterable[Block],
    rows: Rows | None = None,
) -> Array:
    """Returns an array that is made of blocks of numbers; what no block has is 0.

    Args:
        shape: Its shape.
        dtype: Its dtype.
        sharding: Where it is placed; None for the default device, without being committed to it.
        blocks: The blocks of an array of the same shape; or of another one, whose rows move.
        rows: For each row of that other array, where it goes to.
    """
    devices = {None: ()} if sharding is None else _by_device(shape, sharding)
    parts = [_Part(_complete(shape, index), dtype, device) for device, index in devices.items()]
    with contextlib.nullcontext() if sharding is None else no_mesh():
        for index, block in blocks:
            for part in parts:
                part.take(index, block, rows)
        arrays = [part.array for part in parts]
    if sharding is None:
        return arrays[0]
    # Programs have updated it in the usual memory of its devices.
    kind = next(iter(sharding.device_set)).default_memory().kind
    usual = sharding if sharding.memory_kind in (None, kind) else sharding.with_memory_kind(kind)
    array = jax.make_array_from_single_device_arrays(shape, usual, arrays)
    return array if usual is sharding else jax.device_put(array, sharding)


class _Part:
    """The part of an array on one device.

    Args:
        index: Which part it is.
        dtype: Its dtype.
        device: The device; None for the default one.
    """

    def __init__(self, index: Index, dtype: Any, device: Any) -> None:
        self._index = index
        self._dtype = dtype
        self._device = device
        self._shape = shape_of(index)
        self._array: Array | None = None

    @property
    def array(self) -> Array:
        """The array on the device."""
        array = self._array
        if array is None:
            # Not made elsewhere and then sent to the device, which would hold it twice.
            make = functools.partial(jnp.zeros, self._shape, self._dtype)
            place = self._device and jax.sharding.SingleDeviceSharding(self._device)
            self._array = array = jax.jit(make, out_shardings=place)()
        return array

    def take(self, index: Index, block: Shaped[np.ndarray, "..."], rows: Rows | None) -> None:
        """Writes what a block has of this part."""
        if rows is None:
            self._put(index, block)
        else:
            self._move(index, block, rows)

    def _put(self, index: Index, block: Shaped[np.ndarray, "..."]) -> None:
        shared = common(index, self._index)
        if shared is None:
            return
        piece, target = block[within(shared, index)], within(shared, self._index)
        if piece.shape == self._shape:
            # A copy, since an array that borrows NumPy's memory cannot be updated in place.
            self._array = jnp.array(piece, self._dtype, copy=True, device=self._device)
            return
        start = np.asarray([part.start for part in target], np.uint32)
        self._array = jax.block_until_ready(_update(self.array, piece, start))

    def _move(self, index: Index, block: Shaped[np.ndarray, "..."], rows: Rows) -> None:
        axes = len(rows)
        shared = common(index[axes:], self._index[axes:])
        goal = np.stack([row[index[:axes]] for row in rows], -1).reshape(-1, axes)  # [B, A]
        goal = goal - np.asarray([part.start for part in self._index[:axes]])
        inside = np.all((goal >= 0) & (goal < self._shape[:axes]), axis=1)
        if shared is None or not inside.any():
            return
        every = (slice(None),) * axes
        piece = block[(*every, *within(shared, index[axes:]))]
        piece = piece.reshape(-1, *piece.shape[axes:])
        first = [part.start for part in within(shared, self._index[axes:])]
        start = np.full((len(piece), len(self._shape)), [0] * axes + first, np.int32)
        start[:, :axes] = np.where(inside[:, None], goal, _PAST_END)
        self._array = jax.block_until_ready(_scatter(self.array, piece, start))


@functools.partial(jax.jit, donate_argnums=0)
def _update(array: Array, block: Array, start: UInt[Array, " D"]) -> Array:
    """Writes a block in place, at ``start`` along each axis."""
    return lax.dynamic_update_slice(array, block, [start[i] for i in range(array.ndim)])


@functools.partial(jax.jit, donate_argnums=0)
def _scatter(array: Array, rows: Shaped[Array, "B ..."], start: Int[Array, "B D"]) -> Array:
    """Writes rows in place, each at its own ``start``; those past the end are left out."""
    leading = range(array.ndim - rows.ndim + 1)
    numbers = lax.ScatterDimensionNumbers(
        tuple(range(1, rows.ndim)), tuple(leading), tuple(range(array.ndim))
    )
    return lax.scatter(array, start, rows, numbers, unique_indices=True, mode="drop")


def _by_device(
    shape: Sequence[int], sharding: jax.sharding.Sharding
) -> dict[Any, tuple[slice, ...]]:
    indices: Any = sharding.addressable_devices_indices_map(tuple(shape))
    return indices


def _complete(shape: Sequence[int], index: tuple[slice, ...]) -> Index:
    """Returns an index with a start and a stop for each axis."""
    index = (*index, *[slice(None)] * (len(shape) - len(index)))
    bounds = (part.indices(size) for part, size in zip(index, shape, strict=True))
    return tuple(slice(start, stop) for start, stop, _ in bounds)

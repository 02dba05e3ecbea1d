"""The contents of a buffer in the order in which they were added, as arrays of NumPy."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Bool, Int, PyTree, Shaped

from jaxbuf.buffers.buffer import as_buffer, owns_items
from jaxbuf.core import checks
from jaxbuf.core.donation import check_single
from jaxbuf.core.types import Arrays, Index
from jaxbuf.occupancy.protocol import Occupancy


def in_order(occupancy: Occupancy) -> tuple[Int[Array, " N"], Bool[Array, " N"]]:
    """Returns the slots ordered from the oldest item, and a mask of the rows that are live.

    Raises:
        ValueError: If the occupancy does not tell the age of its items.
    """
    ordered = occupancy.in_order()
    if ordered is None:
        raise ValueError(f"{type(occupancy.places).__name__} does not tell the age of its items")
    return ordered


class Ordered(NamedTuple):
    """Rows in the order in which they were added, which are read from a buffer as needed.

    Attributes:
        num_rows: Their number.
        read: Returns the rows from the first number to before the second, leaves ``[B, ...]``.
    """

    num_rows: int
    read: Callable[[int, int], PyTree[np.ndarray]]


def rings_in_order(buffer: object) -> list[Ordered] | None:
    """Returns the steps of each environment, oldest first; None for items.

    The environments of a ``Sharded`` are those of its first shard, then of the second one, and so
    on, as ``add`` takes them.
    """
    rings = _rings(buffer)
    if rings is None:
        return None
    counts, read = rings

    def of_env(env: int) -> Ordered:
        return Ordered(
            int(counts[env]), lambda begin, end: read(np.asarray(env), np.arange(begin, end))
        )

    return [of_env(env) for env in range(len(counts))]


def steps_in_order(buffer: object) -> Ordered:
    """Returns the items of a buffer, or steps of all its environments, ``[E, ...]``, oldest first.

    Raises:
        ValueError: If the buffer does not tell the age of its items, or environments have different
            numbers of steps.
    """
    rings = _rings(buffer)
    if rings is None:
        return items_in_order(buffer)
    counts, read = rings
    if min(counts) < max(counts):
        raise ValueError(
            f"environments have from {min(counts)} to {max(counts)} steps; append rollouts as they "
            "come, or add to all environments alike"
        )
    envs = np.arange(len(counts))
    return Ordered(int(counts[0]), lambda begin, end: read(envs, np.arange(begin, end)[:, None]))


def _rings(buffer: object) -> tuple[Int[np.ndarray, " E"], Callable[..., Any]] | None:
    """Returns the numbers of steps of environments, and a function of environments and steps.

    The function reads the given steps, of which 0 is the oldest one, of the given environments.
    """
    inner, shards = as_buffer(buffer).inside()
    if not owns_items(inner) or not inner.num_envs:
        return None
    length, envs = inner.length, inner.num_envs
    cursor, count = (
        np.asarray(x).reshape(-1).astype(np.int64) for x in (inner.rings.cursor, inner.rings.held)
    )  # [E]

    def read(env: Int[np.ndarray, "..."], step: Int[np.ndarray, "..."]) -> PyTree[np.ndarray]:
        position = (cursor[env] - count[env] + step) % length
        row = env % envs * length + position
        return _take(inner.data, (env // envs, row) if shards else (row,))

    return count, read


def items_in_order(buffer: object) -> Ordered:
    """Returns the items of a buffer, oldest first.

    The shards of a ``Sharded`` give their items in turn.

    Raises:
        ValueError: If the buffer does not tell the age of its items.
    """
    inner, shards = as_buffer(buffer).inside()
    if not owns_items(inner):
        raise ValueError(
            f"buffer is {checks.kind_of(buffer)}, whose items have no order; take one of its parts"
        )
    if shards:
        order, live = (np.asarray(x).T for x in jax.vmap(in_order)(inner.occupancy))  # [N, S]
        index = np.broadcast_to(np.arange(shards), order.shape)[live], order[live]
    else:
        check_single(inner)
        order, live = (np.asarray(x) for x in in_order(inner.occupancy))
        index = (order[live],)
    return Ordered(
        len(index[0]), lambda begin, end: _take(inner.data, tuple(i[begin:end] for i in index))
    )


def _take(data: Arrays, index: tuple[Int[np.ndarray, "..."], ...]) -> PyTree[np.ndarray]:
    """Returns rows of leaves by their indices along the leading axes, as arrays of NumPy."""
    index = tuple(np.broadcast_arrays(*index))

    def take(leaf: Array | np.ndarray) -> Shaped[np.ndarray, "..."]:
        if isinstance(leaf, np.ndarray):
            return leaf[index]
        rows = np.empty((*index[0].shape, *leaf.shape[len(index) :]), leaf.dtype)
        # One device after the other, since an array that is put together would be a copy of all.
        for shard in {repr(shard.index): shard for shard in leaf.addressable_shards}.values():
            bounds = [
                part.indices(size)[:2] for part, size in zip(shard.index, leaf.shape, strict=True)
            ]
            pairs = [*zip(index, bounds, strict=False)]
            inside = np.all([(i >= start) & (i < stop) for i, (start, stop) in pairs], axis=0)
            local = tuple(i[inside] - start for i, (start, _) in pairs)
            columns = tuple(slice(*bound) for bound in bounds[len(index) :])
            rows[(inside, *columns)] = _of_device(shard.data, local)
        return rows

    return jax.tree.map(take, data)


def _of_device(
    array: Array, index: tuple[Int[np.ndarray, " B"], ...]
) -> Shaped[np.ndarray, "B ..."]:
    if next(iter(array.devices())).platform == "cpu":
        # The memory of the array itself.
        return np.asarray(array)[index]
    count = len(index[0])
    # Few programs for many numbers of rows.
    padded = tuple(np.pad(i, (0, (1 << count.bit_length()) - count)) for i in index)
    return np.asarray(_gather(array, padded))[:count]


@jax.jit
def _gather(array: Array, index: tuple[Index, ...]) -> Shaped[Array, "B ..."]:
    return array[index]


def padded(rows: Shaped[np.ndarray, "B ..."], size: int) -> Shaped[np.ndarray, "C ..."]:
    """Returns ``size`` rows: these rows, and zeros after them."""
    if len(rows) == size:
        return rows
    out = np.zeros((size, *rows.shape[1:]), rows.dtype)
    out[: len(rows)] = rows
    return out

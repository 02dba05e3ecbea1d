"""The contents of a buffer in the order in which they were added, as arrays of NumPy."""

import jax
import numpy as np
from jaxtyping import Array, Bool, Int, PyTree, Shaped

from jaxbuf.buffers.base import owns_items
from jaxbuf.buffers.buffer import as_buffer
from jaxbuf.core import checks
from jaxbuf.core.donation import check_single
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


def rings_in_order(buffer: object) -> list[PyTree[np.ndarray]] | None:
    """Returns the steps of each environment, leaves ``[T, ...]``, oldest first; None for items.

    The environments of a ``Sharded`` are those of its first shard, then of the second one, and so
    on, as ``add`` takes them.
    """
    inner, shards = as_buffer(buffer).inside()
    if not owns_items(inner) or not inner.num_envs:
        return None
    length = inner.length
    cursor, num_steps = (
        np.asarray(x).reshape(-1).astype(np.int64) for x in (inner.rings.cursor, inner.rings.held)
    )  # [E]

    def by_env(leaf: Array) -> Shaped[np.ndarray, "E T ..."]:
        array = np.asarray(leaf)
        return array.reshape(len(cursor), length, *array.shape[2 if shards else 1 :])

    data = jax.tree.map(by_env, inner.data)
    rings: list[PyTree[np.ndarray]] = []
    for env, count in enumerate(num_steps):
        steps = (cursor[env] - count + np.arange(count)) % length  # [T]
        rings.append(jax.tree.map(lambda leaf, env=env, steps=steps: leaf[env, steps], data))
    return rings


def items_in_order(buffer: object) -> PyTree[np.ndarray]:
    """Returns the items of a buffer, leaves ``[B, ...]``, oldest first.

    The shards of a ``Sharded`` give their items in turn.

    Raises:
        ValueError: If the buffer does not tell the age of its items.
    """
    inner, shards = as_buffer(buffer).inside()
    if not owns_items(inner):
        raise ValueError(
            f"buffer is {checks.kind_of(buffer)}, whose items have no order; take one of its parts"
        )
    if not shards:
        check_single(inner)
        order, live = (np.asarray(x) for x in in_order(inner.occupancy))
        return jax.tree.map(lambda leaf: np.asarray(leaf)[order[live]], inner.data)
    order, live = (np.asarray(x).T for x in jax.vmap(in_order)(inner.occupancy))  # [N, S]
    shard = np.broadcast_to(np.arange(shards), order.shape)[live]
    return jax.tree.map(lambda leaf: np.asarray(leaf)[shard, order[live]], inner.data)


def padded(rows: Shaped[np.ndarray, "B ..."], size: int) -> Shaped[np.ndarray, "C ..."]:
    """Returns ``size`` rows: these rows, and zeros after them."""
    if len(rows) == size:
        return rows
    out = np.zeros((size, *rows.shape[1:]), rows.dtype)
    out[: len(rows)] = rows
    return out

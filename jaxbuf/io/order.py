"""The slots of a buffer in the order in which its items were added."""

from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Bool, Int, PyTree

from jaxbuf.buffers.buffer import as_buffer
from jaxbuf.buffers.created import is_created
from jaxbuf.core import checks
from jaxbuf.core.donation import check_single
from jaxbuf.occupancy.protocol import Occupancy


def in_order(occupancy: Occupancy) -> tuple[Int[Array, " N"], Bool[Array, " N"]]:
    """Returns slots with live items ordered from the oldest, and which rows are live.

    Raises:
        ValueError: If the occupancy does not tell the age of its items.
    """
    found = occupancy.in_order()
    if found is None:
        raise ValueError(f"{type(occupancy.places).__name__} does not tell the age of its items")
    return found


def rings_in_order(buffer: Any) -> list[PyTree[np.ndarray[Any, Any]]] | None:
    """Returns the steps of each environment, leaves ``[T, ...]``, oldest first; None for items.

    The environments of a ``Sharded`` are those of its first shard, then of the second one, and so
    on, as ``add`` takes them.
    """
    one, shards = as_buffer(buffer).inside()
    if not is_created(one) or not one.num_envs:
        return None
    length = one.length
    cursor, held = (
        np.asarray(x).reshape(-1).astype(np.int64) for x in (one.rings.cursor, one.rings.held)
    )

    def by_env(leaf: Any) -> np.ndarray[Any, Any]:
        array = np.asarray(leaf)
        return array.reshape(len(cursor), length, *array.shape[2 if shards else 1 :])

    data = jax.tree.map(by_env, one.data)
    out: list[PyTree[np.ndarray[Any, Any]]] = []
    for env in range(len(cursor)):
        at = (cursor[env] - held[env] + np.arange(held[env])) % length
        out.append(jax.tree.map(lambda leaf, env=env, at=at: leaf[env, at], data))
    return out


def items_in_order(buffer: Any) -> PyTree[np.ndarray[Any, Any]]:
    """Returns the items of a buffer, leaves ``[B, ...]``, oldest first.

    The shards of a ``Sharded`` give their items in turn.

    Raises:
        ValueError: If the buffer does not tell the age of its items.
    """
    one, shards = as_buffer(buffer).inside()
    if not is_created(one):
        raise ValueError(
            f"buffer is {checks.kind_of(buffer)}, whose items have no order; take one of its parts"
        )
    if not shards:
        check_single(one)
        order, live = (np.asarray(x) for x in in_order(one.occupancy))
        return jax.tree.map(lambda leaf: np.asarray(leaf)[order[live]], one.data)
    order, live = (np.asarray(x).T for x in jax.vmap(in_order)(one.occupancy))
    shard = np.broadcast_to(np.arange(shards), order.shape)[live]
    return jax.tree.map(lambda leaf: np.asarray(leaf)[shard, order[live]], one.data)

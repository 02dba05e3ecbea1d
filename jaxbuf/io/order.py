"""The slots of a buffer in the order in which its items were added."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxbuf.occupancy.ranking import Ranking
from jaxbuf.occupancy.ring import Ring
from jaxbuf.occupancy.subset import Subset


def in_order(occupancy: Any) -> tuple[Int[Array, " N"], Bool[Array, " N"]]:
    """Returns all slots, with live items ordered from the oldest, and which slots are live.

    Raises:
        ValueError: If the occupancy does not tell the age of its items.
    """
    if isinstance(occupancy, Subset):
        order, _ = in_order(occupancy.inner)
        return order, occupancy.live(order)
    if isinstance(occupancy, Ring):
        slot = jnp.arange(occupancy.capacity, dtype=jnp.int32)
        order = (occupancy.position + slot) % jnp.int32(occupancy.capacity)
    elif isinstance(occupancy, Ranking):
        slot = jnp.arange(occupancy.capacity, dtype=jnp.int32)
        # Numbers wrap; relative to the next one they are in order.
        order = jnp.argsort(occupancy.generation(slot) - occupancy.arrivals)
    else:
        raise ValueError(f"{type(occupancy).__name__} does not tell the age of its items")
    return order, occupancy.live(order)

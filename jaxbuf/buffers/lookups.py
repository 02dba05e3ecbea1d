"""Arguments that name steps and environments."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, UInt

from jaxbuf.buffers.common import check_slots
from jaxbuf.core import numbers, storage
from jaxbuf.core.slots import Slots

# What a lookup asks about: sampled windows, places that ``locate`` returned, or environments.
Where = Slots | tuple[Int[Array, "..."], UInt[Array, "..."]] | Int[Array, "..."]


def check_where(where: Where, positions: object) -> Slots | tuple[Any, Any]:
    """Returns what a lookup asks about: slots of windows, or environments and positions of steps.

    Args:
        where: Slots, a tuple of environments and positions, or environments.
        positions: The positions of steps in these environments.

    Raises:
        ValueError: If positions are given with slots, or missing without them.
    """
    if isinstance(where, Slots):
        if positions is not None:
            raise ValueError("positions were given with slots, which have their own")
        return check_slots(where, "where")
    if positions is None and isinstance(where, tuple) and len(where) == 2:
        return where
    if positions is None:
        raise ValueError("positions is None; give env_ids and positions, or slots")
    return where, positions


def mask_of(envs: object, num_envs: int) -> Bool[Array, " E"]:
    """Returns the argument ``envs`` of a method, a mask or numbers, as a mask; None means all.

    Raises:
        ValueError: If it is neither a mask ``[num_envs]`` nor numbers ``[K]``.
    """
    if envs is None:
        return jnp.ones((num_envs,), bool)
    given = numbers.abstract(envs, "envs")
    if given.dtype == jnp.bool_:
        return storage.check_rows(envs, "envs", (num_envs,), np.bool_, "(num_envs,)")
    if len(given.shape) != 1:
        raise ValueError(f"envs has shape {given.shape}; expected (K,), or a mask (num_envs,)")
    ids = numbers.integers(envs, "envs")
    # JAX would count a negative index from the end.
    at = jnp.where(ids >= 0, ids, num_envs)
    return jnp.zeros((num_envs,), bool).at[at].set(True, mode="drop")


def broadcast_steps(
    env_ids: object, positions: object, name: str = "env_ids"
) -> tuple[Int[Array, " B"], UInt[Array, " B"], tuple[int, ...]]:
    """Returns environments and positions of steps as flat arrays, and their broadcast shape.

    Args:
        env_ids: The environments of the steps.
        positions: The positions of the steps.
        name: The name of ``env_ids`` in an error.

    Raises:
        ValueError: If an argument does not hold integers, or the two do not broadcast.
    """
    env, position = numbers.integers(env_ids, name), numbers.array(positions, "positions")
    if not jnp.issubdtype(position.dtype, jnp.integer):
        raise ValueError(f"positions has dtype {position.dtype}; expected integers")
    try:
        shape = jnp.broadcast_shapes(env.shape, position.shape)
    except ValueError as error:
        raise ValueError(
            f"{name} has shape {env.shape} and positions {position.shape}; expected shapes that "
            "broadcast"
        ) from error
    env = jnp.broadcast_to(env, shape).reshape(-1)
    position = jnp.broadcast_to(position, shape).reshape(-1).astype(jnp.uint32)
    return env, position, shape

"""Taking items out of the middle of a buffer."""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from jaxbuf.core.subset import Subset
from jaxbuf.strategies.samplers import Sampler

# Usually few of the rows that are looked at retire, and each costs a path of every tree.
_ROWS = 16


def can_retire(sampler: Any) -> bool:
    """Whether a sampler can be told that an item is gone."""
    return hasattr(sampler, "slid") or not sampler.uses_priority


def retire(
    sampler: Sampler,
    state: Any,
    occupancy: Subset,
    index: Int[Array, " B"],
    gone: Bool[Array, " B"],
    capacity: int,
) -> tuple[Any, Subset]:
    """The sampler's state and the occupancy without the items at ``index`` that are ``gone``.

    The cost grows with the number of those, not with ``B``. A slot may be there twice.
    """
    rows = index.shape[0]
    count = jnp.sum(gone, dtype=jnp.int32)
    size = -(-rows // _ROWS) * _ROWS
    place = jnp.where(gone, jnp.cumsum(gone, dtype=jnp.int32) - 1, size)
    slots = jnp.full((size,), capacity, jnp.int32).at[place].set(index, mode="drop")

    def step(i: Array, carry: tuple[Any, Subset]) -> tuple[Any, Subset]:
        some = lax.dynamic_slice(slots, (i * _ROWS,), (_ROWS,))
        state, occupancy = carry
        occupancy = occupancy.exclude(some)
        if hasattr(occupancy.inner, "demote"):
            occupancy = occupancy.replace(inner=occupancy.inner.demote(some))
        return forget(sampler, state, some), occupancy

    return lax.fori_loop(0, -(-count // _ROWS), step, (state, occupancy))


def forget(sampler: Any, state: Any, index: Int[Array, " B"]) -> Any:
    """The sampler's state without the items at ``index``."""
    if hasattr(sampler, "slid"):
        # Slots whose item is gone are to a sampler what windows are that a write position broke.
        nothing = jnp.zeros((0,), jnp.int32)
        return sampler.slid(state, nothing, None, index)
    if sampler.uses_score:
        lowest = jnp.full(index.shape, -jnp.inf, jnp.float32)
        return sampler.added(state, index, lowest, contiguous=False)
    return state

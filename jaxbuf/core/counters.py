"""Named counts packed into one array, since each leaf makes a call from Python slower."""

from collections.abc import Mapping, Sequence

import jax.numpy as jnp
from jaxtyping import Array, UInt


def tally(names: Sequence[str], counts: Mapping[str, Array | int]) -> UInt[Array, " K"]:
    """Returns the counts in the order of their names, 0 for a missing one.

    Args:
        names: The names of all counters.
        counts: Counts for some of the names; they wrap at 2**32.

    Raises:
        ValueError: If a count has another name.
    """
    unknown = sorted(set(counts) - set(names))
    if unknown:
        raise ValueError(f"{unknown[0]!r} is counted; expected one of {', '.join(names)}")
    none: Array = jnp.uint32(0)
    return jnp.stack([jnp.asarray(counts.get(name, none)).astype(jnp.uint32) for name in names])


def named(names: Sequence[str], counters: UInt[Array, "*batch K"]) -> dict[str, Array]:
    """Returns each counter by its name."""
    return {name: counters[..., k] for k, name in enumerate(names)}

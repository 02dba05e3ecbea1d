"""Abilities of the buffers in a mixture, which may be of different kinds."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, PyTree


class Ability(NamedTuple):
    """An ability that not all buffers have.

    Attributes:
        test: Returns whether a buffer has the ability.
        missing: The text of the error if no part has it.
    """

    test: Callable[[Any], bool]
    missing: str

    def has(self, buffer: Any) -> bool:
        """Returns whether a buffer, or a part of it, has the ability."""
        if hasattr(buffer, "parts"):
            return any(self.has(part) for part in buffer.parts)
        return self.test(buffer)

    def need(self, buffer: Any, method: str) -> None:
        """Checks that a buffer, or a part of it, has the ability.

        Raises:
            ValueError: If no part has it.
        """
        if not self.has(buffer):
            raise ValueError(f"{method} was called, but {self.missing}")


PRIORITIES = Ability(
    lambda buffer: getattr(getattr(buffer, "sampler", None), "uses_priority", False),
    "no part has priorities; create one of them with sampler=jaxbuf.Prioritized(...)",
)
FRESHNESS = Ability(
    lambda buffer: getattr(buffer, "freshness", None) is not None,
    "no part limits uses or staleness; create one of them with freshness=jaxbuf.Freshness(...)",
)
ENVIRONMENTS = Ability(
    lambda buffer: hasattr(buffer, "num_envs"),
    "no part has environments; make one of them a jaxbuf.TrajectoryBuffer",
)
EPISODES = Ability(
    lambda buffer: getattr(buffer, "episode_index", None) is not None,
    "no part knows its episodes; create a TrajectoryBuffer with episodes=jaxbuf.Episodes()",
)


def num_envs(buffer: Any) -> int:
    """Returns the number of environments of a buffer, or of all its parts; 0 if it has none."""
    if hasattr(buffer, "parts"):
        return sum(num_envs(part) for part in buffer.parts)
    return getattr(buffer, "num_envs", 0)


def choose(own: Bool[Array, " B"], new: PyTree[Array], old: PyTree[Array]) -> PyTree[Array]:
    """Returns the rows ``[B, ...]`` of ``new`` where ``own`` is True, and of ``old`` elsewhere."""

    def leaf(new: Array, old: Array) -> Array:
        return jnp.where(own.reshape(own.shape + (1,) * (new.ndim - own.ndim)), new, old)

    return jax.tree.map(leaf, new, old)

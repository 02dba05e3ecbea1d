"""Which of the buffers in a mixture can do what, for they need not be alike in that."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, PyTree


class Ability(NamedTuple):
    """Something that not all buffers can do.

    Attributes:
        test: Tells whether a buffer can.
        missing: What to say where no part can.
    """

    test: Callable[[Any], bool]
    missing: str

    def has(self, buffer: Any) -> bool:
        """Whether a buffer can do it, or a part of it."""
        if hasattr(buffer, "parts"):
            return any(self.has(part) for part in buffer.parts)
        return self.test(buffer)

    def need(self, buffer: Any, method: str) -> None:
        """Refuse a buffer of which no part can.

        Raises:
            ValueError: If none can.
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
    """Environments of a buffer, or of all its parts together; 0 if it has none."""
    if hasattr(buffer, "parts"):
        return sum(num_envs(part) for part in buffer.parts)
    return getattr(buffer, "num_envs", 0)


def choose(own: Bool[Array, " B"], new: PyTree[Array], old: PyTree[Array]) -> PyTree[Array]:
    """The rows ``[B, ...]`` of ``new`` where they are its own, those of ``old`` elsewhere."""

    def leaf(new: Array, old: Array) -> Array:
        return jnp.where(own.reshape(own.shape + (1,) * (new.ndim - own.ndim)), new, old)

    return jax.tree.map(leaf, new, old)

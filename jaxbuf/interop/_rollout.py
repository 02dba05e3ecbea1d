"""Many steps of environments that run inside JAX."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray, PyTree

from jaxbuf.buffers.common import check_key
from jaxbuf.core.checks import name_of
from jaxbuf.core.sizes import check_count

Carry = TypeVar("Carry")


def rollout(
    step: Callable[[Carry, PRNGKeyArray], tuple[Carry, PyTree[Array]]],
    carry: Carry,
    key: PRNGKeyArray,
    num_steps: int,
) -> tuple[Carry, PyTree[Array]]:
    """Takes ``num_steps`` steps, and returns them in the shape that a ``TrajectoryBuffer`` takes.

    Args:
        step: One step of E environments. It takes their states and a key, and returns the next
            states and the items to store, leaves ``[E, ...]``.
        carry: The states of the environments.
        key: A PRNG key.
        num_steps: Steps ``T``; static.

    Returns:
        The next states, and the items to store, leaves ``[E, T, ...]``. For an
        ``ItemBuffer`` fold both axes into one, ``jax.lax.collapse(leaf, 0, 2)``.

    Raises:
        ValueError: If ``step`` is no function, ``key`` not one key or ``num_steps`` below 1.

    Example:
        >>> import jax, jax.numpy as jnp, jaxbuf
        >>> from jaxbuf.interop import rollout
        >>> def count(position, key):
        ...     return position + 1, {"obs": position}
        >>> position, steps = rollout(count, jnp.array([0, 10]), jax.random.key(0), num_steps=3)
        >>> position.tolist(), steps["obs"].tolist()
        ([3, 13], [[0, 1, 2], [10, 11, 12]])
        >>> buffer = jaxbuf.TrajectoryBuffer.create({"obs": jnp.int32(0)}, num_envs=2, length=100)
        >>> int(buffer.add(steps).size)
        6
    """
    if not callable(step):
        raise ValueError(f"step is {name_of(step)}; expected a function")
    key = check_key(key)
    num_steps = check_count("num_steps", num_steps)
    carry, steps = jax.lax.scan(step, carry, jax.random.split(key, num_steps))
    stored: Any = jax.tree.map(lambda leaf: jnp.swapaxes(leaf, 0, 1), steps)
    return carry, stored

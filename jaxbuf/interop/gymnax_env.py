"""Environments of gymnax, several side by side, and many steps of any that run inside JAX."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, PyTree, Shaped

from jaxbuf.core import trees
from jaxbuf.core.checks import name_of
from jaxbuf.core.random import check_key
from jaxbuf.core.sizes import check_count
from jaxbuf.core.types import Arrays, Key

Carry = TypeVar("Carry")


class GymnaxState(struct.PyTreeNode):
    """The states of E environments.

    Attributes:
        obs: The observations to act on, leaves ``[E, ...]``.
        inner: The states of the simulator, leaves ``[E, ...]``.
    """

    obs: PyTree[Shaped[Array, "E ..."]]
    inner: PyTree


def gymnax_reset(env: Any, params: PyTree, key: Key, num_envs: int) -> GymnaxState:
    """Begins an episode in each of ``num_envs`` environments.

    Args:
        env: An environment of gymnax 1.0 or newer.
        params: Its parameters.
        key: A PRNG key.
        num_envs: The number of environments, E; static.

    Returns:
        The states of the environments, with their first observations.
    """
    obs, inner = jax.vmap(env.reset, in_axes=(0, None))(jax.random.split(key, num_envs), params)
    return GymnaxState(*trees.strongly_typed((obs, inner)))


def gymnax_step(
    env: Any, params: PyTree, key: Key, state: GymnaxState, action: Shaped[Array, "E ..."]
) -> tuple[GymnaxState, dict[str, PyTree]]:
    """Takes one action in each environment; environments whose episode ends begin another one.

    Args:
        env: An environment of gymnax 1.0 or newer.
        params: Its parameters.
        key: A PRNG key.
        state: The states of the environments.
        action: The actions.

    Returns:
        Their next states, and a dict with ``obs``, ``action``, ``reward``, ``terminated``,
        ``truncated`` and ``next_obs``, leaves ``[E, ...]``. ``next_obs`` is what the action led to:
        at the end of an episode its last observation, never the first one of the next.

    gymnax needs JAX's default promotion of dtypes and ranks. The ``with`` of the example is only
    needed in a program that made promotion strict.

    Example:
        >>> import gymnax, jax, jaxbuf
        >>> from jaxbuf.interop import gymnax_reset, gymnax_step, rollout
        >>> env, params = gymnax.make("CartPole-v1")
        >>> def step(state, key):
        ...     action = jax.random.randint(key, (8,), 0, env.num_actions)
        ...     return gymnax_step(env, params, key, state, action)
        >>> with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        ...     state = gymnax_reset(env, params, jax.random.key(0), num_envs=8)
        ...     state, steps = rollout(step, state, jax.random.key(1), num_steps=100)
        >>> example = jax.tree.map(lambda leaf: leaf[0, 0], steps)
        >>> buffer = jaxbuf.TrajectoryBuffer.create(example, num_envs=8, length=1_000)
        >>> int(buffer.add(steps).size)
        800
    """
    keys = jax.random.split(key, jax.tree.leaves(state.obs)[0].shape[0])
    obs, inner, reward, terminated, truncated, info = jax.vmap(env.step, in_axes=(0, 0, 0, None))(
        keys, state.inner, action, params
    )
    transitions = {
        "obs": state.obs,
        "action": action,
        "reward": reward.astype(jnp.float32),
        "terminated": terminated,
        "truncated": truncated,
        "next_obs": trees.strongly_typed(info["final_observation"]),
    }
    return GymnaxState(*trees.strongly_typed((obs, inner))), transitions


def rollout(
    step: Callable[[Carry, Key], tuple[Carry, Arrays]], carry: Carry, key: Key, num_steps: int
) -> tuple[Carry, Arrays]:
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
    return carry, jax.tree.map(lambda leaf: jnp.swapaxes(leaf, 0, 1), steps)

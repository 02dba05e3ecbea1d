"""Environments of gymnax, several side by side."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, PRNGKeyArray, PyTree, Shaped


class GymnaxState(struct.PyTreeNode):
    """The states of E environments.

    Attributes:
        obs: The observations to act on, leaves ``[E, ...]``.
        inner: The states of the simulator, leaves ``[E, ...]``.
    """

    obs: PyTree[Shaped[Array, "E ..."]]
    inner: Any


def gymnax_reset(env: Any, params: Any, key: PRNGKeyArray, num_envs: int) -> GymnaxState:
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
    return GymnaxState(obs=_strongly_typed(obs), inner=_strongly_typed(inner))


def gymnax_step(
    env: Any, params: Any, key: PRNGKeyArray, state: GymnaxState, action: Shaped[Array, "E ..."]
) -> tuple[GymnaxState, dict[str, Any]]:
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
        "next_obs": _strongly_typed(info["final_observation"]),
    }
    return GymnaxState(obs=_strongly_typed(obs), inner=_strongly_typed(inner)), transitions


def _strongly_typed(tree: Any) -> Any:
    # Python numbers in a state trace as weak types, which a scan or a checkpoint turns into
    # strong ones: another trace for the same program.
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype=leaf.dtype), tree)

"""Gymnasium's vector environments, whose episodes end in one of three ways."""

from collections.abc import Mapping
from types import EllipsisType
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Bool, PyTree, Shaped

from jaxbuf.core import numbers, trees

_MODES = ("NextStep", "SameStep", "Disabled")


class VectorStep(NamedTuple):
    """One step of a vector environment, as a replay buffer takes it.

    Attributes:
        transitions: A dict with ``obs``, ``action``, ``reward``, ``terminated``, ``truncated`` and
            ``next_obs``, leaves ``[E, ...]``. ``next_obs`` is what the action led to: at the end of
            an episode its last observation, never the first one of the next.
        mask: True for transitions, False for resets, ``[E]``.
        obs: The observations to act on next, leaves ``[E, ...]``.
        ended: True for episodes that ended with this step, ``[E]``; for the next call.
    """

    transitions: dict[str, PyTree]
    mask: Bool[np.ndarray, " E"]
    obs: PyTree[np.ndarray]
    ended: Bool[np.ndarray, " E"]


def gymnasium_transitions(
    envs: Any,
    obs: PyTree[Shaped[np.ndarray, "E ..."]],
    action: PyTree[Shaped[np.ndarray, "E ..."]],
    result: tuple[PyTree, PyTree, PyTree, PyTree, dict[str, Any]],
    ended: Bool[np.ndarray, " E"] | EllipsisType | None = ...,
) -> VectorStep:
    """Turns a step of a vector environment into transitions.

    When an episode ends, Gymnasium's vector environments do one of three things, as their
    ``autoreset_mode`` says, or their metadata where they have no such attribute. In mode *next
    step*, the default, the observation is the last one of the episode, and the next call of
    ``step`` ignores the action and resets: that row is no transition, and ``mask`` leaves it out.
    In mode *same step*, the observation is the first one of the next episode already, and the last
    one is in the infos, from which ``next_obs`` takes it. If *disabled*, you reset the episodes
    that have ended, with ``envs.reset(options={"reset_mask": step.ended})``, and go on with what
    that returns.

    Args:
        envs: A ``gymnasium.vector.VectorEnv``, of Gymnasium 1.1 or newer.
        obs: The observations that the actions were chosen for, leaves ``[E, ...]``. Mappings of
            any kind and order become dicts in the transitions, and lists of numbers arrays.
        action: The actions, leaves ``[E, ...]``.
        result: The result of ``envs.step(action)``.
        ended: ``VectorStep.ended`` of the step before; None after ``envs.reset``. It must be given
            in mode *next step*, where nothing else tells resets from transitions.

    Raises:
        ValueError: If the environment does not say how it resets, in mode *next step* ``ended`` is
            not given, or in mode *same step* the last observations are not. They are matched with
            the observations by name, and the message names one that is missing.

    Example:
        >>> import gymnasium, jaxbuf
        >>> from jaxbuf.interop import gymnasium_transitions, transition_like
        >>> envs = gymnasium.make_vec("CartPole-v1", num_envs=4, vectorization_mode="sync")
        >>> buffer = jaxbuf.ItemBuffer.create(transition_like(envs), capacity=1_000)
        >>> obs, _ = envs.reset(seed=0)
        >>> _ = envs.action_space.seed(0)
        >>> ended = None
        >>> for _ in range(50):
        ...     action = envs.action_space.sample()
        ...     step = gymnasium_transitions(envs, obs, action, envs.step(action), ended)
        ...     buffer = jaxbuf.add(buffer, step.transitions, mask=step.mask)
        ...     obs, ended = step.obs, step.ended
        >>> resets = 4 * 50 - int(buffer.size)
        >>> resets == int(buffer.data["terminated"].sum()) > 0
        True

    References:
        https://farama.org/Vector-Autoreset-Mode
    """
    next_obs, reward, terminated, truncated, infos = result
    mode = _mode(envs)
    terminated, truncated = np.asarray(terminated, bool), np.asarray(truncated, bool)
    ends = terminated | truncated
    mask = np.ones(ends.shape, bool)
    if mode == "NextStep" and ended is not None:
        if isinstance(ended, EllipsisType):
            raise ValueError(
                "envs reset in the step after the end of an episode, so pass ended, which tells "
                "resets from transitions: None after envs.reset, then step.ended of the step before"
            )
        mask = ~np.asarray(ended, bool)
        if mask.shape != ends.shape:
            raise ValueError(f"ended has shape {mask.shape}; expected {ends.shape}")
    last = _observations(next_obs)
    if mode == "SameStep" and ends.any():
        last = _with_final(last, infos, ends)
    transitions = {
        "obs": _observations(obs),
        "action": action,
        "reward": np.asarray(reward, np.float32),
        "terminated": terminated,
        "truncated": truncated,
        "next_obs": last,
    }
    return VectorStep(transitions, mask, next_obs, ends)


def transition_like(envs: Any) -> dict[str, PyTree[jax.ShapeDtypeStruct]]:
    """Returns the example for a buffer of the transitions of an environment.

    Args:
        envs: An environment of Gymnasium, or a vector of them.

    Returns:
        A dict like ``VectorStep.transitions``, of ``jax.ShapeDtypeStruct`` for one environment.

    Raises:
        ValueError: If observations or actions have no fixed shape, or it is one of gymnax.

    Example:
        >>> import gymnasium
        >>> example = transition_like(gymnasium.make("CartPole-v1"))
        >>> example["obs"].shape, example["action"].dtype
        ((4,), dtype('int32'))
    """
    if callable(getattr(envs, "observation_space", None)):
        raise ValueError(
            "envs is of gymnax; the example is one row of what gymnax_step gives: "
            "jax.tree.map(lambda leaf: leaf[0], rows)"
        )
    spaces = [
        getattr(envs, f"single_{name}_space", None) or getattr(envs, f"{name}_space")
        for name in ("observation", "action")
    ]
    obs, action = (_like(space) for space in spaces)
    flag = jax.ShapeDtypeStruct((), np.bool_)
    return {
        "obs": obs,
        "action": action,
        "reward": jax.ShapeDtypeStruct((), np.float32),
        "terminated": flag,
        "truncated": flag,
        "next_obs": obs,
    }


def _mode(envs: Any) -> str:
    """Returns the autoreset mode of an environment.

    Sync and async vector environments also write it to metadata that all environments of a class
    share, so the metadata has the mode of the newest one; the attribute of an environment is right.
    It is looked up below wrappers, except below one with metadata of its own.
    """
    inner = getattr(envs, "env", None)
    while inner is not None and envs.metadata is inner.metadata:
        envs, inner = inner, getattr(inner, "env", None)
    name = "envs.autoreset_mode"
    mode = getattr(envs, "autoreset_mode", None)
    if mode is None:
        name, mode = "envs.metadata['autoreset_mode']", (envs.metadata or {}).get("autoreset_mode")
    # An enum of Gymnasium, or its value.
    value = getattr(mode, "value", mode)
    if value not in _MODES:
        raise ValueError(
            f"{name} is {mode!r}; expected a mode of gymnasium.vector.AutoresetMode, which vector "
            "environments of Gymnasium 1.1 and newer have there"
        )
    return str(value)


def _with_final(obs: PyTree, infos: dict[str, Any], ended: Bool[np.ndarray, " E"]) -> PyTree:
    """Returns the observations, with the final one where an episode ended."""
    if "final_obs" not in infos:
        raise ValueError(
            "episodes have ended, but infos have no 'final_obs'; vector environments that reset in "
            "the same step give it there"
        )
    final = infos["final_obs"]
    # Sync and async environments give one observation for each environment, others a batch.
    batched = isinstance(final, Mapping) or (isinstance(final, tuple) and isinstance(obs, tuple))

    def fill(path: tuple[Any, ...], leaf: Any) -> Any:
        filled = np.array(leaf)
        for env in np.flatnonzero(ended).tolist():
            root = "infos['final_obs']" + ("" if batched else f"[{env}]")
            value = _follow(final if batched else final[env], path, root)
            value = value[env] if batched else value
            name = f"{root}{jax.tree_util.keystr(path)} of environment {env}"
            shape = np.shape(value)
            if value is None or shape != filled.shape[1:]:
                actual = "None" if value is None else f"of shape {shape}"
                raise ValueError(
                    f"{name} is {actual}; expected shape {filled.shape[1:]}, as in the observations"
                )
            row = numbers.convert(np.asarray(value), name, filled.dtype)
            if row.dtype != filled.dtype:
                raise ValueError(
                    f"{name} is {row.dtype}; expected {filled.dtype}, as in the observations"
                )
            filled[env] = row
        return filled

    return jax.tree_util.tree_map_with_path(fill, obs)


def _follow(tree: Any, path: tuple[Any, ...], name: str) -> Any:
    """Returns the node at a path of JAX's keys; containers on the way may be of other kinds."""
    for i, key in enumerate(path):
        try:
            if hasattr(key, "name"):
                tree = getattr(tree, key.name)
            else:
                tree = tree[key.idx if hasattr(key, "idx") else key.key]
        except (AttributeError, KeyError, IndexError, TypeError) as error:
            raise ValueError(
                f"{name} has no {jax.tree_util.keystr(path[: i + 1])}, which the observations have"
            ) from error
    return tree


def _observations(obs: PyTree) -> PyTree:
    """Returns observations with plain dicts for mappings, and arrays for lists of numbers."""
    return jax.tree.map(
        lambda leaf: np.asarray(leaf) if isinstance(leaf, list) else leaf,
        trees.plain(obs),
        is_leaf=lambda node: isinstance(node, list),
    )


def _like(space: Any) -> PyTree[jax.ShapeDtypeStruct]:
    inner = getattr(space, "spaces", None)
    if isinstance(inner, dict):
        return {name: _like(part) for name, part in inner.items()}
    if isinstance(inner, tuple | list) and space.shape is None:
        return tuple(_like(part) for part in inner)
    if space.shape is None or space.dtype is None:
        raise ValueError(f"{space} has no fixed shape; a buffer holds arrays of one shape")
    return jax.ShapeDtypeStruct(space.shape, jax.dtypes.canonicalize_dtype(space.dtype))

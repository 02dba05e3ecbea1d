"""Gymnasium's vector environments, whose episodes end in one of three ways."""

from collections.abc import Mapping
from types import EllipsisType
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Bool, Int, PyTree, Shaped

from jaxbuf.core import numbers, trees

_MODES = ("NextStep", "SameStep", "Disabled")
# The frames of all games of an environment so far, and those of the present one.
_FRAMES = ("frame_number", "episode_frame_number")


class VectorStep(NamedTuple):
    """One step of a vector environment, as a replay buffer takes it.

    Attributes:
        transitions: A dict with ``obs``, ``action``, ``reward``, ``terminated``, ``truncated`` and
            ``next_obs``, leaves ``[E, ...]``. ``next_obs`` is what the action led to: at the end of
            an episode its last observation, never the first one of the next.
        mask: True for transitions, False for resets, and for rows of which nobody knows whether
            ``next_obs`` is what the action led to, ``[E]``.
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

    ale-py's ``AtariVectorEnv(life_loss_info=True)`` says terminated at each lost life, but resets
    nothing until the game is over. The frames that it counts in the infos tell one from the other,
    by comparison with those of the step before, which ``ended`` brings along.

    Args:
        envs: A ``gymnasium.vector.VectorEnv``, of Gymnasium 1.1 or newer.
        obs: The observations that the actions were chosen for, leaves ``[E, ...]``. Mappings of
            any kind and order become dicts in the transitions, and lists of numbers arrays.
        action: The actions, leaves ``[E, ...]``.
        result: The result of ``envs.step(action)``.
        ended: ``VectorStep.ended`` of the step before; None after ``envs.reset``. It must be given
            in mode *next step*, where nothing else tells resets from transitions. In mode *same
            step* of an ``AtariVectorEnv``, rows at which an episode terminates are masked
            without it.

    Raises:
        ValueError: If the environment does not say how it resets, in mode *next step* ``ended`` is
            not given, or in mode *same step* the last observations are not. They are matched with
            the observations by name, and the message names one that is missing. Or if the results
            are those of some of the environments only, as in the asynchronous mode of envpool and
            of ale-py, where they belong to other observations and actions.

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
    _check_order(envs, infos)
    terminated, truncated = np.asarray(terminated, bool), np.asarray(truncated, bool)
    ends = terminated | truncated
    mask, frames = np.ones(ends.shape, bool), _frames(infos)
    goes_on = _goes_on(ended, frames)
    if mode == "NextStep" and ended is not None:
        if isinstance(ended, EllipsisType):
            raise ValueError(
                "envs reset in the step after the end of an episode, so pass ended, which tells "
                "resets from transitions: None after envs.reset, then step.ended of the step before"
            )
        mask = ~np.asarray(ended, bool)
        if mask.shape != ends.shape:
            raise ValueError(f"ended has shape {mask.shape}; expected {ends.shape}")
        mask = mask if goes_on is None else mask | goes_on
    last = _observations(next_obs)
    if mode == "SameStep" and ends.any():
        replaced = ends
        if "_final_obs" in infos:
            replaced = ends & np.asarray(infos["_final_obs"], bool)
        elif goes_on is not None:
            replaced = ends & ~goes_on
        elif frames is not None:
            mask = truncated | ~ends
        last = _with_final(last, infos, replaced)
    transitions = {
        "obs": _observations(obs),
        "action": action,
        "reward": np.asarray(reward, np.float32),
        "terminated": terminated,
        "truncated": truncated,
        "next_obs": last,
    }
    return VectorStep(transitions, mask, next_obs, _Ended.of(ends, frames))


class _Ended(np.ndarray):
    """``VectorStep.ended``, with what tells in the next step whether a game has gone on.

    Attributes:
        frames: The numbers of ``_FRAMES``, ``[2, E]``; None if the infos do not have them, or where
            NumPy has made an array from this one.
    """

    frames: Int[np.ndarray, "2 E"] | None = None

    @classmethod
    def of(cls, ended: Bool[np.ndarray, " E"], frames: Int[np.ndarray, "2 E"] | None) -> np.ndarray:
        """Returns the flags as they are, or with the frames if there are any."""
        if frames is None:
            return ended
        flags = ended.view(cls)
        flags.frames = frames
        return flags


def _frames(infos: dict[str, Any]) -> Int[np.ndarray, "2 E"] | None:
    """Returns the frames that each environment has counted; None if it does not count them."""
    if not all(_is_native(infos, name) for name in _FRAMES):
        return None
    return np.stack([np.asarray(infos[name]) for name in _FRAMES])


def _goes_on(ended: object, frames: Int[np.ndarray, "2 E"] | None) -> Bool[np.ndarray, " E"] | None:
    """Returns whether each game is that of the step before: both of its counts grew alike."""
    before = getattr(ended, "frames", None)
    if before is None or frames is None or before.shape != frames.shape:
        return None
    total, within = frames - before
    return (total == within) & (within > 0)


def _is_native(infos: dict[str, Any], name: str) -> bool:
    """Returns whether the infos have rows of this name for all environments.

    Gymnasium itself adds a mask to infos that it has collected from single environments.
    """
    return name in infos and f"_{name}" not in infos


def _check_order(envs: Any, infos: dict[str, Any]) -> None:
    """Checks that a result has the rows of all environments, in order.

    Raises:
        ValueError: If it has not.
    """
    if not _is_native(infos, "env_id") or np.asarray(infos["env_id"]).dtype.kind not in "iu":
        return
    ids = np.asarray(infos["env_id"]).reshape(-1)
    every, count = np.arange(ids.size), getattr(envs, "num_envs", None)
    if count == ids.size and not np.array_equal(np.sort(ids), every):
        return  # Names of somebody's own.
    if count not in (None, ids.size) or not np.array_equal(ids, every):
        raise ValueError(
            f"the results are of the environments {ids.tolist()}, and obs and action may be of "
            "others, as in asynchronous mode; create envs with batch_size=num_envs, so that each "
            "step returns all of them in order"
        )


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


def _with_final(obs: PyTree, infos: dict[str, Any], replaced: Bool[np.ndarray, " E"]) -> PyTree:
    """Returns the observations, with the final one where it was replaced."""
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
        for env in np.flatnonzero(replaced).tolist():
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

"""Environments that run inside JAX and do not reset by themselves, and E of them that go on."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Int, PyTree, Shaped

from jaxbuf.core import storage, trees
from jaxbuf.core.checks import kind_of, name_of
from jaxbuf.core.numbers import type_of
from jaxbuf.core.random import check_key
from jaxbuf.core.sizes import check_count
from jaxbuf.core.types import Arrays, Count, Function, Key
from jaxbuf.core.versions import vary_with

_FIRST = ("obs", "state")
_NEXT = ("obs", "state", "reward", "terminated", "truncated")


class EnvState(struct.PyTreeNode):
    """The states of E environments.

    Attributes:
        obs: The observations to act on, leaves ``[E, ...]``.
        inner: The states of the simulator, leaves ``[E, ...]``.
        steps: Steps since the beginning of the episode, ``[E]``.
        waiting: True where an episode has ended and the next one has not begun, ``[E]``.
        turn: The environment whose turn to begin is next.
    """

    obs: PyTree[Shaped[Array, "E ..."]]
    inner: PyTree[Shaped[Array, "E ..."]]
    steps: Int[Array, " E"]
    waiting: Bool[Array, " E"]
    turn: Count


class EnvStep(NamedTuple):
    """A step of E environments.

    Attributes:
        transitions: A dict with ``obs``, ``action``, ``reward``, ``terminated``, ``truncated`` and
            ``next_obs``, leaves ``[E, ...]``.
        mask: The rows to store, ``[E]``; None if all are. Pass it to ``add``.
    """

    transitions: dict[str, PyTree[Shaped[Array, "E ..."]]]
    mask: Bool[Array, " E"] | None


def with_resets(
    reset: Callable[[Key], tuple[Arrays, Arrays]],
    step: Callable[[Key, Any, Any], tuple[Any, Any, Any, Any, Any]],
    *,
    time_limit: int | None = None,
    resets: int | None = None,
) -> tuple[Callable[..., EnvState], Callable[..., tuple[EnvState, EnvStep]]]:
    """Makes E environments that begin their next episodes out of one that does not reset by itself.

    Where an episode ends, ``next_obs`` is its last observation, never the first one of the next,
    and a time limit is told from a failure. Most libraries lose one of the two in their own
    auto-reset: pass their step without it. Jit what you get, or call it in a program of yours.

    Args:
        reset: ``reset(key)`` begins an episode of one environment, and returns ``(obs, state)``.
        step: ``step(key, state, action)`` returns ``(obs, state, reward, terminated, truncated)``.
            Observation, state, action and reward are any pytrees; the flags are bools or numbers.
            If the environment has parameters, close over them; if they are traced, call
            ``with_resets`` in the function that gets them.
        time_limit: Steps after which an episode is truncated, besides those where ``step`` says so;
            static. If it fails in just that step, both flags are True: ``terminated`` alone decides
            whether a value follows.
        resets: The most beginnings to compute in a step, ``k``; static. Without it a step in which
            an episode ends computes one for each of the E environments, most of which are not
            used: costly if resets are. With it environments that have ended wait in turn, at most
            ``ceil(E / k)`` steps. Choose it above E divided by the mean length of an episode, and
            log ``mask.mean()``, the part of the steps that are of use.

    Returns:
        A pair of functions. ``reset(key, num_envs)`` returns an ``EnvState``.
        ``step(key, envs, action)``, with actions ``[E, ...]``, returns the next one and an
        ``EnvStep``. Its mask is None without ``resets``. With it the row of an environment that
        waits has mask False, reward 0, and both flags False.

        ``reset`` and ``step`` split their key into E. The other half of the key of a step goes to
        beginnings: it is split into ``min(k, E)``, one for each environment that begins, in its
        turn; if that is E, each environment has its own.

    Raises:
        ValueError: If ``reset`` or ``step`` is no function, or ``time_limit`` or ``resets`` is
            below 1. From the functions that are returned: if the environment returns something
            else, or a leaf of the observation or the state that differs between ``reset`` and
            ``step``.

    Example:
        >>> import jax, jaxbuf
        >>> from jaxbuf.interop import rollout, with_resets
        >>> def reset(key):
        ...     position = jax.random.randint(key, (), 0, 3)
        ...     return {"position": position}, position
        >>> def step(key, position, action):
        ...     position = position + action
        ...     return {"position": position}, position, 1.0, position >= 5, False
        >>> reset, step = with_resets(reset, step, time_limit=10)
        >>> def act(envs, key):
        ...     act_key, step_key = jax.random.split(key)
        ...     return step(step_key, envs, jax.random.randint(act_key, (8,), 0, 2))
        >>> envs = reset(jax.random.key(0), num_envs=8)
        >>> envs, out = rollout(act, envs, jax.random.key(1), num_steps=100)
        >>> example = jax.tree.map(lambda leaf: leaf[0, 0], out.transitions)
        >>> buffer = jaxbuf.TrajectoryBuffer.create(example, num_envs=8, length=1_000)
        >>> int(buffer.add(out.transitions, mask=out.mask).size)
        800
    """
    for name, function in (("reset", reset), ("step", step)):
        if not callable(function):
            raise ValueError(f"{name} is {name_of(function)}; expected a function")
    if time_limit is not None:
        time_limit = check_count("time_limit", time_limit)
    if resets is not None:
        resets = check_count("resets", resets)

    def first(key: Key, count: int) -> tuple[Arrays, Arrays]:
        return _of_each("reset", reset, _FIRST, jax.random.split(key, count))

    def reset_all(key: Key, num_envs: int) -> EnvState:
        key = check_key(key)
        num_envs = check_count("num_envs", num_envs)
        # A state often has its observation in it, and no array can be donated twice.
        obs, inner = jax.tree.map(jnp.copy, first(key, num_envs))
        steps, waiting = jnp.zeros(num_envs, jnp.int32), jnp.zeros(num_envs, bool)
        return vary_with(EnvState(obs, inner, steps, waiting, jnp.int32(0)), key)

    def step_all(key: Key, envs: EnvState, action: Any) -> tuple[EnvState, EnvStep]:
        envs, action = trees.on_device((envs, action))
        (num_envs,) = envs.steps.shape
        step_key, reset_key = jax.random.split(check_key(key))
        obs, inner, reward, terminated, truncated = _of_each(
            "step", step, _NEXT, jax.random.split(step_key, num_envs), envs.inner, action
        )
        _check_alike("obs", envs.obs, obs)
        _check_alike("state", envs.inner, inner)
        terminated, truncated = _flag("terminated", terminated), _flag("truncated", truncated)
        steps, playing = envs.steps + 1, ~envs.waiting  # [E]
        if time_limit is not None:
            truncated |= steps >= time_limit
        if resets is not None:
            terminated, truncated = terminated & playing, truncated & playing
            reward = trees.choose(playing, reward, jax.tree.map(jnp.zeros_like, reward))
        transitions = {
            "obs": envs.obs,
            "action": action,
            "reward": reward,
            "terminated": terminated,
            "truncated": truncated,
            "next_obs": obs,
        }
        waiting = envs.waiting | terminated | truncated
        most = num_envs if resets is None else min(resets, num_envs)

        def begin(envs: EnvState) -> EnvState:
            new, chosen, turn = first(reset_key, most), envs.waiting, envs.turn
            if most < num_envs:
                # The place in the queue of what waits: it goes in a circle, and begins at `turn`.
                count = jnp.cumsum(chosen, dtype=jnp.int32)  # [E]
                place = (count - 1 - count[turn - 1]) % count[-1]  # [E]
                chosen &= place < most
                last = jnp.argmax(jnp.where(chosen, place, -1)).astype(jnp.int32)
                turn = (last + 1) % num_envs
                new = storage.select(place, new)
            obs, inner = trees.choose(chosen, new, (envs.obs, envs.inner))
            steps = jnp.where(chosen, 0, envs.steps)
            return vary_with(EnvState(obs, inner, steps, envs.waiting & ~chosen, turn), envs)

        envs = vary_with(EnvState(obs, inner, steps, waiting, envs.turn), (key, envs, action))
        envs = jax.lax.cond(waiting.any(), begin, lambda envs: envs, envs)
        return envs, EnvStep(transitions, None if resets is None else playing)

    return reset_all, step_all


def _of_each(name: str, function: Function, values: tuple[str, ...], *arguments: Any) -> Any:
    """Returns what a function of one environment returns for each, leaves ``[E, ...]``."""
    returned = jax.vmap(function)(*arguments)
    if not isinstance(returned, tuple | list) or len(returned) != len(values):
        got = f"{len(returned)} values" if isinstance(returned, tuple | list) else kind_of(returned)
        raise ValueError(f"{name} returned {got}; expected ({', '.join(values)})")
    return trees.strongly_typed(tuple(returned))


def _flag(name: str, value: Any) -> Bool[Array, " E"]:
    shape = type_of(value, name).shape[1:]
    if shape:
        raise ValueError(f"{name} has shape {shape}; expected (), one flag for an environment")
    return value.astype(bool)


def _check_alike(place: str, before: Any, after: Any) -> None:
    """Checks that a tree is like the one before a step.

    Raises:
        ValueError: If the structure, a shape or a dtype differs; the message names the place.
    """
    (old, was), (new, now) = _opened(before), _opened(after)
    for path in old:
        if path in new:
            _check_alike(place + path, old[path], new[path])
    if type(was) is not type(now) or was != now:  # a structure may count as equal to a string
        raise ValueError(f"{place} is {was} after reset, and {now} after step; expected the same")


def _opened(tree: Any) -> tuple[dict[str, Any], object]:
    """Returns the children of a node by path, and its structure; of a leaf its dtype and shape."""
    if jax.tree_util.all_leaves([tree]):
        return {}, f"{tree.dtype}{list(tree.shape[1:])}"
    children, structure = jax.tree_util.tree_flatten_with_path(
        tree, is_leaf=lambda node: node is not tree
    )
    return {jax.tree_util.keystr(path): child for path, child in children}, structure

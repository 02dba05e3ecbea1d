"""Hindsight: learn from goals that were reached as if they had been asked for."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree

from jaxbuf.buffers.common import check_key
from jaxbuf.core import checks, fields, numbers, storage

Strategy = Literal["final", "future", "episode", "random"]
Lookup = Callable[[Int[Array, " B"], Int[Array, " B"]], PyTree[Array]]
Batch = TypeVar("Batch")


def hindsight(
    key: PRNGKeyArray,
    batch: Batch,
    achieved_goals: PyTree[Array] | Lookup,
    t: Int[Array, " B"],
    length: Int[Array, " B"] | None = None,
    *,
    reward_fn: Callable[[Any, Any], Float[Array, "B ..."]],
    strategy: Strategy = "future",
    fraction: float | Float[Array, ""] = 0.8,
    achieved: str = "achieved_goal",
    goal: str | Sequence[str] = "goal",
    reward: str = "reward",
) -> tuple[Batch, Bool[Array, " B"]]:
    """Replace the goals of some sampled transitions by goals that were achieved.

    Row ``t`` of an episode holds the goal that was asked for, an action, and what came of it: the
    reward, and the goal that the action achieved, read off the state *after* it. A relabeled
    transition gets another goal and the reward that ``reward_fn`` gives for it; all else stays,
    and what is not relabeled stays bit for bit as it was. A batch of windows ``[B, L, ...]`` gets
    one goal per window, in every row, so that ``n_step`` returns can be made of it.

    Only data changes: slots, probabilities and importance weights are those of the sample, and
    ``update_priority`` takes its slots as ever. If reaching a goal ends an episode, compute
    ``terminated`` from the goals that come back.

    Args:
        key: A PRNG key.
        batch: Sampled transitions, leaves ``[B, ...]``, or windows, leaves ``[B, L, ...]``: dicts,
            or anything else with named fields.
        achieved_goals: The achieved goals of the whole episodes that the batch was taken from,
            leaves ``[B, T, *goal]``; or, where episodes are no arrays at hand, a function that
            looks them up: it takes rows of the batch and steps of their episodes, both ``[B]``
            int32, and gives leaves ``[B, *goal]``. A ring may have lost the first steps of an
            episode, of which it gives zeros: count ``t``, ``length`` and these steps from the first
            one that is held, ``buffer.episode_begin_position(slots, held=True)``.
        t: Which step of its episode each transition is, or the first of each window; ``[B]``.
        length: Steps of each episode, ``[B]``: ``mask.sum(-1)`` of a padded one. By default all
            ``T``. A row whose ``t`` is not below it is not relabeled.
        reward_fn: Takes the goals achieved by the rows of the batch and those asked for, leaves
            ``[B, *goal]`` or ``[B, L, *goal]``, and gives rewards ``[B]`` or ``[B, L]``.
        strategy: Where new goals come from, each uniformly: ``"final"`` is the last one the episode
            achieved, ``"future"`` one it achieved at ``t`` or later, ``"episode"`` one it achieved
            at any time, and ``"random"`` one that any episode of the batch did.
        fraction: Share of the transitions that are relabeled, each by a coin of its own; the
            paper's ``k`` new goals for every original one are ``k / (k + 1)``. An argument:
            changing it does not retrace.
        achieved: Name of the goals that the batch achieved; dots lead into nested fields.
        goal: Name of the goals asked for, or several names where, say, the next observation holds
            the goal too.
        reward: Name of the rewards, ``[B]`` or ``[B, L]`` floats.

    Returns:
        The batch with new goals and rewards, and which of its rows have them, ``[B]``.

    Raises:
        ValueError: If ``strategy`` is none of these, ``fraction`` is no share, a field is missing,
            ``length`` is missing where ``achieved_goals`` is a function, or the goals, ``t``,
            ``length`` or what ``reward_fn`` gives differ in structure, shape or dtype from what
            the batch asks for.

    Example:
        >>> import jax, jax.numpy as jnp, jaxbuf
        >>> episodes = {
        ...     "achieved_goal": jnp.array([[1, 2, 3, 0], [5, 6, 0, 0]]),
        ...     "goal": jnp.full((2, 4), 9),
        ...     "reward": jnp.full((2, 4), -1.0),
        ... }
        >>> t, length = jnp.array([1, 1]), jnp.array([3, 2])
        >>> batch = jax.tree.map(lambda leaf: leaf[jnp.arange(2), t], episodes)
        >>> batch, relabeled = jaxbuf.hindsight(
        ...     jax.random.key(0), batch, episodes["achieved_goal"], t, length,
        ...     strategy="final", fraction=1.0,
        ...     reward_fn=lambda achieved, goal: jnp.where(achieved == goal, 0.0, -1.0),
        ... )
        >>> batch["goal"].tolist(), batch["reward"].tolist(), relabeled.tolist()
        ([3, 6], [-1.0, 0.0], [True, True])

        Windows of a ``TrajectoryBuffer`` with ``Episodes``, whose goals are looked up. Its ring has
        lost the first two steps of the first episode:

        >>> steps = {
        ...     "achieved_goal": jnp.arange(8)[None],
        ...     "goal": jnp.full((1, 8), 9),
        ...     "reward": jnp.full((1, 8), -1.0),
        ...     "terminated": jnp.arange(8)[None] == 5,
        ... }
        >>> buffer = jaxbuf.TrajectoryBuffer.create(
        ...     jax.tree.map(lambda leaf: leaf[0, 0], steps), num_envs=1, length=6,
        ...     sequence_length=2, episodes=jaxbuf.Episodes(),
        ... )
        >>> buffer = buffer.add(steps)
        >>> sample = buffer.sample(jax.random.key(0), 4)
        >>> env, position = buffer.locate(sample.slots)
        >>> begin = buffer.episode_begin_position(sample.slots, held=True)
        >>> t = (position - begin).astype(jnp.int32)
        >>> batch, relabeled = jaxbuf.hindsight(
        ...     jax.random.key(0),
        ...     sample.data,
        ...     lambda row, step: buffer.get_field(
        ...         "achieved_goal", env[row], begin[row] + step.astype(jnp.uint32)
        ...     ),
        ...     t=t,
        ...     length=t + buffer.steps_to_episode_end(sample.slots) + 1,
        ...     strategy="episode", fraction=1.0,
        ...     reward_fn=lambda achieved, goal: jnp.where(achieved == goal, 0.0, -1.0),
        ... )
        >>> position.tolist(), batch["goal"].tolist()
        ([6, 6, 3, 4], [[7, 7], [6, 6], [5, 5], [5, 5]])

    References:
        Andrychowicz et al., Hindsight Experience Replay, NeurIPS 2017, sections 3.3 and 4.5;
        ``"random"`` draws from the batch, which stands for the whole training there.
    """
    checks.check_choice("strategy", strategy, get_args(Strategy))
    if isinstance(fraction, int | float | np.number) or not hasattr(fraction, "dtype"):
        fraction = checks.check_fraction("fraction", fraction)
    share = storage.check_rows(fraction, "fraction", (), np.float32, "one number")
    if not callable(reward_fn):
        raise ValueError(f"reward_fn is {checks.name_of(reward_fn)}; expected a function")
    check_key(key)
    rewards = _field(batch, reward, "reward")
    if not isinstance(rewards, jax.Array) or rewards.ndim not in (1, 2):
        shape = jax.tree.map(jnp.shape, rewards)
        raise ValueError(f"reward has shape {shape}; expected (B,) or (B, L)")
    now = _field(batch, achieved, "achieved")
    several = isinstance(goal, Sequence) and not isinstance(goal, str | bytes)
    goals = tuple(goal) if several else (checks.check_field("goal", goal),)
    asked = [_field(batch, path, "goal") for path in goals]
    rows = rewards.shape[:1]
    t = _counts(t, "t", rows)
    look_up, length = _episodes(achieved_goals, length, rows)

    coin_key, row_key, step_key = jax.random.split(key, 3)
    own = jnp.arange(*rows, dtype=jnp.int32)
    row = _any_row(row_key, length) if strategy == "random" else own
    if strategy == "final":
        step = length - 1
    else:
        first = t if strategy == "future" else jnp.zeros_like(t)
        last = length.at[row].get(mode="clip")
        step = jax.random.randint(step_key, rows, first, last, jnp.int32)
    coin = jax.random.bernoulli(coin_key, share, rows)
    relabeled = coin & (t >= 0) & (t < length)

    # Rows that are not relabeled may have no such step; what is read for them is not used.
    found = look_up(row, jnp.maximum(step, 0))
    leading = {leaf.shape[:1] for leaf in jax.tree.leaves(found)}
    if leading != {rows}:
        raise ValueError(
            f"achieved_goals gives leaves with leading axes {leading}; expected {rows}"
        )
    for path, old in zip(goals, asked, strict=True):
        batch = fields.replace(batch, path, _relabel(old, found, rewards.shape, relabeled, path))
    _check_goals(now, found, rewards.shape, f"achieved {achieved!r}")
    earned = _earned(reward_fn(now, fields.find(batch, goals[0])), rewards)
    earned = jnp.where(_over(relabeled, rewards), earned, rewards)
    return fields.replace(batch, reward, earned), relabeled


def _any_row(key: PRNGKeyArray, length: Int[Array, " B"]) -> Int[Array, " B"]:
    """Rows, each as likely as its episode is long: all steps of the batch are equally likely."""
    until = jnp.cumsum(jnp.maximum(length, 0).astype(jnp.float32))
    # Not the last element, which an empty batch lacks.
    total = jnp.max(until, initial=0)
    point = jax.random.uniform(key, length.shape, jnp.float32) * total
    return jnp.searchsorted(until, point, side="right").astype(jnp.int32)


def _relabel(
    old: PyTree[Array],
    found: PyTree[Array],
    shape: tuple[int, ...],
    relabeled: Bool[Array, " B"],
    path: str,
) -> PyTree[Array]:
    """The goals at ``path`` with those that were found in their place, where relabeled."""
    _check_goals(old, found, shape, f"goal {path!r}")

    def choose(before: Array, after: Array) -> Array:
        after = after.reshape(shape[:1] + (1,) * (len(shape) - 1) + after.shape[1:])
        return jnp.where(_over(relabeled, before), jnp.broadcast_to(after, before.shape), before)

    return jax.tree.map(choose, old, found)


def _over(mask: Bool[Array, " B"], like: Array) -> Bool[Array, "B ..."]:
    return jnp.broadcast_to(mask.reshape(-1, *(1,) * (like.ndim - 1)), like.shape)


def _episodes(
    achieved_goals: PyTree[Array] | Lookup, length: Any, rows: tuple[int, ...]
) -> tuple[Lookup, Int[Array, " B"]]:
    """How to look a goal up, and how many steps each episode has."""
    if isinstance(achieved_goals, type):
        given = checks.name_of(achieved_goals)
        raise ValueError(f"achieved_goals is {given}; expected arrays, or a function")
    if callable(achieved_goals):
        if length is None:
            raise ValueError("achieved_goals is a function; pass length=[B] as well")
        return achieved_goals, _counts(length, "length", rows)
    stored = numbers.arrays(achieved_goals, "achieved_goals")
    shapes = [leaf.shape[:2] for leaf in jax.tree.leaves(stored)]
    if not shapes or any(len(s) < 2 or s[:1] != rows or s != shapes[0] for s in shapes):
        raise ValueError(
            f"achieved_goals has leaves with leading axes {shapes}; expected ({rows[0]}, T), the "
            "whole episode of each row of the batch"
        )
    steps = shapes[0][1]
    length = jnp.full(rows, steps) if length is None else length

    def look_up(row: Int[Array, " B"], step: Int[Array, " B"]) -> PyTree[Array]:
        return jax.tree.map(lambda leaf: leaf.at[row, step].get(mode="clip"), stored)

    return look_up, jnp.minimum(_counts(length, "length", rows), steps)


def _counts(value: Any, name: str, rows: tuple[int, ...]) -> Int[Array, " B"]:
    array = numbers.array(value, name)
    if array.shape != rows or not jnp.issubdtype(array.dtype, jnp.integer):
        raise ValueError(
            f"{name} is {array.dtype} of shape {array.shape}; expected integers of shape {rows}"
        )
    return array.astype(jnp.int32)


def _check_goals(
    goals: PyTree[Array], found: PyTree[Array], shape: tuple[int, ...], name: str
) -> None:
    """Refuse goals of the batch that are not of the kind that was found."""
    got = jax.tree.map(lambda leaf: f"{leaf.dtype} {leaf.shape}", goals)
    expected = jax.tree.map(lambda leaf: f"{leaf.dtype} {(*shape, *leaf.shape[1:])}", found)
    if got != expected:
        raise ValueError(
            f"{name} is {got}; expected {expected}, like the rewards and achieved_goals"
        )


def _earned(value: Any, rewards: Array) -> Array:
    """What a reward function gave, once it is sure that it fits."""
    earned = jnp.asarray(value)
    if earned.shape != rewards.shape or (earned.dtype != rewards.dtype and not earned.weak_type):
        raise ValueError(
            f"reward_fn gives {earned.dtype} of shape {earned.shape}; expected {rewards.dtype} of "
            f"shape {rewards.shape}, as the rewards are stored"
        )
    return earned.astype(rewards.dtype)


def _field(batch: Any, path: str, name: str) -> Any:
    return numbers.arrays(fields.need(batch, path, name, "the batch has"), name)

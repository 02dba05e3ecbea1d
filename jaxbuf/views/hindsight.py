"""Hindsight: learn from goals that were achieved as if they had been the desired goals."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar, get_args

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from jaxbuf.core import checks, fields, numbers, storage, trees
from jaxbuf.core.random import check_key
from jaxbuf.core.types import Arrays, Index, Integers, Key, Mask, Number

Strategy = Literal["final", "future", "episode", "random", "geometric"]
Lookup = Callable[[Index, Index], Arrays]
Batch = TypeVar("Batch")


def hindsight(
    key: Key,
    batch: Batch,
    achieved_goals: Arrays | Lookup,
    t: Integers,
    length: Integers | None = None,
    *,
    reward_fn: Callable[[Any, Any], Float[Array, "B ..."]],
    strategy: Strategy = "future",
    fraction: float | Number = 0.8,
    discount: float | Number | None = None,
    achieved: str = "achieved_goal",
    goal: str | Sequence[str] = "goal",
    reward: str = "reward",
) -> tuple[Batch, Mask]:
    """Replaces the goals of some sampled transitions by goals that were achieved.

    Row ``t`` of an episode holds the desired goal, an action, the reward, and the goal that the
    action achieved, which is a function of the state *after* it. A relabeled transition gets
    another goal and the reward that ``reward_fn`` returns for it. All other fields, and all other
    transitions, stay the same bit for bit. In a batch of windows ``[B, L, ...]`` all rows of a
    window get the same goal, so ``n_step`` returns can be computed from it.

    Only data changes: slots, probabilities and importance weights remain those of the sample, and
    ``update_priority`` takes its slots as usual. If reaching a goal ends an episode, compute
    ``terminated`` from the returned goals.

    Args:
        key: A PRNG key.
        batch: Sampled transitions, leaves ``[B, ...]``, or windows, leaves ``[B, L, ...]``: a dict,
            or another pytree with named fields.
        achieved_goals: The achieved goals of the episodes of the batch, leaves ``[B, T, *goal]``;
            or a function that looks them up. It takes rows of the batch and steps of their
            episodes, both ``[B]`` int32, and returns leaves ``[B, *goal]``. A ring may have lost
            the first steps of an episode, for which ``get_field`` returns zeros. In that case count
            ``t``, ``length`` and these steps from the first step that the ring still holds,
            ``buffer.episode(slots).held_begin``.
        t: The step of each transition in its episode, or of the first row of each window; ``[B]``.
        length: The number of steps of each episode, ``[B]``, such as ``mask.sum(-1)`` of a padded
            one. The default is ``T``. A row is not relabeled unless ``t < length``.
        reward_fn: A function of the goals that the rows of the batch achieved and of the desired
            goals, leaves ``[B, *goal]`` or ``[B, L, *goal]``. It returns rewards ``[B]`` or
            ``[B, L]`` in the dtype that is stored: only floats may be weakly typed, as those of
            ``jnp.where(reached, 0.0, -1.0)`` are. It is called at each call, and traced with the
            rest of your own ``jax.jit``.
        strategy: The source of new goals, from which they are drawn uniformly: ``"final"`` takes
            the last goal that the episode achieved, ``"future"`` a goal that it achieved at ``t``
            or later, ``"episode"`` a goal that it achieved at any time, and ``"random"`` a goal
            that any episode of the batch achieved. ``"geometric"`` takes a goal achieved at ``t``
            or later, too, but prefers early ones: step ``t + k`` of the ``length - t`` steps left
            has a probability proportional to ``discount ** k``.
        fraction: The probability with which each transition is relabeled. The paper's ``k`` new
            goals for every original one are ``k / (k + 1)``. It may be traced, so changing it does
            not retrace.
        discount: The factor per step of ``"geometric"``, above 0 and at most 1, and only of it. It
            may be traced. With 1 it draws what ``"future"`` draws.
        achieved: Name of the goals that the batch achieved; dots lead into nested fields.
        goal: Name of the goals asked for, or several names where, say, the next observation holds
            the goal too.
        reward: Name of the rewards, ``[B]`` or ``[B, L]``.

    Returns:
        The batch with new goals and rewards, and which of its rows have them, ``[B]``.

    Raises:
        ValueError: If ``strategy`` is not one of these choices, ``fraction`` is not in ``[0, 1]``,
            ``discount`` is not in ``(0, 1]``, missing with ``"geometric"`` or given with another
            strategy, a field is missing, ``length`` is missing although ``achieved_goals`` is a
            function, or the structure, shape or dtype of the goals, ``t``, ``length`` or the output
            of ``reward_fn`` does not match the batch.

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

        Windows of a ``TrajectoryBuffer`` with ``Episodes``, with a function that looks up goals.
        The ring has lost the first two steps of the first episode:

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
        >>> episode = buffer.episode(sample.slots)
        >>> begin = episode.held_begin
        >>> t = (position - begin).astype(jnp.int32)
        >>> batch, relabeled = jaxbuf.hindsight(
        ...     jax.random.key(0),
        ...     sample.data,
        ...     lambda row, step: buffer.get_field(
        ...         "achieved_goal", env[row], begin[row] + step.astype(jnp.uint32)
        ...     ),
        ...     t=t,
        ...     length=t + episode.to_end + 1,
        ...     strategy="episode", fraction=1.0,
        ...     reward_fn=lambda achieved, goal: jnp.where(achieved == goal, 0.0, -1.0),
        ... )
        >>> position.tolist(), batch["goal"].tolist()
        ([6, 6, 3, 4], [[7, 7], [6, 6], [5, 5], [5, 5]])

    References:
        Andrychowicz et al., Hindsight Experience Replay, NeurIPS 2017, sections 3.3 and 4.5;
        ``"random"`` draws from the batch, which stands for the whole training there.

        Eysenbach et al., Contrastive Learning as Goal-Conditioned Reinforcement Learning, NeurIPS
        2022, https://arxiv.org/abs/2206.07568, and JaxGCRL: ``"geometric"``.
    """
    checks.check_choice("strategy", strategy, get_args(Strategy))
    probability = _number(fraction, "fraction", checks.check_fraction)
    factor = None
    if strategy == "geometric":
        factor = _number(discount, "discount", checks.check_step_size)
    elif discount is not None:
        raise ValueError(
            f'discount was given, but strategy is {strategy!r}; only "geometric" uses it'
        )
    if not callable(reward_fn):
        raise ValueError(f"reward_fn is {checks.name_of(reward_fn)}; expected a function")
    key = check_key(key)
    rewards = _field(batch, reward, "reward")
    if not isinstance(rewards, jax.Array) or rewards.ndim not in (1, 2):
        shape = jax.tree.map(jnp.shape, rewards)
        raise ValueError(f"reward has shape {shape}; expected (B,) or (B, L)")
    achieved_now = _field(batch, achieved, "achieved")
    is_sequence = isinstance(goal, Sequence) and not isinstance(goal, str | bytes)
    goals = tuple(goal) if is_sequence else (checks.check_field("goal", goal),)
    old_goals = [_field(batch, path, "goal") for path in goals]
    rows = rewards.shape[:1]
    t = _counts(t, "t", rows)
    look_up, length = _episodes(achieved_goals, achieved_now, length, rows)

    coin_key, row_key, step_key = jax.random.split(key, 3)
    batch_row = jnp.arange(*rows, dtype=jnp.int32)
    row = _any_row(row_key, length) if strategy == "random" else batch_row
    if strategy == "final":
        step = length - 1
    else:
        first = t if strategy in ("future", "geometric") else jnp.zeros_like(t)
        last = length.at[row].get(mode="clip")
        step = jax.random.randint(step_key, rows, first, last, jnp.int32)
        if factor is not None:
            early = t + _geometric(step_key, factor, jnp.maximum(length - t, 1))
            step = jnp.where(factor < 1, early, step)
    coin = jax.random.bernoulli(coin_key, probability, rows)
    relabeled = coin & (t >= 0) & (t < length)

    # Rows that are not relabeled may have no such step; the goals read for them are not used.
    new = look_up(row, jnp.maximum(step, 0))
    leading = {leaf.shape[:1] for leaf in jax.tree.leaves(new)}
    if leading != {rows}:
        raise ValueError(
            f"achieved_goals gives leaves with leading axes {leading}; expected {rows}"
        )
    for path, old in zip(goals, old_goals, strict=True):
        batch = fields.replace(batch, path, _relabel(old, new, rewards.shape, relabeled, path))
    new = trees.match(achieved_now, new)
    _check_goals(achieved_now, new, rewards.shape, f"achieved {achieved!r}")
    new_rewards = _check_rewards(reward_fn(achieved_now, fields.find(batch, goals[0])), rewards)
    new_rewards = jnp.where(_expand(relabeled, rewards), new_rewards, rewards)
    return fields.replace(batch, reward, new_rewards), relabeled


def _number(value: Any, name: str, check: Callable[[str, object], float]) -> Number:
    """Returns one number as float32, after a check unless it is traced."""
    if not isinstance(value, jax.core.Tracer):
        value = check(name, value)
    return storage.check_rows(value, name, (), np.float32, "one number")


def _geometric(key: Key, discount: Number, steps: Integers) -> Integers:
    """Draws ``k`` below ``steps`` in proportion to ``discount ** k``, for a discount below 1."""
    uniform = jax.random.uniform(key, steps.shape, jnp.float32)
    # The inverse of the distribution function (1 - discount ** k) / (1 - discount ** steps).
    rate = jnp.log(jnp.where(discount < 1, discount, 0.5))
    k = jnp.log1p(uniform * jnp.expm1(steps.astype(jnp.float32) * rate)) / rate
    return jnp.clip(jnp.floor(k).astype(jnp.int32), 0, steps - 1)


def _any_row(key: Key, length: Integers) -> Index:
    """Draws rows in proportion to the lengths of their episodes: all steps are equally likely."""
    until = jnp.cumsum(jnp.maximum(length, 0).astype(jnp.float32))
    # An empty batch has no last element.
    total = jnp.max(until, initial=0)
    point = jax.random.uniform(key, length.shape, jnp.float32) * total
    return jnp.searchsorted(until, point, side="right").astype(jnp.int32)


def _relabel(
    old: Arrays, new: Arrays, shape: tuple[int, ...], relabeled: Mask, path: str
) -> Arrays:
    """Returns the goals at ``path``, replaced by the new ones in relabeled rows."""
    new = trees.match(old, new)
    _check_goals(old, new, shape, f"goal {path!r}")

    def choose(before: Array, after: Array) -> Array:
        after = after.reshape(shape[:1] + (1,) * (len(shape) - 1) + after.shape[1:])
        return jnp.where(_expand(relabeled, before), jnp.broadcast_to(after, before.shape), before)

    return jax.tree.map(choose, old, new)


def _expand(mask: Mask, like: Array) -> Bool[Array, "B ..."]:
    return jnp.broadcast_to(mask.reshape(-1, *(1,) * (like.ndim - 1)), like.shape)


def _episodes(
    achieved_goals: Arrays | Lookup, like: Arrays, length: object, rows: tuple[int, ...]
) -> tuple[Lookup, Index]:
    """Returns a function that looks up goals, and the number of steps of each episode."""
    if isinstance(achieved_goals, type):
        kind = checks.name_of(achieved_goals)
        raise ValueError(f"achieved_goals is {kind}; expected arrays, or a function")
    if callable(achieved_goals):
        if length is None:
            raise ValueError("achieved_goals is a function; pass length=[B] as well")
        return achieved_goals, _counts(length, "length", rows)
    goals = numbers.narrow(achieved_goals, "achieved_goals", lambda: like)
    stored = numbers.arrays(goals, "achieved_goals")
    shapes = [leaf.shape[:2] for leaf in jax.tree.leaves(stored)]
    if not shapes or any(len(s) < 2 or s[:1] != rows or s != shapes[0] for s in shapes):
        raise ValueError(
            f"achieved_goals has leaves with leading axes {shapes}; expected ({rows[0]}, T), the "
            "whole episode of each row of the batch"
        )
    steps = shapes[0][1]
    length = jnp.full(rows, steps) if length is None else length

    def look_up(row: Index, step: Integers) -> Arrays:
        return jax.tree.map(lambda leaf: leaf.at[row, step].get(mode="clip"), stored)

    return look_up, jnp.minimum(_counts(length, "length", rows), steps)


def _counts(value: object, name: str, rows: tuple[int, ...]) -> Integers:
    array = numbers.array(value, name)
    if array.shape != rows or not jnp.issubdtype(array.dtype, jnp.integer):
        raise ValueError(
            f"{name} is {array.dtype} of shape {array.shape}; expected integers of shape {rows}"
        )
    return array.astype(jnp.int32)


def _check_goals(goals: Arrays, achieved: Arrays, shape: tuple[int, ...], name: str) -> None:
    """Refuses goals whose structure, shape or dtype differs from that of the achieved goals."""
    got = jax.tree.map(lambda leaf: f"{leaf.dtype} {leaf.shape}", goals)
    expected = jax.tree.map(lambda leaf: f"{leaf.dtype} {(*shape, *leaf.shape[1:])}", achieved)
    if got != expected:
        raise ValueError(
            f"{name} is {got}; expected {expected}, like the rewards and achieved_goals"
        )


def _check_rewards(value: object, rewards: Array) -> Array:
    """Returns the output of a reward function, after checking its shape and dtype."""
    earned = jnp.asarray(numbers.narrow(value, "reward_fn(achieved, goal)", lambda: rewards))
    if earned.shape != rewards.shape or not numbers.computed_as(earned, rewards.dtype):
        raise ValueError(
            f"reward_fn gives {earned.dtype} of shape {earned.shape}; expected {rewards.dtype} of "
            f"shape {rewards.shape}, as the rewards are stored"
        )
    return earned.astype(rewards.dtype)


def _field(batch: Any, path: str, name: str) -> Any:
    return numbers.arrays(fields.need(batch, path, name, "the batch has"), name)

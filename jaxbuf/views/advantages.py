"""Advantages and value targets of windows: GAE and V-trace."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float

from jaxbuf.core import checks, numbers, storage
from jaxbuf.core.describe import Described
from jaxbuf.core.program import program
from jaxbuf.core.types import Arrays, Dtype, Number
from jaxbuf.views import rewarded


class Advantages(Described):
    """Advantages of the actions of a window, and targets for the values of its observations.

    Attributes:
        advantage: Factors of the policy gradient, ``[B, M, ...]`` with the trailing axes of the
            rewards, as has the other attribute.
        target: The values to learn, ``[B, M, ...]``.
    """

    advantage: Float[Array, "B M ..."]
    target: Float[Array, "B M ..."]


@program(static=("reward", "terminated", "truncated", "stop_gradient"))
def gae(
    window: Arrays,
    value: Float[Array, "B L ..."],
    discount: float | Number | Float[Array, "B L ..."],
    lambda_: float | Number,
    *,
    next_value: Float[Array, "B L ..."] | None = None,
    reward: str = "reward",
    terminated: str = "terminated",
    truncated: str | None = None,
    stop_gradient: bool = True,
) -> Advantages:
    """Computes generalized advantage estimates, backwards through every window.

    With ``delta[t] = reward[t] + discount * next_value[t] - value[t]``, the advantage of step ``t``
    is ``delta[t] + discount * lambda_ * advantage[t + 1]``, and its target is ``value[t] +
    advantage[t]``, the λ-return. If the episode ``terminated`` at a step, nothing follows: the next
    value counts as 0. If it was ``truncated`` there, the next value counts, but no later step.

    Row ``t`` of a window holds the observation before an action, and the reward and the flags after
    it, so the observation after row ``t`` is in row ``t + 1``. Without ``next_value``, the value of
    that row is taken, and the last row of a window has no advantage: ``M = L - 1``. After a
    truncation that row belongs to the next episode already. If your time limits truncate episodes,
    store next observations, and pass their values as ``next_value``. Then each row has an
    advantage: ``M = L``.

    Args:
        window: Windows of consecutive steps with leaves ``[B, L, ...]``, such as ``sample.data`` of
            a ``TrajectoryBuffer``, ``dequeue(...).data``, whose rows are environments, or rollouts
            that you collected: a dict, or another pytree with named fields.
        value: The values of the observations, ``[B, L]``, or with the trailing axes of the rewards.
        discount: The factor per step, as for ``jaxbuf.n_step``. It may be traced.
        lambda_: The factor per step that trades variance for bias: 0 looks one step ahead, and 1
            sums all rewards. It may be traced.
        next_value: The values of the next observations, like ``value``.
        reward: As for ``jaxbuf.n_step``.
        terminated: As for ``jaxbuf.n_step``.
        truncated: As for ``jaxbuf.n_step``.
        stop_gradient: Whether the results are constants to ``jax.grad``, as targets of a value and
            factors of a policy gradient are. With False they carry gradients of the rewards,
            ``value`` and ``next_value``, for an actor that learns through the rewards and values of
            imagined or simulated steps. ``discount`` and ``lambda_`` are constants in any case.

    Returns:
        The advantages and the targets, in the dtype of ``value``, at least float32.

    Raises:
        ValueError: If a field is missing, or has the wrong shape or dtype, as have values; if
            windows have one step and ``next_value`` is not given; or if ``stop_gradient`` is no
            bool.

    Example:
        >>> import jax, jax.numpy as jnp, jaxbuf
        >>> window = {
        ...     "reward": jnp.array([[1.0, 2.0, 4.0]]),
        ...     "terminated": jnp.array([[False, True, False]]),
        ... }
        >>> value = jnp.array([[1.0, 3.0, 5.0]])
        >>> estimates = jaxbuf.gae(window, value, discount=0.5, lambda_=0.5)
        >>> estimates.advantage.tolist(), estimates.target.tolist()
        ([[1.25, -1.0]], [[2.25, 2.0]])

        An actor whose rewards are a function of its actions climbs the λ-return:

        >>> def climb(reward):
        ...     steps = {**window, "reward": reward}
        ...     return jaxbuf.gae(steps, value, 0.5, 0.5, stop_gradient=False).target[0, 0]
        >>> jax.grad(climb)(window["reward"]).tolist()
        [[1.0, 0.25, 0.0]]

    References:
        Schulman et al., High-Dimensional Continuous Control Using Generalized Advantage Estimation,
        ICLR 2016, equation 16; with gradients Hafner et al., Dream to Control, ICLR 2020.
    """
    fields = rewarded.read(window, discount, reward, terminated, truncated)
    steps = _with_values(fields, value, next_value)
    trace = _number(lambda_, "lambda_", steps)
    advantage = _backwards(steps.reward + steps.following - steps.value, trace, steps)
    return _results(advantage, steps.value + advantage, stop_gradient)


@program(static=("reward", "terminated", "truncated", "stop_gradient"))
def vtrace(
    window: Arrays,
    value: Float[Array, "B L ..."],
    log_ratio: Float[Array, "B L ..."],
    discount: float | Number | Float[Array, "B L ..."],
    *,
    next_value: Float[Array, "B L ..."] | None = None,
    lambda_: float | Number = 1.0,
    rho_clip: float | Number = 1.0,
    c_clip: float | Number = 1.0,
    reward: str = "reward",
    terminated: str = "terminated",
    truncated: str | None = None,
    stop_gradient: bool = True,
) -> Advantages:
    """Computes V-trace targets and advantages of windows that an older policy has played.

    With ``ratio = exp(log_ratio)``, ``rho = min(rho_clip, ratio)``, ``c = lambda_ * min(c_clip,
    ratio)`` and ``delta[t] = rho[t] * (reward[t] + discount * next_value[t] - value[t])``, the
    target is ``value[t] + delta[t] + discount * c[t] * (target[t + 1] - value[t + 1])``, and the
    advantage ``rho[t] * (reward[t] + discount * target[t + 1] - value[t])``. In place of
    ``target[t + 1]``, the last row of a window has ``next_value[t]``.

    Ends of episodes, and rows, are those of ``gae``: if the episode ``terminated`` at a step,
    nothing follows; if it was ``truncated`` there, ``next_value[t]`` stands for all that follows.

    Args:
        window: As for ``gae``.
        value: As for ``gae``.
        log_ratio: The logarithms of the probabilities of the actions under the policy that is
            learned, minus those under the policy that acted, which you store with the steps. Like
            ``value``.
        discount: As for ``gae``.
        next_value: As for ``gae``.
        lambda_: An additional factor per step, of remark 2 of the paper.
        rho_clip: The largest weight of an error. It decides which policy the values belong to:
            without a limit to the one that is learned.
        c_clip: The largest weight of later errors per step.
        reward: As for ``jaxbuf.n_step``.
        terminated: As for ``jaxbuf.n_step``.
        truncated: As for ``jaxbuf.n_step``.
        stop_gradient: As for ``gae``. The ratios are constants in any case.

    Returns:
        The advantages and the targets, in the dtype of ``value``, at least float32.

    Raises:
        ValueError: As for ``gae``.

    Example:
        >>> import jax.numpy as jnp, jaxbuf
        >>> window = {
        ...     "reward": jnp.array([[1.0, 2.0, 4.0]]),
        ...     "terminated": jnp.array([[False, True, False]]),
        ... }
        >>> value, twice_as_likely = jnp.array([[1.0, 3.0, 5.0]]), jnp.full((1, 3), jnp.log(2.0))
        >>> estimates = jaxbuf.vtrace(window, value, -twice_as_likely, discount=0.5)
        >>> estimates.advantage.tolist(), estimates.target.tolist()
        ([[0.625, -0.5]], [[1.625, 2.5]])

    References:
        Espeholt et al., IMPALA: Scalable Distributed Deep-RL with Importance Weighted Actor-Learner
        Architectures, ICML 2018, section 4.
    """
    fields = rewarded.read(window, discount, reward, terminated, truncated)
    steps = _with_values(fields, value, next_value)
    shape, dtype = fields.reward.shape, steps.value.dtype
    log_ratio = lax.stop_gradient(_rows(log_ratio, "log_ratio", shape, dtype))
    ratio = jnp.exp(log_ratio[:, : steps.value.shape[1]])
    rho = jnp.minimum(ratio, _number(rho_clip, "rho_clip", steps))
    trace = jnp.minimum(ratio, _number(c_clip, "c_clip", steps))
    trace = trace * _number(lambda_, "lambda_", steps)
    delta = rho * (steps.reward + steps.following - steps.value)
    target = steps.value + _backwards(delta, trace, steps)
    # The target of the next row, unless that row is not there, or of another episode.
    later = jnp.concatenate([target[:, 1:], target[:, :1]], axis=1)
    is_last = jnp.arange(target.shape[1]) == target.shape[1] - 1
    ends = steps.ended | rewarded.expand(is_last[None], target.shape)
    following = jnp.where(ends, steps.following, steps.discount * later)
    advantage = rho * (steps.reward + following - steps.value)
    return _results(advantage, target, stop_gradient)


class _Steps(NamedTuple):
    """Rows that have an advantage, all ``[B, M, ...]``."""

    reward: Float[Array, "B M ..."]
    discount: Float[Array, "B M ..."]
    ended: Bool[Array, "B M ..."]
    value: Float[Array, "B M ..."]
    following: Float[Array, "B M ..."]
    """The discounted value of the observation after each row; 0 after a termination."""


def _with_values(steps: rewarded.Rewarded, value: object, next_value: object) -> _Steps:
    shape = steps.reward.shape
    dtype = rewarded.wide(numbers.of_kind(value, "value", np.floating).dtype)
    values = _rows(value, "value", shape, dtype)
    if next_value is not None:
        following = _rows(next_value, "next_value", shape, dtype)
    elif shape[1] < 2:
        raise ValueError("windows have 1 step; expected at least 2, or next_value")
    else:
        values, following = values[:, :-1], values[:, 1:]
        steps = rewarded.Rewarded(*(leaf[:, :-1] for leaf in steps))
    discount = steps.discount.astype(dtype)
    following = jnp.where(steps.terminated, jnp.zeros_like(following), discount * following)
    ended = steps.terminated | steps.truncated
    return _Steps(steps.reward.astype(dtype), discount, ended, values, following)


def _backwards(delta: Array, trace: Array, steps: _Steps) -> Float[Array, "B M ..."]:
    """Returns ``x[t] = delta[t] + discount[t] * trace[t] * x[t + 1]`` within episodes."""
    factor = steps.discount * trace

    def extend(after: Array, row: tuple[Array, Array, Array]) -> tuple[Array, Array]:
        delta, factor, ended = row
        total = delta + jnp.where(ended, jnp.zeros_like(after), factor * after)
        return total, total

    rows = jax.tree.map(lambda leaf: jnp.moveaxis(leaf, 1, 0), (delta, factor, steps.ended))
    _, sums = lax.scan(extend, jnp.zeros_like(rows[0][0]), rows, reverse=True)
    return jnp.moveaxis(sums, 0, 1)


def _rows(array: object, name: str, shape: tuple[int, ...], dtype: Dtype) -> Array:
    """Returns an array with a number for each step, of the shape of the rewards."""
    expected = shape[:2] if numbers.type_of(array, name).shape == shape[:2] else shape
    rows = storage.check_rows(array, name, expected, dtype, "that of reward", gradients=True)
    return rewarded.expand(rows, shape)


def _number(number: object, name: str, steps: _Steps) -> Number:
    return storage.check_rows(number, name, (), steps.value.dtype, "one number")


def _results(advantage: Array, target: Array, stop_gradient: bool) -> Advantages:
    results = Advantages(advantage, target)
    constant = checks.check_flag("stop_gradient", stop_gradient)
    return lax.stop_gradient(results) if constant else results

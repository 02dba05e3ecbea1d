"""n-step returns of sampled windows."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxbuf.core import sizes
from jaxbuf.core.describe import Described
from jaxbuf.core.program import program
from jaxbuf.core.types import Arrays, Count, Number
from jaxbuf.views import rewarded


class NStep(Described):
    """The parts of an n-step target, for each of the ``M = L - n`` starts in a window.

    There is one start, ``M = 1``, if ``n`` is ``L``. The target is ``reward + discount *
    value(observation at bootstrap_index)``.

    Attributes:
        reward: Discounted sum of up to ``n`` rewards, ``[B, M, ...]`` with the trailing axes of the
            rewards, as have the other attributes.
        discount: The factor of the bootstrapped value, ``[B, M]``: 0 if the episode terminated
            within the sum, else ``discount`` to the power of the number of rewards.
        bootstrap_index: The index in the window of the observation after the last of these rewards,
            ``[B, M]`` int32, in ``[1, L - 1]``, or ``L`` if ``n`` is ``L``.
    """

    reward: Float[Array, "B M ..."]
    discount: Float[Array, "B M ..."]
    bootstrap_index: Int[Array, "B M ..."]


@program(static=("n", "reward", "terminated", "truncated"))
def n_step(
    window: Arrays,
    n: int,
    discount: float | Number | Float[Array, "B L ..."],
    *,
    reward: str = "reward",
    terminated: str = "terminated",
    truncated: str | None = None,
) -> NStep:
    """Computes n-step returns for every step of a window that is followed by ``n`` more.

    A return sums ``n`` rewards, or fewer if the episode ends first. If the episode ``terminated``,
    the return has no bootstrapped value; if it was ``truncated``, it bootstraps from the next
    observation. Rewards after the end have no effect.

    Row ``t`` of a window holds the observation before an action, and the reward and the flags after
    it, so the observation after row ``t`` is in row ``t + 1``. After a truncation that row may
    already belong to the next episode. If you bootstrap there, either store the last observation of
    each episode as a separate row, or store next observations with the rows and read them at
    ``bootstrap_index - 1``. With next observations ``n`` may be ``L``; the last one is then read
    at ``L - 1``.

    Rewards of 16 bits are summed in float32. To ``jax.grad``, the sums carry gradients of the
    rewards, and discounts are constants.

    ``Episodes(boundary="avoid")`` pads windows at the end of an episode that terminated. All starts
    in such a window have right targets: those in the padding repeat the last step.

    Args:
        window: Windows of consecutive steps, such as ``sample.data`` of a ``TrajectoryBuffer``: a
            dict, or another pytree with named fields, with leaves ``[B, L, ...]``.
        n: The largest number of rewards in a sum, from 1 to ``L``.
        discount: The factor per step: one number, or one for each step, ``[B, L]``, or with the
            trailing axes of the rewards. It may be traced, so changing it does not retrace.
        reward: Name of the rewards, ``[B, L]`` floats; dots lead into nested fields. They may have
            trailing axes, such as one of agents, ``[B, L, A]``.
        terminated: Name of the flags that an episode ended here, ``[B, L]`` bools, or with the
            trailing axes of the rewards.
        truncated: Name of the flags that an episode was cut off here, likewise. By default
            the field ``truncated`` beside ``terminated``, or else at the top, if the window has
            one. If it has none, no episode is cut off.

    Returns:
        The sums of rewards and the factors of the bootstrapped values, in the dtype of the
        rewards, at least float32; and where to bootstrap from.

    Raises:
        ValueError: If ``n`` is not an integer in ``[1, L]``, or a field is missing or has the
            wrong shape or dtype.

    Example:
        >>> import jax.numpy as jnp, jaxbuf
        >>> window = {
        ...     "reward": jnp.array([[1.0, 1.0, 1.0, 1.0]]),
        ...     "terminated": jnp.array([[False, False, True, False]]),
        ... }
        >>> targets = jaxbuf.n_step(window, n=2, discount=0.5)
        >>> targets.reward.tolist(), targets.discount.tolist(), targets.bootstrap_index.tolist()
        ([[1.5, 1.5]], [[0.25, 0.0]], [[2, 3]])

    References:
        Sutton and Barto, Reinforcement Learning, 2018, chapter 7; Hessel et al., Rainbow, 2018.
    """
    rewards, ends, cuts, factor = rewarded.read(window, discount, reward, terminated, truncated)
    length = rewards.shape[1]
    n = sizes.check_count("n", n)
    if not 1 <= n <= length:
        raise ValueError(
            f"n is {n} and windows have {length} steps; expected 1 <= n < {length}, or n = "
            f"{length} for steps that hold their next observations"
        )
    starts = max(length - n, 1)

    def extend(
        carry: tuple[NStep, Bool[Array, "B M"]], offset: Count
    ) -> tuple[tuple[NStep, Bool[Array, "B M"]], None]:
        so_far, running = carry
        now, end, cut, gamma = (
            lax.dynamic_slice_in_dim(field, offset, starts, axis=1)
            for field in (rewards, ends, cuts, factor)
        )
        total = so_far.reward + so_far.discount * jnp.where(running, now, jnp.zeros_like(now))
        left = jnp.where(end, jnp.zeros_like(gamma), so_far.discount * gamma)
        extended = NStep(
            reward=total,
            discount=jnp.where(running, left, so_far.discount),
            bootstrap_index=so_far.bootstrap_index + running.astype(jnp.int32),
        )
        return (extended, running & ~end & ~cut), None

    # Derived from the rewards, so that it varies over the same devices inside shard_map.
    zeros = jnp.zeros_like(rewards[:, :starts])
    steps = jnp.arange(starts, dtype=jnp.int32)
    empty = NStep(
        reward=zeros,
        discount=jnp.ones_like(zeros),
        bootstrap_index=zeros.astype(jnp.int32) + rewarded.expand(steps[None], zeros.shape),
    )
    offsets = jnp.arange(n, dtype=jnp.int32)
    (result, _), _ = lax.scan(extend, (empty, jnp.ones_like(zeros, bool)), offsets)
    return result

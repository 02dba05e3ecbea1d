"""Gymnax environments as an agent with a replay buffer needs them."""

import dataclasses
import functools
from typing import Any, NamedTuple

import gymnax
import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, Shaped

from jaxbuf.examples._lenient import lenient_promotion
from jaxbuf.interop import GymnaxState, gymnax_reset, gymnax_step

MINATAR = (
    "Asterix-MinAtar",
    "Breakout-MinAtar",
    "Freeway-MinAtar",
    "Seaquest-MinAtar",
    "SpaceInvaders-MinAtar",
)
NAMES = ("CartPole-v1", "Acrobot-v1", "MountainCar-v0", *MINATAR)


class EnvStates(struct.PyTreeNode):
    """Where E running episodes stand.

    Attributes:
        obs: What the agent sees now, ``[E, ...]``.
        inner: The states of the simulator, leaves ``[E, ...]``.
        episode_return: Undiscounted reward since each episode began, ``[E]``.
    """

    obs: Shaped[Array, "E ..."]
    inner: Any
    episode_return: Float[Array, " E"]


class Outcome(NamedTuple):
    """What one action in each of E environments led to.

    Attributes:
        next_obs: The observation after the action, ``[E, ...]``. At the end of an episode it is the
            last one of that episode, not the first of the next.
        reward: ``[E]``.
        terminated: ``[E]``, true where the task itself ended: nothing comes after.
        truncated: ``[E]``, true where only the time limit ended it: a learner bootstraps here.
        episode_return: Undiscounted reward of the episode up to and with this step, ``[E]``.
    """

    next_obs: Shaped[Array, "E ..."]
    reward: Float[Array, " E"]
    terminated: Bool[Array, " E"]
    truncated: Bool[Array, " E"]
    episode_return: Float[Array, " E"]


@dataclasses.dataclass(frozen=True)
class Environments:
    """``num_envs`` copies of one gymnax environment with discrete actions.

    Episodes that end start anew by themselves. Observations of the MinAtar games are stored as
    bool, which is all they hold and a quarter of the memory.

    Args:
        name: One of ``NAMES``.
        num_envs: How many run side by side, E.

    Example:
        >>> import jax
        >>> envs = Environments("CartPole-v1", num_envs=2)
        >>> states = envs.reset(jax.random.key(0))
        >>> states, outcome = envs.step(jax.random.key(1), states, jax.numpy.zeros(2, int))
        >>> outcome.next_obs.shape, outcome.terminated.tolist()
        ((2, 4), [False, False])
    """

    name: str
    num_envs: int

    @property
    def num_actions(self) -> int:
        """How many actions there are."""
        return int(_make(self.name)[0].num_actions)

    @property
    def max_episode_steps(self) -> int:
        """The time limit, in steps."""
        return int(_make(self.name)[1].max_steps_in_episode)

    @property
    def obs_example(self) -> jax.ShapeDtypeStruct:
        """Shape and dtype of the observation of one environment."""
        obs = jax.eval_shape(self.reset, jax.random.key(0)).obs
        return jax.ShapeDtypeStruct(obs.shape[1:], obs.dtype)

    def reset(self, key: PRNGKeyArray) -> EnvStates:
        """Begin an episode in each environment."""
        env, params = _make(self.name)
        with lenient_promotion():
            state = gymnax_reset(env, params, key, self.num_envs)
        return EnvStates(
            obs=self._compact(state.obs),
            inner=state.inner,
            episode_return=jnp.zeros(self.num_envs, jnp.float32),
        )

    def step(
        self, key: PRNGKeyArray, states: EnvStates, action: Int[Array, " E"]
    ) -> tuple[EnvStates, Outcome]:
        """Take one action in each environment.

        Returns:
            The states from which to go on, and what the actions led to.
        """
        env, params = _make(self.name)
        state = GymnaxState(obs=states.obs, inner=states.inner)
        with lenient_promotion():
            state, step = gymnax_step(env, params, key, state, action)
        episode_return = states.episode_return + step["reward"]
        outcome = Outcome(
            next_obs=self._compact(step["next_obs"]),
            reward=step["reward"],
            terminated=step["terminated"],
            truncated=step["truncated"],
            episode_return=episode_return,
        )
        ended = step["terminated"] | step["truncated"]
        states = EnvStates(
            obs=self._compact(state.obs),
            inner=state.inner,
            episode_return=jnp.where(ended, 0.0, episode_return),
        )
        return states, outcome

    def _compact(self, obs: Shaped[Array, "E ..."]) -> Shaped[Array, "E ..."]:
        return obs.astype(jnp.bool_ if self.name in MINATAR else jnp.float32)


@functools.cache
def _make(name: str) -> tuple[Any, Any]:
    # Some environments hold arrays, which must not belong to a trace that happens to come first.
    with jax.ensure_compile_time_eval():
        return gymnax.make(name)

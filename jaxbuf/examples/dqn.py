"""DQN with prioritized replay, its whole training loop one jitted program.

``python -m jaxbuf.examples.dqn`` learns CartPole with four seeds at once. Environment steps, adds,
samples, updates, annealing and the target network all happen inside one ``lax.scan``, which
``vmap`` runs for every seed; Python only calls it, a hundredth of the run at a time, to show
progress and to save.

The agent is double DQN (van Hasselt, Guez and Silver, 2016) with one-step targets and
proportional prioritized replay (Schaul et al., 2016).
"""

import dataclasses
import functools
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jaxtyping import Array, Float, Int, PRNGKeyArray, Shaped

import jaxbuf
from jaxbuf.examples import _cli, _environment, _runner
from jaxbuf.examples._lenient import lenient_promotion
from jaxbuf.examples._network import QNetwork

DESCRIPTION = """Train DQN with prioritized replay on a gymnax environment, several seeds at once.

Shows a progress bar with the return and the environment steps per second of all seeds together;
ends with a table of returns, a picture of the learning curve and a checkpoint. CartPole takes about
a minute on two CPU cores; the MinAtar games take hours there, or a GPU.

  --env Breakout-MinAtar          another environment
  --sampler uniform               the same agent without priorities
  --resume --steps 500_000        train a finished run for longer"""
MAX_GRADIENT = 10.0
# Keeps what the network already predicts exactly from never being drawn again.
PRIORITY_EPSILON = 1e-3
MINATAR_DEFAULTS: dict[str, Any] = {
    "steps": 1_000_000,
    "num_envs": 16,
    "capacity": 100_000,
    "warmup": 5_000,
    "lr": 5e-4,
    "hidden": 128,
}


@dataclasses.dataclass(frozen=True)
class Config:
    """What to train, and how.

    Raises:
        ValueError: When two values do not go together; the message says what to change.
    """

    env: str = _cli.option("CartPole-v1", _cli.choice(_environment.NAMES), "the environment")
    sampler: str = _cli.option(
        "prioritized", _cli.choice(("prioritized", "uniform")), "prioritized or uniform replay"
    )
    seeds: int = _cli.option(4, _cli.integer(1), "how many seeds to train at once")
    seed: int = _cli.option(0, _cli.integer(0), "the first of them")
    steps: int = _cli.option(200_000, _cli.integer(1), "environment steps of each seed")
    num_envs: int = _cli.option(8, _cli.integer(1), "environments side by side in each seed")
    updates: int = _cli.option(1, _cli.integer(1), "learner updates after each of their steps")
    batch_size: int = _cli.option(64, _cli.integer(1), "transitions in an update")
    capacity: int = _cli.option(50_000, _cli.integer(1, 2**30), "transitions in each seed's buffer")
    warmup: int = _cli.option(2_000, _cli.integer(1), "random steps before learning begins")
    alpha: float = _cli.option(0.6, _cli.number(0), "priority exponent; 0 is uniform")
    beta: float = _cli.option(0.4, _cli.number(0, 1), "importance exponent at first; ends at 1")
    lr: float = _cli.option(1e-3, _cli.number(0, above=True), "learning rate, annealed linearly")
    final_lr: float = _cli.option(1e-4, _cli.number(0), "and its value at the end")
    discount: float = _cli.option(0.99, _cli.number(0, 1), "discount per step")
    epsilon: float = _cli.option(0.05, _cli.number(0, 1), "share of random actions after exploring")
    exploration: float = _cli.option(
        0.2, _cli.number(0, 1), "share of the run in which that falls from 1 to --epsilon"
    )
    target_rate: float = _cli.option(
        0.01, _cli.number(0, 1, above=True), "how far each update moves the target network"
    )
    hidden: int = _cli.option(64, _cli.integer(1), "width of each hidden layer")
    eval_episodes: int = _cli.option(32, _cli.integer(1), "greedy episodes per seed at the end")

    @classmethod
    def make(cls, **given: Any) -> "Config":
        """A configuration in which what is not given suits the environment.

        Example:
            >>> Config.make(env="Breakout-MinAtar", seeds=2).hidden
            128
        """
        suited = MINATAR_DEFAULTS if given.get("env") in _environment.MINATAR else {}
        return cls(**{**suited, **given})

    def __post_init__(self) -> None:
        if self.capacity < self.batch_size:
            raise ValueError(
                f"a buffer of --capacity {self.capacity} never holds a batch of --batch-size "
                f"{self.batch_size}; make the capacity at least as large"
            )
        if self.capacity < self.num_envs:
            raise ValueError(
                f"--capacity {self.capacity} is less than one step of --num-envs {self.num_envs}; "
                "make the capacity at least as large"
            )
        if self.warmup < self.batch_size:
            raise ValueError(
                f"--warmup {self.warmup} does not fill a batch of --batch-size {self.batch_size}; "
                "make the warm-up at least as long"
            )
        if self.warmup >= self.steps:
            raise ValueError(
                f"--steps {self.steps} end before learning begins at --warmup {self.warmup}; "
                "ask for more steps or a shorter warm-up"
            )


class TrainState(struct.PyTreeNode):
    """Everything that training changes; all of it goes into a checkpoint.

    Attributes:
        params: Parameters of the Q-network.
        target_params: Their moving average, which the targets use.
        opt_state: State of the optimizer.
        buffer: The replay buffer.
        envs: Where the running episodes stand.
        key: Source of all later randomness.
        step: Environment steps so far, scalar.
    """

    params: Any
    target_params: Any
    opt_state: optax.OptState
    buffer: jaxbuf.ItemBuffer
    envs: _environment.EnvStates
    key: PRNGKeyArray
    step: Int[Array, ""]


@dataclasses.dataclass(frozen=True)
class Agent:
    """Double DQN: pure functions of a ``TrainState``, with what never changes as fields.

    Args:
        config: All settings.
    """

    config: Config

    @property
    def title(self) -> str:
        """Stands above the learning curve."""
        return f"DQN with {self.config.sampler} replay on {self.config.env}"

    @functools.cached_property
    def envs(self) -> _environment.Environments:
        """The environments of one seed."""
        return _environment.Environments(self.config.env, self.config.num_envs)

    @functools.cached_property
    def network(self) -> QNetwork:
        """The Q-network."""
        return QNetwork(self.envs.num_actions, self.config.hidden)

    @functools.cached_property
    def optimizer(self) -> optax.GradientTransformation:
        """Adam with clipped gradients and an annealed learning rate."""
        config = self.config
        updates = (config.steps - config.warmup) * config.updates // config.num_envs
        schedule = optax.linear_schedule(config.lr, config.final_lr, max(updates, 1))
        return optax.chain(optax.clip_by_global_norm(MAX_GRADIENT), optax.adam(schedule))

    def init(self, key: PRNGKeyArray) -> TrainState:
        """A new network, and a buffer filled with ``warmup`` random steps."""
        config = self.config
        key, params_key, envs_key = jax.random.split(key, 3)
        obs = self.envs.obs_example
        transition = {
            "obs": obs,
            "action": jnp.int32(0),
            "reward": jnp.float32(0),
            "terminated": jnp.bool_(False),
            "next_obs": obs,
        }
        sampler = (
            jaxbuf.Prioritized(alpha=config.alpha, epsilon=PRIORITY_EPSILON)
            if config.sampler == "prioritized"
            else jaxbuf.Uniform()
        )
        params = self.network.init(params_key, jnp.zeros((1, *obs.shape), obs.dtype))
        state = TrainState(
            params=params,
            target_params=jax.tree.map(jnp.copy, params),
            opt_state=self.optimizer.init(params),
            buffer=jaxbuf.ItemBuffer.create(transition, config.capacity, sampler=sampler),
            envs=self.envs.reset(envs_key),
            key=key,
            step=jnp.int32(0),
        )
        iterations = -(-config.warmup // config.num_envs)
        return jax.lax.scan(
            lambda state, _: self.interact(state, epsilon=1.0), state, length=iterations
        )[0]

    def train(self, state: TrainState, iterations: int) -> tuple[TrainState, _runner.EpisodeLog]:
        """Alternate interaction and learning, all in one ``lax.scan``.

        Returns:
            The new state, and the episodes that ended on the way.
        """

        def iteration(state: TrainState, _: None) -> tuple[TrainState, _runner.EpisodeLog]:
            # In this order: a buffer that is sampled before it is added to gets copied.
            state, log = self.interact(state, self.epsilon(state.step))
            for _update in range(self.config.updates):
                state = self.learn(state)
            return state, log

        state, logs = jax.lax.scan(iteration, state, length=iterations)
        return state, jax.tree.map(lambda leaf: jnp.sum(leaf, dtype=leaf.dtype), logs)

    def interact(
        self, state: TrainState, epsilon: float | Float[Array, ""]
    ) -> tuple[TrainState, _runner.EpisodeLog]:
        """One ε-greedy step in every environment, added to the buffer."""
        key, action_key, step_key = jax.random.split(state.key, 3)
        action = self.act(state.params, state.envs.obs, epsilon, action_key)
        envs, outcome = self.envs.step(step_key, state.envs, action)
        buffer = state.buffer.add(
            {
                "obs": state.envs.obs,
                "action": action,
                "reward": outcome.reward,
                # Not where the time limit struck: the value of next_obs counts there.
                "terminated": outcome.terminated,
                "next_obs": outcome.next_obs,
            }
        )
        ended = outcome.terminated | outcome.truncated
        log = _runner.EpisodeLog(
            episodes=jnp.sum(ended, dtype=jnp.int32),
            total_return=jnp.sum(jnp.where(ended, outcome.episode_return, 0.0)),
        )
        step = state.step + self.config.num_envs
        return state.replace(buffer=buffer, envs=envs, key=key, step=step), log

    def act(
        self,
        params: Any,
        obs: Shaped[Array, "E ..."],
        epsilon: float | Float[Array, ""],
        key: PRNGKeyArray,
    ) -> Int[Array, " E"]:
        """The best action in each environment, or with probability ``epsilon`` a random one."""
        greedy = jnp.argmax(self.values(params, obs), axis=-1).astype(jnp.int32)
        explore_key, action_key = jax.random.split(key)
        explore = jax.random.uniform(explore_key, greedy.shape) < epsilon
        anything = jax.random.randint(action_key, greedy.shape, 0, self.envs.num_actions)
        return jnp.where(explore, anything, greedy)

    def learn(self, state: TrainState) -> TrainState:
        """One update of the network, of its target and of the priorities."""
        config = self.config
        key, sample_key = jax.random.split(state.key)
        batch = state.buffer.sample(sample_key, config.batch_size)
        weights = jaxbuf.importance_weights(state.buffer, batch, self.beta(state.step))

        def loss_fn(params: Any) -> tuple[Float[Array, ""], Float[Array, " B"]]:
            error = self.td_error(params, state.target_params, batch.data)
            return 0.5 * jnp.mean(weights * error**2), error

        grads, error = jax.grad(loss_fn, has_aux=True)(state.params)
        with lenient_promotion():
            updates, opt_state = self.optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        target_params = optax.incremental_update(params, state.target_params, config.target_rate)
        buffer = state.buffer
        if config.sampler == "prioritized":
            buffer = buffer.update_priority(batch.slots, jnp.abs(error))
        return state.replace(
            params=params,
            target_params=target_params,
            opt_state=opt_state,
            buffer=buffer,
            key=key,
        )

    def values(self, params: Any, obs: Shaped[Array, "B ..."]) -> Float[Array, "B A"]:
        """Of every action, for B observations."""
        values: Any = self.network.apply(params, obs)
        return values

    def td_error(self, params: Any, target_params: Any, data: Any) -> Float[Array, " B"]:
        """Value minus one-step target, the next action chosen by ``params`` (double DQN)."""
        value = _pick(self.values(params, data["obs"]), data["action"])
        best = jnp.argmax(self.values(params, data["next_obs"]), axis=-1)
        next_value = _pick(self.values(target_params, data["next_obs"]), best)
        target = data["reward"] + self.config.discount * jnp.where(
            data["terminated"], 0.0, next_value
        )
        return value - jax.lax.stop_gradient(target)

    def epsilon(self, step: Int[Array, ""]) -> Float[Array, ""]:
        """Share of random actions: from 1 to ``config.epsilon``, then constant."""
        config = self.config
        explored = jnp.minimum(self.progress(step) / max(config.exploration, 1e-6), 1.0)
        return 1.0 + explored * (config.epsilon - 1.0)

    def beta(self, step: Int[Array, ""]) -> Float[Array, ""]:
        """Importance exponent: from ``config.beta`` to 1."""
        return self.config.beta + self.progress(step) * (1.0 - self.config.beta)

    def progress(self, step: Int[Array, ""]) -> Float[Array, ""]:
        """How much of the run is done, from 0 to 1."""
        return jnp.minimum(step.astype(jnp.float32) / self.config.steps, 1.0)

    def evaluate(self, state: TrainState, key: PRNGKeyArray) -> Float[Array, " episodes"]:
        """Returns of ``eval_episodes`` greedy episodes."""
        envs = _environment.Environments(self.config.env, self.config.eval_episodes)

        def iteration(carry: Any, key: PRNGKeyArray) -> tuple[Any, None]:
            states, returns, running = carry
            action = jnp.argmax(self.values(state.params, states.obs), axis=-1)
            states, outcome = envs.step(key, states, action.astype(jnp.int32))
            returns = jnp.where(running, outcome.episode_return, returns)
            running = running & ~(outcome.terminated | outcome.truncated)
            return (states, returns, running), None

        reset_key, step_key = jax.random.split(key)
        states = envs.reset(reset_key)
        start = (states, states.episode_return, jnp.ones(envs.num_envs, jnp.bool_))
        keys = jax.random.split(step_key, envs.max_episode_steps)
        return jax.lax.scan(iteration, start, keys)[0][1]


def _pick(values: Float[Array, "B A"], action: Int[Array, " B"]) -> Float[Array, " B"]:
    return jnp.take_along_axis(values, action[:, None], axis=-1)[:, 0]


def main(argv: Sequence[str] | None = None) -> int:
    """Run this example from the command line and return its exit status."""
    return _runner.main(
        argv,
        example="dqn",
        description=DESCRIPTION,
        options=Config,
        make_config=Config.make,
        make_agent=Agent,
    )


if __name__ == "__main__":
    sys.exit(main())

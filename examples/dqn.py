"""Train DQN with prioritized replay on a gymnax environment, several seeds at once.

CartPole takes about a minute on two CPU cores. Some things to try:
  --sampler uniform               the same agent without priorities
  --n-step 3                      targets of three rewards instead of one
  --resume --steps 500_000        train a finished run for longer
  --env Breakout-MinAtar --steps 1_000_000 --num-envs 16 --warmup 5_000 --capacity 100_000
    --lr 5e-4 --final-lr 1e-4 --hidden 128          a game; takes hours, or a GPU

Ends with a table. Writes, in runs/dqn or where --out says:
  learning_curve.png  return of every seed while training
  log.csv             a hundred times in a run: returns, losses, metrics of the buffer
"""

import dataclasses
import functools
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import struct
from jaxtyping import Array, ArrayLike, Float, Int, PRNGKeyArray, PyTree, Shaped

import common
import jaxbuf
from jaxbuf.interop import GymnaxState, gymnax_reset, gymnax_step

CHUNKS = 100
MinAtar = Literal["Asterix-MinAtar", "Breakout-MinAtar", "Freeway-MinAtar", "SpaceInvaders-MinAtar"]
Name = Literal["CartPole-v1", "Acrobot-v1", "MountainCar-v0", MinAtar]
# Transitions that the network already predicts exactly are still drawn from time to time.
PRIORITY_EPSILON = 1e-3


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of the training."""

    env: Name = "CartPole-v1"  # the environment
    sampler: Literal["prioritized", "uniform"] = "prioritized"  # how to draw from the buffer
    seeds: int = 4  # how many seeds to train at once
    seed: int = 0  # the first of them
    steps: int = 200_000  # environment steps of each seed
    num_envs: int = 8  # environments side by side in each seed
    batch_size: int = 64  # transitions in an update
    n_step: int = 1  # rewards in a target before it bootstraps
    capacity: int = 50_000  # transitions in each seed's buffer
    warmup: int = 2_000  # random steps before learning begins
    alpha: float = 0.6  # priority exponent; 0 is uniform
    beta: float = 0.4  # importance exponent at first; ends at 1
    lr: float = 1e-3  # learning rate, annealed linearly
    final_lr: float = 1e-5  # and its value at the end
    discount: float = 0.99  # discount per step
    epsilon: float = 0.05  # share of random actions after exploring
    exploration: float = 0.2  # share of the run in which that falls from 1 to --epsilon
    target_rate: float = 0.01  # how far each update moves the target network
    hidden: int = 64  # width of each hidden layer
    eval_episodes: int = 32  # greedy episodes of each seed at the end

    def __post_init__(self) -> None:
        common.check(
            self, 1, "seeds", "num_envs", "batch_size", "n_step", "hidden", "eval_episodes"
        )
        common.check(self, 0, "seed", "alpha", "lr", "final_lr")
        common.check(self, 0, "beta", "discount", "epsilon", "exploration", "target_rate", high=1)
        needed = max(self.batch_size, (self.n_step + 1) * self.num_envs)
        common.check(self, needed, "capacity", "warmup")
        common.check(self, self.warmup + 1, "steps")


@functools.cache
def make_env(name: str) -> tuple[Any, Any]:
    """Returns an environment of gymnax and its parameters."""
    # They hold arrays, which must not belong to the first trace that uses them. No array may be
    # made before the processes of dqn_sharded have found each other.
    with jax.ensure_compile_time_eval():
        import gymnax

        return gymnax.make(name)


class Episodes(NamedTuple):
    """The number of episodes that ended, and the sum of their returns."""

    episodes: Int[Array, ""]
    total_return: Float[Array, ""]


def count_episodes(
    episode_return: Float[Array, " E"], steps: Mapping[str, Array]
) -> tuple[Float[Array, " E"], Episodes]:
    """Returns the sums of rewards since each episode began, and the episodes that have ended."""
    ended = steps["terminated"] | steps["truncated"]
    total = episode_return + steps["reward"]
    count = jnp.sum(ended, dtype=jnp.int32)
    log = Episodes(count, jnp.sum(jnp.where(ended, total, 0.0)))
    return jnp.where(ended, 0.0, total), log


class QNetwork(nn.Module):
    """The values of actions, for vectors, or images as in Young and Tian, "MinAtar" (2019)."""

    num_actions: int
    hidden: int

    @nn.compact
    def __call__(self, obs: Shaped[Array, "B ..."]) -> Float[Array, "B A"]:
        """Returns the values of all actions for B observations."""
        x = obs.astype(jnp.float32)
        if x.ndim == 4:
            # A convolution, since nn.Conv is slow under a vmap over parameters.
            x = nn.relu(nn.Dense(16)(patches(x))).reshape(x.shape[0], -1)
        else:
            x = nn.relu(nn.LayerNorm()(nn.Dense(self.hidden)(x)))
        # Normalized, which keeps values from diverging (Gallici et al., 2024).
        x = nn.relu(nn.LayerNorm()(nn.Dense(self.hidden)(x)))
        return nn.Dense(self.num_actions)(x)


def patches(x: Float[Array, "B H W C"]) -> Float[Array, "B H-2 W-2 9*C"]:
    """Returns all 3 × 3 patches of an image."""
    height, width = x.shape[1] - 2, x.shape[2] - 2
    views = [x[:, i : i + height, j : j + width] for i in range(3) for j in range(3)]
    return jnp.concatenate(views, axis=-1)


class TrainState(struct.PyTreeNode):
    """The state that training changes, which is saved in checkpoints."""

    params: PyTree
    target_params: PyTree  # their moving average, which the targets use
    opt_state: optax.OptState
    buffer: jaxbuf.TrajectoryBuffer
    envs: GymnaxState
    episode_return: Float[Array, " E"]  # rewards since each episode began
    key: PRNGKeyArray  # of all later randomness
    step: Int[Array, ""]  # environment steps so far


@dataclasses.dataclass(frozen=True)
class Agent:
    """Double DQN with prioritized replay: pure functions of the ``TrainState`` of one seed."""

    config: Config

    @functools.cached_property
    def network(self) -> Any:
        """The Q-network."""
        return QNetwork(int(make_env(self.config.env)[0].num_actions), self.config.hidden)

    @functools.cached_property
    def optimizer(self) -> optax.GradientTransformation:
        """Adam with clipped gradients and an annealed learning rate."""
        config = self.config
        updates = (config.steps - config.warmup) // config.num_envs
        schedule = optax.linear_schedule(config.lr, config.final_lr, max(updates, 1))
        return optax.chain(optax.clip_by_global_norm(10.0), optax.adam(schedule))

    def init(self, key: PRNGKeyArray) -> TrainState:
        """Returns the state of a new network, with ``warmup`` random steps in the buffer."""
        config = self.config
        key, params_key, envs_key = jax.random.split(key, 3)
        envs = gymnax_reset(*make_env(config.env), envs_key, config.num_envs)
        params = self.network.init(params_key, envs.obs)
        steps = jax.eval_shape(self.step, key, envs, jnp.zeros(config.num_envs, jnp.int32))[1]
        target, opt_state = jax.tree.map(jnp.copy, params), self.optimizer.init(params)
        buffer = self.create_buffer(common.one_of(steps))
        returns = jnp.zeros(config.num_envs, jnp.float32)
        state = TrainState(params, target, opt_state, buffer, envs, returns, key, jnp.int32(0))
        length = math.ceil(config.warmup / config.num_envs)
        return jax.lax.scan(lambda s, _: self.interact(s, 1.0), state, length=length)[0]

    def create_buffer(self, step: PyTree) -> Any:
        """Returns an empty buffer for steps like this one of one environment."""
        sampler = jaxbuf.Prioritized(alpha=self.config.alpha, epsilon=PRIORITY_EPSILON)
        return jaxbuf.TrajectoryBuffer.create(
            step,
            self.config.num_envs,
            self.config.capacity // self.config.num_envs,
            # A transition has one step for each of its rewards, and the step at which it ends.
            sequence_length=self.config.n_step + 1,
            sampler=sampler if self.config.sampler == "prioritized" else jaxbuf.Uniform(),
        )

    def train(self, state: TrainState, iterations: int) -> tuple[TrainState, Episodes, PyTree]:
        """Alternates interaction and learning, in one scan; also returns episodes and metrics."""

        def iteration(state: TrainState, _: None) -> tuple[TrainState, PyTree]:
            # In this order, since a buffer that is sampled before it is added to would be copied.
            state, log = self.interact(state, self.schedules(state.step)[0])
            state, loss = self.learn(state)
            return state, (log, loss)

        state, (logs, losses) = jax.lax.scan(iteration, state, length=iterations)
        log = jax.tree.map(lambda leaf: jnp.sum(leaf, dtype=leaf.dtype), logs)
        return state, log, {"loss": jnp.mean(losses), "buffer": state.buffer.metrics()}

    def interact(self, state: TrainState, epsilon: ArrayLike) -> tuple[TrainState, Episodes]:
        """Takes an ε-greedy step in every environment, and adds it to the buffer."""
        key, action_key, step_key = jax.random.split(state.key, 3)
        action = self.act(state.params, state.envs.obs, epsilon, action_key)
        envs, steps = self.step(step_key, state.envs, action)
        returns, log = count_episodes(state.episode_return, steps)
        state = state.replace(buffer=state.buffer.add(steps), envs=envs, episode_return=returns)
        return state.replace(key=key, step=state.step + self.config.num_envs), log

    def act(self, params: PyTree, obs: Array, epsilon: ArrayLike, key: PRNGKeyArray) -> Array:
        """Returns the best action per environment, or a random one with probability ``epsilon``."""
        greedy = jnp.argmax(self.network.apply(params, obs), axis=-1).astype(jnp.int32)
        explore_key, action_key = jax.random.split(key)
        explore = jax.random.uniform(explore_key, greedy.shape) < epsilon
        anything = jax.random.randint(action_key, greedy.shape, 0, self.network.num_actions)
        return jnp.where(explore, anything, greedy)

    def step(self, key: PRNGKeyArray, envs: GymnaxState, action: Array) -> tuple[GymnaxState, Any]:
        """Takes one action in each environment; returns the next states and the steps to store."""
        envs, steps = gymnax_step(*make_env(self.config.env), key, envs, action)
        # Observations of MinAtar are bits.
        dtype = jnp.bool_ if self.config.env in get_args(MinAtar) else jnp.float32
        return envs, {k: v.astype(dtype) if "obs" in k else v for k, v in steps.items()}

    def learn(self, state: TrainState) -> tuple[TrainState, Float[Array, ""]]:
        """Updates the network, its target and the priorities once; also returns the loss."""
        key, sample_key = jax.random.split(state.key)
        buffer = state.buffer
        batch = buffer.sample(sample_key, self.config.batch_size)
        weights = jaxbuf.importance_weights(buffer, batch, self.schedules(state.step)[1])

        def loss_fn(params: PyTree) -> tuple[Float[Array, ""], Float[Array, " B"]]:
            error = self.td_error(params, state.target_params, batch.data)
            return 0.5 * jnp.mean(weights * error**2), error

        (loss, error), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        updates, opt_state = self.optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        target = optax.incremental_update(params, state.target_params, self.config.target_rate)
        if self.config.sampler == "prioritized":
            buffer = buffer.update_priority(batch.slots, jnp.abs(error))
        state = state.replace(params=params, target_params=target, opt_state=opt_state)
        return state.replace(buffer=buffer, key=key), loss

    def td_error(self, params: PyTree, target_params: PyTree, window: PyTree) -> Float[Array, " B"]:
        """Returns value minus n-step target; ``params`` choose the next action (double DQN)."""
        returns = jaxbuf.n_step(window, self.config.n_step, self.config.discount)
        # The last step of the return, whose "next_obs" is in the same episode.
        last = returns.bootstrap_index[:, 0] - 1
        row = jnp.arange(last.size)
        next_obs = window["next_obs"][row, last]
        value = self.network.apply(params, window["obs"][:, 0])[row, window["action"][:, 0]]
        best = jnp.argmax(self.network.apply(params, next_obs), axis=-1)
        next_value = self.network.apply(target_params, next_obs)[row, best]
        target = returns.reward[:, 0] + returns.discount[:, 0] * next_value
        return value - jax.lax.stop_gradient(target)

    def schedules(self, step: Int[Array, ""]) -> tuple[Array, Array]:
        """Returns ε, which falls from 1 to ``epsilon``, and β, which rises from ``beta`` to 1."""
        config = self.config
        progress = jnp.minimum(step.astype(jnp.float32) / config.steps, 1.0)
        explored = jnp.minimum(progress / max(config.exploration, 1e-6), 1.0)
        return 1.0 + explored * (config.epsilon - 1.0), config.beta + progress * (1.0 - config.beta)


def greedy_returns(agent: Agent, params: PyTree, key: PRNGKeyArray) -> Float[Array, " episodes"]:
    """Returns the returns of ``eval_episodes`` greedy episodes."""

    def iteration(carry: PyTree, key: PRNGKeyArray) -> tuple[PyTree, None]:
        envs, returns, running = carry
        envs, steps = agent.step(key, envs, agent.act(params, envs.obs, 0.0, key))
        returns += jnp.where(running, steps["reward"], 0.0)
        return (envs, returns, running & ~(steps["terminated"] | steps["truncated"])), None

    env, env_params = make_env(agent.config.env)
    reset_key, step_key = jax.random.split(key)
    count = agent.config.eval_episodes
    envs = gymnax_reset(env, env_params, reset_key, count)
    keys = jax.random.split(step_key, env_params.max_steps_in_episode)
    start = (envs, jnp.zeros(count), jnp.ones(count, jnp.bool_))
    return jax.lax.scan(iteration, start, keys)[0][1]


# Cached, so that an agent that runs again in the same process is not compiled again.
@functools.cache
def programs(agent: Agent, length: int) -> tuple[Callable[..., PyTree], ...]:
    """Returns jitted functions that begin a run, go on ``length`` iterations, and evaluate it."""
    chunk = jax.vmap(lambda state: agent.train(state, length))
    return (
        jax.jit(jax.vmap(agent.init)),
        # Donated, so that the buffers are updated in place.
        jax.jit(chunk, donate_argnums=0, compiler_options=jaxbuf.compiler_options()),
        jax.jit(jax.vmap(lambda state, key: greedy_returns(agent, state.params, key))),
    )


def train(run: common.Run[Config]) -> None:
    """Trains all seeds at once, a hundredth of the run at a time, and prints the results."""
    config, keys = run.config, run.keys
    length = math.ceil((config.steps - config.warmup) / config.num_envs / CHUNKS)
    init, chunk, evaluate = programs(Agent(config), length)
    states = run.begin(init, keys)

    def next_chunk(states: TrainState) -> tuple[TrainState, dict[str, PyTree], str]:
        states, log, metrics = chunk(states)
        episodes = np.asarray(log.episodes)
        returns = np.where(episodes, log.total_return / np.maximum(episodes, 1), np.nan)
        return states, {"return": returns, **metrics}, common.mean_return(returns)

    done, size = int(states.step[0]), length * config.num_envs
    count: Any = {"done": done, "until": config.steps, "size": size, "rows": config.seeds}
    states, seconds = run.train(states, next_chunk, **count)
    run.report_returns("DQN", np.asarray(evaluate(states, keys)), seconds, size)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs this example from the command line and returns its exit status."""
    return common.main("dqn", train, Config(), __doc__, argv)


if __name__ == "__main__":
    sys.exit(main())

"""DQN with prioritized replay, whose training loop is one jitted program.

``python -m jaxbuf.examples.dqn`` learns CartPole with four seeds at once. Environment steps, adds,
samples, updates, annealing and the target network all happen inside one ``lax.scan``, which
``vmap`` runs for every seed. Python calls it for a hundredth of the run at a time, to show
progress, to log and to save.

The agent is double DQN (van Hasselt, Guez and Silver, 2016) with n-step targets and
proportional prioritized replay (Schaul et al., 2016).
"""

import dataclasses
import functools
import math
import sys
import time
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import struct
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree, Shaped

import jaxbuf
from jaxbuf.examples import _run
from jaxbuf.interop import GymnaxState, gymnax_reset, gymnax_step

DESCRIPTION = """Train DQN with prioritized replay on a gymnax environment, several seeds at once.

CartPole takes about a minute on two CPU cores. Some things to try:
  --sampler uniform               the same agent without priorities
  --n-step 3                      targets of three rewards instead of one
  --resume --steps 500_000        train a finished run for longer
  --env Breakout-MinAtar --steps 1_000_000 --num-envs 16 --warmup 5_000 --capacity 100_000
    --lr 5e-4 --final-lr 1e-4 --hidden 128          a game; takes hours, or a GPU

Ends with a table. Writes, in runs/dqn or where --out says:
  learning_curve.png  return of every seed while training
  log.csv             a hundred times in a run: returns, losses, metrics of the buffer
  tensorboard/        the same for TensorBoard, with --tensorboard
  checkpoint/         the whole training state, ten times in a run
  run.json            the options"""
EXAMPLE = "dqn"
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
        counts = ("seeds", "num_envs", "batch_size", "n_step", "hidden", "eval_episodes")
        _run.check(self, 1, *counts)
        _run.check(self, 0, "seed", "alpha", "lr", "final_lr")
        _run.check(self, 0, "beta", "discount", "epsilon", "exploration", "target_rate", high=1)
        _run.check(
            self, max(self.batch_size, (self.n_step + 1) * self.num_envs), "capacity", "warmup"
        )
        _run.check(self, self.warmup + 1, "steps")


class QNetwork(nn.Module):
    """A network with one value for each of ``num_actions``, for vectors or images.

    Vectors go through two hidden layers; images ``[H, W, C]`` through one 3 × 3 convolution with 16
    features and one hidden layer (Young and Tian, "MinAtar", 2019). Hidden layers are normalized,
    which keeps values from diverging (Gallici et al., "Simplifying Deep Temporal Difference
    Learning", 2024).
    """

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
        x = nn.relu(nn.LayerNorm()(nn.Dense(self.hidden)(x)))
        return nn.Dense(self.num_actions)(x)


def patches(x: Float[Array, "B H W C"]) -> Float[Array, "B H-2 W-2 9*C"]:
    """Returns all 3 × 3 patches of an image."""
    height, width = x.shape[1] - 2, x.shape[2] - 2
    views = [x[:, i : i + height, j : j + width] for i in range(3) for j in range(3)]
    return jnp.concatenate(views, axis=-1)


class EpisodeLog(NamedTuple):
    """The number of episodes that ended, and the sum of their returns."""

    episodes: Int[Array, ""]
    total_return: Float[Array, ""]


class TrainState(struct.PyTreeNode):
    """The state that training changes, which is saved in checkpoints.

    Attributes:
        params: Parameters of the Q-network.
        target_params: Their moving average, which the targets use.
        opt_state: State of the optimizer.
        buffer: The replay buffer.
        envs: State of the environments.
        episode_return: Sum of rewards since each episode began, ``[E]``.
        key: The PRNG key of all later randomness.
        step: Number of environment steps so far, scalar.
    """

    params: Any
    target_params: Any
    opt_state: optax.OptState
    buffer: jaxbuf.TrajectoryBuffer
    envs: GymnaxState
    episode_return: Float[Array, " E"]
    key: PRNGKeyArray
    step: Int[Array, ""]


@functools.cache
def make_env(name: str) -> tuple[Any, Any]:
    """Returns an environment of gymnax and its parameters."""
    # Some environments and gymnax itself hold arrays, which must not belong to the first trace that
    # uses them. No array may be made before the processes of dqn_sharded have found each other.
    with jax.ensure_compile_time_eval():
        import gymnax

        return gymnax.make(name)


@dataclasses.dataclass(frozen=True)
class Agent:
    """Double DQN: pure functions of a ``TrainState``."""

    config: Config

    @functools.cached_property
    def network(self) -> QNetwork:
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
        action = jnp.zeros(config.num_envs, jnp.int32)
        steps = jax.eval_shape(self.step, key, envs, action)[1]
        example = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), steps)
        state = TrainState(
            params=params,
            target_params=jax.tree.map(jnp.copy, params),
            opt_state=self.optimizer.init(params),
            buffer=self.create_buffer(example),
            envs=envs,
            episode_return=jnp.zeros(config.num_envs, jnp.float32),
            key=key,
            step=jnp.int32(0),
        )
        iterations = math.ceil(config.warmup / config.num_envs)
        return jax.lax.scan(lambda s, _: self.interact(s, 1.0), state, length=iterations)[0]

    def create_buffer(self, step: PyTree) -> Any:
        """Returns an empty buffer for steps like this one of one environment."""
        config = self.config
        sampler = jaxbuf.Prioritized(alpha=config.alpha, epsilon=PRIORITY_EPSILON)
        return jaxbuf.TrajectoryBuffer.create(
            step,
            config.num_envs,
            config.capacity // config.num_envs,
            # A transition has one step for each of its rewards, and the step at which it ends.
            sequence_length=config.n_step + 1,
            sampler=sampler if config.sampler == "prioritized" else jaxbuf.Uniform(),
        )

    def train(
        self, state: TrainState, iterations: int
    ) -> tuple[TrainState, EpisodeLog, dict[str, Any]]:
        """Alternates interaction and learning, all in one ``lax.scan``.

        Returns:
            The new state, the episodes that ended on the way, and metrics: the mean loss, and the
            metrics of the buffer at the end.
        """

        def iteration(state: TrainState, _: None) -> tuple[TrainState, Any]:
            # In this order, since a buffer that is sampled before it is added to would be copied.
            state, log = self.interact(state, self.epsilon(state.step))
            state, loss = self.learn(state)
            return state, (log, loss)

        state, (logs, losses) = jax.lax.scan(iteration, state, length=iterations)
        log = jax.tree.map(lambda leaf: jnp.sum(leaf, dtype=leaf.dtype), logs)
        return state, log, {"loss": jnp.mean(losses), "buffer": state.buffer.metrics()}

    def interact(
        self, state: TrainState, epsilon: float | Float[Array, ""]
    ) -> tuple[TrainState, EpisodeLog]:
        """Takes an ε-greedy step in every environment, and adds it to the buffer."""
        key, action_key, step_key = jax.random.split(state.key, 3)
        action = self.act(state.params, state.envs.obs, epsilon, action_key)
        envs, steps = self.step(step_key, state.envs, action)
        ended = steps["terminated"] | steps["truncated"]
        episode_return = state.episode_return + steps["reward"]
        state = state.replace(
            buffer=state.buffer.add(steps),
            envs=envs,
            episode_return=jnp.where(ended, 0.0, episode_return),
            key=key,
            step=state.step + self.config.num_envs,
        )
        episodes = jnp.sum(ended, dtype=jnp.int32)
        return state, EpisodeLog(episodes, jnp.sum(jnp.where(ended, episode_return, 0.0)))

    def act(
        self, params: Any, obs: Array, epsilon: float | Float[Array, ""], key: PRNGKeyArray
    ) -> Int[Array, " E"]:
        """Returns the best action per environment, or a random one with probability ``epsilon``."""
        greedy = jnp.argmax(self.values(params, obs), axis=-1).astype(jnp.int32)
        explore_key, action_key = jax.random.split(key)
        explore = jax.random.uniform(explore_key, greedy.shape) < epsilon
        anything = jax.random.randint(action_key, greedy.shape, 0, self.network.num_actions)
        return jnp.where(explore, anything, greedy)

    def step(
        self, key: PRNGKeyArray, envs: GymnaxState, action: Int[Array, " E"]
    ) -> tuple[GymnaxState, dict[str, Any]]:
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
        weights = jaxbuf.importance_weights(buffer, batch, self.beta(state.step))

        def loss_fn(params: Any) -> tuple[Float[Array, ""], Float[Array, " B"]]:
            error = self.td_error(params, state.target_params, batch.data)
            return 0.5 * jnp.mean(weights * error**2), error

        (loss, error), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        updates, opt_state = self.optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        rate = self.config.target_rate
        target_params = optax.incremental_update(params, state.target_params, rate)
        if self.config.sampler == "prioritized":
            buffer = buffer.update_priority(batch.slots, jnp.abs(error))
        state = state.replace(
            params=params,
            target_params=target_params,
            opt_state=opt_state,
            buffer=buffer,
            key=key,
        )
        return state, loss

    def td_error(self, params: Any, target_params: Any, window: Any) -> Float[Array, " B"]:
        """Returns value minus n-step target; ``params`` choose the next action (double DQN)."""
        returns = jaxbuf.n_step(window, self.config.n_step, self.config.discount)
        # The last step of the return, whose "next_obs" is in the same episode.
        last = returns.bootstrap_index[:, 0] - 1
        row = jnp.arange(last.size)
        next_obs = window["next_obs"][row, last]
        value = self.values(params, window["obs"][:, 0])[row, window["action"][:, 0]]
        best = jnp.argmax(self.values(params, next_obs), axis=-1)
        next_value = self.values(target_params, next_obs)[row, best]
        target = returns.reward[:, 0] + returns.discount[:, 0] * next_value
        return value - jax.lax.stop_gradient(target)

    def values(self, params: Any, obs: Shaped[Array, "B ..."]) -> Float[Array, "B A"]:
        """Returns the values of all actions."""
        values: Any = self.network.apply(params, obs)
        return values

    def epsilon(self, step: Int[Array, ""]) -> Float[Array, ""]:
        """Returns the share of random actions, which falls from 1 to ``config.epsilon``."""
        explored = jnp.minimum(self.progress(step) / max(self.config.exploration, 1e-6), 1.0)
        return 1.0 + explored * (self.config.epsilon - 1.0)

    def beta(self, step: Int[Array, ""]) -> Float[Array, ""]:
        """Returns the importance exponent, which rises from ``config.beta`` to 1."""
        return self.config.beta + self.progress(step) * (1.0 - self.config.beta)

    def progress(self, step: Int[Array, ""]) -> Float[Array, ""]:
        """Returns the share of the run that is done."""
        return jnp.minimum(step.astype(jnp.float32) / self.config.steps, 1.0)

    def evaluate(self, state: TrainState, key: PRNGKeyArray) -> Float[Array, " episodes"]:
        """Plays ``eval_episodes`` greedy episodes, and gives the return of each."""

        def iteration(carry: Any, key: PRNGKeyArray) -> tuple[Any, None]:
            envs, returns, running = carry
            action = jnp.argmax(self.values(state.params, envs.obs), axis=-1).astype(jnp.int32)
            envs, steps = self.step(key, envs, action)
            returns += jnp.where(running, steps["reward"], 0.0)
            return (envs, returns, running & ~(steps["terminated"] | steps["truncated"])), None

        env, params = make_env(self.config.env)
        reset_key, step_key = jax.random.split(key)
        count = self.config.eval_episodes
        envs = gymnax_reset(env, params, reset_key, count)
        keys = jax.random.split(step_key, params.max_steps_in_episode)
        start = (envs, jnp.zeros(count), jnp.ones(count, jnp.bool_))
        return jax.lax.scan(iteration, start, keys)[0][1]


# Cached, so that an agent that runs again in the same process is not compiled again.
@functools.cache
def programs(agent: Agent, length: int) -> tuple[Any, Any, Any]:
    """Returns jitted functions that begin, train and evaluate a run, for all seeds at once."""
    chunk = jax.vmap(lambda state: agent.train(state, length))
    return (
        jax.jit(jax.vmap(agent.init)),
        # Donated, so that the buffers are updated in place.
        jax.jit(chunk, donate_argnums=0, compiler_options=jaxbuf.compiler_options()),
        jax.jit(jax.vmap(agent.evaluate)),
    )


def train(run: _run.Run[Config]) -> None:
    """Trains all seeds, and prints the results."""
    began = time.perf_counter()
    config = run.config
    length = math.ceil((config.steps - config.warmup) / config.num_envs / CHUNKS)
    init, chunk, evaluate = programs(Agent(config), length)
    keys = jnp.stack([jax.random.key(config.seed + i) for i in range(config.seeds)])
    states = run.load(jax.eval_shape(init, keys)) if run.resume else init(keys)

    def next_chunk(states: TrainState) -> tuple[TrainState, dict[str, Any], str]:
        states, log, metrics = chunk(states)
        episodes = np.asarray(log.episodes)
        returns = np.where(episodes, log.total_return / np.maximum(episodes, 1), np.nan)
        known = returns[~np.isnan(returns)]
        shown = f"return {known.mean():.1f}" if known.size else ""
        return states, {"return": returns, **metrics}, shown

    size = length * config.num_envs
    done = int(states.step[0])
    states, seconds = run.train(
        states,
        next_chunk,
        done=done,
        until=config.steps,
        size=size,
        unit="steps",
        rows=config.seeds,
    )
    greedy = np.asarray(evaluate(states, keys)).mean(axis=1)

    steps, returns = run.logged("step"), run.logged("return")
    _run.plot(
        run.out / "learning_curve.png",
        steps,
        {"": returns},
        title=f"DQN with {config.sampler} replay on {config.env}",
        xlabel="environment steps per seed",
        ylabel="return while training",
    )
    late = (
        np.ma.masked_invalid(returns[-math.ceil(len(returns) / 10) :]).mean(axis=0).filled(np.nan)
    )
    step = int(steps[-1])
    rows = [
        [str(config.seed + i), f"{greedy[i]:.1f}", f"{late[i]:.1f}", f"{step:,}", "", ""]
        for i in range(config.seeds)
    ]
    # The first chunk is mostly compilation.
    measured = seconds[1:] or seconds
    speed = f"{len(measured) * size * config.seeds / sum(measured):,.0f}" if measured else "-"
    total = [f"{greedy.mean():.1f}", f"{late.mean():.1f}", f"{step * config.seeds:,}", speed]
    header = ["seed", "greedy return", "return in training", "steps", "steps/s", "time"]
    print(_run.table(header, [*rows, ["all", *total, f"{time.perf_counter() - began:.1f} s"]]))
    print(f"learning curve, log and checkpoint are in {run.out}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run this example from the command line and return its exit status."""
    return _run.main(EXAMPLE, train, Config(), DESCRIPTION, argv)


if __name__ == "__main__":
    sys.exit(main())

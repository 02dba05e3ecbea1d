"""Train SAC on a Gymnasium environment with continuous actions.

Pendulum takes less than a minute on two CPU cores. Some things to try:
  --sampler prioritized           the same agent with priorities
  --resume --steps 50_000         train a finished run for longer, beginning with new episodes
  --env HalfCheetah-v5 --steps 1_000_000 --num-envs 1 --updates 1 --warmup 10_000 --lr 3e-4
    --batch-size 256 --hidden 256 --capacity 1_000_000      needs gymnasium[mujoco]; takes hours

Ends with a table. Writes, in runs/sac or where --out says:
  learning_curve.png  return while training
  log.csv             a hundred times in a run: returns, losses, metrics of the buffer
"""

import dataclasses
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, Literal

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import struct
from gymnasium.spaces import Box
from gymnasium.wrappers.vector import FlattenObservation, RescaleAction
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree, Shaped

import common
import jaxbuf
from jaxbuf.interop import gymnasium_transitions, transition_like

CHUNKS = 100


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of the training."""

    env: str = "Pendulum-v1"  # any environment whose actions are vectors with bounds
    sampler: Literal["uniform", "prioritized"] = "uniform"  # how to draw from the buffer
    seed: int = 0  # source of all randomness
    steps: int = 20_000  # environment steps
    num_envs: int = 4  # environments side by side
    updates: int = 4  # updates after a step of all of them
    batch_size: int = 128  # transitions in an update
    capacity: int = 100_000  # transitions in the buffer
    warmup: int = 1_000  # random steps before learning begins
    alpha: float = 0.6  # priority exponent; 0 is uniform
    beta: float = 0.4  # importance exponent
    lr: float = 1e-3  # learning rate
    discount: float = 0.99  # discount per step
    target_rate: float = 0.005  # how far each update moves the target critics
    hidden: int = 64  # width of each hidden layer
    eval_episodes: int = 32  # greedy episodes at the end

    def __post_init__(self) -> None:
        common.check(self, 1, "num_envs", "updates", "batch_size", "hidden", "eval_episodes")
        common.check(self, 0, "seed", "alpha", "lr")
        common.check(self, 0, "beta", "discount", "target_rate", high=1)
        common.check(self, max(self.batch_size, self.num_envs), "capacity", "warmup")
        common.check(self, self.warmup + 1, "steps")
        make_envs(self.env, 1).close()


def make_envs(name: str, count: int) -> Any:
    """Returns environments whose observations are vectors, and whose actions are from -1 to 1."""
    try:
        envs = gymnasium.make_vec(name, count, vectorization_mode="sync")
    except (gymnasium.error.Error, ImportError) as error:
        raise ValueError(f"--env is {name}, which cannot be made: {error}") from error
    space = envs.single_action_space
    if not isinstance(space, Box) or not space.is_bounded() or len(space.shape) != 1:
        raise ValueError(f"--env is {name}, with actions {space}; expected a bounded vector")
    bound: Any = np.float32(1)
    return RescaleAction(FlattenObservation(envs), -bound, bound)


class Network(nn.Module):
    """Two hidden layers, and as many ``outputs`` as asked for."""

    hidden: int
    outputs: int

    @nn.compact
    def __call__(self, *inputs: Shaped[Array, "B _"]) -> Float[Array, "B O"]:
        """Returns the outputs for B rows of all inputs."""
        x = jnp.concatenate(inputs, axis=-1).astype(jnp.float32)
        for _ in range(2):
            x = nn.relu(nn.Dense(self.hidden)(x))
        return nn.Dense(self.outputs)(x)


class TrainState(struct.PyTreeNode):
    """The state that training changes, which is saved in checkpoints."""

    params: dict[str, PyTree]  # of the actor and both critics, and the log of the temperature
    target: PyTree  # the critics' moving average
    opt_state: optax.OptState
    buffer: jaxbuf.ItemBuffer
    key: PRNGKeyArray  # of all later randomness
    act_key: PRNGKeyArray  # of the next actions
    step: Int[Array, ""]  # environment steps so far


class Agent:
    """Soft actor-critic with two critics and a learned temperature (Haarnoja et al., 2018).

    Environments run in an ordinary Python loop, and all else in two jitted functions: ``act``
    chooses actions, and ``learn`` adds a step of all environments to the buffer, samples and
    updates. The buffer is in the state that ``learn`` donates, so it is updated in place.
    """

    def __init__(self, config: Config, transition: dict[str, PyTree]) -> None:
        self.config, self.transition = config, transition
        # The actor returns means and log standard deviations, before the tanh.
        self.actor: Any = Network(config.hidden, 2 * transition["action"].size)
        self.critic: Any = Network(config.hidden, 1)
        self.optimizer = optax.adam(config.lr)
        self.act = jax.jit(lambda params, obs, key: self.draw(params["actor"], obs, key)[0])
        options: Any = {"donate_argnums": 0, "compiler_options": jaxbuf.compiler_options()}
        self.learn = jax.jit(self.add_and_update, static_argnames="updates", **options)

    def init(self) -> TrainState:
        """Returns the state of new networks, and an empty buffer."""
        config, like = self.config, self.transition
        keys = jax.random.split(jax.random.key(config.seed), 5)
        obs, action = (jnp.zeros((1, *like[name].shape)) for name in ("obs", "action"))
        critics = jax.vmap(lambda key: self.critic.init(key, obs, action))(keys[:2])
        params = {"actor": self.actor.init(keys[2], obs), "critics": critics}
        params["log_temperature"] = jnp.float32(0)
        prioritized = jaxbuf.Prioritized(alpha=config.alpha, epsilon=1e-3)
        sampler = prioritized if config.sampler == "prioritized" else jaxbuf.Uniform()
        buffer = jaxbuf.ItemBuffer.create(like, config.capacity, sampler=sampler)
        target, opt_state = jax.tree.map(jnp.copy, critics), self.optimizer.init(params)
        return TrainState(params, target, opt_state, buffer, keys[3], keys[4], jnp.int32(0))

    def draw(self, actor: PyTree, obs: Array, key: PRNGKeyArray | None) -> tuple[Array, Array]:
        """Returns actions and their log probabilities; without a key the most likely actions."""
        mean, log_std = jnp.split(self.actor.apply(actor, obs), 2, axis=-1)
        log_std = 3.5 * jnp.tanh(log_std) - 1.5  # from -5 to 2
        noise = jnp.zeros_like(mean) if key is None else jax.random.normal(key, mean.shape)
        x = mean + jnp.exp(log_std) * noise
        log_prob = -0.5 * noise**2 - log_std - 0.5 * math.log(2 * math.pi)
        # The log of the slope of tanh, in a form that is finite far away from 0 as well.
        log_prob -= 2 * (math.log(2) - x - nn.softplus(-2 * x))
        return jnp.tanh(x), jnp.sum(log_prob, axis=-1)

    def value(self, critics: PyTree, obs: Array, action: Array) -> Float[Array, "2 B"]:
        """Returns the values of actions, according to each critic."""
        return jax.vmap(self.critic.apply, (0, None, None))(critics, obs, action)[..., 0]

    def add_and_update(
        self, state: TrainState, transitions: dict[str, Array], mask: Array, updates: int
    ) -> tuple[TrainState, dict[str, Array]]:
        """Adds a step of all environments, and updates; also returns the means of what to log."""
        key, act_key, update_key = jax.random.split(state.key, 3)
        # In this order, since a buffer that is sampled before it is added to would be copied.
        buffer = state.buffer.add(transitions, mask=mask)
        state = state.replace(buffer=buffer, key=key, act_key=act_key, step=state.step + mask.size)
        state, log = jax.lax.scan(self.update, state, jax.random.split(update_key, updates))
        return state, jax.tree.map(jnp.mean, log)

    def update(self, state: TrainState, key: PRNGKeyArray) -> tuple[TrainState, dict[str, Array]]:
        """Updates all parameters once, and priorities; also returns what to log."""
        sample_key, next_key, action_key = jax.random.split(key, 3)
        buffer = state.buffer
        batch = buffer.sample(sample_key, self.config.batch_size)
        weights = jaxbuf.importance_weights(buffer, batch, self.config.beta)
        data = batch.data

        def loss_fn(params: PyTree) -> tuple[Array, PyTree]:
            fixed = jax.lax.stop_gradient(params)
            temperature = jnp.exp(fixed["log_temperature"])
            # Only termination means that nothing follows; a time limit does not.
            action, log_prob = self.draw(fixed["actor"], data["next_obs"], next_key)
            value = jnp.min(self.value(state.target, data["next_obs"], action), axis=0)
            discount = jnp.where(data["terminated"], 0.0, self.config.discount)
            target = data["reward"] + discount * (value - temperature * log_prob)
            error = self.value(params["critics"], data["obs"], data["action"]) - target[None]
            critic_loss = jnp.mean(weights * jnp.sum(error**2, axis=0))
            # The actor maximizes the value, and the entropy weighted by the temperature.
            action, log_prob = self.draw(params["actor"], data["obs"], action_key)
            value = jnp.min(self.value(fixed["critics"], data["obs"], action), axis=0)
            actor_loss = jnp.mean(temperature * log_prob - value)
            # The temperature falls while the entropy is above -1 per number of an action.
            entropy = -jnp.mean(jax.lax.stop_gradient(log_prob))
            temperature_loss = params["log_temperature"] * (entropy + action.shape[-1])
            log = {"critic_loss": critic_loss, "entropy": entropy, "temperature": temperature}
            return critic_loss + actor_loss + temperature_loss, (error, log)

        grads, (error, log) = jax.grad(loss_fn, has_aux=True)(state.params)
        updates, opt_state = self.optimizer.update(grads, state.opt_state)
        params: PyTree = optax.apply_updates(state.params, updates)
        target = optax.incremental_update(params["critics"], state.target, self.config.target_rate)
        if self.config.sampler == "prioritized":
            buffer = buffer.update_priority(batch.slots, jnp.mean(jnp.abs(error), axis=0))
        state = state.replace(params=params, target=target, opt_state=opt_state, buffer=buffer)
        return state, log


class Returns:
    """The returns of the episodes of E environments, which are played step by step."""

    def __init__(self, num_envs: int) -> None:
        self._sums = np.zeros(num_envs)
        self._finished: list[float] = []

    def add(self, reward: Float[np.ndarray, " E"], ended: Bool[np.ndarray, " E"]) -> None:
        """Takes the rewards of a step, and a mask of the episodes that ended with it."""
        self._sums += reward
        self._finished += self._sums[ended].tolist()
        self._sums[ended] = 0.0

    def mean(self) -> float:
        """Returns the mean of episodes that ended since it was last called; NaN if none did."""
        finished, self._finished = self._finished, []
        return float(np.mean(finished)) if finished else math.nan


def play(envs: Any, act: Callable[[Array], Array], seed: int) -> Float[np.ndarray, " E"]:
    """Returns the return of one episode of each of Gymnasium's vector environments."""
    obs, _ = envs.reset(seed=seed)
    returns, running = np.zeros(envs.num_envs), np.ones(envs.num_envs, bool)
    while running.any():
        obs, reward, terminated, truncated, _ = envs.step(np.array(act(obs)))
        returns += np.where(running, reward, 0.0)
        running &= ~(terminated | truncated)
    envs.close()
    return returns


def train(run: common.Run[Config]) -> None:
    """Trains, and prints the result."""
    config = run.config
    envs = make_envs(config.env, config.num_envs)
    agent = Agent(config, transition_like(envs))
    state = run.begin(agent.init)
    obs, _ = envs.reset(seed=config.seed + int(state.step))
    envs.action_space.seed(config.seed)
    ended, done, returns = None, int(state.step), Returns(config.num_envs)
    length = math.ceil(config.steps / config.num_envs / CHUNKS)

    def chunk(state: TrainState) -> tuple[TrainState, dict[str, PyTree], str]:
        nonlocal obs, ended, done
        log: dict[str, PyTree] = {}
        for _ in range(length):
            if done < config.warmup:
                updates, action = 0, envs.action_space.sample()
            else:
                updates, action = config.updates, agent.act(state.params, obs, state.act_key)
            result = envs.step(np.array(action))  # a copy, since wrappers may write to it
            # The mask leaves out resets, which are no transitions.
            step = gymnasium_transitions(envs, obs, action, result, ended)
            state, log = agent.learn(state, step.transitions, step.mask, updates=updates)
            returns.add(step.transitions["reward"], step.ended)
            obs, ended, done = step.obs, step.ended, done + config.num_envs
        log |= {"return": returns.mean(), "buffer": state.buffer.metrics()}
        return state, log, common.mean_return(log["return"])

    # What learns is compiled where the random steps end.
    first = math.ceil(max(0, config.warmup - done) / config.num_envs) // length + 1
    size = length * config.num_envs
    state, seconds = run.train(state, chunk, done=done, until=config.steps, size=size)
    test_envs = make_envs(config.env, config.eval_episodes)
    greedy = play(test_envs, lambda obs: agent.act(state.params, obs, None), config.seed)
    run.report_returns("SAC", greedy[None], seconds, size, first)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs this example from the command line and returns its exit status."""
    return common.main("sac", train, Config(), __doc__, argv)


if __name__ == "__main__":
    sys.exit(main())

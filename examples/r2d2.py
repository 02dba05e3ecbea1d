"""Train R2D2 on bsuite's memory chain with memory and without, several seeds at once.

Recurrent Q-learning from sequences (Kapturowski et al., "Recurrent Experience Replay in Distributed
Reinforcement Learning", 2019): the recurrent state before each step is stored with it, the first
steps of a window warm it up (burn-in), priorities mix the largest and the mean error of a window,
and states that were computed anew are written back. Rewards are at most 1, so values are not
rescaled. The same agent without memory is trained beside it; all seeds of both are one program.

The first observation of an episode is the answer to the question at its end, which earns 1 or -1.
An agent without memory can only guess, and earns 0 on average.
Takes about half a minute on two CPU cores. Some things to try:
  --memory-length 20 --sequence-length 26 --steps 120_000    a longer way to remember
  --no-write-back                                            stored states stay as they were

Ends with a table. Writes, in runs/r2d2 or where --out says:
  return.png          return of every seed while training, with memory and without
  log.csv             the same as numbers, about fifty times, and how far stored states were off
"""

import dataclasses
import functools
import math
import sys
from collections.abc import Sequence
from typing import Any

import gymnax
import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax import struct
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree

import common
import jaxbuf
from jaxbuf.interop import GymnaxState, gymnax_reset, gymnax_step

AGENTS = {"without memory": 0.0, "R2D2": 1.0}


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of the training."""

    memory_length: int = 10  # steps from the first observation to the question
    seeds: int = 3  # how many seeds of each agent to train at once
    seed: int = 0  # the first of them
    steps: int = 40_000  # environment steps of each seed
    num_envs: int = 64  # environments side by side in each seed; one step of each per update
    batch_size: int = 32  # windows in an update
    sequence_length: int = 16  # steps of a window
    burn_in: int = 4  # of these, steps that only warm up the recurrent state
    period: int = 4  # steps from the start of a window to that of the next one
    n_step: int = 3  # rewards in a target before it bootstraps
    capacity: int = 32_768  # steps in each seed's buffer
    warmup: int = 4_096  # random steps before learning begins
    alpha: float = 0.9  # priority exponent
    beta: float = 0.6  # importance exponent
    eta: float = 0.9  # share of the largest error in a priority; the rest is the mean error
    write_back: bool = True  # whether states that were computed anew are stored
    lr: float = 2e-3  # learning rate at first; ends at 0
    discount: float = 0.97  # discount per step
    epsilon: float = 0.05  # share of random actions
    target_rate: float = 0.02  # how far each update moves the target network
    hidden: int = 32  # width of the network

    def __post_init__(self) -> None:
        common.check(self, 1, "memory_length", "seeds", "num_envs", "batch_size", "hidden")
        common.check(self, 0, "seed", "burn_in", "alpha", "lr")
        common.check(self, 0, "beta", "eta", "discount", "epsilon", "target_rate", high=1)
        common.check(self, 1, "period", "n_step")
        common.check(self, self.burn_in + self.n_step + 1, "sequence_length")
        # Each ring holds a window and the steps after it.
        common.check(self, 2 * self.num_envs * self.sequence_length, "capacity", "warmup")
        common.check(self, self.warmup + 1, "steps")


class QNetwork(nn.Module):
    """A recurrent network with a value for each of two actions."""

    width: int

    @nn.compact
    def __call__(
        self, hidden: Float[Array, "B H"], obs: Float[Array, "B 3"], memory: Float[Array, ""]
    ) -> tuple[Float[Array, "B H"], Float[Array, "B 2"]]:
        """Returns the recurrent states after B observations, and the values of actions."""
        hidden, x = nn.GRUCell(self.width)(hidden, nn.relu(nn.Dense(self.width)(obs)))
        return memory * hidden, nn.Dense(2)(nn.relu(nn.Dense(self.width)(x)))


class TrainState(struct.PyTreeNode):
    """The state that training changes."""

    params: PyTree
    target_params: PyTree  # their moving average, which the targets use
    opt_state: optax.OptState
    buffer: jaxbuf.TrajectoryBuffer
    envs: GymnaxState
    hidden: Float[Array, "E H"]  # the recurrent state in each environment
    key: PRNGKeyArray
    memory: Float[Array, ""]  # 1, or 0 for an agent that forgets everything after each step
    step: Int[Array, ""]  # environment steps so far


@dataclasses.dataclass(frozen=True)
class Agent:
    """R2D2: pure functions of a ``TrainState``."""

    config: Config

    @functools.cached_property
    def env(self) -> tuple[Any, Any]:
        """The environment and its parameters."""
        env, params = gymnax.make("MemoryChain-bsuite")
        return env, params.replace(memory_length=self.config.memory_length)

    @functools.cached_property
    def optimizer(self) -> optax.GradientTransformation:
        """Adam with clipped gradients and an annealed learning rate."""
        c = self.config
        schedule = optax.linear_schedule(c.lr, 0.0, (c.steps - c.warmup) // c.num_envs + 1)
        return optax.chain(optax.clip_by_global_norm(10.0), optax.adam(schedule))

    def init(self, key: PRNGKeyArray, memory: Float[Array, ""]) -> TrainState:
        """Returns the state of a new network, with ``warmup`` random steps in the buffer."""
        c = self.config
        key, params_key, envs_key = jax.random.split(key, 3)
        envs = gymnax_reset(*self.env, envs_key, c.num_envs)
        hidden = jnp.zeros((c.num_envs, c.hidden))
        params = QNetwork(c.hidden).init(params_key, hidden, envs.obs, memory)
        step = {"obs": envs.obs[0], "action": jnp.int32(0), "reward": jnp.float32(0)}
        buffer = jaxbuf.TrajectoryBuffer.create(
            {**step, "terminated": jnp.bool_(0), "truncated": jnp.bool_(0), "hidden": hidden[0]},
            c.num_envs,
            c.capacity // c.num_envs,
            sequence_length=c.sequence_length,
            sampler=jaxbuf.Prioritized(alpha=c.alpha),
            # Windows overlap. None has steps of two episodes: those at the end are short.
            episodes=jaxbuf.Episodes(boundary="avoid", period=c.period),
        )
        copy, opt_state = jax.tree.map(jnp.copy, params), self.optimizer.init(params)
        state = TrainState(params, copy, opt_state, buffer, envs, hidden, key, memory, jnp.int32(0))
        length = math.ceil(c.warmup / c.num_envs)
        return jax.lax.scan(lambda s, _: self.interact(s, 1.0), state, length=length)[0]

    def train(self, state: TrainState, length: int) -> tuple[TrainState, dict[str, Array]]:
        """Alternates interaction and learning, all in one ``lax.scan``; also returns metrics."""

        def iteration(state: TrainState, _: None) -> tuple[TrainState, PyTree]:
            state, episodes = self.interact(state, self.config.epsilon)
            state, metrics = self.learn(state)
            return state, (episodes, metrics)

        state, (episodes, metrics) = jax.lax.scan(iteration, state, length=length)
        reward, ended = (jnp.sum(x) for x in episodes)
        return state, {"return": reward / ended, **jax.tree.map(jnp.mean, metrics)}

    def interact(self, state: TrainState, epsilon: float) -> tuple[TrainState, tuple[Array, Array]]:
        """Takes and stores an ε-greedy step; also returns rewards, and which episodes ended."""
        c = self.config
        key, *keys = jax.random.split(state.key, 4)
        network: Any = QNetwork(c.hidden)
        hidden, values = network.apply(state.params, state.hidden, state.envs.obs, state.memory)
        explore = jax.random.uniform(keys[0], (c.num_envs,)) < epsilon
        anything = jax.random.randint(keys[1], (c.num_envs,), 0, 2)
        action = jnp.where(explore, anything, jnp.argmax(values, axis=-1).astype(jnp.int32))
        envs, steps = gymnax_step(*self.env, keys[2], state.envs, action)
        del steps["next_obs"]
        buffer = state.buffer.add({**steps, "hidden": state.hidden})
        ended = steps["terminated"] | steps["truncated"]
        hidden, step = jnp.where(ended[:, None], 0.0, hidden), state.step + c.num_envs
        state = state.replace(buffer=buffer, envs=envs, hidden=hidden, key=key, step=step)
        return state, (steps["reward"], ended)

    def learn(self, state: TrainState) -> tuple[TrainState, dict[str, Array]]:
        """Updates the network, its target, the priorities and the stored states once."""
        c, buffer = self.config, state.buffer
        key, sample_key = jax.random.split(state.key)
        batch = buffer.sample(sample_key, c.batch_size)
        weights = jaxbuf.importance_weights(buffer, batch, c.beta)
        # Nothing has to warm up at the start of an episode, where the stored state is right.
        is_first = buffer.episode(batch.slots).is_first[:, None]
        warm = is_first | (jnp.arange(c.sequence_length) >= c.burn_in)
        valid = warm & buffer.episode_mask(batch.slots)
        learned = valid[:, : -c.n_step]
        count = jnp.sum(learned, axis=1)

        def loss_fn(params: PyTree) -> tuple[Float[Array, ""], tuple[Array, Array]]:
            error, states = self.td_error(state, params, batch.data, warm)
            error = jnp.where(learned, error, 0.0)
            loss = 0.5 * jnp.sum(weights[:, None] * error**2) / jnp.maximum(jnp.sum(count), 1)
            return loss, jax.lax.stop_gradient((error, states))

        (loss, (error, states)), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        updates, opt_state = self.optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        target_params = optax.incremental_update(params, state.target_params, c.target_rate)
        # A window without a step to learn from gets priority 0, and is not drawn again.
        error, off = jnp.abs(error), jnp.mean(jnp.abs(states - batch.data["hidden"]), axis=-1)
        mean = jnp.sum(error, axis=1) / jnp.maximum(count, 1)
        priority = c.eta * jnp.max(error, axis=1) + (1 - c.eta) * mean
        buffer = buffer.update_priority(batch.slots, priority)
        if c.write_back:
            # States within the burn-in still depend on the stored one.
            buffer = buffer.set_field("hidden", batch.slots, states, mask=valid)
        # By how much the stored states were off.
        metrics = {"loss": loss, "off": jnp.sum(off * valid) / jnp.maximum(jnp.sum(valid), 1)}
        state = state.replace(params=params, target_params=target_params, opt_state=opt_state)
        return state.replace(buffer=buffer, key=key), metrics

    def td_error(self, state: TrainState, params: PyTree, window: PyTree, warm: Array) -> PyTree:
        """Returns values minus n-step targets (double DQN), and the states before each step."""
        values, states = self.unroll(params, state.memory, window, warm)
        target_values, _ = self.unroll(state.target_params, state.memory, window, warm)
        returns = jaxbuf.n_step(window, self.config.n_step, self.config.discount)
        row, last = jnp.arange(warm.shape[0])[:, None], returns.bootstrap_index
        start = jnp.arange(last.shape[1])
        value = values[row, start, window["action"][:, start]]
        next_value = target_values[row, last, jnp.argmax(values[row, last], axis=-1)]
        target = returns.reward + returns.discount * next_value
        return value - jax.lax.stop_gradient(target), states

    def unroll(self, params: PyTree, memory: Array, window: PyTree, warm: Array) -> PyTree:
        """Returns the values at each step ``[B, L, 2]``, and the states before it ``[B, L, H]``."""
        network: Any = QNetwork(self.config.hidden)

        def step(hidden: Array, now: tuple[Array, Array]) -> tuple[Array, tuple[Array, Array]]:
            obs, warm = now
            after, values = network.apply(params, hidden, obs, memory)
            # No gradient flows into the burn-in.
            return jnp.where(warm[:, None], after, jax.lax.stop_gradient(after)), (values, hidden)

        steps = jnp.swapaxes(window["obs"], 0, 1), warm.T
        values, states = jax.lax.scan(step, window["hidden"][:, 0], steps)[1]
        return jnp.swapaxes(values, 0, 1), jnp.swapaxes(states, 0, 1)


def train(run: common.Run[Config]) -> None:
    """Trains all seeds with memory and without, and prints the results."""
    title = f"memory chain of length {run.config.memory_length}"
    common.compare(run, Agent(run.config), AGENTS, "return", run.config.num_envs, title)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs this example from the command line and returns its exit status."""
    return common.main("r2d2", train, Config(), __doc__, argv)


if __name__ == "__main__":
    sys.exit(main())

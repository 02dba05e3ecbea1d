"""Train DQN to flip bits, with hindsight and without, several seeds of each at once.

An episode begins with random bits and asks for other random bits. An action flips one bit; every
step costs 1 until all bits are right. A random agent reaches hardly any of the 2**15 goals, so the
only reward that it sees is -1. With hindsight it learns from the states that it reached instead,
as in section 3.1 of Andrychowicz et al., "Hindsight Experience Replay" (2017).

Takes less than a minute on two CPU cores. Some things to try:
  --bits 8                        few enough to learn without hindsight as well
  --strategy final                another source of goals
  --resume --episodes 16_000      train a finished run for longer

Ends with a table. Writes, in runs/bit_flipping or where --out says:
  success.png         success rate of every seed, with hindsight and without
  log.csv             the same as numbers, fifty times in a run
"""

import dataclasses
import functools
import math
import sys
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import struct
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree

import common
import jaxbuf

CHUNKS = 50
AGENTS = ("DQN", "DQN with hindsight")


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of the training."""

    bits: int = 15  # bits to flip, and steps of an episode
    strategy: Literal["final", "future", "episode", "random"] = "future"  # where goals come from
    fraction: float = 0.8  # share of transitions with such a goal
    seeds: int = 3  # how many seeds of each agent to train at once
    seed: int = 0  # the first of them
    episodes: int = 8_000  # episodes of each seed
    num_envs: int = 16  # episodes side by side in each seed
    updates: int = 8  # learner updates after each of these
    batch_size: int = 64  # transitions in an update
    capacity: int = 8_000  # episodes in each seed's buffer
    lr: float = 1e-3  # learning rate
    discount: float = 0.98  # discount per step
    epsilon: float = 0.2  # share of random actions
    target_rate: float = 0.02  # how far each update moves the target network
    hidden: int = 128  # width of each hidden layer
    eval_episodes: int = 100  # greedy episodes per success rate

    def __post_init__(self) -> None:
        common.check(self, 1, "bits", high=64)
        common.check(
            self, 1, "seeds", "num_envs", "updates", "batch_size", "hidden", "eval_episodes"
        )
        common.check(self, 0, "fraction", "discount", "epsilon", "target_rate", high=1)
        common.check(self, 0, "seed", "lr")
        common.check(self, self.num_envs, "capacity", "episodes")


class QNetwork(nn.Module):
    """One value per action, through two normalized hidden layers."""

    num_actions: int
    hidden: int

    @nn.compact
    def __call__(self, bits: Bool[Array, "B N"], goal: Bool[Array, "B N"]) -> Float[Array, "B N"]:
        """Returns the values of flipping each bit."""
        x = 2.0 * jnp.concatenate([bits, goal], axis=-1).astype(jnp.float32) - 1.0
        for _ in range(2):
            x = nn.relu(nn.LayerNorm()(nn.Dense(self.hidden)(x)))
        return nn.Dense(self.num_actions)(x)


def reward(achieved: Bool[Array, "B N"], goal: Bool[Array, "B N"]) -> Float[Array, " B"]:
    """Returns 0 if all bits are right, else −1."""
    return -jnp.any(achieved != goal, axis=-1).astype(jnp.float32)


class TrainState(struct.PyTreeNode):
    """The state that training changes."""

    params: PyTree
    target_params: PyTree  # their moving average, which the targets use
    opt_state: optax.OptState
    buffer: jaxbuf.ItemBuffer  # of whole episodes
    key: PRNGKeyArray  # of all later randomness
    fraction: Float[Array, ""]  # share of transitions that get another goal; 0 without hindsight
    episodes: Int[Array, ""]  # so far


class Episodes(NamedTuple):
    """E episodes of at most T = N steps, padded; N is the number of bits."""

    states: Bool[Array, "E T+1 N"]  # the bits before each action, and after the last one
    goal: Bool[Array, "E N"]  # the bits asked for
    action: Int[Array, "E T"]  # the bits that were flipped
    length: Int[Array, " E"]  # steps until all bits were right, or T if they never were
    success: Bool[Array, " E"]  # True if all bits were right in the end


@dataclasses.dataclass(frozen=True)
class Agent:
    """DQN on flipping bits: pure functions of a ``TrainState``."""

    config: Config

    @functools.cached_property
    def network(self) -> Any:
        """The Q-network."""
        return QNetwork(self.config.bits, self.config.hidden)

    def init(self, key: PRNGKeyArray, fraction: Float[Array, ""]) -> TrainState:
        """Returns the state of a new network and an empty buffer."""
        key, params_key = jax.random.split(key)
        bits = jnp.zeros((1, self.config.bits), jnp.bool_)
        params = self.network.init(params_key, bits, bits)
        target, opt_state = jax.tree.map(jnp.copy, params), optax.adam(self.config.lr).init(params)
        example = common.one_of(jax.eval_shape(lambda key: self.play(params, key, 1, 0.0), key))
        buffer = jaxbuf.ItemBuffer.create(example, self.config.capacity)
        return TrainState(params, target, opt_state, buffer, key, fraction, jnp.int32(0))

    def train(self, state: TrainState, iterations: int) -> TrainState:
        """Alternates episodes and learning, all in one ``lax.scan``."""

        def iteration(state: TrainState, _: None) -> tuple[TrainState, None]:
            key, play_key = jax.random.split(state.key)
            episodes = self.play(state.params, play_key, self.config.num_envs, self.config.epsilon)
            count = state.episodes + self.config.num_envs
            state = state.replace(buffer=state.buffer.add(episodes), key=key, episodes=count)
            return jax.lax.scan(self.learn, state, length=self.config.updates)

        return jax.lax.scan(iteration, state, length=iterations)[0]

    def play(self, params: PyTree, key: PRNGKeyArray, num_envs: int, epsilon: float) -> Episodes:
        """Plays whole ε-greedy episodes, which end when all bits are right."""
        bits = self.config.bits
        begin_key, goal_key, step_key = jax.random.split(key, 3)
        shape = (num_envs, bits)
        begin, goal = (jax.random.bernoulli(key, 0.5, shape) for key in (begin_key, goal_key))

        def step(now: Array, key: PRNGKeyArray) -> tuple[Array, tuple[Array, Array]]:
            greedy = jnp.argmax(self.network.apply(params, now, goal), axis=-1).astype(jnp.int32)
            explore_key, action_key = jax.random.split(key)
            explore = jax.random.uniform(explore_key, greedy.shape) < epsilon
            anything = jax.random.randint(action_key, greedy.shape, 0, bits)
            action = jnp.where(explore, anything, greedy)
            after = now ^ jax.nn.one_hot(action, bits, dtype=jnp.bool_)
            return after, (after, action)

        after, action = jax.lax.scan(step, begin, jax.random.split(step_key, bits))[1]
        after, action = jnp.moveaxis(after, 0, 1), action.T
        reached = jnp.all(after == goal[:, None], axis=-1)
        success = jnp.any(reached, axis=1)
        length = jnp.where(success, jnp.argmax(reached, axis=1).astype(jnp.int32) + 1, bits)
        states = jnp.concatenate([begin[:, None], after], axis=1)
        return Episodes(states, goal, action, length, success)

    def transitions(self, episodes: Episodes, keys: PyTree, fraction: Array) -> dict[str, Array]:
        """Returns one step of each episode, some of them with a goal chosen in hindsight."""
        rows = jnp.arange(episodes.length.size)
        t = jax.random.randint(keys[0], rows.shape, 0, episodes.length)
        achieved = episodes.states[:, 1:]
        batch = {"obs": episodes.states[rows, t], "action": episodes.action[rows, t]}
        batch |= {"achieved_goal": achieved[rows, t], "goal": episodes.goal}
        batch["reward"] = reward(batch["achieved_goal"], batch["goal"])
        goals: Any = {"strategy": self.config.strategy, "fraction": fraction, "reward_fn": reward}
        return jaxbuf.hindsight(keys[1], batch, achieved, t, episodes.length, **goals)[0]

    def learn(self, state: TrainState, _: None = None) -> tuple[TrainState, None]:
        """Updates the network and its target once."""
        key, sample_key, *keys = jax.random.split(state.key, 4)
        episodes = state.buffer.sample(sample_key, self.config.batch_size).data
        batch = self.transitions(episodes, keys, state.fraction)

        def loss_fn(params: PyTree) -> Float[Array, ""]:
            return 0.5 * jnp.mean(self.td_error(params, state.target_params, batch) ** 2)

        grads = jax.grad(loss_fn)(state.params)
        updates, opt_state = optax.adam(self.config.lr).update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        target = optax.incremental_update(params, state.target_params, self.config.target_rate)
        state = state.replace(params=params, target_params=target, opt_state=opt_state)
        return state.replace(key=key), None

    def td_error(self, params: PyTree, target_params: PyTree, batch: PyTree) -> Float[Array, " B"]:
        """Returns value minus one-step target; there is no bootstrap after a reached goal."""
        values = self.network.apply(params, batch["obs"], batch["goal"])
        value = jnp.take_along_axis(values, batch["action"][:, None], axis=-1)[:, 0]
        # The state after an action is the goal that it achieved.
        next_values = self.network.apply(target_params, batch["achieved_goal"], batch["goal"])
        bootstrap = jnp.where(batch["reward"] == 0, 0.0, jnp.max(next_values, axis=-1))
        target = batch["reward"] + self.config.discount * bootstrap
        return value - jax.lax.stop_gradient(target)

    def evaluate(self, state: TrainState, key: PRNGKeyArray) -> Float[Array, ""]:
        """Returns the success rate of greedy episodes."""
        episodes = self.play(state.params, key, self.config.eval_episodes, 0.0)
        return jnp.mean(episodes.success.astype(jnp.float32))


def train(run: common.Run[Config]) -> None:
    """Trains all seeds of both agents, and prints the results."""
    config = run.config
    agent, length = Agent(config), math.ceil(config.episodes / config.num_envs / CHUNKS)
    fractions = jnp.asarray([0.0, config.fraction], jnp.float32)
    # The same seeds with and without hindsight.
    init = jax.jit(jax.vmap(jax.vmap(agent.init, in_axes=(0, None)), in_axes=(None, 0)))
    states = run.begin(init, run.keys, fractions)

    def go_on(state: TrainState) -> tuple[TrainState, Float[Array, ""]]:
        state = agent.train(state, length)
        key, eval_key = jax.random.split(state.key)
        return state.replace(key=key), agent.evaluate(state, eval_key)

    # Donated, so that the buffers are updated in place.
    options = jaxbuf.compiler_options()
    both = jax.jit(jax.vmap(jax.vmap(go_on)), donate_argnums=0, compiler_options=options)

    def chunk(states: TrainState) -> tuple[TrainState, dict[str, PyTree], str]:
        states, success = both(states)
        without, with_ = np.mean(success, axis=1)
        shown = f"success {without:.0%} without hindsight, {with_:.0%} with"
        return states, dict(zip(AGENTS, success, strict=True)), shown

    done, size = int(states.episodes[0, 0]), length * config.num_envs
    counts: Any = {"unit": "episodes", "rows": config.seeds * len(AGENTS)}
    run.train(states, chunk, done=done, until=config.episodes, size=size, **counts)
    episodes, success = run.logged("step"), {name: run.logged(name) for name in AGENTS}
    title, label = f"flipping {config.bits} bits", "success rate of greedy episodes"
    common.plot(run.out / "success.png", episodes, success, title, "episodes per seed", label)
    columns = {name: common.cells(rates[-1], "{:.0%}") for name, rates in success.items()}
    columns["episodes of each"] = common.totals(episodes[-1], config.seeds)
    run.report("success rates", columns)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs this example from the command line and returns its exit status."""
    return common.main("bit_flipping", train, Config(), __doc__, argv, may_grow="episodes")


if __name__ == "__main__":
    sys.exit(main())

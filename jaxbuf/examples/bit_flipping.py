"""DQN with and without hindsight on flipping bits: ``python -m jaxbuf.examples.bit_flipping``.

The task is from section 3.1 of Andrychowicz et al., "Hindsight Experience Replay" (2017), which
explains why an agent without hindsight learns nothing on it. Both agents with all their seeds are
one program.
"""

import dataclasses
import functools
import math
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import struct
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

import jaxbuf
from jaxbuf.examples import _run

DESCRIPTION = """Train DQN to flip bits, with hindsight and without, several seeds of each at once.

An episode begins with random bits and asks for other random bits. An action flips one bit; every
step costs 1 until all bits are right. A random agent reaches hardly any of the 2**15 goals, so the
only reward that it sees is -1. With hindsight it learns from the states that it reached instead.
Takes less than a minute on two CPU cores. Some things to try:
  --bits 8                        few enough to learn without hindsight as well
  --strategy final                another source of goals
  --resume --episodes 16_000      train a finished run for longer

Ends with a table. Writes, in runs/bit_flipping or where --out says:
  success.png   success rate of every seed, with hindsight and without
  log.csv       the same as numbers, fifty times in a run
  tensorboard/  the same for TensorBoard, with --tensorboard
  checkpoint/   the whole training state, ten times in a run
  run.json      the options"""
EXAMPLE = "bit_flipping"
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
        _run.check(self, 1, "bits", high=64)
        _run.check(self, 1, "seeds", "num_envs", "updates", "batch_size", "hidden", "eval_episodes")
        _run.check(self, 0, "fraction", "discount", "epsilon", "target_rate", high=1)
        _run.check(self, 0, "seed", "lr")
        # This many episodes are played side by side.
        _run.check(self, self.num_envs, "capacity", "episodes")


class QNetwork(nn.Module):
    """One value per action, through two normalized hidden layers."""

    num_actions: int
    hidden: int

    @nn.compact
    def __call__(self, x: Float[Array, "B D"]) -> Float[Array, "B A"]:
        """Returns the values of all actions for B observations."""
        for _ in range(2):
            x = nn.relu(nn.LayerNorm()(nn.Dense(self.hidden)(x)))
        return nn.Dense(self.num_actions)(x)


class TrainState(struct.PyTreeNode):
    """The state that training changes.

    Attributes:
        params: Parameters of the Q-network.
        target_params: Their moving average, which the targets use.
        opt_state: State of the optimizer.
        buffer: The replay buffer; its items are whole episodes.
        key: The PRNG key of all later randomness.
        fraction: Share of transitions that get another goal; 0 is DQN without hindsight.
        episodes: Number of episodes so far, scalar.
    """

    params: Any
    target_params: Any
    opt_state: optax.OptState
    buffer: jaxbuf.ItemBuffer
    key: PRNGKeyArray
    fraction: Float[Array, ""]
    episodes: Int[Array, ""]


class Episodes(NamedTuple):
    """E episodes of at most ``bits`` steps, padded.

    Attributes:
        states: The bits before each action, and after the last one; ``[E, bits + 1, bits]``.
        goal: The bits asked for, ``[E, bits]``.
        action: The bits that were flipped, ``[E, bits]``.
        length: Steps until all bits were right, or ``bits`` if they never were, ``[E]``.
        success: True if all bits were right in the end, ``[E]``.
    """

    states: Bool[Array, "E T+1 N"]
    goal: Bool[Array, "E N"]
    action: Int[Array, "E T"]
    length: Int[Array, " E"]
    success: Bool[Array, " E"]


@dataclasses.dataclass(frozen=True)
class Agent:
    """DQN on flipping bits: pure functions of a ``TrainState``."""

    config: Config

    @functools.cached_property
    def network(self) -> QNetwork:
        """The Q-network, whose input is the bits and the goal."""
        return QNetwork(self.config.bits, self.config.hidden)

    @functools.cached_property
    def optimizer(self) -> optax.GradientTransformation:
        """Adam."""
        return optax.adam(self.config.lr)

    def init(self, key: PRNGKeyArray, fraction: Float[Array, ""]) -> TrainState:
        """Returns the state of a new network and an empty buffer."""
        config = self.config
        key, params_key = jax.random.split(key)
        bits = jnp.zeros((1, config.bits), jnp.bool_)
        params = self.network.init(params_key, _inputs(bits, bits))
        batch = jax.eval_shape(lambda key: self.play(params, key, 1, 0.0), key)
        example = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), batch)
        return TrainState(
            params=params,
            target_params=jax.tree.map(jnp.copy, params),
            opt_state=self.optimizer.init(params),
            buffer=jaxbuf.ItemBuffer.create(example, config.capacity),
            key=key,
            fraction=fraction,
            episodes=jnp.int32(0),
        )

    def train(self, state: TrainState, iterations: int) -> TrainState:
        """Alternates episodes and learning, all in one ``lax.scan``."""

        def iteration(state: TrainState, _: None) -> tuple[TrainState, None]:
            key, play_key = jax.random.split(state.key)
            episodes = self.play(state.params, play_key, self.config.num_envs, self.config.epsilon)
            state = state.replace(
                buffer=state.buffer.add(episodes),
                key=key,
                episodes=state.episodes + self.config.num_envs,
            )
            learn = jax.lax.scan(
                lambda state, _: (self.learn(state), None), state, length=self.config.updates
            )
            return learn[0], None

        return jax.lax.scan(iteration, state, length=iterations)[0]

    def play(self, params: Any, key: PRNGKeyArray, num_envs: int, epsilon: float) -> Episodes:
        """Plays whole ε-greedy episodes, which end when all bits are right."""
        bits = self.config.bits
        begin_key, goal_key, step_key = jax.random.split(key, 3)
        begin, goal = (
            jax.random.bernoulli(key, 0.5, (num_envs, bits)) for key in (begin_key, goal_key)
        )

        def step(now: Array, key: PRNGKeyArray) -> tuple[Array, tuple[Array, Array]]:
            greedy = jnp.argmax(self.values(params, now, goal), axis=-1).astype(jnp.int32)
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
        return Episodes(
            states=jnp.concatenate([begin[:, None], after], axis=1),
            goal=goal,
            action=action,
            length=jnp.where(success, jnp.argmax(reached, axis=1).astype(jnp.int32) + 1, bits),
            success=success,
        )

    def learn(self, state: TrainState) -> TrainState:
        """Updates the network and its target once."""
        key, *keys = jax.random.split(state.key, 4)
        episodes = state.buffer.sample(keys[0], self.config.batch_size).data
        batch = self.transitions(episodes, keys[1], keys[2], state.fraction)

        def loss_fn(params: Any) -> Float[Array, ""]:
            return 0.5 * jnp.mean(self.td_error(params, state.target_params, batch) ** 2)

        grads = jax.grad(loss_fn)(state.params)
        updates, opt_state = self.optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        target_params = optax.incremental_update(
            params, state.target_params, self.config.target_rate
        )
        return state.replace(
            params=params, target_params=target_params, opt_state=opt_state, key=key
        )

    def transitions(
        self,
        episodes: Episodes,
        step_key: PRNGKeyArray,
        goal_key: PRNGKeyArray,
        fraction: float | Float[Array, ""],
    ) -> dict[str, Array]:
        """Returns one step of each episode, some of them with a goal chosen in hindsight."""
        rows = jnp.arange(episodes.length.size)
        t = jax.random.randint(step_key, rows.shape, 0, episodes.length)
        achieved_goals = episodes.states[:, 1:]
        batch = {
            "obs": episodes.states[rows, t],
            "action": episodes.action[rows, t],
            "achieved_goal": achieved_goals[rows, t],
            "goal": episodes.goal,
        }
        batch["reward"] = reward(batch["achieved_goal"], batch["goal"])
        batch, _ = jaxbuf.hindsight(
            goal_key,
            batch,
            achieved_goals,
            t,
            episodes.length,
            strategy=self.config.strategy,
            fraction=fraction,
            reward_fn=reward,
        )
        return batch

    def td_error(
        self, params: Any, target_params: Any, batch: dict[str, Array]
    ) -> Float[Array, " B"]:
        """Returns value minus one-step target; there is no bootstrap after a reached goal."""
        values = self.values(params, batch["obs"], batch["goal"])
        value = jnp.take_along_axis(values, batch["action"][:, None], axis=-1)[:, 0]
        # The state after an action is the goal that it achieved.
        next_values = self.values(target_params, batch["achieved_goal"], batch["goal"])
        bootstrap = jnp.where(batch["reward"] == 0, 0.0, jnp.max(next_values, axis=-1))
        target = batch["reward"] + self.config.discount * bootstrap
        return value - jax.lax.stop_gradient(target)

    def values(
        self, params: Any, bits: Bool[Array, "B N"], goal: Bool[Array, "B N"]
    ) -> Float[Array, "B N"]:
        """Returns the value of flipping each bit."""
        values: Any = self.network.apply(params, _inputs(bits, goal))
        return values

    def evaluate(self, state: TrainState, key: PRNGKeyArray) -> Float[Array, ""]:
        """Returns the success rate of greedy episodes."""
        episodes = self.play(state.params, key, self.config.eval_episodes, 0.0)
        return jnp.mean(episodes.success.astype(jnp.float32))


def reward(achieved: Bool[Array, "B N"], goal: Bool[Array, "B N"]) -> Float[Array, " B"]:
    """Returns 0 if all bits are right, else −1."""
    return -jnp.any(achieved != goal, axis=-1).astype(jnp.float32)


def _inputs(bits: Bool[Array, "B N"], goal: Bool[Array, "B N"]) -> Float[Array, "B 2*N"]:
    return 2.0 * jnp.concatenate([bits, goal], axis=-1).astype(jnp.float32) - 1.0


# Cached, so that an agent that runs again in the same process is not compiled again.
@functools.cache
def programs(agent: Agent, length: int) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Returns jitted functions that begin and continue a run, for all seeds of both agents."""

    def go_on(state: TrainState) -> tuple[TrainState, Float[Array, ""]]:
        state = agent.train(state, length)
        key, eval_key = jax.random.split(state.key)
        return state.replace(key=key), agent.evaluate(state, eval_key)

    # The same seeds with and without hindsight.
    init = jax.vmap(jax.vmap(agent.init, in_axes=(0, None)), in_axes=(None, 0))
    # Donated, so that the buffers are updated in place.
    chunk = jax.jit(
        jax.vmap(jax.vmap(go_on)), donate_argnums=0, compiler_options=jaxbuf.compiler_options()
    )
    return jax.jit(init), chunk


def train(run: _run.Run[Config]) -> None:
    """Trains all seeds of both agents, and prints the results."""
    began = time.perf_counter()
    config = run.config
    length = math.ceil(config.episodes / config.num_envs / CHUNKS)
    init, chunk = programs(Agent(config), length)
    keys = jnp.stack([jax.random.key(config.seed + i) for i in range(config.seeds)])
    fractions = jnp.asarray([0.0, config.fraction], jnp.float32)
    like = jax.eval_shape(init, keys, fractions)
    states = run.load(like) if run.resume else init(keys, fractions)

    def next_chunk(states: TrainState) -> tuple[TrainState, dict[str, Any], str]:
        states, success = chunk(states)
        without, with_ = np.mean(success, axis=1)
        shown = f"success {without:.0%} without hindsight, {with_:.0%} with"
        return states, dict(zip(AGENTS, success, strict=True)), shown

    run.train(
        states,
        next_chunk,
        done=int(states.episodes[0, 0]),
        until=config.episodes,
        size=length * config.num_envs,
        unit="episodes",
        rows=config.seeds * len(AGENTS),
    )

    episodes, success = run.logged("step"), {name: run.logged(name) for name in AGENTS}
    _run.plot(
        run.out / "success.png",
        episodes,
        success,
        title=f"flipping {config.bits} bits",
        xlabel="episodes per seed",
        ylabel="success rate of greedy episodes",
    )
    final = np.stack([rates[-1] for rates in success.values()])
    rows = [
        [str(config.seed + i), *(f"{rate:.0%}" for rate in final[:, i]), "", ""]
        for i in range(config.seeds)
    ]
    means = [f"{rate:.0%}" for rate in final.mean(axis=1)]
    total = [f"{episodes[-1]:,.0f}", f"{time.perf_counter() - began:.1f} s"]
    header = ["seed", *AGENTS, "episodes", "time"]
    print(_run.table(header, [*rows, ["all", *means, *total]]))
    print(f"success rates, log and checkpoint are in {run.out}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run this example from the command line and return its exit status."""
    return _run.main(EXAMPLE, train, Config(), DESCRIPTION, argv, may_grow="episodes")


if __name__ == "__main__":
    sys.exit(main())

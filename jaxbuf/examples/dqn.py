"""DQN with prioritized replay, its whole training loop one jitted program.

``python -m jaxbuf.examples.dqn`` learns CartPole with four seeds at once. Environment steps, adds,
samples, updates, annealing and the target network all happen inside one ``lax.scan``, which
``vmap`` runs for every seed; Python only calls it, a hundredth of the run at a time, to show
progress and to save.

The agent is double DQN (van Hasselt, Guez and Silver, 2016) with n-step targets and
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
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree, Shaped

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
  --n-step 3                      targets of three rewards instead of one
  --frame-stack 4                 the last four frames of a MinAtar game
  --log                           losses and more in a CSV and for TensorBoard
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
    "final_lr": 1e-4,
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
    n_step: int = _cli.option(1, _cli.integer(1), "rewards in a target before it bootstraps")
    frame_stack: int = _cli.option(1, _cli.integer(1), "last frames that the agent sees (MinAtar)")
    capacity: int = _cli.option(50_000, _cli.integer(1, 2**30), "transitions in each seed's buffer")
    warmup: int = _cli.option(2_000, _cli.integer(1), "random steps before learning begins")
    alpha: float = _cli.option(0.6, _cli.number(0), "priority exponent; 0 is uniform")
    beta: float = _cli.option(0.4, _cli.number(0, 1), "importance exponent at first; ends at 1")
    lr: float = _cli.option(1e-3, _cli.number(0, above=True), "learning rate, annealed linearly")
    final_lr: float = _cli.option(1e-5, _cli.number(0), "and its value at the end")
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
        if self.frame_stack > 1 and self.env not in _environment.MINATAR:
            raise ValueError(
                f"--frame-stack {self.frame_stack} is for images and {self.env} has none; leave it "
                "out or choose a MinAtar --env"
            )
        for name, steps in (("capacity", self.capacity), ("warmup", self.warmup)):
            if steps < self.window * self.num_envs:
                raise ValueError(
                    f"--{name} {steps} is less than {self.window} steps (--n-step, --frame-stack) "
                    f"of each of --num-envs {self.num_envs}; make it at least "
                    f"{self.window * self.num_envs}"
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

    @property
    def window(self) -> int:
        """Steps that one transition is made of: older frames, its rewards, and one to end at."""
        return self.frame_stack + self.n_step


class TrainState(struct.PyTreeNode):
    """Everything that training changes; all of it goes into a checkpoint.

    Attributes:
        params: Parameters of the Q-network.
        target_params: Their moving average, which the targets use.
        opt_state: State of the optimizer.
        buffer: The replay buffer.
        envs: Where the running episodes stand.
        frames: The last frames of each, ``[E, *obs, frame_stack]``.
        key: Source of all later randomness.
        step: Environment steps so far, scalar.
    """

    params: Any
    target_params: Any
    opt_state: optax.OptState
    buffer: jaxbuf.TrajectoryBuffer
    envs: _environment.EnvStates
    frames: Shaped[Array, "E ... K"]
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
        step = {
            "obs": obs,
            "action": jnp.int32(0),
            "reward": jnp.float32(0),
            "terminated": jnp.bool_(False),
            "truncated": jnp.bool_(False),
            "next_obs": obs,
        }
        envs = self.envs.reset(envs_key)
        frames = self.first_frames(envs.obs)
        params = self.network.init(params_key, _merge(frames))
        state = TrainState(
            params=params,
            target_params=jax.tree.map(jnp.copy, params),
            opt_state=self.optimizer.init(params),
            buffer=self.create_buffer(step),
            envs=envs,
            frames=frames,
            key=key,
            step=jnp.int32(0),
        )
        iterations = -(-config.warmup // config.num_envs)
        return jax.lax.scan(
            lambda state, _: self.interact(state, epsilon=1.0), state, length=iterations
        )[0]

    def create_buffer(self, step: PyTree) -> jaxbuf.TrajectoryBuffer:
        """An empty buffer for steps like this one."""
        config = self.config
        sampler = (
            jaxbuf.Prioritized(alpha=config.alpha, epsilon=PRIORITY_EPSILON)
            if config.sampler == "prioritized"
            else jaxbuf.Uniform()
        )
        return jaxbuf.TrajectoryBuffer.create(
            step,
            config.num_envs,
            config.capacity // config.num_envs,
            sequence_length=config.window,
            sampler=sampler,
        )

    def train(
        self, state: TrainState, iterations: int
    ) -> tuple[TrainState, _runner.EpisodeLog, dict[str, Any]]:
        """Alternate interaction and learning, all in one ``lax.scan``.

        Returns:
            The new state, the episodes that ended on the way, and metrics: the mean loss, and those
            of the buffer at the end.
        """

        def iteration(
            state: TrainState, _: None
        ) -> tuple[TrainState, tuple[_runner.EpisodeLog, Float[Array, ""]]]:
            # In this order: a buffer that is sampled before it is added to gets copied.
            state, log = self.interact(state, self.epsilon(state.step))
            total = jnp.float32(0)
            for _update in range(self.config.updates):
                state, loss = self.learn(state)
                total += loss
            return state, (log, total / self.config.updates)

        state, (logs, losses) = jax.lax.scan(iteration, state, length=iterations)
        log = jax.tree.map(lambda leaf: jnp.sum(leaf, dtype=leaf.dtype), logs)
        return state, log, {"loss": jnp.mean(losses), "buffer": state.buffer.metrics()}

    def interact(
        self, state: TrainState, epsilon: float | Float[Array, ""]
    ) -> tuple[TrainState, _runner.EpisodeLog]:
        """One ε-greedy step in every environment, added to the buffer."""
        key, action_key, step_key = jax.random.split(state.key, 3)
        action = self.act(state.params, state.frames, epsilon, action_key)
        envs, outcome = self.envs.step(step_key, state.envs, action)
        buffer = state.buffer.add(
            {
                "obs": state.envs.obs,
                "action": action,
                "reward": outcome.reward,
                "terminated": outcome.terminated,
                "truncated": outcome.truncated,
                # Where the time limit struck, the obs of the next step is of another episode.
                "next_obs": outcome.next_obs,
            }
        )
        ended = outcome.terminated | outcome.truncated
        frames = self.next_frames(state.frames, envs.obs, ended)
        log = _runner.EpisodeLog(
            episodes=jnp.sum(ended, dtype=jnp.int32),
            total_return=jnp.sum(jnp.where(ended, outcome.episode_return, 0.0)),
        )
        step = state.step + self.config.num_envs
        return state.replace(buffer=buffer, envs=envs, frames=frames, key=key, step=step), log

    def act(
        self,
        params: Any,
        frames: Shaped[Array, "E ... K"],
        epsilon: float | Float[Array, ""],
        key: PRNGKeyArray,
    ) -> Int[Array, " E"]:
        """The best action in each environment, or with probability ``epsilon`` a random one."""
        greedy = jnp.argmax(self.values(params, frames), axis=-1).astype(jnp.int32)
        explore_key, action_key = jax.random.split(key)
        explore = jax.random.uniform(explore_key, greedy.shape) < epsilon
        anything = jax.random.randint(action_key, greedy.shape, 0, self.envs.num_actions)
        return jnp.where(explore, anything, greedy)

    def learn(self, state: TrainState) -> tuple[TrainState, Float[Array, ""]]:
        """One update of the network, of its target and of the priorities; and the loss."""
        config = self.config
        key, sample_key = jax.random.split(state.key)
        batch = state.buffer.sample(sample_key, config.batch_size)
        weights = jaxbuf.importance_weights(state.buffer, batch, self.beta(state.step))

        def loss_fn(params: Any) -> tuple[Float[Array, ""], Float[Array, " B"]]:
            error = self.td_error(params, state.target_params, batch.data)
            return 0.5 * jnp.mean(weights * error**2), error

        (loss, error), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        with lenient_promotion():
            updates, opt_state = self.optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        target_params = optax.incremental_update(params, state.target_params, config.target_rate)
        buffer = state.buffer
        if config.sampler == "prioritized":
            buffer = buffer.update_priority(batch.slots, jnp.abs(error))
        learned = state.replace(
            params=params,
            target_params=target_params,
            opt_state=opt_state,
            buffer=buffer,
            key=key,
        )
        return learned, loss

    def values(self, params: Any, frames: Shaped[Array, "B ... K"]) -> Float[Array, "B A"]:
        """Of every action, for the last frames of B episodes."""
        values: Any = self.network.apply(params, _merge(frames))
        return values

    def td_error(self, params: Any, target_params: Any, window: Any) -> Float[Array, " B"]:
        """Value minus n-step target, the next action chosen by ``params`` (double DQN)."""
        config = self.config
        # The step to learn from; those before it are there for their frames.
        now = config.frame_stack - 1
        returns = jaxbuf.n_step(window, config.n_step, config.discount)
        last = returns.bootstrap_index[:, now] - 1
        row = jnp.arange(last.size)
        frames = jaxbuf.stack_frames(window, config.frame_stack).frames
        next_frames = _append(frames[row, last], window["next_obs"][row, last])
        value = _pick(self.values(params, frames[:, now]), window["action"][:, now])
        best = jnp.argmax(self.values(params, next_frames), axis=-1)
        next_value = _pick(self.values(target_params, next_frames), best)
        target = returns.reward[:, now] + returns.discount[:, now] * next_value
        return value - jax.lax.stop_gradient(target)

    def first_frames(self, obs: Shaped[Array, "E ..."]) -> Shaped[Array, "E ... K"]:
        """What an agent sees at the beginning of an episode: its first frame, repeated."""
        return jnp.repeat(obs[..., None], self.config.frame_stack, axis=-1)

    def next_frames(
        self,
        frames: Shaped[Array, "E ... K"],
        obs: Shaped[Array, "E ..."],
        ended: Bool[Array, " E"],
    ) -> Shaped[Array, "E ... K"]:
        """What it sees after a step, or at the beginning of the next episode."""
        begins = jnp.broadcast_to(ended.reshape(-1, *(1,) * obs.ndim), frames.shape)
        return jnp.where(begins, self.first_frames(obs), _append(frames, obs))

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
            states, frames, returns, running = carry
            action = jnp.argmax(self.values(state.params, frames), axis=-1)
            states, outcome = envs.step(key, states, action.astype(jnp.int32))
            returns = jnp.where(running, outcome.episode_return, returns)
            ended = outcome.terminated | outcome.truncated
            frames = self.next_frames(frames, states.obs, ended)
            return (states, frames, returns, running & ~ended), None

        reset_key, step_key = jax.random.split(key)
        states = envs.reset(reset_key)
        running = jnp.ones(envs.num_envs, jnp.bool_)
        start = (states, self.first_frames(states.obs), states.episode_return, running)
        keys = jax.random.split(step_key, envs.max_episode_steps)
        return jax.lax.scan(iteration, start, keys)[0][2]


def _pick(values: Float[Array, "B A"], action: Int[Array, " B"]) -> Float[Array, " B"]:
    return jnp.take_along_axis(values, action[:, None], axis=-1)[:, 0]


def _append(frames: Shaped[Array, "B ... K"], frame: Shaped[Array, "B ..."]) -> Array:
    """The last frames when another has come."""
    return jnp.concatenate([frames[..., 1:], frame[..., None]], axis=-1)


def _merge(frames: Shaped[Array, "B ... K"]) -> Shaped[Array, "B ..."]:
    """Frames as the channels of one image."""
    return frames.reshape(*frames.shape[:-2], -1)


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

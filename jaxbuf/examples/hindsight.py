"""DQN with and without hindsight on flipping bits: ``python -m jaxbuf.examples.hindsight --help``.

The task, and why nothing is learned on it without hindsight, is that of section 3.1 of
Andrychowicz et al., "Hindsight Experience Replay" (2017). Both agents, and all their seeds, are one
program.
"""

import dataclasses
import functools
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray
from numpy.typing import NDArray

import jaxbuf
from jaxbuf.examples import _cli, _report
from jaxbuf.examples._lenient import lenient_promotion
from jaxbuf.examples._network import QNetwork
from jaxbuf.examples._run_folder import SAVES, RunError, RunFolder, save_is_due
from jaxbuf.views.hindsight import Strategy

DESCRIPTION = """Train DQN to flip bits, with hindsight and without, several seeds of each at once.

An episode begins with random bits and asks for other random bits. An action flips one bit; every
step costs 1 until all bits are right. Of 2**15 goals a random agent meets next to none, so all that
it ever sees is -1; with hindsight it learns from the goals it met instead. Ends with a table and a
picture of the success rates of both. Takes less than a minute on two CPU cores.

  --bits 8                        few enough to learn without hindsight as well
  --strategy final                another source of goals
  --resume --episodes 16_000      train a finished run for longer"""
EXAMPLE = "hindsight"
CHUNKS = 50
AGENTS = ("DQN", "DQN with hindsight")


@dataclasses.dataclass(frozen=True)
class Config:
    """What to train, and how.

    Raises:
        ValueError: When two values do not go together; the message says what to change.
    """

    bits: int = _cli.option(15, _cli.integer(1, 64), "bits to flip, and steps of an episode")
    strategy: Literal["final", "future", "episode", "random"] = _cli.option(
        "future",
        _cli.choice(get_args(Strategy)),
        "where hindsight takes goals from: final, future, episode or random",
    )
    fraction: float = _cli.option(0.8, _cli.number(0, 1), "share of transitions with such a goal")
    seeds: int = _cli.option(3, _cli.integer(1), "how many seeds of each agent to train at once")
    seed: int = _cli.option(0, _cli.integer(0), "the first of them")
    episodes: int = _cli.option(8_000, _cli.integer(1), "episodes of each seed")
    num_envs: int = _cli.option(16, _cli.integer(1), "episodes side by side in each seed")
    updates: int = _cli.option(8, _cli.integer(1), "learner updates after each of these")
    batch_size: int = _cli.option(64, _cli.integer(1), "transitions in an update")
    capacity: int = _cli.option(8_000, _cli.integer(1, 2**24), "episodes in each seed's buffer")
    lr: float = _cli.option(1e-3, _cli.number(0, above=True), "learning rate")
    discount: float = _cli.option(0.98, _cli.number(0, 1), "discount per step")
    epsilon: float = _cli.option(0.2, _cli.number(0, 1), "share of random actions")
    target_rate: float = _cli.option(
        0.02, _cli.number(0, 1, above=True), "how far each update moves the target network"
    )
    hidden: int = _cli.option(128, _cli.integer(1), "width of each hidden layer")
    eval_episodes: int = _cli.option(100, _cli.integer(1), "greedy episodes per success rate")

    def __post_init__(self) -> None:
        if self.capacity < self.num_envs:
            raise ValueError(
                f"--capacity {self.capacity} is less than --num-envs {self.num_envs} episodes side "
                "by side; make the capacity at least as large"
            )
        if self.episodes < self.num_envs:
            raise ValueError(
                f"--episodes {self.episodes} are less than --num-envs {self.num_envs} side by "
                "side; ask for more episodes or fewer environments"
            )


class TrainState(struct.PyTreeNode):
    """Everything that training changes.

    Attributes:
        params: Parameters of the Q-network.
        target_params: Their moving average, which the targets use.
        opt_state: State of the optimizer.
        buffer: The replay buffer; its items are whole episodes.
        key: Source of all later randomness.
        fraction: Share of transitions that get another goal; 0 is DQN without hindsight.
    """

    params: Any
    target_params: Any
    opt_state: optax.OptState
    buffer: jaxbuf.ItemBuffer
    key: PRNGKeyArray
    fraction: Float[Array, ""]


class Episodes(NamedTuple):
    """E episodes of at most ``bits`` steps, padded.

    Attributes:
        states: The bits before each action, and after the last; ``[E, bits + 1, bits]``.
        goal: The bits asked for, ``[E, bits]``.
        action: Which bit was flipped, ``[E, bits]``.
        length: Steps until all bits were right, or all there are; ``[E]``.
        success: Whether all bits were right in the end, ``[E]``.
    """

    states: Bool[Array, "E T+1 N"]
    goal: Bool[Array, "E N"]
    action: Int[Array, "E T"]
    length: Int[Array, " E"]
    success: Bool[Array, " E"]


@dataclasses.dataclass(frozen=True)
class Agent:
    """DQN on flipping bits: pure functions of a ``TrainState``.

    Args:
        config: All settings.
    """

    config: Config

    @functools.cached_property
    def network(self) -> QNetwork:
        """The Q-network, which sees the bits that are and those that shall be."""
        return QNetwork(self.config.bits, self.config.hidden)

    @functools.cached_property
    def optimizer(self) -> optax.GradientTransformation:
        """Adam."""
        return optax.adam(self.config.lr)

    def init(self, key: PRNGKeyArray, fraction: Float[Array, ""]) -> TrainState:
        """A new network and an empty buffer."""
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
        )

    def train(self, state: TrainState, iterations: int) -> TrainState:
        """Alternate episodes and learning, all in one ``lax.scan``."""

        def iteration(state: TrainState, _: None) -> tuple[TrainState, None]:
            key, play_key = jax.random.split(state.key)
            episodes = self.play(state.params, play_key, self.config.num_envs, self.config.epsilon)
            state = state.replace(buffer=state.buffer.add(episodes), key=key)
            learn = jax.lax.scan(
                lambda state, _: (self.learn(state), None), state, length=self.config.updates
            )
            return learn[0], None

        return jax.lax.scan(iteration, state, length=iterations)[0]

    def play(self, params: Any, key: PRNGKeyArray, num_envs: int, epsilon: float) -> Episodes:
        """Whole ε-greedy episodes, which end when all bits are right."""
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
        """One update of the network and of its target."""
        key, *keys = jax.random.split(state.key, 4)
        episodes = state.buffer.sample(keys[0], self.config.batch_size).data
        batch = self.transitions(episodes, keys[1], keys[2], state.fraction)

        def loss_fn(params: Any) -> Float[Array, ""]:
            return 0.5 * jnp.mean(self.td_error(params, state.target_params, batch) ** 2)

        grads = jax.grad(loss_fn)(state.params)
        with lenient_promotion():
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
        """One step of each episode, some with a goal of hindsight."""
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
        """Value minus one-step target; nothing comes after a goal that is reached."""
        values = self.values(params, batch["obs"], batch["goal"])
        value = jnp.take_along_axis(values, batch["action"][:, None], axis=-1)[:, 0]
        # The state that an action led to is what it achieved.
        next_values = self.values(target_params, batch["achieved_goal"], batch["goal"])
        bootstrap = jnp.where(batch["reward"] == 0, 0.0, jnp.max(next_values, axis=-1))
        target = batch["reward"] + self.config.discount * bootstrap
        return value - jax.lax.stop_gradient(target)

    def values(
        self, params: Any, bits: Bool[Array, "B N"], goal: Bool[Array, "B N"]
    ) -> Float[Array, "B N"]:
        """Of flipping each bit."""
        values: Any = self.network.apply(params, _inputs(bits, goal))
        return values

    def evaluate(self, state: TrainState, key: PRNGKeyArray) -> Float[Array, ""]:
        """Success rate of greedy episodes."""
        episodes = self.play(state.params, key, self.config.eval_episodes, 0.0)
        return jnp.mean(episodes.success.astype(jnp.float32))


def reward(achieved: Bool[Array, "B N"], goal: Bool[Array, "B N"]) -> Float[Array, " B"]:
    """0 where all bits are right, else −1."""
    return -jnp.any(achieved != goal, axis=-1).astype(jnp.float32)


def _inputs(bits: Bool[Array, "B N"], goal: Bool[Array, "B N"]) -> Float[Array, "B 2*N"]:
    return 2.0 * jnp.concatenate([bits, goal], axis=-1).astype(jnp.float32) - 1.0


class Outcome(NamedTuple):
    """What a run came to.

    Attributes:
        episodes: Episodes of each seed so far, ``[P]``.
        success: Greedy success rates then, ``[P, 2, seeds]``: without hindsight, and with it.
        seconds: From start to end.
    """

    episodes: NDArray[np.int64]
    success: NDArray[np.float32]
    seconds: float


def main(argv: Sequence[str] | None = None) -> int:
    """Run this example from the command line and return its exit status."""
    parser = _parser()
    given = vars(parser.parse_args(argv))
    folder = RunFolder(given.pop("out"), EXAMPLE)
    resume: bool = given.pop("resume")
    try:
        record = folder.go_on(given, "episodes") if resume else None
        config = Config(**(record["config"] if record else given))
        if not resume:
            folder.begin()
    except (RunError, ValueError) as error:
        parser.error(str(error))
    try:
        outcome = _train(Agent(config), folder, record)
    except KeyboardInterrupt:
        print(f"\ninterrupted; {folder.how_to_go_on('episode')}", file=sys.stderr)
        return 130
    picture = folder.path / "success.png"
    _report.plot_groups(
        picture,
        outcome.episodes,
        {name: outcome.success[:, i] for i, name in enumerate(AGENTS)},
        title=f"flipping {config.bits} bits",
        xlabel="episodes per seed",
        ylabel="success rate of greedy episodes",
    )
    print(_table(outcome, config))
    print(f"success rates   {picture}\ncheckpoint      {folder.checkpoints}")
    return 0


def _parser() -> _cli.Parser:
    files = f"""\
  success.png  success rate of every seed, with hindsight and without
  checkpoint/  the whole training state, {SAVES} times in a run, the latest kept
  run.json     which example this folder belongs to"""
    return _cli.example_parser(EXAMPLE, DESCRIPTION, files, Config, amount="episodes")


def _train(agent: Agent, folder: RunFolder, record: dict[str, Any] | None) -> Outcome:
    begin = time.perf_counter()
    config = agent.config
    length = -(-config.episodes // (config.num_envs * CHUNKS))
    each = length * config.num_envs
    done: int = record["step"] if record else 0
    chunks = -(-(config.episodes - done) // each)
    episodes: list[int] = record["episodes"] if record else []
    success: list[list[list[float]]] = record["success"] if record else []
    init, chunk = _programs(agent, length)
    # On the device, as what a checkpoint holds is: so a resumed run is the same program.
    keys, fractions = jax.device_put(
        (
            jnp.stack([jax.random.key(config.seed + i) for i in range(config.seeds)]),
            jnp.asarray([0.0, config.fraction], jnp.float32),
        ),
        jax.devices()[0],
    )
    rows = config.seeds * len(AGENTS)
    with _report.Progress((done + chunks * each) * rows, unit=" episodes") as progress:
        progress.phase("compiling")
        # The same seeds with and without.
        like = jax.eval_shape(init, keys, fractions)
        states = folder.load_state(like) if record else init(keys, fractions)
        progress.advance(done * rows, np.nan)
        for i in range(chunks):
            states, rates = chunk(states)
            done += each
            episodes.append(done)
            success.append(np.asarray(rates).tolist())
            without, with_ = np.mean(success[-1], axis=1)
            progress.phase(f"success {without:.0%} without hindsight, {with_:.0%} with")
            progress.advance(each * rows, np.nan)
            if save_is_due(i, chunks):
                config_then = dataclasses.asdict(config)
                now = {"step": done, "config": config_then, "episodes": episodes}
                folder.save(done, states, {**now, "success": success})
    return Outcome(
        episodes=np.asarray(episodes),
        success=np.asarray(success, np.float32),
        seconds=time.perf_counter() - begin,
    )


# Kept, so that an agent that is run again in the same process is not compiled again.
@functools.cache
def _programs(
    agent: Agent, length: int
) -> tuple[Callable[..., Any], Callable[[Any], tuple[Any, Array]]]:
    """What begins a run and what goes on with it, for all seeds of both agents at once."""

    def go_on(state: TrainState) -> tuple[TrainState, Float[Array, ""]]:
        state = agent.train(state, length)
        key, eval_key = jax.random.split(state.key)
        return state.replace(key=key), agent.evaluate(state, eval_key)

    init = jax.vmap(jax.vmap(agent.init, in_axes=(0, None)), in_axes=(None, 0))
    # Donated, so that the buffers are updated where they are.
    chunk = jax.jit(
        jax.vmap(jax.vmap(go_on)), donate_argnums=0, compiler_options=jaxbuf.compiler_options()
    )
    return jax.jit(init), chunk


def _table(outcome: Outcome, config: Config) -> str:
    final = outcome.success[-1]
    rows = [
        [str(config.seed + i), *(f"{rate:.0%}" for rate in final[:, i]), "", ""]
        for i in range(config.seeds)
    ]
    means = [f"{rate:.0%}" for rate in final.mean(axis=1)]
    total = [f"{outcome.episodes[-1]:,}", f"{outcome.seconds:.1f} s"]
    return _report.table(["seed", *AGENTS, "episodes", "time"], [*rows, ["all", *means, *total]])


if __name__ == "__main__":
    sys.exit(main())

"""Train PPO in mazes, uniform ones and prioritized ones, several seeds at once.

Prioritized Level Replay (Jiang, Grefenstette and Rocktäschel, 2021): a buffer keeps the mazes with
the highest scores, here the positive value loss. Half of the mazes that are played come from it, by
the rank of their scores or because they were not played for long, and the others are new. The same
agent with new mazes only is trained beside it; all seeds of both are one program.

Many mazes are nearly empty and easy, and many have no way to the goal. The table has the share that
is solved of held-out mazes where the way to the goal is a detour: a little more with priorities.
Takes about a minute on two CPU cores. Some things to try:
  --replay 0.8                more mazes from the buffer
  --stale 0                   all of them by the rank of their scores
  --resume --steps 800_000    train a finished run for longer

Ends with a table. Writes, in runs/levels or where --out says:
  solved.png          share of mazes solved by every seed, with prioritized mazes and uniform ones
  log.csv             the same as numbers, about fifty times, and which mazes are played
"""

import dataclasses
import functools
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax import struct
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree

import common
import jaxbuf

AGENTS = {"uniform": 0.0, "prioritized": 1.0}
TRAINED = 2**30  # seeds of mazes; larger ones are held out


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of the training."""

    size: int = 6  # width and height of a maze
    walls: float = 0.8  # largest density of walls
    seeds: int = 3  # how many seeds of each agent to train at once
    seed: int = 0  # the first of them
    steps: int = 400_000  # environment steps of each seed
    num_envs: int = 32  # mazes side by side in each seed
    length: int = 24  # steps in each of them before it is scored
    capacity: int = 1_024  # mazes in each seed's buffer
    replay: float = 0.5  # share of the mazes that come from the buffer
    alpha: float = 1.0  # exponent of ranks
    stale: float = 0.3  # share of these that were not played for long
    epochs: int = 4  # updates after each of these
    clip: float = 0.2  # how far an update may change the probability of an action
    entropy: float = 0.01  # weight of the entropy of the policy
    lr: float = 1e-3  # learning rate
    discount: float = 0.97  # discount per step
    gae: float = 0.95  # discount of later advantages
    hidden: int = 64  # width of each hidden layer
    eval_levels: int = 128  # mazes that are held out

    def __post_init__(self) -> None:
        common.check(self, 2, "size")
        common.check(self, 1, "seeds", "steps", "length", "epochs", "hidden", "eval_levels")
        common.check(self, 0, "seed", "alpha", "clip", "entropy", "lr")
        common.check(self, 0, "walls", "discount", "gae", "stale", high=1)
        common.check(self, 1, "num_envs")
        # Of the buffer at least one maze is drawn.
        common.check(self, 1 / self.num_envs, "replay", high=1)
        common.check(self, self.num_envs, "capacity")


class Level(NamedTuple):
    """A maze: its walls, and the positions of the start and the goal."""

    walls: Bool[Array, "N N"]
    start: Int[Array, "2"]
    goal: Int[Array, "2"]


def make(seed: Int[Array, ""], size: int, walls: float) -> Level:
    """Returns the maze of a seed, anything from empty to full of walls."""
    keys = jax.random.split(jax.random.key(seed), 3)
    cells = jax.random.choice(keys[0], size * size, (2,), replace=False)
    start, goal = jnp.stack([cells // size, cells % size], axis=-1)
    filled = jax.random.bernoulli(keys[1], jax.random.uniform(keys[2], maxval=walls), (size, size))
    return Level(filled.at[cells // size, cells % size].set(False), start, goal)


def needs_detour(level: Level) -> Bool[Array, ""]:
    """Returns whether the shortest way to the goal is longer than the distance."""

    def grow(reached: Array, _: None) -> tuple[Array, Array]:
        padded = jnp.pad(reached, 1)
        beside = padded[2:, 1:-1] | padded[:-2, 1:-1] | padded[1:-1, 2:] | padded[1:-1, :-2]
        reached = (reached | beside) & ~level.walls
        return reached, reached[tuple(level.goal)]

    start = jnp.zeros_like(level.walls).at[tuple(level.start)].set(True)
    reached = jax.lax.scan(grow, start, length=level.walls.size)[1]
    straight = jnp.sum(jnp.abs(level.start - level.goal))
    return reached[-1] & ~reached[straight - 1]


def observe(level: Level, position: Int[Array, "2"], action: Array) -> Float[Array, " D"]:
    """Returns the walls and the goal relative to a position, and the last action."""
    far = level.walls.shape[0] - 1
    walls = jnp.pad(level.walls, far, constant_values=True)
    walls = jax.lax.dynamic_slice(walls, tuple(position), (2 * far + 1, 2 * far + 1))
    goal = jax.nn.one_hot(level.goal - position + far, 2 * far + 1).reshape(-1)
    direction = jnp.sign(level.goal - position)
    return jnp.concatenate([walls.reshape(-1), goal, direction, jax.nn.one_hot(action, 4)])


def move(level: Level, position: Array, action: Array) -> tuple[Int[Array, "2"], Bool[Array, ""]]:
    """Returns the position after a step, and whether the goal was reached; then it is the start.

    Walls and the edge stop a step.
    """
    to = position + jnp.array([[-1, 0], [1, 0], [0, -1], [0, 1]])[action]
    walls = jnp.pad(level.walls, 1, constant_values=True)
    to = jnp.where(walls[tuple(to + 1)], position, to)
    won = jnp.all(to == level.goal)
    return jnp.where(won, level.start, to), won


class ActorCritic(nn.Module):
    """A network with the logits of four actions, and a value."""

    width: int

    @nn.compact
    def __call__(self, x: Float[Array, "... D"]) -> tuple[Float[Array, "... 4"], Array]:
        """Returns the logits and the value for each observation."""
        for _ in range(2):
            x = nn.tanh(nn.Dense(self.width)(x))
        return nn.Dense(4)(x), nn.Dense(1)(x)[..., 0]


class TrainState(struct.PyTreeNode):
    """The state that training changes."""

    params: PyTree
    opt_state: optax.OptState
    levels: jaxbuf.ItemBuffer  # the seeds of mazes
    key: PRNGKeyArray
    prioritized: Float[Array, ""]  # 1, or 0 for an agent that plays new mazes only
    step: Int[Array, ""]  # environment steps so far


@dataclasses.dataclass(frozen=True)
class Agent:
    """PPO: pure functions of a ``TrainState``."""

    config: Config

    @functools.cached_property
    def optimizer(self) -> optax.GradientTransformation:
        """Adam with clipped gradients."""
        return optax.chain(optax.clip_by_global_norm(1.0), optax.adam(self.config.lr))

    def init(self, key: PRNGKeyArray, prioritized: Float[Array, ""]) -> TrainState:
        """Returns the state of a new network, without mazes in the buffer."""
        c = self.config
        key, params_key = jax.random.split(key)
        levels = jaxbuf.ItemBuffer.create(
            {"seed": jnp.int32(0)},
            c.capacity,
            sampler=jaxbuf.Blend(
                (jaxbuf.RankBased(alpha=c.alpha, by="score"), jaxbuf.Staleness()),
                (1 - c.stale, c.stale),
            ),
            evictor=jaxbuf.Lowest(),
            diversity=jaxbuf.Diversity(0.0),
        )
        level = make(jnp.int32(0), c.size, c.walls)
        params = ActorCritic(c.hidden).init(params_key, observe(level, level.start, jnp.int32(0)))
        opt_state = self.optimizer.init(params)
        return TrainState(params, opt_state, levels, key, prioritized, jnp.int32(0))

    def make(self, seeds: Int[Array, " E"]) -> Level:
        """Returns the mazes of several seeds."""
        return jax.vmap(lambda seed: make(seed, self.config.size, self.config.walls))(seeds)

    def train(self, state: TrainState, length: int) -> tuple[TrainState, dict[str, Array]]:
        """Plays and learns, all in one ``lax.scan``; also returns metrics."""
        state, metrics = jax.lax.scan(lambda s, _: self.iteration(s), state, length=length)
        key, play_key = jax.random.split(state.key)
        # Enough mazes for most of these to need a detour; they come first.
        many = self.make(TRAINED + jnp.arange(32 * self.config.eval_levels))
        order = jnp.argsort(~jax.vmap(needs_detour)(many))[: self.config.eval_levels]
        held_out = jax.tree.map(lambda leaf: leaf[order], many)
        steps, _ = self.play(state.params, held_out, play_key)
        metrics["solved"] = jnp.any(steps["won"], axis=0)
        detour = jax.vmap(needs_detour)(self.make(state.levels.data["seed"]))
        metrics["detours"] = jnp.sum(detour & state.levels.live) / state.levels.size
        return state.replace(key=key), jax.tree.map(jnp.mean, metrics)

    def play(self, params: PyTree, levels: Level, key: PRNGKeyArray) -> tuple[PyTree, Array]:
        """Returns steps in all mazes, leaves ``[T, E, ...]``, and the values after the last."""
        network: Any = ActorCritic(self.config.hidden)

        def step(now: tuple[Array, Array], key: PRNGKeyArray) -> tuple[PyTree, dict[str, Array]]:
            obs = jax.vmap(observe)(levels, *now)
            logits, value = network.apply(params, obs)
            action = jax.random.categorical(key, logits)
            position, won = jax.vmap(move)(levels, now[0], action)
            log_prob = log_probability(logits, action)
            steps = {"obs": obs, "action": action, "log_prob": log_prob, "value": value}
            return (position, action), {**steps, "won": won}

        keys = jax.random.split(key, self.config.length)
        start = (levels.start, jnp.full(levels.start.shape[0], -1))
        end, steps = jax.lax.scan(step, start, keys)
        return steps, network.apply(params, jax.vmap(observe)(levels, *end))[1]

    def iteration(self, state: TrainState) -> tuple[TrainState, dict[str, Array]]:
        """Plays one batch of mazes, scores them, and learns from them."""
        c = self.config
        key, draw_key, new_key, play_key = jax.random.split(state.key, 4)
        seeds = jax.random.randint(new_key, (c.num_envs,), 0, TRAINED)
        old = round(c.replay * c.num_envs)
        levels, batch = state.levels.next_batch(draw_key, old)
        again = (jnp.arange(c.num_envs) < old) & (state.prioritized > 0)
        again &= state.levels.can_sample(c.num_envs)
        seeds = jnp.where(again, jnp.resize(batch.data["seed"], (c.num_envs,)), seeds)
        steps, last = self.play(state.params, self.make(seeds), play_key)
        # An episode that has not been won by now ends, and another one goes on.
        last = jnp.where(jnp.any(steps["won"], axis=0), last, 0.0)
        advantage = self.advantages(steps, last)
        score = jnp.mean(jnp.maximum(advantage, 0.0), axis=0)
        levels = levels.update_score(batch.slots, score[:old], mask=again[:old])
        levels = levels.add({"seed": seeds}, score=score, mask=~again)
        target = advantage + steps["value"]
        advantage = (advantage - jnp.mean(advantage)) / (jnp.std(advantage) + 1e-6)
        network: Any = ActorCritic(c.hidden)

        def loss_fn(params: PyTree) -> Float[Array, ""]:
            logits, value = network.apply(params, steps["obs"])
            ratio = jnp.exp(log_probability(logits, steps["action"]) - steps["log_prob"])
            clipped = jnp.clip(ratio, 1 - c.clip, 1 + c.clip)
            gain = jnp.minimum(ratio * advantage, clipped * advantage)
            log_probs = jax.nn.log_softmax(logits)
            entropy = -jnp.sum(jnp.exp(log_probs) * log_probs, axis=-1)
            return jnp.mean(0.5 * (value - target) ** 2 - gain - c.entropy * entropy)

        def update(carry: PyTree, _: None) -> tuple[PyTree, None]:
            params, opt_state = carry
            updates, opt_state = self.optimizer.update(jax.grad(loss_fn)(params), opt_state, params)
            return (optax.apply_updates(params, updates), opt_state), None

        carry = (state.params, state.opt_state)
        (params, opt_state), _ = jax.lax.scan(update, carry, length=c.epochs)
        step = state.step + c.num_envs * c.length
        state = state.replace(params=params, opt_state=opt_state, levels=levels, key=key, step=step)
        return state, {"score": score, "solved in training": jnp.any(steps["won"], axis=0)}

    def advantages(self, steps: dict[str, Array], last: Float[Array, " E"]) -> Float[Array, "T E"]:
        """Returns generalized advantages; an episode ends at the goal, which earns 1."""
        c = self.config

        def back(carry: tuple[Array, Array], now: PyTree) -> tuple[tuple[Array, Array], Array]:
            advantage, after = carry
            won, value = now
            delta = jnp.where(won, 1.0, c.discount * after) - value
            advantage = delta + jnp.where(won, 0.0, c.discount * c.gae * advantage)
            return (advantage, value), advantage

        now = (steps["won"], steps["value"])
        return jax.lax.scan(back, (jnp.zeros_like(last), last), now, reverse=True)[1]


def log_probability(logits: Float[Array, "... A"], action: Int[Array, "..."]) -> Array:
    """Returns the logarithm of the probability of each action."""
    return jnp.take_along_axis(jax.nn.log_softmax(logits), action[..., None], axis=-1)[..., 0]


def train(run: common.Run[Config]) -> None:
    """Trains all seeds in uniform and in prioritized mazes, and prints the results."""
    c = run.config
    title = f"mazes of size {c.size} that need a detour"
    common.compare(run, Agent(c), AGENTS, "solved", c.num_envs * c.length, title)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs this example from the command line and returns its exit status."""
    return common.main("levels", train, Config(), __doc__, argv)


if __name__ == "__main__":
    sys.exit(main())

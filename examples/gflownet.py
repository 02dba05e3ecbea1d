"""Train GFlowNets on a hypergrid with several replay buffers, to compare them.

A GFlowNet learns to stop at each point of the grid with a probability proportional to its reward.
Nearly all reward is near the corners, with hardly any in between (Bengio et al., 2021). The loss is
trajectory balance (Malkin et al., "Trajectory balance: Improved credit assignment in GFlowNets",
2022) with a uniform backward policy. All updates train on the same number of trajectories, but with
a buffer some of them are terminal states that are walked back to the origin:
  none     all are fresh
  fifo     from the latest terminal states
  reward   from the states of highest reward, each as often as it was found
  diverse  likewise in proportion to it, and once the buffer is full only new states are added

Takes a minute or two on two CPU cores. Some things to try:
  --buffer none diverse           only some of the buffers
  --dims 2 --height 16            another grid
  --resume --steps 4000           train a finished run for longer

Ends with a table (medians over the seeds, and their range). Writes, in runs/gflownet or where --out
says:
  modes.png           modes found over fresh trajectories, of every seed with every buffer
  distance.png        L1 distance to the target over updates
  marginals.png       the first two coordinates where trajectories stop: target and learned
  log.csv             modes and distances as numbers, fifty times in a run
"""

import dataclasses
import functools
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import struct
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree
from matplotlib.figure import Figure

import common
import jaxbuf

Buffer = Literal["none", "fifo", "reward", "diverse"]
CHUNKS = 50
MAX_STATES = 2**20  # of a grid whose distribution is computed
NEVER = 2**31 - 1


class Trajectories(NamedTuple):
    """B trajectories from the origin to their terminal states, padded to one length T."""

    states: Int[Array, "B T D"]  # before each action; past the end, the terminal state
    actions: Int[Array, "B T"]  # the coordinate that grows by one, or D to stop; past the end, D
    lengths: Int[Array, " B"]  # number of actions, including the one that stops it

    @property
    def mask(self) -> Bool[Array, "B T"]:
        """True for actions, False for padding."""
        return jnp.arange(self.actions.shape[1], dtype=jnp.int32)[None] < self.lengths[:, None]


@dataclasses.dataclass(frozen=True)
class HyperGrid:
    """A grid of ``height`` points in each of ``dims`` dimensions, with a mode near every corner.

    A trajectory begins at the origin, lets one coordinate after another grow by one, and stops
    anywhere. With ``a_i = |x_i / (height - 1) - 1/2|``, stopping at ``x`` is worth ``background``,
    plus 0.5 where all ``a_i > 0.25``, plus 2 where all ``0.3 < a_i < 0.4``. The latter are the
    modes: a small cube near each of the ``2 ** dims`` corners, with hardly any reward in between.

    Args:
        dims: D.
        height: H.
        background: Reward away from the corners, R0 of the paper: the smaller, the harder it is to
            get from one corner to the next.

    Raises:
        ValueError: If the grid has no mode, or more than ``MAX_STATES`` states.

    References:
        Bengio et al., Flow Network based Generative Models for Non-Iterative Diverse Candidate
        Generation, NeurIPS 2021.

    Example:
        >>> import jax.numpy as jnp
        >>> grid = HyperGrid(dims=2, height=8, background=0.25)
        >>> states = jnp.array([[3, 0], [0, 7], [1, 6]])
        >>> [round(float(reward), 2) for reward in jnp.exp(grid.log_reward(states))]
        [0.25, 0.75, 2.75]
        >>> grid.mode(states).tolist()
        [4, 4, 2]
    """

    dims: int
    height: int
    background: float = 1e-3

    def __post_init__(self) -> None:
        if self.num_states > MAX_STATES:
            raise ValueError(
                f"a grid of height {self.height} in {self.dims} dimensions has {self.num_states:,} "
                f"states; its exact distribution is computed, so ask for at most {MAX_STATES:,}"
            )
        off_center = [abs(2 * x - self.height + 1) for x in range(self.height)]
        if not any(_near(5 * off, 3 * self.height - 3, 4 * self.height - 4) for off in off_center):
            raise ValueError(
                f"a grid of height {self.height} has no mode: no coordinate lies between 0.3 and "
                "0.4 of its length away from the middle; ask for a height of 8, or of at least 12"
            )

    @property
    def num_states(self) -> int:
        """The number of points of the grid, N."""
        return self.height**self.dims

    @property
    def num_modes(self) -> int:
        """The number of cubes of highest reward, one near each corner, M."""
        return 2**self.dims

    @property
    def num_actions(self) -> int:
        """The number of actions: one for each coordinate, and the last one to stop."""
        return self.dims + 1

    @property
    def max_length(self) -> int:
        """The number of actions in the longest trajectory, T."""
        return self.dims * (self.height - 1) + 1

    def states(self) -> Int[Array, "N D"]:
        """Returns all points, in the order of ``index``."""
        axes = [jnp.arange(self.height, dtype=jnp.int32)] * self.dims
        return jnp.stack(jnp.meshgrid(*axes, indexing="ij"), axis=-1).reshape(-1, self.dims)

    def legal(self, states: Int[Array, "... D"]) -> Bool[Array, "... A"]:
        """Returns True for legal actions; a coordinate may grow up to ``height - 1``."""
        stop = jnp.ones((*states.shape[:-1], 1), jnp.bool_)
        return jnp.concatenate([states < self.height - 1, stop], axis=-1)

    def step(self, states: Int[Array, "... D"], actions: Int[Array, "..."]) -> Int[Array, "... D"]:
        """Returns the next states; stopping leaves a state as it is."""
        return states + jax.nn.one_hot(actions, self.dims, dtype=jnp.int32)

    def log_reward(self, states: Int[Array, "... D"]) -> Float[Array, "..."]:
        """Returns the log of the reward of stopping in each state."""
        off = self._off_center(states)
        span = self.height - 1
        ring = jnp.all(2 * off > span, axis=-1)
        mode = jnp.all(_near(5 * off, 3 * span, 4 * span), axis=-1)
        reward = jnp.where(ring, jnp.float32(0.5), 0.0) + jnp.where(mode, jnp.float32(2.0), 0.0)
        return jnp.log(reward + jnp.float32(self.background))

    def mode(self, states: Int[Array, "... D"]) -> Int[Array, "..."]:
        """Returns the number of the mode that a state is in, or M if it is in none.

        Bit d of the number is 1 if coordinate d is above the middle.
        """
        span = self.height - 1
        inside = jnp.all(_near(5 * self._off_center(states), 3 * span, 4 * span), axis=-1)
        high = (2 * states > span).astype(jnp.int32)
        corner = high @ (1 << jnp.arange(self.dims, dtype=jnp.int32))
        return jnp.where(inside, corner, self.num_modes)

    def target(self) -> Float[Array, " N"]:
        """Returns the distribution to learn: the reward of each state, divided by the total."""
        return jax.nn.softmax(self.log_reward(self.states()))

    def stopping_distribution(self, log_policy: Float[Array, "N A"]) -> Float[Array, " N"]:
        """Returns the exact distribution of the terminal states of a policy.

        Flow is passed on from the origin, one more action at a time.

        Args:
            log_policy: Log probability of each action in each of ``states()``; −inf for an illegal
                one.
        """
        grid = (self.height,) * self.dims
        policy = jnp.exp(log_policy).reshape(*grid, self.num_actions)
        origin = jnp.zeros(grid, jnp.float32).at[(0,) * self.dims].set(1.0)

        def pass_on(_: Array, flow: Array) -> Array:
            total = origin
            for axis in range(self.dims):
                leaving = jax.lax.slice_in_dim(flow * policy[..., axis], 0, -1, axis=axis)
                arriving = [(int(axis == other), 0) for other in range(self.dims)]
                total = total + jnp.pad(leaving, arriving)
            return total

        flow = jax.lax.fori_loop(0, self.max_length - 1, pass_on, origin)
        return (flow * policy[..., self.dims]).reshape(-1)

    def log_backward(self, trajectories: Trajectories) -> Float[Array, " B"]:
        """Returns the log probability of the way back if all parents are equally likely."""
        parents = jnp.sum(trajectories.states > 0, axis=-1, dtype=jnp.float32)
        # The origin, where each trajectory begins, has no parents.
        log_parents = jnp.where(trajectories.mask & (parents > 0), jnp.log(parents), 0.0)
        return -jnp.sum(log_parents, axis=1)

    def backward(self, key: PRNGKeyArray, states: Int[Array, "B D"]) -> Trajectories:
        """Returns trajectories to given states, walked back with all parents equally likely."""
        length = jnp.sum(states, axis=-1, dtype=jnp.int32) + 1
        steps = jnp.arange(self.max_length, dtype=jnp.int32)
        point = jax.random.uniform(key, (self.max_length, states.shape[0]))

        def back(state: Array, inputs: tuple[Array, Array]) -> tuple[Array, tuple[Array, Array]]:
            step, point = inputs
            coordinate = pick(point, (state > 0).astype(jnp.float32))
            action = jnp.where(step < length - 1, coordinate, self.dims)
            state = state - jax.nn.one_hot(action, self.dims, dtype=jnp.int32)
            return state, (state, action)

        _, (states, actions) = jax.lax.scan(back, states, (steps, point), reverse=True)
        return Trajectories(jnp.swapaxes(states, 0, 1), actions.T, length)

    def _off_center(self, states: Int[Array, "... D"]) -> Int[Array, "... D"]:
        # In units of half a step, which are integers, so that no bound is missed by rounding.
        return jnp.abs(2 * states - (self.height - 1))


def pick(point: Float[Array, " B"], mass: Float[Array, "B A"]) -> Int[Array, " B"]:
    """Returns the action at a point in [0, 1), if each takes a share in proportion to its mass."""
    ends = jnp.cumsum(mass, axis=-1)
    return jnp.sum(ends <= point[:, None] * ends[:, -1:], axis=-1, dtype=jnp.int32)


def _near(off: int | Array, low: int, high: int) -> Array | bool:
    return (low < off) & (off < high)


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of the training."""

    dims: int = 4  # dimensions of the grid
    height: int = 8  # points along each
    background: float = 1e-3  # reward between the corners; less is harder
    seed: int = 0  # the first seed
    steps: int = 2_000  # updates of each seed
    batch_size: int = 16  # trajectories in an update
    replay_ratio: float = 0.5  # share of them that is replayed, if there is a buffer
    capacity: int = 300  # terminal states in a buffer
    temperature: float = 1.0  # of drawing from the diverse buffer by log reward
    exploration: float = 0.05  # share of random actions
    lr: float = 1e-3  # learning rate of the policy
    log_z_lr: float = 0.1  # learning rate of the log of the total reward
    hidden: int = 64  # width of both hidden layers

    def __post_init__(self) -> None:
        common.check(self, 1, "dims", "height", "steps", "batch_size", "capacity", "hidden")
        common.check(self, 0, "replay_ratio", "exploration", high=1)
        common.check(self, 1e-30, "background", "temperature")
        common.check(self, 0, "seed", "lr", "log_z_lr")
        _ = self.grid
        if self.always_fresh:
            return
        if not 0 < self.replayed < self.batch_size:
            raise ValueError(
                f"of --batch-size {self.batch_size}, --replay-ratio {self.replay_ratio} leaves "
                f"{self.replayed} to be replayed; choose a ratio that leaves at least one fresh "
                "and one replayed, or --buffer none"
            )
        common.check(self, self.replayed, "capacity")

    @property
    def always_fresh(self) -> bool:
        """True if no trajectories are replayed."""
        return False

    @functools.cached_property
    def grid(self) -> HyperGrid:
        """The grid to learn."""
        return HyperGrid(self.dims, self.height, self.background)

    @property
    def replayed(self) -> int:
        """The number of replayed trajectories in an update."""
        return round(self.batch_size * self.replay_ratio)


class Policy(nn.Module):
    """A network that maps the coordinates of a state to the logits of all actions."""

    height: int
    num_actions: int
    hidden: int

    @nn.compact
    def __call__(self, states: Int[Array, "... D"]) -> Float[Array, "... A"]:
        """Returns the logits, which are all 0 at first."""
        x = jax.nn.one_hot(states, self.height, dtype=jnp.float32)
        x = x.reshape(*states.shape[:-1], -1)
        x = nn.relu(nn.Dense(self.hidden)(x))
        x = nn.relu(nn.Dense(self.hidden)(x))
        return nn.Dense(self.num_actions, kernel_init=nn.initializers.zeros)(x)


@dataclasses.dataclass(frozen=True)
class GFlowNet:
    """A policy on a grid that learns to stop in proportion to reward, and its loss.

    Parameters are ``{"policy": the network's, "log_z": the log of the total reward}``.
    """

    grid: HyperGrid
    hidden: int  # width of both hidden layers

    @functools.cached_property
    def network(self) -> Policy:
        """The forward policy."""
        return Policy(self.grid.height, self.grid.num_actions, self.hidden)

    def init(self, key: PRNGKeyArray) -> PyTree:
        """Returns parameters of a policy that takes all legal actions with the same probability."""
        origin = jnp.zeros(self.grid.dims, jnp.int32)
        return {"policy": self.network.init(key, origin), "log_z": jnp.float32(0)}

    def log_policy(self, params: PyTree, states: Int[Array, "... D"]) -> Float[Array, "... A"]:
        """Returns the log probability of each action; −inf for an illegal one."""
        logits: PyTree = self.network.apply(params["policy"], states)
        return jax.nn.log_softmax(jnp.where(self.grid.legal(states), logits, -jnp.inf))

    def rollout(
        self, params: PyTree, key: PRNGKeyArray, count: int, exploration: float
    ) -> Trajectories:
        """Returns ``count`` padded trajectories with a share ``exploration`` of random actions."""
        grid = self.grid

        def forward(carry: tuple[Array, Array], point: Array) -> tuple[tuple[Array, Array], PyTree]:
            state, running = carry
            mass = jnp.exp(self.log_policy(params, state))
            legal = grid.legal(state).astype(jnp.float32)
            uniform = legal / jnp.sum(legal, axis=-1, keepdims=True)
            action = pick(point, mass + exploration * (uniform - mass))
            action = jnp.where(running, action, grid.dims)
            after = (grid.step(state, action), running & (action < grid.dims))
            return after, (state, action, running)

        start = (jnp.zeros((count, grid.dims), jnp.int32), jnp.ones(count, jnp.bool_))
        points = jax.random.uniform(key, (grid.max_length, count))
        _, (states, actions, running) = jax.lax.scan(forward, start, points)
        lengths = jnp.sum(running, axis=0, dtype=jnp.int32)
        return Trajectories(jnp.swapaxes(states, 0, 1), actions.T, lengths)

    def imbalance(self, params: PyTree, trajectories: Trajectories) -> Float[Array, " B"]:
        """Returns the log ratio of each trajectory's forward and backward flow; 0 is balance."""
        log_policy = self.log_policy(params, trajectories.states)
        log_prob = jnp.take_along_axis(log_policy, trajectories.actions[..., None], axis=-1)[..., 0]
        log_forward = jnp.sum(jnp.where(trajectories.mask, log_prob, 0.0), axis=1)
        # The padding repeats the state in which a trajectory stopped.
        log_reward = self.grid.log_reward(trajectories.states[:, -1])
        log_backward = self.grid.log_backward(trajectories)
        return params["log_z"] + log_forward - log_reward - log_backward

    def stopping_distribution(self, params: PyTree) -> Float[Array, " N"]:
        """Returns the exact distribution of the terminal states of the policy."""
        return self.grid.stopping_distribution(self.log_policy(params, self.grid.states()))


class TrainState(struct.PyTreeNode):
    """The state that training changes."""

    params: PyTree
    opt_state: optax.OptState
    buffer: jaxbuf.ItemBuffer | None  # terminal states
    found: Int[Array, " M"]  # the fresh trajectory that first reached each mode, or NEVER
    fresh: Int[Array, ""]  # fresh trajectories so far
    step: Int[Array, ""]  # updates so far
    key: PRNGKeyArray  # of all later randomness


@dataclasses.dataclass(frozen=True)
class Agent:
    """Training with one kind of buffer: pure functions of a ``TrainState``."""

    config: Options
    kind: str  # of buffer: none, fifo, reward or diverse

    @functools.cached_property
    def gflownet(self) -> GFlowNet:
        """The GFlowNet to train."""
        return GFlowNet(self.config.grid, self.config.hidden)

    @property
    def fresh(self) -> int:
        """The number of fresh trajectories in an update."""
        return self.config.batch_size - (0 if self.kind == "none" else self.config.replayed)

    @functools.cached_property
    def optimizer(self) -> optax.GradientTransformation:
        """Adam, with a much larger learning rate for ``log_z`` than for the policy."""
        rates = {"policy": self.config.lr, "log_z": self.config.log_z_lr}
        return optax.multi_transform(
            {name: optax.adam(rate) for name, rate in rates.items()}, {name: name for name in rates}
        )

    def init(self, key: PRNGKeyArray) -> TrainState:
        """Returns the state of a new policy and an empty buffer."""
        key, params_key = jax.random.split(key)
        params, zero = self.gflownet.init(params_key), jnp.int32(0)
        found = jnp.full(self.config.grid.num_modes, NEVER, jnp.int32)
        opt_state, buffer = self.optimizer.init(params), self.new_buffer()
        return TrainState(params, opt_state, buffer, found, zero, zero, key)

    def new_buffer(self) -> jaxbuf.ItemBuffer | None:
        """Returns an empty buffer of terminal states; None for the kind ``none``."""
        config = self.config
        state = jax.ShapeDtypeStruct((config.dims,), jnp.int32)
        if self.kind == "fifo":
            return jaxbuf.terminal_state_buffer(state, config.capacity)
        if self.kind == "reward":
            return jaxbuf.reward_prioritized(state, config.capacity)
        if self.kind == "diverse":
            temperature = config.temperature
            return jaxbuf.diverse_reward_prioritized(
                state, config.capacity, temperature=temperature
            )
        return None

    def train(self, state: TrainState, iterations: int) -> TrainState:
        """Updates ``iterations`` times, all in one ``lax.scan``."""
        return jax.lax.scan(self.update, state, length=iterations)[0]

    def add(self, buffer: Any, states: Int[Array, "B D"], mask: Bool[Array, " B"]) -> Any:
        """Returns the buffer with more terminal states."""
        score = None if self.kind == "fifo" else self.config.grid.log_reward(states)
        return buffer.add(states, score=score, mask=mask)

    def update(self, state: TrainState, _: None = None) -> tuple[TrainState, Int[Array, "F D"]]:
        """Rolls out, adds, replays and learns; also returns the fresh terminal states."""
        config, grid = self.config, self.config.grid
        key, rollout_key, replay_key = jax.random.split(state.key, 3)
        trajectories = self.gflownet.rollout(
            state.params, rollout_key, self.fresh, config.exploration
        )
        last, valid = jaxbuf.terminal_states(trajectories.states, trajectories.lengths)
        number = state.fresh + 1 + jnp.arange(self.fresh, dtype=jnp.int32)
        found = state.found.at[grid.mode(last)].min(number, mode="drop")
        buffer = state.buffer
        if buffer is not None:
            # In this order, since a buffer that is sampled before it is added to would be copied.
            buffer = self.add(buffer, last, valid)
            sample_key, backward_key = jax.random.split(replay_key)
            batch = buffer.sample(sample_key, config.replayed)
            trajectories = jax.tree.map(
                lambda *leaves: jnp.concatenate(leaves),
                trajectories,
                grid.backward(backward_key, batch.data),
            )
            valid = jnp.concatenate([valid, batch.valid])

        def loss_fn(params: PyTree) -> Float[Array, ""]:
            loss = self.gflownet.imbalance(params, trajectories) ** 2
            # Fresh trajectories are always valid, so the mean is over at least one row.
            return jnp.mean(loss, where=valid)

        grads = jax.grad(loss_fn)(state.params)
        updates, opt_state = self.optimizer.update(grads, state.opt_state, state.params)
        params: PyTree = optax.apply_updates(state.params, updates)
        fresh, step = state.fresh + self.fresh, state.step + 1
        return TrainState(params, opt_state, buffer, found, fresh, step, key), last


@dataclasses.dataclass(frozen=True)
class Config(Options):
    """Options of the training, and the buffers to compare."""

    buffer: tuple[Buffer, ...] = get_args(Buffer)  # which buffers
    seeds: int = 4  # how many seeds to train at once

    def __post_init__(self) -> None:
        super().__post_init__()
        common.check(self, 1, "seeds")
        if not 0 < len(self.buffer) == len(set(self.buffer)):
            raise ValueError(f"--buffer is {' '.join(self.buffer)}; name each once")

    @property
    def always_fresh(self) -> bool:
        """True if no trajectories are replayed."""
        return self.buffer == ("none",)


class Outcome(NamedTuple):
    """The result of training with one buffer."""

    updates: Float[np.ndarray, " P"]  # of each seed after each chunk
    l1: Float[np.ndarray, "P S"]  # sum of absolute differences to the target then, from 0 to 2
    learned: Float[np.ndarray, "S N"]  # distributions of terminal states in the end
    found: Float[np.ndarray, "S M"]  # the fresh trajectory that first reached each mode, or inf
    fresh: int  # number of fresh trajectories of each seed
    seconds: list[float]  # duration of each chunk now; that of the first includes compilation

    def modes(self, fresh: Int[np.ndarray, " P"]) -> Float[np.ndarray, "P S"]:
        """Returns modes found within ``fresh`` trajectories; NaN past the end."""
        count = np.sum(self.found[None] <= fresh[:, None, None], axis=-1)
        return np.where(fresh[:, None] <= self.fresh, count, np.nan)

    @property
    def to_all(self) -> Float[np.ndarray, " S"]:
        """The number of fresh trajectories until all modes were found."""
        return self.found.max(axis=1)


# Cached, so that an agent that runs again in the same process is not compiled again.
@functools.cache
def programs(agent: Agent, length: int) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Returns jitted functions that begin and go on training with one buffer, for all seeds."""
    chunk = jax.vmap(lambda state: agent.train(state, length))
    # Donated, so that the buffers are updated in place.
    chunk = jax.jit(chunk, donate_argnums=0, compiler_options=jaxbuf.compiler_options())
    return jax.jit(jax.vmap(agent.init)), chunk


@functools.cache
def stopping_distribution(gflownet: GFlowNet) -> Callable[[PyTree], Float[Array, "S N"]]:
    """Returns a function that computes the exact terminal distributions of all seeds."""
    return jax.jit(jax.vmap(gflownet.stopping_distribution))


def train(run: common.Run[Config]) -> None:
    """Trains with all buffers, which take turns chunk by chunk, and prints the results."""
    began = time.perf_counter()
    config = run.config
    length = math.ceil(config.steps / CHUNKS)
    agents = {kind: Agent(config, kind) for kind in config.buffer}
    keys = run.keys
    inits, chunks = zip(*(programs(agent, length) for agent in agents.values()), strict=True)
    states: dict[str, TrainState] = run.begin(
        lambda keys: {kind: init(keys) for kind, init in zip(agents, inits, strict=True)}, keys
    )
    stops = stopping_distribution(GFlowNet(config.grid, config.hidden))
    target = np.asarray(config.grid.target())
    seconds: dict[str, list[float]] = {kind: [] for kind in agents}

    def next_chunk(
        states: dict[str, TrainState],
    ) -> tuple[dict[str, TrainState], dict[str, PyTree], str]:
        states, metrics = dict(states), dict[str, PyTree]()
        for kind, chunk in zip(agents, chunks, strict=True):
            started = time.perf_counter()
            states[kind] = jax.block_until_ready(chunk(states[kind]))
            seconds[kind].append(time.perf_counter() - started)
            l1 = np.abs(np.asarray(stops(states[kind].params)) - target).sum(axis=1)
            modes = np.sum(np.asarray(states[kind].found) < NEVER, axis=1)
            metrics[kind] = {"l1": l1, "modes": modes}
        shown = ", ".join(f"{kind} {m['modes'].mean():.1f}" for kind, m in metrics.items())
        return states, metrics, f"modes {shown}"

    states, _ = run.train(
        states,
        next_chunk,
        done=int(next(iter(states.values())).step[0]),
        until=config.steps,
        size=length,
        unit="updates",
        rows=config.seeds * len(agents),
    )
    found = {kind: np.asarray(state.found, np.float64) for kind, state in states.items()}
    outcomes = {
        kind: Outcome(
            updates=run.logged("step"),
            l1=run.logged(f"{kind}/l1"),
            learned=np.asarray(stops(states[kind].params)),
            found=np.where(found[kind] < NEVER, found[kind], np.inf),
            fresh=int(states[kind].fresh[0]),
            seconds=seconds[kind],
        )
        for kind in agents
    }
    print(_table(outcomes, config))
    print(compare(outcomes, time.perf_counter() - began))
    _draw(run.out, outcomes, config)
    print(f"pictures, log and checkpoint are in {run.out}")


def _table(outcomes: dict[str, Outcome], config: Config) -> str:
    length = math.ceil(config.steps / CHUNKS)
    header = [
        "buffer",
        "L1 distance",
        f"modes of {config.grid.num_modes}",
        "trajectories to all modes",
        "updates to all modes",
        "trajectories/s",
        "time",
    ]
    rows: list[list[str]] = []
    for kind, outcome in outcomes.items():
        # The first chunk is mostly compilation.
        measured = outcome.seconds[1:] or outcome.seconds
        trained = len(measured) * length * config.batch_size * config.seeds
        modes = outcome.modes(np.asarray([outcome.fresh]))[0]
        rows.append(
            [
                kind,
                _median(outcome.l1[-1], ".2f"),
                _median(modes, "g"),
                _median(outcome.to_all, ",.0f"),
                _median(np.ceil(outcome.to_all / Agent(config, kind).fresh), ",.0f"),
                f"{trained / sum(measured):,.0f}" if measured else "-",
                f"{sum(outcome.seconds):.1f} s",
            ]
        )
    return common.table(header, rows)


def _median(values: Float[np.ndarray, " S"], form: str) -> str:
    """Returns the median over the seeds with a finite number, their range, and how many they are.

    Example:
        >>> _median(np.array([3.0, 1.0, 2.0]), "g"), _median(np.array([3.0, np.inf]), "g")
        ('2 (1 to 3)', '3 in 1 of 2 seeds')
    """
    finite = values[np.isfinite(values)]
    if not len(finite):
        return "never"
    median, least, most = (
        format(value, form) for value in (np.median(finite), finite.min(), finite.max())
    )
    text = median if least == most else f"{median} ({least} to {most})"
    return text if len(finite) == len(values) else f"{text} in {len(finite)} of {len(values)} seeds"


def compare(outcomes: dict[str, Outcome], seconds: float) -> str:
    """Returns a comparison of the buffers with none, in words; the run took ``seconds``."""
    training = sum(sum(outcome.seconds) for outcome in outcomes.values())
    lines = [
        f"Trajectories to all modes are fresh ones. The run took {seconds:.1f} s: {training:.1f} s "
        "for training, whose parts are above, and the rest for setting up, L1 distances and files."
    ]
    without = outcomes["none"].to_all if "none" in outcomes else np.inf
    for kind, outcome in outcomes.items():
        needed = outcome.to_all
        # A median over the seeds that found them all would compare some of them with all.
        if kind != "none" and np.isfinite(needed).all() and np.isfinite(without).all():
            share = f"{np.median(needed) / np.median(without):.0%}"
            lines.append(f"{kind:<8} finds all modes in {share} of the trajectories of none.")
    return "\n".join(lines)


def _draw(folder: Path, outcomes: dict[str, Outcome], config: Config) -> None:
    """Writes the figures."""
    grid = config.grid
    title = f"hypergrid, {config.dims} × {config.height}"
    most = max(outcome.fresh for outcome in outcomes.values())
    fresh = np.unique(np.linspace(0, most, 401).astype(np.int64))
    common.plot(
        folder / "modes.png",
        fresh,
        {kind: outcome.modes(fresh) for kind, outcome in outcomes.items()},
        title,
        "fresh trajectories per seed",
        f"modes found, of {grid.num_modes}",
    )
    common.plot(
        folder / "distance.png",
        next(iter(outcomes.values())).updates,
        {kind: outcome.l1 for kind, outcome in outcomes.items()},
        title,
        "updates per seed",
        "L1 distance to the target",
    )
    marginals = {"target": np.asarray(grid.target())}
    marginals |= {kind: outcome.learned.mean(axis=0) for kind, outcome in outcomes.items()}
    shape = (config.height, config.height if config.dims > 1 else 1)
    plot_marginals(folder / "marginals.png", marginals, shape)


def plot_marginals(
    path: Path, distributions: Mapping[str, Float[np.ndarray, " N"]], shape: tuple[int, int]
) -> None:
    """Draws the joint distributions of the first two coordinates side by side, in one scale.

    ``distributions`` are by name the probabilities of all points of a grid, ``[N]``, and ``shape``
    the lengths of the first two coordinates; the second is 1 if there is no such coordinate.
    """
    panels = {
        name: distribution.reshape(*shape, -1).sum(axis=-1).T
        for name, distribution in distributions.items()
    }
    figure = Figure(figsize=(2.2 * len(panels) + 1.0, 2.8), layout="constrained")
    axes: Any = figure.subplots(1, len(panels), sharey=True)
    most = max(panel.max() for panel in panels.values())
    image: Any = None
    for axis, (name, panel) in zip(axes, panels.items(), strict=True):
        image = axis.imshow(panel, origin="lower", vmin=0.0, vmax=most)
        axis.set(title=name, xlabel="first coordinate")
    if shape[1] > 1:
        axes[0].set_ylabel("second coordinate")
    figure.colorbar(image, ax=axes, label="probability")
    figure.savefig(path, dpi=150)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs this example from the command line and returns its exit status."""
    return common.main("gflownet", train, Config(), __doc__, argv)


if __name__ == "__main__":
    sys.exit(main())

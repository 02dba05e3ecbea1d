"""A GFlowNet on a hypergrid, trained with a buffer of terminal states: code that examples share.

The grid is that of Bengio et al. (2021), the loss trajectory balance (Malkin et al., "Trajectory
balance: Improved credit assignment in GFlowNets", 2022) with a uniform backward policy. An update
trains on fresh trajectories and on replayed ones: terminal states from a buffer, walked back to the
origin.
"""

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax import struct
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree

import jaxbuf
from jaxbuf.examples import _run
from jaxbuf.examples._hypergrid import HyperGrid, Trajectories, pick

Buffer = Literal["none", "fifo", "reward", "diverse"]
NEVER = 2**31 - 1


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
        _run.check(self, 1, "dims", "height", "steps", "batch_size", "capacity", "hidden")
        _run.check(self, 0, "replay_ratio", "exploration", high=1)
        _run.check(self, 1e-30, "background", "temperature")
        _run.check(self, 0, "seed", "lr", "log_z_lr")
        _ = self.grid
        if self.always_fresh:
            return
        if not 0 < self.replayed < self.batch_size:
            raise ValueError(
                f"of --batch-size {self.batch_size}, --replay-ratio {self.replay_ratio} leaves "
                f"{self.replayed} to be replayed; choose a ratio that leaves at least one fresh "
                "and one replayed, or --buffer none"
            )
        _run.check(self, self.replayed, "capacity")

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

"""The hypergrid of the GFlowNet papers, with modes far apart and a target known exactly."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

MAX_STATES = 2**20


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

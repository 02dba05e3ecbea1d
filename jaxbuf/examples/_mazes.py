"""Random mazes of one goal, as pure functions of their seeds."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


class Level(NamedTuple):
    """A maze: its walls, and the places where one starts and has to go."""

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
    there = jax.lax.scan(grow, start, length=level.walls.size)[1]
    straight = jnp.sum(jnp.abs(level.start - level.goal))
    return there[-1] & ~there[straight - 1]


def observe(level: Level, place: Int[Array, "2"], action: Array) -> Float[Array, " D"]:
    """Returns the walls and the goal as seen from a place, and the action that led there."""
    far = level.walls.shape[0] - 1
    walls = jnp.pad(level.walls, far, constant_values=True)
    walls = jax.lax.dynamic_slice(walls, tuple(place), (2 * far + 1, 2 * far + 1))
    goal = jax.nn.one_hot(level.goal - place + far, 2 * far + 1).reshape(-1)
    way = jnp.sign(level.goal - place)
    return jnp.concatenate([walls.reshape(-1), goal, way, jax.nn.one_hot(action, 4)])


def move(level: Level, place: Array, action: Array) -> tuple[Int[Array, "2"], Bool[Array, ""]]:
    """Returns the place after a step, the start again after the goal, and whether it was reached.

    Walls and the edge stop a step.
    """
    to = place + jnp.array([[-1, 0], [1, 0], [0, -1], [0, 1]])[action]
    walls = jnp.pad(level.walls, 1, constant_values=True)
    to = jnp.where(walls[tuple(to + 1)], place, to)
    won = jnp.all(to == level.goal)
    return jnp.where(won, level.start, to), won

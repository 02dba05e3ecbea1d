"""Rewards of windows, and the flags at which a sum of them ends."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from jaxbuf.core import fields, numbers, storage
from jaxbuf.core.types import Arrays, Dtype, Numbers


class Rewarded(NamedTuple):
    """The parts of returns, all of the shape of the rewards; numbers have 32 bits or more.

    Attributes:
        reward: The rewards, ``[B, L, ...]``.
        terminated: The flags that an episode ended here.
        truncated: The flags that an episode was cut off here; False if windows have none.
        discount: The factor per step.
    """

    reward: Float[Array, "B L ..."]
    terminated: Bool[Array, "B L ..."]
    truncated: Bool[Array, "B L ..."]
    discount: Float[Array, "B L ..."]


def read(
    window: Arrays, discount: Numbers, reward: str, terminated: str, truncated: str | None
) -> Rewarded:
    """Reads the fields of a window; the arguments are those of ``jaxbuf.n_step``.

    Raises:
        ValueError: If a field is missing, or has the wrong shape or dtype.
    """
    rewards = _field(window, reward, "reward", np.floating)
    rewards = rewards.astype(wide(rewards.dtype))
    if rewards.ndim < 2:
        raise ValueError(f"reward has shape {rewards.shape}; expected (B, L)")
    ends = _flags(window, terminated, "terminated", rewards.shape)
    truncated = fields.truncation(window, terminated, truncated)
    cuts = jnp.zeros(rewards.shape, bool)
    if truncated is not None:
        cuts = _flags(window, truncated, "truncated", rewards.shape)
    shape = np.shape(discount)
    expected = shape if shape in ((), rewards.shape[:2], rewards.shape) else ()
    axes = "one number, or one for each step, (B, L)"
    factor = storage.check_rows(discount, "discount", expected, rewards.dtype, axes)
    factor = expand(factor, rewards.shape) if expected else jnp.broadcast_to(factor, rewards.shape)
    return Rewarded(rewards, ends, cuts, factor)


def wide(dtype: Dtype) -> Dtype:
    """Returns the dtype for sums and powers of floating-point numbers: float32 at least.

    In bfloat16 a sum of 300 ones is 256, and a discount of 0.99 is one of 0.988.
    """
    return dtype if jnp.finfo(dtype).bits > 32 else np.dtype(np.float32)


def _flags(window: Arrays, path: str, name: str, shape: tuple[int, ...]) -> Array:
    flags = _field(window, path, name, np.bool_)
    if flags.shape not in (shape, shape[:2]):
        raise ValueError(f"{name} has shape {flags.shape}; expected {shape}, that of reward")
    return expand(flags, shape)


def expand(field: Array, shape: tuple[int, ...]) -> Array:
    """Returns ``[B, L]`` broadcast along the trailing axes of ``shape``."""
    return jnp.broadcast_to(field.reshape(*field.shape, *(1,) * (len(shape) - field.ndim)), shape)


def _field(window: Arrays, path: str, name: str, kind: type[np.generic]) -> Array:
    return numbers.array(fields.need(window, path, name, "the window has"), name, kind)

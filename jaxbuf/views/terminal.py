"""The last state of each trajectory, for buffers of terminal states."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool

from jaxbuf.core import numbers
from jaxbuf.core.types import Arrays, Integers, Mask


def terminal_states(
    trajectories: Arrays, lengths: Integers | None = None, *, mask: Bool[Array, "B T"] | None = None
) -> tuple[Arrays, Mask]:
    """Returns the last real row of each padded trajectory.

    Args:
        trajectories: Leaves ``[B, T, ...]``: states, log rewards and other fields of a step. A leaf
            ``[B]`` belongs to the whole trajectory and is returned unchanged.
        lengths: The number of real rows of each trajectory, which come first; ``[B]``, at most
            ``T``.
        mask: Instead of ``lengths``, a mask of the real rows; ``[B, T]``.

    Returns:
        The same pytree with leaves ``[B, ...]``, and a mask of the trajectories with at least one
        real row, ``[B]``, to be passed to ``add`` as ``mask``. Other trajectories return their
        first row.

    Raises:
        ValueError: If not exactly one of ``lengths`` and ``mask`` is given, its shape or dtype is
            wrong, or leaves have different numbers of steps.

    Example:
        >>> import jax.numpy as jnp
        >>> trajectories = {"state": jnp.arange(8).reshape(2, 4), "log_reward": jnp.array([1, 2])}
        >>> last, valid = terminal_states(trajectories, jnp.array([3, 0]))
        >>> last["state"].tolist(), last["log_reward"].tolist(), valid.tolist()
        ([2, 4], [1, 2], [True, False])
    """
    real = lengths if mask is None else mask
    if real is None or (lengths is not None and mask is not None):
        raise ValueError("give lengths=[B] or mask=[B, T], one of the two")
    name, kind, axes = "lengths", np.integer, "(B,)"
    if mask is not None:
        name, kind, axes = "mask", np.bool_, "(B, T)"
    real = numbers.array(real, name, kind)
    trajectories = numbers.arrays(trajectories, "trajectories")
    if real.ndim != len(axes.split()):
        raise ValueError(f"{name} has shape {real.shape}; expected {axes}")
    shape, steps = real.shape, None
    for path, leaf in jax.tree_util.tree_leaves_with_path(trajectories):
        if leaf.ndim == 0 or (leaf.shape[: len(shape)] != shape and leaf.shape != shape[:1]):
            raise ValueError(
                f"trajectories have a leaf of shape {leaf.shape}, but {name} has shape {shape}; "
                "expected [B, T, ...] with the same leading axes, or [B]"
            )
        if leaf.ndim == 1:
            continue
        steps = leaf.shape[1] if steps is None else steps
        if leaf.shape[1] != steps:
            raise ValueError(
                f"trajectories{jax.tree_util.keystr(path)} has shape {leaf.shape} and others have "
                f"{steps} steps; expected (B, T, ...) with the same T in all leaves, or (B,)"
            )
    if mask is None:
        length = real.astype(jnp.int32)
    else:
        step = jnp.arange(1, shape[1] + 1, dtype=jnp.int32)[None]
        length = jnp.max(jnp.where(real, step, 0), axis=1, initial=0)
    row = jnp.arange(shape[0], dtype=jnp.int32)
    last = jnp.maximum(length - 1, 0)

    def take(leaf: Array) -> Array:
        return leaf if leaf.ndim == 1 else leaf.at[row, last].get(mode="clip")

    return jax.tree.map(take, trajectories), length > 0

"""The last state of each trajectory, for buffers that hold nothing else."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, PyTree


def terminal_states(
    trajectories: PyTree[Array],
    lengths: Int[Array, " B"] | None = None,
    *,
    mask: Bool[Array, "B T"] | None = None,
) -> tuple[PyTree[Array], Bool[Array, " B"]]:
    """Take the last real row of each padded trajectory.

    Args:
        trajectories: Leaves ``[B, T, ...]``: states, log rewards and whatever else belongs to a
            step. A leaf ``[B]`` says something of the whole trajectory and is kept as it is.
        lengths: Rows of each trajectory that are real, the first ones; ``[B]``, at most ``T``.
        mask: Instead of ``lengths``, which rows are real; ``[B, T]``.

    Returns:
        The same pytree with leaves ``[B, ...]``, and which trajectories have a real row at all,
        ``[B]``: pass it as ``mask`` to ``add``. The others hold their first row.

    Raises:
        ValueError: If not exactly one of ``lengths`` and ``mask`` is given, or its shape is wrong.

    Example:
        >>> import jax.numpy as jnp
        >>> trajectories = {"state": jnp.arange(8).reshape(2, 4), "log_reward": jnp.array([1, 2])}
        >>> last, valid = terminal_states(trajectories, jnp.array([3, 0]))
        >>> last["state"].tolist(), last["log_reward"].tolist(), valid.tolist()
        ([2, 4], [1, 2], [True, False])
    """
    given = lengths if mask is None else mask
    if given is None or (lengths is not None and mask is not None):
        raise ValueError("give lengths=[B] or mask=[B, T], one of the two")
    shape = jnp.shape(given)
    for leaf in jax.tree.leaves(trajectories):
        if leaf.ndim == 0 or (leaf.shape[: len(shape)] != shape and leaf.shape != shape[:1]):
            raise ValueError(
                f"trajectories have a leaf of shape {leaf.shape}, but "
                f"{'lengths' if mask is None else 'mask'} has shape {shape}; expected [B, T, ...] "
                "with the same leading axes, or [B]"
            )
    if mask is None:
        length = jnp.asarray(given, jnp.int32)
    else:
        step = jnp.arange(1, shape[1] + 1, dtype=jnp.int32)[None]
        length = jnp.max(jnp.where(mask, step, 0), axis=1, initial=0)
    row = jnp.arange(shape[0], dtype=jnp.int32)
    last = jnp.maximum(length - 1, 0)

    def take(leaf: Array) -> Array:
        return leaf if leaf.ndim == 1 else leaf.at[row, last].get(mode="clip")

    return jax.tree.map(take, trajectories), length > 0

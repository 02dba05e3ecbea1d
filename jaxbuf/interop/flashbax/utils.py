"""``flashbax.utils``: what programs need that wrap a buffer's functions."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxbuf.core.types import Arrays, Count

__all__ = ["add_dim_to_args", "get_timestep_count", "get_tree_shape_prefix"]


def get_tree_shape_prefix(tree: Arrays, n_axes: int = 1) -> tuple[int, ...]:
    """Returns the first axes of all leaves, at most ``n_axes`` of them.

    Raises:
        ValueError: If leaves differ in these axes, or there is no leaf.

    Example:
        >>> get_tree_shape_prefix({"obs": jnp.zeros((3, 4, 5)), "reward": jnp.zeros((3, 4))}, 2)
        (3, 4)
    """
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    if not leaves:
        raise ValueError("the tree has no leaves; expected at least one")
    prefix = tuple(leaves[0][1].shape[:n_axes])
    for path, leaf in leaves:
        if leaf.shape[: len(prefix)] != prefix:
            raise ValueError(
                f"tree{jax.tree_util.keystr(path)} has shape {leaf.shape}; expected it to begin "
                f"with {prefix}, as the first leaf does"
            )
    return prefix


def add_dim_to_args(
    func: Callable[..., Any],
    axis: int = 1,
    starting_arg_index: int | None = 1,
    ending_arg_index: int | None = None,
    kwargs_on_device_keys: Sequence[str] | None = None,
) -> Callable[..., Any]:
    """Returns a function that gives its arguments one more axis, of length 1, and calls ``func``.

    Args:
        func: The function to call.
        axis: Where positional arguments get the axis. Those passed by name get it at 1, as with
            flashbax.
        starting_arg_index: The first positional argument that gets it.
        ending_arg_index: The one after the last; None for all.
        kwargs_on_device_keys: The arguments passed by name that get it; None for all.

    Example:
        >>> add_dim_to_args(lambda state, step: step.shape)("state", jnp.zeros((3, 4)))
        (3, 1, 4)
    """

    def widened(tree: Arrays, axis: int) -> Arrays:
        return jax.tree.map(lambda leaf: jnp.expand_dims(leaf, axis), tree)

    chosen = slice(starting_arg_index, ending_arg_index)

    @functools.wraps(func)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        positional = list(args)
        positional[chosen] = [widened(each, axis) for each in positional[chosen]]
        for name in kwargs if kwargs_on_device_keys is None else kwargs_on_device_keys:
            if name in kwargs:
                kwargs[name] = widened(kwargs[name], 1)
        return func(*positional, **kwargs)

    return wrapper


def get_timestep_count(buffer_state: Any) -> Count:
    """Returns the number of steps in a state, of all rows together.

    Example:
        >>> import jaxbuf.interop.flashbax as fbx
        >>> buffer = fbx.make_trajectory_buffer(2, 4, 3, 1, 3, max_length_time_axis=10)
        >>> state = buffer.add(buffer.init(jnp.float32(0)), jnp.ones((2, 6)))
        >>> int(get_timestep_count(state))
        12
    """
    rows, length = get_tree_shape_prefix(buffer_state.experience, 2)
    return rows * jnp.where(buffer_state.is_full, length, buffer_state.current_index)

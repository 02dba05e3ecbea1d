"""Calls of the methods by which a buffer notifies its sampler and its parts of events."""

import inspect
from collections.abc import Callable
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxbuf.buffers.base import SampledBase
from jaxbuf.core import checks, numbers, trees
from jaxbuf.core.types import State
from jaxbuf.occupancy.protocol import Occupancy
from jaxbuf.strategies.protocols import Sampler

AnyBuffer = TypeVar("AnyBuffer", bound=SampledBase)


def notify(method: Callable[..., State], state: State, *arguments: Any) -> State:
    """Returns the new state that a method of a sampler or a part returns, after a check of it."""
    return check_state(method, state, method(state, *arguments))


def query(method: Callable[..., Any], state: State, *arguments: Any) -> dict[str, Array]:
    """Returns the arrays by name that a method of a sampler or a part returns.

    Raises:
        ValueError: If it does not return a dict.
    """
    answer = method(state, *arguments)
    if not isinstance(answer, dict):
        raise ValueError(
            f"{_name_of(method)} returned {checks.kind_of(answer)}; expected a dict of arrays"
        )
    return cast("dict[str, Array]", answer)


def check_state(method: Callable[..., Any], before: State, after: State) -> State:
    """Returns the new state of a sampler or a part, which one of its methods returned.

    Raises:
        ValueError: If it is not like the state before. Strategies of this package are not checked.
    """
    if _is_ours(method):
        return after
    if not trees.alike(before, after):
        expected, structure = (jax.tree.structure(state) for state in (before, after))
        returned = "None" if after is None else f"{structure}"
        raise ValueError(
            f"{_name_of(method)} returned {returned}; expected a new state, {expected}"
        )
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        was, now = numbers.abstract(old, "the state"), numbers.abstract(new, "the state")
        if (was.shape, was.dtype) != (now.shape, now.dtype):
            raise ValueError(
                f"{_name_of(method)} returned an array {now.dtype}{list(now.shape)}; expected "
                f"{was.dtype}{list(was.shape)}, as in the state before"
            )
    return after


def apply_change(
    buffer: AnyBuffer,
    occupancy: Occupancy,
    *,
    added: Int[Array, "..."] | None = None,
    value: Float[Array, "..."] | None = None,
    removed: Int[Array, "..."] | None = None,
) -> AnyBuffer:
    """Sets the occupancy, and notifies the sampler and the parts of filled and emptied slots.

    Args:
        buffer: The buffer, whose parts have been notified of new items already.
        occupancy: Its occupancy after the change.
        added: The slots of new items or windows, of any shape; past the end for none. None: nothing
            was added.
        value: Their priorities or scores, of the same shape; None for the sampler's default.
        removed: The slots that are empty now, of any shape; past the end for none. None: nothing
            left, except for items that new ones have replaced.

    Returns:
        The buffer with the occupancy, and with new states of the sampler and the parts.
    """
    nothing = jnp.zeros((0,), jnp.int32)
    filled, emptied = (nothing if x is None else x.reshape(-1) for x in (added, removed))
    value = None if value is None else value.reshape(-1)
    state, states = jax.lax.stop_gradient((buffer.sampler_state, buffer.extra_states))
    if removed is not None:
        extras = zip(buffer.extras, states, strict=True)
        states = tuple(notify(part.on_remove, before, emptied) for part, before in extras)
    changed = trees.updated(
        buffer,
        occupancy=occupancy,
        sampler_state=notify(buffer.bound_sampler.on_change, state, filled, value, emptied),
        extra_states=states,
    )
    return changed.with_episodes(filled, emptied)


def uses_episodes(sampler: Sampler) -> bool:
    """Returns whether a sampler, or one of those inside of it, is notified of episodes."""
    return any(leaf.uses_episodes for leaf in sampler.leaf_samplers)


def _is_ours(method: Callable[..., Any]) -> bool:
    """Returns whether the strategy of a method, and those inside of it, are of this package."""
    owner = getattr(method, "__self__", None)
    kinds = map(type, (owner, *getattr(owner, "leaf_samplers", ())))
    return all(kind.__module__.startswith("jaxbuf.") for kind in kinds)


def _name_of(method: Callable[..., Any]) -> str:
    """Returns the name of a method and the object that it belongs to, for an error."""
    owner = getattr(method, "__self__", None)
    # Not by ``__name__``, which is that of the function: ``<lambda>`` of a lambda.
    function = getattr(method, "__func__", method)
    members = inspect.getmembers(type(owner), lambda member: member is function)
    return f"{members[0][0] if members else 'a method'} of {owner}"

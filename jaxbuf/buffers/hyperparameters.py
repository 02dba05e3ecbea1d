"""Changes of a buffer's sampler: of its varying hyperparameters, and of the sampler as a whole."""

from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from jaxbuf.buffers import events
from jaxbuf.buffers.base import SampledBase
from jaxbuf.core import hyperparameters, trees
from jaxbuf.core.segment_tree import using_width, width_of
from jaxbuf.core.types import Flag, State
from jaxbuf.strategies.protocols import Sampler

AnyBuffer = TypeVar("AnyBuffer", bound=SampledBase)


def set_values(buffer: AnyBuffer, values: dict[str, Array], legal: Flag) -> AnyBuffer:
    """Sets numbers of the sampler, if they are legal."""
    before = buffer.hyperparameters
    after = {
        name: jnp.where(legal, values[name], old) if name in values else old
        for name, old in before.items()
    }
    buffer = trees.updated(buffer, hyperparameters=after)
    if not any(map(is_notified, buffer.bound_sampler.leaf_samplers)):
        return buffer

    def notify(sampler: Sampler, state: State) -> State:
        return events.notify(sampler.on_hyperparameters, state) if is_notified(sampler) else state

    old = lax.stop_gradient(buffer.sampler_state)
    new = buffer.bound_sampler.map_state(old, notify)
    state = jax.tree.map(lambda a, b: jnp.where(legal, a, b), new, old)
    return trees.updated(buffer, sampler_state=state)


def with_sampler(
    buffer: AnyBuffer, sampler: Sampler, by_slot: dict[str, Array]
) -> tuple[AnyBuffer, Flag]:
    """Returns a buffer with the same items under another sampler, whose configuration fits.

    Args:
        buffer: The buffer.
        sampler: The sampler.
        by_slot: The ``priority`` or the ``score`` of each slot, ``[N]``, as far as it has one.

    Returns:
        The buffer, and whether all of the sampler's first values are legal.

    Raises:
        ValueError: If the sampler needs scores that nothing in the buffer keeps.
    """
    sampler, values, legal = hyperparameters.split(sampler)
    new = hyperparameters.bind(sampler, values)
    slots = buffer.occupancy.num_slots
    slot = jnp.arange(slots, dtype=jnp.int32)
    added = jnp.where(buffer.occupancy.live(slot), slot, slots)
    old_state = lax.stop_gradient(buffer.sampler_state)
    names = [name for name, _ in inside(buffer.sampler, old_state)]
    pairs = inside(buffer.bound_sampler, old_state)
    old = [(name, *pair) for name, pair in zip(names, pairs, strict=True)]

    def state_of(name: Sampler, sampler: Sampler, empty: State) -> State:
        """Returns the state of one of the samplers, which is called ``name`` without numbers."""
        value = by_slot.get("score" if sampler.uses_score else "priority")
        if sampler.uses_score and value is None:
            raise ValueError(
                f"{sampler} draws by score, but nothing in this buffer keeps the scores of items; "
                "create another buffer, and add the items with score="
            )
        if not (sampler.uses_score or sampler.uses_priority):
            value = None
        i = next((i for i, (before, *_) in enumerate(old) if before == name), None)
        if i is None:
            nothing = jnp.zeros((0,), jnp.int32)
            return events.notify(sampler.on_change, empty, added, value, nothing)
        _, before, state = old.pop(i)
        if not hyperparameters.varies_now(sampler):
            return state
        # If the numbers differ, items have the same priorities under the new ones.
        after = state if value is None else events.notify(sampler.set_priority, state, added, value)
        after = events.notify(sampler.on_hyperparameters, after)
        names = [name for name in sampler.varies if isinstance(getattr(sampler, name), jax.Array)]
        same = [jnp.all(getattr(before, name) == getattr(sampler, name)) for name in names]
        all_same = jnp.all(jnp.stack(same))
        return jax.tree.map(lambda a, b: jnp.where(all_same, a, b), state, after)

    with using_width(width_of(buffer)):
        empty = new.init(slots)
        names = iter([name for name, _ in inside(sampler, empty)])
        state = new.map_state(empty, lambda inner, blank: state_of(next(names), inner, blank))
    changed = trees.updated(buffer, sampler=sampler, sampler_state=state, hyperparameters=values)
    return changed, legal


def is_notified(sampler: Sampler) -> bool:
    """Returns whether a bound sampler is notified when its hyperparameters change."""
    overrides = type(sampler).on_hyperparameters is not Sampler.on_hyperparameters
    return overrides and hyperparameters.varies_now(sampler)


def inside(sampler: Sampler, state: State) -> list[tuple[Sampler, State]]:
    """Returns the samplers that a sampler is made of, each with its state."""
    samplers: list[tuple[Sampler, State]] = []

    def append(inner: Sampler, state: State) -> State:
        samplers.append((inner, state))
        return state

    sampler.map_state(state, append)
    return samplers

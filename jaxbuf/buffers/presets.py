"""Combinations worth a name: a few lines each over ``ItemBuffer.create``."""

from jaxtyping import PyTree

from jaxbuf.buffers.item import ItemBuffer
from jaxbuf.strategies.evictors import Lowest
from jaxbuf.strategies.samplers import Uniform
from jaxbuf.strategies.softmax import Softmax


def reward_prioritized(
    example: PyTree, capacity: int, *, temperature: float | None = None
) -> ItemBuffer:
    """A buffer that keeps the items with the highest score, such as the log reward.

    Args:
        example: One unbatched item.
        capacity: Most items held at a time.
        temperature: Draw by the softmax of scores, at this temperature; None draws uniformly. Both
            without replacement.

    Example:
        >>> import jax.numpy as jnp, jaxbuf
        >>> buffer = jaxbuf.reward_prioritized(jnp.zeros(2), 3, temperature=1.0)
        >>> buffer = buffer.add(jnp.ones((5, 2)), score=jnp.arange(5.0))
        >>> int(buffer.size), float(buffer.metrics()["score_min"])
        (3, 2.0)
    """
    sampler = Uniform(replacement=False)
    if temperature is not None:
        sampler = Softmax(temperature, replacement=False)
    return ItemBuffer.create(example, capacity, sampler=sampler, evictor=Lowest())


def terminating_states(example: PyTree, capacity: int) -> ItemBuffer:
    """A first-in, first-out buffer of states, drawn without replacement.

    Fill it with what ``terminal_states`` takes from padded trajectories.

    Args:
        example: One unbatched state, and whatever is to be kept with it.
        capacity: Most states held at a time.

    Example:
        >>> import jax.numpy as jnp, jaxbuf
        >>> buffer = jaxbuf.terminating_states(jnp.int32(0), 100)
        >>> states = jnp.arange(8).reshape(2, 4)
        >>> last, valid = jaxbuf.terminal_states(states, jnp.array([3, 0]))
        >>> buffer = buffer.add(last, mask=valid)
        >>> int(buffer.size), int(buffer.data[0])
        (1, 2)
    """
    return ItemBuffer.create(example, capacity, sampler=Uniform(replacement=False))

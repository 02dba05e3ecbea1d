"""Presets: common combinations of strategies for an ``ItemBuffer``."""

from jaxtyping import PyTree

from jaxbuf.buffers.item import ItemBuffer
from jaxbuf.core import checks
from jaxbuf.strategies.diversity import Diversity, Field
from jaxbuf.strategies.evictors import Lowest
from jaxbuf.strategies.softmax import Softmax
from jaxbuf.strategies.uniform import Uniform


def reward_prioritized(
    example: PyTree, capacity: int, *, temperature: float | None = None, fallback: bool = False
) -> ItemBuffer:
    """Creates a buffer that keeps the items with the highest score, such as the log reward.

    Args:
        example: One unbatched item.
        capacity: The largest number of items that the buffer can hold.
        temperature: The temperature of the softmax of scores from which items are drawn; None draws
            uniformly. Both draw without replacement.
        fallback: With a temperature, whether to draw the whole batch with replacement if it has
            more rows than there are items, instead of leaving rows invalid.

    Raises:
        ValueError: As raised by ``ItemBuffer.create``, or if ``fallback`` is True without a
            temperature.

    Example:
        >>> import jax.numpy as jnp, jaxbuf
        >>> buffer = jaxbuf.reward_prioritized(jnp.zeros(2), 3, temperature=1.0)
        >>> buffer = buffer.add(jnp.ones((5, 2)), score=jnp.arange(5.0))
        >>> int(buffer.size), float(buffer.metrics()["score_min"])
        (3, 2.0)
    """
    sampler = _by_score(temperature, fallback)
    return ItemBuffer.create(example, capacity, sampler=sampler, evictor=Lowest())


def diverse_reward_prioritized(
    example: PyTree,
    capacity: int,
    *,
    cutoff: float = 0.0,
    p: float = 1.0,
    field: Field | tuple[Field, ...] | None = None,
    temperature: float | None = None,
    fallback: bool = False,
) -> ItemBuffer:
    """Creates a ``reward_prioritized`` buffer that admits only new items once it is full.

    Until the buffer is full, it admits every item. After that a row must score at least as much as
    the lowest item, and be farther than ``cutoff`` from every row of its batch with a higher score
    and from every item in the buffer.

    Args:
        example: One unbatched item.
        capacity: The largest number of items that the buffer can hold.
        cutoff: The largest distance at which two items count as the same.
        p: The norm of the distance; see ``Diversity``.
        field: The part of an item to compare; see ``Diversity``. None compares the whole item.
        temperature: The temperature of the softmax of scores from which items are drawn; None draws
            uniformly. Both draw without replacement.
        fallback: With a temperature, whether to draw the whole batch with replacement if it has
            more rows than there are items, instead of leaving rows invalid.

    Raises:
        ValueError: As raised by ``ItemBuffer.create``, or if ``fallback`` is True without a
            temperature.

    Example:
        >>> import jax.numpy as jnp, jaxbuf
        >>> item = {"state": jnp.zeros(2), "log_reward": jnp.float32(0)}
        >>> buffer = jaxbuf.diverse_reward_prioritized(item, 2, cutoff=0.5, field="state")
        >>> states = jnp.array([[0.0, 0.0], [0.0, 1.0]])
        >>> for score in (jnp.array([1.0, 2.0]), jnp.array([3.0, 4.0])):
        ...     buffer = buffer.add({"state": states, "log_reward": score}, score=score)
        >>> buffer.data["log_reward"].tolist(), int(buffer.metrics()["refused_near_buffer"])
        ([2.0, 1.0], 2)
    """
    return ItemBuffer.create(
        example,
        capacity,
        sampler=_by_score(temperature, fallback),
        evictor=Lowest(),
        diversity=Diversity(cutoff, p, field, within_batch="suppress", active="full"),
    )


def terminal_state_buffer(example: PyTree, capacity: int) -> ItemBuffer:
    """Creates a first-in, first-out buffer of states, drawn without replacement.

    Use ``terminal_states`` to extract these states from padded trajectories.

    Args:
        example: One unbatched state, with any other fields to store with it.
        capacity: The largest number of states that the buffer can hold.

    Example:
        >>> import jax.numpy as jnp, jaxbuf
        >>> buffer = jaxbuf.terminal_state_buffer(jnp.int32(0), 100)
        >>> states = jnp.arange(8).reshape(2, 4)
        >>> last, valid = jaxbuf.terminal_states(states, jnp.array([3, 0]))
        >>> buffer = buffer.add(last, mask=valid)
        >>> int(buffer.size), int(buffer.data[0])
        (1, 2)
    """
    return ItemBuffer.create(example, capacity, sampler=Uniform(replacement=False))


def _by_score(temperature: float | None, fallback: bool) -> Uniform | Softmax:
    if temperature is None:
        if checks.check_flag("fallback", fallback):
            raise ValueError(
                "fallback is True, but temperature is None; expected a temperature, since uniform "
                "draws have no fallback"
            )
        return Uniform(replacement=False)
    return Softmax(temperature, replacement=False, fallback=fallback)

"""Presets: common combinations of strategies for an ``ItemBuffer``."""

from typing import Any

from jaxtyping import PyTree

from jaxbuf.buffers.arguments import check_sampler
from jaxbuf.buffers.item import ItemBuffer
from jaxbuf.core import checks
from jaxbuf.core.random import check_key
from jaxbuf.core.types import Key
from jaxbuf.strategies.diversity import Active, Diversity, Field
from jaxbuf.strategies.evictors import Lowest, Reservoir
from jaxbuf.strategies.protocols import Sampler
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
    active: Active = "full",
) -> ItemBuffer:
    """Creates a ``reward_prioritized`` buffer that admits only new items once it is full.

    Until the buffer is full, it admits every item, also one that is there already, as torchgfn
    does. After that a row must score at least as much as the lowest item, and be farther than
    ``cutoff`` from every row of its batch with a higher score and from every item in the buffer.
    With ``active="always"`` that holds from the first row on, so that all items differ.

    Args:
        example: One unbatched item.
        capacity: The largest number of items that the buffer can hold.
        cutoff: The largest distance at which two items count as the same.
        p: The norm of the distance; see ``Diversity``.
        field: The part of an item to compare; see ``Diversity``. None compares the whole item.
        temperature: As for ``reward_prioritized``.
        fallback: As for ``reward_prioritized``.
        active: ``"full"``, or ``"always"`` if the first items have to differ, too. Choose that
            unless a half-filled buffer is to have as many items as possible, or a run is to be
            compared with one of torchgfn.

    Raises:
        ValueError: As raised by ``ItemBuffer.create`` and ``Diversity``, or if ``fallback`` is True
            without a temperature.

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
        diversity=Diversity(cutoff, p, field, within_batch="suppress", active=active),
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


def reservoir(
    example: PyTree, capacity: int, *, key: Key | None = None, sampler: Sampler = Uniform()
) -> ItemBuffer:
    """Creates a buffer that holds a random sample of all items that were ever added.

    Every item, old or new, has the same chance to be held: 1 until the buffer is full, and then
    ``capacity / n`` after ``n`` items. All sets of ``capacity`` items are equally likely. This is
    reservoir sampling, as for the average policy of NFSP, the advantages of Deep CFR, and the
    memory of continual learning. It holds as long as items leave in no other way.

    Each item draws a lot when it is added, and the highest lots stay, as scores do with ``Lowest``.
    Lots depend on the key and on the number of items that were added before, so that ``add`` needs
    no key, and a scan or a resumed run goes on as one program would.

    Args:
        example: One unbatched item.
        capacity: The largest number of items that the buffer can hold.
        key: The PRNG key of the lots; by default a fixed one. Buffers with the same key that are
            filled in the same way keep the same rows. Give each its own where they should differ:
            ``jax.vmap(lambda key: jaxbuf.reservoir(example, capacity, key=key))(keys)``.
        sampler: Draws items; not by score, since lots take the place of scores.

    Raises:
        ValueError: As raised by ``ItemBuffer.create``, if ``key`` is not a single key, or if the
            sampler draws by score.

    References:
        Vitter, Random sampling with a reservoir, ACM TOMS 1985. Heinrich and Silver, Deep
        reinforcement learning from self-play in imperfect-information games, 2016,
        https://arxiv.org/abs/1603.01121 (NFSP). Brown et al., Deep counterfactual regret
        minimization, ICML 2019, https://arxiv.org/abs/1811.00164.

    Example:
        >>> import jax, jax.numpy as jnp, jaxbuf
        >>> buffer = jaxbuf.reservoir(jnp.int32(0), 100, key=jax.random.key(1))
        >>> for start in range(0, 10_000, 1000):
        ...     buffer = jaxbuf.add(buffer, start + jnp.arange(1000))
        >>> int(buffer.size), int(buffer.metrics()["adds"])
        (100, 10000)
        >>> bool(jnp.abs(buffer.data.mean() - 5000) < 1000)
        True
    """
    check_sampler(sampler)
    if sampler.uses_score:
        raise ValueError(
            f"sampler is {sampler}, which draws by score, but a reservoir has lots in place of "
            "scores; choose a sampler without scores, or evictor=jaxbuf.Lowest()"
        )
    buffer = ItemBuffer.create(example, capacity, sampler=sampler, evictor=Reservoir())
    if key is None:
        return buffer
    lots: Any = buffer.occupancy
    return buffer.replace(occupancy=lots.with_key(check_key(key)))


def _by_score(temperature: float | None, fallback: bool) -> Uniform | Softmax:
    if temperature is None:
        if checks.check_flag("fallback", fallback):
            raise ValueError(
                "fallback is True, but temperature is None; expected a temperature, since uniform "
                "draws have no fallback"
            )
        return Uniform(replacement=False)
    return Softmax(temperature, replacement=False, fallback=fallback)

"""Draws of different items: one after the other, each from those that are left."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int, PRNGKeyArray

from jaxbuf.core.varying import vary_with


def distinct(
    key: PRNGKeyArray,
    batch_size: int,
    count: Int[Array, ""],
    scratch: Any,
    propose: Callable[[PRNGKeyArray, int, Any], Int[Array, " P"]],
    remove: Callable[[Any, Int[Array, " B"]], Any] | None,
    capacity: int,
) -> tuple[Int[Array, " B"], Bool[Array, " B"]]:
    """Draw ``count`` different items.

    Drawing with replacement and discarding what was drawn before has the same law, and a whole
    batch can be proposed at once, with some more rows for those that are discarded. Only if these
    are too few are there more rounds. Before each the taken items are removed, so that heavy ones
    do not take all proposals.

    Args:
        key: A key.
        batch_size: Rows.
        count: How many there are to draw, at most ``batch_size``; no more than can be drawn.
        scratch: What ``propose`` draws from.
        propose: Given a key, draws so many items with replacement; numbers below ``capacity``.
        remove: Takes items out of the scratch; is given ``capacity`` for none. None where equally
            likely items can just be discarded.
        capacity: How many items there can be.

    Returns:
        The items, in the order in which they were drawn, and which rows hold one: the first ones.
    """
    # Of equally likely items batch_size**2 / (2 * capacity) come again, of others several times as
    # many.
    spare = min(max(4 * batch_size**2 // capacity, batch_size // 8, 1), batch_size)
    first = propose(jax.random.fold_in(key, 0), batch_size + spare, scratch)
    chosen, filled = first_of_each(first, count, capacity, size=batch_size)
    # What is drawn from may vary over the devices of a mesh where the key does not, or the reverse.
    filled, chosen, scratch = vary_with((filled, chosen, scratch), (chosen, scratch))

    def unfinished(carry: tuple[Array, Array, Array, Any]) -> Array:
        return carry[1] < count

    def attempt(carry: tuple[Array, Array, Array, Any]) -> tuple[Array, Array, Array, Any]:
        round_, _, chosen, scratch = carry
        if remove is not None:
            scratch = remove(scratch, chosen)
        proposed = propose(jax.random.fold_in(key, round_), batch_size, scratch)
        both = jnp.concatenate([chosen, proposed])
        chosen, filled = first_of_each(both, count, capacity, size=batch_size)
        return round_ + 1, filled, chosen, scratch

    def more() -> Int[Array, " B"]:
        return lax.while_loop(unfinished, attempt, (jnp.int32(1), filled, chosen, scratch))[2]

    # A loop copies the scratch, whether or not it takes a step.
    items = more() if remove is None else lax.cond(filled < count, more, lambda: chosen)
    return items, vary_with(jnp.arange(batch_size, dtype=jnp.int32) < count, items)


def first_of_each(
    numbers: Int[Array, " P"], count: Int[Array, ""], below: int, *, size: int
) -> tuple[Int[Array, " S"], Int[Array, ""]]:
    """The first ``count`` different ones of the numbers below ``below``, as they come.

    Returns:
        Those, followed by ``below``; and how many there are.
    """
    row = jnp.arange(numbers.shape[0], dtype=jnp.int32)
    # Equal numbers follow each other in the order of their rows.
    ordered, order = lax.sort((numbers, row), num_keys=1)
    repeats = jnp.concatenate([jnp.zeros((1,), bool), ordered[1:] == ordered[:-1]])
    new = jnp.zeros(repeats.shape, bool).at[order].set(~repeats & (ordered < below))
    rank = jnp.cumsum(new, dtype=jnp.int32)
    place = jnp.where(new & (rank <= count), rank - 1, size)
    chosen = jnp.full((size,), below, numbers.dtype).at[place].set(numbers, mode="drop")
    return chosen, jnp.minimum(rank[-1], count)

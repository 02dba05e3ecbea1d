"""Draws without replacement."""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from jaxbuf.core.seldom import if_needed
from jaxbuf.core.types import Arrays, Count, Index, Key, Mask
from jaxbuf.core.versions import vary_with

Scratch = TypeVar("Scratch")

# A draw ends after this many rounds in a row without a new item. As long as another item is left, a
# round finds one with a probability of at least 1 - 1/e.
_MOST_IDLE = 64


def distinct(
    key: Key,
    batch_size: int,
    count: Count,
    scratch: Scratch,
    propose: Callable[..., Int[Array, " P"]],
    remove: Callable[[Scratch, Index], Scratch] | None,
    capacity: int,
    *context: Arrays,
) -> tuple[Index, Mask]:
    """Draws ``count`` different items.

    Drawing with replacement and discarding repeated items gives the same distribution, and a whole
    batch can be proposed at once, with a few spare rows to make up for repeats. More rounds follow
    only if too few different items were proposed. Before each of them the items drawn so far are
    removed, so that a few very likely items do not take all proposals.

    Args:
        key: A PRNG key.
        batch_size: The number of rows of the result.
        count: The number of items to draw; at most ``batch_size``, and at most the number of items
            that can be drawn. If it is larger, as in a buffer that was put together by hand, the
            rows without an item are not valid.
        scratch: The state from which ``propose`` draws.
        propose: Takes a key, a number of rows, the scratch and the context, and draws that many
            items with replacement, all below ``capacity``. If there is ``remove``, it must not use
            other arrays than these.
        remove: Removes items from the scratch and ignores ``capacity``; or None, if items are
            equally likely and repeats need only be discarded.
        capacity: An upper bound of the items, which are numbers below it.
        *context: What else ``propose`` needs.

    Returns:
        The items in the order in which they were drawn, ``[B]``, and a mask of the rows that hold
        one, which are the first ``count``.
    """
    # About batch_size**2 / (2 * capacity) equally likely items repeat; unequal ones several times
    # as many.
    spare = min(max(4 * batch_size**2 // capacity, batch_size // 8, 1), batch_size)
    first = propose(jax.random.fold_in(key, 0), batch_size + spare, scratch, *context)  # [P]
    chosen, filled = first_distinct(first, count, capacity, size=batch_size)  # [B], []

    def redraw(
        key: Key, count: Array, filled: Array, chosen: Array, scratch: Scratch, *context: Arrays
    ) -> Index:
        def unfinished(carry: tuple[Array, Array, Array, Array, Scratch]) -> Array:
            _, idle, filled, *_ = carry
            return (filled < count) & (idle < _MOST_IDLE)

        def attempt(
            carry: tuple[Array, Array, Array, Array, Scratch],
        ) -> tuple[Array, Array, Array, Array, Scratch]:
            round_, idle, before, chosen, scratch = carry
            if remove is not None:
                scratch = remove(scratch, chosen)
            proposed = propose(jax.random.fold_in(key, round_), batch_size, scratch, *context)
            both = jnp.concatenate([chosen, proposed])  # [2 * B]
            chosen, filled = first_distinct(both, count, capacity, size=batch_size)  # [B], []
            return round_ + 1, jnp.where(filled > before, 0, idle + 1), filled, chosen, scratch

        # The scratch may vary over the devices of a mesh while the key does not, or the reverse.
        filled, chosen, scratch = vary_with((filled, chosen, scratch), (chosen, scratch))
        begin = (jnp.int32(1), vary_with(jnp.int32(0), filled), filled, chosen, scratch)
        return lax.while_loop(unfinished, attempt, begin)[3]

    rest = (key, count, filled, chosen, scratch, *context)
    # A loop copies the scratch even if it takes no step, so it runs only where it is needed.
    items = redraw(*rest) if remove is None else if_needed(filled < count, redraw, chosen, *rest)
    drawn = jnp.arange(batch_size, dtype=jnp.int32) < count  # [B]
    return items, vary_with(drawn, items) & (items < capacity)


def first_distinct(
    numbers: Int[Array, " P"], count: Count, bound: int, *, size: int
) -> tuple[Int[Array, " S"], Count]:
    """Finds the first ``count`` different numbers below ``bound``, in order of appearance.

    Returns:
        These numbers, padded with ``bound`` to ``size``, and their count.
    """
    row = jnp.arange(numbers.shape[0], dtype=jnp.int32)  # [P]
    # Sorting puts equal numbers next to each other, in the order of their rows.
    ordered, order = lax.sort((numbers, row), num_keys=1)  # [P]
    repeats = jnp.concatenate([jnp.zeros((1,), bool), ordered[1:] == ordered[:-1]])  # [P]
    new = jnp.zeros(repeats.shape, bool).at[order].set(~repeats & (ordered < bound))  # [P]
    rank = jnp.cumsum(new, dtype=jnp.int32)  # [P]
    target = jnp.where(new & (rank <= count), rank - 1, size)  # [P]
    chosen = jnp.full((size,), bound, numbers.dtype).at[target].set(numbers, mode="drop")  # [S]
    return chosen, jnp.minimum(rank[-1], count)

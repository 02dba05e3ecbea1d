"""Draws of different items: one after the other, each from those that are left."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int, PRNGKeyArray, UInt

from jaxbuf.core import in_place, rowwise

# Places for each item that is drawn, in a table of those that have been.
_SPARSE = 4


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
    first = propose(key, batch_size + spare, scratch)
    chosen, filled = first_of_each(first, count, capacity, size=batch_size)

    def unfinished(carry: tuple[Array, Array, Array, Any]) -> Array:
        return carry[1] < count

    def attempt(carry: tuple[Array, Array, Array, Any]) -> tuple[Array, Array, Array, Any]:
        round_, _, chosen, scratch = carry
        if remove is not None:
            scratch = remove(scratch, chosen)
        # Threefry makes the words of the first round from other numbers than these.
        proposed = propose(jax.random.fold_in(key, ~round_.astype(jnp.uint32)), batch_size, scratch)
        both = jnp.concatenate([chosen, proposed])
        chosen, filled = first_of_each(both, count, capacity, size=batch_size)
        return round_ + 1, filled, chosen, scratch

    def more() -> Int[Array, " B"]:
        return lax.while_loop(unfinished, attempt, (jnp.int32(1), filled, chosen, scratch))[2]

    # A loop copies the scratch, whether or not it takes a step.
    items = more() if remove is None else lax.cond(filled < count, more, lambda: chosen)
    return items, rowwise.each(jnp.less, jnp.arange(batch_size, dtype=jnp.int32), count)


def first_of_each(
    numbers: Int[Array, " P"], count: Int[Array, ""], below: int, *, size: int
) -> tuple[Int[Array, " S"], Int[Array, ""]]:
    """The first ``count`` different ones of the numbers below ``below``, as they come.

    Returns:
        Those, followed by ``below``; and how many there are.
    """
    rows = numbers.shape[0]

    def plain(
        numbers: Int[Array, " P"], count: Int[Array, ""]
    ) -> tuple[Int[Array, " S"], Int[Array, ""]]:
        ordered, order = rowwise.sort(numbers, below + 1)
        repeats = jnp.concatenate([jnp.zeros((1,), bool), ordered[1:] == ordered[:-1]])
        fresh = ~jnp.zeros_like(repeats).at[order].set(repeats | (ordered == below))
        packed, found = rowwise.pack(numbers, fresh, below, size=max(rows, size))
        found = jnp.minimum(found, count)
        row = jnp.arange(size, dtype=jnp.int32)
        return jnp.where(row < found, packed[:size], below), found

    def loop(
        numbers: Int[Array, " P"], count: Int[Array, ""]
    ) -> tuple[Int[Array, " S"], Int[Array, ""]]:
        """Looks each up in a table, whose places are tried from where its hash says."""
        bits = (_SPARSE * size - 1).bit_length()

        def home(number: Int[Array, ""]) -> UInt[Array, ""]:
            return (number.astype(jnp.uint32) * jnp.uint32(2654435769)) >> jnp.uint32(32 - bits)

        def going(carry: tuple[Array, ...]) -> Array:
            i, _, _, _, found = carry
            return (i < rows) & (found < count)

        def step(carry: tuple[Array, ...]) -> tuple[Array, ...]:
            i, away, table, chosen, found = carry
            number = in_place.get(numbers, i)
            at = (home(number) + away) & jnp.uint32(2**bits - 1)
            # Whoever came first has it, which is read there afterwards: see ``core.in_place``.
            table = in_place.put(table, at, jnp.minimum(in_place.get(table, at), i))
            holder = in_place.get(table, at)
            on = in_place.get(numbers, holder) != number
            new = (holder == i) & (number < below)
            chosen = in_place.put(chosen, found, jnp.where(new, number, below))
            return (
                jnp.where(on, i, i + 1),
                jnp.where(on, away + 1, 0).astype(jnp.uint32),
                table,
                chosen,
                found + new.astype(jnp.int32),
            )

        zero = rowwise.after(numbers)
        start = (
            zero,
            zero.astype(jnp.uint32),
            jnp.broadcast_to(zero + rows, (2**bits,)),
            jnp.broadcast_to(zero + below, (size,)),
            zero,
        )
        *_, chosen, found = lax.while_loop(going, step, start)
        return chosen, found

    return rowwise.on_cpu(loop, plain, numbers, count)

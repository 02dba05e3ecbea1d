"""Several items of one group at a time."""

import math
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int, UInt

from jaxbuf.buffers.item import ItemBuffer
from jaxbuf.core import checks, fields, numbers, sorting, storage, trees
from jaxbuf.core.describe import Described
from jaxbuf.core.program import program
from jaxbuf.core.random import check_key, random_words, scale_word
from jaxbuf.core.sizes import check_count
from jaxbuf.core.slots import Slots
from jaxbuf.core.types import Arrays, Count, Index, Integers, Key, Mask
from jaxbuf.core.versions import vary_with
from jaxbuf.occupancy.protocol import Occupancy

Order = Literal["age", "random"]
Padding = Literal["none", "random"]


class Groups(Described):
    """Items of ``B`` groups, up to ``K`` of each.

    Attributes:
        data: The items, leaves ``[B, K, ...]``.
        slots: The slots of the items, ``[B, K]``.
        group: The id of each group, ``[B]`` int32; ``num_groups`` for rows without a group.
        valid: A mask of the places that hold an item, ``[B, K]``: the first places of a group, all
            places of a padded group, and no place of a row without a group. The data of other
            places is arbitrary.
        ignored: The number of items in the whole buffer whose id is not in ``[0, num_groups)``;
            ``[]`` int32.
    """

    data: Arrays
    slots: Slots
    group: Index
    valid: Bool[Array, "B K"]
    ignored: Count


def _check_groups(groups: object, num_groups: int) -> Any:
    """Returns the number of groups, or their ids, as a NumPy array if they are known.

    Raises:
        ValueError: If they are not integers, or one is known to be out of range.
    """
    if np.ndim(groups) == 0:  # pyright: ignore[reportArgumentType]
        return check_count("groups", groups)
    ids = numbers.ids(groups, "groups")
    wrong = ids[(ids < 0) | (ids >= num_groups)] if isinstance(ids, np.ndarray) else ()
    if len(wrong) > 0:
        raise ValueError(
            f"groups has id {wrong[0]}; expected ids from 0 to num_groups - 1, which is "
            f"{num_groups - 1}"
        )
    return ids


def _check_before(buffer: object, arguments: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments, after a check of ids that have no values once they are traced."""
    del buffer
    if not {"groups", "num_groups"} <= arguments.keys():
        return arguments  # Python says what is missing.
    groups = _check_groups(arguments["groups"], arguments["num_groups"])
    return {**arguments, "groups": groups}


@program(
    static=("num_groups", "size", "group", "order", "padding", "replacement"),
    by_value=("groups",),
    buffers=("buffer",),
    keys=("key",),
    before=_check_before,
)
def sample_groups(
    buffer: ItemBuffer,
    key: Key,
    groups: int | Index,
    *,
    num_groups: int,
    size: int,
    group: str = "group",
    order: Order = "age",
    padding: Padding = "none",
    replacement: bool = False,
) -> Groups:
    """Draws groups of items with equal probability, and some items of each group.

    A group consists of all items with the same id, such as an episode, an environment or a class.
    A call from Python is one compiled program. It counts the items of the chosen groups in blocks
    of slots, which takes ``O(N + B * sqrt(N * K))`` steps and numbers for ``N`` slots. If items do
    not lie in the order of their ages, ``order="age"`` sorts all slots first: 0.2 s for 2**20.

    Args:
        buffer: The buffer to draw from.
        key: A PRNG key.
        groups: The number of different groups to draw, ``B``, static; or the ids of the groups,
            ``[B]``. If fewer groups have items, the missing rows are invalid.
        num_groups: An upper bound on ids, which are in ``[0, num_groups)``; static.
        size: The largest number of items to draw from a group, ``K``; static.
        group: Name of the field that holds the id, one integer; dots lead into nested fields.
        order: ``"age"`` draws ``size`` consecutive items of the group, oldest first, starting with
            a random one; ``"random"`` draws different items in random order. Both draw all items of
            a group with at most ``size``.
        padding: What to do with the remaining places of a group with fewer than ``size`` items:
            ``"none"`` leaves them invalid, and ``"random"`` fills each of them with a random item
            of the group.
        replacement: Whether a group may be drawn twice.

    Returns:
        The groups and their items.

    Raises:
        ValueError: If a number is not an integer of at least 1, the field is missing or does not
            hold integers, ids known when traced are out of range, or ``order`` or ``padding`` is
            not one of these choices.

    Example:
        >>> import jax, jax.numpy as jnp, jaxbuf
        >>> item = {"group": jnp.int32(0), "value": jnp.int32(0)}
        >>> buffer = jaxbuf.ItemBuffer.create(item, capacity=10)
        >>> values = jnp.arange(10)
        >>> buffer = buffer.add({"group": values & 5, "value": values})
        >>> batch = jaxbuf.sample_groups(
        ...     buffer, jax.random.key(0), jnp.array([0, 1, 4, 5]), num_groups=6, size=3
        ... )
        >>> batch.data["value"][:2].tolist(), batch.valid.sum(axis=1).tolist()
        ([[0, 2, 8], [1, 3, 9]], [3, 3, 2, 2])
        >>> padded = jaxbuf.sample_groups(
        ...     buffer, jax.random.key(0), jnp.array([4]), num_groups=6, size=5, padding="random"
        ... )
        >>> padded.data["value"].tolist(), padded.valid.tolist()
        ([[4, 6, 4, 4, 6]], [[True, True, True, True, True]])

    References:
        Niu et al., DI-engine, its ``group_sample`` and ``padding`` middleware.
    """
    key = check_key(key)
    num_groups = check_count("num_groups", num_groups)
    size = check_count("size", size)
    checks.check_choice("order", order, get_args(Order))
    checks.check_choice("padding", padding, get_args(Padding))
    checks.check_kind("buffer", buffer, ItemBuffer, "an ItemBuffer")
    buffer = trees.on_device(buffer)
    ids = fields.need(buffer.data, group, "group", "items have")
    if not isinstance(ids, jax.Array) or not jnp.issubdtype(ids.dtype, jnp.integer) or ids.ndim > 1:
        dtype, shape = getattr(ids, "dtype", "no array"), getattr(ids, "shape", (0,))[1:]
        raise ValueError(
            f"group is {group!r}, which is {dtype} of shape {shape} in an item; expected one "
            "integer"
        )
    replacement = checks.check_flag("replacement", replacement)
    groups = _check_groups(groups, num_groups)
    draws = isinstance(groups, int)
    count = groups if draws else groups.shape[0]

    draw_key, order_key, *pad_keys = jax.random.split(key, 3 if padding == "random" else 2)
    slot = jnp.arange(buffer.capacity, dtype=jnp.int32)
    live = buffer.occupancy.live(slot)
    inside = (ids >= 0) & (ids < num_groups)
    name = jnp.where(live & inside, ids.astype(jnp.int32), num_groups)  # [N]
    if draws:
        filled = jnp.zeros((num_groups + 1,), bool).at[name].set(True)[:num_groups]
        chosen, exists = _draw_groups(draw_key, filled, count, replacement)  # [B]
    else:
        chosen = storage.check_rows(groups, "groups", (count,), np.int32, "(B,)")
        exists = (chosen >= 0) & (chosen < num_groups)
    # Rows of the same group share one of the rows as the number of their group.
    row = jnp.arange(count, dtype=jnp.int32)
    number = jnp.full((num_groups + 1,), count, jnp.int32)
    number = number.at[jnp.where(exists, chosen, num_groups + 1)].set(row, mode="drop")
    if order == "age":
        slot = _by_age(buffer.occupancy, slot, live)
    members = _Members.of(number[name[slot]], count, size)
    number = number.at[chosen].get(mode="clip")
    num_items = jnp.where(exists, members.sizes(number), 0)  # [B]

    column = jnp.arange(size, dtype=jnp.int32)[None]
    if order == "random":
        rank = _shuffled(random_words(order_key, (count, size)), num_items)
    else:
        starts = jnp.maximum(num_items - size, 0) + 1
        start = scale_word(random_words(order_key, (count,)), starts)
        rank = start[:, None] + column  # [B, K]
    valid = column < num_items[:, None]
    for pad_key in pad_keys:
        # All items of a group that is too small were drawn, so any item of it may be repeated.
        again = scale_word(random_words(pad_key, (count, size)), num_items[:, None])
        rank = jnp.where(valid, rank, again)
        valid = jnp.broadcast_to(num_items[:, None] > 0, valid.shape)
    position = members.at(number, rank)  # [B, K]
    index = jnp.where(valid, slot.at[position].get(mode="clip"), buffer.capacity)
    return Groups(
        data=storage.read(buffer.data, index),
        slots=Slots(index=index, generation=buffer.occupancy.generation(index)),
        group=jnp.where(exists, chosen, num_groups),
        valid=valid,
        ignored=jnp.sum(live & ~inside, dtype=jnp.int32),
    )


class _Members(NamedTuple):
    """The members of ``B`` groups among ``N`` slots, counted in ``M`` blocks of ``W`` slots.

    Attributes:
        number: The number of the group of each slot, ``[M, W]``; ``B`` for none of them.
        until: The number of members of each group up to the end of each block, ``[B, M]``.
    """

    number: Int[Array, "M W"]
    until: Int[Array, "B M"]

    @classmethod
    def of(cls, number: Int[Array, " N"], groups: int, size: int) -> "_Members":
        """Counts the members, to look up about ``size`` of each group."""
        # A lookup compares with all blocks, and with all slots of one block.
        width = max(math.isqrt(number.shape[0] // size), 1)
        padding = (0, -number.shape[0] % width)
        number = jnp.pad(number, padding, constant_values=groups).reshape(-1, width)
        block = jnp.arange(number.shape[0], dtype=jnp.int32)[:, None]
        counts = jnp.zeros((groups, number.shape[0]), jnp.int32)
        counts = counts.at[number, block].add(1, mode="drop")
        return cls(number, jnp.cumsum(counts, axis=1, dtype=jnp.int32))

    def sizes(self, number: Integers) -> Integers:
        """Returns the number of members of each group."""
        return self.until.at[number, -1].get(mode="clip")

    def at(self, number: Integers, rank: Int[Array, "B K"]) -> Int[Array, "B K"]:
        """Returns the positions of members by their rank; arbitrary if there are not as many."""
        until = self.until.at[number].get(mode="clip")[:, None]  # [B, 1, M]
        passed = until <= rank[..., None]  # [B, K, M]
        block = jnp.sum(passed, axis=-1, dtype=jnp.int32)
        rank = rank - jnp.max(jnp.where(passed, until, 0), axis=-1)
        is_member = self.number.at[block].get(mode="clip") == number[:, None, None]  # [B, K, W]
        before = jnp.cumsum(is_member, axis=-1, dtype=jnp.int32) <= rank[..., None]
        return block * self.number.shape[1] + jnp.sum(before, axis=-1, dtype=jnp.int32)


def _draw_groups(
    key: Key, filled: Bool[Array, " G"], count: int, replacement: bool
) -> tuple[Index, Mask]:
    """Draws groups that have items, and returns them with a mask of the rows that hold one."""
    total = jnp.sum(filled, dtype=jnp.int32)
    if replacement:
        rank = scale_word(random_words(key, (count,)), total)
        until = jnp.cumsum(filled, dtype=jnp.int32)
        group = jnp.searchsorted(until, rank, side="right").astype(jnp.int32)
        return jnp.minimum(group, filled.size - 1), jnp.broadcast_to(total > 0, (count,))
    # The groups with the smallest words, none of which is that of a group without items.
    word = jnp.where(filled, jnp.maximum(~random_words(key, filled.shape), 1), 0)
    _, group = sorting.largest(word, min(count, filled.size))
    row = jnp.arange(count, dtype=jnp.int32)
    return group.at[row].get(mode="clip"), row < total


def _by_age(
    occupancy: Occupancy, slot: Int[Array, " N"], live: Bool[Array, " N"]
) -> Int[Array, " N"]:
    """Returns the slots in the order of their items' ages, oldest first."""
    ordered = occupancy.in_order()
    if ordered is not None:
        return ordered[0]
    # Of two generations the later is larger, unless they have wrapped in between.
    generation = occupancy.generation(slot)
    return sorting.order(generation - generation[jnp.argmax(live)] + jnp.uint32(2**31))


def _shuffled(words: UInt[Array, "B K"], size: Integers) -> Int[Array, "B K"]:
    """Returns the first ``K`` cards of shuffled decks of ``size`` cards; arbitrary past their end.

    This is Fisher and Yates' method without storing the deck: it keeps only the card that each swap
    puts back.
    """
    none = vary_with(jnp.full(words.shape, -1, jnp.int32), words, size)

    def swap(j: Count, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        spots, cards, drawn = carry

        def card_at(spot: Index) -> Index:
            """Returns the card at a spot: the last one put there, or its own."""
            turn = jnp.arange(words.shape[1], dtype=jnp.int32)[None]
            last = jnp.max(jnp.where(spots == spot[:, None], turn, -1), axis=1, keepdims=True)
            card = jnp.take_along_axis(cards, jnp.maximum(last, 0), axis=1)
            return jnp.where(last < 0, spot[:, None], card)[:, 0]

        left = jnp.maximum(size - j, 1)
        spot = j + scale_word(words[:, j], left)
        swapped = card_at(jnp.full_like(spot, j))
        return (
            spots.at[:, j].set(spot),
            cards.at[:, j].set(swapped),
            drawn.at[:, j].set(card_at(spot)),
        )

    return lax.fori_loop(0, words.shape[1], swap, (none, none, none))[2]

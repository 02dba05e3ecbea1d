"""Lanes, in which rows of several owners are collected until an item is complete."""

from typing import Self

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Int, PyTree, UInt

from jaxbuf.core import counters, sizes, storage
from jaxbuf.core.division import remainder
from jaxbuf.core.types import Arrays, Count

# The names of the counters of lanes.
COUNTS = ("complete", "cut", "refused", "dropped")


class Lanes(struct.PyTreeNode):
    """Lanes of ``length`` rows: one for each of ``E`` owners to fill, and ``W`` spare ones.

    The spare lanes form a queue. When an item is complete, its lane is moved to the queue, and its
    owner is given a free lane from there. An item that is completed while no lane is free is
    refused: its rows are lost, and its owner starts over in the same lane. A whole rollout is
    placed at once, and no row of a lane is written twice.

    The queue is a ring of lanes. Beginning at ``head``, it has first the lanes of complete items
    that are waiting, oldest first, and then the free lanes. A completed lane is swapped with the
    first free one.

    Attributes:
        lane: The lane that each owner fills, ``[E]`` int32.
        filled: The number of rows in that lane, ``[E]`` int32, less than ``length``.
        line: The spare lanes, ``[W]`` int32.
        rows: The number of rows in each spare lane, ``[W]`` int32; arbitrary for free lanes.
        head: The index in ``line`` where the queue begins, ``[]`` int32.
        waiting: The number of complete items that are waiting, ``[]`` int32.
        counters: The numbers of items completed, of items among them that filled their lane without
            an end, of items refused, and of items dropped, in the order of ``COUNTS``; ``[4]``
            uint32, which wrap.
        length: The number of rows in a lane.
    """

    lane: Int[Array, " E"]
    filled: Int[Array, " E"]
    line: Int[Array, " W"]
    rows: Int[Array, " W"]
    head: Count
    waiting: Count
    counters: UInt[Array, " 4"]
    length: int = struct.field(pytree_node=False)

    @classmethod
    def create(cls, owners: int, spare: int, length: int) -> Self:
        """Creates empty lanes."""
        return cls(
            lane=jnp.arange(owners, dtype=jnp.int32),
            filled=jnp.zeros((owners,), jnp.int32),
            line=jnp.arange(owners, owners + spare, dtype=jnp.int32),
            rows=jnp.zeros((spare,), jnp.int32),
            head=jnp.int32(0),
            waiting=jnp.int32(0),
            counters=counters.tally(COUNTS, {}),
            length=length,
        )

    @property
    def count(self) -> int:
        """The number of all lanes, including spare ones."""
        return self.lane.shape[-1] + self.line.shape[-1]

    @property
    def num_rows(self) -> Int[Array, " L"]:
        """The number of rows in each lane, ``[count]``; 0 for free lanes."""
        order = remainder(jnp.arange(self.line.size, dtype=jnp.int32) - self.head, self.line.size)
        rows = jnp.where(order < self.waiting, self.rows, 0)
        num_rows = jnp.zeros((self.count,), jnp.int32)
        return num_rows.at[self.lane].set(self.filled).at[self.line].set(rows)

    def place(
        self,
        mask: Bool[Array, "E T"],
        ends: Bool[Array, "E T"],
        begins: Bool[Array, "E T"] | None = None,
    ) -> tuple[Self, Int[Array, "E T"]]:
        """Appends rows to the items of their owners.

        Args:
            mask: A mask of the rows to append, in order of time.
            ends: A mask of the rows that end an item, even if the lane is not full.
            begins: A mask of the rows that begin a new item, so that the incomplete item before
                them is dropped; None if no row does.

        Returns:
            The new lanes, and the row of the storage for each row, ``lane * length + offset``. It
            is past the end for rows that are masked out, or whose item was refused or dropped. All
            others are different.
        """
        ends = mask & ends  # [E, T]
        begins = jnp.zeros_like(mask) if begins is None else mask & begins  # [E, T]
        rank = jnp.cumsum(mask, axis=1, dtype=jnp.int32) - mask.astype(jnp.int32)  # [E, T]
        count = jnp.sum(mask, axis=1, keepdims=True, dtype=jnp.int32)  # [E, 1]
        # An item starts at the last row that begins one or follows an end. After it, a new item
        # starts every ``length`` rows, when a lane is full.
        open_start = -self.filled[:, None]  # [E, 1]
        start, stop = jnp.where(begins, rank, open_start), jnp.where(ends, rank + 1, open_start)
        before = _largest_before(jnp.maximum(start, stop), open_start)  # [E, T]
        begin = jnp.maximum(before, start)  # [E, T]
        offset = remainder(rank - begin, self.length)  # [E, T]
        full = mask & (offset == self.length - 1)  # [E, T]
        complete = full | ends  # [E, T]
        dropped = begins & (remainder(rank - before, self.length) != 0)  # [E, T]

        # Over time first, then over owners: the oldest item joins the queue first.
        order = jnp.cumsum(complete.T.reshape(-1), dtype=jnp.int32).reshape(complete.T.shape).T - 1
        accepted = complete & (order < self.line.size - self.waiting)  # [E, T]
        entry = remainder(self.head + self.waiting + order, self.line.size)  # [E, T]
        swapped = jnp.where(accepted, order, -1)  # [E, T]
        lane = self._lane_after(_largest_before(swapped, jnp.full_like(open_start, -1)))  # [E, T]
        kept = mask & _is_kept(complete, accepted, begins)  # [E, T]
        target = jnp.where(kept, lane * self.length + offset, self.count * self.length)  # [E, T]

        entry = jnp.where(accepted, entry, self.line.size).reshape(-1)  # [E * T]
        events = {
            "complete": complete,
            "cut": full & ~ends,  # [E, T]
            "refused": complete & ~accepted,  # [E, T]
            "dropped": dropped,
        }
        counts = {name: jnp.sum(event, dtype=jnp.uint32) for name, event in events.items()}  # []
        last = jnp.maximum(start, stop).max(axis=1, keepdims=True)  # [E, 1]
        lanes = self.replace(
            lane=self._lane_after(swapped.max(1, keepdims=True))[:, 0],  # [E]
            filled=remainder(count - last, self.length)[:, 0],  # [E]
            line=self.line.at[entry].set(lane.reshape(-1), mode="drop", unique_indices=True),  # [W]
            rows=self.rows.at[entry].set(offset.reshape(-1) + 1, mode="drop", unique_indices=True),
            waiting=self.waiting + jnp.sum(accepted, dtype=jnp.int32),  # []
            counters=self.counters + counters.tally(COUNTS, counts),  # [4]
        )
        return lanes, target

    def take(self, rows: int) -> tuple[Self, Int[Array, " K"], Int[Array, " K"], Bool[Array, " K"]]:
        """Takes up to ``rows`` waiting items, the oldest first.

        Their lanes must be read before the next ``place``, which may overwrite them.

        Returns:
            The lanes without these items; the lane of each item; the number of rows in it, 0 if
            there is no item; and a mask of the items, since fewer may be waiting.
        """
        row = jnp.arange(rows, dtype=jnp.int32)
        is_item = row < self.waiting
        entry = remainder(self.head + row, self.line.size)
        count = jnp.minimum(self.waiting, rows)
        lanes = self.replace(
            head=remainder(self.head + count, self.line.size), waiting=self.waiting - count
        )
        return lanes, self.line[entry], jnp.where(is_item, self.rows[entry], 0), is_item

    def drop(self, owners: Bool[Array, " E"]) -> Self:
        """Drops and counts the incomplete items of these owners."""
        dropped = jnp.sum(owners & (self.filled > 0), dtype=jnp.uint32)
        return self.replace(
            filled=jnp.where(owners, 0, self.filled),
            counters=self.counters + counters.tally(COUNTS, {"dropped": dropped}),
        )

    def counts(self) -> dict[str, Array]:
        """Returns the counters by their names."""
        return counters.named(COUNTS, self.counters)

    def clear(self) -> Self:
        """Returns empty lanes that keep the counters."""
        return self.replace(
            filled=jnp.zeros_like(self.filled),
            rows=jnp.zeros_like(self.rows),
            head=jnp.zeros_like(self.head),
            waiting=jnp.zeros_like(self.waiting),
        )

    def _lane_after(self, order: Int[Array, "E T"]) -> Int[Array, "E T"]:
        """Returns the lane of each owner after its item with this number joined the queue.

        A number of −1 means that none of its items has joined the queue.
        """
        free = self.line[remainder(self.head + self.waiting + order, self.line.size)]
        return jnp.where(order < 0, self.lane[:, None], free)


def _largest_before(value: Int[Array, "E T"], first: Int[Array, "E 1"]) -> Int[Array, "E T"]:
    """Returns the largest value before each row; before the first row it is ``first``."""
    return lax.cummax(jnp.concatenate([first, value[:, :-1]], axis=1), axis=1)


def _is_kept(
    complete: Bool[Array, "E T"], accepted: Bool[Array, "E T"], begins: Bool[Array, "E T"]
) -> Bool[Array, "E T"]:
    """Returns a mask of the rows whose item is not refused or dropped later in the rollout."""
    rows = complete.shape[1]
    # The next event of an item decides. Events are ordered in time: a completion comes after its
    # row, and the beginning of another item before its row. The lowest bit of an event's time is
    # set if the item is lost.
    never = jnp.int32(4 * rows + 4)  # []
    time = 4 * jnp.arange(rows, dtype=jnp.int32)[None] + 2  # [1, T]
    completion = jnp.where(complete, time + (~accepted).astype(jnp.int32), never)  # [E, T]
    dropping = jnp.where(begins, time - 1, never)  # [E, T]
    dropping = jnp.concatenate(
        [dropping[:, 1:], jnp.full((complete.shape[0], 1), never, jnp.int32)], axis=1
    )
    upcoming = lax.cummin(jnp.minimum(completion, dropping), axis=1, reverse=True)  # [E, T]
    return upcoming % 2 == 0


def check_line(
    owners: int, length: int, per_add: int | None, waiting: int | None
) -> tuple[int | None, int]:
    """Returns the checked number of items to return at a time, and of items that may wait.

    The first one is None if it was not given; see ``at_a_time``.
    """
    if per_add is not None:
        per_add = sizes.check_count("per_add", per_add)
    line = sizes.check_count("waiting", max(owners, per_add or 0) if waiting is None else waiting)
    if per_add is not None and per_add > line:
        raise ValueError(
            f"per_add is {per_add}, but only {line} items may be waiting; make per_add smaller "
            "or waiting larger"
        )
    if (owners + line) * length > 2**30:
        raise ValueError(
            f"{owners + line} items of {length} rows are more than 2**30 rows; make them shorter "
            "or waiting smaller"
        )
    return per_add, line


def at_a_time(per_add: int | None, lanes: Lanes, rows: int) -> int:
    """Returns the number of items that an ``add`` of so many rows returns.

    Each of them costs a copy of a lane, whether there are so many or not. By default these copies
    therefore have at most 32 times the rows that were added, or 16 lanes. As long as items have at
    least a 32nd of the length of a lane, no more of them are completed on average.
    """
    if per_add is not None:
        return per_add
    most = min(lanes.lane.shape[-1], lanes.line.shape[-1])
    return min(most, max(16, -(-32 * rows // lanes.length)))


def shapes_of(data: Arrays) -> PyTree[jax.ShapeDtypeStruct]:
    """Returns the shapes and dtypes of one lane of the storage."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), data)


def write(data: Arrays, rows: Arrays, target: Int[Array, "..."]) -> Arrays:
    """Writes rows, leaves ``[*target.shape, ...]``, to the rows ``target`` of the storage."""
    written = storage.write(
        jax.tree.map(lambda leaf: lax.collapse(leaf, 0, 2), data),
        jax.tree.map(lambda leaf: lax.collapse(leaf, 0, target.ndim), rows),
        target.reshape(-1),
    )
    return jax.tree.map(lambda new, leaf: new.reshape(leaf.shape), written, data)

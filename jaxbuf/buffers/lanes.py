"""Rows of several owners, collected in lanes until an item is complete."""

from typing import Self

import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Int, UInt


class Lanes(struct.PyTreeNode):
    """``E`` owners that each fill a lane of ``length`` rows, and a line of ``W`` spare lanes.

    When an item is complete its lane joins the line, and its owner goes on in a free lane from
    there. An item that completes while the line is full of waiting ones is refused: its rows go,
    and its owner starts over. All of a rollout is placed at once, and no row of a lane twice.

    The line is a ring of spare lanes. From ``head`` on come those that wait, oldest first, and then
    those that are free, so that a completed lane is swapped with the first free one.

    Attributes:
        lane: The lane that each owner fills, ``[E]`` int32.
        filled: How many rows it holds, ``[E]`` int32, below ``length``.
        line: The spare lanes, ``[W]`` int32.
        rows: How many rows each of them holds, ``[W]`` int32; arbitrary for free ones.
        head: Where the line begins, ``[]`` int32.
        waiting: How many complete items there are, ``[]`` int32.
        counters: Items completed, of those the ones that ran out of rows, refused and dropped,
            ``[4]`` uint32; they wrap.
        length: Rows in a lane.
    """

    lane: Int[Array, " E"]
    filled: Int[Array, " E"]
    line: Int[Array, " W"]
    rows: Int[Array, " W"]
    head: Int[Array, ""]
    waiting: Int[Array, ""]
    counters: UInt[Array, " 4"]
    length: int = struct.field(pytree_node=False)

    @classmethod
    def create(cls, owners: int, spare: int, length: int) -> Self:
        """Empty lanes."""
        return cls(
            lane=jnp.arange(owners, dtype=jnp.int32),
            filled=jnp.zeros((owners,), jnp.int32),
            line=jnp.arange(owners, owners + spare, dtype=jnp.int32),
            rows=jnp.zeros((spare,), jnp.int32),
            head=jnp.int32(0),
            waiting=jnp.int32(0),
            counters=jnp.zeros((4,), jnp.uint32),
            length=length,
        )

    @property
    def count(self) -> int:
        """Lanes, used and spare."""
        return self.lane.shape[-1] + self.line.shape[-1]

    @property
    def held(self) -> Int[Array, " L"]:
        """How many rows each lane holds, ``[count]``; those of free ones are none."""
        order = (jnp.arange(self.line.size, dtype=jnp.int32) - self.head) % self.line.size
        rows = jnp.where(order < self.waiting, self.rows, 0)
        held = jnp.zeros((self.count,), jnp.int32)
        return held.at[self.lane].set(self.filled).at[self.line].set(rows)

    def place(
        self,
        taken: Bool[Array, "E T"],
        ends: Bool[Array, "E T"],
        begins: Bool[Array, "E T"] | None = None,
    ) -> tuple[Self, Int[Array, "E T"]]:
        """Append rows to the items of their owners.

        Args:
            taken: Which rows there are, in order of time.
            ends: Which of them end an item, full or not.
            begins: Which of them begin one, whatever came before: what is not complete is dropped.

        Returns:
            The new lanes; and where each row goes, ``lane * length + place``, past the end for rows
            that are not there, or whose item was refused or dropped. No place is given twice.
        """
        ends = taken & ends
        begins = jnp.zeros_like(taken) if begins is None else taken & begins
        rank = jnp.cumsum(taken, axis=1, dtype=jnp.int32) - taken.astype(jnp.int32)
        count = jnp.sum(taken, axis=1, keepdims=True, dtype=jnp.int32)
        # An item starts at the last row that begins one or follows an end; full lanes follow from
        # there, one every ``length`` rows.
        first = -self.filled[:, None]
        start, stop = jnp.where(begins, rank, first), jnp.where(ends, rank + 1, first)
        before = _before(jnp.maximum(start, stop), first)
        since = jnp.maximum(before, start)
        place = (rank - since) % self.length
        full = taken & (place == self.length - 1)
        complete = full | ends
        dropped = begins & ((rank - before) % self.length != 0)

        order = jnp.cumsum(complete.T.reshape(-1), dtype=jnp.int32).reshape(complete.T.shape).T - 1
        accepted = complete & (order < self.line.size - self.waiting)
        spot = (self.head + self.waiting + order) % self.line.size
        swapped = jnp.where(accepted, order, -1)
        lane = self._after(_before(swapped, jnp.full_like(first, -1)))
        stays = taken & _stays(complete, accepted, begins)
        target = jnp.where(stays, lane * self.length + place, self.count * self.length)

        spot = jnp.where(accepted, spot, self.line.size).reshape(-1)
        number = jnp.stack([complete, full & ~ends, complete & ~accepted, dropped])
        last = jnp.maximum(start, stop).max(axis=1, keepdims=True)
        lanes = self.replace(
            lane=self._after(swapped.max(1, keepdims=True))[:, 0],
            filled=((count - last) % self.length)[:, 0],
            line=self.line.at[spot].set(lane.reshape(-1), mode="drop", unique_indices=True),
            rows=self.rows.at[spot].set(place.reshape(-1) + 1, mode="drop", unique_indices=True),
            waiting=self.waiting + jnp.sum(accepted, dtype=jnp.int32),
            counters=self.counters + jnp.sum(number, axis=(1, 2), dtype=jnp.uint32),
        )
        return lanes, target

    def take(self, rows: int) -> tuple[Self, Int[Array, " K"], Int[Array, " K"], Bool[Array, " K"]]:
        """The ``rows`` items that wait longest; their lanes are free from the next ``place`` on.

        Returns:
            The lanes without them; and for each row its lane, how many rows are in it, 0 if there
            is no item, and whether there is one.
        """
        row = jnp.arange(rows, dtype=jnp.int32)
        there = row < self.waiting
        spot = (self.head + row) % self.line.size
        count = jnp.minimum(self.waiting, rows)
        lanes = self.replace(
            head=(self.head + count) % self.line.size, waiting=self.waiting - count
        )
        return lanes, self.line[spot], jnp.where(there, self.rows[spot], 0), there

    def drop(self, owners: Bool[Array, " E"]) -> Self:
        """Start over: what these owners have not completed is dropped and counted."""
        dropped = jnp.sum(owners & (self.filled > 0), dtype=jnp.uint32)
        return self.replace(
            filled=jnp.where(owners, 0, self.filled),
            counters=self.counters.at[3].add(dropped),
        )

    def clear(self) -> Self:
        """No rows and nothing that waits; counters go on. Shares no array with the original."""
        return self.replace(
            lane=self.lane.copy(),
            filled=jnp.zeros_like(self.filled),
            line=self.line.copy(),
            rows=jnp.zeros_like(self.rows),
            head=jnp.zeros_like(self.head),
            waiting=jnp.zeros_like(self.waiting),
            counters=self.counters.copy(),
        )

    def _after(self, order: Int[Array, "E T"]) -> Int[Array, "E T"]:
        """The lane of each owner once its item of this number has joined the line; −1: none has."""
        free = self.line[(self.head + self.waiting + order) % self.line.size]
        return jnp.where(order < 0, self.lane[:, None], free)


def _before(value: Int[Array, "E T"], first: Int[Array, "E 1"]) -> Int[Array, "E T"]:
    """The largest value before each row, and ``first`` before all of them."""
    return lax.cummax(jnp.concatenate([first, value[:, :-1]], axis=1), axis=1)


def _stays(
    complete: Bool[Array, "E T"], accepted: Bool[Array, "E T"], begins: Bool[Array, "E T"]
) -> Bool[Array, "E T"]:
    """Which rows belong to an item that is neither refused nor dropped later in the rollout."""
    rows = complete.shape[1]
    # The next thing that happens to an item decides. A row's own completion comes after it, the
    # beginning of another item before the row that begins it; the lowest bit tells a loss.
    never = jnp.int32(4 * rows + 4)
    time = 4 * jnp.arange(rows, dtype=jnp.int32)[None] + 2
    completion = jnp.where(complete, time + (~accepted).astype(jnp.int32), never)
    dropping = jnp.where(begins, time - 1, never)
    dropping = jnp.concatenate(
        [dropping[:, 1:], jnp.full((complete.shape[0], 1), never, jnp.int32)], axis=1
    )
    upcoming = lax.cummin(jnp.minimum(completion, dropping), axis=1, reverse=True)
    return upcoming % 2 == 0

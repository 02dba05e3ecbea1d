"""Independent rings of steps, and the windows of consecutive steps that they hold."""

from collections.abc import Iterator
from typing import Self

import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Int, UInt

from jaxbuf.core import native, storage
from jaxbuf.core.division import quotient, remainder
from jaxbuf.core.problems import Checked, first_wrong
from jaxbuf.core.random import scale_word
from jaxbuf.core.slots import Slots
from jaxbuf.core.types import Count, Index, Integers, Mask, Word, Words
from jaxbuf.occupancy.ages import AgeRange, Bound
from jaxbuf.occupancy.protocol import Occupancy

# The fields that the kernels take.
_SIZES = ("num_envs", "windows_per_ring", "period", "length", "sequence_length", "ignored")


class Rings(Occupancy, Checked, struct.PyTreeNode):
    """``E`` rings of ``length`` steps, seen as a set of windows of ``sequence_length`` steps.

    A window starts at a place of its ring that is a multiple of ``period``, may run past the ring's
    end to its beginning, and never crosses the write position. Its slot is
    ``ring * (length / period) + start / period``. Its generation is the lap in which its first
    step, the one that is overwritten first, was written. Both follow from the write positions and
    laps, so that nothing is stored per step. All counters wrap safely.

    To samplers this is an occupancy whose items are the windows; see ``Occupancy``.

    A step's position is the number of places of its ring that were passed before it. It always
    grows, wraps at 2**32, and is the step's place modulo ``length``, as in ALF's replay buffer.
    ``clear`` begins a new lap, from which positions go on.

    Attributes:
        cursor: The place of each ring that is written next, ``[E]`` uint32.
        lap: The number of the present lap of each ring, ``[E]`` uint32.
        held: The number of steps in each ring, ``[E]`` uint32.
        length: Number of steps that a ring holds, a multiple of ``period``.
        sequence_length: Number of steps in a window, at most ``length``.
        period: Distance between the starts of windows.
        ignored: Number of earliest steps of a ring that start no window.
    """

    cursor: UInt[Array, " E"]
    lap: UInt[Array, " E"]
    held: UInt[Array, " E"]
    length: int = struct.field(pytree_node=False)
    sequence_length: int = struct.field(pytree_node=False)
    period: int = struct.field(pytree_node=False)
    ignored: int = struct.field(pytree_node=False, default=0)

    @classmethod
    def create(
        cls, num_envs: int, length: int, sequence_length: int, period: int, ignored: int = 0
    ) -> Self:
        """Returns empty rings."""
        # The laps start at 1, so that no generation that a caller sets to zero is ever live.
        return cls(
            cursor=jnp.zeros((num_envs,), jnp.uint32),
            lap=jnp.ones((num_envs,), jnp.uint32),
            held=jnp.zeros((num_envs,), jnp.uint32),
            length=length,
            sequence_length=sequence_length,
            period=period,
            ignored=ignored,
        )

    @property
    def num_envs(self) -> int:
        """The number of rings, one for each environment."""
        return self.cursor.shape[-1]

    @property
    def windows_per_ring(self) -> int:
        """The number of places in a ring where a window may start."""
        return self.length // self.period

    @property
    def num_slots(self) -> int:
        return self.num_envs * self.windows_per_ring

    @property
    def capacity(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The same as ``num_slots``: a number of windows, not of steps."""
        return self.num_slots

    @property
    def steps(self) -> Count:
        """The number of steps held by all rings together."""
        return jnp.sum(self.held, axis=-1, dtype=jnp.uint32).astype(jnp.int32)

    @property
    def size(self) -> Count:
        """The number of windows that can be drawn."""
        return jnp.sum(self.span()[1], axis=-1, dtype=jnp.int32)

    def place(
        self, rows: int, mask: Bool[Array, "E T"] | None
    ) -> tuple[Self, Int[Array, "E T"], Int[Array, "E R"], Int[Array, "E T"]]:
        """Appends up to ``rows`` steps to each ring.

        Args:
            rows: Number of steps offered to each ring.
            mask: True for the steps to take, which keep their order; None to take all.

        Returns:
            The new rings; the row of the storage for each step, ``ring * length + place``, past the
            end for rows that are masked out or overwritten by later ones, ``[E, T]``; the slots of
            windows that were overwritten or are not yet complete again, ``[E, R]`` with a static
            bound ``R``; and the slot of the window that each row completes, ``[E, T]``. A missing
            slot is past the end. No row of the storage and no slot occurs twice.
        """
        if mask is not None:
            return self._placed(rows, mask)
        *flat, rings = self._append(rows=rows)
        target, broken, completed = (x.reshape(self.num_envs, -1) for x in flat)
        return rings, target, broken, completed

    @native.kernel("rings_append", *_SIZES, in_place=3)
    def _append(
        self, *, rows: int
    ) -> tuple[Int[Array, " N"], Int[Array, " M"], Int[Array, " N"], Self]:
        """Returns what ``place`` does, for ``E * T = N`` steps in one axis."""
        rings, *numbers = self._placed(rows, None)
        target, broken, completed = (x.reshape(-1) for x in numbers)
        return target, broken, completed, rings

    def _placed(
        self, rows: int, mask: Bool[Array, "E T"] | None
    ) -> tuple[Self, Int[Array, "E T"], Int[Array, "E R"], Int[Array, "E T"]]:
        """Returns what ``place`` does."""
        # Unsigned as far as possible, since every conversion is an operation for each ring.
        unsigned = self.cursor[:, None]  # [E, 1]
        cursor, held = unsigned.astype(jnp.int32), self.held[:, None].astype(jnp.int32)  # [E, 1]
        length = jnp.uint32(self.length)
        env = jnp.arange(self.num_envs, dtype=jnp.int32)[:, None]  # [E, 1]
        if mask is None:
            rank = jnp.broadcast_to(jnp.arange(rows, dtype=jnp.int32), (self.num_envs, rows))
            count = jnp.full((self.num_envs, 1), rows, jnp.int32)  # [E, 1]
            added = jnp.ones(rank.shape, bool)  # [E, T]
        else:
            rank = jnp.cumsum(mask, axis=1, dtype=jnp.int32) - 1  # [E, T]
            count = jnp.sum(mask, axis=1, keepdims=True, dtype=jnp.int32)  # [E, 1]
            added = mask
        place = remainder(unsigned + rank.astype(jnp.uint32), length)  # [E, T]
        target = (env.astype(jnp.uint32) * length + place).astype(jnp.int32)  # [E, T]
        if mask is not None or rows > self.length:  # Else all rows stay.
            stays = added & (rank + self.length >= count)  # [E, T]
            target = jnp.where(stays, target, env.size * self.length)  # [E, T]

        # Steps are counted from the first new one, so that those held now are negative. A new step
        # completes a window whose first step is still held after all new steps are written.
        start = rank - (self.sequence_length - 1)  # [E, T]
        num_steps = jnp.minimum(held + count, self.length)  # [E, 1]
        first = count - num_steps + self.ignored  # [E, 1]
        completes = added & (start >= first)  # [E, T]
        completed = self._slot(env, cursor + start, completes)  # [E, T]
        # Windows that start at the newest ``sequence_length - 1`` steps are not complete yet.
        age = jnp.arange(min(rows, self.sequence_length - 1), dtype=jnp.int32)[None]  # [1, A]
        broken = self._slot(env, cursor + count - 1 - age, age < count)  # [E, A]
        if self.ignored:
            # These windows now start at ignored steps, and are not among the broken ones above. All
            # were complete, since a ring is at least as long as ignored steps and a window.
            start = first - 1 - jnp.arange(min(rows, self.ignored), dtype=jnp.int32)[None]  # [E, I]
            ignored = start >= self.ignored - held  # [E, I]
            broken = jnp.concatenate([broken, self._slot(env, cursor + start, ignored)], axis=1)

        increase = count[:, 0].astype(jnp.uint32)  # [E]
        end = self.cursor + increase  # [E]
        rings = self.replace(
            cursor=remainder(end, length),  # [E]
            lap=self.lap + quotient(end, length),  # [E]
            held=jnp.minimum(self.held + increase, length),  # [E]
        )
        return rings, target, broken, completed

    def resize(self, sequence_length: int) -> tuple[Self, Int[Array, "E R"], Int[Array, "E Q"]]:
        """Returns the same steps seen as windows of another length.

        Returns:
            The rings, the slots that gained a window, and the slots that lost theirs.
        """
        shorter, longer = sorted((self.sequence_length, sequence_length))
        cursor, held = (x.astype(jnp.int32)[:, None] for x in (self.cursor, self.held))
        env = jnp.arange(self.num_envs, dtype=jnp.int32)[:, None]
        age = jnp.arange(shorter - 1, longer - 1, dtype=jnp.int32)[None]
        slots = self._slot(env, cursor - 1 - age, age < held - self.ignored)
        none = slots[:, :0]
        added, removed = (slots, none) if sequence_length == shorter else (none, slots)
        return self.replace(sequence_length=sequence_length), added, removed

    def rows_of(self, index: Index) -> Int[Array, "B S"]:
        """Returns the rows of the storage with the steps of the windows at ``index``."""
        env, start = self.ring_and_start(index)
        offset = jnp.arange(self.sequence_length, dtype=jnp.int32)
        return env[:, None] * self.length + remainder(start[:, None] + offset[None], self.length)

    def live(self, index: Int[Array, "..."]) -> Bool[Array, "..."]:
        env, start = self.ring_and_start(index)
        cursor, _, held = (x.astype(jnp.int32) for x in self._counters(env))
        age = remainder(cursor - 1 - start, self.length)
        inside = (index >= 0) & (index < self.num_slots) & (age < held - self.ignored)
        return inside & (age >= self.sequence_length - 1)

    def age(self, index: Index) -> Integers:
        """Returns the number of steps after the first step of the windows at ``index``."""
        env, start = self.ring_and_start(index)
        return remainder(self._counters(env)[0].astype(jnp.int32) - 1 - start, self.length)

    def generation(self, index: Int[Array, "..."]) -> UInt[Array, "..."]:
        """Returns the lap in which the first step of the window at ``index`` was written."""
        env, start = self.ring_and_start(index)
        cursor, lap, _ = self._counters(env)
        return jnp.where(start < cursor.astype(jnp.int32), lap, lap - jnp.uint32(1))

    @native.kernel("rings_rows_to_change", *_SIZES)
    def rows_to_change(self, slots: Slots, wanted: Mask, legal: Mask) -> tuple[Index, Word]:
        """Returns the slots of rows to change, and a count of illegal ones; see ``Occupancy``."""
        return super().rows_to_change(slots, wanted, legal)

    @native.kernel("rings_slots_of", *_SIZES)
    def slots_of(self, index: Index, valid: Mask, *, past_end: int) -> tuple[Slots, Mask]:
        return super().slots_of(index, valid, past_end=past_end)

    def draw(self, words: Words) -> Index:
        """Returns a uniformly drawn window for each random word; arbitrary if none is complete."""
        windows = AgeRange(*self.span(), self.windows_per_ring)
        return windows.at(scale_word(words, windows.total))

    @property
    def end(self) -> UInt[Array, " E"]:
        """The position of the next step of each ring."""
        return (self.lap - jnp.uint32(1)) * jnp.uint32(self.length) + self.cursor

    def row_of(self, env: Index, position: Words) -> Index:
        """Returns the rows of the storage with these steps; past the end for missing ones."""
        cursor, lap, held = self._counters(env)
        end = (lap - jnp.uint32(1)) * jnp.uint32(self.length) + cursor
        age = end - jnp.uint32(1) - position
        inside = (env >= 0) & (env < self.num_envs) & (age < held)
        place = remainder(cursor.astype(jnp.int32) - 1 - age.astype(jnp.int32), self.length)
        return jnp.where(inside, env * self.length + place, self.num_envs * self.length)

    def holds_step(self, row: Index) -> Mask:
        """Returns a mask of the rows of the storage that hold a step."""
        env, place = quotient(row, self.length), remainder(row, self.length)
        cursor, _, held = (x.astype(jnp.int32) for x in self._counters(env))
        oldest = cursor - held
        first = jnp.where(place < cursor, oldest, oldest + self.length)
        inside = (row >= 0) & (row < self.num_envs * self.length)
        return inside & (place >= first)

    def first_step_of(self, index: Index, generation: Words) -> tuple[Index, Words]:
        """Returns the ring of each window, and the position of its first step."""
        env, start = self.ring_and_start(index)
        lap = (generation - jnp.uint32(1)) * jnp.uint32(self.length)
        return env, lap + start.astype(jnp.uint32)

    def drop(self, count: Int[Array, " E"], most: int) -> tuple[Self, Int[Array, "E R"]]:
        """Drops the earliest steps of each ring.

        Args:
            count: Number of steps, at most ``most`` and at most the number that the ring holds.
            most: A static bound.

        Returns:
            The new rings, and the slots whose windows were removed.
        """
        cursor, held = (x.astype(jnp.int32)[:, None] for x in (self.cursor, self.held))
        env = jnp.arange(self.num_envs, dtype=jnp.int32)[:, None]
        offset = jnp.arange(most, dtype=jnp.int32)[None]
        place = cursor - held + self.ignored + offset
        # Slots past the last complete window are among them, and held no window before.
        removed = (offset < count[:, None]) & (self.ignored + offset < held)
        num_steps = self.held - count.astype(jnp.uint32)
        return self.replace(held=num_steps), self._slot(env, place, removed)

    def retract(self, count: Int[Array, " E"]) -> Self:
        """Takes back the newest ``count`` steps of each ring.

        The end of such a ring becomes ``end - count + length``, so that the steps that stay have
        new positions and generations, and none is used again.
        """
        steps = count.astype(jnp.uint32)
        borrow = (self.cursor < steps).astype(jnp.uint32)
        length = jnp.uint32(self.length)
        return self.replace(
            cursor=self.cursor + borrow * length - steps,
            lap=jnp.where(count > 0, self.lap + jnp.uint32(1) - borrow, self.lap),
            held=self.held - steps,
        )

    @native.kernel("rings_span", *_SIZES)
    def span(self) -> tuple[Int[Array, " E"], Int[Array, " E"]]:
        """Returns for each ring its earliest window, ``start / period``, and the window count."""
        num_steps = jnp.maximum(self.held.astype(jnp.int32) - self.ignored, 0)
        oldest = remainder(self.cursor.astype(jnp.int32) - num_steps, self.length)
        windows = jnp.maximum(num_steps - self.sequence_length + 1, 0)
        first = quotient(oldest + self.period - 1, self.period)
        last = quotient(oldest + windows + self.period - 1, self.period)
        return remainder(first, self.windows_per_ring), last - first

    @property
    def keeps_order(self) -> bool:
        """True: windows are in the order of their first steps."""
        return True

    def age_range(self, start: Bound, stop: Bound) -> AgeRange:
        return AgeRange.of(*self.span(), self.windows_per_ring, start, stop)

    def check_valid(self, name: str) -> Iterator[str]:
        cursor, held = np.asarray(self.cursor), np.asarray(self.held)
        last = self.length - 1
        yield from first_wrong(f"{name}.cursor", cursor, cursor > last, f"at most {last}")
        yield from first_wrong(f"{name}.held", held, held > self.length, f"at most {self.length}")

    def in_order(self) -> tuple[Int[Array, " N"], Bool[Array, " N"]]:
        first, _ = self.span()
        env = jnp.arange(self.num_envs, dtype=jnp.int32)[:, None]
        place = first[:, None] + jnp.arange(self.windows_per_ring, dtype=jnp.int32)[None]
        order = (env * self.windows_per_ring + remainder(place, self.windows_per_ring)).reshape(-1)
        return order, self.live(order)

    def item_ages(self) -> UInt[Array, " N"]:
        """Returns the number of steps after the first one of each window, in all rings.

        It is counted as if steps were added to all rings at a time.
        """
        slot = jnp.arange(self.num_slots, dtype=jnp.int32)
        return (self.age(slot) * self.num_envs + self.ring_and_start(slot)[0]).astype(jnp.uint32)

    def clear(self, mask: Bool[Array, " E"] | None = None) -> Self:
        """Returns the rings with some or all of them emptied.

        Those rings move two laps ahead, so that no earlier generation is used again.
        """
        if mask is None:
            mask = jnp.ones(self.held.shape, bool)
        return self.replace(
            cursor=jnp.where(mask, 0, self.cursor),
            lap=jnp.where(mask, self.lap + jnp.uint32(2), self.lap),
            held=jnp.where(mask, 0, self.held),
        )

    def _slot(
        self, env: Int[Array, "E 1"], place: Int[Array, "E T"], mask: Bool[Array, "E T"]
    ) -> Int[Array, "E T"]:
        """Returns the slots of windows that start at ``place``, at most a lap before the first."""
        start = remainder(place, self.length)
        if self.period > 1:
            mask &= remainder(start, self.period) == 0
            start = quotient(start, self.period)
        return jnp.where(mask, env * self.windows_per_ring + start, self.num_slots)

    def ring_and_start(self, index: Index) -> tuple[Index, Index]:
        """Returns the ring of each window, and the place of its first step in it."""
        return quotient(index, self.windows_per_ring), remainder(
            index, self.windows_per_ring
        ) * self.period

    def _counters(self, env: Index) -> tuple[Words, ...]:
        """Returns the cursors, laps and numbers of steps of these rings."""
        return storage.select(env, (self.cursor, self.lap, self.held))

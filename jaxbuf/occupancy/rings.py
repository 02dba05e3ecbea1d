"""Independent rings of steps, and which windows of consecutive steps they hold."""

from typing import Self

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Int, UInt

from jaxbuf.core.random import scale_word
from jaxbuf.occupancy.ages import AgeRange, Bound
from jaxbuf.occupancy.protocol import Occupancy


class Rings(Occupancy, struct.PyTreeNode):
    """``E`` rings of ``length`` steps, seen as a set of windows of ``sequence_length`` steps.

    A window starts at a multiple of ``period`` among the places of its ring, may run past the
    ring's end to its beginning, and never crosses the write position. Its slot is
    ``ring * (length / period) + start / period``, its generation the lap in which its first step,
    the one that is overwritten first, was written. Both follow from the write positions and laps:
    nothing is stored per step. All counters wrap safely.

    To samplers this is an occupancy whose items are the windows; see ``Occupancy``.

    A step's position is how many places of its ring were passed before it: it always grows, wraps
    at 2**32, and is the place once divided by ``length``, as in ALF's replay buffer. ``clear``
    begins a new lap, so positions go on from there.

    Attributes:
        counters: Write position, lap and number of steps of each ring, ``[E, 3]`` uint32.
        length: Steps that a ring holds, a multiple of ``period``.
        sequence_length: Steps in a window, at most ``length``.
        period: Distance between the starts of windows.
        ignored: How many of the earliest steps of a ring start no window.
    """

    counters: UInt[Array, "E 3"]
    length: int = struct.field(pytree_node=False)
    sequence_length: int = struct.field(pytree_node=False)
    period: int = struct.field(pytree_node=False)
    ignored: int = struct.field(pytree_node=False, default=0)

    @classmethod
    def create(
        cls, num_envs: int, length: int, sequence_length: int, period: int, ignored: int = 0
    ) -> Self:
        """Empty rings."""
        # The laps start at 1, so that no generation a caller makes up as zero is ever live.
        first = jnp.asarray([0, 1, 0], jnp.uint32)
        return cls(
            counters=jnp.tile(first, (num_envs, 1)),
            length=length,
            sequence_length=sequence_length,
            period=period,
            ignored=ignored,
        )

    @property
    def num_envs(self) -> int:
        """Rings."""
        return self.counters.shape[-2]

    @property
    def starts(self) -> int:
        """Places in a ring where a window may start."""
        return self.length // self.period

    @property
    def capacity(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Slots of windows, of all rings together."""
        return self.num_envs * self.starts

    @property
    def steps(self) -> Int[Array, ""]:
        """Steps held by all rings together."""
        return jnp.sum(self.counters[..., 2], axis=-1, dtype=jnp.uint32).astype(jnp.int32)

    @property
    def size(self) -> Int[Array, ""]:
        """Windows that can be drawn."""
        return jnp.sum(self.span()[1], axis=-1, dtype=jnp.int32)

    def place(
        self, rows: int, mask: Bool[Array, "E T"] | None
    ) -> tuple[Self, Int[Array, "E T"], Int[Array, "E R"], Int[Array, "E T"]]:
        """Append up to ``rows`` steps to each ring.

        Args:
            rows: Steps offered to each ring.
            mask: Which of them to take; the order of the others is kept.

        Returns:
            The new rings; where each step goes, ``ring * length + place``, past the end for rows
            that are masked out or overwritten by later ones; the slots whose windows are gone or
            not yet complete again; and the slot of the window that each row completes. Where there
            is none a slot is past the end. No place and no slot is given twice.
        """
        # Without signs as far as that goes: every conversion is an operation for each ring.
        cursor, lap, before = (self.counters[:, i : i + 1] for i in range(3))
        position, size = cursor.astype(jnp.int32), before.astype(jnp.int32)
        length = jnp.uint32(self.length)
        env = jnp.arange(self.num_envs, dtype=jnp.int32)[:, None]
        if mask is None:
            rank = jnp.broadcast_to(jnp.arange(rows, dtype=jnp.int32), (self.num_envs, rows))
            count = jnp.full((self.num_envs, 1), rows, jnp.int32)
            taken = jnp.ones(rank.shape, bool)
        else:
            rank = jnp.cumsum(mask, axis=1, dtype=jnp.int32) - 1
            count = jnp.sum(mask, axis=1, keepdims=True, dtype=jnp.int32)
            taken = mask
        place = (cursor + rank.astype(jnp.uint32)) % length
        target = (env.astype(jnp.uint32) * length + place).astype(jnp.int32)
        if mask is not None or rows > self.length:
            stays = taken & (rank + self.length >= count)
            target = jnp.where(stays, target, env.size * self.length)

        # Steps are numbered from the first new one. A window ends at each of them; its start must
        # be there and still be there once all steps are written.
        start = rank - (self.sequence_length - 1)
        held = jnp.minimum(size + count, self.length)
        first = count - held + self.ignored
        complete = taken & (start >= first)
        completed = self._slot(env, position + start, complete)
        # At the last of the new steps start windows that are not complete yet.
        back = jnp.arange(min(rows, self.sequence_length - 1), dtype=jnp.int32)[None]
        broken = self._slot(env, position + count - 1 - back, back < count)
        if self.ignored:
            # These are now among the earliest, and not broken at the other end.
            start = first - 1 - jnp.arange(min(rows, self.ignored), dtype=jnp.int32)[None]
            passed = (start >= self.ignored - size) & (start <= count - self.sequence_length)
            broken = jnp.concatenate([broken, self._slot(env, position + start, passed)], axis=1)

        more = count.astype(jnp.uint32)
        end = cursor + more
        counters = jnp.concatenate(
            [end % length, lap + end // length, jnp.minimum(before + more, length)], axis=1
        )
        return self.replace(counters=counters), target, broken, completed

    def resize(self, sequence_length: int) -> tuple[Self, Int[Array, "E R"], Int[Array, "E Q"]]:
        """The same steps seen as windows of another length.

        Returns:
            The rings, the slots that hold a window now and did not before, and those that held one
            before and do not now.
        """
        shorter, longer = sorted((self.sequence_length, sequence_length))
        position, size = (self.counters[:, i].astype(jnp.int32)[:, None] for i in (0, 2))
        env = jnp.arange(self.num_envs, dtype=jnp.int32)[:, None]
        behind = jnp.arange(shorter - 1, longer - 1, dtype=jnp.int32)[None]
        slots = self._slot(env, position - 1 - behind, behind < size - self.ignored)
        come, gone = (slots, slots[:, :0])[:: 1 if sequence_length == shorter else -1]
        return self.replace(sequence_length=sequence_length), come, gone

    def window(self, index: Int[Array, " B"]) -> Int[Array, "B S"]:
        """Where the steps of the windows at ``index`` lie, as ``place`` counts."""
        env, start = self.split(index)
        offset = jnp.arange(self.sequence_length, dtype=jnp.int32)
        return env[:, None] * self.length + _modulo(start[:, None] + offset[None], self.length)

    def live(self, index: Int[Array, " B"]) -> Bool[Array, " B"]:
        """Whether there is a complete window at ``index``."""
        ring, start = self._ring_of(index)
        written = ring[..., 0].astype(jnp.int32) + self.length
        behind = _modulo(written - 1 - start, self.length)
        held = ring[..., 2].astype(jnp.int32)
        inside = (index >= 0) & (index < self.num_envs * self.starts)
        inside &= behind < held - self.ignored
        return inside & (behind >= self.sequence_length - 1)

    def generation(self, index: Int[Array, " B"]) -> UInt[Array, " B"]:
        """The lap in which the first step of the window at ``index`` was written."""
        ring, start = self._ring_of(index)
        position, lap = ring[..., 0].astype(jnp.int32), ring[..., 1]
        return jnp.where(start < position, lap, lap - jnp.uint32(1))

    def draw(self, words: UInt[Array, " B"]) -> Int[Array, " B"]:
        """A window for each random word, all equally likely; arbitrary if there is none."""
        windows = AgeRange(*self.span(), self.starts)
        rank = scale_word(words, windows.total.astype(jnp.uint32)).astype(jnp.int32)
        return windows.at(rank)

    @property
    def end(self) -> UInt[Array, " E"]:
        """The position of the next step of each ring."""
        counters = self.counters
        return (counters[..., 1] - jnp.uint32(1)) * jnp.uint32(self.length) + counters[..., 0]

    @property
    def held(self) -> UInt[Array, " E"]:
        """Steps in each ring."""
        return self.counters[..., 2]

    def locate(self, env: Int[Array, " B"], position: UInt[Array, " B"]) -> Int[Array, " B"]:
        """Where steps lie, as ``place`` counts; past the end where they are not held."""
        ring = self.counters.at[env].get(mode="clip")
        age = self.end.at[env].get(mode="clip") - jnp.uint32(1) - position
        inside = (env >= 0) & (env < self.num_envs) & (age < ring[..., 2])
        place = (ring[..., 0].astype(jnp.int32) - 1 - age.astype(jnp.int32)) % self.length
        return jnp.where(inside, env * self.length + place, self.num_envs * self.length)

    def starts_at(
        self, index: Int[Array, " B"], generation: UInt[Array, " B"]
    ) -> tuple[Int[Array, " B"], UInt[Array, " B"]]:
        """The ring of each window, and the position of its first step."""
        env, start = self.split(index)
        lap = (generation - jnp.uint32(1)) * jnp.uint32(self.length)
        return env, lap + start.astype(jnp.uint32)

    def drop(self, count: Int[Array, " E"], most: int) -> tuple[Self, Int[Array, "E R"]]:
        """Forget the earliest steps of each ring.

        Args:
            count: How many, at most ``most`` and at most what the ring holds.
            most: A bound; static.

        Returns:
            The new rings, and the slots whose windows are gone.
        """
        position, size = (self.counters[:, i].astype(jnp.int32)[:, None] for i in (0, 2))
        env = jnp.arange(self.num_envs, dtype=jnp.int32)[:, None]
        offset = jnp.arange(most, dtype=jnp.int32)[None]
        place = position - size + self.ignored + offset
        # Past the last complete window lie slots that have no mass anyway.
        gone = (offset < count[:, None]) & (self.ignored + offset < size)
        left = self.counters[:, 2] - count.astype(jnp.uint32)
        return self.replace(counters=self.counters.at[:, 2].set(left)), self._slot(env, place, gone)

    def span(self) -> tuple[Int[Array, " E"], Int[Array, " E"]]:
        """For each ring its earliest window, ``start / period``, and how many follow from there."""
        position, size = (self.counters[..., i].astype(jnp.int32) for i in (0, 2))
        size = jnp.maximum(size - self.ignored, 0)
        oldest = (position - size) % self.length
        first = -(-oldest // self.period)
        last = -(-(oldest + size - self.sequence_length + 1) // self.period)
        return first % self.starts, jnp.where(size < self.sequence_length, 0, last - first)

    @property
    def keeps_order(self) -> bool:
        """Yes: the order of windows is that of their places."""
        return True

    def age_range(self, start: Bound, stop: Bound) -> AgeRange:
        """The windows ``start`` to ``stop - 1`` of each ring, counted like a slice of a list."""
        return AgeRange.of(*self.span(), self.starts, start, stop)

    def clear(self, mask: Bool[Array, " E"] | None = None) -> Self:
        """No steps, in some rings or in all.

        Two laps on, no generation that was ever handed out is met again.
        """
        lap = self.counters[:, 1] + jnp.uint32(2)
        zero = jnp.zeros_like(lap)
        cleared = jnp.stack([zero, lap, zero], axis=1)
        if mask is not None:
            cleared = jnp.where(mask[:, None], cleared, self.counters)
        return self.replace(counters=cleared)

    def _slot(
        self, env: Int[Array, "E 1"], place: Int[Array, "E T"], wanted: Bool[Array, "E T"]
    ) -> Int[Array, "E T"]:
        """The slots of windows that start at ``place``, no more than a lap before the first."""
        start = _modulo(place + self.length, self.length)
        if self.period > 1:
            wanted &= _modulo(start, self.period) == 0
            start = start // self.period
        return jnp.where(wanted, env * self.starts + start, self.num_envs * self.starts)

    def split(self, index: Int[Array, " B"]) -> tuple[Int[Array, " B"], Int[Array, " B"]]:
        """The ring of each window, and the place there of its first step."""
        number, starts = index.astype(jnp.uint32), jnp.uint32(self.starts)
        start = number % starts * jnp.uint32(self.period)
        return (number // starts).astype(jnp.int32), start.astype(jnp.int32)

    def _ring_of(self, index: Int[Array, " B"]) -> tuple[UInt[Array, "B 3"], Int[Array, " B"]]:
        """The counters of the ring that holds each window, and its place there."""
        env, start = self.split(index)
        return self.counters.at[env].get(mode="clip"), start


def _modulo(number: Int[Array, "..."], length: int) -> Int[Array, "..."]:
    """The remainder of a number that is not negative: without a sign it is a single operation."""
    return (number.astype(jnp.uint32) % jnp.uint32(length)).astype(jnp.int32)

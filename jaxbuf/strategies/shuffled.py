"""Passes over a buffer: every item exactly once, in a new random order each time."""

import dataclasses
from typing import Any, Self

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Int, PRNGKeyArray, UInt

from jaxbuf.core import checks
from jaxbuf.core.random import random_words, scale_word
from jaxbuf.core.varying import vary_with
from jaxbuf.occupancy.bitset import Bitset
from jaxbuf.occupancy.protocol import Occupancy
from jaxbuf.strategies.distinct import distinct
from jaxbuf.strategies.protocols import Draw, Sampler, share
from jaxbuf.strategies.samplers import Uniform


class Pass(struct.PyTreeNode):
    """Which items have been given in the present pass, and which are left.

    The set has two numbers for each slot, ``slot`` and ``capacity + slot``. One half of them holds
    the items that are left, the other one those that were given; the halves change places from
    pass to pass, so that a new pass costs nothing.

    Attributes:
        marks: The set.
        passes: How many passes have ended, ``[]`` uint32; it wraps.
    """

    marks: Bitset
    passes: UInt[Array, ""]

    @classmethod
    def create(cls, capacity: int) -> Self:
        """No items."""
        return cls(marks=Bitset.create(2 * capacity), passes=jnp.uint32(0))

    @property
    def capacity(self) -> int:
        """Number of slots."""
        return self.marks.capacity // 2

    @property
    def span(self) -> tuple[Int[Array, ""], Int[Array, ""]]:
        """The rank in the set of the first item that is left, and how many items are left."""
        low = self.marks.before(jnp.full((1,), self.capacity, jnp.int32))[0]
        odd = self._half == 1
        return jnp.where(odd, low, 0), jnp.where(odd, self.marks.size - low, low)

    def at(self, rank: Int[Array, " B"]) -> Int[Array, " B"]:
        """The slots of the items of these ranks in the set, which must be among those left."""
        return self.marks.at(rank) - self._half * self.capacity

    def look(self, slot: Int[Array, " B"]) -> tuple[Bool[Array, " B"], Bool[Array, " B"]]:
        """Whether the items of these slots are left, and whether they were given."""
        left, given = self._numbers(slot)
        return self.marks.get(left), self.marks.get(given)

    def mark(
        self, slot: Int[Array, " B"], left: Bool[Array, " B"], given: Bool[Array, " B"]
    ) -> Self:
        """Say of slots whether their item is left, was given, or neither if there is none.

        Slots out of range are ignored, and the last of equal ones counts.
        """
        numbers = jnp.concatenate(self._numbers(slot))
        return self.replace(marks=self.marks.set(numbers, jnp.concatenate([left, given])))

    def turn(self, over: Bool[Array, ""]) -> Self:
        """Begin a new pass if the present one is over: what was given is left again."""
        return self.replace(passes=self.passes + over.astype(jnp.uint32))

    @property
    def _half(self) -> Int[Array, ""]:
        return (self.passes & jnp.uint32(1)).astype(jnp.int32)

    def _numbers(self, slot: Int[Array, " B"]) -> tuple[Int[Array, " B"], Int[Array, " B"]]:
        half, nothing = self._half, 2 * self.capacity
        there = (slot >= 0) & (slot < self.capacity)
        return (
            jnp.where(there, slot + half * self.capacity, nothing),
            jnp.where(there, slot + (1 - half) * self.capacity, nothing),
        )


@dataclasses.dataclass(frozen=True)
class Shuffled(Sampler):
    """Passes over the buffer: each gives every item exactly once, in a new random order.

    This is how offline learners and PPO go over their data. A pass goes on from batch to batch, so
    its state is part of the buffer, and the method that draws returns the buffer as well:

    >>> import jax, jax.numpy as jnp, jaxbuf
    >>> buffer = jaxbuf.ItemBuffer.create(jnp.int32(0), 100, sampler=jaxbuf.Shuffled())
    >>> buffer = jaxbuf.add(buffer, jnp.arange(6))
    >>> keys = jax.random.split(jax.random.key(0), 3)
    >>> buffer, batch = jaxbuf.next_batch(buffer, keys[0], 4)
    >>> buffer, last = jaxbuf.next_batch(buffer, keys[1], 4)
    >>> last.valid.tolist(), int(buffer.metrics()["passes"])
    ([True, True, False, False], 1)
    >>> jnp.sort(jnp.concatenate([batch.data, last.data[:2]])).tolist()
    [0, 1, 2, 3, 4, 5]

    A pass ends with the batch that gives its last item, and the next batch begins a new one.
    ``metrics()`` tells how many ``passes`` have ended, and how many items are ``left`` in the
    present one. A batch never reaches into the next pass: where its size does not divide the number
    of items, the last batch of a pass has rows that are not ``valid``.

    In the middle of a pass:

    * An item that is added belongs to the present pass, and the pass ends when it was given as
      well. Where items keep coming faster than they are given, a pass never ends.
    * An item that is overwritten or retires is not given any more.
    * ``clear`` begins with the first pass again.

    ``sample``, which returns no buffer, takes no part in this: it draws different items out of all
    that there are, as ``Uniform(replacement=False)`` does, and the pass stays where it is.
    ``probability`` is one over the number of items in either case, so importance weights are 1.

    It works with every evictor, with ``Freshness`` and ``Diversity``, and with the windows of a
    ``TrajectoryBuffer``. Two bits per slot and some counts are kept. The order is that of a draw
    without replacement, so all orders are equally likely.

    Attributes:
        drop_last: Whether the items that do not fill a last batch are left out of a pass; which
            they are is left to chance. Then all rows of a batch are valid, unless the buffer holds
            fewer items than that: of such a buffer no row is.

    References:
        torchrl, https://docs.pytorch.org/rl: ``SamplerWithoutReplacement``, which begins a new pass
        whenever the size of its storage changes, and fills a last batch up from the next pass.
    """

    drop_last: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "drop_last", checks.check_flag("drop_last", self.drop_last))

    def init(self, capacity: int) -> Pass:
        """No items, in the first pass."""
        if capacity >= 2**30:
            raise ValueError(f"{self} goes over fewer than 2**30 slots, but there are {capacity}")
        return Pass.create(capacity)

    def on_add(self, state: Pass, index: Int[Array, " B"], value: Any) -> Pass:
        """New items are left in this pass, in place of those that they overwrite."""
        del value
        yes = jnp.ones(index.shape, bool)
        return state.mark(index, yes, ~yes)

    def remove(self, state: Pass, index: Int[Array, " B"]) -> Pass:
        """There is no item any more."""
        no = jnp.zeros(index.shape, bool)
        return state.mark(index, no, no)

    def on_slide(
        self, state: Pass, added: Int[Array, " B"], value: Any, removed: Int[Array, " R"]
    ) -> Pass:
        """New windows are left in this pass; others are gone."""
        del value
        new = jnp.concatenate([jnp.ones(added.shape, bool), jnp.zeros(removed.shape, bool)])
        return state.mark(jnp.concatenate([added, removed]), new, jnp.zeros_like(new))

    def draw(self, state: Pass, key: PRNGKeyArray, batch_size: int, occupancy: Occupancy) -> Draw:
        """Draw different items out of all that there are; the pass stays where it is."""
        del state
        return Uniform(replacement=False).draw((), key, batch_size, occupancy)

    def next(
        self, state: Pass, key: PRNGKeyArray, batch_size: int, occupancy: Occupancy
    ) -> tuple[Pass, Draw]:
        """Draw the next batch of the pass."""
        # What was left may have been overwritten or retired meanwhile.
        state = self._turned(state, batch_size)
        first, left = state.span
        count = jnp.minimum(batch_size, left)
        if self.drop_last:
            count = jnp.where(left >= batch_size, count, 0)

        def propose(key: PRNGKeyArray, rows: int, _: Any) -> Int[Array, " P"]:
            rank = scale_word(random_words(key, (rows,)), left.astype(jnp.uint32))
            return state.at(first + rank.astype(jnp.int32))

        index, valid = distinct(key, batch_size, count, (), propose, None, state.capacity)
        slot = jnp.where(valid, index, state.capacity)
        state = vary_with(state, slot).mark(slot, jnp.zeros_like(valid), jnp.ones_like(valid))
        probability = jnp.broadcast_to(share(occupancy.size), (batch_size,))
        return self._turned(state, batch_size), Draw(index, probability, valid)

    def metrics(self, state: Pass, occupancy: Occupancy) -> dict[str, Array]:
        """``passes`` that have ended, and items that are ``left`` in the present one."""
        return {
            "effective_sample_size": occupancy.size.astype(jnp.float32),
            "passes": state.passes,
            "left": state.span[1],
        }

    def _turned(self, state: Pass, batch_size: int) -> Pass:
        """The state in a new pass, if the present one has no batch any more and a new one has."""
        first, left = state.span
        needed = batch_size if self.drop_last else 1
        over = (left < needed) & (state.marks.size >= needed)
        if not self.drop_last:
            return state.turn(over)
        # What is left out of this pass must be left in the next one.
        row = jnp.arange(batch_size, dtype=jnp.int32)
        slot = jnp.where(over & (row < left), state.at(first + row), state.capacity)
        yes = jnp.ones(slot.shape, bool)
        return state.turn(over).mark(slot, yes, ~yes)

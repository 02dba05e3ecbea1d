"""A sampler that passes over a buffer: every item exactly once, in random order."""

import dataclasses
from collections.abc import Iterator
from typing import Self

import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Int
from numpy.typing import NDArray

from jaxbuf.core import checks
from jaxbuf.core.problems import first_wrong
from jaxbuf.core.random import random_words, scale_word
from jaxbuf.core.types import Count, Flag, Floats, Index, Integers, Key, Mask, Word
from jaxbuf.core.versions import vary_with
from jaxbuf.occupancy.bitset import Bitset
from jaxbuf.occupancy.protocol import Occupancy
from jaxbuf.strategies.distinct import distinct
from jaxbuf.strategies.moves import Moves
from jaxbuf.strategies.protocols import Draw, Sampler, uniform_probability
from jaxbuf.strategies.uniform import Uniform


class Pass(struct.PyTreeNode):
    """The items that have been drawn in the current pass, and the items that are left.

    The set contains the number ``slot`` or ``capacity + slot`` for each live item. One half of the
    numbers stands for items that are left, the other half for items that were drawn. The halves
    swap roles from pass to pass, so that a new pass costs nothing.

    Attributes:
        marks: The set.
        passes: The number of finished passes, ``[]`` uint32; it wraps.
    """

    marks: Bitset
    passes: Word

    @property
    def capacity(self) -> int:
        """The number of slots."""
        return self.marks.capacity // 2

    @property
    def span(self) -> tuple[Count, Count]:
        """The rank in the set of the first item that is left, and the number of items left."""
        low = self.marks.before(jnp.full((1,), self.capacity, jnp.int32))[0]
        swapped = self._half == 1
        return jnp.where(swapped, low, 0), jnp.where(swapped, self.marks.size - low, low)

    def at(self, rank: Integers) -> Index:
        """Returns the slots of the items with these ranks in the set, which must be left."""
        return self.marks.at(rank) - self._half * self.capacity

    def get(self, slot: Index) -> tuple[Mask, Mask]:
        """Returns masks of the slots whose items are left, and of those whose items were drawn."""
        left, drawn = self._numbers(slot)
        return self.marks.get(left), self.marks.get(drawn)

    def mark(self, slot: Index, left: Mask, drawn: Mask) -> Self:
        """Sets whether the items in these slots are left or drawn; neither, if a slot is empty.

        Slots out of range are ignored. If a slot occurs several times, the last one counts.
        """
        numbers = jnp.concatenate(self._numbers(slot))
        return self.replace(marks=self.marks.set(numbers, jnp.concatenate([left, drawn])))

    def advance(self, over: Flag) -> Self:
        """Begins a new pass if this one is over: the items that were drawn are left again."""
        return self.replace(passes=self.passes + over.astype(jnp.uint32))

    @property
    def _half(self) -> Count:
        return (self.passes & jnp.uint32(1)).astype(jnp.int32)

    def _numbers(self, slot: Index) -> tuple[Index, Index]:
        half, past_end = self._half, 2 * self.capacity
        in_range = (slot >= 0) & (slot < self.capacity)
        return (
            jnp.where(in_range, slot + half * self.capacity, past_end),
            jnp.where(in_range, slot + (1 - half) * self.capacity, past_end),
        )


@dataclasses.dataclass(frozen=True)
class Shuffled(Sampler):
    """Passes over the buffer, drawing every item exactly once per pass, in random order.

    This is how offline learners and PPO iterate over their data. A pass extends over several
    batches, so its state is part of the buffer, and ``next_batch`` returns the buffer as well:

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

    A pass ends with the batch that draws its last item, and the next batch begins a new one.
    ``metrics()`` reports the number of finished ``passes``, and the number of items ``left`` in the
    current one. A batch never extends into the next pass: if the batch size does not divide the
    number of items, the last batch of a pass has rows that are not ``valid``.

    If the buffer changes during a pass:

    * An added item belongs to the current pass, which ends once it has been drawn too. If items are
      added faster than they are drawn, a pass never ends.
    * An item that is overwritten or retires is not drawn any more.
    * ``clear`` starts over with the first pass.

    ``sample`` returns no buffer and does not affect the pass: it draws different items out of all
    live items, as ``Uniform(replacement=False)`` does. In both cases ``probability`` is one over
    the number of items, so importance weights are 1.

    The sampler works with every evictor, with ``Freshness`` and ``Diversity``, and with the windows
    of a ``TrajectoryBuffer``. It stores two bits per slot and a few counts. Items are drawn without
    replacement, so all orders are equally likely.

    Attributes:
        drop_last: Whether to leave out of a pass the items that do not fill a last batch, which are
            chosen at random. All rows of a batch are then valid, unless the buffer holds fewer
            items than a batch has rows; then none is.

    Raises:
        ValueError: If ``drop_last`` is neither True nor False.

    References:
        torchrl, https://docs.pytorch.org/rl: ``SamplerWithoutReplacement``, which begins a new pass
        whenever the size of its storage changes, and fills the last batch with items of the next
        pass.
    """

    drop_last: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.settle(self, checks.check_flag, "drop_last")

    def init(self, capacity: int) -> Pass:
        if capacity >= 2**30:
            raise ValueError(f"{self} goes over fewer than 2**30 slots, but there are {capacity}")
        return Pass(marks=Bitset.create(2 * capacity), passes=jnp.uint32(0))

    def on_change(
        self, state: Pass, added: Index, value: Floats | None, removed: Int[Array, " R"]
    ) -> Pass:
        del value
        new = jnp.concatenate([jnp.ones(added.shape, bool), jnp.zeros(removed.shape, bool)])
        return state.mark(jnp.concatenate([added, removed]), new, jnp.zeros_like(new))

    def move(self, empty: Pass, state: Pass, moves: Moves) -> Pass:
        empty = empty.replace(passes=state.passes)
        return empty.mark(moves.target, *state.get(moves.source))

    def draw(self, state: Pass, key: Key, batch_size: int, occupancy: Occupancy) -> Draw:
        """Draws different items out of all live items, without affecting the pass."""
        del state
        return Uniform(replacement=False).draw((), key, batch_size, occupancy)

    def next(
        self, state: Pass, key: Key, batch_size: int, occupancy: Occupancy
    ) -> tuple[Pass, Draw]:
        """Draws the next batch of the pass."""
        # The pass may be over because items were overwritten or retired since the last batch.
        state = self._advanced(state, batch_size)
        first, left = state.span
        count = jnp.minimum(batch_size, left)
        if self.drop_last:
            count = jnp.where(left >= batch_size, count, 0)

        def propose(key: Key, rows: int, _: object) -> Int[Array, " P"]:
            rank = scale_word(random_words(key, (rows,)), left)
            return state.at(first + rank)

        index, valid = distinct(key, batch_size, count, (), propose, None, state.capacity)
        slot = jnp.where(valid, index, state.capacity)
        state = vary_with(state, slot).mark(slot, jnp.zeros_like(valid), jnp.ones_like(valid))
        probability = jnp.broadcast_to(uniform_probability(occupancy.size), (batch_size,))
        return self._advanced(state, batch_size), Draw(index, probability, valid)

    def probability(self, state: Pass, index: Index, occupancy: Occupancy) -> Floats:
        del state
        return jnp.broadcast_to(uniform_probability(occupancy.size), index.shape)

    def metrics(self, state: Pass, occupancy: Occupancy) -> dict[str, Array]:
        """Returns the number of finished ``passes``, and of items ``left`` in this one."""
        return {
            "effective_sample_size": occupancy.size.astype(jnp.float32),
            "passes": state.passes,
            "left": state.span[1],
        }

    def check_valid(
        self, state: Pass, name: str, live: NDArray[np.bool_], occupancy: Occupancy
    ) -> Iterator[str]:
        del occupancy
        slot = jnp.arange(live.size, dtype=jnp.int32)
        left, drawn = (np.asarray(mask) for mask in state.get(slot))
        marks = left.astype(np.int32) + drawn.astype(np.int32)
        expected = "one mark of each item, and none of others"
        yield from first_wrong(f"{name}.marks", marks, marks != live, expected)

    def _advanced(self, state: Pass, batch_size: int) -> Pass:
        """Begins a new pass if this one has no batch left and the buffer can fill another one."""
        first, left = state.span
        needed = batch_size if self.drop_last else 1
        over = (left < needed) & (state.marks.size >= needed)
        if not self.drop_last:
            return state.advance(over)
        # The items left out of this pass must belong to the next one.
        row = jnp.arange(batch_size, dtype=jnp.int32)
        slot = jnp.where(over & (row < left), state.at(first + row), state.capacity)
        yes = jnp.ones(slot.shape, bool)
        return state.advance(over).mark(slot, yes, ~yes)

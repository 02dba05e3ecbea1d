"""The base classes of samplers and evictors, to derive your own from."""

import abc
import dataclasses
from collections.abc import Iterator
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int
from numpy.typing import NDArray

from jaxbuf.core.hyperparameters import check_declared
from jaxbuf.core.random import random_words
from jaxbuf.core.types import Arrays, Count, Floats, Function, Index, Key, Mask, Number, State
from jaxbuf.occupancy.ages import spread
from jaxbuf.occupancy.protocol import ItemOccupancy, Occupancy
from jaxbuf.strategies.moves import Movable


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Draw:
    """The result of a draw.

    Attributes:
        index: Slots, ``[B]`` int32.
        probability: The probability that a single draw returns each slot, ``[B]`` float32.
        valid: Whether each row was drawn at all, ``[B]``; if not, its index and probability are
            arbitrary.
    """

    index: Index
    probability: Floats
    valid: Mask


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Support:
    """The items that a sampler can draw.

    Attributes:
        count: The number of these items, ``[]`` int32.
        least_probability: The smallest probability among them, ``[]`` float32; 0 without items.
    """

    count: Count
    least_probability: Number


class Sampler(Movable, abc.ABC):
    """Chooses the items of a batch.

    A sampler is a frozen dataclass that holds the configuration. Its *state* is a pytree of arrays
    that the buffer stores and passes to each method. Only ``draw`` has to be implemented; the other
    methods are for samplers that keep state for each slot. Indices outside ``[0, capacity)`` do not
    name a slot and must be ignored.

    Attributes:
        uses_priority: Whether ``add`` takes a ``priority`` and ``update_priority`` is allowed.
        uses_score: Whether ``add`` needs a ``score``.
        uses_age: Whether the sampler needs an occupancy that knows the order of insertion.
        uses_episodes: Whether the sampler needs rings with ``Episodes``, and ``on_episodes`` is
            called.
        varies: The numbers that may be ``jaxbuf.Varying``, with the least and the largest legal
            value of each. Where methods use one, it is a number or a traced array ``[]``.

    Example:
        >>> import dataclasses, jax, jax.numpy as jnp, jaxbuf
        >>> @dataclasses.dataclass(frozen=True)
        ... class First(jaxbuf.strategies.Sampler):
        ...     '''Always draws the items of the lowest slots.'''
        ...
        ...     def draw(self, state, key, batch_size, occupancy):
        ...         index = jnp.arange(batch_size, dtype=jnp.int32)
        ...         one = jnp.ones(batch_size)
        ...         return jaxbuf.strategies.Draw(index, one, occupancy.live(index))
        >>> buffer = jaxbuf.ItemBuffer.create(jnp.int32(0), 100, sampler=First())
        >>> buffer.add(jnp.arange(50)).sample(jax.random.key(0), 4).data.tolist()
        [0, 1, 2, 3]
    """

    uses_priority: bool = False
    uses_score: bool = False
    uses_age: bool = False
    uses_episodes: bool = False
    varies: ClassVar[dict[str, tuple[float, float]]] = {}

    def __post_init__(self) -> None:
        check_declared(self, self.varies)

    @property
    def leaf_samplers(self) -> "tuple[Sampler, ...]":
        """The samplers that receive updates: this one, or the leaves that it combines."""
        return (self,)

    def init(self, capacity: int) -> State:
        """Returns the state for an empty buffer."""
        del capacity
        return ()

    def accepts(self, value: Float[Array, "..."]) -> Bool[Array, "..."]:
        """Returns a mask of the legal priorities (or scores); other rows are counted and refused.

        The count is ``metrics()["rejected"]``.
        """
        return jnp.ones(value.shape, bool)

    def on_change(
        self, state: State, added: Index, value: Floats | None, removed: Int[Array, " R"]
    ) -> State:
        """Updates the state after items (or windows) were added, overwritten or removed.

        Args:
            state: The state.
            added: The slots that now hold a new item, ``[B]``, none of them twice. An item that a
                slot held before was overwritten, and is not among the removed ones: in a full
                ring, each new item takes the slot of an old one.
            value: Their priorities (or scores), ``[B]``; None means the default for all, and so
                does a priority that is not legal, for its row.
            removed: The slots that no longer hold an item, ``[R]``, disjoint from ``added``; they
                must not be drawn any more. A slot may occur twice, or have been empty before.
        """
        del added, value, removed
        return state

    def with_default_of(self, state: State, before: State) -> State:
        """Returns the state from which the next ``on_change`` takes the default of an earlier one.

        Items that leave for new ones count for the default of these, although they are removed
        first. Only a sampler whose default depends on the items needs this method.

        Args:
            state: The state.
            before: The state before the items were removed.
        """
        del before
        return state

    def on_episodes(self, state: State, index: Index, last: Mask) -> State:
        """Updates the state after windows became the last of their episodes, or no longer are.

        Args:
            state: The state after ``on_change``.
            index: Slots, ``[B]``, of which some may be empty.
            last: A mask of the slots with the last window of an episode that can be drawn,
                ``[B]``. Where a slot occurs twice, the last row counts.
        """
        del index, last
        return state

    def set_priority(self, state: State, index: Index, value: Floats) -> State:
        """Sets the priorities at ``index``; if an item occurs several times, the last one wins."""
        del index, value
        return state

    @abc.abstractmethod
    def draw(self, state: State, key: Key, batch_size: int, occupancy: Occupancy) -> Draw:
        """Draws ``batch_size`` of the live items."""

    def draw_some(
        self, state: State, key: Key, batch_size: int, count: Count, occupancy: Occupancy
    ) -> Draw:
        """Draws ``count`` of the live items, for a ``Mixture`` whose ratios vary.

        By default these are the first rows of a draw of ``batch_size``. Override it where that is
        another law than the one of a draw of just so many rows.

        Args:
            state: The state.
            key: A PRNG key.
            batch_size: The number of rows ``B`` of the result; static.
            count: The number of items to draw, from 0 to ``B``; may be traced.
            occupancy: The occupancy.

        Returns:
            A draw of ``B`` rows, of which the first ``count`` count. The others are arbitrary.
        """
        del count
        return self.draw(state, key, batch_size, occupancy)

    def next(
        self, state: State, key: Key, batch_size: int, occupancy: Occupancy
    ) -> tuple[State, Draw]:
        """Draws the next batch, for samplers whose draws depend on earlier ones.

        Returns:
            The new state and the draw, by default those of ``on_draw`` and ``draw``.
        """
        drawn = self.draw(state, key, batch_size, occupancy)
        index = jnp.where(drawn.valid, drawn.index, occupancy.capacity)
        return self.on_draw(state, index), drawn

    def on_draw(self, state: State, index: Index) -> State:
        """Updates the state after ``next_batch`` drew items; by default it does not change.

        Args:
            state: The state.
            index: Their slots, ``[B]``; an item that occurs twice was drawn twice, and rows that
                are not valid have a slot past the end. In a ``Blend``, some of the items were drawn
                by other samplers.
        """
        del index
        return state

    def on_hyperparameters(self, state: State) -> State:
        """Updates the state after ``set_hyperparameters`` changed a number; by default it does not.

        Args:
            state: The state, which was made with the old numbers; ``self`` has the new ones.
        """
        return state

    def map_state(self, state: State, fn: Function) -> State:
        """Returns the state with ``fn(sampler, state)`` for each of ``leaf_samplers``."""
        return fn(self, state)

    def support(self, state: State, occupancy: Occupancy) -> Support:
        """Returns the items that can be drawn; by default all live items, equally likely."""
        del state
        return Support(occupancy.size, uniform_probability(occupancy.size))

    def metrics(self, state: State, occupancy: Occupancy) -> dict[str, Array]:
        """Returns scalars to monitor."""
        del state, occupancy
        return {}

    @property
    def shardable(self) -> bool:
        """True if it can draw from the shards of a ``jaxbuf.Sharded``; see ``ShardableSampler``."""
        return False

    def reach(self, capacity: int) -> int:
        """Returns the largest number of items that it draws from, in a buffer of this capacity."""
        return capacity

    def by_slot(self, state: State) -> dict[str, Float[Array, " N"]]:
        """Returns the number that it stores for each slot, by name: ``priority`` or ``score``.

        Those of empty slots are arbitrary, but a score is not finite there.
        """
        del state
        return {}

    def compared(self, state: State) -> dict[str, Float[Array, " N"]]:
        """Returns the numbers by which ``highest`` compares items, by default those of ``by_slot``.

        Of priorities these are their masses, which need not be computed back.
        """
        return self.by_slot(state)

    def probability(self, state: State, index: Index, occupancy: Occupancy) -> Floats | None:
        """Returns the probability that a single draw gives each of these live items.

        None if it is not known, as by default; see ``KnownSampler``.
        """
        del state, index, occupancy
        return None

    def check_valid(
        self, state: State, name: str, live: NDArray[np.bool_], occupancy: Occupancy
    ) -> Iterator[str]:
        """Yields a line for each problem with the state, for ``jaxbuf.testing.assert_valid``.

        Args:
            state: The state, whose arrays have the shapes and dtypes of a new one.
            name: The state as an expression, with which lines begin.
            live: The slots that hold an item, or a window.
            occupancy: The occupancy.
        """
        del state, name, live, occupancy
        yield from ()


class KnownSampler(Sampler):
    """A sampler that can compute the probability of any item, not only of those drawn."""

    @abc.abstractmethod
    def probability(self, state: State, index: Index, occupancy: Occupancy) -> Floats:
        """Returns the probability that a single draw gives each of these live items."""

    def in_batch(self, batch_size: int | Count, most: int | None = None) -> "KnownSampler":
        """Returns the sampler whose probabilities are those of a row of such a batch.

        By default this is the sampler itself. It is another one where a fixed number of rows is
        drawn in another way, as by ``Recent``.

        Args:
            batch_size: The number of rows; it may be traced if there is ``most``.
            most: The largest number that it may be; static.
        """
        del batch_size, most
        return self

    def draw_some(
        self, state: State, key: Key, batch_size: int, count: Count, occupancy: Occupancy
    ) -> Draw:
        if self.sequential:
            return super().draw_some(state, key, batch_size, count, occupancy)
        own_key, key = jax.random.split(key)
        drawn = self.draw(state, key, batch_size, occupancy)
        num_valid = jnp.sum(drawn.valid, dtype=jnp.int32)
        (order,) = jnp.nonzero(drawn.valid, size=batch_size, fill_value=batch_size - 1)
        words = random_words(own_key, (batch_size + 1,))
        row = order[spread(words[1:], words[0], num_valid, count)]
        drawn = jax.tree.map(lambda leaf: leaf[row], drawn)
        valid = jnp.arange(batch_size, dtype=jnp.int32) < num_valid
        return Draw(drawn.index, drawn.probability, valid)

    @property
    def sequential(self) -> bool:
        """True if the first rows of a batch are a batch of fewer rows, as by default.

        False if rows are sorted, or if each of them is drawn from its own stratum. ``draw_some``
        takes the first rows of a batch if it is True, and else rows evenly spread over the batch.
        """
        return True


@dataclasses.dataclass(frozen=True)
class Targets:
    """The shards and points from which the rows of a batch are drawn.

    Attributes:
        shard: The shard of each row, ``[B]`` int32.
        point: A point within that shard for ``draw_at``, such as one in its mass; leaves ``[B]``.
    """

    shard: Index
    point: Arrays


class ShardableSampler(KnownSampler):
    """A sampler that draws from the shards of a ``jaxbuf.Sharded`` as if they were one buffer.

    A draw has three steps. Each shard is summarized in a few numbers (``summarize``), of which all
    devices get copies. From these summaries every device computes the same ``targets``: the shard
    of each row, and a point in that shard. The shard then finds the items at its points
    (``draw_at``). A draw from a single buffer is that from a single shard.

    In all methods ``summaries`` are what ``summarize`` returned for each of the ``S`` shards, with
    leaves ``[S]``.
    """

    @property
    def shardable(self) -> bool:
        return True

    @abc.abstractmethod
    def summarize(self, state: State, occupancy: Occupancy) -> Arrays:
        """Returns the numbers of this shard that all shards need: scalars of 4 bytes each."""

    @abc.abstractmethod
    def targets(self, summaries: Arrays, key: Key, batch_size: int, capacity: int) -> Targets:
        """Chooses the shard of each row, and the point in that shard.

        Args:
            summaries: The summaries of all shards.
            key: The PRNG key of this draw.
            batch_size: The number of rows ``B`` of all shards together; static.
            capacity: The number of slots of all shards together; static.
        """

    @abc.abstractmethod
    def draw_at(self, state: State, occupancy: Occupancy, point: Arrays, summaries: Arrays) -> Draw:
        """Draws the items at some points of this shard.

        Args:
            state: The state of this shard.
            occupancy: The live items of this shard.
            point: The points, leaves ``[B]``. Those of other shards are among them; their rows are
                ignored.
            summaries: The summaries of all shards.

        Returns:
            Slots of this shard, with their probabilities in a draw from all shards.
        """

    @abc.abstractmethod
    def support_among(self, summaries: Arrays) -> Support:
        """Returns the items that can be drawn from all shards together."""

    @abc.abstractmethod
    def probability_among(self, state: State, index: Index, summaries: Arrays) -> Floats:
        """Returns the probability that a single draw from all shards gives each live item.

        Args:
            state: The state of this shard.
            index: Slots of this shard.
            summaries: The summaries of all shards.
        """

    def with_global_default(self, state: State, summaries: Arrays) -> State:
        """Returns the state from which the next ``on_change`` takes the default priority.

        An item that is added without a priority gets the default of all shards together, as in a
        single buffer. Only a sampler whose default depends on the items needs this method.

        Args:
            state: The state of this shard.
            summaries: The summaries of all shards.
        """
        del summaries
        return state

    def draw(self, state: State, key: Key, batch_size: int, occupancy: Occupancy) -> Draw:
        """Draws ``batch_size`` of the live items."""
        summaries = self.summaries(state, occupancy)
        targets = self.targets(summaries, key, batch_size, occupancy.capacity)
        return self.draw_at(state, occupancy, targets.point, summaries)

    def support(self, state: State, occupancy: Occupancy) -> Support:
        return self.support_among(self.summaries(state, occupancy))

    def probability(self, state: State, index: Index, occupancy: Occupancy) -> Floats:
        """Returns the probability that a single draw gives each of these live items."""
        return self.probability_among(state, index, self.summaries(state, occupancy))

    def summaries(self, state: State, occupancy: Occupancy) -> Arrays:
        """Returns the summaries of all shards if this is the only one, leaves ``[1]``."""
        return jax.tree.map(lambda leaf: leaf[None], self.summarize(state, occupancy))


class Evictor(abc.ABC):
    """Chooses the item to evict when a new one is added to a full buffer.

    An evictor is a frozen, hashable dataclass; the state lives in the occupancy that it creates.

    Attributes:
        uses_score: Whether ``add`` needs a ``score``, which ``place`` of the occupancy gets.
    """

    uses_score: bool = False

    @property
    def of_shards(self) -> bool:
        """True if each shard of a ``jaxbuf.Sharded`` can evict by its own items alone."""
        return not self.uses_score

    @abc.abstractmethod
    def init(self, capacity: int) -> ItemOccupancy:
        """Returns the occupancy of an empty buffer."""


def uniform_probability(size: Count) -> Number:
    """Returns ``1 / size``, or 0 if the size is 0."""
    return jnp.where(size > 0, 1.0 / jnp.maximum(size, 1).astype(jnp.float32), 0.0)


def everywhere(sampler: KnownSampler, state: State, occupancy: Occupancy) -> Float[Array, " N"]:
    """Returns the probability of every slot, 0 if it holds no item."""
    slot = jnp.arange(occupancy.capacity, dtype=jnp.int32)
    probability = sampler.probability(state, slot, occupancy)
    return jnp.where(occupancy.live(slot), probability, 0.0)


def support_of(probability: Float[Array, " N"]) -> Support:
    """Returns the support, given the probability of every slot."""
    has_probability = probability > 0
    count = jnp.sum(has_probability, dtype=jnp.int32)
    least = jnp.min(jnp.where(has_probability, probability, jnp.inf))
    return Support(count, jnp.where(count > 0, least, 0.0))

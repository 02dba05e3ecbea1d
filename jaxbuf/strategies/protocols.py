"""What a sampler and an evictor are: the classes that your own ones derive from."""

import abc
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree

from jaxbuf.occupancy.protocol import ItemOccupancy, Occupancy


@dataclasses.dataclass(frozen=True)
class Draw:
    """What a sampler drew.

    Attributes:
        index: Slots ``[B]`` int32.
        probability: The probability with which a single draw gives each slot, ``[B]`` float32.
        valid: Whether the row was drawn at all, ``[B]``; the other two are arbitrary if not.
    """

    index: Int[Array, " B"]
    probability: Float[Array, " B"]
    valid: Bool[Array, " B"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Support:
    """What a sampler can draw.

    Attributes:
        count: How many items, ``[]`` int32.
        least_probability: The smallest probability among them, ``[]`` float32; 0 if there are none.
    """

    count: Int[Array, ""]
    least_probability: Float[Array, ""]


class Sampler(abc.ABC):
    """Chooses which items a batch consists of.

    A sampler is a frozen dataclass: the configuration. What changes is its *state*, a pytree of
    arrays that the buffer keeps and passes in. Only ``draw`` has to be written; the other methods
    are for samplers that keep something for each slot. Indices outside ``[0, capacity)`` name no
    slot, and must be ignored.

    Attributes:
        uses_priority: Whether ``add`` takes a ``priority`` and ``update_priority`` is allowed.
        uses_score: Whether ``add`` needs a ``score``.
        uses_age: Whether it needs an occupancy that knows the order in which items came.

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

    def init(self, capacity: int) -> Any:
        """The state of an empty buffer."""
        del capacity
        return ()

    def accepts(self, value: Float[Array, " B"]) -> Bool[Array, " B"]:
        """Which priorities (or scores) are legal. The rows with others are refused and counted."""
        return jnp.ones(value.shape, bool)

    def on_add(self, state: Any, index: Int[Array, " B"], value: Float[Array, " B"] | None) -> Any:
        """New items are at ``index``, with these priorities (or scores); None for the default."""
        del index, value
        return state

    def set_priority(self, state: Any, index: Int[Array, " B"], value: Float[Array, " B"]) -> Any:
        """The items at ``index`` have new priorities; of several for one item the last counts."""
        del index, value
        return state

    def remove(self, state: Any, index: Int[Array, " B"]) -> Any:
        """There is nothing to draw at ``index`` any more."""
        del index
        return state

    def on_slide(
        self,
        state: Any,
        added: Int[Array, " B"],
        value: Float[Array, " B"] | None,
        removed: Int[Array, " R"],
    ) -> Any:
        """Steps were written to rings, so that some windows are gone and others are complete.

        Args:
            state: The state.
            added: The slots of new windows, ``[B]``.
            value: Their priorities, ``[B]``, of which one that is not legal stands for the default;
                None for the default.
            removed: The slots of the windows that are gone, ``[R]``; none of them is added.
        """
        return self.on_add(self.remove(state, removed), added, value)

    @abc.abstractmethod
    def draw(self, state: Any, key: PRNGKeyArray, batch_size: int, occupancy: Occupancy) -> Draw:
        """Draw ``batch_size`` of the live items."""

    def next(
        self, state: Any, key: PRNGKeyArray, batch_size: int, occupancy: Occupancy
    ) -> tuple[Any, Draw]:
        """Draw the next batch, where one draw depends on those before it.

        Returns:
            The state after it, and what was drawn; the same state, unless said otherwise.
        """
        return state, self.draw(state, key, batch_size, occupancy)

    def support(self, state: Any, occupancy: Occupancy) -> Support:
        """What can be drawn; all live items alike, unless said otherwise."""
        del state
        return Support(occupancy.size, share(occupancy.size))

    def metrics(self, state: Any, occupancy: Occupancy) -> dict[str, Array]:
        """Numbers worth watching, scalars."""
        del state, occupancy
        return {}


class KnownSampler(Sampler):
    """A sampler that can tell the probability of items that it did not draw."""

    @abc.abstractmethod
    def probability(
        self, state: Any, index: Int[Array, " B"], occupancy: Occupancy
    ) -> Float[Array, " B"]:
        """The probability with which a single draw gives each of these live items."""


@dataclasses.dataclass(frozen=True)
class Aim:
    """Where the rows of a batch come from.

    Attributes:
        shard: The shard of each row, ``[B]`` int32.
        target: What else ``hit`` needs of each row, leaves ``[B]``.
    """

    shard: Int[Array, " B"]
    target: PyTree[Array]


class ShardableSampler(Sampler):
    """A sampler that draws from the shards of a ``jaxbuf.Sharded`` as from one buffer.

    It says in three pure functions what it does. ``report`` tells what the others have to know of a
    shard. ``aim`` sees the reports of all shards and chooses a shard for each row; every device
    computes it and finds the same. ``hit`` then draws those rows from their own shard. A draw from
    a single buffer is the case of one shard.
    """

    @property
    def shardable(self) -> bool:
        """Whether it can draw from shards as it is configured."""
        return True

    @abc.abstractmethod
    def report(self, state: Any, occupancy: Occupancy) -> PyTree[Array]:
        """What the other shards have to know of this one: scalars of 4 bytes each."""

    @abc.abstractmethod
    def aim(self, world: PyTree[Array], key: PRNGKeyArray, batch_size: int, capacity: int) -> Aim:
        """Choose the shard of each row.

        Args:
            world: The reports of all shards, leaves ``[S]``.
            key: The key of this draw.
            batch_size: Rows ``B`` of all shards together; static.
            capacity: Slots of all shards together; static.
        """

    @abc.abstractmethod
    def hit(
        self, state: Any, occupancy: Occupancy, target: PyTree[Array], world: PyTree[Array]
    ) -> Draw:
        """Draw rows that were aimed at this shard; for others the result is arbitrary.

        Args:
            state: The state of this shard.
            occupancy: Its live items.
            target: The targets of the rows, leaves ``[B]``.
            world: The reports of all shards, leaves ``[S]``.

        Returns:
            Slots of this shard. The probability is that of a draw from all shards.
        """

    @abc.abstractmethod
    def reach(self, world: PyTree[Array]) -> Support:
        """What can be drawn from all shards together."""

    def lend(self, state: Any, world: PyTree[Array]) -> Any:
        """The state with what new items of this shard depend on in others; ``on_add`` is next."""
        del world
        return state

    def draw(self, state: Any, key: PRNGKeyArray, batch_size: int, occupancy: Occupancy) -> Draw:
        """Draw ``batch_size`` of the live items."""
        world = self.alone(state, occupancy)
        aimed = self.aim(world, key, batch_size, occupancy.capacity)
        return self.hit(state, occupancy, aimed.target, world)

    def support(self, state: Any, occupancy: Occupancy) -> Support:
        """What can be drawn."""
        return self.reach(self.alone(state, occupancy))

    def alone(self, state: Any, occupancy: Occupancy) -> PyTree[Array]:
        """The reports of all shards, leaves ``[1]``, where there is one."""
        return jax.tree.map(lambda leaf: leaf[None], self.report(state, occupancy))


class Evictor(abc.ABC):
    """Chooses which item goes when a new one comes.

    An evictor is a frozen, hashable dataclass; what changes is in the occupancy it creates.

    Attributes:
        uses_score: Whether ``add`` needs a ``score``.
    """

    uses_score: bool = False

    @abc.abstractmethod
    def init(self, capacity: int) -> ItemOccupancy:
        """The occupancy of an empty buffer."""


def share(size: Int[Array, ""]) -> Float[Array, ""]:
    """One over the size; 0 if there is nothing."""
    return jnp.where(size > 0, 1.0 / jnp.maximum(size, 1).astype(jnp.float32), 0.0)

"""The bases of buffers that hold items of their own: how they were created, and their fields."""

import abc
from typing import Any, Self, TypeVar

import jax
from flax import struct
from jax import lax
from jaxtyping import Array, Int, PyTree, UInt

from jaxbuf.buffers.buffer import Buffer
from jaxbuf.core import trees
from jaxbuf.core.describe import Described
from jaxbuf.core.donation import check_readable
from jaxbuf.core.hyperparameters import bind, names_of
from jaxbuf.core.segment_tree import using_width, width_of
from jaxbuf.core.types import Arrays, Count, Index, Mask, State
from jaxbuf.occupancy.protocol import Occupancy
from jaxbuf.strategies.episodes import Episodes
from jaxbuf.strategies.freshness import Freshness, FreshnessState
from jaxbuf.strategies.moves import Moves
from jaxbuf.strategies.part import Part, Rows
from jaxbuf.strategies.protocols import Sampler

SomePart = TypeVar("SomePart", bound=Part)


class OwningBuffer(Buffer):
    """A buffer with items of its own, which knows the arguments of its ``create``.

    Attributes:
        data: The storage.
        occupancy: Records which slots are live.
        counters: The numbers of rows added and refused so far, ``[K]`` uint32, which wrap.
        unit: The name of what ``size`` counts.
        drawn_unit: The name of what a sampler draws.
        extras: The parts of the buffer besides sampler and evictor, in the order in which ``add``
            asks them.
        extra_states: The state of each of the extras.
        freshness: The limits on uses and staleness; None without any.
        episodes: The configuration of the index of episodes; None without one.
    """

    data: Any
    occupancy: Occupancy
    counters: Any
    owns_items = True
    unit = "items"
    drawn_unit = "items"
    extras: tuple[Part, ...]
    extra_states: tuple[State, ...]
    freshness: Any = None
    episodes: Any = None

    @property
    def capacity(self) -> int:
        """The largest number of items that the buffer can hold."""
        return self.occupancy.capacity

    @property
    def size(self) -> Count:
        """The number of items that the buffer holds."""
        check_readable(self)
        return self.occupancy.size

    @property
    def example(self) -> PyTree[jax.ShapeDtypeStruct]:
        """The shapes and dtypes of an item, or of a step, as the ``example`` of ``create``.

        Those of buffers that are stacked, as ``vmap`` makes them, are the same.
        """
        # The counters of a single buffer have one axis, and so has its storage besides the item's.
        axes = self.counters.ndim
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape[axes:], leaf.dtype), self.data
        )

    @property
    def storage(self) -> Arrays:
        return self.data

    @property
    def num_envs(self) -> int:
        return 0

    @property
    def num_slots(self) -> int:
        """The number of slots of items, or of windows."""
        return self.occupancy.num_slots

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes that ``create`` takes, by name."""
        return {"capacity": self.capacity}

    def options(self) -> dict[str, Any]:
        """Returns the other arguments of ``create``, by name."""
        return {}

    def anew(self, **sizes: int) -> Self:
        """Returns an empty buffer that was created like this one, apart from its ``sizes``."""
        kind: Any = type(self)
        with using_width(width_of(self)):
            return kind.create(self.example, **(self.sizes | sizes), **self.options())

    def by_slot(self) -> dict[str, Array]:
        """Returns the numbers by which items are drawn or evicted, ``[N]``, by name.

        They are called ``priority`` and ``score``.
        """
        score = self.occupancy.places.item_scores()
        return {} if score is None else {"score": score}

    def move(self, old: Any, moves: Moves) -> Self:
        """Returns this buffer, which is empty, with what another one knows of its items.

        The items themselves are not moved.

        Args:
            old: A buffer of another size.
            moves: The slots of before and after.
        """
        del old, moves
        return self


class SampledBase(OwningBuffer, Described):
    """The fields of a buffer with slots for items, or for windows of steps.

    Attributes:
        sampler_state: The state of the sampler.
        sampler: The sampler, which draws items.
        hyperparameters: The varying hyperparameters of the sampler, by name; see
            ``jaxbuf.Varying``.
    """

    data: Arrays
    occupancy: Occupancy
    sampler_state: State
    counters: UInt[Array, " K"]
    extra_states: tuple[State, ...]
    sampler: Sampler = struct.field(pytree_node=False)
    extras: tuple[Part, ...] = struct.field(pytree_node=False)
    hyperparameters: dict[str, Array] = struct.field(default_factory=dict, kw_only=True)

    @property
    def step_axes(self) -> tuple[int, ...]:
        """The axis of the steps of a window, ``(sequence_length,)``; no axis for items."""
        return ()

    @property
    @abc.abstractmethod
    def score_users(self) -> list[object]:
        """The strategies that use scores."""

    def rows_of(self, index: Index) -> Int[Array, "..."]:
        """Returns the rows of the storage that hold the contents of slots, or ``capacity``.

        For items these are the slots ``[B]`` themselves, for windows their own steps ``[B, L]``.
        """
        return index

    @abc.abstractmethod
    def holds_row(self, row: Index) -> Mask:
        """Returns whether there is an item, or a step, in these rows of the storage."""

    @abc.abstractmethod
    def any_row(self) -> Count:
        """Returns a row of the storage with an item, or a step; arbitrary in an empty buffer."""

    @abc.abstractmethod
    def for_parts(self, row: Int[Array, "..."], items: Arrays) -> tuple[Int[Array, "..."], Rows]:
        """Returns slots and rows for ``Part.on_write``, of items in these rows of the storage."""

    @property
    def bound_sampler(self) -> Sampler:
        """The sampler with the present values of its varying hyperparameters."""
        return bind(self.sampler, lax.stop_gradient(self.hyperparameters))

    @property
    def lets_remove(self) -> bool:
        """True if a part of this buffer lets ``remove`` take items out.

        ``Episodes`` does not: the flags of the steps tell which windows there are.
        """
        return any(part.removes and not isinstance(part, Episodes) for part in self.extras)

    @property
    def freshness_state(self) -> FreshnessState:
        """The state of ``freshness``; an empty tuple without it."""
        return self.find_part(Freshness)[1]

    def find_part(self, kind: type[SomePart]) -> tuple[SomePart | None, State]:
        """Returns the part of this class and its state, or ``(None, ())``."""
        for part, state in zip(self.extras, self.extra_states, strict=True):
            if isinstance(part, kind):
                return part, state
        return None, ()

    def with_episodes(self, added: Index, removed: Int[Array, " R"]) -> Self:
        """Returns the buffer after its sampler was notified of the episodes of changed slots."""
        del added, removed
        return self  # A sampler of items has nothing to do with episodes.

    def with_state(self, kind: type[Part], state: State) -> Self:
        """Returns the buffer with a new state of its part of this class."""
        extras = zip(self.extras, lax.stop_gradient(self.extra_states), strict=True)
        states = tuple(state if isinstance(part, kind) else before for part, before in extras)
        return trees.updated(self, extra_states=states)

    def checked(self, updates: dict[str, Any]) -> dict[str, Any]:
        """Returns new fields after a check that strategies and their states fit each other."""
        for name, of_state in _STATES.items():
            if name not in updates or of_state in updates or not hasattr(self, name):
                continue
            new, old = updates[name], getattr(self, name)
            varies = name == "sampler" and (names_of(new) or self.hyperparameters)
            if new != old and (varies or _keeps(self, name, new)):
                other = ", or call buffer.with_sampler(...)" if name == "sampler" else ""
                raise ValueError(
                    f"{name} is {new}, but {of_state} was made by {old}, and the two do not fit; "
                    f"create another buffer with {name}={new} and add the data, or replace "
                    f"{of_state} too{other}"
                )
        return super().checked(updates)


# What keeps the state of each part of the configuration.
_STATES = {"sampler": "sampler_state", "extras": "extra_states", "evictor": "occupancy"}


def _keeps(buffer: SampledBase, name: str, new: Any) -> bool:
    """Returns whether the new value of a field needs a state that the old one made."""
    if name == "sampler":
        return bool(jax.tree.leaves(jax.eval_shape(lambda: new.init(buffer.occupancy.capacity))))
    if name == "extras" and len(new) == len(buffer.extras):
        pairs = zip(new, buffer.extras, strict=True)
        # Other limits can go on with the uses and versions of the items.
        return any(
            a != b and not (type(a) is type(b) and isinstance(a, Freshness)) for a, b in pairs
        )
    return True

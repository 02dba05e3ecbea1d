"""The arguments with which a buffer was created, for another one like it."""

from typing import Any, Self

import jax
from jaxtyping import Array, PyTree

from jaxbuf.buffers.buffer import Buffer
from jaxbuf.core.segment_tree import using_width, width_of
from jaxbuf.core.storage import has_shapes, like
from jaxbuf.core.types import State
from jaxbuf.occupancy.protocol import Occupancy
from jaxbuf.strategies.moves import Moves
from jaxbuf.strategies.part import Part


class Created(Buffer):
    """A buffer that knows the arguments of its ``create``.

    Attributes:
        data: The storage.
        occupancy: Records which slots are live.
        counters: The numbers of rows added and refused, ``[K]``.
        unit: The name of what ``size`` counts.
        drawn: The name of what a sampler draws.
        extras: The parts of the buffer besides sampler and evictor.
        extra_states: The state of each of them.
        freshness: The limits on uses and staleness; None without any.
        episodes: The configuration of the index of episodes; None without one.
    """

    data: Any
    occupancy: Occupancy
    counters: Any
    unit = "items"
    drawn = "items"
    extras: tuple[Part, ...]
    extra_states: tuple[State, ...]
    freshness: Any = None
    episodes: Any = None

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
    def storage(self) -> PyTree[Array]:
        """The storage, ``data``."""
        return self.data

    @property
    def num_slots(self) -> int:
        """The number of slots of items, or of windows."""
        return self.occupancy.num_slots

    @property
    def sizes(self: Any) -> dict[str, int]:
        """The sizes that ``create`` takes, by name."""
        return {"capacity": self.capacity}

    def checked(self, updates: dict[str, Any]) -> dict[str, Any]:
        """Returns new fields after a check that a new storage is like the present one."""
        if "data" in updates:
            updates = {**updates, "data": like(self.data, updates["data"], "data")}
        return super().checked(updates)

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

    def move(self: Any, old: Any, moves: Moves) -> Any:
        """Returns this buffer, which is empty, with the items of another one like it.

        Args:
            old: A buffer of another size.
            moves: The slots of before and after.
        """
        return self.replace(data=moves.of_rows(self.data, old.data))


def is_created(node: object) -> bool:
    """Returns whether a node of a pytree is a buffer that holds items of its own."""
    return isinstance(node, Created)


def check_alike(name: str, before: object, after: object) -> None:
    """Checks that buffers inside of another one hold the same kind of items as those before them.

    Raises:
        ValueError: If a structure, shape or dtype of items differs; the message names the leaf.
    """

    def inside(tree: object) -> list[tuple[Any, Any]]:
        pairs = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_created)
        return [(path, node) for path, node in pairs if is_created(node)]

    for (_, old), (path, new) in zip(inside(before), inside(after), strict=False):
        if has_shapes(old.data):
            like(old.example, new.example, f"{name}{jax.tree_util.keystr(path)}.data")

"""The arguments with which a buffer was created, for another one like it."""

from typing import Any, Self

import jax
from jaxtyping import PyTree


class Created:
    """A buffer that knows the arguments of its ``create``.

    Attributes:
        data: The storage.
        occupancy: Records which slots are live.
        counters: The numbers of rows added and refused, ``[K]``.
        item_axes: The number of axes that the storage has in front of those of an item, or a step.
        unit: The name of what ``size`` counts.
        drawn: The name of what a sampler draws.
    """

    data: Any
    occupancy: Any
    counters: Any
    item_axes = 1
    unit = "items"
    drawn = "items"

    @property
    def example(self) -> PyTree[jax.ShapeDtypeStruct]:
        """The shapes and dtypes of an item, or of a step, as the ``example`` of ``create``.

        Those of buffers that are stacked, as ``vmap`` makes them, are the same.
        """
        # The counters of a single buffer have one axis.
        skip = self.item_axes + self.counters.ndim - 1
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape[skip:], leaf.dtype), self.data
        )

    @property
    def sizes(self: Any) -> dict[str, int]:
        """The sizes that ``create`` takes, by name."""
        return {"capacity": self.capacity}

    def options(self) -> dict[str, Any]:
        """Returns the other arguments of ``create``, by name."""
        return {}

    def anew(self, **sizes: int) -> Self:
        """Returns an empty buffer that was created like this one, apart from its ``sizes``."""
        kind: Any = type(self)
        return kind.create(self.example, **(self.sizes | sizes), **self.options())

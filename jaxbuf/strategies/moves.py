"""The slots that items move to when a buffer is loaded with another size."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxbuf.core.segment_tree import SegmentTree
from jaxbuf.core.types import Index, State


@dataclasses.dataclass(frozen=True)
class Moves:
    """The slots of a buffer's items before and after it is loaded with another size.

    ``Sampler.move`` and ``Part.move`` get one. Called with an empty state and the old state, it
    moves what is stored for each slot: a ``SegmentTree`` over slots, or an array whose first axis
    has the length of the slots. ``of_rows`` moves an array with one row for each item, or for each
    step, and ``of_envs`` one with a row for each environment.

    Attributes:
        source: Slots in the old buffer, ``[B]``.
        target: Their slots in the new buffer, ``[B]``; past the end if the item does not stay.
        begun: The same, but windows that are not complete yet have a slot as well, ``[B]``.
        slots: The number of slots before and after; static.
        steps: For each step of the environments that stay ``[E, T]``, its index in its ring before,
            and ``ring * length + index`` after, past the end if it does not stay; None for items.
        lengths: The lengths of the rings before and after; static.
        envs: The numbers of environments before and after, of which the first ones stay; static.
    """

    source: Index
    target: Index
    begun: Index
    slots: tuple[int, int]
    steps: tuple[Int[Array, "E T"], Int[Array, "E T"]] | None = None
    lengths: tuple[int, int] = (0, 0)
    envs: tuple[int, int] = (0, 0)

    def __call__(self, empty: State, full: State) -> State:
        """Returns the empty state, filled with the entries of the items that stay.

        Raises:
            ValueError: When traced, if there is an array without an axis of slots.
        """

        def is_tree(node: object) -> bool:
            return isinstance(node, SegmentTree)

        return jax.tree.map(self._move, empty, full, is_leaf=is_tree)

    def of_rows(self, empty: State, full: State) -> State:
        """Returns the empty arrays, ``[capacity, ...]``, with the items, or steps, that stay."""
        source, target = self.rows

        def fill(blank: Array, full: Array) -> Array:
            return blank.at[target].set(full[source], mode="drop")

        return jax.tree.map(fill, empty, full)

    @property
    def rows(self) -> tuple[Int[Array, " R"], Int[Array, " R"]]:
        """The rows of the storage that items, or steps, had before, and those after."""
        if self.steps is None:
            return self.source, self.target
        position, target = self.steps  # [E, T]
        ring = jnp.arange(len(position), dtype=jnp.int32)[:, None]
        return (ring * self.lengths[0] + position).reshape(-1), target.reshape(-1)

    def of_envs(self, empty: State, full: State) -> State:
        """Returns the empty arrays, ``[E, ...]``, with those of the environments that stay."""

        def fill(blank: Array, full: Array) -> Array:
            stay = min(self.envs)
            return blank.at[:stay].set(full[:stay])

        return jax.tree.map(fill, empty, full)

    def _move(self, blank: Any, full: Any) -> Any:
        if isinstance(blank, SegmentTree):
            return blank.set(self.target, full.leaves[self.source])
        shapes = full.shape, blank.shape
        if [shape[:1] for shape in shapes] == [(slots,) for slots in self.slots]:
            return blank.at[self.target].set(full[self.source], mode="drop")
        if blank.size == full.size == 0:
            return blank
        raise ValueError(
            f"its state has an array of shape {full.shape}, which does not have an axis of slots; "
            "give it a method move"
        )


class Movable:
    """A strategy whose state moves along when a buffer is loaded with another size."""

    def move(self, empty: State, state: State, moves: Moves) -> State:
        """Returns the state after the items moved to a buffer of another size.

        This is how ``jaxbuf.load`` resizes a buffer. The default moves each ``SegmentTree`` and
        each array ``[slots, ...]``, and refuses a state that has anything else.

        Args:
            empty: The state for an empty buffer of the new size, or for one with the items that
                moved there before.
            state: The state before.
            moves: The slots of the items before and after.

        Raises:
            ValueError: When traced, if the state cannot be moved.
        """
        return moves(empty, state)

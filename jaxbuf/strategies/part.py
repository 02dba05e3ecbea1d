"""Parts: state and filters that a buffer has besides sampler and evictor."""

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int
from numpy.typing import NDArray

from jaxbuf.core.types import Arrays, Floats, Index, State, Word
from jaxbuf.occupancy.protocol import Occupancy
from jaxbuf.occupancy.rings import Rings
from jaxbuf.strategies.moves import Movable


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("items", "mask", "score", "version", "session"),
    meta_fields=("shape",),
)
@dataclasses.dataclass(frozen=True)
class Rows:
    """Rows passed to ``add`` of a buffer: items ``[B]``, or steps ``[E, T]``.

    Attributes:
        items: Leaves ``[B, ...]`` or ``[E, T, ...]``; no gradient flows through them.
        shape: The axes of the rows, ``(B,)`` or ``(E, T)``.
        mask: The rows still to be added; None for all. See ``taken``.
        score: Scores, ``[B]``; None if the buffer does not use scores.
        version: Versions of the policies that generated the rows, int32; None if not given.
        session: Sessions of these versions, int32; None if not given.
    """

    items: Arrays
    shape: tuple[int, ...]
    mask: Bool[Array, "..."] | None = None
    score: Floats | None = None
    version: Int[Array, "..."] | None = None
    session: Int[Array, "..."] | None = None

    @property
    def taken(self) -> Bool[Array, "..."]:
        """The rows still to be added: neither masked out nor refused so far."""
        return jnp.ones(self.shape, bool) if self.mask is None else self.mask

    @property
    def count(self) -> Word:
        """The number of rows still to be added."""
        if self.mask is None:
            return jnp.uint32(math.prod(self.shape))
        return jnp.sum(self.mask, dtype=jnp.uint32)

    def without(self, refused: Bool[Array, "..."]) -> Self:
        """Returns the same rows with the refused ones masked out."""
        return dataclasses.replace(self, mask=self.taken & ~refused)


@dataclasses.dataclass(frozen=True)
class StepRows(Rows):
    """Rows of a ``TrajectoryBuffer``, and the rows of the storage that they are written to.

    Attributes:
        rings: The rings before these steps are added.
        target: The row of the storage for each step, ``[E, T]``; past the end if the step is not
            added, or is overwritten by a later one.
        completed: For ``refuse``, the slots of the windows that these steps completed, ``[E, H]``;
            past the end for none.
    """

    rings: Rings = dataclasses.field(kw_only=True)
    target: Int[Array, "E T"] = dataclasses.field(kw_only=True)
    completed: Int[Array, "E H"] | None = dataclasses.field(default=None, kw_only=True)


class Part(Movable):
    """Keeps additional state about the items of a buffer, and may refuse new items.

    A part is a frozen dataclass that holds the configuration. Its *state* is a pytree of arrays
    that the buffer stores and passes to each method. By default every method keeps no state and
    refuses no row. Indices outside ``[0, slots)`` do not name a slot and must be ignored.

    ``add`` asks one part after the other which rows to refuse, and for which reason. A row is
    counted under the first reason that applies, and rows refused by an earlier part are no longer
    ``taken`` for later ones. The reason ``"rejected"`` means that the row cannot be judged.

    After ``clear`` of all items the state is that of ``init``. Uses of items, and versions of the
    policies that generated them, are the matter of ``Freshness``: a class that derives from it may
    override ``on_use``, which chooses the items that retire.

    Attributes:
        reasons: The names under which refused rows are counted in ``metrics()``. The name
            ``"removed"`` counts items that ``remove`` took out.
        uses_score: Whether ``add`` needs a ``score``.
        removes: Whether items may be removed, or windows refused, while their neighbors stay.
        of_items: Whether the part can be used in an ``ItemBuffer``.
        of_windows: Whether the part can be used in a ``TrajectoryBuffer``.
        of_shards: Whether the part can be used in the shards of a ``Sharded``, each of which sees
            its own items only.

    Example:
        >>> import dataclasses, jax, jax.numpy as jnp, jaxbuf
        >>> @dataclasses.dataclass(frozen=True)
        ... class CapPerClass(jaxbuf.strategies.Part):
        ...     '''Holds at most ``cap`` items of each class.'''
        ...
        ...     cap: int
        ...     reasons = ("refused_class_full",)
        ...
        ...     def init(self, data, slots):
        ...         return jnp.zeros(slots, jnp.int32)  # The class of the item in each slot.
        ...
        ...     def refuse(self, state, rows, occupancy):
        ...         label = rows.items["label"]
        ...         live = occupancy.live(jnp.arange(state.size))
        ...         held = jnp.sum(live[None] & (state[None] == label[:, None]), axis=1)
        ...         same = rows.taken[None] & (label[None] == label[:, None])
        ...         before = jnp.sum(jnp.tril(same, -1), axis=1)
        ...         return {"refused_class_full": held + before >= self.cap}
        ...
        ...     def on_add(self, state, index, rows):
        ...         return state.at[index].set(rows.items["label"], mode="drop")
        >>> item = {"label": jnp.int32(0)}
        >>> buffer = jaxbuf.ItemBuffer.create(item, 10, parts=(CapPerClass(2),))
        >>> buffer = jaxbuf.add(buffer, {"label": jnp.array([3, 3, 3, 5])})
        >>> int(buffer.size), int(buffer.metrics()["refused_class_full"])
        (3, 1)
    """

    reasons: tuple[str, ...] = ()
    uses_score: bool = False
    removes: bool = False
    of_items: bool = True
    of_windows: bool = False
    of_shards: bool = False

    def init(self, data: Arrays, slots: int) -> State:
        """Returns the state for an empty buffer.

        Args:
            data: The buffer's storage, leaves ``[capacity, ...]``; only shapes and dtypes matter.
                Of rings, these are their steps, one ring after the other.
            slots: The number of slots for items or windows.
        """
        del data, slots
        return ()

    def refuse(self, state: State, rows: Rows, occupancy: Any) -> dict[str, Bool[Array, "..."]]:
        """Returns masks of the items to refuse, or of the windows that are not drawn, by reason.

        Args:
            state: The state. For windows, ``on_add`` was called with their steps before.
            rows: The items, ``[B]``. For windows ``StepRows``, ``[E, H]``: column ``h`` has the
                step that completed the window in this column of ``rows.completed``. ``H`` is the
                number of steps of the add; or else, where windows end with their episodes (see
                ``Episodes``), one step may complete several windows.
            occupancy: The occupancy from before the add: an ``ItemOccupancy`` or, for windows,
                their ``Occupancy``.
        """
        del state, rows, occupancy
        return {}

    def on_add(self, state: State, index: Int[Array, "..."], rows: Rows) -> State:
        """Updates the state after items, or steps, were written.

        Args:
            state: The state.
            index: The slots of the items, ``[B]``; past the end for rows that were not written. For
                steps the windows that they begin, ``[E, T]``, complete or not.
            rows: The rows that were added; for steps ``StepRows``.
        """
        del index, rows
        return state

    def on_remove(self, state: State, index: Index) -> State:
        """Updates the state after items or windows at ``index`` left, before slots are reused."""
        del index
        return state

    def on_write(
        self, state: State, index: Int[Array, "..."], rows: Rows, path: str | None
    ) -> State:
        """Updates the state after a field of items, or of steps, was changed.

        ``set_field`` and ``end_episodes`` call it, and ``map_field`` for a number of items at a
        time.

        Args:
            state: The state.
            index: The slots of the items, ``[B]``, no slot twice; past the end for rows that were
                not written. For steps, the windows that they begin, as in ``on_add``.
            rows: The rows after the change, with whole items, and the mask of the written ones; for
                steps ``StepRows``, ``[B, sequence_length]`` or ``[B, 1]``.
            path: The field; None for whole items.
        """
        del index, rows, path
        return state

    def on_score(self, state: State, index: Index, score: Floats) -> State:
        """Updates the state after items got new scores; no slot occurs twice in ``index``."""
        del index, score
        return state

    def metrics(self, state: State, occupancy: Occupancy) -> dict[str, Array]:
        """Returns scalars to monitor; the buffer itself counts the refused rows."""
        del state, occupancy
        return {}

    def check_valid(
        self, state: State, name: str, live: NDArray[np.bool_], data: Arrays
    ) -> Iterator[str]:
        """Yields a line for each problem with the state, for ``jaxbuf.testing.assert_valid``.

        Args:
            state: The state, whose arrays have the shapes and dtypes of a new one.
            name: The buffer as an expression, with which lines begin.
            live: The slots that hold an item, or a window.
            data: The buffer's storage.
        """
        del state, name, live, data
        yield from ()


@dataclasses.dataclass(frozen=True)
class Removable(Part):
    """Lets ``buffer.remove`` take out single items, or windows, of a buffer.

    The buffer then keeps a bit for each slot, which tells whether its item is still there. With
    ``Oldest``, the slot of a removed item is filled again in the usual order; with ``Lowest``,
    removed items are overwritten first. From a ``TrajectoryBuffer`` windows are removed, and their
    steps stay. The number of removed items is counted as ``metrics()["removed"]``.

    Example:
        >>> import jax.numpy as jnp, jaxbuf
        >>> buffer = jaxbuf.ItemBuffer.create(jnp.int32(0), 8, parts=(jaxbuf.Removable(),))
        >>> buffer, slots = buffer.insert(jnp.arange(5))
        >>> buffer = buffer.remove(slots, mask=jnp.array([True, False, False, True, False]))
        >>> buffer.latest(3).data.tolist(), int(buffer.metrics()["removed"])
        ([1, 2, 4], 2)
    """

    reasons = ("removed",)
    removes = True
    of_windows = True
    of_shards = True

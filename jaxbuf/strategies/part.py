"""The class of what a buffer may keep and ask beside its sampler and evictor."""

import dataclasses
import functools
import math
from typing import Any, Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree, UInt

from jaxbuf.occupancy.protocol import ItemOccupancy, Occupancy
from jaxbuf.occupancy.rings import Rings


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("items", "mask", "score", "version", "session"),
    meta_fields=("shape",),
)
@dataclasses.dataclass(frozen=True)
class Rows:
    """Rows that are offered to a buffer: items ``[B]``, or steps ``[E, T]``.

    Attributes:
        items: Their leaves, ``[B, ...]`` or ``[E, T, ...]``; no gradient flows through them.
        shape: The axes of the rows, ``(B,)`` or ``(E, T)``.
        mask: Which rows are still to be taken; None for all. See ``taken``.
        score: Their scores, ``[B]``; None where nothing uses scores.
        version: The versions of the policies that made them, int32; None if they were not given.
        session: The sessions of these versions, int32; None if they were not given.
    """

    items: PyTree[Array]
    shape: tuple[int, ...]
    mask: Bool[Array, "..."] | None = None
    score: Float[Array, " B"] | None = None
    version: Int[Array, "..."] | None = None
    session: Int[Array, "..."] | None = None

    @property
    def taken(self) -> Bool[Array, "..."]:
        """Which rows are still to be taken: neither masked out nor refused so far."""
        return jnp.ones(self.shape, bool) if self.mask is None else self.mask

    @property
    def count(self) -> UInt[Array, ""]:
        """How many rows are still to be taken."""
        if self.mask is None:
            return jnp.uint32(math.prod(self.shape))
        return jnp.sum(self.mask, dtype=jnp.uint32)

    def without(self, refused: Bool[Array, "..."]) -> Self:
        """The same rows, of which some are refused."""
        return dataclasses.replace(self, mask=self.taken & ~refused)


@dataclasses.dataclass(frozen=True)
class StepRows(Rows):
    """Rows of a ``TrajectoryBuffer``, which know their places.

    Attributes:
        rings: The rings without these steps.
        target: Where each step lies from now on, ``ring * length + place``, ``[E, T]``; past the
            end where it is not taken, or overwritten by a later one.
    """

    rings: Rings = dataclasses.field(kw_only=True)
    target: Int[Array, "E T"] = dataclasses.field(kw_only=True)


class Part:
    """Something that a buffer keeps about its items, and that may refuse new ones.

    A part is a frozen dataclass: the configuration. What changes is its *state*, a pytree of arrays
    that the buffer keeps and passes in. Every method has a default that keeps and refuses nothing.
    Indices outside ``[0, slots)`` name no slot, and must be ignored.

    Rows that are offered are shown to one part after the other. Each names those that it refuses,
    by reason; a row counts under the first reason that holds, and a part does not see as ``taken``
    what one before it has refused. ``"rejected"`` is a reason as well: the row cannot be judged.

    Attributes:
        reasons: The names under which refused rows are counted in ``metrics()``.
        uses_score: Whether ``add`` needs a ``score``.
        uses_version: Whether ``add`` takes a ``version`` and a ``session``.
        removes: Whether items may leave, or windows be refused, while those around them stay.
        of_items: Whether an ``ItemBuffer`` can have it.
        of_windows: Whether a ``TrajectoryBuffer`` can have it.

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
    uses_version: bool = False
    removes: bool = False
    of_items: bool = True
    of_windows: bool = False

    def init(self, data: PyTree[Any], slots: int) -> Any:
        """The state of an empty buffer.

        Args:
            data: Its storage, leaves ``[capacity, ...]``, or ``[num_envs, length, ...]``; only
                shapes and dtypes matter.
            slots: How many slots it has, for items or for windows.
        """
        del data, slots
        return ()

    def refuse(
        self, state: Any, rows: Rows, occupancy: ItemOccupancy
    ) -> dict[str, Bool[Array, " B"]]:
        """Which items must not enter, by reason; the occupancy is that before the add."""
        del state, rows, occupancy
        return {}

    def on_add(self, state: Any, index: Int[Array, " B"], rows: Rows) -> Any:
        """Items have been written to the slots ``index``, over what was there."""
        del index, rows
        return state

    def on_steps(self, state: Any, index: Int[Array, "E T"], rows: StepRows) -> Any:
        """StepRows have been written, of which some are the first of the windows at ``index``."""
        del index, rows
        return state

    def refuse_windows(
        self, state: Any, index: Int[Array, "E T"], rows: StepRows
    ) -> dict[str, Bool[Array, "E T"]]:
        """Which of the windows at ``index``, completed by these steps, must not be drawn."""
        del state, index, rows
        return {}

    def on_remove(self, state: Any, index: Int[Array, " B"]) -> Any:
        """The items or windows at ``index`` have left, and nothing was written over them yet."""
        del index
        return state

    def on_clear(self, state: Any, empty: Any) -> Any:
        """All items have left; ``empty`` is the state of a new buffer. Shares no array."""
        del state
        return empty

    def on_clear_envs(self, state: Any, envs: Bool[Array, " E"]) -> Any:
        """All steps of these environments have left; ``on_remove`` tells of the windows."""
        del envs
        return state

    def metrics(self, state: Any, occupancy: Occupancy) -> dict[str, Array]:
        """Numbers worth watching, scalars; what was refused is counted by the buffer."""
        del state, occupancy
        return {}

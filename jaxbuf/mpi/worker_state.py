"""The pure part of a worker: the rows that it has not sent yet, and its counters."""

import functools
from typing import Self

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PyTree, UInt

from jaxbuf.core import storage
from jaxbuf.core.describe import Described
from jaxbuf.core.sizes import check_count
from jaxbuf.core.types import Arrays, Count, Floats, Mask, Number
from jaxbuf.mpi.baseline import BaselineFilter, check_filter
from jaxbuf.mpi.batch import check_batch
from jaxbuf.views.terminal import terminal_states


class WorkerState(Described):
    """The rows that a worker has not sent yet, and its counters: an immutable pytree.

    Attributes:
        items: Rows that are kept for the next message, leaves ``[R, ...]``.
        score: The score of each row, ``[R]``; NaN for a row without one.
        mask: Which rows are used, ``[R]``.
        place: The number of rows kept, and of adds since the last message, ``[2]`` int32.
        baseline: The last baseline, ``[]``.
        counters: Adds, rows offered, batches sent, rows sent, and batches skipped, ``[5]`` uint32;
            they wrap.
        filter: Chooses the items to send; None sends all of them.
    """

    items: Arrays
    score: Float[Array, " R"]
    mask: Bool[Array, " R"]
    place: Int[Array, " 2"]
    baseline: Number
    counters: UInt[Array, " 5"]
    filter: BaselineFilter | None

    @classmethod
    def create(
        cls,
        example: PyTree,
        rows: int,
        filter: BaselineFilter | None = None,  # noqa: A002
    ) -> Self:
        """Creates a state without rows.

        Args:
            example: One unbatched item.
            rows: The largest number of rows of a message, R.
            filter: Chooses the items to send; None sends all of them.

        Raises:
            ValueError: If ``rows`` is not an integer of at least 1, ``example`` is not a pytree of
                arrays, or ``filter`` is not a ``BaselineFilter``.
        """
        rows = check_count("rows", rows)
        check_filter(filter)
        return cls(
            items=storage.allocate(example, (rows,)),
            score=jnp.full((rows,), jnp.nan, jnp.float32),
            mask=jnp.zeros((rows,), bool),
            place=jnp.zeros((2,), jnp.int32),
            baseline=jnp.float32(-jnp.inf),
            counters=jnp.zeros((5,), jnp.uint32),
            # A copy, so that the caller's filter survives the donation of this state.
            filter=jax.tree.map(jnp.copy, filter),
        )

    def add(self, items: Arrays, score: Floats, mask: Mask) -> Self:
        """Keeps a batch, leaves ``[B, ...]``, for the next message. It must have room for it."""
        start = self.place[0]

        def put(kept: Array, rows: Array) -> Array:
            return lax.dynamic_update_slice_in_dim(kept, rows, start, axis=0)

        offered = jnp.sum(mask, dtype=jnp.uint32)
        return self.replace(
            items=jax.tree.map(put, self.items, items),
            score=put(self.score, score),
            mask=put(self.mask, mask),
            place=self.place + jnp.array([mask.shape[0], 1], jnp.int32),
            counters=self.counters.at[:2].add(jnp.stack([jnp.uint32(1), offered])),
        )

    def contact(self) -> tuple[Self, Bool[Array, " R"], Count]:
        """Chooses the rows to send, and forgets all rows.

        Returns:
            The new state, the mask ``[R]`` of the rows to send, and their number ``[]``. If the
            filter lets none of the rows pass, the batch is counted as skipped.
        """
        new_filter, sent = self.filter, self.mask
        if new_filter is not None:
            new_filter, sent = new_filter.select(self.score, self.baseline, self.mask)
        count = jnp.sum(sent, dtype=jnp.uint32)
        sends = (count > 0).astype(jnp.uint32)
        skipped = jnp.any(self.mask).astype(jnp.uint32) - sends
        state = self.replace(
            mask=jnp.zeros_like(self.mask),
            place=jnp.zeros_like(self.place),
            counters=self.counters.at[2:].add(jnp.stack([sends, count, skipped])),
            filter=new_filter,
        )
        return state, sent.copy(), count.astype(jnp.int32)

    def metrics(self) -> dict[str, Array]:
        """Returns metrics, all scalars. Counts since creation wrap at 2**32.

        Returns:
            ``adds``; the numbers of rows ``offered`` and ``sent``; the numbers of ``batches`` sent,
            and ``skipped`` because the filter let no row pass; and ``kept``, the number of rows
            kept for the next message.
        """
        names = ("adds", "offered", "batches", "sent", "skipped")
        counts = {name: self.counters[..., k] for k, name in enumerate(names)}
        return {**counts, "kept": jnp.sum(self.mask, axis=-1, dtype=jnp.int32)}


@functools.partial(
    jax.jit, static_argnames=("scoring_only", "needs_score", "sends"), donate_argnames="state"
)
def step(
    state: WorkerState,
    baseline: Number,
    items: Arrays,
    score: Floats | None,
    mask: Mask | Bool[Array, "B T"] | None,
    *,
    scoring_only: bool,
    needs_score: bool,
    sends: bool,
) -> tuple[WorkerState, Arrays]:
    """Keeps a batch; if it is time to send, also chooses rows, as ``contact`` does."""
    if scoring_only:
        if mask is None:
            raise ValueError("with scoring_only pass mask=[B, T], which steps are valid")
        items, mask = terminal_states(items, mask=mask)
    batch, mask = check_batch(state.items, items, score, mask, needs_score=needs_score)
    state = state.replace(baseline=baseline).add(batch.items, batch.score, mask)
    if not sends:
        return state, None
    state, *chosen = state.contact()
    return state, chosen


@functools.partial(jax.jit, donate_argnums=0)
def flush(state: WorkerState, baseline: Number) -> tuple[WorkerState, Arrays]:
    """Chooses the rows to send, as ``contact`` does."""
    state, *chosen = state.replace(baseline=baseline).contact()
    return state, chosen


def initial_state(
    data: Arrays,
    rows: int,
    filter: BaselineFilter | None,  # noqa: A002
    state: WorkerState | None,
) -> WorkerState:
    """Returns an empty state, or a copy of ``state``, so that the caller keeps that.

    Raises:
        ValueError: If ``state`` has another structure, shape or dtype than an empty one.
    """
    example = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), data)
    empty = WorkerState.create(example, rows, filter)
    if state is None:
        return empty

    def layout(tree: WorkerState) -> tuple[object, list[object]]:
        leaves, treedef = jax.tree.flatten(tree)
        return treedef, [(x.shape, x.dtype) for x in leaves]

    if layout(state) != layout(empty):
        raise ValueError(
            "state belongs to a worker with another example, rows or filter; create this worker "
            "with the same ones"
        )
    return jax.tree.map(jnp.copy, state)

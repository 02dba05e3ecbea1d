"""The pure part of a worker: the rows that it has not sent yet, and its counters."""

from typing import Self

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PyTree, UInt

from jaxbuf.buffers import common
from jaxbuf.core import describe, storage
from jaxbuf.mpi.baseline import BaselineFilter, check_filter


class WorkerState(struct.PyTreeNode):
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

    items: PyTree[Array]
    score: Float[Array, " R"]
    mask: Bool[Array, " R"]
    place: Int[Array, " 2"]
    baseline: Float[Array, ""]
    counters: UInt[Array, " 5"]
    filter: BaselineFilter | None

    __repr__ = describe.text
    _repr_html_ = describe.rich

    @classmethod
    def create(
        cls,
        example: PyTree,
        rows: int,
        filter: BaselineFilter | None = None,  # noqa: A002
    ) -> Self:
        """Create a state without rows.

        Args:
            example: One unbatched item.
            rows: The largest number of rows of a message, R.
            filter: Chooses the items to send; None sends all of them.

        Raises:
            ValueError: If ``rows`` is not an integer of at least 1, ``example`` is not a pytree of
                arrays, or ``filter`` is not a ``BaselineFilter``.
        """
        rows = common.check_count("rows", rows)
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

    def add(
        self,
        items: PyTree[Array],
        score: Float[Array, " B"],
        mask: Bool[Array, " B"],
    ) -> Self:
        """Keep a batch, leaves ``[B, ...]``, for the next message. It must have room for it."""
        start = self.place[0]

        def put(kept: Array, rows: Array) -> Array:
            return lax.dynamic_update_slice_in_dim(kept, rows, start, axis=0)

        state = self.offer(mask)
        return state.replace(
            items=jax.tree.map(put, self.items, items),
            score=put(self.score, score),
            mask=put(self.mask, mask),
            place=self.place + jnp.array([mask.shape[0], 1], jnp.int32),
        )

    def offer(self, mask: Bool[Array, " B"]) -> Self:
        """Count a batch that is not kept."""
        offered = jnp.sum(mask, dtype=jnp.uint32)
        return self.replace(counters=self.counters.at[:2].add(jnp.stack([jnp.uint32(1), offered])))

    def contact(self) -> tuple[Self, Bool[Array, " R"], Int[Array, ""]]:
        """Choose the rows to send, and forget all rows.

        Returns:
            The new state, the mask ``[R]`` of the rows to send, and their number ``[]``. If the
            filter lets none of the rows pass, the batch is counted as skipped.
        """
        state, sent, count = self.choose(self.score, self.mask)
        state = state.replace(mask=jnp.zeros_like(self.mask), place=jnp.zeros_like(self.place))
        return state, sent.copy(), count

    def choose(
        self, score: Float[Array, " B"], mask: Bool[Array, " B"]
    ) -> tuple[Self, Bool[Array, " B"], Int[Array, ""]]:
        """Choose the rows to send of a batch that is not kept, as ``contact`` does."""
        state, sent = self, mask
        if self.filter is not None:
            chosen, sent = self.filter.select(score, self.baseline, mask)
            state = state.replace(filter=chosen)
        count = jnp.sum(sent, dtype=jnp.uint32)
        sends = (count > 0).astype(jnp.uint32)
        skipped = jnp.any(mask).astype(jnp.uint32) - sends
        counters = state.counters.at[2:].add(jnp.stack([sends, count, skipped]))
        return state.replace(counters=counters), sent, count.astype(jnp.int32)

    def metrics(self) -> dict[str, Array]:
        """Return metrics, all scalars. Counts since creation wrap at 2**32.

        Returns:
            ``adds``; the numbers of rows ``offered`` and ``sent``; the numbers of ``batches`` sent,
            and ``skipped`` because the filter let no row pass; and ``kept``, the number of rows
            kept for the next message.
        """
        names = ("adds", "offered", "batches", "sent", "skipped")
        counts = {name: self.counters[..., k] for k, name in enumerate(names)}
        return {**counts, "kept": jnp.sum(self.mask, axis=-1, dtype=jnp.int32)}

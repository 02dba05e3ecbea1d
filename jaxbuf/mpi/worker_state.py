"""What a worker has yet to send, and what it did: the pure part of it."""

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
    """What a worker has yet to send, and what it did: an immutable pytree, for checkpoints.

    Attributes:
        items: Rows to send, leaves ``[rows, ...]``.
        score: Of each, ``[rows]``; NaN where there is none.
        mask: Which rows there are, ``[rows]``.
        place: Rows that are taken, and adds since the last contact, ``[2]`` int32.
        baseline: The last one heard of, ``[]``.
        counters: Adds; rows that were offered; batches that were sent and rows in them; and batches
            of which nothing was sent; ``[5]`` uint32, wrapping.
        filter: Which items to send; None sends all of them.
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
        """Nothing to send yet.

        Args:
            example: One unbatched item.
            rows: The most rows of a message.
            filter: Which items to send; None sends all of them.

        Raises:
            ValueError: If ``rows`` is not an integer of at least 1, ``example`` holds anything but
                arrays, or ``filter`` is no ``BaselineFilter``.
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
            # A copy, so that the caller keeps its own when this state is donated.
            filter=jax.tree.map(jnp.copy, filter),
        )

    def add(
        self,
        items: PyTree[Array],
        score: Float[Array, " B"],
        mask: Bool[Array, " B"],
    ) -> Self:
        """Keep a batch ``[B, ...]`` for the next contact; there must be room for it."""
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
        """Count a batch, without keeping it."""
        offered = jnp.sum(mask, dtype=jnp.uint32)
        return self.replace(counters=self.counters.at[:2].add(jnp.stack([jnp.uint32(1), offered])))

    def contact(self) -> tuple[Self, Bool[Array, " R"], Int[Array, ""]]:
        """Which of the rows kept to send, and how many those are; after that none are kept.

        A contact without any row is none; one of which the filter lets no row pass is counted as
        skipped.
        """
        state, sent, count = self.choose(self.score, self.mask)
        state = state.replace(mask=jnp.zeros_like(self.mask), place=jnp.zeros_like(self.place))
        return state, sent.copy(), count

    def choose(
        self, score: Float[Array, " B"], mask: Bool[Array, " B"]
    ) -> tuple[Self, Bool[Array, " B"], Int[Array, ""]]:
        """As ``contact``, of rows that are not kept."""
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
        """Numbers worth watching, all scalars, counted since creation and wrapping at 2**32.

        Returns:
            ``adds``; rows: ``offered`` and ``sent``; batches: ``batches`` that were sent, and
            ``skipped``, of which nothing was sent; and ``kept``, rows for the next contact.
        """
        names = ("adds", "offered", "batches", "sent", "skipped")
        counts = {name: self.counters[..., k] for k, name in enumerate(names)}
        return {**counts, "kept": jnp.sum(self.mask, axis=-1, dtype=jnp.int32)}

"""What a manager keeps and does with a batch: store it, score it, and say what is worth sending."""

from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int, PyTree, UInt

from jaxbuf.buffers import common
from jaxbuf.buffers.item import ItemBuffer
from jaxbuf.core import checks, describe, storage
from jaxbuf.mpi.baseline import EMA, Baseline, baseline_value, update_average
from jaxbuf.mpi.scores import DEFAULT, Batch, ScoreFunction, StatefulScore, uses_score
from jaxbuf.occupancy.ranking import Ranking
from jaxbuf.strategies.softmax import Softmax


class Manager(struct.PyTreeNode):
    """A shared buffer with scores for those who fill it. An immutable pytree; it communicates not.

    Attributes:
        buffer: What workers have sent.
        average: The moving average of ``update_average``, ``[]``.
        counters: Batches and rows of each worker so far, ``[W, 2]`` uint32; they wrap.
        score_state: What the score function remembers; nothing if it is a plain function.
        baseline: How the baseline is chosen.
        scores: The score function.
        store: Whether batches are stored, or only scored.

    Example:
        >>> import jax.numpy as jnp, jaxbuf
        >>> from jaxbuf.mpi import Manager, Min
        >>> buffer = jaxbuf.reward_prioritized(jnp.float32(0), 2)
        >>> manager = Manager.create(buffer, num_workers=1, baseline=Min())
        >>> log_reward = jnp.array([1.0, 3.0, 2.0])
        >>> manager, scores = manager.receive(log_reward, score=log_reward)
        >>> int(manager.buffer.size), float(scores["score"]), float(manager.baseline_value())
        (2, inf, 2.0)
    """

    buffer: ItemBuffer
    average: Float[Array, ""]
    counters: UInt[Array, "W 2"]
    score_state: Any
    baseline: Baseline = struct.field(pytree_node=False)
    scores: ScoreFunction | StatefulScore = struct.field(pytree_node=False)
    store: bool = struct.field(pytree_node=False)

    __repr__ = describe.text
    _repr_html_ = describe.rich

    @classmethod
    def create(
        cls,
        buffer: ItemBuffer,
        num_workers: int,
        *,
        baseline: Baseline = EMA(),  # noqa: B008
        scores: ScoreFunction | StatefulScore = DEFAULT,
        store: bool = True,
    ) -> Self:
        """A manager that has received nothing.

        Args:
            buffer: Where batches are stored; it may hold items already.
            num_workers: How many workers it serves.
            baseline: From which score on an item is worth sending.
            scores: Scores a batch, given the buffer before the batch is stored, the batch, which of
                its rows are there ``[B]``, and the number of the worker ``[]``: a pure function
                that returns a dict of arrays; or a ``StatefulScore``. It is configuration: pass the
                same one each time.
            store: Whether batches are stored, or only scored.

        Raises:
            ValueError: If the buffer is no ``ItemBuffer``, or keeps no scores that the baseline
                could go by.
        """
        checks.check_kind("buffer", buffer, ItemBuffer, "a jaxbuf.ItemBuffer")
        if isinstance(baseline, type) or not hasattr(baseline, "uses_buffer"):
            raise ValueError(
                f"baseline is {checks.name_of(baseline)}; expected a baseline such as {EMA()}"
            )
        if isinstance(scores, type) or not (callable(scores) or isinstance(scores, StatefulScore)):
            raise ValueError(
                f"scores is {checks.name_of(scores)}; expected a function that scores a batch, or "
                "a StatefulScore"
            )
        if baseline.uses_buffer and _kept_scores(buffer) is None:
            raise ValueError(
                f"{baseline} goes by the scores in the buffer, which keeps none; create it with "
                "evictor=jaxbuf.Lowest() or sampler=jaxbuf.Softmax(), or use EMA()"
            )
        num_workers = common.check_count("num_workers", num_workers)
        return cls(
            buffer=buffer,
            average=jnp.float32(-jnp.inf),
            counters=jnp.zeros((num_workers, 2), jnp.uint32),
            score_state=scores.init(num_workers) if isinstance(scores, StatefulScore) else (),
            baseline=baseline,
            scores=scores,
            store=checks.check_flag("store", store),
        )

    def receive(
        self,
        items: PyTree[Array],
        *,
        score: Float[Array, " B"] | None = None,
        mask: Bool[Array, " B"] | None = None,
        sender: int | Int[Array, ""] = 0,
    ) -> tuple[Self, dict[str, Array]]:
        """Take a batch from a worker.

        Args:
            items: Leaves ``[B, ...]``, like the buffer's example.
            score: Of each item, such as its log reward, ``[B]``; needed where the buffer goes by
                scores, and without them there is no baseline.
            mask: Which rows there are, ``[B]``. A batch without any leaves the manager as it is.
            sender: The number of the worker, from 0.

        Returns:
            The manager that goes on, and the scores of the batch.

        Raises:
            ValueError: When traced, if a structure, shape or dtype differs, a score that is needed
                is missing, or the score function returns no dict of arrays.
        """
        items, (rows,) = storage.check(self.buffer.data, items, "items", ("B",))
        there, score = check_rows(uses_score(self.buffer), rows, score, mask)
        sender = jnp.asarray(sender, jnp.int32)
        batch, state = Batch(items, score), self.score_state
        if isinstance(self.scores, StatefulScore):
            state, scores = self.scores.update(state, self.buffer, batch, there, sender)
        else:
            scores = self.scores(self.buffer, batch, there, sender)
        if not isinstance(scores, dict):
            raise ValueError(
                f"scores returned a {type(scores).__name__}; expected a dict of arrays, such as "
                "{'score': ...}"
            )
        buffer = self.buffer
        if self.store:
            given = score if uses_score(buffer) else None
            buffer = buffer.add(items, score=given, mask=there)
        average = update_average(self.baseline, self.average, score, there)
        count = jnp.sum(there, dtype=jnp.uint32)
        received = jnp.stack([(count > 0).astype(jnp.uint32), count])
        manager = self.replace(
            buffer=buffer,
            average=average,
            counters=self.counters.at[sender].add(received),
            score_state=state,
        )
        return manager, jax.tree.map(jnp.asarray, scores)

    def baseline_value(self) -> Float[Array, ""]:
        """The baseline of what was received so far; −inf if there is none."""
        kept = _kept_scores(self.buffer) if self.baseline.uses_buffer else None
        full = self.buffer.size == self.buffer.capacity
        return baseline_value(self.baseline, self.average, kept, full)

    def metrics(self) -> dict[str, Array]:
        """The buffer's metrics, and ``baseline``, ``batches`` and ``rows`` received; scalars."""
        return {
            **self.buffer.metrics(),
            "baseline": self.baseline_value(),
            "batches": jnp.sum(self.counters[..., 0], axis=-1, dtype=jnp.uint32),
            "rows": jnp.sum(self.counters[..., 1], axis=-1, dtype=jnp.uint32),
        }


def check_rows(
    needs_score: bool, rows: int, score: Any, mask: Any
) -> tuple[Bool[Array, " B"], Float[Array, " B"]]:
    """The mask and the score of a batch, made up where they are not given."""
    there = jnp.ones((rows,), bool)
    if mask is not None:
        there = storage.check_rows(mask, "mask", (rows,), np.bool_, "(B,)")
    if score is not None:
        return there, storage.check_rows(score, "score", (rows,), np.float32, "(B,)")
    if needs_score:
        raise ValueError("the manager's buffer goes by the score of items; pass score=[B]")
    return there, jnp.full((rows,), jnp.nan, jnp.float32)


def _kept_scores(buffer: ItemBuffer) -> Float[Array, " N"] | None:
    """The score in each slot, not finite where there is no item; None if none are kept."""
    ranking = buffer.occupancy.inner if buffer.freshness else buffer.occupancy
    if isinstance(ranking, Ranking):
        return ranking.score
    if isinstance(buffer.sampler, Softmax):
        return buffer.sampler_state.scores.leaves[: buffer.capacity]
    return None

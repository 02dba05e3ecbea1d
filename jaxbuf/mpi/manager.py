"""The manager of a shared buffer, which stores and scores batches and computes the baseline."""

from collections.abc import Callable
from typing import Any, Self

import jax
import jax.core
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, UInt

from jaxbuf.buffers.item import ItemBuffer
from jaxbuf.core import checks, trees
from jaxbuf.core.describe import Described
from jaxbuf.core.sizes import check_count
from jaxbuf.core.slots import Slots
from jaxbuf.core.types import Arrays, Count, Floats, Mask, Number
from jaxbuf.mpi.baseline import EMA, Baseline, baseline_value, update_average
from jaxbuf.mpi.batch import check_batch, uses_score
from jaxbuf.mpi.scores import DEFAULT, ScoreFunction, StatefulScore, with_state


class Manager(Described):
    """A shared replay buffer that scores incoming batches.

    An immutable pytree with pure methods: ``serve`` and ``LockStep`` do the communication.

    Attributes:
        buffer: The items that workers have sent.
        average: The moving average of ``update_average``, ``[]``.
        counters: Batches and rows received from each worker, ``[W, 2]`` uint32; they wrap.
        score_state: The state of the score function; empty for a plain function.
        baseline: The rule that chooses the baseline.
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
    average: Number
    counters: UInt[Array, "W 2"]
    score_state: Any
    baseline: Baseline = struct.field(pytree_node=False)
    scores: ScoreFunction | StatefulScore = struct.field(pytree_node=False)
    store: bool = struct.field(pytree_node=False)

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
        """Creates a manager that has received nothing.

        Args:
            buffer: The buffer in which batches are stored; it may hold items already.
            num_workers: The number of workers.
            baseline: Chooses the lowest score that is worth sending.
            scores: Scores a batch. Either a pure function of the buffer before the batch is stored,
                the batch, the mask of its rows ``[B]`` and the number of the worker ``[]``, which
                returns a dict of arrays; or a ``StatefulScore``. It is configuration, so pass the
                same object each time. It is traced once for each program, not for each batch:
                parameters that change belong in the state of a ``StatefulScore``.
            store: Whether batches are stored, or only scored.

        Raises:
            ValueError: If the buffer is not an ``ItemBuffer``, keeps no scores although the
                baseline needs them, or another argument is invalid.
        """
        checks.check_kind("buffer", buffer, ItemBuffer, "a jaxbuf.ItemBuffer")
        if isinstance(baseline, type) or not hasattr(baseline, "uses_buffer"):
            raise ValueError(
                f"baseline is {checks.name_of(baseline)}; expected a baseline such as {EMA()}"
            )
        stateful = with_state(scores)
        if baseline.uses_buffer and _scores_by_slot(buffer) is None:
            raise ValueError(
                f"{baseline} uses the scores in the buffer, which keeps none; create it with "
                "evictor=jaxbuf.Lowest() or sampler=jaxbuf.Softmax(), or use EMA()"
            )
        num_workers = check_count("num_workers", num_workers)
        return cls(
            buffer=buffer,
            average=jnp.float32(-jnp.inf),
            counters=jnp.zeros((num_workers, 2), jnp.uint32),
            score_state=stateful.init(num_workers),
            baseline=baseline,
            scores=scores,
            store=checks.check_flag("store", store),
        )

    def receive(
        self,
        items: Arrays,
        *,
        score: Floats | None = None,
        mask: Mask | None = None,
        sender: int | Count = 0,
    ) -> tuple[Self, dict[str, Array]]:
        """Scores and stores a batch from a worker.

        Args:
            items: Leaves ``[B, ...]``, like the buffer's example.
            score: The score of each item, such as its log reward, ``[B]``. It is required if the
                buffer uses scores; without scores there is no baseline.
            mask: Which rows are part of the batch, ``[B]``. A batch without rows changes nothing.
            sender: The number of the worker, counted from 0.

        Returns:
            The new manager, and the scores of the batch.

        Raises:
            ValueError: When traced, if a structure, shape or dtype differs, a required score is
                missing, or the score function does not return a dict of arrays.
        """
        return self.insert(items, score=score, mask=mask, sender=sender)[:2]

    def insert(
        self,
        items: Arrays,
        *,
        score: Floats | None = None,
        mask: Mask | None = None,
        sender: int | Count = 0,
    ) -> tuple[Self, dict[str, Array], Slots]:
        """Receives a batch as ``receive`` does, and returns the slots of its rows as well.

        Returns:
            The new manager, the scores of the batch, and the slot of each row, ``[B]``. A row that
            is not stored, or that a later row of the same batch has evicted, has index
            ``capacity``.

        Raises:
            ValueError: As raised by ``receive``.
        """
        batch, mask = check_batch(
            self.buffer.data, items, score, mask, needs_score=uses_score(self.buffer)
        )
        workers = self.counters.shape[0]
        if not isinstance(sender, jax.core.Tracer) and not 0 <= int(sender) < workers:
            raise ValueError(
                f"sender is {sender}; expected the number of a worker, from 0 to {workers - 1}"
            )
        sender = jnp.asarray(trees.owned(sender), jnp.int32)
        state, scores = with_state(self.scores).update(
            self.score_state, self.buffer, batch, mask, sender
        )
        if not isinstance(scores, dict):
            raise ValueError(
                f"scores returned a {type(scores).__name__}; expected a dict of arrays, such as "
                "{'score': ...}"
            )
        buffer = self.buffer
        no_slot = jnp.full(mask.shape, buffer.capacity, jnp.int32)
        slots = Slots(no_slot, jnp.zeros(mask.shape, jnp.uint32))
        if self.store:
            stored_score = batch.score if uses_score(buffer) else None
            buffer, slots = buffer.insert(batch.items, score=stored_score, mask=mask)
        count = jnp.sum(mask, dtype=jnp.uint32)
        received = jnp.stack([(count > 0).astype(jnp.uint32), count])
        manager = self.replace(
            buffer=buffer,
            average=update_average(self.baseline, self.average, batch.score, mask),
            counters=self.counters.at[sender].add(received),
            score_state=state,
        )
        return manager, jax.tree.map(jnp.asarray, scores), slots

    def update_score(self, slots: Slots, score: Floats, *, mask: Mask | None = None) -> Self:
        """Sets the scores of stored items, as ``update_score`` of the buffer does.

        A baseline of the scores in the buffer follows; the moving average does not.

        Args:
            slots: The slots of the items, from ``insert`` or from a sample of the buffer, ``[B]``.
            score: Their new scores, ``[B]``.
            mask: Which rows to use, ``[B]``.

        Raises:
            ValueError: When traced, if no part of the buffer uses scores, or a shape differs.
        """
        return self.replace(buffer=self.buffer.update_score(slots, score, mask=mask))

    def update_priority(self, slots: Slots, priority: Floats, *, mask: Mask | None = None) -> Self:
        """Sets the priorities of stored items, as ``update_priority`` of the buffer does.

        Raises:
            ValueError: When traced, if the sampler has no priorities, or a shape differs.
        """
        return self.replace(buffer=self.buffer.update_priority(slots, priority, mask=mask))

    def baseline_value(self) -> Number:
        """Returns the baseline after all batches so far; −inf before it is known."""
        score = _scores_by_slot(self.buffer) if self.baseline.uses_buffer else None
        full = self.buffer.size == self.buffer.capacity
        return baseline_value(self.baseline, self.average, score, full)

    def metrics(self) -> dict[str, Array]:
        """Returns the buffer's metrics, and ``baseline``, ``batches`` and ``rows`` received."""
        return {
            **self.buffer.metrics(),
            "baseline": self.baseline_value(),
            "batches": jnp.sum(self.counters[..., 0], axis=-1, dtype=jnp.uint32),
            "rows": jnp.sum(self.counters[..., 1], axis=-1, dtype=jnp.uint32),
        }


def outline(make: Callable[[int], Manager], num_workers: int) -> Manager:
    """Returns the shapes and the configuration of the manager that a function makes.

    Raises:
        ValueError: If it does not make a manager.
    """
    manager = jax.eval_shape(lambda: make(num_workers))
    if not isinstance(manager, Manager):
        raise ValueError(
            f"manager makes a {type(manager).__name__}; expected a function that takes a number of "
            "workers and returns a jaxbuf.mpi.Manager"
        )
    return manager


def _scores_by_slot(buffer: ItemBuffer) -> Float[Array, " N"] | None:
    """Returns the score in each slot, not finite in empty ones; None if none are kept."""
    return buffer.by_slot().get("score")

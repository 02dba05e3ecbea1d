"""Baselines: the lowest score that is worth sending, and the filter that uses it.

A baseline is a number, which is −inf before it is known. A manager computes it from a moving
average of the batches it receives, an array ``[]`` that starts at −inf, and from the scores in its
buffer.

References:
    Lahlou et al., torchgfn: A PyTorch GFlowNet library, 2023, https://arxiv.org/abs/2305.14594
    (the baselines of its replay buffer manager).
"""

import dataclasses
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self, get_args

import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jaxtyping import Array, Float, UInt

from jaxbuf.buffers.arguments import check_mask, check_numbers
from jaxbuf.core import checks, numbers, sizes, storage
from jaxbuf.core.describe import Described
from jaxbuf.core.types import Count, Flag, Floats, Mask, Number

if TYPE_CHECKING:
    from mpi4py import MPI

Agreement = Literal["min", "mean", "max"]


class Baseline(Protocol):
    """Chooses the lowest score that is worth sending: a frozen, hashable dataclass."""

    @property
    def alpha(self) -> float:
        """The weight of the newest batch in the moving average."""
        ...

    @property
    def uses_buffer(self) -> bool:
        """True if it uses the scores in the buffer once that is full."""
        ...

    def of_buffer(self, score: Float[Array, " N"]) -> Number:
        """Returns the baseline of a full buffer with these scores; −inf if none is finite."""
        ...


@dataclasses.dataclass(frozen=True)
class EMA:
    """An exponential moving average of the smallest finite score of each batch.

    It starts at the smallest finite score of the first batch that has one. Batches without a finite
    score do not change it.

    Attributes:
        alpha: The weight of the newest batch, above 0 and at most 1.

    Raises:
        ValueError: If ``alpha`` is out of its range.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxbuf.mpi import EMA, baseline_value, update_average
        >>> baseline, average = EMA(alpha=0.5), jnp.float32(-jnp.inf)
        >>> for scores in ([-jnp.inf, 1.0, 2.0], [3.0, 4.0, 5.0]):
        ...     average = update_average(baseline, average, jnp.array(scores))
        ...     print(float(baseline_value(baseline, average)))
        1.0
        2.0
    """

    alpha: float = 0.1

    uses_buffer = False

    def __post_init__(self) -> None:
        checks.settle(self, checks.check_step_size, "alpha")

    def of_buffer(self, score: Float[Array, " N"]) -> Number:
        """Returns −inf: the scores in the buffer are not used."""
        del score
        return jnp.float32(-jnp.inf)


@dataclasses.dataclass(frozen=True)
class Min:
    """The smallest finite score in the buffer once it is full; until then like ``EMA``.

    Attributes:
        alpha: The weight of the newest batch in the moving average, above 0 and at most 1.

    Raises:
        ValueError: If ``alpha`` is out of its range.
    """

    alpha: float = 0.1

    uses_buffer = True

    def __post_init__(self) -> None:
        checks.settle(self, checks.check_step_size, "alpha")

    def of_buffer(self, score: Float[Array, " N"]) -> Number:
        """Returns the smallest finite score; −inf if no score is finite."""
        least = _least_finite(score)
        return jnp.where(jnp.isfinite(least), least, jnp.float32(-jnp.inf))


@dataclasses.dataclass(frozen=True)
class Percentile:
    """A percentile of the finite scores in the buffer once it is full; until then like ``EMA``.

    It interpolates linearly between two scores, and sorts all scores of the buffer at every call.

    Attributes:
        q: The percentile, from 0 (the smallest score) to 1 (the largest).
        alpha: The weight of the newest batch in the moving average, above 0 and at most 1.

    Raises:
        ValueError: If ``q`` or ``alpha`` is out of its range.
    """

    q: float = 0.1
    alpha: float = 0.1

    uses_buffer = True

    def __post_init__(self) -> None:
        checks.settle(self, checks.check_step_size, "alpha")
        expected = "a number from 0 (the smallest score) to 1"
        checks.settle_number(self, "q", expected, lambda x: 0 <= x <= 1)

    def of_buffer(self, score: Float[Array, " N"]) -> Number:
        """Returns the percentile of the finite scores; −inf if no score is finite."""
        finite = jnp.isfinite(score)
        rising = jnp.sort(jnp.where(finite, score, jnp.float32(jnp.inf)))
        count = jnp.sum(finite, dtype=jnp.int32)
        last = jnp.maximum(count - 1, 0)
        rank = jnp.float32(self.q) * last.astype(jnp.float32)
        low = jnp.minimum(rank.astype(jnp.int32), last)
        below, above = rising[low], rising[jnp.minimum(low + 1, last)]
        fraction = rank - low.astype(jnp.float32)
        value = below + fraction * (above - below)
        return jnp.where(count > 0, value, jnp.float32(-jnp.inf))


def update_average(
    baseline: Baseline, average: Number, score: Floats, mask: Mask | None = None
) -> Number:
    """Returns the moving average after a batch.

    Args:
        baseline: The baseline, whose ``alpha`` weighs the batch.
        average: The average before; −inf before the first batch.
        score: The score of each row, ``[B]``. Scores that are not finite are ignored.
        mask: Which rows count, ``[B]``.
    """
    least = _least_finite(score if mask is None else jnp.where(mask, score, jnp.float32(jnp.inf)))
    previous = jnp.where(average == -jnp.inf, least, average)
    alpha = jnp.float32(baseline.alpha)
    mixed = alpha * least + (jnp.float32(1) - alpha) * previous
    return jnp.where(jnp.isfinite(least), mixed, average)


def baseline_value(
    baseline: Baseline,
    average: Number,
    score: Float[Array, " N"] | None = None,
    full: bool | Flag = False,
) -> Number:
    """Returns the current baseline.

    Args:
        baseline: The rule that chooses the baseline.
        average: The moving average, including the newest batch.
        score: The score in each slot of the buffer, ``[N]``, after the newest batch was stored; not
            finite in empty slots.
        full: Whether the buffer is full.
    """
    if score is None or not baseline.uses_buffer:
        return average
    value = lax.cond(full, baseline.of_buffer, lambda _: jnp.float32(-jnp.inf), score)
    return jnp.where(jnp.isfinite(value), value, average)


def combine(baseline: Number, comm: "MPI.Intracomm", by: Agreement = "min") -> Number:
    """Returns a baseline on which several managers agree. All of them call this, also inside jit.

    Args:
        baseline: The baseline of this manager.
        comm: The communicator of the managers.
        by: ``"min"`` withholds no item that one of the managers would store, so everything is sent
            while a manager has no baseline. ``"mean"`` and ``"max"`` use only the managers that
            have one. NaN is no baseline; for ``"mean"`` neither is +inf.

    Returns:
        The same number on every manager; −inf if none has a baseline.

    Raises:
        ValueError: If ``by`` is none of these.
    """
    import mpi4jax

    checks.check_choice("by", by, get_args(Agreement))
    # The reductions of MPI tell ranks different numbers where one of them is NaN, or -0.0 and 0.0
    # meet. So every rank learns all numbers, and reduces them itself.
    every = mpi4jax.allgather(baseline, comm=comm)  # [P]
    every = jnp.where(jnp.isnan(every), jnp.float32(-jnp.inf), every)
    if by == "min":
        return jnp.min(every)
    if by == "max":
        return jnp.max(every)
    finite = jnp.isfinite(every)
    total = jnp.sum(jnp.where(finite, every, jnp.float32(0)))
    count = jnp.sum(finite, dtype=jnp.float32)
    return jnp.where(count > 0, total / jnp.maximum(count, 1.0), jnp.float32(-jnp.inf))


class BaselineFilter(Described):
    """Chooses the items that a worker sends, and counts them. An immutable pytree.

    Items that score at least the baseline are sent. A batch in which no item does is skipped; but
    the last of ``refresh_after`` such batches in a row is sent whole, so that a worker whose items
    have become worse still hears from its manager.

    Attributes:
        counters: Rows that were offered, rows that scored at least the baseline, rows that were
            sent, and batches that were skipped, ``[4]`` uint32; they wrap.
        filtered: The number of batches in a row in which no item scored enough, ``[]`` int32.
        refresh_after: The number of such batches of which the last is sent whole; None never sends
            one.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxbuf.mpi import BaselineFilter
        >>> worker = BaselineFilter.create()
        >>> worker, sends = worker.select(jnp.arange(5.0), baseline=2.0)
        >>> sends.tolist()
        [False, False, True, True, True]
    """

    counters: UInt[Array, " 4"]
    filtered: Count
    refresh_after: int | None = struct.field(pytree_node=False)

    @classmethod
    def create(cls, refresh_after: int | None = 10) -> Self:
        """Creates a filter that has seen no batch.

        Raises:
            ValueError: If ``refresh_after`` is neither None nor an integer of at least 1.
        """
        if refresh_after is not None:
            refresh_after = sizes.check_count("refresh_after", refresh_after)
        return cls(
            counters=jnp.zeros((4,), jnp.uint32),
            filtered=jnp.int32(0),
            refresh_after=refresh_after,
        )

    def select(
        self, score: Floats, baseline: float | Number, mask: Mask | None = None
    ) -> tuple[Self, Mask]:
        """Chooses the rows of a batch to send.

        Args:
            score: The score of each row, ``[B]``. NaN is sent only while there is no baseline.
            baseline: The last baseline; −inf before it is known.
            mask: Which rows are part of the batch, ``[B]``. A batch without rows changes nothing.

        Returns:
            The new filter, and the mask of the rows to send ``[B]``, all False if the batch is
            skipped.

        Raises:
            ValueError: When traced, if a shape or dtype differs.
        """
        array = numbers.type_of(score, "score")
        if len(array.shape) != 1:
            raise ValueError(f"score has shape {array.shape}; expected (B,)")
        shape = array.shape
        score = check_numbers(score, "score", shape, "(B,)")
        offered = check_mask(mask, shape, "(B,)")
        least = storage.check_rows(baseline, "baseline", (), np.float32, "a number")
        kept = offered & ((score >= least) | (least == -jnp.inf))  # [B]
        fails = jnp.any(offered) & ~jnp.any(kept)
        filtered = jnp.where(jnp.any(kept), 0, self.filtered + fails.astype(jnp.int32))
        refreshes = jnp.bool_(False)
        if self.refresh_after is not None:
            refreshes = fails & (filtered >= self.refresh_after)
        sent = kept | (offered & refreshes)
        counts = [jnp.sum(mask, dtype=jnp.uint32) for mask in (offered, kept, sent)]
        skipped = (fails & ~refreshes).astype(jnp.uint32)
        changed = self.replace(
            counters=self.counters + jnp.stack([*counts, skipped]),
            filtered=jnp.where(refreshes, 0, filtered),
        )
        return changed, sent

    def metrics(self) -> dict[str, Array]:
        """Returns metrics, all scalars. Counts since creation wrap at 2**32.

        Returns:
            The numbers of rows ``offered``, ``kept`` (they scored at least the baseline) and
            ``sent`` (kept, or in a batch that was sent whole), and of batches ``skipped``.
        """
        names = ("offered", "kept", "sent", "skipped")
        return {name: self.counters[..., k] for k, name in enumerate(names)}


def _least_finite(score: Float[Array, " N"]) -> Number:
    """Returns the smallest finite score; +inf if no score is finite."""
    infinity = jnp.float32(jnp.inf)
    return jnp.min(jnp.where(jnp.isfinite(score), score, infinity), initial=infinity)


def check_filter(filter: Any) -> None:  # noqa: A002
    """Checks that an argument is None or a filter.

    Raises:
        ValueError: If it is neither.
    """
    if filter is not None:
        expected = "None or jaxbuf.mpi.BaselineFilter.create(...)"
        checks.check_kind("filter", filter, BaselineFilter, expected)

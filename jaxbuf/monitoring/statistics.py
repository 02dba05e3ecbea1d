"""Running statistics of the samples from a buffer, and of the items that pass through it.

References:
    DI-engine, advanced buffer: ``SampledDataAttrMonitor`` and ``PeriodicThruputMonitor``,
    https://github.com/opendilab/DI-engine
"""

from typing import Any, Self

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, UInt

from jaxbuf.buffers.arguments import needs_priority
from jaxbuf.buffers.buffer import as_buffer, owns_items
from jaxbuf.buffers.item import ItemBuffer
from jaxbuf.buffers.retire import uses_and_staleness
from jaxbuf.buffers.sample import Sample, check_sample
from jaxbuf.core import checks, storage, trees
from jaxbuf.core.describe import Described
from jaxbuf.core.division import remainder
from jaxbuf.core.sizes import check_count
from jaxbuf.core.types import Floats, Word

_COLUMNS = (
    "use_mean",
    "use_max",
    "staleness_mean",
    "staleness_max",
    "priority_mean",
    "priority_max",
    "priority_min",
)

# Not NaN, since that would stop a program that runs with ``jax_debug_nans``.
_UNKNOWN = -np.inf


class Statistics(Described):
    """Statistics of the last samples from a buffer, and of the items that pass through it.

    A separate pytree beside the buffer in the training state: saved with it, it resumes bit for
    bit. An update reads each sampled row once and never passes over all slots. It watches an
    ``ItemBuffer``, a ``TrajectoryBuffer``, a ``Queue``, or one part of a ``Mixture``.

    Attributes:
        records: The mean and extreme use counts, staleness and priorities of each of the last ``K``
            samples, ``[K, 7]``; −inf for unknown ones.
        counters: Five counters, ``[5]`` uint32: the samples recorded so far, which restart before
            they reach 2**32; the rows sampled in this period; and, from the period's start, the
            buffer's size, the items added to it so far and the total use count of its items. All
            but the first wrap.

    Example:
        >>> import jax, jax.numpy as jnp, jaxbuf
        >>> freshness = jaxbuf.Freshness(max_staleness=10)
        >>> buffer = jaxbuf.ItemBuffer.create(jnp.float32(0), 4, freshness=freshness)
        >>> statistics = jaxbuf.Statistics.create(buffer, window=100)
        >>> buffer = buffer.add(jnp.arange(6.0)).set_version(3)
        >>> batch = buffer.sample(jax.random.key(0), 8)
        >>> statistics = statistics.sampled(buffer, batch)
        >>> metrics = statistics.metrics(buffer)
        >>> [int(metrics[name]) for name in ("pushed", "removed", "sampled", "current")]
        [6, 2, 8, 4]
        >>> float(metrics["staleness_mean"]), int(metrics["samples"])
        (3.0, 1)
    """

    records: Float[Array, "K 7"]
    counters: UInt[Array, " 5"]

    @classmethod
    def create(cls, buffer: Any, window: int = 100) -> Self:
        """Returns empty statistics and begins the first period.

        Args:
            buffer: The buffer to watch, as it is now.
            window: Number ``K`` of last samples to report on.

        Raises:
            ValueError: If ``window`` is not an integer of at least 1, or ``buffer`` is a
                ``Mixture`` or not a buffer.
        """
        window = check_count("window", window)
        return cls(
            records=jnp.full((window, len(_COLUMNS)), _UNKNOWN, jnp.float32),
            counters=_begin(buffer, jnp.uint32(0)),
        )

    def sampled(self, buffer: Any, batch: Sample, *, priority: Floats | None = None) -> Self:
        """Records the valid rows of a sample, if it has any.

        Args:
            buffer: The buffer it is from, before the rows are marked as used. With ``Freshness``
                use counts and staleness are recorded.
            batch: The sample, of ``[B]`` rows.
            priority: The priorities that ``update_priority`` is about to set, ``[B]``. Without
                them no priorities are recorded.

        Raises:
            ValueError: When traced, if ``priority`` is given and the buffer has none, or its shape
                differs.
        """
        buffer = _checked(buffer)
        check_sample("batch", batch)
        valid, values = batch.valid, _values(buffer, batch, priority)
        count = jnp.sum(valid, dtype=jnp.int32)
        columns = {name: values.get(name.split("_")[0]) for name in _COLUMNS}
        record = jnp.stack(
            [
                jnp.float32(_UNKNOWN) if value is None else _reduce(name, value, valid)
                for name, value in columns.items()
            ]
        )[None]  # [1, 7]
        has_rows = count > 0
        records = lax.stop_gradient(self.records)
        time, window = self.counters[0], records.shape[0]
        index = (remainder(time, window).astype(jnp.int32), jnp.int32(0))
        previous = lax.dynamic_slice(records, index, (1, len(_COLUMNS)))
        record = jnp.where(has_rows, record, previous)
        return self.replace(
            records=lax.dynamic_update_slice(records, record, index),
            counters=jnp.stack(
                [
                    # A multiple of the window, so that the next record is always the oldest one.
                    remainder(time + has_rows.astype(jnp.uint32), (2**32 - 1) // window * window),
                    self.counters[1] + count.astype(jnp.uint32),
                    *self.counters[2:],
                ]
            ),
        )

    def metrics(self, buffer: Any) -> dict[str, Array]:
        """Returns statistics of the last ``K`` samples, and of the period until now.

        Args:
            buffer: The buffer as it is now.

        Returns:
            A dict of scalars. ``pushed``, ``sampled`` and ``removed`` are the items added, the rows
            sampled and the items that left since the period began, whatever the reason: a newer
            item, their use or staleness, or a call. ``current`` is the number of items held now.
            ``samples`` is the number of samples recorded since ``create``, which DI-engine's
            monitor calls the time of the last one.

            An ``ItemBuffer`` with ``Freshness`` has ``reuse_mean``, the mean use count of the items
            that left, computed by one pass over the slots. It assumes that every sampled row has
            been marked as used by now.

            With ``Freshness`` there are ``use_mean``, ``use_max``, ``staleness_mean`` and
            ``staleness_max``, and with priorities ``priority_mean``, ``priority_max`` and
            ``priority_min``: the mean of the last samples' means, the largest of their maxima and
            the smallest of their minima; 0 before the first sample.
        """
        buffer = _checked(buffer)
        sampled, size, adds, uses = (self.counters[..., i] for i in range(1, 5))
        pushed = buffer.counters[..., 0] - adds
        removed = size + pushed - buffer.size.astype(jnp.uint32)
        metrics = {
            "pushed": pushed,
            "sampled": sampled,
            "removed": removed,
            "current": buffer.size,
            "samples": self.counters[..., 0],
        }
        if _counts_uses(buffer):
            # All uses are counted, so the uses that live items do not have are of removed items.
            used = (uses + sampled - _uses(buffer)).astype(jnp.float32)
            metrics["reuse_mean"] = used / jnp.maximum(removed, jnp.uint32(1)).astype(jnp.float32)
        watched = ["use", "staleness"] if buffer.freshness is not None else []
        watched += ["priority"] if "priorities" in as_buffer(buffer).abilities else []
        for column, name in enumerate(_COLUMNS):
            if name.split("_")[0] in watched:
                records = self.records[..., column]
                recorded = records > _UNKNOWN
                metrics[name] = jnp.where(jnp.any(recorded), _reduce(name, records, recorded), 0.0)
        return metrics

    def next_period(self, buffer: Any) -> Self:
        """Begins a new period; the last samples are kept.

        Args:
            buffer: The buffer as it is now.
        """
        return self.replace(counters=_begin(buffer, self.counters[0]))


def _checked(buffer: Any) -> Any:
    """Returns a buffer with its leaves as jax arrays.

    Raises:
        ValueError: If it is a ``Mixture``, or not a buffer.
    """
    if as_buffer(buffer).members:
        raise ValueError(
            "buffer is a Mixture, whose parts keep different things; watch a part with statistics "
            "of its own: Statistics.create(mixture.parts[i]), with the rows of a batch whose "
            "mixture.part_slots(batch.slots, i) are its own"
        )
    if not owns_items(buffer):
        raise ValueError(
            f"buffer is {checks.kind_of(buffer)}; expected an ItemBuffer, TrajectoryBuffer or Queue"
        )
    return trees.on_device(buffer)


def _begin(buffer: Any, time: Word) -> UInt[Array, " 5"]:
    buffer = _checked(buffer)
    size, zero = buffer.size.astype(jnp.uint32), jnp.uint32(0)
    uses = _uses(buffer) if _counts_uses(buffer) else zero
    return jnp.stack([time, zero, size, buffer.counters[..., 0], uses])


def _values(buffer: Any, batch: Sample, priority: Any) -> dict[str, Floats]:
    """Returns the values to record for each row, by the first word of their columns' names."""
    values: dict[str, Array] = {}
    if buffer.freshness is not None:
        use, staleness = uses_and_staleness(buffer, batch.slots, "staleness")
        values["use"] = use.astype(jnp.float32)
        values["staleness"] = staleness.astype(jnp.float32)
    if priority is not None:
        if buffer.is_queue:
            raise ValueError(
                f"priority was given, but a {type(buffer).__name__} has no priorities; leave it out"
            )
        needs_priority(buffer.sampler, "priority was given")
        shape = batch.valid.shape
        values["priority"] = storage.check_rows(priority, "priority", shape, np.float32, "(B,)")
    return values


def _counts_uses(buffer: Any) -> bool:
    return not buffer.num_envs and buffer.freshness is not None


def _uses(buffer: ItemBuffer) -> Word:
    """Returns the total use count of the live items."""
    live = buffer.occupancy.live(jnp.arange(buffer.capacity, dtype=jnp.int32))
    uses = buffer.freshness_state.uses[: buffer.capacity].astype(jnp.uint32)
    return jnp.sum(jnp.where(live, uses, jnp.uint32(0)), dtype=jnp.uint32)


def _reduce(name: str, values: Float[Array, " N"], mask: Bool[Array, " N"]) -> Array:
    """Returns the mean, maximum or minimum of the masked values, depending on the column."""
    if name.endswith("_max"):
        return jnp.max(values, where=mask, initial=-jnp.inf)
    if name.endswith("_min"):
        return jnp.min(values, where=mask, initial=jnp.inf)
    count = jnp.maximum(jnp.sum(mask, dtype=jnp.int32), 1).astype(jnp.float32)
    return jnp.sum(jnp.where(mask, values / count, 0.0))

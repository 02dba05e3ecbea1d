"""The cost of limits on use and staleness, and of statistics: jaxbuf against itself.

The cycle of the prioritized row `per-mujoco`, of the same bytes. What the contestants do besides:

* **jaxbuf**: nothing. The others are compared with it.
* **freshness**: `Freshness(max_use, max_staleness)`. Before every add the learner is one version
  further (`set_version`), and every update first counts a use of each row (`mark_used`). The limits
  are so wide that nothing retires.
* **statistics**: `Statistics` of the last 100 samples: their priorities, and what came and went.
* **both**: both; the statistics are then also of use counts and staleness.
* **retiring**: freshness with limits so narrow that of a full buffer the older half has retired, so
  that with every add as many items retire as come. It has half as many items to draw from.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import numpy as np

from benchmarks.harness import Options, Row, UnequalWork, import_library
from benchmarks.jax_loops import Binding, ReplayContestant
from benchmarks.rows.per import bind_jaxbuf
from benchmarks.transitions import MUJOCO
from benchmarks.workload import Workload

OPERATIONS = ("scan add", "scan update", "scan cycle", "python cycle")
NAME = "freshness"
NEVER = 2**30
REFERENCE = "jaxbuf"


class Watched(flax.struct.PyTreeNode):
    """A buffer with statistics beside it.

    Attributes:
        buffer: The buffer.
        statistics: Of what is sampled from it.
    """

    buffer: Any
    statistics: Any


def rows(options: Options) -> list[Row]:
    """The row, if it is wanted."""
    if not any(options.wants(NAME, operation) for operation in OPERATIONS):
        return []
    capacity = options.capacity or (2**16 if options.quick else 2**20)
    workload = Workload(MUJOCO, capacity, 64, 256, 200)
    if capacity < 2 * workload.sample_size or capacity % (2 * workload.add_size):
        raise ValueError(
            f"capacity {capacity} does not suit {NAME}; use a multiple of {2 * workload.add_size} "
            f"from {2 * workload.sample_size} on"
        )
    binds: dict[str, Callable[[Workload], Binding]] = {
        "jaxbuf": bind_jaxbuf,
        "freshness": lambda job: bind_freshness(job, NEVER),
        "statistics": lambda job: bind_statistics(bind_jaxbuf(job)),
        "both": lambda job: bind_statistics(bind_freshness(job, NEVER)),
    }
    builders: dict[str, Callable[[], Any]] = {
        name: lambda bind=bind: ReplayContestant(bind, workload) for name, bind in binds.items()
    }
    builders["retiring"] = lambda: RetiringContestant(workload)
    title = (
        f"The cycle of per-mujoco, {capacity:,} slots, full, with limits on use and staleness "
        "and with statistics"
    )
    return [Row(NAME, title, OPERATIONS, builders, reference=REFERENCE)]


def bind_freshness(workload: Workload, max_staleness: int) -> Binding:
    """The buffer of the prioritized rows, whose items may retire."""
    jaxbuf = import_library("jaxbuf")
    freshness = jaxbuf.Freshness(max_use=NEVER, max_staleness=max_staleness)
    plain = bind_jaxbuf(workload)

    def create() -> Any:
        return jaxbuf.ItemBuffer.create(
            workload.transitions.example,
            workload.capacity,
            sampler=jaxbuf.Prioritized(alpha=workload.alpha),
            freshness=freshness,
        )

    def add(buffer: Any, items: Any) -> Any:
        return buffer.set_version(buffer.freshness_state.version + np.int32(1)).add(items)

    def update(buffer: Any, slots: Any, priority: jax.Array) -> Any:
        return buffer.mark_used(slots).update_priority(slots, priority)

    return dataclasses.replace(
        plain,
        create=create,
        add=add,
        update=update,
        call_add=jax.jit(add, donate_argnums=0),
        call_update=jax.jit(update, donate_argnums=0),
        call_weighted=None,
    )


def bind_statistics(binding: Binding) -> Binding:
    """A binding with statistics beside its buffer."""
    jaxbuf = import_library("jaxbuf")

    def create() -> Watched:
        buffer = binding.create()
        return Watched(buffer, jaxbuf.Statistics.create(buffer, window=100))

    def add(state: Watched, items: Any) -> Watched:
        return state.replace(buffer=binding.add(state.buffer, items))

    def update(state: Watched, batch: Any, priority: jax.Array) -> Watched:
        assert binding.update is not None
        statistics = state.statistics.sampled(state.buffer, batch, priority=priority)
        return Watched(binding.update(state.buffer, batch.slots, priority), statistics)

    return dataclasses.replace(
        binding,
        create=create,
        add=add,
        sample=lambda state, key: binding.sample(state.buffer, key),
        update=update,
        call_add=jax.jit(add, donate_argnums=0),
        call_sample=lambda state, key: binding.call_sample(state.buffer, key),
        call_update=jax.jit(update, donate_argnums=0),
        call_weighted=None,
        slots=lambda sample: sample.replace(data=()),
    )


class RetiringContestant(ReplayContestant):
    """jaxbuf with as many items that retire as come."""

    def __init__(self, workload: Workload):
        """Fills a buffer, and lets its older half retire."""
        self._kept = workload.capacity // 2
        limit = self._kept // workload.add_size
        super().__init__(lambda job: bind_freshness(job, limit), workload)
        # Filling brought many items under one version: now each add has one of its own.
        for _ in range(-(-workload.capacity // workload.add_size // workload.scan_length)):
            self._subject.state, _ = self._scan_add(self._subject.state, self._items)

    def verify(self) -> None:
        """Checks how many items are held after a scanned cycle, and that as many retire as come.

        Raises:
            UnequalWork: If there are others.
        """
        subject, workload = self._subject, self._workload
        before = subject.state.metrics()
        subject.state, drawn = self._scan_cycle(
            subject.state, self._items, self._scanned_keys, self._scanned_priorities
        )
        after = subject.state.metrics()
        retired = int(after["retired_stale"]) - int(before["retired_stale"])
        if int(after["size"]) != self._kept or retired != workload.add_size * workload.scan_length:
            raise UnequalWork(f"{after['size']} items are left and {retired} have retired")
        if not np.all(drawn.valid):
            raise UnequalWork("a sample has rows that are not valid")
        if workload.prioritized:
            self._draw_slots()

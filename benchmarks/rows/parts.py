"""The parts of the operations of the prioritized rows, each in a separate scan.

The sizes are those of the rows `per-...` with the same end of their names. In a scan of the whole
the parts overlap, so they are no sum; but what a part takes, the whole takes at least. What is
compared, and why it is equal work:

* **words**: random numbers for a batch.
* **descent**: the slots in which given points lie, in a tree that is not changed.
* **rows read**: the rows of the data at given slots, drawn before, written one after the other.
* **rows written**: one add's rows, to consecutive slots.
* **priorities set**: a batch of leaves, and all that lies above them.

**jaxbuf** and **pure** are jaxbuf with and without its kernels in C++; a tree of theirs keeps
sums, maxima and least positive numbers, that of **flashbax** sums. It has its own descent and
update of priorities here, and draws each number with a key of its own, as it does to sample; what
it does to read rows is what jaxbuf does.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.harness import (
    PURE,
    REFERENCE,
    Contestant,
    Operation,
    Options,
    Row,
    UnequalWork,
    import_library,
)
from benchmarks.limits import Traffic
from benchmarks.programs import compiled, scanned
from benchmarks.pure import PureContestant
from benchmarks.rows import per
from benchmarks.workload import Workload

OPERATIONS = (
    "scan words",
    "scan descent",
    "scan rows read",
    "scan rows written",
    "scan priorities set",
)
OPS = ("sum", "max", "min_positive")
WHOLES = ("per-mujoco", "per-mujoco-2048", "per-mujoco-large")


def rows(options: Options) -> list[Row]:
    """The parts of those rows whose batches differ and nothing else."""
    names = {whole: whole.replace("per-", "parts-") for whole in WHOLES}
    return [
        _row(name, whole, per.sized(whole, options), options)
        for whole, name in names.items()
        if any(options.wants(name, operation) for operation in OPERATIONS)
    ]


def _row(name: str, whole: str, workload: Workload, options: Options) -> Row:
    ours = functools.partial(JaxbufParts, workload, options)
    builders: dict[str, Callable[[], Contestant]] = {
        REFERENCE: ours,
        PURE: lambda: PureContestant(ours),
        "flashbax": lambda: FlashbaxParts(workload, options),
    }
    title = (
        f"What {whole} is made of: {workload.capacity:,} slots, {workload.add_size:,} rows "
        f"written, {workload.sample_size:,} of everything else"
    )
    return Row(name, title, OPERATIONS, builders)


@dataclasses.dataclass(frozen=True)
class Part:
    """A step that is repeated in a scan.

    Attributes:
        state: What the first step is given.
        step: From a state and a row of the inputs to the next state.
        inputs: Of all steps, leaves [L, ...].
    """

    state: Any
    step: Callable[[Any, Any], Any]
    inputs: Any


def _floors(workload: Workload) -> dict[str, Traffic]:
    """Returns the data that a step of each part has to move in any library."""
    batch, nodes = workload.sample_size, 4 * workload.capacity
    data = dataclasses.replace(workload, prioritized=False).traffic()
    return {
        "scan words": Traffic(4 * batch),
        "scan descent": Traffic(8 * batch, batch, nodes),
        "scan rows read": data["sample"],
        "scan rows written": data["add"],
        "scan priorities set": Traffic(4 * batch, batch, nodes),
    }


class Parts:
    """The parts that a library has to offer."""

    def __init__(self, workload: Workload, options: Options):
        """Makes trees and data of the size that the job says."""
        self._workload, rng = workload, np.random.default_rng(0)
        steps, batch = workload.scan_length, workload.sample_size
        self._priorities = rng.random(workload.capacity, np.float32) + np.float32(0.1)
        # As strata give them: in order, one in each part of the whole.
        strata = np.arange(batch) + rng.random((steps, batch))
        self._points = (strata / batch).astype(np.float32)
        self._slots = (self._points * workload.capacity).astype(np.int32)
        self._new = rng.random((steps, batch), np.float32) + np.float32(0.1)
        self._keys = jax.random.split(jax.random.key(0), steps)
        self._parts = self.parts()
        self._programs = {
            name: compiled(_repeated(part.step), options, part.state, part.inputs)
            for name, part in self._parts.items()
        }
        self._held = {name: _Held(part.state) for name, part in self._parts.items()}

    def parts(self) -> dict[str, Part]:
        """Each part, by the name of its operation."""
        raise NotImplementedError

    def found(self, points: jax.Array) -> jax.Array:
        """The slots of points, given as parts of the total."""
        raise NotImplementedError

    def verify(self) -> None:
        """Checks where points are found to lie.

        Raises:
            UnequalWork: If one lies elsewhere.
        """
        points = self._points[0]
        found = np.asarray(self.found(jnp.asarray(points)))
        ends = np.cumsum(self._priorities, dtype=np.float64)
        # Sums are rounded: a point may belong to a neighbour of the slot in which it lies.
        slack, sought = 1e-4 * ends[-1], points * ends[-1]
        below = ends[found] - self._priorities[found] > sought + slack
        if np.any(below | (ends[found] < sought - slack)):
            raise UnequalWork("a point is found where it does not lie")

    def operations(self) -> Mapping[str, Operation]:
        """A scan for each part."""
        floors = _floors(self._workload)
        return {
            name: Operation(
                scanned(
                    self._held[name],
                    lambda state, inputs, name=name: (self._programs[name](state, inputs), None),
                    lambda part=part: (part.inputs,),
                ),
                per_call=self._workload.scan_length,
                floor=floors[name].seconds,
            )
            for name, part in self._parts.items()
        }

    def facts(self) -> Mapping[str, str]:
        """Nothing."""
        return {}


@dataclasses.dataclass
class _Held:
    state: Any


def _repeated(step: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def program(state: Any, inputs: Any) -> Any:
        return jax.lax.scan(lambda state, row: (step(state, row), None), state, inputs)[0]

    return program


class JaxbufParts(Parts):
    """jaxbuf's parts."""

    def parts(self) -> dict[str, Part]:
        """All of them."""
        import_library("jaxbuf")
        from jaxbuf.core import storage
        from jaxbuf.core.random import random_words
        from jaxbuf.core.segment_tree import SegmentTree

        job, batch = self._workload, self._workload.sample_size
        jnp.arange(job.capacity, dtype=jnp.int32)

        def tree() -> Any:
            return SegmentTree.create(job.capacity, OPS).set_all(jnp.asarray(self._priorities))

        still = self._tree = tree()
        data = jax.device_put(job.transitions.items(np.arange(job.capacity)))
        new = jax.tree.map(lambda leaf: leaf[: job.add_size].copy(), data)
        first = jax.tree.map(lambda leaf: jnp.zeros((batch, *leaf.shape[1:]), leaf.dtype), data)
        starts = np.arange(job.scan_length, dtype=np.int32)[:, None] * job.add_size
        places = (starts + np.arange(job.add_size, dtype=np.int32)) % job.capacity
        points = jnp.asarray(self._points) * still.root()
        return {
            "scan words": Part(
                jnp.zeros((batch,), jnp.uint32),
                lambda _, key: random_words(key, (batch,)),
                self._keys,
            ),
            "scan descent": Part(
                (jnp.zeros((batch,), jnp.int32), still),
                lambda state, prefix: (state[1].find(prefix)[0], state[1]),
                points,
            ),
            "scan rows read": Part(
                (first, data),
                lambda state, slots: (storage.read(state[1], slots), state[1]),
                jnp.asarray(self._slots),
            ),
            "scan rows written": Part(
                jax.tree.map(jnp.copy, data),
                lambda state, slots: storage.write(state, new, slots),
                jnp.asarray(places),
            ),
            "scan priorities set": Part(
                tree(),
                lambda state, row: state.set(*row),
                (jnp.asarray(self._slots), jnp.asarray(self._new)),
            ),
        }

    def found(self, points: jax.Array) -> jax.Array:
        """See `Parts`."""
        return self._tree.find(points * self._tree.root())[0]


class FlashbaxParts(Parts):
    """The parts that flashbax has."""

    def parts(self) -> dict[str, Part]:
        """All but reading and writing rows."""
        sum_tree = import_library("flashbax.buffers.sum_tree")
        job, batch = self._workload, self._workload.sample_size
        every = jnp.arange(job.capacity, dtype=jnp.int32)
        fill = jax.jit(sum_tree.set_batch_bincount)

        def tree() -> Any:
            return fill(sum_tree.init(job.capacity), every, jnp.asarray(self._priorities))

        still = self._tree = tree()
        self._find = jax.vmap(sum_tree.sample, in_axes=(None, None, 0))
        return {
            "scan words": Part(
                jnp.zeros((batch,), jnp.float32),
                lambda _, key: jax.vmap(jax.random.uniform)(jax.random.split(key, batch)),
                self._keys,
            ),
            "scan descent": Part(
                (jnp.zeros((batch,), jnp.int32), still),
                lambda state, points: (self._find(state[1], None, points), state[1]),
                jnp.asarray(self._points),
            ),
            "scan priorities set": Part(
                tree(),
                lambda state, row: sum_tree.set_batch_scan(state, *row),
                (jnp.asarray(self._slots), jnp.asarray(self._new)),
            ),
        }

    def found(self, points: jax.Array) -> jax.Array:
        """See `Parts`."""
        return self._find(self._tree, None, points)

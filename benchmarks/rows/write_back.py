"""Changes of what is stored, beside the same changes written by hand on the same arrays.

A buffer of MuJoCo transitions, full; batches of 256 rows, and all rows for `map_field`. `hidden` is
a field of 512 floats, such as the recurrent states of R2D2, of an eighth as many items. What is
compared:

* **jaxbuf** and **pure**, jaxbuf with and without its kernels in C++, find out which rows are
  stale (one in sixteen), and let the last of several rows for one item win.
* **same** leaves the same arrays, written in plain JAX as one would without jaxbuf. It compares the
  laps in which slots were written, and finds the last of several rows on every backend, in an array
  of N numbers that it carries along: sorting takes longer. Beside scores it keeps the masses of
  softmax, and computes their sums, and the largest score, anew on the touched paths of trees with
  16 children, as `Softmax` does; it does not keep the number and the least of positive masses. The
  function of `map_field` gets what lies in empty slots, and its results for them are dropped.
* **hand** is `.at[index].set(...)` on the arrays of the buffer, which does none of that. Its
  scores are a bare array, what it removes it marks in an array of flags, and it maps a field in
  chunks, one `dynamic_update_slice` after the other.

`add` is there to compare with: a batch of as many rows.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

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
from benchmarks.programs import compiled, repeat_in_place, scanned
from benchmarks.pure import PureContestant
from benchmarks.transitions import MUJOCO, Items, Transitions

NAME = "write-back"
ROWS = 256
CHUNK = 4096
FLOAT = np.dtype(np.float32)
STATES = Transitions(
    {"hidden": jax.ShapeDtypeStruct((512,), FLOAT), "reward": jax.ShapeDtypeStruct((), FLOAT)}
)
FANOUT = 16
SCANS = (
    "add",
    "set_field reward",
    "set_field obs",
    "set_field hidden",
    "update_score",
    "add+remove",
    "map_field clip",
    "map_field model",
)
# Passes of `map_field` over all items in one program.
PASSES = 8
CALLS = ("set_field", "update_score")
OPERATIONS = (
    *[f"scan {name}" for name in SCANS],
    *[f"python {name}" for name in CALLS],
)


def rows(options: Options) -> list[Row]:
    """The row, if it is wanted."""
    if not any(options.wants(NAME, operation) for operation in OPERATIONS):
        return []
    capacity = options.capacity or (2**13 if options.quick else 2**18)
    ours = functools.partial(JaxbufChanges, capacity, options)
    builders: dict[str, Callable[[], Contestant]] = {
        REFERENCE: ours,
        PURE: lambda: PureContestant(ours),
        "same": lambda: SameChanges(capacity, options),
        "hand": lambda: HandChanges(capacity, options),
    }
    title = (
        f"{capacity:,} MuJoCo transitions, and {capacity // 8:,} states of 512 floats: changes of "
        f"{ROWS} rows and of all of them, beside those written by hand on the same arrays"
    )
    return [Row(NAME, title, OPERATIONS, builders)]


def clip(items: Mapping[str, jax.Array]) -> jax.Array:
    """The cheapest of functions for `map_field`: it reads and writes one number per item."""
    return jnp.clip(items["reward"], -1.0, 1.0)


def model(items: Mapping[str, jax.Array]) -> jax.Array:
    """A reward model that reads a few numbers of each item."""
    return items["obs"][:, 0] - 0.1 * jnp.sum(jnp.square(items["action"]), axis=1)


@dataclasses.dataclass(frozen=True)
class Job:
    """The data of a full buffer, and how they change.

    Attributes:
        kind: The kind of items.
        capacity: Slots N.
        index: The slots that change in each step of a scan, [L, 256]; a few of them repeat.
        stale: Whether they are of an item that was there before, [L, 256].
        values: New values of each field, leaves [L, 256, ...]; rewards are new scores as well.
        data: What fills the buffer, leaves [N, ...].
        new: What is added, leaves [256, ...].
    """

    kind: Transitions
    capacity: int
    index: np.ndarray
    stale: np.ndarray
    values: Mapping[str, np.ndarray]
    data: Items
    new: Items

    @classmethod
    def create(cls, kind: Transitions, capacity: int, steps: int, *fields: str) -> "Job":
        """Returns a job with scans of so many steps, which change these fields."""
        rng, shape = np.random.default_rng(0), (steps, ROWS)
        return cls(
            kind,
            capacity,
            rng.integers(0, capacity, shape, np.int32),
            rng.random(shape) < 1 / 16,
            {name: rng.random((*shape, *kind.leaves[name].shape), FLOAT) for name in fields},
            kind.items(np.arange(capacity)),
            kind.items(np.arange(ROWS)),
        )

    def written(self, field: np.ndarray, value: np.ndarray, stale: np.ndarray) -> np.ndarray:
        """A field [N, ...] after a scan that writes a value at `index`, except for stale rows."""
        field = field.copy()
        for index, rows, dropped in zip(self.index, value, stale, strict=True):
            for at, row in zip(index[~dropped], rows[~dropped], strict=True):
                field[at] = row
        return field


@dataclasses.dataclass
class Held:
    """A state that the timed calls go through."""

    state: Any


@dataclasses.dataclass(frozen=True)
class Change:
    """A change that is timed.

    Attributes:
        held: What it changes.
        step: From a state and a row of the inputs to the next state.
        inputs: Of all steps, leaves [L, ...].
    """

    held: Held
    step: Callable[[Any, Any], Any]
    inputs: Any


class Changes:
    """The changes in one library."""

    exact = True
    """Whether it drops stale rows."""

    def __init__(self, capacity: int, options: Options):
        """Fills the buffers."""
        steps, self._options = 16 if options.quick else 256, options
        self._job = Job.create(MUJOCO, capacity, steps, "reward", "obs")
        self._states = Job.create(STATES, capacity // 8, steps // 8, "hidden")
        self._jobs = {"reward": self._job, "obs": self._job, "hidden": self._states}
        self._changes = self.changes()
        self._calls = self.calls()
        self._programs = {
            name: compiled(_repeated(change.step), options, change.held.state, change.inputs)
            for name, change in self._changes.items()
        }

    def changes(self) -> dict[str, Change]:
        """Those of `SCANS` that it makes."""
        raise NotImplementedError

    def calls(self) -> dict[str, tuple[Held, Callable[[Any], Any]]]:
        """Each of `CALLS`: what it changes, and how."""
        raise NotImplementedError

    def data(self) -> Mapping[str, jax.Array]:
        """The fields that `set_field` and `map_field` change, and those of the same items."""
        raise NotImplementedError

    def scores(self) -> jax.Array:
        """The scores that `update_score` changes, [N]."""
        raise NotImplementedError

    def nodes(self) -> tuple[list[jax.Array], list[jax.Array]]:
        """The largest scores, and sums of masses, of the nodes above: level by level."""
        raise NotImplementedError

    def size(self) -> int:
        """The number of items that `add+remove` leaves."""
        raise NotImplementedError

    def _run(self, name: str) -> None:
        change = self._changes[name]
        change.held.state, _ = self._programs[name](change.held.state, change.inputs)

    def verify(self) -> None:
        """Checks what a scan of each change leaves.

        Raises:
            UnequalWork: If it is something else than it should be.
        """
        for name, job in self._jobs.items():
            before = np.asarray(self.data()[name])
            self._run(f"set_field {name}")
            expected = self._written(job, before, job.values[name])
            _check(f"set_field {name}", self.data()[name], expected)
        before = np.asarray(self.scores())
        self._run("update_score")
        expected = self._written(self._job, before, self._job.values["reward"])
        _check("update_score", self.scores(), expected)
        if self.exact:
            largest, sums = self.nodes()
            for found, leaves, reduce in (
                (largest, expected, np.max),
                (sums, np.exp(expected), np.sum),
            ):
                for level in found:
                    leaves = _reduced(leaves, reduce)
                    _check("update_score", level, leaves)
                assert leaves.shape == (1,)
        for name, function in (("clip", clip), ("model", model)):
            expected = function({name: jnp.asarray(leaf) for name, leaf in self.data().items()})
            self._run(f"map_field {name}")
            _check(f"map_field {name}", self.data()["reward"], expected)
        if "add+remove" in self._changes:
            self._run("add+remove")
            left = max(self._job.capacity - self._job.index.size, 0)
            _check("add+remove", self.size(), left)

    def _written(self, job: Job, field: np.ndarray, value: np.ndarray) -> np.ndarray:
        return job.written(field, value, job.stale & self.exact)

    def operations(self) -> Mapping[str, Operation]:
        """All of them."""
        found: dict[str, Operation] = {}
        for name, change in self._changes.items():
            run = scanned(change.held, self._programs[name], lambda change=change: (change.inputs,))
            steps = len(jax.tree.leaves(change.inputs)[0])
            found[f"scan {name}"] = Operation(run, per_call=steps)
        for name, (held, step) in self._calls.items():
            found[f"python {name}"] = Operation(
                functools.partial(repeat_in_place, held, step, self._options)
            )
        return found

    def facts(self) -> Mapping[str, str]:
        """Nothing."""
        return {}


def _check(name: str, found: Any, expected: Any) -> None:
    # Sums may be rounded otherwise.
    if not np.allclose(found, expected, rtol=1e-5, atol=1e-5):
        raise UnequalWork(f"{name} leaves something else than it should")


def _repeated(step: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def program(state: Any, inputs: Any) -> Any:
        return lax.scan(lambda state, row: (step(state, row), None), state, inputs)

    return program


def _reduced(level: np.ndarray, reduce: Callable[..., np.ndarray]) -> np.ndarray:
    """The next level of a tree of sums or of largest numbers."""
    starts = range(0, len(level), FANOUT)
    return np.asarray([reduce(level[start : start + FANOUT]) for start in starts])


class JaxbufChanges(Changes):
    """jaxbuf's changes."""

    def changes(self) -> dict[str, Change]:
        """See `Changes`."""
        self._jaxbuf, job = import_library("jaxbuf"), self._job
        self._plain, self._wide = Held(self._filled(job)), Held(self._filled(self._states))
        self._scored = Held(self._filled(job, sampler=self._jaxbuf.Softmax()))
        self._removable = Held(self._filled(job, parts=(self._jaxbuf.Removable(),)))
        index, new = jnp.asarray(job.index), jax.device_put(job.new)

        def replaced(buffer: Any, _: Any) -> Any:
            buffer, slots = buffer.insert(new)
            return buffer.remove(slots)

        def field(name: str, held: Held) -> Change:
            job = self._jobs[name]
            inputs = self._slots(job), jnp.asarray(job.values[name])
            return Change(held, lambda buffer, row: buffer.set_field(name, *row), inputs)

        def mapped(function: Callable[..., jax.Array]) -> Change:
            def step(buffer: Any, _: Any) -> Any:
                return buffer.map_field("reward", function, batch_size=CHUNK)

            return Change(self._plain, step, jnp.arange(PASSES))

        # Nothing is added where slots are kept: they have to stay fresh.
        return {
            "add": Change(Held(self._filled(job)), lambda buffer, _: buffer.add(new), index),
            "set_field reward": field("reward", self._plain),
            "set_field obs": field("obs", self._plain),
            "set_field hidden": field("hidden", self._wide),
            "update_score": Change(
                self._scored,
                lambda buffer, row: buffer.update_score(*row),
                (self._slots(job), jnp.asarray(job.values["reward"])),
            ),
            "add+remove": Change(self._removable, replaced, index),
            "map_field clip": mapped(clip),
            "map_field model": mapped(model),
        }

    def calls(self) -> dict[str, tuple[Held, Callable[[Any], Any]]]:
        """See `Changes`."""
        slots = jax.tree.map(lambda leaf: leaf[0], self._slots(self._job))
        value = jnp.asarray(self._job.values["reward"][0])
        set_field, update_score = self._jaxbuf.set_field, self._jaxbuf.update_score
        return {
            "set_field": (self._plain, lambda buffer: set_field(buffer, "reward", slots, value)),
            "update_score": (self._scored, lambda buffer: update_score(buffer, slots, value)),
        }

    def data(self) -> Mapping[str, jax.Array]:
        """See `Changes`."""
        return {**self._plain.state.data, "hidden": self._wide.state.data["hidden"]}

    def scores(self) -> jax.Array:
        """See `Changes`."""
        return self._scored.state.sampler_state.scores.leaves

    def nodes(self) -> tuple[list[jax.Array], list[jax.Array]]:
        """See `Changes`."""
        from jaxbuf.core.segment_tree import levels

        def above(tree: Any) -> list[jax.Array]:
            found: list[jax.Array] = []
            for level in levels(tree.capacity, len(tree.ops))[1:]:
                # The numbers of the first operation come first in each block.
                blocks = tree.nodes[level.start : level.stop].reshape(-1, level.stride)
                bits = blocks[:, :FANOUT].reshape(-1)[: level.count]
                found.append(lax.bitcast_convert_type(bits, jnp.float32))
            return [*found, tree.root(tree.ops[0])[None]]

        state = self._scored.state.sampler_state
        return above(state.scores), above(state.masses)

    def size(self) -> int:
        """See `Changes`."""
        return int(self._removable.state.size)

    def _filled(self, job: Job, **options: Any) -> Any:
        buffer = self._jaxbuf.ItemBuffer.create(job.kind.example, job.capacity, **options)
        score = {"score": np.zeros(job.capacity, np.float32)} if buffer.uses_score else {}
        return self._jaxbuf.add(buffer, job.data, **score)

    def _slots(self, job: Job) -> Any:
        """The slots of all steps, [L, 256]."""
        index = jnp.asarray(job.index)
        # All items are of the same lap.
        lap = self._plain.state.occupancy.generation(jnp.int32(0)) - jnp.asarray(job.stale, "u4")
        return self._jaxbuf.Slots(index=index, generation=lap)


class HandChanges(Changes):
    """The same on plain arrays, without a look at stale rows."""

    exact = False

    def changes(self) -> dict[str, Change]:
        """See `Changes`."""
        job = self._job
        self._plain, self._wide = (Held(jax.device_put(x.data)) for x in (job, self._states))
        self._scored = Held(jnp.zeros(job.capacity))
        self._removable = Held(self._ring())
        index, new = jnp.asarray(job.index), jax.device_put(job.new)

        def added(ring: Any, _: Any) -> Any:
            data, live, cursor = ring
            at = (cursor + jnp.arange(ROWS, dtype=jnp.int32)) % job.capacity
            data = jax.tree.map(lambda leaf, rows: leaf.at[at].set(rows), data, new)
            return data, live.at[at].set(True), (cursor + ROWS) % job.capacity

        def replaced(ring: Any, _: Any) -> Any:
            at = (ring[2] + jnp.arange(ROWS, dtype=jnp.int32)) % job.capacity
            data, live, cursor = added(ring, _)
            return data, live.at[at].set(False), cursor

        def field(name: str, held: Held) -> Change:
            job = self._jobs[name]
            inputs = jnp.asarray(job.index), jnp.asarray(job.values[name])
            return Change(held, functools.partial(_bare, name), inputs)

        return {
            "add": Change(Held(self._ring()), added, index),
            "set_field reward": field("reward", self._plain),
            "set_field obs": field("obs", self._plain),
            "set_field hidden": field("hidden", self._wide),
            "update_score": Change(
                self._scored,
                lambda scores, row: scores.at[row[0]].set(row[1]),
                (index, jnp.asarray(job.values["reward"])),
            ),
            "add+remove": Change(self._removable, replaced, index),
            "map_field clip": Change(self._plain, _in_chunks(clip), jnp.arange(PASSES)),
            "map_field model": Change(self._plain, _in_chunks(model), jnp.arange(PASSES)),
        }

    def calls(self) -> dict[str, tuple[Held, Callable[[Any], Any]]]:
        """See `Changes`."""
        row = jax.tree.map(lambda leaf: leaf[0], self._changes["update_score"].inputs)
        write, score = (
            jax.jit(self._changes[name].step, donate_argnums=0)
            for name in ("set_field reward", "update_score")
        )
        return {
            "set_field": (self._plain, lambda data: write(data, row)),
            "update_score": (self._scored, lambda scores: score(scores, row)),
        }

    def data(self) -> Mapping[str, jax.Array]:
        """See `Changes`."""
        return {**self._plain.state, "hidden": self._wide.state["hidden"]}

    def scores(self) -> jax.Array:
        """See `Changes`."""
        return self._scored.state

    def size(self) -> int:
        """See `Changes`."""
        return int(jnp.sum(self._removable.state[1]))

    def _ring(self) -> Any:
        return jax.device_put(self._job.data), jnp.ones(self._job.capacity, bool), jnp.int32(0)


def _bare(name: str, data: Any, row: Any) -> Any:
    index, value = row
    return {**data, name: data[name].at[index].set(value)}


class SameChanges(HandChanges):
    """The same on plain arrays, with the same results."""

    exact = True

    def changes(self) -> dict[str, Change]:
        """See `Changes`."""
        self._plain, self._wide = (Held(Ring.full(job)) for job in (self._job, self._states))
        zeros = jnp.zeros(self._job.capacity)
        trees = _tree(zeros, jnp.max, -jnp.inf), _tree(jnp.exp(zeros), jnp.sum, 0.0)
        self._scored = Held((Ring.full(self._job, data=False), trees))

        def inputs(name: str) -> Any:
            job = self._jobs[name]
            # Items of the first lap are there now.
            return jnp.asarray(job.index), 1 - jnp.asarray(job.stale, "i4"), job.values[name]

        def field(name: str, held: Held) -> Change:
            def step(ring: Ring, row: Any) -> Ring:
                index, lap, value = row
                ring, at = ring.kept(index, lap)
                return ring.replace(data={**ring.data, name: _put(ring.data[name], at, value)})

            return Change(held, step, jax.device_put(inputs(name)))

        def scored(state: Any, row: Any) -> Any:
            (ring, (scores, masses)), (index, lap, value) = state, row
            ring, at = ring.kept(index, lap)
            scores = with_leaves(scores, at, value, jnp.max)
            return ring, (scores, with_leaves(masses, at, jnp.exp(value), jnp.sum))

        def mapped(function: Callable[..., jax.Array]) -> Change:
            def step(ring: Ring, _: Any) -> Ring:
                return ring.replace(data=_in_chunks(function, ring.count)(ring.data, None))

            return Change(self._plain, step, jnp.arange(PASSES))

        return {
            "set_field reward": field("reward", self._plain),
            "set_field obs": field("obs", self._plain),
            "set_field hidden": field("hidden", self._wide),
            "update_score": Change(self._scored, scored, jax.device_put(inputs("reward"))),
            "map_field clip": mapped(clip),
            "map_field model": mapped(model),
        }

    def data(self) -> Mapping[str, jax.Array]:
        """See `Changes`."""
        return {**self._plain.state.data, "hidden": self._wide.state.data["hidden"]}

    def scores(self) -> jax.Array:
        """See `Changes`."""
        _, (scores, _) = self._scored.state
        return scores[0][: self._job.capacity]

    def nodes(self) -> tuple[list[jax.Array], list[jax.Array]]:
        """See `Changes`."""
        counts, count = list[int](), self._job.capacity
        while count > 1:
            count = -(-count // FANOUT)
            counts.append(count)
        largest, sums = (
            [level[:count] for level, count in zip(tree[1:], counts, strict=True)]
            for tree in self._scored.state[1]
        )
        return largest, sums


class Ring(struct.PyTreeNode):
    """A ring written by hand.

    Attributes:
        data: The items, leaves [N, ...].
        cursor: The slot that is written next.
        lap: The number of times that it came by the first slot.
        count: The number of items.
        owner: Scratch space for the number of the last row for each slot, [N].
    """

    data: Any
    cursor: jax.Array
    lap: jax.Array
    count: jax.Array
    owner: jax.Array

    @classmethod
    def full(cls, job: Job, *, data: bool = True) -> "Ring":
        """Returns a ring that was filled once."""
        held = jax.device_put(job.data) if data else None
        count, owner = jnp.int32(job.capacity), jnp.zeros(job.capacity, jnp.int32)
        return cls(held, jnp.int32(0), jnp.int32(2), count, owner)

    def kept(self, index: jax.Array, lap: jax.Array) -> tuple["Ring", jax.Array]:
        """Returns the slots of rows; a row that is not to be written is past the end."""
        nowhere = self.owner.shape[0]
        held = jnp.where(index < self.cursor, self.lap, self.lap - 1) == lap
        at = jnp.where(held & (index < self.count), index, nowhere)
        row = jnp.arange(1, len(index) + 1, dtype=jnp.int32)
        owner = self.owner.at[at].set(0, mode="drop").at[at].max(row, mode="drop")
        last = owner.at[at].get(mode="clip") == row
        return self.replace(owner=owner), jnp.where(last, at, nowhere)


def _put(array: jax.Array, index: jax.Array, value: jax.Array) -> jax.Array:
    return array.at[index].set(value, mode="drop", unique_indices=True)


def _tree(leaves: jax.Array, reduce: Callable[..., jax.Array], none: float) -> list[jax.Array]:
    """Returns the levels of a tree; all but the root have a multiple of 16 numbers."""
    levels = list[jax.Array]()
    while len(leaves) > 1:
        levels.append(jnp.pad(leaves, (0, -len(leaves) % FANOUT), constant_values=none))
        leaves = reduce(levels[-1].reshape(-1, FANOUT), axis=1)
    return [*levels, leaves]


def with_leaves(
    levels: list[jax.Array], at: jax.Array, value: jax.Array, reduce: Callable[..., jax.Array]
) -> list[jax.Array]:
    """Returns the tree with new leaves: nodes above are computed anew, on their paths or all."""
    below, node = _put(levels[0], at, value), at
    new = [below]
    for level in levels[1:]:
        node, blocks = node // FANOUT, below.reshape(-1, FANOUT)
        if len(blocks) > len(at):
            below = level.at[node].set(reduce(blocks[node], axis=1), mode="drop")
        else:
            below = level.at[: len(blocks)].set(reduce(blocks, axis=1))
        new.append(below)
    return new


def _in_chunks(
    function: Callable[..., jax.Array], count: jax.Array | None = None
) -> Callable[[Any, Any], Any]:
    """Returns a step that maps the rewards, some at a time, of all slots or of the first ones."""

    def step(data: Any, _: Any) -> Any:
        size = data["reward"].shape[0]
        rows = min(CHUNK, size)

        def chunk(i: jax.Array, reward: jax.Array) -> jax.Array:
            # Where the last chunk would end outside, it begins earlier.
            whole = {**data, "reward": reward}
            items = {
                name: lax.dynamic_slice_in_dim(leaf, i * rows, rows) for name, leaf in whole.items()
            }
            new = function(items)
            if count is not None:
                held = i * rows + jnp.arange(rows, dtype=jnp.int32) < count
                new = jnp.where(held, new, items["reward"])
            return lax.dynamic_update_slice_in_dim(reward, new, i * rows, 0)

        return {**data, "reward": lax.fori_loop(0, -(-size // rows), chunk, data["reward"])}

    return step

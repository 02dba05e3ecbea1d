"""Changes of what is stored, beside the same changes written by hand on the same arrays.

A buffer of MuJoCo transitions, full; batches of 256 rows, and all rows for `map_field`. What is
compared, and why the work is not quite equal:

* **jaxbuf** and **pure**, jaxbuf with and without its kernels in C++, find out which rows are
  stale, and let the last of several rows for one item win.
* **hand** is `.at[index].set(...)` on the arrays of the buffer, which does neither. Its scores are
  an array, where `Softmax` also keeps sums of them; what it removes it marks in an array of flags;
  and it maps a field in chunks, one `dynamic_update_slice` after the other.

`add` is there to compare with: a batch of as many rows.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
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
from benchmarks.transitions import MUJOCO, Items

NAME = "write-back"
ROWS = 256
CHUNK = 4096
SCANS = ("add", "set_field reward", "set_field obs", "update_score", "add+remove")
WHOLES = ("map_field clip", "map_field model")
CALLS = ("set_field", "update_score")
OPERATIONS = (
    *[f"scan {name}" for name in SCANS],
    *[f"whole {name}" for name in WHOLES],
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
        "hand": lambda: HandChanges(capacity, options),
    }
    title = (
        f"{capacity:,} MuJoCo transitions, full: changes of {ROWS} rows and of all of them, beside "
        "those written by hand on the same arrays"
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
        capacity: Slots N.
        index: The slots that change in each step of a scan, [L, 256]; a few of them repeat.
        reward: New rewards, and new scores, [L, 256].
        obs: New observations, [L, 256, 17].
        data: What fills the buffer, leaves [N, ...].
        new: What is added, leaves [256, ...].
    """

    capacity: int
    index: np.ndarray
    reward: np.ndarray
    obs: np.ndarray
    data: Items
    new: Items

    @classmethod
    def create(cls, capacity: int, steps: int) -> "Job":
        """Returns a job with scans of so many steps."""
        rng, shape = np.random.default_rng(0), (steps, ROWS)
        return cls(
            capacity,
            rng.integers(0, capacity, shape, np.int32),
            rng.random(shape, np.float32),
            rng.random((*shape, *MUJOCO.leaves["obs"].shape), np.float32),
            MUJOCO.items(np.arange(capacity)),
            MUJOCO.items(np.arange(ROWS)),
        )

    def written(self, field: np.ndarray, value: np.ndarray) -> np.ndarray:
        """A field [N, ...] after a scan that writes a value at `index`."""
        field = field.copy()
        for index, rows in zip(self.index, value, strict=True):
            for at, row in zip(index, rows, strict=True):
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

    def __init__(self, capacity: int, options: Options):
        """Fills the buffers."""
        self._job, self._options = Job.create(capacity, 4 if options.quick else 256), options
        self._changes = self.changes()
        self._calls = self.calls()
        self._programs = {
            name: compiled(_repeated(change.step), options, change.held.state, change.inputs)
            for name, change in self._changes.items()
        }

    def changes(self) -> dict[str, Change]:
        """Each of `SCANS` and `WHOLES`."""
        raise NotImplementedError

    def calls(self) -> dict[str, tuple[Held, Callable[[Any], Any]]]:
        """Each of `CALLS`: what it changes, and how."""
        raise NotImplementedError

    def data(self) -> Mapping[str, jax.Array]:
        """The data that `set_field` and `map_field` change."""
        raise NotImplementedError

    def scores(self) -> jax.Array:
        """The scores that `update_score` changes, [N]."""
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
        job = self._job
        for name, value in (("reward", job.reward), ("obs", job.obs)):
            before = np.asarray(self.data()[name])
            self._run(f"set_field {name}")
            _check(f"set_field {name}", self.data()[name], job.written(before, value))
        before = np.asarray(self.scores())
        self._run("update_score")
        _check("update_score", self.scores(), job.written(before, job.reward))
        for name, function in (("clip", clip), ("model", model)):
            expected = function({name: jnp.asarray(leaf) for name, leaf in self.data().items()})
            self._run(f"map_field {name}")
            _check(f"map_field {name}", self.data()["reward"], expected)
        self._run("add+remove")
        _check("add+remove", self.size(), max(job.capacity - job.index.size, 0))

    def operations(self) -> Mapping[str, Operation]:
        """All of them."""
        found: dict[str, Operation] = {}
        for name, change in self._changes.items():
            run = scanned(change.held, self._programs[name], lambda change=change: (change.inputs,))
            if name in WHOLES:
                found[f"whole {name}"] = Operation(run)
            else:
                found[f"scan {name}"] = Operation(run, per_call=len(self._job.index))
        for name, (held, step) in self._calls.items():
            found[f"python {name}"] = Operation(
                functools.partial(repeat_in_place, held, step, self._options)
            )
        return found

    def facts(self) -> Mapping[str, str]:
        """Nothing."""
        return {}


def _check(name: str, found: Any, expected: Any) -> None:
    # Scores are read back from probabilities.
    if not np.allclose(found, expected, rtol=1e-5, atol=1e-5):
        raise UnequalWork(f"{name} leaves something else than it should")


def _repeated(step: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def program(state: Any, inputs: Any) -> Any:
        if inputs is None:
            return step(state, None), None
        return lax.scan(lambda state, row: (step(state, row), None), state, inputs)

    return program


class JaxbufChanges(Changes):
    """jaxbuf's changes."""

    def changes(self) -> dict[str, Change]:
        """See `Changes`."""
        self._jaxbuf, job = import_library("jaxbuf"), self._job
        self._plain = Held(self._filled())
        self._scored = Held(self._filled(sampler=self._jaxbuf.Softmax()))
        self._removable = Held(self._filled(parts=(self._jaxbuf.Removable(),)))
        index, new = jnp.asarray(job.index), jax.device_put(job.new)
        # Nothing is added where slots are kept: they have to stay fresh.
        slots = self._slots(index, jax.vmap(self._plain.state.occupancy.generation)(index))
        reward, obs = jnp.asarray(job.reward), jnp.asarray(job.obs)

        def replaced(buffer: Any, _: Any) -> Any:
            buffer, slots = buffer.insert(new)
            return buffer.remove(slots)

        return {
            "add": Change(Held(self._filled()), lambda buffer, _: buffer.add(new), index),
            "set_field reward": Change(
                self._plain, lambda buffer, row: buffer.set_field("reward", *row), (slots, reward)
            ),
            "set_field obs": Change(
                self._plain, lambda buffer, row: buffer.set_field("obs", *row), (slots, obs)
            ),
            "update_score": Change(
                self._scored, lambda buffer, row: buffer.update_score(*row), (slots, reward)
            ),
            "add+remove": Change(self._removable, replaced, index),
            "map_field clip": Change(
                self._plain,
                lambda buffer, _: buffer.map_field("reward", clip, batch_size=CHUNK),
                None,
            ),
            "map_field model": Change(
                self._plain,
                lambda buffer, _: buffer.map_field("reward", model, batch_size=CHUNK),
                None,
            ),
        }

    def calls(self) -> dict[str, tuple[Held, Callable[[Any], Any]]]:
        """See `Changes`."""
        index, value = jnp.asarray(self._job.index[0]), jnp.asarray(self._job.reward[0])
        slots = self._slots(index, self._plain.state.occupancy.generation(index))
        set_field, update_score = self._jaxbuf.set_field, self._jaxbuf.update_score
        return {
            "set_field": (self._plain, lambda buffer: set_field(buffer, "reward", slots, value)),
            "update_score": (self._scored, lambda buffer: update_score(buffer, slots, value)),
        }

    def data(self) -> Mapping[str, jax.Array]:
        """See `Changes`."""
        return self._plain.state.data

    def scores(self) -> jax.Array:
        """See `Changes`."""
        buffer = self._scored.state
        every = jnp.arange(buffer.capacity, dtype=jnp.int32)
        # The logarithm of the probability is the score, and a constant.
        known = jnp.log(
            buffer.get(self._slots(every, buffer.occupancy.generation(every))).probability
        )
        return known + buffer.metrics()["score_max"] - jnp.max(known)

    def size(self) -> int:
        """See `Changes`."""
        return int(self._removable.state.size)

    def _filled(self, **options: Any) -> Any:
        jaxbuf, job = self._jaxbuf, self._job
        buffer = jaxbuf.ItemBuffer.create(MUJOCO.example, job.capacity, **options)
        score = {"score": np.zeros(job.capacity, np.float32)} if buffer.uses_score else {}
        return jaxbuf.add(buffer, job.data, **score)

    def _slots(self, index: jax.Array, generation: jax.Array) -> Any:
        return self._jaxbuf.Slots(index=index, generation=generation)


class HandChanges(Changes):
    """The same on plain arrays."""

    def changes(self) -> dict[str, Change]:
        """See `Changes`."""
        job = self._job
        self._plain = Held(jax.device_put(job.data))
        self._scored = Held(jnp.zeros(job.capacity))
        self._removable = Held(self._ring())
        index, new = jnp.asarray(job.index), jax.device_put(job.new)
        reward, obs = jnp.asarray(job.reward), jnp.asarray(job.obs)

        def added(ring: Any, _: Any) -> Any:
            data, live, cursor = ring
            at = (cursor + jnp.arange(ROWS, dtype=jnp.int32)) % job.capacity
            data = jax.tree.map(lambda leaf, rows: leaf.at[at].set(rows), data, new)
            return data, live.at[at].set(True), (cursor + ROWS) % job.capacity

        def replaced(ring: Any, _: Any) -> Any:
            at = (ring[2] + jnp.arange(ROWS, dtype=jnp.int32)) % job.capacity
            data, live, cursor = added(ring, _)
            return data, live.at[at].set(False), cursor

        def written(field: str) -> Callable[[Any, Any], Any]:
            return lambda data, row: {**data, field: data[field].at[row[0]].set(row[1])}

        return {
            "add": Change(Held(self._ring()), added, index),
            "set_field reward": Change(self._plain, written("reward"), (index, reward)),
            "set_field obs": Change(self._plain, written("obs"), (index, obs)),
            "update_score": Change(
                self._scored, lambda scores, row: scores.at[row[0]].set(row[1]), (index, reward)
            ),
            "add+remove": Change(self._removable, replaced, index),
            "map_field clip": Change(self._plain, _in_chunks(clip), None),
            "map_field model": Change(self._plain, _in_chunks(model), None),
        }

    def calls(self) -> dict[str, tuple[Held, Callable[[Any], Any]]]:
        """See `Changes`."""
        index, value = jnp.asarray(self._job.index[0]), jnp.asarray(self._job.reward[0])

        def set_field(data: Any, index: jax.Array, value: jax.Array) -> Any:
            return {**data, "reward": data["reward"].at[index].set(value)}

        def update_score(scores: jax.Array, index: jax.Array, value: jax.Array) -> jax.Array:
            return scores.at[index].set(value)

        write = jax.jit(set_field, donate_argnums=0)
        score = jax.jit(update_score, donate_argnums=0)
        return {
            "set_field": (self._plain, lambda data: write(data, index, value)),
            "update_score": (self._scored, lambda scores: score(scores, index, value)),
        }

    def data(self) -> Mapping[str, jax.Array]:
        """See `Changes`."""
        return self._plain.state

    def scores(self) -> jax.Array:
        """See `Changes`."""
        return self._scored.state

    def size(self) -> int:
        """See `Changes`."""
        return int(jnp.sum(self._removable.state[1]))

    def _ring(self) -> Any:
        return jax.device_put(self._job.data), jnp.ones(self._job.capacity, bool), jnp.int32(0)


def _in_chunks(function: Callable[..., jax.Array]) -> Callable[[Any, Any], Any]:
    """Returns a step that maps the rewards, some at a time."""

    def step(data: Any, _: Any) -> Any:
        size = data["reward"].shape[0]
        rows = min(CHUNK, size)

        def chunk(i: jax.Array, reward: jax.Array) -> jax.Array:
            # Where the last chunk would end outside, it begins earlier.
            whole = {**data, "reward": reward}
            items = {
                name: lax.dynamic_slice_in_dim(leaf, i * rows, rows) for name, leaf in whole.items()
            }
            return lax.dynamic_update_slice_in_dim(reward, function(items), i * rows, 0)

        return {**data, "reward": lax.fori_loop(0, -(-size // rows), chunk, data["reward"])}

    return step

"""Eight seeds with a buffer each: one `vmap` over all of them, or one after the other.

Prioritized replay as in `per-mujoco`, with 2^17 slots for each seed. What is compared, and why it
is equal work: both contestants are jaxbuf, get the same keys, items and priorities, and must draw
the same items, seed by seed.

* **vmap**: the buffers are one pytree with a leading axis, and every operation is mapped over it.
* **separate**: eight buffers. Inside a scan every step goes through them one after the other, in
  one program; from Python each has its own three calls.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.harness import Operation, Options, Row, UnequalWork, import_library
from benchmarks.programs import compiled, memory_beyond, repeat_in_place, scanned
from benchmarks.transitions import MUJOCO
from benchmarks.workload import Workload

NAME = "seeds"
OPERATIONS = ("python cycle", "scan cycle")
SEEDS = 8


def rows(options: Options) -> list[Row]:
    """The row, if it is wanted."""
    if not any(options.wants(NAME, operation) for operation in OPERATIONS):
        return []
    capacity = options.capacity or (2**14 if options.quick else 2**17)
    workload = Workload(MUJOCO, capacity, 64, 256, 50)
    title = (
        f"{SEEDS} buffers of {capacity:,} MuJoCo transitions, full; add 64, sample and update 256 "
        "in each"
    )
    builders = {
        "vmap": lambda: SeedsContestant(workload, options, mapped=True),
        "separate": lambda: SeedsContestant(workload, options, mapped=False),
    }
    return [Row(NAME, title, OPERATIONS, builders, reference="vmap")]


class SeedsContestant:
    """Several buffers, in one pytree or apart.

    Attributes:
        state: The buffers: one pytree with leaves [SEEDS, ...], or a tuple.
    """

    def __init__(self, workload: Workload, options: Options, mapped: bool):
        """Fills the buffers.

        Args:
            workload: The job of each.
            options: How to compile and wait.
            mapped: Whether they are one pytree.
        """
        self._jaxbuf = import_library("jaxbuf")
        self._workload, self._options, self._mapped = workload, options, mapped
        serials = np.arange(SEEDS * workload.capacity, dtype=np.int64).reshape(SEEDS, -1)
        buffers = [self._filled(row) for row in serials]
        self.state: Any = tuple(buffers)
        if mapped:
            self.state = jax.tree.map(lambda *leaves: jnp.stack(leaves), *buffers)
        items = workload.transitions.items(np.arange(SEEDS * workload.add_size))
        self._items = jax.device_put(
            {name: leaf.reshape(SEEDS, -1, *leaf.shape[1:]) for name, leaf in items.items()}
        )
        length = workload.scan_length
        self._keys = jax.random.split(jax.random.key(0), (length, SEEDS))
        self._priorities = jax.random.uniform(
            jax.random.key(1), (length, SEEDS, workload.sample_size), minval=0.05
        )
        self._scan = compiled(self._program, options, self.state, *self._arguments())
        self._calls = self._python_calls()

    def _filled(self, serials: np.ndarray) -> Any:
        workload = self._workload
        buffer = self._jaxbuf.ItemBuffer.create(
            workload.transitions.example,
            workload.capacity,
            sampler=self._jaxbuf.Prioritized(alpha=workload.alpha),
        )
        for part in np.array_split(serials, max(1, workload.capacity // 2**16)):
            buffer = self._jaxbuf.add(buffer, workload.transitions.items(part))
        return buffer

    def _arguments(self) -> tuple[Any, ...]:
        return self._items, self._keys, self._priorities

    def _program(self, state: Any, items: Any, keys: jax.Array, priorities: jax.Array) -> Any:
        """A scan of cycles; returns the buffers and the rewards last drawn [SEEDS, B]."""
        size = self._workload.sample_size

        def cycle(buffer: Any, items: Any, key: jax.Array, priority: jax.Array) -> Any:
            buffer = buffer.add(items)
            drawn = buffer.sample(key, size)
            # Every leaf has to be there before the priorities are.
            sums = [
                leaf.reshape(size, -1).astype(jnp.float32).sum(1) for leaf in drawn.data.values()
            ]
            priority = jnp.where(sum(sums) < -1.0, 1.0, priority)
            return buffer.update_priority(drawn.slots, priority), drawn.data["reward"]

        def body(carry: Any, row: tuple[jax.Array, jax.Array]) -> Any:
            state, _ = carry
            if self._mapped:
                return jax.vmap(cycle)(state, items, *row), None
            parts = [_seed((items, *row), seed) for seed in range(SEEDS)]
            done = [cycle(buffer, *part) for buffer, part in zip(state, parts, strict=True)]
            return (tuple(buffer for buffer, _ in done), jnp.stack([r for _, r in done])), None

        nothing = jnp.zeros((SEEDS, size), jnp.float32)
        return jax.lax.scan(body, (state, nothing), (keys, priorities))[0]

    def _python_calls(self) -> Sequence[Callable[..., Any]]:
        size, jaxbuf = self._workload.sample_size, self._jaxbuf
        if not self._mapped:
            return (
                jaxbuf.add,
                lambda buffer, key: jaxbuf.sample(buffer, key, size),
                (jaxbuf.update_priority),
            )
        add = jax.vmap(lambda buffer, items: buffer.add(items))
        update = jax.vmap(lambda buffer, slots, priority: buffer.update_priority(slots, priority))
        return (
            jax.jit(add, donate_argnums=0),
            jax.jit(jax.vmap(lambda buffer, key: buffer.sample(key, size))),
            jax.jit(update, donate_argnums=0),
        )

    def verify(self) -> None:
        """Checks that every seed draws what it would draw alone.

        Raises:
            UnequalWork: If one does not.
        """
        self.state, drawn = self._scan(self.state, *self._arguments())
        for seed in range(SEEDS):
            alone = _Alone(self, seed)
            if not np.array_equal(alone.rewards, drawn[seed]):
                raise UnequalWork(f"seed {seed} draws other items than it would alone")

    def operations(self) -> Mapping[str, Operation]:
        """The cycle, of all seeds together."""
        moved = self._workload.traffic()["cycle"] * SEEDS
        return {
            "python cycle": Operation(self._python_cycle),
            "scan cycle": Operation(
                scanned(self, self._scan, self._arguments),
                self._workload.scan_length,
                floor=moved.seconds,
                memory=functools.partial(memory_beyond, self._scan),
            ),
        }

    def facts(self) -> Mapping[str, str]:
        """None."""
        return {}

    def _python_cycle(self, calls: int) -> float:
        add, sample, update = self._calls
        per_call = _seed((self._keys, self._priorities), 0)

        def one(buffer: Any, items: Any, key: jax.Array, priority: jax.Array) -> Any:
            buffer = add(buffer, items)
            return update(buffer, sample(buffer, key).slots, priority)

        def step(state: Any) -> Any:
            if self._mapped:
                return one(state, self._items, *per_call)
            return tuple(one(buffer, *part) for buffer, part in zip(state, parts, strict=True))

        parts = [_seed((self._items, *per_call), seed) for seed in range(SEEDS)]
        jax.block_until_ready(parts)
        return repeat_in_place(self, step, self._options, calls)


class _Alone:
    """The draws of one seed at the end of the scan when it runs alone.

    Attributes:
        rewards: Those drawn [B].
    """

    def __init__(self, contestant: SeedsContestant, seed: int):
        workload = contestant._workload
        first = seed * workload.capacity
        buffer = contestant._filled(np.arange(first, first + workload.capacity))
        items = _seed(contestant._items, seed)

        @functools.partial(jax.jit, donate_argnums=0)
        def cycle(buffer: Any, key: jax.Array, priority: jax.Array) -> Any:
            buffer = buffer.add(items)
            drawn = buffer.sample(key, workload.sample_size)
            return buffer.update_priority(drawn.slots, priority), drawn.data["reward"]

        for key, priority in zip(contestant._keys, contestant._priorities, strict=True):
            buffer, self.rewards = cycle(buffer, key[seed], priority[seed])


def _seed(tree: Any, seed: int) -> Any:
    """Row `seed` of every leaf."""
    return jax.tree.map(lambda leaf: leaf[seed], tree)

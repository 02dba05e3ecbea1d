"""The loops around a prioritized buffer of a JAX library: the same for every library.

From Python, a call is timed until its result is there (`--wait call`), or a block of calls until
the last result is there (`--wait block`). Inside `lax.scan` the buffer is the carry and donated;
the sampled batch is a carry too, so that every iteration has to write it out in full, as for a
learner, and cannot be optimized away. A cycle adds, then samples, then updates the sampled rows.
"""

import dataclasses
import itertools
import operator
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import equality
from benchmarks.harness import Operation, Options, UnequalWork, repeat_calls
from benchmarks.transitions import Items
from benchmarks.workload import Workload

State = Any
Sample = Any

NUM_ARGUMENTS = 64
"""How many different keys, priorities and sampled slots the calls from Python go through."""


@dataclasses.dataclass(frozen=True)
class Binding:
    """A JAX library's prioritized buffer, as its users call it.

    Attributes:
        create: Makes an empty state.
        add: `(state, items) -> state`, pure, for use inside a scan.
        sample: `(state, key) -> sample`, pure.
        update: `(state, slots, priority) -> state`, pure.
        call_add: The same from Python; donates the state.
        call_sample: The same from Python.
        call_update: The same from Python; donates the state.
        call_weights: `(state, sample) -> [B]` importance weights from Python, the largest of the
            batch being 1.
        data: Picks the leaves [B, ...] of the items out of a sample.
        slots: Picks what `update` wants out of a sample.
        probability: Picks the probabilities [B] out of a sample.
    """

    create: Callable[[], State]
    add: Callable[[State, Any], State]
    sample: Callable[[State, jax.Array], Sample]
    update: Callable[[State, Any, jax.Array], State]
    call_add: Callable[[State, Any], State]
    call_sample: Callable[[State, jax.Array], Sample]
    call_update: Callable[[State, Any, jax.Array], State]
    call_weights: Callable[[State, Sample], jax.Array]
    data: Callable[[Sample], dict[str, jax.Array]]
    slots: Callable[[Sample], Any]
    probability: Callable[[Sample], jax.Array]


def compiler_options(options: Options) -> dict[str, str] | None:
    """XLA options for every program that the benchmark compiles, whichever the library."""
    if options.scheduler == "memory" and jax.default_backend() == "cpu":
        return {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}
    return None


class JaxSubject:
    """A binding's state behind the interface of the checks."""

    def __init__(self, binding: Binding, workload: Workload):
        """Creates the buffer, and fills it with transitions 0, 1, ...

        Args:
            binding: The library.
            workload: The job.
        """
        self.binding = binding
        self.state = binding.create()
        self.model = equality.RingModel(workload)
        equality.fill(self)

    def add(self, items: Items) -> None:
        """See `equality.Subject`."""
        self.state = self.binding.call_add(self.state, jax.device_put(items))

    def sample(self, seed: int) -> equality.CheckedSample:
        """See `equality.Subject`."""
        return self.checked(self.binding.call_sample(self.state, jax.random.key(seed)))

    def checked(self, sample: Sample) -> equality.CheckedSample:
        """A sample of the library as the checks want it."""
        return equality.CheckedSample(
            data={name: np.asarray(leaf) for name, leaf in self.binding.data(sample).items()},
            slots=self.binding.slots(sample),
            probability=np.asarray(self.binding.probability(sample)),
        )

    def update(self, slots: Any, priority: np.ndarray) -> None:
        """See `equality.Subject`."""
        self.state = self.binding.call_update(self.state, slots, jnp.asarray(priority))


class PrioritizedContestant:
    """A JAX library on a prioritized replay job; a `benchmarks.harness.Contestant`."""

    def __init__(self, bind: Callable[[Workload], Binding], workload: Workload, options: Options):
        """Fills a buffer to capacity.

        Args:
            bind: Makes the library's binding for a workload.
            workload: The job.
            options: How to compile and wait.
        """
        self._bind = bind
        self._workload = workload
        self._wait_each = options.wait == "call"
        self._subject = JaxSubject(bind(workload), workload)
        self._binding = self._subject.binding
        keys = jax.random.split(jax.random.key(0), workload.scan_length)
        serials = np.arange(workload.add_size)
        self._items = jax.device_put(workload.transitions.items(serials))
        self._scanned_keys = keys
        self._scanned_priorities = jax.random.uniform(
            jax.random.key(1), (workload.scan_length, workload.sample_size), minval=0.05
        )
        self._keys = list(jax.random.split(jax.random.key(2), NUM_ARGUMENTS))
        self._priorities = list(
            jax.random.uniform(
                jax.random.key(3), (NUM_ARGUMENTS, workload.sample_size), minval=0.05
            )
        )
        self._slots: list[Any] = []
        self._scanned_slots: Any = None
        self._ready = _ready(self._subject.state)
        self._compile(compiler_options(options))

    def _compile(self, xla_options: dict[str, str] | None) -> None:
        binding, length = self._binding, self._workload.scan_length

        def empty(state: State, key: jax.Array) -> Sample:
            shapes = jax.eval_shape(binding.sample, state, key)
            return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

        def learn(drawn: Sample, priority: jax.Array) -> jax.Array:
            """As after a learner's step, the priorities come after what was sampled."""
            seen = binding.data(drawn)["reward"] + binding.probability(drawn)
            return jnp.where(seen < -1.0, 1.0, priority)

        def add(state: State, items: Any) -> tuple[State, None]:
            def body(state: State, _: None) -> tuple[State, None]:
                return binding.add(state, items), None

            return jax.lax.scan(body, state, None, length=length)

        def sample(state: State, keys: jax.Array) -> tuple[State, Sample]:
            def body(carry: tuple[State, Sample], key: jax.Array) -> Any:
                return (carry[0], binding.sample(carry[0], key)), None

            return jax.lax.scan(body, (state, empty(state, keys[0])), keys)[0]

        def slots(state: State, keys: jax.Array) -> tuple[State, Any]:
            def body(state: State, key: jax.Array) -> tuple[State, Any]:
                drawn = binding.sample(state, key)
                return state, (binding.slots(drawn), binding.data(drawn)["reward"])

            return jax.lax.scan(body, state, keys)

        def update(state: State, slots: Any, priorities: jax.Array) -> tuple[State, None]:
            def body(state: State, row: tuple[Any, jax.Array]) -> tuple[State, None]:
                return binding.update(state, *row), None

            return jax.lax.scan(body, state, (slots, priorities))

        def cycle(
            state: State, items: Any, keys: jax.Array, priorities: jax.Array
        ) -> tuple[State, Sample]:
            def body(carry: tuple[State, Sample], row: tuple[jax.Array, jax.Array]) -> Any:
                key, priority = row
                state = binding.add(carry[0], items)
                drawn = binding.sample(state, key)
                priority = learn(drawn, priority)
                return (binding.update(state, binding.slots(drawn), priority), drawn), None

            carry = (state, empty(state, keys[0]))
            return jax.lax.scan(body, carry, (keys, priorities))[0]

        def compiled(function: Callable[..., Any], *arguments: Any) -> Any:
            jitted = jax.jit(function, donate_argnums=0, compiler_options=xla_options)
            return jitted.lower(self._subject.state, *arguments).compile()

        keys, priorities = self._scanned_keys, self._scanned_priorities
        self._scan_add = compiled(add, self._items)
        self._scan_sample = compiled(sample, keys)
        self._scan_slots = compiled(slots, keys)
        self._scan_cycle = compiled(cycle, self._items, keys, priorities)
        self._draw_slots()
        self._scan_update = compiled(update, self._scanned_slots, priorities)

    def _draw_slots(self) -> np.ndarray:
        """Draws fresh slots for the scanned update; returns their serial numbers [L, B]."""
        subject = self._subject
        subject.state, drawn = self._scan_slots(subject.state, self._scanned_keys)
        self._scanned_slots, rewards = drawn
        return np.asarray(rewards).astype(np.int64)

    def _draw_slot_list(self) -> None:
        """Draws fresh slots for the updates from Python."""
        self._slots = [
            self._binding.slots(self._binding.call_sample(self._subject.state, key))
            for key in self._keys
        ]

    def verify(self) -> None:
        """Checks the calls from Python and the scans against the NumPy model.

        Raises:
            UnequalWork: If the library does anything else.
        """
        workload, subject, model = self._workload, self._subject, self._subject.model
        equality.check_draws(JaxSubject(self._bind(workload.small()), workload.small()))
        equality.check_calls(subject, rounds=4, add=True)
        drawn = subject.binding.call_sample(subject.state, jax.random.key(99))
        weights = np.asarray(subject.binding.call_weights(subject.state, drawn))
        probability = np.asarray(subject.binding.probability(drawn))
        expected = (probability / probability.min()) ** -workload.beta
        if not np.allclose(weights, expected, rtol=equality.RELATIVE_TOLERANCE):
            raise UnequalWork("importance weights do not follow from the probabilities")

        serials = self._draw_slots()
        subject.state, _ = self._scan_update(
            subject.state, self._scanned_slots, self._scanned_priorities
        )
        for row, priority in zip(serials, np.asarray(self._scanned_priorities), strict=True):
            model.update(row, priority)
        subject.state, drawn = self._scan_sample(subject.state, self._scanned_keys)
        model.check(subject.checked(drawn))

        self._verify_scanned_add()
        subject.state, drawn = self._scan_cycle(
            subject.state, self._items, self._scanned_keys, self._scanned_priorities
        )
        equality.check_data(subject.checked(drawn).data, workload.transitions)

    def _verify_scanned_add(self) -> None:
        """The scan adds the same few items over and over: they must then lie in as many slots."""
        workload, subject, model = self._workload, self._subject, self._subject.model
        subject.state, _ = self._scan_add(subject.state, self._items)
        added = min(workload.add_size * workload.scan_length, workload.capacity)
        model.mass[(model.next_serial + np.arange(added)) % workload.capacity] = 1.0
        expected = added / model.mass.sum()
        batches = -(-16_384 // workload.sample_size)
        fresh: list[np.ndarray] = []
        for seed in range(batches):
            data = subject.sample(20_000 + seed).data
            fresh.append(equality.check_data(data, workload.transitions) < workload.add_size)
        share = float(np.mean(np.concatenate(fresh)))
        deviation = np.sqrt(expected * (1.0 - expected) / (batches * workload.sample_size))
        if abs(share - expected) > 5.0 * deviation + 1e-3:
            raise UnequalWork(f"{share:.2%} of the mass is new after adding, not {expected:.2%}")

    def operations(self) -> Mapping[str, Operation]:
        """The operations of a prioritized row."""
        length = self._workload.scan_length
        return {
            "python add": Operation(self._python_add),
            "python sample": Operation(self._python_sample),
            "python sample+weights": Operation(self._python_weights),
            "python update": Operation(self._python_update, prepare=self._draw_slot_list),
            "python cycle": Operation(self._python_cycle),
            "python cycle+weights": Operation(self._python_weighted_cycle),
            "scan add": Operation(self._scanned(self._scan_add, lambda: (self._items,)), length),
            "scan sample": Operation(
                self._scanned(self._scan_sample, lambda: (self._scanned_keys,)), length
            ),
            "scan update": Operation(
                self._scanned(
                    self._scan_update, lambda: (self._scanned_slots, self._scanned_priorities)
                ),
                length,
                prepare=self._draw_slots,
            ),
            "scan cycle": Operation(
                self._scanned(
                    self._scan_cycle,
                    lambda: (self._items, self._scanned_keys, self._scanned_priorities),
                ),
                length,
            ),
        }

    def facts(self) -> Mapping[str, str]:
        """Bytes of state beyond the data, and memory a scanned cycle needs beyond the state."""
        state_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(self._subject.state))
        data_bytes = self._workload.capacity * self._workload.transitions.num_bytes
        memory = self._scan_cycle.memory_analysis()
        extra = memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
        return {
            "state beyond the data, bytes per item": (
                f"{(state_bytes - data_bytes) / self._workload.capacity:.2f}"
            ),
            "scanned cycle beyond the state, sampled batch included, MiB": f"{extra / 2**20:.2f}",
        }

    def _python_add(self, calls: int) -> float:
        call, ready, items = self._binding.call_add, self._ready, self._items

        def step(state: State) -> State:
            return call(state, items)

        return self._repeat_in_place(step, ready, calls)

    def _python_update(self, calls: int) -> float:
        call, ready = self._binding.call_update, self._ready
        arguments = itertools.cycle(list(zip(self._slots, self._priorities, strict=True)))

        def step(state: State) -> State:
            slots, priority = next(arguments)
            return call(state, slots, priority)

        return self._repeat_in_place(step, ready, calls)

    def _python_cycle(self, calls: int) -> float:
        binding, items, arguments = self._binding, self._items, self._cycle_arguments()

        def step(state: State) -> State:
            key, priority = next(arguments)
            state = binding.call_add(state, items)
            sample = binding.call_sample(state, key)
            return binding.call_update(state, binding.slots(sample), priority)

        return self._repeat_in_place(step, self._ready, calls)

    def _python_weighted_cycle(self, calls: int) -> float:
        binding, items, arguments = self._binding, self._items, self._cycle_arguments()
        wait_each = self._wait_each

        def step(state: State) -> State:
            key, priority = next(arguments)
            state = binding.call_add(state, items)
            sample = binding.call_sample(state, key)
            weights = binding.call_weights(state, sample)
            if wait_each:
                weights.block_until_ready()
            return binding.call_update(state, binding.slots(sample), priority)

        return self._repeat_in_place(step, self._ready, calls)

    def _cycle_arguments(self) -> Iterator[tuple[jax.Array, jax.Array]]:
        return itertools.cycle(list(zip(self._keys, self._priorities, strict=True)))

    def _python_sample(self, calls: int) -> float:
        call, probability, state = (
            self._binding.call_sample,
            self._binding.probability,
            self._subject.state,
        )
        return self._repeat(lambda key: probability(call(state, key)), calls)

    def _python_weights(self, calls: int) -> float:
        binding, state = self._binding, self._subject.state
        return self._repeat(
            lambda key: binding.call_weights(state, binding.call_sample(state, key)), calls
        )

    def _repeat(self, draw: Callable[[jax.Array], jax.Array], calls: int) -> float:
        keys, wait_each = itertools.cycle(self._keys), self._wait_each
        last: jax.Array | None = None

        def call() -> None:
            nonlocal last
            last = draw(next(keys))
            if wait_each:
                last.block_until_ready()

        return repeat_calls(call, calls, lambda: jax.block_until_ready(last))

    def _repeat_in_place(
        self, step: Callable[[State], State], ready: Callable[[State], jax.Array], calls: int
    ) -> float:
        subject, wait_each = self._subject, self._wait_each

        def call() -> None:
            subject.state = step(subject.state)
            if wait_each:
                ready(subject.state).block_until_ready()

        return repeat_calls(call, calls, lambda: jax.block_until_ready(subject.state))

    def _scanned(
        self, program: Callable[..., Any], arguments: Callable[[], tuple[Any, ...]]
    ) -> Callable[[int], float]:
        """Times a compiled scan, which takes and returns the state first."""
        subject = self._subject

        def run(calls: int) -> float:
            rest = arguments()
            seconds = 0.0
            for _ in range(calls):
                start = time.perf_counter()
                subject.state, output = jax.block_until_ready(program(subject.state, *rest))
                seconds += time.perf_counter() - start
                del output
            return seconds

        return run


def _ready(state: State) -> Callable[[State], jax.Array]:
    """Picks one array of a state to wait for: all outputs of a program are ready at once."""
    for field in dataclasses.fields(state):
        if isinstance(getattr(state, field.name), jax.Array):
            return operator.attrgetter(field.name)
    return jax.block_until_ready

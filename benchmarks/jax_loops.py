"""The loops around a buffer of a JAX library: the same for every library.

A cycle adds, then samples, then updates the sampled rows where they have priorities. How it is
called and timed is in [`benchmarks.programs`][].
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import equality, limits
from benchmarks.harness import Operation, UnequalWork, repeat_calls
from benchmarks.programs import (
    Sample,
    State,
    compiled,
    empty_like,
    repeat_in_place,
    scan_add,
    scan_sample,
    scanned,
)
from benchmarks.transitions import Items
from benchmarks.workload import Workload

NUM_ARGUMENTS = 64
"""How many different keys, priorities and sampled slots the calls from Python go through."""


@dataclasses.dataclass(frozen=True)
class Binding:
    """A JAX library's buffer, as its users call it.

    Attributes:
        create: Makes an empty state.
        add: `(state, items) -> state`, pure, for use inside a scan.
        sample: `(state, key) -> sample`, pure.
        call_add: The same from Python; donates the state.
        call_sample: The same from Python.
        data: Picks the leaves [B, ...] of the items out of a sample.
        update: `(state, slots, priority) -> state`, pure; None without priorities.
        call_update: The same from Python; donates the state.
        call_weighted: `(state, key) -> (sample, weights)` from Python, with importance weights [B]
            of which the largest is 1; None to leave them out.
        slots: Picks what `update` wants out of a sample.
        probability: Picks the probabilities [B] out of a sample; None if the library has none.
        arguments: What to hand to `add` for new items, leaves [B, ...].
    """

    create: Callable[[], State]
    add: Callable[[State, Any], State]
    sample: Callable[[State, jax.Array], Sample]
    call_add: Callable[[State, Any], State]
    call_sample: Callable[[State, jax.Array], Sample]
    data: Callable[[Sample], dict[str, jax.Array]]
    update: Callable[[State, Any, jax.Array], State] | None = None
    call_update: Callable[[State, Any, jax.Array], State] | None = None
    call_weighted: Callable[[State, jax.Array], tuple[Sample, jax.Array]] | None = None
    slots: Callable[[Sample], Any] = lambda sample: None
    probability: Callable[[Sample], jax.Array] | None = None
    arguments: Callable[[Items], Any] = lambda items: items

    def result(self, sample: Sample) -> jax.Array:
        """One array of a sample to wait for: all outputs of a program are ready at once."""
        return self.probability(sample) if self.probability else self.data(sample)["reward"]


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
        self.model = equality.model_of(workload)
        equality.fill(self)

    def add(self, items: Items) -> None:
        """See `equality.Subject`."""
        self.state = self.binding.call_add(
            self.state, jax.device_put(self.binding.arguments(items))
        )

    def sample(self, seed: int) -> equality.CheckedSample:
        """See `equality.Subject`."""
        return self.checked(self.binding.call_sample(self.state, jax.random.key(seed)))

    def checked(self, sample: Sample) -> equality.CheckedSample:
        """A sample of the library as the checks want it."""
        return equality.CheckedSample(
            data={name: np.asarray(leaf) for name, leaf in self.binding.data(sample).items()},
            slots=self.binding.slots(sample),
            probability=self.binding.probability and np.asarray(self.binding.probability(sample)),
        )

    def update(self, slots: Any, priority: np.ndarray) -> None:
        """See `equality.Subject`."""
        assert self.binding.call_update is not None
        self.state = self.binding.call_update(self.state, slots, jnp.asarray(priority))


def scan_slots(binding: Binding) -> Callable[..., Any]:
    """Samples once with each key; returns the slots and rewards of all."""

    def program(state: State, keys: jax.Array) -> tuple[State, Any]:
        def body(state: State, key: jax.Array) -> tuple[State, Any]:
            drawn = binding.sample(state, key)
            return state, (binding.slots(drawn), binding.data(drawn)["reward"])

        return jax.lax.scan(body, state, keys)

    return program


def scan_update(binding: Binding) -> Callable[..., Any]:
    """Updates once with each row of slots and priorities."""
    assert binding.update is not None
    update = binding.update

    def program(state: State, slots: Any, priorities: jax.Array) -> tuple[State, None]:
        def body(state: State, row: tuple[Any, jax.Array]) -> tuple[State, None]:
            return update(state, *row), None

        return jax.lax.scan(body, state, (slots, priorities))

    return program


def scan_cycle(binding: Binding) -> Callable[..., Any]:
    """Adds the same items, samples, and updates what was sampled, once with each key."""

    def learn(drawn: Sample, priority: jax.Array) -> jax.Array:
        """As after a learner's step, the priorities come after what was sampled."""
        rewards = binding.data(drawn)["reward"]
        seen = rewards.reshape(len(rewards), -1)[:, 0] + binding.result(drawn)
        return jnp.where(seen < -1.0, 1.0, priority)

    def program(
        state: State, items: Any, keys: jax.Array, priorities: jax.Array
    ) -> tuple[State, Sample]:
        def body(carry: tuple[State, Sample], row: tuple[jax.Array, jax.Array]) -> Any:
            key, priority = row
            state = binding.add(carry[0], items)
            drawn = binding.sample(state, key)
            if binding.update is not None:
                state = binding.update(state, binding.slots(drawn), learn(drawn, priority))
            return (state, drawn), None

        carry = (state, empty_like(binding.sample, state, keys[0]))
        return jax.lax.scan(body, carry, (keys, priorities))[0]

    return program


class ReplayContestant:
    """A JAX library on a replay job; a `benchmarks.harness.Contestant`."""

    def __init__(self, bind: Callable[[Workload], Binding], workload: Workload):
        """Fills a buffer to capacity.

        Args:
            bind: Makes the library's binding for a workload.
            workload: The job.
        """
        self._bind = bind
        self._workload = workload
        self._subject = JaxSubject(bind(workload), workload)
        self._binding = self._subject.binding
        keys = jax.random.split(jax.random.key(0), workload.scan_length)
        serials = np.arange(workload.add_size)
        items = workload.transitions.items(serials)
        self._items = jax.device_put(self._binding.arguments(items))
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
        self._compile()

    def _compile(self) -> None:
        binding = self._binding

        def ready(function: Callable[..., Any], *arguments: Any) -> Any:
            return compiled(function, self._subject.state, *arguments)

        keys, priorities = self._scanned_keys, self._scanned_priorities
        self._scan_add = ready(scan_add(binding.add, self._workload.scan_length), self._items)
        self._scan_sample = ready(scan_sample(binding.sample), keys)
        self._scan_cycle = ready(scan_cycle(binding), self._items, keys, priorities)
        if binding.update is not None:
            self._scan_slots = ready(scan_slots(binding), keys)
            self._draw_slots()
            self._scan_update = ready(scan_update(binding), self._scanned_slots, priorities)

    def _draw_slots(self) -> np.ndarray:
        """Draws fresh slots for the scanned update; returns their first serial numbers [L, B]."""
        subject = self._subject
        subject.state, drawn = self._scan_slots(subject.state, self._scanned_keys)
        self._scanned_slots, rewards = drawn
        return np.asarray(rewards).reshape(*rewards.shape[:2], -1)[..., 0].astype(np.int64)

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
        if self._binding.call_weighted is not None:
            drawn, weights = self._binding.call_weighted(subject.state, jax.random.key(99))
            probability = np.asarray(self._binding.result(drawn))
            expected = (probability / probability.min()) ** -workload.beta
            if not np.allclose(np.asarray(weights), expected, rtol=equality.RELATIVE_TOLERANCE):
                raise UnequalWork("importance weights do not follow from the probabilities")

        if self._binding.update is not None:
            serials = self._draw_slots()
            priorities = self._scanned_priorities
            if jax.default_backend() != "cpu":
                # Any of the rows of one slot may win, unless the library says which.
                priorities = jnp.asarray(equality.priorities_of(serials, turn=5))
            subject.state, _ = self._scan_update(subject.state, self._scanned_slots, priorities)
            for row, priority in zip(serials, np.asarray(priorities), strict=True):
                model.update(row, priority)
        subject.state, drawn = self._scan_sample(subject.state, self._scanned_keys)
        model.check(subject.checked(drawn))

        if workload.distinct:
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
        model.overwrite(model.next_serial + np.arange(added))
        expected = min(added, workload.capacity - workload.behind) / model.mass.sum()
        batches = -(-16_384 // workload.sample_size)
        fresh: list[np.ndarray] = []
        for seed in range(batches):
            data = subject.sample(20_000 + seed).data
            serials = equality.check_data(data, workload.transitions)
            fresh.append(serials.reshape(len(serials), -1)[:, -1] < workload.add_size)
        share = float(np.mean(np.concatenate(fresh)))
        deviation = np.sqrt(expected * (1.0 - expected) / (batches * workload.sample_size))
        if abs(share - expected) > 5.0 * deviation + 1e-3:
            raise UnequalWork(f"{share:.2%} of the mass is new after adding, not {expected:.2%}")

    def operations(self) -> Mapping[str, Operation]:
        """The operations of a row of items or windows, as far as the binding has them."""
        operations = {
            "python add": Operation(self._python_add),
            "python sample": Operation(self._python_sample),
            "python cycle": Operation(self._python_cycle),
            "scan add": self._scanned(self._scan_add, lambda: (self._items,)),
            "scan sample": self._scanned(self._scan_sample, lambda: (self._scanned_keys,)),
            "scan cycle": self._scanned(
                self._scan_cycle,
                lambda: (self._items, self._scanned_keys, self._scanned_priorities),
            ),
        }
        if self._binding.update is not None:
            operations["python update"] = Operation(
                self._python_update, prepare=self._draw_slot_list
            )
            operations["scan update"] = self._scanned(
                self._scan_update,
                lambda: (self._scanned_slots, self._scanned_priorities),
                self._draw_slots,
            )
        if self._binding.call_weighted is not None:
            operations["python sample+weights"] = Operation(
                functools.partial(self._python_sample, weighted=True)
            )
            operations["python cycle+weights"] = Operation(
                functools.partial(self._python_cycle, weighted=True)
            )
        return {
            name: dataclasses.replace(operation, floor=functools.partial(self._floor, name))
            for name, operation in operations.items()
        }

    def _scanned(
        self,
        program: Callable[..., Any],
        arguments: Callable[[], tuple[Any, ...]],
        prepare: Callable[[], object] = lambda: None,
    ) -> Operation:
        run = scanned(self._subject, program, arguments)
        return Operation(run, self._workload.scan_length, prepare)

    def _floor(self, name: str) -> float:
        caller, what = name.split(" ")
        what, _, weights = what.partition("+")
        traffic = self._workload.traffic()[what]
        if caller == "scan":
            return traffic.seconds()
        if weights:
            # The probabilities are read, and as many weights written.
            traffic += limits.Traffic(8 * self._workload.sample_size)
        return traffic.seconds() + self._dispatches(what, bool(weights))

    def _dispatches(self, what: str, weights: bool) -> float:
        """Returns the seconds of empty calls with as many arrays as the calls of an operation."""
        arrays = self._arrays(weights)
        parts = list(arrays) if what == "cycle" else [what]
        return sum(limits.dispatch_seconds(*arrays[part]) for part in parts)

    def _arrays(self, weights: bool) -> dict[str, tuple[int, int, int]]:
        """Returns how many arrays each call from Python donates, is given besides, and makes.

        Args:
            weights: Whether a sample computes importance weights, in the same program.
        """
        binding, state = self._binding, self._subject.state
        drawn = jax.eval_shape(binding.sample, state, self._keys[0])
        held, items, sampled, slots = (
            len(jax.tree.leaves(tree)) for tree in (state, self._items, drawn, binding.slots(drawn))
        )
        arrays = {
            "add": (held, items, 0),
            "sample": (0, held + 1 + weights, sampled + weights),
            "update": (held, slots + 1, 0),
        }
        if binding.update is None:
            del arrays["update"]
        return arrays

    def facts(self) -> Mapping[str, str]:
        """Bytes of state beyond the data."""
        state_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(self._subject.state))
        data_bytes = self._workload.capacity * self._workload.transitions.num_bytes
        unit = "step" if self._workload.num_envs > 1 else "item"
        beyond = (state_bytes - data_bytes) / self._workload.capacity
        return {f"state beyond the data, bytes per {unit}": f"{beyond:.2f}"}

    def _python_add(self, calls: int) -> float:
        call, items = self._binding.call_add, self._items
        return repeat_in_place(self._subject, lambda state: call(state, items), calls)

    def _python_update(self, calls: int) -> float:
        call = self._binding.call_update
        assert call is not None
        arguments = itertools.cycle(list(zip(self._slots, self._priorities, strict=True)))
        return repeat_in_place(self._subject, lambda state: call(state, *next(arguments)), calls)

    def _python_cycle(self, calls: int, *, weighted: bool = False) -> float:
        binding, items = self._binding, self._items
        arguments = itertools.cycle(list(zip(self._keys, self._priorities, strict=True)))

        def step(state: State) -> State:
            key, priority = next(arguments)
            state = binding.call_add(state, items)
            sample, wanted = self._drawn(state, key, weighted)
            if weighted or binding.call_update is None:
                wanted.block_until_ready()
            if binding.call_update is None:
                return state
            return binding.call_update(state, binding.slots(sample), priority)

        return repeat_in_place(self._subject, step, calls)

    def _python_sample(self, calls: int, *, weighted: bool = False) -> float:
        state, keys = self._subject.state, itertools.cycle(self._keys)

        def draw() -> None:
            self._drawn(state, next(keys), weighted)[1].block_until_ready()

        return repeat_calls(draw, calls)

    def _drawn(self, state: State, key: jax.Array, weighted: bool) -> tuple[Sample, jax.Array]:
        """Returns a sample, and one of its arrays to wait for."""
        binding = self._binding
        if weighted:
            assert binding.call_weighted is not None
            return binding.call_weighted(state, key)
        sample = binding.call_sample(state, key)
        return sample, binding.result(sample)

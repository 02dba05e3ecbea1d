"""Calls from Python with other work in between, as in a loop with an environment.

Between two calls a loop steps an environment and a network. Then the caches hold other things, and
a thread of XLA's that waits for work has gone to sleep: a call takes longer than one in a row of
calls. So each call is timed by itself here, after 50 µs of Python.

The contestants are those of the prioritized rows (see [`benchmarks.rows.per`][]), except torchrl,
and a ring of NumPy arrays as people write it themselves. That one draws uniformly, which is less
work than the others do, and has no priorities to update.

Other rows:

* **loop-one-by-one**: adds transitions that come one at a time, each by a call of its own, or 64 at
  a time out of NumPy arrays.
* **loop-dqn**: a whole loop, CleanRL's DQN on CartPole. One environment of Gymnasium takes a step,
  chosen by the network, and after every tenth step 128 transitions are drawn uniformly and learned
  from. Only where transitions are kept differs: in such a ring of NumPy arrays, or in a jaxbuf
  buffer, to which they are added one by one, or ten at a time.
"""

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxbuf
from benchmarks.harness import (
    Contestant,
    Operation,
    Options,
    Row,
    UnequalWork,
    import_library,
    repeat_calls,
)
from benchmarks.rows.per import CpprbContestant, replay_row
from benchmarks.transitions import CARTPOLE
from benchmarks.workload import Workload

OPERATIONS = ("python add", "python sample", "python sample+weights", "python update")
SECONDS_BETWEEN = 50e-6
SIZES = {f"loop-{size}": size for size in (1, 32, 256)}
ONE_BY_ONE = "loop-one-by-one"
TOGETHER = 64
DQN = "loop-dqn"
STEPS_PER_UPDATE = 10
BATCH_SIZE = 128


def rows(options: Options) -> list[Row]:
    """The rows: one for each number of transitions in a call, and the others."""
    capacity = options.capacity or 2**14
    found = [
        _row(name, Workload(CARTPOLE, capacity, size, size, 1))
        for name, size in SIZES.items()
        if any(options.wants(name, operation) for operation in OPERATIONS)
    ]
    if options.wants(ONE_BY_ONE, "python add"):
        title = f"CartPole transitions one by one, each after 50 µs of Python, {capacity:,} slots"
        builders = {
            "jaxbuf": lambda: SinglesContestant(capacity, 1),
            f"{TOGETHER} at a time": lambda: SinglesContestant(capacity, TOGETHER),
        }
        found.append(Row(ONE_BY_ONE, title, ("python add",), builders))
    if options.wants(DQN, "python step"):
        builders = {
            "jaxbuf": lambda: DqnContestant(JaxbufReplay(capacity, STEPS_PER_UPDATE)),
            "one by one": lambda: DqnContestant(JaxbufReplay(capacity, 1)),
            "numpy": lambda: DqnContestant(NumpyReplay(capacity)),
        }
        title = f"DQN on CartPole called from Python, {capacity:,} slots"
        found.append(Row(DQN, title, ("python step",), builders))
    return found


def _row(name: str, workload: Workload) -> Row:
    row = replay_row(name, "CartPole", workload)
    builders = {
        **row.builders,
        "cpprb": lambda: CpprbContestant(workload),
        "numpy": lambda: RingContestant(workload),
    }
    title = f"{row.title}; each call after {SECONDS_BETWEEN * 1e6:.0f} µs of Python"
    spaced = {library: _spaced(build) for library, build in builders.items()}
    return dataclasses.replace(row, title=title, operations=OPERATIONS, builders=spaced)


def _spaced(build: Callable[[], Contestant]) -> Callable[[], Contestant]:
    return lambda: SpacedContestant(build())


class SpacedContestant:
    """Another contestant, whose calls are timed one by one, with work between them."""

    def __init__(self, contestant: Contestant):
        """Takes the other contestant."""
        self._contestant = contestant

    def verify(self) -> None:
        """See `Contestant`."""
        self._contestant.verify()

    def operations(self) -> Mapping[str, Operation]:
        """Returns what the other does when it is called from Python."""
        return {
            name: dataclasses.replace(one, run=_between(one.run))
            for name, one in self._contestant.operations().items()
            if name in OPERATIONS
        }

    def facts(self) -> Mapping[str, str]:
        """Those of the other."""
        return self._contestant.facts()


def _between(run: Callable[[int], float]) -> Callable[[int], float]:
    def spaced(calls: int) -> float:
        seconds = 0.0
        for _ in range(calls):
            _work()
            seconds += run(1)
        return seconds

    return spaced


def _work() -> None:
    """Does what a loop does between two calls: makes small objects, and looks names up."""
    end = time.perf_counter() + SECONDS_BETWEEN
    while time.perf_counter() < end:
        {str(number): [number] for number in range(8)}.get("7")


class RingContestant(Contestant):
    """NumPy arrays that are written in a circle, and drawn from uniformly."""

    def __init__(self, workload: Workload):
        """Fills the arrays with transitions 0, 1, ..."""
        self._workload = workload
        self._arrays = workload.transitions.items(np.arange(workload.capacity))
        self._items = workload.transitions.items(np.arange(workload.add_size))
        self._next, self._random = 0, np.random.default_rng(0)

    def verify(self) -> None:
        """Checks that a sample has whole transitions.

        Raises:
            UnequalWork: If it does not.
        """
        batch = self._sample()
        whole = self._workload.transitions.items(batch["reward"].astype(np.int64))
        if any(not np.array_equal(batch[name], leaf) for name, leaf in whole.items()):
            raise UnequalWork("a sampled transition has leaves of several")

    def operations(self) -> Mapping[str, Operation]:
        """Returns adding and sampling, which need no priorities."""
        return {
            "python add": Operation(lambda calls: repeat_calls(self._add, calls)),
            "python sample": Operation(lambda calls: repeat_calls(self._sample, calls)),
        }

    def _add(self) -> None:
        slots = (self._next + np.arange(self._workload.add_size)) % self._workload.capacity
        for name, leaf in self._arrays.items():
            leaf[slots] = self._items[name]
        self._next = (self._next + self._workload.add_size) % self._workload.capacity

    def _sample(self) -> Mapping[str, np.ndarray]:
        slots = self._random.integers(self._workload.capacity, size=self._workload.sample_size)
        return {name: leaf[slots] for name, leaf in self._arrays.items()}


class SinglesContestant(Contestant):
    """Adds transitions that come one by one, a number of them together."""

    def __init__(self, capacity: int, together: int):
        """Creates a buffer, and the arrays that transitions are collected in."""
        self._together, self._count = together, 0
        self._buffer = jaxbuf.ItemBuffer.create(CARTPOLE.example, capacity)
        self._rows = CARTPOLE.items(np.zeros(together, np.int64))
        self._items = CARTPOLE.items(np.arange(TOGETHER))

    def verify(self) -> None:
        """Checks that the buffer has all transitions in order.

        Raises:
            UnequalWork: If it has not.
        """
        for _ in range(TOGETHER):
            self._add()
        reward = np.asarray(self._buffer.data["reward"])[:TOGETHER]
        if not np.array_equal(reward, np.arange(TOGETHER)):
            raise UnequalWork("a transition is missing, or in another place")

    def operations(self) -> Mapping[str, Operation]:
        """Returns adding transitions, of which a call adds as many as go together."""
        spaced = _between(lambda calls: repeat_calls(self._add, calls))
        return {"python add": Operation(lambda calls: spaced(TOGETHER * calls), per_call=TOGETHER)}

    def _add(self) -> None:
        number = self._count % TOGETHER
        for name, leaf in self._rows.items():
            leaf[number % self._together] = self._items[name][number]
        self._count += 1
        if self._count % self._together == 0:
            self._buffer = jax.block_until_ready(jaxbuf.add(self._buffer, self._rows))


def _transitions(rows: int) -> dict[str, np.ndarray]:
    leaves = {"obs": (4,), "next_obs": (4,), "reward": (), "terminated": ()}
    arrays = {name: np.zeros((rows, *shape), np.float32) for name, shape in leaves.items()}
    return {**arrays, "action": np.zeros(rows, np.int32)}


class NumpyReplay:
    """A ring of NumPy arrays for single transitions."""

    def __init__(self, capacity: int):
        """Creates the arrays."""
        self._arrays, self._count = _transitions(capacity), 0
        self._capacity, self._random = capacity, np.random.default_rng(0)

    def add(self, transition: Mapping[str, Any]) -> None:
        """Adds a transition."""
        for name, leaf in self._arrays.items():
            leaf[self._count % self._capacity] = transition[name]
        self._count += 1

    def sample(self) -> Mapping[str, np.ndarray]:
        """Returns ``BATCH_SIZE`` transitions, drawn uniformly."""
        slots = self._random.integers(min(self._count, self._capacity), size=BATCH_SIZE)
        return {name: leaf[slots] for name, leaf in self._arrays.items()}


class JaxbufReplay:
    """A buffer that transitions are added to ``together`` at a time."""

    def __init__(self, capacity: int, together: int):
        """Creates the buffer, and the arrays in which transitions are collected."""
        self._rows, self._count = _transitions(together), 0
        example = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape[1:], leaf.dtype), self._rows)
        self._buffer = jaxbuf.ItemBuffer.create(example, capacity)
        self._together, self._key = together, jax.random.key(0)
        # Outside of a program it takes four times as long, more than a sample.
        self._split = jax.jit(lambda key: tuple(jax.random.split(key)))

    def add(self, transition: Mapping[str, Any]) -> None:
        """See `NumpyReplay`."""
        for name, leaf in self._rows.items():
            leaf[self._count % self._together] = transition[name]
        self._count += 1
        if self._count % self._together == 0:
            self._buffer = jaxbuf.add(self._buffer, self._rows)

    def sample(self) -> Mapping[str, jax.Array]:
        """See `NumpyReplay`."""
        self._key, key = self._split(self._key)
        return jaxbuf.sample(self._buffer, key, BATCH_SIZE).data


class DqnContestant(Contestant):
    """DQN on CartPole, with the network and the settings of ``cleanrl/dqn_jax.py``."""

    def __init__(self, replay: Any):
        """Creates the environment and the network, and takes the first steps."""
        gymnasium, linen = import_library("gymnasium"), import_library("flax.linen")
        optax = import_library("optax")
        self._env, self._replay = gymnasium.make("CartPole-v1"), replay
        layers = [linen.Dense(120), linen.relu, linen.Dense(84), linen.relu, linen.Dense(2)]
        network, optimizer = linen.Sequential(layers), optax.adam(2.5e-4)
        self._obs, _ = self._env.reset(seed=0)
        self._params = network.init(jax.random.key(0), self._obs)
        self._target, self._opt_state = self._params, optimizer.init(self._params)
        self._count, self._losses = 0, []

        def loss_fn(params: Any, target: Any, batch: Mapping[str, Any]) -> jax.Array:
            following = jnp.max(network.apply(target, batch["next_obs"]), axis=-1)
            goal = batch["reward"] + 0.99 * (1 - batch["terminated"]) * following
            values = network.apply(params, batch["obs"])
            value = jnp.take_along_axis(values, batch["action"][:, None], axis=1)[:, 0]
            return jnp.mean((value - goal) ** 2)

        @jax.jit
        def act(params: Any, obs: Any) -> jax.Array:
            return jnp.argmax(network.apply(params, obs)).astype(jnp.int32)

        @jax.jit
        def learn(params: Any, target: Any, opt_state: Any, batch: Any) -> Any:
            loss, grads = jax.value_and_grad(loss_fn)(params, target, batch)
            updates, opt_state = optimizer.update(grads, opt_state)
            return optax.apply_updates(params, updates), opt_state, loss

        self._act, self._learn = act, learn
        self._run(20 * STEPS_PER_UPDATE)

    def verify(self) -> None:
        """Checks that it has learned something: the error is smaller than in the beginning.

        Raises:
            UnequalWork: If it is not.
        """
        self._run(100 * STEPS_PER_UPDATE)
        if not np.mean(self._losses[-20:]) < np.mean(self._losses[:20]):
            raise UnequalWork("the network has not learned")

    def operations(self) -> Mapping[str, Operation]:
        """Returns a step, of which every tenth learns."""
        return {
            "python step": Operation(
                lambda calls: repeat_calls(self._run, calls), per_call=STEPS_PER_UPDATE
            )
        }

    def _run(self, steps: int = STEPS_PER_UPDATE) -> None:
        for _ in range(steps):
            action = int(self._act(self._params, self._obs))
            following, reward, terminated, truncated, _ = self._env.step(action)
            step = {"obs": self._obs, "next_obs": following, "action": action}
            self._replay.add({**step, "reward": reward, "terminated": terminated})
            self._obs = self._env.reset()[0] if terminated or truncated else following
            self._count += 1
            if self._count % STEPS_PER_UPDATE == 0:
                batch, state = self._replay.sample(), self._opt_state
                learned = self._learn(self._params, self._target, state, batch)
                self._params, self._opt_state, loss = learned
                self._losses.append(float(loss))

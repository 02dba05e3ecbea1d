"""The cost of a call from Python that has almost nothing to do.

A buffer of 1,024 small transitions with priorities: add 8, sample 32, update 32, each waited for.
All contestants are jitted, are given the same arrays, donate the buffer where it changes, and
return the same number of arrays:

* **jaxbuf**: `jaxbuf.add`, `jaxbuf.sample` and `jaxbuf.update_priority`.
* **own-jit**: methods of the buffer in a `jax.jit` of the user's own, which checks nothing of
  what only a caller can see.
* **empty**: a function that does nothing, given its arrays in a tuple: the least that JAX takes.
  What is new in its result are scalars, where a sample has arrays.
* **structured**: the same, but given, and returning, the buffer, the items, the sample: JAX has to
  take them apart and to put them together again.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import limits
from benchmarks.harness import Operation, Options, Row, UnequalWork, import_library, repeat_calls
from benchmarks.programs import repeat_in_place
from benchmarks.rows.per import bind_jaxbuf
from benchmarks.transitions import CARTPOLE
from benchmarks.workload import Workload

NAME = "overhead"
OPERATIONS = ("python add", "python sample", "python update")
WORKLOAD = Workload(CARTPOLE, capacity=1024, add_size=8, sample_size=32, scan_length=1)


def rows(options: Options) -> list[Row]:
    """The row, if it is wanted."""
    if not any(options.wants(NAME, operation) for operation in OPERATIONS):
        return []
    return [row(options)]


def row(options: Options) -> Row:
    """The row."""
    title = (
        f"{WORKLOAD.capacity:,} CartPole transitions, full; add {WORKLOAD.add_size}, sample and "
        f"update {WORKLOAD.sample_size}; against calls that do nothing"
    )
    builders = {
        "empty": lambda: CallsContestant(options, "empty"),
        "structured": lambda: CallsContestant(options, "structured"),
        "own-jit": lambda: CallsContestant(options, "own-jit"),
        "jaxbuf": lambda: CallsContestant(options, "jaxbuf"),
    }
    return Row(NAME, title, OPERATIONS, builders, reference="empty")


class CallsContestant:
    """The three calls, or calls with the same arrays.

    Attributes:
        state: The buffer, or its arrays.
    """

    def __init__(self, options: Options, kind: str):
        """Fills a buffer.

        Args:
            options: How to wait.
            kind: "jaxbuf", "own-jit", "structured" or "empty".
        """
        jaxbuf = import_library("jaxbuf")
        self._options, self._kind = options, kind
        binding = bind_jaxbuf(WORKLOAD, options)
        items = jax.device_put(WORKLOAD.transitions.items(np.arange(WORKLOAD.capacity)))
        self.state: Any = jaxbuf.add(binding.create(), items)
        new = {name: leaf[: WORKLOAD.add_size] for name, leaf in items.items()}
        key = jax.random.key(0)
        drawn = jaxbuf.sample(self.state, key, WORKLOAD.sample_size)
        priority = jnp.ones((WORKLOAD.sample_size,), jnp.float32)
        given = {"add": new, "sample": key, "update": (drawn.slots, priority)}
        if kind == "empty":
            self.state, drawn = _flat(self.state), _flat(drawn)
            given = {name: _flat(tree) for name, tree in given.items()}
        self._given = given
        self._made = jax.tree.structure(drawn)
        if kind == "jaxbuf":
            self._calls = self._real(jaxbuf.add, jaxbuf.sample, jaxbuf.update_priority)
        elif kind == "own-jit":
            methods = type(self.state)
            self._calls = self._real(
                jax.jit(methods.add, donate_argnums=0),
                jax.jit(methods.sample, static_argnums=2),
                jax.jit(methods.update_priority, donate_argnums=0),
            )
        else:
            self._calls = self._unreal()

    def _real(
        self, add: Callable[..., Any], sample: Callable[..., Any], update: Callable[..., Any]
    ) -> dict[str, Callable[[Any], Any]]:
        given, size = self._given, WORKLOAD.sample_size
        return {
            "add": lambda buffer: add(buffer, given["add"]),
            "sample": lambda buffer: sample(buffer, given["sample"], size).probability,
            "update": lambda buffer: update(buffer, *given["update"]),
        }

    def _unreal(self) -> dict[str, Callable[[Any], Any]]:
        given, nothing = self._given, limits.empty(jax.tree.structure(()))
        draw = limits.empty(self._made)
        pick = (lambda made: made[0]) if self._kind == "empty" else lambda made: made.probability
        return {
            "add": lambda state: nothing(state, given["add"])[0],
            "sample": lambda state: pick(draw((), (state, given["sample"]))[1]),
            "update": lambda state: nothing(state, given["update"])[0],
        }

    def verify(self) -> None:
        """Checks that a call changes what it should, or nothing.

        Raises:
            UnequalWork: If it does not.
        """
        before = jax.tree.map(np.asarray, self.state)
        self.state = self._calls["add"](self.state)
        leaves = zip(jax.tree.leaves(before), jax.tree.leaves(self.state), strict=True)
        same = all(np.array_equal(old, new) for old, new in leaves)
        if same == (self._kind in ("jaxbuf", "own-jit")):
            raise UnequalWork(f"adding leaves the buffer {'the same' if same else 'changed'}")

    def operations(self) -> Mapping[str, Operation]:
        """The three calls."""

        def in_place(step: Callable[[Any], Any]) -> Operation:
            return Operation(lambda calls: repeat_in_place(self, step, self._options, calls))

        return {
            "python add": in_place(self._calls["add"]),
            "python sample": Operation(self._sample),
            "python update": in_place(self._calls["update"]),
        }

    def _sample(self, calls: int) -> float:
        draw, state, wait_each = self._calls["sample"], self.state, self._options.wait == "call"
        last: list[jax.Array] = []

        def call() -> None:
            last[:] = [draw(state)]
            if wait_each:
                last[0].block_until_ready()

        return repeat_calls(call, calls, lambda: jax.block_until_ready(last))

    def facts(self) -> Mapping[str, str]:
        """Returns the numbers of arrays that go in and out."""
        held, drawn = jax.tree.structure(self.state).num_leaves, self._made.num_leaves
        return {"arrays in the buffer": str(held), "arrays in a sample": str(drawn)}


def _flat(tree: Any) -> tuple[jax.Array, ...]:
    return tuple(jax.tree.leaves(tree))

"""Programs of JAX: how they are compiled, and called in turns.

From Python, a call is timed until its result is there. Inside `lax.scan` the state is the carry and
donated; a sampled batch is a carry too, so that every iteration has to write it out in full, as for
a learner, and cannot be optimized away.
"""

import dataclasses
import operator
import time
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from benchmarks.harness import repeat_calls

State = Any
Sample = Any


def compiled(function: Callable[..., Any], state: State, *arguments: Any) -> Any:
    """A program that takes and returns the state first, which it donates, ready to run.

    The same program is compiled once, however many runs there are.
    """
    lowered = jax.jit(function, donate_argnums=0).lower(state, *arguments)
    same = lowered.as_text(), lowered.in_tree, lowered.out_tree
    if same not in _COMPILED:
        _COMPILED[same] = lowered.compile()
    return _COMPILED[same]


_COMPILED: dict[Any, Any] = {}


class Holder(Protocol):
    """An object that holds the state that the timed calls go through."""

    state: State


def repeat_in_place(holder: Holder, step: Callable[[State], State], calls: int) -> float:
    """Seconds that `calls` steps of the state take, each a call from Python."""
    wait = _waiter(holder.state)

    def call() -> None:
        holder.state = step(holder.state)
        wait(holder.state)

    return repeat_calls(call, calls)


def scanned(
    holder: Holder, program: Callable[..., Any], arguments: Callable[[], tuple[Any, ...]]
) -> Callable[[int], float]:
    """Times a compiled scan, which takes and returns the state first, with arguments per call."""

    def run(calls: int) -> float:
        seconds = 0.0
        for _ in range(calls):
            rest = arguments()
            start = time.perf_counter()
            holder.state, output = jax.block_until_ready(program(holder.state, *rest))
            seconds += time.perf_counter() - start
            del output
        return seconds

    return run


def scan_add(add: Callable[[State, Any], State], length: int) -> Callable[..., Any]:
    """Adds the same items `length` times."""

    def program(state: State, items: Any) -> tuple[State, None]:
        def body(state: State, _: None) -> tuple[State, None]:
            return add(state, items), None

        return jax.lax.scan(body, state, None, length=length)

    return program


def scan_sample(sample: Callable[[State, jax.Array], Sample]) -> Callable[..., Any]:
    """Samples once with each key; returns the last sample."""

    def program(state: State, keys: jax.Array) -> tuple[State, Sample]:
        def body(carry: tuple[State, Sample], key: jax.Array) -> Any:
            return (carry[0], sample(carry[0], key)), None

        return jax.lax.scan(body, (state, empty_like(sample, state, keys[0])), keys)[0]

    return program


def empty_like(
    sample: Callable[[State, jax.Array], Sample], state: State, key: jax.Array
) -> Sample:
    shapes = jax.eval_shape(sample, state, key)
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)


def _waiter(state: State) -> Callable[[State], object]:
    """Waits for a state, by one array of a buffer: all outputs of a program are ready at once."""
    if isinstance(state, tuple) and isinstance(state[0], jax.Array):
        return lambda state: state[0].block_until_ready()
    for field in dataclasses.fields(state) if dataclasses.is_dataclass(state) else ():
        if isinstance(getattr(state, field.name), jax.Array):
            pick = operator.attrgetter(field.name)
            return lambda state: pick(state).block_until_ready()
    return jax.block_until_ready

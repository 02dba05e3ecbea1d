"""Counts what JAX traces and compiles, and what compiled programs always do."""

import contextlib
import math
from collections.abc import Iterator

import jax

from jaxbuf.testing.hlo import parse, size

TRACED = "/jax/core/compile/jaxpr_trace_duration"
LOWERED = "/jax/core/compile/jaxpr_to_mlir_module_duration"

# Instructions whose results are those of others.
_PASSES_ON = ("parameter", "get-tuple-element", "tuple", "bitcast", "while", "conditional")

_open: list[tuple[str, list[str | None]]] = []


def _listen(event: str, duration: float, **details: str) -> None:
    del duration
    for wanted, names in _open:
        if event == wanted:
            names.append(details.get("fun_name"))


# jax 0.8 cannot remove a listener again.
jax.monitoring.register_event_duration_secs_listener(_listen)


@contextlib.contextmanager
def counted_traces(event: str = TRACED) -> Iterator[list[str | None]]:
    """Returns the names of all functions that are traced, or compiled, inside the block."""
    names: list[str | None] = []
    _open.append((event, names))
    try:
        yield names
    finally:
        # Not by value: two of them may be equal.
        _open[:] = [other for other in _open if other[1] is not names]


def large_outside_of_branches(text, rows):
    """Returns the instructions that write so many numbers, whichever branches are taken."""
    computations, entry = parse(text)
    found, left = [], [entry]
    while left:
        for instruction in computations[left.pop()]:
            if instruction.opcode in ("while", "call"):
                left += instruction.called
            if instruction.opcode not in _PASSES_ON and math.prod(size(instruction)[0]) >= rows:
                found.append(instruction)
    return found

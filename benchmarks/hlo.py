"""Counts what a compiled program has a device do."""

import re
from typing import NamedTuple

from jaxbuf.testing import hlo
from jaxbuf.testing.hlo import Instruction

_BODY = re.compile(r"body=%?([\w.\-]+)")
_TRIPS = re.compile(r'known_trip_count"?:\{"?n"?:"?(\d+)')
# These only name memory, so that there is nothing to run.
_NOTHING = frozenset(
    [
        "after-all",
        "bitcast",
        "constant",
        "copy-done",
        "get-tuple-element",
        "opt-barrier",
        "parameter",
        "tuple",
    ]
)


class Work(NamedTuple):
    """The work of a device in one call of a program, one after the other.

    Attributes:
        kernels: The number of kernels and copies; of a conditional all that its branches may come
            to, and of a loop whose length is known at run time only those of one step.
        waits: The number of conditionals, and of loops whose length is known at run time only: the
            host of a device has to wait for the number that they depend on.
        copied: Bytes that large copies write.
    """

    kernels: int
    waits: int
    copied: int


def work(text: str, smallest: int) -> Work:
    """The work of a program; copies of fewer than ``smallest`` bytes are no large ones."""
    computations, entry = hlo.parse(text)

    def of_copy(instruction: Instruction) -> int:
        _, nbytes = hlo.size(instruction)
        is_copy = instruction.opcode in ("copy", "copy-start") and nbytes >= smallest
        return nbytes if is_copy else 0

    def of_computation(name: str) -> Work:
        totals = [of_instruction(instruction) for instruction in computations[name]]
        return Work(*map(sum, zip(*totals, strict=True)))

    def of_instruction(instruction: Instruction) -> Work:
        opcode, called, times, waits = instruction.opcode, instruction.called, 1, 0
        if opcode == "fusion":
            inside = [each for name in called for each in computations[name]]
            return Work(1, 0, sum(of_copy(each) for each in inside if hlo.stored(each, inside)))
        if opcode not in ("while", "conditional", "call"):
            return Work(int(opcode not in _NOTHING), 0, of_copy(instruction))
        if opcode != "call":
            body, trips = _BODY.search(instruction.rest), _TRIPS.search(instruction.rest)
            if body and trips:
                # Of a known number of steps none is asked whether it is the last.
                called, times = [body[1]], int(trips[1])
            else:
                waits = 1
        inner = [of_computation(name) for name in called]
        kernels, inner_waits, copied = map(sum, zip(*inner, strict=True))
        return Work(times * kernels, waits + times * inner_waits, times * copied)

    return of_computation(entry)

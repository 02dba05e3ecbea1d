"""Counts what a compiled program has a device do."""

import functools
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jaxbuf.testing import hlo
from jaxbuf.testing.hlo import Instruction

_BODY = re.compile(r"body=%?([\w.\-]+)")
_CONDITION = re.compile(r"condition=%?([\w.\-]+)")
_TRIPS = re.compile(r'known_trip_count"?:\{"?n"?:"?(\d+)')
_CYCLES = re.compile(r'estimated_cycles"?:"(\d+)"')
_OPERAND = re.compile(r"%([\w.\-]+)")
_INDEX = re.compile(r"index=(\d+)")
_NUMBER = re.compile(r"-?\d+")
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


class Estimate(NamedTuple):
    """XLA's expectation of one call of a program for a TPU.

    Attributes:
        cycles: The sum of the cycles that XLA expects of each operation.
        operations: The number of operations with such an estimate that run.
    """

    cycles: int
    operations: int


def estimate(text: str) -> Estimate:
    """The cycles that XLA expects a program for a TPU to take, and its operations.

    The body of a loop that counts from a number to another one counts as often as it runs, and once
    if its length is known at run time only. Of a conditional the branch that takes the most cycles
    counts.
    """
    computations, entry = hlo.parse(text)

    @functools.cache
    def of_computation(name: str) -> Estimate:
        inside = {instruction.name: instruction for instruction in computations[name]}
        totals = [of_instruction(instruction, inside) for instruction in inside.values()]
        return Estimate(*map(sum, zip(*totals, strict=True)))

    def of_instruction(instruction: Instruction, inside: Mapping[str, Instruction]) -> Estimate:
        opcode, rest = instruction.opcode, instruction.rest
        if opcode == "while":
            times, body = _times(instruction, inside, computations), _BODY.findall(rest)[0]
            return Estimate(*(times * number for number in of_computation(body)))
        if opcode in ("conditional", "call"):
            return max(map(of_computation, instruction.called))
        cycles = _CYCLES.search(rest)
        return Estimate(int(cycles[1]), 1) if cycles else Estimate(0, 0)

    return of_computation(entry)


def _times(
    loop: Instruction,
    inside: Mapping[str, Instruction],
    computations: Mapping[str, Sequence[Instruction]],
) -> int:
    """The number of times that a loop runs, where its text tells it; otherwise 1.

    The compiler for TPUs does not note it down. It is known if all that the loop asks before each
    step is whether a number, which has a known value before the loop, is less than another one.

    Args:
        loop: The loop.
        inside: The instructions of the computation that it is in, by name.
        computations: All computations.
    """
    if trips := _TRIPS.search(loop.rest):
        return int(trips[1])
    condition = [*computations[_CONDITION.findall(loop.rest)[0]]]
    for fusion in [each for each in condition if each.opcode == "fusion"]:
        condition += [each for name in fusion.called for each in computations[name]]
    places, compares, ends = (
        [each for each in condition if each.opcode == opcode]
        for opcode in ("get-tuple-element", "compare", "constant")
    )
    [begin] = [inside[name] for name in _operands(loop)]
    known = [len(places), len(compares), len(ends)] == [1, 1, 1] and begin.opcode == "tuple"
    if not known or "direction=LT" not in compares[0].rest:
        return 1
    [index] = _INDEX.findall(places[0].rest)
    start = _source(_operands(begin)[int(index)], inside)
    first, last = _NUMBER.match(start.rest), _NUMBER.match(ends[0].rest)
    if start.opcode != "constant" or not first or not last:
        return 1
    return max(int(last[0]) - int(first[0]), 0)


def _source(name: str, inside: Mapping[str, Instruction]) -> Instruction:
    """The instruction that an array is a copy of."""
    while inside[name].opcode in ("copy", "copy-start", "copy-done", "bitcast"):
        name = _operands(inside[name])[0]
    return inside[name]


def _operands(instruction: Instruction) -> list[str]:
    """The names of the operands of an instruction."""
    return _OPERAND.findall(instruction.rest.split(")")[0])

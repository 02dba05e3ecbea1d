"""Finds the copies in the text of a compiled program.

The text is public and nearly the same on every backend. Only the instructions called ``copy`` are
looked at, and which computation calls which.
"""

import math
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{\s*$")
_INSTRUCTION = re.compile(r"^\s*(ROOT )?%?([\w.\-]+) = (.*?) ([a-z][a-z\d\-]*)\((.*)$")
_CALLED = re.compile(
    r"(?:body|condition|calls|to_apply|\w+_computations?)=(?:\{([^}]*)\}|%?([\w.\-]+))"
)
_ARRAY = re.compile(r"^\(?(\w+)\[([\d,]*)\]")
_BITS = re.compile(r"\d+")


class Instruction(NamedTuple):
    """One line of a program.

    Attributes:
        name: The name of its result.
        root: Whether it is the result of its computation.
        type: The type of its result.
        opcode: What it does.
        rest: Its operands and attributes.
    """

    name: str
    root: bool
    type: str
    opcode: str
    rest: str

    @property
    def called(self) -> list[str]:
        """The computations that it calls."""
        matches = [several or single for several, single in _CALLED.findall(self.rest)]
        return [name for names in matches for name in re.findall(r"[\w.\-]+", names)]


class Copy(NamedTuple):
    """A copy of an array.

    Attributes:
        shape: Its shape.
        nbytes: Its size in bytes.
        in_loop: Whether it happens in each step of a loop.
        conditional: Whether it happens in a branch of a conditional only.
    """

    shape: tuple[int, ...]
    nbytes: int
    in_loop: bool
    conditional: bool


def parse(text: str) -> tuple[dict[str, list[Instruction]], str]:
    """Returns the computations of a program by name, and the name of the first one to run."""
    computations: dict[str, list[Instruction]] = {}
    entry, inside = "", list[Instruction]()
    for line in text.splitlines():
        if begins := _COMPUTATION.match(line):
            inside = computations.setdefault(begins[2], [])
            entry = begins[2] if begins[1] else entry
        elif match := _INSTRUCTION.match(line):
            inside.append(Instruction(match[2], bool(match[1]), *match.groups()[2:]))
    return computations, entry


def copies(text: str, smallest: int) -> list[Copy]:
    """Returns the copies of arrays of at least ``smallest`` bytes; see also ``typed_copies``.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> change = jax.jit(lambda x: x.at[0].set(2.0))
        >>> copies(change.lower(jnp.zeros(1000)).compile().as_text(), 4000)
        [Copy(shape=(1000,), nbytes=4000, in_loop=False, conditional=False)]
    """
    return [copy for _, copy in typed_copies(text, smallest)]


def typed_copies(text: str, smallest: int) -> list[tuple[str, Copy]]:
    """Returns the copies of at least ``smallest`` bytes, each with its dtype in the text."""
    computations, _ = parse(text)
    callers = {
        name: (caller, instruction.opcode)
        for caller, instructions in computations.items()
        for instruction in instructions
        for name in instruction.called
    }
    typed: list[tuple[str, Copy]] = []
    for name, instructions in computations.items():
        around = list(_around(name, callers))
        for instruction in instructions:
            shape, nbytes = size(instruction)
            copied = instruction.opcode in ("copy", "copy-start") and nbytes >= smallest
            # The intermediate results of a fusion are never stored.
            if copied and not (around[:1] == ["fusion"] and not stored(instruction, instructions)):
                dtype = instruction.type.lstrip("(").partition("[")[0]
                copy = Copy(shape, nbytes, "while" in around, "conditional" in around)
                typed.append((dtype, copy))
    return typed


def stored(instruction: Instruction, instructions: Sequence[Instruction]) -> bool:
    """Returns whether an instruction is a result of its computation, or a part of it."""
    [root] = [other for other in instructions if other.root]
    names = re.findall(r"[\w.\-]+", root.rest) if root.opcode == "tuple" else [root.name]
    return instruction.name in names


def size(instruction: Instruction) -> tuple[tuple[int, ...], int]:
    """Returns the shape and the bytes of an array, or of the first array of a tuple."""
    match = _ARRAY.match(instruction.type)
    if match is None:
        return (), 0
    shape = tuple(int(axis) for axis in match[2].split(",") if axis)
    bits = _BITS.search(match[1])
    return shape, -(-math.prod(shape) * (int(bits[0]) if bits else 8) // 8)


def _around(name: str, callers: Mapping[str, tuple[str, str]]) -> list[str]:
    """Returns the opcodes of the instructions around a computation, from the inside out."""
    opcodes: list[str] = []
    while name in callers:
        name, opcode = callers[name]
        opcodes.append(opcode)
    return opcodes

"""What a compiled program does with its arguments, read from the text of its HLO.

The text is public and nearly the same on every backend; what is read of it here is little: which
outputs lie in the memory of which parameters, and where each ``copy`` gets its operand from.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator

_INSTRUCTION = re.compile(r"^\s*(ROOT )?%?([\w.\-]+) = (.*)$")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{\s*$")
_ARRAY = re.compile(r"^(\w+)\[([\d,]*)\]")
_CALLED = re.compile(r"(?:body|condition|calls|to_apply|\w+_computation)=%?([\w.\-]+)")
_BODY = re.compile(r"body=%?([\w.\-]+)")
_CALLED_SET = re.compile(r"(?:branch_computations|called_computations|calls)=\{([^}]*)\}")
_TRIPS = re.compile(r'known_trip_count"?:\{"?n"?:"?(\d+)')
# What only names memory is nothing to run.
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
_ALIAS = re.compile(r"\{([\d, ]*)\}: \((\d+), \{([\d, ]*)\}")


@dataclasses.dataclass(frozen=True)
class Copy:
    """A copy of an array.

    Attributes:
        parameter: The parameter whose contents it copies, changed or not; None if there is none.
        dtype: Element type, as in HLO.
        shape: Its shape.
        nbytes: Its size.
        in_loop: Whether it happens in each step of a loop.
        times: How often it happens in one call; None if the loop's length is known at run time
            only.
        conditional: Whether it happens only where a conditional takes the branch that it is in.
    """

    parameter: int | None
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    in_loop: bool
    times: int | None
    conditional: bool


@dataclasses.dataclass(frozen=True)
class Launches:
    """What one call of a program has a device do, one after the other.

    Attributes:
        kernels: How many kernels and copies; of a branch all that it may come to, and of a loop
            whose length is known at run time only those of one step.
        waits: How many branches, and loops whose length is known at run time only: where the device
            has a host, that waits for the number it depends on.
    """

    kernels: int
    waits: int


@dataclasses.dataclass(frozen=True)
class Parameter:
    """An argument of a program.

    Attributes:
        label: What it is called in the source, such as ``buffer.data['obs']``; may be empty.
        dtype: Element type, as in HLO.
        shape: Its shape.
    """

    label: str
    dtype: str
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class _Instruction:
    name: str
    type: str
    opcode: str
    operands: tuple[str, ...]
    rest: str

    @property
    def array(self) -> tuple[str, tuple[int, ...]] | None:
        return _array(self.type)

    @property
    def called(self) -> tuple[str, ...]:
        sets = [re.findall(r"[\w.\-]+", names) for names in _CALLED_SET.findall(self.rest)]
        return (*_CALLED.findall(self.rest), *(name for names in sets for name in names))

    @property
    def index(self) -> int:
        found = re.search(r"index=(\d+)", self.rest)
        return int(found[1]) if found else 0


@dataclasses.dataclass(frozen=True)
class _Computation:
    instructions: dict[str, _Instruction]
    root: str
    parameters: tuple[str, ...]


class Program:
    """The HLO text of a compiled program.

    Args:
        text: What ``jax.stages.Compiled.as_text()`` gives.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> double = jax.jit(lambda x: x.at[0].set(2.0))
        >>> [copy] = Program(double.lower(jnp.zeros(1000)).compile().as_text()).copies(4000)
        >>> copy.parameter, copy.shape, copy.nbytes, copy.times
        (0, (1000,), 4000, 1)
    """

    def __init__(self, text: str) -> None:
        self._header, _, _ = text.partition("\n")
        self._computations: dict[str, _Computation] = {}
        self._entry = ""
        for name, is_entry, computation in _computations(text):
            self._computations[name] = computation
            self._entry = name if is_entry else self._entry
        self._callers: dict[str, tuple[str, str]] = {}
        for caller, computation in self._computations.items():
            for instruction in computation.instructions.values():
                for callee in instruction.called:
                    self._callers.setdefault(callee, (caller, instruction.name))

    @functools.cached_property
    def parameters(self) -> list[Parameter]:
        """The arguments of the program, in order."""
        entry = self._computations[self._entry]
        found: list[Parameter] = []
        for name in entry.parameters:
            instruction = entry.instructions[name]
            label = re.search(r'op_name="((?:[^"\\]|\\.)*)"', instruction.rest)
            dtype, shape = instruction.array or ("", ())
            found.append(Parameter(label[1].replace("\\", "") if label else "", dtype, shape))
        return found

    @property
    def aliased(self) -> set[int]:
        """The parameters whose memory an output takes over."""
        begin = self._header.find("input_output_alias={")
        if begin < 0:
            return set()
        return {int(number) for _, number, _ in _ALIAS.findall(_balanced(self._header[begin:]))}

    @property
    def launches(self) -> Launches:
        """What one call of the program has a device do."""
        return self._launches(self._entry)

    def copies(self, smallest: int) -> list[Copy]:
        """All copies of arrays of at least ``smallest`` bytes."""
        found: list[Copy] = []
        for name, computation in self._computations.items():
            for instruction in computation.instructions.values():
                if instruction.opcode not in ("copy", "copy-start"):
                    continue
                array = _array(instruction.type.lstrip("("))
                if array is None or _nbytes(*array) < smallest or self._is_inner(name, instruction):
                    continue
                around = list(self._around(name))
                loops = [_trips(call) for call in around if call.opcode == "while"]
                times = None if None in loops else math.prod(trips or 1 for trips in loops)
                found.append(
                    Copy(
                        parameter=self._origin(name, instruction.name),
                        dtype=array[0],
                        shape=array[1],
                        nbytes=_nbytes(*array),
                        in_loop=bool(loops),
                        times=times,
                        conditional=any(call.opcode == "conditional" for call in around),
                    )
                )
        return found

    def _launches(self, name: str) -> Launches:
        kernels, waits = 0, 0
        for instruction in self._computations[name].instructions.values():
            times, called = 1, instruction.called
            if instruction.opcode == "while":
                body, trips = _BODY.search(instruction.rest), _trips(instruction)
                # Of a known number of steps none is asked whether it is the last.
                if body and trips is not None:
                    times, called = trips, (body[1],)
                else:
                    waits += 1
            elif instruction.opcode == "conditional":
                waits += 1
            elif instruction.opcode != "call":
                kernels += instruction.opcode not in _NOTHING
                continue
            for callee in called:
                inside = self._launches(callee)
                kernels += times * inside.kernels
                waits += times * inside.waits
        return Launches(kernels, waits)

    def _is_inner(self, name: str, instruction: _Instruction) -> bool:
        """Whether it is a step inside a fusion, whose result is never stored."""
        caller = self._callers.get(name)
        if caller is None:
            return False
        call = self._computations[caller[0]].instructions[caller[1]]
        if call.opcode != "fusion":
            return False
        computation = self._computations[name]
        root = computation.instructions[computation.root]
        stored = root.operands if root.opcode == "tuple" else (root.name,)
        return instruction.name not in stored

    def _around(self, name: str) -> Iterator[_Instruction]:
        """What calls a computation, from the inside out."""
        while name in self._callers:
            name, site = self._callers[name]
            yield self._computations[name].instructions[site]

    def _origin(self, computation: str, name: str) -> int | None:
        """The parameter of the program that a value is made of, by what keeps its size."""
        todo: list[tuple[str, str, int | None]] = [(computation, name, None)]
        seen: set[tuple[str, str, int | None]] = set()
        while todo:
            here = todo.pop()
            if here in seen:
                continue
            seen.add(here)
            where, name, _ = here
            instruction = self._computations[where].instructions[name]
            if instruction.opcode == "parameter" and where == self._entry:
                return self._computations[where].parameters.index(name)
            todo.extend(reversed(list(self._sources(*here))))
        return None

    def _sources(
        self, where: str, name: str, part: int | None
    ) -> Iterator[tuple[str, str, int | None]]:
        """Where a value, or a part of a tuple, comes from."""
        instruction = self._computations[where].instructions[name]
        operands, opcode = instruction.operands, instruction.opcode
        if opcode == "parameter":
            yield from self._given(where, name, part)
        elif opcode == "get-tuple-element":
            yield where, operands[0], instruction.index
        elif opcode == "tuple":
            if part is not None and part < len(operands):
                yield where, operands[part], None
        elif opcode in ("while", "opt-barrier"):
            yield where, operands[0], part
        elif opcode in ("call", "conditional") or (opcode == "fusion" and part is not None):
            for callee in instruction.called:
                yield callee, self._computations[callee].root, part
        elif opcode in ("copy-start", "copy-done"):
            yield where, operands[0], None
        else:
            wanted = instruction.array
            for operand in operands:
                source = self._computations[where].instructions.get(operand)
                if source is None:
                    continue
                got = _array(source.type.lstrip("("))
                if wanted and got and _alike(wanted, got):
                    yield where, operand, None

    def _given(
        self, where: str, name: str, part: int | None
    ) -> Iterator[tuple[str, str, int | None]]:
        """What a computation is called with."""
        if where not in self._callers:
            return
        caller, site = self._callers[where]
        call = self._computations[caller].instructions[site]
        if call.opcode == "while":
            yield caller, call.operands[0], part
        elif call.opcode == "conditional":
            branch = call.called.index(where)
            yield caller, call.operands[1 + branch], part
        else:
            number = self._computations[where].parameters.index(name)
            if number < len(call.operands):
                yield caller, call.operands[number], part


def _computations(text: str) -> Iterator[tuple[str, bool, _Computation]]:
    """The computations of a program: name, whether it is the entry, and contents."""
    name, is_entry, root = "", False, ""
    instructions: dict[str, _Instruction] = {}
    for line in text.splitlines():
        if begins := _COMPUTATION.match(line):
            name, is_entry, root, instructions = begins[2], bool(begins[1]), "", {}
        elif line.startswith("}") and name:
            numbered = [
                (int(instruction.operands[0]), instruction.name)
                for instruction in instructions.values()
                if instruction.opcode == "parameter"
            ]
            parameters = tuple(parameter for _, parameter in sorted(numbered))
            yield name, is_entry, _Computation(instructions, root, parameters)
            name = ""
        elif name and (found := _INSTRUCTION.match(line)):
            instruction = _instruction(found[2], re.sub(r"/\*.*?\*/", "", found[3]))
            instructions[instruction.name] = instruction
            root = instruction.name if found[1] else root


def _trips(loop: _Instruction) -> int | None:
    """How many steps a loop has, if that is known."""
    trips = _TRIPS.search(loop.rest)
    return int(trips[1]) if trips else None


def _instruction(name: str, text: str) -> _Instruction:
    kind = _balanced(text) if text.startswith("(") else text.split(" ", 1)[0]
    opcode, _, rest = text[len(kind) :].strip().partition("(")
    inside = _balanced("(" + rest)
    given = inside[1:-1]
    operands = re.findall(r"%([\w.\-]+)", given) or re.findall(r"[\w.\-]+", given)
    return _Instruction(name, kind, opcode, tuple(operands), rest[len(inside) - 1 :])


def _balanced(text: str) -> str:
    """The text up to where the first bracket closes."""
    depth = 0
    for at, char in enumerate(text):
        if char in "({":
            depth += 1
        elif char in ")}":
            depth -= 1
            if depth == 0:
                return text[: at + 1]
    return text


def _array(kind: str) -> tuple[str, tuple[int, ...]] | None:
    found = _ARRAY.match(kind)
    if found is None:
        return None
    return found[1], tuple(int(axis) for axis in found[2].split(",") if axis)


def _alike(one: tuple[str, tuple[int, ...]], other: tuple[str, tuple[int, ...]]) -> bool:
    return one[0] == other[0] and math.prod(one[1]) == math.prod(other[1])


def _nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    bits = re.search(r"\d+", dtype)
    return -(-math.prod(shape) * (int(bits[0]) if bits else 8) // 8)

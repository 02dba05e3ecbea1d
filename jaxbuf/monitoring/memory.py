"""Which parts of a buffer a step updates in place, and which it copies."""

import dataclasses
import inspect
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import jax

from jaxbuf.core import checks
from jaxbuf.core.sizes import MOST_ON_HOST, check_count, format_bytes
from jaxbuf.monitoring.hlo import Copy, Parameter, Program

Fate = Literal["in place", "read", "copied"]


@dataclasses.dataclass(frozen=True)
class LeafMemory:
    """What a program does with one array of its arguments.

    Attributes:
        name: Which one, such as ``buffer.data['obs']``.
        shape: Its shape.
        dtype: Name of its dtype.
        nbytes: Its size in bytes.
        donated: Whether the program may write to its memory.
        fate: ``"in place"`` if the result lies in the same memory, and nothing was copied on the
            way; ``"read"`` if there is no result and no copy; ``"copied"`` otherwise.
        bytes_copied: What copies of it write in one call, a loop's steps counted one by one if
            their number is known when the program is compiled, and once otherwise. Copies in the
            branches of conditionals count as if all were taken.
        copies: The copies in detail; none where the result is simply written to other memory.
        in_buffer: Whether it is part of a buffer.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    donated: bool
    fate: Fate
    bytes_copied: int
    copies: tuple[Copy, ...]
    in_buffer: bool

    @property
    def in_loop(self) -> bool:
        """Whether it is copied in each step of a loop."""
        return any(copy.in_loop for copy in self.copies)


@dataclasses.dataclass(frozen=True)
class MemoryReport:
    """What a compiled function does with the memory of its buffers. Its ``str`` is a table.

    Attributes:
        name: Of the function.
        leaves: The arrays looked at.
        smallest: Copies of fewer bytes are ignored.
        temporary_bytes: What the program needs beside its arguments and results; None where the
            backend does not tell.
        closed_over_bytes: Size of the arrays that the function takes from around it, not as
            arguments: constants of the program, which cannot be donated.
        other_copies: Copies of which the program does not tell whose contents they are of.
    """

    name: str
    leaves: tuple[LeafMemory, ...]
    smallest: int
    temporary_bytes: int | None
    closed_over_bytes: int
    other_copies: tuple[Copy, ...]

    @property
    def copied(self) -> tuple[str, ...]:
        """Names of the leaves that are copied."""
        return self._names("copied")

    @property
    def in_place(self) -> tuple[str, ...]:
        """Names of the leaves that are updated in place."""
        return self._names("in place")

    @property
    def read(self) -> tuple[str, ...]:
        """Names of the leaves that are only read."""
        return self._names("read")

    @property
    def bytes_copied(self) -> int:
        """What all copies together write in one call."""
        return sum(leaf.bytes_copied for leaf in self.leaves)

    @property
    def bytes_in_place(self) -> int:
        """Size of the leaves that are updated in place."""
        return sum(leaf.nbytes for leaf in self.leaves if leaf.fate == "in place")

    @property
    def advice(self) -> str:
        """What to change, if anything is copied or closed over; empty otherwise."""
        return " ".join(self._advice())

    def __str__(self) -> str:
        width = max((len(leaf.name) for leaf in self.leaves), default=0)
        sizes = [format_bytes(leaf.nbytes) for leaf in self.leaves]
        wide = max((len(size) for size in sizes), default=0)
        lines = [
            f"{self.name}: {_size(self.bytes_copied, self.leaves)} copied, "
            f"{format_bytes(self.bytes_in_place)} updated in place"
        ]
        for leaf, size in zip(self.leaves, sizes, strict=True):
            lines.append(f"  {leaf.name:<{width}}  {size:>{wide}}  {_fate(leaf)}")
        return "\n".join([*lines, *self._advice()])

    def __repr__(self) -> str:
        return str(self)

    def _names(self, fate: Fate) -> tuple[str, ...]:
        return tuple(leaf.name for leaf in self.leaves if leaf.fate == fate)

    def _advice(self) -> Iterator[str]:
        copied = [leaf for leaf in self.leaves if leaf.fate == "copied"]
        if self.closed_over_bytes:
            yield (
                f"The function closes over {format_bytes(self.closed_over_bytes)} of arrays, which "
                "are constants of the program and copied where they change: pass a buffer as an "
                "argument."
            )
        if any(not leaf.donated for leaf in copied):
            yield (
                "What is not donated must stay as it was, so its new contents need memory of their "
                "own: donate the buffer (jax.jit(..., donate_argnums=...); jaxbuf.add and "
                "jaxbuf.update_priority do) and go on with the result."
            )
        if any(leaf.in_loop for leaf in copied):
            yield (
                "A step of a loop copies what it reads before it writes and still needs after: add "
                "before you sample, and read nothing of the old buffer once there is a new one."
            )
        elif any(leaf.donated for leaf in copied):
            yield (
                "What is donated is copied if the old contents are needed after the new ones are "
                "written: return only the new buffer, and sample from that one."
            )


def explain_memory(
    fn: Callable[..., Any],
    *args: Any,
    donate_argnums: int | Sequence[int] = 0,
    static_argnums: int | Sequence[int] = (),
    smallest: int = 1024,
) -> MemoryReport:
    """Compile a function and tell which arrays of its buffers it copies.

    Nothing runs, so it also tells of buffers that do not fit in memory: any argument may consist of
    ``jax.ShapeDtypeStruct`` instead of arrays (see ``jax.eval_shape``).

    Args:
        fn: The function: a training step, or a method such as ``jaxbuf.ItemBuffer.add`` or
            ``buffer.add``, of which the buffer is the first argument. One that ``jax.jit`` returned
            keeps its own donated and static arguments.
        *args: What it is called with.
        donate_argnums: Which arguments it may overwrite, as in ``jax.jit``; ``()`` for none.
        static_argnums: Which arguments are static, as in ``jax.jit``.
        smallest: Ignore copies of fewer bytes: counters are copied all the time.

    Returns:
        A ``MemoryReport`` on the leaves of all buffers among the arguments, and of those that are
        donated; on all arguments if there are none of either kind.

    Raises:
        ValueError: If ``smallest`` is below 1.

    Example:
        >>> import jax.numpy as jnp, jaxbuf
        >>> buffer = jaxbuf.ItemBuffer.create({"obs": jnp.zeros(8)}, capacity=10_000)
        >>> items = {"obs": jnp.ones((32, 8))}
        >>> print(jaxbuf.explain_memory(buffer.add, items))
        add: 0 B copied, 312.5 KiB updated in place
          self.data['obs']         312.5 KiB  in place
          self.occupancy.counters       12 B  in place
          self.counters                  8 B  in place
        >>> kept = jaxbuf.explain_memory(buffer.add, items, donate_argnums=())
        >>> kept.copied, kept.bytes_copied
        (("self.data['obs']", 'self.occupancy.counters', 'self.counters'), 320020)
    """
    smallest = check_count("smallest", smallest, most=MOST_ON_HOST)
    if not callable(fn):
        raise ValueError(f"fn is {checks.name_of(fn)}; expected a function")
    owner = getattr(fn, "__self__", None)
    if _is_buffer(owner):
        fn, args = getattr(fn, "__func__", fn), (owner, *args)
    jitted: Any = fn
    if not hasattr(fn, "trace"):
        jitted = jax.jit(
            fn, donate_argnums=donate_argnums, static_argnums=static_argnums, keep_unused=True
        )
    with warnings.catch_warnings():
        # What is donated in vain is in the report.
        warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
        traced = jitted.trace(*args)
        lowered = traced.lower()
        compiled = lowered.compile()
    program = Program(compiled.as_text())
    # A program from the compilation cache bears the names of the one that was compiled first.
    parameters = Program(lowered.as_text("hlo", debug_info=True)).parameters
    leaves = _leaves(lowered.args_info, lowered.out_info)
    number = dict(_matches(leaves, parameters))
    copies = program.copies(smallest)
    names = _names(fn, lowered.args_info)
    found = [
        _explain(
            leaf,
            parameters[number[i]].label if i in number else "",
            names,
            [copy for copy in copies if i in number and copy.parameter == number[i]],
            i in number and number[i] in program.aliased,
        )
        for i, leaf in enumerate(leaves)
    ]
    watched = [leaf.in_buffer or leaf.info.donated for leaf in leaves]
    if not any(watched):
        watched = [True] * len(leaves)
    memory = compiled.memory_analysis()
    constants = [getattr(value, "nbytes", 0) for value in traced.jaxpr.consts]
    return MemoryReport(
        name=getattr(fn, "__name__", type(fn).__name__),
        leaves=tuple(leaf for leaf, wanted in zip(found, watched, strict=True) if wanted),
        smallest=smallest,
        temporary_bytes=getattr(memory, "temp_size_in_bytes", None),
        closed_over_bytes=sum(size for size in constants if size >= smallest),
        other_copies=tuple(copy for copy in copies if copy.parameter is None),
    )


@dataclasses.dataclass(frozen=True)
class _Leaf:
    """An array of the arguments: where it stands, and whether there is a new form of it."""

    path: tuple[Any, ...]
    info: Any
    in_buffer: bool
    returned: bool

    @property
    def inner(self) -> str:
        """Its name within its argument."""
        return jax.tree_util.keystr(self.path[2:])


def _leaves(args_info: Any, out_info: Any) -> list[_Leaf]:
    """All arrays of the arguments, in order."""
    found: list[_Leaf] = []
    for path, node in jax.tree_util.tree_leaves_with_path(args_info, is_leaf=_is_buffer):
        returned = _is_buffer(node) and _is_in(node, out_info)
        for inner, info in jax.tree_util.tree_leaves_with_path(node):
            found.append(_Leaf((*path, *inner), info, _is_buffer(node), returned))
    return found


def _is_buffer(node: Any) -> bool:
    return dataclasses.is_dataclass(node) and hasattr(node, "add") and hasattr(node, "replace")


def _is_in(buffer: Any, out_info: Any) -> bool:
    """Whether there is a buffer like this one among the results."""
    wanted = jax.tree.structure(buffer)
    shapes = [info.shape for info in jax.tree.leaves(buffer)]
    return any(
        jax.tree.structure(out) == wanted and [x.shape for x in jax.tree.leaves(out)] == shapes
        for out in jax.tree.leaves(out_info, is_leaf=_is_buffer)
    )


def _matches(leaves: list[_Leaf], parameters: list[Parameter]) -> Iterator[tuple[int, int]]:
    """Which argument each parameter is: all in order, but those that nothing uses may be gone."""
    at = 0
    for number, parameter in enumerate(parameters):
        while at < len(leaves):
            leaf = leaves[at]
            root = parameter.label.removesuffix(leaf.inner)
            known = not parameter.label or (
                parameter.label.endswith(leaf.inner) and root.replace("*", "").isidentifier()
            )
            at += 1
            if len(leaves) == len(parameters) or known:
                yield at - 1, number
                break


def _names(fn: Any, args_info: Any) -> list[str]:
    """What the positional arguments are called."""
    try:
        given = list(inspect.signature(fn).parameters)
    except (TypeError, ValueError):
        given = []
    count = len(args_info[0])
    return given if len(given) == count else [f"args[{i}]" for i in range(count)]


def _explain(
    leaf: _Leaf,
    label: str,
    names: list[str],
    copies: list[Copy],
    aliased: bool,
) -> LeafMemory:
    shape, dtype = tuple(leaf.info.shape), leaf.info.dtype
    nbytes = math.prod(shape) * getattr(dtype, "itemsize", 1)
    written = sum(copy.nbytes * (1 if copy.times is None else copy.times) for copy in copies)
    if not copies and not aliased and leaf.returned:
        written = nbytes
    fate: Fate = "copied" if written else "in place" if aliased else "read"
    return LeafMemory(
        name=label or names[leaf.path[1].idx] + leaf.inner,
        shape=shape,
        dtype=str(dtype),
        nbytes=nbytes,
        donated=leaf.info.donated,
        fate=fate,
        bytes_copied=written,
        copies=tuple(copies),
        in_buffer=leaf.in_buffer,
    )


def _size(nbytes: int, leaves: Sequence[LeafMemory]) -> str:
    """What is copied, which is less where a conditional takes another branch."""
    at_most = any(copy.conditional for leaf in leaves for copy in leaf.copies)
    return f"{'up to ' if at_most else ''}{format_bytes(nbytes)}"


def _fate(leaf: LeafMemory) -> str:
    if leaf.fate != "copied":
        return leaf.fate
    text = f"copied: {_size(leaf.bytes_copied, [leaf])}"
    loops = [copy for copy in leaf.copies if copy.in_loop]
    if loops:
        steps = {copy.times for copy in loops}
        often = f" of {steps.pop()}" if len(steps) == 1 and None not in steps else ""
        text += f", {len(loops)} × in each step of a loop{often}"
    return text

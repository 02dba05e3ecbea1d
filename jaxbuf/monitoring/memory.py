"""Reports on which parts of a buffer a step updates in place, and which it copies."""

import dataclasses
import functools
import math
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import jax
from jaxtyping import PyTree

from jaxbuf.core import checks
from jaxbuf.core.segment_tree import width_for, widths_of
from jaxbuf.core.sizes import MOST_ON_HOST, check_count, format_bytes

Fate = Literal["in place", "read", "copied"]

ORDER = (
    "XLA copies what a step reads before it writes and still needs after: add before you sample, "
    "and read nothing of the old buffer once there is a new one."
)

# In the first line of a program: `input_output_alias={ {0}: (2, {}, may-alias), ... }`.
_ALIASED = re.compile(r"\{[\d, ]*\}: \((\d+), \{\}")
# In a line of it: `%copy.1 = f32[64,64]{1,0} copy(%p)`.
_COPY = re.compile(r" = \(?(\w+)\[([\d,]*)\].* copy(?:-start)?\(")


@dataclasses.dataclass(frozen=True)
class LeafMemory:
    """The use that a program makes of the memory of one array among its arguments.

    Attributes:
        name: Its name, such as ``buffer.data['obs']``.
        shape: Its shape.
        dtype: Name of its dtype.
        nbytes: Its size in bytes.
        donated: Whether the program may write to its memory.
        in_buffer: Whether it is part of a buffer.
        fate: ``"in place"`` if a result is in the same memory; ``"copied"`` if its buffer is
            returned in other memory; ``"read"`` otherwise.
        copied_within: Whether the program copies an array of its dtype and shape on the way.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    donated: bool
    in_buffer: bool
    fate: Fate
    copied_within: bool = False

    def may_be(self, dtype: str, shape: tuple[int, ...]) -> bool:
        """Returns whether an array in the text of a program may hold the numbers of this leaf.

        Args:
            dtype: Its dtype as the text has it, such as ``f32``.
            shape: Its shape. Axes of length 1 do not count, and the first two of a leaf, such as
                environments and time, may be one axis.
        """
        axes = _squeezed(self.shape)
        if self.dtype.startswith("key<"):
            # The number of words of a key.
            return dtype == "u32" and _squeezed(shape)[:-1] == axes
        return dtype == _hlo_dtype(self.dtype) and _squeezed(shape) in (
            axes,
            (math.prod(axes[:2]), *axes[2:]),
            (*axes[:1], math.prod(axes[1:3]), *axes[3:]),
        )


@dataclasses.dataclass(frozen=True)
class MemoryReport:
    """A report on the memory of buffers in a compiled function. Its ``str`` is a table.

    Attributes:
        name: The name of the function.
        leaves: The arrays that the report covers.
        result_bytes: Size of the results that are not in the memory of an argument.
        temporary_bytes: Memory that the program needs besides its arguments and results. A program
            that copies an array on the way to a result needs at least the size of that array.
        closed_over_bytes: Size of the arrays that the function closes over. They are constants of
            the program and cannot be donated.
        for_platform: The platform of the program, where buffers are laid out for another one; else
            empty.
    """

    name: str
    leaves: tuple[LeafMemory, ...]
    result_bytes: int
    temporary_bytes: int
    closed_over_bytes: int
    for_platform: str = ""

    @property
    def copied(self) -> tuple[str, ...]:
        """Names of the leaves whose new contents are in other memory."""
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
        """Size of the leaves that are copied."""
        return sum(leaf.nbytes for leaf in self.leaves if leaf.fate == "copied")

    @property
    def bytes_in_place(self) -> int:
        """Size of the leaves that are updated in place."""
        return sum(leaf.nbytes for leaf in self.leaves if leaf.fate == "in place")

    @property
    def advice(self) -> str:
        """Advice on how to avoid copies and closed-over arrays; empty if there are none."""
        return " ".join(self._advice())

    def __str__(self) -> str:
        width = max((len(leaf.name) for leaf in self.leaves), default=0)
        sizes = [format_bytes(leaf.nbytes) for leaf in self.leaves]
        wide = max((len(size) for size in sizes), default=0)
        lines = [
            f"{self.name}: {format_bytes(self.bytes_copied)} copied, "
            f"{format_bytes(self.bytes_in_place)} updated in place, "
            f"{format_bytes(self.temporary_bytes)} of temporary memory"
        ]
        for leaf, size in zip(self.leaves, sizes, strict=True):
            lines.append(f"  {leaf.name:<{width}}  {size:>{wide}}  {leaf.fate}")
        return "\n".join([*lines, *self._advice()])

    def __repr__(self) -> str:
        return str(self)

    def _names(self, fate: Fate) -> tuple[str, ...]:
        return tuple(leaf.name for leaf in self.leaves if leaf.fate == fate)

    def _advice(self) -> Iterator[str]:
        if self.for_platform:
            yield (
                "The priorities of the buffer are laid out for another platform, where they were "
                f"created: pass jaxbuf.for_platform(buffer, {self.for_platform!r})."
            )
        if self.closed_over_bytes:
            yield (
                f"The function closes over {format_bytes(self.closed_over_bytes)} of arrays, which "
                "are constants of the program and copied where they change: pass a buffer as an "
                "argument."
            )
        if any(leaf.fate == "copied" for leaf in self.leaves):
            yield (
                "A buffer that is not donated must stay as it was, so its new contents need memory "
                "of their own: donate the buffer (jax.jit(..., donate_argnums=...); jaxbuf.add and "
                "jaxbuf.update_priority do) and go on with the result."
            )
        extra = self.temporary_bytes + self.result_bytes
        copied = [
            leaf
            for leaf in self.leaves
            if leaf.in_buffer and leaf.fate == "in place" and leaf.copied_within
        ]
        largest = max(copied, key=lambda leaf: leaf.nbytes, default=None)
        if largest is not None and extra >= largest.nbytes:
            yield (
                f"The program needs {format_bytes(extra)} beside its arguments, and copies "
                f"{largest.name} or an array like it. {ORDER} jaxbuf.testing.assert_no_copy names "
                "all that is copied."
            )


def explain_memory(
    fn: Callable[..., Any],
    *args: Any,
    donate_argnums: int | Sequence[int] = 0,
    static_argnums: int | Sequence[int] = (),
    smallest: int = 1024,
) -> MemoryReport:
    """Compiles a function, and reports which arrays of a buffer it updates in place.

    The function is not run. Arguments may also be ``jax.ShapeDtypeStruct``, which take no memory.

    Args:
        fn: The function to explain, such as ``jaxbuf.add``, a training step, or a method of a
            buffer, which is then the first argument. A function that ``jax.jit`` or flax's
            ``nnx.jit`` returned keeps its own donated and static arguments. Pass buffers as
            arguments of their own: nnx takes a module apart, so that a buffer inside of it is only
            arrays without names.
        *args: The arguments of the function.
        donate_argnums: Positions of arguments that it may overwrite, as in ``jax.jit``; ``()`` for
            none.
        static_argnums: Positions of static arguments, as in ``jax.jit``.
        smallest: Arrays of fewer bytes may be closed over, or copied.

    Returns:
        A ``MemoryReport`` on the leaves of all buffers among the arguments and of donated
        arguments; on all arguments if there are no such leaves.

    Raises:
        ValueError: If ``smallest`` is below 1, or ``fn`` is not a function, or one of equinox's
            ``filter_jit``; the message says what to pass in place of that one.

    Example:
        >>> import jax.numpy as jnp, jaxbuf
        >>> buffer = jaxbuf.ItemBuffer.create({"obs": jnp.zeros(8)}, capacity=10_000)
        >>> items = {"obs": jnp.ones((32, 8))}
        >>> print(jaxbuf.explain_memory(buffer.add, items))
        add: 0 B copied, 312.5 KiB updated in place, ... of temporary memory
          self.data['obs']         312.5 KiB  in place
          ...
        >>> jaxbuf.explain_memory(buffer.add, items, donate_argnums=()).copied
        ("self.data['obs']", ...)
    """
    smallest = check_count("smallest", smallest, most=MOST_ON_HOST)
    if not callable(fn):
        raise ValueError(f"fn is {checks.name_of(fn)}; expected a function")
    return compile_step(fn, args, donate_argnums, static_argnums, smallest)[0]


def compile_step(
    fn: Any,
    args: tuple[Any, ...],
    donate_argnums: int | Sequence[int],
    static_argnums: int | Sequence[int],
    smallest: int,
) -> tuple[MemoryReport, str]:
    """Returns the report of ``explain_memory``, and the text of the compiled program."""
    owner = getattr(fn, "__self__", None)
    if _is_buffer(owner):
        fn, args = getattr(fn, "__func__", fn), (owner, *args)
    if hasattr(getattr(fn, "func", None), "lower") and not fn.keywords:
        # A compiled method of a module, or a compiled function with some of its arguments.
        fn, args = fn.func, (*fn.args, *args)
    jitted: Any = fn
    if hasattr(fn, "lower") and not hasattr(fn, "trace"):
        raise ValueError(
            f"fn is {checks.name_of(fn)}, which hides its arguments from JAX, as a function of "
            "equinox.filter_jit does; pass jax.jit(fn.__wrapped__, donate_argnums=...) in its "
            "place, with arrays as the only leaves of its arguments"
        )
    if not hasattr(fn, "trace"):
        # JAX caches the trace of ``fn`` itself, but the variables that it closes over may change.
        @functools.wraps(fn)
        def uncached(*args: Any) -> Any:
            return fn(*args)

        jitted = jax.jit(uncached, donate_argnums=donate_argnums, static_argnums=static_argnums)
    with warnings.catch_warnings():
        # The report has the arguments whose donation has no effect.
        warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
        traced = jitted.trace(*args)
        # flax's nnx.jit has stages of its own around those of JAX.
        traced = getattr(traced, "traced", traced)
        lowered = traced.lower()
        compiled = lowered.compile()
    # The program has no parameter for an unused argument, whose sharding is None; an argument may
    # have nodes that are None as well, which are no leaves.
    shardings = lowered.in_tree.flatten_up_to(compiled.input_shardings)
    used = [i for i, sharding in enumerate(shardings) if sharding is not None]
    text = compiled.as_text() or ""
    aliased = {used[int(number)] for number in _ALIASED.findall(text.partition("\n")[0])}

    leaves: list[LeafMemory] = []
    names = traced.jaxpr.jaxpr.debug_info.arg_names
    copies = {
        (dtype, tuple(int(axis) for axis in shape.split(",") if axis))
        for dtype, shape in _COPY.findall(text)
    }
    for _, node in jax.tree_util.tree_leaves_with_path(lowered.args_info, is_leaf=_is_buffer):
        # A buffer that is not among the results has no new contents.
        fate: Fate = "copied" if _is_buffer(node) and _is_in(node, lowered.out_info) else "read"
        for info in jax.tree.leaves(node):
            leaf = LeafMemory(
                name=names[len(leaves)],
                shape=tuple(info.shape),
                dtype=str(info.dtype),
                nbytes=math.prod(info.shape) * getattr(info.dtype, "itemsize", 1),
                donated=info.donated,
                in_buffer=_is_buffer(node),
                fate="in place" if len(leaves) in aliased else fate,
            )
            within = leaf.nbytes >= smallest and any(leaf.may_be(*copy) for copy in copies)
            leaves.append(dataclasses.replace(leaf, copied_within=within))
    devices = (device for sharding in shardings if sharding for device in sharding.device_set)
    platform = next(devices, jax.devices()[0]).platform
    watched = [leaf for leaf in leaves if leaf.in_buffer or leaf.donated] or leaves
    memory = compiled.memory_analysis()
    constants = [getattr(value, "nbytes", 0) for value in traced.jaxpr.consts]
    report = MemoryReport(
        name=getattr(fn, "__name__", type(fn).__name__),
        leaves=tuple(watched),
        result_bytes=memory.output_size_in_bytes - memory.alias_size_in_bytes if memory else 0,
        temporary_bytes=memory.temp_size_in_bytes if memory else 0,
        closed_over_bytes=sum(size for size in constants if size >= smallest),
        for_platform=platform if widths_of(args) - {width_for(platform)} else "",
    )
    return report, text


def _is_buffer(node: Any) -> bool:
    return dataclasses.is_dataclass(node) and hasattr(node, "add") and hasattr(node, "replace")


def _is_in(buffer: Any, out_info: PyTree) -> bool:
    """Returns whether there is a buffer like this one among the results."""

    def signature(node: PyTree) -> tuple[Any, ...]:
        return jax.tree.structure(node), *(leaf.shape for leaf in jax.tree.leaves(node))

    return signature(buffer) in map(signature, jax.tree.leaves(out_info, is_leaf=_is_buffer))


def _squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(axis for axis in shape if axis != 1)


def _hlo_dtype(dtype: str) -> str:
    """Returns the name of a dtype in the text of a program.

    Example:
        >>> [_hlo_dtype(dtype) for dtype in ("float32", "bool", "uint8", "bfloat16", "float8_e5m2")]
        ['f32', 'pred', 'u8', 'bf16', 'f8e5m2']
    """
    if dtype == "bool":
        return "pred"
    names = (("bfloat", "bf"), ("float", "f"), ("uint", "u"), ("int", "s"), ("complex", "c"))
    long, short = next((pair for pair in names if dtype.startswith(pair[0])), ("", ""))
    return (short + dtype.removeprefix(long)).replace("_", "")

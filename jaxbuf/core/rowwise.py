"""Arithmetic on the rows of a batch.

XLA:CPU runs a program in the thread that calls it only if it is short: it counts operations, one on
``[B]`` ``B`` times and the body of a loop once. Any other is handed to threads, which takes longer
than most of what happens to a batch here; and what is fused into a gather is computed for every
element that is gathered. A loop over the rows escapes both. It is one native function, slower than
the vectorized form by a few nanoseconds per row.

Kernels are handed to threads, too, as soon as more than eight could run next. Those that make the
zeros that loops begin with always could, unless the zeros depend on something: see ``after``.
"""

import contextlib
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap
from jaxtyping import Array, Bool, Int, Num, PyTree, UInt

from jaxbuf.core import in_place

# Up to how many rows to loop, on a CPU: in any program; where the rows are consecutive slots; and
# in a program that is nothing but one operation, which is to be short.
_SHORT = 64
SHORT_RUN = 256
_SHORT_ALONE = 512
# Bits of half a word.
_HALF = 16
# Part of what jit looks a program up by, so that functions in it are traced for both.
_is_alone: Any = jax.make_user_context(False)


def alone() -> contextlib.AbstractContextManager[None]:
    """What is traced in this context is a whole program: one operation, called from Python."""
    return _is_alone(True)


def is_alone() -> bool:
    """Whether what is traced is a whole program: one operation, called from Python."""
    return bool(_is_alone.value)


def most_rows() -> int:
    """Up to how many rows to loop, on a CPU, in the program that is being traced."""
    return _SHORT_ALONE if is_alone() else _SHORT


def each(
    function: Callable[..., PyTree[Array]],
    rows: PyTree[Array],
    shared: PyTree[Array] = (),
    static: tuple[Hashable, ...] = (),
    *,
    most: int | None = None,
    at_once: Callable[..., PyTree[Array]] | None = None,
    touch: Callable[..., Sequence[Array]] | None = None,
) -> PyTree[Array]:
    """``function(row, shared, *static)`` for every row of a batch.

    Args:
        function: Works on numbers as well as elementwise on arrays of them, without reductions. It
            should be the same object each time, as it is compiled once for each.
        rows: Leaves ``[B]``.
        shared: Arrays of any shape, the same for all rows.
        static: Further arguments, not traced.
        most: Up to how many rows to loop, on a CPU; by default ``most_rows()``.
        at_once: What to use for all rows at once, where there is no loop; by default the same.
        touch: ``touch(row, shared)`` is what to read from memory before, see ``touched``.

    Returns:
        What ``function`` returns for all rows together, leaves ``[B, ...]``.
    """
    most = most_rows() if most is None else most
    loops = 0 < jax.tree.leaves(rows)[0].shape[0] <= most
    return _each(function, at_once or function, touch, rows, shared, static, loops=loops)


@functools.partial(jax.jit, static_argnames=("function", "at_once", "touch", "static", "loops"))
def _each(
    function: Callable[..., PyTree[Array]],
    at_once: Callable[..., PyTree[Array]],
    touch: Callable[..., Sequence[Array]] | None,
    rows: PyTree[Array],
    shared: PyTree[Array],
    static: tuple[Hashable, ...],
    *,
    loops: bool,
) -> PyTree[Array]:
    def one(row: PyTree[Array], shared: PyTree[Array]) -> PyTree[Array]:
        return function(row, shared, *static)

    def plain(rows: PyTree[Array], shared: PyTree[Array]) -> PyTree[Array]:
        return at_once(rows, shared, *static)

    if not loops:
        return plain(rows, shared)
    return on_cpu(functools.partial(_loop, one, touch), plain, rows, shared)


def reduce(
    combine: Callable[[Array, Array], Array], values: Num[Array, " B"], start: float
) -> Num[Array, ""]:
    """What ``combine`` makes of ``start`` and all rows of a batch, in whatever order."""
    return _reduce(combine, values, start, loops=0 < values.shape[0] <= most_rows())


@functools.partial(jax.jit, static_argnames=("combine", "start", "loops"))
def _reduce(
    combine: Callable[[Array, Array], Array], values: Num[Array, " B"], start: float, *, loops: bool
) -> Num[Array, ""]:
    def plain(values: Num[Array, " B"]) -> Num[Array, ""]:
        return lax.reduce(values, jnp.asarray(start, values.dtype), combine, (0,))

    def loop(values: Num[Array, " B"]) -> Num[Array, ""]:
        zero = after(values)
        begin = zero.astype(values.dtype) + jnp.asarray(start, values.dtype)

        def step(i: Array, all_: Array) -> Array:
            return combine(all_, in_place.get(values, i))

        return repeat(Steps(zero), values.shape[0], step, begin)[1]

    return on_cpu(loop, plain, values) if loops else plain(values)


@functools.partial(jax.jit, static_argnames=("fill", "size"))
def pack(
    values: Int[Array, " B"], chosen: Bool[Array, " B"], fill: int, *, size: int
) -> tuple[Int[Array, " S"], Int[Array, ""]]:
    """The chosen values in front, in their order, and how many there are.

    Args:
        values: Of each row, ``[B]``.
        chosen: Which rows.
        fill: What comes after them.
        size: Length of the result, at least ``B``.
    """

    def plain(
        values: Int[Array, " B"], chosen: Bool[Array, " B"]
    ) -> tuple[Int[Array, " S"], Int[Array, ""]]:
        until = jnp.cumsum(chosen, dtype=jnp.int32)
        place = jnp.where(chosen, until - 1, size)
        packed = jnp.full((size,), fill, values.dtype).at[place].set(values, mode="drop")
        return packed, jnp.sum(chosen, dtype=jnp.int32)

    def loop(
        values: Int[Array, " B"], chosen: Bool[Array, " B"]
    ) -> tuple[Int[Array, " S"], Int[Array, ""]]:
        # A cumulative sum is a dozen kernels.
        def step(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            packed, count = carry
            taken = in_place.get(chosen, i)
            value = jnp.where(taken, in_place.get(values, i), fill)
            return in_place.put(packed, count, value), count + taken.astype(jnp.int32)

        start = (jnp.full((size,), fill, values.dtype), jnp.int32(0))
        return lax.fori_loop(0, values.shape[0], step, start)

    return on_cpu(loop, plain, values, chosen)


def sort(numbers: Num[Array, " B"], below: int) -> tuple[Num[Array, " B"], Int[Array, " B"]]:
    """Whole numbers in ``[0, below)``, rising, and where each was; of equal ones the first first.

    Single words are sorted several times as fast as pairs.
    """
    rows = numbers.shape[0]
    bits = max(rows - 1, 0).bit_length()
    place = jnp.arange(rows, dtype=jnp.uint32)
    key = numbers.astype(jnp.uint32)
    if below << bits <= 2**32:
        key = lax.sort((key << jnp.uint32(bits)) | place, is_stable=False)
        rising, place = key >> jnp.uint32(bits), key & jnp.uint32(2**bits - 1)
    elif bits <= _HALF:
        rising, place = on_cpu(_sort_halves, _sort_pairs, key, place)
    else:
        rising, place = _sort_pairs(key, place)
    return rising.astype(numbers.dtype), place.astype(jnp.int32)


def _sort_pairs(
    key: UInt[Array, " B"], place: UInt[Array, " B"]
) -> tuple[UInt[Array, " B"], UInt[Array, " B"]]:
    rising, place = lax.sort((key, place), num_keys=1)
    return rising, place


def _sort_halves(
    key: UInt[Array, " B"], place: UInt[Array, " B"]
) -> tuple[UInt[Array, " B"], UInt[Array, " B"]]:
    """By the lower half of the numbers first, and then, keeping that order, by the upper one."""
    half, lower = jnp.uint32(_HALF), jnp.uint32(2**_HALF - 1)
    first = lax.sort((key << half) | place, is_stable=False)
    at = first & lower
    second = lax.sort((key[at] & ~lower) | place, is_stable=False)
    then = second & lower
    return (second & ~lower) | (first[then] >> half), at[then]


def after(*arrays: Array) -> Int[Array, ""]:
    """Zero, which XLA does not know before the first elements of these arrays are there."""
    some = [array.reshape(-1)[0].astype(bool).astype(jnp.int32) for array in arrays]
    return jnp.minimum(functools.reduce(jnp.add, some), 0)


def gathered(rows: Array, index: Int[Array, "..."]) -> Array:
    """``rows``, which come out of a large array at ``index``, by a kernel of their own.

    XLA:CPU gathers them in two threads, or anew in every kernel that they go into, but not where
    they become a part of another array.
    """
    zero = after(index)
    more = jnp.broadcast_to(zero.astype(rows.dtype), (rows.shape[0] + 1, *rows.shape[1:]))
    return lax.dynamic_update_slice(more, rows, (zero,) * rows.ndim)[:-1]


class Steps(NamedTuple):
    """Counts the steps of one loop after the other, so that none has to begin with a zero.

    Attributes:
        done: How many there were, as a traced number: at first what ``after`` returns.
        known: The same, as it is known beforehand.
    """

    done: Int[Array, ""]
    known: int = 0


def repeat(
    before: Steps, count: int, step: Callable[[Array, Any], Any], carry: Any
) -> tuple[Steps, Any]:
    """``fori_loop(0, count, step, carry)``, which begins once the steps ``before`` are done.

    Args:
        before: The steps of the loops before.
        count: How many there are; at least two where a large array changes, for XLA may unroll a
            loop of one step and then fuse it with what comes next.
        step: Takes the number of the step and the carry, and returns the next carry.
        carry: What is carried.
    """
    first, end = before.known, before.known + count
    done, carry = lax.while_loop(
        lambda state: state[0] < end,
        lambda state: (state[0] + 1, step(state[0] - first, state[1])),
        (before.done, carry),
    )
    return Steps(done, end), carry


def touched(
    before: Steps, count: int, numbers: Callable[[Array], Sequence[Array]]
) -> tuple[Steps, Int[Array, ""]]:
    """Read from memory what the next loop needs, in a loop of its own.

    A CPU works ahead by some hundred instructions, and with long steps that is one row or two. Of
    steps that do nothing but read a dozen fit in, and as many rows are on their way from memory at
    the same time.

    Args:
        before: The steps of the loops before.
        count: How many steps the next one has.
        numbers: Takes the number of a step, and returns a number of each line that it needs.

    Returns:
        The steps so far, and zero, which XLA does not know before all of that is read.
    """

    def step(i: Array, all_: Array) -> Array:
        return functools.reduce(jnp.bitwise_or, map(_bits, numbers(i)), all_)

    steps, all_ = repeat(before, count, step, after(before.done))
    return steps, after(all_)


def _bits(number: Array) -> Int[Array, ""]:
    """Something made of a number, in as few operations as can be."""
    if number.dtype.itemsize == 4:
        return lax.bitcast_convert_type(number, jnp.int32)
    return number.astype(bool).astype(jnp.int32)


def once_unless(
    condition: Bool[Array, ""],
    function: Callable[[PyTree[Array]], PyTree[Array]],
    value: PyTree[Array],
) -> PyTree[Array]:
    """``value`` if the condition is true, else ``function(value)``, in place.

    A loop that runs once or not at all; a conditional would do both under ``vmap``.
    """

    def once(carry: tuple[Array, PyTree[Array]]) -> tuple[Array, PyTree[Array]]:
        return jnp.ones_like(carry[0]), function(carry[1])

    return lax.while_loop(lambda carry: ~carry[0], once, (condition, value))[1]


def unless(condition: Bool[Array, ""], function: Callable[[Array], Array], value: Array) -> Array:
    """``value`` if the condition is true, as it usually is, else ``function(value)``.

    A CPU then skips the function. Elsewhere it takes longer to wait for the answer.
    """

    def loop(value: Array) -> Array:
        return once_unless(condition, function, value)

    def plain(value: Array) -> Array:
        return jnp.where(condition, value, function(value))

    return lax.platform_dependent(value, cpu=loop, default=plain)


def on_cpu(
    loop: Callable[..., PyTree[Array]], plain: Callable[..., PyTree[Array]], *args: PyTree[Array]
) -> PyTree[Array]:
    """``loop(*args)`` on a CPU, and elsewhere and under ``vmap`` the same by ``plain(*args)``.

    Many lanes make long vectors: for those the vectorized form is the faster one.
    """

    @custom_vmap
    def call(*args: PyTree[Array]) -> PyTree[Array]:
        return lax.platform_dependent(*args, cpu=loop, default=plain)

    @call.def_vmap
    def _(axis_size: int, batched: list[Any], *args: PyTree[Array]) -> Any:
        axes = jax.tree.map(lambda is_batched: 0 if is_batched else None, tuple(batched))
        out = jax.vmap(plain, axes, axis_size=axis_size)(*args)
        return out, jax.tree.map(lambda _: True, out)

    return call(*args)


def _loop(
    function: Callable[..., PyTree[Array]],
    touch: Callable[..., Sequence[Array]] | None,
    rows: PyTree[Array],
    shared: PyTree[Array],
) -> PyTree[Array]:
    count = jax.tree.leaves(rows)[0].shape[0]
    shapes = jax.eval_shape(function, rows, shared)

    def row(i: Array) -> PyTree[Array]:
        return jax.tree.map(lambda leaf: in_place.get(leaf, i), rows)

    def step(i: Array, out: PyTree[Array]) -> PyTree[Array]:
        at = in_place.place(jnp.minimum(i, count - 1))
        return jax.tree.map(
            lambda leaf, value: lax.dynamic_update_slice_in_dim(leaf, value[None], at, 0),
            out,
            function(row(at), shared),
        )

    zero = after(*jax.tree.leaves(rows))
    steps = Steps(zero)
    if touch is not None:
        steps, zero = touched(steps, count, lambda i: touch(row(i), shared))
    start = jax.tree.map(
        lambda shape: jnp.broadcast_to(zero.astype(shape.dtype), shape.shape), shapes
    )
    return repeat(steps, max(count, 2), step, start)[1]

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
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap
from jaxtyping import Array, Bool, Int, PyTree, UInt

# Up to how many rows to loop, on a CPU: in any program; where the rows are consecutive slots; and
# in a program that is nothing but one operation, which is to be short.
_SHORT = 64
SHORT_RUN = 256
_SHORT_ALONE = 256
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

    Returns:
        What ``function`` returns for all rows together, leaves ``[B, ...]``.
    """
    most = most_rows() if most is None else most
    loops = jax.tree.leaves(rows)[0].shape[0] <= most
    return _each(function, at_once or function, rows, shared, static, loops=loops)


@functools.partial(jax.jit, static_argnames=("function", "at_once", "static", "loops"))
def _each(
    function: Callable[..., PyTree[Array]],
    at_once: Callable[..., PyTree[Array]],
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
    return on_cpu(functools.partial(_loop, one), plain, rows, shared)


def total(counts: UInt[Array, " B"]) -> UInt[Array, ""]:
    """The sum over the rows of a batch; of whole numbers, whose order does not matter."""
    return _total(counts, loops=counts.shape[0] <= most_rows())


@functools.partial(jax.jit, static_argnames="loops")
def _total(counts: UInt[Array, " B"], *, loops: bool) -> UInt[Array, ""]:
    def plain(counts: UInt[Array, " B"]) -> UInt[Array, ""]:
        return jnp.sum(counts, dtype=counts.dtype)

    def loop(counts: UInt[Array, " B"]) -> UInt[Array, ""]:
        zero = after(counts)
        start = zero.astype(counts.dtype)
        return repeat(Steps(zero), counts.shape[0], lambda i, sum_: sum_ + counts[i], start)[1]

    return on_cpu(loop, plain, counts) if loops else plain(counts)


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
            value = jnp.where(chosen[i], values[i], fill)
            packed = lax.dynamic_update_slice(packed, value[None], (count,))
            return packed, count + chosen[i].astype(jnp.int32)

        start = (jnp.full((size,), fill, values.dtype), jnp.int32(0))
        return lax.fori_loop(0, values.shape[0], step, start)

    return on_cpu(loop, plain, values, chosen)


def order(numbers: Int[Array, " B"], below: int) -> Int[Array, " B"]:
    """Where whole numbers in ``[0, below)`` are: the smallest first, of equal ones the first."""
    place = jnp.arange(numbers.shape[0], dtype=jnp.uint32)
    bits = max(numbers.shape[0] - 1, 0).bit_length()
    key = numbers.astype(jnp.uint32)
    if below << bits <= 2**32:
        # Numbers and places in one word are sorted several times as fast as pairs.
        key = lax.sort((key << jnp.uint32(bits)) | place, is_stable=False)
        place = key & jnp.uint32(2**bits - 1)
    else:
        _, place = lax.sort((key, place), num_keys=1)
    return place.astype(jnp.int32)


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
    function: Callable[..., PyTree[Array]], rows: PyTree[Array], shared: PyTree[Array]
) -> PyTree[Array]:
    count = jax.tree.leaves(rows)[0].shape[0]
    shapes = jax.eval_shape(function, rows, shared)

    def step(i: Array, out: PyTree[Array]) -> PyTree[Array]:
        at = jnp.minimum(i, count - 1)
        row = jax.tree.map(lambda leaf: lax.dynamic_slice(leaf, (at,), (1,))[0], rows)
        return jax.tree.map(
            lambda leaf, value: lax.dynamic_update_slice_in_dim(leaf, value[None], at, 0),
            out,
            function(row, shared),
        )

    zero = after(*jax.tree.leaves(rows))
    start = jax.tree.map(
        lambda shape: jnp.broadcast_to(zero.astype(shape.dtype), shape.shape), shapes
    )
    return repeat(Steps(zero), max(count, 2), step, start)[1]

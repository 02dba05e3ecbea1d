"""Arithmetic on the rows of a batch.

XLA:CPU runs a program in the thread that calls it only if it is short: it counts operations, one on
``[B]`` ``B`` times and the body of a loop once, and looks at the sizes of arrays. Any other is
handed to threads, which takes longer than most of what happens to a batch here; and what is fused
into a gather is computed for every element that is gathered. A loop over the rows escapes both. It
is one native function, slower than the vectorized form by a few nanoseconds per row.
"""

import functools
from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap
from jaxtyping import Array, Bool, Int, PyTree, UInt

# Up to how many rows an update of any slots, and an add to consecutive ones, is short: measured.
SHORT = 64
SHORT_RUN = 256


@functools.partial(jax.jit, static_argnames=("function", "static", "most"))
def each(
    function: Callable[..., PyTree[Array]],
    rows: PyTree[Array],
    shared: PyTree[Array] = (),
    static: tuple[Hashable, ...] = (),
    *,
    most: int = SHORT,
) -> PyTree[Array]:
    """``function(row, shared, *static)`` for every row of a batch.

    Args:
        function: Works on numbers as well as elementwise on arrays of them, without reductions. It
            should be the same object each time, as it is compiled once for each.
        rows: Leaves ``[B]``.
        shared: Arrays of any shape, the same for all rows.
        static: Further arguments, not traced.
        most: Up to how many rows to loop, on a CPU.

    Returns:
        What ``function`` returns for all rows together, leaves ``[B, ...]``.
    """

    def plain(rows: PyTree[Array], shared: PyTree[Array]) -> PyTree[Array]:
        return function(rows, shared, *static)

    if jax.tree.leaves(rows)[0].shape[0] > most:
        return plain(rows, shared)

    return native(functools.partial(_loop, plain), plain, rows, shared)


@jax.jit
def total(counts: UInt[Array, " B"]) -> UInt[Array, ""]:
    """The sum over the rows of a batch; of whole numbers, whose order does not matter."""

    def plain(counts: UInt[Array, " B"]) -> UInt[Array, ""]:
        return jnp.sum(counts, dtype=counts.dtype)

    def loop(counts: UInt[Array, " B"]) -> UInt[Array, ""]:
        return lax.fori_loop(
            0, counts.shape[0], lambda i, so_far: so_far + counts[i], jnp.zeros((), counts.dtype)
        )

    if counts.shape[0] > SHORT:
        return plain(counts)

    return native(loop, plain, counts)


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

    return native(loop, plain, values, chosen)


def native(
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
        # XLA unrolls a loop of one step, and then fuses it with what comes next: so there are none.
        at = jnp.minimum(i, count - 1)
        row = jax.tree.map(lambda leaf: lax.dynamic_slice(leaf, (at,), (1,))[0], rows)
        return jax.tree.map(
            lambda leaf, value: lax.dynamic_update_slice_in_dim(leaf, value[None], at, 0),
            out,
            function(row, shared),
        )

    start = jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), shapes)
    return lax.fori_loop(0, max(count, 2), step, start)

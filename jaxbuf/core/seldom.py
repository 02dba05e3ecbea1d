"""Work that is seldom needed, and that only members in need do under ``jax.vmap``."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap
from jaxtyping import Array, Bool
from numpy.typing import NDArray

from jaxbuf.core import trees
from jaxbuf.core.types import Arrays, Flag, Function
from jaxbuf.core.versions import vary_with

Result = TypeVar("Result", bound=Arrays)
# For each array of the operands the row that each member has, ``[M]``; None if all have all of it.
_Rows: TypeAlias = Sequence[NDArray[np.int32] | None]


def if_needed(
    needed: Flag, function: Callable[..., Result], otherwise: Result, *operands: Arrays
) -> Result:
    """Returns ``function(*operands)`` if it is needed, and else ``otherwise``.

    Under ``jax.vmap`` a ``lax.cond`` computes both branches for all members, and a loop of at most
    one step computes its body for all if one needs it. There this function goes on a CPU through
    the members in need, one after the other, so that the rest cost nothing. An accelerator computes
    it for all at once, unless none is in need. An operand that is not mapped is not copied. No
    gradient passes.

    Args:
        needed: Whether to compute it.
        function: A function of the operands whose result is like ``otherwise``. It may be traced
            again, and must not use arrays that it does not get as operands.
        otherwise: The result if it is not needed. Small: under ``jax.vmap`` a loop carries it.
        *operands: What ``function`` needs.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> total = lambda x: if_needed(x[0] > 0, jnp.sum, jnp.int32(-1), x)
        >>> jax.vmap(total)(jnp.array([[1, 2], [0, 5], [3, 4]])).tolist()
        [3, -1, 7]
    """
    given = lax.stop_gradient((needed, otherwise, operands))
    needed, otherwise, operands = vary_with(given, given)
    arrays, treedef = jax.tree.flatten(operands)

    def of_arrays(arrays: list[Array]) -> Result:
        return function(*jax.tree.unflatten(treedef, arrays))

    # A single member, which has all operands as they are.
    members = _members(of_arrays, [None] * len(arrays))
    out = members(needed[None], jax.tree.map(lambda leaf: leaf[None], otherwise), arrays)
    return jax.tree.map(lambda leaf: leaf[0], out)


def _members(function: Function, rows: _Rows) -> Function:
    """Returns the function of ``M`` members: of ``needed [M]``, ``otherwise`` and the operands.

    Its rule for ``jax.vmap`` makes members of more members, so that all of them are in one loop.
    """

    def of_member(arrays: list[Array], member: Any) -> Arrays:
        own = [
            array
            if row is None
            else lax.dynamic_index_in_dim(array, jnp.asarray(row)[member], keepdims=False)
            for array, row in zip(arrays, rows, strict=True)
        ]
        return vary_with(function(own), arrays)

    def in_turn(needed: Bool[Array, " M"], out: Arrays, arrays: list[Array]) -> Any:
        def step(carry: tuple[Array, Arrays]) -> tuple[Array, Arrays]:
            left, out = carry
            member = jnp.argmax(left).astype(jnp.int32)
            # Always true, but what is in a branch XLA does not compute ahead of the loop.
            one = lax.cond(
                left[member],
                lambda: of_member(arrays, member),
                lambda: jax.tree.map(lambda leaf: leaf[member], out),
            )
            out = jax.tree.map(lambda leaf, value: leaf.at[member].set(value), out, one)
            return left.at[member].set(False), out

        return lax.while_loop(lambda carry: jnp.any(carry[0]), step, (needed, out))[1]

    def at_once(needed: Bool[Array, " M"], out: Arrays, arrays: list[Array]) -> Any:
        def compute() -> Arrays:
            own = [
                array if row is None or len(row) == len(array) else array[row]
                for array, row in zip(arrays, rows, strict=True)
            ]
            axes = [None if row is None else 0 for row in rows]
            new = jax.vmap(lambda _, own: function(own), (0, axes))(needed, own)
            return vary_with(trees.choose(needed, new, out), out)

        return lax.cond(jnp.any(needed), compute, lambda: out)

    @custom_vmap
    def call(needed: Bool[Array, " M"], out: Arrays, arrays: list[Array]) -> Any:
        if needed.shape[0] > 1:
            return lax.platform_dependent(needed, out, arrays, cpu=in_turn, default=at_once)
        one = jax.tree.map(lambda leaf: leaf[0], out)
        one = lax.cond(needed[0], lambda: of_member(arrays, 0), lambda: one)
        return jax.tree.map(lambda leaf: leaf[None], one)

    @call.def_vmap
    def _(size: int, mapped: Any, needed: Array, out: Arrays, arrays: list[Array]) -> Any:
        members = needed.shape[-1]
        merged = [
            _merged(row, array, size, members) if is_mapped else (row, array)
            for row, array, is_mapped in zip(rows, arrays, mapped[2], strict=True)
        ]
        of_all = [
            row if row is None or is_mapped else np.tile(row, size)
            for (row, _), is_mapped in zip(merged, mapped[2], strict=True)
        ]

        def all_of(is_mapped: bool, leaf: Array) -> Array:
            leaf = leaf if is_mapped else jnp.broadcast_to(leaf, (size, *leaf.shape))
            return lax.collapse(leaf, 0, 2)

        needed, out = jax.tree.map(all_of, tuple(mapped[:2]), (needed, out))
        out = _members(function, of_all)(needed, out, [array for _, array in merged])
        out = jax.tree.map(lambda leaf: leaf.reshape(size, members, *leaf.shape[1:]), out)
        return out, jax.tree.map(lambda _: True, out)

    return call


def _merged(
    row: NDArray[np.int32] | None, array: Array, size: int, members: int
) -> tuple[NDArray[np.int32], Array]:
    """Returns the row of each of ``size * members`` members in an operand that is mapped."""
    first = np.arange(size, dtype=np.int32)[:, None]
    if row is None:
        return np.repeat(first, members), array
    return (first * array.shape[1] + row).reshape(-1), lax.collapse(array, 0, 2)

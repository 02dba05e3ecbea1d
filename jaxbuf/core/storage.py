"""Pytrees of slots: allocate them, check what comes in, write rows and read rows."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, PyTree

from jaxbuf.core import rowwise

_KINDS = "biufc"


def allocate(example: PyTree, leading: Sequence[int]) -> PyTree[Array]:
    """Zeros for ``prod(leading)`` items like ``example``.

    Args:
        example: One unbatched item: a pytree of arrays, scalars or ``jax.ShapeDtypeStruct``.
        leading: The shape to put before each leaf's own.

    Returns:
        The same pytree with leaves ``[*leading, *shape]`` in exactly the example's dtypes. No two
        leaves share memory, so that the whole can be donated.

    Raises:
        ValueError: If the example has no leaves, or a leaf that no array can hold.
    """
    leaves = jax.tree_util.tree_leaves_with_path(example)
    if not leaves:
        raise ValueError("example has no leaves; pass one unbatched item, a pytree of arrays")
    for path, leaf in leaves:
        try:
            _abstract(leaf)
        except TypeError as error:
            name = _name("example", path)
            raise ValueError(f"{name} is a {type(leaf).__name__}; expected an array") from error
    return jax.tree.map(
        lambda leaf: jnp.zeros((*leading, *_abstract(leaf).shape), _abstract(leaf).dtype), example
    )


def check(
    storage: PyTree[Array], items: PyTree, name: str, axes: Sequence[str | int], skip: int = 1
) -> tuple[PyTree[Array], tuple[int, ...]]:
    """Check a batch of items against the storage that is to hold them.

    Args:
        storage: Leaves ``[..., *shape]`` with ``skip`` leading axes.
        items: Leaves ``[*axes, *shape]``.
        name: What to call the items in an error.
        axes: The leading axes, each a length, or a name for a length that all leaves share.
        skip: How many leading axes the storage's leaves have.

    Returns:
        The items as arrays of the storage's dtypes, and the lengths of the leading axes. Only
        Python scalars and weakly typed arrays are cast.

    Raises:
        ValueError: If the structure, a shape or a dtype differs; it names the leaf.
    """
    _check_structure(storage, items, name)
    paths, treedef = jax.tree_util.tree_flatten_with_path(storage)
    lengths: dict[str, int] = {}
    owner = ""
    out: list[Array] = []
    for (path, stored), leaf in zip(paths, jax.tree.leaves(items), strict=True):
        label = _name(name, path)
        shape, dtype = stored.shape[skip:], stored.dtype
        try:
            got = _abstract(leaf)
        except TypeError as error:
            raise ValueError(f"{label} is a {type(leaf).__name__}; expected an array") from error
        expected = (*axes, *shape)
        if len(got.shape) != len(expected) or any(
            isinstance(want, int) and want != have
            for want, have in zip(expected, got.shape, strict=True)
        ):
            raise ValueError(f"{label} has shape {got.shape}; expected {_format(expected)}")
        for axis, have in zip(axes, got.shape, strict=False):
            if isinstance(axis, str) and lengths.setdefault(axis, have) != have:
                raise ValueError(
                    f"{label} has {axis} = {have} rows (shape {got.shape}), but {owner} has "
                    f"{lengths[axis]}; all leaves need the same"
                )
        owner = owner or label
        if got.dtype != dtype and not (got.weak_type and _fits(got.dtype, dtype)):
            raise ValueError(
                f"{label} has dtype {got.dtype}; expected {dtype} "
                f"(cast it yourself: nothing is cast silently)"
            )
        out.append(jnp.asarray(leaf, dtype))
    sizes = tuple(axis if isinstance(axis, int) else lengths[axis] for axis in axes)
    return jax.tree.unflatten(treedef, out), sizes


def check_rows(
    value: Any, name: str, shape: tuple[int, ...], dtype: type[np.generic], axes: str
) -> Array:
    """One number per row: ``value`` as an array of ``shape`` and ``dtype``.

    Raises:
        ValueError: If the shape differs, or if the dtype is of another kind (bool, integer or
            floating).
    """
    got = _abstract(value)
    if got.shape != shape:
        raise ValueError(f"{name} has shape {got.shape}; expected {shape}, which is {axes}")
    castable = got.weak_type or jnp.issubdtype(dtype, jnp.floating)
    if got.dtype != np.dtype(dtype) and not (castable and _fits(got.dtype, dtype)):
        raise ValueError(f"{name} has dtype {got.dtype}; expected {np.dtype(dtype).name}")
    return jnp.asarray(value).astype(dtype)


def write(storage: PyTree[Array], items: PyTree[Array], index: Int[Array, " B"]) -> PyTree[Array]:
    """Put row ``b`` of ``items [B, ...]`` at ``index[b]``; rows past the end are dropped.

    The rows that are written must have different indices.
    """
    return jax.tree.map(
        lambda slots, rows: slots.at[index].set(
            rows, mode="drop", unique_indices=True, wrap_negative_indices=False
        ),
        storage,
        items,
    )


def read(storage: PyTree[Array], index: Int[Array, " B"]) -> PyTree[Array]:
    """The rows ``[B, ...]`` at ``index``; an index past the end reads the last row."""
    # Out of a loop, so that XLA:CPU does not compute it anew for every element that it selects.
    last = jax.tree.leaves(storage)[0].shape[0] - 1
    index = rowwise.each(_clip, index, static=(last,), most=index.shape[0])
    return jax.tree.map(
        lambda slots: slots.at[index].get(mode="promise_in_bounds", wrap_negative_indices=False),
        storage,
    )


def _clip(index: Int[Array, " B"], _: Any, last: int) -> Int[Array, " B"]:
    return jnp.clip(index, 0, last)


def _check_structure(storage: PyTree, items: PyTree, name: str) -> None:
    want, got = jax.tree.structure(storage), jax.tree.structure(items)
    if want == got:
        return
    have = {jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(items)}
    need = {jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(storage)}
    parts = [f"{name}{key} is missing" for key in sorted(need - have)]
    parts += [f"{name}{key} is not in the example" for key in sorted(have - need)]
    detail = "; ".join(parts) or f"{name} is {got}; the example is {want}"
    raise ValueError(f"{name} has another structure than the example: {detail}")


def _abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    """Shape, dtype and weak type that ``leaf`` has once it is traced."""
    aval = jax.typeof(leaf) if not isinstance(leaf, jax.ShapeDtypeStruct) else leaf
    dtype = aval.dtype
    if not jnp.issubdtype(dtype, jax.dtypes.extended):
        dtype = jax.dtypes.canonicalize_dtype(dtype)
    return jax.ShapeDtypeStruct(aval.shape, dtype, weak_type=bool(aval.weak_type))


def _fits(got: Any, want: Any) -> bool:
    """Whether a value of dtype ``got`` may become one of ``want`` without changing its kind."""
    return _KINDS.index(np.dtype(_kind(got)).kind) <= _KINDS.index(np.dtype(_kind(want)).kind)


def _kind(dtype: Any) -> Any:
    # bfloat16 and its like are of kind "V" to NumPy.
    return np.float32 if jnp.issubdtype(dtype, jnp.floating) else dtype


def _name(root: str, path: Any) -> str:
    return root + jax.tree_util.keystr(path)


def _format(shape: Sequence[str | int]) -> str:
    inner = ", ".join(str(axis) for axis in shape)
    return f"({inner},)" if len(shape) == 1 else f"({inner})"

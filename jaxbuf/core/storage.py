"""Pytrees of slots: allocation, checks of incoming items, and writing and reading of rows."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int, PyTree

from jaxbuf.core import checks, native, numbers, sizes, trees
from jaxbuf.core.division import remainder
from jaxbuf.core.leaves import is_key
from jaxbuf.core.program import is_outside
from jaxbuf.core.types import Arrays, Dtype, Index

# The dtypes that the kernels take.
_KINDS = "biufc"
# The most differences that an error lists.
_NAMED = 6
# The numbers of rows in a run, and in the ring that it is in; None for single rows.
_Run: TypeAlias = tuple[int, int] | None


def allocate(
    example: PyTree, leading: Sequence[int], size: tuple[str, int] | None = None
) -> Arrays:
    """Returns zeros for ``prod(leading)`` items like ``example``.

    Args:
        example: One unbatched item: a pytree of arrays, scalars or ``jax.ShapeDtypeStruct``.
        leading: The shape to put before each leaf's own.
        size: The name, in errors, of a number that ``leading`` is a multiple of, and this number;
            by default the last one of ``leading``.

    Returns:
        The same pytree with leaves ``[*leading, *shape]`` in exactly the example's dtypes. No two
        leaves share memory, so that the whole can be donated.

    Raises:
        ValueError: If the example has no leaves, a leaf that no array can hold, or is a shape; or
            if it needs more memory than there is, with the largest size that fits.
    """
    trees.flatten(example, "example")
    leaves, treedef = jax.tree_util.tree_flatten_with_path(example)
    if not leaves:
        raise ValueError("example has no leaves; pass one unbatched item, a pytree of arrays")
    _check_no_shape(leaves)
    names = ["example" + jax.tree_util.keystr(path) for path, _ in leaves]
    arrays: list[jax.ShapeDtypeStruct] = []
    for name, (_, leaf) in zip(names, leaves, strict=True):
        like = numbers.abstract(leaf, name)
        arrays.append(jax.ShapeDtypeStruct((*leading, *like.shape), like.dtype))
    needed = [sizes.check_bytes(n, x.shape, x.dtype) for n, x in zip(names, arrays, strict=True)]
    labels = [
        f"{name} as {array.dtype}{list(array.shape)}, which takes {count} bytes,"
        for name, array, count in zip(names, arrays, needed, strict=True)
    ]
    if is_outside():
        sizes.check_memory(
            labels[needed.index(max(needed))], sum(needed), *(size or ("rows", leading[-1]))
        )
    zeros: list[Array] = []
    for like, label in zip(arrays, labels, strict=True):
        with sizes.allocating(label):
            zeros.append(jnp.zeros(like.shape, like.dtype))
    return jax.tree.unflatten(treedef, zeros)


def _check_no_shape(leaves: list[tuple[tuple[Any, ...], Any]]) -> None:
    """Checks that the leaves of an example are not the lengths of axes, in a tuple or a list.

    Raises:
        ValueError: If they are integers of Python, some of them in such a sequence.
    """
    whole = all(type(leaf) is int for _, leaf in leaves)
    for path, _ in leaves:
        if whole and path and isinstance(path[-1], jax.tree_util.SequenceKey):
            axes = tuple(leaf for other, leaf in leaves if other[:-1] == path[:-1])
            raise ValueError(
                f"example{jax.tree_util.keystr(path[:-1])} is the integers {axes}, of which each "
                f"would be an array; if this is a shape, pass jax.ShapeDtypeStruct({axes}, "
                "jnp.float32)"
            )


def check(
    storage: Arrays,
    items: PyTree,
    name: str,
    axes: Sequence[str | int],
    skip: int = 1,
    hint: str = "",
    *,
    computed: bool = False,
) -> tuple[Arrays, tuple[int, ...]]:
    """Checks a batch of items against the storage that is to hold them.

    Args:
        storage: Leaves ``[..., *shape]`` with ``skip`` leading axes.
        items: Leaves ``[*axes, *shape]``.
        name: The name of the items in errors.
        axes: The leading axes. Each is a length, or a name for a length that all leaves share.
        skip: Number of leading axes of the storage's leaves.
        hint: What to add to an error about a shape.
        computed: Whether a function of the caller returned the items; see ``numbers.computed_as``.

    Returns:
        The items as arrays of the storage's dtypes, in its structure, and the lengths of the
        leading axes. Only Python scalars, weakly typed arrays, and NumPy's numbers of 64 bits that
        fit in 32 are cast. Leaves are paired by key, whatever the kinds and orders of mappings.

    Raises:
        ValueError: If the structure, a shape or a dtype differs; the message names the leaf.
    """
    trees.flatten(items, name)
    items = trees.match(storage, items)
    _check_structure(storage, items, name)
    paths, treedef = jax.tree_util.tree_flatten_with_path(storage)
    lengths: dict[str, int] = {}
    owner = ""
    out: list[Array] = []
    for (path, stored), leaf in zip(paths, jax.tree.leaves(items), strict=True):
        label = name + jax.tree_util.keystr(path)
        shape, dtype = stored.shape[skip:], stored.dtype
        # What has no numbers itself, such as a ``jax.ShapeDtypeStruct``, takes others without.
        concrete = isinstance(stored, jax.Array | np.ndarray)
        got = numbers.type_of(leaf, label) if concrete else numbers.abstract(leaf, label)
        expected = (*axes, *shape)
        if len(got.shape) != len(expected) or any(
            isinstance(want, int) and want != have
            for want, have in zip(expected, got.shape, strict=True)
        ):
            advice = hint
            if axes and got.shape == shape:
                advice = (
                    "; put an axis in front, x[None], or, if this is a batch, create the buffer "
                    "with one item of it as the example"
                )
            raise ValueError(f"{label} has shape {got.shape}; expected {_format(expected)}{advice}")
        for axis, have in zip(axes, got.shape, strict=False):
            if isinstance(axis, str) and lengths.setdefault(axis, have) != have:
                raise ValueError(
                    f"{label} has {axis} = {have} rows (shape {got.shape}), but {owner} has "
                    f"{lengths[axis]}; all leaves need the same"
                )
        owner = owner or label
        loose = got.weak_type and numbers.may_become(got.dtype, dtype)
        if computed:
            loose = numbers.computed_as(got, dtype)
        if got.dtype != dtype and not (loose or numbers.counts_as(leaf, dtype)):
            raise ValueError(
                f"{label} has dtype {numbers.given_dtype(leaf, got.dtype)}; expected {dtype} (cast "
                "it yourself: only Python's numbers are cast, and NumPy's of 64 bits to 32)"
            )
        out.append(numbers.to_array(leaf, label, dtype) if concrete else leaf)
    sizes = tuple(axis if isinstance(axis, int) else lengths[axis] for axis in axes)
    return jax.tree.unflatten(treedef, out), sizes


def like(storage: PyTree, other: PyTree, name: str) -> PyTree:
    """Returns another storage in place of one, after a check that the two are alike.

    Where the present one holds no arrays, but for example shardings, there is nothing to check.

    Raises:
        ValueError: If the structure, a shape or a dtype differs; the message names the leaf.
    """
    return check(storage, other, name, (), 0)[0] if has_shapes(storage) else other


def has_shapes(tree: PyTree) -> bool:
    """Returns whether the leaves of a tree are arrays, or have their shapes and dtypes."""
    return all(hasattr(leaf, "shape") and hasattr(leaf, "dtype") for leaf in jax.tree.leaves(tree))


def check_rows(
    value: object,
    name: str,
    shape: tuple[int, ...],
    dtype: type[np.generic] | Dtype,
    axes: str,
    *,
    infinite: bool = False,
    gradients: bool = False,
) -> Array:
    """Returns one number per row, as an array of ``shape`` and ``dtype``.

    Integers of any width are accepted for an integer dtype, all numbers for a floating one.

    Args:
        value: The numbers.
        name: Their name in errors.
        shape: Their shape.
        dtype: The dtype of the result.
        axes: A description of the shape, for errors.
        infinite: Whether a number that is too large becomes infinite instead of raising, for
            callers that count such rows as refused.
        gradients: Whether gradients pass.

    Raises:
        ValueError: If the shape differs, if the dtype is of another kind (bool, integer or
            floating), or if a known number does not fit.
    """
    known = isinstance(value, jax.Array) and (value.shape, value.dtype) == (shape, dtype)
    if known and not getattr(value, "weak_type", True):
        array = cast("Array", value)
    else:
        got = numbers.type_of(value, name)
        if got.shape != shape:
            raise ValueError(f"{name} has shape {got.shape}; expected {shape}, which is {axes}")
        if not _is_castable(got, dtype):
            given = numbers.given_dtype(value, got.dtype)
            raise ValueError(f"{name} has dtype {given}; expected {np.dtype(dtype).name}")
        array = numbers.to_array(value, name, np.dtype(dtype), infinite=infinite)
    return array if gradients else lax.stop_gradient(array)


def _is_castable(got: jax.ShapeDtypeStruct, dtype: type[np.generic] | Dtype) -> bool:
    """Returns whether numbers of one dtype may be given where another one is stored."""
    if is_key(got.dtype):
        return False
    whole = jnp.issubdtype(dtype, jnp.integer) and jnp.issubdtype(got.dtype, jnp.integer)
    if got.dtype == np.dtype(dtype) or whole:
        return True
    loose = got.weak_type or jnp.issubdtype(dtype, jnp.floating)
    return loose and numbers.may_become(got.dtype, np.dtype(dtype))


def write(storage: Arrays, items: Arrays, index: Index) -> Arrays:
    """Writes row ``b`` of ``items [B, ...]`` at ``index[b]``; rows past the end are dropped.

    The rows that are written must have different indices.
    """

    def put(slots: Array, rows: Array, index: Index) -> Array:
        return slots.at[index].set(
            rows, mode="drop", unique_indices=True, wrap_negative_indices=False
        )

    def plainly(index: Index, storage: Arrays, items: Arrays) -> Arrays:
        return jax.tree.map(functools.partial(put, index=index), storage, items)

    if native.takes_rows(index.size) and all(map(_is_plain, jax.tree.leaves(storage))):
        return native.put(plainly, index, storage, items)
    return plainly(index, storage, items)


def read(storage: Arrays, index: Int[Array, "..."]) -> Arrays:
    """Returns rows, leaves ``[*index.shape, ...]``; an index past the end reads the last row."""
    rows = _gather(storage, index.reshape(-1), None)
    return jax.tree.map(lambda leaf: leaf.reshape(*index.shape, *leaf.shape[1:]), rows)


def read_runs(storage: Arrays, start: Index, length: int, ring: int) -> Arrays:
    """Returns consecutive rows within rings, from ``start`` on, modulo the length of a ring.

    Args:
        storage: Leaves ``[E * ring, ...]``, one ring of ``ring`` rows after the other.
        start: First rows, ``[B]``, counted over all rings, in ``[0, E * ring)``.
        length: Number of rows in each run, at most ``ring``.
        ring: Number of rows in a ring.

    Returns:
        Leaves ``[B, length, ...]``.
    """
    return _gather(storage, start, (length, ring))


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def _gather(storage: Arrays, start: Index, run: _Run) -> Arrays:
    """Returns rows of leaves ``[N, ...]`` or, given the lengths of a run and a ring, runs."""
    leaves, treedef = jax.tree.flatten(storage)
    leading = start.shape if run is None else (*start.shape, run[0])
    for leaf in leaves:
        sizes.check_bytes("a batch", (*leading, *leaf.shape[1:]), leaf.dtype)
    plain = [_is_plain(leaf) for leaf in leaves]

    def natively(start: Index, *leaves: Array) -> list[Array]:
        chosen = [leaf for leaf, is_plain in zip(leaves, plain, strict=True) if is_plain]
        rows = iter(native.take(chosen, start, run))
        return [
            next(rows) if is_plain else _select(leaf, start, run)
            for leaf, is_plain in zip(leaves, plain, strict=True)
        ]

    def plainly(start: Index, *leaves: Array) -> list[Array]:
        return [_select(leaf, start, run) for leaf in leaves]

    rows = native.either(natively if any(plain) else plainly, plainly, start, *leaves)
    return jax.tree.unflatten(treedef, rows)


def _is_plain(leaf: Array) -> bool:
    """Returns whether the kernels take an array: the dtypes of PRNG keys are not NumPy's."""
    return isinstance(leaf.dtype, np.dtype) and leaf.dtype.kind in _KINDS


@_gather.defjvp
def _(
    run: _Run, primals: tuple[Arrays, Index], tangents: tuple[Arrays, object]
) -> tuple[Arrays, Arrays]:
    (storage, start), (change, _) = primals, tangents
    rows = _gather(storage, start, run)

    def of(row: Array, tangent: Array) -> Array | np.ndarray:
        if jnp.issubdtype(row.dtype, jnp.inexact):
            return _select(tangent, start, run)
        return np.zeros(row.shape, jax.dtypes.float0)

    return rows, jax.tree.map(of, rows, change)


def _select(leaf: Array, start: Index, run: _Run) -> Array:
    if run is None:
        return select(start, leaf)
    length, ring = run
    within = remainder(start, ring)[:, None]  # [B, 1]
    step = jnp.arange(length, dtype=jnp.int32)[None]
    return select(start[:, None] - within + remainder(within + step, ring), leaf)  # [B, length]


def select(index: Int[Array, "..."], storage: Arrays) -> Arrays:
    """Returns the rows at ``index``, clipped to the range: one gather for each leaf."""
    # XLA's own gather clips, so the index needs no computation first.
    return jax.tree.map(
        lambda slots: slots.at[index].get(mode="clip", wrap_negative_indices=False), storage
    )


def _check_structure(storage: PyTree, items: PyTree, name: str) -> None:
    if trees.alike(storage, items):
        return
    want, got = jax.tree.structure(storage), jax.tree.structure(items)
    # A list of rows, as a Python loop collects them.
    if isinstance(items, list | tuple) and items and jax.tree.structure(items[0]) == want:
        rows: Any = items
        raise ValueError(
            f"{name} is {checks.kind_of(items)} of {len(rows)}; stack them: "
            f"jax.tree.map(lambda *rows: jnp.stack(rows), *{name})"
        )
    _check_mappings(storage, items, name)
    have = {jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(items)}
    need = {jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(storage)}
    for key in sorted(need - have):
        if f"{key}[0]" in have:
            raise ValueError(f"{name}{key} is a list; expected an array: np.asarray({name}{key})")
    parts = [f"{name}{key} is missing" for key in sorted(need - have)]
    parts += [f"{name}{key} is not in the example" for key in sorted(have - need)]
    more = [f"{len(parts) - _NAMED} more"] if len(parts) > _NAMED else []
    detail = "; ".join(parts[:_NAMED] + more) or f"{name} is {got}; the example is {want}"
    raise ValueError(f"{name} has another structure than the example: {detail}")


def _check_mappings(storage: PyTree, items: PyTree, name: str) -> None:
    """Checks that there is a mapping wherever the example has one.

    Raises:
        ValueError: If something else is there.
    """
    if not isinstance(storage, Mapping):
        return
    stored: Mapping[Any, Any] = storage
    if not isinstance(items, Mapping):
        keys = ", ".join(map(repr, stored))
        raise ValueError(f"{name} is {checks.kind_of(items)}; expected a dict with {keys}")
    mapping: Mapping[Any, Any] = items
    for key in stored.keys() & mapping.keys():
        _check_mappings(stored[key], mapping[key], f"{name}[{key!r}]")


def _format(shape: Sequence[str | int]) -> str:
    inner = ", ".join(str(axis) for axis in shape)
    return f"({inner},)" if len(shape) == 1 else f"({inner})"

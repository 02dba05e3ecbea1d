"""Pytrees of slots: allocate them, check what comes in, write rows and read rows."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int, PyTree

from jaxbuf.core import in_place, native, numbers, rowwise, sizes, trees

_KINDS = "biufc"
# So many differences are named in an error.
_NAMED = 6
# XLA:CPU makes a native function of a loop that moves up to 1 KB in a step, in and out together.
_SMALL_ROW = 448
# Bytes that a CPU reads from memory at once, and that its inner caches hold.
_LINE = 64
_CACHE = 2**19
# A larger batch is worth waking another thread for, to gather half of it.
_SMALL_BATCH = 2**18


def allocate(example: PyTree, leading: Sequence[int]) -> PyTree[Array]:
    """Zeros for ``prod(leading)`` items like ``example``.

    Args:
        example: One unbatched item: a pytree of arrays, scalars or ``jax.ShapeDtypeStruct``.
        leading: The shape to put before each leaf's own.

    Returns:
        The same pytree with leaves ``[*leading, *shape]`` in exactly the example's dtypes. No two
        leaves share memory, so that the whole can be donated.

    Raises:
        ValueError: If the example has no leaves, a leaf that no array can hold, or one that takes
            more memory than there is.
    """
    trees.leaves(example, "example")
    leaves, treedef = jax.tree_util.tree_flatten_with_path(example)
    if not leaves:
        raise ValueError("example has no leaves; pass one unbatched item, a pytree of arrays")
    return jax.tree.unflatten(
        treedef, [_zeros(leaf, leading, _name("example", path)) for path, leaf in leaves]
    )


def _zeros(leaf: Any, leading: Sequence[int], name: str) -> Array:
    """Zeros for one leaf of an example."""
    like = numbers.abstract(leaf, name)
    shape = (*leading, *like.shape)
    size = sizes.check_bytes(name, shape, like.dtype)
    with sizes.allocating(f"{name} as {like.dtype}{list(shape)}, which takes {size} bytes,"):
        return jnp.zeros(shape, like.dtype)


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
    trees.leaves(items, name)
    _check_structure(storage, items, name)
    paths, treedef = jax.tree_util.tree_flatten_with_path(storage)
    lengths: dict[str, int] = {}
    owner = ""
    out: list[Array] = []
    for (path, stored), leaf in zip(paths, jax.tree.leaves(items), strict=True):
        label = _name(name, path)
        shape, dtype = stored.shape[skip:], stored.dtype
        got = numbers.given(leaf, label)
        expected = (*axes, *shape)
        if len(got.shape) != len(expected) or any(
            isinstance(want, int) and want != have
            for want, have in zip(expected, got.shape, strict=True)
        ):
            hint = "; put an axis in front, x[None]" if axes and got.shape == shape else ""
            raise ValueError(f"{label} has shape {got.shape}; expected {_format(expected)}{hint}")
        for axis, have in zip(axes, got.shape, strict=False):
            if isinstance(axis, str) and lengths.setdefault(axis, have) != have:
                raise ValueError(
                    f"{label} has {axis} = {have} rows (shape {got.shape}), but {owner} has "
                    f"{lengths[axis]}; all leaves need the same"
                )
        owner = owner or label
        if got.dtype != dtype and not (got.weak_type and numbers.may_become(got.dtype, dtype)):
            raise ValueError(
                f"{label} has dtype {got.dtype}; expected {dtype} "
                f"(cast it yourself: nothing is cast silently)"
            )
        out.append(jnp.asarray(numbers.convert(leaf, label, dtype), dtype))
    sizes = tuple(axis if isinstance(axis, int) else lengths[axis] for axis in axes)
    return jax.tree.unflatten(treedef, out), sizes


def check_rows(
    value: Any,
    name: str,
    shape: tuple[int, ...],
    dtype: type[np.generic],
    axes: str,
    *,
    infinite: bool = False,
) -> Array:
    """One number per row: ``value`` as an array of ``shape`` and ``dtype``, without gradients.

    Integers of any width become integers, and all numbers floating-point numbers.

    Args:
        value: The numbers.
        name: What to call them in an error.
        shape: Their shape.
        dtype: What they become.
        axes: What to call the shape.
        infinite: Whether what is too large becomes infinite, for who counts such rows as refused.

    Raises:
        ValueError: If the shape differs, if the dtype is of another kind (bool, integer or
            floating), or if a number that can be seen does not fit.
    """
    got = numbers.given(value, name)
    if got.shape != shape:
        raise ValueError(f"{name} has shape {got.shape}; expected {shape}, which is {axes}")
    if not _is_castable(got, dtype):
        raise ValueError(f"{name} has dtype {got.dtype}; expected {np.dtype(dtype).name}")
    array = jnp.asarray(numbers.convert(value, name, np.dtype(dtype), infinite=infinite), dtype)
    return lax.stop_gradient(array)


def _is_castable(got: jax.ShapeDtypeStruct, dtype: type[np.generic]) -> bool:
    """Whether numbers of one kind may be given where others are kept."""
    if not numbers.is_number(got.dtype):
        return False
    whole = jnp.issubdtype(dtype, jnp.integer) and jnp.issubdtype(got.dtype, jnp.integer)
    if got.dtype == np.dtype(dtype) or whole:
        return True
    loose = got.weak_type or jnp.issubdtype(dtype, jnp.floating)
    return loose and numbers.may_become(got.dtype, dtype)


def write(storage: PyTree[Array], items: PyTree[Array], index: Int[Array, " B"]) -> PyTree[Array]:
    """Put row ``b`` of ``items [B, ...]`` at ``index[b]``; rows past the end are dropped.

    The rows that are written must have different indices.
    """

    def put(slots: Array, rows: Array) -> Array:
        at = index
        if index.shape[0] == 1 and _is_narrow(slots):
            # Or XLA writes it once more for those who read it as rows of one axis, to a copy.
            at, rows = in_place.of_two(index, rows, slots.shape[0])
        return slots.at[at].set(rows, mode="drop", unique_indices=True, wrap_negative_indices=False)

    return jax.tree.map(put, storage, items)


@jax.custom_jvp
def read(storage: PyTree[Array], index: Int[Array, " B"]) -> PyTree[Array]:
    """The rows ``[B, ...]`` at ``index``; an index past the end reads the last row."""
    leaves, treedef = jax.tree.flatten(storage)
    count = index.shape[0]
    _check_rows_fit(leaves, 1, (count,))
    short = rowwise.is_alone() or _row_bytes(leaves, 1) <= _SMALL_ROW
    few = 0 < count <= rowwise.most_rows() and short and all(map(_is_small, leaves))
    # The lines of all rows, which are read before a loop copies them, should still be in a cache.
    by_loop = [
        few or (_is_narrow(leaf) and 0 < count * _row_bytes([leaf], 1) <= _CACHE) for leaf in leaves
    ]
    if not any(by_loop) and _by_native(leaves, index.shape, 1):
        return rowwise.on_cpu(_read_native, select, index, storage)
    both = list(zip(leaves, by_loop, strict=True))
    copied = iter(_copy([leaf for leaf, looped in both if looped], index))
    rows = [next(copied) if looped else select(index, leaf) for leaf, looped in both]
    return jax.tree.unflatten(treedef, rows)


@read.defjvp
def _(
    primals: tuple[PyTree[Array], Int[Array, " B"]], tangents: tuple[PyTree[Array], Any]
) -> tuple[PyTree[Array], PyTree[Array]]:
    (storage, index), (change, _) = primals, tangents
    rows = read(storage, index)
    return rows, _change(functools.partial(select, index), rows, change)


def _change(
    gather: Callable[[Array], Array], rows: PyTree[Array], change: PyTree[Array]
) -> PyTree[Array]:
    """How ``rows`` change as the leaves do that they were gathered from.

    Args:
        gather: Of a leaf, linear: other than what gathered the rows, it can be transposed.
        rows: What was gathered.
        change: The tangents of all leaves.
    """

    def of(row: Array, tangent: Any) -> Any:
        if jnp.issubdtype(row.dtype, jnp.inexact):
            return gather(tangent)
        return np.zeros(row.shape, jax.dtypes.float0)

    return jax.tree.map(of, rows, change)


def _copy(leaves: list[Array], index: Int[Array, " B"]) -> list[Array]:
    """The rows of small leaves, by loops on a CPU: as few as can be of small rows."""
    groups: list[list[Array]] = []
    for leaf in leaves:
        # Rows of one axis are copied several numbers at a time.
        flat = leaf.reshape(leaf.shape[0], -1) if rowwise.is_alone() or _is_narrow(leaf) else leaf
        if not groups or _row_bytes([*groups[-1], leaf], 1) > _SMALL_ROW:
            groups.append([])
        groups[-1].append(flat)
    count = index.shape[0]
    loops = [rowwise.each(select, index, some, touch=_lines, most=count) for some in groups]
    rows = [row for loop in loops for row in loop]
    return [row.reshape(count, *leaf.shape[1:]) for row, leaf in zip(rows, leaves, strict=True)]


def select(index: Int[Array, "..."], storage: PyTree[Array]) -> PyTree[Array]:
    """What lies at ``index``, clipped to the range: one gather for each leaf, at any size."""
    # XLA's own gather clips, so there is nothing to compute for it first.
    return jax.tree.map(
        lambda slots: slots.at[index].get(mode="clip", wrap_negative_indices=False), storage
    )


def _lines(index: Int[Array, ""], storage: PyTree[Array]) -> list[Array]:
    """A number of each line of memory in which the row of a leaf lies."""
    found = []
    for slots in jax.tree.leaves(storage):
        if not slots.size:
            continue
        rows = slots.reshape(slots.shape[0], -1)
        last = rows.shape[1] - 1
        for column in [*range(0, last, _LINE // slots.dtype.itemsize), last]:
            at = (index, jnp.int32(column))
            found.append(lax.dynamic_slice(rows, at, (1, 1))[0, 0])
    return found


def _check_rows_fit(leaves: list[Array], axes: int, leading: tuple[int, ...]) -> None:
    """Refuse to read so many rows that no array can hold them."""
    for leaf in leaves:
        sizes.check_bytes("a batch", (*leading, *leaf.shape[axes:]), leaf.dtype)


def _is_small(leaf: Array) -> bool:
    """Whether a row of the leaf can be copied by a loop that is one native function."""
    return numbers.is_number(leaf.dtype) and _row_bytes([leaf], 1) <= _SMALL_ROW


def _is_narrow(leaf: Array) -> bool:
    """Whether a loop copies rows of the leaf, as rows of one axis, faster than a gather.

    A gather takes number by number, and a loop many numbers of a byte or two together.
    """
    small = _is_small(leaf) and leaf.dtype.itemsize < 4
    return small and math.prod(leaf.shape[1:]) >= _LINE


def _row_bytes(leaves: list[Array], axes: int) -> int:
    """The size of a row of all leaves, which have ``axes`` of slots."""
    return sum(math.prod(leaf.shape[axes:]) * leaf.dtype.itemsize for leaf in leaves)


def _by_native(leaves: list[Array], out: Sequence[int], axes: int) -> bool:
    """Whether to gather rows of shape ``out`` of leaves with ``axes`` of slots by our own kernel.

    XLA's gathers hand half of the rows to another thread. In the middle of a longer program that
    is awake, and in a call from Python it sleeps, unless there is much to do.
    """
    return (
        native.in_use()
        and rowwise.is_alone()
        and out[0] <= rowwise.most_rows()
        and math.prod(out) * _row_bytes(leaves, axes) <= _SMALL_BATCH
        and all(getattr(leaf.dtype, "kind", "none") in _KINDS for leaf in leaves)
    )


def _read_native(index: Int[Array, " B"], storage: PyTree[Array]) -> PyTree[Array]:
    leaves, treedef = jax.tree.flatten(storage)
    return jax.tree.unflatten(treedef, native.take(leaves, index))


@functools.partial(jax.jit, static_argnames="length")
def read_runs(
    storage: PyTree[Array], ring: Int[Array, " B"], start: Int[Array, " B"], length: int
) -> PyTree[Array]:
    """Consecutive rows of leaves ``[E, L, ...]``, from each ``start`` on, modulo ``L``.

    Args:
        storage: The leaves.
        ring: Which rings, ``[B]``; one past the end reads as the last.
        start: In ``[0, L)``, ``[B]``.
        length: How many rows of each, at most ``L``.

    Returns:
        Leaves ``[B, length, ...]``.
    """
    num_rings, size = jax.tree.leaves(storage)[0].shape[:2]
    _check_rows_fit(jax.tree.leaves(storage), 2, (start.shape[0], length))

    def places(ring: Int[Array, " B"], start: Int[Array, " B"]) -> Int[Array, "B T"]:
        offset = jnp.arange(length, dtype=jnp.int32)
        return ring[:, None] * size + (start[:, None] + offset[None]) % size

    def plain(
        storage: PyTree[Array], ring: Int[Array, " B"], start: Int[Array, " B"]
    ) -> PyTree[Array]:
        place = places(ring, start)
        flat = jax.tree.map(lambda leaf: lax.collapse(leaf, 0, 2), storage)
        rows = read(flat, place.reshape(-1))
        shape = place.shape
        return jax.tree.map(lambda leaf: leaf.reshape(*shape, *leaf.shape[1:]), rows)

    def runs(
        storage: PyTree[Array], ring: Int[Array, " B"], start: Int[Array, " B"]
    ) -> PyTree[Array]:
        # XLA:CPU copies a run at a time, but no run goes around the end of a ring: those few that
        # should are read again.
        def run(leaf: Array) -> Array:
            def one(ring: Int[Array, ""], start: Int[Array, ""]) -> Array:
                inner = leaf.shape[2:]
                at = (ring, start, *[jnp.int32(0)] * len(inner))
                return lax.dynamic_slice(leaf, at, (1, length, *inner))[0]

            return jax.vmap(one)(ring, start)

        which, count = rowwise.pack(
            jnp.arange(start.shape[0], dtype=jnp.int32),
            start > size - length,
            0,
            size=start.shape[0],
        )

        def again(i: Array, out: PyTree[Array]) -> PyTree[Array]:
            row = which[i]
            whole = plain(storage, ring[row][None], start[row][None])
            return jax.tree.map(
                lambda to, run: lax.dynamic_update_slice_in_dim(to, run, row, 0), out, whole
            )

        return lax.fori_loop(0, count, again, jax.tree.map(run, storage))

    def native_runs(
        storage: PyTree[Array], ring: Int[Array, " B"], start: Int[Array, " B"]
    ) -> PyTree[Array]:
        leaves, treedef = jax.tree.flatten(storage)
        taken = native.take(leaves, ring * size + start, axes=2, length=length)
        return jax.tree.unflatten(treedef, taken)

    by_native = _by_native(jax.tree.leaves(storage), (start.shape[0], length), 2)

    @jax.custom_jvp
    def rows(
        storage: PyTree[Array], ring: Int[Array, " B"], start: Int[Array, " B"]
    ) -> PyTree[Array]:
        return rowwise.on_cpu(native_runs if by_native else runs, plain, storage, ring, start)

    @rows.defjvp
    def _(primals: tuple[Any, Any, Any], tangents: tuple[Any, Any, Any]) -> tuple[Any, Any]:
        def gather(leaf: Array) -> Array:
            return select(places(*primals[1:]), lax.collapse(leaf, 0, 2))

        found = rows(*primals)
        return found, _change(gather, found, tangents[0])

    return rows(storage, jnp.minimum(ring, num_rings - 1), start)


def _check_structure(storage: PyTree, items: PyTree, name: str) -> None:
    want, got = jax.tree.structure(storage), jax.tree.structure(items)
    if want == got:
        return
    # Rows one by one, which is how a Python loop collects them.
    if isinstance(items, list) and items and jax.tree.structure(items[0]) == want:
        raise ValueError(
            f"{name} is a list of {len(items)}; stack them: "
            f"jax.tree.map(lambda *rows: jnp.stack(rows), *{name})"
        )
    have = {jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(items)}
    need = {jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(storage)}
    parts = [f"{name}{key} is missing" for key in sorted(need - have)]
    parts += [f"{name}{key} is not in the example" for key in sorted(have - need)]
    more = [f"{len(parts) - _NAMED} more"] if len(parts) > _NAMED else []
    detail = "; ".join(parts[:_NAMED] + more) or f"{name} is {got}; the example is {want}"
    raise ValueError(f"{name} has another structure than the example: {detail}")


def _name(root: str, path: Any) -> str:
    return root + jax.tree_util.keystr(path)


def _format(shape: Sequence[str | int]) -> str:
    inner = ", ".join(str(axis) for axis in shape)
    return f"({inner},)" if len(shape) == 1 else f"({inner})"

"""Conversion of numbers from the dtype that they arrive in to the one that is stored."""

import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, PyTree

from jaxbuf.core import checks, trees
from jaxbuf.core.leaves import check_dtype, is_key
from jaxbuf.core.types import Arrays, Dtype

# The least normal float32, such as the least mass: what is smaller may count as zero.
TINY = float(np.finfo(np.float32).tiny)

# NumPy makes numbers of 64 bits where nobody has asked for them, so they count as those of 32 bits.
_HALF: dict[Dtype, Dtype] = {
    np.dtype(wide): np.dtype(half)
    for wide, half in {
        "int64": "int32",
        "uint64": "uint32",
        "float64": "float32",
        "complex128": "complex64",
    }.items()
}
# Whether an array was made of Python's numbers, which leave its dtype open.
_is_weak = operator.attrgetter("aval.weak_type")
# What errors call the kinds of numbers that an argument may have to be of.
_EXPECTED: dict[type[np.generic], str] = {
    np.bool_: "bool",
    np.integer: "integers",
    np.floating: "a floating dtype",
}
# Implicit casts only go up: bool, integer, floating, complex.
_KINDS = {"b": 0, "u": 1, "i": 1, "f": 2, "c": 3}


def abstract(value: object, name: str) -> jax.ShapeDtypeStruct:
    """Returns the shape, dtype and weak type that ``value`` has once it is traced.

    Raises:
        ValueError: If it is neither an array nor a number, or of a dtype that no leaf can have.
    """
    if isinstance(value, jax.ShapeDtypeStruct):
        aval: Any = value
    else:
        try:
            # Only a Python integer can be too large to have a type.
            aval = jax.typeof(value * 0 if type(value) is int else trees.native(value))
        except TypeError as error:
            kind = checks.kind_of(value)
            raise ValueError(f"{name} is {kind}; expected an array of numbers") from error
    dtype = aval.dtype
    check_dtype(dtype, name)
    if not is_key(dtype):
        dtype = jax.dtypes.canonicalize_dtype(dtype)
    return jax.ShapeDtypeStruct(aval.shape, dtype, weak_type=bool(aval.weak_type))


def type_of(value: object, name: str) -> jax.ShapeDtypeStruct:
    """Returns the same as ``abstract`` for a value that must hold numbers, not only their type.

    Raises:
        ValueError: If it is neither an array nor a number.
    """
    if isinstance(value, jax.ShapeDtypeStruct):
        raise ValueError(f"{name} is a ShapeDtypeStruct, which holds no numbers; expected an array")
    return abstract(value, name)


def of_kind(value: object, name: str, kind: type[np.generic]) -> jax.ShapeDtypeStruct:
    """Returns the same as ``type_of`` for a value whose numbers are of a kind.

    Raises:
        ValueError: If they are of another kind, or it is neither an array nor a number.
    """
    got = type_of(value, name)
    if not jnp.issubdtype(got.dtype, kind):
        given = given_dtype(value, got.dtype)
        raise ValueError(f"{name} has dtype {given}; expected {_EXPECTED[kind]}")
    return got


def arrays(tree: PyTree, name: str) -> Arrays:
    """Returns a pytree with its leaves as jax arrays.

    Raises:
        ValueError: If it has no leaves, or a leaf is neither an array nor a number; the message
            names the leaf.
    """
    leaves, treedef = jax.tree_util.tree_flatten_with_path(tree)
    if not leaves:
        raise ValueError(f"{name} is {checks.name_of(tree)}; expected a pytree of arrays")
    out: list[Array] = []
    for path, leaf in leaves:
        label = name + jax.tree_util.keystr(path)
        got = type_of(leaf, label)
        out.append(jnp.asarray(leaf) if is_key(got.dtype) else to_array(leaf, label, got.dtype))
    return jax.tree.unflatten(treedef, out)


def array(value: object, name: str, kind: type[np.generic] = np.generic) -> Array:
    """Returns one jax array, whose numbers are of a kind.

    Raises:
        ValueError: As raised by ``of_kind``.
    """
    of_kind(value, name, kind)
    return arrays(value, name)


def ids(value: object, name: str) -> Any:
    """Returns integer identifiers as a NumPy array, or as a jax array if they are traced.

    Raises:
        ValueError: If they are not integers.
    """
    if isinstance(value, list | tuple):
        value = np.asarray(value)
    got = type_of(value, name)
    if not jnp.issubdtype(got.dtype, jnp.integer) and 0 not in got.shape:
        raise ValueError(f"{name} has dtype {given_dtype(value, got.dtype)}; expected integers")
    if isinstance(value, jax.core.Tracer):
        return value
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        return value
    return trees.native(np.array(value))


def given_dtype(value: object, otherwise: Dtype) -> Dtype:
    """Returns the dtype with which a value came, for an error about it.

    JAX reads NumPy's numbers of 64 bits as those of 32, and the caller knows them as they are.

    Args:
        value: An array or a number.
        otherwise: The dtype of a value that has none.

    Example:
        >>> given_dtype(np.zeros(3), np.dtype("float32")), given_dtype(2, np.dtype("int32"))
        (dtype('float64'), dtype('int32'))
    """
    return getattr(value, "dtype", otherwise)


def has_wide(tree: PyTree) -> bool:
    """Returns whether there are NumPy's numbers of 64 bits in a pytree; False for what is none."""
    try:
        leaves = jax.tree.leaves(tree)
    except (TypeError, ValueError):
        return False
    return any(isinstance(x, np.ndarray | np.generic) and x.dtype in _HALF for x in leaves)


def may_become(got: Dtype, want: Dtype) -> bool:
    """Returns whether dtype ``got`` may be converted to ``want`` without loss of its kind."""
    return _KINDS[_kind(got)] <= _KINDS[_kind(want)]


def computed_as(got: jax.ShapeDtypeStruct | Array, dtype: Dtype) -> bool:
    """Returns whether numbers that a function of the caller returns may be stored as ``dtype``.

    Weakly typed ones may become those of any floating dtype. Those of an integer dtype must have it
    already: while they are traced nobody can see whether they fit, and -1 would be stored as 255.

    Example:
        >>> minus_one = jnp.asarray(-1)  # weakly typed, and int32 by default
        >>> [computed_as(minus_one, np.dtype(name)) for name in ("float16", "int32", "uint8")]
        [True, True, False]
    """
    if got.dtype == dtype:
        return True
    return (
        bool(got.weak_type) and jnp.issubdtype(dtype, jnp.floating) and may_become(got.dtype, dtype)
    )


def counts_as(value: object, dtype: Dtype) -> bool:
    """Returns whether these are NumPy's numbers of 64 bits, and ``dtype`` the one of 32 bits.

    Such numbers are accepted where they fit, with ``jax_enable_x64`` and without. Arrays of JAX are
    not: with ``jax_enable_x64`` they have 64 bits because somebody has asked for them.

    Example:
        >>> counts_as(np.zeros(3), np.dtype("float32")), counts_as(np.zeros(3), np.dtype("int32"))
        (True, False)
    """
    if not isinstance(value, np.ndarray | np.generic):
        return False
    half = _HALF.get(value.dtype.newbyteorder("="))
    # NumPy takes None for float64.
    return half is not None and half == dtype


def convert(value: Any, name: str, dtype: Dtype, *, infinite: bool = False) -> Any:
    """Returns ``value`` in another dtype, if its numbers fit it.

    Python numbers, NumPy arrays, and jax arrays that are not traced can be checked.
    Floating-point numbers fit if they do not become infinite; they may be rounded.

    Args:
        value: A number or an array.
        name: Its name in errors.
        dtype: The dtype to convert to. Numbers of a later kind, such as floats for an integer
            dtype, are left as they are.
        infinite: Whether a number may become infinite.

    Returns:
        A jax array as it is, and anything else as a new NumPy array of ``dtype``: JAX itself would
        first truncate it to 32 bits.

    Raises:
        ValueError: If a number does not fit.

    Example:
        >>> convert(np.array([1, 2**40]), "version", np.dtype("int32"))
        Traceback (most recent call last):
        ValueError: version[1] is 1099511627776; expected an integer from -2147483648 to \
2147483647, as int32 holds them
    """
    own = getattr(value, "dtype", None)
    # NumPy takes None for float64.
    if own is not None and own == dtype:
        return value.copy() if isinstance(value, np.ndarray) else value
    if isinstance(value, jax.core.Tracer):
        return value
    if isinstance(value, jax.Array):
        got = value.dtype
        if is_key(got) or not may_become(got, dtype):
            return value
        if _may_overflow(got, dtype, infinite) and value.is_fully_addressable:
            _check_fit(np.asarray(jax.device_get(value)), name, dtype)
        return value
    if not isinstance(value, np.ndarray | np.generic | int | float | complex):
        return value
    host = np.asarray(value)
    if host.dtype == object:
        # A Python integer of more than 64 bits.
        _refuse(name, value, dtype)
    if host.dtype.kind not in "biufcV" or not may_become(host.dtype, dtype):
        return trees.owned(value)
    if _may_overflow(host.dtype, dtype, infinite):
        _check_fit(host, name, dtype)
    with np.errstate(over="ignore"):
        return host.astype(dtype)


def to_array(value: object, name: str, dtype: Dtype, *, infinite: bool = False) -> Array:
    """Returns ``convert(value, ...)`` as a jax array of ``dtype``, which shares no host memory."""
    return jnp.asarray(convert(value, name, dtype, infinite=infinite), dtype)


def integers(value: object, name: str) -> Int[Array, "..."]:
    """Returns integers of any width as an int32 array.

    Raises:
        ValueError: If they are not integers, or if one that is not traced does not fit.
    """
    of_kind(value, name, np.integer)
    return to_array(value, name, np.dtype("int32"))


def narrow(tree: PyTree, name: str, like: Callable[[], PyTree] | None = None) -> PyTree:
    """Returns a pytree whose numbers are as the storage holds them, or else JAX, if they fit.

    Call it on arguments of a jitted function: ``jax.jit`` silently truncates NumPy's 64-bit
    numbers to 32 bits unless JAX has 64-bit numbers enabled, and keeps them if it has.

    Args:
        tree: Any pytree.
        name: Its name in errors.
        like: Returns a pytree with the dtypes that Python numbers and weakly typed arrays will be
            cast to, and NumPy's numbers of 64 bits to those of 32; ignored unless it has the same
            number of leaves. None if nothing stores them.

    Returns:
        The tree with copies of its NumPy arrays, which their owner may write again.

    Raises:
        ValueError: If a number does not fit; the message names the leaf.
    """
    if like is None and isinstance(tree, int | float):
        return tree
    # First the items of most calls from Python, in which each step counts.
    by_name = type(tree) is dict and {*map(type, tree)} == {str}
    leaves: Any = tree.values() if by_name else [tree]
    are_arrays = all(map(trees.is_concrete, map(type, leaves)))
    if are_arrays and (like is None or not any(map(_is_weak, leaves))):
        return tree
    leaves, treedef = trees.flatten(tree, name)
    loose: list[int] = []
    for i, leaf in enumerate(leaves):
        if type(leaf) is np.ndarray and leaf.dtype.isnative and leaf.dtype not in _HALF:
            leaves[i] = leaf.copy()
        elif not isinstance(leaf, jax.Array) or _is_weak(leaf):
            loose.append(i)
    if not loose:
        return jax.tree.unflatten(treedef, leaves)
    kept = [] if like is None else jax.tree.leaves(trees.match(tree, like()))
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    for i in loose:
        label = name + jax.tree_util.keystr(paths[i])
        stored = kept[i].dtype if len(kept) == len(leaves) else None
        leaves[i] = _narrowed(leaves[i], label, stored)
    return jax.tree.unflatten(treedef, leaves)


def _narrowed(leaf: Any, label: str, stored: Dtype | None) -> Any:
    """Returns a leaf as ``narrow`` does, given the dtype in which it is stored, if it is."""
    if isinstance(leaf, np.ndarray | np.generic):
        dtype: Dtype = leaf.dtype.newbyteorder("=")
        if stored is not None and counts_as(leaf, stored):
            dtype = stored
        elif dtype in _HALF:
            dtype = jax.dtypes.canonicalize_dtype(dtype)
        return convert(leaf, label, dtype)
    if stored is not None:
        convert(leaf, label, stored)
    return leaf


def _kind(dtype: Dtype) -> str:
    # NumPy calls bfloat16, int4 and similar dtypes kind "V".
    for kind, group in (("i", jnp.signedinteger), ("f", jnp.floating)):
        if jnp.issubdtype(dtype, group):
            return kind
    return np.dtype(dtype).kind


def _may_overflow(got: Dtype, dtype: Dtype, infinite: bool) -> bool:
    """Returns whether a number of dtype ``got`` may be out of the range of ``dtype``."""
    if np.can_cast(got, dtype):
        return False
    if not jnp.issubdtype(dtype, jnp.inexact):
        return True
    if jnp.issubdtype(got, jnp.integer):
        return jnp.iinfo(got).max > float(jnp.finfo(dtype).max)
    return not infinite


def _check_fit(host: np.ndarray, name: str, dtype: Dtype) -> None:
    """Checks that all numbers are in the range of ``dtype``."""
    if not host.size:
        return
    if jnp.issubdtype(dtype, jnp.integer):
        low, high = jnp.iinfo(dtype).min, jnp.iinfo(dtype).max
        if low <= host.min() and host.max() <= high:
            return
        wrong = (host < low) | (host > high)
    else:
        with np.errstate(over="ignore"):
            wrong = ~np.isfinite(host.astype(dtype))
        if not wrong.any():
            return
        wrong &= np.isfinite(host)
    for at in np.argwhere(wrong)[:1]:
        where = f"[{', '.join(str(i) for i in at)}]" if at.size else ""
        _refuse(name + where, host[tuple(at)], dtype)


def _refuse(name: str, number: object, dtype: Dtype) -> None:
    dtype = np.dtype(dtype)
    if jnp.issubdtype(dtype, jnp.integer):
        info = jnp.iinfo(dtype)
        expected = f"an integer from {info.min} to {info.max}"
    elif dtype == np.bool_:
        expected = "True or False"
    else:
        expected = f"a number of at most {float(jnp.finfo(dtype).max):.4g}"
    raise ValueError(f"{name} is {number}; expected {expected}, as {dtype} holds them")

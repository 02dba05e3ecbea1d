"""Leaves of items: which dtypes they may have, their bits, and their form on a host.

Everything that stores items takes these dtypes, and so does everything that sends them: between
devices and between ranks bits travel, whose number a leaf knows. A ``Store`` takes no keys.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, PyTree

from jaxbuf.core.types import Arrays, Dtype

# XLA ends the process that computes with floats of 6 bits, and refuses its own integers of 1 bit.
_NUMBERS = frozenset(
    (
        "bool",
        *(f"{kind}{bits}" for kind in ("int", "uint") for bits in (2, 4, 8, 16, 32, 64)),
        *("float4_e2m1fn", "float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn"),
        *("float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
        *("bfloat16", "float16", "float32", "float64", "complex64", "complex128"),
    )
)


def check_dtype(dtype: Dtype, name: str) -> None:
    """Checks that an item may have a leaf of this dtype: numbers, flags, or PRNG keys.

    Raises:
        ValueError: If it may not.

    Example:
        >>> check_dtype(np.dtype("float32"), "example['x']")
        >>> check_dtype(np.dtype("datetime64[s]"), "example['x']")
        Traceback (most recent call last):
        ValueError: example['x'] has dtype datetime64[s]; expected bool, integers of 2 to 64 bits, \
floats of 4 bits or of 8 to 64, complex numbers, or PRNG keys
    """
    if not is_key(dtype) and dtype.name not in _NUMBERS:
        raise ValueError(
            f"{name} has dtype {dtype}; expected bool, integers of 2 to 64 bits, floats of 4 bits "
            "or of 8 to 64, complex numbers, or PRNG keys"
        )


def is_key(dtype: Any) -> bool:
    """Returns whether a dtype is that of PRNG keys."""
    return jnp.issubdtype(dtype, jax.dtypes.prng_key)


def as_numbers(leaf: Any) -> Array:
    """Returns a leaf as an array of numbers: PRNG keys as their words."""
    return jax.random.key_data(leaf) if is_key(leaf.dtype) else leaf


def from_numbers(like: Any, leaf: Any) -> Any:
    """Returns the inverse of ``as_numbers`` for a leaf with the dtype of ``like``."""
    if not is_key(like.dtype) or is_key(leaf.dtype):
        return leaf
    return jax.random.wrap_key_data(leaf, impl=jax.random.key_impl(like))


def on_host(leaf: Any) -> jax.ShapeDtypeStruct:
    """Returns the shape and dtype of ``to_host(leaf)``."""
    leaf = jax.eval_shape(as_numbers, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
    return jax.ShapeDtypeStruct(leaf.shape, np.dtype(leaf.dtype))


def to_host(leaf: Any) -> np.ndarray:
    """Returns a leaf as a NumPy array; of PRNG keys, which NumPy does not know, their words."""
    return np.asarray(as_numbers(leaf) if isinstance(leaf, jax.Array) else leaf)


def from_host(like: Arrays, tree: PyTree) -> PyTree:
    """Returns leaves as ``to_host`` returns them, with keys where ``like`` has keys."""
    return jax.tree.map(from_numbers, like, tree)


def bits(leaf: Array) -> Array:
    """Returns rows as unsigned integers of 1, 2 or 4 bytes, ``[n, k]``."""
    leaf = as_numbers(leaf)
    if leaf.dtype.kind == "c":
        leaf = jnp.stack([leaf.real, leaf.imag], axis=-1)
    size = leaf.dtype.itemsize
    if size == 1:
        plain = lax.bitcast_convert_type(leaf.astype(_byte(leaf.dtype)), jnp.uint8)
        return plain.reshape(leaf.shape[0], math.prod(leaf.shape[1:]))
    words = lax.bitcast_convert_type(leaf, jnp.dtype(f"uint{8 * min(size, 4)}"))
    return words.reshape(leaf.shape[0], math.prod(words.shape[1:]))


def from_bits(words: Array, like: Array) -> Array:
    """Returns the inverse of ``bits``, for any number of rows."""
    if is_key(like.dtype):
        return from_numbers(like, from_bits(words, as_numbers(like)))
    shape = (words.shape[0], *like.shape[1:])
    if like.dtype.kind == "c":
        both = from_bits(words, jnp.stack([like.real, like.imag], axis=-1))
        return lax.complex(both[..., 0], both[..., 1])
    if like.dtype.itemsize == 1:
        plain = lax.bitcast_convert_type(words.reshape(shape), _byte(like.dtype))
        return plain.astype(like.dtype)
    shape += (2,) if like.dtype.itemsize == 8 else ()
    return lax.bitcast_convert_type(words.reshape(shape), like.dtype)


def _byte(dtype: np.dtype) -> np.dtype:
    """Returns the dtype of 8 bits that holds all numbers of one of at most 8 bits."""
    if dtype == jnp.bool_ or jnp.issubdtype(dtype, jnp.unsignedinteger):
        return jnp.dtype(jnp.uint8)
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.dtype(jnp.int8)
    return jnp.dtype(jnp.float8_e4m3fn) if jnp.finfo(dtype).bits < 8 else dtype

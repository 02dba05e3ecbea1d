"""Rows of each dtype that an item may have."""

import jax
import jax.numpy as jnp
import numpy as np

SMALL = ("int2", "int4", "uint2", "uint4", "float4_e2m1fn")
FLOATS_8 = ("e3m4", "e4m3", "e4m3b11fnuz", "e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz", "e8m0fnu")
PLAIN = [f"{kind}int{bits}" for kind in ("", "u") for bits in (8, 16, 32)]
NUMBERS = ["bool", *SMALL, *(f"float8_{kind}" for kind in FLOATS_8), *PLAIN]
NUMBERS += ["bfloat16", "float16", "float32", "complex64"]
WIDE = ["int64", "uint64", "float64", "complex128"]
KEYS = ["threefry2x32", "rbg", "unsafe_rbg"]


def rows_of(name, rows, seed=0):
    """Returns rows of any bits, `[rows, 3]`; of PRNG keys `[rows]`."""
    if name in KEYS:
        return jax.random.split(jax.random.key(seed, impl=name), rows)
    dtype, random = jnp.dtype(name), np.random.default_rng(seed)
    if name == "bool" or name in SMALL:
        return jnp.asarray(random.integers(0, 2, (rows, 3)).astype(np.int8).astype(dtype))
    numbers = np.frombuffer(random.bytes(rows * 3 * dtype.itemsize), dtype).reshape(rows, 3)
    if name.startswith("float8"):
        # XLA computes with these in wider floats, which have other bits of NaN. With the flags that
        # tests give it, XLA of jax 0.10.2 rounds what is below the least normal float16.
        plain = np.abs(numbers.astype(np.float32)) >= np.finfo(np.float16).tiny
        numbers = np.where(plain, numbers, np.ones((), dtype))
    return jnp.asarray(numbers)


def every_kind(rows, seed=0):
    """Returns a dict of such leaves, with numbers of 64 bits if JAX has them enabled."""
    wide = WIDE if jax.config.jax_enable_x64 else []
    return {name: rows_of(name, rows, seed) for name in (*NUMBERS, *wide, *KEYS)}

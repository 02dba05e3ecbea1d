"""Tracing code that is not strict about dtypes and ranks."""

import contextlib
from collections.abc import Generator

import jax


@contextlib.contextmanager
def lenient_promotion() -> Generator[None]:
    """Trace under jax's default promotion rules, whatever those of the caller are.

    gymnax and optax mix dtypes and ranks, which ``jax_numpy_dtype_promotion="strict"`` and
    ``jax_numpy_rank_promotion="raise"`` forbid.
    """
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield

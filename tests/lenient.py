"""jax's default promotion, which other libraries count on, within tests that forbid it."""

import contextlib

import jax


@contextlib.contextmanager
def lenient():
    """Trace under jax's default promotion of dtypes and ranks."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield

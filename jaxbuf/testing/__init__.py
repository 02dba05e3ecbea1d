"""Assertions about buffers, for the tests of programs that use them.

Each raises an ``AssertionError`` that names the wrong values. They run outside of ``jax.jit``, in
any test framework.
"""

from jaxbuf.testing.contents import assert_holds
from jaxbuf.testing.draws import assert_distribution
from jaxbuf.testing.steps import assert_no_copy, assert_resumes
from jaxbuf.testing.valid import assert_valid

__all__ = [
    "assert_distribution",
    "assert_holds",
    "assert_no_copy",
    "assert_resumes",
    "assert_valid",
]

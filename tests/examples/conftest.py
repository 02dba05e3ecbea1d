"""Fixtures of the tests of examples."""

import pytest

from tests.lenient import lenient


@pytest.fixture(scope="module")
def promotion():
    """Gymnax and optax mix dtypes and ranks."""
    with lenient():
        yield

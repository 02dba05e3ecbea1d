"""Sorts of many numbers, against NumPy's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxbuf.core import sorting


@pytest.mark.parametrize("count", [1, 2, 1000])
@pytest.mark.parametrize("order", [sorting.order, sorting.order_of_pairs])
def test_order_is_a_stable_sort(order, count):
    rng = np.random.default_rng(count)
    number = rng.integers(0, 2**32, count, np.uint32) >> rng.integers(0, 32, count, np.uint32)
    np.testing.assert_array_equal(jax.jit(order)(number), np.argsort(number, kind="stable"))


@pytest.mark.parametrize(("size", "count"), [(1, 1), (300, 2), (300, 300), (1000, 7)])
@pytest.mark.parametrize("dtype", [np.uint32, np.float32])
def test_largest(size, count, dtype):
    rng = np.random.default_rng(size + count)
    number = rng.permutation(size).astype(np.uint32)
    if dtype == np.float32:
        number = np.where(number < size // 2, -np.inf, number).astype(np.float32)
    else:
        number = number * np.uint32((2**32 - 1) // size)
    found, index = jax.jit(sorting.largest, static_argnums=1)(jnp.asarray(number), count)
    np.testing.assert_array_equal(found, np.sort(number)[::-1][:count])
    np.testing.assert_array_equal(number[index], found)
    assert len(set(index.tolist())) == count

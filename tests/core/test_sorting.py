"""Sorts of many numbers, against NumPy's."""

import chex
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


@pytest.mark.parametrize("values", [1, 3, 1000, 2**32])
@pytest.mark.parametrize(("size", "count"), [(2**14, 16), (20_000, 5000), (2**14, 2**14)])
def test_many_words_are_found_in_passes(size, count, values):
    rng = np.random.default_rng(values)
    number = jnp.asarray(rng.integers(0, values, (2, size)) * ((2**32 - 1) // values), jnp.uint32)
    top_k = jax.jit(jax.vmap(lambda row: jax.lax.top_k(row, count)))
    chex.assert_trees_all_equal(
        jax.jit(jax.vmap(lambda row: sorting.largest_words(row, count)))(number),
        tuple(top_k(number)),
    )
    program = jax.jit(sorting.largest_words, static_argnums=1)
    assert "top_k" not in program.lower(number[0], count).compile().as_text()
    found, index = program(number[0], count)
    np.testing.assert_array_equal(found, np.sort(number[0])[::-1][:count])
    np.testing.assert_array_equal(number[0][index], found)

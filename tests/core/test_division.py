"""Division with one operation is that of NumPy, for all numbers that it takes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxbuf.core.division import quotient, remainder


@pytest.mark.parametrize("divisor", [1, 2, 7, 2**16, 2**30 + 3, 2**31 - 1])
@pytest.mark.parametrize("dtype", [np.int32, np.uint32])
def test_agrees_with_numpy(dtype, divisor):
    rng, largest = np.random.default_rng(divisor), np.iinfo(dtype).max
    number = rng.integers(0, largest, 50, dtype, endpoint=True)
    number[:4] = 0, divisor - 1, min(divisor, largest), largest
    for by in (divisor, rng.integers(1, divisor, number.shape, np.int32, endpoint=True)):
        given = by if isinstance(by, int) else jnp.asarray(by)
        got = quotient(jnp.asarray(number), given), remainder(jnp.asarray(number), given)
        for found, want in zip(got, (number // by, number % by), strict=True):
            assert found.dtype == dtype
            np.testing.assert_array_equal(found, want)


@pytest.mark.parametrize("divisor", [1, 7, 2**31 - 1])
def test_a_remainder_is_never_negative(divisor):
    number = -np.arange(min(divisor, 50) + 1, dtype=np.int32)
    number[-1] = -divisor
    np.testing.assert_array_equal(remainder(jnp.asarray(number), divisor), number % divisor)


def test_each_is_one_division():
    for function, name in ((quotient, "div"), (remainder, "rem")):
        jaxpr = jax.make_jaxpr(function)(jnp.arange(3), jnp.int32(2))
        names = [eqn.primitive.name for eqn in jaxpr.eqns]
        assert names.count(name) == 1
        assert set(names) <= {name, "add", "convert_element_type"}

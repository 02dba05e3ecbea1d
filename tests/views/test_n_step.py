"""`n_step` against one loop per start, and at its edges."""

import re
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbuf
from tests.models import trajectory as reference


def window(reward, terminated, truncated=None):
    fields = {
        "reward": jnp.asarray(reward, jnp.float32),
        "terminated": jnp.asarray(terminated, bool),
    }
    return fields if truncated is None else {**fields, "truncated": jnp.asarray(truncated, bool)}


def with_a_product(reward, terminated, truncated, start, n, discount):
    """As ``reference.n_step``, with a discount for each step."""
    total, factor, t = 0.0, 1.0, start
    for t in range(start, start + n):
        total = total + factor * reward[t]
        factor *= 0.0 if terminated[t] else discount[t]
        if terminated[t] or truncated[t]:
            break
    return total, factor, t + 1


@pytest.mark.parametrize("n", [1, 3, 7])
@pytest.mark.parametrize("agents", [(), (2,)])
def test_agrees_with_one_loop_per_start(n, agents):
    random = np.random.default_rng(n)
    reward = random.normal(size=(8, 7, *agents)).astype(np.float32)
    terminated, truncated = random.random((2, 8, 7)) < 0.15
    discounts = random.random((8, 7)).astype(np.float32)

    @jax.jit
    def view(steps, discounts):
        uncut = {name: leaf for name, leaf in steps.items() if name != "truncated"}
        return (
            jaxbuf.n_step(steps, n, discounts),
            jaxbuf.n_step(steps, n, 0.9),
            jaxbuf.n_step(uncut, n, jnp.float32(0.9)),
        )

    never = np.zeros_like(truncated)
    cases = ((discounts, truncated), (0.9, truncated), (0.9, never))
    found = view(window(reward, terminated, truncated), discounts)
    for actual, (discount, cut) in zip(found, cases, strict=True):
        # As many steps ahead as there are leave one start.
        starts = max(7 - n, 1)
        chex.assert_shape(jax.tree.leaves(actual), (8, starts, *agents))
        assert actual.bootstrap_index.dtype == jnp.int32
        for row, start in np.ndindex(8, starts):
            given = np.broadcast_to(discount, (8, 7))[row]
            total, left, index = with_a_product(
                reward[row], terminated[row], cut[row], start, n, given
            )
            np.testing.assert_allclose(actual.reward[row, start], total, rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(actual.discount[row, start], left, rtol=1e-5)
            np.testing.assert_array_equal(actual.bootstrap_index[row, start], index)
    # Flags may be of each agent.
    flags = window(
        reward, np.broadcast_to(terminated.reshape(8, 7, *(1,) * len(agents)), reward.shape)
    )
    plain = window(reward, terminated)
    chex.assert_trees_all_equal(jaxbuf.n_step(flags, n, 0.9), jaxbuf.n_step(plain, n, 0.9))


def test_rewards_past_the_end_do_not_matter():
    reward = jnp.array([[1.0, jnp.nan, jnp.inf, 1.0]])
    result = jaxbuf.n_step(window(reward, [[True, False, False, False]]), 3, 0.9)
    np.testing.assert_array_equal(result.reward, [[1.0]])
    np.testing.assert_array_equal(result.discount, [[0.0]])


def test_fields_by_name_and_path():
    class Step(NamedTuple):
        env: dict
        terminated: jax.Array

    plain = window([[1.0, 2.0, 3.0]], [[False, True, False]], [[True, False, False]])
    nested = Step({"gain": plain["reward"], "late": plain["truncated"]}, plain["terminated"])
    expected = jaxbuf.n_step(plain, 2, 0.9)
    actual = jaxbuf.n_step(nested, 2, 0.9, reward="env.gain", truncated="env.late")
    chex.assert_trees_all_equal(actual, expected)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_rewards_of_16_bits_are_summed_in_32(dtype):
    """A discount of 0.99 is one of 0.988 in bfloat16, where a sum of 300 ones is 256."""
    random = np.random.default_rng(0)
    reward = jnp.asarray(random.uniform(0.5, 1.5, (2, 301)), dtype)
    flags = random.random((2, 301)) < [[0.0], [0.01]]
    fields = {"reward": reward, "terminated": flags}
    for discount in (0.99, jnp.full((2, 301), 0.99, jnp.float32)):
        actual = jax.jit(lambda g: jaxbuf.n_step(fields, 300, g))(discount)
        assert (actual.reward.dtype, actual.discount.dtype) == (jnp.float32, jnp.float32)
        for row in range(2):
            stored, never = np.asarray(reward[row], np.float64), np.zeros(301, bool)
            total, left, _ = reference.n_step(stored, flags[row], never, 0, 300, 0.99)
            np.testing.assert_allclose(actual.reward[row, 0], total, rtol=1e-5)
            np.testing.assert_allclose(actual.discount[row, 0], left, rtol=1e-4)
    with jax.enable_x64(True):
        wide = jaxbuf.n_step({**fields, "reward": np.ones((2, 301))}, 300, 0.99)
        assert (wide.reward.dtype, wide.discount.dtype) == (jnp.float64, jnp.float64)
        np.testing.assert_allclose(wide.discount[0], 0.99**300, rtol=1e-13)


BAD = [
    ({}, {"n": 5}, "n is 5 and windows have 4 steps"),
    ({}, {"discount": jnp.ones((2, 3))}, "discount has shape (2, 3)"),
    ({"reward": jnp.ones(4)}, {}, "reward has shape (4,); expected (B, L)"),
    ({"reward": jnp.ones((2, 4), jnp.int32)}, {}, "reward has dtype int32"),
    ({"terminated": jnp.ones((2, 4))}, {}, "terminated has dtype float32; expected bool"),
    ({"terminated": jnp.ones((2, 3), bool)}, {}, "terminated has shape (2, 3); expected (2, 4)"),
    ({"truncated": jnp.ones((2, 1), bool)}, {}, "truncated has shape (2, 1); expected (2, 4)"),
]


@pytest.mark.parametrize(("fields", "options", "message"), BAD)
def test_bad_input(fields, options, message):
    fields = {**window(jnp.ones((2, 4)), jnp.zeros((2, 4))), **fields}
    with pytest.raises(ValueError, match=re.escape(message)):
        jaxbuf.n_step(fields, **{"n": 2, "discount": 0.9, **options})

"""`gae` and `vtrace` against the sums of the papers, and at their edges."""

import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import jaxbuf
from tests.models import advantages as reference
from tests.operations import quick


def window(reward, terminated=None, truncated=None):
    reward = jnp.asarray(reward, jnp.float32)
    never = jnp.zeros(reward.shape[:2], bool)
    steps = {"reward": reward, "terminated": never if terminated is None else terminated}
    return steps if truncated is None else {**steps, "truncated": truncated}


def random_steps(seed, shape):
    random = np.random.default_rng(seed)
    terminated, truncated = random.random((2, *shape[:2])) < 0.2
    reward, value, next_value, log_ratio = random.normal(size=(4, *shape)).astype(np.float32)
    return window(reward, terminated, truncated), value, next_value, log_ratio


def compare(found, steps, shape, model):
    """Compares with the model of one window, agent by agent."""
    for row, *agent in np.ndindex(shape[0], *shape[2:]):
        at = (row, slice(None), *agent)
        flags = (np.asarray(steps[name])[row] for name in ("terminated", "truncated"))
        advantage, target = model(at, np.asarray(steps["reward"])[at], *flags)
        np.testing.assert_allclose(found.advantage[at], advantage, rtol=2e-4, atol=2e-5)
        np.testing.assert_allclose(found.target[at], target, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("after", [True, False])
@pytest.mark.parametrize("shape", [(6, 8), (3, 5, 2)])
def test_agrees_with_the_sums_of_the_papers(shape, after):
    steps, value, next_value, log_ratio = random_steps(len(shape) + after, shape)
    discount = np.random.default_rng(3).random(shape[:2]).astype(np.float32)
    given = next_value if after else None

    def known(at):
        return value[at], next_value[at] if after else None

    @jax.jit
    def views(steps, value, given, log_ratio, discount):
        advantages = jaxbuf.gae(steps, value, discount, 0.8, next_value=given)
        clipped = {"lambda_": 0.9, "rho_clip": 1.5, "c_clip": 0.7}
        return advantages, jaxbuf.vtrace(
            steps, value, log_ratio, discount, next_value=given, **clipped
        )

    advantages, corrected = views(steps, value, given, log_ratio, discount)
    chex.assert_shape(jax.tree.leaves(advantages), (shape[0], shape[1] - (not after), *shape[2:]))

    def gae(at, *flags):
        return reference.gae(*flags, *known(at), discount[at[0]], 0.8)

    def vtrace(at, *flags):
        ratio = np.exp(log_ratio[at])
        return reference.vtrace(*flags, *known(at), ratio, discount[at[0]], 0.9, 1.5, 0.7)

    compare(advantages, steps, shape, gae)
    compare(corrected, steps, shape, vtrace)


def test_ratios_without_a_limit():
    """Rewards of 1, values of 0, ratios of 2 and γ of one half."""
    given = window(jnp.ones((1, 4))), jnp.zeros((1, 4)), jnp.log(jnp.full((1, 4), 2.0))
    found = jaxbuf.vtrace(*given, 0.5, rho_clip=jnp.inf, c_clip=1.0)
    np.testing.assert_allclose(found.target, [[3.5, 3.0, 2.0]], rtol=1e-6)
    np.testing.assert_allclose(found.advantage, [[5.0, 4.0, 2.0]], rtol=1e-6)


@pytest.mark.parametrize("end", ["terminated", "truncated"])
def test_nothing_after_an_end_matters(end):
    flags = {end: jnp.array([[False, True, False, False]])}
    value = jnp.array([[1.0, 2.0, 4.0, jnp.nan]])
    bad = window([[1.0, 1.0, jnp.nan, jnp.nan]], **flags)
    for found in (jaxbuf.gae(bad, value, 0.5, 1.0), jaxbuf.vtrace(bad, value, 0 * value, 0.5)):
        following = 0.0 if end == "terminated" else 0.5 * 4.0
        assert found.target[0, 1] == 1.0 + following
        assert found.target[0, 0] == 1.0 + 0.5 * (1.0 + following)


def test_results_are_constants():
    steps, value, next_value, log_ratio = random_steps(1, (2, 4))

    def loss(value, next_value, log_ratio, reward):
        known = {**steps, "reward": reward}
        one = jaxbuf.gae(known, value, 0.9, 0.9, next_value=next_value)
        other = jaxbuf.vtrace(known, value, log_ratio, 0.9, next_value=next_value)
        return sum(jnp.sum(leaf) for leaf in jax.tree.leaves((one, other))) + jnp.sum(value)

    given = (value, next_value, log_ratio, steps["reward"])
    gradient = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))
    by_value, *others = gradient(*map(jnp.asarray, given))
    np.testing.assert_array_equal(by_value, jnp.ones((2, 4)))
    assert not any(map(np.any, others))


@pytest.mark.parametrize("after", quick([True, False], {True}))
@pytest.mark.parametrize("which", ["gae", "vtrace"])
def test_gradients_pass_if_asked_for(which, after):
    """Of rewards and values, in which both are linear, and not of ratios and discounts."""
    steps, *values, log_ratio = random_steps(7, (2, 6))
    linear = [jnp.asarray(leaf) for leaf in (steps["reward"], *values)]
    others = [jnp.asarray(log_ratio), jax.random.uniform(jax.random.key(8), (2, 6))]

    def view(reward, value, next_value, log_ratio, discount):
        known, more = {**steps, "reward": reward}, {"stop_gradient": False}
        more |= {"next_value": next_value} if after else {}
        if which == "gae":
            return jaxbuf.gae(known, value, discount, 0.8, **more)
        more |= {"lambda_": 0.9, "rho_clip": 1.5, "c_clip": 0.7}
        return jaxbuf.vtrace(known, value, log_ratio, discount, **more)

    def total(*others):
        return sum(jnp.sum(leaf) for leaf in jax.tree.leaves(view(*linear, *others)))

    check_grads(lambda *given: view(*given, *others), linear, 1, ["rev"], rtol=1e-3, eps=1.0)
    assert not any(map(np.any, jax.grad(total, argnums=(0, 1))(*others)))


def test_what_follows_an_end_has_no_gradient_and_spoils_none():
    ends = {"terminated": jnp.array([[False, True, False]])}

    def first(reward, value):
        known, more = {"reward": reward, **ends}, {"stop_gradient": False}
        found = jaxbuf.gae(known, value, 0.5, 1.0, **more)
        other = jaxbuf.vtrace(known, value, jnp.zeros((1, 3)), 0.5, **more)
        return found.target[0, 0] + other.target[0, 0] + jaxbuf.n_step(known, 2, 0.5).reward[0, 0]

    reward, value = jnp.array([[1.0, 1.0, jnp.nan]]), jnp.array([[1.0, 1.0, jnp.nan]])
    by_reward, by_value = jax.jit(jax.grad(first, argnums=(0, 1)))(reward, value)
    np.testing.assert_array_equal(by_reward, [[3.0, 1.5, 0.0]])
    np.testing.assert_array_equal(by_value, [[0.0, 0.0, 0.0]])


@pytest.mark.parametrize("stored", [jnp.bfloat16, jnp.float16])
def test_numbers_of_16_bits_are_summed_in_32(stored):
    """As the same numbers of 32 bits; in bfloat16, 0.997 ** 100 would be 0.68 instead of 0.74."""
    random, shape = np.random.default_rng(5), (2, 100)
    low = jnp.asarray(random.uniform(0.5, 1.5, (4, *shape)), stored)
    high = low.astype(jnp.float32)
    ends = dict(zip(("terminated", "truncated"), random.random((2, *shape)) < 0.01, strict=True))

    @jax.jit
    def views(reward, value, next_value, ratio):
        steps, log_ratio = {"reward": reward, **ends}, jnp.log(ratio)
        one = jaxbuf.gae(steps, value, 0.997, 1.0, next_value=next_value)
        return one, jaxbuf.vtrace(steps, value, log_ratio, 0.997, next_value=next_value)

    expected = views(*high)
    for given in ((*low[:3], high[3]), (low[0], *high[1:])):
        found = views(*given)
        assert {leaf.dtype for leaf in jax.tree.leaves(found)} == {jnp.dtype(jnp.float32)}
        chex.assert_trees_all_equal(found, expected)
    steps, value = {"reward": np.asarray(high[0], np.float64), **ends}, np.ones(shape)
    with jax.enable_x64(True):
        assert jaxbuf.gae(steps, value, 0.9, 0.9).target.dtype == jnp.float64


def test_fields_by_name():
    late = jnp.arange(12).reshape(2, 6) % 4 == 3
    steps = {"gain": jnp.ones((2, 6)), "terminated": jnp.zeros((2, 6), bool), "late": late}
    found = jaxbuf.gae(steps, jnp.zeros((2, 6)), 1.0, 1.0, reward="gain", truncated="late")
    np.testing.assert_array_equal(
        found.target, [[4.0, 3.0, 2.0, 1.0, 1.0], [2.0, 1.0, 3.0, 2.0, 1.0]]
    )


ONES = jnp.ones((2, 4))
BAD = [
    ({"value": ONES[:, :3]}, "value has shape (2, 3); expected (2, 4), which is that of reward"),
    ({"value": jnp.ones((2, 4), jnp.int32)}, "value has dtype int32; expected a floating dtype"),
    ({"next_value": ONES[:1]}, "next_value has shape (1, 4); expected (2, 4)"),
    ({"log_ratio": jnp.ones(4)}, "log_ratio has shape (4,); expected (2, 4)"),
    ({"lambda_": jnp.ones(2)}, "lambda_ has shape (2,); expected (), which is one number"),
    ({"window": window(ONES[:, :1]), "value": ONES[:, :1]}, "windows have 1 step; expected at"),
    ({"stop_gradient": "no"}, "stop_gradient is 'no'"),
    ({"window": window(ONES[0])}, "reward has shape (4,); expected (B, L)"),
]


@pytest.mark.parametrize(("options", "message"), BAD)
def test_bad_input(options, message):
    given = {"window": window(ONES), "value": ONES, "log_ratio": ONES, "discount": 0.9}
    with pytest.raises(ValueError, match=re.escape(message)):
        jaxbuf.vtrace(**{**given, **options})

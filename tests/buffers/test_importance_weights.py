"""Importance weights against float64, in every normalization."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbuf
from tests import operations
from tests.models import items as reference
from tests.operations import numbered

PRIORITIES = (0.5, 0.0, 3.0, 1.0, 8.0, 0.25, 2.0)

SAMPLERS = {
    "uniform": jaxbuf.Uniform(),
    "uniform-without-replacement": jaxbuf.Uniform(replacement=False),
    "default": jaxbuf.Prioritized(),
    "proportional": jaxbuf.Prioritized(alpha=1.0),
    "epsilon": jaxbuf.Prioritized(alpha=0.5, epsilon=0.1),
    "mix": jaxbuf.Prioritized(alpha=1.0, uniform_mix=0.3),
    "without-replacement": jaxbuf.Prioritized(alpha=1.0, replacement=False),
}


def draw(buffer, batch_size=32, seed=0):
    return jaxbuf.sample(buffer, jax.random.key(seed), batch_size)


@jax.jit
def every_weight(buffer, sample, beta):
    return {
        normalize: jaxbuf.importance_weights(buffer, sample, beta, normalize)
        for normalize in ("batch", "buffer", "mean")
    } | {"none": jaxbuf.importance_weights(buffer, sample, beta, None)}


@pytest.mark.parametrize(
    "name", operations.quick(SAMPLERS, {"uniform", "epsilon", "mix", "without-replacement"})
)
def test_weights_are_those_of_float64(name):
    sampler = SAMPLERS[name]
    buffer = numbered(sampler, PRIORITIES, capacity=10)
    sample = draw(buffer)
    (everyone, _), valid = reference.law_of(sampler, PRIORITIES), np.asarray(sample.valid)
    drawn = everyone[np.asarray(sample.data)[valid]]
    for beta in (0.0, 0.4, 1.0):
        for normalize, weights in every_weight(buffer, sample, jnp.float32(beta)).items():
            assert (weights.shape, weights.dtype) == ((32,), np.float32)
            how = None if normalize == "none" else normalize
            expected = reference.importance_weights(drawn, everyone, beta, how)
            np.testing.assert_allclose(weights[valid], expected, rtol=1e-5, err_msg=normalize)
            np.testing.assert_array_equal(weights[~valid], 0.0)


def test_the_probability_is_exact_where_all_priorities_are_zero():
    """Also where the rounded shares of mass and mix would not add up to it."""
    buffer = numbered(jaxbuf.Prioritized(uniform_mix=0.3), [0.0] * 8, capacity=40)
    for size in range(9, 41):
        buffer = jaxbuf.add(buffer, jnp.array([size], jnp.int32), priority=jnp.zeros(1))
        assert buffer.support().least_probability == np.float32(1) / np.float32(size)


@pytest.mark.parametrize(("priorities", "least"), [((1, 3), 0.325), ((0, 1), 0.15)])
def test_the_least_probability_of_a_mix(priorities, least):
    """It is 0.7 times the share of the mass and 0.3 times that of the items."""
    support = numbered(SAMPLERS["mix"], priorities).support()
    np.testing.assert_allclose(support.least_probability, least, rtol=1e-6)


@pytest.mark.parametrize("sampler", [jaxbuf.Prioritized(), jaxbuf.Uniform()])
def test_items_without_priorities_or_all_of_0_weigh_one(sampler):
    buffer = numbered(sampler, [0.0] * 5, capacity=8)
    for weights in every_weight(buffer, draw(buffer), jnp.float32(0.7)).values():
        np.testing.assert_allclose(weights, 1.0, rtol=1e-6)


DISTINCT = SAMPLERS["without-replacement"]


@pytest.mark.parametrize(
    ("sampler", "priorities"),
    [
        (DISTINCT, (1e-6, 1e6, 1.0, 0.0)),
        (DISTINCT, (1e28, 1e-35, 1e-20)),
        (jaxbuf.Blend((DISTINCT,), (1,)), (1e28, 1e-35, 1e-20)),
        # Only the first is ever drawn.
        (SAMPLERS["proportional"], (1e28, 1e-35)),
    ],
)
def test_probabilities_that_underflow_give_finite_weights(sampler, priorities):
    buffer, some = numbered(sampler, priorities), np.count_nonzero(priorities)
    sample = draw(buffer, some)
    assert sample.valid.all()
    assert (sample.probability > 0).all()
    assert buffer.can_sample(some)
    for normalize, weights in every_weight(buffer, sample, jnp.float32(1)).items():
        chex.assert_tree_all_finite(weights)
        assert (weights > 0).all()
        assert normalize != "buffer" or (weights <= 1).all()


def test_probability_is_that_of_the_time_of_sampling():
    """Updating after sampling does not change the probability the weights are made of."""
    buffer = numbered(jaxbuf.Prioritized(alpha=1.0), (1.0, 2.0, 5.0))
    sample = draw(buffer, 16)
    later = jaxbuf.update_priority(
        buffer, sample.slots, jnp.full(16, 3.0, jnp.float32), donate=False
    )
    before, after = (every_weight(one, sample, jnp.float32(0.5)) for one in (buffer, later))
    for normalize, weights in after.items():
        ratio = np.asarray(weights, np.float64) / np.asarray(before[normalize], np.float64)
        np.testing.assert_allclose(ratio, ratio[0], rtol=1e-6)


def test_beta_is_any_kind_of_number_and_annealed_without_a_retrace():
    buffer = numbered(SAMPLERS["default"], PRIORITIES)
    sample = draw(buffer)
    expected = jaxbuf.importance_weights(buffer, sample, jnp.float32(0.4), normalize="batch")
    for beta in (0.4, np.float32(0.4), np.float64(0.4)):
        weights = jaxbuf.importance_weights(buffer, sample, beta)
        np.testing.assert_array_equal(weights, expected)
    chex.clear_trace_counter()

    @jax.jit
    @chex.assert_max_traces(n=1)
    def weigh(buffer, sample, beta):
        return jaxbuf.importance_weights(buffer, sample, beta)

    everyone, _ = reference.law_of(SAMPLERS["default"], PRIORITIES)
    drawn = everyone[np.asarray(sample.data)]
    for beta in np.linspace(0.4, 1.0, 7, dtype=np.float32):
        np.testing.assert_allclose(
            weigh(buffer, sample, beta),
            reference.importance_weights(drawn, everyone, float(beta), "batch"),
            rtol=1e-5,
        )


def test_weights_are_vmapped_lane_by_lane():
    buffers = [numbered(DISTINCT, p) for p in ((1.0, 2.0, 0.0), (5.0, 1.0, 1.0), (0.0, 0.0, 0.0))]
    pairs = [(buffer, draw(buffer, 4)) for buffer in buffers]
    lanes = jax.tree.map(lambda *leaves: jnp.stack(leaves), *pairs)
    together = jax.jit(jax.vmap(every_weight, in_axes=(0, 0, None)))(*lanes, jnp.float32(0.6))
    alone = [every_weight(*pair, jnp.float32(0.6)) for pair in pairs]
    expected = jax.tree.map(lambda *leaves: jnp.stack(leaves), *alone)
    chex.assert_trees_all_close(together, expected, rtol=2e-6)


def test_an_item_that_is_never_drawn_has_no_weight():
    buffer = numbered(jaxbuf.Prioritized(alpha=1.0), (1.0, 0.0, 3.0))
    batch = buffer.get(buffer.latest(3).slots)
    assert batch.valid.all()
    others = jax.tree.map(lambda leaf: leaf[jnp.array([0, 2])], batch)
    expected = every_weight(buffer, others, jnp.float32(0.5))
    for normalize, weights in every_weight(buffer, batch, jnp.float32(0.5)).items():
        assert weights[1] == 0
        np.testing.assert_array_equal(weights[jnp.array([0, 2])], expected[normalize])


DRAWS = "prioritized-mix", "windows-removable", "mixture"
MORE_DRAWS = (
    "uniform", "softmax-distinct", "shuffled", "stale", "recent", "varying", "windows-prioritized",
    "windows-balanced",
)  # fmt: skip


@pytest.mark.parametrize("name", operations.quick([*DRAWS, *MORE_DRAWS], DRAWS))
def test_a_draw_returns_the_weights_of_the_same_state(name):
    """By both methods and their functions, for a ``beta`` that is traced or known."""
    buffer, _ = operations.concrete(name)
    options = {"within": "part"} if name == "mixture" else {}
    key, rows = jax.random.key(3), operations.BATCH
    draws = [
        jaxbuf.sample(buffer, key, rows, beta=0.7, **options),
        jaxbuf.sample(buffer, key, rows, beta=jnp.float32(0.7), normalize="buffer", **options),
        jax.jit(lambda buffer, beta: buffer.sample(key, rows, beta=beta, normalize="mean"))(
            buffer, 0.7
        ),
        jaxbuf.next_batch(buffer, key, rows, beta=0.7, normalize=None, donate=False, **options)[1],
    ]
    for batch, normalize in zip(draws, ("batch", "buffer", "mean", None), strict=True):
        given = options if normalize != "mean" else {}
        weights = jaxbuf.importance_weights(buffer, batch, 0.7, normalize, **given)
        np.testing.assert_array_max_ulp(batch.weights, weights, 2)
    plain = jaxbuf.sample(buffer, key, rows)
    chex.assert_trees_all_equal(draws[0].replace(weights=None), plain)
    assert plain.weights is None
    assert len(jax.tree.leaves(plain)) == len(jax.tree.leaves(draws[0])) - 1


def test_other_samples_have_no_weights():
    rings, batch = operations.concrete("windows-prioritized")
    others = [rings.get(batch.slots), rings.latest(2), rings.sample_range(jax.random.key(0), 2)]
    assert all(other.weights is None for other in others)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"normalize": "batch"}, "normalize was given without beta; pass beta="),
        ({"normalize": None}, "normalize was given without beta; pass beta="),
        ({"within": "part"}, "within was given without beta; pass beta="),
        ({"normalize": "max"}, "normalize is 'max'; choose"),
        ({"beta": 0.4, "normalize": 3}, "normalize is 3; choose"),
        ({"beta": 0.4, "within": "parts"}, "within is 'parts'; choose"),
        ({"beta": float("nan")}, "beta is nan; expected a finite number"),
        ({"beta": "batch"}, "beta is 'batch'; expected a finite number"),
        ({"beta": jnp.ones(3)}, r"beta has shape \(3,\); expected \(\), which is one number"),
    ],
)
def test_options_of_weights_that_make_no_sense(options, message):
    buffer, key = numbered(SAMPLERS["default"], PRIORITIES), jax.random.key(0)
    for draw in (
        lambda: buffer.sample(key, 4, **options),
        lambda: jaxbuf.sample(buffer, key, 4, **options),
        lambda: jaxbuf.next_batch(buffer, key, 4, **options),
        lambda: jaxbuf.Mixture.create([buffer], [1]).sample(key, 4, **options),
        lambda: jaxbuf.Holder(buffer).sample(key, 4, **options),
    ):
        with pytest.raises(ValueError, match=message):
            draw()

"""`ItemBuffer` case by case: what goes in, where it lies, what leaves, what a handle means."""

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbuf

REVEAL = jaxbuf.Uniform(replacement=False)
REVEAL_PRIORITIES = jaxbuf.Prioritized(alpha=1.0, replacement=False)


def key(seed=0):
    return jax.random.key(seed)


def integers(*values):
    return jnp.array(values, jnp.int32)


def floats(*values):
    return jnp.array(values, jnp.float32)


def create(capacity, sampler=REVEAL):
    return jaxbuf.ItemBuffer.create(jnp.int32(0), capacity, sampler=sampler)


def shares(buffer):
    """``{item: probability}`` of a buffer that samples without replacement."""
    sample = jaxbuf.sample(buffer, key(), buffer.capacity)
    rows = zip(sample.data.tolist(), sample.probability.tolist(), sample.valid, strict=True)
    return {item: share for item, share, valid in rows if valid}


class Transition(NamedTuple):
    obs: jax.Array
    info: dict


def test_keywords_that_nothing_uses_may_be_none():
    nothing = {"priority": None, "score": None, "mask": None}
    buffer = jaxbuf.add(create(3).add(integers(1), **nothing), integers(2), **nothing)
    assert buffer.data.tolist() == [1, 2, 0]


def test_any_pytree_is_stored_and_weak_types_take_the_dtype_of_the_example():
    example = Transition(jax.ShapeDtypeStruct((2,), jnp.float16), {"n": np.int8(0)})
    buffer = jaxbuf.ItemBuffer.create(example, 4)
    weak = Transition(jnp.full((2, 2), 0.5), {"n": jnp.full(2, 3)})
    assert all(leaf.weak_type for leaf in jax.tree.leaves(weak))
    sample = jaxbuf.sample(jaxbuf.add(buffer, weak), key(), 5)
    expected = Transition(np.full((5, 2), 0.5, np.float16), {"n": np.full(5, 3, np.int8)})
    chex.assert_trees_all_equal(sample.data, expected)
    chex.assert_trees_all_equal_dtypes(sample.data, expected)


@pytest.mark.parametrize(
    ("batch_size", "seeds"), [(1, True), (40, False), (300, True), (700, False)]
)
def test_rows_of_every_width_are_those_of_the_slots(batch_size, seeds):
    rng = np.random.default_rng(batch_size)
    shapes = {"number": (), "row": (17,), "image": (10, 10, 4), "screen": (40, 40), "none": (0,)}
    kinds = {"row": np.float32, "image": bool, "screen": np.uint8}
    items = {
        name: jnp.asarray(rng.integers(0, 200, (900, *shape)), kinds.get(name, np.int16))
        for name, shape in shapes.items()
    }
    example = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), items)
    buffer = jaxbuf.add(jaxbuf.ItemBuffer.create(example, 900), items)
    keys = jax.random.split(key(), 2)
    if seeds:
        samples = jax.jit(jax.vmap(lambda key: buffer.sample(key, batch_size)))(keys)
    else:
        samples = jaxbuf.sample(buffer, keys[0], batch_size)
    index = np.asarray(samples.slots.index)
    expected = jax.tree.map(lambda leaf: np.asarray(leaf)[index], items)
    chex.assert_trees_all_equal(samples.data, expected)


@pytest.mark.parametrize(("alpha", "mix"), [(0.0, 0.3), (0.6, 1.0), (0.6, 0.3), (1.0, 0.0)])
def test_metrics_of_priorities_agree_with_numpy(alpha, mix):
    sampler = jaxbuf.Prioritized(alpha=alpha, epsilon=0.01, uniform_mix=mix)
    options = {"sampler": sampler, "parts": (jaxbuf.Removable(),)}
    buffer = jaxbuf.ItemBuffer.create(jnp.int32(0), 40, **options)
    priority = np.random.default_rng(0).lognormal(0, 3, 30).astype(np.float32)
    buffer, slots = buffer.insert(jnp.arange(30), priority=priority)
    buffer = buffer.remove(jax.tree.map(lambda leaf: leaf[:4], slots))
    metrics, kept = buffer.metrics(), priority[4:].astype(float)
    mass = (kept + 0.01) ** alpha
    law = (1 - mix) * mass / mass.sum() + mix / 26
    reported = kept if alpha > 0 else np.ones(26)
    expected = {
        "priority_min": reported.min(),
        "priority_max": reported.max(),
        "priority_mean": reported.mean(),
        "effective_sample_size": 1 / (law**2).sum(),
    }
    for name, value in expected.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-4, atol=1e-6, err_msg=name)


def test_metrics_compute_no_power_of_every_slot():
    buffer = create(40, jaxbuf.Prioritized())
    text = jax.jit(lambda buffer: buffer.metrics()).lower(buffer).as_text()
    assert "40xf32" not in "".join(line for line in text.splitlines() if "stablehlo.power" in line)


def test_no_slot_is_given_to_two_rows_of_a_batch():
    """An accelerator may write either of them."""
    ring = create(5).occupancy
    for mask in (None, jnp.arange(13) % 4 > 0):
        _, index = ring.place(13, mask, None)
        given = index[index < 5].tolist()
        assert sorted(given) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0])
def test_the_smallest_priorities_are_not_zero(alpha):
    sampler = jaxbuf.Prioritized(alpha=alpha, replacement=False)
    tiny = np.float32(1e-45)
    buffer = create(4, sampler).add(integers(1, 2, 3), priority=floats(tiny, 0, tiny))
    assert shares(buffer) == pytest.approx({1: 0.5, 3: 0.5})
    assert create(4, sampler).add(integers(1), priority=floats(-tiny)).metrics()["rejected"] == 1


def test_refused_and_masked_rows_do_not_compete_with_duplicates():
    buffer, slots = create(5, REVEAL_PRIORITIES).insert(integers(1, 2))
    slots = jax.tree.map(lambda leaf: leaf[jnp.zeros(4, int)], slots)
    buffer = jaxbuf.update_priority(
        buffer, slots, floats(4.0, 6.0, jnp.nan, 9.0), mask=jnp.array([1, 1, 1, 0], bool)
    )
    assert shares(buffer) == pytest.approx({1: 6 / 7, 2: 1 / 7})
    assert buffer.metrics()["rejected"] == 1


def test_a_never_filled_slot_cannot_be_updated_to_life():
    buffer, slots = create(4, REVEAL_PRIORITIES).insert(integers(1, 2))
    generation = slots.generation[0] + jnp.arange(3, dtype=jnp.uint32)
    guesses = jaxbuf.Slots(jnp.full(3, 3, jnp.int32), generation)
    buffer = jaxbuf.update_priority(buffer, guesses, jnp.full(3, 99.0))
    assert shares(buffer) == pytest.approx({1: 0.5, 2: 0.5})
    assert buffer.metrics()["priority_max"] == 1.0


def test_clear_of_a_partly_filled_ring_keeps_handles_stale():
    buffer, old = create(5).insert(integers(1, 2))
    for _ in range(3):
        buffer = jaxbuf.add(buffer.clear(), integers(3, 4, 5, 6))
        assert not buffer.holds(old).any()
    assert set(shares(buffer)) == {3, 4, 5, 6}


@pytest.mark.parametrize(
    "buffer",
    [
        create(3, REVEAL_PRIORITIES).add(integers(1, 2)),
        jaxbuf.ItemBuffer.create(jnp.int32(0), 3, evictor=jaxbuf.Lowest()),
        jaxbuf.TrajectoryBuffer.create(jnp.int32(0), 1, 4, sampler=jaxbuf.Prioritized()),
        jaxbuf.Queue.create(jnp.int32(0), 3),
    ],
    ids=["ring", "ranking", "rings", "queue"],
)
def test_clear_shares_no_leaf_with_its_input(buffer):
    cleared = buffer.clear()
    assert cleared.size == 0
    leaves = jax.tree.leaves(cleared), jax.tree.leaves(buffer)
    places = [{leaf.unsafe_buffer_pointer() for leaf in one} for one in leaves]
    assert not places[0] & places[1]


def test_strategies_hold_python_numbers_and_have_the_documented_defaults():
    sampler = jaxbuf.Prioritized(
        alpha=np.float32(0.5), epsilon=jnp.float32(0.25), uniform_mix=np.float64(0.5),
        initial_priority=np.int32(2), stratified=np.bool_(True), replacement=np.bool_(False),
    )  # fmt: skip
    expected = {"alpha": 0.5, "initial_priority": 2.0, "epsilon": 0.25, "uniform_mix": 0.5}
    expected |= {"stratified": True, "replacement": False}
    held = vars(sampler)
    assert {name: (type(x), x) for name, x in held.items()} == {
        name: (type(x), x) for name, x in expected.items()
    }
    with pytest.raises(AttributeError):
        sampler.alpha = 1
    assert jaxbuf.Uniform() == jaxbuf.Uniform(replacement=True)
    assert jaxbuf.Prioritized() == jaxbuf.Prioritized(
        alpha=0.6, initial_priority=1.0, epsilon=0.0, uniform_mix=0.0, stratified=True,
        replacement=True,
    )  # fmt: skip

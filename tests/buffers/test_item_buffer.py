"""`ItemBuffer` case by case: what goes in, where it lies, what leaves, what a handle means."""

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbuf

PROPORTIONAL = jaxbuf.Prioritized(alpha=1.0)
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


def contents(buffer, batch_size=None):
    """``{index: item}`` of a buffer that samples without replacement."""
    sample = jaxbuf.sample(buffer, key(), batch_size or buffer.capacity)
    valid = np.asarray(sample.valid)
    index, data = np.asarray(sample.slots.index)[valid], np.asarray(sample.data)[valid]
    assert len(set(index.tolist())) == len(index)
    return dict(sorted(zip(index.tolist(), data.tolist(), strict=True)))


def shares(buffer):
    """``{item: probability}`` of a buffer that samples without replacement."""
    sample = jaxbuf.sample(buffer, key(), buffer.capacity)
    valid = np.asarray(sample.valid)
    return dict(
        zip(
            np.asarray(sample.data)[valid].tolist(),
            np.asarray(sample.probability)[valid].tolist(),
            strict=True,
        )
    )


def slots_of(buffer, *items):
    """Handles of stored items, in the order asked for."""
    sample = jaxbuf.sample(buffer, key(), buffer.capacity)
    data = np.asarray(sample.data).tolist()
    rows = np.array([data.index(item) for item in items])
    assert np.asarray(sample.valid)[rows].all()
    return jax.tree.map(lambda leaf: leaf[rows], sample.slots)


def join(*slots):
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *slots)


def assert_shares(buffer, expected):
    actual = shares(buffer)
    assert actual.keys() == expected.keys()
    total = sum(expected.values())
    for item, priority in expected.items():
        assert actual[item] == pytest.approx(priority / total, rel=1e-6)


def test_keywords_that_nothing_uses_may_be_none():
    nothing = {"priority": None, "score": None, "mask": None}
    buffer = jaxbuf.add(create(3).add(integers(1), **nothing), integers(2), **nothing)
    assert contents(buffer) == {0: 1, 1: 2}


class Transition(NamedTuple):
    obs: jax.Array
    info: dict


def test_any_pytree_is_stored_in_exactly_its_dtypes():
    example = Transition(
        obs=jax.ShapeDtypeStruct((2, 3), jnp.uint8),
        info={
            "half": jnp.zeros(4, jnp.float16),
            "flag": jnp.bool_(False),
            "small": np.int8(0),
            "brain": jnp.zeros((), jnp.bfloat16),
            "empty": jnp.zeros((0,), jnp.float32),
            "wave": jnp.complex64(0),
        },
    )
    buffer = jaxbuf.ItemBuffer.create(example, 4)
    items = Transition(
        obs=jnp.arange(12, dtype=jnp.uint8).reshape(2, 2, 3),
        info={
            "half": jnp.ones((2, 4), jnp.float16),
            "flag": jnp.array([True, True]),
            "small": jnp.array([-3, -3], jnp.int8),
            "brain": jnp.ones(2, jnp.bfloat16),
            "empty": jnp.zeros((2, 0), jnp.float32),
            "wave": jnp.array([1j, 2j], jnp.complex64),
        },
    )
    sample = jaxbuf.sample(jaxbuf.add(buffer, items), key(), 5)
    assert isinstance(sample, jaxbuf.Sample)
    assert isinstance(sample.slots, jaxbuf.Slots)
    assert isinstance(sample.data, Transition)
    expected = jax.tree.map(lambda leaf: leaf[np.asarray(sample.slots.index)], items)
    chex.assert_trees_all_equal(sample.data, expected)
    assert jax.tree.map(lambda leaf: leaf.dtype, sample.data) == jax.tree.map(
        lambda leaf: leaf.dtype, items
    )


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


@pytest.mark.parametrize("batch_size", [4, 600])
def test_keys_are_stored_like_numbers(batch_size):
    example = {"key": jax.random.key(0), "number": jnp.int32(0)}
    keys = jax.random.split(jax.random.key(1), (2, 5))
    items = {"key": keys, "number": jnp.arange(10, dtype=jnp.int32).reshape(2, 5)}
    rings = jaxbuf.TrajectoryBuffer.create(example, 2, 8, sequence_length=3)
    slots = jaxbuf.ItemBuffer.create(example, 10)
    for buffer in (
        jaxbuf.add(rings, items),
        jaxbuf.add(slots, jax.tree.map(jnp.concatenate, items)),
    ):
        data = jaxbuf.sample(buffer, key(2), batch_size).data
        expected = keys.reshape(-1)[data["number"]]
        assert bool(jnp.all(data["key"] == expected))


@pytest.mark.parametrize("mix", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0])
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
    buffer = jaxbuf.add(create(5, REVEAL_PRIORITIES), integers(1, 2))
    slots = slots_of(buffer, 1, 1, 1, 1)
    buffer = jaxbuf.update_priority(
        buffer, slots, floats(4.0, 6.0, jnp.nan, 9.0), mask=jnp.array([1, 1, 1, 0], bool)
    )
    assert_shares(buffer, {1: 6.0, 2: 1.0})
    assert buffer.metrics()["rejected"] == 1


def test_a_never_filled_slot_cannot_be_updated_to_life():
    buffer = jaxbuf.add(create(4, REVEAL_PRIORITIES), integers(1, 2))
    generation = slots_of(buffer, 1).generation[0]
    guesses = jaxbuf.Slots(
        index=jnp.full(3, 3, jnp.int32), generation=generation + jnp.arange(3, dtype=jnp.uint32)
    )
    buffer = jaxbuf.update_priority(buffer, guesses, jnp.full(3, 99.0, jnp.float32))
    assert_shares(buffer, {1: 1.0, 2: 1.0})
    assert buffer.metrics()["priority_max"] == 1.0


def test_clear_of_a_partly_filled_ring_keeps_handles_stale():
    buffer = jaxbuf.add(create(5), integers(1, 2))
    old = slots_of(buffer, 1, 2)
    for _ in range(3):
        buffer = jaxbuf.add(buffer.clear(), integers(3, 4, 5, 6))
        assert not buffer.holds(old).any()
    assert set(contents(buffer).values()) == {3, 4, 5, 6}


@pytest.mark.parametrize(
    "buffer",
    [
        create(3, REVEAL_PRIORITIES).add(integers(1, 2)),
        jaxbuf.ItemBuffer.create(jnp.int32(0), 3, evictor=jaxbuf.Lowest()),
        jaxbuf.TrajectoryBuffer.create(jnp.int32(0), 1, 4, sampler=PROPORTIONAL),
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


def test_create_leaves_the_example_alone():
    example = jnp.zeros((3,), jnp.float32)
    buffer = jaxbuf.ItemBuffer.create(example, 1)
    jaxbuf.add(buffer, jnp.ones((1, 3), jnp.float32))
    np.testing.assert_array_equal(example, 0.0)


def test_numpy_arrays_are_accepted_where_jit_accepts_them():
    buffer = jaxbuf.ItemBuffer.create({"x": np.zeros(2, np.float64)}, 3, sampler=REVEAL_PRIORITIES)
    buffer = jaxbuf.add(buffer, {"x": np.ones((2, 2), np.float64)}, priority=np.array([1.0, 3.0]))
    sample = jaxbuf.sample(buffer, key(), 2)
    assert sample.data["x"].dtype == jnp.float32
    buffer = jaxbuf.update_priority(buffer, sample.slots, np.array([2.0, 2.0]))
    np.testing.assert_allclose(jaxbuf.sample(buffer, key(), 2).probability, 0.5)


def test_weak_types_take_the_dtype_of_the_example():
    buffer = jaxbuf.ItemBuffer.create(
        {"x": jnp.zeros((), jnp.float16), "n": jnp.zeros((), jnp.int8)}, 3
    )
    weak = {"x": jnp.full((2,), 0.5), "n": jnp.full((2,), 3)}
    assert weak["x"].weak_type
    assert weak["n"].weak_type
    data = jaxbuf.sample(jaxbuf.add(buffer, weak), key(), 4).data
    assert data["x"].dtype == jnp.float16
    assert data["n"].dtype == jnp.int8
    np.testing.assert_array_equal(data["x"], 0.5)
    np.testing.assert_array_equal(data["n"], 3)


def test_a_buffer_is_a_pytree_whose_configuration_is_static():
    one, two = create(3, jaxbuf.Prioritized(alpha=0.6)), create(3, jaxbuf.Prioritized(alpha=0.6))
    chex.assert_trees_all_equal_structs(one, two)
    other = create(3, jaxbuf.Prioritized(alpha=0.9))
    assert jax.tree.structure(one) != jax.tree.structure(other)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(one))
    leaves, structure = jax.tree.flatten(one)
    assert jax.tree.unflatten(structure, leaves).capacity == 3
    text = repr(one)
    assert "ItemBuffer" in text
    assert "Prioritized" in text
    assert "0.6" in text


@pytest.mark.parametrize("make", [jaxbuf.Uniform, jaxbuf.Prioritized, jaxbuf.Oldest])
def test_strategies_are_frozen_hashable_and_comparable(make):
    assert make() == make()
    assert hash(make()) == hash(make())
    with pytest.raises(AttributeError):
        make().anything = 1


def test_strategies_hold_python_numbers():
    sampler = jaxbuf.Prioritized(
        alpha=np.float32(0.5), epsilon=jnp.float32(0.25), uniform_mix=np.float64(0.5),
        initial_priority=np.int32(2), stratified=np.bool_(True), replacement=np.bool_(False),
    )  # fmt: skip
    assert sampler == jaxbuf.Prioritized(
        alpha=0.5, epsilon=0.25, uniform_mix=0.5, initial_priority=2.0, replacement=False
    )
    assert [type(getattr(sampler, name)) for name in ("alpha", "epsilon", "uniform_mix")] == [
        float
    ] * 3
    assert type(sampler.initial_priority) is float
    assert type(sampler.stratified) is bool
    assert type(sampler.replacement) is bool


def test_documented_defaults():
    assert jaxbuf.Uniform() == jaxbuf.Uniform(replacement=True)
    assert jaxbuf.Prioritized() == jaxbuf.Prioritized(
        alpha=0.6,
        initial_priority=1.0,
        epsilon=0.0,
        uniform_mix=0.0,
        stratified=True,
        replacement=True,
    )
    assert jaxbuf.ItemBuffer.create(jnp.int32(0), 2).size == 0

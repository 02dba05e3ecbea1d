"""`TrajectoryBuffer`: which windows there are, what they are worth, and steps that are read."""

import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbuf
from jaxbuf import testing
from tests.operations import quick

REVEAL = jaxbuf.Uniform(replacement=False)
REVEAL_PRIORITIES = jaxbuf.Prioritized(alpha=1.0, replacement=False)
EXAMPLE = {"obs": jax.ShapeDtypeStruct((2,), jnp.float32), "t": jax.ShapeDtypeStruct((), jnp.int32)}


def create(num_envs, length, sequence_length=1, sampler=REVEAL, **options):
    return jaxbuf.TrajectoryBuffer.create(
        EXAMPLE, num_envs, length, sequence_length=sequence_length, sampler=sampler, **options
    )


def steps(t):
    """Steps that can be told apart: ``t`` and an observation that goes with it."""
    t = jnp.asarray(t, jnp.int32)
    real = t.astype(jnp.float32)
    return {"obs": jnp.stack([real, -real], axis=-1), "t": t}


def reveal(buffer):
    """All windows of a buffer without replacement, sorted by their first steps."""
    sample = jax.device_get(jaxbuf.sample(buffer, jax.random.key(0), buffer.capacity))
    rows = np.flatnonzero(sample.valid)
    rows = rows[np.argsort(sample.data["t"][rows, 0])]
    return jax.tree.map(lambda leaf: leaf[rows], sample)


def windows(buffer):
    """``{index: steps}``."""
    found = reveal(buffer)
    return dict(zip(found.slots.index.tolist(), found.data["t"].tolist(), strict=True))


def test_windows_of_another_length_with_recent_ones_and_ignored_steps():
    sampler = jaxbuf.Recent(ratio=1.0, steps=2)
    buffer = create(1, 8, 3, sampler, num_earliest_ignored=2)
    buffer = jaxbuf.add(buffer, steps(np.arange(10)[None]))
    for size, first in ((1, [8, 9]), (3, [6, 7]), (5, [4, 5]), (6, [4, 4])):
        batch = jaxbuf.sample(buffer, jax.random.key(0), 2, sequence_length=size)
        assert batch.data["t"].tolist() == [[t + i for i in range(size)] for t in first]


@pytest.mark.parametrize("rows", quick([0, 3], {3}))
def test_rows_of_some_environments_are_those_of_all_with_a_mask(rows):
    freshness = jaxbuf.Freshness(max_staleness=9)
    random = np.random.default_rng(rows)
    few = every = create(5, 4, 2, REVEAL_PRIORITIES, freshness=freshness)
    shape = (5, rows) if rows else (5,)
    add_to_all = jax.jit(lambda buffer, rows, given: buffer.add(rows, **given))
    for i in range(6):
        # Few different counts, each of which is a program of its own.
        ids = random.permutation(5)[: (3, 0, 5)[i // 2]]
        t = np.arange(np.prod(shape)).reshape(shape) + 100 * i
        priority = random.random(shape).astype(np.float32)
        version = random.integers(-9, 3, shape).astype(np.int32)
        mask = random.random(shape) < 0.8
        given = {"priority": priority, "version": version, "mask": mask}
        inside = np.isin(np.arange(5), ids).reshape(5, *(1,) * (len(shape) - 1))
        every = add_to_all(every, steps(t), {**given, "mask": mask & inside})
        some = {name: value[ids] for name, value in given.items()}
        if i % 2:
            few = jaxbuf.add(
                few, steps(t[ids]), **some, env_ids=jnp.asarray(ids, jnp.int32), donate=False
            )
        else:
            few = jax.jit(lambda few, rows, some, ids=ids: few.add(rows, **some, env_ids=ids))(
                few, steps(t[ids]), some
            )
        chex.assert_trees_all_equal(few, every)


def test_numbers_of_environments_that_are_traced():
    """A number that does not exist is left out, and the first of equal ones counts."""
    buffer = create(3, 4)
    add = jax.jit(lambda ids: buffer.add(steps([[0, 1], [2, 3]]), env_ids=ids))
    assert windows(add(jnp.array([2, 0]))) == {0: [2], 1: [3], 8: [0], 9: [1]}
    assert windows(add(jnp.array([-1, 3]))) == {}
    assert windows(add(jnp.array([1, 1]))) == {4: [2], 5: [3]}
    second = jax.tree.map(lambda leaf: leaf[1], jax.vmap(add)(jnp.array([[2, 0], [1, 2]])))
    assert windows(second) == {4: [0], 5: [1], 8: [2], 9: [3]}


def test_a_mask_of_environments_takes_whole_rows():
    rows = steps([[0, 1], [2, 3]])
    mask = jnp.array([False, True])
    whole = jaxbuf.add(create(2, 4), rows, mask=mask)
    single = jaxbuf.add(create(2, 4), rows, mask=jnp.stack([mask, mask], axis=1))
    assert windows(whole) == windows(single) == {4: [2], 5: [3]}


@pytest.mark.parametrize("sampler", [jaxbuf.Uniform(), jaxbuf.Prioritized()])
def test_past_2_to_the_31_steps(sampler):
    """Flashbax counts in int32, which runs out."""
    length = 2**10
    fresh = create(1, length, 3, sampler=sampler)
    laps = 2**32 // length
    far = fresh.replace(
        occupancy=fresh.occupancy.replace(
            cursor=jnp.array([length - 2], jnp.uint32), lap=jnp.array([laps - 1], jnp.uint32)
        ),
        counters=jnp.array([2**32 - 2, 0], jnp.uint32),
    )
    for t in range(6):
        far = jaxbuf.add(far, steps([t]))
        sample = jaxbuf.sample(far, jax.random.key(t), 64)
        assert (far.size, bool(far.can_sample())) == (t + 1, t >= 2)
        if t >= 2:
            first = set(np.asarray(sample.data["t"])[:, 0].tolist())
            assert first == set(range(t - 1))
            np.testing.assert_array_equal(np.diff(np.asarray(sample.data["t"])), 1)
    assert far.metrics()["adds"] == 4


def test_a_generation_wraps_with_the_laps():
    buffer = create(1, 4, 2, sampler=REVEAL_PRIORITIES)
    last = buffer.occupancy.replace(lap=jnp.array([2**32 - 1], jnp.uint32))
    buffer = buffer.replace(occupancy=last)
    buffer = jaxbuf.add(buffer, steps([[0, 1, 2, 3, 4, 5]]))
    slots = reveal(buffer).slots
    assert slots.generation.tolist() == [2**32 - 1, 2**32 - 1, 0]
    oldest = jax.tree.map(lambda leaf: leaf[:1], slots)
    found = reveal(jaxbuf.update_priority(buffer, oldest, jnp.array([2.0])))
    assert found.data["t"].tolist() == [[2, 3], [3, 4], [4, 5]]
    np.testing.assert_allclose(found.probability, [0.5, 0.25, 0.25], rtol=1e-6)


# The machines of windows draw without replacement.
@pytest.mark.parametrize("sampler", [jaxbuf.Uniform(), jaxbuf.Prioritized(uniform_mix=1.0)])
def test_underfull_gives_an_invalid_sample(sampler):
    buffer = create(2, 6, 3, sampler=sampler)
    for held in (0, 2):
        sample = jaxbuf.sample(buffer, jax.random.key(0), 4)
        assert (buffer.size, bool(buffer.can_sample())) == (2 * held, False)
        np.testing.assert_array_equal(sample.valid, False)
        np.testing.assert_array_equal(sample.probability, 0.0)
        np.testing.assert_array_equal(sample.slots.index, buffer.capacity)
        chex.assert_shape(sample.data["obs"], (4, 3, 2))
        chex.assert_tree_all_finite(buffer.metrics())
        buffer = jaxbuf.add(buffer, steps(jnp.arange(4).reshape(2, 2)))


@pytest.mark.parametrize(
    ("sampler", "masses"),
    quick(
        [
            (jaxbuf.Uniform(), [1, 1, 1, 1, 1, 1, 1]),
            (jaxbuf.Prioritized(alpha=1.0, stratified=False), [3, 1, 0, 2, 6, 1, 2]),
            (jaxbuf.Prioritized(alpha=1.0), [3, 1, 0, 2, 6, 1, 2]),
        ],
        [
            (jaxbuf.Uniform(), [1, 1, 1, 1, 1, 1, 1]),
            (jaxbuf.Prioritized(alpha=1.0), [3, 1, 0, 2, 6, 1, 2]),
        ],
    ),
)
def test_frequencies_are_the_probabilities(sampler, masses):
    """Chi-square at the 0.1 % level, rings of different fill, one of them wrapped."""
    buffer = create(3, 6, 3, sampler=sampler)
    mask = jnp.array([[True] * 8, [True] * 2 + [False] * 6, [True] * 5 + [False] * 3])
    t = jnp.arange(24).reshape(3, 8)
    buffer = jaxbuf.add(buffer, steps(t), mask=mask)
    starts = [2, 3, 4, 5, 16, 17, 18]
    slots = buffer.slots_at(jnp.array([0, 0, 0, 0, 2, 2, 2]), jnp.array(starts) % 8)
    if sampler.uses_priority:
        buffer = jaxbuf.update_priority(buffer, slots, jnp.array(masses, jnp.float32))
    known, law = buffer.get(slots), np.zeros(buffer.capacity)
    law[slots.index] = np.array(masses) / np.sum(masses)
    assert known.data["t"][:, 0].tolist() == starts
    np.testing.assert_allclose(known.probability, law[slots.index], rtol=1e-6)
    testing.assert_distribution(
        buffer, jax.random.key(5), law, draws=200, batch_size=50, significance=1e-3
    )


def test_many_rings_are_all_reached():
    mask = np.arange(300) % 3 > 0
    buffer = jaxbuf.add(create(300, 2), steps(np.arange(300)), mask=mask)
    assert reveal(buffer).data["t"][:, 0].tolist() == np.flatnonzero(mask).tolist()


def test_importance_weights_count_windows():
    buffer = create(2, 4, 2, REVEAL_PRIORITIES)
    priority = jnp.array([[9.0, 1.0, 2.0], [9.0, 4.0, 8.0]])
    buffer = jaxbuf.add(buffer, steps(jnp.arange(6).reshape(2, 3)), priority=priority)
    sample = reveal(buffer)
    raw = (4 * np.array([1.0, 2.0, 4.0, 8.0]) / 15) ** -0.4
    for normalize, most in ((None, 1.0), ("batch", raw.max()), ("buffer", raw.max())):
        weights = jaxbuf.importance_weights(buffer, sample, 0.4, normalize)
        np.testing.assert_allclose(weights, raw / most, rtol=1e-5)


def rows(read):
    """The valid steps of each ring, as a list of lists."""
    t, valid = jax.device_get((read.data["t"], read.valid))
    return [row[legal].tolist() for row, legal in zip(t, valid, strict=True)]


def test_gather_all_leaves_the_earliest_out():
    """ALF's example: the position of a step never changes."""
    buffer = create(4, 9, num_earliest_ignored=2)
    for first, last, kept in ((1, 8, 3), (9, 14, 8)):
        buffer = jaxbuf.add(buffer, steps([[*range(first, last + 1)]] * 4))
        read = buffer.gather_all()
        assert rows(read) == [[*range(kept, last + 1)]] * 4
        assert read.position[:, 0].tolist() == [kept - 1] * 4
    assert rows(buffer.gather_all(ignore_earliest=False)) == [[*range(6, 15)]] * 4


def test_clear_of_some_environments_leaves_out_numbers_below_zero():
    buffer = jaxbuf.add(create(3, 4), steps(np.arange(9).reshape(3, 3)))
    cleared = jax.jit(lambda buffer, envs: buffer.clear(envs))(buffer, jnp.array([2, 2, -1]))
    assert rows(cleared.gather_all()) == [[0, 1, 2], [3, 4, 5], []]


def test_fields_by_environment_and_position():
    buffer = jaxbuf.add(create(2, 4), steps(np.arange(12).reshape(2, 6)))
    env, position = jnp.array([[0], [1], [7], [-1]]), jnp.array([[1, 2, 5, 6]])
    found = buffer.get_field("t", env, position)
    assert found.tolist() == [[0, 2, 5, 0], [0, 8, 11, 0], [0] * 4, [0] * 4]
    assert buffer.get_field("obs", jnp.int32(1), jnp.uint32(4)).tolist() == [10.0, -10.0]
    empty = create(3, 8, 2, period=2)
    env, _ = empty.locate(empty.sample(jax.random.key(0), 2).slots)
    assert env.tolist() == [3, 3]


def test_positions_past_2_to_the_32():
    buffer = create(1, 6)
    far = {"cursor": jnp.array([3], jnp.uint32), "lap": jnp.array([2**32 // 6 + 1], jnp.uint32)}
    buffer = buffer.replace(occupancy=buffer.occupancy.replace(**far))
    first = int(buffer.end_position[0])
    assert first > 2**32 - 6
    buffer = jaxbuf.add(buffer, steps([range(6)]))
    at = buffer.gather_all().position
    assert at[0].tolist() == [(first + i) % 2**32 for i in range(6)]
    assert buffer.get_field("t", jnp.zeros_like(at, jnp.int32), at).tolist() == [[*range(6)]]


BAD_READS = [
    (lambda b: b.get_field("obs.shape", 0, 0), "path is 'obs.shape'"),
    (lambda b: b.dequeue(5), "n is 5, but a ring has length 4"),
    (lambda b: b.dequeue(1, mask=jnp.ones(3, bool)), "mask has shape (3,); expected (2,)"),
    (lambda b: b.clear(jnp.ones(3, bool)), "envs has shape (3,); expected (2,)"),
]


@pytest.mark.parametrize(("call", "message"), BAD_READS)
def test_bad_reads(call, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        call(create(2, 4))


BAD_CONFIGURATIONS = [
    ({"sequence_length": 9}, "sequence_length is 9, but a ring has length 8"),
    ({"period": 3}, "length is 8 and period 3"),
    ({"sequence_length": 7, "num_earliest_ignored": 2}, "num_earliest_ignored is 2 and"),
    ({"num_envs": 2**20, "length": 2**11}, "at most 2**30 steps"),
    ({"example": {}}, "example has no leaves"),
    ({"sampler": jaxbuf.Softmax()}, "needs scores, which steps do not have"),
]


@pytest.mark.parametrize(("options", "message"), BAD_CONFIGURATIONS)
def test_bad_configuration(options, message):
    options = {"example": EXAMPLE, "num_envs": 2, "length": 8, **options}
    with pytest.raises(ValueError, match=re.escape(message)):
        jaxbuf.TrajectoryBuffer.create(**options)


BAD_ADDS = [
    (lambda s: {**s, "obs": s["obs"][:, :, None]}, {}, "steps['obs'] has shape (2, 3, 1, 2)"),
    (lambda s: {**s, "obs": s["obs"][:, :2]}, {}, "steps['t'] has T = 3 rows"),
    (lambda s: {**s, "t": s["t"][:, 0]}, {}, "steps['t'] has shape (2,); expected (2, T)"),
    (lambda s: {**s, "t": s["t"][:1]}, {}, "steps['t'] has shape (1, 3); expected (2, T)"),
    (lambda s: {**s, "t": s["t"].astype(jnp.int16)}, {}, "steps['t'] has dtype int16"),
    (lambda s: s, {"mask": jnp.ones((2, 2), bool)}, "mask has shape (2, 2); expected (2, 3)"),
    (lambda s: s, {"priority": jnp.ones(2)}, "priority has shape (2,); expected (2, 3)"),
    (lambda s: s, {"env_ids": jnp.array([0])}, "steps['obs'] has shape (2, 3, 2); expected (1, T,"),
    (lambda s: s, {"env_ids": [0, 2]}, "env_ids has 2; expected numbers from 0 to num_envs - 1"),
    (lambda s: s, {"env_ids": [-1, 1]}, "env_ids has -1; expected numbers from 0"),
    (lambda s: s, {"env_ids": jnp.array([1, 1])}, "env_ids has 1 twice; expected different"),
    (lambda s: s, {"env_ids": 1}, "env_ids has shape (); expected (K,)"),
    (
        lambda s: s,
        {"env_ids": [0, 1], "priority": jnp.ones(3)},
        "priority has shape (3,); expected (2, 3), which is (K, T)",
    ),
]


@pytest.mark.parametrize(
    ("options", "size", "message"),
    [
        ({}, 0, "sequence_length is 0; expected an integer of at least 1"),
        ({}, 7, "sequence_length is 7, but a ring has length 6"),
        ({}, jnp.int32(2), "sequence_length is"),
        ({"num_earliest_ignored": 2}, 5, "num_earliest_ignored is 2 and sequence_length 5"),
        ({"freshness": jaxbuf.Freshness(max_use=1)}, 3, "sequence_length is 3, but this buffer"),
    ],
)
def test_bad_windows_of_another_length(options, size, message):
    buffer = create(2, 6, 2, jaxbuf.Uniform(), **options)
    with pytest.raises(ValueError, match=re.escape(message)):
        buffer.sample(jax.random.key(0), 1, sequence_length=size)
    assert buffer.sample(jax.random.key(0), 1, sequence_length=2).data["t"].shape == (1, 2)


@pytest.mark.parametrize(("change", "options", "message"), BAD_ADDS)
def test_bad_adds(change, options, message):
    buffer = create(2, 6, sampler=jaxbuf.Prioritized())
    rows = change(steps(jnp.zeros((2, 3))))
    with pytest.raises(ValueError, match=re.escape(message)):
        buffer.add(rows, **options)


def test_state_takes_few_bytes_per_step():
    buffer = jaxbuf.TrajectoryBuffer.create(
        {"obs": jnp.zeros(17)}, 8, 4096, sequence_length=4, sampler=jaxbuf.Prioritized()
    )
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(buffer))
    data = sum(leaf.nbytes for leaf in jax.tree.leaves(buffer.data))
    assert total - data <= 5.1 * buffer.capacity


@pytest.mark.parametrize("boundary", ["avoid", "cross"])
def test_what_leaves_decides_what_it_costs(boundary):
    """XLA needs no array of all slots to drop an episode, or to clear some environments."""
    length, some = 2**15, jnp.array([False, True])
    options = {"sampler": jaxbuf.Prioritized(), "episodes": jaxbuf.Episodes(boundary=boundary)}
    buffer = jaxbuf.TrajectoryBuffer.create(
        {"terminated": jnp.bool_(False)}, 2, length, sequence_length=4, **options
    )
    for change in (lambda b: b.drop_newest_episode(some), lambda b: b.clear(some)):
        compiled = jax.jit(change, donate_argnums=0).lower(buffer).compile()
        assert compiled.memory_analysis().temp_size_in_bytes < length

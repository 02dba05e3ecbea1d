"""`TrajectoryBuffer`: which windows there are, what they are worth, what a handle means."""

import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import jaxbuf

REVEAL = jaxbuf.Uniform(replacement=False)
REVEAL_PRIORITIES = jaxbuf.Prioritized(alpha=1.0, replacement=False)
EXAMPLE = {"obs": jax.ShapeDtypeStruct((2,), jnp.float32), "t": jax.ShapeDtypeStruct((), jnp.int32)}


def create(num_envs, length, sequence_length=1, period=1, sampler=REVEAL, example=EXAMPLE):
    return jaxbuf.TrajectoryBuffer.create(
        example, num_envs, length, sequence_length=sequence_length, period=period, sampler=sampler
    )


def steps(t):
    """Steps that can be told apart: ``t`` and an observation that goes with it."""
    t = jnp.asarray(t, jnp.int32)
    real = t.astype(jnp.float32)
    return {"obs": jnp.stack([real, -real], axis=-1), "t": t}


def floats(*values):
    return jnp.array(values, jnp.float32)


def reveal(buffer):
    """``{index: (steps, probability, generation)}`` of a buffer without replacement."""
    slots = buffer.capacity // buffer.period
    sample = jaxbuf.sample(buffer, jax.random.key(0), slots)
    valid = np.asarray(sample.valid)
    t = np.asarray(sample.data["t"])
    np.testing.assert_array_equal(sample.data["obs"], np.stack([t, -t], axis=-1))
    index = np.asarray(sample.slots.index)
    assert len(set(index[valid].tolist())) == valid.sum()
    np.testing.assert_array_equal(index[~valid], buffer.capacity)
    np.testing.assert_array_equal(np.asarray(sample.probability)[~valid], 0.0)
    rows = zip(t, np.asarray(sample.probability), np.asarray(sample.slots.generation), strict=True)
    return {
        int(i): (row[0].tolist(), float(row[1]), int(row[2]))
        for i, row, legal in zip(index, rows, valid, strict=True)
        if legal
    }


def windows(buffer):
    return {index: row[0] for index, row in sorted(reveal(buffer).items())}


def priorities(buffer):
    """``{first step: probability}``."""
    return {row[0][0]: row[1] for row in reveal(buffer).values()}


def slots_of(buffer, *first):
    """Handles of the windows that start with these steps, in the order asked for."""
    found = {row[0][0]: (index, row[2]) for index, row in reveal(buffer).items()}
    rows = [found[t] for t in first]
    return jaxbuf.Slots(
        index=jnp.array([row[0] for row in rows], jnp.int32),
        generation=jnp.array([row[1] for row in rows], jnp.uint32),
    )


def test_windows_of_another_length_with_recent_ones_and_ignored_steps():
    sampler = jaxbuf.Recent(ratio=1.0, steps=2)
    buffer = jaxbuf.TrajectoryBuffer.create(
        EXAMPLE, 1, 8, sequence_length=3, num_earliest_ignored=2, sampler=sampler
    )
    buffer = jaxbuf.add(buffer, steps(np.arange(10)[None]))
    for size, first in ((1, [8, 9]), (3, [6, 7]), (5, [4, 5]), (6, [4, 4])):
        batch = jaxbuf.sample(buffer, jax.random.key(0), 2, sequence_length=size)
        assert batch.data["t"].tolist() == [[t + i for i in range(size)] for t in first]


@pytest.mark.parametrize("rows", [0, 3])
def test_rows_of_some_environments_are_those_of_all_with_a_mask(rows):
    freshness = jaxbuf.Freshness(max_staleness=9)
    random = np.random.default_rng(rows)
    few = every = jaxbuf.TrajectoryBuffer.create(
        EXAMPLE, 5, 4, sequence_length=2, sampler=REVEAL_PRIORITIES, freshness=freshness
    )
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


def test_env_ids_with_masks_and_under_jit():
    buffer = create(3, 4)
    add = jax.jit(
        lambda buffer, ids, mask: buffer.add(steps([[0, 1], [2, 3]]), env_ids=ids, mask=mask)
    )
    both = jnp.array([True, True])
    assert windows(add(buffer, jnp.array([2, 0]), both)) == {0: [2], 1: [3], 8: [0], 9: [1]}
    assert windows(add(buffer, jnp.array([2, 0]), ~both)) == {}
    assert windows(add(buffer, jnp.array([-1, 3]), both)) == {}
    assert windows(add(buffer, jnp.array([1, 1]), both)) == {4: [2], 5: [3]}
    vmapped = jax.jit(jax.vmap(add, in_axes=(None, 0, None)))(
        buffer, jnp.array([[2, 0], [1, 2]]), both
    )
    second = jax.tree.map(lambda leaf: leaf[1], vmapped)
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
    old = slots_of(buffer, 2)
    assert {row[2] for row in reveal(buffer).values()} == {0, 2**32 - 1}
    buffer = jaxbuf.update_priority(buffer, old, floats(2.0))
    assert priorities(buffer) == pytest.approx({2: 0.5, 3: 0.25, 4: 0.25})


@pytest.mark.parametrize(
    "sampler",
    [
        jaxbuf.Uniform(),
        REVEAL,
        jaxbuf.Prioritized(),
        REVEAL_PRIORITIES,
        jaxbuf.Prioritized(uniform_mix=1.0),
    ],
)
@pytest.mark.parametrize("held", [0, 2])
def test_underfull_gives_an_invalid_sample(sampler, held):
    buffer = create(2, 6, 3, sampler=sampler)
    if held:
        buffer = jaxbuf.add(buffer, steps(jnp.arange(2 * held).reshape(2, held)))
    sample = jaxbuf.sample(buffer, jax.random.key(0), 4)
    np.testing.assert_array_equal(sample.valid, False)
    np.testing.assert_array_equal(sample.probability, 0.0)
    np.testing.assert_array_equal(sample.slots.index, buffer.capacity)
    chex.assert_shape(sample.data["obs"], (4, 3, 2))
    assert not buffer.can_sample()
    chex.assert_tree_all_finite(buffer.metrics())
    if sampler.uses_priority:
        buffer = jaxbuf.update_priority(buffer, sample.slots, jnp.full(4, 9.0))
        assert buffer.metrics()["priority_max"] == 0.0


@pytest.mark.parametrize(
    ("sampler", "masses"),
    [
        (jaxbuf.Uniform(), [1, 1, 1, 1, 1, 1, 1]),
        (jaxbuf.Prioritized(alpha=1.0, stratified=False), [3, 1, 0, 2, 6, 1, 2]),
        (jaxbuf.Prioritized(alpha=1.0), [3, 1, 0, 2, 6, 1, 2]),
    ],
)
def test_frequencies_are_the_probabilities(sampler, masses):
    """Chi-square at the 0.1 % level, rings of different fill, one of them wrapped."""
    buffer = create(3, 6, 3, sampler=sampler)
    mask = jnp.array([[True] * 8, [True] * 2 + [False] * 6, [True] * 5 + [False] * 3])
    t = jnp.arange(24).reshape(3, 8)
    buffer = jaxbuf.add(buffer, steps(t), mask=mask)
    starts = [2, 3, 4, 5, 16, 17, 18]
    if sampler.uses_priority:
        twin = create(3, 6, 3).replace(occupancy=buffer.occupancy, data=buffer.data)
        slots = slots_of(twin, *starts)
        buffer = jaxbuf.update_priority(buffer, slots, floats(*masses))
    keys = jax.random.split(jax.random.key(5), 200)
    sample = jax.jit(jax.vmap(lambda key: buffer.sample(key, 50)))(keys)
    drawn = np.asarray(sample.data["t"][..., 0]).ravel()
    counts = np.array([(drawn == start).sum() for start in starts])
    assert counts.sum() == drawn.size
    share = np.array(masses) / np.sum(masses)
    probability = dict(zip(drawn.tolist(), np.asarray(sample.probability).ravel(), strict=True))
    for start, expected in zip(starts, share, strict=True):
        assert probability.get(start, 0.0) == pytest.approx(expected, rel=1e-6)
    some = share > 0
    assert counts[~some].sum() == 0
    assert stats.chisquare(counts[some], share[some] * drawn.size).pvalue > 1e-3


def test_many_rings_are_all_reached():
    buffer = create(300, 2)
    mask = np.arange(300) % 3 > 0
    buffer = jaxbuf.add(buffer, steps(np.arange(300)), mask=mask)
    assert sorted(row[0] for row in windows(buffer).values()) == np.flatnonzero(mask).tolist()


def test_importance_weights_count_windows():
    buffer = create(2, 4, 2, sampler=jaxbuf.Prioritized(alpha=1.0, replacement=False))
    priority = jnp.array([[9.0, 1.0, 2.0], [9.0, 4.0, 8.0]])
    buffer = jaxbuf.add(buffer, steps(jnp.arange(6).reshape(2, 3)), priority=priority)
    sample = jaxbuf.sample(buffer, jax.random.key(0), 4)
    order = np.argsort(np.asarray(sample.probability))
    share = np.array([1.0, 2.0, 4.0, 8.0]) / 15
    raw = (4 * share) ** -0.4
    for normalize, expected in (
        (None, raw),
        ("batch", raw / raw.max()),
        ("buffer", raw / raw.max()),
    ):
        weights = jaxbuf.importance_weights(buffer, sample, 0.4, normalize)
        np.testing.assert_allclose(np.asarray(weights)[order], expected, rtol=1e-5)


BAD_CONFIGURATIONS = [
    ({"sequence_length": 9}, "sequence_length is 9, but a ring has length 8"),
    ({"period": 3}, "length is 8 and period 3"),
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
    (lambda s: {"obs": s["obs"]}, {}, "steps['t'] is missing"),
    (lambda s: s, {"mask": jnp.ones((2, 2), bool)}, "mask has shape (2, 2); expected (2, 3)"),
    (lambda s: s, {"mask": jnp.ones((2, 3))}, "mask has dtype float32"),
    (lambda s: s, {"priority": jnp.ones(2)}, "priority has shape (2,); expected (2, 3)"),
    (lambda s: s, {"priority": jnp.ones((2, 3), jnp.complex64)}, "priority has dtype complex64"),
    (lambda s: s, {"env_ids": jnp.array([0])}, "steps['obs'] has shape (2, 3, 2); expected (1, T,"),
    (lambda s: s, {"env_ids": [0, 2]}, "env_ids has 2; expected numbers from 0 to num_envs - 1"),
    (lambda s: s, {"env_ids": [-1, 1]}, "env_ids has -1; expected numbers from 0"),
    (lambda s: s, {"env_ids": jnp.array([1, 1])}, "env_ids has 1 twice; expected different"),
    (lambda s: s, {"env_ids": 1}, "env_ids has shape (); expected (K,)"),
    (lambda s: s, {"env_ids": [0.0, 1.0]}, "env_ids has dtype float64; expected integers"),
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
    buffer = jaxbuf.TrajectoryBuffer.create(EXAMPLE, 2, 6, sequence_length=2, **options)
    with pytest.raises(ValueError, match=re.escape(message)):
        buffer.sample(jax.random.key(0), 1, sequence_length=size)
    assert buffer.sample(jax.random.key(0), 1, sequence_length=2).data["t"].shape == (1, 2)


@pytest.mark.parametrize(("change", "options", "message"), BAD_ADDS)
def test_bad_adds(change, options, message):
    buffer = create(2, 6, sampler=jaxbuf.Prioritized())
    rows = change(steps(jnp.zeros((2, 3))))
    with pytest.raises(ValueError, match=re.escape(message)):
        buffer.add(rows, **options)


LARGE = (8, 4096, 4)


def large(sampler):
    example = {"obs": jnp.zeros(17)}
    return jaxbuf.TrajectoryBuffer.create(
        example, LARGE[0], LARGE[1], sequence_length=LARGE[2], sampler=sampler
    )


def test_state_takes_few_bytes_per_step():
    buffer = large(jaxbuf.Prioritized())
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(buffer))
    data = sum(leaf.nbytes for leaf in jax.tree.leaves(buffer.data))
    assert total - data <= 5.1 * buffer.capacity


def test_leaves_of_no_elements_are_stored_and_accumulated():
    example = {"obs": jnp.zeros(3), "nothing": jnp.zeros(0), "terminated": jnp.bool_(False)}
    rollout = jax.tree.map(lambda leaf: jnp.ones((2, 6, *leaf.shape), leaf.dtype), example)
    buffer = create(2, 8, sequence_length=3, example=example)
    buffer = jaxbuf.add(buffer, rollout)
    chex.assert_shape(jaxbuf.sample(buffer, jax.random.key(0), 4).data["nothing"], (4, 3, 0))
    accumulator = jaxbuf.EpisodeAccumulator.create(example, num_envs=2, max_length=4)
    _, episodes, done = accumulator.add(jax.tree.map(lambda leaf: leaf[:, :1], rollout))
    assert done.all()
    assert episodes.steps["nothing"].shape[1:] == (4, 0)


def test_what_leaves_decides_what_it_costs():
    """XLA needs no array of all slots to drop an episode, or to clear some environments."""
    step = {"x": jnp.float32(0), "terminated": jnp.bool_(False)}
    length = 2**15
    for episodes in (jaxbuf.Episodes(boundary="avoid"), jaxbuf.Episodes()):
        buffer = jaxbuf.TrajectoryBuffer.create(
            step, 2, length, sequence_length=4, sampler=jaxbuf.Prioritized(), episodes=episodes
        )
        ends = jnp.arange(1500) == 600
        rows = {"x": jnp.zeros((2, 1500)), "terminated": jnp.stack([ends, ends])}
        buffer = jaxbuf.add(buffer, rows)
        for change, left in (
            (lambda b: b.drop_newest_episode(jnp.array([False, True])), 601),
            (lambda b: b.clear(jnp.array([False, True])), 0),
        ):
            compiled = jax.jit(change, donate_argnums=0).lower(buffer).compile()
            assert compiled.memory_analysis().temp_size_in_bytes < length
            changed = change(buffer)
            assert changed.rings.held.tolist() == [1500, left]
            slot = jnp.arange(2 * length, dtype=jnp.int32).reshape(2, length)
            short = buffer.episodes.pads
            expected = [1500 - 3, max(left - 3 * (not short), 0)]
            assert changed.occupancy.live(slot).sum(axis=1).tolist() == expected
            mass = changed.sampler_state.leaves[: 2 * length].reshape(2, length)
            assert (mass > 0).sum(axis=1).tolist() == expected

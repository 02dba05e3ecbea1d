"""Accumulators: whole episodes and chunks, in order, and nothing lost without being counted."""

import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbuf
from tests.models import accumulator as reference_accumulator
from tests.operations import quick

STEP = {
    "obs": jnp.zeros(2),
    "info": {"time": jnp.int32(0)},
    "terminated": jnp.bool_(False),
    "truncated": jnp.bool_(False),
}


def rollout(random, start, shape, ends=0.3):
    time = np.arange(start, start + np.prod(shape), dtype=np.int32).reshape(shape)
    return {
        "obs": np.stack([time, -time], axis=-1).astype(np.float32),
        "info": {"time": time},
        "terminated": random.random(shape) < ends,
        "truncated": random.random(shape) < ends / 3,
    }


def found(episodes, done):
    """The episodes handed out, as lists of times; everything about them is checked on the way."""
    times = []
    lengths, real = np.asarray(episodes.length), np.asarray(episodes.mask)
    for row, there in enumerate(np.asarray(done).tolist()):
        steps = jax.tree.map(lambda leaf, row=row: np.asarray(leaf[row]), episodes.steps)
        count = int(lengths[row])
        assert (count > 0) == there
        np.testing.assert_array_equal(real[row], np.arange(real.shape[1]) < count)
        for leaf in jax.tree.leaves(steps):
            np.testing.assert_array_equal(leaf[count:], np.zeros_like(leaf[count:]))
        np.testing.assert_array_equal(steps["obs"][:count, 1], -steps["info"]["time"][:count])
        if there:
            times.append(steps["info"]["time"][:count].tolist())
    return times


def agrees(accumulator, twin, part, whole, *counts):
    """Counts of parts that wait for others, of whole ones, and others that have one name."""
    filled = [len(rows) for rows in twin.open]
    assert accumulator.filled.tolist() == filled
    expected = {part: sum(filled), "waiting": len(twin.line), whole: twin.complete}
    expected |= {name: getattr(twin, name) for name in ("refused", "dropped", *counts)}
    assert {name: int(value) for name, value in accumulator.metrics().items()} == expected


ADD = jax.jit(lambda accumulator, steps, mask: accumulator.add(steps, mask=mask), donate_argnums=0)


@pytest.mark.parametrize(
    ("envs", "length", "per_add", "waiting"),
    quick([(3, 4, 3, 3), (3, 4, 1, 2), (2, 1, 2, 5)], {(3, 4, 3, 3)}),
)
def test_random_rollouts_agree_with_lists(envs, length, per_add, waiting):
    random = np.random.default_rng(envs * length)
    accumulator = jaxbuf.EpisodeAccumulator.create(
        STEP, envs, length, per_add=per_add, waiting=waiting
    )
    twin = reference_accumulator.Accumulator(envs, length, per_add, waiting)
    time = 1
    for turn in range(60):
        shape = [(envs,), (envs, 1), (envs, 7)][random.integers(3)]
        steps = rollout(random, time, shape, ends=0.1 if turn % 20 < 10 else 0.6)
        time += int(np.prod(shape))
        mask = random.random(shape) < 0.7 if random.random() < 0.5 else np.ones(shape, bool)
        accumulator, episodes, done = ADD(accumulator, steps, mask)
        grid = (envs, -1)
        ends = (steps["terminated"] | steps["truncated"]).reshape(grid)
        expected = twin.add(steps["info"]["time"].reshape(grid).tolist(), ends, mask.reshape(grid))
        assert found(episodes, done) == expected
        agrees(accumulator, twin, "steps", "episodes", "cut")
        if turn % 9 == 8:
            envs_gone = random.random(envs) < 0.5
            accumulator = accumulator.drop(envs_gone)
            twin.drop(envs_gone)
            accumulator, episodes, done = accumulator.take()
            assert found(episodes, done) == twin.take()
            agrees(accumulator, twin, "steps", "episodes", "cut")
    assert twin.complete > 50
    assert twin.cut > 10
    assert twin.refused > 10


def test_the_default_follows_the_rows_and_loses_no_episode():
    """All episodes end at the same time, each with a 32nd of the steps that there is room for."""
    envs, length = 48, 64
    accumulator = jaxbuf.EpisodeAccumulator.create(STEP, envs, length)
    twin = reference_accumulator.Accumulator(envs, length, 24, envs)
    for turn in range(12):
        steps = rollout(np.random.default_rng(turn), 1 + envs * turn, (envs,), ends=0.0)
        steps["terminated"] |= turn % 2 == 1
        accumulator, episodes, done = ADD(accumulator, steps, np.ones(envs, bool))
        ends = steps["terminated"][:, None]
        assert found(episodes, done) == twin.add(steps["info"]["time"][:, None].tolist(), ends)
        agrees(accumulator, twin, "steps", "episodes", "cut")
    assert (twin.complete, twin.refused, done.shape) == (6 * envs, 0, (24,))

    chunks = jaxbuf.ChunkAccumulator.create(jnp.int32(0), envs, length)
    for rows, most in ((16, 16), (48, 24), (64, 32), (2048, envs)):
        index = jax.ShapeDtypeStruct((rows,), jnp.int32)
        assert jax.eval_shape(chunks.add, index, index, index)[2].shape == (most,)


def test_flags_by_path():
    step = {"obs": jnp.int32(0), "flags": {"over": jnp.bool_(False), "late": jnp.bool_(False)}}
    accumulator = jaxbuf.EpisodeAccumulator.create(
        step, 2, 3, terminated="flags.over", truncated="flags.late"
    )
    assert accumulator.flags == ("flags.over", "flags.late")
    flags = {"over": jnp.array([True, False]), "late": jnp.array([False, True])}
    _, episodes, _ = ADD(accumulator, {"obs": jnp.array([4, 5]), "flags": flags}, None)
    assert episodes.steps["obs"][:, 0].tolist() == [4, 5]


def test_a_mask_of_environments_for_whole_rollouts():
    accumulator = jaxbuf.EpisodeAccumulator.create(STEP, 2, 9)
    steps = rollout(np.random.default_rng(0), 0, (2, 3), ends=0)
    accumulator, _, _ = ADD(accumulator, steps, np.array([False, True]))
    assert accumulator.filled.tolist() == [0, 3]
    accumulator, _, done = ADD(accumulator, jax.tree.map(lambda leaf: leaf[:, :0], steps), None)
    assert accumulator.filled.tolist() == [0, 3]
    assert not done.any()


def test_clear_keeps_the_original():
    random = np.random.default_rng(0)
    accumulator = jaxbuf.EpisodeAccumulator.create(STEP, 2, 9)
    accumulator, _, _ = ADD(accumulator, rollout(random, 0, (2, 3), ends=0), None)
    cleared = accumulator.clear()
    assert (cleared.filled.tolist(), accumulator.filled.tolist()) == ([0, 0], [3, 3])
    leaves = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves((cleared, accumulator))]
    assert len(set(leaves)) == len(leaves)


def fill(carry, steps):
    accumulator, buffer = carry
    accumulator, episodes, done = accumulator.add(steps)
    return (accumulator, buffer.add(episodes, mask=done)), done


def test_lanes_of_a_scan_fill_buffers_as_eager_steps_do():
    accumulator = jaxbuf.EpisodeAccumulator.create(STEP, 2, 4, per_add=1, waiting=3)
    start = accumulator, jaxbuf.ItemBuffer.create(accumulator.example, 8)
    assert_lanes_do_as_eager_steps(fill, start, rollout(np.random.default_rng(3), 1, (24, 2, 2)))


def assert_lanes_do_as_eager_steps(step, start, rows):
    """Returns what they hand out."""
    carry, seen = start, []
    for t in range(len(jax.tree.leaves(rows)[0])):
        carry, out = step(carry, jax.tree.map(lambda leaf, t=t: jnp.asarray(leaf[t]), rows))
        seen.append(out)
    expected = carry, jax.tree.map(lambda *leaves: jnp.stack(leaves), *seen)
    lanes = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), start)
    both = jax.jit(jax.vmap(lambda carry: jax.lax.scan(step, carry, rows)))(lanes)
    chex.assert_trees_all_equal(jax.tree.map(lambda leaf: leaf[1], both), expected)
    return expected


def test_a_scanned_step_copies_nothing():
    step = {"obs": jnp.zeros(3), "terminated": jnp.bool_(False)}
    accumulator = jaxbuf.EpisodeAccumulator.create(step, 4, 2048, per_add=1)
    start = accumulator, jaxbuf.ItemBuffer.create(accumulator.example, 16)
    steps = jax.tree.map(lambda leaf: jnp.zeros((5, 4, *leaf.shape), leaf.dtype), step)
    # Less than the lanes of a flag: an episode may be copied on its way.
    jaxbuf.testing.assert_no_copy(
        lambda carry, steps: jax.lax.scan(fill, carry, steps), start, steps, smallest=8 * 2048
    )


ADD_FRAGMENTS = jax.jit(jaxbuf.ChunkAccumulator.add, donate_argnums=0)
SET_VERSION = jax.jit(jaxbuf.ChunkAccumulator.set_version)


FRESH = jaxbuf.Freshness(max_staleness=2, comparison=">")


@pytest.mark.parametrize("freshness", quick([None, FRESH], [FRESH]), ids=["all", "fresh"])
def test_random_chunks_agree_with_lists(freshness):
    random = np.random.default_rng(11)
    accumulator = jaxbuf.ChunkAccumulator.create(
        {"obs": jnp.zeros(2)}, 3, 2, per_add=2, waiting=3, freshness=freshness
    )
    limit = freshness and freshness.max_staleness
    twin = reference_accumulator.ChunkAccumulator(3, 2, 2, 3, limit)
    following, time, learner, run = [0] * 3, 1, 4, 0
    for turn in range(120):
        rows, outside = int(random.choice([1, 6])), random.random() < 0.5
        worker = random.integers(-outside, 3 + outside, rows)
        number = np.zeros(rows, np.int32)
        for row, owner in enumerate(worker.tolist()):
            if 0 <= owner < 3:
                following[owner] += 1 + (random.random() < 0.15)
                number[row] = following[owner]
        values = np.arange(time, time + rows, dtype=np.float32)
        time += rows
        version = (learner - random.integers(-1, 4, rows)).astype(np.int32)
        session = (run - (random.random(rows) < 0.1)).astype(np.int32)
        mask = random.random(rows) < 0.9
        accumulator, chunks, done = ADD_FRAGMENTS(
            accumulator,
            {"obs": np.stack([values, -values], axis=-1)},
            worker.astype(np.int32),
            number,
            version=version,
            session=session,
            mask=mask,
        )
        expected = twin.add_fragments(
            values, worker.tolist(), number.tolist(), version.tolist(), session.tolist(), mask
        )
        kept = chunks.fragments["obs"][..., 0][done].tolist()
        assert kept == [[value for value, _, _ in item] for item in expected]
        assert chunks.version[done].tolist() == [item[0][1] for item in expected]
        assert all(len({session for _, _, session in item}) == 1 for item in expected)
        assert chunks.session[done].tolist() == [item[0][2] for item in expected]
        if freshness is not None and turn % 4 == 3:
            learner, run = (learner + 1, run) if turn % 40 != 39 else (0, run + 1)
            accumulator = SET_VERSION(accumulator, learner, run)
            twin.set_version(learner, run)
        if turn % 30 == 29:
            gone = random.random(3) < 0.5
            accumulator = accumulator.drop(gone)
            twin.drop(gone)
        held = accumulator.data[0]["obs"][..., 0][accumulator.live].tolist()
        waiting = [value for item in [*twin.open, *twin.line] for value, _, _ in item]
        assert sorted(held) == sorted(waiting)
        agrees(accumulator, twin, "fragments", "chunks", "rejected", "stale")
    assert min(twin.complete, twin.dropped, twin.rejected) > 20
    assert (twin.refused > 0) == (freshness is None)
    assert (twin.stale > 50) == (freshness is not None)


def test_stale_fragments_at_the_front_do_not_cost_the_chunk():
    """MineStudio: versions 0, 3, 3, 3, 3 at version 3, at most 1 behind: the chunk 1, 2, 3."""
    empty = jaxbuf.ChunkAccumulator.create(
        jnp.int32(0), 1, 3, freshness=jaxbuf.Freshness(max_staleness=1, comparison=">")
    )
    numbers, versions = jnp.arange(5, dtype=jnp.int32), jnp.array([0, 3, 3, 3, 3], jnp.int32)
    worker = jnp.zeros(5, jnp.int32)
    at_once = SET_VERSION(empty, 3, 0)
    at_once, chunks, done = at_once.add(numbers, worker, numbers, version=versions)
    assert chunks.fragments[done].tolist() == [[1, 2, 3]]
    assert (chunks.version[done].tolist(), at_once.filled.tolist()) == ([3], [1])
    # However far the learner was when the first of them came.
    for moves in ([0, 3, 3, 3, 3], [0, 1, 3, 3, 3], [0, 0, 2, 3, 3], [0, 1, 1, 3, 3]):
        accumulator, handed_out = empty, []
        for number, learner, version in zip(numbers, moves, versions, strict=True):
            accumulator = SET_VERSION(accumulator, learner, 0)
            accumulator, chunks, done = ADD_FRAGMENTS(
                accumulator, number[None], worker[:1], number[None], version=version[None]
            )
            handed_out += chunks.fragments[done].tolist()
        # One that is complete before the learner moves on is the buffer's to judge.
        assert handed_out == ([[0, 1, 2]] if moves[2] < 2 else [[1, 2, 3]])
        assert int(accumulator.metrics()["stale"]) == (moves[2] >= 2)


@pytest.mark.slow
def test_lanes_of_chunks_do_as_eager_steps():
    random = np.random.default_rng(5)
    worker = random.integers(0, 2, (20, 4)).astype(np.int32)
    number = np.zeros_like(worker)
    for owner in range(2):
        number[worker == owner] = np.arange((worker == owner).sum())
    version = (np.arange(20)[:, None] // 4 - random.integers(0, 4, (20, 4))).astype(np.int32)

    def step(accumulator, row):
        number, worker, version, learner = row
        accumulator = accumulator.set_version(learner)
        accumulator, *out = accumulator.add(number, worker, number, version=version)
        return accumulator, out

    start = jaxbuf.ChunkAccumulator.create(jnp.int32(0), 2, 3, freshness=FRESH)
    rows = number, worker, version, np.arange(20, dtype=np.int32) // 4
    end, (_, done) = assert_lanes_do_as_eager_steps(step, start, rows)
    assert done.sum() > 5
    assert end.stale > 5


def create(**options):
    return jaxbuf.EpisodeAccumulator.create(
        **{"example": STEP, "num_envs": 2, "max_length": 3} | options
    )


BAD = [
    (lambda: create(per_add=3, waiting=2), "per_add is 3, but only 2 items may be waiting"),
    (lambda: create(max_length=2**29), "more than 2**30 rows"),
    (
        lambda: create(terminated="info.time"),
        "terminated is 'info.time', which is int32 of shape () in the example; expected one bool",
    ),
    (lambda: create(terminated="info"), "terminated is 'info', which is no array"),
    (
        lambda: create().add(rollout(np.random.default_rng(0), 0, (3, 2))),
        "steps['info']['time'] has shape (3, 2); expected (2, T)",
    ),
    (
        lambda: create().add(
            rollout(np.random.default_rng(0), 0, (2, 2)), mask=jnp.ones((2, 3), bool)
        ),
        "mask has shape (2, 3); expected (2, 2), which is (num_envs, T)",
    ),
    (
        lambda: jaxbuf.ChunkAccumulator.create(jnp.int32(0), 2, 2).set_version(3),
        "set_version was called, but nothing limits staleness here",
    ),
]


@pytest.mark.parametrize(("call", "message"), BAD)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        call()


def test_an_episode_that_ends_at_the_greatest_length_is_not_cut():
    step = {"n": jnp.int32(0), "terminated": jnp.bool_(False)}
    accumulator = jaxbuf.EpisodeAccumulator.create(step, 1, 2, per_add=2, waiting=2)
    ends = jnp.array([[False, True, False, False]])
    accumulator, episodes, _ = accumulator.add({"n": jnp.arange(4)[None], "terminated": ends})
    # What is cut does not end with a flag.
    assert episodes.steps["terminated"].tolist() == [[False, True], [False, False]]
    metrics = accumulator.metrics()
    assert (metrics["episodes"], metrics["cut"]) == (2, 1)

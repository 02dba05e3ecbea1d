"""`Episodes`: where they begin and end, what they returned, and windows that stay within one."""

import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbuf
from jaxbuf import testing
from jaxbuf.strategies import returns as module
from tests.operations import quick

DISTINCT = jaxbuf.Uniform(replacement=False)
EXAMPLE = {
    "t": jax.ShapeDtypeStruct((), jnp.int32),
    "reward": jax.ShapeDtypeStruct((), jnp.float32),
    "end": {
        "terminated": jax.ShapeDtypeStruct((), jnp.bool_),
        "truncated": jax.ShapeDtypeStruct((), jnp.bool_),
        "last": jax.ShapeDtypeStruct((), jnp.bool_),
    },
}
PATHS = {"terminated": "end.terminated", "truncated": "end.truncated"}
RETURNS = {"record_return": True, "discount": 0.9, "default_return": -50.0}


def create(num_envs, length, sequence_length=1, period=1, sampler=DISTINCT, every=1, **options):
    episodes = jaxbuf.Episodes(period=every, **{**PATHS, **options})
    return jaxbuf.TrajectoryBuffer.create(
        EXAMPLE,
        num_envs,
        length,
        sequence_length=sequence_length,
        period=period,
        sampler=sampler,
        episodes=episodes,
    )


def steps(t, terminated=False, truncated=False, reward=0.0, last=None):
    t = np.asarray(t, np.int32)
    terminated, truncated = (np.broadcast_to(flag, t.shape) for flag in (terminated, truncated))
    return {
        "t": jnp.asarray(t),
        "reward": jnp.broadcast_to(jnp.asarray(reward, jnp.float32), t.shape),
        "end": {
            "terminated": jnp.asarray(terminated),
            "truncated": jnp.asarray(truncated),
            "last": jnp.asarray(terminated | truncated if last is None else last),
        },
    }


def rows_of(*flags):
    """One step per letter: ``.`` within an episode, ``T`` terminated, ``C`` cut off."""
    letters = np.array([list(row) for row in flags])
    t = np.arange(letters.size).reshape(letters.shape)
    return steps(t, letters == "T", letters == "C", reward=1.0)


@jax.jit
def look(buffer, env, position):
    """All that single steps can be asked."""
    found = buffer.episode(env, position)
    return {
        "begin": found.begin,
        "held": found.held_begin,
        "terminated": found.last_terminated,
        "remaining": found.to_end,
        "first": found.is_first,
        "last": found.is_last,
        "return": found.value,
    }


def windows(buffer):
    """``{slot: (steps, probability)}`` of a buffer without replacement."""
    slots = buffer.capacity // buffer.period
    sample = jax.device_get(jaxbuf.sample(buffer, jax.random.key(0), slots))
    rows = zip(sample.slots.index, sample.data["t"], sample.probability, sample.valid, strict=True)
    return {int(i): (t.tolist(), float(p)) for i, t, p, valid in rows if valid}


def ask(buffer, num_envs, t):
    """Everything about steps ``t`` of every ring, ``[num_envs, len(t)]``."""
    env = jnp.arange(num_envs, dtype=jnp.int32)[:, None]
    return jax.device_get(look(buffer, env, jnp.asarray(t, jnp.int32)[None]))


@pytest.mark.parametrize("rows", quick([1, 3], {3}))
def test_alfs_own_returns(rows):
    """Two rows terminate in the middle of an episode, as they do where a life is lost."""
    kinds = np.array([list("FMLFMMLF"), list("FLFMMLFM")])
    reward = np.array([[0, -1, -1, -1, -1, 0, -1, -1], [-1, -1, -1, 0, -1, -1, -1, -1]])
    last = kinds == "L"
    terminated = last.copy()
    terminated[0, 5] = terminated[1, 3] = True
    buffer = create(2, 8, last="end.last", record_return=True, discount=0.99, recurrence="alf")
    for start in range(0, 8, rows):
        now = np.s_[:, start : start + rows]
        buffer = jaxbuf.add(
            buffer,
            steps(reward[now], terminated[now], reward=reward[now], last=last[now]),
        )
    expected = [
        [-1.99, -1, -1000, -1, 0, 0, -1000, -1000],
        [-1, -1000, 0, -0.99, -1, -1000, -1000, -1000],
    ]
    said = ask(buffer, 2, range(8))
    np.testing.assert_allclose(said["return"], expected, rtol=1e-6)
    # The result of ALF's get_disc_0_begin_position.
    assert said["terminated"].tolist() == [[0, 0, 2, 3, 3, 5, 6, 7], [0, 1, 2, 3, 3, 5, 6, 6]]


def test_masks_of_windows_of_another_length():
    buffer = create(1, 8, 2, boundary="mask")
    buffer = jaxbuf.add(buffer, rows_of("..T..."))
    for size, together in ((1, {0: 1, 1: 1, 2: 1, 3: 1, 4: 1, 5: 1}), (4, {0: 3, 1: 2, 2: 1})):
        batch = jaxbuf.sample(buffer, jax.random.key(0), 8, sequence_length=size)
        mask = np.asarray(buffer.episode_mask(batch.slots, sequence_length=size))
        chex.assert_shape(mask, (8, size))
        first = batch.data["t"][:, 0].tolist()
        counts = {t: row for t, row, ok in zip(first, mask.sum(1), batch.valid, strict=True) if ok}
        assert counts == together
    avoids = create(1, 8, 2, boundary="avoid")
    with pytest.raises(ValueError, match="sequence_length is 3, but this buffer takes out some"):
        avoids.sample(jax.random.key(0), 1, sequence_length=3)


@pytest.mark.parametrize("recurrence", ["plain", "alf"])
def test_many_steps_at_once_are_filled_in_as_one_after_the_other(recurrence):
    random = np.random.default_rng(1)
    rings, length = 5, 150
    returns = jnp.asarray(random.normal(size=(rings, length)), jnp.float32)
    arguments = (
        jnp.array([0, 149, 7, 80, 3], jnp.int32),
        jnp.array([150, 0, 64, 65, 12], jnp.int32),
        jnp.array([149, -1, 63, -1, -1] if recurrence == "alf" else [-1] * 5, jnp.int32),
        jnp.array([1, 0, 1, 1, 2], jnp.int32),
        *jnp.asarray(random.normal(size=(2, rings)), jnp.float32),
    )
    recurrence = module.RECURRENCES[recurrence](discount=0.95, default_return=-3.0)
    expected = np.asarray(returns).copy()
    position, steps, first, *tails = (np.asarray(argument) for argument in arguments)
    for ring in range(rings):
        tail = module.Tail(*(part[ring] for part in tails))
        for count in range(steps[ring]):
            place = (position[ring] - 1 - count) % length
            terminated, last = jnp.bool_(count == first[ring]), jnp.bool_(False)
            reward = jnp.float32(expected[ring, place])
            value, tail = recurrence.back(tail, reward, terminated, last)
            expected[ring, place] = value
    filled = jax.jit(functools.partial(module._fill, recurrence))(returns.reshape(-1), *arguments)
    np.testing.assert_allclose(filled, expected.reshape(-1), rtol=1e-5, atol=1e-6)


def test_past_2_to_the_32_steps():
    length = 2**10
    buffer = create(1, length, 2, boundary="avoid", **RETURNS)
    rings = buffer.rings.replace(
        cursor=jnp.array([length - 2], jnp.uint32), lap=jnp.array([2**32 // length], jnp.uint32)
    )
    buffer = buffer.replace(occupancy=buffer.occupancy.replace(inner=rings))
    first = int(buffer.end_position[0])
    assert first == 2**32 - 2
    buffer = jaxbuf.add(buffer, rows_of("...T."))
    position = (first + np.arange(5)) % 2**32
    said = jax.device_get(look(buffer, jnp.zeros(5, jnp.int32), jnp.asarray(position, jnp.uint32)))
    assert said["begin"].tolist() == [*[first] * 4, 2]
    assert said["remaining"].tolist() == [3, 2, 1, 0, 0]
    np.testing.assert_allclose(said["return"], [3.439, 2.71, 1.9, 1.0, -50.0], rtol=1e-6)
    assert sorted(windows(buffer)) == [0, 1, length - 2, length - 1]


def test_an_episode_that_never_ends():
    """Distances stop growing before they would overflow, and the steps stay together."""
    buffer = create(1, 4, **RETURNS)
    buffer = jaxbuf.add(buffer, rows_of("...."))
    index = buffer.episode_index
    far = index.replace(
        behind=jnp.full_like(index.behind, 2**30),
        run=jnp.array([2**30]),
        pending=jnp.array([2**30]),
    )
    buffer = jaxbuf.add(buffer.replace(extra_states=(far,)), rows_of(".."))
    assert ask(buffer, 1, range(2, 6))["remaining"].tolist() == [[3, 2, 1, 0]]
    buffer = jaxbuf.add(buffer, rows_of("T."))
    said = ask(buffer, 1, range(4, 8))
    assert said["remaining"].tolist() == [[2, 1, 0, 0]]
    np.testing.assert_allclose(said["return"], [[2.71, 1.9, 1.0, -50.0]], rtol=1e-6)


@pytest.mark.parametrize("rows", quick([1, 20], {20}))
def test_a_scanned_cycle_copies_nothing(rows):
    """Not the index, nor the returns that are filled in, nor the tree of the windows left."""
    buffer = create(8, 4096, 4, boundary="avoid", sampler=jaxbuf.Prioritized(), **RETURNS)

    def cycle(buffer, key):
        t = jnp.zeros((8, rows), jnp.int32)
        ends = jax.random.bernoulli(key, 0.1, t.shape)
        flags = dict.fromkeys(("terminated", "truncated", "last"), ends)
        given = {"t": t, "reward": jnp.ones(t.shape), "end": flags}
        buffer = buffer.add(given, mask=jax.random.bernoulli(key, 0.5, t.shape))
        sample = buffer.sample(key, 16)
        told = look(buffer, *buffer.locate(sample.slots))
        return buffer.update_priority(sample.slots, told["return"]), told

    keys = jax.random.split(jax.random.key(0), 3)
    testing.assert_no_copy(
        lambda buffer, keys: jax.lax.scan(cycle, buffer, keys), buffer, keys, smallest=4096
    )


def test_what_locate_returns_is_a_place_of_an_episode():
    buffer = jaxbuf.add(create(2, 8, 2, **RETURNS), rows_of("..T..", ".T..."))
    slots = buffer.sample(jax.random.key(0), 16).slots
    env, position = buffer.locate(slots)
    expected = buffer.episode(slots)
    for place in ((env, position), ((env, position),), ((np.asarray(env), np.asarray(position)),)):
        chex.assert_trees_all_equal(buffer.episode(*place), expected)
    assert buffer.episode(0, 3).begin == 3
    assert buffer.episode(env.reshape(4, 4), position.reshape(4, 4)).to_end.shape == (4, 4)


def test_fields_of_an_episode_that_are_not_used_cost_nothing():
    buffer = create(2, 64, boundary="cross", **RETURNS)
    slots = jaxbuf.Slots(index=jnp.zeros(2, jnp.int32), generation=jnp.zeros(2, jnp.uint32))

    def loops(field):
        one = jax.jit(lambda b: getattr(b.episode(slots), field)).lower(buffer).compile()
        return " while(" in one.as_text()

    assert loops("to_end")
    assert not any(loops(name) for name in jaxbuf.Episode._fields if name != "to_end")


def plain():
    return jaxbuf.TrajectoryBuffer.create(EXAMPLE, 2, 4)


SLOTS = jaxbuf.Slots(index=jnp.zeros(2, jnp.int32), generation=jnp.zeros(2, jnp.uint32))
ENVS = jnp.zeros(2, jnp.int32)
BAD = [
    *(
        (lambda options=options: create(2, 4, **options), message)
        for options, message in (
            ({"terminated": "done"}, "terminated is 'done', but the example has no such field"),
            ({"terminated": "reward"}, "terminated is 'reward', of dtype float32; expected bool"),
            ({"terminated": "end"}, "episodes.terminated is 'end', which is not a single array"),
            ({"truncated": "end.cut"}, "truncated is 'end.cut', but the example has no such"),
            ({"last": "t"}, "episodes.last is 't', of dtype int32; expected bool"),
            (
                {"record_return": True, "reward": "t"},
                "episodes.reward is 't', of dtype int32; expected a floating dtype",
            ),
            ({"reward_clip": (1, -1)}, "reward_clip is (1, -1); expected two numbers, (low, high)"),
        )
    ),
    (
        lambda: jaxbuf.TrajectoryBuffer.create(
            {"terminated": jnp.zeros(3, bool)}, 2, 4, episodes=jaxbuf.Episodes()
        ),
        "terminated is 'terminated', of shape (3,); expected one number per step",
    ),
    (lambda: plain().episode(SLOTS), "episodes is None; create the buffer with"),
    (lambda: plain().end_episodes(), "end_episodes was called, but episodes is None"),
    (lambda: create(2, 4).episode_mask(SLOTS), 'boundary is "cross", whose windows'),
    (lambda: create(2, 4).episode(ENVS), "positions is None; give env_ids and positions"),
    (lambda: create(2, 4).episode(SLOTS, ENVS), "positions were given with slots"),
    (lambda: create(2, 4).episode(ENVS, jnp.zeros(2)), "dtype float32; expected integers"),
]


@pytest.mark.parametrize(("call", "message"), BAD)
def test_bad_use(call, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        call()


def test_without_episodes_or_returns_nothing_is_kept():
    assert plain().episode_index is None
    assert create(2, 4, record_return=False).episode(SLOTS).value is None


@pytest.mark.parametrize(
    ("fields", "ends"),
    [
        ({"done": {"terminated": "T...", "truncated": ".T.."}}, [0, 1]),
        # The field next to the flags of termination is used, not another of the same name.
        ({"done": {"terminated": "T...", "truncated": ".T.."}, "truncated": "..T."}, [0, 1]),
        ({"done": {"terminated": "T..."}, "truncated": "..T."}, [0, 2]),
        ({"done": {"terminated": "T..."}}, [0]),
    ],
)
def test_truncated_is_found_beside_terminated(fields, ends):
    steps = jax.tree.map(lambda text: jnp.array([[flag == "T" for flag in text]]), fields)
    step = jax.tree.map(lambda leaf: leaf[0, 0], steps)
    path = "done.terminated"
    buffer = jaxbuf.TrajectoryBuffer.create(
        step, 1, 4, episodes=jaxbuf.Episodes(terminated=path)
    ).add(steps)
    last = buffer.episode(jnp.zeros(4, jnp.int32), jnp.arange(4)).is_last
    assert np.flatnonzero(last).tolist() == ends
    # The same in everything that uses such flags.
    accumulator = jaxbuf.EpisodeAccumulator.create(step, 1, 4, per_add=4, terminated=path)
    _, episodes, done = accumulator.add(steps)
    assert episodes.length[done].tolist() == np.diff([-1, *ends]).tolist()
    window = {**steps, "reward": jnp.ones((1, 4)), "obs": jnp.arange(4)[None]}
    stacks = jaxbuf.stack_frames(window, 2, terminated=path).frames[0]
    assert [t - 1 for t in (1, 2, 3) if stacks[t, 0] == t] == ends
    rewards = jaxbuf.n_step(window, 2, 1.0, terminated=path).reward[0]
    assert rewards.tolist() == [1.0, 1.0 if 1 in ends else 2.0]


@pytest.mark.parametrize(
    "leave",
    [
        lambda buffer: buffer.end_episodes(),
        lambda buffer: buffer.drop_newest_episode(),
        lambda buffer: buffer.clear(jnp.array([0])),
    ],
    ids=["ended", "dropped", "cleared"],
)
def test_a_lost_life_counts_for_its_own_episode_only(leave):
    """With it the first step of the next one would have a return of 0."""
    buffer = create(1, 8, last="end.last", recurrence="alf", **RETURNS)
    no, yes = np.zeros((1, 1), bool), np.ones((1, 1), bool)
    buffer = leave(jaxbuf.add(buffer, steps([[0]], terminated=True, last=no)))
    first = buffer.end_position
    for last in (no, yes):
        buffer = jaxbuf.add(buffer, steps([[1]], terminated=last, last=last, reward=1.0))
    assert look(buffer, jnp.array([0]), first)["return"].tolist() == [1.0]


def test_ending_an_episode_marks_its_last_step():
    buffer = jaxbuf.add(create(2, 8, last="end.last"), rows_of(".T..", "...."))
    ends = buffer.end_episodes(jnp.array([1])).data["end"]
    marked = {name: np.flatnonzero(flags).tolist() for name, flags in ends.items()}
    assert marked == {"terminated": [1], "truncated": [11], "last": [1, 11]}


def test_a_window_that_has_gone_has_no_steps_of_an_episode():
    step = {"reward": jnp.float32(0), "terminated": jnp.bool_(False)}
    episodes = jaxbuf.Episodes(boundary="mask")
    buffer = jaxbuf.TrajectoryBuffer.create(step, 1, 2, sequence_length=2, episodes=episodes)
    steps = {"reward": jnp.zeros((1, 2)), "terminated": jnp.zeros((1, 2), bool)}
    buffer = buffer.add(steps)
    slots = buffer.latest(1).slots
    assert buffer.episode_mask(slots).all()
    assert not buffer.add(steps).episode_mask(slots).any()


def test_windows_that_reach_into_a_dropped_episode_have_no_mass():
    step = {"reward": jnp.float32(0), "terminated": jnp.bool_(False)}
    options = {"sampler": jaxbuf.Prioritized(), "episodes": jaxbuf.Episodes(boundary="mask")}
    buffer = jaxbuf.TrajectoryBuffer.create(step, 1, 8, sequence_length=2, **options)
    ends = jnp.array([[False, True, False, False]])
    buffer = buffer.add({"reward": jnp.zeros((1, 4)), "terminated": ends}).drop_newest_episode()
    assert (int(buffer.size), int(buffer.sampler_state.nnz)) == (2, 1)

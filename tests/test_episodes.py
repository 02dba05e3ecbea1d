"""`Episodes`: where they begin and end, what they returned, and windows that stay within one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbuf
from tests import reference_episodes as reference

DISTINCT = jaxbuf.Uniform(replacement=False)
DISTINCT_PRIORITIES = jaxbuf.Prioritized(alpha=1.0, replacement=False)
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


def create(num_envs, length, sequence_length=1, period=1, sampler=DISTINCT, **options):
    episodes = jaxbuf.Episodes(**{**PATHS, **options})
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
    return {
        "begin": buffer.episode_begin_position(env, position),
        "remaining": buffer.steps_to_episode_end(env, position),
        "first": buffer.is_episode_first(env, position),
        "last": buffer.is_episode_last(env, position),
        "return": buffer.episode_return(env, position),
    }


@jax.jit
def mask_of(buffer, slots):
    return buffer.episode_mask(slots)


def windows(buffer):
    """``{slot: (steps, probability)}`` of a buffer without replacement."""
    slots = buffer.capacity // buffer.period
    sample = jax.device_get(jaxbuf.sample(buffer, jax.random.key(0), slots))
    rows = zip(sample.slots.index, sample.data["t"], sample.probability, sample.valid, strict=True)
    return {int(i): (t.tolist(), float(p)) for i, t, p, valid in rows if valid}


CONFIGURATIONS = {
    "avoid-prioritized": (
        (3, 9, 3, 1, DISTINCT_PRIORITIES),
        {"boundary": "avoid", **RETURNS},
    ),
    "avoid-mixed-alf": (
        (2, 12, 4, 2, jaxbuf.Prioritized(alpha=1.0, uniform_mix=0.2, replacement=False)),
        {"boundary": "avoid", "last": "end.last", "recurrence": "alf", **RETURNS},
    ),
    "avoid-uniform-lives": (
        (2, 8, 3, 1, DISTINCT),
        {"boundary": "avoid", "last": "end.last", "reward_clip": (-0.5, 0.5), **RETURNS},
    ),
    "mask": ((2, 7, 4, 1, DISTINCT), {"boundary": "mask", **RETURNS}),
}


def twin_of(shape, options):
    *sizes, sampler = shape
    prioritized = isinstance(sampler, jaxbuf.Prioritized)
    return reference.Episodes(
        *sizes,
        avoid=options["boundary"] == "avoid",
        alf=options.get("recurrence") == "alf",
        discount=options["discount"],
        default=options["default_return"],
        clip=options.get("reward_clip"),
        alpha=1.0 if prioritized else None,
        uniform_mix=sampler.uniform_mix if prioritized else 0.0,
    )


def assert_same(buffer, twin):
    length = twin.length
    for env, history in enumerate(twin.history):
        # As many steps every time, some of them gone or yet to come.
        t = len(history) + 2 - np.arange(length + 5)
        said = jax.device_get(look(buffer, jnp.full(t.shape, env), jnp.asarray(t, jnp.int32)))
        for i, step in enumerate(t.tolist()):
            row = {name: value[i] for name, value in said.items()}
            if not twin.is_held(env, step):
                assert row["remaining"] == -1
                assert (bool(row["first"]), bool(row["last"])) == (False, False)
                assert row["begin"] == np.uint32(step % 2**32)
                assert row["return"] == twin.default
                continue
            assert row["begin"] == twin.begin(env, step)
            assert row["remaining"] == twin.end(env, step) - step
            assert row["first"] == (twin.begin(env, step) == step)
            assert row["last"] == history[step].last
            assert row["return"] == pytest.approx(
                twin.episode_return(env, step), rel=1e-5, abs=1e-5
            )

    live = twin.windows
    expected = {
        twin.slot(window[0]): ([step.data.t for step in window], probability)
        for window, probability in zip(live, twin.probabilities(), strict=True)
        if probability > 0
    }
    found = windows(buffer)
    assert {i: row[0] for i, row in found.items()} == {i: row[0] for i, row in expected.items()}
    for slot, (_, probability) in expected.items():
        assert found[slot][1] == pytest.approx(probability, rel=1e-5)
    count = len(live)
    assert (buffer.can_sample(), buffer.can_sample(count), buffer.can_sample(count + 1)) == (
        count > 0, True, False,
    )  # fmt: skip
    slots = jaxbuf.sample(buffer, jax.random.key(0), buffer.capacity // buffer.period).slots
    together = np.asarray(mask_of(buffer, slots))
    by_slot = {twin.slot(window[0]): twin.mask(window) for window in live}
    for slot, mask in zip(slots.index.tolist(), together.tolist(), strict=True):
        assert mask == by_slot.get(slot, [False] * twin.sequence_length)


@pytest.mark.parametrize("configuration", CONFIGURATIONS.values(), ids=CONFIGURATIONS)
def test_random_adds_agree_with_the_twin_after_every_step(configuration):
    shape, options = configuration
    num_envs, length, *_, sampler = shape
    random = np.random.default_rng(3)
    buffer, twin = create(*shape, **options), twin_of(shape, options)
    handles, clock = [], 0
    for _ in range(25):
        rows = random.choice([0, 3, 2 * length + 1], p=[0.5, 0.4, 0.1])
        t = clock + np.arange(num_envs * max(rows, 1)).reshape(num_envs, -1)
        clock = int(t.max()) + 1
        terminated, truncated = random.random((2, *t.shape)) < 0.12
        last = terminated | truncated
        if "last" in options:
            last = truncated | (terminated & (random.random(t.shape) < 0.5))
        reward = random.normal(size=t.shape).astype(np.float32)
        mask = random.random(t.shape) < 0.7
        data = [
            [reference.Row(*cell) for cell in zip(*row, strict=True)]
            for row in zip(*(a.tolist() for a in (t, reward, terminated, last)), strict=True)
        ]
        twin.add(data, None, mask)
        lead = (lambda a: a) if rows else (lambda a: a[:, 0])
        given = steps(*map(lead, (t, terminated, truncated, reward, last)))
        buffer = jaxbuf.add(buffer, given, mask=lead(mask))
        assert_same(buffer, twin)
        if sampler.uses_priority:
            sample = jaxbuf.sample(buffer, jax.random.key(clock), 6)
            by_slot = {twin.slot(w[0]): w[0] for w in twin.windows}
            names = sample.slots.index.tolist(), sample.slots.generation.tolist()
            handles += [(i, g, by_slot.get(i)) for i, g in zip(*names, strict=True)]
            handles = handles[-40:]
            chosen = [handles[i] for i in random.integers(len(handles), size=5)]
            value = random.choice([0.0, 0.5, 3.0], size=5).astype(np.float32)
            index, generation, starts = zip(*chosen, strict=True)
            slots = jaxbuf.Slots(
                index=jnp.array(index, jnp.int32), generation=jnp.array(generation, jnp.uint32)
            )
            buffer = jaxbuf.update_priority(buffer, slots, value)
            twin.update_priority(starts, value)
            assert_same(buffer, twin)

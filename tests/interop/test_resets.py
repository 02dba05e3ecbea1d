"""Environments that begin again, compared with a model that plays one after the other in Python."""

import functools
import itertools
import math
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbuf
from jaxbuf.interop import EnvState, EnvStep, rollout, with_resets
from tests.contract.test_shard_map import check

NUM_ENVS, STEPS, SEEDS = 5, 30, 2
KEYS = {"typed": jax.random.key, "legacy": jax.random.PRNGKey}


def number(key):
    return jax.random.randint(key, (), 0, 2**30)


def reset(key):
    """An episode has a number, and each observation one of its own, from the key that made it."""
    own_key = jax.random.fold_in(key, 1)
    episode = number(key)
    return {"episode": episode, "seen": episode}, (0, episode, own_key)


def step(key, state, action):
    count, episode, own_key = state
    count = count + 1
    fails, stops = ends(count, episode)
    reward = (count * action).astype(jnp.float16)
    seen = {"episode": episode, "seen": number(key)}
    return seen, (count, episode, own_key), reward, fails, stops


def ends(count, episode):
    """It fails, or its own limit stops it, or both at once, after 1 to 7 steps, or after 9."""
    fails = (count > episode % 7) & (episode % 3 > 0)
    return fails, ((count > episode % 5) & (episode % 3 == 1)) | (count == 9)


def play(resets, time_limit=None, steps=STEPS):
    """A program of a key: what a rollout of random actions begins with, stores and leaves."""
    begin, advance = with_resets(reset, step, time_limit=time_limit, resets=resets)

    def one(envs, key):
        return advance(key, envs, actions(key))

    def run(key):
        steps_key = jax.random.fold_in(key, 1)
        envs = begin(key, NUM_ENVS)
        return envs, *rollout(one, envs, steps_key, steps)

    return run


def actions(key):
    return jax.random.randint(jax.random.fold_in(key, 7), (NUM_ENVS,), 0, 9)


@functools.partial(jax.jit, static_argnums=1)
def numbers(key, count):
    return jax.vmap(number)(jax.random.split(key, count))


def model(key, most, time_limit):
    """The rows of all steps ``[E, T, 8]``; who waits at last, and whose turn it is."""
    episodes = numbers(key, NUM_ENVS).tolist()
    seen, counts, rows = list(episodes), [0] * NUM_ENVS, []
    waiting, turn = set(), 0
    for step_key in jax.random.split(jax.random.fold_in(key, 1), STEPS):
        keys = jax.random.split(step_key)
        seen_next = numbers(keys[0], NUM_ENVS).tolist()
        new = numbers(keys[1], min(most, NUM_ENVS)).tolist()
        ended = set(waiting)
        for env, action in enumerate(actions(step_key).tolist()):
            counts[env] += 1
            if env in waiting:
                rows.append([0] * 8)
                continue
            fails, stops = ends(counts[env], episodes[env])
            stops |= counts[env] == time_limit
            begun = [episodes[env], seen[env], action, counts[env] * action]
            rows.append([*begun, fails, stops, seen_next[env], True])
            ended |= {env} if fails or stops else set()
        circle = [(turn + i) % NUM_ENVS for i in range(NUM_ENVS)]
        queue, seen = [env for env in circle if env in ended][:most], seen_next
        for place, env in enumerate(queue):
            episodes[env] = seen[env] = new[place if most < NUM_ENVS else env]
            counts[env] = 0
        waiting = ended - {*queue}
        if queue and most < NUM_ENVS:
            turn = (queue[-1] + 1) % NUM_ENVS
    return np.array(rows).reshape(STEPS, NUM_ENVS, 8).swapaxes(0, 1), sorted(waiting), turn


@pytest.mark.parametrize(
    ("resets", "time_limit", "kind"),
    [
        (None, None, "typed"), (1, 4, "typed"), (2, 4, "legacy"), (9, 4, "typed"),
        *(
            pytest.param(*case, "typed", marks=pytest.mark.slow)
            for case in ((None, 4), (1, None), (2, None), (1, 1), (2, 4), (NUM_ENVS, 4))
        ),
        pytest.param(None, 1, "legacy", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_rows_are_those_of_a_model(resets, time_limit, kind):
    seeds = jax.random.split(KEYS[kind](3), SEEDS)
    _, envs, out = jax.jit(jax.vmap(play(resets, time_limit)))(seeds)
    assert type(out) is EnvStep
    assert (out.mask is None) == (resets is None)
    mask = np.ones((SEEDS, NUM_ENVS, STEPS), bool) if out.mask is None else np.asarray(out.mask)
    rows = out.transitions
    assert (rows["reward"].dtype, rows["terminated"].dtype) == (jnp.float16, jnp.bool_)
    columns = [rows["obs"]["episode"], rows["obs"]["seen"]]
    columns += [rows[name] for name in ("action", "reward", "terminated", "truncated")]
    columns += [rows["next_obs"]["seen"], mask]
    have = np.stack([np.asarray(column, int) for column in columns], -1)
    assert not have[~mask][:, 3:6].any()
    for seed in range(SEEDS):
        most = resets or NUM_ENVS
        want, waiting, turn = model(seeds[seed], most, time_limit)
        np.testing.assert_array_equal(have[seed] * mask[seed][..., None], want)
        assert np.flatnonzero(envs.waiting[seed]).tolist() == waiting
        assert envs.turn[seed] == turn
        # The longest time that one waits.
        runs = itertools.chain(*(itertools.groupby(row) for row in mask[seed]))
        waits = [sum(1 for _ in run) for on, run in runs if not on]
        assert max(waits, default=0) < math.ceil(NUM_ENVS / most) + (most >= NUM_ENVS)
    assert rows["terminated"].any()
    assert mask.all() == (resets not in (1, 2))


@pytest.mark.parametrize("kind", ["typed", pytest.param("legacy", marks=pytest.mark.slow)])
def test_steps_from_python_go_on_from_a_checkpoint(kind, tmp_path):
    first, last, out = jax.jit(play(1, 6))(KEYS[kind](0))
    begin, advance = with_resets(reset, step, time_limit=6, resets=1)
    chex.clear_trace_counter()
    jitted = jax.jit(chex.assert_max_traces(n=1)(advance), donate_argnums=1)
    envs = begin(KEYS[kind](0), NUM_ENVS)
    chex.assert_trees_all_equal(*map(plain, (envs, first)))
    buffer = jaxbuf.TrajectoryBuffer.create(
        jax.tree.map(lambda x: x[0, 0], out.transitions), NUM_ENVS, STEPS
    )
    whole = buffer.add(out.transitions, mask=out.mask)
    keys = jax.random.split(jax.random.fold_in(KEYS[kind](0), 1), STEPS)
    for number, key in enumerate(keys):
        if number == 20:
            jaxbuf.save(tmp_path / "envs", envs)
            envs = jaxbuf.load(tmp_path / "envs", begin(KEYS[kind](5), NUM_ENVS))
        take = advance if number in (21, 22) else jitted  # and as it is, on what is on the host
        envs = jax.device_get(envs) if number == 22 and kind == "legacy" else envs
        envs, now = take(key, envs, actions(key))
        buffer = jaxbuf.add(buffer, now.transitions, mask=now.mask)
    chex.assert_trees_all_equal(*map(plain, (envs, last)))
    chex.assert_trees_all_equal(buffer, whole)
    assert whole.size == out.mask.sum() < NUM_ENVS * STEPS


def plain(tree):
    """The tree with numbers in place of typed keys."""

    def data(leaf):
        return (
            jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
        )

    return jax.tree.map(data, tree)


class Returned(NamedTuple):
    obs: tuple
    state: dict
    reward: dict
    terminated: object
    truncated: object


@pytest.mark.parametrize(
    ("resets", "flags"),
    [
        (None, (True, 0)),
        (1, (1, False)),
        (None, (np.bool_(True), 0.0)),
        (1, (2.5, np.int8(0))),
    ],
)
def test_pytrees_and_python_numbers(resets, flags):
    def begin(key):
        return [(jnp.uint8(3), None), {"x": 0, "on": False, "none": jnp.zeros((0, 2))}]

    def take(key, state, action):
        reward = {"a": True, "b": jnp.full(2, jnp.nan, jnp.bfloat16), "c": 7}
        x = state["x"] + action["push"][1]
        return Returned((jnp.uint8(x), None), {**state, "x": x, "on": True}, reward, *flags)

    begin, take = with_resets(begin, take, resets=resets)
    envs = begin(jax.random.PRNGKey(0), np.int64(3))
    assert not any(leaf.weak_type for leaf in jax.tree.leaves(envs))
    action = {"push": np.ones((3, 2), np.int32)}
    for _ in range(2):
        envs, out = take(jax.random.PRNGKey(1), envs, action)
    assert not any(leaf.weak_type for leaf in jax.tree.leaves((envs, out)))
    rows, first = out.transitions, [True, resets is None, resets is None]
    dtypes = jax.tree.map(lambda leaf: leaf.dtype.name, rows["reward"])
    assert dtypes == {"a": "bool", "b": "bfloat16", "c": "int32"}
    moved = [1, 1, 1] if resets is None else [1, 2, 2]
    assert (rows["next_obs"][0].tolist(), rows["terminated"].tolist()) == (moved, first)


def replaced(**change):
    """A step, ``[obs, state, ...]``, with something else in it."""

    def take(key, state, action):
        right = {"obs": {"x": jnp.zeros(2)}, "state": (0, [1, None]), "reward": 0.0}
        return tuple((right | {"terminated": False, "truncated": False} | change).values())

    begin, take = with_resets(lambda key: ({"x": jnp.zeros(2)}, (0, [1, None])), take)
    return take(jax.random.key(1), begin(jax.random.key(0), 3), jnp.zeros(3))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"state": (0.5, [1, None])}, r"state\[0\] is int32\[\] X, and float32\[\] after step"),
        (
            {"state": (0, [jnp.int8(1), None])},
            r"state\[1\]\[0\] is int32\[\] X, and int8\[\] after",
        ),
        (
            {"state": (0, (1, None))},
            r"state\[1\] is .*\[\*, \*\].* X, and .*\(\*, \*\).* after",
        ),
        ({"state": (0, [1, 2])}, r"state\[1\]\[1\] is .*None.* X, and int32\[\] after step"),
        ({"obs": {"x": jnp.zeros((2, 1))}}, r"obs\['x'\] is float32\[2\] X, and float32\[2, 1\]"),
        ({"obs": {"y": jnp.zeros(2)}}, r"obs is .*'x'.* X, and .*'y'.* after step"),
        ({"obs": jnp.zeros(2)}, r"obs is .*'x'.* X, and float32\[2\] after step"),
        ({"terminated": jnp.zeros(1)}, r"terminated has shape \(1,\); expected \(\), one flag"),
        ({"truncated": {"a": False}}, "truncated is a dict; expected"),
        ({"info": {}}, r"step returned 6 values; expected \(obs, state, reward, terminated, trunc"),
    ],
)
def test_what_differs_is_named(change, message):
    with pytest.raises(ValueError, match=message.replace("X", "after reset")):
        replaced(**change)


def test_other_bad_input():
    for name in ("time_limit", "resets"):
        for value in (0, -1, 2.0, True):
            with pytest.raises(ValueError, match=f"^{name} is {value}; expected an integer of at"):
                with_resets(reset, step, **{name: value})
    for name, pair in (("reset", (None, step)), ("step", (reset, None))):
        with pytest.raises(ValueError, match=f"{name} is None; expected a function"):
            with_resets(*pair)
    begin, take = with_resets(reset, step)
    for call, message in (
        (lambda: begin(0, 3), "key is of type int"),
        (lambda: begin(jax.random.key(0), 0), "num_envs is 0"),
        (lambda: take(0, begin(jax.random.key(0), 3), jnp.zeros(3)), "key is of type int"),
        (
            lambda: with_resets(lambda key: 1.0, step)[0](jax.random.key(0), 3),
            r"reset returned an array .*; expected \(obs, state\)",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.parametrize("resets", [None, 1])
def test_each_device_has_environments_of_its_own(resets):
    envs, last, out = check(play(resets), [jax.random.PRNGKey(0)])
    assert isinstance(last, EnvState)
    chex.assert_trees_all_equal_shapes_and_dtypes(envs, last)
    assert out.transitions["reward"].shape == (4, NUM_ENVS, STEPS)

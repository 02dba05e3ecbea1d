"""`hindsight` against a list of all goals it may give, and at its edges."""

import functools
import re
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import jaxbuf
from tests.models import hindsight as reference
from tests.operations import quick

STRATEGIES = ["final", "future", "episode", "random", "geometric"]
ROWS, STEPS = 5, 7
LENGTH = np.array([7, 4, 1, 0, 5], np.int32)
T = np.array([2, 3, 0, 0, 0], np.int32)
# Every step of every episode achieves a goal of its own.
ACHIEVED = np.arange(ROWS * STEPS, dtype=np.int32).reshape(ROWS, STEPS)
SIGNIFICANCE = 1e-4


def reward_fn(achieved, goal):
    return jnp.where(achieved == goal, jnp.float32(0), jnp.float32(-1))


def transitions(t=T):
    return {
        "achieved_goal": jnp.asarray(ACHIEVED[np.arange(ROWS), t]),
        "goal": jnp.full(ROWS, -7, jnp.int32),
        "reward": jnp.arange(ROWS, dtype=jnp.float32) + 10,
        "action": jnp.arange(ROWS, dtype=jnp.int8),
    }


def relabel(*given, strategy="future", discount=0.7, **options):
    options = {"reward_fn": reward_fn, "fraction": 1.0, "strategy": strategy} | options
    if strategy == "geometric":
        options["discount"] = discount
    return jaxbuf.hindsight(*given, **options)


@functools.partial(jax.jit, static_argnames="strategy")
def many(keys, fraction, strategy, discount=0.7):
    """The same batch under each of many keys."""
    given = transitions(), *map(jnp.asarray, (ACHIEVED, T, LENGTH))
    options = {"strategy": strategy, "fraction": fraction, "discount": discount}
    return jax.vmap(lambda key: relabel(key, *given, **options))(keys)


@pytest.mark.parametrize(
    ("strategy", "discount"),
    [*((strategy, 0.7) for strategy in STRATEGIES), *(("geometric", d) for d in (0.05, 0.9999, 1))],
)
def test_agrees_with_the_naive_twin(strategy, discount):
    keys = jax.random.split(jax.random.key(STRATEGIES.index(strategy)), 4000)
    batch, relabeled = jax.tree.map(np.asarray, many(keys, 1.0, strategy, discount))
    before = jax.tree.map(np.asarray, transitions())
    for name in ("achieved_goal", "action"):
        assert (batch[name] == before[name]).all()
    assert (relabeled == (LENGTH > 0)).all()
    for row in range(ROWS):
        goals, rewards = batch["goal"][:, row], batch["reward"][:, row]
        if LENGTH[row] == 0:
            assert (goals == -7).all()
            assert (rewards == before["reward"][row]).all()
            continue
        np.testing.assert_array_equal(rewards, -(goals != before["achieved_goal"][row]).astype(int))
        expected = reference.goal_distribution(
            strategy, ACHIEVED.tolist(), LENGTH, row, T[row], discount
        )
        counts = {goal: int((goals == goal).sum()) for goal in expected}
        assert sum(counts.values()) == len(keys)
        frequent = {goal: p * len(keys) for goal, p in expected.items() if p * len(keys) > 5}
        if len(frequent) > 1:
            observed = [counts[goal] for goal in frequent]
            rest = len(keys) - sum(observed), len(keys) - sum(frequent.values())
            assert rest[0] <= rest[1] + 20
            frequencies = np.array(list(frequent.values())) * sum(observed) / sum(frequent.values())
            assert stats.chisquare(observed, frequencies).pvalue > SIGNIFICANCE


def test_geometric_futures_reach_the_ends_of_long_episodes():
    """Also where float32 cannot tell apart the powers of the discount."""
    rows, steps = 4096, 2**20
    t = jnp.zeros(rows, jnp.int32)
    batch = {"achieved_goal": t, "goal": t, "reward": jnp.zeros(rows)}
    given = jax.random.key(0), batch, lambda row, step: step, t
    for discount, length in ((1 - 2**-23, steps), (0.99, steps), (1e-45, steps), (0.5, 1)):
        options = {"length": jnp.full(rows, length), "strategy": "geometric"}
        goal = np.asarray(relabel(*given, discount=discount, **options)[0]["goal"])
        assert 0 <= goal.min() <= goal.max() < length
        k = np.arange(length)
        mean = np.average(k, weights=np.float64(np.float32(discount)) ** k)
        assert abs(goal.mean() - mean) <= 5 * max(goal.std(), 1e-9) / rows**0.5


def test_a_fraction_is_relabeled_and_the_rest_stays_bit_for_bit():
    keys = jax.random.split(jax.random.key(9), 4000)
    batch, relabeled = jax.tree.map(np.asarray, many(keys, 0.3, "future"))
    before = jax.tree.map(np.asarray, transitions())
    assert not relabeled[:, LENGTH == 0].any()
    coins = relabeled[:, LENGTH > 0]
    assert stats.binomtest(int(coins.sum()), coins.size, 0.3).pvalue > SIGNIFICANCE
    # Each row has its own coin.
    pairs = coins[:, 0].astype(int) * 2 + coins[:, 1]
    test = stats.chisquare(np.bincount(pairs), np.array([0.49, 0.21, 0.21, 0.09]) * len(keys))
    assert test.pvalue > SIGNIFICANCE
    for name in ("goal", "reward"):
        kept = np.broadcast_to(before[name], relabeled.shape)[~relabeled]
        np.testing.assert_array_equal(batch[name][~relabeled], kept)
    assert not many(keys, 0.0, "future")[1].any()
    # The goal does not depend on the coin.
    of_all, _ = many(keys, 1.0, "future")
    np.testing.assert_array_equal(batch["goal"][relabeled], of_all["goal"][relabeled])


def test_steps_that_an_episode_does_not_have_are_not_relabeled():
    t = jnp.array([7, 4, -1, 0, 4], jnp.int32)
    length = jnp.asarray(LENGTH + 100 * (np.arange(ROWS) == 0)).astype(jnp.int32)
    given = jax.random.key(0), transitions(), jnp.asarray(ACHIEVED), t, length
    for strategy in STRATEGIES:
        batch, relabeled = jax.jit(functools.partial(relabel, strategy=strategy))(*given)
        assert relabeled.tolist() == [False, False, False, False, True]
        assert batch["goal"][:4].tolist() == [-7] * 4


class Obs(NamedTuple):
    reached: dict
    wanted: dict


def test_goals_by_path_and_of_any_structure():
    def goals(seed):
        return {
            "xy": jax.random.normal(jax.random.key(seed), (3, 4, 2)),
            "on": jnp.ones((3, 4)) > 0,
        }

    def both(achieved, goal):
        return (achieved["on"] == goal["on"]).astype(jnp.float32) + jnp.sum(goal["xy"], axis=-1)

    achieved, t = goals(0), jnp.array([0, 1, 3])
    now = jax.tree.map(lambda leaf: leaf[jnp.arange(3), t], achieved)
    asked = jax.tree.map(lambda leaf: leaf[:, 0], goals(1))
    batch = {"obs": Obs(now, asked), "next": {"wanted": asked}, "gain": jnp.zeros(3)}
    fields = {"achieved": "obs.reached", "goal": ("obs.wanted", "next.wanted"), "reward": "gain"}
    result, relabeled = relabel(
        jax.random.key(0), batch, achieved, t, strategy="final", reward_fn=both, **fields
    )
    assert relabeled.all()
    last = jax.tree.map(lambda leaf: leaf[:, 3], achieved)
    chex.assert_trees_all_equal(result["obs"], Obs(now, last))
    chex.assert_trees_all_equal(result["next"]["wanted"], last)
    np.testing.assert_allclose(result["gain"], 1 + last["xy"].sum(-1), rtol=1e-6)
    assert batch["obs"].wanted is asked


def test_windows_of_a_ring_that_has_wrapped():
    """Episodes of 5 steps that achieve their numbers; the oldest has lost its beginning."""
    step = jnp.broadcast_to(jnp.arange(28, dtype=jnp.int32), (2, 28))
    rows = {
        "achieved_goal": step,
        "goal": jnp.full_like(step, -7),
        "reward": -jnp.ones(step.shape),
        "terminated": step % 5 == 4,
    }
    example = jax.tree.map(lambda leaf: leaf[0, 0], rows)
    options = {"sequence_length": 3, "episodes": jaxbuf.Episodes()}
    buffer = jaxbuf.TrajectoryBuffer.create(example, 2, 20, **options).add(rows)

    @jax.jit
    def run(key):
        sample = buffer.sample(key, 2048)
        env, position = buffer.locate(sample.slots)
        # As far back as the episode goes, or the ring.
        episode = buffer.episode(sample.slots)
        t = (position - episode.held_begin).astype(jnp.int32)

        def goals(row, step):
            at = episode.held_begin[row] + step.astype(jnp.uint32)
            return buffer.get_field("achieved_goal", env[row], at)

        return relabel(key, sample.data, goals, t, t + episode.to_end + 1, strategy="episode")

    batch, relabeled = jax.device_get(run(jax.random.key(0)))
    assert relabeled.all()
    # A window has one goal.
    now, goal = batch["achieved_goal"], batch["goal"][:, :1]
    assert (batch["goal"] == goal).all()
    np.testing.assert_array_equal(batch["reward"], np.where(now == goal, 0.0, -1.0))
    found = {(int(a), int(b)) for a, b in zip(now[:, 0], goal[:, 0], strict=True)}
    ends = [range(max(t - t % 5, 8), min(t - t % 5 + 5, 28)) for t in range(28)]
    assert found == {(t, end) for t in range(8, 26) for end in ends[t]}


WIDE = jnp.zeros((ROWS, STEPS, 2), jnp.int32)


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("dtype", quick(["uint8", "int8", "int32", "bool", "float16"], {"uint8"}))
def test_rewards_are_not_cast_to_another_kind(dtype, jitted):
    rewards = jnp.ones((2, 3), dtype)
    batch = {"goal": jnp.zeros((2, 3)), "achieved_goal": jnp.zeros((2, 3)), "reward": rewards}

    def rewarded(compute):
        new, _ = relabel(
            jax.random.key(0), batch, jnp.ones((2, 4)), jnp.array([0, 1]),
            reward_fn=lambda achieved, goal: compute(achieved == goal),
        )  # fmt: skip
        return new["reward"]

    call = jax.jit(rewarded, static_argnums=0) if jitted else rewarded
    for number in (-1, -0.5):

        def weak(reached, number=number):
            return jnp.where(reached, 0, number)

        fits = {"float16": True, "int32": number == -1}.get(dtype, False)
        if fits:
            assert (call(weak) == jnp.asarray(number, dtype)).all()
        else:
            with pytest.raises(ValueError, match=r"reward_fn.* is -1; exp|reward_fn gives .*; exp"):
                call(weak)
    stored = call(lambda reached: (~reached).astype(dtype))
    assert (stored.dtype, stored.tolist()) == (rewards.dtype, [[1] * 3] * 2)


BAD = [
    ({}, {"discount": 0.9}, "discount was given, but strategy is 'future'; only \"geometric\""),
    ({}, {"goal": ("goal", "obs.goal")}, "goal is 'obs.goal', but the batch has no such field"),
    ({"reward": jnp.float32(0)}, {}, "reward has shape (); expected (B,) or (B, L)"),
    (
        {},
        {"t": jnp.zeros(4, jnp.int32)},
        "t is int32 of shape (4,); expected integers of shape (5,",
    ),
    ({}, {"t": jnp.zeros(5)}, "t is float32 of shape (5,); expected integers of shape (5,)"),
    ({}, {"length": jnp.zeros(5)}, "length is float32 of shape (5,); expected integers"),
    ({}, {"achieved_goals": jnp.zeros(5)}, "leading axes [(5,)]; expected (5, T)"),
    ({}, {"achieved_goals": jnp.zeros((4, 7))}, "leading axes [(4, 7)]; expected (5, T)"),
    ({}, {"achieved_goals": lambda row, step: row}, "is a function; pass length=[B] as well"),
    (
        {},
        {"achieved_goals": lambda row, step: row[:2], "length": jnp.asarray(LENGTH)},
        "achieved_goals gives leaves with leading axes {(2,)}; expected (5,)",
    ),
    ({}, {"achieved_goals": WIDE}, "goal 'goal' is int32 (5,); expected int32 (5, 2)"),
    ({"goal": jnp.zeros(5)}, {}, "goal 'goal' is float32 (5,); expected int32 (5,)"),
    (
        {"achieved_goal": jnp.zeros((5, 1), jnp.int32)},
        {},
        "achieved 'achieved_goal' is int32 (5, 1); expected int32 (5,)",
    ),
    (
        {},
        {"reward_fn": lambda achieved, goal: achieved},
        "reward_fn gives int32 of shape (5,); expected float32 of shape (5,)",
    ),
    (
        {},
        {"reward_fn": lambda achieved, goal: -1.0},
        "reward_fn gives float32 of shape (); expected float32 of shape (5,)",
    ),
]


@pytest.mark.parametrize(("changed", "options", "message"), BAD)
def test_bad_input(changed, options, message):
    given = {"achieved_goals": jnp.asarray(ACHIEVED), "t": jnp.asarray(T), "reward_fn": reward_fn}
    with pytest.raises(ValueError, match=re.escape(message)):
        jaxbuf.hindsight(jax.random.key(0), {**transitions(), **changed}, **{**given, **options})

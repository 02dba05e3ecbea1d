"""The levels example: it learns, keeps the mazes that teach, and its mazes are what it says."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import levels
from tests.programs.run_example import check_files, finish, logged

pytestmark = pytest.mark.usefixtures("promotion")

QUICK = [
    *("--size", "4", "--length", "12", "--steps", "100_000", "--seeds", "2", "--num-envs", "24"),
    *("--hidden", "32", "--lr", "3e-3", "--capacity", "256", "--eval-levels", "64"),
]


@pytest.fixture(scope="module")
def finished(tmp_path_factory, promotion):
    """A run from start to end."""
    out = tmp_path_factory.mktemp("runs") / "whole"
    return finish(levels.main, [*QUICK, "--out", str(out)], out)


def test_both_learn(finished):
    header, _, *rows = finished.out.splitlines()
    assert " ".join(header.split()) == "seed uniform prioritized steps of each time"
    cells = [row.split() for row in rows[:3]]
    assert [row[0] for row in cells] == ["0", "1", "all"]
    steps = [int(row[3].replace(",", "")) for row in cells]
    assert steps[0] == steps[1] == logged(finished.folder)[-1]["step"]
    assert steps[2] == 2 * steps[0]
    uniform, prioritized = map(float, cells[-1][1:3])
    first = logged(finished.folder)[0]
    assert np.mean([first[f"solved/{name}/{i}"] for name in levels.AGENTS for i in (0, 1)]) < 0.3
    assert uniform > 0.4
    assert prioritized > 0.5


def test_the_mazes_that_are_played_again_teach_more(finished):
    rows = logged(finished.folder)[-10:]

    def mean(metric, name):
        return np.mean([row[f"{metric}/{name}/{i}"] for row in rows for i in (0, 1)])

    # Few new mazes need a detour, and many cannot be solved.
    assert mean("detours", "prioritized") > 0.05
    assert mean("solved in training", "prioritized") > mean("solved in training", "uniform") + 0.05


def test_a_run_leaves_its_files(finished):
    check_files(finished, "solved.png", ["solved"], "levels", size=4)
    assert "uniform, " in finished.err


@functools.cache
def mazes(size=5, count=200):
    """Several mazes as NumPy arrays."""
    made = jax.jit(jax.vmap(lambda seed: levels.make(seed, size, 0.8)))(jnp.arange(count))
    return jax.device_get(made)


def shortest(walls, start, goal):
    """The number of steps from start to goal; None if there is no way."""
    reached, far = {tuple(start)}, 0
    while tuple(goal) not in reached:
        beside = {(r + dr, c + dc) for r, c in reached for dr, dc in STEPS}
        beside = {
            (r, c) for r, c in beside if 0 <= r < 5 and 0 <= c < 5 and not walls[r, c]
        } - reached
        if not beside:
            return None
        reached, far = reached | beside, far + 1
    return far


STEPS = ((-1, 0), (1, 0), (0, -1), (0, 1))


def test_mazes_differ_and_only_some_need_a_detour():
    made = mazes()
    found = np.asarray(jax.jit(jax.vmap(levels.needs_detour))(made))
    ways = [shortest(*maze) for maze in zip(*made, strict=True)]
    expected = [
        far is not None and far > abs(start - goal).sum()
        for far, start, goal in zip(ways, made.start, made.goal, strict=True)
    ]
    np.testing.assert_array_equal(found, expected)
    assert 0 < sum(expected) < 60
    assert 20 < sum(far is None for far in ways) < 150
    assert (made.start != made.goal).any(axis=1).all()


def test_walls_and_the_edge_stop_a_step():
    made = mazes()
    step = jax.jit(jax.vmap(levels.move))
    wins = 0
    for action, by in enumerate(STEPS):
        places, won = map(np.asarray, step(made, made.start, jnp.full(200, action)))
        for walls, start, goal, place, reached in zip(*made, places, won, strict=True):
            to = start + by
            blocked = not ((to >= 0) & (to < 5)).all() or walls[tuple(to)]
            to = start if blocked else to
            assert reached == (to == goal).all()
            np.testing.assert_array_equal(place, start if reached else to)
            wins += reached
    assert wins > 10


def test_advantages_are_those_of_a_loop():
    agent = levels.Agent(levels.Config(discount=0.9, gae=0.8))
    random = np.random.default_rng(0)
    won, value = random.random((7, 5)) < 0.2, random.normal(size=(7, 5)).astype(np.float32)
    last = random.normal(size=5).astype(np.float32)
    expected, after, ahead = np.zeros((7, 5)), last, np.zeros(5)
    for t in reversed(range(7)):
        delta = np.where(won[t], 1, 0.9 * after) - value[t]
        ahead = delta + np.where(won[t], 0, 0.9 * 0.8 * ahead)
        expected[t], after = ahead, value[t]
    found = jax.jit(agent.advantages)({"won": jnp.asarray(won), "value": jnp.asarray(value)}, last)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_scores_of_mazes_follow_the_agent():
    config = levels.Config(size=4, length=12, num_envs=16, capacity=64, hidden=16, walls=0.5)
    agent = levels.Agent(config)
    iterate = jax.jit(agent.iteration)
    for prioritized in (0.0, 1.0):
        state = jax.jit(agent.init)(jax.random.key(0), jnp.float32(prioritized))
        for _ in range(3):
            state, _ = iterate(state)
        # Until it holds a batch, and without priorities, only new mazes are played.
        drawn = 16 + 2 * (8 if prioritized else 16)
        assert int(state.levels.size) == drawn
        before = {int(k): float(v) for k, v in scored(state.levels)}
        state, metrics = iterate(state)
        after = {int(k): float(v) for k, v in scored(state.levels)}
        assert len(after) == drawn + (8 if prioritized else 16)
        changed = sum(after[seed] != score for seed, score in before.items())
        assert (changed > 0) == (prioritized > 0)
        assert changed <= 8
        assert metrics["score"].shape == (16,)
        assert max(after) < levels.TRAINED


def scored(buffer):
    live = np.asarray(buffer.live)
    seeds, scores = np.asarray(buffer.data["seed"])[live], np.asarray(buffer.occupancy.score)[live]
    return zip(seeds, scores, strict=True)

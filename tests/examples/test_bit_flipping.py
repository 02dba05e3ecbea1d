"""The bit-flipping example: it learns what it cannot learn without, and says what is wrong."""

import functools
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bit_flipping
from tests.programs.run_example import check_files, error_of, finish, interrupt

pytestmark = pytest.mark.usefixtures("promotion")

QUICK = [
    *("--bits", "8", "--seeds", "2", "--episodes", "1200", "--num-envs", "4", "--hidden", "32"),
    *("--capacity", "1000", "--eval-episodes", "50"),
]


@pytest.fixture(scope="module")
def finished(tmp_path_factory, promotion):
    """A run from start to end."""
    out = tmp_path_factory.mktemp("runs") / "whole"
    return finish(bit_flipping.main, [*QUICK, "--out", str(out)], out)


def test_only_hindsight_learns(finished):
    header, _, *rows = finished.out.splitlines()
    assert " ".join(header.split()) == "seed DQN DQN with hindsight episodes of each time"
    cells = [row.split() for row in rows[:3]]
    assert [row[0] for row in cells] == ["0", "1", "all"]
    without, with_ = (float(cell.rstrip("%")) for cell in cells[-1][1:3])
    assert with_ > 80
    assert without < 40
    assert [row[3] for row in cells] == ["1,200", "1,200", "2,400"]
    assert float(cells[-1][4]) > 0


def test_a_run_leaves_its_files(finished):
    check_files(finished, "success rates", ["success"], "bit_flipping", bits=8)


def test_an_interrupted_run_goes_on_as_if_nothing_had_happened(
    finished, tmp_path, monkeypatch, capsys
):
    out = tmp_path / "run"
    # After 23 of fifty chunks, of which every fifth is saved.
    interrupt(bit_flipping.main, [*QUICK, "--out", str(out)], 23, monkeypatch, capsys)
    again = finish(bit_flipping.main, ["--out", str(out), "--resume"], out)
    # It was last saved after 20 chunks of 24 episodes: of each of two seeds, with and without. The
    # first line comes after three more.
    assert "2.21k/4.80k" in again.err.splitlines()[1]
    assert (out / "log.csv").read_text() == (finished.folder / "log.csv").read_text()
    assert "success rates, log and checkpoint are in " in again.out


def test_a_finished_run_says_how_to_train_on(finished, capsys):
    assert "has --episodes 1200, not 1199; only --episodes may grow" in error_of(
        bit_flipping, ["--out", str(finished.folder), "--resume", "--episodes", "1199"], capsys
    )


def test_a_run_that_is_trained_can_be_told_of_again(finished, tmp_path):
    out = shutil.copytree(finished.folder, tmp_path / "run")
    picture = (out / "success.png").read_bytes()
    (out / "success.png").unlink()
    again = finish(bit_flipping.main, ["--out", str(out), "--resume"], out)
    assert (out / "success.png").read_bytes() == picture
    rows = zip(again.out.splitlines()[:4], finished.out.splitlines()[:4], strict=True)
    for row, expected in rows:
        assert row.split()[:3] == expected.split()[:3]


@functools.cache
def begun(discount=0.98):
    """An agent on four bits, and two of its states."""
    learner = bit_flipping.Agent(
        bit_flipping.Config(bits=4, hidden=8, capacity=64, discount=discount, strategy="episode")
    )
    init = jax.jit(learner.init)
    return learner, *(init(jax.random.key(i), jnp.float32(0)) for i in (1, 2))


@functools.cache
def played():
    """Episodes of random actions."""
    learner, state, _ = begun()
    return jax.jit(learner.play, static_argnums=2)(state.params, jax.random.key(1), 200, 1.0)


def test_episodes_flip_one_bit_at_a_time_and_end_at_the_goal():
    episodes = jax.tree.map(np.asarray, played())
    assert episodes.success.any()
    assert not episodes.success.all()
    for states, goal, action, length, success in zip(*episodes, strict=True):
        now, steps, reached = states[0].copy(), 0, False
        while steps < 4 and not reached:
            now[action[steps]] ^= True
            steps += 1
            np.testing.assert_array_equal(states[steps], now)
            reached = (now == goal).all()
        assert (steps, reached) == (length, success)


def test_transitions_are_steps_of_episodes_and_earn_what_their_goal_says():
    transitions = jax.jit(begun()[0].transitions)
    for fraction in (0.0, 1.0):
        batch = transitions(played(), (jax.random.key(2), jax.random.key(3)), fraction)
        episodes, batch_ = jax.tree.map(np.asarray, (played(), batch))
        flipped = np.eye(4, dtype=bool)[batch_["action"]]
        np.testing.assert_array_equal(batch_["obs"] ^ flipped, batch_["achieved_goal"])
        reached = (batch_["achieved_goal"] == batch_["goal"]).all(axis=1)
        np.testing.assert_array_equal(batch_["reward"], np.where(reached, 0.0, -1.0))
        for row in range(200):
            states = episodes.states[row, : episodes.length[row] + 1]
            assert any((states[:-1] == batch_["obs"][row]).all(axis=1))
            goals = states[1:] if fraction else episodes.goal[row][None]
            assert any((goals == batch_["goal"][row]).all(axis=1))


def test_nothing_comes_after_a_goal_that_is_reached():
    learner, state, other = begun(discount=0.9)
    obs, achieved, goal = jax.random.bernoulli(jax.random.key(0), 0.5, (3, 8, 4))
    goal = goal.at[:3].set(achieved[:3])
    batch = {
        "obs": obs,
        "achieved_goal": achieved,
        "goal": goal,
        "action": jnp.arange(8, dtype=jnp.int32) % 4,
        "reward": bit_flipping.reward(achieved, goal),
    }
    values = jax.jit(learner.network.apply)
    value = np.asarray(values(state.params, obs, goal))[np.arange(8), np.arange(8) % 4]
    after = np.asarray(values(other.params, achieved, goal)).max(axis=1)
    reached = (np.asarray(achieved) == np.asarray(goal)).all(axis=1)
    assert reached[:3].all()
    assert not reached.all()
    expected = value - np.where(reached, 0, -1 + 0.9 * after)
    error = jax.jit(learner.td_error)(state.params, other.params, batch)
    np.testing.assert_allclose(error, expected, rtol=1e-4, atol=1e-5)

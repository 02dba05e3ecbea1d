"""The DQN example: it learns, resumes as if nothing had happened, and says what is wrong."""

import io
import json
import math
import re
import subprocess
import sys
import time
from typing import get_args

import chex
import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import common
import dqn
import jaxbuf
from tests.programs.run_example import check_files, error_of, finish, interrupt, logged
from tests.programs.tensorboard import events_of

pytestmark = pytest.mark.usefixtures("promotion")

QUICK = [
    *("--steps", "12_000", "--seeds", "2", "--num-envs", "4", "--warmup", "400"),
    *("--capacity", "4000", "--batch-size", "32", "--hidden", "32", "--eval-episodes", "4"),
]


def words(out, *more):
    return [*QUICK, "--out", str(out), *more]


def final_state(out):
    """The training state of the checkpoint."""
    config = dqn.Config(**json.loads((out / "run.json").read_text())["options"])
    keys = jnp.stack([jax.random.key(i) for i in range(config.seeds)])
    like = jax.eval_shape(jax.vmap(dqn.Agent(config).init), keys)
    return jaxbuf.load(out / "checkpoint", like)


def returns_in(out):
    return np.asarray([[row["return/0"], row["return/1"]] for row in logged(out)])


@pytest.fixture(scope="module")
def finished(tmp_path_factory, promotion):
    """A run from start to end."""
    out = tmp_path_factory.mktemp("runs") / "whole"
    return finish(dqn.main, words(out, "--tensorboard"), out)


def test_progress_is_a_line_at_each_checkpoint_where_there_is_no_terminal(finished):
    assert "\r" not in finished.err
    first, *lines = finished.err.splitlines()
    assert first == "compiling"
    assert len(lines) == 10
    assert lines[-1].startswith("100%")
    assert "steps/s, return" in lines[-1]


def test_progress_is_a_bar_in_a_terminal(tmp_path, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr("sys.stderr", shown := Terminal())
    run = common.Run(dqn.Config(), tmp_path)
    state, seconds = run.train(0, lambda i: (i + 1, {"a": i}, "return 1"), done=0, until=3, size=1)
    assert (state, len(seconds)) == (3, 3)
    assert shown.getvalue().count("\n") == 1
    assert "\r100%" in shown.getvalue()


def test_the_times_of_the_table_add_up(finished):
    *_, row, _, times = finished.out.splitlines()
    steps, speed, all_ = row.replace(",", "").split()[3:6]
    found = re.findall(r"([\d,.]+) (?:s|steps)\b", times.replace(",", ""))
    compiling, first, training, rest = map(float, found)
    assert compiling + training + rest == pytest.approx(float(all_), abs=0.2)
    assert float(speed) * training == pytest.approx(float(steps) - 800 - first, rel=0.1)


def test_it_learns(finished):
    returns = returns_in(finished.folder)
    chex.assert_shape(returns, (100, 2))
    # A random policy keeps the pole up for about 22 steps.
    assert np.nanmean(returns[-10:]) > 60
    assert np.nanmean(returns[:3]) < 40


def test_a_run_leaves_its_files(finished):
    check_files(finished, "learning curve", ["learning_curve"], "dqn", num_envs=4)
    state = final_state(finished.folder)
    assert state.step.tolist() == [12_000] * 2
    assert [row["step"] for row in logged(finished.folder)] == list(range(516, 12_001, 116))
    leaves = jax.tree.leaves(state.replace(key=None))
    assert all(np.isfinite(leaf).all() for leaf in leaves if leaf.dtype == np.float32)


def test_an_interrupted_run_goes_on_bit_for_bit(finished, tmp_path, monkeypatch, capsys):
    out = tmp_path / "interrupted"
    interrupt(dqn.main, words(out, "--tensorboard"), 37, monkeypatch, capsys)
    assert final_state(out).step.tolist() == [3880] * 2
    assert dqn.main(["--out", str(out), "--resume"]) == 0
    check_same_end(out, finished.folder)


def test_a_killed_run_goes_on_bit_for_bit(finished, tmp_path):
    out = tmp_path / "killed"
    command = [sys.executable, dqn.__file__, *words(out, "--tensorboard")]
    table = out / "log.csv"
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        # Within a tenth of the run, at whose end it is saved: what was logged since is lost.
        while not (table.exists() and table.read_text().count("\n") > 35):
            assert process.poll() is None, "the run ended by itself"
            time.sleep(0.002)
        process.kill()
    assert process.returncode == -9
    step = int(final_state(out).step[0])
    assert 516 < step < 12_000
    assert logged(out)[-1]["step"] > step
    assert dqn.main(["--out", str(out), "--resume"]) == 0
    check_same_end(out, finished.folder)


def check_same_end(out, whole):
    """A run that was interrupted left the same state and the same log as one that was not."""
    chex.assert_trees_all_equal(*map(numbers, (final_state(out), final_state(whole))))
    assert json.loads((out / "run.json").read_text()) == json.loads(
        (whole / "run.json").read_text()
    )
    assert (out / "log.csv").read_text() == (whole / "log.csv").read_text()
    expected, actual = events_of(whole / "tensorboard"), events_of(out / "tensorboard")
    np.testing.assert_equal(actual, expected)


def numbers(state):
    return jax.tree.map(np.asarray, state.replace(key=jax.random.key_data(state.key)))


def test_the_log_tells_how_training_went(finished):
    rows = logged(finished.folder)
    for row in rows:
        assert row["loss/1"] > 0
        assert row["buffer/size/0"] == min(row["step"], 4000)
        assert row["buffer/priority_min/0"] < row["buffer/priority_max/0"]
    curves = events_of(finished.folder / "tensorboard")
    assert set(curves) == set(rows[0]) - {"step"}
    for name, points in curves.items():
        assert [step for step, _ in points] == [row["step"] for row in rows]
        values = [row[name] for row in rows]
        np.testing.assert_allclose([value for _, value in points], values, rtol=1e-6)


def test_a_run_that_ended_while_evaluating_goes_on_to_its_table(finished, tmp_path, monkeypatch):
    out = tmp_path / "trained"

    def interrupt_evaluation(agent, params, key):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(dqn, "greedy_returns", interrupt_evaluation)
        dqn.programs.cache_clear()
        assert dqn.main(words(out, "--tensorboard")) == 130
    dqn.programs.cache_clear()
    again = finish(dqn.main, ["--out", str(out), "--resume"], out)
    check_same_end(out, finished.folder)
    assert (out / "learning_curve.png").exists()
    # All columns but the time, and the speed, which is missing.
    rows = zip(again.out.splitlines()[2:5], finished.out.splitlines()[2:5], strict=True)
    for row, expected in rows:
        assert row.split()[:4] == expected.split()[:4]


@pytest.mark.parametrize(("name", "value"), [("alpha", "0.9"), ("steps", "11_000")])
def test_resume_refuses_another_configuration(finished, name, value, capsys):
    command = ["--out", str(finished.folder), "--resume", f"--{name}", value]
    message = error_of(dqn, command, capsys)
    before = {"alpha": "0.6, not 0.9", "steps": "12000, not 11000"}[name]
    assert f"has --{name} {before}; only --steps may grow" in message


def test_a_run_ends_with_a_table(finished):
    check_table(finished.out, seeds=["0", "1"], steps="24,000")


def test_uniform_replay_of_images(tmp_path, capsys):
    changed = ["--steps", "800", "--env", "Breakout-MinAtar", "--sampler", "uniform"]
    assert dqn.main(words(tmp_path / "run", *changed, "--seed", "7", "--n-step", "3")) == 0
    check_table(capsys.readouterr().out, seeds=["7", "8"], steps="1,600")


def check_table(printed, seeds, steps):
    header, _, *rows = printed.splitlines()[: len(seeds) + 3]
    assert " ".join(header.split()) == "seed greedy return return in training steps steps/s time"
    cells = [row.split() for row in rows]
    assert [row[0] for row in cells] == [*seeds, "all"]
    mean = np.mean([float(row[1]) for row in cells[:-1]])
    # Each is rounded to a tenth.
    assert math.isclose(float(cells[-1][1]), mean, abs_tol=0.11)
    assert cells[-1][3] == steps
    assert float(cells[-1][4].replace(",", "")) > 0
    assert float(cells[-1][5]) > 0


def test_a_run_that_was_killed_before_it_was_saved_starts_anew(tmp_path, capsys):
    options = {"steps": 12_000, "warmup": 400, "capacity": 4000, "seeds": 1}
    record = {"example": "dqn", "options": options}
    (tmp_path / "run.json").write_text(json.dumps(record))
    message = error_of(dqn, ["--out", str(tmp_path), "--resume"], capsys)
    assert f"there is no checkpoint in {tmp_path}; start without --resume" in message


def test_files_of_somebody_else_are_left_alone(tmp_path, capsys):
    notes = tmp_path / "checkpoint" / "notes.txt"
    notes.parent.mkdir()
    notes.write_text("mine")
    assert "choose another --out" in error_of(dqn, ["--out", str(tmp_path)], capsys)
    (tmp_path / "run.json").write_text(json.dumps({"example": "sac"}))
    assert "choose another --out" in error_of(dqn, ["--out", str(tmp_path)], capsys)
    assert notes.read_text() == "mine"
    assert "is a file; choose another --out" in error_of(dqn, ["--out", str(notes)], capsys)


def test_returns_are_sums_of_rewards():
    learner = agent(warmup=64)

    @jax.jit
    def play(key):
        return jax.lax.scan(lambda s, _: learner.interact(s, 1.0), learner.init(key), length=200)

    state, log = play(jax.random.key(0))
    ended = state.buffer.data["terminated"] | state.buffer.data["truncated"]
    ended = np.asarray(ended).reshape(state.buffer.num_envs, -1)[:, :232]
    assert log.episodes.sum() == ended[:, 32:].sum() > 4
    # Every step earns 1: those of each environment up to the end of its last episode, without those
    # of the episodes that ended while the buffer was filled.
    lasts = [np.flatnonzero(row)[-1] + 1 for row in ended]
    before = [np.flatnonzero(row[:32])[-1:].sum() + row[:32].any() for row in ended]
    assert log.total_return.sum() == sum(lasts) - sum(before)
    np.testing.assert_array_equal(state.episode_return, 232 - np.asarray(lasts))


@pytest.mark.parametrize("name", get_args(dqn.Name))
def test_every_environment_can_be_played(name):
    learner = agent(env=name)
    state = jax.eval_shape(learner.init, jax.random.key(0))
    stepped, _ = jax.eval_shape(lambda state: learner.interact(state, 0.5), state)
    # The same types again, or a scan over steps would not trace.
    assert jax.tree.map(lambda x: (x.shape, x.dtype, x.weak_type), state) == jax.tree.map(
        lambda x: (x.shape, x.dtype, x.weak_type), stepped
    )
    stored = state.buffer.data["next_obs"]
    assert stored.dtype == (jnp.bool_ if name in get_args(dqn.MinAtar) else jnp.float32)
    env, params = gymnax.make(name)
    assert learner.network.num_actions == env.action_space(params).n


def test_minatar_observations_lose_nothing_as_bool():
    env, params = gymnax.make("Breakout-MinAtar")
    obs, _ = env.reset(jax.random.key(0), params)
    np.testing.assert_array_equal(obs, np.asarray(obs, bool))


def agent(**changed):
    return dqn.Agent(dqn.Config(**{"hidden": 16, "num_envs": 2, **changed}))


def windows(learner, rows):
    """Random steps with random ends of episodes."""
    random = np.random.default_rng(0)
    example = jax.eval_shape(learner.init, jax.random.key(0)).buffer.example["obs"]
    shape, obs = (rows, learner.config.n_step + 1), example.shape
    terminated = random.random(shape) < 0.25
    window = {
        "obs": random.random((*shape, *obs)) < 0.5,
        "next_obs": random.random((*shape, *obs)) < 0.5,
        "action": random.integers(learner.network.num_actions, size=shape, dtype=np.int32),
        "reward": random.normal(size=shape).astype(np.float32),
        "terminated": terminated,
        "truncated": ~terminated & (random.random(shape) < 0.25),
    }
    return {k: v.astype(example.dtype) if "obs" in k else v for k, v in window.items()}


@pytest.mark.parametrize(("n", "env"), [(1, "CartPole-v1"), (2, "Breakout-MinAtar")])
def test_td_error_is_that_of_one_loop_per_window(n, env):
    learner = agent(env=env, n_step=n, discount=0.9)
    window, rows = windows(learner, 24), []
    for row in range(24):
        step = {name: leaf[row] for name, leaf in window.items()}
        ends = step["terminated"] | step["truncated"]
        last, total, weight = 0, step["reward"][0], 0.9
        while last + 1 < n and not ends[last]:
            last += 1
            total, weight = total + weight * step["reward"][last], weight * 0.9
        weight = 0.0 if step["terminated"][last] else weight
        rows.append((step["obs"][0], step["next_obs"][last], step["action"][0], total, weight))
    before, after, action, total, weight = map(np.stack, zip(*rows, strict=True))
    assert (weight == 0).any()
    assert len(np.unique(weight)) == n + 1
    params, other = (learner.network.init(jax.random.key(i), before[:1]) for i in (1, 2))
    values = jax.jit(learner.network.apply)
    every, best = np.arange(24), np.argmax(values(params, after), axis=-1)
    expected = values(params, before)[every, action]
    expected -= total + weight * values(other, after)[every, best]
    error, slope = jax.jit(
        lambda params, other, window: (
            learner.td_error(params, other, window),
            jax.grad(lambda p: learner.td_error(params, p, window).sum())(other),
        )
    )(params, other, window)
    np.testing.assert_allclose(error, expected, rtol=1e-4, atol=1e-4)
    assert all((np.asarray(leaf) == 0).all() for leaf in jax.tree.leaves(slope))


def test_learning_updates_the_priorities_of_what_it_sampled():
    learner = agent(warmup=64, capacity=128, batch_size=16)
    state = jax.jit(learner.init)(jax.random.key(0))
    assert int(state.step) == 64
    assert int(state.buffer.size) == 64
    learned, loss = jax.jit(learner.learn)(state)
    assert loss > 0
    before, after = state.buffer.metrics(), learned.buffer.metrics()
    # All transitions came in with the same priority, and errors differ.
    assert before["priority_min"] == before["priority_max"]
    assert after["priority_min"] < after["priority_max"]
    for old, new in (
        (state.params, learned.params),
        (state.target_params, learned.target_params),
    ):
        assert any((a != b).any() for a, b in zip(*map(jax.tree.leaves, (old, new)), strict=True))


def test_schedules():
    learner = agent(steps=10_000, warmup=100, epsilon=0.1, exploration=0.5, beta=0.4)
    steps = [jnp.int32(step) for step in (0, 2_500, 5_000, 10_000, 20_000)]
    epsilon, beta = zip(*map(learner.schedules, steps), strict=True)
    np.testing.assert_allclose(epsilon, [1.0, 0.55, 0.1, 0.1, 0.1], rtol=1e-6)
    np.testing.assert_allclose(beta, [0.4, 0.55, 0.7, 1.0, 1.0], rtol=1e-6)


def test_dense_over_patches_is_a_convolution():
    image = jax.random.normal(jax.random.key(0), (2, 10, 10, 4))
    kernel = jax.random.normal(jax.random.key(1), (3, 3, 4, 16))
    expected = nn.Conv(16, (3, 3), padding="VALID", use_bias=False).apply(
        {"params": {"kernel": kernel}}, image
    )
    actual = dqn.patches(image) @ kernel.reshape(-1, 16)
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)

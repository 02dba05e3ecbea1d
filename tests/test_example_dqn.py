"""The DQN example: it learns, resumes as if nothing had happened, and says what is wrong."""

import csv
import importlib.util
import itertools
import json
import math
import subprocess
import sys
import time

import chex
import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import jaxbuf
from jaxbuf.examples import _network, _report, dqn
from jaxbuf.examples._environment import MINATAR, NAMES, Environments
from jaxbuf.examples._run_folder import RunFolder
from tests.run_example import error_of, finish, interrupt
from tests.tensorboard import events_of

QUICK = {
    "--steps": "12_000",
    "--seeds": "2",
    "--num-envs": "4",
    "--warmup": "400",
    "--capacity": "4000",
    "--batch-size": "32",
    "--hidden": "32",
    "--eval-episodes": "4",
}


def words(out, *more, **changed):
    options = {**QUICK, **{f"--{name.replace('_', '-')}": v for name, v in changed.items()}}
    return [*itertools.chain.from_iterable(options.items()), "--out", str(out), *more]


def final_state(out):
    """All leaves of the checkpoint, as NumPy arrays, and its record."""
    folder = RunFolder(out, "dqn")
    record = folder.load_record()
    agent = dqn.Agent(dqn.Config(**record["config"]))
    keys = jnp.stack([jax.random.key(i) for i in range(record["config"]["seeds"])])
    state = folder.load_state(jax.eval_shape(jax.vmap(agent.init), keys))
    state = state.replace(key=jax.random.key_data(state.key))
    return [np.asarray(leaf) for leaf in jax.tree.leaves(state)], record


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run from start to end."""
    out = tmp_path_factory.mktemp("runs") / "whole"
    return finish(dqn.main, words(out, "--log"), out)


def test_it_learns(finished):
    _, record = final_state(finished.folder)
    returns = np.asarray(record["curve"]["returns"])
    chex.assert_shape(returns, (100, 2))
    # A random policy keeps the pole up for about 22 steps.
    assert np.nanmean(returns[-10:]) > 60
    assert np.nanmean(returns[:3]) < 40


def test_a_run_leaves_its_files(finished):
    picture = (finished.folder / "learning_curve.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) > 10_000
    leaves, record = final_state(finished.folder)
    assert record["step"] == 12_000
    assert record["curve"]["steps"] == list(range(516, 12_001, 116))
    assert all(np.isfinite(leaf).all() for leaf in leaves if leaf.dtype == np.float32)


def test_an_interrupted_run_goes_on_bit_for_bit(finished, tmp_path, monkeypatch, capsys):
    out = tmp_path / "interrupted"
    with monkeypatch.context() as patch:
        interrupt(patch, 38)
        assert dqn.main(words(out, "--log")) == 130
    assert "step 3880 with --resume" in capsys.readouterr().err
    assert dqn.main(["--out", str(out), "--resume"]) == 0
    check_same_end(out, finished.folder)


def test_a_killed_run_goes_on_bit_for_bit(finished, tmp_path):
    out = tmp_path / "killed"
    command = [sys.executable, "-m", "jaxbuf.examples.dqn", *words(out, "--log")]
    table = out / "log.csv"
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        # Within a tenth of the run, at whose end it is saved: what was logged since is lost.
        while not (table.exists() and table.read_text().count("\n") > 35):
            assert process.poll() is None, "the run ended by itself"
            time.sleep(0.002)
        process.kill()
    assert process.returncode == -9
    step = RunFolder(out, "dqn").load_record()["step"]
    assert 516 < step < 12_000
    logged = int(table.read_text().splitlines()[-1].split(",")[0])
    assert logged > step
    assert dqn.main(["--out", str(out), "--resume"]) == 0
    check_same_end(out, finished.folder)


def check_same_end(out, whole):
    """A run that was interrupted left the same state and the same log as one that was not."""
    expected, expected_record = final_state(whole)
    actual, record = final_state(out)
    assert len(actual) == len(expected)
    for one, other in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(one, other)
    np.testing.assert_equal(record, expected_record)
    assert (out / "log.csv").read_text() == (whole / "log.csv").read_text()
    expected, actual = events_of(whole / "tensorboard"), events_of(out / "tensorboard")
    np.testing.assert_equal(actual, expected)


def test_the_log_tells_how_training_went(finished):
    with (finished.folder / "log.csv").open() as file:
        rows = list(csv.DictReader(file))
    _, record = final_state(finished.folder)
    assert [int(row["step"]) for row in rows] == record["curve"]["steps"]
    returns = [[float(row[f"return/{seed}"]) for seed in range(2)] for row in rows]
    np.testing.assert_array_equal(returns, record["curve"]["returns"])
    for row in rows:
        assert float(row["loss/1"]) > 0
        assert float(row["buffer/size/0"]) == min(int(row["step"]), 4000)
        assert float(row["buffer/priority_min/0"]) < float(row["buffer/priority_max/0"])
    curves = events_of(finished.folder / "tensorboard")
    assert set(curves) == set(rows[0]) - {"step"}
    for name, points in curves.items():
        assert [step for step, _ in points] == record["curve"]["steps"]
        values = [float(row[name]) for row in rows]
        np.testing.assert_allclose([value for _, value in points], values, rtol=1e-6)
    assert f"log             {finished.folder / 'log.csv'}" in finished.out


def test_logging_says_what_it_needs(tmp_path, monkeypatch, capsys):
    find = importlib.util.find_spec
    with monkeypatch.context() as patch:
        patch.setattr(
            importlib.util, "find_spec", lambda name: None if name == "tensorboardX" else find(name)
        )
        message = error_of(dqn, ["--out", str(tmp_path / "run"), "--log"], capsys)
    assert "--log needs tensorboardX; install it with `pip install 'jaxbuf[examples]'`" in message
    assert not any(tmp_path.iterdir())


def test_a_run_that_ended_while_evaluating_goes_on_to_its_table(
    finished, tmp_path, monkeypatch, capsys
):
    out = tmp_path / "trained"
    phase = _report.Progress.phase

    def interrupt_evaluation(progress, name):
        phase(progress, name)
        if name == "evaluating":
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(_report.Progress, "phase", interrupt_evaluation)
        assert dqn.main(words(out, "--log")) == 130
    assert "step 12000 with --resume" in capsys.readouterr().err
    again = finish(dqn.main, ["--out", str(out), "--resume"], out)
    check_same_end(out, finished.folder)
    assert (out / "learning_curve.png").exists()
    # All but the speed, of which there is none, and the time.
    rows = zip(again.out.splitlines()[2:5], finished.out.splitlines()[2:5], strict=True)
    for row, expected in rows:
        assert row.split()[:4] == expected.split()[:4]


def test_a_finished_run_says_how_to_train_on(finished, capsys):
    command = ["--out", str(finished.folder), "--resume", "--steps", "11_000"]
    assert error_of(dqn, command, capsys).endswith(
        "has done its 12000 steps; ask for more with --steps\n"
    )


def test_resume_refuses_another_configuration(finished, capsys):
    message = error_of(dqn, ["--out", str(finished.folder), "--resume", "--alpha", "0.9"], capsys)
    assert "has --alpha 0.6, not 0.9" in message


def test_a_run_ends_with_a_table(finished):
    check_table(finished.out, seeds=["0", "1"], steps="24,000")
    assert str(finished.folder / "learning_curve.png") in finished.out


def test_progress_shows_return_and_speed(finished):
    assert "steps/s, return" in finished.err
    assert "100%" in finished.err


def test_uniform_replay_of_stacked_images(tmp_path, capsys):
    changed = {"steps": "800", "env": "Breakout-MinAtar", "sampler": "uniform", "seed": "7"}
    changed |= {"frame_stack": "2", "n_step": "3"}
    assert dqn.main(words(tmp_path / "run", **changed)) == 0
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


@pytest.mark.parametrize(
    ("argv", "advice"),
    [
        (["--env", "CartPole-v0"], "did you mean CartPole-v1? choose one of CartPole-v1, Acrobot"),
        (["--env", "Pendulum-v1"], "'Pendulum-v1' is unknown; "),
        (["--sampler", "priority"], "choose one of prioritized, uniform"),
        (["--capacity", "63", "--batch-size", "64"], "make the capacity at least as large"),
        (["--capacity", "64", "--num-envs", "65"], "make it at least 130"),
        (["--n-step", "9", "--warmup", "79"], "--warmup 79 is less than 10 steps (--n-step, "),
        (["--n-step", "0"], "'0' is not a whole number of at least 1"),
        (
            ["--frame-stack", "4"],
            "is for images and CartPole-v1 has none; leave it out or choose a",
        ),
        (["--warmup", "20"], "make the warm-up at least as long"),
        (["--steps", "2000"], "ask for more steps or a shorter warm-up"),
        (["--steps", "many"], "'many' is not a whole number of at least 1"),
        (["--batch-size", "0"], "'0' is not a whole number of at least 1"),
        (["--seeds", "1.5"], "'1.5' is not a whole number of at least 1"),
        (
            ["--capacity", "1e10"],
            "'1e10' is not a whole number of at least 1 and at most 1073741824",
        ),
        (["--alpha", "-0.1"], "'-0.1' is not a number of at least 0"),
        (["--beta", "1.1"], "'1.1' is not a number of at least 0 and at most 1"),
        (["--lr", "0"], "'0' is not a number above 0"),
        (["--lr", "nan"], "'nan' is not a number above 0"),
        (["--discount", "inf"], "'inf' is not a number of at least 0 and at most 1"),
        (["--stepz", "5"], "unrecognized arguments: --stepz 5"),
        (["--resume"], "there is no checkpoint in runs/dqn; start without --resume"),
    ],
)
def test_a_wrong_argument_gets_one_line(argv, advice, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert advice in error_of(dqn, argv, capsys)
    assert not any(tmp_path.iterdir())


def test_files_of_somebody_else_are_left_alone(tmp_path, capsys):
    notes = tmp_path / "checkpoint" / "notes.txt"
    notes.parent.mkdir()
    notes.write_text("mine")
    assert "choose another --out" in error_of(dqn, ["--out", str(tmp_path)], capsys)
    (tmp_path / "run.json").write_text(json.dumps({"example": "sac"}))
    assert "choose another --out" in error_of(dqn, ["--out", str(tmp_path)], capsys)
    assert notes.read_text() == "mine"
    assert "is a file; choose another --out" in error_of(dqn, ["--out", str(notes)], capsys)


def test_help_says_where_it_writes(capsys):
    with pytest.raises(SystemExit) as stopped:
        dqn.main(["--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    assert "learning_curve.png" in text
    assert "runs/dqn" in text


def play(envs, action, steps, key=0):
    """Step outcomes under one constant action, and the observations before and after each."""

    def iteration(states, key):
        before = states.obs
        states, outcome = envs.step(key, states, jnp.full(envs.num_envs, action, jnp.int32))
        return states, (before, outcome, states.obs)

    reset_key, step_key = jax.random.split(jax.random.key(key))
    start = envs.reset(reset_key)
    return jax.jit(lambda start: jax.lax.scan(iteration, start, jax.random.split(step_key, steps)))(
        start
    )[1]


def test_the_last_observation_of_an_episode_is_stored_not_the_first_of_the_next():
    before, outcome, after = play(Environments("CartPole-v1", 3), action=1, steps=40)
    ended = np.asarray(outcome.terminated)
    assert ended.any(axis=0).all()
    last = np.asarray(outcome.next_obs)
    fell = (np.abs(last[..., 2]) > 12 * 2 * math.pi / 360) | (np.abs(last[..., 0]) > 2.4)
    np.testing.assert_array_equal(ended, fell)
    assert np.abs(np.asarray(after)[ended]).max() <= 0.05
    np.testing.assert_array_equal(last[~ended], np.asarray(after)[~ended])
    np.testing.assert_array_equal(np.asarray(before)[1:], np.asarray(after)[:-1])
    lengths = [np.diff(np.flatnonzero(column), prepend=-1) for column in ended.T]
    returns = np.asarray(outcome.episode_return)
    for i, length in enumerate(lengths):
        np.testing.assert_array_equal(returns[ended[:, i], i], length)


def test_a_time_limit_truncates_and_does_not_terminate():
    # Coasting never leaves the valley, so only the limit of 200 steps ends an episode.
    _, outcome, _ = play(Environments("MountainCar-v0", 2), action=1, steps=401)
    assert not np.asarray(outcome.terminated).any()
    np.testing.assert_array_equal(np.flatnonzero(np.asarray(outcome.truncated)[:, 0]), [199, 399])


@pytest.mark.parametrize("name", NAMES)
def test_every_environment_can_be_played(name):
    envs = Environments(name, 2)
    states = jax.eval_shape(envs.reset, jax.random.key(0))
    stepped, outcome = jax.eval_shape(
        envs.step, jax.random.key(0), states, jax.ShapeDtypeStruct((2,), jnp.int32)
    )
    # The same types again, or a scan over steps would not trace.
    assert jax.tree.map(lambda x: (x.shape, x.dtype, x.weak_type), states) == jax.tree.map(
        lambda x: (x.shape, x.dtype, x.weak_type), stepped
    )
    chex.assert_shape(outcome.next_obs, (2, *envs.obs_example.shape))
    assert outcome.next_obs.dtype == (jnp.bool_ if name in MINATAR else jnp.float32)
    env, params = gymnax.make(name)
    assert envs.num_actions == env.action_space(params).n


def test_minatar_observations_lose_nothing_as_bool():
    env, params = gymnax.make("Breakout-MinAtar")
    with jax.numpy_dtype_promotion("standard"):
        obs, _ = env.reset(jax.random.key(0), params)
    np.testing.assert_array_equal(obs, np.asarray(obs, bool))


def agent(**changed):
    return dqn.Agent(dqn.Config.make(**{"hidden": 16, "num_envs": 2, **changed}))


def windows(learner, rows):
    """Random steps with random ends of episodes, and where the last step of each return is."""
    random = np.random.default_rng(0)
    shape, obs = (rows, learner.config.window), learner.envs.obs_example
    terminated = random.random(shape) < 0.25
    window = {
        "obs": random.random((*shape, *obs.shape)) < 0.5,
        "next_obs": random.random((*shape, *obs.shape)) < 0.5,
        "action": random.integers(learner.envs.num_actions, size=shape, dtype=np.int32),
        "reward": random.normal(size=shape).astype(np.float32),
        "terminated": terminated,
        "truncated": ~terminated & (random.random(shape) < 0.25),
    }
    return {k: v.astype(obs.dtype) if "obs" in k else v for k, v in window.items()}


@pytest.mark.parametrize(
    ("n", "stack", "env"),
    [(1, 1, "CartPole-v1"), (2, 3, "Breakout-MinAtar")],
)
def test_td_error_is_that_of_one_loop_per_window(n, stack, env):
    learner = agent(env=env, n_step=n, frame_stack=stack, discount=0.9, hidden=16)
    window, rows = windows(learner, 24), []
    for row in range(24):
        at = lambda name, row=row: window[name][row]  # noqa: E731
        ends = at("terminated") | at("truncated")

        def frames(t, at=at, ends=ends):
            """The last frames up to step ``t``, the first of the episode repeated."""
            begin = max([s + 1 for s in range(t) if ends[s]], default=0)
            return [at("obs")[max(s, begin)] for s in range(t + 1 - stack, t + 1)]

        now = last = stack - 1
        total, weight = at("reward")[now], 0.9
        while last + 1 < now + n and not ends[last]:
            last += 1
            total, weight = total + weight * at("reward")[last], weight * 0.9
        weight = 0.0 if at("terminated")[last] else weight
        after = [*frames(last)[1:], at("next_obs")[last]]
        rows.append(
            (np.stack(frames(now), -1), np.stack(after, -1), at("action")[now], total, weight)
        )
    before, after, action, total, weight = map(np.stack, zip(*rows, strict=True))
    assert (weight == 0).any()
    assert len(np.unique(weight)) == n + 1
    seen = jnp.zeros((1, *before.shape[1:-2], before.shape[-2] * stack))
    params, other = (learner.network.init(jax.random.key(i), seen) for i in (1, 2))
    values = jax.jit(learner.values)
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


def test_the_agent_sees_the_frames_that_it_learns_from():
    learner = agent(env="Breakout-MinAtar", frame_stack=3, warmup=64, capacity=160, batch_size=8)

    def step(state, _):
        return learner.interact(state, 1.0)[0], state.frames

    @jax.jit
    def play(key):
        return jax.lax.scan(step, learner.init(key), length=48)

    state, seen = play(jax.random.key(0))
    # After 32 random steps in each environment.
    steps = jax.tree.map(lambda leaf: leaf[:, 32:], state.buffer.data)
    assert steps["terminated"].any()
    stacks = jaxbuf.stack_frames(steps, 3)
    seen, complete = np.moveaxis(np.asarray(seen), 0, 1), np.asarray(stacks.complete)
    np.testing.assert_array_equal(seen[complete], np.asarray(stacks.frames)[complete])


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
    np.testing.assert_allclose(
        [learner.epsilon(step) for step in steps], [1.0, 0.55, 0.1, 0.1, 0.1], rtol=1e-6
    )
    np.testing.assert_allclose(
        [learner.beta(step) for step in steps], [0.4, 0.55, 0.7, 1.0, 1.0], rtol=1e-6
    )


@pytest.mark.parametrize(
    ("epsilon", "low", "high"), [(0.0, 0, 0), (1.0, 900, 1100), (0.5, 400, 600)]
)
def test_share_of_random_actions(epsilon, low, high):
    learner = agent()
    obs = jnp.ones((2000, 4))
    params = learner.network.init(jax.random.key(0), obs)
    frames = learner.first_frames(obs)
    best = int(jnp.argmax(learner.values(params, frames[:1])))
    action = learner.act(params, frames, epsilon, jax.random.key(1))
    # Half of the random actions are the best one.
    assert low <= int((action != best).sum()) <= high


def test_dense_over_patches_is_a_convolution():
    image = jax.random.normal(jax.random.key(0), (2, 10, 10, 4))
    kernel = jax.random.normal(jax.random.key(1), (3, 3, 4, 16))
    expected = nn.Conv(16, (3, 3), padding="VALID", use_bias=False).apply(
        {"params": {"kernel": kernel}}, image
    )
    actual = _network.patches(image) @ kernel.reshape(-1, 16)
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)

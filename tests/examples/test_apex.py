"""The example of actors in other processes: it learns, and ends well however it ends."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import apex
from tests.models import trajectory as reference
from tests.programs.run_example import finish, logged

pytestmark = pytest.mark.usefixtures("promotion")


def words(out, **changed):
    options = {"--rollout": 8, "--warmup": 200, "--batch-size": 32, "--out": out, **changed}
    return [str(word) for pair in options.items() for word in pair]


@pytest.fixture(scope="module")
def learned(tmp_path_factory, promotion):
    """A run for a fifth of the default, with one actor, and one of a few steps that resumes it."""
    out = tmp_path_factory.mktemp("runs") / "learned"
    argv = words(out, **{"--steps": 20_000, "--actors": 1, "--batch-size": 128, "--warmup": 500})
    first = finish(apex.main, argv, out)
    return first, finish(apex.main, [*argv[:-2], "--steps", "20_400", "--resume"], out)


def test_it_learns(learned):
    first, _ = learned
    header, _, row, _ = first.out.splitlines()[:4]
    assert " ".join(header.split()) == "seed greedy return return in training steps steps/s time"
    # A random policy gets about 22.
    assert float(row.split()[1]) > 100
    returns = np.asarray([line["return"] for line in logged(first.folder)])
    assert np.nanmean(returns[:5]) < np.nanmean(returns[-5:])
    assert (first.folder / "learning_curve.png").read_bytes().startswith(b"\x89PNG")


def test_each_transition_is_drawn_as_often_as_asked(learned):
    last = logged(learned[0].folder)[-1]
    ratio = last["holder/samples"] / (last["holder/inserts"] - 500)
    assert abs(ratio - 8) < 8 * 0.05
    assert last["holder/seconds_to_sample"] > 0


def test_a_resumed_run_goes_on_with_its_buffer(learned):
    first, second = learned
    lines = logged(first.folder)
    assert [line["step"] for line in lines][49:] == [20_000, 20_398, 20_796]
    # Two parts of 400 each; the limiter lets 96 more or fewer be there at either end.
    assert abs(lines[-1]["holder/inserts"] - lines[49]["holder/inserts"] - 800) <= 2 * 96
    assert lines[-1]["buffer/size"] > lines[49]["buffer/size"] > 19_000
    assert "20,796" in second.out


def children(process):
    """The processes that a process has started to act for it."""
    listed = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    command = {child: Path(f"/proc/{child}/cmdline").read_text() for child in listed}
    return [int(child) for child in listed if "spawn_main" in command[child]]


def runs(process):
    """Returns whether a process has not ended."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def wait(until, seconds=120):
    end = time.monotonic() + seconds
    while not until():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds processes as Linux does")
@pytest.mark.parametrize("how", ["ctrl_c", "an_actor_is_killed", "the_learner_is_killed"])
def test_nothing_runs_on_after_the_end(how, tmp_path):
    count = 2 if how == "an_actor_is_killed" else 1
    more = {"--steps": 40_000, "--samples-per-insert": 1, "--actors": count}
    argv = words(tmp_path / "run", **more)
    with (tmp_path / "errors").open("w") as errors:
        learner = subprocess.Popen(
            [sys.executable, apex.__file__, *argv],
            stderr=errors,
            start_new_session=True,
        )
    wait(lambda: len(children(learner.pid)) == count)
    actors = children(learner.pid)
    if how != "ctrl_c":  # which may come while they begin
        wait(lambda: (tmp_path / "run" / "checkpoint").exists())
    if how == "ctrl_c":
        os.killpg(learner.pid, signal.SIGINT)
    else:
        os.kill(actors[0] if "actor" in how else learner.pid, signal.SIGKILL)
    status = learner.wait(timeout=60)
    wait(lambda: not any(map(runs, actors)))
    printed = (tmp_path / "errors").read_text()
    assert "Traceback" not in printed
    if how == "ctrl_c":
        assert status == 130
        assert "interrupted; go on from the last checkpoint with --resume" in printed
    elif how == "an_actor_is_killed":
        assert status == 1
        assert "error: actor 0 ended with exit code -9; go on from the last" in printed
    else:
        assert status == -signal.SIGKILL


def test_rows_are_n_step_transitions_of_one_episode():
    config = apex.Config(rollout=5, n_step=3, num_envs=2, discount=0.9)
    agent = apex.Agent(config, apex.make_envs(config.env, 1))
    random = np.random.default_rng(0)
    at = np.arange(16).reshape(2, 8)
    ends = np.zeros((2, 2, 8), bool)
    ends[0, 0, 2], ends[1, 1, 3] = True, True  # one episode terminates, and one is cut off
    mask = np.ones((2, 8), bool)
    mask[0, 3], mask[1, 4] = False, False  # resets, in the step after
    window = {
        "obs": np.repeat(at[..., None], 4, axis=-1).astype(np.float32),
        "next_obs": np.repeat(at[..., None] + 0.5, 4, axis=-1).astype(np.float32),
        "action": random.integers(0, 2, (2, 8)).astype(np.int32),
        "reward": random.normal(size=(2, 8)).astype(np.float32),
        "terminated": ends[0],
        "truncated": ends[1],
        "mask": mask,
    }
    params = agent.init()["learner"].params
    rows = agent.rows(params, window)
    items = rows["items"]
    np.testing.assert_array_equal(rows["mask"], mask[:, :5].ravel())
    np.testing.assert_array_equal(items["action"], window["action"][:, :5].ravel())
    for row, (env, t) in enumerate(np.ndindex(2, 5)):
        flags = window["terminated"][env], window["truncated"][env]
        total, left, index = reference.n_step(window["reward"][env], *flags, t, 3, 0.9)
        assert items["reward"][row] == pytest.approx(total, rel=1e-5, abs=1e-6)
        assert items["discount"][row] == pytest.approx(left, rel=1e-5)
        assert items["obs"][row, 0] == at[env, t]
        assert items["next_obs"][row, 0] == at[env, index - 1] + 0.5
    value = agent.network.apply(params, items["obs"])[jnp.arange(10), items["action"]]
    following = agent.network.apply(params, items["next_obs"]).max(axis=1)
    error = value - items["reward"] - items["discount"] * following
    np.testing.assert_allclose(rows["priority"], jnp.abs(error), rtol=1e-4, atol=1e-5)


def test_actors_explore_from_much_to_hardly():
    config = apex.Config()
    agent = apex.Agent(config, apex.make_envs(config.env, 1))
    params, obs = agent.init()["learner"].params, jnp.zeros((2_000, 4))
    greedy = agent.act(params, obs, 0.0, jax.random.key(0))
    mixed = agent.act(params, obs, 0.4, jax.random.key(0))
    # Half of the random ones are greedy by chance.
    assert float(jnp.mean(mixed != greedy)) == pytest.approx(0.2, abs=0.03)

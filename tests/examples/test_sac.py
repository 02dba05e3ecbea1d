"""The SAC example: it learns, resumes with all it knows, and says what is wrong."""

import json

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbuf
import sac
from jaxbuf.interop import transition_like
from tests.programs.run_example import check_files, error_of, finish, interrupt, logged
from tests.programs.tensorboard import events_of

pytestmark = pytest.mark.usefixtures("promotion")

SMALL = [
    *("--steps", "1200", "--num-envs", "2", "--updates", "1", "--warmup", "300"),
    *("--batch-size", "16", "--hidden", "8", "--eval-episodes", "2"),
]


def words(out, *more):
    return [*SMALL, "--out", str(out), *more]


def make(**changed):
    """An agent, and its state before training."""
    config = sac.Config(**{"hidden": 8, "batch_size": 16, "capacity": 512, **changed})
    agent = sac.Agent(config, transition_like(sac.make_envs(config.env, config.num_envs)))
    return agent, agent.init()


def final_state(out):
    """The training state of the checkpoint."""
    options = json.loads((out / "run.json").read_text())["options"]
    return jaxbuf.load(out / "checkpoint", make(**options)[1])


def rows(count, **changed):
    """Random transitions of Pendulum; ``changed`` has values that all of them share."""
    random = np.random.default_rng(0)
    shared = {"reward": -1.0, "terminated": False, "truncated": False, **changed}
    return {
        "obs": random.normal(size=(count, 3)).astype(np.float32),
        "action": random.uniform(-1, 1, (count, 1)).astype(np.float32),
        "reward": np.full(count, shared["reward"], np.float32),
        "terminated": np.full(count, shared["terminated"]),
        "truncated": np.full(count, shared["truncated"]),
        "next_obs": random.normal(size=(count, 3)).astype(np.float32),
    }


@pytest.fixture(scope="module")
def learned(tmp_path_factory, promotion):
    """A run for half as long as the default."""
    out = tmp_path_factory.mktemp("runs") / "learned"
    return finish(sac.main, ["--steps", "10_000", "--out", str(out)], out)


def test_it_learns(learned):
    header, _, row, _ = learned.out.splitlines()[:4]
    assert " ".join(header.split()) == "seed greedy return return in training steps steps/s time"
    # A random policy gets about -1200, one that keeps the pendulum upright about -150.
    assert float(row.split()[1]) > -250
    returns = np.asarray([line["return"] for line in logged(learned.folder)])
    assert np.nanmean(returns[:20]) < -700
    assert np.nanmean(returns[-20:]) > -300


def test_programs_are_compiled_in_the_first_steps_only(learned):
    # 1,000 random steps, and the 100 after them: what learns is compiled there.
    assert " s for the first 1,100 steps, in which programs are compiled, " in learned.out


def test_a_run_leaves_its_files(learned):
    check_files(learned, "learning curve", ["learning_curve"], "sac", steps=10_000)
    assert "steps/s, return" in learned.err
    state = final_state(learned.folder)
    assert int(state.step) == 10_000
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state.params))


def test_resets_take_no_slots(learned):
    # Of 2,500 rows of each environment, every 201st is a reset, after the 200 steps of an episode.
    buffer = final_state(learned.folder).buffer
    assert int(buffer.size) == 4 * (2_500 - 12)
    assert int(buffer.data["truncated"].sum()) == 4 * 12
    assert not buffer.data["terminated"].any()
    obs, after = (np.asarray(buffer.data[name])[: int(buffer.size)] for name in ("obs", "next_obs"))
    # Within a step the pendulum turns by at most 8 / 20 of a radian, also in the last one.
    cosine = np.sum(obs[:, :2] * after[:, :2], axis=1)
    assert cosine.min() > np.cos(0.41)


def test_the_log_tells_how_training_went(learned):
    lines = logged(learned.folder)
    assert [line["step"] for line in lines] == list(range(100, 10_001, 100))
    # Learning begins after 1,000 steps.
    assert [np.isnan(line["critic_loss"]) for line in lines] == [True] * 10 + [False] * 90
    assert lines[-1]["temperature"] < 0.5 < lines[10]["temperature"] <= 1
    assert lines[-1]["buffer/size"] == 9_952


def test_the_same_command_gives_the_same_log(tmp_path):
    for name in ("one", "other"):
        assert sac.main(words(tmp_path / name, "--tensorboard")) == 0
    one, other = (tmp_path / name for name in ("one", "other"))
    assert (one / "log.csv").read_text() == (other / "log.csv").read_text()
    np.testing.assert_equal(events_of(one / "tensorboard"), events_of(other / "tensorboard"))


def test_an_interrupted_run_goes_on(tmp_path, monkeypatch, capsys):
    interrupt(sac.main, words(tmp_path, "--sampler", "prioritized"), 57, monkeypatch, capsys)
    before = final_state(tmp_path)
    assert int(before.step) == 600
    assert sac.main(["--out", str(tmp_path), "--resume"]) == 0
    after = final_state(tmp_path)
    assert int(after.step) == 1_200
    assert [line["step"] for line in logged(tmp_path)] == list(range(12, 1_201, 12))
    # It has kept what it had seen; the new episodes begin with no reset, so later rows differ.
    size = int(before.buffer.size)
    assert size > 590
    for old, new in zip(*(jax.tree.leaves(s.buffer.data) for s in (before, after)), strict=True):
        np.testing.assert_array_equal(old[:size], new[:size])
    assert int(after.buffer.size) > 2 * size - 10
    table = capsys.readouterr().out.splitlines()
    assert table[2].split()[3] == "1,200"
    message = error_of(sac, ["--out", str(tmp_path), "--resume", "--steps", "1000"], capsys)
    assert "only --steps may grow" in message


def test_episodes_of_a_resumed_run_are_new(tmp_path):
    assert sac.main(words(tmp_path)) == 0
    first = final_state(tmp_path).buffer.latest(1).data["obs"]
    assert sac.main(words(tmp_path, "--steps", "1600", "--resume")) == 0
    data = final_state(tmp_path).buffer.data
    begins = np.asarray(data["obs"])[[0, 1, 1_194, 1_195]]
    assert len(np.unique(begins, axis=0)) == 4
    assert first.shape == (1, 3)


@pytest.mark.parametrize("end", ["terminated", "truncated"])
def test_only_a_time_limit_has_a_value_after_it(end):
    agent, state = make()
    state = state.replace(buffer=state.buffer.add(rows(64, **{end: True})))
    other = state.replace(target=jax.tree.map(lambda leaf: leaf + 1, state.target))
    update = jax.jit(agent.update)
    (_, log), (_, changed) = (update(s, jax.random.key(1)) for s in (state, other))
    assert (float(log["critic_loss"]) == float(changed["critic_loss"])) == (end == "terminated")


def test_the_target_is_reward_where_an_episode_terminated():
    agent, state = make()
    row = rows(1, terminated=True, reward=-3.0)
    state = state.replace(buffer=state.buffer.add(row))
    values = agent.value(state.params["critics"], row["obs"], row["action"])
    assert values.shape == (2, 1)
    assert values[0] != values[1]
    _, log = jax.jit(agent.update)(state, jax.random.key(1))
    np.testing.assert_allclose(log["critic_loss"], np.sum((values + 3) ** 2), rtol=1e-5)


def test_the_target_takes_the_smaller_value_and_the_entropy():
    agent, state = make(discount=0.5)
    row = rows(1, truncated=True, reward=2.0)
    state = state.replace(
        buffer=state.buffer.add(row),
        target=jax.tree.map(lambda leaf: leaf + 0.1, state.target),
        params={**state.params, "log_temperature": jnp.log(jnp.float32(0.3))},
    )
    _, log = jax.jit(agent.update)(state, key := jax.random.key(1))
    # The same key draws the same actions for all 16 rows of the batch.
    batch = {name: np.repeat(leaf, 16, axis=0) for name, leaf in row.items()}
    _, next_key, _ = jax.random.split(key, 3)
    action, log_prob = agent.draw(state.params["actor"], batch["next_obs"], next_key)
    following = np.min(agent.value(state.target, batch["next_obs"], action), axis=0)
    target = 2.0 + 0.5 * (following - 0.3 * log_prob)
    values = agent.value(state.params["critics"], batch["obs"], batch["action"])
    expected = np.mean(np.sum((values - target) ** 2, axis=0))
    np.testing.assert_allclose(log["critic_loss"], expected, rtol=1e-4)


def test_log_probabilities_are_those_of_the_density():
    agent, state = make()
    actor, obs = state.params["actor"], rows(1)["obs"]
    actor["params"]["Dense_2"]["bias"] = jnp.asarray([1.0, 0.0])  # where tanh bends
    many = np.repeat(obs, 50_000, axis=0)
    action, log_prob = map(np.asarray, agent.draw(actor, many, jax.random.key(0)))
    # The mean of 1 / density over the draws within a bin, and 0 elsewhere, is the bin's width.
    edges = np.linspace(0.6, 0.88, 8)
    total, _ = np.histogram(action[:, 0], edges, weights=np.exp(-log_prob))
    np.testing.assert_allclose(total / len(many), np.diff(edges), rtol=0.1)


def test_log_probabilities_are_finite_at_the_bounds():
    agent, state = make()
    actor = jax.tree.map(lambda leaf: 100 * leaf + 100, state.params["actor"])
    action, log_prob = agent.draw(actor, rows(50)["obs"], jax.random.key(0))
    assert np.abs(action).max() == 1
    assert np.isfinite(log_prob).all()


def test_without_a_key_actions_are_the_most_likely_ones():
    agent, state = make()
    obs = rows(4)["obs"]
    one, other = (agent.act(state.params, obs, key) for key in jax.random.split(jax.random.key(0)))
    assert not np.array_equal(one, other)
    mean = jnp.split(agent.actor.apply(state.params["actor"], obs), 2, axis=-1)[0]
    np.testing.assert_allclose(agent.act(state.params, obs, None), np.tanh(mean), rtol=1e-6)


@pytest.mark.parametrize("sampler", ["uniform", "prioritized"])
def test_the_buffer_is_updated_in_place(sampler):
    agent, state = make(sampler=sampler, capacity=20_000)
    step = lambda state, *args: agent.add_and_update(state, *args, updates=2)  # noqa: E731
    jaxbuf.testing.assert_no_copy(step, state, rows(4), np.ones(4, bool))


def test_learning_updates_priorities():
    agent, state = make(sampler="prioritized")
    state, _ = agent.learn(state, rows(64), np.ones(64, bool), updates=0)
    metrics = state.buffer.metrics()
    assert metrics["priority_min"] == metrics["priority_max"]
    assert int(state.step) == 64
    state, _ = agent.learn(state, rows(4), np.arange(4) < 1, updates=3)
    metrics = state.buffer.metrics()
    assert metrics["priority_min"] < metrics["priority_max"]
    assert int(state.buffer.size) == 65


def test_the_temperature_follows_the_entropy():
    agent, state = make()
    # Without random actions the entropy is far below -1, so the temperature has to rise.
    still = state.params["actor"]
    still["params"]["Dense_2"]["bias"] = jnp.asarray([0.0, -5.0])
    state = state.replace(
        params={**state.params, "actor": still}, buffer=state.buffer.add(rows(64))
    )
    after, log = jax.jit(agent.update)(state, jax.random.key(1))
    assert log["entropy"] < -1
    assert after.params["log_temperature"] > state.params["log_temperature"]


@pytest.mark.parametrize("name", ["Pendulum-v1", "MountainCarContinuous-v0"])
def test_actions_from_minus_one_to_one_span_those_of_the_environment(name):
    envs, plain = sac.make_envs(name, 2), gymnasium.make_vec(name, 2)
    for bound in (-1, 1):
        action = np.full(envs.action_space.shape, bound, np.float32)
        space = plain.action_space
        of_plain = np.where(bound == 1, space.high, space.low)
        (envs.reset(seed=0), plain.reset(seed=0))
        for _ in range(3):
            (obs, *_), (expected, *_) = envs.step(action), plain.step(of_plain)
            np.testing.assert_allclose(obs, expected, rtol=1e-6)


def test_another_environment(tmp_path, capsys):
    changed = ["--env", "MountainCarContinuous-v0", "--steps", "400", "--sampler", "prioritized"]
    assert sac.main(words(tmp_path, *changed)) == 0
    assert capsys.readouterr().out.splitlines()[2].split()[3] == "400"


def test_returns_are_those_of_whole_episodes():
    returns = sac.Returns(2)
    assert np.isnan(returns.mean())
    returns.add(np.array([1.0, 10.0]), np.array([False, False]))
    returns.add(np.array([2.0, 20.0]), np.array([True, False]))
    returns.add(np.array([4.0, 40.0]), np.array([False, True]))
    assert returns.mean() == (3 + 70) / 2
    returns.add(np.array([8.0, 80.0]), np.array([True, True]))
    assert returns.mean() == (12 + 80) / 2
    assert np.isnan(returns.mean())

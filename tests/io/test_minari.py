"""Minari's datasets come in and go out unchanged."""

import dataclasses
import sys

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbuf

# Minari warns of metadata that a test has no use for.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")

STEP = {
    "obs": jnp.zeros(2),
    "action": jnp.int32(0),
    "reward": jnp.float32(0),
    "terminated": jnp.bool_(False),
    "truncated": jnp.bool_(False),
}
TRANSITION = {**STEP, "next_obs": jnp.zeros(2)}


@dataclasses.dataclass
class Episode:
    """The common fields of Minari's ``EpisodeData`` and ``EpisodeBuffer``."""

    id: int
    observations: np.ndarray
    actions: np.ndarray
    rewards: np.ndarray
    terminations: np.ndarray
    truncations: np.ndarray


def episode(number, length, ending="terminated"):
    ids = 100 * number + np.arange(length + 1)
    last = np.arange(length) == length - 1
    return Episode(
        id=number,
        observations=np.stack([ids, -ids], axis=1).astype(np.float64),
        actions=ids[:-1].astype(np.int64),
        rewards=ids[:-1] / 2,
        terminations=last & (ending == "terminated"),
        truncations=last & (ending == "truncated"),
    )


EPISODES = [episode(1, 5), episode(2, 3, "truncated"), episode(3, 7), episode(4, 2, "open")]


def arrays(episode):
    names = ("observations", "actions", "rewards", "terminations", "truncations")
    return {name: getattr(episode, name) for name in names}


def test_an_item_buffer_gets_every_transition():
    buffer = jaxbuf.ItemBuffer.create(TRANSITION, 32)
    buffer = jaxbuf.from_minari(EPISODES, buffer, rows_at_a_time=4)
    assert int(buffer.size) == 17
    data = {name: np.asarray(leaf)[:17] for name, leaf in buffer.data.items()}
    ids = np.concatenate([e.actions for e in EPISODES])
    np.testing.assert_array_equal(data["action"], ids)
    np.testing.assert_array_equal(data["obs"], np.stack([ids, -ids], axis=1))
    np.testing.assert_array_equal(data["next_obs"], np.stack([ids + 1, -ids - 1], axis=1))
    np.testing.assert_array_equal(data["reward"], ids / 2)
    assert ids[data["terminated"]].tolist() == [104, 306]
    # Data that end without an end are cut off there.
    assert ids[data["truncated"]].tolist() == [202, 401]


def test_a_trajectory_buffer_gets_whole_episodes():
    buffer = jaxbuf.TrajectoryBuffer.create(STEP, 2, 16, sequence_length=2)
    buffer = jaxbuf.from_minari(EPISODES, buffer, rows_at_a_time=4)
    assert buffer.occupancy.held.tolist() == [7, 10]
    actions = np.asarray(buffer.data["action"]).reshape(2, 16)
    assert actions[0, :7].tolist() == [*range(100, 105), 400, 401]
    assert actions[1, :10].tolist() == [*range(200, 203), *range(300, 307)]


def test_without_minari_writing_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "minari", None)
    steps = jax.tree.map(lambda leaf: np.zeros((3, *leaf.shape), leaf.dtype), STEP)
    with pytest.raises(ImportError, match=r"pip install 'jaxbuf\[minari\]'"):
        jaxbuf.to_minari("test-v0", steps)
    with pytest.raises(ValueError, match="source has no 'reward'"):
        jaxbuf.to_minari("test-v0", {"obs": np.zeros(3), "action": np.zeros(3)})
    with pytest.raises(ValueError, match="source holds no steps"):
        jaxbuf.to_minari("test-v0", jax.tree.map(lambda leaf: leaf[:0], steps))


@pytest.fixture
def minari(tmp_path, monkeypatch):
    minari = pytest.importorskip("minari")
    pytest.importorskip("h5py")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    return minari


def spaces():
    import gymnasium

    return {
        "observation_space": gymnasium.spaces.Box(-1e4, 1e4, (2,), np.float64),
        "action_space": gymnasium.spaces.Discrete(1000),
    }


@pytest.mark.parametrize("kind", ["items", "trajectories"])
def test_what_was_written_is_read_back(minari, kind):
    if kind == "items":
        buffer = jaxbuf.ItemBuffer.create(TRANSITION, 64)
    else:
        buffer = jaxbuf.TrajectoryBuffer.create(TRANSITION, 1, 64)
    buffer = jaxbuf.from_minari(EPISODES, buffer)
    written = jaxbuf.to_minari("jaxbuf/test-v0", buffer, **spaces())
    assert (written.total_episodes, written.total_steps) == (4, 17)
    read = minari.load_dataset("jaxbuf/test-v0")
    for have, want in zip(read.iterate_episodes(), EPISODES[:3], strict=False):
        chex.assert_trees_all_equal(arrays(have), arrays(want))
    # The last one is cut off now, as the buffer said.
    assert read[3].truncations.tolist() == [False, True]
    again = jaxbuf.from_minari(read, buffer.clear())
    chex.assert_trees_all_equal(again.data, buffer.data)


@pytest.mark.parametrize("data_format", ["hdf5", "arrow"])
def test_numbers_have_the_dtypes_of_the_spaces_and_images_are_exact(minari, data_format):
    gymnasium = pytest.importorskip("gymnasium")
    if data_format == "arrow":
        pytest.importorskip("pyarrow")
    shapes = {"stack": (8, 8, 4), "gray": (8, 8, 1), "color": (8, 8, 3)}
    image = {name: gymnasium.spaces.Box(0, 255, shape, np.uint8) for name, shape in shapes.items()}
    random = np.random.default_rng(0)
    obs = {name: random.integers(0, 256, (6, *shape), np.uint8) for name, shape in shapes.items()}
    obs["state"] = random.normal(size=(6, 3)).astype(np.float32)
    steps = {
        "obs": obs,
        "action": random.integers(0, 2, (6, 2)).astype(np.int32),
        "reward": np.arange(6, dtype=np.float32),
        "next_obs": obs,
        "terminated": np.arange(6) % 3 == 2,
        "truncated": np.zeros(6, bool),
    }

    class Env(gymnasium.Env):
        observation_space = gymnasium.spaces.Dict(
            image | {"state": gymnasium.spaces.Box(-9, 9, (3,), np.float64)}
        )
        action_space = gymnasium.spaces.MultiDiscrete([2, 2])

    written = jaxbuf.to_minari("jaxbuf/exact-v0", steps, env=Env(), data_format=data_format)
    read = minari.load_dataset("jaxbuf/exact-v0")
    assert (written.total_steps, read.total_steps) == (6, 6)
    for number, episode in enumerate(read.iterate_episodes()):
        rows = slice(3 * number, 3 * number + 3)
        chex.assert_trees_all_equal(
            jax.tree.map(lambda leaf: leaf[:-1], episode.observations),
            {name: leaf[rows] for name, leaf in obs.items()},
        )
        np.testing.assert_array_equal(episode.actions, steps["action"][rows])
        assert episode.observations["state"].dtype == np.float64
        assert episode.actions.dtype == np.int64


def test_without_next_observations_the_last_row_of_an_episode_is_one(minari):
    steps = {
        "obs": np.arange(7.0)[:, None] * [1, 1],
        "action": np.arange(7),
        "reward": np.arange(7.0),
        "terminated": np.arange(7) == 2,
    }
    written = jaxbuf.to_minari("jaxbuf/test-v1", steps, **spaces())
    first, second = written.iterate_episodes()
    assert first.observations[:, 0].tolist() == [0, 1, 2, 2]
    assert first.terminations.tolist() == [False, False, True]
    assert second.observations[:, 0].tolist() == [3, 4, 5, 6]
    assert second.actions.tolist() == [3, 4, 5]
    assert second.truncations.tolist() == [False, False, True]


def dict_episode(number, length, infos=None):
    """An episode whose observations are text, a number and a picture, in lists and arrays."""
    plain = episode(number, length)
    ids = 100 * number + np.arange(length + 1)
    observations = {
        "mission": [f"go to {i}" for i in ids],
        "image": np.stack([np.full((2, 2), i % 256, np.uint8) for i in ids]),
        "at": {"x": [float(i) for i in ids], "y": -ids},
    }
    new = dataclasses.replace(plain, observations=observations)
    new.infos = {} if infos is None else infos
    return new


def test_observations_that_the_buffer_does_not_have_are_left_out():
    episodes = [dict_episode(1, 4), dict_episode(2, 3)]
    ids = np.concatenate([e.actions for e in episodes])
    item = {"action": jnp.int32(0), "terminated": jnp.bool_(False)}
    buffer = jaxbuf.from_minari(episodes, jaxbuf.ItemBuffer.create(item, 16))
    assert buffer.data["action"][:7].tolist() == ids.tolist()
    obs = {"at": {"x": jnp.float32(0)}}
    item = {"obs": {**obs, "image": jnp.zeros((2, 2), jnp.uint8)}, "next_obs": obs}
    buffer = jaxbuf.from_minari(episodes, jaxbuf.ItemBuffer.create(item, 16))
    assert buffer.data["obs"]["at"]["x"][:7].tolist() == ids.tolist()
    assert buffer.data["obs"]["image"][:7, 1, 1].tolist() == (ids % 256).tolist()
    assert buffer.data["next_obs"]["at"]["x"][:7].tolist() == (ids + 1).tolist()


@pytest.mark.parametrize("kind", ["items", "trajectories"])
def test_an_episode_without_its_last_observation_is_named_or_skipped(kind):
    short = episode(7, 4)
    short.observations = short.observations[:-1]
    episodes = [EPISODES[0], short, EPISODES[1]]

    def create(example):
        if kind == "items":
            return jaxbuf.ItemBuffer.create(example, 32)
        return jaxbuf.TrajectoryBuffer.create(example, 1, 32)

    message = (
        r"episode\['next_obs'\] needs 5 rows, but there are 4 .*the last one is missing.*"
        r'pass incomplete="skip".*episode 1 of dataset, with id 7'
    )
    with pytest.raises(ValueError, match=message):
        jaxbuf.from_minari(episodes, create(TRANSITION))
    buffer = jaxbuf.from_minari(episodes, create(TRANSITION), incomplete="skip")
    assert int(buffer.size) == 8
    assert not np.isin(buffer.data["action"], np.arange(700, 800)).any()
    # Without next observations nothing is missing.
    assert int(jaxbuf.from_minari(episodes, create(STEP)).size) == 12
    short.observations = short.observations[:-1]
    with pytest.raises(ValueError, match=r"episode\['obs'\] needs 4 rows, but there are 3"):
        jaxbuf.from_minari(episodes, create(STEP))
    assert int(jaxbuf.from_minari(episodes, create(STEP), incomplete="skip").size) == 8
    with pytest.raises(ValueError, match="incomplete is 'drop'; choose from"):
        jaxbuf.from_minari(episodes, create(STEP), incomplete="drop")


ZERO = jnp.float32(0)
DICTS, DEEP = [dict_episode(1, 4)], {"deep": {"seed": jnp.int32(0)}}
FIRST = r".*episode 0 of dataset, with id 1"


@pytest.mark.parametrize(
    ("episodes", "item", "message"),
    [
        (EPISODES, jnp.zeros(2), "expected a dict with any of obs, action"),
        (EPISODES, {"observation": jnp.zeros(2)}, "expected a dict with any of obs, action"),
        (EPISODES, {"obs": jnp.zeros(3)}, r"episode\['obs'\] has shape \(5, 2\)"),
        (EPISODES, {"obs": {"x": ZERO}}, r"\['obs'\] is an array .*; expected a dict with 'x'"),
        (EPISODES, {"action": ZERO, "infos": DEEP}, "has no infos" + FIRST),
        (DICTS, {"obs": {"at": {"z": ZERO}}}, r"\['obs'\]\['at'\] has no 'z'.*'x', 'y'" + FIRST),
        (DICTS, {"obs": {"mission": ZERO}}, r"episode\['obs'\]\['mission'\] is an array <U9"),
        (DICTS, {"infos": DEEP}, r"episode\['infos'\] has no 'deep'; there is nothing"),
    ],
)
def test_what_the_dataset_does_not_have_is_named(episodes, item, message):
    with pytest.raises(ValueError, match=message):
        jaxbuf.from_minari(episodes, jaxbuf.ItemBuffer.create(item, 16))


def test_infos_belong_to_the_observation_that_they_came_with():
    infos = {"success": np.arange(5) > 2, "text": ["a"] * 5, "deep": {"seed": np.arange(5)}}
    item = {"action": jnp.int32(0), "infos": DEEP, "next_infos": {"success": jnp.bool_(False)}}
    buffer = jaxbuf.ItemBuffer.create(item, 8)
    buffer = jaxbuf.from_minari([dict_episode(1, 4, infos)], buffer)
    assert buffer.data["infos"]["deep"]["seed"][:4].tolist() == [0, 1, 2, 3]
    assert buffer.data["next_infos"]["success"][:4].tolist() == [False, False, True, True]


def test_an_environment_with_text_and_infos(minari):
    import gymnasium

    class Env(gymnasium.Env):
        observation_space = gymnasium.spaces.Dict(
            mission=gymnasium.spaces.Text(20), t=gymnasium.spaces.Box(0, 9, (), np.int64)
        )
        action_space = gymnasium.spaces.Discrete(7)

        def seen(self):
            return {"mission": "open the door", "t": np.array(self.t)}

        def reset(self, *, seed=None, options=None):
            self.t = 0
            return self.seen(), {"twice": 0}

        def step(self, action):
            self.t += 1
            return self.seen(), 0.0, self.t == 3, False, {"twice": 2 * self.t}

    collector = minari.DataCollector(Env(), data_format="hdf5", record_infos=True)
    for seed in range(2):
        collector.reset(seed=seed)
        while not collector.step(1)[2]:
            pass
    written = collector.create_dataset(
        "jaxbuf/text-v0", author="n", author_email="e@example.com", algorithm_name="r"
    )
    item = {"obs": {"t": jnp.int32(0)}, "next_infos": {"twice": jnp.int32(0)}}
    buffer = jaxbuf.from_minari(written, jaxbuf.ItemBuffer.create(item, 8))
    assert buffer.data["obs"]["t"][:6].tolist() == [0, 1, 2] * 2
    assert buffer.data["next_infos"]["twice"][:6].tolist() == [2, 4, 6] * 2

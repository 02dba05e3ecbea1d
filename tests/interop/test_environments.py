"""Steps of real environments, compared with what each environment saw of itself."""

import collections
import functools
import types
from typing import Any

import chex
import flax.struct
import gymnasium
import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import jaxbuf
from jaxbuf.interop import (
    FinalObs,
    brax_transitions,
    gymnasium_transitions,
    gymnax_reset,
    gymnax_step,
    rollout,
    transition_like,
)
from tests.lenient import lenient

FIELDS = ("obs", "action", "reward", "terminated", "truncated", "next_obs")
NUM_ENVS, STEPS = 3, 40


class Diary(gymnasium.Env):
    """Episodes of 2 to 5 steps that end in turn by themselves and by a limit; it keeps a diary."""

    action_space = gymnasium.spaces.Discrete(5)

    def __init__(self, number, nested):
        box = gymnasium.spaces.Box(-1e6, 1e6, (2,), np.float32)
        self.nested, self.number = nested, number
        self.observation_space = gymnasium.spaces.Dict({"a": box, "b": box}) if nested else box
        self.episode, self.step_in_episode, self.diary = 0, 0, []

    def look(self):
        seen = np.array([100 * self.number + self.episode, self.step_in_episode], np.float32)
        return {"a": seen, "b": -seen} if self.nested else seen

    def reset(self, *, seed=None, options=None):
        self.episode, self.step_in_episode = self.episode + 1, 0
        return self.look(), {}

    def step(self, action):
        before = self.look()
        self.step_in_episode += 1
        ended = self.step_in_episode == 2 + (self.episode + self.number) % 4
        terminated, truncated = ended and self.episode % 2 == 0, ended and self.episode % 2 == 1
        reward = float(self.step_in_episode)
        after = self.look()
        self.diary.append((before, action, reward, terminated, truncated, after))
        return after, reward, terminated, truncated, {"note": self.episode}


def play(envs, steps):
    """Random actions in a vector environment; yields what there is to store."""
    rng = np.random.default_rng(0)
    obs, _ = envs.reset()
    ended = None
    for _ in range(steps):
        action = rng.integers(0, 2, envs.num_envs)
        step = gymnasium_transitions(envs, obs, action, envs.step(action), ended)
        yield step
        obs, ended = step.obs, step.ended
        mode = getattr(envs.unwrapped, "autoreset_mode", None)
        if mode == AutoresetMode.DISABLED and ended.any():
            obs, _ = envs.reset(options={"reset_mask": ended})


def played(envs):
    """The transitions of each environment that are to be stored."""
    rows = [[] for _ in range(envs.num_envs)]
    for step in play(envs, STEPS):
        for env in np.flatnonzero(step.mask):
            rows[env].append(jax.tree.map(lambda leaf, env=env: leaf[env], step.transitions))
    return [jax.tree.map(lambda *leaves: np.stack(leaves), *row) for row in rows]


def check_diaries(envs, rows):
    """``rows[env]`` are transitions, each leaf ``[n, ...]``."""
    for env, have in zip(envs.envs, rows, strict=True):
        want = jax.tree.map(lambda *leaves: np.stack(leaves), *env.diary)
        for name, value in zip(FIELDS, want, strict=True):
            chex.assert_trees_all_equal(have[name], value)


class Wrapped(gymnasium.vector.VectorWrapper):
    """A wrapper as most are: it says nothing of how episodes begin anew."""


@pytest.mark.parametrize("nested", [False, True], ids=["array", "dict"])
@pytest.mark.parametrize("wrap", [lambda envs: envs, lambda envs: Wrapped(Wrapped(envs))])
@pytest.mark.parametrize("mode", list(AutoresetMode), ids=lambda mode: mode.value)
def test_a_buffer_holds_what_the_environments_went_through(mode, wrap, nested):
    make = [functools.partial(Diary, number, nested) for number in range(NUM_ENVS)]
    envs = SyncVectorEnv(make, autoreset_mode=mode)
    # Gymnasium notes the mode in the metadata of the class of the environments.
    for other in {*AutoresetMode} - {mode}:
        SyncVectorEnv(make, autoreset_mode=other)
    buffer = jaxbuf.TrajectoryBuffer.create(transition_like(envs), NUM_ENVS, STEPS)
    for step in play(wrap(envs), STEPS):
        buffer = jaxbuf.add(buffer, step.transitions, mask=step.mask)
    held = np.asarray(buffer.end_position)
    assert held.tolist() == [len(env.diary) for env in envs.envs]
    data = jax.tree.map(np.asarray, buffer.data)
    check_diaries(
        envs,
        [
            jax.tree.map(lambda leaf, env=env: leaf[env * STEPS :][: held[env]], data)
            for env in range(NUM_ENVS)
        ],
    )
    resets = NUM_ENVS * STEPS - held.sum()
    assert (resets > 0) == (mode == AutoresetMode.NEXT_STEP)
    assert data["truncated"].any()
    assert data["terminated"].any()


def test_what_is_handed_out_is_not_changed_later():
    """Environments that return the same memory every step, as ``copy=False`` allows."""
    make = [functools.partial(Diary, number, False) for number in range(NUM_ENVS)]
    envs = SyncVectorEnv(make, autoreset_mode=AutoresetMode.SAME_STEP)
    obs, _ = envs.reset()
    for _ in range(8):
        action = np.zeros(NUM_ENVS, np.int64)
        result = envs.step(action)
        given = result[0].copy()
        step = gymnasium_transitions(envs, obs, action, result)
        np.testing.assert_array_equal(result[0], given)
        obs = step.obs
        np.testing.assert_array_equal(obs, given)


# Environments whose episodes end and begin in the same step.
SAME = types.SimpleNamespace(metadata={"autoreset_mode": AutoresetMode.SAME_STEP})
ORDERED = collections.OrderedDict
# The last observations of two environments, of which the second one has ended.
LAST = {
    "dict": [None, {"a": [21, 22], "z": 11}],
    "ordered": [None, ORDERED(z=11, a=np.array([21, 22]))],
    "more": [None, {"a": [21, 22], "b": 5, "z": np.float32(11)}],
    "mapping": [None, types.MappingProxyType({"z": 11, "a": (21, 22)})],
    "batched": {"z": np.array([9, 11]), "a": np.array([[9, 9], [21, 22]])},
    "batched of another order": ORDERED(z=[9, 11], a=[[9, 9], [21, 22]], b=[1, 2]),
    "batched with None": {"z": np.array([None, 11]), "a": [None, [21, 22]]},
}


OF_NAMES = {"a": np.zeros((2, 2), np.float32), "z": np.zeros(2, np.float32)}


def stored(obs, ended, final):
    """Stores a step that ended some episodes and had these last observations."""
    ended = np.array(ended)
    result = (obs, np.zeros(2), ended, ~ended & False, {"final_obs": final})
    return gymnasium_transitions(SAME, obs, np.zeros(2, int), result).transitions


@pytest.mark.parametrize("final", LAST.values(), ids=LAST)
@pytest.mark.parametrize("kind", [dict, ORDERED, types.MappingProxyType], ids=lambda k: k.__name__)
def test_last_observations_are_matched_by_name(kind, final):
    rows = stored(kind({"z": OF_NAMES["z"], "a": OF_NAMES["a"]}), [False, True], final)
    found = {name: leaf.tolist() for name, leaf in rows["next_obs"].items()}
    assert found == {"a": [[0, 0], [21, 22]], "z": [0, 11]}
    one = {"a": jnp.zeros(2), "z": jnp.float32(0)}
    example = {"obs": one, "next_obs": one}
    rows = {name: rows[name] for name in example}
    buffer = jaxbuf.add(jaxbuf.ItemBuffer.create(example, 4), rows)
    assert buffer.data["next_obs"]["z"].tolist() == [0, 11, 0, 0]


def test_observations_may_be_tuples_or_lists():
    obs = (np.zeros((2, 2), np.float32), {"z": np.zeros(2, np.float32)})
    for final in ([([1, 2], {"z": 3}), None], (np.array([[1, 2], [0, 0]]), {"z": [3, 0]})):
        found = stored(obs, [True, False], final)["next_obs"]
        assert (found[0].tolist(), found[1]["z"].tolist()) == ([[1, 2], [0, 0]], [3, 0])
    rows = stored([[5, 6], [7, 8]], [True, False], [[1, 2], None])
    assert (rows["obs"].shape, rows["next_obs"].tolist()) == ((2, 2), [[1, 2], [7, 8]])


@pytest.mark.parametrize(
    ("final", "message"),
    [
        ([None, {"z": 1}], r"infos\['final_obs'\]\[1\] has no \['a'\], which the obs"),
        ([None, None], r"infos\['final_obs'\]\[1\] has no \['a'\]"),
        ({"z": np.zeros(2)}, r"infos\['final_obs'\] has no \['a'\]"),
        ([None, {"z": 1, "a": None}], r"\['a'\] of environment 1 is None"),
        ([None, {"z": 1, "a": 3}], r"\['a'\] of environment 1 is of shape \(\); expected"),
        ([None, [1, 2]], r"infos\['final_obs'\]\[1\] has no \['a'\]"),
        ([None, [0.5, 1]], r"final_obs'\]\[1\] of environment 1 is float64; expected uint8"),
        ([None, np.array([7, 300])], r"1\[1\] is 300; expected an integer from 0 to 255"),
        (np.full((2, 2), -1), r"environment 1\[0\] is -1; expected an integer from 0"),
    ],
)  # fmt: skip
def test_last_observations_that_do_not_fit_are_named(final, message):
    # Names are those of dicts, and numbers are not cast to those of another kind.
    obs = OF_NAMES if r"\['a'\]" in message else np.zeros((2, 2), np.uint8)
    with pytest.raises(ValueError, match=message):
        stored(obs, [False, True], final)


def test_resets_are_told_from_transitions_or_refused():
    envs = SyncVectorEnv([functools.partial(Diary, 0, False)])
    obs, _ = envs.reset()
    result = (obs, np.ones(1), np.zeros(1, bool), np.zeros(1, bool), {})
    with pytest.raises(
        ValueError, match=r"so pass ended, .*: None after envs.reset, then step.ended"
    ):
        gymnasium_transitions(envs, obs, np.zeros(1), result)
    with pytest.raises(ValueError, match=r"ended has shape \(3,\); expected \(1,\)"):
        gymnasium_transitions(envs, obs, np.zeros(1), result, np.zeros(3, bool))
    assert gymnasium_transitions(envs, obs, np.zeros(1), result, None).mask.all()
    for mode in (AutoresetMode.SAME_STEP, AutoresetMode.DISABLED):
        envs = SyncVectorEnv([functools.partial(Diary, 0, False)], autoreset_mode=mode)
        assert gymnasium_transitions(envs, obs, np.zeros(1), result).mask.all()


class Game:
    """A game of two lives of 2 to 4 steps, 4 frames each; a diary of all steps that were played."""

    def __init__(self, number, on_loss):
        self.number, self.on_loss, self.frames, self.diary = number, on_loss, 0, []
        self.begin()

    def begin(self):
        self.first, self.lives, self.left, self.is_over = self.frames, 2, 2 + self.number, False
        self.frames += 1 + self.frames % 3  # waits for a random while, as Atari games do

    def look(self):
        return np.array([self.number, self.frames], np.float32)

    def step(self, action):
        before, self.frames, self.left = self.look(), self.frames + 4, self.left - 1
        lost = self.left == 0
        if lost:
            self.lives, self.left = self.lives - 1, 2 + self.number
        self.is_over = self.lives == 0 or (lost and self.on_loss == "ends")
        terminated = self.is_over or (lost and self.on_loss == "told")
        self.diary.append((before, action, 1.0, terminated, False, self.look()))
        return 1.0, terminated


class Games:
    """Games side by side, as in ale-py's ``AtariVectorEnv``; nobody writes all of ``final_obs``."""

    num_envs, metadata, unwrapped = 3, {}, None

    def __init__(self, mode, on_loss):
        self.autoreset_mode, self.same = mode, mode == AutoresetMode.SAME_STEP
        self.envs = [Game(number, on_loss) for number in range(3)]

    def result(self):
        counts = [(game.frames, game.frames - game.first, game.lives) for game in self.envs]
        names = ("frame_number", "episode_frame_number", "lives")
        infos = dict(zip(names, np.array(counts).T, strict=True)) | {"env_id": np.arange(3)}
        return np.stack([game.look() for game in self.envs]), infos

    def reset(self):
        return self.result()

    def step(self, action):
        rewards, terminated, final = np.zeros(3), np.zeros(3, bool), np.full((3, 2), -7.0)
        for i, game in enumerate(self.envs):
            if game.is_over:
                game.begin()
                continue
            rewards[i], terminated[i] = game.step(action[i])
            if game.is_over and self.same:
                final[i] = game.look()
                game.begin()
        obs, infos = self.result()
        infos |= {"final_obs": final} if self.same and terminated.any() else {}
        return obs, rewards, terminated, np.zeros(3, bool), infos


@pytest.mark.parametrize("on_loss", ["goes on", "told", "ends"])
@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_a_lost_life_resets_a_game_or_does_not(mode, on_loss):
    envs = Games(mode, on_loss)
    rows = played(envs)
    check_diaries(envs, rows)
    assert min(row["terminated"].sum() for row in rows) > 1


def test_rows_are_masked_if_nobody_knows_whether_a_game_is_over():
    envs = Games(AutoresetMode.SAME_STEP, "told")
    obs, masks = envs.reset()[0], []
    for _ in range(5):
        step = gymnasium_transitions(envs, obs, np.zeros(3, int), envs.step(np.zeros(3, int)))
        np.testing.assert_array_equal(step.mask, ~step.transitions["terminated"])
        obs = step.obs
        masks.append(step.mask)
    assert not np.all(masks)


def test_final_observations_of_others_are_not_taken():
    obs, ended = np.zeros((3, 1), np.float32), np.array([True, True, False])
    infos = {"final_obs": np.full((3, 1), 5.0), "_final_obs": np.array([True, False, True])}
    result = (obs, np.zeros(3), ended, ~ended & False, infos)
    step = gymnasium_transitions(SAME, obs, np.zeros(3), result)
    assert (step.transitions["next_obs"].tolist(), step.mask.all()) == ([[5], [0], [0]], True)


@pytest.mark.parametrize(
    ("num_envs", "ids", "fits"),
    [
        (4, [0, 1], False), (4, [2, 3], False), (None, [2, 3], False), (2, [1, 0], False),
        (2, [0, 1], True), (None, [0, 1], True), (2, [7, 9], True), (2, ["a", "b"], True),
    ],
)  # fmt: skip
def test_results_of_some_environments_only_are_refused(num_envs, ids, fits):
    envs = types.SimpleNamespace(metadata={"autoreset_mode": AutoresetMode.NEXT_STEP})
    if num_envs is not None:
        envs.num_envs = num_envs
    obs, ends = np.zeros((2, 1)), np.zeros(2, bool)
    result = (obs, np.zeros(2), ends, ends, {"env_id": np.array(ids)})
    if fits:
        assert gymnasium_transitions(envs, obs, np.zeros(2), result, None).mask.all()
        return
    with pytest.raises(ValueError, match=r"environments \[.*\], and .* batch_size=num_envs"):
        gymnasium_transitions(envs, obs, np.zeros(2), result, None)


def test_a_native_vector_environment():
    envs = gymnasium.make_vec("CartPole-v1", num_envs=4, vectorization_mode="vector_entry_point")
    steps = list(play(envs, 60))
    assert any(step.ended.any() for step in steps)
    before = None
    for step in steps:
        np.testing.assert_array_equal(step.transitions["next_obs"], step.obs)
        if before is not None:
            np.testing.assert_array_equal(step.mask, ~before.ended)
            # Without a reset in between one transition begins where the other ended.
            going_on = step.mask & before.mask
            np.testing.assert_array_equal(
                step.transitions["obs"][going_on], before.transitions["next_obs"][going_on]
            )
        before = step


def test_examples_of_nested_spaces():
    spaces = gymnasium.spaces
    env = gymnasium.Env()
    env.observation_space = spaces.Dict(
        {
            "image": spaces.Box(0, 255, (8, 8, 3), np.uint8),
            "pair": spaces.Tuple([spaces.Discrete(3), spaces.MultiBinary(4)]),
        }
    )
    env.action_space = spaces.Box(-1, 1, (2,), np.float64)
    example = transition_like(env)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype.name), example["next_obs"]) == {
        "image": ((8, 8, 3), "uint8"),
        "pair": (((), "int32"), ((4,), "int8")),
    }
    assert example["action"].dtype == jnp.float32
    env.action_space = spaces.Text(5)
    with pytest.raises(ValueError, match="no fixed shape; a buffer holds arrays of one shape"):
        transition_like(env)
    with pytest.raises(ValueError, match="envs is of gymnax; the example is one row"):
        transition_like(gymnax.make("CartPole-v1")[0])


def test_a_wrapper_may_say_how_it_resets():
    envs = SyncVectorEnv([functools.partial(Diary, 0, False)])
    obs, _ = envs.reset()
    wrapped = Wrapped(envs)
    wrapped.metadata = {"autoreset_mode": AutoresetMode.DISABLED}
    result = (obs, np.ones(1), np.zeros(1, bool), np.zeros(1, bool), {})
    ended = np.ones(1, bool)
    assert not gymnasium_transitions(envs, obs, np.zeros(1), result, ended).mask.any()
    step = gymnasium_transitions(Wrapped(wrapped), obs, np.zeros(1), result, ended)
    assert step.mask.all()


def test_environments_that_do_not_say_how_they_reset_are_refused():
    obs, ended = np.zeros((1, 2), np.float32), np.ones(1, bool)
    result = (obs, np.ones(1), ended, ~ended, {})
    for mode in (AutoresetMode.SAME_STEP, "SameStep"):
        for envs in (
            types.SimpleNamespace(metadata={"autoreset_mode": mode}),
            types.SimpleNamespace(metadata={}, autoreset_mode=mode),
        ):
            with pytest.raises(ValueError, match="infos have no 'final_obs'"):
                gymnasium_transitions(envs, obs, np.zeros(1), result)
    for metadata in ({}, None):
        envs = types.SimpleNamespace(metadata=metadata)
        with pytest.raises(ValueError, match=r"envs\.metadata\['autoreset_mode'\] is None; expect"):
            gymnasium_transitions(envs, obs, np.zeros(1), result)
    envs = types.SimpleNamespace(metadata={}, autoreset_mode="Never")
    with pytest.raises(ValueError, match=r"envs\.autoreset_mode is 'Never'; expected a mode"):
        gymnasium_transitions(envs, obs, np.zeros(1), result)


def test_gymnax_steps_are_those_of_single_environments():
    env, params = gymnax.make("CartPole-v1")
    # Some episodes fall within the limit, and some meet it.
    params = params.replace(max_steps_in_episode=10)
    action = jax.random.randint(jax.random.key(2), (30, 4), 0, 2)

    def step(carry, key):
        state, t = carry
        state, stored = gymnax_step(env, params, key, state, action[t])
        return (state, t + 1), stored

    chex.clear_trace_counter()

    @jax.jit
    @chex.assert_max_traces(n=1)
    def run(state, t, key):
        return rollout(step, (state, t), key, 15)

    with lenient():
        state = gymnax_reset(env, params, jax.random.key(0), 4)
        (state, t), first = run(state, jnp.int32(0), jax.random.key(1))
        _, second = run(state, t, jax.random.key(3))
    steps = jax.tree.map(lambda a, b: np.concatenate([a, b], axis=1), first, second)
    chex.assert_shape(steps["obs"], (4, 30, 4))
    np.testing.assert_array_equal(steps["action"], action.T)
    ended = steps["terminated"] | steps["truncated"]
    assert steps["truncated"].any()
    # Within an episode observations go on, and at its end they do not.
    same = np.all(steps["next_obs"][:, :-1] == steps["obs"][:, 1:], axis=-1)
    np.testing.assert_array_equal(same, ~ended[:, :-1])
    with lenient():
        keys = jax.random.split(jax.random.key(0), 4)
        obs, inner = env.reset(keys[1], params)
        keys = jax.random.split(jax.random.key(1), 15)
        for t in range(15):
            np.testing.assert_allclose(steps["obs"][1, t], obs, atol=1e-6)
            key = jax.random.split(keys[t], 4)[1]
            obs, inner, reward, terminated, truncated, info = env.step(
                key, inner, action[t, 1], params
            )
            final = info["final_observation"]
            np.testing.assert_allclose(steps["next_obs"][1, t], final, atol=1e-6)
            got = [steps[name][1, t] for name in ("reward", "terminated", "truncated")]
            assert got == [reward, terminated, truncated]
    buffer = jaxbuf.TrajectoryBuffer.create(jax.tree.map(lambda x: x[0, 0], steps), 4, 40)
    assert buffer.add(steps).size == 120


@flax.struct.dataclass
class State:
    """A state with the fields that brax's states share with MuJoCo Playground's."""

    pipeline_state: Any
    obs: jax.Array
    reward: jax.Array
    done: jax.Array
    metrics: dict[str, Any]
    info: dict[str, Any]


class Count:
    """Counts up to a limit; the states are those of brax's ``EpisodeWrapper``."""

    limit, terminates = 5, 2
    action_size = 1

    def reset(self, rng):
        zero = jnp.zeros(rng.shape[:1])
        return State(zero, zero[:, None], zero, zero, {}, {"truncation": zero, "steps": zero})

    def step(self, state, action):
        number = state.pipeline_state + 1
        steps = state.info["steps"] + 1
        env = jnp.arange(number.size)
        terminated = (env == 0) & (number >= self.terminates)
        truncated = (steps >= self.limit) & ~terminated
        info = {**state.info, "truncation": truncated.astype(jnp.float32), "steps": steps}
        done = (terminated | truncated).astype(jnp.float32)
        return state.replace(
            pipeline_state=number, obs=number[:, None], reward=number, done=done, info=info
        )


class AutoReset:
    """The behavior of brax's ``AutoResetWrapper``."""

    action_size = 1

    def __init__(self, env):
        self.env = env

    def reset(self, rng):
        return self.env.reset(rng)

    def step(self, state, action):
        steps = jnp.where(state.done > 0, 0.0, state.info["steps"])
        state = self.env.step(state.replace(info={**state.info, "steps": steps}), action)
        done = state.done > 0
        return state.replace(
            pipeline_state=jnp.where(done, 0.0, state.pipeline_state),
            obs=jnp.where(done[:, None], 0.0, state.obs),
        )


def play_brax(env, num_envs, steps):
    # brax counts on keys of the old kind, which have an axis of their own.
    state = jax.jit(env.reset)(jax.random.split(jax.random.PRNGKey(0), num_envs))

    def step(state, _):
        action = jnp.ones((num_envs, env.action_size))
        after = env.step(state, action)
        return after, brax_transitions(state, action, after)

    return jax.jit(lambda state: rollout(step, state, jax.random.key(1), steps))(state)[1]


class FullReset(AutoReset):
    """As MuJoCo Playground's ``full_reset=True``, which keeps one entry of ``info``."""

    def __init__(self, env, kept):
        super().__init__(env)
        self.kept = kept

    def step(self, state, action):
        after = self.env.step(state, action)
        fresh = self.env.reset(jnp.zeros((after.done.size, 2), jnp.uint32))

        def choose(new, old):
            done = after.done.reshape(-1, *(1,) * (new.ndim - 1)) > 0
            return jnp.where(done, new, old)

        info = jax.tree.map(choose, fresh.info, after.info)
        if self.kept in info:
            info[self.kept] = after.info[self.kept]
        obs, number = (
            choose(getattr(fresh, name), getattr(after, name)) for name in ("obs", "pipeline_state")
        )
        return after.replace(obs=obs, pipeline_state=number, info=info)


KEPT = "AutoResetWrapper_preserve_info"
# Of an environment that terminates after 2 steps, and of one that is cut after 5.
ENDED = np.array([[False, True] * 5 + [False], ([False] * 4 + [True]) * 2 + [False]])
CUT = ENDED & np.array([[False], [True]])


@pytest.mark.parametrize(
    ("env", "lost"),
    [
        (AutoReset(FinalObs(Count())), CUT & False),
        # A last observation is lost, and where it terminated nobody needs it.
        (AutoReset(Count()), CUT),
        (FullReset(FinalObs(Count()), KEPT), CUT & False),
        # What tells how an episode ended is of the next one.
        (FullReset(FinalObs(Count()), "another"), ENDED),
        (FullReset(Count(), KEPT), ENDED),
        (FullReset(Count(), "another"), ENDED),
    ],
)
def test_brax_rows_are_masked_if_what_they_need_is_lost(env, lost):
    steps, mask = play_brax(env, 2, 11)
    np.testing.assert_array_equal(mask, ~lost)
    assert steps["obs"][:, :, 0].tolist() == [[0, 1] * 5 + [0], [0, 1, 2, 3, 4] * 2 + [0]]
    np.testing.assert_array_equal(steps["terminated"][mask], (ENDED & ~CUT)[mask])
    np.testing.assert_array_equal(steps["truncated"][mask], CUT[mask])
    known = mask & ~steps["terminated"] if isinstance(env.env, Count) else mask
    np.testing.assert_array_equal(steps["next_obs"][known], steps["obs"][known] + 1)


def test_brax_metrics_tell_an_episode_that_has_just_begun():
    """MuJoCo Playground keeps the number of steps as well, but not the length of the episode."""
    before = types.SimpleNamespace(obs=jnp.zeros((3, 1)))
    info = {
        "truncation": jnp.zeros(3),
        "steps": jnp.full(3, 5.0),
        "episode_metrics": {"length": jnp.array([0.0, 5.0, 0.0])},
    }
    after = types.SimpleNamespace(
        obs=jnp.ones((3, 1)), reward=jnp.ones(3), done=jnp.array([1.0, 1.0, 0.0]), info=info
    )
    _, mask = brax_transitions(before, jnp.zeros((3, 1)), after)
    assert mask.tolist() == [False, True, True]


def test_brax_wrappers_in_another_order_and_other_keys_are_refused():
    def reset(keys, **info):
        obs = jnp.zeros((2, 3))
        return State(
            obs, obs, obs[:, 0], obs[:, 0], {}, {"steps": jnp.zeros(keys.shape[:-1]), **info}
        )

    keys = jax.random.split(jax.random.key(0), 2)
    env = types.SimpleNamespace(reset=reset)
    with pytest.raises(
        ValueError, match=r"shape \(\) and .* \(2,\).*jax\.random\.key_data\(keys\)"
    ):
        FinalObs(env).reset(keys)
    assert FinalObs(env).reset(jax.random.key_data(keys)).info["steps"].shape == (2,)
    env.reset = functools.partial(reset, first_obs=jnp.zeros((2, 3)))
    with pytest.raises(ValueError, match="FinalObs is around an auto-reset"):
        FinalObs(env).reset(jax.random.key_data(keys))


# brax and what it imports warn of their own future, and mujoco's bindings of SWIG.
@pytest.mark.filterwarnings("ignore")
def test_brax_itself():
    try:
        from brax import envs
        from brax.envs.wrappers import training
    except Exception as error:  # not only where it is missing: it does not follow every jax at once
        pytest.skip(f"brax cannot be imported: {error}")
    for wrapper in (FinalObs, lambda env: env):
        env = training.VmapWrapper(envs.get_environment("fast"))
        env = training.EpisodeWrapper(env, episode_length=5, action_repeat=1)
        env = training.AutoResetWrapper(wrapper(env))
        with lenient():
            steps, mask = play_brax(env, 2, 12)
            if wrapper is FinalObs:
                with pytest.raises(ValueError, match=r"jax\.random\.key_data\(keys\)"):
                    jax.eval_shape(env.reset, jax.random.split(jax.random.key(0), 2))
        limit = np.arange(12) % 5 == 4
        np.testing.assert_array_equal(steps["truncated"], np.broadcast_to(limit, (2, 12)))
        assert not steps["terminated"].any()
        same = np.all(steps["next_obs"][:, :-1] == steps["obs"][:, 1:], axis=-1)
        if wrapper is FinalObs:
            assert mask.all()
            np.testing.assert_array_equal(same, ~np.broadcast_to(limit, (2, 12))[:, :-1])
        else:
            np.testing.assert_array_equal(mask, ~steps["truncated"])
            assert same.all()

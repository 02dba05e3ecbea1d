# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Offline data: a dataset on disk, Minari, and a mix with online data
#
# 1. Keep more transitions than fit in memory in a `Store` on disk, and learn from it.
# 2. Read and write datasets in the format of Minari, the common format for sharing them.
# 3. Draw every batch from an offline dataset and from a running environment at once.

# %%
# install jaxbuf[examples,minari]
import os
import tempfile
import time
import warnings
from types import SimpleNamespace

import gymnasium
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

import jaxbuf
from jaxbuf.interop import gymnasium_transitions, transition_like

plt.rcParams["figure.dpi"] = 80
folder = tempfile.TemporaryDirectory()

# %% [markdown]
# ## Some data
#
# Our expert is a hand-written policy for CartPole, which pushes the cart in the direction in which
# the pole falls. Some of its actions are random.

# %%
envs = gymnasium.make_vec("CartPole-v1", 16, vectorization_mode="vector_entry_point")
example = transition_like(envs)


def play(policy, steps, seed):
    """Yields the steps of all environments, one after the other."""
    rng = np.random.default_rng(seed)
    obs, _ = envs.reset(seed=seed)
    ended = None
    for _ in range(steps):
        action = policy(obs, rng)
        step = gymnasium_transitions(envs, obs, action, envs.step(action), ended)
        yield step
        obs, ended = step.obs, step.ended


def expert(obs, rng):
    action = (obs[:, 2] + 0.3 * obs[:, 3] > 0).astype(np.int64)
    return np.where(rng.random(len(obs)) < 0.2, rng.integers(0, 2, len(obs)), action)


# %% [markdown]
# ## A dataset on disk
#
# A `Store` is a folder of files of rows, here compressed. `append` returns when the rows are on
# disk, and an interruption does not affect earlier rows. Rows never change their numbers.

# %%
store = jaxbuf.Store(f"{folder.name}/expert", example, compress=True)
for step in play(expert, 1_000, seed=0):
    store.append(step.transitions, mask=step.mask)

on_disk = sum(
    os.path.getsize(os.path.join(path, name))
    for path, _, names in os.walk(folder.name)
    for name in names
)
rows = len(store)
in_memory = rows * sum(leaf.dtype.itemsize * leaf.size for leaf in jax.tree.leaves(example))
print(f"{rows:,} transitions: {on_disk / 1e6:.2f} MB on disk, {in_memory / 1e6:.2f} MB in memory")
assert rows > 15_000
assert on_disk < in_memory

# %% [markdown]
# Any number of programs may read it. `batches` draws random batches and reads ahead in another
# thread while you compute. Batch `i` depends only on the seed and on `i`, so a resumed run gets the
# same batches as an uninterrupted one.

# %%
store.close()
reader = jaxbuf.Store(f"{folder.name}/expert", example, mode="r")
first = list(reader.batches(256, seed=1, steps=4))
again = list(reader.batches(256, seed=1, start=2, steps=2))
assert np.array_equal(first[2].rows, again[0].rows)
assert jnp.array_equal(first[3].data["obs"], again[1].data["obs"])

began = time.perf_counter()
count = sum(len(batch.rows) for batch in reader.batches(256, seed=2, steps=200))
print(f"{count / (time.perf_counter() - began):,.0f} transitions per second, at random")

# %% [markdown]
# Behavior cloning learns the expert's action from its observation. Reading from disk takes a `for`
# loop.


# %%
def logits(params, obs):
    hidden = jax.nn.relu(obs @ params["in"] + params["bias"])
    return hidden @ params["out"]


def new_params(key):
    keys = jax.random.split(key)
    return {
        "in": jax.random.normal(keys[0], (4, 64)),
        "bias": jnp.zeros(64),
        "out": 0.1 * jax.random.normal(keys[1], (64, 2)),
    }


adam = optax.adam(1e-2)


@jax.jit
def imitate(params, state, data, valid):
    def loss(params):
        each = optax.softmax_cross_entropy_with_integer_labels(
            logits(params, data["obs"]), data["action"]
        )
        return jnp.mean(each, where=valid)

    value, gradients = jax.value_and_grad(loss)(params)
    updates, state = adam.update(gradients, state, params)
    return optax.apply_updates(params, updates), state, value


params = new_params(jax.random.key(0))
state = adam.init(params)
everything = jnp.ones(256, bool)
for batch in reader.batches(256, seed=3, steps=300):
    params, state, loss = imitate(params, state, batch.data, everything)


def returns_of(policy, steps=300, seed=7):
    """Returns the mean return of all episodes, unfinished ones included."""
    total, ended = np.zeros(envs.num_envs), []
    for step in play(policy, steps, seed):
        total += step.transitions["reward"]
        ended += total[step.ended].tolist()
        total[step.ended] = 0
    # Episodes that still run count with what they have.
    return float(np.mean(ended + total[total > 0].tolist()))


def cloned(obs, rng):
    return np.asarray(jnp.argmax(logits(params, obs), axis=-1))


def random(obs, rng):
    return rng.integers(0, 2, len(obs))


scores = {policy.__name__: returns_of(policy) for policy in (random, expert, cloned)}
print({name: round(score) for name, score in scores.items()})
assert scores["cloned"] > 4 * scores["random"]

# %% [markdown]
# If the data fit into memory, load all rows or a range of them into a buffer. Priorities can be
# computed during loading.

# %%
offline = jaxbuf.ItemBuffer.create(example, 20_000)
offline = reader.load_into(offline)
assert offline.size == rows
assert np.array_equal(np.asarray(offline.data["obs"])[:rows], reader.read(slice(None))["obs"])
offline

# %% [markdown]
# ## Minari
#
# [Minari](https://minari.farama.org) is for offline data what Gymnasium is for environments. A
# dataset is an iterable of episodes, each with one more observation than actions. `from_minari`
# adds them to any buffer. A `TrajectoryBuffer` keeps each episode in one ring. Here are some
# episodes in Minari's format:


# %%
def episode_like_minari(number, length):
    time = np.arange(length + 1, dtype=np.float64)
    return SimpleNamespace(
        id=number,
        observations=np.stack([time, 0 * time + number], axis=1),
        actions=np.arange(length) % 2,
        rewards=np.ones(length),
        terminations=np.arange(length) == length - 1,
        truncations=np.zeros(length, bool),
    )


episodes = [episode_like_minari(number, 5 + number) for number in range(8)]
step = {
    "obs": jnp.zeros(2),
    "action": jnp.int32(0),
    "reward": jnp.float32(0),
    "terminated": jnp.bool_(False),
    "truncated": jnp.bool_(False),
}
whole_windows = jaxbuf.Episodes(boundary="avoid", short_windows="never")
rings = jaxbuf.TrajectoryBuffer.create(step, 2, 64, sequence_length=4, episodes=whole_windows)
rings = jaxbuf.from_minari(episodes, rings)
assert rings.size == sum(len(episode.rewards) for episode in episodes)

windows = jaxbuf.sample(rings, jax.random.key(0), 128)
obs = np.asarray(windows.data["obs"])
assert np.all(np.diff(obs[..., 0], axis=1) == 1)  # consecutive steps ...
assert np.all(np.diff(obs[..., 1], axis=1) == 0)  # ... of one episode
rings

# %% [markdown]
# With Minari installed (`pip install 'minari[hdf5]'`), you can write the contents of a buffer as
# a dataset, and read it back with `minari.load_dataset`.

# %%
os.environ["MINARI_DATASETS_PATH"] = f"{folder.name}/minari"
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of metadata that a published dataset should have
    import minari

    written = jaxbuf.to_minari(
        "notebook/counting-v0",
        rings,
        observation_space=gymnasium.spaces.Box(-1e3, 1e3, (2,), np.float32),
        action_space=gymnasium.spaces.Discrete(2),
    )
    dataset = minari.load_dataset("notebook/counting-v0")
    back = jaxbuf.from_minari(dataset, rings.clear())
print(f"{dataset.total_episodes} episodes, {dataset.total_steps} steps")
assert dataset.total_episodes == 8
assert back.size == written.total_steps

# %% [markdown]
# ## Offline and online in one batch
#
# A `Mixture` holds several buffers and draws an exact number of rows from each. Here the learner
# acts, and the expert labels the states with its own actions (Ross et al., "A Reduction of
# Imitation Learning and Structured Prediction to No-Regret Online Learning", 2011). Three quarters
# of every batch come from the dataset, and one quarter from the learner's own states, by priority.
# Slots know which part they are from, so new priorities reach the right part. The dataset is drawn
# uniformly and has no priorities.

# %%
online = jaxbuf.ItemBuffer.create(example, 2_000, sampler=jaxbuf.Prioritized(epsilon=0.01))
mixture = jaxbuf.Mixture.create([offline, online], ratios=[3, 1])
assert not mixture.can_sample(256)  # nothing online yet


def learn(train, mixture, transitions, mask, key):
    params, state = train
    mixture = mixture.add(transitions, part=1, mask=mask)
    batch = mixture.sample(key, 256)
    params, state, _ = imitate(params, state, batch.data, batch.valid)
    surprise = optax.softmax_cross_entropy_with_integer_labels(
        logits(params, batch.data["obs"]), batch.data["action"]
    )
    mixture = mixture.update_priority(batch.slots, surprise)
    share = jnp.mean(mixture.part_of(batch.slots) == 1, where=batch.valid)
    return (params, state), mixture, share


learn_in_place = jax.jit(learn, donate_argnums=(0, 1))
params = new_params(jax.random.key(1))
train = (params, adam.init(params))


def learner(obs, rng):
    return np.asarray(jnp.argmax(logits(train[0], obs), axis=-1))


for i, step in enumerate(play(learner, 300, seed=5)):
    obs = step.transitions["obs"]
    labeled = step.transitions | {"action": (obs[:, 2] + 0.3 * obs[:, 3] > 0).astype(np.int64)}
    train, mixture, share = learn_in_place(train, mixture, labeled, step.mask, jax.random.key(i))
    assert share == 0.25

params = train[0]
scores["mixed"] = returns_of(cloned)
assert scores["mixed"] > 4 * scores["random"]
assert mixture.parts[0].size == rows
assert mixture.parts[1].size == 2_000

plt.figure(figsize=(5, 3))
plt.bar(list(scores), list(scores.values()), color="tab:blue")
plt.ylabel("mean return, of at most 300")
plt.title("CartPole-v1, after learning from data")
plt.show()

# %%
# Only what was met online has priorities, and they differ by now.
metrics = mixture.metrics()
assert "0/priority_max" not in metrics
assert metrics["1/priority_max"] > 5 * metrics["1/priority_min"]
reader.close()
folder.cleanup()
mixture

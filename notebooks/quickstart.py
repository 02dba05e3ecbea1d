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
# # Quickstart
#
# In jaxbuf a replay buffer is one immutable pytree, and every operation on it is a pure function.
# This notebook leads from the first `add` to a resumed training run. It runs on a CPU in seconds.

# %%
# install jaxbuf[examples]
import functools
import tempfile
from typing import NamedTuple

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

import jaxbuf

plt.rcParams["figure.dpi"] = 80

# %% [markdown]
# ## Create
#
# Describe **one item** by an example, which may be any pytree of arrays. Only its shapes and dtypes
# matter. The buffer holds up to `capacity` items, and the `sampler` decides how they are drawn.

# %%
transition = {
    "obs": jnp.zeros(4),
    "action": jnp.int32(0),
    "reward": jnp.float32(0),
    "terminated": jnp.bool_(False),
    "next_obs": jnp.zeros(4),
}
buffer = jaxbuf.ItemBuffer.create(transition, capacity=1_000, sampler=jaxbuf.Prioritized(alpha=0.6))
buffer

# %% [markdown]
# ## Add
#
# You add a batch of items at once: each leaf has one more axis in front. `jaxbuf.add` is compiled
# once for all calls with the same shapes, and returns the **new** buffer. Always continue with the
# result.


# %%
def made_up(key, count):
    """Returns `count` arbitrary transitions."""
    keys = jax.random.split(key, 4)
    obs, next_obs = jax.random.normal(keys[0], (2, count, 4))
    return {
        "obs": obs,
        "action": jax.random.randint(keys[1], (count,), 0, 2),
        "reward": jax.random.normal(keys[2], (count,)),
        "terminated": jax.random.bernoulli(keys[3], 0.1, (count,)),
        "next_obs": next_obs,
    }


for i in range(5):
    buffer = jaxbuf.add(buffer, made_up(jax.random.key(i), 64))

assert buffer.size == 5 * 64
int(buffer.size), buffer.capacity

# %% [markdown]
# Items that do not match the example raise an error that names the leaf. Nothing is broadcast or
# cast silently.

# %%
wrong = made_up(jax.random.key(0), 8) | {"obs": jnp.zeros((8, 3))}
try:
    jaxbuf.add(buffer, wrong)
except ValueError as error:
    print(error)
    assert "items['obs'] has shape (8, 3); expected (B, 4)" in str(error)
else:
    raise AssertionError("it was not refused")

# %% [markdown]
# ## Your own items
#
# An item may consist of dicts, tuples, named tuples and dataclasses that JAX knows, nested in any
# way, with any mix of dtypes. A sample has the same structure and dtypes, so frames remain bytes.
# If a Python loop collects items one by one, stack them before you add them.


# %%
class Observation(NamedTuple):
    image: jax.Array
    goal: jax.Array


def one_item(i):
    return {
        "obs": Observation(np.full((8, 8), i, np.uint8), np.full(2, i, np.float32)),
        "action": (np.int32(i), np.float32(i / 2)),
        "done": np.bool_(i % 2),
    }


collected = [one_item(i) for i in range(5)]
mine = jaxbuf.ItemBuffer.create(one_item(0), capacity=50)
mine = jaxbuf.add(mine, jax.tree.map(lambda *leaves: np.stack(leaves), *collected))

oldest = mine.latest(5).data
assert isinstance(oldest["obs"], Observation)
assert oldest["obs"].image.dtype == jnp.uint8
assert oldest["done"].tolist() == [False, True, False, True, False]
mine

# %% [markdown]
# ## Sample
#
# Randomness comes from a key, as everywhere in JAX. The same key returns the same batch.

# %%
batch = jaxbuf.sample(buffer, jax.random.key(1), 32)
again = jaxbuf.sample(buffer, jax.random.key(1), 32)
assert jnp.array_equal(batch.slots.index, again.slots.index)

batch

# %% [markdown]
# Besides `data`, a sample has the `slots` of its rows, the `probability` with which each was drawn,
# and whether it is `valid`. Shapes never depend on the contents of the buffer: all rows of a sample
# from an empty buffer are invalid. Check `can_sample` before you learn.

# %%
empty = jaxbuf.ItemBuffer.create(transition, capacity=1_000)
nothing = jaxbuf.sample(empty, jax.random.key(0), 32)
assert not nothing.valid.any()
assert not empty.can_sample(32)
assert buffer.can_sample(32)
print(nothing.data["obs"].shape, nothing.valid.sum(), "valid")

# %% [markdown]
# ## Update priorities
#
# New items get the largest priority in the buffer. Once you know their TD errors, update them:
# `slots` identify the items, and if one of them has been overwritten in the meantime, its update is
# dropped instead of changing the item that took its place.

# %%
td_error = batch.data["reward"]
weights = jaxbuf.importance_weights(buffer, batch, beta=0.4)
buffer = jaxbuf.update_priority(buffer, batch.slots, jnp.abs(td_error))

assert weights.max() == 1
probability = jaxbuf.sample(buffer, jax.random.key(2), 256).probability
print(f"probabilities now range from {probability.min():.5f} to {probability.max():.5f}")
assert probability.max() > 2 * probability.min()

# %% [markdown]
# ## Look inside
#
# `metrics` returns numbers to log, and `buffer.data` is a pytree of plain arrays. `jaxbuf.plot`
# draws the age of the item in each slot, and the distributions of ages and priorities.

# %%
{name: round(value.item(), 4) for name, value in buffer.metrics().items()}

# %%
jaxbuf.plot(buffer)

# %% [markdown]
# ## Donation: why the old buffer is gone
#
# `jaxbuf.add` and `jaxbuf.update_priority` take over the memory of the buffer that you pass in and
# update it in place, which makes them fast. The old buffer can then no longer be used.

# %%
old = buffer
buffer = jaxbuf.add(old, made_up(jax.random.key(5), 64))
try:
    np.asarray(old.data["obs"])
except RuntimeError as error:
    print(error)
else:
    raise AssertionError("the old buffer is still there")

# %% [markdown]
# With `donate=False` the old buffer remains, at the price of a copy of everything it holds.

# %%
before = int(buffer.size)
longer = jaxbuf.add(buffer, made_up(jax.random.key(6), 64), donate=False)
assert (buffer.size, longer.size) == (before, before + 64)

# %% [markdown]
# ## Your own jitted step
#
# Now a whole agent in one program. The task is the random walk of Sutton and Barto (2018, example
# 6.2): five states in a row, steps to the left and to the right with equal probability, and a
# reward of 1 for leaving on the right. The true values are 1/6, 2/6, ..., 5/6, so we can check what
# the agent learned.
#
# Inside your own `jit`, use the methods `buffer.add`, `buffer.sample` and `buffer.update_priority`,
# which are pure and not jitted themselves. There are two rules:
#
# * **add before you sample**, or else XLA copies the storage in every step to be safe;
# * **donate** the argument that holds the buffer.

# %%
STATES, WALKERS, BATCH = 5, 8, 32
optimizer = optax.sgd(optax.exponential_decay(0.5, 500, 0.3))


def new_agent(key):
    step = {
        "state": jnp.int32(0),
        "reward": jnp.float32(0),
        "terminated": jnp.bool_(False),
        "next_state": jnp.int32(0),
    }
    values = jnp.full(STATES, 0.5)
    return {
        "values": values,
        "optimizer": optimizer.init(values),
        "buffer": jaxbuf.ItemBuffer.create(step, 2_000, sampler=jaxbuf.Prioritized(epsilon=0.01)),
        "walkers": jnp.full(WALKERS, STATES // 2),
        "key": key,
    }


def walk(key, state):
    """One step of every walker; a walker that leaves starts in the middle again."""
    moved = state + jax.random.choice(key, jnp.array([-1, 1]), state.shape)
    terminated = (moved < 0) | (moved >= STATES)
    transitions = {
        "state": state,
        "reward": (moved >= STATES).astype(jnp.float32),
        "terminated": terminated,
        "next_state": jnp.clip(moved, 0, STATES - 1),
    }
    return jnp.where(terminated, STATES // 2, moved), transitions


def step(agent, _):
    key, walk_key, sample_key = jax.random.split(agent["key"], 3)
    walkers, transitions = walk(walk_key, agent["walkers"])
    buffer = agent["buffer"].add(transitions)
    batch = buffer.sample(sample_key, BATCH)
    weights = jaxbuf.importance_weights(buffer, batch, beta=1.0)

    def loss(values):
        data = batch.data
        bootstrap = jnp.where(data["terminated"], 0.0, values[data["next_state"]])
        target = jax.lax.stop_gradient(data["reward"] + bootstrap)
        error = target - values[data["state"]]
        return 0.5 * jnp.mean(weights * error**2), error

    gradients, td_error = jax.grad(loss, has_aux=True)(agent["values"])
    updates, optimizer_state = optimizer.update(gradients, agent["optimizer"])
    return {
        "values": optax.apply_updates(agent["values"], updates),
        "optimizer": optimizer_state,
        "buffer": buffer.update_priority(batch.slots, jnp.abs(td_error)),
        "walkers": walkers,
        "key": key,
    }, jnp.mean(td_error**2)


traces = []


@functools.partial(jax.jit, static_argnames="steps", donate_argnums=0)
def train(agent, steps):
    traces.append(steps)  # Python code runs only while JAX traces
    return jax.lax.scan(step, agent, length=steps)


agent, losses = train(new_agent(jax.random.key(0)), steps=2_000)

truth = np.arange(1, STATES + 1) / (STATES + 1)
print("learned", np.round(np.asarray(agent["values"]), 2))
print("true   ", np.round(truth, 2))
assert np.abs(agent["values"] - truth).max() < 0.1
assert agent["buffer"].size == 2_000

# %% [markdown]
# Does each step really update the buffer in place? `jaxbuf.explain_memory` compiles a function and
# reports which arrays it copies. In the other order, every step copies the storage, for which the
# program needs temporary memory.


# %%
def add_first(buffer, key):
    buffer = buffer.add(walk(key, jnp.full(WALKERS, 2))[1])
    return buffer, buffer.sample(key, BATCH).data["reward"].sum()


def sample_first(buffer, key):
    reward = buffer.sample(key, BATCH).data["reward"].sum()
    return buffer.add(walk(key, jnp.full(WALKERS, 2))[1]), reward


def loop(body):
    def all_steps(buffer, keys):
        return jax.lax.scan(body, buffer, keys)

    return all_steps


keys = jax.random.split(jax.random.key(0), 100)
good = jaxbuf.explain_memory(loop(add_first), agent["buffer"], keys)
bad = jaxbuf.explain_memory(loop(sample_first), agent["buffer"], keys)
assert not good.advice
assert "add before you sample" in bad.advice
print(good, bad, sep="\n\n")

# %% [markdown]
# 2,000 steps of eight walkers, 2,000 batches and 2,000 priority updates took **one** call of
# `train`. Another call with the same shapes compiles nothing, because buffers with the same
# configuration share one trace.

# %%
train(new_agent(jax.random.key(1)), steps=2_000)
assert traces == [2_000]

# %% [markdown]
# ## Several seeds at once
#
# A buffer is a pytree, so under `vmap` every seed has its own, and all of them learn in one
# program.


# %%
@functools.partial(jax.jit, static_argnames="steps", donate_argnums=0)
def train_all(agents, steps):
    return jax.vmap(lambda agent: jax.lax.scan(step, agent, length=steps))(agents)


seeds = jax.random.split(jax.random.key(0), 16)
agents, _ = train_all(jax.vmap(new_agent)(seeds), steps=2_000)
values = np.asarray(agents["values"])
assert values.shape == (16, STATES)
assert np.abs(values.mean(0) - truth).max() < 0.05

labels = ["learned, each seed"] + [None] * (len(values) - 1)
plt.plot(values.T, color="tab:blue", alpha=0.3, label=labels)
plt.plot(truth, "ko--", label="true values")
plt.xticks(range(STATES), "ABCDE")
plt.xlabel("state")
plt.ylabel("value")
plt.title("Random walk, 16 seeds in one program")
plt.legend()
plt.show()

# %% [markdown]
# ## Save and resume
#
# A checkpoint holds the whole training state: arrays, keys, and the configuration of the buffer. A
# run that is resumed from it continues bit for bit as if it had not been interrupted.

# %%
with tempfile.TemporaryDirectory() as folder:
    jaxbuf.save(f"{folder}/run", agent)
    resumed = jaxbuf.load(f"{folder}/run", like=new_agent(jax.random.key(0)))

straight, _ = train(agent, steps=200)
resumed, _ = train(resumed, steps=200)
assert jnp.array_equal(straight["values"], resumed["values"])
assert jnp.array_equal(straight["buffer"].data["state"], resumed["buffer"].data["state"])
print(np.asarray(resumed["values"]))

# %% [markdown]
# Loading into a buffer with another configuration raises an error, because another `alpha` would
# silently change what you train.

# %%
other = new_agent(jax.random.key(0))
other["buffer"] = jaxbuf.ItemBuffer.create(
    {name: leaf[0] for name, leaf in resumed["buffer"].data.items()},
    2_000,
    sampler=jaxbuf.Prioritized(alpha=0.9, epsilon=0.01),
)
with tempfile.TemporaryDirectory() as folder:
    jaxbuf.save(f"{folder}/run", resumed)
    try:
        jaxbuf.load(f"{folder}/run", like=other)
    except ValueError as error:
        refusal = str(error).replace(folder, "...")
    else:
        raise AssertionError("it was loaded")
print(refusal)
assert "alpha" in refusal

# %% [markdown]
# ## Where to go from here
#
# | you want | see |
# | --- | --- |
# | prioritized replay, measured against the paper | `prioritized_replay` |
# | windows, n-step returns, episodes, stacked frames | `trajectories` |
# | an ordinary Python loop around a Gymnasium environment | `gymnasium_loop` |
# | a dataset on disk, offline and online data together | `offline` |
# | goals: hindsight experience replay | `hindsight` |
# | a GFlowNet with a diverse buffer | `gflownet` |
# | one buffer over several devices | `devices` |
# | one buffer for many processes | `manager_worker` |

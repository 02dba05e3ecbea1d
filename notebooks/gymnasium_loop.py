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
# # An ordinary Python loop around a Gymnasium environment
#
# Not every environment runs inside JAX. This notebook trains DQN in a plain `for` loop over a
# Gymnasium vector environment, with the buffer inside a flax `TrainState`, and measures what to
# jit and what to donate.

# %%
# install jaxbuf[examples]
import functools
import tempfile
import time
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from flax import linen as nn
from flax import nnx
from flax.training.train_state import TrainState

import jaxbuf
from jaxbuf.interop import gymnasium_transitions, transition_like

plt.rcParams["figure.dpi"] = 80

# %% [markdown]
# ## Steps that are transitions, and steps that are not
#
# When an episode ends in a vector environment, its last observation is easily confused with the
# first observation of the next episode. By default (*next step* mode) the step after the end
# ignores your action and resets the environment, so that row is not a transition at all. In *same
# step* mode the last observation is in the infos. `gymnasium_transitions` handles both: `next_obs`
# is always the observation that the action led to, and `mask` is False for rows that are not
# transitions. A masked row takes no slot.

# %%
for mode in (gymnasium.vector.AutoresetMode.NEXT_STEP, gymnasium.vector.AutoresetMode.SAME_STEP):
    envs = gymnasium.make_vec(
        "CartPole-v1", 4, vectorization_mode="sync", vector_kwargs={"autoreset_mode": mode}
    )
    envs.action_space.seed(0)
    obs, _ = envs.reset(seed=0)
    ended, taken, episodes = None, 0, 0
    for _ in range(100):
        action = envs.action_space.sample()
        step = gymnasium_transitions(envs, obs, action, envs.step(action), ended)
        # The pole has fallen only where the episode has ended: no row mixes up two episodes.
        fallen = np.abs(step.transitions["next_obs"][:, 2]) > 12 * 2 * np.pi / 360
        out = np.abs(step.transitions["next_obs"][:, 0]) > 2.4
        assert np.array_equal(fallen[step.mask] | out[step.mask], step.ended[step.mask])
        taken, episodes = taken + step.mask.sum(), episodes + step.ended.sum()
        obs, ended = step.obs, step.ended
    print(f"{mode.value}: 400 rows, {taken} transitions, {episodes} episodes ended")
    # Every reset is a row, but for one that would come after the last.
    resets = episodes - ended.sum() if mode.value == "NextStep" else 0
    assert taken == 400 - resets
    envs.close()

# %% [markdown]
# ## The agent: a TrainState that holds its buffer
#
# A buffer is a pytree, so it can be a field of the state. `transition_like` makes the example from
# the spaces of the environment.

# %%
NUM_ENVS, CAPACITY, BATCH, DISCOUNT = 8, 20_000, 64, 0.99

envs = gymnasium.make_vec("CartPole-v1", NUM_ENVS, vectorization_mode="vector_entry_point")
num_actions = int(envs.single_action_space.n)


class Network(nn.Module):
    @nn.compact
    def __call__(self, x):
        for _ in range(2):
            x = nn.relu(nn.LayerNorm()(nn.Dense(64)(x)))
        return nn.Dense(num_actions)(x)


class Agent(TrainState):
    target_params: Any
    buffer: jaxbuf.ItemBuffer
    key: jax.Array


network = Network()
optimizer = optax.chain(optax.clip_by_global_norm(10.0), optax.adam(1e-3))


def new_agent(seed):
    key, params_key = jax.random.split(jax.random.key(seed))
    params = network.init(params_key, jnp.zeros((1, 4)))
    return Agent.create(
        apply_fn=network.apply,
        params=params,
        tx=optimizer,
        target_params=jax.tree.map(jnp.copy, params),
        buffer=jaxbuf.ItemBuffer.create(
            transition_like(envs), CAPACITY, sampler=jaxbuf.Prioritized(alpha=0.6, epsilon=1e-3)
        ),
        key=key,
    )


new_agent(0).buffer


# %% [markdown]
# ## Two jitted functions
#
# Every call from Python into JAX costs tens of microseconds. Therefore jit **whole steps** rather
# than single operations: one function acts, and another one adds, samples, learns and updates
# priorities. The second one **donates** the agent, which holds the buffer, so that storage is
# updated in place.


# %%
@jax.jit
def act(params, obs, key, epsilon):
    greedy = jnp.argmax(network.apply(params, obs), axis=-1)
    explore_key, action_key = jax.random.split(key)
    anything = jax.random.randint(action_key, greedy.shape, 0, num_actions)
    return jnp.where(jax.random.uniform(explore_key, greedy.shape) < epsilon, anything, greedy)


def learn(agent, transitions, mask, beta):
    """Add a step of all environments, then update once."""
    key, sample_key = jax.random.split(agent.key)
    buffer = agent.buffer.add(transitions, mask=mask)
    batch = buffer.sample(sample_key, BATCH)
    weights = jaxbuf.importance_weights(buffer, batch, beta)
    data = batch.data

    def loss(params):
        value = jnp.take_along_axis(
            network.apply(params, data["obs"]), data["action"][:, None], axis=1
        )[:, 0]
        best = jnp.argmax(network.apply(params, data["next_obs"]), axis=1)[:, None]
        following = network.apply(agent.target_params, data["next_obs"])
        following = jnp.take_along_axis(following, best, axis=1)[:, 0]
        # Bootstrap where the time limit struck, not where the pole fell.
        target = data["reward"] + jnp.where(data["terminated"], 0.0, DISCOUNT * following)
        error = value - jax.lax.stop_gradient(target)
        # Rows that are not valid have weight 0.
        return 0.5 * jnp.mean(weights * error**2), error

    gradients, error = jax.grad(loss, has_aux=True)(agent.params)
    agent = agent.apply_gradients(grads=gradients)
    return agent.replace(
        target_params=optax.incremental_update(agent.params, agent.target_params, 0.01),
        buffer=buffer.update_priority(batch.slots, jnp.abs(error)),
        key=key,
    )


learn_in_place = jax.jit(learn, donate_argnums=0)

# %% [markdown]
# ## The loop

# %%
STEPS = 2_500


def run(agent, envs, steps):
    """Returns the agent after `steps` of all environments, and (step, return) of every episode."""
    obs, _ = envs.reset(seed=1)
    ended, returns, log = None, np.zeros(envs.num_envs), []
    keys = jax.random.split(jax.random.key(2), steps)
    for i in range(steps):
        epsilon = max(0.05, 1 - i / (0.3 * steps))
        action = np.asarray(act(agent.params, obs, keys[i], epsilon))
        step = gymnasium_transitions(envs, obs, action, envs.step(action), ended)
        agent = learn_in_place(agent, step.transitions, step.mask, 0.4 + 0.6 * i / steps)
        obs, ended = step.obs, step.ended
        returns += step.transitions["reward"]
        log += [(i * envs.num_envs, value) for value in returns[ended]]
        returns[ended] = 0
    return agent, np.asarray(log)


began = time.perf_counter()
agent, log = run(new_agent(0), envs, STEPS)
seconds = time.perf_counter() - began
print(f"{STEPS * NUM_ENVS:,} environment steps and {STEPS:,} updates in {seconds:.0f} s")

early, late = log[: len(log) // 4, 1].mean(), log[-30:, 1].mean()
print(f"return: {early:.0f} in the first quarter of the episodes, {late:.0f} in the last 30")
assert agent.buffer.metrics()["adds"] <= STEPS * NUM_ENVS
assert early < 50
assert late > 100

# %%
plt.plot(log[:, 0], log[:, 1], ".", alpha=0.3, label="episodes")
width = 30
smooth = np.convolve(log[:, 1], np.ones(width) / width, "valid")
plt.plot(log[width - 1 :, 0], smooth, label=f"mean of {width}")
plt.xlabel("environment steps")
plt.ylabel("return")
plt.title("DQN on CartPole-v1, in a Python loop")
plt.legend()
plt.show()

# %% [markdown]
# At the end the buffer holds the last transitions in order. Many of them have small errors, and few
# have large ones.

# %%
jaxbuf.plot(agent.buffer)

# %% [markdown]
# ## How fast, and why
#
# Here is the same call in three ways. The buffer is large, half a million transitions, because that
# is when the differences show.
#
# * **not jitted**: every operation inside `add` is dispatched separately;
# * **jitted, not donated**: the old buffer has to stay intact, so everything in it is copied;
# * **`jaxbuf.add`** is jitted and donates.


# %%
def microseconds(call, argument, repeats):
    """Returns the median time of a call whose result is the next argument."""
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        argument = jax.block_until_ready(call(argument))
        times.append(time.perf_counter() - began)
    return 1e6 * np.median(times)


transitions = jax.tree.map(jnp.asarray, step.transitions)
large = jaxbuf.ItemBuffer.create(transition_like(envs), 500_000, sampler=jaxbuf.Prioritized())
copying = functools.partial(jaxbuf.add, items=transitions, donate=False)
ways = {
    "not jitted": (lambda buffer: buffer.add(transitions), 2),
    "jitted, not donated": (lambda buffer: copying(buffer), 10),
    "jaxbuf.add": (lambda buffer: jaxbuf.add(buffer, transitions), 200),
}
took = {}
for name, (call, repeats) in ways.items():
    warm = call(large if name != "jaxbuf.add" else jax.tree.map(jnp.copy, large))
    took[name] = microseconds(call, warm, repeats)
print(*(f"{name:<22}{took[name]:10,.0f} µs" for name in took), sep="\n")
assert took["jitted, not donated"] > 5 * took["jaxbuf.add"]
assert took["not jitted"] > 5 * took["jaxbuf.add"]

# %% [markdown]
# This is where the time of the loop above goes. One call of a fused step is cheaper than three
# calls, because one program does all of the work.

# %%
batch = jaxbuf.sample(agent.buffer, jax.random.key(0), BATCH)
error = jnp.ones(BATCH)
actions = np.zeros(NUM_ENVS, np.int64)
parts = {
    "environment": lambda _: envs.step(actions),
    "act": lambda _: act(agent.params, obs, jax.random.key(0), 0.1),
    "adapter": lambda _: gymnasium_transitions(envs, obs, actions, result, ended),
}
ended = np.zeros(envs.num_envs, bool)
result = envs.step(actions)
times = {name: microseconds(call, None, 300) for name, call in parts.items()}
arguments = (step.transitions, step.mask, 0.4)
times["learn (all of it)"] = microseconds(lambda a: learn_in_place(a, *arguments), agent, 300)
print(*(f"{name:<20}{times[name]:8.0f} µs" for name in times), sep="\n")

# %% [markdown]
# `explain_memory` reports whether a function updates the buffer in place, without running it.

# %%
agent = new_agent(0)
report = jaxbuf.explain_memory(learn, agent, *arguments)
assert not [name for name in report.copied if "buffer" in name]
for leaf in report.leaves:
    if "buffer" in leaf.name:
        print(f"{leaf.name:<42}{leaf.fate}")

# %% [markdown]
# ## Save and resume
#
# The agent is one pytree, and so is its checkpoint.

# %%
agent, _ = run(agent, envs, 100)
with tempfile.TemporaryDirectory() as folder:
    jaxbuf.save(f"{folder}/agent", agent)
    resumed = jaxbuf.load(f"{folder}/agent", like=new_agent(0))
assert jax.tree.all(jax.tree.map(lambda a, b: jnp.array_equal(a, b), agent, resumed))
int(resumed.step), int(resumed.buffer.size)

# %% [markdown]
# ## With flax nnx
#
# An nnx module can hold the buffer as `nnx.data`. The optimizer tells parameters from the buffer by
# their type, `nnx.Param`. `donate_argnums` names the module, or every step would copy the buffer.


# %%
class Values(nnx.Module):
    def __init__(self, buffer, rngs):
        self.hidden = nnx.Linear(4, 64, rngs=rngs)
        self.out = nnx.Linear(64, num_actions, rngs=rngs)
        self.buffer = nnx.data(buffer)

    def __call__(self, x):
        return self.out(nnx.relu(self.hidden(x)))


traces = []


@functools.partial(nnx.jit, donate_argnums=0)
def update(model, optimizer, key):
    traces.append(1)
    batch = model.buffer.sample(key, BATCH)

    def loss(model):
        values = model(batch.data["obs"])
        value = jnp.take_along_axis(values, batch.data["action"][:, None], axis=1)[:, 0]
        error = value - batch.data["reward"]
        return jnp.mean(error**2), error

    where = nnx.DiffState(0, nnx.Param)
    (value, error), gradients = nnx.value_and_grad(loss, argnums=where, has_aux=True)(model)
    optimizer.update(model, gradients)
    model.buffer = model.buffer.update_priority(batch.slots, jnp.abs(error))
    return value


model = Values(resumed.buffer, nnx.Rngs(0))
adam = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
losses = [update(model, adam, key) for key in jax.random.split(jax.random.key(0), 200)]
print(f"loss {losses[0]:.3f} at first, {losses[-1]:.3f} in the end")
assert losses[-1] < losses[0] / 4
assert traces == [1]

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
# # Hindsight experience replay
#
# The task is to flip one bit per step until all bits match a goal. Every step costs 1 until they
# do. With many bits, random play almost never reaches the goal, so a learner sees only rewards of
# −1. **Hindsight** (Andrychowicz et al., NeurIPS 2017) learns from states that were reached: it
# replays an episode as if one of its own later states had been the goal.

# %%
# install jaxbuf[examples]
import sys

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import jaxbuf

sys.path.insert(0, "../examples")  # the scripts in the clone in which this notebook lies
from bit_flipping import Agent, Config, reward

plt.rcParams["figure.dpi"] = 80

# %% [markdown]
# ## Episodes in a buffer
#
# New goals come from other steps of the same episode, so each item is a whole episode, padded to a
# common length. We take `Agent` from `examples/bit_flipping.py`, let it play for a
# while, and store its episodes.

# %%
config = Config(bits=10, seeds=2, episodes=1_920, capacity=1_920)
agent = Agent(config)
state = agent.init(jax.random.key(0), jnp.float32(config.fraction))
episodes = agent.play(state.params, jax.random.key(1), 64, 1.0)
buffer = jaxbuf.add(state.buffer, episodes)
print(f"{int(episodes.success.sum())} of 64 random episodes succeed")
buffer

# %% [markdown]
# ## Other goals for old episodes
#
# Sample episodes, choose a step of each, and let `jaxbuf.hindsight` replace some of the goals. It
# needs the goals that the episodes achieved, and the reward function.

# %%
batch_size = 256
sample = jaxbuf.sample(buffer, jax.random.key(2), batch_size)
rows = jnp.arange(batch_size)
t = jax.random.randint(jax.random.key(3), (batch_size,), 0, sample.data.length)
achieved = sample.data.states[:, 1:]  # what each action led to
batch = {
    "obs": sample.data.states[rows, t],
    "action": sample.data.action[rows, t],
    "achieved_goal": achieved[rows, t],
    "goal": sample.data.goal,
}
batch["reward"] = reward(batch["achieved_goal"], batch["goal"])

relabel = jax.jit(
    lambda key, batch: jaxbuf.hindsight(
        key,
        batch,
        achieved,
        t,
        sample.data.length,
        strategy="future",
        fraction=0.8,
        reward_fn=reward,
    )
)
relabeled, which = relabel(jax.random.key(4), batch)

print(f"rewarded before: {float(jnp.mean(batch['reward'] == 0)):.1%}")
print(f"relabeled:       {float(which.mean()):.1%}")
print(f"rewarded after:  {float(jnp.mean(relabeled['reward'] == 0)):.1%}")
assert 0.7 < which.mean() < 0.9
assert jnp.mean(relabeled["reward"] == 0) > 5 * jnp.mean(batch["reward"] == 0)

# %% [markdown]
# Rows that are not relabeled stay as they were, and each new goal was achieved by the episode at
# that step or later. The figure shows the episode of one row, with its old and its new goal.

# %%
which, new = np.asarray(which), np.asarray(relabeled["goal"])
assert np.array_equal(new[~which], np.asarray(batch["goal"])[~which])
steps, ends = np.asarray(t), np.asarray(sample.data.length)
reached = np.asarray(achieved)
for row in np.flatnonzero(which):
    assert np.any(np.all(reached[row, steps[row] : ends[row]] == new[row], axis=1))

row = int(np.flatnonzero(which & (steps == 3))[0])
names = [f"after step {i + 1}" for i in range(config.bits)] + ["goal asked for", "goal replayed"]
bits = np.concatenate([reached[row], batch["goal"][row][None], new[row][None]])
_, axes = plt.subplots(figsize=(4.5, 4))
axes.imshow(bits, cmap="Blues", vmax=1.6)
axes.set_yticks(range(len(names)), names)
axes.set_xlabel("bit")
axes.axhline(config.bits - 0.5, color="tab:red")
axes.plot(-0.8, steps[row], ">", color="tab:red", clip_on=False)
axes.set_title("the states after the marked step may be goals")
plt.show()

# %% [markdown]
# Windows of a `TrajectoryBuffer` can be relabeled as well, with goals from the rings: see the
# second example in `help(jaxbuf.hindsight)`.

# %% [markdown]
# ## With hindsight, and without
#
# Now we train DQN with both kinds of replay, with two seeds each. The share of relabeled
# transitions is an argument of the program, so all four runs are one `vmap`.

# %%
CHUNKS = 10


def go_on(state):
    state = agent.train(state, config.episodes // config.num_envs // CHUNKS)
    return state, agent.evaluate(state, jax.random.key(0))


keys = jax.random.split(jax.random.key(5), config.seeds)
fractions = jnp.asarray([0.0, config.fraction], jnp.float32)
init = jax.vmap(jax.vmap(agent.init, in_axes=(0, None)), in_axes=(None, 0))
train = jax.jit(jax.vmap(jax.vmap(go_on)), donate_argnums=0)
states = jax.jit(init)(keys, fractions)
rates = []
for _ in range(CHUNKS):
    states, rate = train(states)
    rates.append(np.asarray(rate))
rates = np.asarray(rates)  # [CHUNKS, without and with, seeds]

without, with_ = rates[-1].mean(axis=1)
print(f"greedy episodes that succeed: {without:.0%} without hindsight, {with_:.0%} with")
assert with_ > 0.8
assert without < 0.3

# %%
played = config.episodes * np.arange(1, CHUNKS + 1) / CHUNKS
for i, (name, color) in enumerate({"DQN": "black", "DQN with hindsight": "tab:blue"}.items()):
    plt.plot(played, rates[:, i], color=color, alpha=0.3)
    plt.plot(played, rates[:, i].mean(axis=1), "o-", color=color, label=name)
plt.xlabel("episodes of each seed")
plt.ylabel("success rate")
plt.title(f"flipping {config.bits} bits")
plt.grid(alpha=0.3)
plt.legend()
plt.show()

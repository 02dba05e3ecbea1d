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
# # A GFlowNet with a diverse replay buffer
#
# A GFlowNet learns to build objects with probabilities **proportional to a reward**, rather than to
# find the best one. When rewards are rare it helps to replay objects that were found. The buffer
# should keep the states of highest reward, but not the same state a hundred times. This notebook
# builds such a buffer step by step, trains with it, and compares the learned distribution with the
# true one.

# %%
# install jaxbuf[examples]
import sys

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import jaxbuf

sys.path.insert(0, "../examples")  # the scripts in the clone in which this notebook lies
from gflownet import Agent, Config

plt.rcParams["figure.dpi"] = 80

# %% [markdown]
# ## The task
#
# The task is the hypergrid of Bengio et al. (NeurIPS 2021): start at the origin, increase one
# coordinate at a time, and stop anywhere. The reward is high near the four corners and almost zero
# between them, so a learner that follows the reward stays in the first corner.

# %%
config = Config(dims=2, height=16, background=0.01, seeds=3, capacity=100, lr=2e-3, exploration=0.2)
grid = config.grid
target = np.asarray(grid.target()).reshape(16, 16)
plt.figure(figsize=(3.6, 3))
plt.imshow(target.T, origin="lower")
plt.colorbar(label="probability")
plt.title("target distribution")
plt.xlabel("first coordinate")
plt.ylabel("second coordinate")
plt.show()

# %% [markdown]
# ## A buffer that keeps the best
#
# This takes two strategies: the evictor `Lowest` replaces the item of the lowest score, and the
# sampler draws by the softmax of scores. The score is the logarithm of the reward, so with
# temperature 1 states are drawn in proportion to their rewards. `jaxbuf.reward_prioritized` is a
# preset for this combination.

# %%
state = jax.ShapeDtypeStruct((2,), jnp.int32)
best = jaxbuf.ItemBuffer.create(
    state, 100, sampler=jaxbuf.Softmax(temperature=1.0), evictor=jaxbuf.Lowest()
)
found = jax.random.randint(jax.random.key(0), (2_000, 2), 0, 16)
score = grid.log_reward(found)
best = jaxbuf.add(best, found, score=score)
kept = np.asarray(best.data)
print(f"100 of 2,000 kept, {len(np.unique(kept, axis=0))} of them different")
assert np.isclose(np.asarray(grid.log_reward(best.data)).min(), np.sort(np.asarray(score))[-100])
best

# %% [markdown]
# ## ... and only new states
#
# Many of these are the same state. A `Diversity` filter refuses states within a cutoff of a better
# one, whether that is in the same batch or in the buffer. (`jaxbuf.diverse_reward_prioritized` is a
# preset whose filter begins once the buffer is full, or at once with `active="always"`.) In the
# figure, gray is the target, and larger dots stand for states that are stored several times.

# %%
diverse = jaxbuf.ItemBuffer.create(
    state,
    100,
    sampler=jaxbuf.Softmax(temperature=1.0),
    evictor=jaxbuf.Lowest(),
    diversity=jaxbuf.Diversity(cutoff=0.0),
)
diverse = jaxbuf.add(diverse, found, score=score)
kept_diverse = np.asarray(diverse.data)
assert diverse.size == 100
assert len(np.unique(kept_diverse, axis=0)) == 100
print(f"refused in the batch: {int(diverse.metrics()['refused_within_batch']):,}")

_, axes = plt.subplots(1, 2, figsize=(7, 3.2), sharey=True)
for axis, states, name in zip(
    axes, (kept, kept_diverse), ("best", "best and diverse"), strict=True
):
    where, times = np.unique(states, axis=0, return_counts=True)
    axis.imshow(target.T, origin="lower", cmap="Greys", alpha=0.5)
    axis.scatter(where[:, 0], where[:, 1], s=12 * times, color="tab:blue")
    axis.set(title=f"{name}: {len(where)} states", xlabel="first coordinate")
axes[0].set_ylabel("second coordinate")
plt.show()

# %% [markdown]
# ## Training with and without
#
# We take `Agent` from `examples/gflownet.py`, which uses trajectory balance (Malkin
# et al., 2022). Each update trains on the same number of trajectories with a buffer and without.
# With a buffer, half of them are replayed: terminal states are drawn from the buffer, and the
# backward policy walks from them to the origin. Inside its jitted step, the agent uses its buffer
# like this:
#
# ```python
# buffer = buffer.add(last, score=grid.log_reward(last), mask=valid)
# batch = buffer.sample(key, replayed)
# ```

# %%
CHUNKS, UPDATES = 8, 800
agents = {kind: Agent(config, kind) for kind in ("none", "diverse")}
keys = jax.random.split(jax.random.key(0), config.seeds)
distance, learned, states = {}, {}, {}
for kind, agent in agents.items():

    def chunk(states, agent=agent):
        states = jax.vmap(lambda state: agent.train(state, UPDATES // CHUNKS))(states)
        return states, jax.vmap(agent.gflownet.stopping_distribution)(states.params)

    train = jax.jit(chunk, donate_argnums=0)
    states[kind] = jax.jit(jax.vmap(agent.init))(keys)
    rows = []
    for _ in range(CHUNKS):
        states[kind], stops = train(states[kind])
        rows.append(np.abs(np.asarray(stops) - target.reshape(-1)).sum(axis=1))
    distance[kind], learned[kind] = np.asarray(rows), np.asarray(stops)
    print(f"{kind:<8} distance to the target {np.median(distance[kind][-1]):.2f}")

# %%
updates = UPDATES // CHUNKS * np.arange(1, CHUNKS + 1)
for kind, color in {"none": "black", "diverse": "tab:blue"}.items():
    plt.plot(updates, distance[kind], color=color, alpha=0.3)
    plt.plot(updates, np.median(distance[kind], axis=1), "o-", color=color, label=kind)
plt.xlabel("updates")
plt.ylabel("sum of absolute differences")
plt.title("distance to the target (between 0 and 2)")
plt.grid(alpha=0.3)
plt.legend(title="buffer")
plt.show()

# %% [markdown]
# ## The learned distribution beside the true one
#
# The figure shows the probability of stopping in each state, computed exactly by passing flow
# through the grid.

# %%
panels = {"target": target}
for kind in agents:
    seed = int(np.argsort(distance[kind][-1])[config.seeds // 2])
    panels[f"learned, buffer: {kind}"] = learned[kind][seed].reshape(16, 16)
figure, axes = plt.subplots(1, 3, figsize=(9, 3), sharey=True, layout="constrained")
for axis, (name, panel) in zip(axes, panels.items(), strict=True):
    image = axis.imshow(panel.T, origin="lower", vmin=0, vmax=target.max())
    axis.set(title=name, xlabel="first coordinate")
axes[0].set_ylabel("second coordinate")
figure.colorbar(image, ax=axes, label="probability")
plt.show()

# %%
corners = np.asarray(grid.mode(grid.states()))
mass = {
    name: [round(float(panel.reshape(-1)[corners == m].sum()), 2) for m in range(grid.num_modes)]
    for name, panel in panels.items()
}
for name, masses in mass.items():
    print(f"{name:<24} probability of the modes {masses}")

# With the buffer the target is nearer and no corner is forgotten, and that from half as many fresh
# trajectories.
truth, with_buffer = mass["target"], mass["learned, buffer: diverse"]
assert agents["diverse"].fresh == agents["none"].fresh // 2
assert np.median(distance["diverse"][-1]) < 0.35
assert np.median(distance["diverse"][-1]) < np.median(distance["none"][-1])
assert min(with_buffer) > 0.4 * min(truth)

# %% [markdown]
# At the end the buffer holds the states of all four corners.

# %%
buffer = jax.tree.map(lambda leaf: leaf[0], states["diverse"].buffer)
held = {tuple(state) for state in np.asarray(buffer.data).tolist()}
rewarded = grid.states()[grid.log_reward(grid.states()) > np.log(0.4)]
corner_states = {tuple(state) for state in rewarded.tolist()}
print(f"{len(held & corner_states)} of the {len(corner_states)} states of high reward")
assert len(held & corner_states) > 0.9 * len(corner_states)
jaxbuf.plot(buffer)

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
# # Prioritized replay
#
# The choice of transitions to replay can change the number of updates that a learner needs by
# orders of magnitude. This notebook measures the effect twice:
#
# 1. on the **Blind Cliffwalk** of Schaul et al. (*Prioritized Experience Replay*, ICLR 2016,
#    figure 1): the number of updates until the value function is learned, against the number of
#    transitions in memory, with uniform replay, with priorities, and with an oracle;
# 2. with **DQN on CartPole**, uniform against prioritized replay.

# %%
# install jaxbuf[examples]
import functools
import sys

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import jaxbuf

sys.path.insert(0, "../examples")  # the scripts in the clone in which this notebook lies
from dqn import Agent, Config

plt.rcParams["figure.dpi"] = 80

# %% [markdown]
# ## The Blind Cliffwalk
#
# There are $n$ states in a row. In each, the *right* action leads to the next state, and the
# *wrong* action leads over the cliff and ends the episode. Only the right action in the last state
# has a reward, of 1. The memory holds the transitions of all $2^n$ sequences of actions, each up to
# its first wrong action: $2^{n+1} - 2$ transitions, of which a **single one** has the reward.


# %%
MOST = 12
CAPACITY = 2 ** (MOST + 1) - 2


def memory(n):
    """Returns all transitions of n states, padded to CAPACITY rows, and a mask of the real rows."""
    # Half of the sequences that reach a state take the right action there, and half the wrong one.
    state = np.repeat(np.arange(n), 2 ** (n - 1 - np.arange(n)))
    state, right = np.concatenate([state, state]), np.repeat([True, False], len(state))
    real = np.arange(CAPACITY) < len(state)
    padding = (0, CAPACITY - len(state))
    return {"state": np.pad(state, padding), "right": np.pad(right, padding)}, real


for n in range(2, MOST + 1):
    items, real = memory(n)
    assert real.sum() == 2 ** (n + 1) - 2
    assert np.sum(real & items["right"] & (items["state"] == n - 1)) == 1

# %% [markdown]
# The learner is tabular Q-learning as in the paper: one transition per update, step size 1/4,
# discount $1 - 1/n$, and initial values near 0. It stops when the mean squared error of the values
# is below $10^{-3}$.

# %%
STEP_SIZE, THRESHOLD, SEEDS, MOST_UPDATES = 0.25, 1e-3, 10, 1_000_000


def first_values(key):
    return 0.1 * jax.random.normal(key, (MOST, 2))


def td_error(values, n, state, right):
    """Returns the TD errors of transitions; the columns of `values` are wrong and right."""
    following = values[jnp.minimum(state + 1, MOST - 1)].max(-1)
    target = jnp.where(state + 1 < n, (1 - 1 / n) * following, 1.0)
    return jnp.where(right, target, 0.0) - values[state, right.astype(int)]


def squared_error(values, n):
    state = jnp.arange(MOST)
    truth = jnp.stack([jnp.zeros(MOST), (1 - 1 / n) ** (n - 1 - state)], axis=1)
    return jnp.sum(jnp.where(state[:, None] < n, (values - truth) ** 2, 0.0)) / (2 * n)


# %% [markdown]
# Now we replay from a jaxbuf buffer. The whole experiment is one compiled loop, and `vmap` runs ten
# seeds of it. The memories are padded and `mask` marks the real rows, so one program serves all
# $n$. Unlike the paper's agents on Atari, this one uses no importance weights. New transitions have
# the highest priority, so each of them is replayed at least once. After an update the priority is
# the absolute TD error.


# %%
@functools.partial(jax.jit, static_argnames="sampler")
def replay(sampler, n, items, real, keys):
    """Returns the number of updates that each seed takes."""

    def one_seed(key):
        key, first_key = jax.random.split(key)
        example = {"state": jnp.int32(0), "right": jnp.bool_(False)}
        buffer = jaxbuf.ItemBuffer.create(example, CAPACITY, sampler=sampler)
        buffer = buffer.add(items, mask=real)

        def unfinished(carry):
            values, _, updates, _ = carry
            return (squared_error(values, n) > THRESHOLD) & (updates < MOST_UPDATES)

        def update(carry):
            values, buffer, updates, key = carry
            key, sample_key = jax.random.split(key)
            batch = buffer.sample(sample_key, 1)
            state, right = batch.data["state"], batch.data["right"]
            error = td_error(values, n, state, right)
            values = values.at[state, right.astype(int)].add(STEP_SIZE * error)
            if sampler.uses_priority:
                buffer = buffer.update_priority(batch.slots, jnp.abs(error))
            return values, buffer, updates + 1, key

        start = (first_values(first_key), buffer, jnp.int32(0), key)
        return jax.lax.while_loop(unfinished, update, start)[2]

    return jax.vmap(one_seed)(keys)


# %% [markdown]
# The oracle knows the true values, tries every transition, and takes the one that lowers the error
# most. It cannot be used on a real problem, but it shows how much there is to gain.


# %%
@jax.jit
def oracle(n, keys):
    """Returns the number of updates that each seed takes."""
    state = jnp.tile(jnp.arange(MOST), 2)
    right = jnp.repeat(jnp.array([True, False]), MOST)
    exists = state < n

    def update(carry):
        values, updates = carry
        error = STEP_SIZE * td_error(values, n, state, right)
        every = jax.vmap(lambda s, r, e: values.at[s, r.astype(int)].add(e))(state, right, error)
        left = jax.vmap(squared_error, (0, None))(every, n)
        return every[jnp.argmin(jnp.where(exists, left, jnp.inf))], updates + 1

    def unfinished(carry):
        return squared_error(carry[0], n) > THRESHOLD

    def one_seed(key):
        _, first_key = jax.random.split(key)
        start = (first_values(first_key), jnp.int32(0))
        return jax.lax.while_loop(unfinished, update, start)[1]

    return jax.vmap(one_seed)(keys)


# %%
samplers = {
    "uniform": jaxbuf.Uniform(),
    "proportional": jaxbuf.Prioritized(alpha=1.0, epsilon=1e-4),
}
keys = jax.random.split(jax.random.key(0), SEEDS)
sizes = []
updates = {name: [] for name in (*samplers, "oracle")}
print(f"{'transitions':>11} " + " ".join(f"{name:>12}" for name in updates))
for n in range(2, MOST + 1):
    items, real = memory(n)
    sizes.append(int(real.sum()))
    for name, sampler in samplers.items():
        updates[name].append(np.asarray(replay(sampler, jnp.float32(n), items, real, keys)))
    updates["oracle"].append(np.asarray(oracle(jnp.float32(n), keys)))
    medians = " ".join(f"{np.median(counts[-1]):12,.0f}" for counts in updates.values())
    print(f"{sizes[-1]:11,} {medians}")

# %%
colors = {"uniform": "black", "proportional": "tab:blue", "oracle": "tab:cyan"}
for name, counts in updates.items():
    counts = np.asarray(counts)
    plt.plot(sizes, counts, color=colors[name], alpha=0.2, linewidth=0.8)
    plt.plot(sizes, np.median(counts, axis=1), "o-", color=colors[name], label=name)
plt.xscale("log")
plt.yscale("log")
plt.xlabel("transitions in the replay memory")
plt.ylabel("updates until learned")
plt.title(f"Blind Cliffwalk: median of {SEEDS} seeds, and each of them")
plt.grid(alpha=0.3)
plt.legend()
plt.show()

# %% [markdown]
# As in figure 1 of the paper, with both axes logarithmic:
#
# * with **uniform** replay the number of updates grows in proportion to the memory, and thus
#   exponentially in $n$: the learner waits for the one transition with the reward again and again;
# * with the **oracle** it grows like a power of $n$, the logarithm of the memory;
# * **proportional** priorities are in between. Every new transition has to be replayed once before
#   its priority is known, which still takes time in proportion to the memory. After that, the
#   errors lead the reward backwards quickly.

# %%
median = {name: np.median(np.asarray(counts), axis=1) for name, counts in updates.items()}
large = np.asarray(sizes) >= 100


def growth(name):
    """The slope in the picture for large memories: k where updates grow like transitions**k."""
    return np.polyfit(np.log(np.asarray(sizes)[large]), np.log(median[name][large]), 1)[0]


assert all(max(map(np.max, counts)) < MOST_UPDATES for counts in updates.values())
assert np.all(median["oracle"] <= median["proportional"])
assert np.all(median["proportional"] < median["uniform"])
assert median["uniform"][-1] > 8 * median["proportional"][-1]
assert median["uniform"][-1] > 100 * median["oracle"][-1]
slopes = {name: round(float(growth(name)), 2) for name in updates}
assert 0.9 < slopes["uniform"] < 1.2
assert slopes["oracle"] < 0.4
assert slopes["oracle"] < slopes["proportional"] < slopes["uniform"]
# Exponential in n: one more state doubles what uniform replay needs; of the oracle's need, a part.
assert 1.8 < (median["uniform"][-1] / median["uniform"][-6]) ** 0.2 < 2.3
assert (median["oracle"][-1] / median["oracle"][-6]) ** 0.2 < 1.3
slopes

# %% [markdown]
# ## DQN on CartPole
#
# `examples/dqn.py` is a complete agent: double DQN on a gymnax environment, with a prioritized
# `TrajectoryBuffer` and importance weights whose exponent is annealed to 1, all in one `lax.scan`.
# Prioritized replay takes one argument when the buffer is created, and three lines of learning:
#
# ```python
# batch = buffer.sample(key, batch_size)
# weights = jaxbuf.importance_weights(buffer, batch, beta)
# ...                                                         # error: TD errors of the batch
# buffer = buffer.update_priority(batch.slots, jnp.abs(error))
# ```
#
# Here is a short run of both, with two seeds in one program. `python examples/dqn.py` runs
# more than ten times as long and solves the task.

# %%
STEPS, CHUNKS, WARMUP = 15_000, 10, 1_000
agents = {
    name: Agent(Config(sampler=name, steps=STEPS, warmup=WARMUP, capacity=STEPS))
    for name in ("uniform", "prioritized")
}
length = (STEPS - WARMUP) // CHUNKS // Config().num_envs
keys = jax.random.split(jax.random.key(0), 2)
returns = {}
for name, agent in agents.items():
    states = jax.jit(jax.vmap(agent.init))(keys)
    # Donated: the buffers are updated where they are.
    train = jax.jit(jax.vmap(lambda s, a=agent: a.train(s, length)), donate_argnums=0)
    logs = []
    for _ in range(CHUNKS):
        states, log, metrics = train(states)
        ended = np.asarray(log.episodes)
        logs.append(np.where(ended > 0, log.total_return / np.maximum(ended, 1), np.nan))
    returns[name] = np.asarray(logs)
    print(f"{name:<12} return in training, last third: {np.nanmean(returns[name][-3:]):.0f}")

# %%
steps = WARMUP + (STEPS - WARMUP) * np.arange(1, CHUNKS + 1) / CHUNKS
for name, color in {"uniform": "black", "prioritized": "tab:blue"}.items():
    plt.plot(steps, returns[name], color=color, alpha=0.2)
    plt.plot(steps, np.nanmean(returns[name], axis=1), "o-", color=color, label=name)
plt.xlabel("environment steps of each seed")
plt.ylabel("return in training")
plt.title("DQN on CartPole-v1")
plt.grid(alpha=0.3)
plt.legend()
plt.show()

# A random policy makes about 22 steps.
for name in returns:
    assert np.nanmean(returns[name][0]) < 50
    assert np.nanmean(returns[name][-3:]) > 100, name

# %% [markdown]
# Both learn, and neither is clearly better: on CartPole every step has a reward, so there is no
# rare transition for priorities to find. They help more where rewards are rare, as on the cliff
# above.
#
# The effective sample size shows how uneven the priorities are: it is the number of equally likely
# transitions that would give the same variety.

# %%
buffer = metrics["buffer"]
for seed in range(2):
    share = float(buffer["effective_sample_size"][seed] / buffer["windows"][seed])
    print(f"seed {seed}: {share:.0%} of {int(buffer['windows'][seed]):,} windows")
    assert 0.02 < share < 0.98

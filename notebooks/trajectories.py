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
# # Trajectories: windows, n-step returns, episodes, stacked frames
#
# A `TrajectoryBuffer` keeps the last steps of several environments in order of time, and draws
# **windows** of consecutive steps. Windows give n-step returns, sequences for recurrent networks,
# and stacks of frames that are stored only once. The figures below show the actual contents of the
# memory.

# %%
# install jaxbuf[examples]
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import jaxbuf

plt.rcParams["figure.dpi"] = 80

# %% [markdown]
# ## One ring per environment
#
# Row `t` of an environment holds the observation before an action, and the reward and the flags
# after it. Here the observation is the number of the step, and the reward counts the steps of an
# episode, so that the figures are easy to read. Episodes last 5 to 8 steps.

# %%
step = {
    "obs": jnp.int32(0),
    "reward": jnp.float32(0),
    "terminated": jnp.bool_(False),
}
NUM_ENVS, LENGTH, WINDOW = 3, 20, 4
buffer = jaxbuf.TrajectoryBuffer.create(step, NUM_ENVS, LENGTH, sequence_length=WINDOW)
buffer


# %%
def record(first, count):
    """Steps first, first + 1, ... of all environments, leaves [num_envs, count]."""
    length = np.array([[5], [6], [8]])
    time = np.arange(first, first + count)
    return {
        "obs": np.broadcast_to(time, (NUM_ENVS, count)).astype(np.int32),
        "reward": (time % length + 1).astype(np.float32),
        "terminated": time % length == length - 1,
    }


# Light and dark in turn, so that neighbors differ in brightness as well.
EPISODE_COLORS = ("#fee8a0", "#9ecae1", "#f7f7f7", "#c4b7d7")


def draw(buffer, windows=(), title=""):
    """Draws the steps of each ring in the color of their episode, write positions, and windows."""
    # One ring after the other.
    number, ends = (
        np.asarray(buffer.data[name]).reshape(NUM_ENVS, LENGTH) for name in ("obs", "terminated")
    )
    earliest, end = buffer.earliest_position.tolist(), buffer.end_position.tolist()
    _, axes = plt.subplots(figsize=(9, 0.8 * NUM_ENVS + 0.6))
    for env in range(NUM_ENVS):
        episode = 0
        for place in np.arange(earliest[env], end[env]) % LENGTH:
            color = EPISODE_COLORS[episode % len(EPISODE_COLORS)]
            episode += ends[env, place]
            axes.add_patch(plt.Rectangle((place, env - 0.3), 1, 0.6, fc=color, ec="white"))
            axes.text(place + 0.5, env, number[env, place], ha="center", va="center", fontsize=8)
        axes.plot(end[env] % LENGTH, env - 0.42, "v", color="tab:red", clip_on=False)
    for i, (env, first) in enumerate(windows):
        places = (np.asarray(first) + np.arange(WINDOW)) % LENGTH
        for place in places:
            below = env + 0.36 + 0.07 * (i % 3)
            axes.plot([place + 0.05, place + 0.95], [below, below], color="black", linewidth=2)
    axes.set(xlim=(-0.2, LENGTH + 0.2), ylim=(NUM_ENVS - 0.4, -0.6), xlabel="place in the ring")
    axes.set_xticks(range(0, LENGTH + 1, 5))
    axes.set_yticks(range(NUM_ENVS), [f"environment {env}" for env in range(NUM_ENVS)])
    axes.set_title(title)
    axes.spines[:].set_visible(False)
    plt.show()


# %% [markdown]
# Add one step of every environment, `[num_envs, ...]`, or several, `[num_envs, T, ...]`. A `mask`
# marks the rows to add, so environments may run at different speeds, and padded rollouts need no
# preparation. The red marks are the write positions.

# %%
buffer = jaxbuf.add(buffer, record(0, 9))
mask = np.arange(9) < np.array([[2], [5], [9]])
buffer = jaxbuf.add(buffer, record(9, 9), mask=mask)
draw(buffer, title="each environment has its own write position")

assert buffer.end_position.tolist() == [11, 14, 18]
assert buffer.size == 11 + 14 + 18

# %% [markdown]
# Once a ring is full, the newest step replaces the earliest.

# %%
buffer = jaxbuf.TrajectoryBuffer.create(step, NUM_ENVS, LENGTH, sequence_length=WINDOW)
buffer = jaxbuf.add(buffer, record(0, 25))
draw(buffer, title="25 steps in rings of 20")

assert buffer.earliest_position.tolist() == [5] * NUM_ENVS
assert buffer.end_position.tolist() == [25] * NUM_ENVS

# %% [markdown]
# `jaxbuf.plot` draws any buffer, even one with millions of steps.

# %%
jaxbuf.plot(buffer)

# %% [markdown]
# ## Windows
#
# The leaves of a sample have shape `[B, sequence_length, ...]`. A window may continue from the end
# of the memory to its beginning, but it never crosses a write position, where a new step is next to
# an old one. The black lines are a few of the windows that were drawn.

# %%
batch = jaxbuf.sample(buffer, jax.random.key(0), 256)
number = np.asarray(batch.data["obs"])
assert number.shape == (256, WINDOW)
assert np.all(np.diff(number, axis=1) == 1)
assert set(number[:, 0].tolist()) == set(range(5, 25 - WINDOW + 1))

env, position = (np.asarray(x) for x in buffer.locate(batch.slots))
draw(buffer, list(zip(env[:7], position[:7], strict=True)), "seven of the windows drawn")

# %% [markdown]
# With `period`, windows start only at every `period`-th place: with `period=sequence_length` they
# are disjoint, and each step is in one window. With `sampler=jaxbuf.Prioritized()` windows have
# priorities, which `update_priority` sets as it does for items.

# %%
disjoint = jaxbuf.TrajectoryBuffer.create(
    step, NUM_ENVS, LENGTH, sequence_length=WINDOW, period=WINDOW
)
disjoint = jaxbuf.add(disjoint, record(0, 20))
starts = jaxbuf.sample(disjoint, jax.random.key(0), 256).data["obs"][:, 0]
assert sorted(set(starts.tolist())) == [0, 4, 8, 12, 16]

# %% [markdown]
# ## n-step returns
#
# For each step of a window that is followed by n more, `n_step` returns the discounted sum of
# rewards, the factor of the bootstrapped value, and the step of the window to bootstrap from. The
# sum stops where an episode terminates.

# %%
N, DISCOUNT = 3, 0.9
targets = jaxbuf.n_step(batch.data, N, DISCOUNT)

# The same for one window, by hand.
reward, terminated = (np.asarray(batch.data[name]) for name in ("reward", "terminated"))
for row in range(256):
    total, factor = 0.0, 1.0
    for t in range(N):
        total += factor * reward[row, t]
        factor *= 0.0 if terminated[row, t] else DISCOUNT
        if terminated[row, t]:
            break
    np.testing.assert_allclose(targets.reward[row, 0], total, rtol=1e-6)
    np.testing.assert_allclose(targets.discount[row, 0], factor, rtol=1e-6)

row = int(np.argmax(terminated[:, 1]))
print("rewards     ", reward[row])
print("terminated  ", terminated[row])
print("3-step sum  ", targets.reward[row, 0], " bootstrap counts", targets.discount[row, 0])

# %% [markdown]
# ## Episodes
#
# A window may reach from one episode into the next. With `episodes=Episodes(...)` the buffer knows
# where episodes begin and end, and you choose what to do: with `boundary="mask"` it tells you which
# steps belong to the episode of the first one, and with `boundary="avoid"` it never draws a window
# with steps of two episodes. Where an episode terminates, `"avoid"` also draws the windows that
# its end cuts short, padded with copies of the last step, unless `short_windows="never"` leaves
# them out as it does here. It can also record the return of every step, at a cost that does not
# depend on the size of the buffer.

# %%
episodes = jaxbuf.Episodes(
    boundary="avoid",
    short_windows="never",
    record_return=True,
    discount=1.0,
    default_return=-1,
)
whole = jaxbuf.TrajectoryBuffer.create(
    step, NUM_ENVS, LENGTH, sequence_length=WINDOW, episodes=episodes
)
whole = jaxbuf.add(whole, record(0, 25))
inside = jaxbuf.sample(whole, jax.random.key(0), 256)
assert not np.asarray(inside.data["terminated"])[:, :-1].any()

env, position = (np.asarray(x) for x in whole.locate(inside.slots))
draw(whole, list(zip(env[:7], position[:7], strict=True)), "windows that stay in one episode")

# %% [markdown]
# You can look up the episode of any step, by sampled window or by environment and position.
# Episodes that are still running have the default return.

# %%
positions = jnp.arange(10, 25)
episode = whole.episode(jnp.int32(0), positions)
print("step    ", *(f"{x:3d}" for x in positions.tolist()))
print("begin   ", *(f"{x:3d}" for x in episode.begin.tolist()))
print("left    ", *(f"{x:3d}" for x in episode.to_end.tolist()))
print("return  ", *(f"{x:3.0f}" for x in episode.value.tolist()))
# Rewards of environment 0 are 1, 2, 3, 4, 5 in each episode.
assert episode.begin.tolist() == [10] * 5 + [15] * 5 + [20] * 5
assert episode.to_end.tolist() == [4, 3, 2, 1, 0] * 3
assert episode.value.tolist() == [15, 14, 12, 9, 5] * 3

# %% [markdown]
# ## Stacked frames, each stored once
#
# An agent that sees the last four frames does not need four frames per step in memory, let alone
# eight with the next observation. Store single frames, sample windows of five, and let
# `stack_frames` make the last two stacks: an observation and the next one. A stack never shows
# frames of the previous episode. It repeats the first frame of its own episode, as an agent does
# after a reset.

# %%
SIZE, STACK = 9, 4


def frame(number):
    """Returns frames with a dot that moves one column per step of an episode."""
    row, column = np.indices((SIZE, SIZE))
    number = np.asarray(number)[..., None, None]
    return np.where((column == number % SIZE) & (row == number // SIZE % SIZE), 255, 30)


# Sixteen steps: an episode of seven, and the first nine of another.
in_episode = np.concatenate([np.arange(7), np.arange(9)])
film = {
    "obs": frame(in_episode + 2 * SIZE).astype(np.uint8),
    "terminated": np.arange(16) == 6,
}
example = {"obs": jnp.zeros((SIZE, SIZE), jnp.uint8), "terminated": jnp.bool_(False)}
frames = jaxbuf.TrajectoryBuffer.create(example, 1, 32, sequence_length=STACK + 1)
frames = jaxbuf.add(frames, {name: leaf[None] for name, leaf in film.items()})

windows = frames.latest(12)
stacks = jaxbuf.stack_frames(windows.data, STACK)
print("windows", windows.data["obs"].shape, "stacks", stacks.frames.shape)


# %%
def show(stacks, names):
    figure, axes = plt.subplots(len(names), STACK, figsize=(1.3 * STACK, 1.4 * len(names)))
    for row, name in enumerate(names):
        for i in range(STACK):
            axes[row, i].imshow(stacks[row][..., i], cmap="gray", vmin=0, vmax=255)
            axes[row, i].set(xticks=[], yticks=[])
        axes[row, 0].set_ylabel(name, fontsize=8)
    figure.tight_layout()
    plt.show()


# Windows 0 to 11 begin at frames 0 to 11; the episode ends with frame 6.
pictures = np.asarray(stacks.frames)
show(
    [pictures[0, -2], pictures[0, -1], pictures[4, -2], pictures[5, -2]],
    ["observation", "next", "new episode", "one later"],
)
assert np.array_equal(pictures[0, -1], np.moveaxis(film["obs"][1:5], 0, -1))
# Where frame 7 begins an episode, the stack is that frame four times.
assert np.array_equal(pictures[4, -2], np.repeat(film["obs"][7][..., None], STACK, axis=-1))
assert np.all(stacks.complete[:, -2:])

# %% [markdown]
# The same memory holds eight times as many steps of Atari in this way.


# %%
def gigabytes(create):
    leaves = jax.tree.leaves(jax.eval_shape(create))  # nothing is allocated
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves) / 1e9


rest = {"action": jnp.int32(0), "reward": jnp.float32(0), "terminated": jnp.bool_(False)}
single, stack = (jax.ShapeDtypeStruct(s, jnp.uint8) for s in ((84, 84), (84, 84, STACK)))
once = gigabytes(
    lambda: jaxbuf.TrajectoryBuffer.create({**rest, "obs": single}, 8, 125_000, sequence_length=5)
)
stacked = gigabytes(
    lambda: jaxbuf.ItemBuffer.create({**rest, "obs": stack, "next_obs": stack}, 1_000_000)
)
print(f"stacks and next stacks: {stacked:.1f} GB, single frames: {once:.1f} GB")
assert stacked / once > 7.9

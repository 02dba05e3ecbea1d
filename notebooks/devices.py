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
# # One buffer over eight devices
#
# `jaxbuf.Sharded` spreads one prioritized buffer over the devices along an axis of a mesh. This
# notebook makes eight devices of one CPU and shows
#
# 1. that draws are those of a single buffer, however unequal the shards are;
# 2. what is sent between devices, in bytes;
# 3. a data-parallel training loop, whose results do not depend on the number of devices;
# 4. a checkpoint that eight devices saved and four devices load.

# %%
# install jaxbuf[examples]
import functools
import os
import re
import tempfile

import jaxbuf

# Both have to be set before JAX is used for the first time.
os.environ["XLA_FLAGS"] = (
    "--xla_force_host_platform_device_count=8 "
    # On few cores, a device may wait for the others for some time.
    "--xla_cpu_collective_call_terminate_timeout_seconds=300"
)
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

jax.config.update("jax_platforms", "cpu")
plt.rcParams["figure.dpi"] = 80
print(jax.device_count(), "devices")

# %% [markdown]
# ## Who holds what
#
# A function makes one shard, here an `ItemBuffer` of 64 items. The first axis of every array of
# the result is that of the shards, and each shard lies on a device of its own.

# %%
SHARDS, EACH = 8, 64


def mesh_of(devices):
    chosen = jax.devices()[:devices]
    return jax.make_mesh((devices,), ("data",), axis_types=(AxisType.Auto,), devices=chosen)


def make():
    sampler = jaxbuf.Prioritized(alpha=1.0, stratified=False)
    return jaxbuf.ItemBuffer.create({"number": jnp.int32(0)}, EACH, sampler=sampler)


mesh = mesh_of(8)
buffer = jaxbuf.Sharded.create(make, mesh, "data")
for shard in buffer.shards.data["number"].addressable_shards[:3]:
    print(shard.device, "holds", shard.data.shape)

# %% [markdown]
# Block $k$ of the rows of an `add` goes to shard $k$, and nothing is sent. We make the shards very
# unequal: the first one holds ten times as much priority as the second, and the last one nothing.

# %%
rng = np.random.default_rng(0)
priority = rng.lognormal(0, 1, (SHARDS, EACH)).astype(np.float32)
priority *= np.array([10, 1, 3, 1, 0.3, 1, 2, 0], np.float32)[:, None]
priority = priority.reshape(-1)
items = {"number": np.arange(SHARDS * EACH, dtype=np.int32)}
buffer = jaxbuf.add(buffer, items, priority=priority)
print(f"{buffer.size} items of {buffer.capacity}")

# %% [markdown]
# ## Exact draws
#
# Every device learns the sums of all shards in one small `all_gather`, computes the same random
# targets, and draws the ones in its own shard. Then rows travel until each device has an
# equal part of the batch. We count 200,000 draws. With `exchange=False`, each shard gives the same
# number of rows instead, as if there were eight buffers that do not know of each other.


# %%
@functools.partial(jax.jit, static_argnums=1)
def count(buffer, batches, key):
    def one(counts, key):
        batch = buffer.sample(key, 512)
        return counts.at[batch.data["number"]].add(batch.valid.astype(jnp.int32)), None

    zeros = jnp.zeros(SHARDS * EACH, jnp.int32)
    return jax.lax.scan(one, zeros, jax.random.split(key, batches))[0]


separate = jaxbuf.Sharded.create(make, mesh, "data", exchange=False)
separate = jaxbuf.add(separate, items, priority=priority)
drawn = np.asarray(count(buffer, 400, jax.random.key(0)))
apart = np.asarray(count(separate, 400, jax.random.key(0)))
expected = drawn.sum() * priority / priority.sum()

some = expected > 0
assert (drawn[~some] == 0).all()
z = (drawn - expected)[some] / np.sqrt(expected[some])
chi_square, degrees = np.sum(z**2), some.sum() - 1
print(f"chi-square {chi_square:.0f}, expected {degrees} ± {np.sqrt(2 * degrees):.0f}")
assert abs(chi_square - degrees) < 4 * np.sqrt(2 * degrees)

# %%
left, right = plt.subplots(1, 2, figsize=(11, 4))[1]
place, shares = np.arange(SHARDS), [n.reshape(SHARDS, -1).sum(1) for n in (expected, drawn, apart)]
names = ["priorities", "Sharded", "exchange=False"]
for i, (share, name) in enumerate(zip(shares, names, strict=True)):
    left.bar(place + 0.27 * (i - 1), share / share.sum(), 0.25, label=name)
left.set(xlabel="shard", ylabel="share of all draws", title="How often each shard is drawn from")
left.set_xticks(place)
left.legend()
grid = np.geomspace(expected[some].min(), expected.max(), 100)
deviations = 2 / np.sqrt(grid)
right.fill_between(
    grid, 1 - deviations, 1 + deviations, color="0.88", label="± 2 standard deviations"
)
for shard in range(SHARDS - 1):
    own = slice(shard * EACH, (shard + 1) * EACH)
    ratio = drawn[own] / expected[own]
    right.plot(expected[own], ratio, ".", color=plt.cm.viridis(shard / 7), markersize=4)
right.set(xscale="log", ylim=(0, 2), xlabel="expected draws of an item", ylabel="draws / expected")
right.set_title("Each item, colored by its shard")
right.legend(loc="upper right")
plt.tight_layout()
plt.show()

# %% [markdown]
# ## What crosses devices
#
# The compiled program of a training step shows it: collectives, and the bytes that they return to a
# device. Neither depends on the capacity. Transitions here have 17 numbers in an observation, so a
# row has 144 bytes.

# %%
obs = jax.ShapeDtypeStruct((17,), np.float32)
number = jax.ShapeDtypeStruct((), np.float32)
transition = {"obs": obs, "next_obs": obs, "reward": number, "discount": number}
KINDS = "all-gather|all-to-all|all-reduce|collective-permute|reduce-scatter"


def sent(batch_size, capacity, exchange):
    """Returns the collectives in a compiled step, and the bytes that a device receives."""

    def make():
        return jaxbuf.ItemBuffer.create(transition, capacity, sampler=jaxbuf.Prioritized())

    def step(buffer, items, key):
        buffer = buffer.add(items)
        batch = buffer.sample(key, batch_size)
        return buffer.update_priority(batch.slots, jnp.abs(batch.data["reward"])), batch.data

    buffer = jaxbuf.Sharded.create(make, mesh, "data", exchange=exchange)
    items = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(
            (batch_size, *leaf.shape), leaf.dtype, sharding=NamedSharding(mesh, P("data"))
        ),
        transition,
    )
    text = jax.jit(step, donate_argnums=0).lower(buffer, items, jax.random.key(0)).compile()
    found, nbytes = [], 0
    for shapes, kind in re.findall(rf"= (.*?) ({KINDS})(?:-start)?\(", text.as_text()):
        found.append(kind)
        for bits, axes in re.findall(r"[a-z](\d+)\[([\d,]*)\]", shapes):
            nbytes += int(bits) // 8 * int(np.prod([int(n) for n in axes.split(",") if n]))
    return found, nbytes


sizes = [64, 256, 1024]
received = {exchange: [sent(n, 1_000, exchange)[1] for n in sizes] for exchange in (True, False)}
found, nbytes = sent(256, 1_000, True)
print("a step with a batch of 256:", ", ".join(sorted(found)))
print(f"a device receives {nbytes:,} bytes; its shard of 1,000 transitions has {144_000:,}")
assert sent(256, 50_000, True) == (found, nbytes)
print("the same with 50,000 transitions in each shard")

# %%
plt.figure(figsize=(6, 3.6))
for exchange, bytes_ in received.items():
    plt.plot(sizes, np.array(bytes_) / 1e3, "o-", label=f"exchange={exchange}")
plt.plot(sizes, 144 * np.array(sizes) / 1e3, "k:", label="the data of the whole batch")
plt.xscale("log", base=2)
plt.yscale("log")
plt.xticks(sizes, sizes)
plt.xlabel("rows of a batch, over eight devices")
plt.ylabel("kB received by a device in a step")
plt.title("What crosses devices")
plt.grid(alpha=0.3)
plt.legend()
plt.show()

# %% [markdown]
# ## Training with a mesh
#
# A small network learns a function that oscillates in one place. In each step every device adds
# samples, all of them draw a batch together, each computes the gradient for its own rows, and the
# gradients of all are averaged. The whole loop is one `jax.lax.scan`.


# %%
def target(x):
    return jnp.where(jnp.abs(x - 0.5) < 0.15, jnp.sin(60 * x), 0.3 * jnp.sin(3 * x))


def network(params, x):
    hidden = jnp.tanh(x[:, None] * params["w"] + params["b"])
    return jnp.tanh(hidden @ params["hidden"]) @ params["out"]


adam = optax.adam(3e-3)


def initial(devices):
    """Returns the state of a run on so many devices: a buffer, parameters and Adam's state."""
    example = {"x": jnp.float32(0), "y": jnp.float32(0)}
    buffer = jaxbuf.Sharded.create(
        lambda: jaxbuf.ItemBuffer.create(example, 256, sampler=jaxbuf.Prioritized(alpha=0.7)),
        mesh_of(devices),
        "data",
        shards=SHARDS,
    )
    keys = jax.random.split(jax.random.key(1), 3)
    params = {
        "w": 30 * jax.random.normal(keys[0], (64,)),
        "b": 10 * jax.random.normal(keys[1], (64,)),
        "hidden": jax.random.normal(keys[2], (64, 64)) / 8,
        "out": jnp.zeros(64),
    }
    replicated = NamedSharding(buffer.mesh, P())
    rest = jax.device_put((params, adam.init(params), jnp.int32(0)), replicated)
    return {"buffer": buffer, "params": rest[0], "adam": rest[1], "step": rest[2]}


def step(state, _):
    key = jax.random.fold_in(jax.random.key(2), state["step"])
    add_key, sample_key = jax.random.split(key)
    x = jax.random.uniform(add_key, (32,))
    buffer = state["buffer"].add({"x": x, "y": target(x)})
    batch = buffer.sample(sample_key, 128)
    weights = jaxbuf.importance_weights(buffer, batch, beta=0.5)

    def loss(params, data, weights):
        error = network(params, data["x"]) - data["y"]
        return jnp.mean(weights * error**2), jnp.abs(error)

    # Gradients of the rows of each shard, which are averaged in the same order on any mesh.
    rows = jax.tree.map(lambda leaf: leaf.reshape(SHARDS, -1), (batch.data, weights))
    gradient = jax.vmap(jax.value_and_grad(loss, has_aux=True), (None, 0, 0))
    (values, error), gradients = gradient(state["params"], *rows)
    everywhere = NamedSharding(buffer.mesh, P())
    values, gradients = jax.lax.with_sharding_constraint((values, gradients), everywhere)
    value, mean = jax.tree.map(lambda leaf: jnp.mean(leaf, axis=0), (values, gradients))
    updates, adam_state = adam.update(mean, state["adam"])
    state = {
        "buffer": buffer.update_priority(batch.slots, error.reshape(-1)),
        "params": optax.apply_updates(state["params"], updates),
        "adam": adam_state,
        "step": state["step"] + 1,
    }
    return state, value


@functools.partial(jax.jit, static_argnums=1, donate_argnums=0)
def train(state, steps):
    return jax.lax.scan(step, state, None, length=steps)


state, first = train(initial(8), 300)
print(f"loss {first[:20].mean():.3f}, after 300 steps {first[-20:].mean():.3f}")
assert first[-20:].mean() < first[:20].mean() / 2

# %% [markdown]
# ## A checkpoint of eight devices on four
#
# A checkpoint holds the shards, not the devices. The arrays of `like` say where they go. The run
# continues with the same batches and the same losses.

# %%
with tempfile.TemporaryDirectory() as folder:
    jaxbuf.save(folder, state)
    moved = jaxbuf.load(folder, like=initial(4))
print("on", len(moved["buffer"].shards.data["x"].sharding.device_set), "devices")
x = jnp.linspace(0, 1, 500)
before = network(jax.device_get(state["params"]), x)

state, on_eight = train(state, 300)
moved, on_four = train(moved, 300)
print(f"largest difference of losses: {np.abs(on_eight - np.asarray(on_four)).max():.1e}")
np.testing.assert_allclose(on_eight, on_four, rtol=1e-5)

# %%
left, right = plt.subplots(1, 2, figsize=(11, 3.8))[1]
steps = np.arange(600)
left.plot(steps[:300], first, color="C0", linewidth=0.8, label="eight devices")
left.plot(steps[300:], on_eight, color="C0", linewidth=0.8)
left.plot(steps[300::10], on_four[::10], "C1.", label="four devices, from the checkpoint")
left.axvline(300, color="0.6", linestyle=":")
left.set(xlabel="step", ylabel="weighted loss", yscale="log", title="The same losses")
left.legend()
right.plot(x, target(x), color="0.6", label="target")
right.plot(x, before, color="C2", linewidth=1, label="after 300 steps")
right.plot(
    x, network(jax.device_get(moved["params"]), x), color="C1", linewidth=1, label="after 600"
)
right.set(xlabel="x", ylabel="y", title="What was learned")
right.legend(loc="lower right")
plt.tight_layout()
plt.show()

# %% [markdown]
# The guide *More than one device* continues from here: several processes, `jax.shard_map`, and
# buffers that keep one order of all items.

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
# # A manager and two workers
#
# When several processes explore, each can profit from the finds of the others. In `jaxbuf.mpi` one
# rank is the **manager** of a shared buffer. **Workers** send it their items, each at its own pace,
# and receive scores for how good and how new these were. This notebook starts three real MPI ranks,
# lets two workers search a landscape with four hills, and looks at the traffic of the manager.

# %%
# install jaxbuf[examples]
import importlib.util

if not importlib.util.find_spec("mpi4jax"):
    # %pip install -q mpich nanobind setuptools wheel
    # %pip install -q --no-build-isolation "jaxbuf[mpi]"
    importlib.invalidate_caches()

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from jaxbuf.mpi import Layout

plt.rcParams["figure.dpi"] = 80

# %% [markdown]
# ## Who does what
#
# A `Layout` assigns roles to any number of ranks. Three ranks form one group: two workers and, as
# the last rank, their manager.

# %%
layout = Layout(3)
roles = [layout.role(rank) for rank in range(3)]
assert [role.kind for role in roles] == ["worker", "worker", "manager"]
roles

# %% [markdown]
# ## The program
#
# All ranks run the same file, and `make_communicators` tells each of them its role. The manager
# calls `serve`. A worker calls `worker.add` in its own loop: here it guesses points of its half of
# the plane, some at random and some near the best points it knows.
#
# * The manager keeps the 80 best points that are at least 0.15 apart.
# * The score of a batch is the number of its points that are kept.
# * The **baseline** is the lowest score that the manager keeps. Workers receive it with every
#   answer, and do not send points below it.

# %%
program = """
import json, sys
from pathlib import Path

import jax, jax.numpy as jnp, numpy as np
import jaxbuf
from jaxbuf.mpi import (
    BaselineFilter, Layout, Manager, Min, Retained, Worker, make_communicators, serve,
)

ROWS, BATCHES = 64, 60
folder = Path(sys.argv[1])
hills = jnp.array([[-1.2, 1.0], [-0.9, -1.1], [1.0, 1.2], [1.3, -0.8]])


def log_reward(points):
    distance = jnp.sum((points[:, None] - hills) ** 2, axis=-1)
    return jax.nn.logsumexp(-8 * distance, axis=-1)


def make_manager(num_workers):
    item = {"point": jnp.zeros(2), "worker": jnp.int32(0)}
    buffer = jaxbuf.ItemBuffer.create(
        item,
        80,
        sampler=jaxbuf.Softmax(),
        evictor=jaxbuf.Lowest(),
        diversity=jaxbuf.Diversity(cutoff=0.15, p=2, field="point"),
    )
    return Manager.create(buffer, num_workers, baseline=Min(), scores=Retained())


@jax.jit
def guess(key, best, side):
    keys = jax.random.split(key, 3)
    anywhere = jax.random.uniform(keys[0], (ROWS, 2), minval=-2.0, maxval=2.0)
    nearby = best + 0.3 * jax.random.normal(keys[1], (ROWS, 2))
    points = jnp.where(jax.random.bernoulli(keys[2], 0.3, (ROWS, 1)), nearby, anywhere)
    points = points.at[:, 0].set(side * jnp.abs(points[:, 0]))
    score = log_reward(points)
    return points, score, points[jnp.argmax(score)]


def work(communicators, number):
    log, best = [], jnp.zeros(2)
    with Worker(
        communicators, make_manager, rows=ROWS, filter=BaselineFilter.create()
    ) as worker:
        for i in range(BATCHES):
            key = jax.random.fold_in(jax.random.key(number), i)
            points, score, best = guess(key, best, 2.0 * number - 1.0)
            items = {"point": points, "worker": jnp.full(ROWS, number, jnp.int32)}
            answer = worker.add(items, score=score)
            counts = worker.metrics()
            kept = 0 if answer is None else int(answer.scores["retained"])
            log.append([counts["offered"], counts["sent"], kept, counts["baseline"]])
    np.save(folder / f"worker_{number}.npy", np.array(log, np.float64))


def manage(communicators):
    served = serve(communicators, make_manager(2), rows=ROWS)  # prints a table in the end
    buffer = served.manager.buffer
    np.savez(folder / "buffer.npz", **jax.tree.map(np.asarray, buffer.data))
    told = {"traffic": served.traffic.metrics(), "faults": served.faults, "size": int(buffer.size)}
    (folder / "manager.json").write_text(json.dumps(told))


from mpi4py import MPI

communicators = make_communicators(Layout(3))
if communicators.managers is not None:
    manage(communicators)
else:
    work(communicators, MPI.COMM_WORLD.Get_rank())
"""

# %% [markdown]
# ## Three ranks
#
# From a shell, the command is `mpiexec -n 3 python program.py results`.

# %%
folder = tempfile.TemporaryDirectory()
results = Path(folder.name)
(results / "program.py").write_text(program)

beside = shutil.which("mpiexec", path=str(Path(sys.executable).parent))
mpiexec = os.environ.get("MPIEXEC") or beside or shutil.which("mpiexec")
assert mpiexec, "there is no mpiexec; `pip install mpich` brings one"
environment = {
    **os.environ,
    "JAX_PLATFORMS": "cpu",
    # Open MPI starts neither as root nor more ranks than cores unless told to; MPICH does both.
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
}
ran = subprocess.run(
    [mpiexec, "-n", "3", sys.executable, "-m", "mpi4py", results / "program.py", results],
    env=environment,
    capture_output=True,
    text=True,
    timeout=80,
)
assert ran.returncode == 0, ran.stderr
told = json.loads((results / "manager.json").read_text())
assert told["faults"] == []
print(ran.stdout)

# %% [markdown]
# ## The points of the manager
#
# The manager has the best points of both halves, and no two of them are close to each other.

# %%
with np.load(results / "buffer.npz") as buffer:
    points, sender = buffer["point"], buffer["worker"]
hills = np.array([[-1.2, 1.0], [-0.9, -1.1], [1.0, 1.2], [1.3, -0.8]])

assert told["size"] == len(points) == 80
assert set(sender.tolist()) == {0, 1}
assert np.array_equal(sender, (points[:, 0] > 0).astype(int))
apart = np.linalg.norm(points[:, None] - points[None], axis=-1)
assert np.min(apart + 10 * np.eye(80)) > 0.15
# All four hills were found.
assert np.all(np.min(np.linalg.norm(points[:, None] - hills, axis=-1), axis=0) < 0.2)

plt.figure(figsize=(4.4, 4))
axis = np.linspace(-2, 2, 100)
grid = np.stack(np.meshgrid(axis, axis), axis=-1)
height = np.exp(-8 * np.sum((grid[:, :, None] - hills) ** 2, axis=-1)).sum(-1)
plt.contourf(axis, axis, height, levels=12, cmap="Greys")
for number, color in enumerate(("tab:blue", "tab:orange")):
    theirs = points[sender == number]
    plt.scatter(*theirs.T, s=14, color=color, label=f"from worker {number}")
plt.legend(loc="center")
plt.title("80 points, at least 0.15 apart")
plt.xlabel("first coordinate")
plt.ylabel("second coordinate")
plt.show()

# %% [markdown]
# ## The messages of the workers
#
# At first every point is sent. Once the buffer is full there is a baseline, which rises, and soon
# most points of a worker are below it and are not sent.

# %%
logs = [np.load(results / f"worker_{number}.npy") for number in range(2)]
_, axes = plt.subplots(1, 3, figsize=(11, 3), layout="constrained")
for number, log in enumerate(logs):
    offered, sent, kept, baseline = log.T
    axes[0].plot(offered, sent, label=f"worker {number}")
    axes[1].plot(offered, np.where(np.isfinite(baseline), baseline, np.nan))
    axes[2].plot(offered, np.cumsum(kept))
axes[0].plot(offered, offered, "k:", label="all")
axes[0].legend()
for axis, name in zip(axes, ("points sent", "baseline received", "points kept"), strict=True):
    axis.set(title=name, xlabel="points found")
    axis.grid(alpha=0.3)
plt.show()

kept = sum(log[:, 2].sum() for log in logs)
share = sum(log[-1, 1] for log in logs) / sum(log[-1, 0] for log in logs)
print(f"{share:.0%} of the points were sent, and {kept:.0f} of them kept, if only for a while")
assert kept > 80
assert share < 0.6
for log in logs:
    offered, sent, _, baseline = log.T
    assert sent[0] == offered[0]
    assert np.all(np.diff(baseline[np.isfinite(baseline)]) >= 0)
    assert np.isfinite(baseline[-1])

# %% [markdown]
# ## The traffic of the manager
#
# `serve` counts messages, rows and bytes, and measures the time to receive, handle and answer them.
# The time of the first batch includes compilation.

# %%
traffic = told["traffic"]
workers = sorted({name.split("/")[0] for name in traffic if "/" in name})
phases = ("receive", "handle", "send")
for i, phase in enumerate(phases):
    seconds = [traffic[f"{name}/{phase}_seconds"] for name in workers]
    place, color = np.arange(len(workers)) + 0.25 * (i - 1), ("black", "tab:blue", "tab:orange")[i]
    plt.bar(place, np.multiply(seconds, 1e3), 0.25, color=color, label=phase)
plt.xticks(range(len(workers)), [name.replace("rank", "worker of rank") for name in workers])
plt.yscale("log")
plt.ylabel("total time, milliseconds")
plt.title(f"time of the manager for {traffic['batches']} batches, {traffic['rows']:,} points")
plt.legend()
plt.show()

assert traffic["rows"] == sum(log[-1, 1] for log in logs)
folder.cleanup()

# %% [markdown]
# For a whole experiment of this kind, run `mpiexec -n 4 python examples/gflownet_mpi.py`, in
# which GFlowNets share what they find, with and without waiting for answers.

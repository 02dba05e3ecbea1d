"""`jaxbuf.Sharded` over all devices of one process or of two, for `test_sharded_processes.py`.

``python -m tests.programs.sharded_processes rounds FOLDER [DIE_BEFORE PORT RANK]``, alone or as one
of two processes, of which the second one kills itself before round DIE_BEFORE.
``... next OUT FOLDER ...`` runs another round after those in each FOLDER.
"""

import os
import signal
import sys
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils

import jaxbuf

S, N, ROUNDS, ROWS, BATCH = 8, 16, 6, 32, 64
ITEM = {"at": np.int32(0), "obs": np.zeros(3, np.float32)}


def mesh(devices):
    return jax.make_mesh((len(devices),), ("data",), devices=devices)


def create(devices):
    """A buffer over these devices, before the first round."""
    return jaxbuf.Sharded.create(
        lambda: jaxbuf.ItemBuffer.create(ITEM, N, sampler=jaxbuf.Prioritized()),
        mesh(devices),
        "data",
        shards=S,
    )


def rows(buffer, number):
    """New items and a mask, of which each process makes the rows that it holds."""
    own = ROWS // jax.process_count()
    at = np.arange(own, dtype=np.int32) + own * jax.process_index() + ROWS * number
    sharding = jax.NamedSharding(buffer.mesh, jax.P("data"))
    return jax.tree.map(
        lambda leaf: jax.make_array_from_process_local_data(sharding, leaf),
        ({"at": at, "obs": np.stack([at] * 3, axis=1).astype(np.float32)}, at % 7 > 0),
    )


def next_round(buffer, number):
    """Adds, draws and updates. Returns the buffer, and what was drawn by name, on the host."""
    items, mask = rows(buffer, number)
    buffer = jaxbuf.add(buffer, items, mask=mask)
    batch = jaxbuf.sample(buffer, jax.random.key(number), BATCH)
    weights = jaxbuf.importance_weights(buffer, batch, 0.5)
    buffer = jaxbuf.update_priority(buffer, batch.slots, batch.data["obs"][:, 0] % 7 + 0.5)
    drawn = multihost_utils.process_allgather((batch, weights), tiled=True)
    named = jax.tree_util.tree_leaves_with_path(drawn)
    return buffer, {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in named}


def main(folder, die_before=ROUNDS, port=None, rank="0"):
    """Goes on from the checkpoint, if there is one."""
    if port is not None:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"localhost:{port}", 2, int(rank), heartbeat_timeout_seconds=10)
    folder = Path(folder)
    state = {"buffer": create(jax.devices()), "done": np.int32(0)}
    if (folder / "checkpoint").exists():
        state = jaxbuf.load(folder / "checkpoint", state)
    for number in range(int(state["done"]), ROUNDS):
        if rank == "1" and number == int(die_before):
            os.kill(os.getpid(), signal.SIGKILL)
        buffer, drawn = next_round(state["buffer"], number)
        if rank == "0":
            np.savez(folder / f"round-{number}.npz", **drawn)
        state = {"buffer": buffer, "done": np.int32(number + 1)}
        jaxbuf.save(folder / "checkpoint", state)
        print(f"round {number}", flush=True)


def one_more(out, *folders):
    """Loads each checkpoint onto all devices and onto one, and runs another round."""
    for devices in (jax.devices(), jax.devices()[:1]):
        like = {"buffer": create(devices), "done": np.int32(0)}
        for folder in map(Path, folders):
            state = jaxbuf.load(folder / "checkpoint", like)
            _, drawn = next_round(state["buffer"], int(state["done"]))
            np.savez(Path(out, f"{folder.name}-{len(devices)}.npz"), **drawn)


if __name__ == "__main__":
    _, command, *arguments = sys.argv
    {"rounds": main, "next": one_more}[command](*arguments)

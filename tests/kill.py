"""Kills real processes while they write."""

import multiprocessing
import os
import random
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import jaxbuf

KILLS = int(os.environ.get("JAXBUF_KILLS", "40"))

# Processes fork from one that has imported everything and computed nothing.
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["pytest", "orbax.checkpoint", "tests.kill"])


def kill_repeatedly(
    target: Callable[[Path, Connection], None], path: Path, longest: float, kills: int = KILLS
) -> int:
    """Start ``target(path, connection)`` and kill it, ``kills`` times over.

    Each process first sends the number of the last thing it finds written, then goes on to write
    and sends each number once that is done. Whatever the moment of the kill, the next process must
    find all that was acknowledged, and at most one thing more.

    Args:
        target: Runs until it is killed.
        path: A folder for it.
        longest: Each process is killed after a random time up to this, in seconds.
        kills: How many.

    Returns:
        The last number that was acknowledged.
    """
    moment = random.Random(0)
    written = 0
    for _ in range(kills):
        receiver, sender = _context.Pipe(duplex=False)
        process = _context.Process(target=target, args=(path, sender))
        process.start()
        sender.close()
        assert receiver.poll(60), "the process does not start"
        found = receiver.recv()
        assert written <= found <= written + 1, f"{written} were written, {found} are there"
        written = found
        time.sleep(moment.uniform(0, longest))
        process.kill()
        process.join()
        assert process.exitcode == -9, "the process ended by itself"
        while True:
            try:
                written = receiver.recv()
            except EOFError:
                break
        receiver.close()
    return written


def checkpoint_writer(path: Path, sender: Connection) -> None:
    """Save one state after the other, each all of the same number."""

    def create():
        buffer = jaxbuf.ItemBuffer.create(jnp.zeros(3), 4096, sampler=jaxbuf.Prioritized())
        return {"buffer": buffer, "k": jnp.int32(0)}

    abstract = jax.eval_shape(create)

    def state(k):
        # Computing with JAX would take longer than everything else here.
        return jax.tree.map(lambda leaf: np.full(leaf.shape, k, leaf.dtype), abstract)

    k = 0
    if path.exists() and any(entry.name.isdigit() for entry in path.iterdir()):
        found = jaxbuf.load(path, state(0))
        k = int(found["k"])
        assert jax.tree.all(jax.tree.map(np.array_equal, found, state(k)))
    sender.send(k)
    while True:
        k += 1
        jaxbuf.save(path, state(k))
        sender.send(k)


STORE_ITEM = {"obs": jax.ShapeDtypeStruct((3,), np.float32)}
STORE_ITEM["id"] = jax.ShapeDtypeStruct((), np.int32)
_ROWS = 100


def check_store(store: jaxbuf.Store) -> None:
    """Every row is there once, with its own number, but for the first half, which is deleted."""
    live = np.arange(len(store) - store.live, len(store))
    read = store.read(live)
    np.testing.assert_array_equal(read["id"], live)
    np.testing.assert_array_equal(read["obs"], np.repeat(live[:, None], 3, axis=1))


def store_writer(path: Path, sender: Connection) -> None:
    """Append one block of rows after the other, and delete some of the old ones."""
    with jaxbuf.Store(path, STORE_ITEM, chunk=64) as store:
        check_store(store)
        k = len(store) // _ROWS
        assert k * _ROWS == len(store), "part of an append is there"
        sender.send(k)
        while True:
            ids = np.arange(k * _ROWS, (k + 1) * _ROWS, dtype=np.int32)
            obs = np.repeat(ids[:, None], 3, axis=1).astype(np.float32)
            store.append({"obs": obs, "id": ids})
            k += 1
            sender.send(k)
            store.delete(range(max(0, k - 20) * _ROWS // 2))

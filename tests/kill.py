"""Kills real processes while they write."""

import contextlib
import multiprocessing
import os
import random
import secrets
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
        longest: Each process is killed after a random time up to this, in seconds: most from when
            they go on to write, every fourth from its start, so while it opens what is there.
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
        if moment.random() < 0.75:
            assert receiver.poll(60), "the process does not start"
        time.sleep(moment.uniform(0, longest))
        process.kill()
        process.join()
        assert process.exitcode == -9, "the process ended by itself"
        numbers: list[int] = []
        with contextlib.suppress(EOFError):
            while True:
                numbers.append(receiver.recv())
        receiver.close()
        if numbers:
            found = numbers[0]
            assert written <= found <= written + 1, f"{written} were written, {found} are there"
            written = numbers[-1]
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


STORE_ITEM = {
    "k": np.int64(0),
    "seed": np.int64(0),
    "obs": jax.ShapeDtypeStruct((100,), np.uint8),
}
_KEPT = 2000


def _block(k: int, seed: int) -> dict[str, np.ndarray]:
    """The rows of append ``k``: noise, which no compression shortens, or all alike."""
    random = np.random.default_rng(seed)
    obs = np.full((random.integers(1, 150), 100), k % 256, np.uint8)
    if random.random() < 0.5:
        obs = random.integers(0, 256, obs.shape, np.uint8)
    return {"k": np.full(len(obs), k), "seed": np.full(len(obs), seed), "obs": obs}


def check_store(store: jaxbuf.Store) -> int:
    """Every row is there once, but for the first ones, which are deleted.

    Returns:
        How many appends there were.
    """
    read = store.read(slice(len(store) - store.live, None))
    if not store.live:
        return 0
    first, last = int(read["k"][0]), int(read["k"][-1])
    # Another process may have begun the same append with another seed, and been killed.
    seeds = read["seed"][np.searchsorted(read["k"], np.arange(first, last + 1))]
    blocks = [_block(k, seed) for k, seed in enumerate(seeds, first)]
    for name, leaf in read.items():
        expected = np.concatenate([block[name] for block in blocks])
        # Part of the first one is deleted.
        np.testing.assert_array_equal(leaf, expected[-store.live :])
    return last + 1


def store_writer(path: Path, sender: Connection) -> None:
    """Append one block of rows after the other, and delete some of the old ones."""
    with jaxbuf.Store(path, STORE_ITEM, chunk=64) as store:
        k = check_store(store)
        sender.send(k)
        while True:
            store.append(_block(k, secrets.randbits(62)))
            k += 1
            sender.send(k)
            store.delete(range(max(0, len(store) - _KEPT)))

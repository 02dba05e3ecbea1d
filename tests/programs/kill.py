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
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxbuf

KILLS = int(os.environ.get("JAXBUF_KILLS", "40"))
KILLS_OF_TWO = int(os.environ.get("JAXBUF_KILLS", "20"))

# Seconds to wait for a process, of which a busy machine may need many.
PATIENCE = 600

# Processes fork from one that has imported everything and computed nothing.
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["pytest", "tensorstore", "tests.programs.kill"])


def kill_repeatedly(
    target: Callable[[Path, Connection], None], path: Path, longest: float, kills: int = KILLS
) -> int:
    """Start ``target(path, connection)`` and kill it, ``kills`` times over.

    Each process first sends the number of the last thing it finds written, then goes on to write
    and sends each number once that is done. Whatever the moment of the kill, the next process must
    find all that was acknowledged, and at most one thing more. It comes within ``longest`` seconds:
    a fourth of the time while a process opens what is there, half when it goes on to write, and
    else when it has written something. Returns the last number that was acknowledged.
    """
    moment = random.Random(0)
    written = 0
    for _ in range(kills):
        receiver, sender = _context.Pipe(duplex=False)
        process = _context.Process(target=target, args=(path, sender))
        process.start()
        sender.close()
        numbers: list[int] = []
        with contextlib.suppress(EOFError):
            for _ in range(moment.choice((0, 1, 1, 2))):
                assert receiver.poll(PATIENCE), "the process does not go on"
                numbers.append(receiver.recv())
        time.sleep(moment.uniform(0, longest))
        process.kill()
        process.join()
        assert process.exitcode == -9, "the process ended by itself"
        with contextlib.suppress(EOFError):
            while True:
                numbers.append(receiver.recv())
        receiver.close()
        if numbers:
            found = numbers[0]
            assert written <= found <= written + 1, f"{written} were written, {found} are there"
            written = numbers[-1]
    return written


def _state(who: int, k: int) -> dict[str, Any]:
    """One of many states, with contents of its own that do not compress."""

    def create():
        buffer = jaxbuf.ItemBuffer.create(jnp.zeros(3), 4096, sampler=jaxbuf.Prioritized())
        return {"buffer": buffer, "who": jnp.int32(0), "k": jnp.int32(0)}

    # Computing with JAX would take longer than everything else here.
    random = np.random.default_rng([who, k])
    state = jax.tree.map(
        lambda leaf: np.frombuffer(
            random.bytes(leaf.size * leaf.dtype.itemsize), leaf.dtype
        ).reshape(leaf.shape),
        jax.eval_shape(create),
    )
    return {**state, "who": np.int32(who), "k": np.int32(k)}


def _find_checkpoint(path: Path) -> tuple[int, int]:
    """Returns the writer and the number of the checkpoint, which must be whole."""
    try:
        found = jaxbuf.load(path, _state(0, 0))
    except FileNotFoundError:
        return 0, 0
    who, k = int(found["who"]), int(found["k"])
    for saved, expected in zip(
        jax.tree.leaves(found), jax.tree.leaves(_state(who, k)), strict=True
    ):
        assert saved.tobytes() == expected.tobytes()
    return who, k


def checkpoint_writer(path: Path, sender: Connection) -> None:
    """Save one state after the other."""
    _, k = _find_checkpoint(path)
    sender.send(k)
    while True:
        k += 1
        jaxbuf.save(path, _state(0, k))
        sender.send(k)


def _one_of_two(path: Path, sender: Connection, who: int, k: int) -> None:
    sender.send(None)
    while True:
        state, began = _state(who, k), time.monotonic()
        jaxbuf.save(path, state)
        sender.send((k, began, time.monotonic()))
        k += 1


def kill_two_savers(path: Path, longest: float, kills: int = KILLS_OF_TWO) -> int:
    """Have two processes save to one folder and kill both, one after the other, ``kills`` times.

    Whatever the moments, what is there afterwards is whole, and nothing that was acknowledged
    began after it was written. Returns how many saves were acknowledged.
    """
    moment = random.Random(0)
    ended: dict[tuple[int, int], float] = {}
    killed: dict[tuple[int, int], float] = {}
    newest = 0.0
    for i in range(1, kills + 1):
        running = []
        for who in (1, 2):
            receiver, sender = _context.Pipe(duplex=False)
            process = _context.Process(target=_one_of_two, args=(path, sender, who, i * 10_000))
            process.start()
            sender.close()
            running.append((who, process, receiver))
        for _, _, receiver in running:
            assert receiver.poll(PATIENCE), "the process does not start"
            receiver.recv()
        if i % 2:
            assert running[0][2].poll(PATIENCE), "the process does not go on"
        for who, process, receiver in running:
            time.sleep(moment.uniform(0, longest / 2))
            process.kill()
            process.join()
            killed[who, i] = time.monotonic()
            assert process.exitcode == -9, "the process ended by itself"
            while True:
                try:
                    k, began, end = receiver.recv()
                except EOFError:
                    break
                ended[who, k], newest = end, max(newest, began)
            receiver.close()
        who, k = _find_checkpoint(path)
        if k == 0:
            assert not ended, "all is lost"
        else:
            # A checkpoint that was being saved at the kill may be complete.
            written = ended.get((who, k), killed.get((who, k // 10_000), 0.0))
            assert newest < written, "what was acknowledged later is lost"
    return len(ended)


STORE_ITEM = {
    "k": np.int64(0),
    "seed": np.int64(0),
    "obs": jax.ShapeDtypeStruct((100,), np.uint8),
    # The same in each chunk.
    "discount": np.float32(0),
    "unknown": np.float32(0),
    "empty": jax.ShapeDtypeStruct((0,), np.int8),
}
_KEPT = 2000


def _block(k: int, seed: int) -> dict[str, np.ndarray]:
    """The rows of append ``k``: noise, which no compression shortens, or all alike."""
    random = np.random.default_rng(seed)
    obs = np.full((random.integers(1, 150), 100), k % 256, np.uint8)
    if random.random() < 0.5:
        obs = random.integers(0, 256, obs.shape, np.uint8)
    return {
        "k": np.full(len(obs), k),
        "seed": np.full(len(obs), seed),
        "obs": obs,
        "discount": np.ones(len(obs), np.float32),
        "unknown": np.full(len(obs), np.nan, np.float32),
        "empty": np.zeros((len(obs), 0), np.int8),
    }


def check_store(store: jaxbuf.Store) -> int:
    """Every row is there once, but for the first ones, which are deleted; counts the appends."""
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


def store_writer(path: Path, sender: Connection, compress: bool = False) -> None:
    """Append one block of rows after the other, and delete some of the old ones."""
    with jaxbuf.Store(path, STORE_ITEM, chunk=64, compress=compress) as store:
        k = check_store(store)
        sender.send(k)
        while True:
            store.append(_block(k, secrets.randbits(62)))
            k += 1
            sender.send(k)
            store.delete(range(max(0, len(store) - _KEPT)))

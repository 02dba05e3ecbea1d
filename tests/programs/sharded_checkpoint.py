"""Saves and loads arrays that are sharded over several devices; run by the tests of checkpoints.

``python -m tests.programs.sharded_checkpoint FOLDER [PORT RANK]``, alone or as one of two
processes.
"""

import re
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxbuf
from jaxbuf.io import checkpoint, versions
from tests.models.store import damaged, exchanged

SHARDS = 8


def values():
    """Returns the tree to save, on the host: a stack of buffers, and arrays of all kinds."""

    def shard(i):
        buffer = jaxbuf.ItemBuffer.create(
            {"obs": jnp.zeros(5), "key": jax.random.key(0)}, 6, sampler=jaxbuf.Prioritized()
        )
        rows = jnp.arange(4, dtype=jnp.float32) + 10.0 * i.astype(jnp.float32)
        items = {"obs": jnp.stack([rows] * 5, 1), "key": jax.random.split(jax.random.key(i), 4)}
        return buffer.add(items, priority=rows + 1)

    random = np.random.default_rng(0)
    return {
        "buffers": jax.vmap(shard)(jnp.arange(SHARDS)),
        "matrix": random.standard_normal((16, 24)).astype(np.float32),
        "half": jnp.asarray(random.standard_normal((8, 3)), jnp.bfloat16),
        "flags": random.random((8, 7)) < 0.5,
        "none": np.zeros((8, 0), np.int32),
        "step": jnp.int32(7),
    }


def specs(tree):
    """The buffers and most arrays by their first axis, the matrix by both."""
    return {**jax.tree.map(lambda _: P("x"), tree), "matrix": P("y", "x"), "step": P()}


def place(tree, devices):
    """On so many devices, every process giving what it holds."""
    wide = 2 if len(devices) > 1 else 1
    grid = np.asarray(devices).reshape(-1, wide)
    flat, square = Mesh(np.asarray(devices), ("x",)), Mesh(grid, ("x", "y"))
    shardings = {
        name: jax.tree.map(
            lambda spec, name=name: NamedSharding(square if name == "matrix" else flat, spec),
            spec,
            is_leaf=lambda node: isinstance(node, P),
        )
        for name, spec in specs(tree).items()
    }
    return jax.jit(lambda tree: tree, out_shardings=shardings)(tree)


def assert_same(loaded, wanted):
    """Bit for bit, and on the same devices."""
    for one, two in zip(jax.tree.leaves(loaded), jax.tree.leaves(wanted), strict=True):
        assert one.dtype == two.dtype
        assert one.sharding.is_equivalent_to(two.sharding, one.ndim)
        if jnp.issubdtype(one.dtype, jax.dtypes.prng_key):
            one, two = jax.random.key_data(one), jax.random.key_data(two)
        for a, b in zip(one.addressable_shards, two.addressable_shards, strict=True):
            assert a.index == b.index
            assert np.asarray(a.data).tobytes() == np.asarray(b.data).tobytes()


def check_load(path, tree, devices):
    """Checks that the saved `tree` can be loaded onto these devices."""
    like = place(jax.tree.map(jnp.zeros_like, tree), devices)
    assert_same(jaxbuf.load(path, like), place(tree, devices))


def main(folder, port=None, rank="0"):
    """Save from all numbers of devices, and load onto all; or be one of two processes."""
    folder = Path(folder)
    if port is not None:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"localhost:{port}", 2, int(rank))
    tree, devices = values(), jax.devices()
    counts = [8, 4, 2, 1] if port is None else [len(devices)]
    for i, count in enumerate(counts):
        # The second one replaces the first.
        for _ in range(2):
            jaxbuf.save(folder / f"{count}", place(tree, devices[:count]))
        # Onto more devices, and onto fewer.
        for onto in {counts[i - 1], counts[(i + 1) % len(counts)]}:
            check_load(folder / f"{count}", tree, devices[:onto])
    if port is None:
        check_damage(folder / "4", tree, devices[:2])
        check_exchange(folder / "2", tree, devices[:2])
    else:
        check_load(folder / "alone", tree, devices)
        state = place(tree, devices)
        check_slow_load(folder / "4", state)
        check_failures(folder, state)
        check_folders_apart(folder, state)
    print("the same", flush=True)


def check_damage(folder, tree, devices):
    """A file that is changed or gone is refused, and its leaf is named."""
    like = place(jax.tree.map(jnp.zeros_like, tree), devices)
    leaves = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    files = {file.parent.name: file for file in folder.glob("jaxbuf-*/sharded/*/[0-9]*")}
    assert len(files) >= 5
    for number, file in files.items():
        data = file.read_bytes()
        for spoiled in damaged(data):
            file.unlink() if spoiled is None else file.write_bytes(spoiled)
            with pytest.raises(ValueError, match=f"damaged: {re.escape(leaves[int(number)])}: "):
                jaxbuf.load(folder, like)
            file.write_bytes(data)
    check_load(folder, tree, devices)


def check_slow_load(path, state):
    """A process may save while another one has still to load what this replaces."""
    if jax.process_index() == 1:
        time.sleep(1)
        assert_same(jaxbuf.load(path, state), state)
    jaxbuf.save(path, state)


def check_folders_apart(folder, state):
    """Processes that do not share a folder learn it before the checkpoint in it is replaced."""
    own = folder / f"own-{jax.process_index()}"
    jaxbuf.save(own, {"before": np.arange(3)})
    begin = sorted(own.rglob("*"))
    match = r"(process 1 does not see in .*|process 1 does not share .*)"
    with pytest.raises(OSError, match=match):
        jaxbuf.save(own, state)
    assert jaxbuf.load(own, {"before": np.zeros(3, int)})["before"].tolist() == [0, 1, 2]
    if jax.process_index() == 1:
        assert sorted(own.rglob("*")) == begin


def check_exchange(folder, tree, devices):
    """Two chunks of a leaf that changed places are refused, and the leaf is named."""
    like = place(jax.tree.map(jnp.zeros_like, tree), devices)
    leaves = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    number = leaves.index("['matrix']")
    one, two, *_ = sorted(folder.glob(f"jaxbuf-*/sharded/{number}/[0-9]*"))
    message = r"\['matrix'\]: chunk .* is not the one that was written"
    with exchanged(one, two), pytest.raises(ValueError, match=message):
        jaxbuf.load(folder, like)
    check_load(folder, tree, devices)


def check_failures(folder, state):
    """If one process cannot write, all of them learn it, and the checkpoint before stays."""
    write = checkpoint._write_shards
    for failing in range(2):

        def fail(*args, failing=failing):
            if jax.process_index() == failing:
                raise OSError("the disk is full")
            write(*args)

        checkpoint._write_shards = fail
        before = sorted((folder / "4").glob("jaxbuf-????????"))
        own = jax.process_index() == failing
        with pytest.raises(OSError, match="the disk" if own else f"process {failing} could not"):
            jaxbuf.save(folder / "4", state)
        assert sorted((folder / "4").glob("jaxbuf-????????")) == before
    checkpoint._write_shards = write
    replace = versions.replace
    first = jax.process_index() == 0
    if first:
        versions.replace = lambda *_: 1 / 0
    with pytest.raises(ZeroDivisionError if first else OSError):
        jaxbuf.save(folder / "4", state)
    versions.replace = replace
    jaxbuf.save(folder / "4", state)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""The memory that a load and an append of a large buffer take; run by the tests of checkpoints.

``python -m tests.programs.peak_memory KIND FOLDER`` saves a buffer to a new folder. From an
existing one it loads the buffer, appends it to a store and loads it from there, and prints its size
and these peaks, in MiB.
"""

import gc
import os
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np

import jaxbuf

# So large that what it takes to compile the programs, some 170 MiB, is in the bound.
ROWS, WIDTH = 2**17, 1023
ITEM = {
    "frame": jax.ShapeDtypeStruct((WIDTH,), np.int32),
    "id": jax.ShapeDtypeStruct((), np.int32),
}


def items(capacity=ROWS):
    return jaxbuf.ItemBuffer.create(ITEM, capacity)


def rings(num_envs):
    return jaxbuf.TrajectoryBuffer.create(ITEM, num_envs, ROWS // 4)


def hosted():
    return jaxbuf.Hosted.create(items)


def shards(count, devices):
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:devices]), ("data",))
    return jaxbuf.Sharded.create(lambda: items(ROWS // count), mesh, "data", shards=count)


# What is saved, and what it is loaded into.
KINDS = {
    "rings": (lambda: rings(4), lambda: rings(5)),
    "hosted": (hosted, hosted),
    "other shards": (lambda: shards(4, 4), lambda: shards(8, 2)),
}


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def peak_of(function):
    """The result of a function, and how much more memory there was than before, in MiB."""
    gc.collect()
    before, most, done = resident(), [0.0], []

    def watch():
        while not done:
            most[0] = max(most[0], resident())
            time.sleep(0.002)

    thread = threading.Thread(target=watch)
    thread.start()
    result = jax.block_until_ready(function())
    done.append(True)
    thread.join()
    return result, most[0] - before


def check(frame, ids, count):
    """Checks that rows are whole, and that there are as many different ones."""
    ids = np.asarray(ids).reshape(-1)
    frame = np.asarray(frame).reshape(-1, WIDTH)
    filled = ids > 0
    assert (frame[filled] == ids[filled, None]).all()
    assert len(set(ids[filled].tolist())) == count


def main(kind, folder):
    """Save a buffer, or load it and append it to a store."""
    jax.block_until_ready(jnp.zeros(1))
    before, after = KINDS[kind]
    if not os.path.exists(folder):
        buffer = before()
        for ids in np.arange(1, ROWS + 1, dtype=np.int32).reshape(8, -1):
            ids = ids.reshape(4, -1) if kind == "rings" else ids
            frame = np.broadcast_to(ids[..., None], (*ids.shape, WIDTH))
            buffer = jaxbuf.add(buffer, {"frame": frame, "id": ids})
        jaxbuf.save(folder, buffer)
        return
    like = jax.eval_shape(after)
    buffer, loading = peak_of(lambda: jaxbuf.load(folder, like, resize=True))
    [data] = jax.tree.leaves(buffer, is_leaf=lambda node: isinstance(node, dict) and len(node) > 1)[
        :1
    ]
    check(data["frame"], data["id"], ROWS)
    appending = filling = 0.0
    if kind != "rings":
        example = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), ITEM)
        with jaxbuf.Store(f"{folder}/store", example) as store:
            appending = peak_of(lambda: store.append_buffer(buffer) and None)[1]
            buffer, filling = peak_of(lambda: store.load_into(buffer))
            read = store.read(slice(None))
        check(read["frame"], read["id"], ROWS)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(buffer)) / 2**20
    print(size, loading, appending, filling)


if __name__ == "__main__":
    main(*sys.argv[1:])

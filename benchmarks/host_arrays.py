"""The cost of adding NumPy arrays, whose contents are copied before the call returns.

python -m benchmarks.host_arrays
"""

import time

import jax
import jax.numpy as jnp
import numpy as np

import jaxbuf

CASES = {
    "32 transitions of 17 floats": ((17,), np.float32, 32),
    "256 transitions of 376 floats": ((376,), np.float32, 256),
    "32 images of 84 x 84 bytes": ((84, 84), np.uint8, 32),
    "256 images of 84 x 84 bytes": ((84, 84), np.uint8, 256),
}


def microseconds(rows, buffer):
    """Returns the least time of an add, over batches of 20 in a row."""
    least = float("inf")
    for _ in range(30):
        begin = time.perf_counter()
        for _ in range(20):
            buffer = jaxbuf.add(buffer, rows)
        jax.block_until_ready(buffer)
        least = min(least, (time.perf_counter() - begin) / 20 * 1e6)
    return least


def main():
    """Prints a row of the table for each case."""
    for name, (shape, dtype, count) in CASES.items():
        item = {"obs": jnp.zeros(shape, dtype), "reward": jnp.float32(0)}
        rows = {"obs": np.ones((count, *shape), dtype), "reward": np.ones(count, np.float32)}
        times = []
        for given in (rows, jax.tree.map(jnp.array, rows)):
            buffer = jaxbuf.ItemBuffer.create(item, 4096)
            times.append(microseconds(given, jaxbuf.add(buffer, given)))
        size = sum(leaf.nbytes for leaf in rows.values())
        print(f"| {name} ({size / 1e3:.0f} kB) | {times[0]:.0f} | {times[1]:.0f} |")


if __name__ == "__main__":
    main()

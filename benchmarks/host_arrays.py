"""The cost of adding NumPy arrays, whose contents are copied before the call returns.

    python -m benchmarks.host_arrays

prints the table of ``RESULTS.md``: with that copy, without it (which stores wrong data if arrays
are written again), and with jax arrays, of which there is no copy.
"""

import time
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import jaxbuf
from jaxbuf.core import trees

CASES = {
    "32 transitions of 17 floats": ((17,), np.float32, 32),
    "256 transitions of 376 floats": ((376,), np.float32, 256),
    "32 images of 84 x 84 bytes": ((84, 84), np.uint8, 32),
    "256 images of 84 x 84 bytes": ((84, 84), np.uint8, 256),
}
_ADDS = 10


def measure(shape: tuple[int, ...], dtype: Any, count: int) -> list[float]:
    """Returns the least times of an add in microseconds, of interleaved turns."""
    item = {"obs": jnp.zeros(shape, dtype), "reward": jnp.float32(0)}
    rows = {"obs": np.ones((count, *shape), dtype), "reward": np.ones(count, np.float32)}
    on_device = jax.tree.map(jnp.array, rows)
    buffer = jaxbuf.ItemBuffer.create(item, 4096)
    least = [float("inf")] * 3
    for _ in range(60):
        for k, given in enumerate((rows, rows, on_device)):
            # Without the copy for the second one.
            owned = trees.owned if k != 1 else lambda tree: tree
            with mock.patch.object(trees, "owned", owned):
                begin = time.perf_counter()
                for _ in range(_ADDS):
                    buffer = jaxbuf.add(buffer, given)
                jax.block_until_ready(buffer)
            least[k] = min(least[k], (time.perf_counter() - begin) / _ADDS * 1e6)
    return least


def main() -> None:
    """Prints the table."""
    print("| rows | kB | NumPy, µs | not copied | jax arrays |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for name, (shape, dtype, count) in CASES.items():
        kilobytes = count * (np.prod(shape) * np.dtype(dtype).itemsize + 4) / 1e3
        times = " | ".join(f"{x:.0f}" for x in measure(shape, dtype, count))
        print(f"| {name} | {kilobytes:.0f} | {times} |")


if __name__ == "__main__":
    main()

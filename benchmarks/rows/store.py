"""Random batches of rows of a `jaxbuf.Store` that are in memory, against arrays in memory.

* **jaxbuf**: `Store.read` of 256 row numbers. All files have been read before.
* **numpy**: the rows of an array for each leaf, by an index.

The folder is on disk and removed with the contestant.
"""

import itertools
import tempfile
from collections.abc import Callable, Mapping

import numpy as np

from benchmarks.harness import Operation, Options, Row, UnequalWork, import_library, repeat_calls
from benchmarks.transitions import CARTPOLE, MUJOCO, Items, Transitions

OPERATION = "python read"
BATCH_SIZE = 256


def rows(options: Options) -> list[Row]:
    """The rows that are wanted."""
    count = options.capacity or (2**12 if options.quick else 2**16)
    found: list[Row] = []
    for name, transitions in (("store-cartpole", CARTPOLE), ("store-mujoco", MUJOCO)):
        if options.wants(name, OPERATION):
            title = f"{count:,} {name.partition('-')[2]} transitions; read {BATCH_SIZE} at random"
            builders = {
                "numpy": lambda transitions=transitions: Contestant(transitions, count, False),
                "jaxbuf": lambda transitions=transitions: Contestant(transitions, count, True),
            }
            found.append(Row(name, title, (OPERATION,), builders, reference="numpy"))
    return found


class Contestant:
    """A store, or arrays with the same rows."""

    def __init__(self, transitions: Transitions, count: int, stored: bool):
        """Writes the rows to a store and reads them once, if `stored`."""
        self._items = transitions.items(np.arange(count, dtype=np.int64))
        random = np.random.default_rng(0)
        self._batches = random.integers(count, size=(64, BATCH_SIZE))
        self._next = itertools.cycle(self._batches)
        self.read: Callable[[np.ndarray], Items] = self._read_arrays
        if stored:
            jaxbuf = import_library("jaxbuf")
            self._folder = tempfile.TemporaryDirectory()
            store = jaxbuf.Store(self._folder.name, transitions.example)
            store.append(self._items)
            store.read(slice(None))
            self.read = store.read

    def _read_arrays(self, rows: np.ndarray) -> Items:
        return {name: leaf[rows] for name, leaf in self._items.items()}

    def verify(self) -> None:
        """Raises `UnequalWork` unless the rows are those of the arrays."""
        for rows in self._batches:
            for name, leaf in self.read(rows).items():
                if not np.array_equal(leaf, self._items[name][rows]):
                    raise UnequalWork(f"{name} differs")

    def operations(self) -> Mapping[str, Operation]:
        """Reads of other rows each time."""
        return {
            OPERATION: Operation(lambda n: repeat_calls(lambda: self.read(next(self._next)), n))
        }

    def facts(self) -> Mapping[str, str]:
        """Returns nothing more."""
        return {}

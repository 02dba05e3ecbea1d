"""A dataset on disk: more items than memory holds.

Each leaf is a zarr array; which of its rows count is said by one small file, replaced in one step
after they are written. So whatever is interrupted, the rows before it are as they were.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import fcntl
import itertools
import json
import os
import shutil
import threading
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, PyTree

from jaxbuf.buffers import ops
from jaxbuf.buffers.trajectory import TrajectoryBuffer
from jaxbuf.core import storage
from jaxbuf.io import describe, resizing
from jaxbuf.io.ranges import Ranges

Buffer = TypeVar("Buffer", bound=Any)

_FORMAT = 1
# More than will ever be appended: the arrays need no new shape when rows come.
_MOST_ROWS = 2**40
_CHUNK_BYTES = 2**18


class StoreBatch(NamedTuple):
    """Rows of a store.

    Attributes:
        data: The items, leaves ``[B, ...]``, on the device.
        rows: Where they lie in the store, ``[B]``.
    """

    data: PyTree[Array]
    rows: Int[np.ndarray, " B"]


class Store:
    """Items on disk in the order in which they were appended, compressed.

    Unlike the buffers it is no pytree, but a handle on a folder, for the host side of a program.
    Rows keep their numbers for good. An append that returned is on disk, one that was killed never
    happened; opened again, the store goes on after the last one that returned. One process at a
    time may write, and any number may read what was there when they opened it. Threads may share
    one store. A reader does not learn what the writer deletes, and reads zeros once it is gone.

    Args:
        path: The folder. It is made if needed.
        example: One unbatched item: arrays or ``jax.ShapeDtypeStruct``. Of a store that is there
            already it must be like the one it was made with.
        mode: ``"a"`` to read and append, ``"r"`` to read what is there.
        chunk: How many rows are compressed together, and read together: small for random batches,
            large for long ranges. By default about 256 KiB of them. Of a store that is there
            already its own counts.
        cache_bytes: How much memory may hold chunks that were read.

    Raises:
        ValueError: If there is another store or something else in the folder, another process
            writes to it, or ``example`` or a number is illegal.
        FileNotFoundError: If ``mode`` is ``"r"`` and there is no store.

    Example:
        >>> import tempfile, jax.numpy as jnp, jaxbuf
        >>> item = {"obs": jnp.zeros(3), "reward": jnp.float32(0)}
        >>> with tempfile.TemporaryDirectory() as folder, jaxbuf.Store(folder, item) as store:
        ...     rows = store.append({"obs": jnp.ones((500, 3)), "reward": jnp.arange(500.0)})
        ...     batches = store.batches(32, steps=2)
        ...     shapes = [batch.data["obs"].shape for batch in batches]
        ...     buffer = jaxbuf.ItemBuffer.create(item, capacity=100)
        ...     buffer = store.load_into(buffer, 0, 50)
        >>> rows, shapes, int(buffer.size)
        (range(0, 500), [(32, 3), (32, 3)], 50)
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        example: PyTree,
        *,
        mode: Literal["a", "r"] = "a",
        chunk: int | None = None,
        cache_bytes: int = 2**26,
    ) -> None:
        if mode not in ("a", "r"):
            raise ValueError(f"mode is {mode!r}; expected 'a' or 'r'")
        self._folder = Path(path).resolve()
        # Checks the example, and makes no array of it.
        self._like = jax.eval_shape(lambda: storage.allocate(example, (1,)))
        self._pins: collections.Counter[int] = collections.Counter()
        self._mutex = threading.RLock()
        self._closed = False
        self._lock: Any = None
        if mode == "a":
            self._lock = self._take_lock(path)
        try:
            self._chunk = self._open_or_create(path, chunk, cache_bytes)
            self._rows, self._deleted, self._freed = self._committed()
            if mode == "a":
                self._free()
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        """Rows appended so far, the deleted ones included."""
        return self._rows

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def live(self) -> int:
        """Rows that are not deleted."""
        return self._rows - len(self._deleted)

    @property
    def chunk(self) -> int:
        """How many rows are compressed together."""
        return self._chunk

    def close(self) -> None:
        """Let other processes write. Nothing is lost without it."""
        self._closed = True
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def append(
        self,
        items: PyTree[Array],
        *,
        mask: Bool[np.ndarray, " B"] | None = None,
        start: int | None = None,
    ) -> range:
        """Append items, and return once they are on disk.

        Args:
            items: Leaves ``[B, *shape]``, in the example's dtypes, on the host or a device.
            mask: Which rows to take, ``[B]``.
            start: The number that the first row is to have. What is there already from an earlier
                run of the same program is left as it is, and only the rest is written: so a run
                that resumes from a checkpoint behind the store repeats nothing.

        Returns:
            The numbers of the rows.

        Raises:
            ValueError: If a structure, shape or dtype differs from the example, ``start`` leaves a
                gap, or the store is open for reading only.
        """
        checked = jax.eval_shape(
            lambda items: storage.check(self._like, items, "items", ("B",))[0], items
        )
        leaves = [
            np.asarray(leaf).astype(like.dtype, copy=False)
            for leaf, like in zip(jax.tree.leaves(items), jax.tree.leaves(checked), strict=True)
        ]
        if mask is not None:
            mask = np.asarray(
                storage.check_rows(mask, "mask", leaves[0].shape[:1], np.bool_, "(B,)")
            )
            leaves = [leaf[mask] for leaf in leaves]
        count = leaves[0].shape[0]
        with self._mutex:
            self._check_writable()
            first = self._rows if start is None else int(start)
            if not 0 <= first <= self._rows:
                raise ValueError(
                    f"start is {start}, but the store has {self._rows} rows; expected from 0 to "
                    "that"
                )
            known = self._rows - first
            if count > known:
                rows = slice(self._rows, first + count)
                writes = [
                    array[rows].write(leaf[known:])
                    for array, leaf in zip(self._arrays, leaves, strict=True)
                ]
                for write in writes:
                    write.result()
                self._commit(rows=first + count)
            return range(first, first + count)

    def append_buffer(self, buffer: Any) -> range:
        """Append what a buffer holds, oldest first.

        Args:
            buffer: An ``ItemBuffer`` or a ``Queue`` of items like the example; or a
                ``TrajectoryBuffer``, if the example is one step of all its environments, leaves
                ``[num_envs, ...]``.

        Returns:
            The numbers of the rows.

        Raises:
            ValueError: If items differ from the example, or environments have different numbers of
                steps: append those as they come.
        """
        if not isinstance(buffer, TrajectoryBuffer):
            order, live = (np.asarray(x) for x in resizing.in_order(buffer.occupancy))
            return self.append(jax.tree.map(lambda leaf: leaf[order[live]], buffer.data))
        counters = np.asarray(buffer.rings.counters).astype(np.int64)
        position, held = counters[:, 0], counters[:, 2]
        if np.any(held != held[0]):
            raise ValueError(
                f"environments have from {held.min()} to {held.max()} steps; append rollouts as "
                "they come, or add to all environments alike"
            )
        env = np.arange(buffer.num_envs)[:, None]
        step = (position - held)[:, None] + np.arange(held[0])
        step = step % buffer.length
        return self.append(jax.tree.map(lambda leaf: leaf[env, step].swapaxes(0, 1), buffer.data))

    def read(self, rows: slice | Int[np.ndarray, " B"]) -> PyTree[np.ndarray[Any, Any]]:
        """Rows by number.

        Args:
            rows: Numbers ``[B]``, or a slice of all rows.

        Returns:
            Leaves ``[B, ...]``.

        Raises:
            IndexError: If there is no such row, or it was deleted and is not pinned.
        """
        if isinstance(rows, slice):
            rows = np.arange(self._rows)[rows]
        rows = np.asarray(rows, np.int64)
        with self.pin(rows):
            return self._read(rows)

    @contextlib.contextmanager
    def pin(self, rows: Int[np.ndarray, " B"]) -> Generator[None]:
        """Keep rows on disk, though they be deleted, as long as the context lasts.

        Args:
            rows: Numbers ``[B]``.

        Raises:
            IndexError: If there is no such row, or it was deleted before.
        """
        rows = np.asarray(rows, np.int64)
        chunks = self._pin(rows)
        try:
            yield
        finally:
            self._unpin(chunks)

    def delete(self, rows: range | Int[np.ndarray, " B"]) -> None:
        """Delete rows for good.

        They are not drawn any more. Their space on disk is free once all rows of a chunk are
        deleted and none of it is pinned: batches that were drawn already are still read.

        Args:
            rows: Numbers; those that are deleted already do not matter.

        Raises:
            IndexError: If there is no such row.
            ValueError: If the store is open for reading only.
        """
        gone = Ranges.of(np.asarray(rows, np.int64))
        with self._mutex:
            self._check_writable()
            self._check_rows(gone.bounds[:, 0])
            self._check_rows(gone.bounds[:, 1] - 1)
            self._commit(deleted=self._deleted | gone)
            self._free()

    def batches(
        self,
        batch_size: int,
        *,
        seed: int = 0,
        start: int = 0,
        steps: int | None = None,
        prefetch: int = 2,
        device: Any = None,
    ) -> Iterator[StoreBatch]:
        """Random batches, read ahead by another thread while you compute.

        Every row that is there when a batch is drawn is equally likely, with replacement. Batch
        ``i`` depends on the seed, on ``i`` and on the rows at that time only, so a run can go on
        from any batch.

        Args:
            batch_size: Rows ``B``.
            seed: Another one gives other batches.
            start: Number of the first batch.
            steps: How many batches; without, they never end.
            prefetch: How many batches are on their way at a time.
            device: A device or sharding to put them on.

        Yields:
            Each batch with its row numbers.

        Raises:
            ValueError: If a number is too small or, with the first batch, the store is empty.
        """
        for name, value in (("batch_size", batch_size), ("prefetch", prefetch)):
            if value < 1:
                raise ValueError(f"{name} is {value}; expected at least 1")
        numbers = itertools.count(start) if steps is None else iter(range(start, start + steps))
        return self._batches(batch_size, seed, numbers, prefetch, device)

    def load_into(
        self,
        buffer: Buffer,
        start: int = 0,
        stop: int | None = None,
        *,
        priority: Callable[[PyTree[Array]], Array] | None = None,
        score: Callable[[PyTree[Array]], Array] | None = None,
        rows_at_a_time: int = 4096,
    ) -> Buffer:
        """Add a range of rows to a buffer, in order; deleted ones are left out.

        Args:
            buffer: It is consumed: go on with the result. A ``TrajectoryBuffer`` takes rows with
                leaves ``[num_envs, ...]``, one step of all environments.
            start: First row.
            stop: Row after the last; without, all that there are.
            priority: Gives the priorities of rows ``[B]``, from their leaves ``[B, ...]``.
            score: Gives their scores.
            rows_at_a_time: How many rows are in memory besides the buffer.

        Raises:
            ValueError: If rows and buffer differ.
            IndexError: If there are no such rows.
        """
        stop = self._rows if stop is None else stop
        rows = np.arange(start, stop, dtype=np.int64)
        self._check_rows(rows[[0, -1]] if len(rows) else rows)
        rows = rows[~self._deleted.contains(rows)]
        size = min(rows_at_a_time, max(len(rows), 1))
        filled: Any = buffer
        for begin in range(0, len(rows), size):
            piece = rows[begin : begin + size]
            # Pieces of one size: one program.
            padded = np.pad(piece, (0, size - len(piece)), mode="edge")
            mask: Any = np.arange(size) < len(piece)
            items = self.read(padded)
            options: dict[str, Any] = {
                name: f(items) for name, f in (("priority", priority), ("score", score)) if f
            }
            if isinstance(filled, TrajectoryBuffer):
                items = jax.tree.map(lambda leaf: np.swapaxes(leaf, 0, 1), items)
                mask = np.broadcast_to(mask, (filled.num_envs, size))
                options = {name: jnp.swapaxes(x, 0, 1) for name, x in options.items()}
            filled = ops.add(filled, items, mask=mask, **options)
        return filled

    def _batches(
        self, batch_size: int, seed: int, numbers: Iterator[int], prefetch: int, device: Any
    ) -> Iterator[StoreBatch]:
        def fetch(rows: Int[np.ndarray, " B"], chunks: list[int]) -> StoreBatch:
            try:
                return StoreBatch(jax.device_put(self._read(rows), device), rows)
            finally:
                self._unpin(chunks)

        def draw(number: int) -> tuple[Int[np.ndarray, " B"], list[int]]:
            with self._mutex:
                if not self.live:
                    raise ValueError("the store is empty; append to it first")
                random = np.random.default_rng((seed, number))
                rank = random.integers(self.live, size=batch_size)
                rows = np.asarray(self._deleted.without(rank))
                return rows, self._pin(rows)

        waiting: collections.deque[tuple[Any, list[int]]] = collections.deque()
        with concurrent.futures.ThreadPoolExecutor(1, "jaxbuf-store") as reader:
            try:
                for number in numbers:
                    rows, chunks = draw(number)
                    waiting.append((reader.submit(fetch, rows, chunks), chunks))
                    if len(waiting) > prefetch:
                        yield waiting.popleft()[0].result()
                while waiting:
                    yield waiting.popleft()[0].result()
            finally:
                for future, chunks in waiting:
                    if future.cancel():
                        self._unpin(chunks)

    def _read(self, rows: Int[np.ndarray, " B"]) -> PyTree[np.ndarray[Any, Any]]:
        reads = [array[rows].read() for array in self._arrays]
        return jax.tree.unflatten(
            jax.tree.structure(self._like), [np.asarray(read.result()) for read in reads]
        )

    def _pin(self, rows: Int[np.ndarray, " B"]) -> list[int]:
        chunks = np.unique(rows // self._chunk).tolist()
        with self._mutex:
            self._check_rows(rows)
            gone = rows[self._deleted.contains(rows)]
            lost = [row for row in gone.tolist() if not self._pins[row // self._chunk]]
            if lost:
                raise IndexError(f"row {lost[0]} was deleted")
            self._pins.update(chunks)
        return chunks

    def _unpin(self, chunks: list[int]) -> None:
        with self._mutex:
            self._pins.subtract(chunks)
            self._pins = +self._pins
            if self._lock is not None:
                self._free()

    def _free(self) -> None:
        """Take chunks without live rows off the disk, unless they are pinned."""
        free: list[int] = []
        for begin, end in self._deleted.tolist():
            for chunk in range(-(-begin // self._chunk), end // self._chunk):
                bounds = chunk * self._chunk, (chunk + 1) * self._chunk
                if not self._pins[chunk] and not self._freed.covers(*bounds):
                    free.append(chunk)
        if not free:
            return
        removals = [
            array.kvstore.write(".".join([str(chunk)] + ["0"] * (array.ndim - 1)), None)
            for chunk in free
            for array in self._arrays
        ]
        for removal in removals:
            removal.result()
        runs = ((chunk * self._chunk, (chunk + 1) * self._chunk) for chunk in free)
        self._commit(freed=self._freed | Ranges.runs(runs))

    def _commit(
        self,
        rows: int | None = None,
        deleted: Ranges | None = None,
        freed: Ranges | None = None,
    ) -> None:
        """Say on disk what counts, and then here."""
        rows = self._rows if rows is None else rows
        deleted = self._deleted if deleted is None else deleted
        freed = self._freed if freed is None else freed
        _write(
            self._folder / "rows.json",
            {"rows": rows, "deleted": deleted.tolist(), "freed": freed.tolist()},
        )
        self._rows, self._deleted, self._freed = rows, deleted, freed

    def _committed(self) -> tuple[int, Ranges, Ranges]:
        file = self._folder / "rows.json"
        if not file.exists():
            return 0, Ranges.of([]), Ranges.of([])
        try:
            record = json.loads(file.read_text())
            return (
                int(record["rows"]),
                Ranges.runs(record["deleted"]),
                Ranges.runs(record["freed"]),
            )
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"the store {self._folder} is damaged: {file.name}") from error

    def _open_or_create(
        self, path: str | os.PathLike[str], chunk: int | None, cache_bytes: int
    ) -> int:
        leaves = {
            name: dataclasses.asdict(leaf)
            for name, leaf in describe.leaves(
                jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), self._like), ""
            ).items()
        }
        for name, leaf in leaves.items():
            if describe.is_key(leaf["dtype"]):
                raise ValueError(f"example{name} is a PRNG key; store its jax.random.key_data")
        header = self._folder / "store.json"
        if not header.exists():
            if self._lock is None:
                raise FileNotFoundError(f"there is no store in {path}")
            row_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(self._like))
            chunk = max(_CHUNK_BYTES // max(row_bytes, 1), 1) if chunk is None else int(chunk)
            if chunk < 1:
                raise ValueError(f"chunk is {chunk}; expected at least 1")
            # What is there without a header is left of a creation that was killed.
            shutil.rmtree(self._folder / "leaves", ignore_errors=True)
            self._arrays = self._open_arrays(cache_bytes, chunk)
            leaves = json.loads(json.dumps(leaves))
            _write(header, {"format": _FORMAT, "chunk": chunk, "leaves": leaves})
            return chunk
        try:
            record = json.loads(header.read_text())
            made, chunk = record["format"], int(record["chunk"])
            stored: dict[str, Any] = record["leaves"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"the store {self._folder} is damaged: {header.name}") from error
        if made != _FORMAT:
            raise ValueError(
                f"the store {self._folder} has format {made}; this version of jaxbuf reads format "
                f"{_FORMAT}"
            )
        self._compare(stored, json.loads(json.dumps(leaves)))
        self._arrays = self._open_arrays(cache_bytes, None)
        return chunk

    def _compare(self, stored: dict[str, Any], given: dict[str, Any]) -> None:
        parts = [f"example{name} is not in the store" for name in given if name not in stored]
        parts += [f"example{name} is missing" for name in stored if name not in given]
        for name in given if not parts else ():
            parts += [
                f"example{name} has {what} {given[name][what]}, but the store has "
                f"{stored[name][what]}"
                for what in ("shape", "dtype")
                if given[name][what] != stored[name][what]
            ]
        if parts:
            raise ValueError(f"the store {self._folder} holds something else: {'; '.join(parts)}")

    def _open_arrays(self, cache_bytes: int, chunk: int | None) -> list[Any]:
        import tensorstore as ts

        context = ts.Context({"cache_pool": {"total_bytes_limit": int(cache_bytes)}})
        futures: list[Any] = []
        for i, leaf in enumerate(jax.tree.leaves(self._like)):
            spec: dict[str, Any] = {
                "driver": "zarr",
                "kvstore": {"driver": "file", "path": f"{self._folder / 'leaves' / str(i)}/"},
                # Another process may have appended since a chunk was read.
                "recheck_cached_data": "open",
            }
            options: dict[str, Any] = {"open": True}
            if chunk is not None:
                spec["metadata"] = {
                    "compressor": {"id": "zstd", "level": 3},
                    "dimension_separator": ".",
                }
                options = {
                    "create": True,
                    "dtype": ts.dtype(leaf.dtype),
                    "shape": [_MOST_ROWS, *leaf.shape[1:]],
                    "chunk_layout": ts.ChunkLayout(chunk_shape=[chunk, *leaf.shape[1:]]),
                }
            futures.append(ts.open(spec, context=context, **options))
        return [future.result() for future in futures]

    def _take_lock(self, path: str | os.PathLike[str]) -> Any:
        if self._folder.exists() and not self._folder.is_dir():
            raise ValueError(f"path is {path}, which is a file; choose a folder")
        known = {"store.json", "rows.json", "leaves", "lock"}
        strange = (
            sorted(entry.name for entry in self._folder.iterdir() if entry.name not in known)
            if self._folder.exists() and not (self._folder / "store.json").exists()
            else []
        )
        if [name for name in strange if not name.endswith(".new")]:
            raise ValueError(f"{path} holds other files ({strange[0]}, ...); choose another folder")
        self._folder.mkdir(parents=True, exist_ok=True)
        lock = (self._folder / "lock").open("a")
        try:
            # Gone with the process, however it ends.
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            lock.close()
            raise ValueError(
                f"the store {path} is open for writing elsewhere; close it there, or use mode='r'"
            ) from error
        return lock

    def _check_writable(self) -> None:
        if self._lock is None:
            state = "closed" if self._closed else "open for reading only"
            raise ValueError(f"the store {self._folder} is {state}; open it with mode='a'")

    def _check_rows(self, rows: Int[np.ndarray, " B"]) -> None:
        wrong = rows[(rows < 0) | (rows >= self._rows)]
        if wrong.size:
            raise IndexError(f"there is no row {wrong[0]}; the store has {self._rows}")


def _write(file: Path, record: dict[str, Any]) -> None:
    """Replace a small file in one step."""
    new = file.with_suffix(".new")
    with new.open("w") as stream:
        json.dump(record, stream)
        stream.flush()
        os.fsync(stream.fileno())
    new.replace(file)

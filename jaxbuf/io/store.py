"""A dataset on disk, for more items than memory holds.

Each leaf is a zarr array. One small file says which rows are valid and is replaced atomically after
rows are written, so that an interruption never affects earlier rows. Chunks and small files carry
checksums, and a missing chunk is never read as zeros.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import fcntl
import itertools
import math
import os
import shutil
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, PyTree

from jaxbuf.buffers import doors
from jaxbuf.buffers.buffer import as_buffer
from jaxbuf.buffers.options import check_options
from jaxbuf.core import checks, numbers, storage, trees
from jaxbuf.core.sizes import MOST_ON_HOST, MOST_ROWS, check_count
from jaxbuf.io import records, structure, zarr
from jaxbuf.io.order import items_in_order, rings_in_order
from jaxbuf.io.passes import Passes
from jaxbuf.io.places import Listed, Places, chunk_name
from jaxbuf.io.ranges import Ranges

Buffer = TypeVar("Buffer", bound=Any)

_FORMAT = 2
_CHUNK_BYTES = 2**16
_MOST_CHUNK_BYTES = 2**31

# Indices of rows, as NumPy would accept them for an array of all rows.
Rows: TypeAlias = (
    slice
    | Sequence[int]
    | Int[Array | np.ndarray[Any, Any], " ..."]
    | Bool[Array | np.ndarray[Any, Any], " N"]
)


# Numbers of rows, and the chunks that are pinned until they were read.
_Draw: TypeAlias = tuple[Int[np.ndarray, " B"], list[int]]


class StoreBatch(NamedTuple):
    """Rows of a store.

    Attributes:
        data: The items, leaves ``[B, ...]``, on the device.
        rows: Their row numbers in the store, ``[B]``.
    """

    data: PyTree[Array]
    rows: Int[np.ndarray, " B"]


@dataclasses.dataclass(frozen=True, eq=False)
class _Kept:
    """The rows that an iterator over epochs draws.

    Attributes:
        rows: The number of rows when it began.
        deleted: The rows that were deleted at that time.
    """

    rows: int
    deleted: Ranges


class Store:
    """Items on disk in the order in which they were appended, compressed.

    Unlike a buffer it is not a pytree but a handle on a folder, for the host side of a program.
    Row numbers never change. An append is on disk once it returns; one that was killed has no
    effect, and the reopened store goes on after the last append that returned. One process at a
    time may write. Any number of processes may read the rows that existed when they opened the
    store. They may still draw rows that the writer has deleted since, which raises an error once
    the space of these rows was freed. Threads may share one store.

    The store keeps the dtypes of the example, including those of 64 bits, regardless of
    ``jax_enable_x64``. Every chunk carries a checksum. A damaged or missing file raises an error
    that names it, at the latest when its rows are read, and is never overwritten.

    Args:
        path: The folder. It is created if needed.
        example: One unbatched item: arrays of NumPy or JAX, or ``jax.ShapeDtypeStruct``. For an
            existing store it must match the example that it was created with.
        mode: ``"a"`` to read and append, ``"r"`` to only read.
        chunk: Number of rows that are compressed and read together: small for random batches,
            large for long ranges. By default they take about 64 KiB before compression, which suits
            random batches. An existing store keeps its own.
        cache_bytes: The most memory for chunks that were read.

    Raises:
        ValueError: If the folder holds a store of other items or other files, the store is damaged
            or has another format, another process writes to it, or an argument is illegal.
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
        checks.check_choice("mode", mode, ("a", "r"))
        self._folder = checks.check_path("path", path).resolve()
        self._like = _like(example)
        self._names = [*structure.leaves(self._like, "")]
        self._pins: collections.Counter[int] = collections.Counter()
        self._kept: list[_Kept] = []
        self._mutex = threading.RLock()
        self._closed = False
        self._lock: Any = None
        if mode == "a":
            self._lock = self._take_lock(path)
        try:
            self._arrays: list[Any] = []
            self._folders: list[int] = []
            self._chunk = self._open_or_create(path, chunk, cache_bytes)
            self._places = Places(
                self._folder,
                self._folders,
                [array.ndim for array in self._arrays],
                [_chunk_bytes(leaf, self._chunk) for leaf in jax.tree.leaves(self._like)],
            )
            self._rows, self._deleted, self._freed, self._listed = self._committed()
            self._check_files()
            if mode == "a":
                self._free()
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        """Returns the number of rows appended so far, including deleted ones."""
        return self._rows

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def live(self) -> int:
        """The number of rows that are not deleted; ``ItemBuffer.live`` is a mask instead."""
        return self._rows - len(self._deleted)

    @property
    def chunk(self) -> int:
        """The number of rows that are compressed together."""
        return self._chunk

    def close(self) -> None:
        """Closes the store, so that other processes may write. No data is lost without it."""
        with self._mutex:
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
        """Appends items, and returns once they are on disk.

        Args:
            items: Leaves ``[B, *shape]``, in the example's dtypes, on the host or a device. NumPy's
                numbers of 64 bits are accepted for 32 bits as long as they fit; if
                ``jax_enable_x64`` is off, so are all numbers of 32 bits for 64.
            mask: The rows to take, ``[B]``.
            start: The number that the first row is to have. Rows that an earlier run of the same
                program has written are left as they are, and only the rest is written. A run that
                resumes from a checkpoint older than the store therefore adds no row twice.

        Returns:
            The numbers of the rows.

        Raises:
            ValueError: If a structure, shape or dtype differs from the example, a number does not
                fit its dtype, ``start`` leaves a gap, the store is open for reading only, or the
                chunk to append to is damaged.
            OSError: If the rows cannot be written, such as to a full disk. The store remains as it
                was.
        """
        items = trees.match(self._like, items)
        self._check_items(items)
        leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(items)]
        if mask is not None:
            mask = np.asarray(
                storage.check_rows(mask, "mask", leaves[0].shape[:1], np.bool_, "(B,)")
            )
            leaves = [leaf[mask] for leaf in leaves]
        leaves = [
            numbers.convert(leaf, f"items{name}", like.dtype)
            for name, leaf, like in zip(
                self._names, leaves, jax.tree.leaves(self._like), strict=True
            )
        ]
        count = leaves[0].shape[0]
        with self._mutex:
            self._check_writable()
            first = self._rows if start is None else check_count("start", start, 0, MOST_ON_HOST)
            if first > self._rows:
                raise ValueError(
                    f"start is {start}, but the store has {self._rows} rows; expected from 0 to "
                    "that"
                )
            known = self._rows - first
            if count > known:
                rows = slice(self._rows, first + count)
                if self._rows % self._chunk:
                    # Otherwise missing rows of a chunk would be written as zeros.
                    self._read(np.asarray([self._rows - 1]))
                writes = [
                    array[rows].write(leaf[known:].view(zarr.disk_dtype(leaf.dtype)))
                    for array, leaf in zip(self._arrays, leaves, strict=True)
                ]
                zarr.finish(writes)
                until = rows.stop // self._chunk, -(-rows.stop // self._chunk)
                listed = self._places.note(self._listed, rows.start // self._chunk, *until)
                self._commit(rows=rows.stop, listed=listed)
            return range(first, first + count)

    def append_buffer(self, buffer: Any) -> range:
        """Appends the contents of a buffer, oldest first.

        Args:
            buffer: An ``ItemBuffer`` or a ``Queue`` of items like the example; or a
                ``TrajectoryBuffer``, if the example is one step of all its environments, leaves
                ``[num_envs, ...]``. It may be ``Hosted`` or ``Sharded``: shards give their items
                in turn, and their environments follow each other.

        Returns:
            The numbers of the rows.

        Raises:
            ValueError: If items differ from the example, the buffer is a ``Mixture``, whose items
                have no order, or environments have different numbers of steps. In that case append
                rollouts as they come.
        """
        check_options(buffer, "add", {})
        rings = rings_in_order(buffer)
        if rings is None:
            return self.append(items_in_order(buffer))
        held = [len(jax.tree.leaves(ring)[0]) for ring in rings]
        if min(held) < max(held):
            raise ValueError(
                f"environments have from {min(held)} to {max(held)} steps; append rollouts as "
                "they come, or add to all environments alike"
            )
        return self.append(jax.tree.map(lambda *leaves: np.stack(leaves, axis=1), *rings))

    def read(self, rows: Rows) -> PyTree[np.ndarray[Any, Any]]:
        """Reads rows.

        Args:
            rows: Row numbers of any shape ``[...]``, such as the numbers that each chunk of
                fragments in a buffer refers to; a boolean mask of all rows, ``[len(store)]``; or a
                slice.

        Returns:
            Leaves ``[..., *shape]`` for row numbers, and ``[B, *shape]`` for a mask or a slice
            that chooses ``B`` rows.

        Raises:
            IndexError: If there is no such row, or it was deleted and is not pinned.
            ValueError: If ``rows`` is something else, or the data on disk is damaged.
        """
        numbers = self._numbers(rows)
        with self.pin(numbers):
            return self._read(numbers)

    @contextlib.contextmanager
    def pin(self, rows: Rows) -> Generator[None]:
        """Keeps rows on disk while the context lasts, even if they are deleted.

        Args:
            rows: Row numbers, a mask or a slice, as for ``read``.

        Raises:
            IndexError: If there is no such row, or it was deleted before.
            ValueError: If ``rows`` is something else.
        """
        chunks = self._pin(self._numbers(rows))
        try:
            yield
        finally:
            self._unpin(chunks)

    def delete(self, rows: Rows) -> None:
        """Deletes rows permanently.

        They are not drawn any more. Their space on disk is freed once all rows of a chunk are
        deleted and none of them is pinned, so that batches that were already drawn can be read.

        Args:
            rows: Row numbers, a mask or a slice, as for ``read``; rows that are deleted already
                are ignored.

        Raises:
            IndexError: If there is no such row.
            ValueError: If ``rows`` is something else, or the store is open for reading only.

        Example:
            The items of a buffer name rows of a store, and rows that no item names are deleted.

            >>> import tempfile, jax.numpy as jnp, numpy as np, jaxbuf
            >>> buffer = jaxbuf.ItemBuffer.create({"row": jnp.int32(0)}, capacity=3)
            >>> with tempfile.TemporaryDirectory() as folder, jaxbuf.Store(folder, 0.0) as store:
            ...     rows = store.append(jnp.arange(5.0))
            ...     buffer = buffer.add({"row": jnp.array(rows)})
            ...     named = buffer.data["row"][buffer.live]
            ...     store.delete(np.setdiff1d(np.arange(len(store)), named))
            ...     print(store.live, sorted(named.tolist()))
            3 [2, 3, 4]
        """
        with self._mutex:
            self._check_writable()
            gone = Ranges.of(self._numbers(rows))
            self._check_rows(gone.bounds[:, 0])
            self._check_rows(gone.bounds[:, 1] - 1)
            self._commit(deleted=self._deleted | gone)
            self._free()

    def batches(
        self,
        batch_size: int,
        *,
        seed: int = 0,
        epochs: int | None = None,
        start: int = 0,
        steps: int | None = None,
        prefetch: int = 2,
        device: Any = None,
    ) -> Iterator[StoreBatch]:
        """Yields random batches, which another thread reads ahead of time.

        By default rows are drawn with replacement, and all rows present at the time of the draw are
        equally likely. Batch ``i`` only depends on the seed, on ``i`` and on those rows, so a run
        can resume from any batch.

        With ``epochs``, each epoch has every row exactly once, in another random order. The epochs
        follow each other without a gap: only the last batch of all has fewer than ``B`` rows, if
        their number is not a multiple of ``B``. The rows are those present when the first batch is
        requested. Rows that are deleted afterwards are still drawn, and stay on disk until the
        iterator ends or is closed. A run that resumes gets the same batches if the store has the
        same rows as at the beginning.

        Args:
            batch_size: Number of rows ``B``.
            seed: The seed of the draws.
            epochs: Number of passes over all rows; None draws with replacement.
            start: Number of the first batch.
            steps: Number of batches; without it, they never end, or end with the last epoch.
            prefetch: Number of batches to read ahead.
            device: A device or sharding to put them on.

        Yields:
            Each batch with its row numbers.

        Raises:
            ValueError: If a number is too small or not an integer; at the first batch, if the store
                is empty; and at any batch, if its rows are damaged on disk, or have 64-bit numbers
                that do not fit 32 bits while ``jax_enable_x64`` is off.

        Example:
            >>> import tempfile, jax.numpy as jnp, numpy as np, jaxbuf
            >>> item = jnp.int32(0)
            >>> with tempfile.TemporaryDirectory() as folder, jaxbuf.Store(folder, item) as store:
            ...     _ = store.append(jnp.arange(10))
            ...     all_ = [batch.rows for batch in store.batches(4, epochs=2)]
            ...     later = [batch.rows for batch in store.batches(4, epochs=2, start=3)]
            >>> [len(rows) for rows in all_], sorted(np.concatenate(all_)[:10].tolist())
            ([4, 4, 4, 4, 4], [0, 1, 2, 3, 4, 5, 6, 7, 8, 9])
            >>> np.array_equal(later, all_[3:])
            True
        """
        for name, value, least, most in (
            ("batch_size", batch_size, 1, MOST_ROWS),
            ("seed", seed, 0, MOST_ON_HOST),
            ("epochs", 1 if epochs is None else epochs, 1, MOST_ON_HOST),
            ("start", start, 0, MOST_ON_HOST),
            ("steps", 0 if steps is None else steps, 0, MOST_ON_HOST),
            ("prefetch", prefetch, 1, MOST_ROWS),
        ):
            check_count(name, value, least, most)
        numbers = itertools.count(start) if steps is None else iter(range(start, start + steps))
        if epochs is None:
            draws = self._draws(batch_size, seed, numbers)
        else:
            draws = self._epochs(batch_size, seed, numbers, epochs)
        return self._batches(draws, prefetch, device)

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
        """Adds a range of rows to a buffer, in order and without deleted ones.

        Args:
            buffer: The buffer, which is consumed: go on with the result. A ``TrajectoryBuffer``
                takes rows with leaves ``[num_envs, ...]``, one step of all environments. It may be
                ``Hosted`` or ``Sharded``.
            start: First row, at most ``len(store)``.
            stop: Row after the last, from ``start`` to ``len(store)``, which is the default.
            priority: Returns the priorities of rows ``[B]``, given their leaves ``[B, ...]``. It is
                called from Python, once for each ``rows_at_a_time``, and not traced.
            score: Returns their scores, likewise.
            rows_at_a_time: Number of rows in memory besides the buffer.

        Returns:
            The buffer with the rows.

        Raises:
            ValueError: If rows do not fit the buffer, a number is illegal, or rows are damaged.
            IndexError: If there are no such rows.
        """
        check_options(buffer, "add", {})
        known = as_buffer(buffer)
        if as_buffer(known.inside()[0]).members:
            raise ValueError("buffer is a Mixture; load into one of its parts, and replace_part")
        rows_at_a_time = check_count("rows_at_a_time", rows_at_a_time)
        start = check_count("start", start, 0, MOST_ON_HOST)
        if start > self._rows:
            raise IndexError(f"start is {start}, but the store has {self._rows} rows")
        stop = self._rows if stop is None else check_count("stop", stop, start, MOST_ON_HOST)
        if stop > start:
            self._check_rows(np.asarray([stop - 1]))
        rows = np.arange(start, stop, dtype=np.int64)
        rows = rows[~self._deleted.contains(rows)]
        envs, blocks = known.num_envs, known.num_blocks
        size = min(rows_at_a_time, max(len(rows), 1))
        if not envs:
            # Each shard takes as many rows.
            size = -(-size // blocks) * blocks
        filled: Any = buffer
        for begin in range(0, len(rows), size):
            piece = rows[begin : begin + size]
            # Pieces of one size need only one program.
            padded = np.pad(piece, (0, size - len(piece)), mode="edge")
            mask: Any = np.arange(size) < len(piece)
            items = self._for_jax(self.read(padded))
            options: dict[str, Any] = {
                name: f(items) for name, f in (("priority", priority), ("score", score)) if f
            }
            if envs:
                items = jax.tree.map(lambda leaf: np.swapaxes(leaf, 0, 1), items)
                mask = np.broadcast_to(mask, (envs, size))
                options = {name: jnp.swapaxes(x, 0, 1) for name, x in options.items()}
            filled = doors.add(filled, items, mask=mask, **options)
        return filled

    def _draws(self, batch_size: int, seed: int, numbers: Iterator[int]) -> Generator[_Draw]:
        """Yields the rows of batches with replacement, pinned."""
        for number in numbers:
            with self._mutex:
                self._check_not_empty()
                random = np.random.default_rng((seed, number))
                rank = random.integers(self.live, size=batch_size)
                rows = np.asarray(self._deleted.without(rank))
                draw = rows, self._pin(rows)
            yield draw

    def _epochs(
        self, batch_size: int, seed: int, numbers: Iterator[int], epochs: int
    ) -> Generator[_Draw]:
        """Yields the rows of batches of passes over all rows, pinned."""
        with self._mutex:
            self._check_not_empty()
            kept = _Kept(self._rows, self._deleted)
            self._kept.append(kept)
        try:
            count = kept.rows - len(kept.deleted)
            passes = Passes(count, seed)
            for number in numbers:
                start = number * batch_size
                if start >= count * epochs:
                    return
                rank = passes.rows(start, min(start + batch_size, count * epochs))
                rows = np.asarray(kept.deleted.without(rank))
                with self._mutex:
                    draw = rows, self._pin(rows, kept.deleted)
                yield draw
        finally:
            with self._mutex:
                self._kept.remove(kept)
                if self._lock is not None:
                    self._free()

    def _batches(self, draws: Generator[_Draw], prefetch: int, device: Any) -> Iterator[StoreBatch]:
        def fetch(rows: Int[np.ndarray, " B"], chunks: list[int]) -> StoreBatch:
            try:
                return StoreBatch(jax.device_put(self._for_jax(self._read(rows)), device), rows)
            finally:
                self._unpin(chunks)

        waiting: collections.deque[tuple[Any, list[int]]] = collections.deque()
        with (
            contextlib.closing(draws),
            concurrent.futures.ThreadPoolExecutor(1, "jaxbuf-store") as reader,
        ):
            try:
                for rows, chunks in draws:
                    waiting.append((reader.submit(fetch, rows, chunks), chunks))
                    if len(waiting) > prefetch:
                        yield waiting.popleft()[0].result()
                while waiting:
                    yield waiting.popleft()[0].result()
            finally:
                for future, chunks in waiting:
                    if future.cancel():
                        self._unpin(chunks)

    def _numbers(self, rows: Rows) -> Int[np.ndarray, " ..."]:
        """Returns the numbers of the rows that NumPy would select."""
        if isinstance(rows, slice):
            return np.arange(self._rows)[rows]
        known = isinstance(rows, int | np.integer | Sequence | np.ndarray | jax.Array)
        key = structure.is_key(getattr(rows, "dtype", None))
        if not known or key or isinstance(rows, str | bytes):
            raise ValueError(
                f"rows is {checks.name_of(rows)}; expected integers, a mask or a slice of all rows"
            )
        array = np.asarray(rows)
        if array.dtype == bool:
            if array.shape != (self._rows,):
                raise ValueError(
                    f"rows is a mask of shape {array.shape}; expected ({self._rows},), one for "
                    "each row of the store"
                )
            return np.flatnonzero(array)
        if not array.size and not hasattr(rows, "dtype"):
            return np.zeros(array.shape, np.int64)  # [] has no integer dtype.
        if not np.issubdtype(array.dtype, np.integer):
            raise ValueError(
                f"rows has dtype {array.dtype}; expected integers, a mask or a slice of all rows"
            )
        return array.astype(np.int64)

    def _read(self, rows: Int[np.ndarray, " ..."]) -> PyTree[np.ndarray[Any, Any]]:
        if not rows.size:
            # tensorstore would look for the first chunk even so.
            return jax.tree.map(
                lambda x: np.zeros((*rows.shape, *x.shape[1:]), x.dtype), self._like
            )
        i, leaves = 0, list[np.ndarray[Any, Any]]()
        likes = jax.tree.leaves(self._like)
        try:
            chunks = np.unique(rows // self._chunk).tolist()
            for i in range(len(self._arrays)):
                self._places.check(i, chunks, self._rows // self._chunk, self._listed)
            reads = [array[rows].read() for array in self._arrays]
            for i, read in enumerate(reads):
                leaves.append(np.asarray(read.result()).view(likes[i].dtype))
        except ValueError as error:
            if self._lock is None:
                # The writer may have deleted them since this store was opened.
                gone = rows[self._committed()[1].contains(rows)]
                if gone.size:
                    raise IndexError(f"row {gone[0]} was deleted") from error
            raise self._damage(f"{self._names[i]}: {zarr.reason(error)}") from error
        return jax.tree.unflatten(jax.tree.structure(self._like), leaves)

    def _for_jax(self, rows: PyTree[np.ndarray[Any, Any]]) -> PyTree[np.ndarray[Any, Any]]:
        """Returns rows in the dtypes of JAX arrays, which may be narrower."""
        leaves = [
            numbers.convert(leaf, f"data{name}", jax.dtypes.canonicalize_dtype(leaf.dtype))
            for name, leaf in zip(self._names, jax.tree.leaves(rows), strict=True)
        ]
        return jax.tree.unflatten(jax.tree.structure(rows), leaves)

    def _pin(self, rows: Int[np.ndarray, " ..."], deleted: Ranges | None = None) -> list[int]:
        chunks = np.unique(rows // self._chunk).tolist()
        deleted = self._deleted if deleted is None else deleted
        with self._mutex:
            self._check_rows(rows)
            gone = rows[deleted.contains(rows)]
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
        """Removes chunks without live rows from the disk, unless they are pinned."""
        free: list[int] = []
        for begin, end in self._unfreed():
            for chunk in range(-(-begin // self._chunk), end // self._chunk):
                if not self._pins[chunk] and not self._is_kept(chunk):
                    free.append(chunk)
        if not free:
            return
        removals = [
            array.kvstore.write(chunk_name(chunk, array.ndim), None)
            for chunk in free
            for array in self._arrays
        ]
        zarr.finish(removals)
        runs = ((chunk * self._chunk, (chunk + 1) * self._chunk) for chunk in free)
        self._commit(freed=self._freed | Ranges.runs(runs))

    def _is_kept(self, chunk: int) -> bool:
        """Returns whether an iterator over epochs still needs rows of a chunk."""
        begin, end = chunk * self._chunk, (chunk + 1) * self._chunk
        return any(
            begin < kept.rows and not kept.deleted.covers(begin, min(end, kept.rows))
            for kept in self._kept
        )

    def _check_not_empty(self) -> None:
        if not self.live:
            raise ValueError("the store is empty; append to it first")

    def _commit(
        self,
        rows: int | None = None,
        deleted: Ranges | None = None,
        freed: Ranges | None = None,
        listed: Listed | None = None,
    ) -> None:
        """Records the valid rows on disk, and then in this object."""
        rows = self._rows if rows is None else rows
        deleted = self._deleted if deleted is None else deleted
        freed = self._freed if freed is None else freed
        listed = self._listed if listed is None else listed
        records.write(
            self._folder / "rows.json",
            {
                "rows": rows,
                "deleted": deleted.tolist(),
                "freed": freed.tolist(),
                "places": listed._asdict(),
            },
        )
        self._rows, self._deleted, self._freed, self._listed = rows, deleted, freed, listed

    def _unfreed(self) -> Iterator[tuple[int, int]]:
        """Yields the runs of deleted rows whose chunks are not freed."""
        freed = self._freed.tolist()
        for begin, end in self._deleted.tolist():
            for other_begin, other_end in freed:
                if begin < other_end and other_begin < end:
                    if begin < other_begin:
                        yield begin, other_begin
                    begin = other_end
            if begin < end:
                yield begin, end

    def _committed(self) -> tuple[int, Ranges, Ranges, Listed]:
        """Returns the number of rows, which are deleted and freed, and the checksums of chunks.

        Raises:
            ValueError: If they cannot be what was written.
        """
        record = self._record("rows.json")
        rows = record.get("rows")
        runs: list[Any] = [record.get("deleted"), record.get("freed")]
        if type(rows) is not int or not 0 <= rows <= zarr.MOST_ROWS:
            raise self._damage(f"rows.json has the number of rows {str(rows)[:40]}")
        for name, given in zip(("deleted", "freed"), runs, strict=True):
            if not isinstance(given, list) or not all(_is_run(run, rows) for run in given):
                raise self._damage(f"the rows that are {name} in rows.json are not rows of it")
        deleted, freed = (Ranges.runs(given) for given in runs)
        if len(deleted | freed) > len(deleted):
            raise self._damage("rows.json has rows that are freed, but not deleted")
        try:
            listed = self._places.read(record.get("places"), rows // self._chunk)
        except (ValueError, TypeError, KeyError) as error:
            raise self._damage("the checksums in rows.json are not those of its rows") from error
        return rows, deleted, freed, listed

    def _check_files(self) -> None:
        """Checks that there are files for the rows, before the rows are gone through.

        Raises:
            ValueError: If there are not.
        """
        count, freed = -(-self._rows // self._chunk), len(self._freed) // self._chunk
        last = self._places.file(0, max(count - 1, 0))
        # Otherwise at most a few are missing, as errors tell when they are read.
        if count > freed and not last.exists() and count - freed > 2 * self._count_files() + 1:
            raise self._damage(f"there are no files for the {self._rows} rows in rows.json")
        chunk, runs = self._chunk, self._unfreed()
        unfreed = sum(max(end // chunk - -(-begin // chunk), 0) for begin, end in runs)
        if unfreed and unfreed > 2 * self._count_files() + 1:
            raise self._damage("rows.json has more rows that are deleted than there are files for")

    def _count_files(self) -> int:
        return len(zarr.file_sizes(self._leaf(0)))

    def _record(self, name: str) -> dict[str, Any]:
        try:
            record, intact = records.read(self._folder / name)
        except FileNotFoundError as error:
            raise self._damage(f"{name} is missing") from error
        except ValueError as error:
            raise self._damage(f"{name} is no JSON object") from error
        made = record.get("format", _FORMAT)
        if made != _FORMAT:
            raise ValueError(
                f"the store {self._folder} has format {made}; this version of jaxbuf reads format "
                f"{_FORMAT}" + ("; version 0.1.0 reads format 1" if made == 1 else "")
            )
        if not intact:
            raise self._damage(f"{name} is not what was written")
        return record

    def _damage(self, what: str) -> ValueError:
        return ValueError(f"the store {self._folder} is damaged: {what}")

    def _open_or_create(
        self, path: str | os.PathLike[str], chunk: int | None, cache_bytes: int
    ) -> int:
        leaves: dict[str, Any] = {}
        for name, leaf in structure.leaves(self._like, "").items():
            if structure.is_key(leaf.dtype):
                raise ValueError(f"example{name} is a PRNG key; store its jax.random.key_data")
            leaves[name] = {"shape": [*leaf.shape[1:]], "dtype": leaf.dtype}
        cache = zarr.new_cache(check_count("cache_bytes", cache_bytes, 0, MOST_ON_HOST))
        if (self._folder / "store.json").exists():
            return self._open(leaves, cache)
        self._check_new()
        if self._lock is None:
            raise FileNotFoundError(f"there is no store in {path}")
        return self._create(leaves, chunk, cache)

    def _open(self, leaves: dict[str, Any], cache: Any) -> int:
        record = self._record("store.json")
        stored, chunk = record.get("leaves"), record.get("chunk")
        if type(chunk) is not int or chunk < 1 or self._most_bytes(chunk) > _MOST_CHUNK_BYTES:
            raise self._damage(f"store.json has chunks of {str(chunk)[:40]} rows")
        if not isinstance(stored, dict) or not all(isinstance(x, dict) for x in stored.values()):
            raise self._damage("store.json does not say what rows are")
        self._compare(stored, leaves)
        if self._lock is not None:
            self._remove_locks()
        try:
            self._open_arrays(stored, chunk, cache)
        except ValueError as error:
            raise self._damage(str(error)) from error
        return chunk

    def _remove_locks(self) -> None:
        """Removes files that a killed writer left, which were to become chunks.

        tensorstore would overwrite the beginning of such a file and keep the rest.
        """
        for i in range(len(self._names)):
            with contextlib.suppress(FileNotFoundError), os.scandir(self._leaf(i)) as entries:
                for entry in entries:
                    if entry.name.endswith(".__lock") and not entry.is_dir(follow_symlinks=False):
                        os.unlink(entry)

    def _leaf(self, i: int) -> Path:
        return self._folder / "leaves" / str(i)

    def _most_bytes(self, chunk: int) -> int:
        """Returns the size of the largest chunk of a leaf."""
        return max(_chunk_bytes(leaf, chunk) for leaf in jax.tree.leaves(self._like))

    def _create(self, leaves: dict[str, Any], chunk: int | None, cache: Any) -> int:
        if chunk is None:
            row_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(self._like))
            chunk = max(_CHUNK_BYTES // max(row_bytes, 1), 1)
        chunk = check_count("chunk", chunk)
        if self._most_bytes(chunk) > _MOST_CHUNK_BYTES:
            raise ValueError(
                f"chunk is {chunk} rows, which have {self._most_bytes(chunk)} bytes; choose fewer, "
                f"of at most {_MOST_CHUNK_BYTES} bytes"
            )
        for name in ("leaves", "places"):
            shutil.rmtree(self._folder / name, ignore_errors=True)
        self._open_arrays(leaves, chunk, cache, create=True)
        self._commit(0, Ranges.of([]), Ranges.of([]), Listed(0, [], [0] * len(self._names)))
        # Written last, since this file makes the folder a store.
        records.write(
            self._folder / "store.json", {"format": _FORMAT, "chunk": chunk, "leaves": leaves}
        )
        records.sync(self._folder.parent)
        return chunk

    def _open_arrays(
        self, stored: dict[str, Any], chunk: int, cache: Any, *, create: bool = False
    ) -> None:
        # Folders are numbered as the leaves were when the store was created.
        number = {name: i for i, name in enumerate(stored)}
        for name, leaf in zip(self._names, jax.tree.leaves(self._like), strict=True):
            self._folders.append(number[name])
            folder = self._folder / "leaves" / str(number[name])
            try:
                array = zarr.open_rows(folder, leaf, chunk, cache, create=create)
            except ValueError as error:
                where = f"example{name} in {folder}/zarr.json"
                raise ValueError(f"{where}: {zarr.reason(error)}") from error
            self._arrays.append(array)

    def _check_new(self) -> None:
        """Checks that a folder without a store only has files that an interrupted start leaves."""
        more = [
            str(file.relative_to(self._folder))
            for file in self._folder.glob("leaves/**/*")
            if file.is_file() and not file.name.startswith("zarr.json")
        ]
        if (self._folder / "rows.json").exists() and self._record("rows.json")["rows"]:
            more.append("rows.json")
        if more:
            raise self._damage(
                f"there is {more[0]}, but no store.json; if it is not a store, choose another "
                "folder"
            )

    def _compare(self, stored: dict[str, Any], given: dict[str, Any]) -> None:
        parts = [f"example{name} is not in the store" for name in given if name not in stored]
        parts += [f"example{name} is missing" for name in stored if name not in given]
        for name in given if not parts else ():
            parts += [
                f"example{name} has {what} {given[name][what]}, but the store has "
                f"{stored[name].get(what)}"
                for what in ("shape", "dtype")
                if given[name][what] != stored[name].get(what)
            ]
        if parts:
            raise ValueError(f"the store {self._folder} holds something else: {'; '.join(parts)}")

    def _take_lock(self, path: str | os.PathLike[str]) -> Any:
        if self._folder.exists() and not self._folder.is_dir():
            raise ValueError(f"path is {path}, which is a file; choose a folder")
        known = {"store.json", "rows.json", "leaves", "places", "lock"}
        strange = (
            sorted(entry.name for entry in self._folder.iterdir() if entry.name not in known)
            if self._folder.exists() and not (self._folder / "store.json").exists()
            else []
        )
        if [name for name in strange if not name.endswith(".new")]:
            raise ValueError(f"{path} holds other files ({strange[0]}, ...); choose another folder")
        self._folder.mkdir(parents=True, exist_ok=True)
        arrays, places = self._folder / "leaves", self._folder / "places"
        for inner in (places, arrays, *(arrays.iterdir() if arrays.is_dir() else ())):
            if inner.is_symlink():
                raise ValueError(
                    f"{inner} is a link, through which a store does not write; use mode='r', or "
                    "link to the folder of the store itself"
                )
        lock = records.open_file(self._folder / "lock", "a", link=False)
        try:
            # The operating system releases it when the process ends for any reason.
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

    def _check_items(self, items: PyTree[Array]) -> None:
        def stored(path: Any, leaf: Any, like: jax.ShapeDtypeStruct) -> Any:
            """Returns the leaf in the stored dtype, if JAX does not tell the two dtypes apart."""
            try:
                got = jax.typeof(leaf)
            except TypeError as error:
                name = f"items{jax.tree_util.keystr(path)}"
                raise ValueError(f"{name} is a {type(leaf).__name__}; expected an array") from error
            canonical = jax.dtypes.canonicalize_dtype
            same = not structure.is_key(got.dtype) and canonical(got.dtype) == canonical(like.dtype)
            if not (same or numbers.counts_as(leaf, like.dtype)):
                return leaf
            return jax.ShapeDtypeStruct(got.shape, like.dtype)

        if jax.tree.structure(items) == jax.tree.structure(self._like):
            items = jax.tree.map_with_path(stored, items, self._like)
        with jax.enable_x64(True):
            items = jax.tree.map_with_path(
                lambda path, leaf: numbers.abstract(leaf, f"items{jax.tree_util.keystr(path)}"),
                items,
            )
            jax.eval_shape(lambda x: storage.check(self._like, x, "items", ("B",))[0], items)

    def _check_rows(self, rows: Int[np.ndarray, " ..."]) -> None:
        wrong = rows[(rows < 0) | (rows >= self._rows)]
        if wrong.size:
            raise IndexError(f"there is no row {wrong[0]}; the store has {self._rows}")


def _is_run(run: Any, rows: int) -> bool:
    """Returns whether this is a run of some of so many rows."""
    whole = isinstance(run, list) and len(run) == 2 and all(type(x) is int for x in run)
    return whole and 0 <= run[0] < run[1] <= rows


def _chunk_bytes(leaf: Any, chunk: int) -> int:
    return chunk * math.prod(leaf.shape[1:]) * leaf.dtype.itemsize


def _like(example: PyTree) -> PyTree[jax.ShapeDtypeStruct]:
    """Returns shapes ``[1, *shape]`` and dtypes of an item; Python numbers get JAX's dtypes."""
    with jax.enable_x64(True):
        # This checks the example without making arrays.
        jax.eval_shape(lambda: storage.allocate(example, (1,)))

    def batch(leaf: Any) -> jax.ShapeDtypeStruct:
        dtype = leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf)
        return jax.ShapeDtypeStruct((1, *getattr(leaf, "shape", ())), dtype)

    return jax.tree.map(batch, example)

"""A dataset on disk, for more items than memory holds.

Each leaf is a zarr array. ``rows.json`` says how many rows there are, and ``deleted.json`` which of
them are deleted. They are replaced atomically, after rows are written and before the space of
deleted rows is freed, so that an interruption never affects earlier rows. Only the rows
that these two files record are checked, by the checksums of the rows in each chunk. Anything else
in the folder may be left over from a killed writer, or just written by another process.
"""

import atexit
import collections
import concurrent.futures
import contextlib
import dataclasses
import fcntl
import functools
import itertools
import os
import shutil
import stat
import threading
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, NamedTuple, Self, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, PyTree, Shaped

from jaxbuf.buffers import doors
from jaxbuf.buffers.buffer import as_buffer, check_options
from jaxbuf.core import checks, numbers, storage, trees
from jaxbuf.core.sizes import MOST_ON_HOST, MOST_ROWS, check_count
from jaxbuf.core.types import Arrays
from jaxbuf.io import records, structure, zarr
from jaxbuf.io.cache import ChunkCache
from jaxbuf.io.checksums import Checksums, Newest, checksum
from jaxbuf.io.order import padded, steps_in_order
from jaxbuf.io.passes import Passes
from jaxbuf.io.ranges import Ranges
from jaxbuf.io.records import Record
from jaxbuf.io.structure import KeyPath

if TYPE_CHECKING:
    from tensorstore import TensorStore, WriteFutures

Buffer = TypeVar("Buffer", bound=Any)

_FORMAT = 3
_CHUNK_BYTES = 2**16
_MOST_CHUNK_BYTES = 2**31
# Bytes that are read, or written, at a time, whatever the cache can keep.
_READ_BYTES = 2**24

# Indices of rows, as NumPy would accept them for an array of all rows.
Rows: TypeAlias = (
    slice
    | Sequence[int]
    | Int[Array | np.ndarray[Any, Any], " ..."]
    | Bool[Array | np.ndarray[Any, Any], " N"]
)


# Row numbers of a batch, and the chunks that are pinned until it was read.
_PinnedRows: TypeAlias = tuple[Int[np.ndarray, " B"], list[int]]


# Iterators over batches, which are closed before the program ends, while all modules still exist.
_iterators: weakref.WeakSet[Generator[Any]] = weakref.WeakSet()


@atexit.register
def _finish() -> None:
    for batches in [*_iterators]:
        # Another thread may be using it.
        with contextlib.suppress(ValueError):
            batches.close()


class StoreBatch(NamedTuple):
    """Rows of a store.

    Attributes:
        data: The items, leaves ``[B, ...]``, on the device.
        rows: Their row numbers in the store, ``[B]``.
    """

    data: Arrays
    rows: Int[np.ndarray, " B"]


class StoreBatches(Iterator[StoreBatch]):
    """An iterator over batches of a store, which has a length if it ends."""

    def __init__(self, batches: Generator[StoreBatch], count: Callable[[], int | None]) -> None:
        self._batches, self._count = batches, count
        self._length: int | None = None
        self._has_begun = False

    def __next__(self) -> StoreBatch:
        if not self._has_begun:
            self._length, self._has_begun = self._count(), True
        return next(self._batches)

    def __len__(self) -> int:
        """The number of all its batches, whether yielded already or not.

        Raises:
            TypeError: If it never ends.
        """
        length = self._length if self._has_begun else self._count()
        if length is None:
            raise TypeError("these batches never end; give steps or epochs for a length")
        return length

    def close(self) -> None:
        """Ends the iterator, as do its last batch and the end of the program."""
        self._batches.close()


class _Recorded(NamedTuple):
    """The rows that ``rows.json`` records.

    Attributes:
        size: The number of rows.
        newest: The checksums of the newest chunks.
    """

    size: int
    newest: Newest


class _Committed(NamedTuple):
    """The rows that the files of a store record.

    Attributes:
        rows: All of them.
        deleted: The deleted ones.
    """

    rows: _Recorded
    deleted: Ranges


@dataclasses.dataclass(frozen=True, eq=False)
class _EpochRows:
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
    store, whatever the writer does meanwhile. They may still draw rows that the writer has deleted
    since, which raises an error once the space of these rows was freed. Threads may share one
    store.

    A store can be pickled, for example for the workers of a data loader. Each process that gets it
    opens the folder anew with ``mode="r"``, and so with the rows that are there by then. Start
    these processes with ``spawn`` or ``forkserver``, as in
    ``torch.utils.data.DataLoader(..., multiprocessing_context="spawn")``: tensorstore aborts the
    child of a ``fork`` that uses a ``Store`` or ``jaxbuf.load`` if its parent has used one before.

    The store keeps the dtypes of the example, including those of 64 bits, regardless of
    ``jax_enable_x64``. The rows of every chunk have a checksum. A damaged or missing file raises an
    error that names it, at the latest when its rows are read, and is never overwritten.

    Args:
        path: The folder. It is created if needed.
        example: One unbatched item: arrays of NumPy or JAX, or ``jax.ShapeDtypeStruct``. For an
            existing store it must match the example that it was created with.
        mode: ``"a"`` to read and append, ``"r"`` to only read.
        chunk: Number of rows that are compressed and read together: small for random batches,
            large for long ranges. By default they take about 64 KiB before compression, which suits
            random batches. An existing store keeps its own.
        cache_bytes: The most memory for chunks that were read. Rows of these are read again without
            any file, about as fast as from an array.

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
        self._likes: list[jax.ShapeDtypeStruct]
        self._likes, self._treedef = jax.tree.flatten(self._like)
        self._names = [*structure.leaf_types(self._like, "")]
        self._cache_bytes = check_count("cache_bytes", cache_bytes, 0, MOST_ON_HOST)
        self._pins: collections.Counter[int] = collections.Counter()
        self._epochs_in_use: list[_EpochRows] = []
        self._mutex = threading.RLock()
        self._closed = False
        self._lock: IO[str] | None = None
        if mode == "a":
            self._lock = self._take_lock(path)
        try:
            self._arrays: list[TensorStore] = []
            self._folders: list[Path] = []
            self._chunk = self._open_or_create(path, chunk)
            self._checksums = Checksums(self._folder / "checksums", len(self._likes), self._chunk)
            self._cache = ChunkCache(self._likes, self._chunk, self._cache_bytes)
            self._recorded, self._deleted = self._checked()
            self._cache.reserve(self._count(self._rows))
            # Whether an append failed, or was interrupted, since rows.json was written.
            self._unfinished = False
            # Chunks without live rows, whose files may still exist.
            self._empty: set[int] = set()
            if mode == "a":
                self._find_empty(self._chunks_on_disk())
                self._free()
        except BaseException:
            self.close()
            raise

    def __reduce__(self) -> tuple[Any, ...]:
        item = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), self._like)
        reopen = functools.partial(Store, mode="r", cache_bytes=self._cache_bytes)
        return reopen, (self._folder, item)

    @property
    def _rows(self) -> int:
        return self._recorded.size

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
        self, items: Arrays, *, mask: Bool[np.ndarray, " B"] | None = None, start: int | None = None
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
        items = jax.tree.map(trees.native, trees.match(self._like, items))
        self._check_items(items)
        leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(items)]
        if mask is not None:
            mask = np.asarray(
                storage.check_rows(mask, "mask", leaves[0].shape[:1], np.bool_, "(B,)")
            )
            leaves = [leaf[mask] for leaf in leaves]
        leaves = self._converted(leaves)
        count = leaves[0].shape[0]
        with self._mutex:
            self._check_writable()
            first = self._rows if start is None else check_count("start", start, 0, MOST_ON_HOST)
            if first > self._rows:
                raise ValueError(
                    f"start is {start}, but the store has {self._rows} rows; expected from 0 to "
                    "that"
                )
            written = self._rows - first
            if count > written:
                leaves = [leaf[written:] for leaf in leaves]
                self._append(
                    count - written, lambda begin, end: [leaf[begin:end] for leaf in leaves]
                )
            return range(first, first + count)

    def append_buffer(self, buffer: Any) -> range:
        """Appends the contents of a buffer, oldest first, all of them or none.

        Few of them are copied at a time, so that it takes little memory.

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
            OSError: If the items cannot be written. The store remains as it was.
        """
        check_options(buffer, "add", {})
        count, read = steps_in_order(buffer)

        def leaves(begin: int, end: int) -> list[Shaped[np.ndarray, "B ..."]]:
            return self._converted(jax.tree.leaves(trees.match(self._like, read(begin, end))))

        self._check_items(trees.match(self._like, read(0, 0)))
        with self._mutex:
            self._check_writable()
            first = self._rows
            if count:
                self._append(count, leaves)
            return range(first, first + count)

    def read(self, rows: Rows) -> PyTree[np.ndarray]:
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
        with self._mutex:
            self._check_readable(numbers, self._deleted)
            cached = self._cached(numbers)
        if cached is not None:
            return cached
        with self.pin(numbers):
            return self._read(numbers)

    def pin(self, rows: Rows) -> contextlib.AbstractContextManager[None]:
        """Keeps rows on disk while the context lasts, even if they are deleted.

        Args:
            rows: Row numbers, a mask or a slice, as for ``read``.

        Raises:
            IndexError: If there is no such row, or it was deleted before.
            ValueError: If ``rows`` is something else.
        """
        return _Pin(functools.partial(self._pin, self._numbers(rows)), self._unpin)

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
            numbers = self._numbers(rows)
            self._check_rows(numbers)
            live = numbers[~self._deleted.contains(numbers)]
            if live.size:
                self._commit_deleted(self._deleted | Ranges.of(live))
                self._find_empty(np.unique(live // self._chunk))
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
    ) -> StoreBatches:
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

        With ``epochs`` or ``steps``, ``len`` of the iterator is the number of its batches, so that
        ``tqdm(store.batches(...))`` shows how much is left.

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
            ...     number = len(store.batches(4, epochs=2))
            >>> [len(rows) for rows in all_], sorted(np.concatenate(all_)[:10].tolist()), number
            ([4, 4, 4, 4, 4], [0, 1, 2, 3, 4, 5, 6, 7, 8, 9], 5)
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
        batches = self._batches(draws, prefetch, device)
        _iterators.add(batches)

        def count() -> int | None:
            if epochs is None:
                return steps
            remaining = max(-(-self.live * epochs // batch_size) - start, 0)
            return remaining if steps is None else min(remaining, steps)

        return StoreBatches(batches, count)

    def load_into(
        self,
        buffer: Buffer,
        start: int = 0,
        stop: int | None = None,
        *,
        priority: Callable[[Arrays], Array] | None = None,
        score: Callable[[Arrays], Array] | None = None,
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
        interface = as_buffer(buffer)
        if as_buffer(interface.inside()[0]).members:
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
        envs, blocks = interface.num_envs, interface.num_blocks
        size = min(rows_at_a_time, max(len(rows), 1))
        if not envs:
            # All shards take the same number of rows.
            size = -(-size // blocks) * blocks
        filled: Any = buffer
        for begin in range(0, len(rows), size):
            batch = rows[begin : begin + size]
            # Batches of one size need only one program.
            padded = np.pad(batch, (0, size - len(batch)), mode="edge")
            mask: Any = np.arange(size) < len(batch)
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

    def _draws(self, batch_size: int, seed: int, numbers: Iterator[int]) -> Generator[_PinnedRows]:
        """Yields the rows of batches with replacement, pinned."""
        for number in numbers:
            with self._mutex:
                self._check_not_empty()
                random = np.random.default_rng((seed, number))
                rank = random.integers(self.live, size=batch_size)
                rows = np.asarray(self._deleted.without(rank))
                pinned = rows, self._pin(rows)
            yield pinned

    def _epochs(
        self, batch_size: int, seed: int, numbers: Iterator[int], epochs: int
    ) -> Generator[_PinnedRows]:
        """Yields the rows of batches of passes over all rows, pinned."""
        with self._mutex:
            self._check_not_empty()
            epoch = _EpochRows(self._rows, self._deleted)
            self._epochs_in_use.append(epoch)
        try:
            count = epoch.rows - len(epoch.deleted)
            passes = Passes(count, seed)
            for number in numbers:
                start = number * batch_size
                if start >= count * epochs:
                    return
                rank = passes.rows(start, min(start + batch_size, count * epochs))
                rows = np.asarray(epoch.deleted.without(rank))
                with self._mutex:
                    pinned = rows, self._pin(rows, epoch.deleted)
                yield pinned
        finally:
            with self._mutex:
                self._epochs_in_use.remove(epoch)
                if self._lock is not None:
                    self._free()

    def _batches(
        self, draws: Generator[_PinnedRows], prefetch: int, device: Any
    ) -> Generator[StoreBatch]:
        def fetch(rows: Int[np.ndarray, " B"], chunks: list[int]) -> StoreBatch:
            try:
                return StoreBatch(jax.device_put(self._for_jax(self._read(rows)), device), rows)
            finally:
                self._unpin(chunks)

        waiting: collections.deque[tuple[concurrent.futures.Future[StoreBatch], list[int]]]
        waiting = collections.deque()
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
            return np.arange(*rows.indices(self._rows))
        if isinstance(rows, np.ndarray) and rows.dtype.kind in "iu":
            return rows.astype(np.int64)
        is_array = isinstance(rows, int | np.integer | Sequence | np.ndarray | jax.Array)
        is_key = structure.is_key(getattr(rows, "dtype", None))
        if not is_array or is_key or isinstance(rows, str | bytes):
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

    def _converted(self, leaves: list[np.ndarray[Any, Any]]) -> list[np.ndarray[Any, Any]]:
        """Returns rows in the dtypes of the store."""
        return [
            numbers.convert(leaf, f"items{name}", like.dtype)
            for name, leaf, like in zip(self._names, leaves, self._likes, strict=True)
        ]

    def _append(
        self, count: int, read: Callable[[int, int], list[Shaped[np.ndarray, "B ..."]]]
    ) -> None:
        """Writes rows, some chunks at a time, and then commits them.

        Args:
            count: Their number.
            read: Returns the leaves of the rows from one number to before another.
        """
        rows, size = self._rows, self._chunk
        stop = rows + count
        if self._unfinished:
            self._remove_locks()
            # Otherwise rows.json might record rows that are about to be replaced.
            self._commit_rows(self._recorded)
        first, last = rows // size, (stop - 1) // size
        before = jax.tree.leaves(self._read(np.arange(first * size, rows)))
        self._unfinished = True
        words: list[list[int]] = []
        parts: list[Shaped[np.ndarray, "C ..."]] = []
        at_once = max(_READ_BYTES // max(self._chunk_bytes(size), 1), 1)
        for begin in range(first, last + 1, at_once):
            chunks = range(begin, min(begin + at_once, last + 1))
            start = max(begin * size, rows)
            leaves = read(start - rows, min(chunks.stop * size, stop) - rows)
            if start > begin * size:
                leaves = [np.concatenate(pair) for pair in zip(before, leaves, strict=True)]
            # Other bytes than 0 and 1, which NumPy takes for True, could not be read again.
            leaves = [x.view(np.uint8) != 0 if x.dtype == bool else x for x in leaves]
            writes: list[WriteFutures] = []
            for chunk in chunks:
                offset = (chunk - begin) * size
                parts = [leaf[offset : offset + size] for leaf in leaves]
                words.append([0] * len(parts))
                for folder, part in zip(self._folders, parts, strict=True):
                    words[-1][int(folder.name)] = checksum(part)
                # A chunk is written as a whole, so that nothing depends on what its file has now.
                parts = [padded(part, size) for part in parts]
                for array, part in zip(self._arrays, parts, strict=True):
                    if part.size:
                        whole = array[chunk * size : (chunk + 1) * size]
                        writes.append(whole.write(part.view(zarr.disk_dtype(part.dtype))))
            zarr.finish(writes)
        self._cache.reserve(last + 1)
        self._cache.remove(first)
        newest = self._checksums.append(self._recorded.newest, rows, words, stop)
        self._commit_rows(_Recorded(stop, newest))
        self._cache.insert([last], parts)

    def _cached(self, rows: Int[np.ndarray, " ..."]) -> PyTree[np.ndarray] | None:
        """Returns rows if all of them are in memory."""
        positions = self._cache.find(rows)
        if positions.size and positions.min() < 0:
            return None
        return self._treedef.unflatten(self._cache.gather(positions))

    def _read(self, rows: Int[np.ndarray, " ..."]) -> PyTree[np.ndarray]:
        """Returns rows, which must be pinned."""
        flat = rows.reshape(-1)
        leaves = [np.empty((flat.size, *x.shape[1:]), x.dtype) for x in self._likes]
        with self._mutex:
            positions = self._cache.find(flat)
            is_cached = positions >= 0
            for leaf, cached in zip(leaves, self._cache.gather(positions[is_cached]), strict=True):
                leaf[is_cached] = cached
            recorded = self._recorded
        missing = np.flatnonzero(~is_cached)
        missing = missing[np.argsort(flat[missing], kind="stable")]
        needed, starts = np.unique(flat[missing] // self._chunk, return_index=True)
        stops = np.append(starts, len(missing))
        at_once = max(_READ_BYTES // max(self._chunk_bytes(self._chunk), 1), 1)
        for start in range(0, len(needed), at_once):
            chunks = needed[start : start + at_once]
            targets = missing[stops[start] : stops[start + len(chunks)]]
            try:
                loaded = self._load(chunks.tolist(), recorded)
            except ValueError as error:
                if self._lock is None:
                    # The writer may have deleted them since this store was opened.
                    deleted = flat[targets][self._committed().deleted.contains(flat[targets])]
                    if deleted.size:
                        raise IndexError(f"row {deleted[0]} was deleted") from error
                raise
            number, offset = np.divmod(flat[targets], self._chunk)
            positions = np.searchsorted(chunks, number) * self._chunk + offset
            for leaf, part in zip(leaves, loaded, strict=True):
                leaf[targets] = part[positions]
            with self._mutex:
                # Otherwise the last chunk may have been replaced by a longer one.
                if self._recorded is recorded or chunks[-1] < recorded.size // self._chunk:
                    self._cache.insert(chunks.tolist(), loaded)
        leaves = [leaf.reshape((*rows.shape, *leaf.shape[1:])) for leaf in leaves]
        return self._treedef.unflatten(leaves)

    def _load(self, chunks: list[int], recorded: _Recorded) -> list[Shaped[np.ndarray, "N ..."]]:
        """Reads whole chunks from disk, one after the other.

        Args:
            chunks: Their numbers.
            recorded: The rows whose checksums are compared.

        Raises:
            ValueError: If they are damaged.
        """
        size, i = self._chunk, 0
        # Nothing is on disk of a leaf of size 0.
        stored = [i for i, like in enumerate(self._likes) if like.size]
        try:
            words = [self._checksums.of(chunk, recorded.newest, recorded.size) for chunk in chunks]
            for i, chunk in itertools.product(stored, chunks):
                zarr.check_file(self._file(i, chunk), self._leaf_bytes(i, size))
            leaves = [
                np.empty((len(chunks) * size, *like.shape[1:]), like.dtype) for like in self._likes
            ]
            reads = [
                (i, j, self._arrays[i][chunk * size : (chunk + 1) * size].read())
                for i, (j, chunk) in itertools.product(stored, enumerate(chunks))
            ]
            # Most reads have ended when the last one has, so that this thread seldom waits.
            for i, j, read in reversed(reads):
                part = leaves[i][j * size : (j + 1) * size]
                part[...] = np.asarray(read.result()).view(part.dtype)
                word = words[j][int(self._folders[i].name)]
                if word and word != checksum(part[: recorded.size - chunks[j] * size]):
                    name = Path(self._file(i, chunks[j])).name
                    raise ValueError(f"chunk {name} is not the one that was written there")
        except ValueError as error:
            raise self._damage(f"{self._names[i]}: {zarr.reason(error)}") from error
        return leaves

    def _for_jax(self, rows: PyTree[np.ndarray]) -> PyTree[np.ndarray]:
        """Returns rows in the dtypes of JAX arrays, which may be narrower."""
        leaves = [
            numbers.convert(leaf, f"data{name}", jax.dtypes.canonicalize_dtype(leaf.dtype))
            for name, leaf in zip(self._names, jax.tree.leaves(rows), strict=True)
        ]
        return jax.tree.unflatten(jax.tree.structure(rows), leaves)

    def _pin(self, rows: Int[np.ndarray, " ..."], deleted: Ranges | None = None) -> list[int]:
        chunks = np.unique(rows // self._chunk).tolist()
        with self._mutex:
            self._check_readable(rows, self._deleted if deleted is None else deleted)
            self._pins.update(chunks)
        return chunks

    def _unpin(self, chunks: list[int]) -> None:
        with self._mutex:
            for chunk in chunks:
                self._pins[chunk] -= 1
                if not self._pins[chunk]:
                    del self._pins[chunk]
            if self._lock is not None:
                self._free()

    def _find_empty(self, chunks: Int[np.ndarray, " C"]) -> None:
        """Notes which of these chunks have no live rows, so that they can be removed."""
        empty = self._deleted.covers(chunks * self._chunk, (chunks + 1) * self._chunk)
        self._empty.update(chunks[empty].tolist())

    def _free(self) -> None:
        """Removes chunks without live rows from the disk, unless they are pinned."""
        for chunk in sorted(self._empty):
            if not self._pins[chunk] and not self._is_needed(chunk):
                # What cannot be removed now is tried again later.
                with contextlib.suppress(OSError):
                    for i in range(len(self._likes)):
                        Path(self._file(i, chunk)).unlink(missing_ok=True)
                    self._empty.remove(chunk)

    def _is_needed(self, chunk: int) -> bool:
        """Returns whether an iterator over epochs still needs rows of a chunk."""
        begin, end = chunk * self._chunk, (chunk + 1) * self._chunk
        return any(
            begin < epoch.rows and not epoch.deleted.covers(begin, min(end, epoch.rows))
            for epoch in self._epochs_in_use
        )

    def _check_not_empty(self) -> None:
        if not self.live:
            raise ValueError("the store is empty; append to it first")

    def _commit_rows(self, rows: _Recorded) -> None:
        """Records the number of rows on disk, and then in this object."""
        record = {"format": _FORMAT, "rows": rows.size, "checksums": rows.newest._asdict()}
        records.write(self._folder / "rows.json", record)
        self._recorded = rows
        self._unfinished = False

    def _commit_deleted(self, deleted: Ranges) -> None:
        """Records the deleted rows on disk, and then in this object."""
        records.write(self._folder / "deleted.json", {"deleted": deleted.encode()})
        self._deleted = deleted

    def _committed(self) -> _Committed:
        """Returns the rows that the files record.

        Raises:
            ValueError: If the files are damaged.
        """
        deleted = self._record("deleted.json").get("deleted")
        # Read last, since the deleted rows may include rows that were appended in between.
        record = self._record("rows.json")
        rows = record.get("rows")
        if type(rows) is not int or not 0 <= rows <= zarr.MOST_ROWS:
            raise self._damage(f"rows.json has the number of rows {str(rows)[:40]}")
        try:
            runs = Ranges.parse(deleted, rows)
        except ValueError as error:
            raise self._damage(
                "the rows that are deleted in deleted.json are not rows of it"
            ) from error
        try:
            newest = self._checksums.parse(record["checksums"], rows)
        except (ValueError, TypeError, KeyError) as error:
            raise self._damage("the checksums in rows.json are not those of its rows") from error
        return _Committed(_Recorded(rows, newest), runs)

    def _checked(self) -> _Committed:
        """Returns the rows that the files record, if there are about as many chunks.

        Raises:
            ValueError: If there are far fewer.
        """
        committed = self._committed()
        while not self._has_files(committed):
            again = self._committed()
            if (again.rows, len(again.deleted)) == (committed.rows, len(committed.deleted)):
                count = committed.rows.size
                raise self._damage(f"there are no files for the {count} rows in rows.json")
            # A writer has freed space in between.
            committed = again
        return committed

    def _has_files(self, committed: _Committed) -> bool:
        """Returns whether there are files for the live rows, without listing these rows."""
        sizes = [like.size for like in self._likes]
        bounds, size, rows = committed.deleted.bounds, self._chunk, committed.rows.size
        newest = rows - 1
        if len(bounds) and bounds[-1, 1] == rows:
            newest = int(bounds[-1, 0]) - 1
        if not any(sizes) or newest < 0:
            return True
        i = sizes.index(max(sizes))
        if os.path.exists(self._file(i, newest // size)):
            return True
        # A few missing files are tolerated here; reading their rows raises an error.
        freed = np.maximum(bounds[:, 1] // size - -(-bounds[:, 0] // size), 0).sum()
        return self._count(rows) - freed <= 2 * len(zarr.file_sizes(self._folders[i])) + 1

    def _count(self, rows: int) -> int:
        """Returns the number of chunks of ``rows`` rows."""
        return -(-rows // self._chunk)

    def _chunks_on_disk(self) -> Int[np.ndarray, " C"]:
        """Returns the numbers of chunks with a file of any leaf."""
        names = {name for folder in self._folders for name in zarr.file_sizes(folder)}
        digits = {name.partition(".")[0] for name in names}
        most = self._count(self._rows)
        return np.asarray([int(x) for x in digits if x.isdecimal() and int(x) < most], np.int64)

    def _file(self, i: int, chunk: int) -> str:
        """Returns the file of a chunk of leaf ``i``."""
        zeros = ".0" * (len(self._likes[i].shape) - 1)
        return f"{self._folders[i]}/{chunk}{zeros}"

    def _record(self, name: str) -> Record:
        try:
            record, intact = records.read(self._folder / name)
        except FileNotFoundError as error:
            raise self._damage(f"{name} is missing") from error
        except ValueError as error:
            raise self._damage(f"{name} is no JSON object") from error
        version = record.get("format", _FORMAT)
        # A store that version 0.3.0 wrote anew keeps its first description.
        if version != _FORMAT and (version != 2 or name != "store.json"):
            advice = {"1": "; version 0.1.0 reads it", "2": "; opened for writing, 0.3.0 renews it"}
            raise ValueError(
                f"the store {self._folder} has format {version}; this version of jaxbuf reads "
                f"format {_FORMAT}{advice.get(str(version), '')}"
            )
        if not intact:
            raise self._damage(f"{name} is not what was written")
        return record

    def _damage(self, reason: str) -> ValueError:
        return ValueError(f"the store {self._folder} is damaged: {reason}")

    def _open_or_create(self, path: str | os.PathLike[str], chunk: int | None) -> int:
        leaves: Record = {}
        for name, leaf in structure.leaf_types(self._like, "").items():
            if structure.is_key(leaf.dtype):
                raise ValueError(f"example{name} is a PRNG key; store its jax.random.key_data")
            leaves[name] = {"shape": [*leaf.shape[1:]], "dtype": leaf.dtype}
        if (self._folder / "store.json").exists():
            return self._open(leaves)
        self._check_new()
        if self._lock is None:
            raise FileNotFoundError(f"there is no store in {path}")
        return self._create(leaves, chunk)

    def _open(self, leaves: Record) -> int:
        record = self._record("store.json")
        stored, chunk = record.get("leaves"), record.get("chunk")
        if type(chunk) is not int or chunk < 1 or self._most_bytes(chunk) > _MOST_CHUNK_BYTES:
            raise self._damage(f"store.json has chunks of {str(chunk)[:40]} rows")
        if not isinstance(stored, dict) or not all(isinstance(x, dict) for x in stored.values()):
            raise self._damage("store.json does not say what rows are")
        self._compare(stored, leaves)
        try:
            self._open_arrays(stored, chunk)
        except ValueError as error:
            raise self._damage(str(error)) from error
        if self._lock is not None:
            self._remove_locks()
        return chunk

    def _remove_locks(self) -> None:
        """Removes files of chunks that a killed or failed writer has not finished.

        tensorstore would overwrite the beginning of such a file and keep the rest.
        """
        for folder in self._folders:
            with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
                for entry in entries:
                    if entry.name.endswith(".__lock") and not entry.is_dir(follow_symlinks=False):
                        Path(entry).unlink(missing_ok=True)

    def _chunk_bytes(self, chunk: int) -> int:
        """Returns the size of a chunk of all leaves."""
        return sum(self._leaf_bytes(i, chunk) for i in range(len(self._likes)))

    def _leaf_bytes(self, i: int, chunk: int) -> int:
        return chunk * self._likes[i].size * self._likes[i].dtype.itemsize

    def _most_bytes(self, chunk: int) -> int:
        """Returns the size of the largest chunk of a leaf."""
        return max(self._leaf_bytes(i, chunk) for i in range(len(self._likes)))

    def _create(self, leaves: Record, chunk: int | None) -> int:
        if chunk is None:
            chunk = max(_CHUNK_BYTES // max(self._chunk_bytes(1), 1), 1)
        chunk = check_count("chunk", chunk)
        if self._most_bytes(chunk) > _MOST_CHUNK_BYTES:
            raise ValueError(
                f"chunk is {chunk} rows, which have {self._most_bytes(chunk)} bytes; choose fewer, "
                f"of at most {_MOST_CHUNK_BYTES} bytes"
            )
        for name in ("leaves", "checksums"):
            shutil.rmtree(self._folder / name, ignore_errors=True)
        self._open_arrays(leaves, chunk, create=True)
        self._commit_deleted(Ranges.of([]))
        self._commit_rows(_Recorded(0, Newest(0, [])))
        # Written last, since this file makes the folder a store.
        records.write(
            self._folder / "store.json", {"format": _FORMAT, "chunk": chunk, "leaves": leaves}
        )
        records.sync(self._folder.parent)
        return chunk

    def _open_arrays(self, stored: Record, chunk: int, *, create: bool = False) -> None:
        # Folders are numbered as the leaves were when the store was created.
        number = {name: i for i, name in enumerate(stored)}
        cache = zarr.new_cache(0)
        for name, leaf in zip(self._names, self._likes, strict=True):
            folder = self._folder / "leaves" / str(number[name])
            self._folders.append(folder)
            try:
                array = zarr.open_rows(folder, leaf, chunk, cache, create=create)
            except ValueError as error:
                file = f"{folder}/zarr.json"
                raise ValueError(f"example{name} in {file}: {zarr.reason(error)}") from error
            self._arrays.append(array)

    def _check_new(self) -> None:
        """Checks that a folder without a store has no files but those of an interrupted start."""
        others = [
            str(file.relative_to(self._folder))
            for file in self._folder.glob("leaves/**/*")
            if file.is_file() and not file.name.startswith("zarr.json")
        ]
        if (self._folder / "rows.json").exists() and self._record("rows.json")["rows"]:
            others.append("rows.json")
        if others:
            raise self._damage(
                f"there is {others[0]}, but no store.json; if it is not a store, choose another "
                "folder"
            )

    def _compare(self, stored: Record, example: Record) -> None:
        problems = [f"example{name} is not in the store" for name in example if name not in stored]
        problems += [f"example{name} is missing" for name in stored if name not in example]
        for name in example if not problems else ():
            problems += [
                f"example{name} has {attribute} {example[name][attribute]}, but the store has "
                f"{stored[name].get(attribute)}"
                for attribute in ("shape", "dtype")
                if example[name][attribute] != stored[name].get(attribute)
            ]
        if problems:
            raise ValueError(
                f"the store {self._folder} holds something else: {'; '.join(problems)}"
            )

    def _take_lock(self, path: str | os.PathLike[str]) -> IO[str]:
        if records.is_other(self._folder, stat.S_ISDIR):
            raise ValueError(f"path is {path}, which is a file; choose a folder")
        expected = {"store.json", "rows.json", "deleted.json", "leaves", "checksums", "lock"}
        others = (
            sorted(entry.name for entry in self._folder.iterdir() if entry.name not in expected)
            if self._folder.exists() and not (self._folder / "store.json").exists()
            else []
        )
        if [name for name in others if not name.endswith(".new")]:
            raise ValueError(f"{path} holds other files ({others[0]}, ...); choose another folder")
        self._folder.mkdir(parents=True, exist_ok=True)
        lock = records.open_file(self._folder / "lock", "a")
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

    def _check_items(self, items: Arrays) -> None:
        def stored(path: KeyPath, leaf: Any, like: jax.ShapeDtypeStruct) -> Any:
            """Returns the leaf in the stored dtype, if it is the same dtype to JAX."""
            try:
                aval = jax.typeof(leaf)
            except TypeError as error:
                name = f"items{jax.tree_util.keystr(path)}"
                raise ValueError(f"{name} is a {type(leaf).__name__}; expected an array") from error
            canonical, is_key = jax.dtypes.canonicalize_dtype, structure.is_key(aval.dtype)
            same = not is_key and canonical(aval.dtype) == canonical(like.dtype)
            if not (same or numbers.counts_as(leaf, like.dtype)):
                return leaf
            return jax.ShapeDtypeStruct(aval.shape, like.dtype)

        if jax.tree.structure(items) == jax.tree.structure(self._like):
            items = jax.tree.map_with_path(stored, items, self._like)
        with jax.enable_x64(True):
            items = jax.tree.map_with_path(
                lambda path, leaf: numbers.abstract(leaf, f"items{jax.tree_util.keystr(path)}"),
                items,
            )
            jax.eval_shape(lambda x: storage.check(self._like, x, "items", ("B",))[0], items)

    def _check_rows(self, rows: Int[np.ndarray, " ..."]) -> None:
        # As unsigned integers, negative ones are beyond all rows.
        if rows.size and rows.view(np.uint64).max() >= self._rows:
            wrong = rows[(rows < 0) | (rows >= self._rows)]
            raise IndexError(f"there is no row {wrong[0]}; the store has {self._rows}")

    def _check_readable(self, rows: Int[np.ndarray, " ..."], deleted: Ranges) -> None:
        """Checks that rows exist, and that those among ``deleted`` are pinned."""
        self._check_rows(rows)
        if deleted:
            candidates = rows[deleted.contains(rows)]
            lost = [row for row in candidates.tolist() if not self._pins[row // self._chunk]]
            if lost:
                raise IndexError(f"row {lost[0]} was deleted")


class _Pin(contextlib.AbstractContextManager[None]):
    """A context in which rows are pinned. A generator would be closed as the program ends."""

    def __init__(self, pin: Callable[[], list[int]], unpin: Callable[[list[int]], None]) -> None:
        self._pin = pin
        self._unpin = unpin
        self._chunks: list[int] = []

    def __enter__(self) -> None:
        self._chunks = self._pin()

    def __exit__(self, *error: object) -> None:
        self._unpin(self._chunks)


def _like(example: PyTree) -> PyTree[jax.ShapeDtypeStruct]:
    """Returns shapes ``[1, *shape]`` and dtypes of an item; Python numbers get JAX's dtypes."""
    with jax.enable_x64(True):
        # This checks the example without making arrays.
        jax.eval_shape(lambda: storage.allocate(example, (1,)))

    def batch(leaf: Any) -> jax.ShapeDtypeStruct:
        leaf = trees.native(leaf)
        dtype = leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf)
        return jax.ShapeDtypeStruct((1, *getattr(leaf, "shape", ())), dtype)

    return jax.tree.map(batch, example)

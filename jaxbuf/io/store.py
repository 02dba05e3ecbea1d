"""A dataset on disk, for more items than memory holds.

The rows are in files of their own, see ``rows``. ``rows.json`` says how many rows there are, and
``deleted.json`` which of them are deleted. They are replaced atomically, after rows are written and
before the space of deleted rows is freed, so that an interruption never affects earlier rows.
Anything else in the folder may be left over from a killed writer, or just written by another
process.
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
from typing import IO, Any, Literal, NamedTuple, Self, TypeAlias, TypeVar

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
from jaxbuf.io.order import steps_in_order
from jaxbuf.io.passes import Passes
from jaxbuf.io.ranges import Ranges
from jaxbuf.io.records import Record
from jaxbuf.io.rows import RowFiles, damage
from jaxbuf.io.structure import KeyPath

Buffer = TypeVar("Buffer", bound=Any)

_FORMAT = 4
# Bytes of rows in a file by default, and with ``compress``.
_FILE_BYTES, _COMPRESSED_BYTES = 2**24, 2**16
_MOST_FILE_BYTES = 2**31

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
_stores: "weakref.WeakSet[Store]" = weakref.WeakSet()


@atexit.register
def _finish() -> None:
    for batches in [*_iterators]:
        # Another thread may be using it.
        with contextlib.suppress(ValueError):
            batches.close()


def _only_read() -> None:
    """Lets a forked process read: its parent goes on to write, and may hold the mutex just now."""
    for store in _stores:
        store._mutex = threading.RLock()  # pyright: ignore[reportPrivateUsage]
        store._lock = None  # pyright: ignore[reportPrivateUsage]


os.register_at_fork(after_in_child=_only_read)


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
    """Items on disk in the order in which they were appended.

    Unlike a buffer it is not a pytree but a handle on a folder, for the host side of a program.
    Row numbers never change. An append is on disk once it returns; one that was killed has no
    effect, and the reopened store goes on after the last append that returned. One process at a
    time may write. Any number of processes may read the rows that existed when they opened the
    store, whatever the writer does meanwhile. They may still draw rows that the writer has deleted
    since, which raises an error once the space of these rows was freed. Threads may share one
    store.

    A store can be pickled, for example for the workers of a data loader. Each process that gets it
    opens the folder anew with ``mode="r"``, and so with the rows that are there by then. A process
    that was forked may read with the store of its parent, and not write. With ``compress`` start
    processes with ``spawn`` or ``forkserver``, as in
    ``torch.utils.data.DataLoader(..., multiprocessing_context="spawn")``: tensorstore aborts the
    child of a ``fork`` that uses it if its parent has used it before, also by ``jaxbuf.load``.

    The store keeps the dtypes of the example, including those of 64 bits, regardless of
    ``jax_enable_x64``. Each row has a checksum, which includes its number. A damaged or missing
    file raises an error that names it, at the latest when its rows are read, and is never
    overwritten. Bytes behind the newest row are no damage. Files are mapped to memory, so do not
    shorten one by other means while a process has the store open: that ends the process.

    A file ``rows/0.npy`` holds ``chunk`` rows, and ``np.load(file, mmap_mode="r")`` opens it
    without jaxbuf. Its fields are the key paths of the leaves, such as ``"['obs']"``, or ``item``
    if an item is a single array; and ``jaxbuf.checksum``. Dtypes that NumPy's format lacks, such as
    bfloat16, are bytes in it: ``store.json`` names them. ``rows.json`` says how many rows count.

    Args:
        path: The folder. It is created if needed.
        example: One unbatched item: arrays of NumPy or JAX, or ``jax.ShapeDtypeStruct``. For an
            existing store it must match the example that it was created with.
        mode: ``"a"`` to read and append, ``"r"`` to only read.
        chunk: Number of rows in a file, whose space is freed once all of them are deleted. By
            default they take about 16 MiB. With ``compress`` they are read together: about 64 KiB,
            the default, suit random batches, and more suit long ranges. An existing store keeps its
            own.
        compress: Whether files are compressed once they are full. They take less space, and random
            batches take many times as long unless they are in memory. An existing store goes on as
            it was created.
        cache_bytes: The most memory for files that were decompressed. Rows of these are read again
            without any file, about as fast as from an array. Without ``compress`` all rows are
            read through the cache of the operating system.

    Raises:
        ValueError: If the folder holds a store of other items or other files, the store is damaged
            or has another format, another process writes to it, or an argument is illegal. A store
            of an earlier version goes on as ``jaxbuf.convert_store`` copies it.
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
        compress: bool = False,
        cache_bytes: int = 2**26,
    ) -> None:
        checks.check_choice("mode", mode, ("a", "r"))
        self._folder = checks.check_path("path", path).resolve()
        checks.check_flag("compress", compress)
        self._like = like_of(example)
        self._likes = structure.rows_by_name(self._like)
        self._treedef = jax.tree.structure(self._like)
        self._cache_bytes = check_count("cache_bytes", cache_bytes, 0, MOST_ON_HOST)
        self._pins: collections.Counter[int] = collections.Counter()
        self._epochs_in_use: list[_EpochRows] = []
        self._mutex = threading.RLock()
        self._closed = False
        self._lock: IO[str] | None = None
        if mode == "a":
            self._lock = self._take_lock(path)
        try:
            self._chunk, self._files = self._open_or_create(path, chunk, compress)
            self._rows, self._deleted = self._checked()
            self._files.full = self._rows // self._chunk
            # Whether an append failed, or was interrupted, since rows.json was written.
            self._unfinished = False
            # Files without live rows, which may still exist.
            self._empty: set[int] = set()
            if mode == "a":
                self._files.remove_leftovers()
                self._find_empty(self._files.numbers())
                self._free()
            _stores.add(self)
        except BaseException:
            self.close()
            raise

    def __reduce__(self) -> tuple[Any, ...]:
        item = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), self._like)
        reopen = functools.partial(Store, mode="r", cache_bytes=self._cache_bytes)
        return reopen, (self._folder, item)

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
        """The number of rows in a file."""
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
                file to append to is damaged.
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

        They are not pinned: if another thread deletes them meanwhile, this may raise an error.

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
        self._check_readable(numbers, self._deleted)
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

        They are not drawn any more. Their space on disk is freed a file at a time: once all its
        ``chunk`` rows are deleted and none of them is pinned, so that batches that were already
        drawn can be read, and once no other process that has read from the file has it open.

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
            for leaf, (name, like) in zip(leaves, self._likes.items(), strict=True)
        ]

    def _append(
        self, count: int, read: Callable[[int, int], list[Shaped[np.ndarray, "B ..."]]]
    ) -> None:
        """Writes rows, some at a time, and then commits them.

        Args:
            count: Their number.
            read: Returns the leaves of the rows from one number to before another.
        """
        rows, at_once = self._rows, self._files.block
        if self._unfinished:
            self._files.remove_leftovers()
            # Otherwise rows.json might record rows that are about to be replaced.
            self._commit_rows(rows)
        self._unfinished = True
        for start in range(0, count, at_once):
            self._files.write(rows + start, read(start, min(start + at_once, count)))
        self._commit_rows(rows + count)
        self._files.record(rows + count)

    def _read(self, rows: Int[np.ndarray, " ..."]) -> PyTree[np.ndarray]:
        flat = rows.reshape(-1)
        try:
            leaves = self._files.read(flat)
        except ValueError as error:
            # They may have been deleted since.
            deleted = flat[self._committed()[1].contains(flat)]
            if deleted.size:
                raise IndexError(f"row {deleted[0]} was deleted") from error
            raise
        if rows.ndim != 1:
            leaves = [leaf.reshape((*rows.shape, *leaf.shape[1:])) for leaf in leaves]
        return self._treedef.unflatten(leaves)

    def _for_jax(self, rows: PyTree[np.ndarray]) -> PyTree[np.ndarray]:
        """Returns rows in the dtypes of JAX arrays, which may be narrower."""
        leaves = [
            numbers.convert(leaf, f"data{name}", jax.dtypes.canonicalize_dtype(leaf.dtype))
            for name, leaf in zip(self._likes, jax.tree.leaves(rows), strict=True)
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
                    self._files.remove(chunk)
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

    def _commit_rows(self, rows: int) -> None:
        """Records the number of rows on disk, and then in this object."""
        records.write(self._folder / "rows.json", {"rows": rows})
        self._rows, self._unfinished = rows, False

    def _commit_deleted(self, deleted: Ranges) -> None:
        """Records the deleted rows on disk, and then in this object."""
        records.write(self._folder / "deleted.json", {"deleted": deleted.encode()})
        self._deleted = deleted

    def _committed(self) -> tuple[int, Ranges]:
        """Returns the number of rows that the files record, and the deleted ones.

        Raises:
            ValueError: If the files are damaged.
        """
        deleted = read_record(self._folder, "deleted.json").get("deleted")
        # Read last, since the deleted rows may include rows that were appended in between.
        rows = read_record(self._folder, "rows.json").get("rows")
        if type(rows) is not int or not 0 <= rows <= zarr.MOST_ROWS:
            raise damage(self._folder, f"rows.json has the number of rows {str(rows)[:40]}")
        try:
            return rows, Ranges.parse(deleted, rows)
        except ValueError as error:
            raise damage(
                self._folder, "the rows that are deleted in deleted.json are not rows of it"
            ) from error

    def _checked(self) -> tuple[int, Ranges]:
        """Returns what the files record, if there are about as many files of rows.

        Raises:
            ValueError: If there are far fewer.
        """
        # Read first, since a writer may append and free space meanwhile.
        before, _ = self._committed()
        files = len(self._files.numbers())
        rows, deleted = self._committed()
        size, bounds = self._chunk, deleted.bounds
        freed = np.maximum(bounds[:, 1] // size - -(-bounds[:, 0] // size), 0).sum()
        # A few missing files are tolerated here; reading their rows raises an error.
        if -(-before // size) - freed > 2 * files + 1:
            raise damage(self._folder, f"there are no files for the {before} rows in rows.json")
        return rows, deleted

    def _open_or_create(
        self, path: str | os.PathLike[str], chunk: int | None, compress: bool
    ) -> tuple[int, RowFiles]:
        if (self._folder / "store.json").exists():
            return self._open()
        self._check_new()
        if self._lock is None:
            raise FileNotFoundError(f"there is no store in {path}")
        return self._create(chunk, compress)

    def _open(self) -> tuple[int, RowFiles]:
        record = read_record(self._folder, "store.json")
        stored, chunk, compress = (record.get(name) for name in ("leaves", "chunk", "compress"))
        if type(chunk) is not int or chunk < 1 or self._row_bytes * chunk > _MOST_FILE_BYTES:
            raise damage(self._folder, f"store.json has files of {str(chunk)[:40]} rows")
        if type(compress) is not bool:
            raise damage(self._folder, "store.json does not say whether rows are compressed")
        structure.check_rows(stored, self._likes, f"the store {self._folder}")
        options = (self._likes, chunk, compress, self._cache_bytes)
        return chunk, RowFiles(self._folder, *options, order=stored)

    def _create(self, chunk: int | None, compress: bool) -> tuple[int, RowFiles]:
        if chunk is None:
            nbytes = _COMPRESSED_BYTES if compress else _FILE_BYTES
            chunk = max(nbytes // max(self._row_bytes, 1), 1)
        chunk = check_count("chunk", chunk)
        if self._row_bytes * chunk > _MOST_FILE_BYTES:
            raise ValueError(
                f"chunk is {chunk} rows, which have {self._row_bytes * chunk} bytes; choose fewer, "
                f"of at most {_MOST_FILE_BYTES} bytes"
            )
        shutil.rmtree(self._folder / "rows", ignore_errors=True)
        options = (self._likes, chunk, compress, self._cache_bytes)
        files = RowFiles(self._folder, *options, create=True)
        self._commit_deleted(Ranges.of([]))
        self._commit_rows(0)
        # Written last, since this file makes the folder a store.
        leaves = structure.describe_rows(self._likes)
        record = {"format": _FORMAT, "chunk": chunk, "compress": compress, "leaves": leaves}
        records.write(self._folder / "store.json", record)
        records.sync(self._folder.parent)
        return chunk, files

    @property
    def _row_bytes(self) -> int:
        return sum(like.size * like.dtype.itemsize for like in self._likes.values())

    def _check_new(self) -> None:
        """Checks that a folder without a store has no files but those of an interrupted start."""
        names = (file.name for file in self._folder.glob("rows/*"))
        others = [f"rows/{name}" for name in names if not name.startswith("zarr.json")]
        if (self._folder / "rows.json").exists() and read_record(self._folder, "rows.json")["rows"]:
            others.append("rows.json")
        if others:
            raise damage(
                self._folder,
                f"there is {others[0]}, but no store.json; if it is not a store, choose another "
                "folder",
            )

    def _take_lock(self, path: str | os.PathLike[str]) -> IO[str]:
        if records.is_other(self._folder, stat.S_ISDIR):
            raise ValueError(f"path is {path}, which is a file; choose a folder")
        expected = {"store.json", "rows.json", "deleted.json", "rows", "lock"}
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

        if trees.alike(items, self._like):
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


def read_record(folder: Path, name: str, formats: tuple[int, ...] = (_FORMAT,)) -> Record:
    """Reads a JSON file of a store.

    Raises:
        ValueError: If it is missing or damaged, or the store has another format.
    """
    try:
        record, intact = records.read(folder / name)
    except FileNotFoundError as error:
        raise damage(folder, f"{name} is missing") from error
    except ValueError as error:
        raise damage(folder, f"{name} is no JSON object") from error
    version = record.get("format", formats[0])
    if version not in formats:
        raise ValueError(
            f"the store {folder} has format {version}; this version of jaxbuf reads format "
            f"{_FORMAT}, and jaxbuf.convert_store copies format 3, which 0.3.0 makes of format 2"
        )
    if not intact:
        raise damage(folder, f"{name} is not what was written")
    return record


def like_of(example: PyTree) -> PyTree[jax.ShapeDtypeStruct]:
    """Returns shapes ``[1, *shape]`` and dtypes of an item; Python numbers get JAX's dtypes."""
    with jax.enable_x64(True):
        # This checks the example without making arrays.
        jax.eval_shape(lambda: storage.allocate(example, (1,)))

    def batch(leaf: Any) -> jax.ShapeDtypeStruct:
        leaf = trees.native(leaf)
        dtype = leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf)
        return jax.ShapeDtypeStruct((1, *getattr(leaf, "shape", ())), dtype)

    return jax.tree.map(batch, example)

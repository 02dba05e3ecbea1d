"""Rows of a store in files of the same number of rows, each row with a checksum.

A file is a ``.npy`` of a structured dtype: a field for each leaf, named by its key path, and
``jaxbuf.checksum``. The checksum includes the row's number, so that a row that is damaged, or is in
another place, is noticed wherever it is read, while rows can be written behind others without
touching them. Each file has its full length from the first row on, and is not written through a
mapping, so that a full disk is an error and never a signal. If rows are compressed, those of a full
file become a chunk of a zarr array before they are recorded, and the file is removed afterwards.
"""

import itertools
import os
import struct
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import jax
import numpy as np
from jaxtyping import Int, Shaped, UInt8, UInt64

from jaxbuf.io import records, zarr

if TYPE_CHECKING:
    from tensorstore import TensorStore

# Bytes that are copied at a time.
_BLOCK_BYTES = 2**24
# So many rows that lie close together are read without a mapping, whose pages would count as memory
# of the process.
_RUN_BYTES = 2**16
# Files that are mapped at a time: each of them keeps a descriptor.
_MOST_MAPS = 256
_CHECKSUM = "jaxbuf.checksum"
_CHECKSUM_BYTES = 8
_ODD = np.uint64(0x9E3779B97F4A7C15)


def damage(folder: Path, reason: str) -> ValueError:
    """Returns the error for a damaged store."""
    return ValueError(f"the store {folder} is damaged: {reason}")


class RowFiles:
    """Files of rows.

    Args:
        store: The folder of the store, which has a folder of these files.
        likes: A batch of rows of each leaf, ``[1, *shape]``, by the leaf's key path.
        chunk: The number of rows in a file.
        compress: Whether full files are compressed.
        cache_bytes: The most memory for files that were decompressed.
        create: Whether they are new.
        order: The key paths in the order of the leaves in the files, if that is another one.

    Raises:
        ValueError: If the description of compressed files is missing or damaged.

    Attributes:
        block: The number of rows that are copied at a time.
        full: The number of files that are full as far as rows are recorded.
    """

    def __init__(
        self,
        store: Path,
        likes: dict[str, jax.ShapeDtypeStruct],
        chunk: int,
        compress: bool,
        cache_bytes: int,
        *,
        create: bool = False,
        order: Iterable[str] | None = None,
    ) -> None:
        self._store, self._folder = store, store / "rows"
        self._likes, self._chunk = [*likes.values()], chunk
        self._names = [name or "item" for name in likes]
        fields = _fields({name: likes[name] for name in order or likes})
        self._row = np.lib.format.descr_to_dtype(fields)
        self._width = self._row.itemsize
        self._header = _header(fields, chunk)
        # NumPy keeps the stream of raw words.
        words = (self._width - _CHECKSUM_BYTES) // 4
        self._weights = np.random.PCG64(0).random_raw(words) | np.uint64(1)
        self.block, self.full = max(_BLOCK_BYTES // self._width, 1), 0
        self._maps: dict[int, UInt8[np.ndarray, "N W"]] = {}
        self._array: TensorStore | None = None
        self._cache: _Cache | None = None
        if create:
            self._folder.mkdir()
        if compress:
            like = jax.ShapeDtypeStruct((1, chunk, self._width), np.uint8)
            cache = zarr.new_cache(0)
            try:
                self._array = zarr.open_rows(self._folder, like, 1, cache, create=create)
            except ValueError as error:
                raise damage(store, f"rows/zarr.json: {zarr.reason(error)}") from error
            self._cache = _Cache(self._likes, chunk, cache_bytes // (chunk * self._width))

    def write(self, first: int, leaves: list[Shaped[np.ndarray, "B ..."]]) -> None:
        """Writes rows from number ``first`` on, in place of what may be there.

        Raises:
            OSError: If that fails.
            ValueError: If the file to append to is missing or damaged.
        """
        block = np.zeros((len(leaves[0]), self._width), np.uint8)
        for leaf, field in zip(leaves, self._views(block), strict=True):
            # Other bytes than 0 and 1, which NumPy takes for True, could not be read again.
            field[...] = leaf.view(np.uint8) != 0 if leaf.dtype == bool else leaf
        stop = first + len(block)
        sums = self._checksums(block, np.arange(first, stop))
        block[:, -_CHECKSUM_BYTES:].view("<u8")[:, 0] = sums
        whole = stop // self._chunk * self._chunk
        if self._array is not None and whole > first:
            number, begin = divmod(first, self._chunk)
            before = [self._of_files(np.arange(first - begin, first))] if begin else []
            data = np.concatenate([*before, block[: whole - first]])
            chunks = data.reshape(-1, self._chunk, self._width)
            zarr.finish([self._array[number : number + len(chunks)].write(chunks)])
            block, first = block[whole - first :], whole
        numbers = range(first // self._chunk, -(-stop // self._chunk))
        for number in numbers:
            start = number * self._chunk
            part = block[max(start - first, 0) : start + self._chunk - first]
            self._write_file(number, max(first - start, 0), part)
        for number in numbers:
            records.sync(self._file(number))
        if numbers and numbers[-1] * self._chunk >= first:
            records.sync(self._folder)

    def read(self, rows: Int[np.ndarray, " B"]) -> list[Shaped[np.ndarray, "B ..."]]:
        """Returns the leaves of rows.

        Raises:
            ValueError: If rows are missing or damaged.
        """
        if self._cache is None:
            leaves = [np.empty((len(rows), *x.shape[1:]), x.dtype) for x in self._likes]
            self._fill(leaves, rows, None)
            return leaves
        leaves, order = self._cache.find(rows)
        if not len(order):
            return leaves
        order = order[np.argsort(rows[order], kind="stable")]
        size, missing = self._chunk, rows[order]
        count = int(np.searchsorted(missing, self.full * size))
        numbers = np.unique(missing[:count] // size)
        at_once = max(_BLOCK_BYTES // (size * self._width), 1)
        for begin in range(0, len(numbers), at_once):
            some = numbers[begin : begin + at_once]
            every = (some[:, None] * size + np.arange(size)).reshape(-1)
            found = self._views(self._checked(self._decoded(some), every))
            at = slice(*np.searchsorted(missing, [every[0], every[-1] + 1]))
            index = np.searchsorted(some, missing[at] // size) * size + missing[at] % size
            for leaf, new in zip(leaves, found, strict=True):
                leaf[order[at]] = new[index]
            self._cache.keep(some, found)
        self._fill(leaves, rows, order[count:])
        return leaves

    def record(self, rows: int) -> None:
        """Notes that so many rows are recorded, and removes files that are compressed by now."""
        before, self.full = self.full, rows // self._chunk
        for number in range(before, self.full) if self._array is not None else ():
            self.remove(number, ("npy",))

    def remove(self, number: int, kinds: tuple[str, ...] = ("npy", "0.0")) -> None:
        """Removes a file."""
        for kind in kinds:
            (self._folder / f"{number}.{kind}").unlink(missing_ok=True)
        self._maps.pop(number, None)

    def remove_leftovers(self) -> None:
        """Removes what a killed writer has not finished, or not removed."""
        for file in [*self._folder.iterdir()] if self._array is not None else ():
            name, _, kind = file.name.partition(".")
            # tensorstore would overwrite the beginning of an unfinished file and keep the rest.
            if kind.endswith("__lock") or (
                kind == "npy" and name.isdecimal() and int(name) < self.full
            ):
                file.unlink()

    def numbers(self) -> Int[np.ndarray, " C"]:
        """Returns the numbers of all files."""
        digits = {name.partition(".")[0] for name in os.listdir(self._folder)}
        return np.asarray([int(x) for x in digits if x.isdecimal() and len(x) < 19], np.int64)

    def _file(self, number: int) -> Path:
        return self._folder / f"{number}.npy"

    def _views(self, block: UInt8[np.ndarray, "B W"]) -> list[Shaped[np.ndarray, "B ..."]]:
        """Returns the leaves of rows, given their bytes, without copying them."""
        rows = block.view(self._row)[:, 0]
        return [rows[name].view(x.dtype) for name, x in zip(self._names, self._likes, strict=True)]

    def _fill(
        self,
        leaves: list[Shaped[np.ndarray, "B ..."]],
        rows: Int[np.ndarray, " B"],
        order: Int[np.ndarray, " R"] | None,
    ) -> None:
        """Reads rows that are not compressed, all or some of them in this order, into leaves."""
        numbers = rows // self._chunk
        if order is None and (numbers[1:] < numbers[:-1]).any():
            order = np.argsort(numbers, kind="stable")
        for begin in range(0, len(rows if order is None else order), self.block):
            part = slice(begin, begin + self.block)
            at = part if order is None else order[part]
            for leaf, new in zip(leaves, self._views(self._of_files(rows[at])), strict=True):
                leaf[at] = new

    def _checksums(
        self, block: UInt8[np.ndarray, "B W"], rows: Int[np.ndarray, " B"]
    ) -> UInt64[np.ndarray, " B"]:
        """Returns sums of products with odd numbers, modulo 2**64, which any flipped bit changes.

        Of many small rows they take a tenth of the time of CRC-32.
        """
        words = block[:, :-_CHECKSUM_BYTES].view("<u4")
        numbers = rows.astype(np.uint64) + np.uint64(1)
        return np.einsum("ij,j->i", words, self._weights) + numbers * _ODD

    def _checked(
        self, block: UInt8[np.ndarray, "B W"], rows: Int[np.ndarray, " B"]
    ) -> UInt8[np.ndarray, "B W"]:
        """Returns the bytes of rows, if they are as they were written."""
        wrong = self._checksums(block, rows) != block[:, -_CHECKSUM_BYTES:].view("<u8")[:, 0]
        if wrong.any():
            row = int(rows[wrong][0])
            number = row // self._chunk
            compressed = self._array is not None and number < self.full
            name = f"{number}.0.0" if compressed else f"{number}.npy"
            raise damage(self._store, f"row {row} in rows/{name} is not the one that was written")
        return block

    def _decoded(self, numbers: Int[np.ndarray, " C"]) -> UInt8[np.ndarray, "C*N W"]:
        """Returns the bytes of all rows of compressed files."""
        assert self._array is not None
        try:
            for number in numbers.tolist():
                zarr.check_file(f"{self._folder}/{number}.0.0", self._chunk * self._width)
            return self._array[numbers].read().result().reshape(-1, self._width)
        except ValueError as error:
            raise damage(self._store, zarr.reason(error)) from error

    def _of_files(self, rows: Int[np.ndarray, " B"]) -> UInt8[np.ndarray, "B W"]:
        """Returns the bytes of rows that are not compressed, those of a file one after another."""
        block = np.empty((len(rows), self._width), np.uint8)
        numbers, places = np.divmod(rows, self._chunk)
        begins = (np.flatnonzero(numbers[1:] != numbers[:-1]) + 1).tolist()
        for begin, end in itertools.pairwise([0, *begins, len(rows)]):
            self._read_file(int(numbers[begin]), places[begin:end], block[begin:end])
        return self._checked(block, rows)

    def _read_file(
        self, number: int, places: Int[np.ndarray, " B"], out: UInt8[np.ndarray, "B W"]
    ) -> None:
        """Reads rows of one file."""
        try:
            if out.nbytes >= _RUN_BYTES:
                first, span = int(places.min()), int(np.ptp(places)) + 1
                if span <= 2 * len(out):
                    is_run = bool((np.diff(places) == 1).all())
                    run = out if is_run else np.empty((span, self._width), np.uint8)
                    with self._open(number) as stream:
                        at = len(self._header) + first * self._width
                        os.preadv(stream.fileno(), [run.data], at)
                    if not is_run:
                        run.take(places - first, axis=0, out=out, mode="clip")
                    return
            self._map(number).take(places, axis=0, out=out, mode="clip")
        except FileNotFoundError as error:
            if self._array is None:
                raise damage(self._store, f"rows/{number}.npy is missing") from error
            # A writer has compressed it since.
            self._decoded(np.asarray([number])).take(places, axis=0, out=out, mode="clip")

    def _map(self, number: int) -> UInt8[np.ndarray, "N W"]:
        rows = self._maps.get(number)
        if rows is None:
            shape = (self._chunk, self._width)
            with self._open(number) as stream:
                rows = np.asarray(np.memmap(stream, np.uint8, "r", len(self._header), shape))
            if len(self._maps) >= _MOST_MAPS:
                for old in [*self._maps][: _MOST_MAPS // 2]:
                    self._maps.pop(old, None)
            self._maps[number] = rows
        return rows

    def _open(self, number: int, mode: str = "rb") -> IO[bytes]:
        """Opens a file that has a recorded row.

        Raises:
            FileNotFoundError: If it does not exist.
            ValueError: If its length or its header is another one.
        """
        stream = records.open_file(self._file(number), mode)
        expected = len(self._header) + self._chunk * self._width
        nbytes = os.fstat(stream.fileno()).st_size
        if nbytes != expected or stream.read(len(self._header)) != self._header:
            stream.close()
            raise damage(
                self._store,
                f"rows/{number}.npy has {nbytes} bytes where {expected} were written, or another "
                "header",
            )
        return stream

    def _write_file(self, number: int, begin: int, block: UInt8[np.ndarray, "B W"]) -> None:
        """Writes rows from place ``begin`` of a file on, which is new if that is 0."""
        file, at = self._file(number), len(self._header) + begin * self._width
        if not begin:
            # What a killed writer has left may be a link.
            file.unlink(missing_ok=True)
            with file.open("xb") as stream:
                os.ftruncate(stream.fileno(), at + self._chunk * self._width)
                _write(stream, memoryview(self._header), 0)
        try:
            with self._open(number, "r+b") as stream:
                _write(stream, block.data.cast("B"), at)
        except FileNotFoundError as error:
            raise damage(self._store, f"rows/{file.name} is missing") from error


class _Cache:
    """Rows of decompressed files in memory, those of each file in the place of its number modulo C.

    Args:
        likes: A batch of rows of each leaf, ``[1, *shape]``.
        chunk: The number of rows in a file.
        most: The largest number of files C.
    """

    def __init__(self, likes: list[jax.ShapeDtypeStruct], chunk: int, most: int) -> None:
        self._chunk, self._most, self._mutex = chunk, most, threading.Lock()
        self._numbers = np.full(max(most, 1), -1)
        # Memory that is not written yet takes no space.
        size = len(self._numbers) * chunk
        self._leaves = [np.empty((size, *x.shape[1:]), x.dtype) for x in likes]

    def find(
        self, rows: Int[np.ndarray, " B"]
    ) -> tuple[list[Shaped[np.ndarray, "B ..."]], Int[np.ndarray, " M"]]:
        """Returns the leaves of rows, and the places of the rows that are not in memory."""
        numbers = rows // self._chunk
        places = numbers % len(self._numbers)
        with self._mutex:
            is_kept = self._numbers.take(places) == numbers
            index = np.where(is_kept, rows + (places - numbers) * self._chunk, 0)
            leaves = [leaf.take(index, axis=0) for leaf in self._leaves]
        return leaves, np.flatnonzero(~is_kept)

    def keep(
        self, numbers: Int[np.ndarray, " F"], leaves: list[Shaped[np.ndarray, "F*N ..."]]
    ) -> None:
        """Keeps the rows of files."""
        places = numbers % self._most if self._most else numbers[:0]
        index = (places[:, None] * self._chunk + np.arange(self._chunk)).reshape(-1)
        with self._mutex:
            # In this order, in case it is interrupted.
            self._numbers[places] = -1
            for kept, leaf in zip(self._leaves, leaves, strict=True):
                kept[index] = leaf[: len(index)]
            self._numbers[places] = numbers[: len(places)]


def _fields(likes: dict[str, jax.ShapeDtypeStruct]) -> list[tuple[Any, ...]]:
    """Returns the fields of a row as NumPy's format describes them."""
    fields: list[tuple[Any, ...]] = []
    for name, like in likes.items():
        # NumPy's format lacks dtypes such as bfloat16, which are bytes in it.
        known = like.dtype.isbuiltin != 2
        dtype = like.dtype.str if known else f"|V{like.dtype.itemsize}"
        fields.append((name or "item", dtype, like.shape[1:]))
    gap = -sum(like.size * like.dtype.itemsize for like in likes.values()) % _CHECKSUM_BYTES
    return [*fields, *([("", f"|V{gap}")] if gap else []), (_CHECKSUM, "<u8")]


def _header(fields: list[tuple[Any, ...]], chunk: int) -> bytes:
    """Returns the header of a file in version 3.0 of NumPy's format, which takes any names."""
    text = str({"descr": fields, "fortran_order": False, "shape": (chunk,)}).encode()
    begin = np.lib.format.magic(3, 0)
    text += b" " * (-(len(begin) + 4 + len(text) + 1) % np.lib.format.ARRAY_ALIGN) + b"\n"
    return begin + struct.pack("<I", len(text)) + text


def _write(stream: IO[bytes], data: memoryview, at: int) -> None:
    while data:
        written = os.pwrite(stream.fileno(), data, at)
        data, at = data[written:], at + written

"""Stores of version 0.3.0, which had a zarr array for each leaf, and checksums of its chunks."""

import functools
import os
import tempfile
import zlib
from pathlib import Path

import jax
import numpy as np
from jaxtyping import PyTree, Shaped

from jaxbuf.core import checks
from jaxbuf.io import records, structure, zarr
from jaxbuf.io.ranges import Ranges
from jaxbuf.io.rows import RowFiles, damage
from jaxbuf.io.store import Store, like_of, read_record

# Dtypes of one byte that tensorstore does not know.
_AS_BYTES = ("uint2", "uint4", "float8_e4m3")
# The checksums of so many chunks were in one file once all of these were full.
_SEGMENT = 128


def convert_store(
    old: str | os.PathLike[str],
    new: str | os.PathLike[str],
    example: PyTree,
    *,
    compress: bool = False,
) -> None:
    """Copies a ``Store`` that version 0.3.0 wrote to a new folder, with the same row numbers.

    Args:
        old: Its folder, which is only read. No process may write to it meanwhile.
        new: A folder that does not exist. It appears with all rows, once they are on disk.
        example: One unbatched item, as for ``Store``.
        compress: Whether the new store is compressed, as the old one was.

    Raises:
        ValueError: If ``new`` exists, or ``old`` is no such store, is damaged or has other items.

    Example:
        ``jaxbuf.convert_store("expert", "expert_4", example)``, and then
        ``jaxbuf.Store("expert_4", example)``.
    """
    path, target = checks.check_path("old", old), checks.check_path("new", new).absolute()
    if os.path.lexists(target):
        raise ValueError(f"new is {new}, which exists; choose another folder")
    source = _Old(path, structure.rows_by_name(like_of(example)))
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{target.name}.", dir=target.parent) as folder:
        made = Path(folder) / "store"
        with Store(made, example, compress=compress) as store:
            size = store.chunk
        files = RowFiles(made, source.likes, size, compress, 0)
        for start in range(0, source.rows, size):
            stop = min(start + size, source.rows)
            # A file whose rows are all deleted is gone.
            if stop - start < size or not source.deleted.covers(start, stop):
                files.write(start, source.read(start, stop))
        records.write(made / "deleted.json", {"deleted": source.deleted.encode()})
        records.write(made / "rows.json", {"rows": source.rows})
        made.rename(target)
        records.sync(target.parent)


class _Old:
    """A store of format 3."""

    def __init__(self, folder: Path, likes: dict[str, jax.ShapeDtypeStruct]) -> None:
        self._folder, self.likes = folder, likes
        # Version 0.3.0 kept the description of a store whose other files it made of format 2.
        store = read_record(folder, "store.json", (3, 2))
        record = read_record(folder, "rows.json", (3,))
        structure.check_rows(store["leaves"], likes, f"the store {folder}")
        self.rows, self._chunk, self._newest = record["rows"], store["chunk"], record["checksums"]
        deleted = read_record(folder, "deleted.json", (3,))["deleted"]
        self.deleted = Ranges.parse(deleted, self.rows)
        # The folders of leaves have the numbers that leaves had when the store was created.
        self._numbers = [[*store["leaves"]].index(name) for name in likes]
        self._arrays = [
            zarr.open_rows(
                folder / "leaves" / str(number), _on_disk(like), self._chunk, zarr.new_cache(0)
            )
            for number, like in zip(self._numbers, likes.values(), strict=True)
        ]
        self._read_chunk = functools.lru_cache(1)(self._read_chunk)
        self._segment = functools.lru_cache(1)(self._segment)

    def read(self, start: int, stop: int) -> list[Shaped[np.ndarray, "B ..."]]:
        """Returns the leaves of some rows; zeros for chunks whose rows are all deleted."""
        first = start // self._chunk
        chunks = [self._read_chunk(chunk) for chunk in range(first, -(-stop // self._chunk))]
        some = slice(start - first * self._chunk, stop - first * self._chunk)
        return [np.concatenate(parts)[some] for parts in zip(*chunks, strict=True)]

    def _read_chunk(self, chunk: int) -> list[Shaped[np.ndarray, "C ..."]]:
        start, stop = chunk * self._chunk, min((chunk + 1) * self._chunk, self.rows)
        parts = [np.zeros((stop - start, *x.shape[1:]), x.dtype) for x in self.likes.values()]
        if self.deleted.covers(start, stop):
            return parts
        words = self._words(chunk)
        for part, array, number in zip(parts, self._arrays, self._numbers, strict=True):
            try:
                if part.size:
                    part[...] = np.asarray(array[start:stop].read().result()).view(part.dtype)
            except ValueError as error:
                raise damage(self._folder, zarr.reason(error)) from error
            # A checksum that version 0.2.0 did not keep is 0.
            if words[number] not in (0, zlib.crc32(part.reshape(-1).view(np.uint8).data)):
                name = f"leaves/{number}/{chunk}"
                raise damage(self._folder, f"{name} is not the one that was written there")
        return parts

    def _words(self, chunk: int) -> list[int]:
        """Returns the checksums of a chunk, one for each leaf; 0 for an unknown one."""
        first = self.rows // self._chunk // _SEGMENT * _SEGMENT
        if chunk >= first:
            return self._newest["words"][chunk - first]
        if chunk // _SEGMENT < self._newest["begin"]:
            return [0] * len(self.likes)
        return self._segment(chunk // _SEGMENT)[chunk % _SEGMENT]

    def _segment(self, number: int) -> list[list[int]]:
        return read_record(self._folder, f"checksums/{number}.json", (3,))["checksums"]


def _on_disk(like: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    dtype = np.dtype(np.uint8) if str(like.dtype) in _AS_BYTES else like.dtype
    return jax.ShapeDtypeStruct(like.shape, dtype)

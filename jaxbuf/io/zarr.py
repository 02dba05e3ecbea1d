"""Arrays on disk that grow by rows, with a checksum for each chunk, stored by tensorstore."""

import contextlib
import itertools
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jaxbuf.io import records

if TYPE_CHECKING:
    from tensorstore import Context, TensorStore, WriteFutures

# More rows than will ever be appended, so that an array needs no new shape when it grows.
MOST_ROWS = 2**40
_CHECKSUM_BYTES = 4
# No byte of a file of zstd becomes more bytes than this.
_MOST_PER_BYTE = 2**15


def new_cache(size: int, threads: int | None = None) -> "Context":
    """Returns a cache of at most ``size`` bytes for chunks, which arrays may share.

    Args:
        size: The size in bytes.
        threads: The number of threads that read or decode chunks at a time, each of which keeps
            some memory; None for as many as tensorstore takes.
    """
    import tensorstore as ts

    spec: dict[str, Any] = {"cache_pool": {"total_bytes_limit": size}}
    if threads is not None:
        limit = {"limit": threads}
        spec |= {"data_copy_concurrency": limit, "file_io_concurrency": limit}
    return ts.Context(spec)


def open_rows(
    folder: Path, like: jax.ShapeDtypeStruct, chunk: int, cache: "Context", *, create: bool = False
) -> "TensorStore":
    """Opens or creates an array that grows by rows like those of ``like``, ``[B, *shape]``.

    Raises:
        ValueError: As ``open_array`` does.
    """
    shape = like.shape[1:]
    chunks = [chunk, *(max(size, 1) for size in shape)]
    shape = (MOST_ROWS, *shape)
    return open_array(
        folder, like.dtype, shape, chunks, cache=cache, may_exist=not create, create=create
    )


def open_array(
    folder: Path,
    dtype: np.dtype[Any],
    shape: tuple[int, ...],
    chunk: list[int],
    *,
    cache: "Context",
    may_exist: bool = True,
    create: bool = False,
) -> "TensorStore":
    """Opens an array if it ``may_exist``, or creates it.

    A read of a missing or damaged chunk raises a ``ValueError``.

    Raises:
        ValueError: If the array does not exist or differs from these arguments, or if it is to be
            created and tensorstore does not support the dtype.
    """
    import tensorstore as ts

    if may_exist:
        # tensorstore ends the process if it is nested deeply, and waits for ever if it is a pipe.
        with contextlib.suppress(FileNotFoundError):
            records.read(folder / "zarr.json")
    spec = {
        "driver": "zarr3",
        "kvstore": {"driver": "file", "path": f"{folder}/"},
        # Another process may have appended since a chunk was read.
        "recheck_cached_data": "open",
        # A missing chunk is an error, so chunks of zeros must be written too.
        "fill_missing_data_reads": False,
        "store_data_equal_to_fill_value": True,
        # Complete, so that it is compared with the metadata on disk.
        "metadata": {
            "data_type": str(dtype),
            "shape": [*shape],
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk}},
            "chunk_key_encoding": {"name": "v2", "configuration": {"separator": "."}},
            "codecs": [
                {"name": "bytes", "configuration": {"endian": "little"}},
                {"name": "zstd", "configuration": {"level": 3}},
                {"name": "crc32c"},
            ],
        },
    }
    return ts.open(spec, context=cache, open=may_exist, create=create).result()


def file_sizes(folder: Path) -> dict[str, int]:
    """Returns the size of each file in a folder, by name; none if there is no such folder."""
    sizes: dict[str, int] = {}
    with (
        contextlib.suppress(FileNotFoundError, NotADirectoryError),
        os.scandir(folder) as entries,
    ):
        for entry in entries:
            # A writer may remove it meanwhile.
            with contextlib.suppress(FileNotFoundError):
                if entry.is_file():
                    sizes[entry.name] = entry.stat().st_size
    return sizes


def check_sizes(
    folder: Path, shape: Sequence[int], chunk: Sequence[int], index: tuple[slice, ...] | None = None
) -> None:
    """Checks that files can hold the bytes at an index of an array, before memory is allocated.

    Raises:
        ValueError: If a chunk is missing or far too small.
    """
    sizes, nbytes = file_sizes(folder), math.prod(chunk)
    # First, since a damaged shape could have any number of chunks.
    count = math.prod(map(len, _chunks(shape, chunk, index)))
    if count > len(sizes):
        raise ValueError(f"there are fewer files in {folder} than the {count} chunks of the array")
    for name in grid(shape, chunk, index):
        if name not in sizes:
            raise ValueError(f"chunk {name} is missing in {folder}")
        if nbytes > sizes[name] * _MOST_PER_BYTE:
            raise ValueError(
                f"chunk {name} in {folder} has {sizes[name]} bytes, too few for {nbytes}"
            )


def grid(
    shape: Sequence[int], chunk: Sequence[int], index: tuple[slice, ...] | None = None
) -> Iterator[str]:
    """Yields the names of the chunks of an array, or of those at an index."""
    return map(name_of, positions(shape, chunk, index))


def name_of(position: Sequence[int]) -> str:
    """Returns the name of the chunk with these numbers along each axis."""
    return ".".join(map(str, position))


def positions(
    shape: Sequence[int], chunk: Sequence[int], index: tuple[slice, ...] | None = None
) -> Iterator[tuple[int, ...]]:
    """Yields the numbers along each axis of the chunks of an array, or of those at an index."""
    return itertools.product(*_chunks(shape, chunk, index))


def _chunks(
    shape: Sequence[int], chunk: Sequence[int], index: tuple[slice, ...] | None
) -> list[range]:
    """Returns the numbers of the chunks along each axis."""
    parts = index or [slice(None)] * len(shape)
    spans = [part.indices(size)[:2] for part, size in zip(parts, shape, strict=True)]
    return [range(a // step, -(-b // step)) for (a, b), step in zip(spans, chunk, strict=True)]


def checksum(file: Path) -> int:
    """Returns the checksum of a chunk, which its codec keeps in the last four bytes of its file.

    Raises:
        OSError: If it is no regular file, or cannot be read.
        ValueError: If it is too small.
    """
    with records.open_file(file, "rb") as stream:
        size = stream.seek(0, os.SEEK_END)
        if size < _CHECKSUM_BYTES:
            raise ValueError(f"{file} has {size} bytes, too few for a checksum")
        stream.seek(size - _CHECKSUM_BYTES)
        return int.from_bytes(stream.read(_CHECKSUM_BYTES), "little")


def check_file(file: str, nbytes: int) -> None:
    """Checks that a file can hold a chunk, before memory is allocated for it.

    If the file is missing, this raises no error, but the read of the chunk does.

    Raises:
        ValueError: If it is far too small.
    """
    with contextlib.suppress(OSError):
        size = os.stat(file).st_size
        if nbytes > size * _MOST_PER_BYTE:
            raise ValueError(f"{file} has {size} bytes, too few for {nbytes}")


def finish(writes: list["WriteFutures"]) -> None:
    """Waits for all writes, and only then raises the first error.

    Raises:
        OSError: If a write failed; tensorstore's errors have another type.
    """
    try:
        errors = [error for error in [write.exception() for write in writes] if error]
    except BaseException:
        # Interrupted, but these writes must end before the next ones begin.
        for write in writes:
            write.exception()
        raise
    if errors:
        raise OSError(reason(errors[0])) from errors[0]


def reason(error: Exception) -> str:
    """Returns the message of a tensorstore error without its list of settings."""
    return str(error).split(" [")[0]

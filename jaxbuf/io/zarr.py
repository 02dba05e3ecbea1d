"""Arrays on disk that grow by rows, with a checksum for each chunk, stored by tensorstore."""

from pathlib import Path
from typing import Any

import jax

# More rows than will ever be appended, so that an array needs no new shape when it grows.
_MOST_ROWS = 2**40


def new_cache(size: int) -> Any:
    """Returns a cache of at most ``size`` bytes for chunks, which arrays may share."""
    import tensorstore as ts

    return ts.Context({"cache_pool": {"total_bytes_limit": size}})


def open_rows(
    folder: Path, like: jax.ShapeDtypeStruct, chunk: int, cache: Any, *, create: bool = False
) -> Any:
    """Opens or creates an array that grows by rows.

    Args:
        folder: Its folder.
        like: A batch of rows, ``[B, *shape]``.
        chunk: Number of rows in a chunk.
        cache: The cache for chunks.
        create: Whether to create it.

    Raises:
        ValueError: As ``open_array`` does.
    """
    shape = like.shape[1:]
    chunks = [chunk, *(max(size, 1) for size in shape)]
    shape = (_MOST_ROWS, *shape)
    return open_array(
        folder, like.dtype, shape, chunks, cache=cache, known=not create, create=create
    )


def open_array(
    folder: Path,
    dtype: Any,
    shape: tuple[int, ...],
    chunk: list[int],
    *,
    cache: Any,
    known: bool = True,
    create: bool = False,
) -> Any:
    """Opens or creates an array.

    Args:
        folder: Its folder.
        dtype: Its dtype.
        shape: Its shape.
        chunk: The shape of a chunk.
        cache: The cache for chunks.
        known: Whether it may exist already.
        create: Whether it may be created.

    Returns:
        The tensorstore array. A read of a missing or damaged chunk raises a ``ValueError``.

    Raises:
        ValueError: If the array does not exist or differs from these arguments, or if it is to be
            created and tensorstore does not support the dtype.
    """
    import tensorstore as ts

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
    return ts.open(spec, context=cache, open=known, create=create).result()


def finish(futures: list[Any]) -> None:
    """Waits for all futures, and only then raises the first error."""
    errors = [error for error in [future.exception() for future in futures] if error]
    if errors:
        raise errors[0]


def reason(error: Exception) -> str:
    """Returns the message of a tensorstore error without its list of settings."""
    return str(error).split(" [")[0]

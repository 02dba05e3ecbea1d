"""Arrays on disk that grow by rows, each chunk with a checksum, through tensorstore."""

from pathlib import Path
from typing import Any

import jax

# More than will ever be appended: an array needs no new shape when rows come.
_MOST_ROWS = 2**40


def new_cache(size: int) -> Any:
    """Memory for chunks that were read, of at most ``size`` bytes, which arrays may share."""
    import tensorstore as ts

    return ts.Context({"cache_pool": {"total_bytes_limit": size}})


def open_rows(
    folder: Path, like: jax.ShapeDtypeStruct, chunk: int, cache: Any, *, create: bool = False
) -> Any:
    """Open or create an array that grows by rows.

    Args:
        folder: Where it lies.
        like: A batch of rows, ``[B, *shape]``.
        chunk: Rows in a chunk.
        cache: Where to keep chunks that were read.
        create: Whether it is a new one.

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
    """Open or create an array.

    Args:
        folder: Where it lies.
        dtype: Its dtype.
        shape: Its shape.
        chunk: The shape of a chunk.
        cache: Where to keep chunks that were read.
        known: Whether it may be there already.
        create: Whether it may be a new one.

    Returns:
        The tensorstore array. To read a chunk that is missing or damaged is a ``ValueError``.

    Raises:
        ValueError: If there is none, or one with anything different about it; or, if it is to be
            created, tensorstore does not know the dtype.
    """
    import tensorstore as ts

    spec = {
        "driver": "zarr3",
        "kvstore": {"driver": "file", "path": f"{folder}/"},
        # Another process may have appended since a chunk was read.
        "recheck_cached_data": "open",
        # A chunk that is missing is an error, and one of zeros is not left out.
        "fill_missing_data_reads": False,
        "store_data_equal_to_fill_value": True,
        # All of it, so that what is on disk is compared with it.
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
    """Wait until nothing is on its way any more, and only then say what failed."""
    errors = [error for error in [future.exception() for future in futures] if error]
    if errors:
        raise errors[0]


def reason(error: Exception) -> str:
    """What tensorstore says of an error, without its list of settings."""
    return str(error).split(" [")[0]

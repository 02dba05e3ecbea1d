"""Small JSON files that are replaced in one step and carry a checksum.

A folder of checkpoints or of a store holds regular files below a size, and links to them; anything
else is refused where it is opened.
"""

import errno
import json
import os
import stat
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, TypeAlias

# A JSON object.
Record: TypeAlias = dict[str, Any]

# More bytes than a description of any pytree has, whose file is read as a whole.
_MOST_BYTES = 2**28


def write(file: Path, record: Record) -> None:
    """Replaces a file, and returns once it is on disk."""
    new = file.with_suffix(".new")
    with open_file(new, "w") as stream:
        # json.dump would encode it in Python, which takes ten times as long.
        stream.write(json.dumps({**record, "crc32": _checksum(record)}))
        stream.flush()
        os.fsync(stream.fileno())
    new.replace(file)
    sync(file.parent)


def read(file: Path) -> tuple[Record, bool]:
    """Reads a file.

    Returns:
        The record, and whether its checksum matches.

    Raises:
        FileNotFoundError: If the file does not exist.
        ValueError: If it does not hold a JSON object, or is too large.
        OSError: If it is no regular file, or cannot be opened.
    """
    with open_file(file, "rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        if size > _MOST_BYTES:
            raise ValueError(f"{file} has {size} bytes, which are too many")
        data = stream.read(size)
    try:
        record = json.loads(data)
        if not isinstance(record, dict):
            raise ValueError(f"{file} holds no JSON object")
        written = record.pop("crc32", None)
        return record, written == _checksum(record)
    except RecursionError as error:
        raise ValueError(f"{file} is nested too deeply") from error


def open_file(file: Path, mode: str) -> IO[Any]:
    """Opens a regular file, or a new one: anything else in its place may block, as a pipe does.

    Raises:
        OSError: If it is something else, or cannot be opened.
    """
    if is_other(file, stat.S_ISREG):
        raise OSError(errno.EINVAL, "is no regular file", str(file))
    return file.open(mode)


def is_other(path: Path, kind: Callable[[int], bool]) -> bool:
    """Returns whether there is something at a path that is not of a kind, such as ``S_ISREG``.

    It looks once, since what is there may be removed at any time.
    """
    try:
        return not kind(path.stat().st_mode)
    except OSError:
        return False


def sync(path: Path) -> None:
    """Flushes a file, or the names of a folder's entries, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems cannot do this for folders.
        if error.errno != errno.EINVAL or not path.is_dir():
            raise
    finally:
        os.close(descriptor)


def _checksum(record: Record) -> int:
    return zlib.crc32(json.dumps(record, sort_keys=True).encode())

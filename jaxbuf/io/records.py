"""Small JSON files that are replaced in one step and carry a checksum."""

import errno
import json
import os
import zlib
from pathlib import Path
from typing import Any


def write(file: Path, record: dict[str, Any]) -> None:
    """Replaces a file, and returns once it is on disk."""
    new = file.with_suffix(".new")
    with new.open("w") as stream:
        json.dump({**record, "crc32": _checksum(record)}, stream)
        stream.flush()
        os.fsync(stream.fileno())
    new.replace(file)
    sync(file.parent)


def read(file: Path) -> tuple[dict[str, Any], bool]:
    """Reads a file.

    Returns:
        The record, and whether its checksum matches.

    Raises:
        FileNotFoundError: If the file does not exist.
        ValueError: If it does not hold a JSON object.
    """
    record = json.loads(file.read_bytes())
    if not isinstance(record, dict):
        raise ValueError(f"{file} holds no JSON object")
    written = record.pop("crc32", None)
    return record, written == _checksum(record)


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


def _checksum(record: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(record, sort_keys=True).encode())

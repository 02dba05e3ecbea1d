"""Small JSON files that are replaced in one step and carry a checksum."""

import errno
import json
import os
import stat
import zlib
from pathlib import Path
from typing import IO, Any

# More bytes than a description of any pytree has, whose file is read as a whole.
_MOST_BYTES = 2**28


def write(file: Path, record: dict[str, Any]) -> None:
    """Replaces a file, and returns once it is on disk."""
    new = file.with_suffix(".new")
    # What is left there may be a link to another file.
    new.unlink(missing_ok=True)
    with new.open("x") as stream:
        # json.dump would encode it in Python, which takes ten times as long.
        stream.write(json.dumps({**record, "crc32": _checksum(record)}))
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
        ValueError: If it does not hold a JSON object, or is no file of moderate size.
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


def open_file(file: Path, mode: str, *, link: bool = True) -> IO[Any]:
    """Opens a file, but nothing else that may have its name, such as a pipe, which would wait.

    Args:
        file: The file.
        mode: As in ``open``.
        link: Whether it may be reached by a link.

    Raises:
        OSError: If it is something else, or cannot be opened.
    """
    more = os.O_NONBLOCK | (0 if link else os.O_NOFOLLOW)
    try:
        stream = open(file, mode, opener=lambda path, flags: os.open(path, flags | more, 0o666))  # noqa: SIM115
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(
                errno.ELOOP, "is a link, which is not followed; remove it", str(file)
            ) from error
        raise
    if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
        stream.close()
        raise OSError(errno.EINVAL, "is no file", str(file))
    return stream


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

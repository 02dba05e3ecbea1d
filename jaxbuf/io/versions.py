"""A folder of numbered versions, of which the newest counts.

A version appears whole or not at all, and the one before goes once it is safely on disk.
"""

import contextlib
import errno
import fcntl
import re
import shutil
from collections.abc import Callable, Generator
from pathlib import Path

from jaxbuf.io import records

_LOCK = "jaxbuf.lock"
# Until format 2 a name had no prefix. A date looks the same, so that only the manifest tells.
_NAME = re.compile(r"(jaxbuf-)?(\d{8,})")
# What is being written or removed.
_UNFINISHED = re.compile(r"jaxbuf-\d{8,}\.(new|old)")
_MANIFESTS = ("manifest.json", "manifest/metadata")
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP)


def find(folder: Path) -> list[Path]:
    """The versions in a folder, oldest first."""
    found: list[tuple[int, Path]] = []
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for entry in folder.iterdir():
            name = _NAME.fullmatch(entry.name)
            if name and (name[1] or _has_manifest(entry)):
                found.append((int(name[2]), entry))
    return [entry for _, entry in sorted(found)]


def replace(folder: Path, write: Callable[[Path], None]) -> None:
    """Add a version and remove those before it.

    Args:
        folder: It is made if needed. What carries no manifest of ours is left alone.
        write: Called with a new, empty folder to write the version to, ``manifest.json`` and all.
    """
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        records.sync(path.parent)
    with locked(folder):
        for entry in folder.iterdir():
            if _UNFINISHED.fullmatch(entry.name):
                shutil.rmtree(entry, ignore_errors=True)
        previous = find(folder)
        new = unfinished(folder, 1 + number(previous[-1]) if previous else 0)
        new.mkdir()
        write(new)
        for path in [*new.rglob("*"), new]:
            records.sync(path)
        new.rename(new.with_suffix(""))
        records.sync(folder)
        for entry in previous:
            if _has_manifest(entry) and not entry.is_symlink():
                # Renamed first: what is removed in part is not taken for a version. If that is
                # not permitted, the newest counts all the same.
                old = folder / f"jaxbuf-{number(entry):08d}.old"
                with contextlib.suppress(OSError):
                    shutil.rmtree(entry.rename(old))


@contextlib.contextmanager
def locked(folder: Path, *, shared: bool = False) -> Generator[None]:
    """Wait until nobody else writes to a folder; with ``shared``, others may read meanwhile.

    The lock is gone with the process, however it ends. Where there is no lock to read under (a
    copy, another file system) and where the file system has none, this does nothing.
    """
    try:
        lock = (folder / _LOCK).open("rb" if shared else "ab")
    except OSError:
        if not shared:
            raise
        yield
        return
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
        try:
            yield
        finally:
            # Closing is not enough where a process was forked meanwhile.
            with contextlib.suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_UN)


def number(version: Path) -> int:
    """The number of a version."""
    return int(version.name.removeprefix("jaxbuf-").partition(".")[0])


def unfinished(folder: Path, number: int) -> Path:
    """Where the version of a number is while it is being written."""
    return folder / f"jaxbuf-{number:08d}.new"


def _has_manifest(entry: Path) -> bool:
    """Whether a folder carries a manifest of ours, be it damaged."""
    for name in _MANIFESTS:
        with contextlib.suppress(OSError), (entry / name).open("rb") as file:
            return file.read(10) == b'{"format":'
    return False

"""A folder of numbered versions; the newest is the current one.

A version appears complete or not at all. The previous one is removed once the new one is on disk.
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
_NAME = re.compile(r"jaxbuf-\d{8,}")
# Names of versions that are being written or removed.
_UNFINISHED = re.compile(r"jaxbuf-\d{8,}\.(new|old)")
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP)


def find(folder: Path) -> list[Path]:
    """Returns the versions in a folder, oldest first."""
    try:
        versions = [entry for entry in folder.iterdir() if _NAME.fullmatch(entry.name)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(versions, key=number)


def replace(folder: Path, write: Callable[[Path], None]) -> None:
    """Adds a version and removes earlier ones.

    Args:
        folder: The folder, which is created if needed. Entries without a manifest of jaxbuf are
            left alone.
        write: Called with a new, empty folder to which it writes the version, including
            ``manifest.json``. If it fails, what it has written is removed.
    """
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        records.sync(path.parent)
    with locked(folder):
        for entry in folder.iterdir():
            if _UNFINISHED.fullmatch(entry.name):
                if entry.is_symlink():
                    entry.unlink()
                shutil.rmtree(entry, ignore_errors=True)
        previous = find(folder)
        new = unfinished(folder, 1 + number(previous[-1]) if previous else 0)
        new.mkdir()
        try:
            write(new)
            for path in [*new.rglob("*"), new]:
                records.sync(path)
            new.rename(new.with_suffix(""))
        except BaseException:
            # It takes space, and a full disk may have been the reason.
            shutil.rmtree(new, ignore_errors=True)
            raise
        records.sync(folder)
        for entry in previous:
            if (entry / "manifest.json").exists() and not entry.is_symlink():
                # Renamed first, so that a partly removed version is not taken for a complete one.
                # If that is not permitted, the newest version is still the current one.
                old = folder / f"jaxbuf-{number(entry):08d}.old"
                with contextlib.suppress(OSError):
                    shutil.rmtree(entry.rename(old))


@contextlib.contextmanager
def locked(folder: Path, *, shared: bool = False) -> Generator[None]:
    """Waits for the lock of a folder, which several readers can hold at a time if ``shared``.

    The operating system releases the lock when the process ends for any reason. There is no lock if
    the file system does not support it, or for readers of a folder without a lock file, such as a
    copy.
    """
    try:
        lock = records.open_file(folder / _LOCK, "rb" if shared else "ab")
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
            # Closing is not enough if the process was forked in the meantime.
            with contextlib.suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_UN)


def number(version: Path) -> int:
    """Returns the number of a version."""
    return int(version.name.removeprefix("jaxbuf-").partition(".")[0])


def unfinished(folder: Path, number: int) -> Path:
    """Returns the path of a version while it is being written."""
    return folder / f"jaxbuf-{number:08d}.new"

"""A list of the chunks of a store, by which it notices if two have changed places.

A chunk on disk carries a checksum of its contents, which does not tell where the chunk belongs. So
the store also lists the checksums by the numbers of chunks: the newest ones beside the number of
rows, and the others in files of ``_SEGMENT`` chunks each.
"""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import UInt

from jaxbuf.io import records, zarr

_SEGMENT = 128
_MOST = 2**32


def chunk_name(chunk: int, ndim: int) -> str:
    """Returns the name of a chunk of rows of an array with ``ndim`` axes."""
    return ".".join([str(chunk)] + ["0"] * (ndim - 1))


class Listed(NamedTuple):
    """The checksums that are kept beside the number of rows. 0 is not known.

    Attributes:
        begin: The first file of checksums; version 0.2.0 wrote the chunks before it.
        recent: The checksums of the complete chunks after the last file, one for each leaf.
        tail: Those of the last chunk, if it is incomplete.
    """

    begin: int
    recent: list[list[int]]
    tail: list[int]


class Places:
    """The checksums of the chunks of all leaves of a store.

    A chunk is complete once all of its rows are written, and never changes afterwards. Only the
    last chunk may be incomplete, and a writer that was killed may have replaced it.

    Args:
        folder: The folder of the store.
        numbers: The number of each leaf's own folder, by which its checksums are listed.
        ndims: The number of axes of each leaf's array.
        nbytes: The size of a chunk of each leaf.
    """

    def __init__(
        self, folder: Path, numbers: list[int], ndims: list[int], nbytes: list[int]
    ) -> None:
        self._folder = folder
        self._numbers = numbers
        self._ndims = ndims
        self._nbytes = nbytes
        self._seen: list[set[int]] = [set() for _ in ndims]
        self._segments: dict[int, UInt[np.ndarray, "C K"]] = {}

    def file(self, leaf: int, chunk: int) -> Path:
        """Returns the file of a chunk."""
        folder = self._folder / "leaves" / str(self._numbers[leaf])
        return folder / chunk_name(chunk, self._ndims[leaf])

    def read(self, record: Any, complete: int) -> Listed:
        """Returns what is listed beside the number of rows.

        Args:
            record: What was written there; None if version 0.2.0 wrote it.
            complete: The number of complete chunks.

        Raises:
            ValueError: If it cannot be what was written.
        """
        leaves = len(self._ndims)
        segment, count = divmod(complete, _SEGMENT)
        if record is None:
            return Listed(segment + (count > 0), [[0] * leaves] * count, [0] * leaves)
        listed = Listed(record["begin"], record["recent"], record["tail"])
        rows = [*listed.recent, listed.tail]
        if (
            type(listed.begin) is not int
            or len(listed.recent) != count
            or not all(len(row) == leaves for row in rows)
            or not all(type(word) is int and 0 <= word < _MOST for row in rows for word in row)
        ):
            raise ValueError("its checksums are not those of its rows")
        return listed

    def note(self, listed: Listed, before: int, complete: int, last: int) -> Listed:
        """Returns the list after chunks were written, and writes files for what became too long.

        Args:
            listed: The list before.
            before: The number of complete chunks before.
            complete: The number of complete chunks.
            last: The number of chunks, one more if the last one is incomplete.
        """
        leaves = sorted(range(len(self._ndims)), key=self._numbers.__getitem__)

        def words(chunk: int) -> list[int]:
            return [zarr.checksum(self.file(leaf, chunk)) for leaf in leaves]

        segment, begin = before // _SEGMENT, listed.begin
        recent = [*listed.recent, *(words(chunk) for chunk in range(before, complete))]
        while len(recent) >= _SEGMENT:
            file = self._segment_file(segment)
            file.parent.mkdir(exist_ok=True)
            records.write(file, {"checksums": recent[:_SEGMENT]})
            begin = min(begin, segment)
            recent, segment = recent[_SEGMENT:], segment + 1
        return Listed(begin, recent, words(complete) if last > complete else [0 for _ in leaves])

    def check(self, leaf: int, chunks: list[int], complete: int, listed: Listed) -> None:
        """Checks that files of chunks are large enough, and the ones that were written there.

        It says nothing of missing chunks; the read of one raises an error.

        Args:
            leaf: The number of the leaf.
            chunks: The numbers of the chunks. Each is looked at once, unless it is incomplete.
            complete: The number of complete chunks.
            listed: What is listed.

        Raises:
            ValueError: If one is not.
        """
        seen = self._seen[leaf]
        for chunk in chunks:
            if chunk in seen:
                continue
            file = self.file(leaf, chunk)
            try:
                found = zarr.checksum(file, self._nbytes[leaf])
            except FileNotFoundError:
                continue
            if chunk < complete:
                wrong = self._word(leaf, chunk, complete, listed) not in (0, found)
                seen.add(chunk)
            else:
                # It may have been replaced, but not by another one.
                wrong = found != listed.tail[self._numbers[leaf]] and any(
                    self._word(leaf, other, complete, listed) == found for other in range(complete)
                )
            if wrong:
                seen.discard(chunk)
                raise ValueError(f"chunk {file.name} is not the one that was written there")

    def _word(self, leaf: int, chunk: int, complete: int, listed: Listed) -> int:
        """Returns the checksum of a complete chunk; 0 if it is not known."""
        (segment, place), leaf = divmod(chunk, _SEGMENT), self._numbers[leaf]
        if segment == complete // _SEGMENT:
            return listed.recent[place][leaf]
        if segment < listed.begin:
            return 0
        if segment not in self._segments:
            self._segments[segment] = self._read_segment(segment)
        return int(self._segments[segment][place, leaf])

    def _read_segment(self, segment: int) -> UInt[np.ndarray, "C K"]:
        file = self._segment_file(segment)
        try:
            record, intact = records.read(file)
            words = np.asarray(record["checksums"], np.uint32)
        except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
            raise ValueError(f"places/{file.name} cannot be read") from error
        if not intact or words.shape != (_SEGMENT, len(self._ndims)):
            raise ValueError(f"places/{file.name} is not what was written")
        return words

    def _segment_file(self, segment: int) -> Path:
        return self._folder / "places" / f"{segment}.json"

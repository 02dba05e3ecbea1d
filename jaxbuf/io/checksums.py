"""Checksums of the rows of a store, by chunk and leaf.

A checksum is computed from the rows that were appended to a chunk, not from its file. Each append
replaces the last chunk by a longer one, even if the append fails later or is killed, but keeps the
earlier rows of the chunk. So each process checks exactly the rows that it knows of. The newest
checksums are stored beside the number of rows, and the others in files of ``_SEGMENT`` chunks.
"""

import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Shaped, UInt

from jaxbuf.io import records

_SEGMENT = 128
_MOST = 2**32


def checksum(rows: Shaped[np.ndarray, "B ..."]) -> int:
    """Returns the checksum of the bytes of rows."""
    return zlib.crc32(np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data)


class Newest(NamedTuple):
    """The checksums that are beside the number of rows. An unknown checksum is 0.

    Attributes:
        begin: The number of the first file of checksums; those of earlier chunks are unknown.
        words: The checksums of the chunks after the last file, one for each leaf.
    """

    begin: int
    words: list[list[int]]


class Checksums:
    """The checksums of all chunks of a store.

    Args:
        folder: The folder of their files.
        leaves: The number of leaves.
        chunk: The number of rows in a chunk.
    """

    def __init__(self, folder: Path, leaves: int, chunk: int) -> None:
        self._folder = folder
        self._leaves = leaves
        self._chunk = chunk
        self._segments: dict[int, UInt[np.ndarray, "C K"]] = {}

    def parse(self, record: records.Record, rows: int) -> Newest:
        """Returns the checksums in the JSON object that is beside the number of rows.

        Raises:
            ValueError: If the checksums are not those of ``rows`` rows; also KeyError and
                TypeError.
        """
        newest = Newest(record["begin"], record["words"])
        if (
            type(newest.begin) is not int
            or len(newest.words) != -(-rows // self._chunk) - self._first(rows)
            or not all(len(row) == self._leaves for row in newest.words)
            or not all(type(x) is int and 0 <= x < _MOST for row in newest.words for x in row)
        ):
            raise ValueError("its checksums are not those of its rows")
        return newest

    def append(self, newest: Newest, rows: int, words: list[list[int]], stop: int) -> Newest:
        """Returns the newest checksums after an append, and writes files for older ones.

        Args:
            newest: The checksums before.
            rows: The number of rows before.
            words: The checksums of the chunks that were written, one for each leaf.
            stop: The number of rows afterwards.
        """
        start, begin = self._first(rows), newest.begin
        words = [*newest.words[: rows // self._chunk - start], *words]
        for chunk in range(start, self._first(stop), _SEGMENT):
            self._folder.mkdir(exist_ok=True)
            records.write(self._file(chunk), {"checksums": words[:_SEGMENT]})
            begin = min(begin, chunk // _SEGMENT)
            words = words[_SEGMENT:]
        return Newest(begin, words)

    def of(self, chunk: int, newest: Newest, rows: int) -> list[int]:
        """Returns the checksums of a chunk, one for each leaf; 0 for an unknown one.

        Raises:
            ValueError: If the file with these checksums is damaged.
        """
        first, segment = self._first(rows), chunk // _SEGMENT
        if chunk >= first:
            return newest.words[chunk - first]
        if segment < newest.begin:
            return [0] * self._leaves
        if segment not in self._segments:
            self._segments[segment] = self._read(chunk)
        return self._segments[segment][chunk % _SEGMENT].tolist()

    def _first(self, rows: int) -> int:
        """Returns the first chunk whose checksums are beside the number of rows."""
        return rows // self._chunk // _SEGMENT * _SEGMENT

    def _read(self, chunk: int) -> UInt[np.ndarray, "C K"]:
        file = self._file(chunk)
        try:
            record, intact = records.read(file)
            words = np.asarray(record["checksums"], np.uint32)
        except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
            raise ValueError(f"checksums/{file.name} cannot be read") from error
        if not intact or words.shape != (_SEGMENT, self._leaves):
            raise ValueError(f"checksums/{file.name} is not what was written")
        return words

    def _file(self, chunk: int) -> Path:
        return self._folder / f"{chunk // _SEGMENT}.json"

"""A cache of chunks of rows, from which rows are gathered as from one array."""

import jax
import numpy as np
from jaxtyping import Int, Shaped

# The offset of a chunk that is not in the cache: the sum with any row number is negative.
_MISSING = -(2**62)


class ChunkCache:
    """Chunks of all leaves in memory; a new one replaces the oldest if the memory is full.

    Args:
        likes: A batch of rows of each leaf, ``[B, *shape]``.
        chunk: The number of rows in a chunk.
        nbytes: The most memory for chunks.
    """

    def __init__(self, likes: list[jax.ShapeDtypeStruct], chunk: int, nbytes: int) -> None:
        row_bytes = sum(like.size // like.shape[0] * like.dtype.itemsize for like in likes)
        self._chunk = chunk
        self._most = nbytes // max(row_bytes * chunk, 1)
        self._leaves = [np.empty((0, *like.shape[1:]), like.dtype) for like in likes]
        # By chunk: added to the number of a row, it gives the row's position in the leaves.
        self._offsets = np.zeros(0, np.int64)
        # The chunk in each entry; -1 if it is empty.
        self._chunks = np.zeros(0, np.int64)
        self._next = 0

    def reserve(self, count: int) -> None:
        """Prepares for ``count`` chunks of the store."""
        size = len(self._offsets)
        if count > size:
            new = np.full(max(count - size, size), _MISSING)
            self._offsets = np.concatenate([self._offsets, new])

    def find(self, rows: Int[np.ndarray, " ..."]) -> Int[np.ndarray, " ..."]:
        """Returns the positions of rows in the cache; negative for rows that are not in it."""
        return rows + self._offsets.take(rows // self._chunk)

    def gather(self, positions: Int[np.ndarray, " ..."]) -> list[Shaped[np.ndarray, " ..."]]:
        """Returns copies of the rows at these positions, as ``find`` returns them."""
        # Faster than an index. Of one number it is no array.
        return [np.asarray(leaf.take(positions, axis=0)) for leaf in self._leaves]

    def insert(self, chunks: list[int], leaves: list[Shaped[np.ndarray, " ..."]]) -> None:
        """Keeps chunks, in place of earlier versions of them.

        Args:
            chunks: Their numbers.
            leaves: Their rows, one chunk after the other.
        """
        size = self._chunk
        for i, chunk in enumerate(chunks if self._most else []):
            self.remove(chunk)
            entry = self._next
            self._next = (entry + 1) % self._most
            self._make_room(entry)
            for leaf, new in zip(self._leaves, leaves, strict=True):
                leaf[entry * size : (entry + 1) * size] = new[i * size : (i + 1) * size]
            # Last, in case this is interrupted.
            self._chunks[entry], self._offsets[chunk] = chunk, (entry - chunk) * size

    def remove(self, chunk: int) -> None:
        """Removes a chunk from the cache, if it is there."""
        if self._offsets[chunk] != _MISSING:
            entry = chunk + int(self._offsets[chunk]) // self._chunk
            self._offsets[chunk], self._chunks[entry] = _MISSING, -1
            if entry == (self._next or self._most) - 1:
                # So that a chunk that is replaced at each append does not evict the others.
                self._next = entry

    def _make_room(self, entry: int) -> None:
        count = len(self._chunks)
        if entry < count:
            if self._chunks[entry] >= 0:
                self._offsets[self._chunks[entry]] = _MISSING
                self._chunks[entry] = -1
            return
        capacity = min(max(2 * count, 16), self._most)
        for i, leaf in enumerate(self._leaves):
            # Memory that is not written yet takes no space.
            self._leaves[i] = np.empty((capacity * self._chunk, *leaf.shape[1:]), leaf.dtype)
            self._leaves[i][: len(leaf)] = leaf
        self._chunks = np.concatenate([self._chunks, np.full(capacity - count, -1)])

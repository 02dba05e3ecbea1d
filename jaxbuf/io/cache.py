"""A cache of chunks of rows, from which rows are gathered as from one array."""

import jax
import numpy as np
from jaxtyping import Int, Shaped

# Added to any number of a row it remains negative.
_NOWHERE = -(2**62)


class ChunkCache:
    """Chunks of all leaves in memory, of which the oldest makes room for the next one.

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
        # What is added to the number of a row to find it among the leaves, by chunk.
        self._offsets = np.zeros(0, np.int64)
        # The chunk in each place.
        self._chunks = np.zeros(0, np.int64)
        self._next = 0

    def reserve(self, count: int) -> None:
        """Prepares for so many chunks of the store."""
        known = len(self._offsets)
        if count > known:
            new = np.full(max(count - known, known), _NOWHERE)
            self._offsets = np.concatenate([self._offsets, new])

    def find(self, rows: Int[np.ndarray, " ..."]) -> Int[np.ndarray, " ..."]:
        """Returns where rows are in the cache; a negative number if one is not there."""
        return rows + self._offsets.take(rows // self._chunk)

    def gather(self, at: Int[np.ndarray, " ..."]) -> list[Shaped[np.ndarray, " ..."]]:
        """Returns copies of the rows that are at these places."""
        # Faster than an index.
        return [leaf.take(at, axis=0) for leaf in self._leaves]

    def insert(self, chunks: list[int], leaves: list[Shaped[np.ndarray, " ..."]]) -> None:
        """Keeps chunks, instead of what was known of them before.

        Args:
            chunks: Their numbers.
            leaves: Their rows, one chunk after the other.
        """
        size = self._chunk
        for i, chunk in enumerate(chunks if self._most else []):
            self.remove(chunk)
            place = self._next
            self._next = (place + 1) % self._most
            self._make_room(place)
            for leaf, new in zip(self._leaves, leaves, strict=True):
                leaf[place * size : (place + 1) * size] = new[i * size : (i + 1) * size]
            # Last, in case that this is interrupted.
            self._chunks[place], self._offsets[chunk] = chunk, (place - chunk) * size

    def remove(self, chunk: int) -> None:
        """Forgets a chunk, if it is there."""
        if self._offsets[chunk] != _NOWHERE:
            place = chunk + int(self._offsets[chunk]) // self._chunk
            self._offsets[chunk], self._chunks[place] = _NOWHERE, -1
            if place == (self._next or self._most) - 1:
                # So that a chunk which is replaced at each append does not drive out the others.
                self._next = place

    def _make_room(self, place: int) -> None:
        count = len(self._chunks)
        if place < count:
            if self._chunks[place] >= 0:
                self._offsets[self._chunks[place]] = _NOWHERE
                self._chunks[place] = -1
            return
        more = min(max(2 * count, 16), self._most)
        for i, leaf in enumerate(self._leaves):
            # Memory that is not written yet takes no space.
            self._leaves[i] = np.empty((more * self._chunk, *leaf.shape[1:]), leaf.dtype)
            self._leaves[i][: len(leaf)] = leaf
        self._chunks = np.concatenate([self._chunks, np.full(more - count, -1)])

"""Passes over the rows of a store, each of which visits every row once, in a random order."""

import numpy as np
from jaxtyping import Int, UInt

# More rows are not listed in memory: their order is computed where it is needed.
_MOST_LISTED = 2**20
_ROUNDS = 8


class Passes:
    """Random orders of the integers below ``count``, one for each pass.

    The order of a pass only depends on the count, the seed and the number of the pass, so any part
    of it can be computed without the parts before it. Few integers are listed in an order that is
    uniformly distributed. In an order of more than 2**20, each element is computed on its own by a
    Feistel network over the next power of 4, which is applied again to results out of range.

    Args:
        count: The number of integers, at least 1.
        seed: The seed of all orders.

    Example:
        >>> passes = Passes(5, seed=0)
        >>> first = passes.at(0, np.arange(5)).tolist()
        >>> sorted(first), passes.at(0, np.arange(3, 5)).tolist() == first[3:]
        ([0, 1, 2, 3, 4], True)

    References:
        Black and Rogaway, Ciphers with Arbitrary Finite Domains, 2002 (cycle walking).
    """

    def __init__(self, count: int, seed: int) -> None:
        self._count = count
        self._seed = seed
        self._listed: tuple[int, Int[np.ndarray, " N"]] | None = None

    def rows(self, start: int, stop: int) -> Int[np.ndarray, " B"]:
        """Returns elements ``start`` to ``stop - 1`` of all passes, one after the other."""
        parts: list[Int[np.ndarray, " b"]] = []
        while start < stop:
            number, begin = divmod(start, self._count)
            end = min(self._count, begin + stop - start)
            parts.append(self.at(number, np.arange(begin, end, dtype=np.int64)))
            start += end - begin
        return np.concatenate(parts) if parts else np.zeros(0, np.int64)

    def at(self, number: int, position: Int[np.ndarray, " B"]) -> Int[np.ndarray, " B"]:
        """Returns the integers at these positions of a pass."""
        random = np.random.default_rng((self._seed, number))
        if self._count > _MOST_LISTED:
            keys = random.integers(2**64, size=_ROUNDS, dtype=np.uint64)
            return _shuffled(position.astype(np.uint64), self._count, keys).astype(np.int64)
        if self._listed is None or self._listed[0] != number:
            self._listed = number, random.permutation(self._count)
        return self._listed[1][position]


def _shuffled(
    x: UInt[np.ndarray, " B"], count: int, keys: UInt[np.ndarray, " R"]
) -> UInt[np.ndarray, " B"]:
    """Returns the images of integers under a random permutation of those below ``count``."""
    half = np.uint64(((count - 1).bit_length() + 1) // 2)
    mask = (np.uint64(1) << half) - np.uint64(1)

    def permute(x: UInt[np.ndarray, " B"]) -> UInt[np.ndarray, " B"]:
        left, right = x >> half, x & mask
        for key in keys:
            left, right = right, left ^ (_mixed(right ^ key) & mask)
        return left << half | right

    x = permute(x)
    while np.any(outside := x >= np.uint64(count)):
        x[outside] = permute(x[outside])
    return x


def _mixed(x: UInt[np.ndarray, " B"]) -> UInt[np.ndarray, " B"]:
    """Returns hashes of 64-bit words: the output function of SplitMix64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))

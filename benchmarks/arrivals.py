"""Rows as a GFlowNet adds them to its buffer: they get better, and some of them come again.

NumPy only, so that a peer in another environment makes the same rows.
"""

import dataclasses

import numpy as np

NUM_BATCHES = 16
"""How many batches are drawn once and used in turn, moved each time."""

REPEATED = 4
"""One row in so many comes again with every pass over the batches: a mode found once more."""

FRESH = 0.4
"""Drift of the log rewards, in standard deviations per full turnover of the buffer. With it half of
all rows rank high enough to enter, at any capacity: the positive part of a standard normal variable
has mean 0.4."""


@dataclasses.dataclass(frozen=True)
class Arrivals:
    """The rows that reach a full buffer, batch after batch.

    A log reward is normal around a mean that rises a little with every batch, so that a buffer of
    the best rows always has something to take in. A state is uniform, elsewhere in every pass.

    Attributes:
        capacity: Rows the buffer holds, N.
        batch: Rows per add, B.
        width: Numbers in a state, D.
    """

    capacity: int
    batch: int = 256
    width: int = 64

    @property
    def drift(self) -> np.float32:
        """Returns the rise of the mean log reward from one batch to the next."""
        return np.float32(FRESH * self.batch / self.capacity)

    @property
    def moves(self) -> np.ndarray:
        """Returns the distance that a batch of states moves between passes, [B, D] float32."""
        rows = np.arange(self.batch)[:, None] % REPEATED != 0
        return np.broadcast_to(rows, (self.batch, self.width)).astype(np.float32)

    def initial(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the contents of a buffer of the best rows after many of them: [N, D] and [N]."""
        rng = np.random.default_rng(0)
        # Older rows are four standard deviations lower, so almost none of them are left.
        seen = 10 * self.capacity
        age = np.arange(seen, 0, -1, dtype=np.float32) / self.batch
        scores = rng.standard_normal(seen, np.float32) - age * self.drift
        best = np.sort(np.argpartition(scores, seen - self.capacity)[-self.capacity :])
        return rng.random((self.capacity, self.width), np.float32), scores[best]

    def pool(self) -> tuple[np.ndarray, np.ndarray]:
        """The states [K, B, D] and the log rewards [K, B] of the batches before they move."""
        rng = np.random.default_rng(1)
        states = rng.random((NUM_BATCHES, self.batch, self.width), np.float32)
        return states, rng.standard_normal((NUM_BATCHES, self.batch), np.float32)


class Source:
    """Hands out the batches of some arrivals, one after the other.

    Attributes:
        turn: The number of the next batch.
    """

    def __init__(self, arrivals: Arrivals):
        """Begins with batch 0."""
        self._arrivals = arrivals
        self._states, self._scores = arrivals.pool()
        self._moves = arrivals.moves
        self.turn = 0

    def worst(self) -> tuple[np.ndarray, np.ndarray]:
        """The next batch with log rewards below all that a buffer holds; it stays the next."""
        turn = self.turn
        states, scores = self.next()
        self.turn = turn
        return states, scores - np.float32(1e4)

    def next(self) -> tuple[np.ndarray, np.ndarray]:
        """The states [B, D] and the log rewards [B] of the next batch."""
        passes, at = divmod(self.turn, NUM_BATCHES)
        scores = self._scores[at] + np.float32(self.turn) * self._arrivals.drift
        self.turn += 1
        return self._states[at] + self._moves * np.float32(passes), scores


class BestModel:
    """The rows that a buffer of the best must hold, by sorting all of them at every add.

    Attributes:
        states: [N, D].
        scores: [N].
    """

    def __init__(self, arrivals: Arrivals, cutoff: float | None = None):
        """Full of the initial rows.

        Args:
            arrivals: The rows.
            cutoff: Distance (p = 1) within which a row is refused; None compares none.
        """
        self.states, self.scores = arrivals.initial()
        self._cutoff = cutoff

    def add(self, states: np.ndarray, scores: np.ndarray) -> None:
        """Takes [B, D] states with their [B] log rewards."""
        if self._cutoff is not None:
            order = np.argsort(-scores, kind="stable")
            order = order[scores[order] >= self.scores.min()]
            states, scores = states[order], scores[order]
            near = _distances(states, states) <= self._cutoff
            alone = ~np.any(np.tril(near, -1), axis=1)
            states, scores = states[alone], scores[alone]
            far = np.all(_distances(states, self.states) > self._cutoff, axis=1)
            states, scores = states[far], scores[far]
        capacity = len(self.scores)
        states = np.concatenate([self.states, states])
        scores = np.concatenate([self.scores, scores])
        best = np.argsort(scores, kind="stable")[-capacity:]
        self.states, self.scores = states[best], scores[best]


def _distances(some: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Distances with p = 1. [M, D], [N, D] -> [M, N]."""
    total = np.zeros((len(some), len(others)), np.float32)
    for one, other in zip(some.T, others.T, strict=True):
        total += np.abs(one[:, None] - other[None])
    return total


EXCHANGE_ROWS, EXCHANGE_WIDTH, EXCHANGE_CAPACITY = 256, 8, 10_000
"""What a worker sends to a manager: so many states of so many integers; and what that keeps."""


def exchange_batches(count: int = NUM_BATCHES) -> list[tuple[np.ndarray, np.ndarray]]:
    """States [EXCHANGE_ROWS, EXCHANGE_WIDTH] int64 with their log rewards, for everyone alike."""
    rng = np.random.default_rng(0)
    shape = (EXCHANGE_ROWS, EXCHANGE_WIDTH)
    return [
        (rng.integers(0, 100, shape), rng.normal(size=EXCHANGE_ROWS).astype(np.float32))
        for _ in range(count)
    ]

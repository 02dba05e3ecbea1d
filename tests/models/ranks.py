"""A naive model of draws by rank, written from the contract and not from the code."""

from __future__ import annotations

import numpy as np

from tests.models import items as reference


def by_rank(values, alpha: float) -> np.ndarray:
    """``[n]`` masses ``rank ** -alpha``: rank 1 is the largest value, of equal ones the first."""
    values = [float(value) for value in values]
    masses = np.zeros(len(values))
    for place, value in enumerate(values):
        larger = sum(other > value for other in values)
        equal_before = sum(other == value for other in values[:place])
        masses[place] = max(float(larger + equal_before + 1) ** -alpha, reference.SMALLEST_MASS)
    return masses


class RankedItemBuffer(reference.ItemBuffer):
    """The twin of an ``ItemBuffer`` whose items have ranks, which are new every few changes."""

    def __init__(self, capacity, *, sort_every=1, **options):
        super().__init__(capacity, **options)
        self.sort_every = sort_every
        self.changes = 0
        self.mass_of = {}

    def add(self, rows, priority=None, mask=None):
        entered = super().add(rows, priority, mask)
        self.mass_of |= {item: 1.0 for item in entered if item is not None}
        self.changed(any(item is not None for item in entered))
        return entered

    def update_priority(self, items, priority, mask=None):
        mask = np.ones(len(items), bool) if mask is None else mask
        some = any(
            take and self.is_live(item) and reference.is_priority(value)
            for item, value, take in zip(items, priority, mask, strict=True)
        )
        super().update_priority(items, priority, mask)
        self.changed(some)

    def remove(self, items, mask):
        gone = super().remove(items, mask)
        self.changed(gone > 0)
        return gone

    def clear(self):
        super().clear()
        # The slot decides between equal priorities, and a cleared buffer fills its first one first.
        self.position, self.changes, self.mass_of = 0, 0, {}

    def changed(self, something):
        """Count a change, and sort if there were enough."""
        self.changes += bool(something)
        if self.changes < self.sort_every:
            return
        self.changes = 0
        masses = by_rank([item.priority for item in self.live], self.alpha)
        self.mass_of = dict(zip(self.live, masses.tolist(), strict=True))

    def masses(self):
        return np.array([self.mass_of[item] for item in self.live])

"""A naive model of draws by staleness, written from the contract and not from the code."""

from __future__ import annotations

from tests.models import items as reference


def stale_law(times, now, alpha=1.0):
    """``[n]``: the probability of items last drawn in, or added after, these of ``now`` batches."""
    masses = [0.0 if time == now else float(now - time) ** alpha for time in times]
    return reference.proportional(masses)


class StaleItemBuffer(reference.ItemBuffer):
    """The twin of an ``ItemBuffer`` that draws the items which were not drawn for long."""

    def __init__(self, capacity, *, exponent=1.0, **options):
        super().__init__(capacity, **options)
        self.exponent, self.now, self.times = exponent, 0, {}

    def add(self, rows, priority=None, mask=None):
        entered = super().add(rows, priority, mask)
        self.times |= {item: self.now for item in entered if item is not None}
        return entered

    def drawn(self, items):
        """Count a batch of these items; None for rows that were not drawn."""
        self.now += 1
        self.times |= {item: self.now for item in items if item is not None}

    def clear(self):
        super().clear()
        self.now = 0

    def probabilities(self):
        law = stale_law([self.times[item] for item in self.live], self.now, self.exponent)
        return dict(zip(self.live, law.tolist(), strict=True))

"""Naive models of sampling by age and from mixtures, written from the contract."""

from __future__ import annotations

import math

from tests.models import items as reference


def recent_probabilities(rings, base, ratio, steps):
    """The probability of every item when a part of the rows is one of the last of each list."""
    recent = [item for ring in rings for item in ring[-steps:]]
    return {
        item: (ratio / len(recent) if item in recent else 0.0) + (1 - ratio) * base[item]
        for ring in rings
        for item in ring
    }


def shares(ratios, rows):
    """Returns the rows of each part by largest remainders, of equal ones the first."""
    exact = [rows * ratio / sum(ratios) for ratio in ratios]
    counts = [math.floor(share) for share in exact]
    by_remainder = sorted(range(len(ratios)), key=lambda i: (counts[i] - exact[i], i))
    for i in by_remainder[: rows - sum(counts)]:
        counts[i] += 1
    return counts


def weights_within_parts(parts, rows, beta, normalize):
    """Weights of rows within the parts of a mixture, each row by itself.

    A part is the law of a draw from it alone, by the names of its items, or None if its rows are
    taken out; a row is its part and the name of the item, or None if it is invalid.
    """

    def times(part, name):
        law = parts[part]
        if law is None:
            return 1.0
        drawn = sum(share > 0 for share in law.values())
        return law[name] * (drawn if normalize == "mean" else len(law))

    found = [None if row is None else times(*row) for row in rows]
    least = 1.0
    if normalize == "batch":
        least = min((x for x in found if x), default=1.0)
    if normalize == "buffer":
        every = [times(i, name) for i, law in enumerate(parts) for name in law or ()]
        every += [1.0 for law in parts if law is None]
        least = min(x for x in every if x)
    return [(x / least) ** -beta if x else 0.0 for x in found]


class RecentItemBuffer(reference.ItemBuffer):
    """The twin of an ``ItemBuffer`` of which a part of every batch is recent."""

    def __init__(self, capacity, ratio, steps, **options):
        super().__init__(capacity, **options)
        self.ratio = ratio
        self.steps = steps

    def probabilities(self):
        by_age = sorted(self.live, key=lambda item: item.number)
        base = super().probabilities()
        return recent_probabilities([by_age], base, self.ratio, self.steps) if by_age else base

"""A naive model of draws by several samplers, written from the contract and not from the code."""

from __future__ import annotations

import numpy as np

from tests.models import items as reference
from tests.models.sampling import recent_probabilities


def blended(laws, weights):
    """``[n]``: the probability of each item under a blend; a law of zeros can draw nothing."""
    able = [(law, weight) for law, weight in zip(laws, weights, strict=True) if sum(law) > 0]
    total = sum(weight for _, weight in able)
    parts = [np.asarray(law, np.float64) * weight / total for law, weight in able if weight > 0]
    return sum(parts) if parts else np.zeros(len(laws[0]))


class BlendedItemBuffer(reference.ItemBuffer):
    """The twin of an ``ItemBuffer`` that draws by priority with some exponents, and the newest."""

    def __init__(self, capacity, exponents, newest, weights, **options):
        super().__init__(capacity, **options)
        self.exponents, self.newest, self.weights = exponents, newest, weights

    def probabilities(self):
        if not self.live:
            return {}
        laws = []
        for exponent in self.exponents:
            masses = [reference.mass(item.priority, exponent, 0.0) for item in self.live]
            laws.append(reference.proportional(masses if exponent else np.ones(self.size)))
        by_age = sorted(self.live, key=lambda item: item.number)
        none = dict.fromkeys(self.live, 0.0)
        recent = recent_probabilities([by_age], none, 1.0, self.newest)
        laws.append([recent[item] for item in self.live])
        return dict(zip(self.live, blended(laws, self.weights).tolist(), strict=True))

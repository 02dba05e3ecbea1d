"""Naive NumPy models of what depends on scores: retention, softmax sampling and diversity.

Like ``items.py``: written from the contract, one item at a time, sharing no line with the
library.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np


class Lowest:
    """Keeps the items with the highest scores; of equal ones the newest.

    Attributes:
        items: ``(score, number in the order of arrival, data)`` of what is held, best first.
    """

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.items: list[tuple[float, int, Any]] = []
        self.adds = 0
        self.rejected = 0

    def add(self, rows: Sequence[Any], score: Sequence[float], mask=None) -> None:
        mask = np.ones(len(rows), bool) if mask is None else mask
        for data, value, take in zip(rows, score, mask, strict=True):
            if not take:
                continue
            if math.isnan(value):
                self.rejected += 1
                continue
            self.items.append((float(value), self.adds, data))
            self.adds += 1
        self.items = sorted(self.items, key=lambda item: item[:2], reverse=True)[: self.capacity]

    @property
    def data(self) -> list[Any]:
        """Returns the stored items, sorted."""
        return sorted(data for _, _, data in self.items)

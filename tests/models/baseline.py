"""Baselines and their filter, in plain NumPy."""

import math

import numpy as np


class Baselines:
    """A manager with one kind of baseline that keeps the highest scores in a list."""

    def __init__(self, capacity, kind, alpha=0.1, q=0.1):
        self.capacity, self.kind, self.alpha, self.q = capacity, kind, alpha, q
        self.kept = []
        self.average = -math.inf

    def add(self, score):
        finite = [x for x in score if math.isfinite(x)]
        if finite:
            least = min(finite)
            first = self.average == -math.inf
            self.average = least if first else self.alpha * least + (1 - self.alpha) * self.average
        self.kept = sorted([*self.kept, *score])[-self.capacity :]

    def value(self):
        finite = [x for x in self.kept if math.isfinite(x)]
        if self.kind == "ema" or len(self.kept) < self.capacity or not finite:
            return self.average
        return min(finite) if self.kind == "min" else float(np.quantile(finite, self.q))


class Filter:
    def __init__(self, refresh_after):
        self.refresh_after = refresh_after
        self.in_a_row = 0
        self.counts = {"offered": 0, "kept": 0, "sent": 0, "skipped": 0}

    def select(self, score, baseline, mask):
        rows = [i for i in range(len(score)) if mask[i]]
        kept = [i for i in rows if score[i] >= baseline or baseline == -math.inf]
        sent = kept
        if kept:
            self.in_a_row = 0
        elif rows:
            self.in_a_row += 1
            if self.in_a_row == self.refresh_after:
                self.in_a_row = 0
                sent = rows
            else:
                self.counts["skipped"] += 1
        self.counts["offered"] += len(rows)
        self.counts["kept"] += len(kept)
        self.counts["sent"] += len(sent)
        return [i in sent for i in range(len(score))]

"""Replacement in a population in plain NumPy, one rank after the other."""

import math

import numpy as np

LARGEST = np.float32(1e30)


def count(ratio, ranks):
    return max(1, math.floor(ratio * ranks + 1e-6))


def choose(rule, score, age, spared, shuffled, points):
    """Choose ranks. ``shuffled`` breaks ties; the donors with the lowest ``points`` are drawn."""
    ranks = len(score)
    score = [None if math.isnan(x) else np.clip(np.float32(x), -LARGEST, LARGEST) for x in score]

    def worth(i):
        return (score[i] is not None, score[i] if score[i] is not None else 0, shuffled[i])

    rising = sorted(range(ranks), key=worth)
    best = rising[-1]
    replaced = []
    for i in range(ranks):
        out = age[i] >= spared[i] and i != best and score[best] is not None
        if rule.threshold is not None:
            low = score[i] is None or score[i] < np.float32(rule.threshold)
            out = out and low and (score[i] is None or score[i] < score[best])
        if rule.worst_ratio is not None:
            low = i in rising[: count(rule.worst_ratio, ranks)]
            out = out and low and (score[i] is None or score[i] < score[best])
        replaced.append(bool(out))
    weights = np.zeros((ranks, ranks))
    worst = min((x for x in score if x is not None), default=0)
    for i in range(ranks):
        if not replaced[i]:
            continue
        donors = [j for j in range(ranks) if not replaced[j] and score[j] is not None]
        if rule.average == "best":
            donors = [best]
        donors = sorted(donors, key=lambda j: points[i][j])[: count(rule.donor_ratio, ranks)]
        for j in donors:
            above = float(score[j]) - float(worst)
            weights[i, j] = above if rule.average == "weighted_mean" else 1
        if not weights[i].any():
            weights[i, donors] = 1
        weights[i] /= weights[i].sum()
    return replaced, weights


class Rank:
    """One rank's part in a population. ``update_all`` calls all of them."""

    def __init__(self, params):
        self.params = params
        self.age = self.calls = self.replaced = self.replacements = 0
        self.scores = []

    @property
    def mean(self):
        if not all(np.isfinite(x).all() for x in self.params.values()) or not self.scores:
            return math.nan
        return np.mean(self.scores)


def update_all(ranks, rule, score, draws):
    """Make one call on all ranks; ``draws`` returns the random numbers of ``choose``."""
    for rank, own in zip(ranks, score, strict=True):
        rank.age += 1
        rank.calls += 1
        if not math.isnan(own):
            rank.scores.append(np.clip(np.float64(own), -float(LARGEST), float(LARGEST)))
    if ranks[0].calls % rule.every:
        return [False] * len(ranks)
    least = [rule.ages[0]] * len(ranks)
    replaced, weights = choose(
        rule, [rank.mean for rank in ranks], [rank.age for rank in ranks], least, *draws()
    )
    before = [rank.params for rank in ranks]
    for i, rank in enumerate(ranks):
        rank.replacements += sum(replaced)
        if not replaced[i]:
            continue
        rank.age, rank.scores = 0, []
        rank.replaced += 1
        mixed = {}
        for name, own in before[i].items():
            own = own.astype(np.float64)
            other = sum(
                weight * params[name].astype(np.float64)
                for weight, params in zip(weights[i], before, strict=True)
                if weight
            )
            own = np.where(np.isfinite(own), own, other)
            value = rule.momentum * own + (1 - rule.momentum) * other
            mixed[name] = value.astype(before[i][name].dtype)
        rank.params = mixed
    return replaced

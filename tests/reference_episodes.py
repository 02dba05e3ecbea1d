"""A naive NumPy model of episodes in a buffer of steps, written from the contract.

As in ``reference.py``: it remembers every step that was ever added and walks from one to the next.
"""

from __future__ import annotations

import dataclasses

from tests import reference_trajectory


@dataclasses.dataclass(frozen=True)
class Row:
    """The fields of a step."""

    t: int
    reward: float = 0.0
    terminated: bool = False
    last: bool = False


class Episodes(reference_trajectory.TrajectoryBuffer):
    """A ``TrajectoryBuffer`` that knows its episodes.

    Args:
        args: as for a ``TrajectoryBuffer``.
        avoid: whether windows stay within an episode.
        alf: whether rewards arrive with the next row and returns are ALF's.
        discount: factor per step.
        default: return of what has none.
        clip: least and largest reward.
        options: as for a ``TrajectoryBuffer``.
    """

    def __init__(self, *args, avoid, alf, discount, default, clip=None, **options):
        self.avoid, self.alf = avoid, alf
        self.discount, self.default, self.clip = discount, default, clip
        super().__init__(*args, **options)
        self.history: list[list[Row]] = [[] for _ in self.rings]

    @property
    def windows(self):
        found = super().windows
        return [w for w in found if not self.avoid or all(self.mask(w))]

    @staticmethod
    def mask(window):
        """Returns a mask of the steps of a window in the episode of its first step."""
        together, over = [], False
        for step in window:
            together.append(not over)
            over |= step.data.last
        return together

    def add(self, rows, priority=None, mask=None):
        super().add(rows, priority, mask)
        for env, row in enumerate(rows):
            kept = [data for t, data in enumerate(row) if mask is None or mask[env][t]]
            self.history[env] += kept

    def is_held(self, env, t):
        count = len(self.history[env])
        return count - len(self.rings[env]) <= t < count

    def begin(self, env, t):
        """Number of the first row of the episode of row ``t``."""
        while t > 0 and not self.history[env][t - 1].last:
            t -= 1
        return t

    def last_terminated(self, env, t):
        """Number of the last row up to ``t`` that terminated; of the episode's first if none."""
        while not self.history[env][t].terminated and t > 0 and not self.history[env][t - 1].last:
            t -= 1
        return t

    def end(self, env, t):
        """Number of the last row so far of the episode of row ``t``."""
        while t + 1 < len(self.history[env]) and not self.history[env][t].last:
            t += 1
        return t

    def episode_return(self, env, t):
        rows = self.history[env][t:]
        rewards = [row.reward for row in rows]
        if self.clip is not None:
            rewards = [min(max(reward, self.clip[0]), self.clip[1]) for reward in rewards]
        if self.alf:
            return self._alf_return(rows, rewards)
        total = 0.0
        for k, (row, reward) in enumerate(zip(rows, rewards, strict=True)):
            total += self.discount**k * reward
            if row.terminated:
                return total
            if row.last:
                break
        return self.default

    def _alf_return(self, rows, rewards):
        if rows[0].last:
            return self.default
        total = 0.0
        for k in range(1, len(rows)):
            if not rows[k - 1].terminated:
                total += self.discount ** (k - 1) * rewards[k]
            if rows[k].terminated:
                return total
            if rows[k].last:
                break
        return self.default

"""A naive NumPy model of episodes in a buffer of steps, written from the contract.

As in ``reference.py``: it remembers every step that was ever added and walks from one to the next.
"""

from __future__ import annotations

import dataclasses

from tests.models import trajectory as reference_trajectory


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
        short: the ends up to which windows may be shorter.
        every: distance of the starts of windows, counted from the first step of an episode.
        alf: whether rewards arrive with the next row and returns are ALF's.
        discount: factor per step.
        default: return of what has none.
        clip: least and largest reward.
        options: as for a ``TrajectoryBuffer``.
    """

    def __init__(
        self,
        *args,
        avoid,
        alf,
        discount,
        default,
        clip=None,
        short="terminated",
        every=1,
        **options,
    ):
        self.avoid, self.alf, self.short, self.every = avoid, alf, short, every
        self.discount, self.default, self.clip = discount, default, clip
        super().__init__(*args, **options)
        self.history: list[list[Row]] = [[] for _ in self.rings]

    @property
    def windows(self):
        found = [
            window
            for ring in self.rings
            for i in range(len(ring))
            if ring[i].place % self.period == 0 and (window := self.window(ring, i))
        ]
        return sorted(found, key=lambda window: self.slot(window[0]))

    def window(self, ring, i):
        """Returns the steps of the window that starts at ``ring[i]``; None if it is not drawn."""
        if self.behind(ring[i]) % self.every:
            return None
        window = ring[i : i + self.sequence_length]
        if not self.avoid:
            return window if len(window) == self.sequence_length else None
        last = next((k for k, step in enumerate(window) if step.data.last), None)
        if last is None or last == self.sequence_length - 1:
            return window if len(window) == self.sequence_length else None
        terminated = window[last].data.terminated
        if self.short == "ended" or (self.short == "terminated" and terminated):
            return window[: last + 1]
        return None

    def behind(self, step):
        """Number of steps of the episode before this one."""
        t = next(t for t, row in enumerate(self.history[step.env]) if row is step.data)
        return t - self.begin(step.env, t)

    def complete(self, ring, value):
        """Set the priorities of all windows that the newest step completes."""
        self.history[ring[-1].env].append(ring[-1].data)
        for i in range(max(len(ring) - self.sequence_length, 0), len(ring)):
            window = self.window(ring, i)
            if window and window[-1] is ring[-1]:
                ring[i].priority = value

    @staticmethod
    def mask(window):
        """Returns a mask of the steps of a window in the episode of its first step."""
        together, over = [], False
        for step in window:
            together.append(not over)
            over |= step.data.last
        return together

    def end_episodes(self, envs):
        """End the open episodes of these environments by truncation."""
        for env in envs:
            history, ring = self.history[env], self.rings[env]
            if history and not history[-1].last:
                default = max([self.initial_priority, *(w[0].priority for w in self.windows)])
                before = {id(w[0]) for w in self.windows}
                history[-1] = dataclasses.replace(history[-1], last=True)
                if ring:
                    ring[-1].data = history[-1]
                    for window in self.windows:
                        if id(window[0]) not in before:
                            window[0].priority = default

    def drop_newest_episode(self, envs):
        """Forget the newest episode of these environments."""
        for env in envs:
            history, ring = self.history[env], self.rings[env]
            if not history:
                continue
            count = len(history) - self.begin(env, len(history) - 1)
            del history[len(history) - count :]
            count = min(count, len(ring))
            del ring[len(ring) - count :]
            for _ in range(self.length - count):
                next(self.places[env])

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

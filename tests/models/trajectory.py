"""Naive NumPy models of the buffers and views of steps, written from the contract.

As in ``items.py``: one step at a time, nothing clever, no line shared with the library.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from tests.models.items import Limits, is_priority, mass, proportional


@dataclasses.dataclass(eq=False)
class Step:
    """A step; a window is known by its first one."""

    number: int
    reward: float = 0.0
    terminated: bool = False
    last: bool = False
    version: int = 0
    session: int = 0
    env: int = 0
    # Those of the window that begins here.
    priority: float | None = None
    uses: int = 0
    gone: bool = False


@dataclasses.dataclass(frozen=True)
class Episodes:
    """The options of a buffer that knows episodes: ``boundary``, ``recurrence`` and the others."""

    avoid: bool = False
    alf: bool = False
    short: str = "terminated"
    every: int = 1
    discount: float = 1.0
    default: float = 0.0
    clip: tuple[float, float] = (-np.inf, np.inf)


class TrajectoryBuffer:
    """Lists of steps, of which the oldest go; windows are found by looking everywhere.

    A window starts where the place of a step in its ring is a multiple of ``period``, but not at
    the earliest steps, and is as old as its first step. The options are as of an ``ItemBuffer``.
    """

    def __init__(
        self,
        num_envs: int,
        length: int,
        sequence_length: int,
        period: int = 1,
        *,
        ignored: int = 0,
        limits: tuple | None = None,
        episodes: Episodes | None = None,
        alpha: float | None = None,
        initial_priority: float = 1.0,
        epsilon: float = 0.0,
        uniform_mix: float = 0.0,
        by_episode: bool = False,
    ):
        self.length = length
        self.sequence_length = sequence_length
        self.period = period
        self.ignored = ignored
        self.limits = Limits(*(limits or (None, None, ">=")))
        self.episodes = episodes or Episodes()
        self.alpha = alpha
        self.initial_priority = initial_priority
        self.epsilon = epsilon
        self.uniform_mix = uniform_mix
        self.by_episode = by_episode
        self.rings: list[list[Step]] = [[] for _ in range(num_envs)]
        # Of each ring: every step that it has had, and the position of the next one.
        self.history: list[list[Step]] = [[] for _ in range(num_envs)]
        self.end = [0] * num_envs
        self.adds = self.rejected = self.removed = 0
        self.refused_stale = self.retired_used = self.retired_stale = 0

    @property
    def size(self) -> int:
        return sum(len(ring) for ring in self.rings)

    @property
    def windows(self) -> list[list[Step]]:
        """All legal windows, ring by ring, from the oldest to the newest."""
        return self.windows_of(self.sequence_length)

    def windows_of(self, size: int) -> list[list[Step]]:
        every = [self.window(ring, i, size) for ring in self.rings for i in range(len(ring))]
        return [window for window in every if window and not window[0].gone]

    def window(self, ring: list[Step], i: int, size: int) -> list[Step] | None:
        """Returns the steps of the window that starts at ``ring[i]``, or else None."""
        position = self.end[ring[i].env] - len(ring) + i
        if i < self.ignored or position % self.period:
            return None
        if self.episodes.every > 1 and self.behind(ring[i]) % self.episodes.every:
            return None
        window = ring[i : i + size]
        whole = window if len(window) == size else None
        last = next((k for k, step in enumerate(window) if step.last), size - 1)
        if not self.episodes.avoid or last == size - 1:
            return whole
        short = self.episodes.short
        if short == "ended" or (short == "terminated" and window[last].terminated):
            return window[: last + 1]
        return None

    def position(self, step: Step) -> int:
        ring = self.rings[step.env]
        return self.end[step.env] - len(ring) + ring.index(step)

    def slot(self, start: Step) -> int:
        place = self.position(start) % self.length
        return (start.env * self.length + place) // self.period

    def default(self) -> float:
        return max([self.initial_priority, *(w[0].priority for w in self.windows)])

    def add(self, rows: Sequence[Sequence[Step]], priority=None, mask=None) -> None:
        """Append ``rows[env][t]``; a row's priority is that of the window it completes."""
        default = self.default()
        completed: list[Step] = []
        for env, row in enumerate(rows):
            for t, step in enumerate(row):
                if mask is not None and not mask[env][t]:
                    continue
                value = default
                if priority is not None and is_priority(priority[env][t]):
                    value = float(priority[env][t])
                elif priority is not None:
                    self.rejected += 1
                step.env = env
                self.history[env].append(step)
                ring = self.rings[env]
                ring.append(step)
                self.end[env] += 1
                del ring[: -self.length]
                self.adds += 1
                completed += self.complete(ring, value)
        # Of more steps than a ring holds, only the last ones count.
        self.refused_stale += sum(x.gone for x in completed if x in self.rings[x.env])

    def complete(self, ring: list[Step], value: float) -> list[Step]:
        """Begin all windows that the newest step completes; returns their first steps."""
        firsts = []
        for i in range(max(len(ring) - self.sequence_length, 0), len(ring)):
            window = self.window(ring, i, self.sequence_length)
            if window and window[-1] is ring[-1]:
                first = ring[i]
                first.priority, first.uses, first.gone = value, 0, self.limits.refuses(first)
                firsts.append(first)
        return firsts

    def is_live(self, start: Step | None) -> bool:
        """Returns whether the window that starts with this very step is still whole."""
        return start is not None and any(window[0] is start for window in self.windows)

    def named(self, starts, mask, *values):
        """The live windows of rows that the mask takes, each with its values."""
        mask = np.ones(len(starts), bool) if mask is None else mask
        live = {window[0] for window in self.windows}
        rows = zip(starts, *values, strict=True)
        return [row for row, take in zip(rows, mask, strict=True) if take and row[0] in live]

    def update_priority(self, starts: Sequence[Step | None], priority, mask=None) -> None:
        """Set priorities row by row: stale rows are dropped, bad ones of live windows counted."""
        for start, value in self.named(starts, mask, priority):
            if is_priority(value):
                start.priority = float(value)
            else:
                self.rejected += 1

    def remove(self, starts: Sequence[Step | None], mask=None) -> int:
        """Remove live windows, whose steps stay; returns how many left."""
        gone = self.take_out({row[0] for row in self.named(starts, mask)})
        self.removed += gone
        return gone

    def take_out(self, starts) -> int:
        for start in starts:
            start.gone = True
        return len(starts)

    def mark_used(self, starts: Sequence[Step | None], mask=None) -> None:
        for (start,) in self.named(starts, mask):
            start.uses += 1
        live = [window[0] for window in self.windows]
        self.retired_used += self.take_out([x for x in live if self.limits.is_used_up(x)])

    def set_version(self, version: int, session: int) -> None:
        self.limits.version, self.limits.session = version, session
        live = [window[0] for window in self.windows]
        self.retired_stale += self.take_out([x for x in live if self.limits.refuses(x)])

    def numbers_of(self, start: Step) -> list[int]:
        """Returns the numbers of the steps of a live window."""
        [window] = [window for window in self.windows if window[0] is start]
        return [step.number for step in window]

    def around(self, start: Step, offset: int, *, ends: bool) -> tuple[int, bool]:
        """Number of the step at an offset from a window's first, or else of the nearest one.

        Beyond the ends of episodes, where there are any, no step is there.
        """
        ring, step = self.rings[start.env], 1 if offset > 0 else -1
        i = ring.index(start)
        for k in range(abs(offset)):
            ended = ends and ring[i if step > 0 else i - 1].last
            if not 0 <= i + step < len(ring) or ended:
                return ring[i].number, k == abs(offset)
            i += step
        return ring[i].number, True

    def clear(self, envs: Sequence[int] | None = None) -> None:
        """Forget the steps; positions go on at the beginning of the next lap but one."""
        for env in range(len(self.rings)) if envs is None else envs:
            self.rings[env], self.history[env] = [], []
            self.end[env] = (self.end[env] // self.length + 2) * self.length

    def dequeue(self, n: int, mask) -> list[list[int]]:
        """Take the earliest steps out; returns their numbers."""
        taken = []
        for ring, take in zip(self.rings, mask, strict=True):
            count = n if take else 0
            taken.append([step.number for step in ring[:count]])
            del ring[:count]
        return taken

    def probabilities(self, windows: list[list[Step]] | None = None) -> list[float]:
        """Probability that one draw (or the first draw) is each of ``windows``."""
        windows = self.windows if windows is None else windows
        if self.by_episode:
            episodes = [(w[0].env, self.number(w[0]) - self.behind(w[0])) for w in windows]
            return [1 / (len({*episodes}) * episodes.count(episode)) for episode in episodes]
        if self.alpha is None:
            return proportional(np.ones(len(windows))).tolist()
        masses = [mass(w[0].priority, self.alpha, self.epsilon) for w in windows]
        return proportional(masses, self.uniform_mix).tolist()

    @staticmethod
    def mask(window: list[Step]) -> list[bool]:
        """Returns a mask of the steps of a window in the episode of its first step."""
        return [not any(step.last for step in window[:k]) for k in range(len(window))]

    def end_episodes(self, envs: Sequence[int]) -> None:
        """End the open episodes of these environments by truncation."""
        for env in envs:
            if self.history[env] and not self.history[env][-1].last:
                default, before = self.default(), {window[0] for window in self.windows}
                self.history[env][-1].last = True
                for window in self.windows:
                    if window[0] not in before:
                        window[0].priority = default

    def drop_newest_episode(self, envs: Sequence[int]) -> None:
        """Forget the newest episode of these environments; positions go on a lap later."""
        for env in envs:
            history, ring = self.history[env], self.rings[env]
            if history:
                count = len(history) - self.begin(env, len(history) - 1)
                del history[len(history) - count :]
                count = min(count, len(ring))
                del ring[len(ring) - count :]
                self.end[env] += self.length - count if count else 0

    def behind(self, step: Step) -> int:
        """Number of steps of the episode before this one."""
        return self.number(step) - self.begin(step.env, self.number(step))

    def number(self, step: Step) -> int:
        return self.history[step.env].index(step)

    # Steps by their numbers in the history of an environment.

    def is_held(self, env: int, t: int) -> bool:
        count = len(self.history[env])
        return count - len(self.rings[env]) <= t < count

    def begin(self, env: int, t: int) -> int:
        """Number of the first row of the episode of row ``t``."""
        while t > 0 and not self.history[env][t - 1].last:
            t -= 1
        return t

    def last_terminated(self, env: int, t: int) -> int:
        """Number of the last row up to ``t`` that terminated; of the episode's first if none."""
        while not self.history[env][t].terminated and t > 0 and not self.history[env][t - 1].last:
            t -= 1
        return t

    def ends(self, env: int, t: int) -> int:
        """Number of the last row so far of the episode of row ``t``."""
        while t + 1 < len(self.history[env]) and not self.history[env][t].last:
            t += 1
        return t

    def episode_return(self, env: int, t: int) -> float:
        known = self.episodes
        rows = self.history[env][t : self.ends(env, t) + 1]
        rewards = np.clip([row.reward for row in rows], *known.clip).tolist()
        ended = next((k for k, row in enumerate(rows) if row.terminated and k >= known.alf), None)
        if ended is None:
            return known.default
        if not known.alf:
            return sum(known.discount**k * rewards[k] for k in range(ended + 1))
        # The reward of a row is that of the step before, unless that terminated.
        counts = [k for k in range(1, ended + 1) if not rows[k - 1].terminated]
        return sum(known.discount ** (k - 1) * rewards[k] for k in counts)


def n_step(reward, terminated, truncated, start: int, n: int, discount: float):
    """Reward sum, what the bootstrapped value counts, and where it lies, for one start."""
    total = 0.0
    for t in range(start, start + n):
        total += discount ** (t - start) * float(reward[t])
        if terminated[t]:
            return total, 0.0, t + 1
        if truncated[t]:
            break
    return total, discount ** (t + 1 - start), t + 1

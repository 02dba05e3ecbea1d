"""A naive model of rings that are read, emptied and drawn from by age."""

from __future__ import annotations

from typing import Any


class Rings:
    """A list of ``(position, data)`` for each environment, earliest first.

    Args:
        num_envs: number of lists.
        length: most steps in each.
        sequence_length: steps in a window.
        period: a window starts where the position is a multiple of it.
        ignored: how many of the earliest steps start no window.
    """

    def __init__(self, num_envs, length, sequence_length=1, period=1, ignored=0):
        self.length = length
        self.sequence_length = sequence_length
        self.period = period
        self.ignored = ignored
        self.rings: list[list[tuple[int, Any]]] = [[] for _ in range(num_envs)]
        self.end = [0] * num_envs

    def add(self, rows, mask) -> None:
        for env, row in enumerate(rows):
            for t, data in enumerate(row):
                if mask[env][t]:
                    self.rings[env].append((self.end[env], data))
                    self.end[env] += 1
            del self.rings[env][: -self.length]

    def dequeue(self, n, mask) -> list[list[Any]]:
        taken = []
        for env, ring in enumerate(self.rings):
            count = n if mask[env] else 0
            taken.append([data for _, data in ring[:count]])
            del ring[:count]
        return taken

    def clear(self, envs) -> None:
        """Positions go on, at the beginning of the next lap but one."""
        for env in envs:
            self.rings[env] = []
            self.end[env] = (self.end[env] // self.length + 2) * self.length

    def windows(self) -> list[tuple[int, int]]:
        """``(env, position of the first step)`` of all windows, earliest first in each ring."""
        return [
            (env, ring[i][0])
            for env, ring in enumerate(self.rings)
            for i in range(self.ignored, len(ring) - self.sequence_length + 1)
            if ring[i][0] % self.period == 0
        ]

    def gathered(self, env) -> list[tuple[int, Any]]:
        return self.rings[env][self.ignored :]

    def field(self, env, position) -> Any:
        return dict(self.rings[env]).get(position, 0)

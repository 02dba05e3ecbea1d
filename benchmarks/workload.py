"""The workload of the rows of items and windows."""

import dataclasses
import math

from benchmarks.limits import Traffic, gathered
from benchmarks.transitions import MAX_SERIAL, Transitions

CHECKED_BYTES = 2**23
"""How much data a sample may bring of which many are checked."""


@dataclasses.dataclass(frozen=True)
class Workload:
    """A replay job.

    Attributes:
        transitions: The kind of item, or of step.
        capacity: Slots N: items, or the steps of all environments together.
        add_size: Items, or steps of all environments together, per add.
        sample_size: Items per sample and per update.
        scan_length: Iterations of a timed scan.
        alpha: Exponent of the priorities.
        beta: Exponent of the importance weights.
        prioritized: Whether what is sampled has priorities, which are then updated.
        num_envs: Environments E whose steps lie in rings of their own; 1 for items.
        sequence_length: Steps in a sampled window; 1 for items.
    """

    transitions: Transitions
    capacity: int
    add_size: int
    sample_size: int
    scan_length: int
    alpha: float = 0.6
    beta: float = 0.4
    prioritized: bool = True
    num_envs: int = 1
    sequence_length: int = 1

    @property
    def length(self) -> int:
        """Slots of one environment."""
        return self.capacity // self.num_envs

    @property
    def behind(self) -> int:
        """The serial numbers between the start of the newest window and the newest step."""
        return (self.sequence_length - 1) * self.num_envs

    @property
    def distinct(self) -> bool:
        """Returns whether every item can have its own serial number."""
        return self.capacity <= MAX_SERIAL // 2

    def traffic(self) -> dict[str, Traffic]:
        """Returns the data that each operation has to move in any library, by its name.

        * An add reads the new items and writes them one after the other, and a priority for each.
        * A sample jumps to every row of every leaf, and to its priority, and writes the batch.
        * An update reads the priorities and jumps to where each of them is kept.

        What a tree of sums keeps above the priorities is not counted: it is the library's choice.
        """
        item, number = self.transitions.num_bytes, 4 * self.prioritized
        within = self.capacity * (item + number)
        rows = [
            self.sequence_length * math.prod(leaf.shape) * leaf.dtype.itemsize
            for leaf in self.transitions.leaves.values()
        ]
        moved = {
            "add": Traffic(self.add_size * (2 * item + number)),
            "sample": gathered(self.sample_size, [*rows, *[4] * self.prioritized], within),
        }
        if self.prioritized:
            moved["update"] = Traffic(4 * self.sample_size, self.sample_size, within)
        moved["cycle"] = sum(moved.values(), Traffic())
        return moved

    def small(self) -> "Workload":
        """The same with few slots, and no huge samples, to see how often each is drawn."""
        row = self.sequence_length * self.transitions.num_bytes
        sample = min(self.sample_size, max(32, CHECKED_BYTES // row))
        windows = 2 * self.sequence_length * self.num_envs
        capacity = max(256, 2 * self.add_size, sample, windows)
        capacity = -(-capacity // self.num_envs) * self.num_envs
        return dataclasses.replace(self, capacity=capacity, sample_size=sample)

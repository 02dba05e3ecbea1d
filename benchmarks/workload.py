"""What the rows of items and windows ask of a buffer."""

import dataclasses

from benchmarks.transitions import Transitions


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
        """How many serial numbers the start of the newest window lies behind the newest step."""
        return (self.sequence_length - 1) * self.num_envs

    def small(self) -> "Workload":
        """The same with few slots, to see how often each is drawn."""
        windows = 2 * self.sequence_length * self.num_envs
        capacity = max(256, 2 * self.add_size, self.sample_size, windows)
        return dataclasses.replace(self, capacity=-(-capacity // self.num_envs) * self.num_envs)

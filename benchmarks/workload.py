"""What the prioritized rows ask of a buffer."""

import dataclasses

from benchmarks.transitions import Transitions


@dataclasses.dataclass(frozen=True)
class Workload:
    """A prioritized replay job.

    Attributes:
        transitions: The kind of item.
        capacity: Slots N.
        add_size: Items per add.
        sample_size: Items per sample and per update.
        scan_length: Iterations of a timed scan.
        alpha: Exponent of the priorities.
        beta: Exponent of the importance weights.
    """

    transitions: Transitions
    capacity: int
    add_size: int
    sample_size: int
    scan_length: int
    alpha: float = 0.6
    beta: float = 0.4

    def small(self) -> "Workload":
        """The same with few slots, to see how often each is drawn."""
        return dataclasses.replace(self, capacity=max(256, 2 * self.add_size, self.sample_size))

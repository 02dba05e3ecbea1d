"""torchrl's prioritized replay, in an environment of its own.

`ReplayBuffer` with `PrioritizedSampler` and `LazyTensorStorage`, the leanest that torchrl has: its
`TensorDictPrioritizedReplayBuffer` does the same and writes the slots into the data as well. What
is added are `TensorDict`s, made before the clock starts.
"""

import importlib.metadata
import itertools

import numpy as np
import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, ReplayBuffer
from torchrl.data.replay_buffers.samplers import PrioritizedSampler

from benchmarks.harness import repeat_calls
from benchmarks.peers.serving import serve

NUM_ARGUMENTS = 64
"""How many different priorities and sampled slots the calls go through."""


class Torchrl:
    """One buffer of torchrl."""

    def build(self, capacity: int, sample_size: int, alpha: float, beta: float) -> None:
        """Makes an empty buffer."""
        self._buffer = ReplayBuffer(
            storage=LazyTensorStorage(capacity),
            sampler=PrioritizedSampler(capacity, alpha=alpha, beta=beta),
            batch_size=sample_size,
        )
        rng = np.random.default_rng(3)
        self._priorities = [
            torch.from_numpy(rng.uniform(0.05, 1.0, sample_size).astype(np.float32))
            for _ in range(NUM_ARGUMENTS)
        ]

    def add(self, path: str) -> None:
        """Adds the items in a file; the clocks' adds repeat them."""
        self._items = _load(path)
        self._buffer.extend(self._items)

    def sample(self, path: str) -> None:
        """Writes a sample to a file, with its slots and importance weights."""
        data, info = self._buffer.sample(return_info=True)
        leaves = {f"data.{name}": leaf.numpy() for name, leaf in data.items()}
        np.savez(path, slots=info["index"].numpy(), weights=info["priority_weight"], **leaves)

    def update(self, path: str) -> None:
        """Sets the priorities in a file."""
        with np.load(path) as given:
            slots, priority = (torch.from_numpy(given[name]) for name in ("slots", "priority"))
        self._buffer.update_priority(slots, priority)

    def time_add(self, calls: int) -> float:
        """Seconds for so many adds."""
        return repeat_calls(lambda: self._buffer.extend(self._items), calls)

    def time_sample(self, calls: int) -> float:
        """Seconds for so many samples, weights included."""
        return repeat_calls(lambda: self._buffer.sample(return_info=True), calls)

    def draw_slots(self) -> None:
        """Draws fresh slots for the timed updates."""
        draws = (self._buffer.sample(return_info=True)[1]["index"] for _ in self._priorities)
        self._slots = list(draws)

    def time_update(self, calls: int) -> float:
        """Seconds for so many updates."""
        arguments = itertools.cycle(zip(self._slots, self._priorities, strict=True))
        return repeat_calls(lambda: self._buffer.update_priority(*next(arguments)), calls)

    def time_cycle(self, calls: int) -> float:
        """Seconds for so many cycles of the three."""
        priorities = itertools.cycle(self._priorities)

        def cycle() -> None:
            self._buffer.extend(self._items)
            _, info = self._buffer.sample(return_info=True)
            self._buffer.update_priority(info["index"], next(priorities))

        return repeat_calls(cycle, calls)

    def versions(self) -> str:
        """Returns the versions of the measured libraries."""
        names = ("torchrl", "torch", "numpy")
        found = [f"{name} {importlib.metadata.version(name)}" for name in names]
        return ", ".join([*found, f"{torch.get_num_threads()} threads"])


def _load(path: str) -> TensorDict:
    with np.load(path) as leaves:
        tensors = {name: torch.from_numpy(leaves[name]) for name in leaves}
    return TensorDict(tensors, batch_size=[len(next(iter(tensors.values())))])


if __name__ == "__main__":
    serve(Torchrl())

"""torchgfn's replay buffers, for its own environment: `python -m benchmarks.peers.torchgfn_worker`.

The containers that are added are made before the clock starts. They are `StatesContainer`s, the
lightest that torchgfn has.
"""

import importlib.metadata

import numpy as np
import torch
from gfn.containers import StatesContainer
from gfn.containers.replay_buffer import NormBasedDiversePrioritizedReplayBuffer, ReplayBuffer
from gfn.env import Env

from benchmarks.arrivals import Arrivals, Source
from benchmarks.harness import repeat_calls
from benchmarks.peers.serving import serve


class Points(Env):
    """An environment whose states are points: containers ask it for their shape and device."""

    def __init__(self, width: int):
        super().__init__(
            s0=torch.zeros(width),
            state_shape=(width,),
            action_shape=(1,),
            dummy_action=torch.tensor([-1.0]),
            exit_action=torch.tensor([0.0]),
        )

    def step(self, states, actions):
        """Not needed."""
        raise NotImplementedError

    def backward_step(self, states, actions):
        """Not needed."""
        raise NotImplementedError

    def is_action_valid(self, states, actions, backward=False):
        """Not needed."""
        raise NotImplementedError


class Torchgfn:
    """One buffer of torchgfn."""

    def build(self, cutoff: float | None, **arrivals: int) -> None:
        """Makes a buffer of the best rows, full of the initial ones.

        Args:
            cutoff: Distance (p = 1) up to which rows are too close; None for no such filter.
            **arrivals: The fields of `Arrivals`.
        """
        rows = Arrivals(**arrivals)
        capacity = rows.capacity
        self._env = Points(rows.width)
        if cutoff is None:
            self._buffer = ReplayBuffer(
                self._env, capacity, prioritized_capacity=True, prioritized_sampling=True
            )
        else:
            self._buffer = NormBasedDiversePrioritizedReplayBuffer(
                self._env, capacity, cutoff_distance=cutoff, p_norm_distance=1.0
            )
        self._buffer.add(self._container(*rows.initial()))
        self._source = Source(rows)

    def add(self, count: int) -> None:
        """Adds the next batches."""
        for _ in range(count):
            self._buffer.add(self._container(*self._source.next()))

    def contents(self, path: str) -> None:
        """Writes the rows that the buffer holds to a file."""
        self._write(self._buffer.training_container, path)

    def sample(self, size: int, path: str) -> None:
        """Writes a sample to a file."""
        self._write(self._buffer.sample(size), path)

    def time_add(self, calls: int, worst: bool = False) -> float:
        """Seconds for so many adds, of the worst rows if asked for."""
        rows = self._source.worst if worst else self._source.next
        batches = iter([self._container(*rows()) for _ in range(calls)])
        return repeat_calls(lambda: self._buffer.add(next(batches)), calls)

    def time_sample(self, size: int, calls: int) -> float:
        """Seconds for so many samples."""
        return repeat_calls(lambda: self._buffer.sample(size), calls)

    def versions(self) -> str:
        """Returns the versions of the measured libraries."""
        names = ("torchgfn", "torch", "numpy")
        found = [f"{name} {importlib.metadata.version(name)}" for name in names]
        return ", ".join([*found, f"{torch.get_num_threads()} threads"])

    def _container(self, states: np.ndarray, scores: np.ndarray) -> StatesContainer:
        return StatesContainer(
            self._env,
            self._env.states_from_tensor(torch.from_numpy(states)),
            is_terminating=torch.ones(len(states), dtype=torch.bool),
            log_rewards=torch.from_numpy(scores),
        )

    def _write(self, container: StatesContainer, path: str) -> None:
        np.savez(path, states=container.states.tensor.numpy(), scores=container.log_rewards.numpy())


if __name__ == "__main__":
    serve(Torchgfn())

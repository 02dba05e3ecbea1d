"""Adds to thousands of rings.

One step is added to each of 4,096 rings of 256 steps, of 25 bytes, with windows of 8. **jaxbuf**
has `Episodes(boundary="avoid")` and finds out which windows lie within an episode; one in fifty
steps ends one. **mask** has `Episodes(boundary="mask")`, **plain** no index of episodes.
**flashbax** (`make_trajectory_buffer`) has no index either. All are told to update in place.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.harness import (
    REFERENCE,
    Contestant,
    Operation,
    Options,
    Row,
    UnequalWork,
    import_library,
)
from benchmarks.programs import repeat_in_place

NAME, OPERATION = "rings", "python add"
NUM_RINGS, WINDOW = 4096, 8


def rows(options: Options) -> list[Row]:
    """The row, if it is wanted."""
    if not options.wants(NAME, OPERATION):
        return []
    capacity = options.capacity or (2**14 if options.quick else 2**20)
    length = max(capacity // NUM_RINGS, 2 * WINDOW)
    builders: dict[str, Callable[[], Contestant]] = {
        name: functools.partial(RingsContestant, length, name)
        for name in (REFERENCE, "mask", "plain", "flashbax")
    }
    return [
        Row(
            NAME,
            f"{NUM_RINGS:,} rings of {length:,} steps, full: add to all",
            (OPERATION,),
            builders,
        )
    ]


class RingsContestant(Contestant):
    """Adds to many rings.

    Attributes:
        state: The buffer.
    """

    def __init__(self, length: int, name: str):
        """Fills the rings."""
        rng = np.random.default_rng(0)
        example = {
            "obs": jnp.zeros(4),
            "action": jnp.int32(0),
            "reward": jnp.float32(0),
            "terminated": jnp.bool_(False),
        }
        step = {
            "obs": rng.random((NUM_RINGS, 4), np.float32),
            "action": np.zeros(NUM_RINGS, np.int32),
            "reward": np.zeros(NUM_RINGS, np.float32),
            "terminated": rng.random(NUM_RINGS) < 0.02,
        }
        if name == "flashbax":
            buffer = import_library("flashbax").make_trajectory_buffer(
                add_batch_size=NUM_RINGS,
                sample_batch_size=256,
                sample_sequence_length=WINDOW,
                period=1,
                min_length_time_axis=WINDOW,
                max_length_time_axis=length,
            )
            self.state, self._add = buffer.init(example), jax.jit(buffer.add, donate_argnums=0)
            self._leaf = lambda state: state.experience["obs"]
        else:
            jaxbuf = import_library("jaxbuf")
            boundary = {REFERENCE: "avoid"}.get(name, name)
            self.state = jaxbuf.TrajectoryBuffer.create(
                example,
                NUM_RINGS,
                length,
                sequence_length=WINDOW,
                episodes=None if name == "plain" else jaxbuf.Episodes(boundary=boundary),
            )
            self._add = jaxbuf.add
            self._leaf = lambda state: state.data["obs"].reshape(NUM_RINGS, length, -1)
        # Episodes end at different times in different rings.
        self._turns = [
            jax.device_put(
                {key: np.roll(leaf, turn * 61, 0)[:, None] for key, leaf in step.items()}
            )
            for turn in range(67)
        ]
        for turn in range(length):
            self.state = self._add(self.state, self._turns[turn % 67])

    def verify(self) -> None:
        """Checks that a step is stored in each ring.

        Raises:
            UnequalWork: If it is not.
        """
        self.state = self._add(self.state, self._turns[0])
        if not np.array_equal(self._leaf(self.state)[:, 0], self._turns[0]["obs"][:, 0]):
            raise UnequalWork("a step is missing")

    def operations(self) -> Mapping[str, Operation]:
        """The add."""
        turn = iter(range(10**9))

        def add(state: Any) -> Any:
            return self._add(state, self._turns[next(turn) % 67])

        return {OPERATION: Operation(functools.partial(repeat_in_place, self, add))}

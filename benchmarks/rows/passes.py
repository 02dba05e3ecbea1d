"""Calls from Python that pass over all slots, and adds to thousands of rings.

* `passes`: a buffer of 2^20 small items, full. `sample_groups` draws eight items of each of 32 out
  of 10,000 groups, `metrics` is that of `Prioritized`, and `next_batch` that of `Staleness` with
  256 rows. **jaxbuf** and **pure** are jaxbuf with and without its kernels in C++.
* `rings`: one step is added to each of 4,096 rings of 256 steps, of 25 bytes, with windows of 8.
  **jaxbuf** has `Episodes(boundary="avoid")` and finds out which windows lie within an episode; one
  in fifty steps ends one. **mask** has `Episodes(boundary="mask")`, **plain** no index of episodes.
  **flashbax** (`make_trajectory_buffer`) has no index either. All are told to update in place.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.harness import (
    PURE,
    REFERENCE,
    Contestant,
    Operation,
    Options,
    Row,
    UnequalWork,
    import_library,
    repeat_calls,
)
from benchmarks.programs import repeat_in_place
from benchmarks.pure import PureContestant

PASSES = ("python sample_groups", "python metrics", "python next_batch")
RINGS = ("python add",)
GROUPS, NUM_RINGS, WINDOW = 10_000, 4096, 8


def rows(options: Options) -> list[Row]:
    """Those of the two rows that are wanted."""
    capacity = options.capacity or (2**14 if options.quick else 2**20)
    length = max(capacity // NUM_RINGS, 2 * WINDOW)
    ours = functools.partial(PassesContestant, capacity, options)
    passes: dict[str, Callable[[], Contestant]] = {
        REFERENCE: ours,
        PURE: lambda: PureContestant(ours),
    }
    rings: dict[str, Callable[[], Contestant]] = {
        name: functools.partial(RingsContestant, length, options, name)
        for name in (REFERENCE, "mask", "plain", "flashbax")
    }
    title = f"{capacity:,} slots, full: calls that pass over all of them"
    found = [
        Row("passes", title, PASSES, passes),
        Row("rings", f"{NUM_RINGS:,} rings of {length:,} steps, full: add to all", RINGS, rings),
    ]
    return [row for row in found if any(options.wants(row.name, name) for name in row.operations)]


class PassesContestant:
    """jaxbuf's calls.

    Attributes:
        state: The buffer of `next_batch`.
    """

    def __init__(self, capacity: int, options: Options):
        """Fills the buffers."""
        self._jaxbuf, self._options = import_library("jaxbuf"), options
        self._key, value = jax.random.key(0), np.arange(capacity, dtype=np.int32)
        self._groups = min(GROUPS, capacity)
        items = {"group": value * 7919 % self._groups, "value": value}

        def filled(sampler: Any, **options: Any) -> Any:
            example = {"group": jnp.int32(0), "value": jnp.int32(0)}
            buffer = self._jaxbuf.ItemBuffer.create(example, capacity, sampler=sampler)
            return self._jaxbuf.add(buffer, items, **options)

        priority = np.random.default_rng(0).random(capacity, np.float32)
        self._prioritized = filled(self._jaxbuf.Prioritized(), priority=priority)
        self.state = filled(self._jaxbuf.Staleness())
        self._mean = priority.mean()

    def _sample_groups(self) -> Any:
        options = {"num_groups": self._groups, "size": 8}
        return self._jaxbuf.sample_groups(self._prioritized, self._key, 32, **options)

    def verify(self) -> None:
        """Checks the groups, and the mean priority.

        Raises:
            UnequalWork: If they are wrong.
        """
        batch = self._sample_groups()
        same = batch.data["group"] == batch.group[:, None]
        if len(set(batch.group.tolist())) < 32 or not np.all(same | ~batch.valid):
            raise UnequalWork("items of other groups")
        if not np.isclose(self._prioritized.metrics()["priority_mean"], self._mean, rtol=1e-4):
            raise UnequalWork("another mean priority")

    def operations(self) -> Mapping[str, Operation]:
        """The calls, each waited for."""

        def calls(call: Callable[[], Any]) -> Operation:
            waited = lambda: jax.block_until_ready(call())  # noqa: E731
            return Operation(lambda count: repeat_calls(waited, count))

        def draw(buffer: Any) -> Any:
            return self._jaxbuf.next_batch(buffer, self._key, 256)[0]

        return {
            "python sample_groups": calls(self._sample_groups),
            "python metrics": calls(self._prioritized.metrics),
            "python next_batch": Operation(
                functools.partial(repeat_in_place, self, draw, self._options)
            ),
        }

    def facts(self) -> Mapping[str, str]:
        """Nothing."""
        return {}


class RingsContestant:
    """Adds to many rings.

    Attributes:
        state: The buffer.
    """

    def __init__(self, length: int, options: Options, name: str):
        """Fills the rings."""
        self._options, rng = options, np.random.default_rng(0)
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

        return {
            "python add": Operation(functools.partial(repeat_in_place, self, add, self._options))
        }

    def facts(self) -> Mapping[str, str]:
        """Nothing."""
        return {}

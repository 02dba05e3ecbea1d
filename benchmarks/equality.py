"""Checks that a buffer does the work of its row, so that nobody wins by doing less.

A NumPy model of a ring with priorities follows every operation; what a library samples must agree
with it. Libraries sample with their own random numbers, so values are compared row by row (a
sampled row names itself by its serial number) and frequencies by a chi-square bound.

Step t of environment e has the serial number t · E + e. So one ring of serial numbers models the
rings of all environments, and a window is known by that of its first step.
"""

import dataclasses
from typing import Any, Protocol

import numpy as np

from benchmarks.harness import UnequalWork
from benchmarks.transitions import Items, Transitions
from benchmarks.workload import Workload

RELATIVE_TOLERANCE = 1e-3
"""On probabilities and weights: wide enough for sums that drift, as flashbax's do."""

FILL_BYTES = 2**24
"""How much data one add brings when a buffer is filled, at least."""


@dataclasses.dataclass(frozen=True)
class CheckedSample:
    """A sampled batch, as NumPy arrays.

    Attributes:
        data: Leaves [B, ...], or [B, sequence_length, ...] of windows.
        slots: Whatever the library wants back in an update.
        probability: [B] probability of each row in a single draw; None if the library hides it.
        weights: [B] importance weights relative to the largest of the whole buffer; or None.
    """

    data: Items
    slots: Any
    probability: np.ndarray | None = None
    weights: np.ndarray | None = None


class RingModel:
    """A model of the contents of a ring. Serial number s is in slot s mod capacity.

    Attributes:
        workload: The job.
        serial: [N] serial number of the item in each slot, -1 for an empty slot.
        mass: [N] priority of the item, or of the window that starts, in each slot, raised to alpha;
            0 for an empty slot.
        next_serial: Serial number of the next new item.
    """

    def __init__(self, workload: Workload):
        """An empty ring for a workload."""
        self.workload = workload
        self.serial = np.full(workload.capacity, -1)
        self.mass = np.zeros(workload.capacity)
        self.next_serial = 0

    def new_items(self, count: int) -> Items:
        """Adds the next `count` items, with the default priority 1, and returns them."""
        serials = np.arange(self.next_serial, self.next_serial + count)
        self.serial[serials % self.workload.capacity] = serials
        self.overwrite(serials)
        self.next_serial += count
        return self.workload.transitions.items(serials)

    def overwrite(self, serials: np.ndarray) -> None:
        """Ends what started in the slots of these new steps, and begins what they complete."""
        self.mass[serials % self.workload.capacity] = 0.0
        complete = serials - self.workload.behind
        held = complete >= max(0, serials[-1] + 1 - self.workload.capacity)
        self.mass[complete[held] % self.workload.capacity] = 1.0

    def update(self, serials: np.ndarray, priority: np.ndarray) -> None:
        """Sets priorities; of several rows with one serial the last wins, as NumPy assigns."""
        slots = serials % self.workload.capacity
        self.mass[slots] = priority.astype(np.float64) ** self.workload.alpha

    def check(self, sample: CheckedSample) -> np.ndarray:
        """Compares one sample with the model.

        Args:
            sample: What the library returned.

        Returns:
            The serial numbers of the sampled rows, or of the first steps of the windows [B].

        Raises:
            UnequalWork: If anything differs.
        """
        serials = self._first(check_data(sample.data, self.workload.transitions))
        self._check_count(serials)
        slots = serials % self.workload.capacity
        if not np.array_equal(self.serial[slots], serials):
            raise UnequalWork("sampled an item that had been overwritten")
        if not np.all(self.mass[slots]):
            raise UnequalWork("sampled a window that crosses the place of the next write")
        live = self.mass[self.mass > 0]
        if sample.probability is not None:
            _check_close("probability", sample.probability, self.mass[slots] / live.sum())
        if sample.weights is not None:
            expected = (self.mass[slots] / live.min()) ** -self.workload.beta
            _check_close("importance weights", sample.weights, expected)
        return serials

    def _check_count(self, serials: np.ndarray) -> None:
        if len(serials) != self.workload.sample_size:
            raise UnequalWork(f"sampled {len(serials)} rows instead of {self.workload.sample_size}")

    def _first(self, serials: np.ndarray) -> np.ndarray:
        """The first serial number of every window. [B] or [B, sequence_length] -> [B]."""
        windows = serials.reshape(len(serials), -1)
        if windows.shape[1] != self.workload.sequence_length:
            raise UnequalWork(f"sampled windows of {windows.shape[1]} steps")
        if np.any(np.diff(windows, axis=1) != self.workload.num_envs):
            raise UnequalWork("sampled a window that is not contiguous")
        return windows[:, 0]


class RepeatedModel(RingModel):
    """A model of a ring too large for a serial number per item: some items are in it repeatedly.

    Only the data of what is sampled are compared.
    """

    def __init__(self, workload: Workload):
        """An empty ring for a workload."""
        self.workload = workload
        self.next_serial = 0
        self._items: Items = {}

    def new_items(self, count: int) -> Items:
        """Adds `count` items, the same ones every time, and returns them."""
        self.next_serial += count
        if not self._items or len(self._items["reward"]) != count:
            self._items = self.workload.transitions.items(np.arange(count))
        return self._items

    def overwrite(self, serials: np.ndarray) -> None:
        """See `RingModel`."""

    def update(self, serials: np.ndarray, priority: np.ndarray) -> None:
        """See `RingModel`."""

    def check(self, sample: CheckedSample) -> np.ndarray:
        """Compares the data of a sample with what was stored; see `RingModel`."""
        serials = self._first(check_data(sample.data, self.workload.transitions))
        self._check_count(serials)
        return serials


def model_of(workload: Workload) -> RingModel:
    """An empty model for a workload."""
    return RingModel(workload) if workload.distinct else RepeatedModel(workload)


class Subject(Protocol):
    """A buffer under test, and the model of what it contains."""

    model: RingModel

    def add(self, items: Items) -> None:
        """Adds leaves [B, ...], in the order of their serial numbers, evicting the oldest."""
        ...

    def sample(self, seed: int) -> CheckedSample:
        """Draws one batch of the workload's size."""
        ...

    def update(self, slots: Any, priority: np.ndarray) -> None:
        """Sets the priorities [B] float32 of sampled rows."""
        ...


def check_data(data: Items, transitions: Transitions) -> np.ndarray:
    """Compares sampled data with what their rewards say was stored; returns serials [B, ...]."""
    if set(data) != set(transitions.leaves):
        raise UnequalWork(f"sampled leaves {sorted(data)}")
    serials = transitions.serials(data)
    for name, flat in transitions.items(serials.reshape(-1)).items():
        expected = flat.reshape(*serials.shape, *flat.shape[1:])
        if data[name].dtype != expected.dtype or data[name].shape != expected.shape:
            raise UnequalWork(f"{name} came back as {data[name].dtype}{list(data[name].shape)}")
        if not np.array_equal(data[name], expected):
            raise UnequalWork(f"{name} read back differs from what was stored")
    return serials


def _check_close(what: str, found: np.ndarray, expected: np.ndarray) -> None:
    if not np.allclose(found, expected, rtol=RELATIVE_TOLERANCE, atol=0.0):
        worst = np.max(np.abs(found / expected - 1.0))
        raise UnequalWork(f"{what} is off by up to {worst:.1%}")


def priorities_of(serials: np.ndarray, turn: int) -> np.ndarray:
    """A priority in (0.05, 1] per row: the same for the same serial and turn. [B] -> [B] f32."""
    return (0.05 + 0.95 * ((serials + 31 * turn) * 0.6180339887 % 1.0)).astype(np.float32)


def fill(subject: Subject) -> None:
    """Fills a subject, and its model with it, to capacity."""
    workload = subject.model.workload
    chunk = max(workload.add_size, FILL_BYTES // workload.transitions.num_bytes)
    chunk -= chunk % workload.num_envs
    while (missing := workload.capacity - subject.model.next_serial) > 0:
        subject.add(subject.model.new_items(min(chunk, missing)))


def check_calls(subject: Subject, *, rounds: int, add: bool) -> None:
    """Adds, samples and, with priorities, updates, comparing every sample with the model.

    Args:
        subject: A full buffer.
        rounds: How often.
        add: Whether to add as well, and so evict.

    Raises:
        UnequalWork: If anything differs.
    """
    model = subject.model
    for turn in range(rounds):
        if add:
            subject.add(model.new_items(model.workload.add_size))
        sample = subject.sample(turn)
        serials = model.check(sample)
        if model.workload.prioritized:
            priority = priorities_of(serials, turn)
            subject.update(sample.slots, priority)
            model.update(serials, priority)


def check_draws(subject: Subject) -> None:
    """Gives a small full buffer its priorities, and counts how often each slot is drawn.

    Stratified draws vary less than independent ones, so the chi-square statistic is only bounded
    from above, at about five standard deviations.

    Raises:
        UnequalWork: If the frequencies do not follow the priorities.
    """
    model = subject.model
    capacity, batch = model.workload.capacity, model.workload.sample_size
    check_calls(subject, rounds=-(-8 * capacity // batch), add=False)
    counts = np.zeros(capacity)
    draws = -(-64 * capacity // batch)
    for draw in range(draws):
        serials = model.check(subject.sample(10_000 + draw))
        np.add.at(counts, serials % capacity, 1.0)
    drawn = model.mass > 0
    expected = draws * batch * model.mass[drawn] / model.mass.sum()
    statistic = float(np.sum((counts[drawn] - expected) ** 2 / expected))
    freedom = len(expected) - 1
    if statistic > freedom + 5.0 * np.sqrt(2.0 * freedom) + 25.0:
        raise UnequalWork(
            f"items are not drawn by priority (chi-square {statistic:.0f} for {freedom} degrees)"
        )

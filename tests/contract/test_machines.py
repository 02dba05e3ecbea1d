"""Random histories of each structure beside its NumPy twin.

A history that tells the two apart is shrunk to the shortest that still does. Rules call programs of
fixed shapes, in which rows are masked out and all numbers traced, so that no example compiles what
another one has compiled before.
"""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import jaxbuf
from jaxbuf import testing
from jaxbuf.core.segment_tree import NARROW, WIDE, SegmentTree
from tests.models import items as reference
from tests.models import trajectory as reference_trajectory

PRIORITIES = [0.0, 1e-6, 0.25, 1.0, 3.0, 1e6, np.nan, -1.0, np.inf]
LIMITS = settings(max_examples=40, stateful_step_count=25)


def padded(values, rows, fill, dtype):
    """``values`` and as many more of ``fill`` as there are rows."""
    return np.array([*values, *[fill] * (rows - len(values))], dtype)


def lists(elements, rows):
    return st.lists(elements, max_size=rows)


TREES = (
    (1, ("sum", "max", "min_positive"), NARROW),
    (300, ("sum", "max", "min_positive"), NARROW),
    (300, ("sum", "max", "min_positive"), WIDE),
    (40, ("max", "sum"), NARROW),
    (17, ("min",), WIDE),
)
leaves = st.integers(-2, 302)
values = st.sampled_from([0.0, 0.5, 1.0, 2.0, 7.0])

set_leaves = jax.jit(SegmentTree.set)
read_leaves = jax.jit(SegmentTree.read)
find_leaves = jax.jit(SegmentTree.find)


@jax.jit
def reduce_tree(tree, start, stop):
    return {op: tree.reduce(start, stop, op) for op in tree.ops}


@jax.jit
def observe_tree(tree):
    return tree.leaves, tree.nnz, {op: tree.root(op) for op in tree.ops}


class TreeMachine(RuleBasedStateMachine):
    """`SegmentTree`: leaves that are small multiples of a half, so that every sum is exact."""

    ROWS = 9
    MANY = 50

    @initialize(kind=st.sampled_from(TREES))
    def create(self, kind):
        self.capacity, self.ops, _ = kind
        self.tree, self.twin = SegmentTree.create(*kind), reference.SegmentTree(*kind[:2])

    def set_rows(self, index, value):
        self.tree = set_leaves(self.tree, index, value)
        self.twin.set(index, value)

    @rule(rows=lists(st.tuples(leaves, values), ROWS))
    def set_some(self, rows):
        index = padded([row[0] for row in rows], self.ROWS, -1, np.int32)
        self.set_rows(index, padded([row[1] for row in rows], self.ROWS, 9.0, np.float32))

    @rule(start=leaves, count=st.integers(0, MANY), value=values)
    def set_neighbors(self, start, count, value):
        row = np.arange(self.MANY, dtype=np.int32)
        index = np.where(row < count, (start + row) % self.capacity, self.capacity)
        self.set_rows(index, (value + row % 3).astype(np.float32))

    @rule()
    def clear(self):
        self.tree, self.twin = self.tree.clear(), reference.SegmentTree(self.capacity, self.ops)

    @rule(index=lists(leaves, ROWS))
    def get(self, index):
        index = padded(index, self.ROWS, 0, np.int32)
        nearest = self.twin.values[np.clip(index, 0, self.capacity - 1)]
        np.testing.assert_array_equal(read_leaves(self.tree, index)[1], nearest)

    @rule(start=leaves, stop=leaves)
    def reduce(self, start, stop):
        stop = max(stop, start, 0)
        expected = {op: self.twin.reduce(op, start, stop) for op in self.ops}
        chex.assert_trees_all_equal(reduce_tree(self.tree, start, stop), expected)

    @precondition(lambda self: "sum" in self.ops and self.twin.nnz())
    @rule(ends=lists(st.tuples(leaves, st.booleans()), ROWS))
    def query(self, ends):
        """The first point of a leaf, and the last float below its end."""
        sums = np.concatenate([[0.0], np.cumsum(self.twin.values)]).astype(np.float32)
        points = []
        for leaf, last in ends:
            leaf %= self.capacity
            end = np.nextafter(sums[leaf + 1], np.float32(0))
            point = end if last else sums[leaf]
            points.append(point if point < sums[-1] else 0.0)
        points = padded(points, self.ROWS, 0.0, np.float32)
        found, _ = find_leaves(self.tree, points)
        assert found.tolist() == [self.twin.query(point) for point in points]

    @invariant()
    def agrees(self):
        assert not list(self.tree.check_valid("tree"))
        values, nnz, roots = observe_tree(self.tree)
        expected = {op: self.twin.reduce(op) for op in self.ops}
        chex.assert_trees_all_equal((values, roots), (self.twin.values, expected))
        if self.ops != ("min",):
            assert nnz == self.twin.nnz()


accepts = jax.jit(jaxbuf.Queue.accepts, static_argnums=1)
take = jax.jit(jaxbuf.Queue.take, static_argnums=1)
clear = jax.jit(lambda buffer: buffer.clear())
# From Python it would be compiled at each call.
add_one = jax.jit(lambda buffer: buffer.map_field("tag", one_more, batch_size=4))


@jax.jit
def observe_queue(queue, counts):
    return (
        queue.metrics(),
        queue.size,
        jax.vmap(queue.can_add)(counts),
        jax.vmap(queue.can_sample)(counts),
    )


class QueueMachine(RuleBasedStateMachine):
    """`Queue`."""

    CAPACITY = 5
    ROWS = 7

    def __init__(self):
        super().__init__()
        self.queue = jaxbuf.Queue.create(jnp.int32(0), self.CAPACITY)
        self.twin = reference.Queue(self.CAPACITY)
        self.clock = 0
        self.handles = set()

    def items(self, rows):
        self.clock += rows
        return np.arange(self.clock - rows, self.clock, dtype=np.int32)

    @rule(mask=lists(st.booleans(), ROWS))
    def add(self, mask):
        items, mask = self.items(self.ROWS), padded(mask, self.ROWS, False, bool)
        accepted = accepts(self.queue, self.ROWS, mask)
        self.queue = jaxbuf.add(self.queue, items, mask=mask)
        assert accepted.tolist() == self.twin.add(items.tolist(), mask.tolist())

    @rule(rows=st.sampled_from([1, ROWS]))
    def add_without_a_mask(self, rows):
        items = self.items(rows)
        accepted = accepts(self.queue, rows, None)
        self.queue = jaxbuf.add(self.queue, items)
        assert accepted.tolist() == self.twin.add(items.tolist(), [True] * rows)

    @rule(count=st.sampled_from([1, 2, 6]))
    def take(self, count):
        self.queue, sample = take(self.queue, count)
        sample = jax.device_get(sample)
        expected = self.twin.take(count)
        held = len(expected)
        assert sample.data[:held].tolist() == expected
        np.testing.assert_array_equal(sample.valid, np.arange(count) < held)
        np.testing.assert_array_equal(sample.probability, sample.valid)
        np.testing.assert_array_equal(sample.slots.index[held:], self.CAPACITY)
        handles = list(zip(sample.slots.index, sample.slots.generation, strict=True))[:held]
        assert len({*handles} - self.handles) == held
        self.handles.update(handles)

    @rule()
    def clear(self):
        self.queue = clear(self.queue)
        self.twin.clear()

    @invariant()
    def agrees(self):
        testing.assert_valid(self.queue)
        testing.assert_holds(self.queue, np.array(self.twin.waiting, np.int32))
        counts = np.arange(self.CAPACITY + 2, dtype=np.int32)
        twin, held = self.twin, len(self.twin.waiting)
        metrics = {"size": held}
        metrics |= {name: getattr(twin, name) for name in ("adds", "rejected", "taken")}
        chex.assert_trees_all_equal(
            observe_queue(self.queue, counts),
            (metrics, held, counts <= self.CAPACITY - held, counts <= held),
        )


def data(number):
    """Returns the item with this number."""
    number = np.asarray(number, np.int32)
    obs = np.stack([number, -number], -1).astype(np.float32)
    return {"number": number, "obs": obs, "tag": np.zeros(number.shape, np.int32)}


def one_more(items):
    return items["tag"] + 1


class BufferMachine(RuleBasedStateMachine):
    """The common part of the machines of buffers: handles, updates and draws.

    Without replacement one sample reveals all that can be drawn, and ``latest`` all that is held.
    Each item or window is known by the number that its data begins with.
    """

    UPDATES = 6

    def start(self, buffer, twin):
        self.buffer, self.twin = buffer, twin
        self.prioritized = buffer.sampler.uses_priority
        self.clock = self.removed = 0
        # For each item so far: its number in the twin, its slot and its generation.
        self.handles = {}
        # The tags that were written, by the numbers of items or steps.
        self.tags = {}

    @precondition(lambda self: self.prioritized and self.handles)
    @rule(
        rows=lists(
            st.tuples(st.integers(0, 30), st.sampled_from(PRIORITIES), st.booleans()), UPDATES
        )
    )
    def update_priority(self, rows):
        """Updates priorities of the items stored last, and of items that are gone."""
        twins, slots = self.named([row[0] for row in rows])
        priority = padded([row[1] for row in rows], self.UPDATES, 5.0, np.float32)
        mask = padded([row[2] for row in rows], self.UPDATES, True, bool)
        self.buffer = jaxbuf.update_priority(self.buffer, slots, priority, mask=mask)
        self.twin.update_priority(twins, priority, mask)

    def named(self, rows):
        """Items stored last, and items that are gone: their twins, and their slots."""
        known = list(self.handles.items())
        chosen = [known[-1 - row % len(known)] for row in rows]
        nowhere = [(None, (self.buffer.capacity, 0))] * (self.UPDATES - len(rows))
        twins, slots = zip(*chosen, *nowhere, strict=True)
        index, generation = zip(*slots, strict=True)
        return twins, jaxbuf.Slots(np.array(index, np.int32), np.array(generation, np.uint32))

    @precondition(lambda self: self.handles)
    @rule(rows=lists(st.tuples(st.integers(0, 30), st.integers(1, 99), st.booleans()), UPDATES))
    def set_field(self, rows):
        twins, slots = self.named([row[0] for row in rows])
        mask = padded([row[2] for row in rows], self.UPDATES, True, bool)
        tags = padded([row[1] for row in rows], self.UPDATES, 5, np.int32)
        if isinstance(self.buffer, jaxbuf.TrajectoryBuffer):
            tags = np.repeat(tags[:, None], self.buffer.sequence_length, axis=1)
        self.buffer = jaxbuf.set_field(self.buffer, "tag", slots, tags, mask=mask)
        for twin, (_, tag, take) in zip(twins, rows, strict=False):
            if take and self.twin.is_live(twin):
                self.tags |= dict.fromkeys(self.twin.numbers_of(twin), tag)

    @precondition(lambda self: self.handles and self.buffer.extras)
    @rule(rows=lists(st.tuples(st.integers(0, 30), st.booleans()), UPDATES))
    def remove(self, rows):
        twins, slots = self.named([row[0] for row in rows])
        mask = padded([row[1] for row in rows], self.UPDATES, True, bool)
        self.buffer = jaxbuf.remove(self.buffer, slots, mask=mask)
        self.removed += self.twin.remove(twins, mask)

    @rule()
    def map_field(self):
        self.buffer = add_one(self.buffer)
        self.tags = {number: self.tags.get(number, 0) + 1 for number in range(self.clock)}

    @rule()
    def clear(self):
        self.buffer = clear(self.buffer)
        self.twin.clear()

    def remember(self, twin, index, generation):
        """A handle is that of one item or window for ever."""
        handle = int(index), int(generation)
        assert self.handles.setdefault(twin, handle) == handle

    def check(self, sample, latest, held, shares):
        """``held``: all there is, ``{number: twin}``; ``shares``: what can be drawn."""
        for batch, expected in ((latest, held), (sample, shares)):
            valid = batch.valid
            numbers = self.numbers(batch.data)[valid]
            tags = [self.tags.get(int(n), 0) for n in batch.data["number"][valid].reshape(-1)]
            assert batch.data["tag"][valid].reshape(-1).tolist() == tags
            assert sorted(numbers.tolist()) == sorted(expected)
            np.testing.assert_array_equal(batch.slots.index[~valid], self.buffer.capacity)
            np.testing.assert_array_equal(batch.probability[~valid], 0.0)
            handles = zip(batch.slots.index[valid], batch.slots.generation[valid], strict=True)
            for number, handle in zip(numbers.tolist(), handles, strict=True):
                self.remember(held[number], *handle)
        assert len(set(self.handles.values())) == len(self.handles)
        drawn = self.numbers(sample.data)[sample.valid].tolist()
        np.testing.assert_allclose(
            sample.probability[sample.valid], [shares[number] for number in drawn], rtol=3e-6
        )


REMOVABLE = (jaxbuf.Removable(),)
# Capacity, options of the sampler, and parts.
ITEMS = (
    (5, {}, ()),
    (5, {}, REMOVABLE),
    (18, {"alpha": 1.0}, REMOVABLE),
    (6, {"alpha": 0.5, "epsilon": 0.01, "uniform_mix": 0.2, "initial_priority": 0.0}, ()),
)


@jax.jit
def observe_items(buffer, counts):
    sample = buffer.sample(jax.random.key(0), buffer.capacity)
    latest = buffer.latest(buffer.capacity)
    return sample, latest, buffer.metrics(), jax.vmap(buffer.can_sample)(counts)


class ItemMachine(BufferMachine):
    """`ItemBuffer`."""

    ROWS = 7

    @initialize(kind=st.sampled_from(ITEMS))
    def create(self, kind):
        capacity, options, parts = kind
        options = {"replacement": False, **options}
        sampler = jaxbuf.Prioritized if "alpha" in options else jaxbuf.Uniform
        self.start(
            jaxbuf.ItemBuffer.create(data(0), capacity, sampler=sampler(**options), parts=parts),
            reference.ItemBuffer(capacity, **options),
        )

    @staticmethod
    def numbers(data):
        np.testing.assert_array_equal(data["obs"], np.stack([data["number"], -data["number"]], -1))
        return data["number"]

    def put(self, rows, priority=None, mask=None):
        numbers = np.arange(self.clock, self.clock + rows)
        self.clock += rows
        given = {"priority": priority, "mask": mask}
        given = {name: value for name, value in given.items() if value is not None}
        self.buffer = jaxbuf.add(self.buffer, data(numbers), **given)
        self.twin.add(numbers.tolist(), priority, mask)

    @rule(rows=st.sampled_from([1, ROWS]))
    def add(self, rows):
        self.put(rows)

    @rule(mask=lists(st.booleans(), ROWS))
    def add_with_a_mask(self, mask):
        self.put(self.ROWS, mask=padded(mask, self.ROWS, False, bool))

    @precondition(lambda self: self.prioritized)
    @rule(rows=lists(st.none() | st.sampled_from(PRIORITIES), ROWS))
    def add_with_priorities(self, rows):
        priority = [2.0 if row is None else row for row in rows]
        mask = padded([row is not None for row in rows], self.ROWS, False, bool)
        self.put(self.ROWS, padded(priority, self.ROWS, 2.0, np.float32), mask)

    @invariant()
    def agrees(self):
        testing.assert_valid(self.buffer)
        twin = self.twin
        counts = np.arange(twin.capacity + 2, dtype=np.int32)
        sample, latest, metrics, can_sample = jax.device_get(observe_items(self.buffer, counts))
        assert [metrics[name] for name in ("size", "adds", "rejected")] == [
            twin.size, twin.adds, twin.rejected,
        ]  # fmt: skip
        assert metrics.get("removed", 0) == self.removed
        held = {item.data: item for item in twin.live}
        shares = {item.data: share for item, share in twin.probabilities().items() if share > 0}
        self.check(sample, latest, held, shares)
        np.testing.assert_array_equal(np.diff(self.numbers(latest.data)[latest.valid]) > 0, True)
        np.testing.assert_array_equal(can_sample, counts <= len(shares))
        if self.prioritized and twin.alpha == 1.0 and twin.size:
            for name in ("min", "max", "mean"):
                expected = getattr(twin.masses(), name)()
                assert metrics[f"priority_{name}"] == pytest.approx(expected, rel=1e-5)


# Environments, length, length of a window, period, options of the sampler, and parts.
TRAJECTORIES = (
    (2, 12, 4, 3, {}, ()),
    (3, 7, 3, 1, {"alpha": 1.0}, REMOVABLE),
    (2, 4, 4, 2, {"alpha": 0.5, "epsilon": 0.01, "uniform_mix": 0.2}, ()),
)
# For environments and rows; there may be fewer of either, or more.
flags = st.lists(st.lists(st.booleans(), max_size=8), max_size=3)
weights = st.lists(st.lists(st.sampled_from(PRIORITIES), max_size=8), max_size=3)


@jax.jit
def observe_windows(buffer, counts):
    sample = buffer.sample(jax.random.key(0), buffer.max_windows)
    latest = buffer.latest(buffer.length // buffer.period)
    return sample, latest, buffer.metrics(), buffer.size, jax.vmap(buffer.can_sample)(counts)


class TrajectoryMachine(BufferMachine):
    """`TrajectoryBuffer`."""

    @initialize(kind=st.sampled_from(TRAJECTORIES))
    def create(self, kind):
        *shape, options, parts = kind
        sampler = jaxbuf.Prioritized if "alpha" in options else jaxbuf.Uniform
        num_envs, self.length, sequence_length, period = shape
        buffer = jaxbuf.TrajectoryBuffer.create(
            data(0),
            num_envs,
            self.length,
            sequence_length=sequence_length,
            period=period,
            sampler=sampler(**options, replacement=False),
            parts=parts,
        )
        self.start(buffer, reference_trajectory.TrajectoryBuffer(*shape, **options))

    def numbers(self, data):
        """Returns the numbers of windows, whose steps need not be consecutive after a mask."""
        np.testing.assert_array_equal(data["obs"], np.stack([data["number"], -data["number"]], -1))
        return data["number"][:, 0]

    def put(self, rows, priority=None, mask=None):
        """``rows`` of 0: no time axis at all."""
        shape = self.buffer.num_envs, max(rows, 1)
        numbers = self.clock + np.arange(np.prod(shape)).reshape(shape)
        self.clock += numbers.size
        given = {
            name: value if rows else value[:, 0]
            for name, value in {"priority": priority, "mask": mask}.items()
            if value is not None
        }
        self.buffer = jaxbuf.add(self.buffer, data(numbers if rows else numbers[:, 0]), **given)
        self.twin.add(numbers.tolist(), priority, mask)

    def ragged(self, rows, values, fill, dtype):
        """``[num_envs, rows]`` of lists that may be too few, too many, too short or too long."""
        full = np.full((self.buffer.num_envs, max(rows, 1)), fill, dtype)
        for env, row in enumerate(values[: full.shape[0]]):
            full[env, : len(row)] = row[: full.shape[1]]
        return full

    @rule()
    def add(self):
        self.put(0)

    @rule(mask=flags)
    def add_with_a_mask(self, mask):
        rows = self.length + 1
        self.put(rows, mask=self.ragged(rows, mask, False, bool))

    @precondition(lambda self: self.prioritized)
    @rule(one=st.booleans(), mask=flags, priority=weights)
    def add_with_priorities(self, one, mask, priority):
        rows = 0 if one else self.length + 1
        priority = self.ragged(rows, priority, 2.0, np.float32)
        self.put(rows, priority, self.ragged(rows, mask, False, bool))

    @invariant()
    def agrees(self):
        testing.assert_valid(self.buffer)
        twin, windows = self.twin, self.twin.windows
        counts = np.arange(self.buffer.max_windows + 2, dtype=np.int32)
        sample, latest, metrics, size, can_sample = jax.device_get(
            observe_windows(self.buffer, counts)
        )
        assert size == metrics["size"] == twin.size
        assert (metrics["windows"], metrics["adds"], metrics["rejected"]) == (
            len(windows), twin.adds, twin.rejected,
        )  # fmt: skip
        assert metrics.get("removed", 0) == self.removed
        held = {window[0].data: window[0] for window in windows}
        drawn = zip(held, twin.probabilities(), strict=True)
        self.check(sample, latest, held, {number: share for number, share in drawn if share > 0})
        np.testing.assert_array_equal(can_sample, counts <= len(windows))
        steps = {window[0].data: [step.data for step in window] for window in windows}
        slots = {window[0].data: twin.slot(window[0]) for window in windows}
        for batch in (sample, latest):
            for row in np.flatnonzero(batch.valid):
                number = int(batch.data["number"][row, 0])
                assert batch.data["number"][row].tolist() == steps[number]
                assert batch.slots.index[row] == slots[number]


def case(machine):
    machine.TestCase.settings = LIMITS
    return machine.TestCase


TestSegmentTree = case(TreeMachine)
TestQueue = case(QueueMachine)
TestItemBuffer = case(ItemMachine)
TestTrajectoryBuffer = case(TrajectoryMachine)

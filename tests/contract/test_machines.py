"""Random histories of each structure beside its NumPy twin.

A history that tells the two apart is shrunk to the shortest that still does. Rules call programs of
fixed shapes, in which rows are masked out and all numbers traced, so that no example compiles what
another one has compiled before.
"""

import dataclasses
import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import jaxbuf
from jaxbuf import testing
from jaxbuf.core.native import using_native
from jaxbuf.core.segment_tree import NARROW, WIDE, SegmentTree
from jaxbuf.occupancy.subset import Subset
from tests import operations
from tests.models import items as reference
from tests.models import trajectory as reference_steps
from tests.models.blend import BlendedItemBuffer
from tests.models.ranks import RankedItemBuffer
from tests.models.sampling import RecentItemBuffer
from tests.models.staleness import StaleItemBuffer

PRIORITIES = [0.0, -0.0, 1e-6, 0.25, 1.0, 3.0, 1e6, np.nan, -1.0, np.inf]
LIMITS = settings(max_examples=40, stateful_step_count=25)
OF_EACH_KIND = settings(max_examples=4, stateful_step_count=25)


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


REMOVABLE = (jaxbuf.Removable(),)
DISTINCT = jaxbuf.Uniform(replacement=False)
BY_PRIORITY = jaxbuf.Prioritized(alpha=1.0, replacement=False)
MIXED = jaxbuf.Prioritized(
    alpha=0.5, epsilon=0.01, uniform_mix=0.2, initial_priority=0.0, replacement=False
)
BY_EPISODE = jaxbuf.Balanced(by="episode")
seeds = st.integers(0, 2**20)


def data(number, **fields):
    """Returns the items or steps with these numbers, and further fields."""
    number = np.asarray(number, np.int32)
    obs = np.stack([number, -number], -1).astype(np.float32)
    return {"number": number, "obs": obs, "tag": np.zeros(number.shape, np.int32), **fields}


def one_more(items):
    return items["tag"] + 1


# From Python it would be compiled at each call.
add_one = jax.jit(lambda buffer: buffer.map_field("tag", one_more, batch_size=4))


class BufferMachine(RuleBasedStateMachine):
    """The common part of the machines of buffers: what is done by handles, and what all can tell.

    Each item or window is known by the number that its data begins with.
    """

    UPDATES = 6
    NAMES = 48

    def __init__(self, buffer, twin):
        super().__init__()
        self.buffer, self.twin = buffer, twin
        self.clock = self.version = self.session = 0
        self.plain = buffer.sampler == DISTINCT and not buffer.extras
        # Every item that was seen so far, or None for one that is gone, with its handle.
        nowhere = buffer.capacity, -1, 2**31 - 1, -(2**31)
        self.known = [(None, (index, 1)) for index in nowhere]
        self.handles = {}
        # The tags that were written, by the numbers of items or steps.
        self.tags = {}

    def has(self, ability):
        return ability in self.buffer.abilities

    def call(self, function, *args, **given):
        self.buffer = function(self.buffer, *args, **given)

    def named(self, random):
        """Items that were seen last, and such as are gone: their twins, their slots, a mask."""
        some = self.known[:4] + self.known[-12:]
        rows = [some[i] for i in random.integers(0, len(some), self.UPDATES)]
        twins, handles = zip(*rows, strict=True)
        return twins, slots_of(handles), random.random(self.UPDATES) < 0.8

    @precondition(lambda self: self.buffer.sampler.uses_priority)
    @rule(seed=seeds)
    def update_priority(self, seed):
        random = np.random.default_rng(seed)
        twins, slots, mask = self.named(random)
        priority = random.choice(PRIORITIES, self.UPDATES).astype(np.float32)
        self.call(jaxbuf.update_priority, slots, priority, mask=mask)
        self.twin.update_priority(twins, priority, mask)

    @precondition(lambda self: self.has("removal"))
    @rule(seed=seeds)
    def remove(self, seed):
        twins, slots, mask = self.named(np.random.default_rng(seed))
        self.call(jaxbuf.remove, slots, mask=mask)
        self.twin.remove(twins, mask)

    @precondition(lambda self: self.buffer.freshness)
    @rule(seed=seeds)
    def mark_used(self, seed):
        twins, slots, mask = self.named(np.random.default_rng(seed))
        self.call(jaxbuf.mark_used, slots, mask=mask)
        self.twin.mark_used(twins, mask)

    @precondition(lambda self: self.buffer.freshness)
    @rule(more=st.integers(-1, 3), session=st.booleans())
    def set_version(self, more, session):
        self.version += more
        self.session += session and more == 0
        self.call(jaxbuf.set_version, np.int32(self.version), session=np.int32(self.session))
        self.twin.set_version(self.version, self.session)

    @rule(seed=seeds)
    def set_field(self, seed):
        random = np.random.default_rng(seed)
        twins, slots, mask = self.named(random)
        size = getattr(self.buffer, "sequence_length", 1)
        tags = random.integers(1, 99, (self.UPDATES, size)).astype(np.int32)
        # Of windows in every place there is a mask of steps, of others one of rows.
        steps = random.random(tags.shape) < 0.8
        mask = mask[:, None] & (steps if getattr(self.twin, "period", 0) == 1 else True)
        given = (tags, mask) if mask.shape == tags.shape else (tags, mask[:, 0])
        if not self.buffer.num_envs:
            given = tags[:, 0], mask[:, 0]
        self.call(jaxbuf.set_field, "tag", slots, given[0], mask=given[1])
        mask = np.broadcast_to(mask, tags.shape)
        for row, twin in enumerate(twins):
            reached = self.twin.numbers_of(twin) if self.twin.is_live(twin) else []
            for number, tag, take in zip(reached, tags[row], mask[row], strict=False):
                if take:
                    self.tags[number] = tag

    @rule()
    def map_field(self):
        self.call(add_one)
        self.tags = {number: self.tags.get(number, 0) + 1 for number in range(self.clock)}

    @rule()
    def clear(self):
        self.call(clear)
        self.twin.clear()

    @rule()
    def is_valid(self):
        testing.assert_valid(self.buffer)

    def teardown(self):
        self.is_valid()

    def given(self, random, shape):
        """A mask of rows, and the priorities, versions and sessions that the buffer takes."""
        given = {"mask": random.random(shape) < random.choice([0.3, 0.9])}
        # Without a mask it is another program, which not all need to compile.
        if self.plain and random.random() < 0.5:
            given = {}
        if self.buffer.sampler.uses_priority and random.random() < 0.5:
            given["priority"] = random.choice(PRIORITIES, shape).astype(np.float32)
        if self.buffer.freshness:
            given["version"] = (self.version - random.integers(-1, 6, shape)).astype(np.int32)
            given["session"] = (self.session - (random.random(shape) < 0.1)).astype(np.int32)
        return given

    def observed(self, observe, *given):
        """Returns what a program says of the buffer, and of the items seen last."""
        last = self.known[-self.NAMES :]
        names = slots_of([handle for _, handle in last], self.NAMES, self.buffer.capacity)
        seen = jax.device_get(observe(self.buffer, names, *given))
        holds = [self.twin.is_live(item) for item, _ in last]
        assert seen["holds"][: len(last)].tolist() == holds
        return seen

    def check(self, seen, live, shares):
        """All that is there, ``{number: twin}``; and the share of each in a draw, if known."""
        found, valid = seen["found"], seen["found"].valid
        numbers = found.data["number"].reshape(valid.size, -1)
        steps = numbers[valid].reshape(-1)
        obs = np.stack([steps, -steps], -1)
        np.testing.assert_array_equal(found.data["obs"][valid].reshape(-1, 2), obs)
        tags = [self.tags.get(number, 0) for number in steps.tolist()]
        assert found.data["tag"][valid].reshape(-1).tolist() == tags
        first = numbers[valid, 0].tolist()
        assert sorted(first) == sorted(live)
        index, generation = found.slots.index[valid].tolist(), found.slots.generation[valid]
        # A handle is that of one item or window for ever.
        for number, *handle in zip(first, index, generation.tolist(), strict=True):
            item, handle = live[number], tuple(handle)
            if item not in self.handles:
                self.handles[item] = handle
                self.known.append((item, handle))
            assert self.handles[item] == handle
        assert len({handle for _, handle in self.known}) == len(self.known)
        # What can be drawn, and with which probability, is what `get` says of it.
        if shares is not None:
            expected = [shares[live[number]] for number in first]
            np.testing.assert_allclose(found.probability[valid], expected, rtol=3e-6)
        for batch in (seen["sample"], *seen["ordered"]):
            index, some = batch.slots.index[batch.valid], batch.valid
            assert valid[index].all()
            for name in ("number", "tag"):
                np.testing.assert_array_equal(found.data[name][index], batch.data[name][some])
            generation = found.slots.generation[index]
            np.testing.assert_array_equal(generation, batch.slots.generation[some])
            np.testing.assert_array_equal(batch.slots.index[~batch.valid], self.buffer.capacity)
            np.testing.assert_array_equal(batch.probability[~batch.valid], 0.0)
        drawn = seen["sample"]
        some = found.probability > 0
        np.testing.assert_allclose(
            drawn.probability[drawn.valid],
            found.probability[drawn.slots.index[drawn.valid]],
            rtol=1e-6,
        )
        replacement = getattr(self.buffer.sampler, "replacement", None)
        if replacement:
            assert drawn.valid.tolist() == [bool(some.any())] * drawn.valid.size
        elif replacement is False:
            # Without replacement one sample reveals all that can be drawn.
            assert sorted(drawn.slots.index[drawn.valid]) == np.flatnonzero(some).tolist()
            most = valid.sum() if self.buffer.num_envs else some.sum()
            counts = np.arange(seen["can_sample"].size)
            np.testing.assert_array_equal(seen["can_sample"], counts <= most)

    def count(self, metrics, *names):
        names = ("size", "adds", "rejected", *names)
        expected = {name: getattr(self.twin, name) for name in names}
        # Without a part for it, nobody counts what was removed.
        expected["removed"] *= "removed" in metrics
        assert {name: metrics.get(name, 0) for name in names} == expected


def slots_of(handles, rows=0, past_end=0):
    padded = [*handles, *[(past_end, 0)] * (rows - len(handles))]
    index, generation = zip(*padded, strict=True)
    return jaxbuf.Slots(np.array(index, np.int32), np.array(generation, np.uint32))


STALE = jaxbuf.Staleness(replacement=False)
RECENT = 0.5, 2
# Exponents of priorities, how many items are new, and weights.
BLENDED = (0.7, 0.0), 3, (0.5, 0.25, 0.25)
BLEND = jaxbuf.Blend(
    (jaxbuf.Prioritized(0.7), jaxbuf.Uniform(), jaxbuf.Recent(1.0, BLENDED[1])), BLENDED[2]
)
RANKED = jaxbuf.RankBased(by="score", sort_every=2)
ALL_BY_SCORE = jaxbuf.Blend((RANKED, jaxbuf.Softmax(), jaxbuf.Uniform()), (1, 1, 1))
LOWEST, FRESH = jaxbuf.Lowest(), jaxbuf.Freshness
# Capacity, and options.
ITEMS = {
    "uniform": (5, {"sampler": DISTINCT}),
    "removable": (5, {"sampler": DISTINCT, "parts": REMOVABLE}),
    "proportional": (18, {"sampler": BY_PRIORITY, "parts": REMOVABLE}),
    "mixed": (6, {"sampler": MIXED}),
    "lowest": (9, {"sampler": DISTINCT, "evictor": LOWEST}),
    "plain": (18, {"sampler": jaxbuf.Prioritized(0.6, 0.0, stratified=False)}),
    "recent": (6, {"sampler": jaxbuf.Recent(*RECENT, jaxbuf.Prioritized(alpha=1.0))}),
    "ranked": (18, {"sampler": jaxbuf.RankBased(alpha=0.7, replacement=False)}),
    "ranked-seldom": (
        5, {"sampler": jaxbuf.RankBased(alpha=1.0, sort_every=3), "parts": REMOVABLE}
    ),
    "stale": (12, {"sampler": STALE, "parts": REMOVABLE}),
    "blend-by-priority": (18, {"sampler": BLEND, "parts": REMOVABLE}),
    "blend": (6, {"sampler": ALL_BY_SCORE, "evictor": LOWEST, "parts": REMOVABLE}),
    "softmax": (6, {"sampler": jaxbuf.Softmax(), "parts": REMOVABLE}),
    "shuffled": (7, {"sampler": jaxbuf.Shuffled(), "freshness": FRESH(max_use=2)}),
    "shuffled-lowest": (
        6, {"sampler": jaxbuf.Shuffled(drop_last=True), "evictor": LOWEST, "parts": REMOVABLE}
    ),
    "fresh": (7, {"sampler": BY_PRIORITY, "freshness": FRESH(2, 3)}),
    "fresh-late": (13, {"freshness": FRESH(max_staleness=4, comparison=">"), "parts": REMOVABLE}),
    "fresh-lowest": (5, {"freshness": FRESH(1), "evictor": LOWEST, "sampler": DISTINCT}),
    "near": (7, {"evictor": LOWEST, "diversity": jaxbuf.Diversity(0.5, active="full")}),
    "near-oldest": (
        7, {"diversity": jaxbuf.Diversity(0.75, within_batch="greedy"), "freshness": FRESH(2, 4)}
    ),
    "near-greedy": (
        20,
        {
            "evictor": LOWEST,
            "diversity": jaxbuf.Diversity(0.25, np.inf, within_batch="greedy", active="full"),
            "parts": REMOVABLE,
        },
    ),
    "near-best": (
        7,
        {
            "evictor": LOWEST,
            "diversity": jaxbuf.Diversity(0.5, keep="best"),
            "freshness": FRESH(3),
        },
    ),
    "near-best-oldest": (
        9,
        {
            "diversity": jaxbuf.Diversity(0.75, within_batch="greedy", keep="best"),
            "sampler": BY_PRIORITY,
            "parts": REMOVABLE,
        },
    ),
    "near-one": (1, {"diversity": jaxbuf.Diversity(1.1, 0.5), "evictor": LOWEST}),
}  # fmt: skip
# Twins of their own.
TWINS = {
    "recent": lambda capacity: RecentItemBuffer(capacity, *RECENT, alpha=1.0),
    "ranked": lambda capacity: RankedItemBuffer(capacity, alpha=0.7),
    "ranked-seldom": lambda capacity: RankedItemBuffer(capacity, alpha=1.0, sort_every=3),
    "stale": StaleItemBuffer,
    "blend-by-priority": lambda capacity: BlendedItemBuffer(capacity, *BLENDED, alpha=0.7),
}
NORMALIZE = ("batch", "buffer", "mean", None)
# Computed by XLA in place of the kernels in C++, as on accelerators.
WITHOUT_KERNELS = {"proportional", "blend", "fresh", "near-oldest"}
# Each occupancy and each part in some of them; `make test-all` runs the others as well.
QUICK_ITEMS = {"uniform", "near", "stale", "blend", "shuffled", "fresh"}
QUICK_WINDOWS = {"uniform", "fresh", "lives", "by-episode"}


def twin_of(sampler):
    """The options of a model of a sampler by priority."""
    names = ("alpha", "initial_priority", "epsilon", "uniform_mix")
    if isinstance(sampler, jaxbuf.Balanced):
        return {"by_episode": sampler.by == "episode"}
    prioritized = isinstance(sampler, jaxbuf.Prioritized)
    return {name: getattr(sampler, name) for name in names} if prioritized else {}


def limits_of(freshness):
    return freshness and (freshness.max_use, freshness.max_staleness, freshness.comparison)


@jax.jit
def observe_items(buffer, names, ages):
    slot = jnp.arange(buffer.capacity, dtype=jnp.int32)
    slots = jaxbuf.Slots(slot, buffer.occupancy.generation(slot))
    counts = jnp.arange(buffer.capacity + 2)
    key = jax.random.key(0)
    sample, weights = buffer.sample(key, buffer.capacity), {}
    if buffer.sampler.uses_priority:
        weights = [jaxbuf.importance_weights(buffer, sample, 0.5, how) for how in NORMALIZE]
    ordered = []
    if buffer.occupancy.keeps_order:
        ordered = [
            buffer.latest(buffer.capacity),
            buffer.sample_range(key, buffer.capacity, *ages),
            buffer.sample_range(key, min(buffer.capacity, 3), *ages),
        ]
    return {
        "found": buffer.get(slots),
        "sample": sample,
        "weights": weights,
        "ordered": ordered,
        "holds": buffer.holds(names),
        "in_order": buffer.occupancy.in_order(),
        "can_sample": jax.vmap(buffer.can_sample)(counts),
        "metrics": buffer.metrics(),
        "highest": buffer.highest(buffer.capacity) if "score" in buffer.compares_by else None,
        "uses": buffer.freshness and (buffer.use_count(slots), buffer.staleness(slots)),
    }


class ItemMachine(BufferMachine):
    """`ItemBuffer`."""

    ROWS, BATCH = 7, 3

    def __init__(self, name):
        capacity, options = ITEMS[name]
        options = {"sampler": jaxbuf.Uniform(), "diversity": None, "freshness": None} | options
        near = options["diversity"]
        if near is not None:
            options["diversity"] = near = dataclasses.replace(near, field="point")
            near = reference.Near(near.cutoff, near.p, near.within_batch, near.active, near.keep)
        buffer = jaxbuf.ItemBuffer.create(data(0, point=np.zeros(2, "f4")), capacity, **options)
        plain = functools.partial(
            reference.ItemBuffer,
            lowest=options.get("evictor") == LOWEST,
            limits=limits_of(options["freshness"]),
            filter=near,
            **twin_of(options["sampler"]),
        )
        twin = TWINS.get(name, plain)(capacity)
        super().__init__(buffer, twin)
        self.scored = bool(buffer.score_users)
        self.shuffled = isinstance(buffer.sampler, jaxbuf.Shuffled)
        self.left, self.passes = set(), 0

    @rule(seed=seeds)
    def add(self, seed):
        random, rows = np.random.default_rng(seed), self.ROWS
        numbers = np.arange(self.clock, self.clock + rows)
        self.clock += rows
        # On a coarse grid, so that many pairs are equal, near, or exactly at a cutoff.
        points = random.integers(0, 12, (rows, 2)).astype(np.float32) / 4
        given = self.given(random, rows)
        if self.scored:
            # Few different ones, so that ties are everywhere.
            score = random.integers(-3, 4, rows) / 2 + random.choice([0.0, 1e-30])
            special = random.choice([np.nan, np.inf, -np.inf, -0.0], rows)
            given["score"] = np.where(random.random(rows) < 0.3, special, score).astype(np.float32)
            points[random.random(rows) < 0.05] = np.nan
        self.buffer, slots = jaxbuf.insert(self.buffer, data(numbers, point=points), **given)
        rows = [{"number": n, "point": p} for n, p in zip(numbers.tolist(), points, strict=True)]
        entered = self.twin.add(rows, **given)
        stays = [self.twin.is_live(item) for item in entered]
        assert (slots.index < self.buffer.capacity).tolist() == stays
        for item, stay, index in zip(entered, stays, slots.index.tolist(), strict=True):
            assert not stay or self.twin.lowest or index == item.index
        self.left |= {item for item in entered if item}

    @precondition(lambda self: self.scored)
    @rule(seed=seeds)
    def update_score(self, seed):
        random = np.random.default_rng(seed)
        twins, slots, mask = self.named(random)
        score = random.choice([np.nan, np.inf, -np.inf, 0.0, 1.0, 1.5], self.UPDATES)
        self.call(jaxbuf.update_score, slots, score.astype(np.float32), mask=mask)
        self.twin.update_score(twins, score, mask)

    @precondition(lambda self: self.shuffled)
    @rule(seed=seeds)
    def next_batch(self, seed):
        """Each item once per pass, whatever comes and goes in between."""
        self.turn()
        self.buffer, batch = jaxbuf.next_batch(self.buffer, jax.random.key(seed), self.BATCH)
        count = min(self.BATCH, len(self.left))
        if self.buffer.sampler.drop_last and count < self.BATCH:
            count = 0
        assert batch.valid.tolist() == [row < count for row in range(self.BATCH)]
        given = set(batch.data["number"][:count].tolist())
        chosen = {item for item in self.left if item.data["number"] in given}
        assert len(chosen) == count
        np.testing.assert_allclose(
            batch.probability[:count], np.float32(1 / max(self.twin.size, 1))
        )
        self.left -= chosen
        self.turn()

    @precondition(lambda self: isinstance(self.twin, StaleItemBuffer))
    @rule(seed=seeds)
    def next_of_the_stale(self, seed):
        self.buffer, batch = jaxbuf.next_batch(self.buffer, jax.random.key(seed), self.BATCH)
        drawn = batch.data["number"][batch.valid].tolist()
        self.twin.drawn([item for item in self.twin.live if item.data["number"] in drawn])

    def turn(self):
        self.left = {item for item in self.left if item.live}
        needed = self.BATCH if self.buffer.sampler.drop_last else 1
        if len(self.left) < needed <= self.twin.size:
            self.left, self.passes = set(self.twin.live), self.passes + 1

    @rule()
    def clear(self):
        super().clear()
        self.passes = 0

    def law(self):
        """The probability of each item; None of a blend, which changes with its last sort."""
        if self.buffer.sampler == ALL_BY_SCORE:
            return None
        if not isinstance(self.buffer.sampler, jaxbuf.Softmax):
            return self.twin.probabilities()
        score = np.array([item.score for item in self.twin.live])
        most = max(score, default=-np.inf)
        mass = np.where(score == most, 1.0, np.exp(score - most) if np.isfinite(most) else 0.0)
        share = mass / mass.sum() if most > -np.inf else np.zeros(len(score))
        return dict(zip(self.twin.live, share.tolist(), strict=True))

    @invariant()
    def agrees(self):
        twin, random = self.twin, np.random.default_rng(self.clock + len(self.known))
        ages = random.integers(-8, 9, 2).astype(np.int32)
        seen = self.observed(observe_items, ages)
        items, metrics = sorted(twin.live, key=lambda item: item.number), seen["metrics"]
        live = {item.data["number"]: item for item in items}
        self.check(seen, live, self.law())
        self.count(metrics, "removed", "refused_stale", "retired_used", "retired_stale")
        found, law, drawn = seen["found"], self.law(), seen["sample"]
        for how, weights in zip(NORMALIZE, seen["weights"], strict=False):
            assert not weights[~drawn.valid].any()
            if law and drawn.valid.any():
                expected = reference.importance_weights(
                    drawn.probability[drawn.valid], [*law.values()], 0.5, how
                )
                np.testing.assert_allclose(weights[drawn.valid], expected, rtol=2e-5)
        if isinstance(self.buffer.sampler, jaxbuf.Prioritized) and twin.size:
            size = reference.effective_sample_size([*law.values()])
            assert metrics["effective_sample_size"] == pytest.approx(size, rel=1e-4)
        if isinstance(twin, RankedItemBuffer):
            assert metrics["changes_since_sort"] == twin.changes
        if isinstance(twin, StaleItemBuffer):
            waited = [twin.now - twin.times[item] for item in twin.live]
            assert metrics["batches_since_drawn_max"] == max(waited, default=0)
        order, mask = seen["in_order"]
        assert found.data["number"][order[mask]].tolist() == [*live]
        if seen["ordered"]:
            slice_ = [*live][slice(*ages.tolist())]
            latest, whole, few = ([*x.data["number"][x.valid]] for x in seen["ordered"])
            assert (latest, whole) == ([*live], slice_)
            assert len(few) == min(len(slice_), 3, twin.capacity)
            assert few == [number for number in slice_ if number in few]
            for batch in seen["ordered"][1:]:
                share = batch.probability[batch.valid]
                np.testing.assert_allclose(share, 1 / max(len(slice_), 1), rtol=1e-6)
        if seen["highest"]:
            highest = seen["highest"].data["number"][seen["highest"].valid].tolist()
            by_score = sorted(items, key=lambda item: (-item.score, -item.number))
            assert highest == [item.data["number"] for item in by_score]
        if seen["uses"]:
            by_slot = [live[number] for number in found.data["number"][found.valid].tolist()]
            uses, behind = (x[found.valid].tolist() for x in seen["uses"])
            assert uses == [item.uses for item in by_slot]
            assert behind == [self.version - item.version for item in by_slot]
            assert metrics["use_max"] == max(uses, default=0)
        if twin.filter:
            refused = {name: metrics[f"refused_{name}"] for name in twin.filter.refused}
            assert refused == twin.filter.refused
            assert metrics.get("replaced_near_buffer", 0) == twin.filter.replaced
        if self.shuffled:
            assert metrics["left"] == sum(item.live for item in self.left)
            assert metrics["passes"] == self.passes
        if self.buffer.sampler == BY_PRIORITY and twin.size:
            for name in ("min", "max", "mean"):
                expected = getattr(twin.masses(), name)()
                assert metrics[f"priority_{name}"] == pytest.approx(expected, rel=1e-5)


RETURNS = {"record_return": True, "discount": 0.9, "default_return": -50.0}
AVOID = {"boundary": "avoid", **RETURNS}
LATE = FRESH(max_staleness=4, comparison=">")
# Environments, length, length of a window, period; sampler and further options.
WINDOWS = {
    "uniform": ((2, 12, 4, 3), DISTINCT, {}),
    "proportional": ((3, 7, 3, 1), BY_PRIORITY, {"parts": REMOVABLE}),
    "mixed": ((2, 4, 4, 2), MIXED, {}),
    "removable": ((2, 8, 3, 2), DISTINCT, {"parts": REMOVABLE}),
    "ignored": ((3, 7, 3, 1), BY_PRIORITY, {"num_earliest_ignored": 2}),
    "ignored-period": ((2, 6, 2, 2), BY_PRIORITY, {"num_earliest_ignored": 1}),
    "fresh": ((2, 7, 3, 1), BY_PRIORITY, {"freshness": FRESH(2, 3)}),
    "fresh-late": ((3, 40, 2, 1), DISTINCT, {"freshness": LATE}),
    "fresh-single": ((1, 5, 1, 1), BY_PRIORITY, {"freshness": FRESH(1)}),
    "alf": ((2, 12, 4, 2), MIXED, {"episodes": AVOID | {"last": "last", "recurrence": "alf"}}),
    "lives": (
        (2, 8, 3, 1), DISTINCT, {"episodes": AVOID | {"last": "last", "reward_clip": (-0.5, 0.5)}}
    ),
    "whole": (
        (2, 9, 3, 1),
        BY_PRIORITY,
        {"episodes": AVOID | {"short_windows": "never"}, "freshness": FRESH(2, 3)},
    ),
    "from-the-start": (
        (2, 12, 4, 1), BY_PRIORITY, {"episodes": AVOID | {"short_windows": "ended", "period": 3}}
    ),
    "by-episode": ((2, 12, 3, 1), BY_EPISODE, {"episodes": {"boundary": "mask", **RETURNS}}),
    "by-episode-period": (
        (2, 12, 4, 2),
        BY_EPISODE,
        {"episodes": {"boundary": "mask", **RETURNS, "last": "last"}, "num_earliest_ignored": 1},
    ),
    "by-episode-within": (
        (3, 9, 3, 1),
        BY_EPISODE,
        {"episodes": AVOID, "freshness": FRESH(2, 4), "parts": REMOVABLE},
    ),
    "masked": ((2, 12, 4, 1), DISTINCT, {"episodes": {"boundary": "mask", "period": 2, **RETURNS}}),
}  # fmt: skip
ENDS = ("terminated", "truncated", "last")
OFFSETS = (0, 1, -1, 3, 3, 50, -50, -2)


@functools.partial(jax.jit, static_argnums=2)
def observe_windows(buffer, names, sizes):
    slot = jnp.arange(buffer.occupancy.num_slots, dtype=jnp.int32)
    slots = jaxbuf.Slots(slot, buffer.occupancy.generation(slot))
    key, most = jax.random.key(0), buffer.length // buffer.period
    back = jnp.arange(buffer.length + 5, dtype=jnp.uint32)[None]
    positions = buffer.end_position[:, None] + jnp.uint32(2) - back
    places = jnp.arange(buffer.num_envs, dtype=jnp.int32)[:, None], positions
    episodes = buffer.episode_index is not None
    return {
        "found": buffer.get(slots),
        "sample": buffer.sample(key, buffer.max_windows),
        "ordered": [buffer.latest(most), buffer.sample_range(key, buffer.max_windows)],
        "holds": buffer.holds(names),
        "around": buffer.steps_around(names, OFFSETS, "number"),
        "in_order": buffer.occupancy.in_order(),
        "can_sample": jax.vmap(buffer.can_sample)(jnp.arange(buffer.max_windows + 2)),
        "metrics": buffer.metrics(),
        "uses": buffer.freshness and (buffer.use_count(slots), buffer.staleness(slots)),
        "read": (buffer.gather_all(), buffer.end_position, buffer.earliest_position),
        "located": buffer.locate(slots),
        "sizes": [buffer.sample(key, slot.size, sequence_length=size) for size in sizes],
        "places": (positions, buffer.slots_at(*places)),
        "episodes": episodes and buffer.episode(*places),
        "mask": episodes and buffer.episode_mask(slots),
    }


def flipped(steps):
    return 1 - steps["reward"]


flip_rewards = jax.jit(lambda buffer: buffer.map_field("reward", flipped, batch_size=7))
clear_envs = jax.jit(lambda buffer, envs: buffer.clear(envs))
dequeue = jax.jit(lambda buffer, mask: buffer.dequeue(2, mask=mask))
end_episodes = jax.jit(lambda buffer, envs: buffer.end_episodes(envs))
drop_newest_episode = jax.jit(lambda buffer, envs: buffer.drop_newest_episode(envs))


class WindowMachine(BufferMachine):
    """`TrajectoryBuffer`."""

    def __init__(self, name):
        shape, sampler, options = WINDOWS[name]
        *sizes, sequence_length, period = shape
        options = {"freshness": None, "num_earliest_ignored": 0, "episodes": None} | options
        known = options["episodes"]
        if known is not None:
            options["episodes"] = jaxbuf.Episodes(**known)
            known = reference_steps.Episodes(
                avoid=known["boundary"] == "avoid",
                alf=known.get("recurrence") == "alf",
                short=known.get("short_windows", "terminated"),
                every=known.get("period", 1),
                discount=known["discount"],
                default=known["default_return"],
                clip=known.get("reward_clip", (-np.inf, np.inf)),
            )
        self.last = bool(known) and options["episodes"].last is not None
        example = data(0, reward=np.float32(0), **dict.fromkeys(ENDS, np.bool_(False)))
        buffer = jaxbuf.TrajectoryBuffer.create(
            example,
            *sizes,
            sequence_length=sequence_length,
            period=period,
            sampler=sampler,
            **options,
        )
        twin = reference_steps.TrajectoryBuffer(
            *shape,
            ignored=options["num_earliest_ignored"],
            limits=limits_of(options["freshness"]),
            episodes=known,
            **twin_of(buffer.sampler),
        )
        super().__init__(buffer, twin)
        # Where nothing takes windows out in between, they may be of another length.
        most = twin.length - twin.ignored
        every = {1, min(sequence_length + 1, most)}
        self.sizes = () if isinstance(buffer.occupancy, Subset) else tuple(sorted(every))

    def envs(self, seed):
        return np.random.default_rng(seed).random(self.buffer.num_envs) < 0.6

    @rule(seed=seeds, rows=st.sampled_from([0, 0, 1, 1, 1, 2]))
    def add(self, seed, rows):
        """A single step of each ring, some, or more than fit."""
        random, twin = np.random.default_rng(seed), self.twin
        rows = (1, 3, 2 * twin.length + 1)[rows]
        shape = self.buffer.num_envs, rows
        numbers = self.clock + np.arange(rows * shape[0]).reshape(shape)
        self.clock += numbers.size
        given = self.given(random, shape)
        terminated, truncated = random.random((2, *shape)) < 0.12
        last = terminated | truncated
        if self.last:
            last = truncated | (terminated & (random.random(shape) < 0.5))
        reward = random.normal(size=shape).astype(np.float32)
        fields = [numbers, reward, terminated, last]
        fields += [given.get(name, np.zeros(shape, int)) for name in ("version", "session")]
        steps = [
            [reference_steps.Step(*cell) for cell in zip(*row, strict=True)]
            for row in zip(*(field.tolist() for field in fields), strict=True)
        ]
        twin.add(steps, given.get("priority"), given.get("mask"))
        rows = data(numbers, reward=reward, terminated=terminated, truncated=truncated, last=last)
        if shape[1] == 1:  # No time axis.
            rows, given = jax.tree.map(lambda leaf: leaf[:, 0], (rows, given))
        self.call(jaxbuf.add, rows, **given)
        # All rewards change now and then, and with them the returns that were recorded.
        if self.has("episodes") and seed % 3 == 0:
            self.call(flip_rewards)
            for step in itertools.chain(*twin.rings):
                step.reward = 1 - step.reward

    @rule(seed=seeds)
    def clear_envs(self, seed):
        envs = self.envs(seed)
        self.call(clear_envs, envs)
        self.twin.clear(np.flatnonzero(envs))

    @rule(seed=seeds)
    def dequeue(self, seed):
        mask = self.envs(seed)
        self.buffer, taken = dequeue(self.buffer, mask)
        numbers, valid = taken.data["number"], np.asarray(taken.valid)
        found = [row[some].tolist() for row, some in zip(np.asarray(numbers), valid, strict=True)]
        assert found == self.twin.dequeue(2, mask)

    @precondition(lambda self: self.has("episodes"))
    @rule(seed=seeds)
    def end_episodes(self, seed):
        envs = self.envs(seed)
        self.call(end_episodes, envs)
        self.twin.end_episodes(np.flatnonzero(envs))

    @precondition(lambda self: self.has("episodes"))
    @rule(seed=seeds)
    def drop_newest_episode(self, seed):
        envs = self.envs(seed)
        changed = [env for env in np.flatnonzero(envs) if self.twin.rings[env]]
        self.call(drop_newest_episode, envs)
        self.twin.drop_newest_episode(np.flatnonzero(envs))
        # Steps that are taken back make all slots of their environment stale.
        for item, _ in self.known:
            if item and item.env in changed:
                del self.handles[item]
        self.known = [(self.handles.get(item) and item, handle) for item, handle in self.known]

    @invariant()
    def agrees(self):
        twin, windows = self.twin, self.twin.windows
        named = self.known[-self.NAMES :]
        seen = self.observed(observe_windows, self.sizes)
        live = {window[0].number: window[0] for window in windows}
        drawn = dict(zip(live.values(), twin.probabilities(), strict=True))
        self.check(seen, live, drawn)
        self.count(seen["metrics"], "removed", "refused_stale", "retired_used", "retired_stale")
        assert seen["metrics"]["windows"] == len(windows)
        found, order = seen["found"], seen["in_order"]
        first = found.data["number"][:, 0]
        for slots in (order[0][order[1]], *(x.slots.index[x.valid] for x in seen["ordered"])):
            assert first[slots].tolist() == [*live]
        size = twin.sequence_length
        for slot in np.flatnonzero(found.valid):
            [window] = [window for window in windows if window[0].number == first[slot]]
            steps = [step.number for step in window]
            assert slot == twin.slot(window[0])
            assert found.data["number"][slot].tolist() == steps + steps[-1:] * (size - len(steps))
            env, position = (x[slot] for x in seen["located"])
            assert (env, position) == (window[0].env, twin.position(window[0]))
            if self.has("episodes"):
                mask = twin.mask(window) + [False] * (size - len(window))
                assert seen["mask"][slot].tolist() == mask
            if seen["uses"]:
                uses, behind = (x[slot] for x in seen["uses"])
                assert uses == window[0].uses
                assert behind == self.version - window[0].version
        starts, ends = {window[0] for window in windows}, self.has("episodes")
        for row, (start, _) in enumerate(named):
            expected = [(0, False)] * len(OFFSETS)
            if start in starts:
                expected = [twin.around(start, offset, ends=ends) for offset in OFFSETS]
            around = (x[row].tolist() for x in (seen["around"].data, seen["around"].inside))
            assert [*zip(*around, strict=True)] == expected
        self.check_steps(*seen["read"])
        for size, sample in zip(self.sizes, seen["sizes"], strict=True):
            self.check_windows_of(size, sample)
        if self.has("episodes"):
            self.check_episodes(seen)

    def check_steps(self, read, end, earliest):
        twin = self.twin
        assert end.tolist() == twin.end
        assert (end - earliest).tolist() == [len(ring) for ring in twin.rings]
        for env, ring in enumerate(twin.rings):
            valid = read.valid[env]
            assert valid.tolist() == [i < len(ring) - twin.ignored for i in range(twin.length)]
            numbers = [step.number for step in ring[twin.ignored :]]
            assert read.data["number"][env][valid].tolist() == numbers
            last = read.data["last" if self.last else "truncated"][env][valid]
            ends = [step.last for step in ring[twin.ignored :]]
            if not self.last and self.has("episodes"):
                last = last | read.data["terminated"][env][valid]
                assert last.tolist() == ends

    def check_windows_of(self, size, sample):
        """Of another length; such as are no windows of the buffer have the default priority."""
        twin = self.twin
        windows, own = twin.windows_of(size), {window[0] for window in twin.windows}
        priority = {window[0]: window[0].priority for window in windows}
        default = twin.default()
        for first in priority.keys() - own:
            first.priority = default
        shares = twin.probabilities(windows)
        for first, value in priority.items():
            first.priority = value
        expected = {
            window[0].number: ([step.number for step in window], pytest.approx(share, rel=1e-5))
            for window, share in zip(windows, shares, strict=True)
            if share > 0
        }
        numbers, valid = sample.data["number"], sample.valid
        rows = zip(numbers[valid].tolist(), sample.probability[valid].tolist(), strict=True)
        found = {row[0][0]: row for row in rows}
        if getattr(self.buffer.sampler, "replacement", False):
            expected = {number: expected[number] for number in found}
        assert found == expected

    def check_episodes(self, seen):
        twin, (positions, slots) = self.twin, seen["places"]
        starts = {window[0] for window in twin.windows}
        for env, history in enumerate(twin.history):
            for i in range(positions.shape[1]):
                said = jax.tree.map(lambda leaf: leaf[env, i].item(), seen["episodes"])  # noqa: B023
                t = len(history) + 2 - i
                # Positions grow by laps where steps are taken back.
                lap, position = twin.end[env] - len(history), int(positions[env, i])
                if not twin.is_held(env, t):
                    assert said.to_end == -1
                    assert (said.is_first, said.is_last) == (False, False)
                    assert said.begin == said.held_begin == position
                    assert said.value == twin.episodes.default
                    assert slots.index[env, i] == self.buffer.capacity
                    continue
                begin, step = twin.begin(env, t), history[t]
                held = max(begin, len(history) - len(twin.rings[env]))
                assert position == t + lap
                assert (said.begin, said.held_begin) == ((begin + lap) % 2**32, held + lap)
                assert said.last_terminated == (twin.last_terminated(env, t) + lap) % 2**32
                assert said.to_end == twin.ends(env, t) - t
                assert (said.is_first, said.is_last) == (begin == t, step.last)
                value = twin.episode_return(env, t)
                assert said.value == pytest.approx(value, rel=1e-5, abs=1e-5)
                assert (slots.index[env, i] < self.buffer.capacity) == (step in starts)


def run(machine, name, kernels=True):
    """Histories of this kind of buffer."""

    def create():
        return machine(name)

    with using_native(kernels):
        run_state_machine_as_test(create, settings=OF_EACH_KIND)


@pytest.mark.parametrize(
    ("name", "kernels"),
    operations.quick(
        [*((name, True) for name in ITEMS), *((name, False) for name in sorted(WITHOUT_KERNELS))],
        [*((name, True) for name in QUICK_ITEMS), ("proportional", False)],
    ),
)
def test_items(name, kernels):
    run(ItemMachine, name, kernels)


@pytest.mark.parametrize("name", operations.quick(WINDOWS, QUICK_WINDOWS))
def test_windows(name):
    run(WindowMachine, name, kernels=name != "removable")


def case(machine):
    machine.TestCase.settings = LIMITS
    return machine.TestCase


TestSegmentTree = case(TreeMachine)
TestQueue = case(QueueMachine)

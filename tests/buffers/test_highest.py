"""`highest` of each buffer and wrapper, beside a sort in Python."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbuf
from tests.operations import quick

SCORES = np.array([-np.inf, -1.0, -0.0, 0.0, 2.0, 2.0, np.inf], np.float32)
ITEM = {"number": jnp.int32(0), "value": jnp.float32(0)}
REMOVABLE = {"parts": (jaxbuf.Removable(),)}
BLEND = jaxbuf.Blend((jaxbuf.Uniform(), jaxbuf.Recent(0.5, 2, jaxbuf.Prioritized())), (1, 1))
SCORED = {"evictor": jaxbuf.Lowest()}
# What compares the items, and how a buffer is created.
KINDS = {
    "lowest": ("score", SCORED),
    "softmax": ("score", {"sampler": jaxbuf.Softmax()}),
    "both": ("score", {"sampler": jaxbuf.Prioritized(), **SCORED, **REMOVABLE}),
    "prioritized": ("priority", {"sampler": jaxbuf.Prioritized()}),
    "even": ("priority", {"sampler": jaxbuf.Prioritized(alpha=0.0)}),
    "blend": ("priority", {"sampler": BLEND, **REMOVABLE}),
    "reservoir": ("priority", None),
}


def create(kind, capacity=11):
    options = KINDS[kind][1]
    if options is None:
        return jaxbuf.reservoir(ITEM, capacity, sampler=jaxbuf.Prioritized())
    return jaxbuf.ItemBuffer.create(ITEM, capacity, **options)


def fill(buffer, kind, rows, seed=0, first=0):
    """Adds items with few different values, and removes some of them where that can be done."""
    random = np.random.default_rng(seed)
    by, options = KINDS[kind]
    value = random.choice(SCORES if by == "score" else np.float32([0, 1, 2, 5]), rows)
    items = {"number": np.arange(first, first + rows, dtype=np.int32), "value": value}
    given = {by: value}
    if kind == "both":
        given["priority"] = np.ones(rows, np.float32)
    buffer, slots = buffer.insert(items, **given)
    if options is not None and "parts" in options:
        buffer = buffer.remove(slots, mask=np.arange(rows) % 3 == 1)
    return buffer


def expected(buffers, kind, n):
    """The numbers of the items in falling order; of equal ones those of the first buffer."""
    rows = []
    for i, buffer in enumerate(buffers):
        for slot in np.flatnonzero(buffer.live):
            value, number = (buffer.data[name][slot].item() for name in ("value", "number"))
            mass = float(value > 0) if kind == "even" else value
            rows.append((-mass, i, -number))
    return [-row[2] for row in sorted(rows)][:n]


@functools.partial(jax.jit, static_argnums=1)
def highest_of_two(buffer, n):
    twice = jax.tree.map(lambda leaf: jnp.stack([leaf] * 2), buffer)
    best = jax.vmap(lambda buffer: buffer.highest(n))(twice)
    return jax.tree.map(lambda leaf: leaf[1], best)


def check(buffer, expected, n):
    """The same rows in a program of their own, and of two buffers at a time."""
    best, rows = buffer.highest(n), len(expected)
    assert best.data["number"][:rows].tolist() == expected
    assert best.valid.tolist() == [row < rows for row in range(n)]
    chex.assert_trees_all_equal(best, buffer.get(best.slots))
    chex.assert_trees_all_equal(best, highest_of_two(buffer, n))


# The machines ask buffers that keep scores alone.
@pytest.mark.parametrize(
    "kind", quick(["both", "prioritized", "even", "blend", "reservoir"], {"both", "even", "blend"})
)
def test_items_in_falling_order_the_newest_of_equals_first(kind):
    buffer = create(kind)
    for turn in range(3):
        check(buffer, expected([buffer], kind, 5), 5)
        buffer = fill(buffer, kind, 6, turn, 6 * turn)


@pytest.mark.parametrize("capacity", quick([4000, 20_000], {20_000}))
def test_many_equal_scores_in_many_chunks(capacity):
    rows = capacity + 1000
    score = np.random.default_rng(0).integers(0, 3, rows).astype(np.float32)
    buffer = jaxbuf.ItemBuffer.create(jnp.int32(0), capacity, sampler=jaxbuf.Softmax())
    buffer = jaxbuf.add(buffer, jnp.arange(rows), score=score)
    order = sorted(range(1000, rows), key=lambda number: (-score[number], -number))
    for n in (7, 2500):
        assert jaxbuf.highest(buffer, n).data.tolist() == order[:n]
    buffer = jaxbuf.update_score(buffer, buffer.latest(1).slots, jnp.array([-1.0]))
    assert rows - 1 not in jaxbuf.highest(buffer, capacity - 1).data.tolist()


def test_windows_that_can_be_drawn():
    step, removable = jnp.int32(0), (jaxbuf.Removable(),)
    rings = jaxbuf.TrajectoryBuffer.create(
        step, 2, 6, sequence_length=2, sampler=jaxbuf.Prioritized(), parts=removable
    )
    number = np.arange(16).reshape(2, 8)
    priority = np.float32([[9, 9, 1, 3, 1, 3, 3, 0], [9, 9, 3, 3, 0, 1, 1, 3]])
    rings = rings.add(number, priority=priority)
    rings = rings.remove(rings.slots_at(jnp.array([1]), jnp.array([2])))
    # A window has the priority of its last step.
    windows = [
        (-priority[e, t + 1], -t, e) for e in (0, 1) for t in range(2, 7) if (e, t) != (1, 2)
    ]
    first = [int(number[e, -t]) for _, t, e in sorted(windows)]
    best = rings.highest(12)
    assert best.data[:9].tolist() == [[k, k + 1] for k in first]
    assert best.valid.tolist() == [True] * 9 + [False] * 3


@pytest.mark.parametrize("kind", quick(["lowest", "prioritized"], {"lowest"}))
def test_parts_of_a_mixture_and_shards_follow_each_other(kind):
    a, b, c = (fill(create(kind), kind, rows, rows, 100 * rows) for rows in (9, 20, 5))
    inner = jaxbuf.Mixture.create([b, c], [1, 2])
    check(jaxbuf.Mixture.create([a, inner], [1, 1]), expected([a, b, c], kind, 20), 20)
    hosted = jaxbuf.Hosted.create(lambda: fill(create(kind), kind, 9))
    best = jaxbuf.highest(hosted, 2).data["number"].tolist()
    assert best == expected([hosted.buffer], kind, 2)
    holder = jaxbuf.Holder(b)
    best = holder.read(lambda buffer: jaxbuf.highest(buffer, 4))
    assert best.data["number"].tolist() == expected([b], kind, 4)


@pytest.mark.parametrize("kind", quick(["prioritized", "softmax"], {"prioritized"}))
def test_shards_by_shard_and_then_the_newest(kind):
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    make = functools.partial(create, kind, 5)
    value = np.float32([0, 1, 2, 1, 2, 0, 1, 2])
    sharded = jaxbuf.Sharded.create(make, mesh, "d", shards=2)
    sharded = sharded.add({"number": np.arange(8), "value": value}, **{KINDS[kind][0]: value})
    shards = [jax.tree.map(lambda leaf, i=i: leaf[i], sharded.shards) for i in (0, 1)]
    check(sharded, expected(shards, kind, 8), 8)
    spec = jax.P("d")
    inside = jax.shard_map(lambda x: x.highest(8), mesh=mesh, in_specs=spec, out_specs=spec)
    chex.assert_trees_all_equal(jax.jit(inside)(sharded), sharded.highest(8))
    with pytest.raises(ValueError, match="n is 3, but there are 2 shards; make it a multiple of 2"):
        sharded.highest(3)
    with pytest.raises(ValueError, match="n is 12, but there are 10 slots"):
        sharded.highest(12)


def test_what_it_cannot_compare_is_refused():
    plain, lowest = jaxbuf.ItemBuffer.create(ITEM, 8), create("lowest")
    diverse = jaxbuf.ItemBuffer.create(ITEM, 8, diversity=jaxbuf.Diversity())
    mixed = jaxbuf.Mixture.create([lowest, create("even")], [1, 1])
    for buffer, given, message in (
        (plain, {}, "does not keep the score or the priority of its items"),
        (diverse, {}, "highest"),
        (jaxbuf.Queue.create(ITEM, 8), {}, "no method"),
        (mixed, {}, "not every part keeps the score or the priority"),
        (lowest, {"by": "priority"}, "does not keep the priority"),
        (lowest, {"n": 12}, "n is 12, but there are 11 slots"),
        (lowest, {"by": "age"}, "by is 'age'; choose from"),
    ):
        with pytest.raises(ValueError, match=message):
            jaxbuf.highest(buffer, **{"n": 1} | given)
    both = fill(create("both"), "both", 3)
    assert both.highest(1, by="priority").data["number"].tolist() == [2]

"""The diversity filter: which rows enter, against a model that measures one pair at a time."""

import dataclasses
import functools
import math
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbuf
from jaxbuf import testing
from jaxbuf.strategies.points import Ball, Points, PointSet
from tests.models import items as reference
from tests.operations import quick

INF = math.inf


LOWEST = jaxbuf.Lowest()


def create(diversity, capacity, width=1, evictor=LOWEST):
    """A buffer of points, each with its number."""
    example = {"point": jnp.zeros(width), "number": jnp.int32(0)}
    diversity = dataclasses.replace(diversity, field=diversity.field or "point")
    return jaxbuf.ItemBuffer.create(example, capacity, evictor=evictor, diversity=diversity)


def rows(points, first=0):
    points = jnp.asarray(points, jnp.float32)
    points = points[:, None] if points.ndim == 1 else points
    return {"point": points, "number": first + jnp.arange(points.shape[0], dtype=jnp.int32)}


def scores(*values):
    return jnp.array(values, jnp.float32)


def numbers(buffer):
    """The items that are held, sorted."""
    return sorted(np.asarray(buffer.data["number"])[np.asarray(buffer.live)].tolist())


REASONS = ("low_score", "within_batch", "near_buffer")


def refused(buffer):
    metrics = buffer.metrics()
    return {name: int(metrics[f"refused_{name}"]) for name in REASONS}


@functools.partial(jax.jit, static_argnums=2)
def near(one, others, ball):
    """Returns whether one point is near any of the others."""
    point = Points.of(one[None])
    return Points.of(others).near(point, jnp.int32(1), ball, lambda _, slot: slot >= 0)[0]


@pytest.mark.parametrize(
    "p", quick([0.5, 0.9, 1.0, 1.5, 2.0, 3.0, 100.0, INF], {0.5, 2.0, 3.0, INF})
)
def test_norms_are_those_of_torch_cdist_and_the_boundary_belongs_to_the_ball(p):
    origin, other = jnp.zeros(3), jnp.array([[3.0, 4.0, 0.0]])
    distance = 4.0 if p == INF else (3**p + 4**p) ** (1 / p)
    assert near(origin, other, Ball(distance * 1.001, p))
    assert not near(origin, other, Ball(distance * 0.999, p))
    for cutoff, size, expected in ((1.0, 1.0, True), (0.99, 1.0, False), (1.1, 1.1, True)):
        assert near(origin, jnp.array([[0.0, 0.0, size]]), Ball(cutoff, p)) == expected


def test_a_norm_of_0_counts_coordinates_that_differ():
    origin, other = jnp.zeros(3), jnp.array([[3.0, 4.0, 0.0]])
    assert near(origin, other, Ball(2.0, 0.0))
    assert not near(origin, other, Ball(2.0 * 0.999, 0.0))
    assert near(origin, jnp.array([[0.0, 1e-30, 0.0]]), Ball(1.0, 0.0))


@pytest.mark.parametrize("p", quick([0.5, 1.0, 2.0, 3.0, INF], {0.5, 2.0, INF}))
def test_no_norm_loses_a_distance(p):
    # |x|² - 2xy + |y|² has no digit left of this difference.
    point = jnp.full((9,), 4096.0)
    zero = Ball(0.0, p)
    assert near(point, point[None], zero)
    assert not near(point, point[None] + jnp.float32(2**-11), zero)
    assert not near(jnp.zeros(9), jnp.full((1, 9), 1e-30), zero)
    for scale in (1e-12, 1e12):
        axis = jnp.float32(scale) * jnp.eye(9, dtype=jnp.float32)[0]
        ball = Ball(scale, p)
        assert near(axis, jnp.zeros((1, 9)), ball)
        assert not near(axis * jnp.float32(1.01), jnp.zeros((1, 9)), ball)


def test_infinities_are_near_their_like_and_far_from_the_rest():
    buffer = create(jaxbuf.Diversity(1e12), 9)
    buffer = jaxbuf.add(buffer, rows([0, INF, INF, -INF, -INF, 1e38]), score=jnp.zeros(6))
    assert numbers(buffer) == [0, 1, 3, 5]


def test_below_zero_no_distance_counts():
    buffer = create(jaxbuf.Diversity(-1.0, active="full"), 2)
    buffer = jaxbuf.add(buffer, rows([0, 0]), score=scores(1, 2))
    buffer = jaxbuf.add(buffer, rows([0, 0, 0], 2), score=scores(0, 3, 3))
    assert numbers(buffer) == [3, 4]
    assert refused(buffer) == {"low_score": 1, "within_batch": 0, "near_buffer": 0}


@pytest.mark.parametrize(
    ("p", "cutoff", "options"),
    [
        (3.0, 0.6, {"within_batch": "suppress", "active": "full"}),
        pytest.param(2.0, 0.5, {"within_batch": "greedy"}, marks=pytest.mark.slow),
        pytest.param(0.0, 2.0, {"within_batch": "greedy"}, marks=pytest.mark.slow),
    ],
)
def test_random_adds_to_large_buffers_agree_with_the_model(p, cutoff, options):
    """`tests/contract/test_machines.py` has small ones."""
    rng, capacity, count, width = np.random.default_rng(300), 300, 150, 9
    buffer = create(jaxbuf.Diversity(cutoff, p, **options), capacity, width)
    near = reference.Near(cutoff, p, **options)
    twin = reference.ItemBuffer(capacity, lowest=True, filter=near)
    for i in range(6):
        # On a coarse grid, so that many pairs are near, equal, or exactly at a cutoff.
        points = (rng.integers(0, 4, (count, width)) / 4).astype(np.float32)
        score = (rng.integers(0, 30, count) + i / 2).astype(np.float32)
        bad = rng.random((2, count)) < 0.02
        points[bad[0], 0] = np.nan
        score[bad[1]] = rng.choice([np.nan, -INF, INF], bad[1].sum())
        mask = rng.random(count) < 0.8
        buffer = jaxbuf.add(buffer, rows(points, i * count), score=score, mask=mask)
        twin.add([{"point": point} for point in points], None, mask, score)
        assert numbers(buffer) == sorted(item.number for item in twin.live)
        assert refused(buffer) == near.refused
        assert buffer.metrics()["rejected"] == twin.rejected
    testing.assert_valid(buffer)
    assert near.refused["within_batch"]
    assert near.refused["near_buffer"]


@pytest.mark.parametrize("within_batch", ["suppress", "greedy"])
def test_without_a_row_that_may_enter_no_distance_is_computed(monkeypatch, within_batch):
    searches = []

    def nearest(*args, **options):
        jax.debug.callback(lambda: searches.append(None), ordered=True)
        return found(*args, **options)

    found = PointSet.nearest
    monkeypatch.setattr(PointSet, "nearest", nearest)
    add = jax.jit(lambda buffer, items, score: buffer.add(items, score=score))

    buffer = create(jaxbuf.Diversity(cutoff=1.0, within_batch=within_batch), 2)
    for score, compares, count in (
        ((5.0, 6.0), True, (0, 0)),
        ((1.0, 2.0), False, (2, 0)),
        ((4.9, jnp.nan), False, (3, 0)),
        ((-INF, 1.0), False, (5, 0)),
        ((5.0, 1.0), True, (6, 1)),
    ):
        searches.clear()
        buffer = add(buffer, rows([0.0, 100.0]), scores(*score))
        jax.effects_barrier()
        assert bool(searches) == compares
        found_so_far = refused(buffer)
        assert (found_so_far["low_score"], found_so_far["near_buffer"]) == count


@pytest.mark.parametrize("most", [2**31, 0])
def test_points_are_written_to_their_slots(monkeypatch, most):
    # More numbers than an int32 tells apart have two indices each.
    monkeypatch.setattr("jaxbuf.strategies.points._MOST", most)
    rng, set_points = np.random.default_rng(0), jax.jit(Points.set)
    for capacity, width in [(3, 1), (130, 8), (1100, 13)]:
        expected, points = np.zeros((capacity + 600, width), "f4"), Points.create(capacity, width)
        for _ in range(3):
            # Slots past the end, far and near, are dropped.
            slot = rng.permutation(capacity + 600)[:200].astype(np.int32)
            expected[slot] = rng.normal(size=(200, width))
            points = set_points(points, slot, expected[slot])
        expected = expected[:capacity]
        found = points.get(jnp.arange(capacity))
        np.testing.assert_array_equal(found[:, :width], expected)
        assert not np.any(found[:, width:])
        assert np.sum(points.blocks != 0) == np.sum(expected != 0)


@pytest.mark.parametrize(
    ("p", "radius"), [(1.0, 9.0), (2.0, 2.5), (INF, 0.9), (2.5, 2.0), (0.5, 62.0)]
)
def test_near_is_what_all_distances_say(p, radius):
    rng = np.random.default_rng(0)
    stored = rng.normal(size=(1100, 13)).astype(np.float32)
    points = rng.normal(size=(150, 13)).astype(np.float32)
    size = np.abs(points[:, None].astype(np.float64) - stored)
    all_pairs = size.max(-1) if math.isinf(p) else (size**p).sum(-1) ** (1 / p)
    all_pairs[:, 1000:] = INF
    found = Points.of(jnp.asarray(stored)).near(
        Points.of(jnp.asarray(points)), jnp.int32(140), Ball(radius, p), lambda _, slot: slot < 1000
    )
    expected = (all_pairs.min(1) <= radius) & (np.arange(150) < 140)
    assert 0 < expected.sum() < 140
    np.testing.assert_array_equal(found, expected)


def near_any(stored, points):
    """Returns a mask of the points within 0.1 of a stored one."""
    height = jnp.int32(points.shape[0])
    ball = Ball(0.1, 1.0)
    return Points.of(stored).near(Points.of(points), height, ball, lambda _, slot: slot >= 0)


near_any_of_one = jax.jit(near_any)
near_any_of_two = jax.jit(jax.vmap(near_any, in_axes=(None, 0)))


@pytest.mark.parametrize("equal", [0, 1, 16, 17, 100])
@pytest.mark.parametrize(
    ("height", "width"),
    quick([(4, 40), (100, 40), (100, 48), (300, 100)], {(4, 40), (100, 48)}),
)
def test_near_is_the_same_however_many_rows_of_a_tile_are_near(equal, height, width):
    rng = np.random.default_rng(equal)
    stored = rng.random((700, width)).astype(np.float32)
    points = rng.random((height, width)).astype(np.float32)
    expected = np.zeros(height, bool)
    expected[rng.permutation(height)[:equal]] = True
    points[expected] = stored[rng.integers(0, 700, expected.sum())]
    # Others are as near by half of their coordinates, or by the first only, and far by the rest.
    for rows, near_by in ((slice(0, None, 2), width // 2), (slice(1, None, 2), 8)):
        others = np.flatnonzero(~expected)[rows]
        points[others, :near_by] = stored[rng.integers(0, 700, len(others)), :near_by]

    chex.assert_trees_all_equal(near_any_of_one(stored, points), expected)
    both = near_any_of_two(stored, np.stack([points, points[::-1]]))
    chex.assert_trees_all_equal(both, np.stack([expected, expected[::-1]]))


class Pair(NamedTuple):
    left: jax.Array
    right: dict[str, jax.Array]


def test_keys_name_fields_of_any_container_and_functions_take_one_item():
    example = {
        "pair": Pair(jnp.zeros(2), {"n": jnp.int32(0), "m": jnp.uint8(0)}),
        "a": jnp.zeros(3),
    }
    items = jax.tree.map(lambda leaf: jnp.ones((4, *leaf.shape), leaf.dtype), example)
    for key, width in (
        (None, 7),
        ("pair", 4),
        ("pair.right.n", 1),
        (["a", "pair.left"], 5),
        (lambda item: item["a"][:2] * item["pair"].left, 2),
        ((lambda item: {"sum": jnp.sum(item["a"])}, "pair.right"), 3),
    ):
        diversity = jaxbuf.Diversity(0.0, field=key)
        assert hash(diversity) == hash(dataclasses.replace(diversity))
        for cutoff in (0.0, 0.5):
            near = dataclasses.replace(diversity, cutoff=cutoff)
            chex.assert_shape(near.points(items), (4, width))
        buffer = jaxbuf.ItemBuffer.create(example, 3, diversity=diversity)
        assert buffer.diversity_state.points.blocks.size == 8 * 3


def test_bad_keys_name_what_there_is():
    example = {"obs": {"x": jnp.zeros(2)}, "wave": jnp.zeros(1, jnp.complex64)}
    for key, message in (
        ("obs.y", "field is 'obs.y', but items have no such field; there are obs.x, wave"),
        ("obs.x.0", "field is 'obs.x.0', but items have no such field"),
        (lambda item: item["nothing"], "KeyError: 'nothing'; it gets one item"),
        ("wave", "real numbers"),
        (lambda item: item["obs"]["x"][:0], "nothing to compare"),
    ):
        with pytest.raises(ValueError, match=message):
            jaxbuf.ItemBuffer.create(example, 3, diversity=jaxbuf.Diversity(1.0, field=key))
    with pytest.raises(ValueError, match="an array has no fields"):
        jaxbuf.ItemBuffer.create(jnp.zeros(2), 3, diversity=jaxbuf.Diversity(1.0, field="state"))
    with pytest.raises(ValueError, match=r"a field such as 'obs.position'"):
        jaxbuf.Diversity(1.0, field=3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cutoff": 1e-30}, "cutoff is 1e-30; expected a distance: 0, or from"),
        ({"p": 1e-3}, "p is 0.001; expected a norm"),
        ({"keep": "last"}, "keep is 'last'; choose from"),
        ({"keep": "best", "active": "full"}, "keep is 'best', but active is 'full'"),
    ],
)
def test_bad_configurations(options, message):
    with pytest.raises(ValueError, match=message):
        jaxbuf.Diversity(**{"cutoff": 1.0, **options})


@pytest.mark.parametrize(
    ("count", "keep"),
    quick([(1, "first"), (1, "best"), (16, "first"), (16, "best")], {(1, "first"), (16, "best")}),
)
def test_an_add_copies_neither_points_nor_storage(count, keep):
    buffer = create(jaxbuf.Diversity(1.0, within_batch="greedy", keep=keep), 5000, 11)

    def many(buffer, inputs):
        add = lambda buffer, given: (buffer.add(rows(given[0]), score=given[1]), None)  # noqa: E731
        return jax.lax.scan(add, buffer, inputs)

    inputs = jnp.zeros((3, count, 11)), jnp.zeros((3, count))
    testing.assert_no_copy(many, buffer, inputs, smallest=5000)


def test_the_preset_is_the_filter_of_a_full_buffer():
    buffer = jaxbuf.diverse_reward_prioritized(jnp.zeros(1), 3, cutoff=1.0)
    assert buffer.diversity == jaxbuf.Diversity(1.0, active="full")
    always = jaxbuf.diverse_reward_prioritized(jnp.zeros(1), 50, cutoff=1.0, active="always")
    assert always.diversity == jaxbuf.Diversity(1.0)
    drawn = jaxbuf.diverse_reward_prioritized(jnp.zeros(1), 3, temperature=1.0)
    assert drawn.sampler == jaxbuf.Softmax(1.0, replacement=False)


ELITES = jaxbuf.Diversity(1.0, keep="best")


BY_PRIORITY = jaxbuf.Prioritized(alpha=1.0)
HALVES = jaxbuf.Blend((jaxbuf.Uniform(), BY_PRIORITY), (1, 1))


@pytest.mark.parametrize(
    "sampler",
    quick([BY_PRIORITY, jaxbuf.RankBased(), jaxbuf.Recent(0.5, 2, BY_PRIORITY), HALVES], [HALVES]),
)
def test_the_default_priority_counts_items_that_leave_for_the_row(sampler):
    buffer = jaxbuf.ItemBuffer.create(jnp.float32(0), 4, sampler=sampler, diversity=ELITES)
    buffer = buffer.add(jnp.array([0.0, 5]), score=scores(1, 1), priority=jnp.array([100.0, 2]))
    buffer = buffer.add(jnp.array([0.5, 9]), score=scores(2, 0))
    metrics = buffer.metrics()
    assert (metrics["priority_max"], metrics["replaced_near_buffer"]) == (100, 1)


@pytest.mark.slow
def test_one_row_takes_the_place_of_a_whole_buffer():
    buffer = create(ELITES, 700).add(rows(10.0 * np.arange(700)), score=jnp.zeros(700))
    state = {name: getattr(buffer, name) for name in ("data", "occupancy", "extra_states")}
    buffer = create(dataclasses.replace(ELITES, cutoff=1e4), 700).replace(**state)
    buffer = jaxbuf.add(buffer, rows([5.0], 700), score=scores(1))
    assert numbers(buffer) == [700]
    assert buffer.metrics()["replaced_near_buffer"] == 700


def kept(rows, cutoff=0.0, **options):
    """The number of rows that pass the filter."""
    example, count = jax.tree.map(lambda x: x[0], rows), len(jax.tree.leaves(rows)[0])
    diversity = jaxbuf.Diversity(cutoff, **options)
    buffer = jaxbuf.ItemBuffer.create(example, 2 * count, evictor=LOWEST, diversity=diversity)
    # In two batches, so that rows meet those of their batch and those in the buffer.
    for part in (slice(None, count // 2), slice(count // 2, None)):
        items = jax.tree.map(lambda x, part=part: x[part], rows)
        buffer = jaxbuf.add(buffer, items, score=np.arange(count, dtype=np.float32)[part])
    testing.assert_valid(buffer)
    return int(buffer.size)


def is_wide(rows):
    return any(leaf.dtype.itemsize == 8 for leaf in jax.tree.leaves(rows))


NARROW = {
    "int32": np.arange(1_700_000_000, 1_700_000_100, dtype=np.int32),
    "hash": np.arange(2**32 - 100, 2**32, dtype=np.uint32),
    "negative": np.arange(-(2**31), -(2**31) + 100, dtype=np.int32),
    "int8": np.arange(-50, 50, dtype=np.int8),
    "uint8": np.arange(100, dtype=np.uint8),
    "float32": (2.0**100 * (1 + np.arange(100) * 2.0**-23)).astype(np.float32),
    "subnormal": np.arange(100).astype(np.uint32).view(np.float32),
    "bfloat16": np.arange(100, dtype=np.uint16).view(jnp.bfloat16),
    "float16": np.arange(100, dtype=np.uint16).view(np.float16),
    "bool": np.array([[i >> k & 1 for k in range(7)] for i in range(100)], bool),
}
WIDE = {
    "int64": np.arange(2**62, 2**62 + 100),
    "low": np.arange(100) << 32,
    "uint64": np.arange(2**64 - 100, 2**64 - 1, dtype=np.uint64),
    "float64": 1 + np.arange(100) * 2.0**-52,
    "tiny": np.arange(100, dtype=np.uint64).view(np.float64),
}
OTHER_NORMS = ("int32", 0.0), ("int64", 2.0), ("int32", INF)
# Those of one width are told apart alike.
ONE_OF_EACH_KIND = "int32", "negative", "uint8", "float32", "subnormal", "bool", "int64", "low"


@pytest.mark.parametrize(
    ("name", "p"),
    quick(
        [*((name, 1.0) for name in (*NARROW, *WIDE)), *OTHER_NORMS],
        [*((name, 1.0) for name in ONE_OF_EACH_KIND), *OTHER_NORMS],
    ),
)
def test_without_a_cutoff_items_differ_by_their_bits(name, p):
    rows = (NARROW | WIDE)[name]
    first, second = np.split(rows, [len(rows) // 2])
    with jax.enable_x64(is_wide(rows)):
        # Both adds have rows of which others are equal and others differ by a bit.
        assert kept(np.concatenate([first, first, second, first]), p=p) == len(rows)


T = np.arange(100)
# Numbers of several widths are compared together.
MIXED = {"a": 2**60 + T // 10, "b": (T % 10).astype(np.int8), "c": np.zeros((100, 3))}
# A norm of 0 counts coordinates, also where each takes two words.
FEW = 1_700_000_000 + np.array([[0, 0, 0], [1, 0, 0], [1, 2, 0], [5, 6, 7]], np.int32)
FEW_WIDE = FEW.astype(np.int64) * 2**32 + FEW
ONE, TWO = {"p": 0.0, "cutoff": 1.0}, {"p": 0.0, "cutoff": 2.0}
ZEROS = np.array([0.0, -0.0, 1e-45], np.float32)
KEPT = [
    (MIXED, {}, 100),
    (jax.tree.map(lambda x: np.concatenate([x, x]), MIXED), {}, 100),
    (ZEROS, {}, 2),
    (ZEROS.astype(np.float64), {}, 2),
    (np.array([np.nan, 1.0, np.inf, np.inf]), {}, 2),
    *((rows, options, 2) for rows, options in ((FEW, ONE), (FEW, TWO), (FEW_WIDE, ONE))),
    *((rows[:3], TWO, 1) for rows in (FEW, FEW_WIDE)),
]


@pytest.mark.parametrize("number", quick(range(len(KEPT)), {0, 2, 4, 6, 9}))
def test_equal_rows_are_kept_once(number):
    rows, options, count = KEPT[number]
    with jax.enable_x64(is_wide(rows)):
        assert kept(rows, **options) == count


@pytest.mark.parametrize(
    ("numbers", "cutoff", "rejected"),
    [
        (np.array([2**24, -(2**24), 2**24 + 1, -(2**24) - 1], np.int32), 1.0, 2),
        pytest.param(np.array([2**26, 2**27 + 1, 5, 6], np.int32), 16.0, 1, marks=pytest.mark.slow),
        pytest.param(np.array([2**31, 2**32 - 1, 7], np.uint32), 0.5, 2, marks=pytest.mark.slow),
        (np.array([1e30, 3e38, np.inf, -np.inf], np.float32), 0.5, 0),
        pytest.param(np.array([100, 200], np.uint8), 0.5, 0, marks=pytest.mark.slow),
        pytest.param(np.array([2**40, 2**63 - 1, -(2**63), 3]), 2.0**40, 0, marks=pytest.mark.slow),
        (np.array([2**40, 2**63 - 1, -(2**63), 3]), 2.0**39, 2),
        (np.array([1e300, -1e9, 1.0, np.inf]), 1.0, 2),
    ],
)
def test_numbers_that_float32_cannot_tell_apart_are_refused(numbers, cutoff, rejected):
    with jax.enable_x64(is_wide(numbers)):
        score = jnp.zeros(len(numbers), jnp.float32)
        for limit, expected in ((cutoff, rejected), (-1.0, 0)):
            diversity = jaxbuf.Diversity(limit)
            buffer = jaxbuf.ItemBuffer.create(jnp.asarray(numbers[0]), 8, diversity=diversity)
            buffer = jaxbuf.add(buffer, jnp.asarray(numbers), score=score)
            assert int(buffer.metrics()["rejected"]) == expected

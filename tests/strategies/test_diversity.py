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


def occupied(buffer):
    return buffer.occupancy.live(jnp.arange(buffer.capacity, dtype=jnp.int32))


def numbers(buffer):
    """The items that are held, sorted."""
    return sorted(np.asarray(buffer.data["number"])[np.asarray(occupied(buffer))].tolist())


REASONS = ("low_score", "within_batch", "near_buffer")


def refused(buffer):
    metrics = buffer.metrics()
    return {name: int(metrics[f"refused_{name}"]) for name in REASONS}


@pytest.mark.parametrize("score", [(3.0, 2.0, 1.0), (1.0, 1.0, 1.0)])
@pytest.mark.parametrize(("within_batch", "expected"), [("suppress", [0]), ("greedy", [0, 2])])
def test_a_row_is_compared_with_all_higher_ones_or_with_those_that_enter(
    within_batch, expected, score
):
    diversity = jaxbuf.Diversity(1.0, within_batch=within_batch, active="full")
    buffer = jaxbuf.add(create(diversity, 3), rows([50, 60, 70], 10), score=scores(-1, -1, -1))
    buffer = jaxbuf.add(buffer, rows([0, 1, 2]), score=scores(*score))
    assert [number for number in numbers(buffer) if number < 10] == expected
    assert refused(buffer)["within_batch"] == 3 - len(expected)


@functools.partial(jax.jit, static_argnums=2)
def near(one, others, ball):
    """Returns whether one point is near any of the others."""
    point = Points.of(one[None])
    return Points.of(others).near(point, jnp.int32(1), ball, lambda _, slot: slot >= 0)[0]


def test_a_distance_of_exactly_the_cutoff_is_refused():
    for cutoff, size in ((1.0, 1), (0.99, 2)):
        buffer = create(jaxbuf.Diversity(cutoff), 4)
        for position in (0, 1):
            buffer = jaxbuf.add(buffer, rows([position]), score=scores(1))
        assert buffer.size == size


@pytest.mark.parametrize("p", [0.5, 0.9, 1.0, 1.5, 2.0, 3.0, 100.0, INF])
def test_the_boundary_belongs_to_the_ball(p):
    point = jnp.array([0.0, 5.0, 0.0])
    for cutoff, size, expected in ((1.0, 1.0, True), (0.99, 1.0, False), (1.1, 1.1, True)):
        other = point.at[2].set(size)[None]
        assert near(point, other, Ball(cutoff, p)) == expected


def test_the_published_example_of_duplicates():
    diversity = jaxbuf.Diversity(1.0, 2.0, active="full")
    buffer = create(diversity, 10, width=2)
    distinct = [[3.0, 3.0], [5.0, 0.0], [0.0, 5.0], [5.0, 5.0], [-4.0, -4.0]]
    buffer = jaxbuf.add(buffer, rows([[1.0, 1.0]] * 5 + distinct), score=jnp.full(10, 10.0))
    assert buffer.size == 10
    buffer = jaxbuf.add(buffer, rows([[1.0, 1.0]] * 3, 10), score=jnp.full(3, 20.0))
    assert np.sum(np.all(np.asarray(buffer.data["point"]) == 1, axis=1)) <= 5
    buffer = jaxbuf.add(buffer, rows([[0.0, 0.0]], 13), score=scores(20))
    assert 13 in numbers(buffer)


def test_conditions_are_part_of_the_distance():
    example = {"state": jnp.zeros(2), "condition": jnp.float32(0)}
    for key, size in ((("state", "condition"), 2), ("state", 1)):
        diversity = jaxbuf.Diversity(0.5, 2.0, field=key)
        buffer = jaxbuf.ItemBuffer.create(example, 4, diversity=diversity)
        for condition in (0.0, 1.0, 1.0):
            item = {"state": jnp.ones((1, 2)), "condition": scores(condition)}
            buffer = jaxbuf.add(buffer, item, score=scores(0))
        assert buffer.size == size


def test_nothing_is_filtered_until_the_buffer_is_full():
    buffer = create(jaxbuf.Diversity(1.0, active="full"), 4)
    buffer = jaxbuf.add(buffer, rows([0, 0, 0]), score=scores(1, 1, 1))
    buffer = jaxbuf.add(buffer, rows([0, 0, 0, 0], 3), score=scores(2, 2, 2, 0))
    assert numbers(buffer) == [2, 3, 4, 5]
    assert sum(refused(buffer).values()) == 0
    buffer = jaxbuf.add(buffer, rows([0, 9, 8, 20], 7), score=scores(5, 4, 3, 0))
    assert numbers(buffer) == [3, 4, 5, 8]
    assert refused(buffer) == {"low_score": 1, "within_batch": 1, "near_buffer": 1}


@pytest.mark.parametrize("p", [0.5, 1.0, 2.0, 3.0, INF])
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


def test_oldest_is_no_judge_of_scores():
    buffer = create(jaxbuf.Diversity(0.5), 2, evictor=jaxbuf.Oldest())
    for i, score in enumerate((5, 4, 3)):
        buffer = jaxbuf.add(buffer, rows([i, i], 2 * i), score=scores(score, score))
    assert numbers(buffer) == [2, 4]
    assert refused(buffer) == {"low_score": 0, "within_batch": 3, "near_buffer": 0}


@pytest.mark.parametrize(
    ("p", "cutoff", "options"),
    [
        (3.0, 0.6, {"within_batch": "suppress", "active": "full"}),
        (2.0, 0.5, {"within_batch": "greedy"}),
        (0.0, 2.0, {"within_batch": "greedy"}),
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

    def compared(buffer, *score):
        searches.clear()
        points = rows([100.0 * k for k in range(len(score))])
        buffer = add(buffer, points, scores(*score))
        jax.effects_barrier()
        return buffer, bool(searches)

    diversity = jaxbuf.Diversity(cutoff=1.0, within_batch=within_batch)
    buffer, found_any = compared(create(diversity, 2), 5.0, 6.0)
    assert found_any
    held = buffer
    for low in [(1.0, 2.0), (4.9, jnp.nan), (-INF, 1.0)]:
        buffer, found_any = compared(buffer, *low)
        assert not found_any
    assert refused(buffer) == {"low_score": 5, "within_batch": 0, "near_buffer": 0}
    chex.assert_trees_all_equal(buffer.data, held.data)
    buffer, found_any = compared(buffer, 5.0, 1.0)
    assert found_any
    assert refused(buffer)["near_buffer"] == 1


@pytest.mark.parametrize("most", [2**31, 0])
def test_points_are_written_to_their_slots(monkeypatch, most):
    # More numbers than an int32 tells apart have two indices each.
    monkeypatch.setattr("jaxbuf.strategies.points._MOST", most)
    rng = np.random.default_rng(0)
    for capacity, width in [(3, 1), (130, 8), (1100, 13)]:
        expected = np.zeros((capacity, width), np.float32)
        points = Points.create(capacity, width)
        for _ in range(3):
            # Slots past the end, far and near, are dropped.
            slot = rng.permutation(capacity + 600)[:200].astype(np.int32)
            value = rng.normal(size=(200, width)).astype(np.float32)
            points = points.set(jnp.asarray(slot), jnp.asarray(value))
            held = slot < capacity
            expected[slot[held]] = value[held]
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
@pytest.mark.parametrize(("height", "width"), [(4, 40), (100, 40), (100, 48), (300, 100)])
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


def test_eager_is_the_same():
    empty = create(jaxbuf.Diversity(0.5, within_batch="greedy"), 3)
    items, score = rows([0, 1, 1]), scores(1, 2, 3)
    eager = empty.add(items, score=score)
    assert numbers(eager) == [0, 2]
    chex.assert_trees_all_equal(eager, jaxbuf.add(empty, items, score=score))


def test_without_a_filter_a_buffer_has_no_more_leaves():
    plain = jaxbuf.ItemBuffer.create(jnp.zeros(3), 4)
    assert len(jax.tree.leaves(plain)) == 5
    assert "refused_near_buffer" not in plain.metrics()


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
        chex.assert_shape(diversity.points(items), (4, width))
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
        ({"cutoff": np.nan}, "cutoff is nan; expected a distance"),
        ({"cutoff": INF}, "cutoff is inf"),
        ({"cutoff": 1e-30}, "cutoff is 1e-30; expected a distance: 0, or from"),
        ({"p": -1}, "p is -1; expected a norm"),
        ({"p": 1e-3}, "p is 0.001; expected a norm"),
        ({"p": np.nan}, "p is nan"),
        ({"within_batch": "none"}, "within_batch is 'none'; choose from"),
        ({"active": "never"}, "active is 'never'; choose from"),
        ({"keep": "last"}, "keep is 'last'; choose from"),
        ({"keep": "best", "active": "full"}, "keep is 'best', but active is 'full'"),
    ],
)
def test_bad_configurations(options, message):
    with pytest.raises(ValueError, match=message):
        jaxbuf.Diversity(**{"cutoff": 1.0, **options})


def test_bad_use():
    with pytest.raises(ValueError, match=r"expected None or jaxbuf.Diversity\(cutoff"):
        jaxbuf.ItemBuffer.create(jnp.zeros(2), 3, diversity=jaxbuf.Diversity)
    buffer = jaxbuf.ItemBuffer.create(jnp.zeros(2), 3, diversity=jaxbuf.Diversity(1.0))
    with pytest.raises(ValueError, match=r"Diversity.* uses the score of items; pass score"):
        buffer.add(jnp.zeros((1, 2)))
    assert jaxbuf.Diversity(np.float32(1), np.int32(2)) == jaxbuf.Diversity(1.0, 2.0)


@pytest.mark.parametrize("keep", ["first", "best"])
@pytest.mark.parametrize("count", [1, 16])
def test_an_add_copies_neither_points_nor_storage(count, keep):
    buffer = create(jaxbuf.Diversity(1.0, within_batch="greedy", keep=keep), 5000, 11)

    def many(buffer, points, score):
        def step(buffer, inputs):
            return buffer.add(rows(inputs[0]), score=inputs[1]), None

        return jax.lax.scan(step, buffer, (points, score))[0]

    inputs = jnp.zeros((3, count, 11)), jnp.zeros((3, count))
    text = jax.jit(many, donate_argnums=0).lower(buffer, *inputs).compile().as_text()
    big = [leaf.shape for leaf in jax.tree.leaves(buffer) if leaf.size >= 5000]
    shapes = ["[" + ",".join(map(str, shape)) + "]" for shape in big]
    assert len(shapes) == 4 + (keep == "best")
    lines = [line for line in text.splitlines() if " copy(" in line]
    assert [line for line in lines if any(shape in line for shape in shapes)] == []


def test_the_preset_is_the_filter_of_a_full_buffer():
    buffer = jaxbuf.diverse_reward_prioritized(jnp.zeros(1), 3, cutoff=1.0)
    buffer = jaxbuf.add(buffer, jnp.zeros((3, 1)), score=scores(1, 2, 3))
    assert buffer.size == 3
    buffer = jaxbuf.add(buffer, jnp.array([[5.0], [6.0], [9.0], [1.0]]), score=scores(9, 8, 0, 7))
    assert sorted(buffer.data[:, 0].tolist()) == [0, 0, 5]
    sample = jaxbuf.sample(buffer, jax.random.key(0), 3)
    assert sorted(sample.data[:, 0].tolist()) == [0, 0, 5]
    always = jaxbuf.diverse_reward_prioritized(jnp.zeros(1), 50, cutoff=1.0, active="always")
    always = jaxbuf.add(always, jnp.zeros((25, 1)), score=scores(*range(25)))
    always = jaxbuf.add(always, jnp.arange(25.0)[:, None], score=scores(*range(25)))
    assert sorted(always.data[: int(always.size), 0].tolist()) == [0, 24]
    drawn = jaxbuf.diverse_reward_prioritized(jnp.zeros(1), 3, temperature=1.0)
    assert drawn.sampler == jaxbuf.Softmax(1.0, replacement=False)


def test_norms_below_one_are_those_of_torch_cdist():
    """Of (3, 4, 0): 2 coordinates differ, and (√3 + √4)² is 7 + 4√3, or 13.93."""
    origin, other = jnp.zeros(3), jnp.array([[3.0, 4.0, 0.0]])
    for p, distance in ((0.0, 2.0), (0.5, 7 + 4 * math.sqrt(3))):
        assert near(origin, other, Ball(distance * 1.001, p))
        assert not near(origin, other, Ball(distance * 0.999, p))
    assert near(origin, other, Ball(2.0, 0.0))
    assert near(origin, jnp.array([[0.0, 1e-30, 0.0]]), Ball(1.0, 0.0))


def test_beside_limits_on_use():
    """With few slots, a filter of distance looks them up in the set of used slots."""
    freshness = jaxbuf.Freshness(max_use=1)
    diversity = jaxbuf.Diversity(0.5)
    buffer = jaxbuf.ItemBuffer.create(jnp.zeros(2), 4, freshness=freshness, diversity=diversity)
    points = jnp.arange(6.0).reshape(3, 2)
    buffer = buffer.add(points, score=jnp.arange(3.0))
    buffer = buffer.mark_used(jax.tree.map(lambda leaf: leaf[:1], buffer.latest(3).slots))
    # Only the point that retired is far from all others, and comes again.
    buffer = buffer.add(points, score=jnp.arange(3.0))
    assert int(buffer.size) == 3
    assert int(buffer.metrics()["refused_near_buffer"]) == 2


ELITES = jaxbuf.Diversity(1.0, keep="best")


def test_of_near_items_the_best_stays():
    buffer = create(ELITES, 4, evictor=jaxbuf.Oldest())
    buffer = buffer.add(rows([0, 1.5, 9]), score=scores(2, 3, 1))
    # Above one of its neighbors only; equal to one; above both, so that both leave.
    for number, score, held in ((3, 2.5, [0, 1, 2]), (4, 3, [0, 1, 2]), (5, 3.5, [2, 5])):
        buffer = jaxbuf.add(buffer, rows([0.75], number), score=scores(score))
        assert numbers(buffer) == held
    metrics = buffer.metrics()
    assert (metrics["refused_near_buffer"], metrics["replaced_near_buffer"]) == (2, 2)
    best = buffer.highest(3)
    assert best.data["number"].tolist()[:2] == [5, 2]
    assert best.valid.tolist() == [True, True, False]
    # A score that changes counts from then on.
    buffer = buffer.update_score(best.slots, jnp.zeros(3))
    buffer = buffer.add(rows([0.75], 6), score=scores(0.5)).remove(best.slots)
    assert numbers(buffer) == [6]


@pytest.mark.parametrize(("within_batch", "entered"), [("suppress", [0]), ("greedy", [0, 2])])
def test_replacing_goes_by_the_rows_that_are_added(within_batch, entered):
    buffer = create(dataclasses.replace(ELITES, within_batch=within_batch), 6)
    buffer = buffer.add(rows([2.5, 50], 10), score=scores(0, 9))
    buffer = buffer.add(rows([0, 0.9, 1.8, 50.5]), score=scores(3, 2, 1, 8))
    near = [] if 2 in entered else [10]
    assert numbers(buffer) == [*entered, *near, 11]
    assert buffer.metrics()["replaced_near_buffer"] == len(entered) - 1


BY_PRIORITY = jaxbuf.Prioritized(alpha=1.0)


@pytest.mark.parametrize(
    "sampler",
    [
        BY_PRIORITY,
        jaxbuf.RankBased(),
        jaxbuf.Recent(0.5, 2, BY_PRIORITY),
        jaxbuf.Blend((jaxbuf.Uniform(), BY_PRIORITY), (1, 1)),
    ],
)
def test_the_default_priority_counts_items_that_leave_for_the_row(sampler):
    buffer = jaxbuf.ItemBuffer.create(jnp.float32(0), 4, sampler=sampler, diversity=ELITES)
    buffer = buffer.add(jnp.array([0.0, 5]), score=scores(1, 1), priority=jnp.array([100.0, 2]))
    buffer = buffer.add(jnp.array([0.5, 9]), score=scores(2, 0))
    metrics = buffer.metrics()
    assert (metrics["priority_max"], metrics["replaced_near_buffer"]) == (100, 1)


def test_a_full_buffer_asks_lowest_first_and_fills_what_became_free():
    buffer = create(ELITES, 3).add(rows([0, 10, 20]), score=scores(1, 2, 3))
    buffer = buffer.add(rows([0, 30, 10], 3), score=scores(0.5, 0.7, 2.5))
    assert numbers(buffer) == [0, 2, 5]
    assert refused(buffer) == {"low_score": 2, "within_batch": 0, "near_buffer": 0}
    many = create(ELITES, 700).add(rows(10.0 * np.arange(700)), score=jnp.zeros(700))
    wide = dataclasses.replace(ELITES, cutoff=1e4)
    many = jaxbuf.ItemBuffer.create(many.example, 700, evictor=LOWEST, diversity=wide).replace(
        data=many.data, occupancy=many.occupancy, extra_states=many.extra_states
    )
    many = jaxbuf.add(many, rows([5.0], 700), score=scores(1))
    assert numbers(many) == [700]
    assert many.metrics()["replaced_near_buffer"] == 700


def test_elites_of_several_seeds_in_a_mixture_and_on_the_host():
    buffer = create(ELITES, 4, evictor=jaxbuf.Oldest()).add(rows([0, 9]), score=scores(1, 1))
    better, worse = jnp.array([[2.0, 0.0], [0.0, 2.0]])[:, None], rows([0, 9], 2)
    twice = jax.tree.map(lambda leaf: jnp.stack([leaf] * 2), buffer)
    both = jax.jit(jax.vmap(lambda buffer, score: buffer.add(worse, score=score[0])))(twice, better)
    one, other = (jax.tree.map(lambda leaf, i=i: leaf[i], both) for i in (0, 1))
    assert (numbers(one), numbers(other)) == ([1, 2], [0, 3])
    mixture = jaxbuf.Mixture.create([buffer, other], [1, 1])
    mixture = jaxbuf.add(mixture, worse, score=better[0, 0], part=0, donate=False)
    assert mixture.highest(4).data["number"].tolist() == [2, 3, 1, 0]
    hosted = jaxbuf.Hosted.create(lambda: buffer.clear()).add(worse, score=scores(1, 1))
    hosted = jaxbuf.add(hosted, rows([9], 7), score=scores(5))
    assert hosted.highest(2).data["number"].tolist() == [7, 2]


def test_what_cannot_be_removed_is_no_elite():
    @dataclasses.dataclass(frozen=True)
    class Fixed(jaxbuf.strategies.Sampler):
        uses_priority = True

        def draw(self, state, key, batch_size, occupancy): ...

    with pytest.raises(ValueError, match="cannot be told that an item retires"):
        jaxbuf.ItemBuffer.create(jnp.zeros(2), 3, sampler=Fixed(), diversity=ELITES)


def kept(rows, example=None, cutoff=0.0, **options):
    """The number of rows that pass the filter, one of each of these."""
    example = jax.tree.map(lambda x: x[0], rows) if example is None else example
    count = len(jax.tree.leaves(rows)[0])
    buffer = jaxbuf.ItemBuffer.create(
        example,
        2 * count,
        evictor=jaxbuf.Lowest(),
        diversity=jaxbuf.Diversity(cutoff, **options),
    )
    # In two batches, so that rows meet those of their batch and those in the buffer.
    half = count // 2
    for part in (slice(None, half), slice(half, None)):
        items = jax.tree.map(lambda x, part=part: x[part], rows)
        buffer = jaxbuf.add(buffer, items, score=np.arange(count, dtype=np.float32)[part])
    testing.assert_valid(buffer)
    return int(buffer.size)


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


@pytest.mark.parametrize(
    ("name", "p"),
    [(name, 1.0) for name in (*NARROW, *WIDE)] + [("int32", 0.0), ("int64", 2.0), ("int32", INF)],
)
def test_without_a_cutoff_items_differ_by_their_bits(name, p):
    rows = (NARROW | WIDE)[name]
    first, second = np.split(rows, [len(rows) // 2])
    with jax.enable_x64(rows.dtype.itemsize == 8):
        # Both adds have rows of which others are equal and others differ by a bit.
        assert kept(np.concatenate([first, first, second, first]), p=p) == len(rows)


def test_numbers_of_several_widths_are_compared_together():
    with jax.enable_x64(True):
        t = np.arange(100)
        rows = {"a": 2**60 + t // 10, "b": (t % 10).astype(np.int8), "c": np.zeros((100, 3))}
        assert kept(rows) == 100
        assert kept(jax.tree.map(lambda x: np.concatenate([x, x]), rows)) == 100


def test_zeros_of_both_signs_are_equal_and_nan_is_refused():
    zeros = np.array([0.0, -0.0, 1e-45], np.float32)
    assert kept(zeros) == 2
    with jax.enable_x64(True):
        assert kept(zeros.astype(np.float64)) == 2
        assert kept(np.array([np.nan, 1.0, np.inf, np.inf])) == 2


def test_coordinates_that_differ_are_counted_by_their_bits():
    """A norm of 0 counts coordinates, also where each takes two words."""
    rows = 1_700_000_000 + np.array([[0, 0, 0], [1, 0, 0], [1, 2, 0], [5, 6, 7]], np.int32)
    assert kept(rows, p=0.0, cutoff=1.0) == 2
    assert kept(rows, p=0.0, cutoff=2.0) == 2
    assert kept(rows[:3], p=0.0, cutoff=2.0) == 1
    with jax.enable_x64(True):
        wide = rows.astype(np.int64) * 2**32 + rows
        assert kept(wide, p=0.0, cutoff=1.0) == 2
        assert kept(wide[:3], p=0.0, cutoff=2.0) == 1


@pytest.mark.parametrize(
    ("numbers", "cutoff", "rejected"),
    [
        (np.array([2**24, -(2**24), 2**24 + 1, -(2**24) - 1], np.int32), 1.0, 2),
        (np.array([2**26, 2**27 + 1, 5, 6], np.int32), 16.0, 1),
        (np.array([2**31, 2**32 - 1, 7], np.uint32), 0.5, 2),
        (np.array([1e30, 3e38, np.inf, -np.inf], np.float32), 0.5, 0),
        (np.array([100, 200], np.uint8), 0.5, 0),
        (np.array([2**40, 2**63 - 1, -(2**63), 3]), 2.0**40, 0),
        (np.array([2**40, 2**63 - 1, -(2**63), 3]), 2.0**39, 2),
        (np.array([1e300, -1e9, 1.0, np.inf]), 1.0, 2),
    ],
)
def test_numbers_that_float32_cannot_tell_apart_are_refused(numbers, cutoff, rejected):
    with jax.enable_x64(numbers.dtype.itemsize == 8):
        found = {}
        for limit in (cutoff, -1.0):
            buffer = jaxbuf.ItemBuffer.create(
                jnp.asarray(numbers[0]), 8, diversity=jaxbuf.Diversity(limit)
            )
            score = jnp.zeros(len(numbers))
            buffer = jaxbuf.add(buffer, jnp.asarray(numbers), score=jnp.float32(score))
            found[limit] = int(buffer.metrics()["rejected"])
        assert found == {cutoff: rejected, -1.0: 0}

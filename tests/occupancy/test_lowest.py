"""The evictor `Lowest`: which items stay, against a model that sorts everything."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbuf
from jaxbuf import testing
from jaxbuf.occupancy.ranking import Ranking
from tests.models import scores as reference_scores

REVEAL = jaxbuf.Uniform(replacement=False)
INF = float("inf")


def create(capacity, sampler=REVEAL):
    return jaxbuf.ItemBuffer.create(
        jnp.int32(0), capacity, sampler=sampler, evictor=jaxbuf.Lowest()
    )


def floats(*values):
    return jnp.array(values, jnp.float32)


def integers(*values):
    return jnp.array(values, jnp.int32)


report = jax.jit(lambda buffer: buffer.metrics())


def held(buffer):
    """The items, sorted."""
    sample = jaxbuf.sample(buffer, jax.random.key(0), buffer.capacity)
    return sorted(np.asarray(sample.data)[np.asarray(sample.valid)].tolist())


def test_the_lowest_scores_go():
    buffer = jaxbuf.add(create(3), integers(10, 20, 30), score=floats(10, 20, 30))
    buffer = jaxbuf.add(buffer, integers(5, 25), score=floats(5, 25))
    assert held(buffer) == [20, 25, 30]


def test_never_more_than_the_capacity():
    buffer = create(5)
    for i in range(20):
        rows = 3 * i + jnp.arange(3, dtype=jnp.int32)
        buffer = jaxbuf.add(buffer, rows, score=rows.astype(jnp.float32))
        assert buffer.size == min(3 * (i + 1), 5)
        assert held(buffer) == list(range(max(3 * i - 2, 0), 3 * i + 3))


def test_of_equal_scores_the_newer_stays():
    buffer = jaxbuf.add(create(3), integers(1, 2, 3), score=floats(0, 0, 0))
    buffer = jaxbuf.add(buffer, integers(4), score=floats(0))
    assert held(buffer) == [2, 3, 4]
    buffer = jaxbuf.add(buffer, integers(5, 6, 7, 8), score=floats(-0.0, 0.0, -0.0, 0.0))
    assert held(buffer) == [6, 7, 8]


def test_the_smallest_scores_are_not_zero():
    tiny = np.float32(1e-45)
    buffer = jaxbuf.add(create(3), integers(1, 2, 3), score=floats(tiny, 2 * tiny, 0))
    buffer = jaxbuf.add(buffer, integers(4, 5), score=floats(0, -tiny))
    assert held(buffer) == [1, 2, 4]
    sampler = jaxbuf.RankBased(by="score", replacement=False)
    buffer = jaxbuf.add(create(3, sampler), integers(1, 2), score=floats(0, tiny))
    testing.assert_valid(buffer)


def test_infinite_scores_are_legal_and_nan_is_refused():
    buffer = jaxbuf.add(create(3), integers(1, 2, 3), score=floats(-INF, 5, INF))
    buffer = jaxbuf.add(buffer, integers(4), score=floats(-3e38))
    assert held(buffer) == [2, 3, 4]
    buffer = jaxbuf.add(buffer, integers(5, 6), score=floats(np.nan, 1))
    assert held(buffer) == [2, 3, 6]
    metrics = buffer.metrics()
    assert (metrics["rejected"], metrics["adds"]) == (1, 5)
    assert metrics["score_min"] == 1
    assert metrics["score_max"] == INF
    buffer = jaxbuf.add(buffer, integers(7, 8, 9), score=floats(INF, INF, -INF))
    assert held(buffer) == [3, 7, 8]
    buffer = jaxbuf.add(create(2), integers(1, 2, 3), score=floats(-INF, -INF, -INF))
    assert held(buffer) == [2, 3]


def test_masked_rows_cost_nothing():
    buffer = jaxbuf.add(create(2), integers(1, 2), score=floats(1, 2))
    buffer = jaxbuf.add(
        buffer, integers(3, 4), score=floats(9, np.nan), mask=jnp.array([False, False])
    )
    assert held(buffer) == [1, 2]
    assert buffer.metrics()["rejected"] == 0
    assert buffer.metrics()["adds"] == 2
    buffer = jaxbuf.add(
        create(3), integers(1, 2, 3, 4), score=floats(1, 9, 3, 2), mask=jnp.array([1, 0, 1, 1]) > 0
    )
    assert held(buffer) == [1, 3, 4]


def test_a_batch_larger_than_the_capacity():
    buffer = jaxbuf.add(create(3), integers(1, 2), score=floats(4, 0))
    buffer = jaxbuf.add(buffer, integers(*range(10, 20)), score=floats(*[3, 1, 4, 1, 5] * 2))
    assert held(buffer) == [14, 17, 19]


def test_slots_go_stale_when_their_item_goes():
    buffer = create(3, jaxbuf.Prioritized(alpha=1.0, replacement=False))
    buffer = jaxbuf.add(buffer, integers(1, 2, 3), score=floats(1, 2, 3))
    sample = jaxbuf.sample(buffer, jax.random.key(0), 3)
    buffer = jaxbuf.add(buffer, integers(4, 0), score=floats(4, 0))
    assert held(buffer) == [2, 3, 4]
    buffer = jaxbuf.update_priority(buffer, sample.slots, floats(7, 7, 7))
    now = jaxbuf.sample(buffer, jax.random.key(1), 3)
    probability = dict(zip(now.data.tolist(), now.probability.tolist(), strict=True))
    assert probability == pytest.approx({2: 7 / 15, 3: 7 / 15, 4: 1 / 15})


def test_clear_forgets_the_items_and_keeps_slots_stale():
    buffer = create(2, jaxbuf.Prioritized(alpha=1.0, replacement=False))
    buffer = jaxbuf.add(buffer, integers(1, 2), score=floats(8, 9))
    old = jaxbuf.sample(buffer, jax.random.key(0), 2).slots
    cleared = buffer.clear()
    assert cleared.size == 0
    assert not jaxbuf.sample(cleared, jax.random.key(0), 2).valid.any()
    assert not {id(leaf) for leaf in jax.tree.leaves(cleared)} & {
        id(leaf) for leaf in jax.tree.leaves(buffer)
    }
    cleared = jaxbuf.add(cleared, integers(3, 4), score=floats(1, 2))
    assert held(cleared) == [3, 4]
    cleared = jaxbuf.update_priority(cleared, old, floats(50, 70))
    assert cleared.metrics()["priority_max"] == 1


def test_a_missing_score():
    with pytest.raises(ValueError, match=r"pass score"):
        create(3).add(integers(1))
    with pytest.raises(ValueError, match=r"pass score"):
        Ranking.create(3).place(2, None, None)


def test_a_score_of_another_shape():
    with pytest.raises(ValueError, match=r"score has shape \(3,\)"):
        create(3).add(integers(1, 2), score=floats(1, 2, 3))


def test_an_empty_batch_changes_nothing():
    buffer = jaxbuf.add(create(3), integers(1), score=floats(1))
    assert held(jaxbuf.add(buffer, jnp.zeros(0, jnp.int32), score=jnp.zeros(0))) == [1]


SHAPES = [(1, 1), (3, 2), (8, 8), (9, 1), (70, 13), (5, 12), (600, 37), (5000, 90)]


def batches(rows, count, seed):
    """Few different scores, so that ties are everywhere."""
    rng = np.random.default_rng(seed)
    for i in range(count):
        score = rng.choice([-INF, -2.5, -0.0, 0.0, 1e-30, 3.0, INF, np.nan], rows)
        if i % 3 == 1:
            score = rng.normal(size=rows) + i / 10
        yield (
            np.arange(i * rows, (i + 1) * rows, dtype=np.int32),
            score.astype(np.float32),
            rng.random(rows) < 0.7,
        )


@pytest.mark.parametrize(("capacity", "rows"), SHAPES)
def test_random_adds_against_the_model(capacity, rows):
    buffer, twin = create(capacity), reference_scores.Lowest(capacity)
    for i, (items, score, mask) in enumerate(batches(rows, 500 if capacity == 9 else 60, 0)):
        mask = mask if i % 2 else None
        twin.add(items.tolist(), score.tolist(), mask)
        buffer = jaxbuf.add(buffer, items, score=score, mask=mask)
        assert held(buffer) == twin.data
        metrics = jax.device_get(report(buffer))
        assert (metrics["adds"], metrics["rejected"]) == (twin.adds, twin.rejected)
    testing.assert_valid(buffer)


def test_ties_are_exact_while_the_numbers_wrap():
    buffer, twin = create(6), reference_scores.Lowest(6)
    buffer = buffer.replace(occupancy=buffer.occupancy.replace(arrivals=jnp.uint32(2**32 - 40)))
    for items, score, mask in batches(5, 30, 3):
        score = np.where(score > 0, 1.0, 0.0).astype(np.float32)
        twin.add(items.tolist(), score.tolist(), mask)
        buffer = jaxbuf.add(buffer, items, score=score, mask=mask)
        assert held(buffer) == twin.data


def test_vmapped_buffers_are_independent():
    many = jax.jit(jax.vmap(lambda _: create(2)))(jnp.arange(3))
    items = jnp.arange(9, dtype=jnp.int32).reshape(3, 3)
    score = jnp.stack([floats(1, 2, 3), floats(3, 2, 1), floats(1, 3, 2)])
    many = jax.jit(jax.vmap(lambda buffer, items, score: buffer.add(items, score=score)))(
        many, items, score
    )
    np.testing.assert_array_equal(jnp.sort(many.data, axis=1), [[1, 2], [3, 4], [7, 8]])
    np.testing.assert_array_equal(jax.jit(jax.vmap(lambda buffer: buffer.size))(many), [2, 2, 2])


@pytest.mark.parametrize("rows", [1, 16])
def test_an_add_copies_neither_the_tree_nor_the_storage(rows):
    capacity = 5000

    def step(buffer, inputs):
        return buffer.add(*inputs[:1], score=inputs[1]), None

    def many(buffer, items, score):
        return jax.lax.scan(step, buffer, (items, score))[0]

    inputs = jnp.zeros((7, rows), jnp.int32), jnp.zeros((7, rows), jnp.float32)
    program = jax.jit(many, donate_argnums=0).lower(create(capacity), *inputs).compile().as_text()
    nodes = create(capacity).occupancy.nodes.shape[0]
    copies = [
        line
        for line in program.splitlines()
        if " copy(" in line and (f"u32[{nodes},2]" in line or f"s32[{capacity}]" in line)
    ]
    assert copies == []

"""The evictor `Lowest`: which items stay, against a model that sorts everything."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbuf
from jaxbuf import testing
from jaxbuf.occupancy.ranking import Ranking
from tests.models import items as reference

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


def held(buffer):
    """The items, sorted."""
    sample = jaxbuf.sample(buffer, jax.random.key(0), buffer.capacity)
    return sorted(np.asarray(sample.data)[np.asarray(sample.valid)].tolist())


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


def test_clear_keeps_slots_stale():
    buffer = jaxbuf.add(create(2), integers(1, 2), score=floats(8, 9))
    old = jaxbuf.sample(buffer, jax.random.key(0), 2).slots
    cleared = jaxbuf.add(buffer.clear(), integers(3, 4), score=floats(1, 2))
    assert held(cleared) == [3, 4]
    assert not cleared.holds(old).any()


def test_a_ranking_needs_scores():
    with pytest.raises(ValueError, match="pass score"):
        Ranking.create(3).place(2, None, None)


@pytest.mark.parametrize(
    ("capacity", "rows", "arrivals"), [(6, 5, 2**32 - 40), (600, 37, 0), (5000, 190, 2**32 - 3000)]
)
def test_large_buffers_agree_with_the_model_while_the_numbers_of_arrivals_wrap(
    capacity, rows, arrivals
):
    """`tests/contract/test_machines.py` has small ones."""
    buffer, twin = create(capacity), reference.ItemBuffer(capacity, lowest=True)
    buffer = buffer.replace(occupancy=buffer.occupancy.replace(arrivals=jnp.uint32(arrivals)))
    rng = np.random.default_rng(0)
    for i in range(40):
        # Few different scores, so that ties are everywhere.
        score = rng.choice([-INF, -2.5, -0.0, 0.0, 1e-30, 3.0, INF, np.nan], rows)
        if i % 3 == 1:
            score = rng.normal(size=rows) + i / 10
        score, mask = score.astype(np.float32), rng.random(rows) < 0.7
        items = np.arange(i * rows, (i + 1) * rows, dtype=np.int32)
        twin.add(items.tolist(), None, mask, score)
        buffer = jaxbuf.add(buffer, items, score=score, mask=mask)
        assert held(buffer) == sorted(item.data for item in twin.live)
    testing.assert_valid(buffer)

"""Baselines and their filter agree with published sequences and a NumPy twin."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.models.baseline import Baselines, Filter

pytest.importorskip("mpi4jax")

import jaxbuf
from jaxbuf.mpi import (
    EMA,
    BaselineFilter,
    Manager,
    Min,
    Percentile,
    baseline_value,
    combine,
    update_average,
)

_NONE = -math.inf


@functools.partial(jax.jit, static_argnums=0)
def _step(baseline, buffer, average, score):
    buffer = buffer.add(score, score=score)
    average = update_average(baseline, average, score)
    full = buffer.size == buffer.capacity
    return buffer, average, baseline_value(baseline, average, buffer.occupancy.score, full)


def _values(baseline, batches, capacity):
    buffer = jaxbuf.reward_prioritized(jnp.float32(0), capacity)
    average = jnp.float32(_NONE)
    values = []
    for batch in batches:
        buffer, average, value = _step(baseline, buffer, average, jnp.asarray(batch, jnp.float32))
        values.append(float(value))
    return values


@pytest.mark.parametrize(
    ("baseline", "expected"),
    [
        (Min(), [0, 0, 1, 2, 3, 4, 5, 6]),
        (Percentile(0.1), [0, 0.15, 1.15, 2.15, 3.15, 4.15, 5.15, 6.15]),
        (EMA(0.1), [0, 0.1, 0.29, 0.561, 0.9049, 1.31441, 1.782969, 2.3046721]),
    ],
)
def test_the_documented_sequences(baseline, expected):
    batches = [[i, i + 0.5] for i in range(8)]
    np.testing.assert_allclose(_values(baseline, batches, 4), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("baseline", "kind"), [(Min(0.3), "min"), (Percentile(0.37, 0.3), "p"), (EMA(0.3), "ema")]
)
def test_random_batches_as_in_the_twin(baseline, kind):
    random = np.random.default_rng(0)
    batches = random.normal(size=(30, 3)).astype(np.float32)
    batches[random.random(batches.shape) < 0.3] = -np.inf
    batches[random.random(batches.shape) < 0.05] = np.inf
    batches[0] = -np.inf
    twin = Baselines(7, kind, alpha=0.3, q=0.37)
    expected = []
    for batch in batches:
        twin.add(batch.tolist())
        expected.append(twin.value())
    assert expected[0] == _NONE
    np.testing.assert_allclose(_values(baseline, batches, 7), expected, rtol=1e-5)


def test_infinite_scores_start_no_average():
    average = update_average(EMA(), jnp.float32(_NONE), jnp.array([-jnp.inf, 1.0, 2.0, 3.0, 4.0]))
    assert float(average) == 1.0
    for batch in ([jnp.inf], [-jnp.inf], [jnp.nan], []):
        assert update_average(EMA(), average, jnp.array(batch, jnp.float32)) == average


def test_masked_rows_do_not_count():
    mask = jnp.array([False, True])
    assert update_average(EMA(), jnp.float32(_NONE), jnp.array([1.0, 2.0]), mask) == 2.0
    none = jnp.zeros(2, bool)
    assert update_average(EMA(), jnp.float32(5), jnp.array([1.0, 2.0]), none) == 5.0


def test_a_full_buffer_without_finite_scores_falls_back():
    score = jnp.array([jnp.inf, -jnp.inf, jnp.nan])
    for baseline in (Min(), Percentile()):
        assert baseline_value(baseline, jnp.float32(3), score, True) == 3.0
        assert baseline_value(baseline, jnp.float32(3), score + jnp.float32(1), False) == 3.0


@pytest.mark.parametrize(
    ("baseline", "sent", "skipped"),
    [(_NONE, [0, 1, 2, 3, 4], 0), (100.0, [], 1), (2.0, [2, 3, 4], 0)],
)
def test_the_filter_passes_these_rows(baseline, sent, skipped):
    after, mask = BaselineFilter.create().select(jnp.arange(5.0), baseline)

    assert np.flatnonzero(mask).tolist() == sent
    assert {name: int(count) for name, count in after.metrics().items()} == {
        "offered": 5,
        "kept": len(sent),
        "sent": len(sent),
        "skipped": skipped,
    }


def test_a_refresh_goes_out_whole_and_is_counted_as_sent():
    worker = BaselineFilter.create(refresh_after=2)
    worker, first = worker.select(jnp.arange(5.0), 100.0)
    worker, second = worker.select(jnp.arange(5.0), 100.0)

    assert not first.any()
    assert second.all()
    counts = {name: int(count) for name, count in worker.metrics().items()}
    assert counts == {"offered": 10, "kept": 0, "sent": 5, "skipped": 1}


@pytest.mark.parametrize("refresh_after", [None, 1, 3])
def test_random_filtering_as_in_the_twin(refresh_after):
    random = np.random.default_rng(1)
    select = jax.jit(BaselineFilter.select)
    worker, twin = BaselineFilter.create(refresh_after), Filter(refresh_after)
    for _ in range(60):
        score = random.integers(0, 6, 4).astype(np.float32)
        score[random.random(4) < 0.1] = np.nan
        baseline = np.float32(random.choice([_NONE, 2, 4, 9, 9]))
        mask = random.random(4) < random.choice([0, 0.8])
        worker, sent = select(worker, score, baseline, mask)
        assert sent.tolist() == twin.select(score, baseline, mask)
        assert {k: int(v) for k, v in worker.metrics().items()} == twin.counts


def test_eager_vmapped_and_scanned_alike():
    score = jnp.tile(jnp.arange(5.0), (6, 1))
    start = BaselineFilter.create(2)

    def step(worker, row):
        return worker.select(row, jnp.float32(100))

    scanned, sent = jax.lax.scan(step, start, score)
    eager = start
    for row, rows_sent in zip(score, sent, strict=True):
        eager, mask = eager.select(row, 100.0)
        assert mask.tolist() == rows_sent.tolist()
    assert eager.metrics() == scanned.metrics()

    many = jax.jit(jax.vmap(lambda _: start))(jnp.arange(3))
    vmapped, _ = jax.jit(jax.vmap(step))(many, score[:3])
    assert vmapped.metrics()["skipped"].tolist() == [1, 1, 1]


def test_configurations_are_compared_by_value():
    assert EMA(np.float32(0.5)) == EMA(0.5)
    assert hash(Percentile(np.float64(0.25), 0.5)) == hash(Percentile(0.25, 0.5))
    assert BaselineFilter.create(np.int64(2)).refresh_after == 2


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Min(1.5), "alpha is 1.5; expected a number above 0 and at most 1"),
        (lambda: combine(jnp.float32(0), None, "median"), "by is 'median'; choose from"),
        (
            lambda: BaselineFilter.create().select(jnp.arange(3.0), 0.0, jnp.ones(2, bool)),
            "mask has shape",
        ),
    ],
)
def test_bad_choices_say_why(build, message):
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize("sampler", [jaxbuf.Softmax(), jaxbuf.RankBased(by="score")], ids=str)
def test_a_baseline_uses_the_scores_that_a_sampler_keeps(sampler):
    buffer = jaxbuf.ItemBuffer.create(jnp.int32(0), 3, sampler=sampler)
    manager = Manager.create(buffer, 1, baseline=Min(0.5))
    for score in ([4.0, 2.0], [3.0]):
        items = jnp.arange(len(score), dtype=jnp.int32)
        manager, _ = manager.receive(items, score=jnp.array(score))
    assert manager.baseline_value() == 2.0
    by_priority = jaxbuf.ItemBuffer.create(jnp.int32(0), 3, sampler=jaxbuf.RankBased())
    with pytest.raises(ValueError, match="which keeps none"):
        Manager.create(by_priority, 1, baseline=Min(0.5))

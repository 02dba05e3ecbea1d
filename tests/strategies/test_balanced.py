"""`Balanced`: the same number of windows from every environment, whatever each of them holds."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import jaxbuf

LENGTH = 8


def filled(held, sampler, sequence_length=1, **options):
    """A buffer whose environments hold so many steps each; a step is ``100 * env + t``."""
    held = np.asarray(held)
    buffer = jaxbuf.TrajectoryBuffer.create(
        jax.ShapeDtypeStruct((), jnp.int32),
        len(held),
        LENGTH,
        sequence_length=sequence_length,
        sampler=sampler,
        **options,
    )
    t = np.arange(LENGTH + 3, dtype=np.int32)
    # The rings have wrapped where there is enough.
    mask = t < np.where(held == LENGTH, LENGTH + 3, held)[:, None]
    return buffer.add(100 * np.arange(len(held), dtype=np.int32)[:, None] + t, mask=mask)


@functools.partial(jax.jit, static_argnums=(1, 2))
def draws(buffer, rows, number):
    keys = jax.random.split(jax.random.key(3), number)
    return jax.vmap(lambda key: buffer.sample(key, rows))(keys)


def shared_out(rows, held):
    """The numbers of rows, but for who gives one more: dealt one after the other."""
    left, given = list(held), [0] * len(held)
    while rows and any(left):
        having = [env for env, number in enumerate(left) if number]
        if rows < len(having):
            break
        for env in having:
            left[env] -= 1
            given[env] += 1
            rows -= 1
    return given, rows


EQUAL, UNEQUAL = (8, 8, 8), (5, 8, 1, 3)


@pytest.mark.parametrize(
    ("held", "rows"),
    [(EQUAL, 1), (EQUAL, 6), (UNEQUAL, 1), (UNEQUAL, 7), ((0, 6, 2), 7), ((4,), 6)],
)
def test_numbers_and_probabilities_with_replacement(held, rows):
    buffer = filled(held, jaxbuf.Balanced())
    batch = draws(buffer, rows, 600)
    assert batch.valid.all()
    env = np.asarray(batch.data)[..., 0] // 100
    assert np.all(np.diff(env, axis=1) >= 0)
    some = np.flatnonzero(held)
    each = np.stack([np.sum(env == e, axis=1) for e in some], axis=1)
    assert set(each.ravel()) <= {rows // len(some), -(-rows // len(some))}
    due = 1 / (len(some) * np.asarray(held, np.float64).clip(1))
    np.testing.assert_allclose(batch.probability, due[env], rtol=1e-6)
    extra = each.sum(0) - 600 * (rows // len(some))
    if extra.sum():
        assert stats.chisquare(extra).pvalue > 1e-3
    for e in some:
        steps, counts = np.unique(np.asarray(batch.data)[env == e], return_counts=True)
        assert len(steps) == held[e]
        assert len(steps) == 1 or stats.chisquare(counts).pvalue > 1e-3


@pytest.mark.parametrize(
    ("held", "rows"),
    [(EQUAL, rows) for rows in (1, 12, 30)]
    + [(UNEQUAL, rows) for rows in (5, 9, 12, 30)]
    + [((0, 6, 2), 1), ((0, 6, 2), 9), ((4,), 5), ((0, 0), 1)],
)
def test_numbers_without_replacement_are_dealt_in_turn(held, rows):
    buffer = filled(held, jaxbuf.Balanced(replacement=False))
    batch = draws(buffer, rows, 400)
    count = min(rows, sum(held))
    expected = np.broadcast_to(np.arange(rows) < count, batch.valid.shape)
    np.testing.assert_array_equal(batch.valid, expected)
    steps = np.asarray(batch.data)[:, :count, 0]
    assert all(len(set(row)) == count for row in steps.tolist())
    given, rest = shared_out(rows, held)
    env = steps // 100
    each = np.stack([np.sum(env == e, axis=1) for e in range(len(held))], axis=1)
    more = np.asarray(held) > given
    assert set((each - given)[:, ~more].ravel()) <= {0}
    if count == rows:
        np.testing.assert_array_equal((each - given).sum(1), rest)
        if 0 < rest < more.sum():
            assert stats.chisquare((each - given)[:, more].sum(0)).pvalue > 1e-3
    for e in np.flatnonzero(each.sum(0)):
        counts = np.unique(steps[env == e], return_counts=True)[1]
        assert len(counts) == held[e]
        # Batches hold different windows, so that counts vary less than those of single draws.
        assert np.abs(counts - counts.mean()).max() <= 5 * np.sqrt(counts.mean()) + 1


def test_windows_of_an_environment_are_evenly_spread_without_replacement():
    buffer = filled([8, 8], jaxbuf.Balanced(replacement=False))
    steps = np.asarray(draws(buffer, 8, 300).data)[..., 0] % 100 - 3
    # One from each half of four parts of two, in either environment.
    assert np.all(np.sort(steps[:, :4] // 2, axis=1) == np.arange(4))
    assert np.all(np.sort(steps[:, 4:] // 2, axis=1) == np.arange(4))
    pairs = np.unique(steps[:, [0, 4]] % 2, axis=0, return_counts=True)[1]
    assert len(pairs) == 4
    assert stats.chisquare(pairs).pvalue > 1e-3


def test_weights_correct_for_environments_that_hold_less():
    buffer = filled([8, 2, 5], jaxbuf.Balanced(), sequence_length=2)
    batch = draws(buffer, 6, 3000)
    assert int(buffer.support().count) == 7 + 1 + 4
    assert float(buffer.support().least_probability) == pytest.approx(1 / (3 * 7))
    weights = jax.jit(jax.vmap(lambda b: jaxbuf.importance_weights(buffer, b, 1.0, None)))(batch)
    first = np.asarray(batch.data)[..., 0]
    estimate = np.mean(np.asarray(weights) * first)
    every = np.concatenate([np.arange(3, 10), [100], np.arange(200, 204)])
    assert estimate == pytest.approx(every.mean(), rel=0.03)
    squares = [7 / (3 * 7) ** 2, 1 / 3**2, 4 / (3 * 4) ** 2]
    size = float(buffer.metrics()["effective_sample_size"])
    assert size == pytest.approx(1 / sum(squares), rel=1e-6)


def test_as_the_base_of_recent_and_where_windows_are_taken_out():
    sampler = jaxbuf.Recent(ratio=0.5, steps=1, base=jaxbuf.Balanced())
    batch = filled([8, 2], sampler).sample(jax.random.key(0), 8)
    step = np.asarray(batch.data)[:, 0]
    assert np.bincount(step // 100).tolist() == [4, 4]
    due = {0: 1 / 32, 100: 1 / 8}
    expected = [due[t // 100 * 100] + 0.25 * (t in (10, 101)) for t in step.tolist()]
    np.testing.assert_allclose(batch.probability, expected, rtol=1e-6)

    fresh = filled([3, 8], jaxbuf.Balanced(), freshness=jaxbuf.Freshness(max_use=1))
    used = fresh.latest(2).slots
    fresh = fresh.mark_used(used)
    batch = draws(fresh, 4, 200)
    assert set(np.asarray(batch.data).ravel().tolist()) == {0, *range(103, 109)}
    assert np.all(np.sum(np.asarray(batch.data) < 100, axis=(1, 2)) == 2)


def test_items_are_one_environment():
    buffer = jaxbuf.ItemBuffer.create(jnp.int32(0), 6, sampler=jaxbuf.Balanced(replacement=False))
    buffer = buffer.add(jnp.arange(9, dtype=jnp.int32))
    batch = jaxbuf.sample(buffer, jax.random.key(0), 6)
    assert sorted(batch.data.tolist()) == [3, 4, 5, 6, 7, 8]
    with pytest.raises(ValueError, match=re.escape("uses the age of items")):
        jaxbuf.ItemBuffer.create(
            jnp.int32(0), 6, sampler=jaxbuf.Balanced(), evictor=jaxbuf.Lowest()
        )


def test_equal_samplers():
    assert jaxbuf.Balanced(np.bool_(True)) == jaxbuf.Balanced()
    assert hash(jaxbuf.Balanced(False)) == hash(jaxbuf.Balanced(replacement=False))

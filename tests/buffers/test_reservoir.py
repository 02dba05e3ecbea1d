"""The preset `reservoir`: every item that ever came has the same chance to be held."""

import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbuf
from jaxbuf import testing
from tests.operations import quick

KEY = jax.random.key(0)
RUNS = 4000


def create(capacity, key=None, **options):
    return jaxbuf.reservoir(jnp.int32(0), capacity, key=key, **options)


@functools.partial(jax.jit, static_argnums=(1, 2))
def fill(key, capacity, sizes):
    """The items of a reservoir after adds of so many rows, sorted, and which are there."""
    buffer, first = create(capacity, key), 0
    for size in sizes:
        buffer = buffer.add(first + jnp.arange(size, dtype=jnp.int32))
        first += size
    return jnp.sort(jnp.where(buffer.live, buffer.data, 2**30))


def many(function):
    """Calls a function with each of many keys."""
    return np.asarray(jax.jit(jax.vmap(function))(jax.random.split(KEY, RUNS)))


# The 1 - 1e-4 quantiles of chi-square with 19 and 29 degrees of freedom.
QUANTILES = {19: 50.8, 29: 65.2}


# All at once, one by one, and in two parts.
SLOW_SIZES = (30,), (1,) * 30, (8, 22)


@pytest.mark.parametrize(
    "sizes", [(3, 9, 1, 17), *(pytest.param(sizes, marks=pytest.mark.slow) for sizes in SLOW_SIZES)]
)
def test_every_item_is_held_alike(sizes):
    held = many(lambda key: fill(key, 8, sizes))
    assert (np.diff(held, axis=1) > 0).all()
    counts = np.bincount(held.reshape(-1), minlength=30)
    expected = RUNS * 8 / 30
    # Rows of one run are drawn without replacement, which makes the counts vary less.
    found = np.sum((counts - expected) ** 2 / expected) * 29 / 22
    assert found < QUANTILES[29]


@pytest.mark.parametrize("sizes", [(6,), (2, 2, 1, 1), (1,) * 6])
def test_all_sets_of_items_are_equally_likely(sizes):
    held = many(lambda key: fill(key, 3, sizes))
    counts = np.array([np.sum((held == one).all(1)) for one in itertools.combinations(range(6), 3)])
    assert counts.sum() == RUNS
    assert np.sum((counts - RUNS / 20) ** 2 / (RUNS / 20)) < QUANTILES[19]


def test_everything_is_held_until_it_is_full():
    buffer = create(8).add(jnp.arange(5))
    assert sorted(buffer.data[buffer.live].tolist()) == [0, 1, 2, 3, 4]
    buffer = buffer.add(jnp.arange(5, 9), mask=jnp.array([True, False, True, True]))
    assert sorted(buffer.data.tolist()) == [0, 1, 2, 3, 4, 5, 7, 8]
    testing.assert_valid(buffer)
    assert buffer.metrics()["adds"] == 8
    assert not [name for name in buffer.metrics() if "score" in name]


def test_rows_that_are_masked_out_do_not_count():
    def masked(key):
        buffer, mask = create(4, key), jnp.arange(20) % 2 == 0
        buffer = buffer.add(jnp.arange(20), mask=mask)
        return buffer.add(jnp.arange(20, 30)).data

    held = many(masked)
    assert (held[held < 20] % 2 == 0).all()
    counts = np.bincount(held.reshape(-1), minlength=30)
    counts = counts[[*range(0, 20, 2), *range(20, 30)]]
    expected = RUNS * 4 / 20
    assert np.sum((counts - expected) ** 2 / expected) * 19 / 16 < QUANTILES[19]


def test_the_same_key_keeps_the_same_rows_and_others_do_not():
    kept = [fill(key, 8, (100,)).tolist() for key in (KEY, KEY, jax.random.key(1))]
    assert kept[0] == kept[1] != kept[2]
    legacy = create(8, jax.random.PRNGKey(0)).add(jnp.arange(100))
    testing.assert_valid(legacy)
    # Cleared, it draws new lots.
    buffer = create(8).add(jnp.arange(100))
    again = buffer.clear().add(jnp.arange(100))
    assert sorted(again.data.tolist()) != sorted(buffer.data.tolist())


@pytest.mark.parametrize("capacity", quick([3, 8, 12], {3, 12}))
def test_a_checkpoint_goes_on_and_a_smaller_one_is_a_sample_of_all(tmp_path, capacity):
    old = create(8, KEY).add(jnp.arange(50))
    jaxbuf.save(tmp_path, old)
    new = jaxbuf.load(tmp_path, create(capacity), resize=True)
    testing.assert_valid(new)
    lots = dict(zip(old.occupancy.score.tolist(), old.data.tolist(), strict=True))
    best = [lots[lot] for lot in sorted(lots)[-min(capacity, 8) :]]
    assert sorted(new.data[new.live].tolist()) == sorted(best)
    np.testing.assert_array_equal(new.occupancy.words, old.occupancy.words)
    after = [buffer.add(jnp.arange(50, 90)) for buffer in (old, new)]
    if capacity == 8:
        chex.assert_trees_all_equal(*after)
    if capacity == 3:
        # What stays of all items does not depend on when the buffer became smaller.
        assert set(after[1].data.tolist()) <= set(after[0].data.tolist())


def test_refused():
    with pytest.raises(ValueError, match="draws by score, but a reservoir has lots"):
        create(4, sampler=jaxbuf.Softmax())
    with pytest.raises(ValueError, match="score was given"):
        create(4).add(jnp.arange(2), score=jnp.ones(2))
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    with pytest.raises(ValueError, match=r"Reservoir\(\) compares each item with all others"):
        jaxbuf.Sharded.create(lambda: create(4), mesh, "data")


def test_scores_of_a_part_are_no_lots():
    buffer = jaxbuf.ItemBuffer.create(
        jnp.int32(0), 50, evictor=create(1).evictor, diversity=jaxbuf.Diversity(0.0)
    )
    buffer = jax.jit(lambda buffer: buffer.add(jnp.arange(500), score=jnp.arange(500.0)))(buffer)
    # The mean of 50 of them has a standard deviation of 20; the highest scores have the mean 474.
    assert abs(float(jnp.mean(buffer.data.astype(jnp.float32))) - 250) < 80

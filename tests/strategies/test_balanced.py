"""`Balanced`: the same number of windows from every environment, whatever each of them holds."""

import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import jaxbuf
from jaxbuf import testing
from tests.operations import quick

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
    quick(
        [(EQUAL, 1), (EQUAL, 6), (UNEQUAL, 1), (UNEQUAL, 7), ((0, 6, 2), 7), ((4,), 6)],
        [(EQUAL, 6), (UNEQUAL, 1), ((0, 6, 2), 7)],
    ),
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
    live = buffer.occupancy.live(jnp.arange(buffer.num_slots))
    law = np.where(live, np.repeat(due, LENGTH), 0.0)
    testing.assert_distribution(buffer, jax.random.key(0), law, draws=1200, batch_size=rows)


@pytest.mark.parametrize(
    ("held", "rows"),
    quick(
        [
            *((EQUAL, rows) for rows in (1, 12)),
            *((UNEQUAL, rows) for rows in (5, 9, 30)),
            *(((0, 6, 2), 1), ((0, 6, 2), 9), ((4,), 5), ((0, 0), 1)),
        ],
        [(EQUAL, 1), (UNEQUAL, 9), (UNEQUAL, 30), ((0, 6, 2), 9), ((0, 0), 1)],
    ),
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


def test_what_is_known_of_environments_that_hold_less():
    buffer = filled([8, 2, 5], jaxbuf.Balanced(), sequence_length=2)
    assert int(buffer.support().count) == 7 + 1 + 4
    assert float(buffer.support().least_probability) == pytest.approx(1 / (3 * 7))
    squares = [7 / (3 * 7) ** 2, 1 / 3**2, 4 / (3 * 4) ** 2]
    size = float(buffer.metrics()["effective_sample_size"])
    assert size == pytest.approx(1 / sum(squares), rel=1e-6)


def test_as_the_base_of_recent():
    sampler = jaxbuf.Recent(ratio=0.5, steps=1, base=jaxbuf.Balanced())
    batch = filled([8, 2], sampler).sample(jax.random.key(0), 8)
    step = np.asarray(batch.data)[:, 0]
    assert np.bincount(step // 100).tolist() == [4, 4]
    due = {0: 1 / 32, 100: 1 / 8}
    expected = [due[t // 100 * 100] + 0.25 * (t in (10, 101)) for t in step.tolist()]
    np.testing.assert_allclose(batch.probability, expected, rtol=1e-6)


def test_windows_that_are_taken_out_do_not_count():
    fresh = filled([3, 8], jaxbuf.Balanced(), freshness=jaxbuf.Freshness(max_use=1))
    fresh = fresh.mark_used(fresh.latest(2).slots)
    drawn = np.asarray(draws(fresh, 4, 200).data)
    assert set(drawn.ravel().tolist()) == {0, *range(103, 109)}
    assert np.all(np.sum(drawn < 100, axis=(1, 2)) == 2)


# --- By episode


STEP = {"t": jnp.int32(0), "terminated": jnp.bool_(False)}
BY_EPISODE = jaxbuf.Balanced(by="episode")


def rings(num_envs=2, length=16, sequence_length=1, sampler=BY_EPISODE, **options):
    options = {"episodes": jaxbuf.Episodes()} | options
    return jaxbuf.TrajectoryBuffer.create(
        STEP, num_envs, length, sequence_length=sequence_length, sampler=sampler, **options
    )


def episodes(*lengths, steps=20):
    """Steps of one environment in episodes of so many steps; the last one goes on."""
    t = np.arange(steps, dtype=np.int32)
    return {"t": t[None], "terminated": np.isin(t, np.cumsum(lengths) - 1)[None]}


def both(*steps):
    return jax.tree.map(lambda *rows: np.concatenate(rows), *steps)


def law(buffer, rows=64, number=400):
    """The steps that were drawn first, with the probability of each, and its number of rows."""
    batch = draws(buffer, rows, number)
    assert batch.valid.all()
    first, share = np.asarray(batch.data["t"])[..., 0].ravel(), np.asarray(batch.probability)
    drawn, at, counts = np.unique(first, return_index=True, return_counts=True)
    return drawn.tolist(), share.ravel()[at], counts


def check_law(buffer, expected):
    drawn, share, counts = law(buffer)
    assert drawn == sorted(expected)
    due = np.array([expected[t] for t in drawn])
    np.testing.assert_allclose(share, due, rtol=1e-6)
    assert stats.chisquare(counts, due * counts.sum()).pvalue > 1e-3


def uniform_over(*windows):
    return {t: 1 / (len(windows) * len(of)) for of in windows for t in of}


# Steps 4 to 19 are held: 2 of the first episode, then 1, 9, and 4 of an open one.
EXPECTED = uniform_over([4, 5], [6], range(7, 16), range(16, 20))
CROSSING = {"sequence_length": 3}
AVOIDING = {"sequence_length": 3, "episodes": jaxbuf.Episodes(boundary="avoid")}
WHOLE = jaxbuf.Episodes(boundary="avoid", short_windows="never")
OF_THREE = uniform_over([4, 5], [6], range(7, 16), [16, 17])


@pytest.mark.parametrize(
    ("options", "expected"),
    quick(
        [
            ({}, EXPECTED),
            (CROSSING, OF_THREE),
            (AVOIDING, OF_THREE),
            (AVOIDING | {"episodes": WHOLE}, uniform_over(range(7, 14), [16, 17])),
            ({"num_earliest_ignored": 3}, uniform_over(range(7, 16), range(16, 20))),
            ({"period": 2}, uniform_over([4], [6], range(8, 16, 2), [16, 18])),
            ({"period": 8}, uniform_over([8], [16])),
        ],
        [({}, EXPECTED), (AVOIDING, OF_THREE)],
    ),
)
def test_episodes_are_equally_likely_and_so_are_their_windows(options, expected):
    buffer = rings(1, **options).add(episodes(6, 1, 9))
    check_law(buffer, expected)
    support = buffer.support()
    assert int(support.count) == len(expected)
    assert float(support.least_probability) == pytest.approx(min(expected.values()))
    size = 1 / sum(p * p for p in expected.values())
    assert float(buffer.metrics()["effective_sample_size"]) == pytest.approx(size)


@pytest.mark.slow
def test_what_has_left_does_not_count():
    buffer = rings(1, parts=(jaxbuf.Removable(),), freshness=jaxbuf.Freshness(max_use=1))
    buffer = buffer.add(episodes(6, 1, 9))
    gone = buffer.slots_at(jnp.array([0]), jnp.array([6, 15, 8]))
    buffer = buffer.mark_used(gone, mask=jnp.array([True, True, False]))
    buffer = buffer.remove(gone, mask=jnp.array([False, False, True]))
    check_law(buffer, uniform_over([4, 5], [7, *range(9, 15)], range(16, 20)))
    cleared = buffer.clear(jnp.array([0]))
    assert not cleared.sample(jax.random.key(0), 4).valid.any()
    assert not buffer.clear().sample(jax.random.key(0), 4).valid.any()


@pytest.mark.parametrize(
    "sampler",
    [
        pytest.param(jaxbuf.Recent(0.25, 4, BY_EPISODE), marks=pytest.mark.slow),
        jaxbuf.Blend((BY_EPISODE, jaxbuf.Recent(1.0, 4)), (0.75, 0.25)),
    ],
)
def test_by_episode_among_others(sampler):
    due = {t: 0.75 * p + (t >= 16) / 16 for t, p in EXPECTED.items()}
    drawn, share, _ = law(rings(1, sampler=sampler).add(episodes(6, 1, 9)))
    np.testing.assert_allclose(share, [due[t] for t in drawn], rtol=1e-6)
    changed = rings(1, sampler=jaxbuf.Uniform()).add(episodes(6, 1, 9)).with_sampler(sampler)
    np.testing.assert_array_equal(law(changed)[1], share)


def test_by_episode_in_wrappers_and_with_weights():
    filled = rings(1).add(episodes(6, 1, 9))
    drawn, share, _ = law(jaxbuf.Mixture.create([filled, jax.tree.map(jnp.copy, filled)], [1, 1]))
    np.testing.assert_allclose(share, [EXPECTED[t] / 2 for t in drawn], rtol=1e-6)
    batch = jaxbuf.Hosted.create(lambda: filled).sample(jax.random.key(0), 32)
    weights = jaxbuf.importance_weights(filled, batch, 1.0, None)
    due = [1 / (16 * EXPECTED[t]) for t in batch.data["t"][:, 0].tolist()]
    np.testing.assert_allclose(weights, due, rtol=1e-6)


def test_by_episode_is_in_place():
    for boundary in ("cross", "avoid"):
        options = {"episodes": jaxbuf.Episodes(boundary=boundary)}
        buffer = rings(1, 4096, sequence_length=4, **options)
        testing.assert_no_copy(lambda b, x: b.add(x), buffer, episodes(2, steps=8))


@pytest.mark.slow
def test_by_episode_is_loaded_into_other_sizes(tmp_path):
    buffer = rings(2, 16, 2).add(both(episodes(6, 1, 9), episodes(3, 4, 5)))
    jaxbuf.save(tmp_path, buffer)
    for num_envs, length in ((1, 24), (3, 8)):
        loaded = jaxbuf.load(tmp_path, rings(num_envs, length, 2), resize=True)
        testing.assert_valid(loaded)
        every = jnp.arange(loaded.num_slots, dtype=jnp.int32)
        again = loaded.with_episodes(every, every[:0])
        chex.assert_trees_all_equal(loaded, again)
    with pytest.raises(ValueError, match="by"):
        jaxbuf.load(tmp_path, rings(2, 16, 2, sampler=jaxbuf.Balanced()))


REFUSED = [
    (lambda: jaxbuf.Balanced(replacement=False, by="episode"), "replacement is False, but ep"),
    *(
        (make, "needs episodes, but episodes is None")
        for make in (
            lambda: rings(episodes=None),
            lambda: rings(episodes=None, sampler=jaxbuf.Recent(0.5, 1, BY_EPISODE)),
            lambda: rings(episodes=None, sampler=jaxbuf.Uniform()).with_sampler(BY_EPISODE),
        )
    ),
    (
        lambda: jaxbuf.ItemBuffer.create(jnp.int32(0), 4, sampler=BY_EPISODE),
        "needs episodes, which an ItemBuffer does not know; use a TrajectoryBuffer",
    ),
    (
        lambda: jaxbuf.Sharded.create(rings, jax.make_mesh((1,), ("d",)), "d"),
        "does not draw from shards",
    ),
]


@pytest.mark.parametrize(("make", "message"), REFUSED)
def test_what_cannot_be_drawn(make, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make()

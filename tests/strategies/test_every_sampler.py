"""Many samplers alike: their laws, in an empty buffer, in wrappers, in loops; equal ones."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import jaxbuf
from jaxbuf import testing
from tests.models import items as reference
from tests.operations import quick

KEY, INF = jax.random.key(0), float("inf")
PRIORITIES = (0.5, 0.0, 3.0, 1.0, 8.0, 1.0, 2.0)
PROPORTIONAL, UNIFORM = jaxbuf.Prioritized(alpha=1.0), jaxbuf.Uniform()
NEWEST = jaxbuf.Recent(1.0, 2)
HALVES = jaxbuf.Blend((PROPORTIONAL, UNIFORM), (0.5, 0.5))
SAMPLERS = {
    "ranked": jaxbuf.RankBased(alpha=1.0),
    "ranked-by-score": jaxbuf.RankBased(by="score", replacement=False),
    "ranked-seldom": jaxbuf.RankBased(sort_every=1000),
    "stale": jaxbuf.Staleness(),
    "blend": HALVES,
    "blend-of-many": jaxbuf.Blend(
        (HALVES, NEWEST, jaxbuf.RankBased(), jaxbuf.Staleness()), (1, 1, 1, 1)
    ),
    "balanced": jaxbuf.Balanced(),
    "balanced-distinct": jaxbuf.Balanced(replacement=False),
    "softmax": jaxbuf.Softmax(),
    "shuffled": jaxbuf.Shuffled(),
    "recent": jaxbuf.Recent(0.5, 3),
    "recent-distinct": jaxbuf.Recent(0.5, 3, jaxbuf.Prioritized(replacement=False)),
}
every_sampler = pytest.mark.parametrize("name", SAMPLERS)


def filled(sampler, values=PRIORITIES, capacity=9, **options):
    """A buffer that holds the row numbers of these priorities or scores as its items."""
    values = jnp.asarray(values, jnp.float32)
    buffer = jaxbuf.ItemBuffer.create(jnp.int32(0), capacity, sampler=sampler, **options)
    by = "score" if sampler.uses_score else "priority"
    given = {by: values} if sampler.uses_score or sampler.uses_priority else {}
    return buffer.add(jnp.arange(len(values), dtype=jnp.int32), **given)


def waiting(sampler, times, now, capacity=9):
    """A buffer whose items were last drawn, or added, in these batches of ``now`` in all."""
    buffer = filled(sampler, times, capacity)
    last = buffer.sampler_state.last.at[: len(times)].set(jnp.asarray(times, jnp.uint32))
    state = buffer.sampler_state.replace(last=last, batches=jnp.uint32(now))
    return buffer.replace(sampler_state=state)


def drawn_from(sampler):
    """Seven items, of which some were drawn."""
    return filled(sampler).next_batch(KEY, 2)[0]


def law_of(buffer):
    """The probability of every slot."""
    slot = jnp.arange(buffer.capacity, dtype=jnp.int32)
    return buffer.get(jaxbuf.Slots(slot, buffer.occupancy.generation(slot))).probability


def shares(masses):
    return np.asarray(masses) / np.sum(masses)


def assert_counts(found, expected):
    """Chi-square of likely outcomes; the others are as rare as they should be."""
    likely = expected > 5
    assert found[~likely].sum() <= 10 + 3 * expected[~likely].sum()
    share = found[likely].sum() / expected[likely].sum()
    assert stats.chisquare(found[likely], expected[likely] * share).pvalue > 1e-3


RANKS, AGES = np.array([6, 7, 2, 4, 1, 5, 3]), np.array([4, 7, 0, 0, 2, 6, 0])
BY_RANKS, SEVENTH = shares(RANKS**-0.7), np.full(7, 1 / 7)
LAST_TWO = np.array([0, 0, 0, 0, 0, 1 / 2, 1 / 2])
# Each a sampler, the probabilities of its items, and the values of these.
LAWS = {
    **{
        f"rank-{alpha}": (
            jaxbuf.RankBased(alpha, by=by, stratified=by == "priority"),
            shares(1.0 / RANKS**alpha),
        )
        for alpha, by in (
            (0.0, "priority"), (0.5, "score"), (0.7, "priority"), (1.0, "score"), (3.0, "priority")
        )
    },
    "rank, infinite": (
        jaxbuf.RankBased(1.0, by="score"),
        shares(1 / np.array([6, 3, 1, 5, 2, 4])),
        [-INF, 3.0, INF, -3e38, INF, -5.0],
    ),
    **{
        f"stale-{alpha}": (
            jaxbuf.Staleness(alpha, stratified=alpha != 0.5),
            shares(np.where(AGES > 0, AGES.astype(float) ** alpha, 0)),
            7 - AGES,
            7,
        )
        for alpha in (0.0, 0.5, 1.0, 2.0)
    },
    "stale, no batch": (jaxbuf.Staleness(), shares([1] * 5), [0] * 5, 0),
    "stale, all drawn": (jaxbuf.Staleness(), shares([1] * 5), [4] * 5, 4),
    "one": (jaxbuf.Blend((PROPORTIONAL,), (2,)), shares(PRIORITIES)),
    "one without weight": (
        jaxbuf.Blend((UNIFORM, PROPORTIONAL, NEWEST), (0, 1, 2)),
        shares(PRIORITIES) / 3 + LAST_TWO * 2 / 3,
    ),
    "ranks, sorted out": (
        jaxbuf.Blend((jaxbuf.RankBased(), NEWEST, UNIFORM), (0.3, 0.45, 0.25)),
        0.3 * BY_RANKS + 0.45 * LAST_TWO + 0.25 * SEVENTH,
    ),
    "in a blend": (
        jaxbuf.Blend((HALVES, jaxbuf.RankBased(stratified=False)), (0.2, 0.8)),
        0.1 * shares(PRIORITIES) + 0.1 * SEVENTH + 0.8 * BY_RANKS,
    ),
    "not independent": (
        jaxbuf.Blend((jaxbuf.Prioritized(1.0, stratified=False), jaxbuf.Balanced()), (0.6, 0.4)),
        0.6 * shares(PRIORITIES) + 0.4 * SEVENTH,
    ),
}  # fmt: skip
# Those of one sampler differ by its exponent alone, and the others by the samplers that they blend.
SLOW_LAWS = {"rank-0.5", "rank-1.0", "rank-3.0", "stale-0.5", "stale-2.0", "one", "in a blend"}
SLOW_LAWS |= {"one without weight"}


@pytest.mark.parametrize("name", quick(LAWS, LAWS.keys() - SLOW_LAWS))
def test_the_law(name):
    sampler, law, *values = LAWS[name]
    make = waiting if isinstance(sampler, jaxbuf.Staleness) else filled
    buffer, every = make(sampler, *values), np.pad(law, (0, 9 - len(law)))
    testing.assert_valid(buffer)
    np.testing.assert_allclose(law_of(buffer), every, rtol=1e-5, atol=1e-9)
    batch = buffer.sample(KEY, 64)
    np.testing.assert_allclose(batch.probability, law[batch.data], rtol=1e-5)
    support = buffer.support()
    assert support.count == np.sum(law > 0)
    np.testing.assert_allclose(support.least_probability, law[law > 0].min(), rtol=1e-5)
    size = buffer.metrics()["effective_sample_size"]
    np.testing.assert_allclose(size, reference.effective_sample_size(law), rtol=1e-5)
    testing.assert_distribution(buffer, KEY, every, draws=1500, batch_size=13)


@pytest.mark.parametrize(
    "sampler", [jaxbuf.RankBased(), jaxbuf.RankBased(by="score"), jaxbuf.Softmax()]
)
def test_metrics_of_priorities_and_scores(sampler):
    metrics = filled(sampler, [4.0, 1.0, 1.0], 5).metrics()
    by = "score" if sampler.uses_score else "priority"
    assert [metrics[f"{by}_{name}"] for name in ("min", "max", "mean")] == [1, 4, 2]


@pytest.mark.parametrize(
    "sampler", [jaxbuf.RankBased(3.0, replacement=False), jaxbuf.Softmax(replacement=False)]
)
def test_without_replacement_every_item_comes_once_however_seldom(sampler):
    batch = filled(sampler, np.arange(200.0), 256).sample(KEY, 210)
    assert sorted(batch.data[batch.valid].tolist()) == [*range(200)]
    assert batch.valid.tolist() == [True] * 200 + [False] * 10
    assert batch.slots.index[200:].tolist() == [256] * 10


@pytest.mark.parametrize("name", quick(SAMPLERS, {"ranked", "blend", "shuffled"}))
def test_an_empty_buffer_and_clear(name):
    buffer = drawn_from(SAMPLERS[name])
    for empty in (buffer.anew(), buffer.clear()):
        testing.assert_valid(empty)
        after, batch = empty.next_batch(KEY, 4)
        assert not batch.valid.any()
        np.testing.assert_array_equal(batch.probability, 0)
        assert empty.support().count == 0
        assert empty.metrics()["effective_sample_size"] == 0
        # Rows of no item are no draw of the last slot.
        testing.assert_valid(after)
        given = {"score": jnp.ones(2)} if buffer.score_users else {}
        assert after.add(jnp.arange(2), **given).sample(KEY, 2).valid.all()


@pytest.mark.parametrize(
    "name", quick(["shuffled", "softmax", "blend-of-many", "recent-distinct"], {"shuffled"})
)
def test_a_hosted_buffer_draws_what_the_buffer_does(name):
    buffer = drawn_from(SAMPLERS[name])
    hosted = jaxbuf.Hosted.create(lambda: buffer, to=jax.devices()[0])
    _, expected = buffer.next_batch(KEY, 8)
    hosted, batch = jaxbuf.next_batch(hosted, KEY, 8)
    chex.assert_trees_all_close(batch, expected, rtol=1e-6)
    if buffer.sampler.uses_priority:
        hosted = jaxbuf.update_priority(hosted, batch.slots, jnp.full(8, 9.0))
        assert hosted.metrics()["priority_max"] == pytest.approx(9)


@pytest.mark.parametrize(
    "name",
    quick(
        [name for name in SAMPLERS if name.split("-")[0] not in ("shuffled", "recent")],
        {"ranked", "blend"},
    ),
)
def test_it_is_the_base_of_recent_and_a_part_of_mixtures(name):
    alone, recent = drawn_from(SAMPLERS[name]), drawn_from(jaxbuf.Recent(0.5, 1, SAMPLERS[name]))
    testing.assert_valid(recent)
    laws = law_of(alone), law_of(recent)
    if name != "blend-of-many" and "stale" not in name:  # These know what was drawn.
        np.testing.assert_allclose(laws[1], laws[0] / 2 + np.eye(9)[6] / 2, rtol=1e-5)
    mixture = jaxbuf.Mixture.create([alone, recent], [1, 1])
    mixture, batch = jaxbuf.next_batch(mixture, KEY, 8)
    np.testing.assert_allclose(
        batch.probability, (np.concatenate(laws) / 2)[batch.slots.index], rtol=1e-5
    )
    if alone.sampler.uses_priority:
        assert jaxbuf.update_priority(mixture, batch.slots, jnp.ones(8)).size == 14


@pytest.mark.parametrize("name", ["ranked", "stale", "blend"])
def test_a_sharded_buffer_refuses_it(name):
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    kind = type(SAMPLERS[name]).__name__
    with pytest.raises(ValueError, match=rf"{kind}\(.*does not draw from shards"):
        jaxbuf.Sharded.create(lambda: drawn_from(SAMPLERS[name]), mesh, "data")


@pytest.mark.parametrize("name", quick(["ranked", "ranked-seldom", "blend-of-many"], {"ranked"}))
def test_a_step_copies_neither_items_nor_states(name):
    buffer = jaxbuf.ItemBuffer.create(jnp.zeros(8), 2**12, sampler=SAMPLERS[name])

    def step(buffer, key):
        buffer, batch = buffer.add(jnp.ones((64, 8))).next_batch(key, 32)
        return buffer.update_priority(batch.slots, batch.data[:, 0]), batch.probability

    keys = jax.random.split(KEY, 3)
    testing.assert_no_copy(lambda buffer, keys: jax.lax.scan(step, buffer, keys), buffer, keys)


BY_SCORE = jaxbuf.Blend((jaxbuf.RankBased(1.0, by="score"), jaxbuf.Softmax()), (0.5, 0.5))


@pytest.mark.parametrize(
    "options",
    [
        *({"sampler": it} for it in (jaxbuf.RankBased(by="score"), jaxbuf.Softmax(), BY_SCORE)),
        {"evictor": jaxbuf.Lowest()},
        {"diversity": jaxbuf.Diversity(1.0)},
    ],
)
def test_scores_are_needed(options):
    buffer = jaxbuf.ItemBuffer.create(jnp.float32(0), 3, **options)
    with pytest.raises(ValueError, match="uses the score of items; pass score="):
        buffer.add(jnp.zeros(2))
    with pytest.raises(ValueError, match=r"score has shape \(3,\)"):
        buffer.add(jnp.zeros(2), score=jnp.zeros(3))
    if "sampler" in options:
        with pytest.raises(ValueError, match="needs scores, which steps do not have"):
            jaxbuf.TrajectoryBuffer.create(jnp.int32(0), 2, 4, **options)


EQUAL = [
    (jaxbuf.Balanced(np.bool_(False)), jaxbuf.Balanced(replacement=False)),
    (jaxbuf.Recent(np.float32(0.5), np.int64(3)), jaxbuf.Recent(0.5, 3, UNIFORM)),
    (jaxbuf.Softmax(np.float32(0.5)), jaxbuf.Softmax(temperature=0.5)),
    (jaxbuf.Staleness(np.float32(0.5)), jaxbuf.Staleness(0.5)),
    (
        jaxbuf.RankBased(np.float32(0.5), sort_every=np.int64(2)),
        jaxbuf.RankBased(0.5, sort_every=2),
    ),
    (
        jaxbuf.Blend([PROPORTIONAL, UNIFORM], np.float32([1, 3])),
        jaxbuf.Blend((PROPORTIONAL, UNIFORM), (0.25, 0.75)),
    ),
    (jaxbuf.Blend([UNIFORM] * 3, (1, 1, 1)), jaxbuf.Blend([UNIFORM] * 3, (1, 1, 1))),
    (jaxbuf.Diversity(np.float32(1), np.int32(2)), jaxbuf.Diversity(1.0, 2.0)),
    (jaxbuf.Freshness(np.int32(3)), jaxbuf.Freshness(3)),
    (
        jaxbuf.Episodes(discount=np.float32(0.5), default_return=np.int64(-1), reward_clip=[-1, 1]),
        jaxbuf.Episodes(discount=0.5, default_return=-1, reward_clip=(np.int8(-1), 1)),
    ),
]


@pytest.mark.parametrize(("one", "other"), EQUAL, ids=lambda it: type(it).__name__)
def test_equal_configurations_do_not_retrace(one, other):
    assert one == other == dataclasses.replace(one)
    assert hash(one) == hash(other)

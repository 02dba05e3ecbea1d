"""Many samplers alike: in an empty buffer, in wrappers, in loops."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import jaxbuf
from jaxbuf import testing
from tests.models import items as reference

KEY = jax.random.key(0)
PRIORITIES = jnp.array([0.5, 0.0, 3.0, 1.0, 8.0, 1.0, 2.0])
HALVES = jaxbuf.Blend((jaxbuf.Prioritized(alpha=1.0), jaxbuf.Uniform()), (0.5, 0.5))
SAMPLERS = {
    "ranked": jaxbuf.RankBased(alpha=1.0),
    "ranked-by-score": jaxbuf.RankBased(by="score", replacement=False),
    "ranked-seldom": jaxbuf.RankBased(sort_every=1000),
    "stale": jaxbuf.Staleness(),
    "blend": HALVES,
    "blend-of-many": jaxbuf.Blend(
        (HALVES, jaxbuf.Recent(1.0, 2), jaxbuf.RankBased(), jaxbuf.Staleness()), (1, 1, 1, 1)
    ),
    "balanced": jaxbuf.Balanced(),
    "balanced-distinct": jaxbuf.Balanced(replacement=False),
    "softmax": jaxbuf.Softmax(),
    "shuffled": jaxbuf.Shuffled(),
    "recent": jaxbuf.Recent(0.5, 3),
    "recent-distinct": jaxbuf.Recent(0.5, 3, jaxbuf.Prioritized(replacement=False)),
}
every_sampler = pytest.mark.parametrize("name", SAMPLERS)


def filled(sampler, capacity=9):
    """Seven items, of which some were drawn."""
    buffer = jaxbuf.ItemBuffer.create(jnp.int32(0), capacity, sampler=sampler)
    by = "score" if sampler.uses_score else "priority"
    given = {by: PRIORITIES} if sampler.uses_score or sampler.uses_priority else {}
    return buffer.add(jnp.arange(7), **given).next_batch(KEY, 2)[0]


def law_of(buffer):
    """The probability of every slot."""
    slot = jnp.arange(buffer.capacity, dtype=jnp.int32)
    return buffer.get(jaxbuf.Slots(slot, buffer.occupancy.generation(slot))).probability


@every_sampler
def test_an_empty_buffer_and_clear(name):
    buffer = filled(SAMPLERS[name])
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


@pytest.mark.parametrize("kind", [jaxbuf.RankBased, jaxbuf.Staleness, jaxbuf.Softmax])
def test_draws_without_replacement_have_the_law_of_successive_draws(kind):
    buffer = filled(kind(replacement=False))
    # Some were drawn just now, and others wait for a while.
    buffer = buffer.next_batch(jax.random.key(1), 2)[0].next_batch(jax.random.key(2), 2)[0]
    law = reference.successive_law(law_of(buffer)[:7], 2)
    keys = jax.random.split(KEY, 20_000)
    drawn = np.asarray(jax.jit(jax.vmap(lambda key: buffer.sample(key, 2)))(keys).data)
    found = np.array([np.sum((drawn == order).all(1)) for order in law])
    expected = np.array([*law.values()]) * len(drawn)
    likely = expected > 5
    assert found[~likely].sum() <= 10 + 3 * expected[~likely].sum()
    share = found[likely].sum() / expected[likely].sum()
    assert stats.chisquare(found[likely], expected[likely] * share).pvalue > 1e-4


@every_sampler
def test_a_hosted_buffer_draws_what_the_buffer_does(name):
    buffer = filled(SAMPLERS[name])
    hosted = jaxbuf.Hosted.create(lambda: buffer, to=jax.devices()[0])
    _, expected = buffer.next_batch(KEY, 8)
    hosted, batch = jaxbuf.next_batch(hosted, KEY, 8)
    chex.assert_trees_all_close(batch, expected, rtol=1e-6)
    if buffer.sampler.uses_priority:
        hosted = jaxbuf.update_priority(hosted, batch.slots, jnp.full(8, 9.0))
        assert hosted.metrics()["priority_max"] == pytest.approx(9)


@pytest.mark.parametrize(
    "name", [name for name in SAMPLERS if name.split("-")[0] not in ("shuffled", "recent")]
)
def test_it_is_the_base_of_recent_and_a_part_of_mixtures(name):
    alone, recent = filled(SAMPLERS[name]), filled(jaxbuf.Recent(0.5, 1, SAMPLERS[name]))
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
        jaxbuf.Sharded.create(lambda: filled(SAMPLERS[name]), mesh, "data")


@pytest.mark.parametrize("name", ["ranked", "ranked-seldom", "blend-of-many"])
def test_a_step_copies_neither_items_nor_states(name):
    buffer = jaxbuf.ItemBuffer.create(jnp.zeros(8), 2**12, sampler=SAMPLERS[name])

    def step(buffer, key):
        buffer, batch = buffer.add(jnp.ones((64, 8))).next_batch(key, 32)
        return buffer.update_priority(batch.slots, batch.data[:, 0]), batch.probability

    keys = jax.random.split(KEY, 3)
    testing.assert_no_copy(lambda buffer, keys: jax.lax.scan(step, buffer, keys), buffer, keys)

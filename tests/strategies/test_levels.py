"""The buffer of levels of the guide: its draws have the law of Prioritized Level Replay."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbuf
from jaxbuf import testing
from tests.models.levels import LevelBuffer, distance
from tests.operations import quick

KEY = jax.random.key(0)
TEMPERATURE, RHO = 0.5, 0.3
BY = {
    "rank": jaxbuf.RankBased(alpha=1 / TEMPERATURE, by="score"),
    # Of logarithms, a softmax is proportional to powers of the scores.
    "proportional": jaxbuf.Softmax(temperature=TEMPERATURE),
}


def create(rule, capacity, **options):
    sampler = jaxbuf.Blend((BY[rule], jaxbuf.Staleness()), (1 - RHO, RHO))
    return jaxbuf.ItemBuffer.create(
        {"seed": jnp.int32(0)},
        capacity,
        sampler=sampler,
        evictor=jaxbuf.Lowest(),
        diversity=jaxbuf.Diversity(0.0),
        **options,
    )


def twin(rule, capacity, count="batches"):
    return LevelBuffer(capacity, temperature=TEMPERATURE, staleness=RHO, rule=rule, count=count)


def given(rule, scores):
    """Scores as the buffer takes them."""
    return jnp.asarray(scores if rule == "rank" else np.log(scores), jnp.float32)


@jax.jit
def offer(levels, seed, score):
    """Add levels; where one is there already, the better score stays."""
    order = jnp.argsort(score)  # Of several rows for one level, the last one counts.
    seed, score = seed[order], score[order]
    same = levels.live[None] & (levels.data["seed"][None] == seed[:, None])
    index = jnp.argmax(same, axis=1).astype(jnp.int32)
    known = jaxbuf.Slots(index, levels.occupancy.generation(index))
    better = jnp.any(same, axis=1) & (score > levels.occupancy.score[index])
    return levels.update_score(known, score, mask=better).add({"seed": seed}, score=score)


@jax.jit
def known(levels):
    slot = jnp.arange(levels.capacity, dtype=jnp.int32)
    law = levels.sampler.probability(levels.sampler_state, slot, levels.occupancy)
    return levels.data["seed"], levels.live, jnp.where(levels.live, law, 0.0)


def held(levels):
    """Returns the levels in the order of their slots, and the probability of each slot."""
    seeds, live, law = jax.device_get(known(levels))
    return seeds[live].tolist(), law


@functools.partial(jax.jit, static_argnums=2)
def play(levels, key, batch_size):
    return levels.next_batch(key, batch_size)


def assert_law(levels, model):
    seeds, law = held(levels)
    assert sorted(seeds) == sorted(model.levels)
    expected = model.law(seeds)
    np.testing.assert_allclose(law[: len(seeds)], [expected[s] for s in seeds], rtol=1e-4)


@pytest.mark.parametrize("rule", quick(BY, {"rank"}))
def test_the_law_is_that_of_the_papers_while_levels_come_and_go(rule):
    rng = np.random.default_rng(0)
    levels, model = create(rule, 12), twin(rule, 12)
    for number in range(40):
        seeds = rng.integers(0, 40, 4).astype(np.int32)
        scores = rng.choice([0.25, 0.5, 1.0, 2.0, 4.0, 8.0], 4) + rng.random(4)
        levels = offer(levels, jnp.asarray(seeds), given(rule, scores))
        model.insert(seeds.tolist(), scores.tolist())
        assert_law(levels, model)
        levels, batch = play(levels, jax.random.key(number), 3)
        drawn = batch.data["seed"].tolist()
        model.play(drawn)
        new = rng.exponential(2.0, 3) + 0.1
        levels = levels.update_score(batch.slots, given(rule, new))
        model.score(drawn, new.tolist())
        assert_law(levels, model)
    testing.assert_valid(levels)
    assert model.arrivals > 60
    seeds, law = held(levels)
    testing.assert_distribution(levels, KEY, law, draws=5000, batch_size=4)


def filled(rule, scores, *models):
    """Levels with these scores, held by the buffer and the models."""
    seeds = np.arange(len(scores))
    for model in models:
        model.insert(seeds.tolist(), scores.tolist())
    levels = create(rule, len(scores))
    return levels.add({"seed": jnp.asarray(seeds, jnp.int32)}, score=given(rule, scores))


@pytest.mark.parametrize("rule", quick(BY, {"rank"}))
def test_one_level_at_a_time_has_the_law_of_jaxued(rule):
    """Once the levels are there, both count the draws alike."""
    model = twin(rule, 8, count="episodes")
    levels = filled(rule, np.arange(1.0, 9.0), model)
    # jaxued counts the levels that are offered as well, one after the other.
    model.clock = 0
    for level in model.levels.values():
        level.time = 0
    for seed in range(20):
        levels, batch = play(levels, jax.random.key(seed), 1)
        model.play(batch.data["seed"].tolist())
        assert_law(levels, model)


@pytest.mark.slow
def test_batches_differ_from_jaxued_in_the_stale_part_alone():
    """There each draw of a batch changes the law of the next one; here a batch has one law."""
    models = [twin("rank", 32, count) for count in ("batches", "episodes")]
    levels = filled("rank", np.arange(1.0, 33.0), *models)
    apart = []
    for seed in range(40):
        levels, batch = play(levels, jax.random.key(seed), 8)
        for model in models:
            model.play(batch.data["seed"].tolist())
        apart.append(distance(*(model.law([*range(32)]) for model in models)))
        assert_law(levels, models[0])
    assert 0 < max(apart[5:]) < 0.1 * RHO

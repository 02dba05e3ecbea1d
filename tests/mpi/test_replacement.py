"""Replacing the worst ranks: choices agree with NumPy, and real ranks with one process.

Run as a program, this file is what the ranks do: it writes what each of them holds in the end.
"""

import functools
import itertools
import json
import math
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.models import replacement as twin
from tests.programs.mpi_launch import run_in_turn

pytest.importorskip("mpi4jax")

from jaxbuf.mpi import Population, ReplaceWorst

_CALLS = 9
_RULES = {
    "worst": ReplaceWorst(worst_ratio=0.3, age=2, average="weighted_mean", donor_ratio=0.7),
    "below": ReplaceWorst(threshold=0.5, momentum=0.25, donor_ratio=0.3, every=2),
    "old": ReplaceWorst(age=3, average="best"),
}


def _choose(rule, score, age=None, spared=None, seed=0):
    """Returns the choice after checking it against the NumPy twin."""
    ranks = len(score)
    age = [1] * ranks if age is None else age
    key = jax.random.key(seed)
    spared = [rule.ages[0]] * ranks if spared is None else spared
    chosen = _jitted(rule)(key, *map(jnp.asarray, (np.float32(score), age, spared)))
    replaced, weights = twin.choose(rule, score, age, spared, *_draws(key, ranks))
    assert chosen.replaced.tolist() == replaced
    np.testing.assert_allclose(chosen.weights, weights, rtol=1e-5, atol=1e-7)
    return chosen


@functools.cache
def _jitted(rule):
    return jax.jit(rule.choose)


def _draws(key, ranks):
    tie_key, donor_key = jax.random.split(key)
    shuffled = np.asarray(jax.random.permutation(tie_key, ranks))
    return shuffled, np.asarray(jax.random.uniform(donor_key, (ranks, ranks)))


def test_choices_as_in_numpy():
    random = np.random.default_rng(0)
    pool = [0.0, 1.0, 1.0, 2.0, -3.0, 7.5, math.nan, math.inf, -math.inf]
    given = [
        {"threshold": 1.0},
        {"worst_ratio": 0.4, "average": "weighted_mean"},
        {"threshold": 2.0, "worst_ratio": 0.6, "donor_ratio": 1.0, "average": "weighted_mean"},
        {"age": 3, "donor_ratio": 0.25},
        {"worst_ratio": 1.0, "average": "best"},
    ]
    seen = 0
    for options, seed in itertools.product(given, range(12)):
        rule = ReplaceWorst(**{"age": 2, **options})
        score = random.choice(pool, 7).tolist()
        spared = random.integers(0, 5, 7).tolist() if seed % 2 else None
        chosen = _choose(rule, score, random.integers(0, 6, 7).tolist(), spared, seed)
        seen += int(chosen.replaced.sum())
    assert seen > 50


def test_no_rank_is_replaced_if_all_score_the_same():
    for rule in (ReplaceWorst(worst_ratio=0.5), ReplaceWorst(threshold=9.0)):
        for score in (2.0, math.inf, math.nan):
            chosen = _choose(rule, [score] * 4)
            assert not chosen.replaced.any()
            assert not chosen.weights.any()


def test_no_rank_is_replaced_that_reaches_the_threshold():
    assert not _choose(ReplaceWorst(threshold=1.0), [1.0, 1.5, 1.0, 3.0]).replaced.any()


def test_more_can_be_replaced_than_there_are_donors():
    rule = ReplaceWorst(threshold=5.0, donor_ratio=1.0)
    chosen = _choose(rule, [1.0, 2.0, 4.0, 3.0])
    assert chosen.replaced.tolist() == [True, True, False, True]
    assert chosen.weights[0].tolist() == [0, 0, 1, 0]


def test_young_ranks_are_spared():
    rule = ReplaceWorst(worst_ratio=0.5, age=5)
    assert _choose(rule, [0.0, 1.0, 2.0, 3.0], [4, 5, 6, 0]).replaced.tolist() == [
        False,
        True,
        False,
        False,
    ]


def test_by_age_alone_old_ranks_are_replaced_whatever_they_score():
    chosen = _choose(ReplaceWorst(age=5), [2.0, 2.0, 3.0, 1.0], [5, 4, 9, 7])
    assert chosen.replaced.tolist() == [True, False, False, True]


def test_a_rank_without_score_is_the_worst_and_no_donor():
    chosen = _choose(ReplaceWorst(worst_ratio=0.25, donor_ratio=1), [1.0, math.nan, -math.inf, 2.0])
    assert chosen.replaced.tolist() == [False, True, False, False]
    np.testing.assert_allclose(chosen.weights[1], [1 / 3, 0, 1 / 3, 1 / 3])
    spared = _choose(ReplaceWorst(threshold=1.5, donor_ratio=1), [1.0, math.nan, 3.0], [1, 0, 1])
    assert spared.weights[0].tolist() == [0, 0, 1]


def test_infinite_scores_weigh_like_large_ones():
    rule = ReplaceWorst(worst_ratio=0.3, average="weighted_mean", donor_ratio=1)
    weights = _choose(rule, [math.inf, 1.0, math.inf, -math.inf]).weights[3]
    np.testing.assert_allclose(weights, [0.4, 0.2, 0.4, 0], rtol=1e-6)
    weights = _choose(rule, [math.inf, 1.0, math.inf, 0.0]).weights[3]
    np.testing.assert_allclose(weights, [0.5, 0, 0.5, 0], atol=1e-6)


def test_equal_scores_at_the_border_take_turns():
    rule = ReplaceWorst(worst_ratio=0.25)
    gone = [_choose(rule, [0.0, 0.0, 0.0, 1.0], seed=seed).replaced for seed in range(20)]
    assert np.sum(gone, axis=1).tolist() == [1] * 20
    assert np.any(gone, axis=0).tolist() == [True, True, True, False]


def test_donors_are_drawn_for_each_rank_separately():
    rule = ReplaceWorst(threshold=1.0, donor_ratio=0.2)
    score = [0.0] * 5 + [2.0] * 5
    weights = np.asarray(_choose(rule, score).weights)
    assert (np.sum(weights > 0, axis=1) == [2] * 5 + [0] * 5).all()
    assert len({tuple(row) for row in weights[:5].tolist()}) > 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "no rank would ever be chosen; give threshold, worst_ratio or age"),
        ({"threshold": math.nan}, "threshold is nan; expected a score, or None"),
        ({"worst_ratio": 0}, "worst_ratio is 0; expected a number above 0 and at most 1"),
        ({"age": 1, "donor_ratio": 1.5}, "donor_ratio is 1.5; expected a number above 0"),
        ({"age": 1, "average": "median"}, "average is 'median'; choose from"),
        ({"age": 1, "momentum": 1}, "momentum is 1; expected a number of at least 0 and below 1"),
        ({"age": 1, "every": 0}, "every is 0; expected an integer of at least 1"),
        ({"age": -1}, "age is -1; expected an integer of at least 0"),
        ({"age": (5, 2)}, r"age is \(5, 2\); expected the lower bound of the range before the"),
        ({"age": ()}, r"age is \(\); expected an integer, or the lower and the upper"),
    ],
)
def test_bad_rules_say_why(options, message):
    with pytest.raises(ValueError, match=message):
        ReplaceWorst(**options)


def test_rules_are_compared_by_value():
    one = ReplaceWorst(worst_ratio=np.float32(0.5), age=[np.int64(2), 3])
    other = ReplaceWorst(worst_ratio=0.5, age=(2, 3))
    assert one == other
    assert hash(one) == hash(other)


def test_a_population_refuses_bad_arguments():
    from mpi4py import MPI

    key, rule = jax.random.key(0), ReplaceWorst(age=1)
    with pytest.raises(ValueError, match="rule is 3; expected"):
        Population.create(3, key, MPI.COMM_SELF)
    with pytest.raises(ValueError, match="this rank is not in comm"):
        Population.create(rule, key, None)
    with pytest.raises(ValueError, match=r"score has shape \(\); expected \(1,\), which is \(W,\)"):
        rule.choose(key, jnp.zeros(()), jnp.int32(0))
    population = Population.create(rule, key, MPI.COMM_SELF)
    with pytest.raises(ValueError, match="params has no leaves"):
        population.update(key, {}, 0.0)
    with pytest.raises(ValueError, match=r"params\['steps'\] has dtype int32; only floating"):
        population.update(key, {"steps": jnp.int32(1)}, 0.0)
    with pytest.raises(ValueError, match=r"score has shape \(1,\)"):
        population.update(key, {"w": jnp.ones(2)}, jnp.zeros(1))


def test_a_single_rank_is_never_replaced():
    from mpi4py import MPI

    population = Population.create(ReplaceWorst(age=1), jax.random.key(0), MPI.COMM_SELF)
    params = {"w": jnp.array([1.0, jnp.nan])}
    for call in range(3):
        # Raw keys work like typed ones.
        population, params, replaced = population.update(jax.random.PRNGKey(call), params, call)
        assert not replaced
    metrics = population.metrics()
    assert int(metrics["age"]) == int(metrics["calls"]) == 3
    assert float(metrics["score"]) == 1.0
    assert params["w"].tolist()[:1] == [1.0]


def _params(rank):
    random = np.random.default_rng(rank)
    return {
        "dense": random.normal(size=(3, 2)).astype(np.float32),
        "half": np.asarray(jnp.asarray(random.normal(size=4), jnp.bfloat16)),
        "scale": np.float32(rank),
    }


def _scores(rank, ranks):
    """Returns scores such that each rank is worst in turn; some are missing or infinite."""
    score = np.array([(rank + call // 3) % ranks for call in range(_CALLS)], np.float32) / ranks
    if rank == 1:
        score[:2] = np.nan
    if rank == 2:
        score[4] = -np.inf
    return score


@pytest.mark.mpi
def test_ranks_hold_what_one_process_computes(tmp_path):
    ranks = 4
    printed = run_in_turn(ranks, __file__, tmp_path)

    total = 0
    for name, rule in _RULES.items():
        population = [twin.Rank(_params(rank)) for rank in range(ranks)]
        population[0].params["dense"][0, 0] = np.inf
        gone = []
        for call in range(_CALLS):
            for rank in population:
                rank.params = {**rank.params, "dense": rank.params["dense"] + np.float32(0.125)}
            score = [_scores(rank, ranks)[call] for rank in range(ranks)]
            key, _ = jax.random.split(jax.random.key(call))
            draws = functools.partial(_draws, key, ranks)
            gone.append(twin.update_all(population, rule, score, draws))
        total += np.sum(gone)
        for number, rank in enumerate(population):
            held = np.load(tmp_path / f"{name}-{number}.npz")
            label = f"{name} on rank {number}"
            for leaf in ("dense", "half", "scale"):
                want = rank.params[leaf].astype(np.float32)
                rough = 1e-2 if leaf == "half" else 1e-5
                np.testing.assert_allclose(held[leaf], want, rough, 1e-6, err_msg=label)
            np.testing.assert_array_equal(held["replaced"], np.array(gone)[:, number], label)
            facts = [rank.age, rank.calls, rank.replaced, rank.replacements]
            assert held["facts"].tolist() == facts, label
            np.testing.assert_allclose(held["score"], rank.mean, rtol=1e-5, err_msg=label)
    assert total > 8
    spared = [json.loads(output.stdout)["spared"] for output in printed]
    assert all(5 <= least <= 50 for least in spared)
    assert len(set(spared)) > 1
    assert [output.stderr for output in printed] == [""] * ranks


def _program(folder):
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    rank, ranks = world.Get_rank(), world.Get_size()
    for name, rule in _RULES.items():
        population = Population.create(rule, jax.random.key(99), world)
        params = jax.tree.map(jnp.asarray, _params(rank))
        if rank == 0:
            params["dense"] = params["dense"].at[0, 0].set(jnp.inf)

        def step(carry, inputs):
            population, params = carry
            call, score = inputs
            params = {**params, "dense": params["dense"] + 0.125}
            # Only the key of the first rank is used.
            key = jax.random.key(call + 100 * rank)
            population, params, replaced = population.update(key, params, score)
            return (population, params), replaced

        run = jax.jit(functools.partial(lax.scan, step), donate_argnums=0)
        inputs = jnp.arange(_CALLS), jnp.asarray(_scores(rank, ranks))
        (population, params), replaced = run((population, params), inputs)
        metrics = population.metrics()
        np.savez(
            Path(folder) / f"{name}-{rank}.npz",
            **{leaf: np.asarray(x, np.float32) for leaf, x in params.items()},
            replaced=replaced,
            facts=[int(metrics[x]) for x in ("age", "calls", "replaced", "replacements")],
            score=metrics["score"],
        )
    drawn = Population.create(ReplaceWorst(age=(5, 50)), jax.random.key(1), world)
    print(json.dumps({"spared": int(drawn.spared)}))


if __name__ == "__main__":
    _program(sys.argv[1])

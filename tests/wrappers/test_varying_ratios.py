"""A `Mixture` whose ratios vary: the laws of the same ratios that stay, for every value."""

import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import jaxbuf
from jaxbuf import (
    Balanced,
    Blend,
    Mixture,
    Prioritized,
    RankBased,
    Recent,
    Softmax,
    Staleness,
    Uniform,
    Varying,
    testing,
)
from jaxbuf.wrappers import quotas
from tests.operations import quick

KEY = jax.random.key(0)
NAN = float("nan")
PRIORITIES = (0.5, 0.0, 3.0, 1.0, 8.0, 0.25, 2.0)
COUNT = len(PRIORITIES)
PLAIN = Prioritized(alpha=1.0)


def part(first=0, sampler=PLAIN):
    """A buffer with seven numbers from ``first`` on."""
    buffer = jaxbuf.ItemBuffer.create(jnp.int32(0), 9, sampler=sampler)
    by = "score" if buffer.uses_score else "priority"
    uses = buffer.uses_score or sampler.uses_priority
    options = {by: jnp.asarray(PRIORITIES)} if uses else {}
    return buffer.add(jnp.arange(first, first + COUNT, dtype=jnp.int32), **options)


def two(ratios=(0.5, 0.5), sampler=PLAIN, other=PLAIN):
    return Mixture.create([part(0, sampler), part(100, other)], Varying(ratios))


def fixed(mixture, ratios):
    """The same parts at ratios that stay."""
    return Mixture.create(mixture.parts, ratios)


def nested(outer=(0.5, 0.5), inner=(0.5, 0.5)):
    return Mixture.create([part(200), two(inner)], Varying(outer))


def values_of_any_size():
    random = np.random.default_rng(0)
    plain = [[1, 1], [3, 1], [1, 1, 1], [0, 2, 1], [0.1, 0.2, 0.7], [1e-3, 0, 0, 5], [1]]
    ends = [[3e38, 3e38, 3e38], [1e-45, 0], [1e-45, 3e-45, 1e-38], [3e38, 1e-45], [-0.0, 2]]
    drawn = [random.random(n) for n in (2, 3, 40, 130) for _ in range(20)]
    wide = [2.0 ** random.uniform(-149, 127, n) for n in (2, 3, 130) for _ in range(20)]
    near = [2.0 ** random.integers(-33, 1, n) for n in (2, 3) for _ in range(20)]
    return [np.asarray(x, np.float32) for x in (*plain, *ends, *drawn, *wide, *near)]


@pytest.mark.slow
def test_counts_are_those_of_ratios_that_stay():
    """For every value and any number of rows, bit for bit."""
    count = jax.jit(
        jax.vmap(lambda x, rows: quotas.divided(rows, quotas.in_units_of(x)), (None, 0))
    )
    rows = np.array([0, 1, 2, 3, 7, 10, 64, 255, 256, 1000, 4096, 2**20 + 1, 2**31 - 1], np.int32)
    pad = {}
    for ratios in values_of_any_size():
        pad.setdefault(len(ratios), []).append(ratios)
    for group in pad.values():
        for ratios in group:
            units = quotas.in_units(quotas.check_static(ratios.tolist(), len(ratios)))
            expected = [quotas.divided(int(n), units) for n in rows]
            np.testing.assert_array_equal(count(ratios, rows), expected)
            assert quotas.are_legal(jnp.asarray(ratios))
            shares = np.asarray(ratios, np.float64) / np.asarray(ratios, np.float64).sum()
            np.testing.assert_allclose(quotas.shares(jnp.asarray(ratios)), shares, 1e-6, 1e-37)


OPTIONS = [
    {"beta": 0.7, "normalize": normalize, "within": within}
    for normalize, within in itertools.product(("batch", "buffer", "mean", None), (None, "part"))
]


@jax.jit
def every_weight(mixture, sample):
    return [jaxbuf.importance_weights(mixture, sample, **options) for options in OPTIONS]


@pytest.mark.parametrize(
    "ratios",
    [(0.9, 0.1), *(pytest.param(x, marks=pytest.mark.slow) for x in ((1.0, 0.0), (0.37, 0.11)))],
)
def test_a_batch_is_like_one_of_ratios_that_stay(ratios):
    """Its rows, slots, probabilities, weights, and what the mixture answers as a whole."""
    mixture = jax.jit(lambda m, x: m.set_hyperparameters(ratios=x))(two(), jnp.asarray(ratios))
    like = fixed(mixture, np.asarray(ratios, np.float32).tolist())
    sample, expected = (jaxbuf.sample(m, KEY, 13) for m in (mixture, like))
    assert mixture.counts(13).tolist() == list(like.counts(13))
    np.testing.assert_array_equal(mixture.part_of(sample.slots), like.part_of(expected.slots))
    assert sample.valid.all()
    law = np.asarray(PRIORITIES) / sum(PRIORITIES)
    share = np.asarray(like.counts(13)) / 13
    number = np.asarray(sample.data)
    np.testing.assert_allclose(
        sample.probability, share[number // 100] * law[number % 100], rtol=1e-6
    )
    chex.assert_trees_all_equal(like.get(sample.slots).data, sample.data)
    one, other = every_weight(mixture, sample), every_weight(like, sample)
    chex.assert_trees_all_close(one, other, rtol=3e-6)
    # The last of these options, as one of a sample.
    drawn = mixture.sample(KEY, 13, **OPTIONS[-1]).weights
    np.testing.assert_allclose(drawn, one[-1], rtol=3e-6)
    _, following = jaxbuf.next_batch(mixture, KEY, 13, beta=0.7, within="part", donate=False)
    expected = jaxbuf.importance_weights(like, following, 0.7, within="part")
    np.testing.assert_allclose(following.weights, expected, rtol=3e-6)
    for name in ("support", "size", "capacity"):
        one, other = (getattr(m, name) for m in (mixture, like))
        one, other = (x() if callable(x) else x for x in (one, other))
        chex.assert_trees_all_close(one, other, rtol=1e-6)
    one, other = (m.get(sample.slots).probability for m in (mixture, like))
    np.testing.assert_allclose(one, other, rtol=1e-6)
    for rows in (1, 5, 7, 8, 20):
        for asked in (rows, jnp.int32(rows)):
            assert bool(mixture.can_sample(asked)) == bool(like.can_sample(asked))
    half = Mixture.create([part(), part(100).clear()], Varying(ratios))
    assert bool(half.can_sample()) == (ratios[1] == 0)


SAMPLERS = {
    "strata": PLAIN,
    "distinct": Prioritized(alpha=1.0, replacement=False),
    "ranks": RankBased(),
    "staleness": Staleness(),
    "softmax": Softmax(4.0, replacement=False, fallback=True),
    "recent": Recent(0.3, 2, PLAIN),
    "recent that varies": Recent(Varying(0.3), 2, PLAIN),
    "recent in recent": Recent(0.5, 3, Recent(0.3, 2, PLAIN)),
    "blend": Blend((PLAIN, Recent(0.5, 2), Uniform()), (0.2, 0.3, 0.5)),
    "uniform": Uniform(replacement=False),
}


def histograms(samples, first, rows):
    """For each item the number of batches that have it so many times, and its probability."""
    data, valid = np.asarray(samples.data), np.asarray(samples.valid)
    hits = [((data == first + item) & valid) for item in range(COUNT)]
    times = [np.bincount(hit.sum(axis=1), minlength=rows + 1) for hit in hits]
    told = np.asarray(samples.probability)
    return times, [told[hit].mean() if hit.any() else 0.0 for hit in hits]


def check_same_law(one, other, first, rows):
    """Chi-square of two sets of batches at 1e-5 for each item, for how often a batch has it."""
    (seen, told), (like, expected) = (histograms(x, first, rows) for x in (one, other))
    both = [pair for pair in zip(told, expected, strict=True) if min(pair) > 0]
    np.testing.assert_allclose(*zip(*both, strict=True), rtol=2e-5)
    for pair in zip(seen, like, strict=True):
        table = np.stack(pair)
        table = table[:, table.sum(axis=0) > 0]
        if table.shape[1] > 1:
            assert stats.chi2_contingency(table).pvalue > 1e-5


# The others say the same of what differs less.
QUICK = ("ranks", "blend")


def check_part(mixture, shares, rows, item=lambda data: data):
    """Rows of the first part have the law of a draw of just so many; ``item`` numbers the items."""
    keys, later = (jax.random.split(jax.random.key(seed), 4000) for seed in (0, 1))

    @jax.jit
    def draw(keys, ratios):
        varied = mixture.set_hyperparameters(ratios=ratios)
        return jax.vmap(lambda key: varied.sample(key, rows))(keys)

    for share in shares:
        alone = jax.jit(jax.vmap(functools.partial(mixture.parts[0].sample, batch_size=share)))
        alone, batches = alone(later), draw(keys, jnp.array([share, rows - share]))
        scaled = alone.replace(probability=alone.probability * (share / rows))
        flat = (batch.replace(data=item(batch.data)) for batch in (batches, scaled))
        check_same_law(*flat, 0, rows)


@pytest.mark.parametrize("name", quick(SAMPLERS, QUICK))
def test_rows_of_a_part_have_the_law_of_a_draw_of_just_so_many(name):
    check_part(two(sampler=SAMPLERS[name]), (1, 5), 12)


@pytest.mark.slow
@pytest.mark.parametrize("replacement", [True, False])
def test_balanced_windows_of_a_part(replacement):
    """Each environment gives its share of the rows of just that number."""

    def rings(first):
        sampler = Balanced(replacement=replacement)
        buffer = jaxbuf.TrajectoryBuffer.create(jnp.int32(0), 3, 4, sampler=sampler)
        few = jnp.arange(4)[None] < jnp.array([[4], [1], [2]])
        return buffer.add(first + jnp.arange(12, dtype=jnp.int32).reshape(3, 4), mask=few)

    mixture = Mixture.create([rings(0), rings(100)], Varying((1, 1)))
    check_part(mixture, (2, 5), 8, lambda steps: steps[:, :, 0] // 4)
    longer = mixture.sample(KEY, 8, sequence_length=2)
    assert longer.data.shape == (8, 2)
    assert (longer.data[:, 1] - longer.data[:, 0] == 1).all()
    assert mixture.part_of(longer.slots).tolist() == [0] * 4 + [1] * 4


def test_a_mixture_as_a_part():
    mixture = nested((1, 2), (3, 1))
    assert [*mixture.hyperparameters] == ["ratios", "1/ratios"]
    mixture = jaxbuf.set_hyperparameters(
        mixture, {"1/ratios": jnp.array([1.0, 3.0]), "ratios": (1, 1)}
    )
    sample = jaxbuf.sample(mixture, KEY, 16)
    assert (sample.data // 100).tolist() == [2] * 8 + [0] * 2 + [1] * 6
    like = Mixture.create([part(200), fixed(two(), (1, 3))], (1, 1))
    for within in (None, "part"):
        one, other = (
            jaxbuf.importance_weights(m, sample, 1.0, "buffer", within=within)
            for m in (mixture, like)
        )
        np.testing.assert_allclose(one, other, rtol=3e-6)
    # A part of a mixture whose ratios stay inside of one whose ratios vary, and the reverse.
    for outer in (
        Mixture.create([part(200), fixed(two(), (1, 3))], Varying((1, 1))),
        Mixture.create([part(200), two((1, 3))], (1, 1)),
    ):
        assert (jaxbuf.sample(outer, KEY, 16).data // 100).tolist() == [2] * 8 + [0] * 2 + [1] * 6
        # An item without mass is none that can be drawn.
        assert outer.can_sample(12)
        assert not outer.can_sample(14)


def test_illegal_ratios_stay_out_and_are_counted_once():
    mixture = nested()
    change = jax.jit(lambda m, x, y: m.set_hyperparameters({"ratios": x, "1/ratios": y}))
    good = jnp.array([0.25, 0.75])
    for wrong in ([NAN, 1.0], [-1.0, 1.0], [0.0, 0.0], [jnp.inf, 1.0]):
        refused = change(mixture, good, jnp.array(wrong))
        chex.assert_trees_all_equal(refused.hyperparameters, mixture.hyperparameters)
        metrics = refused.metrics()
        assert (metrics["rejected"], metrics["1/rejected"]) == (1, 0)
        inner = jax.jit(lambda m, x: m.set_hyperparameters({"1/ratios": x}))
        inner = inner(mixture, jnp.array(wrong)).metrics()
        assert (inner["rejected"], inner["1/rejected"]) == (0, 1)
        made = jax.jit(lambda x: two(x))(jnp.array(wrong))
        assert made.metrics()["rejected"] == 1
        assert made.counts(4).tolist() == [2, 2]
        for call in (lambda x: mixture.set_hyperparameters(ratios=x), two):
            with pytest.raises(ValueError, match="expected finite numbers of at least"):
                call(wrong)
    changed = change(mixture, good, jnp.array([0.0, 2.0])).metrics()
    assert (changed["ratios[0]"], changed["ratios[1]"], changed["rejected"]) == (0.25, 0.75, 0)
    assert (changed["1/ratios[0]"], changed["1/ratios[1]"]) == (0, 2)


def test_values_of_samplers_and_ratios_in_one_call():
    varying = Prioritized(alpha=1.0, uniform_mix=Varying(0.5))
    mixture = two(sampler=varying, other=varying)
    assert [*mixture.hyperparameters] == ["ratios", "0/uniform_mix", "1/uniform_mix"]
    change = jax.jit(
        lambda m, x, a, b: m.set_hyperparameters({"0/uniform_mix": a, "1/uniform_mix": b}, ratios=x)
    )
    changed = change(mixture, jnp.array([1.0, 3.0]), jnp.float32(0.25), jnp.float32(1.0))
    assert changed.hyperparameters["0/uniform_mix"] == 0.25
    assert changed.hyperparameters["1/uniform_mix"] == 1
    refused = change(mixture, jnp.array([1.0, 3.0]), jnp.float32(0.25), jnp.float32(2.0))
    chex.assert_trees_all_equal(refused.hyperparameters, mixture.hyperparameters)
    rejected = [refused.metrics()[name] for name in ("rejected", "0/rejected", "1/rejected")]
    assert rejected == [1, 0, 0]
    again = jaxbuf.set_hyperparameters(mixture, dict(changed.hyperparameters), donate=False)
    chex.assert_trees_all_equal(again.hyperparameters, changed.hyperparameters)
    alone = mixture.set_hyperparameters(uniform_mix=0.125, part=1)
    assert alone.hyperparameters["1/uniform_mix"] == 0.125
    still = fixed(mixture, (1, 1)).set_hyperparameters({"0/uniform_mix": 0.5, "1/uniform_mix": 0})
    assert still.hyperparameters["1/uniform_mix"] == 0


def test_annealed_in_a_loop_in_place_and_over_a_population():
    """The share of the second part grows step by step, and differs by member."""
    mixture = two()

    def step(mixture, share):
        mixture = mixture.set_hyperparameters(ratios=jnp.stack([1 - share, share]))
        mixture = mixture.add(jnp.arange(2, dtype=jnp.int32) + 100, part=1)
        batch = mixture.sample(KEY, 8)
        return mixture.update_priority(batch.slots, jnp.ones(8)), jnp.sum(batch.data >= 100)

    shares = jnp.linspace(0.0, 1.0, 5)
    mixture_after, counts = jax.jit(lambda m: jax.lax.scan(step, m, shares))(mixture)
    assert counts.tolist() == [0, 2, 4, 6, 8]
    assert mixture_after.metrics()["rejected"] == 0
    many = jax.jit(jax.vmap(lambda share: step(mixture, share)[1]))(shares)
    np.testing.assert_array_equal(many, counts)
    members = jax.jit(jax.vmap(lambda x: two(jnp.stack([x, 1 - x]))))(shares)
    drawn = jax.jit(jax.vmap(lambda m: m.sample(KEY, 8).data))(members)
    assert (drawn >= 100).sum(axis=1).tolist() == [8, 6, 4, 2, 0]
    large = [jaxbuf.ItemBuffer.create(jnp.zeros(64), 512, sampler=PLAIN) for _ in range(2)]
    large = Mixture.create(large, Varying((1, 1)))

    def cycle(mixture, key):
        mixture = mixture.add(jnp.ones((4, 64)), part=0).set_hyperparameters(ratios=(1, 2))
        batch = mixture.sample(key, 8)
        return mixture.update_priority(batch.slots, jnp.ones(8)), batch.probability

    testing.assert_no_copy(
        lambda m, keys: jax.lax.scan(cycle, m, keys), large, jax.random.split(KEY, 3)
    )
    # Nor does the method itself copy the parts.
    changed = large.set_hyperparameters(ratios=(1, 3))
    assert changed.parts[0].data is large.parts[0].data
    assert changed.counts(8).tolist() == [2, 6]


def test_next_batch_tells_the_samplers_which_items_were_drawn():
    mixture = two((1, 3), Staleness(replacement=False), Staleness(replacement=False))
    after, batch = jaxbuf.next_batch(mixture, KEY, 8, donate=False)
    assert mixture.part_of(batch.slots).tolist() == [0] * 2 + [1] * 6
    for i, rows in enumerate((slice(0, 2), slice(2, 8))):
        last = after.parts[i].sampler_state.last[:COUNT]
        drawn = np.unique(np.asarray(batch.data[rows]) % 100)
        assert np.flatnonzero(last).tolist() == drawn.tolist()
    outer = Mixture.create([part(200), mixture], Varying((1, 1)))
    outer, batch = jaxbuf.next_batch(outer, KEY, 8)
    assert batch.valid.all()
    assert (outer.parts[1].parts[1].sampler_state.last > 0).sum() == 3


def test_devices_checkpoints_and_descriptions(tmp_path):
    hosted = jaxbuf.Hosted.create(lambda: two((1, 3)))
    assert (hosted.sample(KEY, 8).data >= 100).sum() == 6
    hosted = jaxbuf.set_hyperparameters(hosted, ratios=jnp.array([3.0, 1.0]))
    assert (hosted.sample(KEY, 8).data >= 100).sum() == 2
    assert hosted.hyperparameters["ratios"].tolist() == [3, 1]
    mixture = two((1, 3))
    assert "Varying()" in repr(mixture)
    jaxbuf.save(tmp_path / "varying", mixture)
    loaded = jaxbuf.load(tmp_path / "varying", jax.eval_shape(two))
    chex.assert_trees_all_equal(loaded.hyperparameters, mixture.hyperparameters)
    jaxbuf.save(tmp_path / "fixed", fixed(mixture, (1, 3)))
    with pytest.raises(ValueError, match=r"like.ratios is .*make another mixture of its parts"):
        jaxbuf.load(tmp_path / "varying", fixed(mixture, (1, 3)))
    with pytest.raises(ValueError, match=r"like.ratios is Varying.*make another mixture"):
        jaxbuf.load(tmp_path / "fixed", mixture)


class Own:
    """A buffer of somebody else, which draws batches of known sizes only."""

    capacity = 4
    sample = next_batch = add = can_sample = clear = metrics = support = lambda self: None


jax.tree_util.register_pytree_node(Own, lambda own: ([jnp.zeros(1)], None), lambda *_: Own())


def with_part(buffer):
    return Mixture.create([part(), buffer], Varying((1, 1)))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: m.set_hyperparameters(ratios=(1, 1), part=1), "leave part out"),
        (lambda m: m.set_hyperparameters(ratios=(1, 1, 1)), "2 buffers and 3 ratios"),
        (lambda m: m.replace(ratios=(0.5, 0.5)), r"with mixture.set_hyperparameters\(ratios="),
        (lambda m: m.set_hyperparameters(ratios=1.0), "expected a list of numbers"),
        (lambda m: m.set_hyperparameters(ratios={"a": 1}), "ratios is a dict; expected a list"),
        (lambda m: m.set_hyperparameters({"ratios": (1, 1)}, ratios=(1, 1)), "given twice"),
        (lambda m: m.set_hyperparameters({"2/alpha": 1.0}), "part is '2'; expected"),
        (lambda m: m.set_hyperparameters({"1/alpha": 1.0}), "alpha does not vary"),
        (lambda m: m.set_hyperparameters(alpha=1.0), "part is None; expected"),
        (lambda m: fixed(m, (1, 1)).set_hyperparameters(ratios=(1, 1)), "create the mixture with"),
        (lambda m: Mixture.create(m.parts, Varying((1, 1, 1))), "2 buffers and 3 ratios"),
        (lambda m: Mixture.create(m.parts, m.ratios), "ratios is None; expected"),
        (lambda m: with_part(Own()), "cannot draw a number of rows that varies"),
        (
            lambda m: with_part(part(0, jaxbuf.Shuffled())).next_batch(KEY, 4),
            "could not be given back",
        ),
        (
            lambda m: with_part(jaxbuf.Queue.create(jnp.int32(0), 4)).next_batch(KEY, 4),
            r"parts\[1\] is a Queue, and the ratios vary",
        ),
        (
            lambda m: with_part(jaxbuf.Queue.create(jnp.int32(0), 4)).sample(KEY, 4),
            r"parts\[1\] is a Queue",
        ),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call(two())

"""Numbers of samplers that vary, and another sampler for the same items."""

import dataclasses
import math
import typing

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

import jaxbuf
import jaxbuf.interop.flashbax as fbx
from jaxbuf import (
    Balanced,
    Blend,
    Prioritized,
    RankBased,
    Recent,
    Shuffled,
    Softmax,
    Staleness,
    Uniform,
    Varying,
    testing,
)
from jaxbuf.core import hyperparameters
from tests.models import items as reference
from tests.models.blend import blended
from tests.models.ranks import by_rank
from tests.models.sampling import recent_probabilities
from tests.models.staleness import stale_law
from tests.operations import quick
from tests.traces import LOWERED, counted_traces

KEY = jax.random.key(0)
VALUES = (0.5, 0.0, 3.0, 1.0, 8.0, 0.25, 2.0)
COUNT, CAPACITY = len(VALUES), 9
EVEN = np.full(COUNT, 1 / COUNT)
BATCH, DRAWS = 8, 2000
NAN = float("nan")


def filled(sampler, evictor=None):
    """A buffer that holds the row numbers of the values as its items."""
    given = {"evictor": evictor} if evictor else {}
    buffer = jaxbuf.ItemBuffer.create(jnp.int32(0), CAPACITY, sampler=sampler, **given)
    return with_items(buffer)


def with_items(buffer):
    by = "score" if buffer.uses_score else "priority"
    uses = buffer.uses_score or buffer.sampler.uses_priority
    options = {by: jnp.asarray(VALUES, jnp.float32)} if uses else {}
    return buffer.add(jnp.arange(COUNT, dtype=jnp.int32), **options)


def by_priority(alpha=1.0, epsilon=0.0, mix=0.0):
    sampler = Prioritized(alpha, epsilon=epsilon, uniform_mix=mix)
    return reference.law_of(sampler, VALUES)[0]


def softmax(temperature):
    return scipy.special.softmax(np.asarray(VALUES) / temperature)


def ranked(alpha):
    return reference.proportional(by_rank(VALUES, alpha))


def recent(base, ratio):
    """The law of a batch with so many recent rows, rounded to an integer."""
    rows = math.floor(ratio * BATCH + 0.5)
    law = recent_probabilities([[*range(COUNT)]], dict(enumerate(base)), rows / BATCH, 2)
    return np.array([law[item] for item in range(COUNT)])


V = Varying(0.7)
PLAIN = Prioritized(alpha=1.0)
# The sampler, the name of a number, values of it, and the law under a value.
CASES = {
    "alpha": (Prioritized(alpha=V), "alpha", (0.0, 0.5, 1.0, 2.0), by_priority),
    "epsilon": (
        Prioritized(alpha=1.0, epsilon=V),
        "epsilon",
        (0.0, 0.3),
        lambda x: by_priority(1.0, x),
    ),
    "mix": (
        Prioritized(alpha=1.0, uniform_mix=V),
        "uniform_mix",
        (0.0, 0.3, 1.0),
        lambda x: by_priority(mix=x),
    ),
    "rank": (RankBased(alpha=V), "alpha", (0.0, 0.5, 2.0), ranked),
    "ratio over strata": (
        Recent(V, 2, PLAIN),
        "ratio",
        (0.0, 0.5, 1.0),
        lambda x: recent(by_priority(), x),
    ),
    "ratio over a blend in order": (
        Recent(V, 2, Blend((Balanced(), PLAIN), (1, 1))),
        "ratio",
        (0.2, 0.6),
        lambda x: recent(blended((EVEN, by_priority()), (0.5, 0.5)), x),
    ),
    "under a ratio": (
        Recent(0.5, 2, Softmax(temperature=V)),
        "temperature",
        (2.0, 5.0),
        lambda x: recent(softmax(x), 0.5),
    ),
    "weights": (
        Blend((PLAIN, Uniform(), Recent(1.0, 2)), Varying((1.0, 2.0, 3.0))),
        "weights",
        ((1.0, 0.0, 0.0), (0.0, 4.0, 4.0)),
        lambda x: blended((by_priority(), EVEN, recent(EVEN, 1.0)), np.asarray(x) / sum(x)),
    ),
    "in a blend": (
        Blend((Softmax(temperature=V), Softmax()), (0.5, 0.5)),
        "samplers[0].temperature",
        (2.0, 5.0),
        lambda x: blended((softmax(x), softmax(1.0)), (0.5, 0.5)),
    ),
}


@pytest.mark.parametrize(
    "name", quick(CASES, {"alpha", "mix", "rank", "ratio over strata", "weights"})
)
def test_draws_under_each_value_are_those_of_that_value(name):
    """Each buffer of a population has a value of its own; chi-square at 1e-4 for each."""
    sampler, number, values, law_of = CASES[name]
    empty = jaxbuf.ItemBuffer.create(jnp.int32(0), CAPACITY, sampler=sampler)

    @jax.jit
    @jax.vmap
    def run(value):
        if sampler.uses_priority and number in ("alpha", "epsilon"):
            # It applies to the priorities that are set from then on.
            buffer = with_items(empty.set_hyperparameters({number: value}))
        else:
            buffer = with_items(empty).set_hyperparameters({number: value})
        keys = jax.random.split(KEY, DRAWS)
        batch = jax.vmap(lambda key: buffer.sample(key, BATCH))(keys)
        return buffer, batch, buffer.get(buffer.latest(COUNT).slots).probability, buffer.support()

    buffers, batches, probability, support = run(jnp.asarray(values, jnp.float32))
    if name in ("alpha", "in a blend"):
        testing.assert_valid(buffers)
    assert not buffers.counters[:, 1].any()
    exact = "ratio" not in number
    for i, value in enumerate(values):
        law = law_of(value)
        if exact and not isinstance(sampler, Recent):
            np.testing.assert_allclose(probability[i], law, rtol=1e-5, atol=1e-9)
            assert support.count[i] == np.sum(law > 0)
            least = law[law > 0].min()
            np.testing.assert_allclose(support.least_probability[i], least, rtol=1e-5)
        data = np.asarray(batches.data[i])
        assert batches.valid[i].all()
        np.testing.assert_allclose(batches.probability[i], law[data], rtol=1e-5)
        seen = np.bincount(data.ravel(), minlength=COUNT)
        some = law > 0
        assert not seen[~some].any()
        expected = law[some] * data.size
        assert expected.min() > 5
        assert scipy.stats.chisquare(seen[some], expected).pvalue > 1e-4


@pytest.mark.slow
def test_a_part_of_a_batch_without_replacement_is_a_smaller_batch():
    """Its first rows, since later ones are drawn from what is left."""
    base = Prioritized(alpha=1.0, replacement=False)
    static, varying = (filled(Recent(ratio, 2, base)) for ratio in (0.75, Varying(0.75)))
    keys = jax.random.split(KEY, 4000)
    draw = jax.jit(jax.vmap(lambda buffer, key: buffer.sample(key, BATCH), in_axes=(None, 0)))
    one, two = draw(static, keys), draw(varying, keys)
    table = [np.bincount(np.ravel(x.data[:, 6:]), minlength=COUNT) for x in (one, two)]
    table = [np.delete(counts, 1) for counts in table]  # It has no mass.
    assert scipy.stats.chi2_contingency(table).pvalue > 1e-4
    assert one.valid.all()
    assert two.valid.all()


@pytest.mark.parametrize(
    "sampler",
    [
        pytest.param(Prioritized(alpha=V), marks=pytest.mark.slow),
        Recent(0.5, 2, Staleness(alpha=V, replacement=False)),
    ],
)
def test_the_same_draws_as_with_the_static_number(sampler):
    static = hyperparameters.bind(hyperparameters.split(sampler)[0], {"alpha": 0.7})
    one, two = filled(sampler), filled(static)
    for key in jax.random.split(KEY, 3):
        (one, first), (two, second) = one.next_batch(key, 4), two.next_batch(key, 4)
        chex.assert_trees_all_equal(first.slots, second.slots)
    chex.assert_trees_all_close(
        jax.tree.leaves(one.sampler_state), jax.tree.leaves(two.sampler_state), rtol=3e-7
    )


@pytest.mark.parametrize(
    ("alpha", "mix", "replacement"),
    quick(
        [(1.0, 0.0, True), (1.0, 0.0, False), (0.5, 0.0, True), (0.0, 0.2, False)],
        [(1.0, 0.0, True), (0.0, 0.2, False)],
    ),
)
def test_the_same_draws_as_with_a_number_that_has_a_shortcut(alpha, mix, replacement):
    fixed = filled(Prioritized(alpha, uniform_mix=mix, replacement=replacement))
    varying = Prioritized(Varying(alpha), uniform_mix=Varying(mix), replacement=replacement)
    varying = filled(varying)
    np.testing.assert_array_max_ulp(fixed.sampler_state.leaves, varying.sampler_state.leaves, 1)
    slots, zero = fixed.latest(COUNT).slots, jnp.zeros(COUNT)
    for change in (
        lambda buffer: buffer,
        lambda buffer: buffer.clear(),
        # Without any mass.
        lambda buffer: buffer.update_priority(slots, zero),
    ):
        draws = [change(buffer).sample(KEY, 16).slots for buffer in (fixed, varying)]
        chex.assert_trees_all_equal(*draws)


def test_a_new_alpha_keeps_the_masses_of_what_is_stored():
    buffer = jaxbuf.ItemBuffer.create(jnp.int32(0), 4, sampler=Prioritized(alpha=Varying(1.0)))
    buffer, slots = buffer.insert(jnp.arange(2), priority=jnp.array([100.0, 1.0]))
    before = buffer.get(slots).probability
    buffer = buffer.set_hyperparameters(alpha=0.1)
    chex.assert_trees_all_equal(buffer.get(slots).probability, before)
    # The priority that has the mass 100 under this alpha.
    np.testing.assert_allclose(buffer.metrics()["priority_max"], 1e20, rtol=1e-5)
    # A new item gets the largest mass that there is, and what is set now is set with the new alpha.
    buffer = buffer.add(jnp.array([2]))
    buffer = buffer.update_priority(slots, jnp.array([100.0, 100.0]), mask=jnp.array([False, True]))
    masses = np.array([100.0, 100.0**0.1, 100.0])
    np.testing.assert_allclose(buffer.sampler_state.leaves[:3], masses, rtol=1e-6)
    # Priorities that do not fit a float32 are the largest, or the smallest, that do.
    tiny = buffer.set_hyperparameters(alpha=1e-3)
    handed = tiny.with_sampler(Prioritized(alpha=1.0)).get(tiny.latest(3).slots).probability
    assert np.isfinite(tiny.metrics()["priority_max"])
    assert (handed > 0).all()


def test_the_staleness_applies_at_once():
    buffer = filled(Staleness(alpha=V))
    for key in jax.random.split(KEY, 2):
        buffer, _ = buffer.next_batch(key, 3)
    times, slots = np.asarray(buffer.sampler_state.last[:COUNT]), buffer.latest(COUNT).slots
    for alpha in (0.0, 3.0):
        law = buffer.set_hyperparameters(alpha=alpha).get(slots).probability
        np.testing.assert_allclose(law, stale_law(times, 2, alpha), rtol=1e-5)


ILLEGAL = {
    "alpha": (Prioritized(alpha=V), (NAN, -1.0, math.inf)),
    "epsilon": (Prioritized(epsilon=V), (NAN, -1.0, math.inf)),
    "uniform_mix": (Prioritized(uniform_mix=V), (NAN, -0.1, 1.1)),
    "temperature": (Softmax(temperature=V), (NAN, 0.0, -1.0, math.inf)),
    "ratio": (Recent(V, 2), (NAN, -0.1, 1.1)),
    "weights": (
        Blend((PLAIN, Uniform()), Varying((1.0, 1.0))),
        ((NAN, 1.0), (-1.0, 2.0), (0.0, 0.0), (math.inf, 1.0)),
    ),
}


@pytest.mark.parametrize("name", ILLEGAL)
def test_an_illegal_value(name):
    """Known when traced it is an error, and else it is refused and counted."""
    sampler, values = ILLEGAL[name]
    buffer = filled(sampler)
    for value in values:
        for given in (value, np.asarray(value), jnp.asarray(value, jnp.float32)):
            with pytest.raises(ValueError, match=name):
                buffer.set_hyperparameters({name: given})
        with pytest.raises(ValueError, match=name):
            jax.eval_shape(lambda b, value=value: b.set_hyperparameters({name: value}), buffer)
    traced = jnp.asarray(values, jnp.float32)
    after = jax.jit(jax.vmap(lambda x: buffer.set_hyperparameters({name: x})))(traced)
    assert (after.counters[:, 1] == 1).all()
    for i in range(len(values)):
        one = jax.tree.map(lambda leaf, i=i: leaf[i], after)
        chex.assert_trees_all_equal(one.hyperparameters, buffer.hyperparameters)
        chex.assert_trees_all_equal(one.sampler_state, buffer.sampler_state)
    # A first value is no different.
    with pytest.raises(ValueError, match=name):
        dataclasses.replace(sampler, **{name: Varying(values[-1])})


def test_all_values_of_a_call_apply_or_none():
    buffer = filled(Prioritized(Varying(0.5), epsilon=Varying(0.1), uniform_mix=Varying(0.2)))

    @jax.jit
    def change(buffer, alpha, epsilon):
        return buffer.set_hyperparameters({"uniform_mix": 0.5}, alpha=alpha, epsilon=epsilon)

    def values(buffer):
        return [round(float(x), 6) for x in buffer.hyperparameters.values()]

    refused = change(buffer, NAN, -1.0)
    assert values(refused) == values(buffer)
    assert refused.metrics()["rejected"] == 1
    refused = change(refused, 0.7, -1.0)
    assert values(refused) == values(buffer)
    assert refused.metrics()["rejected"] == 2
    assert values(change(refused, 0.7, 0.0)) == [0.7, 0.0, 0.5]
    for epsilon in (-1, 1e39):
        with pytest.raises(ValueError, match="epsilon is"):
            buffer.set_hyperparameters(alpha=0.3, epsilon=epsilon)


def test_a_first_value_may_be_traced():
    @jax.jit
    @jax.vmap
    def create(alpha):
        sampler = Prioritized(alpha=Varying(alpha))
        return jaxbuf.ItemBuffer.create(jnp.int32(0), 4, sampler=sampler)

    buffers = create(jnp.array([0.3, NAN, -1.0]))
    np.testing.assert_allclose(buffers.hyperparameters["alpha"], [0.3, 0.6, 0.6])
    assert buffers.counters[:, 1].tolist() == [0, 1, 1]


def test_weights_may_be_traced_one_by_one():
    def blend(weights):
        return Blend((PLAIN, Uniform()), Varying(weights))

    buffer = filled(blend((0.5, 0.5)))
    changes = (
        lambda a: buffer.set_hyperparameters(weights=[a, 1 - a]),
        lambda a: buffer.with_sampler(blend((a, 1 - a))),
        lambda a: jaxbuf.ItemBuffer.create(jnp.int32(0), 4, sampler=blend([a, 1 - a])),
    )
    for change in changes:
        weights = jax.jit(change)(jnp.float32(0.25)).hyperparameters["weights"]
        assert weights.tolist() == [0.25, 0.75]
    with pytest.raises(ValueError, match=r"weights is .*expected finite numbers"):
        buffer.set_hyperparameters(weights=[[1], 1, 2])
    for wrong in ([[1], 1], [[0.5], [0.5]]):
        with pytest.raises(ValueError, match=r"weights is .*expected finite numbers"):
            jax.jit(lambda a, wrong=wrong: buffer.set_hyperparameters(weights=[*wrong, a]))(1.0)


def test_names_and_paths():
    inner = Blend((Prioritized(alpha=Varying(1.0)), Prioritized(alpha=Varying(2.0))), (1, 1))
    buffer = filled(Recent(Varying(0.5), 2, inner))
    names = ["ratio", "base.samplers[0].alpha", "base.samplers[1].alpha"]
    assert {*buffer.hyperparameters} == {*names}
    changed = buffer.set_hyperparameters({"base.samplers[1].alpha": 3.0, "ratio": 0.25})
    assert [float(changed.hyperparameters[name]) for name in names] == [0.25, 1.0, 3.0]
    # A path is right where a name would do, too.
    assert [*filled(Recent(0.5, 2, Prioritized(alpha=V))).hyperparameters] == ["alpha"]
    one = filled(Recent(0.5, 2, Prioritized(alpha=V))).set_hyperparameters({"base.alpha": 2})
    assert one.hyperparameters["alpha"] == 2
    metrics = changed.metrics()
    assert [float(metrics[name]) for name in names] == [0.25, 1.0, 3.0]
    weighted = filled(Blend((PLAIN, Uniform()), Varying((1.0, 3.0)))).metrics()
    assert (weighted["weights[0]"], weighted["weights[1]"]) == (1.0, 3.0)
    with pytest.raises(ValueError, match=r"name of 2 numbers; choose from .*samplers\[1\]"):
        buffer.set_hyperparameters(alpha=1.0)
    with pytest.raises(ValueError, match="twice"):
        one.set_hyperparameters({"base.alpha": 2.0}, alpha=1.0)


@pytest.mark.parametrize(
    ("sampler", "given", "says"),
    [
        (Prioritized(), {"alpha": 1.0}, r"Prioritized\(alpha=jaxbuf.Varying"),
        (
            Prioritized(alpha=V),
            {"epsilon": 1.0},
            r"alpha may change; create .*\(epsilon=jaxbuf.Varying",
        ),
        (Uniform(), {"alpha": 1.0}, "alpha does not vary in Uniform.*temperature of Softmax"),
        (Prioritized(alpha=V), {"alpha": [1.0, 2.0]}, "shape"),
        (Prioritized(alpha=V), [0.5], "expected a dict"),
        (Blend((PLAIN, Uniform()), Varying((1, 1))), {"weights": (1, 1, 1)}, "shape"),
    ],
)
def test_a_wrong_name_or_value(sampler, given, says):
    buffer = filled(sampler)
    with pytest.raises(ValueError, match=says):
        buffer.set_hyperparameters(given)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Prioritized(initial_priority=Varying(1.0)),
        lambda: Prioritized(stratified=Varying(True)),
        lambda: Uniform(replacement=Varying(True)),
        lambda: Recent(0.5, Varying(3)),
        lambda: RankBased(sort_every=Varying(3)),
        lambda: Blend((PLAIN, Uniform()), (Varying(0.5), Varying(0.5))),
        lambda: jaxbuf.Freshness(max_use=Varying(3)),
        lambda: jaxbuf.Diversity(cutoff=Varying(0.5)),
        lambda: jaxbuf.Episodes(discount=Varying(0.5)),
        lambda: jaxbuf.ItemBuffer.create(jnp.int32(0), Varying(4)),
        lambda: filled(Own(power=Varying(1.0), fixed=Varying(1.0))),
        lambda: filled(Uniform(), evictor=Tuned(Varying(1.0))),
    ],
)
def test_varying_where_it_may_not_be(make):
    with pytest.raises(ValueError, match=r"Varying\(.*may vary"):
        make()


def test_a_traced_number_of_a_sampler():
    for make in (Prioritized, RankBased, Staleness, Softmax, lambda x: Recent(x, 2)):
        with pytest.raises(ValueError, match=r"Varying\(...\) and call .*set_hyperparameters"):
            jax.eval_shape(lambda x, make=make: make(x).draw, jnp.float32(1))
    with pytest.raises(ValueError, match=r"weights=jaxbuf.Varying"):
        jax.eval_shape(lambda x: Blend((PLAIN, Uniform()), (x, 1 - x)).draw, jnp.float32(0.5))
    with pytest.raises(ValueError, match="another buffer has"):
        filled(filled(Prioritized(alpha=V)).sampler)


def test_the_message_names_all_numbers_that_may_vary():
    kinds = [Prioritized, RankBased, Staleness, Softmax, Recent, Blend]
    assert all(name in hyperparameters.MAY_VARY for kind in kinds for name in kind.varies)
    assert not any(kind.varies for kind in (Uniform, Balanced, Shuffled))


@dataclasses.dataclass(frozen=True)
class Tuned(jaxbuf.Oldest):
    number: float = 0.0


@dataclasses.dataclass(frozen=True)
class Own(Uniform):
    """A sampler with a number that may vary, and with one that may not."""

    power: float = 1.0
    fixed: float = 0.0

    varies: typing.ClassVar = {"power": (0, math.inf)}


def test_a_number_of_a_sampler_of_your_own():
    buffer = filled(Blend((Own(power=Varying(1)), Uniform()), Varying((1.0, 0.0))))
    changed = buffer.set_hyperparameters(power=2.0)
    assert changed.hyperparameters["power"] == changed.bound_sampler.samplers[0].power == 2
    with pytest.raises(ValueError, match="power is -1"):
        buffer.set_hyperparameters(power=-1)
    with pytest.raises(ValueError, match="power is -1"):
        filled(Own(power=Varying(-1)))


def test_an_annealed_run_is_traced_once():
    buffer = filled(Prioritized(alpha=1.0, uniform_mix=Varying(1.0)))
    buffer = jaxbuf.set_hyperparameters(buffer, uniform_mix=1.0)
    with counted_traces(LOWERED) as names:
        for value in (0.9, 1, np.float64(0.5), np.float32(0.25), jnp.float32(0.1), 0):
            buffer = jaxbuf.set_hyperparameters(buffer, uniform_mix=value)
    assert "set_hyperparameters" not in names
    law = buffer.get(buffer.latest(COUNT).slots).probability
    np.testing.assert_allclose(law, by_priority(), rtol=1e-5)


def test_buffers_with_other_first_values_are_alike():
    one, two = (filled(Prioritized(alpha=Varying(x))) for x in (0.3, 0.9))
    chex.assert_trees_all_equal_structs(one, two)
    both = jax.tree.map(lambda *leaves: jnp.stack(leaves), one, two)
    np.testing.assert_allclose(both.hyperparameters["alpha"], [0.3, 0.9])
    assert hash(one.sampler) == hash(two.sampler)
    assert "Varying()" in repr(one)
    assert "hyperparameters['alpha']" in repr(one)
    with pytest.raises(ValueError, match="with_sampler"):
        one.replace(sampler=Prioritized(alpha=0.3))
    cleared = two.clear()
    assert cleared.hyperparameters["alpha"] == two.hyperparameters["alpha"]


def test_no_gradient_flows_through_a_number():
    item = {"x": jnp.float32(0)}
    buffer = jaxbuf.ItemBuffer.create(item, 4, sampler=Prioritized(alpha=Varying(1.0)))
    buffer = buffer.add({"x": jnp.arange(4.0)}, priority=jnp.arange(4.0))

    def loss(alpha):
        changed = buffer.set_hyperparameters(alpha=alpha)
        batch = changed.add({"x": jnp.ones(1)}, priority=jnp.ones(1)).sample(KEY, 8)
        return jnp.sum(batch.probability * batch.data["x"]) + changed.hyperparameters["alpha"]

    assert jax.jit(jax.grad(loss))(0.5) == 0
    of_buffer = jax.jit(jax.grad(lambda b: jnp.sum(b.sample(KEY, 8).data["x"]), allow_int=True))
    assert of_buffer(buffer).hyperparameters["alpha"] == 0


def test_what_does_not_change_is_not_copied():
    buffer = filled(Prioritized(alpha=V))
    changed = buffer.set_hyperparameters(alpha=0.5)
    one, other = (jax.tree.leaves((b.data, b.sampler_state)) for b in (buffer, changed))
    for before, after in zip(one, other, strict=True):
        assert before.unsafe_buffer_pointer() == after.unsafe_buffer_pointer()


def test_what_the_next_sampler_lacks_is_not_donated():
    """Warnings are errors here: JAX warns of a donated array that is like none of the result."""
    many = Prioritized(alpha=V, epsilon=V, uniform_mix=V)
    blend = Blend((many, RankBased(alpha=V)), Varying((1.0, 1.0)))
    for before, after in ((many, Prioritized(alpha=V)), (blend, RankBased(alpha=V))):
        buffer = filled(before)
        expected = buffer.with_sampler(after)
        chex.assert_trees_all_close(jaxbuf.with_sampler(buffer, after), expected, rtol=1e-6)
        assert buffer.counters.is_deleted()


@pytest.mark.parametrize("resize", quick([False, True], {True}))
def test_checkpoints_keep_the_values(tmp_path, resize):
    sampler = Blend((Prioritized(alpha=Varying(0.5)), Staleness()), Varying((1.0, 1.0)))
    buffer = filled(sampler).set_hyperparameters(alpha=0.25, weights=(1.0, 3.0))
    jaxbuf.save(tmp_path, buffer)
    like = jaxbuf.ItemBuffer.create(jnp.int32(0), 20 if resize else CAPACITY, sampler=sampler)
    loaded = jaxbuf.load(tmp_path, like, resize=resize)
    chex.assert_trees_all_equal(loaded.hyperparameters, buffer.hyperparameters)
    law = [b.get(b.latest(COUNT).slots).probability for b in (buffer, loaded)]
    chex.assert_trees_all_close(*law, rtol=1e-6)
    testing.assert_valid(loaded)
    static = jaxbuf.ItemBuffer.create(jnp.int32(0), CAPACITY, sampler=Prioritized(alpha=0.5))
    varying = filled(Prioritized(alpha=Varying(0.5)))
    for saved, wanted in ((static, varying), (varying, static)):
        jaxbuf.save(tmp_path, saved)
        with pytest.raises(ValueError, match=r"alpha is .*Varying.*with_sampler"):
            jaxbuf.load(tmp_path, wanted, resize=resize)


def test_an_exponent_of_flashbax_varies():
    buffer = fbx.make_prioritised_item_buffer(
        max_length=8, min_length=1, sample_batch_size=4, priority_exponent=Varying(0.5)
    )
    state = buffer.init({"x": jnp.float32(0)})
    state = buffer.add(state, {"x": jnp.float32(1)})
    state = state.replace(buffer=state.buffer.set_hyperparameters(alpha=1.0))
    state = buffer.set_priorities(state, jnp.array([0]), jnp.array([9.0]))
    assert (buffer.sample(state, KEY).priorities == 9.0).all()


# The samplers of buffers that know the order of items, and of buffers that know their scores.
ORDERED = {
    "uniform": Uniform(replacement=False),
    "prioritized": Prioritized(alpha=0.5, epsilon=0.1),
    "varying": Prioritized(alpha=Varying(2.0), uniform_mix=Varying(0.5)),
    "ranked": RankBased(alpha=0.7),
    "stale": Staleness(),
    "shuffled": Shuffled(),
    "blend": Blend((Prioritized(alpha=0.5, epsilon=0.1), Staleness(), Balanced()), (1, 2, 1)),
    "recent": Recent(0.5, 2, Prioritized(alpha=1.0)),
}
SCORED = {
    "softmax": Softmax(temperature=2.0),
    "colder": Softmax(temperature=Varying(4.0)),
    "ranked by score": RankBased(alpha=0.7, by="score"),
    "prioritized, scored": Prioritized(alpha=1.0),
}
DRAWN = (1, 4, 5)


def naive_law(sampler, items, priorities, drawn):
    """The probability of items in the order of their slots, of which some were drawn once."""
    if isinstance(sampler, Blend):
        laws = [naive_law(one, items, priorities, drawn) for one in sampler.samplers]
        return blended(laws, sampler.weights)
    if isinstance(sampler, Recent):
        law = dict(zip(items, naive_law(sampler.base, items, priorities, drawn), strict=True))
        law = recent_probabilities([[*range(COUNT)]], law, sampler.ratio, sampler.steps)
        return np.array([law[item] for item in items])
    if isinstance(sampler, Prioritized):
        alpha, mix = (getattr(x, "value", x) for x in (sampler.alpha, sampler.uniform_mix))
        masses = [reference.mass(priorities[item], alpha, sampler.epsilon) for item in items]
        return reference.proportional(masses, mix)
    if isinstance(sampler, RankBased):
        values = VALUES if sampler.by == "score" else priorities
        return reference.proportional(by_rank([values[item] for item in items], sampler.alpha))
    if isinstance(sampler, Softmax):
        temperature = getattr(sampler.temperature, "value", sampler.temperature)
        return softmax(temperature)[list(items)]
    if isinstance(sampler, Staleness):
        return stale_law([int(item in drawn) for item in items], bool(drawn))
    return EVEN


# What these know others know as well.
REPEATED = {"uniform", "prioritized", "ranked", "shuffled", "recent", "colder", "stale", "varying"}
REPEATED |= {"prioritized, scored"}


@pytest.mark.parametrize("name", quick([*ORDERED, *SCORED], {*ORDERED, *SCORED} - REPEATED))
def test_a_new_sampler_knows_what_the_one_before_knew(name):
    """Slots and items stay; priorities, scores and laws are those of a naive model."""
    group = ORDERED if name in ORDERED else SCORED
    evictor = jaxbuf.Oldest() if group is ORDERED else jaxbuf.Lowest()
    buffer = jaxbuf.ItemBuffer.create(jnp.int32(0), COUNT, sampler=group[name], evictor=evictor)
    # This one is evicted, so that its slot is stale, and the first slot has another item.
    early = {"score": jnp.array([-1.0])} if buffer.uses_score else {}
    buffer, stale = buffer.insert(jnp.array([-1]), **early)
    buffer = buffer.add(
        jnp.arange(COUNT, dtype=jnp.int32),
        **({"score": jnp.array(VALUES)} if buffer.uses_score else {}),
        **({"priority": jnp.array(VALUES)} if buffer.sampler.uses_priority else {}),
    )
    items, slots = buffer.data.tolist(), jnp.arange(COUNT, dtype=jnp.int32)
    tells = name in ("stale", "blend")
    if tells:
        index = jnp.array([items.index(item) for item in DRAWN], jnp.int32)
        state = buffer.sampler.map_state(buffer.sampler_state, lambda s, x: s.on_draw(x, index))
        buffer = buffer.replace(sampler_state=state)
    priorities = VALUES if buffer.sampler.uses_priority else np.ones(COUNT)
    slots = jaxbuf.Slots(slots, buffer.occupancy.generation(slots))

    @jax.jit
    def change(buffer):
        every = {other: buffer.with_sampler(sampler) for other, sampler in group.items()}
        return {
            other: (changed, changed.get(slots), changed.holds(stale), changed.by_slot())
            for other, changed in every.items()
        }

    for other, (changed, rows, held, known) in change(buffer).items():
        sampler = group[other]
        for kept in ("data", "occupancy", "counters", "extra_states"):
            chex.assert_trees_all_equal(getattr(changed, kept), getattr(buffer, kept))
        assert rows.data.tolist() == items
        assert not held.any()
        law = naive_law(sampler, items, priorities, DRAWN if tells else ())
        if not isinstance(sampler, Shuffled):
            np.testing.assert_allclose(rows.probability, law, rtol=2e-5, atol=1e-9)
        if sampler.uses_priority:
            expected = [priorities[item] for item in items]
            np.testing.assert_allclose(known["priority"], expected, rtol=1e-5, atol=1e-6)
        if sampler.uses_score:
            np.testing.assert_array_equal(known["score"], [VALUES[item] for item in items])
        if other == name:
            chex.assert_trees_all_equal(changed, buffer)


def test_a_sampler_of_windows_and_of_windows_that_are_taken_out():
    step, options = {"x": jnp.int32(0)}, {"sequence_length": 2, "freshness": jaxbuf.Freshness(1)}
    buffer = jaxbuf.TrajectoryBuffer.create(step, 2, 6, sampler=PLAIN, **options)
    priority = jnp.arange(8.0).reshape(2, 4)
    buffer = buffer.add({"x": jnp.arange(8).reshape(2, 4)}, priority=priority)
    used = buffer.latest(1).slots
    buffer = buffer.mark_used(used)
    changed = buffer.with_sampler(RankBased(alpha=1.0))
    testing.assert_valid(changed)
    assert not changed.holds(used).any()
    law = reference.proportional(by_rank([1.0, 2.0, 5.0, 6.0], 1.0))
    known = changed.get(changed.latest(2).slots).probability
    np.testing.assert_allclose(known, law, rtol=1e-5)
    for wrong, says in ((Softmax(), "needs scores"), (Recent, "expected a sampler")):
        with pytest.raises(ValueError, match=says):
            buffer.with_sampler(wrong)


def test_a_sampler_that_does_not_fit():
    with pytest.raises(ValueError, match=r"draws by score, but nothing .* keeps"):
        filled(PLAIN).with_sampler(Softmax())
    with pytest.raises(ValueError, match="uses the age of items"):
        filled(Uniform(), evictor=jaxbuf.Lowest()).with_sampler(Recent(0.5, 2))
    with pytest.raises(ValueError, match=r"alpha is -1"):
        filled(Uniform()).with_sampler(hyperparameters.changed(PLAIN, alpha=Varying(-1.0)))
    buffer = filled(Prioritized(alpha=V)).set_hyperparameters(alpha=0.5)
    chex.assert_trees_all_equal(buffer.with_sampler(buffer.sampler), buffer)
    chex.assert_trees_all_close(
        buffer.with_sampler(Prioritized(alpha=Varying(1.0))).sampler_state.leaves[:COUNT],
        jnp.array(VALUES) ** 1.4,
        rtol=1e-5,
    )

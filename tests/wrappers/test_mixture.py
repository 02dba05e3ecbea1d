"""`Mixture`: exact shares, honest probabilities, and priorities that reach the right buffer."""

import dataclasses
import math
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbuf
from jaxbuf import testing
from tests.models import sampling as reference
from tests.operations import quick

ITEM = jax.ShapeDtypeStruct((), jnp.int32)
PROPORTIONAL = jaxbuf.Prioritized(alpha=1.0)


def part(first, count, capacity, sampler=PROPORTIONAL, **options):
    """A buffer with the numbers from ``first`` on."""
    buffer = jaxbuf.ItemBuffer.create(ITEM, capacity, sampler=sampler)
    return buffer.add(jnp.arange(first, first + count, dtype=jnp.int32), **options)


def two_parts(ratios=(0.75, 0.25)):
    return jaxbuf.Mixture.create([part(0, 5, 6), part(100, 3, 4)], ratios)


def masses(mixture):
    return [part.sampler_state.leaves.tolist() for part in mixture.parts]


@pytest.mark.parametrize("ratios", [(1,), (0.7, 0.3), (1, 1, 1), (0, 2, 1), (0.1, 0.2, 0.7)])
def test_counts_are_largest_remainders(ratios):
    parts = [part(0, 1, 2) for _ in ratios]
    mixture = jaxbuf.Mixture.create(parts, ratios)
    for rows in range(1, 40):
        # The twin divides in another order, so equal remainders may be told apart by rounding.
        exact = [rows * ratio / sum(ratios) for ratio in ratios]
        counts = mixture.counts(rows)
        assert sum(counts) == rows
        assert all(abs(count - share) < 1 for count, share in zip(counts, exact, strict=True))
        if all(isinstance(ratio, int) for ratio in ratios):
            assert list(counts) == reference.shares(ratios, rows)
    assert mixture.counts(10) == tuple(reference.shares([round(r * 10) for r in ratios], 10))


def test_probabilities_weights_and_frequencies():
    """Windows, priorities and uniform draws in one batch."""
    rings = jaxbuf.TrajectoryBuffer.create(ITEM, 2, 4, sequence_length=1)
    rings = rings.add(jnp.arange(200, 206, dtype=jnp.int32).reshape(2, 3))
    both = [
        part(0, 3, 3, jaxbuf.Uniform()),
        part(100, 4, 5, priority=jnp.array([1.0, 2.0, 0.0, 5.0])),
    ]
    # Windows have a time axis, so items need one as well.
    wide = [dataclasses.replace(buffer, data=buffer.data[:, None]) for buffer in both]
    mixture = jaxbuf.Mixture.create([*wide, rings], [2, 1, 1])
    law = np.zeros(mixture.capacity)
    law[:3] = 0.5 / 3
    law[[3, 4, 6]] = 0.25 * np.array([1, 2, 5]) / 8
    law[8 + np.array([0, 1, 2, 4, 5, 6])] = 0.25 / 6
    testing.assert_distribution(mixture, jax.random.key(1), law, draws=8000, batch_size=8)
    sample = jaxbuf.sample(mixture, jax.random.key(1), 8)
    np.testing.assert_allclose(sample.probability, law[sample.slots.index], rtol=1e-6)
    # There are 13 items, of which 12 can be drawn.
    for normalize, factor in ((None, 1 / 13), ("buffer", 0.25 / 8), ("mean", 1 / 12)):
        weights = jaxbuf.importance_weights(mixture, sample, 1.0, normalize)
        np.testing.assert_allclose(weights, factor / sample.probability, rtol=1e-5)


def test_an_empty_part_gives_invalid_rows():
    empty = jaxbuf.ItemBuffer.create(ITEM, 4, sampler=PROPORTIONAL)
    mixture = jaxbuf.Mixture.create([part(0, 5, 6), empty], [1, 1])
    assert not mixture.can_sample()
    assert jaxbuf.Mixture.create([part(0, 5, 6), empty], [1, 0]).can_sample()
    sample = jaxbuf.sample(mixture, jax.random.key(0), 4)
    assert sample.valid.tolist() == [True, True, False, False]
    assert sample.slots.index[2:].tolist() == [10, 10]
    np.testing.assert_allclose(sample.probability, [0.1, 0.1, 0.0, 0.0])
    np.testing.assert_allclose(mixture.support().least_probability, 0.1)
    assert mixture.part_of(sample.slots).tolist() == [0, 0, 2, 2]
    before = masses(mixture)
    after = jaxbuf.update_priority(mixture, sample.slots, jnp.array([1.0, 1.0, 7.0, 7.0]))
    assert masses(after) == before
    np.testing.assert_array_equal(jaxbuf.importance_weights(after, sample, 1.0)[2:], 0.0)
    assert after.clear().support().count == 0


def test_names_take_the_place_of_numbers(tmp_path):
    """Whatever a mixture without names does, in the order of the dict."""
    sampler = jaxbuf.Prioritized(alpha=jaxbuf.Varying(1.0))
    late, early = part(0, 3, 4, sampler), part(100, 3, 4)
    named = jaxbuf.Mixture.create({"late": late, "early": early}, jaxbuf.Varying((1, 3)))
    plain = jaxbuf.Mixture.create([late, early], jaxbuf.Varying((1, 3)))
    names = {"0": "late", "1": "early"}

    def renamed(values):
        return {
            re.sub(r"^(\d)(?=/)|(?<=^ratios\[)(\d)", lambda m: names[m[0]], name): value
            for name, value in values.items()
        }

    def changes(mixture, late, early):
        mixture = jaxbuf.add(mixture, jnp.arange(7, 9, dtype=jnp.int32), part=late, donate=False)
        mixture, slots = mixture.insert(jnp.array([9], jnp.int32), part=early)
        mixture = mixture.set_hyperparameters(alpha=2.0, part=late)
        mixture = jaxbuf.set_hyperparameters(mixture, {f"{late}/alpha": 0.5})
        mixture = mixture.with_sampler(jaxbuf.Uniform(), part=early)
        mixture = mixture.replace_part(late, mixture.parts[0])
        return mixture, mixture.part_slots(slots, early), mixture.sample(jax.random.key(0), 8)

    one, two = changes(named, "late", "early"), changes(plain, 0, 1)
    chex.assert_trees_all_equal(jax.tree.leaves(one), jax.tree.leaves(two))
    for mixture, like in ((named, plain), (one[0], two[0])):
        chex.assert_trees_all_equal(mixture.metrics(), renamed(like.metrics()))
        chex.assert_trees_all_equal(dict(mixture.hyperparameters), renamed(like.hyperparameters))
    assert isinstance(named.parts, tuple)
    assert named.names == ("late", "early")
    # Numbers remain legal, and an outer mixture puts its own before the names.
    added = named.add(jnp.arange(2, dtype=jnp.int32), part=1)
    assert added.metrics()["early/adds"] == 5
    outer = jaxbuf.Mixture.create([part(0, 3, 4), named], [1, 1])
    assert "1/late/alpha" in outer.hyperparameters
    jaxbuf.save(tmp_path / "names", named)
    chex.assert_trees_all_equal(jaxbuf.load(tmp_path / "names", named), named)
    with pytest.raises(ValueError, match=r"like.names is \[\], but the checkpoint has \['late'"):
        jaxbuf.load(tmp_path / "names", plain)


def other(example):
    return jaxbuf.ItemBuffer.create(example, 4)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: jaxbuf.Mixture.create([], []), "there are 0 buffers and 0 ratios"),
        (lambda m: jaxbuf.Mixture.create(m.parts, [1]), "there are 2 buffers and 1 ratios"),
        (lambda m: jaxbuf.Mixture.create(m.parts, [1, -1]), "ratios[1] is -1; expected"),
        (lambda m: jaxbuf.Mixture.create(m.parts, [0, 0]), "ratios is (0.0, 0.0); expected"),
        (lambda m: jaxbuf.Mixture.create([1], [1]), "buffers[0] is an int; expected a buffer"),
        (lambda m: jaxbuf.Mixture.create([m.parts[0]] * 2, [1, 1]), "buffers share memory"),
        (
            lambda m: jaxbuf.Mixture.create([m.parts[0], other(jnp.float32(0))], [1, 1]),
            "data of samples of buffers[1] is float32[], but int32[] of those of buffers[0]",
        ),
        (
            lambda m: jaxbuf.Mixture.create([m.parts[0], other({"x": ITEM})], [1, 1]),
            "samples of buffers[1] have another structure than those of buffers[0]",
        ),
        (
            lambda m: jaxbuf.Mixture.create({"a": m.parts[0]}, [1]).add(jnp.zeros(2), part="b"),
            "part is 'b'; expected one of the names 'a', or the number of one of the 1 parts",
        ),
        *(
            (
                lambda m, name=name: jaxbuf.Mixture.create({name: m.parts[0]}, [1]),
                f"buffers has the name {name!r}; expected strings without '/'",
            )
            for name in ("a/b", "", 3)
        ),
        (
            lambda m: jaxbuf.Mixture.create({"a": m.parts[0]}, {"a": 1}),
            "ratios is a dict; expected a list of numbers, in the order of the buffers",
        ),
        (
            lambda m: jaxbuf.Mixture.create([m, other(ITEM)], [1, 1]).add(jnp.arange(2), part=0),
            "parts[0] is a Mixture, of which one part would have to be named too",
        ),
        (lambda m: m.replace_part(0, other(ITEM)), "buffer is not built like parts[0]"),
        (lambda m: m.can_sample(jnp.float32(2)), "batch_size has dtype float32; expected int32"),
        (
            lambda m: jaxbuf.Mixture.create([other(ITEM)], [1]).update_priority(
                m.sample(jax.random.key(0), 1).slots, jnp.ones(1)
            ),
            "update_priority was called, but no part has priorities",
        ),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        call(two_parts())


@pytest.mark.parametrize("ratios", [(0.7, 0.3), (0, 2, 1), (math.pi, math.e, 1e-3)])
def test_can_sample_takes_a_traced_size(ratios):
    """Values follow from the numbers of rows, also inside of another mixture."""
    sizes = [7, 3, 5][: len(ratios)]
    mixture = jaxbuf.Mixture.create([part(0, size, 8) for size in sizes], ratios)
    outer = jaxbuf.Mixture.create([mixture.clear(), part(0, 6, 8)], [2, 1]).replace_part(0, mixture)

    @jax.jit
    def traced(mixture, outer, rows):
        return mixture.can_sample(rows), outer.can_sample(rows)

    for rows in range(1, 20):
        needed = [max(count, 1) for count in mixture.counts(rows)]
        able = all(
            size >= need for size, need, r in zip(sizes, needed, ratios, strict=True) if r > 0
        )
        answers = traced(mixture, outer, rows)
        assert bool(answers[0]) == bool(mixture.can_sample(rows)) == able
        assert bool(answers[1]) == bool(outer.can_sample(rows))


def queue_and_rest(rows=2):
    """A queue with the first few numbers, beside a buffer with the numbers 100 to 107."""
    queue = jaxbuf.Queue.create(ITEM, 6).add(jnp.arange(rows, dtype=jnp.int32))
    return jaxbuf.Mixture.create([queue, part(100, 8, 8, jaxbuf.Uniform())], [1, 3])


@pytest.mark.parametrize("nested", [False, True])
def test_rows_of_a_queue_are_taken_and_the_others_drawn(nested):
    mixture = queue_and_rest(4)
    if nested:
        mixture = jaxbuf.Mixture.create([part(900, 2, 2), mixture], [1, 4])
    rows, taken = (10, []) if nested else (8, [])
    assert bool(mixture.can_sample(rows))
    for key in jax.random.split(jax.random.key(0), 3):
        mixture, batch = jaxbuf.next_batch(mixture, key, rows)
        numbers = np.asarray(batch.data)[rows - 8 :]
        valid = np.asarray(batch.valid)[rows - 8 :]
        taken += numbers[:2][valid[:2]].tolist()
        assert ((numbers[2:] >= 100) & valid[2:]).all()
        of_queue = mixture.part_of(batch.slots)[rows - 8 :]
        if not nested:
            assert of_queue.tolist() == [0 if v else 2 for v in valid[:2]] + [1] * 6
            share = np.where(valid[:2], 0.25, 0)
            np.testing.assert_allclose(batch.probability, [*share, *[0.75 / 8] * 6])
    assert taken == [0, 1, 2, 3]
    assert not mixture.can_sample(rows)
    assert int(mixture.size) == (10 if nested else 8)
    with pytest.raises(
        ValueError, match=r"parts\[0\] is a Queue, whose rows are taken.*next_batch"
    ):
        jaxbuf.sample(mixture, jax.random.key(0), rows)


def test_weights_beside_a_queue_follow_the_probabilities():
    mixture = queue_and_rest(2)
    for normalize, divisor in ((None, 1.0), ("mean", 1.0), ("buffer", 1 / (10 * 0.75 / 8))):
        _, batch = mixture.next_batch(jax.random.key(0), 8, beta=1.0, normalize=normalize)
        weights = jaxbuf.importance_weights(mixture, batch, 1.0, normalize)
        np.testing.assert_array_max_ulp(batch.weights, weights, 2)
        np.testing.assert_allclose(weights, 1 / (10 * batch.probability) / divisor, rtol=1e-5)
    empty = queue_and_rest(0)
    assert int(empty.support().count) == 8
    assert float(empty.support().least_probability) == pytest.approx(0.75 / 8)
    assert int(mixture.clear().size) == 0


def laws_of(buffer):
    """For each part, what a draw from it gives with proportional priorities."""
    if isinstance(buffer, jaxbuf.Mixture):
        return [law for part in buffer.parts for law in laws_of(part)]
    if isinstance(buffer, jaxbuf.Queue):
        return [None]
    live = np.asarray(buffer.live)
    names, masses = np.asarray(buffer.data)[live].tolist(), np.ones(live.sum())
    if not isinstance(buffer.sampler, jaxbuf.Uniform):
        masses = np.asarray(buffer.sampler_state.leaves, np.float64)[: buffer.capacity][live]
    return [dict(zip(names, (masses / masses.sum()).tolist(), strict=True))]


def rows_of(sample):
    """The part and the item of each valid row."""
    rows = zip(sample.data.tolist(), sample.valid.tolist(), strict=True)
    return [(name // 100, name) if valid else None for name, valid in rows]


def skewed(first, *priorities):
    return part(first, len(priorities), len(priorities) + 1, priority=jnp.array(priorities))


NORMALIZE = "batch", "buffer", "mean", None
WEIGHED = {
    "shares that are rounded": lambda: (
        jaxbuf.Mixture.create(
            [part(0, 40, 50, jaxbuf.Uniform()), skewed(100, 1.0, 0.0, 6.0)], [2, 1]
        ),
        10,
    ),
    "an empty part and one without rows": lambda: (
        jaxbuf.Mixture.create([part(0, 0, 4), skewed(100, 2.0, 5.0), part(200, 3, 3)], [1, 3, 0]),
        8,
    ),
    "rows that a queue gave": lambda: (
        jaxbuf.Mixture.create(
            [jaxbuf.Queue.create(ITEM, 8).add(jnp.arange(4)), skewed(100, 1.0, 3.0)], [1, 1]
        ),
        6,
    ),
    "a mixture as a part": lambda: (
        jaxbuf.Mixture.create(
            [
                jaxbuf.Mixture.create([skewed(0, 1.0, 2.0), part(100, 9, 9)], [3, 1]),
                skewed(200, 5.0, 1.0, 1.0),
            ],
            [1, 2],
        ),
        11,
    ),
    "fewer items than rows": lambda: (
        jaxbuf.Mixture.create(
            [part(0, 2, 4, jaxbuf.Uniform(replacement=False)), skewed(100, 1.0, 2.0)], [1, 1]
        ),
        8,
    ),
}


@pytest.mark.parametrize("case", quick(WEIGHED, [*WEIGHED][1:4]))
def test_weights_within_each_part_are_those_of_a_naive_model(case):
    mixture, rows = WEIGHED[case]()
    key, within = jax.random.key(4), {"beta": 0.6, "within": "part"}
    after, sample = jaxbuf.next_batch(mixture, key, rows, donate=False)
    hosted = jaxbuf.Hosted.create(lambda: after)
    for normalize, buffer in zip(NORMALIZE, (after, hosted, after, hosted), strict=True):
        expected = reference.weights_within_parts(laws_of(mixture), rows_of(sample), 0.6, normalize)
        weights = jaxbuf.importance_weights(buffer, sample, normalize=normalize, **within)
        np.testing.assert_allclose(weights, expected, rtol=2e-6)
    # The last of these, without a normalization, as those of a batch.
    _, again = jaxbuf.next_batch(mixture, key, rows, normalize=None, **within)
    np.testing.assert_array_equal(again.data, sample.data)
    np.testing.assert_allclose(again.weights, expected, rtol=2e-6)


def test_within_a_buffer_that_is_no_mixture():
    buffer = skewed(0, 1.0, 2.0, 5.0)
    sample = jaxbuf.sample(buffer, jax.random.key(0), 8)
    for normalize in NORMALIZE:
        own, within = (
            jaxbuf.importance_weights(buffer, sample, 0.4, normalize, within=part)
            for part in (None, "part")
        )
        np.testing.assert_allclose(own, within, rtol=2e-6)
    for wrong in ("parts", 0, True):
        with pytest.raises(ValueError, match='choose "part" or None'):
            jaxbuf.importance_weights(buffer, sample, 0.4, None, within=wrong)

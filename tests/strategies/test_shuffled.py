"""`Shuffled`: passes that give every item exactly once, against sets of what is left."""

import functools
import math
import re

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import jaxbuf
import jaxbuf.testing
from tests.operations import quick


def items(capacity, **options):
    sampler = options.pop("sampler", jaxbuf.Shuffled())
    return jaxbuf.ItemBuffer.create(jnp.int32(0), capacity, sampler=sampler, **options)


tell = jax.jit(lambda buffer: buffer.metrics())
draw = jax.jit(lambda buffer, key, rows: buffer.next_batch(key, rows), static_argnums=2)


def orders(size, rows, capacity, passes, keys):
    """The items in the order in which they are given, ``[keys, passes * size]``."""
    buffer = items(capacity).add(jnp.arange(size))
    count = passes * -(-size // rows)

    def go(key):
        return jax.lax.scan(
            lambda buffer, key: buffer.next_batch(key, rows), buffer, jax.random.split(key, count)
        )[1]

    batch = jax.jit(jax.vmap(go))(jax.random.split(jax.random.key(7), keys))
    return np.asarray(batch.data)[np.asarray(batch.valid)].reshape(keys, passes * size)


@pytest.mark.parametrize(
    ("size", "rows"),
    quick([(1000, 64), (1024, 64), (37, 40), (600, 7)], {(1000, 64)}),
)
def test_a_scan_goes_over_all_of_it_again_and_again(size, rows):
    given = orders(size, rows, 1024, 3, 1).reshape(3, size)
    np.testing.assert_array_equal(np.sort(given, axis=1), [np.arange(size)] * 3)
    assert len({*map(tuple, given.tolist()), tuple(range(size))}) == 4


@pytest.mark.parametrize(
    ("size", "rows", "passes"),
    [
        *(pytest.param(4, rows, 1, marks=pytest.mark.slow) for rows in (1, 3, 4)),
        pytest.param(3, 2, 2, marks=pytest.mark.slow),
        (5, 2, 1),
    ],
)
def test_all_orders_are_equally_likely_and_each_pass_has_its_own(size, rows, passes):
    number = 100 * math.factorial(size) ** passes
    found = orders(size, rows, size + 2, passes, number)
    counts = np.unique(found, axis=0, return_counts=True)[1]
    assert len(counts) == number // 100
    assert stats.chisquare(counts).pvalue > 1e-3


def test_with_drop_last_each_pass_leaves_out_others():
    sampler = jaxbuf.Shuffled(drop_last=True)
    buffer = items(16, sampler=sampler).add(jnp.arange(10))
    keys = jax.random.split(jax.random.key(3), 2000)
    scan = functools.partial(jax.lax.scan, lambda buffer, key: buffer.next_batch(key, 4))
    buffer, batches = jax.jit(scan)(buffer, keys)
    assert batches.valid.all()
    assert tell(buffer)["passes"] == 1000
    each = np.asarray(batches.data).reshape(1000, 8)
    # Of the 45 pairs that may be left out each is as likely.
    left = [tuple({*range(10)} - {*row}) for row in each.tolist()]
    counts = np.unique(np.sort(left, axis=1), axis=0, return_counts=True)[1]
    assert len(counts) == 45
    assert stats.chisquare(counts).pvalue > 1e-3
    few, batch = draw(items(16, sampler=sampler).add(jnp.arange(3)), jax.random.key(0), 4)
    assert not batch.valid.any()
    assert (few.metrics()["left"], few.metrics()["passes"]) == (3, 0)


@pytest.mark.parametrize(
    ("period", "boundary"),
    quick([(1, "cross"), (2, "cross"), (1, "avoid")], {(2, "cross"), (1, "avoid")}),
)
def test_a_pass_has_the_windows_of_rings_that_hold_different_numbers(period, boundary):
    buffer = jaxbuf.TrajectoryBuffer.create(
        {"number": jnp.int32(0), "terminated": jnp.bool_(False)},
        3,
        8,
        sequence_length=3,
        period=period,
        sampler=jaxbuf.Shuffled(),
        episodes=jaxbuf.Episodes(boundary=boundary, short_windows="never"),
    )
    step = jnp.arange(24, dtype=jnp.int32).reshape(3, 8)
    for turn, count in enumerate(([8, 2, 5], [3, 1, 0], [0, 0, 8])):
        mask = np.arange(8)[None] < np.array(count)[:, None]
        rows = {"number": step + 100 * turn, "terminated": step % 8 == 4}
        buffer = buffer.add(rows, mask=mask)
        every = buffer.sample_range(jax.random.key(0), 24)
        every = {*map(tuple, every.data["number"][every.valid].tolist())}
        # The rest of the present pass, and then a whole one.
        for start in (tell(buffer)["passes"], tell(buffer)["passes"] + 1):
            found = []
            while tell(buffer)["passes"] == start:
                buffer, batch = draw(buffer, jax.random.key(len(found)), 4)
                found += map(tuple, batch.data["number"][batch.valid].tolist())
        assert len(found) == len(every) == buffer.num_windows
        assert set(found) == every
    buffer, _ = buffer.dequeue(3)
    assert tell(buffer)["left"] == buffer.num_windows


def test_sample_takes_no_part_in_a_pass():
    buffer = items(16).add(jnp.arange(8))
    buffer, _ = draw(buffer, jax.random.key(0), 5)
    plain = items(16, sampler=jaxbuf.Uniform(replacement=False)).add(jnp.arange(8))
    batch = jaxbuf.sample(buffer, jax.random.key(1), 10)
    expected = jaxbuf.sample(plain, jax.random.key(1), 10)
    jax.tree.map(np.testing.assert_array_equal, batch, expected)
    assert tell(buffer)["left"] == 3
    assert bool(buffer.can_sample(8))
    assert not bool(buffer.can_sample(9))
    weights = jaxbuf.importance_weights(buffer, batch, 1.0, None)
    np.testing.assert_allclose(weights, [1.0] * 8 + [0.0] * 2)


@pytest.mark.parametrize("capacity", quick([12, 32], {12}))
def test_the_pass_goes_on_in_a_buffer_of_another_size(tmp_path, capacity):
    buffer = items(16)
    for first in (0, 10):
        buffer = buffer.add(first + jnp.arange(10))
        buffer, batch = draw(buffer, jax.random.key(first), 8)
    # The rest of the first pass, and half of the second one.
    for rows in (16, 8):
        buffer, batch = draw(buffer, jax.random.key(rows), rows)
    left = int(buffer.metrics()["left"])
    jaxbuf.save(tmp_path, buffer)
    loaded = jaxbuf.load(tmp_path, like=items(capacity), resize=True)
    kept = set(range(20 - min(16, capacity), 20))
    remaining, batch = draw(loaded, jax.random.key(5), 32)
    found = set(batch.data[batch.valid].tolist())
    assert found <= kept
    buffer, batch = draw(buffer, jax.random.key(5), 16)
    assert found == set(batch.data[batch.valid].tolist()) & kept
    assert len(found) <= left
    assert remaining.metrics()["passes"] == buffer.metrics()["passes"]


def test_each_part_of_a_mixture_has_a_pass_of_its_own():
    parts = [items(16).add(jnp.arange(9)), items(8).add(jnp.arange(100, 104))]
    drawn = items(4, sampler=jaxbuf.Prioritized()).add(jnp.arange(200, 203))
    mixture = jaxbuf.Mixture.create([*parts, drawn], [4, 2, 2])
    given = [[], []]
    for turn in range(12):
        same = mixture.sample(jax.random.key(turn), 8).data[6:]
        mixture, batch = jaxbuf.next_batch(mixture, jax.random.key(turn), 8)
        # The third batch of a pass over 9 items has one row.
        rows = 1 if turn % 3 == 2 else 4
        part = np.array([0] * rows + [3] * (4 - rows) + [1] * 2 + [2] * 2)
        assert batch.valid.tolist() == (part < 3).tolist()
        assert mixture.part_of(batch.slots).tolist() == part.tolist()
        share = np.array([4 / 9, 2 / 4, 0, 0])[part] / 8
        np.testing.assert_allclose(batch.probability[:6], share[:6], rtol=1e-6)
        for number in range(2):
            given[number] += np.asarray(batch.data)[part == number].tolist()
        # A part with another sampler draws as it does in a sample.
        assert batch.data[6:].tolist() == same.tolist()
    for numbers, first, size in ((given[0], 0, 9), (given[1], 100, 4)):
        passes = np.sort(np.reshape(numbers, (-1, size)), axis=1)
        assert (passes == np.arange(first, first + size)).all()
    told = mixture.metrics()
    assert [int(told[f"{i}/passes"]) for i in range(2)] == [4, 6]


def test_a_mixture_of_parts_without_passes_is_refused():
    class Plain(flax.struct.PyTreeNode):
        """A buffer of one's own."""

        inner: jaxbuf.ItemBuffer
        capacity = 4

        def add(self, items):
            return self.replace(inner=self.inner.add(items))

        def sample(self, key, batch_size):
            return self.inner.sample(key, batch_size)

    mixture = jaxbuf.Mixture.create([items(4), Plain(items(4))], [1, 1])
    with pytest.raises(ValueError, match=r"parts\[1\] is a Plain, which has no method next_batch"):
        mixture.next_batch(jax.random.key(0), 2)


def test_what_cannot_be_is_refused():
    buffer = items(8).add(jnp.arange(8))
    with pytest.raises(ValueError, match="has no priorities"):
        buffer.update_priority(buffer.sample(jax.random.key(0), 2).slots, jnp.ones(2))
    with pytest.raises(ValueError, match="cannot tell the probability"):
        jaxbuf.Recent(0.5, 4, base=jaxbuf.Shuffled())
    with pytest.raises(ValueError, match=re.escape("fewer than 2**30 slots")):
        jax.eval_shape(lambda: items(2**30))

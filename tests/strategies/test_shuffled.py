"""`Shuffled`: passes that give every item exactly once, against sets of what is left."""

import itertools
import re

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import jaxbuf
import jaxbuf.testing


def items(capacity, **options):
    sampler = options.pop("sampler", jaxbuf.Shuffled())
    return jaxbuf.ItemBuffer.create(jnp.int32(0), capacity, sampler=sampler, **options)


tell = jax.jit(lambda buffer: buffer.metrics())
draw = jax.jit(lambda buffer, key, rows: buffer.next_batch(key, rows), static_argnums=2)


@pytest.mark.parametrize(("size", "rows"), [(1000, 64), (1024, 64), (37, 40), (600, 7)])
def test_a_scan_goes_over_all_of_it_again_and_again(size, rows):
    buffer = items(1024).add(jnp.arange(size))
    batches = -(-size // rows)

    def step(buffer, key):
        buffer, batch = buffer.next_batch(key, rows)
        return buffer, (batch.data, batch.valid, buffer.sampler_state.passes)

    keys = jax.random.split(jax.random.key(1), 3 * batches)
    _, (data, valid, passes) = jax.jit(lambda *args: jax.lax.scan(step, *args))(buffer, keys)
    orders = []
    for i in range(3):
        part = slice(i * batches, (i + 1) * batches)
        order = np.asarray(data[part])[np.asarray(valid[part])]
        assert sorted(order.tolist()) == list(range(size))
        orders.append(order.tolist())
        # The end of a pass is told with its last batch.
        assert passes[part].tolist() == [i] * (batches - 1) + [i + 1]
    assert orders[0] != orders[1] != orders[2] != sorted(orders[2])


def orders(size, rows, capacity, passes, keys):
    """The items in the order in which they are given, ``[keys, passes * size]``."""
    buffer = items(capacity).add(jnp.arange(size))
    count = passes * -(-size // rows)

    def go(key):
        def step(buffer, key):
            buffer, batch = buffer.next_batch(key, rows)
            return buffer, (batch.data, batch.valid)

        return jax.lax.scan(step, buffer, jax.random.split(key, count))[1]

    data, valid = jax.jit(jax.vmap(go))(jax.random.split(jax.random.key(7), keys))
    return np.asarray(data)[np.asarray(valid)].reshape(keys, passes * size)


@pytest.mark.parametrize(("size", "rows"), [(4, 1), (4, 3), (4, 4), (5, 2)])
def test_all_orders_are_equally_likely(size, rows):
    number = 100 * len([*itertools.permutations(range(size))])
    found = orders(size, rows, size + 2, 1, number)
    counts = np.unique(found, axis=0, return_counts=True)[1]
    assert len(counts) == number // 100
    assert stats.chisquare(counts).pvalue > 1e-3


def test_each_pass_has_an_order_of_its_own():
    found = orders(3, 2, 3, 2, 7200)
    code = {order: i for i, order in enumerate(itertools.permutations(range(3)))}
    table = np.zeros((6, 6))
    for row in found.tolist():
        table[code[tuple(row[:3])], code[tuple(row[3:])]] += 1
    assert stats.chisquare(table.reshape(-1)).pvalue > 1e-3


def test_with_drop_last_a_pass_has_all_whole_batches():
    buffer = items(4, sampler=jaxbuf.Shuffled(drop_last=True)).add(jnp.arange(4))
    buffer, first = draw(buffer, jax.random.key(0), 2)
    buffer, second = draw(buffer, jax.random.key(1), 2)
    assert sorted([*first.data.tolist(), *second.data.tolist()]) == [0, 1, 2, 3]
    assert tell(buffer)["passes"] == 1


def test_with_drop_last_each_pass_leaves_out_others():
    buffer = items(16, sampler=jaxbuf.Shuffled(drop_last=True)).add(jnp.arange(10))

    def step(buffer, key):
        buffer, batch = buffer.next_batch(key, 4)
        return buffer, batch

    keys = jax.random.split(jax.random.key(3), 2000)
    buffer, batches = jax.jit(lambda *args: jax.lax.scan(step, *args))(buffer, keys)
    assert batches.valid.all()
    assert tell(buffer)["passes"] == 1000
    each = np.asarray(batches.data).reshape(1000, 8)
    assert all(len(set(row.tolist())) == 8 for row in each)
    # Which two are left out: of 45 pairs each is as likely.
    pairs = [tuple(sorted(set(range(10)) - set(row.tolist()))) for row in each]
    counts = [pairs.count(pair) for pair in itertools.combinations(range(10), 2)]
    assert stats.chisquare(counts).pvalue > 1e-3
    few = items(16, sampler=jaxbuf.Shuffled(drop_last=True)).add(jnp.arange(3))
    few, batch = draw(few, jax.random.key(0), 4)
    assert not batch.valid.any()
    assert (few.metrics()["left"], few.metrics()["passes"]) == (3, 0)


@pytest.mark.parametrize("period", [1, 2])
def test_windows_of_rings_that_hold_different_numbers(period):
    buffer = jaxbuf.TrajectoryBuffer.create(
        jnp.int32(0), 3, 8, sequence_length=3, period=period, sampler=jaxbuf.Shuffled()
    )
    step = jnp.arange(24, dtype=jnp.int32).reshape(3, 8)
    seen = []
    for count in ([8, 2, 5], [3, 1, 0], [0, 0, 8]):
        mask = np.arange(8)[None] < np.array(count)[:, None]
        buffer = buffer.add(step + 100 * len(seen), mask=mask)
        every = {tuple(window) for window in all_windows(buffer)}
        # From here a whole pass: end the present one first.
        while True:
            before = tell(buffer)["passes"]
            buffer, _ = draw(buffer, jax.random.key(0), 4)
            if tell(buffer)["passes"] > before:
                break
        found, start = [], tell(buffer)["passes"]
        while tell(buffer)["passes"] == start:
            buffer, batch = draw(buffer, jax.random.key(len(found)), 4)
            found += [tuple(row) for row in batch.data[batch.valid].tolist()]
        assert len(found) == len(every) == buffer.num_windows
        assert set(found) == every
        seen.append(every)
    buffer, _ = buffer.dequeue(3)
    assert tell(buffer)["left"] == buffer.num_windows == len(all_windows(buffer))


def all_windows(buffer):
    batch = buffer.sample_range(jax.random.key(0), 24)
    return batch.data[batch.valid].tolist()


def test_windows_across_episodes_are_in_no_pass():
    step = {"number": jnp.int32(0), "terminated": jnp.bool_(False)}
    buffer = jaxbuf.TrajectoryBuffer.create(
        step,
        1,
        16,
        sequence_length=2,
        sampler=jaxbuf.Shuffled(),
        episodes=jaxbuf.Episodes(boundary="avoid", short_windows="never"),
    )
    number = jnp.arange(10, dtype=jnp.int32)[None]
    buffer = buffer.add({"number": number, "terminated": number % 4 == 3})
    buffer, batch = draw(buffer, jax.random.key(0), 10)
    assert sorted(batch.data["number"][batch.valid, 0].tolist()) == [0, 1, 2, 4, 5, 6, 8]


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
    for normalize in ("batch", "buffer", "mean", None):
        weights = jaxbuf.importance_weights(buffer, batch, 1.0, normalize)
        np.testing.assert_allclose(weights, [1.0] * 8 + [0.0] * 2)


def test_the_next_batch_of_other_samplers_is_a_sample():
    buffer = items(16, sampler=jaxbuf.Prioritized()).add(jnp.arange(8))
    after, batch = jaxbuf.next_batch(buffer, jax.random.key(1), 4, donate=False)
    expected = buffer.sample(jax.random.key(1), 4)
    jax.tree.map(np.testing.assert_array_equal, (after, batch), (buffer, expected))


def test_a_checkpoint_goes_on_in_the_middle_of_a_pass(tmp_path):
    buffer = items(16).add(jnp.arange(10))
    buffer, first = draw(buffer, jax.random.key(0), 4)
    jaxbuf.save(tmp_path, buffer)
    loaded = jaxbuf.load(tmp_path, like=items(16))
    after, again = (draw(each, jax.random.key(1), 6) for each in (buffer, loaded))
    jax.tree.map(np.testing.assert_array_equal, after, again)
    assert set(first.data.tolist()) | set(again[1].data.tolist()) == set(range(10))
    with pytest.raises(ValueError, match="drop_last"):
        jaxbuf.load(tmp_path, like=items(16, sampler=jaxbuf.Shuffled(drop_last=True)))


@pytest.mark.parametrize("capacity", [12, 32])
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
        valid = np.array([True] * rows + [False] * (4 - rows) + [True] * 4)
        assert batch.valid.tolist() == valid.tolist()
        part = np.where(valid, [0] * 4 + [1] * 2 + [2] * 2, 3)
        assert mixture.part_of(batch.slots).tolist() == part.tolist()
        share = np.where(part == 0, 4 / 9, np.where(part == 1, 2 / 4, 0)) / 8
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
    with pytest.raises(ValueError, match="drop_last is 3"):
        jaxbuf.Shuffled(drop_last=3)
    with pytest.raises(ValueError, match="has no priorities"):
        buffer.update_priority(buffer.sample(jax.random.key(0), 2).slots, jnp.ones(2))
    with pytest.raises(ValueError, match="cannot tell the probability"):
        jaxbuf.Recent(0.5, 4, base=jaxbuf.Shuffled())
    with pytest.raises(ValueError, match=re.escape("fewer than 2**30 slots")):
        jax.eval_shape(lambda: items(2**30))
    for call in (jaxbuf.next_batch, lambda *args: args[0].next_batch(*args[1:])):
        with pytest.raises(ValueError, match="batch_size is 0"):
            call(buffer, jax.random.key(0), 0)
        with pytest.raises(ValueError, match="key is of type int"):
            call(buffer, 3, 4)
    queue = jaxbuf.Queue.create(jnp.int32(0), 4)
    with pytest.raises(ValueError, match="Queue, which has no method next_batch"):
        jaxbuf.next_batch(queue, jax.random.key(0), 4)

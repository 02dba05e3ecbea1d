"""Draws of different items, and the first of each of many numbers, beside plain Python."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbuf
from jaxbuf.strategies.distinct import distinct, first_distinct
from tests.strategies.test_every_sampler import assert_counts
from tests.traces import large_outside_of_branches


def twin(numbers, count, below, size):
    found = [number for number in dict.fromkeys(numbers.tolist()) if number < below][:count]
    return [*found, *[below] * (size - len(found))], len(found)


@pytest.mark.parametrize(
    ("rows", "size", "below"),
    [(1, 1, 1), (2, 1, 9), (3, 4, 2), (40, 20, 7), (288, 256, 300), (512, 256, 100_000)],
)
def test_the_first_of_each(rows, size, below):
    rng = np.random.default_rng(rows)
    numbers = rng.integers(0, below + 1, (30, rows)).astype(np.int32)
    # Neighbours fall onto neighbouring places of the table, and so do these and their multiples.
    numbers[0] = np.minimum(np.arange(rows), below)
    numbers[1] = np.minimum(np.arange(rows) * 4 * size, below)
    numbers[2] = below
    counts = rng.integers(0, size + 1, 30).astype(np.int32)
    counts[:5] = size

    def one(numbers, count):
        return first_distinct(numbers, count, below, size=size)

    wanted = [twin(*row, below, size) for row in zip(numbers, counts, strict=True)]
    # In a scan they are looked up in a table, under vmap sorted.
    _, scanned = jax.lax.scan(lambda _, row: (None, one(*row)), None, (numbers, counts))
    for found in (scanned, jax.jit(jax.vmap(one))(numbers, counts)):
        values, filled = jax.tree.map(np.asarray, found)
        assert [(row.tolist(), int(n)) for row, n in zip(values, filled, strict=True)] == wanted


def test_rounds_go_on_where_the_last_one_ended():
    # Heavy items take all proposals until they are removed.
    size, capacity = 6, 64
    given = []

    def propose(key, rows, removed):
        jax.debug.callback(lambda key: given.append(tuple(key.tolist())), jax.random.key_data(key))
        heaviest = jnp.argmin(removed, axis=0).astype(jnp.int32)
        return jnp.where(jnp.arange(rows) % 2 == 0, heaviest, heaviest + 1)

    def remove(removed, index):
        return removed.at[index].set(True, mode="drop")

    @jax.jit
    def draw(key, count):
        removed = jnp.zeros((capacity,), bool)
        return distinct(key, size, count, removed, propose, remove, capacity)

    for count in range(size + 1):
        given.clear()
        drawn, valid = draw(jax.random.key(count), jnp.int32(count))
        jax.effects_barrier()
        # Two come of each round, and none is asked for again.
        assert drawn[:count].tolist() == list(range(count))
        assert valid.tolist() == [True] * count + [False] * (size - count)
        assert len(given) == max(1, -(-count // 2))
        assert len(set(given)) == len(given)


SOFTMAX, NO_REPEATS = jaxbuf.Softmax(replacement=False), {"replacement": False}
BY_SCORE = jaxbuf.Blend((SOFTMAX, jaxbuf.Recent(0.5, 4, SOFTMAX)), (0.5, 0.5))
BY_PRIORITY = jaxbuf.Blend(
    (
        jaxbuf.Prioritized(uniform_mix=jaxbuf.Varying(0.1), **NO_REPEATS),
        jaxbuf.RankBased(sort_every=1000, **NO_REPEATS),
    ),
    (0.5, 0.5),
)


def filled(sampler, numbers):
    buffer = jaxbuf.ItemBuffer.create(jnp.int32(0), len(numbers), sampler=sampler)
    name = "score" if sampler.uses_score else "priority"
    return buffer.add(jnp.arange(len(numbers)), **{name: numbers})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sampler", "shared"),
    [(BY_SCORE, False), (BY_SCORE, True), (BY_PRIORITY, False)],
)
def test_under_vmap_no_draw_passes_over_all_slots(sampler, shared):
    slots = 1 << 16

    def draw(buffer, key):
        return buffer.sample(key, 8).slots

    numbers = jax.ShapeDtypeStruct((slots,) if shared else (3, slots), "float32")
    fill = functools.partial(filled, sampler)
    buffer = jax.eval_shape(fill if shared else jax.vmap(fill), numbers)
    keys = jax.random.split(jax.random.key(0), 3)
    mapped = jax.jit(jax.vmap(draw, (None if shared else 0, 0)))
    assert not large_outside_of_branches(mapped.lower(buffer, keys).compile().as_text(), slots)


def test_members_draw_alike_under_vmap_and_alone_and_by_the_law_of_successive_draws():
    # The first needs one round, the second several, the third noise, and the fourth has no items.
    inf = np.inf
    scores = jnp.array([[0, 0.5, 1, 1.5], [9, 0, 1, -9], [0, -200, -200.5, -199], [-inf] * 4])
    many = jax.vmap(lambda scores: filled(SOFTMAX, scores))(scores)

    def draw(buffer, key):
        batch = buffer.sample(key, 2)
        return batch.data, batch.valid, batch.probability

    keys = jax.random.split(jax.random.key(1), (2000, 4))
    data, valid, probability = jax.jit(jax.vmap(jax.vmap(draw), (None, 0)))(many, keys)
    assert valid.all(axis=(0, 2)).tolist() == [True, True, True, False]
    assert not valid[:, 3].any()
    in_turn = jax.jit(lambda keys: jax.lax.map(lambda x: draw(*x), (many, keys)))
    for number in range(50):
        alone = in_turn(keys[number])
        for mapped, single in zip((data, valid, probability), alone, strict=True):
            np.testing.assert_array_equal(mapped[number], single)
    for i, row in enumerate(np.asarray(scores[:3], np.float64)):
        first = np.exp(row - row.max())
        second = np.array([np.exp(row - np.delete(row, k).max()) for k in range(4)])
        second *= 1 - np.eye(4)
        second /= second.sum(axis=1, keepdims=True)
        found = np.zeros((4, 4))
        np.add.at(found, tuple(np.asarray(data[:, i]).T), 1)
        assert_counts(found, (first / first.sum())[:, None] * second * len(keys))

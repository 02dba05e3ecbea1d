"""Arithmetic on rows: the loop and the vectorized form agree, whatever transforms them."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxbuf.core import rowwise
from jaxbuf.core.slots import random_words


def blend(row, shared, scale):
    """Something of every kind: powers, choices, integers, a table that is looked up."""
    x, index = row
    table, offset = shared
    y = jnp.where(x > 0, (x + offset) ** jnp.float32(0.6), 0.0) * scale
    return {"value": y + table.at[index].get(mode="clip"), "index": (index * 7) % 5}


def inputs(*shape):
    rng = np.random.default_rng(0)
    rows = (
        jnp.asarray(rng.normal(0, 3, shape), jnp.float32),
        jnp.asarray(rng.integers(-2, 9, shape), jnp.int32),
    )
    return rows, (jnp.arange(6, dtype=jnp.float32), jnp.float32(0.5))


def assert_same(got, expected):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("rows", [1, 2, 33])
def test_the_loop_gives_what_all_rows_at_once_give(rows):
    batch, shared = inputs(rows)
    expected = jax.jit(lambda *args: blend(*args, 2.0))(batch, shared)
    assert_same(rowwise.each(blend, batch, shared, (2.0,)), expected)
    assert_same(rowwise.each(blend, batch, shared, (2.0,), most=rows - 1), expected)


@pytest.mark.parametrize("rows", [1, 2, 33])
def test_what_is_touched_before_changes_nothing(rows):
    batch, shared = inputs(rows)

    def touch(row, shared):
        return [shared[0].at[row[1]].get(mode="clip"), row[0]]

    expected = rowwise.each(blend, batch, shared, (2.0,))
    assert_same(rowwise.each(blend, batch, shared, (2.0,), touch=touch), expected)


@pytest.mark.parametrize("rows", [1, 2, 65])
def test_all_rows_reduced_to_one_number(rows):
    numbers = np.random.default_rng(rows).normal(size=(3, rows)).astype(np.float32)

    def least(row):
        return rowwise.reduce(jax.lax.min, row, 1.0)

    expected = np.minimum(numbers.min(axis=1), 1.0)
    np.testing.assert_array_equal([least(row) for row in numbers], expected)
    np.testing.assert_array_equal(jax.vmap(least)(numbers), expected)
    with rowwise.alone():
        np.testing.assert_array_equal(jax.jit(least)(numbers[0]), expected[0])
    counts = jnp.arange(rows, dtype=jnp.uint32)
    assert rowwise.reduce(jax.lax.add, counts, 0) == rows * (rows - 1) // 2


def test_lanes_of_rows_and_of_what_they_share():
    batch, shared = inputs(3, 17)
    table = jnp.stack([shared[0], shared[0] + 1, shared[0] - 1])
    mapped = jax.jit(jax.vmap(lambda row, table: rowwise.each(blend, row, (table, 0.5), (2.0,))))
    lanes = [
        rowwise.each(blend, jax.tree.map(lambda leaf, i=i: leaf[i], batch), (table[i], 0.5), (2.0,))
        for i in range(3)
    ]
    assert_same(mapped(batch, table), jax.tree.map(lambda *rows: jnp.stack(rows), *lanes))


def test_random_words_are_the_same_everywhere():
    keys = jax.random.split(jax.random.key(3), 4)
    apart = jnp.stack([random_words(key, (2, 15)) for key in keys])
    together = jax.vmap(lambda key: random_words(key, (2, 15)))(keys)
    _, scanned = jax.lax.scan(lambda _, key: (None, random_words(key, (2, 15))), None, keys)
    np.testing.assert_array_equal(apart, together)
    np.testing.assert_array_equal(apart, scanned)
    assert len(np.unique(apart)) == apart.size


@pytest.mark.parametrize("key", [jax.random.PRNGKey(1), jax.random.key(1, impl="rbg")])
def test_keys_of_other_kinds(key):
    words = random_words(key, (5000,))
    share = np.unpackbits(np.asarray(words).view(np.uint8)).mean()
    assert words.dtype == jnp.uint32
    assert abs(share - 0.5) < 4 * 0.5 / np.sqrt(32 * 5000)


def test_a_raw_key_draws_what_a_typed_one_draws():
    raw = random_words(jax.random.PRNGKey(7), (9,))
    np.testing.assert_array_equal(raw, random_words(jax.random.key(7), (9,)))


def test_chosen_rows_are_packed_in_front():
    rng = np.random.default_rng(5)
    values = jnp.asarray(rng.integers(0, 100, (4, 17)), jnp.int32)
    chosen = jnp.asarray(
        np.stack([rng.random(17) < 0.3, rng.random(17) < 0.9, [True] * 17, [False] * 17])
    )

    def pack(values, chosen):
        return rowwise.pack(values, chosen, 7, size=20)

    together = jax.vmap(pack)(values, chosen)
    for i in range(4):
        kept = np.asarray(values[i])[np.asarray(chosen[i])]
        packed, count = pack(values[i], chosen[i])
        assert int(count) == len(kept)
        np.testing.assert_array_equal(packed, [*kept, *[7] * (20 - len(kept))])
        assert_same((together[0][i], together[1][i]), (packed, count))


@pytest.mark.parametrize("below", [5, 40_000_000, 2**31, 2**32])
@pytest.mark.parametrize("rows", [1, 2, 300, 70_000])
def test_numbers_in_order(rows, below):
    rng = np.random.default_rng(rows)
    # Some of them several times, and some that differ in one half of a word only.
    numbers = rng.integers(0, below, rows) // 3 * 3 % below
    numbers[rng.permutation(rows)[: rows // 2]] &= 0xFFFF0003
    numbers[-1] = below - 1
    numbers = numbers.astype(np.uint32 if below > 2**31 else np.int32)
    order = np.argsort(numbers, kind="stable")
    found = jax.jit(rowwise.sort, static_argnums=1)(jnp.asarray(numbers), below)
    chex.assert_trees_all_equal_dtypes(found[0], jnp.asarray(numbers))
    np.testing.assert_array_equal(found[0], numbers[order])
    np.testing.assert_array_equal(found[1], order)
    both = jax.vmap(lambda numbers: rowwise.sort(numbers, below))(jnp.stack([numbers] * 2))
    np.testing.assert_array_equal(both[1], np.stack([order] * 2))

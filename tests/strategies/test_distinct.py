"""Draws of different items, and the first of each of many numbers, beside plain Python."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxbuf.strategies.distinct import distinct, first_distinct


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

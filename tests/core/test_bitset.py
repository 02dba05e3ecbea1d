"""`Bitset` against an array of bools."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxbuf.core.native import called_from_python, using_native
from jaxbuf.occupancy.bitset import Bitset
from jaxbuf.testing import hlo
from tests.operations import quick


@jax.jit
def change(bits, index, member):
    return bits.set(index, member)


@jax.jit
def look(bits, index):
    return bits.get(index), bits.before(index)


change_many = jax.jit(jax.vmap(lambda bits, index, member: bits.set(index, member)))
find = jax.jit(lambda bits, rank: bits.at(rank))


@pytest.mark.parametrize("natively", [False, True])
@pytest.mark.parametrize(
    ("capacity", "rows"),
    quick([(1, 300), (31, 1), (32, 300), (70_001, 300)], {(31, 1), (70_001, 300)}),
)
def test_random_changes_agree_with_an_array(capacity, rows, natively):
    with using_native(natively), called_from_python(True):
        check_random_changes(capacity, rows)


def check_random_changes(capacity, rows):
    rng = np.random.default_rng(capacity)
    bits, twin = Bitset.create(capacity), np.zeros(capacity, bool)
    many = jax.tree.map(lambda leaf: jnp.stack([leaf] * 2), bits)
    for _ in range(6):
        # Some out of range on both sides, and some more than once.
        index = rng.integers(-3, capacity + 3, rows).astype(np.int32)
        index[rng.random(rows) < 0.1] = rng.choice([-(2**31), 2**31 - 1, capacity])
        member = rng.random(rows) < 0.6
        bits = change(bits, index, member)
        many = change_many(many, np.stack([index] * 2), np.stack([member] * 2))
        for number, is_member in zip(index, member, strict=True):
            if 0 <= number < capacity:
                twin[number] = is_member
        jax.tree.map(lambda one, two: np.testing.assert_array_equal([one] * 2, two), bits, many)
        every = np.arange(-1, capacity + 1, dtype=np.int32)
        got, before = look(bits, every)
        np.testing.assert_array_equal(got, [False, *twin, False])
        np.testing.assert_array_equal(before, [0, 0, *twin.cumsum()])
        rank = jnp.arange(capacity, dtype=jnp.int32)
        np.testing.assert_array_equal(find(bits, rank)[: twin.sum()], np.flatnonzero(twin))
        assert bits.size == twin.sum()
        kept = rng.random(capacity) < 0.5
        some = Bitset.of(jnp.asarray(twin & kept))
        twice = change(bits, every[1:-1], twin & kept)
        jax.tree.map(np.testing.assert_array_equal, some, twice)
    assert bits.clear().size == 0


@pytest.mark.parametrize("rows", [1, 64])
def test_a_scan_changes_it_in_place(rows):
    bits = Bitset.create(2**20)

    def step(bits, index):
        known = bits.get(index)
        return bits.set(index, ~known), known

    index = jnp.arange(3 * rows, dtype=jnp.int32).reshape(3, rows)
    scan = jax.jit(lambda bits, index: jax.lax.scan(step, bits, index), donate_argnums=0)
    text = scan.lower(bits, index).compile().as_text()
    assert not hlo.copies(text, bits.nodes.nbytes)

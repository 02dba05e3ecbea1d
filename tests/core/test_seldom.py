"""Work that only those do who need it, also under `vmap`, beside NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxbuf.core.seldom import if_needed
from tests.traces import large_outside_of_branches

KEYS = jax.random.split(jax.random.key(0), 4)


def drawn(key, table, shift):
    """A draw from all rows of a table, and their sum: much work for a small result."""
    noise = jax.random.randint(key, table.shape, 0, 100)
    return jnp.sum(noise * table) + shift, jnp.sum(table)


def either(needed, key, table, shift):
    return if_needed(needed, drawn, (shift, jnp.int32(-1)), key, table, shift)


# The axes of `needed`, key, table and shift that the inner and the outer vmap map.
MAPPED = [
    ((0, 0, 0, 0), None),
    ((0, 0, None, None), None),
    ((0, None, None, None), None),
    ((None, 0, None, 0), None),
    ((0, 0, None, None), (0, None, 0, 0)),
    ((None, 0, 0, None), (0, None, 0, 0)),
    ((0, None, None, 0), (0, 0, 0, None)),
]


@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize("axes", MAPPED)
def test_each_member_has_its_own_result_whatever_is_mapped(monkeypatch, axes, elsewhere):
    if elsewhere:  # The form for accelerators.
        monkeypatch.setattr(
            jax.lax, "platform_dependent", lambda *args, cpu, default: default(*args)
        )
    rng = np.random.default_rng(0)
    inner, outer = axes[0], axes[1] or (None,) * 4
    # Axes of an operand: those of the outer vmap, and those of the inner one.
    each = [(a is not None, b is not None) for a, b in zip(outer, inner, strict=True)]
    lead = [(3,) * a + (4,) * b for a, b in each]
    given = (
        rng.integers(0, 2, lead[0]).astype(bool),
        jax.random.split(jax.random.key(1), lead[1]),
        rng.integers(0, 9, (*lead[2], 5)).astype(np.int32),
        rng.integers(0, 9, lead[3]).astype(np.int32),
    )

    def alone(i, j):
        own = [x[(i,) * a + (j,) * b] for x, (a, b) in zip(given, each, strict=True)]
        return jax.tree.map(int, drawn(*own[1:]) if own[0] else (own[3], -1))

    mapped = jax.vmap(either, inner)
    mapped = mapped if axes[1] is None else jax.vmap(mapped, outer)
    found = [np.reshape(leaf, (-1, 4)).tolist() for leaf in jax.jit(mapped)(*given)]
    expected = [[alone(i, j) for j in range(4)] for i in range(len(found[0]))]
    assert found == [[[pair[k] for pair in row] for row in expected] for k in range(2)]


@pytest.mark.parametrize("shared", [False, True])
def test_members_that_do_not_need_it_cost_nothing(shared):
    rows = 1 << 16
    table = jnp.zeros((rows,) if shared else (4, rows), jnp.int32)
    # As in a program of its own, the function is traced before vmap maps it.
    mapped = jax.vmap(jax.jit(either), (0, 0, None if shared else 0, 0))
    text = jax.jit(mapped).lower(jnp.zeros(4, bool), KEYS, table, jnp.arange(4)).compile().as_text()
    assert not large_outside_of_branches(text, rows)
    assert f"[{rows}]" in text

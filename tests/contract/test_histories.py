"""Step by step with a donated buffer, or as scans side by side: the same, whatever a buffer is of.

`test_items.py` asks this of the samplers of items beside a model, and `test_debugging.py` what is
different without jit.
"""

import chex
import jax
import numpy as np
import pytest

from tests import operations

# What follows an add and a draw.
CHANGES = ("update_priority", "update_score", "mark_used", "remove", "set_version")
# With a negative number, no row of an add counts, and priorities and scores are illegal.
SCALES = np.array([[1, 2, -1, 3, 1], [2, -1, 3, 1, 4]], np.float32)
LANES, STEPS = SCALES.shape


def step(buffer, inputs):
    scale, key = inputs
    buffer = operations.add(buffer, None, scale, key)
    if operations.is_windows(buffer):
        # These steps end no episode.
        buffer = operations.add_plainly(buffer, None, scale, key)
    if operations.has_next_of_its_own(buffer):
        buffer, batch = buffer.next_batch(key, operations.BATCH)
    else:
        batch = operations.draw(buffer, key)
    for what in CHANGES:
        has, function = operations.OPERATIONS[what]
        if has(buffer):
            changed = function(buffer, batch, scale, key)
            buffer = changed[0] if what == "set_version" else changed
    return buffer, (batch, buffer.metrics())


def at(tree, *index):
    return jax.tree.map(lambda leaf: leaf[index], tree)


def exact(tree):
    return [leaf for leaf in jax.tree.leaves(tree) if not np.issubdtype(leaf.dtype, np.floating)]


@pytest.mark.parametrize(
    "name",
    [
        "reservoir",
        "softmax-distinct",
        "shuffled-fresh-lowest",
        "diverse-greedy-lowest",
        "windows-prioritized",
        "windows-recent",
        "windows-balanced-distinct",
        "windows-fresh",
        "windows-episodes",
        "windows-avoid",
        "queue",
        "mixture",
    ],
)
def test_steps_with_donation_are_scans_side_by_side(name):
    inputs = SCALES, jax.random.split(jax.random.key(1), SCALES.shape)
    one = jax.jit(step, donate_argnums=0)
    scan = jax.jit(jax.vmap(lambda xs: jax.lax.scan(step, operations.BUFFERS[name](), xs)))
    ends, scanned = scan(inputs)
    for lane in range(LANES):
        buffer, seen = operations.BUFFERS[name](), []
        for t in range(STEPS):
            buffer, told = one(buffer, at(inputs, lane, t))
            seen.append(jax.device_get(told))
        expected = buffer, jax.tree.map(lambda *leaves: np.stack(leaves), *seen)
        found = at((ends, scanned), lane)
        chex.assert_trees_all_close(found, expected, rtol=1e-6)
        chex.assert_trees_all_equal(exact(found), exact(expected))

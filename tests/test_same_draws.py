"""A key draws the same items in every version: the ones that are written down here."""

import jax
import jax.numpy as jnp
import pytest

import jaxbuf

SAMPLERS = {
    "uniform": jaxbuf.Uniform(),
    "uniform, distinct": jaxbuf.Uniform(replacement=False),
    "prioritized": jaxbuf.Prioritized(),
    "prioritized, not stratified": jaxbuf.Prioritized(alpha=1.0, stratified=False),
    "prioritized, mixed": jaxbuf.Prioritized(uniform_mix=0.5),
    "prioritized, distinct": jaxbuf.Prioritized(alpha=0.5, replacement=False),
    "prioritized, mixed, distinct": jaxbuf.Prioritized(uniform_mix=0.5, replacement=False),
    "softmax": jaxbuf.Softmax(temperature=4.0),
    "softmax, distinct": jaxbuf.Softmax(temperature=4.0, replacement=False),
    "recent": jaxbuf.Recent(0.5, 4, jaxbuf.Prioritized()),
    "blend": jaxbuf.Blend((jaxbuf.Prioritized(), jaxbuf.Uniform()), (0.5, 0.5)),
    "stale": jaxbuf.Staleness(),
    "stale, distinct": jaxbuf.Staleness(replacement=False),
    "shuffled": jaxbuf.Shuffled(),
    "balanced": jaxbuf.Balanced(),
    "balanced, distinct": jaxbuf.Balanced(replacement=False),
}
OF_ITEMS = {
    "uniform": ([22, 23, 7, 11, 13, 27, 7, 16], [10, 12, 10, 10, 21, 13, 23, 20]),
    "uniform, distinct": ([20, 28, 29, 26, 17, 18, 27, 22], [16, 29, 19, 28, 24, 22, 9, 20]),
    "prioritized": ([27, 6, 7, 10, 12, 16, 19, 23], [24, 29, 7, 10, 14, 17, 21, 23]),
    "prioritized, not stratified": (
        [22, 23, 8, 11, 12, 27, 7, 16],
        [10, 11, 10, 10, 22, 12, 23, 20],
    ),
    "prioritized, mixed": ([27, 6, 7, 24, 15, 16, 19, 23], [24, 15, 7, 9, 19, 18, 19, 23]),
    "prioritized, distinct": ([20, 29, 27, 18, 22, 24, 25, 12], [17, 6, 20, 28, 24, 22, 9, 7]),
    "prioritized, mixed, distinct": (
        [17, 29, 15, 6, 28, 18, 27, 22],
        [17, 27, 20, 28, 24, 12, 9, 18],
    ),
    "softmax": ([21, 23, 6, 10, 13, 26, 29, 15], [8, 12, 8, 8, 19, 13, 23, 17]),
    "softmax, distinct": ([17, 26, 27, 25, 15, 16, 21, 24], [15, 27, 17, 26, 24, 21, 7, 6]),
    "recent": ([26, 27, 28, 29, 24, 6, 16, 20], [26, 27, 28, 29, 25, 9, 12, 19]),
    "blend": ([21, 27, 8, 29, 12, 12, 17, 22], [13, 29, 17, 13, 14, 20, 18, 21]),
    "stale": ([26, 29, 6, 10, 13, 15, 18, 23], [24, 28, 7, 9, 14, 17, 20, 22]),
    "stale, distinct": ([20, 28, 29, 26, 17, 18, 27, 22], [15, 7, 19, 6, 24, 21, 10, 8]),
    "shuffled": ([20, 28, 29, 26, 17, 18, 27, 22], [15, 7, 19, 6, 24, 21, 10, 8]),
    "balanced": ([28, 29, 13, 17, 19, 9, 13, 22], [16, 18, 16, 16, 27, 19, 29, 26]),
    "balanced, distinct": ([8, 11, 12, 16, 19, 21, 24, 29], [7, 10, 13, 16, 20, 22, 26, 29]),
}
OF_SHARDS = {
    "uniform": [5, 5, 8, 3, 13, 16, 0, 1],
    "prioritized": [3, 10, 7, 7, 14, 16, 19, 23],
    "prioritized, not stratified": [5, 8, 9, 11, 14, 17, 22, 23],
    "prioritized, mixed": [3, 3, 7, 7, 16, 6, 19, 23],
    "softmax": [3, 6, 6, 10, 13, 15, 21, 23],
}
OF_RANGES = {True: [19, 20, 21, 22, 24, 24, 27, 29], False: [18, 19, 20, 23, 24, 25, 27, 29]}


def items(sampler, first, count):
    """Returns the arguments of ``add`` for items with these numbers."""
    number = jnp.arange(first, first + count, dtype=jnp.int32)
    given = {}
    if sampler.uses_priority:
        given["priority"] = (number * 7 % 13).astype(jnp.float32)
    if sampler.uses_score:
        given["score"] = (number * 5 % 11).astype(jnp.float32)
    return (number,), given


def filled(sampler):
    buffer = jaxbuf.ItemBuffer.create(jnp.int32(0), 24, sampler=sampler)
    for first in (0, 15):
        args, given = items(sampler, first, 15)
        buffer = buffer.add(*args, **given)
    return buffer


@pytest.mark.parametrize("name", SAMPLERS)
def test_items(name):
    buffer = filled(SAMPLERS[name])
    after, batch = buffer.next_batch(jax.random.key(0), 8)
    _, then = after.next_batch(jax.random.key(1), 8)
    assert (batch.data.tolist(), then.data.tolist()) == OF_ITEMS[name]


@pytest.mark.parametrize("name", OF_SHARDS)
def test_items_of_shards(name):
    sampler, mesh = SAMPLERS[name], jax.make_mesh((1,), ("data",))

    def make():
        return jaxbuf.ItemBuffer.create(jnp.int32(0), 6, sampler=sampler)

    args, given = items(sampler, 0, 24)
    buffer = jaxbuf.Sharded.create(make, mesh, "data", shards=4).add(*args, **given)
    assert buffer.sample(jax.random.key(0), 8).data.tolist() == OF_SHARDS[name]


@pytest.mark.parametrize("replacement", OF_RANGES)
def test_ranges_by_priority(replacement):
    batch = filled(jaxbuf.Prioritized()).sample_range(
        jax.random.key(0), 8, start=-12, stop=None, by_priority=True, replacement=replacement
    )
    assert batch.data.tolist() == OF_RANGES[replacement]

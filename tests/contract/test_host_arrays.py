"""NumPy arrays that their owner writes again after a call: what was passed is what counts.

And arrays in another byte order are taken like any others.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbuf
from jaxbuf.interop import flashbax as fbx

KEY = jax.random.key(0)
ROWS = 8
ITEM = {"obs": jnp.zeros(3), "id": jnp.int32(0)}
STEP = {"obs": jnp.zeros(3), "reward": jnp.float32(0), "terminated": jnp.bool_(False)}


def aligned(values):
    """Returns a copy at an address that a jax array may share."""
    values = np.asarray(values)
    memory = np.zeros(values.nbytes + 64, np.uint8)
    start = -memory.ctypes.data % 64
    copy = memory[start : start + values.nbytes].view(values.dtype).reshape(values.shape)
    copy[...] = values
    return copy


@jax.jit
def _late(tree, x):
    x = jax.lax.fori_loop(0, 4, lambda _, x: jnp.tanh(x @ x), x)
    wrong = jnp.isnan(x[0, 0])

    def leaf(array):
        return jnp.where(wrong, jnp.zeros_like(array), array)

    return jax.tree.map(leaf, tree)


def late(tree):
    """Returns the same arrays, which take a while to compute, and all that depends on them."""
    return _late(tree, jnp.ones((500, 500)))


def check(door, *arguments):
    """Checks that a door reads its arguments before it returns.

    What it gets first is not computed yet, so whatever it leaves for later happens after the
    arguments were written again.
    """
    state, *given = arguments
    want = jax.block_until_ready(door(late(state), *given))
    owned = jax.tree.map(lambda x: aligned(x) if isinstance(x, np.ndarray) else x, given)
    got = door(late(state), *owned)
    for leaf in jax.tree.leaves(owned):
        if isinstance(leaf, np.ndarray):
            leaf[...] = 1 if leaf.dtype == np.bool_ and not leaf.any() else 0
    swapped = door(late(state), *jax.tree.map(other_order, given))
    for a, *others in zip(*map(jax.tree.leaves, (want, got, swapped)), strict=True):
        if not jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            for b in others:
                np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def other_order(leaf):
    if isinstance(leaf, np.ndarray):
        return leaf.astype(leaf.dtype.newbyteorder())
    return leaf


def numbers(*shape, dtype=np.float32):
    return np.arange(1, np.prod(shape) + 1).reshape(shape).astype(dtype)


def items(rows=ROWS):
    return {"obs": numbers(rows, 3), "id": numbers(rows, dtype=np.int32)}


def steps(*leading):
    terminated = numbers(*leading, dtype=np.int32) % 3 == 0
    return {"obs": numbers(*leading, 3), "reward": numbers(*leading), "terminated": terminated}


MASK = np.arange(ROWS) % 3 > 0
VERSION = np.full(ROWS, 2, np.int32)
SCORED = {"evictor": jaxbuf.Lowest(), "sampler": jaxbuf.Softmax()}
FRESH = jaxbuf.Freshness(max_use=3, max_staleness=5)


def priorities():
    return jaxbuf.ItemBuffer.create(ITEM, 16, sampler=jaxbuf.Prioritized(), freshness=FRESH).add(
        items()
    )


def scores():
    return jaxbuf.ItemBuffer.create(ITEM, 16, **SCORED)


def rings(**options):
    return jaxbuf.TrajectoryBuffer.create(
        STEP, ROWS, 8, sequence_length=2, episodes=jaxbuf.Episodes(record_return=True), **options
    )


def host(tree):
    return jax.tree.map(np.array, tree)


SLOTS = host(priorities().latest(ROWS).slots)
WINDOWS = host(rings().add(steps(ROWS, 4)).latest(1).slots)


def add(buffer, items, options):
    return buffer.add(items, **options)


def jitted_add(buffer, items, options):
    return jaxbuf.add(buffer, items, **options)


OPTIONS = {
    "items": (priorities, items(), {}),
    "64 bits": (
        priorities,
        {"obs": numbers(ROWS, 3, dtype=np.float64), "id": numbers(ROWS, dtype=np.int64)},
        {},
    ),
    "priority": (priorities, items(), {"priority": numbers(ROWS), "mask": MASK}),
    "float64 priority": (priorities, items(), {"priority": numbers(ROWS, dtype=np.float64)}),
    "version": (priorities, items(), {"version": VERSION, "session": 0 * VERSION}),
    "score": (scores, items(), {"score": numbers(ROWS)}),
    "steps": (rings, steps(ROWS), {"mask": MASK}),
    "rollout": (rings, steps(ROWS, 4), {"mask": numbers(ROWS, 4) > 7}),
    "env_ids": (rings, steps(3, 2), {"env_ids": np.array([5, 0, 3], np.int32)}),
    "queue": (lambda: jaxbuf.Queue.create(ITEM, 16), items(), {"mask": MASK}),
    "accumulator": (
        lambda: jaxbuf.EpisodeAccumulator.create(STEP, ROWS, 4),
        steps(ROWS),
        {"mask": MASK},
    ),
    "chunks": (
        lambda: jaxbuf.ChunkAccumulator.create(ITEM, 2, 2),
        items(),
        {
            "worker": np.arange(ROWS, dtype=np.int32) % 2,
            "number": np.arange(ROWS, dtype=np.int32) // 2,
            "version": VERSION,
        },
    ),
    "mixture": (
        lambda: jaxbuf.Mixture.create([priorities(), priorities()], [1, 1]),
        items(),
        {"part": 1, "priority": numbers(ROWS)},
    ),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_what_is_added_is_what_was_passed(case):
    make, *given = OPTIONS[case]
    check(add, make(), *given)


@pytest.mark.parametrize("case", ["priority", "float64 priority", "score", "rollout", "mixture"])
def test_what_the_function_adds_too(case):
    make, *given = OPTIONS[case]
    check(jitted_add, make(), *given)


def test_sharded_and_hosted_adds():
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    sharded = jaxbuf.Sharded.create(
        lambda: jaxbuf.ItemBuffer.create(ITEM, 8, sampler=jaxbuf.Prioritized()), mesh, "d", shards=2
    )
    hosted, given = jaxbuf.Hosted.create(priorities), (items(), {"priority": numbers(ROWS)})
    check(add, sharded, *given)
    check(
        lambda state, *rest: jitted_add(hosted.replace(buffer=state), *rest).buffer,
        hosted.buffer,
        *given,
    )


def two():
    return jaxbuf.Mixture.create([priorities(), priorities()], [1, 1])


THREE, RAW_KEY, WINDOW = np.array(3, np.int32), np.array(jax.random.PRNGKey(3)), steps(ROWS, 4)
BATCH = host(priorities().sample(KEY, 4))
# What is called, what its state is made by, and what it is given.
CASES = [
    *(
        (change, make, SLOTS, numbers(ROWS), MASK)
        for make in (priorities, two)
        for change in (
            lambda b, slots, value, mask: b.update_priority(slots, value, mask=mask),
            lambda b, slots, value, mask: jaxbuf.update_priority(b, slots, value, mask=mask),
            lambda b, slots, value, mask: b.mark_used(slots, mask=mask),
            lambda b, slots, value, mask: (b.use_count(slots), b.staleness(slots)),
        )
    ),
    (lambda b, slots: (b.part_of(slots), b.part_slots(slots, 0)), two, SLOTS),
    *(
        (ask, priorities, THREE)
        for ask in (
            lambda b, number: b.set_version(number),
            lambda b, number: b.set_version(1, number),
            lambda b, number: b.can_sample(number),
            lambda b, number: b.sample_range(KEY, 4, number),
            lambda b, n: jaxbuf.importance_weights(b, b.sample(KEY, 4), n, normalize=None),
        )
    ),
    *(
        (draw, priorities, RAW_KEY)
        for draw in (
            lambda b, key: b.sample(key, 4),
            lambda b, key: jaxbuf.sample(b, key, 4),
            lambda b, key: b.next_batch(key, 4),
            lambda b, key: b.sample_range(key, 4),
            lambda b, key: jaxbuf.Mixture.create([b], [1]).sample(key, 4),
            lambda b, key: jaxbuf.sample_groups(b, key, 2, num_groups=20, size=2, group="id"),
        )
    ),
    (functools.partial(jaxbuf.importance_weights, beta=0.5, normalize=None), priorities, BATCH),
    (
        lambda b, draw: b.gather(jaxbuf.strategies.Draw(*draw)),
        priorities,
        (BATCH.slots.index, BATCH.probability, BATCH.valid),
    ),
    (
        lambda x, n: (x.inserted(n), x.sampled(n), x.can_insert(n, n)),
        lambda: jaxbuf.RateLimiter.create(1.0, min_size=2, tolerance=4.0),
        THREE,
    ),
    (lambda x, n: (x.inserted(n), x.after(n)), jaxbuf.ThroughputLimiter.create, THREE),
    (lambda discount, w: jaxbuf.n_step(w, 2, discount), lambda: jnp.float32(0.9), WINDOW),
    (lambda n, w: jaxbuf.stack_frames(w, 2, first=n < 1), lambda: jnp.zeros(ROWS), WINDOW),
    (lambda n, w: jaxbuf.terminal_states(w, n), lambda: jnp.arange(ROWS) % 4, WINDOW),
    (
        lambda w, n: jaxbuf.terminal_states(w, n),
        lambda: jax.tree.map(jnp.asarray, WINDOW),
        np.arange(ROWS) % 4,
    ),
    (lambda key, b: b.sample(key, 4), lambda: KEY, host(priorities())),
    (lambda rows, b: b.add(rows), lambda: jax.tree.map(jnp.asarray, items()), host(priorities())),
]


@pytest.mark.parametrize(("door", "make", "given"), [(*case[:2], case[2:]) for case in CASES])
def test_what_was_passed_is_what_counts(door, make, given):
    check(door, make(), *given)


EPISODES = {
    "locate": lambda b, slots, env, at: b.locate(slots),
    "episode_mask": lambda b, slots, env, at: b.episode_mask(slots),
    "episode of windows": lambda b, slots, env, at: b.episode(slots),
    "episode of steps": lambda b, slots, env, at: b.episode(env, at),
    "episode of places": lambda b, slots, env, at: b.episode((env, at)),
    "get_field": lambda b, slots, env, at: b.get_field("reward", env, at),
    "steps_around": lambda b, slots, env, at: b.steps_around(slots, at, "reward"),
    "clear": lambda b, slots, env, at: b.clear(env),
    "dequeue": lambda b, slots, env, at: b.dequeue(1, mask=MASK),
}


@pytest.mark.parametrize("name", EPISODES)
def test_lookups_of_steps(name):
    buffer = jaxbuf.TrajectoryBuffer.create(
        STEP, ROWS, 8, sequence_length=2, episodes=jaxbuf.Episodes(boundary="mask")
    ).add(steps(ROWS, 4))
    given = WINDOWS, np.arange(4, dtype=np.int32), np.array([1, 2, 3, 3])
    check(EPISODES[name], buffer, *given)
    if name not in ("clear", "dequeue"):
        check(EPISODES[name], jaxbuf.Mixture.create([buffer], [1]), *given)


def test_the_flashbax_layer():
    buffer = fbx.make_item_buffer(16, 1, 2, add_batches=True)
    check(buffer.add, buffer.init(ITEM), items())
    buffer = fbx.make_prioritised_flat_buffer(16 * ROWS, 3 * ROWS, 2, add_batch_size=ROWS)
    state = buffer.add(buffer.init(ITEM), items())
    check(buffer.add, state, items())
    check(buffer.set_priorities, state, np.arange(4, dtype=np.int32), numbers(4))


def test_a_holder():
    def door(buffer, rows, priority):
        holder = jaxbuf.Holder(buffer)
        holder.add(rows, priority=priority)
        return holder.read(lambda b: b.replace())

    check(door, priorities(), items(), numbers(ROWS))


def test_inside_a_program():
    # What a traced function closes over is a constant, with its value at the time of the trace.
    rows = aligned(numbers(ROWS))
    buffer = jaxbuf.ItemBuffer.create(jnp.float32(0), ROWS)
    step = jax.jit(lambda b: b.add(rows)).lower(buffer)
    want = rows.copy()
    rows[:] = 0
    assert step.compile()(buffer).data.tolist() == want.tolist()

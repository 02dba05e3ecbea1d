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

FRESH = jaxbuf.Freshness(max_use=3, max_staleness=5)


def priorities():
    options = {"sampler": jaxbuf.Prioritized(), "freshness": FRESH}
    return jaxbuf.ItemBuffer.create(ITEM, 16, **options).add(items())


def scores():
    return jaxbuf.ItemBuffer.create(ITEM, 16, evictor=jaxbuf.Lowest(), sampler=jaxbuf.Softmax())


def rings():
    episodes = jaxbuf.Episodes(boundary="mask", record_return=True)
    return jaxbuf.TrajectoryBuffer.create(STEP, ROWS, 8, sequence_length=2, episodes=episodes)


def windows():
    return rings().add(steps(ROWS, 4))


def host(tree):
    return jax.tree.map(np.array, tree)


SLOTS = host(priorities().latest(ROWS).slots)


def two():
    return jaxbuf.Mixture.create([priorities(), priorities()], [1, 1])


def sharded():
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    make = functools.partial(jaxbuf.ItemBuffer.create, ITEM, 8, sampler=jaxbuf.Prioritized())
    return jaxbuf.Sharded.create(make, mesh, "d", shards=2)


def add(buffer, items, options):
    return buffer.add(items, **options)


def added(buffer, items, options):
    return jaxbuf.add(buffer, items, **options)


def of_hosted(buffer, items, options):
    hosted = jaxbuf.Hosted.create(priorities).replace(buffer=buffer)
    return jaxbuf.add(hosted, items, **options).buffer


def of_holder(buffer, items, options):
    holder = jaxbuf.Holder(buffer)
    holder.add(items, **options)
    return holder.read(lambda b: b.replace())


def queue():
    return jaxbuf.Queue.create(ITEM, 16)


def accumulator():
    return jaxbuf.EpisodeAccumulator.create(STEP, ROWS, 4)


def chunks():
    return jaxbuf.ChunkAccumulator.create(ITEM, 2, 2)


WIDE = {"obs": numbers(ROWS, 3, dtype=np.float64), "id": numbers(ROWS, dtype=np.int64)}
PRIORITY = {"priority": numbers(ROWS), "mask": MASK}
WORKER, NUMBER = (np.arange(ROWS, dtype=np.int32) % 2, np.arange(ROWS, dtype=np.int32) // 2)
THREE, RAW_KEY, WINDOW = np.array(3, np.int32), np.array(jax.random.PRNGKey(3)), steps(ROWS, 4)
BATCH = host(priorities().sample(KEY, 4))
AT = host(windows().latest(1).slots), np.arange(4, dtype=np.int32), np.array([1, 2, 3, 3])
FLAT = fbx.make_prioritised_flat_buffer(16 * ROWS, 3 * ROWS, 2, add_batch_size=ROWS)
# What is called, what its state is made by, and what it is given.
CASES = [
    (add, priorities, items(), {}),
    (add, priorities, WIDE, {}),
    (add, priorities, items(), {"version": VERSION, "session": 0 * VERSION}),
    (add, rings, steps(ROWS), {"mask": MASK}),
    (add, rings, steps(3, 2), {"env_ids": np.array([5, 0, 3], np.int32)}),
    (add, queue, items(), {"mask": MASK}),
    (add, accumulator, steps(ROWS), {"mask": MASK}),
    (add, chunks, items(), {"worker": WORKER, "number": NUMBER, "version": VERSION}),
    (add, sharded, items(), PRIORITY),
    (of_hosted, priorities, items(), PRIORITY),
    (of_holder, priorities, items(), PRIORITY),
    *(
        (call, make, *given)
        for call in (add, added)
        for make, *given in (
            (priorities, items(), PRIORITY),
            (priorities, items(), {"priority": numbers(ROWS, dtype=np.float64)}),
            (scores, items(), {"score": numbers(ROWS)}),
            (rings, steps(ROWS, 4), {"mask": numbers(ROWS, 4) > 7}),
            (two, items(), {"part": 1, "priority": numbers(ROWS)}),
        )
    ),
    *(
        (change, make, SLOTS, numbers(ROWS), MASK)
        for make in (priorities, two)
        for change in (
            lambda b, slots, value, mask: jaxbuf.update_priority(b, slots, value, mask=mask),
            lambda b, slots, value, mask: b.update_priority(slots, value).mark_used(
                slots, mask=mask
            ),
            lambda b, slots, value, mask: (b.use_count(slots), b.staleness(slots)),
        )
    ),
    (
        lambda b, slots, value: jaxbuf.set_field(b, "obs", slots, value),
        priorities,
        SLOTS,
        numbers(ROWS, 3),
    ),
    (lambda b, slots: (b.part_of(slots), b.part_slots(slots, 0)), two, SLOTS),
    *(
        (ask, priorities, THREE)
        for ask in (
            lambda b, number: (b.set_version(number), b.set_version(1, number)),
            lambda b, number: (b.can_sample(number), b.sample_range(KEY, 4, number)),
            lambda b, n: jaxbuf.importance_weights(b, b.sample(KEY, 4), n, normalize=None),
        )
    ),
    *(
        (draw, priorities, RAW_KEY)
        for draw in (
            lambda b, key: (b.sample(key, 4), b.next_batch(key, 4), b.sample_range(key, 4)),
            lambda b, key: jaxbuf.sample(b, key, 4),
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
    *(
        (look, make, *AT)
        for make in (windows, lambda: jaxbuf.Mixture.create([windows()], [1]))
        for look in (
            lambda b, slots, env, at: (b.locate(slots), b.episode_mask(slots), b.episode(slots)),
            lambda b, slots, env, at: (b.episode(env, at), b.get_field("reward", env, at)),
            lambda b, slots, env, at: b.steps_around(slots, at, "reward"),
        )
    ),
    (lambda b, env: (b.clear(env), b.episode((env, env))), windows, AT[1]),
    (lambda b, mask: b.dequeue(1, mask=mask), windows, MASK),
    (
        lambda x, n: (x.inserted(n), x.sampled(n), x.can_insert(n, n)),
        lambda: jaxbuf.RateLimiter.create(1.0, min_size=2, tolerance=4.0),
        THREE,
    ),
    (lambda x, n: (x.inserted(n), x.after(n)), jaxbuf.ThroughputLimiter.create, THREE),
    (lambda discount, w: jaxbuf.n_step(w, 2, discount), lambda: jnp.float32(0.9), WINDOW),
    (lambda n, w: jaxbuf.stack_frames(w, 2, first=n < 1), lambda: jnp.zeros(ROWS), WINDOW),
    (lambda n, w: jaxbuf.terminal_states(w, n), lambda: jnp.arange(ROWS) % 4, WINDOW),
    (lambda key, b: b.sample(key, 4), lambda: KEY, host(priorities())),
    (lambda rows, b: b.add(rows), lambda: jax.tree.map(jnp.asarray, items()), host(priorities())),
    (FLAT.add, lambda: FLAT.init(ITEM), items()),
    (
        FLAT.set_priorities,
        lambda: FLAT.add(FLAT.init(ITEM), items()),
        np.arange(4, dtype=np.int32),
        numbers(4),
    ),
]


@pytest.mark.parametrize(("door", "make", "given"), [(*case[:2], case[2:]) for case in CASES])
def test_what_was_passed_is_what_counts(door, make, given):
    check(door, make(), *given)


def test_inside_a_program():
    # What a traced function closes over is a constant, with its value at the time of the trace.
    rows = aligned(numbers(ROWS))
    buffer = jaxbuf.ItemBuffer.create(jnp.float32(0), ROWS)
    step = jax.jit(lambda b: b.add(rows)).lower(buffer)
    want = rows.copy()
    rows[:] = 0
    assert step.compile()(buffer).data.tolist() == want.tolist()

"""Items that retire: by use, by staleness, by session, wherever they lie."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbuf
from jaxbuf import testing
from jaxbuf.core.slots import Slots

KEY = jax.random.key(0)
UNIFORM = jaxbuf.Uniform()


def create(freshness, capacity=8, sampler=UNIFORM, **options):
    return jaxbuf.ItemBuffer.create(
        jnp.int32(0), capacity, sampler=sampler, freshness=freshness, **options
    )


def integers(*values):
    return jnp.array(values, jnp.int32)


@jax.jit
def live_slots(buffer):
    return buffer.occupancy.live(jnp.arange(buffer.capacity, dtype=jnp.int32))


def held(buffer):
    """The live items, sorted."""
    return sorted(np.asarray(buffer.data)[np.asarray(live_slots(buffer))].tolist())


def names(buffer, items):
    """Names of the slots in which these items lie, live or not; they must be different."""
    where = [int(np.flatnonzero(np.asarray(buffer.data) == item)[0]) for item in items]
    index = integers(*where)
    return Slots(index=index, generation=buffer.occupancy.generation(index))


mark = jax.jit(lambda buffer, slots: buffer.mark_used(slots))
advance = jax.jit(lambda buffer, version: buffer.set_version(version))
report = jax.jit(lambda buffer: buffer.metrics())
in_session = jax.jit(lambda buffer, version, session: buffer.set_version(version, session=session))


def test_the_published_counts_with_an_inclusive_limit():
    buffer = create(jaxbuf.Freshness(max_staleness=10))
    buffer = jaxbuf.add(buffer, integers(0, 1, 2), version=integers(0, 0, 5))
    assert [int(advance(buffer, version).size) for version in (9, 10, 14, 15)] == [3, 1, 1, 0]


def test_the_published_counts_with_an_exclusive_limit():
    buffer = create(jaxbuf.Freshness(max_staleness=10, comparison=">"))
    buffer = jaxbuf.add(buffer, integers(0), version=integers(0))
    assert [int(advance(buffer, version).size) for version in (9, 10, 11)] == [1, 1, 0]


def test_an_item_that_is_gone_has_no_uses():
    buffer = jaxbuf.add(create(jaxbuf.Freshness(max_use=9), 2), integers(5, 6))
    slots = names(buffer, [5, 6])
    buffer = jaxbuf.add(mark(buffer, slots), integers(7))
    buffer = mark(buffer, names(buffer, [7, 6]))
    assert buffer.use_count(slots).tolist() == [0, 2]


@pytest.mark.parametrize("replacement", [True, False])
def test_batches_until_refused_use_up_what_is_missing_and_weigh_one(replacement):
    sampler = jaxbuf.Prioritized(replacement=replacement)
    buffer = create(jaxbuf.Freshness(max_use=2), 64, sampler)
    buffer = jaxbuf.add(buffer, jnp.arange(64, dtype=jnp.int32))
    uses, batches = np.zeros(64, int), 0
    while buffer.can_sample(32):
        batch = jaxbuf.sample(buffer, jax.random.key(batches), 32)
        weights = jaxbuf.importance_weights(buffer, batch, 0.4)
        np.testing.assert_allclose(weights, np.ones(32), rtol=1e-6)
        assert bool(jnp.all(batch.valid))
        np.add.at(uses, np.asarray(batch.data), 1)
        buffer = mark(buffer, batch.slots)
        assert held(buffer) == np.flatnonzero(uses < 2).tolist()
        batches += 1
    assert buffer.metrics()["retired_used"] == 64 - int(buffer.size) == (uses >= 2).sum()
    assert batches >= 3


def test_beta_anneals_as_published_without_a_new_trace():
    optax = pytest.importorskip("optax")
    beta = optax.linear_schedule(0.4, 1.0, 100_000)
    np.testing.assert_allclose([beta(1), beta(2)], [0.400006, 0.400012], rtol=1e-6)
    buffer = create(jaxbuf.Freshness(max_use=9), 4, jaxbuf.Prioritized(alpha=1.0))
    buffer = jaxbuf.add(buffer, integers(0, 1), priority=jnp.array([1.0, 4.0]))
    batch = jaxbuf.sample(buffer, KEY, 32)
    chex.clear_trace_counter()

    @jax.jit
    @chex.assert_max_traces(n=1)
    def least_weight(beta):
        return jaxbuf.importance_weights(buffer, batch, beta).min()

    weights = [least_weight(jnp.float32(beta(step))) for step in (1, 2)]
    np.testing.assert_allclose(weights, [4**-0.400006, 4**-0.400012], rtol=1e-6)


@pytest.mark.parametrize("max_staleness", [None, 5])
def test_a_late_item_of_another_session_is_refused(max_staleness):
    """Or its version, which counts from elsewhere, would make it fresher than all others."""
    buffer = create(jaxbuf.Freshness(max_use=9, max_staleness=max_staleness), 4)
    buffer = in_session(in_session(buffer, 10, 0), 0, 1)
    late = jaxbuf.add(buffer, integers(1), version=integers(10), session=integers(0), donate=False)
    assert held(late) == []
    metrics = late.metrics()
    assert (metrics["refused_stale"], metrics["staleness_max"], metrics["adds"]) == (1, 0, 0)
    # Without sessions all are taken for the learner's, which may be behind.
    unknown = jaxbuf.add(buffer, integers(1), version=integers(10), donate=False)
    assert unknown.metrics()["staleness_max"] == -10
    buffer = jaxbuf.add(
        buffer,
        integers(2, 3, 4, 5),
        version=integers(0, 0, 2, 0),
        session=integers(1, 0, 1, 2),
        mask=jnp.array([True, True, True, False]),
    )
    assert held(buffer) == [2, 4]
    assert buffer.metrics()["refused_stale"] == 1
    # A session without versions: they are the learner's own.
    buffer = jaxbuf.add(buffer, integers(6, 7), session=integers(0, 1))
    assert held(buffer) == [2, 4, 7]
    assert buffer.staleness(names(buffer, [2, 4, 7])).tolist() == [0, -2, 0]


def test_what_is_live_tells_what_has_left():
    """Items name rows of a store; rows that no item names any more can be deleted."""
    buffer = create(jaxbuf.Freshness(max_use=1, max_staleness=3), 4)
    buffer = buffer.add(integers(1, 2, 3, 4), version=integers(1, 1, 0, 1))
    find_live = jax.jit(lambda buffer: buffer.live)
    named = {1, 2, 3, 4}
    for change, left in (
        (lambda buffer: buffer.add(integers(5)), {1}),
        (lambda buffer: buffer.mark_used(names(buffer, [3])), {3}),
        (lambda buffer: buffer.set_version(3), {5}),
        (lambda buffer: buffer.add(integers(6), version=integers(0)), {6}),
        (lambda buffer: buffer.set_version(0, session=1), {2, 4}),
    ):
        buffer = change(buffer)
        live = find_live(buffer)
        chex.assert_shape(live, (4,))
        now = set(np.asarray(buffer.data)[np.asarray(live)].tolist())
        assert (named | left) - now == left
        named = now
    assert named == set()


def chunks_of(accumulator, fragments, number, version):
    """The next fragments of the only worker."""
    worker = jnp.zeros(len(fragments), jnp.int32)
    return accumulator.add(
        integers(*fragments), worker, integers(*number), version=integers(*version)
    )


def collected(buffer, accumulator, *pairs):
    """Two fragments at a time, each chunk added as soon as it is complete."""
    for pair in pairs:
        accumulator, chunks, done = chunks_of(accumulator, *pair)
        buffer = jaxbuf.add(buffer, chunks, version=chunks.version, mask=done)
    return buffer, accumulator


def chunk_buffer(freshness):
    accumulator = jaxbuf.ChunkAccumulator.create(jnp.int32(0), 1, 2)
    buffer = jaxbuf.ItemBuffer.create(
        accumulator.example, 2, freshness=freshness, sampler=jaxbuf.Uniform(replacement=False)
    )
    return buffer, accumulator


def chunks_held(buffer):
    live = np.asarray(buffer.occupancy.live(jnp.arange(buffer.capacity, dtype=jnp.int32)))
    return sorted(np.asarray(buffer.data.fragments)[live].tolist())


def test_fetched_chunks_retire_as_published():
    """At most two chunks of two fragments, each used twice; fetch two fragments, then four."""
    pairs = [((0, 1), (0, 1), (0, 0)), ((2, 3), (2, 3), (0, 0)), ((10, 11), (0, 1), (0, 0))]
    buffer, _ = collected(*chunk_buffer(jaxbuf.Freshness(max_use=2)), *pairs)
    assert chunks_held(buffer) == [[2, 3], [10, 11]]
    for seed in range(16):
        first = jaxbuf.sample(buffer, jax.random.key(seed), 1)
        if first.data.fragments.tolist() == [[2, 3]]:
            break
    buffer = mark(buffer, first.slots)
    second = jaxbuf.sample(buffer, KEY, 2)
    assert sorted(second.data.fragments.tolist()) == [[2, 3], [10, 11]]
    buffer = mark(buffer, second.slots)
    assert chunks_held(buffer) == [[10, 11]]
    left = jaxbuf.sample(buffer, KEY, 2)
    assert left.valid.tolist() == [True, False]
    assert buffer.use_count(left.slots).tolist() == [1, 0]
    assert not bool(buffer.can_sample(2))


def test_a_chunk_is_as_stale_as_its_first_fragment():
    buffer, accumulator = chunk_buffer(jaxbuf.Freshness(max_staleness=3))
    pairs = [((0, 1), (0, 1), (4, 5)), ((2, 3), (2, 3), (5, 5)), ((4, 5), (4, 5), (2, 5))]
    buffer, _ = collected(advance(buffer, 5), accumulator, *pairs)
    assert chunks_held(buffer) == [[0, 1], [2, 3]]
    assert buffer.metrics()["refused_stale"] == 1
    assert chunks_held(advance(buffer, 7)) == [[2, 3]]


def test_holes_close_as_the_ring_comes_round():
    """Draws look for members only while there are holes, and go on being even."""
    buffer = jaxbuf.add(create(jaxbuf.Freshness(max_use=1), 4), integers(0, 1, 2, 3))
    buffer = mark(buffer, names(buffer, [1]))
    drawn = np.bincount(jaxbuf.sample(buffer, KEY, 3000).data, minlength=4)
    assert drawn[1] == 0
    assert abs(drawn[[0, 2, 3]] - 1000).max() < 120
    buffer = jaxbuf.add(buffer, integers(4, 5), mask=jnp.array([False, True]))
    assert held(buffer) == [2, 3, 5]
    buffer = jaxbuf.add(buffer, integers(6, 7))
    assert held(buffer) == [3, 5, 6, 7]
    drawn = np.bincount(jaxbuf.sample(buffer, KEY, 4000).data, minlength=8)
    assert np.flatnonzero(drawn).tolist() == held(buffer)


def test_stale_items_are_found_in_every_block():
    """More slots than are looked at together, of which any may hold an item of any version."""
    rng, slots = np.random.default_rng(0), 20_000
    buffer = create(jaxbuf.Freshness(max_staleness=10, comparison=">"), slots)
    versions, live = np.zeros(slots, np.int32), np.zeros(slots, bool)
    floor = count = retired = 0
    for learner in (40, 25, 75, 74, 110):
        added = rng.integers(floor, 120, 9_000, dtype=np.int32)
        buffer = jaxbuf.add(buffer, jnp.arange(9_000, dtype=jnp.int32), version=added)
        slot = (count + np.arange(9_000)) % slots
        versions[slot], live[slot] = added, True
        count += 9_000
        buffer, floor = advance(buffer, learner), learner - 10
        retired += int(np.sum(live & (versions < floor)))
        live &= versions >= floor
        np.testing.assert_array_equal(live_slots(buffer), live)
        assert int(report(buffer)["retired_stale"]) == retired
        testing.assert_valid(buffer)


def test_retirement_passes_over_no_array_of_all_slots():
    """In a scan in which some items retire at each turn, XLA needs no array of that size."""
    slots = 2**16
    rings = jaxbuf.TrajectoryBuffer.create(
        jnp.int32(0), 16, slots // 16, freshness=jaxbuf.Freshness(max_staleness=4)
    )
    items = create(jaxbuf.Freshness(max_staleness=4), slots, jaxbuf.Prioritized())

    def turns(buffer):
        def turn(buffer, version):
            buffer = buffer.set_version(version, session=0)
            return buffer.add(jnp.zeros(16, jnp.int32)), buffer.size

        return jax.lax.scan(turn, buffer, jnp.arange(8, dtype=jnp.int32))

    for buffer in (items, rings):
        compiled = jax.jit(turns, donate_argnums=0).lower(buffer).compile()
        assert compiled.memory_analysis().temp_size_in_bytes < slots


def test_without_limits_a_buffer_has_no_more_leaves():
    plain = jaxbuf.ItemBuffer.create(jnp.zeros(3), 4)
    assert len(jax.tree.leaves(plain)) == 5
    assert "version" not in plain.metrics()


def test_bad_use():
    plain = jaxbuf.ItemBuffer.create(jnp.int32(0), 3)
    batch = plain.sample(KEY, 2)
    for call in (
        lambda: plain.add(integers(1), version=integers(1)),
        lambda: plain.add(integers(1), session=integers(1)),
        lambda: plain.mark_used(batch.slots),
        lambda: plain.set_version(1),
        lambda: plain.use_count(batch.slots),
        lambda: plain.staleness(batch.slots),
    ):
        with pytest.raises(ValueError, match=r"freshness=jaxbuf.Freshness\(...\)"):
            call()
    buffer = create(jaxbuf.Freshness(max_use=1), 3)
    with pytest.raises(ValueError, match=r"version has shape \(1,\); expected \(2,\)"):
        buffer.add(integers(1, 2), version=integers(1))
    with pytest.raises(ValueError, match="version has dtype float32; expected int32"):
        buffer.set_version(jnp.float32(1))
    with pytest.raises(ValueError, match="max_staleness is -1; expected an integer of at least 0"):
        jaxbuf.Freshness(max_staleness=-1, comparison=">")
    assert jaxbuf.Freshness(np.int32(3)) == jaxbuf.Freshness(3)


def test_a_sampler_that_cannot_let_go_is_refused():
    class Stubborn(jaxbuf.Prioritized):
        on_change = jaxbuf.strategies.Sampler.on_change

    with pytest.raises(ValueError, match="cannot be told that an item retires; give it a method"):
        create(jaxbuf.Freshness(max_use=1), 3, Stubborn())
    with pytest.raises(ValueError, match="cannot be told that a window is gone"):
        jaxbuf.TrajectoryBuffer.create(jnp.int32(0), 2, 8, sampler=Stubborn())


@pytest.mark.parametrize("comparison", [">", ">="])
@pytest.mark.parametrize("learner", [-(2**31), -(2**31) + 1, -(2**31) + 5])
@pytest.mark.parametrize("session", [None, 3])
def test_the_least_versions_are_not_stale(learner, comparison, session):
    freshness = jaxbuf.Freshness(max_staleness=10, comparison=comparison)
    buffer = jaxbuf.ItemBuffer.create(jnp.float32(0), 8, freshness=freshness)
    buffer = buffer.set_version(learner, session)
    given = {} if session is None else {"session": jnp.full(2, session)}
    buffer = buffer.add(jnp.ones(2), version=jnp.full(2, learner, jnp.int32), **given)
    assert int(buffer.size) == 2
    assert int(buffer.metrics()["refused_stale"]) == 0
    assert int(buffer.set_version(learner + 5, session).size) == 2
    assert int(buffer.set_version(learner + 20, session).size) == 0
    if session is not None:
        assert int(buffer.set_version(learner, session + 1).size) == 0

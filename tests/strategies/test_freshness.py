"""Items and windows that retire: by use, by staleness, by session, wherever they lie."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbuf
from jaxbuf import testing
from jaxbuf.core.slots import Slots
from tests.operations import quick

KEY = jax.random.key(0)
UNIFORM = jaxbuf.Uniform()


def create(freshness, capacity=8, sampler=UNIFORM, **options):
    return jaxbuf.ItemBuffer.create(
        jnp.int32(0), capacity, sampler=sampler, freshness=freshness, **options
    )


def rings(freshness, length=8, num_envs=2, example=None, sequence_length=2, **options):
    return jaxbuf.TrajectoryBuffer.create(
        jnp.int32(0) if example is None else example,
        num_envs,
        length,
        sequence_length=sequence_length,
        freshness=freshness,
        **options,
    )


def integers(*values):
    return jnp.array(values, jnp.int32)


def held(buffer):
    """The live items, sorted."""
    return sorted(np.asarray(buffer.data)[np.asarray(buffer.live)].tolist())


def names(buffer, items):
    """Names of the slots in which these items lie, live or not; they must be different."""
    data = np.asarray(buffer.data)
    index = integers(*(np.flatnonzero(data == item)[0] for item in items))
    return Slots(index=index, generation=buffer.occupancy.generation(index))


mark = jax.jit(lambda buffer, slots: buffer.mark_used(slots))
advance = jax.jit(lambda buffer, version: buffer.set_version(version))
in_session = jax.jit(lambda buffer, version, session: buffer.set_version(version, session=session))


@pytest.mark.parametrize(("comparison", "sizes"), [(">=", [3, 1, 1, 1, 0]), (">", [3, 3, 1, 1, 1])])
def test_the_published_counts(comparison, sizes):
    buffer = create(jaxbuf.Freshness(max_staleness=10, comparison=comparison))
    buffer = jaxbuf.add(buffer, integers(0, 1, 2), version=integers(0, 0, 5))
    assert [int(advance(buffer, version).size) for version in (9, 10, 11, 14, 15)] == sizes


def test_an_item_that_is_gone_has_no_uses():
    buffer = jaxbuf.add(create(jaxbuf.Freshness(max_use=9), 2), integers(5, 6))
    slots = names(buffer, [5, 6])
    buffer = jaxbuf.add(mark(buffer, slots), integers(7))
    buffer = mark(buffer, names(buffer, [7, 6]))
    assert buffer.use_count(slots).tolist() == [0, 2]


def test_clear_keeps_the_version_of_the_learner_and_the_counts():
    buffer = jaxbuf.add(create(jaxbuf.Freshness(max_use=1), 2), integers(5, 6))
    cleared = mark(advance(buffer, 3), names(buffer, [5])).clear().metrics()
    assert [int(cleared[name]) for name in ("size", "version", "retired_used")] == [0, 3, 1]


@pytest.mark.parametrize("max_staleness", quick([None, 5], {5}))
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
        np.testing.assert_array_equal(buffer.live, live)
        assert int(buffer.metrics()["retired_stale"]) == retired
        testing.assert_valid(buffer)


@pytest.mark.slow
def test_retirement_passes_over_no_array_of_all_slots():
    """In a scan in which some items retire at each turn, XLA needs no array of that size."""
    slots = 2**16
    limits = jaxbuf.Freshness(max_staleness=4)

    def turns(buffer):
        def turn(buffer, version):
            buffer = buffer.set_version(version, session=0)
            return buffer.add(jnp.zeros(16, jnp.int32)), buffer.size

        return jax.lax.scan(turn, buffer, jnp.arange(8, dtype=jnp.int32))

    windows = rings(limits, slots // 16, 16, sequence_length=1)
    for buffer in (create(limits, slots, jaxbuf.Prioritized()), windows):
        compiled = jax.jit(turns, donate_argnums=0).lower(buffer).compile()
        assert compiled.memory_analysis().temp_size_in_bytes < slots


@pytest.mark.parametrize("make", [create, rings])
def test_bad_use(make):
    plain = make(None)
    assert (plain.extra_states, "version" in plain.metrics()) == ((), False)
    slots, rows = plain.sample(KEY, 2).slots, jnp.zeros((2, 2), jnp.int32)
    rows = rows[0] if make == create else rows
    for call in (
        lambda: plain.add(rows, version=integers(1, 1)),
        lambda: plain.add(rows, session=integers(1, 1)),
        lambda: plain.mark_used(slots),
        lambda: plain.set_version(1),
        lambda: plain.use_count(slots),
        lambda: plain.staleness(slots),
    ):
        with pytest.raises(ValueError, match=r"freshness=jaxbuf.Freshness\(...\)"):
            call()
    buffer = make(jaxbuf.Freshness(max_use=1))
    with pytest.raises(ValueError, match=r"version has shape \(3,\); expected \(2,\)"):
        buffer.add(rows, version=integers(1, 1, 1))
    with pytest.raises(ValueError, match="session has dtype float32; expected int32"):
        buffer.add(rows, session=jnp.zeros(2))
    with pytest.raises(ValueError, match="version has dtype float32; expected int32"):
        buffer.set_version(jnp.float32(1))


LEAST = [
    (learner, comparison, session)
    for learner in (-(2**31), -(2**31) + 5)
    for comparison in (">", ">=")
    for session in (None, 3)
]


@pytest.mark.parametrize(("learner", "comparison", "session"), quick(LEAST, LEAST[1::5]))
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


# --- Windows


def firsts(buffer):
    """The first steps of all windows that can be drawn, sorted; steps are numbers."""
    slot = jnp.arange(buffer.rings.num_slots, dtype=jnp.int32)
    live = np.asarray(buffer.occupancy.live(slot))
    data = np.asarray(jax.tree.leaves(buffer.data)[0]).reshape(-1)
    return sorted(data[:: buffer.period][live].tolist())


def steps(start, rows, num_envs=2):
    """Numbered steps, those of environment ``e`` from ``100 * e + start`` on."""
    env = 100 * jnp.arange(num_envs, dtype=jnp.int32)[:, None]
    return env + start + jnp.arange(rows, dtype=jnp.int32)[None]


@pytest.mark.slow
def test_a_saved_buffer_fits_rings_of_another_length(tmp_path):
    freshness = jaxbuf.Freshness(max_use=4, max_staleness=5)
    buffer = rings(freshness, sequence_length=3)
    for version in range(4):
        buffer = jaxbuf.add(advance(buffer, version), steps(3 * version, 3))
    slots = jaxbuf.sample(buffer, KEY, 3).slots
    jaxbuf.save(tmp_path / "buffer", mark(buffer, slots))
    like = rings(freshness, 4, sequence_length=3)
    loaded = jaxbuf.load(tmp_path / "buffer", like=like, resize=True)
    assert firsts(loaded) == [8, 9, 108, 109]
    # A window that was not complete yet has the version of its first step.
    loaded = jaxbuf.add(advance(loaded, 7), steps(12, 1))
    assert firsts(loaded) == [9, 10, 109, 110]
    assert int(loaded.metrics()["refused_stale"]) == 0
    assert firsts(advance(loaded, 8)) == []


def test_windows_that_retired_are_completed_again_by_other_steps():
    example = {"t": jnp.int32(0), "terminated": jnp.bool_(False)}
    limits = jaxbuf.Freshness(max_use=2, max_staleness=3)
    episodes = jaxbuf.Episodes()
    buffer = rings(limits, 8, 1, example, sequence_length=3, episodes=episodes)
    ends = jnp.array([[False, True, False, False]])
    rows = {"t": steps(0, 4, num_envs=1), "terminated": ends}
    buffer = jaxbuf.add(buffer, rows, version=jnp.array([[0, 2, 2, 2]], jnp.int32))
    # The window from step 0 becomes too stale, and the one from step 1 is used twice.
    buffer = advance(buffer, 3)
    slots = buffer.latest(1).slots
    buffer = mark(mark(buffer, slots), slots)
    assert int(buffer.num_windows) == 0
    buffer = buffer.drop_newest_episode()
    rows = {"t": steps(4, 2, num_envs=1), "terminated": jnp.zeros((1, 2), bool)}
    buffer = jaxbuf.add(buffer, rows)
    testing.assert_valid(buffer)
    # The first step of the one is as old as before; nobody has used the other with these steps.
    batch = buffer.latest(2)
    assert batch.data["t"][batch.valid].tolist() == [[1, 4, 5]]
    assert int(buffer.metrics()["refused_stale"]) == 1
    assert buffer.use_count(batch.slots).tolist() == [0, 0]
    assert buffer.staleness(batch.slots).tolist() == [1, 0]

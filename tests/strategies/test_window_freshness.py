"""Windows of steps that retire: by use, by staleness, by session."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbuf
from jaxbuf import testing

KEY = jax.random.key(0)


def create(freshness, length=8, num_envs=2, sequence_length=2, example=None, **options):
    return jaxbuf.TrajectoryBuffer.create(
        jnp.int32(0) if example is None else example,
        num_envs,
        length,
        sequence_length=sequence_length,
        freshness=freshness,
        **options,
    )


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


advance = jax.jit(lambda buffer, version: buffer.set_version(version))
mark = jax.jit(lambda buffer, slots: buffer.mark_used(slots))


@pytest.mark.parametrize("length", [4, 200])
def test_a_saved_buffer_fits_rings_of_another_length(tmp_path, length):
    freshness = jaxbuf.Freshness(max_use=4, max_staleness=5)
    buffer = create(freshness, sequence_length=3)
    for version in range(4):
        buffer = jaxbuf.add(advance(buffer, version), steps(3 * version, 3))
    slots = jaxbuf.sample(buffer, KEY, 3).slots
    jaxbuf.save(tmp_path / "buffer", mark(buffer, slots))
    like = create(freshness, length, sequence_length=3)
    loaded = jaxbuf.load(tmp_path / "buffer", like=like, resize=True)
    kept = range(12 - min(length, 8), 12)
    assert firsts(loaded) == [env + step for env in (0, 100) for step in kept[:-2]]
    # A window that was not complete yet has the version of its first step.
    loaded = jaxbuf.add(advance(loaded, 7), steps(12, 1))
    assert firsts(loaded) == [env + step for env in (0, 100) for step in (9, 10) if step in kept]
    assert int(loaded.metrics()["refused_stale"]) == 0
    assert firsts(advance(loaded, 8)) == []


def test_windows_that_retired_are_completed_again_by_other_steps():
    example = {"t": jnp.int32(0), "terminated": jnp.bool_(False)}
    limits = jaxbuf.Freshness(max_use=2, max_staleness=3)
    episodes = jaxbuf.Episodes()
    buffer = create(limits, num_envs=1, sequence_length=3, example=example, episodes=episodes)
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


def test_bad_use():
    plain = create(None)
    slots = plain.sample(KEY, 2).slots
    for call in (
        lambda: plain.add(steps(0, 1), version=jnp.zeros((2, 1), jnp.int32)),
        lambda: plain.add(steps(0, 1), session=jnp.zeros(2, jnp.int32)),
        lambda: plain.mark_used(slots),
        lambda: plain.set_version(1),
    ):
        with pytest.raises(ValueError, match=r"freshness=jaxbuf.Freshness\(...\)"):
            call()
    buffer = create(jaxbuf.Freshness(max_use=1))
    with pytest.raises(ValueError, match=r"version has shape \(3,\); expected \(2,\)"):
        buffer.add(steps(0, 2), version=jnp.zeros(3, jnp.int32))
    with pytest.raises(ValueError, match="session has dtype float32; expected int32"):
        buffer.add(steps(0, 2), session=jnp.zeros(2))
    assert plain.extra_states == ()

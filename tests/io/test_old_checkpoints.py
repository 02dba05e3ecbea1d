"""Checkpoints that version 0.2.0 wrote are loaded, and go on as they did there."""

import json
import shutil

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbuf
from jaxbuf import testing
from jaxbuf.core.segment_tree import WIDE, using_width
from tests.programs import old_buffers
from tests.programs.old_buffers import CREATE, FOLDER, items, rings

AVOID = jaxbuf.Episodes(boundary="avoid")
NEVER = jaxbuf.Episodes(boundary="avoid", short_windows="never")
FRESH = jaxbuf.Freshness(max_use=3, max_staleness=4)
# All windows had the same length then.
LIKE = {
    **CREATE,
    "whole_windows": lambda: rings(episodes=NEVER, sampler=jaxbuf.Prioritized()),
    "fresh_episodes": lambda: rings(episodes=NEVER, freshness=FRESH, sampler=jaxbuf.Prioritized()),
}


def load(name, tmp_path, like, **options):
    # Loading makes a lock beside it.
    folder = shutil.copytree(FOLDER / name, tmp_path / name)
    return jaxbuf.load(folder, like, **options)


def assert_close(have, want):
    if "metrics" in want:
        # There are more of them now.
        have = have | {"metrics": {name: have["metrics"][name] for name in want["metrics"]}}
    # The sum of priorities is as exact as the program that computes it.
    chex.assert_trees_all_close(have, want, rtol=1e-6, atol=0)


QUICK = ("prioritized", "softmax_lowest", "fresh", "episodes", "mixture")


@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CREATE],
)
def test_it_is_loaded_and_goes_on(name, tmp_path):
    buffer = load(name, tmp_path, LIKE[name]())
    testing.assert_valid(buffer)
    before = json.loads((FOLDER / name / "seen.json").read_text())
    assert_close(old_buffers.seen(name, buffer), before["saved"])
    assert_close(old_buffers.seen(name, old_buffers.more(name, buffer)), before["more"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["prioritized", "sharded", "softmax_lowest"])
def test_it_is_loaded_for_an_accelerator(name, tmp_path):
    with using_width(WIDE):
        test_it_is_loaded_and_goes_on(name, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["unlike", "unlike_floats", "unlike_norm_0", "seeds"])
def test_what_is_unlike_is_compared_as_now(name, tmp_path):
    """After the load each item is compared with what was saved, as if it had been added now."""
    like = CREATE[name]()
    buffer = load(name, tmp_path, jax.eval_shape(CREATE[name]))
    anew = old_buffers.fill(name, like)
    chex.assert_trees_all_equal(buffer, anew)
    assert jax.tree.map(jnp.result_type, buffer) == jax.tree.map(jnp.result_type, anew)
    if name != "seeds":
        larger = jaxbuf.ItemBuffer.create(old_buffers.ITEM, 9, diversity=like.diversity)
        moved = load(name, tmp_path / "again", larger, resize=True)
        testing.assert_valid(moved)
        again = moved.add(items(13, 14), score=jnp.ones(2))
        assert int(again.size) == int(moved.size) + 1


def windows_of(buffer):
    """The first step of each window that can be drawn, and which of its steps are its own."""
    slot = jnp.arange(buffer.rings.num_slots, dtype=jnp.int32)
    live = np.asarray(buffer.occupancy.live(slot))
    slots = jaxbuf.Slots(slot, buffer.occupancy.generation(slot))
    first = np.asarray(buffer.data["id"]).reshape(-1)[np.asarray(buffer.rings.rows_of(slot))[:, 0]]
    count = np.asarray(buffer.episode_mask(slots)).sum(axis=1)
    return set(zip(first[live].tolist(), count[live].tolist(), strict=True))


def test_windows_that_end_with_their_episode_are_added(tmp_path):
    like = rings(episodes=AVOID, sampler=jaxbuf.Prioritized())
    buffer = load("whole_windows", tmp_path, like)
    testing.assert_valid(buffer)
    assert windows_of(buffer) == windows_of(old_buffers.fill("rings", like))
    assert {count for _, count in windows_of(buffer)} == {1, 2, 3}
    # They have the priority of a new window.
    old = load("whole_windows", tmp_path / "old", LIKE["whole_windows"]())
    mass, before = (np.asarray(b.sampler_state.leaves) for b in (buffer, old))
    new = (mass > 0) & (before == 0)
    assert new.sum() == len(windows_of(buffer)) - len(windows_of(old)) > 0
    np.testing.assert_allclose(mass[new], before.max())
    np.testing.assert_array_equal(mass[~new], before[~new])


@pytest.mark.slow
def test_windows_that_are_too_stale_are_not_added(tmp_path):
    sampler = jaxbuf.Prioritized()
    buffer = load(
        "fresh_episodes", tmp_path, rings(episodes=AVOID, freshness=FRESH, sampler=sampler)
    )
    testing.assert_valid(buffer)
    old = load("fresh_episodes", tmp_path / "old", LIKE["fresh_episodes"]())
    added = windows_of(buffer) - windows_of(old)
    assert windows_of(old) < windows_of(buffer)
    # Steps of the other environment have numbers below 100.
    assert {first >= 100 for first, _ in windows_of(buffer)} == {True}
    assert {count for _, count in added} == {1, 2}
    longer = rings(20, episodes=AVOID, freshness=FRESH, sampler=sampler)
    moved = load("fresh_episodes", tmp_path / "moved", longer, resize=True)
    testing.assert_valid(moved)
    assert windows_of(moved) == windows_of(buffer)


def test_other_windows_are_refused_as_before(tmp_path):
    like = rings(episodes=jaxbuf.Episodes(boundary="avoid", period=2), sampler=jaxbuf.Prioritized())
    with pytest.raises(ValueError, match="period is 2, but the checkpoint has 1"):
        load("whole_windows", tmp_path, like)


def test_an_accumulator_may_return_another_number_at_a_time(tmp_path):
    """Before 0.4.0 the default was a number, which is part of the configuration."""
    step = {"obs": jnp.int32(0), "terminated": jnp.bool_(False)}
    for kind, example in ((jaxbuf.EpisodeAccumulator, step), (jaxbuf.ChunkAccumulator, step)):
        saved = kind.create(example, 3, 4, per_add=3)
        like = kind.create(example, 3, 4)
        jaxbuf.save(tmp_path / kind.__name__, {"of": saved})
        loaded = jaxbuf.load(tmp_path / kind.__name__, {"of": like})
        chex.assert_trees_all_equal(loaded["of"], like)

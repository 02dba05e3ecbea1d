"""Changes of stored items through the buffers that hold other buffers."""

import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbuf
from jaxbuf import testing
from jaxbuf.core.slots import Slots
from tests.wrappers.test_operations import DECLARED, LACKS, OF_ITEMS, WRAPPERS, arguments

KEY = jax.random.key(0)
REMOVABLE = (jaxbuf.Removable(),)
NAN = float("nan")
STEP = {"number": jnp.int32(0), "reward": jnp.float32(0), "terminated": jnp.bool_(False)}
PAIR = jax.tree.map(lambda leaf: jnp.stack([leaf] * 2), STEP)


def numbered(numbers):
    numbers = jnp.asarray(numbers, jnp.int32)
    reward = numbers.astype(jnp.float32)
    return {"number": numbers, "reward": reward, "terminated": numbers % 5 == 4}


def pairs(numbers):
    """Items of two steps each."""
    return numbered(np.asarray(numbers)[:, None] + np.array([0, 50]))


def windows(first, num_envs=2, rows=6, **options):
    options = {"episodes": jaxbuf.Episodes(), "parts": REMOVABLE} | options
    buffer = jaxbuf.TrajectoryBuffer.create(STEP, num_envs, 8, sequence_length=2, **options)
    start = first + 100 * np.arange(num_envs)[:, None]
    return buffer.add(numbered(start + np.arange(rows)[None]))


def scored(first, count=4):
    options = {"sampler": jaxbuf.Softmax(), "evictor": jaxbuf.Lowest(), "parts": REMOVABLE}
    buffer = jaxbuf.ItemBuffer.create(PAIR, 6, **options)
    return buffer.add(pairs(first + np.arange(count)), score=jnp.arange(count, dtype=jnp.float32))


def plain(first):
    return jaxbuf.ItemBuffer.create(PAIR, 5).add(pairs(first + np.arange(3)))


def flat():
    return jaxbuf.Mixture.create([windows(1000), scored(2000), plain(3000)], [2, 1, 1])


def nested():
    inner = jaxbuf.Mixture.create([scored(2000), plain(3000)], [1, 1])
    return jaxbuf.Mixture.create([windows(1000), inner], [1, 1])


def parts_of(mixture):
    """The buffers that are not mixtures themselves, in order."""
    for part in mixture.parts:
        yield from parts_of(part) if isinstance(part, jaxbuf.Mixture) else [part]


def drawn(make, rows=24):
    mixture = make()
    return mixture, mixture.sample(KEY, rows)


def doubled(items):
    return 2.0 * items["reward"]


@pytest.mark.parametrize("make", [flat, nested])
def test_what_is_not_there_is_not_got(make):
    mixture, batch = drawn(make)
    nowhere = jaxbuf.Slots(jnp.array([mixture.capacity, -1]), jnp.array([1, 1], jnp.uint32))
    found = mixture.get(nowhere)
    assert (found.valid.tolist(), found.probability.tolist()) == ([False] * 2, [0.0] * 2)
    again = mixture.get(batch.slots)
    np.testing.assert_allclose(again.probability, batch.probability, rtol=1e-5)
    chex.assert_trees_all_equal(again.data, batch.data)
    assert found.slots.index.tolist() == [mixture.capacity] * 2
    changed = mixture.map_field("reward", doubled, batch_size=4)
    again = changed.get(batch.slots).data["reward"]
    assert again.tolist() == (2 * batch.data["reward"]).tolist()
    for path, value, message in (
        ("terminated", batch.data["terminated"], "path is 'terminated', but episodes knows"),
        ("reward", jnp.zeros((3, 2)), r"value has shape \(3, 2\); expected \(24, 2\)"),
    ):
        with pytest.raises(ValueError, match=message):
            mixture.set_field(path, batch.slots, value)


@pytest.mark.parametrize("make", [flat, nested])
def test_items_are_inserted_scored_and_removed(make):
    mixture, batch = drawn(make)
    new, score = pairs([7, 8, 9]), jnp.array([5.0, NAN, 6.0])
    with pytest.raises(ValueError, match="part is None; expected the number"):
        mixture.insert(new)
    if make is flat:
        mixture, slots = jaxbuf.insert(mixture, new, score=score, part=1)
    else:
        buffer, slots = mixture.parts[1].insert(new, score=score, part=0)
        mixture = mixture.replace_part(1, buffer)
        before = mixture.parts[0].capacity
        index = jnp.where(slots.index < buffer.capacity, slots.index + before, mixture.capacity)
        slots = slots.replace(index=index)
    assert mixture.holds(slots).tolist() == [True, False, True]
    assert int(slots.index[1]) == mixture.capacity
    found = mixture.get(slots)
    assert found.data["number"][jnp.array([0, 2]), 0].tolist() == [7, 9]

    changed = mixture.update_score(slots, jnp.array([-1.0, 0.0, 9.0]))
    [one] = [p for p in parts_of(changed) if p.sampler.uses_score]
    assert sorted(one.occupancy.inner.score[one.live].tolist()) == [-1.0, 0.0, 1.0, 2.0, 3.0, 9.0]
    gone = changed.remove(slots, mask=jnp.array([False, True, True]))
    assert gone.holds(slots).tolist() == [True, False, False]
    everything = gone.remove(batch.slots)
    held = everything.holds(batch.slots)
    # Items of the part that removes nothing stay.
    assert held.tolist() == (batch.data["number"][:, 0] >= 3000).tolist()
    testing.assert_valid(everything)


# --- over shards; `sharded_on_devices.py` does the same on eight devices

SHARDS = 2


def sharded(make, **options):
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    return jaxbuf.Sharded.create(make, mesh, "d", shards=SHARDS, **options)


def shards_of(buffer):
    return [jax.tree.map(lambda leaf, i=i: leaf[i], buffer.shards) for i in range(SHARDS)]


@pytest.mark.parametrize(
    ("sampler", "exchange"),
    [(jaxbuf.Prioritized(uniform_mix=0.1), True), (jaxbuf.Softmax(), False)],
)
def test_items_of_all_shards_are_changed(sampler, exchange):
    buffer = sharded(
        lambda: jaxbuf.ItemBuffer.create(PAIR, 6, sampler=sampler, parts=REMOVABLE),
        exchange=exchange,
    )
    given = {"score": jnp.arange(8.0)} if sampler.uses_score else {}
    mask = jnp.arange(8) != 2
    buffer, slots = jaxbuf.insert(buffer, pairs(range(8)), mask=mask, **given)
    assert slots.index.tolist() == [0, 1, 12, 2, 6, 7, 8, 9]
    assert buffer.holds(slots).tolist() == mask.tolist()
    batch = buffer.sample(KEY, 16)
    chex.assert_trees_all_close(buffer.get(batch.slots), batch, rtol=1e-5)
    # In another order than that of the shards.
    order = jnp.array([5, 0, 3, 1, 0, 7, 2, 6])
    rows = jax.tree.map(lambda leaf: leaf[order], slots)
    if not sampler.uses_score:
        with pytest.raises(ValueError, match="no part of this buffer uses scores"):
            buffer.update_score(rows, jnp.ones(8))
    else:
        score = order.astype(jnp.float32).at[0].set(NAN)
        buffer = buffer.update_score(rows, -score)
        found = [part.sampler_state.scores.leaves for part in shards_of(buffer)]
        assert found[0][:3].tolist() == [0.0, -1.0, -3.0]
        assert found[1][:4].tolist() == [4.0, 5.0, -6.0, -7.0]
    gone = buffer.remove(rows, mask=order < 4)
    metrics = gone.metrics()
    assert (int(metrics["removed"]), int(metrics["rejected"])) == (3, int(sampler.uses_score))
    mapped = gone.map_field("reward", doubled, batch_size=4)
    testing.assert_valid(mapped)
    got = mapped.get(slots)
    assert got.valid.tolist() == [False] * 4 + [True] * 4
    np.testing.assert_array_equal(got.data["reward"][4:], 2 * pairs(range(4, 8))["reward"])


def test_windows_of_all_shards_are_found():
    options = {"episodes": jaxbuf.Episodes(), "parts": REMOVABLE}
    buffer = sharded(
        lambda: jaxbuf.TrajectoryBuffer.create(STEP, 2, 8, sequence_length=2, **options)
    )
    buffer = buffer.add(numbered(100 * np.arange(4)[:, None] + np.arange(6)[None]))
    slots = buffer.slots_at(jnp.array([3, 0, 0, 9]), jnp.array([2, 1, 2, 0]))
    assert slots.index.tolist() == [16 + 10, 1, 2, 32]
    assert buffer.get(slots).data["number"][:3].tolist() == [[302, 303], [1, 2], [2, 3]]
    gone = buffer.remove(slots)
    assert int(gone.metrics()["removed"]) == 3
    testing.assert_valid(gone)
    with pytest.raises(ValueError, match="but episodes knows the ends of episodes"):
        buffer.set_field("terminated", slots, jnp.zeros((4, 2), bool))
    with pytest.raises(ValueError, match="insert was called, but steps of a TrajectoryBuffer"):
        buffer.insert(numbered(np.zeros((4, 1))))


def test_shards_check_what_they_are_given():
    buffer = sharded(lambda: jaxbuf.ItemBuffer.create(PAIR, 6))
    buffer, slots = buffer.insert(pairs(range(4)))
    for call, message in (
        (lambda: buffer.set_field("gain", slots, 0), "path is 'gain', but items have no such"),
        (lambda: buffer.set_field("reward", slots, jnp.ones((4, 3))), r"expected \(4, 2\)"),
        (lambda: buffer.remove(slots), "remove was called, but nothing removes items here"),
        (lambda: buffer.get(jax.tree.map(lambda x: x[:3], slots)), "slots has 3 rows, but there"),
        (lambda: buffer.slots_at(jnp.zeros(2, int), jnp.zeros(2, int)), "has no environments"),
        (lambda: buffer.end_episodes(), "end_episodes was called, but the shards know no episodes"),
        (lambda: buffer.map_field("reward", 3), "fn is 3; expected a function of items"),
        (lambda: buffer.insert(pairs(range(3))), "has 3 rows, but there are 2 shards"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


LIMITS = {"freshness": jaxbuf.Freshness(max_use=2, max_staleness=3)}
ABLE = {"sampler": jaxbuf.Prioritized(), "parts": (jaxbuf.Removable(),), **LIMITS}


def _able_items():
    return jaxbuf.ItemBuffer.create({"x": jnp.float32(0)}, 4, **ABLE)


def _able_windows():
    step = {"x": jnp.float32(0), "terminated": jnp.bool_(False)}
    episodes = jaxbuf.Episodes(boundary="mask")
    return jaxbuf.TrajectoryBuffer.create(step, 2, 4, episodes=episodes, **ABLE)


def _slots(index, generation):
    return Slots(np.zeros(index, np.int32), np.zeros(generation, np.uint32))


NO_SLOTS = {
    "without an axis": (_slots((), ()), r"has shape \(\); expected \(B,\)"),
    "two axes": (_slots((2, 2), (2, 2)), r"has shape \(2, 2\); expected \(B,\)"),
    "lengths": (_slots(4, 2), "expected integers of the same shape"),
    "floats": (Slots(np.zeros(4, np.float32), np.zeros(4, np.uint32)), "expected integers"),
    "flags": (Slots(np.zeros(4, bool), np.zeros(4, np.uint32)), "expected integers"),
    "None": (None, "expected the slots of a sample|positions is None"),
    "an array": (np.zeros(4, np.int32), "expected the slots of a sample|positions is None"),
    "a list": (
        Slots([0] * 4, [0] * 4),
        "fields are not both arrays; expected the slots of a sample",
    ),
}


@pytest.mark.parametrize("kind", WRAPPERS)
def test_what_are_no_slots_of_rows_is_refused_by_everything_that_takes_slots(kind):
    def refuse(buffer, names):
        for name in names:
            for slots, match in NO_SLOTS.values():
                args, options = arguments(name, buffer, slots)
                with pytest.raises(ValueError, match=match):
                    getattr(buffer, name)(*args, **options)

    for of_items in (False, True):
        taking = {name for name in DECLARED if DECLARED[name].slots} - LACKS.get(kind, set())
        names = sorted(taking & OF_ITEMS if of_items else taking - OF_ITEMS)
        make = WRAPPERS[kind][of_items]
        # One trace for all calls; a hosted buffer is called from Python.
        if kind == "hosted":
            refuse(make(), names)
        else:
            jax.eval_shape(lambda make=make, names=names: refuse(make(), names))


def test_a_mixture_asks_for_the_slots_of_rows():
    mixture = jaxbuf.Mixture.create([plain(0), plain(100)], [1, 1])
    for slots, match in NO_SLOTS.values():
        with pytest.raises(ValueError, match=match):
            mixture.part_of(slots)
        with pytest.raises(ValueError, match=match):
            mixture.part_slots(slots, 0)


ROWS = {"x": np.ones(4, np.float32)}
STEPS = {"x": np.ones((4, 3), np.float32), "terminated": np.zeros((4, 3), bool)}


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize(
    ("make", "items", "options", "message"),
    [
        (_able_items, ROWS, {"mask": np.ones(2, bool)}, "mask has shape (2,); expected (4,)"),
        (_able_items, ROWS, {"mask": np.ones(3, bool)}, "mask has shape (3,); expected (4,)"),
        (_able_items, ROWS, {"priority": np.ones((4, 2), np.float32)}, "expected (4,)"),
        (_able_items, ROWS, {"version": np.ones(4, np.float32)}, "version has dtype float32"),
        (_able_items, {"x": np.ones((4, 3), np.float32)}, {}, "items['x'] has shape (4, 3)"),
        (_able_windows, STEPS, {"mask": np.ones((2, 3), bool)}, "(2, 3); expected (4, 3)"),
        (_able_windows, STEPS, {"priority": np.ones(2, np.float32)}, "(2,); expected (4, 3)"),
        (
            _able_windows,
            jax.tree.map(lambda leaf: leaf[:2], STEPS),
            {},
            "has shape (2, 3); expected (4, T)",
        ),
    ],
)
def test_shapes_in_the_errors_of_an_add_are_those_of_all_shards(
    make, items, options, message, jitted
):
    def add(buffer):
        return buffer.add(items, **options)

    with pytest.raises(ValueError, match=re.escape(message)):
        (jax.jit(add) if jitted else add)(sharded(make))

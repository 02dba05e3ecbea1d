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


both = pytest.mark.parametrize("make", [flat, nested])


def parts_of(mixture):
    """The buffers that are not mixtures themselves, in order."""
    for part in mixture.parts:
        yield from parts_of(part) if isinstance(part, jaxbuf.Mixture) else [part]


def drawn(make, rows=24):
    mixture = make()
    return mixture, mixture.sample(KEY, rows)


@both
def test_a_field_is_written_in_the_part_of_each_row(make):
    mixture, batch = drawn(make)
    value = -batch.data["reward"]
    mask = batch.data["number"][:, 0] % 2 == 0
    for changed in (
        mixture.set_field("reward", batch.slots, value, mask=mask),
        jaxbuf.set_field(mixture, "reward", batch.slots, value, mask=mask, donate=False),
    ):
        after = changed.get(batch.slots)
        chex.assert_trees_all_equal(after.slots, batch.slots)
        assert after.valid.all()
        # Windows that overlap are written as well, so that only signs are compared.
        even = after.data["number"][:, 0] % 2 == 0
        number = after.data["number"].astype(jnp.float32)
        assert (after.data["reward"][even] == -number[even]).all()
        testing.assert_valid(changed)
    with pytest.raises(ValueError, match="path is 'terminated', but episodes knows the ends"):
        mixture.set_field("terminated", batch.slots, batch.data["terminated"])


@both
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


@both
def test_what_is_not_there_is_not_got(make):
    mixture, batch = drawn(make)
    nowhere = jaxbuf.Slots(jnp.array([mixture.capacity, -1]), jnp.array([1, 1], jnp.uint32))
    found = mixture.get(nowhere)
    assert (found.valid.tolist(), found.probability.tolist()) == ([False] * 2, [0.0] * 2)
    assert found.slots.index.tolist() == [mixture.capacity] * 2
    assert mixture.holds(nowhere).tolist() == [False] * 2
    again = mixture.get(batch.slots)
    np.testing.assert_allclose(again.probability, batch.probability, rtol=1e-5)
    chex.assert_trees_all_equal(again.data, batch.data)


@both
def test_a_field_of_all_parts_is_mapped(make):
    mixture, batch = drawn(make)
    changed = mixture.map_field("reward", lambda items: items["reward"] + 0.5, batch_size=4)
    again = changed.get(batch.slots).data["reward"]
    assert again.tolist() == (batch.data["reward"] + 0.5).tolist()


def test_windows_of_all_parts_are_found_and_their_episodes_end():
    mixture = jaxbuf.Mixture.create([windows(1000), plain(3000), windows(2000, 3)], [1, 1, 1])
    batch = mixture.sample(KEY, 24)
    env, position = mixture.locate(batch.slots)
    slots = mixture.slots_at(env, position)
    in_rings = env < 5
    assert (slots.index == mixture.capacity).tolist() == (~in_rings).tolist()
    for got, expected in zip(jax.tree.leaves(slots), jax.tree.leaves(batch.slots), strict=True):
        assert got[in_rings].tolist() == expected[in_rings].tolist()
    for envs in (jnp.array([1, 3, 9]), jnp.arange(5) % 2 == 1):
        ended = mixture.end_episodes(envs)
        for i in (0, 2):
            expected = mixture.parts[i].end_episodes(jnp.array([1]))
            chex.assert_trees_all_equal(ended.parts[i], expected)
    ended = mixture.end_episodes()
    chex.assert_trees_all_equal(ended.parts[2], mixture.parts[2].end_episodes())
    with pytest.raises(ValueError, match="no part knows its episodes"):
        jaxbuf.Mixture.create([plain(1), plain(2)], [1, 1]).end_episodes()


def test_a_mixture_without_such_parts_says_so():
    mixture = jaxbuf.Mixture.create([plain(1000), plain(2000)], [1, 1])
    slots = mixture.sample(KEY, 4).slots
    with pytest.raises(ValueError, match="update_score was called, but no part uses scores"):
        mixture.update_score(slots, jnp.zeros(4))
    with pytest.raises(ValueError, match="remove was called, but no part removes items"):
        mixture.remove(slots)
    with pytest.raises(ValueError, match=r"slots_at was called, but no part has environments"):
        mixture.slots_at(jnp.zeros(1, jnp.int32), jnp.zeros(1, jnp.int32))
    with pytest.raises(ValueError, match=r"value has shape \(3, 2\); expected \(4, 2\)"):
        mixture.set_field("reward", slots, jnp.zeros((3, 2)))


def test_a_mixture_changes_within_a_scan():
    mixture = flat()

    def step(mixture, key):
        batch = mixture.sample(key, 8)
        mixture = mixture.set_field("reward", batch.slots, batch.data["reward"] + 1.0)
        mixture = mixture.update_score(batch.slots, batch.data["reward"][:, 0])
        mixture = mixture.remove(batch.slots, mask=batch.probability < 0.01)
        return mixture, mixture.holds(batch.slots)

    keys = jax.random.split(KEY, 5)
    scanned, held = jax.jit(lambda m: jax.lax.scan(step, m, keys))(mixture)
    one_by_one = mixture
    for key, expected in zip(keys, held, strict=True):
        one_by_one, got = jax.jit(step)(one_by_one, key)
        assert got.tolist() == expected.tolist()
    chex.assert_trees_all_equal(scanned, one_by_one)
    testing.assert_valid(scanned)


# --- in host memory


def test_a_hosted_buffer_does_what_the_buffer_does():
    def make():
        options = {"sampler": jaxbuf.Softmax(), "evictor": jaxbuf.Lowest(), "parts": REMOVABLE}
        return jaxbuf.ItemBuffer.create(PAIR, 6, **options)

    score = jnp.arange(4.0)
    plain, slots = make().insert(pairs(range(4)), score=score)
    empty = jaxbuf.Hosted.create(make)
    hosted, told = empty.insert(pairs(range(4)), score=score)
    chex.assert_trees_all_equal(told, slots)
    with pytest.raises(ValueError, match="buffer was donated"):
        empty.insert(pairs(range(4)), score=score)
    for name, args in (
        ("set_field", ("reward", slots, -jnp.ones((4, 2)))),
        ("update_score", (slots, jnp.array([3.0, NAN, 1.0, 0.0]))),
        ("map_field", ("reward", doubled)),
        ("remove", (slots,)),
    ):
        mask = {} if name == "map_field" else {"mask": jnp.array([True, True, False, True])}
        plain = getattr(plain, name)(*args, **mask)
        kept = getattr(jaxbuf, name)(hosted, *args, **mask, donate=False)
        hosted = getattr(hosted, name)(*args, **mask)
        chex.assert_trees_all_close(hosted.buffer, plain, rtol=1e-6)
        chex.assert_trees_all_equal(kept.buffer, hosted.buffer)
        assert hosted.holds(slots).tolist() == plain.holds(slots).tolist()
        got, expected = hosted.get(slots), plain.get(slots)
        chex.assert_trees_all_close(got, expected, rtol=1e-6)
        assert got.valid.devices() == {hosted.to}
    testing.assert_valid(hosted)
    with pytest.raises(ValueError, match=r"get was called inside of jax\.jit"):
        jax.jit(lambda s: hosted.get(s))(slots)


def doubled(items):
    return 2.0 * items["reward"]


def test_hosted_windows_are_found():
    hosted = jaxbuf.Hosted.create(lambda: windows(1000))
    slots = hosted.slots_at(jnp.array([0, 1]), jnp.array([2, 9]))
    assert hosted.holds(slots).tolist() == [True, False]
    assert hosted.get(slots).data["number"][0].tolist() == [1002, 1003]
    with pytest.raises(ValueError, match="insert was called, but steps of a TrajectoryBuffer"):
        hosted.insert(numbered(np.zeros((2, 1))))
    items = jaxbuf.Hosted.create(lambda: plain(0))
    with pytest.raises(
        ValueError, match=r"slots_at was called, but an ItemBuffer has none; use a jaxbuf\.Traj"
    ):
        items.slots_at(jnp.array([0]), jnp.array([0]))


# --- between threads


def test_a_holder_changes_and_reads():
    holder = jaxbuf.Holder(scored(0))
    slots = holder.apply(lambda buffer: jaxbuf.insert(buffer, pairs([7]), score=jnp.ones(1)))
    holder.apply(
        lambda buffer: (jaxbuf.set_field(buffer, "reward", slots, -jnp.ones((1, 2))), None)
    )
    holder.apply(lambda buffer: (jaxbuf.update_score(buffer, slots, jnp.full(1, 8.0)), None))
    assert holder.read(lambda buffer: buffer.get(slots)).data["reward"].tolist() == [[-1.0, -1.0]]
    holder.apply(lambda buffer: (jaxbuf.map_field(buffer, "reward", doubled), None))
    assert holder.read(lambda buffer: buffer.get(slots)).data["reward"].tolist() == [[-2.0, -2.0]]
    holder.apply(lambda buffer: (jaxbuf.remove(buffer, slots), None))
    assert holder.read(lambda buffer: buffer.holds(slots)).tolist() == [False]


# --- over shards; `sharded_on_devices.py` does the same on eight devices

SHARDS = 2


def sharded(make, **options):
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    return jaxbuf.Sharded.create(make, mesh, "d", shards=SHARDS, **options)


def shards_of(buffer):
    return [jax.tree.map(lambda leaf, i=i: leaf[i], buffer.shards) for i in range(SHARDS)]


SHARDABLE = {
    "uniform": jaxbuf.Uniform(),
    "prioritized": jaxbuf.Prioritized(uniform_mix=0.1),
    "softmax": jaxbuf.Softmax(),
}


@pytest.mark.parametrize(
    ("name", "exchange"), [*((name, True) for name in SHARDABLE), ("softmax", False)]
)
def test_items_of_all_shards_are_changed(name, exchange):
    sampler = SHARDABLE[name]
    buffer = sharded(
        lambda: jaxbuf.ItemBuffer.create(PAIR, 6, sampler=sampler, parts=REMOVABLE),
        exchange=exchange,
    )
    scores = sampler.uses_score
    given = {"score": jnp.arange(8.0)} if scores else {}
    mask = jnp.arange(8) != 2
    buffer, slots = jaxbuf.insert(buffer, pairs(range(8)), mask=mask, **given)
    assert slots.index.tolist() == [0, 1, 12, 2, 6, 7, 8, 9]
    assert buffer.holds(slots).tolist() == mask.tolist()
    batch = buffer.sample(KEY, 16)
    again = buffer.get(batch.slots)
    chex.assert_trees_all_close(again, batch, rtol=1e-5)
    assert buffer.get(slots).valid.tolist() == mask.tolist()

    # In another order than that of the shards.
    order = jnp.array([5, 0, 3, 1, 0, 7, 2, 6])
    rows = jax.tree.map(lambda leaf: leaf[order], slots)
    value = -jnp.arange(16.0).reshape(8, 2) - 1.0
    changed = buffer.set_field("reward", rows, value, mask=order != 7)
    expected = np.array(buffer.get(slots).data["reward"])
    for row, number in enumerate(order.tolist()):
        if number not in (2, 7):
            expected[number] = value[row]
    there = np.asarray(mask)
    np.testing.assert_array_equal(changed.get(slots).data["reward"][there], expected[there])
    chex.assert_trees_all_equal(
        jaxbuf.set_field(buffer, "reward", rows, value, mask=order != 7, donate=False), changed
    )
    if scores:
        score = order.astype(jnp.float32).at[0].set(NAN)
        changed = changed.update_score(rows, -score)
        found = [part.sampler_state.scores.leaves for part in shards_of(changed)]
        assert found[0][:3].tolist() == [0.0, -1.0, -3.0]
        assert found[1][:4].tolist() == [4.0, 5.0, -6.0, -7.0]
        assert int(changed.metrics()["rejected"]) == 1
    else:
        with pytest.raises(ValueError, match="no part of this buffer uses scores"):
            changed.update_score(rows, jnp.ones(8))
    gone = changed.remove(rows, mask=order < 4)
    assert gone.holds(slots).tolist() == [False, False, False, False, True, True, True, True]
    assert int(gone.metrics()["removed"]) == 3
    mapped = gone.map_field("reward", doubled, batch_size=4)
    testing.assert_valid(mapped)
    got = mapped.get(slots)
    assert got.valid.tolist() == gone.holds(slots).tolist()
    np.testing.assert_array_equal(got.data["reward"][4:], 2 * expected[4:])
    chex.assert_trees_all_equal(jaxbuf.map_field(gone, "reward", doubled, batch_size=4), mapped)


def test_windows_of_all_shards_are_changed():
    options = {"episodes": jaxbuf.Episodes(), "parts": REMOVABLE}
    buffer = sharded(
        lambda: jaxbuf.TrajectoryBuffer.create(STEP, 2, 8, sequence_length=2, **options)
    )
    buffer = buffer.add(numbered(100 * np.arange(4)[:, None] + np.arange(6)[None]))
    env, position = jnp.array([3, 0, 0, 9]), jnp.array([2, 1, 2, 0])
    slots = buffer.slots_at(env, position)
    assert slots.index.tolist() == [16 + 10, 1, 2, 32]
    assert buffer.get(slots).data["number"][:3].tolist() == [[302, 303], [1, 2], [2, 3]]
    mask = jnp.array([[True, False], [True, True], [True, True], [True, True]])
    changed = buffer.set_field("reward", slots, -jnp.ones((4, 2)), mask=mask)
    expected = [[-1, 303], [-1, -1], [-1, -1]]
    assert changed.get(slots).data["reward"][:3].tolist() == expected
    ended = changed.end_episodes(jnp.array([3]))
    [first, second] = shards_of(ended)
    [before, after] = shards_of(changed)
    chex.assert_trees_all_equal(first, before)
    chex.assert_trees_all_equal(second, after.end_episodes(jnp.array([1])))
    chex.assert_trees_all_equal(shards_of(changed.end_episodes())[0], before.end_episodes())
    gone = changed.remove(slots)
    assert gone.holds(slots).tolist() == [False] * 4
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


def _in_shards(make):
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    return jaxbuf.Sharded.create(make, mesh, "d", shards=2)


TAKES_SLOTS = {
    "items": _able_items,
    "windows": _able_windows,
    "mixture": lambda: jaxbuf.Mixture.create([_able_items(), _able_items()], [1, 1]),
    "mixture of windows": lambda: jaxbuf.Mixture.create([_able_windows()], [1]),
    "sharded": lambda: _in_shards(_able_items),
    "sharded windows": lambda: _in_shards(_able_windows),
    "hosted": lambda: jaxbuf.Hosted.create(_able_items),
}
BY_SLOTS = {
    "update_priority": lambda buffer, slots: buffer.update_priority(slots, jnp.ones(4)),
    "set_field": lambda buffer, slots: buffer.set_field("x", slots, jnp.ones(4)),
    "remove": lambda buffer, slots: buffer.remove(slots),
    "holds": lambda buffer, slots: buffer.holds(slots),
    "get": lambda buffer, slots: buffer.get(slots),
    "mark_used": lambda buffer, slots: buffer.mark_used(slots),
    "use_count": lambda buffer, slots: buffer.use_count(slots),
    "staleness": lambda buffer, slots: buffer.staleness(slots),
    "locate": lambda buffer, slots: buffer.locate(slots),
    "episode": lambda buffer, slots: buffer.episode(slots),
    "episode_mask": lambda buffer, slots: buffer.episode_mask(slots),
    "part_of": lambda buffer, slots: buffer.part_of(slots),
    "part_slots": lambda buffer, slots: buffer.part_slots(slots, 0),
}


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


def _refuses(buffer):
    """Calls everything that takes slots with what are none."""
    for method in BY_SLOTS.keys() & set(dir(buffer)):
        for slots, match in NO_SLOTS.values():
            with pytest.raises(ValueError, match=rf"{match}|{method} was called"):
                BY_SLOTS[method](buffer, slots)


@pytest.mark.parametrize("name", TAKES_SLOTS)
def test_what_are_no_slots_of_rows_is_refused_by_everything_that_takes_slots(name):
    # One trace for all calls; a hosted buffer is called from Python.
    if name == "hosted":
        _refuses(TAKES_SLOTS[name]())
    else:
        jax.eval_shape(_refuses, TAKES_SLOTS[name]())


@pytest.mark.parametrize("method", ["use_count", "episode", "locate"])
def test_slots_without_an_axis_are_refused_from_python(method):
    with pytest.raises(ValueError, match=r"has shape \(\); expected \(B,\)"):
        BY_SLOTS[method](_able_windows(), NO_SLOTS["without an axis"][0])


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
        (jax.jit(add) if jitted else add)(_in_shards(make))

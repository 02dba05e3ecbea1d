"""Changes of stored items: their fields, their scores, and which of them stay."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbuf
from jaxbuf import testing
from jaxbuf.strategies import Part
from tests.operations import quick

KEY = jax.random.key(0)
ITEM = {"number": jnp.int32(0), "hidden": {"h": jnp.zeros(2)}, "reward": jnp.float32(0)}
NAN = float("nan")
REMOVABLE = (jaxbuf.Removable(),)
FRESH = jaxbuf.Freshness(max_use=2, max_staleness=50)


def items(numbers):
    """Items with these numbers. NumPy makes them, since JAX compiles a program for each shape."""
    numbers = np.asarray(numbers, np.int32)
    real = numbers.astype(np.float32)
    rows = {"number": numbers, "hidden": {"h": np.stack([real, -real], -1)}, "reward": real}
    return jax.device_put(rows)


def create(capacity=6, **options):
    return jaxbuf.ItemBuffer.create(ITEM, capacity, **options)


def filled(count=4, capacity=6, **options):
    """A buffer with so many items, and their slots."""
    buffer = create(capacity, **options)
    parts = (buffer.sampler, buffer.evictor, *buffer.extras)
    scored = any(part.uses_score for part in parts)
    score = {"score": jnp.asarray(np.arange(count, dtype=np.float32))} if scored else {}
    return buffer.insert(items(range(count)), **score)


def pick(slots, *rows):
    return jax.tree.map(lambda leaf: jax.device_put(np.asarray(leaf)[list(rows)]), slots)


def numbers_of(buffer):
    return sorted(np.asarray(buffer.data["number"])[np.asarray(buffer.live)].tolist())


# --- set_field of items


def test_a_nested_field_a_tree_and_whole_items_are_written():
    buffer, slots = filled()
    nested = buffer.set_field("hidden.h", pick(slots, 1), jnp.array([[7.0, 8.0]]))
    assert nested.get(slots).data["hidden"]["h"].tolist() == [[0, 0], [7, 8], [2, -2], [3, -3]]
    assert nested.get(slots).data["number"].tolist() == [0, 1, 2, 3]
    tree = buffer.set_field("hidden", pick(slots, 1), {"h": jnp.array([[7.0, 8.0]])})
    chex.assert_trees_all_equal(tree, nested)
    changed = buffer.set_field(None, pick(slots, 3), items([30]))
    assert changed.get(slots).data["number"].tolist() == [0, 1, 2, 30]
    numbers, slots = jaxbuf.ItemBuffer.create(jnp.float32(0), 4).insert(jnp.arange(3.0))
    assert numbers.set_field(None, slots, -jnp.arange(3.0)).data.tolist() == [0, -1, -2, 0]


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("gain", jnp.zeros(4), "path is 'gain', but items have no such field; there are hidden.h"),
        ("reward.T", jnp.zeros(4), "path is 'reward.T', but items have no such field"),
        (3, jnp.zeros(4), "path is 3; expected the name of a field"),
        ("reward", jnp.zeros(3), r"value has shape \(3,\); expected \(4,\)"),
        ("reward", jnp.zeros(4, jnp.int32), "value has dtype int32; expected float32"),
        ("hidden.h", jnp.zeros((4, 3)), r"value has shape \(4, 3\); expected \(4, 2\)"),
        ("hidden", {"h": jnp.zeros(4)}, r"value\['h'\] has shape \(4,\); expected \(4, 2\)"),
        ("hidden", {"g": jnp.zeros(4)}, r"value\['h'\] is missing"),
        ("reward", None, "value"),
    ],
)
def test_wrong_values_are_named(path, value, message):
    buffer, slots = filled()
    for method in (buffer.set_field, lambda *x: jaxbuf.set_field(buffer, *x, donate=False)):
        with pytest.raises(ValueError, match=message):
            method(path, slots, value)


# --- scores


def test_a_diversity_filter_keeps_no_scores():
    buffer, slots = filled(diversity=jaxbuf.Diversity(0.0, field="number"))
    changed = buffer.update_score(slots, jnp.array([1.0, NAN, 2.0, 3.0]))
    assert int(changed.metrics()["rejected"]) == 1


@pytest.mark.parametrize(
    ("sampler", "message"),
    [
        (jaxbuf.Uniform(), r"no part of this buffer uses scores; create an ItemBuffer with"),
        (jaxbuf.Prioritized(), r"no part .*, or set priorities with update_priority"),
    ],
)
def test_scores_need_a_part_that_uses_them(sampler, message):
    buffer, slots = filled(sampler=sampler)
    with pytest.raises(ValueError, match=message):
        buffer.update_score(slots, jnp.zeros(4))


def test_a_sampler_or_an_evictor_that_cannot_change_scores_is_named():
    class Mine(jaxbuf.Softmax):
        set_priority = jaxbuf.strategies.Sampler.set_priority

    buffer, slots = filled(sampler=Mine())
    with pytest.raises(ValueError, match=r"Mine.* cannot change scores; give it a method set_pri"):
        buffer.update_score(slots, jnp.zeros(4))

    class Own(type(jaxbuf.Lowest().init(4))):
        rescore = jaxbuf.strategies.ItemOccupancy.rescore

    @dataclasses.dataclass(frozen=True)
    class MyEvictor(jaxbuf.strategies.Evictor):
        uses_score = True

        def init(self, capacity):
            return Own.create(capacity)

    buffer, slots = filled(evictor=MyEvictor())
    with pytest.raises(ValueError, match="Own cannot change scores; give it a method rescore"):
        buffer.update_score(slots, jnp.zeros(4))


# --- remove


def test_the_name_of_an_item_that_has_gone_removes_nothing():
    buffer, slots = filled(4, capacity=4, parts=REMOVABLE)
    buffer = buffer.add(items([4, 5])).remove(slots)
    assert (numbers_of(buffer), int(buffer.metrics()["removed"])) == ([4, 5], 2)


def test_a_ranking_overwrites_removed_items_first():
    buffer, slots = filled(4, capacity=4, evictor=jaxbuf.Lowest(), parts=REMOVABLE)
    buffer = buffer.remove(pick(slots, 3))
    buffer = buffer.update_score(pick(slots, 3), jnp.array([99.0]))
    buffer = buffer.add(items([4]), score=jnp.array([-5.0]))
    assert numbers_of(buffer) == [0, 1, 2, 4]


def test_remove_needs_a_part_that_removes():
    buffer, slots = filled()
    with pytest.raises(ValueError, match=r"remove was called, .*parts=\(jaxbuf.Removable\(\),\)"):
        buffer.remove(slots)
    buffer, slots = filled(freshness=FRESH)
    buffer = buffer.remove(pick(slots, 0, 2))
    assert numbers_of(buffer) == [1, 3]
    testing.assert_valid(buffer)


# --- insert, holds, get


def test_get_returns_what_is_still_there():
    buffer, slots = filled(4, capacity=4, sampler=jaxbuf.Prioritized(alpha=1.0), parts=REMOVABLE)
    buffer = buffer.update_priority(slots, jnp.array([1.0, 2.0, 3.0, 4.0]))
    buffer = buffer.remove(pick(slots, 2)).add(items([4]), priority=jnp.array([2.0]))
    batch = buffer.get(pick(slots, 3, 0, 1, 2, 3))
    assert batch.valid.tolist() == [True, False, True, False, True]
    assert batch.slots.index.tolist() == [3, 4, 1, 4, 3]
    assert batch.probability.tolist() == [0.5, 0.0, 0.25, 0.0, 0.5]
    assert batch.data["number"][batch.valid].tolist() == [3, 1, 3]
    chex.assert_trees_all_equal(buffer.get(batch.slots).valid, batch.valid)


def test_the_probability_of_an_own_sampler_is_not_known():
    @dataclasses.dataclass(frozen=True)
    class First(jaxbuf.strategies.Sampler):
        def draw(self, state, key, batch_size, occupancy):
            index = jnp.arange(batch_size, dtype=jnp.int32)
            return jaxbuf.strategies.Draw(index, jnp.ones(batch_size), occupancy.live(index))

    buffer, slots = filled(sampler=First())
    batch = buffer.get(slots)
    assert (batch.valid.tolist(), batch.probability.tolist()) == ([True] * 4, [0.0] * 4)


def test_what_was_removed_stays_away_in_a_buffer_of_another_size(tmp_path):
    buffer, slots = filled(4, parts=REMOVABLE)
    jaxbuf.save(tmp_path, buffer.remove(pick(slots, 1)))
    larger = jaxbuf.load(tmp_path, like=create(9, parts=REMOVABLE), resize=True)
    assert (numbers_of(larger), int(larger.metrics()["removed"])) == ([0, 2, 3], 1)
    testing.assert_valid(larger)
    windows = rings(parts=REMOVABLE).add(steps(ramp(6)))
    windows = windows.remove(windows.slots_at(0, jnp.array([1])))
    jaxbuf.save(tmp_path, windows)
    loaded = jaxbuf.load(tmp_path, like=rings(length=12, parts=REMOVABLE), resize=True)
    assert int(loaded.num_windows) == int(windows.num_windows) == 7
    testing.assert_valid(loaded)


# --- map_field of items


@pytest.mark.parametrize("batch_size", quick([3, 100], {3}))
def test_a_field_of_all_items_is_mapped(batch_size):
    buffer, slots = filled(5, capacity=7, parts=REMOVABLE)
    buffer = buffer.remove(pick(slots, 1))
    seen = []

    def fn(batch):
        jax.debug.callback(lambda x: seen.append(x.tolist()), batch["number"])
        return batch["reward"] + 10.0 * batch["hidden"]["h"][:, 0]

    changed = buffer.map_field("reward", fn, batch_size=batch_size)
    jax.effects_barrier()
    assert changed.data["reward"].tolist() == [0.0, 1.0, 22.0, 33.0, 44.0, 0.0, 0.0]
    # What is not there is not seen.
    assert {number for batch in seen for number in batch} == {0, 2, 3, 4}
    assert {len(batch) for batch in seen} == {min(batch_size, 7)}
    testing.assert_valid(changed)
    seen.clear()
    chex.assert_trees_all_equal(create().map_field("reward", fn), create())
    jax.effects_barrier()
    assert not seen


def test_fields_of_any_dtype_are_written_and_mapped():
    item = {"key": jax.random.key(0), "small": jnp.int4(0), "flag": jnp.bool_(False)}
    buffer = jaxbuf.ItemBuffer.create(item, 5)
    keys = jax.random.split(KEY, 3)
    rows = {"key": keys, "small": jnp.array([1, 2, 3], jnp.int4), "flag": jnp.zeros(3, bool)}
    buffer, slots = buffer.insert(rows)
    order = pick(slots, 2, 0)
    buffer = buffer.set_field("key", order, keys[:2])
    buffer = buffer.set_field("small", order, jnp.array([-1, -2], jnp.int4))
    buffer = buffer.map_field("flag", lambda batch: batch["small"] < 0, batch_size=2)
    buffer = buffer.map_field("key", lambda batch: batch["key"], batch_size=2)
    data = buffer.get(slots).data
    assert (
        jax.random.key_data(data["key"]) == jax.random.key_data(keys[jnp.array([1, 1, 0])])
    ).all()
    assert data["small"].astype(int).tolist() == [-2, 2, -1]
    assert data["flag"].tolist() == [True, False, True]


def test_map_field_checks_what_fn_returns():
    buffer, _ = filled()
    for fn, message in (
        (
            lambda batch: batch["reward"][:, None],
            r"fn\(items\) has shape \(6, 1\); expected \(6,\)",
        ),
        (lambda batch: batch["number"], r"fn\(items\) has dtype int32; expected float32"),
        (lambda batch: batch, r"fn\(items\)"),
        (3, "fn is 3; expected a function of items"),
    ):
        with pytest.raises(ValueError, match=message):
            buffer.map_field("reward", fn)
    with pytest.raises(ValueError, match="path is 'gain', but items have no such field"):
        buffer.map_field("gain", lambda batch: batch["reward"])
    with pytest.raises(ValueError, match="batch_size is 0; expected an integer of at least 1"):
        buffer.map_field("reward", lambda batch: batch["reward"], batch_size=0)
    whole = buffer.map_field(None, lambda batch: jax.tree.map(lambda leaf: leaf * 2, batch))
    assert whole.data["number"].tolist() == [0, 2, 4, 6, 0, 0]


@pytest.mark.parametrize("dtype", ["uint8", "int8", "bool", "float16"])
def test_what_fn_computes_is_not_cast_to_another_kind(dtype):
    buffer = jaxbuf.ItemBuffer.create(jnp.zeros((), dtype), 4).add(jnp.zeros(3, dtype))
    for number in (-1, -0.5):

        def fn(rows, number=number):
            return jnp.where(rows.astype(bool), 1, number)  # weakly typed

        if dtype == "float16":
            assert buffer.map_field(None, fn).data.tolist() == [number] * 3 + [0]
        else:
            with pytest.raises(ValueError, match=rf"fn\(items\) has dtype .*; expected {dtype}"):
                buffer.map_field(None, fn)
    strong = buffer.map_field(None, lambda rows: (~rows.astype(bool)).astype(dtype))
    assert strong.data.tolist() == [1, 1, 1, 0]


# --- windows

STEP = {
    "number": jnp.int32(0),
    "reward": jnp.float32(0),
    "terminated": jnp.bool_(False),
    "truncated": jnp.bool_(False),
}


def steps(numbers, ends=()):
    """Steps with these numbers ``[E, T]``, of which some terminated."""
    numbers = np.asarray(numbers, np.int32)
    rows = {
        "number": numbers,
        "reward": numbers.astype(np.float32),
        "terminated": np.isin(numbers, np.asarray(ends, np.int32)),
        "truncated": np.zeros(numbers.shape, bool),
    }
    return jax.device_put(rows)


def rings(num_envs=2, length=8, sequence_length=3, **options):
    options = {"sequence_length": sequence_length} | options
    return jaxbuf.TrajectoryBuffer.create(STEP, num_envs, length, **options)


def ramp(rows, num_envs=2, start=0):
    """Numbered steps, those of environment ``e`` from ``100 * e + start`` on."""
    env = 100 * np.arange(num_envs)[:, None]
    return env + start + np.arange(rows)[None]


gather_all = jax.jit(lambda buffer: buffer.gather_all())


def rewards(buffer):
    """The rewards of the steps held, by their number."""
    held = jax.device_get(gather_all(buffer))
    numbers, values = (held.data[name][held.valid] for name in ("number", "reward"))
    return dict(zip(numbers.tolist(), values.tolist(), strict=True))


def test_slots_at_is_the_inverse_of_locate():
    buffer = rings(period=2).add(steps(ramp(11)))
    batch = buffer.sample(KEY, 32)
    chex.assert_trees_all_equal(buffer.slots_at(*buffer.locate(batch.slots)), batch.slots)
    env, position = jnp.meshgrid(jnp.arange(-1, 3), jnp.arange(0, 13), indexing="ij")
    slots = buffer.slots_at(env, position)
    assert slots.index.shape == (4, 13)
    flat = jax.tree.map(lambda leaf: leaf.reshape(-1), slots)
    found = buffer.get(flat)
    # Steps 3 to 10 are held, of which even ones start a window.
    inside = (env >= 0) & (env < 2) & (position >= 3) & (position <= 8) & (position % 2 == 0)
    assert found.valid.tolist() == inside.reshape(-1).tolist()
    assert (flat.index == buffer.capacity).tolist() == (~found.valid).tolist()
    expected = (100 * env + position).reshape(-1)[found.valid]
    assert found.data["number"][found.valid][:, 0].tolist() == expected.tolist()
    one = jax.tree.map(lambda leaf: leaf[2, 4], slots)
    chex.assert_trees_all_equal(buffer.slots_at(1, 4), one)
    with pytest.raises(ValueError, match="expected shapes that broadcast"):
        buffer.slots_at(jnp.arange(2), jnp.arange(3))


AVOID = jaxbuf.Episodes(boundary="avoid", short_windows="ended")


def test_steps_have_no_slots_and_no_scores():
    buffer = rings().add(steps(ramp(6)))
    for insert in (buffer.insert, lambda rows: jaxbuf.insert(buffer, rows, donate=False)):
        with pytest.raises(ValueError, match=r"use add, and slots_at\(env_ids, positions\)"):
            insert(steps(ramp(1)))
    slots = buffer.slots_at(0, jnp.arange(2))
    with pytest.raises(ValueError, match="no part of this buffer uses scores"):
        buffer.update_score(slots, jnp.zeros(2))
    # Episodes that take windows out let nobody else do so.
    for one in (buffer, rings(episodes=AVOID)):
        with pytest.raises(ValueError, match="remove was called, but nothing removes items here"):
            one.remove(slots)
    for value, mask, message in (
        (jnp.zeros((2, 4)), None, r"value has shape \(2, 4\); expected \(2, 3\)"),
        (jnp.zeros(2), None, r"value has shape \(2,\); expected \(2, 3\)"),
        (jnp.zeros((2, 3)), jnp.ones((2, 2), bool), r"mask has shape \(2, 2\); expected \(2, 3\)"),
        (jnp.zeros((2, 3)), jnp.ones(3, bool), r"mask has shape \(3,\); expected \(2,\)"),
    ):
        with pytest.raises(ValueError, match=message):
            buffer.set_field("reward", slots, value, mask=mask)


@pytest.mark.parametrize("batch_size", quick([5, 100], {5}))
def test_a_field_of_all_steps_is_mapped(batch_size):
    buffer = rings(parts=REMOVABLE, freshness=FRESH).add(steps(ramp(11)))
    buffer = buffer.add(steps(ramp(2, 1, 50)), env_ids=jnp.array([1]))
    buffer = buffer.remove(buffer.slots_at(0, jnp.array([3])))
    seen = []

    def fn(batch):
        jax.debug.callback(lambda x: seen.append(x.tolist()), batch["number"])
        return 2.0 * batch["reward"]

    changed = buffer.map_field("reward", fn, batch_size=batch_size)
    jax.effects_barrier()
    assert rewards(changed) == {key: 2 * value for key, value in rewards(buffer).items()}
    assert {number for batch in seen for number in batch} == set(rewards(buffer))
    few = rings().add(steps(ramp(2)))
    changed = few.map_field("reward", lambda batch: batch["reward"] + 1.0, batch_size=batch_size)
    assert changed.data["reward"][:8].tolist() == [1.0, 2.0, 0, 0, 0, 0, 0, 0]


# --- parts that follow


@pytest.mark.parametrize(
    "field",
    [
        "reward",
        pytest.param(("number", "reward"), marks=pytest.mark.slow),
        pytest.param(lambda item: item["reward"], marks=pytest.mark.slow),
        None,
    ],
)
def test_a_diversity_filter_compares_with_the_new_value(field):
    diversity = jaxbuf.Diversity(0.0, field=field)
    buffer, slots = filled(diversity=diversity)
    new = {**items([9]), "number": jnp.array([1], jnp.int32), "hidden": {"h": jnp.zeros((1, 2))}}
    changed = buffer.set_field("reward", pick(slots, 1, 1), jnp.array([5.0, 9.0]))
    changed = changed.set_field("hidden.h", pick(slots, 1), jnp.zeros((1, 2)))
    testing.assert_valid(changed)
    added = changed.add(new, score=jnp.zeros(1))
    assert int(added.metrics()["refused_near_buffer"]) == 1
    old = {**items([1]), "hidden": {"h": jnp.zeros((1, 2))}}
    assert int(changed.add(old, score=jnp.zeros(1)).metrics()["refused_near_buffer"]) == 0
    mapped = buffer.map_field("reward", lambda batch: batch["reward"] + 8.0, batch_size=3)
    mapped = mapped.map_field("hidden.h", lambda batch: jnp.zeros_like(batch["hidden"]["h"]))
    testing.assert_valid(mapped)
    assert int(mapped.add(new, score=jnp.zeros(1)).metrics()["refused_near_buffer"]) == 1


RETURNS = jaxbuf.Episodes(record_return=True, discount=0.5, default_return=-9.0)


@pytest.mark.parametrize("path", ["terminated", "truncated", None])
def test_flags_of_episodes_cannot_be_changed(path):
    buffer = rings(episodes=jaxbuf.Episodes()).add(steps(ramp(6)))
    slots = buffer.slots_at(0, jnp.arange(2))
    value = buffer.get(slots).data if path is None else jnp.zeros((2, 3), bool)
    with pytest.raises(
        ValueError, match=f"path is {path!r}, but episodes knows the ends .* end_ep"
    ):
        buffer.set_field(path, slots, value)
    with pytest.raises(ValueError, match=f"path is {path!r}, but episodes knows the ends"):
        buffer.map_field(path, lambda batch: batch[path])
    last = rings(episodes=jaxbuf.Episodes(terminated="truncated", last="terminated"))
    with pytest.raises(ValueError, match="from 'terminated'"):
        last.set_field("terminated", slots, jnp.zeros((2, 3), bool))


def test_single_rewards_of_recorded_returns_cannot_be_changed():
    buffer, free = rings(episodes=RETURNS), rings(episodes=jaxbuf.Episodes())
    slots = buffer.slots_at(0, jnp.arange(2))
    with pytest.raises(ValueError, match=r"path is 'reward'.*with map_field, which records"):
        buffer.set_field("reward", slots, jnp.zeros((2, 3)))
    buffer.set_field("number", slots, jnp.zeros((2, 3), jnp.int32))
    free.set_field("reward", slots, jnp.zeros((2, 3)))


@dataclasses.dataclass(frozen=True)
class Follows(Part):
    """Keeps a field of each slot, as it is told, and the last score."""

    of_windows = True
    uses_score: bool = False
    field: str = "reward"

    def init(self, data, slots):
        return {"field": jnp.zeros(slots, data[self.field].dtype), "score": jnp.zeros(slots)}

    def note(self, state, index, rows):
        field = state["field"].at[index].set(rows.items[self.field], mode="drop")
        return {**state, "field": field}

    def on_add(self, state, index, rows):
        return self.note(state, index, rows)

    def on_write(self, state, index, rows, path):
        if path == "hidden":
            raise ValueError("hidden is mine")
        assert path in (self.field, "number")
        return self.note(state, index, rows)

    def on_score(self, state, index, score):
        return {**state, "score": state["score"].at[index].set(score, mode="drop")}


def test_a_part_follows_items():
    buffer, slots = filled(parts=(Follows(uses_score=True),))
    buffer = buffer.set_field("reward", pick(slots, 0, 0, 2), jnp.array([7.0, 8.0, 9.0]))
    buffer = buffer.set_field("number", pick(slots, 3), jnp.array([30]))
    buffer = buffer.update_score(pick(slots, 1, 1, 2), jnp.array([4.0, 5.0, NAN]))
    [state] = buffer.extra_states
    assert state["field"].tolist() == [8.0, 1.0, 9.0, 3.0, 0.0, 0.0]
    assert state["score"].tolist() == [0.0, 5.0, 0.0, 0.0, 0.0, 0.0]
    [state] = buffer.map_field("reward", lambda batch: -batch["reward"], batch_size=4).extra_states
    assert state["field"].tolist() == [-8.0, -1.0, -9.0, -3.0, 0.0, 0.0]
    with pytest.raises(ValueError, match="hidden is mine"):
        buffer.map_field("hidden", lambda batch: batch["hidden"])


def test_a_part_follows_steps():
    buffer = rings(1, 6, period=2, parts=(Follows(),)).add(steps(ramp(6, 1)))
    slots = buffer.slots_at(0, jnp.array([0, 2]))
    buffer = buffer.set_field("reward", slots, -jnp.arange(1.0, 7.0).reshape(2, 3))
    assert buffer.extra_states[0]["field"].tolist() == [-1.0, -4.0, -6.0]
    buffer = buffer.map_field("reward", lambda batch: 2.0 * batch["reward"], batch_size=4)
    assert buffer.extra_states[0]["field"].tolist() == [-2.0, -8.0, -12.0]


@pytest.mark.parametrize("boundary", ["cross", "avoid"])
def test_a_part_follows_episodes_that_are_ended(boundary):
    episodes, parts = jaxbuf.Episodes(boundary=boundary), (Follows(field="truncated"),)
    buffer = rings(2, 6, period=2, episodes=episodes, parts=parts)
    ended = buffer.add(steps(ramp(5), ends=[104])).end_episodes()
    assert ended.extra_states[1]["field"].tolist() == [False, False, True, False, False, False]
    assert ended.data["truncated"][4::6].tolist() == [True, False]


# --- gradients


def test_gradients_flow_through_items_alone():
    buffer, slots = filled(4, capacity=4, sampler=jaxbuf.Softmax(), parts=REMOVABLE)
    gone = buffer.remove(pick(slots, 3))

    def loss(value):
        changed = gone.set_field("reward", pick(slots, 0, 1, 1, 3), value)
        changed = changed.update_score(slots, 3.0 * value)
        changed = changed.map_field("reward", lambda batch: value[0] * batch["reward"] ** 2)
        return jnp.sum(changed.get(slots).data["reward"] * jnp.array([1.0, 10.0, 100.0, 0.0]))

    # value[0] * (value[0] ** 2 + 10 * value[2] ** 2 + 100 * 2 ** 2)
    value = jnp.array([2.0, 3.0, 5.0, 7.0])
    total, slope = jax.jit(jax.value_and_grad(loss))(value)
    assert total == 2 * (4 + 250 + 400)
    assert slope.tolist() == [3 * 4 + 250 + 400, 0.0, 2 * 2 * 10 * 5, 0.0]


@jax.jit
def log_of_all(buffer, slots):
    """The gradient of the sum of logarithms of all rewards, times a number."""

    def loss(scale):
        mapped = buffer.map_field("reward", lambda x: jnp.log(scale * x["reward"]), batch_size=3)
        batch = mapped.get(slots)
        return jnp.sum(jnp.where(batch.valid, batch.data["reward"], 0.0))

    return jax.grad(loss)(2.0)


@pytest.mark.parametrize(("capacity", "kept"), [(11, range(9)), (9, [0, 8]), (9, [])])
def test_slots_without_an_item_give_no_gradient_that_is_not_a_number(capacity, kept):
    buffer, slots = filled(9, capacity=capacity, parts=REMOVABLE)
    stays = jnp.zeros(9, bool).at[jnp.array(kept, int)].set(True)
    # What was removed is still stored, as a zero.
    buffer = buffer.set_field("reward", slots, stays.astype(jnp.float32))
    buffer = buffer.remove(slots, mask=~stays)
    assert log_of_all(buffer, slots) == len(kept) / 2

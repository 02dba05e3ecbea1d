"""Changes of stored items: their fields, their scores, and which of them stay."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbuf
from jaxbuf import testing

KEY = jax.random.key(0)
ITEM = {"number": jnp.int32(0), "hidden": {"h": jnp.zeros(2)}, "reward": jnp.float32(0)}
NAN, INF = float("nan"), float("inf")
REMOVABLE = (jaxbuf.Removable(),)
FRESH = jaxbuf.Freshness(max_use=2, max_staleness=50)


def items(numbers):
    """Items with these numbers."""
    numbers = jnp.asarray(numbers, jnp.int32)
    real = numbers.astype(jnp.float32)
    return {"number": numbers, "hidden": {"h": jnp.stack([real, -real], -1)}, "reward": real}


def create(capacity=6, **options):
    return jaxbuf.ItemBuffer.create(ITEM, capacity, **options)


def filled(count=4, capacity=6, **options):
    """A buffer with so many items, and their slots."""
    buffer = create(capacity, **options)
    parts = (buffer.sampler, buffer.evictor, *buffer.extras)
    score = (
        {"score": jnp.arange(count, dtype=jnp.float32)} if any(p.uses_score for p in parts) else {}
    )
    return buffer.insert(items(range(count)), **score)


def pick(slots, *rows):
    return jax.tree.map(lambda leaf: leaf[jnp.array(rows)], slots)


def numbers_of(buffer):
    return sorted(np.asarray(buffer.data["number"])[np.asarray(buffer.live)].tolist())


# --- set_field of items


def test_a_field_of_some_items_is_written():
    buffer, slots = filled()
    changed = buffer.set_field("reward", pick(slots, 2, 0), jnp.array([20.0, 10.0]))
    assert changed.get(slots).data["reward"].tolist() == [10.0, 1.0, 20.0, 3.0]
    assert changed.get(slots).data["number"].tolist() == [0, 1, 2, 3]
    nested = buffer.set_field("hidden.h", pick(slots, 1), jnp.array([[7.0, 8.0]]))
    assert nested.get(slots).data["hidden"]["h"].tolist() == [[0, 0], [7, 8], [2, -2], [3, -3]]
    tree = buffer.set_field("hidden", pick(slots, 1), {"h": jnp.array([[7.0, 8.0]])})
    chex.assert_trees_all_equal(tree, nested)
    testing.assert_valid(changed)


def test_whole_items_are_written_without_a_path():
    buffer, slots = filled()
    changed = buffer.set_field(None, pick(slots, 3), items([30]))
    assert changed.get(slots).data["number"].tolist() == [0, 1, 2, 30]
    numbers = jaxbuf.ItemBuffer.create(jnp.float32(0), 4)
    numbers, slots = numbers.insert(jnp.arange(3.0))
    assert numbers.set_field(None, slots, -jnp.arange(3.0)).data.tolist() == [0, -1, -2, 0]


def test_stale_invalid_and_masked_rows_are_dropped():
    buffer, slots = filled(4, capacity=4)
    buffer = buffer.add(items([4, 5]))
    invalid = jaxbuf.Slots(jnp.array([4, -1, 99]), jnp.array([1, 1, 1], jnp.uint32))
    every = jax.tree.map(lambda *x: jnp.concatenate(x), slots, invalid)
    value = jnp.arange(100.0, 107.0)
    mask = jnp.array([True, True, True, False, True, True, True])
    changed = buffer.set_field("reward", every, value, mask=mask)
    assert changed.data["reward"].tolist() == [4.0, 5.0, 102.0, 3.0]


def test_the_last_accepted_row_wins():
    buffer, slots = filled()
    rows = pick(slots, 1, 1, 1, 2, 2)
    mask = jnp.array([True, True, False, True, False])
    changed = buffer.set_field("reward", rows, jnp.array([5.0, 6.0, 7.0, 8.0, 9.0]), mask=mask)
    assert changed.get(slots).data["reward"].tolist() == [0.0, 6.0, 8.0, 3.0]


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("gain", jnp.zeros(4), "path is 'gain', but items have no such field; there are hidden.h"),
        ("reward.T", jnp.zeros(4), "path is 'reward.T', which leads into an array"),
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


@pytest.mark.parametrize("name", ["set_field", "update_score", "remove"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda slots: {"slots": slots.index}, "slots is only an array; expected the slots"),
        (lambda slots: {"slots": jax.tree.map(lambda x: x[None], slots)}, r"slots has shape"),
        (lambda slots: {"mask": jnp.ones(3, bool)}, r"mask has shape \(3,\); expected \(4,\)"),
        (lambda slots: {"mask": jnp.ones(4)}, "mask has dtype float32; expected bool"),
    ],
)
def test_wrong_slots_and_masks_are_named(name, change, message):
    buffer, slots = filled(evictor=jaxbuf.Lowest(), parts=REMOVABLE)
    given = {
        "set_field": {"path": "reward", "value": jnp.zeros(4)},
        "update_score": {"score": jnp.zeros(4)},
        "remove": {},
    }[name]
    with pytest.raises(ValueError, match=message):
        getattr(buffer, name)(**given | {"slots": slots} | change(slots))


def test_no_rows_change_nothing():
    buffer, slots = filled(evictor=jaxbuf.Lowest(), parts=REMOVABLE)
    none = jax.tree.map(lambda leaf: leaf[:0], slots)
    nothing = jnp.zeros(0)
    chex.assert_trees_all_equal(buffer.set_field("reward", none, nothing), buffer)
    chex.assert_trees_all_equal(buffer.update_score(none, nothing), buffer)
    chex.assert_trees_all_equal(buffer.remove(none), buffer)
    same, slots = buffer.insert(items([]), score=nothing)
    chex.assert_trees_all_equal(same, buffer)
    assert slots.index.shape == (0,)


# --- scores


def test_a_new_score_decides_who_stays():
    buffer, slots = filled(4, capacity=4, evictor=jaxbuf.Lowest())
    buffer = buffer.update_score(pick(slots, 3, 0), jnp.array([-1.0, 9.0]))
    testing.assert_valid(buffer)
    buffer = buffer.add(items([4, 5]), score=jnp.array([5.0, 6.0]))
    assert numbers_of(buffer) == [0, 2, 4, 5]


def test_equal_scores_go_by_arrival_which_does_not_change():
    buffer, slots = filled(3, capacity=3, evictor=jaxbuf.Lowest())
    buffer = buffer.update_score(pick(slots, 0, 2, 1), jnp.array([5.0, 5.0, 5.0]))
    for number, left in ((3, [1, 2, 3]), (4, [2, 3, 4])):
        buffer = buffer.add(items([number]), score=jnp.array([5.0]))
        assert numbers_of(buffer) == left


def test_infinite_scores_are_scores_and_nan_is_refused():
    sampler, evictor = jaxbuf.Softmax(), jaxbuf.Lowest()
    buffer, slots = filled(4, capacity=4, sampler=sampler, evictor=evictor)
    rows, score = pick(slots, 0, 1, 1, 2), jnp.array([NAN, 7.0, NAN, -INF])
    changed = buffer.update_score(rows, score)
    assert int(changed.metrics()["rejected"]) == 2
    assert changed.occupancy.score[slots.index].tolist() == [0.0, 7.0, -INF, 3.0]
    batch = changed.get(slots)
    law = np.exp([0.0, 7.0, -INF, 3.0])
    np.testing.assert_allclose(batch.probability, law / law.sum(), rtol=1e-5, atol=1e-37)
    assert batch.valid.tolist() == [True] * 4
    testing.assert_valid(changed)
    # Stale and masked rows are not looked at.
    gone = changed.add(items([4]), score=jnp.array([9.0]))
    mask = jnp.array([False, True, True, True])
    assert (
        int(
            gone.update_score(pick(slots, 0, 2, 2, 2), jnp.full(4, NAN), mask=mask).metrics()[
                "rejected"
            ]
        )
        == 2
    )


def test_a_diversity_filter_keeps_no_scores():
    buffer, slots = filled(diversity=jaxbuf.Diversity(0.0, field="number"))
    changed = buffer.update_score(slots, jnp.array([1.0, NAN, 2.0, 3.0]))
    assert int(changed.metrics()["rejected"]) == 1


@pytest.mark.parametrize(
    ("sampler", "message"),
    [
        (jaxbuf.Uniform(), r"no part of this buffer uses scores; create it with evictor="),
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


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"sampler": jaxbuf.Prioritized()},
        {"sampler": jaxbuf.Softmax()},
        {"sampler": jaxbuf.Shuffled()},
        {"sampler": jaxbuf.Recent(0.5, 2, jaxbuf.Prioritized())},
        {"evictor": jaxbuf.Lowest()},
        {"evictor": jaxbuf.Lowest(), "freshness": FRESH, "sampler": jaxbuf.Softmax()},
        {"freshness": FRESH, "diversity": jaxbuf.Diversity(0.0, field="number")},
    ],
    ids=str,
)
def test_removed_items_are_gone(options):
    buffer, slots = filled(4, capacity=4, parts=REMOVABLE, **options)
    removed = buffer.remove(pick(slots, 1, 1, 3, 0), mask=jnp.array([True, True, True, False]))
    assert (int(removed.size), int(removed.metrics()["removed"])) == (2, 2)
    assert removed.holds(slots).tolist() == [True, False, True, False]
    assert numbers_of(removed) == [0, 2]
    testing.assert_valid(removed)
    batch = removed.sample(KEY, 64)
    assert set(batch.data["number"][batch.valid].tolist()) == {0, 2}
    again = removed.remove(slots)
    assert (int(again.size), int(again.metrics()["removed"])) == (0, 4)
    assert not bool(again.can_sample())
    testing.assert_valid(again)
    assert numbers_of(again.clear()) == []


def test_a_removed_item_may_come_again():
    diversity = jaxbuf.Diversity(0.5, field="number")
    buffer, slots = filled(4, diversity=diversity, parts=REMOVABLE)
    buffer = buffer.remove(pick(slots, 2)).add(items([2, 3]), score=jnp.zeros(2))
    assert numbers_of(buffer) == [0, 1, 2, 3]
    assert int(buffer.metrics()["refused_near_buffer"]) == 1


def test_a_ring_fills_the_gap_when_it_comes_around():
    buffer, slots = filled(4, capacity=4, parts=REMOVABLE)
    buffer = buffer.remove(pick(slots, 1))
    left = [[2, 3, 4], [2, 3, 4, 5], [3, 4, 5, 6]]
    for number, expected in zip((4, 5, 6), left, strict=True):
        buffer = buffer.add(items([number]))
        assert numbers_of(buffer) == expected


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


def test_retired_and_removed_items_are_counted_apart():
    buffer, slots = filled(freshness=FRESH, parts=REMOVABLE)
    buffer = buffer.remove(pick(slots, 0)).mark_used(pick(slots, 0, 0, 1, 1))
    metrics = buffer.metrics()
    assert [int(metrics[name]) for name in ("removed", "retired_used", "size")] == [1, 1, 2]


# --- insert, holds, get


def test_insert_tells_where_each_row_went():
    buffer = create(4, sampler=jaxbuf.Prioritized(), parts=REMOVABLE)
    mask = jnp.array([True, False, True, True])
    priority = jnp.array([1.0, 1.0, NAN, 2.0])
    after, slots = buffer.insert(items([0, 1, 2, 3]), mask=mask, priority=priority)
    assert slots.index.tolist() == [0, 4, 4, 1]
    assert after.holds(slots).tolist() == [True, False, False, True]
    chex.assert_trees_all_equal(
        after, buffer.add(items([0, 1, 2, 3]), mask=mask, priority=priority)
    )
    # Rows of the same call make room for each other.
    after, slots = after.insert(items(range(4, 10)))
    assert slots.index.tolist() == [4, 4, 0, 1, 2, 3]
    assert after.get(slots).data["number"][2:].tolist() == [6, 7, 8, 9]


def test_insert_into_a_ranking_tells_what_stays():
    buffer, first = filled(2, capacity=3, evictor=jaxbuf.Lowest())
    score = jnp.array([5.0, -1.0, 0.5, 7.0])
    after, slots = buffer.insert(items([2, 3, 4, 5]), score=score)
    assert after.holds(slots).tolist() == [True, False, False, True]
    assert (slots.index == 3).tolist() == [False, True, True, False]
    assert after.holds(first).tolist() == [False, True]
    assert after.get(slots).data["number"][jnp.array([0, 3])].tolist() == [2, 5]


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


@pytest.mark.parametrize(
    "sampler",
    [
        jaxbuf.Uniform(replacement=False),
        jaxbuf.Prioritized(replacement=False),
        jaxbuf.Softmax(replacement=False),
        jaxbuf.Shuffled(),
        jaxbuf.Recent(0.5, 2),
        jaxbuf.Balanced(replacement=False),
    ],
    ids=str,
)
def test_get_knows_the_probability_of_a_draw(sampler):
    buffer, _ = filled(sampler=sampler)
    batch = buffer.sample(KEY, 4)
    np.testing.assert_allclose(buffer.get(batch.slots).probability, batch.probability, rtol=1e-6)


def test_the_probability_of_an_own_sampler_is_not_known():
    @dataclasses.dataclass(frozen=True)
    class First(jaxbuf.strategies.Sampler):
        def draw(self, state, key, batch_size, occupancy):
            index = jnp.arange(batch_size, dtype=jnp.int32)
            return jaxbuf.strategies.Draw(index, jnp.ones(batch_size), occupancy.live(index))

    buffer, slots = filled(sampler=First())
    batch = buffer.get(slots)
    assert (batch.valid.tolist(), batch.probability.tolist()) == ([True] * 4, [0.0] * 4)


# --- map_field of items


@pytest.mark.parametrize("batch_size", [1, 3, 4, 100])
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


def test_an_empty_buffer_has_nothing_to_map():
    def fn(batch):
        jax.debug.callback(pytest.fail, "called")
        return batch["reward"] + 1.0

    empty = create()
    chex.assert_trees_all_equal(empty.map_field("reward", fn), empty)
    jax.effects_barrier()


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

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
from tests.operations import quick
from tests.wrappers.test_operations import (
    DECLARED,
    ENVS,
    ITEM,
    KEY,
    LACKS,
    OF_ITEMS,
    WRAPPERS,
    a_mixture,
    a_sharded,
    arguments,
    flat,
    items,
    mesh,
    rings,
    scores,
    steps,
)

REMOVABLE = (jaxbuf.Removable(),)


def plain(**options):
    return jaxbuf.ItemBuffer.create(ITEM, 6, **options)


def nested():
    """Items whose number is 200 or more cannot be removed."""
    parts = [items().add(flat(6, 100), score=scores(6)), plain().add(flat(3, 200))]
    inner = jaxbuf.Mixture.create(parts, [1, 1])
    return jaxbuf.Mixture.create([rings().add(steps(ENVS)), inner], [1, 1])


@pytest.mark.parametrize("make", quick([a_mixture, nested], {nested}))
def test_what_is_not_there_is_not_got(make):
    mixture = make()
    batch = mixture.sample(KEY, 24)
    nowhere = jaxbuf.Slots(jnp.array([mixture.capacity, -1]), jnp.array([1, 1], jnp.uint32))
    found = mixture.get(nowhere)
    assert (found.valid.tolist(), found.probability.tolist()) == ([False] * 2, [0.0] * 2)
    assert found.slots.index.tolist() == [mixture.capacity] * 2
    again = mixture.get(batch.slots)
    np.testing.assert_allclose(again.probability, batch.probability, rtol=1e-5)
    chex.assert_trees_all_equal(again.data, batch.data)
    for path, value, message in (
        ("terminated", batch.data["terminated"], "path is 'terminated', but episodes knows"),
        ("x", jnp.zeros((3, 1)), r"value has shape \(3, 1\); expected \(24, 1\)"),
    ):
        with pytest.raises(ValueError, match=message):
            mixture.set_field(path, batch.slots, value)


@pytest.mark.parametrize("make", quick([a_mixture, nested], {nested}))
def test_items_are_inserted_scored_and_removed(make):
    mixture = make()
    batch = mixture.sample(KEY, 24)
    new, score = flat(3, 7), jnp.array([5.0, jnp.nan, 6.0])
    with pytest.raises(ValueError, match="part is None; expected the number"):
        mixture.insert(new)
    if make is a_mixture:
        mixture, slots = jaxbuf.insert(mixture, new, score=score, part=1)
    else:
        buffer, slots = mixture.parts[1].insert(new, score=score, part=0)
        mixture = mixture.replace_part(1, buffer)
        before = mixture.parts[0].capacity
        index = jnp.where(slots.index < buffer.capacity, slots.index + before, mixture.capacity)
        slots = slots.replace(index=index)
    assert mixture.holds(slots).tolist() == [True, False, True]
    assert int(slots.index[1]) == mixture.capacity
    assert mixture.get(slots).data["x"][jnp.array([0, 2]), 0].tolist() == [7, 9]
    rest = mixture.remove(batch.slots)
    assert rest.holds(batch.slots).tolist() == (batch.data["x"][:, 0] >= 200).tolist()
    testing.assert_valid(rest)


# --- over shards; `sharded_on_devices.py` does the same on eight devices


@pytest.mark.parametrize(
    ("sampler", "exchange"),
    [
        (jaxbuf.Prioritized(uniform_mix=0.1), True),
        pytest.param(jaxbuf.Softmax(), False, marks=pytest.mark.slow),
    ],
)
def test_items_are_inserted_into_all_shards(sampler, exchange):
    buffer = jaxbuf.Sharded.create(
        lambda: plain(sampler=sampler), mesh(), "d", shards=2, exchange=exchange
    )
    given = {"score": scores(8)} if sampler.uses_score else {}
    mask = jnp.arange(8) != 2
    buffer, slots = jaxbuf.insert(buffer, flat(8), mask=mask, **given)
    assert slots.index.tolist() == [0, 1, 12, 2, 6, 7, 8, 9]
    assert buffer.holds(slots).tolist() == mask.tolist()
    batch = buffer.sample(KEY, 16)
    chex.assert_trees_all_close(buffer.get(batch.slots), batch, rtol=1e-5)
    if not sampler.uses_score:
        with pytest.raises(ValueError, match="no part of this buffer uses scores"):
            buffer.update_score(slots, jnp.ones(8))


def test_windows_of_all_shards_are_found():
    buffer = a_sharded(rings).add(steps(2 * ENVS, 6))
    slots = buffer.slots_at(jnp.array([3, 0, 0, 9]), jnp.array([2, 1, 2, 0]))
    assert slots.index.tolist() == [16 + 10, 1, 2, 32]
    assert buffer.get(slots).data["x"][:3].tolist() == [[20], [1], [2]]
    gone = buffer.remove(slots)
    assert int(gone.metrics()["removed"]) == 3
    testing.assert_valid(gone)
    with pytest.raises(ValueError, match="but episodes knows the ends of episodes"):
        buffer.set_field("terminated", slots, jnp.zeros((4, 1), bool))
    with pytest.raises(ValueError, match="insert was called, but steps of a TrajectoryBuffer"):
        buffer.insert(flat(4))


def test_shards_check_what_they_are_given():
    buffer, slots = a_sharded(plain).insert(flat(4))
    for call, message in (
        (lambda: buffer.set_field("gain", slots, 0), "path is 'gain', but items have no such"),
        (lambda: buffer.set_field("x", slots, jnp.ones((4, 3))), r"expected \(4, 1\)"),
        (lambda: buffer.remove(slots), "remove was called, but nothing removes items here"),
        (lambda: buffer.get(jax.tree.map(lambda x: x[:3], slots)), "slots has 3 rows, but there"),
        (lambda: buffer.slots_at(jnp.zeros(2, int), jnp.zeros(2, int)), "has no environments"),
        (lambda: buffer.end_episodes(), "end_episodes was called, but the shards know no episodes"),
        (lambda: buffer.map_field("reward", 3), "fn is 3; expected a function of items"),
        (lambda: buffer.insert(flat(3)), "has 3 rows, but there are 2 shards"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


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
        taking = {name for name in DECLARED if DECLARED[name].takes_slots} - LACKS.get(kind, set())
        names = sorted(taking & OF_ITEMS if of_items else taking - OF_ITEMS)
        make = WRAPPERS[kind][of_items]
        # One trace for all calls; a hosted buffer is called from Python.
        if kind == "hosted":
            refuse(make(), names)
        else:
            jax.eval_shape(lambda make=make, names=names: refuse(make(), names))


def test_a_mixture_asks_for_the_slots_of_rows():
    mixture = jaxbuf.Mixture.create([plain(), plain()], [1, 1])
    for slots, match in NO_SLOTS.values():
        with pytest.raises(ValueError, match=match):
            mixture.part_of(slots)
        with pytest.raises(ValueError, match=match):
            mixture.part_slots(slots, 0)


def able():
    limits = jaxbuf.Freshness(max_use=2, max_staleness=3)
    return plain(sampler=jaxbuf.Prioritized(), freshness=limits)


ROWS, STEPS = flat(4), steps(4, 3)


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize(
    ("make", "items", "options", "message"),
    [
        (able, ROWS, {"mask": np.ones(2, bool)}, "mask has shape (2,); expected (4,)"),
        (able, ROWS, {"mask": np.ones(3, bool)}, "mask has shape (3,); expected (4,)"),
        (able, ROWS, {"priority": np.ones((4, 2), np.float32)}, "expected (4,)"),
        (able, ROWS, {"version": np.ones(4, np.float32)}, "version has dtype float32"),
        (able, ROWS | {"x": np.ones((4, 3), "f4")}, {}, "items['x'] has shape (4, 3)"),
        (rings, STEPS, {"mask": np.ones((2, 3), bool)}, "(2, 3); expected (4, 3)"),
        (rings, STEPS, {"priority": np.ones(2, np.float32)}, "(2,); expected (4, 3)"),
        (
            rings,
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
        (jax.jit(add) if jitted else add)(a_sharded(make))

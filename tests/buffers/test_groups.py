"""`sample_groups`: items of one group together, in order or at random, padded with a mask."""

import collections
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import jaxbuf
from tests.operations import quick

ITEM = {"group": jnp.int32(0), "info": {"time": jnp.int32(0)}}


def items(groups, start=0):
    groups = np.asarray(groups, np.int32)
    time = np.arange(start, start + len(groups), dtype=np.int32)
    return {"group": groups, "info": {"time": time}}


def filled(groups, capacity=None, **options):
    buffer = jaxbuf.ItemBuffer.create(ITEM, capacity or len(groups), **options)
    return jaxbuf.add(buffer, items(groups))


def rows(batch):
    """Returns the group of each row and the times of its items, after checking all else."""
    out = []
    for row, group in enumerate(batch.group.tolist()):
        valid = np.asarray(batch.valid[row])
        count = int(valid.sum())
        np.testing.assert_array_equal(valid, np.arange(valid.size) < count)
        data = jax.tree.map(lambda leaf, row=row: np.asarray(leaf[row]), batch.data)
        np.testing.assert_array_equal(data["group"][:count], group)
        out.append((group, data["info"]["time"][:count].tolist()))
    return out


def test_di_engine_padding():
    """10 items grouped by ``i & 5``: sizes 3, 3, 2, 2, padded to 3."""
    buffer = filled([i & 5 for i in range(10)])
    batch = jaxbuf.sample_groups(buffer, jax.random.key(0), 4, num_groups=6, size=3)
    assert batch.data["group"].shape == batch.valid.shape == (4, 3)
    assert sorted(rows(batch)) == [(0, [0, 2, 8]), (1, [1, 3, 9]), (4, [4, 6]), (5, [5, 7])]
    assert int(batch.ignored) == 0


@pytest.mark.parametrize("order", ["age", "random"])
@pytest.mark.parametrize("evictor", quick([jaxbuf.Oldest(), jaxbuf.Lowest()], {jaxbuf.Oldest()}))
def test_random_buffers_agree_with_lists(order, evictor):
    random = np.random.default_rng(5)
    buffer = jaxbuf.ItemBuffer.create(ITEM, 12, evictor=evictor)
    held, time = [], 0
    for turn in range(15):
        groups = random.integers(-1, 5, 5)
        score = random.permutation(5).astype(np.float32) + 10 * random.random()
        options = {"score": score} if evictor.uses_score else {}
        buffer = jaxbuf.add(buffer, items(groups, time), **options)
        held += list(zip(score.tolist(), range(time, time + 5), groups.tolist(), strict=True))
        time += 5
        if evictor.uses_score:
            held = sorted(sorted(held)[-12:], key=lambda item: item[1])
        held = held[-12:]
        members = collections.defaultdict(list)
        for _, when, group in held:
            members[group].append(when)
        outside = len(members.pop(-1, [])) + len(members.pop(4, []))
        batch = jaxbuf.sample_groups(
            buffer, jax.random.key(turn), 5, num_groups=4, size=3, order=order
        )
        assert int(batch.ignored) == outside
        found = dict(rows(batch))
        assert set(found) - {4} == set(members)
        assert np.sum(batch.group == 4) == 5 - len(members)
        for group, times in members.items():
            assert len(found[group]) == min(3, len(times))
            if order == "age":
                first = times.index(found[group][0])
                assert found[group] == times[first : first + 3]
            else:
                assert len(set(found[group])) == len(found[group])
                assert set(found[group]) <= set(times)
        live = buffer.occupancy.live(batch.slots.index.reshape(-1))
        np.testing.assert_array_equal(live, batch.valid.reshape(-1))
        np.testing.assert_array_equal(
            np.asarray(buffer.data["info"]["time"])[batch.slots.index[batch.valid]],
            batch.data["info"]["time"][batch.valid],
        )


# The groups of the items, the arguments, what is looked at, and all that it may be.
EVEN = {
    "groups": (
        [0, 0, 0, 0, 2, 3, 3],
        {"groups": 2, "num_groups": 5, "size": 2, "replacement": True},
        lambda batch: batch.group,
        itertools.product((0, 2, 3), repeat=2),
    ),
    "distinct groups": (
        [0, 0, 0, 0, 2, 3, 3],
        {"groups": 2, "num_groups": 5, "size": 2},
        lambda batch: batch.group,
        itertools.permutations((0, 2, 3), 2),
    ),
    "items in random order": (
        [1, 1, 1, 0, 1],
        {"groups": jnp.array([1]), "num_groups": 2, "size": 2, "order": "random"},
        lambda batch: batch.data["info"]["time"][:, 0],
        itertools.permutations((0, 1, 2, 4), 2),
    ),
    "runs of items": (
        [0] * 6,
        {"groups": 1, "num_groups": 1, "size": 3},
        lambda batch: batch.data["info"]["time"][:, 0],
        [(start, start + 1, start + 2) for start in range(4)],
    ),
}


@pytest.mark.parametrize("case", EVEN)
def test_all_that_may_come_is_equally_likely(case):
    groups, options, look, outcomes = EVEN[case]
    buffer = filled(groups)
    draw = jax.jit(jax.vmap(lambda key: jaxbuf.sample_groups(buffer, key, **options)))
    batch = draw(jax.random.split(jax.random.key(3), 2400))
    found = collections.Counter(map(tuple, look(batch).tolist()))
    assert set(found) == set(outcomes)
    assert stats.chisquare(list(found.values())).pvalue > 1e-3


@pytest.mark.parametrize("size", quick([1, 3, 40], {3}))
def test_blocks_of_any_size_agree_with_lists(size):
    """Groups that repeat, one without items, and blocks that do not divide the capacity."""
    group = np.random.default_rng(size).integers(0, 9, 1003)
    group[group == 6] = 7
    wanted = np.array([3, 6, 3, 0, 8, 3])
    buffer = jaxbuf.add(filled(group[:700], 1003), items(group[700:], 700))
    drawn = jaxbuf.sample_groups(
        buffer, jax.random.key(0), wanted, num_groups=9, size=size, order="random"
    )
    for row, (number, times) in enumerate(rows(drawn)):
        assert number == wanted[row]
        assert len(set(times)) == len(times) == (0 if number == 6 else size)
    # Under vmap the buffers may differ, too.
    lanes = jax.tree.map(lambda leaf: jnp.stack([jnp.zeros_like(leaf), leaf]), buffer)
    draw = jax.vmap(
        lambda buffer, key: jaxbuf.sample_groups(buffer, key, wanted, num_groups=9, size=size)
    )
    draw = jax.jit(jax.vmap(draw, in_axes=(None, 0)))
    keys = jax.random.split(jax.random.key(1), (20, 2))
    for _, batch in np.asarray(draw(lanes, keys).data["info"]["time"]):
        for row in (0, 2, 3, 4, 5):
            times = np.flatnonzero(group == wanted[row])
            first = np.flatnonzero(times == batch[row, 0])[0]
            np.testing.assert_array_equal(batch[row], times[first : first + size])


@pytest.mark.parametrize("order", ["age", "random"])
@pytest.mark.parametrize("groups", [4, np.array([0, 1, 2, 2])])
def test_nothing_sorts_all_slots(groups, order):
    buffer = filled([i % 5 for i in range(1000)])
    lowered = jax.jit(
        lambda buffer, key: jaxbuf.sample_groups(
            buffer, key, groups, num_groups=5, size=2, order=order
        )
    ).lower(buffer, jax.random.key(0))
    assert "stablehlo.sort" not in lowered.as_text()


@pytest.mark.parametrize("order", ["age", "random"])
def test_padding_with_random_items_of_the_group_as_in_di_engine(order):
    """Groups of 3, 3, 2 and 2 padded to 5; what was there without padding comes first."""
    buffer = filled([i & 5 for i in range(10)])
    groups = jnp.array([0, 1, 2, 4, 5])
    # A group that is full has no padding.
    full = jaxbuf.sample_groups(
        buffer, jax.random.key(0), groups[:1], num_groups=6, size=2, order=order, padding="random"
    )
    times = full.data["info"]["time"][0].tolist()
    assert set(times) < {0, 2, 8}
    assert times[0] < times[1] or order == "random"
    draw = jax.jit(
        jax.vmap(
            lambda key: jaxbuf.sample_groups(
                buffer, key, groups, num_groups=6, size=5, order=order, padding="random"
            )
        )
    )
    batch = draw(jax.random.split(jax.random.key(2), 1500))
    # There is nothing to pad group 2 with.
    expected = np.broadcast_to(np.isin([0, 1, 2, 4, 5], [0, 1, 4, 5])[:, None], (5, 5))
    np.testing.assert_array_equal(batch.valid, np.broadcast_to(expected, (1500, 5, 5)))
    times = np.asarray(batch.data["info"]["time"])
    np.testing.assert_array_equal(
        np.asarray(buffer.data["info"]["time"])[batch.slots.index[:, expected[:, 0]]],
        times[:, expected[:, 0]],
    )
    for row, members in ((0, [0, 2, 8]), (1, [1, 3, 9]), (3, [4, 6]), (4, [5, 7])):
        own, pads = times[:, row, : len(members)], times[:, row, len(members) :]
        assert np.all((own if order == "age" else np.sort(own, axis=1)) == members)
        # All places of padding together: which item is in one says nothing of the next.
        joint = collections.Counter(map(tuple, pads.tolist()))
        assert set(joint) == set(itertools.product(members, repeat=5 - len(members)))
        assert stats.chisquare(list(joint.values())).pvalue > 1e-3


def test_an_empty_buffer_and_groups_that_do_not_exist():
    empty = jaxbuf.ItemBuffer.create(ITEM, 3)
    for options in ({}, {"replacement": True}, {"padding": "random"}):
        batch = jaxbuf.sample_groups(empty, jax.random.key(0), 2, num_groups=3, size=2, **options)
        assert not batch.valid.any()
        assert batch.group.tolist() == [3, 3]
        assert batch.slots.index.tolist() == [[3, 3], [3, 3]]
    dynamic = jax.jit(
        lambda buffer, groups: jaxbuf.sample_groups(
            buffer, jax.random.key(0), groups, num_groups=3, size=2
        )
    )
    batch = dynamic(filled([0, 1, 1]), jnp.array([1, 3, -1, 2], jnp.int32))
    assert rows(batch) == [(1, [1, 2]), (3, []), (3, []), (2, [])]


def test_order_of_age_past_2_to_the_32_laps():
    buffer = filled([0, 0, 0])
    buffer = buffer.replace(occupancy=buffer.occupancy.replace(lap=jnp.uint32(2**32 - 1)))
    for start in (0, 2, 4):
        buffer = jaxbuf.add(buffer, items([0, 0], start))
    batch = jaxbuf.sample_groups(buffer, jax.random.key(0), 1, num_groups=1, size=3)
    assert rows(batch) == [(0, [3, 4, 5])]


def sample(buffer=None, groups=1, **options):
    buffer = jaxbuf.ItemBuffer.create(ITEM, 3) if buffer is None else buffer
    return jaxbuf.sample_groups(
        buffer, jax.random.key(0), groups, **{"num_groups": 3, "size": 2} | options
    )


BAD = [
    (lambda: sample(groups=[0, 3]), "groups has id 3; expected ids from 0 to num_groups"),
    (lambda: sample(groups=np.array([0, 3])), "groups has id 3; expected ids from 0 to num_groups"),
    (lambda: sample(groups=jnp.array([-1, 2])), "groups has id -1; expected ids from 0"),
    (lambda: sample(groups=jnp.zeros((2, 2), jnp.int32)), "groups has shape (2, 2)"),
    (lambda: sample(groups=jnp.zeros(2)), "groups has dtype float32; expected integers"),
    (lambda: sample(group="info"), "group is 'info', which is no array of shape"),
    (
        lambda: sample(jaxbuf.ItemBuffer.create({"group": jnp.zeros(2)}, 3)),
        "group is 'group', which is float32 of shape (2,) in an item; expected one integer",
    ),
    (
        lambda: sample(jaxbuf.TrajectoryBuffer.create(ITEM, 2, 3)),
        "buffer is a TrajectoryBuffer; expected an ItemBuffer",
    ),
]


@pytest.mark.parametrize(("call", "message"), BAD)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        call()

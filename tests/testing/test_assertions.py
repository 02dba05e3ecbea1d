"""`jaxbuf.testing`: what is right passes, and what is broken by hand is named."""

import dataclasses
import functools
import importlib
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbuf
from jaxbuf import testing
from jaxbuf.occupancy.ring import Ring
from jaxbuf.testing import hlo
from tests.monitoring.test_explain_memory import KEYS, create, items
from tests.strategies.test_plug_in import HalfRing

CAPACITY = 300
STEP = {"reward": jnp.float32(0), "terminated": jnp.bool_(False), "truncated": jnp.bool_(False)}


def prioritized(rows=CAPACITY, capacity=CAPACITY, **options):
    buffer = jaxbuf.ItemBuffer.create(
        jnp.float32(0), capacity, sampler=jaxbuf.Prioritized(alpha=1.0), **options
    )
    return buffer.add(jnp.arange(rows, dtype=jnp.float32), priority=jnp.full(rows, 2.0))


def ranked(rows=6, capacity=8, **options):
    buffer = jaxbuf.ItemBuffer.create(
        jnp.float32(0), capacity, sampler=jaxbuf.Softmax(), evictor=jaxbuf.Lowest(), **options
    )
    score = jnp.arange(rows, dtype=jnp.float32)
    return buffer.add(score, score=score)


def trajectories(**options):
    """Two rings of 8 steps that have held 11, in episodes of four."""
    episodes = jaxbuf.Episodes(record_return=True, discount=0.5)
    options = {"episodes": episodes, "sequence_length": 2} | options
    buffer = jaxbuf.TrajectoryBuffer.create(STEP, 2, 8, **options)
    number = jnp.arange(11)[None] + jnp.array([[0], [1]])
    return buffer.add(
        {
            "reward": number.astype(jnp.float32),
            "terminated": number % 4 == 3,
            "truncated": jnp.zeros((2, 11), bool),
        }
    )


def fresh(**limits):
    """Five items of versions 0 to 4, and the last of them used once, with a learner at 3."""
    buffer = jaxbuf.ItemBuffer.create(
        jnp.float32(0), 8, sampler=jaxbuf.Prioritized(), freshness=jaxbuf.Freshness(**limits)
    )
    buffer = buffer.add(jnp.arange(5.0), version=jnp.arange(5))
    slots = buffer.sample(jax.random.key(0), 1).slots.replace(index=jnp.array([4]))
    return buffer.mark_used(slots).set_version(3)


def spliced(one, other):
    """``one`` with a single number of ``other``'s, for each number in which they differ."""
    ours, structure = jax.tree.flatten(one)
    for i, theirs in enumerate(jax.tree.leaves(other)):
        for at in np.argwhere(np.asarray(ours[i]) != np.asarray(theirs)):
            index = tuple(at)
            changed = jnp.asarray(ours[i]).at[index].set(theirs[index])
            yield jax.tree.unflatten(structure, [*ours[:i], changed, *ours[i + 1 :]])


def says(*words):
    return pytest.raises(AssertionError, match="(?s)" + ".*".join(map(re.escape, words)))


@pytest.mark.parametrize("slot", [0, 37, CAPACITY - 1])
def test_each_node_of_a_tree_is_compared_with_its_children(slot):
    buffer = prioritized()
    tree = buffer.sampler_state
    for value in (5.0, 0.0):
        other = tree.set(jnp.array([slot]), jnp.array([value]))
        broken = list(spliced(tree, other))
        # The leaf, and on each level above a node of one operation at least.
        assert len(broken) >= 4
        for one in broken:
            with says("buffer.sampler_state") as raised:
                testing.assert_valid(buffer.replace(sampler_state=one))
            for first, last in re.findall(r"of slots (\d+) to (\d+)", str(raised.value)):
                assert int(first) <= slot <= int(last)


def few():
    return prioritized(rows=5, capacity=9)


def empty():
    return jaxbuf.ItemBuffer.create(jnp.float32(0), 9, freshness=jaxbuf.Freshness(max_use=3))


def queue():
    return jaxbuf.Queue.create(jnp.float32(0), 4).add(jnp.arange(3.0)).take(2)[0]


def unlimited():
    return jaxbuf.ItemBuffer.create(jnp.float32(0), 9)


def windows():
    return trajectories(sampler=jaxbuf.Recent(0.5, 2, jaxbuf.Prioritized()))


def rings():
    return trajectories(episodes=None)


def avoiding():
    return trajectories(episodes=jaxbuf.Episodes(boundary="avoid", short_windows="never"))


def limited():
    return fresh(max_use=2, max_staleness=9)


def retiring():
    return ranked(freshness=jaxbuf.Freshness(max_use=3))


def mass(slot, value):
    return lambda tree: tree.set(jnp.array([slot]), jnp.array([value]))


def call(name, slot):
    return lambda occupancy: getattr(occupancy, name)(jnp.array([slot]))


def place_nan(occupancy):
    return occupancy.place(1, None, jnp.array([jnp.nan]))[0]


def with_numbers(**values):
    """Replaces fields of a state by numbers of their dtypes, or by what functions make of them."""

    def new(old, value):
        return value(old) if callable(value) else jnp.asarray(value, old.dtype)

    return lambda state: state.replace(**{k: new(getattr(state, k), v) for k, v in values.items()})


def changed(make, field, change):
    buffer = make()
    return dataclasses.replace(buffer, **{field: change(getattr(buffer, field))})


@pytest.mark.parametrize(
    "make", [prioritized, ranked, trajectories, fresh, windows, avoiding, queue, limited]
)
def test_those_that_are_broken_were_valid(make):
    testing.assert_valid(make())


@pytest.mark.parametrize(
    ("make", "field", "change", "message"),
    [
        (prioritized, "sampler_state", mass(7, jnp.nan),
         ".leaves[7] is nan; expected a finite number"),
        (prioritized, "sampler_state", mass(7, -1.0),
         ".leaves[7] is -1.0; expected a finite number"),
        (prioritized, "sampler_state", mass(7, jnp.inf),
         ".leaves[7] is inf; expected a finite number"),
        (few, "sampler_state", mass(6, 1.0), ".leaves[6] is 1.0; expected 0, empty slot"),
        # The newest step of the second ring is at its place 2, and begins no window yet.
        (windows, "sampler_state", mass(10, 1.0), ".leaves[10] is 1.0; expected 0, empty slot"),
        (unlimited, "occupancy", with_numbers(cursor=9, held=9),
         ".position is 9; expected less than 9"),
        (unlimited, "occupancy", with_numbers(cursor=0, held=10),
         ".size is 10; expected at most the capacity, 9"),
        (unlimited, "occupancy", with_numbers(cursor=3, held=5),
         ".position is 3; expected 5, the size"),
        (queue, "occupancy", with_numbers(cursor=1, held=5), ".size is 5"),
        (rings, "occupancy", with_numbers(cursor=lambda x: x.at[1].set(8)), ".cursor[1] is 8"),
        (rings, "occupancy", with_numbers(held=lambda x: x.at[1].set(9)), ".held[1] is 9"),
        (ranked, "occupancy", with_numbers(arrivals=7, held=4),
         ".scored[4] is True; expected False: there are only 4 items"),
        (ranked, "occupancy", with_numbers(arrivals=7, held=7),
         ".scored[6] is False; expected True, the slot holds an item"),
        (ranked, "occupancy", with_numbers(arrivals=7, held=9),
         ".size is 9; expected at most the capacity, 8"),
        (ranked, "occupancy", place_nan, ".score[6] is nan; expected a number"),
        (ranked, "sampler_state", with_numbers(scores=mass(7, 1.0)),
         ".scores.leaves[7] is 1.0; expected -inf"),
        # The best comes first, and has score 5.
        (ranked, "sampler_state", with_numbers(scores=mass(2, 2.0)),
         ".scores.leaves[2] is 2.0; expected 3.0"),
        (ranked, "sampler_state", with_numbers(masses=mass(1, 0.5)),
         ".masses.leaves[1] is 0.5; expected 0.36"),
        # So far away that no mass is a number.
        (ranked, "sampler_state", with_numbers(reference=-1e6),
         ".masses.leaves[0] is 1.0; expected inf"),
        (ranked, "sampler_state", with_numbers(reference=jnp.inf),
         ".reference is inf; expected 5.0"),
        (fresh, "occupancy", call("include", 6), ".members[6] is True; expected False, empty slot"),
        (retiring, "occupancy", with_numbers(inner=with_numbers(held=9)), ".inner.size is"),
        (retiring, "occupancy", with_numbers(inner=call("demote", 2)), ".inner.scored[2] is"),
        (empty, "occupancy", with_numbers(inner=with_numbers(cursor=3)),
         ".inner.position is 3; expected 0, the size"),
        # A window that crosses an end, and one that does not.
        (avoiding, "occupancy", call("include", 7),
         ".members[7] is True; expected True exactly for"),
        (avoiding, "occupancy", call("exclude", 4),
         ".members[4] is False; expected True exactly for"),
        (few, "data", lambda data: data[:8], " is float32[8]; expected float32[9]"),
        (few, "counters", lambda x: x.astype(jnp.int32), " is int32[2]; expected uint32[2]"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(make, field, change, message):
    with says(f"buffer.{field}{message}"):
        testing.assert_valid(changed(make, field, change))


def test_the_number_of_an_item_must_not_begin_anew():
    buffer = changed(ranked, "occupancy", with_numbers(arrivals=1))
    with says("buffer.occupancy.generation[6] is 1; expected a number that no other slot has"):
        testing.assert_valid(buffer.add(jnp.ones(1), score=jnp.ones(1)))


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ((1, 9), ["uses[4] is 1; expected less than max_use, 1"]),
        ((2, 2), ["versions[0] is 0; expected at least 2", "2 in all"]),
    ],
)
def test_limits_on_freshness_are_kept(limits, words):
    with says("buffer.freshness_state.", *words):
        testing.assert_valid(limited().replace(extras=(jaxbuf.Freshness(*limits),)))
    negative = jax.tree.map(jnp.negative, limited().freshness_state)
    with says("buffer.freshness_state.uses[4] is -1; expected a number of at least 0"):
        testing.assert_valid(limited().replace(extra_states=(negative,)))


def test_another_configuration_is_named():
    with says("buffer is not built as its configuration says"):
        testing.assert_valid(few().replace(sampler=jaxbuf.Uniform()))


@pytest.mark.parametrize("evictor", [jaxbuf.Oldest(), jaxbuf.Lowest()])
def test_a_pass_that_misses_a_removal(evictor):
    buffer = jaxbuf.ItemBuffer.create(
        jnp.float32(0), 8, sampler=jaxbuf.Shuffled(), evictor=evictor, parts=(jaxbuf.Removable(),)
    )
    score = jnp.arange(4.0) if evictor.uses_score else None
    buffer, slots = buffer.insert(jnp.arange(4.0), score=score)
    removed = buffer.remove(slots, mask=jnp.arange(4) == 2)
    testing.assert_valid(removed)
    slot = int(slots.index[2])
    with says(f"buffer.sampler_state.marks[{slot}] is 1; expected one mark of each item, and none"):
        testing.assert_valid(removed.replace(sampler_state=buffer.sampler_state))


@pytest.mark.parametrize(
    ("make", "field", "change", "least", "message"),
    [
        # A row that takes the place of the lowest item changes its leaf, and all nodes above it.
        (
            lambda: ranked(rows=64, capacity=64),
            "nodes",
            lambda ranking: ranking.place(1, None, jnp.array([0.5]))[0],
            4,
            "buffer.occupancy",
        ),
        # Each count on the path of a member, its bit and the size.
        (lambda: fresh(max_use=2), "members", call("exclude", 3), 3, "buffer.occupancy.members."),
    ],
)
def test_each_number_above_an_item_is_compared(make, field, change, least, message):
    buffer = make()
    occupancy = buffer.occupancy
    broken = list(spliced(getattr(occupancy, field), getattr(change(occupancy), field)))
    assert len(broken) >= least
    for one in broken:
        with says(message):
            testing.assert_valid(buffer.replace(occupancy=occupancy.replace(**{field: one})))


@dataclasses.dataclass(frozen=True)
class Careless(jaxbuf.Uniform):
    """A sampler of one's own that does not know what it does."""

    share: float = 0.5
    more: int = 0
    least: float | None = 0.1

    def probability(self, state, index, occupancy):
        return jnp.full(index.shape, self.share)

    def support(self, state, occupancy):
        found = super().support(state, occupancy)
        count = found.count + jnp.int32(self.more)
        # A NaN in the configuration would not equal itself.
        least = jnp.float32(jnp.nan if self.least is None else self.least)
        return dataclasses.replace(found, count=count, least_probability=least)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"share": 0.4}, "sums to 0.8 over all items; expected 1"),
        ({"share": 1.5}, "buffer.sampler.probability(...)[0] is 1.5; expected a probability"),
        ({"share": -0.5}, "buffer.sampler.probability(...)[0] is -0.5; expected a probability"),
        ({"more": 1}, "buffer.support().count is 3; expected at most the size, 2"),
        ({"least": 2.0}, "buffer.support().least_probability is 2.0; expected a probability"),
        ({"least": None}, "buffer.support().least_probability is nan; expected a probability"),
    ],
)
def test_a_sampler_of_ones_own_draws_by_probabilities(options, message):
    buffer = jaxbuf.ItemBuffer.create(jnp.float32(0), 4, sampler=Careless())
    testing.assert_valid(buffer.add(jnp.arange(2.0)))
    buffer = jaxbuf.ItemBuffer.create(jnp.float32(0), 4, sampler=Careless(**options))
    with says(message):
        testing.assert_valid(buffer.add(jnp.arange(2.0)))


@dataclasses.dataclass(frozen=True)
class Forgetful(jaxbuf.Oldest):
    """An evictor of one's own that knows of one item less than it counts."""

    def init(self, capacity):
        return ForgetfulRing.create(capacity)


class ForgetfulRing(Ring):
    def live(self, index):
        return super().live(index) & (index != 0)


def test_an_evictor_of_ones_own_counts_what_is_live():
    buffer = jaxbuf.ItemBuffer.create(jnp.float32(0), 4, evictor=Forgetful())
    testing.assert_valid(buffer)
    with says("buffer.occupancy.size is 3; expected 2, as many as are live"):
        testing.assert_valid(buffer.add(jnp.arange(3.0)))


@pytest.mark.parametrize("slot", [0, 3])
def test_what_a_filter_compares_is_what_items_hold(slot):
    buffer = jaxbuf.ItemBuffer.create(
        {"x": jnp.zeros(2)}, 6, diversity=jaxbuf.Diversity(0.5, field=lambda item: item["x"] * 0.3)
    )
    rows = jnp.arange(10.0).reshape(5, 2) * 10
    buffer = buffer.add({"x": rows}, score=jnp.arange(5.0))
    testing.assert_valid(buffer)
    changed = buffer.data["x"].at[slot, 1].add(1)
    with says(f"buffer.diversity_state.points has other numbers for slot {slot} than the data"):
        testing.assert_valid(buffer.replace(data={"x": changed}))


@pytest.mark.parametrize(
    ("field", "at", "value", "message"),
    [
        # The earliest step of the first ring has number 3 and lies at place 3.
        ("terminated", 5, True, "episode(...).begin[0, 3] is 2; expected 0"),
        ("terminated", 7, False, "episode(...).is_last[0, 4] is True; expected False"),
        ("truncated", 8 + 3, True, "episode(...).value[1, 0] is 8.875; expected -1000.0"),
        ("reward", 8 + 6, 0.0, "episode(...).value[1, 0] is 8.875; expected 8.0"),
        # Where steps that terminate end no episode.
        ("terminated", 8 + 5, True, "episode(...).last_terminated[1, 2] is"),
    ],
)
def test_the_index_of_episodes_is_that_of_the_data(field, at, value, message):
    last = {"episodes": jaxbuf.Episodes(last="truncated")} if "last_term" in message else {}
    buffer = trajectories(**last)
    testing.assert_valid(buffer)
    changed = buffer.data[field].at[at].set(value)
    with says(message, "as the data say, [environment, step from the earliest]"):
        testing.assert_valid(buffer.replace(data=buffer.data | {field: changed}))


def test_an_episode_can_end_without_a_flag_in_its_steps():
    step = {"reward": jnp.float32(0), "terminated": jnp.bool_(False)}
    episodes = jaxbuf.Episodes(record_return=True)
    buffer = jaxbuf.TrajectoryBuffer.create(step, 1, 8, episodes=episodes)
    rows = {"reward": jnp.ones((1, 3)), "terminated": jnp.array([[False, True, False]])}
    buffer = buffer.add(rows).end_episodes().add(rows)
    testing.assert_valid(buffer)
    changed = buffer.data["terminated"].at[4].set(False)
    with says("episode(...).value[0, 3] is 1.99", "expected -1000.0"):
        testing.assert_valid(buffer.replace(data=buffer.data | {"terminated": changed}))


def test_arrays_of_the_host_are_as_good():
    for make in (prioritized, ranked, trajectories, lambda: fresh(max_use=2)):
        buffer = jax.device_get(make())
        testing.assert_valid(buffer)


def test_buffers_are_found_wherever_they_are():
    good, bad = few(), changed(few, "sampler_state", mass(6, 1.0))
    for state, name in (
        ({"params": jnp.zeros(3), "replay": bad}, "buffer['replay'].sampler_state.leaves[6]"),
        (jaxbuf.Mixture.create([good, bad], [1, 1]), "buffer.parts[1].sampler_state.leaves[6]"),
        (
            jax.tree.map(lambda *leaves: jnp.stack(leaves)[None], good, bad),
            "buffer[0][1].sampler_state.leaves[6]",
        ),
    ):
        with says(name, "is 1.0; expected 0") as raised:
            testing.assert_valid(state)
        assert str(raised.value).count("leaves[6]") == 1


def test_only_the_first_of_many_problems_are_shown():
    bad = changed(few, "sampler_state", mass(6, jnp.nan))
    with says("buffer[7]", "and 4 more") as raised:
        testing.assert_valid([bad] * 12)
    assert "buffer[8]" not in str(raised.value)


@pytest.mark.parametrize("check", [testing.assert_valid, testing.assert_resumes])
def test_what_has_no_numbers_is_refused(check):
    check = functools.partial(check, lambda x: x) if check is testing.assert_resumes else check
    buffer = few()
    with pytest.raises(ValueError, match="buffer is traced; call this with arrays, outside of"):
        jax.jit(check)(buffer)
    with pytest.raises(ValueError, match="buffer is a shape without numbers"):
        check(jax.eval_shape(lambda: buffer))
    with pytest.raises(ValueError, match="buffer is a dict, in which there is no buffer"):
        testing.assert_valid({"params": jnp.zeros(3)})
    jaxbuf.add(buffer, jnp.ones(1))
    with pytest.raises(ValueError, match="buffer was donated"):
        check(buffer)


def test_it_is_there_without_an_import_of_its_own():
    assert jaxbuf.testing.assert_valid is testing.assert_valid
    assert jaxbuf.interop.gymnax_step is importlib.import_module("jaxbuf.interop").gymnax_step
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = jaxbuf.nothing


# assert_holds


@functools.cache
def held_alike():
    """Buffers that hold the numbers 3 to 7, and nothing else."""
    number = jnp.float32(0)
    rows = jnp.arange(8.0)
    items = jaxbuf.ItemBuffer.create(number, 5)
    used = jaxbuf.ItemBuffer.create(number, 8, freshness=jaxbuf.Freshness(max_use=1)).add(rows)
    queue, _ = jaxbuf.Queue.create(number, 8).add(rows).take(3)
    early, late = jaxbuf.ItemBuffer.create(number, 5), jaxbuf.ItemBuffer.create(number, 5)
    rings = jaxbuf.TrajectoryBuffer.create(number, 2, 4, num_earliest_ignored=2)
    lowest = jaxbuf.ItemBuffer.create(number, 5, evictor=jaxbuf.Lowest())
    return {
        "wrapped": items.add(rows),
        "masked": items.add(jnp.arange(9.0), mask=(jnp.arange(9) > 2) & (jnp.arange(9) < 8)),
        "retired": used.mark_used(used.sample_range(jax.random.key(0), 3, 0, 3).slots),
        "taken": queue,
        "mixture": jaxbuf.Mixture.create([early.add(rows[3:5]), late.add(rows[5:])], [1, 1]),
        "lowest": lowest.add(rows, score=rows),
        "rings": rings.add(rows.reshape(2, 4), mask=rows.reshape(2, 4) > 2),
    }


@pytest.mark.parametrize("name", list(held_alike()))
def test_a_buffer_holds_what_was_added(name):
    buffer = held_alike()[name]
    testing.assert_holds(buffer, jnp.array([7.0, 3.0, 5.0, 4.0, 6.0]))
    kind = "steps" if name == "rings" else "items"
    for wrong, missing, beside in (
        ([7.0, 3.0, 5.0, 4.0], [], ["6.0"]),
        ([7.0, 3.0, 5.0, 4.0, 6.0, 2.0], ["2.0"], []),
        ([7.0, 3.0, 5.0, 5.0, 6.0], ["5.0"], ["4.0"]),
        ([7.0, 3.0, 1.0, 1.0, 1.0], ["3 × 1.0"], ["4.0", "5.0", "6.0"]),
        ([], [], ["3.0", "4.0", "5.0", "6.0", "7.0"]),
    ):
        title = f"buffer holds 5 {kind}, which are not the {len(wrong)} expected:"
        with says(title) as raised:
            testing.assert_holds(buffer, jnp.array(wrong, jnp.float32))
        found = {what: set() for what in ("missing", "not expected")}
        for line in str(raised.value).split("\n")[1:]:
            what, _, item = line.strip().partition(": ")
            found[what].add(item)
        if beside[4:]:
            assert "1 more" in found["not expected"]
            assert len(found["not expected"] & set(beside)) == 4
        else:
            assert found == {"missing": set(missing), "not expected": set(beside)}


def test_numbers_are_compared_bit_for_bit():
    buffer = jaxbuf.ItemBuffer.create({"x": jnp.zeros(2), "y": (jnp.int8(0),)}, 4)
    rows = {"x": jnp.array([[jnp.nan, 0.0], [1.0, jnp.inf]]), "y": (jnp.array([1, 2], jnp.int8),)}
    buffer = buffer.add(rows)
    testing.assert_holds(buffer, rows)
    testing.assert_holds(buffer, rows | {"x": rows["x"].at[0].multiply(-1)})
    near = jnp.nextafter(rows["x"], jnp.float32(2))
    with says("missing: {'x': [1.0000001"):
        testing.assert_holds(buffer, rows | {"x": near.at[0].set(rows["x"][0])})
    with says("missing: {'x': [nan, 0.0], 'y': (2,)}"):
        testing.assert_holds(buffer, rows | {"y": (jnp.array([2, 2], jnp.int8),)})


def test_items_must_be_like_the_buffers():
    buffer = held_alike()["wrapped"]
    with pytest.raises(ValueError, match="items has dtype int32; expected float32"):
        testing.assert_holds(buffer, jnp.arange(5))
    with pytest.raises(ValueError, match=r"items has shape \(5, 1\); expected \(n,\)"):
        testing.assert_holds(buffer, jnp.ones((5, 1)))
    several = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), buffer)
    with pytest.raises(ValueError, match="2 buffers side by side"):
        testing.assert_holds(several, jnp.arange(5.0))


# assert_distribution

PRIORITIES = jnp.array([1.0, 0.0, 3.0, 4.0])


@functools.cache
def laws():
    """Buffers, the law that each should have, and rows of a batch."""
    number = jnp.int32(0)

    def items(sampler, **options):
        return jaxbuf.ItemBuffer.create(number, 5, sampler=sampler).add(jnp.arange(4), **options)

    by_priority = {"priority": PRIORITIES}
    shares = [1 / 8, 0, 3 / 8, 4 / 8, 0]
    uniform = jaxbuf.Uniform()
    windows = jaxbuf.TrajectoryBuffer.create(number, 2, 4, sampler=jaxbuf.Balanced(), period=2)
    few = jnp.array([[True] * 4, [True] * 2 + [False] * 2])
    return {
        "uniform-distinct": (items(jaxbuf.Uniform(replacement=False)), [1 / 4] * 4 + [0], 2),
        "stratified": (items(jaxbuf.Prioritized(alpha=1.0), **by_priority), shares, 8),
        "windows": (
            windows.add(jnp.zeros((2, 4), jnp.int32), mask=few),
            [1 / 4, 1 / 4, 1 / 2, 0],
            2,
        ),
        "mixture": (
            jaxbuf.Mixture.create([items(uniform), items(jaxbuf.Recent(1.0, 1))], [3, 1]),
            [3 / 16] * 4 + [0] * 4 + [1 / 4, 0],
            4,
        ),
    }


@pytest.mark.parametrize("name", list(laws()))
def test_draws_have_their_law_and_no_other(name):
    buffer, law, batch_size = laws()[name]
    law, key = np.array(law), jax.random.key(0)
    check = functools.partial(testing.assert_distribution, draws=4000, batch_size=batch_size)
    check(buffer, key, law)
    some = np.flatnonzero(law)
    likely = some[law[some].argmax()]
    # A tenth of the most likely slot goes to another.
    other = some[0] if some[0] != likely else some[1]
    moved = law.copy()
    moved[[likely, other]] += np.array([-0.1, 0.1]) * law[likely]
    with says("does not draw as expected (p = ", f"slot {likely} was drawn", "expected"):
        check(buffer, key, moved)
    never = law.copy()
    never[other] = 0
    with says(f"slot {other} was drawn", "expected never"):
        check(buffer, key, never / never.sum())


def test_a_single_draw_of_a_slot_without_probability_is_one_too_many():
    buffer = jaxbuf.ItemBuffer.create(jnp.int32(0), 2, sampler=jaxbuf.Prioritized())
    buffer = buffer.add(jnp.arange(2), priority=jnp.array([0.0, 1.0]))
    with says("slot 1 was drawn 1 times of 1; expected never"):
        testing.assert_distribution(buffer, jax.random.key(0), np.array([1.0, 0.0]), draws=1)


def test_all_slots_of_a_large_buffer_are_counted():
    buffer = prioritized(rows=CAPACITY)
    law = np.full(CAPACITY, 1 / CAPACITY)
    check = functools.partial(testing.assert_distribution, buffer, jax.random.key(0), batch_size=4)
    # Fewer than five of each are expected, so that several slots are taken together.
    for draws in (200, 4000):
        check(law, draws=draws)
        half = law * np.where(np.arange(CAPACITY) < CAPACITY // 2, 0.5, 1.5)
        with says("does not draw as expected"):
            check(half, draws=draws)


def test_as_many_fail_as_the_significance_says():
    buffer = jaxbuf.ItemBuffer.create(jnp.int32(0), 5).add(jnp.arange(5))
    failures = 0
    for seed in range(200):
        try:
            testing.assert_distribution(
                buffer, jax.random.key(seed), np.full(5, 0.2), draws=300, significance=0.2
            )
        except AssertionError:
            failures += 1
    # About 40 of 200, and between 20 and 60 in 999 of 1,000 cases.
    assert 20 <= failures <= 60


def test_rows_that_are_invalid_are_no_draws():
    buffer = jaxbuf.ItemBuffer.create(jnp.int32(0), 2, sampler=jaxbuf.Uniform(replacement=False))
    with says("400 of 1200 rows are invalid; expected none"):
        testing.assert_distribution(
            buffer.add(jnp.arange(2)), jax.random.key(0), [0.5, 0.5], draws=400, batch_size=3
        )


def test_a_law_must_be_one():
    buffer, key = jaxbuf.ItemBuffer.create(jnp.int32(0), 2).add(jnp.arange(2)), jax.random.key(0)
    for law, options, message in (
        ([0.5, 0.5, 0.0], {}, r"expected has shape \(3,\); there are 2 slots"),
        ([0.5, 0.6], {}, "expected sums to 1.1, from 0.5 to 0.6; give probabilities that sum to 1"),
        ([1.5, -0.5], {}, "give probabilities"),
        ([np.nan, 1.0], {}, "give probabilities"),
        ([0.5, 0.5], {"draws": 8}, "draws is 8; too few to tell slots apart"),
        ([0.5, 0.5], {"draws": 0}, "draws is 0"),
        ([0.5, 0.5], {"significance": 1.0}, "significance is 1.0; expected a number between"),
    ):
        with pytest.raises(ValueError, match=message):
            testing.assert_distribution(buffer, key, law, **options)


# assert_no_copy


def add_then_sample(buffer, key):
    buffer = buffer.add(items())
    return buffer, buffer.sample(key, 32).data


def sample_then_add(buffer, key):
    batch = buffer.sample(key, 32)
    return buffer.add(items()), batch.data


def test_the_leaf_that_is_copied_is_named():
    def loop(buffer, keys):
        return jax.lax.scan(sample_then_add, buffer, keys)

    obs = "buffer.data['obs'] (112.0 KiB) is copied"
    with says(f"{obs} in each step of a loop", "add before you sample"):
        testing.assert_no_copy(loop, create(), KEYS)
    with says(obs, "donate the buffer"):
        testing.assert_no_copy(jax.jit(add_then_sample), create(), KEYS[0])
    with says("state['replay'].data['obs'] (112.0 KiB) is copied"):
        testing.assert_no_copy(
            lambda state: (state | {"replay": state["replay"].add(items())}, state["replay"].data),
            {"replay": create()},
        )


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.int32])
def test_a_copy_of_another_array_of_as_many_bytes_is_not_blamed_on_a_leaf(dtype):
    buffer = jaxbuf.ItemBuffer.create({"x": jnp.zeros(10, dtype)}, 1024)

    def step(buffer, weights):
        buffer = buffer.add({"x": jnp.ones((4, 10), dtype)})

        def loss(weights):
            return jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), None), jnp.ones((32, 32)), weights)[
                0
            ].sum()

        return buffer, jax.grad(loss)(weights)

    weights = jnp.ones((10, 32, 32))
    text = jax.jit(step, donate_argnums=0).lower(buffer, weights).compile().as_text()
    assert hlo.copies(text, weights.nbytes)
    testing.assert_no_copy(step, buffer, weights)
    assert jaxbuf.explain_memory(step, buffer, weights).advice == ""


def test_a_copy_of_another_dtype_is_not_blamed_on_a_leaf():
    buffer = jaxbuf.ItemBuffer.create(jnp.zeros(32, jnp.int32), 320)

    def step(buffer, table):
        return buffer.add(jnp.ones((4, 32), jnp.int32)), table.at[3].set(0.0)

    testing.assert_no_copy(step, buffer, jnp.ones((320, 32)))
    with says("b.data (40.0 KiB) is copied"):
        testing.assert_no_copy(lambda b, t: (step(b, t)[0], b.data), buffer, jnp.ones((320, 32)))


def test_a_copy_of_rings_with_merged_axes_is_found():
    rings = jaxbuf.TrajectoryBuffer.create(jnp.zeros(9), 4, 64, sequence_length=2)

    def step(rings, key):
        batch = rings.sample(key, 32)
        return rings.add(jnp.ones((4, 2, 9))), batch.data

    def scanned(rings, keys):
        return jax.lax.scan(step, rings, keys)

    with says("rings.data (9.0 KiB) is copied in each step of a loop"):
        testing.assert_no_copy(scanned, rings, jax.random.split(jax.random.key(0), 3))


def test_a_step_that_is_too_small_to_tell_is_refused():
    with pytest.raises(ValueError, match="buffer has no leaf of 1024 bytes or more"):
        testing.assert_no_copy(lambda buffer: buffer.add(jnp.ones(1)), prioritized(5, 9))


# assert_resumes


def test_a_checkpoint_that_loses_something_is_named(tmp_path, monkeypatch):
    buffer = prioritized(5, 9)
    monkeypatch.setattr(
        testing.steps, "load", lambda path, like: lossy(jaxbuf.load(path, like=like))
    )

    def lossy(buffer):
        return buffer.replace(data=buffer.data.at[3].set(jnp.nan))

    def step(buffer):
        return buffer.add(jnp.ones(1)), buffer.data[3]

    with says(
        "the run that was loaded after 2 of 4 steps ends in another way:",
        "buffer.data[3] is nan; expected 3.0, as without a checkpoint",
        "outputs[2][0] is nan; expected 3.0",
        "outputs[3][0] is nan",
    ):
        testing.assert_resumes(step, buffer, path=tmp_path)
    assert jaxbuf.load(tmp_path, like=buffer).size == 7


def test_what_is_kept_elsewhere_is_told_from_what_a_checkpoint_loses():
    count = []

    def step(buffer):
        count.append(0)
        return buffer.add(jnp.full(1, len(count), jnp.float32))

    with says("the step does not do the same each time, with or without", "buffer.data[5] is"):
        testing.assert_resumes(step, prioritized(5, 9))


def test_what_cannot_be_loaded_is_told():
    @chex.dataclass(frozen=True)
    class State:
        buffer: jaxbuf.ItemBuffer
        label: str

    def step(state):
        return state.replace(label="later")

    with says("a state after 2 steps does not load"):
        testing.assert_resumes(step, State(buffer=prioritized(5, 9), label="now"))


def test_a_run_has_two_steps_at_least():
    with pytest.raises(ValueError, match="steps is 1"):
        testing.assert_resumes(lambda buffer: buffer, prioritized(5, 9), steps=1)


def test_a_sampler_and_a_part_of_ones_own_are_asked_about_their_states():
    @dataclasses.dataclass(frozen=True)
    class Complaining(jaxbuf.Uniform):
        def init(self, capacity):
            return jnp.zeros(capacity)

        def check_valid(self, state, name, live, occupancy):
            yield f"{name} has {state.size} numbers for {int(live.sum())} items"

    @dataclasses.dataclass(frozen=True)
    class Also(jaxbuf.strategies.Part):
        def check_valid(self, state, name, live, data):
            yield f"{name} holds {data[live].tolist()}"

    for sampler in (Complaining(), jaxbuf.Recent(0.5, 3, Complaining())):
        buffer = jaxbuf.ItemBuffer.create(jnp.int32(0), 6, sampler=sampler, parts=(Also(),))
        with pytest.raises(AssertionError) as raised:
            testing.assert_valid({"it": buffer.add(jnp.arange(2))})
        assert str(raised.value).splitlines()[1:] == [
            "  buffer['it'].sampler_state has 6 numbers for 2 items",
            "  buffer['it'] holds [0, 1]",
        ]


def test_an_occupancy_of_ones_own_is_asked_about_its_items():
    class Complains(HalfRing):
        def check_items(self, name, live):
            yield f"{name} has {int(live.sum())} items"

    @dataclasses.dataclass(frozen=True)
    class Complaining(jaxbuf.strategies.Evictor):
        def init(self, capacity):
            return Complains(ring=Ring.create(capacity // 2), capacity=capacity)

    for parts, name in (((), "occupancy"), ((jaxbuf.Removable(),), "occupancy.inner")):
        buffer = jaxbuf.ItemBuffer.create(jnp.int32(0), 6, evictor=Complaining(), parts=parts)
        buffer = buffer.add(jnp.arange(2))
        with pytest.raises(AssertionError, match=rf"buffer\.{name} has 2 items"):
            testing.assert_valid(buffer)

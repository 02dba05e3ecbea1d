"""Parts that are defined here work in buffers that know nothing of them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbuf
from jaxbuf import testing
from jaxbuf.strategies import Part

ITEM = {"label": jnp.int32(0), "value": jnp.float32(0)}
STEP = {"x": jnp.float32(0), "terminated": jnp.bool_(False)}


@dataclasses.dataclass(frozen=True)
class CapPerClass(Part):
    """Holds at most ``cap`` items of each class."""

    cap: int
    reasons = ("refused_class_full",)

    def init(self, data, slots):
        return jnp.zeros(slots, jnp.int32)

    def refuse(self, state, rows, occupancy):
        label = rows.items["label"]
        live = occupancy.live(jnp.arange(state.size))
        held = jnp.sum(live[None] & (state[None] == label[:, None]), axis=1)
        same = rows.taken[None] & (label[None] == label[:, None])
        before = jnp.sum(jnp.tril(same, -1), axis=1)
        return {"refused_class_full": held + before >= self.cap}

    def on_add(self, state, index, rows):
        return state.at[index].set(rows.items["label"], mode="drop")

    def metrics(self, state, occupancy):
        live = occupancy.live(jnp.arange(state.size))
        return {"largest_label": jnp.max(jnp.where(live, state, -1))}


@dataclasses.dataclass(frozen=True)
class Removed(Part):
    """Counts what it hears has left."""

    of_windows = True

    def init(self, data, slots):
        return jnp.zeros(slots, jnp.int32)

    def on_remove(self, state, index):
        return state.at[index].add(1, mode="drop")


@dataclasses.dataclass(frozen=True)
class OnlyPositive(Part):
    """Draws no window whose last step has a negative ``x``."""

    reasons = ("refused_negative",)
    removes = True
    of_items = False
    of_windows = True

    def refuse(self, state, rows, occupancy):
        return {"refused_negative": rows.items["x"] < 0}


def labels(*values):
    return {"label": jnp.array(values), "value": jnp.zeros(len(values))}


def steps(*x):
    return {"x": jnp.array([x]), "terminated": jnp.zeros((1, len(x)), bool)}


def items(*parts, capacity=4, **options):
    return jaxbuf.ItemBuffer.create(ITEM, capacity, parts=parts, **options)


def rings(*parts, **options):
    return jaxbuf.TrajectoryBuffer.create(STEP, 1, 16, parts=parts, **options)


def changed(base, **attributes):
    return type(base.__name__, (base,), attributes)


def test_a_cap_per_class_lets_others_in_when_items_of_the_class_have_left():
    buffer, held = items(CapPerClass(2)), []
    for label, mask in (
        ([1, 1, 1, 2], [1, 1, 1, 1]),
        ([1, 1, 2, 3], [1, 0, 1, 1]),
        ([1, 1, 1, 1], [0, 1, 1, 1]),
        ([1, 2, 3, 3], [1, 1, 1, 1]),
    ):
        buffer = jaxbuf.add(buffer, labels(*label), mask=np.array(mask) > 0)
        held.append(sorted(np.asarray(buffer.data["label"])[np.asarray(buffer.live)].tolist()))
    # Whether there is room is asked before the rows of a call take the places of others.
    assert held == [[1, 1, 2], [1, 2, 2, 3], [1, 2, 2, 3], [1, 1, 3, 3]]
    assert int(buffer.metrics()["refused_class_full"]) == 6
    assert int(buffer.metrics()["largest_label"]) == 3
    testing.assert_valid(buffer)


def test_parts_are_asked_in_order_and_each_row_counts_once():
    buffer = items(
        CapPerClass(1),
        capacity=8,
        freshness=jaxbuf.Freshness(max_staleness=2),
        diversity=jaxbuf.Diversity(0.5, field="value"),
    )
    rows = labels(1, 1, 1, 2, 2) | {"value": jnp.array([0.0, 5.0, 9.0, 9.1, jnp.nan])}
    version = jnp.array([-9, 0, 0, 0, -9], jnp.int32)
    buffer = buffer.add(rows, score=jnp.array([9.0, 8.0, 7.0, 6.0, 5.0]), version=version)
    metrics = buffer.metrics().items()
    assert {k: int(v) for k, v in metrics if v and (k.startswith("re") or k == "adds")} == {
        "adds": 1,
        "refused_stale": 2,
        "refused_within_batch": 1,
        "refused_class_full": 1,
    }


def test_parts_hear_of_items_that_retire():
    buffer = items(Removed(), freshness=jaxbuf.Freshness(max_use=1, max_staleness=5))
    buffer = buffer.add(labels(0, 1, 2), version=jnp.array([0, 3, 0]))
    batch = buffer.latest(1)
    assert buffer.mark_used(batch.slots).extra_states[1].tolist() == [0, 0, 1, 0]
    assert buffer.set_version(6).extra_states[1].tolist() == [1, 0, 1, 0]


@dataclasses.dataclass(frozen=True)
class LastUse(jaxbuf.Freshness):
    """Lets items that are two versions old be used once more."""

    def on_use(self, state, index, taken):
        state, used = super().on_use(state, index, taken)
        version, _ = self.read(state, index)
        old = state.version - version >= 2
        return state, taken & (old if used is None else old | used)


def test_other_limits_derive_from_freshness():
    buffer = jaxbuf.ItemBuffer.create(jnp.int32(0), 7, parts=(LastUse(max_use=3),))
    assert buffer.freshness == LastUse(max_use=3)
    buffer, slots = buffer.insert(jnp.arange(4), version=jnp.array([0, 1, 2, 3]))
    buffer = jax.jit(lambda b: b.mark_used(slots).set_version(3).mark_used(slots))(buffer)
    held = buffer.latest(7)
    assert held.data[held.valid].tolist() == [2, 3]
    assert buffer.use_count(slots).tolist() == [0, 0, 2, 2]
    buffer = buffer.mark_used(slots)
    assert (int(buffer.size), int(buffer.metrics()["retired_used"])) == (0, 4)
    testing.assert_valid(buffer)


def test_a_part_refuses_windows():
    buffer = rings(OnlyPositive(), Removed(), sequence_length=2)
    buffer = buffer.add(steps(1.0, -2.0, 3.0, 4.0, -5.0))
    assert (int(buffer.num_windows), int(buffer.metrics()["refused_negative"])) == (2, 2)
    drawn = buffer.sample(jax.random.key(0), 64).data["x"].tolist()
    assert sorted({tuple(window) for window in drawn}) == [(-2.0, 3.0), (3.0, 4.0)]
    # The windows that begin at the two negative last steps, and the one that is not complete.
    assert buffer.extra_states[1].tolist() == [1, 0, 0, 1, 1, *[0] * 11]
    testing.assert_valid(buffer)


def test_every_part_may_stand_among_the_parts():
    limits, near = jaxbuf.Freshness(max_use=2), jaxbuf.Diversity(0.5)
    episodes = jaxbuf.Episodes(boundary="mask")
    for one, other in (
        (items(limits, near), items(freshness=limits, diversity=near)),
        (rings(episodes, limits), rings(episodes=episodes, freshness=limits)),
    ):
        assert jax.tree.structure(one) == jax.tree.structure(other)


REFUSED = [
    (
        lambda: jaxbuf.ItemBuffer.create(ITEM, 4, parts=CapPerClass(1)),
        r"parts is CapPerClass\(cap=1\); expected a tuple of parts",
    ),
    (lambda: items(3), r"parts\[0\] is 3; expected a part"),
    (
        lambda: items(jaxbuf.Freshness(), freshness=jaxbuf.Freshness()),
        "there are two parts Freshness; pass one of them",
    ),
    (lambda: items(OnlyPositive()), r"an ItemBuffer cannot have OnlyPositive\(\)"),
    (lambda: rings(CapPerClass(1)), r"a TrajectoryBuffer cannot have CapPerClass\(cap=1\)"),
    (lambda: items(CapPerClass(1), CapPerClass(2)), "'largest_label' is a metric of"),
    (
        lambda: items(changed(CapPerClass, reasons=())(1)).add(labels(0, 0)),
        "'refused_class_full' is counted; expected one of adds",
    ),
    (
        lambda: items(changed(CapPerClass, on_add=lambda self, s, *_: s[:2])(1)).add(labels(1)),
        r"returned an array int32\[2\]; expected int32\[4\]",
    ),
    # Hooks that are not called any more.
    *(
        (
            lambda name=name: items(changed(Removed, **{name: True})()),
            rf"Removed\(\) has {name}, .*; write .*{expected}",
        )
        for name, expected in (
            ("on_steps", "on_add"),
            ("refuse_windows", "rows.completed"),
            ("on_use", "a class that derives from jaxbuf.Freshness"),
            ("uses_version", "a class that derives from jaxbuf.Freshness"),
        )
    ),
    # Names that are taken.
    *(
        (
            lambda named=named: items(
                changed(CapPerClass, **named)(1), sampler=jaxbuf.Prioritized()
            ),
            message,
        )
        for named, message in (
            ({"reasons": "refused"}, "is 'refused'; expected a tuple of names"),
            ({"reasons": ("refused", 3)}, "expected a tuple of names"),
            ({"reasons": None}, "is None; expected a tuple of names"),
            ({"reasons": ("adds",)}, "has 'adds', which counts the rows that were added"),
            ({"reasons": ("size",)}, "'size' is a metric of the buffer and of a count of rows"),
            ({"reasons": ("effective_sample_size",)}, "'effective_sample_size' is a metric of"),
            ({"reasons": ("priority_max",)}, "'priority_max' is a metric of"),
            ({"reasons": ("largest_label",)}, "'largest_label' is a metric of a count of rows and"),
            ({"metrics": lambda *_: {"rejected": jnp.int32(0)}}, "'rejected' is a metric of"),
            ({"metrics": lambda *_: None}, "metrics of CapPerClass.* returned None; expected a d"),
        )
    ),
]


@pytest.mark.parametrize(("make", "message"), REFUSED)
def test_what_is_no_part_of_the_buffer_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def use(kind):
    """Calls all methods of a part or sampler of this class."""
    if issubclass(kind, Removed):
        rings(kind(), sequence_length=2).add(steps(1.0, 2.0, 3.0)).clear(jnp.array([0]))
    elif issubclass(kind, jaxbuf.Prioritized):
        buffer = jaxbuf.ItemBuffer.create(jnp.float32(0), 4, sampler=kind()).add(jnp.zeros(2))
        buffer.update_priority(buffer.latest(1).slots, jnp.ones(1))
    else:
        buffer = jaxbuf.add(items(kind(1)), labels(1, 2))
        buffer.set_version(1).mark_used(buffer.latest(1).slots)


@pytest.mark.parametrize(
    ("base", "method"),
    [
        *((LastUse, method) for method in ("on_use", "on_version", "on_retire")),
        *((CapPerClass, method) for method in ("on_add", "refuse")),
        *((Removed, method) for method in ("on_add", "on_remove")),
        *((jaxbuf.Prioritized, method) for method in ("on_change", "set_priority")),
    ],
)
def test_what_a_method_forgets_to_return_is_refused(base, method):
    bad = (None, None) if method == "on_use" else None
    kind = changed(base, **{method: lambda self, *_, **options: bad})
    with pytest.raises(ValueError, match=f"{method} of {base.__name__}.*returned None; expected"):
        use(kind)


@dataclasses.dataclass(frozen=True)
class Above(OnlyPositive):
    """Draws no window whose last step has an ``x`` above ``most``, for a shared reason."""

    most: float
    reasons = ("refused_negative", "rejected")
    reason: str = "refused_negative"

    def refuse(self, state, rows, occupancy):
        return {self.reason: rows.items["x"] > self.most}


@pytest.mark.parametrize("count", [1, 2])
def test_counts_of_one_reason_add_up(count):
    buffer = rings(OnlyPositive(), *(Above(5.0 - k) for k in range(count)))
    buffer = buffer.add(steps(*np.arange(-3.0, 9.0)))
    # 3 are negative, 6, 7 and 8 above 5, and 5 is above 4.
    assert int(buffer.metrics()["refused_negative"]) == 3 + 3 + (count - 1)
    assert int(buffer.metrics()["windows"]) == 12 - 6 - (count - 1)


def test_a_part_may_reject_beside_illegal_priorities():
    buffer = rings(Above(5.0, "rejected"), sampler=jaxbuf.Prioritized())
    x = np.arange(9.0)
    buffer = buffer.add(steps(*x), priority=jnp.where(x < 2, jnp.nan, 1.0)[None])
    assert int(buffer.metrics()["rejected"]) == 2 + 3


def test_counts_of_shards_are_sums_whatever_their_name():
    class Cap(CapPerClass):
        reasons = ("refused_max",)
        of_shards = True

        def refuse(self, *given):
            return {"refused_max": super().refuse(*given)["refused_class_full"]}

    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    buffer = jaxbuf.Sharded.create(lambda: items(Cap(1)), mesh, "d", shards=2)
    assert int(buffer.add(labels(1, 1, 1, 1)).metrics()["refused_max"]) == 2


def test_scores_of_sampler_and_evictor_share_their_metrics():
    buffer = items(CapPerClass(9), sampler=jaxbuf.Softmax(), evictor=jaxbuf.Lowest())
    buffer = buffer.add(labels(1, 2), score=jnp.array([3.0, 4.0]))
    assert float(buffer.metrics()["score_max"]) == 4

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


def test_a_cap_per_class_lets_others_in_when_items_of_the_class_have_left():
    buffer = jaxbuf.ItemBuffer.create(ITEM, 4, parts=(CapPerClass(2),))
    held = []
    for labels, mask in (
        ([1, 1, 1, 2], [1, 1, 1, 1]),
        ([1, 1, 2, 3], [1, 0, 1, 1]),
        ([1, 1, 1, 1], [0, 1, 1, 1]),
        ([1, 2, 3, 3], [1, 1, 1, 1]),
    ):
        items = {"label": np.array(labels, np.int32), "value": np.zeros(4, np.float32)}
        buffer = jaxbuf.add(buffer, items, mask=np.array(mask) > 0)
        held.append(sorted(np.asarray(buffer.data["label"])[np.asarray(buffer.live)].tolist()))
    # Whether there is room is asked before the rows of a call take the places of others.
    assert held == [[1, 1, 2], [1, 2, 2, 3], [1, 2, 2, 3], [1, 1, 3, 3]]
    assert int(buffer.metrics()["refused_class_full"]) == 6
    assert int(buffer.metrics()["largest_label"]) == 3
    testing.assert_valid(buffer)


def test_a_part_in_scan_and_vmap_and_after_clear():
    def step(buffer, label):
        return buffer.add({"label": label[None], "value": jnp.zeros(1)}), buffer.size

    labels = jnp.array([1, 1, 1, 2, 1, 2, 2], jnp.int32)
    empty = jaxbuf.ItemBuffer.create(ITEM, 5, parts=(CapPerClass(2),))
    buffer, sizes = jax.lax.scan(step, empty, labels)
    assert sizes.tolist() == [0, 1, 2, 2, 3, 3, 4]
    many = jax.tree.map(lambda leaf: jnp.stack([leaf] * 2), empty)
    _, batched = jax.jit(jax.vmap(lambda one: jax.lax.scan(step, one, labels)))(many)
    assert batched.tolist() == [sizes.tolist()] * 2
    again, _ = jax.lax.scan(step, buffer.clear(), labels)
    assert (int(again.size), int(again.metrics()["refused_class_full"])) == (4, 6)


def test_parts_are_asked_in_order_and_each_row_counts_once():
    buffer = jaxbuf.ItemBuffer.create(
        ITEM,
        8,
        freshness=jaxbuf.Freshness(max_staleness=2),
        diversity=jaxbuf.Diversity(0.5, field="value"),
        parts=(CapPerClass(1),),
    )
    items = {
        "label": jnp.array([1, 1, 1, 2, 2], jnp.int32),
        "value": jnp.array([0.0, 5.0, 9.0, 9.1, jnp.nan]),
    }
    version = jnp.array([-9, 0, 0, 0, -9], jnp.int32)
    buffer = buffer.add(items, score=jnp.array([9.0, 8.0, 7.0, 6.0, 5.0]), version=version)
    counts = {k: int(v) for k, v in buffer.metrics().items() if "re" in k[:3] or k == "adds"}
    assert counts == {
        "adds": 1,
        "rejected": 0,
        "refused_stale": 2,
        "refused_low_score": 0,
        "refused_within_batch": 1,
        "refused_near_buffer": 0,
        "refused_class_full": 1,
        "retired_used": 0,
        "retired_stale": 0,
    }


def test_parts_hear_of_items_that_retire():
    buffer = jaxbuf.ItemBuffer.create(
        ITEM, 4, freshness=jaxbuf.Freshness(max_use=1, max_staleness=5), parts=(Removed(),)
    )
    version = jnp.array([0, 3, 0], jnp.int32)
    buffer = buffer.add({"label": jnp.arange(3), "value": jnp.zeros(3)}, version=version)
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


@pytest.mark.parametrize("method", ["on_use", "on_version", "on_retire"])
def test_other_limits_must_return_a_state(method):
    bad = (None, None) if method == "on_use" else None
    part = type("Mine", (LastUse,), {method: lambda self, *_, **options: bad})(max_use=1)
    buffer = jaxbuf.ItemBuffer.create(jnp.int32(0), 7, parts=(part,)).add(jnp.arange(4))
    with pytest.raises(ValueError, match=f"{method} of Mine.*returned None; expected a new state"):
        buffer.set_version(1).mark_used(buffer.latest(1).slots)


def test_hooks_that_are_not_called_any_more_are_refused():
    for name, expected in (
        ("on_steps", "on_add"),
        ("refuse_windows", "rows.completed"),
        ("on_use", "a class that derives from jaxbuf.Freshness"),
        ("uses_version", "a class that derives from jaxbuf.Freshness"),
    ):
        part = type("Mine", (Removed,), {name: True})()
        with pytest.raises(ValueError, match=rf"Mine\(\) has {name}, .*; write .*{expected}"):
            jaxbuf.ItemBuffer.create(ITEM, 4, parts=(part,))


def test_a_part_refuses_windows():
    buffer = jaxbuf.TrajectoryBuffer.create(
        STEP, 1, 8, sequence_length=2, parts=(OnlyPositive(), Removed())
    )
    x = jnp.array([[1.0, -2.0, 3.0, 4.0, -5.0]])
    buffer = buffer.add({"x": x, "terminated": jnp.zeros((1, 5), bool)})
    assert (int(buffer.num_windows), int(buffer.metrics()["refused_negative"])) == (2, 2)
    drawn = buffer.sample(jax.random.key(0), 64).data["x"].tolist()
    assert sorted({tuple(window) for window in drawn}) == [(-2.0, 3.0), (3.0, 4.0)]
    # The windows that begin at the two negative last steps, and the one that is not complete.
    assert buffer.extra_states[1].tolist() == [1, 0, 0, 1, 1, 0, 0, 0]
    testing.assert_valid(buffer)


BAD = [
    ({"parts": CapPerClass(1)}, r"parts is CapPerClass\(cap=1\); expected a tuple of parts"),
    ({"parts": (3,)}, r"parts\[0\] is 3; expected a part"),
    (
        {"parts": (jaxbuf.Freshness(),), "freshness": jaxbuf.Freshness()},
        "there are two parts Freshness; pass one of them",
    ),
    ({"parts": (OnlyPositive(),)}, r"an ItemBuffer cannot have OnlyPositive\(\)"),
]


@pytest.mark.parametrize(("options", "message"), BAD)
def test_what_is_no_part_of_the_buffer_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        jaxbuf.ItemBuffer.create(ITEM, 4, **options)


def test_every_part_may_stand_among_the_parts():
    limits, near = jaxbuf.Freshness(max_use=2), jaxbuf.Diversity(0.5)
    assert jax.tree.structure(
        jaxbuf.ItemBuffer.create(ITEM, 4, parts=(limits, near))
    ) == jax.tree.structure(jaxbuf.ItemBuffer.create(ITEM, 4, freshness=limits, diversity=near))
    episodes = jaxbuf.Episodes(boundary="mask")
    step = {"terminated": jnp.bool_(False)}
    assert jax.tree.structure(
        jaxbuf.TrajectoryBuffer.create(step, 1, 4, parts=(episodes, limits))
    ) == jax.tree.structure(
        jaxbuf.TrajectoryBuffer.create(step, 1, 4, episodes=episodes, freshness=limits)
    )


def test_windows_need_parts_of_windows():
    with pytest.raises(ValueError, match=r"a TrajectoryBuffer cannot have CapPerClass\(cap=1\)"):
        jaxbuf.TrajectoryBuffer.create(STEP, 1, 4, parts=(CapPerClass(1),))


def test_reasons_are_declared():
    class Undeclared(CapPerClass):
        reasons = ()

    buffer = jaxbuf.ItemBuffer.create(ITEM, 4, parts=(Undeclared(1),))
    with pytest.raises(ValueError, match="'refused_class_full' is counted; expected one of adds"):
        buffer.add({"label": jnp.zeros(2, jnp.int32), "value": jnp.zeros(2)})


def labels(*values):
    return {"label": jnp.array(values), "value": jnp.zeros(len(values))}


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ({"reasons": "refused"}, "is 'refused'; expected a tuple of names"),
        ({"reasons": ("refused", 3)}, "expected a tuple of names"),
        ({"reasons": None}, "is None; expected a tuple of names"),
        ({"reasons": ("adds",)}, "has 'adds', which counts the rows that were added"),
        ({"reasons": ("size",)}, "'size' is a metric of the buffer and of a count of rows"),
        ({"reasons": ("effective_sample_size",)}, "'effective_sample_size' is a metric of"),
        ({"reasons": ("priority_max",)}, "'priority_max' is a metric of"),
        ({"reasons": ("largest_label",)}, "'largest_label' is a metric of a count of rows and"),
        ({"metrics": lambda *_: {"rejected": jnp.int32(0)}}, "'rejected' is a metric of"),
        ({"metrics": lambda *_: None}, "metrics of CapPerClass.* returned None; expected a dict"),
    ],
)
def test_names_that_are_taken_are_refused_when_created(named, message):
    part = type("CapPerClass", (CapPerClass,), named)(1)
    with pytest.raises(ValueError, match=message):
        jaxbuf.ItemBuffer.create(ITEM, 4, sampler=jaxbuf.Prioritized(), parts=(part,))


def test_two_parts_with_one_metric_are_refused():
    with pytest.raises(ValueError, match="'largest_label' is a metric of"):
        jaxbuf.ItemBuffer.create(ITEM, 4, parts=(CapPerClass(1), CapPerClass(2)))


@pytest.mark.parametrize(
    ("method", "call"),
    [
        ("on_add", lambda b: b.add(labels(1, 2))),
        ("on_add", lambda b: jaxbuf.add(b, labels(1, 2))),
        ("refuse", lambda b: b.add(labels(1, 2))),
    ],
)
def test_what_a_part_forgets_to_return_is_refused(method, call):
    part = type("CapPerClass", (CapPerClass,), {method: lambda self, *_: None})(1)
    buffer = jaxbuf.ItemBuffer.create(ITEM, 4, parts=(part,))
    with pytest.raises(ValueError, match=f"{method} of CapPerClass.*returned None; expected"):
        call(buffer)


def test_a_state_of_another_shape_or_dtype_is_refused():
    part = type("CapPerClass", (CapPerClass,), {"on_add": lambda self, state, *_: state[:2]})(1)
    with pytest.raises(ValueError, match=r"returned an array int32\[2\]; expected int32\[4\]"):
        jaxbuf.ItemBuffer.create(ITEM, 4, parts=(part,)).add(labels(1))


@pytest.mark.parametrize("method", ["on_add", "on_remove"])
def test_parts_of_windows_must_return_a_state(method):
    part = type("Removed", (Removed,), {method: lambda self, *_: None})()
    buffer = jaxbuf.TrajectoryBuffer.create(STEP, 2, 4, sequence_length=2, parts=(part,))
    step = {"x": jnp.zeros((2, 3)), "terminated": jnp.zeros((2, 3), bool)}
    with pytest.raises(ValueError, match=f"{method} of Removed.*returned None"):
        buffer.add(step).clear(jnp.array([0]))


@pytest.mark.parametrize("method", ["on_change", "set_priority"])
def test_samplers_must_return_a_state(method):
    sampler = type("Mine", (jaxbuf.Prioritized,), {method: lambda self, *_: None})()
    buffer = jaxbuf.ItemBuffer.create(jnp.float32(0), 4, sampler=sampler)
    with pytest.raises(ValueError, match=f"{method} of .*returned None"):
        buffer.add(jnp.zeros(2)).update_priority(buffer.latest(1).slots, jnp.ones(1))


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
    parts = (OnlyPositive(), *(Above(5.0 - k) for k in range(count)))
    buffer = jaxbuf.TrajectoryBuffer.create(STEP, 1, 16, parts=parts)
    x = jnp.arange(-3.0, 9.0)[None]
    buffer = buffer.add({"x": x, "terminated": jnp.zeros(x.shape, bool)})
    # 3 are negative, 6, 7 and 8 above 5, and 5 is above 4.
    assert int(buffer.metrics()["refused_negative"]) == 3 + 3 + (count - 1)
    assert int(buffer.metrics()["windows"]) == 12 - 6 - (count - 1)


def test_a_part_may_reject_beside_illegal_priorities():
    parts = (Above(5.0, "rejected"),)
    buffer = jaxbuf.TrajectoryBuffer.create(STEP, 1, 16, sampler=jaxbuf.Prioritized(), parts=parts)
    x = jnp.arange(9.0)[None]
    buffer = buffer.add(
        {"x": x, "terminated": jnp.zeros(x.shape, bool)},
        priority=jnp.where(x < 2, jnp.nan, 1.0),
    )
    assert int(buffer.metrics()["rejected"]) == 2 + 3


def test_counts_of_shards_are_sums_whatever_their_name():
    class Cap(CapPerClass):
        reasons = ("refused_max",)
        of_shards = True

        def refuse(self, *given):
            return {"refused_max": super().refuse(*given)["refused_class_full"]}

    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    buffer = jaxbuf.Sharded.create(
        lambda: jaxbuf.ItemBuffer.create(ITEM, 4, parts=(Cap(1),)), mesh, "d", shards=2
    )
    buffer = buffer.add(labels(1, 1, 1, 1))
    assert int(buffer.metrics()["refused_max"]) == 2


def test_scores_of_sampler_and_evictor_share_their_metrics():
    buffer = jaxbuf.ItemBuffer.create(
        ITEM, 4, sampler=jaxbuf.Softmax(), evictor=jaxbuf.Lowest(), parts=(CapPerClass(9),)
    )
    buffer = buffer.add(labels(1, 2), score=jnp.array([3.0, 4.0]))
    assert float(buffer.metrics()["score_max"]) == 4

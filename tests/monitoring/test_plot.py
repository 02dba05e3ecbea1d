"""`plot` draws what is there, of any buffer, and says why it cannot where it cannot."""

import dataclasses
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matplotlib.figure import Figure

import jaxbuf
from jaxbuf.strategies import Evictor, Ring
from tests.strategies.test_plug_in import HalfRing

KEY = jax.random.key(0)


def drawn(figure):
    """The axes by title, colorbars left out."""
    return {axes.get_title(): axes for axes in figure.axes if axes.get_title()}


def counted(axes):
    """Returns the number of values in a histogram."""
    return sum(int(patch.get_data().values.sum()) for patch in axes.patches)


def lines(axes):
    """The write positions in a map."""
    return [line.get_xdata()[0] for line in axes.lines if len(line.get_xdata())]


def test_all_there_is_of_an_item_buffer():
    buffer = jaxbuf.ItemBuffer.create(
        jnp.float32(0),
        50,
        sampler=jaxbuf.Prioritized(alpha=0.5, epsilon=0.25),
        freshness=jaxbuf.Freshness(max_use=2, max_staleness=9),
    )
    priority = jnp.concatenate([jnp.full(60, 0.5), jnp.full(10, 4.0)])
    buffer = jaxbuf.add(buffer, jnp.ones(70), priority=priority)
    use = jax.jit(lambda buffer: buffer.mark_used(buffer.sample(KEY, 40).slots).set_version(3))
    buffer = use(buffer)
    size = int(buffer.size)
    assert 0 < size < 50
    figure = jaxbuf.plot(buffer)
    assert isinstance(figure, Figure)
    axes = drawn(figure)
    assert list(axes) == ["age by slot", "ages", "priorities", "use counts", "staleness"]
    assert lines(axes["age by slot"]) == [20]
    for title in list(axes)[1:]:
        assert counted(axes[title]) == size
    low, high = axes["priorities"].patches[0].get_data().edges[[0, -1]]
    np.testing.assert_allclose([low, high], [0.5, 4.0], rtol=1e-5)
    shown = axes["age by slot"].images[0].get_array()
    live = np.asarray(buffer.occupancy.live(jnp.arange(50)))
    np.testing.assert_array_equal(~np.ma.getmaskarray(shown)[0], live)
    age = (19 - np.arange(50)) % 50
    np.testing.assert_array_equal(np.asarray(shown[0])[live], age[live])


def test_scores_and_arrivals():
    buffer = jaxbuf.reward_prioritized(jnp.float32(0), 10)
    score = jnp.arange(25.0)
    axes = drawn(jaxbuf.plot(jaxbuf.add(buffer, score, score=score)))
    assert list(axes) == ["age by slot", "ages", "scores"]
    assert counted(axes["scores"]) == 10
    assert lines(axes["age by slot"]) == []
    shown = np.asarray(axes["age by slot"].images[0].get_array())
    assert sorted(shown[0].tolist()) == list(range(10))
    softmax = jaxbuf.ItemBuffer.create(jnp.float32(0), 10, sampler=jaxbuf.Softmax())
    score = jnp.array([1.0, -jnp.inf, 2.0])
    axes = drawn(jaxbuf.plot(jaxbuf.add(softmax, score, score=score)))
    assert counted(axes["scores"]) == 2
    assert axes["scores"].get_xlabel() == "score (1 infinite left out)"
    assert counted(axes["ages"]) == 3


class Half(HalfRing):
    """Somebody's own slots, of which half are used; ``position`` is no place in a ring."""

    position = 0.5


class HalfInOrder(Half):
    keeps_order = True

    def age_range(self, start, stop):
        return self.ring.age_range(start, stop)


@dataclasses.dataclass(frozen=True)
class Own(Evictor):
    kind: type[HalfRing]

    def init(self, capacity):
        return self.kind(ring=Ring.create(capacity // 2), capacity=capacity)


def test_ages_are_drawn_only_where_they_are_known():
    for retires in (None, jaxbuf.Freshness(max_use=9)):
        options = {"evictor": Own(Half), "freshness": retires}
        own = jaxbuf.ItemBuffer.create(jnp.float32(0), 12, **options)
        own = own.add(jnp.arange(4.0)).add(jnp.arange(4.0))
        axes = drawn(jaxbuf.plot(own))
        assert list(axes) == ["items by slot", *(["use counts"] if retires else [])]
        assert lines(axes["items by slot"]) == []
        shown = ~np.ma.getmaskarray(axes["items by slot"].images[0].get_array())[0]
        assert np.flatnonzero(shown).tolist() == [*range(6)]
        # No colorbar: all colors are the same.
        assert len(jaxbuf.plot(own).axes) == len(axes)
    known = jaxbuf.ItemBuffer.create(jnp.float32(0), 12, evictor=Own(HalfInOrder))
    axes = drawn(jaxbuf.plot(known.add(jnp.arange(4.0)).add(jnp.arange(4.0))))
    assert list(axes) == ["age by slot", "ages"]
    shown = axes["age by slot"].images[0].get_array()[0]
    assert shown[:6].tolist() == [1, 0, 5, 4, 3, 2]


def test_rings_and_their_write_positions():
    buffer = jaxbuf.TrajectoryBuffer.create(
        {"obs": jnp.float32(0)}, 2, 10, sequence_length=3, sampler=jaxbuf.Prioritized()
    )
    mask = jnp.arange(14)[None] < jnp.array([[4], [14]])
    buffer = jaxbuf.add(buffer, {"obs": jnp.ones((2, 14))}, mask=mask)
    axes = drawn(jaxbuf.plot(buffer))
    assert list(axes) == ["age by place", "ages", "priorities"]
    assert lines(axes["age by place"]) == [4, 4]
    assert counted(axes["ages"]) == 14
    assert counted(axes["priorities"]) == 2 + 8
    shown = axes["age by place"].images[0].get_array()
    assert shown.filled(-1).astype(int).tolist() == [
        [3, 2, 1, 0, -1, -1, -1, -1, -1, -1],
        [3, 2, 1, 0, 9, 8, 7, 6, 5, 4],
    ]


@pytest.mark.slow
def test_queues_and_mixtures():
    queue = jaxbuf.add(jaxbuf.Queue.create(jnp.float32(0), 8), jnp.ones(6))
    queue, _ = jax.jit(lambda queue: queue.take(2))(queue)
    axes = drawn(jaxbuf.plot(queue))
    assert list(axes) == ["age by slot", "ages"]
    assert counted(axes["ages"]) == 4
    one, two = (jaxbuf.ItemBuffer.create(jnp.float32(0), n) for n in (3, 4))
    recent = jaxbuf.Recent(0.5, 2, base=jaxbuf.Prioritized())
    three = jaxbuf.ItemBuffer.create(jnp.float32(0), 4, sampler=recent)
    three = jaxbuf.add(three, jnp.ones(2))
    mixture = jaxbuf.Mixture.create([jaxbuf.Mixture.create([one, two], [1, 1]), three], [1, 1])
    figure = jaxbuf.plot(mixture)
    titles = [part.get_suptitle() for part in figure.subfigs]
    assert [title.partition(",")[0] for title in titles] == [
        "ItemBuffer: 0 of 3 items",
        "ItemBuffer: 0 of 4 items",
        "ItemBuffer: 2 of 4 items",
    ]
    assert "priorities" in drawn(figure)
    # A copy on the host is drawn alike.
    copy = jaxbuf.plot(jax.device_get(mixture))
    shown, alike = (
        [(axes.get_title(), counted(axes)) for axes in each.axes if axes.get_title()]
        for each in (figure, copy)
    )
    assert shown == alike
    assert figure._repr_png_().startswith(b"\x89PNG")


def test_large_buffers_are_binned():
    buffer = jaxbuf.ItemBuffer.create(jnp.int8(0), 2**20)
    buffer = jaxbuf.add(buffer, jnp.zeros(2**19 + 2**10, jnp.int8))
    axes = drawn(jaxbuf.plot(buffer))
    shown = axes["age by slot"].images[0].get_array()
    assert shown.shape == (1, 512)
    assert (~np.ma.getmaskarray(shown)).sum() == 257
    assert counted(axes["ages"]) == 2**19 + 2**10
    assert len(axes["ages"].patches[0].get_data().values) <= 41
    rings = jaxbuf.TrajectoryBuffer.create(jnp.int8(0), 100, 10)
    axes = drawn(jaxbuf.plot(jaxbuf.add(rings, jnp.zeros((100, 5), jnp.int8))))
    assert axes["age by place"].images[0].get_array().shape == (64, 10)


def test_priorities_of_zero_leave_a_logarithmic_axis():
    buffer = jaxbuf.ItemBuffer.create(jnp.float32(0), 8, sampler=jaxbuf.Prioritized())
    priority = jnp.float32([0, 1e-4, 1e-2, 1, 100, 0])
    axes = drawn(jaxbuf.plot(jaxbuf.add(buffer, jnp.ones(6), priority=priority)))["priorities"]
    assert axes.get_xscale() == "log"
    assert axes.get_xlabel() == "priority (2 of 0 left out)"
    assert counted(axes) == 4


def test_what_cannot_be_drawn():
    def create():
        return jaxbuf.ItemBuffer.create(jnp.float32(0), 4)

    buffer, mesh = create(), jax.make_mesh((1,), ("data",))
    sharded = jaxbuf.Sharded.create(create, mesh, "data", shards=2)
    for thing, message in (
        (jax.tree.map(lambda leaf: jnp.stack([leaf] * 3), buffer), "3 stacked ones; plot one of"),
        (jax.eval_shape(create), "expected one with contents"),
        ({}, "buffer is a dict; expected an ItemBuffer"),
        (jaxbuf.Hosted.create(create), r"buffer is a Hosted; .*; plot buffer\.buffer"),
        (sharded, r"buffer is a Sharded; .*; plot one shard: jax\.tree"),
    ):
        with pytest.raises(ValueError, match=message):
            jaxbuf.plot(thing)
    with pytest.raises(ValueError, match="traced, so it has no numbers yet; return it"):
        jax.jit(jaxbuf.plot)(buffer)
    jaxbuf.plot(jax.tree.map(lambda leaf: leaf[0], sharded.shards))
    jaxbuf.add(buffer, jnp.ones(2))
    with pytest.raises(ValueError, match="buffer was donated"):
        jaxbuf.plot(buffer)


def test_matplotlib_is_asked_for(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="plot needs matplotlib; install it with `pip install"):
        jaxbuf.plot(jaxbuf.ItemBuffer.create(jnp.float32(0), 4))


def test_axes_are_in_whole_units():
    rings = jaxbuf.TrajectoryBuffer.create(
        {"obs": jnp.float32(0)}, 2, 4, sequence_length=2, sampler=jaxbuf.Prioritized()
    )
    figure = jaxbuf.plot(jaxbuf.add(rings, {"obs": jnp.ones((2, 3))}))
    axes = drawn(figure)
    where, ages = axes["age by place"], axes["ages"]
    assert where.images[0].get_extent() == [0, 4, 1.5, -0.5]
    colors = next(other for other in figure.axes if other.get_ylabel() == "age")
    for ticks in (where.get_xticks(), ages.get_xticks(), ages.get_yticks(), colors.get_yticks()):
        np.testing.assert_array_equal(ticks, np.round(ticks))
    np.testing.assert_array_equal(ages.patches[0].get_data().edges, [-0.5, 0.5, 1.5, 2.5])
    assert ages.get_xlabel() == "age (steps added since)"
    assert (ages.get_ylabel(), axes["priorities"].get_ylabel()) == ("steps", "windows")
    assert not ages.lines
    assert len(axes["priorities"].lines) == 1


def test_ages_begin_at_zero_after_the_newest_have_retired():
    buffer = jaxbuf.ItemBuffer.create(jnp.float32(0), 8, freshness=jaxbuf.Freshness(max_use=1))
    buffer = buffer.add(jnp.ones(8))
    buffer = buffer.mark_used(
        jaxbuf.Slots(jnp.array([6, 7]), buffer.sample(KEY, 2).slots.generation)
    )
    axes = drawn(jaxbuf.plot(buffer))
    shown = axes["ages"].patches[0].get_data()
    assert shown.values.tolist() == [0, 0, 1, 1, 1, 1, 1, 1]
    assert shown.edges[0] == -0.5


def test_items_of_later_versions_than_the_learners_are_shown():
    buffer = jaxbuf.ItemBuffer.create(
        jnp.float32(0), 4, freshness=jaxbuf.Freshness(max_staleness=3)
    )
    buffer = buffer.add(jnp.ones(3), version=jnp.array([0, 1, 3]))
    shown = drawn(jaxbuf.plot(buffer))["staleness"].patches[0].get_data()
    assert shown.values.tolist() == [1, 0, 1, 1]
    np.testing.assert_array_equal(shown.edges, [-3.5, -2.5, -1.5, -0.5, 0.5])

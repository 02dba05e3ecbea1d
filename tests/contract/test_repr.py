"""The text that buffers print, in all contexts."""

import functools
import html
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

import jaxbuf
from jaxbuf.core import describe
from jaxbuf.core.sizes import format_bytes
from tests import operations

ITEM = {"obs": jnp.zeros((2, 3), jnp.uint8), "reward": jnp.float32(0)}
STEP = {"obs": jnp.zeros(3), "terminated": jnp.bool_(False)}


def items(capacity=2000, **options):
    return jaxbuf.ItemBuffer.create(ITEM, capacity, **options)


def trajectories():
    return jaxbuf.TrajectoryBuffer.create(
        STEP, 4, 100, sequence_length=8, period=2, episodes=jaxbuf.Episodes(boundary="avoid")
    )


def mixture():
    return jaxbuf.Mixture.create([items(30), items(10, sampler=jaxbuf.Prioritized())], [3, 1])


def queue():
    return jaxbuf.Queue.create(jnp.zeros((20, 3)), capacity=4)


def accumulator():
    return jaxbuf.EpisodeAccumulator.create(STEP, 4, max_length=20)


def limiter():
    return jaxbuf.RateLimiter.create(samples_per_insert=2.0, min_size=10)


def batch():
    return items().sample(jax.random.key(0), 8)


THINGS = [items, trajectories, mixture, queue, accumulator, batch]


def batched(buffer, axis=3):
    return jax.tree.map(lambda leaf: jnp.stack([leaf] * axis), buffer)


def test_an_item_buffer():
    sampler, freshness = jaxbuf.Prioritized(alpha=0.7), jaxbuf.Freshness(max_use=3)
    buffer = items(sampler=sampler, freshness=freshness)
    title, *lines = str(buffer).splitlines()
    memory = format_bytes(sum(leaf.nbytes for leaf in jax.tree.leaves(buffer)))
    assert title == f"ItemBuffer: {memory}"
    rows = dict(line.split(maxsplit=1) for line in lines if line[2] != " ")
    assert rows["data['obs']"] == "11.7 KiB  uint8[2000, 2, 3]"
    assert rows["data['reward']"] == "7.8 KiB  float32[2000]"
    assert "capacity=2000" in rows["occupancy"]
    text = " ".join(str(buffer).split())
    assert repr(sampler) in text
    assert repr(freshness) in text
    assert repr(buffer) == str(buffer)


QUEUE = """Queue: 984 B
  data       960 B  float32[4, 20, 3]
  occupancy   12 B  QueueRing(capacity=4)
  counters    12 B  uint32[3]"""
BATCH = """Sample: 184 B
  data['obs']     48 B  uint8[8, 2, 3]
  data['reward']  32 B  float32[8]
  slots           64 B  Slots
  probability     32 B  float32[8]
  valid            8 B  bool[8]"""
MANY = jaxbuf.ItemBuffer.create([jax.random.key(0), *[jnp.float32(0)] * 39], 3)


def test_a_queue_and_a_batch():
    assert (str(queue()), str(batch())) == (QUEUE, BATCH)


@pytest.mark.parametrize(
    ("thing", "texts"),
    [
        (
            trajectories(),
            ["TrajectoryBuffer: ", "length=100, sequence_length=8, period=2", "boundary='avoid'"],
        ),
        (mixture(), ["Mixture: 520 B parts[0] 320 B ItemBuffer", "ratios (0.75, 0.25)"]),
        (mixture(), ["data['obs'] 60 B uint8[10, 2, 3]"]),
        (batched(items(), 2), ["23.4 KiB uint8[2, 2000, 2, 3]"]),
        (MANY, ["key<fry>", "data[14] 12 B float32[3] ... and 25 more leaves occupancy"]),
        (accumulator(), ["flags"]),
        (jaxbuf.Statistics.create(items()), ["uint32[5]"]),
        (limiter(), ["min_size 10"]),
    ],
)
def test_what_it_says(thing, texts):
    said = " ".join(str(thing).split())
    for text in texts:
        assert text in said


@pytest.mark.parametrize("create", [*THINGS[:-1], limiter])
def test_nothing_is_computed(create):
    def look(thing):
        assert str(thing)
        assert thing._repr_html_()

    assert jax.make_jaxpr(look)(create()).eqns == []
    # Nothing is fetched from a device either: shapes and dtypes are enough for the same text.
    shapes = str(jax.eval_shape(create))
    assert shapes.replace(" (without contents)", "", 1) == str(create())


@pytest.mark.parametrize("create", THINGS)
def test_inside_transformations(create):
    buffer = create()
    seen = []

    def look(buffer):
        seen.append((str(buffer), buffer._repr_html_()))
        return buffer

    jax.vmap(look)(batched(buffer))
    jax.eval_shape(look, buffer)
    jax.eval_shape(jax.vmap(look), batched(buffer))
    jax.eval_shape(lambda x: jax.lax.scan(lambda x, _: (look(x), None), x, length=2), buffer)
    for text, page in seen:
        assert text.startswith(f"{type(buffer).__name__}: ")
        assert text.splitlines()[0].endswith(" (traced)")
        assert " (traced)</strong>" in page


@pytest.mark.parametrize("create", THINGS)
def test_without_arrays_in_it(create):
    buffer = create()
    assert "(without contents)" in str(jax.eval_shape(create))
    kind = type(buffer).__name__
    for leaf in (None, 0, "batch", object(), lambda: 0):
        other = jax.tree.map(lambda _, leaf=leaf: leaf, buffer)
        assert kind in str(other)
        assert kind in other._repr_html_()
    assert kind in str(jax.tree.map(lambda leaf: leaf.shape, buffer))
    assert kind in str(jax.tree.map(lambda _: jnp.float32(0), buffer))
    jax.jit(lambda x: jax.tree.map(lambda leaf: leaf, x), donate_argnums=0)(buffer)
    assert str(buffer).splitlines()[0].endswith("(gone: it was donated)")


class Picture(struct.PyTreeNode):
    pixels: jax.Array


OF_ANY_KIND = {name: functools.partial(operations.empty, name) for name in operations.BUFFERS} | {
    "items with one array": lambda: jax.eval_shape(
        lambda: jaxbuf.ItemBuffer.create(Picture(jnp.zeros(4)), 8)
    ),
    "a mixture of mixtures": lambda: jax.eval_shape(
        lambda: jaxbuf.Mixture.create([mixture(), mixture()], [1, 1])
    ),
}


@pytest.mark.parametrize("name", OF_ANY_KIND)
def test_a_copy_on_the_host_has_the_same_text(name):
    shapes = OF_ANY_KIND[name]()
    host = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)
    assert str(host) == str(shapes).replace(" (without contents)", "", 1)
    assert host._repr_html_() == describe.rich(host)
    stacked = jax.tree.map(lambda leaf: np.stack([leaf] * 2), host)
    assert str(stacked).splitlines()[0].startswith(type(host).__name__)


def test_no_line_is_wider_than_a_terminal():
    sampler = jaxbuf.Blend((jaxbuf.RankBased(by="score"), jaxbuf.Staleness()), (0.7, 0.3))
    item = {"a" * 40: {"b" * 40: jnp.zeros(3)}, "c": jnp.zeros((1,) * 40)}
    buffer = jaxbuf.ItemBuffer.create(item, 9, sampler=sampler, evictor=jaxbuf.Lowest())
    mixture = jax.eval_shape(lambda: jaxbuf.Mixture.create([buffer, buffer.clear()], [1, 1]))
    for made in (buffer, mixture):
        text = str(made)
        assert max(map(len, text.splitlines())) <= 100
        assert repr(sampler) in " ".join(text.split())
        assert f"data['{'a' * 12}...{'b' * 16}']" in text


def test_a_hosted_buffer_in_a_notebook():
    hosted = jaxbuf.Hosted.create(items)
    assert html.escape(str(hosted).splitlines()[-1]) in hosted._repr_html_()
    assert str(jax.device_get(hosted)) == str(hosted)


def test_a_notebook_gets_the_same_and_nothing_of_it_is_markup():
    page = jaxbuf.ItemBuffer.create({"<b>": jnp.zeros(2)}, 3)._repr_html_()
    assert page.startswith("<div><strong>ItemBuffer: ")
    assert "Uniform(replacement=True)" in page
    assert "data[&#x27;&lt;b&gt;&#x27;]" in page


def test_what_stands_around_a_shared_buffer():
    manager = pytest.importorskip("jaxbuf.mpi.manager").Manager.create(
        items(evictor=jaxbuf.Lowest()), 2
    )
    lines = [line.split() for line in str(manager).splitlines()]
    assert ["scores", "default_score"] in lines
    assert ["evictor", "Lowest()"] in lines


def test_it_is_quick():
    buffer = items()
    seconds = []
    for _ in range(10):
        begin = time.perf_counter()
        str(buffer)
        seconds.append(time.perf_counter() - begin)
    assert min(seconds) < 0.1

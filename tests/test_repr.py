"""What buffers say of themselves, wherever they are printed."""

import time

import jax
import jax.numpy as jnp
import pytest

import jaxbuf
from jaxbuf.core.sizes import format_bytes

ITEM = {"obs": jnp.zeros((2, 3), jnp.uint8), "reward": jnp.float32(0)}
STEP = {"obs": jnp.zeros(3), "terminated": jnp.bool_(False)}


def rows(count, example=None):
    return jax.tree.map(
        lambda leaf: jnp.ones((count, *leaf.shape), leaf.dtype),
        ITEM if example is None else example,
    )


def items(capacity=2000, **options):
    return jaxbuf.ItemBuffer.create(ITEM, capacity, **options)


def trajectories():
    return jaxbuf.TrajectoryBuffer.create(
        STEP, 4, 100, sequence_length=8, period=2, episodes=jaxbuf.Episodes(boundary="avoid")
    )


def mixture():
    return jaxbuf.Mixture.create([items(30), items(10, sampler=jaxbuf.Prioritized())], [3, 1])


BUFFERS = [items, trajectories, mixture, lambda: jaxbuf.Queue.create(ITEM, 4)]


def batched(buffer, axis=3):
    return jax.tree.map(lambda leaf: jnp.stack([leaf] * axis), buffer)


def test_an_item_buffer():
    sampler = jaxbuf.Prioritized(alpha=0.7)
    freshness = jaxbuf.Freshness(max_use=3)
    buffer = jaxbuf.add(items(sampler=sampler, freshness=freshness), rows(7))
    title, *lines = str(buffer).splitlines()
    memory = format_bytes(sum(leaf.nbytes for leaf in jax.tree.leaves(buffer)))
    assert title == f"ItemBuffer: 7 of 2,000 items, {memory}"
    assert [line.split()[0] for line in lines] == [
        "sampler",
        "evictor",
        "freshness",
        "data['obs']",
        "data['reward']",
    ]
    assert repr(sampler) in lines[0]
    assert repr(freshness) in lines[2]
    assert lines[3].split(maxsplit=1)[1] == "uint8[2, 3]  11.7 KiB"
    assert repr(buffer) == str(buffer)


def test_a_trajectory_buffer_and_a_queue():
    buffer = jaxbuf.add(trajectories(), rows(4, STEP))
    text = str(buffer)
    assert text.startswith("TrajectoryBuffer: 4 of 400 steps, ")
    assert "4 environments × 100 steps, windows of 8 every 2" in text
    assert "boundary='avoid'" in text
    queue = jaxbuf.Queue.create(jnp.zeros((20, 3)), capacity=4)
    queue = jaxbuf.add(queue, jnp.ones((3, 20, 3)))
    assert str(queue).splitlines() == [
        "Queue: 3 of 4 items, 984 B",
        "  data  float32[20, 3]  960 B",
    ]


def test_a_mixture_shows_its_parts():
    lines = str(mixture().add(rows(5), part=1)).splitlines()
    assert lines[0].startswith("Mixture: 5 of 40 items, ")
    assert lines[1].startswith("  75% ItemBuffer: 0 of 30 items, ")
    assert any(line.startswith("  25% ItemBuffer: 5 of 10 items, ") for line in lines)


def test_over_seeds():
    empty = items()
    full = jaxbuf.add(empty, rows(7), donate=False)
    some = jax.tree.map(lambda one, two: jnp.stack([one, two]), empty, full)
    assert str(some).startswith("2 × ItemBuffer: 0 to 7 of 2,000 items each, ")
    assert "uint8[2, 3]  23.4 KiB" in str(some)
    assert str(batched(trajectories())).startswith("3 × TrajectoryBuffer: 0 of 400 steps each, ")
    assert str(batched(mixture())).startswith("Mixture: 0 of 40 items each, ")


@pytest.mark.parametrize("create", BUFFERS)
def test_inside_transformations(create):
    buffer = create()
    seen = []

    def look(buffer):
        seen.append((str(buffer), buffer._repr_html_()))
        return buffer

    jax.jit(look)(buffer)
    jax.vmap(look)(batched(buffer))
    jax.jit(jax.vmap(look))(batched(buffer))
    jax.lax.scan(lambda carry, _: (look(carry), None), buffer, length=2)
    jax.eval_shape(look, buffer)
    kind, capacity = type(buffer).__name__, f"{buffer.capacity:,}"
    for text, page in seen:
        assert text.startswith(f"{kind}: up to {capacity} ")
        assert "(traced)" in text
        assert "(traced)" in page


@pytest.mark.parametrize("create", BUFFERS)
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


def test_after_donation():
    buffer = items()
    jaxbuf.add(buffer, rows(1))
    assert str(buffer).startswith("ItemBuffer: up to 2,000 items (gone: it was donated), ")


def test_many_leaves_are_cut():
    buffer = jaxbuf.ItemBuffer.create([jnp.float32(0)] * 40, 3)
    lines = str(buffer).splitlines()
    assert len(lines) == 3 + 16
    assert lines[-1].split() == ["...", "and", "25", "more", "leaves"]


def test_keys_are_leaves_as_others():
    assert "key<fry>" in str(jaxbuf.ItemBuffer.create({"key": jax.random.key(0)}, 3))


def test_a_notebook_gets_a_table_and_nothing_of_it_is_markup():
    page = jaxbuf.ItemBuffer.create({"<b>": jnp.zeros(2)}, 3)._repr_html_()
    assert page.startswith("<div><strong>ItemBuffer: 0 of 3 items, ")
    assert "<code>Uniform(replacement=True)</code>" in page
    assert "data[&#x27;&lt;b&gt;&#x27;]" in page
    assert page.count("<td") == page.count("</td>") == 6
    assert mixture()._repr_html_().count("<table>") == 2


def test_a_batch_shows_shapes_and_not_all_that_is_in_it():
    batch = jaxbuf.add(items(), rows(3)).sample(jax.random.key(0), 8)
    assert str(batch).splitlines() == [
        "Sample: 8 of 8 valid, 184 B",
        "  data['obs']       uint8[8, 2, 3]  48 B",
        "  data['reward']    float32[8]      32 B",
        "  slots.index       int32[8]        32 B",
        "  slots.generation  uint32[8]       32 B",
        "  probability       float32[8]      32 B",
        "  valid             bool[8]         8 B",
    ]
    assert str(items().sample(jax.random.key(0), 8)).startswith("Sample: 0 of 8 valid, ")
    assert batch._repr_html_().count("<td") == 12
    window = {"reward": jnp.zeros((5, 4)), "terminated": jnp.zeros((5, 4), bool)}
    assert str(jaxbuf.n_step(window, 2, 0.9)).splitlines()[0] == "NStep: 120 B"


def accumulator():
    return jaxbuf.EpisodeAccumulator.create(STEP, 4, max_length=20)


def test_an_accumulator_shows_its_books():
    lines = str(accumulator().add(rows(4, STEP))[0]).splitlines()
    # Four steps were added, and each ends an episode.
    assert lines[1:6] == [
        "  num_envs            4",
        "  max_length          20",
        "  flags               ('terminated',)",
        "  per_add             4",
        "  metrics             steps 0, waiting 0, episodes 4, cut 0, refused 0, dropped 0",
    ]
    assert [line.split()[0] for line in lines[6:]] == ["data['obs']", "data['terminated']"]
    chunks = jaxbuf.ChunkAccumulator.create(STEP, num_workers=2, fragments_per_chunk=4)
    assert "fragments_per_chunk    4" in str(chunks)


def test_limiters_and_statistics():
    limiter = jaxbuf.RateLimiter.create(samples_per_insert=2.0, min_size=10)
    assert "inserts 3, samples 0, error 6" in str(limiter.inserted(3))
    assert "window " in str(jaxbuf.ThroughputLimiter.create(inserts_per_sample=(1.0, 2.0)))
    lines = str(jaxbuf.Statistics.create(items())).splitlines()
    assert lines[0].startswith("Statistics: ")
    assert "  counters  uint32[6]        24 B" in lines
    # A single number is shown as it is.
    chunk = jaxbuf.Chunk(fragments=jnp.zeros((2,)), version=jnp.int32(3))
    assert "  version    3" in str(chunk).splitlines()


def test_what_stands_around_a_shared_buffer():
    manager = pytest.importorskip("jaxbuf.mpi.manager").Manager.create(
        items(evictor=jaxbuf.Lowest()), 2
    )
    lines = str(manager).splitlines()
    assert "  metrics   baseline -inf, batches 0, rows 0" in lines
    assert "  scores    default_score" in lines
    assert any(line.startswith("  buffer: ItemBuffer: 0 of 2,000 items, ") for line in lines)
    assert "    evictor         Lowest()" in lines


@pytest.mark.parametrize(
    "create",
    [accumulator, lambda: items().sample(jax.random.key(0), 4)],
    ids=["accumulator", "batch"],
)
def test_what_is_no_buffer_in_any_state(create):
    thing = create()
    seen = []
    jax.jit(lambda x: seen.append(str(x)) or x)(thing)
    jax.vmap(lambda x: seen.append(str(x)) or x)(batched(thing))
    seen.append(str(jax.eval_shape(create)))
    assert ["(traced)" in text for text in seen] == [True, True, False]
    assert "(without contents)" in seen[2]
    for leaf in (None, 0, "batch", object()):
        other = jax.tree.map(lambda _, leaf=leaf: leaf, thing)
        assert type(thing).__name__ in str(other)
        assert type(thing).__name__ in other._repr_html_()
    jax.jit(lambda x: jax.tree.map(lambda leaf: leaf, x), donate_argnums=0)(thing)
    assert str(thing).splitlines()[0].endswith("(gone: it was donated)")


def test_it_is_quick():
    buffer = items()
    str(buffer)
    begin = time.perf_counter()
    for _ in range(10):
        str(buffer)
    assert (time.perf_counter() - begin) / 10 < 0.1

"""`jaxbuf.Sharded`: what needs no devices here, and a process that has eight for the rest."""

import os
import re
import subprocess
import sys

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxbuf
from jaxbuf.core.versions import takes_option
from jaxbuf.strategies import mass
from jaxbuf.strategies.prioritized import MassSummary
from jaxbuf.wrappers.sharded import exchange
from jaxbuf.wrappers.sharded.exchange import local_order
from tests.operations import quick

S, N = 4, 16
# Collectives of eight devices on few cores may wait for each other for long.
PATIENT = [
    "xla_cpu_collective_call_terminate_timeout_seconds",
    "xla_cpu_collective_timeout_seconds",
]


def mesh():
    return jax.make_mesh((1,), ("data",))


def make(sampler=None, **options):
    sampler = sampler or jaxbuf.Prioritized(alpha=1.0)
    return lambda: jaxbuf.ItemBuffer.create({"at": jnp.int32(0)}, N, sampler=sampler, **options)


@pytest.fixture(scope="module")
def buffer():
    buffer = jaxbuf.Sharded.create(make(), mesh(), "data", shards=S)
    priority = np.arange(S * N, dtype=np.float32) % 7
    return jaxbuf.add(buffer, {"at": np.arange(S * N, dtype=np.int32)}, priority=priority)


@pytest.mark.parametrize("tests", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_on_eight_devices(tests):
    """Runs `sharded_on_devices.py`, since the number of devices is fixed when jax begins."""
    patient = (f"--{name}=300" for name in PATIENT if takes_option(name, 300))
    flags = " ".join([os.environ.get("XLA_FLAGS", ""), *patient])
    given = os.environ | {"JAX_NUM_CPU_DEVICES": "8", "XLA_FLAGS": flags}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", tests]
    options = {"env": given, "capture_output": True, "text": True, "timeout": 900, "check": False}
    done = subprocess.run([*command, "tests/programs/sharded_on_devices.py"], **options)
    assert done.returncode == 0, done.stdout[-10_000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


@pytest.mark.parametrize("count", quick([1, 3, 8], {3}))
def test_rows_stay_with_their_shard_as_far_as_they_can(count):
    rng = np.random.default_rng(count)
    for odds in (None, [1.0] + [0.0] * (count - 1)):
        shard = rng.choice(count, 6 * count, p=odds).astype(np.int32)
        source = np.asarray(local_order(shard, count))
        assert sorted(source) == list(range(len(shard)))
        want = np.full((count, 6), -1)
        own = [list(np.flatnonzero(shard == k)) for k in range(count)]
        for k in range(count):
            want[k, : len(own[k][:6])] = own[k][:6]
        want = want.reshape(-1)
        want[want < 0] = [row for rows in own for row in rows[6:]]
        np.testing.assert_array_equal(source, want)


@pytest.mark.parametrize("limit", [2**32, 0])
def test_more_shards_than_rows_of_each(monkeypatch, limit):
    """Beside rows put in place one by one; sorted by packed words, and as pairs."""
    monkeypatch.setattr(exchange, "_MOST_PACKED", limit)
    rng, count = np.random.default_rng(0), 300
    shard = np.sort(rng.integers(0, count, 2 * count)).astype(np.int32)
    rng.shuffle(shard[count:])
    own = [list(np.flatnonzero(shard == k)) for k in range(count)]
    spare = [row for rows in own for row in rows[2:]]
    want = [row for rows in own for row in (*rows[:2], *[-1] * (2 - len(rows)))]
    want = [spare.pop(0) if row < 0 else row for row in want]
    np.testing.assert_array_equal(local_order(shard, count), want)


@pytest.mark.parametrize(
    "sampler", [jaxbuf.Prioritized(), jaxbuf.Prioritized(uniform_mix=0.1), jaxbuf.Uniform()]
)
def test_a_draw_takes_no_memory_for_each_row_and_shard(sampler):
    count, rows = 512, 4096
    one = jax.eval_shape(make(sampler))
    summary = jax.eval_shape(sampler.summarize, one.sampler_state, one.occupancy)
    known = jax.tree.map(lambda x: jax.ShapeDtypeStruct((count,), x.dtype), summary)

    def draw(known, key):
        drawn = sampler.targets(known, key, rows, 2**24)
        return drawn.shard, drawn.point, local_order(drawn.shard, count)

    compiled = jax.jit(draw).lower(known, jax.random.key(0)).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < count * rows


def test_no_shard_without_mass_is_drawn_from_however_sums_are_rounded(monkeypatch):
    monkeypatch.setattr(
        mass.jnp, "cumsum", lambda x, axis=0, dtype=None: lax.associative_scan(jnp.add, x)
    )
    sampler = jaxbuf.Prioritized(alpha=1.0)

    @jax.jit
    def drawn_from(total, key):
        nothing = jnp.zeros(total.shape, jnp.int32)
        summaries = MassSummary(total, total, total, nothing, nothing)
        return sampler.targets(summaries, key, 256, 1000).shard

    @jax.jit
    def wrong(total):
        """Returns True if the sums themselves would give a shard without mass a place."""
        sums = lax.associative_scan(jnp.add, total)
        return jnp.any((jnp.diff(sums, prepend=0.0) > 0) & (total == 0))

    rng = np.random.default_rng(0)
    unguarded = 0
    for case in range(300):
        total = np.where(rng.random(37) < 0.5, 0, rng.lognormal(0, 3, 37)).astype(np.float32)
        unguarded += bool(wrong(total))
        assert (total[drawn_from(total, jax.random.key(case))] > 0).all()
    assert unguarded


def test_a_single_shard_draws_what_the_buffer_draws():
    alone = make()()
    one = jaxbuf.Sharded.create(make(), mesh(), "data")
    items, priority = {"at": jnp.arange(N)}, jnp.arange(float(N))
    alone, one = (b.add(items, priority=priority) for b in (alone, one))
    chex.assert_trees_all_equal(
        jaxbuf.sample(alone, jax.random.key(3), 8), jaxbuf.sample(one, jax.random.key(3), 8)
    )


def test_metrics_are_those_of_all_shards(buffer):
    got = jax.device_get(buffer.metrics())
    priority = np.arange(S * N) % 7
    assert got["size"] == S * N
    assert got["adds"] == S * N
    assert got["rejected"] == 0
    assert got["priority_min"] == 0
    assert got["priority_max"] == 6
    np.testing.assert_allclose(got["priority_mean"], priority.mean(), rtol=1e-6)
    cleared = buffer.clear()
    assert int(cleared.size) == 0
    assert not cleared.can_sample()
    assert int(cleared.metrics()["adds"]) == S * N


@pytest.mark.parametrize("normalize", quick(["batch", "buffer", "mean", None], {"buffer", "mean"}))
def test_importance_weights_by_their_definition(buffer, normalize):
    batch = jaxbuf.sample(buffer, jax.random.key(0), 16, beta=0.4, normalize=normalize)
    got = jaxbuf.importance_weights(buffer, batch, 0.4, normalize)
    np.testing.assert_array_max_ulp(batch.weights, got, 2)
    mass = np.arange(S * N) % 7
    p = mass[np.asarray(batch.data["at"])] / mass.sum()
    weight = (S * N * p) ** -0.4
    if normalize == "batch":
        weight /= weight.max()
    elif normalize == "buffer":
        weight /= (S * N / mass.sum()) ** -0.4
    elif normalize == "mean":
        weight = ((mass > 0).sum() * p) ** -0.4
    np.testing.assert_allclose(got, weight, rtol=2e-6)


def test_without_exchange_the_probability_is_that_of_equal_parts():
    buffer = jaxbuf.Sharded.create(make(), mesh(), "data", shards=S, exchange=False)
    buffer = buffer.add({"at": jnp.arange(8)}, priority=jnp.array([1.0, 3.0] * 4))
    # Each shard has two items, and gives a quarter of a batch.
    assert (bool(buffer.can_sample(8)), bool(buffer.can_sample(12))) == (True, False)
    batch = buffer.sample(jax.random.key(0), 16)
    share = np.where(batch.data["at"] % 2, 3 / 4, 1 / 4)
    np.testing.assert_allclose(batch.probability, share / S, rtol=1e-6)


class Foreign(jaxbuf.strategies.Sampler):
    """A sampler of one's own that draws from single buffers only."""

    def draw(self, state, key, batch_size, occupancy):
        raise NotImplementedError


def with_(**options):
    given = {"make": make(), "mesh": mesh(), "axis": "data"} | options
    return lambda: jaxbuf.Sharded.create(
        given.pop("make"), given.pop("mesh"), given.pop("axis"), **given
    )


REFUSED = {
    "axis": (with_(axis="model"), "axis is 'model', but the mesh has"),
    "mesh": (with_(mesh=jax.devices()), "mesh is a list"),
    "exchange": (with_(exchange=1), "exchange is 1"),
    "shards": (with_(shards=0), "shards is 0"),
    "make": (with_(make=make()()), "make is .*ItemBuffer; expected a function that creates one"),
    "queue": (with_(make=lambda: jaxbuf.Queue.create(jnp.int32(0), 4)), "make gives a Queue"),
    "recent": (with_(make=make(jaxbuf.Recent(0.5, 4))), "data alone is sharded"),
    "distinct": (with_(make=make(jaxbuf.Uniform(replacement=False))), "data alone is sharded"),
    "distinct-2": (with_(make=make(jaxbuf.Prioritized(replacement=False))), "with replacement"),
    "softmax": (with_(make=make(jaxbuf.Softmax(replacement=False))), "with replacement"),
    "ranked": (with_(make=make(jaxbuf.RankBased())), "data alone is sharded"),
    "blend": (
        with_(make=make(jaxbuf.Blend((jaxbuf.Prioritized(), jaxbuf.Uniform()), (1, 1)))),
        "data alone is sharded",
    ),
    "lowest": (with_(make=make(evictor=jaxbuf.Lowest())), r"Lowest\(\) compares each"),
    "diversity": (
        with_(make=make(jaxbuf.Softmax(), diversity=jaxbuf.Diversity(0.5, field="at"))),
        "looks at all items.*data alone is sharded",
    ),
    "part": (with_(make=make(parts=(jaxbuf.strategies.Part(),))), "looks at all items"),
    "foreign": (with_(make=make(Foreign())), "must derive from jaxbuf.strategies.ShardableSampler"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_sharded_is_refused_with_what_to_do(name):
    create, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        create()


@pytest.mark.parametrize("count", [1, 6])
def test_padded_rows_fill_all_shards_as_the_error_says(count, buffer):
    buffer = buffer.clear()
    with pytest.raises(ValueError, match="let the shards take turns") as error:
        jaxbuf.add(buffer, {"at": np.arange(count, dtype=np.int32)})
    said = re.search(r"pad to (\d+) .* roll .* by t % (\d+) \* (\d+) rows", str(error.value))
    rows, shards, each = map(int, said.groups())
    model = [[] for _ in range(S)]
    for t in range(20):
        at = np.roll(np.arange(t * rows, (t + 1) * rows, dtype=np.int32), t % shards * each)
        mask = np.roll(np.arange(rows) < count, t % shards * each)
        buffer = jaxbuf.add(buffer, {"at": at}, mask=mask)
        for k in range(S):
            model[k] += at.reshape(S, -1)[k][mask.reshape(S, -1)[k]].tolist()
        sizes = [min(len(shard), N) for shard in model]
        told = jax.device_get(buffer.metrics())
        assert (told["shard_size_min"], told["shard_size_max"]) == (min(sizes), max(sizes))
        # In each round of turns, all shards get as many rows.
        assert (t + 1) % S or len(set(sizes)) == 1
    assert sum(sizes) == min(20 * count, S * N)
    for k, row in enumerate(np.asarray(buffer.shards.data["at"])):
        assert set(row[: sizes[k]].tolist()) == set(model[k][-N:])


def test_rows_of_rings_that_do_not_divide():
    rings = jaxbuf.Sharded.create(
        lambda: jaxbuf.TrajectoryBuffer.create(jnp.int32(0), 2, 4), mesh(), "data", shards=S
    )
    with pytest.raises(ValueError, match=r"or pad to 8 .* put these into different shards"):
        rings.add(jnp.arange(6))
    rings = rings.add(jnp.arange(8), mask=~np.isin(np.arange(8), [5, 7]))
    told = jax.device_get(rings.metrics())
    assert (told["shard_size_min"], told["shard_size_max"], told["size"]) == (1, 2, 6)


def test_rows_that_do_not_divide_are_refused(buffer):
    for call in (
        lambda: buffer.sample(jax.random.key(0), 6),
        lambda: buffer.add({"at": jnp.arange(6)}),
        lambda: buffer.update_priority(
            jaxbuf.Slots(jnp.zeros(6, jnp.int32), jnp.zeros(6, jnp.uint32)), jnp.ones(6)
        ),
    ):
        with pytest.raises(ValueError, match="multiple of 4, such as 4"):
            call()
    with pytest.raises(ValueError, match=r"batch_size is 6, but there are 4 shards; .* as 4$"):
        buffer.sample(jax.random.key(0), 6)
    for call in (buffer.mark_used, buffer.use_count, buffer.staleness):
        with pytest.raises(ValueError, match=r"freshness=jaxbuf\.Freshness"):
            call(jaxbuf.Slots(jnp.zeros(4, jnp.int32), jnp.zeros(4, jnp.uint32)))
    with pytest.raises(ValueError, match=r"freshness=jaxbuf\.Freshness"):
        buffer.set_version(1)
    with pytest.raises(ValueError, match="expected a row for each"):
        buffer.add({"at": jnp.int32(0)})
    with pytest.raises(ValueError, match=r"priority has shape \(6,\); expected \(8,\)"):
        buffer.add({"at": jnp.arange(8)}, priority=jnp.ones(6))
    with pytest.raises(ValueError, match="items has no arrays"):
        buffer.add({})
    with pytest.raises(ValueError, match="env_ids was given"):
        buffer.add({"at": jnp.arange(8)}, env_ids=jnp.arange(8))


def test_shards_without_a_chance_are_not_counted():
    def one():
        return jaxbuf.ItemBuffer.create(jnp.float32(0), 4, sampler=jaxbuf.Softmax())

    score = jnp.array([0.0, 0.0, 500.0, 500.0])
    many = jaxbuf.Sharded.create(one, mesh(), "data", shards=2).add(jnp.zeros(4), score=score)
    alone = one().add(jnp.zeros(4), score=score)
    assert int(many.support().count) == int(alone.support().count) == 2
    assert many.can_sample(2)
    assert not many.can_sample(3)


def test_a_point_at_the_end_of_all_shards_lies_in_the_last_one_with_mass():
    end = mass.ends(jnp.array([1.0, 2.0, 0.0, 0.0]))
    shard, _ = mass.interval_of(end, jnp.array([0.0, 1.0, 3.0, 4.0]))
    assert shard.tolist() == [0, 1, 1, 1]

"""`jaxbuf.Sharded` on eight devices; `test_sharded.py` runs this in a process of its own.

`make test` runs what is not marked with ``ALL``.
"""

import collections
import contextlib
import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding

import jaxbuf
from jaxbuf import testing
from jaxbuf.wrappers.sharded import exchange

S, N = 8, 32
ALL = pytest.mark.slow
PLAIN = jaxbuf.Prioritized(alpha=1.0)
P = jax.P
ITEM = {"at": jnp.int32(0), "obs": jnp.zeros(3), "end": jnp.bool_(False), "big": jnp.bfloat16(0)}
_rng = np.random.default_rng(0)
# Shard 0 holds twenty times as much as the others, shard 5 nothing, and a tenth of all is zero.
PRIORITY = _rng.lognormal(0, 1, (S, N)).astype(np.float32)
PRIORITY[0] *= 20
PRIORITY[5] = 0
PRIORITY[_rng.random((S, N)) < 0.1] = 0
PRIORITY = PRIORITY.reshape(-1)


def mesh_of(devices, kind=AxisType.Auto, **more):
    shape, names = (devices, *more.values()), ("data", *more)
    chosen = jax.devices()[: np.prod(shape)]
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(shape), devices=chosen)


def make(sampler=PLAIN, n=N, **options):
    return lambda: jaxbuf.ItemBuffer.create(ITEM, n, sampler=sampler, **options)


def create(devices, n=N, shards=S, sampler=PLAIN, **options):
    one = make(sampler, n, **options)
    return jaxbuf.Sharded.create(one, mesh_of(devices), "data", shards=shards)


def rows(at):
    at = jnp.asarray(at, jnp.int32)
    obs = jnp.stack([at.astype(jnp.float32)] * 3, axis=1)
    return {"at": at, "obs": obs, "end": at % 3 == 0, "big": (at % 256).astype(jnp.bfloat16)}


def check_rows(batch):
    """Each row is whole."""
    chex.assert_trees_all_equal(batch.data, rows(batch.data["at"]))


def filled(mesh, sampler=PLAIN, exchange=True, **options):
    one = make(sampler, **options)
    buffer = jaxbuf.Sharded.create(one, mesh, "data", shards=S, exchange=exchange)
    given = {"priority": PRIORITY} if sampler.uses_priority else {}
    if sampler.uses_score:
        given = {"score": np.log(np.maximum(PRIORITY, 1e-30))}
    return jaxbuf.add(buffer, rows(np.arange(S * N)), **given)


def step(buffer, items, key):
    """Everything once, and a sample before and after."""
    first = buffer.sample(key, 64)
    buffer = buffer.add(items, mask=items["at"] % 5 > 0)
    priority = first.data["obs"][:, 0] % 7 + 0.5
    buffer = buffer.update_priority(first.slots, priority, mask=first.valid)
    second = buffer.sample(jax.random.fold_in(key, 1), 64, beta=0.5, normalize="buffer")
    weights = [
        jaxbuf.importance_weights(buffer, second, 0.5, normalize)
        for normalize in ("batch", "buffer", "mean", None)
    ]
    return buffer, first, second, jnp.stack(weights, axis=1)


def run(function, buffer):
    """Returns the results of a program of its own: tests change what is traced."""
    items = rows(1000 + np.arange(16))
    return jax.jit(lambda *args: function(*args))(buffer, items, jax.random.key(1))


@pytest.fixture(scope="module")
def expected():
    return jax.device_get(run(step, filled(mesh_of(8))))


# All are compared with eight devices at once; the changes below are at once on one and on four.
@pytest.mark.parametrize(
    ("devices", "at_once"),
    [
        pytest.param(1, False, marks=ALL),
        pytest.param(2, True, marks=ALL),
        (4, False),
        pytest.param(8, False, marks=ALL),
    ],
)
def test_the_number_of_devices_changes_nothing(monkeypatch, expected, devices, at_once):
    if not at_once:
        monkeypatch.setattr(exchange, "_SINGLE_STEP_BYTES", 0)
    got = jax.device_get(run(step, filled(mesh_of(devices))))
    for have, want in zip(got, expected, strict=True):
        for x, y in zip(jax.tree.leaves(have), jax.tree.leaves(want), strict=True):
            if x.dtype == np.float32:
                np.testing.assert_allclose(x, y, rtol=3e-7, atol=0)
            else:
                np.testing.assert_array_equal(x, y)
    assert got[1].valid.all()
    check_rows(got[1])
    check_rows(got[2])


SAMPLERS = {
    "stratified": jaxbuf.Prioritized(alpha=1.0),
    "alone": jaxbuf.Prioritized(alpha=0.7, stratified=False),
    "mixed": jaxbuf.Prioritized(alpha=1.0, uniform_mix=0.2),
    "uniform": jaxbuf.Uniform(),
    "softmax": jaxbuf.Softmax(temperature=1.5),
}


def law(sampler):
    """The probability of each item, from the definition."""
    if isinstance(sampler, jaxbuf.Uniform):
        return np.full(S * N, 1 / (S * N))
    if isinstance(sampler, jaxbuf.Softmax):
        mass = np.maximum(PRIORITY, 1e-30).astype(np.float64) ** (1 / sampler.temperature)
        return mass / mass.sum()
    mass = np.where(PRIORITY > 0, PRIORITY.astype(np.float64) ** sampler.alpha, 0)
    return (1 - sampler.uniform_mix) * mass / mass.sum() + sampler.uniform_mix / (S * N)


@ALL
@pytest.mark.parametrize("name", SAMPLERS)
def test_shards_are_drawn_from_exactly_as_one_buffer(name):
    sampler, p = SAMPLERS[name], law(SAMPLERS[name])
    buffer, key = filled(mesh_of(8), sampler), jax.random.key(7)
    testing.assert_distribution(buffer, key, p, draws=500, batch_size=512)
    batch = jaxbuf.sample(buffer, key, 512)
    np.testing.assert_allclose(batch.probability, p[batch.slots.index], rtol=3e-6)
    np.testing.assert_array_equal(batch.data["at"], batch.slots.index)


def masses(buffer):
    return np.asarray(jax.vmap(lambda shard: shard.sampler_state.leaves)(buffer.shards))


def test_numbers_vary_alike_in_all_shards():
    varying = {"alpha": jaxbuf.Varying(1.0), "uniform_mix": jaxbuf.Varying(1.0)}
    buffer = filled(mesh_of(8), jaxbuf.Prioritized(**varying))
    slots = jaxbuf.Slots(np.arange(S * N, dtype=np.int32), np.ones(S * N, np.uint32))
    spec = P("data")
    mapped = jax.jit(
        jax.shard_map(
            lambda buffer, x: buffer.set_hyperparameters(uniform_mix=x),
            mesh=buffer.mesh,
            in_specs=(spec, P()),
            out_specs=spec,
            check_vma=False,
        )
    )
    p = 0.75 * PRIORITY / PRIORITY.sum() + 0.25 / (S * N)
    for changed in (
        jaxbuf.set_hyperparameters(buffer, uniform_mix=0.25, donate=False),
        mapped(buffer, jnp.float32(0.25)),
    ):
        np.testing.assert_allclose(changed.get(slots).probability, p, rtol=1e-4)
        assert changed.hyperparameters == {"alpha": 1, "uniform_mix": 0.25}


@ALL
@pytest.mark.parametrize(
    ("nbytes", "batch_size", "rows"),
    # The whole of a small batch, a megabyte of larger rows, and as many as a device keeps.
    [(4, 4096, 4096), (2**14, 256, 64), (2**18, 256, 32)],
)
def test_a_round_brings_a_megabyte_or_as_many_rows_as_a_device_keeps(nbytes, batch_size, rows):
    item = jax.ShapeDtypeStruct((nbytes // 4,), jnp.float32)
    buffer = jaxbuf.Sharded.create(
        lambda: jaxbuf.ItemBuffer.create(item, 2, sampler=PLAIN), mesh_of(8), "data"
    )
    draw = jax.jit(lambda buffer, key: buffer.sample(key, batch_size))
    text = draw.lower(buffer, jax.random.key(0)).compile().as_text()
    [sent] = re.findall(r"= (.*?) all-to-all(?:-start)?\(", text)
    shapes = [[int(n) for n in dims.split(",")] for dims in re.findall(r"\[(.*?)\]", sent)]
    # With each row go its slot and its probability.
    assert sum(np.prod(shape) for shape in shapes) == rows * (nbytes // 4 + 3)


def test_a_new_item_gets_the_largest_priority_of_all_shards():
    buffer = filled(mesh_of(8))
    before = masses(buffer)
    buffer = jaxbuf.add(buffer, rows(np.arange(16)), mask=np.arange(16) == 6)
    after = masses(buffer)
    assert after[3, 0] == PRIORITY.max()
    assert (after != before).sum() <= 1
    buffer = jaxbuf.add(buffer, rows(np.arange(16)), mask=np.zeros(16, bool))
    np.testing.assert_array_equal(masses(buffer), after)
    roots = jax.vmap(lambda shard: shard.sampler_state.root("max"))(buffer.shards)
    np.testing.assert_array_equal(roots, after.max(axis=1))


STEP = {"x": jnp.float32(0), "terminated": jnp.bool_(False), "truncated": jnp.bool_(False)}


def windows(num_envs, episodes=None):
    return jaxbuf.TrajectoryBuffer.create(
        STEP, num_envs, 8, sequence_length=3, sampler=PLAIN, episodes=episodes
    )


@pytest.mark.parametrize(
    "episodes",
    [
        pytest.param(None, marks=ALL),
        jaxbuf.Episodes(boundary="avoid", short_windows="ended"),
    ],
)
def test_windows_get_the_largest_priority_of_all_shards(episodes):
    """Also if their own is refused, or if the end of an episode completes them."""
    steps = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (16, 4)), STEP)
    priority = np.ones((16, 4), np.float32)
    priority[0, 3] = 100
    refused = priority.copy()
    refused[6] = np.nan
    one = windows(16, episodes)
    ring = functools.partial(windows, 2, episodes)
    many = jaxbuf.Sharded.create(ring, mesh_of(8), "data")
    for given in (priority, refused):
        one, many = (jaxbuf.add(buffer, steps, priority=given) for buffer in (one, many))
    if episodes is not None:
        one, many = (jaxbuf.end_episodes(buffer, np.arange(3, 9)) for buffer in (one, many))
    expected = np.asarray(one.sampler_state.leaves)
    assert (expected == 100).sum() > 4
    np.testing.assert_array_equal(masses(many).reshape(-1), expected)
    roots = jax.vmap(lambda shard: shard.sampler_state.root("max"))(many.shards)
    np.testing.assert_array_equal(roots, masses(many).max(axis=1))


@ALL
def test_freshness_is_that_of_each_shard_and_metrics_are_of_all():
    limits = jaxbuf.Freshness(max_use=5, max_staleness=4)
    buffer = create(4, freshness=limits)
    rng, learner = np.random.default_rng(0), 0
    for turn in range(6):
        version = (learner - rng.integers(0, 6, 8 * S)).astype(np.int32)
        mask = rng.random(8 * S) < 0.7
        buffer = jaxbuf.add(buffer, rows(np.arange(8 * S)), version=version, mask=mask)
        learner += turn % 2
        buffer = buffer.set_version(learner)
        batch = jaxbuf.sample(buffer, jax.random.key(turn), 64)
        assert batch.valid.all()
        buffer = buffer.mark_used(batch.slots)
        told = jax.device_get(buffer.metrics())
        each = jax.device_get(jax.vmap(lambda shard: shard.metrics())(buffer.shards))
        for name in ("size", "retired_used", "retired_stale", "refused_stale"):
            assert told[name] == each[name].sum()
        for name in ("use_max", "staleness_max"):
            assert told[name] == each[name].max()
        mean = np.average(each["use_mean"], weights=each["size"])
        np.testing.assert_allclose(told["use_mean"], mean, rtol=1e-6)
        assert told["version"] == learner
    assert min(told[name] for name in ("retired_used", "retired_stale", "refused_stale")) > 20
    assert int(buffer.set_version(0, 1).size) == 0


@ALL
def test_metrics_of_shards_without_items_do_not_count():
    buffer = create(8, freshness=jaxbuf.Freshness(max_use=9))
    # The only item is of a version ahead of the learner's, in the second shard.
    ahead = jnp.full(8, 5, jnp.int32)
    buffer = jaxbuf.add(buffer, rows(np.arange(8)), version=ahead, mask=np.arange(8) == 1)
    assert int(buffer.metrics()["staleness_max"]) == -5
    buffer = filled(mesh_of(8), jaxbuf.Softmax())
    nothing = np.where(np.arange(S * N) == 3, -np.inf, 1.0).astype(np.float32)
    buffer = jaxbuf.add(buffer, rows(np.arange(S * N)), score=nothing)
    assert float(buffer.metrics()["score_min"]) == -np.inf


@ALL
@pytest.mark.parametrize("infinite", [(), (3,), (3, 5)])
def test_a_mean_of_scores_that_are_not_finite(infinite):
    score = np.ones(S * N, np.float32)
    score[list(infinite)] = [np.inf, -np.inf][: len(infinite)]
    one = make(jaxbuf.Softmax(), S * N)()
    many = create(8, sampler=jaxbuf.Softmax())
    means = [
        float(jaxbuf.add(buffer, rows(np.arange(S * N)), score=score).metrics()["score_mean"])
        for buffer in (one, many)
    ]
    assert means[0] == means[1] == (np.inf if len(infinite) == 1 else len(infinite) == 0)


def collectives(text):
    """Returns the collectives of a program by kind, and the most elements that one handles."""
    found, most = collections.Counter(), 0
    kinds = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
    for shape, kind in re.findall(rf"= (.*?) ({kinds})(?:-start)?\(", text):
        found[kind] += 1
        sizes = [
            np.prod([int(n) for n in dims.split(",") if n])
            for dims in re.findall(r"\[(.*?)\]", shape)
        ]
        most = max([most, *sizes])
    return found, most


LARGE = 4096
OF_FRESHNESS = {"mark_used", "set_version", "use_count"}


SENT = {
    "step": {"all-gather": 3, "all-to-all": 1, "all-reduce": 1},
    "add": {"all-gather": 1},
    "add with priority": {},
    "sample": {"all-gather": 1, "all-to-all": 1},
    "sample without exchange": {"all-gather": 1},
    "update_priority": {"all-gather": 1},
    "set_field": {"all-gather": 1},
    "mark_used": {"all-gather": 1},
    "set_version": {},
    "use_count": {"all-gather": 1, "all-reduce": 1},
}


@pytest.mark.parametrize(
    ("what", "devices"),
    [
        ("step", 8),
        *(pytest.param(what, 8, marks=ALL) for what in [*SENT][1:]),
        *(pytest.param(what, 1, marks=ALL) for what in SENT),
    ],
)
def test_little_travels_and_nothing_is_copied(what, devices):
    mesh, example = mesh_of(devices), {"obs": jnp.zeros(2), "action": jnp.int32(0)}
    buffer = jaxbuf.Sharded.create(
        lambda: jaxbuf.ItemBuffer.create(
            example,
            LARGE,
            sampler=jaxbuf.Prioritized(),
            freshness=jaxbuf.Freshness(4, 4) if what in OF_FRESHNESS else None,
        ),
        mesh,
        "data",
        shards=devices,
        exchange=what != "sample without exchange",
    )
    spread = NamedSharding(mesh, P("data"))

    def like(*shape, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=spread)

    items = {"obs": like(64, 2), "action": like(64, dtype=jnp.int32)}
    priority, key = like(64), jax.random.key(0)
    slots = jaxbuf.Slots(like(64, dtype=jnp.int32), like(64, dtype=jnp.uint32))

    def step(buffer, items):
        buffer = buffer.add(items)
        batch = buffer.sample(key, 64)
        loss = jnp.mean(batch.data["obs"])
        return buffer.update_priority(batch.slots, jnp.abs(batch.data["obs"][:, 0])), loss

    function, args = {
        "add": (lambda buffer, items: buffer.add(items), (items,)),
        "add with priority": (lambda buffer, x, p: buffer.add(x, priority=p), (items, priority)),
        "sample": (lambda buffer, key: (buffer, buffer.sample(key, 64)), (key,)),
        "sample without exchange": (lambda buffer, key: (buffer, buffer.sample(key, 64)), (key,)),
        "update_priority": (lambda buffer, s, p: buffer.update_priority(s, p), (slots, priority)),
        "set_field": (lambda buffer, s, x: buffer.set_field("obs", s, x), (slots, items["obs"])),
        "mark_used": (lambda buffer, slots: buffer.mark_used(slots), (slots,)),
        "set_version": (lambda buffer, version: buffer.set_version(version), (jnp.int32(3),)),
        "use_count": (lambda buffer, slots: (buffer, buffer.use_count(slots)), (slots,)),
        "step": (step, (items,)),
    }[what]
    compiled = jax.jit(function, donate_argnums=0).lower(buffer, *args).compile()
    found, most = collectives(compiled.as_text())
    if devices > 1:
        assert found == SENT[what]
    else:
        assert set(found) <= {"all-gather", "all-reduce"}
    assert most < LARGE
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(buffer)) // devices
    # An update computes the roots anew, without a look at them.
    assert compiled.memory_analysis().alias_size_in_bytes >= held - 16
    copies = re.findall(r"= \w+\[([\d,]+)\]\S* copy\(", compiled.as_text())
    # In the loop that retires stale items, that of a buffer alone copies its tree, too.
    assert what == "set_version" or all(
        np.prod([int(n) for n in dims.split(",")]) < LARGE for dims in copies
    )


@pytest.mark.parametrize("kind", [AxisType.Auto, pytest.param(AxisType.Explicit, marks=ALL)])
def test_weights_lie_where_their_rows_do(kind):
    buffer = filled(mesh_of(4, kind))
    batch = jaxbuf.sample(buffer, jax.random.key(1), 64, beta=0.5, within="part")
    assert batch.weights.sharding.spec == batch.probability.sharding.spec == P("data")


@ALL
@pytest.mark.parametrize(
    ("kind", "axes", "active"),
    [
        (AxisType.Auto, {}, True),
        (AxisType.Auto, {"model": 2}, False),
        (AxisType.Explicit, {"model": 2}, True),
    ],
)
def test_any_mesh(expected, kind, axes, active):
    mesh = mesh_of(8 // axes.get("model", 1), kind, **axes)
    with jax.set_mesh(mesh) if active else contextlib.nullcontext():
        got = run(step, filled(mesh))
    np.testing.assert_array_equal(got[2].data["at"], expected[2].data["at"])
    assert got[2].probability.sharding.spec == P("data")


@ALL
def test_inside_of_a_shard_map_as_it_comes(monkeypatch, expected):
    monkeypatch.setattr(exchange, "_SINGLE_STEP_BYTES", 0)
    mesh = mesh_of(4)

    def inside(buffer, items, number):
        # Keys may differ; the first counts.
        key = jax.random.fold_in(jax.random.key(1), number[0])
        key = jax.lax.select(number[0] == 0, jax.random.key(1), key)
        out = step(buffer, items, key)
        buffer = out[0]
        metrics = buffer.clear().size + buffer.size, buffer.can_sample(3)[None], buffer.metrics()
        return out, jax.tree.map(jnp.atleast_1d, metrics)

    mapped = jax.shard_map(inside, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    args = rows(1000 + np.arange(16)), jnp.arange(4)
    (buffer, first, second, weights), metrics = jax.jit(mapped)(filled(mesh), *args)
    chex.assert_trees_all_equal(first.data, expected[1].data)
    chex.assert_trees_all_equal(second.slots, expected[2].slots)
    np.testing.assert_allclose(weights, expected[3], rtol=1e-6)
    chex.assert_trees_all_close(buffer.shards, expected[0].shards, rtol=1e-6)
    assert metrics[0].tolist() == [S * N] * 4
    assert metrics[1].all()


@ALL
@pytest.mark.parametrize("exchanges", [True, False])
def test_what_is_the_same_on_all_devices_leaves_a_shard_map_as_it_is(exchanges):
    sampler = jaxbuf.Prioritized(alpha=jaxbuf.Varying(1.0))
    buffer = filled(mesh_of(4), sampler, exchange=exchanges)

    def read(buffer):
        whole = buffer.metrics(), buffer.support(), buffer.can_sample(3)
        return *whole, buffer.hyperparameters, buffer.size

    mapped = jax.shard_map(read, mesh=mesh_of(4), in_specs=P("data"), out_specs=P())
    chex.assert_trees_all_close(jax.jit(mapped)(buffer), read(buffer), rtol=1e-6)


def changes(buffer, items, key):
    """Every change of what is stored, of items that lie on other devices than their rows."""
    batch = buffer.sample(key, 64)
    buffer, slots = buffer.insert(items, mask=items["at"] % 5 > 0)
    value = batch.data["obs"] + 1000.0
    buffer = buffer.set_field("obs", batch.slots, value, mask=batch.data["at"] % 3 > 0)
    buffer = buffer.remove(batch.slots, mask=batch.data["at"] % 7 == 0)
    buffer = buffer.map_field("big", twice, batch_size=16)
    return buffer, slots, buffer.get(batch.slots), buffer.holds(batch.slots)


REMOVABLE = {"parts": (jaxbuf.Removable(),)}


def twice(items):
    return items["big"] * 2


@pytest.fixture(scope="module")
def changed():
    return jax.device_get(run(changes, filled(mesh_of(8), **REMOVABLE)))


@ALL
@pytest.mark.parametrize(
    ("devices", "at_once", "inside"),
    [(1, True, False), (4, True, False), (4, True, True), (8, False, False)],
)
def test_changes_reach_items_on_any_device(monkeypatch, changed, devices, at_once, inside):
    """Inside of a shard_map, too."""
    if not at_once:
        monkeypatch.setattr(exchange, "_SINGLE_STEP_BYTES", 0)
    mesh, function = mesh_of(devices), changes
    if inside:
        specs = P("data"), P("data"), P()
        function = jax.shard_map(changes, mesh=mesh, in_specs=specs, out_specs=P("data"))
    got = jax.device_get(run(function, filled(mesh, **REMOVABLE)))
    chex.assert_trees_all_close(
        (got[0].shards, *got[1:]), (changed[0].shards, *changed[1:]), rtol=3e-7
    )
    _, slots, found, held = got
    np.testing.assert_array_equal(held, found.valid)
    assert 0 < held.sum() < 64
    new = (1000 + np.arange(16)) % 5 > 0
    np.testing.assert_array_equal(slots.index < S * N, new)
    data = jax.tree.map(lambda leaf: leaf[held], found.data)
    expected = rows(data["at"])["obs"] + np.where(data["at"] % 3 > 0, 1000.0, 0.0)[:, None]
    overwritten = data["at"] >= 1000
    np.testing.assert_array_equal(data["obs"][~overwritten], expected[~overwritten])


def test_without_exchange_an_empty_shard_gives_invalid_rows():
    empty = jaxbuf.Sharded.create(make(), mesh_of(8), "data", exchange=False)
    half = jaxbuf.add(empty, rows(np.arange(8)), mask=np.arange(8) < 4)
    batch = jaxbuf.sample(half, jax.random.key(0), 16)
    assert batch.valid.tolist() == [True] * 8 + [False] * 8
    assert batch.slots.index[8:].tolist() == [S * N] * 8
    assert not half.can_sample(1)
    assert int(half.support().count) == 4


@ALL
@pytest.mark.parametrize("at_once", [True, False])
def test_empty_and_underfull(monkeypatch, at_once):
    if not at_once:
        monkeypatch.setattr(exchange, "_SINGLE_STEP_BYTES", 0)
    draw = jax.jit(lambda buffer: buffer.sample(jax.random.key(0), 16))
    buffer = create(8)
    batch = draw(buffer)
    assert not batch.valid.any()
    assert not batch.probability.any()
    assert not buffer.can_sample()
    assert (np.asarray(batch.slots.index) == S * N).all()
    # One item in all, with and without mass.
    for priority in (3.0, 0.0):
        given = {"priority": jnp.full(8, priority), "mask": np.arange(8) == 6}
        batch = draw(jaxbuf.add(buffer, rows(np.arange(8)), **given, donate=False))
        assert batch.valid.all()
        assert set(batch.data["at"].tolist()) == {6}
        assert (batch.probability == 1).all()
        assert set(batch.slots.index.tolist()) == {6 * N}


@ALL
def test_seeds_scans_and_gradients():
    buffer = filled(mesh_of(8))
    keys = jax.random.split(jax.random.key(0), 3)
    many = jax.jit(jax.vmap(lambda key: buffer.sample(key, 16)))(keys)
    one = jaxbuf.sample(buffer, keys[1], 16)
    chex.assert_trees_all_equal(jax.tree.map(lambda leaf: leaf[1], many).slots, one.slots)

    def loss(obs, key):
        batch = buffer.add(rows(np.arange(8)) | {"obs": obs}).sample(key, 16)
        return jnp.sum(batch.data["obs"] * batch.probability[:, None]), batch

    obs = jnp.ones((8, 3))
    (_, batch), grad = jax.jit(jax.value_and_grad(loss, has_aux=True))(obs, keys[0])
    batch = jax.device_get(batch)
    want = np.zeros(8)
    new = batch.slots.index % N == 0
    np.add.at(want, batch.data["at"][new], batch.probability[new])
    assert new.any()
    np.testing.assert_allclose(grad, np.stack([want] * 3, axis=1), rtol=1e-6)


def test_storage_stays_where_it_is():
    buffer = create(8)

    def places(buffer):
        leaf = buffer.shards.data["obs"]
        return [shard.data.unsafe_buffer_pointer() for shard in leaf.addressable_shards]

    before, old = places(buffer), buffer
    buffer = jaxbuf.add(buffer, rows(np.arange(16)))
    batch = jaxbuf.sample(buffer, jax.random.key(0), 16)
    buffer = jaxbuf.update_priority(buffer, batch.slots, jnp.ones(16))
    assert places(buffer) == before
    with pytest.raises(ValueError, match="donated"):
        jaxbuf.add(old, rows(np.arange(16)))


def held(buffer):
    """The numbers of the items of each shard from the oldest on, and the mass or score of each."""
    found, shards = [], jax.device_get(buffer.shards)
    for k in range(buffer.num_shards):
        shard = jax.tree.map(lambda leaf, k=k: leaf[k], shards)
        position, size = int(shard.occupancy.cursor), int(shard.occupancy.held)
        slots = (position - size + np.arange(size)) % shard.capacity
        state = shard.sampler_state
        tree = state.scores if isinstance(shard.sampler, jaxbuf.Softmax) else state
        found.append((shard.data["at"][slots].tolist(), np.asarray(tree.leaves)[slots].tolist()))
    return found


@ALL
@pytest.mark.parametrize(
    ("name", "sizes"),
    [("stratified", [(16, 5, 8), (1, 160, 1)]), ("softmax", [(4, 100, 4)])],
)
def test_another_number_of_shards_gets_the_items_in_turn(tmp_path, name, sizes):
    sampler, rng = SAMPLERS[name], np.random.default_rng(5)
    buffer = filled(mesh_of(8), sampler)
    # Some more, so that rings begin anywhere, and shards differ in their numbers of items.
    more, mask = np.arange(1000, 1064), rng.random(64) < 0.6
    mask[8:16] = False
    value = {"score" if sampler.uses_score else "priority": rng.lognormal(0, 1, 64).astype("f4")}
    buffer = jaxbuf.add(buffer.clear(), rows(more), mask=mask, **value)
    for _ in range(3):
        buffer = jaxbuf.add(buffer, rows(more + 100), mask=~mask, **value)
    old = held(buffer)
    slots = jax.device_get(jaxbuf.sample(buffer, jax.random.key(0), 64).slots)
    adds = np.asarray(buffer.shards.counters).sum(axis=0).tolist()
    jaxbuf.save(tmp_path, buffer)
    queues, dealt = [list(zip(*shard, strict=True)) for shard in old], []
    for rank in range(max(map(len, queues)), 0, -1):
        dealt += [queue[-rank] for queue in queues if len(queue) >= rank]
    for shards, n, devices in sizes:
        like = jaxbuf.Sharded.create(make(sampler, n), mesh_of(devices), "data", shards=shards)
        with pytest.raises(ValueError, match="pass resize=True"):
            jaxbuf.load(tmp_path, like)
        loaded = jaxbuf.load(tmp_path, like, resize=True)
        assert len(loaded.shards.data["obs"].sharding.device_set) == devices
        want = [[list(x) for x in zip(*dealt[k::shards][-n:], strict=True)] for k in range(shards)]
        assert [list(shard) for shard in held(loaded)] == want
        assert np.asarray(loaded.shards.counters).sum(axis=0).tolist() == adds
        testing.assert_valid(loaded)
        check_rows(jaxbuf.sample(loaded, jax.random.key(0), 64))
        # Slots of before are stale.
        if sampler.uses_priority:
            stale = jaxbuf.update_priority(loaded, slots, np.full(64, 99.0, "f4"), donate=False)
            assert held(stale) == held(loaded)


@ALL
def test_shards_with_parts_are_not_dealt(tmp_path):
    four, two = (create(2, 4, shards, freshness=jaxbuf.Freshness(2)) for shards in (4, 2))
    jaxbuf.save(tmp_path, {"buffer": four})
    with pytest.raises(ValueError, match=r"like\['buffer'\] has 2 shards.*with shards=4"):
        jaxbuf.load(tmp_path, {"buffer": two}, resize=True)


def test_shards_that_do_not_divide_are_refused():
    for devices, shards in ((8, 12), (4, 6), (2, 1)):
        message = f"shards is {shards}.*choose a multiple of {devices}"
        with pytest.raises(ValueError, match=message):
            jaxbuf.Sharded.create(make(), mesh_of(devices), "data", shards=shards)


def test_a_buffer_of_another_mesh_is_refused():
    buffer = filled(mesh_of(8))
    with jax.set_mesh(mesh_of(4)), pytest.raises(ValueError, match="created on a mesh"):
        jax.jit(lambda: buffer.sample(jax.random.key(0), 8))()
    mapped = jax.shard_map(lambda buffer: buffer.size, mesh=mesh_of(8), in_specs=P(), out_specs=P())
    with pytest.raises(ValueError, match="in_specs"):
        jax.jit(mapped)(buffer)


@ALL
def test_one_order_for_all_with_only_the_data_sharded():
    """The recipe for `Lowest`, `Diversity` and draws without replacement."""
    mesh = mesh_of(8)
    sampler = jaxbuf.Prioritized(replacement=False)
    alone, buffer = (
        jaxbuf.ItemBuffer.create(ITEM, S * N, sampler=sampler, evictor=jaxbuf.Lowest())
        for _ in range(2)
    )
    whole, spread = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    shardings = jax.tree.map(lambda _: whole, buffer)
    shardings = shardings.replace(data=jax.tree.map(lambda _: spread, buffer.data))
    buffer = jax.device_put(buffer, shardings)

    def step(buffer, items, score):
        buffer = buffer.add(items, score=score, priority=jnp.abs(score))
        return buffer, buffer.sample(jax.random.key(0), 16)

    score = np.random.default_rng(0).normal(size=64).astype(np.float32)
    run = jax.jit(step, donate_argnums=0, out_shardings=(shardings, whole))
    buffer, batch = run(buffer, rows(np.arange(64)), score)
    _, want = jax.jit(step)(alone, rows(np.arange(64)), score)
    chex.assert_trees_all_equal(batch.data, want.data)
    assert buffer.data["obs"].sharding.is_equivalent_to(spread, 2)

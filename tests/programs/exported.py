"""Exports a step for each kind of buffer to a folder, and runs what is there."""

import pickle

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax.experimental import serialize_executable

import jaxbuf

STEP = {"obs": jnp.zeros(2), "reward": jnp.float32(0), "terminated": jnp.bool_(False)}
ROWS = 4


def point(item):
    return item["obs"]


def items(**options):
    return lambda: jaxbuf.ItemBuffer.create(STEP, 16, **options)


def sharded():
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    return jaxbuf.Sharded.create(items(sampler=jaxbuf.Prioritized()), mesh, "d", shards=2)


SAMPLERS = (
    jaxbuf.Prioritized(uniform_mix=0.1),
    jaxbuf.RankBased(),
    jaxbuf.Shuffled(),
    jaxbuf.Staleness(),
    jaxbuf.Uniform(replacement=False),
    jaxbuf.Recent(0.5, 4, base=jaxbuf.Prioritized()),
    jaxbuf.Blend((jaxbuf.Uniform(), jaxbuf.Prioritized()), (0.5, 0.5)),
)
BUFFERS = {
    **{f"{type(sampler).__name__}": items(sampler=sampler) for sampler in SAMPLERS},
    "softmax": items(
        sampler=jaxbuf.Softmax(),
        evictor=jaxbuf.Lowest(),
        freshness=jaxbuf.Freshness(max_use=2, max_staleness=3),
        diversity=jaxbuf.Diversity(0.0, p=float("inf"), field=(point, "reward")),
        parts=(jaxbuf.Removable(),),
    ),
    "windows": lambda: jaxbuf.TrajectoryBuffer.create(
        STEP,
        ROWS,
        8,
        sequence_length=2,
        sampler=jaxbuf.Prioritized(),
        episodes=jaxbuf.Episodes(record_return=True),
    ),
    "mixture": lambda: jaxbuf.Mixture.create([items()(), items()()], [1, 2]),
    "sharded": sharded,
}


def limiter():
    return jaxbuf.RateLimiter.create(0.5, min_size=3)


# What else a step may take or return.
OTHERS = {
    "queue": lambda: jaxbuf.Queue.create(STEP, 8),
    "episodes": lambda: jaxbuf.EpisodeAccumulator.create(STEP, 2, 4),
    "chunks": lambda: jaxbuf.ChunkAccumulator.create(STEP, 2, 3, freshness=jaxbuf.Freshness()),
    "limiters": lambda: (limiter(), jaxbuf.ThroughputLimiter.create()),
    "statistics": lambda: jaxbuf.Statistics.create(BUFFERS["windows"]()),
    "episode": lambda: BUFFERS["windows"]().episode(0, 0),
    "groups": lambda: jaxbuf.Groups(*jnp.arange(5)),
}


def step(buffer, rows, key):
    options = {}
    if isinstance(buffer, jaxbuf.ItemBuffer) and "score" in buffer.by_slot():
        options = {"score": rows["reward"]}
    buffer = buffer.add(rows, **options)
    return buffer, buffer.sample(key, 4)


def arguments(buffer):
    rows = jax.tree.map(lambda leaf: jnp.ones((ROWS, *leaf.shape), leaf.dtype), STEP)
    return buffer, rows, jax.random.key(0)


def same(tree):
    return tree


def everything():
    return {name: make() for name, make in (BUFFERS | OTHERS).items()}


# By name: a function, and what makes its arguments.
STEPS = {
    "items": (step, lambda: arguments(BUFFERS["softmax"]())),
    "windows": (step, lambda: arguments(BUFFERS["windows"]())),
    "everything": (same, lambda: (everything(),)),
}


def write(folder):
    for name, (function, make) in STEPS.items():
        args, jitted = make(), jax.jit(function)
        exported = jax.export.export(jitted, disabled_checks=jaxbuf.export_checks())(*args)
        (folder / name).write_bytes(exported.serialize())
        (folder / f"{name}.result").write_bytes(pickle.dumps(numbers(jitted(*args))))


def run(folder):
    for name, (function, make) in STEPS.items():
        loaded = jax.export.deserialize((folder / name).read_bytes())
        args = make()
        result = loaded.call(*args)
        assert jax.tree.structure(result) == jax.tree.structure(jax.eval_shape(function, *args))
        expected = pickle.loads((folder / f"{name}.result").read_bytes())
        for got, want in zip(numbers(result), expected, strict=True):
            np.testing.assert_array_equal(got, want)


def draw(rows, words):
    buffer = jaxbuf.ItemBuffer.create(jnp.zeros(3), 64, sampler=jaxbuf.Prioritized()).add(rows)
    return buffer.sample(jax.random.wrap_key_data(words), 4).data


GIVEN = np.ones((8, 3), np.float32), np.zeros(2, np.uint32)


def compile_ahead(folder):
    compiled = jax.jit(draw).lower(*GIVEN).compile()
    (folder / "compiled").write_bytes(pickle.dumps(serialize_executable.serialize(compiled)))


def run_compiled(folder):
    parts = pickle.loads((folder / "compiled").read_bytes())
    loaded = serialize_executable.deserialize_and_load(*parts)
    np.testing.assert_array_equal(loaded(*GIVEN), np.ones((4, 3)))


def numbers(tree):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]

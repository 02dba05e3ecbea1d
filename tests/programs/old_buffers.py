"""Buffers of each kind, as version 0.2.0 saved them to the folders of `tests/io/checkpoints_0_2_0`.

The checkpoints were written by this program with the code of that version on PYTHONPATH. Beside
each one, `seen.json` has what that version then read from the buffer and from the one after more
adds.
"""

import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import jaxbuf

KEY = jax.random.key(3)
FOLDER = Path(__file__).parents[1] / "io" / "checkpoints_0_2_0"
ITEM = {"obs": jnp.zeros(3), "id": jnp.int32(0)}
STEP = {"id": jnp.int32(0), "reward": jnp.float32(0), "terminated": jnp.bool_(False)}


def items(*ids):
    ids = np.asarray(ids, np.int32)
    return {"obs": (ids[:, None] / np.float32([1, 2, 4])).astype(np.float32), "id": ids}


def steps(first, count, every=3):
    """Steps of two environments, whose episodes have `every` steps, and one more in the second."""
    ids = np.stack([np.arange(first, first + count), 100 + np.arange(first, first + count)])
    ends = ids % np.array([[every], [every + 1]]) == 0
    ids = ids.astype(np.int32)
    return {"id": ids, "reward": (ids / 4).astype(np.float32), "terminated": ends}


def item_buffer(capacity=6, **options):
    return jaxbuf.ItemBuffer.create(ITEM, capacity, **options)


def rings(length=12, **options):
    return jaxbuf.TrajectoryBuffer.create(STEP, 2, length, **{"sequence_length": 3, **options})


def sharded(**options):
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((1,), ("data",), axis_types=auto, devices=jax.devices()[:1])
    shard = lambda: item_buffer(4, **options)  # noqa: E731
    return jaxbuf.Sharded.create(shard, mesh, "data", shards=2)


def watched():
    buffer = CREATE["fresh"]()
    return {"buffer": buffer, "statistics": jaxbuf.Statistics.create(buffer, window=3)}


def unlike(**options):
    return item_buffer(diversity=jaxbuf.Diversity(**options))


def scores(*values):
    return jnp.asarray(values, jnp.float32)


# Empty buffers.
CREATE = {
    "prioritized": lambda: item_buffer(sampler=jaxbuf.Prioritized(alpha=0.7)),
    "softmax_lowest": lambda: item_buffer(sampler=jaxbuf.Softmax(2.0), evictor=jaxbuf.Lowest()),
    "fresh": lambda: item_buffer(freshness=jaxbuf.Freshness(max_use=2, max_staleness=3)),
    "unlike": lambda: unlike(cutoff=0.0, field="id"),
    "unlike_floats": lambda: unlike(cutoff=0.0),
    "unlike_norm_0": lambda: unlike(cutoff=1.0, p=0.0),
    "apart": lambda: unlike(cutoff=2.0, p=2.0, field="obs"),
    "shuffled": lambda: item_buffer(sampler=jaxbuf.Shuffled()),
    "recent": lambda: item_buffer(sampler=jaxbuf.Recent(ratio=0.5, steps=3)),
    "balanced": lambda: rings(sampler=jaxbuf.Balanced()),
    "rings": lambda: rings(sampler=jaxbuf.Prioritized(), period=2),
    "episodes": lambda: rings(episodes=jaxbuf.Episodes(record_return=True, discount=0.5)),
    "no_returns": lambda: rings(episodes=jaxbuf.Episodes(boundary="mask")),
    "whole_windows": lambda: rings(
        episodes=jaxbuf.Episodes(boundary="avoid"), sampler=jaxbuf.Prioritized()
    ),
    "fresh_episodes": lambda: rings(
        episodes=jaxbuf.Episodes(boundary="avoid"),
        freshness=jaxbuf.Freshness(max_use=3, max_staleness=4),
        sampler=jaxbuf.Prioritized(),
    ),
    "mixture": lambda: jaxbuf.Mixture.create(
        [item_buffer(), item_buffer(4, sampler=jaxbuf.Prioritized())], [3, 1]
    ),
    "sharded": lambda: sharded(sampler=jaxbuf.Prioritized()),
    "hosted": lambda: jaxbuf.Hosted.create(lambda: item_buffer(sampler=jaxbuf.Prioritized())),
    "queue": lambda: jaxbuf.Queue.create(ITEM, 5),
    "seeds": lambda: jax.vmap(lambda _: CREATE["unlike"]())(jnp.arange(2)),
    "fresh_shards": lambda: sharded(freshness=jaxbuf.Freshness(max_use=2, max_staleness=3)),
    "watched": watched,
}
RINGS = {"balanced", "rings", "episodes", "no_returns", "whole_windows", "fresh_episodes"}


def fill(name, buffer):
    """Returns the buffer that was saved."""
    if name == "seeds":
        return jax.jit(jax.vmap(lambda one: fill("unlike", one)))(buffer)
    if name == "watched":
        one, statistics = fill("fresh", buffer["buffer"]), buffer["statistics"]
        return {"buffer": one, "statistics": statistics.sampled(one, one.sample(KEY, 5))}
    if name in RINGS:
        version = jnp.array([[2], [3]], jnp.int32)
        given = {"version": jnp.tile(version, 9)} if name == "fresh_episodes" else {}
        buffer = buffer.add(steps(1, 9), **given)
        buffer = buffer.add(steps(10, 6), **{key: v[:, :6] for key, v in given.items()})
        if name in ("rings", "whole_windows", "fresh_episodes"):
            slots = buffer.sample(jax.random.key(1), 4).slots
            buffer = buffer.update_priority(slots, scores(0.5, 4.0, 2.0, 1.0))
        if name == "fresh_episodes":
            buffer = buffer.set_version(6).mark_used(slots)
        return buffer
    if name == "mixture":
        buffer = buffer.add(items(1, 2, 3), part=0)
        return buffer.add(items(4, 5), part=1, priority=scores(3, 1))
    if name == "queue":
        return buffer.add(items(1, 2, 3, 4)).take(2)[0].add(items(5, 6))
    if name == "softmax_lowest":
        buffer = buffer.add(items(1, 2, 3, 4, 5), score=scores(1, 5, 3, 2, 4))
        return buffer.add(items(6, 7, 8), score=scores(6, 0.5, 2.5))
    if name in ("fresh", "fresh_shards"):
        buffer = buffer.add(items(1, 2, 3, 4), version=jnp.array([0, 1, 2, 3], jnp.int32))
        buffer = buffer.set_version(4)
        buffer = buffer.mark_used(buffer.sample(jax.random.key(1), 2).slots)
        return buffer.add(items(5, 6), version=jnp.array([1, 4], jnp.int32))
    if hasattr(buffer, "diversity") and buffer.diversity is not None:
        buffer = buffer.add(items(1, 5, 1, 9), score=scores(1, 2, 3, 4))
        return buffer.add(items(9, 13, 17, 21, 25), score=scores(1, 2, 3, 4, 5))
    buffer = buffer.add(items(1, 2, 3, 4)).add(items(5, 6, 7, 8))
    if name in ("prioritized", "sharded", "hosted"):
        slots = buffer.sample(jax.random.key(1), 4).slots
        buffer = buffer.update_priority(slots, scores(0.5, 4.0, 2.0, 1.0))
    if name == "shuffled":
        buffer, _ = buffer.next_batch(jax.random.key(1), 4)
    return buffer


def more(name, buffer):
    """Returns the buffer after another add."""
    if name == "seeds":
        return jax.jit(jax.vmap(lambda one: more("unlike", one)))(buffer)
    if name == "watched":
        one, statistics = more("fresh", buffer["buffer"]), buffer["statistics"]
        return {"buffer": one, "statistics": statistics.sampled(one, one.sample(KEY, 5))}
    if name in RINGS:
        version = jnp.full((2, 3), 6, jnp.int32)
        given = {"version": version} if name == "fresh_episodes" else {}
        return buffer.add(steps(16, 3), **given)
    if name == "mixture":
        return buffer.add(items(10, 11), part=1)
    if name == "softmax_lowest":
        return buffer.add(items(10, 11), score=scores(0, 7))
    if name in ("fresh", "fresh_shards"):
        return buffer.add(items(10, 11), version=jnp.array([3, 4], jnp.int32)).set_version(6)
    if hasattr(buffer, "diversity") and buffer.diversity is not None:
        return buffer.add(items(13, 25, 29), score=scores(1, 2, 3))
    return buffer.add(items(10, 11))


def seen(name, buffer):
    """Returns what a user sees of a buffer, as numbers that JSON can hold."""
    if name == "seeds":
        return [seen("unlike", jax.tree.map(lambda leaf, i=i: leaf[i], buffer)) for i in range(2)]
    if name == "watched":
        metrics = buffer["statistics"].metrics(buffer["buffer"])
        # The staleness of the items that left is not among them any more.
        metrics.pop("gone_staleness_mean", None)
        found = {"fresh": seen("fresh", buffer["buffer"]), "statistics": metrics}
        return jax.tree.map(lambda leaf: np.asarray(leaf).tolist(), found)
    if name == "queue":
        _, batch = buffer.take(4)
    elif name == "shuffled":
        _, batch = buffer.next_batch(jax.random.key(2), 8)
    else:
        batch = buffer.sample(jax.random.key(2), 16)
    found = {
        "size": buffer.size,
        "metrics": buffer.metrics(),
        "valid": batch.valid,
        "slots": [batch.slots.index, batch.slots.generation],
        "probability": batch.probability,
        "data": jax.tree.map(lambda leaf: np.asarray(leaf)[np.asarray(batch.valid)], batch.data),
    }
    if name == "episodes":
        new = hasattr(buffer, "episode")
        found["returns"] = (
            buffer.episode(batch.slots).value if new else buffer.episode_return(batch.slots)
        )
    if name in ("fresh", "fresh_shards", "fresh_episodes"):
        found |= {"uses": buffer.use_count(batch.slots), "stale": buffer.staleness(batch.slots)}
    return jax.tree.map(lambda leaf: np.asarray(leaf).tolist(), found)


def main(folder):
    for name, create in CREATE.items():
        buffer = fill(name, create())
        jaxbuf.save(folder / name, buffer)
        (folder / name / "jaxbuf.lock").unlink(missing_ok=True)
        both = {"saved": seen(name, buffer), "more": seen(name, more(name, buffer))}
        (folder / name / "seen.json").write_text(json.dumps(both) + "\n")


if __name__ == "__main__":
    assert jaxbuf.__file__.startswith(sys.argv[1]), jaxbuf.__file__
    main(Path(sys.argv[2]))

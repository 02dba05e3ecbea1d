"""Checkpoints that version 0.3.0 wrote are loaded, and hold what this version would have held."""

import json
import zipfile
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import pytest

import jaxbuf
from jaxbuf import testing
from jaxbuf.core.segment_tree import NARROW, WIDE, using_width, with_width
from jaxbuf.io import records
from tests import operations

# A folder for each name: two adds to each buffer of `tests/operations.py`, and what else there is.
SAVED = zipfile.ZipFile(Path(__file__).with_name("checkpoints_0_3_0.zip"))
# Buffers that were listed later.
LATER = {"diverse-best", "mixture-varying", "windows-by-episode"}
# Others have the same parts.
OF_EACH_KIND = {"prioritized", "lowest", "diverse", "windows-fresh", "windows-episodes"}


def add(buffer, scale, seed):
    return operations.OPERATIONS["add"][1](buffer, None, jnp.float32(scale), jax.random.key(seed))


def listed(name):
    buffer, _ = operations.concrete(name)
    return jax.jit(lambda buffer: add(buffer, 2, 1))(buffer)


def seeds(name):
    empty = jax.tree.map(lambda leaf: jnp.stack([leaf] * 2), operations.BUFFERS[name]())
    both = jax.jit(jax.vmap(lambda buffer, scale: add(buffer, scale, 0)))
    return both(empty, jnp.array([1.0, 2.0]))


def sharded():
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    buffer = jaxbuf.Sharded.create(operations.BUFFERS["fresh-prioritized"], mesh, "d", shards=2)
    return jaxbuf.add(buffer, operations.rows(jnp.float32(1), 8))


def accumulator():
    empty = jaxbuf.EpisodeAccumulator.create(operations.ITEM, 2, max_length=4)
    return empty.add(operations.rows(jnp.float32(1), 2, 3))[0]


def statistics():
    buffer, batch = operations.concrete("prioritized")
    return jaxbuf.Statistics.create(buffer, 3).sampled(buffer, batch)


EXPECTED = {
    **{name: lambda name=name: listed(name) for name in operations.BUFFERS if name not in LATER},
    "seeds fresh": lambda: seeds("fresh"),
    "seeds windows": lambda: seeds("windows-fresh"),
    "sharded": sharded,
    "accumulator": accumulator,
    "statistics": statistics,
}


def extract(name, folder):
    files = [file for file in SAVED.namelist() if file.startswith(f"{name}/")]
    SAVED.extractall(folder, files)
    return folder / name


@pytest.mark.parametrize(
    "name",
    operations.quick(EXPECTED, EXPECTED.keys() - operations.BUFFERS | OF_EACH_KIND),
)
def test_it_is_loaded_as_it_would_be_now(name, tmp_path):
    expected = EXPECTED[name]()
    loaded = jaxbuf.load(extract(name, tmp_path), jax.eval_shape(lambda: expected))
    # What bounds the versions of all slots bounds those of each block of them.
    chex.assert_trees_all_close(without_bounds(loaded), without_bounds(expected), rtol=1e-6)
    if name in operations.BUFFERS:
        testing.assert_valid(loaded)
        testing.assert_valid(jax.jit(lambda buffer: add(buffer, 3, 2))(loaded))


def without_bounds(tree):
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    kept = [leaf for path, leaf in leaves if ".oldest" not in jax.tree_util.keystr(path)]
    return jax.device_get(kept)


def test_all_that_was_saved_is_looked_at():
    assert {name.partition("/")[0] for name in SAVED.namelist()} == set(EXPECTED)


def test_it_is_loaded_for_an_accelerator(tmp_path):
    expected = listed("prioritized")
    with using_width(WIDE):
        wide = jaxbuf.load(extract("prioritized", tmp_path), operations.BUFFERS["prioritized"]())
    chex.assert_trees_all_close(with_width(wide, NARROW), expected, rtol=1e-6)


def test_it_moves_to_another_size(tmp_path):
    like = jaxbuf.ItemBuffer.create(operations.ITEM, 9, freshness=jaxbuf.Freshness(2, 3))
    larger = jaxbuf.load(extract("fresh", tmp_path), like, resize=True)
    testing.assert_valid(larger)
    expected = listed("fresh")
    assert larger.size == expected.size > 0
    assert sorted(larger.latest(6).data["reward"]) == sorted(expected.latest(6).data["reward"])


def test_what_is_unlike_may_be_of_a_version_that_another_one_reads(tmp_path):
    folder = extract("fresh", tmp_path)
    [path] = folder.glob("*/manifest.json")
    manifest = json.loads(path.read_text())
    # As version 0.2.0 counted what was retired.
    counters = manifest["leaves"][".extra_states[0].counters"]
    counters |= {"shape": [6], "bytes": 24}
    records.write(path, {name: manifest[name] for name in manifest if name != "crc32"})
    with pytest.raises(
        ValueError, match=r"if jaxbuf 0\.2\.0 wrote it, load it with jaxbuf 0\.3\.0"
    ):
        jaxbuf.load(folder, operations.BUFFERS["fresh"]())

"""Sizes that no machine has are refused in Python; XLA would end the process."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbuf
from jaxbuf.core import sizes
from jaxbuf.core.sizes import format_bytes

HUGE = jax.ShapeDtypeStruct((2**40,), jnp.float32)
TERMINATED = np.bool_(False)

CREATE = {
    "items": lambda leaf: jaxbuf.ItemBuffer.create({"obs": leaf}, 2**30),
    "queue": lambda leaf: jaxbuf.Queue.create({"obs": leaf}, 2**30),
    "trajectories": lambda leaf: jaxbuf.TrajectoryBuffer.create({"obs": leaf}, 2**15, 2**15),
    "rewards": lambda leaf: jaxbuf.reward_prioritized({"obs": leaf}, 2**30),
    "diverse": lambda leaf: jaxbuf.diverse_reward_prioritized({"obs": leaf}, 2**30),
    "states": lambda leaf: jaxbuf.terminal_state_buffer({"obs": leaf}, 2**30),
    "episodes": lambda leaf: jaxbuf.EpisodeAccumulator.create(
        {"obs": leaf, "terminated": TERMINATED}, 2**14, 2**14, waiting=2**14
    ),
    "chunks": lambda leaf: jaxbuf.ChunkAccumulator.create({"obs": leaf}, 2**14, 2**14),
}


@pytest.mark.parametrize("create", CREATE.values(), ids=list(CREATE))
def test_a_leaf_that_no_array_can_be(create):
    message = r"example\['obs'\] as float32\[.*, 1099511627776\] takes \d{21,} bytes; expected less"
    with pytest.raises(ValueError, match=message):
        create(HUGE)
    # Nor is anything allocated where only shapes are asked for.
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda: create(HUGE))


@pytest.mark.parametrize("create", CREATE.values(), ids=list(CREATE))
def test_shapes_under_vmap_are_those_of_all_members(create):
    def make(seed=None):
        return create(np.bool_(0))

    one, all_of_them = jax.eval_shape(make), jax.eval_shape(jax.vmap(make), jnp.arange(64))
    for single, batch in zip(jax.tree.leaves(one), jax.tree.leaves(all_of_them), strict=True):
        assert batch.shape == (64, *single.shape)


def test_an_axis_of_length_zero_overflows_too():
    with pytest.raises(ValueError, match="expected less than"):
        jaxbuf.ItemBuffer.create(jax.ShapeDtypeStruct((2**40, 0), jnp.float32), 2**30)


def test_a_leaf_for_which_there_is_no_memory_is_named():
    shape: Any = jax.ShapeDtypeStruct
    example = {"a": shape((1,), jnp.int8), "obs": shape((2**40,), jnp.float32)}
    message = re.escape(
        "example['obs'] as float32[1024, 1099511627776], which takes 4503599627370496 bytes, could "
        "not be allocated"
    )
    with pytest.raises(ValueError, match=message):
        jaxbuf.ItemBuffer.create(example, 2**10)


KEY = jax.random.key(0)


def test_a_traced_count_says_that_it_must_be_static():
    with pytest.raises(ValueError, match=r"batch_size is traced .*; expected an integer that is"):
        jax.jit(lambda n: jaxbuf.ItemBuffer.create(np.float32(0), 4).sample(KEY, n))(4)


@pytest.mark.parametrize(
    "draw",
    [
        lambda example: jaxbuf.ItemBuffer.create(example, 1).sample(KEY, 2**30),
        lambda example: jaxbuf.ItemBuffer.create(example, 1).sample_range(KEY, 2**30),
        lambda example: jaxbuf.TrajectoryBuffer.create(example, 1, 1).sample(KEY, 2**30),
        lambda example: jaxbuf.Queue.create(example, 1).take(2**30),
    ],
    ids=["sample", "sample_range", "windows", "take"],
)
def test_a_batch_that_no_array_can_be(draw):
    example = jax.ShapeDtypeStruct((2**33,), jnp.float32)
    with pytest.raises(ValueError, match=r"a batch as float32\[.*\] takes \d+ bytes; expected"):
        jax.eval_shape(lambda: draw(example))


SHAPES = {
    "items": lambda n: jaxbuf.ItemBuffer.create(np.zeros((1024, 1024), np.float32), n),
    "queue": lambda n: jaxbuf.Queue.create(np.zeros((1024, 1024), np.float32), n),
    "rings": lambda n: jaxbuf.TrajectoryBuffer.create(
        {"a": np.zeros((512, 1024), np.float32), "b": np.zeros((256, 1024), np.float32)}, 1, n
    ),
    "sharded": lambda n: jaxbuf.Sharded.create(
        lambda: jaxbuf.ItemBuffer.create(np.zeros((1024, 1024), np.float32), n),
        jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,)),
        "d",
    ),
}


@pytest.mark.parametrize("kind", SHAPES)
def test_the_size_that_would_fit_is_named(kind, monkeypatch, tmp_path):
    """A machine with 1 GiB, of which half is left, and a container with less."""
    free, limit = tmp_path / "meminfo", tmp_path / "limit"
    free.write_text("MemTotal: 1048576 kB\nMemAvailable:  409600 kB\nSwapFree:  114688 kB\n")
    limit.write_text("max\n")
    monkeypatch.setattr(sizes, "_MEMORY", free)
    monkeypatch.setattr(sizes, "_LIMITS", (limit, tmp_path / "none"))
    row = 3 * 2**20 if kind == "rings" else 2**22
    fits = 2**29 // row
    name = "length" if kind == "rings" else "capacity"
    # Besides the items themselves a shard needs a few bytes.
    message = rf" 512.0 MiB left; {name}.*={fits - (kind == 'sharded')} would fit"
    needed = rf"{format_bytes(1024 * row)} are needed in all"
    with pytest.raises(ValueError, match=needed + ".*" + message):
        SHAPES[kind](1024)
    limit.write_text(f"{2**20}\n")
    with pytest.raises(ValueError, match=rf"1.0 MiB left; not even {name}.*=1 would fit"):
        SHAPES[kind](64)
    # Nothing is allocated where only shapes are asked for.
    assert jax.eval_shape(lambda: SHAPES["items"](1024)).capacity == 1024


@pytest.mark.parametrize(
    "example", [(84, 84, 4), [3], {"obs": (84, 84), "reward": ()}, {"obs": [4], "action": 1}]
)
def test_a_shape_is_no_example(example):
    for create in (
        lambda: jaxbuf.ItemBuffer.create(example, 4),
        lambda: jaxbuf.Queue.create(example, 4),
        lambda: jaxbuf.TrajectoryBuffer.create(example, 1, 4),
    ):
        with pytest.raises(ValueError, match=r"if this is a shape, pass jax.ShapeDtypeStruct\(\("):
            create()
    for legal in ({"a": 1, "b": 2}, (1.0, 2), (jnp.int32(1), 2), 3):
        assert jaxbuf.Queue.create(legal, 2).size == 0

"""Numbers of 64 bits: kept where they fit, and refused by name where they are seen not to."""

import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbuf
from jaxbuf.core.numbers import convert, integers

LARGE = 2**40 + 7
HOW_TO_ADD = {
    "method": lambda buffer, items, **options: buffer.add(items, **options),
    "function": lambda buffer, items, **options: jaxbuf.add(buffer, items, donate=False, **options),
    "closure": lambda buffer, items, **options: jax.jit(lambda b: b.add(items, **options))(buffer),
}
HOWS = pytest.mark.parametrize("how", list(HOW_TO_ADD))


def rows(number, dtype):
    """Four rows, the last but one of which holds a number."""
    return np.array([0, 1, number, 2], dtype)


def refusal(label, number, dtype):
    return re.escape(f"{label} is {number}; expected ") + f".*, as {dtype} holds them"


@HOWS
@pytest.mark.parametrize(
    ("stored", "number", "given"),
    [
        (np.int32, 1_700_000_000_123, np.int64),
        (np.int32, -LARGE, np.int64),
        (np.int64, LARGE, np.int64),
        (np.uint32, 2**32, np.uint64),
        (np.uint64, LARGE, np.uint64),
        (np.float32, 1e300, np.float64),
        (np.float64, -1e39, np.float64),
        (np.complex64, 1e300j, np.complex128),
    ],
)
def test_a_number_that_does_not_fit_is_refused_by_leaf(how, stored, number, given):
    buffer = jaxbuf.ItemBuffer.create({"obs": np.zeros(2), "t": stored(0)}, 8)
    items = {"obs": np.zeros((4, 2)), "t": rows(number, given)}
    kept = buffer.data["t"].dtype
    with pytest.raises(ValueError, match=refusal("items['t'][2]", items["t"][2], kept)):
        HOW_TO_ADD[how](buffer, items)
    assert buffer.size == 0


@HOWS
@pytest.mark.parametrize(
    ("stored", "number", "given"),
    [
        (np.int64, 2**31 - 1, np.int64),
        (np.int32, -(2**31), np.int64),
        (np.uint32, 2**32 - 1, np.uint64),
        (np.float64, 3e38, np.float64),
        (np.float32, np.inf, np.float64),
        (np.float32, 1e-300, np.float64),
        (np.bool_, True, np.bool_),
    ],
)
def test_a_number_that_fits_is_kept(how, stored, number, given):
    buffer = jaxbuf.ItemBuffer.create({"t": stored(0)}, 4)
    buffer = HOW_TO_ADD[how](buffer, {"t": rows(number, given)})
    expected = rows(number, given).astype(buffer.data["t"].dtype)
    chex.assert_trees_all_equal(buffer.data["t"], expected)


def test_nan_is_no_number_that_does_not_fit():
    buffer = jaxbuf.add(jaxbuf.ItemBuffer.create(np.float64(0), 4), np.full(4, np.nan))
    assert np.isnan(buffer.data).all()


@pytest.mark.parametrize("how", ["method", "function"])
def test_a_weakly_typed_array_is_seen_too(how):
    buffer = jaxbuf.ItemBuffer.create(jnp.uint8(0), 4)
    with pytest.raises(ValueError, match=refusal("items[0]", 300, "uint8")):
        HOW_TO_ADD[how](buffer, jnp.full(4, 300))
    chex.assert_trees_all_equal(
        HOW_TO_ADD[how](buffer, jnp.full(4, 255)).data, np.full(4, 255, np.uint8)
    )


@HOWS
def test_versions(how):
    buffer = jaxbuf.ItemBuffer.create(np.float32(0), 8, freshness=jaxbuf.Freshness(max_use=2))
    items = np.zeros(4, np.float32)
    with pytest.raises(ValueError, match=refusal("version[2]", LARGE, "int32")):
        HOW_TO_ADD[how](buffer, items, version=rows(LARGE, np.int64))
    for dtype in (np.int8, np.int16, np.uint8, np.int64, np.uint64):
        added = HOW_TO_ADD[how](buffer, items, version=rows(3, dtype))
        batch = added.latest(4)
        chex.assert_trees_all_equal(added.staleness(batch.slots), -rows(3, np.int32))


@HOWS
def test_scores(how):
    buffer = jaxbuf.ItemBuffer.create(np.float32(0), 8, evictor=jaxbuf.Lowest())
    items = np.zeros(4, np.float32)
    with pytest.raises(ValueError, match=refusal("score[2]", 1e300, "float32")):
        HOW_TO_ADD[how](buffer, items, score=rows(1e300, np.float64))
    # A number too large for int32 may fit in float32.
    added = HOW_TO_ADD[how](buffer, items, score=rows(LARGE, np.int64))
    assert added.metrics()["score_max"] == 2.0**40


@HOWS
def test_priorities(how):
    sampler = jaxbuf.Prioritized(alpha=1.0)
    buffer = jaxbuf.ItemBuffer.create(np.float32(0), 8, sampler=sampler)
    items = np.zeros(4, np.float32)
    added = HOW_TO_ADD[how](buffer, items, priority=rows(LARGE, np.int64))
    assert added.metrics()["priority_max"] == 2.0**40
    # One that is too large counts as infinite: its row is refused, and the others are taken.
    added = HOW_TO_ADD[how](buffer, items, priority=rows(1e300, np.float64))
    assert (added.metrics()["rejected"], added.size) == (1, 3)


def test_updated_priorities():
    buffer = jaxbuf.ItemBuffer.create(np.float32(0), 4, sampler=jaxbuf.Prioritized(alpha=1.0))
    buffer = buffer.add(np.zeros(4, np.float32))
    slots = buffer.latest(4).slots
    for update in (
        jaxbuf.ItemBuffer.update_priority,
        functools.partial(jaxbuf.update_priority, donate=False),
    ):
        for dtype in (np.int8, np.int64, np.uint32):
            given = jaxbuf.Slots(*(np.asarray(x).astype(dtype) for x in jax.tree.leaves(slots)))
            updated = update(buffer, given, rows(LARGE, np.int64))
            assert updated.metrics()["priority_max"] == 2.0**40
        assert update(buffer, slots, rows(1e300, np.float64)).metrics()["rejected"] == 1


def test_fragments():
    chunks = jaxbuf.ChunkAccumulator.create(np.int64(0), 2, 2)
    with pytest.raises(ValueError, match=refusal("fragments[2]", LARGE, "int32")):
        chunks.add(rows(LARGE, np.int64), np.zeros(4, np.int64), np.arange(4))


def test_environments_are_named_by_integers_that_fit():
    buffer = jaxbuf.TrajectoryBuffer.create({"t": np.int64(0)}, 2, 8)
    with pytest.raises(ValueError, match=refusal("env_ids[1]", 2**32, "int32")):
        buffer.get_field("t", np.array([0, 2**32]), np.zeros(2, np.int32))
    with pytest.raises(ValueError, match=refusal("envs[0]", 2**32, "int32")):
        buffer.clear(np.array([2**32]))


def test_python_numbers():
    # NumPy's float64 equals None, which is the dtype of a number that has none.
    for dtype in map(np.dtype, ("int32", "float32", "float64")):
        assert convert(3, "x", dtype).dtype == dtype
    for number in (2**31, 2**64, -(2**80)):
        with pytest.raises(ValueError, match=refusal("x", number, "int32")):
            convert(number, "x", np.dtype("int32"))
    with pytest.raises(ValueError, match=refusal("x", 1e39, "float32")):
        convert(1e39, "x", np.dtype("float32"))
    with pytest.raises(ValueError, match="x is a list; expected an array"):
        integers([1], "x")


def test_what_cannot_be_seen_is_traced_as_before():
    buffer = jaxbuf.ItemBuffer.create(np.int32(0), 4)
    added = jax.jit(lambda b, x: b.add(x))(buffer, np.arange(4))
    chex.assert_trees_all_equal(added.data, np.arange(4, dtype=np.int32))


ITEM = {"x": np.zeros(2, np.float32), "n": np.int32(0)}


def wide(x=0.5, n=7):
    """Four rows of NumPy's own dtypes, as ``np.array([0.5])`` and ``np.arange(4)`` have them."""
    return {"x": np.full((4, 2), x), "n": np.array([0, 1, n, 2])}


def of_rings(rows):
    return jax.tree.map(lambda leaf: leaf[None], rows)


def fields_set(rows):
    buffer = jaxbuf.ItemBuffer.create(ITEM, 4)
    buffer = buffer.add(jax.tree.map(lambda x: jnp.stack([x] * 4), ITEM))
    slots = buffer.latest(4).slots
    for name, value in rows.items():
        buffer = jaxbuf.set_field(buffer, name, slots, value)
    return buffer


def added(buffer):
    return lambda rows: jaxbuf.add(buffer(), rows)


def sharded():
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    return jaxbuf.Sharded.create(lambda: jaxbuf.ItemBuffer.create(ITEM, 2), mesh, "d", shards=2)


def mixed(rows):
    parts = [jaxbuf.ItemBuffer.create(ITEM, 4) for _ in range(2)]
    return jaxbuf.add(jaxbuf.Mixture.create(parts, [1, 1]), rows, part=1).parts[1]


def accumulated(rows):
    example = {**ITEM, "terminated": np.bool_(False)}
    steps = of_rings({**rows, "terminated": np.arange(4) == 3})
    return jaxbuf.EpisodeAccumulator.create(example, 1, 4).add(steps)[1].steps


def stored(rows, folder):
    with jaxbuf.Store(folder, ITEM) as store:
        store.append(rows)
        return jax.tree.map(np.asarray, store.read(np.arange(4)))


TAKERS = {
    "method": lambda rows: jaxbuf.ItemBuffer.create(ITEM, 4).add(rows),
    "insert": lambda rows: jaxbuf.insert(jaxbuf.ItemBuffer.create(ITEM, 4), rows)[0],
    "queue": added(lambda: jaxbuf.Queue.create(ITEM, 4)),
    "rings": lambda rows: jaxbuf.add(jaxbuf.TrajectoryBuffer.create(ITEM, 1, 4), of_rings(rows)),
    "set_field": fields_set,
    "hosted": added(lambda: jaxbuf.Hosted.create(lambda: jaxbuf.ItemBuffer.create(ITEM, 4))),
    "sharded": added(sharded),
    "mixture": mixed,
    "accumulator": accumulated,
    "closure": lambda rows: jax.jit(lambda b: b.add(rows))(jaxbuf.ItemBuffer.create(ITEM, 4)),
}


@pytest.mark.parametrize("taker", [*TAKERS, "store"])
def test_numbers_of_numpy_are_taken_with_x64_and_without(taker, tmp_path):
    """Both modes have one rule for rows on the host; only arrays of JAX have a dtype on purpose."""
    for x64 in (True, False):
        with jax.enable_x64(x64):
            take = TAKERS.get(taker) or (lambda rows: stored(rows, tmp_path / f"{x64}"))  # noqa: B023
            rows = wide()
            found = [*jax.tree.leaves(take(rows))]
            want = {jnp.dtype(jnp.float32): rows["x"], jnp.dtype(jnp.int32): rows["n"]}
            for dtype, value in want.items():
                same = [x for x in found if x.dtype == dtype and np.size(x) == value.size]
                assert any(np.array_equal(np.ravel(x), np.ravel(value)) for x in same), dtype
            with pytest.raises(
                ValueError, match=r"(\['n'\]|value)\[.*2\] is 1099511627783; expected"
            ):
                take(wide(n=LARGE))
            with pytest.raises(ValueError, match=r"(\['x'\]|value)\[.*0\] is 1e\+300; expected"):
                take(wide(x=1e300))
            if x64:
                message = r"(\['n'\]|value) has dtype int64; expected int32 \(cast it yourself"
                with pytest.raises(ValueError, match=message):
                    take({**wide(), "n": jnp.asarray(wide()["n"])})

"""Checkpoints and stores that somebody else made, or that are damaged: an error, and no harm."""

import itertools
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbuf
from jaxbuf.io import records
from jaxbuf.io.ranges import Ranges
from tests.models.store import exchanged

KEY = jax.random.key(0)
ITEM = {"x": jnp.zeros(3)}


def saved(folder):
    """A checkpoint of a buffer, its manifest, and the place of the latter."""
    buffer = jaxbuf.ItemBuffer.create(ITEM, 8, sampler=jaxbuf.Prioritized())
    buffer = buffer.add({"x": jnp.ones((5, 3))})
    jaxbuf.save(folder, buffer)
    [file] = folder.glob("jaxbuf-*/manifest.json")
    return buffer, records.read(file)[0], file


def put(record, path, value):
    *way, last = path
    for key in way:
        record = record[key]
    record[last] = value


LEAF = ("leaves", ".data['x']")
MANIFEST = {
    ("format",): (True, "2", -1),
    ("chunk",): (2**60, 0, -5, "large", 1.5),
    ("leaves",): ([1, 2], {}),
    ("configuration",): (3,),
    (*LEAF, "bytes"): (2**50, -1),
    (*LEAF, "crc32"): ("x",),
    (*LEAF, "shape"): ([2**40, 3], [-8, 3], "83", [8.0, 3]),
    (*LEAF, "dtype"): ("complex999", 7, "key<fry>"),
    (*LEAF, "scalar"): (None,),
    (*LEAF, "chunk"): ([1, 1], [2**62, 3], []),
}


@pytest.mark.parametrize(
    ("path", "value"),
    [(path, value) for path, values in MANIFEST.items() for value in values],
    ids=str,
)
def test_a_manifest_is_checked(tmp_path, path, value):
    buffer, record, file = saved(tmp_path)
    put(record, path, value)
    records.write(file, record)
    for resize in (False, True):
        with pytest.raises(ValueError, match="checkpoint"):
            jaxbuf.load(tmp_path, buffer, resize=resize)


@pytest.mark.parametrize("capacity", [2**40, 2**29, 10**6, 0, -3, "8", True])
def test_a_size_beyond_the_files_is_not_allocated(tmp_path, capacity):
    buffer, record, file = saved(tmp_path)
    record["configuration"][".occupancy.capacity"] = capacity
    if type(capacity) is int and capacity > 0:
        like = jax.eval_shape(
            lambda: jaxbuf.ItemBuffer.create(
                ITEM, min(capacity, 2**29), sampler=jaxbuf.Prioritized()
            )
        )
        leaves = jax.tree_util.tree_leaves_with_path(like)
        for path, leaf in leaves:
            name = jax.tree_util.keystr(path)
            record["leaves"][name]["shape"] = [*leaf.shape]
            record["leaves"][name]["bytes"] = int(np.prod(leaf.shape)) * leaf.dtype.itemsize
        for name, value in record["configuration"].items():
            if value == 8:
                record["configuration"][name] = capacity
    records.write(file, record)
    with pytest.raises(ValueError, match="checkpoint"):
        jaxbuf.load(tmp_path, buffer, resize=True)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"format":' + "[" * 100_000, '{"format": 2', "7"])
def test_a_manifest_may_be_any_text(tmp_path, text):
    buffer, _, file = saved(tmp_path)
    file.write_text(text)
    with pytest.raises(ValueError, match="damaged: its manifest"):
        jaxbuf.load(tmp_path, buffer)


def test_a_manifest_that_was_changed_is_refused(tmp_path):
    """Also if the change is one that loading would ignore."""
    buffer, _, file = saved(tmp_path)
    file.write_text(json.dumps({**json.loads(file.read_text()), "more": 1}))
    with pytest.raises(ValueError, match="damaged: its manifest is not what was saved"):
        jaxbuf.load(tmp_path, buffer)


def test_a_pipe_or_a_huge_file_is_no_manifest(tmp_path):
    buffer, _, file = saved(tmp_path)
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(ValueError, match="damaged: its manifest"):
        jaxbuf.load(tmp_path, buffer)
    file.unlink()
    with file.open("wb") as stream:
        stream.truncate(2**35)
    with pytest.raises(ValueError, match="damaged: its manifest"):
        jaxbuf.load(tmp_path, buffer)


def test_a_save_touches_nothing_outside_of_its_folder(tmp_path):
    folder, outside = tmp_path / "saved", tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("mine")
    buffer, *_ = saved(folder)
    lock = folder / "jaxbuf.lock"
    lock.unlink()
    os.mkfifo(lock)
    with pytest.raises(OSError, match="is no regular file"):
        jaxbuf.save(folder, buffer)
    jaxbuf.load(folder, buffer)
    lock.unlink()
    (folder / "jaxbuf-00000001.new").symlink_to(outside)
    (folder / "jaxbuf-00000000.old").symlink_to(outside)
    jaxbuf.save(folder, buffer)
    assert [file.name for file in outside.iterdir()] == ["file"]
    assert (outside / "file").read_text() == "mine"


ROW = {"x": jax.ShapeDtypeStruct((3,), np.float32), "n": jax.ShapeDtypeStruct((), np.int32)}


def rows(first, last):
    number = np.arange(first, last)
    return {"x": np.repeat(number[:, None], 3, 1).astype(np.float32), "n": number.astype(np.int32)}


def stored(folder, count=40, compress=False):
    with jaxbuf.Store(folder, ROW, chunk=4, compress=compress) as store:
        store.append(rows(0, count))


def rewrite(folder, name, **changes):
    record, _ = records.read(folder / name)
    records.write(folder / name, record | changes)


DELETED = (
    [[0, 2**40]], [[-(2**40), 8]], [[8, 4]], [[0, 8, 9]], [["0", 8]], [[0, 8], [9]], [[0, 2**70]],
    8, None, [[0.5, 8]], "AAA", "AAAA", Ranges.of([7, 40]).encode(),
)  # fmt: skip
RECORDS = {
    ("deleted.json", "deleted"): DELETED,
    ("rows.json", "rows"): (-1, 2**39, 2**70, "40", None, True),
    ("rows.json", "format"): (2,),
    ("store.json", "chunk"): (2**60, 2**28, 0, -4, "4"),
    ("store.json", "compress"): (None, True),
    ("store.json", "leaves"): (None, {"['x']": 3, "['n']": 4}, {"['x']": {}, "['n']": {}}),
    ("store.json", "format"): ([2], 99),
}


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [(*place, value) for place, values in RECORDS.items() for value in values],
    ids=str,
)
def test_what_a_store_says_of_itself_is_checked(tmp_path, name, field, value):
    stored(tmp_path)
    rewrite(tmp_path, name, **{field: value})
    for mode in ("a", "r"):
        with pytest.raises(ValueError, match="the store"):
            jaxbuf.Store(tmp_path, ROW, mode=mode)


@pytest.mark.parametrize("chunk", [pytest.param(2**26, marks=pytest.mark.slow), 2**20])
def test_a_chunk_beyond_its_file_is_not_allocated(tmp_path, chunk):
    for compress in (False, True):
        folder = tmp_path / str(compress)
        stored(folder, compress=compress)
        rewrite(folder, "store.json", chunk=chunk)
        if compress:
            file = folder / "rows" / "zarr.json"
            record = json.loads(file.read_text())
            record["shape"] = [2**40, chunk, 24]
            record["chunk_grid"]["configuration"]["chunk_shape"] = [1, chunk, 24]
            file.write_text(json.dumps(record))
            rewrite(folder, "rows.json", rows=2 * chunk)
        message = "bytes, too few for" if compress else "bytes where"
        with jaxbuf.Store(folder, ROW) as store, pytest.raises(ValueError, match=message):
            store.read([1])


@pytest.mark.parametrize("name", ["store.json", "rows.json", "deleted.json", "rows/zarr.json"])
def test_files_of_a_store_may_be_any_text(tmp_path, name):
    stored(tmp_path, compress=True)
    for text in ("[" * 100_000, '{"a":' * 100_000, "7", "", "\0"):
        (tmp_path / name).write_text(text)
        for mode in ("a", "r"):
            with pytest.raises(ValueError, match="is damaged"):
                jaxbuf.Store(tmp_path, ROW, mode=mode)


@pytest.mark.parametrize("compress", [False, True])
def test_a_store_touches_nothing_outside_of_its_folder(tmp_path, compress):
    store, outside = tmp_path / "store", tmp_path / "outside"
    stored(store, compress=compress)
    outside.mkdir()
    for name in ("0.__lock", "0"):
        (outside / name).write_text("mine")
    files = store / "rows"
    kept = files.rename(tmp_path / "kept")
    files.symlink_to(kept)
    with jaxbuf.Store(store, ROW, mode="r") as reader:
        assert reader.read([3])["n"] == 3
    files.unlink()
    kept.rename(files)
    for name in ("10.0.0.__lock", "11.0.0.__lock", "10.npy", "12.npy"):
        (files / name).symlink_to(outside / "0.__lock")
    with jaxbuf.Store(store, ROW) as writer:
        writer.append(rows(40, 50))
        assert writer.read([45])["n"] == 45
    (store / "lock").unlink()
    os.mkfifo(store / "lock")
    with pytest.raises(OSError, match="is no regular file"):
        jaxbuf.Store(store, ROW)
    assert sorted(file.name for file in outside.iterdir()) == ["0", "0.__lock"]
    assert all(file.read_text() == "mine" for file in outside.iterdir())


@pytest.mark.parametrize("compress", [False, True])
def test_files_that_changed_places_are_noticed(tmp_path, compress):
    stored(tmp_path, count=4 * 132, compress=compress)
    for pair in ((0, 1), (1, 130), (129, 131)):
        names = [f"{number}.0.0" if compress else f"{number}.npy" for number in pair]
        with exchanged(*(tmp_path / "rows" / name for name in names)):
            for mode, (number, name) in itertools.product("ar", zip(pair, names, strict=True)):
                message = f"row {4 * number} in rows/{name} is not the one that was written"
                with (
                    jaxbuf.Store(tmp_path, ROW, mode=mode) as store,
                    pytest.raises(ValueError, match=message),
                ):
                    store.read([4 * number])
        with jaxbuf.Store(tmp_path, ROW, mode="r") as store:
            assert store.read(slice(None))["n"].tolist() == [*range(4 * 132)]


@pytest.mark.parametrize("compress", [False, True])
def test_deleted_rows_without_files_are_no_damage(tmp_path, compress):
    """A writer was killed after it had freed all space, and before it said so."""
    stored(tmp_path, compress=compress)
    rewrite(tmp_path, "deleted.json", deleted=[[0, 40]])
    for file in tmp_path.glob("rows/[0-9]*"):
        file.unlink()
    for mode in ("r", "a"):
        with jaxbuf.Store(tmp_path, ROW, mode=mode) as store:
            assert (len(store), store.live) == (40, 0)
    with jaxbuf.Store(tmp_path, ROW) as store:
        store.append(rows(40, 45))
        assert store.read(slice(40, None))["n"].tolist() == [*range(40, 45)]


_FULL = """
import resource, sys
import jax.numpy as jnp, numpy as np, jaxbuf
item = np.zeros(1000)
rows = np.random.default_rng(0).random((2000, 1000))
jaxbuf.save(sys.argv[1] + "/saved", {"x": np.zeros(3)})
store = jaxbuf.Store(sys.argv[1] + "/store", item, chunk=32)
store.append(rows[:1])
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
for write in (lambda: jaxbuf.save(sys.argv[1] + "/saved", {"x": rows}), lambda: store.append(rows)):
    try:
        write()
    except OSError as error:
        print(error)
    else:
        raise SystemExit("nothing was raised")
assert jaxbuf.load(sys.argv[1] + "/saved", {"x": np.ones(3)})["x"].tolist() == [0, 0, 0]
assert len(store) == 1 and (store.read([0]) == rows[:1]).all()
"""


def test_a_full_disk_is_an_os_error(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", _FULL, str(tmp_path)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]


def create(**options):
    return jaxbuf.ItemBuffer.create(ITEM, 8, **options)


ITEMS = {"x": jnp.ones((3, 3))}
SOFTMAX = {"sampler": jaxbuf.Softmax(replacement=False), "evictor": jaxbuf.Lowest()}
BUFFERS = {
    "prioritized": lambda: create(sampler=jaxbuf.Prioritized(replacement=False)).add(ITEMS),
    "ranked": lambda: create(**SOFTMAX).add(ITEMS, score=jnp.arange(3.0)),
    "rings": lambda: jaxbuf.TrajectoryBuffer.create(
        ITEM, 2, 8, sampler=jaxbuf.Prioritized(replacement=False)
    ).add({"x": jnp.ones((2, 3, 3))}),
}


@pytest.mark.parametrize("kind", BUFFERS)
def test_a_draw_ends_even_if_counts_lie(kind):
    buffer = BUFFERS[kind]()

    def lie(path, leaf):
        masses = jax.tree_util.keystr(path).endswith("roots")
        return leaf.at[-1].set(8) if masses and leaf.shape[0] > 1 else leaf

    lying = jax.tree_util.tree_map_with_path(lie, buffer)
    batch = jaxbuf.sample(lying, KEY, 8)
    index = np.asarray(batch.slots.index)[np.asarray(batch.valid)]
    assert len(set(index.tolist())) == len(index)
    if kind != "ranked":
        assert len(index) == int(buffer.sample(KEY, 8).valid.sum())
        assert int(lying.sample_range(KEY, 8, by_priority=True).valid.sum()) == len(index)


def test_a_pass_ends_even_if_counts_lie():
    buffer = create(sampler=jaxbuf.Shuffled()).add(ITEMS)
    marks = buffer.sampler_state.marks.replace(size=buffer.sampler_state.marks.size + 5)
    lying = buffer.replace(sampler_state=buffer.sampler_state.replace(marks=marks))
    for _ in range(3):
        lying, _ = jaxbuf.next_batch(lying, KEY, 8)

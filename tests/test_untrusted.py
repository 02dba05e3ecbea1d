"""Checkpoints and stores that somebody else made, or that are damaged: an error, and no harm."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbuf
from jaxbuf.io import records

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


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("format",), True),
        (("format",), "2"),
        (("format",), -1),
        (("chunk",), 2**60),
        (("chunk",), 0),
        (("chunk",), -5),
        (("chunk",), "large"),
        (("chunk",), 1.5),
        (("leaves",), [1, 2]),
        (("leaves",), {}),
        (("configuration",), 3),
        ((*LEAF, "bytes"), 2**50),
        ((*LEAF, "bytes"), -1),
        ((*LEAF, "crc32"), "x"),
        ((*LEAF, "shape"), [2**40, 3]),
        ((*LEAF, "shape"), [-8, 3]),
        ((*LEAF, "shape"), "83"),
        ((*LEAF, "shape"), [8.0, 3]),
        ((*LEAF, "dtype"), "complex999"),
        ((*LEAF, "dtype"), 7),
        ((*LEAF, "dtype"), "key<fry>"),
        ((*LEAF, "scalar"), None),
        ((*LEAF, "chunk"), [1, 1]),
        ((*LEAF, "chunk"), [2**62, 3]),
        ((*LEAF, "chunk"), []),
    ],
    ids=str,
)
@pytest.mark.parametrize("resize", [False, True])
def test_a_manifest_is_checked(tmp_path, path, value, resize):
    buffer, record, file = saved(tmp_path)
    put(record, path, value)
    records.write(file, record)
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


def test_save_writes_through_no_link(tmp_path):
    folder, outside = tmp_path / "saved", tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("mine")
    buffer, *_ = saved(folder)
    lock = folder / "jaxbuf.lock"
    lock.unlink()
    for target in (outside / "file", outside / "new"):
        lock.symlink_to(target)
        with pytest.raises(OSError, match="is a link"):
            jaxbuf.save(folder, buffer)
        jaxbuf.load(folder, buffer)
        lock.unlink()
    os.mkfifo(lock)
    with pytest.raises(OSError, match=r"No such device|is no file"):
        jaxbuf.save(folder, buffer)
    jaxbuf.load(folder, buffer)
    lock.unlink()
    (folder / "jaxbuf-00000001.new").symlink_to(outside)
    (folder / "jaxbuf-00000000.old").symlink_to(outside)
    jaxbuf.save(folder, buffer)
    assert [file.name for file in outside.iterdir()] == ["file"]
    assert (outside / "file").read_text() == "mine"


_FULL = """
import resource, sys
import jax.numpy as jnp, numpy as np, jaxbuf
item = np.zeros(1000)
rows = np.random.default_rng(0).random((2000, 1000))
jaxbuf.save(sys.argv[1] + "/saved", {"x": np.zeros(3)})
store = jaxbuf.Store(sys.argv[1] + "/store", item)
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

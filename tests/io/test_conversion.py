"""A store that version 0.3.0 wrote keeps its rows, their numbers, and which of them are deleted."""

import shutil
import zipfile
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import jaxbuf
from jaxbuf.io import records
from jaxbuf.io.ranges import Ranges

# ``items`` has 1,077 rows in chunks of 8: those before 980 and 1,000 to 1,002 are deleted.
# ``renewed`` was begun by version 0.2.0: 25 numbers in chunks of 4, of which 0, 1, 9 are deleted.
SAVED = zipfile.ZipFile(Path(__file__).with_name("stores_0_3_0.zip"))
ITEM = {
    "k": np.int64(0),
    "obs": np.zeros(3, np.float32),
    "half": jnp.bfloat16(0),
    "nibble": jnp.uint4(0),
    "flag": np.bool_(False),
    "empty": np.zeros((0, 2), np.float32),
}


def rows(k):
    return {
        "k": k,
        "obs": np.stack([k, -k, k % 7], -1).astype(np.float32),
        "half": (k % 100).astype(jnp.bfloat16),
        "nibble": (k % 16).astype(jnp.uint4),
        "flag": k % 3 == 0,
        "empty": np.zeros((len(k), 0, 2), np.float32),
    }


@pytest.fixture
def old(tmp_path):
    SAVED.extractall(tmp_path)
    return tmp_path


@pytest.mark.parametrize("compress", [False, True])
def test_a_store_of_version_0_3_0_is_copied(old, compress):
    with pytest.raises(ValueError, match=r"has format 3; .*jaxbuf\.convert_store copies"):
        jaxbuf.Store(old / "items", ITEM)
    new = old / "copies" / "items"
    jaxbuf.convert_store(old / "items", new, ITEM, compress=compress)
    assert [file.name for file in new.parent.iterdir()] == ["items"]
    live = np.setdiff1d(np.arange(980, 1077), np.arange(1000, 1003))
    with jaxbuf.Store(new, ITEM) as store:
        assert (len(store), store.live) == (1077, len(live))
        read = store.read(live)
        for name, leaf in rows(live).items():
            assert read[name].dtype == leaf.dtype
            np.testing.assert_array_equal(read[name], leaf)
        with pytest.raises(IndexError, match="row 979 was deleted"):
            store.read([979])
        assert store.append(rows(np.arange(1077, 1100))) == range(1077, 1100)
        np.testing.assert_array_equal(store.read(slice(1076, None))["k"], np.arange(1076, 1100))


def test_files_of_deleted_rows_take_no_space(old, monkeypatch):
    monkeypatch.setattr("jaxbuf.io.store._FILE_BYTES", 29 * 16)
    jaxbuf.convert_store(old / "items", old / "new", ITEM)
    with jaxbuf.Store(old / "new", ITEM) as store:
        names = {int(file.stem) for file in (old / "new" / "rows").iterdir()}
        assert names == set(range(980 // store.chunk, 1076 // store.chunk + 1))
        assert store.read([1003])["k"] == [1003]


def test_the_last_file_is_written_though_its_rows_are_deleted(old):
    every = Ranges(np.array([[0, 1077]])).encode()
    records.write(old / "items" / "deleted.json", {"deleted": every})
    jaxbuf.convert_store(old / "items", old / "new", ITEM)
    with jaxbuf.Store(old / "new", ITEM) as store:
        assert (len(store), store.live) == (1077, 0)
        store.append(rows(np.arange(1077, 1100)))
    with jaxbuf.Store(old / "new", ITEM, mode="r") as store:
        np.testing.assert_array_equal(store.read(slice(1077, None))["k"], np.arange(1077, 1100))


def test_rows_without_checksums_are_copied(old):
    record, _ = records.read(old / "items" / "rows.json")
    record["checksums"]["begin"] = 1
    records.write(old / "items" / "rows.json", record)
    (old / "items" / "checksums" / "0.json").unlink()
    jaxbuf.convert_store(old / "items", old / "new", ITEM)
    with jaxbuf.Store(old / "new", ITEM, mode="r") as store:
        assert store.read([980, 1003])["k"].tolist() == [980, 1003]


def test_a_store_of_version_0_2_0_that_0_3_0_renewed_is_copied(old):
    jaxbuf.convert_store(old / "renewed", old / "new", np.float32(0))
    live = np.setdiff1d(np.arange(25), [0, 1, 9])
    with jaxbuf.Store(old / "new", np.float32(0), mode="r") as store:
        assert store.live == len(live)
        np.testing.assert_array_equal(store.read(live), live)


def test_what_cannot_be_copied_is_refused_and_leaves_nothing(old):
    def refused(message, path="items", example=ITEM, new="new"):
        before = sorted(old.iterdir())
        with pytest.raises(ValueError, match=message):
            jaxbuf.convert_store(old / path, old / new, example)
        assert sorted(old.iterdir()) == before

    refused("new is .*renewed, which exists", new="renewed")
    refused("store.json is missing", path="nothing")
    refused(r"example\['k'\] is missing", example={k: v for k, v in ITEM.items() if k != "k"})
    jaxbuf.convert_store(old / "renewed", old / "four", np.float32(0))
    refused("has format 4", path="four", example=np.float32(0))
    for name, other in (("leaves/3/125", "126"), ("leaves/5/130.0", "129.0")):
        shutil.copytree(old / "items", old / "spoiled", dirs_exist_ok=True)
        file = old / "spoiled" / name
        shutil.copy(file.with_name(other), file)
        refused(f"{name.split('.')[0]} is not the one that was written", path="spoiled")
    (old / "spoiled" / "leaves" / "3" / "125").write_bytes(b"x")
    refused("spoiled is damaged", path="spoiled")
    record, _ = records.read(old / "items" / "rows.json")
    records.write(old / "spoiled" / "rows.json", {**record, "format": 2})
    refused("has format 2", path="spoiled")

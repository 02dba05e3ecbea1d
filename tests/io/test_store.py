"""`Store`: every append that returned is there, once, whatever happens next."""

import contextlib
import functools
import itertools
import json
import multiprocessing
import operator
import os
import pickle
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbuf
from jaxbuf.io import passes as passes_module
from jaxbuf.io import records, zarr
from jaxbuf.io import rows as rows_module
from jaxbuf.io.passes import Passes
from jaxbuf.io.ranges import Ranges
from tests.models.store import ReferenceStore, damaged
from tests.programs import kill

ITEM = {"obs": jnp.zeros(3), "id": jnp.int32(0)}


def items(ids):
    ids = np.asarray(ids, np.int32)
    return {"obs": np.stack([ids] * 3, -1).astype(np.float32), "id": ids}


def batch(item, count):
    return jax.tree.map(lambda x: jnp.zeros((count, *x.shape), x.dtype), item)


def check(read, ids):
    expected = items(ids)
    for name, leaf in expected.items():
        assert read[name].dtype == leaf.dtype
        np.testing.assert_array_equal(read[name], leaf)


def filled(path, count, **options):
    """An open store of the first numbers."""
    store = jaxbuf.Store(path, ITEM, **options)
    store.append(items(range(count)))
    return store


def disk_chunks(path):
    return sorted({int(entry.name.partition(".")[0]) for entry in (path / "rows").glob("[0-9]*")})


MODES = pytest.mark.parametrize("compress", [False, True])


@pytest.mark.parametrize(
    ("compress", "cache_bytes"), [(False, 0), (True, 0), (True, 3 * 8 * 24), (True, 2**26)]
)
def test_random_operations_agree_with_a_list(tmp_path, monkeypatch, compress, cache_bytes):
    # Files are opened anew again and again, and some runs of rows are read without a mapping.
    monkeypatch.setattr(rows_module, "_MOST_MAPS", 2)
    monkeypatch.setattr(rows_module, "_RUN_BYTES", 3 * 24)
    monkeypatch.setattr(rows_module, "_BLOCK_BYTES", 9 * 24)
    random = np.random.default_rng(0)
    twin, clock = ReferenceStore(), 0
    options = {"compress": compress, "cache_bytes": cache_bytes}
    store = jaxbuf.Store(tmp_path / "store", ITEM, chunk=8, **options)
    for _ in range(80):
        action = random.choice(["append", "append", "again", "delete", "reopen", "read"])
        if action == "append":
            new = range(clock, clock + int(random.integers(0, 20)))
            clock += len(new)
            assert store.append(items(new)) == new
            twin.append(new)
        elif action == "again":
            start = int(random.integers(max(clock - 10, 0), clock + 1))
            new = range(start, start + int(random.integers(0, 15)))
            clock = max(clock, new.stop)
            assert store.append(items(new), start=start) == new
            twin.append(new, start)
        elif action == "delete" and clock:
            begin = int(random.integers(clock))
            rows = np.arange(begin, min(begin + int(random.integers(1, 30)), clock))
            store.delete(rows)
            twin.delete(rows.tolist())
        elif action == "reopen":
            store.close()
            store = jaxbuf.Store(tmp_path / "store", ITEM, cache_bytes=cache_bytes)
        live = twin.live
        assert (len(store), store.live) == (len(twin.rows), len(live))
        if len(live):
            rows = random.choice(live, size=int(random.choice([1, 10, 40])))
            check(store.read(rows), np.asarray(twin.rows)[rows])
    check(store.read(live), np.asarray(twin.rows)[live])
    store.close()
    # Chunks without live rows are gone, all others there.
    chunks = {row // 8 for row in range(clock) if row in set(live.tolist())}
    chunks |= {clock // 8} if clock % 8 else set()
    assert set(disk_chunks(tmp_path / "store")) - {clock // 8} == chunks - {clock // 8}


def test_ranges_agree_with_sets():
    random = np.random.default_rng(0)
    ranges, twin = Ranges.of([]), set()
    for _ in range(60):
        begin = int(random.integers(60))
        rows = random.integers(begin, begin + 6, size=int(random.integers(4)))
        ranges |= Ranges.of(rows)
        twin |= set(rows.tolist())
        everything = np.arange(-2, 80)
        assert len(ranges) == len(twin)
        assert everything[ranges.contains(everything)].tolist() == sorted(twin)
        runs = ranges.tolist()
        for form in (runs, ranges.encode()):
            assert Ranges.parse(form, 80).tolist() == runs
        assert all(a[1] < b[0] for a, b in itertools.pairwise(runs))
        others = [i for i in range(80) if i not in twin]
        assert ranges.without(np.arange(len(others))).tolist() == others
        assert ranges.covers(begin, begin + 3) == ({begin, begin + 1, begin + 2} <= twin)


def test_every_dtype_comes_back(tmp_path):
    item = {
        "pixels": jax.ShapeDtypeStruct((4, 4), jnp.uint8),
        "half": jnp.bfloat16(0),
        "flag": jnp.bool_(False),
        "nested": (jnp.int8(0), [jnp.zeros((2,), jnp.float16)]),
    }
    random = np.random.default_rng(0)
    rows = jax.tree.map(
        lambda x: jnp.asarray(random.integers(0, 2, size=(5, *x.shape)), x.dtype), item
    )
    with jaxbuf.Store(tmp_path, item) as store:
        store.append(rows, mask=np.asarray([True, False, True, True, False]))
        read = store.read(slice(None))
    chex.assert_trees_all_equal_structs(read, item)
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(a, b[np.asarray([0, 2, 3])]), read, rows
    )


def test_batches_are_uniform_over_live_rows_and_repeatable(tmp_path):
    with filled(tmp_path, 20, chunk=4) as store:
        store.delete(range(3, 9))
        counts = np.zeros(20)
        drawn = []
        for batch in store.batches(64, seed=1, steps=100):
            assert isinstance(batch.data["obs"], jax.Array)
            check(batch.data, batch.rows)
            counts += np.bincount(batch.rows, minlength=20)
            drawn.append(batch.rows)
        live = np.asarray([*range(3), *range(9, 20)])
        assert counts[3:9].sum() == 0
        expected = 6400 / len(live)
        # 13 degrees of freedom: exceeded with probability 1e-3.
        assert np.sum((counts[live] - expected) ** 2 / expected) < 34.5
        again = [batch.rows for batch in store.batches(64, seed=1, start=60, steps=40, prefetch=5)]
        np.testing.assert_array_equal(again, drawn[60:])
        assert not np.array_equal(next(store.batches(64, seed=2)).rows, drawn[0])


@pytest.mark.parametrize("listed", [0, 2**20])
def test_an_epoch_has_each_row_once_and_can_be_resumed(tmp_path, monkeypatch, listed):
    monkeypatch.setattr(passes_module, "_MOST_LISTED", listed)
    with filled(tmp_path, 23, chunk=4) as store:
        store.delete(range(3, 9))
        live = [*range(3), *range(9, 23)]
        batches = list(store.batches(5, seed=1, epochs=3))
        assert [len(batch.rows) for batch in batches] == [5] * 10 + [1]
        for batch in batches:
            check(batch.data, batch.rows)
        passes = np.concatenate([batch.rows for batch in batches]).reshape(3, 17)
        assert np.sort(passes, axis=1).tolist() == [live] * 3
        assert len({tuple(row) for row in passes.tolist()}) == 3
        again = list(store.batches(5, seed=1, epochs=3, start=4, prefetch=7))
        chex.assert_trees_all_equal(again, batches[4:])
        some = list(store.batches(5, seed=1, epochs=100, start=4, steps=2))
        chex.assert_trees_all_equal(some, batches[4:6])
        other = np.concatenate([batch.rows for batch in store.batches(5, seed=2, epochs=1)])
        assert sorted(other) == live
        assert other.tolist() != passes[0].tolist()
        # A batch may be larger than a pass, and far from the first one.
        (large,) = store.batches(40, seed=1, epochs=2)
        np.testing.assert_array_equal(large.rows, passes[:2].reshape(-1))
        far = list(store.batches(17, seed=1, epochs=2**40 + 2, start=2**40))
        assert [sorted(batch.rows) for batch in far] == [live] * 2
        assert list(store.batches(5, seed=1, epochs=1, start=4)) == []


def test_an_epoch_has_the_rows_from_its_beginning(tmp_path):
    with filled(tmp_path, 12, chunk=4) as store:
        store.delete([1])
        # With this seed the batch that is read ahead has no row near row 5, which it would pin.
        batches = store.batches(3, seed=4, epochs=2, prefetch=1)
        found = [next(batches)]
        store.append(items(range(12, 20)))
        store.delete(range(2, 10))
        assert disk_chunks(tmp_path) == [0, 1, 2, 3, 4]
        with pytest.raises(IndexError, match="row 5 was deleted"):
            store.read([5])
        found += batches
        for batch in found:
            check(batch.data, batch.rows)
        rows = np.concatenate([batch.rows for batch in found]).reshape(2, 11)
        assert np.sort(rows, axis=1).tolist() == [[0, *range(2, 12)]] * 2
        # Their space is freed once the iterator has ended.
        assert disk_chunks(tmp_path) == [0, 2, 3, 4]
        assert not store._pins
        now = np.concatenate([batch.rows for batch in store.batches(3, epochs=1)])
        assert sorted(now) == [0, 10, 11, *range(12, 20)]
        unfinished = store.batches(3, epochs=5)
        next(unfinished)
        store.delete(range(12))
        assert 0 in disk_chunks(tmp_path)
        later = store.batches(3, epochs=5)
        next(later)
        unfinished.close()
        later.close()
        assert disk_chunks(tmp_path) == [3, 4]


@pytest.mark.parametrize(
    ("count", "listed"),
    [
        *((n, 2**20) for n in (1, 2, 3, 7, 100)),
        (100, 0),
        pytest.param(257, 0, marks=pytest.mark.slow),
    ],
)
def test_a_pass_has_any_order_with_the_same_probability(monkeypatch, listed, count):
    monkeypatch.setattr(passes_module, "_MOST_LISTED", listed)
    every = np.arange(count)
    found = []
    for seed in range(400):
        order = Passes(count, seed)
        passes = [order.at(number, every) for number in range(3)]
        assert np.sort(passes, axis=1).tolist() == [every.tolist()] * 3
        # Any part of a pass is known without the others.
        part = np.arange(count // 2, count)
        again = Passes(count, seed).at(2, part)
        np.testing.assert_array_equal(again, passes[2][part])
        found += passes
    found = np.stack(found)
    cells = np.zeros((count, count))
    np.add.at(cells, (np.broadcast_to(every, found.shape), found), 1)
    expected = len(found) / count
    freedom = max((count - 1) ** 2, 1)
    # Exceeded with a probability of about 1e-4.
    assert np.sum((cells - expected) ** 2 / expected) < freedom + 4 * np.sqrt(2 * freedom) + 4
    if count > 2:
        # Neighbors follow each other no more often than others do.
        after = np.mean((found[:, 1:] - found[:, :-1]) % count == 1)
        share = 1 / (count - 1)
        assert abs(after - share) < 4 * np.sqrt(share / (len(found) * (count - 1))) + 1e-9


def test_an_order_of_very_many_rows():
    count = 2**44 + 5
    order = Passes(count, 3)
    places = np.unique(np.random.default_rng(0).integers(count, size=50_000))
    rows = order.at(0, places)
    assert rows.dtype == np.int64
    assert len(np.unique(rows)) == len(places)
    assert rows.min() >= 0
    assert rows.max() < count
    # 63 degrees of freedom: exceeded with probability 1e-4.
    cells = np.bincount(rows * 64 // count, minlength=64)
    assert np.sum((cells - len(rows) / 64) ** 2 / (len(rows) / 64)) < 113


@pytest.mark.parametrize("bare", [False, True])
def test_files_open_without_jaxbuf(tmp_path, bare):
    item = {"a": {"half": jnp.zeros(3, jnp.bfloat16)}, "b.c": jnp.int8(0), "flag": jnp.bool_(False)}
    rows = {
        "a": {"half": np.arange(30, dtype=jnp.bfloat16).reshape(10, 3)},
        "b.c": np.arange(10, dtype=np.int8),
        "flag": np.arange(10) % 2 == 0,
    }
    item, rows = (item["b.c"], rows["b.c"]) if bare else (item, rows)
    with jaxbuf.Store(tmp_path, item, chunk=4) as store:
        store.append(rows)
    files = [np.load(tmp_path / "rows" / f"{i}.npy", mmap_mode="r") for i in range(3)]
    assert [file.shape for file in files] == [(4,)] * 3
    read = np.concatenate(files)[: json.loads((tmp_path / "rows.json").read_text())["rows"]]
    if bare:
        assert read.dtype.names == ("item", "jaxbuf.checksum")
        assert read["item"].tolist() == rows.tolist()
        return
    assert read.dtype.names == ("['a']['half']", "['b.c']", "['flag']", "jaxbuf.checksum")
    described = json.loads((tmp_path / "store.json").read_text())["leaves"]["['a']['half']"]
    half = read["['a']['half']"].view(described["dtype"])
    np.testing.assert_array_equal(half, rows["a"]["half"])
    np.testing.assert_array_equal(read["['b.c']"], rows["b.c"])
    np.testing.assert_array_equal(read["['flag']"], rows["flag"])
    assert len(set(read["jaxbuf.checksum"].tolist())) == 10


@MODES
def test_a_queue_on_disk_stays_as_small_as_its_live_rows(tmp_path, compress):
    with jaxbuf.Store(tmp_path, ITEM, chunk=1, compress=compress) as store:
        for first in range(0, 100, 10):
            store.append(items(range(first, first + 10)))
            store.delete(slice(None, first))
            # The last three are its description.
            files = {file.name for file in tmp_path.rglob("*") if file.is_file()}
            assert len(disk_chunks(tmp_path)) == 10
            assert len(files) == 10 + compress + len({"lock", "store.json"}) + 2
    assert sum(file.stat().st_size for file in tmp_path.rglob("*.json")) < 2_000


@MODES
def test_rows_may_be_deleted_while_they_are_read(tmp_path, monkeypatch, compress):
    with filled(tmp_path, 12, chunk=4, compress=compress) as store:
        check_readable = store._check_readable

        def delete_then(*args):
            check_readable(*args)
            store.delete([*range(4)])

        monkeypatch.setattr(store, "_check_readable", delete_then)
        with pytest.raises(IndexError, match="row 1 was deleted"):
            store.read([1, 5])


_FORKS = """
import os, sys, numpy as np, jaxbuf
store = jaxbuf.Store(sys.argv[1], np.float32(0), chunk=8)
store.append(np.arange(20, dtype=np.float32))
store.delete(range(2))
batches, pin = store.batches(4, epochs=100), store.pin([2, 5])
next(batches)
with pin, store._mutex:
    store.delete(range(8))
    child = os.fork()
    if not child:
        assert store.read([2, 5, 19]).tolist() == [2, 5, 19]
        assert len(next(store.batches(4, steps=1)).rows) == 4
        pin.__exit__()
        try:
            store.append(np.zeros(3, np.float32))
        except ValueError as error:
            os._exit(0 if "for reading only" in str(error) else 1)
        os._exit(2)
    _, status = os.waitpid(child, 0)
    assert status == 0, status
    assert store.read([2, 5]).tolist() == [2, 5]
store.append(np.arange(20, 30, dtype=np.float32))
batches.close()
assert store.read(slice(8, None)).tolist() == [*range(8, 30)]
"""


def test_a_forked_process_reads_and_changes_nothing(tmp_path):
    command = [sys.executable, "-W", "ignore", "-c", _FORKS, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert disk_chunks(tmp_path) == [1, 2, 3]


@MODES
def test_the_default_chunk_suits_random_batches(tmp_path, compress):
    item = {"obs": np.zeros(256, np.float32)}
    with jaxbuf.Store(tmp_path, item, compress=compress) as store:
        assert store.chunk == (64 if compress else 2**14)


def test_numbers_of_a_store_may_be_larger_than_those_of_buffers(tmp_path):
    with filled(tmp_path, 5, cache_bytes=2**33) as store:
        batch = next(store.batches(4, seed=2**62, start=2**40, steps=2**40))
        check(batch.data, batch.rows)
        with pytest.raises(IndexError, match=f"start is {2**40}, but the store has 5 rows"):
            store.load_into(jaxbuf.ItemBuffer.create(ITEM, 4), start=2**40)


def test_reading_overlaps_with_computing(tmp_path, monkeypatch):
    with filled(tmp_path, 10) as store:
        main, read, readers = threading.get_ident(), store._read, []
        two_ahead = threading.Semaphore(0)

        def watched(rows):
            readers.append(threading.get_ident())
            two_ahead.release()
            return read(rows)

        monkeypatch.setattr(store, "_read", watched)
        batches = store.batches(4, prefetch=2)
        next(batches)
        # No batch is requested, yet two more are read.
        for _ in range(3):
            assert two_ahead.acquire(timeout=30)
        assert main not in readers
        batches.close()
        assert not store._pins


def test_an_error_while_reading_reaches_the_loop(tmp_path, monkeypatch):
    with filled(tmp_path, 10) as store:

        def fail(rows):
            raise ValueError("the disk is gone")

        monkeypatch.setattr(store, "_read", fail)
        with pytest.raises(ValueError, match="the disk is gone"):
            next(store.batches(4))
        assert not store._pins


def test_deleted_rows_stay_until_their_batch_was_read(tmp_path, monkeypatch):
    with filled(tmp_path, 12, chunk=5) as store:
        go, read = threading.Event(), store._read
        monkeypatch.setattr(store, "_read", lambda rows: go.wait(30) and read(rows))
        batches = store.batches(50, steps=1)
        first = []
        consumer = threading.Thread(target=lambda: first.append(next(batches)))
        consumer.start()
        while not store._pins:
            time.sleep(0.01)
        store.delete(range(10))
        assert disk_chunks(tmp_path) == [0, 1, 2]
        go.set()
        consumer.join()
        check(first[0].data, first[0].rows)
        batches.close()
        assert disk_chunks(tmp_path) == [2]
        assert set(next(store.batches(50)).rows.tolist()) == {10, 11}


def test_pinned_rows_can_be_read_after_they_were_deleted(tmp_path):
    with filled(tmp_path, 12, chunk=4) as store:
        rows = np.asarray([1, 6])
        with store.pin(rows):
            with store.pin(rows):
                store.delete(range(8))
            check(store.read(rows), rows)
            assert disk_chunks(tmp_path) == [0, 1, 2]
        assert disk_chunks(tmp_path) == [2]
        with pytest.raises(IndexError, match="row 6 was deleted"):
            store.read(rows[1:])
        with pytest.raises(IndexError, match="row 1 was deleted"), store.pin(rows):
            pass
        with pytest.raises(ValueError, match="rows is None; expected integers"), store.pin(None):
            pass


def test_space_that_was_pinned_at_the_end_is_freed_by_the_next_process(tmp_path):
    store = jaxbuf.Store(tmp_path, ITEM, chunk=4)
    store.append(items(range(8)))
    pin = store.pin(np.asarray([0]))
    pin.__enter__()
    store.delete(range(4))
    store.close()
    assert disk_chunks(tmp_path) == [0, 1]
    jaxbuf.Store(tmp_path, ITEM).close()
    assert disk_chunks(tmp_path) == [1]


def test_one_process_writes_and_others_read(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no store in"):
        jaxbuf.Store(tmp_path / "store", ITEM, mode="r")
    with filled(tmp_path / "store", 5, chunk=2) as store:
        with pytest.raises(ValueError, match="is open for writing elsewhere"):
            jaxbuf.Store(tmp_path / "store", ITEM)
        with jaxbuf.Store(tmp_path / "store", ITEM, mode="r") as reader:
            store.append(items(range(5, 9)))
            check(reader.read(slice(None)), range(5))
            with pytest.raises(ValueError, match="open for reading only; open it with mode='a'"):
                reader.append(items([1]))
            with pytest.raises(ValueError, match="open for reading only"):
                reader.delete(range(1))
        with jaxbuf.Store(tmp_path / "store", ITEM, mode="r") as reader:
            store.delete(range(8))
            with pytest.raises(IndexError, match="row 5 was deleted"):
                reader.read([5, 8])
            check(reader.read([8]), [8])
    with pytest.raises(ValueError, match="is closed"):
        store.append(items([1]))


def test_threads_may_append_and_draw_at_once(tmp_path):
    with jaxbuf.Store(tmp_path, ITEM, chunk=16) as store:
        store.append(items([0] * 10))

        def produce(ids):
            for i in ids:
                store.append(items([i] * 10))

        threads = [threading.Thread(target=produce, args=(range(k, 20, 3),)) for k in (1, 2, 3)]
        for thread in threads:
            thread.start()
        for batch in store.batches(16, steps=30):
            np.testing.assert_array_equal(batch.data["obs"][:, 0], batch.data["id"])
        for thread in threads:
            thread.join()
        ids = store.read(slice(None))["id"].reshape(20, 10)
        assert np.all(ids == ids[:, :1])
        assert sorted(ids[:, 0].tolist()) == list(range(20))


BAD = {
    "shape": ({"obs": np.zeros((2, 4), np.float32), "id": np.zeros(2, np.int32)}, "items['obs']"),
    "dtype": ({"obs": np.zeros((2, 3), np.int32), "id": np.zeros(2, np.float32)}, "items['id']"),
    "structure": ({"obs": np.zeros((2, 3), np.float32)}, "items['id'] is missing"),
    "text": (
        {"obs": np.zeros((2, 3), np.float32), "id": np.asarray(["a", "b"])},
        "items['id'] is a ndarray; expected an array",
    ),
}


def test_bad_input_is_refused_and_changes_nothing(tmp_path):
    with jaxbuf.Store(tmp_path / "store", ITEM) as store:
        with pytest.raises(ValueError, match="the store is empty; append to it first"):
            next(store.batches(4))
        store.append(items(range(3)))
        for rows, message in BAD.values():
            with pytest.raises(ValueError, match=re.escape(message)):
                store.append(rows)
        with pytest.raises(ValueError, match="start is 4, but the store has 3 rows"):
            store.append(items([1]), start=4)
        for bad in ([3], [-1]):
            with pytest.raises(IndexError, match=r"there is no row -?\d; the store has 3"):
                store.read(np.asarray(bad))
            with pytest.raises(IndexError, match="there is no row"):
                store.delete(np.asarray(bad))
        check(store.read(slice(None)), range(3))
    others = (
        ({**ITEM, "more": jnp.zeros(2)}, "example['more'] is not in the store"),
        ({"id": jnp.int32(0)}, "example['obs'] is missing"),
        ({**ITEM, "obs": jnp.zeros(4)}, "example['obs'] has shape [4], but the store has [3]"),
        ({**ITEM, "id": jnp.int8(0)}, "example['id'] has dtype int8, but the store has int32"),
    )
    for other, message in others:
        with pytest.raises(ValueError, match=re.escape(message)):
            jaxbuf.Store(tmp_path / "store", other)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=re.escape("holds other files (notes.txt")):
        jaxbuf.Store(tmp_path / "mine", ITEM)
    (tmp_path / "store" / "rows.json").write_text("{")
    with pytest.raises(ValueError, match=r"is damaged: rows\.json"):
        jaxbuf.Store(tmp_path / "store", ITEM)


def test_any_range_goes_into_an_item_buffer(tmp_path):
    with filled(tmp_path, 30, chunk=4) as store:
        store.delete(range(5, 9))
        buffer = jaxbuf.ItemBuffer.create(ITEM, 16, sampler=jaxbuf.Prioritized(alpha=1.0))
        buffer = store.load_into(
            buffer, 2, 20, priority=lambda x: x["id"].astype(np.float32), rows_at_a_time=8
        )
        expected = [2, 3, 4, *range(9, 20)]
        assert np.asarray(buffer.data["id"])[:14].tolist() == expected
        assert np.asarray(buffer.sampler_state.leaves)[:14].tolist() == expected
        assert int(buffer.size) == 14
        with pytest.raises(IndexError, match="there is no row 30"):
            store.load_into(buffer, 20, 31)
        # And back, oldest first.
        assert store.append_buffer(buffer) == range(30, 44)
        check(store.read(np.arange(30, 44)), expected)


def test_steps_of_all_environments_go_into_a_trajectory_buffer(tmp_path):
    step = jax.tree.map(lambda x: jnp.zeros((2, *x.shape), x.dtype), ITEM)
    ids = np.arange(20).reshape(10, 2).astype(np.int32)
    rollout = {"obs": np.zeros((10, 2, 3), np.float32), "id": ids}
    with jaxbuf.Store(tmp_path, step) as store:
        store.append(rollout)
        buffer = jaxbuf.TrajectoryBuffer.create(ITEM, 2, 6, sequence_length=2)
        buffer = store.load_into(buffer, 1, rows_at_a_time=4)
        assert int(buffer.size) == 12
        assert store.append_buffer(buffer) == range(10, 16)
        np.testing.assert_array_equal(store.read(np.arange(10, 16))["id"], ids[4:])
        one = jaxbuf.add(buffer, jax.tree.map(jnp.asarray, step), mask=jnp.asarray([True, False]))
        assert store.append_buffer(one) == range(16, 22)
        few = jaxbuf.TrajectoryBuffer.create(ITEM, 2, 6)
        few = few.add(step, mask=jnp.asarray([True, False]))
        with pytest.raises(ValueError, match="environments have from 0 to 1 steps"):
            store.append_buffer(few)


WIDE = {
    "time": np.asarray([1_700_000_000_123, -(2**60), 0]),
    "count": np.asarray([2**64 - 1, 0, 1], np.uint64),
    "value": np.asarray([1e300, 0.1, -np.inf]),
    "wave": np.asarray([1e300 + 1j, 0, 0.1j]),
    "big-endian": np.asarray([2**40, 7, 0], ">i8"),
    # Any byte but 0 is true.
    "flag": np.asarray([0, 1, 255], np.uint8).view(bool),
}


def test_64_bit_numbers_are_kept(tmp_path):
    example = jax.tree.map(lambda leaf: leaf[0], WIDE)
    native = WIDE | {"big-endian": np.asarray([2**40, 7, 0]), "flag": np.asarray([0, 1, 1], bool)}
    with jaxbuf.Store(tmp_path, example) as store:
        store.append(WIDE)
    with jaxbuf.Store(tmp_path, jax.tree.map(np.zeros_like, example)) as store:
        read = store.read(np.arange(3, dtype=">i4"))
        chex.assert_trees_all_equal_dtypes(read, native)
        chex.assert_trees_all_equal(read, native)
        # Where 64 bits are off, arrays of JAX have 32, which fit.
        store.append(jax.tree.map(jnp.asarray, jax.tree.map(np.zeros_like, native)))
        chex.assert_trees_all_equal(store.read([3]), jax.tree.map(np.zeros_like, store.read([3])))


@pytest.mark.parametrize(
    ("stored", "given", "shown"),
    [
        (np.int32, np.asarray([1, 2**40 + 7]), "1099511627783"),
        (np.uint32, np.asarray([2**32], np.uint64), "4294967296"),
        (np.float32, np.asarray([1e300]), "1e+300"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(tmp_path, stored, given, shown):
    with jaxbuf.Store(tmp_path, {"id": np.zeros((), stored)}) as store:
        name = np.dtype(stored).name
        message = rf"items\['id'\].* {re.escape(shown)}; expected .*{name}"
        with pytest.raises(ValueError, match=message):
            store.append({"id": given})
        assert len(store) == 0
        # Masked rows are not checked, and rows that fit are accepted.
        store.append({"id": given}, mask=np.zeros(len(given), bool))
        store.append({"id": np.zeros_like(given)})
        assert len(store) == len(given)


def test_numbers_that_no_array_of_jax_holds_are_read_but_not_drawn(tmp_path):
    with jaxbuf.Store(tmp_path, {"time": np.int64(0)}) as store:
        store.append({"time": np.asarray([5, 6])})
        buffer = jaxbuf.ItemBuffer.create({"time": jnp.int32(0)}, 4)
        buffer = store.load_into(buffer)
        assert buffer.data["time"][:2].tolist() == [5, 6]
        assert set(next(store.batches(8)).data["time"].tolist()) <= {5, 6}
        store.append({"time": np.asarray([2**40])})
        message = r"\['time'\].* 1099511627776; expected .*int32"
        with pytest.raises(ValueError, match=message):
            store.load_into(buffer)
        with pytest.raises(ValueError, match=message):
            next(store.batches(64))
        assert store.read([2])["time"].tolist() == [2**40]


def test_rows_are_chosen_as_in_numpy(tmp_path):
    with jaxbuf.Store(tmp_path, ITEM, chunk=4) as store:
        check(store.read([]), [])
        check(store.read(slice(None)), [])
        store.append(items(range(10)))
        mask = np.asarray([False] * 7 + [True] * 3)
        check(store.read(mask), [7, 8, 9])
        check(store.read(mask.tolist()), [7, 8, 9])
        check(store.read([]), [])
        check(store.read(slice(-2, None)), [8, 9])
        # Such as the numbers of fragments that a chunk in a buffer refers to.
        chunks = jnp.asarray([[0, 1, 2], [4, 5, 6]])
        read = store.read(chunks)
        chex.assert_shape(read["obs"], (2, 3, 3))
        np.testing.assert_array_equal(read["id"], chunks)
        store.delete(mask)
        with pytest.raises(IndexError, match="row 7 was deleted"):
            store.read(mask)
        store.delete(chunks[0])
        store.delete([])
        store.delete(range(0))
        store.delete(slice(3, 4))
        assert store.live == 3
        assert disk_chunks(tmp_path) == [1, 2]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"start": 4, "stop": 2}, ValueError, "stop is 2; expected"),
        ({"start": 7}, IndexError, "start is 7, but the store has 5 rows"),
        ({"start": 7, "stop": 9}, IndexError, "start is 7, but the store has 5 rows"),
        ({"stop": 6}, IndexError, "there is no row 5; the store has 5"),
    ],
)
def test_ranges_that_are_not_there_are_not_loaded(tmp_path, arguments, error, message):
    with filled(tmp_path, 5) as store:
        buffer = jaxbuf.ItemBuffer.create(ITEM, 8)
        with pytest.raises(error, match=re.escape(message)):
            store.load_into(buffer, **arguments)
        # No new rows since the last time is not an error.
        assert int(store.load_into(buffer, start=5).size) == 0


def contents(path):
    return {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}


@MODES
def test_damage_is_found_by_name_and_nothing_is_overwritten(tmp_path, compress):
    rows = items(range(192))
    # A file of zeros only is on disk like any other, or its loss would not be noticed.
    rows["obs"][:64] = 0
    with jaxbuf.Store(tmp_path, ITEM, chunk=64, compress=compress) as store:
        store.append(rows)
    for file in contents(tmp_path).keys() - {tmp_path / "lock"}:
        data = file.read_bytes()
        for spoiled in damaged(data):
            file.unlink() if spoiled is None else file.write_bytes(spoiled)
            before = contents(tmp_path)
            for mode in ("a", "r"):
                with (
                    pytest.raises(ValueError, match=f"is damaged: .*{file.name}"),
                    jaxbuf.Store(tmp_path, ITEM, mode=mode) as store,
                ):
                    store.read(slice(None))
            assert contents(tmp_path) == before, (file, spoiled)
            file.write_bytes(data)


@pytest.mark.parametrize("more", [10, 30])
@MODES
def test_nothing_is_appended_to_a_file_that_is_gone(tmp_path, compress, more):
    filled(tmp_path, 100, chunk=64, compress=compress).close()
    (tmp_path / "rows" / "1.npy").unlink()
    with jaxbuf.Store(tmp_path, ITEM) as store:
        with pytest.raises(ValueError, match=r"is damaged: .*rows/1.*is missing|NOT_FOUND"):
            store.append(items(range(100, 100 + more)))
        check(store.read(np.arange(64)), range(64))
        assert len(store) == 100


@pytest.mark.parametrize("there", ["rows/0.npy", "rows/oak.png", "rows.json"])
def test_files_of_others_are_not_taken_for_a_store_that_was_killed(tmp_path, there):
    file = tmp_path / there
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("mine")
    with pytest.raises(ValueError, match=file.name):
        jaxbuf.Store(tmp_path, ITEM)
    assert file.read_text() == "mine"


# All but the first leaf say little or nothing of where their rows belong.
DULL = {
    "row": np.int64(0),
    "one": np.float32(0),
    "period": np.int32(0),
    "zero": np.zeros(3, np.int16),
    "unknown": np.float32(0),
    "empty": np.zeros((0, 2), np.float32),
}


def dull(first, last, more=0):
    row = np.arange(first, last)
    return {
        "row": row + more,
        "one": np.ones(len(row), np.float32),
        "period": (row % 8).astype(np.int32),
        "zero": np.zeros((len(row), 3), np.int16),
        "unknown": np.full(len(row), np.nan, np.float32),
        "empty": np.zeros((len(row), 0, 2), np.float32),
    }


def check_dull(read, first, last):
    chex.assert_trees_all_equal(read, dull(first, last))


def check_and_append(path, count):
    """A store has so many rows, for each process, and goes on."""
    with jaxbuf.Store(path, DULL, mode="r") as reader:
        check_dull(reader.read(slice(None)), 0, count)
    with jaxbuf.Store(path, DULL) as store:
        check_dull(store.read(slice(None)), 0, count)
        store.append(dull(count, count + 9))
    with jaxbuf.Store(path, DULL, mode="r") as reader:
        check_dull(reader.read(slice(None)), 0, count + 9)


@MODES
@pytest.mark.parametrize(("before", "more"), [(3, 2), (10, 30), (16, 9), (0, 20)])
def test_wherever_an_append_is_killed_the_earlier_rows_are_readable(
    tmp_path, before, more, compress
):
    old, new = tmp_path / "old", tmp_path / "new"
    with jaxbuf.Store(old, DULL, chunk=8, compress=compress) as store:
        store.append(dull(0, before))
    shutil.copytree(old, new)
    with jaxbuf.Store(new, DULL) as store:
        store.append(dull(before, before + more, 1000))
    earlier = {file.relative_to(old): data for file, data in contents(old).items()}
    later = {file.relative_to(new): data for file, data in contents(new).items()}
    changed = sorted(name for name, data in later.items() if earlier.get(name) != data)
    # Files are written in any order, and the number of rows at last.
    np.random.default_rng(0).shuffle(changed)
    changed.sort(key=lambda name: name.name == "rows.json")
    assert changed[-1].name == "rows.json"
    for count in {*range(0, len(changed), 4), len(changed) - 1, len(changed)}:
        path = tmp_path / str(count)
        shutil.copytree(old, path)
        with jaxbuf.Store(path, DULL, mode="r") as reader:
            for name in changed[:count]:
                (path / name).parent.mkdir(exist_ok=True)
                (path / name).write_bytes(later[name])
            check_dull(reader.read(slice(None)), 0, before)
        if count < len(changed):
            # Of the next one there is a part, or more than will be written: tensorstore writes a
            # chunk under such a name first, and does not empty what it finds there.
            name, noise = changed[count], np.random.default_rng(count).bytes(100_000)
            for left in {f"{name.name}.__lock", "zarr.json.__lock"}:
                (path / "rows" / left).write_bytes(noise)
            if name not in earlier and name.parent.name == "rows":
                (path / name).write_bytes(noise)
            elif name.suffix == ".npy":
                half = len(later[name]) // 2
                (path / name).write_bytes(earlier[name][:-half] + later[name][-half:])
            check_and_append(path, before)


WRITES = {
    "rows": (rows_module.RowFiles, "write", True),
    "before": (records, "write", False),
    "after": (records, "write", True),
}


@contextlib.contextmanager
def full_disk(owner, name, writes, calls=1):
    """The last of so many calls of a function raises an error, which may have written first."""
    real, left = getattr(owner, name), itertools.count(calls - 1, -1)

    def fail(*args):
        now = next(left) == 0
        if writes or not now:
            real(*args)
        if now:
            raise OSError("the disk is full")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, fail)
        with pytest.raises(OSError, match="the disk is full"):
            yield


@MODES
@pytest.mark.parametrize("where", WRITES)
def test_an_append_that_fails_leaves_the_store_as_it_was(tmp_path, where, compress):
    path = tmp_path / "store"
    with jaxbuf.Store(path, DULL, chunk=8, compress=compress) as store:
        store.append(dull(0, 12))
        for more in (20, 3):
            with full_disk(*WRITES[where]):
                store.append(dull(12, 12 + more, 1000))
            assert len(store) == 12
            check_dull(store.read(slice(None)), 0, 12)
        # It goes on, and is killed there.
        with full_disk(*WRITES["before"]):
            store.append(dull(12, 19, 2000))
        shutil.copytree(path, tmp_path / "killed")
        check_and_append(tmp_path / "killed", 12)
        store.append(dull(12, 14))
        check_dull(store.read(slice(None)), 0, 14)
        with full_disk(*WRITES["rows"]):
            store.append(dull(14, 33, 3000))
        shutil.copytree(path, tmp_path / "again")
    check_and_append(tmp_path / "again", 14)
    check_and_append(path, 14)


EMPTY = np.zeros((0, 3), np.float32)


@pytest.mark.parametrize("item", [{"extra": EMPTY, "u": np.int32(0)}, EMPTY])
@MODES
def test_leaves_of_size_0(tmp_path, item, compress):
    def some(first, last):
        row = np.arange(first, last, dtype=np.int32)
        empty = np.zeros((len(row), *EMPTY.shape), np.float32)
        return jax.tree.map(lambda x: row if x.ndim == 0 else empty, item)

    with jaxbuf.Store(tmp_path, item, chunk=7, compress=compress) as store:
        assert store.append(some(0, 100)) == range(100)
        chex.assert_trees_all_equal(store.read(slice(None)), some(0, 100))
        store.delete(slice(0, 30))
    for mode in ("r", "a"):
        with jaxbuf.Store(tmp_path, item, mode=mode) as store:
            chex.assert_trees_all_equal(store.read(slice(30, None)), some(30, 100))
    with jaxbuf.Store(tmp_path, item) as store:
        store.append(some(100, 120))
        expected = jax.tree.map(lambda x: x[[119, 99]], some(0, 120))
        chex.assert_trees_all_equal(store.read([119, 99]), expected)
        assert sum(len(batch.rows) for batch in store.batches(32, epochs=1)) == 90


def test_cached_rows_need_no_file(tmp_path, monkeypatch):
    filled(tmp_path, 52, chunk=4, compress=True).close()
    cached = jaxbuf.Store(tmp_path, ITEM, mode="r")
    few = jaxbuf.Store(tmp_path, ITEM, mode="r", cache_bytes=2 * 4 * 24)
    for reader in (cached, few):
        check(reader.read(slice(None)), range(52))
    shutil.rmtree(tmp_path / "rows")
    random = np.random.default_rng(0).integers(50, size=(3, 40))
    with monkeypatch.context() as context:
        for name in ("open", "stat", "scandir"):
            context.setattr(os, name, None)
        for rows in random:
            check(cached.read(rows), rows)
    check(few.read(np.arange(44, 52)), range(44, 52))
    with pytest.raises(ValueError, match="is damaged"):
        few.read(random[0])


def test_an_append_does_not_write_the_deleted_rows(tmp_path, monkeypatch):
    written, write = [], records.write
    monkeypatch.setattr(
        records, "write", lambda file, record: (written.append(file.name), write(file, record))
    )
    with filled(tmp_path, 100, chunk=8) as store:
        store.delete(range(0, 100, 2))
        written.clear()
        store.append(items(range(100, 103)))
        store.read(slice(1, 20, 2))
        store.delete(range(0, 100, 2))
        assert written == ["rows.json"]
        store.delete([1])
        assert written == ["rows.json", "deleted.json"]
    with jaxbuf.Store(tmp_path, ITEM) as store:
        assert (len(store), store.live) == (103, 52)


def test_a_copy_for_another_process_reads_only(tmp_path):
    with filled(tmp_path, 10, chunk=4, cache_bytes=500, compress=True) as store:
        data = pickle.dumps(store)
        store.append(items(range(10, 12)))
        with pickle.loads(data) as copy:
            check(copy.read(slice(None)), range(12))
            with pytest.raises(ValueError, match="is open for reading only"):
                copy.append(items([1]))
        store.append(items([12]))
        # Twice, as the second time they are in the cache of the process.
        rows = [[3, 12], [3, 12], 7, 7, np.int64(8), np.asarray(9), np.zeros((2, 0), int)]
        calls = [operator.methodcaller("read", row) for row in rows]
        with multiprocessing.get_context("spawn").Pool(1) as workers:
            read = workers.apply(_in_turn, (store, calls))
        for batch, row in zip(read, rows, strict=True):
            assert all(isinstance(leaf, np.ndarray) for leaf in batch.values())
            assert batch["obs"].shape == (*np.shape(row), 3)
            np.testing.assert_array_equal(batch["id"], row)


def _in_turn(store, calls):
    return [call(store) for call in calls]


def test_files_may_vanish_while_they_are_looked_at(tmp_path, monkeypatch):
    for i in range(4):
        (tmp_path / f"{i}").write_text("some")
    stat, scandir = Path.stat, os.scandir

    def vanishing(path, **options):
        result = stat(path, **options)
        if path.name == "0":
            path.unlink()
        return result

    @contextlib.contextmanager
    def listed(folder):
        with scandir(folder) as entries:
            entries = sorted(entries, key=operator.attrgetter("name"))
            entries[0] = _Gone("1")
            yield iter(entries)

    monkeypatch.setattr(Path, "stat", vanishing)
    with pytest.raises(FileNotFoundError):
        records.open_file(tmp_path / "0", "r")
    monkeypatch.setattr(os, "scandir", listed)
    assert zarr.file_sizes(tmp_path) == {"2": 4, "3": 4}


class _Gone:
    def __init__(self, name):
        self.name = name

    def is_file(self):
        return True

    def stat(self):
        raise FileNotFoundError(self.name)


@pytest.mark.parametrize("kind", ["items", "rings", "sharded"])
def test_a_buffer_is_appended_in_parts_or_not_at_all(tmp_path, monkeypatch, kind):
    # Parts of eight rows.
    monkeypatch.setattr(rows_module, "_BLOCK_BYTES", 2 * 4 * 24)
    mesh = jax.make_mesh((1,), ("x",))
    buffer, item, expected = {
        "items": (jaxbuf.ItemBuffer.create(ITEM, 20), ITEM, range(10, 30)),
        "rings": (jaxbuf.TrajectoryBuffer.create(ITEM, 2, 10), batch(ITEM, 2), None),
        "sharded": (
            jaxbuf.Sharded.create(lambda: jaxbuf.ItemBuffer.create(ITEM, 10), mesh, "x", shards=2),
            ITEM,
            # Rows of the two blocks of each add, in turn.
            np.arange(10, 30).reshape(2, 2, 5).swapaxes(1, 2),
        ),
    }[kind]
    for ids in np.arange(30).reshape(3, 10):
        buffer = jaxbuf.add(buffer, items(ids if kind != "rings" else ids.reshape(2, 5)))
    if kind == "rings":
        expected = np.arange(30).reshape(3, 2, 5)[1:].swapaxes(1, 2).reshape(10, 2)
    expected = np.reshape(expected, (-1, *np.shape(item["id"])))
    with jaxbuf.Store(tmp_path, item, chunk=4) as store:
        store.append(jax.tree.map(lambda x: np.zeros((3, *x.shape), x.dtype), item))
        with full_disk(*WRITES["rows"], calls=2):
            store.append_buffer(buffer)
        assert len(store) == 3
        assert store.append_buffer(buffer) == range(3, 3 + len(expected))
    with jaxbuf.Store(tmp_path, item, mode="r") as store:
        check(store.read(slice(3, None)), expected)


_ENDS = """
import sys, numpy as np, jaxbuf
store = jaxbuf.Store(sys.argv[1], np.float32(0), chunk=8)
store.append(np.arange(100, dtype=np.float32))
some, epochs, begun = store.batches(4), store.batches(4, epochs=3), store.batches(4)
print(len(next(some).rows), len(next(epochs).rows))
pinned = store.pin([1, 2])
pinned.__enter__()
store.delete(slice(None))
itself = [some, store]
itself.append(itself)
"""


def test_a_program_may_end_in_the_middle_of_an_iterator(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", _ENDS, str(tmp_path)], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "4 4\n", "")


@MODES
@pytest.mark.parametrize("kills", [4, pytest.param(kill.KILLS, marks=pytest.mark.slow)])
def test_a_killed_writer_loses_and_repeats_nothing(tmp_path, kills, compress):
    appends, write = 0, functools.partial(kill.store_writer, compress=compress)
    # Several, as their creation is killed, too.
    for i in range(4):
        kill.kill_repeatedly(write, tmp_path / str(i), 0.1, kills // 4)
        with jaxbuf.Store(tmp_path / str(i), kill.STORE_ITEM) as store:
            appends += kill.check_store(store)
    assert appends > 0


@pytest.mark.parametrize(
    ("options", "number"),
    [
        ({"steps": 0}, 0),
        ({"steps": 3, "start": 7}, 3),
        ({"epochs": 1}, 3),
        ({"epochs": 4}, 9),
        ({"epochs": 2, "start": 3}, 2),
        ({"epochs": 2, "start": 9}, 0),
        ({"epochs": 2, "steps": 4}, 4),
        ({"epochs": 2, "steps": 4, "start": 3}, 2),
    ],
)
def test_batches_have_a_length(tmp_path, options, number):
    with filled(tmp_path, 10) as store:
        store.delete([3])
        batches = store.batches(4, **options)
        assert len(batches) == len(list(batches)) == number
        # Afterwards, too, also with rows that came later.
        store.append(items(range(10)))
        assert len(batches) == number
        # Rows that are there when the first batch is requested count.
        later = store.batches(4, epochs=1)
        store.append(items(range(10)))
        assert len(later) == len(list(later)) == 8


def test_batches_that_never_end_have_no_length(tmp_path):
    with filled(tmp_path, 10) as store:
        batches = store.batches(4)
        for _ in range(2):
            with pytest.raises(TypeError, match="never end; give steps or epochs"):
                len(batches)
            next(batches)
        batches.close()
        assert list(batches) == []

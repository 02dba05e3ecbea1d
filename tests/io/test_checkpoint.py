"""`save` and `load`: nothing lost, nothing mixed up, and on it goes bit for bit."""

import concurrent.futures
import dataclasses
import functools
import itertools
import os
import re
import resource
import shutil
import subprocess
import sys
from typing import NamedTuple

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import struct
from flax.training.train_state import TrainState

import jaxbuf
from jaxbuf import testing
from jaxbuf.io import checkpoint, records
from tests.models.store import damaged
from tests.operations import quick
from tests.programs import kill, peak_memory, sharded_checkpoint
from tests.programs.processes import free_port, run_processes
from tests.traces import LOWERED, counted_traces

ITEM = {"obs": jnp.zeros(3), "id": jnp.int32(0)}


def items(*ids):
    ids = np.asarray(ids, np.int32)
    return {"obs": np.repeat(ids[:, None], 3, axis=1).astype(np.float32), "id": ids}


def item_buffer(capacity=8, **options):
    return jaxbuf.ItemBuffer.create(ITEM, capacity, **options)


def trajectories(length=8, num_envs=2, **options):
    options = {"sequence_length": 2, **options}
    return jaxbuf.TrajectoryBuffer.create(ITEM, num_envs, length, **options)


def assert_ids(buffer, ids):
    """The buffer is valid and holds the items of these numbers."""
    testing.assert_valid(buffer)
    testing.assert_holds(buffer, items(*ids))


def moved(path, old, like):
    """The old one as it comes back in the size of another."""
    jaxbuf.save(path, old)
    new = jaxbuf.load(path, like, resize=True)
    testing.assert_valid(new)
    return new


@jax.jit
def still_held(old, new):
    """Returns a mask of the slots of the old buffer that are still live in the new one."""
    slots = jnp.arange(max(old.capacity, new.capacity), dtype=jnp.int32)
    names = jaxbuf.Slots(index=slots, generation=old.occupancy.generation(slots))
    return old.occupancy.live(slots) & new.occupancy.holds(names)


def windows_of(buffer):
    """The windows in a buffer, and in which slots they are."""
    slots = jnp.arange(buffer.rings.num_slots, dtype=jnp.int32)
    live = jax.jit(lambda occupancy: occupancy.live(slots))(buffer.occupancy)
    window = jax.jit(lambda rings: rings.rows_of(slots))(buffer.rings)
    at = np.flatnonzero(live)
    ids = np.asarray(buffer.data["id"]).reshape(-1)[np.asarray(window)[at]]
    return [tuple(row) for row in ids.tolist()], at


def assert_same(a, b):
    chex.assert_trees_all_equal(a, b)
    assert jax.tree.map(jnp.result_type, a) == jax.tree.map(jnp.result_type, b)


def test_what_is_loaded_makes_no_other_program(tmp_path):
    create = jax.vmap(lambda _: item_buffer(sampler=jaxbuf.Prioritized()))
    add = jax.jit(jax.vmap(lambda buffer: buffer.add(items(1, 2))))
    buffers = add(jax.jit(create)(jnp.arange(2)))
    jaxbuf.save(tmp_path, buffers)
    loaded = jaxbuf.load(tmp_path, jax.eval_shape(create, jnp.arange(2)))
    assert_same(loaded, buffers)
    with counted_traces(LOWERED) as programs:
        found = add(loaded)
    assert programs == []
    assert_same(found, add(buffers))


def test_any_pytree_of_arrays_comes_back(tmp_path):
    tree = {
        "keys": jax.random.split(jax.random.key(3, impl="rbg"), 4),
        "no_keys": jax.random.split(jax.random.key(3), 4)[:0],
        "half": jnp.arange(3, dtype=jnp.bfloat16),
        "flag": jnp.bool_(True),
        "empty": jnp.zeros((0, 4), jnp.int8),
        "host": np.arange(3, dtype=np.float64),
        "list": [1, 2.5, True, None, ()],
        "odd/name": (jnp.uint32(4),),
    }
    jaxbuf.save(tmp_path, tree)
    loaded = jaxbuf.load(tmp_path, tree)
    assert_same(loaded, tree)
    assert isinstance(loaded["host"], np.ndarray)
    assert [type(value) for value in loaded["list"][:3]] == [int, float, bool]


def test_a_python_number_may_have_become_an_array(tmp_path):
    jaxbuf.save(tmp_path, {"step": jnp.int32(7)})
    assert jaxbuf.load(tmp_path, {"step": 0})["step"] == 7
    jaxbuf.save(tmp_path, {"step": 8})
    assert jaxbuf.load(tmp_path, {"step": jnp.int32(0)})["step"].dtype == jnp.int32


def test_the_memory_of_a_loaded_buffer_is_its_own(tmp_path):
    jaxbuf.save(tmp_path, item_buffer(4096).add(items(1, 2)))
    loaded = jaxbuf.load(tmp_path, item_buffer(4096))
    pointers = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(loaded)]
    assert len(set(pointers)) == len(pointers)
    where = loaded.data["obs"].unsafe_buffer_pointer()
    loaded = jaxbuf.add(loaded, items(3))
    assert loaded.data["obs"].unsafe_buffer_pointer() == where
    assert loaded.data["id"][:3].tolist() == [1, 2, 3]


def test_a_loaded_array_goes_where_like_says(tmp_path):
    jaxbuf.save(tmp_path, {"a": jnp.arange(3.0)})
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    free = jaxbuf.load(tmp_path, {"a": jnp.zeros(3)})["a"]
    bound = jaxbuf.load(tmp_path, {"a": jax.ShapeDtypeStruct((3,), jnp.float32, sharding=here)})
    assert not free.committed
    assert bound["a"].committed


@dataclasses.dataclass(frozen=True)
class Sampler(jaxbuf.Uniform):
    schedule: tuple = ((0, 0.5), (10, float("inf")))
    transform: object = np.tanh


DIFFERENT = {
    "a number": (
        item_buffer(sampler=jaxbuf.Prioritized(alpha=0.9)),
        "like.sampler.alpha is 0.9, but the checkpoint has 0.6; create it alike",
    ),
    "a strategy": (
        item_buffer(sampler=jaxbuf.Softmax()),
        "like.sampler is Softmax, but the checkpoint has Prioritized",
    ),
    "a capacity": (
        item_buffer(9, sampler=jaxbuf.Prioritized()),
        "like.occupancy.capacity is 9, but the checkpoint has 8; "
        "like.sampler_state.capacity is 9, but the checkpoint has 8; pass resize=True",
    ),
    "a class": (jaxbuf.Queue.create(ITEM, 8), "like is Queue, but the checkpoint has ItemBuffer"),
    "a structure": (
        jaxbuf.ItemBuffer.create({**ITEM, "more": 0.0}, 8, sampler=jaxbuf.Prioritized()),
        "like.data['more'] is not in the checkpoint",
    ),
    "a part": (
        jaxbuf.ItemBuffer.create({"id": jnp.int32(0)}, 8, sampler=jaxbuf.Prioritized()),
        "like.data['obs'] is missing",
    ),
    "a shape": (
        jaxbuf.ItemBuffer.create({**ITEM, "obs": jnp.zeros(4)}, 8, sampler=jaxbuf.Prioritized()),
        "like.data['obs'] has shape (8, 4), but the checkpoint has (8, 3)",
    ),
    "a dtype": (
        jaxbuf.ItemBuffer.create({**ITEM, "id": 0.0}, 8, sampler=jaxbuf.Prioritized()),
        "like.data['id'] has dtype float32, but the checkpoint has int32",
    ),
}


@pytest.mark.parametrize("case", DIFFERENT)
def test_a_checkpoint_of_something_else_is_refused(tmp_path, case):
    like, message = DIFFERENT[case]
    jaxbuf.save(tmp_path, item_buffer(sampler=jaxbuf.Prioritized()))
    with pytest.raises(ValueError, match=re.escape(message)):
        jaxbuf.load(tmp_path, like)
    if case != "a capacity":
        with pytest.raises(ValueError, match=re.escape(message)):
            jaxbuf.load(tmp_path, like, resize=True)
    if case == "a part":
        assert_same(jaxbuf.load(tmp_path, like, partial=True), like)
        return
    with pytest.raises(ValueError, match=re.escape(message)):
        jaxbuf.load(tmp_path, like, partial=True)


@struct.dataclass
class Agent:
    replay: object = None
    params: object = None
    layers: int = struct.field(pytree_node=False, default=2)


@struct.dataclass
class Resumed:
    replay: object


class Pair(NamedTuple):
    replay: object
    params: object


class Alone(NamedTuple):
    replay: object


# A pytree of a buffer and parameters, and a pytree of that buffer alone.
WHOLES = {
    "a dict": (lambda a, b: {"params": b, "replay": a}, lambda a: {"replay": a}),
    "a list": (lambda a, b: [a, b], lambda a: [a]),
    "fields that are None": (Agent, Agent),
    "a smaller dataclass": (Agent, Resumed),
    "a smaller tuple with names": (Pair, Alone),
    "deeper": (lambda a, b: {"x": ({"y": a}, b)}, lambda a: {"x": ({"y": a},)}),
    "a state of flax": (
        lambda a, b: (a, TrainState.create(apply_fn=None, params=b, tx=optax.adam(0.1))),
        lambda a: (a,),
    ),
}


@pytest.mark.parametrize("case", WHOLES)
def test_only_what_like_has_is_read(tmp_path, case, monkeypatch):
    whole, part = WHOLES[case]
    buffer = item_buffer(sampler=jaxbuf.Prioritized(), diversity=jaxbuf.Diversity())
    full = buffer.add(items(1, 2, 3), score=jnp.ones(3))
    jaxbuf.save(tmp_path, whole(full, {"w": jnp.ones((2**10, 2**10))}))
    read, leaf = [], checkpoint._Stored.leaf
    monkeypatch.setattr(
        checkpoint._Stored, "leaf", lambda self, name: read.append(name) or leaf(self, name)
    )
    shapes = jax.eval_shape(lambda: part(buffer))
    assert_same(jaxbuf.load(tmp_path, shapes, partial=True), part(full))
    assert len(read) == len(jax.tree.leaves(buffer))
    with pytest.raises(ValueError, match="is of something else"):
        jaxbuf.load(tmp_path, shapes)
    larger = jaxbuf.ItemBuffer.create(ITEM, 20, **buffer.options())
    grown = jax.tree.leaves(
        jaxbuf.load(tmp_path, part(larger), partial=True, resize=True),
        is_leaf=lambda node: isinstance(node, jaxbuf.ItemBuffer),
    )[0]
    assert grown.capacity == 20
    assert_ids(grown, [1, 2, 3])
    for other in ({}, {"diversity": jaxbuf.Diversity(0.5)}, {"parts": (jaxbuf.Removable(),)}):
        like = item_buffer(sampler=jaxbuf.Prioritized(), **other)
        with pytest.raises(ValueError, match=r"extras.* but the checkpoint has"):
            jaxbuf.load(tmp_path, part(like), partial=True)


def test_a_smaller_dataclass_has_the_same_configuration(tmp_path):
    jaxbuf.save(tmp_path, Agent(jnp.ones(2), jnp.ones(3)))
    with pytest.raises(ValueError, match=r"like\.layers is 3, but the checkpoint has 2"):
        jaxbuf.load(tmp_path, Agent(jnp.ones(2), layers=3), partial=True)
    with pytest.raises(ValueError, match=r"like\['replay'\] is not in the checkpoint"):
        jaxbuf.load(tmp_path, {"replay": jnp.ones(2)}, partial=True)
    jaxbuf.save(tmp_path, Resumed(jnp.ones(2)))
    with pytest.raises(ValueError, match="like is Agent, but the checkpoint has Resumed"):
        jaxbuf.load(tmp_path, Agent(jnp.ones(2)), partial=True)
    jaxbuf.save(tmp_path, {"a": 1, "b": 2})
    with pytest.raises(ValueError, match="or partial=True to load only what it has"):
        jaxbuf.load(tmp_path, {"a": 1})


def test_damage_of_what_is_not_read_is_not_looked_for(tmp_path):
    random = np.random.default_rng(0)
    tree = {"a": random.standard_normal(2**19), "b": jnp.arange(4), "c": jnp.arange(5.0)}
    jaxbuf.save(tmp_path, tree)
    [chunk] = tmp_path.glob("jaxbuf-*/data/0")
    chunk.write_bytes(chunk.read_bytes()[:-8])
    with pytest.raises(ValueError, match="is damaged"):
        jaxbuf.load(tmp_path, tree)
    del tree["a"]
    assert_same(jaxbuf.load(tmp_path, tree, partial=True), tree)


def test_configurations_of_one_s_own_are_compared(tmp_path):
    jaxbuf.save(tmp_path, [item_buffer(sampler=Sampler())])
    # Functions are code: another one is not seen.
    jaxbuf.load(tmp_path, [item_buffer(sampler=Sampler(transform=np.sin))])
    for other in (((0, 0.5), (11, float("inf"))), ((0, 0.5), (10, 1.0)), ((0, 0.5),)):
        with pytest.raises(ValueError, match=r"like\[0\]\.sampler\.schedule is"):
            jaxbuf.load(tmp_path, [item_buffer(sampler=Sampler(schedule=other))])


def test_of_trajectories_windows_and_periods_are_compared(tmp_path):
    jaxbuf.save(tmp_path, trajectories())
    for other in ({"sequence_length": 3}, {"period": 2}):
        name = next(iter(other))
        with pytest.raises(ValueError, match=rf"like\.occupancy\.{name} is"):
            jaxbuf.load(tmp_path, trajectories(**other))
    with pytest.raises(ValueError, match=r"like\.occupancy\.length is 4, but the checkpoint has 8"):
        jaxbuf.load(tmp_path, trajectories(4))
    message = "like has num_envs 3, but the checkpoint has 2; pass resize=True"
    with pytest.raises(ValueError, match=message):
        jaxbuf.load(tmp_path, trajectories(num_envs=3))


@pytest.mark.parametrize("resize", [False, True])
def test_rings_are_not_loaded_as_items_nor_items_as_rings(tmp_path, resize):
    kinds = {
        "rings": trajectories(),
        "items": item_buffer(),
        "queue": jaxbuf.Queue.create(ITEM, 8),
    }
    for name, buffer in kinds.items():
        jaxbuf.save(tmp_path / name, buffer)
        for other, like in kinds.items():
            if other != name:
                message = f"like is {type(like).__name__}, but the checkpoint has"
                with pytest.raises(ValueError, match=message):
                    jaxbuf.load(tmp_path / name, like, resize=resize)


@pytest.mark.parametrize("more", [0, 1])
def test_a_mixture_of_other_ratios_is_loaded_by_the_two_lines_of_the_refusal(tmp_path, more):
    def create(ratios):
        return jaxbuf.Mixture.create([item_buffer(4) for _ in ratios], ratios)

    old = create((0.1, 0.2, 0.7))
    parts = [part.add(items(i + 1)) for i, part in enumerate(old.parts)]
    jaxbuf.save(tmp_path, old.replace(parts=tuple(parts)))
    like = create((2, 1, 1) + more * (4,))
    with pytest.raises(ValueError, match=r"like\.ratios is .*make another mixture") as refusal:
        jaxbuf.load(tmp_path, like)
    names = {"jaxbuf": jaxbuf, "path": tmp_path, "like": like}
    first, second = str(refusal.value).splitlines()[1:]
    exec(f"{first.strip()}\n{second.strip()}", names)
    assert names["mixture"].ratios == like.ratios
    for i, part in enumerate(names["mixture"].parts):
        assert_ids(part, [i + 1] if i < 3 else [])
    jaxbuf.save(tmp_path, {"replay": old})
    with pytest.raises(ValueError, match=r"in which like\['replay'\] is like\['replay'\].replace"):
        jaxbuf.load(tmp_path, {"replay": like})


def test_bad_arguments_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no checkpoint in"):
        jaxbuf.load(tmp_path / "nowhere", item_buffer())
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ValueError, match="which is a file; choose a folder"):
        jaxbuf.save(tmp_path / "file", item_buffer())
    with pytest.raises(ValueError, match=re.escape("buffer['a'] is a str; expected an array")):
        jaxbuf.save(tmp_path / "run", {"a": "text"})
    with pytest.raises(ValueError, match=re.escape("buffer['a'] is a shape without numbers")):
        jaxbuf.save(tmp_path / "run", {"a": jax.ShapeDtypeStruct((3,), jnp.float32)})
    with pytest.raises(ValueError, match=re.escape("buffer['a'] has dtype object; expected num")):
        jaxbuf.save(tmp_path / "run", {"a": np.asarray([None])})
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["file"]


def test_a_newer_format_is_refused(tmp_path):
    jaxbuf.save(tmp_path, item_buffer())
    [manifest] = tmp_path.glob("*/manifest.json")
    records.write(manifest, {**records.read(manifest)[0], "format": 99})
    with pytest.raises(ValueError, match="has format 99; this version of jaxbuf reads formats up"):
        jaxbuf.load(tmp_path, item_buffer())


@pytest.mark.parametrize("nothing", [None, {}, [], (), optax.EmptyState(), {"a": [None]}])
def test_nothing_does_not_replace_a_checkpoint(tmp_path, nothing):
    tree = {"i": jnp.int32(1)}
    jaxbuf.save(tmp_path, tree)
    message = f"buffer is {nothing!r}, in which there are no arrays; expected a buffer or a pytree"
    with pytest.raises(ValueError, match=re.escape(message)):
        jaxbuf.save(tmp_path, nothing)
    assert_same(jaxbuf.load(tmp_path, tree), tree)


def everything_in(folder):
    return {
        str(path.relative_to(folder)): path.read_text() if path.is_file() else None
        for path in folder.rglob("*")
        if "jaxbuf" not in str(path.relative_to(folder))
    }


def test_what_others_keep_in_the_folder_stays(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "mine.txt").write_text("mine")
    folder = tmp_path / "run"
    for name in (
        "20240131/results.csv",
        "20240201/manifest/metadata",
        "20240202/manifest.json",
        "00000000.orbax-checkpoint-tmp/mine.txt",
        "00000001.new/mine.txt",
        "2024/mine.txt",
        "notes.txt",
        "20240203",
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text('{"mine": 1}')
    (folder / "20240204").mkdir()
    (folder / "20240205").symlink_to(tmp_path / "elsewhere")
    options = ocp.CheckpointManagerOptions(step_format_fixed_length=8)
    with ocp.CheckpointManager(folder, options=options) as manager:
        manager.save(7, args=ocp.args.Composite(manifest=ocp.args.JsonSave({"mine": 1})))
        manager.wait_until_finished()
    before = everything_in(folder)
    with pytest.raises(FileNotFoundError, match="there is no checkpoint in"):
        jaxbuf.load(folder, {"i": jnp.int32(0)})
    for i in range(3):
        jaxbuf.save(folder, {"i": jnp.int32(i)})
        assert int(jaxbuf.load(folder, {"i": jnp.int32(0)})["i"]) == i
    assert everything_in(folder) == before
    assert (folder / "20240205" / "mine.txt").read_text() == "mine"
    assert [path.name for path in folder.glob("jaxbuf-*")] == ["jaxbuf-00000002"]


def test_only_what_carries_a_manifest_is_removed(tmp_path):
    tree = {"i": jnp.int32(1)}
    jaxbuf.save(tmp_path / "run", tree)
    # A checkpoint that was moved elsewhere, and a folder that only has the name of one.
    (tmp_path / "run" / "jaxbuf-00000000").rename(tmp_path / "moved")
    (tmp_path / "run" / "jaxbuf-00000000").symlink_to(tmp_path / "moved")
    assert_same(jaxbuf.load(tmp_path / "run", tree), tree)
    (tmp_path / "run" / "jaxbuf-00000001").mkdir()
    (tmp_path / "run" / "jaxbuf-00000001" / "mine.txt").write_text("mine")
    with pytest.raises(ValueError, match="is damaged: its manifest cannot be read"):
        jaxbuf.load(tmp_path / "run", tree)
    jaxbuf.save(tmp_path / "run", tree)
    assert_same(jaxbuf.load(tmp_path / "run", tree), tree)
    assert (tmp_path / "run" / "jaxbuf-00000001" / "mine.txt").read_text() == "mine"
    assert (tmp_path / "moved" / "manifest.json").exists()


def test_a_folder_may_be_a_link_or_a_copy(tmp_path):
    tree = {"i": jnp.int32(1)}
    (tmp_path / "link").symlink_to(tmp_path / "folder" / "to come")
    jaxbuf.save(tmp_path / "link", tree)
    assert_same(jaxbuf.load(tmp_path / "folder" / "to come", tree), tree)
    shutil.copytree(tmp_path / "link", tmp_path / "copy", ignore=lambda *_: ["jaxbuf.lock"])
    assert_same(jaxbuf.load(tmp_path / "copy", tree), tree)
    assert [path.name for path in (tmp_path / "copy").iterdir()] == ["jaxbuf-00000000"]


@pytest.mark.parametrize("failure", ["a full disk", "an interrupt", "an error", "an early error"])
def test_a_save_that_fails_leaves_nothing_that_takes_space(tmp_path, monkeypatch, failure):
    tree = {"i": jnp.int32(1), "much": jnp.arange(2.0**16)}
    jaxbuf.save(tmp_path, tree)
    # As a save leaves it that was killed.
    (tmp_path / "jaxbuf-00000001.new").mkdir()
    (tmp_path / "jaxbuf-00000001.new" / "half").write_text("half")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with monkeypatch.context() as patch:
        if failure == "a full disk":
            resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, before[1]))
        else:
            error = KeyboardInterrupt if failure == "an interrupt" else OSError

            def stop(*_):
                raise error

            early = failure == "an early error"
            patch.setattr(*(checkpoint, "_write") if early else (records, "write"), stop)
        try:
            with pytest.raises((OSError, KeyboardInterrupt)):
                jaxbuf.save(tmp_path, {"i": jnp.int32(2), "much": tree["much"] * 1.5})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["jaxbuf-00000000", "jaxbuf.lock"]
    assert_same(jaxbuf.load(tmp_path, tree), tree)
    jaxbuf.save(tmp_path, {**tree, "i": jnp.int32(3)})
    assert int(jaxbuf.load(tmp_path, tree)["i"]) == 3


def test_all_is_on_disk_before_the_version_before_goes(tmp_path, monkeypatch):
    jaxbuf.save(tmp_path / "a" / "run", item_buffer())
    synced, removed = set(), []
    fsync, rmtree = os.fsync, shutil.rmtree

    def record_sync(descriptor):
        fsync(descriptor)
        synced.add(os.fstat(descriptor).st_ino)

    def check_and_remove(path, **options):
        version = max((tmp_path / "a" / "run").glob("jaxbuf-*1"))
        for part in (version.parent, version, *version.rglob("*")):
            assert part.stat().st_ino in synced, part
        assert len(list(version.rglob("*"))) > 2
        removed.append(path)
        rmtree(path, **options)

    monkeypatch.setattr(os, "fsync", record_sync)
    monkeypatch.setattr(shutil, "rmtree", check_and_remove)
    jaxbuf.save(tmp_path / "a" / "run", item_buffer())
    assert len(removed) == 1
    jaxbuf.save(tmp_path / "b" / "c" / "run", item_buffer())
    for part in (tmp_path, tmp_path / "b", tmp_path / "b" / "c"):
        assert part.stat().st_ino in synced, part


def test_savers_and_readers_of_one_folder_wait_for_each_other(tmp_path):
    def state(who, k):
        numbers = np.random.default_rng([who, k]).integers(0, 255, 10_000)
        return {"who": np.int64(who), "k": np.int64(k), "numbers": numbers}

    def save(who):
        for k in range(12):
            jaxbuf.save(tmp_path, state(who, k))

    def load(_):
        for _ in range(20):
            found = jaxbuf.load(tmp_path, state(0, 0))
            who, k = int(found["who"]), int(found["k"])
            assert_same(found, state(who, k))
        return who, k

    jaxbuf.save(tmp_path, state(0, 0))
    with concurrent.futures.ThreadPoolExecutor() as threads:
        savers = [threads.submit(save, who) for who in range(3)]
        readers = [threads.submit(load, who) for who in range(2)]
        for future in [*savers, *readers]:
            future.result()
    assert load(0)[1] == 11
    assert len(list(tmp_path.glob("jaxbuf-*"))) == 1


DISTRIBUTED = """
import sys, jax, jax.numpy as jnp, jaxbuf
port, rank, folder = sys.argv[1:]
jax.distributed.initialize(f"localhost:{port}", 2, int(rank))
buffer = jaxbuf.ItemBuffer.create(jnp.float32(0), 8).add(jnp.arange(5.0))
if rank == "1":
    jaxbuf.save(folder, buffer)
    print(jaxbuf.load(folder, buffer).data.tolist())
"""


@pytest.mark.slow
def test_a_process_of_a_distributed_job_saves_what_is_its_own(tmp_path):
    port = free_port()
    commands = [("-c", DISTRIBUTED, port, rank, tmp_path / "run") for rank in range(2)]
    out = run_processes(*commands)
    assert "[0.0, 1.0, 2.0, 3.0, 4.0, 0.0, 0.0, 0.0]" in out[1]


@pytest.mark.slow
def test_sharded_arrays_are_loaded_onto_another_number_of_devices(tmp_path):
    [out] = run_processes(("-m", "tests.programs.sharded_checkpoint", tmp_path), devices=8)
    assert out.endswith("the same\n")


@pytest.mark.slow
def test_sharded_arrays_move_between_numbers_of_processes(tmp_path):
    tree = sharded_checkpoint.values()
    jaxbuf.save(tmp_path / "alone", tree)
    port = free_port()
    commands = [
        ("-m", "tests.programs.sharded_checkpoint", tmp_path, port, rank) for rank in range(2)
    ]
    assert all(out.endswith("the same\n") for out in run_processes(*commands, devices=2))
    assert_same(jaxbuf.load(tmp_path / "4", tree), tree)


@pytest.mark.slow
@pytest.mark.parametrize("kind", peak_memory.KINDS)
def test_memory_holds_no_second_copy(tmp_path, kind):
    command = ("-m", "tests.programs.peak_memory", kind, tmp_path / "run")
    run_processes(command, devices=4)
    [out] = run_processes(command, devices=4)
    size, loading, appending, filling = map(float, out.split())
    assert size > 511
    # The first one includes the buffer.
    assert loading <= 1.25 * size + 64
    assert appending <= 0.25 * size + 64
    assert filling <= 0.6 * size


def test_a_chunk_lies_in_one_shard_and_has_a_sensible_size(monkeypatch):
    monkeypatch.setattr(checkpoint, "_CHUNK_BYTES", 2**10)
    for shape, chunk in {
        (8,): [8],
        (1024, 3): [64, 3],
        (1024, 300): [1, 300],
        (2, 1024): [1, 256],
        (997,): [997],
        (4 * 997,): [997],
    }.items():
        assert checkpoint._chunk(jnp.zeros(shape)) == chunk


def test_arrays_may_end_anywhere_in_the_chunks_of_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "_CHUNK_BYTES", 64)
    monkeypatch.setattr(checkpoint, "_ROUND_BYTES", 128)
    random = np.random.default_rng(0)
    sizes = [1, 63, 0, 64, 65, 0, 400, 2, 128]
    tree = [random.integers(0, 255, size, np.uint8) for size in sizes]
    jaxbuf.save(tmp_path, tree)
    assert_same(jaxbuf.load(tmp_path, tree), tree)
    assert len(list(tmp_path.glob("*/data/[0-9]*"))) == -(-sum(sizes) // 64)


def outcome(path, tree):
    try:
        loaded = jaxbuf.load(path, tree)
    except ValueError as error:
        clear = re.search("is damaged|is of something else", str(error))
        return "refused" if clear else str(error)
    assert_same(loaded, tree)
    return "unharmed"


def test_damage_is_seen_and_touches_nothing_else(tmp_path):
    random = np.random.default_rng(0)
    tree = {f"{i}": random.standard_normal((64, 1024)) for i in range(2)}
    tree["buffer"] = item_buffer(sampler=jaxbuf.Prioritized()).add(items(1, 2))
    jaxbuf.save(tmp_path / "other", tree)
    jaxbuf.save(tmp_path / "run", tree)
    outcomes = []
    [version] = (tmp_path / "run").glob("jaxbuf-*")
    files = [path for path in version.rglob("*") if path.is_file()]
    assert len(files) == 3
    for file in files:
        data = file.read_bytes()
        for spoiled in damaged(data):
            file.unlink() if spoiled is None else file.write_bytes(spoiled)
            outcomes.append(outcome(tmp_path / "run", tree))
            assert outcomes[-1] in ("unharmed", "refused"), (file.name, spoiled)
            file.write_bytes(data)
    assert outcomes.count("refused") >= 11
    assert_same(jaxbuf.load(tmp_path / "other", tree), tree)
    jaxbuf.save(tmp_path / "run", tree)
    assert_same(jaxbuf.load(tmp_path / "run", tree), tree)


def test_numbers_that_changed_on_the_way_are_seen(tmp_path):
    tree = {"a": jnp.arange(4.0)}
    jaxbuf.save(tmp_path, tree)
    [version] = tmp_path.glob("jaxbuf-*")
    shutil.rmtree(version / "data")
    changed = np.asarray([0.0, 1.0, 2.0, 4.0], np.float32).view(np.uint8)
    checkpoint._write(version, [changed], chunk=16)
    with pytest.raises(
        ValueError, match=re.escape("is damaged: ['a']: the numbers differ from the saved ones")
    ):
        jaxbuf.load(tmp_path, tree)


@pytest.mark.parametrize(
    ("capacity", "added"), quick([(3, 13), (11, 4), (11, 13)], {(3, 13), (11, 4)})
)
def test_another_capacity_keeps_the_newest(tmp_path, capacity, added):
    # A buffer of the other size that was given the same items and priorities is the twin.
    sampler = jaxbuf.Prioritized(alpha=1.0)
    ids = np.arange(1, added + 1)
    old = item_buffer(8, sampler=sampler)
    rows = items(*np.arange(1, 14))
    old = jaxbuf.add(old, rows, priority=rows["id"].astype(np.float32), mask=rows["id"] <= added)
    new = moved(tmp_path, old, item_buffer(capacity, sampler=sampler))
    kept = ids[-min(8, capacity, added) :]
    assert new.capacity == capacity
    assert int(new.size) == len(kept)
    mass = dict(zip(np.asarray(new.data["id"]), np.asarray(new.sampler_state.leaves), strict=True))
    assert {i: mass[i] for i in kept} == {i: float(i) for i in kept}
    assert float(new.sampler_state.root("sum")) == kept.sum()
    assert_same(new.counters, old.counters)
    assert not np.any(still_held(old, new))
    # From here on the oldest goes first again.
    for i in range(capacity):
        new = jaxbuf.add(new, items(100 + i))
        everything = [*kept.tolist(), *range(100, 101 + i)]
        assert_ids(new, everything[-capacity:])


def test_another_capacity_of_many_seeds(tmp_path):
    def fill(ids):
        data = {"obs": jnp.zeros((6, 3)), "id": ids}
        return item_buffer(4).add(data, mask=ids > 0)

    ids = jnp.asarray([[1, 2, 3, 4, 5, 6], [0, 0, 7, 8, 0, 9]], jnp.int32)
    like = jax.jit(jax.vmap(lambda _: item_buffer(2)))(jnp.arange(2))
    new = moved(tmp_path, {"buffers": jax.jit(jax.vmap(fill))(ids)}, {"buffers": like})["buffers"]
    assert np.sort(new.data["id"], axis=1).tolist() == [[5, 6], [8, 9]]


@pytest.mark.parametrize("capacity", quick([3, 12], {3}))
def test_another_capacity_keeps_the_highest_scores(tmp_path, capacity):
    options = {"evictor": jaxbuf.Lowest(), "sampler": jaxbuf.Softmax(temperature=0.5)}
    score = np.asarray([5.0, -1.0, 7.0, 7.0, 0.0, 50.0, 3.0, -np.inf, 7.0, 2.0], np.float32)
    old = jaxbuf.add(item_buffer(8, **options), items(*range(10)), score=score)
    new = moved(tmp_path, old, item_buffer(capacity, **options))
    twin = sorted(range(10), key=lambda i: (score[i], i))[-min(8, capacity) :]
    assert_ids(new, twin)
    live = np.arange(capacity) < len(twin)
    ids = np.asarray(new.data["id"])[live]
    np.testing.assert_array_equal(np.asarray(new.occupancy.score)[live], score[ids])
    np.testing.assert_array_equal(np.asarray(new.sampler_state.scores.leaves)[live], score[ids])
    # Of two equal scores the older item is evicted first, as without a checkpoint.
    new = jaxbuf.add(new, items(99), score=jnp.asarray([7.0]))
    assert_ids(new, [5, 8, 99] if capacity == 3 else [*twin, 99])


PARTS = (jaxbuf.Prioritized(alpha=1.0), jaxbuf.RankBased(alpha=1.0), jaxbuf.Uniform())
# A sampler, another capacity, and the shares of the items that stay.
MOVED = [
    # The largest score does not stay.
    (jaxbuf.Softmax(), 2, {2: 1.0, 3: 1 / np.e}),
    *((jaxbuf.RankBased(alpha=1.0, sort_every=n), 2, {2: 2 / 3, 3: 1 / 3}) for n in (1, 9)),
    *((jaxbuf.RankBased(1.0, sort_every=n), 7, {0: 12, 1: 3, 2: 6, 3: 4}) for n in (1, 9)),
    (
        jaxbuf.Blend(PARTS, (0.5, 0.25, 0.25)),
        2,
        {2: 3 / 10 + 1 / 6 + 1 / 8, 3: 2 / 10 + 1 / 12 + 1 / 8},
    ),
]


@pytest.mark.parametrize("number", quick(range(len(MOVED)), {0, 4, 5}))
def test_a_sampler_draws_from_what_stays_in_another_size(tmp_path, number):
    sampler, capacity, law = MOVED[number]
    numbers = jnp.asarray([500.0, 1.0, 3.0, 2.0])
    given = {"score" if sampler.uses_score else "priority": numbers}
    old = jaxbuf.add(item_buffer(4, sampler=sampler), items(0, 1, 2, 3), **given)
    new = moved(tmp_path, old, item_buffer(capacity, sampler=sampler))
    assert new.metrics().get("changes_since_sort", 0) == 0
    batch = jaxbuf.sample(new, jax.random.key(0), 64)
    expected = [law[i] / sum(law.values()) for i in batch.data["id"].tolist()]
    np.testing.assert_allclose(batch.probability, expected, rtol=1e-5)


@pytest.mark.slow
def test_staleness_goes_on_in_another_size(tmp_path):
    options = {"sampler": jaxbuf.Staleness(replacement=False)}
    old = jaxbuf.add(item_buffer(6, **options), items(0, 1, 2, 3, 4, 5))
    for seed in range(3):
        old, batch = jaxbuf.next_batch(old, jax.random.key(seed), 2)
    waited = dict(zip(old.data["id"].tolist(), old.sampler_state.age.tolist(), strict=True))
    for capacity in (4, 9):
        new = moved(tmp_path, old, item_buffer(capacity, **options))
        live, ids = np.asarray(new.live), np.asarray(new.data["id"])
        ages = np.asarray(new.sampler_state.age)[live]
        assert ages.tolist() == [waited[i] for i in ids[live].tolist()]
        assert not np.isin(new.sample(jax.random.key(0), 2).data["id"], batch.data["id"]).any()


@pytest.mark.parametrize(("waiting", "kept"), [(3, [3, 4, 5]), (6, [3, 4, 5, 6])])
def test_a_shorter_queue_keeps_those_who_came_first(tmp_path, waiting, kept):
    queue = jaxbuf.Queue.create(ITEM, 7).add(items(1, 2)).take(2)[0]
    queue = queue.add(items(*range(3, 3 + waiting)))
    new = moved(tmp_path, queue, jaxbuf.Queue.create(ITEM, 4))
    assert new.metrics()["rejected"] == waiting - len(kept)
    assert_ids(new, kept)
    new, batch = new.take(5)
    assert np.asarray(batch.data["id"])[np.asarray(batch.valid)].tolist() == kept


@pytest.mark.parametrize(
    ("num_envs", "length", "period"),
    [
        (4, 12, 2),
        pytest.param(3, 4, 1, marks=pytest.mark.slow),
        *(pytest.param(*size, 2, marks=pytest.mark.slow) for size in ((1, 4), (2, 8), (3, 6))),
    ],
)
def test_another_size_of_rings_keeps_the_newest_steps_of_the_first(
    tmp_path, num_envs, length, period
):
    options = {"sequence_length": 3, "period": period, "sampler": jaxbuf.Prioritized(alpha=1.0)}
    # Rings of different sizes; a window's priority is the number of its last step, starting at 1.
    old, counts, rows = trajectories(8, 3, **options), (13, 5, 7), np.arange(13)
    ids = np.stack([100 * (env + 1) + rows for env in range(3)]).astype(np.int32)
    steps = {"obs": np.repeat(ids[..., None], 3, -1).astype(np.float32), "id": ids}
    mask = rows[None] < np.asarray(counts)[:, None]
    old = jaxbuf.add(old, steps, priority=ids.astype(np.float32), mask=mask)
    like = {"a": [trajectories(length, num_envs, **options)]}
    new = moved(tmp_path, {"a": [old]}, like)["a"][0]
    twin = [ids[env, :count][-min(8, length) :].tolist() for env, count in enumerate(counts)]
    twin = twin[:num_envs]
    assert_ids(new, itertools.chain(*twin))
    assert new.occupancy.held.tolist() == [len(ring) for ring in twin] + [0] * (num_envs - 3)
    # Windows start where they started: at even steps, if every other place is a start.
    windows = {
        tuple(ring[i : i + 3]): float(ring[i + 2])
        for ring in twin
        for i in range(len(ring) - 2)
        if ring[i] % period == 0
    }
    assert int(new.occupancy.size) == len(windows)
    found, at = windows_of(new)
    masses = np.asarray(new.sampler_state.leaves)
    assert dict(zip(found, masses[at].tolist(), strict=True)) == windows
    assert float(new.sampler_state.root("sum")) == sum(windows.values())
    assert not np.any(still_held(old, new))
    # The next steps follow those in the buffer, and new environments begin.
    more = np.stack([np.arange(2) + (ring[-1] + 1 if ring else 900) for ring in twin])
    more = np.concatenate([more, np.full((max(num_envs - 3, 0), 1), 900) + np.arange(2)])
    rows = {"obs": np.zeros((num_envs, 2, 3), np.float32), "id": more.astype(np.int32)}
    found, _ = windows_of(jaxbuf.add(new, rows))
    assert np.all(np.diff(np.asarray(found), axis=1) == 1)


@pytest.mark.parametrize(
    ("num_envs", "length", "sampler"),
    [
        pytest.param(1, 8, jaxbuf.Prioritized(), marks=pytest.mark.slow),
        pytest.param(3, 12, jaxbuf.Shuffled(), marks=pytest.mark.slow),
        (2, 4, jaxbuf.Prioritized()),
    ],
)
def test_another_size_of_rings_keeps_what_is_known_of_episodes(tmp_path, num_envs, length, sampler):
    step = {"id": jnp.int32(0), "reward": jnp.float32(0), "terminated": jnp.bool_(False)}

    def create(num_envs, length=8):
        episodes = jaxbuf.Episodes(record_return=True, discount=1.0, boundary="avoid")
        options = {"episodes": episodes, "freshness": jaxbuf.Freshness(max_use=2)}
        options |= {"sequence_length": 2, "num_earliest_ignored": 1, "sampler": sampler}
        return jaxbuf.TrajectoryBuffer.create(step, num_envs, length, **options)

    ids = np.stack([np.arange(13), 50 + np.arange(13)]).astype(np.int32)
    ends = np.isin(ids, [2, 7, 10, 51, 55, 60])
    rows = {"id": ids, "reward": np.ones((2, 13), np.float32), "terminated": ends}
    versions = np.array([[1] * 13, [2] * 13], np.int32)
    old = jaxbuf.add(create(2), rows, version=versions).set_version(3)
    batch = jaxbuf.sample(old, jax.random.key(0), 2)
    old = old.mark_used(batch.slots)
    new = moved(tmp_path, old, create(num_envs, length))

    @functools.partial(jax.jit, static_argnums=(1, 2))
    def known(buffer, envs, per_env):
        first = buffer.earliest_position
        at = first[:envs, None] + jnp.arange(per_env, dtype=jnp.uint32)[None]
        env = jnp.broadcast_to(jnp.arange(envs, dtype=jnp.int32)[:, None], at.shape)
        episode = buffer.episode(env, at)
        return (
            buffer.get_field("id", env, at),
            episode.begin - first[:envs, None],
            episode.to_end,
            episode.value,
        )

    # The contents of a buffer that was as short from the beginning, or of the old one.
    twin = jaxbuf.add(create(2, length), rows, version=versions) if length < 8 else old
    envs, kept = min(num_envs, 2), min(length, 8)
    chex.assert_trees_all_equal(known(new, envs, kept), known(twin, envs, kept))
    there = {row for row in windows_of(twin)[0] if row[0] < 50 or num_envs > 1}
    windows, at = windows_of(new)
    assert set(windows) == there
    if sampler.uses_priority:
        assert np.flatnonzero(new.sampler_state.leaves).tolist() == at.tolist()

    def uses(buffer):
        windows, at = windows_of(buffer)
        count, staleness = (
            np.asarray(x) for x in buffer.freshness.read(buffer.freshness_state, at)
        )
        rows = zip(windows, count.tolist(), staleness.tolist(), strict=True)
        return {row for row in rows if row[0] in there}

    assert uses(new) == uses(old)
    # Open episodes go on, and environments that were not there begin.
    more = {"id": jnp.full((num_envs, 2), 99), "reward": jnp.ones((num_envs, 2))}
    new = new.add({**more, "terminated": jnp.array([[False, True]] * num_envs)})
    testing.assert_valid(new)
    newest = new.end_position - jnp.uint32(1)
    begin = new.episode(jnp.arange(num_envs, dtype=jnp.int32), newest).begin
    assert (newest - begin).tolist() == [3, 3, 1][:num_envs]


@pytest.mark.slow
def test_another_number_of_environments_of_many_seeds(tmp_path):
    seeds = jnp.arange(2, dtype=jnp.int32)

    def create(num_envs):
        return jax.jit(jax.vmap(lambda _: trajectories(8, num_envs)))(seeds)

    def rows(seed):
        ids = 100 * seed + jnp.arange(10, dtype=jnp.int32).reshape(2, 5)
        return {"obs": jnp.repeat(ids[..., None], 3, -1).astype(jnp.float32), "id": ids}

    old = jax.jit(jax.vmap(lambda buffer, seed: buffer.add(rows(seed))))(create(2), seeds)
    for num_envs in (1, 3):
        new = moved(tmp_path, old, create(num_envs))
        for seed in range(2):
            one = jax.tree.map(lambda leaf, seed=seed: leaf[seed], new)
            assert_ids(one, 100 * seed + np.arange(5 * min(num_envs, 2)))


@pytest.mark.parametrize("keep", quick(["first", "best"], {"best"}))
def test_another_capacity_keeps_what_is_known_of_points(tmp_path, keep):
    def create(capacity):
        diversity = jaxbuf.Diversity(cutoff=0.5, field="obs", keep=keep)
        return item_buffer(capacity, diversity=diversity)

    old = jaxbuf.add(create(6), items(1, 1, 2, 3, 4, 5), score=jnp.zeros(6))
    new = moved(tmp_path, old, create(4))
    assert_ids(new, [2, 3, 4, 5])
    new = jaxbuf.add(new, items(5, 3, 9), score=jnp.zeros(3))
    assert_ids(new, [3, 4, 5, 9])


@dataclasses.dataclass(frozen=True)
class Memorizer(jaxbuf.Uniform):
    """Keeps something whose shape says nothing of slots."""

    def init(self, capacity):
        return jnp.zeros((2 * capacity + 1,))


def test_what_cannot_be_moved_is_refused(tmp_path):
    jaxbuf.save(tmp_path, item_buffer(8, sampler=Memorizer()))
    with pytest.raises(ValueError, match="cannot be moved; load it with the size that was saved"):
        jaxbuf.load(tmp_path, item_buffer(3, sampler=Memorizer()), resize=True)
    jaxbuf.save(tmp_path, trajectories(8, 2, sampler=Memorizer()))
    message = "like has num_envs 3 (the checkpoint has 2) and length 4 (the checkpoint has 8), and"
    with pytest.raises(ValueError, match=re.escape(message)):
        jaxbuf.load(tmp_path, trajectories(4, 3, sampler=Memorizer()), resize=True)


@dataclasses.dataclass(frozen=True)
class CountIds(jaxbuf.strategies.Part):
    """Remembers whether the id in each slot is odd, and how many are even and odd."""

    def init(self, data, slots):
        return jnp.full((slots,), -1, jnp.int32), jnp.zeros((2,), jnp.int32)

    def on_add(self, state, index, rows):
        odd = state[0].at[index].set(rows.items["id"] % 2, mode="drop")
        return odd, jnp.sum(odd[None] == jnp.arange(2)[:, None], axis=1, dtype=jnp.int32)


@dataclasses.dataclass(frozen=True)
class MovedIds(CountIds):
    def move(self, empty, state, moves):
        odd = moves(empty[0], state[0])
        return odd, jnp.sum(odd[None] == jnp.arange(2)[:, None], axis=1, dtype=jnp.int32)


def test_a_part_that_counts_items_must_say_how_they_move(tmp_path):
    jaxbuf.save(tmp_path, item_buffer(8, parts=(CountIds(),)))
    with pytest.raises(ValueError, match=r"state has an array of shape \(2,\).*a method move"):
        jaxbuf.load(tmp_path, item_buffer(3, parts=(CountIds(),)), resize=True)


@pytest.mark.parametrize(("capacity", "counts"), [(3, [1, 2]), (12, [3, 5])])
def test_a_part_of_ones_own_moves_with_its_items(tmp_path, capacity, counts):
    old = jaxbuf.add(item_buffer(8, parts=(MovedIds(),)), items(0, 2, 1, 3, 4, 5, 7, 6, 8, 11, 13))
    new = moved(tmp_path, old, item_buffer(capacity, parts=(MovedIds(),)))
    odd, found = (np.asarray(x) for x in new.extra_states[0])
    live = np.asarray(new.occupancy.live(jnp.arange(capacity, dtype=jnp.int32)))
    np.testing.assert_array_equal(odd, np.where(live, np.asarray(new.data["id"]) % 2, -1))
    assert found.tolist() == counts


# flax 0.12.0 calls what jax 0.10 has moved.
@pytest.mark.filterwarnings("ignore:jax.core.get_opaque_trace_state is deprecated")
def test_a_buffer_in_a_train_state_of_orbax(tmp_path):
    model = nn.Dense(2)

    class State(TrainState):
        replay: jaxbuf.ItemBuffer
        key: jax.Array

    def create(seed):
        return State.create(
            apply_fn=model.apply,
            params=model.init(jax.random.key(seed), jnp.zeros((1, 3))),
            tx=optax.adam(1e-3),
            replay=item_buffer(sampler=jaxbuf.Prioritized()),
            key=jax.random.key(seed),
        )

    state = create(0)
    state = state.replace(replay=state.replay.add(items(1, 2, 3)), step=jnp.int32(4))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "theirs", state)
        checkpointer.wait_until_finished()
        here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        abstract = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x), sharding=here), state
        )
        assert_same(checkpointer.restore(tmp_path / "theirs", abstract).replay, state.replay)
    # And by ours the whole state, whose functions and fresh step counter do not matter.
    jaxbuf.save(tmp_path / "ours", state)
    loaded = jaxbuf.load(tmp_path / "ours", create(1))
    for name in ("replay", "params", "opt_state", "key", "step"):
        assert_same(getattr(loaded, name), getattr(state, name))


@pytest.mark.parametrize("kills", [4, pytest.param(kill.KILLS, marks=pytest.mark.slow)])
def test_a_killed_save_leaves_a_whole_checkpoint(tmp_path, kills):
    written = kill.kill_repeatedly(kill.checkpoint_writer, tmp_path / "run", 0.3, kills)
    assert written > 0
    left = [path for path in (tmp_path / "run").iterdir() if path.name != "jaxbuf.lock"]
    assert len(left) <= 3, "what a killed save leaves is never removed"


@pytest.mark.slow
def test_two_savers_that_are_killed_leave_a_whole_checkpoint(tmp_path):
    assert kill.kill_two_savers(tmp_path / "run", longest=0.5) > 0


def test_orbax_is_imported_where_it_is_needed_only():
    code = (
        "import sys, jaxbuf; sys.exit(bool({'orbax', 'tensorstore', 'minari'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_arrays_of_another_byte_order_come_back(tmp_path):
    saved = {"x": np.asarray([1.5, -2], ">f4"), "n": np.asarray(7, ">i2")}
    jaxbuf.save(tmp_path, saved)
    for like in (saved, {"x": np.zeros(2, np.float32), "n": np.int16(0)}):
        found = jaxbuf.load(tmp_path, like)
        assert (found["x"].tolist(), int(found["n"])) == ([1.5, -2], 7)
    found = jaxbuf.load(tmp_path, {"x": jnp.zeros(2), "n": jnp.int16(0)})
    assert (found["x"].tolist(), int(found["n"])) == ([1.5, -2], 7)

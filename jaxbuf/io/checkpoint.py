"""Checkpoints of buffers, and of pytrees with buffers in them.

The meaning of a pytree's arrays depends on its configuration: with another ``alpha``, for example,
the same masses are other priorities. A checkpoint therefore also holds the configuration, and
``load`` compares it.
"""

import contextlib
import dataclasses
import functools
import itertools
import math
import os
import secrets
import stat
import time
import zlib
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jaxtyping import PyTree, UInt8

from jaxbuf.core import checks, trees
from jaxbuf.core.donation import check_not_donated
from jaxbuf.core.hyperparameters import Varying
from jaxbuf.core.segment_tree import NARROW, narrow, using_width, with_widths_of
from jaxbuf.io import earlier, records, resizing, structure, versions, zarr
from jaxbuf.io.records import Record
from jaxbuf.io.structure import Configuration, LeafType

if TYPE_CHECKING:
    from tensorstore import TensorStore

Tree = TypeVar("Tree")

_FORMAT = 2
_DATA = "data"
_SHARDED = "sharded"
# The checksums of the chunks that a process wrote, by leaf and chunk.
_CHECKSUMS = "places-{}.json"
_TOKEN_FILE = "shared"
_UINT8 = np.dtype(np.uint8)
_BYTE_ROW = jax.ShapeDtypeStruct((1,), _UINT8)
_CHUNK_BYTES = 2**24
_ROUND_BYTES = 16 * _CHUNK_BYTES
# Seconds until a process must see what another one wrote.
_TIMEOUT = 5.0


def save(path: str | os.PathLike[str], buffer: PyTree) -> None:
    """Writes a checkpoint to a folder and replaces the previous one.

    Saving is atomic: a process that is killed at any moment leaves either the complete previous
    checkpoint or the complete new one. When ``save`` returns, everything is on disk and survives a
    power failure, and the buffer may be donated. Processes and threads that use one folder wait for
    each other, and the last checkpoint is kept. To keep one for each process, use separate folders.

    Arrays may be sharded over several devices. If one has shards on devices of other processes of a
    ``jax.distributed`` job, all processes must call this at the same time with the same folder, on
    a file system that they share. Each process writes its own shards. Process 0 writes all other
    leaves, of which all processes must have the same copy.

    Args:
        path: The folder. It is created if needed; other files in it are left alone.
        buffer: A buffer, or any pytree of arrays, PRNG keys and Python numbers with buffers in it,
            such as a training state.

    Raises:
        ValueError: If ``path`` is a file, ``buffer`` holds no arrays, or a leaf is not an array or
            was donated.
        OSError: If the checkpoint cannot be written, by this process or by another one, or if the
            processes do not share the folder.
        jax.errors.JaxRuntimeError: Or a plain ``ValueError``, both with the message of the
            collective, if another process has died. The previous checkpoint remains. The job has to
            be started again.

    Example:
        >>> import tempfile, jax, jax.numpy as jnp, jaxbuf
        >>> buffer = jaxbuf.ItemBuffer.create(jnp.float32(0), capacity=8)
        >>> buffer = buffer.add(jnp.arange(5.0))
        >>> state = {"key": jax.random.key(0), "replay": buffer}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     jaxbuf.save(folder, state)
        ...     state = jaxbuf.load(folder, like=state)
        >>> int(state["replay"].size)
        5
    """
    folder = check_folder("path", path)
    check_not_donated(buffer, "buffer")
    # All platforms write and read the same form of segment trees.
    buffer = narrow(buffer)
    types = structure.leaf_types(buffer, "buffer")
    if not types:
        raise ValueError(
            f"buffer is {buffer!r}, in which there are no arrays; expected a buffer or a pytree of "
            "arrays"
        )
    leaves = dict(zip(types, jax.tree.leaves(buffer), strict=True))
    values = [_numbers(leaf, f"buffer{name}") for name, leaf in leaves.items()]
    # Arrays that are whole on one device, or replicated on each, are written to one file.
    sharded = {
        i: value
        for i, value in enumerate(values)
        if isinstance(value, jax.Array) and value.size and not value.is_fully_replicated
    }
    arrays = {i: _to_bytes(value) for i, value in enumerate(values) if i not in sharded}
    described: dict[str, Record] = {}
    for i, (name, leaf) in enumerate(leaves.items()):
        record = dataclasses.asdict(types[name])
        if i in sharded:
            record["chunk"] = _chunk(sharded[i])
        else:
            record |= {"bytes": arrays[i].size, "crc32": zlib.crc32(arrays[i].data)}
        if structure.is_key(types[name].dtype):
            record["key"] = str(jax.random.key_impl(leaf))
        described[name] = record
    chunk = min(max(1, sum(array.size for array in arrays.values())), _CHUNK_BYTES)
    manifest: Record = {
        "format": _FORMAT,
        "configuration": structure.configuration(buffer),
        "chunk": chunk,
        "leaves": described,
    }
    is_local = all(array.is_fully_addressable for array in sharded.values())
    if sharded:
        manifest["writers"] = [jax.process_index()] if is_local else [*range(jax.process_count())]

    def write_shards(version: Path) -> None:
        # The checksum within a chunk cannot reveal that two chunks were swapped.
        checksums = {str(i): _write_shards(version, i, array) for i, array in sharded.items()}
        if checksums:
            records.write(version / _CHECKSUMS.format(jax.process_index()), checksums)

    def write_rest(version: Path) -> None:
        _write(version, [*arrays.values()], chunk)
        records.write(version / "manifest.json", manifest)

    def write(version: Path) -> None:
        write_shards(version)
        write_rest(version)

    if is_local:
        versions.replace(folder, write)
    else:
        _replace_together(folder, write_shards, write_rest)


def load(path: str | os.PathLike[str], like: Tree, *, resize: bool = False) -> Tree:
    """Reads a checkpoint.

    A run continues from the result bit for bit, even on other devices or with another number of
    processes. A process only reads its own shards of a sharded array.

    Args:
        path: The folder that it was saved to.
        like: A pytree like the saved one, created with the same configuration. Only its structure,
            shapes and dtypes matter, so the result of ``jax.eval_shape`` is enough. Arrays that are
            committed to devices, and shapes with a sharding, determine where the result is placed.
            The sharding may differ from that of the saved arrays.
        resize: Whether buffers may differ from those of ``like`` in their ``capacity`` (of an
            ``ItemBuffer`` or a ``Queue``), ``length`` or ``num_envs`` (of a ``TrajectoryBuffer``)
            or number of shards (of a ``Sharded`` with ``ItemBuffer`` shards without parts). If not
            all items fit, the evictor's choice is kept: the newest items or the highest scores. A
            queue keeps its oldest items, and a trajectory buffer the newest steps of its first
            ``num_envs`` environments; more environments than were saved begin without steps.
            Another number of shards gets the items in turn, in order of age, and every process
            reads all of them. Slots that were sampled before become stale, and positions of steps
            are counted anew. What samplers and parts keep moves with the items, by ``Sampler.move``
            and ``Part.move``.

    Raises:
        FileNotFoundError: If there is no checkpoint of version 0.2.0 or later.
        ValueError: If the checkpoint is damaged, has another format, or does not match ``like``;
            the message names the differences.

    Example:
        >>> import tempfile, jax.numpy as jnp, jaxbuf
        >>> small = jaxbuf.ItemBuffer.create(jnp.float32(0), capacity=4).add(jnp.arange(3.0))
        >>> large = jaxbuf.ItemBuffer.create(jnp.float32(0), capacity=100)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     jaxbuf.save(folder, small)
        ...     large = jaxbuf.load(folder, like=large, resize=True)
        >>> large.capacity, large.data[:3].tolist()
        (100, [0.0, 1.0, 2.0])
    """
    folder = checks.check_path("path", path).resolve()
    checks.check_flag("resize", resize)
    with versions.locked(folder, shared=True):
        found = versions.find(folder)
        if not found:
            raise FileNotFoundError(f"there is no checkpoint in {path} of jaxbuf 0.2.0 or later")
        with using_width(NARROW):
            tree = _load(found[-1], narrow(like), resize)
    if jax.tree.structure(tree) == jax.tree.structure(like):
        return tree
    # ``like`` has wide segment trees, and a checkpoint only narrow ones.
    return jax.tree.map(_put_like, with_widths_of(like, tree), like)


def check_folder(name: str, path: str | os.PathLike[str]) -> Path:
    """Returns the absolute path of a folder that exists or can be created.

    Raises:
        ValueError: If it is a file.
    """
    folder = checks.check_path(name, path).resolve()
    if records.is_other(folder, stat.S_ISDIR):
        raise ValueError(f"{name} is {path}, which is a file; choose a folder")
    return folder


def _load(version: Path, like: Tree, resize: bool) -> Tree:
    manifest = _read_manifest(version)
    if manifest["format"] != _FORMAT:
        raise ValueError(
            f"the checkpoint {version} has format {manifest['format']}; this version of jaxbuf "
            f"reads formats up to {_FORMAT}"
        )
    try:
        described = dict(manifest["leaves"])
        saved = {name: _check_record(record) for name, record in described.items()}
        configuration = dict(manifest["configuration"])
        _require(0 < _integer(manifest["chunk"]) <= _CHUNK_BYTES)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise _damaged(version, "its manifest is incomplete or not one of jaxbuf") from error
    # From ``like`` by way of the saved sizes to the saved format, and back with what was loaded.
    sized: PyTree = resizing.as_saved(like, configuration, saved) if resize else like
    target = earlier.as_saved(sized, saved, configuration)
    obsolete = {name for name in saved if earlier.was_empty(name, saved[name], configuration)}
    needed = {name: leaf for name, leaf in saved.items() if name not in obsolete}
    _compare(version, configuration, needed, target, resize)

    leaves = dict(zip(structure.leaf_types(target, "like"), jax.tree.leaves(target), strict=True))
    loaded: dict[str, Any] = {}
    stored = _read(version, manifest)
    for name, leaf in saved.items():
        try:
            data = next(stored)
            if name not in obsolete:
                loaded[name] = _restore(data, leaf, described[name], leaves[name])
        except MemoryError:
            raise
        except Exception as error:
            # Each layer of the storage has its own types of errors.
            raise _damaged(version, f"{name or 'its array'}: {zarr.reason(error)}") from error
    tree = jax.tree.unflatten(jax.tree.structure(target), [loaded[name] for name in leaves])
    renewed = earlier.renewed(tree, sized, configuration)
    if resize:
        renewed = resizing.fit(renewed, like)
    return jax.tree.map(_put_like, renewed, like)


def _check_record(record: Record) -> LeafType:
    """Returns the type of a leaf, which a manifest describes.

    Raises:
        ValueError: If it describes no leaf; also KeyError and TypeError.
    """
    shape = tuple(_integer(size) for size in record["shape"])
    leaf = LeafType(shape, record["dtype"], record["scalar"])
    _require(isinstance(leaf.dtype, str) and isinstance(leaf.scalar, bool))
    *axes, itemsize = _stored_shape(record)
    if "chunk" in record:
        chunk = [_integer(length) for length in record["chunk"]]
        _require(
            len(chunk) == len(axes) and all(0 < c <= n for c, n in zip(chunk, axes, strict=True))
        )
        _require(math.prod(chunk) * itemsize < 2**62)
    else:
        _integer(record["crc32"])
        _require(record["bytes"] == math.prod(axes) * itemsize)
    return leaf


def _integer(value: Any) -> int:
    _require(type(value) is int and value >= 0)
    return value


def _require(condition: bool) -> None:
    """Raises ValueError if a condition on a manifest does not hold."""
    if not condition:
        raise ValueError("a number is not one that jaxbuf writes")


def _compare(
    version: Path,
    configuration: Configuration,
    saved: dict[str, LeafType],
    target: PyTree,
    resize: bool,
) -> None:
    """Checks that a checkpoint matches ``target``.

    Raises:
        ValueError: If it does not; the message names the first differences.
    """
    missing, expected = "nothing", structure.configuration(target)
    configuration = earlier.completed(configuration, expected)
    fields: list[str] = []
    only_sizes = True
    for name in sorted({*configuration, *expected}):
        same = configuration.get(name, missing) == expected.get(name, missing)
        # If a node has another class, differences below it say nothing more.
        if not same and not any(name.startswith(field + ".") for field in fields):
            fields.append(name)
            only_sizes &= name.endswith((".capacity", ".length", ".num_shards"))
    messages = [
        f"like{name} is {expected.get(name, missing)}, but the checkpoint has "
        f"{configuration.get(name, missing)}"
        for name in fields
    ]
    wanted = structure.leaf_types(target, "like")
    messages += _other_envs(configuration, saved, wanted)
    if messages:
        hint = "create it alike"
        if only_sizes and not resize:
            hint = "pass resize=True to load into another size"
        kinds = [values.get(name) for name in fields for values in (configuration, expected)]
        if Varying.__qualname__ in kinds:
            hint = "create it alike, load it, and change its sampler with buffer.with_sampler(...)"
        if any(name.endswith(".num_shards") for name in fields):
            hint = f"create it with as many shards, on any number of devices, or {hint}"
    else:
        hint = "pass a pytree like the one that was saved"
        messages = [f"like{name} is not in the checkpoint" for name in wanted if name not in saved]
        messages += [f"like{name} is missing" for name in saved if name not in wanted]
        for name in saved.keys() & wanted.keys() if not messages else ():
            leaf, like = saved[name], wanted[name]
            if not leaf.fits(like):
                attribute = "shape" if leaf.shape != like.shape else "dtype"
                messages.append(
                    f"like{name} has {attribute} {getattr(like, attribute)}, but the checkpoint "
                    f"has {getattr(leaf, attribute)}"
                )
    if messages:
        shown = "; ".join(itertools.islice(sorted(messages), 5))
        more = f" (and {len(messages) - 5} more)" if len(messages) > 5 else ""
        raise ValueError(f"the checkpoint {version} is of something else: {shown}{more}; {hint}")


def _other_envs(
    configuration: Configuration, saved: dict[str, LeafType], leaves: dict[str, LeafType]
) -> list[str]:
    """Returns messages about rings that were saved with another number of environments."""
    messages: list[str] = []
    for name in saved.keys() & leaves.keys():
        rings, field, _ = name.rpartition(".cursor")
        if field and configuration.get(rings) == "Rings":
            buffer = rings.removesuffix(".inner").removesuffix(".occupancy")
            shape, like = saved[name].shape, leaves[name].shape
            # Items have no environments, and a cursor without axes.
            if shape and like and shape[-1] != like[-1] and shape[:-1] == like[:-1]:
                messages.append(
                    f"like{buffer} has num_envs {like[-1]}, but the checkpoint has {shape[-1]}"
                )
    return messages


def _read_manifest(version: Path) -> Record:
    """Returns the manifest of a checkpoint.

    Raises:
        ValueError: If it cannot be read.
    """
    try:
        manifest, intact = records.read(version / "manifest.json")
    except (OSError, ValueError) as error:
        raise _damaged(version, "its manifest cannot be read") from error
    if "format" not in manifest or not intact:
        raise _damaged(version, "its manifest is not what was saved")
    return manifest


def _write(version: Path, arrays: list[UInt8[np.ndarray, " N"]], chunk: int) -> None:
    """Writes the bytes of all arrays, one after the other, to one array on disk."""
    import tensorstore as ts

    parts = [ts.array(array) for array in arrays if array.size]
    if not parts:
        return
    data = ts.concat(parts, axis=0)
    with _as_os_error():
        store = zarr.open_rows(version / _DATA, _BYTE_ROW, chunk, zarr.new_cache(0), create=True)
    # In rounds, since compressed data is in memory until it is written.
    for start in range(0, data.size, _ROUND_BYTES):
        stop = min(data.size, start + _ROUND_BYTES)
        zarr.finish([store[start:stop].write(data[start:stop])])


@contextlib.contextmanager
def _as_os_error() -> Generator[None]:
    """Raises errors of tensorstore as the OSErrors that they are."""
    try:
        yield
    except ValueError as error:
        raise OSError(zarr.reason(error)) from error


def _chunk(array: jax.Array) -> list[int]:
    """Returns the shape of the chunks of an array; no chunk spans two shards."""
    chunk = [*array.sharding.shard_shape(array.shape)]
    for axis, size in enumerate(chunk):
        best = _CHUNK_BYTES / (array.dtype.itemsize * math.prod(chunk)) * size
        if best < size:
            divisors = [n for n in range(1, size + 1) if size % n == 0]
            chunk[axis] = min(divisors, key=lambda n: abs(math.log(n / best)))
    return chunk


def _write_shards(version: Path, i: int, array: jax.Array) -> dict[str, int]:
    """Writes the shards of an array that this process holds, each shard once.

    Returns:
        The checksums of the chunks, by name.
    """
    itemsize, folder = array.dtype.itemsize, version / _SHARDED / str(i)
    shape, chunk = (*array.shape, itemsize), [*_chunk(array), itemsize]
    with _as_os_error():
        store = zarr.open_array(folder, _UINT8, shape, chunk, cache=zarr.new_cache(0), create=True)
    checksums: dict[str, int] = {}
    for shard in array.addressable_shards:
        if shard.replica_id == 0:
            data = np.ascontiguousarray(shard.data)[..., None].view(np.uint8)
            index = (*shard.index, slice(None))
            zarr.finish([store[index].write(data)])
            for name in zarr.grid(shape, chunk, index):
                checksums[name] = zarr.checksum(folder / name)
    return checksums


def _replace_together(
    folder: Path, write_shards: Callable[[Path], None], write_rest: Callable[[Path], None]
) -> None:
    """Adds a version that all processes write to; all of them succeed or fail together.

    In this order: process 0 broadcasts the number of the version, or -1 if it could not begin one,
    and a token; all processes check that they see the token, and write their shards; process 0
    writes the rest, and broadcasts whether all is done.

    Raises:
        OSError: If another process could not write its part.
    """
    number = -1
    # Process 0 locks the folder, from which others may still be loading.
    multihost_utils.sync_global_devices("jaxbuf.save")

    def write(version: Path) -> None:
        nonlocal number
        token = secrets.randbits(31)
        (version / _TOKEN_FILE).write_text(str(token))
        number = _broadcast(versions.number(version))
        _check_shared(version, _broadcast(token))

        def write_local() -> None:
            (version / _TOKEN_FILE).unlink()
            write_shards(version)

        _in_all_processes(write_local)
        write_rest(version)

    if jax.process_index() == 0:
        finished = False
        try:
            versions.replace(folder, write)
            finished = True
        finally:
            if number < 0:
                # The other processes wait for the version to write to.
                _broadcast(-1)
            _broadcast(int(finished))
        return
    number = _broadcast(0)
    try:
        if number >= 0:
            version = versions.unfinished(folder, number)
            _check_shared(version, _broadcast(0))
            _in_all_processes(lambda: write_shards(version))
    finally:
        finished = bool(_broadcast(0))
    if not finished:
        raise OSError(f"process 0 could not write the checkpoint in {folder}")


def _broadcast(number: int) -> int:
    """Returns the number that process 0 passes; those of other processes are ignored."""
    return int(multihost_utils.broadcast_one_to_all(np.int32(number)))


def _check_shared(version: Path, token: int) -> None:
    """Checks that every process sees what process 0 wrote to the new version.

    Raises:
        OSError: If one does not, in all of them.
    """

    def wait_for_token() -> None:
        # A network file system may show a new file a little later.
        deadline = time.monotonic() + _TIMEOUT
        while True:
            with (
                contextlib.suppress(OSError),
                records.open_file(version / _TOKEN_FILE, "r") as file,
            ):
                if file.read(16) == str(token):
                    return
            if time.monotonic() > deadline:
                raise OSError(
                    f"process {jax.process_index()} does not see in {version.parent} what process "
                    "0 wrote there; save to one folder, on a file system that all processes share"
                )
            time.sleep(0.1)

    _in_all_processes(
        wait_for_token, f"does not share {version.parent} with process 0, as all processes must"
    )


def _in_all_processes(
    function: Callable[[], None], failure: str = "could not write its part of the checkpoint"
) -> None:
    """Calls a function in every process; if it fails in one of them, raises an error in all."""
    error: Exception | None = None
    try:
        function()
    except Exception as raised:
        error = raised
    processes = np.flatnonzero(multihost_utils.process_allgather(np.int32(error is not None)))
    if error is not None:
        raise error
    if processes.size:
        raise OSError(f"process {processes[0]} {failure}")


@dataclasses.dataclass(frozen=True)
class _ShardedBytes:
    """The bytes of a sharded leaf, ``uint8[*shape, itemsize]``; an index reads a part from disk.

    Attributes:
        array: The array on disk.
        folder: Its folder.
        chunk: The shape of its chunks.
        checksums: The checksums of its chunks, by name; None if version 0.2.0 wrote them.
    """

    array: "TensorStore"
    folder: Path
    chunk: list[int]
    checksums: dict[str, int] | None

    def __getitem__(self, index: tuple[slice, ...]) -> UInt8[np.ndarray, "..."]:
        shape = self.array.shape
        index = (*index, *[slice(None)] * (len(shape) - len(index)))
        if self.checksums is not None:
            for name in zarr.grid(shape, self.chunk, index):
                if zarr.checksum(self.folder / name) != self.checksums.get(name):
                    raise ValueError(f"chunk {name} is not the one that was written there")
        return self.array[index].read().result()


_Bytes: TypeAlias = UInt8[np.ndarray, "..."] | _ShardedBytes


def _read(version: Path, manifest: Record) -> Iterator[_Bytes]:
    """Yields the bytes of each leaf, ``uint8[*shape, itemsize]``."""
    # Keeps the chunk that small arrays share.
    cache = zarr.new_cache(2 * _CHUNK_BYTES)
    store, start, checksums = None, 0, None
    for i, leaf in enumerate(manifest["leaves"].values()):
        *shape, itemsize = _stored_shape(leaf)
        if "chunk" in leaf:
            if checksums is None:
                checksums = _read_checksums(version, manifest)
            folder, chunk = version / _SHARDED / str(i), [*leaf["chunk"], itemsize]
            zarr.check_sizes(folder, (*shape, itemsize), chunk)
            array = zarr.open_array(folder, _UINT8, (*shape, itemsize), chunk, cache=cache)
            yield _ShardedBytes(array, folder, chunk, checksums.get(str(i)))
            continue
        if 0 in shape:
            data = np.zeros(0, np.uint8)
        else:
            stop = start + leaf["bytes"]
            index = (slice(start, stop),)
            zarr.check_sizes(version / _DATA, (stop,), (manifest["chunk"],), index)
            store = store or zarr.open_rows(version / _DATA, _BYTE_ROW, manifest["chunk"], cache)
            data = store[start:stop].read().result()
            start = stop
        if leaf["crc32"] != zlib.crc32(data.data):
            raise ValueError("the numbers differ from the saved ones")
        yield data.reshape(*shape, itemsize)


def _read_checksums(version: Path, manifest: Record) -> dict[str, dict[str, int]]:
    """Returns the checksums of chunks by leaf; none, if version 0.2.0 wrote the checkpoint.

    Raises:
        ValueError: If they are damaged.
    """
    checksums: dict[str, dict[str, int]] = {}
    for writer in manifest.get("writers", []):
        name = _CHECKSUMS.format(_integer(writer))
        try:
            record, intact = records.read(version / name)
        except OSError as error:
            raise ValueError(f"{name} cannot be read") from error
        if not intact:
            raise ValueError(f"{name} is not what was written")
        for leaf, chunks in record.items():
            checksums.setdefault(leaf, {}).update(chunks)
    return checksums


def _stored_shape(leaf: Record) -> tuple[int, ...]:
    """Returns the shape of the bytes of a leaf; a PRNG key is an array of words."""
    if structure.is_key(leaf["dtype"]):
        words = jax.random.key_data(jax.random.key(0, impl=leaf["key"])).shape
        return (*leaf["shape"], *words, 4)
    return (*leaf["shape"], jnp.dtype(leaf["dtype"]).itemsize)


def _damaged(version: Path, reason: str) -> ValueError:
    return ValueError(f"the checkpoint {version} is damaged: {reason}; nothing else was touched")


def _numbers(leaf: Any, name: str) -> Any:
    """Returns a leaf as an array of numbers."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        raise ValueError(f"{name} is a shape without numbers; pass arrays")
    if isinstance(leaf, jax.Array):
        return jax.random.key_data(leaf) if structure.is_key(leaf.dtype) else leaf
    array = np.asarray(leaf)
    if array.dtype.hasobject:
        raise ValueError(f"{name} has dtype {array.dtype}; expected numbers")
    return array


def _to_bytes(array: Any) -> UInt8[np.ndarray, " N"]:
    """Returns the bytes of an array."""
    # An array on devices of other processes cannot be read, even if it is empty.
    whole = np.asarray(array) if array.size else np.zeros(0, np.uint8)
    return np.ascontiguousarray(whole).reshape(-1).view(np.uint8)


def _restore(data: _Bytes, saved: LeafType, record: Record, like: Any) -> Any:
    """Returns a leaf as it was saved, placed like the leaf of ``like``."""
    if structure.is_key(saved.dtype):
        words = np.ascontiguousarray(data[()]).view(np.uint32)[..., 0]
        # A program can place keys on devices of other processes, which device_put cannot.
        wrap = functools.partial(jax.random.wrap_key_data, impl=record["key"])
        return jax.jit(wrap, out_shardings=_sharding(like))(words)

    def numbers(index: tuple[slice, ...]) -> np.ndarray[Any, Any]:
        array = np.ascontiguousarray(data[index]).view(jnp.dtype(saved.dtype))[..., 0]
        return trees.native(array)

    scalar = isinstance(like, bool | int | float | complex)
    if saved.scalar and scalar:
        return numbers(()).item()
    dtype = jnp.dtype(saved.dtype if scalar else like.dtype)
    if isinstance(like, np.ndarray | np.generic):
        return np.array(numbers(()), dtype)

    def copy(index: Any) -> jax.Array:
        # Always a copy, since an array that borrows NumPy's memory cannot be updated in place.
        return jnp.array(numbers(index), dtype, copy=True)

    sharding = _sharding(like)
    if sharding is None:
        return copy(())
    return jax.make_array_from_callback(saved.shape, sharding, copy)


def _sharding(like: Any) -> jax.sharding.Sharding | None:
    """Returns the sharding that a leaf of ``like`` is committed to, or None."""
    if isinstance(like, jax.Array) and not like.committed:
        return None
    return getattr(like, "sharding", None)


def _put_like(leaf: Any, like: Any) -> Any:
    """Puts a leaf on the devices that the leaf of ``like`` is committed to."""
    sharding = _sharding(like)
    return leaf if sharding is None else jax.device_put(leaf, sharding)

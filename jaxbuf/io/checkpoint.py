"""Checkpoints of buffers, and of pytrees with buffers in them.

The meaning of a pytree's arrays depends on its configuration: with another ``alpha``, for example,
the same masses are other priorities. A checkpoint therefore also holds the configuration, and
``load`` compares it.
"""

import collections
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
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jaxtyping import PyTree, UInt8

from jaxbuf.buffers.buffer import as_buffer
from jaxbuf.core import checks, trees
from jaxbuf.core.donation import check_not_donated
from jaxbuf.core.hyperparameters import Varying
from jaxbuf.core.leaves import as_numbers
from jaxbuf.core.segment_tree import NARROW, using_width, with_width, with_widths_of
from jaxbuf.io import blocks, earlier, records, resizing, structure, versions, zarr
from jaxbuf.io.blocks import Block, Index, Rows
from jaxbuf.io.records import Record
from jaxbuf.io.structure import Configuration, LeafType

if TYPE_CHECKING:
    from tensorstore import TensorStore

Tree = TypeVar("Tree")

# That of this version, and that of versions 0.2.0 and 0.3.0.
_FORMAT, _BEFORE = 3, 2
_DATA = "data"
_SHARDED = "sharded"
# The checksums of the chunks that a process wrote, by leaf and chunk.
_CHECKSUMS = "places-{}.json"
_TOKEN_FILE = "shared"
_UINT8 = np.dtype(np.uint8)
_BYTE_ROW = jax.ShapeDtypeStruct((1,), _UINT8)
# Bytes of a chunk, of which threads keep several in memory.
_CHUNK_BYTES = 2**21
_MOST_CHUNK_BYTES = 2**24
# Bytes that a load puts into place at a time, and bytes that it reads ahead.
_BLOCK_BYTES = 2**20
_AHEAD_BYTES = 2**21
# More threads would keep more memory; one reads while another one decodes.
_THREADS = 2
_ROUND_BYTES = 2**26
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
    buffer = with_width(buffer, NARROW)
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


def load(
    path: str | os.PathLike[str], like: Tree, *, resize: bool = False, partial: bool = False
) -> Tree:
    """Reads a checkpoint.

    A run continues from the result bit for bit, even on other devices or with another number of
    processes. A process only reads its own shards of a sharded array. What is read goes into place
    in small blocks, also if the size differs, so memory never holds a buffer twice. ``like`` takes
    memory as well, unless it is the result of ``jax.eval_shape``.

    Args:
        path: The folder that it was saved to.
        like: A pytree like the saved one, created with the same configuration. Only its structure,
            shapes and dtypes matter, so the result of ``jax.eval_shape`` is enough. Arrays that are
            committed to devices, and shapes with a sharding, determine where the result is placed.
            The sharding may differ from that of the saved arrays. A ``Hosted`` and a ``Sharded``
            are always placed on their own devices.
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
        partial: Whether the checkpoint may have more than ``like``, such as a network beside the
            buffer. Only the leaves of ``like`` are read, and damage elsewhere is not looked for.
            They are found by their place: by the key in a dict, the name of a field in a dataclass
            or a ``NamedTuple``, and the index in a list or a tuple.

    Raises:
        FileNotFoundError: If there is no checkpoint.
        ValueError: If the checkpoint is damaged, has another format, or does not match ``like``;
            the message names the differences. What version 0.3.0 saved is read; buffers that
            version 0.2.0 kept in another form have to be loaded and saved by 0.3.0 first.

    Example:
        >>> import tempfile, jax.numpy as jnp, jaxbuf
        >>> small = jaxbuf.ItemBuffer.create(jnp.float32(0), capacity=4).add(jnp.arange(3.0))
        >>> large = jaxbuf.ItemBuffer.create(jnp.float32(0), capacity=100)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     jaxbuf.save(folder, small)
        ...     large = jaxbuf.load(folder, like=large, resize=True)
        >>> large.capacity, large.data[:3].tolist()
        (100, [0.0, 1.0, 2.0])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     jaxbuf.save(folder, {"weights": jnp.zeros((64, 64)), "replay": small})
        ...     small = jaxbuf.load(folder, like={"replay": small}, partial=True)["replay"]
        >>> int(small.size)
        3
    """
    folder = checks.check_path("path", path).resolve()
    checks.check_flag("resize", resize)
    checks.check_flag("partial", partial)
    with versions.locked(folder, shared=True):
        found = versions.find(folder)
        if not found:
            raise FileNotFoundError(f"there is no checkpoint in {path} of jaxbuf 0.2.0 or later")
        like = _placed(like)
        with using_width(NARROW):
            tree = _load(found[-1], with_width(like, NARROW), resize, partial)
    if jax.tree.structure(tree) == jax.tree.structure(like):
        return tree
    # ``like`` has wide segment trees, and a checkpoint only narrow ones.
    return jax.tree.map(_put_like, with_widths_of(like, tree), like)


def _placed(like: Tree) -> Tree:
    """Returns ``like``, in which shapes say where the arrays of a buffer must be."""

    def has_home(node: object) -> bool:
        return as_buffer(node).home is not None

    def place(node: Any) -> Any:
        def with_home(leaf: Any) -> Any:
            if not isinstance(leaf, jax.ShapeDtypeStruct) or leaf.sharding is not None:
                return leaf
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=node.home)

        return jax.tree.map(with_home, node) if has_home(node) else node

    return jax.tree.map(place, like, is_leaf=has_home)


def check_folder(name: str, path: str | os.PathLike[str]) -> Path:
    """Returns the absolute path of a folder that exists or can be created.

    Raises:
        ValueError: If it is a file.
    """
    folder = checks.check_path(name, path).resolve()
    if records.is_other(folder, stat.S_ISDIR):
        raise ValueError(f"{name} is {path}, which is a file; choose a folder")
    return folder


def _load(version: Path, like: Tree, resize: bool, partial: bool) -> Tree:
    manifest = _read_manifest(version)
    if manifest["format"] not in (_BEFORE, _FORMAT):
        raise ValueError(
            f"the checkpoint {version} has format {manifest['format']}; this version of jaxbuf "
            f"reads formats up to {_FORMAT}"
        )
    try:
        described = dict(manifest["leaves"])
        configuration = dict(manifest["configuration"])
        if partial:
            configuration = structure.part_of(configuration, described, like)
            names = structure.leaf_types(like, "like")
            described = {name: described[name] for name in names if name in described}
        saved = {name: _check_record(record) for name, record in described.items()}
        _require(0 < _integer(manifest["chunk"]) <= _MOST_CHUNK_BYTES)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise _damaged(version, "its manifest is incomplete or not one of jaxbuf") from error
    # From ``like`` by way of the saved sizes to the saved format, and back with what was loaded.
    sized: PyTree = resizing.as_saved(like, configuration, saved) if resize else like
    target = earlier.as_saved(sized, saved, configuration)
    _compare(version, configuration, saved, target, resize, old=manifest["format"] < _FORMAT)

    stored = _Stored(version, manifest)

    def read(name: str, like: Any, rows: Rows | None = None) -> Any:
        try:
            return _restore(stored.leaf(name), saved[name], described[name], like, rows)
        except MemoryError:
            raise
        except Exception as error:
            # Each layer of the storage has its own types of errors.
            raise _damaged(version, f"{name or 'its array'}: {zarr.reason(error)}") from error

    def move(name: str, leaf: Any, like: Any, rows: Rows) -> Any:
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return read(name, like, rows)
        return _restore(_InMemory(leaf), saved[name], described[name], like, rows)

    leaves = dict(zip(structure.leaf_types(target, "like"), jax.tree.leaves(target), strict=True))
    # What moves is read into its new place.
    later = resizing.moving(sized, like) if resize else set[str]()
    loaded = {name: leaf if name in later else read(name, leaf) for name, leaf in leaves.items()}
    tree = jax.tree.unflatten(jax.tree.structure(target), loaded.values())
    tree = earlier.renewed(tree, sized, configuration)
    if resize:
        tree = resizing.fit(tree, like, move)
    return jax.tree.map(_put_like, tree, like)


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
    *,
    old: bool,
) -> None:
    """Checks that a checkpoint matches ``target``; ``old`` if version 0.3.0 or 0.2.0 wrote it.

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
        hint = _hint_of_mixture(fields, configuration, expected) or hint
    else:
        hint = "pass a pytree like the one that was saved"
        messages = [f"like{name} is not in the checkpoint" for name in wanted if name not in saved]
        if not messages and wanted.keys() < saved.keys():
            hint += ", or partial=True to load only what it has"
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
        if old:
            hint += "; if jaxbuf 0.2.0 wrote it, load it with jaxbuf 0.3.0 and save it again there"
        raise ValueError(f"the checkpoint {version} is of something else: {shown}{more}; {hint}")


def _hint_of_mixture(
    fields: list[str], saved: Configuration, expected: Configuration
) -> str | None:
    """Returns how to load a ``Mixture`` of which only ratios, or more parts, are new.

    Args:
        fields: The names of what differs.
        saved: The configuration as it was saved.
        expected: That of the pytree to load into.
    """
    name = next((field for field in fields if field.endswith(".ratios")), "")
    mixture = name.removesuffix(".ratios")
    if not name or not saved.get(mixture) == expected.get(mixture) == "Mixture":
        return None
    if Varying.__qualname__ in (saved[name], expected[name]):
        return (
            "create it alike, load it, and make another mixture of its parts: "
            f"jaxbuf.Mixture.create(saved{mixture}.parts, ratios)"
        )
    ratios, count = tuple(saved[name]), len(saved[name])
    more = [f"{mixture}.parts[{i}]" for i in range(count, len(expected[name]))]
    if len(expected[name]) < count or not all(
        field == name or field.startswith(tuple(more)) for field in fields
    ):
        return None
    like = f"like{mixture}.replace(parts=like{mixture}.parts[:{count}], ratios={ratios})"
    place = f"like, in which like{mixture} is {like}" if mixture else like
    return (
        f"load what was saved, and make another mixture of it:\n"
        f"    saved = jaxbuf.load(path, {place})\n"
        f"    mixture = jaxbuf.Mixture.create([*saved{mixture}.parts, *like{mixture}.parts"
        f"[{count}:]], like{mixture}.ratios)"
    )


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


class _Leaf(Protocol):
    """A leaf of a checkpoint."""

    def blocks(self, parts: Sequence[Index]) -> Iterator[Block]:
        """Yields blocks of the bytes of a leaf, ``uint8[*shape, itemsize]``.

        Args:
            parts: The parts of the leaf, without the bytes, that are needed at least.

        Raises:
            ValueError: If it is damaged.
        """
        ...


@dataclasses.dataclass(frozen=True)
class _PlainLeaf:
    """A leaf whose bytes follow those of others.

    Attributes:
        array: The bytes of all these leaves on disk; None if this one has none.
        start: The position of the first one of this leaf.
        shape: The shape of its bytes, ``[*shape, itemsize]``.
        crc32: Their checksum.
    """

    array: "TensorStore | None"
    start: int
    shape: tuple[int, ...]
    crc32: int

    def blocks(self, parts: Sequence[Index]) -> Iterator[Block]:
        del parts
        indices = [*blocks.consecutive(self.shape, _BLOCK_BYTES)]
        sizes = map(blocks.size_of, indices)
        stops = itertools.accumulate(sizes, initial=self.start)
        array: Any = self.array
        reads = (array[start:stop].read() for start, stop in itertools.pairwise(stops))
        crc32 = 0
        for index, data in _ahead(indices, reads):
            crc32 = zlib.crc32(data.data, crc32)
            yield index, data.reshape(blocks.shape_of(index))
        if crc32 != self.crc32:
            raise ValueError("the numbers differ from the saved ones")


@dataclasses.dataclass(frozen=True)
class _ShardedLeaf:
    """A leaf with a folder of its own.

    Attributes:
        array: The array on disk, ``uint8[*shape, itemsize]``.
        folder: Its folder.
        chunk: The shape of its chunks.
        checksums: The checksums of its chunks, by name; None if version 0.2.0 wrote them.
    """

    array: "TensorStore"
    folder: Path
    chunk: list[int]
    checksums: dict[str, int] | None

    def blocks(self, parts: Sequence[Index]) -> Iterator[Block]:
        shape = self.array.shape
        parts = [(*part, slice(0, shape[-1])) for part in parts]
        chunks = {chunk for part in parts for chunk in zarr.positions(shape, self.chunk, part)}
        indices = [
            tuple(
                slice(i * step, min((i + 1) * step, size))
                for i, step, size in zip(position, self.chunk, shape, strict=True)
            )
            for position in sorted(chunks)
        ]
        for index, data in _ahead(indices, map(self._read, sorted(chunks), indices)):
            for part in blocks.consecutive(data.shape, _BLOCK_BYTES):
                yield blocks.moved(part, index), data[part]

    def _read(self, position: tuple[int, ...], index: Index) -> Any:
        name, checksums = zarr.name_of(position), self.checksums
        if checksums is not None and zarr.checksum(self.folder / name) != checksums.get(name):
            raise ValueError(f"chunk {name} is not the one that was written there")
        return self.array[index].read()


@dataclasses.dataclass(frozen=True)
class _InMemory:
    """A leaf that was loaded already."""

    leaf: Any

    def blocks(self, parts: Sequence[Index]) -> Iterator[Block]:
        del parts
        data = np.asarray(_numbers(self.leaf, ""))[..., None].view(np.uint8)
        yield tuple(slice(0, size) for size in data.shape), data


def _ahead(indices: Iterable[Index], reads: Iterable[Any]) -> Iterator[Block]:
    """Yields blocks, while the next ones are read from disk."""
    waiting: collections.deque[tuple[Index, Any]] = collections.deque()
    nbytes = 0
    for index, read in zip(indices, reads, strict=True):
        waiting.append((index, read))
        nbytes += blocks.size_of(index)
        while nbytes > _AHEAD_BYTES:
            index, read = waiting.popleft()
            nbytes -= blocks.size_of(index)
            yield index, read.result()
    for index, read in waiting:
        yield index, read.result()


class _Stored:
    """The leaves of a checkpoint on disk.

    Args:
        version: Its folder.
        manifest: Its manifest.
    """

    def __init__(self, version: Path, manifest: Record) -> None:
        self._version = version
        self._manifest = manifest
        # Keeps the chunk that leaves, or blocks, share.
        self._cache = zarr.new_cache(2 * manifest["chunk"], _THREADS)
        records = manifest["leaves"]
        self._numbers = {name: i for i, name in enumerate(records)}
        sizes = [record.get("bytes", 0) for record in records.values()]
        self._starts = dict(zip(records, itertools.accumulate(sizes, initial=0), strict=False))

    def leaf(self, name: str) -> _Leaf:
        """Returns a leaf by its name.

        Raises:
            ValueError: If it is damaged.
        """
        record = self._manifest["leaves"][name]
        shape = _stored_shape(record)
        if "chunk" in record:
            number = str(self._numbers[name])
            folder, chunk = self._version / _SHARDED / number, [*record["chunk"], shape[-1]]
            checksums = self._checksums
            zarr.check_sizes(folder, shape, chunk)
            uncached = zarr.new_cache(0, _THREADS)
            array = zarr.open_array(folder, _UINT8, shape, chunk, cache=uncached)
            return _ShardedLeaf(array, folder, chunk, checksums.get(number))
        start = self._starts[name]
        if record["bytes"]:
            stop = start + record["bytes"]
            chunk = (self._manifest["chunk"],)
            zarr.check_sizes(self._version / _DATA, (stop,), chunk, (slice(start, stop),))
        return _PlainLeaf(self._data if record["bytes"] else None, start, shape, record["crc32"])

    @functools.cached_property
    def _data(self) -> "TensorStore":
        chunk = self._manifest["chunk"]
        return zarr.open_rows(self._version / _DATA, _BYTE_ROW, chunk, self._cache)

    @functools.cached_property
    def _checksums(self) -> dict[str, dict[str, int]]:
        return _read_checksums(self._version, self._manifest)


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
        return as_numbers(leaf)
    array = np.asarray(leaf)
    if array.dtype.hasobject:
        raise ValueError(f"{name} has dtype {array.dtype}; expected numbers")
    return array


def _to_bytes(array: Any) -> UInt8[np.ndarray, " N"]:
    """Returns the bytes of an array."""
    # An array on devices of other processes cannot be read, even if it is empty.
    whole = np.asarray(array) if array.size else np.zeros(0, np.uint8)
    return np.ascontiguousarray(whole).reshape(-1).view(np.uint8)


def _restore(data: _Leaf, saved: LeafType, record: Record, like: Any, rows: Rows | None) -> Any:
    """Returns a leaf as it was saved, or with its rows moved, placed like the leaf of ``like``."""
    is_key = structure.is_key(saved.dtype)
    dtype = np.dtype(np.uint32) if is_key else jnp.dtype(saved.dtype)
    # Those of a key are an array of words.
    before = _stored_shape(record)[:-1]
    shape = (*getattr(like, "shape", ()), *before[len(saved.shape) :])

    def numbers(parts: Sequence[Index]) -> Iterator[Block]:
        for index, block in data.blocks(parts):
            yield index[:-1], trees.native(np.ascontiguousarray(block).view(dtype)[..., 0])

    def on_host(dtype: Any) -> np.ndarray[Any, Any]:
        array = np.zeros(shape, dtype)
        for index, block in numbers(blocks.parts_of(shape, None)):
            array[index] = block
        return array

    scalar = isinstance(like, bool | int | float | complex)
    if scalar and saved.scalar:
        return on_host(dtype).item()
    if isinstance(like, np.ndarray | np.generic) and rows is None:
        return on_host(like.dtype)
    sharding = _sharding(like)
    kind = dtype if scalar or is_key else like.dtype
    needed = blocks.parts_of(before, None if rows else sharding)
    array = blocks.fill(shape, kind, sharding, numbers(needed), rows)
    if is_key:
        # A program can place keys on devices of other processes, which device_put cannot.
        wrap = functools.partial(jax.random.wrap_key_data, impl=record["key"])
        return jax.jit(wrap, out_shardings=sharding)(array)
    return array


def _sharding(like: Any) -> jax.sharding.Sharding | None:
    """Returns the sharding that a leaf of ``like`` is committed to, or None."""
    if isinstance(like, jax.Array) and not like.committed:
        return None
    return getattr(like, "sharding", None)


def _put_like(leaf: Any, like: Any) -> Any:
    """Puts a leaf on the devices that the leaf of ``like`` is committed to."""
    sharding = _sharding(like)
    return leaf if sharding is None else jax.device_put(leaf, sharding)

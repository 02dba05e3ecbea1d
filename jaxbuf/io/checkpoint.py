"""Checkpoints of buffers, and of any pytree that holds some.

A pytree's arrays do not say what they mean: with another ``alpha`` the same masses are other
priorities. So a checkpoint also holds the configuration, and loading compares it.
"""

import dataclasses
import itertools
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxbuf.core import checks
from jaxbuf.core.donation import check_there
from jaxbuf.io import records, resizing, structure, versions, zarr
from jaxbuf.io.structure import Leaf

Tree = TypeVar("Tree")

_FORMAT = 2
_DATA = "data"
_BYTES = jax.ShapeDtypeStruct((1,), np.uint8)
_CHUNK_BYTES = 2**24
_ROUND_BYTES = 16 * _CHUNK_BYTES


def save(path: str | os.PathLike[str], buffer: Any) -> None:
    """Write a checkpoint to a folder, in place of the one that is there.

    Atomic: a process that is killed at any moment leaves either the previous checkpoint or the new
    one, whole. When it returns all is on disk, also if the power fails, and the buffer may be
    donated. Processes and threads that use one folder wait for each other, and the checkpoint of
    the last one stays; processes that are to keep one each need a folder each.

    Args:
        path: The folder. It is made if needed; other files in it are left alone.
        buffer: A buffer, or any pytree of arrays, PRNG keys and Python numbers with buffers in it:
            a training state. Its arrays must all be on devices of this process.

    Raises:
        ValueError: If ``path`` is a file, ``buffer`` holds no arrays, a leaf is no array of this
            process, or one was donated.

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
    check_there(buffer, "buffer")
    described = structure.leaves(buffer, "buffer")
    if not described:
        raise ValueError(
            f"buffer is {buffer!r}, in which there are no arrays; expected a buffer or a pytree of "
            "arrays"
        )
    arrays: list[np.ndarray[Any, Any]] = []
    leaves: dict[str, Any] = {}
    for (name, leaf), value in zip(described.items(), jax.tree.leaves(buffer), strict=True):
        array = _to_bytes(value, f"buffer{name}")
        arrays.append(array)
        leaves[name] = dataclasses.asdict(leaf) | {
            "bytes": array.size,
            "crc32": zlib.crc32(array.data),
        }
        if structure.is_key(leaf.dtype):
            leaves[name]["key"] = str(jax.random.key_impl(value))
    chunk = min(max(1, sum(array.size for array in arrays)), _CHUNK_BYTES)
    configuration = structure.configuration(buffer)

    def write(version: Path) -> None:
        _write(version, arrays, chunk)
        records.write(
            version / "manifest.json",
            {"format": _FORMAT, "configuration": configuration, "chunk": chunk, "leaves": leaves},
        )

    versions.replace(folder, write)


def load(path: str | os.PathLike[str], like: Tree, *, resize: bool = False) -> Tree:
    """Read a checkpoint.

    The result goes on bit for bit where what was saved stopped, on whatever devices there are now.

    Args:
        path: The folder it was saved to.
        like: A pytree as it was saved, created with the same configuration; only its structure,
            shapes and dtypes matter, so ``jax.eval_shape(...)`` of what creates it will do. Arrays
            that are committed to devices, and shapes with a sharding, say where the result goes.
        resize: Load buffers into those of ``like`` if only the ``capacity`` (of an ``ItemBuffer``
            or a ``Queue``) or the ``length`` (of a ``TrajectoryBuffer``) differs. Of more items
            than fit the evictor's choice stays: the newest or those with the highest scores, of a
            queue those that came first, of trajectories the newest steps. Slots sampled before are
            stale then, and positions of steps are counted anew.

    Raises:
        FileNotFoundError: If there is no checkpoint.
        ValueError: If the checkpoint is damaged, of a newer format, or of something else than
            ``like``: it names what differs.

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
            raise FileNotFoundError(f"there is no checkpoint in {path}")
        return _load(found[-1], like, resize)


def check_folder(name: str, path: str | os.PathLike[str]) -> Path:
    """The absolute path of a folder that is there or can be made.

    Raises:
        ValueError: If it is a file.
    """
    folder = checks.check_path(name, path).resolve()
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{name} is {path}, which is a file; choose a folder")
    return folder


def _load(version: Path, like: Tree, resize: bool) -> Tree:
    manifest = _read_manifest(version)
    if manifest["format"] not in range(1, _FORMAT + 1):
        raise ValueError(
            f"the checkpoint {version} has format {manifest['format']}; this version of jaxbuf "
            f"reads formats up to {_FORMAT}"
        )
    try:
        leaves = dict(manifest["leaves"])
        saved = {
            name: Leaf(tuple(leaf["shape"]), leaf["dtype"], leaf["scalar"])
            for name, leaf in leaves.items()
        }
        configuration = dict(manifest["configuration"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _damaged(version, "its manifest is incomplete") from error
    target: Any = resizing.as_saved(like, configuration) if resize else like
    _compare(version, configuration, saved, target)

    arrays = _read(version, manifest)
    loaded: list[Any] = []
    for (name, leaf), place in zip(saved.items(), jax.tree.leaves(target), strict=True):
        try:
            array = next(arrays)
            if leaves[name]["crc32"] != zlib.crc32(array.data):
                raise ValueError("the numbers are not those that were saved")
            loaded.append(_from_bytes(array, leaf, leaves[name], place))
        except MemoryError:
            raise
        except Exception as error:
            # Storage has as many errors as layers.
            raise _damaged(version, f"{name or 'its array'}: {zarr.reason(error)}") from error
    tree = jax.tree.unflatten(jax.tree.structure(target), loaded)
    if resize:
        tree = resizing.fit(tree, like)
    return jax.tree.map(_place, tree, like)


def _compare(
    version: Path, configuration: dict[str, Any], saved: dict[str, Leaf], target: Any
) -> None:
    """Refuse a checkpoint of something else than ``target``.

    Raises:
        ValueError: It names the first differences.
    """
    missing, wanted = "nothing", structure.configuration(target)
    parts: list[str] = []
    sizes = True
    for name in sorted({*configuration, *wanted}):
        have, want = configuration.get(name, missing), wanted.get(name, missing)
        # Below something of another class everything is another thing.
        if have != want and not any(name.startswith(other + ".") for other in parts):
            parts.append(name)
            sizes &= name.endswith((".capacity", ".length"))
    messages = [
        f"like{name} is {wanted.get(name, missing)}, but the checkpoint has "
        f"{configuration.get(name, missing)}"
        for name in parts
    ]
    if messages:
        hint = "pass resize=True to load into another capacity" if sizes else "create it alike"
    else:
        hint = "pass a pytree like the one that was saved"
        given = structure.leaves(target, "like")
        messages = [f"like{name} is not in the checkpoint" for name in given if name not in saved]
        messages += [f"like{name} is missing" for name in saved if name not in given]
        for name in saved.keys() & given.keys() if not messages else ():
            have, want = saved[name], given[name]
            if not have.fits(want):
                what = "shape" if have.shape != want.shape else "dtype"
                messages.append(
                    f"like{name} has {what} {getattr(want, what)}, but the checkpoint has "
                    f"{getattr(have, what)}"
                )
    if messages:
        shown = "; ".join(itertools.islice(sorted(messages), 5))
        more = f" (and {len(messages) - 5} more)" if len(messages) > 5 else ""
        raise ValueError(f"the checkpoint {version} is of something else: {shown}{more}; {hint}")


def _read_manifest(version: Path) -> dict[str, Any]:
    """What a checkpoint is of.

    Raises:
        ValueError: If it cannot be read, for whatever reason.
    """
    path = version / "manifest.json"
    # Format 1 was written by orbax.
    old = not path.exists() and not version.name.startswith("jaxbuf-")
    try:
        manifest, intact = records.read(version / "manifest" / "metadata" if old else path)
    except (OSError, ValueError) as error:
        raise _damaged(version, "its manifest cannot be read") from error
    if "format" not in manifest or not (intact or old):
        raise _damaged(version, "its manifest is not what was saved")
    return manifest


def _write(version: Path, arrays: list[np.ndarray[Any, Any]], chunk: int) -> None:
    """Write the bytes of all arrays, one after the other, to one array on disk."""
    import tensorstore as ts

    parts = [ts.array(array) for array in arrays if array.size]
    if not parts:
        return
    data = ts.concat(parts, axis=0)
    store = zarr.open_rows(version / _DATA, _BYTES, chunk, zarr.new_cache(0), create=True)
    # In rounds: all that is compressed and not yet written is in memory.
    for start in range(0, data.size, _ROUND_BYTES):
        stop = min(data.size, start + _ROUND_BYTES)
        store[start:stop].write(data[start:stop]).result()


def _read(version: Path, manifest: dict[str, Any]) -> Iterator[np.ndarray[Any, Any]]:
    """The bytes of each array in turn."""
    # Keeps the chunk that small arrays share.
    cache = zarr.new_cache(2 * _CHUNK_BYTES)
    store, at = None, 0
    for i, leaf in enumerate(manifest["leaves"].values()):
        if 0 in leaf["shape"]:
            yield np.zeros(0, np.uint8)
        elif manifest["format"] == 1:
            yield _read_orbax(version / "arrays", i)
        else:
            store = store or zarr.open_rows(version / _DATA, _BYTES, manifest["chunk"], cache)
            yield store[at : at + leaf["bytes"]].read().result()
            at += leaf["bytes"]


def _read_orbax(folder: Path, i: int) -> np.ndarray[Any, Any]:
    """The bytes of an array in a checkpoint of format 1, which was written by orbax."""
    import tensorstore as ts

    files = {"driver": "file", "path": f"{folder}/"}
    store = {"driver": "ocdbt", "base": files, "path": f"{i}/"}
    array = ts.open({"driver": "zarr", "kvstore": store}, open=True).result().read().result()
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _damaged(version: Path, why: str) -> ValueError:
    return ValueError(f"the checkpoint {version} is damaged: {why}; nothing else was touched")


def _to_bytes(leaf: Any, name: str) -> np.ndarray[Any, Any]:
    """The numbers of a leaf, ``uint8[N]``."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        raise ValueError(f"{name} is a shape without numbers; pass arrays")
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        raise ValueError(f"{name} is on devices of other processes; save what each of them holds")
    if isinstance(leaf, jax.Array) and structure.is_key(leaf.dtype):
        leaf = jax.random.key_data(leaf)
    array = np.asarray(leaf)
    if array.dtype.hasobject:
        raise ValueError(f"{name} has dtype {array.dtype}; expected numbers")
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _from_bytes(array: Any, saved: Leaf, record: dict[str, Any], like: Any) -> Any:
    if structure.is_key(saved.dtype):
        words = jax.random.key_data(jax.random.key(0, impl=record["key"])).shape
        data = jnp.array(array.view(np.uint32).reshape(*saved.shape, *words))
        return jax.random.wrap_key_data(data, impl=record["key"])
    array = array.view(jnp.dtype(saved.dtype)).reshape(saved.shape)
    scalar = isinstance(like, bool | int | float | complex)
    if saved.scalar and scalar:
        return array.item()
    dtype = jnp.dtype(saved.dtype if scalar else like.dtype)
    if isinstance(like, np.ndarray | np.generic):
        return np.array(array, dtype)
    # A copy in any case: an array that borrows NumPy's memory cannot be updated in place.
    return jnp.array(array, dtype, copy=True)


def _place(leaf: Any, like: Any) -> Any:
    """Put a leaf where that of ``like`` is committed to be."""
    sharding = getattr(like, "sharding", None)
    if isinstance(like, jax.Array) and not like.committed:
        sharding = None
    return leaf if sharding is None else jax.device_put(leaf, sharding)

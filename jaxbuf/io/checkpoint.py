"""Checkpoints of buffers, and of any pytree that holds some.

A pytree's arrays do not say what they mean: with another ``alpha`` the same masses are other
priorities. So a checkpoint also holds the configuration, and loading compares it.
"""

import contextlib
import dataclasses
import itertools
import os
import re
import shutil
import zlib
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxbuf.core.donation import check_there
from jaxbuf.io import describe, resizing
from jaxbuf.io.describe import Leaf

Tree = TypeVar("Tree")

_FORMAT = 1
_NAME = re.compile(r"\d{8,}")
# What is left of a save that was killed.
_UNFINISHED = re.compile(r"\d{8,}\.orbax-checkpoint-tmp.*")


def save(path: str | os.PathLike[str], buffer: Any) -> None:
    """Write a checkpoint to a folder, in place of the one that is there.

    Atomic: a process that is killed at any moment leaves either the previous checkpoint or the new
    one, whole. When it returns all is written, and the buffer may be donated. One process at a time
    may save to a folder.

    Args:
        path: The folder. It is made if needed; other files in it are left alone.
        buffer: A buffer, or any pytree of arrays, PRNG keys and Python numbers with buffers in it:
            a training state. Its arrays must all be on devices of this process.

    Raises:
        ValueError: If ``path`` is a file, a leaf is no array of this process, or one was donated.

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
    folder = Path(path).resolve()
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"path is {path}, which is a file; choose a folder")
    check_there(buffer, "buffer")
    described = describe.leaves(buffer, "buffer")
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    records: dict[str, Any] = {}
    for i, (name, leaf) in enumerate(zip(described, jax.tree.leaves(buffer), strict=True)):
        array = _to_numpy(leaf, f"buffer{name}")
        records[name] = {**dataclasses.asdict(described[name]), "crc32": _checksum(array)}
        if describe.is_key(described[name].dtype):
            records[name]["key"] = str(jax.random.key_impl(leaf))
        if array.size:
            arrays[f"{i}"] = array
    manifest = {
        "format": _FORMAT,
        "configuration": describe.configuration(buffer),
        "leaves": records,
    }

    import orbax.checkpoint as ocp

    folder.mkdir(parents=True, exist_ok=True)
    previous = _versions(folder)
    number = int(previous[-1].name) + 1 if previous else 0
    items: dict[str, Any] = {"manifest": ocp.args.JsonSave(manifest)}
    if arrays:
        items["arrays"] = ocp.args.PyTreeSave(arrays)
    with _checkpointer() as checkpointer:
        checkpointer.save(folder / f"{number:08d}", args=ocp.args.Composite(**items))
    for entry in [*previous, *folder.iterdir()]:
        if entry in previous or _UNFINISHED.fullmatch(entry.name):
            shutil.rmtree(entry, ignore_errors=True)


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
    folder = Path(path).resolve()
    while True:
        versions = _versions(folder)
        if not versions:
            raise FileNotFoundError(f"there is no checkpoint in {path}")
        try:
            return _load(versions[-1], like, resize)
        except ValueError:
            # Another process may have saved meanwhile, and removed what was being read.
            if _versions(folder) == versions:
                raise


def _load(version: Path, like: Tree, resize: bool) -> Tree:
    manifest = _read(version, "manifest")
    if not isinstance(manifest, dict) or "format" not in manifest:
        raise _damaged(version, "its manifest says nothing")
    if manifest["format"] != _FORMAT:
        raise ValueError(
            f"the checkpoint {version} has format {manifest['format']}; this version of jaxbuf "
            f"reads format {_FORMAT}"
        )
    try:
        records = {name: dict(record) for name, record in manifest["leaves"].items()}
        saved = {
            name: Leaf(tuple(record["shape"]), record["dtype"], record["scalar"])
            for name, record in records.items()
        }
        configuration = dict(manifest["configuration"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _damaged(version, "its manifest is incomplete") from error
    target: Any = resizing.as_saved(like, configuration) if resize else like
    _compare(version, configuration, saved, target)

    arrays = _read(version, "arrays") if any(0 not in leaf.shape for leaf in saved.values()) else {}
    places = jax.tree.leaves(target)
    loaded: list[Any] = []
    for i, (name, leaf) in enumerate(saved.items()):
        record = records[name]
        try:
            # Taken out of the dict, so that no more than one leaf is held twice.
            array = arrays.pop(f"{i}") if 0 not in leaf.shape else np.zeros(leaf.shape, np.uint8)
            if record["crc32"] != _checksum(array):
                raise ValueError("the numbers are not those that were saved")
            loaded.append(_from_numpy(array, leaf, record, places[i]))
        except (KeyError, TypeError, ValueError) as error:
            raise _damaged(version, f"{name or 'its array'}: {error}") from error
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
    missing, wanted = "nothing", describe.configuration(target)
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
        given = describe.leaves(target, "like")
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


def _versions(folder: Path) -> list[Path]:
    """The finished checkpoints in a folder, oldest first."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        found = [entry for entry in folder.iterdir() if _NAME.fullmatch(entry.name)]
        return sorted(found, key=lambda entry: int(entry.name))
    return []


def _checkpointer() -> Any:
    import orbax.checkpoint as ocp

    return ocp.Checkpointer(
        ocp.CompositeCheckpointHandler(
            arrays=ocp.PyTreeCheckpointHandler(), manifest=ocp.JsonCheckpointHandler()
        )
    )


def _read(version: Path, item: str) -> Any:
    """One item of a checkpoint.

    Raises:
        ValueError: If that fails, for whatever reason.
    """
    import orbax.checkpoint as ocp

    how = ocp.args.JsonRestore() if item == "manifest" else ocp.args.PyTreeRestore()
    try:
        with _checkpointer() as checkpointer:
            return checkpointer.restore(version, args=ocp.args.Composite(**{item: how}))[item]
    except MemoryError:
        raise
    except Exception as error:
        # Storage has as many errors as layers.
        raise _damaged(version, f"its {item} cannot be read") from error


def _damaged(version: Path, why: str) -> ValueError:
    return ValueError(f"the checkpoint {version} is damaged: {why}; nothing else was touched")


def _to_numpy(leaf: Any, name: str) -> np.ndarray[Any, Any]:
    """The numbers of a leaf, with at least one axis."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        raise ValueError(f"{name} is a shape without numbers; pass arrays")
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        raise ValueError(f"{name} is on devices of other processes; save what each of them holds")
    if isinstance(leaf, jax.Array) and describe.is_key(leaf.dtype):
        leaf = jax.random.key_data(leaf)
    array = np.asarray(leaf)
    return np.ascontiguousarray(array.reshape(1) if array.ndim == 0 else array)


def _from_numpy(array: Any, saved: Leaf, record: dict[str, Any], like: Any) -> Any:
    if describe.is_key(saved.dtype):
        words = jax.random.key_data(jax.random.key(0, impl=record["key"])).shape
        data = jnp.array(array, jnp.uint32).reshape(*saved.shape, *words)
        return jax.random.wrap_key_data(data, impl=record["key"])
    array = np.asarray(array).reshape(saved.shape)
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


def _checksum(array: np.ndarray[Any, Any]) -> int:
    return zlib.crc32(memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data))

"""An assertion about the contents of a buffer."""

import collections
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from jaxbuf.buffers.buffer import as_buffer, check_options
from jaxbuf.core import storage, trees
from jaxbuf.core.donation import check_single
from jaxbuf.core.leaves import to_host
from jaxbuf.core.types import Arrays
from jaxbuf.testing.structures import check_concrete, fetched, report

# The most missing items, and the most unexpected ones, that a message shows.
_SHOWN = 4


def assert_holds(buffer: object, items: Arrays) -> None:
    """Checks that a buffer holds exactly these items, in any order.

    An item that is in the buffer twice must be expected twice. Numbers are compared bit for bit,
    except that all NaNs are equal, and so are 0.0 and -0.0.

    Args:
        buffer: A buffer, also a ``Hosted`` or ``Sharded`` one, or a ``Mixture`` whose parts hold
            the same kind of items. The items of a ``TrajectoryBuffer`` are all its steps, even if
            no window contains them.
        items: The items, leaves ``[n, *shape]``; for a ``TrajectoryBuffer`` the steps.

    Raises:
        AssertionError: If the contents differ. It lists missing and unexpected items.
        ValueError: If the structure, a shape or a dtype of the items differs from the buffer's, or
            ``buffer`` is traced, was donated, or is a batch of buffers.

    Example:
        >>> import jax.numpy as jnp, jaxbuf, jaxbuf.testing
        >>> buffer = jaxbuf.ItemBuffer.create({"x": jnp.int32(0)}, capacity=3)
        >>> buffer = jaxbuf.add(buffer, {"x": jnp.arange(5)})
        >>> jaxbuf.testing.assert_holds(buffer, {"x": jnp.array([4, 2, 3])})
        >>> jaxbuf.testing.assert_holds(buffer, {"x": jnp.array([4, 2, 1, 1])})
        Traceback (most recent call last):
        AssertionError: buffer holds 3 items, which are not the 4 expected:
          missing: 2 × {'x': 1}
          not expected: {'x': 3}
    """
    check_concrete(buffer, "buffer")
    parts, checked = list(_parts(buffer)), items
    for part in parts:
        rows = jax.tree.map(lambda x: jax.ShapeDtypeStruct((1, *x.shape), x.dtype), part.example)
        checked, _ = storage.check(rows, items, "items", ("n",))
    expected, names = _count(checked)
    actual = collections.Counter[bytes]()
    for part in parts:
        counts, part_names = _count(_contents(part))
        actual, names = actual + counts, names | part_names
    problems = [
        *_list("missing", expected - actual, names),
        *_list("not expected", actual - expected, names),
    ]
    kind = "steps" if any(part.unit == "steps" for part in parts) else "items"
    title = f"buffer holds {actual.total()} {kind}, which are not the {expected.total()} expected:"
    report(title, problems)


def _parts(buffer: object) -> Iterator[Any]:
    """Yields the buffers that hold the items: each part of a mixture, and each shard."""
    inner, count = as_buffer(buffer).inside()
    members = as_buffer(inner).members
    for part in members:
        yield from _parts(part)
    if count:
        shards = fetched(inner)
        for i in range(count):
            yield trees.on_device(jax.tree.map(lambda leaf, i=i: leaf[i], shards))
    elif not members:
        check_options(inner, "add", {})
        yield check_single(inner)


def _contents(buffer: Any) -> Arrays:
    """Returns the contents of the buffer, leaves ``[n, ...]``."""
    if buffer.num_envs:
        steps = buffer.gather_all(ignore_earliest=False)
        valid = np.asarray(steps.valid)
        return jax.tree.map(lambda leaf: leaf[valid], steps.data)
    slot = np.arange(buffer.capacity, dtype=np.int32)
    live = np.asarray(buffer.occupancy.live(slot))
    return jax.tree.map(lambda leaf: leaf[live], buffer.data)


def _count(items: Arrays) -> tuple[collections.Counter[bytes], dict[bytes, PyTree]]:
    """Counts items by their bytes, and returns the items with these bytes for messages."""
    leaves, structure = jax.tree.flatten(jax.tree.map(to_host, items))
    count = leaves[0].shape[0]
    # Zeros and NaNs may have different bits.
    canonical = [
        np.where(leaf != leaf, leaf.dtype.type(np.nan), leaf + leaf.dtype.type(0))
        if jnp.issubdtype(leaf.dtype, jnp.inexact)
        else leaf
        for leaf in leaves
    ]
    flat = [
        np.ascontiguousarray(leaf).reshape(count, math.prod(leaf.shape[1:])).view(np.uint8)
        for leaf in canonical
    ]
    keys = [row.tobytes() for row in np.concatenate(flat, axis=1)]
    names = {
        key: jax.tree.unflatten(structure, [leaf[i].tolist() for leaf in leaves])
        for i, key in enumerate(keys)
    }
    return collections.Counter(keys), names


def _list(
    label: str, items: collections.Counter[bytes], names: dict[bytes, PyTree]
) -> Iterator[str]:
    """Yields a line for each of the first items, and one for the number of others."""
    for key, times in list(items.items())[:_SHOWN]:
        yield f"{label}: {f'{times} × ' if times > 1 else ''}{names[key]}"
    others = items.total() - sum(list(items.values())[:_SHOWN])
    if others:
        yield f"{label}: {others} more"

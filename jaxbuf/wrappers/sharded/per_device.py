"""Programs that run on each device of a ``Sharded``, with the shards of this device."""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array, Int

from jaxbuf.buffers.buffer import Buffer
from jaxbuf.buffers.sampled import SampledBuffer
from jaxbuf.core.collectives import mark_replicated
from jaxbuf.core.describe import Described
from jaxbuf.core.types import Arrays
from jaxbuf.core.versions import reshard

Result = TypeVar("Result")

_EXPLICIT = jax.sharding.AxisType.Explicit


class ShardedFields(Buffer, Described):
    """The fields of a ``Sharded``, as its operations take them; see there."""

    shards: SampledBuffer
    num_shards: int = struct.field(pytree_node=False)
    mesh: jax.sharding.Mesh = struct.field(pytree_node=False)
    axis: str = struct.field(pytree_node=False)
    exchange: bool = struct.field(pytree_node=False, default=True)

    on_one_device = False

    @property
    def home(self) -> jax.sharding.Sharding:
        return jax.NamedSharding(self.mesh, jax.P(self.axis))

    @property
    def capacity(self) -> int:
        """The largest number of items, or steps, that all shards together can hold."""
        return self.num_shards * self.shards.capacity

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """The mesh axes over which a batch is split here; empty outside of ``shard_map``."""
        manual = self.axis in jax.sharding.get_abstract_mesh().manual_axes
        return (self.axis,) if manual else ()


def run_on_devices(
    buffer: ShardedFields,
    body: Callable[..., Result],
    rows: Arrays = (),
    replicated: Arrays = (),
    out: jax.P | None = None,
) -> Result:
    """Runs ``body(shards, rows, replicated)`` on each device, with its own shards and rows.

    Inside the caller's ``jax.shard_map`` over the axis this is a plain call. Elsewhere it is mapped
    over the mesh of the buffer.

    Args:
        buffer: The buffer.
        body: A function of the arrays on one device; its shards have a leading axis ``S / D``.
        rows: Arrays whose first axis is sharded.
        replicated: Arrays that are the same on every device.
        out: The ``PartitionSpec`` of the results; by default that of the shards.

    Raises:
        ValueError: If the program runs on another mesh than the buffer's, or a caller's
            ``shard_map`` does not split the buffer.
    """
    current = jax.sharding.get_abstract_mesh()
    mesh = buffer.mesh if current.empty else current
    spec = jax.P(buffer.axis)
    if mesh.shape.get(buffer.axis) != buffer.mesh.shape[buffer.axis]:
        raise ValueError(
            f"buffer was created on a mesh of {dict(buffer.mesh.shape)}, but this program runs "
            f"on one of {dict(mesh.shape)}; create it on that mesh, or save and load it"
        )
    if buffer.batch_axes:
        local = num_local(buffer.shards)
        if local * mesh.shape[buffer.axis] != buffer.num_shards:
            raise ValueError(
                f"buffer has {local} of its {buffer.num_shards} shards on each of "
                f"{mesh.shape[buffer.axis]} devices; pass it to shard_map by in_specs={spec}"
            )
        result = body(buffer.shards, rows, replicated)
        return result if out is None else mark_replicated(result, buffer.axis)
    args, specs = (buffer.shards, rows, replicated), (spec, spec, jax.P())
    if dict(zip(mesh.axis_names, mesh.axis_types, strict=True))[buffer.axis] == _EXPLICIT:
        # With explicit sharding, shard_map requires arguments with the shardings of its in_specs.
        args = tuple(
            reshard(tree, jax.NamedSharding(mesh, spec))
            for tree, spec in zip(args, specs, strict=True)
        )
    mapped = jax.shard_map(
        lambda *args: body(*jax.tree.map(_constant_if_empty, args)),
        mesh=buffer.mesh if current.empty else None,
        in_specs=specs,
        out_specs=spec if out is None else out,
        axis_names={buffer.axis},
        check_vma=False,
    )
    return mapped(*args)


def _constant_if_empty(leaf: Array) -> Array:
    """Returns an array without elements as a constant: XLA of jaxlib 0.11.2 crashes on others."""
    return jnp.zeros_like(leaf) if leaf.size == 0 else leaf


def num_local(shards: Arrays) -> int:
    """Returns the number of shards among these, ``L = S / D`` on each device."""
    return jax.tree.leaves(shards)[0].shape[0]


def map_shards(
    function: Callable[..., Result], in_axes: int | tuple[int | None, ...] = 0
) -> Callable[..., Result]:
    """Returns ``jax.vmap(function, in_axes)``, to be called with the shards of this device.

    A single shard is not mapped: its loops end by its own conditions, XLA updates what they carry
    in place, and a TPU lays its arrays out as those of any buffer, without a copy. Where a kernel
    updates an array in place use ``jax.vmap``: without the axis, XLA:CPU copies the array.
    """

    def call(*args: Arrays) -> Result:
        axes = (in_axes,) * len(args) if isinstance(in_axes, int) else in_axes
        if num_local([arg for arg, axis in zip(args, axes, strict=True) if axis == 0]) > 1:
            return jax.vmap(function, in_axes)(*args)
        single = [
            arg if axis is None else jax.tree.map(lambda leaf: jnp.squeeze(leaf, 0), arg)
            for arg, axis in zip(args, axes, strict=True)
        ]
        return jax.tree.map(lambda leaf: jnp.expand_dims(leaf, 0), function(*single))

    return call


def shard_ids(shards: Arrays, axis: str) -> Int[Array, " L"]:
    """Returns the indices of the shards on this device."""
    local = num_local(shards)
    return lax.axis_index(axis) * local + jnp.arange(local, dtype=jnp.int32)
